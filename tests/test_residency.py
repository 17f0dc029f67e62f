"""What ranks hold over a step: counted tick by tick, at the peak that memory predicts, and let go of at the end."""

import itertools
import random

import pytest
from chains import chain, cluster
from given import given_plan

from partitioner.actions import most_held
from partitioner.costs import replica_costs
from partitioner.errors import ArgumentError
from partitioner.graph import CostGraph
from partitioner.memory import stage_memory
from partitioner.own_order import best_order
from partitioner.plan import Plan, Stage
from partitioner.residency import residency
from partitioner.schedule import placement
from partitioner.simulator import predict, replay, simulate
from partitioner.solver import solve
from partitioner.specs import SCHEDULES, Link, Saving, Training
from partitioner.split import Split

LINK = Link.of(0.01, 1e4)


def plan_of(profile, *, schedule, cuts, m, pp, dp=1, recompute=()):
    graph, num_ranks = CostGraph(profile), pp * dp
    devices = cluster(num_ranks, link=LINK)
    training = Training(batch_size=m * dp)
    on = [stage in recompute for stage in range(len(cuts) + 1)]
    ranks = [tuple(at + pp * k for k in range(dp)) for at in placement(schedule, len(cuts) + 1, pp)]
    mesh = {"pp": pp, "dp": dp}
    split = Split(tuple(cuts), tuple(ranks), m, schedule, tuple(map(Saving, on)))
    prediction = predict(graph, devices, training, split)
    stages = tuple(
        Stage(index=k, layers=ids, ranks=ranks[k], recompute=on[k]) for k, ids in enumerate(graph.stage_ids(cuts))
    )
    return Plan(
        profile=profile,
        cluster=devices,
        training=training,
        mesh=mesh,
        schedule=schedule,
        num_microbatches=m,
        stages=stages,
        prediction=prediction,
        lower_bound_s=0.0,
    )


def random_plan(rng, schedule):
    each = {"interleaved": 2, "zero-bubble-v": 2}.get(schedule, 1)
    pp, dp, m = rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 6)
    n = each * pp + rng.randint(0, 3)
    profile = chain(
        [rng.uniform(0.5, 1.5) for _ in range(n)],
        [rng.uniform(1, 3) for _ in range(n)],
        saved_bytes=[rng.randint(0, 900) for _ in range(n)],
        tensor_bytes=[rng.randint(1, 90) for _ in range(n)],
        parameter_bytes=[4 * rng.randint(0, 50) for _ in range(n)],
        skips=[(0, [n - 1], 70, rng.random() < 0.5)] if n > 2 else [],
        buffer_bytes=13,
    )
    cuts = tuple(sorted(rng.sample(range(1, n), each * pp - 1)))
    return plan_of(profile, schedule=schedule, cuts=cuts, m=m, pp=pp, dp=dp)


def ticks(plan, step, rank):
    """Bytes at the middle between any two neighbouring ends of spans, summed from scratch each time."""
    graph = CostGraph(plan.profile)
    own = [stage for stage in plan.stages if rank in stage.ranks]
    costs = graph.at(plan.training.batch_size / (plan.num_replicas * plan.num_microbatches))
    spans = [span for span in step.spans if span.rank == rank and span.kind in ("F", "B", "I", "W", "sync")]
    edges = sorted({time for span in spans for time in (span.start_s, span.end_s)})
    found = []
    for early, late in itertools.pairwise(edges):
        middle = (early + late) / 2
        if not early < middle < late:
            continue
        total = 13.0
        for stage in own:
            first = graph.position[stage.layers[0]]
            last = first + len(stage.layers)
            gradients = float(graph.trainable_bytes(first, last))
            total += float(graph.weight_bytes(first, last)) + gradients
            total += plan.training.optimizer_bytes * float(graph.trainable_elements(first, last))
            mine = [span for span in spans if span.stage == stage.index]
            started = sum(span.kind == "F" and span.start_s <= middle for span in mine)
            ended = sum(span.kind in ("B", "W") and span.end_s <= middle for span in mine)
            tensors = float(costs.received(first, last) + costs.sent(first, last))
            total += (started - ended) * (float(costs.saved_bytes[first:last].sum()) + tensors)
            running = {span.kind for span in mine if span.start_s <= middle < span.end_s}
            if running & {"B", "I"}:
                total += float(costs.received_gradient(first, last) + costs.sent_gradient(first, last))
            if plan.num_replicas > 1 and (plan.num_stages == 1 or "sync" in running):
                total += gradients
        found.append(total)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_peak_is_that_of_a_count_tick_by_tick(schedule):
    rng = random.Random(21)
    for _ in range(10):
        plan = random_plan(rng, schedule)
        step = simulate(plan)
        for one in residency(plan, step):
            assert float(one.total_bytes.max()) == pytest.approx(max(ticks(plan, step, one.rank)))
            assert one.peak.total == pytest.approx(one.total_bytes.max(), abs=12)
            assert one.peak_span is None or one.peak_span.rank == one.rank
            assert all(a <= b for a, b in itertools.pairwise(one.times_s))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "zero-bubble-h2"])
