"""The drawings, read back from their SVG and compared with the plan."""

from __future__ import annotations

import re

import pytest
from drawn_plans import drawn_plan
from parsed_html import Parsed

from partitioner.graph import CostGraph
from partitioner.plan import Plan
from partitioner.report import gantt_svg, graph_svg, memory_svg
from partitioner.report.palette import STAGES
from partitioner.report.svg import INNER, LEFT, round_steps
from partitioner.residency import Residency, residency
from partitioner.simulator import simulate
from partitioner.specs import format_bytes
from partitioner.timeline import Span, Timeline

PLANS = {
    "1f1b": drawn_plan(),
    "replicas": drawn_plan(num_replicas=2),
    "interleaved": drawn_plan(schedule="interleaved", stages_a_rank=2),
    "zero-bubble": drawn_plan(schedule="zero-bubble"),
    "many": drawn_plan(200, 16, 64),  # more actions than get elements of their own
}


def drawn_spans(svg: str) -> list[Span]:
    """The actions that the strokes of a Gantt chart show; times are those of the picture."""
    parsed = Parsed(svg)
    end_s = next(float(given["data-end"] or 0) for tag, given in parsed.tags if given.get("class") == "pt-gantt")
    spans = []
    for tag, given in parsed.tags:
        if tag != "path" or "data-m" not in given:
            continue
        numbers = []
        for run in (given["data-m"] or "").split(","):
            first, step, many = (int(part) for part in [*re.split(r"\+|\*", run), "0", "1"][:3])
            numbers += [first + step * k for k in range(many)]
        at = 0
        strokes = re.findall(r"[Mm](-?\d+) [\d.]+h(\d+)", given["d"] or "")
        for (move, width), microbatch in zip(strokes, numbers, strict=True):
            start, at = at + int(move), at + int(move) + int(width)
            spans.append(
                Span(
                    int(given["data-r"] or 0),
                    given["data-k"] or "",
                    int(given["data-s"] or 0),
                    microbatch,
                    start / gantt_svg.TICKS * end_s,
                    at / gantt_svg.TICKS * end_s,
                )
            )
    return spans


def graph_of(plan: Plan) -> str:
    graph = CostGraph(plan.profile)
    return graph_svg.graph_svg(graph, plan.microbatch_samples, graph_svg.stage_bounds(plan, graph))


@pytest.mark.parametrize("name", PLANS)
def test_every_action_is_drawn_where_and_as_long_as_it_was(name: str) -> None:
    timeline = simulate(PLANS[name])
    expected = sorted(span for span in timeline.spans if span.kind != "send")
    shown = sorted(drawn_spans(gantt_svg.gantt_svg(timeline)))
    assert [span[:4] for span in shown] == [span[:4] for span in expected]
    tick_s = 1.1e-6 * max(span.end_s for span in expected)
    for drawn, given in zip(shown, expected, strict=True):
        assert drawn.start_s == pytest.approx(given.start_s, abs=tick_s)
        assert drawn.end_s == pytest.approx(given.end_s, abs=tick_s)


def test_two_steps_are_drawn_on_one_scale() -> None:
    timeline = simulate(PLANS["1f1b"])
    svg = gantt_svg.gantt_svg(timeline, end_s=2 * timeline.step_s)
    assert max(span.end_s for span in drawn_spans(svg) if span.kind == "F") < timeline.step_s


def test_an_action_says_in_words_what_it_is() -> None:
    timeline = simulate(PLANS["1f1b"])
    titles = Parsed(gantt_svg.gantt_svg(timeline)).titles
    shown = [span for span in timeline.spans if span.kind != "send"]
    assert sorted(titles) == sorted(gantt_svg.words(span) for span in shown)
    assert any(re.fullmatch(r"rank 3, stage 3: backward, micro-batch 7, [\d.]+ ms", title) for title in titles)


def test_the_chart_is_read_out_with_its_figures() -> None:
    timeline = simulate(PLANS["1f1b"])
    said = gantt_svg.told(timeline)
    assert f"{100 * timeline.bubble_fraction:.1f} % of their time is idle" in said
    idlest = max(range(4), key=timeline.idle_s)
    assert f"{100 * timeline.idle_s(idlest) / timeline.step_s:.1f} % on rank {idlest}" in said


def test_a_timeline_of_nothing_is_a_picture_all_the_same() -> None:
    Parsed(gantt_svg.gantt_svg(Timeline((), num_ranks=2, measured=True)))


