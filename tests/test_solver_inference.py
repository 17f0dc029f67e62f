"""Plans for inference against every plan there is."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from chains import chain, cluster, random_chain
from turn_oracle import every_turn_plan_s

from partitioner.costs import forward_costs
from partitioner.errors import ArgumentError, InfeasibleError
from partitioner.graph import CostGraph
from partitioner.memory import inference_memory
from partitioner.plan import Plan, load
from partitioner.profiles import Profile
from partitioner.simulator import forward_clock, simulate
from partitioner.solver import solve
from partitioner.solver.forward_memory import ForwardMemory
from partitioner.specs import Cluster, Link, Training, format_bytes
from partitioner.split import Split

SLOW = Link.of(2e-5, 5e8)
OBJECTIVES = ("throughput", "latency")


def every_plan_s(profile: Profile, devices: Cluster, training: Training) -> float:
    """The best objective over all meshes, devices in any order, micro-batches and cuts that fit, one by one."""
    graph, best = CostGraph(profile), float("inf")
    for pp in range(1, devices.num_devices + 1):
        for dp in range(1, devices.num_devices // pp + 1):
            each, rest = divmod(training.batch_size, dp)
            counts = [m for m in range(1, each + 1) if not rest and each % m == 0]
            alike = len(set(devices.devices)) == len(set(devices.nodes)) == 1
            orders = [range(pp * dp)] if alike else itertools.permutations(range(devices.num_devices), pp * dp)
            for m, order, cuts in itertools.product(counts, orders, itertools.combinations(graph.allowed_cuts, pp - 1)):
                placed = [order[stage * dp : (stage + 1) * dp] for stage in range(pp)]
                if list(placed[0]) != sorted(placed[0]):
                    continue  # the same replicas in another order
                sizes = [sum(inference_memory(graph, *ends, samples=each // m).values()) for ends in graph.bounds(cuts)]
                limits = [min(devices.devices[device].memory_bytes for device in row) for row in placed]
                if any(size > limit for size, limit in zip(sizes, limits, strict=True)):
                    continue
                slowest = 0.0
                split = Split(cuts, tuple(map(tuple, placed)), m, "gpipe")
                for one in forward_costs(graph, devices, training, split):
                    if training.objective == "latency":
                        seconds = float(forward_clock(one, m).rank_end_s.max())
                    else:
                        work = [stage.forward_s for stage in one.stages] + [t.forward_s for t in one.transfers]
                        seconds = m * max(work)
                    slowest = max(slowest, seconds)
                best = min(best, slowest)
    alike = len(set(devices.devices)) == 1
    if training.objective == "throughput" and alike:
        best = min(best, every_turn_plan_s(profile, devices, training))
    return best


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(10))
def test_no_other_choice_or_order_of_unequal_devices_is_better(objective: str, seed: int) -> None:
    rng = random.Random(seed)
    profile = chain(
        [rng.random() * 1e-3 for _ in range(4)],
        tensor_bytes=[rng.randrange(100_000) for _ in range(4)],
        parameter_bytes=[4_000 * rng.randrange(50) for _ in range(4)],
    )
    count = rng.randrange(2, 5)
    devices = cluster(
        count,
        link=SLOW,
        inter=Link.of(1e-4, 1e8),
        nodes=[rng.randrange(2) for _ in range(count)],
        speeds=[rng.choice([0.5, 1.0, 2.0]) for _ in range(count)],
    )
    sizes = [rng.choice([2**50, 400_000]) for _ in range(count)]
    unlike = zip(devices.devices, sizes, strict=True)
    devices = devices.model_copy(
        update={"devices": tuple(one.model_copy(update={"memory_bytes": size}) for one, size in unlike)}
    )
    training = Training(batch_size=rng.choice([1, 2, 4]), objective=objective)
    best = every_plan_s(profile, devices, training)
    try:
        plan = solve(profile, devices, training)
    except InfeasibleError:
        assert best == float("inf")
        return
    assert plan.prediction.step_s <= best * (1 + 1e-9)
    assert plan.lower_bound_s <= best * (1 + 1e-9)
    assert plan.takes_turns or plan.prediction.step_s == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(8))
def test_no_plan_is_better_and_none_is_below_the_bound(objective: str, seed: int) -> None:
    rng = random.Random(seed)
    profile = random_chain(rng, rng.randrange(3, 8))
    training = Training(batch_size=4, objective=objective)
    devices = cluster(rng.randrange(1, 5), link=SLOW, memory_bytes=rng.choice([2**50, 600_000, 1_000_000]))
    try:
        plan = solve(profile, devices, training)
    except InfeasibleError:
        assert every_plan_s(profile, devices, training) == float("inf")
        return
    best = every_plan_s(profile, devices, training)
    assert plan.lower_bound_s <= best * (1 + 1e-9)
    assert plan.prediction.step_s <= best * 1.02
    assert plan.prediction.step_s >= best * (1 - 1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(4))
def test_without_skips_plans_are_proven_optimal(objective: str, seed: int) -> None:
    rng = random.Random(seed)
    profile = chain([rng.random() for _ in range(7)], tensor_bytes=[rng.randrange(10**8) for _ in range(7)])
    training = Training(batch_size=6, objective=objective)
    plan = solve(profile, cluster(3, link=SLOW), training)
    assert plan.prediction.step_s == pytest.approx(every_plan_s(profile, cluster(3, link=SLOW), training), rel=1e-9)
    assert plan.gap < 1e-8


@pytest.mark.parametrize("seed", range(12))
def test_the_starts_that_leave_room_are_told_apart(seed: int) -> None:
    rng = random.Random(seed)
    n = 14
    profile, samples = random_chain(rng, n), rng.choice([1, 3])
    graph, some = CostGraph(profile), [rng.randrange(n) for _ in range(n + 1)]
    since = np.array([min(one, end) for end, one in enumerate(some)])
    held = {
        (i, j): sum(math.ceil(x) for x in inference_memory(graph, i, j, samples=samples).values())
        for j in range(n + 1)
        for i in range(j)
    }
    for room in rng.sample(sorted(held.values()), 6):
        memory = ForwardMemory(graph, samples)
        runs, complete = memory.runs(room, since)
        fits = [[i for i in range(since[j], j) if held[i, j] <= room] for j in range(n + 1)]
        assert complete and [runs.places(j).tolist() for j in range(n + 1)] == fits
        values = np.array([rng.random() for _ in range(n + 1)])
        assert runs.least(values).tolist() == [min(values[some], default=math.inf) for some in fits]
        from_here = np.array([rng.random() < 0.2 for _ in range(n + 1)])
        first, last = rng.randrange(n), rng.randrange(1, n + 1)
        some = from_here & (np.arange(n + 1) >= first)
        reached = runs.reached(some[first:], first, last, n + 1)
        assert reached.tolist() == [bool(some[starts].any()) for starts in fits[last:]]
        assert (np.diff(runs.lows) >= 0).all()
        assert all(min(starts) >= low for starts, low in zip(fits, runs.lows.tolist(), strict=True) if starts)
        assert not memory.hopeless([room]) or held[0, n] > room


def test_layers_beside_each_other_take_the_longer_way() -> None:
    """0 is used by 1 and by 2, both by 3; 4 waits for nothing."""
    profile = chain([1.0, 2.0, 4.0, 8.0, 16.0])
    between = [("0", ("1", "2")), ("1", ("3",)), ("2", ("3",))]
    tensors = tuple(
        profile.tensors[0].model_copy(update={"id": maker, "producer": maker, "consumers": users})
        for maker, users in between
    )
    graph = CostGraph(profile.model_copy(update={"tensors": tensors}))
    assert graph.paths(np.array([1.0, 2.0, 4.0, 8.0, 16.0])).tolist() == [13.0, 11.0, 13.0, 13.0, 16.0]


def test_replicas_serve_the_most_and_one_device_answers_first() -> None:
    profile = chain([1.0, 2.0, 3.0, 2.0])
    served = solve(profile, cluster(4, link=SLOW), Training(batch_size=4, objective="throughput"))
    assert served.mesh == {"pp": 1, "dp": 4}
    assert served.prediction.step_s == pytest.approx(8.0)
    answered = solve(profile, cluster(4, link=SLOW), Training(batch_size=1, objective="latency"))
    assert answered.num_ranks == 1


def test_a_model_that_is_too_large_for_one_device_is_cut() -> None:
    profile = chain([1.0] * 6, parameter_bytes=1000)
    devices = cluster(3, memory_bytes=2100, link=SLOW)
    plan = solve(profile, devices, Training(batch_size=1, objective="latency"))
    assert [len(stage.layers) for stage in plan.stages] == [2, 2, 2]
    assert all(stage.memory.total <= 2100 for stage in plan.prediction.stages)
    assert all(stage.memory.gradients == stage.memory.optimizer == 0 for stage in plan.prediction.stages)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_does_not_fit_is_named_with_the_bytes_short_and_the_fewest_devices_that_do(objective: str) -> None:
    profile, training = chain([1.0] * 6, parameter_bytes=1000), Training(batch_size=1, objective=objective)
    with pytest.raises(InfeasibleError) as e:
        solve(profile, cluster(2, memory_bytes=2100), training)
    assert "stage 0 (0 to 2) needs 2.9 KiB of 2.1 KiB (weights 2.9 KiB), 900 B too much" in str(e.value)
    assert "What fits: 3 such devices or devices with 3.0 KiB" in str(e.value)
    assert solve(profile, cluster(3, memory_bytes=2100), training).num_stages == 3
    assert solve(profile, cluster(2, memory_bytes=3000), training).num_stages == 2
    with pytest.raises(InfeasibleError, match="layer 0, alone on stage 0, needs 1000 B of 900 B"):
        solve(profile, cluster(6, memory_bytes=900), training)
    limited = training.model_copy(update={"memory_limit_bytes": 2 * 2**20})
    with pytest.raises(InfeasibleError, match=r"memory_limit of 2.0 MiB .*memory_limit='3MiB'"):
        solve(chain([1.0] * 6, parameter_bytes=2**20), cluster(2), limited)
    fixed = training.model_copy(update={"mesh": {"pp": 1}, "batch_size": 2})
    with pytest.raises(InfeasibleError, match="What fits: mesh='auto'"):
        solve(profile, cluster(3, memory_bytes=2100), fixed)
    assert solve(profile, cluster(3, memory_bytes=2100), fixed.model_copy(update={"mesh": "auto"})).num_stages == 3


@pytest.mark.parametrize("seed", range(12))
def test_the_fewest_devices_and_the_memory_that_an_error_names_are_those(seed: int) -> None:
    rng = random.Random(seed)
    profile = chain([1.0] * 7, parameter_bytes=[1000 * rng.randrange(1, 9) for _ in range(7)])
    training = Training(batch_size=1, objective="latency")
    sizes = [parameter.bytes for parameter in profile.parameters]

    def largest(num_stages: int) -> int:
        """Bytes of the largest stage of the best split."""
        return min(
            max(sum(sizes[i:j]) for i, j in itertools.pairwise((0, *cuts, 7)))
            for cuts in itertools.combinations(range(1, 7), num_stages - 1)
        )

    limit = rng.randrange(max(sizes), sum(sizes))
    fewest = min(count for count in range(1, 8) if largest(count) <= limit)
    if fewest == 1:
        return
    with pytest.raises(InfeasibleError) as e:
        solve(profile, cluster(fewest - 1, memory_bytes=limit), training)
    assert f"What fits: {fewest} such devices or devices with {format_bytes(largest(fewest - 1), up=True)}" in str(
        e.value
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_more_devices_never_make_it_slower(objective: str) -> None:
    profile = random_chain(random.Random(7), 9)
    seconds = [
        solve(profile, cluster(count, link=SLOW), Training(batch_size=8, objective=objective)).prediction.step_s
        for count in (1, 2, 4, 8)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_the_parts_of_lost_efficiency_add_up_and_the_timeline_is_that_of_the_latency(tmp_path: object) -> None:
    profile = random_chain(random.Random(3), 8)
    training = Training(batch_size=8, objective="latency", mesh={"pp": 3, "dp": 2})
    plan = solve(profile, cluster(6, link=SLOW), training)
    assert plan.prediction.lost.total == pytest.approx(1 - plan.prediction.efficiency)
    timeline = simulate(plan)
    assert timeline.step_s == pytest.approx(plan.prediction.step_s)
    assert {span.kind for span in timeline.spans} <= {"F", "send", "recv"}
    again = Plan.model_validate_json(plan.model_dump_json())
    assert again == plan and load is not None


def test_orders_of_backward_passes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="orders backward passes"):
        solve(chain([1.0, 1.0]), cluster(2), Training(batch_size=2, objective="latency", schedule="1f1b"))


def test_pins_that_short_memory_leaves_no_room_for_are_told_with_what_is_short() -> None:
    profile = chain([1.0] * 8, parameter_bytes=1000, tensor_bytes=10)
    with pytest.raises(InfeasibleError, match=r"does not fit: stage 0 .* needs 2.9 KiB of 2.5 KiB .* 4 such devices"):
        solve(profile, cluster(3, memory_bytes=2600), Training(batch_size=12, objective="throughput", pin={"3": 1}))
