"""What can be chosen before the cuts: meshes, micro-batch counts, schedules, and which devices make a stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from partitioner.errors import ArgumentError
from partitioner.graph import CostGraph
from partitioner.profiles import Profile
from partitioner.schedule import placement
from partitioner.solver.arrangement import arranged
from partitioner.solver.layout import AnyLayout, Devices, Layout, Site
from partitioner.specs import EXECUTED_SHARDS, Cluster, Saving, ScheduleName, Shard, Training
from partitioner.split import Split

MOST_ACTIONS = 2**18
"""A step that we choose has at most so many; settings with more are only held against their lower bound."""

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
    devices: Devices
    """By place in the pipeline, one a replica; () where only bounds are asked for."""
    stages_per_rank: int = 1

    @property
    def num_stages(self) -> int:
        return self.num_places * self.stages_per_rank

    @property
    def places(self) -> tuple[int, ...]:
        """By stage, the place that runs it."""
        return placement(self.schedule, self.num_stages, self.num_places)

    @property
    def devices_by_stage(self) -> Devices:
        return tuple(self.devices[place] for place in self.places)

    @property
    def mesh(self) -> dict[str, int]:
        return {"pp": self.num_places, "dp": self.num_replicas}

    def split(self, cuts: Sequence[int], savings: Sequence[Saving] = ()) -> Split:
        """With these cuts and what each stage saves."""
        return Split(tuple(cuts), self.devices_by_stage, self.num_microbatches, self.schedule, tuple(savings))

    @property
    def in_words(self) -> str:
        count = self.num_microbatches
        mesh = f"pp={self.num_places}, dp={self.num_replicas}"
        return f"{mesh}, {self.schedule}, {count} micro-batch{'es' if count > 1 else ''}"

    @property
    def size(self) -> tuple[int, int, bool]:
        """Smaller is simpler: of two that take the same time, the smaller one is chosen."""
        return self.num_stages, self.num_microbatches, self.schedule != "1f1b"

    @property
    def kind(self) -> Kind:
        return self.num_stages, self.num_replicas, self.schedule


def numbered(devices: Devices, cluster: Cluster) -> dict[int, int]:
    """Device -> rank, in the order of ranks: node by node, as launchers number them, and in a node by device."""
    used = sorted((device for row in devices for device in row), key=lambda one: (cluster.nodes[one], one))
    return {device: rank for rank, device in enumerate(used)}


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


def savings(graph: CostGraph, training: Training, num_stages: int, num_replicas: int) -> tuple[Saving, ...]:
    """How a stage may run, what takes the least time first; in the step of several stages, nothing is ever faster than
    another way that recomputes no more and divides no more, but for dividing the optimizer's state alone.

    That costs such stages nothing: their gradients are scattered and their weights gathered where an all-reduce would
    do both, and each replica has a part of the optimizer's work. Whole replicas reduce gradients during the backward
    instead, so of them neither is always faster.
    """
    levels: tuple[Shard, ...] = (training.one_shard,) if num_replicas > 1 else ("none",)
    if training.shard == "auto" and num_replicas > 1:
        works = graph.profile.optimizer_s > 0 and graph.trainable_elements(0, graph.num_layers) > 0
        levels = EXECUTED_SHARDS[1:] if works and num_stages > 1 else EXECUTED_SHARDS
    recomputes = {"never": (False,), "always": (True,), "auto": (False, True)}[training.recompute]
    return tuple(Saving(again, level) for again in recomputes for level in levels)


def pinned_positions(graph: CostGraph, training: Training) -> dict[int, int]:
    """Layer position -> stage of what the user pinned."""
    return {graph.position[name]: stage for name, stage in training.stage_pins.items()}


def kept_together(profile: Profile, training: Training) -> Profile:
    """The profile without the cuts that would part layers that are to share a stage."""
    position = {layer.id: k for k, layer in enumerate(profile.layers)}
    no_cut = dict(profile.no_cut)
    for word, names in training.together.items():
        places = sorted(position[name] for name in names if name in position)
        for layer in profile.layers[places[0] + 1 : places[-1] + 1] if places else ():
            no_cut.setdefault(layer.id, f"pin keeps {', '.join(names)} together ({word!r})")
    return profile if no_cut == profile.no_cut else profile.model_copy(update={"no_cut": no_cut})


def _check_pins(graph: CostGraph, cluster: Cluster, training: Training) -> None:
    alone = [(word, names[0]) for word, names in training.together.items() if len(names) == 1]
    if alone:
        raise ArgumentError(
            f"pin has {alone[0][0]!r} for layer {alone[0][1]!r} alone: give other layers the same word, to share "
            "its stage, or give the number of a stage"
        )
    unknown = [name for name in training.pin if name not in graph.position]
    if unknown:
        raise ArgumentError(
            f"pin names the layer {unknown[0]!r}, which the model does not have; its {graph.num_layers} layers are "
            f"{', '.join(graph.ids[:4])}{', ...' if graph.num_layers > 4 else ''}"
        )
    pins = sorted(pinned_positions(graph, training).items())
    highest = max(training.stage_pins.values(), default=0)
    pp, dp = _fixed(training).get("pp"), _fixed(training).get("dp", 1)
    most = pp or cluster.num_devices // dp
    if highest >= most:
        there = f"pp={pp}" if pp else f"a pipeline over {cluster.num_devices} devices"
        there += f" with dp={dp}" if dp > 1 and not pp else ""
        raise ArgumentError(
            f"pin names stage {highest}, but {there} has stages 0 to {most - 1} at most: pin to one of these"
            + (f", or take {dp * (highest + 1)} devices" if dp > 1 and not pp else "")
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
    fewest_stages = max(training.stage_pins.values(), default=0) + 1
    levels: dict[int, list[tuple[int, int]]] = {}
    for pp in range(fewest_stages, min(most_stages, cluster.num_devices) + 1):
        for dp in range(1, cluster.num_devices // pp + 1):
            if training.batch_size % dp == 0 and fixed.get("pp", pp) == pp and fixed.get("dp", dp) == dp:
                levels.setdefault(pp * dp, []).append((pp, dp))
    return [levels[used] for used in sorted(levels, reverse=True)]


def settings(site: Site, training: Training, meshes: Sequence[tuple[int, int]]) -> Iterator[tuple[Setting, Layout]]:
    """Every setting of those meshes: micro-batch counts that divide a replica's samples, schedules, and layouts."""
    return ((setting, layout) for setting, layout, unseen in every_setting(site, training, meshes) if not unseen)


