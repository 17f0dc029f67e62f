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
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from partitioner.clock import Replica
from partitioner.costs import turn_costs
from partitioner.graph import CostGraph
from partitioner.memory import inference_memory, memory_limit, on_device, overhead_bytes, room_bytes
from partitioner.plan import MemoryItems
from partitioner.solver.equal_replicas import Forwards
from partitioner.solver.forward_memory import Flags, Floats, ForwardMemory, Ints
from partitioner.solver.halving import CLOSE, halved
from partitioner.solver.layout import Devices, Site
from partitioner.solver.settings import divisors
from partitioner.solver.wires import link_times
from partitioner.specs import Cluster, Device, Link, Training
from partitioner.split import Split
from partitioner.turns import most_turns, period_s

FEW_LAYERS = 500
MOST_LAYERS = 3_000
"""Of which every pair of positions is looked at."""
NEARLY = 1e-4
"""Relative; of more layers, a split so close to the bound is left as it is."""


class Turns(NamedTuple):
    """A split whose stages' ranks take turns."""

    search: TurnSearch
    cuts: tuple[int, ...]
    devices: Devices
    """By stage, those of its ranks in their turn."""
    seconds: float

    @property
    def split(self) -> Split:
        return Split(self.cuts, self.devices, self.search.num_microbatches, "gpipe")

    @property
    def costs(self) -> Replica:
        return turn_costs(self.search.graph, self.search.cluster, self.search.training, self.split)

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


def unequal_replicas(among: Forwards, below_s: float) -> tuple[Turns | None, float]:
    """(the best split of any number of micro-batches, None where none is found that is below; what none can beat).

    There is none where a mesh or a pin fixes stages.
    """
    best, bound_s = None, below_s
    undecided: list[tuple[float, int, TurnSearch]] = []
    for search in _searches(among):
        limit_s = below_s if best is None else best.seconds
        if search.bound_s < limit_s * (1 - CLOSE):
            one, none_s = search.likely(limit_s)
            best = one or best
            undecided.append((none_s, len(undecided), search))
    for none_s, _, search in sorted(undecided):
        limit_s = below_s if best is None else best.seconds
        if none_s < limit_s * (1 - CLOSE):
            one, none_s = search.best(limit_s, none_s)
            best = one or best
        bound_s = min(bound_s, none_s)
    return best, bound_s if best is None else min(bound_s, best.seconds)


def _searches(among: Forwards) -> list[TurnSearch]:
    """One for each number of micro-batches, those first that promise most."""
    training, batch = among.training, among.training.batch_size
    if training.objective != "throughput" or training.mesh != "auto" or training.stage_pins:
        return []
    counts = divisors(batch) if training.microbatches == "auto" else [training.microbatches]
    searches = [TurnSearch(among, count) for count in counts if batch % count == 0]
    return sorted(searches, key=lambda one: one.bound_s)


