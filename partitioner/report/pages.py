"""What is worth saying about a result, as plain data: every view (text now, others later) lays out the same Page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from itertools import groupby
from typing import Any

from partitioner.graph import CostGraph
from partitioner.memory import memory_limit
from partitioner.plan import LostEfficiency, MemoryItems, Plan, StagePrediction
from partitioner.profiles import Layer, Profile
from partitioner.report.gantt import draw
from partitioner.specs import format_bytes
from partitioner.timeline import Timeline


@dataclass(frozen=True)
class Facts:
    """Names with what they are, one a line."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """Rows of cells below their headers. Columns named in `wide` hold names and may be folded; the others never are."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    wide: tuple[str, ...] = ()
    total: tuple[str, ...] = ()
    """A last row, set apart."""


@dataclass(frozen=True)
class Prose:
    """Sentences, one paragraph each, with a word in front that says what they are."""

    heading: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Drawing:
    """Lines of equal-width characters, shown as they are. Made for the width at hand."""

    draw: Callable[[int], str]


@dataclass(frozen=True)
class Page:
    """A title and what stands below it, in order."""

    title: str
    blocks: tuple[Facts | Table | Prose | Drawing, ...]


@singledispatch
def page_of(thing: Any) -> Page:
    """What is worth saying about a result. Results of higher modules say it themselves with a method `page()`."""
    own = getattr(thing, "page", None)
    if callable(own):
        page = own()
        assert isinstance(page, Page)
        return page
    raise TypeError(f"there is no page for a {type(thing).__name__}")


def seconds(value: float) -> str:
    """A duration for people, three digits.

    >>> seconds(0.01234), seconds(4.5e-5), seconds(83), seconds(0)
    ('12.3 ms', '45.0 µs', '83.0 s', '0 s')
    """
    if value == 0:
        return "0 s"
    unit, scale = next((u, s) for u, s in (("s", 1.0), ("ms", 1e-3), ("µs", 0.0)) if abs(value) >= 0.9995 * s)
    amount = value / (scale or 1e-6)
    digits = 2 if abs(amount) < 9.995 else 1 if abs(amount) < 99.95 else 0
    return f"{amount:,.{digits}f} {unit}"


def percent(fraction: float) -> str:
    """
    >>> percent(0.1234), percent(1), percent(-0.00001)
    ('12.3 %', '100.0 %', '0.0 %')
    """
    text = f"{100 * fraction:.1f}"
    return ("0.0" if text == "-0.0" else text) + " %"


@page_of.register
def plan_page(plan: Plan) -> Page:
    prediction, training = plan.prediction, plan.training
    names = sorted({device.name for device in plan.cluster.devices})
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    total_s = prediction.step_s + prediction.optimizer_s
    alone = "one device" if prediction.single_device_fits else "one device of unlimited memory (it does not fit one)"
    facts = [
        ("mesh", f"{mesh}: {plan.num_ranks} of {plan.cluster.num_devices} devices"),
        ("schedule", f"{plan.schedule}, {_count(plan.num_microbatches, 'micro-batch', 'micro-batches')} a replica"),
        ("micro-batch", f"{_count(plan.microbatch_samples, 'sample')} of a batch of {training.batch_size}"),
        ("predicted step", f"{seconds(prediction.step_s)} + optimizer {seconds(prediction.optimizer_s)}"),
        ("throughput", f"{prediction.throughput:,.1f} samples/s"),
        ("speedup", f"{prediction.speedup:.2f} x {alone} ({seconds(prediction.single_device_s)})"),
        ("efficiency", f"{percent(prediction.efficiency)} of {_count(plan.num_ranks, 'device')}"),
        ("bubble", percent(prediction.bubble_fraction)),
        (
            "gap",
            f"{percent(plan.gap)} above the lower bound of {seconds(plan.lower_bound_s)}"
            if plan.gap > 5e-4
            else f"none: {seconds(total_s)} is the lower bound of this search space",
        ),
        ("costs", f"{plan.profile.provenance} on {plan.profile.device}"),
    ]
    rows = tuple(_stage_row(plan, k) for k in range(plan.num_stages))
    headers = ("stage", "layers", "ranks", "forward", "backward", "sends", "memory", "of limit", "idle")
    why = (*(() if plan.runnable else ("this version cannot run this plan",)), *plan.why)
    blocks: list[Facts | Table | Prose | Drawing] = [
        Table(headers, rows, wide=("layers", "ranks")),
        _memory(plan),
        Facts(tuple(facts)),
        waterfall(prediction.lost, prediction.efficiency),
        Prose("lost time", (_verdict(prediction.lost, prediction.efficiency, plan.num_ranks),)),
    ]
    if plan.runners_up:
        blocks.append(_runners_up(plan, total_s))
    if why:
        blocks.append(Prose("why", why))
    return Page(f"Plan of {plan.profile.model} on {plan.cluster.num_devices} x {', '.join(names)}", tuple(blocks))


