"""Plans for inference: stages and their ranks for the most samples a second, or for the least time of one batch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from partitioner.clock import Replica
from partitioner.errors import ArgumentError, InfeasibleError
from partitioner.graph import CostGraph
from partitioner.memory import inference_memory, memory_limit, on_device, overhead_bytes
from partitioner.plan import Alternative, LostEfficiency, MemoryItems, Plan, Prediction, Stage, StagePrediction
from partitioner.solver.equal_replicas import Case, Forwards, Found, Shape
from partitioner.solver.explain import about_costs
from partitioner.solver.halving import CLOSE
from partitioner.solver.inference_shortage import inference_shortage
from partitioner.solver.layout import AnyLayout
from partitioner.solver.settings import check_request, divisors, numbered
from partitioner.solver.unequal_replicas import Turns, unequal_replicas
from partitioner.specs import Cluster, Training
from partitioner.split import Split
from partitioner.steady import forwards_s
from partitioner.turns import most_turns

MOST_RUNNERS_UP = 5
SMALL = 2_000
"""Layers x stages that are solved in milliseconds, even if it is only to show what was not chosen."""


def solve_inference(graph: CostGraph, cluster: Cluster, training: Training) -> Plan:
    """The plan whose forward passes are the fastest, by `training.objective`, and fit.

    "throughput": batches follow each other; `step_s` is the time between two, the slowest of stages and transfers times
    the micro-batches that each rank and wire has of a batch. "latency": one batch through an empty pipeline; `step_s`
    is what it takes. Over all meshes, micro-batch counts and cuts; transfers go on beside the work of stages. For
    throughput also over one pipeline whose stages have each their own number of ranks, which take turns
    (`Plan.takes_turns`), where neither a mesh nor a pin fixes the stages: that is chosen where it is faster. On devices
    of unequal speed or memory only equal replicas are searched; `lower_bound_s` holds for all of them.
    """
    check_request(graph, cluster, training)
    if training.schedule not in ("auto", "gpipe"):
        raise ArgumentError(
            f"schedule={training.schedule!r} orders backward passes, and objective={training.objective!r} has none: "
            "use 'auto'"
        )
    if training.shard != "none":
        raise ArgumentError(
            f"shard={training.shard!r} divides what replicas keep for training, and objective={training.objective!r} "
            "trains nothing: use 'none'"
        )
    among = Forwards(graph, cluster, training)
    best: Found | None = None
    others: list[Found] = []
    unfit: list[Case] = []
    lower = best_s = math.inf
    promising = _by_promise(among)
    for bound_s, case in promising:
        if bound_s >= best_s * (1 - CLOSE):
            lower = min(lower, bound_s)
            break
        if isinstance(case.layout, AnyLayout):
            lower = min(lower, bound_s)
            continue
        one, bound_s = case.solve(best_s)
        lower = min(lower, bound_s)
        if one is not None:
            others += [] if best is None else [best]
            best, best_s = one, one.seconds
        elif case.shape.num_stages == 1 and case.fits() is None:
            unfit.append(case)
    if best is None:
        raise InfeasibleError(inference_shortage(graph, cluster, training))
    turns, bound_s = unequal_replicas(among, best_s)
    lower = min(lower, bound_s, best_s)
    others = sorted([*others, *_rivals(among, promising, {one.kind for one in (best, *others)})], key=Found.rank)
    found = [*([] if turns is None else [_of_turns(turns)]), *map(_of_mesh, (best, *others))]
    return _plan(graph, cluster, training, found, lower, unfit)


def _rivals(among: Forwards, cases: Iterator[tuple[float, Case]], seen: set[tuple[int, int]]) -> Iterator[Found]:
    """Of small models, plans on the next meshes that cannot win, to compare with."""
    tries = 2 * MOST_RUNNERS_UP
    while tries and len(seen) <= MOST_RUNNERS_UP and (item := next(cases, None)) is not None:
        _, case = item
        if among.graph.num_layers * case.shape.num_stages > SMALL:
            return
        if case.shape[:2] not in seen and not isinstance(case.layout, AnyLayout):
            tries -= 1
            if (one := case.solve(math.inf)[0]) is not None:
                seen.add(one.kind)
                yield one


def _by_promise(among: Forwards) -> Iterator[tuple[float, Case]]:
    """(what no cuts can beat, the case), ascending; devices are chosen for those shapes alone that are reached."""
    waiting: list[tuple[float, Shape, int, Case | None]] = [
        (among.bound_s(shape), shape, -1, None) for shape in among.shapes()
    ]
    heapq.heapify(waiting)
    while waiting:
        bound_s, shape, _, case = heapq.heappop(waiting)
        if case is not None:
            yield bound_s, case
        else:
            for k, one in enumerate(among.cases(shape)):
                heapq.heappush(waiting, (max(bound_s, one.bound_s), shape, k, one))


class _Chosen(NamedTuple):
    """A split, and all that is told of it."""

    split: Split
    mesh: dict[str, int]
    samples: int
    """Of one micro-batch."""
    seconds: float
    replicas: list[Replica]
    memory: list[MemoryItems]
    turns: np.ndarray
    """[p] micro-batches that a stage's busiest rank has of a batch."""

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.split.devices))

    @property
    def takes_turns(self) -> bool:
        return any(len(row) != self.mesh["dp"] for row in self.split.devices)

    @property
    def kind(self) -> tuple[int, ...]:
        """Ranks by stage: what makes a different plan."""
        return tuple(map(len, self.split.devices))


