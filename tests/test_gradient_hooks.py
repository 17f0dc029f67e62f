"""Hooks on gradients of which a stage has a part only: the same numbers as on one device, or no cut, or a refusal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_flight import worst_in_flight
from models import Case
from odd_glue_models import Stack, rows
from odd_models import squares
from side_by_side import possible_cuts
from torch import nn

from partitioner import gradient_hooks
from partitioner.capture import capture
from partitioner.errors import UnsupportedModelError
from partitioner.gradient_hooks import hooks_on, is_linear


class Counted:
    """Multiplies by a number, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return gradient * 3


mask = torch.tensor([[1.0], [0.0], [1.0]])
HOOKS: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
    "a factor": (lambda g: g * 0.5, True),
    "a mask": (lambda g: g * mask, True),
    "a mask in place": (lambda g: g.mul_(mask), True),
    "nothing": (lambda g: None, True),
    "a transposition": (lambda g: g.flip(0), True),
    "a clamp": (lambda g: g.clamp(-0.1, 0.1), False),
    "a wide clamp": (lambda g: g.clamp(-1000, 1000), False),
    "a norm": (lambda g: g / g.norm(), False),
    "a clip by norm": (lambda g: g * min(1.0, 5.0 / float(g.norm())), False),
    "a sign": (lambda g: g.sign(), False),
    "a sum with something": (lambda g: g + 0.01, False),
    "noise": (lambda g: g + 0.1 * torch.randn_like(g), False),
    "an error": (lambda g: 1 / 0, False),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_tried_out(name: str) -> None:
    hook, expected = HOOKS[name]
    assert is_linear(hook, nn.Parameter(torch.randn(3, 2))) == expected


def test_a_trial_leaves_what_hooks_count() -> None:
    counted, counts, model = Counted(), {"calls": 0}, Stack(2)
    weight = model.layers[0].weight
    weight.register_hook(counted)
    weight.register_hook(lambda g: counts.update(calls=counts["calls"] + 1))
    assert not gradient_hooks.hooked(model, [("weight", weight)])
    assert counted.calls == counts["calls"] == 0


class Tied(Stack):
    """The first and the last layer have one weight; `late` sets in with the 6th call."""

    def __init__(self, late: Callable[[Tied, torch.Tensor], None] = lambda model, x: None, scale: float = 1.0) -> None:
        super().__init__(5)
        self.layers[4].weight = self.layers[0].weight
        self.late, self.scale = late, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if k == 0:
                first = x
            if k == 3 and self.calls >= 6:
                self.late(self, first)
        return x * (0.3 if self.calls < 6 else self.scale)


def hooked(how: Callable[[nn.Parameter], Any], scale: float = 50.0) -> Callable[[], Case]:
    def build() -> Case:
        torch.manual_seed(0)
        model = Tied(scale=scale)
        how(model.layers[0].weight)
        return rows(model, squares)

    return build


def clamping_after(parameter: nn.Parameter) -> None:
    parameter.register_post_accumulate_grad_hook(lambda one: one.grad.clamp_(-0.003, 0.003))


def cuts_of(case: Case) -> list[str]:
    return possible_cuts(capture(case.model, case.args, max_share=0.0))


def test_a_linear_hook_on_a_tied_weight_goes_over_cuts() -> None:
    counted = Counted()
    build = hooked(lambda parameter: parameter.register_hook(counted))
    assert cuts_of(build()) == ["layers.1", "layers.2", "layers.3", "layers.4"]
    assert worst_in_flight(build, ["layers.2"]) < 1e-9


def test_a_hook_that_counts_in_a_variable_around_it_is_not_ahead_after_it_was_tried() -> None:
    calls = 0

    def count(gradient: torch.Tensor, by: int) -> torch.Tensor:
        nonlocal calls
        calls += by
        return gradient * 2

    model = nn.Linear(2, 2)
    model.weight.register_hook(functools.partial(count, by=1))
    assert gradient_hooks.hooked(model, [("weight", model.weight)]) == {} and calls == 0
    model.weight.sum().backward()
    assert calls == 1


@pytest.mark.parametrize(
    "how", [lambda parameter: parameter.register_hook(lambda g: g.clamp(-0.02, 0.02)), clamping_after]
)
def test_no_cut_where_a_hook_must_see_the_whole_gradient_of_a_weight(how: Callable[[nn.Parameter], Any]) -> None:
    build = hooked(how)
    assert cuts_of(build()) == []
    with pytest.raises(UnsupportedModelError, match=r"on the gradient of 'layers.0.weight' .* on stages \[0, 1\]"):
        worst_in_flight(build, ["layers.2"])  # as where the hook was put there after the plan was made


def test_a_hook_that_the_forward_puts_on_a_tied_weight_late_is_refused_in_that_forward() -> None:
    def late(model: Tied, x: torch.Tensor) -> None:
        if not hooks_on(model.layers[0].weight):
            model.layers[0].weight.register_hook(lambda g: g.sign())

    with pytest.raises(UnsupportedModelError, match=r"<lambda>. on the gradient of 'layers.0.weight'"):
        worst_in_flight(lambda: rows(Tied(late), squares), ["layers.2"])


class Skip(Stack):
    """The first hidden state is used again behind the third layer; from the 6th call on a hook limits its gradient."""

    def __init__(self, begins: int, in_layer: bool = False) -> None:
        super().__init__(5)
        self.begins, self.in_layer = begins, in_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        first = torch.tanh(self.layers[0](x))
        x = torch.tanh(self.layers[2](torch.tanh(self.layers[1](first))))
        if self.calls >= self.begins:
            first.register_hook(lambda g: g.clamp(-0.0002, 0.0002))
        return torch.tanh(self.layers[4](torch.tanh(self.layers[3](x + first))))


def test_no_cut_where_a_hook_must_see_the_whole_gradient_of_a_tensor() -> None:
    torch.manual_seed(0)
    assert cuts_of(rows(Skip(0), squares)) == ["layers.3", "layers.4"]
    assert cuts_of(rows(Skip(100), squares)) == ["layers.1", "layers.2", "layers.3", "layers.4"]

    def build(begins: int) -> Callable[[], Case]:
        def made() -> Case:
            torch.manual_seed(0)
            return rows(Skip(begins), squares)

        return made

    assert worst_in_flight(build(0), ["layers.3"]) < 1e-9
    with pytest.raises(UnsupportedModelError, match=r"stage 1 puts a hook on the gradient of 'layers.0/0'"):
        worst_in_flight(build(6), ["layers.2", "layers.4"])
