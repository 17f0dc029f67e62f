"""Seconds of many messages and collectives at once, over one link."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partitioner.specs import EXCHANGES, Link, Shard

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def link_times(link: Link, num_bytes: Floats) -> Floats:
    """`Link.time`, elementwise."""
    sizes, seconds = np.array(link.sizes_bytes, float), np.array(link.seconds)
    if len(sizes) == 2:
        k: Ints | int = 1
    else:
        k = np.clip(np.searchsorted(sizes, num_bytes), 1, len(sizes) - 1)
    slope = (seconds[k] - seconds[k - 1]) / (sizes[k] - sizes[k - 1])
    times: Floats = np.maximum(0.0, seconds[k - 1] + slope * (num_bytes - sizes[k - 1]))
    return times


def all_reduce_times(link: Link, num_bytes: Floats, num_ranks: int) -> Floats:
    """`Link.all_reduce_time`, elementwise."""
    if num_ranks < 2:
        return np.zeros(num_bytes.shape)
    return np.where(num_bytes > 0, 2 * (num_ranks - 1) * link_times(link, num_bytes / num_ranks), 0.0)


def sync_share(level: Shard) -> float:
    """Of an all-reduce of a stage's gradients, what its replicas exchange after its last backward."""
    return 1.0 if level == "none" else (EXCHANGES[level].step_scatters + EXCHANGES[level].step_gathers) / 2
