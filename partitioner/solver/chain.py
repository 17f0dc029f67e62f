"""Exact cuts of a chain: the smallest bottleneck, and the least transfer time under any bottleneck."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

TOLERANCE = 1e-12
"""Relative; sums of floats in another order differ by less."""


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
    starts: Flags
    """[p, n + 1] whether boundary s may be at a position."""
    hops_s: Floats
    """[p, n + 1] seconds of one micro-batch's transfer into stage s, there and back, when it begins at a position."""
    fits: Callable[[int, Any, Any], Any] | None = None
    """fits(stage, first, last): whether these layers fit the stage's memory; arrays broadcast. None: always."""
    roomy: Callable[[int, Any, Any], Any] | None = None
    """As `fits`, but only necessary, and monotone: what holds for a stage holds for every part of it."""

    @property
    def num_layers(self) -> int:
        return len(self.prefix_s) - 1

    @property
    def num_stages(self) -> int:
        return len(self.speeds)

    def stage_s(self, cuts: tuple[int, ...]) -> list[float]:
        """Seconds of one micro-batch on each stage."""
        at = [float(self.prefix_s[k]) for k in (0, *cuts, self.num_layers)]
        return [(at[s + 1] - at[s]) / speed for s, speed in enumerate(self.speeds)]

    def split(self, cuts: tuple[int, ...]) -> Split:
        seconds = self.stage_s(cuts)
        return Split(cuts, sum(seconds) + sum(float(self.hops_s[s + 1, k]) for s, k in enumerate(cuts)), max(seconds))


def start_flags(
    num_layers: int, num_stages: int, allowed: tuple[int, ...], pins: dict[int, int] | None = None
) -> Flags | None:
    """[p, n + 1] where each boundary may be, so that every stage can have a layer; None: there is no such split.

    pins: position -> stage. Boundary s lies after every layer pinned before stage s, and not after one pinned to s or
    later.

    >>> start_flags(4, 2, (1, 3)).astype(int).tolist()
    [[1, 0, 0, 0, 0], [0, 1, 0, 1, 0]]
    """
    flags = np.zeros((num_stages, num_layers + 1), dtype=np.bool_)
    flags[0, 0] = True
    flags[1:, list(allowed)] = True
    for position, stage in (pins or {}).items():
        flags[: stage + 1, position + 1 :] = False
        flags[stage + 1 :, : position + 1] = False
    for s in range(1, num_stages):  # after a possible boundary before it
        first = int(np.argmax(flags[s - 1]))
        flags[s, : first + 1] = False
        if not flags[s].any():
            return None
    for s in range(num_stages - 2, 0, -1):
        last = num_layers - int(np.argmax(flags[s + 1, ::-1]))
        flags[s, last:] = False
        if not flags[s].any():
            return None
    return flags if flags[0, 0] else None


def smallest_bottleneck(chain: Chain) -> float:
    """The smallest seconds of the slowest stage over all splits that `starts` allows; memory is not looked at.

    T is bisected. With equal speeds a later start is never worse for the stages that follow, so T is possible exactly
    when stages that each take all that fits within T reach the end: O(p log n). With unequal speeds a late start can
    leave a layer to a device too slow for it, and all positions that a stage can start at are followed: O(p n).
    """
    prefix: list[float] = chain.prefix_s.tolist()
    attained = _by_longest(chain, prefix) if len(set(chain.speeds)) == 1 else _by_reach(chain)
    largest_layer = max(b - a for a, b in pairwise(prefix))
    low = max(prefix[-1] / sum(chain.speeds), largest_layer / max(chain.speeds))
    if (found := attained(low)) is not None:
        return found
    high = prefix[-1] / min(chain.speeds)
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if (found := attained(middle)) is None:
            low = middle
        else:
            high = min(found, middle)
    return high


def _by_longest(chain: Chain, prefix: list[float]) -> Callable[[float], float | None]:
    """The bottleneck of the split that fills each stage up to T; None: it does not reach the end."""
    before = [np.maximum.accumulate(np.where(row, np.arange(len(row)), -1)).tolist() for row in chain.starts]
    n, speed = chain.num_layers, chain.speeds[0]

    def attained(bottleneck: float) -> float | None:
        at, worst, work = 0, 0.0, bottleneck * speed * (1 + TOLERANCE)
        for boundary in range(1, chain.num_stages):
            reach = before[boundary][bisect_right(prefix, prefix[at] + work) - 1]
            if reach <= at:
                return None
            worst, at = max(worst, (prefix[reach] - prefix[at]) / speed), reach
        worst = max(worst, (prefix[n] - prefix[at]) / speed)
        return worst if worst <= bottleneck * (1 + TOLERANCE) else None

    return attained


