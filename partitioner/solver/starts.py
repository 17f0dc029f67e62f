"""Where each stage may begin: the cuts that are possible, narrowed by pins and by a layer for every stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Starts:
    """Boundary s is where stage s begins: at a possible cut from low[s] to high[s]; 0 for stage 0, n after the last."""

    num_layers: int
    cuts: tuple[int, ...]
    """Positions that may be cut, ascending."""
    low: tuple[int, ...]
    """[p + 1], itself a possible cut."""
    high: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.low) - 1

    @cached_property
    def floor(self) -> list[int]:
        """[n + 1] the largest possible cut, or end, up to each position."""
        marks = np.zeros(self.num_layers + 1, dtype=np.int64)
        marks[list(self.cuts)] = self.cuts
        marks[-1] = self.num_layers
        return list(np.maximum.accumulate(marks).tolist())

    @cached_property
    def ceiling(self) -> list[int]:
        """[n + 1] the smallest possible cut, or end, from each position on."""
        marks = np.full(self.num_layers + 1, self.num_layers, dtype=np.int64)
        marks[list(self.cuts)] = self.cuts
        marks[0] = 0
        return list(np.minimum.accumulate(marks[::-1])[::-1].tolist())

    def positions(self, boundary: int, low: int = 0, high: int | None = None) -> Ints:
        """Where a boundary may be, within [low, high]."""
        if boundary in (0, self.num_stages):
            return np.array([self.low[boundary]])
        low = max(low, self.low[boundary])
        high = self.high[boundary] if high is None else min(high, self.high[boundary])
        first, last = np.searchsorted(self._cuts, (low, high + 1))
        return self._cuts[first:last]

    @cached_property
    def possible(self) -> Ints:
        """Every position that some boundary may be at."""
        if self.num_stages == 1:
            return np.zeros(0, dtype=np.int64)
        reached = np.zeros(self.num_layers + 2, dtype=np.int64)
        np.add.at(reached, np.array(self.low[1:-1]), 1)
        np.add.at(reached, np.array(self.high[1:-1]) + 1, -1)
        return self._cuts[np.cumsum(reached)[self._cuts] > 0]

    def allow(self, cuts: Ints) -> NDArray[np.bool_]:
        """[rows] whether these cuts [rows, p - 1] are all possible, each within its range."""
        inside = (cuts >= np.array(self.low[1:-1])) & (cuts <= np.array(self.high[1:-1]))
        marks = np.zeros(self.num_layers + 1, dtype=np.bool_)
        marks[self._cuts] = True
        inside[inside] = marks[cuts[inside]]
        flags: NDArray[np.bool_] = np.array(inside.all(axis=1))
        return flags

    @cached_property
    def _cuts(self) -> Ints:
        return np.array(self.cuts, dtype=np.int64)


def stage_starts(
    num_layers: int, num_stages: int, cuts: Sequence[int], pins: Mapping[int, int] | None = None
) -> Starts | None:
    """Where each boundary may be, so that every stage can have a layer; None: there is no such split.

    pins: position -> stage. Boundary s lies after every layer pinned before stage s, and not after one pinned to s or
    later. O(n + p).

    >>> starts = stage_starts(4, 2, (1, 3), {1: 0})
    >>> starts.low, starts.high
    ((0, 3, 4), (0, 3, 4))
    """
    n, p = num_layers, num_stages
    low, high = [0] * (p + 1), [n] * (p + 1)
    for position, stage in (pins or {}).items():
        if stage >= p:
            return None
        low[stage + 1] = max(low[stage + 1], position + 1)
        high[stage] = min(high[stage], position)
    everything = Starts(n, tuple(cuts), tuple(low), tuple(high))
    for s in range(1, p):  # after a possible boundary before it, and after what is pinned before
        low[s] = everything.ceiling[max(low[s], low[s - 1] + 1)]
        if low[s] >= n:
            return None
    high[p] = n
    for s in range(p - 1, 0, -1):
        high[s] = everything.floor[min(high[s], high[s + 1] - 1)]
        if high[s] < low[s]:
            return None
    if low[p] > n or high[0] < 0:
        return None
    low[0] = high[0] = 0
    low[p] = n
    return Starts(n, tuple(cuts), tuple(low), tuple(high))
