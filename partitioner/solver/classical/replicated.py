"""The slowest stage where every stage has its own number of replicas, on one level of links or on two."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from partitioner.solver.classical.ideals import Flags
from partitioner.solver.classical.loads import Floats


@dataclass(frozen=True)
class Boundaries:
    """Where stages may begin and end: down-sets of the layers, the empty one first, the whole last.

    A stage lies between two of them, where the later holds the earlier: its figures are the differences.
    """

    held: Flags
    """[b, n] the layers before each boundary."""
    seconds: Floats
    """[n] of each layer, forward and backward (or forward alone, for inference)."""
    parameter_bytes: Floats
    """[n] to be reduced over replicas; 0 for inference."""
    activation_bytes: Floats
    """[n] that a micro-batch leaves on the layer's device."""
    crossing_bytes: Floats
    """[b] sent over each boundary."""

    @cached_property
    def before_s(self) -> Floats:
        return self.held.astype(np.float64) @ self.seconds

    @cached_property
    def parameters_before(self) -> Floats:
        return self.held.astype(np.float64) @ self.parameter_bytes

    @cached_property
    def activations_before(self) -> Floats:
        return self.held.astype(np.float64) @ self.activation_bytes

    @cached_property
    def stages(self) -> Flags:
        """[b, b] whether a stage can lie between two boundaries."""
        held = self.held.astype(np.float32)
        sizes = held.sum(axis=1)
        inside: Flags = (held @ held.T == sizes[:, None]) & (sizes[:, None] < sizes)
        return inside

    def layers(self, first: int, last: int) -> tuple[int, ...]:
        return tuple(np.flatnonzero(self.held[last] & ~self.held[first]).tolist())


class Replicated(NamedTuple):
    """A stage between two boundaries and its replicas; on two levels, `inner` are the stages within one replica."""

    first: int
    last: int
    replicas: int
    inner: tuple[Replicated, ...] = ()


class Slowest(NamedTuple):
    """The stages and the seconds of the slowest of stages and transfers; nothing is faster."""

    stages: tuple[Replicated, ...]
    seconds: float


TRIPS = 2.0
"""An activation goes forward and its gradient comes back."""
COPIES = 4.0
"""Parts of the parameters that a replica sends and receives while they are reduced and given out again."""


def slowest_stage(
    chain: Boundaries,
    devices: int,
    bytes_per_s: float,
    *,
    replicate: bool = True,
    pay_transfers: bool = True,
    memory_bytes: float = math.inf,
    trips: float = TRIPS,
) -> Slowest | None:
    """The least slowest stage or transfer over exactly `devices` devices; None: nothing fits.

    With T a stage's share of work and reduction, and X what crosses its ends over its own replicas r,

        best[j][m] = min over i, r of  max(best[i][m - r], T(i, j, r), X(i, j, r))              O(b^2 m^2)

    (Narayanan et al. 2019, "PipeDream", section 3.1). A stage that begins with m' devices used holds the activations of
    ceil((devices - m) / r) micro-batches, m those used up to and with it.
    """
    return _Table(chain, bytes_per_s, pay_transfers, memory_bytes, devices, trips).solve(devices, replicate)


class _Table:
    """The recurrence over one level; `work` [b, b] replaces the seconds of each stage."""

    def __init__(
        self,
        chain: Boundaries,
        bytes_per_s: float,
        pay_transfers: bool,
        memory_bytes: float,
        devices: int,
        trips: float = TRIPS,
        work: Floats | None = None,
        inner_devices: int = 1,
    ) -> None:
        self.chain, self.rate, self.memory_bytes, self.devices = chain, bytes_per_s, memory_bytes, devices
        self.inner_devices = inner_devices
        self.work = chain.before_s - chain.before_s[:, None] if work is None else work
        self.parameters = chain.parameters_before - chain.parameters_before[:, None]
        self.kept = chain.activations_before - chain.activations_before[:, None] + self.parameters
        self.crossing = chain.crossing_bytes * trips if pay_transfers else np.zeros(len(chain.held))
        self.cost: dict[int, Floats] = {}

    def stage_s(self, r: int) -> Floats:
        """[b, b] work and reduction."""
        reduced = COPIES * (r - 1) * self.parameters / (self.rate * r)
        if self.inner_devices > 1:
            reduced[0] /= self.inner_devices  # the first stage's reduction is shared by the devices of a server
        return np.where(self.chain.stages, (self.work + reduced) / r, math.inf)

    def transfer_s(self, r: int) -> tuple[Floats, Floats]:
        """[b, b] into a stage, out of it; the first stage's output is left to the stage that receives it."""
        b = len(self.crossing)
        into = np.tile((self.crossing / (self.rate * r))[:, None], (1, b))
        into[0] = 0.0
        out = np.tile(self.crossing / (self.rate * r), (b, 1))
        out[0] = 0.0
        return into, out

    def solve(self, devices: int, replicate: bool) -> Slowest | None:
        b = len(self.crossing)
        best = np.full((devices + 1, b), math.inf)
        came = np.zeros((devices + 1, b, 2), dtype=np.int64)
        best[0, 0] = 0.0
        costs = {}
        for r in range(1, devices + 1 if replicate else 2):
            into, out = self.transfer_s(r)
            out[:, -1] = 0.0
            costs[r] = np.maximum(self.stage_s(r), np.maximum(into, out))
        for m in range(1, devices + 1):
            for r, cost in costs.items():
                if r > m or not np.isfinite(best[m - r]).any():
                    continue
                value = np.maximum(best[m - r][:, None], cost)
                if self.memory_bytes < math.inf:
                    value[math.ceil((devices - m) / r) * self.kept > self.memory_bytes] = math.inf
                at = np.argmin(value, axis=0)
                least = value[at, np.arange(b)]
                better = least < best[m]
                best[m][better] = least[better]
                came[m][better, 0], came[m][better, 1] = at[better], r
        if not best[devices, b - 1] < math.inf:
            return None
        stages, at_, m = [], b - 1, devices
        while at_:
            source, r = (int(x) for x in came[m, at_])
            stages.append(Replicated(source, at_, r))
            at_, m = source, m - r
        return Slowest(tuple(reversed(stages)), float(best[devices, b - 1]))


