"""Before anyone rents a GPU: does the training fit, how fast is it, how many devices it needs, what would change it.

    request    what was asked for, checked
    study      the model on meta: what each layer launches (priced by `steps`) and holds (added up by `memory`)
    layouts    the fastest mesh of the devices that fits, and the next ones
               on fewer devices, and with one thing changed, the same again

Nothing is computed and no device is touched: a laptop answers for a cluster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from torch import nn

from partitioner.arguments import check_arguments
from partitioner.errors import ArgumentError, InfeasibleError, PartitionerError, expect
from partitioner.forecast import CapacityReport, CurvePoint, LayoutForecast, MeasuredStep, StepParts, Variation
from partitioner.layouts import Candidate, Demand, Found, Search, check_wish, held_by_stage
from partitioner.losses import LossFunction
from partitioner.measured import Compared, compared, measured_runs
from partitioner.microbatches import BatchDim, MicroBatch, as_call
from partitioner.profiles import Profile
from partitioner.progress import Progress, shown
from partitioner.request import Request, check_changes, requested
from partitioner.specs import (
    EXECUTED,
    Cluster,
    Recompute,
)
from partitioner.study import Study
from partitioner.tracing import unwrap
from partitioner.trial import explained

USUAL_NODE = 8
"""Devices of a node as they are rented; racks of more are named as what they are: "72xGB200"."""


def capacity(
    model: nn.Module,
    example_inputs: Any,
    *,
    gpus: str | Cluster,
    loss_fn: LossFunction | None = None,
    example_target: Any = None,
    batch_size: int | None = None,
    batch_dim: BatchDim = 0,
    mesh: Literal["auto"] | Mapping[str, int] = "auto",
    microbatches: int | Literal["auto"] = "auto",
    schedule: str = "auto",
    optimizer: str | float = "adamw",
    precision: str = "auto",
    accumulate: Literal["auto", "fp32"] = "auto",
    recompute: str = "auto",
    shard: str = "auto",
    sequence_parallel: bool = True,
    memory_limit: str | int | None = None,
    what_if: Mapping[str, Sequence[Any]] | None = None,
    curve: bool = True,
    longest_sequence: bool = False,
    sequence_dim: int = 1,
    price_per_hour: float | None = None,
    most_devices: int | None = None,
    max_share: float = 1 / 16,
    hardware: str | None = None,
    measured: Any = (),
    progress: bool | Progress | None = None,
) -> CapacityReport:
    """Whether training `model` fits these devices, what fills them, how fast it is, and what would change it.

    Everything is estimated, on the meta device: the model may live there, and is left as it was. `example_inputs`: one
    batch (tensor, tuple = arguments, dict = keywords), of any number of samples. `gpus`: "8xH100", "2x8xA100-80GB" or
    a Cluster of equal devices. With no `loss_fn` the model's own loss is used, or the backward starts at its outputs.

    `mesh`: {"tp": 8, "pp": 4, "dp": 2}, "auto" or some of its axes: tp divides layers, pp makes stages, dp replicas.
    `microbatches`, `schedule`, `recompute` (never, selective, always) and `shard` (none, zero1, zero2, zero3) are
    searched where they are "auto". `precision`: "auto" is the model's own; "bf16-mixed" keeps weights and activations
    in 16 bits and the optimizer's copy in 32. `accumulate="fp32"`: gradients are added up in 32 bits.
    `optimizer`: sgd, sgd-momentum, adam, adamw, adafactor, or bytes of state a parameter element.

    `what_if`: {"precision": ["bf16-mixed"], "batch_size": [512], "gpus": ["8xA100-80GB"]}, one change at a time, of
    batch_size, sequence_length, precision, optimizer, recompute, shard, gpus, mesh. `curve`: the best layout on fewer
    devices too; with `price_per_hour` of one device, what a step costs. `longest_sequence`: search it too; samples have
    their length along `sequence_dim`. `most_devices`: where the search for the fewest devices ends. `hardware`: a file
    of your own devices. `max_share`: a layer is at most this share of the work, where it can be opened.

    `measured`: runs of this training that were had on such devices, in this precision: {"mesh": {"dp": 8},
    "batch_size": 64, "microbatches": 2, "step_s": 0.82}, or a list of them, with `samples_per_s` instead of `step_s`,
    and `recompute`, `shard`, `schedule`, `stages_per_rank`, `sequence_length` where those were not never, none, 1f1b, 1
    and that of the inputs. They move all times, layouts like theirs the most, and narrow their bands (`calibration`).

    A training that does not fit is a report with `fits` False. Errors: ArgumentError (with both numbers), and
    UnsupportedModelError for a model that cannot be followed without its values.
    """
    study = Study(
        unwrap(model),
        example_inputs,
        loss_fn=loss_fn,
        target=example_target,
        batch_dim=batch_dim,
        sequence_dim=sequence_dim,
        max_share=max_share,
    )
    asked = requested(
        study,
        gpus=gpus,
        batch_size=batch_size,
        mesh=mesh,
        microbatches=microbatches,
        schedule=schedule,
        optimizer=optimizer,
        precision=precision,
        accumulate=accumulate,
        recompute=recompute,
        shard=shard,
        sequence_parallel=sequence_parallel,
        memory_limit=memory_limit,
        hardware=hardware,
    )
    cluster = asked.cluster
    check_changes(what_if or {})
    runs = measured_runs(measured)
    if price_per_hour is not None:
        expect("price_per_hour", price_per_hour, (int, float), "the price of one device")
    if price_per_hour is not None and price_per_hour < 0:
        raise ArgumentError(f"price_per_hour={price_per_hour} is impossible: give 0 or more")
    if most_devices is not None and (isinstance(most_devices, bool) or most_devices < 1):
        raise ArgumentError(f"most_devices={most_devices!r} is impossible: give 1 or more")
    with shown(progress) as tell:
        tell("following the model", 0.0)
        with explained(
            study.model, [MicroBatch(*as_call(example_inputs), example_target, study.samples)], loss_fn, batch_dim
        ):
            demand = asked.demand(study)
        check_wish(asked.wish, demand, cluster.num_devices)
        beside = compared(runs, asked, study)
        if beside:
            asked = replace(asked, evidence=tuple(one.evidence for one in beside))
            demand = asked.demand(study)
        tell("searching layouts", 0.6)
        search = Search(demand, asked.wish)
        found = search.run(cluster.num_devices)
        if not found.candidates:
            raise InfeasibleError(_no_layout(asked, demand))
        alone_s = search.alone_s()
        plans = [_forecast(one, demand, alone_s, found.candidates[0]) for one in found.candidates]
        if found.fits and not any(plan.runnable for plan in plans):
            plans += _runnable(search, cluster.num_devices, alone_s, found.candidates[0])
        tell("counting devices", 0.7)
        most = most_devices or max(1024, cluster.num_devices)
        fewest = search.fewest_devices(cluster.num_devices if found.fits else most)
        if fewest is None and found.fits:
            fewest = cluster.num_devices
        points = _curve(search, cluster.num_devices, found, alone_s, price_per_hour) if curve else ()
        tell("changing one thing at a time", 0.8)
        variations = tuple(
            _varied(study, asked, name, value) for name, values in (what_if or {}).items() for value in values
        )
        best = found.candidates[0]
        length = _longest(study, asked, best, tell) if longest_sequence else None
    graph = demand.graph
    trained = [parameter for parameter in graph.profile.parameters if parameter.trainable]
    return CapacityReport(
        model=type(study.model).__name__,
        num_parameters=sum(math.prod(p.shape) for p in graph.profile.parameters),
        num_trainable=sum(math.prod(p.shape) for p in trained),
        stored_bytes=study.stored_bytes,
        layers=graph.ids,
        cluster=cluster,
        batch_size=asked.batch_size,
        precision=asked.precision,
        optimizer=optimizer if isinstance(optimizer, str) else f"{optimizer:g} bytes a parameter",
        static_bytes_per_parameter=round(demand.state.total, 3) if trained else 0.0,
        fits=found.fits,
        best=plans[0],
        others=tuple(plans[1:]),
        num_considered=found.num_considered,
        fewest_devices=fewest,
        most_devices=most,
        largest_microbatch=search.largest_microbatch(best.layout),
        longest_sequence=length,
        curve=points,
        variations=variations,
        price_per_hour=price_per_hour,
        band=demand.prices.band(best.layout),
        measured=tuple(_beside(one, demand) for one in beside),
        why=(*_why(asked, demand, best, found), *_why_measured(demand, beside, what_if or {})),
    )


# -- answers


def _forecast(one: Candidate, demand: Demand, alone_s: float, best: Candidate) -> LayoutForecast:
    layout, step = one.layout, one.step
    batch = demand.training.batch_size
    devices = layout.num_devices
    throughput = batch / step.step_s if step.step_s else 0.0
    speedup = throughput * alone_s
    reasons = _not_run(one, demand)
    return LayoutForecast(
        mesh={"tp": layout.tp, "pp": layout.pp, "dp": layout.dp},
        schedule=layout.schedule,
        stages_per_rank=layout.stages_per_rank,
        microbatch_samples=int(layout.microbatch),
        num_microbatches=layout.num_microbatches,
        recompute=layout.recompute,
        shard=layout.shard,
        sequence_parallel=layout.sequence_parallel,
        cuts=layout.cuts or (),
        in_flight=held_by_stage(layout),
        memory=one.memory,
        limit_bytes=demand.limit_bytes,
        step_s=step.step_s,
        factor=step.factor,
        band=step.band,
        parts=_parts(one),
        throughput=throughput,
        speedup=speedup,
        efficiency=speedup / devices,
        runnable=not reasons,
        why_not=reasons,
        note="" if one is best else _compared(one, best),
    )


def _beside(one: Compared, demand: Demand) -> MeasuredStep:
    correction = demand.prices.calibration.at(one.evidence.place)
    layout = one.layout
    return MeasuredStep(
        mesh={"tp": layout.tp, "pp": layout.pp, "dp": layout.dp},
        batch_size=one.batch_size,
        num_microbatches=layout.num_microbatches,
        measured_s=one.measured_s,
        predicted_s=one.predicted_s,
        then_s=one.predicted_s * correction.factor,
    )


def _runnable(search: Search, num_devices: int, alone_s: float, best: Candidate) -> list[LayoutForecast]:
    """The fastest that this version runs, where there is one."""
    plain = replace(search.wish, mesh={"tp": 1} | dict(search.wish.mesh), shard="none")
    found = []
    for schedule in EXECUTED:
        for recompute in (plain.recompute,) if plain.recompute is not None else get_args(Recompute):
            other = Search(search.demand, replace(plain, schedule=plain.schedule or schedule, recompute=recompute))
            other.cuts = search.cuts
            answer = other.run(num_devices, enough=1)
            if answer.fits:
                told = _forecast(answer.candidates[0], search.demand, alone_s, best)
                found += [told] if told.runnable else []
    return sorted(found, key=lambda told: told.step_s)[:1]


def _parts(one: Candidate) -> StepParts:
    step = one.step
    return StepParts(
        compute_s=step.compute_s,
        recompute_s=step.recompute_s,
        tensor_parallel_s=step.tp_s,
        gather_s=step.gather_s,
        transfer_s=step.send_s,
        bubble_s=step.bubble_s,
        sync_s=step.dp_s,
        optimizer_s=step.optimizer_s,
        other_s=step.base_s,
    )


_WORDS = {
    "compute_s": "computes longer in small pieces",
    "recompute_s": "computes layers again",
    "tensor_parallel_s": "waits longer for all-reduces of tensor parallelism",
    "gather_s": "gathers sharded weights",
    "transfer_s": "sends more between stages",
    "bubble_s": "idles longer while the pipeline fills and drains",
    "sync_s": "waits longer for gradients of replicas",
    "optimizer_s": "has a longer optimizer step",
    "other_s": "has more overhead",
}


def _compared(one: Candidate, best: Candidate) -> str:
    """Why it is not the best, in a sentence."""
    if best.over_bytes > 0:
        short = (one.over_bytes - best.over_bytes) / 2**30
        return f"short of {short:.1f} GiB more"
    mine, theirs = _parts(one), _parts(best)
    name = max(_WORDS, key=lambda part: getattr(mine, part) - getattr(theirs, part))
    slower = one.step.step_s / best.step.step_s - 1
    lost = (getattr(mine, name) - getattr(theirs, name)) / best.step.step_s
    if lost <= 1e-4 or slower <= 0:
        return "as fast, as far as can be told, and less simple"
    return f"{100 * slower:.1f} % slower: {_WORDS[name]} ({100 * lost:.1f} % of the best step)"


def _not_run(one: Candidate, demand: Demand) -> tuple[str, ...]:
    """What of it the executor refuses, in its own words."""
    layout = one.layout
    own = demand.graph.profile
    asked: list[dict[str, Any]] = [{"mesh": {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}}]
    if layout.pp > 1:
        asked.append({"schedule": layout.schedule})
    asked += [{"recompute": layout.recompute}, {"shard": layout.shard}]
    if demand.precision.endswith("-mixed") or demand.precision != _precision_of(own):
        asked.append({"precision": demand.precision})
    reasons = []
    for arguments in asked:
        try:
            check_arguments(**arguments)
        except ArgumentError as error:
            reasons.append(str(error))
    if demand.accumulate == "fp32" and demand.state.weights < 4:
        reasons.append("accumulate='fp32' is not built in this version")
    return tuple(reasons)


def _precision_of(profile: Profile) -> str:
    widths = {"bfloat16": "bf16", "float16": "fp16"}
    kinds = Counter(parameter.dtype for parameter in profile.parameters)
    return widths.get(kinds.most_common(1)[0][0], "fp32") if kinds else "fp32"


def _curve(
    search: Search, num_devices: int, found: Found, alone_s: float, price: float | None
) -> tuple[CurvePoint, ...]:
    counts = sorted({*(2**k for k in range(num_devices.bit_length()) if 2**k < num_devices), num_devices})
    points = []
    narrow = replace(search.wish, mesh={axis: size for axis, size in search.wish.mesh.items() if axis in ("tp", "pp")})
    for count in counts:
        if count == num_devices:
            answer = found
        else:
            other = Search(search.demand, narrow)
            other.cuts = search.cuts
            answer = other.run(count, enough=1)
            if not answer.candidates and search.wish.mesh:
                other.wish = replace(search.wish, mesh={})
                answer = other.run(count, enough=1)
        if not answer.candidates:
            continue
        best = answer.candidates[0]
        layout = _forecast(best, search.demand, alone_s, best)
        cost = None if price is None or not answer.fits else price * count * best.step.step_s / 3600
        points.append(
            CurvePoint(
                num_devices=count,
                fits=answer.fits,
                layout=layout,
                price_per_step=cost,
                price_per_million_samples=None if cost is None else cost * 1e6 / search.demand.training.batch_size,
            )
        )
    return tuple(points)


def _varied(study: Study, asked: Request, name: str, value: Any) -> Variation:
    """The best layout with one argument changed; what cannot be had says why."""
    change = f"{name}={value}" if not isinstance(value, Cluster) else f"gpus={value.num_devices} devices"
    try:
        changed = asked.changed(study, name, value)
        demand = changed.demand(study)
        check_wish(changed.wish, demand, changed.cluster.num_devices)
        search = Search(demand, changed.wish)
        found = search.run(changed.cluster.num_devices, enough=1)
        if not found.candidates:
            raise InfeasibleError(_no_layout(changed, demand))
        best = found.candidates[0]
        return Variation(change=change, fits=found.fits, layout=_forecast(best, demand, search.alone_s(), best))
    except PartitionerError as error:
        return Variation(change=change, fits=False, refused=str(error))


def _longest(study: Study, asked: Request, best: Candidate, tell: Progress) -> int | None:
    """The longest sequence, in steps of an eighth of its power of two, of which one sample fits on the best mesh."""
    start, layout = study.expect_length(), best.layout

    def fits(length: int) -> bool:
        tell(f"trying a sequence of {length:,}", 0.9)
        try:
            demand = replace(asked, sequence_length=length).demand(study)
        except PartitionerError:
            return False
        search = Search(demand, asked.wish)
        least = search.cut(replace(search.smallest(layout), microbatch=1))
        return search.over(search.memory(least)) <= 0

    low, high = 0, start
    while high < 2**24 and fits(high):
        low, high = high, 2 * high
    if not low:
        while high > 1 and not fits(high):
            high //= 2
        return high if fits(high) else None
    step = max(1, low // 8)
    while high - low > step:
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _no_layout(asked: Request, demand: Demand) -> str:
    layers, mesh = len(demand.graph.allowed_cuts) + 1, asked.wish.mesh
    return (
        f"no mesh of {asked.cluster.num_devices} devices divides a batch of {asked.batch_size} and the {layers} layers "
        f"that can be cut apart{f' with {dict(mesh)}' if mesh else ''}: use a batch that is a multiple of "
        "the devices"
    )


def _why(asked: Request, demand: Demand, best: Candidate, found: Found) -> tuple[str, ...]:
    layout = best.layout
    said = []
    if found.fits:
        parts = {name: getattr(_parts(best), name) for name in StepParts.model_fields if name != "compute_s"}
        name = max(parts, key=lambda part: parts[part])
        share = parts[name] / best.step.step_s
        said.append(
            f"beside compute, most of the step is {_NAMES[name]}: {100 * share:.1f} %"
            if share > 0.01
            else "nearly all of the step is compute"
        )
    if asked.precision.endswith("-mixed"):
        said.append(
            f"{asked.precision}: weights and activations in 16 bits, the optimizer keeps a copy of the weights and its "
            "state in 32"
        )
    if layout.tp > 1:
        whole = "divided by the sequence" if layout.sequence_parallel else "whole on each rank"
        said.append(
            f"tensor parallelism splits weights by columns, then rows; what it leaves whole is {whole}; heads and "
            "features are assumed to divide"
        )
    if demand.device.slack:
        said.append(
            f"memory includes the context, {demand.device.communicator_bytes / 2**30:.1f} GiB for each axis of the "
            f"mesh and {100 * demand.device.slack:.0f} % that the allocator holds beside what is in use"
        )
    if demand.per_node > USUAL_NODE:
        nodes, name = -(-asked.cluster.num_devices // USUAL_NODE), demand.device.name
        said.append(
            f"{demand.per_node} devices are taken as one node, all joined by its links: where a node has "
            f"{USUAL_NODE}, ask for gpus='{nodes}x{USUAL_NODE}x{name}'"
        )
    said.append("all figures are estimated: nothing was run")
    return tuple(said)


def _why_measured(demand: Demand, beside: Sequence[Compared], what_if: Mapping[str, Any]) -> Iterator[str]:
    """What was made of measured runs, and where they were of no use."""
    calibration = demand.prices.calibration
    if beside:
        yield (
            "times are moved by what the measured runs showed, the more the likelier a layout is to theirs; a layout's "
            "band is what is then left of it"
        )
    if calibration.common:
        yield (
            f"the measured runs are further from their predictions than 99 of 100 published ones (at most "
            f"{100 * math.expm1(calibration.fitted.usual):.0f} % off): what is beyond that, "
            f"{100 * math.expm1(calibration.common):+.0f} %, was taken for all layouts alike. Was it this training?"
        )
    if beside and (others := sorted({"gpus", "precision"} & set(what_if))):
        yield f"changes of {' and '.join(others)} to others are predicted without the measured runs"


_NAMES = {
    "recompute_s": "computing layers again",
    "tensor_parallel_s": "all-reduces of tensor parallelism",
    "gather_s": "gathering sharded weights",
    "transfer_s": "sending between stages",
    "bubble_s": "the pipeline's fill and drain",
    "sync_s": "gradient sync over replicas",
    "optimizer_s": "the optimizer",
    "other_s": "overhead of a step",
}
