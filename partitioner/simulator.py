"""Replay a schedule against the clock, without a device: what a step takes and where the devices' other time goes.

What the replay assumes of the executor:

- A rank runs its actions one after another. Each takes its stage's time plus `overhead_s`.
- A send does not block the sender. The message leaves when the action that made it has ended and the wire is free: from
  one rank to another there is one wire a direction, with one message on it at a time, in the order of sending.
  Different pairs of ranks do not slow each other.
- An action starts when its rank is free and all that it receives has arrived. `overlap=True`: receives are posted
  ahead, so a message travels while the receiver computes. `overlap=False`: a receive is posted when its action is
  next, so nothing travels before; the receiver waits for its messages one after another, in the order of their source.
- Gradient sync of a stage starts after the last backward of its rank, in every replica.
- The optimizer runs after the step and is no part of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from partitioner.actions import KINDS, Action, Orders, chain, check_schedule, walk
from partitioner.errors import ArgumentError
from partitioner.graph import CostGraph
from partitioner.memory import memory_limit, stage_memory
from partitioner.plan import LostEfficiency, Plan, Prediction, StagePrediction
from partitioner.schedule import build_schedule, in_flight, placement
from partitioner.specs import Cluster, ScheduleName, Training
from partitioner.timeline import Span, Timeline


@dataclass(frozen=True)
class StageCost:
    """Seconds of one stage: a forward and a backward of one micro-batch, then once a step its sync and optimizer."""

    forward_s: float
    backward_s: float
    sync_s: float = 0.0
    """Gradients reduced after the last backward: over replicas, and over the owners of shared parameters."""
    optimizer_s: float = 0.0
    backward_input_s: float | None = None
    """Of a backward in two parts, the one that the stage before waits for; None: half of `backward_s`."""
    backward_weight_s: float | None = None
    """The other one; None: what is left of `backward_s`. Two parts may take longer than the whole."""

    def seconds(self, kind: str) -> float:
        """Of an action of that kind.

        >>> [StageCost(1.0, 3.0, backward_input_s=2.0).seconds(kind) for kind in "FBIW"]
        [1.0, 3.0, 2.0, 1.0]
        """
        if kind in "FB":
            return self.forward_s if kind == "F" else self.backward_s
        input_s = self.backward_s / 2 if self.backward_input_s is None else self.backward_input_s
        weight_s = max(0.0, self.backward_s - input_s) if self.backward_weight_s is None else self.backward_weight_s
        return input_s if kind == "I" else weight_s


@dataclass(frozen=True)
class Transfer:
    """Seconds of one micro-batch's message from one stage to a later one, and of its gradient's way back."""

    source: int
    target: int
    forward_s: float
    backward_s: float


class Replica(NamedTuple):
    """What one copy of the pipeline costs on its devices."""

    stages: tuple[StageCost, ...]
    transfers: tuple[Transfer, ...]


class Baseline(NamedTuple):
    """The whole batch on one device, at the micro-batch that is fastest there."""

    step_s: float
    optimizer_s: float
    num_microbatches: int
    fits: bool
    """False: no micro-batch fits the device's memory, and this is one of unlimited memory."""
    relative_speed: float

    @property
    def total_s(self) -> float:
        return self.step_s + self.optimizer_s


def replay(
    orders: Orders,
    stages: Sequence[StageCost],
    transfers: Sequence[Transfer] | None = None,
    *,
    overhead_s: float = 0.0,
    overlap: bool = True,
) -> Timeline:
    """One step of one replica, event by event; rank r runs orders[r]. O(actions x transfers a stage).

    `transfers` are all the edges between stages, and with them all dependencies. None: a chain that takes no time.

    >>> step = replay(build_schedule("1f1b", 4, 8), [StageCost(1.0, 2.0)] * 4)
    >>> step.step_s, round(step.bubble_fraction, 4)       # (m + p - 1) x 3 and (p - 1) / (m + p - 1)
    (33.0, 0.2727)

    A schedule that cannot run, or that has other stages than `stages`, is an ArgumentError.
    """
    if transfers is None:
        transfers = [Transfer(source, target, 0.0, 0.0) for source, target in chain(len(stages))]
    replica = Replica(tuple(stages), tuple(transfers))
    steps = _steps(orders, _edges(replica))
    num_stages = 1 + max(action.stage for _, action in steps)
    if num_stages != len(stages):
        raise ArgumentError(f"the schedule has {num_stages} stages, but costs are given for {len(stages)}")
    return _play(steps, [replica], [[rank] for rank in range(len(orders))], overhead_s=overhead_s, overlap=overlap)


