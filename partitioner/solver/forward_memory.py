"""Which layers fit a device together where only forwards run: from which starts each end can be reached."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partitioner.graph import CostGraph
from partitioner.memory import inference_memory
from partitioner.solver.windows import Runs

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

MOST_TESTED = 2**23
"""Runs of layers that are tested one by one, a third of a microsecond each."""
AT_ONCE = 2**18
"""Of these in one go, to keep in a cache."""


class ForwardMemory:
    """`memory.inference_memory` of a graph's stages at one size of micro-batches. Positions are those of cuts."""

    def __init__(self, graph: CostGraph, samples: int) -> None:
        self.graph, self.samples = graph, samples
        self._near: dict[int, Ints] = {}

    def held(self, first: Ints, last: Ints) -> Floats:
        """Bytes of the layers [first, last); 0 where there are none. Arrays broadcast."""
        inside = first < last
        told = inference_memory(self.graph, np.where(inside, first, 0), np.where(inside, last, 1), samples=self.samples)
        return np.where(inside, sum(np.ceil(value) for value in told.values()), 0.0)

    def near(self, room: int) -> Ints:
        """[n + 1] the smallest start that leaves room for each end, by what only grows with a stage. Kept."""
        if room not in self._near:
            ends = np.arange(self.graph.num_layers + 1)
            low, high = np.zeros_like(ends), ends.copy()
            while (open_ := low < high).any():
                middle = (low + high) // 2
                good = self._growing(middle, np.where(open_, ends, 0)) <= room
                low, high = np.where(open_ & ~good, middle + 1, low), np.where(open_ & good, middle, high)
            self._near[room] = low
        return self._near[room]

    def sure(self, room: int) -> Ints:
        """[n + 1] the smallest start from which on all fit with each end: with the most received and sent anywhere."""
        return self.near(room - self._passing)

    def runs(self, room: int, since: Ints) -> tuple[Runs, bool]:
        """(the starts from `since` on, by end, that leave room; whether they are all). Those between `near` and `sure`
        are tested, where they are few enough."""
        low = np.maximum(self.near(room), since)
        sure = np.maximum(self.sure(room), low)
        ends = np.arange(len(low))
        tested = np.maximum(np.minimum(sure, ends) - low, 0)
        if not tested.any():
            return Runs.of(low), True
        if int(tested.sum()) > MOST_TESTED:
            return Runs.of(sure), False
        end = np.repeat(ends, tested)
        start = np.arange(len(end)) + np.repeat(low - np.cumsum(tested) + tested, tested)
        fit = np.concatenate(
            [self.held(start[k : k + AT_ONCE], end[k : k + AT_ONCE]) <= room for k in range(0, len(end), AT_ONCE)]
        )
        goes_on = (end[1:] == end[:-1]) & fit[1:] & fit[:-1]  # a place and the next one
        opens, closes = fit & ~np.append(False, goes_on), fit & ~np.append(goes_on, False)
        end = np.concatenate((end[opens], ends))
        low, high = np.concatenate((start[opens], np.minimum(sure, ends))), np.concatenate((start[closes] + 1, ends))
        order = np.lexsort((low, end))
        return Runs(end[order], low[order], high[order]), True

    def hopeless(self, rooms: list[int]) -> bool:
        """Whether some layer alone has no room anywhere, or all together need more than there is."""
        at, n = np.arange(self.graph.num_layers), self.graph.num_layers
        return bool(self._growing(at, at + 1).max() > max(rooms) or float(self.graph.weight_bytes(0, n)) > sum(rooms))

    def _growing(self, first: Ints, last: Ints) -> Floats:
        """Of what is held, that which no longer stage has less of."""
        inside, costs = first < last, self.graph.at(self.samples)
        i, j = np.where(inside, first, 0), np.where(inside, last, 1)
        held = np.ceil(self.graph.weight_bytes(i, j)) + np.ceil(self._buffers(i, j)) + costs.most_saved(i, j)
        return np.where(inside, held, 0.0)

    def _buffers(self, first: Ints, last: Ints) -> Floats:
        buffers: Floats = self.graph.profile.buffer_bytes + self.graph.buffer_bytes(first, last)
        return buffers

    @cached_property
    def _passing(self) -> int:
        """Bytes received and sent, of any stage, at most; and what rounding up adds."""
        return 2 * math.ceil(float(self.graph.at(self.samples).crossing_bytes.max())) + 2
