"""What can be chosen before the cuts: meshes, micro-batch counts, schedules, and which ranks make a stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Literal

import numpy as np

from partitioner.errors import ArgumentError
from partitioner.graph import CostGraph
from partitioner.schedule import placement
from partitioner.solver.layout import Ints, Layout, Ranks, Site
from partitioner.specs import Cluster, ScheduleName, Training

MOST_ACTIONS = 2**18
"""Settings chosen by us have at most this many actions a step; more micro-batches than that gain nothing."""

MOST_PERMUTED = 5
"""Devices, unequal or of uneven nodes, of which every order is tried."""

Kind = tuple[int, int, ScheduleName]
"""Stages, replicas, schedule: what makes a different plan, rather than the same one with other figures."""


@dataclass(frozen=True)
class Setting:
    """All that is chosen before the cuts."""

    num_places: int
    """Ranks of a pipeline."""
    num_replicas: int
    schedule: ScheduleName
    num_microbatches: int
    """A replica."""
    samples: int
    """Of one micro-batch."""
    ranks: Ranks
    """By place in the pipeline, one a replica."""
    stages_per_rank: int = 1

    @property
    def num_stages(self) -> int:
        return self.num_places * self.stages_per_rank

    @property
    def places(self) -> tuple[int, ...]:
        """By stage, the place that runs it."""
        return placement(self.schedule, self.num_stages, self.num_places)

    @property
    def ranks_by_stage(self) -> Ranks:
        return tuple(self.ranks[place] for place in self.places)

    @property
    def mesh(self) -> dict[str, int]:
        return {"pp": self.num_places, "dp": self.num_replicas}

    @property
    def size(self) -> tuple[int, int, bool]:
        """Smaller is simpler: of two that take the same time, the smaller one is chosen."""
        return self.num_stages, self.num_microbatches, self.schedule != "1f1b"

    @property
    def kind(self) -> Kind:
        return self.num_stages, self.num_replicas, self.schedule


def check_request(graph: CostGraph, cluster: Cluster, training: Training) -> None:
    """ArgumentError, with both numbers, where what was asked for by value cannot be had."""
    batch, most_stages = training.batch_size, len(graph.allowed_cuts) + 1
    fixed = _fixed(training)
    pp, dp = fixed.get("pp"), fixed.get("dp")
    if (pp or 1) * (dp or 1) > cluster.num_devices:
        raise ArgumentError(
            f"the mesh {fixed} needs {(pp or 1) * (dp or 1)} devices, there are {cluster.num_devices}: "
            "use a smaller mesh or mesh='auto'"
        )
    if pp is not None and pp > most_stages:
        fixed_cuts = list(graph.profile.no_cut.values())
        why = (
            f"; of its {graph.num_layers} layers, {len(fixed_cuts)} cannot start a stage: {fixed_cuts[0]}"
            if fixed_cuts
            else ""
        )
        raise ArgumentError(
            f"pp={pp} stages need {pp} layers that can be cut apart, the model has {most_stages}{why}: use "
            f"pp={most_stages} or fewer, and the other devices as replicas (dp)"
        )
    if dp is not None and batch % dp:
        raise ArgumentError(
            f"batch_size {batch} does not divide by {dp} replicas: use batch_size {_near(batch, dp)}, or a mesh with "
            f"dp of {_either([str(d) for d in divisors(batch) if d <= cluster.num_devices])}"
        )
    if training.microbatches != "auto":
        count = training.microbatches
        replicas = [dp] if dp is not None else range(1, cluster.num_devices // (pp or 1) + 1)
        if all(batch % (d * count) for d in replicas):
            each = batch // (dp or 1)
            raise ArgumentError(
                f"{count} micro-batches do not divide the {each} samples of {'a replica' if dp else 'the batch'}: use "
                f"{_near_divisors(each, count)} micro-batches, or batch_size {_near(batch, count * (dp or 1))}"
            )
    _check_pins(graph, cluster, training)


def recomputation(training: Training) -> Literal["never", "always", "where needed"]:
    """Which stages run their forwards again for their backwards; where needed: those that do not fit otherwise."""
    return "where needed" if training.recompute == "auto" else training.recompute


def pinned_positions(graph: CostGraph, training: Training) -> dict[int, int]:
    """Layer position -> stage of what the user pinned."""
    return {graph.position[name]: stage for name, stage in training.pin.items()}


def _check_pins(graph: CostGraph, cluster: Cluster, training: Training) -> None:
    unknown = [name for name in training.pin if name not in graph.position]
    if unknown:
        raise ArgumentError(
            f"pin names the layer {unknown[0]!r}, which the model does not have; its {graph.num_layers} layers are "
            f"{', '.join(graph.ids[:4])}{', ...' if graph.num_layers > 4 else ''}"
        )
    pins = sorted(pinned_positions(graph, training).items())
    highest = max(training.pin.values(), default=0)
    pp = _fixed(training).get("pp")
    if highest >= (pp or cluster.num_devices):
        there = f"pp={pp}" if pp else f"a pipeline over {cluster.num_devices} devices"
        raise ArgumentError(
            f"pin names stage {highest}, but {there} has stages 0 to {(pp or cluster.num_devices) - 1} at most: pin to "
            "one of these"
        )
    for position, stage in pins:
        # Every stage before it needs a cut, and every one after it.
        before = sum(cut <= position for cut in graph.allowed_cuts)
        after = len(graph.allowed_cuts) - before
        if before < stage or (pp and after < pp - 1 - stage):
            needs = f"{stage} cuts before it, but {before} are possible"
            if before >= stage and pp:
                needs = f"{pp - 1 - stage} cuts after it, but {after} are possible"
            raise ArgumentError(
                f"pin puts layer {graph.ids[position]} on stage {stage}, which needs {needs}: pin it to another stage"
            )
    for (first, stage), (second, later) in pairwise(pins):
        if later < stage:
            raise ArgumentError(
                f"pin puts layer {graph.ids[first]} on stage {stage} and the later layer {graph.ids[second]} on stage "
                f"{later}: stages are consecutive layers, so a later layer cannot be on an earlier stage"
            )
        between = [cut for cut in graph.allowed_cuts if first < cut <= second]
        if later - stage > len(between):
            reasons = [graph.profile.no_cut[graph.ids[k]] for k in range(first + 1, second + 1) if k not in between]
            raise ArgumentError(
                f"pin puts layer {graph.ids[first]} on stage {stage} and layer {graph.ids[second]} on stage {later}, "
                f"but between them {len(between)} cuts are possible and {later - stage} are needed"
                + (f": {reasons[0]}" if reasons else "")
            )


def mesh_levels(graph: CostGraph, cluster: Cluster, training: Training) -> list[list[tuple[int, int]]]:
    """(stages, replicas) to choose from, those that use the most devices first; a level uses one number of devices."""
    most_stages, fixed = len(graph.allowed_cuts) + 1, _fixed(training)
    fewest_stages = max(training.pin.values(), default=0) + 1
    levels: dict[int, list[tuple[int, int]]] = {}
    for pp in range(fewest_stages, min(most_stages, cluster.num_devices) + 1):
        for dp in range(1, cluster.num_devices // pp + 1):
            if training.batch_size % dp == 0 and fixed.get("pp", pp) == pp and fixed.get("dp", dp) == dp:
                levels.setdefault(pp * dp, []).append((pp, dp))
    return [levels[used] for used in sorted(levels, reverse=True)]


def settings(site: Site, training: Training, meshes: Sequence[tuple[int, int]]) -> Iterator[tuple[Setting, Layout]]:
    """Every setting of those meshes: micro-batch counts that divide a replica's samples, schedules, and layouts."""
    for pp, dp in meshes:
        each = training.batch_size // dp
        counts = divisors(each) if training.microbatches == "auto" else [training.microbatches]
        schedules: tuple[ScheduleName, ...]
        if training.schedule != "auto":
            schedules = (training.schedule,)
        else:
            schedules = ("1f1b", "gpipe") if pp > 1 else ("1f1b",)
        arranged = layouts(site, pp, dp)
        for count in counts:
            for schedule in schedules:
                for stages in stages_per_rank(schedule, training, pp):
                    too_many = training.microbatches == "auto" and count > 1 and 2 * pp * stages * count > MOST_ACTIONS
                    if each % count == 0 and not too_many:
                        for layout in arranged:
                            yield Setting(pp, dp, schedule, count, each // count, layout.ranks, stages), layout


def stages_per_rank(schedule: ScheduleName, training: Training, pp: int) -> tuple[int, ...]:
    """How many stages each rank runs."""
    if schedule == "interleaved":
        return (2, 3, 4) if pp > 1 else (2,)
    return (2,) if schedule == "zero-bubble-v" else (1,)


def layouts(site: Site, num_places: int, num_replicas: int) -> list[Layout]:
    """A replica's places side by side, or a place's replicas side by side.

    Side by side is within a node where that is possible, so the first keeps transfers and the second keeps gradient
    sync off the slow links. One of them is left out where both take the same time. Devices that are not alike, or of
    nodes with more and fewer of them, are put in every other order, too, where they are few. More that are
    not alike are put by speed and by memory, as a stage's place in the schedule can ask for either.
    """
    used = num_places * num_replicas
    if used > site.cluster.num_devices:
        raise ArgumentError(
            f"{num_places} stages x {num_replicas} replicas need {used} devices, the cluster has "
            f"{site.cluster.num_devices}: use a smaller mesh"
        )
    by_node = np.argsort(site.node[:used], kind="stable")
    found: dict[bytes, Layout] = {}
    for order in _orders(site, by_node):
        for at in (order.reshape(num_replicas, num_places).T, order.reshape(num_places, num_replicas)):
            looks = _looks(site, at)
            if looks not in found:
                found[looks] = Layout(site, tuple(map(tuple, at.tolist())), len(found))
    return list(found.values())


def _looks(site: Site, at: Ints) -> bytes:
    """The same for ranks [places, replicas] whose replicas look the same, in whatever order."""
    if site.alike and site.one_link:
        return b""
    columns = [site.speed[at], site.room[at]]
    if not site.one_link:
        columns.append(np.array([np.argmax(site.node[at] == site.node[at[place]], axis=0) for place in range(len(at))]))
        columns.append(
            (site.node[at] != site.node[at[:, :1]]).any(axis=1, keepdims=True) | np.zeros(at.shape, np.bool_)
        )
    table = np.concatenate([column.astype(float) for column in columns])
    return table[:, np.lexsort(table)].tobytes()


def _orders(site: Site, ranks: Ints) -> Iterator[Ints]:
    """Ranks in the orders to try, the cluster's own first."""
    yield ranks
    figures = list(zip(site.speed[ranks].tolist(), site.room[ranks].tolist(), strict=True))
    even = site.one_link or len(set(np.unique(site.node[ranks], return_counts=True)[1].tolist())) == 1
    if len(set(figures)) == 1 and (even or len(ranks) > MOST_PERMUTED):
        return
    if len(ranks) <= MOST_PERMUTED:
        seen = {tuple((*figures[k], int(site.node[ranks[k]])) for k in range(len(ranks)))}
        for order in permutations(range(len(ranks))):
            looks = tuple((*figures[k], int(site.node[ranks[k]])) for k in order)
            if looks not in seen:
                seen.add(looks)
                yield ranks[list(order)]
        return
    for key in (-site.speed[ranks], site.speed[ranks], -site.room[ranks]):
        yield ranks[np.argsort(key, kind="stable")]


def divisors(number: int) -> list[int]:
    """Ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


def _fixed(training: Training) -> Mapping[str, int]:
    """The axes that the user gave; an axis that is left out is free."""
    return {} if training.mesh == "auto" else {str(axis): size for axis, size in training.mesh.items()}


def _near(number: int, factor: int) -> str:
    """The multiples next to a number."""
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


def _near_divisors(number: int, count: int) -> str:
    below = max(d for d in divisors(number) if d <= count)
    above = [d for d in divisors(number) if d > count]
    return f"{below} or {above[0]}" if above else str(below)


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
