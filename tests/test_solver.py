"""Plans against brute force, published cases and what every plan must hold."""

import itertools
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from chains import LOTS, chain, cluster, random_branches, random_chain
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partitioner.costs import single_device
from partitioner.errors import ArgumentError, InfeasibleError
from partitioner.graph import CostGraph
from partitioner.memory import memory_limit, stage_memory
from partitioner.schedule import in_flight
from partitioner.simulator import predict, simulate
from partitioner.solver import chain as chains
from partitioner.solver import played, solve
from partitioner.solver import problem as one_setting
from partitioner.solver.arrangement import arranged
from partitioner.solver.chain import Chain, best_split, cheapest_split, smallest_bottleneck
from partitioner.solver.evaluate import Replayer
from partitioner.solver.layout import Site
from partitioner.solver.limits import Limits
from partitioner.solver.problem import Problem
from partitioner.solver.settings import Setting, divisors, mesh_levels
from partitioner.solver.settings import settings as every_setting
from partitioner.solver.starts import stage_starts
from partitioner.specs import Link, Saving, Training, parse_bytes
from partitioner.split import Split

FAST = Link.of(1e-5, 1e11)
SLOW = Link.of(1e-6, 1e9)
SLOWER = Link.of(1e-5, 1e8)


def layouts_of(there, num_stages, num_replicas):
    return [one.devices for one in arranged(Site(there, Training(batch_size=1)), num_stages, num_replicas).layouts]


def sizes(plan):
    return [len(stage.layers) for stage in plan.stages]


def total_s(plan):
    return plan.prediction.step_s + plan.prediction.optimizer_s


# Cases with a known answer


@pytest.mark.parametrize("m", [1, 2, 8, 64])
def test_a_head_slower_than_the_rest_caps_the_speedup_for_any_number_of_micro_batches(m):
    plan = solve(
        chain([1, 1, 1, 1, 1, 1, 8]), cluster(2), Training(batch_size=64, mesh={"pp": 2, "dp": 1}, microbatches=m)
    )
    assert sizes(plan) == [6, 1]
    bottleneck = max(stage.forward_s for stage in plan.prediction.stages) / plan.microbatch_samples
    assert bottleneck == 8
    assert plan.prediction.speedup <= 1.75
    assert any("cannot be cut further" in reason and "1.75" in reason for reason in plan.why)


def test_three_layers_on_eight_devices_make_no_empty_stage():
    plan = solve(chain([1.0, 1.0, 1.0]), cluster(8), Training(batch_size=32))
    assert plan.mesh in ({"pp": 1, "dp": 8}, {"pp": 2, "dp": 4})
    assert all(stage.layers for stage in plan.stages)
    assert plan.num_ranks == 8


def test_devices_left_over_are_said_to_be():
    plan = solve(chain([1.0, 1.0, 1.0]), cluster(8), Training(batch_size=10))
    assert plan.num_ranks == 6  # 8 = 1 x 8 or 2 x 4 and 7 = 1 x 7 do not divide the batch
    assert any("6 of 8 devices are used" in reason and "batch of 10" in reason for reason in plan.why)


def test_more_stages_than_layers_is_one_error_with_both_numbers():
    with pytest.raises(ArgumentError, match=r"pp=8 .* the model has 3"):
        solve(chain([1.0, 1.0, 1.0]), cluster(8), Training(batch_size=32, mesh={"pp": 8, "dp": 1}))


@pytest.mark.parametrize(("speeds", "counts"), [((2.0, 1.0), [8, 4]), ((1.0, 2.0), [4, 8])])
def test_a_device_twice_as_fast_gets_twice_the_layers(speeds, counts):
    plan = solve(
        chain([1.0] * 12), cluster(2, speeds=speeds), Training(batch_size=16, mesh={"pp": 2, "dp": 1}, microbatches=16)
    )
    assert sizes(plan) == counts
    assert [stage.forward_s for stage in plan.prediction.stages] == [4.0, 4.0]


def test_a_limit_that_only_stage_0_breaks_moves_layers_to_later_stages():
    profile = chain([1.0] * 8, saved_bytes=100)
    free = solve(profile, cluster(4), Training(batch_size=8, mesh={"pp": 4, "dp": 1}, microbatches=8, schedule="1f1b"))
    assert sizes(free) == [2, 2, 2, 2]
    assert [stage.memory.total for stage in free.prediction.stages] == [800, 600, 400, 200]
    assert [stage.in_flight for stage in free.prediction.stages] == [4, 3, 2, 1]
    tight = solve(
        profile,
        cluster(4, memory_bytes=650),
        Training(batch_size=8, mesh={"pp": 4, "dp": 1}, microbatches=8, schedule="1f1b"),
    )
    assert sizes(tight)[0] == 1
    assert sum(sizes(tight)) == 8
    assert all(stage.memory.total <= 650 for stage in tight.prediction.stages)
    assert any("memory of stage 0 binds" in reason for reason in tight.why)


def test_a_stage_0_that_cannot_fit_is_named_with_the_bytes_short_and_what_fits():
    profile = chain([1.0] * 4, saved_bytes=[1000, 10, 10, 10])
    request = {"batch_size": 8, "mesh": {"pp": 4, "dp": 1}, "microbatches": 8}
    with pytest.raises(
        InfeasibleError, match=r"does not fit: layer 0, alone on stage 0, needs 3.9 KiB of 2.0 KiB"
    ) as e:
        solve(profile, cluster(4, memory_bytes=2048), Training(**request, schedule="1f1b"))
    assert "1.9 KiB too much" in str(e.value)
    assert "mesh=" in str(e.value)  # fewer stages hold fewer micro-batches
    with pytest.raises(InfeasibleError, match=r"schedule='1f1b'"):
        solve(profile, cluster(4, memory_bytes=4096), Training(**request, schedule="gpipe"))


@pytest.mark.parametrize("mesh", [{"pp": 1, "dp": 4}, {"dp": 4}])
def test_a_batch_that_cannot_be_halved_over_the_replicas_asked_for_is_no_way_out(mesh):
    profile = chain([1.0] * 4, parameter_bytes=400, saved_bytes=300)
    with pytest.raises(InfeasibleError, match=r"does not fit: stage 0 .* What fits: .*devices with") as e:
        solve(profile, cluster(4, memory_bytes=2_000), Training(batch_size=8, mesh=mesh))
    assert "batch_size" not in str(e.value)


