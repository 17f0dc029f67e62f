"""What a model's own code does around its layers: the same numbers on every cut, or a refusal that says what it is."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from models import Case
from odd_everyday_models import EVERYDAY
from odd_glue_models import GLUE, Stack, rows
from odd_models import ODD, squares
from odder_models import ODDER
from oddest_models import ODDEST
from side_by_side import difference, possible_cuts, run_cut, run_whole, split, stage_models

from partitioner.capture import Capture, capture
from partitioner.errors import UnsupportedModelError
from partitioner.losses import Loss

NUM_STEPS = 7
"""Enough for the schedules of these models to move."""


def captured_with_loss(case: Case) -> Capture:
    loss = Loss(case.model, case.loss_fn, None).against(case.target)
    return capture(case.model, case.args, max_share=0.0, loss=loss)


def worst_over_steps(case: Case, cuts: list[str], layers: list[str] | None = None) -> float:
    captured = captured_with_loss(case)
    stage_of = split(captured, cuts)
    whole, models = copy.deepcopy(case.model), stage_models(case.model, captured, stage_of)
    worst = 0.0
    for step in range(NUM_STEPS):
        expected = run_whole(case, seed=step, model=whole)
        worst = max(worst, difference(expected, run_cut(case, captured, stage_of, seed=step, models=models))[0])
    return worst


@pytest.mark.parametrize("name", GLUE)
def test_models_whose_own_code_does_more_are_cut_at_every_layer(name: str) -> None:
    case = GLUE[name]()
    cuts = possible_cuts(captured_with_loss(case))
    assert cuts
    for cut in cuts[:: 1 + len(cuts) // 4]:
        assert worst_over_steps(case, [cut]) < 1e-6, cut
    if len(cuts) > 1:
        assert worst_over_steps(case, [cuts[0], cuts[-1]]) < 1e-6


class SetAgain(Stack):
    """The model's own code sets a temperature first, and after its third layer anew: the same until `late`."""

    def __init__(self, late: Callable[[int], float]) -> None:
        super().__init__()
        self.late, self.temperature = late, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = x * self.temperature
        self.temperature = 1.0
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * self.temperature
            if k == 2:
                self.temperature = self.late(self.calls)
        return x


def test_what_is_set_again_behind_the_cut_is_refused_where_the_next_forward_would_begin_with_another_value() -> None:
    case = rows(SetAgain(lambda calls: 1.0 if calls < 5 else 2.0), squares)
    assert worst_over_steps(rows(SetAgain(lambda calls: 1.0), squares), ["layers.1"]) < 1e-6
    with pytest.raises(UnsupportedModelError, match=r"changes 'temperature' from 1\.0 to 2\.0, which stage 0 reaches"):
        worst_over_steps(case, ["layers.1"])


class Kept:
    """What a cache of keys and values is: an object that is returned and that no loss looks at."""

    def __init__(self) -> None:
        self.layers: list[torch.Tensor] = []


class Caching(Stack):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Kept]:
        cache = Kept()
        for layer in self.layers:
            cache.layers.append(x * 2)
            x = torch.tanh(layer(x))
        return x, cache


@pytest.mark.parametrize(("reads", "sent"), [(False, 1), (True, 4)])
def test_of_a_returned_object_only_what_the_loss_reads_is_sent(reads: bool, sent: int) -> None:
    def loss_fn(output: tuple[torch.Tensor, Kept], target: None) -> torch.Tensor:
        kept = output[1].layers if reads else []
        return output[0].square().mean() + sum(tensor.square().mean() for tensor in kept)

    case = rows(Caching(), loss_fn)
    last = [tensor for tensor in captured_with_loss(case).tensors if "layers.3" in tensor.consumers]
    # The first that is kept is made of the inputs, which every stage has.
    assert len(last) == sent
    assert worst_over_steps(case, ["layers.3"]) < 1e-6


class Counts(Stack):
    """Counts at the end of its forward what the next one begins with; `and_then` is what it or a layer does besides."""

    def __init__(self, and_then: Callable[[Counts, torch.Tensor], None], by_layer: bool = False) -> None:
        super().__init__()
        self.and_then, self.by_layer, self.bonus, self.past = and_then, by_layer, 1, 0
        if by_layer:
            vars(self.layers[3])["parents"] = [self]
            self.layers[3].register_forward_hook(lambda module, args, output: and_then(module.parents[0], output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.past += 1
        x = self.run(x * (1 + 0.1 * self.calls))
        self.calls += self.bonus
        if not self.by_layer:
            self.and_then(self, x)
        return x


def by_tensor(model: Counts, x: torch.Tensor) -> None:
    model.calls += int(x.sum() > -100)


def by_tensor_late(model: Counts, x: torch.Tensor) -> None:
    if model.past > 4:
        model.calls += int(x.sum() > -100)


def more_late(model: Counts, x: torch.Tensor) -> None:
    if model.past > 4:
        model.bonus = 2


def twice(model: Counts, x: torch.Tensor) -> None:
    model.calls += 1


def test_what_depends_on_values_or_layers_is_not_foretold() -> None:
    for model in (Counts(by_tensor), Counts(twice, by_layer=True)):
        captured = capture(model, (torch.randn(4, 8),), max_share=0.0)
        assert not any(one.foretold for one in captured.attributes if one.name == "calls")


@pytest.mark.parametrize("and_then", [by_tensor_late, more_late])
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("cuts", [["layers.1"], ["layers.1", "layers.3"]])
def test_what_comes_otherwise_than_it_was_foretold_is_refused(
    and_then: Callable[[Counts, torch.Tensor], None], by_layer: bool, cuts: list[str]
) -> None:
    """That stage has begun the next micro-batch with another number."""
    case = rows(Counts(and_then, by_layer), squares)
    with pytest.raises(UnsupportedModelError, match=r"changes '(calls|bonus)' from .*, which stage 0 reaches"):
        worst_over_steps(case, cuts)


def test_what_layers_to_come_are_handed_is_not_foretold() -> None:
    """Each layer counts in an object that the model makes anew and hands to it, and the buffers are single numbers."""
    for name in ("auxiliary_losses_on_a_shared_state", "queue_of_keys"):
        case = {**ODD, **ODDER, **ODDEST, **EVERYDAY}[name]()
        captured = captured_with_loss(case)
        cuts = possible_cuts(captured)
        assert cuts
        assert worst_over_steps(case, [cuts[len(cuts) // 2]]) < 1e-6
