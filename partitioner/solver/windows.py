"""The least of each of many windows of an array, and the least that passes a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


def window_minimum(values: Floats, low: Ints, high: Ints) -> Floats:
    """[..., windows] min of values[..., low:high] for each pair, inf where empty: two powers of two cover a window."""
    lengths = high - low
    levels = np.maximum(np.frexp(np.maximum(lengths, 1).astype(float))[1] - 1, 0)
    least = np.full((*values.shape[:-1], len(low)), np.inf)
    table = values
    for level in range(int(levels.max(initial=0)) + 1):
        here, half = np.flatnonzero((levels == level) & (lengths > 0)), 1 << level
        least[..., here] = np.minimum(table[..., low[here]], table[..., high[here] - half])
        if half >= table.shape[-1]:
            break
        table = np.minimum(table[..., :-half], table[..., half:])
    return least


def least_that_fits(values: Floats, low: Ints, high: Ints, fit: Callable[[Ints, Ints], Flags]) -> tuple[Floats, Ints]:
    """[windows] the least of values[low:high] over those places that fit the window, inf for none; and its place.

    fit: (places, windows) -> whether each pair does. The least of a range is tested; where it does not fit, the range
    is cut there, and in halves, and the parts whose least value is still below the best one that fits are tested next.
    So a window of w places takes log w rounds at most, and few tests where most places fit.
    """
    least, source = np.full(len(low), np.inf), np.zeros(len(low), dtype=np.int64)
    end = np.flatnonzero(low < high)
    low, high = low[end], high[end]
    first = least_places(values)
    while len(end):
        at = first(low, high)
        better = values[at] < least[end]
        end, low, high, at = end[better], low[better], high[better], at[better]
        good = fit(at, end)
        found, place = end[good], at[good]
        order = np.argsort(-values[place], kind="stable")  # of several ranges of one end, the least comes last
        least[found[order]], source[found[order]] = values[place[order]], place[order]
        end, low, high, at = end[~good], low[~good], high[~good], at[~good]
        left, right = (low + at + 1) // 2, (at + 1 + high) // 2
        parts = (low, left), (left, at), (at + 1, right), (right, high)
        end = np.tile(end, 4)
        low, high = (np.concatenate(side) for side in zip(*parts, strict=True))
        some = low < high
        end, low, high = end[some], low[some], high[some]
    return least, source


def least_places(values: Floats) -> Callable[[Ints, Ints], Ints]:
    """Where the least of values[low:high] is, the first of equal ones: a sparse table, two powers of two cover a
    window."""
    tables = [np.arange(len(values))]
    while 2 ** len(tables) <= len(values):
        half = 2 ** (len(tables) - 1)
        table = tables[-1].copy()
        near, far = tables[-1][:-half], tables[-1][half:]
        table[:-half] = np.where(values[far] < values[near], far, near)
        tables.append(table)
    stacked = np.stack(tables)

    def first(low: Ints, high: Ints) -> Ints:
        level = np.frexp((high - low).astype(float))[1] - 1
        near, far = stacked[level, low], stacked[level, high - (1 << level)]
        places: Ints = np.where(values[far] < values[near], far, near)
        return places

    return first


@dataclass(frozen=True, eq=False)
class Runs:
    """By end, the places from which one may come there: runs of consecutive ones, by end and then by place.

    >>> two = Runs(end=np.array([0, 1, 2, 2]), low=np.array([0, 0, 0, 1]), high=np.array([0, 1, 0, 2]))
    >>> two.least(np.array([3.0, 5.0, 0.0]))         # to 0 from nowhere, to 1 from 0, to 2 from 1 alone
    array([inf,  3.,  5.])
    """

    end: Ints
    """[runs] 0 to the last end, each at least once."""
    low: Ints
    high: Ints
    """One past the last place; a run may be empty."""

    @classmethod
    def of(cls, low: Ints) -> Runs:
        """One run for each end: from its low to just before it."""
        ends = np.arange(len(low))
        return cls(ends, low, ends)

    def since(self, low: Ints) -> Runs:
        """Without the places before `low`, by end."""
        return Runs(self.end, np.maximum(self.low, low[self.end]), self.high)

    def least(self, values: Floats) -> Floats:
        """[ends] the least value of those places; inf: there are none."""
        rows, near, far = self._halves
        table = np.full((rows, len(values) + 1), np.inf)
        table[0, :-1] = values
        for row in range(1, rows):
            half = 1 << (row - 1)
            np.minimum(table[row - 1, :-half], table[row - 1, half:], out=table[row, :-half])
        flat = table.ravel()
        least: Floats = np.minimum(flat[near], flat[far])
        return least if self._firsts is None else np.minimum.reduceat(least, self._firsts)

    @cached_property
    def lows(self) -> Ints:
        """[ends] a place up to which, by end, none leads to it or to any later end. Ascending."""
        low = np.where(self.low < self.high, self.low, int(self.end[-1]) + 1)
        if self._firsts is not None:
            low = np.minimum.reduceat(low, self._firsts)
        ascending: Ints = np.minimum.accumulate(low[::-1])[::-1]
        return ascending

    def reached(self, places: Flags, place: int, first: int, last: int) -> Flags:
        """Of the ends [first, last): whether one comes there from any of `places`, flags of those from `place` on."""
        count = np.concatenate(([0], np.cumsum(places)))
        runs = slice(first, last)
        if self._firsts is not None:
            runs = slice(*np.searchsorted(self.end, (first, last)).tolist())
        low, high = (np.clip(side[runs] - place, 0, len(places)) for side in (self.low, self.high))
        some: Flags = count[np.maximum(high, low)] > count[low]
        return some if self._firsts is None else np.logical_or.reduceat(some, self._firsts[first:last] - runs.start)

    def places(self, end: int) -> Ints:
        """Those of one end, ascending."""
        first, last = np.searchsorted(self.end, (end, end + 1))
        runs = zip(self.low[first:last].tolist(), self.high[first:last].tolist(), strict=True)
        return np.concatenate([np.arange(low, high) for low, high in runs])

    @cached_property
    def _firsts(self) -> Ints | None:
        """[ends] the number of its first run; None: each has one."""
        return np.flatnonzero(np.diff(self.end, prepend=-1)) if int(self.end[-1]) + 1 < len(self.end) else None

    @cached_property
    def _halves(self) -> tuple[int, Ints, Ints]:
        """Rows of a table whose row k holds the least of 2^k values from each place on, and an inf behind the last; and
        the cells of it that cover the first and the last half of each run."""
        length, width = self.high - self.low, int(self.end[-1]) + 2
        row = np.frexp(np.maximum(length, 1).astype(float))[1] - 1
        near, far = row * width + self.low, row * width + self.high - (1 << row)
        empty = length <= 0
        near[empty] = far[empty] = width - 1
        return int(row.max()) + 1, near, far
