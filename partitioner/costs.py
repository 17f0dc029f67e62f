"""What the stages and messages of a split cost on given devices and links, and what one device costs alone."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from partitioner.clock import Replica, StageCost, Transfer
from partitioner.errors import ArgumentError
from partitioner.graph import CostGraph
from partitioner.memory import BUCKET_BYTES, memory_limit, stage_memory
from partitioner.specs import EXCHANGES, EXECUTED_SHARDS, Cluster, Link, Shard, Training
from partitioner.split import Split

FIRST_BUCKET_BYTES = 2**20
"""What DistributedDataParallel puts into the first bucket, so that it starts early."""


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


def replica_costs(graph: CostGraph, cluster: Cluster, training: Training, split: Split) -> list[Replica]:
    """What each replica's stages and transfers take on the devices and links that they have.

    Stages of one rank hand tensors over in no time.
    """
    num_replicas, devices, shard, recompute = split.num_replicas, split.devices, split.shard, split.recompute
    samples = _samples(graph, cluster, training, split, num_replicas)
    arrays = graph.at(samples)
    bounds = graph.bounds(split.cuts)
    moved = graph.transfers(split.cuts, samples)
    synced = graph.synced_parameters(split.cuts)
    shared = [(parameter.bytes, owners) for parameter, owners in synced if parameter.trainable]
    elements = float(graph.trainable_elements(0, graph.num_layers))
    replicas: list[Replica] = []
    sync_links = [cluster.slowest_link(tuple(row)) for row in devices]
    known: dict[tuple[tuple[float, int], ...], Replica] = {}
    for r in range(num_replicas):
        nodes = [cluster.nodes[row[r]] for row in devices]
        looks = tuple(
            (cluster.devices[row[r]].relative_speed, nodes.index(node))
            for row, node in zip(devices, nodes, strict=True)
        )
        if looks in known:  # the same stages on devices as fast, and the same of them in one node
            replicas.append(known[looks])
            continue
        stages = []
        for stage, (first, last) in enumerate(bounds):
            speed, link = cluster.devices[devices[stage][r]].relative_speed, sync_links[stage]
            gather_s, scatter_s = exchange_s(graph, link, shard[stage], num_replicas, first, last)
            if shard[stage] != "none":
                sync_s = sharded_sync_s(graph, link, shard[stage], num_replicas, first, last)
            elif len(bounds) == 1:
                sync_s = replica_sync_s(graph, link, samples, num_replicas, speed)
            else:
                sync_s = link.all_reduce_time(float(graph.trainable_bytes(first, last)), num_replicas)
            for num_bytes, owners in shared:
                if stage in owners:
                    link = cluster.slowest_link(tuple(devices[owner][r] for owner in owners))
                    sync_s += link.all_reduce_time(num_bytes, len({devices[owner][r] for owner in owners}))
            part = float(graph.trainable_elements(first, last)) / elements if elements else 0.0
            if shard[stage] != "none" and num_replicas > 1:
                part *= optimizer_part(graph, shard[stage], num_replicas, first, last)
            forward_s = float(arrays.forward_s[first:last].sum())
            again_s = forward_s if recompute[stage] else 0.0
            input_s = weight_s = None
            if arrays.backward_input_s is not None and arrays.backward_weight_s is not None:
                input_s = (float(arrays.backward_input_s[first:last].sum()) + again_s) / speed
                weight_s = float(arrays.backward_weight_s[first:last].sum()) / speed
            elif again_s:
                weight_s = float(arrays.backward_s[first:last].sum()) / 2 / speed
                input_s = weight_s + again_s / speed
            if input_s is not None and weight_s is not None:
                input_s, weight_s = input_s + gather_s[1], weight_s + scatter_s
            elif gather_s[1] + scatter_s:
                half_s = float(arrays.backward_s[first:last].sum()) / 2 / speed
                input_s, weight_s = half_s + gather_s[1], half_s + scatter_s
            stages.append(
                StageCost(
                    forward_s=(forward_s + graph.slicing_s(len(bounds))) / speed + gather_s[0],
                    backward_s=(float(arrays.backward_s[first:last].sum()) + again_s) / speed + gather_s[1] + scatter_s,
                    sync_s=sync_s,
                    optimizer_s=graph.profile.optimizer_s * part / speed,
                    backward_input_s=input_s,
                    backward_weight_s=weight_s,
                )
            )
        transfers = []
        for source, target, forward_bytes, backward_bytes in moved:
            sender, receiver = devices[source][r], devices[target][r]
            link = cluster.link(sender, receiver)
            times = [link.time(size) if sender != receiver else 0.0 for size in (forward_bytes, backward_bytes)]
            transfers.append(Transfer(source, target, *times))
        known[looks] = Replica(tuple(stages), tuple(transfers))
        replicas.append(known[looks])
    return replicas


def _samples(graph: CostGraph, cluster: Cluster, training: Training, split: Split, num_replicas: int | None) -> float:
    """Of a micro-batch; an ArgumentError where the cuts, the micro-batches or the devices cannot be. num_replicas: None
    where the ranks of a stage take turns at one pipeline."""
    graph.check_cuts(split.cuts)
    samples = training.batch_size / ((num_replicas or 1) * split.num_microbatches)
    if samples < 1:
        replicas = "" if num_replicas is None else f"{num_replicas} replicas x "
        raise ArgumentError(
            f"a batch of {training.batch_size} cannot be cut into {replicas}{split.num_microbatches} micro-batches: "
            "use fewer of them or a larger batch_size"
        )
    if (highest := max(map(max, split.devices))) >= cluster.num_devices:
        raise ArgumentError(f"there is no device {highest}: the cluster has {cluster.num_devices}")
    return samples


def forward_costs(graph: CostGraph, cluster: Cluster, training: Training, split: Split) -> list[Replica]:
    """`replica_costs` of forward passes: nothing comes back, is reduced or updated."""
    return [
        Replica(
            tuple(StageCost(stage.forward_s, 0.0) for stage in one.stages),
            tuple(Transfer(t.source, t.target, t.forward_s, 0.0) for t in one.transfers),
        )
        for one in replica_costs(graph, cluster, training, split)
    ]


def turn_costs(graph: CostGraph, cluster: Cluster, training: Training, split: Split) -> Replica:
    """What forward passes cost where the ranks of a stage take turns at the micro-batches of one pipeline.

    A stage takes what its slowest device does, a message what the slowest link between a rank of the one stage and a
    rank of the other does.
    """
    samples, devices = _samples(graph, cluster, training, split, None), split.devices
    forward_s, slicing_s = graph.at(samples).forward_s, graph.slicing_s(len(devices))
    stages = tuple(
        StageCost(
            (float(forward_s[i:j].sum()) + slicing_s) / min(cluster.devices[one].relative_speed for one in row), 0.0
        )
        for (i, j), row in zip(graph.bounds(split.cuts), devices, strict=True)
    )
    transfers = []
    for source, target, num_bytes, _ in graph.transfers(split.cuts, samples):
        links = {cluster.link(a, b) for a in devices[source] for b in devices[target]}
        transfers.append(Transfer(source, target, max(link.time(num_bytes) for link in links), 0.0))
    return Replica(stages, tuple(transfers))


def exchange_s(
    graph: CostGraph, link: Link, shard: Shard, num_replicas: int, first: Any, last: Any
) -> tuple[tuple[Any, Any], Any]:
    """Of sharded layers [first, last), seconds a micro-batch: of gathering weights in its forward and in its backward,
    of scattering gradients; nothing of it hides behind compute. Arrays of positions broadcast."""
    exchange = EXCHANGES.get(shard)
    if exchange is None or num_replicas == 1:
        return (0.0, 0.0), 0.0
    scatter_s = exchange.microbatch_scatters * _gather_s(link, graph.trainable_bytes(first, last), num_replicas)
    if not exchange.microbatch_gathers:
        return (0.0, 0.0), scatter_s
    gather_s = exchange.microbatch_gathers / 2 * _gather_s(link, graph.weight_bytes(first, last), num_replicas)
    return (gather_s, gather_s), scatter_s


def optimizer_part(graph: CostGraph, shard: Shard, num_replicas: int, first: Any, last: Any) -> Any:
    """Of the optimizer's work on sharded layers [first, last), what the replica with the most of it does."""
    if shard not in EXECUTED_SHARDS:
        return 1 / num_replicas
    return graph.largest_parts(first, last, num_replicas)[0]


