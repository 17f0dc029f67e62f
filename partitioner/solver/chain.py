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


class Split(NamedTuple):
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
    again_s: Floats | None = None
    """[n + 1] as `prefix_s`, the seconds more of stages that recompute; None: none may. They fit `limits.lean`."""

    @property
    def num_layers(self) -> int:
        return len(self.prefix_s) - 1

    @property
    def num_stages(self) -> int:
        return len(self.speeds)

    def free(self) -> Chain:
        """Without memory."""
        return replace(self, limits=None, again_s=None)

    def stage_s(self, cuts: tuple[int, ...]) -> Floats:
        """Seconds of one micro-batch on each stage."""
        edges = np.array((0, *cuts, self.num_layers))
        seconds = np.diff(self.prefix_s[edges])
        if self.limits is not None and self.again_s is not None:
            full = ~self.limits.fits(np.arange(self.num_stages), edges[:-1], edges[1:])
            seconds = seconds + np.diff(self.again_s[edges]) * full
        stages_s: Floats = seconds / np.array(self.speeds)
        return stages_s

    def split(self, cuts: tuple[int, ...]) -> Split:
        seconds = self.stage_s(cuts)
        hops_s = sum(float(self.hops_s[s + 1][k]) for s, k in enumerate(cuts))
        return Split(cuts, float(seconds.sum()) + hops_s, float(seconds.max()))

    def fit(self, cuts: tuple[int, ...]) -> bool:
        """Whether every stage fits its memory, recomputing where it must."""
        if self.limits is None:
            return True
        edges, stages = np.array((0, *cuts, self.num_layers)), np.arange(self.num_stages)
        fits = self.limits.fits(stages, edges[:-1], edges[1:])
        if self.again_s is not None and self.limits.lean is not None:
            fits = fits | self.limits.lean.fits(stages, edges[:-1], edges[1:])
        return bool(fits.all())

    def within(self, bottleneck: float) -> Lines:
        """Stages of at most so many seconds."""
        each = {speed: ((bottleneck * speed, 1.0),) for speed in set(self.speeds)}
        return [each[speed] for speed in self.speeds]

    @cached_property
    def seconds(self) -> tuple[list[float], list[float]]:
        """`prefix_s`, and the same when all is recomputed."""
        again = self.prefix_s if self.again_s is None else self.prefix_s + self.again_s
        return self.prefix_s.tolist(), again.tolist()

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
        prefix, again = self.seconds
        starts, limits, n = self.starts, self.limits if memory else None, self.num_layers
        lean = limits.lean if limits is not None and self.again_s is not None else None
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
                if lean is not None and fits < end:
                    slow = max(at, bisect_right(again, again[at] + room) - 1)
                    fits = max(fits, lean.furthest(s, at, min(slow, end)))
                end = fits
            if s == last:
                return n if end >= n else -1
            end = floor[min(end, high[s + 1])]
            return end if end >= low[s + 1] else -1

        return reach

    def earliest(self, lines: Lines) -> list[int] | None:
        """[p + 1] the first that each boundary can be at, by what `lines` with b = 1 and memory leave room for."""
        prefix, again = self.seconds
        starts, limits, at = self.starts, self.limits, self.num_layers
        lean = limits.lean if limits is not None and self.again_s is not None else None
        ceiling, low, high = starts.ceiling, starts.low, starts.high
        edges = [at]
        for s in range(self.num_stages - 1, 0, -1):
            room = min((a for a, b in lines[s] if b == 1.0), default=math.inf)
            room += TOLERANCE * prefix[at]
            start = min(at, bisect_left(prefix, prefix[at] - room))
            if limits is not None:
                reach = limits.nearest(s, start, at)
                if lean is not None and reach > start:
                    slow = min(at, bisect_left(again, again[at] - room))
                    reach = min(reach, lean.nearest(s, max(slow, start), at))
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
    prefix, total = chain.seconds[0], float(chain.prefix_s[-1])
    spaced = np.array((0, *chain.starts.possible.tolist(), chain.num_layers))
    largest_piece = float(np.diff(chain.prefix_s[spaced]).max())
    low = max(total / sum(chain.speeds), largest_piece / max(chain.speeds))
    high = (total + (0.0 if chain.again_s is None else float(chain.again_s[-1]))) / min(chain.speeds)
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
    return _attained(chain, chain.seconds[0], math.inf) is not None


def _attained(chain: Chain, prefix: list[float], bottleneck: float) -> float | None:
    """The bottleneck of a split that keeps within T; None: there is none."""
    edges = chain.furthest(chain.within(bottleneck))
    if edges is None:
        return None
    if all(a < b for a, b in pairwise(edges)):
        if chain.limits is not None and chain.again_s is not None:
            return bottleneck
        return max((prefix[b] - prefix[a]) / v for (a, b), v in zip(pairwise(edges), chain.speeds, strict=True))
    return bottleneck if _followed(chain, bottleneck) else None


