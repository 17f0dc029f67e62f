"""Pending backwards find the buffers and attributes that their own forwards left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from partitioner.reaching import Reach
from partitioner.renewal import MAX_RELEASED, Kept, Then, become


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


class Stack(nn.Module):
    """Multiplies by its input, which its backward takes from a list or another container."""

    def __init__(self, kept: Any, take: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.kept, self.take = nn.Linear(3, 3), kept, take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Multiply.apply(self.inner(x), self)
        return found


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stack: Stack) -> torch.Tensor:
        ctx.stack = stack
        stack.kept.append(x.detach())
        return x.square() / 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.stack.take(ctx.stack.kept), None


TAKES: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.Tensor], int]] = {
    "the last one of a list": (list, lambda kept: kept[-1], 4),
    "the last one off a list": (list, lambda kept: kept.pop(), 0),
    "the first one off a list": (list, lambda kept: kept.pop(0), 0),
    "the last one of a short deque": (lambda: deque(maxlen=2), lambda kept: kept[-1], 2),
    "the first one off a deque": (deque, lambda kept: kept.popleft(), 0),
}


@pytest.mark.parametrize("how", TAKES)
@pytest.mark.parametrize("order", ["F0 B0 F1 B1 F2 B2 F3 B3", "F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3"])
def test_a_backward_finds_lists_as_its_forward_left_them(how: str, order: str) -> None:
    make, take, left = TAKES[how]
    torch.manual_seed(0)
    model = Stack(make(), take)
    samples, kept = torch.randn(4, 2, 3), kept_of(model)
    losses: dict[str, tuple[torch.Tensor, Then | None]] = {}
    for action in order.split():
        if action[0] == "F":
            losses[action[1]] = (model(samples[int(action[1])]).sum(), kept.end())
        else:
            loss, then = losses.pop(action[1])
            with kept.as_after(then):
                loss.backward()
            del loss, then
    gradient = model.inner.weight.grad
    model.zero_grad()
    (model.inner(samples).square() / 2).sum().backward()
    torch.testing.assert_close(gradient, model.inner.weight.grad)
    assert len(model.kept) == left


class _Taken(torch.autograd.Function):
    """Keeps its input in a dict of the module's under a number, and takes it out in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Any) -> torch.Tensor:
        module.calls += 1
        ctx.number, ctx.module = module.calls, module
        module.kept[ctx.number] = x.detach()
        return x.square() / 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        taken = ctx.module.kept.pop(ctx.number)
        return gradients[0] * taken * (1 + len(ctx.module.kept)), None


@pytest.mark.parametrize("order", ["F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3"])
def test_what_a_backward_takes_out_of_a_dict_is_gone_for_the_next(order: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 3)
    model.calls, model.kept = 0, {}
    samples, kept, pending = torch.randn(4, 2, 3), kept_of(model), {}
    for action in order.split():
        if action[0] == "F":
            pending[action[1]] = (_Taken.apply(model(samples[int(action[1])]), model).sum(), kept.end())
        else:
            loss, then = pending.pop(action[1])
            with kept.as_after(then):
                loss.backward()
            del loss, then
    gradient = model.weight.grad
    model.zero_grad()
    (model(samples).square() / 2).sum().backward()
    torch.testing.assert_close(gradient, model.weight.grad)
    assert not model.kept


def test_nothing_is_kept_of_a_model_that_changes_nothing() -> None:
    model = nn.Linear(2, 2)
    kept = kept_of(model)
    model(torch.randn(1, 2))
    then = kept.end()
    assert kept.end() is then and isinstance(kept.as_after(then), nullcontext)


