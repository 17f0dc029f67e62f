"""The slowest stage where every stage has its own data and tensor parallel degrees, and every layer ways to run.

The problem of Tarnawski et al. 2021, "Piper": a layer runs in one of several ways (as it is, or recomputed), a stage
keeps what its micro-batches in flight need, and the stages are in an order that the edges allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from partitioner.solver.classical.frontier import sample
from partitioner.solver.classical.ideals import Flags, Ints, down_sets
from partitioner.solver.classical.knapsack import least_time
from partitioner.solver.classical.loads import Floats, Kind, Loads

CLOSE = 1e-9
MOST_IDEALS = 40_000
SAMPLE = 1_500
ROWS, COLUMNS = 512, 4_096
MOST_PRICES = 64
MOST_CACHED = 30_000_000
"""Stage costs kept at most."""
MOST_ROUNDS = 40
"""Times that a bound is met with a plan whose layers then turn out not to fit as cheaply."""


@dataclass(frozen=True)
class Ways:
    """How layers can run on a number of tensor parallel ranks: [layers, ways], inf where there is no such way."""

    seconds: Floats
    """Of one sample."""
    parameter_bytes: Floats
    flying_bytes: Floats
    """Held for every micro-batch in flight."""
    standing_bytes: Floats
    into_bytes: Floats
    """[edges] moved for one sample where a stage begins at the edge's head."""
    out_bytes: Floats
    """[edges] where a stage ends at the edge's tail."""


@dataclass(frozen=True)
class Sharding:
    """Layers, the order that stages keep, and what they cost by tensor parallel degree."""

    num_layers: int
    edges: tuple[tuple[int, int], ...]
    ways: Mapping[int, Ways]
    bytes_per_s: float
    samples: int
    """Of a batch; data parallel degrees divide it."""
    devices: int
    memory_bytes: float
    data_parallel: bool = True
    """False: every stage has one replica."""


class Sharded(NamedTuple):
    """A stage: its layers, their ways to run, and its degrees."""

    layers: tuple[int, ...]
    ways: tuple[int, ...]
    data: int
    tensor: int


class Found(NamedTuple):
    """The stages in order, seconds of the slowest for one sample, and what none can beat."""

    stages: tuple[Sharded, ...]
    seconds: float
    lower_bound: float


class Piece(NamedTuple):
    """A stage between two down-sets, with its degrees and how many micro-batches it has in flight."""

    first: int
    last: int
    data: int
    tensor: int
    flying: int


def slowest_shard(problem: Sharding) -> Found | None:
    """Stages with the least slowest one; None: nothing fits.

    Which way each layer of a stage runs is a knapsack. Its Lagrangian relaxation bounds a stage from below, and the
    choices that the same prices make, where they fit, from above; both are differences of sums up to a down-set, so all
    stages are looked at together. Paths that the bound allows are then costed exactly, until none is left.
    """
    ideals = down_sets(problem.num_layers, problem.edges, MOST_IDEALS)
    best: Found | None = None
    rounds = [_sample(problem)] if ideals is None or len(ideals) > SAMPLE else []
    rounds += [] if ideals is None else [ideals]
    for some in rounds:
        search = Search(problem, some)
        better = search.below(math.inf if best is None else best.seconds)
        best = better if better is not None else best and best._replace(lower_bound=search.proven)
    if best is not None and ideals is None:
        best = best._replace(lower_bound=min(best.seconds, Search(problem, rounds[0]).even_s()))
    return best


