"""The outer search: settings in the order of what they can promise, until none left can be the best."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

from partitioner.graph import CostGraph
from partitioner.solver.chain import start_flags
from partitioner.solver.problem import CLOSE, Found, Problem
from partitioner.solver.settings import Setting, pinned_positions, settings
from partitioner.specs import Cluster, Training


@dataclass(frozen=True)
class Searched:
    """What a search over settings found; `found` is sorted, best first."""

    found: tuple[Found, ...]
    lower_bound_s: float
    """Of all its settings that fit."""
    unfit: tuple[Setting, ...]
    """Settings looked at of which no split fits."""


def search(graph: CostGraph, cluster: Cluster, training: Training, meshes: list[tuple[int, int]]) -> Searched:
    """The best split of every setting that could be the best of all, by lower bound: best first, until none is left.

    A setting waits with its quick bound, comes back with its tight one, and is solved when that is the smallest of all;
    once the smallest bound is above the best time found, the rest cannot win.
    """
    pins = pinned_positions(graph, training)
    flags = {p: start_flags(graph.num_layers, p, graph.allowed_cuts, pins) for p in sorted({p for p, _ in meshes})}
    counter = itertools.count()
    waiting: list[tuple[float, int, bool, Problem]] = []
    found: list[Found] = []
    unfit: list[Setting] = []
    for setting in settings(cluster, training, meshes):
        if (starts := flags[setting.num_stages]) is not None:
            problem = Problem(graph, cluster, training, setting, starts)
            if problem.limits is not None and problem.limits.hopeless():
                unfit.append(setting)
                continue
            waiting.append((problem.bounds.quick(), next(counter), False, problem))
    heapq.heapify(waiting)
    lower, best = math.inf, math.inf
    while waiting:
        bound, _, is_tight, problem = heapq.heappop(waiting)
        if bound == math.inf:
            unfit.append(problem.setting)
            continue
        if bound >= best * (1 - CLOSE):
            lower = min(lower, bound)
            break
        if not is_tight:
            heapq.heappush(waiting, (max(bound, problem.bounds.tight(best)), next(counter), True, problem))
            continue
        one = problem.best()
        if one is None:
            unfit.append(problem.setting)
            continue
        lower, best = min(lower, one.total_s if one.proven else bound), min(best, one.total_s)
        found.append(one)
    return Searched(tuple(sorted(found, key=Found.rank)), min(lower, best), tuple(unfit))
