"""A step of synchronous training over servers, where every stage is a group of devices somewhere on them.

The objective of Fan et al. 2021, "DAPPLE": with the pipeline copied `copies` times, M micro-batches and the longest
stage or transfer b of one micro-batch,

    step = b (M - 1) + one micro-batch through all stages and transfers + max over stages s of (reduction_s - s b, 0)
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from partitioner.solver.classical.ideals import Flags, Ints
from partitioner.solver.classical.loads import Floats
from partitioner.solver.windows import window_minimum

CLOSE = 1e-9
MOST_EVALUATIONS = 64
"""Shortest paths that are looked for with one number of copies."""


@dataclass(frozen=True)
class Line:
    """Positions 0 to n of a line of layers: what lies before each, and what crosses it; of the whole batch."""

    before_s: Floats
    parameters_before: Floats
    reduced_to: Ints
    """[n + 1] the position up to which a stage's parameters are reduced that ends at each."""
    crossing_bytes: Floats
    trips: int = 2
    """How often a transfer holds its link for a micro-batch: there and back."""


@dataclass(frozen=True)
class Servers:
    """Devices by server, and bytes a second."""

    sizes: tuple[int, ...]
    within_bytes_per_s: float
    between_bytes_per_s: float
    """From a stage to one on another server."""
    across_bytes_per_s: float
    """To a group that lies on several servers, and for its reductions."""

    def transfer_s(self, source: tuple[int, ...], target: tuple[int, ...]) -> float:
        """Seconds a byte from one group to the next; groups as devices by server."""
        at = [k for k, count in enumerate(target) if count]
        if len(at) > 1:
            return 1 / self.across_bytes_per_s
        outside = sum(source) - source[at[0]]
        return outside / sum(source) / self.between_bytes_per_s if outside else 1 / self.within_bytes_per_s

    def reduction_s(self, group: tuple[int, ...]) -> float:
        """Seconds a byte of reducing over a group: on one server over pairs of devices at once."""
        n = sum(group)
        if n == 1:
            return 0.0
        rate = self.across_bytes_per_s if sum(count > 0 for count in group) > 1 else self.within_bytes_per_s * (n // 2)
        return 2 * (n - 1) / n / rate


class Group(NamedTuple):
    """A stage of positions [first, last) and how many devices of each server it has, all copies together."""

    first: int
    last: int
    devices: tuple[int, ...]


class Pipeline(NamedTuple):
    """The stages; how often the pipeline is copied; seconds of a step; what none can beat."""

    stages: tuple[Group, ...]
    copies: int
    seconds: float
    lower_bound: float


def step_s(line: Line, servers: Servers, stages: tuple[Group, ...], copies: int, microbatches: int) -> float:
    """The objective."""
    longest = max((line.before_s[j] - line.before_s[i]) / sum(group) for i, j, group in stages)
    through = line.before_s[-1] / copies / microbatches
    for (_, cut, source), (_, _, target) in pairwise(stages):
        a_byte = servers.transfer_s(source, target)
        longest = max(longest, line.trips * line.crossing_bytes[cut] * a_byte)
        through += line.crossing_bytes[cut] / copies / microbatches * a_byte
    b = longest / microbatches
    late = max(
        servers.reduction_s(group) * (line.parameters_before[line.reduced_to[j]] - line.parameters_before[i]) - s * b
        for s, (i, j, group) in enumerate(stages)
    )
    return float(b * (microbatches - 1) + through + max(0.0, late))


def least_step(line: Line, servers: Servers, batch_size: int, samples: int) -> Pipeline | None:
    """The best step found, for micro-batches of `samples`; the lower bound holds for any groups and cuts.

    For every number of copies, boxes of (longest, lateness of reductions) are halved, most promising first: inside one,
    the least transfers are a shortest path by stages, positions and free devices. Groups are placed in three ways, as
    in the paper: on the server with the fewest free devices, on that with the most, or spread over all.
    """
    total = sum(servers.sizes)
    best: Pipeline | None = None
    bound = math.inf
    for copies in range(total, 0, -1):
        microbatches = batch_size // copies // samples
        if microbatches < 1:
            continue
        least = float(line.before_s[-1]) * ((microbatches - 1) / microbatches / total + 1 / copies / microbatches)
        bound = min(bound, least)
        if best is None or least < best.seconds * (1 - CLOSE):
            found = Search(line, servers, copies, microbatches).best(math.inf if best is None else best.seconds)
            if found is not None:
                best = found
    return None if best is None else best._replace(lower_bound=min(bound, best.seconds))


class Move(NamedTuple):
    """From one state of the free devices to another by giving a stage its group."""

    source: int
    target: int
    devices: tuple[int, ...]
    a_byte_s: float
    reduced_byte_s: float


class Search:
    """Stages for one number of copies."""

    def __init__(self, line: Line, servers: Servers, copies: int, microbatches: int) -> None:
        self.line, self.servers, self.copies, self.microbatches = line, servers, copies, microbatches
        self.num_positions = len(line.before_s)

    @cached_property
    def _moves(self) -> tuple[int, dict[tuple[int, float], list[Move]]]:
        """(number of states, moves by group size and seconds of reducing a byte). A state: by server, free devices and
        those of the last group; servers in any order are the same.
        """
        start = tuple(sorted((size, 0) for size in self.servers.sizes))
        number, waiting = {start: 0}, [start]
        moves: dict[tuple[int, float], list[Move]] = {}
        for state in waiting:
            free = sum(one for one, _ in state)
            last = tuple(one for _, one in state)
            for count in range(self.copies, free + 1, self.copies):
                for group in sorted(set(_placed([one for one, _ in state], count))):
                    after = tuple(sorted((one - used, used) for (one, _), used in zip(state, group, strict=True)))
                    if after not in number:
                        number[after] = len(number)
                        waiting.append(after)
                    a_byte = self.servers.transfer_s(last, group) if any(last) else 0.0
                    reduced = self.servers.reduction_s(group)
                    moves.setdefault((count, reduced), []).append(
                        Move(number[state], number[after], group, a_byte, reduced)
                    )
        return len(number), moves

    def best(self, seconds: float) -> Pipeline | None:
        """The best plan faster than `seconds`."""
        line, m = self.line, self.microbatches
        weight, through = (m - 1) / m, float(line.before_s[-1]) / self.copies / m
        low = float(line.before_s[-1]) / sum(self.servers.sizes)
        high = max(float(line.before_s[-1]) / self.copies, low)
        latest = (
            float(line.parameters_before[-1])
            * 2
            / min(self.servers.across_bytes_per_s, self.servers.within_bytes_per_s)
        )
        best = None
        boxes = [(weight * low + through, low, high, 0.0, latest)]
        for _ in range(MOST_EVALUATIONS):
            if not boxes or boxes[0][0] >= seconds * (1 - CLOSE):
                break
            _, low, high, on_time, late = heapq.heappop(boxes)
            stages = self._path(high, late)
            if stages is None:
                continue
            value = step_s(line, self.servers, stages, self.copies, m)
            if value < seconds:
                seconds, best = value, Pipeline(stages, self.copies, value, 0.0)
            moved = sum(
                line.crossing_bytes[a.last] / self.copies / m * self.servers.transfer_s(a.devices, b.devices)
                for a, b in pairwise(stages)
            )
            middle, halfway = (low + high) / 2, (on_time + late) / 2
            boxes_ = (
                [(low, middle, on_time, late), (middle, high, on_time, late)]
                if weight * (high - low) > late - on_time
                else [(low, high, on_time, halfway), (low, high, halfway, late)]
            )
            for box in boxes_:
                if max(weight * (box[1] - box[0]), box[3] - box[2]) > 1e-5 * seconds:
                    heapq.heappush(boxes, (weight * box[0] + through + moved + box[2], *box))
        return best

    def _path(self, longest: float, late: float) -> tuple[Group, ...] | None:
        """Stages with the least transfers, none longer than `longest`, no reduction later than `late`."""
        n = self.num_positions - 1
        num_states, moves = self._moves
        b = longest / self.microbatches
        states = np.full((num_states, n + 1), math.inf)
        states[0, 0] = 0.0
        layers = [states]
        for s in range(sum(self.servers.sizes) // self.copies):
            now = np.full((num_states, n + 1), math.inf)
            for (count, reduced), some in moves.items():
                base = self._base(layers[-1], some, longest)
                if not np.isfinite(base).any():
                    continue
                lows = self._lows(count, reduced, longest, late + s * b)
                minimum = window_minimum(base, lows, np.arange(base.shape[1]))
                np.minimum.at(now, [move.target for move in some], minimum)
            layers.append(now)
            if not np.isfinite(now).any():
                break
        ends = [(float(layer[:, n].min()), k) for k, layer in enumerate(layers)]
        value, k = min(ends)
        if value == math.inf:
            return None
        at, state, stages = n, int(np.argmin(layers[k][:, n])), []
        while k:
            state, first, devices = self._back(layers, k, state, at, longest, late)
            stages.append(Group(first, at, devices))
            at, k = first, k - 1
        return self._named(stages[::-1])

    def _named(self, stages: list[Group]) -> tuple[Group, ...]:
        """With the servers in their own order, which states leave open."""
        servers = [(size, 0) for size in self.servers.sizes]
        named = []
        for first, last, devices in stages:
            order = sorted(range(len(servers)), key=lambda k: servers[k])
            own = [0] * len(servers)
            for k, count in zip(order, devices, strict=True):
                own[k] = count
            servers = [(free - count, count) for (free, _), count in zip(servers, own, strict=True)]
            named.append(Group(first, last, tuple(own)))
        return tuple(named)

    def _base(self, states: Floats, moves: list[Move], longest: float) -> Floats:
        """[moves, positions] transfers so far with that into the stage."""
        a_byte = np.array([move.a_byte_s for move in moves])[:, None]
        moved = a_byte * self.line.crossing_bytes
        base: Floats = states[[move.source for move in moves]] + moved / self.copies / self.microbatches
        base[self.line.trips * moved > longest * (1 + CLOSE)] = math.inf
        return base

    def _lows(self, count: int, reduced: float, longest: float, late: float) -> Ints:
        """[positions] where a stage can begin at the earliest that ends at each."""
        line = self.line
        work = line.before_s - longest * count * (1 + CLOSE)
        lows = np.searchsorted(line.before_s, work, side="left")
        if reduced:
            room = line.parameters_before[line.reduced_to] - late / reduced * (1 + CLOSE)
            lows = np.maximum(lows, np.searchsorted(line.parameters_before, room, side="left"))
        return lows.astype(np.int64)

    def _back(
        self, layers: list[Floats], k: int, state: int, at: int, longest: float, late: float
    ) -> tuple[int, int, tuple[int, ...]]:
        """(state, position, devices of the stage) that a value came from."""
        value = layers[k][state, at]
        b = longest / self.microbatches
        for (count, reduced), some in self._moves[1].items():
            into = [move for move in some if move.target == state]
            if not into:
                continue
            low = self._lows(count, reduced, longest, late + (k - 1) * b)[at]
            base = self._base(layers[k - 1], into, longest)[:, low:at]
            found = np.argwhere(base == value)
            if len(found):
                which, first = found[0]
                return into[which].source, int(low + first), into[which].devices
        raise AssertionError("a value without a way to it")


def _placed(free: list[int], count: int) -> list[tuple[int, ...]]:
    """Ways to take devices: from the servers with the fewest free first, from those with the most first, evenly."""
    ways = []
    for descending in (False, True):
        group, left = [0] * len(free), count
        for k in sorted((k for k in range(len(free)) if free[k]), key=lambda k: free[k], reverse=descending):
            group[k] = min(free[k], left)
            left -= group[k]
        ways.append(tuple(group))
    group, left = [0] * len(free), count
    while left:
        for k in sorted(range(len(free)), key=lambda k: -(free[k] - group[k])):
            if left and group[k] < free[k]:
                group[k] += 1
                left -= 1
    return [*ways, tuple(group)]


def longest_line(held: Flags, crossing_bytes: Floats) -> list[int]:
    """Down-sets of which each holds the one before, from the first to the last: as many as can be, with least bytes."""
    flags = held.astype(np.float32)
    sizes = flags.sum(axis=1)
    order = np.argsort(sizes, kind="stable")
    flags, sizes, costs = flags[order], sizes[order], crossing_bytes[order]
    count, came = np.full(len(order), -1), np.full(len(order), -1)
    spent = np.zeros(len(order))
    count[0] = 0
    for k in range(1, len(order)):
        inside = np.flatnonzero((flags[:k] @ flags[k] == sizes[:k]) & (sizes[:k] < sizes[k]) & (count[:k] >= 0))
        if len(inside):
            best = inside[np.lexsort((spent[inside], -count[inside]))[0]]
            count[k], came[k], spent[k] = count[best] + 1, best, spent[best] + costs[k]
    at, line = len(order) - 1, []
    while at >= 0:
        line.append(int(order[at]))
        at = int(came[at])
    return line[::-1]
