"""Figures of a plan with matplotlib, each legible from 2 to 64 stages and up to 1,000 layers.

Every function returns its Figure and leaves pyplot's own list of figures as it was; `ax` draws into one of yours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from partitioner.errors import SetupError
from partitioner.graph import CostGraph
from partitioner.plan import MemoryItems, Plan
from partitioner.report.gantt_svg import KINDS, kinds_in
from partitioner.report.graph_svg import MOST_ARCS, MOST_NAMES, stage_bounds
from partitioner.report.losses import losses
from partitioner.report.palette import MEMORY_ROLES, ROLES, stage_shade
from partitioner.report.plan_parts import check_measured, stage_limit
from partitioner.report.wording import percent, seconds
from partitioner.residency import residency
from partitioner.simulator import simulate
from partitioner.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.0
"""Inches."""


def plot_balance(plan: Plan, *, ax: Axes | None = None) -> Figure:
    """Forward and backward of one micro-batch on each stage, against the mean."""
    stages = plan.prediction.stages
    figure, ax = _axes(ax, _height(plan.num_stages))
    forward = np.array([stage.forward_s for stage in stages])
    backward = np.array([stage.backward_s for stage in stages])
    scale, unit = _unit(float((forward + backward).max()))
    rows = np.arange(plan.num_stages)
    ax.barh(rows, forward / scale, color=ROLES["forward"].light, label="forward", height=0.8)
    ax.barh(rows, backward / scale, left=forward / scale, color=ROLES["backward"].light, label="backward", height=0.8)
    mean = float((forward + backward).mean())
    ax.axvline(mean / scale, color=INK, linewidth=1, linestyle="--", label=f"mean {seconds(mean)}")
    ax.set_xlabel(f"one micro-batch, {unit}")
    _rows(ax, "stage", plan.num_stages)
    _legend(ax)
    _title(ax, f"Balance of {_stages(plan)}: the slowest is {percent(_over_mean(forward + backward))} over the mean")
    return figure


def plot_timeline(plan: Plan, *, measured: Timeline | None = None, ax: Axes | None = None) -> Figure:
    """The step of every rank as predicted; a measured one below, on the same scale (`ax` is refused then)."""
    check_measured(plan, measured)
    shown = [simulate(plan), *([] if measured is None else [measured])]
    figure, axes = _many_axes(ax, len(shown), _height(plan.num_ranks))
    end_s = max(max((s.end_s for s in t.spans), default=0.0) - t.start_s for t in shown)
    scale, unit = _unit(end_s)
    for timeline, at in zip(shown, axes, strict=True):
        stretches: dict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(list)
        for span in timeline.spans:
            if span.kind in KINDS:
                role = KINDS[span.kind][0] + ("-odd" if span.kind in "FBIW" and span.microbatch % 2 else "")
                stretch = ((span.start_s - timeline.start_s) / scale, (span.end_s - span.start_s) / scale)
                stretches[span.rank, span.kind, role].append(stretch)
        for (rank, kind, role), group in sorted(stretches.items()):
            tall = 0.3 if kind == "recv" else 0.84
            at.broken_barh(
                group,
                (rank - tall / 2, tall),
                facecolors=ROLES[role].light,
                linewidth=0,
                snap=False,  # in whole pixels, actions thinner than one would vanish
            )
        _numbers(at, timeline, scale, end_s)
        at.set_xlim(0, end_s / scale)
        _rows(at, "rank", timeline.num_ranks)
        _key(at, [(role, name) for role, name in kinds_in(timeline)])
        name = "Measured" if timeline.measured else "Predicted"
        _title(at, f"{name}: {seconds(timeline.step_s)}, bubble {percent(timeline.bubble_fraction)}")
        at.set_facecolor(ROLES["idle"].light)
    axes[-1].set_xlabel(f"time, {unit}")
    return figure


def plot_memory(plan: Plan, *, over_time: bool = False, ax: Axes | None = None) -> Figure:
    """Memory of a rank of each stage at its peak by item, against its limit; or of each rank over the step."""
    if over_time:
        return _memory_over_time(plan, ax)
    figure, ax = _axes(ax, _height(plan.num_stages))
    rows, left = np.arange(plan.num_stages), np.zeros(plan.num_stages)
    for name in MemoryItems.model_fields:
        size = np.array([getattr(stage.memory, name) for stage in plan.prediction.stages]) / 2**30
        if size.any():
            ax.barh(rows, size, left=left, color=ROLES[MEMORY_ROLES[name]].light, label=name, height=0.8)
            left = left + size
    limits = np.array([stage_limit(plan, k) for k in range(plan.num_stages)]) / 2**30
    fits = left.max() < 0.02 * limits.min()  # a limit far away would leave nothing to see
    if not fits:
        ax.vlines(limits, rows - 0.5, rows + 0.5, color=ROLES["loss"].light, linewidth=1.5, label="limit")
    ax.set_xlabel("GiB a rank")
    _rows(ax, "stage", plan.num_stages)
    _legend(ax)
    fullest = int(np.argmax(left / limits)) if limits.all() else int(np.argmax(left))
    share = f", {percent(left[fullest] / limits[fullest])} of its limit" if limits[fullest] else ""
    _title(ax, f"Memory: stage {fullest} is the fullest, {left[fullest]:.2f} GiB{share}")
    return figure


def _memory_over_time(plan: Plan, ax: Axes | None) -> Figure:
    """Lines of up to eight ranks, a map of more: rank by time, the darker the more."""
    timeline = simulate(plan)
    held = residency(plan, timeline)
    end_s = timeline.step_s
    scale, unit = _unit(end_s)
    figure, ax = _axes(ax, 3.2 if len(held) <= 8 else _height(len(held)))
    if len(held) <= 8:
        for one in held:
            shade, dashes = stage_shade(one.rank).light, "--" if one.rank >= 6 else "-"
            times = [*((one.times_s - timeline.start_s) / scale), end_s / scale]
            values = [*(one.total_bytes / 2**30), one.total_bytes[-1] / 2**30]
            ax.step(times, values, where="post", color=shade, linestyle=dashes, linewidth=1.4, label=f"rank {one.rank}")
        ax.set_ylim(0)
        ax.set_ylabel("GiB")
        _legend(ax)
    else:
        moments = np.linspace(0, end_s, 400)
        at = [np.searchsorted(one.times_s - timeline.start_s, moments, side="right") - 1 for one in held]
        grid = np.array([one.total_bytes[np.maximum(0, k)] for one, k in zip(held, at, strict=True)]) / 2**30
        image = ax.imshow(
            grid, aspect="auto", cmap="cividis_r", vmin=0, extent=(0, end_s / scale, len(held) - 0.5, -0.5)
        )
        bar = figure.colorbar(image, ax=ax, pad=0.01)
        bar.set_label("GiB", color=SOFT, fontsize=9)
        bar.ax.tick_params(length=0, labelsize=8.5, colors=SOFT)
        _rows(ax, "rank", len(held))
        ax.grid(False)
    ax.set_xlabel(f"time, {unit}")
    peak = max(held, key=lambda one: float(one.total_bytes.max()))
    most = float(peak.total_bytes.max()) / 2**30
    when = seconds(max(0.0, peak.peak_s - timeline.start_s))
    _title(ax, f"Memory over the step: rank {peak.rank} holds the most, {most:.2f} GiB after {when}")
    return figure


def plot_efficiency(plan: Plan, *, ax: Axes | None = None) -> Figure:
    """The waterfall: from all devices' time down to what does the model's work."""
    prediction = plan.prediction
    parts = losses(prediction.lost)
    figure, ax = _axes(ax, _height(len(parts) + 2))
    names, level = ["all devices' time"], 1.0
    ax.barh(0, 100, color=ROLES["overhead"].light, height=0.7)
    for k, (name, part) in enumerate(parts, start=1):
        ax.barh(k, -100 * part, left=100 * level, color=ROLES["loss" if part > 0 else "gain"].light, height=0.7)
        level -= part
        right = part > 0 and level < 0.15
        ax.annotate(
            f"{-100 * part:+.1f} %",
            (100 * (level + part if right else min(level, level + part)), k),
            xytext=(4 if right else -4, 0),
            textcoords="offset points",
            va="center",
            ha="left" if right else "right",
            fontsize=9,
            color=INK,
        )
        names.append(name)
    ax.barh(len(parts) + 1, 100 * prediction.efficiency, color=ROLES["work"].light, height=0.7)
    names.append("left for the model")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlim(0, max(100.0, 100 * prediction.efficiency))
    ax.set_xlabel("% of all devices' time")
    _title(ax, f"Efficiency {percent(prediction.efficiency)} of {plan.num_ranks} devices")
    return figure


def plot_graph(plan: Plan, *, ax: Axes | None = None) -> Figure:
    """Every layer in its order, as high as the time it takes, coloured by stage; arcs are tensors that skip layers."""
    graph = CostGraph(plan.profile)
    costs = graph.at(plan.microbatch_samples)
    trains = plan.training.objective == "train"
    work = costs.forward_s + costs.backward_s if trains else costs.forward_s
    scale, unit = _unit(float(work.max()))
    figure, ax = _axes(ax, 4.2 if graph.num_layers <= MOST_NAMES else 3.4)
    stage_of = plan.stage_of()
    shades = [stage_shade(stage_of[name]).light for name in graph.ids]
    width = 0.9 if graph.num_layers <= 200 else 1.0
    snap = None if width < 1 else False  # in whole pixels, layers thinner than one would vanish
    ax.bar(np.arange(graph.num_layers), work / scale, width=width, color=shades, snap=snap)
    top = float(work.max()) / scale
    inches, free = (WIDTH - 0.8) / graph.num_layers, -1.0  # of a layer; where the next number may begin
    for first, last in stage_bounds(plan, graph):
        if first:
            ax.axvline(first - 0.5, color=INK, linewidth=0.8, linestyle=":")
        number, middle = str(stage_of[graph.ids[first]]), (first + last) / 2
        reach = 0.05 * len(number) / inches
        if middle - reach >= free:
            ax.text(middle - 0.5, -0.035 * top, number, ha="center", va="top", fontsize=8, color=INK)
            free = middle + reach + 0.08 / inches
    far = sorted(graph.far_tensors, key=lambda item: -graph.profile.tensor_bytes(item[0], plan.microbatch_samples))
    for _, at, to in far[:MOST_ARCS]:
        x = np.linspace(at, to[-1], 40)
        bend = top * (1.04 + 0.3 * (to[-1] - at) / graph.num_layers * np.sin(np.linspace(0, np.pi, 40)))
        ax.plot(x, bend, color=SOFT, linewidth=0.8, alpha=0.8)
    ax.set_ylim(-0.1 * top, top * (1.4 if far else 1.08))
    ax.set_xlim(-0.8, graph.num_layers - 0.2)
    ax.set_ylabel(f"forward{' + backward' if trains else ''}, {unit}")
    if graph.num_layers <= MOST_NAMES:
        ax.set_xticks(range(graph.num_layers), graph.ids, rotation=55, ha="right", fontsize=7, rotation_mode="anchor")
    else:
        ax.set_xlabel("layers in their order; numbers are stages")
    _title(ax, f"{graph.num_layers:,} layers in {_stages(plan)}")
    return figure


INK, SOFT = "#1a2027", "#56606b"


def _height(rows: int) -> float:
    """
    >>> [_height(rows) for rows in (2, 16, 64)]
    [1.86, 5.08, 9.5]
    """
    return round(min(9.5, 1.4 + 0.23 * rows), 2)


def _axes(ax: Axes | None, height: float) -> tuple[Figure, Axes]:
    figure, (found,) = _many_axes(ax, 1, height)
    return figure, found


def _many_axes(ax: Axes | None, count: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    if ax is not None:
        if count > 1:
            raise ValueError("a predicted and a measured step need two axes: leave ax out")
        _plain(ax)
        return ax.get_figure(root=True), [ax]  # type: ignore[return-value]
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        raise SetupError("figures need matplotlib: pip install 'torch-partitioner[notebook]'") from error
    figure, axes = plt.subplots(
        count, 1, figsize=(WIDTH, count * height), sharex=count > 1, squeeze=False, layout="constrained", dpi=110
    )
    plt.close(figure)  # returned, not kept: a notebook would show it twice, a script would leak it
    for one in axes[:, 0]:
        _plain(one)
    return figure, list(axes[:, 0])


def _plain(ax: Axes) -> None:
    ax.set_axisbelow(True)
    ax.grid(axis="x", color="#d9dee4", linewidth=0.6)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(length=0, labelsize=8.5, colors=SOFT)
    ax.xaxis.label.set(color=SOFT, fontsize=9)
    ax.yaxis.label.set(color=SOFT, fontsize=9)


def _rows(ax: Axes, what: str, count: int) -> None:
    """Stages or ranks from top to bottom, each with its number, as far as there is room for them."""
    step = 1 if count <= 40 else 2 if count <= 80 else -(-count // 40)
    ax.set_yticks(range(0, count, step), [f"{what} {k}" for k in range(0, count, step)])
    ax.set_ylim(count - 0.45, -0.55)


def _numbers(ax: Axes, timeline: Timeline, scale: float, end_s: float) -> None:
    """Micro-batches on actions that are wide enough."""
    if timeline.num_ranks > 16 or len(timeline.spans) > 3000:
        return
    for span in timeline.spans:
        inches = (span.end_s - span.start_s) / end_s * (WIDTH - 0.8)
        if span.kind in "FBIW" and inches > 0.07 + 0.07 * len(str(span.microbatch)):
            middle = ((span.start_s + span.end_s) / 2 - timeline.start_s) / scale
            ax.text(middle, span.rank, str(span.microbatch), ha="center", va="center", fontsize=7, color="white")


def _unit(longest_s: float) -> tuple[float, str]:
    """Seconds of the unit in which the longest time reads best, and its name."""
    return next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if longest_s >= s), (1e-6, "µs"))


def _legend(ax: Axes) -> None:
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8.5, labelcolor=INK)


def _key(ax: Axes, roles: Sequence[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=ROLES[role].light, label=name) for role, name in roles]
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8.5, labelcolor=INK)


def _title(ax: Axes, text: str) -> None:
    ax.set_title(text, loc="left", fontsize=10.5, fontweight="bold", color=INK)


def _stages(plan: Plan) -> str:
    return "1 stage" if plan.num_stages == 1 else f"{plan.num_stages} stages"


def _over_mean(work: np.ndarray[Any, Any]) -> float:
    return float(work.max() / work.mean() - 1) if work.mean() else 0.0
