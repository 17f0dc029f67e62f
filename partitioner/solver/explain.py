"""Why a plan is not faster: what binds it, what it gives up, and what was assumed, one sentence each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from partitioner.graph import CostGraph
from partitioner.memory import memory_limit
from partitioner.plan import Prediction
from partitioner.profiles import Profile
from partitioner.solver.chain import cheapest_split, smallest_bottleneck
from partitioner.solver.limits import DeviceMemory
from partitioner.solver.problem import CLOSE, Found, Problem
from partitioner.solver.search import Searched
from partitioner.solver.settings import Setting, divisors
from partitioner.specs import EXECUTED, EXECUTED_SHARDS, Training, counted, format_bytes

NOTICEABLE = 0.01
"""Relative; what changes a step by less is left unsaid."""
DIVIDES = {"zero1": "the optimizer's state", "zero2": "the optimizer's state and gradients"}
MOST_TRIED = 2**14
"""Stages x micro-batches of what is tried only to be told."""


def reasons(
    found: Found, prediction: Prediction, searched: Searched, free: Found | None, fewer: Found | None
) -> tuple[str, ...]:
    """What binds first, then what else was given up, then assumptions. `free`: the best without pins; `fewer`: what is
    faster on fewer devices."""
    return (
        *_binds(found, prediction),
        *_memory(found),
        *_recomputed(found),
        *_divided(found),
        *_replicas(found, searched),
        *_devices(found, prediction, fewer),
        *_pins(found, free),
        *_schedule(found),
        *_unseen(found, searched),
        *_assumptions(found, prediction),
    )


def _binds(found: Found, prediction: Prediction) -> list[str]:
    """The slowest stage, and whether it is one layer; then the largest loss."""
    graph, setting = found.problem.graph, found.setting
    work = [stage.forward_s + stage.backward_s for stage in prediction.stages]
    if setting.num_stages == 1 or not sum(work):
        return _losses(found, prediction)
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
    return [text, *_losses(found, prediction)]


def _losses(found: Found, prediction: Prediction) -> list[str]:
    """The largest loss, with what would shrink it and by how much, each tried on this plan's own stages."""
    lost = prediction.lost
    causes = {
        "fill and drain of the pipeline": (lost.fill_drain, True),
        "waiting for transfers": (lost.communication, False),
        "gradient sync": (lost.sync, True),
        "running small micro-batches": (lost.small_microbatch, True),
    }
    name = max(causes, key=lambda cause: causes[cause][0])
    share, by_count = causes[name]
    if share < NOTICEABLE:
        return []
    text = f"{name} takes {100 * share:.1f} % of the devices' time"
    cures = [*(_other_counts(found, filling=share == lost.fill_drain) if by_count else ()), *_doubled(found)]
    if not by_count:
        cures.insert(0, f"links that took no time would save {duration(lost.communication * found.total_s)} a step")
    return [f"{text}: {'; '.join(cures)}" if cures else text]


