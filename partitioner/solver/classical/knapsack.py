"""Each layer in one of several ways, least time within memory: the multiple-choice knapsack."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CLOSE = 1e-12
MOST_STATES = 100_000


class Chosen(NamedTuple):
    """The way of each layer, their time, and what no choice within the memory can beat."""

    ways: tuple[int, ...]
    time: float
    lower_bound: float


def least_time(time: Floats, memory: Floats, limit: float) -> Chosen | None:
    """The ways with the least total time of those that hold at most `limit`; None: none does.

    time, memory: [layers, ways], inf where there is no such way. Partial choices are extended layer by layer; kept are
    those that no other beats in both figures and whose Lagrangian bound, at the best price of memory, is below the best
    found. Exact unless more than MOST_STATES are left.

    >>> least_time(np.array([[1.0, 3.0], [2.0, 3.0]]), np.array([[10.0, 5.0], [10.0, 4.0]]), 15.0)
    Chosen(ways=(0, 1), time=4.0, lower_bound=4.0)
    """
    n = len(time)
    rows = np.arange(n)
    if memory.min(axis=1).sum() > limit:
        return None
    fast = np.lexsort((memory, time), axis=1)[:, 0]
    if memory[rows, fast].sum() <= limit:
        total = float(time[rows, fast].sum())
        return Chosen(tuple(fast.tolist()), total, total)
    price, bound = _best_price(time, memory, limit)
    priced = time + price * memory
    reduced = priced - priced.min(axis=1, keepdims=True)
    ways, best = _rounded(time, memory, limit)
    order = np.argsort(-np.where(np.isfinite(reduced), reduced, 0).max(axis=1), kind="stable")
    leanest = memory.min(axis=1)[order]
    lean_rest = np.append(np.cumsum(leanest[::-1])[::-1][1:], 0.0)
    held, spent, excess = np.zeros(1), np.zeros(1), np.zeros(1)
    history: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    complete = True
    for k, v in enumerate(order):
        options = np.flatnonzero(np.isfinite(time[v]))
        now_held = (held[:, None] + memory[v, options]).ravel()
        now_spent = (spent[:, None] + time[v, options]).ravel()
        now_excess = (excess[:, None] + reduced[v, options]).ravel()
        good = (now_held + lean_rest[k] <= limit * (1 + CLOSE)) & (bound + now_excess < best * (1 - CLOSE))
        index = np.flatnonzero(good)
        index = index[np.lexsort((now_held[index], now_spent[index]))]
        lowest = np.minimum.accumulate(now_held[index]) if len(index) else now_held[index]
        index = index[np.append(True, lowest[1:] < lowest[:-1])] if len(index) else index
        if len(index) > MOST_STATES:
            complete = False
            index = index[np.argsort(now_excess[index], kind="stable")[:MOST_STATES]]
        if not len(index):
            break
        history.append((index // len(options), options[index % len(options)]))
        held, spent, excess = now_held[index], now_spent[index], now_excess[index]
    else:
        at = int(np.argmin(spent))
        best, chosen = float(spent[at]), np.zeros(n, dtype=np.int64)
        for v, (before, way) in zip(order[::-1], history[::-1], strict=True):
            chosen[v], at = way[at], int(before[at])
        ways = chosen
    return Chosen(tuple(ways.tolist()), best, best if complete else min(best, bound))


def _best_price(time: Floats, memory: Floats, limit: float) -> tuple[float, float]:
    """(price, bound): the price of memory at which  sum of min(time + price * memory) - price * limit  is largest."""

    def choice(price: float) -> NDArray[np.int64]:
        ways: NDArray[np.int64] = np.argmin(np.where(np.isfinite(time), time + price * memory, np.inf), axis=1)
        return ways

    rows = np.arange(len(time))
    finite = np.isfinite(time) & np.isfinite(memory)
    low, high = 0.0, max(float(time[finite].max()) / max(float(memory[finite].max()), 1e-300), 1e-300)
    while memory[rows, choice(high)].sum() > limit and high < 1e300:
        high *= 4
    for _ in range(100):
        middle = (low + high) / 2
        if memory[rows, choice(middle)].sum() <= limit:
            high = middle
        else:
            low = middle
        if high - low <= 1e-13 * high:
            break
    bounds = []
    for price in (low, high):
        at = choice(price)
        bounds.append((float((time[rows, at] + price * memory[rows, at]).sum()) - price * limit, price))
    bound, price = max(bounds)
    return price, bound


def _rounded(time: Floats, memory: Floats, limit: float) -> tuple[NDArray[np.int64], float]:
    """A choice that fits: all as lean as they can be, then faster for as long as there is room, best worth first."""
    rows = np.arange(len(time))
    lean = np.lexsort((time, memory), axis=1)[:, 0]
    ways = lean.copy()
    room = limit - memory[rows, ways].sum()
    gains = time[rows, lean][:, None] - time
    needs = memory - memory[rows, lean][:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        worth = np.where((gains > 0) & np.isfinite(time), gains / np.maximum(needs, 1e-300), -math.inf)
    for flat in np.argsort(-worth, axis=None, kind="stable"):
        v, way = divmod(int(flat), time.shape[1])
        if worth[v, way] == -math.inf:
            break
        extra = memory[v, way] - memory[v, ways[v]]
        if time[v, way] < time[v, ways[v]] and extra <= room:
            room -= extra
            ways[v] = way
    return ways, float(time[rows, ways].sum())