def _of_mesh(found: Found) -> _Chosen:
    case, shape = found.case, found.case.shape
    return _Chosen(
        split=case.split(found.cuts),
        mesh={"pp": shape.num_stages, "dp": shape.num_replicas},
        samples=shape.samples,
        seconds=found.seconds,
        replicas=case.replicas(found.cuts),
        memory=case.memory(found.cuts),
        turns=np.full(shape.num_stages, shape.num_microbatches),
    )


def _of_turns(found: Turns) -> _Chosen:
    m = found.search.num_microbatches
    return _Chosen(
        split=found.split,
        mesh={"pp": len(found.devices), "dp": 1},
        samples=found.search.samples,
        seconds=found.seconds,
        replicas=[found.costs],
        memory=found.memory(),
        turns=np.array([most_turns(m, count) for count in found.num_ranks]),
    )


def _plan(
    graph: CostGraph, cluster: Cluster, training: Training, found: list[_Chosen], bound_s: float, unfit: list[Case]
) -> Plan:
    best = found[0]
    prediction = _predict(graph, cluster, training, best)
    rank_of = numbered(best.split.devices, cluster)
    others: dict[tuple[int, ...], _Chosen] = {}
    for one in found[1:]:
        if one.kind != best.kind:
            others.setdefault(one.kind, one)
    return Plan(
        profile=graph.profile,
        cluster=cluster,
        training=training,
        mesh=best.mesh,
        schedule="gpipe",
        num_microbatches=best.split.num_microbatches,
        stages=tuple(
            Stage(index=k, layers=layers, ranks=tuple(rank_of[device] for device in best.split.devices[k]))
            for k, layers in enumerate(graph.stage_ids(best.split.cuts))
        ),
        devices=tuple(rank_of),
        prediction=prediction,
        lower_bound_s=min(bound_s, prediction.step_s),
        runners_up=tuple(
            Alternative(
                mesh=one.mesh,
                schedule="gpipe",
                num_microbatches=one.split.num_microbatches,
                stage_sizes=tuple(last - first for first, last in graph.bounds(one.split.cuts)),
                step_s=one.seconds,
                devices=one.split.devices,
                recompute=(False,) * len(one.split.devices),
            )
            for one in list(others.values())[:MOST_RUNNERS_UP]
        ),
        why=_reasons(graph, cluster, training, best, prediction, unfit),
    )