def _following(chain: Chain, prefix: list[float], bottleneck: float) -> float:
    """Where T is too small, the next one at which a walk comes out otherwise: some stage takes one more piece. None in
    between is possible. inf: memory holds up every stage. T itself where the walk does not tell: devices of unequal
    speed, or a walk to the end that leaves a stage empty."""
    if len(set(chain.speeds)) > 1:
        return bottleneck
    starts, limits, again = chain.starts, chain.limits, chain.seconds[1]
    lean = limits.lean if limits is not None and chain.again_s is not None else None
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
        if lean is not None and reach < end:
            slow = min(end, max(at, bisect_right(again, again[at] + within) - 1))
            held = lean.furthest(s, at, slow)
            if held == slow and slow < highest:
                least = min(least, more(again, slow, lowest))
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
    """[starts] how far the stage can go from each, by lines and room, recomputing where that is farther; the start
    itself: nowhere."""
    ends = _reach_of(chain, stage, starts, lines)
    if chain.again_s is not None and chain.limits is not None and chain.limits.lean is not None:
        ends = np.maximum(ends, _reach_of(chain, stage, starts, lines, recompute=True))
    return ends


def _reach_of(chain: Chain, stage: int, starts: Ints, lines: Sequence[Line], *, recompute: bool = False) -> Ints:
    """The same of a stage that does or does not recompute."""
    x, limits = chain.prefix_s[starts], chain.limits
    y = np.min([a + b * x for a, b in lines], axis=0)
    y = y + TOLERANCE * np.abs(y)
    seconds = chain.prefix_s
    if recompute:
        assert chain.again_s is not None and limits is not None
        seconds, limits = seconds + chain.again_s, limits.lean
        y = y + chain.again_s[starts]
    ends: Ints = np.maximum(np.searchsorted(seconds, y, side="right") - 1, starts)
    return ends if limits is None else limits.far(stage, starts, ends)


def cheapest_split(chain: Chain, bottleneck: float = math.inf, lines: Lines | None = None) -> Split | None:
    """The split with the least sum_s whose stages take at most `bottleneck` each and fit their memory; None: none does.

        best[s + 1][j] = hop(s + 1, j) + min over i of best[s][i] + seconds(s, i, j),
                         seconds(s, i, j) <= bottleneck, fits(s, i, j)

    lines: what else each stage keeps to. Boundaries are looked at where two walks say that they can be, w positions
    each. Seconds are differences of prefix sums, so without memory the minimum is one over a sliding window: O(w log w)
    a stage. Memory narrows the window where it is monotone (`roomy`); where the split so found does not fit (`fits` is
    not monotone: what crosses a cut can be wide or narrow), each window is searched for its least start that fits, and
    so it is where stages must recompute. They do so only where no split keeps within the bottleneck without.
    """
    if chain.again_s is not None:
        without = cheapest_split(replace(chain, again_s=None), bottleneck, lines)
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
    cuts = None if chain.again_s is not None else _shortest(chain, every, places, tested=False)
    if chain.again_s is not None or (cuts is not None and not chain.fit(cuts)):
        cuts = _shortest(chain, every, places, tested=True)
    return None if cuts is None else chain.split(cuts)


def _shortest(chain: Chain, lines: Lines, places: list[Ints], *, tested: bool) -> tuple[int, ...] | None:
    """Cuts of the least sum_s within the places. tested: every start and end that is chosen is held against memory."""
    prefix, again, limits, best = chain.prefix_s, chain.again_s, chain.limits, np.zeros(1)
    history: list[Callable[[int], int]] = []
    for s, speed in enumerate(chain.speeds):
        starts, ends = places[s], places[s + 1]
        base, before = best - prefix[starts] / speed, np.searchsorted(starts, ends, side="left")

        def window(recompute: bool = False, s: int = s, starts: Ints = starts, ends: Ints = ends) -> Ints:
            reach = _reach_of(chain, s, starts, lines[s], recompute=recompute)
            return np.searchsorted(np.maximum.accumulate(reach), ends, side="left")

        if not tested or limits is None:
            low = window()
            least = window_minimum(base, low, before)
            history.append(_Window(base, low, before).source)
        else:
            fit = partial(_fit, limits, s, starts, ends)
            least, source = least_that_fits(base, window(), before, fit)
            if again is not None and limits.lean is not None:
                longer = base - again[starts] / speed
                fit = partial(_fit, limits.lean, s, starts, ends)
                value, other = least_that_fits(longer, window(True), before, fit)
                value = value + again[ends] / speed
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


def best_split(chain: Chain, weight: float, tolerance: float = 0.0) -> tuple[Split, ...]:
    """Splits on the way to the least  sum_s + weight * bottleneck_s,  the best one first; empty: none fits.

    sum_s never grows with the bottleneck allowed, so a range (low, high] of bottlenecks cannot beat
    sum_s(high) + weight * low, and a bottleneck that is larger by more than hops could save cannot either. Ranges are
    halved, most promising first, until none can beat the best by more than `tolerance`, relative. 0 is exact, where the
    chain is not long.
    """
    low = smallest_bottleneck(chain)
    if low == math.inf:
        return ()
    found: dict[tuple[int, ...], Split] = {}

    def value(split: Split) -> float:
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
