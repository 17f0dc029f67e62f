"""One self-contained web page about a plan, to hand to colleagues: a browser opens it, without network or script.

Everything is drawn in the file itself; the script at its end only adds pointing, zooming and keys to what is there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from partitioner.graph import CostGraph
from partitioner.plan import Alternative, Plan, Prediction
from partitioner.profiles import write_whole
from partitioner.report import plan_parts
from partitioner.report.blocks import Facts, Table
from partitioner.report.gantt_svg import gantt_svg, kinds_in
from partitioner.report.graph_svg import graph_svg, stage_bounds
from partitioner.report.html import block_html, style
from partitioner.report.losses import LOSSES, SMALL, largest_loss, verdict, waterfall
from partitioner.report.memory_svg import memory_svg
from partitioner.report.pages import timeline_page
from partitioner.report.palette import MEMORY_ROLES
from partitioner.report.svg import key
from partitioner.report.wording import count, mesh, percent, seconds
from partitioner.residency import residency
from partitioner.simulator import predict, simulate
from partitioner.specs import Saving, format_bytes
from partitioner.split import Split
from partitioner.timeline import Timeline

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def document(plan: Plan, *, measured: Timeline | None = None) -> str:
    """The page as HTML. `measured`: a step as it ran (`stage.timeline()`), drawn below the predicted one."""
    plan_parts.check_measured(plan, measured)
    predicted = simulate(plan)
    sections = {
        "losses": ("Where the time goes", _losses(plan)),
        "balance": ("Balance of the stages", _balance(plan)),
        "schedule": ("Schedule", _schedule(predicted, measured)),
        "memory": ("Memory", _memory(plan, predicted)),
        "layers": ("Layers", _layers(plan)),
        "runners-up": ("Runners-up, and why they lost", _runners_up(plan)),
        "provenance": ("Assumptions and provenance", _provenance(plan)),
    }
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, (title, _) in sections.items())
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(title)}</h2>{inside}'
        "</section>"
        for name, (title, inside) in sections.items()
    )
    script = files("partitioner.report").joinpath("report.js").read_text(encoding="utf-8")
    sheet = files("partitioner.report").joinpath("document.css").read_text(encoding="utf-8")
    sheet = re.sub(r"/\*.*?\*/\s*", "", sheet, flags=re.DOTALL)
    title = escape(plan_parts.title(plan))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="color-scheme" content="light dark">'
        f'<meta name="generator" content="partitioner {_version()}"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{style()}{sheet}</style></head>\n"
        f'<body class="pt"><a class="skip-link" href="#losses">Skip to the results</a>'
        f"<header><h1>{title}</h1><p>{escape(_subtitle(plan))}</p>{_tiles(plan)}</header>"
        f'<nav aria-label="Sections">{links}</nav>\n<main>{body}</main>\n'
        f"<footer><p>Made by partitioner {_version()}. Predicted figures are simulated from "
        f"{escape(plan.profile.provenance)} costs of each layer.</p></footer>"
        f"<script>{script}</script></body></html>\n"
    )


def save(plan: Plan, path: str | os.PathLike[str], *, measured: Timeline | None = None) -> None:
    """Write `document`; the file is whole or not there."""
    write_whole(path, document(plan, measured=measured))


def _version() -> str:
    try:
        return version("torch-partitioner")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return ""


def _subtitle(plan: Plan) -> str:
    return (
        f"{count(plan.num_stages, 'stage')} as {plan_parts.mesh_of(plan)}, {plan.schedule}, "
        f"{count(plan.num_microbatches, 'micro-batch', 'micro-batches')} of "
        f"{count(plan.microbatch_samples, 'sample')} a replica, {count(plan.training.batch_size, 'sample')} a step"
    )


def _why_not_all(plan: Plan) -> str:
    """The largest loss, where it is worth a word beside the efficiency."""
    name, share = largest_loss(plan.prediction.lost)
    devices = f"of {count(plan.num_ranks, 'device')}"
    return devices if share < 0.01 else f"{devices}; {percent(share)} goes to {LOSSES[name][0]}"


def _tiles(plan: Plan) -> str:
    prediction = plan.prediction
    gap = ("not known", "the order of actions was searched")
    if plan.gap is not None:
        gap = ("none", "proven best") if plan.gap <= SMALL else (percent(plan.gap), "at most above the best")
    tiles = (
        ("Step", seconds(prediction.step_s), f"+ {seconds(prediction.optimizer_s)} optimizer"),
        ("Throughput", f"{prediction.throughput:,.1f}", "samples a second"),
        ("Speedup", f"{prediction.speedup:.2f} ×", f"one device takes {seconds(prediction.single_device_s)}"),
        ("Efficiency", percent(prediction.efficiency), _why_not_all(plan)),
        ("Bubble", percent(prediction.bubble_fraction), "of the ranks' time is idle"),
        ("Gap", *gap),
    )
    return (
        "<dl class='tiles'>"
        + "".join(
            f"<div><dt>{name}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
            for name, value, note in tiles
        )
        + "</dl>"
    )


def _losses(plan: Plan) -> str:
    lost, efficiency = plan.prediction.lost, plan.prediction.efficiency
    return f"<p>{escape(verdict(lost, efficiency, plan.num_ranks))}</p>{block_html(waterfall(lost, efficiency))}"


def _balance(plan: Plan) -> str:
    work = [stage.forward_s + stage.backward_s for stage in plan.prediction.stages]
    k, mean = max(range(len(work)), key=lambda k: work[k]), sum(work) / len(work) or 1.0
    slowest = (
        f"Stage {k} is the slowest: {seconds(work[k])} a micro-batch, {percent(work[k] / mean - 1)} over the mean. "
        if len(work) > 1 and work[k] / mean > 1 + SMALL
        else ""
    )
    table = block_html(plan_parts.balance(plan))
    return f"<p>{slowest}A pipeline is as fast as its slowest stage.</p>{table}"


def _schedule(predicted: Timeline, measured: Timeline | None) -> str:
    shown = [timeline for timeline in (predicted, measured) if timeline is not None]
    end_s = max(max((s.end_s for s in t.spans if s.kind != "send"), default=0.0) - t.start_s for t in shown)
    parts = []
    for timeline in shown:
        name = "Measured" if timeline.measured else "Predicted"
        page = timeline_page(timeline)
        table = next(block for block in page.blocks if isinstance(block, Table))
        parts.append(
            f"<figure><h3>{name}: {seconds(timeline.step_s)}, bubble {percent(timeline.bubble_fraction)}</h3>"
            f"{gantt_svg(timeline, end_s=end_s)}{key(*kinds_in(timeline))}"
            f"<details><summary>What each rank did for how long, {name.lower()}</summary>{block_html(table)}</details>"
            "</figure>"
        )
    if measured is not None:
        error = predicted.step_s / measured.step_s - 1 if measured.step_s else 0.0
        parts.insert(
            0,
            f"<p>Predicted {seconds(predicted.step_s)}, measured {seconds(measured.step_s)}: the prediction is "
            f"{100 * error:+.1f} % off. Both are drawn on one scale.</p>",
        )
    return "".join(parts)


def _memory(plan: Plan, predicted: Timeline) -> str:
    rows = []
    for k, stage in enumerate(plan.prediction.stages):
        limit = plan_parts.stage_limit(plan, k)
        share = percent(stage.memory.total / limit) if limit else "-"
        cells = (
            format_bytes(stage.memory.total),
            share,
            format_bytes(limit),
            plan_parts.memory_bar(stage.memory, limit),
        )
        rows.append((str(k), str(stage.in_flight), *cells))
    headers = ("stage", "in flight", "peak", "of limit", "limit", "up to the limit")
    table = Table(headers, tuple(rows), caption="Memory of a rank of each stage at its peak, against its limit")
    there = [
        (MEMORY_ROLES[name], name)
        for name in type(plan.prediction.stages[0].memory).model_fields
        if any(getattr(stage.memory, name) for stage in plan.prediction.stages)
    ]
    held = residency(plan, predicted)
    over_time = memory_svg(plan, held, end_s=max(s.end_s for s in predicted.spans) - predicted.start_s)
    legend = key(("weights", "all the time"), ("activations", "as the step goes on"))
    items = f"<details><summary>Memory by item</summary>{block_html(plan_parts.memory(plan))}</details>"
    moments = f"<h3>Over the step, as predicted; dots are the peaks</h3>{over_time}{legend}"
    return f"{block_html(table)}{key(*there)}{items}{moments}"


def _layers(plan: Plan) -> str:
    graph = CostGraph(plan.profile)
    costs, stage_of = graph.at(plan.microbatch_samples), plan.stage_of()
    trains = plan.training.objective == "train"
    passes = "forward and backward" if trains else "forward"
    rows = tuple(
        (
            str(k),
            name,
            plan.profile.layers[k].class_name,
            str(stage_of[name]),
            seconds(float(costs.forward_s[k])),
            seconds(float(costs.backward_s[k])),
            format_bytes(plan.profile.layers[k].parameter_bytes),
            format_bytes(float(costs.saved_bytes[k])),
        )
        for k, name in enumerate(graph.ids)
    )
    headers = ("#", "layer", "class", "stage", "forward", "backward", "parameters", "saved")
    table = Table(headers, rows, wide=("layer", "class"), caption="Each layer and what it costs a micro-batch")
    samples = count(plan.microbatch_samples, "sample")
    picture = graph_svg(graph, plan.microbatch_samples, stage_bounds(plan, graph), backward=trains)
    return (
        f"<p>Each layer's {passes} of {samples}, in the order in which they run; dotted lines are the "
        f"cuts, arcs are tensors that skip layers.</p>{picture}"
        f"<details><summary>All {count(len(rows), 'layer')} as a table</summary>{block_html(table)}</details>"
    )


def _runners_up(plan: Plan) -> str:
    if not plan.runners_up:
        return "<p>No other plan was simulated for this request.</p>"
    why = []
    for other in plan.runners_up[:5]:
        slower = "" if other.reason and other.step_s is None else why_slower(plan, other)
        why.append(": ".join(filter(None, (other.reason, slower))))
    return block_html(plan_parts.runners_up(plan, why))


def why_slower(plan: Plan, other: Alternative) -> str:
    """What an alternative loses more of than the plan, simulated again from its mesh, schedule and stage sizes."""
    ours = plan.prediction
    total_s = ours.step_s + ours.optimizer_s
    if other.step_s is None:
        return "does not fit"
    slower = f"{percent(abs(other.step_s / total_s - 1))} {'faster' if other.step_s < total_s else 'slower'}"
    cuts = [sum(other.stage_sizes[: k + 1]) for k in range(len(other.stage_sizes) - 1)]
    theirs = next((one for one in _simulated(plan, other, cuts) if _takes(one, other.step_s)), None)
    if theirs is None:
        return slower  # a file of version 1 does not say on which devices it ran, and what it recomputed
    names = type(ours.lost).model_fields
    more_s = {name: getattr(theirs.lost, name) * other.step_s - getattr(ours.lost, name) * total_s for name in names}
    worst = max(more_s, key=lambda name: more_s[name])
    if more_s[worst] <= SMALL * total_s:
        return slower
    return f"{slower}: {seconds(more_s[worst])} a step more to {LOSSES[worst][0]}"


def _simulated(plan: Plan, other: Alternative, cuts: Sequence[int]) -> Iterator[Prediction]:
    """The alternative's step; where it does not say what it recomputes, without recomputation and with it."""
    num_stages, count = len(other.stage_sizes), other.num_microbatches
    shard = other.shard or (plan.training.one_shard,) * num_stages
    for recompute in (other.recompute,) if other.recompute else ((False,) * num_stages, (True,) * num_stages):
        split = Split.placed(
            plan.cluster, cuts, other.mesh, count, other.schedule, tuple(map(Saving, recompute, shard))
        )
        if other.devices:
            split = replace(split, devices=other.devices)
        yield predict(CostGraph(plan.profile), plan.cluster, plan.training, split)


