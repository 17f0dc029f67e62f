"""The clock against a longest path, over every schedule."""

import itertools
import random

import pytest
from longest_path import longest_path

from partitioner.actions import KINDS, Action, Table, chain
from partitioner.clock import Replica, StageCost, Transfer, run_clock
from partitioner.errors import ArgumentError
from partitioner.schedule import build_schedule, forward_only
from partitioner.simulator import replay
from partitioner.specs import SCHEDULES

PER_RANK = {"gpipe": (1, 2), "interleaved": (2, 3), "zero-bubble": (1, 2), "zero-bubble-v": (2,)}
"""Stages a rank; one where it is not said."""


def random_replica(rng, num_stages, edges=None):
    stages = tuple(
        StageCost(
            rng.choice([0.0, 1.0, rng.random()]),
            rng.random(),
            backward_input_s=rng.choice([None, rng.random()]),
            backward_weight_s=rng.choice([None, rng.random()]),
        )
        for _ in range(num_stages)
    )
    scale = rng.choice([0.0, 0.3, 3.0])
    times = [Transfer(*edge, scale * rng.random(), scale * rng.random()) for edge in sorted(edges or chain(num_stages))]
    return Replica(stages, tuple(times))


@pytest.mark.parametrize("overlap", [True, False])
def test_the_clock_is_the_longest_path_in_random_cases_over_all_schedules(overlap):
    rng = random.Random(7)
    seen = set()
    for case in range(500):
        name = [*SCHEDULES, "forward"][case % (len(SCHEDULES) + 1)]
        p, m = rng.randint(1, 4), rng.randint(1, 7)
        each = rng.choice(PER_RANK.get(name, (1,)))
        num_stages = p * each
        orders = forward_only(p, m) if name == "forward" else build_schedule(name, num_stages, m, num_ranks=p)
        edges = set(chain(num_stages) if rng.random() < 0.8 else ())
        edges |= {pair for pair in itertools.combinations(range(num_stages), 2) if rng.random() < 0.2}
        replica = random_replica(rng, num_stages, edges)
        overhead_s = rng.choice([0.0, 0.1])
        step = replay(orders, replica.stages, replica.transfers, overhead_s=overhead_s, overlap=overlap)
        end = longest_path(orders, replica.stages, replica.transfers, overhead_s, overlap)
        assert step.step_s == pytest.approx(max(end.values()))
        ran = [span for span in step.spans if span.kind in KINDS]
        assert len(ran) == sum(map(len, orders))
        for span in ran:
            assert span.end_s == pytest.approx(end[Action(span.stage, span.kind, span.microbatch)])
        for span in step.spans:
            if span.kind == "send":
                ends = [end[key] for key in end if len(key) == 4 and key[::3] == (span.stage, span.microbatch)]
                assert any(span.end_s == pytest.approx(one) for one in ends)
        seen.add((name, each))
    assert len(seen) == 10


def test_a_backward_in_two_parts_beside_a_whole_one_is_the_longest_path_too():
    rng = random.Random(8)
    text = "0F0 0F1 0B0 0I1 0W1\n1F0 1I0 1F1 1B1 1W0\n2F0 2B0 2F1 2I1 2W1"
    orders = [[Action.parse(word) for word in line.split()] for line in text.splitlines()]
    for _ in range(20):
        replica = random_replica(rng, 3)
        end = longest_path(orders, replica.stages, replica.transfers, 0.0, True)
        assert replay(orders, replica.stages, replica.transfers).step_s == pytest.approx(max(end.values()))


def test_where_nothing_overlaps_a_rank_waits_for_its_messages_one_after_another():
    """It takes 2 s for the first and 1 s for the second, and idles until what it takes next was sent."""
    orders = [[Action(stage, "F", 0)] for stage in range(3)]
    for first_s, second_s, idle_s in ((1.0, 5.0, 3.0), (5.0, 1.0, 5.0)):
        stages = (StageCost(first_s, 0.0), StageCost(second_s, 0.0), StageCost(1.0, 0.0))
        step = replay(orders, stages, (Transfer(0, 2, 2.0, 0.0), Transfer(1, 2, 1.0, 0.0)), overlap=False)
        assert step.communication_s(2) == pytest.approx(3.0)
        assert step.idle_s(2) == pytest.approx(idle_s)


def test_a_list_that_breaks_off_is_refused_by_what_it_lacks():
    lost = [order[:-1] if rank else order for rank, order in enumerate(build_schedule("1f1b", 2, 2))]
    with pytest.raises(ArgumentError, match="1B1 is missing"):
        run_clock(Table.of(lost), Replica((StageCost(1.0, 1.0),) * 2, (Transfer(0, 1, 0.0, 0.0),)))
