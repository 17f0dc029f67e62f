"""The max-load problem: layers over devices of several kinds so that the busiest one, transfers included, is least."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partitioner.solver.ideals import Flags, Ints, as_flags, condense, down_sets

Floats = NDArray[np.float64]

MOST_IDEALS = 40_000
SAMPLE = 1_500
"""Down-sets that a first, heuristic round looks at."""
BEAM = 24
CLOSE = 1e-9
"""Relative; loads that differ by less are equal."""
ROWS, COLUMNS = 512, 4_096


@dataclass(frozen=True)
class Kind:
    """`count` equal devices: what each layer takes on one, what one can hold, and whether it pays for transfers."""

    count: int
    times: Floats
    memory_bytes: float = math.inf
    pays: bool = True


@dataclass(frozen=True)
class Loads:
    """Layers to be placed. A device's load is the time of its layers plus the cost of every net that it shares.

    A net is a tensor: the layers that make and use it. A device pays for it when it has some of its layers but not all
    of them, once, whether it sends or receives (as PipeDream's and the throughput objective of Tarnawski et al. 2020).
    """

    edges: tuple[tuple[int, int], ...]
    """The order that stages keep to."""
    nets: tuple[tuple[int, ...], ...]
    net_costs: Floats
    memory_bytes: Floats
    kinds: tuple[Kind, ...]

    @property
    def num_layers(self) -> int:
        return len(self.memory_bytes)

    def load(self, kind: int, layers: Sequence[int]) -> float:
        """Of one device with these layers."""
        inside, device = set(layers), self.kinds[kind]
        work = math.fsum(float(device.times[v]) for v in inside)
        if device.pays:
            shared = (len(inside.intersection(net)) for net in self.nets)
            work += math.fsum(
                float(cost)
                for cost, net, held in zip(self.net_costs, self.nets, shared, strict=True)
                if 0 < held < len(net)
            )
        return work

    def fits(self, kind: int, layers: Sequence[int]) -> bool:
        return sum(float(self.memory_bytes[v]) for v in layers) <= self.kinds[kind].memory_bytes * (1 + CLOSE)

    def merged(self, labels: Ints) -> Loads:
        """Classes of layers as single layers; nets within one class are gone, equal nets are added up."""
        count = int(labels.max()) + 1
        nets: dict[tuple[int, ...], float] = {}
        for net, cost in zip(self.nets, self.net_costs, strict=True):
            pins = tuple(sorted({int(labels[v]) for v in net}))
            if len(pins) > 1 and cost > 0:
                nets[pins] = nets.get(pins, 0.0) + float(cost)
        edges = {(int(labels[u]), int(labels[v])) for u, v in self.edges}

        def summed(amounts: Floats) -> Floats:
            return np.bincount(labels, amounts, count).astype(np.float64)

        return Loads(
            tuple(sorted((u, v) for u, v in edges if u != v)),
            tuple(nets),
            np.array(list(nets.values()), dtype=np.float64),
            summed(self.memory_bytes),
            tuple(replace(kind, times=summed(kind.times)) for kind in self.kinds),
        )


@dataclass(frozen=True)
class Placement:
    """Which device has which layers, in the order of the pipeline; the largest load; what no placement can beat."""

    devices: tuple[tuple[int, tuple[int, ...]], ...]
    """(kind, layers) of each device that has any."""
    load: float
    lower_bound: float

    @property
    def gap(self) -> float:
        return max(0.0, self.load / self.lower_bound - 1) if self.lower_bound > 0 else 0.0


def place_in_order(loads: Loads, groups: Sequence[Sequence[int]] = ()) -> Placement | None:
    """The best placement in which devices hold consecutive parts of some order that the edges allow; None: none fits.

    Layers of a group share a device. Exact where the down-sets are at most MOST_IDEALS: shortest path over pairs of
    down-sets, bounded by the best that a sample of them gives. Elsewhere the best over a sample, with a lower bound.
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
    rounds = [sample(merged)] if ideals is None or len(ideals) > SAMPLE else []
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
            pace = sum(n * _exchange(kind, first) for n, kind in zip(devices, loads.kinds, strict=True) if n)
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
        least = self.before[0] - bound * _exchange(kind, self.loads.kinds[0]) * (1 + CLOSE)

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


def _exchange(kind: Kind, first: Kind) -> float:
    """The most work, in time of the first kind, that a device of this kind does in a unit of time."""
    if kind is first:
        return 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = first.times / kind.times
    return float(np.max(ratios[first.times > 0], initial=0.0))


def average_bound(loads: Loads) -> float:
    """All devices busy all the time, and no layer faster than on its best device."""
    first = loads.kinds[0]
    rate = sum(kind.count * _exchange(kind, first) for kind in loads.kinds if kind.count)
    alone = np.min([kind.times for kind in loads.kinds if kind.count], axis=0)
    return max(float(first.times.sum()) / rate, float(alone.max(initial=0.0)))


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


def sample(loads: Loads) -> Flags:
    """Down-sets with little alive between them and the rest: a beam over their sizes, and two plain orders."""
    n = loads.num_layers
    needs: list[set[int]] = [set() for _ in range(n)]
    feeds: list[set[int]] = [set() for _ in range(n)]
    for u, v in loads.edges:
        needs[v].add(u)
        feeds[u].add(v)
    nets_of: list[list[int]] = [[] for _ in range(n)]
    for h, net in enumerate(loads.nets):
        for v in net:
            nets_of[v].append(h)
    sizes = [len(net) for net in loads.nets]
    costs = loads.net_costs.tolist()
    masks = [sum(1 << v for v in some) for some in needs]
    net_masks = [sum(1 << v for v in net) for net in loads.nets]

    def grown(ideal: int, alive: float, v: int) -> float:
        """Cost alive after adding v."""
        for h in nets_of[v]:
            held = (ideal & net_masks[h]).bit_count()
            alive += costs[h] * ((held + 1 < sizes[h]) - (held > 0))
        return alive

    width = max(BEAM, SAMPLE // (n + 1))
    level = {0: (0.0, frozenset(v for v in range(n) if not needs[v]))}
    found = [0]
    for _ in range(n):
        following: dict[int, tuple[float, frozenset[int]]] = {}
        for ideal, (alive, ready) in level.items():
            for v in ready:
                if (larger := ideal | 1 << v) not in following:
                    opened = frozenset(w for w in feeds[v] if not masks[w] & ~larger)
                    following[larger] = grown(ideal, alive, v), (ready - {v}) | opened
        kept = sorted(following, key=lambda ideal: (following[ideal][0], ideal))[:width]
        level = {ideal: following[ideal] for ideal in kept}
        found += kept
    for last in (True, False):
        ready_list, ideal = [v for v in range(n) if not needs[v]], 0
        while ready_list:
            v = ready_list.pop(-1 if last else 0)
            ideal |= 1 << v
            found.append(ideal)
            ready_list += sorted(w for w in feeds[v] if not masks[w] & ~ideal)
    unique = sorted(set(found), key=lambda ideal: (ideal.bit_count(), ideal))
    return as_flags(unique, n)
