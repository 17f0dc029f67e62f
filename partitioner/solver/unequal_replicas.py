"""Inference on one pipeline whose stages have each their own number of ranks, which take turns: the most batches.

With t the seconds of layers [i, j) and x those of what crosses a cut, the period of m micro-batches is the least

    best[j][d] = min over i, r of  max(best[i][d - r],  ceil(m / r) max(t(i, j), x(i), x(j)))

for d devices (Narayanan et al. 2019, "PipeDream", section 3.1, with whole micro-batches). It is searched by halving: a
period T can be had where the fewest devices that reach the end of the chain within T are there,

    fewest[j] = min over i of  fewest[i] + r(i, j),   r(i, j) the least r of which ceil(m / r) max(t, x, x) <= T

O(n^2) a look, and exact. Where every cut is taken for one that any number of ranks can pay, or only those that one rank
can, it is how far d devices reach, O(d^1.5 log n): that says no, or yes, to most periods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from partitioner.clock import Replica
from partitioner.costs import turn_costs
from partitioner.graph import CostGraph
from partitioner.memory import inference_memory, memory_limit, on_device, overhead_bytes, room_bytes
from partitioner.plan import MemoryItems
from partitioner.solver.equal_replicas import CLOSE, MOST_PAIRED, PRECISION
from partitioner.solver.evaluate import link_times
from partitioner.solver.forward_memory import Flags, Floats, ForwardMemory, Ints
from partitioner.solver.layout import Devices, Site
from partitioner.solver.settings import divisors
from partitioner.specs import Cluster, Device, Link, Training
from partitioner.turns import most_turns, period_s


class Turns(NamedTuple):
    """A split whose stages' ranks take turns."""

    search: TurnSearch
    cuts: tuple[int, ...]
    devices: Devices
    """By stage, those of its ranks in their turn."""
    seconds: float

    @property
    def costs(self) -> Replica:
        one = self.search
        return turn_costs(
            one.graph, one.cluster, one.training, one.num_microbatches, cuts=self.cuts, devices=self.devices
        )

    @property
    def num_ranks(self) -> tuple[int, ...]:
        """By stage."""
        return tuple(map(len, self.devices))

    def memory(self) -> list[MemoryItems]:
        """Of a rank of each stage: weights are whole on every one."""
        one, device = self.search, self.search.device
        overhead = overhead_bytes(device, sum(self.num_ranks))
        return [
            on_device(inference_memory(one.graph, first, last, samples=one.samples), device, overhead)
            for first, last in one.graph.bounds(self.cuts)
        ]


def turn_searches(graph: CostGraph, cluster: Cluster, training: Training) -> Iterator[TurnSearch]:
    """One for each number of micro-batches, those first that promise most; none where a mesh or a pin fixes stages."""
    if training.objective != "throughput" or training.mesh != "auto" or training.stage_pins:
        return
    batch = training.batch_size
    counts = divisors(batch) if training.microbatches == "auto" else [training.microbatches]
    site = Site(cluster, training)
    searches = [TurnSearch(graph, cluster, training, site, count) for count in counts if batch % count == 0]
    yield from sorted(searches, key=lambda one: one.bound_s)


