"""Itemised bytes of a rank at its peak: what it always holds, and what it holds for each micro-batch in flight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from partitioner.actions import Orders, most_held
from partitioner.graph import CostGraph
from partitioner.intervals import IntervalMax, IntervalSum
from partitioner.plan import MemoryItems
from partitioner.schedule import build_schedule, in_flight, placement
from partitioner.specs import EXECUTED_SHARDS, Device, Recompute, Saving, ScheduleName, Shard, StateBytes, Training
from partitioner.split import Split
from partitioner.steps import Layout

BUCKET_BYTES = 25 * 2**20
"""What DistributedDataParallel puts into one gradient bucket by default."""


def stage_memory(graph: CostGraph, training: Training, device: Device, split: Split, stage: int = 0) -> MemoryItems:
    """Bytes that one rank of the stage holds at its peak on the device, by what they are for.

    Of several stages on a rank, each has what it holds when the rank holds the most, and what the rank has once stands
    with its first stage: together they are the rank's peak, but for the gradients on their way, which only the stage at
    work has. Layers that a stage recomputes keep what they received and run again in their backward, one at a time.
    The total, overhead and slack of the device included, is to be held against `memory_limit(device, training)`.
    """
    bounds, num_stages, num_ranks = graph.bounds(split.cuts), split.num_stages, split.num_places
    schedule, num_microbatches, orders = split.schedule, split.num_microbatches, split.orders
    overhead = overhead_bytes(device, num_ranks, split.num_replicas)
    spread = Spread.of_stage(split.saving[stage], split.num_replicas)

    def items_of(stages: slice | int, held: ArrayLike) -> dict[str, Any]:
        first, last = np.array(bounds)[stages].T
        return interval_memory(
            graph,
            training,
            first,
            last,
            samples=split.samples(training),
            held=held,
            replicated=split.num_replicas > 1,
            spread=spread,
        )

    if num_ranks == num_stages:
        if orders is None:
            count = in_flight(schedule, stage, num_stages, num_microbatches)
        else:
            count = most_held(orders)[stage]
        items = items_of(stage, count)
        return on_device(items, device, overhead)
    none, one = (sum(items_of(slice(None), count).values()) for count in (0, 1))
    if orders is None:
        moments = _moments(schedule, num_stages, num_microbatches, num_ranks)
    else:
        moments = _moments_of(orders)
    held = _held_at_peak(moments, np.asarray(one - none))
    items = items_of(stage, held[stage])
    if stage >= num_ranks:
        items["buffers"] = items["buffers"] - graph.profile.buffer_bytes
    return on_device(items, device, overhead if stage < num_ranks else 0)


def overhead_bytes(device: Device, *axes: int) -> int:
    """What a rank's device holds before anything is computed: its context, and a communicator for each axis of the mesh
    (`axes`: their sizes) on which there are other ranks."""
    return device.overhead_bytes + sum(size > 1 for size in axes) * device.communicator_bytes


def room_bytes(device: Device, limit_bytes: int, *axes: int) -> int:
    """Bytes for all items but overhead and slack, so that with these a rank of a mesh of such axes keeps to its limit:

        items + slack x items + overhead <= limit

    Negative where the overhead alone is over it.
    """
    free = limit_bytes - overhead_bytes(device, *axes)
    room = math.floor(free / (1 + device.slack))
    return room + (room + 1 + _slack_bytes(device, room + 1) <= free)  # a division may come out just below


def _slack_bytes(device: Device, num_bytes: int) -> int:
    return int(device.slack * num_bytes)


def on_device(items: Mapping[str, Any], device: Device, overhead: int) -> MemoryItems:
    """The items rounded up, with what the device adds to them: overhead as `overhead_bytes` has it, and slack."""
    whole = {name: math.ceil(value) for name, value in items.items()}
    return MemoryItems(**whole, overhead=overhead, slack=_slack_bytes(device, sum(whole.values())))


@dataclass(frozen=True)
class Spread:
    """How a stage's memory is divided over ranks beyond its layers, and what its training keeps of a parameter."""

    tp: int = 1
    """Tensor-parallel ranks: they divide the parameters marked `divided`, and what is made of them."""
    sequence_parallel: bool = False
    """What tensor parallelism leaves whole is divided by the sequence (Korthikanti et al. 2022)."""
    dp: int = 1
    shard: Shard = "none"
    """Over `dp` ranks."""
    whole_parameters: bool = False
    """Each parameter's gradient and state are on one of the `dp` ranks, not an equal part of it on each. Gradients of
    parameters that stages share stay whole until the end of a step under zero2; they are counted as divided."""
    recompute: Recompute = "never"
    products: float = 1.0
    """Share of the results of products that selective recomputation keeps; one half where it keeps every second one."""
    state: StateBytes | None = None
    """None: weights and gradients as the profile has them, the optimizer's state as Training says."""

    @classmethod
    def of_stage(cls, saving: Saving, dp: int) -> Spread:
        """Of a stage as our own executor trains it."""
        return cls(
            dp=dp,
            shard=saving.shard,
            whole_parameters=saving.shard in EXECUTED_SHARDS,
            recompute="always" if saving.recompute else "never",
        )

    @classmethod
    def of(cls, layout: Layout, state: StateBytes | None, products: float = 1.0) -> Spread:
        """What of a step's layout divides memory."""
        return cls(
            tp=layout.tp,
            sequence_parallel=layout.sequence_parallel,
            dp=layout.dp,
            shard=layout.shard,
            recompute=layout.recompute,
            products=products,
            state=state,
        )


