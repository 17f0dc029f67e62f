"""Why nothing fits: the split that comes closest, what it lacks and where, and a change that was tried and fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from partitioner.graph import CostGraph
from partitioner.memory import memory_limit, stage_memory
from partitioner.plan import MemoryItems
from partitioner.solver.chain import Chain, ChainSplit, cheapest_split, has_room, smallest_bottleneck
from partitioner.solver.layout import Site
from partitioner.solver.problem import Problem
from partitioner.solver.settings import mesh_levels, pinned_positions, settings
from partitioner.solver.starts import stage_starts
from partitioner.specs import EXECUTED_SHARDS, Cluster, Device, Training, format_bytes

PRECISION = 5e-3
"""Relative, of the smallest limit that would do."""
MOST_GROWTH = 8
"""Up to so many times the devices are tried."""


def shortage(graph: CostGraph, cluster: Cluster, training: Training) -> str:
    """The message of an InfeasibleError: bytes needed, where, for what, the bytes short, and the nearest way out."""
    problems = list(_leanest(graph, cluster, training))
    if not problems:
        return (
            f"no split exists: {training.schedule} on {cluster.num_devices} devices needs more stages than "
            f"{graph.num_layers} layers, {len(graph.allowed_cuts)} possible cuts and the pins allow: use "
            f"schedule='auto', fewer devices, or other pins"
        )
    if all(problem.setting.stages_per_rank > 1 for problem in problems):
        return _short_on_ranks(graph, cluster, training, problems)
    problem = min(problems, key=_least_extra)
    lacking, found = _closest(problem)
    setting, cuts, bounds = problem.setting, found.cuts, graph.bounds(found.cuts)
    needed, ways = (one[0] for one in problem.least_bytes(np.array([cuts], dtype=np.int64).reshape(1, -1)))
    stage = int(np.argmax(needed - problem.memory.room))
    device = _tightest(cluster, training, setting.devices_by_stage[stage])
    saving = problem.savings[int(ways[stage])]
    split = setting.split(cuts, (saving,) * setting.num_stages)
    items = stage_memory(graph, training, device, split, stage)
    limit, held = memory_limit(device, training), int(problem.memory.held[stage])
    ways = _way_out(graph, cluster, training, limit, lacking * (1 + device.slack))
    return told(graph, cluster, training, device, (stage, *bounds[stage]), items, held, setting.in_words, ways)


def told(
    graph: CostGraph,
    cluster: Cluster,
    training: Training,
    device: Device,
    where: tuple[int, int, int],
    items: MemoryItems,
    held: int,
    mesh: str,
    ways: list[str],
) -> str:
    """The message. where: a stage, its first layer and the one after its last. held: micro-batches in flight there.
    mesh: the setting that comes closest. ways: what fits."""
    limit, (stage, first, last) = memory_limit(device, training), where
    by_user = training.memory_limit_bytes is not None and training.memory_limit_bytes < device.memory_bytes
    of = f"the memory_limit of {format_bytes(limit)}" if by_user else format_bytes(limit)
    sizes = sorted(((value, name) for name, value in items.model_dump().items() if value), reverse=True)
    largest = ", ".join(
        f"{name} {format_bytes(value)}"
        + (f" of {held} micro-batch{'es' if held > 1 else ''} in flight" if name == "activations" else "")
        for value, name in sizes[:3]
    )
    alone = not any(first < cut < last for cut in graph.allowed_cuts)
    name = (
        f"layer {graph.ids[first]}, alone on stage {stage},"
        if alone
        else f"stage {stage} ({graph.ids[first]} to {graph.ids[last - 1]})"
    )
    devices = "1 device" if cluster.num_devices == 1 else f"{cluster.num_devices} devices"
    return (
        f"does not fit: {name} needs {format_bytes(items.total)} of {of} ({largest}), "
        f"{format_bytes(max(1, items.total - limit))} too much. No split of {graph.num_layers} layers fits {devices}; "
        f"this one ({mesh}) comes closest. What fits: {' or '.join(ways)}."
    )


def _leanest(graph: CostGraph, cluster: Cluster, training: Training) -> Iterator[Problem]:
    """Settings where memory is least: stages in powers of two, with the fewest and the most replicas and micro-batches.

    More stages hold fewer layers but, under 1f1b, more micro-batches; more replicas have fewer samples each, but whole
    models among them hold their gradients twice.
    """
    site = Site(cluster, training)
    replicas: dict[int, list[int]] = {}
    for stages, count in sorted(mesh for level in mesh_levels(graph, cluster, training) for mesh in level):
        replicas.setdefault(stages, []).append(count)
    if not replicas:
        return  # a smaller batch may not divide by the replicas that are asked for
    most, fewest = max(replicas), min(replicas)
    for stages in sorted(replicas, reverse=True):
        if stages not in (most, fewest) and stages & (stages - 1):
            continue
        for count in dict.fromkeys((replicas[stages][-1], replicas[stages][0])):
            yield from _extremes(graph, cluster, training, site, (stages, count))


def _extremes(
    graph: CostGraph, cluster: Cluster, training: Training, site: Site, mesh: tuple[int, int]
) -> Iterator[Problem]:
    """On a mesh, the settings with the most and the fewest micro-batches that some split allows."""
    pins = pinned_positions(graph, training)
    every = list(settings(site, training, [mesh]))
    every = [one for one in every if one[0].schedule == every[0][0].schedule and one[1] is every[0][1]]
    for setting, layout in every[-1:] + every[:-1][:1]:
        starts = stage_starts(graph.num_layers, setting.num_stages, graph.allowed_cuts, pins)
        if starts is not None:
            yield Problem(graph, cluster, training, setting, starts, layout)


def _short_on_ranks(graph: CostGraph, cluster: Cluster, training: Training, problems: list[Problem]) -> str:
    """The message where ranks have several stages each: of splits even in time, the one whose ranks lack the least."""
    tried = []
    for problem in problems:
        free = problem.chain.free()
        split = cheapest_split(free, smallest_bottleneck(free))
        assert split is not None  # every stage can have a layer
        short = problem.held_by_ranks(problem.memory, np.array([split.cuts]))[0] - problem.layout.room
        tried.append((float(short.max()), int(short.argmax()), split, problem))
    lacking, rank, split, problem = min(tried, key=lambda one: one[0])
    setting, bounds = problem.setting, graph.bounds(split.cuts)
    device = _tightest(cluster, training, setting.devices[rank])
    limit = memory_limit(device, training)
    extra = math.ceil(lacking * (1 + device.slack))
    own = ", ".join(
        f"stage {stage} ({graph.ids[first]} to {graph.ids[last - 1]})"
        for stage, (first, last) in enumerate(bounds)
        if setting.places[stage] == rank
    )
    ways = _way_out(graph, cluster, training, limit, extra)
    return (
        f"does not fit: with {setting.in_words} and stages even in time, rank {rank} with {own} needs "
        f"{format_bytes(limit + extra)} of {format_bytes(limit)}, {format_bytes(max(1, extra))} too much, and no other "
        f"split was found that fits. What fits: {' or '.join(ways)}."
    )


def _tightest(cluster: Cluster, training: Training, devices: Sequence[int]) -> Device:
    """Of the replicas' devices, the one with the least memory."""
    return min((cluster.devices[device] for device in devices), key=lambda one: memory_limit(one, training))


