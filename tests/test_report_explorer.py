"""The notebook's explorer, its sliders moved by hand: what it shows is what the simulator says of that split."""

from __future__ import annotations

import warnings

import pytest
from drawn_plans import drawn_plan
from parsed_html import Parsed

from partitioner.errors import ArgumentError
from partitioner.graph import CostGraph
from partitioner.plan import Plan
from partitioner.report.explorer import Exploration, Explorer, even_cuts
from partitioner.report.wording import percent, seconds
from partitioner.simulator import simulate

PLAN = drawn_plan(memory_bytes=2**28)


@pytest.fixture
def explorer() -> Explorer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ipywidgets' own, without a kernel
        return PLAN.explore()


def shown(explorer: Explorer) -> dict[str, list[str]]:
    figures = Parsed(explorer.view.value).tables[0]
    return {row[0]: row[1:] for row in figures[1:]}


def test_it_begins_with_the_plan(explorer: Explorer) -> None:
    assert explorer.current.stages == PLAN.stages
    assert explorer.current.prediction == PLAN.prediction
    total_s = PLAN.prediction.step_s + PLAN.prediction.optimizer_s
    assert shown(explorer)["step + optimizer"] == [seconds(total_s), seconds(total_s), "+0.0 %"]


def test_moving_a_cut_shows_what_the_simulator_says_of_it(explorer: Explorer) -> None:
    explorer.cut.value = 1
    layer, at = explorer.position.options[2]
    explorer.position.value = at
    plan = explorer.current
    assert plan.stages[2].layers[0] == layer
    assert plan.stages[0] == PLAN.stages[0] and plan.stages[3] == PLAN.stages[3]
    assert simulate(Plan.model_validate(plan.model_dump())).step_s == pytest.approx(plan.prediction.step_s)
    figures = shown(explorer)
    assert figures["step + optimizer"][0] == seconds(plan.prediction.step_s + plan.prediction.optimizer_s)
    assert figures["bubble"][:2] == [percent(one.prediction.bubble_fraction) for one in (plan, PLAN)]
    assert figures["slowest stage over the mean"][0] != figures["slowest stage over the mean"][1]


def test_a_cut_stays_between_its_neighbours(explorer: Explorer) -> None:
    explorer.cut.value = 1
    assert [at for _, at in explorer.position.options] == list(range(11, 30))
    explorer.position.value = 11
    explorer.cut.value = 0
    assert [at for _, at in explorer.position.options] == list(range(1, 11))


def test_microbatches_and_schedules_are_those_that_are_possible(explorer: Explorer) -> None:
    assert tuple(explorer.microbatches.options) == (1, 2, 4, 8)
    assert {"gpipe", "1f1b", "zero-bubble", "zero-bubble-h2"} == set(explorer.schedule.options)
    explorer.microbatches.value = 2
    explorer.schedule.value = "gpipe"
    assert (explorer.current.num_microbatches, explorer.current.schedule) == (2, "gpipe")
    timeline = simulate(PLAN, microbatches=2, schedule="gpipe")
    assert explorer.current.prediction.step_s == pytest.approx(timeline.step_s)


def test_buttons_go_to_equal_layers_and_back(explorer: Explorer) -> None:
    explorer.cut.value, explorer.position.value = 0, 3
    explorer.schedule.value = "gpipe"
    explorer.reset.click()
    assert explorer.current.model_dump() == PLAN.model_copy(update={"runners_up": (), "why": ()}).model_dump()
    explorer.position.value = 3
    explorer.even.click()
    assert [len(stage.layers) for stage in explorer.current.stages] == [10, 10, 10, 10]


def test_what_does_not_fit_is_said(explorer: Explorer) -> None:
    assert shown(explorer)["memory"][0] == "stage 0 does not fit"


def test_stages_that_recompute_go_on_doing_so() -> None:
    stages = tuple(stage.model_copy(update={"recompute": stage.index == 1}) for stage in PLAN.stages)
    exploration = Exploration(PLAN.model_copy(update={"stages": stages}))
    moved = exploration.at((9, 20, 30), 8, "1f1b")
    assert [stage.recompute for stage in moved.stages] == [False, True, False, False]
    before = Exploration(PLAN).at((9, 20, 30), 8, "1f1b").prediction.stages
    after = moved.prediction.stages
    assert after[1].backward_s == pytest.approx(before[1].backward_s + before[1].forward_s)
    assert after[1].memory.activations < before[1].memory.activations
    assert after[0].backward_s == before[0].backward_s


def test_interleaved_stages_keep_their_ranks() -> None:
    plan = drawn_plan(schedule="interleaved", stages_a_rank=2)
    exploration = Exploration(plan)
    assert "interleaved" in exploration.schedules and "zero-bubble-v" not in exploration.schedules
    moved = exploration.at((4, *exploration.cuts[1:]), 8, "interleaved")
    assert moved.placement == plan.placement
    with pytest.raises(ArgumentError, match="2 cuts make 3 stages, the plan has 8"):
        exploration.at((4, 8), 8, "interleaved")


def test_equal_numbers_of_layers_keep_to_cuts_that_are_possible() -> None:
    profile = PLAN.profile
    ids = [layer.id for layer in profile.layers]
    graph = CostGraph(profile.model_copy(update={"no_cut": {ids[10]: "shared state", ids[11]: "shared state"}}))
    assert even_cuts(graph, 4) == (12, 20, 30)
    whole = CostGraph(profile.model_copy(update={"no_cut": dict.fromkeys(ids[1:], "shared state")}))
    with pytest.raises(ArgumentError, match="no 1 cuts"):
        even_cuts(whole, 2)


def test_a_plan_of_one_stage_can_be_explored_too() -> None:
    explorer = drawn_plan(8, 1, 4).explore()
    explorer.microbatches.value = 2
    assert explorer.current.num_microbatches == 2