def test_the_ways_out_that_an_error_names_do_fit():
    profile = chain([1.0] * 6, parameter_bytes=400, saved_bytes=300)
    with pytest.raises(InfeasibleError) as e:
        solve(profile, cluster(2, memory_bytes=4_000), Training(batch_size=4))
    assert "What fits: 5 such devices or devices with" in str(e.value)
    solve(profile, cluster(5, memory_bytes=4_000), Training(batch_size=4))
    with pytest.raises(InfeasibleError):
        solve(profile, cluster(4, memory_bytes=4_000), Training(batch_size=4))
    with pytest.raises(InfeasibleError) as e:
        solve(profile, cluster(2, memory_bytes=1_500), Training(batch_size=4, recompute="never"))
    enough = parse_bytes(str(e.value).rpartition("devices with ")[2].removesuffix("."))
    solve(profile, cluster(2, memory_bytes=enough), Training(batch_size=4, recompute="never"))
    with pytest.raises(InfeasibleError, match="batch_size=2"):
        solve(profile, cluster(1, memory_bytes=13_300), Training(batch_size=4, microbatches=1))
    solve(profile, cluster(1, memory_bytes=13_300), Training(batch_size=2, microbatches=1))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"batch_size": 10, "mesh": {"pp": 1, "dp": 4}}, r"batch_size 10 .* 4 replicas: use batch_size 8 or 12"),
        ({"batch_size": 3, "mesh": {"pp": 1, "dp": 4}}, r"batch_size 3 .* 4 replicas: use batch_size 4"),
        ({"batch_size": 16, "microbatches": 5, "mesh": {"pp": 2, "dp": 2}}, r"5 micro-batches .* 8 samples .* 4 or 8"),
        ({"batch_size": 7, "microbatches": 2}, r"2 micro-batches .* 7 samples .* 1 or 7 .* batch_size 6 or 8"),
        ({"batch_size": 8, "mesh": {"pp": 2, "dp": 4}}, r"needs 8 devices, there are 4"),
        ({"batch_size": 8, "pin": {"nobody": 0}}, r"'nobody'.* 6 layers"),
        ({"batch_size": 8, "pin": {"2": 2, "3": 1}}, r"layer 2 on stage 2 .* layer 3 on stage 1"),
        ({"batch_size": 8, "pin": {"1": 0, "2": 2}}, r"between them 1 cuts are possible and 2 are needed"),
        ({"batch_size": 8, "pin": {"5": 3}, "mesh": {"pp": 2, "dp": 1}}, r"stage 3, but pp=2"),
        ({"batch_size": 8, "pin": {"5": 9}}, r"stage 9.* 4 devices"),
        ({"batch_size": 8, "pin": {"1": 3}}, r"layer 1 on stage 3, which needs 3 cuts before it, but 1 are"),
    ],
)
def test_what_cannot_be_had_is_one_error_with_both_numbers(request_, words):
    with pytest.raises(ArgumentError, match=words):
        solve(chain([1.0] * 6), cluster(4), Training(**request_))


@pytest.mark.parametrize("seconds", [[4e7] * 3, [1e-12, 9e7, 1e-12]])
def test_a_step_of_more_than_three_years_is_refused_with_its_largest_layer(seconds):
    with pytest.raises(ArgumentError, match=r"over three years, of which layer [01] takes .* in seconds"):
        solve(chain(seconds), cluster(2), Training(batch_size=8))


# What the user pins


def test_pinned_layers_stay_where_they_are_pinned():
    profile = chain([1.0] * 8)
    plan = solve(profile, cluster(2), Training(batch_size=8, mesh={"pp": 2, "dp": 1}, pin={"5": 0}))
    assert sizes(plan) == [6, 2]
    plan = solve(profile, cluster(2), Training(batch_size=8, mesh={"pp": 2, "dp": 1}, pin={"2": 1, "0": 0}))
    assert sizes(plan) == [2, 6]


def test_odd_requests_are_answered():
    nothing = chain([0.0, 0.0, 1.0], tensor_bytes=10)
    assert sum(sizes(solve(nothing, cluster(2), Training(batch_size=1)))) == 3
    with pytest.raises(InfeasibleError, match="does not fit: layer 0, alone on stage 0"):
        solve(chain([1.0]), cluster(1, memory_bytes=10, overhead_bytes=1_000), Training(batch_size=1))
    uncut = chain([1.0] * 4, no_cut={str(k): "one module call" for k in range(1, 4)})
    assert solve(uncut, cluster(4), Training(batch_size=8)).mesh == {"pp": 1, "dp": 4}
    assert solve(uncut, cluster(4), Training(batch_size=7)).num_ranks == 1
    apart = chain([1.0] * 4).model_copy(update={"tensors": ()})  # stages that do not wait for each other
    plan = solve(apart, cluster(4), Training(batch_size=4, mesh={"pp": 4, "dp": 1}))
    assert total_s(plan) == plan.lower_bound_s == 8.0


def test_a_whole_split_by_hand_is_kept_and_compared_with_the_best():
    profile = chain([1.0] * 8)
    pin = {str(k): int(k >= 6) for k in range(8)}
    plan = solve(profile, cluster(2), Training(batch_size=8, pin=pin, microbatches=8))
    assert sizes(plan) == [6, 2]
    assert any("pinned" in reason and "without" in reason for reason in plan.why)


@pytest.mark.parametrize("seed", range(10))
def test_layers_with_the_same_word_share_a_stage_in_the_best_split_that_lets_them(seed):
    rng = random.Random(seed)
    n, p = 8, rng.choice([2, 3])
    profile = chain(
        [rng.random() for _ in range(n)],
        parameter_bytes=1_000,
        tensor_bytes=100,
        ties=[((1, 4), 10**9)],
    )
    first, last = rng.choice([(0, 2), (3, 5), (6, 7)])
    training = Training(
        batch_size=4, mesh={"pp": p, "dp": 1}, microbatches=4, schedule="1f1b", pin={"1": "tied", "4": "tied"}
    )
    graph, there = CostGraph(profile), cluster(p, link=SLOW)
    best = min(
        one.step_s + one.optimizer_s
        for cuts in itertools.combinations(range(1, n), p - 1)
        if not any(1 < cut <= 4 for cut in cuts)
        for one in [predict(graph, there, training, Split.placed(there, cuts, {"pp": p, "dp": 1}, 4))]
    )
    plan = solve(profile, there, training)
    stage_of = plan.stage_of()
    assert stage_of["1"] == stage_of["4"]
    assert total_s(plan) == pytest.approx(best, rel=1e-9)
    assert plan.profile == profile
    both = {str(first): "a", str(last): "a"}
    two = solve(profile, there, training.model_copy(update={"mesh": {"pp": 2, "dp": 1}, "pin": training.pin | both}))
    stage_of = two.stage_of()
    assert stage_of[str(first)] == stage_of[str(last)]