def _fits(problem: Problem) -> bool:
    if problem.setting.stages_per_rank > 1:
        return problem.best(0.0, thorough=False) is not None
    return not problem.hopeless() and cheapest_split(problem.chain) is not None


def _somehow(graph: CostGraph, cluster: Cluster, training: Training) -> Problem | None:
    """A setting of which some split fits, looked for where memory is least; None: there is none there."""
    return next((problem for problem in _leanest(graph, cluster, training) if _fits(problem)), None)


def _least_extra(problem: Problem) -> float:
    """Bytes that every device must have more of at least, by what does not depend on the cuts."""
    stages = np.arange(problem.setting.num_stages)
    whole = np.min([one.bytes(stages, 0, problem.graph.num_layers) for one in problem.memories], axis=0)
    low, high = 0.0, float(np.max(whole - problem.memory.room))
    while high - low > PRECISION * max(1.0, high + float(problem.memory.room.min())):
        middle = (low + high) / 2
        if has_room(_grown(problem, middle)):
            high = middle
        else:
            low = middle
    return low


def _closest(problem: Problem) -> tuple[float, ChainSplit]:
    """(bytes that it lacks at most, split) of the split that lacks the least, to `PRECISION`."""

    def lacking(split: ChainSplit) -> float:
        needed, _ = problem.least_bytes(np.array([split.cuts], dtype=np.int64).reshape(1, -1))
        return float(np.max(needed - problem.memory.room))

    free = problem.chain.free()
    best = cheapest_split(free, smallest_bottleneck(free))
    assert best is not None  # every stage can have a layer
    low, high = _least_extra(problem), lacking(best)
    while high - low > PRECISION * max(1.0, high + float(problem.memory.room.min())):
        middle = low + (high - low) / 4  # the bytes that cross cuts are few: the answer is near the low end
        split = cheapest_split(_grown(problem, middle))
        if split is None:
            low = middle
        else:
            high, best = min(middle, lacking(split)), split
    return lacking(best), best


