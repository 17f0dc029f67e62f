"""One setting: its chain, its memory, its clock, and the best of its splits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from partitioner.graph import CostGraph
from partitioner.intervals import Floats
from partitioner.solver.bounds import Bounds, least_rate
from partitioner.solver.chain import TOLERANCE, Chain, Leaner, best_split, cheapest_split
from partitioner.solver.evaluate import Replayer
from partitioner.solver.layout import Layout, Site
from partitioner.solver.limits import DeviceMemory, Flags
from partitioner.solver.settings import Setting, savings
from partitioner.solver.starts import Starts
from partitioner.solver.wires import link_times
from partitioner.specs import EXCHANGES, Cluster, Saving, Shard, Training
from partitioner.split import Split

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


MOST_WAYS = 64
"""Up to so many combinations of what the stages of a split can do to save memory are all timed."""


Measure = Callable[[Ints, Ints | None], NDArray[np.float64]]
"""Seconds of splits, given the way in which each of their stages runs."""


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
        self.savings = savings(graph, training, setting.num_stages, setting.num_replicas)
        self.replayer = Replayer(graph, cluster, setting, self.layout, savings=self.savings)

    @cached_property
    def memory(self) -> DeviceMemory:
        """Of stages that run in the first way."""
        return DeviceMemory(self.graph, self.training, self.setting, self.layout, self.savings[0])

    @cached_property
    def memories(self) -> tuple[DeviceMemory, ...]:
        """By way to run."""
        others = (DeviceMemory(self.graph, self.training, self.setting, self.layout, one) for one in self.savings[1:])
        return (self.memory, *others)

    @cached_property
    def limits(self) -> DeviceMemory | None:
        """Of stages that run in the first way; None: memory cannot bind."""
        return None if self.memory.never_bind() else self.memory

    @cached_property
    def bounds(self) -> Bounds:
        return Bounds(self.replayer, self.starts, self.limits, self._leaner)

    def quick_s(self) -> float:
        """`Bounds.quick`, which does not ask for memory."""
        return Bounds(self.replayer, self.starts, None).quick()

    @property
    def is_large(self) -> bool:
        return self.graph.num_layers * max(self.setting.num_stages, MANY_STAGES) > LARGE

    @property
    def slack(self) -> float:
        """Relative; what is not worth looking for."""
        return NEARLY if self.is_large else CLOSE

    @cached_property
    def _leaner(self) -> tuple[Leaner, ...]:
        """The other ways, with the least that they add to a micro-batch.

        What replicas exchange counts at its least rate on the slowest device, and once less than there are
        micro-batches: bounds tell the last of them as sync.
        """
        if self.limits is None:
            return ()
        costs, graph, m = self.replayer.costs, self.graph, self.setting.num_microbatches
        found = []
        for saving, limits in zip(self.savings[1:], self.memories[1:], strict=True):
            more_s = np.zeros(graph.num_layers + 1)
            if saving.recompute and not self.replayer.recompute:
                more_s = more_s + costs.forward_before_s
            if saving.shard != "none" and m > 1:
                exchange, replicas = EXCHANGES[saving.shard], self.setting.num_replicas
                rate = min(map(least_rate, self.layout.sync_links)) * float(self.replayer.speeds.min())
                for times, total in (
                    (exchange.microbatch_gathers, graph.weight_bytes),
                    (exchange.microbatch_scatters, graph.trainable_bytes),
                ):
                    if times and total.prefix is not None:
                        more_s = more_s + (m - 1) / m * times * (replicas - 1) / replicas * rate * total.prefix
            found.append(Leaner(more_s, limits))
        return tuple(found)

    def hopeless(self) -> bool:
        """Whether no split can fit, told without looking at any."""
        return self.limits is not None and self.limits.hopeless(self.memories[1:])

    def fitting(self, cuts: Ints) -> Flags:
        """[rows] whether all stages of each split fit, in some way."""
        flags: Flags = np.ones(len(cuts), dtype=np.bool_)
        if self.limits is not None and self.setting.stages_per_rank > 1:
            flags = np.all(self._ways_on_ranks(cuts) >= 0, axis=1)
        elif self.limits is not None:
            flags = np.all(self._fits(cuts).any(axis=0), axis=1)
        return flags

    def least_bytes(self, cuts: Ints) -> tuple[Floats, Ints]:
        """[rows, p] bytes of each stage in the way in which it holds the least, overhead left out; and which."""
        edges, stages = self._edges(cuts), np.arange(self.setting.num_stages)
        needed = np.array([one.bytes(stages, edges[:, :-1], edges[:, 1:]) for one in self.memories])
        return needed.min(axis=0), needed.argmin(axis=0)

    def ways(self, cuts: Ints) -> tuple[Ints, Ints, bool]:
        """Which split [rows], and the way of each of its stages [rows, p]: of splits that fit, every choice that no
        other is sure to be as fast as, and True. Where these are many, the one that takes each stage the least, and
        False."""
        rows, p = np.arange(len(cuts)), self.setting.num_stages
        if len(self.savings) == 1 or (self.limits is None and p > 1):
            return rows, np.zeros((len(cuts), p), dtype=np.int64), True
        if self.setting.stages_per_rank > 1:
            return rows, self._ways_on_ranks(cuts), False
        worth = self._worth(cuts)
        first = worth.argmax(axis=0)
        if (worth.sum(axis=0) == 1).all():
            return rows, first, True
        quickest = np.where(worth, self._step_s(cuts), np.inf).argmin(axis=0)
        counts = worth.sum(axis=0).prod(axis=1, dtype=float)
        alone, several = np.flatnonzero(counts == 1), np.flatnonzero((counts > 1) & (counts <= MOST_WAYS))
        many = np.flatnonzero(counts > MOST_WAYS)
        found, chosen = [alone, many], [first[alone], quickest[many]]
        for row in several.tolist():
            own = np.array(list(product(*(np.flatnonzero(worth[:, row, stage]) for stage in range(p)))))
            found.append(np.full(len(own), row))
            chosen.append(own)
        return np.concatenate(found), np.concatenate(chosen), not len(many)

    def _worth(self, cuts: Ints) -> Flags:
        """[ways, rows, p] what fits, and what no other way that fits is sure to be as fast as.

        A stage whose forwards and backwards are no longer holds up nobody else more, and itself is done no later where
        its last backward with its sync takes no longer.
        """
        shape = (len(self.savings), *self._shape(cuts))
        worth: Flags = self._fits(cuts) if self.limits is not None else np.ones(shape, dtype=np.bool_)
        if len(self.replayer.levels) == 1:  # recomputing is all that there is to choose
            worth &= np.cumsum(worth, axis=0) == 1
            return worth
        each = [self.replayer.costs_s(cuts, way) for way in range(len(self.savings))]
        costs = [np.stack((f, b, b + sync, optimizer)) for f, b, sync, optimizer in each]
        as_fast = [[(a <= b + TOLERANCE * np.abs(b)).all(axis=(0, 1)) for b in costs] for a in costs]
        kept = worth.copy()
        for way in range(len(costs)):
            for other in range(len(costs)):
                if other != way:
                    equal = as_fast[way][other] if other > way else np.zeros((), bool)
                    kept[way] &= ~(worth[other] & as_fast[other][way] & ~equal)
        return kept

    def _step_s(self, cuts: Ints) -> Floats:
        """[ways, rows, p] seconds of a stage's own step, on its slowest replica."""
        costs, m = [self.replayer.costs_s(cuts, way) for way in range(len(self.savings))], self.setting.num_microbatches
        return np.array([(m * (f + b) + sync + optimizer).max(axis=0) for f, b, sync, optimizer in costs])

    def _shape(self, cuts: Ints) -> tuple[int, int]:
        return len(cuts), self.setting.num_stages

    def _fits(self, cuts: Ints) -> Flags:
        """[ways, rows, p] what fits."""
        edges, stages = self._edges(cuts), np.arange(self.setting.num_stages)
        return np.array([one.fits(stages, edges[:, :-1], edges[:, 1:]) for one in self.memories])

    def _ways_on_ranks(self, cuts: Ints) -> Ints:
        """[rows, p] where ranks have several stages, the first way in which those of all ranks fit together, the same
        for all stages; -1: in none."""
        found = np.full(self._shape(cuts), -1)
        for way in reversed(range(len(self.savings))):
            if self.limits is not None:
                fits = np.less_equal(self.held_by_ranks(self.memories[way], cuts), self.layout.room).all(axis=1)
                found[fits] = way
            else:
                found[:] = way
        return found

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
        return Chain(costs.before_s, speeds, self.starts, hops, self.limits, self._leaner)

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
        rows, ways, complete = self.ways(cuts)
        totals = (measure or self.replayer.total_s)(cuts[rows], ways)
        if len(rows) > len(cuts):  # of each split, the best
            order = np.lexsort((totals, rows))
            order = order[np.unique(rows[order], return_index=True)[1]]
            rows, ways, totals = rows[order], ways[order], totals[order]
        cuts, proven = cuts[rows], proven and complete
        order = np.argsort(totals, kind="stable")
        order = order[totals[order] <= totals[order[min(most, len(order)) - 1]] * (1 + CLOSE)]
        digits = np.round(np.column_stack((totals[order], self._bottleneck_s(cuts[order]))) / (totals.min() or 1.0), 9)
        order = order[np.lexsort((*cuts[order].T[::-1], *digits.T[::-1]))][:most]
        return [
            Found(
                float(totals[k]),
                self,
                tuple(map(int, cuts[k])),
                float(totals[k]) if proven else 0.0,
                tuple(map(int, ways[k])),
            )
            for k in order
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
    ways: tuple[int, ...]
    """By stage, which of the problem's savings."""

    @property
    def setting(self) -> Setting:
        return self.problem.setting

    @property
    def bottleneck_s(self) -> float:
        """Seconds of the slowest stage, all micro-batches."""
        each = self.problem._bottleneck_s(np.array([self.cuts], dtype=np.int64).reshape(1, -1))
        return float(each[0]) * self.setting.num_microbatches

    @property
    def savings(self) -> tuple[Saving, ...]:
        """By stage."""
        return tuple(self.problem.savings[way] for way in self.ways)

    @property
    def split(self) -> Split:
        return self.setting.split(self.cuts, self.savings)

    @property
    def recompute(self) -> tuple[bool, ...]:
        """By stage."""
        return tuple(one.recompute for one in self.savings)

    @property
    def shard(self) -> tuple[Shard, ...]:
        """By stage."""
        return tuple(one.shard for one in self.savings)

    def rank(self) -> tuple[Any, ...]:
        """Order of preference: time to nine digits, less recomputed, less divided, simpler, more even, the cluster's
        own order."""
        return (
            float(f"{self.total_s:.9e}"),
            sum(self.recompute),
            sum(map(get_args(Shard).index, self.shard)),
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
