"""Draw a Timeline in characters: one line a rank, time from left to right, a letter for what the rank does there."""

from __future__ import annotations

from collections import defaultdict

from partitioner.timeline import Span, Timeline

LEGEND = (
    "0-9 forward of that micro-batch (last digit)   a-z its backward (a is 0)   A-Z the part for weights\n"
    "~ waits for tensors   = gradient sync   + optimizer   . idle"
)


def draw(timeline: Timeline, width: int) -> str:
    """The timeline in at most `width` columns. A column that is busy for half of its time
    or more shows what takes most of it, others are idle.

        rank 0 |01234567...a.b.c...|
        rank 1 |.0a1b2c ...        |
    """
    label = f"rank {timeline.num_ranks - 1} "
    columns = max(10, width - len(label) - 2)
    spans = [span for span in timeline.spans if span.kind != "send"]  # a rank does not wait for what it sends
    start_s = min((span.start_s for span in spans), default=0.0)
    end_s = max((span.end_s for span in spans), default=0.0)
    scale = columns / (end_s - start_s) if end_s > start_s else 0.0
    lines = []
    for rank in range(timeline.num_ranks):
        cells = _cells([span for span in spans if span.rank == rank], start_s, scale, columns)
        lines.append(f"{f'rank {rank}':<{len(label)}}|{cells}|")
    return "\n".join([*lines, LEGEND])


def _cells(spans: list[Span], start_s: float, scale: float, columns: int) -> str:
    shares: list[dict[str, float]] = [defaultdict(float) for _ in range(columns)]
    for span in spans:
        first, last = (span.start_s - start_s) * scale, (span.end_s - start_s) * scale
        for column in range(int(first), min(columns, int(last) + 1)):
            shares[column][_letter(span)] += max(0.0, min(last, column + 1) - max(first, column))
    return "".join(max(share, key=lambda k: share[k]) if sum(share.values()) >= 0.5 else "." for share in shares)


def _letter(span: Span) -> str:
    match span.kind:
        case "F":
            return str(span.microbatch % 10)
        case "B" | "I":
            return chr(ord("a") + span.microbatch % 26)
        case "W":
            return chr(ord("A") + span.microbatch % 26)
        case "sync":
            return "="
        case "optimizer":
            return "+"
        case _:
            return "~"