@dataclass(frozen=True, eq=False)
class TurnSearch:
    """The best split of `num_microbatches`. On devices that are not alike there is a bound, and nothing is searched."""

    among: Forwards
    num_microbatches: int

    @property
    def graph(self) -> CostGraph:
        return self.among.graph

    @property
    def cluster(self) -> Cluster:
        return self.among.cluster

    @property
    def training(self) -> Training:
        return self.among.training

    @property
    def site(self) -> Site:
        return self.among.site

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

    def likely(self, below_s: float) -> tuple[Turns | None, float]:
        """(a good split, None where none is found that is below; what no split can beat)."""
        least = self._ways[0]
        bound_s = least.bound(below_s, self.bound_s)
        whole = self._one_stage()
        if not self.site.alike:
            return None, min(below_s, bound_s if whole is None else self.bound_s)
        best = None if whole is None or whole.seconds >= below_s * (1 - CLOSE) else whole
        for reach in self._ways:
            limit_s = below_s if best is None else best.seconds
            if bound_s < limit_s * (1 - CLOSE) and (split := reach.likely(limit_s, bound_s)):
                best = self._better(split, limit_s) or best
        return best, min(below_s if whole is None else whole.seconds, below_s, bound_s)

    def best(self, below_s: float, bound_s: float) -> tuple[Turns | None, float]:
        """The same by every pair of positions, where a bound leaves something to be found: exact for a chain."""
        best = None
        slack = CLOSE if self.graph.num_layers <= FEW_LAYERS else NEARLY
        looks = self.site.alike and self.graph.num_layers <= MOST_LAYERS and self._misfits is not None
        for reach in self._ways if looks else ():
            limit_s = below_s if best is None else best.seconds
            if bound_s < limit_s * (1 - slack):
                none_s, split = reach.best(limit_s, bound_s)
                if reach is self._ways[0]:
                    bound_s = max(bound_s, none_s)
                if split is not None:
                    best = self._better(split, limit_s) or best
        return best, min(bound_s, below_s if best is None else best.seconds)

    def _better(self, split: _Split, limit_s: float) -> Turns | None:
        one = self._placed(*split)
        return one if one.seconds < limit_s * (1 - CLOSE) else None

    @cached_property
    def _ways(self) -> list[_Reach]:
        """What a cut can cost: the first at least, others as it may be."""
        links = {self.site.intra} if self.site.one_link else {self.site.intra, self.site.inter}
        hops = [self._hops(self.site.intra, self.site.inter)]
        hops += [self._hops(link, all_cross=all_) for link in links for all_ in (False, True)]
        return [_Reach(self, one) for k, one in enumerate(hops) if not any(map(partial(np.array_equal, one), hops[:k]))]

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
        if least < 2 or float(self._memory.held(0 * n, n)[0]) > self._room:
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

    @property
    def _memory(self) -> ForwardMemory:
        return self.among.memory(self.samples)

    @cached_property
    def _near(self) -> Ints:
        """By end, the first start that memory leaves room for, by what only grows with a stage."""
        return self._memory.near(self._room)

    @cached_property
    def _far(self) -> tuple[Ints, Ints]:
        """[n + 1] by start, the last end that memory leaves room for: by what only grows with a stage, and for sure."""
        starts = np.arange(self.graph.num_layers + 1)
        nears = self._near, self._memory.sure(self._room)
        one, other = (np.searchsorted(near, starts, side="right") - 1 for near in nears)
        return one, other

    @cached_property
    def _misfits(self) -> dict[int, Ints] | None:
        """By end, the places from the near one on that leave no room; None: too many would have to be tested."""
        runs, complete = self._memory.runs(self._room, 0 * self._near)
        if not complete:
            return None
        ends = np.flatnonzero(np.bincount(runs.end[runs.low < runs.high], minlength=len(self._near)) != 1)
        several = set(ends.tolist()) | set(runs.end[runs.low > self._near[runs.end]].tolist())
        return {end: np.setdiff1d(np.arange(self._near[end], end), runs.places(end)) for end in several}


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
        self.far = search._far

    def bound(self, high_s: float, low_s: float) -> float:
        """What no split can beat, `high_s` at most; not less than `low_s`, which none can either."""
        return halved(low_s, high_s, self._might)[0]

    def likely(self, below_s: float, bound_s: float) -> _Split | None:
        """The best split that cuts only where one rank alone could send and receive; None: none is below."""
        return halved(bound_s, below_s, self._does)[1]

    def best(self, below_s: float, bound_s: float) -> tuple[float, _Split | None]:
        """(what no split can beat, the best of all; None: none is below)."""
        return halved(bound_s, below_s, self._fewest)

    def _might(self, period: float) -> tuple[float, _Split] | None:
        """None: no split keeps within the period, not even one whose every cut is paid by the most ranks."""
        return self._within(period, self.allowed & (self.hop_s * self.turns[-1] <= period), self.far[0])

    def _does(self, period: float) -> tuple[float, _Split] | None:
        places = self.allowed & (self.hop_s * self.turns[0] <= period)
        for far in self.far:
            if (found := self._within(period, places, far)) is None:
                return None
            edges = np.array([0, *found[1][0], self.n])
            if (self.search._memory.held(edges[:-1], edges[1:]) <= self.search._room).all():
                return found
        return None

    def _measured(self, cuts: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[float, _Split]:
        edges = np.array([0, *cuts, self.n])
        work_s = self.before_s[edges[1:]] - self.before_s[edges[:-1]] + self.slicing_s
        each = np.maximum(work_s, np.maximum(self.hop_s[edges[1:]], self.hop_s[edges[:-1]]))
        turns = [most_turns(self.search.num_microbatches, count) for count in ranks]
        return float((turns * each).max()), (cuts, ranks)

    def _within(self, period: float, cuttable: Flags, far: Ints) -> tuple[float, _Split] | None:
        """A split within the period that cuts only there, each stage as long as it can be; None: there is none.

        Then fewer layers never need more devices, so reached[d] = max over r of the end of what r ranks do after
        reached[d - r].
        """
        places = np.flatnonzero(cuttable)
        last = places[np.searchsorted(places, np.arange(self.n + 1), side="right") - 1]
        """The last of these places up to each position."""
        each_s = period / self.turns - self.slicing_s
        reached = np.zeros(self.num_devices + 1, np.int64)
        came = np.zeros(self.num_devices + 1, np.int64)
        for d in range(1, self.num_devices + 1):
            count = int(np.searchsorted(self.ranks, d, side="right"))
            starts = reached[d - self.ranks[:count]]
            ends = np.searchsorted(self.before_s, (self.before_s[starts] + each_s[:count]) * (1 + 1e-13), side="right")
            ends = last[np.maximum(np.minimum(ends - 1, far[starts]), starts)]
            k = int(np.argmax(ends))
            reached[d], came[d] = reached[d - 1], 0
            if ends[k] > reached[d]:
                reached[d], came[d] = ends[k], self.ranks[k]
            if reached[d] == self.n:
                return self._measured(*_walked_back(d, reached, came))
        return None

    def _fewest(self, period: float) -> tuple[float, _Split] | None:
        """A split of the fewest devices within the period, by every pair of positions; None: there are not enough."""
        places = np.flatnonzero(self.allowed)
        fewest = np.full(self.n + 1, self.num_devices + 1)
        fewest[0] = 0
        came = np.zeros((self.n + 1, 2), np.int64)
        m, misfits = self.search.num_microbatches, self.search._misfits or {}
        for j in places[1:].tolist():
            low = int(self.search._near[j])
            if self.hop_s[j] * self.turns[-1] > period or low >= j:
                continue
            each = np.maximum(self.before_s[j] - self.before_s[low:j] + self.slicing_s, self.hop_s[low:j])
            with np.errstate(divide="ignore"):
                turns = np.floor(period / np.maximum(each, self.hop_s[j]) * (1 + 1e-13))  # that a rank has time for
                value = fewest[low:j] + np.maximum(1, np.ceil(m / turns))
            if j in misfits:
                value[misfits[j] - low] = math.inf
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
        return self._measured(tuple(reversed(cuts[:-1])), tuple(reversed(ranks)))


_Split = tuple[tuple[int, ...], tuple[int, ...]]
"""Cuts, and ranks by stage."""


def _walked_back(d: int, reached: Ints, came: Ints) -> _Split:
    """From how far d devices reach, and with how many ranks for the last stage; 0: with one device less."""
    cuts: list[int] = []
    ranks: list[int] = []
    while d:
        if came[d]:
            cuts.append(int(reached[d]))
            ranks.append(int(came[d]))
        d -= int(came[d]) or 1
    return tuple(reversed(cuts[1:])), tuple(reversed(ranks))


def fewest_ranks(num_microbatches: int, num_ranks: int) -> dict[int, int]:
    """Numbers of turns that the busiest of up to so many ranks can have -> the fewest ranks that have no more.

    >>> fewest_ranks(8, 8)
    {8: 1, 4: 2, 3: 3, 2: 4, 1: 8}
    """
    found: dict[int, int] = {}
    for count in range(1, num_ranks + 1):
        found.setdefault(most_turns(num_microbatches, count), count)
    return found
