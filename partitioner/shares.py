"""Which replica of a stage keeps which parameter, where replicas divide the optimizer's work among them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partitioner.intervals import Floats


def keepers(sizes: Sequence[int], num_replicas: int) -> list[int]:
    """The replica of each, the largest first, each to the one that has the least so far (Graham 1969).

    >>> keepers([5, 3, 3, 1], 2)
    [0, 1, 1, 0]
    """
    held, found = [0] * num_replicas, [0] * len(sizes)
    for k in sorted(range(len(sizes)), key=lambda k: (-sizes[k], k)):
        found[k] = held.index(min(held))
        held[found[k]] += sizes[k]
    return found


def largest_shares(sizes: Floats, others: Floats, num_replicas: int) -> tuple[Floats, Floats]:
    """[rows] the most of `sizes` [rows, parameters] that one replica keeps by `keepers`; of `others`, which go along.

    Zeros where a row has fewer parameters.

    >>> [share.tolist() for share in largest_shares(np.array([[5.0, 3, 3, 1]]), np.array([[1.0, 2, 2, 1]]), 2)]
    [[6.0], [4.0]]
    """
    order = np.argsort(-sizes, axis=1, kind="stable")
    sizes, others = (np.take_along_axis(each, order, axis=1) for each in (sizes, others))
    rows = np.arange(len(sizes))
    held, along = np.zeros((2, len(sizes), num_replicas))
    for size, other in zip(sizes.T, others.T, strict=True):
        at = held.argmin(axis=1)
        held[rows, at] += size
        along[rows, at] += other
    return held.max(axis=1), along.max(axis=1)