def _by_reach(chain: Chain) -> Callable[[float], float | None]:
    """T itself where some split keeps within it, by the set of positions where each stage can start."""
    n = chain.num_layers

    def attained(bottleneck: float) -> float | None:
        starts = np.array([0])
        for s, speed in enumerate(chain.speeds):
            work = bottleneck * speed * (1 + TOLERANCE)
            ends = np.searchsorted(chain.prefix_s, chain.prefix_s[starts] + work, side="right")
            change = np.bincount(starts + 1, minlength=n + 2)[: n + 2] - np.bincount(ends, minlength=n + 2)[: n + 2]
            covered = np.cumsum(change)[: n + 1] > 0
            if s + 1 == chain.num_stages:
                return bottleneck if covered[n] else None
            starts = np.flatnonzero(covered & chain.starts[s + 1])
            if not len(starts):
                return None
        return None

    return attained


def cheapest_split(chain: Chain, bottleneck: float = float("inf")) -> Split | None:
    """The split with the least sum_s whose stages take at most `bottleneck` each and fit their memory; None: none does.

        best[s + 1][j] = hop(s + 1, j) + min over i of best[s][i] + seconds(s, i, j),
                         seconds(s, i, j) <= bottleneck, fits(s, i, j)

    Seconds are differences of prefix sums, so the minimum is one over a sliding window: O(p n log n). Memory narrows
    the window where it is monotone (`roomy`); where the split so found does not fit (`fits` is not monotone: what
    crosses a cut can be wide or narrow), the DP is run again over every pair of the windows, O(p n w) for width w.
    """
    split = _shortest(chain, bottleneck, [None] * chain.num_stages)
    if split is None or chain.fits is None or _all_fit(chain, split.cuts):
        return split
    nearest: list[NDArray[np.int64] | None] = [_nearest(chain, s) for s in range(chain.num_stages)]
    split = _shortest(chain, bottleneck, nearest)
    if split is None or _all_fit(chain, split.cuts):
        return split
    return _shortest(chain, bottleneck, nearest, exactly=True)


def _all_fit(chain: Chain, cuts: tuple[int, ...]) -> bool:
    edges = (0, *cuts, chain.num_layers)
    assert chain.fits is not None
    return all(bool(chain.fits(s, edges[s], edges[s + 1])) for s in range(chain.num_stages))


def _nearest(chain: Chain, stage: int) -> NDArray[np.int64]:
    """[n + 1] for each end j the smallest i such that [i, j) is roomy enough, j where none is; bisected together."""
    assert chain.roomy is not None
    ends = np.arange(chain.num_layers + 1)
    low, high = np.zeros_like(ends), ends.copy()  # the answer is in [low, high]
    while (open_ := low < high).any():
        middle = (low + high) // 2
        good = chain.roomy(stage, np.where(open_, middle, 0), np.where(open_, ends, 1))
        high = np.where(open_ & good, middle, high)
        low = np.where(open_ & ~good, middle + 1, low)
    return low


def _shortest(
    chain: Chain, bottleneck: float, nearest: list[NDArray[np.int64] | None], exactly: bool = False
) -> Split | None:
    n, p = chain.num_layers, chain.num_stages
    ends = np.arange(n + 1)
    best = np.where(ends == 0, 0.0, np.inf)
    history: list[tuple[Floats, NDArray[np.int64]]] = []
    for s, speed in enumerate(chain.speeds):
        least = chain.prefix_s - bottleneck * speed * (1 + TOLERANCE)
        lows = np.searchsorted(chain.prefix_s, least, side="left")
        if (near := nearest[s]) is not None:
            lows = np.maximum(lows, near)
        base = best - chain.prefix_s / speed
        base[~chain.starts[s]] = np.inf
        history.append((base, lows))
        minimum = _fitting_minimum(chain, s, base, lows) if exactly else _window_minimum(base, lows)
        best = minimum + chain.prefix_s / speed
        if s + 1 < p:
            best = np.where(chain.starts[s + 1], best + chain.hops_s[s + 1], np.inf)
    if not np.isfinite(best[n]):
        return None
    cuts, j = [], n
    for s in range(p - 1, -1, -1):
        base, lows = history[s]
        window = base[lows[j] : j]
        if exactly and chain.fits is not None:
            window = np.where(chain.fits(s, np.arange(lows[j], j), j), window, np.inf)
        j = int(lows[j] + np.argmin(window))
        cuts.append(j)
    return chain.split(tuple(reversed(cuts[:-1])))


