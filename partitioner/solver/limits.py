"""Which runs of layers fit the memory of which stage, asked one by one, many at once, or as windows to search in."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partitioner.graph import CostGraph
from partitioner.memory import interval_memory, memory_limit
from partitioner.schedule import in_flight
from partitioner.solver.settings import Setting
from partitioner.specs import Cluster, Training

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Limits(ABC):
    """What fits each stage's memory. Whatever fits is `roomy`; only `roomy` is monotone, so windows are made of it."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._near: dict[Hashable, Ints] = {}
        self._far: dict[Hashable, Ints] = {}
        self._band: dict[Hashable, Flags] = {}

    @abstractmethod
    def fits(self, stage: Any, first: Any, last: Any) -> Any:
        """Whether the layers [first, last) fit; arrays broadcast."""

    @abstractmethod
    def roomy(self, stage: Any, first: Any, last: Any) -> Any:
        """As `fits`, but only necessary: true of every part of what it is true of."""

    @abstractmethod
    def alike(self, stage: int) -> Hashable:
        """The same for stages with the same limits."""

    def near(self, stage: int) -> Ints:
        """[n + 1] for each end the smallest start that leaves room, the end itself where there is none."""
        key = self.alike(stage)
        if key not in self._near:
            ends = np.arange(self._num_layers + 1)
            low, high = np.zeros_like(ends), ends.copy()  # the answer is in [low, high]
            while (open_ := low < high).any():
                middle = (low + high) // 2
                good = self.roomy(stage, np.where(open_, middle, 0), np.where(open_, ends, 1))
                low, high = np.where(open_ & ~good, middle + 1, low), np.where(open_ & good, middle, high)
            self._near[key] = low
        return self._near[key]

    def far(self, stage: int) -> Ints:
        """[n + 1] for each start the largest end that leaves room, the start itself where there is none."""
        key = self.alike(stage)
        if key not in self._far:
            starts = np.arange(self._num_layers + 1)
            self._far[key] = np.maximum(np.searchsorted(self.near(stage), starts, side="right") - 1, starts)
        return self._far[key]

    def band(self, stage: int) -> Flags:
        """[n + 1, w] whether [end - w + k, end) fits, by end and k, for the w that `near` allows at most."""
        key = self.alike(stage)
        if key not in self._band:
            near, ends = self.near(stage), np.arange(self._num_layers + 1)
            width = max(1, int((ends - near).max()))
            good = np.zeros((len(ends), width), dtype=np.bool_)
            rows = max(1, 500_000 // width)
            for k in range(0, len(ends), rows):
                last = ends[k : k + rows, None]
                first = last - width + np.arange(width)
                inside = first >= near[last]
                good[k : k + rows] = inside & self.fits(
                    stage, np.where(inside, first, 0), np.where(inside, last, self._num_layers)
                )
            self._band[key] = good
        return self._band[key]


class DeviceMemory(Limits):
    """The memory of the devices of one setting: what a stage holds there, and how much its smallest device has."""

    def __init__(self, graph: CostGraph, cluster: Cluster, training: Training, setting: Setting) -> None:
        super().__init__(graph.num_layers)
        self._graph, self._training, self._setting = graph, training, setting
        p, m = setting.num_stages, setting.num_microbatches
        self.held = np.array([in_flight(setting.schedule, stage, p, m) for stage in range(p)])
        devices = [[cluster.devices[rank] for rank in ranks] for ranks in setting.ranks]
        smallest = [min(some, key=lambda one: memory_limit(one, training) - one.overhead_bytes) for some in devices]
        self.overhead = np.array([device.overhead_bytes for device in smallest])
        self.room = np.array([memory_limit(device, training) for device in smallest]) - self.overhead
        """Bytes of each stage's smallest device, less its overhead."""

    def bytes(self, stage: Any, first: Any, last: Any) -> Any:
        """Bytes of the layers [first, last) as that stage, overhead left out; arrays broadcast."""
        return sum(np.ceil(value) for value in self._items(stage, first, last).values())

    def fits(self, stage: Any, first: Any, last: Any) -> Any:
        return self.bytes(stage, first, last) <= self.room[stage]

    def roomy(self, stage: Any, first: Any, last: Any) -> Any:
        """Without what crosses its cuts."""
        return self._kept(stage, np.asarray(first), np.asarray(last)) <= self.room[stage] + 1  # rounding

    def alike(self, stage: int) -> Hashable:
        return int(self.held[stage]), int(self.room[stage])

    def never_bind(self) -> bool:
        """Whether all layers together, at the most in flight, with the widest cut on both sides, fit everywhere."""
        costs = self._graph.at(self._setting.samples)
        most = int(np.argmax(self.held))
        whole = float(sum(self._items(most, 0, self._graph.num_layers).values()))
        edges = 2 * (int(self.held[most]) + 1) * float(costs.crossing_bytes.max())
        rounding = 8
        return whole + edges + rounding <= float(self.room.min())

    def hopeless(self) -> bool:
        """Whether some layer has no room alone, or all stages together hold more than all devices have."""
        at, least, most = np.arange(self._num_layers), int(np.argmin(self.held)), int(np.argmax(self.room))
        if (self._kept(least, at, at + 1) > self.room[most] + 1).any():
            return True
        everywhere = self._graph.profile.buffer_bytes * (len(self.room) - 1)  # the sum has them once
        return float(self._kept(least, at[0], at[-1] + 1)) + everywhere > float(self.room.sum())

    def grown(self, extra_bytes: float) -> DeviceMemory:
        """The same with more memory on every device."""
        other = copy.copy(self)
        Limits.__init__(other, self._num_layers)
        other.room = self.room + extra_bytes
        return other

    def _kept(self, stage: Any, first: Ints, last: Ints) -> Any:
        """Bytes that do not depend on what crosses the cuts."""
        saved = self._graph.at(self._setting.samples).saved_before
        standing = self._graph.standing_bytes(self._training.optimizer_bytes)(first, last)
        return standing + self._graph.profile.buffer_bytes + self.held[stage] * (saved[last] - saved[first])

    def _items(self, stage: Any, first: Any, last: Any) -> dict[str, Any]:
        return interval_memory(
            self._graph,
            self._training,
            first,
            last,
            samples=self._setting.samples,
            held=self.held[stage],
            replicated=self._setting.num_replicas > 1,
        )
