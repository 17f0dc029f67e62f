"""Inference on equal pipelines: a mesh on some devices and a number of micro-batches, and the best of its cuts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from partitioner.clock import Replica
from partitioner.costs import forward_costs
from partitioner.graph import CostGraph
from partitioner.memory import inference_memory, memory_limit, on_device, overhead_bytes, room_bytes
from partitioner.plan import MemoryItems
from partitioner.simulator import forward_clock
from partitioner.solver.arrangement import arranged
from partitioner.solver.evaluate import link_times
from partitioner.solver.forward_memory import ForwardMemory
from partitioner.solver.layout import AnyLayout, Devices, Layout, Site
from partitioner.solver.settings import divisors, pinned_positions
from partitioner.solver.starts import stage_starts
from partitioner.solver.windows import least_that_fits, window_minimum
from partitioner.specs import Cluster, Device, Training

CLOSE = 1e-9
PRECISION = 1e-10
"""Relative, of the slowest stage."""
MOST_PAIRED = 3_000
"""Layers, up to which all that a stage holds is looked at where memory binds, not only what grows with it."""


def cases(graph: CostGraph, cluster: Cluster, training: Training) -> Iterator[Case]:
    fixed = {} if training.mesh == "auto" else dict(training.mesh)
    most, site = len(graph.allowed_cuts) + 1, Site(cluster, training)
    for pp in range(1, min(most, cluster.num_devices) + 1):
        for dp in range(1, cluster.num_devices // pp + 1):
            if training.batch_size % dp or fixed.get("pp", pp) != pp or fixed.get("dp", dp) != dp:
                continue
            each = training.batch_size // dp
            counts = divisors(each) if training.microbatches == "auto" else [training.microbatches]
            found = arranged(site, pp, dp)
            for count in counts:
                if each % count == 0:
                    for layout in (*found.layouts, *found.others):
                        yield Case(graph, cluster, training, pp, dp, count, layout)


@dataclass(frozen=True, eq=False)
class Case:
    """A mesh on some devices and a number of micro-batches, with all that is to be cut."""

    graph: CostGraph
    cluster: Cluster
    training: Training
    num_stages: int
    num_replicas: int
    num_microbatches: int
    layout: Layout
    extra_bytes: int = 0
    """That each device is taken to have more."""

    @property
    def samples(self) -> int:
        return self.training.batch_size // (self.num_replicas * self.num_microbatches)

    @property
    def devices(self) -> Devices:
        """By stage, one a replica."""
        return self.layout.devices

    @cached_property
    def speeds(self) -> list[float]:
        """Of each stage's slowest device."""
        speeds: list[float] = self.layout.speeds.min(axis=0).tolist()
        return speeds

    @cached_property
    def rooms(self) -> list[tuple[int, Device]]:
        """By stage, bytes that its smallest device has room for, and that device."""
        found = []
        for devices in self.devices:
            some = [self.cluster.devices[device] for device in devices]
            rooms = [room_bytes(one, memory_limit(one, self.training), self.num_stages) for one in some]
            found.append((min(rooms), some[rooms.index(min(rooms))]))
        return found

    @cached_property
    def room(self) -> list[int]:
        """Bytes that each stage's smallest device has room for."""
        return [room + self.extra_bytes for room, _ in self.rooms]

    @property
    def bound_s(self) -> float:
        """What no cuts can beat: the work spread evenly, and no layer divided."""
        forward_s = self.graph.at(self.samples).forward_s
        total, largest = float(forward_s.sum()), float(forward_s.max())
        m, fastest = self.num_microbatches, max(self.speeds)
        slicing_s = self.graph.slicing_s(self.num_stages) / fastest
        together = self.layout.total_speed if isinstance(self.layout, AnyLayout) else sum(self.speeds)
        slowest = max(total / together, largest / fastest) + slicing_s
        if not self._in_line:
            return m * slowest
        return self.value(total / fastest + self.num_stages * slicing_s, slowest, m)

    @cached_property
    def _in_line(self) -> bool:
        """Whether every layer before a cut hands something on: else stages can run beside each other."""
        return self.num_stages == 1 or bool(self.graph.linked[list(self.graph.allowed_cuts)].all())

    def value(self, through: float, slowest: float, m: int) -> float:
        return m * slowest if self.training.objective == "throughput" else through + (m - 1) * slowest

    def is_beaten(self, seconds: float) -> bool:
        """Whether no cuts are faster; of throughput, where one look tells."""
        if seconds == math.inf or self.training.objective != "throughput":
            return False
        cap = seconds / self.num_microbatches * (1 - CLOSE)
        return self._cheapest(cap, self._hops(self.graph.at(self.samples).next_bytes)) is None

    def solve(self) -> Found | None:
        """The best cuts: the least sum of stages and transfers under a cap on the slowest, over the cap."""
        graph = self.graph
        costs = graph.at(self.samples)
        handed, crossing = self._hops(costs.next_bytes), self._hops(costs.crossing_bytes)
        widest = self.fits()
        if widest is None:
            return None
        best, seconds = widest, self.seconds(widest)
        bounds = []
        for hops in (handed, crossing) if not np.array_equal(handed, crossing) else (crossing,):
            found, bound = self._halve(hops, best, seconds)
            bounds.append(bound)
            if (value := self.seconds(found)) < seconds:
                best, seconds = found, value
        return Found(self, best, seconds, min(bounds[0] if self._in_line else self.bound_s, seconds))

    def _halve(self, hops: np.ndarray, best: tuple[int, ...], seconds: float) -> tuple[tuple[int, ...], float]:
        """(cuts, bound) with these transfers alone: ranges of the slowest stage are halved until none can win."""
        m = self.num_microbatches
        first = self._cheapest(math.inf, hops)
        assert first is not None
        through, slowest = self._measured(first, hops)
        value = self.value(through, slowest, m)
        low = (self.bound_s / m) if self.training.objective == "throughput" else 0.0
        best, bound = first, math.inf
        ranges = [(self.value(through, low, m), low, slowest, through)]
        while ranges:
            least, low, high, through = heapq.heappop(ranges)
            if least >= value * (1 - PRECISION) or high - low <= PRECISION * high:
                bound = min(bound, least)
                continue
            middle = (low + high) / 2
            cuts = self._cheapest(middle, hops)
            if cuts is None:
                heapq.heappush(ranges, (self.value(through, middle, m), middle, high, through))
                continue
            here, slowest = self._measured(cuts, hops)
            if self.value(here, slowest, m) < value:
                best, value = cuts, self.value(here, slowest, m)
            heapq.heappush(ranges, (self.value(here, low, m), low, slowest, here))
            heapq.heappush(ranges, (self.value(through, middle, m), middle, high, through))
        return best, min(bound, value)

    def fits(self) -> tuple[int, ...] | None:
        """Cuts of which every stage fits; None: there are none."""
        return self._cheapest(math.inf, self._hops(self.graph.at(self.samples).crossing_bytes))

    def seconds(self, cuts: tuple[int, ...]) -> float:
        """The objective of these cuts: by the clock, or the slowest stage or transfer."""
        replicas = self.replicas(cuts)
        if self.training.objective == "latency":
            return max(float(forward_clock(one, self.num_microbatches).rank_end_s.max()) for one in set(replicas))
        return self.num_microbatches * max(_slowest(one) for one in replicas)

    def replicas(self, cuts: tuple[int, ...]) -> list[Replica]:
        return forward_costs(
            self.graph, self.cluster, self.training, self.num_microbatches, cuts=cuts, devices=self.devices
        )

    def memory(self, cuts: tuple[int, ...]) -> list[MemoryItems]:
        items = []
        for (first, last), (_, device) in zip(self.graph.bounds(cuts), self.rooms, strict=True):
            told = inference_memory(self.graph, first, last, samples=self.samples)
            items.append(on_device(told, device, overhead_bytes(device, self.num_stages)))
        return items

    def _hops(self, num_bytes: np.ndarray) -> np.ndarray:
        """[p, n + 1] seconds of what enters each stage, by where it begins."""
        hops = np.zeros((self.num_stages, len(num_bytes)))
        for s in range(1, self.num_stages):
            links = {self.cluster.link(a, b) for a, b in zip(self.devices[s - 1], self.devices[s], strict=True)}
            hops[s] = np.max([link_times(link, num_bytes) for link in links], axis=0)
        return hops

    def _measured(self, cuts: tuple[int, ...], hops: np.ndarray) -> tuple[float, float]:
        """(all stages and transfers one after the other, the slowest of them)."""
        before = self.graph.at(self.samples).forward_before_s
        edges = [0, *cuts, self.graph.num_layers]
        slicing_s = self.graph.slicing_s(self.num_stages)
        stages = [
            (float(before[edges[s + 1]] - before[edges[s]]) + slicing_s) / speed for s, speed in enumerate(self.speeds)
        ]
        moved = [float(hops[s, cut]) for s, cut in enumerate(cuts, start=1)]
        return sum(stages) + sum(moved), max(stages + moved)

    @cached_property
    def _starts(self) -> np.ndarray | None:
        """[p, n + 1] where each stage may begin."""
        graph = self.graph
        starts = stage_starts(
            graph.num_layers, self.num_stages, graph.allowed_cuts, pinned_positions(graph, self.training)
        )
        if starts is None:
            return None
        flags = np.zeros((self.num_stages, graph.num_layers + 1), dtype=np.bool_)
        for s in range(self.num_stages):
            flags[s, starts.positions(s)] = True
        return flags

    @cached_property
    def _fit(self) -> ForwardMemory:
        return ForwardMemory(self.graph, self.samples)

    @cached_property
    def _near(self) -> list[np.ndarray]:
        """By stage, [n + 1] the smallest start that leaves room for each end, by what only grows with a stage."""
        known = {room: self._fit.near(room) for room in set(self.room)}
        return [known[room] for room in self.room]

    def _cheapest(self, cap: float, hops: np.ndarray) -> tuple[int, ...] | None:
        """Cuts with the least sum of stages and transfers, none over the cap; None: there are none that fit."""
        cuts = self._shortest(cap, hops, exactly=False)
        if cuts is None:
            return None
        edges = np.array([0, *cuts, self.graph.num_layers])
        if (self._fit.held(edges[:-1], edges[1:]) <= self.room).all():
            return cuts
        return self._shortest(cap, hops, exactly=True) if self.graph.num_layers <= MOST_PAIRED else None

    def _shortest(self, cap: float, hops: np.ndarray, exactly: bool) -> tuple[int, ...] | None:
        """`_cheapest` by windows of what only grows with a stage; exactly: by all that a stage holds."""
        n, p, starts = self.graph.num_layers, self.num_stages, self._starts
        if starts is None:
            return None
        before, slicing_s = self.graph.at(self.samples).forward_before_s, self.graph.slicing_s(p)
        ends = np.arange(n + 1)
        best = np.where(ends == 0, 0.0, math.inf)
        history: list[tuple[np.ndarray, np.ndarray]] = []
        for s, speed in enumerate(self.speeds):
            allowed = starts[s] & (hops[s] <= cap * (1 + 1e-12))
            base = np.where(allowed, best + hops[s], math.inf) - before / speed
            least = before - (cap * speed - slicing_s) * (1 + 1e-12) if cap < math.inf else np.full(n + 1, -math.inf)
            lows = np.maximum(np.searchsorted(before, least, side="left"), self._near[s])
            if exactly:
                least, source = least_that_fits(base, lows, ends, partial(self._fits_on, s))
                history.append((source, lows))
            else:
                least = window_minimum(base, lows, ends)
                history.append((base, lows))
            best = least + (before + slicing_s) / speed
        if not best[n] < math.inf:
            return None
        cuts, at = [], n
        for s in range(p - 1, -1, -1):
            values, lows = history[s]
            at = int(values[at] if exactly else lows[at] + np.argmin(values[lows[at] : at]))
            cuts.append(at)
        return tuple(reversed(cuts[:-1]))

    def _fits_on(self, stage: int, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        return self._fit.held(first, last) <= self.room[stage]


def _slowest(replica: Replica) -> float:
    """Seconds of the slowest stage, or of all that goes over one wire: a wire is between two stages."""
    return max([one.forward_s for one in replica.stages] + [one.forward_s for one in replica.transfers])


class Found(NamedTuple):
    case: Case
    cuts: tuple[int, ...]
    seconds: float
    lower_bound_s: float

    def rank(self) -> tuple[float, int, int, int, tuple[int, ...]]:
        """Order of preference."""
        case = self.case
        seconds = float(f"{self.seconds:.9e}")
        return seconds, case.num_stages, case.num_microbatches, case.layout.number, self.cuts
