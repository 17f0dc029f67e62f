"""The outer search: settings in the order of what they can promise, until none left can be the best."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

from partitioner.graph import CostGraph
from partitioner.progress import Progress
from partitioner.solver.layout import Layout, Ranks, Site
from partitioner.solver.problem import CLOSE, Found, Problem
from partitioner.solver.settings import Kind, Setting, pinned_positions, settings
from partitioner.solver.starts import stage_starts
from partitioner.specs import Cluster, Training

MOST_RIVALS = 5
SMALL = 2_000
"""Layers x stages that are solved in milliseconds, even if it is only to show what was not chosen."""


@dataclass(frozen=True)
class Searched:
    """What a search over settings found; `found` is sorted, best first."""

    found: tuple[Found, ...]
    lower_bound_s: float
    """Of all its settings that fit."""
    unfit: tuple[Setting, ...]
    """Settings looked at of which no split fits."""


def search(
    graph: CostGraph,
    cluster: Cluster,
    training: Training,
    meshes: list[tuple[int, int]],
    tell: Progress = lambda what, share: None,
) -> Searched:
    """The best split of every setting that could be the best of all, by lower bound: best first, until none is left.

    A setting waits with its quick bound, comes back with its tight one, and is solved when that is the smallest of all;
    once the smallest bound is above the best time found, the rest cannot win.
    """
    pins = pinned_positions(graph, training)
    counts = sorted({setting.num_stages for setting in settings(cluster, training, meshes)})
    starts = {p: stage_starts(graph.num_layers, p, graph.allowed_cuts, pins) for p in counts}
    site, layouts = Site(cluster, training), dict[Ranks, Layout]()
    waiting: list[Waiting] = []
    for setting in settings(cluster, training, meshes):
        if (possible := starts[setting.num_stages]) is not None:
            if setting.ranks not in layouts:
                layouts[setting.ranks] = Layout(site, setting.ranks)
            problem = Problem(graph, cluster, training, setting, possible, layouts[setting.ranks])
            waiting.append(Waiting(problem.quick_s(), len(waiting), False, problem))
    unfit: list[Setting] = []
    found, lower_bound_s = _race(waiting, unfit, tell=tell)
    rivals = _rivals(found, waiting)
    return Searched(tuple(sorted(found + rivals, key=Found.rank)), lower_bound_s, tuple(unfit))


class Waiting(NamedTuple):
    """A setting with the best that is known of it; the number keeps the order of settings with equal bounds."""

    bound_s: float
    number: int
    is_tight: bool
    problem: Problem


def _race(
    waiting: list[Waiting],
    unfit: list[Setting],
    *,
    thorough: bool = True,
    tell: Progress = lambda what, share: None,
) -> tuple[list[Found], float]:
    """Solve in the order of bounds; leaves in `waiting` what cannot win, and adds to `unfit` what does not fit."""
    heapq.heapify(waiting)
    found: list[Found] = []
    beaten: list[Waiting] = []
    lower, best = math.inf, math.inf
    num_settings = len(waiting)
    while waiting and waiting[0].bound_s <= best * (1 + CLOSE):
        bound_s, number, is_tight, problem = heapq.heappop(waiting)
        open_still = 1 + sum(one.bound_s <= best for one in waiting)
        tell(f"solving, {open_still} of {num_settings} settings left", 1 - open_still / num_settings)
        if bound_s >= best * (1 - problem.slack) and _no_simpler(problem, found):
            beaten.append(Waiting(bound_s, number, is_tight, problem))
        elif not is_tight:
            if problem.limits is not None and problem.limits.hopeless():
                unfit.append(problem.setting)
                continue
            bound_s = max(bound_s, problem.bounds.tight(best))
            if bound_s < math.inf:
                heapq.heappush(waiting, Waiting(bound_s, number, True, problem))
            else:
                unfit.append(problem.setting)
        elif (one := problem.best(bound_s, thorough=thorough)) is None:
            unfit.append(problem.setting)
        else:
            found.append(one)
            lower, best = min(lower, max(bound_s, one.bound_s)), min(best, one.total_s)
    waiting += beaten
    return found, min([lower, best, *(one.bound_s for one in waiting)])


def _no_simpler(problem: Problem, found: list[Found]) -> bool:
    """Whether this setting, at best as fast as the best one, is not simpler than that."""
    return problem.is_large or min(found, key=Found.rank).setting.size <= problem.setting.size


def _rivals(found: list[Found], waiting: list[Waiting]) -> list[Found]:
    """A good split of each mesh and schedule that cannot win, to compare with: of small models, the first few."""
    seen = {one.setting.kind for one in found}
    others: dict[Kind, Waiting] = {}
    for one in sorted(waiting) if found else ():
        if one.problem.graph.num_layers * one.problem.setting.num_stages <= SMALL:
            others.setdefault(one.problem.setting.kind, one)
    rivals: list[Found] = []
    for kind, one in others.items():
        if kind not in seen and len(seen) <= MOST_RIVALS:
            seen.add(kind)
            rivals += _race([one], [], thorough=False)[0]
    return rivals