def test_layers_that_cannot_share_a_stage_are_refused():
    def refused(pin, **more):
        with pytest.raises(ArgumentError) as e:
            solve(chain([1.0] * 6), cluster(4), Training(batch_size=8, pin=pin, **more))
        return str(e.value)

    assert "'tied' for layer '2' alone" in refused({"2": "tied"})
    assert "'nobody'" in refused({"2": "tied", "nobody": "tied"})
    ends = {"0": "ends", "5": "ends"}
    assert "the model has 1; of its 6 layers, 5 cannot start a stage: pin keeps 0, 5 together ('ends')" in refused(
        ends, mesh={"pp": 2}
    )
    later = refused({"2": "some", "5": "some", "3": 1, "4": 2})
    assert "between them 0 cuts are possible and 1 are needed: pin keeps 2, 5 together" in later
    for objective in ("throughput", "latency"):
        plan = solve(
            chain([1.0] * 6), cluster(3), Training(batch_size=1, pin={"1": "a", "4": "a"}, objective=objective)
        )
        assert plan.stage_of()["1"] == plan.stage_of()["4"]


# Meshes, layouts and links


def test_replicas_win_where_sync_is_cheap_and_stages_where_it_is_dear():
    def mesh(parameter_bytes, tensor_bytes):
        profile = chain([1e-3] * 8, parameter_bytes=parameter_bytes, tensor_bytes=tensor_bytes)
        return solve(profile, cluster(4, link=SLOW), Training(batch_size=64)).mesh

    assert mesh(4_000, 4_000) == {"pp": 1, "dp": 4}
    assert mesh(400_000_000, 4_000) == {"pp": 4, "dp": 1}


def test_the_axis_that_moves_more_stays_inside_a_node():
    def ranks(parameter_bytes, tensor_bytes):
        profile = chain([1e-3] * 8, parameter_bytes=parameter_bytes, tensor_bytes=tensor_bytes)
        there = cluster(4, link=SLOW, inter=SLOWER, nodes=[0, 0, 1, 1])
        return [s.ranks for s in solve(profile, there, Training(batch_size=64, mesh={"pp": 2, "dp": 2})).stages]

    assert ranks(4_000, 400_000) == [(0, 2), (1, 3)]  # a replica a node
    assert ranks(4_000_000, 400) == [(0, 1), (2, 3)]  # a stage a node


def test_one_layout_is_left_where_both_take_the_same_time():
    assert len(layouts_of(cluster(4), 2, 2)) == 1
    assert len(layouts_of(cluster(4, nodes=[0, 0, 1, 1], inter=SLOWER), 2, 2)) == 2
    assert len(layouts_of(cluster(4, nodes=[0, 0, 1, 1], inter=SLOWER), 1, 4)) == 1
    # a fast and a slow replica, the slow devices first, the fast devices first, one replica each way
    assert len(layouts_of(cluster(4, speeds=[1.0, 1.0, 2.0, 2.0]), 2, 2)) == 4


