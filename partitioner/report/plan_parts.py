"""What is worth saying about a plan, part by part, and the page that they make together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from partitioner.errors import ArgumentError, expect
from partitioner.memory import memory_limit
from partitioner.plan import Alternative, MemoryItems, Plan, Stage, StagePrediction
from partitioner.report.blocks import Bar, Drawing, Facts, Page, Part, Prose, Table
from partitioner.report.gantt_svg import gantt_svg, kinds_in
from partitioner.report.losses import verdict, waterfall
from partitioner.report.palette import MEMORY_ROLES
from partitioner.report.svg import key
from partitioner.report.wording import count, mesh, numbers, percent, run, seconds
from partitioner.simulator import simulate
from partitioner.specs import format_bytes
from partitioner.timeline import Timeline

MOST_DRAWN = 10_000
"""Stages x replicas x micro-batches up to which a plan draws its schedule unasked."""


def check_measured(plan: Plan, measured: Timeline | None) -> None:
    """ArgumentError for a step that ran under another plan: shown beside this one it would mean nothing."""
    if measured is None:
        return
    expect("measured", measured, Timeline, "a Timeline: stage.timeline(), or report.trace.read(path)")
    if measured.num_ranks != plan.num_ranks:
        raise ArgumentError(
            f"the measured step ran on {count(measured.num_ranks, 'rank')}, the plan has {plan.num_ranks}: "
            "give a step that ran under this plan"
        )
    places = {(rank, k) for k, stage in enumerate(plan.stages) for rank in stage.ranks}
    for span in measured.spans:
        if span.kind not in "FBIW":
            continue
        if (span.rank, span.stage) not in places:
            raise ArgumentError(
                f"in the measured step rank {span.rank} ran stage {span.stage}, which the plan has elsewhere: "
                "give a step that ran under this plan"
            )
        if span.microbatch >= plan.num_microbatches:
            raise ArgumentError(
                f"the measured step ran micro-batch {span.microbatch}, the plan has {plan.num_microbatches} from 0 on: "
                "give a step that ran under this plan"
            )


def page(plan: Plan) -> Page:
    """Stages, memory, figures, losses, runners-up and reasons, in this order."""
    prediction = plan.prediction
    blocks: list[Facts | Table | Prose | Drawing] = [
        stages(plan),
        Drawing(svg=lambda: _schedule(plan)),
        memory(plan),
        Facts(summary(plan)),
        waterfall(prediction.lost, prediction.efficiency),
        Prose("lost time", (verdict(prediction.lost, prediction.efficiency, plan.num_ranks),)),
    ]
    if plan.runners_up:
        blocks.append(runners_up(plan))
    if said := reasons(plan):
        blocks.append(Prose("why", said))
    return Page(title(plan), tuple(blocks))


def _schedule(plan: Plan) -> str:
    """The step as it is predicted; left out where simulating and drawing it would keep a notebook waiting."""
    if plan.num_stages * plan.num_replicas * plan.num_microbatches > MOST_DRAWN:
        return ""
    timeline = simulate(plan)
    return gantt_svg(timeline) + key(*kinds_in(timeline))


def title(plan: Plan) -> str:
    names = sorted({device.name for device in plan.cluster.devices})
    return f"Plan of {plan.profile.model} on {plan.cluster.num_devices} x {', '.join(names)}"


def summary(plan: Plan) -> tuple[tuple[str, str], ...]:
    """The plan's figures by name."""
    prediction, training = plan.prediction, plan.training
    total_s = prediction.step_s + prediction.optimizer_s
    limits = {stage_limit(plan, k) for k in range(plan.num_stages)}
    alone = "one device" if prediction.single_device_fits else "one device of unlimited memory (it does not fit one)"
    return (
        ("mesh", f"{mesh_of(plan)}: {plan.num_ranks} of {plan.cluster.num_devices} devices"),
        ("schedule", f"{plan.schedule}, {count(plan.num_microbatches, 'micro-batch', 'micro-batches')} a replica"),
        ("micro-batch", f"{count(plan.microbatch_samples, 'sample')} of a batch of {training.batch_size}"),
        ("predicted step", f"{seconds(prediction.step_s)} + optimizer {seconds(prediction.optimizer_s)}"),
        ("throughput", f"{prediction.throughput:,.1f} samples/s"),
        ("speedup", f"{prediction.speedup:.2f} x {alone} ({seconds(prediction.single_device_s)})"),
        ("efficiency", f"{percent(prediction.efficiency)} of {count(plan.num_ranks, 'device')}"),
        ("bubble", percent(prediction.bubble_fraction)),
        (
            "gap",
            "not known: the order of actions was searched, and orders have no lower bound"
            if plan.gap is None
            else f"{percent(plan.gap)} above the lower bound of {seconds(plan.lower_bound_s)}"
            if plan.gap > 5e-4
            else f"none: {seconds(total_s)} is the lower bound of this search space",
        ),
        *_divided(plan),
        ("memory limit", " or ".join(format_bytes(limit) for limit in sorted(limits)) + " a device"),
        ("costs", f"{plan.profile.provenance} on {plan.profile.device}"),
    )


