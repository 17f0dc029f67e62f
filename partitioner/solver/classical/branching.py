"""A training step of a model with branches, to first order, over every order of its layers that their tensors allow."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from partitioner.graph import CostGraph
from partitioner.solver.classical.frontier import sample, sweep
from partitioner.solver.classical.ideals import Flags, Ints, as_flags, condense, down_sets
from partitioner.solver.classical.loads import CLOSE, Floats, Kind, Loads, average_bound
from partitioner.solver.windows import least_that_fits
from partitioner.specs import Link

MOST_EXACT = 4_000
"""Down-sets that are all looked at; where there are more, the cheapest of each bin of work."""
COARSE_BINS, BINS_A_STAGE = 512, 1_024
MANY = 10**6
"""Micro-batches of which all but the slowest stage is forgotten."""
MOST_ROUNDS = 4
"""Times that down-sets beside those of the best split are looked at."""
MOST_NEIGHBOURS = 1_000
MOST_RANGES = 400
"""Ranges of the slowest stage that are looked at."""
FINE, COARSE = 1e-6, 1e-4
"""Relative, of the slowest stage: ranges of it are halved down to this where down-sets are all there are, or not."""


class Ordered(NamedTuple):
    """Layers of each stage; seconds of a step; what no split in any order can beat."""

    stages: tuple[tuple[int, ...], ...]
    seconds: float
    lower_bound: float

    @property
    def gap(self) -> float:
        return max(0.0, self.seconds / self.lower_bound - 1) if self.lower_bound > 0 else 0.0


def step_in_any_order(loads: Loads, microbatches: int) -> Ordered:
    """Up to `loads.kinds[0].count` stages with the least  sum + (m - 1) slowest,  in an order that the edges allow.

    The sum is one micro-batch through all stages and, over every boundary, what is alive there: net costs are seconds
    there and back. The slowest is a stage or a boundary. A split is a chain of down-sets. Under a cap T on the slowest,
    the least alive over all boundaries is a shortest path, twice:

        bound    over works alone: from any work to any that is at most T more, at the least alive that a down-set with
                 that work has; whether the down-sets hold one another is not asked
        split    over down-sets that hold one another, those through which the bound alone is below the best split

    Ranges of T wait in the order of what they promise and are halved until none is below the best split. The down-sets
    are all there are, where these are few: then the split of a range is its bound. Elsewhere they are those of `sweep`,
    and at the end those beside the boundaries found.
    """
    loads = replace(loads, kinds=(replace(loads.kinds[0], pays=False),))  # nets are paid for at boundaries
    labels = condense(loads.num_layers, loads.edges)
    merged = loads.merged(labels)
    task = _Task(merged, float(merged.kinds[0].times.sum()), microbatches, merged.kinds[0].count)
    best = _Best(task.ends, task.total * microbatches)
    if (every := down_sets(merged.num_layers, merged.edges, MOST_EXACT)) is not None:
        points = _points(merged, every)
        best, bound = _searched(task, _Relaxed.of(points), points, best, exact=True)
    else:
        best, bound = _swept(task, best)
    members = [np.flatnonzero(labels == k).tolist() for k in range(merged.num_layers)]
    stages = tuple(
        tuple(sorted(v for k in np.flatnonzero(later & ~earlier) for v in members[k]))
        for earlier, later in pairwise(best.boundaries)
    )
    return Ordered(stages, best.seconds, min(bound, best.seconds))


def most_even_split(loads: Loads) -> Ordered:
    """The same for the least slowest stage alone, work alone counted: `seconds` and `lower_bound` are its own."""
    free = replace(loads, nets=(), net_costs=np.zeros(0))
    found, total = step_in_any_order(free, MANY), float(loads.kinds[0].times.sum())
    slowest = max(float(loads.kinds[0].times[list(stage)].sum()) for stage in found.stages)
    return Ordered(found.stages, slowest, min(slowest, (found.lower_bound - total) / (MANY - 1)))


def _swept(task: _Task, best: _Best) -> tuple[_Best, float]:
    """Over the cheapest down-sets of bins of work, first wide then narrow ones, and over those beside the best."""
    loads, relaxed, bound, limit = task.loads, _Relaxed.average(task), 0.0, math.inf
    for bins in (COARSE_BINS, BINS_A_STAGE * max(4, task.count)):
        if (swept := sweep(loads, bins, limit)) is not None:
            relaxed, some = _Relaxed(swept.low, swept.high, swept.alive), swept.ideals(np.arange(len(swept.low)))
        else:
            some = sample(loads)
        some = np.concatenate((task.ends, some))
        points = _promising(task, relaxed, _points(loads, some), best)
        best, least = _searched(task, relaxed, points, best)
        bound, limit = max(bound, least), best.seconds - task.total - (task.m - 1) * task.slowest
        if swept is None or best.seconds <= bound * (1 + CLOSE):
            break
    for _ in range(MOST_ROUNDS):
        some = np.concatenate((points.ideals, _beside(loads, best.boundaries)))
        points = _promising(task, relaxed, _points(loads, some), best)
        better, _ = _searched(task, relaxed, points, best, bounding=False)
        if better.seconds >= best.seconds * (1 - CLOSE):
            break
        best = better
    return best, bound


@dataclass(frozen=True)
class _Task:
    loads: Loads
    total: float
    m: int
    count: int
    """Stages at most."""

    @property
    def ends(self) -> Flags:
        """The empty down-set and the full one."""
        ends: Flags = np.array([[False], [True]]).repeat(self.loads.num_layers, axis=1)
        return ends

    @property
    def slowest(self) -> float:
        """No slowest stage takes less."""
        return average_bound(self.loads)


class _Best(NamedTuple):
    """Down-sets from the empty to the full one, and the seconds of a step."""

    boundaries: Flags
    seconds: float


@dataclass(frozen=True)
class _Points:
    """Down-sets by their work, which never falls."""

    ideals: Flags
    words: Ints
    """[points, words] their bits."""
    work: Floats
    alive: Floats


def _points(loads: Loads, ideals: Flags) -> _Points:
    words = np.unique(_words(ideals), axis=0)
    ideals = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : loads.num_layers].astype(np.bool_)
    times = loads.kinds[0].times
    unit = float(times.sum()) / 2**50 or 1.0
    work = ideals.astype(np.float64) @ np.rint(times / unit)  # whole numbers: the same in whatever order
    pairs = [h for h, net in enumerate(loads.nets) if len(net) == 2]
    first, second = np.array([loads.nets[h] for h in pairs], np.int64).reshape(-1, 2).T
    alive = (ideals[:, first] ^ ideals[:, second]) @ loads.net_costs[pairs]
    for net, cost in zip(loads.nets, loads.net_costs, strict=True):
        if len(net) > 2:
            held = ideals[:, list(net)]
            alive += cost * (held.any(axis=1) & ~held.all(axis=1))
    order = np.lexsort((ideals.sum(axis=1), work))
    return _Points(ideals[order], words[order], work[order] * unit, alive[order])


def _words(ideals: Flags) -> Ints:
    packed = np.packbits(ideals, axis=1, bitorder="little")
    words = np.zeros((len(packed), -(-packed.shape[1] // 8) * 8), np.uint8)
    words[:, : packed.shape[1]] = packed
    found: Ints = words.view(np.int64)
    return found


class _Relaxed:
    """Boundaries with work between `low` and `high`: for every down-set there is one, with no more alive."""

    def __init__(self, low: Floats, high: Floats, alive: Floats) -> None:
        order = np.argsort(high, kind="stable")
        self.low, self.high, self.alive = low[order], high[order], alive[order]
        self.by_low = np.argsort(self.low, kind="stable")

    @classmethod
    def of(cls, points: _Points) -> _Relaxed:
        return cls(points.work, points.work, points.alive)

    @classmethod
    def average(cls, task: _Task) -> _Relaxed:
        """Nothing alive anywhere."""
        return cls(np.array([0.0, 0.0, task.total]), np.array([0.0, task.total, task.total]), np.zeros(3))

    def capped(self, cap: float, count: int) -> _Capped:
        """The least alive on the way from the first boundary to the last in steps of at most the cap.

            ahead[s][x] = alive(x) + min over y with high(y) >= low(x) - cap  of ahead[s - 1][y]

        and the same from the end. What lies farther on is as good a start, so the minimum is one over a suffix.
        """
        room = cap * (1 + CLOSE)
        alive = np.where(self.alive <= room, self.alive, math.inf)
        first, last = (int(np.lexsort((self.alive, by))[0]) for by in (self.high, -self.low))
        entering = alive.copy()
        entering[first] = math.inf
        before = np.searchsorted(self.high, self.low - room)
        after = np.searchsorted(self.low[self.by_low], self.high + room, side="right")
        ahead, behind = np.full(len(alive), math.inf), np.full(len(alive), math.inf)
        ahead[first], behind[last] = 0.0, 0.0
        fronts: list[Floats] = []
        backs: list[Floats] = []
        moved = math.inf
        for _ in range(count):
            front = np.append(np.minimum.accumulate(ahead[::-1])[::-1], math.inf)
            fronts.append(front)
            ahead = entering + front[before]
            moved = min(moved, float(ahead[last]))
            ahead[last] = math.inf
            inner = np.where(np.arange(len(alive)) == last, 0.0, alive) + behind
            back = np.append(math.inf, np.minimum.accumulate(inner[self.by_low]))
            behind = np.minimum(behind, back[after])
            backs.append(np.minimum(back, backs[-1]) if backs else back)
        return _Capped(self, room, moved, fronts, backs)


class _Capped(NamedTuple):
    relaxed: _Relaxed
    room: float
    moved: float
    """inf: the end is out of reach."""
    fronts: list[Floats]
    backs: list[Floats]

    def around(self, points: _Points, stage: int, count: int) -> tuple[Floats, Floats]:
        """[points] the least moved before and after them as the boundary after `stage` stages."""
        relaxed = self.relaxed
        before = np.searchsorted(relaxed.high, points.work - self.room)
        after = np.searchsorted(relaxed.low[relaxed.by_low], points.work + self.room, side="right")
        return self.fronts[stage - 1][before], self.backs[count - stage - 1][after]


def _promising(task: _Task, relaxed: _Relaxed, points: _Points, best: _Best) -> _Points:
    """Those that a better split than that could have a boundary at."""
    if task.m == 1:
        return points
    capped = relaxed.capped(min(task.total, (best.seconds - task.total) / (task.m - 1)), task.count)
    spare = best.seconds - task.total - (task.m - 1) * task.slowest
    good = points.alive <= capped.room
    reached = np.zeros(len(points.work), np.bool_)
    reached[[0, -1]] = True
    for stage in range(1, task.count):
        ahead, behind = capped.around(points, stage, task.count)
        reached |= good & (ahead + points.alive + behind < spare)
    return _Points(points.ideals[reached], points.words[reached], points.work[reached], points.alive[reached])


def _searched(
    task: _Task, relaxed: _Relaxed, points: _Points, best: _Best, *, exact: bool = False, bounding: bool = True
) -> tuple[_Best, float]:
    """The best split over the points, if better than that, and what none can beat.

    exact: the points are all down-sets. Not `bounding`: only what could be better is looked at, and nothing is proven.
    """
    fine = FINE if exact else COARSE
    ranges = [(task.total + (task.m - 1) * task.slowest, task.slowest, task.total, 0.0)]
    """(what a split with this slowest stage takes at least, least slowest, most, what it moves over the points)"""
    bound = best.seconds
    for _ in range(MOST_RANGES):
        if not ranges or ranges[0][0] >= best.seconds * (1 - CLOSE):
            break
        least, low, high, crossed = heapq.heappop(ranges)
        hopeful = task.total + crossed + (task.m - 1) * low < best.seconds * (1 - CLOSE)
        if high - low <= fine * low or not (hopeful or bounding):
            bound = min(bound, least)
            continue
        middle = low + (high - low) / (2 if high < 2 * low else 8)  # most of what is won lies at the even end
        capped = relaxed.capped(middle, task.count)
        heapq.heappush(ranges, (max(least, least + (task.m - 1) * (middle - low)), middle, high, crossed))
        moved, spare = capped.moved, best.seconds - task.total - (task.m - 1) * low
        if moved >= spare:
            continue
        if hopeful:
            path, crossed = _path(task, points, capped, spare)
            if path is not None:
                work = float(np.diff(points.work[path]).max())
                slowest = max(work, float(points.alive[path[1:-1]].max(initial=0.0)))
                seconds = task.total + crossed + (task.m - 1) * slowest
                if seconds < best.seconds * (1 - CLOSE):
                    best = _Best(points.ideals[path], seconds)
            if exact:
                moved = crossed
        if moved < math.inf:
            heapq.heappush(ranges, (max(least, task.total + moved + (task.m - 1) * low), low, middle, crossed))
    return best, min([bound, best.seconds, *(least for least, *_ in ranges)])


def _path(task: _Task, points: _Points, capped: _Capped, spare: float) -> tuple[list[int] | None, float]:
    """The points of the least moved below `spare`, from the empty to the full down-set, no stage over the cap."""
    whole = len(points.work) - 1
    at, value = np.zeros(1, dtype=np.int64), np.zeros(1)
    history: list[tuple[Ints, Ints]] = []
    best, path = spare, None
    open_ = points.alive <= capped.room
    open_[[0, whole]] = False
    for stage in range(1, task.count + 1):
        to, behind = np.array([whole]), np.zeros(1)
        if stage < task.count:
            ahead, behind = capped.around(points, stage, task.count)
            some = np.flatnonzero(open_ & (ahead + points.alive + behind < best))
            to, behind = np.append(some, whole), np.append(behind[some], 0.0)
        low = np.searchsorted(points.work[at], points.work[to] - capped.room)
        high = np.searchsorted(at, to)
        words, starts = points.words, at

        def held(place: Ints, window: Ints, words: Ints = words, starts: Ints = starts, to: Ints = to) -> Flags:
            inside: Flags = (words[starts[place]] & ~words[to[window]] == 0).all(axis=1)
            return inside

        least, source = least_that_fits(value, low, high, held)
        least = least + np.where(to == whole, 0.0, points.alive[to])
        history.append((to, at[source]))
        if least[-1] < best:
            best, path = float(least[-1]), _back(history, whole)
        reached = (least + behind < best) & (to != whole)
        at, value = to[reached], least[reached]
        if not len(at):
            break
    return path, best if path is not None else math.inf


def _back(history: list[tuple[Ints, Ints]], whole: int) -> list[int]:
    path = [whole]
    for to, source in reversed(history):
        path.append(int(source[np.searchsorted(to, path[-1])]))
    return path[::-1]


def loads_of(graph: CostGraph, samples: float, link: Link, num_stages: int) -> Loads:
    """A profile's layers and tensors, at that micro-batch, with one link between all stages."""
    costs, nets, seconds = graph.at(samples), [], []
    for tensor in graph.profile.tensors:
        layers = sorted({graph.position[name] for name in (tensor.producer, *tensor.consumers)})
        if len(layers) > 1:
            size = graph.profile.tensor_bytes(tensor, samples)
            nets.append(tuple(layers))
            seconds.append(link.time(size) + (link.time(size) if tensor.needs_gradient else 0.0))
    edges = {(net[0], head) for net in nets for head in net[1:]}
    return Loads(
        tuple(sorted(edges)),
        tuple(nets),
        np.array(seconds),
        np.zeros(graph.num_layers),
        (Kind(num_stages, costs.forward_s + costs.backward_s),),
    )


def _beside(loads: Loads, boundaries: Flags) -> Flags:
    """Down-sets that differ from the boundaries by a layer, or by a layer in and another out."""
    needs: list[set[int]] = [set() for _ in range(loads.num_layers)]
    feeds: list[set[int]] = [set() for _ in range(loads.num_layers)]
    for u, v in loads.edges:
        needs[v].add(u)
        feeds[u].add(v)
    found: set[int] = set()
    each = MOST_NEIGHBOURS // max(1, len(boundaries) - 2)
    for row in boundaries[1:-1]:
        own = [sum(1 << int(v) for v in np.flatnonzero(row))]
        for _ in range(3):
            near: list[int] = []
            for ideal in own:
                held = {v for v in range(loads.num_layers) if ideal >> v & 1}
                near += [ideal ^ 1 << v for v in held if not feeds[v] & held]
                near += [ideal | 1 << v for v in range(loads.num_layers) if v not in held and needs[v] <= held]
            own = list(dict.fromkeys([*own, *near]))[:each]
        found.update(own)
    return as_flags(sorted(found), loads.num_layers)