@pytest.mark.parametrize(
    "there",
    [
        cluster(4, speeds=[0.7, 1.0, 2.0, 1.0]),
        cluster(4, nodes=[0, 0, 0, 1], link=SLOW, inter=SLOWER),
        cluster(3, nodes=[0, 1, 1], link=SLOW, inter=SLOWER),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_no_other_order_of_few_devices_is_faster(there, seed):
    """Neither where they are unequal, as replicas too, nor where their nodes are."""
    pp, dp = (2, 2) if there.num_devices == 4 else (3, 1)
    graph = CostGraph(random_chain(random.Random(seed), 4).model_copy(update={"no_cut": {}}))
    training = Training(batch_size=4, mesh={"pp": pp, "dp": dp}, microbatches=2, schedule="1f1b")
    best = min(
        one.step_s + one.optimizer_s
        for order in itertools.permutations(range(pp * dp))
        for cuts in itertools.combinations(graph.allowed_cuts, pp - 1)
        for one in [predict(graph, there, training, Split(cuts, tuple(order[place::pp] for place in range(pp)), 2))]
    )
    plan = solve(graph.profile, there, training)
    assert total_s(plan) == pytest.approx(best, rel=1e-9)
    assert plan.lower_bound_s <= best * (1 + 1e-9)


def test_one_device_is_a_plan_like_any_other():
    plan = solve(chain([1.0] * 3, parameter_bytes=400, optimizer_s=0.5), cluster(1), Training(batch_size=4))
    assert (plan.mesh, plan.num_microbatches, plan.prediction.speedup) == ({"pp": 1, "dp": 1}, 1, 1.0)
    assert total_s(plan) == plan.lower_bound_s == 24.5


def test_what_was_not_chosen_is_there_to_compare_with():
    plan = solve(chain([1e-3] * 8, tensor_bytes=4_000), cluster(4, link=SLOW), Training(batch_size=32))
    others = {(other.mesh["pp"], other.mesh["dp"], other.schedule): other for other in plan.runners_up}
    assert plan.mesh == {"pp": 1, "dp": 4}
    assert set(others) == {(2, 2, "1f1b"), (2, 2, "gpipe"), (4, 1, "1f1b"), (4, 1, "gpipe")}
    assert all(sum(other.stage_sizes) == 8 and other.step_s > total_s(plan) for other in others.values())
    times = [other.step_s for other in plan.runners_up]
    assert times == sorted(times)


def test_an_axis_left_out_of_the_mesh_is_free():
    assert solve(chain([1.0] * 8), cluster(4), Training(batch_size=8, mesh={"pp": 2})).mesh == {"pp": 2, "dp": 2}


def test_divisors():
    for number in (1, 2, 12, 49, 97, 360):
        assert divisors(number) == [k for k in range(1, number + 1) if number % k == 0]


# The chain against the O(n^2 k) table and against every split


def slow_bottleneck(chain_):
    """best[s + 1][j] = min over i < j of max(best[s][i], seconds(s, i, j))."""
    n = chain_.num_layers
    best = [0.0] + [float("inf")] * n
    for s, speed in enumerate(chain_.speeds):
        following = [float("inf")] * (n + 1)
        for j in range(1, n + 1):
            for i in range(j):
                if i in chain_.starts.positions(s):
                    seconds = (chain_.prefix_s[j] - chain_.prefix_s[i]) / speed
                    following[j] = min(following[j], max(best[i], seconds))
        best = following
    return best[n]


def slow_cheapest(chain_, bottleneck):
    """best[s + 1][j] = min over i < j of best[s][i] + hop(s, i) + seconds(s, i, j), where it is allowed and fits."""
    n = chain_.num_layers
    best = [0.0] + [float("inf")] * n
    for s, speed in enumerate(chain_.speeds):
        following = [float("inf")] * (n + 1)
        for j in range(1, n + 1):
            for i in range(j):
                seconds = (chain_.prefix_s[j] - chain_.prefix_s[i]) / speed
                fits = chain_.limits is None or bool(chain_.limits.fits(s, i, j))
                if i in chain_.starts.positions(s) and fits and seconds <= bottleneck * (1 + 1e-12):
                    following[j] = min(following[j], best[i] + (chain_.hops_s[s, i] if s else 0.0) + seconds)
        best = following
    return best[n]


class Shelf(Limits):
    """Layers take up space, and so does what crosses a cut, on both sides of it."""

    def __init__(self, used, wide, limit):
        self.used, self.wide, self.limit = used, wide, limit

    def fits(self, stage, first, last):
        return self.used[last] - self.used[first] + self.wide[first] + self.wide[last] <= self.limit[stage]

    def roomy(self, stage, first, last):
        return self.used[last] - self.used[first] <= self.limit[stage]


def random_problem(rng):
    n = rng.randrange(2, 11)
    p = rng.randrange(1, min(n, 4) + 1)
    seconds = [rng.choice([rng.random(), float(rng.randrange(4))]) for _ in range(n)]
    allowed = tuple(k for k in range(1, n) if rng.random() < 0.85)
    pins = {rng.randrange(n): rng.randrange(p)} if rng.random() < 0.3 else {}
    starts = stage_starts(n, p, allowed, pins)
    splits = [
        cuts
        for cuts in itertools.combinations(allowed, p - 1)
        if all((0, *cuts)[stage] <= k < (*cuts, n)[stage] for k, stage in pins.items())
    ]
    if starts is None:
        return None, splits
    used = np.concatenate(([0.0], np.cumsum([rng.randrange(5) for _ in range(n)])))
    wide = np.array([rng.randrange(4) for _ in range(n + 1)])
    limit = np.array([rng.randrange(4, 16) for _ in range(p)])
    bound = rng.random() < 0.5
    return Chain(
        prefix_s=np.concatenate(([0.0], np.cumsum(seconds))),
        speeds=tuple(rng.choice([1.0, 2.0]) for _ in range(p)) if rng.random() < 0.4 else (1.0,) * p,
        starts=starts,
        hops_s=np.array([[rng.random() * 2 for _ in range(n + 1)] for _ in range(p)]),
        limits=Shelf(used, wide, limit) if bound else None,
    ), splits


@pytest.mark.parametrize("seed", range(300))
def test_the_chain_is_cut_as_well_as_any_split_of_it(seed):
    rng = random.Random(seed)
    problem, splits = random_problem(rng)
    assert (problem is None) == (not splits)
    if problem is None:
        return
    every = [problem.split(cuts) for cuts in splits]
    free = replace(problem, limits=None)
    assert smallest_bottleneck(free) == pytest.approx(min(split.bottleneck_s for split in every))
    assert smallest_bottleneck(free) == pytest.approx(slow_bottleneck(free))
    edges = {cuts: list(zip((0, *cuts), (*cuts, problem.num_layers), strict=True)) for cuts in splits}
    fitting = [
        split
        for split in every
        if problem.limits is None or all(problem.limits.fits(s, i, j) for s, (i, j) in enumerate(edges[split.cuts]))
    ]
    if problem.limits is not None:
        roomy = [
            split.bottleneck_s
            for split in every
            if all(problem.limits.roomy(s, i, j) for s, (i, j) in enumerate(edges[split.cuts]))
        ]
        assert smallest_bottleneck(problem) == pytest.approx(min(roomy, default=float("inf")))
    for bottleneck in (rng.random() * problem.prefix_s[-1], float("inf")):
        found = cheapest_split(problem, bottleneck)
        best = min((one.sum_s for one in fitting if one.bottleneck_s <= bottleneck), default=float("inf"))
        assert best == pytest.approx(slow_cheapest(problem, bottleneck))
        assert (float("inf") if found is None else found.sum_s) == pytest.approx(best)
    weight = rng.choice([0, 1, 7, 63])
    ranked = best_split(problem, weight)
    assert bool(ranked) == bool(fitting)
    if fitting:
        best = min(split.sum_s + weight * split.bottleneck_s for split in fitting)
        assert ranked[0].sum_s + weight * ranked[0].bottleneck_s == pytest.approx(best)


# Replaying many splits at once against the simulator


@pytest.mark.parametrize("seed", range(24))
def test_splits_replayed_together_take_what_the_simulator_predicts(seed):
    rng = random.Random(seed)
    n = rng.randrange(2, 8)
    p, dp, m = rng.randrange(1, min(4, n) + 1), rng.choice([1, 2]), rng.choice([1, 2, 3, 6])
    graph = CostGraph(random_chain(rng, n).model_copy(update={"no_cut": {}}))
    there = cluster(
        p * dp,
        link=SLOW,
        inter=SLOWER,
        nodes=sorted(rng.randrange(2) for _ in range(p * dp)),
        speeds=[rng.choice([1.0, 2.0]) for _ in range(p * dp)] if seed % 3 == 0 else None,
    )
    training = Training(batch_size=2 * dp * m)
    baseline = single_device(graph, there, training)
    for schedule in ("gpipe", "1f1b"):
        for ranks in layouts_of(there, p, dp):
            setting = Setting(p, dp, schedule, m, 2, ranks)
            splits = list(itertools.combinations(range(1, n), p - 1))
            totals = Replayer(graph, there, setting).total_s(np.array(splits, dtype=int).reshape(len(splits), p - 1))
            for cuts, total in zip(splits, totals, strict=True):
                one = predict(graph, there, training, setting.split(cuts), baseline=baseline)
                assert total == pytest.approx(one.step_s + one.optimizer_s, rel=1e-9)


# The whole search against brute force


def brute_force(graph, there, training):
    """The least step + optimizer over every setting, split and choice of what each stage recomputes and its replicas
    divide that fits, of those that use the most devices."""
    baseline = single_device(graph, there, training)
    recomputes = {"never": [False], "always": [True], "auto": [False, True]}[training.recompute]
    for meshes in mesh_levels(graph, there, training):
        best = float("inf")
        for setting, _ in every_setting(Site(there, training), training, meshes):
            levels = ["none", "zero1", "zero2"] if training.shard == "auto" else [training.shard]
            choices = list(itertools.product(recomputes, levels if setting.num_replicas > 1 else ["none"]))
            for cuts in itertools.combinations(graph.allowed_cuts, setting.num_stages - 1):
                for chosen in itertools.product(choices, repeat=setting.num_stages):
                    split = setting.split(cuts, [Saving(*one) for one in chosen])
                    held = (
                        (stage_memory(graph, training, device, split, stage), device)
                        for stage, ranks in enumerate(setting.devices)
                        for device in {there.devices[rank] for rank in ranks}
                    )
                    if all(items.total <= memory_limit(device, training) for items, device in held):
                        one = predict(graph, there, training, split, baseline=baseline)
                        best = min(best, one.step_s + one.optimizer_s)
        if best < float("inf"):
            return best
    return None


@pytest.mark.parametrize("few_splits", [2_000, 0])
@pytest.mark.parametrize(
    ("seed", "made"), [*((seed, random_chain) for seed in range(16)), *((seed, random_branches) for seed in range(4))]
)
def test_no_split_beats_the_plan_by_more_than_its_gap(seed, made, few_splits, monkeypatch):
    monkeypatch.setattr(one_setting, "FEW_SPLITS", few_splits)  # 0: proposals, bounds and hill climbing alone
    rng = random.Random(seed)
    graph = CostGraph(made(rng, rng.randrange(2, 7)))
    devices = rng.choice([1, 2, 3, 4])
    there = cluster(
        devices,
        link=SLOW,
        inter=SLOWER,
        memory_bytes=rng.choice([LOTS, rng.randrange(500_000, 2_500_000)]),
        overhead_bytes=1_000,
        nodes=sorted(rng.randrange(2) for _ in range(devices)),
        speeds=[rng.choice([1.0, 2.0]) for _ in range(devices)] if seed % 4 == 0 else None,
    )
    training = Training(batch_size=rng.choice([4, 6, 8]), recompute=rng.choice(["never", "auto", "always"]))
    best = brute_force(graph, there, training)
    if best is None:
        with pytest.raises(InfeasibleError, match="does not fit"):
            solve(graph.profile, there, training)
        return
    plan = solve(graph.profile, there, training)
    assert plan.lower_bound_s <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= total_s(plan) <= best * (1 + plan.gap) * (1 + 1e-9)
    assert total_s(plan) <= best * (1.0 + 1e-9 if few_splits else 1.05)
    if few_splits:
        assert plan.gap < 1e-9


@pytest.mark.parametrize("made", [random_chain, random_branches])
@pytest.mark.parametrize("seed", range(40))
def test_no_split_is_faster_than_the_lower_bound_of_its_setting(seed, made):
    rng = random.Random(seed)
    n, p, dp, m = rng.randrange(5, 10), rng.randrange(2, 6), rng.choice([1, 2]), rng.choice([1, 2, 5, 12, 24])
    p = min(p, n)
    graph = CostGraph(made(rng, n).model_copy(update={"no_cut": {}}))
    there = cluster(
        p * dp,
        link=rng.choice([SLOW, SLOWER]),
        nodes=[rank // 2 for rank in range(p * dp)],
        inter=SLOWER,
        memory_bytes=rng.choice([LOTS, 2_000_000]),
        speeds=[rng.choice([1.0, 3.0]) for _ in range(p * dp)] if seed % 3 == 0 else None,
    )
    for schedule in ("gpipe", "1f1b"):
        for ranks in layouts_of(there, p, dp):
            setting = Setting(p, dp, schedule, m, 1, ranks)
            starts = stage_starts(n, p, graph.allowed_cuts)
            problem = Problem(graph, there, Training(batch_size=dp * m), setting, starts)
            splits = np.array(list(itertools.combinations(range(1, n), p - 1)))
            splits = splits[problem.fitting(splits)]
            best = min(problem.replayer.total_s(splits)) if len(splits) else float("inf")
            assert problem.bounds.quick() <= problem.bounds.tight() * (1 + 1e-9)
            assert problem.bounds.tight() <= best * (1 + 1e-9)


def test_equal_stages_reach_the_lower_bound():
    profile = chain([1e-3] * 12, tensor_bytes=8_000)
    for schedule in ("gpipe", "1f1b"):
        request = Training(batch_size=64, mesh={"pp": 4, "dp": 1}, microbatches=64, schedule=schedule)
        plan = solve(profile, cluster(4), request)
        assert sizes(plan) == [3, 3, 3, 3]
        assert plan.gap == pytest.approx(0, abs=1e-4)  # the precision of the bisection
        assert plan.prediction.step_s == pytest.approx((64 + 3) * 6e-3)


# What every plan must hold


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 30),
    devices=st.integers(1, 8),
    batch_size=st.sampled_from([4, 8, 12, 30]),
    limited=st.booleans(),
)
def test_plans_lose_no_layer_keep_to_the_memory_and_are_no_worse_than_the_equal_split(
    seed, n, devices, batch_size, limited
):
    rng = random.Random(seed)
    graph = CostGraph(random_chain(rng, n))
    there = cluster(devices, link=SLOW, memory_bytes=rng.randrange(10**6, 10**7) if limited else LOTS)
    training = Training(batch_size=batch_size)
    try:
        plan = solve(graph.profile, there, training)
    except InfeasibleError as error:
        assert "does not fit: " in str(error)  # noqa: PT017
        return
    assert [name for stage in plan.stages for name in stage.layers] == list(graph.ids)
    assert all(stage.layers for stage in plan.stages)
    assert all(stage.memory.total <= there.devices[0].memory_bytes for stage in plan.prediction.stages)
    assert [s.in_flight for s in plan.prediction.stages] == [
        in_flight(plan.schedule, k, plan.num_stages, plan.num_microbatches) for k in range(plan.num_stages)
    ]
    assert plan.lower_bound_s <= total_s(plan)
    as_many = [other for other in plan.runners_up if other.mesh["pp"] * other.mesh["dp"] == plan.num_ranks]
    assert all(other.step_s is None or other.step_s >= total_s(plan) * (1 - 1e-9) for other in as_many)
    assert solve(graph.profile, there, training) == plan
    cuts = [round(n * s / plan.num_stages) for s in range(1, plan.num_stages)]
    if set(cuts) <= set(graph.allowed_cuts):
        equal = predict(graph, there, training, replace(plan.split, cuts=tuple(cuts), savings=()))
        if all(stage.memory.total <= there.devices[0].memory_bytes for stage in equal.stages):
            assert total_s(plan) <= (equal.step_s + equal.optimizer_s) * (1 + 1e-9)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), n=st.integers(3, 20))
