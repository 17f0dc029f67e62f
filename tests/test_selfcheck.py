"""A split that is right passes; one that is not is refused, and either way the model is as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, build
from side_by_side import even_cuts, quiet, split
from torch import nn
from torch.nn import functional as F

from partitioner.capture import Capture, capture
from partitioner.errors import UnsupportedModelError
from partitioner.losses import Loss
from partitioner.microbatches import Cutter, MicroBatch
from partitioner.selfcheck import check_split
from partitioner.shared import SharedState


@pytest.mark.parametrize("name", CASES)
def test_every_model_passes_and_is_left_as_it_was(name: str) -> None:
    case = quiet(lambda: build(name))
    captured = capture(case.model, case.args, case.kwargs, max_share=1 / 10)
    first, second = Cutter().cut(case.args, case.kwargs or {}, case.target, 2)
    before = copy.deepcopy(case.model.state_dict())
    state = torch.get_rng_state()
    loss = Loss(case.model, case.loss_fn, None)
    worst = check_split(case.model, captured, split(captured, even_cuts(captured, 3)), first, loss, second=second)
    assert worst < 1e-5
    assert all(torch.equal(value, before[key]) for key, value in case.model.state_dict().items())
    assert all(parameter.grad is None for parameter in case.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def square(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output.pow(2).mean()


def checked(model: nn.Module, cut: str, loss_fn: Callable[..., torch.Tensor] = square) -> float:
    x = torch.linspace(-1, 1, 12).view(3, 4)
    captured = capture(model, (x,), max_share=0)
    part = MicroBatch((x,), {}, None, 3)
    return check_split(model, captured, split(captured, [cut]), part, Loss(model, loss_fn, None))


class Secret(nn.Module):
    """Layers that talk to each other past everything that is watched: through the module's own dictionary."""

    def __init__(self, writes: str, reads: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.said = [1.0]
        self.layers[int(writes[-1])].register_forward_hook(self.say)
        self.layers[int(reads[-1])].register_forward_pre_hook(self.hear)

    def say(self, module: nn.Module, args: object, out: torch.Tensor) -> None:
        vars(self)["said"] = [float(out.detach().abs().sum())]

    def hear(self, module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (args[0] * self.said[0],)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_an_earlier_stage_leaves_on_a_module_reaches_a_later_one_only_where_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Secret("layers.1", "layers.2")
    assert checked(model, "layers.1") < 1e-6
    assert checked(model, "layers.2") < 1e-6
    monkeypatch.setattr(SharedState, "apply", lambda self, codes, stand_in: None)
    with pytest.raises(UnsupportedModelError, match=r"cut before layers\.2.*differs by"):
        checked(model, "layers.2")


def test_the_second_round_shows_what_the_first_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number said late in one step is heard early in the next."""
    model = Secret("layers.3", "layers.0")
    with pytest.raises(UnsupportedModelError, match=r"layer layers\.3 .* changes 'said' from \[1\.0\] to"):
        checked(model, "layers.2")
    monkeypatch.setattr(SharedState, "changes", lambda self, who, **how: [])
    with pytest.raises(UnsupportedModelError, match="differs"):
        checked(model, "layers.2")


def test_a_model_that_differs_from_itself_is_not_blamed_on_the_split() -> None:
    noise = iter(torch.rand(100, generator=torch.Generator().manual_seed(0)).tolist())

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)) * (1 + 1e-3 * next(noise))

    checked(Noisy(), "b")


def test_a_model_that_never_repeats_itself_cannot_pass() -> None:
    """Its layers share a counter that is outside of the model: on ranks that each run some of them it would differ."""
    count = 0

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return self.b(self.a(x)) * (1 + count % 3)

    with pytest.raises(UnsupportedModelError, match=r"cut before b, the model cannot be checked.*differs from itself"):
        checked(Counting(), "b")


def test_a_loss_that_reads_weights_of_earlier_stages_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def penalised(output: torch.Tensor, target: Any, weights: nn.Module = model) -> torch.Tensor:
        return square(output, target) + sum(weight.pow(2).sum() for weight in weights.parameters())

    with pytest.raises(UnsupportedModelError, match=r"the loss uses the parameter '0\.(weight|bias)'"):
        checked(model, "1", penalised)
    assert checked(model, "1", lambda output, target: penalised(output, target, model[1])) == 0


def test_dropout_and_frozen_models_are_checked_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))
    assert checked(model, "2") == 0
    assert checked(model.requires_grad_(False), "2") == 0
    assert checked(model, "2", lambda output, target: F.softplus(output).sum()) == 0


def test_a_wrong_capture_is_found_out() -> None:
    """A tensor that is missing from the routes is an error, not another number."""
    case = quiet(lambda: build("unet"))
    captured = capture(case.model, case.args, max_share=1 / 4)
    fewer = Capture(**(vars(captured) | {"tensors": captured.tensors[1:]}))
    part = MicroBatch(case.args, {}, case.target, 8)
    cut = captured.tensors[0].consumers[-1]
    with pytest.raises(UnsupportedModelError, match="did not send"):
        check_split(case.model, fewer, split(fewer, [cut]), part, Loss(case.model, case.loss_fn, None))
