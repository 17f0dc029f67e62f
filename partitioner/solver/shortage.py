"""Why nothing fits: the split that comes closest, what it lacks and where, and a change that was tried and fits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from partitioner.graph import CostGraph
from partitioner.memory import memory_limit, stage_memory
from partitioner.solver.chain import Split, cheapest_split, start_flags
from partitioner.solver.problem import Problem
from partitioner.solver.settings import mesh_levels, pinned_positions, settings
from partitioner.specs import Cluster, Training, format_bytes

PRECISION = 1e-3
"""Relative, of the smallest limit that would do."""
MOST_GROWTH = 64
"""Up to so many times the devices are tried."""


def shortage(graph: CostGraph, cluster: Cluster, training: Training) -> str:
    """The message of an InfeasibleError: bytes needed, where, for what, the bytes short, and the nearest way out."""
    lacking, problem, split = min(
        (_closest(problem) for problem in _leanest(graph, cluster, training)), key=lambda item: item[0]
    )
    setting, bounds = problem.setting, graph.bounds(split.cuts)
    stages = np.arange(setting.num_stages)
    needed = problem.bytes(stages, [first for first, _ in bounds], [last for _, last in bounds])
    stage = int(np.argmax(needed - problem.room))
    device = min((cluster.devices[rank] for rank in setting.ranks[stage]), key=lambda one: memory_limit(one, training))
    items = stage_memory(
        graph,
        training,
        device,
        cuts=split.cuts,
        stage=stage,
        schedule=setting.schedule,
        num_microbatches=setting.num_microbatches,
        num_replicas=setting.num_replicas,
    )
    limit = memory_limit(device, training)
    sizes = sorted(((value, name) for name, value in items.model_dump().items() if value), reverse=True)
    held = int(problem.held[stage])
    largest = ", ".join(
        f"{name} {format_bytes(value)}"
        + (f" of {held} micro-batch{'es' if held > 1 else ''} in flight" if name == "activations" else "")
        for value, name in sizes[:3]
    )
    first, last = bounds[stage]
    alone = not any(first < cut < last for cut in graph.allowed_cuts)
    name = (
        f"layer {graph.ids[first]}, alone on stage {stage},"
        if alone
        else f"stage {stage} ({graph.ids[first]} to {graph.ids[last - 1]})"
    )
    mesh = f"pp={setting.num_stages}, dp={setting.num_replicas}, {setting.schedule}, "
    mesh += f"{setting.num_microbatches} micro-batch{'es' if setting.num_microbatches > 1 else ''}"
    devices = "1 device" if cluster.num_devices == 1 else f"{cluster.num_devices} devices"
    return (
        f"does not fit: {name} needs {format_bytes(items.total)} of {format_bytes(limit)} ({largest}), "
        f"{format_bytes(max(1, items.total - limit))} too much. No split of {graph.num_layers} layers fits {devices}; "
        f"this one ({mesh}) comes closest. {_way_out(graph, cluster, training, limit, lacking)}"
    )


def _leanest(graph: CostGraph, cluster: Cluster, training: Training) -> Iterator[Problem]:
    """The settings of every mesh that need the least memory: the smallest micro-batches, and the largest."""
    pins = pinned_positions(graph, training)
    for meshes in mesh_levels(graph, cluster, training):
        for mesh in meshes:
            starts = start_flags(graph.num_layers, mesh[0], graph.allowed_cuts, pins)
            every = list(settings(cluster, training, [mesh])) if starts is not None else []
            schedule = every[0].schedule if every else None  # 1f1b unless another is asked for
            every = [one for one in every if one.schedule == schedule and one.ranks == every[0].ranks]
            for one in {every[0]: 0, every[-1]: 0} if every else ():
                assert starts is not None
                yield Problem(graph, cluster, training, one, starts)


def _closest(problem: Problem) -> tuple[float, Problem, Split]:
    """(bytes that every device lacks, problem, split) of the split that lacks the least; 0 where one fits."""
    split, low = cheapest_split(problem.chain()), 0.0
    if split is not None:
        return 0.0, problem, split
    high = float(np.max(problem.bytes(np.arange(problem.setting.num_stages), 0, problem.graph.num_layers)))
    high += 4 * float(problem.held.max() + 1) * float(problem.replayer.costs.crossing_bytes.max())
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        found = cheapest_split(problem.with_room(middle).chain())
        if found is None:
            low = middle
        else:
            high, split = middle, found
    if split is None:
        split = cheapest_split(problem.chain(unlimited=True))
    assert split is not None  # starts has room for one layer a stage
    return high, problem, split


def fits_somehow(graph: CostGraph, cluster: Cluster, training: Training) -> Problem | None:
    """A setting of which some split fits, looked for where memory is least; None: there is none there."""
    for problem in _leanest(graph, cluster, training):
        if cheapest_split(problem.chain()) is not None:
            return problem
    return None


def _way_out(graph: CostGraph, cluster: Cluster, training: Training, limit: int, lacking: float) -> str:
    """The nearest changes that were tried and fit."""
    ways = []
    freed = {
        "schedule": training.schedule == "gpipe",
        "microbatches": training.microbatches != "auto",
        "mesh": training.mesh != "auto",
    }
    for name in (name for name, was_fixed in freed.items() if was_fixed):
        problem = fits_somehow(graph, cluster, training.model_copy(update={name: "auto"}))
        if problem is not None:
            value = {
                "schedule": problem.setting.schedule,
                "microbatches": problem.setting.num_microbatches,
                "mesh": problem.setting.mesh,
            }[name]
            ways.append(f"{name}={value!r}")
    if (more := _more_devices(graph, cluster, training)) is not None:
        ways.append(f"{more} such devices")
    if (smaller := _smaller_batch(graph, cluster, training)) is not None:
        ways.append(f"batch_size={smaller}")
    ways.append(f"devices with {format_bytes(limit + lacking)}")
    return f"What fits: {' or '.join(ways)}."


def _more_devices(graph: CostGraph, cluster: Cluster, training: Training) -> int | None:
    """The fewest devices, like the last one, that are enough; None: more do not help."""

    def enough(count: int) -> bool:
        extra = count - cluster.num_devices
        grown = cluster.model_copy(
            update={
                "devices": cluster.devices + cluster.devices[-1:] * extra,
                "nodes": cluster.nodes + cluster.nodes[-1:] * extra,
            }
        )
        return fits_somehow(graph, grown, training) is not None

    low = high = cluster.num_devices
    most = min(MOST_GROWTH * cluster.num_devices, len(graph.allowed_cuts) + 1)
    while high < most:
        low, high = high, min(2 * high, most)
        if enough(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if enough(middle) else (middle, high)
            return high
    return None


def _smaller_batch(graph: CostGraph, cluster: Cluster, training: Training) -> int | None:
    """The batch, halved as often as it takes; None: it does not help."""
    size = training.batch_size
    while size % 2 == 0:
        size //= 2
        if fits_somehow(graph, cluster, training.model_copy(update={"batch_size": size})) is not None:
            return size
    return None
