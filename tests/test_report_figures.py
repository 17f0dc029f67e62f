"""Figures, read back from what matplotlib was told to draw and compared with the plan."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations, pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from drawn_plans import drawn_plan
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from test_report_document import slowed

from partitioner.graph import CostGraph
from partitioner.plan import MemoryItems, Plan
from partitioner.report.palette import MEMORY_ROLES, ROLES, stage_shade
from partitioner.report.plan_parts import stage_limit
from partitioner.residency import residency
from partitioner.simulator import simulate

mpl.use("agg")

PLAN = drawn_plan(num_skips=5, memory_bytes=2**30)
LARGE = drawn_plan(1000, 64, 8, num_skips=40)
VIEWS = ("plot_balance", "plot_timeline", "plot_memory", "plot_efficiency", "plot_graph")


def bars(figure: Figure, role: str, k: int = 0) -> list[Any]:
    return [patch for patch in figure.axes[k].patches if to_hex(patch.get_facecolor()) == ROLES[role].light]


def test_balance_is_forward_and_backward_of_each_stage() -> None:
    figure = PLAN.plot_balance()
    stages = PLAN.prediction.stages
    assert [bar.get_width() for bar in bars(figure, "forward")] == pytest.approx([1e3 * s.forward_s for s in stages])
    backward = bars(figure, "backward")
    assert [bar.get_width() for bar in backward] == pytest.approx([1e3 * s.backward_s for s in stages])
    assert [bar.get_x() for bar in backward] == pytest.approx([1e3 * s.forward_s for s in stages])
    mean = np.mean([s.forward_s + s.backward_s for s in stages])
    assert figure.axes[0].lines[0].get_xdata()[0] == pytest.approx(1e3 * mean)


def test_memory_is_its_items_and_the_limit() -> None:
    figure = PLAN.plot_memory()
    for name in MemoryItems.model_fields:
        sizes = [getattr(stage.memory, name) / 2**30 for stage in PLAN.prediction.stages]
        if any(sizes):
            assert [bar.get_width() for bar in bars(figure, MEMORY_ROLES[name])] == pytest.approx(sizes)
    (limits,) = [lines for lines in figure.axes[0].collections if len(lines.get_paths()) == PLAN.num_stages]
    drawn = [path.vertices[0][0] for path in limits.get_paths()]
    assert drawn == pytest.approx([stage_limit(PLAN, k) / 2**30 for k in range(PLAN.num_stages)])


def test_memory_over_time_is_each_ranks() -> None:
    figure = PLAN.plot_memory(over_time=True)
    held = residency(PLAN, simulate(PLAN))
    for line, one in zip(figure.axes[0].lines, held, strict=True):
        assert max(line.get_ydata()) == pytest.approx(one.total_bytes.max() / 2**30)
        assert line.get_xdata()[:-1] == pytest.approx(1e3 * one.times_s)
    (image,) = LARGE.plot_memory(over_time=True).axes[0].images
    assert image.get_array().shape[0] == 64


def test_the_waterfall_ends_at_the_efficiency() -> None:
    figure = PLAN.plot_efficiency()
    lost = [-bar.get_width() for bar in bars(figure, "loss")]
    (left,) = bars(figure, "work")
    assert left.get_width() == pytest.approx(100 * PLAN.prediction.efficiency)
    assert 100 - sum(lost) == pytest.approx(left.get_width(), abs=0.06)
    assert "25.5 %" in " ".join(text.get_text() for text in figure.axes[0].texts)


def test_layers_are_as_high_as_their_time_in_the_colour_of_their_stage() -> None:
    figure = PLAN.plot_graph()
    costs, stage_of = CostGraph(PLAN.profile).at(PLAN.microbatch_samples), PLAN.stage_of()
    drawn = figure.axes[0].patches
    assert [bar.get_height() for bar in drawn] == pytest.approx(1e3 * (costs.forward_s + costs.backward_s))
    for bar, layer in zip(drawn, PLAN.profile.layers, strict=True):
        assert to_hex(bar.get_facecolor()) == stage_shade(stage_of[layer.id]).light
    dotted = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert dotted == [9.5, 19.5, 29.5]


def test_the_timeline_is_every_action_of_both_steps() -> None:
    measured = slowed(PLAN)
    figure = PLAN.plot_timeline(measured=measured)
    for ax, timeline in zip(figure.axes, (simulate(PLAN), measured), strict=True):
        drawn = sorted(
            (round(box.y0 + box.height / 2), round(box.x0, 6), round(box.x1, 6))
            for group in ax.collections
            for box in (path.get_extents() for path in group.get_paths())
        )
        given = sorted(
            (span.rank, round(1e3 * span.start_s, 6), round(1e3 * span.end_s, 6))
            for span in timeline.spans
            if span.kind != "send"
        )
        assert np.array(drawn) == pytest.approx(np.array(given), abs=2e-6)
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(drawn_plan(8, 2, 2), id="2 stages", marks=pytest.mark.slow),
        pytest.param(PLAN, id="4 stages", marks=pytest.mark.slow),
        pytest.param(LARGE, id="64 stages"),
    ],
)
@pytest.mark.parametrize("view", VIEWS)
def test_no_two_words_are_written_over_one_another(plan: Plan, view: str) -> None:
    """Legible from 2 to 64 stages: what is written keeps clear of other writing, and inside the figure."""
    figure = getattr(plan, view)()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    for ax in figure.axes:
        upright = [t for t in (*ax.get_yticklabels(), *ax.texts, ax.title) if t.get_text() and t.get_visible()]
        if all(label.get_rotation() == 0 for label in ax.get_xticklabels()):
            low, high = ax.get_xlim()
            upright += [t for t in ax.get_xticklabels() if t.get_text() and low <= t.get_position()[0] <= high]
        boxes = [text.get_window_extent(renderer) for text in upright]
        for (one, box), (other, second) in combinations(zip(upright, boxes, strict=True), 2):
            shared = box.shrunk(0.9, 0.75).overlaps(second.shrunk(0.9, 0.75))
            assert not shared, (one.get_text(), other.get_text())
        for text, box in zip(upright, boxes, strict=True):
            assert box.x0 >= -1 and box.x1 <= figure.bbox.width + 1, text.get_text()
            assert box.height >= 5


def test_actions_thinner_than_a_pixel_are_still_seen() -> None:
    """Warm-up of 64 ranks and 128 micro-batches: where a rank is busy, its lane has the colour of what it does."""
    plan = drawn_plan(1000, 64, 128)
    timeline = simulate(plan)
    figure = plan.plot_timeline()
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(80)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[::-1, :, :3].astype(int)
    at = figure.axes[0].transData
    scale = max(span.end_s for span in timeline.spans) / figure.axes[0].get_xlim()[1]
    for rank in range(40):
        spans = sorted(span for span in timeline.spans if span.rank == rank and span.kind in "FB")
        warm = [span for span in spans if span.kind == "F"]
        end_s = min(span.start_s for span in spans if span.kind == "B")
        warm = [span for span in warm if span.end_s <= end_s]
        (left, y), (right, _) = (at.transform((s / scale, rank)) for s in (warm[0].start_s, warm[-1].end_s))
        lane = pixels[round(y), round(left) : round(right)]
        bluish = lane[:, 2] - lane[:, 0] > 25
        assert bluish.mean() > 0.3, rank


def test_layers_thinner_than_a_pixel_are_still_seen() -> None:
    figure = LARGE.plot_graph()
    figure.set_dpi(80)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[::-1, :, :3].astype(int)
    axes = figure.axes[0]
    blank = []
    for k, bar in enumerate(axes.patches):
        x, y = axes.transData.transform((bar.get_x() + bar.get_width() / 2, bar.get_height() / 2))
        if pixels[int(y), int(x)].min() > 235:
            blank.append(k)
    assert len(axes.patches) == 1000
    assert blank == []


def test_a_figure_goes_into_axes_that_are_given() -> None:
    figure = Figure()
    ax = figure.subplots()
    assert PLAN.plot_balance(ax=ax) is figure
    with pytest.raises(ValueError, match="two axes"):
        PLAN.plot_timeline(measured=slowed(PLAN), ax=ax)


def test_figures_are_returned_not_kept_open() -> None:
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    PLAN.plot_balance()
    assert plt.get_fignums() == before


def test_reports_load_what_draws_only_when_they_draw() -> None:
    code = (
        "import sys, pkgutil, importlib, partitioner.report as r\n"
        "[importlib.import_module(f'partitioner.report.{m.name}') for m in pkgutil.iter_modules(r.__path__)]\n"
        "print(sorted({'matplotlib', 'ipywidgets', 'tensorboard', 'torch', 'IPython'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"


def test_stages_are_numbered_along_the_whole_of_a_large_model() -> None:
    """At 64 stages every second or third number, up to the last ones."""
    (ax,) = LARGE.plot_graph().axes
    numbers = [int(text.get_text()) for text in ax.texts]
    assert numbers[0] == 0 and numbers[-1] >= 60
    assert max(second - first for first, second in pairwise(numbers)) <= 3
