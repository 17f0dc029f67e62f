"""A training step of a model with branches, to first order, over every order of its layers that their tensors allow."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from partitioner.graph import CostGraph
from partitioner.solver.ideals import Flags, as_flags, condense, down_sets
from partitioner.solver.maxload import Kind, Loads, Search, average_bound, keep_least, sample
from partitioner.specs import Link

CLOSE = 1e-9
MOST_ROUNDS = 4
"""Times that down-sets beside those of the best split are looked at."""
MOST_NEIGHBOURS = 1_000
CHUNK = 20_000
MOST_BOUNDED = 400_000
"""Down-sets that the bound is taken over."""
MOST_EXACT = 4_000
"""Down-sets whose pairs are all looked at."""
SLICE = 1e-3
"""Relative; of the slowest stage, where bounds are looked for."""
FINE = 1e-5
"""Relative, of the slowest stage: ranges of it are halved down to this."""


class Ordered(NamedTuple):
    """Layers of each stage; seconds of a step; what no split in any order can beat."""

    stages: tuple[tuple[int, ...], ...]
    seconds: float
    lower_bound: float

    @property
    def gap(self) -> float:
        return max(0.0, self.seconds / self.lower_bound - 1)


def step_in_any_order(loads: Loads, microbatches: int) -> Ordered:
    """Up to `loads.kinds[0].count` stages with the least  sum + (m - 1) slowest,  in an order that the edges allow.

    The sum is one micro-batch through all stages and, over every boundary, what is alive there: net costs are seconds
    there and back. The slowest is a stage or a boundary. Over a sample of down-sets with little alive, the least sum
    under a cap on the slowest is a shortest path, and caps are halved; then those beside the boundaries found are
    looked at, until nothing is gained. The bound: work spread evenly, no layer divided, and,
    where all down-sets can be had, the cheapest boundaries that leave the work so.
    """
    loads = replace(loads, kinds=(replace(loads.kinds[0], pays=False),))  # nets are paid for at boundaries
    labels = condense(loads.num_layers, loads.edges)
    merged = loads.merged(labels)
    total = float(merged.kinds[0].times.sum())
    ideals = sample(merged)
    best, seconds, _ = _best(Search(merged, ideals), total, microbatches, math.inf)
    for _ in range(MOST_ROUNDS):
        wider = np.unique(np.concatenate((ideals, _beside(merged, best))), axis=0)
        better, value, _ = _best(Search(merged, wider), total, microbatches, seconds)
        if value >= seconds * (1 - CLOSE):
            break
        best, seconds = better, value
    bound = total + (microbatches - 1) * average_bound(merged)
    if (every := down_sets(merged.num_layers, merged.edges, MOST_BOUNDED)) is not None:
        bound = _bound(merged, every, total, microbatches, seconds)
        if len(every) <= MOST_EXACT and bound < seconds * (1 - CLOSE):
            better, value, least = _best(Search(merged, every), total, microbatches, seconds)
            bound = max(bound, least)
            if value < seconds:
                best, seconds = better, value
    members = [np.flatnonzero(labels == k).tolist() for k in range(merged.num_layers)]
    stages = tuple(
        tuple(sorted(v for k in np.flatnonzero(later & ~earlier) for v in members[k]))
        for earlier, later in pairwise(best)
    )
    return Ordered(stages, seconds, min(bound, seconds))


def _bound(loads: Loads, ideals: Flags, total: float, m: int, seconds: float) -> float:
    """With nothing over T, the boundary after stage s of q has total - (q - s) T to s T of the work before it: what is
    least alive there, over slices of T.
    """
    parts = [Search(loads, ideals[k : k + CHUNK]) for k in range(1, len(ideals) - 1, CHUNK)]  # no stage is empty
    work = np.concatenate([np.zeros(0), *(part.before[0] for part in parts)])
    alive = np.concatenate([np.zeros(0), *(part.alive for part in parts)])
    order = np.argsort(work, kind="stable")
    work, alive = work[order], alive[order]
    least, low = math.inf, average_bound(loads)
    most = max((seconds - total) / (m - 1), low) if m > 1 else total
    rounding = CLOSE * total
    while low <= most:
        high = low * (1 + SLICE)
        for q in range(max(1, math.ceil(total / high - CLOSE)), loads.kinds[0].count + 1):
            moved = 0.0
            for s in range(1, q):
                first, last = np.searchsorted(work, (total - (q - s) * high - rounding, s * high + rounding))
                there = float(alive[first:last].min(initial=math.inf))
                moved += there if there <= high else math.inf
            least = min(least, total + moved + (m - 1) * low)
        low = high
    return min(least, seconds)


def loads_of(graph: CostGraph, samples: float, link: Link, num_stages: int) -> Loads:
    """A profile's layers and tensors, at that micro-batch, with one link between all stages."""
    costs, nets, seconds = graph.at(samples), [], []
    for tensor in graph.profile.tensors:
        layers = sorted({graph.position[name] for name in (tensor.producer, *tensor.consumers)})
        if len(layers) > 1:
            size = graph.profile.tensor_bytes(tensor, samples)
            nets.append(tuple(layers))
            seconds.append(link.time(size) + (link.time(size) if tensor.needs_gradient else 0.0))
    edges = {(net[0], head) for net in nets for head in net[1:]}
    return Loads(
        tuple(sorted(edges)),
        tuple(nets),
        np.array(seconds),
        np.zeros(graph.num_layers),
        (Kind(num_stages, costs.forward_s + costs.backward_s),),
    )