def _window_minimum(values: Floats, lows: NDArray[np.int64]) -> Floats:
    """[n + 1] min of values[lows[j]:j], inf where empty: a sparse table, two overlapping powers of two a window."""
    ends = np.arange(len(values))
    lengths = ends - lows
    longest = int(lengths.max(initial=0))
    if longest <= 0:
        return np.full(len(values), np.inf)
    levels = np.maximum(np.frexp(np.maximum(lengths, 1).astype(float))[1] - 1, 0)
    tables = [values]
    for level in range(int(levels.max())):
        half, table = 1 << level, tables[-1].copy()
        np.minimum(table[:-half], table[half:], out=table[:-half])
        tables.append(table)
    stacked = np.stack(tables)
    safe = np.where(lengths > 0, lows, 0)
    second = np.maximum(ends - (1 << levels), 0)
    return np.where(lengths > 0, np.minimum(stacked[levels, safe], stacked[levels, second]), np.inf)


def _fitting_minimum(chain: Chain, stage: int, base: Floats, lows: NDArray[np.int64]) -> Floats:
    """[n + 1] min of base[i] over lows[j] <= i < j that fit, pair by pair, some rows at a time."""
    assert chain.fits is not None
    n = chain.num_layers
    minimum = np.full(n + 1, np.inf)
    possible = np.flatnonzero(chain.starts[stage + 1]) if stage + 1 < chain.num_stages else np.array([n])
    width = int((possible - lows[possible]).max(initial=0))
    if width <= 0:
        return minimum
    rows = max(1, 2_000_000 // width)
    for k in range(0, len(possible), rows):
        last = possible[k : k + rows, None]
        first = last - 1 - np.arange(width)
        inside = first >= lows[last]
        first = np.maximum(first, 0)
        good = inside & np.isfinite(base[first])
        good &= chain.fits(stage, np.where(good, first, 0), np.where(good, last, n))
        minimum[last[:, 0]] = np.where(good, base[first], np.inf).min(axis=1)
    return minimum


def best_split(chain: Chain, weight: float, tolerance: float = 0.0) -> tuple[Split, ...]:
    """Splits on the way to the least  sum_s + weight * bottleneck_s,  the best one first; empty: none fits.

    sum_s never grows with the bottleneck allowed, so a range (low, high] of bottlenecks cannot beat
    sum_s(high) + weight * low; ranges are halved, most promising first, until none can beat the best by more than
    `tolerance`, relative. 0 is exact.
    """
    widest = cheapest_split(chain)
    if widest is None:
        return ()
    found = {widest.cuts: widest}

    def value(split: Split) -> float:
        return split.sum_s + weight * split.bottleneck_s

    low = smallest_bottleneck(chain)
    if (tightest := cheapest_split(chain, low)) is not None:
        found[tightest.cuts] = tightest
    ranges = [(widest.sum_s + weight * low, low, widest)]
    best = min(found.values(), key=value)
    while ranges:
        ranges.sort(key=lambda item: (-item[0], item[1]))
        bound, low, upper = ranges.pop()
        if bound >= value(best) * (1 - tolerance) - TOLERANCE * abs(value(best)):
            break
        middle = (low + upper.bottleneck_s) / 2
        if not low < middle < upper.bottleneck_s * (1 - TOLERANCE):
            continue
        split = cheapest_split(chain, middle)
        if split is None:
            ranges.append((upper.sum_s + weight * middle, middle, upper))
            continue
        found[split.cuts] = split
        best = min(best, split, key=value)
        ranges.append((split.sum_s + weight * low, low, split))
        ranges.append((upper.sum_s + weight * middle, middle, upper))
    return tuple(sorted(found.values(), key=lambda split: (value(split), split.cuts)))
