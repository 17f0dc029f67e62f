"""What a step comes to from its rounds against the clock that walks its lists, over every schedule."""

import itertools
import random

import numpy as np
import pytest
from test_clock import PER_RANK, random_replica

from partitioner.actions import chain
from partitioner.clock import Replica, StageCost, Transfer, run_clock
from partitioner.schedule import placement, schedule_table
from partitioner.simulator import forward_clock
from partitioner.specs import SCHEDULES
from partitioner.steady import forwards_s, step_times


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("overlap", [True, False])
def test_rounds_come_to_what_the_clock_says(name, overlap):
    """Equal and random stages, transfers that hide, that are waited for and that queue on a wire, skips over stages."""
    rng = random.Random(f"{name} {overlap}")
    steady = 0
    for case in range(50):
        p, each = rng.randint(1, 6), rng.choice(PER_RANK.get(name, (1,)))
        m = rng.randint(1, 12) if case % 5 == 0 else p * rng.randint(6, 30) + rng.randint(0, 2)
        num_stages = p * each
        edges = set(chain(num_stages))
        if case % 2:
            edges |= {pair for pair in itertools.combinations(range(num_stages), 2) if rng.random() < 0.2}
        replica = random_replica(rng, num_stages, edges)
        if case % 3 == 0:
            transfers = tuple(Transfer(one.source, one.target, 0.2, 0.3) for one in replica.transfers)
            replica = Replica((StageCost(rng.random(), rng.random()),) * num_stages, transfers)
        whole = run_clock(schedule_table(name, num_stages, m, p), replica, overlap=overlap, overhead_s=0.01).step
        short = step_times(name, replica, m, p, overlap=overlap, overhead_s=0.01)
        np.testing.assert_allclose(short.rank_end_s, whole.rank_end_s, rtol=1e-10)
        np.testing.assert_allclose(short.busy_s, whole.busy_s, rtol=1e-10)
        np.testing.assert_allclose(short.waited_s, whole.waited_s, rtol=1e-9, atol=1e-9 * m)
        places = placement(name, num_stages, p)
        for rank in range(p):
            own = [stage for stage, at in enumerate(places) if at == rank]
            orders = (sorted(own, key=step.finished.__getitem__) for step in (short, whole))
            assert next(orders) == next(orders)
        steady += short.walked < 1
    assert steady >= 3 or name == "gpipe"  # it has no steady state but where no stage is slower than an earlier one


def test_a_long_schedule_costs_few_rounds():
    replica = Replica((StageCost(1.0, 2.0),) * 8, tuple(Transfer(*edge, 0.0, 0.0) for edge in chain(8)))
    for name in ("gpipe", "1f1b"):
        step = step_times(name, replica, 100_000)
        assert step.rank_end_s.max() == pytest.approx(3.0 * (100_000 + 7))
        assert step.walked < 0.002


def test_times_that_do_not_settle_are_run_to_the_end():
    """Under GPipe a fast stage before a slow one gets further ahead with every micro-batch."""
    replica = Replica((StageCost(1.0, 2.0), StageCost(3.0, 1.0)), (Transfer(0, 1, 0.0, 0.0),))
    step = step_times("gpipe", replica, 1000)
    assert step.walked == 1.0
    assert step.rank_end_s.max() == pytest.approx(1.0 + 3.0 * 1000 + 1.0 + 2.0 * 1000)


def test_a_rank_waits_while_its_message_travels_and_idles_before():
    """0.5 s for the first forward and 0.25 s for the first gradient; all others come while the rank is at work."""
    replica = Replica((StageCost(1.0, 2.0),) * 2, (Transfer(0, 1, 0.5, 0.25),))
    step = step_times("gpipe", replica, 1000)
    assert step.walked < 0.2
    np.testing.assert_allclose(step.waited_s, [0.25, 0.5])


@pytest.mark.parametrize("seed", range(40))
def test_forward_passes_alone_take_what_the_clock_says(seed: int) -> None:
    rng = random.Random(seed)
    p = rng.randrange(1, 7)
    stages = tuple(StageCost(rng.choice([0.0, rng.random()]), 0.0) for _ in range(p))
    pairs = [(a, b) for a in range(p) for b in range(a + 1, p) if rng.random() < 0.6]
    replica = Replica(stages, tuple(Transfer(a, b, rng.choice([0.0, rng.random()]), 0.0) for a, b in pairs))
    m = rng.randrange(1, 9)
    assert forwards_s(replica, m) == pytest.approx(float(forward_clock(replica, m).rank_end_s.max()), rel=1e-12)