@dataclass(frozen=True, eq=False)
class TurnSearch:
    """The best split of `num_microbatches`. On devices that are not alike there is a bound, and nothing is searched."""

    graph: CostGraph
    cluster: Cluster
    training: Training
    site: Site
    num_microbatches: int

    @property
    def samples(self) -> int:
        return self.training.batch_size // self.num_microbatches

    @property
    def device(self) -> Device:
        """The one with the most room; where devices are alike, any."""
        return max(self.cluster.devices, key=lambda one: room_bytes(one, memory_limit(one, self.training), 2))

    @cached_property
    def bound_s(self) -> float:
        """What no split can beat: the work spread evenly over all devices, and no layer on more than all of them."""
        work_s, m = self.graph.at(self.samples).forward_s, self.num_microbatches
        turns = most_turns(m, self.cluster.num_devices)
        return max(m * float(work_s.sum()) / float(self.site.speed.sum()), turns * float(work_s.max()) / self._speed)

    def solve(self, below_s: float) -> tuple[Turns | None, float]:
        """(the best split, None where none is found that is below; what no split can beat)."""
        least = _Reach(self, self._hops(self.site.intra, self.site.inter))
        bound_s = least.bound(below_s, self.bound_s)
        whole = self._one_stage()
        if not self.site.alike:
            return None, min(below_s, bound_s if whole is None else self.bound_s)
        best, limit_s = None, below_s

        def consider(one: Turns | None) -> None:
            nonlocal best, limit_s
            if one is not None and one.seconds < limit_s * (1 - CLOSE):
                best, limit_s = one, one.seconds

        consider(whole)
        links = {self.site.intra} if self.site.one_link else {self.site.intra, self.site.inter}
        ways = [_Reach(self, hop_s) for link in links for hop_s in (self._hops(link), self._hops(link, all_cross=True))]
        ways = [least, *(one for k, one in enumerate(ways) if not any(one.same(other) for other in [least, *ways[:k]]))]
        for reach in ways:
            if bound_s < limit_s * (1 - CLOSE) and (split := reach.likely(limit_s, bound_s)):
                consider(self._placed(*split))
        for reach in ways if self.graph.num_layers <= MOST_PAIRED else ():
            if bound_s < limit_s * (1 - CLOSE):
                none_s, split = reach.best(limit_s, bound_s)
                bound_s = max(bound_s, none_s) if reach is least else bound_s
                if split is not None:
                    consider(self._placed(*split))
        return best, min(bound_s if whole is None else min(bound_s, whole.seconds), limit_s)

    def _hops(self, *links: Link, all_cross: bool = False) -> Floats:
        """[n + 1] seconds over the fastest of these links of what the layer before a cut hands to the next alone; or of
        everything alive there."""
        costs = self.graph.at(self.samples)
        num_bytes = costs.crossing_bytes if all_cross else costs.next_bytes
        hop_s: Floats = np.min([link_times(link, num_bytes) for link in links], axis=0)
        return np.where(self.graph.linked | (num_bytes > 0), hop_s, 0.0)

    def _one_stage(self) -> Turns | None:
        """The whole model on every device."""
        count = min(self.cluster.num_devices, self.num_microbatches)
        least = list(fewest_ranks(self.num_microbatches, count).values())[-1]
        n = np.array([self.graph.num_layers])
        if least < 2 or float(ForwardMemory(self.graph, self.samples).held(0 * n, n)[0]) > self._room:
            return None
        return self._placed((), (least,))

    def _placed(self, cuts: tuple[int, ...], num_ranks: tuple[int, ...]) -> Turns:
        """On the cluster's devices in the order of its nodes, with the seconds of its own links."""
        order = np.argsort(self.site.node, kind="stable").tolist()
        ends = np.cumsum((0, *num_ranks)).tolist()
        devices = tuple(tuple(order[i:j]) for i, j in pairwise(ends))
        found = Turns(self, cuts, devices, 0.0)
        return found._replace(seconds=period_s(found.costs, num_ranks, self.num_microbatches))

    @cached_property
    def _speed(self) -> float:
        return float(self.site.fastest[0])

    @cached_property
    def _room(self) -> int:
        return int(self.site.room(2, 1).max())

    @cached_property
    def _memory(self) -> ForwardMemory:
        return ForwardMemory(self.graph, self.samples)

    @cached_property
    def _near(self) -> Ints:
        return self._memory.near(self._room)