def simulate(
    plan: Plan,
    *,
    cluster: Cluster | None = None,
    microbatches: int | None = None,
    schedule: ScheduleName | None = None,
) -> Timeline:
    """The plan's step on all its ranks; or what the same stages would do on another cluster, with other micro-batches
    a replica, or under another schedule that puts them on the same ranks.
    """
    name = schedule or plan.schedule
    if placement(name, plan.num_stages, plan.mesh["pp"]) != plan.placement:
        raise ArgumentError(
            f"{name} puts the {plan.num_stages} stages on other ranks than this plan does: make a plan for {name}"
        )
    cluster = cluster or plan.cluster
    num_microbatches = plan.num_microbatches if microbatches is None else microbatches
    graph = CostGraph.from_profile(plan.profile)
    cuts = [graph.position[stage.layers[0]] for stage in plan.stages[1:]]
    ranks = [stage.ranks for stage in plan.stages]
    replicas = replica_costs(graph, cluster, plan.training, num_microbatches=num_microbatches, cuts=cuts, ranks=ranks)
    orders = build_schedule(name, plan.num_stages, num_microbatches, num_ranks=plan.mesh["pp"])
    return _play(_steps(orders, _edges(replicas[0])), replicas, list(dict.fromkeys(ranks)))


def predict(
    graph: CostGraph,
    cluster: Cluster,
    training: Training,
    *,
    mesh: Mapping[str, int],
    schedule: ScheduleName,
    num_microbatches: int,
    cuts: Sequence[int],
    ranks: Sequence[Sequence[int]] | None = None,
    baseline: Baseline | None = None,
    overhead_s: float = 0.0,
    overlap: bool = True,
) -> Prediction:
    """All figures of one split: its step, its speed against one device, each stage's share, and what was lost to what.

    mesh: {"pp": ranks of a pipeline, "dp": replicas}; each rank has the same number of the stages that the cuts make.
    num_microbatches: a replica. ranks: by stage, one a replica; None is `place`, on the ranks where the schedule has
    them. baseline: `single_device`'s answer, which is the same for all splits of a model; None computes it.

    Lost efficiency compares the devices' time with the baseline's, through runs each idealised one step further:

        T   step + optimizer, as predicted                D   number of devices
        A   the step                                      S   the baseline's step,  Z  its optimizer
        N   the step without gradient sync
        C   N with transfers that take no time
        L   the slowest rank's own work: C without waiting for other stages
        M   the work of all devices / D, if each were as fast as the baseline's

        optimizer (T - A) - Z/D   sync A - N   communication N - C   fill_drain C - L   imbalance L - M
        small_microbatch M - S/D: what smaller micro-batches, and an overhead for each, add to the work

    each divided by T, so that they sum to 1 - (S + Z) / (D T) = 1 - efficiency. None but the last can be negative where
    the baseline's device is the fastest; that one is where the split allows larger micro-batches than one device holds.
    """
    num_stages, num_places, num_replicas = len(cuts) + 1, mesh["pp"], mesh["dp"]
    if num_stages % num_places:
        raise ArgumentError(f"the cuts {tuple(cuts)} make {num_stages} stages, but the mesh has pp={num_places}")
    place_of = placement(schedule, num_stages, num_places)
    if ranks is None:
        by_place = place(cluster, num_places, num_replicas)
        ranks = [by_place[at] for at in place_of]
    if baseline is None:
        baseline = single_device(graph, cluster, training, overhead_s=overhead_s)
    replicas = replica_costs(graph, cluster, training, num_microbatches=num_microbatches, cuts=cuts, ranks=ranks)
    # Replicas of equal cost do the same at the same time, so one stands for all of them.
    distinct = list(dict.fromkeys(replicas))
    places = [[r * num_places + at for r in range(len(distinct))] for at in range(num_places)]
    orders = build_schedule(schedule, num_stages, num_microbatches, num_ranks=num_places)
    steps = _steps(orders, _edges(distinct[0]))
    timeline = _play(steps, distinct, places, overhead_s=overhead_s, overlap=overlap)
    step_s, optimizer_s = timeline.step_s, timeline.optimizer_s
    total_s, num_ranks = step_s + optimizer_s, num_places * num_replicas
    if step_s <= 0:
        raise ArgumentError("every layer of this profile takes 0 s: measure it, or give costs, before planning with it")

    slowest = [max(places[at], key=timeline.busy_s) for at in place_of]
    samples = training.batch_size / (num_replicas * num_microbatches)
    moved = graph.transfers(cuts, samples)
    stages = []
    for stage, rank in enumerate(slowest):
        replica = distinct[rank // num_places]
        memory = stage_memory(
            graph,
            training,
            cluster.devices[ranks[stage][replicas.index(replica)]],
            cuts=cuts,
            stage=stage,
            schedule=schedule,
            num_microbatches=num_microbatches,
            num_replicas=num_replicas,
            num_ranks=num_places,
        )
        stages.append(
            StagePrediction(
                forward_s=replica.stages[stage].forward_s,
                backward_s=replica.stages[stage].backward_s,
                compute_s=timeline.busy_s(rank, stage),
                communication_s=timeline.communication_s(rank, stage),
                idle_s=timeline.idle_s(rank) * num_places / num_stages,
                send_bytes=math.ceil(sum(one.forward_bytes for one in moved if one.source == stage)),
                in_flight=in_flight(schedule, stage, num_stages, num_microbatches, num_ranks=num_places),
                memory=memory,
            )
        )
    idle_s = sum(
        replicas.count(replica) * timeline.idle_s(row[r]) for r, replica in enumerate(distinct) for row in places
    )

    free = [
        Replica(one.stages, tuple(replace(t, forward_s=0.0, backward_s=0.0) for t in one.transfers)) for one in distinct
    ]
    without_sync_s = max(max(_clock(steps, one, overhead_s, overlap).ends) for one in distinct)
    without_transfers_s = max(max(_clock(steps, one, overhead_s, overlap).ends) for one in free)
    own_work_s = max(map(timeline.busy_s, set(slowest)))
    costs = graph.at(samples)
    microbatch_s = float(costs.forward_s.sum() + costs.backward_s.sum()) / baseline.relative_speed
    actions = sum(map(len, orders)) / (num_places * num_microbatches)
    fair_work_s = num_microbatches * (microbatch_s / num_places + actions * overhead_s)
    lost_s = {
        "optimizer": optimizer_s - baseline.optimizer_s / num_ranks,
        "sync": step_s - without_sync_s,
        "communication": without_sync_s - without_transfers_s,
        "fill_drain": without_transfers_s - own_work_s,
        "imbalance": own_work_s - fair_work_s,
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
        bubble_fraction=idle_s / (num_ranks * step_s),
        stages=tuple(stages),
        lost=LostEfficiency(**{name: seconds / total_s for name, seconds in lost_s.items()}),
    )


def single_device(graph: CostGraph, cluster: Cluster, training: Training, *, overhead_s: float = 0.0) -> Baseline:
    """The best that one of the cluster's devices does alone, over every micro-batch count that divides the batch."""
    batch_size = training.batch_size
    counts = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
    found = []
    for device in set(cluster.devices):
        speed = device.relative_speed
        for count in counts:
            arrays = graph.at(batch_size / count)
            work_s = float(arrays.forward_s.sum() + arrays.backward_s.sum()) / speed
            memory = stage_memory(graph, training, device, cuts=(), stage=0, schedule="1f1b", num_microbatches=count)
            found.append(
                Baseline(
                    step_s=count * (work_s + 2 * overhead_s),
                    optimizer_s=graph.profile.optimizer_s / speed,
                    num_microbatches=count,
                    fits=memory.total <= memory_limit(device, training),
                    relative_speed=speed,
                )
            )
    return min(found, key=lambda one: (not one.fits, one.total_s, one.num_microbatches))


def place(cluster: Cluster, num_stages: int, num_replicas: int) -> tuple[tuple[int, ...], ...]:
    """Ranks of each stage, one a replica: the stages of a replica sit side by side, within a node where they can."""
    num_ranks = num_stages * num_replicas
    if num_ranks > cluster.num_devices:
        raise ArgumentError(
            f"{num_stages} stages x {num_replicas} replicas need {num_ranks} devices, the cluster has "
            f"{cluster.num_devices}: use a smaller mesh"
        )
    by_node = sorted(range(num_ranks), key=lambda rank: cluster.nodes[rank])
    return tuple(tuple(by_node[stage::num_stages]) for stage in range(num_stages))


def replica_costs(
    graph: CostGraph,
    cluster: Cluster,
    training: Training,
    *,
    num_microbatches: int,
    cuts: Sequence[int],
    ranks: Sequence[Sequence[int]],
) -> list[Replica]:
    """What each replica's stages and transfers take on the devices and links that `ranks` gives them.

    A micro-batch is batch / (replicas x micro-batches) samples, a fraction where that does not divide.
    """
    graph.check_cuts(cuts)
    num_replicas = len(ranks[0])
    samples = training.batch_size / (num_replicas * num_microbatches)
    if samples < 1:
        raise ArgumentError(
            f"a batch of {training.batch_size} cannot be cut into {num_replicas} replicas x {num_microbatches} "
            "micro-batches: use fewer of them or a larger batch_size"
        )
    if (highest := max(map(max, ranks))) >= cluster.num_devices:
        raise ArgumentError(f"rank {highest} has no device: the cluster has {cluster.num_devices}")
    arrays = graph.at(samples)
    bounds = graph.bounds(cuts)
    moved = graph.transfers(cuts, samples)
    shared = [(parameter.bytes, owners) for parameter, owners in graph.synced_parameters(cuts) if parameter.trainable]
    elements = float(graph.trainable_elements(0, graph.num_layers))
    replicas = []
    for r in range(num_replicas):
        stages = []
        for stage, (first, last) in enumerate(bounds):
            speed = cluster.devices[ranks[stage][r]].relative_speed
            gradient_bytes = float(graph.trainable_bytes(first, last))
            sync_s = cluster.slowest_link(tuple(ranks[stage])).all_reduce_time(gradient_bytes, num_replicas)
            for num_bytes, owners in shared:
                if stage in owners:
                    link = cluster.slowest_link(tuple(ranks[owner][r] for owner in owners))
                    sync_s += link.all_reduce_time(num_bytes, len(owners))
            part = float(graph.trainable_elements(first, last)) / elements if elements else 0.0
            stages.append(
                StageCost(
                    forward_s=(float(arrays.forward_s[first:last].sum()) + graph.slicing_s(len(bounds))) / speed,
                    backward_s=float(arrays.backward_s[first:last].sum()) / speed,
                    sync_s=sync_s,
                    optimizer_s=graph.profile.optimizer_s * part / speed,
                )
            )
        transfers = []
        for source, target, forward_bytes, backward_bytes in moved:
            link = cluster.link(ranks[source][r], ranks[target][r])
            transfers.append(Transfer(source, target, link.time(forward_bytes), link.time(backward_bytes)))
        replicas.append(Replica(tuple(stages), tuple(transfers)))
    return replicas


# The clock

Steps = list[tuple[int, Action]]
"""(rank, action), each after all that it needs."""


def _edges(replica: Replica) -> list[tuple[int, int]]:
    return [(transfer.source, transfer.target) for transfer in replica.transfers]


def _steps(orders: Orders, edges: Sequence[tuple[int, int]]) -> Steps:
    steps = list(walk(orders, edges))
    if len(steps) < sum(map(len, orders)) or not steps:
        check_schedule(orders, edges)  # says what is wrong
    return steps


@dataclass(slots=True)
class _Channel:
    """One direction of a transfer. The lists are by micro-batch."""

    source: int
    """The stage that sends."""
    wire: tuple[int, int]
    seconds: float
    sent: list[float]
    left: list[float]
    arrived: list[float]


@dataclass
class _Clock:
    """When everything happened. `starts`, `ends` and `waits_from` (when the rank became free) are beside the steps."""

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    waits_from: list[float] = field(default_factory=list)
    incoming: dict[tuple[int, str], list[_Channel]] = field(default_factory=dict)
    outgoing: dict[tuple[int, str], list[_Channel]] = field(default_factory=dict)


def _clock(steps: Steps, replica: Replica, overhead_s: float, overlap: bool) -> _Clock:
    """The times of every action and message of a replica, in one pass over the steps.

    start = max(rank free, arrivals);   leaves = max(end, wire free);   arrives = leaves + seconds
    """
    clock = _Clock()
    rank_of = {action.stage: rank for rank, action in steps}
    num_microbatches = 1 + max(action.microbatch for _, action in steps)
    seconds: dict[tuple[int, str], float] = {}
    for stage, cost in enumerate(replica.stages):
        for kind in KINDS:
            seconds[stage, kind] = cost.seconds(kind) + overhead_s
            clock.incoming[stage, kind], clock.outgoing[stage, kind] = [], []
        clock.incoming[stage, "I"], clock.outgoing[stage, "I"] = clock.incoming[stage, "B"], clock.outgoing[stage, "B"]
    for transfer in replica.transfers:
        for kind, first, second, own_s in (
            ("F", transfer.source, transfer.target, transfer.forward_s),
            ("B", transfer.target, transfer.source, transfer.backward_s),
        ):
            times = ([0.0] * num_microbatches for _ in range(3))
            channel = _Channel(first, (rank_of[first], rank_of[second]), own_s, *times)
            clock.outgoing[first, kind].append(channel)
            clock.incoming[second, kind].append(channel)
    free = [0.0] * (1 + max(rank_of.values()))
    wire_free: dict[tuple[int, int], float] = {}
    for rank, (stage, kind, k) in steps:
        now = free[rank]
        clock.waits_from.append(now)
        for channel in clock.incoming[stage, kind]:
            if not overlap:
                channel.sent[k] = channel.left[k] = max(now, channel.sent[k])
                channel.arrived[k] = channel.left[k] + channel.seconds
            now = max(now, channel.arrived[k])
        clock.starts.append(now)
        now += seconds[stage, kind]
        clock.ends.append(now)
        free[rank] = now
        for channel in clock.outgoing[stage, kind]:
            channel.sent[k] = now
            if overlap:
                channel.left[k] = max(now, wire_free.get(channel.wire, 0.0))
                channel.arrived[k] = wire_free[channel.wire] = channel.left[k] + channel.seconds
    return clock


def _play(
    steps: Steps,
    replicas: Sequence[Replica],
    ranks: Sequence[Sequence[int]],
    *,
    overhead_s: float = 0.0,
    overlap: bool = True,
) -> Timeline:
    """The step of all replicas. `ranks` by pipeline rank, one a replica: the numbers that the spans carry."""
    spans: list[Span] = []
    free: dict[int, float] = {}
    synced: dict[int, int] = {}
    for r, replica in enumerate(replicas):
        clock = _clock(steps, replica, overhead_s, overlap)
        for (pipeline_rank, (stage, kind, k)), waits, start, end in zip(
            steps, clock.waits_from, clock.starts, clock.ends, strict=True
        ):
            rank = ranks[pipeline_rank][r]
            if start > waits:
                incoming = clock.incoming[stage, kind]
                if len(incoming) > 1:
                    incoming = sorted(incoming, key=lambda channel: channel.sent[k])
                for channel in incoming:
                    waits = max(waits, channel.sent[k])
                    if channel.arrived[k] > waits:
                        spans.append(Span(rank, "recv", stage, k, waits, channel.arrived[k]))
                        waits = channel.arrived[k]
            spans.append(Span(rank, kind, stage, k, start, end))
            for channel in clock.outgoing[stage, kind]:
                if channel.seconds > 0:
                    spans.append(Span(rank, "send", stage, k, channel.left[k], channel.arrived[k]))
            free[rank] = end
            if kind in ("B", "W"):
                synced[stage] = pipeline_rank
    for stage, pipeline_rank in synced.items():
        sync_s = max(replica.stages[stage].sync_s for replica in replicas)
        if sync_s > 0:
            start = max(free[rank] for rank in ranks[pipeline_rank])
            for rank in ranks[pipeline_rank]:
                spans.append(Span(rank, "sync", stage, -1, start, start + sync_s))
                free[rank] = start + sync_s
    step_end = max(free.values())
    for stage, pipeline_rank in synced.items():
        for replica, rank in zip(replicas, ranks[pipeline_rank], strict=True):
            optimizer_s = replica.stages[stage].optimizer_s
            if optimizer_s > 0:
                start = max(step_end, free[rank])
                spans.append(Span(rank, "optimizer", stage, -1, start, start + optimizer_s))
                free[rank] = start + optimizer_s
    return Timeline(tuple(spans), num_ranks=len(replicas) * len(ranks), measured=False)
