"""Which devices a plan uses and in which order, against every choice and order of them."""

import itertools
import math
import random

import pytest
from chains import FREE, LOTS, chain, cluster, random_chain
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partitioner.costs import single_device
from partitioner.errors import InfeasibleError
from partitioner.graph import CostGraph
from partitioner.memory import memory_limit, stage_memory
from partitioner.report import plan_parts
from partitioner.simulator import predict, simulate
from partitioner.solver import arrangement, solve
from partitioner.solver import settings as all_settings
from partitioner.solver.settings import divisors
from partitioner.specs import Cluster, Device, Link, Training
from partitioner.split import Split

SLOW = Link.of(1e-6, 1e9)
SLOWER = Link.of(1e-5, 1e8)


def total_s(plan):
    return plan.prediction.step_s + plan.prediction.optimizer_s


def brute_force(graph, there, training):
    """Number of devices -> the least step + optimizer over every mesh, choice and order of so many, split, schedule and
    number of micro-batches that fits."""
    baseline = single_device(graph, there, training)
    best = {}
    for pp, dp in itertools.product(range(1, len(graph.allowed_cuts) + 2), range(1, there.num_devices + 1)):
        if pp * dp > there.num_devices or training.batch_size % dp:
            continue
        for order in itertools.permutations(range(there.num_devices), pp * dp):
            devices = [order[place * dp : (place + 1) * dp] for place in range(pp)]
            if list(devices[0]) != sorted(devices[0]):
                continue  # the same replicas in another order
            for m, name in itertools.product(divisors(training.batch_size // dp), ("1f1b", "gpipe")[: pp + 1]):
                for cuts in itertools.combinations(graph.allowed_cuts, pp - 1):
                    split = Split(cuts, tuple(map(tuple, devices)), m, name)
                    held = (
                        (stage_memory(graph, training, one, split, k), one)
                        for k, row in enumerate(devices)
                        for one in {there.devices[device] for device in row}
                    )
                    if all(items.total <= memory_limit(device, training) for items, device in held):
                        one = predict(graph, there, training, split, baseline=baseline)
                        best[pp * dp] = min(best.get(pp * dp, math.inf), one.step_s + one.optimizer_s)
    return best


def random_case(rng, most_devices=4):
    graph = CostGraph(random_chain(rng, rng.randrange(1, 4)))
    devices = tuple(
        Device(
            name="Toy",
            memory_bytes=rng.choice([LOTS, rng.randrange(300_000, 2_500_000)]),
            overhead_bytes=1_000,
            communicator_bytes=rng.choice([0, 5_000]),
            slack=rng.choice([0.0, 0.06]),
            relative_speed=rng.choice([0.5, 1.0, 2.0]),
        )
        for _ in range(rng.randrange(2, most_devices + 1))
    )
    nodes = tuple(rng.randrange(2) for _ in devices)
    there = Cluster(devices=devices, nodes=nodes, intra=SLOW, inter=rng.choice([SLOW, SLOWER]))
    return graph, there, Training(batch_size=rng.choice([1, 2, 3, 4]))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6))
def test_no_other_choice_or_order_of_devices_is_faster(seed):
    graph, there, training = random_case(random.Random(seed))
    best = brute_force(graph, there, training)
    if not best:
        with pytest.raises(InfeasibleError, match="does not fit"):
            solve(graph.profile, there, training)
        return
    plan = solve(graph.profile, there, training)
    used = max(best)
    assert plan.num_ranks == used
    assert total_s(plan) == pytest.approx(best[used], rel=1e-9)
    assert plan.lower_bound_s == pytest.approx(best[used], rel=1e-9)
    fewer = {count: time for count, time in best.items() if count < used}
    named = [one for one in plan.runners_up if one.reason.endswith("alone")]
    if fewer and min(fewer.values()) < best[used] * (1 - 2e-3):
        assert named[0].step_s == pytest.approx(min(fewer.values()), rel=1e-9)
        assert any(f"of these {used} devices would be faster" in reason for reason in plan.why)
    elif not fewer or min(fewer.values()) > best[used]:
        assert not named
    assert simulate(plan).step_s == pytest.approx(plan.prediction.step_s)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6))
