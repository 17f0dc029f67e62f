"""The max-load problem without an order: a device may hold several pieces of the model, anywhere in it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csc_array

from partitioner.solver.classical.ideals import condense
from partitioner.solver.classical.loads import CLOSE, Loads, Placement, average_bound
from partitioner.solver.classical.maxload import place_in_order

POWER = 32.0
"""Of the loads in the energy: near enough to the largest, and smooth."""
MOST_MOVES = 120_000
"""Of one start."""
HOT = (3e-2, 3e-2, 1e-2, 1e-2, 5e-3, 5e-3, 1e-2, 5e-3)
COLD = 3e-5
"""Temperatures that the starts begin and end with, relative to the largest load."""
MOST_VARIABLES = 20_000
PROVEN = 1e-7
"""Relative; HiGHS takes a bound so near for proof."""
NODES = 1
"""Of the branch and bound: the root alone, which often decides and costs little."""


def place_anywhere(loads: Loads, groups: Sequence[Sequence[int]] = ()) -> Placement | None:
    """The best placement found where any layers may share a device; None: none fits.

    The best one in order, then annealed by moves of single layers and swaps of two (Kirkpatrick et al. 1983), with a
    fixed seed and number of moves; the lower bound is that of busy devices and of layers that cannot be divided.
    """
    labels = condense(loads.num_layers, (), groups)
    merged = loads.merged(labels)
    members: list[list[int]] = [[] for _ in range(merged.num_layers)]
    for v, label in enumerate(labels.tolist()):
        members[label].append(v)
    start = place_in_order(loads, groups)
    state = Assignment(merged)
    if start is not None:
        state.put([(kind, sorted({int(labels[v]) for v in layers})) for kind, layers in start.devices])
    elif not state.put_greedily():
        return None
    best, best_load = list(state.device), state.largest()
    exact = integer_program(merged, best_load)
    bound = max(average_bound(merged), exact.lower_bound)
    if exact.device is not None:
        state.restore(exact.device)
        if state.largest() < best_load:
            best, best_load = list(state.device), state.largest()
    rng = random.Random(0)
    for hot in HOT:
        if best_load <= bound * (1 + PROVEN):
            break
        state.restore(best)
        found, load = anneal(state, rng, hot, bound)
        if load < best_load * (1 - CLOSE):
            best, best_load = found, load
    parts: list[list[int]] = [[] for _ in state.kinds]
    for v, device in enumerate(best):
        parts[device] += members[v]
    devices = tuple((state.kinds[d], tuple(sorted(part))) for d, part in enumerate(parts) if part)
    load = max(loads.load(kind, part) for kind, part in devices)
    return Placement(devices, load, load if load <= bound * (1 + PROVEN) else min(bound, load))


class Program(NamedTuple):
    """The assignment that the branch and bound found, if any, and its bound."""

    device: list[int] | None
    lower_bound: float


def integer_program(loads: Loads, most: float) -> Program:
    """The problem as a mixed-integer program, by HiGHS, with no load over `most`; a bound of 0 where it is too large.

    x[v, d]: layer v is on device d. y[h, d]: device d shares net h, at least the largest less the smallest x of its
    layers. Equal devices are told apart by the longest layers: the k-th is on one of the first k + 1.
    """
    n, nets = loads.num_layers, loads.nets
    kinds = [q for q, kind in enumerate(loads.kinds) for _ in range(kind.count)]
    paying = [d for d, q in enumerate(kinds) if loads.kinds[q].pays]
    wide = [h for h, net in enumerate(nets) if len(net) > 2]
    num_x = n * len(kinds)
    shared = {key: num_x + k for k, key in enumerate(itertools.product(range(len(nets)), paying))}
    ends = {key: num_x + len(shared) + 2 * k for k, key in enumerate(itertools.product(wide, paying))}
    last = num_x + len(shared) + 2 * len(ends)
    if last >= MOST_VARIABLES:
        return Program(None, 0.0)
    rows: list[tuple[list[int], list[float], float, float]] = []

    def on(v: int, d: int) -> int:
        return v * len(kinds) + d

    for v in range(n):
        rows.append(([on(v, d) for d in range(len(kinds))], [1.0] * len(kinds), 1.0, 1.0))
    for d, q in enumerate(kinds):
        kind, own = loads.kinds[q], [on(v, d) for v in range(n)]
        moved = [shared[h, d] for h in range(len(nets))] if kind.pays else []
        costs = loads.net_costs.tolist() if kind.pays else []
        rows.append(([*own, *moved, last], [*kind.times.tolist(), *costs, -1.0], -math.inf, 0.0))
        if kind.memory_bytes < float(loads.memory_bytes.sum()):
            rows.append((own, (loads.memory_bytes / kind.memory_bytes).tolist(), -math.inf, 1.0))
    for (h, d), y in shared.items():
        if len(nets[h]) == 2:
            u, w = nets[h]
            rows.append(([y, on(u, d), on(w, d)], [1.0, -1.0, 1.0], 0.0, math.inf))
            rows.append(([y, on(u, d), on(w, d)], [1.0, 1.0, -1.0], 0.0, math.inf))
        else:
            high = ends[h, d]
            rows.append(([y, high, high + 1], [1.0, -1.0, 1.0], 0.0, math.inf))
            rows += [([high, on(v, d)], [1.0, -1.0], 0.0, math.inf) for v in nets[h]]
            rows += [([on(v, d), high + 1], [1.0, -1.0], 0.0, math.inf) for v in nets[h]]
    upper = np.ones(last + 1)
    upper[last] = most
    for q, kind in enumerate(loads.kinds):
        equal = [d for d, own in enumerate(kinds) if own == q]
        for k, v in enumerate(np.argsort(-kind.times, kind="stable")[: len(equal) - 1]):
            upper[[on(int(v), d) for d in equal[k + 1 :]]] = 0.0
    whole = np.zeros(last + 1)
    whole[:num_x] = 1
    goal = np.zeros(last + 1)
    goal[last] = 1.0
    columns = [j for some, *_ in rows for j in some]
    numbers = np.repeat(np.arange(len(rows)), [len(some) for some, *_ in rows])
    figures = [x for _, some, *_ in rows for x in some]
    matrix = csc_array((figures, (numbers, columns)), shape=(len(rows), last + 1))
    found = milp(
        goal,
        integrality=whole,
        bounds=Bounds(np.zeros(last + 1), upper),
        constraints=LinearConstraint(matrix, [low for *_, low, _ in rows], [high for *_, high in rows]),
        options={"node_limit": NODES, "mip_rel_gap": PROVEN},
    )
    bound = found.mip_dual_bound if found.status in (0, 1) and found.mip_dual_bound is not None else 0.0
    if found.x is None:
        return Program(None, float(bound))
    return Program(found.x[:num_x].reshape(n, len(kinds)).argmax(axis=1).tolist(), float(bound))


class Assignment:
    """Layers on devices, with loads kept up to date as they move."""

    def __init__(self, loads: Loads) -> None:
        self.loads = loads
        self.kinds = [q for q, kind in enumerate(loads.kinds) for _ in range(kind.count)]
        self.times = [loads.kinds[q].times.tolist() for q in self.kinds]
        self.pays = [loads.kinds[q].pays for q in self.kinds]
        self.room = [loads.kinds[q].memory_bytes for q in self.kinds]
        self.memory = loads.memory_bytes.tolist()
        self.nets: list[list[tuple[int, int, float]]] = [[] for _ in range(loads.num_layers)]
        """(net, its size, its cost) by layer."""
        for h, (net, cost) in enumerate(zip(loads.nets, loads.net_costs.tolist(), strict=True)):
            for v in net:
                self.nets[v].append((h, len(net), cost))
        self.restore([0] * loads.num_layers)

    def put(self, devices: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Layers by device, each with its kind."""
        free = {q: [d for d, kind in enumerate(self.kinds) if kind == q] for q in set(self.kinds)}
        device = [0] * self.loads.num_layers
        for kind, layers in devices:
            d = free[kind].pop(0)
            for v in layers:
                device[v] = d
        self.restore(device)

    def put_greedily(self) -> bool:
        """The largest first, each where there is most room; False: no room somewhere."""
        held, device = [0.0] * len(self.kinds), [0] * self.loads.num_layers
        for v in sorted(range(self.loads.num_layers), key=lambda v: -self.memory[v]):
            d = max(range(len(self.kinds)), key=lambda d: (self.room[d] - held[d], -self.times[d][v]))
            held[d] += self.memory[v]
            device[v] = d
            if held[d] > self.room[d] * (1 + CLOSE):
                return False
        self.restore(device)
        return True

    def restore(self, device: Sequence[int]) -> None:
        self.device = list(device)
        count = len(self.kinds)
        self.pins = [[0] * count for _ in self.loads.nets]
        self.work, self.held = [0.0] * count, [0.0] * count
        for v, d in enumerate(self.device):
            self.work[d] += self.times[d][v]
            self.held[d] += self.memory[v]
            for h, _, _ in self.nets[v]:
                self.pins[h][d] += 1
        for pins, net, cost in zip(self.pins, self.loads.nets, self.loads.net_costs.tolist(), strict=True):
            for d in range(count):
                if self.pays[d] and 0 < pins[d] < len(net):
                    self.work[d] += cost

    def largest(self) -> float:
        return max(self.work)

    def moved(self, v: int, to: int) -> tuple[float, float]:
        """Loads of the layer's device and of the other, were it moved there."""
        at = self.device[v]
        here, there = self.work[at] - self.times[at][v], self.work[to] + self.times[to][v]
        for h, size, cost in self.nets[v]:
            pins = self.pins[h]
            if self.pays[at]:
                if pins[at] == 1:
                    here -= cost if size > 1 else 0.0
                elif pins[at] == size:
                    here += cost
            if self.pays[to]:
                if pins[to] == 0:
                    there += cost if size > 1 else 0.0
                elif pins[to] == size - 1:
                    there -= cost
        return here, there

    def move(self, v: int, to: int, here: float, there: float) -> None:
        at = self.device[v]
        self.work[at], self.work[to] = here, there
        self.held[at] -= self.memory[v]
        self.held[to] += self.memory[v]
        for h, _, _ in self.nets[v]:
            self.pins[h][at] -= 1
            self.pins[h][to] += 1
        self.device[v] = to