def every_setting(
    site: Site, training: Training, meshes: Sequence[tuple[int, int]]
) -> Iterator[tuple[Setting, Layout, bool]]:
    """Settings, and with True those that only bounds look at: layouts that are left out, counts of micro-batches that
    make more than `MOST_ACTIONS`."""
    for pp, dp in meshes:
        each = training.batch_size // dp
        counts = divisors(each) if training.microbatches == "auto" else [training.microbatches]
        schedules: tuple[ScheduleName, ...]
        if training.schedule != "auto":
            schedules = (training.schedule,)
        else:
            schedules = ("1f1b", "gpipe") if pp > 1 else ("1f1b",)
        found = arranged(site, pp, dp)
        for count in counts:
            for schedule in schedules:
                for stages in stages_per_rank(schedule, training, pp):
                    too_many = training.microbatches == "auto" and count > 1 and 2 * pp * stages * count > MOST_ACTIONS
                    if each % count == 0:
                        for layout in (*found.layouts, *found.others):
                            setting = Setting(pp, dp, schedule, count, each // count, layout.devices, stages)
                            yield setting, layout, too_many or isinstance(layout, AnyLayout)


def stages_per_rank(schedule: ScheduleName, training: Training, pp: int) -> tuple[int, ...]:
    """How many stages each rank runs."""
    if schedule == "interleaved":
        return (2, 3, 4) if pp > 1 else (2,)
    return (2,) if schedule == "zero-bubble-v" else (1,)


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
