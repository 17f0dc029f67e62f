"""Ranks of a stage that take turns: their lists, their clock and their period."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from turn_oracle import counted_s, ticking

from partitioner.actions import Action, chain, check_schedule
from partitioner.clock import Replica, StageCost, Transfer
from partitioner.errors import ArgumentError
from partitioner.schedule import taking_turns
from partitioner.turns import period_s, turn_timeline


def pipeline(stage_s: list[int], messages: dict[tuple[int, int], int]) -> Replica:
    return Replica(
        tuple(StageCost(float(seconds), 0.0) for seconds in stage_s),
        tuple(Transfer(source, target, float(seconds), 0.0) for (source, target), seconds in messages.items()),
    )


def random_pipeline(rng: random.Random) -> tuple[list[int], dict[tuple[int, int], int], list[int], int]:
    stages = rng.randrange(1, 5)
    stage_s = [rng.randrange(1, 9) for _ in range(stages)]
    messages = {(k, k + 1): rng.randrange(1, 9) for k in range(stages - 1)}
    if stages > 2 and rng.random() < 0.5:
        messages[0, 2] = rng.randrange(1, 9)
    return stage_s, messages, [rng.randrange(1, 5) for _ in range(stages)], rng.randrange(1, 10)


@pytest.mark.parametrize("seed", range(40))
def test_the_period_is_what_a_ticking_clock_settles_to(seed: int) -> None:
    stage_s, messages, ranks, m = random_pipeline(random.Random(seed))
    period = period_s(pipeline(stage_s, messages), ranks, m)
    assert period == counted_s(stage_s, messages, ranks, m)
    ends = ticking(stage_s, messages, ranks, m, 40)
    assert ends[-1] - ends[-13] == 12 * period


@pytest.mark.parametrize("seed", range(40))
def test_the_timeline_of_one_batch_is_the_ticking_clock_s(seed: int) -> None:
    stage_s, messages, ranks, m = random_pipeline(random.Random(seed))
    numbers = [list(range(sum(ranks[:k]), sum(ranks[: k + 1]))) for k in range(len(ranks))]
    timeline = turn_timeline(pipeline(stage_s, messages), numbers, m)
    assert timeline.step_s == ticking(stage_s, messages, ranks, m, 1)[0]
    forwards = [span for span in timeline.spans if span.kind == "F"]
    assert {(span.stage, span.microbatch) for span in forwards} == {(s, k) for s in range(len(ranks)) for k in range(m)}
    for span in forwards:
        assert span.rank == numbers[span.stage][span.microbatch % ranks[span.stage]]
    for rank in range(sum(ranks)):
        own = sorted((one.start_s, one.end_s) for one in timeline.spans if one.rank == rank and one.kind != "send")
        assert all(before[1] <= after[0] for before, after in pairwise(own))


@pytest.mark.parametrize("ranks", [[1, 2], [3], [2, 3, 1], [1, 4, 2, 3]])
@pytest.mark.parametrize("m", [1, 2, 5, 12])
def test_no_rank_waits_in_a_circle_and_messages_keep_their_order_between_ranks(ranks: list[int], m: int) -> None:
    edges = [*chain(len(ranks)), *([(0, 2)] if len(ranks) > 2 else [])]
    orders = taking_turns(ranks, m)
    check_schedule(orders, edges, turns=True)
    assert sorted(action for order in orders for action in order) == [
        Action(stage, "F", k) for stage in range(len(ranks)) for k in range(m)
    ]


def test_lists_that_swap_turns_on_one_side_are_refused() -> None:
    orders = [list(order) for order in taking_turns([1, 2], 5)]
    with pytest.raises(ArgumentError, match="stage 1 is on ranks 1 and 2"):
        check_schedule(orders)
    orders[1][0], orders[1][1] = orders[1][1], orders[1][0]
    with pytest.raises(ArgumentError, match="message 0 from stage 0"):
        check_schedule(orders, turns=True)
    with pytest.raises(ArgumentError, match="1F4 is missing"):
        check_schedule([orders[0], orders[1][:-1], orders[2]], turns=True)