def test_more_memory_or_other_names_never_make_a_plan_slower(seed, n):
    rng = random.Random(seed)
    profile = random_chain(rng, n)
    training = Training(batch_size=8, recompute=rng.choice(["never", "auto"]))
    times = []
    for memory_bytes in (2 * 10**6, 4 * 10**6, LOTS):
        try:
            plan = solve(profile, cluster(4, link=SLOW, memory_bytes=memory_bytes), training)
        except InfeasibleError:
            continue
        times.append((plan.num_ranks, total_s(plan), plan.gap))
    for (ranks, before, _), (more, after, gap) in itertools.pairwise(times):
        assert more > ranks or after <= before * (1 + gap + 1e-9)
    renamed = type(profile).model_validate_json(
        re.sub(r'"(\d+)"', lambda found: f'"layer.{found[1]}"', profile.model_dump_json())
    )
    there = cluster(4, link=SLOW)
    plan, other = solve(profile, there, training), solve(renamed, there, training)
    assert total_s(plan) == total_s(other) and sizes(plan) == sizes(other) and plan.mesh == other.mesh


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), n=st.integers(4, 20))
def test_twice_the_devices_never_take_longer_where_sync_and_transfers_are_free(seed, n):
    profile = random_chain(random.Random(seed), n)
    profile = profile.model_copy(update={"no_cut": {}, "slicing_s": 0.0})
    plans = [solve(profile, cluster(devices), Training(batch_size=8)) for devices in (1, 2, 4)]
    for fewer, more in itertools.pairwise(plans):
        assert total_s(more) <= total_s(fewer) * (1 + more.gap + 1e-9)


