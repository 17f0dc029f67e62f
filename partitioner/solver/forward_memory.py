"""Which layers fit a device together where only forwards run: all of it, or what only grows with a stage."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partitioner.graph import CostGraph
from partitioner.memory import inference_memory

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

ITEMS = ("weights", "buffers", "received", "workspace")
GROWING = ("weights", "buffers")


class ForwardMemory:
    """`memory.inference_memory` of a graph's stages at one size of micro-batches. Positions are those of cuts."""

    def __init__(self, graph: CostGraph, samples: int) -> None:
        self.graph, self.samples = graph, samples

    def held(self, first: Ints, last: Ints, names: tuple[str, ...] = ITEMS) -> Floats:
        """Bytes of the layers [first, last); 0 where there are none. Arrays broadcast."""
        inside = first < last
        told = inference_memory(self.graph, np.where(inside, first, 0), np.where(inside, last, 1), samples=self.samples)
        return np.where(inside, sum(np.ceil(told[name]) for name in names), 0.0)

    def near(self, room: int) -> Ints:
        """[n + 1] the smallest start that leaves room for each end, by what only grows with a stage."""
        ends = np.arange(self.graph.num_layers + 1)
        low, high = np.zeros_like(ends), ends.copy()
        while (open_ := low < high).any():
            middle = (low + high) // 2
            good = self.held(middle, np.where(open_, ends, 0), GROWING) <= room
            low, high = np.where(open_ & ~good, middle + 1, low), np.where(open_ & good, middle, high)
        return low

    def pairs(self, room: int) -> Flags:
        """[n + 1, n + 1] whether the layers from one position to another fit."""
        flags: Flags = np.less_equal(self._every_pair, room)
        return flags

    @cached_property
    def _every_pair(self) -> Floats:
        at = np.arange(self.graph.num_layers + 1)
        return self.held(*np.meshgrid(at, at, indexing="ij"))
