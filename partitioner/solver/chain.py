"""Exact cuts of a chain: the smallest bottleneck, and the least transfer time under any bottleneck.

Everything here rests on one property: how far a stage can go from a position never shrinks with a later position, for
it has fewer layers to carry. So of all splits, the one whose stages each go as far as they can is ahead of every other
at each boundary, and its mirror image, from the last layer back, is behind every other. One walk of O(p log n) says
whether there is a split at all; two walks say where each boundary can be, and a table need look nowhere else (Pinar &
Aykanat 2004, "Fast optimal load balancing algorithms for 1D partitioning").
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from partitioner.solver.limits import Flags, Floats, Ints, Limits
from partitioner.solver.starts import Starts
from partitioner.solver.windows import least_that_fits, window_minimum

TOLERANCE = 1e-12
"""Relative; sums of floats in another order differ by less."""
MOST_TABLES = 6
"""Splits that `best_split` works out where a chain is long."""
LONG = 50_000
"""Layers x stages of a long chain."""

Line = tuple[float, float]
"""(a, b): a stage that starts after x seconds of work must end before a + b x."""
Lines = Sequence[Sequence[Line]]
"""By stage, all of them hold; b >= 0, so that a later start never ends earlier."""


class Leaner(NamedTuple):
    """Another way to run any stage: it takes longer, and fits where the first way does not."""

    more_s: Floats
    """[n + 1] as `Chain.prefix_s`, the seconds on top of those."""
    limits: Limits


class ChainSplit(NamedTuple):
    """Where to cut; seconds of one micro-batch through all stages and hops, and of the slowest stage."""

    cuts: tuple[int, ...]
    sum_s: float
    bottleneck_s: float


@dataclass(frozen=True)
class Chain:
    """n layers to be cut into p stages. Boundary s is where stage s begins: 0 for the first; n ends the last one."""

    prefix_s: Floats
    """[n + 1] seconds of the layers before each position, forward and backward of one micro-batch, at speed 1."""
    speeds: tuple[float, ...]
    """[p] speed of each stage's device."""
    starts: Starts
    hops_s: Sequence[Floats]
    """[p][n + 1] seconds of one micro-batch's transfer into stage s, there and back, when it begins at a position."""
    limits: Limits | None = None
    """What fits each stage's memory; None: everything."""
    leaner: tuple[Leaner, ...] = ()
    """How stages can run that do not fit `limits`: recomputing, dividing more over replicas, or both. A stage takes the
    quickest that fits; there are none where everything fits."""

    @property
    def num_layers(self) -> int:
        return len(self.prefix_s) - 1

    @property
    def num_stages(self) -> int:
        return len(self.speeds)

    def free(self) -> Chain:
        """Without memory."""
        return replace(self, limits=None, leaner=())

    def stage_s(self, cuts: tuple[int, ...]) -> Floats:
        """Seconds of one micro-batch on each stage."""
        edges = np.array((0, *cuts, self.num_layers))
        seconds, stages = np.diff(self.prefix_s[edges]), np.arange(self.num_stages)
        if self.limits is not None and self.leaner:
            most_s = np.max([np.diff(one.more_s[edges]) for one in self.leaner], axis=0)
            more_s = np.where(self.limits.fits(stages, edges[:-1], edges[1:]), 0.0, most_s)
            for one in self.leaner:
                fits = one.limits.fits(stages, edges[:-1], edges[1:])
                more_s = np.where(fits, np.minimum(more_s, np.diff(one.more_s[edges])), more_s)
            seconds = seconds + more_s
        stages_s: Floats = seconds / np.array(self.speeds)
        return stages_s

    def split(self, cuts: tuple[int, ...]) -> ChainSplit:
        seconds = self.stage_s(cuts)
        hops_s = sum(float(self.hops_s[s + 1][k]) for s, k in enumerate(cuts))
        return ChainSplit(cuts, float(seconds.sum()) + hops_s, float(seconds.max()))

    def fit(self, cuts: tuple[int, ...]) -> bool:
        """Whether every stage fits its memory, in some way."""
        if self.limits is None:
            return True
        edges, stages = np.array((0, *cuts, self.num_layers)), np.arange(self.num_stages)
        fits = self.limits.fits(stages, edges[:-1], edges[1:])
        for one in self.leaner:
            fits = fits | one.limits.fits(stages, edges[:-1], edges[1:])
        return bool(fits.all())

    def within(self, bottleneck: float) -> Lines:
        """Stages of at most so many seconds."""
        each = {speed: ((bottleneck * speed, 1.0),) for speed in set(self.speeds)}
        return [each[speed] for speed in self.speeds]

    @cached_property
    def seconds(self) -> list[float]:
        """`prefix_s`."""
        seconds: list[float] = self.prefix_s.tolist()
        return seconds

    @cached_property
    def ways(self) -> list[tuple[list[float], Limits]]:
        """Of each leaner way, the seconds of the layers before each position, and what fits."""
        return [((self.prefix_s + one.more_s).tolist(), one.limits) for one in self.leaner]

    def furthest(
        self, lines: Lines, also: Callable[[int, int, int], int] | None = None, *, memory: bool = True
    ) -> list[int] | None:
        """[p + 1] the last that each boundary can be at; None: the end is out of reach.

        also: (stage, start, end) -> the largest end up to there that something else allows. Stages may come out empty
        where a device is too slow or too full for any layer: then it is a relaxation, elsewhere a split. O(p log n).
        """
        reach = self._reach(also, memory)
        at, edges = 0, [0]
        for s in range(self.num_stages):
            if (at := reach(s, at, lines[s])) < 0:
                return None
            edges.append(at)
        return edges

    def some_order_reaches(
        self, kinds: Sequence[tuple[int, Lines]], also: Callable[[int, int, int], int] | None = None
    ) -> bool:
        """Whether the end is in reach with stages of some kinds in any order. kinds: (how many stages, their lines).

        As `furthest`, over how many stages of each kind are used up, [c] one number a kind:

            far[c] = max over kinds k with c_k > 0 of reach(stage |c| - 1, far[c - one of k], lines of k)
        """
        reach = self._reach(also, True)
        far = {(0,) * len(kinds): 0}
        for s in range(self.num_stages):
            following: dict[tuple[int, ...], int] = {}
            for used, at in far.items():
                for k, (count, lines) in enumerate(kinds):
                    if used[k] < count:
                        key = (*used[:k], used[k] + 1, *used[k + 1 :])
                        end = reach(s, at, lines[s])
                        if end > following.get(key, -1):
                            following[key] = end
            far = following
        return bool(far)

    def _reach(
        self, also: Callable[[int, int, int], int] | None, memory: bool
    ) -> Callable[[int, int, Sequence[Line]], int]:
        """(stage, start, lines) -> the last position where it can end and the next begin; -1: not as far as it must."""
        prefix, ways = self.seconds, self.ways
        starts, limits, n = self.starts, self.limits if memory else None, self.num_layers
        floor, low, high, last = starts.floor, starts.low, starts.high, self.num_stages - 1

        def reach(s: int, at: int, lines: Sequence[Line]) -> int:
            x, y = prefix[at], math.inf
            for a, b in lines:
                y = min(y, a + b * x)
            room = y - x + TOLERANCE * abs(y)
            end = max(at, bisect_right(prefix, x + room) - 1)
            if also is not None:
                end = also(s, at, end)
            if limits is not None:
                fits = limits.furthest(s, at, end)
                for longer, held in ways:
                    if fits < end:
                        slow = max(at, bisect_right(longer, longer[at] + room) - 1)
                        fits = max(fits, held.furthest(s, at, min(slow, end)))
                end = fits
            if s == last:
                return n if end >= n else -1
            end = floor[min(end, high[s + 1])]
            return end if end >= low[s + 1] else -1

        return reach

    def earliest(self, lines: Lines) -> list[int] | None:
        """[p + 1] the first that each boundary can be at, by what `lines` with b = 1 and memory leave room for."""
        prefix, ways = self.seconds, self.ways
        starts, limits, at = self.starts, self.limits, self.num_layers
        ceiling, low, high = starts.ceiling, starts.low, starts.high
        edges = [at]
        for s in range(self.num_stages - 1, 0, -1):
            room = min((a for a, b in lines[s] if b == 1.0), default=math.inf)
            room += TOLERANCE * prefix[at]
            start = min(at, bisect_left(prefix, prefix[at] - room))
            if limits is not None:
                reach = limits.nearest(s, start, at)
                for longer, held in ways:
                    if reach > start:
                        slow = min(at, bisect_left(longer, longer[at] - room))
                        reach = min(reach, held.nearest(s, max(slow, start), at))
                start = reach
            at = ceiling[max(start, low[s])]
            if at > high[s]:
                return None
            edges.append(at)
        edges.append(0)
        return edges[::-1]


