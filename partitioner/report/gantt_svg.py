"""Draw a Timeline as SVG: a lane a rank, time from left to right, every action as long as it took.

A lane's actions of one kind are one path of strokes as wide as the lane, "M x y h 58 m 116 0 h 58 ...", in whole
millionths of the picture's time: ten bytes an action, so that 64 stages x 512 micro-batches stay near a megabyte, exact
at every zoom. What each stroke is (`data-*`) stands beside the path, where the report's script reads it for hovering.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape

from partitioner.report.svg import INNER, LEFT, frame, short, time_axis
from partitioner.report.wording import percent, seconds
from partitioner.timeline import Span, Timeline

TICKS = 1_000_000
"""Units of the time axis over the picture's width."""
SINGLE = 1_500
"""Up to so many actions, each is an element with its own words, shown by any browser without script."""

KINDS = {
    "F": ("forward", "forward"),
    "B": ("backward", "backward"),
    "I": ("backward", "backward for inputs"),
    "W": ("weight", "backward for weights"),
    "recv": ("waits", "waits for tensors"),
    "sync": ("sync", "gradient sync"),
    "optimizer": ("optimizer", "optimizer"),
}
"""Kind of span -> its colour's role, and what it is called. Sends are not drawn: no rank waits for what it sends."""


