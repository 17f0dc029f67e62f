"""Bytes that each rank holds from moment to moment of a step, by what they are for: the peak, when it is, and why.

    always              weights, buffers, gradients, optimizer, overhead
    F until B or W      what a micro-batch keeps: activations, what was received, what was sent
    during B, I         gradients on their way in and out
    during F, B, I, W   what the layer at work needs beside that
    during sync         a bucket of gradients; replicas of a whole model hold theirs all the time

Of inference there are weights and buffers, and during F what was received and what the layer at work needs.

The moments are those of a Timeline, predicted or measured. What `memory.stage_memory` says of a stage is this peak, and
with it the bucket of replicas, which is needed at another time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partitioner.errors import ArgumentError
from partitioner.graph import CostGraph
from partitioner.memory import Spread, inference_memory, interval_memory, overhead_bytes
from partitioner.plan import MemoryItems, Plan
from partitioner.specs import Saving
from partitioner.timeline import COMPUTE, Span, Timeline

Floats = NDArray[np.float64]
PER_MICROBATCH = ("activations", "loss", "received", "workspace")


@dataclass(frozen=True)
class Residency:
    """What one rank holds over a step. Arrays are by moment: from `times_s[k]` on until the next one."""

    rank: int
    times_s: Floats
    """Ascending; several changes at one moment follow one another as they happen."""
    items: dict[str, Floats]
    """Field of MemoryItems -> bytes."""
    spans: tuple[Span | None, ...]
    """Which begins or ends then; None at the first moment, before the step."""

    @cached_property
    def total_bytes(self) -> Floats:
        """[moments]"""
        total: Floats = np.sum(list(self.items.values()), axis=0)
        return total

    @property
    def _peak(self) -> int:
        return int(np.argmax(self.total_bytes))

    @property
    def peak(self) -> MemoryItems:
        """What the peak consists of."""
        return MemoryItems(**{name: math.ceil(values[self._peak]) for name, values in self.items.items()})

    @property
    def peak_s(self) -> float:
        """When it is reached first."""
        return float(self.times_s[self._peak])

    @property
    def peak_span(self) -> Span | None:
        """What the rank was about then."""
        return self.spans[self._peak]


def residency(plan: Plan, timeline: Timeline) -> tuple[Residency, ...]:
    """By rank, what it holds over a step of the plan. `timeline`: of the plan's ranks, simulated or measured.

    A timeline of another number of ranks, or with stages that the plan has on other ranks, is an ArgumentError.
    """
    if timeline.num_ranks != plan.num_ranks:
        raise ArgumentError(
            f"the timeline has {timeline.num_ranks} ranks, the plan {plan.num_ranks}: simulate this plan"
        )
    graph = CostGraph.from_profile(plan.profile)
    figures = [_StageBytes.of(graph, plan, stage) for stage in range(plan.num_stages)]
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind in (*COMPUTE, "sync"):
            if span.rank not in plan.stages[span.stage].ranks:
                raise ArgumentError(
                    f"the timeline has stage {span.stage} on rank {span.rank}, the plan has it elsewhere"
                )
            by_rank[span.rank].append(span)
    trains = any(span.kind in ("B", "W") for span in timeline.spans)
    return tuple(
        _of_rank(plan, rank, figures, sorted(by_rank[rank], key=lambda span: (span.start_s, span.end_s)), trains)
        for rank in range(plan.num_ranks)
    )


@dataclass(frozen=True)
class _StageBytes:
    """Of one stage, each by item."""

    always: dict[str, float]
    microbatch: dict[str, float]
    gradients_s_way: float
    working: float
    bucket: float

    @classmethod
    def of(cls, graph: CostGraph, plan: Plan, stage: int) -> _StageBytes:
        first = graph.position[plan.stages[stage].layers[0]]
        last = first + len(plan.stages[stage].layers)
        samples = plan.training.batch_size / (plan.num_replicas * plan.num_microbatches)
        if not _trains(plan):
            return cls.of_forwards(graph, first, last, samples)
        own = plan.stages[stage]
        spread = Spread.of_stage(Saving(own.recompute, own.shard), plan.num_replicas)
        none, one = (
            interval_memory(
                graph,
                plan.training,
                first,
                last,
                samples=samples,
                held=held,
                replicated=plan.num_replicas > 1,
                spread=spread,
            )
            for held in (0, 1)
        )
        costs = graph.at(samples)
        on_their_way = float(costs.received_gradient(first, last) + costs.sent_gradient(first, last))
        always = {name: float(value) for name, value in none.items() if name not in PER_MICROBATCH}
        bucket = always.pop("buckets")
        return cls(
            always=always,
            microbatch={name: float(one[name] - none[name]) for name in PER_MICROBATCH},
            gradients_s_way=on_their_way,
            working=float(none["workspace"]) - on_their_way,
            bucket=bucket,
        )

    @classmethod
    def of_forwards(cls, graph: CostGraph, first: int, last: int, samples: float) -> _StageBytes:
        """Of forward passes alone: no gradients, no optimizer, nothing kept for a backward."""
        items = {name: float(value) for name, value in inference_memory(graph, first, last, samples=samples).items()}
        return cls(
            always={name: items[name] for name in ("weights", "buffers")},
            microbatch={"received": items["received"]},
            gradients_s_way=0.0,
            working=items["workspace"],
            bucket=0.0,
        )


def _trains(plan: Plan) -> bool:
    return plan.training.objective == "train"


def _of_rank(plan: Plan, rank: int, figures: list[_StageBytes], spans: list[Span], trains: bool) -> Residency:
    own = [stage.index for stage in plan.stages if rank in stage.ranks]
    now = dict.fromkeys(MemoryItems.model_fields, 0.0)
    for stage in own:
        for name, value in figures[stage].always.items():
            now[name] += value
    now["buffers"] -= plan.profile.buffer_bytes * (len(own) - 1)  # once a rank, not once a stage
    # Replicas of inference send each other nothing; ranks that take turns are all of one pipeline.
    axes = plan.mesh.values() if _trains(plan) else (plan.num_ranks if plan.takes_turns else plan.num_stages,)
    now["overhead"] = overhead_bytes(plan.device_of(rank), *axes)
    if plan.num_stages == 1:
        now["buckets"] = figures[0].bucket
    rows, times, about = [tuple(now.values())], [min((span.start_s for span in spans), default=0.0)], [None]
    moments: list[Span | None] = list(about)

    def note(time_s: float, span: Span) -> None:
        rows.append(tuple(now.values()))
        times.append(time_s)
        moments.append(span)

    for span in spans:
        bytes_ = figures[span.stage]
        if span.kind == "sync":
            if plan.num_stages > 1:
                now["buckets"] += bytes_.bucket
                note(span.start_s, span)
                now["buckets"] -= bytes_.bucket
                note(span.end_s, span)
            continue
        passing = bytes_.working + bytes_.gradients_s_way * (span.kind in ("B", "I"))
        if span.kind == "F":
            _add(now, bytes_.microbatch, 1)
        now["workspace"] += passing
        note(span.start_s, span)
        now["workspace"] -= passing
        if span.kind in ("B", "W") or not trains:
            _add(now, bytes_.microbatch, -1)
        note(span.end_s, span)
    columns = dict(zip(now, np.array(rows, float).T, strict=True))
    columns["slack"] = plan.device_of(rank).slack * (np.sum(list(columns.values()), axis=0) - columns["overhead"])
    return Residency(rank, np.array(times), columns, tuple(moments))


def _add(now: dict[str, float], amounts: dict[str, float], sign: int) -> None:
    for name, amount in amounts.items():
        now[name] += sign * amount