def smallest_bottleneck(chain: Chain, *, precision: float = TOLERANCE) -> float:
    """The smallest seconds of the slowest stage over all splits that leave room in memory (`Limits.roomy`).

    T is bisected, with a walk each time. Where a walk leaves a stage empty (devices of unequal speed or memory), all
    positions that a stage can start at are followed instead: O(p n). inf where there is no room for any split;
    otherwise at most `precision` below the smallest.
    """
    prefix, total = chain.seconds, float(chain.prefix_s[-1])
    spaced = np.array((0, *chain.starts.possible.tolist(), chain.num_layers))
    largest_piece = float(np.diff(chain.prefix_s[spaced]).max())
    low = max(total / sum(chain.speeds), largest_piece / max(chain.speeds))
    high = (total + max((float(one.more_s[-1]) for one in chain.leaner), default=0.0)) / min(chain.speeds)
    if (found := _attained(chain, prefix, high)) is None:
        return math.inf
    high = min(high, found)
    if (found := _attained(chain, prefix, low)) is not None:
        return found
    halve = False
    while high - low > precision * high:
        following = _following(chain, prefix, low) if not halve else low
        if following >= high:
            break
        middle = following if low < following < high else (low + high) / 2
        if not low < middle < high:
            break
        if (found := _attained(chain, prefix, middle)) is None:
            low, halve = middle, not halve
        else:
            high = min(found, middle)
            if middle == following and not halve:
                return high
            halve = False
    return high if precision <= TOLERANCE else low