def interval_memory(
    graph: CostGraph,
    training: Training,
    first: ArrayLike,
    last: ArrayLike,
    *,
    samples: float,
    held: ArrayLike,
    replicated: bool,
    spread: Spread | None = None,
) -> dict[str, Any]:
    """The items of `MemoryItems` but overhead and slack, of a stage of the layers [first, last): arrays broadcast.

    held: micro-batches in flight, broadcast as well. One micro-batch holds what its layers keep for backward, what the
    stage received (the leaves that gradients go back to) and what it sent (where backward starts again); one gradient
    of each is on its way at a time. Beside that, one layer at a time needs what it works with. Replicas of a whole
    model run under DistributedDataParallel, whose buckets hold the gradients a second time; stages with replicas reduce
    theirs after the last backward through one bucket.
    """
    i, j = np.asarray(first), np.asarray(last)
    costs, n = graph.at(samples), graph.num_layers
    held = np.asarray(held)
    spread = spread or Spread()
    tp, whole = spread.tp, spread.tp if spread.sequence_parallel else 1
    holding = graph.holding(samples, tp=tp, whole=whole, recompute=spread.recompute, products=spread.products)
    weights = _divided(graph.weight_bytes, graph.divided_bytes, tp, i, j)
    gradients = _divided(graph.trainable_bytes, graph.divided_gradient_bytes, tp, i, j)
    elements = _divided(graph.trainable_elements, graph.divided_elements, tp, i, j)
    master, step = 0.0 * elements, 0.0 * elements
    optimizer = training.optimizer_bytes * elements
    if spread.state is not None:
        state = spread.state
        gradients, optimizer = state.gradients * elements, state.moments * elements
        master, step = state.master * elements, state.step * elements
    is_whole_model = (i == 0) & (j == n)
    bucketed = np.where(is_whole_model & (spread.shard == "none"), gradients, np.minimum(gradients, BUCKET_BYTES))
    gathered = 0.0 * weights
    if spread.shard != "none" and spread.dp > 1:
        at = np.arange(n)
        largest = IntervalMax(_divided(graph.weight_bytes, graph.divided_bytes, tp, at, at + 1))(i, j)
        parts = (1 / spread.dp,) * 2
        if spread.whole_parameters:
            parts = graph.largest_parts(i, j, spread.dp)
        optimizer, master, step = optimizer * parts[0], master * parts[0], step * parts[0]
        if spread.shard != "zero1":
            gradients = gradients * parts[1]
            gathered = gathered + largest
        if spread.shard == "zero3":
            weights = weights / spread.dp
            gathered = gathered + 2 * largest  # of the layer at work and of the next
    kept = held * (holding.kept_before[j] - holding.kept_before[i])
    told = graph.profile.layers[-1].costs[0].memory is not None
    loss = np.where(j == n, held * (holding.kept_before[n] - holding.kept_before[n - 1]), 0.0) if told else 0.0 * kept
    received = held * costs.received(i, j) / whole
    on_their_way = (costs.received_gradient(i, j) + costs.sent_gradient(i, j)) / whole
    workspace = held * costs.sent(i, j) / whole + on_their_way + holding.working(i, j)
    return {
        "weights": weights,
        "buffers": graph.profile.buffer_bytes + graph.buffer_bytes(i, j),
        "gradients": gradients,
        "optimizer": optimizer,
        "master": master,
        "activations": kept - loss,
        "loss": loss,
        "received": received,
        "workspace": np.maximum(workspace, step - kept - received),
        "buckets": bucketed if replicated else 0.0 * gradients,
        "gathered": gathered,
    }