def gantt_svg(timeline: Timeline, *, end_s: float | None = None) -> str:
    """The timeline as an <svg> in a frame that scrolls. `end_s`: time of the right edge, to share it with another."""
    spans = [span for span in timeline.spans if span.kind in KINDS]
    start_s = timeline.start_s
    end_s = end_s or max((span.end_s - start_s for span in spans), default=0.0) or 1.0
    height = lane_height(timeline.num_ranks)
    pitch = height + (1 if height < 10 else 3)
    bottom = timeline.num_ranks * pitch
    lanes = []
    named = -(-12 // pitch)  # every so many ranks: their names are 12 high
    for rank in range(timeline.num_ranks):
        y = rank * pitch
        lanes.append(f'<rect class="track" x="{LEFT}" y="{short(y)}" width="{INNER}" height="{height}"/>')
        if rank % named == 0:
            lanes.append(f'<text x="{LEFT - 8}" y="{short(y + height / 2 + 4)}" text-anchor="end">rank {rank}</text>')
    strokes = _strokes(spans, start_s, end_s, [rank * pitch + height / 2 for rank in range(timeline.num_ranks)])
    labels = _labels(spans, start_s, end_s, pitch, height) if len(spans) <= 2 * SINGLE and height >= 12 else ""
    step_x = short(LEFT + INNER * min(1.0, timeline.step_s / end_s))
    inside = (
        f"{''.join(lanes)}{time_axis(end_s, 0, bottom)}"
        f'<svg class="window" x="{LEFT}" y="0" width="{INNER}" height="{short(bottom)}">'
        f'<g class="lanes" style="stroke-width:{height}px" transform="scale({INNER / TICKS} 1)">'
        f"{strokes}</g></svg>{labels}"
        f'<path class="limit" d="M{step_x} 0V{short(bottom)}"/>'
    )
    details = f' data-end="{end_s!r}" data-pitch="{pitch}" data-lane="{height}" data-ranks="{timeline.num_ranks}"'
    return frame(bottom + 22, told(timeline), inside, kind="pt-gantt", details=details)


def told(timeline: Timeline) -> str:
    """The picture in words."""
    kind = "Measured" if timeline.measured else "Predicted"
    ranks = range(timeline.num_ranks)
    idle = [timeline.idle_s(rank) / timeline.step_s if timeline.step_s else 0.0 for rank in ranks]
    least, most = min(ranks, key=lambda r: idle[r]), max(ranks, key=lambda r: idle[r])
    return (
        f"{kind} schedule of {timeline.num_ranks} ranks over {seconds(timeline.step_s)}: "
        f"{percent(timeline.bubble_fraction)} of their time is idle, "
        f"from {percent(idle[least])} on rank {least} to {percent(idle[most])} on rank {most}"
    )


def kinds_in(timeline: Timeline) -> list[tuple[str, str]]:
    """(role, name) of each kind of span there is, for a legend."""
    there = {span.kind for span in timeline.spans}
    return [KINDS[kind] for kind in KINDS if kind in there]


def words(span: Span) -> str:
    """What an action is, in words."""
    what = KINDS[span.kind][1]
    where = f"rank {span.rank}, stage {span.stage}"
    which = f", micro-batch {span.microbatch}" if span.microbatch >= 0 else ""
    return f"{where}: {what}{which}, {seconds(span.end_s - span.start_s)}"


def lane_height(num_ranks: int) -> int:
    """
    >>> [lane_height(n) for n in (2, 8, 16, 64, 512)]
    [22, 22, 18, 8, 3]
    """
    return next((height for most, height in ((8, 22), (16, 18), (32, 12), (128, 8)) if num_ranks <= most), 3)


def _strokes(spans: Sequence[Span], start_s: float, end_s: float, middle: Sequence[float]) -> str:
    groups: dict[tuple[int, str, int, int], list[Span]] = defaultdict(list)
    for span in spans:
        odd = span.microbatch % 2 if span.kind in "FBIW" else 0
        groups[span.rank, span.kind, odd, span.stage].append(span)
    paths = []
    for (rank, kind, odd, stage), group in sorted(groups.items()):
        shade = KINDS[kind][0] + ("-odd" if odd else "")
        given = f'class="pt-{shade}" data-r="{rank}" data-k="{kind}" data-s="{stage}"'
        group.sort(key=lambda span: span.start_s)
        if len(spans) <= SINGLE:
            for span in group:
                path = _path([span], start_s, end_s, middle[rank])
                said = escape(words(span))
                paths.append(f'<path {given} data-m="{span.microbatch}" d="{path}"><title>{said}</title></path>')
        else:
            path = _path(group, start_s, end_s, middle[rank])
            paths.append(f'<path {given} data-m="{_runs([span.microbatch for span in group])}" d="{path}"/>')
    return "".join(paths)


def _path(group: Sequence[Span], start_s: float, end_s: float, y: float) -> str:
    at, text = 0, []
    for k, span in enumerate(group):
        first = round((span.start_s - start_s) / end_s * TICKS)
        last = max(first + 1, round((span.end_s - start_s) / end_s * TICKS))
        text.append(f"M{first} {short(y)}" if k == 0 else f"m{first - at} 0")
        text.append(f"h{last - first}")
        at = last
    return "".join(text)


def _runs(values: Sequence[int]) -> str:
    """Numbers in steps, "first+step*count": most lists are one of them.

    >>> _runs([0, 2, 4, 6]), _runs([3]), _runs([0, 1, 5, 9])
    ('0+2*4', '3', '0+1*2,5+4*2')
    """
    found: list[list[int]] = []
    for value in values:
        if found and found[-1][2] == 1:
            found[-1][1:] = [value - found[-1][0], 2]
        elif found and value == found[-1][0] + found[-1][1] * found[-1][2]:
            found[-1][2] += 1
        else:
            found.append([value, 1, 1])
    return ",".join(f"{first}+{step}*{many}" if many > 1 else str(first) for first, step, many in found)


def _labels(spans: Sequence[Span], start_s: float, end_s: float, pitch: float, height: int) -> str:
    """Numbers of micro-batches on actions that are wide enough for them."""
    texts = []
    for span in spans:
        width = (span.end_s - span.start_s) / end_s * INNER
        if span.kind in "FBIW" and width >= 6 * len(str(span.microbatch)) + 5:
            x = LEFT + INNER * (span.start_s - start_s) / end_s + width / 2
            y = span.rank * pitch + height / 2 + 3.5
            texts.append(f'<text class="on" x="{short(x)}" y="{short(y)}">{span.microbatch}</text>')
    return f'<g class="numbers" aria-hidden="true">{"".join(texts)}</g>'