def _stage_row(plan: Plan, k: int) -> tuple[str, ...]:
    stage, predicted = plan.stages[k], plan.prediction.stages[k]
    limit = min(memory_limit(plan.cluster.devices[rank], plan.training) for rank in stage.ranks)
    return (
        str(stage.index) + (" (recompute)" if stage.recompute else ""),
        _run(stage.layers),
        _ranks(stage.ranks, plan.cluster.nodes),
        seconds(predicted.forward_s),
        seconds(predicted.backward_s),
        format_bytes(predicted.send_bytes),
        format_bytes(predicted.memory.total),
        f"{percent(predicted.memory.total / limit) if limit else '-'} of {format_bytes(limit)}",
        percent(idle_share(predicted)),
    )


def _ranks(ranks: Sequence[int], nodes: Sequence[int]) -> str:
    """Ranks, and where there are several nodes, which of them sit on which.

    >>> _ranks((0, 2, 3), (0, 0, 0, 0)), _ranks((0, 2, 3), (0, 0, 1, 1))
    ('0, 2-3', '0 on node 0, 2-3 on node 1')
    """
    if len(set(nodes)) == 1:
        return _numbers(ranks)
    groups = groupby(ranks, key=lambda rank: nodes[rank])
    return ", ".join(f"{_numbers(group)} on node {node}" for node, group in groups)


def _memory(plan: Plan) -> Table:
    """What the memory of a rank of each stage is for; what no stage needs is left out."""
    items = [stage.memory for stage in plan.prediction.stages]
    names = [name for name in MemoryItems.model_fields if any(getattr(item, name) for item in items)]
    rows = tuple(
        (str(k), *(format_bytes(getattr(item, name)) for name in names), format_bytes(item.total))
        for k, item in enumerate(items)
    )
    return Table(("memory of stage", *names, "sum"), rows)


def idle_share(predicted: StagePrediction) -> float:
    """Share of the step in which a rank of the stage does nothing; compute + communication + idle are the step."""
    step_s = predicted.compute_s + predicted.communication_s + predicted.idle_s
    return predicted.idle_s / step_s if step_s else 0.0


def _runners_up(plan: Plan, total_s: float) -> Table:
    rows = []
    for other in plan.runners_up[:5]:
        slower = f"{percent(other.step_s / total_s - 1)} slower" if other.step_s is not None and total_s else "-"
        rows.append(
            (
                " x ".join(f"{axis} {size}" for axis, size in other.mesh.items()),
                other.schedule,
                str(other.num_microbatches),
                "+".join(map(str, other.stage_sizes)),
                "does not fit" if other.step_s is None else seconds(other.step_s),
                other.reason or slower,
            )
        )
    headers = ("runner-up", "schedule", "micro-batches", "layers", "step + optimizer", "why not")
    return Table(headers, tuple(rows), wide=("layers", "why not"))


