"""One setting: its chain, its memory, its clock, and the best of its splits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.graph import CostGraph
from partitioner.solver.bounds import Bounds
from partitioner.solver.chain import Chain, best_split, cheapest_split
from partitioner.solver.evaluate import Replayer, link_times
from partitioner.solver.limits import DeviceMemory, Flags, Windows
from partitioner.solver.settings import Setting
from partitioner.specs import Cluster, Training

Ints = NDArray[np.int64]

FEW_SPLITS = 2_000
"""Up to so many splits of a setting are all replayed."""
MOST_NEIGHBOURS = 400
MOST_CLIMBS = 3
MOST_ROUNDS = 12
LONG = 4_096
"""Stages x micro-batches from which on a replay takes so long that one climb must do."""
SLACKS = (1.0, 1.005, 1.02)
"""How far above the lower bound splits are proposed that could keep within it."""
CLOSE = 1e-9
"""Relative; times that differ by less are equal, and the simpler setting wins."""


class Problem:
    """One setting with its chain, its memory and its clock."""

    def __init__(
        self,
        graph: CostGraph,
        cluster: Cluster,
        training: Training,
        setting: Setting,
        starts: Flags,
        windows: Windows | None = None,
    ) -> None:
        self.graph, self.cluster, self.training, self.setting, self.starts = graph, cluster, training, setting, starts
        self.replayer = Replayer(graph, cluster, setting)
        self.memory = DeviceMemory(graph, cluster, training, setting, windows)
        self.limits = None if self.memory.never_bind() else self.memory
        """None: memory cannot bind."""
        self.bounds = Bounds(self.replayer, starts, self.limits)

    def fitting(self, cuts: Ints) -> Any:
        """[rows] whether all stages of each split fit."""
        edges = self._edges(cuts)
        if self.limits is None:
            return np.ones(len(cuts), dtype=np.bool_)
        return self.limits.fits(np.arange(self.setting.num_stages), edges[:, :-1], edges[:, 1:]).all(axis=1)

    @cached_property
    def chain(self) -> Chain:
        """The first-order view: equal replicas at their slowest, everything that crosses a cut goes over it."""
        costs, cluster, setting = self.graph.at(self.setting.samples), self.cluster, self.setting
        speeds = tuple(min(cluster.devices[rank].relative_speed for rank in ranks) for ranks in setting.ranks)
        hops = np.zeros(self.starts.shape)
        for s in range(1, setting.num_stages):
            links = {cluster.link(a, b) for a, b in zip(setting.ranks[s - 1], setting.ranks[s], strict=True)}
            times = [
                link_times(link, costs.crossing_bytes) + link_times(link, costs.crossing_gradient_bytes)
                for link in links
            ]
            hops[s] = np.max(times, axis=0)
        return Chain(costs.before_s, speeds, self.starts, hops, self.limits)

    def best(self, bound_s: float) -> Found | None:
        """The best split found; None: none fits. bound_s: what none can beat."""
        boundaries = [np.flatnonzero(row) for row in self.starts[1:]]
        num_splits = math.prod(len(row) for row in boundaries)
        if not boundaries or num_splits <= FEW_SPLITS or self._count(boundaries) <= FEW_SPLITS:
            return next(iter(self._ranked(_all_splits(boundaries), 1, proven=True)), None)
        proposed = best_split(self.chain, weight=self.setting.num_microbatches - 1, tolerance=1e-3)
        if not proposed:
            return None
        cuts = [split.cuts for split in proposed] + list(self._even(boundaries))
        for slack in SLACKS:
            if (split := cheapest_split(self.chain, windows=self.bounds.windows(bound_s * slack))) is not None:
                cuts.append(split.cuts)
        long = self.setting.num_stages * self.setting.num_microbatches > LONG
        climbed = [self._improve(one) for one in self._ranked(np.unique(cuts, axis=0), 1 if long else MOST_CLIMBS)]
        return min(climbed, key=Found.rank, default=None)

    def _count(self, boundaries: list[Ints]) -> int:
        """The number of splits."""
        ways = np.ones(self.graph.num_layers + 1)
        for row in reversed(boundaries):  # ways[k]: to place this boundary and later ones after position k
            here = np.zeros(len(ways))
            here[row] = ways[row]
            ways = np.append(np.cumsum(here[::-1])[::-1][1:], 0.0)
        return int(min(ways[0], 2.0**60))

    def _even(self, boundaries: list[Ints]) -> Iterable[tuple[int, ...]]:
        """The split into equal numbers of layers, as near as the possible cuts allow."""
        n, p = self.graph.num_layers, self.setting.num_stages
        cuts: list[int] = []
        for s, row in enumerate(boundaries, start=1):
            later = row[row > (cuts[-1] if cuts else 0)]
            if not len(later):
                return
            cuts.append(int(later[np.argmin(np.abs(later - n * s / p))]))
        yield tuple(cuts)

    def _ranked(self, cuts: Ints, most: int, proven: bool = False) -> list[Found]:
        """The best of these splits that fit: by time, then the most even, then the earliest cuts."""
        cuts = cuts[self.fitting(cuts)]
        if not len(cuts):
            return []
        totals = self.replayer.total_s(cuts)
        order = np.argsort(totals, kind="stable")
        order = order[totals[order] <= totals[order[min(most, len(order)) - 1]] * (1 + CLOSE)]
        digits = np.round(np.column_stack((totals[order], self._bottleneck_s(cuts[order]))) / (totals.min() or 1.0), 9)
        order = order[np.lexsort((*cuts[order].T[::-1], *digits.T[::-1]))][:most]
        return [Found(float(totals[k]), self, tuple(map(int, cuts[k])), proven) for k in order]

    def _bottleneck_s(self, cuts: Ints) -> Any:
        edges, before_s = self._edges(cuts), self.replayer.costs.before_s
        devices = self.cluster.devices
        speeds = np.array([min(devices[rank].relative_speed for rank in ranks) for ranks in self.setting.ranks])
        return ((before_s[edges[:, 1:]] - before_s[edges[:, :-1]]) / speeds).max(axis=1)

    def _improve(self, found: Found) -> Found:
        """Hill climbing: all runs of consecutive cuts moved together by one step, first long steps, then short ones.

        Moving a run hands one layer from the stage after it to the stage before it, and leaves the sizes between alike.
        """
        n, p = self.graph.num_layers, self.setting.num_stages
        step = 1 << max(0, (n // (4 * p)).bit_length() - 1)
        for _ in range(MOST_ROUNDS):
            better = self._ranked(self._neighbours(found.cuts, step), 1)
            if better and better[0].total_s < found.total_s * (1 - CLOSE):
                found = better[0]
            elif step == 1:
                break
            else:
                step //= 2
        return found

    def _neighbours(self, cuts: tuple[int, ...], step: int) -> Ints:
        num_cuts = len(cuts)
        longest = max(1, min(num_cuts, MOST_NEIGHBOURS // (2 * num_cuts)))
        runs = [(a, b) for length in range(1, longest + 1) for a, b in _runs(num_cuts, length)]
        moved = np.tile(np.array(cuts), (2 * len(runs), 1))
        for k, (a, b) in enumerate(runs):
            moved[2 * k, a:b] += step
            moved[2 * k + 1, a:b] -= step
        edges = self._edges(moved)
        inside = ((moved > 0) & (moved < self.graph.num_layers)).all(axis=1) & (np.diff(edges, axis=1) > 0).all(axis=1)
        moved = moved[inside]
        allowed: Ints = moved[self.starts[np.arange(1, num_cuts + 1), moved].all(axis=1)]
        return allowed

    def _edges(self, cuts: Ints) -> Ints:
        rows = len(cuts)
        return np.column_stack((np.zeros(rows, int), cuts, np.full(rows, self.graph.num_layers)))


class Found(NamedTuple):
    """The best split found of one setting."""

    total_s: float
    """Step + optimizer."""
    problem: Problem
    cuts: tuple[int, ...]
    proven: bool
    """Every split of the setting was replayed: none is faster."""

    @property
    def setting(self) -> Setting:
        return self.problem.setting

    def rank(self) -> tuple[Any, ...]:
        """Order of preference: the time to nine digits, the simpler setting, earlier cuts."""
        return (float(f"{self.total_s:.9e}"), self.setting.size, self.cuts)


def _runs(num_cuts: int, length: int) -> Iterable[tuple[int, int]]:
    return ((a, a + length) for a in range(num_cuts - length + 1))


def _all_splits(boundaries: list[Ints]) -> Ints:
    """[rows, p - 1] every ascending choice of one position a boundary."""
    rows = np.zeros((1, 0), dtype=np.int64)
    for row in boundaries:
        pairs = np.column_stack((np.repeat(rows, len(row), axis=0), np.tile(row, len(rows))))
        rows = pairs if rows.shape[1] == 0 else pairs[pairs[:, -1] > pairs[:, -2]]
    return rows
