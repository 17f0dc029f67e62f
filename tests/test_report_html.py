"""What the notebook shows: parsed, compared with the result's own numbers, and free of script and network."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
from given import given_plan, given_profile
from parsed_html import Parsed

from partitioner.graph import CostGraph
from partitioner.report import Facts, Page, Prose, Table, html, render
from partitioner.report.pages import page_of
from partitioner.report.palette import MEMORY_ROLES, ROLES, STAGES, Shade
from partitioner.simulator import simulate

RESULTS = {
    "plan": given_plan(),
    "profile": given_profile(6),
    "graph": CostGraph(given_profile(6)),
    "timeline": simulate(given_plan()),
}


@pytest.mark.parametrize("name", RESULTS)
def test_the_notebook_shows_what_the_page_says(name: str) -> None:
    thing = RESULTS[name]
    parsed = Parsed(thing._repr_html_())
    page = page_of(thing)
    tables = [block for block in page.blocks if isinstance(block, Table)]
    assert len(parsed.tables) == len(tables)
    for shown, table in zip(parsed.tables, tables, strict=True):
        rows = [table.headers, *table.rows, *([table.total] if table.total else [])]
        for cells, row in zip(shown, rows, strict=True):
            assert [cell for cell, given in zip(cells, row, strict=True) if isinstance(given, str)] == [
                given for given in row if isinstance(given, str)
            ]
    facts = dict(pair for block in page.blocks if isinstance(block, Facts) for pair in block.pairs)
    assert parsed.facts == facts


@pytest.mark.parametrize("name", RESULTS)
def test_the_notebook_runs_no_script_and_fetches_nothing(name: str) -> None:
    text = RESULTS[name]._repr_html_()
    parsed = Parsed(text)
    assert not {tag for tag, _ in parsed.tags} & {"script", "link", "img", "iframe", "object", "embed"}
    for _, attributes in parsed.tags:
        assert not [key for key in attributes if key.startswith("on") or key in ("src", "href", "srcset")]
    assert "@import" not in text
    assert "url(" not in text


def test_the_notebook_is_dark_where_the_reader_is() -> None:
    text = given_plan()._repr_html_()
    assert "@media screen and (prefers-color-scheme:dark)" in text
    light, dark = text.split("@media screen and (prefers-color-scheme:dark)")
    for role, shade in ROLES.items():
        assert f"--pt-{role.replace(' ', '-')}:{shade.light};" in light
        assert f"--pt-{role.replace(' ', '-')}:{shade.dark};" in dark


def test_names_are_shown_as_they_are() -> None:
    name = "<b>net</b> & \"co\"<script>alert('x')</script>"
    parsed = Parsed(given_profile(model=name)._repr_html_())
    assert "script" not in {tag for tag, _ in parsed.tags}
    assert name in re.sub(r"\s+", " ", render(given_profile(model=name), 200))


def test_bars_are_as_long_as_what_they_show_and_say_it() -> None:
    plan = given_plan()
    text = html.fragment(plan)
    first = plan.prediction.stages[0]
    share = 100 * first.compute_s / plan.prediction.step_s
    assert f"left:0.00%;width:{share:.2f}%;background:var(--pt-work)" in text
    assert f'title="computes {share:.1f} %, waits 0.6 %, idle 13.7 %"' in text
    lost = 100 * plan.prediction.lost.imbalance
    assert f"left:{100 - lost:.2f}%;width:{lost:.2f}%;background:var(--pt-loss)" in text


def test_a_page_of_a_higher_module_is_laid_out_too() -> None:
    parsed = Parsed(html.fragment(Page("Same", (Facts((("loss", "1 < 2"),)), Prose("note", ("all equal",))))))
    assert parsed.facts == {"loss": "1 < 2"}


# Colours

VISION = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
"""What is seen of linear RGB: Machado, Oliveira and Fernandes 2009, severity 1.0."""


def linear(colour: str) -> list[float]:
    values = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def lab(rgb: list[float]) -> tuple[float, float, float]:
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(a * b for a, b in zip(row, rgb, strict=True)) for row in matrix]
    x, y, z = (
        v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116
        for v in (a / w for a, w in zip(xyz, (0.9505, 1.0, 1.089), strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def difference(first: str, second: str, vision: str) -> float:
    """CIE76: 2.3 is just noticeable."""
    seen = []
    for colour in (first, second):
        rgb = [sum(a * b for a, b in zip(row, linear(colour), strict=True)) for row in VISION[vision]]
        seen.append(lab([min(1.0, max(0.0, value)) for value in rgb]))
    return sum((a - b) ** 2 for a, b in zip(*seen, strict=True)) ** 0.5


SPANS = ("forward", "backward", "weight", "waits", "sync", "optimizer", "idle")


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("mode", Shade._fields)
def test_colours_are_told_apart_with_any_colour_vision(mode: str, vision: str) -> None:
    pairs = [*combinations(SPANS, 2), *combinations(dict.fromkeys(MEMORY_ROLES.values()), 2), ("loss", "gain")]
    for one, other in pairs:
        assert difference(getattr(ROLES[one], mode), getattr(ROLES[other], mode), vision) > 8, (one, other)
    for shade, following in zip(STAGES, [*STAGES[1:], STAGES[0]], strict=True):
        assert difference(getattr(shade, mode), getattr(following, mode), vision) > 20
