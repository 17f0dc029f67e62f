"""Why a plan is not faster: what binds it, what it gives up, and what was assumed, one sentence each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from partitioner.graph import CostGraph
from partitioner.memory import memory_limit
from partitioner.plan import Prediction
from partitioner.solver.chain import cheapest_split, smallest_bottleneck
from partitioner.solver.problem import CLOSE, Found
from partitioner.solver.search import Searched
from partitioner.specs import format_bytes

NOTICEABLE = 0.01
"""Relative; what changes a step by less is left unsaid."""


def reasons(found: Found, prediction: Prediction, searched: Searched, free: Found | None) -> tuple[str, ...]:
    """What binds first, then what else was given up, then assumptions. `free`: the best without pins."""
    return (
        *_binds(found, prediction),
        *_memory(found),
        *_replicas(found, searched),
        *_devices(found, prediction),
        *_pins(found, free),
        *_assumptions(found, prediction),
    )


def _binds(found: Found, prediction: Prediction) -> list[str]:
    """The slowest stage, and whether it is one layer; then the largest loss."""
    graph, setting = found.problem.graph, found.setting
    work = [stage.forward_s + stage.backward_s for stage in prediction.stages]
    if setting.num_stages == 1 or not sum(work):
        return _losses(prediction)
    slowest = int(np.argmax(work))
    first, last = graph.bounds(found.cuts)[slowest]
    over = work[slowest] / (sum(work) / len(work)) - 1
    name = f"stage {slowest} ({_layers(graph, first, last)})"
    if over < NOTICEABLE:
        text = f"the stages are even: the slowest, {name}, takes {duration(work[slowest])} a micro-batch"
    else:
        text = f"{name} is the slowest: {duration(work[slowest])} a micro-batch, {100 * over:.0f} % over the mean"
    if not any(first < cut < last for cut in graph.allowed_cuts):
        text += (
            f"; it cannot be cut further, so these stages are at most {sum(work) / work[slowest]:.2f} times as fast as "
            "one after the other, with any number of micro-batches"
        )
    return [text, *_losses(prediction)]


def _losses(prediction: Prediction) -> list[str]:
    lost = prediction.lost
    causes = {
        "fill and drain of the pipeline": (lost.fill_drain, "more micro-batches would shrink it"),
        "waiting for transfers": (lost.communication, "faster links or fewer stages would shrink it"),
        "gradient sync": (lost.sync, "a larger batch or faster links would shrink it"),
        "running small micro-batches": (
            lost.small_microbatch,
            "fewer, larger micro-batches would use the devices better",
        ),
    }
    name = max(causes, key=lambda cause: causes[cause][0])
    share, cure = causes[name]
    return [f"{name} takes {100 * share:.1f} % of the devices' time: {cure}"] if share >= NOTICEABLE else []


def _memory(found: Found) -> list[str]:
    """Whether memory keeps the stages from being more even, and on which stage."""
    problem = found.problem
    chain, memory = problem.chain, problem.memory
    if chain.limits is None or found.setting.num_stages == 1:
        return []
    free = replace(chain, limits=None)
    bottleneck = smallest_bottleneck(free)
    if chain.split(found.cuts).bottleneck_s <= bottleneck * (1 + NOTICEABLE):
        return []
    even = cheapest_split(free, bottleneck)
    if even is None:
        return []
    stages = np.arange(found.setting.num_stages)
    edges = np.array([0, *even.cuts, problem.graph.num_layers])
    needed = memory.bytes(stages, edges[:-1], edges[1:])
    worst = int(np.argmax(needed - memory.room))
    if needed[worst] <= memory.room[worst]:
        return []
    overhead = memory.overhead[worst]
    return [
        f"memory of stage {worst} binds: the most even split needs {format_bytes(needed[worst] + overhead)} there, "
        f"{format_bytes(needed[worst] - memory.room[worst])} more than its limit of "
        f"{format_bytes(memory.room[worst] + overhead)}"
    ]


def _replicas(found: Found, searched: Searched) -> list[str]:
    if found.setting.num_stages == 1 or not any(one.num_stages == 1 for one in searched.unfit):
        return []
    if any(one.setting.num_stages == 1 for one in searched.found):
        return []
    return ["whole-model replicas do not fit the memory of one device, so the model is cut into stages"]


def _devices(found: Found, prediction: Prediction) -> list[str]:
    graph, cluster, training = found.problem.graph, found.problem.cluster, found.problem.training
    used, there = found.setting.num_stages * found.setting.num_replicas, cluster.num_devices
    said = []
    if used < there:
        most = len(graph.allowed_cuts) + 1
        said.append(
            f"{used} of {there} devices are used: with at most {most} stages, replicas that divide the batch of "
            f"{training.batch_size} and what the request fixes, no mesh uses more and fits"
        )
    if prediction.speedup < 1:
        said.append(
            f"one device alone would take {duration(prediction.single_device_s)}, less than this plan: "
            "use fewer devices or a larger batch"
        )
    return said


def _pins(found: Found, free: Found | None) -> list[str]:
    if free is None:
        return []
    pinned = f"{len(found.problem.training.pin)} layers are pinned"
    if found.total_s <= free.total_s * (1 + CLOSE):
        return [f"{pinned}; without that no better split was found"]
    return [
        f"{pinned}; without that the best takes {duration(free.total_s)} instead of {duration(found.total_s)}, "
        f"{100 * (1 - free.total_s / found.total_s):.1f} % less"
    ]


def _assumptions(found: Found, prediction: Prediction) -> list[str]:
    graph, cluster, training = found.problem.graph, found.problem.cluster, found.problem.training
    profile, said = graph.profile, []
    if profile.provenance != "measured":
        said.append(f"layer costs are {profile.provenance}, not measured on {profile.device}")
    if not prediction.single_device_fits:
        smallest = min(memory_limit(device, training) for device in cluster.devices)
        said.append(
            f"the model does not fit one device of {format_bytes(smallest)}: speedup is against one of unlimited memory"
        )
    if len({device.relative_speed for device in cluster.devices}) > 1:
        said.append("devices keep their order; layers are given out by their relative speeds")
    shared = graph.synced_parameters(found.cuts)
    if shared:
        names = ", ".join(parameter.names[0] for parameter, _ in shared[:3])
        stages = sorted({stage for _, owners in shared for stage in owners})
        said.append(
            f"{names}{', ...' if len(shared) > 3 else ''} live on stages {', '.join(map(str, stages))} as copies whose "
            "gradients are summed"
        )
    profile, kinds = graph.profile, {device.kind for device in cluster.devices}
    if profile.provenance == "measured" and profile.device_kind not in kinds:
        said.append(
            f"layers were measured on {profile.device}, not on {cluster.devices[0].name}: their times are not those of "
            f"the devices planned for; measure a profile there"
        )
    sources = sorted({link.source for link in (cluster.intra, cluster.inter) if link.source})
    if sources:
        said.append(f"link figures: {'; '.join(sources)}")
    return said


def _layers(graph: CostGraph, first: int, last: int) -> str:
    return graph.ids[first] if last == first + 1 else f"{graph.ids[first]} to {graph.ids[last - 1]}"


def duration(seconds: float) -> str:
    """Three digits for people.

    >>> duration(0.01234), duration(83.0), duration(4.5e-5)
    ('12.3 ms', '83 s', '45 µs')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
