"""The outer search: settings in the order of what they can promise, until none left can be the best."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from partitioner.graph import CostGraph
from partitioner.progress import Progress
from partitioner.solver.arrangement import arranged, changed
from partitioner.solver.chain import has_room
from partitioner.solver.layout import AnyLayout, Site
from partitioner.solver.problem import CLOSE, NEARLY, Found, Problem
from partitioner.solver.settings import Kind, Setting, every_setting, mesh_levels, pinned_positions
from partitioner.solver.starts import Starts, stage_starts
from partitioner.specs import Cluster, Training

MOST_RIVALS = 5
MOST_MOVED = 64
"""Devices of which other places are tried."""
MOST_TRIES = 100
"""Other places of devices that are tried to make the best of a search faster."""
SMALL = 2_000
"""Layers x stages that are solved in milliseconds, even if it is only to show what was not chosen."""

PROMISING = 1.05
"""A setting whose bound is at most so many times the smallest is worth a quick look before others have any split."""


@dataclass(frozen=True)
class Searched:
    """What a search over settings found; `found` is sorted, best first."""

    found: tuple[Found, ...]
    lower_bound_s: float
    """Of all its settings that fit, those among them that were not solved."""
    unfit: tuple[Setting, ...]
    """Settings looked at of which no split fits."""
    unseen: Problem | None = None
    """Of the settings that were not solved, the one of least bound, where that is what `lower_bound_s` is."""


def search(
    graph: CostGraph,
    cluster: Cluster,
    training: Training,
    meshes: list[tuple[int, int]],
    tell: Progress = lambda what, share: None,
    *,
    below_s: float = math.inf,
) -> Searched:
    """The best split of every setting that could be the best of all, by lower bound: best first, until none is left.
    below_s: what takes longer is not asked for, nor are bounds of what is not solved.

    A setting waits with its quick bound, comes back with its tight one, and is solved when that is the smallest of all;
    once the smallest bound is above the best time found, the rest cannot win.
    """
    pins, starts = pinned_positions(graph, training), dict[int, Starts | None]()
    waiting: list[Waiting] = []
    others: list[Problem] = []
    for setting, layout, only_bounds in every_setting(Site(cluster, training), training, meshes):
        p = setting.num_stages
        if p not in starts:
            starts[p] = stage_starts(graph.num_layers, p, graph.allowed_cuts, pins)
        if (possible := starts[p]) is not None:
            problem = Problem(graph, cluster, training, setting, possible, layout)
            if only_bounds:
                others.append(problem)
            elif (quick_s := problem.quick_s()) < below_s:
                waiting.append(Waiting(quick_s, len(waiting), False, problem))
    unfit: list[Setting] = []
    found, lower_bound_s = _race(waiting, unfit, tell=tell, below_s=below_s)
    if below_s < math.inf:
        found = [one for one in found if one.total_s < below_s]
        return Searched(tuple(sorted(found, key=Found.rank)), lower_bound_s, tuple(unfit))
    lower_bound_s, unseen = _with_others(others, lower_bound_s)
    if found and any(isinstance(one.layout, AnyLayout) for one in others):
        found += _rearranged(min(found, key=Found.rank), lower_bound_s)
    rivals = _rivals(found, waiting)
    return Searched(tuple(sorted(found + rivals, key=Found.rank)), lower_bound_s, tuple(unfit), unseen)


def _rearranged(best: Found, lower_bound_s: float) -> list[Found]:
    """What becomes of the best when unlike devices change places, two by two, as long as that makes it faster."""
    first, better, tries, open_ = best, list[Found](), MOST_TRIES, True
    num_devices = best.setting.num_places * best.setting.num_replicas
    if best.problem.layout.site.alike or best.problem.is_large or num_devices > MOST_MOVED:
        return []
    while open_:
        open_ = False
        for layout in changed(best.problem.layout):
            if tries == 0 or best.total_s <= lower_bound_s * (1 + NEARLY):
                return better
            one = best.problem
            setting = replace(one.setting, devices=layout.devices)
            problem = Problem(one.graph, one.cluster, one.training, setting, one.starts, layout)
            if problem.quick_s() >= best.total_s * (1 - CLOSE):
                continue
            tries -= 1
            other = problem.best(lower_bound_s, thorough=tries % 8 == 0)
            if other is not None and other.total_s < best.total_s * (1 - CLOSE):
                best, open_ = other._replace(bound_s=first.bound_s), True
                better.append(best)
                break
    return better


def _with_others(others: list[Problem], lower_bound_s: float) -> tuple[float, Problem | None]:
    """(the bound with these settings, too, of which only bounds are known; which of them lowers it, if any does).

    Whether a setting can be below the least bound so far takes one walk; how far below, some dozens.
    """
    least = None
    if lower_bound_s == math.inf:
        return lower_bound_s, None
    for quick_s, _, problem in sorted((one.quick_s(), k, one) for k, one in enumerate(others)):
        if quick_s >= lower_bound_s:
            break
        if problem.hopeless():
            continue
        bound_s = max(quick_s, problem.bounds.tight(lower_bound_s))
        if bound_s < lower_bound_s:
            lower_bound_s, least = bound_s, problem
    return lower_bound_s, least


def worth_searching(graph: CostGraph, cluster: Cluster, training: Training) -> Iterator[list[tuple[int, int]]]:
    """`mesh_levels`, once the first has been looked at without those numbers of stages that have no room for any split:
    not even at one sample a micro-batch, with the most replicas."""
    levels = mesh_levels(graph, cluster, training)
    yield from levels[:1]
    site, pins = Site(cluster, training), pinned_positions(graph, training)
    room: dict[int, bool] = {}
    if len(levels) > 1 and site.alike and training.schedule in ("auto", "1f1b", "gpipe"):
        most: dict[int, int] = {}
        for pp, dp in (mesh for level in levels for mesh in level):
            most[pp] = max(dp, most.get(pp, 0))
        for pp, dp in most.items():
            room[pp] = _looked_at(pp) and _may_fit(graph, cluster, training, site, pins, pp, dp)
    for level in levels[1:]:
        if left := [mesh for mesh in level if room.get(mesh[0], True)]:
            yield left


def _looked_at(pp: int) -> bool:
    """All numbers of stages up to 128, then those of seven binary digits: 64 for each doubling."""
    return pp & ((1 << max(0, pp.bit_length() - 7)) - 1) == 0


def _may_fit(
    graph: CostGraph, cluster: Cluster, training: Training, site: Site, pins: dict[int, int], pp: int, dp: int
) -> bool:
    starts, each = stage_starts(graph.num_layers, pp, graph.allowed_cuts, pins), training.batch_size // dp
    if starts is None:
        return False
    count = each if training.microbatches == "auto" else training.microbatches
    layout = arranged(site, pp, dp).layouts[0]
    setting = Setting(pp, dp, "1f1b", max(1, count), max(1, each // count), layout.devices)
    return has_room(Problem(graph, cluster, training, setting, starts, layout).chain)


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
    below_s: float = math.inf,
) -> tuple[list[Found], float]:
    """Solve in the order of bounds; leaves in `waiting` what cannot win, and adds to `unfit` what does not fit."""
    heapq.heapify(waiting)
    found: list[Found] = []
    beaten: list[Waiting] = []
    lower, best = math.inf, below_s
    num_settings = len(waiting)
    while waiting and waiting[0].bound_s <= best * (1 + CLOSE):
        bound_s, number, is_tight, problem = heapq.heappop(waiting)
        open_still = 1 + sum(one.bound_s <= best for one in waiting)
        tell(f"solving, {open_still} of {num_settings} settings left", 1 - open_still / num_settings)
        if bound_s >= best * (1 - problem.slack) and (not found or _no_simpler(problem, found)):
            beaten.append(Waiting(bound_s, number, is_tight, problem))
        elif not is_tight:
            if not problem.hopeless():
                bound_s = max(bound_s, problem.bounds.tight(best))
            else:
                bound_s = math.inf
            if bound_s == math.inf:
                unfit.append(problem.setting)
                continue
            promising = not waiting or bound_s <= waiting[0].bound_s * PROMISING
            heapq.heappush(waiting, Waiting(bound_s, number, True, problem))
            if not found and promising and (one := problem.best(bound_s, thorough=False)) is not None:
                found.append(one)  # something to measure the others' promises by
                best = min(best, one.total_s)
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
