"""The max-load problem: layers over devices of several kinds so that the busiest one, transfers included, is least."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from partitioner.solver.classical.branching import most_even_split
from partitioner.solver.classical.frontier import sample
from partitioner.solver.classical.ideals import Flags, Ints, condense, down_sets
from partitioner.solver.classical.loads import CLOSE, Floats, Loads, Placement, average_bound, exchange

MOST_IDEALS = 40_000
ROUND = 1_500
"""With more down-sets than that, a sample of them is looked at first."""
ROWS, COLUMNS = 512, 4_096


def place_in_order(loads: Loads, groups: Sequence[Sequence[int]] = ()) -> Placement | None:
    """The best placement in which devices hold consecutive parts of some order that the edges allow; None: none fits.

    Layers of a group share a device. Exact where the down-sets are at most MOST_IDEALS: shortest path over pairs of
    down-sets, bounded by the best that a sample of them gives. Elsewhere the best over a sample, or what is best
    without transfers (`most_even_split`), which bounds it as well.
    """
    labels = condense(loads.num_layers, loads.edges, groups)
    merged = loads.merged(labels)
    while len(set(fewer := _without_pendants(merged).tolist())) < merged.num_layers:
        labels = np.array(fewer)[labels]
        merged = loads.merged(labels)
    ideals = down_sets(merged.num_layers, merged.edges, MOST_IDEALS)
    bound = average_bound(merged)
    found: Placement | None = None
    best = math.inf
    if ideals is None and len(merged.kinds) == 1:
        even = most_even_split(merged)
        bound = max(bound, even.lower_bound)
        load = max(merged.load(0, stage) for stage in even.stages)
        if all(merged.fits(0, stage) for stage in even.stages):
            found, best = Placement(tuple((0, stage) for stage in even.stages), load, bound), load
    rounds = [sample(merged)] if ideals is None or len(ideals) > ROUND else []
    rounds += [] if ideals is None else [ideals]
    for some in rounds:
        if best > bound * (1 + CLOSE) and (better := Search(merged, some).best_below(best)) is not None:
            found, best = better, better.load
    if found is None:
        return None
    members = [np.flatnonzero(labels == k).tolist() for k in range(merged.num_layers)]
    devices = tuple((kind, tuple(sorted(v for k in part for v in members[k]))) for kind, part in found.devices)
    return Placement(devices, best, best if ideals is not None or best <= bound * (1 + CLOSE) else bound)


class Search:
    """Shortest paths, by the largest load on the way, over chains of given down-sets."""

    def __init__(self, loads: Loads, ideals: Flags) -> None:
        self.loads = loads
        times = loads.kinds[0].times
        unit = float(times.sum()) / 2**50 or 1.0
        work = ideals.astype(np.float64) @ np.rint(times / unit)  # whole numbers: the same in whatever order
        order = np.lexsort((ideals.sum(axis=1), work))
        self.ideals = ideals[order]
        """Subsets come before what holds them."""
        flags = self.ideals.astype(np.float64)
        self.before = [work[order] * unit, *(flags @ kind.times for kind in loads.kinds[1:])]
        self.memory = flags @ loads.memory_bytes
        self.sizes = flags.sum(axis=1)

    @cached_property
    def _shared(self) -> tuple[Flags, Floats, Floats]:
        """(features of each set, weights, cost alive after each set) with which two sets that hold one another cost

            alive(earlier) + alive(later) - sum of weight over features that both have

        A net is alive when some of its layers are in a set and some are not. Alive in both sets, it is paid for once,
        and not at all when both hold as many of its layers: nothing of it lies between.
        """
        loads = self.loads
        pins = np.zeros((loads.num_layers, len(loads.nets)), dtype=np.float32)
        for h, net in enumerate(loads.nets):
            pins[list(net), h] = 1.0
        held = self.ideals.astype(np.float32) @ pins
        sizes = pins.sum(axis=0)
        alive = (held > 0) & (held < sizes)
        small, costs = sizes <= 2, loads.net_costs
        features, weights = [alive], [np.where(small, 2 * costs, costs)]
        for value in range(1, int(sizes.max(initial=0))):
            some = np.flatnonzero(~small & (sizes > value))
            features.append(held[:, some] == value)
            weights.append(costs[some])
        return np.concatenate(features, axis=1), np.concatenate(weights), alive @ costs

    @property
    def alive(self) -> Floats:
        """Cost of the nets that each down-set divides."""
        return self._shared[2]

    @cached_property
    def _with_shared(self) -> Flags:
        return np.concatenate((self.ideals, self._shared[0]), axis=1)

    def best_below(self, bound: float) -> Placement | None:
        """The best placement with a largest load below `bound`; None: there is none."""
        best = None
        while (found := self._reach(bound)) is not None:
            best, bound = found, found.load
        return best

    def _reach(self, bound: float) -> Placement | None:
        """Some placement with a largest load below `bound`; None: there is none.

        A down-set that was reached with some devices need not be left again with more of them, so each is extended by
        one more device of each kind only where it was new.
        """
        counts = [kind.count for kind in self.loads.kinds]
        whole = len(self.ideals) - 1
        values: dict[tuple[int, ...], Floats] = {}
        """By devices used: the largest load of a way to each down-set that is new there."""
        known: dict[tuple[int, ...], Flags] = {}
        came: dict[tuple[int, ...], tuple[Ints, Ints]] = {}
        for used in sorted(
            itertools.product(*(range(count + 1) for count in counts)), key=lambda used: (sum(used), used)
        ):
            here = np.full(whole + 1, math.inf)
            kind_of, from_ = np.zeros(whole + 1, dtype=np.int64), np.zeros(whole + 1, dtype=np.int64)
            seen = np.zeros(whole + 1, dtype=np.bool_)
            if not any(used):
                here[0] = 0.0
            less = [(q, (*used[:q], n - 1, *used[q + 1 :])) for q, n in enumerate(used) if n]
            for _, one in less:
                seen |= known[one]
            later = np.flatnonzero(self._hopeful(used, bound) & ~seen)
            for q, one in less:
                for rows, found, sources in self._extend(q, values[one], later, bound):
                    better = found < here[rows]
                    here[rows[better]] = found[better]
                    kind_of[rows[better]], from_[rows[better]] = q, sources[better]
            values[used], known[used], came[used] = here, seen | (here < math.inf), (kind_of, from_)
            if here[whole] < math.inf:
                return self._placement(used, float(here[whole]), came)
        return None

    def _placement(
        self, used: tuple[int, ...], load: float, came: dict[tuple[int, ...], tuple[Ints, Ints]]
    ) -> Placement:
        at, devices = len(self.ideals) - 1, []
        while at:
            q, source = int(came[used][0][at]), int(came[used][1][at])
            devices.append((q, tuple(np.flatnonzero(self.ideals[at] & ~self.ideals[source]).tolist())))
            at, used = source, (*used[:q], used[q] - 1, *used[q + 1 :])
        devices.reverse()
        assert sorted(v for _, part in devices for v in part) == list(range(self.loads.num_layers))
        return Placement(tuple(devices), load, 0.0)

    def _hopeful(self, used: tuple[int, ...], bound: float) -> Flags:
        """Down-sets that the used devices can have done within the bound, with the others able to do the rest.

        All work is measured in the first kind's time; what is alive in between is paid for on both sides by kinds that
        pay, where no other kind could have it.
        """
        loads, (first, *_) = self.loads, self.loads.kinds
        work, alive = self.before[0], self._shared[2]
        hopeful = np.ones(len(work), dtype=np.bool_)
        for devices, amount in (
            (used, work),
            ([kind.count - n for kind, n in zip(loads.kinds, used, strict=True)], work[-1] - work),
        ):
            pace = sum(n * exchange(kind, first) for n, kind in zip(devices, loads.kinds, strict=True) if n)
            room = bound * pace if pace else 0.0  # no device has no room, not even within an infinite bound
            pays = all(kind.pays or not n for n, kind in zip(devices, loads.kinds, strict=True))
            hopeful &= amount + (alive if pays else 0.0) <= room * (1 + CLOSE)
        return hopeful

    def _extend(self, q: int, previous: Floats, later: Ints, bound: float) -> Iterator[tuple[Ints, Floats, Ints]]:
        """(down-sets, their smallest largest load, the down-set before) with one more device of kind `q`, in blocks."""
        for rows, blocks in self.blocks(q, np.flatnonzero(previous < bound), later, bound):
            values, sources = np.full(len(rows), math.inf), np.zeros(len(rows), dtype=np.int64)
            for columns, load in blocks:
                np.maximum(load, previous[columns], out=load)
                keep_least(values, sources, load, columns)
            good = values < bound * (1 - CLOSE)
            yield rows[good], values[good], sources[good]

    def blocks(
        self, q: int, earlier: Ints, later: Ints, bound: float
    ) -> Iterator[tuple[Ints, Iterator[tuple[Ints, Floats]]]]:
        """Loads of a device of kind `q` from earlier to later down-sets, all that could be below `bound` among them:
        (some of the later ones, (some of the earlier ones, [later, earlier] loads)); inf where there is no such stage.
        """
        if not len(earlier) or not len(later):
            return
        kind, before = self.loads.kinds[q], self.before[q]
        # weighed far above any load: a layer of the earlier set that the later does not have
        penalty = 4.0 * (float(before[-1]) + float(self.loads.net_costs.sum()) + 1.0)
        features, weights = self.ideals, np.full(self.loads.num_layers, -penalty)
        ends = np.zeros(len(before))
        if kind.pays:
            _, costs, ends = self._shared
            features, weights = self._with_shared, np.concatenate((weights, -costs))
        least = self.before[0] - bound * exchange(kind, self.loads.kinds[0]) * (1 + CLOSE)

        def block(rows: Ints) -> Iterator[tuple[Ints, Floats]]:
            low = int(np.searchsorted(self.before[0][earlier], least[rows[0]]))
            high = int(np.searchsorted(earlier, rows[-1]))
            left = features[rows] * weights
            for j in range(low, high, COLUMNS):
                columns = earlier[j : min(j + COLUMNS, high)]
                load: Floats = left @ features[columns].T.astype(np.float64)
                load += (before[rows] + ends[rows])[:, None]
                load += penalty * self.sizes[columns] - before[columns] + ends[columns]
                if kind.memory_bytes < self.memory[-1]:
                    load[self.memory[rows][:, None] - self.memory[columns] > kind.memory_bytes * (1 + CLOSE)] = math.inf
                load[(columns[None, :] >= rows[:, None]) | (load > penalty / 2)] = math.inf
                yield columns, load

        for k in range(0, len(later), ROWS):
            rows = later[k : k + ROWS]
            yield rows, block(rows)


def keep_least(values: Floats, sources: Ints, candidates: Floats, columns: Ints) -> None:
    """Of [rows, columns] candidates the least of each row, where it is below what the row has."""
    at = np.argmin(candidates, axis=1)
    value = candidates[np.arange(len(candidates)), at]
    better = value < values
    values[better], sources[better] = value[better], columns[at[better]]


def _without_pendants(loads: Loads) -> Ints:
    """[n] classes in which a layer that takes no time, has one neighbour and is in one net at most is with that one.

    On the neighbour's device it costs nothing and shares no net that was not shared before, so this loses nothing
    where its memory has room everywhere.
    """
    n = loads.num_layers
    near: list[set[int]] = [set() for _ in range(n)]
    nets: list[list[tuple[int, ...]]] = [[] for _ in range(n)]
    for u, v in loads.edges:
        near[u].add(v)
        near[v].add(u)
    for net in loads.nets:
        for v in net:
            nets[v].append(net)
    free = float(loads.memory_bytes.sum()) <= min(kind.memory_bytes for kind in loads.kinds)
    idle = np.all([kind.times == 0 for kind in loads.kinds], axis=0) & ((loads.memory_bytes == 0) | free)
    merge: dict[int, int] = {}
    for v in np.flatnonzero(idle).tolist():
        if len(near[v]) == 1 and len(nets[v]) <= 1:
            (other,) = near[v]
            if merge.get(other) != v and all(other in net for net in nets[v]):
                merge[v] = other
    return condense(n, loads.edges, [[other, v] for v, other in merge.items()])