def has_room(chain: Chain) -> bool:
    """Whether some split leaves room on every stage, whatever its time: necessary for one to fit."""
    return _attained(chain, chain.seconds, math.inf) is not None


def _attained(chain: Chain, prefix: list[float], bottleneck: float) -> float | None:
    """The bottleneck of a split that keeps within T; None: there is none."""
    edges = chain.furthest(chain.within(bottleneck))
    if edges is None:
        return None
    if all(a < b for a, b in pairwise(edges)):
        if chain.limits is not None and chain.leaner:
            return bottleneck
        return max((prefix[b] - prefix[a]) / v for (a, b), v in zip(pairwise(edges), chain.speeds, strict=True))
    return bottleneck if _followed(chain, bottleneck) else None


def _following(chain: Chain, prefix: list[float], bottleneck: float) -> float:
    """Where T is too small, the next one at which a walk comes out otherwise: some stage takes one more piece. None in
    between is possible. inf: memory holds up every stage. T itself where the walk does not tell: devices of unequal
    speed, or a walk to the end that leaves a stage empty."""
    if len(set(chain.speeds)) > 1:
        return bottleneck
    starts, limits, ways = chain.starts, chain.limits, chain.ways if chain.limits is not None else []
    at, least, room = 0, math.inf, bottleneck * chain.speeds[0]

    def more(seconds: list[float], end: int, lowest: int) -> float:
        return seconds[starts.ceiling[max(end + 1, lowest)]] - seconds[at]

    for s in range(chain.num_stages):
        is_last = s + 1 == chain.num_stages
        lowest, highest = (chain.num_layers,) * 2 if is_last else (starts.low[s + 1], starts.high[s + 1])
        y = prefix[at] + room
        within = y - prefix[at] + TOLERANCE * abs(y)
        reach = end = max(at, bisect_right(prefix, prefix[at] + within) - 1)
        if limits is not None:
            reach = limits.furthest(s, at, end)
        if reach == end and end < highest:
            least = min(least, more(prefix, end, lowest))
        for longer, lean in ways:
            if reach < end:
                slow = min(end, max(at, bisect_right(longer, longer[at] + within) - 1))
                held = lean.furthest(s, at, slow)
                if held == slow and slow < highest:
                    least = min(least, more(longer, slow, lowest))
                reach = max(reach, held)
        at = starts.floor[min(reach, highest)]
        if at < lowest:
            return max(bottleneck, least / chain.speeds[0])
    return bottleneck