@pytest.mark.parametrize("name", ["1f1b", "many", "interleaved"])
def test_layers_are_as_high_as_their_time_and_coloured_by_stage(name: str) -> None:
    plan = PLANS[name]
    bars = [given for tag, given in Parsed(graph_of(plan)).tags if (given.get("class") or "").startswith("layer")]
    costs = CostGraph(plan.profile).at(plan.microbatch_samples)
    work = costs.forward_s + costs.backward_s
    assert len(bars) == len(plan.profile.layers)
    for k, (bar, layer) in enumerate(zip(bars, plan.profile.layers, strict=True)):
        assert float(bar["height"] or 0) == pytest.approx(max(1, graph_svg.BARS * work[k] / work.max()), abs=0.01)
        assert float(bar["x"] or 0) == pytest.approx(LEFT + k * INNER / len(bars), abs=0.01)
        assert bar["class"] == f"layer pt-stage-{plan.stage_of()[layer.id] % len(STAGES)}"


def test_cuts_and_skips_are_drawn_with_what_they_carry() -> None:
    plan = drawn_plan(num_skips=6)
    titles = Parsed(graph_of(plan)).titles
    graph = CostGraph(plan.profile)
    assert sum(title.startswith("cut before") for title in titles) == plan.num_stages - 1
    for stage in plan.stages[1:]:
        (said,) = [title for title in titles if title.startswith(f"cut before {stage.layers[0]}:")]
        crossing = graph.crossing(graph.position[stage.layers[0]], plan.microbatch_samples)
        assert f"{crossing / 1024:.1f} KiB" in said
    skips = [tensor.id for tensor, *_ in graph.far_tensors]
    assert [title.partition(":")[0] for title in titles if title.startswith("tensor ")] == sorted(
        skips, key=lambda name: (-int(name.split()[1]), name)
    )


@pytest.mark.parametrize(("plan", "most"), [(drawn_plan(64 * 3, 64, 8), 600_000), (drawn_plan(1000, 8, 8), 400_000)])
def test_drawings_of_many_stages_and_layers_stay_small(plan: Plan, most: int) -> None:
    assert len(graph_of(plan)) < most
    assert len(gantt_svg.gantt_svg(simulate(plan))) < most


def test_axis_steps_are_round_and_few() -> None:
    for end in (1e-6, 0.0123, 0.33, 7.0, 4321.0):
        steps = round_steps(end)
        assert 3 <= len(steps) <= 9
        assert steps[-1] <= end * (1 + 1e-9)


def test_memory_lanes_reach_their_peaks_and_start_from_what_is_always_held() -> None:
    plan = drawn_plan(memory_bytes=2**29)
    timeline = simulate(plan)
    held = residency(plan, timeline)
    svg = memory_svg.memory_svg(plan, held, end_s=timeline.step_s)
    parsed = Parsed(svg)
    tracks, areas, always, limits = (
        [given for _, given in parsed.tags if given.get("class") == name]
        for name in ("track", "held", "always", "limit")
    )
    for one, track, area, base, limit in zip(held, tracks, areas, always, limits, strict=True):
        bottom = float(track["y"] or 0) + float(track["height"] or 0)
        ys = [float(y) for y in re.findall(r"V([\d.]+)", area["d"] or "")]
        limit_y = float(re.split("[ h]", limit["d"] or "")[1])
        assert (bottom - min(ys)) / (bottom - limit_y) == pytest.approx(peak_of(one) / 2**29, rel=2e-3)
        assert float(base["height"] or 0) / (bottom - limit_y) == pytest.approx(one.total_bytes.min() / 2**29, rel=2e-3)
    (said,) = [title for title in parsed.titles if title.startswith("rank 0:")]
    assert f"at most {format_bytes(peak_of(held[0]))} ({100 * peak_of(held[0]) / 2**29:.1f} % of its limit)" in said


def peak_of(one: Residency) -> float:
    return float(one.total_bytes.max())


def test_memory_of_many_moments_keeps_its_peak() -> None:
    plan = drawn_plan(16, 2, 1024)
    timeline = simulate(plan)
    for one in residency(plan, timeline):
        times, values = memory_svg.envelope(one.times_s, one.total_bytes, timeline.step_s)
        assert len(times) == len(values) == memory_svg.COLUMNS < len(one.times_s)
        assert values.max() == one.total_bytes.max()
