"""One setting: its chain, its memory, its clock, and the best of its splits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.graph import CostGraph
from partitioner.intervals import Floats
from partitioner.solver.bounds import Bounds
from partitioner.solver.chain import TOLERANCE, Chain, best_split, cheapest_split
from partitioner.solver.evaluate import Replayer, link_times
from partitioner.solver.layout import Layout, Site
from partitioner.solver.limits import DeviceMemory, Flags
from partitioner.solver.settings import Setting, recomputation
from partitioner.solver.starts import Starts
from partitioner.specs import Cluster, Training

Ints = NDArray[np.int64]

FEW_SPLITS = 2_000
"""Up to so many splits of a setting are all replayed."""
MOST_NEIGHBOURS = 400
MOST_CLIMBS = 3
MOST_ROUNDS = 12
MOST_PROPOSED = 20
MOST_WORK = 20_000_000
"""`Replayer.work` to improve a split: some 0.2 s."""
CLOSE = 1e-9
"""Relative; times that differ by less are equal, and the simpler setting wins."""
LARGE = 30_000
"""Layers x stages of a large problem."""
MANY_STAGES = 16
"""However few the stages, layers count as if there were so many."""
NEARLY = 1e-3
"""Relative; of a large problem, a split so close to the bound is left as it is, and a setting that can gain no more is
left alone. Bound and gap stay what they are."""


Measure = Callable[[Ints, Flags | None], NDArray[np.float64]]
"""Seconds of splits, given which of their stages recompute."""


class Problem:
    """One setting with its chain, its memory and its clock."""

    def __init__(
        self,
        graph: CostGraph,
        cluster: Cluster,
        training: Training,
        setting: Setting,
        starts: Starts,
        layout: Layout | None = None,
    ) -> None:
        self.graph, self.cluster, self.training, self.setting, self.starts = graph, cluster, training, setting, starts
        self.layout = layout or Layout(Site(cluster, training), setting.devices)
        self.recompute: Literal["never", "always", "where needed"] = recomputation(training)
        self.replayer = Replayer(
            graph, cluster, setting, self.layout, recompute=self.recompute == "always", shard=training.shard
        )

    @cached_property
    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.graph, self.training, self.setting, self.layout, self.recompute)

    @cached_property
    def limits(self) -> DeviceMemory | None:
        """None: memory cannot bind."""
        return None if self.memory.never_bind() else self.memory

    @cached_property
    def bounds(self) -> Bounds:
        return Bounds(self.replayer, self.starts, self.limits, self._again_s)

    def quick_s(self) -> float:
        """`Bounds.quick`, which does not ask for memory."""
        return Bounds(self.replayer, self.starts, None, None).quick()

    @property
    def is_large(self) -> bool:
        return self.graph.num_layers * max(self.setting.num_stages, MANY_STAGES) > LARGE

    @property
    def slack(self) -> float:
        """Relative; what is not worth looking for."""
        return NEARLY if self.is_large else CLOSE

    @property
    def _again_s(self) -> Any:
        may = self.limits is not None and self.limits.lean is not None
        return self.replayer.costs.forward_before_s if may else None

    def fitting(self, cuts: Ints) -> Flags:
        """[rows] whether all stages of each split fit, recomputing where they must."""
        if self.limits is None:
            return np.ones(len(cuts), dtype=np.bool_)
        full = self._full(self.limits, cuts)
        if self.setting.stages_per_rank > 1:
            fit: Flags = np.array(np.less_equal(self.held_by_ranks(self.limits, cuts), self.layout.room).all(axis=1))
            return fit
        if isinstance(self.limits.lean, DeviceMemory):
            full &= self._full(self.limits.lean, cuts)
        flags: Flags = np.logical_not(full.any(axis=1))
        return flags

    def recomputed(self, cuts: Ints) -> Flags | None:
        """[rows, p] the stages that must recompute to fit; None: none does, or all do, at a cost already counted."""
        if self.limits is None or self.limits.lean is None:
            return None
        return self._full(self.limits, cuts)

    def _full(self, memory: DeviceMemory, cuts: Ints) -> Flags:
        """[rows, p] what does not fit."""
        edges = self._edges(cuts)
        flags: Flags = np.logical_not(memory.fits(np.arange(self.setting.num_stages), edges[:, :-1], edges[:, 1:]))
        return flags

    def held_by_ranks(self, memory: DeviceMemory, cuts: Ints) -> Floats:
        """[rows, places] bytes of the stages of each rank together."""
        edges, places = self._edges(cuts), np.array(self.setting.places)
        needed = memory.bytes(np.arange(self.setting.num_stages), edges[:, :-1], edges[:, 1:])
        held = np.zeros((self.setting.num_places, len(cuts)))
        np.add.at(held, places, needed.T)
        return held.T

    @cached_property
    def chain(self) -> Chain:
        """The first-order view: equal replicas at their slowest, everything that crosses a cut goes over it."""
        costs, site, places = self.replayer.costs, self.layout.site, self.replayer.places
        speeds = tuple(self.replayer.speeds.min(axis=0).tolist())
        kinds: dict[tuple[bool, ...], Any] = {}
        hops = [np.zeros(self.graph.num_layers + 1)]
        lines = range(self.layout.num_lines)
        apart = np.array([self.layout.apart(line, places[:-1], places[1:]) for line in lines]).T
        for some in apart.tolist():
            key = tuple(sorted(set(some)))
            if key not in kinds:
                links = [site.inter if one else site.intra for one in key]
                kinds[key] = np.max(
                    [
                        link_times(link, costs.crossing_bytes) + link_times(link, costs.crossing_gradient_bytes)
                        for link in links
                    ],
                    axis=0,
                )
            hops.append(kinds[key])
        return Chain(costs.before_s, speeds, self.starts, hops, self.limits, self._again_s)

    def best(self, bound_s: float, *, thorough: bool = True) -> Found | None:
        """The best split found; None: none fits. bound_s: what none can beat. Not `thorough`: no climbing."""
        boundaries = [self.starts.positions(s) for s in range(1, self.setting.num_stages)]
        if self._count(boundaries) <= max(1, FEW_SPLITS if thorough else 1):
            return next(iter(self._ranked(_all_splits(boundaries), 1, proven=True)), None)
        proposed = best_split(self.chain, weight=self.setting.num_microbatches - 1, tolerance=1e-3)
        if not proposed:
            return self._packed(boundaries) if self.setting.stages_per_rank > 1 else None
        cuts = [split.cuts for split in proposed[:MOST_PROPOSED]] + list(self._even(boundaries))
        slow = self.replayer.work(MOST_NEIGHBOURS // 4) * 10 > MOST_WORK
        measure = self.replayer.least_s if slow and self.setting.schedule == "1f1b" else self.replayer.total_s
        enough = CLOSE if thorough and not self.is_large else NEARLY
        ranked = self._ranked(np.unique(cuts, axis=0), MOST_CLIMBS, measure=measure)
        if thorough and self.setting.schedule in ("gpipe", "1f1b"):
            bound_s, ranked = self._narrowed(ranked, bound_s, enough, measure)
        if thorough:
            climbs = 1 if slow or self.is_large else MOST_CLIMBS
            climbed = [
                self._improve(one, bound_s * (1 + enough), MOST_WORK // climbs, measure) for one in ranked[:climbs]
            ]
            ranked = sorted([*climbed, *ranked], key=Found.rank)
        if measure is self.replayer.least_s:
            rows = np.array([one.cuts for one in ranked[:2]], dtype=np.int64)
            ranked = self._ranked(rows, 1) if len(rows) else []
        return ranked[0]._replace(bound_s=bound_s) if ranked else None

    def _narrowed(
        self, ranked: list[Found], bound_s: float, enough: float, measure: Measure
    ) -> tuple[float, list[Found]]:
        """A higher bound and better splits: where none keeps to what a step of so many seconds asks of each stage, no
        step is as short; where one does, it may be short itself."""
        tries = 3 if self.is_large else 6
        for k in range(tries):
            best_s = ranked[0].total_s if ranked else 2 * bound_s
            if best_s <= bound_s * (1 + enough):
                break
            goal_s = bound_s * (1 + TOLERANCE) if k == 0 else bound_s + (best_s - bound_s) / 3
            if (split := cheapest_split(self.chain, lines=self.bounds.windows(goal_s))) is None:
                bound_s = max(bound_s, goal_s * (1 - 2 * TOLERANCE))
            else:
                rows = np.unique([split.cuts, *(one.cuts for one in ranked)], axis=0)
                ranked = self._ranked(rows, MOST_CLIMBS, measure=measure)
                if k and ranked and ranked[0].total_s >= best_s * (1 - CLOSE):
                    break
        return bound_s, ranked

    def _packed(self, boundaries: list[Ints]) -> Found | None:
        """Where stages of one rank fit together although not each fits an equal share of it."""
        free = best_split(self.chain.free(), weight=self.setting.num_microbatches - 1, tolerance=1e-3)
        cuts = [split.cuts for split in free] + list(self._even(boundaries))
        return next(iter(self._ranked(np.unique(cuts, axis=0), 1)), None)

    def _count(self, boundaries: list[Ints]) -> float:
        """The number of splits, or one no smaller."""
        most = math.prod(float(len(row)) for row in boundaries)
        if most <= FEW_SPLITS or len(boundaries) * self.graph.num_layers > LARGE:
            return most
        ways = np.ones(self.graph.num_layers + 1)
        for row in reversed(boundaries):  # ways[k]: to place this boundary and later ones after position k
            here = np.zeros(len(ways))
            here[row] = ways[row]
            ways = np.append(np.cumsum(here[::-1])[::-1][1:], 0.0)
        return float(ways[0])

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

    def _ranked(self, cuts: Ints, most: int, *, proven: bool = False, measure: Measure | None = None) -> list[Found]:
        """The best of these splits that fit: by time, then the most even, then the earliest cuts. measure: of time;
        None: replays."""
        cuts = cuts[self.fitting(cuts)]
        if not len(cuts):
            return []
        totals = (measure or self.replayer.total_s)(cuts, self.recomputed(cuts))
        order = np.argsort(totals, kind="stable")
        order = order[totals[order] <= totals[order[min(most, len(order)) - 1]] * (1 + CLOSE)]
        digits = np.round(np.column_stack((totals[order], self._bottleneck_s(cuts[order]))) / (totals.min() or 1.0), 9)
        order = order[np.lexsort((*cuts[order].T[::-1], *digits.T[::-1]))][:most]
        return [
            Found(float(totals[k]), self, tuple(map(int, cuts[k])), float(totals[k]) if proven else 0.0) for k in order
        ]

    def _bottleneck_s(self, cuts: Ints) -> Any:
        edges, before_s = self._edges(cuts), self.replayer.costs.before_s
        return ((before_s[edges[:, 1:]] - before_s[edges[:, :-1]]) / self.replayer.speeds.min(axis=0)).max(axis=1)

    def _improve(self, found: Found, enough_s: float, work: float, measure: Measure | None = None) -> Found:
        """Hill climbing: all runs of consecutive cuts moved together by one step, first long steps, then short ones.

        Moving a run hands one layer from the stage after it to the stage before it, and leaves the sizes between alike.
        """
        n, p = self.graph.num_layers, self.setting.num_stages
        step = 1 << max(0, (n // (4 * p)).bit_length() - 1)
        most = MOST_NEIGHBOURS
        while measure is None and most > 2 * len(found.cuts) and self.replayer.work(most) > work / 4:
            most //= 2
        each = p * most * 20 if measure is not None else self.replayer.work(most)
        for _ in range(MOST_ROUNDS):
            if found.total_s <= enough_s or work < each:
                break
            work -= each
            better = self._ranked(self._neighbours(found.cuts, step, most), 1, measure=measure)
            if better and better[0].total_s < found.total_s * (1 - CLOSE):
                found = better[0]
            elif step == 1:
                break
            else:
                step //= 2
        return found

    def _neighbours(self, cuts: tuple[int, ...], step: int, most: int) -> Ints:
        num_cuts = len(cuts)
        longest = max(1, min(num_cuts, most // (2 * num_cuts)))
        runs = [(a, b) for length in range(1, longest + 1) for a, b in _runs(num_cuts, length)]
        moved = np.tile(np.array(cuts), (2 * len(runs), 1))
        for k, (a, b) in enumerate(runs):
            moved[2 * k, a:b] += step
            moved[2 * k + 1, a:b] -= step
        inside = ((moved > 0) & (moved < self.graph.num_layers)).all(axis=1)
        inside &= (np.diff(self._edges(moved), axis=1) > 0).all(axis=1)
        moved = moved[inside]
        allowed: Ints = moved[self.starts.allow(moved)]
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
    bound_s: float
    """No split of the setting is faster."""

    @property
    def setting(self) -> Setting:
        return self.problem.setting

    @property
    def bottleneck_s(self) -> float:
        """Seconds of the slowest stage, all micro-batches."""
        each = self.problem._bottleneck_s(np.array([self.cuts], dtype=np.int64).reshape(1, -1))
        return float(each[0]) * self.setting.num_microbatches

    @property
    def recompute(self) -> tuple[bool, ...]:
        """By stage."""
        if self.problem.recompute == "always":
            return (True,) * self.setting.num_stages
        flags = self.problem.recomputed(np.array([self.cuts], dtype=np.int64).reshape(1, -1))
        return (False,) * self.setting.num_stages if flags is None else tuple(flags[0].tolist())

    def rank(self) -> tuple[Any, ...]:
        """Order of preference: time to nine digits, less recomputed, simpler, more even, the cluster's own order."""
        return (
            float(f"{self.total_s:.9e}"),
            sum(self.recompute),
            self.setting.size,
            float(f"{self.bottleneck_s:.9e}"),
            self.problem.layout.number,
            self.cuts,
        )


def _runs(num_cuts: int, length: int) -> Iterable[tuple[int, int]]:
    return ((a, a + length) for a in range(num_cuts - length + 1))


def _all_splits(boundaries: list[Ints]) -> Ints:
    """[rows, p - 1] every ascending choice of one position a boundary."""
    rows = np.zeros((1, 0), dtype=np.int64)
    for row in boundaries:
        pairs = np.column_stack((np.repeat(rows, len(row), axis=0), np.tile(row, len(rows))))
        rows = pairs if rows.shape[1] == 0 else pairs[pairs[:, -1] > pairs[:, -2]]
    return rows
