"""What a model's own code does around its layers: the same numbers on every cut, or a refusal that says what it is."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from models import Case
from odd_glue_models import GLUE, Stack, rows
from odd_models import squares
from side_by_side import difference, possible_cuts, run_cut, run_whole, split, stage_models

from partitioner.capture import capture
from partitioner.errors import UnsupportedModelError

NUM_STEPS = 7
"""Enough for the schedules of these models to move."""


def worst_over_steps(case: Case, cuts: list[str], layers: list[str] | None = None) -> float:
    captured = capture(case.model, case.args, max_share=0.0)
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
    cuts = possible_cuts(capture(case.model, case.args, max_share=0.0))
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
