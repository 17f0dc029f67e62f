"""Draw what each rank holds over a step as SVG: a lane a rank on one scale, its peak marked, its limit if near."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from partitioner.memory import memory_limit
from partitioner.plan import Plan
from partitioner.report.gantt_svg import KINDS
from partitioner.report.svg import INNER, LEFT, frame, short, time_axis
from partitioner.report.wording import percent, seconds
from partitioner.residency import Residency
from partitioner.specs import format_bytes

COLUMNS = 700
"""Moments drawn of a rank that has more: the most that it holds in each."""


def memory_svg(plan: Plan, held: Sequence[Residency], *, end_s: float) -> str:
    """The ranks' bytes as an <svg> in a frame that scrolls. `end_s`: time of the right edge."""
    limits = [memory_limit(plan.device_of(one.rank), plan.training) for one in held]
    peaks = [float(one.total_bytes.max()) for one in held]
    top = 1.06 * max(peaks) if peaks else 1.0
    if limits and min(limits) < 2.5 * max(peaks):
        top = max(top, 1.02 * max(limits))
    height = next((h for most, h in ((4, 54), (8, 40), (16, 26), (64, 13)) if len(held) <= most), 8)
    pitch = height + 4
    lanes = []
    for row, (one, limit) in enumerate(zip(held, limits, strict=True)):
        bottom = row * pitch + height
        times, values = envelope(one.times_s, one.total_bytes, end_s)
        times = np.concatenate(([0.0], times[1:]))  # what a rank holds before its first action, it holds from the start
        xs = LEFT + INNER * np.clip(times, 0, end_s) / end_s
        ys = bottom - height * values / top
        base = bottom - height * float(values.min()) / top
        outline = "".join(f"V{short(y)}H{short(x)}" for y, x in zip(ys, [*xs[1:], LEFT + INNER], strict=True))
        parts = [
            f'<rect class="track" x="{LEFT}" y="{row * pitch}" width="{INNER}" height="{height}"/>',
            f'<path class="held" d="M{short(xs[0])} {short(bottom)}{outline}V{short(bottom)}Z"/>',
            f'<rect class="always" x="{LEFT}" y="{short(base)}" width="{INNER}" height="{short(bottom - base)}"/>',
        ]
        if limit < top:
            parts.append(f'<path class="limit" d="M{LEFT} {short(bottom - height * limit / top)}h{INNER}"/>')
        x = LEFT + INNER * min(max(one.peak_s, 0.0), end_s) / end_s
        y = bottom - height * peaks[row] / top
        parts.append(f'<circle class="peak" cx="{short(x)}" cy="{short(y)}" r="{2.5 if height > 12 else 1.5}"/>')
        if pitch >= 11 or row % 4 == 0:
            middle = short(row * pitch + height / 2 + 4)
            parts.append(f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">rank {one.rank}</text>')
        if height >= 40:
            label = f"{format_bytes(peaks[row])}"
            end = x > LEFT + INNER - 70
            parts.append(
                f'<text class="ink" x="{short(x + (-6 if end else 6))}" y="{short(max(row * pitch + 11, y - 5))}" '
                f'text-anchor="{"end" if end else "start"}">{label}</text>'
            )
        lanes.append(f"<g>{''.join(parts)}<title>{escape(told(one, limit))}</title></g>")
    said = f"Memory of {len(held)} ranks over the step: " + (
        f"at most {format_bytes(max(peaks))}, on rank {held[int(np.argmax(peaks))].rank}" if held else "nothing"
    )
    inside = time_axis(end_s, 0, len(held) * pitch) + "".join(lanes)
    return frame(len(held) * pitch + 22, said, inside, kind="pt-memory")


def told(one: Residency, limit: int) -> str:
    """A rank's peak in words."""
    peak, span = float(one.total_bytes.max()), one.peak_span
    when = f" after {seconds(max(0.0, one.peak_s))}"
    if span is not None and span.kind in KINDS:
        when += f", {KINDS[span.kind][1]}" + (f" of micro-batch {span.microbatch}" if span.microbatch >= 0 else "")
    share = f" ({percent(peak / limit)} of its limit)" if limit else ""
    least = format_bytes(float(one.total_bytes.min()))
    return f"rank {one.rank}: at most {format_bytes(peak)}{share}{when}; never less than {least}"


def envelope(
    times_s: NDArray[np.float64], values: NDArray[np.float64], end_s: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """As they are, or where there are many the most in each of `COLUMNS` equal stretches of time.

    >>> times, most = envelope(np.arange(10_000.0), np.arange(10_000.0) % 7, 10_000.0)
    >>> len(times), float(most.min())
    (700, 6.0)
    """
    if len(times_s) <= 2 * COLUMNS:
        return times_s, values
    edges = np.linspace(min(0.0, float(times_s[0])), end_s, COLUMNS + 1)
    first = np.maximum(0, np.searchsorted(times_s, edges[:-1], side="right") - 1)  # what holds when a stretch begins
    last = np.maximum(np.searchsorted(times_s, edges[1:], side="left"), first + 1)
    most = np.array([values[a:b].max() for a, b in zip(first, last, strict=True)])
    return edges[:-1], most