class Late(nn.Module):
    """Changes an attribute and a buffer from its third forward on, and runs again with what it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.factor = nn.Linear(3, 3), [0], 1.0
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor, is_late: bool) -> torch.Tensor:
        if is_late:
            self.factor += 1
            self.scale *= 3
        found: torch.Tensor = checkpoint(self.body, x, use_reentrant=False)
        return found

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x) * self.factor) * self.scale


def test_backwards_from_before_the_first_change_find_what_was_there() -> None:
    expected: list[torch.Tensor] = []
    for in_turn in (True, False):
        torch.manual_seed(0)
        model = Late()
        kept, pending = kept_of(model), []
        for k, sample in enumerate(torch.randn(4, 2, 3)):
            pending.append((model(sample, k >= 2).sum(), kept.end()))
            if in_turn:
                pending.pop()[0].backward()
        for loss, then in pending:
            with kept.as_after(then):
                loss.backward()
        assert model.factor == 3.0 and float(model.scale[0]) == 9.0
        expected.append(model.inner.weight.grad)  # type: ignore[arg-type]
    torch.testing.assert_close(*expected)


def test_memory_that_others_look_at_stays_where_it_is() -> None:
    tensor: Any = torch.zeros(3)
    view = tensor[1:]
    assert not become(tensor, torch.ones(3)) and not tensor.any()
    del view
    before = tensor._version
    assert become(tensor, torch.ones(3)) and bool(tensor.all()) and tensor._version == before


class Silent(nn.Module):
    """Writes into what it multiplies by where version counters do not tell: later, or in every forward."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], None], of_view: bool, late: bool) -> None:
        super().__init__()
        self.inner, self.write, self.of_view, self.late, self.calls = nn.Linear(3, 3), write, of_view, late, 0
        self.register_buffer("table", torch.eye(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1 or not self.late:
            self.write(self.table, x)
        return torch.tanh(self.inner(x)) @ (self.table.t() if self.of_view else self.table)


def in_place(table: torch.Tensor, x: torch.Tensor) -> None:
    with torch.no_grad():
        table.mul_(0.5).add_(x.mean())


def into_data(table: torch.Tensor, x: torch.Tensor) -> None:
    table.data.mul_(0.5).add_(x.mean())


def as_data(table: torch.Tensor, x: torch.Tensor) -> None:
    table.data = table.data * 0.5 + x.mean()


def by_numpy(table: torch.Tensor, x: torch.Tensor) -> None:
    array = table.numpy()
    array *= 0.5
    array += float(x.mean())


@pytest.mark.parametrize("write", [in_place, into_data, as_data, by_numpy])
@pytest.mark.parametrize("of_view", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_what_graphs_have_saved_stays_as_it_was(write: Any, of_view: bool, late: bool) -> None:
    found = []
    for in_turn in (True, False):
        torch.manual_seed(0)
        model = Silent(write, of_view, late)
        kept, losses = kept_of(model), []
        for sample in torch.randn(3, 2, 3):
            losses.append((model(sample).square().sum(), kept.end()))
            if in_turn:
                losses.pop()[0].backward()
        for loss, then in losses:
            with kept.as_after(then):
                loss.backward()
        found.append((model.inner.weight.grad, model.table))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("write", [in_place, into_data, as_data, by_numpy])
@pytest.mark.parametrize("of_view", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_large_tensors_too_where_every_forward_changes_them(write: Any, of_view: bool, checkpointed: bool) -> None:
    class Large(Silent):
        def read(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(x)) @ (self.table.t() if self.of_view else self.table)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.write(self.table, x)
            return checkpoint(self.read, x, use_reentrant=False) if checkpointed else self.read(x)  # type: ignore[no-any-return]

    found = []
    for in_turn in (True, False):
        torch.manual_seed(0)
        model = Large(write, of_view, late=False)
        model.table = torch.eye(3).repeat(1, MAX_RELEASED // 36 + 1) / 99
        if of_view:
            model.table = model.table.t().contiguous()
        kept, losses = kept_of(model), []
        for sample in torch.randn(3, 2, 3):
            kept.begin()
            losses.append((model(sample).square().mean(), kept.end()))
            if in_turn:
                losses.pop()[0].backward()
        for loss, then in losses:
            with kept.as_after(then):
                loss.backward()
        found.append(model.inner.weight.grad)
    torch.testing.assert_close(found[0], found[1])


def test_memory_that_a_module_looks_at_in_two_ways_stays_one() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.ones(4))
    model.view, model.array = model.table[:2], None
    other = nn.Module()
    other.register_buffer("table", torch.ones(4))
    other.array = other.table.numpy()
    weight = nn.Parameter(torch.ones(4))
    for one, look in ((model, lambda: model.view), (other, lambda: torch.from_numpy(other.array))):
        kept = kept_of(one)
        loss = (weight * one.table).sum()
        kept.end()
        one.table.data.fill_(3.0)
        assert float(look()[0]) == 3.0
        del loss


def test_a_buffer_that_looks_at_a_parameter_goes_on_to_do_so() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(4.0))
            self.register_buffer("view", self.weight.data[1:3])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).sum() + (x[:2] * self.view).sum()

    model, x = Looks(), torch.ones(4, requires_grad=True)
    kept = Kept(Reach(model, lambda path: 1).places.values(), parameters=model.parameters())
    for step in range(4):
        kept.begin()
        loss = model(x)
        kept.end()
        loss.backward()
        with torch.no_grad():
            model.weight += step + 1
        assert torch.equal(model.view, model.weight[1:3])