def _other_counts(found: Found, *, filling: bool) -> list[str]:
    """What the same stages would do with other numbers of micro-batches. filling: more would shrink the loss itself."""
    setting, problem = found.setting, found.problem
    each = problem.training.batch_size // setting.num_replicas
    if setting.num_stages * each > MOST_TRIED or setting.schedule not in EXECUTED:
        return []
    totals: dict[int, float] = {}
    for count in divisors(each):
        if count != setting.num_microbatches:
            other = _timed(found, replace(setting, num_microbatches=count, samples=each // count), problem.training)
            if other is not None:
                totals[count] = other
    if not totals:
        return []
    count = min(totals, key=lambda one: (totals[one], one))
    change = totals[count] / found.total_s - 1
    if change < -NOTICEABLE / 10:
        others = counted(count, "micro-batch", "micro-batches")
        return [f"{others} instead of {setting.num_microbatches} would take {100 * -change:.1f} % less"]
    more = [other for other in totals if other > setting.num_microbatches]
    if not more:
        if not filling:
            return []
        return ["more micro-batches would shrink it, but the batch cannot be cut into more"]
    longer = 100 * (totals[more[0]] / found.total_s - 1)
    shrinks = "more micro-batches would shrink it, but " if filling else ""
    return [f"{shrinks}{more[0]} micro-batches would take {longer:.1f} % longer, as smaller ones cost more a sample"]


def _doubled(found: Found) -> list[str]:
    """What twice the batch would do, in twice as many micro-batches."""
    setting, training = found.setting, found.problem.training
    if 2 * setting.num_stages * setting.num_microbatches > MOST_TRIED or setting.schedule not in EXECUTED:
        return []
    twice = training.model_copy(update={"batch_size": 2 * training.batch_size})
    total_s = _timed(found, replace(setting, num_microbatches=2 * setting.num_microbatches), twice)
    if total_s is None or (gain := 2 * found.total_s / total_s - 1) < NOTICEABLE:
        return []
    return [f"a batch of {twice.batch_size} in as large micro-batches would give {100 * gain:.1f} % more samples/s"]


def _timed(found: Found, setting: Setting, training: Training) -> float | None:
    """Step + optimizer of the same stages in another setting; None: they do not fit there."""
    one, cuts = found.problem, np.array([found.cuts], dtype=np.int64).reshape(1, -1)
    other = Problem(one.graph, one.cluster, training, setting, one.starts, one.layout)
    if not other.fitting(cuts)[0]:
        return None
    rows, ways, _ = other.ways(cuts)
    return float(other.replayer.total_s(cuts[rows], ways).min())


def _recomputed(found: Found) -> list[str]:
    again = [stage for stage, flag in enumerate(found.recompute) if flag]
    if not again or found.problem.training.recompute == "always":
        return []
    stages = "every stage" if len(again) == found.setting.num_stages else f"stages {', '.join(map(str, again))}"
    work_s = found.problem.replayer.costs.forward_before_s
    edges = np.array([0, *found.cuts, found.problem.graph.num_layers])
    share = float(np.diff(work_s[edges])[again].sum()) / float(found.problem.replayer.costs.before_s[-1])
    return [
        f"{stages} would not fit with what their layers save, and run them again in "
        f"the backward: {100 * share:.1f} % more work in all"
    ]


def _divided(found: Found) -> list[str]:
    """Which stages' replicas divide what, where the search chose, and what that is for."""
    problem, replicas = found.problem, found.setting.num_replicas
    if problem.training.shard != "auto" or replicas == 1:
        return []
    edges, stages = np.array([0, *found.cuts, problem.graph.num_layers]), np.arange(found.setting.num_stages)
    said = []
    for level in EXECUTED_SHARDS[1:]:
        own = [stage for stage, one in enumerate(found.shard) if one == level]
        if not own:
            continue
        less = EXECUTED_SHARDS[EXECUTED_SHARDS.index(level) - 1]
        full = []
        for saving in {found.savings[stage] for stage in own}:
            memory = DeviceMemory(
                problem.graph, problem.training, found.setting, problem.layout, saving._replace(shard=less)
            )
            fits = memory.fits(stages, edges[:-1], edges[1:])
            full += [stage for stage in own if found.savings[stage] == saving and not fits[stage]]
        why = "which saves optimizer time"
        if full:
            why = f"without which {_stages(sorted(full), found)} would not fit"
        elif level != "zero1":
            why = "which takes the step less time than what else fits"
        said.append(f"{level}: the {replicas} replicas of {_stages(own, found)} divide {DIVIDES[level]}, {why}")
    return said


def _stages(numbers: list[int], found: Found) -> str:
    if len(numbers) == found.setting.num_stages:
        return "every stage" if len(numbers) > 1 else "the model"
    return f"stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _schedule(found: Found) -> list[str]:
    not_run: list[str] = [] if found.setting.schedule in EXECUTED else [found.setting.schedule]
    not_run += [f"shard={level!r}" for level in sorted({*found.shard} - {*EXECUTED_SHARDS})]
    return [f"{what} is planned and predicted; the executor of this version does not run it" for what in not_run]


def _memory(found: Found) -> list[str]:
    """Whether memory keeps the stages from being more even, and on which stage."""
    problem = found.problem
    chain, memory = problem.chain, problem.memory
    if chain.limits is None or found.setting.num_stages == 1:
        return []
    free = chain.free()
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
    limit, over = memory.limit[worst], needed[worst] - memory.room[worst]
    return [
        f"memory of stage {worst} binds: the most even split needs {format_bytes(limit + over)} there, "
        f"{format_bytes(over)} more than its limit of {format_bytes(limit)}"
    ]


def _replicas(found: Found, searched: Searched) -> list[str]:
    if found.setting.num_stages == 1 or not any(one.num_stages == 1 for one in searched.unfit):
        return []
    if any(one.setting.num_stages == 1 for one in searched.found):
        return []
    return ["whole-model replicas do not fit the memory of one device, so the model is cut into stages"]


def _devices(found: Found, prediction: Prediction, fewer: Found | None) -> list[str]:
    graph, cluster, training = found.problem.graph, found.problem.cluster, found.problem.training
    used, there = found.setting.num_places * found.setting.num_replicas, cluster.num_devices
    said = []
    if used < there:
        most = len(graph.allowed_cuts) + 1
        said.append(
            f"{used} of {there} devices are used: with at most {most} stages, replicas that divide the batch of "
            f"{training.batch_size} and what the request fixes, no mesh uses more and fits"
        )
    if fewer is not None:
        count = fewer.setting.num_places * fewer.setting.num_replicas
        said.append(
            f"{count} of these {used} devices would be faster: {duration(fewer.total_s)} instead of "
            f"{duration(found.total_s)}, {100 * (1 - fewer.total_s / found.total_s):.1f} % less (pp "
            f"{fewer.setting.num_places} x dp {fewer.setting.num_replicas}, {fewer.setting.schedule}, "
            f"{counted(fewer.setting.num_microbatches, 'micro-batch', 'micro-batches')}); ask for {count} to use no "
            "more"
        )
    elif prediction.speedup < 1:
        said.append(
            f"one device alone would take {duration(prediction.single_device_s)}, less than this plan: "
            "use fewer devices or a larger batch"
        )
    return said


def _unseen(found: Found, searched: Searched) -> list[str]:
    """What the lower bound stands for that was not solved."""
    if searched.unseen is None or found.total_s <= searched.lower_bound_s * (1 + NOTICEABLE / 10):
        return []
    setting = searched.unseen.setting
    if setting.devices:
        what = counted(setting.num_microbatches, "micro-batch", "micro-batches")
        what = f"{what} on pp {setting.num_places} x dp {setting.num_replicas}"
        return [f"{what}, too many actions a step, were not tried; the lower bound counts what they could reach"]
    return ["not every choice and order of the devices was tried; the lower bound counts what any of them could reach"]


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
    said = about_costs(graph.profile)
    if not prediction.single_device_fits:
        smallest = min(memory_limit(device, training) for device in cluster.devices)
        said.append(
            f"the model does not fit one device of {format_bytes(smallest)}: speedup is against one of unlimited memory"
        )
    if not found.problem.layout.site.alike:
        said.append(_order(found))
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


def about_costs(profile: Profile) -> list[str]:
    """What to know of a profile's seconds before believing a plan made from them."""
    said = []
    if profile.provenance != "measured":
        said.append(f"layer costs are {profile.provenance}, not measured on {profile.device}")
    if profile.traced:
        said.append("layers were timed under torch.profiler (trace_dir): about 1 us longer an operator")
    return said


def _order(found: Found) -> str:
    """How unequal devices were put in order."""
    devices = found.setting.devices
    if found.problem.layout.number == 0:
        return "devices keep their order, as no other that was tried is faster; layers are given out by relative speeds"
    order = ", ".join("/".join(map(str, row[:4])) + "/..." * (len(row) > 4) for row in devices[:8])
    return (
        f"stages are on devices {order}{', ...' if len(devices) > 8 else ''}, which is faster than the cluster's own "
        "order; layers are given out by relative speeds"
    )


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