def sharded_sync_s(graph: CostGraph, link: Link, shard: Shard, num_replicas: int, first: Any, last: Any) -> Any:
    """Of sharded layers [first, last), seconds a step: gradients scattered, weights gathered once they are updated."""
    exchange = EXCHANGES[shard]
    each_s = _gather_s(link, graph.trainable_bytes(first, last), num_replicas)
    return (exchange.step_scatters + exchange.step_gathers) * each_s


def _gather_s(link: Link, num_bytes: Any, num_ranks: int) -> Any:
    """`Link.gather_time`, elementwise."""
    return np.vectorize(lambda size: link.gather_time(size, num_ranks), otypes=[float])(num_bytes)


def replica_sync_s(graph: CostGraph, link: Link, samples: float, num_replicas: int, speed: float) -> float:
    """Seconds for which replicas of a whole model reduce gradients after their last backward.

    DistributedDataParallel reduces bucket after bucket, each when the backward of its layers is done and the one before
    it is through; gradients come in the reverse order of the layers.

        through = max(backward of its layers ends, bucket before it through) + all-reduce of the bucket
    """
    if num_replicas == 1:
        return 0.0
    n = graph.num_layers
    up_to = np.asarray(graph.trainable_bytes(0, np.arange(1, n + 1)), float)
    gradient_bytes = np.diff(up_to, prepend=0.0)  # of parameters that are used there first: their gradient ends last
    backward_s = graph.at(samples).backward_s / speed
    now = through = held = 0.0
    limit = FIRST_BUCKET_BYTES
    for k in reversed(range(n)):
        now, held = now + float(backward_s[k]), held + float(gradient_bytes[k])
        if held >= limit or (k == 0 and held):
            through = max(now, through) + link.all_reduce_time(held, num_replicas)
            held, limit = 0.0, BUCKET_BYTES
    return max(0.0, through - now)


def single_device(graph: CostGraph, cluster: Cluster, training: Training, *, overhead_s: float = 0.0) -> Baseline:
    """The best that one of the cluster's devices does alone, over every micro-batch count that divides the batch."""
    batch_size = training.batch_size
    small = [count for count in range(1, math.isqrt(batch_size) + 1) if batch_size % count == 0]
    counts = sorted({*small, *(batch_size // count for count in small)})
    found = []
    for device in set({id(device): device for device in cluster.devices}.values()):
        speed = device.relative_speed
        for count in counts:
            arrays = graph.at(batch_size / count)
            work_s = float(arrays.forward_s.sum() + arrays.backward_s.sum()) / speed
            memory = stage_memory(graph, training, device, Split((), ((0,),), count))
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
