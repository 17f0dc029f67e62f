"""One request as early as can be: accelerators that each run one piece of the model whole, CPUs beside them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from partitioner.solver.classical.frontier import sample
from partitioner.solver.classical.ideals import Flags, Ints, condense, down_sets
from partitioner.solver.classical.loads import CLOSE, Loads, Placement
from partitioner.solver.classical.maxload import MOST_IDEALS, Search, keep_least

MOST_EVALUATIONS = 3_000
MOST_PAIRS = 60_000_000
"""Of down-sets, from which on a sample of them does."""
HOT, COLD = 2e-2, 1e-4


def least_latency(loads: Loads, groups: Sequence[Sequence[int]] = ()) -> Placement | None:
    """The placement found with which one request is done first; None: none fits. `load` is its latency.

    The first kind are accelerators: a piece starts when all that it takes from elsewhere is there, takes its layers'
    time and that of every net that it shares, and hands all out at its end (Tarnawski et al. 2020, section 5). The
    second are CPUs, where any number of layers run at once, each when its inputs are there.

    Pieces one after the other are a shortest path over down-sets; what runs beside each other is then found by moving
    layers between pieces. The lower bound is the longest path with every layer where it is fastest.
    """
    labels = condense(loads.num_layers, loads.edges, groups)
    merged = loads.merged(labels)
    members: list[list[int]] = [[] for _ in range(merged.num_layers)]
    for v, label in enumerate(labels.tolist()):
        members[label].append(v)
    clock = Clock(loads)
    bound = clock.longest_path(np.min([kind.times for kind in loads.kinds if kind.count], axis=0).tolist())
    ideals = down_sets(merged.num_layers, merged.edges, MOST_IDEALS)
    if ideals is None or len(ideals) ** 2 * loads.kinds[0].count > MOST_PAIRS:
        ideals = sample(merged)
    pieces = in_turn(Search(merged, ideals))
    if pieces is None:
        return None
    device = [-1] * merged.num_layers
    for k, layers in enumerate(pieces):
        for v in layers:
            device[v] = k
    device, latency = _anneal(clock, merged, members, device, bound)
    parts: list[list[int]] = [[] for _ in range(loads.kinds[0].count + 1)]
    for v, d in enumerate(device):
        parts[d] += members[v]
    devices = tuple((int(k == len(parts) - 1), tuple(sorted(part))) for k, part in enumerate(parts) if part)
    return Placement(devices, latency, min(bound, latency))


def in_turn(search: Search) -> list[tuple[int, ...]] | None:
    """Layers of each accelerator so that pieces one after the other, and CPU layers between them, take least.

    best[a][D] = min( best[a-1][D'] + load(D, D'),  best[a][D - v] + CPU seconds of v )          O(a m^2)
    """
    loads, ideals = search.loads, search.ideals
    most = loads.kinds[0].count
    m = len(ideals)
    everything = np.arange(m)
    best = np.full((most + 1, m), math.inf)
    came = np.zeros((most + 1, m), dtype=np.int64)
    on_cpu = np.zeros((most + 1, m), dtype=np.bool_)
    best[0, 0] = 0.0
    steps = _steps(ideals) if len(loads.kinds) > 1 and loads.kinds[1].count else []
    times = loads.kinds[1].times if steps else np.zeros(0)
    for a in range(most + 1):
        if a:
            for rows, blocks in search.blocks(0, np.flatnonzero(np.isfinite(best[a - 1])), everything, math.inf):
                values, sources = np.full(len(rows), math.inf), np.zeros(len(rows), dtype=np.int64)
                for columns, load in blocks:
                    load += best[a - 1][columns]
                    keep_least(values, sources, load, columns)
                best[a][rows], came[a][rows] = values, sources
        for smaller, larger, layer in steps:
            value = best[a][smaller] + times[layer]
            order = np.lexsort((value, larger))
            first = np.append(True, np.diff(larger[order]) > 0)
            target, least, source = larger[order][first], value[order][first], smaller[order][first]
            better = least < best[a][target]
            best[a][target[better]], came[a][target[better]] = least[better], source[better]
            on_cpu[a][target[better]] = True
    a = int(np.argmin(best[:, -1]))
    if not best[a, -1] < math.inf:
        return None
    at, pieces = m - 1, []
    while at:
        source = int(came[a, at])
        if not on_cpu[a, at]:
            pieces.append(tuple(np.flatnonzero(ideals[at] & ~ideals[source]).tolist()))
            a -= 1
        at = source
    return pieces[::-1]


def _steps(ideals: Flags) -> list[tuple[Ints, Ints, Ints]]:
    """(down-set, the same with one layer more, that layer), by size."""
    number = {row.tobytes(): k for k, row in enumerate(np.packbits(ideals, axis=1))}
    sizes = ideals.sum(axis=1)
    found: dict[int, list[tuple[int, int, int]]] = {}
    for k, row in enumerate(ideals):
        for v in np.flatnonzero(row):
            row[v] = False
            smaller = number.get(np.packbits(row).tobytes())
            row[v] = True
            if smaller is not None:
                found.setdefault(int(sizes[k]), []).append((smaller, k, int(v)))
    return [tuple(np.array(column) for column in zip(*found[size], strict=True)) for size in sorted(found)]  # type: ignore[misc]


class Clock:
    """When one request is done under a placement."""

    def __init__(self, loads: Loads) -> None:
        self.loads = loads
        self.times = loads.kinds[0].times.tolist()
        self.cpu_times = loads.kinds[1].times.tolist() if len(loads.kinds) > 1 and loads.kinds[1].count else None
        self.edges = loads.edges
        self.after: list[list[int]] = [[] for _ in range(loads.num_layers)]
        for u, v in loads.edges:
            self.after[u].append(v)

    def longest_path(self, seconds: list[float]) -> float:
        return self.latency([-1] * self.loads.num_layers, seconds)

    def latency(self, device: list[int], cpu_times: list[float] | None = None) -> float:
        """Of layers on accelerators 0, 1, ... and, -1, on CPUs; inf where pieces wait for each other."""
        cpu_times = self.cpu_times if cpu_times is None else cpu_times
        count = max(device, default=-1) + 1
        work = [0.0] * count
        for v, d in enumerate(device):
            if d >= 0:
                work[d] += self.times[v]
            elif cpu_times is None:
                return math.inf
        for net, cost in zip(self.loads.nets, self.loads.net_costs.tolist(), strict=True):
            some = {device[v] for v in net}
            if len(some) > 1:
                for d in some:
                    if d >= 0:
                        work[d] += cost
        # blocks: accelerators, then single layers on CPUs
        block = [d if d >= 0 else count + v for v, d in enumerate(device)]
        waits: dict[int, int] = {}
        heads: dict[int, list[int]] = {}
        for u, v in self.edges:
            a, b = block[u], block[v]
            if a != b:
                heads.setdefault(a, []).append(b)
                waits[b] = waits.get(b, 0) + 1
        blocks = set(block)
        start = dict.fromkeys(blocks, 0.0)
        ready = [b for b in blocks if not waits.get(b)]
        done, end = 0, 0.0
        while ready:
            b = ready.pop()
            done += 1
            finish = start[b] + (work[b] if b < count else cpu_times[b - count])  # type: ignore[index]
            end = max(end, finish)
            for head in heads.get(b, ()):
                start[head] = max(start[head], finish)
                waits[head] -= 1
                if not waits[head]:
                    ready.append(head)
        return end if done == len(blocks) else math.inf


def _anneal(
    clock: Clock, merged: Loads, members: list[list[int]], device: list[int], bound: float
) -> tuple[list[int], float]:
    """Layers moved to the device of a neighbour, to CPUs or to an accelerator; the best on the way."""
    rng = random.Random(0)
    n, count = merged.num_layers, merged.kinds[0].count
    memory, room = merged.memory_bytes.tolist(), merged.kinds[0].memory_bytes * (1 + CLOSE)
    near: list[list[int]] = [[] for _ in range(n)]
    for u, v in merged.edges:
        near[u].append(v)
        near[v].append(u)
    held = [0.0] * (count + 1)
    full = [0] * clock.loads.num_layers
    for v, d in enumerate(device):
        held[d] += memory[v]
        for one in members[v]:
            full[one] = d
    held[count] = -math.inf
    latency = clock.latency(full)
    best, best_latency = list(device), latency
    temperature, cooling = HOT * latency, (COLD / HOT) ** (1 / MOST_EVALUATIONS)
    for _ in range(MOST_EVALUATIONS):
        if best_latency <= bound * (1 + CLOSE):
            break
        temperature *= cooling
        v = rng.randrange(n)
        options = [device[w] for w in near[v]] + [-1, rng.randrange(count)]
        to, at = options[rng.randrange(len(options))], device[v]
        if to == at or held[to] + memory[v] > room:
            continue
        for one in members[v]:
            full[one] = to
        value = clock.latency(full)
        if value <= latency or (value < math.inf and rng.random() < math.exp((latency - value) / temperature)):
            held[at] -= memory[v]
            held[to] += memory[v]
            device[v], latency = to, value
            if value < best_latency * (1 - CLOSE):
                best, best_latency = list(device), value
        else:
            for one in members[v]:
                full[one] = at
    return best, best_latency
