"""Schedules: sound at every size, as short and as small in memory as their papers say, and as torch generates them."""

import itertools

import pytest

from partitioner.actions import Action, chain, check_schedule, grid, most_held
from partitioner.errors import ArgumentError
from partitioner.schedule import build_schedule, forward_only, in_flight, placement
from partitioner.specs import SCHEDULES

SIZES = list(itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 4, 5, 8, 13)))
"""Ranks, micro-batches."""
SHAPES = [
    (name, each, p, m)
    for name in SCHEDULES
    for each in {"gpipe": (1, 2), "interleaved": (2, 3), "zero-bubble": (1, 3), "zero-bubble-v": (2,)}.get(name, (1,))
    for p, m in SIZES
]
"""Schedule, stages a rank, ranks, micro-batches."""


def built(name, each, p, m):
    return build_schedule(name, each * p, m, num_ranks=p)


def slots(orders):
    """Time slots until the last action, every action taking one."""
    return len(grid(orders).splitlines()[0].split()) - 1


@pytest.mark.parametrize(("name", "each", "p", "m"), SHAPES)
def test_every_schedule_is_sound_at_every_size(name, each, p, m):
    orders = built(name, each, p, m)
    check_schedule(orders)
    check_schedule(orders, [*chain(each * p), *((0, target) for target in range(2, each * p))])
    kinds = "FB" if name in ("gpipe", "1f1b", "interleaved") else "FIW"
    assert {action for order in orders for action in order} == {
        Action(stage, kind, k) for stage in range(each * p) for kind in kinds for k in range(m)
    }
    assert all(
        {places[a.stage] for a in order} == {r}
        for places in [placement(name, each * p, p)]
        for r, order in enumerate(orders)
    )


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_inference_is_sound_at_every_size_and_as_long_as_the_way_through(p, m):
    check_schedule(forward_only(p, m))
    check_schedule(forward_only(2 * p, m, num_ranks=p))
    assert slots(forward_only(p, m)) == m + p - 1


@pytest.mark.parametrize(("name", "each", "p", "m"), SHAPES)
def test_in_flight_is_what_the_action_list_holds(name, each, p, m):
    for order in built(name, each, p, m):
        for stage in {action.stage for action in order}:
            weight = {"F": 1, "B": -1, "W": -1}
            held = itertools.accumulate(weight.get(a.kind, 0) for a in order if a.stage == stage)
            assert max(held) == in_flight(name, stage, each * p, m, num_ranks=p)


def test_in_flight_of_the_published_case():
    def of(name, m):
        return [in_flight(name, stage, 4, m) for stage in range(4)]

    assert of("1f1b", 8) == [4, 3, 2, 1]
    assert of("1f1b", 2) == [2, 2, 2, 1]
    assert of("1f1b", 1) == [1, 1, 1, 1]
    assert of("gpipe", 8) == [8, 8, 8, 8]
    assert of("zero-bubble", 8) == [4, 4, 4, 4]
    assert of("zero-bubble-h2", 8) == [7, 7, 7, 7]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_what_a_rank_holds_in_flight_is_within_the_papers_figure(p, m):
    def most(orders):
        """Stages' micro-batches, over a rank's stages at one time."""
        weight = {"F": 1, "B": -1, "W": -1}
        return [max(itertools.accumulate(weight.get(action.kind, 0) for action in order)) for order in orders]

    assert most(built("zero-bubble", 1, p, m)) == [min(p, m)] * p
    assert most(built("zero-bubble-h2", 1, p, m)) == [min(2 * p - 1, m)] * p
    assert all(held <= 2 * p for held in most(built("zero-bubble-v", 2, p, m)))
    if m % p == 0:
        for each in (2, 3):
            expected = [min((each - 1) * p + 2 * (p - 1 - rank) + 1, each * m) for rank in range(p)]
            assert most(built("interleaved", each, p, m)) == expected


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_equal_stages_take_the_slots_of_the_closed_form(name, p, m):
    assert slots(build_schedule(name, p, m)) == 2 * (m + p - 1)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
def test_zero_bubble_schedules_take_the_slots_of_their_paper(p, m):
    assert slots(build_schedule("zero-bubble", p, m)) == 3 * m + p - 1
    assert slots(build_schedule("zero-bubble-h2", p, m)) == 3 * m + p - 1
    assert slots(build_schedule("zero-bubble-v", 2 * p, m)) == 6 * m + p - 1


def test_one_device_runs_one_microbatch_after_another_under_1f1b():
    assert [str(action) for action in build_schedule("1f1b", 1, 2)[0]] == ["0F0", "0B0", "0F1", "0B1"]


@pytest.mark.parametrize(("name", "each"), sorted({(name, each) for name, each, _, _ in SHAPES}))
def test_every_schedule_adds_gradients_in_the_order_of_the_microbatches(name, each):
    for order in built(name, each, 4, 6):
        for stage in {action.stage for action in order}:
            for kind in "BIW":
                found = [a.microbatch for a in order if (a.stage, a.kind) == (stage, kind)]
                assert found in ([], list(range(6)))


def test_actions_print_and_parse():
    for name in ("1f1b", "zero-bubble"):
        for action in itertools.chain(*build_schedule(name, 12, 11)):
            assert Action.parse(str(action)) == action


def test_impossible_sizes_and_names_are_refused():
    with pytest.raises(ArgumentError, match="got 0 stages on 0 ranks"):
        build_schedule("1f1b", 0, 4)
    with pytest.raises(ArgumentError, match="at least one micro-batch, got 0"):
        forward_only(3, 0)
    with pytest.raises(ArgumentError, match=r"'zero-bubbles'.*'zero-bubble'"):
        build_schedule("zero-bubbles", 2, 2)
    with pytest.raises(ArgumentError, match="got 5 stages on 2 ranks"):
        build_schedule("interleaved", 5, 2, num_ranks=2)
    with pytest.raises(ArgumentError, match="got 4 on 4: use '1f1b'"):
        build_schedule("interleaved", 4, 2)
    with pytest.raises(ArgumentError, match="got 4 on 2 ranks: use 'interleaved'"):
        build_schedule("1f1b", 4, 2, num_ranks=2)
    with pytest.raises(ArgumentError, match="2 stages a rank, got 6 on 2"):
        build_schedule("zero-bubble-v", 6, 2, num_ranks=2)


def test_what_is_held_is_counted_stage_by_stage():
    assert most_held(build_schedule("zero-bubble-v", 4, 8)) == {0: 4, 1: 3, 2: 2, 3: 1}