def _best(search: Search, total: float, m: int, seconds: float) -> tuple[Flags, float, float]:
    """The boundaries of the best split over these down-sets if below `seconds`, its value, a bound for all."""
    alive = search.alive
    best = search.ideals[[0, -1]]
    value, bound = min(seconds, total * m), math.inf
    ranges = [(average_bound(search.loads), total, 0.0)]
    while ranges:
        low, high, moved = ranges.pop()
        least = total + moved + (m - 1) * low
        if least >= value * (1 - CLOSE):
            continue
        if high - low <= FINE * low:
            bound = min(bound, least)
            continue
        middle = low + (high - low) / (2 if high < 2 * low else 8)  # most of what is won lies at the even end
        path = _path(search, middle)
        if path is None:
            ranges.append((middle, high, moved))
            continue
        work = np.diff(search.before[0][path])
        slowest = max(float(work.max()), float(alive[path[1:-1]].max(initial=0.0)))
        crossed = float(alive[path[1:-1]].sum())
        if total + crossed + (m - 1) * slowest < value:
            best, value = search.ideals[path], total + crossed + (m - 1) * slowest
        ranges.append((middle, high, moved))
        ranges.append((low, slowest, crossed))
    return best, value, min(bound, value)


def _path(search: Search, cap: float) -> list[int] | None:
    """Down-sets from the empty to the full one with the least alive in between, no stage or boundary over the cap."""
    count, whole = search.loads.kinds[0].count, len(search.ideals) - 1
    entering = np.where(search.alive <= cap * (1 + CLOSE), search.alive, math.inf)
    best = np.full(whole + 1, math.inf)
    best[0] = 0.0
    history = []
    ends: list[tuple[float, int]] = []
    work = search.before[0]
    for s in range(count):
        start = best + entering
        now, came = np.full(whole + 1, math.inf), np.zeros(whole + 1, dtype=np.int64)
        later = np.flatnonzero(work[-1] - work <= (count - 1 - s) * cap * (1 + CLOSE))
        for rows, blocks in search.blocks(0, np.flatnonzero(np.isfinite(start)), later, cap):
            values, sources = np.full(len(rows), math.inf), np.zeros(len(rows), dtype=np.int64)
            for columns, load in blocks:
                load[load > cap * (1 + CLOSE)] = math.inf
                keep_least(values, sources, np.where(np.isfinite(load), start[columns], math.inf), columns)
            now[rows], came[rows] = values, sources
        history.append(came)
        ends.append((float(now[whole]), s))
        best = now
    value, s = min(ends)
    if value == math.inf:
        return None
    path = [whole]
    while s >= 0:
        path.append(int(history[s][path[-1]]))
        s -= 1
    return path[::-1]


def _beside(loads: Loads, boundaries: Flags) -> Flags:
    """Down-sets that differ from the boundaries by a layer, or by a layer in and another out."""
    needs: list[set[int]] = [set() for _ in range(loads.num_layers)]
    feeds: list[set[int]] = [set() for _ in range(loads.num_layers)]
    for u, v in loads.edges:
        needs[v].add(u)
        feeds[u].add(v)
    found: set[int] = set()
    each = MOST_NEIGHBOURS // max(1, len(boundaries) - 2)
    for row in boundaries[1:-1]:
        own = [sum(1 << int(v) for v in np.flatnonzero(row))]
        for _ in range(3):
            near: list[int] = []
            for ideal in own:
                held = {v for v in range(loads.num_layers) if ideal >> v & 1}
                near += [ideal ^ 1 << v for v in held if not feeds[v] & held]
                near += [ideal | 1 << v for v in range(loads.num_layers) if v not in held and needs[v] <= held]
            own = list(dict.fromkeys([*own, *near]))[:each]
        found.update(own)
    return as_flags(sorted(found), loads.num_layers)
