"""What to say where no plan for inference fits: what comes closest, what it lacks, and changes that do fit."""

from __future__ import annotations

import math
from dataclasses import replace

from partitioner.graph import CostGraph
from partitioner.memory import inference_memory, memory_limit
from partitioner.solver.equal_replicas import Case, Forwards, Shape
from partitioner.solver.layout import AnyLayout
from partitioner.solver.shortage import more_memory, told, with_devices
from partitioner.specs import Cluster, Training

FEW_STAGES = 16
"""Numbers of stages up to which each is looked at when nothing fits."""
SHORT = 1e-4
"""Relative, of the bytes that are short."""
MOST_GROWTH = 8
"""Up to so many times the devices are tried when nothing fits."""


def inference_shortage(graph: CostGraph, cluster: Cluster, training: Training) -> str:
    """The message of an InfeasibleError: what comes closest, what it lacks, and changes that were tried and fit."""
    some = _roomiest(graph, cluster, training)
    closest = [(*found, case) for case in some if (found := _closest(case)) is not None]
    lacking, cuts, case = min(closest, key=lambda one: one[0])
    memory = case.memory(cuts)
    limits = [memory_limit(device, training) for _, device in case.rooms]
    stage = max(range(case.shape.num_stages), key=lambda k: memory[k].total - limits[k])
    device = case.rooms[stage][1]
    pp, dp, count, _ = case.shape
    mesh = f"pp={pp}, dp={dp}, {count} micro-batch{'es' if count > 1 else ''}"
    ways = []
    for name, value in (("microbatches", training.microbatches), ("mesh", training.mesh)):
        if value != "auto" and _fits(graph, cluster, training.model_copy(update={name: "auto"})):
            ways.append(f"{name}='auto'")
    if (more := _more_devices(graph, cluster, training)) is not None:
        ways.append(f"{more} such devices")
    ways.append(more_memory(cluster, training, limits[stage] + lacking))
    where = (stage, *graph.bounds(cuts)[stage])
    return told(graph, cluster, training, device, where, memory[stage], 1, mesh, ways)


def _roomiest(graph: CostGraph, cluster: Cluster, training: Training) -> list[Case]:
    """Of each number of stages (of many, powers of two and the most), the case with the smallest micro-batches."""
    among, smallest = Forwards(graph, cluster, training), dict[int, Shape]()
    for shape in sorted(among.shapes()):
        known = smallest.get(shape.num_stages)
        if known is None or shape.samples < known.samples:
            smallest[shape.num_stages] = shape
    most = max(smallest)
    some = [shape for p, shape in smallest.items() if p <= FEW_STAGES or p == most or not p & (p - 1)]
    return [next(one for one in among.cases(shape) if not isinstance(one.layout, AnyLayout)) for shape in some]


def _fits(graph: CostGraph, cluster: Cluster, training: Training) -> bool:
    return any(case.fits() is not None for case in _roomiest(graph, cluster, training))


def _closest(case: Case) -> tuple[float, tuple[int, ...]] | None:
    """(bytes that its devices lack, cuts) of the split that lacks the least, to `SHORT`; None: pins allow no split."""

    def lacking(cuts: tuple[int, ...]) -> float:
        return float(max(memory.total - limit for memory, limit in zip(case.memory(cuts), limits, strict=True)))

    limits = [memory_limit(device, case.among.training) for _, device in case.rooms]
    graph, samples = case.among.graph, case.shape.samples
    crossing = float(graph.at(samples).crossing_bytes.max())
    whole = inference_memory(graph, 0, graph.num_layers, samples=samples)
    low, high = 0.0, sum(map(float, whole.values())) + 2 * crossing + 8 - min(0, *case.room)
    best = replace(case, extra_bytes=math.ceil(high)).fits()
    if best is None:  # with room for everything on every stage
        return None
    while high - low > SHORT * max(1.0, high + float(min(case.room))):
        middle = (low + high) / 2
        cuts = replace(case, extra_bytes=math.ceil(middle)).fits()
        if cuts is None:
            low = middle
        else:
            high, best = middle, cuts
    return max(1.0, lacking(best)), best


def _more_devices(graph: CostGraph, cluster: Cluster, training: Training) -> int | None:
    """The fewest devices, more ones like the last, that are enough; None: more do not help."""

    def enough(count: int) -> bool:
        return _fits(graph, with_devices(cluster, count), training)

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
