"""Which runs of layers fit the memory of which stage, asked one by one, many at once, or as windows to search in."""

from __future__ import annotations

import copy
import math
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


class Windows:
    """What was worked out before, by `Limits.alike`: the same windows serve many settings."""

    def __init__(self) -> None:
        self.near: dict[Hashable, Ints] = {}
        self.far: dict[Hashable, Ints] = {}
        self.band: dict[Hashable, Flags] = {}


class Limits(ABC):
    """What fits each stage's memory. Whatever fits is `roomy`; only `roomy` is monotone, so windows are made of it."""

    def __init__(self, num_layers: int, windows: Windows | None = None) -> None:
        self.num_layers = num_layers
        self._windows = windows or Windows()

    @abstractmethod
    def fits(self, stage: Any, first: Any, last: Any) -> Any:
        """Whether the layers [first, last) fit; arrays broadcast."""

    @abstractmethod
    def roomy(self, stage: Any, first: Any, last: Any) -> Any:
        """As `fits`, but only necessary: true of every part of what it is true of."""

    @abstractmethod
    def alike(self, stage: int) -> Hashable:
        """The same for stages with the same limits, of all that share their `Windows`."""

    def near(self, stage: int) -> Ints:
        """[n + 1] for each end the smallest start that leaves room, the end itself where there is none."""
        key, known = self.alike(stage), self._windows.near
        if key not in known:
            known[key] = self._nearest(stage)
        return known[key]

    def far(self, stage: int) -> Ints:
        """[n + 1] for each start the largest end that leaves room, the start itself where there is none."""
        key, known = self.alike(stage), self._windows.far
        if key not in known:
            starts = np.arange(self.num_layers + 1)
            known[key] = np.maximum(np.searchsorted(self.near(stage), starts, side="right") - 1, starts)
        return known[key]

    def band(self, stage: int) -> Flags:
        """[n + 1, w] whether [end - w + k, end) fits, by end and k, for the w that `near` allows at most."""
        key, known = self.alike(stage), self._windows.band
        if key not in known:
            near, ends = self.near(stage), np.arange(self.num_layers + 1)
            width = max(1, int((ends - near).max()))
            good = np.zeros((len(ends), width), dtype=np.bool_)
            rows = max(1, 500_000 // width)
            for k in range(0, len(ends), rows):
                last = ends[k : k + rows, None]
                first = last - width + np.arange(width)
                inside = first >= near[last]
                fits = self.fits(stage, np.where(inside, first, 0), np.where(inside, last, self.num_layers))
                good[k : k + rows] = inside & fits
            known[key] = good
        return known[key]

    def _nearest(self, stage: int) -> Ints:
        """Bisected, for all ends together."""
        ends = np.arange(self.num_layers + 1)
        low, high = np.zeros_like(ends), ends.copy()  # the answer is in [low, high]
        while (open_ := low < high).any():
            middle = (low + high) // 2
            good = self.roomy(stage, np.where(open_, middle, 0), np.where(open_, ends, 1))
            low, high = np.where(open_ & ~good, middle + 1, low), np.where(open_ & good, middle, high)
        return low


class DeviceMemory(Limits):
    """The memory of the devices of one setting: what a stage holds there, and how much its smallest device has."""

    def __init__(
        self, graph: CostGraph, cluster: Cluster, training: Training, setting: Setting, windows: Windows | None = None
    ) -> None:
        super().__init__(graph.num_layers, windows)
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
        setting = self._setting
        return int(self.held[stage]), int(self.room[stage]), setting.samples, setting.num_replicas > 1

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
        at, least, most = np.arange(self.num_layers), int(np.argmin(self.held)), int(np.argmax(self.room))
        if (self._kept(least, at, at + 1) > self.room[most] + 1).any():
            return True
        everywhere = self._graph.profile.buffer_bytes * (len(self.room) - 1)  # the sum has them once
        return float(self._kept(least, at[0], at[-1] + 1)) + everywhere > float(self.room.sum())

    def grown(self, extra_bytes: float) -> DeviceMemory:
        """The same with more memory on every device."""
        other = copy.copy(self)
        other.room = self.room + math.ceil(extra_bytes)
        return other

    def _nearest(self, stage: int) -> Ints:
        standing = self._graph.standing_bytes(self._training.optimizer_bytes).prefix
        if standing is None:
            return super()._nearest(stage)
        up_to = standing + self.held[stage] * self._graph.at(self._setting.samples).saved_before
        room = self.room[stage] + 1 - self._graph.profile.buffer_bytes
        ends = np.arange(self.num_layers + 1)
        return np.minimum(np.searchsorted(up_to, up_to - room, side="left"), ends) if room >= 0 else ends

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