def slowest_stage_of_servers(
    chain: Boundaries,
    servers: int,
    devices: int,
    within_bytes_per_s: float,
    between_bytes_per_s: float,
    *,
    trips: float = TRIPS,
) -> Slowest | None:
    """As `slowest_stage` over servers, each stage of which is itself split over a server's devices.

    First every stage alone within a server, with all its devices; what it takes there is then its work between servers
    (PipeDream's two-level optimizer). O(b^3 d^2) for d devices a server.
    """
    inner = _Inner(chain, within_bytes_per_s, devices, trips)
    outer = _Table(
        chain, between_bytes_per_s, True, math.inf, servers, trips, work=inner.whole[devices], inner_devices=devices
    ).solve(servers, True)
    if outer is None:
        return None
    stages = tuple(stage._replace(inner=inner.stages(stage.first, stage.last)) for stage in outer.stages)
    return Slowest(stages, outer.seconds)


class _Inner:
    """The recurrence of `slowest_stage` from every boundary at once."""

    def __init__(self, chain: Boundaries, bytes_per_s: float, devices: int, trips: float) -> None:
        table = _Table(chain, bytes_per_s, True, math.inf, devices, trips)
        b = len(chain.held)
        self.devices = devices
        self.chain, self.table = chain, table
        self.whole: dict[int, Floats] = {}
        """By devices, [b, b]: the slowest of the stages between two boundaries."""
        self.open: dict[int, Floats] = {}
        """Likewise with what leaves the last of them, unless that is the first."""
        self.costs: dict[int, tuple[Floats, Floats]] = {}
        for m in range(1, devices + 1):
            seconds = table.stage_s(m)
            into = (table.crossing / (table.rate * m))[:, None]
            self.costs[m] = np.maximum(seconds, into), np.maximum(np.maximum(seconds, into), into.T)
            whole, open_ = seconds.copy(), seconds.copy()
            for r in range(1, m):
                before, (last, middle) = self.open[m - r], self.costs[r]
                for k in range(1, b - 1):
                    heads = np.flatnonzero(before[:, k] < math.inf)
                    tails = np.flatnonzero(last[k] < math.inf)
                    if len(heads) and len(tails):
                        at = np.ix_(heads, tails)
                        ahead = before[heads, k][:, None]
                        whole[at] = np.minimum(whole[at], np.maximum(ahead, last[k, tails]))
                        if m < devices:
                            open_[at] = np.minimum(open_[at], np.maximum(ahead, middle[k, tails]))
            self.whole[m], self.open[m] = whole, open_

    def stages(self, first: int, last: int) -> tuple[Replicated, ...]:
        """Those behind `whole`, found again from its values."""
        stages: list[Replicated] = []
        m, at, value, is_last = self.devices, last, self.whole[self.devices][first, last], True
        while True:
            if self.table.stage_s(m)[first, at] <= value:
                return (Replicated(first, at, m), *reversed(stages))
            for r in range(1, m):
                cost = self.costs[r][0 if is_last else 1][:, at]
                good = np.flatnonzero(np.maximum(self.open[m - r][first], cost) <= value)
                if len(good):
                    stages.append(Replicated(int(good[0]), at, r))
                    m, at, is_last = m - r, int(good[0]), False
                    break
            else:
                raise AssertionError("a value without stages")
