"""Orders found for split backwards: sound, within their room, as good as published ones and as trying every order."""

import itertools
import random

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from partitioner.actions import Action, Table, chain, check_schedule
from partitioner.clock import Replica, StageCost, Transfer, run_clock
from partitioner.errors import ArgumentError
from partitioner.ordering import Room, search_order
from partitioner.schedule import build_schedule, placement


def equal(p, forward_s, input_s, weight_s, transfer_s=0.0):
    cost = StageCost(forward_s, input_s + weight_s, backward_input_s=input_s, backward_weight_s=weight_s)
    return Replica((cost,) * p, tuple(Transfer(*edge, transfer_s, transfer_s) for edge in chain(p)))


# Stage times (ms) and the bubble rates of automatic orders that Qi et al. 2024 publish for them (tables 5 and 6,
# https://arxiv.org/abs/2401.10241): ranks, micro-batches, F, I, W, transfer, share of a micro-batch's activations that
# W still needs (32 / (34 + 5 heads x length / hidden), Korthikanti et al. 2022), rates of ZB-1p and ZB-2p.
PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 32 / 87.3, 0.1585, 0.0433),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 32 / 87.3, 0.0674, 0.0026),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 32 / 74.0, 0.1045, 0.0022),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 32 / 74.0, 0.1397, 0.0066),
]


@pytest.mark.parametrize(("p", "m", "f", "i", "w", "c", "until_weight", "once", "twice"), PUBLISHED)
def test_the_bubble_is_that_of_the_published_automatic_orders(p, m, f, i, w, c, until_weight, once, twice):
    replica, places = equal(p, f, i, w, c), range(p)
    for count, published in ((p, once), (2 * p, twice)):
        room = Room.microbatches(count, places, until_weight=until_weight)
        found = search_order(replica, places, m, room, barrier=False)
        check_schedule(found.orders)
        assert all(room.most(order) <= count + 1e-6 for order in found.orders)
        assert 1 - m * (f + i + w) / found.period_s == pytest.approx(published, abs=0.003)


def test_no_order_at_all_is_much_faster_in_small_cases():
    """Every order of two stages and three micro-batches is tried."""
    rng = random.Random(3)
    each = [order for order in set(itertools.permutations("FFFIIIWWW")) if _possible(order)]
    assert len(each) == 42  # standard Young tableaux of 3 x 3
    every = itertools.product(*([_numbered(stage, order) for order in each] for stage in range(2)))
    tables = [Table.of(pair) for pair in every if _runs(pair)]
    worst = 0.0
    for _ in range(3):
        times = [[rng.uniform(0.5, 1.5) for _ in range(3)] for _ in range(2)]
        stages = [StageCost(f, i + w, backward_input_s=i, backward_weight_s=w) for f, i, w in times]
        replica = Replica(tuple(stages), (Transfer(0, 1, 0.1, 0.1),))
        room = Room.microbatches(3, range(2))
        best = min(float(run_clock(table, replica).rank_end_s.max()) for table in tables)
        found = search_order(replica, range(2), 3, room)
        assert found.step_s >= best - 1e-9
        worst = max(worst, found.step_s / best - 1)
    assert worst <= 0.05


def least_step_s(replica, m, room, horizon):
    """The shortest step there is, by a mixed-integer program over when each action starts.

    t      when it starts; x = 1: of two actions of one rank, the first is earlier
    t_b >= t_a + s_a  where b needs a, or the room a leaves;   t_b >= t_a + s_a - M (1 - x),  t_a >= t_b + s_b - M x

    horizon M: what some order takes. Micro-batches are alike, so each stage runs its F, I and W in their order.
    """
    p, kinds = len(replica.stages), "FIW"
    number = {key: at for at, key in enumerate(itertools.product(range(p), kinds, range(m)))}
    seconds = {key: replica.stages[key[0]].seconds(key[1]) for key in number}
    pairs = [
        ((stage, a, i), (stage, b, j))
        for stage in range(p)
        for a, b in itertools.combinations(kinds, 2)
        for i in range(m)
        for j in range(m)
        if i > j  # of the same or a later micro-batch, it is known which is first
    ]
    end = len(number)
    size = end + 1 + len(pairs)
    rows, least = [], []

    def after(first, then, gap, *terms):
        row = np.zeros(size)
        row[then] += 1
        if first is not None:
            row[first] -= 1
        for at, factor in terms:
            row[at] += factor
        rows.append(row)
        least.append(gap)

    for stage, kind, k in number:
        here = number[stage, kind, k]
        after(here, end, seconds[stage, kind, k])
        if k + 1 < m:
            after(here, number[stage, kind, k + 1], seconds[stage, kind, k])
        if kind != "W":
            after(here, number[stage, "I" if kind == "F" else "W", k], seconds[stage, kind, k])
        elif k + room < m:
            after(here, number[stage, "F", k + room], seconds[stage, kind, k])
    for one in replica.transfers:
        for k in range(m):
            first, then = (one.source, "F", k), (one.target, "F", k)
            after(number[first], number[then], seconds[first] + one.forward_s)
            first, then = (one.target, "I", k), (one.source, "I", k)
            after(number[first], number[then], seconds[first] + one.backward_s)
    for at, (a, b) in enumerate(pairs, start=end + 1):
        after(number[a], number[b], seconds[a] - horizon, (at, -horizon))
        after(number[b], number[a], seconds[b], (at, horizon))
    goal = np.zeros(size)
    goal[end] = 1
    upper = np.where(np.arange(size) > end, 1.0, horizon)
    found = milp(
        goal,
        constraints=LinearConstraint(np.array(rows), lb=least),
        bounds=Bounds(0, upper),
        integrality=np.arange(size) > end,
    )
    assert found.status == 0
    return float(found.fun)