# Recomputation, several stages a rank, unequal devices


def test_stages_that_do_not_fit_otherwise_recompute_and_no_others_do():
    profile = chain([1.0] * 8, saved_bytes=100, tensor_bytes=10)
    request = {"batch_size": 8, "mesh": {"pp": 4, "dp": 1}, "microbatches": 8, "schedule": "1f1b"}
    there = cluster(4, memory_bytes=700)
    plan = solve(profile, there, Training(recompute="auto", **request))
    again = [stage.recompute for stage in plan.stages]
    assert again[0] and not again[-1]
    assert all(stage.memory.total <= 700 for stage in plan.prediction.stages)
    assert any("run" in reason and "again in the backward" in reason for reason in plan.why)
    never = solve(profile, there, Training(recompute="never", **request))
    assert total_s(plan) <= total_s(never)
    always = solve(profile, there, Training(recompute="always", **request))
    assert all(stage.recompute for stage in always.stages)
    assert total_s(plan) < total_s(always)
    free = solve(profile, cluster(4), Training(recompute="auto", **request))
    assert not any(stage.recompute for stage in free.stages)


@pytest.mark.parametrize(
    ("schedule", "stages"), [("interleaved", 8), ("zero-bubble", 4), ("zero-bubble-h2", 4), ("zero-bubble-v", 8)]
)
def test_a_schedule_that_is_not_run_here_is_planned_when_asked_for_and_says_so(schedule, stages):
    profile = chain([1.0] * 16, tensor_bytes=100)
    request = {"batch_size": 16, "mesh": {"pp": 4, "dp": 1}, "microbatches": 8}
    plan = solve(profile, cluster(4), Training(schedule=schedule, **request))
    plain = solve(profile, cluster(4), Training(schedule="1f1b", **request))
    assert plan.num_stages >= stages
    assert plan.mesh == {"pp": 4, "dp": 1}
    assert not plan.runnable and any("does not run it" in reason for reason in plan.why)
    assert plan.lower_bound_s <= total_s(plan) < total_s(plain)  # smaller bubbles
    assert sum(sizes(plan)) == 16


def test_a_device_with_little_memory_gets_the_stage_that_holds_little():
    profile = chain([1.0] * 8, saved_bytes=100)
    small, large = cluster(1, memory_bytes=450).devices[0], cluster(1, memory_bytes=5_000).devices[0]
    both = cluster(2).model_copy(update={"devices": (small, large)})
    plan = solve(profile, both, Training(batch_size=8, mesh={"pp": 2, "dp": 1}, microbatches=8, schedule="1f1b"))
    assert [stage.ranks for stage in plan.stages] == [(1,), (0,)]  # stage 0 holds twice as many micro-batches
    assert sizes(plan) == [4, 4]
    assert any("stages are on devices 1, 0" in reason for reason in plan.why)


def test_a_limit_that_the_user_set_is_called_by_its_name():
    profile = chain([1.0] * 4, saved_bytes=2**20)
    with pytest.raises(InfeasibleError, match=r"of the memory_limit of 512.0 KiB .*memory_limit='"):
        solve(profile, cluster(2), Training(batch_size=4, memory_limit_bytes=2**19))
    with pytest.raises(InfeasibleError, match=r"recompute='auto'"):
        solve(chain([1.0] * 4, saved_bytes=1_000), cluster(1, memory_bytes=2_500), Training(batch_size=1))