def _followed(chain: Chain, bottleneck: float) -> bool:
    """Whether some split keeps within T, by the set of positions where each stage can start."""
    starts, n = np.array([0]), chain.num_layers
    for s, speed in enumerate(chain.speeds):
        ends = _ends(chain, s, starts, ((bottleneck * speed, 1.0),))
        change = np.bincount(starts + 1, minlength=n + 2) - np.bincount(ends + 1, minlength=n + 2)
        covered = np.cumsum(change)[: n + 1] > 0  # in (start, end] of some pair
        if s + 1 == chain.num_stages:
            return bool(covered[n])
        following = chain.starts.positions(s + 1)
        starts = following[covered[following]]
        if not len(starts):
            return False
    return False


def _ends(chain: Chain, stage: int, starts: Ints, lines: Sequence[Line]) -> Ints:
    """[starts] how far the stage can go from each, by lines and room, in the way that goes farthest; the start itself:
    nowhere."""
    ends = _reach_of(chain, stage, starts, lines)
    for one in chain.leaner if chain.limits is not None else ():
        ends = np.maximum(ends, _reach_of(chain, stage, starts, lines, one))
    return ends


def _reach_of(chain: Chain, stage: int, starts: Ints, lines: Sequence[Line], leaner: Leaner | None = None) -> Ints:
    """The same in one way."""
    x, limits = chain.prefix_s[starts], chain.limits
    y = np.min([a + b * x for a, b in lines], axis=0)
    y = y + TOLERANCE * np.abs(y)
    seconds = chain.prefix_s
    if leaner is not None:
        seconds, limits = seconds + leaner.more_s, leaner.limits
        y = y + leaner.more_s[starts]
    ends: Ints = np.maximum(np.searchsorted(seconds, y, side="right") - 1, starts)
    return ends if limits is None else limits.far(stage, starts, ends)


def cheapest_split(chain: Chain, bottleneck: float = math.inf, lines: Lines | None = None) -> ChainSplit | None:
    """The split with the least sum_s whose stages take at most `bottleneck` each and fit their memory; None: none does.

        best[s + 1][j] = hop(s + 1, j) + min over i of best[s][i] + seconds(s, i, j),
                         seconds(s, i, j) <= bottleneck, fits(s, i, j)

    lines: what else each stage keeps to. Boundaries are looked at where two walks say that they can be, w positions
    each. Seconds are differences of prefix sums, so without memory the minimum is one over a sliding window: O(w log w)
    a stage. Memory narrows the window where it is monotone (`roomy`); where the split so found does not fit (`fits` is
    not monotone: what crosses a cut can be wide or narrow), each window is searched for its least start that fits, and
    so it is where stages must run in a leaner way. They do so only where no split keeps within the bottleneck without.
    """
    if chain.leaner:
        without = cheapest_split(replace(chain, leaner=()), bottleneck, lines)
        if without is not None:
            return without
    every = chain.within(bottleneck)
    if lines is not None:
        every = [(*own, *more) for own, more in zip(every, lines, strict=True)]
    last = chain.furthest(every)
    first = chain.earliest(every)
    if last is None or first is None:
        return None
    places = [chain.starts.positions(s, first[s], last[s]) for s in range(chain.num_stages + 1)]
    if not all(map(len, places)):
        return None
    cuts = None if chain.leaner else _shortest(chain, every, places, tested=False)
    if chain.leaner or (cuts is not None and not chain.fit(cuts)):
        cuts = _shortest(chain, every, places, tested=True)
    return None if cuts is None else chain.split(cuts)


