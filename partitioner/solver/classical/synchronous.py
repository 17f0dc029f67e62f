"""Least sum of the stages plus a weight times the slowest: a step of synchronous training, to first order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from partitioner.solver.classical.loads import Floats

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Options:
    """What stages cost, between positions 0 to n of a line of layers, on each number of devices they may have."""

    devices: tuple[int, ...]
    seconds: Floats
    """[len(devices), n + 1, n + 1] of a stage from one position to another; inf: not possible."""
    standing_bytes: Floats
    """[n + 1, n + 1] held whatever follows."""
    flying_bytes: Floats
    """[n + 1, n + 1] held for the stage itself and once more for every stage after it."""


class Step(NamedTuple):
    """(first, last, devices) of each stage; the value found and what none can beat."""

    stages: tuple[tuple[int, int, int], ...]
    value: float
    lower_bound: float


def least_step(options: Options, devices: int, weight: float, memory_bytes: float = math.inf) -> Step | None:
    """Stages over exactly `devices` devices with the least  sum + weight * slowest;  None: none fits.

    The least sum never grows with the slowest stage allowed, so with sums at both ends a range (low, high] of slowest
    stages cannot beat  sum(high) + weight * low;  ranges are halved until none can beat the best. A sum under a cap is
    a shortest path; where memory binds, its states count the stages that follow, because those are in flight with it
    (the two-level search of Zheng et al. 2022, "Alpa", section 5.2, without its quantised steps).
    """
    every = np.unique(options.seconds[np.isfinite(options.seconds)])

    def cheapest(cap: float) -> tuple[tuple[int, int, int], ...] | None:
        return _shortest(options, devices, cap, memory_bytes)

    def measured(stages: Sequence[tuple[int, int, int]]) -> tuple[float, float]:
        seconds = [float(options.seconds[options.devices.index(d), i, j]) for i, j, d in stages]
        return sum(seconds), max(seconds)

    return _halve(every, cheapest, measured, weight)


def _halve(
    every: Floats,
    cheapest: Callable[[float], tuple[tuple[int, int, int], ...] | None],
    measured: Callable[[Sequence[tuple[int, int, int]]], tuple[float, float]],
    weight: float,
) -> Step | None:
    """Over the values that a slowest stage can have: `every`, ascending."""
    low, high = -1, len(every) - 1
    stages = cheapest(every[high]) if len(every) else None
    if stages is None:
        return None
    total, slowest = measured(stages)
    best, value = stages, total + weight * slowest
    ranges = [(low, int(np.searchsorted(every, slowest)), total)]
    while ranges:
        low, high, total = ranges.pop()
        # slowest stages are every[low + 1 .. high]; the sum is `total` at least
        if total + weight * float(every[low + 1]) >= value * (1 - TOLERANCE) or low + 1 >= high:
            continue
        middle = (low + high) // 2
        stages = cheapest(every[middle])
        if stages is None:
            ranges.append((middle, high, total))
            continue
        found, slowest = measured(stages)
        if found + weight * slowest < value:
            best, value = stages, found + weight * slowest
        ranges.append((middle, high, total))
        ranges.append((low, int(np.searchsorted(every, slowest)), found))
    return Step(tuple(best), value, value)


def _shortest(
    options: Options, devices: int, cap: float, memory_bytes: float
) -> tuple[tuple[int, int, int], ...] | None:
    """From the end: ways[f][d][i] the least sum of f stages that take the layers from i on d devices."""
    n = options.seconds.shape[1] - 1
    seconds = np.where(options.seconds <= cap, options.seconds, math.inf)
    bound = memory_bytes < math.inf
    most = min(n, devices // min(options.devices)) if bound else 1
    start = np.full(n + 1, math.inf)
    start[n] = 0.0
    ways: list[dict[int, Floats]] = [{0: start}]
    came: list[dict[int, tuple[np.ndarray, np.ndarray]]] = [{}]
    if not bound:  # the number of stages does not matter: devices in ascending order
        table, came_from = ways[0], came[0]
        for d in range(1, devices + 1):
            value, at, used = np.full(n + 1, math.inf), np.zeros(n + 1, int), np.zeros(n + 1, int)
            for k, count in enumerate(options.devices):
                if d - count in table:
                    candidates = seconds[k] + table[d - count]
                    place = np.argmin(candidates, axis=1)
                    least = candidates[np.arange(n + 1), place]
                    better = least < value
                    value[better], at[better], used[better] = least[better], place[better], count
            if np.isfinite(value).any():
                table[d], came_from[d] = value, (at, used)
        if devices not in table or not table[devices][0] < math.inf:
            return None
        stages, i, d = [], 0, devices
        while i < n:
            at, used = came_from[d]
            stages.append((i, int(at[i]), int(used[i])))
            i, d = int(at[i]), d - int(used[i])
        return tuple(stages)
    for f in range(1, most + 1):
        need = options.standing_bytes + options.flying_bytes * f
        now: dict[int, Floats] = {}
        came_now: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for d_before, before in ways[f - 1].items():
            for k, count in enumerate(options.devices):
                d = d_before + count
                if d > devices:
                    continue
                candidates = np.where(need <= memory_bytes * count, seconds[k], math.inf) + before
                place = np.argmin(candidates, axis=1)
                least = candidates[np.arange(n + 1), place]
                if d not in now:
                    now[d], came_now[d] = np.full(n + 1, math.inf), (np.zeros(n + 1, int), np.zeros(n + 1, int))
                better = least < now[d]
                now[d][better] = least[better]
                came_now[d][0][better], came_now[d][1][better] = place[better], count
        ways.append(now)
        came.append(came_now)
    ends = [(float(ways[f][devices][0]), f) for f in range(1, most + 1) if devices in ways[f]]
    if not ends or not min(ends)[0] < math.inf:
        return None
    _, f = min(ends)
    stages, i, d = [], 0, devices
    while i < n:
        at, used = came[f][d]
        stages.append((i, int(at[i]), int(used[i])))
        i, d, f = int(at[i]), d - int(used[i]), f - 1
    return tuple(stages)