def mesh_of(plan: Plan) -> str:
    """The plan's mesh, and the ranks of each stage where they take turns."""
    return mesh_in_turn(plan.mesh, [len(stage.ranks) for stage in plan.stages])


def mesh_in_turn(axes: Mapping[str, int], ranks: Iterable[int]) -> str:
    """
    >>> mesh_in_turn({"pp": 2, "dp": 2}, [2, 2]), mesh_in_turn({"pp": 2, "dp": 1}, [1, 2])
    ('pp 2 x dp 2', 'pp 2 x dp 1, 1 + 2 ranks in turn')
    """
    each = list(ranks)
    if all(number == axes.get("dp") for number in each):
        return mesh(axes)
    return f"{mesh(axes)}, {' + '.join(map(str, each))} ranks in turn"


def reasons(plan: Plan) -> tuple[str, ...]:
    """What binds and what was assumed, first of all that a plan cannot be run."""
    return (*(() if plan.runnable else ("this version cannot run this plan",)), *plan.why)


def stages(plan: Plan) -> Table:
    """Where the layers are, what they take and send, and what a rank of each stage does during a step."""
    return Table(
        ("stage", "layers", "ranks", "forward", "backward", "sends", "memory", "of limit", "idle", "the step"),
        tuple(stage_row(plan, k) for k in range(plan.num_stages)),
        wide=("layers", "ranks"),
        note="forward, backward and sends: one micro-batch; the step: {work} computes  {waits} waits for others",
        caption="Stages: their layers, ranks, times, transfers and memory",
    )


def stage_row(plan: Plan, k: int) -> tuple[str | Bar, ...]:
    """The cells of `stages` for one stage."""
    stage, predicted, step_s = plan.stages[k], plan.prediction.stages[k], plan.prediction.step_s
    limits = {stage_limit(plan, other) for other in range(plan.num_stages)}
    limit, alike = stage_limit(plan, k), len(limits) == 1
    return (
        str(stage.index) + _saved(plan, stage),
        run(stage.layers),
        _ranks(plan, stage.ranks),
        seconds(predicted.forward_s),
        seconds(predicted.backward_s),
        format_bytes(predicted.send_bytes),
        format_bytes(predicted.memory.total),
        (percent(predicted.memory.total / limit) if limit else "-") + ("" if alike else f" of {format_bytes(limit)}"),
        percent(predicted.idle_s / step_s if step_s else 0.0),
        busy_bar(predicted, step_s),
    )


def stage_limit(plan: Plan, k: int) -> int:
    """Bytes that a rank of the stage may hold: the smallest of its ranks' limits."""
    return min(memory_limit(plan.device_of(rank), plan.training) for rank in plan.stages[k].ranks)


def balance(plan: Plan) -> Table:
    """What one micro-batch takes on each stage, as bars beside one another, and what comes of it in a step."""
    predicted = plan.prediction.stages
    work = [stage.forward_s + stage.backward_s for stage in predicted]
    most, mean = max(work) or 1.0, sum(work) / len(work) or 1.0
    rows = []
    for one, took, cells in zip(predicted, work, (stage_row(plan, k) for k in range(len(work))), strict=True):
        stage, layers, ranks, forward, backward, sends, held, _, idle, step = cells
        parts = (Part("forward", 0, one.forward_s / most), Part("backward", one.forward_s / most, took / most))
        bar = Bar(parts, f"forward {forward}, backward {backward}")
        over = f"{100 * (took / mean - 1):+.1f} %"
        rows.append((stage, layers, ranks, bar, seconds(took), over, sends, held, idle, step))
    return Table(
        ("stage", "layers", "ranks", "a micro-batch", "time", "to mean", "sends", "memory", "idle", "the step"),
        tuple(rows),
        wide=("layers",),
        note="{forward} forward  {backward} backward  {work} computes  {waits} waits for others",
        caption="Time of each stage",
    )


def busy_bar(predicted: StagePrediction, step_s: float) -> Bar:
    """What a stage's slowest rank computes and waits for it, over the step."""
    if not step_s:
        return Bar(())
    work, waits = predicted.compute_s / step_s, predicted.communication_s / step_s
    said = f"computes {percent(work)}, waits {percent(waits)}, idle {percent(predicted.idle_s / step_s)}"
    return Bar((Part("work", 0.0, work), Part("waits", work, work + waits)), said)