def _shortest(chain: Chain, lines: Lines, places: list[Ints], *, tested: bool) -> tuple[int, ...] | None:
    """Cuts of the least sum_s within the places. tested: every start and end that is chosen is held against memory."""
    prefix, limits, best = chain.prefix_s, chain.limits, np.zeros(1)
    history: list[Callable[[int], int]] = []
    for s, speed in enumerate(chain.speeds):
        starts, ends = places[s], places[s + 1]
        base, before = best - prefix[starts] / speed, np.searchsorted(starts, ends, side="left")

        def window(one: Leaner | None = None, s: int = s, starts: Ints = starts, ends: Ints = ends) -> Ints:
            reach = _reach_of(chain, s, starts, lines[s], one)
            return np.searchsorted(np.maximum.accumulate(reach), ends, side="left")

        if not tested or limits is None:
            low = window()
            least = window_minimum(base, low, before)
            history.append(_Window(base, low, before).source)
        else:
            fit = partial(_fit, limits, s, starts, ends)
            least, source = least_that_fits(base, window(), before, fit)
            for one in chain.leaner:
                longer = base - one.more_s[starts] / speed
                fit = partial(_fit, one.limits, s, starts, ends)
                value, other = least_that_fits(longer, window(one), before, fit)
                value = value + one.more_s[ends] / speed
                least, source = np.where(value < least, value, least), np.where(value < least, other, source)
            history.append(source.item)
        best = least + prefix[ends] / speed
        if s + 1 < chain.num_stages:
            best = best + chain.hops_s[s + 1][ends]
    if not math.isfinite(best[0]):
        return None
    cuts, j = [], 0
    for s in range(chain.num_stages - 1, 0, -1):
        j = int(history[s](j))
        cuts.append(int(places[s][j]))
    return tuple(reversed(cuts))


def _fit(limits: Limits, stage: int, starts: Ints, ends: Ints, start: Ints, end: Ints) -> Flags:
    """Whether the stage fits from the starts to the ends of these numbers."""
    return limits.fit(stage, starts[start], ends[end])


class _Window(NamedTuple):
    """Where each window's least value is, found again for the few that are asked for."""

    base: Floats
    low: Ints
    high: Ints

    def source(self, end: int) -> int:
        return int(self.low[end] + np.argmin(self.base[self.low[end] : self.high[end]]))


def best_split(chain: Chain, weight: float, tolerance: float = 0.0) -> tuple[ChainSplit, ...]:
    """Splits on the way to the least  sum_s + weight * bottleneck_s,  the best one first; empty: none fits.

    sum_s never grows with the bottleneck allowed, so a range (low, high] of bottlenecks cannot beat
    sum_s(high) + weight * low, and a bottleneck that is larger by more than hops could save cannot either. Ranges are
    halved, most promising first, until none can beat the best by more than `tolerance`, relative. 0 is exact, where the
    chain is not long.
    """
    low = smallest_bottleneck(chain)
    if low == math.inf:
        return ()
    found: dict[tuple[int, ...], ChainSplit] = {}

    def value(split: ChainSplit) -> float:
        return split.sum_s + weight * split.bottleneck_s

    for more in (1.0, 1.001, 1.02, 1.5, math.inf):
        if (tightest := cheapest_split(chain, low * more)) is not None:
            found[tightest.cuts] = tightest
            break
    else:
        return ()
    best = tightest
    least_sum_s = float(chain.prefix_s[-1]) / max(chain.speeds) + sum(
        float(chain.hops_s[s][chain.starts.positions(s)].min()) for s in range(1, chain.num_stages)
    )
    widest_s = (value(best) - least_sum_s) / weight if weight > 0 else math.inf
    if widest_s <= low * (1 + TOLERANCE) or value(best) - (least_sum_s + weight * low) <= tolerance * value(best):
        return (best,)
    widest = cheapest_split(chain, widest_s)
    if widest is None:
        return (best,)
    found[widest.cuts] = widest
    ranges = [(widest.sum_s + weight * low, low, widest)]
    best = min(found.values(), key=value)
    left = MOST_TABLES if chain.num_layers * chain.num_stages > LONG else math.inf
    while ranges and left > 0:
        left -= 1
        ranges.sort(key=lambda item: (-item[0], item[1]))
        bound, low, upper = ranges.pop()
        if bound >= value(best) * (1 - tolerance) - TOLERANCE * abs(value(best)):
            break
        middle = (low + upper.bottleneck_s) / 2
        if not low < middle < upper.bottleneck_s * (1 - TOLERANCE):
            continue
        split = cheapest_split(chain, middle)
        if split is None or split.bottleneck_s >= upper.bottleneck_s:
            ranges.append((upper.sum_s + weight * middle, middle, upper))
            continue
        found[split.cuts] = split
        best = min(best, split, key=value)
        ranges.append((split.sum_s + weight * low, low, split))
        ranges.append((upper.sum_s + weight * middle, middle, upper))
    return tuple(sorted(found.values(), key=lambda split: (value(split), split.cuts)))
