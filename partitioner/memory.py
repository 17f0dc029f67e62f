"""Itemised bytes of a rank at its peak: what it always holds, and what it holds for each micro-batch in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from partitioner.graph import CostGraph
from partitioner.plan import MemoryItems
from partitioner.schedule import in_flight
from partitioner.specs import Device, ScheduleName, Training

BUCKET_BYTES = 25 * 2**20
"""What DistributedDataParallel puts into one gradient bucket by default."""


def stage_memory(
    graph: CostGraph,
    training: Training,
    device: Device,
    *,
    cuts: Sequence[int],
    stage: int,
    schedule: ScheduleName,
    num_microbatches: int,
    num_replicas: int = 1,
    num_ranks: int | None = None,
) -> MemoryItems:
    """Bytes that one rank of `stage` holds at its peak, by what they are for. The stages are those of `cuts`.

    num_ranks: of the pipeline; None is one stage a rank. Of several stages on a rank, each at its own peak.
    `overhead` is the device's own; the total is to be held against `memory_limit(device, training)`.
    """
    first, last = graph.bounds(cuts)[stage]
    samples = training.batch_size / (num_replicas * num_microbatches)
    held = in_flight(schedule, stage, len(cuts) + 1, num_microbatches, num_ranks=num_ranks)
    items = interval_memory(graph, training, first, last, samples=samples, held=held, replicated=num_replicas > 1)
    return MemoryItems(**{name: math.ceil(value) for name, value in items.items()}, overhead=device.overhead_bytes)


def interval_memory(
    graph: CostGraph,
    training: Training,
    first: ArrayLike,
    last: ArrayLike,
    *,
    samples: float,
    held: ArrayLike,
    replicated: bool,
) -> dict[str, Any]:
    """The items of `MemoryItems`, overhead left out, of a stage of the layers [first, last): arrays broadcast.

    held: micro-batches in flight, broadcast as well. One micro-batch holds what its layers save for backward, what the
    stage received (the leaves that gradients go back to) and what it sent (where backward starts again); one gradient
    of each is on its way at a time. Replicas of a whole model run under DistributedDataParallel, whose buckets hold the
    gradients a second time; stages with replicas reduce theirs after the last backward through one bucket.
    """
    i, j = np.asarray(first), np.asarray(last)
    costs, n = graph.at(samples), graph.num_layers
    held = np.asarray(held)
    gradients = graph.trainable_bytes(i, j)
    on_their_way = costs.received_gradient(i, j) + costs.sent_gradient(i, j)
    whole = (i == 0) & (j == n)
    buckets = np.where(whole, gradients, np.minimum(gradients, BUCKET_BYTES)) if replicated else 0.0
    return {
        "weights": graph.weight_bytes(i, j),
        "buffers": graph.profile.buffer_bytes + graph.buffer_bytes(i, j),
        "gradients": gradients,
        "optimizer": training.optimizer_bytes * graph.trainable_elements(i, j),
        "activations": held * (costs.saved_before[j] - costs.saved_before[i]),
        "received": held * costs.received(i, j),
        "workspace": held * costs.sent(i, j) + on_their_way + buckets,
    }


def memory_limit(device: Device, training: Training) -> int:
    """Bytes that `MemoryItems.total` must not exceed: the device's memory, or the limit that the user set."""
    if training.memory_limit_bytes is None:
        return device.memory_bytes
    return min(device.memory_bytes, training.memory_limit_bytes)