class _Reach:
    """How far devices reach along the chain within a period."""

    def __init__(self, search: TurnSearch, hop_s: Floats) -> None:
        """hop_s: [n + 1] seconds of a message over each cut."""
        graph, costs = search.graph, search.graph.at(search.samples)
        self.search, self.n, self.num_devices = search, graph.num_layers, search.cluster.num_devices
        self.before_s: Floats = costs.forward_before_s / search._speed
        self.slicing_s = graph.slicing_s(2) / search._speed
        self.hop_s = hop_s.copy()
        self.hop_s[[0, -1]] = 0.0
        self.allowed: Flags = np.zeros(self.n + 1, np.bool_)
        self.allowed[[0, *graph.allowed_cuts, self.n]] = True
        turns = fewest_ranks(search.num_microbatches, self.num_devices)
        self.turns: Ints = np.array(list(turns))
        """Of the busiest rank, descending."""
        self.ranks: Ints = np.array(list(turns.values()))
        """The fewest of which none has more."""
        self.far: Ints = np.searchsorted(search._near, np.arange(self.n + 1), side="right") - 1
        """By start, the last end that memory leaves room for, by what only grows with a stage."""

    def same(self, other: _Reach) -> bool:
        return bool(np.array_equal(self.hop_s[self.allowed], other.hop_s[other.allowed]))

    def bound(self, high_s: float, low_s: float) -> float:
        """What no split can beat, `high_s` at most; not less than `low_s`, which none can either."""
        return self._halved(low_s, high_s, self._cut_by_many)[0]

    def likely(self, below_s: float, bound_s: float) -> _Split | None:
        """The best split that cuts only where one rank alone could send and receive; None: none is below."""
        return self._halved(bound_s, below_s, self._cut_by_one)[1]

    def best(self, below_s: float, bound_s: float) -> tuple[float, _Split | None]:
        """(what no split can beat, the best of all; None: none is below)."""
        return self._halved(bound_s, below_s, None)

    def _halved(
        self, low_s: float, high_s: float, cuttable: Callable[[float], Flags] | None
    ) -> tuple[float, _Split | None]:
        """(a period that cannot be had, the best split found below `high_s`) with such cuts; None: with any."""
        found: _Split | None = None
        middle_s = high_s * (1 - CLOSE)
        while low_s < middle_s:
            split = self._within(middle_s, cuttable) if cuttable else self._fewest(middle_s)
            if split is not None:
                found, high_s = split, min(middle_s, self._period(split))
            elif found is None and middle_s >= high_s * (1 - CLOSE):
                return high_s, None
            else:
                low_s = middle_s
            if high_s - low_s <= PRECISION * high_s:
                break
            middle_s = (low_s + high_s) / 2
        return low_s, found

    def _period(self, split: _Split) -> float:
        cuts, ranks = split
        edges = np.array([0, *cuts, self.n])
        work_s = self.before_s[edges[1:]] - self.before_s[edges[:-1]] + self.slicing_s
        each = np.maximum(work_s, np.maximum(self.hop_s[edges[1:]], self.hop_s[edges[:-1]]))
        return float(max(most_turns(self.search.num_microbatches, r) * s for r, s in zip(ranks, each, strict=True)))

    def _cut_by_many(self, period: float) -> Flags:
        flags: Flags = self.allowed & (self.hop_s * self.turns[-1] <= period)
        return flags

    def _cut_by_one(self, period: float) -> Flags:
        flags: Flags = self.allowed & (self.hop_s * self.turns[0] <= period)
        return flags

    def _within(self, period: float, cuttable: Callable[[float], Flags]) -> _Split | None:
        """A split within the period that cuts only there, each stage as long as it can be; None: there is none.

        Then fewer layers never need more devices, so far[d] = max over r of the end of what r ranks do after
        far[d - r].
        """
        places = np.flatnonzero(cuttable(period))
        last = places[np.searchsorted(places, np.arange(self.n + 1), side="right") - 1]
        """The last of these places up to each position."""
        each_s = period / self.turns - self.slicing_s
        reached = np.zeros(self.num_devices + 1, np.int64)
        came = np.zeros(self.num_devices + 1, np.int64)
        for d in range(1, self.num_devices + 1):
            count = int(np.searchsorted(self.ranks, d, side="right"))
            starts = reached[d - self.ranks[:count]]
            ends = np.searchsorted(self.before_s, (self.before_s[starts] + each_s[:count]) * (1 + 1e-13), side="right")
            ends = last[np.maximum(np.minimum(ends - 1, self.far[starts]), starts)]
            k = int(np.argmax(ends))
            reached[d], came[d] = reached[d - 1], 0
            if ends[k] > reached[d]:
                reached[d], came[d] = ends[k], self.ranks[k]
            if reached[d] == self.n:
                return self._checked(self._walked_back(d, reached, came), cuttable)
        return None

    def _walked_back(self, d: int, reached: Ints, came: Ints) -> _Split:
        cuts: list[int] = []
        ranks: list[int] = []
        while d:
            if came[d]:
                cuts.append(int(reached[d]))
                ranks.append(int(came[d]))
            d -= int(came[d]) or 1
        return tuple(reversed(cuts[1:])), tuple(reversed(ranks))

    def _checked(self, split: _Split, cuttable: Callable[[float], Flags]) -> _Split | None:
        """A split to use must fit as a whole; one that only says what could be need not."""
        if cuttable == self._cut_by_many:  # a bound
            return split
        edges = np.array([0, *split[0], self.n])
        return split if (self.search._memory.held(edges[:-1], edges[1:]) <= self.search._room).all() else None

    def _fewest(self, period: float) -> _Split | None:
        """A split of the fewest devices within the period, by every pair of positions; None: there are not enough."""
        places = np.flatnonzero(self.allowed)
        fewest = np.full(self.n + 1, self.num_devices + 1)
        fewest[0] = 0
        came = np.zeros((self.n + 1, 2), np.int64)
        m = self.search.num_microbatches
        for j in places[1:].tolist():
            low = int(self.search._near[j])
            if self.hop_s[j] * self.turns[-1] > period or low >= j:
                continue
            each = np.maximum(self.before_s[j] - self.before_s[low:j] + self.slicing_s, self.hop_s[low:j])
            with np.errstate(divide="ignore"):
                turns = np.floor(period / np.maximum(each, self.hop_s[j]) * (1 + 1e-13))  # that a rank has time for
                value = fewest[low:j] + np.maximum(1, np.ceil(m / turns))
            if self.pairs is not None:
                value[~self.pairs[low:j, j]] = math.inf
            at = int(np.argmin(value))
            if value[at] <= self.num_devices:
                fewest[j] = int(value[at])
                came[j] = low + at, fewest[j] - fewest[low + at]
        if fewest[self.n] > self.num_devices:
            return None
        cuts, ranks, at = [], [], self.n
        while at:
            at, r = (int(x) for x in came[at])
            cuts.append(at)
            ranks.append(r)
        return tuple(reversed(cuts[:-1])), tuple(reversed(ranks))

    @cached_property
    def pairs(self) -> Flags | None:
        """[n + 1, n + 1] which layers fit together; None: all of those that `_near` lets through."""
        search = self.search
        n = np.array([self.n])
        widest = float(search.graph.at(search.samples).crossing_bytes.max())
        if float(search._memory.held(0 * n, n)[0]) + 2 * widest <= search._room:
            return None
        return search._memory.pairs(search._room)


_Split = tuple[tuple[int, ...], tuple[int, ...]]
"""Cuts, and ranks by stage."""


def fewest_ranks(num_microbatches: int, num_ranks: int) -> dict[int, int]:
    """Numbers of turns that the busiest of up to so many ranks can have -> the fewest ranks that have no more.

    >>> fewest_ranks(8, 8)
    {8: 1, 4: 2, 3: 3, 2: 4, 1: 8}
    """
    found: dict[int, int] = {}
    for count in range(1, num_ranks + 1):
        found.setdefault(most_turns(num_microbatches, count), count)
    return found