def test_the_lower_bound_holds_for_orders_that_were_not_tried(seed):
    graph, there, training = random_case(random.Random(seed))
    best = brute_force(graph, there, training)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrangement, "MOST_ORDERS", 0)
        try:
            plan = solve(graph.profile, there, training)
        except InfeasibleError:
            return
    reached = best[plan.num_ranks]
    assert plan.lower_bound_s <= reached * (1 + 1e-9)
    assert reached * (1 - 1e-9) <= total_s(plan) <= reached * (1 + plan.gap) * (1 + 1e-9)


def test_slow_devices_are_left_out_where_not_all_are_needed():
    profile = chain([1.0, 1.0], tensor_bytes=100)
    there = cluster(4, speeds=[1.0, 3.0, 1.0, 2.0])
    plan = solve(profile, there, Training(batch_size=1))  # two layers and one sample: two devices at most
    assert plan.devices == (1, 3)
    assert {plan.device_of(rank).relative_speed for rank in range(2)} == {3.0, 2.0}
    assert plan.gap == 0
    assert plan.stage_devices in (((1,), (3,)), ((3,), (1,)))
    assert "on device" in plan_parts.stage_row(plan, 0)[2]


def test_ranks_are_numbered_node_by_node():
    there = cluster(4, nodes=[0, 1, 0, 1], link=SLOW, inter=SLOWER)
    profile = chain([1e-3] * 4, tensor_bytes=100_000)
    plan = solve(profile, there, Training(batch_size=8, mesh={"pp": 4, "dp": 1}))
    assert plan.devices == (0, 2, 1, 3)
    assert [plan.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [plan.index_in_node(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert sum(a != b for a, b in itertools.pairwise(plan.node_of(s.ranks[0]) for s in plan.stages)) == 1


def test_counts_of_micro_batches_that_were_not_tried_are_in_the_bound_and_named(monkeypatch):
    profile, request = chain([1e-3] * 8), Training(batch_size=64, mesh={"pp": 4, "dp": 1})
    best = solve(profile, cluster(4), request)
    assert best.num_microbatches == 64
    monkeypatch.setattr(all_settings, "MOST_ACTIONS", 2 * 4 * 8)
    plan = solve(profile, cluster(4), request)
    assert plan.num_microbatches == 8
    assert plan.lower_bound_s <= total_s(best) * (1 + 1e-9) < total_s(plan)
    assert any("too many actions a step, were not tried" in reason for reason in plan.why)


def test_what_the_allocator_and_communicators_take_is_kept_free():
    profile = chain([1.0] * 2, saved_bytes=1_000)
    need = solve(profile, cluster(2), Training(batch_size=2, mesh={"pp": 2, "dp": 1})).prediction.stages[0].memory.total

    def plan(memory_bytes, **more):
        device = Device(name="Toy", memory_bytes=memory_bytes, **more)
        there = Cluster.of(device, 2, within=FREE)
        return solve(profile, there, Training(batch_size=2, mesh={"pp": 2, "dp": 1}))

    assert plan(need).prediction.stages[0].memory.total == need
    for more in ({"slack": 0.1}, {"communicator_bytes": 64}, {"overhead_bytes": 64}):
        enough = need + need // 10 if "slack" in more else need + 64
        held = plan(enough, **more).prediction.stages[0].memory
        assert held.total <= enough
        assert held.total - held.slack - held.overhead == need
        with pytest.raises(InfeasibleError, match="does not fit"):
            plan(enough - 1, **more)


def test_devices_change_places_where_not_every_order_is_tried(monkeypatch):
    """One slow device among fast ones belongs where the least work can be given away."""
    profile = chain([1.0, 1.0, 1.0, 0.1, 1.0, 1.0, 1.0])
    there = cluster(7, speeds=[1.0, 1.0, 0.1, 1.0, 1.0, 1.0, 1.0])
    training = Training(batch_size=8, mesh={"pp": 7, "dp": 1}, microbatches=8, schedule="gpipe")
    every = solve(profile, there, training)
    monkeypatch.setattr(arrangement, "MOST_ORDERS", 0)
    plan = solve(profile, there, training)
    assert plan.stage_devices[3] == every.stage_devices[3] == (2,)
    assert total_s(plan) == total_s(every)
    assert every.gap == 0
    assert plan.lower_bound_s <= total_s(every)
