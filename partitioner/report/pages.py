"""What is worth saying about each result: every view (terminal, notebook, web page) lays out the same Page."""

from __future__ import annotations

from collections import defaultdict
from functools import singledispatch
from itertools import groupby
from typing import Any

from partitioner.graph import CostGraph
from partitioner.plan import Plan
from partitioner.profiles import Layer, Profile
from partitioner.report import plan_parts
from partitioner.report.blocks import Drawing, Facts, Page, Prose, Table
from partitioner.report.gantt import draw
from partitioner.report.gantt_svg import gantt_svg, kinds_in
from partitioner.report.graph_svg import graph_svg
from partitioner.report.svg import key
from partitioner.report.wording import count, percent, run, seconds
from partitioner.specs import format_bytes
from partitioner.timeline import Timeline


@singledispatch
def page_of(thing: Any) -> Page:
    """What is worth saying about a result. Results of higher modules say it themselves with a method `page()`."""
    own = getattr(thing, "page", None)
    if callable(own):
        page = own()
        assert isinstance(page, Page)
        return page
    raise TypeError(f"there is no page for a {type(thing).__name__}")


@page_of.register
def plan_page(plan: Plan) -> Page:
    return plan_parts.page(plan)


def _recorded(profile: Profile) -> str:
    return ", timed under torch.profiler" if profile.traced else ""


@page_of.register
def profile_page(profile: Profile) -> Page:
    last = [layer.costs[-1] for layer in profile.layers]
    num_bytes = sum(parameter.bytes for parameter in profile.parameters)
    facts = [
        ("costs", f"{profile.provenance} on {profile.device}, {profile.dtype}{_recorded(profile)}"),
        ("micro-batch sizes", ", ".join(map(str, profile.microbatch_sizes))),
        ("parameters", f"{len(profile.parameters)} tensors, {format_bytes(num_bytes)}"),
        ("buffers", format_bytes(profile.buffer_bytes + sum(buffer.bytes for buffer in profile.buffers))),
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
        f"Times and bytes of {count(samples, 'sample')}; equal layers in a row share a line, each costs what it says."
    )
    return Page(
        f"Profile of {profile.model}, {count(len(profile.layers), 'layer')}",
        (Facts(tuple(facts)), _picture(CostGraph(profile)), _layers(profile), Prose("note", (note,))),
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
        rows.append((run(ids), str(len(ids)), *cells))
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
    return Table(headers, tuple(rows), wide=("layers", "class"), total=total, caption="Layers and what they cost")


KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
    "recv": "waits",
    "sync": "sync",
    "optimizer": "optimizer",
}
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
    title = f"{'Measured' if timeline.measured else 'Predicted'} timeline of {count(timeline.num_ranks, 'rank')}"
    drawing = Drawing(lambda width: draw(timeline, width), lambda: gantt_svg(timeline) + key(*kinds_in(timeline)))
    headers = ("rank", *(KINDS[kind] for kind in kinds), "idle")
    table = Table(headers, rows, caption="What each rank did for how long, optimizer after the step")
    return Page(title, (drawing, table, Facts(facts)))


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
        facts.append(("narrowest cut", f"before {graph.ids[at]}: {format_bytes(least)} of {count(samples, 'sample')}"))
        facts.append(("widest cut", format_bytes(most)))
    return Page(f"Cost graph of {graph.profile.model}", (Facts(tuple(facts)), _picture(graph), _layers(graph.profile)))


def _picture(graph: CostGraph) -> Drawing:
    return Drawing(svg=lambda: graph_svg(graph, graph.profile.microbatch_sizes[-1]))
