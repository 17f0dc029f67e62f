"""Simulate a plan's step, without a device: what it takes, and where the devices' other time goes.

When actions and messages happen is the clock's part. Around it:

- Gradient sync of a stage starts after the last backward of its rank, in every replica. Replicas of a whole model run
  under DistributedDataParallel, which reduces a bucket of gradients while the backward of the last micro-batch goes on.
- The optimizer runs after the step and is no part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from partitioner.actions import KINDS, Orders, Table, chain, check_schedule, most_held
from partitioner.clock import Clock, Floats, Replica, StageCost, StepTimes, Transfer, run_clock
from partitioner.costs import Baseline, exchange_s, replica_costs, single_device, turn_costs
from partitioner.errors import ArgumentError, expect
from partitioner.graph import CostGraph
from partitioner.memory import stage_memory
from partitioner.own_order import faster_order
from partitioner.plan import LostEfficiency, Plan, Prediction, StagePrediction
from partitioner.rounds import SPLIT_BACKWARD
from partitioner.schedule import forward_only, in_flight, placement, schedule_table
from partitioner.specs import MOST_SECONDS, Cluster, ScheduleName, Training
from partitioner.split import Split
from partitioner.steady import step_times
from partitioner.timeline import Span, Timeline
from partitioner.turns import turn_timeline


def replay(
    orders: Orders | Table,
    stages: Sequence[StageCost],
    transfers: Sequence[Transfer] | None = None,
    *,
    overhead_s: float = 0.0,
    overlap: bool = True,
) -> Timeline:
    """One step of one replica, every action and message; rank r runs orders[r]. O(actions x transfers a stage).

    `transfers` are all the edges between stages, and with them all dependencies. None: a chain that takes no time.

    >>> from partitioner.schedule import build_schedule
    >>> step = replay(build_schedule("1f1b", 4, 8), [StageCost(1.0, 2.0)] * 4)
    >>> step.step_s, round(step.bubble_fraction, 4)       # (m + p - 1) x 3 and (p - 1) / (m + p - 1)
    (33.0, 0.2727)

    A schedule that cannot run, or that has other stages than `stages`, is an ArgumentError.
    """
    if transfers is None:
        transfers = [Transfer(source, target, 0.0, 0.0) for source, target in chain(len(stages))]
    replica = Replica(tuple(stages), tuple(transfers))
    table = orders if isinstance(orders, Table) else Table.of(orders)
    if not table.in_order():
        check_schedule(table.orders(), [(one.source, one.target) for one in replica.transfers])
    clock = run_clock(table, replica, overhead_s=overhead_s, overlap=overlap)
    return _timeline([clock], [replica], [[rank] for rank in range(len(table.stages))])


def simulate(
    plan: Plan,
    *,
    cluster: Cluster | None = None,
    microbatches: int | None = None,
    schedule: ScheduleName | None = None,
) -> Timeline:
    """The plan's step on all its ranks; or what the same stages would do on another cluster, with other micro-batches
    a replica, or under another schedule that puts them on the same ranks. Of a cluster with as many devices as the
    plan's, ranks sit on the same ones; of another, rank i sits on device i.

    The plan's own order of actions is used, where it has one; under another schedule, and of other micro-batches or
    another cluster, what `solve` would use: an order searched for the stages' own times, where that is faster.
    """
    expect("plan", plan, Plan, "a Plan: partitioner.load(path) reads one")
    expect("cluster", cluster, (Cluster, type(None)), "a Cluster: Cluster.parse('8xH100')")
    if microbatches is not None:
        expect("microbatches", microbatches, int, "a number of micro-batches")
        if microbatches < 1:
            raise ArgumentError(f"microbatches={microbatches} is impossible: give 1 or more")
    name = schedule or plan.schedule
    if placement(name, plan.num_stages, plan.mesh["pp"]) != plan.placement:
        raise ArgumentError(
            f"{name} puts the {plan.num_stages} stages on other ranks than this plan does: make a plan for {name}"
        )
    cluster = cluster or plan.cluster
    ranks = [stage.ranks for stage in plan.stages]
    split = replace(plan.split, schedule=name, num_microbatches=microbatches or plan.num_microbatches)
    if cluster.num_devices != plan.cluster.num_devices:
        split = replace(split, devices=tuple(ranks))
    graph, m = CostGraph.from_profile(plan.profile), split.num_microbatches
    if plan.takes_turns:
        if name != plan.schedule:
            raise ArgumentError(f"ranks that take turns run forwards alone, which {name} does not order: leave it out")
        return turn_timeline(turn_costs(graph, cluster, plan.training, split), ranks, m)
    replicas = replica_costs(graph, cluster, plan.training, split)
    if plan.training.objective == "train":
        orders = split.orders
        if (name, m, cluster) != (plan.schedule, plan.num_microbatches, plan.cluster):
            orders = faster_order(graph, cluster, plan.training, split)
        table = schedule_table(name, plan.num_stages, m, plan.mesh["pp"]) if orders is None else Table.of(orders)
        clocks = {replica: run_clock(table, replica) for replica in set(replicas)}
    else:
        clocks = {replica: forward_clock(replica, m) for replica in set(replicas)}
    return _timeline([clocks[replica] for replica in replicas], replicas, list(dict.fromkeys(ranks)))


def forward_clock(replica: Replica, num_microbatches: int) -> Clock:
    """Forward passes alone, one stage a rank, from an empty pipeline."""
    return run_clock(Table.of(forward_only(len(replica.stages), num_microbatches)), replica)


def predict(
    graph: CostGraph,
    cluster: Cluster,
    training: Training,
    split: Split,
    *,
    baseline: Baseline | None = None,
    overhead_s: float = 0.0,
    overlap: bool = True,
) -> Prediction:
    """All figures of one split: its step, its speed against one device, each stage's share, and what was lost to what.

    baseline: `single_device`'s answer, which is the same for all splits of a model; None computes it.

    Lost efficiency compares the devices' time with the baseline's, through runs each idealised one step further:

        T   step + optimizer, as predicted                D   number of devices
        A   the step                                      S   the baseline's step,  Z  its optimizer
        N   the step without gradient sync
        C   N with transfers that take no time
        L   the slowest rank's own work: C without waiting for other stages; what sharding exchanges in it is sync
        K   the same without what running a part of the model costs beyond its layers
        R   the same without running layers again in their backward
        M   the work of all devices / D, if each were as fast as the baseline's

        optimizer (T - A) - Z/D   sync A - N   communication N - C   fill_drain C - L
        slicing L - K   recompute K - R   imbalance R - M
        small_microbatch M - S/D: what smaller micro-batches, and an overhead for each, add to the work

    each divided by T, so that they sum to 1 - (S + Z) / (D T) = 1 - efficiency. None but the last can be negative where
    the baseline's device is the fastest; that one is where the split allows larger micro-batches than one device holds.
    A backward in two parts that take longer together than the whole counts as imbalance.
    """
    num_stages, num_places, num_replicas = split.num_stages, split.num_places, split.num_replicas
    schedule, num_microbatches, devices = split.schedule, split.num_microbatches, split.devices
    cuts, recompute, shard, orders, place_of = split.cuts, split.recompute, split.shard, split.orders, split.places
    if baseline is None:
        baseline = single_device(graph, cluster, training, overhead_s=overhead_s)
    replicas = replica_costs(graph, cluster, training, split)
    # Replicas of equal cost do the same at the same time, so one stands for all of them.
    distinct = list(dict.fromkeys(replicas))

    table = None if orders is None else Table.of(orders)

    def run(replica: Replica) -> StepTimes:
        if table is not None:
            return run_clock(table, replica, overhead_s=overhead_s, overlap=overlap).step
        return step_times(schedule, replica, num_microbatches, num_places, overhead_s=overhead_s, overlap=overlap)

    steps = [run(replica) for replica in distinct]
    places = np.array(place_of)
    syncs, ends_s = _syncs(steps, distinct, place_of)
    step_s = float(ends_s.max())
    optimizer_s = max(
        float(np.bincount(places, [one.optimizer_s for one in replica.stages]).max()) for replica in distinct
    )
    total_s, num_ranks = step_s + optimizer_s, split.num_ranks
    if step_s <= 0:
        raise ArgumentError("every layer of this profile takes 0 s: measure it, or give costs, before planning with it")
    if (longest_s := max(total_s, baseline.total_s)) > MOST_SECONDS:
        costs = graph.at(split.samples(training))
        worst = int((costs.forward_s + costs.backward_s).argmax())
        worst_s = float(costs.forward_s[worst] + costs.backward_s[worst])
        raise ArgumentError(
            f"a step takes {longest_s:.3g} s, over three years, of which layer {graph.ids[worst]} takes {worst_s:.3g} "
            "s a micro-batch: give forward_s and backward_s in seconds, or a smaller batch_size"
        )

    busy_s = np.array([step.busy_s for step in steps])
    waited_s = np.array([step.waited_s for step in steps]) + [sync_s for _, sync_s in syncs]
    rank_busy_s = np.array([np.bincount(places, row) for row in busy_s])  # [replica, place]
    idle_s = np.maximum(0.0, step_s - rank_busy_s - [np.bincount(places, row) for row in waited_s])
    slowest = rank_busy_s.argmax(axis=0)[places]  # by stage, of the distinct replicas
    samples = split.samples(training)
    moved = graph.transfers(cuts, samples)
    held = None if orders is None else most_held(orders)
    stages = []
    for stage, r in enumerate(slowest.tolist()):
        device = cluster.devices[devices[stage][replicas.index(distinct[r])]]
        stages.append(
            StagePrediction(
                forward_s=distinct[r].stages[stage].forward_s,
                backward_s=distinct[r].stages[stage].backward_s,
                compute_s=float(busy_s[r, stage]),
                communication_s=float(waited_s[r, stage]),
                idle_s=float(idle_s[r, place_of[stage]]) * num_places / num_stages,
                send_bytes=math.ceil(sum(one.forward_bytes for one in moved if one.source == stage)),
                in_flight=(
                    in_flight(schedule, stage, num_stages, num_microbatches, num_ranks=num_places)
                    if held is None
                    else held[stage]
                ),
                memory=stage_memory(graph, training, device, split, stage),
            )
        )
    counts = np.array([replicas.count(replica) for replica in distinct])

    free = [
        Replica(one.stages, tuple(replace(t, forward_s=0.0, backward_s=0.0) for t in one.transfers)) for one in distinct
    ]
    without_sync_s = max(float(step.rank_end_s.max()) for step in steps)
    without_transfers_s = max(float(run(one).rank_end_s.max()) for one in free)
    costs, seconds = graph.at(samples), np.zeros((2, num_stages))
    seconds[0] = graph.slicing_s(num_stages)
    seconds[1] = [
        float(costs.forward_s[i:j].sum()) * on for (i, j), on in zip(graph.bounds(cuts), recompute, strict=True)
    ]
    firsts = [replicas.index(replica) for replica in distinct]
    speeds = np.array([[cluster.devices[row[r]].relative_speed for row in devices] for r in firsts])
    exchanged_s = np.zeros(num_stages)
    for stage, (first, last) in enumerate(graph.bounds(cuts)):
        link = cluster.slowest_link(tuple(devices[stage]))
        gathers_s, scatter_s = exchange_s(graph, link, shard[stage], num_replicas, first, last)
        exchanged_s[stage] = sum(gathers_s) + scatter_s
    own_s = busy_s - num_microbatches * exchanged_s
    work_s = [max(float(np.bincount(places, row).max()) for row in own_s)]
    exchanging_s = float(rank_busy_s.max()) - work_s[0]
    for extra_s in num_microbatches * seconds:
        own_s = own_s - extra_s / speeds
        work_s.append(max(float(np.bincount(places, row).max()) for row in own_s))
    microbatch_s = float(costs.forward_s.sum() + costs.backward_s.sum()) / baseline.relative_speed
    actions = (3 if schedule in SPLIT_BACKWARD else 2) * num_stages / num_places
    fair_work_s = num_microbatches * (microbatch_s / num_places + actions * overhead_s)
    lost_s = {
        "optimizer": optimizer_s - baseline.optimizer_s / num_ranks,
        "sync": step_s - without_sync_s + exchanging_s,
        "communication": without_sync_s - without_transfers_s,
        "fill_drain": without_transfers_s - work_s[0] - exchanging_s,
        "slicing": work_s[0] - work_s[1],
        "recompute": work_s[1] - work_s[2],
        "imbalance": work_s[2] - fair_work_s,
        "small_microbatch": fair_work_s - baseline.step_s / num_ranks,
    }
    speedup = baseline.total_s / total_s
    return Prediction(
        step_s=step_s,
        optimizer_s=optimizer_s,
        throughput=training.batch_size / total_s,
        single_device_s=baseline.total_s,
        single_device_fits=baseline.fits,
        speedup=speedup,
        efficiency=speedup / num_ranks,
        bubble_fraction=float(counts @ idle_s.sum(axis=1)) / (num_ranks * step_s),
        stages=tuple(stages),
        lost=LostEfficiency(**{name: seconds / total_s for name, seconds in lost_s.items()}),
    )


# From clocks to a timeline


def _syncs(
    steps: Sequence[StepTimes], replicas: Sequence[Replica], places: Sequence[int]
) -> tuple[list[tuple[float, float]], Floats]:
    """(start, seconds) of each stage's gradient sync, the same in all replicas; [replica, place] when each rank ends.

    The stages of one rank sync one after another, in the order in which their gradients are complete. Without
    `replicas`, as in inference, nothing is reduced.
    """
    ends: Floats = np.array([step.rank_end_s for step in steps])
    syncs = [(0.0, 0.0)] * len(places)
    for stage in np.argsort(steps[0].finished, kind="stable").tolist():
        sync_s = max((replica.stages[stage].sync_s for replica in replicas), default=0.0)
        if sync_s > 0:
            at = int(places[stage])
            syncs[stage] = (float(ends[:, at].max()), sync_s)
            ends[:, at] = syncs[stage][0] + sync_s
    return syncs, ends


def _timeline(clocks: Sequence[Clock], replicas: Sequence[Replica], ranks: Sequence[Sequence[int]]) -> Timeline:
    """The step of all replicas. `ranks` by place in the pipeline, one a replica: the numbers that the spans carry."""
    spans: list[Span] = []
    place_of = dict(zip(clocks[0].stages.tolist(), clocks[0].ranks.tolist(), strict=True))
    places = [place_of[stage] for stage in range(len(place_of))]
    trains = bool((clocks[0].kinds != KINDS.index("F")).any())
    for r, clock in enumerate(clocks):
        number = np.array([row[r] for row in ranks])
        at = number[clock.ranks].tolist()
        stages, ks = clock.stages.tolist(), clock.microbatches.tolist()
        names = [KINDS[kind] for kind in clock.kinds.tolist()]
        spans += map(Span, at, names, stages, ks, clock.start_s.tolist(), clock.end_s.tolist())
        for since, until in clock.waits:
            for one in np.flatnonzero(until > since).tolist():
                spans.append(Span(at[one], "recv", stages[one], ks[one], float(since[one]), float(until[one])))
        for message in clock.messages:
            if message.seconds > 0:
                rank = int(number[places[message.source]])
                times = zip(message.left_s.tolist(), message.arrived_s.tolist(), strict=True)
                spans += (
                    Span(rank, "send", message.source, k, left_s, arrived_s)
                    for k, (left_s, arrived_s) in enumerate(times)
                    if arrived_s < math.inf
                )
    syncs, ends = _syncs([clock.step for clock in clocks], replicas if trains else [], places)
    for stage, (start_s, sync_s) in enumerate(syncs):
        if sync_s > 0:
            spans += (Span(rank, "sync", stage, -1, start_s, start_s + sync_s) for rank in ranks[places[stage]])
    step_end = float(ends.max())
    free = {rank: step_end for row in ranks for rank in row}
    for stage, at in enumerate(places):
        for replica, rank in zip(replicas, ranks[at], strict=True):
            optimizer_s = replica.stages[stage].optimizer_s
            if optimizer_s > 0 and trains:
                spans.append(Span(rank, "optimizer", stage, -1, free[rank], free[rank] + optimizer_s))
                free[rank] += optimizer_s
    return Timeline(tuple(spans), num_ranks=len(replicas) * len(ranks), measured=False)
