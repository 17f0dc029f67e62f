"""Sums and maxima over runs of consecutive layers, answered without walking them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_CELLS = 2**19
"""Tables of sums may have so many numbers: 4 MiB, and there are some for every micro-batch size."""
BANDS = (0, 4, 8, 16, 32)
"""Layers from one use to the next up to which they may be told apart from those that are farther."""


def sums_before(values: Any) -> Floats:
    """Sums of what comes before each position: `total(i, j) = before[j] - before[i]`."""
    return np.concatenate(([0.0], np.cumsum(values)))


class Use(NamedTuple):
    """A thing of `amount` is used at layer `at`; `previous` is where it was used or made before that, -1: nowhere."""

    at: int
    previous: int
    amount: float


class IntervalSum:
    """Sum of what the layers [first, last) use, each thing counted once however often they use it.

    A use counts when it is the first in the interval:

        total(first, last) = sum of amount over uses with  previous < first <= at < last

    Four kinds of use keep every query short: `previous == -1` is a prefix sum; `previous == at - 1` counts for
    `first == at` alone; those a few layers apart (branches) only ask how far `last` is from `first`, up to as many
    layers (`_Band`); the rest (tied parameters, long skips) have a table over their own positions where these are few,
    O(log n) a query, and elsewhere all of both go into `_Dominance`, O(log^2 n).

    >>> tied = IntervalSum(3, [Use(0, -1, 10.0), Use(2, 0, 10.0)])     # one parameter of 10, used by layers 0 and 2
    >>> [float(tied(first, last)) for first, last in ((0, 1), (0, 3), (1, 2), (2, 3))]
    [10.0, 10.0, 0.0, 10.0]
    """

    def __init__(self, num_layers: int, uses: Iterable[Use] | Floats) -> None:
        """uses: as Use, or [k, 3] of the same columns."""
        table = uses if isinstance(uses, np.ndarray) else np.array(list(uses), dtype=float).reshape(-1, 3)
        at, previous, amount = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2]
        fresh, near = previous < 0, previous == at - 1
        near &= ~fresh
        far = ~(fresh | near)
        self._prefix = sums_before(np.bincount(at[fresh], amount[fresh], num_layers))
        self._adjacent = np.bincount(at[near], amount[near], num_layers + 1)
        self.prefix: Floats | None = None if far.any() or near.any() else self._prefix
        """Totals up to each position where `total(i, j) = prefix[j] - prefix[i]`; None where things are shared."""
        self._others = list(_summed(num_layers, at[far], previous[far], amount[far])) if far.any() else []

    @cached_property
    def prefix_list(self) -> list[float] | None:
        return None if self.prefix is None else self.prefix.tolist()

    def __call__(self, first: ArrayLike, last: ArrayLike) -> Any:
        """Totals of the intervals [first, last), first < last; arrays of positions broadcast."""
        i, j = np.asarray(first), np.asarray(last)
        total = self._prefix[j] - self._prefix[i] + self._adjacent[i]
        for other in self._others:
            total = total + other(i, j)
        return total


def _summed(num_layers: int, at: Ints, previous: Ints, amount: Floats) -> Iterator[_Band | _Table | _Dominance]:
    """Structures that together tell the sum of amount over `previous < first <= at < last`."""
    cells = [width * num_layers + _Table.cells(at, previous, at - previous > width) for width in BANDS]
    if min(cells) > MOST_CELLS:
        yield _Dominance(num_layers, at, previous, amount)
        return
    width = BANDS[cells.index(min(cells))]
    far = at - previous > width
    if width:
        yield _Band(num_layers, width, at[~far], previous[~far], amount[~far])
    if far.any():
        yield _Table(num_layers, at[far], previous[far], amount[far])


class _Band:
    """Uses at most `width` layers after the one before them: all that `first` is between are over by first + width."""

    def __init__(self, num_layers: int, width: int, at: Ints, previous: Ints, amount: Floats) -> None:
        self._table = np.zeros((num_layers + 1, width + 1))
        """By `first` and by last - first, up to the width."""
        for after in range(width):
            within = at - after > previous
            self._table[:, after + 1] = np.bincount(at[within] - after, amount[within], num_layers + 1)
        np.cumsum(self._table, axis=1, out=self._table)
        self._width = width

    def __call__(self, first: Any, last: Any) -> Any:
        return self._table[first, np.minimum(last - first, self._width)]


class _Table:
    """Sums over the distinct values of `previous` up to each, and over those of `at`."""

    def __init__(self, num_layers: int, at: Ints, previous: Ints, amount: Floats) -> None:
        rows, row = np.unique(previous, return_inverse=True)
        columns, column = np.unique(at, return_inverse=True)
        self._table = np.zeros((len(rows) + 1, len(columns) + 1))
        np.add.at(self._table, (row + 1, column + 1), amount)
        np.cumsum(self._table, axis=0, out=self._table)
        np.cumsum(self._table, axis=1, out=self._table)
        every = np.arange(num_layers + 1)
        self._row, self._column = np.searchsorted(rows, every), np.searchsorted(columns, every)

    @staticmethod
    def cells(at: Ints, previous: Ints, some: NDArray[np.bool_]) -> int:
        """Size of the table for some of the uses."""
        return (len(np.unique(previous[some])) + 1) * (len(np.unique(at[some])) + 1)

    def __call__(self, first: Any, last: Any) -> Any:
        row = self._row[first]
        return self._table[row, self._column[last]] - self._table[row, self._column[first]]


class _Dominance:
    """The same in O(k log k) memory for k uses: a wavelet matrix (Claude & Navarro 2012) over `previous`, by `at`.

    A level sorts the uses by one bit of `previous`, zeros first, and remembers for each place how many zeros, and how
    much of their amount, come before it. From the highest bit on, a query keeps those uses whose bits so far equal
    those of `first`, and adds the zeros where `first` has a one: they are smaller.
    """

    def __init__(self, num_layers: int, at: Ints, previous: Ints, amount: Floats) -> None:
        order = np.argsort(at, kind="stable")
        previous, amount = previous[order], amount[order]
        self._start = np.searchsorted(at[order], np.arange(num_layers + 1))
        self._levels: list[tuple[int, Ints, Floats, int]] = []
        for bit in range(int(num_layers).bit_length() - 1, -1, -1):
            zero = (previous >> bit) & 1 == 0
            zeros = np.concatenate(([0], np.cumsum(zero)))
            self._levels.append((bit, zeros, sums_before(amount * zero), int(zeros[-1])))
            order = np.argsort(~zero, kind="stable")
            previous, amount = previous[order], amount[order]

    def __call__(self, first: Any, last: Any) -> Any:
        low, high = self._start[first], self._start[last]
        total = np.zeros(np.broadcast(first, last).shape)
        for bit, zeros, amounts, num_zeros in self._levels:
            one = (first >> bit) & 1 == 1
            total = total + np.where(one, amounts[high] - amounts[low], 0.0)
            low = np.where(one, num_zeros + low - zeros[low], zeros[low])
            high = np.where(one, num_zeros + high - zeros[high], zeros[high])
        return total


class IntervalMax:
    """The largest of values[first:last], any number of intervals at once: O(n log n) to build, O(1) a query.

    The table of Bender & Farach-Colton 2000: row k holds the largest of the 2^k values from each place on.

    >>> largest = IntervalMax(np.array([3.0, 1.0, 4.0, 1.0]))
    >>> [float(largest(first, last)) for first, last in ((0, 2), (1, 2), (0, 4))]
    [3.0, 1.0, 4.0]
    """

    def __init__(self, values: Floats) -> None:
        rows = [np.asarray(values, float)]
        while 2 ** len(rows) <= len(values):
            half = 2 ** (len(rows) - 1)
            longer = rows[-1].copy()
            longer[:-half] = np.maximum(longer[:-half], rows[-1][half:])
            rows.append(longer)
        self._rows = np.array(rows)

    def __call__(self, first: ArrayLike, last: ArrayLike) -> Any:
        """Largest over the intervals [first, last), first < last; arrays of positions broadcast."""
        i, j = np.asarray(first), np.asarray(last)
        row = np.frexp(np.maximum(j - i, 1))[1] - 1
        return np.maximum(self._rows[row, i], self._rows[row, np.maximum(j - 2**row, 0)])
