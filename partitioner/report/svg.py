"""What all our SVG pictures share: their frame, a time axis, numbers as short as they can be."""

from __future__ import annotations

import math
from html import escape

from partitioner.report.wording import seconds

WIDTH, LEFT, RIGHT = 1000, 64, 8
"""User units; the picture is as wide as the page, no narrower than it is legible, and scrolls below that."""
INNER = WIDTH - LEFT - RIGHT


def frame(height: float, said: str, inside: str, *, kind: str = "", details: str = "") -> str:
    """A picture that is read out as `said`. `kind`: its class. `details`: further attributes of the element."""
    return (
        f'<div class="pt-scroll" role="region" tabindex="0" aria-label="{escape(said)}">'
        f'<svg class="{kind}" viewBox="0 0 {WIDTH} {short(height)}" role="img" aria-label="{escape(said)}" '
        f'style="width:100%;min-width:880px;height:auto"{details}>{inside}</svg></div>'
    )


def short(value: float) -> str:
    """At most two decimals, none where there are none.

    >>> short(2.0), short(0.126), short(10)
    ('2', '0.13', '10')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".") if not float(value).is_integer() else str(int(value))


def round_steps(end: float, most: int = 8) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, from 0 to `end`.

    >>> round_steps(0.33)
    [0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]
    """
    if end <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(end / most))
    step = next(power * k for k in (1, 2, 5, 10) if end / (power * k) <= most)
    return [round(k * step, 12) for k in range(int(end / step + 1e-9) + 1)]


def time_axis(end_s: float, top: float, bottom: float) -> str:
    """Grid lines from top to bottom with their times below."""
    lines = []
    for tick in round_steps(end_s):
        at = INNER * tick / end_s if end_s else 0.0
        x, anchor = short(LEFT + at), "middle" if at < INNER - 20 else "end"
        lines.append(f'<path class="axis" d="M{x} {short(top)}V{short(bottom + 4)}"/>')
        lines.append(f'<text x="{x}" y="{short(bottom + 16)}" text-anchor="{anchor}">{seconds(tick)}</text>')
    return f'<g class="time" aria-hidden="true">{"".join(lines)}</g>'


def key(*roles: tuple[str, str]) -> str:
    """A legend: (role, what it says)."""
    shown = "".join(f'<span class="pt-key">{swatch(role)}{escape(text)}</span>' for role, text in roles)
    return f'<p class="pt-note">{shown}</p>'


def colour(role: str) -> str:
    """
    >>> colour("optimizer state")
    'var(--pt-optimizer-state)'
    """
    return f"var(--pt-{role.replace(' ', '-')})"


def swatch(role: str) -> str:
    """A small square of a role's colour, for a legend."""
    return f'<span class="pt-swatch" style="background:{colour(role)}"></span>'