def _takes(prediction: Prediction, total_s: float) -> bool:
    return abs(prediction.step_s + prediction.optimizer_s - total_s) <= 1e-6 * total_s


def _provenance(plan: Plan) -> str:
    profile, cluster, training = plan.profile, plan.cluster, plan.training
    kinds = [device.name for device in cluster.devices]
    devices = ", ".join(f"{kinds.count(name)} x {name}" for name in dict.fromkeys(kinds))
    facts = [
        (
            "model",
            f"{profile.model}, {count(len(profile.layers), 'layer')}, fingerprint {profile.fingerprint or 'none'}",
        ),
        ("layer costs", f"{profile.provenance} on {profile.device}, {profile.dtype}"),
        ("measured at", f"{', '.join(map(str, profile.microbatch_sizes))} samples a micro-batch"),
        ("devices", f"{devices} on {count(len(set(cluster.nodes)), 'node')}"),
        ("links within a node", cluster.intra.source or "given"),
    ]
    if len(set(cluster.nodes)) > 1:
        facts.append(("links between nodes", cluster.inter.source or "given"))
    facts += [
        (name.removesuffix("_bytes").replace("_", " "), _setting(name, value))
        for name, value in training.model_dump().items()
        if value not in (None, {}, "") and name not in ("pin", "optimizer_bytes")
    ]
    facts.append(("optimizer state", f"{training.optimizer_bytes:g} bytes a trainable parameter element"))
    if training.pin:
        facts.append(
            ("pinned", ", ".join(f"{name} {_pinned(stage)}" for name, stage in list(training.pin.items())[:8]))
        )
    if profile.torch_version:
        facts.append(("torch", profile.torch_version))
    facts.append(("partitioner", _version()))
    return _sentences(plan_parts.reasons(plan)) + block_html(Facts(tuple(facts)))


def _pinned(stage: int | str) -> str:
    return f"to stage {stage}" if isinstance(stage, int) else f"with {stage!r}"


def _setting(name: str, value: Any) -> str:
    """A field of Training in words."""
    if name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, dict):
        return mesh(value)
    return ", ".join(value) if isinstance(value, (list, tuple)) else str(value)


def _sentences(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return "<ul>" + "".join(f"<li>{escape(line[:1].upper() + line[1:].rstrip('.'))}.</li>" for line in lines) + "</ul>"