def _predict(graph: CostGraph, cluster: Cluster, training: Training, chosen: _Chosen) -> Prediction:
    """All figures; lost efficiency as in training, without what only training has."""
    m, step_s, num_ranks = chosen.split.num_microbatches, chosen.seconds, chosen.num_ranks
    forward_s = np.array([[stage.forward_s for stage in one.stages] for one in chosen.replicas])
    work = forward_s * chosen.turns
    if step_s <= 0:
        raise ArgumentError("every layer of this profile takes 0 s: measure it, or give costs, before planning with it")
    alone_s, fits = _baseline(graph, cluster, training)
    slowest = work.argmax(axis=0)
    moved = graph.transfers(chosen.split.cuts, chosen.samples)
    stages = tuple(
        StagePrediction(
            forward_s=float(forward_s[r, s]),
            backward_s=0.0,
            compute_s=float(work[r, s]),
            communication_s=0.0,
            idle_s=max(0.0, step_s - float(work[r, s])),
            send_bytes=math.ceil(sum(one.forward_bytes for one in moved if one.source == s)),
            in_flight=1,
            memory=chosen.memory[s],
        )
        for s, r in enumerate(slowest.tolist())
    )
    each = len(chosen.replicas) * m / num_ranks  # micro-batches of a batch x stages / ranks, of one stage
    speed = min(cluster.devices[device].relative_speed for row in chosen.split.devices for device in row)
    slicing_s = each * len(chosen.split.devices) * graph.slicing_s(len(chosen.split.devices)) / speed
    largest_s = float(work.max())
    without_transfers_s = largest_s
    if training.objective == "latency":
        free = {Replica(one.stages, tuple(replace(t, forward_s=0.0) for t in one.transfers)) for one in chosen.replicas}
        without_transfers_s = max(forwards_s(one, m) for one in free)
    even_s = each * float(graph.at(chosen.samples).forward_s.sum())
    lost_s = {
        "communication": step_s - without_transfers_s,
        "fill_drain": without_transfers_s - largest_s,
        "slicing": slicing_s,
        "imbalance": largest_s - slicing_s - even_s,
        "small_microbatch": even_s - alone_s / num_ranks,
    }
    speedup = alone_s / step_s
    return Prediction(
        step_s=step_s,
        optimizer_s=0.0,
        throughput=training.batch_size / step_s,
        single_device_s=alone_s,
        single_device_fits=fits,
        speedup=speedup,
        efficiency=speedup / num_ranks,
        bubble_fraction=max(0.0, 1 - m * float(forward_s.sum()) / (num_ranks * step_s)),
        stages=stages,
        lost=LostEfficiency(**{name: seconds / step_s for name, seconds in lost_s.items()}),
    )


def _baseline(graph: CostGraph, cluster: Cluster, training: Training) -> tuple[float, bool]:
    """(seconds of a batch on one device at its best micro-batch, whether it fits there)."""
    found = []
    for device in set(cluster.devices):
        for count in divisors(training.batch_size):
            samples = training.batch_size // count
            told = inference_memory(graph, 0, graph.num_layers, samples=samples)
            held = on_device(told, device, overhead_bytes(device)).total
            seconds = count * float(graph.at(samples).forward_s.sum()) / device.relative_speed
            found.append((held > memory_limit(device, training), seconds))
    unfit, seconds = min(found)
    return seconds, not unfit


def _reasons(
    graph: CostGraph,
    cluster: Cluster,
    training: Training,
    chosen: _Chosen,
    prediction: Prediction,
    unfit: list[Case],
) -> tuple[str, ...]:
    said = []
    if training.objective == "throughput":
        said.append("step_s is the time between batches that follow each other, not that of one batch")
    if chosen.takes_turns:
        where = " of the stages" if chosen.kind[1:] else ""
        said.append(
            f"the {' + '.join(map(str, chosen.kind))} ranks{where} take turns at the micro-batches of one pipeline: "
            "all ranks pass the same batch"
        )
        if chosen.kind[-1] > 1:
            said.append(
                f"the {chosen.kind[-1]} ranks of the last stage pass each other their outputs after a batch, which is "
                "not counted"
            )
    if len(chosen.split.devices) > 1:
        slowest = int(np.argmax([stage.compute_s for stage in prediction.stages]))
        first, last = graph.bounds(chosen.split.cuts)[slowest]
        said.append(f"stage {slowest} ({graph.ids[first]} to {graph.ids[last - 1]}) is the slowest")
        if unfit:
            said.append("the whole model does not fit the memory of one device, so it is cut into stages")
    if training.objective == "throughput" and training.mesh == "auto" and len(set(cluster.devices)) > 1:
        said.append("the devices are not alike, so stages were searched with equal numbers of ranks alone")
    if chosen.num_ranks < cluster.num_devices:
        said.append(f"{chosen.num_ranks} of {cluster.num_devices} devices are used: more would not make it faster")
    return (*said, *about_costs(graph.profile))