LOSSES = {
    "imbalance": ("imbalance", "the stages take unequal times; finer layers to cut between would help"),
    "fill_drain": ("fill and drain", "the pipeline fills and empties once a step; more micro-batches would shrink it"),
    "communication": ("communication", "ranks wait for tensors; a faster link or fewer stages would help"),
    "recompute": ("recompute", "forward runs a second time to save memory; more memory would avoid it"),
    "sync": ("data-parallel sync", "replicas wait for each other's gradients; a larger batch would spread it"),
    "small_microbatch": ("small micro-batch", "small micro-batches use a device worse; fewer of them would help"),
    "optimizer": ("optimizer", "the optimizer step is outside the pipeline; a larger batch would spread it"),
    "unexplained": ("unexplained", "measured but not modelled"),
}
"""Field of LostEfficiency -> its name in prose, and what it means with what would shrink it."""


def waterfall(lost: LostEfficiency, efficiency: float) -> Table:
    """All devices' time, from 100 % down to what does the model's work; parts below 0.05 % are added up as others."""
    parts = {LOSSES[name][0]: getattr(lost, name) for name in type(lost).model_fields}
    shown = {name: part for name, part in parts.items() if abs(part) >= 5e-4}
    shown["others"] = lost.total - sum(shown.values())
    rows = [("all devices' time", "100.0 %")]
    rows += [(name, f"{-100 * part:+.1f} %") for name, part in shown.items() if abs(part) >= 5e-4]
    return Table(("efficiency", "share"), tuple(rows), total=("left for the model", percent(efficiency)))


def _verdict(lost: LostEfficiency, efficiency: float, num_ranks: int) -> str:
    name = max(type(lost).model_fields, key=lambda field: getattr(lost, field))
    largest = getattr(lost, name)
    done = f"{percent(efficiency)} of the time of {_count(num_ranks, 'device')} does the model's work"
    if largest < 5e-4:
        return f"{done}; nothing else takes more than 0.05 %."
    return f"{done}; the largest loss is {LOSSES[name][0]} ({percent(largest)}): {LOSSES[name][1]}."


@page_of.register
def profile_page(profile: Profile) -> Page:
    last = [layer.costs[-1] for layer in profile.layers]
    num_bytes = sum(parameter.bytes for parameter in profile.parameters)
    facts = [
        ("costs", f"{profile.provenance} on {profile.device}, {profile.dtype}"),
        ("micro-batch sizes", ", ".join(map(str, profile.microbatch_sizes))),
        ("parameters", f"{len(profile.parameters)} tensors, {format_bytes(num_bytes)}"),
        ("buffers", format_bytes(profile.buffer_bytes)),
        ("optimizer step", f"{seconds(profile.optimizer_s)} ({profile.optimizer})"),
    ]
    if profile.step_s:
        step_s, layers_s = profile.step_s[-1], sum(cost.forward_s + cost.backward_s for cost in last)
        apart = f"{100 * (layers_s / step_s - 1):+.1f} %" if step_s else "-"
        facts.append(("whole step", f"{seconds(step_s)}; its layers add up to {seconds(layers_s)} ({apart})"))
    if profile.no_cut:
        facts.append(("no cut before", ", ".join(profile.no_cut)))
    samples = profile.microbatch_sizes[-1]
    note = (
        f"Times and bytes of {_count(samples, 'sample')}; equal layers in a row share a line, each costs what it says."
    )
    return Page(
        f"Profile of {profile.model}, {_count(len(profile.layers), 'layer')}",
        (Facts(tuple(facts)), _layers(profile), Prose("note", (note,))),
    )


MAX_ROWS = 40
"""Longer tables of layers leave out their middle; the JSON has it all."""


