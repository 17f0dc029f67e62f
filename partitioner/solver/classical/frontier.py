"""Down-sets with the least alive between them and the rest, by the work in them, however many down-sets there are."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.solver.classical.ideals import Edges, Flags, Ints, as_flags
from partitioner.solver.classical.loads import Loads

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]

SAMPLE, BEAM = 1_500, 24
"""Down-sets of a sample in all, and of each size at least."""
WIDEST = 64
"""Layers on the frontier, a bit of a word each."""
MOST_ENTRIES = 100_000
GROWTH = 1.2
"""Times as many entries as when they were last compared: they are compared again."""


@dataclass(frozen=True)
class Swept:
    """For every down-set there is an entry with no more alive, and with the down-set's work from `low` to `high`."""

    order: tuple[int, ...]
    low: Floats
    high: Floats
    alive: Floats
    at: Ints
    """[entries] their number in the last step; the whole way back is in `steps`."""
    steps: tuple[tuple[Ints, Flags], ...]
    """Of each layer in the order: [entries after it] the entry before, and whether the layer is in."""

    def ideals(self, some: Ints) -> Flags:
        """[some, layers] a down-set of each of those entries: with its `alive`, and work within its range."""
        flags = np.zeros((len(some), len(self.order)), dtype=np.bool_)
        at = self.at[some]
        for v, (before, within) in zip(reversed(self.order), reversed(self.steps), strict=True):
            flags[:, v] = within[at]
            at = before[at]
        return flags


def sweep(loads: Loads, bins: int, limit: float) -> Swept | None:
    """Layers are decided on in an order that the edges allow: in, where all before it are in, or out.

    What is yet to come depends on the frontier alone: which decided layers that have users to come are in, and which
    of their nets are known to be alive, and paid. Of entries with one frontier and work in one bin the cheapest
    stands for all, and its range of work is widened to hold theirs. What is alive never shrinks, so entries over the
    limit are left out. Bins are made wider where there are too many entries. None: the frontier is too wide.
    """
    nets = _flows(loads)
    if nets is None:
        return None
    order = _late_order(loads.num_layers, loads.edges)
    times, width = loads.kinds[0].times, float(loads.kinds[0].times.sum()) / bins or 1.0
    into: list[list[int]] = [[] for _ in order]
    out_of: list[list[int]] = [[] for _ in order]
    for h, net in enumerate(nets):
        out_of[net.maker].append(h)
        for v in net.users:
            into[v].append(h)
    left = [len(net.users) for net in nets]
    slot: dict[int, int] = {}
    free = list(range(WIDEST))
    inside, paid = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    low, high, alive = np.zeros(1), np.zeros(1), np.zeros(1)
    steps: list[tuple[Ints, Flags]] = []
    grown = 1
    for v in order:
        needed = np.uint64(sum(1 << slot[h] for h in into[v]))
        enter = np.flatnonzero(inside & needed == needed)
        owed, owed_alive = paid.copy(), alive.copy()  # out: whatever is in and goes to it is alive
        for h in into[v]:
            if nets[h].cost:
                bit = np.uint64(1 << slot[h])
                fresh = (inside & ~owed & bit) != 0
                owed_alive[fresh] += nets[h].cost
                owed[fresh] |= bit
        leave = np.flatnonzero(owed_alive <= limit)
        before = np.concatenate((enter, leave))
        within = np.arange(len(before)) < len(enter)
        inside = inside[before]
        paid = np.concatenate((paid[enter], owed[leave]))
        alive = np.concatenate((alive[enter], owed_alive[leave]))
        low, high = low[before] + times[v] * within, high[before] + times[v] * within
        for h in into[v]:
            left[h] -= 1
            if not left[h]:
                bit = np.uint64(~(1 << slot[h]) & 2**64 - 1)
                inside, paid = inside & bit, paid & bit
                heapq.heappush(free, slot.pop(h))
        if len(out_of[v]) > len(free):
            return None
        for h in out_of[v]:
            slot[h] = heapq.heappop(free)
            inside = inside | np.where(within, np.uint64(1 << slot[h]), np.uint64(0))
        if len(before) > GROWTH * grown or v == order[-1]:
            kept, low, high = _cheapest(inside, paid, low, high, alive, width)
            before, within, inside, paid, alive = before[kept], within[kept], inside[kept], paid[kept], alive[kept]
            grown = len(kept)
            if grown > MOST_ENTRIES:
                width *= 2
        steps.append((before.astype(np.int32), within))
    by_work = np.argsort(low, kind="stable")
    return Swept(tuple(order), low[by_work], high[by_work], alive[by_work], by_work, tuple(steps))


def _cheapest(
    inside: Words, paid: Words, low: Floats, high: Floats, alive: Floats, width: float
) -> tuple[Ints, Floats, Floats]:
    """The cheapest entry of each frontier and bin, and the range of work of all of them."""
    cell = np.floor(low / width).astype(np.int64).astype(np.uint64)
    key = (inside * np.uint64(0x9E3779B97F4A7C15)) ^ (paid * np.uint64(0xC2B2AE3D27D4EB4F))
    key = (key ^ (key >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9) + cell * np.uint64(0x94D049BB133111EB)
    order = np.lexsort((alive, key))
    new = np.ones(len(order), np.bool_)
    same = key[order][1:] == key[order][:-1]
    for figures in (inside, paid, cell):
        same &= figures[order][1:] == figures[order][:-1]
    new[1:] = ~same
    first = np.flatnonzero(new)
    return order[first], np.minimum.reduceat(low[order], first), np.maximum.reduceat(high[order], first)


class Flow(NamedTuple):
    """What a layer makes for later ones: a net of its, or, for free, that they need it."""

    maker: int
    users: tuple[int, ...]
    cost: float


def _flows(loads: Loads) -> list[Flow] | None:
    """All nets and, for free, what of the order they leave out; None: some net is not of a layer and what needs it."""
    needed: dict[int, set[int]] = {}
    for u, v in loads.edges:
        needed.setdefault(u, set()).add(v)
    flows, left = [], {u: set(users) for u, users in needed.items()}
    for net, cost in zip(loads.nets, loads.net_costs, strict=True):
        maker, *users = net
        if not set(users) <= needed.get(maker, set()):
            return None
        flows.append(Flow(maker, tuple(users), float(cost)))
        left[maker] -= set(users)
    return flows + [Flow(u, tuple(sorted(users)), 0.0) for u, users in left.items() if users]


def _late_order(num_layers: int, edges: Edges) -> list[int]:
    """Each layer after all that it needs, and as late as that allows: of what it needs, the deepest first.

    So a branch is walked when it is joined with the others, not when it becomes possible, and few are open at a time.
    """
    needs: list[list[int]] = [[] for _ in range(num_layers)]
    used, depth = [False] * num_layers, [0] * num_layers
    for u, v in sorted(edges, key=lambda edge: edge[1]):
        needs[v].append(u)
        used[u] = True
        depth[v] = max(depth[v], depth[u] + 1)
    for some in needs:
        some.sort(key=lambda u: (depth[u], u))
    order, seen = [], [False] * num_layers
    for sink in (v for v in range(num_layers) if not used[v]):
        stack = [(sink, False)]
        while stack:
            v, ready = stack.pop()
            if ready:
                order.append(v)
            elif not seen[v]:
                seen[v] = True
                stack.append((v, True))
                stack += [(u, False) for u in needs[v] if not seen[u]]
    return order


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
