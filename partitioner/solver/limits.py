"""Which runs of layers fit the memory of which stage: asked one by one, many at once, or as how far a stage can go."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partitioner.graph import CostGraph
from partitioner.intervals import IntervalSum
from partitioner.layer_arrays import Holding
from partitioner.memory import BUCKET_BYTES, Spread, interval_memory
from partitioner.schedule import in_flight
from partitioner.solver.layout import Layout
from partitioner.solver.settings import Setting
from partitioner.specs import Saving, Training

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Limits(ABC):
    """What fits each stage's memory. Whatever fits is `roomy`; only `roomy` is monotone, so walks are made with it."""

    @abstractmethod
    def fits(self, stage: Any, first: Any, last: Any) -> Any:
        """Whether the layers [first, last) fit; arrays broadcast."""

    @abstractmethod
    def roomy(self, stage: Any, first: Any, last: Any) -> Any:
        """As `fits`, but only necessary: true of every part of what it is true of."""

    def fit(self, stage: int, first: Ints, last: Ints) -> Flags:
        """`fits` of many runs of one stage."""
        flags: Flags = self.fits(stage, first, last)
        return flags

    def room_for(self, stage: int) -> Callable[[int, int], bool]:
        """`roomy` of one stage, one run at a time."""
        return lambda first, last: bool(self.roomy(stage, first, last))

    def furthest(self, stage: int, start: int, end: int) -> int:
        """The largest end up to this one that leaves room; the start where there is none."""
        room = self.room_for(stage)
        if start == end or room(start, end):
            return end
        return bisect_left(range(start + 1, end), True, key=lambda last: not room(start, last)) + start

    def nearest(self, stage: int, start: int, end: int) -> int:
        """The smallest start from this one on that leaves room; the end where there is none."""
        room = self.room_for(stage)
        if start == end or room(start, end):
            return start
        return bisect_left(range(start + 1, end), True, key=lambda first: room(first, end)) + start + 1

    def far(self, stage: int, starts: Ints, ends: Ints) -> Ints:
        """`furthest` of many."""
        low, high = starts.copy(), ends.copy()  # the answer is in [low, high]
        while (low < high).any():
            middle = (low + high + 1) // 2
            open_ = low < high
            good = self.roomy(stage, np.where(open_, starts, 0), np.where(open_, middle, 1))
            low, high = np.where(open_ & good, middle, low), np.where(open_ & ~good, middle - 1, high)
        return low


