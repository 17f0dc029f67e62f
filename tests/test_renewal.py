"""Pending backwards find the buffers and attributes that their own forwards left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from partitioner.reaching import Reach
from partitioner.renewal import Kept, Then, become


class Annealed(nn.Module):
    """Divides by how often it was called: a number in Python, and one in a buffer."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.inner, self.again, self.calls = nn.Linear(3, 3), again, 0
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        with torch.no_grad():
            self.scale += 1
        return checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x) / self.calls) * self.scale


def kept_of(model: nn.Module) -> Kept:
    return Kept(Reach(model, lambda path: 1).places.values())


def gradients(again: bool, *, in_turn: bool) -> list[torch.Tensor]:
    """Of three samples: each backward after its forward, or all after all forwards."""
    torch.manual_seed(0)
    model = Annealed(again)
    kept = kept_of(model)
    pending: list[tuple[torch.Tensor, Then | None]] = []
    for sample in torch.randn(3, 2, 3):
        loss = model(sample).square().sum()
        pending.append((loss, kept.end()))
        if in_turn:
            loss.backward()
    for loss, then in pending if not in_turn else []:
        with kept.as_after(then):
            loss.backward()
    assert model.calls == 3 and torch.equal(model.scale, torch.full((3,), 4.0))
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("again", [False, True])
def test_gradients_are_those_of_one_backward_after_each_forward(again: bool) -> None:
    for one, other in zip(gradients(again, in_turn=True), gradients(again, in_turn=False), strict=True):
        torch.testing.assert_close(one, other)


def test_without_it_torch_refuses_or_the_checkpoint_reads_what_came_later() -> None:
    """What this is for: the same model, its forwards one after another and then its backwards."""
    torch.manual_seed(0)
    plain, samples = Annealed(again=False), torch.randn(3, 2, 3)
    losses = [plain(sample).square().sum() for sample in samples]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[0].backward()
    torch.manual_seed(0)
    again = Annealed(again=True)
    torch.stack([again(sample).square().sum() for sample in samples]).sum().backward()
    expected = gradients(True, in_turn=True)
    assert not torch.allclose(again.inner.weight.grad, expected[0])  # type: ignore[arg-type]


def test_numbers_that_a_backward_counts_up_stay_counted() -> None:
    model = nn.Module()
    model.calls, model.steps = 0, torch.zeros(())
    kept = kept_of(model)
    thens = []
    for _ in range(2):
        model.calls += 1
        model.steps += 1
        thens.append(kept.end())
    for then in thens:
        with kept.as_after(then):
            model.calls += 1  # as a checkpoint that runs again
            model.steps += 1
    assert (model.calls, float(model.steps)) == (4, 4.0)


def test_nothing_is_kept_of_a_model_that_changes_nothing() -> None:
    model = nn.Linear(2, 2)
    kept = kept_of(model)
    model(torch.randn(1, 2))
    assert kept.end() is None


def test_memory_that_others_look_at_stays_where_it_is() -> None:
    tensor: Any = torch.zeros(3)
    view = tensor[1:]
    assert not become(tensor, torch.ones(3)) and not tensor.any()
    del view
    before = tensor._version
    assert become(tensor, torch.ones(3)) and bool(tensor.all()) and tensor._version == before