def _grown(problem: Problem, extra_bytes: float) -> Chain:
    chain = problem.chain
    leaner = tuple(
        one._replace(limits=memory.grown(extra_bytes))
        for one, memory in zip(chain.leaner, problem.memories[1:], strict=False)
    )
    return replace(chain, limits=problem.memory.grown(extra_bytes), leaner=leaner)


def _way_out(graph: CostGraph, cluster: Cluster, training: Training, limit: int, lacking: float) -> list[str]:
    """The nearest changes that were tried and fit."""
    ways = []
    if training.schedule not in ("auto", "1f1b") and (found := _tried(graph, cluster, training, schedule="auto")):
        ways.append(f"schedule={found.setting.schedule!r}")
    if training.microbatches != "auto" and (found := _tried(graph, cluster, training, microbatches="auto")):
        ways.append(f"microbatches={found.setting.num_microbatches}")
    if training.recompute == "never" and (found := _tried(graph, cluster, training, recompute="auto")):
        ways.append("recompute='auto'")
    levels = [level for level in (*EXECUTED_SHARDS[1:], "zero3") if training.shard == "none" or level == "zero3"]
    level = next((level for level in levels if _tried(graph, cluster, training, shard=level)), None)
    if level in EXECUTED_SHARDS:
        ways.append("shard='auto'")
    elif level is not None:
        ways.append(f"shard={level!r} (solve() predicts it, this version does not run it)")
    if training.mesh != "auto" and (found := _tried(graph, cluster, training, mesh="auto")):
        ways.append(f"mesh={found.setting.mesh}")
    if (more := _more_devices(graph, cluster, training)) is not None:
        ways.append(f"{more} such devices")
    if (smaller := _smaller_batch(graph, cluster, training)) is not None:
        ways.append(f"batch_size={smaller}")
    return [*ways, more_memory(cluster, training, limit + lacking)]


def more_memory(cluster: Cluster, training: Training, needed: float) -> str:
    """The limit to raise where the devices have so much, or devices that have."""
    least = min(device.memory_bytes for device in cluster.devices)
    if training.memory_limit_bytes is not None and training.memory_limit_bytes < needed <= least:
        return f"memory_limit='{math.ceil(needed / 2**20)}MiB'"
    return f"devices with {format_bytes(needed, up=True)}"


def with_devices(cluster: Cluster, count: int) -> Cluster:
    """The cluster with so many devices, more ones like its last."""
    extra = count - cluster.num_devices
    return cluster.model_copy(
        update={
            "devices": cluster.devices + cluster.devices[-1:] * extra,
            "nodes": cluster.nodes + cluster.nodes[-1:] * extra,
        }
    )


def _tried(graph: CostGraph, cluster: Cluster, training: Training, **changes: object) -> Problem | None:
    return _somehow(graph, cluster, training.model_copy(update=changes))


def _more_devices(graph: CostGraph, cluster: Cluster, training: Training) -> int | None:
    """About the fewest devices, like the last one, that are enough; None: more do not help."""

    def enough(count: int) -> bool:
        grown = with_devices(cluster, count)
        meshes = [mesh for level in mesh_levels(graph, grown, training) for mesh in level if mesh[0] * mesh[1] == count]
        site = Site(grown, training)
        return any(
            _fits(problem)
            for mesh in sorted(meshes, reverse=True)[:1]
            for problem in _extremes(graph, grown, training, site, mesh)
        )

    low = high = cluster.num_devices
    most = min(MOST_GROWTH * cluster.num_devices, len(graph.allowed_cuts) + 1)
    while high < most:
        low, high = high, min(2 * high, most)
        if enough(high):
            while high - low > max(1, high // 16):
                middle = (low + high) // 2
                low, high = (low, middle) if enough(middle) else (middle, high)
            return high
    return None


def _smaller_batch(graph: CostGraph, cluster: Cluster, training: Training) -> int | None:
    """The batch, halved as often as it takes; None: it does not help."""
    size = training.batch_size
    while size % 2 == 0:
        size //= 2
        if training.microbatches != "auto" and size % training.microbatches:
            return None
        if _tried(graph, cluster, training, batch_size=size):
            return size
    return None