def test_more_micro_batches_are_not_advised_where_they_would_take_longer():
    profile = chain([1e-3] * 8, fixed_s=5e-3, sizes=(1, 4))
    plan = solve(profile, cluster(2), Training(batch_size=16, mesh={"pp": 2, "dp": 1}))
    text = " ".join(plan.why)
    assert "micro-batches would take" in text and "longer" in text
    fixed = solve(profile, cluster(2), Training(batch_size=16, mesh={"pp": 2, "dp": 1}, microbatches=16))
    found = re.search(r"(\d+) micro-batches instead of 16 would take ([\d.]+) % less", " ".join(fixed.why))
    assert found is not None
    assert int(found[1]) == plan.num_microbatches
    assert 0 < float(found[2]) <= 100 * (1 - total_s(plan) / total_s(fixed)) + 0.06  # it may have other stages, too


@pytest.mark.parametrize("made", [random_chain, random_branches])
@pytest.mark.parametrize("seed", range(30))
def test_a_bottleneck_found_in_leaps_is_the_one_found_by_halves(seed, made, monkeypatch):
    rng = random.Random(seed)
    n, p, m = rng.randrange(8, 30), rng.randrange(2, 8), rng.choice([1, 2, 8, 32])
    graph = CostGraph(made(rng, n).model_copy(update={"no_cut": {}}))
    there = cluster(p, memory_bytes=rng.choice([LOTS, rng.randrange(200_000, 3_000_000)]))
    setting = Setting(p, 1, rng.choice(["1f1b", "gpipe"]), m, 1, tuple((k,) for k in range(p)))
    training = Training(batch_size=m, recompute=rng.choice(["auto", "never"]))
    chain = Problem(graph, there, training, setting, stage_starts(n, p, graph.allowed_cuts)).chain
    found = smallest_bottleneck(chain, precision=0.0)
    monkeypatch.setattr(chains, "_following", lambda chain, prefix, bottleneck: bottleneck)
    assert found == pytest.approx(smallest_bottleneck(chain, precision=0.0), rel=1e-11)


@pytest.mark.parametrize("seed", range(6))
def test_long_steps_are_extrapolated_to_what_a_full_replay_takes(seed, monkeypatch):
    rng = random.Random(seed)
    graph = CostGraph(random_chain(rng, 9).model_copy(update={"no_cut": {}}))
    there = cluster(3, link=rng.choice([SLOW, SLOWER]))
    setting = Setting(3, 1, "1f1b", 512, 1, ((0,), (1,), (2,)))
    splits = np.array(list(itertools.combinations(range(1, 9), 2)))
    replayer = Replayer(graph, there, setting)
    quick = replayer.total_s(splits)
    monkeypatch.setattr(played, "SAME", -1.0)  # no rounds are alike
    assert quick == pytest.approx(replayer.total_s(splits), rel=1e-11)
    if graph.linked[1:-1].all():
        assert (replayer.least_s(splits) <= quick * (1 + 1e-9)).all()


# Sharding over replicas