def _layers(profile: Profile) -> Table:
    sent = {layer.id: 0 for layer in profile.layers}
    for tensor in profile.tensors:
        if tensor.consumers and any(name != tensor.producer for name in tensor.consumers):
            sent[tensor.producer] += tensor.bytes_at[-1]

    def look(layer: Layer) -> tuple[str, ...]:
        cost = layer.costs[-1]
        return (
            layer.class_name,
            seconds(cost.forward_s),
            seconds(cost.backward_s),
            f"±{percent(cost.forward_spread_s / cost.forward_s)}" if cost.forward_spread_s else "-",
            format_bytes(layer.parameter_bytes),
            format_bytes(cost.saved_bytes),
            format_bytes(sent[layer.id]),
        )

    rows = []
    for cells, group in groupby(profile.layers, key=look):
        ids = [layer.id for layer in group]
        rows.append((_run(ids), str(len(ids)), *cells))
    if len(rows) > MAX_ROWS:
        left_out = rows[MAX_ROWS // 2 : -(MAX_ROWS // 2)]
        layers = sum(int(row[1]) for row in left_out)
        rows[MAX_ROWS // 2 : -(MAX_ROWS // 2)] = [("…", str(layers), "not shown", *[""] * 6)]
    last = [layer.costs[-1] for layer in profile.layers]
    total = (
        "sum",
        str(len(profile.layers)),
        "",
        seconds(sum(cost.forward_s for cost in last)),
        seconds(sum(cost.backward_s for cost in last)),
        "",
        format_bytes(sum(layer.parameter_bytes for layer in profile.layers)),
        format_bytes(sum(cost.saved_bytes for cost in last)),
        "",
    )
    headers = ("layers", "count", "class", "forward", "backward", "spread", "parameters", "saved", "makes")
    return Table(headers, tuple(rows), wide=("layers", "class"), total=total)


KINDS = {"F": "forward", "B": "backward", "recv": "waits", "sync": "sync", "optimizer": "optimizer"}
"""Kinds of spans that take a rank's time, and their names in a table."""


@page_of.register
def timeline_page(timeline: Timeline) -> Page:
    ranks, step_s = range(timeline.num_ranks), timeline.step_s
    spent: dict[tuple[int, str], float] = defaultdict(float)
    for span in timeline.spans:
        spent[span.rank, span.kind] += span.end_s - span.start_s
    kinds = [kind for kind in KINDS if any(spent[rank, kind] for rank in ranks)]
    rows = tuple(
        (
            str(rank),
            *(seconds(spent[rank, kind]) for kind in kinds),
            percent(timeline.idle_s(rank) / step_s if step_s else 0.0),
        )
        for rank in ranks
    )
    facts = (("step", seconds(step_s)), ("bubble", percent(timeline.bubble_fraction)))
    title = f"{'Measured' if timeline.measured else 'Predicted'} timeline of {_count(timeline.num_ranks, 'rank')}"
    drawing = Drawing(lambda width: draw(timeline, width))
    return Page(title, (drawing, Table(("rank", *(KINDS[kind] for kind in kinds), "idle"), rows), Facts(facts)))


@page_of.register
def graph_page(graph: CostGraph) -> Page:
    samples = graph.profile.microbatch_sizes[-1]
    crossing = sorted((graph.crossing(cut, samples), cut) for cut in graph.allowed_cuts)
    facts = [
        ("layers", str(graph.num_layers)),
        ("tensors", str(len(graph.profile.tensors))),
        ("cuts", f"{len(graph.allowed_cuts)} of {graph.num_layers - 1} are possible"),
    ]
    if crossing:
        (least, at), (most, _) = crossing[0], crossing[-1]
        facts.append(("narrowest cut", f"before {graph.ids[at]}: {format_bytes(least)} of {_count(samples, 'sample')}"))
        facts.append(("widest cut", format_bytes(most)))
    return Page(f"Cost graph of {graph.profile.model}", (Facts(tuple(facts)), _layers(graph.profile)))


def _run(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def _numbers(values: Iterable[int]) -> str:
    """Ascending runs are written as ranges.

    >>> _numbers([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