def _ranks(plan: Plan, ranks: Sequence[int]) -> str:
    """Ranks; which devices they sit on, where that is not the one of their number; and of which nodes, if several."""
    shifted = any(rank != device for rank, device in enumerate(plan.devices))
    several = len(set(plan.cluster.nodes)) > 1
    said = []
    for node, group in groupby(ranks, key=plan.node_of):
        some = list(group)
        where = f" on device {numbers([plan.devices[rank] for rank in some])}" if shifted else ""
        if several:
            where += f" of node {node}" if shifted else f" on node {node}"
        said.append(numbers(some) + where)
    return ", ".join(said)


def memory(plan: Plan) -> Table:
    """What the memory of a rank of each stage is for; what no stage needs is left out."""
    items = [stage.memory for stage in plan.prediction.stages]
    names = [name for name in MemoryItems.model_fields if any(getattr(item, name) for item in items)]
    rows = tuple(
        (str(k), *(format_bytes(getattr(item, name)) for name in names), format_bytes(item.total))
        for k, item in enumerate(items)
    )
    return Table(("memory of stage", *names, "sum"), rows, caption="Memory of a rank of each stage at its peak")


def memory_bar(items: MemoryItems, limit: int) -> Bar:
    """The items side by side; the whole bar is the limit, or the total where that is more."""
    whole = max(limit, items.total, 1)
    parts, start = [], 0
    for name in MemoryItems.model_fields:
        if size := getattr(items, name):
            parts.append(Part(MEMORY_ROLES[name], start / whole, (start + size) / whole))
            start += size
    return Bar(tuple(parts), f"{format_bytes(items.total)} of {format_bytes(limit)}")


def _saved(plan: Plan, stage: Stage) -> str:
    """What the stage does to save memory; a level that all have is said once, of the plan."""
    alike = len({one.shard for one in plan.stages}) == 1
    said = ["recompute"] * stage.recompute + [stage.shard] * (stage.shard != "none" and not alike)
    return f" ({', '.join(said)})" if said else ""


def _divided(plan: Plan) -> tuple[tuple[str, str], ...]:
    """What replicas divide, if they do."""
    stages_at: dict[str, list[str]] = {}
    for stage in plan.stages:
        stages_at.setdefault(stage.shard, []).append(str(stage.index))
    if len(stages_at) > 1:
        said = [f"{level} on stage {', '.join(stages)}" for level, stages in stages_at.items() if level != "none"]
    else:
        said = [level for level in stages_at if level != "none"]
    return (("sharded", "; ".join(said)),) if said else ()


def runners_up(plan: Plan, why: Sequence[str] = ()) -> Table:
    """What was simulated and not chosen. `why`: of each of them, instead of what the plan says about it."""
    total_s = plan.prediction.step_s + plan.prediction.optimizer_s
    rows = []
    for k, other in enumerate(plan.runners_up[:5]):
        slower = _distance(other.step_s / total_s - 1) if other.step_s is not None and total_s else ""
        rows.append(
            (
                mesh_in_turn(other.mesh, map(len, other.devices)),
                other.schedule,
                str(other.num_microbatches),
                "+".join(map(str, other.stage_sizes)) + _recomputed(other) + _levels(plan, other),
                "does not fit" if other.step_s is None else seconds(other.step_s),
                why[k] if k < len(why) else ": ".join(filter(None, (other.reason, slower))) or "-",
            )
        )
    headers = ("runner-up", "schedule", "micro-batches", "layers", "step + optimizer", "why not")
    return Table(headers, tuple(rows), wide=("layers", "why not"), caption="Plans that were simulated and not chosen")


def _recomputed(other: Alternative) -> str:
    again = [str(stage) for stage, on in enumerate(other.recompute) if on]
    which = "all" if len(again) == len(other.recompute) else f"stage {', '.join(again)}"
    return f" ({which} recomputed)" if again else ""


def _levels(plan: Plan, other: Alternative) -> str:
    """What its replicas divide, where some plan shown has them divide something."""
    if all(level == "none" for level in (*other.shard, *(stage.shard for stage in plan.stages))) or not other.shard:
        return ""
    alike = len({*other.shard}) == 1
    return f" ({other.shard[0] if alike else ', '.join(other.shard)})"


def _distance(share: float) -> str:
    """
    >>> _distance(0.051), _distance(-0.2)
    ('5.1 % slower', '20.0 % faster')
    """
    return f"{percent(abs(share))} {'slower' if share >= 0 else 'faster'}"