def test_the_peak_is_what_memory_says_of_a_stage(schedule):
    rng = random.Random(22)
    for _ in range(10):
        plan = random_plan(rng, schedule)
        for one in residency(plan, simulate(plan)):
            stage = next(stage.index for stage in plan.stages if one.rank in stage.ranks)
            device = plan.cluster.devices[one.rank]
            said = stage_memory(CostGraph(plan.profile), plan.training, device, plan.split, stage)
            bucket = said.buckets if plan.num_stages > 1 else 0
            assert one.peak.total == pytest.approx(max(said.total - bucket, one.peak.total * bool(one.peak.buckets)))


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble-v"])
def test_what_the_stages_of_a_rank_hold_is_its_peak_together(schedule):
    rng = random.Random(24)
    for _ in range(10):
        plan = random_plan(rng, schedule)
        costs = CostGraph(plan.profile).at(1)
        for one in residency(plan, simulate(plan)):
            own = [stage.index for stage in plan.stages if one.rank in stage.ranks]
            first = [CostGraph(plan.profile).position[plan.stages[k].layers[0]] for k in own]
            ways = [(i, i + len(plan.stages[k].layers)) for i, k in zip(first, own, strict=True)]
            passing = sum(float(costs.received_gradient(*way) + costs.sent_gradient(*way)) for way in ways)
            together = sum(
                plan.prediction.stages[k].memory.total - plan.prediction.stages[k].memory.buckets for k in own
            )
            held = one.total_bytes - one.items["buckets"]
            assert held.max() - 1e-6 <= together <= held.max() + passing + 10 * len(own)


def test_the_order_found_for_a_plan_stays_within_its_devices():
    """Room for three, then two micro-batches on every rank, where the textbook holds four."""
    profile = chain([1.0] * 8, [2.0] * 8, saved_bytes=100, tensor_bytes=1)
    plan = plan_of(profile, schedule="zero-bubble", cuts=(2, 4, 6), m=8, pp=4)
    roomy, textbook = best_order(plan), simulate(plan)
    assert roomy.step_s <= textbook.step_s + 1e-9
    for limit, most in ((3 * 202 + 10, 3), (2 * 202 + 10, 2)):
        training = plan.training.model_copy(update={"memory_limit_bytes": limit})
        tight = plan.model_copy(update={"training": training})
        assert all(one.peak.total > limit for one in residency(plan, textbook))
        found = best_order(tight)
        assert max(most_held(found.orders).values()) == most
        replica, *_ = replica_costs(CostGraph(profile), plan.cluster, training, plan.split)
        step = replay(found.orders, replica.stages, replica.transfers)
        assert step.step_s == pytest.approx(found.step_s)
        assert all(one.peak.total <= limit for one in residency(tight, step))
    training = plan.training.model_copy(update={"memory_limit_bytes": 150})
    with pytest.raises(ArgumentError, match="has room for"):
        best_order(plan.model_copy(update={"training": training}))


def test_nothing_of_a_micro_batch_is_left_after_the_step():
    plan = random_plan(random.Random(23), "interleaved")
    for one in residency(plan, simulate(plan)):
        assert one.total_bytes[-1] == pytest.approx(one.total_bytes[0])
        assert one.items["activations"][-1] == 0


def test_a_stage_that_recomputes_holds_inputs_and_one_layer_at_a_time():
    """Two stages of three layers; tensors of 10 bytes; 100, 200 and 300 saved; stage 0 holds two micro-batches."""
    profile = chain([1.0] * 6, saved_bytes=[100, 200, 300] * 2, tensor_bytes=10)
    plain = plan_of(profile, schedule="1f1b", cuts=(3,), m=4, pp=2)
    again = plan_of(profile, schedule="1f1b", cuts=(3,), m=4, pp=2, recompute=(0,))
    before, after = (residency(plan, simulate(plan))[0] for plan in (plain, again))
    assert before.peak.activations == 2 * 600
    assert after.peak.activations == 2 * (10 + 10)  # what layers 1 and 2 took in; layer 0 had the batch itself
    # Sent and kept, its gradient, and the third layer's 300 beside its input, less nothing else: it comes last.
    assert after.peak.workspace == 2 * 10 + 10 + 300
    assert after.peak_span is not None
    assert simulate(again).step_s > simulate(plain).step_s


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_inference_holds_what_its_plan_says(objective):
    bare = cluster(4, link=LINK, overhead_bytes=7)
    devices = bare.model_copy(
        update={"devices": tuple(one.model_copy(update={"communicator_bytes": 5}) for one in bare.devices)}
    )
    profile = chain([1.0, 2, 1, 3, 1], tensor_bytes=[2, 3, 4, 5, 6], parameter_bytes=100, saved_bytes=[8, 3, 9, 1, 7])
    for pp, dp in ((1, 4), (2, 2), (4, 1)):
        training = Training(batch_size=8, objective=objective, mesh={"pp": pp, "dp": dp})
        plan = solve(profile, devices, training)
        for one in residency(plan, simulate(plan)):
            stage = next(stage.index for stage in plan.stages if one.rank in stage.ranks)
            told = plan.prediction.stages[stage].memory
            assert one.peak == told


def test_a_timeline_of_another_plan_is_refused():
    plan = given_plan()
    other = plan_of(chain([1.0] * 4), schedule="1f1b", cuts=(1, 2), m=2, pp=3)
    with pytest.raises(ArgumentError, match="the timeline has 3 ranks, the plan 2"):
        residency(plan, simulate(other))