class DeviceMemory(Limits):
    """The memory of the devices of one setting: what a stage holds there, and how much its smallest device has."""

    def __init__(
        self,
        graph: CostGraph,
        training: Training,
        setting: Setting,
        layout: Layout,
        saving: Saving,
    ) -> None:
        self._graph, self._training, self._setting = graph, training, setting
        self._spread = Spread.of_stage(saving, setting.num_replicas)
        p, m = setting.num_stages, setting.num_microbatches
        if setting.schedule == "1f1b":
            self.held = np.minimum(p - np.arange(p), m)
        elif setting.schedule == "gpipe":
            self.held = np.full(p, m)
        else:
            self.held = np.array(
                [in_flight(setting.schedule, stage, p, m, num_ranks=setting.num_places) for stage in range(p)]
            )
        places = np.array(setting.places)
        self.limit = layout.limit[places]
        self.room = layout.room[places]
        """Bytes that each stage's smallest device, of that limit, has room for."""

    def bytes(self, stage: Any, first: Any, last: Any) -> Any:
        """Bytes of the layers [first, last) as that stage, overhead left out; arrays broadcast."""
        return sum(np.ceil(value) for value in self._items(stage, first, last).values())

    def fits(self, stage: Any, first: Any, last: Any) -> Any:
        return self.bytes(stage, first, last) <= self.room[stage]

    def roomy(self, stage: Any, first: Any, last: Any) -> Any:
        """Of what crosses the cuts of a stage, only as much as no larger stage has less of.

        kept(first, last) + received behind the first cut + sent before the last
            >= least kept_before[j] + sent(j) over j >= last, less the most kept_before[i] - received(i) over i <= first
        """
        begin, end = self._edges
        needed = self._standing(first, last) + self.held[stage] * (end[last] - begin[first])
        return needed + self._graph.profile.buffer_bytes <= self.room[stage] + 1  # rounding

    def fit(self, stage: int, first: Ints, last: Ints) -> Flags:
        """Many are told by sums: of what crosses, no cut has more than all that is alive there."""
        if self._standing.prefix is None:
            return super().fit(stage, first, last)
        standing, (most_begin, most_end) = self._standing.prefix, self._widest
        held, room = self._by_stage[stage]
        passing = self._passing + 2 * float(self._graph.at(self._setting.samples).crossing_gradient_bytes.max())
        flags: Flags = (
            standing[last] + held * most_end[last] + passing <= standing[first] + held * most_begin[first] + room
        )
        open_ = np.flatnonzero(~flags)
        flags[open_] = super().fit(stage, first[open_], last[open_])
        return flags

    @cached_property
    def _widest(self) -> tuple[Floats, Floats]:
        """As `_edges`, from above."""
        kept, crossing = self._holding.kept_before, self._graph.at(self._setting.samples).crossing_bytes
        return kept - crossing, kept + crossing

    @cached_property
    def _passing(self) -> float:
        """Bytes of one layer at work, of communication buckets, and of rounding up, at most."""
        at = np.arange(self._graph.num_layers)
        layers = float((self._holding.reach(at, at + 1) - self._holding.kept_before[:-1]).max())
        if self._spread.shard != "none":  # of one or two layers, whole while they are at work
            layers += 3 * float(self._graph.weight_bytes(at, at + 1).max())
        if self._spread.whole_parameters and self._spread.shard != "none":  # more than an equal part
            elements, num_bytes = self._graph.largest_trainable
            layers += self._training.optimizer_bytes * elements + num_bytes
        buckets = (
            float(self._graph.trainable_bytes(0, self._graph.num_layers)) if self._setting.num_replicas > 1 else 0.0
        )
        return layers + (min(buckets, BUCKET_BYTES) if self._setting.num_stages > 1 else buckets) + 16

    def never_bind(self) -> bool:
        """Whether all layers together, at the most in flight, with the widest cut on both sides, fit everywhere."""
        costs = self._graph.at(self._setting.samples)
        most = int(np.argmax(self.held))
        whole = float(sum(self._items(most, 0, self._graph.num_layers).values()))
        edges = 2 * (int(self.held[most]) + 1) * float(costs.crossing_bytes.max())
        rounding = 8
        return whole + edges + rounding <= float(self.room.min())

    def hopeless(self, leaner: Sequence[DeviceMemory] = ()) -> bool:
        """Whether some layer has no room alone, or all stages together hold more than all devices have, also where each
        layer is as lean as it can be."""
        n, least, most = self._graph.num_layers, int(np.argmin(self.held)), int(np.argmax(self.room))
        at, everywhere = np.arange(n), self._graph.profile.buffer_bytes
        ways = (self, *leaner)
        kept = np.min([np.diff(one._holding.kept_before) for one in ways], axis=0)
        standing = np.min([one._standing(at, at + 1) for one in ways], axis=0)
        alone = standing + everywhere + self.held[least] * kept
        if (alone > self.room[most] + 1).any():
            return True
        whole = min(float(one._standing(0, n)) for one in ways)
        together = whole + float(self.held[least] * kept.sum()) + everywhere * len(self.room)
        return together > float(self.room.sum()) + len(self.room)

    def grown(self, extra_bytes: float) -> DeviceMemory:
        """The same with more memory on every device."""
        other = copy.copy(self)
        other.room = self.room + math.ceil(extra_bytes)
        other.__dict__.pop("_by_stage", None)
        return other

    def room_for(self, stage: int) -> Callable[[int, int], bool]:
        held, room = self._by_stage[stage]
        standing, (begin, end) = self._standing, self._edge_lists
        return lambda i, j: float(standing(i, j)) + held * (end[j] - begin[i]) <= room

    def furthest(self, stage: int, start: int, end: int) -> int:
        prefix, (begins, ends) = self._standing.prefix_list, self._edge_lists
        if prefix is None:
            return super().furthest(stage, start, end)
        held, room = self._by_stage[stage]
        most = room + prefix[start] + held * begins[start]
        if prefix[end] + held * ends[end] <= most:
            return end
        found = bisect_right(range(end), most, lo=start + 1, key=lambda k: prefix[k] + held * ends[k])
        return max(start, found - 1)

    def nearest(self, stage: int, start: int, end: int) -> int:
        prefix, (begins, ends) = self._standing.prefix_list, self._edge_lists
        if prefix is None:
            return super().nearest(stage, start, end)
        held, room = self._by_stage[stage]
        least = prefix[end] + held * ends[end] - room
        if prefix[start] + held * begins[start] >= least:
            return start
        return bisect_left(range(end), least, lo=start + 1, key=lambda k: prefix[k] + held * begins[k])

    def far(self, stage: int, starts: Ints, ends: Ints) -> Ints:
        if self._standing.prefix is None:
            return super().far(stage, starts, ends)
        held, room = self._by_stage[stage]
        begin, end = self._edges
        up_to = self._standing.prefix + held * end
        most = self._standing.prefix[starts] + held * begin[starts] + room
        reach: Ints = np.searchsorted(up_to, most, side="right") - 1
        return np.clip(reach, starts, ends)

    @cached_property
    def _standing(self) -> IntervalSum:
        spread = self._spread
        return self._graph.standing_bytes(self._training.optimizer_bytes, spread.shard, spread.dp)

    @cached_property
    def _holding(self) -> Holding:
        return self._graph.holding(self._setting.samples, recompute=self._spread.recompute)

    @property
    def _edges(self) -> tuple[Floats, Floats]:
        """(begin, end), [n + 1] each, of a micro-batch: what `roomy` says, over the cuts that are possible."""
        return self._graph.held_edges(self._setting.samples, self._spread.recompute)

    @cached_property
    def _edge_lists(self) -> tuple[list[float], list[float]]:
        return self._graph.held_edge_lists(self._setting.samples, self._spread.recompute)

    @cached_property
    def _by_stage(self) -> list[tuple[int, float]]:
        """(micro-batches held, bytes for what grows with the layers, rounding included)."""
        room = self.room + 1.0 - self._graph.profile.buffer_bytes
        return list(zip(self.held.tolist(), room.tolist(), strict=True))

    def _items(self, stage: Any, first: Any, last: Any) -> dict[str, Any]:
        return interval_memory(
            self._graph,
            self._training,
            first,
            last,
            samples=self._setting.samples,
            held=self.held[stage],
            replicated=self._setting.num_replicas > 1,
            spread=self._spread,
        )
