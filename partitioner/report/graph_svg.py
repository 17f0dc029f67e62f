"""Draw layers as SVG: in their order, as high as the time they take, coloured by stage, with tensors that skip."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from partitioner.graph import CostGraph
from partitioner.plan import Plan
from partitioner.report.palette import STAGES
from partitioner.report.svg import INNER, LEFT, frame, round_steps, short
from partitioner.report.wording import count, percent, seconds
from partitioner.specs import format_bytes

BARS, MOST_ARCS, MOST_NAMES = 150, 120, 48
"""Height of the slowest layer; how many skips are drawn, the largest first; up to how many layers carry their names."""


def graph_svg(
    graph: CostGraph, samples: float, stages: Sequence[tuple[int, int]] = (), *, backward: bool = True
) -> str:
    """The layers as an <svg> in a frame that scrolls. `stages`: (first, last) layers of each, last one past.

    `backward`: False for inference, of forward passes alone.
    """
    costs = graph.at(samples)
    work = (costs.forward_s + costs.backward_s if backward else costs.forward_s).tolist()
    slot, peak = INNER / len(work), max(work) or 1.0
    stage_of = [stage for stage, (first, last) in enumerate(stages) for _ in range(first, last)] or [0] * len(work)
    arcs, skips = _arcs(graph, samples, slot)
    top = 58 if arcs else 12
    base = top + BARS
    parts = [f'<g class="skips" fill="none" transform="translate(0 {top - 6})">{arcs}</g>']
    for tick in round_steps(peak, 4):
        y = short(base - BARS * tick / peak)
        parts.append(f'<path class="axis" d="M{LEFT} {y}h{INNER}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">{seconds(tick)}</text>')
    gap = 1 if slot > 4 else 0.3 if slot > 1.5 else 0
    for k, name in enumerate(graph.ids):
        height = max(1.0, BARS * work[k] / peak)
        where = f", stage {stage_of[k]}" if stages else ""
        said = f"{name}{where}: forward {seconds(float(costs.forward_s[k]))}"
        if backward:
            said += f", backward {seconds(float(costs.backward_s[k]))}"
            said += f", saves {format_bytes(float(costs.saved_bytes[k]))}"
        parts.append(
            f'<rect class="layer pt-stage-{stage_of[k] % len(STAGES)}" x="{short(LEFT + k * slot)}" '
            f'y="{short(base - height)}" width="{short(max(0.3, slot - gap))}" height="{short(height)}">'
            f"<title>{escape(said)}</title></rect>"
        )
    parts.append(_stages(graph, samples, stages, work, slot, base))
    bottom = base + (26.0 if stages else 8.0)
    if len(work) <= MOST_NAMES:
        parts += [_name(name, LEFT + (k + 0.5) * slot, bottom) for k, name in enumerate(graph.ids)]
        bottom += 6 + min(150, 5.6 * max(len(_short(name)) for name in graph.ids)) * 0.75
    return frame(bottom + 6, _told(graph, len(stages), skips), "".join(parts), kind="pt-graph")


def stage_bounds(plan: Plan, graph: CostGraph) -> list[tuple[int, int]]:
    """(first, last) layers of each stage, last one past."""
    return [(graph.position[stage.layers[0]], graph.position[stage.layers[-1]] + 1) for stage in plan.stages]


def _stages(
    graph: CostGraph, samples: float, stages: Sequence[tuple[int, int]], work: list[float], slot: float, base: float
) -> str:
    """A strip below the layers: each stage with its number, and each cut with what crosses it."""
    parts, total = [], sum(work) or 1.0
    for stage, (first, last) in enumerate(stages):
        x, width = LEFT + first * slot, (last - first) * slot
        took = sum(work[first:last])
        said = (
            f"stage {stage}: {count(last - first, 'layer')}, {graph.ids[first]} to {graph.ids[last - 1]}, "
            f"{seconds(took)} a micro-batch, {percent(took / total)} of the model"
        )
        label = f"stage {stage}" if width > 48 else str(stage)
        text = f'<text class="on" x="{short(x + width / 2)}" y="{short(base + 15.5)}">{label}</text>'
        parts.append(
            f'<g><rect class="pt-stage-{stage % len(STAGES)}" x="{short(x)}" y="{short(base + 4)}" '
            f'width="{short(max(0.5, width - 1))}" height="16"><title>{escape(said)}</title></rect>'
            f"{text if width > 6 * len(label) else ''}</g>"
        )
        if first:
            crossing = f"cut before {graph.ids[first]}: {format_bytes(graph.crossing(first, samples))}"
            parts.append(
                f'<path class="cut" d="M{short(x)} {short(base - BARS - 4)}V{short(base + 22)}">'
                f"<title>{escape(crossing)} a micro-batch</title></path>"
            )
    return "".join(parts)


def _arcs(graph: CostGraph, samples: float, slot: float) -> tuple[str, int]:
    """Tensors that skip layers, from the layer that makes them to the last that uses them; the largest come first."""
    far = [(graph.profile.tensor_bytes(tensor, samples), tensor, at, to) for tensor, at, to in graph.far_tensors]
    far.sort(key=lambda item: (-item[0], item[1].id))
    arcs = []
    for num_bytes, tensor, at, to in far[:MOST_ARCS]:
        first, last = LEFT + (at + 0.5) * slot, LEFT + (to[-1] + 0.5) * slot
        height = 8 + 52 * (to[-1] - at) / graph.num_layers
        used = [LEFT + (place + 0.5) * slot for place in to]
        said = (
            f"{tensor.id}: {format_bytes(num_bytes)}, from {graph.ids[at]} to {', '.join(graph.ids[k] for k in to[:4])}"
        )
        said += f" and {len(to) - 4} more" if len(to) > 4 else ""
        ends = "".join(f"M{short(x)} 0v4" for x in (first, *used[:40]))
        arcs.append(
            f'<path class="skip" d="M{short(first)} 0C{short(first)} -{short(height * 1.25)} {short(last)} '
            f'-{short(height * 1.25)} {short(last)} 0{ends}"><title>{escape(said)}</title></path>'
        )
    return "".join(arcs), len(far)


def _told(graph: CostGraph, num_stages: int, skips: int) -> str:
    where = f", in {count(num_stages, 'stage')}" if num_stages else ""
    shown = f"; {MOST_ARCS} of {skips} skips are drawn, the largest" if skips > MOST_ARCS else ""
    return f"{count(graph.num_layers, 'layer')} in their order, as high as the time they take{where}{shown}"


def _short(name: str) -> str:
    """The end of a long path.

    >>> _short("transformer.h.11.attn.c_attn"), _short("h.3")
    ('…11.attn.c_attn', 'h.3')
    """
    return name if len(name) <= 16 else "…" + name[-14:].lstrip(".")


def _name(name: str, x: float, y: float) -> str:
    return (
        f'<text aria-hidden="true" transform="translate({short(x + 3)} {short(y + 4)}) rotate(-48)" '
        f'text-anchor="end" font-size="9.5">{escape(_short(name))}</text>'
    )