@pytest.mark.parametrize("level", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("seed", range(6))
def test_no_split_of_sharded_replicas_beats_the_plan(level, seed):
    rng = random.Random(seed)
    graph = CostGraph(random_chain(rng, rng.randrange(2, 6)))
    there = cluster(
        4,
        link=SLOW,
        inter=SLOWER,
        memory_bytes=rng.choice([LOTS, rng.randrange(600_000, 1_500_000)]),
        nodes=rng.choice([[0, 0, 0, 0], [0, 0, 1, 1]]),
    )
    training = Training(batch_size=rng.choice([4, 8]), shard=level, recompute=rng.choice(["never", "auto"]))
    best = brute_force(graph, there, training)
    if best is None:
        with pytest.raises(InfeasibleError, match="does not fit"):
            solve(graph.profile, there, training)
        return
    plan = solve(graph.profile, there, training)
    assert total_s(plan) == pytest.approx(best, rel=1e-9)
    assert plan.lower_bound_s <= best * (1 + 1e-9)
    assert plan.runnable == (plan.num_replicas == 1 or level != "zero3")
    assert {stage.shard for stage in plan.stages} == {level if plan.num_replicas > 1 else "none"}
    assert plan.prediction.lost.total == pytest.approx(1 - plan.prediction.efficiency)
    assert simulate(plan).step_s == pytest.approx(plan.prediction.step_s)


def test_each_shard_level_holds_and_sends_what_the_paper_says():
    """Of N bytes of weights, four replicas hold 4, 2.5, 1.75 and 1 N each, and zero1 and zero2 as much more as whole
    parameters cannot be divided evenly; zero3 sends 3 N a micro-batch."""
    size, per_s, count = 4_096_000, 1e9, 62
    own = size // count // 4 * 4
    size = own * count
    profile, link = chain([1.0 / count] * count, parameter_bytes=own), Link.of(0.0, per_s)
    more = own / 2  # two of the four have 16 of them
    held, busy, synced = {}, {}, {}
    for level in ("none", "zero1", "zero2", "zero3"):
        training = Training(batch_size=8, mesh={"pp": 1, "dp": 4}, microbatches=2, shard=level)
        plan = solve(profile, cluster(4, link=link), training)
        memory = plan.prediction.stages[0].memory
        held[level] = memory.weights + memory.gradients + memory.optimizer
        busy[level] = plan.prediction.stages[0].compute_s - 4.0  # beside two micro-batches of one sample, 2 s each
        synced[level] = plan.prediction.stages[0].communication_s
    each = 3 / 4 * size / per_s  # a gather or a scatter over four replicas
    assert held == {
        "none": 4 * size,
        "zero1": 2.5 * size + 2 * more,
        "zero2": 1.75 * size + 3 * more,
        "zero3": size,
    }
    assert [busy[level] for level in held] == pytest.approx([0, 0, 2 * each, 6 * each], abs=1e-9)
    assert [synced[level] for level in ("zero1", "zero2", "zero3")] == pytest.approx([2 * each, each, 0], abs=1e-9)


def test_sharding_is_named_where_it_is_what_fits():
    uncut = {str(k): "it cannot be cut" for k in range(1, 8)}
    profile = chain([1 / 8] * 8, parameter_bytes=125_000, no_cut=uncut)
    there = cluster(4, memory_bytes=3_800_000)
    with pytest.raises(InfeasibleError, match="What fits: shard='auto'"):
        solve(profile, there, Training(batch_size=4))
    plan = solve(profile, there, Training(batch_size=4, shard="auto"))
    assert plan.num_replicas > 1 and plan.runnable and plan.stages[0].shard == "zero1"
    assert any("the 4 replicas of the model divide the optimizer's state, without" in reason for reason in plan.why)
    there = cluster(4, memory_bytes=2_500_000)
    with pytest.raises(InfeasibleError, match=r"What fits: shard='zero3' \(solve\(\) predicts it"):
        solve(profile, there, Training(batch_size=4))
    plan = solve(profile, there, Training(batch_size=4, shard="zero3"))
    assert plan.num_replicas > 1 and not plan.runnable
    assert any("shard='zero3' is planned and predicted" in reason for reason in plan.why)


def test_a_stage_of_few_large_parameters_fits_where_its_replicas_can_divide_them():
    """Two of four parameters each: whole weights and gradients, half of the optimizer's state, a bucket."""
    uncut = {str(k): "it cannot be cut" for k in range(1, 4)}
    profile = chain([1 / 4] * 4, parameter_bytes=1_000_000, no_cut=uncut)
    exactly = 4_000_000 + 4_000_000 + 8_000_000 // 2 + 4_000_000
    training = Training(batch_size=2, mesh={"dp": 2}, shard="zero1")
    (stage,) = solve(profile, cluster(2, memory_bytes=exactly), training).prediction.stages
    assert stage.memory.total == exactly and stage.memory.optimizer == 4_000_000
    with pytest.raises(InfeasibleError, match="1 B too much"):
        solve(profile, cluster(2, memory_bytes=exactly - 1), training)


@pytest.mark.parametrize("seed", range(24))
def test_no_choice_of_what_each_stage_saves_beats_the_plan(seed):
    rng = random.Random(100 + seed)
    num_devices = rng.choice([4, 4, 6])
    graph = CostGraph(
        random_chain(rng, rng.randrange(2, 5)).model_copy(update={"optimizer_s": rng.choice([0.0, 2e-3])})
    )
    there = cluster(
        num_devices,
        link=rng.choice([SLOW, SLOWER]),
        inter=SLOWER,
        memory_bytes=rng.choice([LOTS, *(rng.randrange(400_000, 1_300_000) for _ in range(5))]),
        nodes=rng.choice([[0] * num_devices, [k // 2 for k in range(num_devices)]]),
        speeds=[rng.choice([1.0, 2.0]) for _ in range(num_devices)] if seed % 4 == 0 else None,
    )
    training = Training(
        batch_size=rng.choice([6, 12]) if num_devices == 6 else rng.choice([4, 8]),
        shard="auto",
        recompute=rng.choice(["never", "auto", "auto", "always"]),
    )
    if seed % 4 == 0:  # layouts of unlike devices are not all looked at here
        training = training.model_copy(update={"mesh": {"pp": 1, "dp": 2}})
    best = brute_force(graph, there, training)
    if best is None:
        with pytest.raises(InfeasibleError, match="does not fit"):
            solve(graph.profile, there, training)
        return
    plan = solve(graph.profile, there, training)
    assert total_s(plan) == pytest.approx(best, rel=1e-9)
    assert plan.lower_bound_s <= best * (1 + 1e-9) and plan.runnable
    assert simulate(plan).step_s == pytest.approx(plan.prediction.step_s)
    for level in ("none", "zero1", "zero2"):
        try:
            one = solve(graph.profile, there, training.model_copy(update={"shard": level}))
        except InfeasibleError:
            continue
        if one.num_ranks == plan.num_ranks:
            assert total_s(plan) <= total_s(one) * (1 + 1e-9)


def test_levels_that_differ_from_stage_to_stage_beat_any_one_level():
    """The first stage of four holds the most micro-batches in flight: it alone needs its gradients divided, and all pay
    for that where they must be alike."""
    profile = chain([1e-3] * 32, saved_bytes=120_000, parameter_bytes=50_000).model_copy(update={"optimizer_s": 1e-3})
    request = {"batch_size": 16, "mesh": {"pp": 4, "dp": 2}, "microbatches": 8, "schedule": "1f1b"}
    there = cluster(8, link=SLOW, memory_bytes=5_400_000)
    plan = solve(profile, there, Training(shard="auto", **request))
    assert {stage.shard for stage in plan.stages} == {"zero1", "zero2"}, [stage.shard for stage in plan.stages]
    assert all(stage.memory.total <= 5_400_000 for stage in plan.prediction.stages)
    assert any(reason.startswith("zero2: the 2 replicas of stage 0 divide") for reason in plan.why)
    singles = []
    for level in ("none", "zero1", "zero2"):
        try:
            singles.append(total_s(solve(profile, there, Training(shard=level, **request))))
        except InfeasibleError:
            continue
    assert singles and total_s(plan) < min(singles) * 0.999


def test_more_memory_never_makes_the_step_longer_where_stages_choose_what_they_save():
    rng = random.Random(5)
    profile = random_chain(rng, 7).model_copy(update={"optimizer_s": 1e-3})
    times = []
    for memory_bytes in range(1_000_000, 2_000_000, 100_000):
        there = cluster(4, link=SLOW, memory_bytes=memory_bytes)
        try:
            plan = solve(
                profile, there, Training(batch_size=8, shard="auto", recompute="auto", mesh={"dp": 2, "pp": 2})
            )
        except InfeasibleError:
            assert not times
            continue
        times.append(total_s(plan))
    assert len(times) > 3 and times == sorted(times, reverse=True) and times[0] > times[-1]


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble-v"])
@pytest.mark.parametrize("seed", range(4))
def test_what_ranks_of_several_stages_lack_is_enough_when_they_get_it(schedule, seed):
    rng = random.Random(seed)
    profile = random_chain(rng, 9)
    training = Training(batch_size=4, schedule=schedule, optimizer_bytes=8)
    with pytest.raises(InfeasibleError, match=r"does not fit: .*, rank \d with stage .* needs .* of ") as caught:
        solve(profile, cluster(2, memory_bytes=16), training)
    found = re.search(r"devices with ([\d.]+ \w+)", str(caught.value))
    assert found is not None
    assert solve(profile, cluster(2, memory_bytes=parse_bytes(found[1])), training).schedule == schedule


def test_pins_that_no_number_of_replicas_leaves_room_for_are_refused():
    with pytest.raises(ArgumentError, match=r"pin names stage 1, .* with dp=3 has stages 0 to 0 .* or take 6 devices"):
        solve(chain([1.0] * 4), cluster(4), Training(batch_size=12, mesh={"dp": 3}, pin={"2": 1}))