@pytest.mark.parametrize(("p", "m", "room"), [(2, 3, 2), (2, 4, 2), (2, 4, 4), (3, 3, 3)])
def test_the_step_is_near_the_least_of_all_orders(p, m, room):
    rng = random.Random(f"{p} {m} {room}")
    ratios = []
    for _ in range(2):
        times = [[rng.uniform(0.5, 1.5) for _ in range(3)] for _ in range(p)]
        stages = [StageCost(f, i + w, backward_input_s=i, backward_weight_s=w) for f, i, w in times]
        replica = Replica(tuple(stages), tuple(Transfer(*edge, 0.1, 0.1) for edge in chain(p)))
        textbook = [build_schedule("zero-bubble", p, m)]
        found = search_order(replica, range(p), m, Room.microbatches(room, range(p)), textbook=textbook)
        ratios.append(found.step_s / least_step_s(replica, m, room, found.step_s * (1 + 1e-6)))
    assert min(ratios) >= 1 - 1e-6
    assert max(ratios) <= 1.05


def _possible(order):
    counts = dict.fromkeys("FIW", 0)
    for kind in order:
        counts[kind] += 1
        if not counts["F"] >= counts["I"] >= counts["W"]:
            return False
    return True


def _numbered(stage, order):
    counts = dict.fromkeys("FIW", 0)
    actions = []
    for kind in order:
        actions.append(Action(stage, kind, counts[kind]))
        counts[kind] += 1
    return tuple(actions)


def _runs(pair):
    try:
        check_schedule(pair)
    except ArgumentError:
        return False
    return True


@pytest.mark.parametrize("barrier", [True, False])
def test_what_is_found_is_never_worse_than_the_textbook(barrier):
    rng = random.Random(4)
    for _ in range(8):
        p, m = rng.randint(2, 5), rng.randint(2, 12)
        costs = [(rng.uniform(0.5, 2), rng.uniform(0.5, 2), rng.uniform(0.2, 2)) for _ in range(p)]
        stages = tuple(StageCost(f, i + w, backward_input_s=i, backward_weight_s=w) for f, i, w in costs)
        replica = Replica(stages, tuple(Transfer(*edge, 0.1, 0.1) for edge in chain(p)))
        textbook = build_schedule("zero-bubble", p, m)
        found = search_order(replica, range(p), m, Room.microbatches(p, range(p)), textbook=[textbook], barrier=barrier)
        check_schedule(found.orders)
        clock = run_clock(Table.of(textbook), replica)
        if barrier:
            assert found.step_s <= clock.rank_end_s.max() + 1e-9
        else:
            assert found.period_s <= clock.period_s + 1e-9


def test_any_arrangement_of_stages_on_ranks_has_an_order():
    rng = random.Random(5)
    for places in (placement("zero-bubble-v", 8), placement("interleaved", 6, 2), (0, 0, 1, 2, 2, 1), (1, 0, 0, 2)):
        p, m = len(places), 5
        edges = [*chain(p), (0, p - 1)]
        stages = tuple(StageCost(rng.uniform(0.5, 1.5), rng.uniform(1, 3)) for _ in range(p))
        replica = Replica(stages, tuple(Transfer(*edge, 0.05, 0.05) for edge in edges))
        room = Room(tuple(2.0 * places.count(rank) for rank in range(1 + max(places))), (1.0,) * p)
        found = search_order(replica, places, m, room)
        check_schedule(found.orders, edges)
        assert [{action.stage for action in order} for order in found.orders] == [
            {stage for stage, at in enumerate(places) if at == rank} for rank in range(1 + max(places))
        ]
        assert all(room.most(order) <= limit + 1e-9 for order, limit in zip(found.orders, room.limits, strict=True))


def test_a_rank_without_room_for_one_micro_batch_is_named():
    with pytest.raises(ArgumentError, match="rank 1 has room for 3, but one micro-batch of each of its stages takes 4"):
        search_order(equal(2, 1.0, 1.0, 1.0), range(2), 4, Room((9.0, 3.0), (4.0, 4.0)))