class Search:
    """Paths over chains of given down-sets, from the whole back to the empty one."""

    def __init__(self, problem: Sharding, ideals: Flags) -> None:
        self.problem = problem
        work = np.min([t * ways.seconds.min(axis=1) for t, ways in problem.ways.items()], axis=0)
        """[layers] device seconds of a sample at the least."""
        order = np.lexsort((ideals.sum(axis=1), ideals.astype(np.float64) @ work))
        self.ideals: Flags = ideals[order]
        self.work_before = self.ideals.astype(np.float64) @ work
        tails = np.array([u for u, _ in problem.edges], dtype=np.int64)
        heads = np.array([v for _, v in problem.edges], dtype=np.int64)
        self.alive: Flags = self.ideals[:, tails] & ~self.ideals[:, heads]
        self.inside = self.ideals.astype(np.float32)
        self.sizes = self.inside.sum(axis=1)
        self.degrees = [
            (data, tensor)
            for data in range(1, min(problem.devices, problem.samples) + 1 if problem.data_parallel else 2)
            for tensor in problem.ways
            if problem.samples % data == 0 and data * tensor <= problem.devices
        ]
        self.tables: dict[tuple[int, int, int], Table] = {}
        self.exact: dict[Piece, Costed] = {}
        self.corrected: dict[tuple[int, int, int], list[Piece]] = {}
        self.cache: dict[tuple[int, int, int, bool], Floats] = {}
        self.proven = 0.0
        """No plan over these down-sets is faster."""

    def even_s(self) -> float:
        """All devices busy all the time."""
        return float(self.work_before[-1]) / self.problem.devices

    def below(self, bound: float) -> Found | None:
        """The best plan faster than `bound`; None: there is none."""
        best: tuple[list[Piece], float] | None = None
        path = self._least(bound, optimistic=False)
        if path is not None:
            best = path, self._exactly(path)
            bound = min(bound, best[1])
        for _ in range(MOST_ROUNDS):
            path = self._least(bound, optimistic=True)
            if path is None:
                self.proven = bound
                break
            self.proven = max(self._cost_s(piece, True) for piece in path)
            seconds = self._exactly(path)
            if seconds < bound * (1 - CLOSE):
                best, bound = (path, seconds), seconds
        if best is None:
            return None
        stages = tuple(
            Sharded(tuple(self._layers(piece)), self.exact[piece].ways, piece.data, piece.tensor) for piece in best[0]
        )
        return Found(stages, best[1], min(self.proven, best[1]))

    def _least(self, bound: float, optimistic: bool) -> list[Piece] | None:
        """A path whose slowest stage is least and below `bound`: bisected, then downwards until there is none."""
        low, best = max(self.even_s(), self.proven), None
        while (path := self._path(bound, optimistic)) is not None:
            best = path
            bound = max(self._cost_s(piece, optimistic) for piece in path)
            while bound - low > 1e-4 * bound:
                middle = (low + bound) / 2
                if (path := self._path(middle, optimistic)) is None:
                    low = middle
                else:
                    best, bound = path, max(self._cost_s(piece, optimistic) for piece in path)
        return best

    def _path(self, bound: float, optimistic: bool) -> list[Piece] | None:
        """Stages that all take less than `bound`, on the fewest devices.

        From the end, by s, the sum of data parallel degrees: the micro-batches that a stage of degree d has in flight
        are ceil(s / d). Of two ways to do the same layers with the same s the one with fewer devices is never worse.
        """
        problem, b = self.problem, len(self.ideals)
        spare = problem.devices - np.ceil(self.work_before / bound * (1 - CLOSE)).astype(np.int64)
        used: dict[int, Ints] = {}
        came: dict[int, tuple[Ints, Ints]] = {}
        far = problem.devices + 1
        start = np.full(b, far)
        start[-1] = 0
        used[0] = start
        for s in range(1, min(problem.devices, problem.samples) + 1):
            here, from_, how = np.full(b, far), np.zeros(b, dtype=np.int64), np.zeros(b, dtype=np.int64)
            for h, (data, tensor) in enumerate(self.degrees):
                if s - data not in used:
                    continue
                later = used[s - data]
                columns = np.flatnonzero(later + data * tensor <= problem.devices)
                if not len(columns):
                    continue
                for rows, some, cost in self._blocks(columns, data, tensor, -(-s // data), bound, optimistic):
                    devices = np.where(cost < bound * (1 - CLOSE), later[some] + data * tensor, far)
                    at = np.argmin(devices, axis=1)
                    least = devices[np.arange(len(rows)), at]
                    better = (least < here[rows]) & (least <= spare[rows])
                    here[rows[better]], from_[rows[better]], how[rows[better]] = least[better], some[at[better]], h
            if here[0] < far:
                came[s] = from_, how
                pieces, at_ = [], 0
                while at_ != b - 1:
                    data, tensor = self.degrees[came[s][1][at_]]
                    last = int(came[s][0][at_])
                    pieces.append(Piece(at_, last, data, tensor, -(-s // data)))
                    at_, s = last, s - data
                return pieces
            if (here < far).any():
                used[s], came[s] = here, (from_, how)
        return None

    def _blocks(
        self, columns: Ints, data: int, tensor: int, flying: int, bound: float, optimistic: bool
    ) -> Iterator[tuple[Ints, Ints, Floats]]:
        """(first sets, last sets, seconds of the stages between), in blocks; inf where there is no such stage."""
        b = len(self.ideals)
        everything = np.arange(b)
        if b * b * max(1, len(self.tables)) <= MOST_CACHED:
            key = data, tensor, flying, optimistic
            if key not in self.cache:
                self.cache[key] = self._seconds(everything, everything, data, tensor, flying, math.inf, optimistic)
            yield everything, columns, self.cache[key][:, columns]
            return
        reach = bound * data * tensor * (1 + CLOSE)
        for k in range(0, b, ROWS):
            rows = everything[k : k + ROWS]
            low = int(np.searchsorted(columns, rows[0], side="right"))
            high = int(np.searchsorted(self.work_before[columns], self.work_before[rows[-1]] + reach, side="right"))
            for j in range(low, high, COLUMNS):
                some = columns[j : min(j + COLUMNS, high)]
                yield rows, some, self._seconds(rows, some, data, tensor, flying, bound, optimistic)

    def _seconds(
        self, rows: Ints, columns: Ints, data: int, tensor: int, flying: int, bound: float, optimistic: bool
    ) -> Floats:
        """[rows, columns] seconds of a sample: work and reduction from the table, and what crosses the ends."""
        stage = self.inside[rows] @ self.inside[columns].T == self.sizes[rows][:, None]
        stage &= rows[:, None] < columns
        work = self._table(data, tensor, flying).seconds(rows, columns, stage, bound, optimistic)
        work += self._crossing_s(rows, columns, data, tensor)
        for piece in self.corrected.get((data, tensor, flying), ()):
            i, j = np.flatnonzero(rows == piece.first), np.flatnonzero(columns == piece.last)
            if len(i) and len(j):
                work[i[0], j[0]] = self.exact[piece].lower_bound if optimistic else self.exact[piece].seconds
        return work

    def _crossing_s(self, rows: Ints, columns: Ints, data: int, tensor: int) -> Floats:
        """[rows, columns] seconds that edges take over both ends of a stage; one over both ends is not the stage's."""
        ways = self.problem.ways[tensor]
        into, out = ways.into_bytes, ways.out_bytes
        crossing: Floats = (self.alive[rows] @ into)[:, None] + self.alive[columns] @ out
        crossing -= (self.alive[rows] * (into + out)) @ self.alive[columns].T.astype(np.float64)
        return crossing / (self.problem.bytes_per_s * data)

    def _table(self, data: int, tensor: int, flying: int) -> Table:
        key = data, tensor, flying
        if key not in self.tables:
            self.tables[key] = Table(self.problem, self.ideals, data, tensor, flying)
        return self.tables[key]

    def _cost_s(self, piece: Piece, optimistic: bool) -> float:
        one = np.array([piece.first]), np.array([piece.last])
        return float(self._seconds(*one, piece.data, piece.tensor, piece.flying, math.inf, optimistic)[0, 0])

    def _layers(self, piece: Piece) -> list[int]:
        layers: list[int] = np.flatnonzero(self.ideals[piece.last] & ~self.ideals[piece.first]).tolist()
        return layers

    def _exactly(self, path: list[Piece]) -> float:
        """Seconds of the slowest, with the best ways to run; later rounds know what was found here."""
        for piece in path:
            if piece not in self.exact:
                layers = self._layers(piece)
                table = self._table(piece.data, piece.tensor, piece.flying)
                chosen = least_time(table.time[layers], table.memory[layers], self.problem.memory_bytes)
                moves = float(
                    self._crossing_s(np.array([piece.first]), np.array([piece.last]), piece.data, piece.tensor)[0, 0]
                )
                costed = Costed(math.inf, math.inf, ())
                if chosen is not None:
                    costed = Costed(moves + chosen.time, moves + chosen.lower_bound, chosen.ways)
                self.exact[piece] = costed
                key = piece.data, piece.tensor, piece.flying
                self.corrected.setdefault(key, []).append(piece)
                for optimistic in (True, False):
                    if (*key, optimistic) in self.cache:
                        self.cache[(*key, optimistic)][piece.first, piece.last] = costed[optimistic]
        return max(self.exact[piece].seconds for piece in path)


class Table:
    """One number of replicas, of tensor parallel ranks and of micro-batches in flight: sums up to every down-set."""

    def __init__(self, problem: Sharding, ideals: Flags, data: int, tensor: int, flying: int) -> None:
        ways = problem.ways[tensor]
        rate = problem.bytes_per_s * problem.samples * data
        self.time = ways.seconds / data + 4 * (data - 1) * ways.parameter_bytes / rate
        self.memory = ways.flying_bytes * flying + ways.standing_bytes
        self.memory = np.where(np.isfinite(self.time), self.memory, math.inf)
        self.limit = problem.memory_bytes
        self.flags = ideals.astype(np.float64)
        lacking = ~np.isfinite(self.time).any(axis=1)
        self.lacking = self.flags @ lacking if lacking.any() else None
        self.usable = ~lacking
        fast = np.lexsort((self.memory, self.time), axis=1)[:, 0]
        self.fast_s, self.fast_bytes = self._before(self.time, fast), self._before(self.memory, fast)
        self.lean_bytes = self._before(self.memory, np.argmin(self.memory, axis=1))

    def _before(self, figures: Floats, ways: Ints) -> Floats:
        """[b] sum over the layers of each down-set, each in its way."""
        chosen = figures[np.arange(len(ways)), ways]
        before: Floats = self.flags @ np.where(self.usable, chosen, 0.0)
        return before

    @cached_property
    def _priced(self) -> tuple[Floats, Floats, Floats, Floats]:
        """(prices; by price and down-set: least time + price * memory, and time and memory of the choice made then).

        Layers that are alike would all change their way at one price: each has its own, a millionth apart.
        """
        n = len(self.time)
        apart = 1 + 1e-6 * np.arange(n)[:, None, None] / n
        with np.errstate(divide="ignore", invalid="ignore"):
            slower = self.time[:, :, None] - self.time[:, None, :]
            saved = self.memory[:, None, :] - self.memory[:, :, None]
            turns = np.where((slower > 0) & (saved > 0), slower / saved * apart, np.nan)
        prices = np.unique(turns[np.isfinite(turns)])
        if len(prices) > MOST_PRICES:
            prices = prices[np.linspace(0, len(prices) - 1, MOST_PRICES).astype(np.int64)]
        prices = np.append(prices, 2 * prices[-1:])
        least, time, memory = [], [], []
        with np.errstate(invalid="ignore"):
            for price in prices:
                priced = np.where(np.isfinite(self.time), self.time + price * self.memory, math.inf)
                own = np.where(np.isfinite(self.time), self.time + price / apart[:, 0] * self.memory, math.inf)
                chosen = np.argmin(own - 1e-12 * price * np.where(np.isfinite(self.memory), self.memory, 0.0), axis=1)
                least.append(self._before(priced, np.argmin(priced, axis=1)))
                time.append(self._before(self.time, chosen))
                memory.append(self._before(self.memory, chosen))
        return prices, np.array(least), np.array(time), np.array(memory)

    def seconds(self, rows: Ints, columns: Ints, stage: Flags, bound: float, optimistic: bool) -> Floats:
        """[rows, columns] of the layers between, in ways that fit: at least (optimistic), or what some choice takes."""
        work = self.fast_s[columns] - self.fast_s[rows][:, None]
        held = self.fast_bytes[columns] - self.fast_bytes[rows][:, None]
        limit = self.limit * (1 + CLOSE)
        good = stage & (self.lean_bytes[columns] - self.lean_bytes[rows][:, None] <= limit)
        if self.lacking is not None:
            good &= self.lacking[columns] == self.lacking[rows][:, None]
        work[~good] = math.inf
        i, j = np.nonzero(good & (held > limit) & (work < bound))
        if not len(i):
            return work
        prices, least, time, memory = self._priced
        for k in range(0, len(i), 20_000):
            a, b = rows[i[k : k + 20_000]], columns[j[k : k + 20_000]]
            if optimistic:
                value = (least[:, b] - least[:, a] - prices[:, None] * self.limit).max(axis=0)
                value = np.maximum(value, self.fast_s[b] - self.fast_s[a])
            else:
                value = np.where(memory[:, b] - memory[:, a] <= limit, time[:, b] - time[:, a], math.inf).min(axis=0)
            work[i[k : k + 20_000], j[k : k + 20_000]] = value
        return work


class Costed(NamedTuple):
    """Seconds of a stage with the ways found, what no ways can beat, and the ways."""

    seconds: float
    lower_bound: float
    ways: tuple[int, ...]


def _sample(problem: Sharding) -> Flags:
    """Down-sets that little crosses."""
    first = problem.ways[min(problem.ways)]
    costs = first.into_bytes + first.out_bytes
    kind = Kind(problem.devices, first.seconds.min(axis=1))
    return sample(Loads(problem.edges, problem.edges, costs, np.zeros(problem.num_layers), (kind,)))