def rank_memory(
    graph: CostGraph,
    training: Training,
    device: Device,
    layout: Layout,
    *,
    state: StateBytes | None = None,
    products: float = 1.0,
) -> tuple[MemoryItems, ...]:
    """Bytes that each of a pipeline's ranks holds at its peak, the allocator's slack included.

    layout: with its cuts. state, products: as of a Spread.
    The stages of one rank hold their micro-batches in flight together, and work one at a time.
    """
    assert layout.cuts is not None, "what a stage holds depends on its cuts"
    bounds = graph.bounds(layout.cuts)
    p, num_ranks, schedule = len(bounds), layout.pp, layout.schedule
    first, last = np.array(bounds).T
    spread = Spread.of(layout, state, products)

    def items_of(held: NDArray[np.float64]) -> dict[str, Any]:
        return interval_memory(
            graph,
            training,
            first,
            last,
            samples=layout.microbatch,
            held=held,
            replicated=layout.dp > 1,
            spread=spread,
        )

    # No more than a few micro-batches a stage are ever in flight but under gpipe, where it is all of them.
    count = layout.num_microbatches if schedule == "gpipe" else min(layout.num_microbatches, 4 * p)
    if p == num_ranks:
        held = np.array([in_flight(schedule, stage, p, count) for stage in range(p)], float)
    else:
        one = items_of(np.ones(p))
        sizes = one["activations"] + one["loss"] + one["received"]
        held = _held_at_peak(_moments(schedule, p, count, num_ranks), sizes)
    items = items_of(held)
    items["buffers"] = items["buffers"] - graph.profile.buffer_bytes * (np.arange(p) >= num_ranks)  # once a rank
    places = np.array(placement(schedule, p, num_ranks))
    overhead = overhead_bytes(device, layout.tp, num_ranks, layout.dp)
    ranks = []
    for rank in range(num_ranks):
        own = places == rank
        values = {name: float(np.max(v[own]) if name in _AT_A_TIME else np.sum(v[own])) for name, v in items.items()}
        ranks.append(on_device(values, device, overhead))
    return tuple(ranks)


_AT_A_TIME = ("workspace", "gathered", "buckets")


Moments = tuple[tuple[list[int], NDArray[np.float64]], ...]
"""By rank: its stages, and after each of its forwards the micro-batches that they have in flight."""


def _held_at_peak(by_rank: Moments, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """By stage, the micro-batches in flight at the moment when its rank holds the most; `sizes` of one, by stage."""
    held = np.zeros(len(sizes))
    for own, moments in by_rank:
        held[own] = moments[int(np.argmax(moments @ sizes[own]))]
    return held


@lru_cache(maxsize=256)
def _moments(schedule: ScheduleName, num_stages: int, num_microbatches: int, num_ranks: int) -> Moments:
    return _moments_of(build_schedule(schedule, num_stages, num_microbatches, num_ranks=num_ranks))


def _moments_of(orders: Orders) -> Moments:
    found = []
    for order in orders:
        own = sorted({action.stage for action in order})
        held = dict.fromkeys(own, 0)
        moments = []
        for action in order:
            if action.kind == "F":
                held[action.stage] += 1
                moments.append([held[stage] for stage in own])
            elif action.kind in ("B", "W"):
                held[action.stage] -= 1
        found.append((own, np.unique(np.array(moments, float), axis=0)))
    return tuple(found)


def _divided(total: IntervalSum, divided: IntervalSum, tp: int, first: Any, last: Any) -> Any:
    """What one of `tp` ranks has of the layers [first, last)."""
    whole = total(first, last)
    return whole if tp == 1 else whole - divided(first, last) * (1 - 1 / tp)


def inference_memory(graph: CostGraph, first: ArrayLike, last: ArrayLike, *, samples: float) -> dict[str, Any]:
    """The items of `MemoryItems` that forward passes of the layers [first, last) need: arrays broadcast.

    One micro-batch is at work: what the stage received, what it sends, and the most that a layer of it needs, taken to
    be what it would save for a backward.
    """
    i, j = np.asarray(first), np.asarray(last)
    costs = graph.at(samples)
    return {
        "weights": graph.weight_bytes(i, j),
        "buffers": graph.profile.buffer_bytes + graph.buffer_bytes(i, j),
        "received": costs.received(i, j),
        "workspace": costs.sent(i, j) + costs.most_saved(i, j),
    }


def memory_limit(device: Device, training: Training) -> int:
    """Bytes that `MemoryItems.total` must not exceed: the device's memory, or the limit that the user set."""
    if training.memory_limit_bytes is None:
        return device.memory_bytes
    return min(device.memory_bytes, training.memory_limit_bytes)