def anneal(state: Assignment, rng: random.Random, hot: float, bound: float) -> tuple[list[int], float]:
    """The best assignment on the way, and its largest load."""
    best, best_load = list(state.device), state.largest()
    n, count = state.loads.num_layers, len(state.kinds)
    scale = best_load
    powers = [(work / scale) ** POWER for work in state.work]
    energy = sum(powers) ** (1 / POWER)
    cooling = (COLD / hot) ** (1 / MOST_MOVES)
    temperature = hot
    for _ in range(MOST_MOVES):
        temperature *= cooling
        v, to = rng.randrange(n), rng.randrange(count)
        at = state.device[v]
        other = -1
        if to == at or state.held[to] + state.memory[v] > state.room[to] * (1 + CLOSE):
            other = rng.randrange(n)  # swap two instead
            to = state.device[other]
            if to == at:
                continue
            change = state.memory[v] - state.memory[other]
            if state.held[to] + change > state.room[to] * (1 + CLOSE) or state.held[at] - change > state.room[at] * (
                1 + CLOSE
            ):
                continue
        before = state.work[at], state.work[to]
        here, there = state.moved(v, to)
        if other >= 0:
            state.move(v, to, here, there)
            there, here = state.moved(other, at)
        first, second = (max(here, 0.0) / scale) ** POWER, (max(there, 0.0) / scale) ** POWER
        total = max(sum(powers) - powers[at] - powers[to] + first + second, 0.0) ** (1 / POWER)
        if total <= energy or rng.random() < math.exp((energy - total) / temperature):
            if other >= 0:
                state.move(other, at, there, here)
            else:
                state.move(v, to, here, there)
            powers[at], powers[to], energy = first, second, total
            if (largest := max(state.work)) < best_load * (1 - CLOSE):
                best, best_load = list(state.device), largest
                if best_load <= bound * (1 + CLOSE):
                    break
        elif other >= 0:
            state.move(v, at, before[1], before[0])
            state.work[at], state.work[to] = before
    return best, best_load
