"""Exact cuts of a chain: the smallest bottleneck, and the least transfer time under any bottleneck."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from partitioner.solver.limits import Flags, Floats, Ints, Limits

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
    limits: Limits | None = None
    """What fits each stage's memory; None: everything."""

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
    """The smallest seconds of the slowest stage over all splits that `starts` allows and that leave room in memory.

    T is bisected. With equal speeds and memory to spare, a later start is never worse for the stages that follow, so T
    is possible exactly when stages that each take all that fits within T reach the end: O(p log n). Elsewhere (a late
    start can leave a layer to a device too slow or too full for it) all positions that a stage can start at are
    followed: O(p n). inf where there is no room for any split.
    """
    prefix: list[float] = chain.prefix_s.tolist()
    simple = len(set(chain.speeds)) == 1 and chain.limits is None
    attained = _by_longest(chain, prefix) if simple else _by_reach(chain)
    largest_layer = max(b - a for a, b in pairwise(prefix))
    low = max(prefix[-1] / sum(chain.speeds), largest_layer / max(chain.speeds))
    high = prefix[-1] / min(chain.speeds)
    if chain.limits is not None:
        if attained(high) is None:
            return math.inf
        low = smallest_bottleneck(replace(chain, limits=None))
    if (found := attained(low)) is not None:
        return found
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if (found := attained(middle)) is None:
            low = middle
        else:
            high = min(found, middle)
    return high


def has_room(chain: Chain) -> bool:
    """Whether some split leaves room on every stage, whatever its time: necessary for one to fit."""
    return _by_reach(chain)(math.inf) is not None


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
            ends = np.searchsorted(chain.prefix_s, chain.prefix_s[starts] + work, side="right") - 1
            if chain.limits is not None:
                ends = np.minimum(ends, chain.limits.far(s)[starts])
            covered = covered_by(starts, ends, n)
            if s + 1 == chain.num_stages:
                return bottleneck if covered[n] else None
            starts = np.flatnonzero(covered & chain.starts[s + 1])
            if not len(starts):
                return None
        return None

    return attained


def covered_by(starts: Ints, ends: Ints, n: int) -> Flags:
    """[n + 1] whether a position is in (start, end] of some pair; ends are not before their starts."""
    change = np.bincount(starts + 1, minlength=n + 2) - np.bincount(ends + 1, minlength=n + 2)
    covered: Flags = np.cumsum(change)[: n + 1] > 0
    return covered


def cheapest_split(
    chain: Chain, bottleneck: float = float("inf"), windows: Sequence[Ints] | None = None
) -> Split | None:
    """The split with the least sum_s whose stages take at most `bottleneck` each and fit their memory; None: none does.

    windows: by stage, for each end the smallest start to consider.

        best[s + 1][j] = hop(s + 1, j) + min over i of best[s][i] + seconds(s, i, j),
                         seconds(s, i, j) <= bottleneck, fits(s, i, j)

    Seconds are differences of prefix sums, so the minimum is one over a sliding window: O(p n log n). Memory narrows
    the window where it is monotone (`roomy`); where the split so found does not fit (`fits` is not monotone: what
    crosses a cut can be wide or narrow), the DP is run again over every pair of the windows, O(p n w) for width w.
    """
    split = _shortest(chain, bottleneck, windows)
    if split is None or chain.limits is None or _all_fit(chain, split.cuts):
        return split
    split = _shortest(chain, bottleneck, windows, memory="windows")
    if split is None or _all_fit(chain, split.cuts):
        return split
    return _shortest(chain, bottleneck, windows, memory="pairs")


def _all_fit(chain: Chain, cuts: tuple[int, ...]) -> bool:
    edges = np.array((0, *cuts, chain.num_layers))
    assert chain.limits is not None
    return bool(chain.limits.fits(np.arange(chain.num_stages), edges[:-1], edges[1:]).all())


def _shortest(
    chain: Chain,
    bottleneck: float,
    windows: Sequence[Ints] | None,
    memory: Literal["ignored", "windows", "pairs"] = "ignored",
) -> Split | None:
    n, p = chain.num_layers, chain.num_stages
    limits = chain.limits if memory != "ignored" else None
    ends = np.arange(n + 1)
    best = np.where(ends == 0, 0.0, np.inf)
    history: list[tuple[Floats, Ints]] = []
    for s, speed in enumerate(chain.speeds):
        least = chain.prefix_s - bottleneck * speed * (1 + TOLERANCE)
        lows = np.searchsorted(chain.prefix_s, least, side="left")
        if windows is not None:
            lows = np.maximum(lows, windows[s])
        if limits is not None:
            lows = np.maximum(lows, limits.near(s))
        base = best - chain.prefix_s / speed
        base[~chain.starts[s]] = np.inf
        history.append((base, lows))
        if limits is None or memory == "windows":
            minimum = _window_minimum(base, lows)
        else:
            minimum = _band_minimum(base, lows, limits.band(s))
        best = minimum + chain.prefix_s / speed
        if s + 1 < p:
            best = np.where(chain.starts[s + 1], best + chain.hops_s[s + 1], np.inf)
    if not np.isfinite(best[n]):
        return None
    cuts, j = [], n
    for s in range(p - 1, -1, -1):
        base, lows = history[s]
        window = base[lows[j] : j]
        if limits is not None and memory == "pairs":
            window = np.where(limits.band(s)[j, -len(window) :], window, np.inf)
        j = int(lows[j] + np.argmin(window))
        cuts.append(j)
    return chain.split(tuple(reversed(cuts[:-1])))


def _window_minimum(values: Floats, lows: Ints) -> Floats:
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


def _band_minimum(values: Floats, lows: Ints, band: Flags) -> Floats:
    """[n + 1] min of values[i] over lows[j] <= i < j where band[j] says that [i, j) fits."""
    ends, (_, width) = np.arange(len(values)), band.shape
    width = min(width, max(1, int((ends - lows).max())))
    padded = np.concatenate((np.full(width, np.inf), values))
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)[: len(values)]  # values[j - width : j]
    inside = np.arange(width) >= (width - (ends - lows))[:, None]
    minimum: Floats = np.where(inside & band[:, -width:], windows, np.inf).min(axis=1)
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

    low = smallest_bottleneck(replace(chain, limits=None))
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
