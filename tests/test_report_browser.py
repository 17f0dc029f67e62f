"""The report page in headless Chromium: what it shows when pointed at, in the dark, on a phone, on paper, by keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chromium
from drawn_plans import drawn_plan
from test_report_document import slowed

from partitioner.report.gantt_svg import KINDS
from partitioner.report.svg import INNER, LEFT, WIDTH
from partitioner.report.wording import seconds
from partitioner.simulator import simulate
from partitioner.timeline import Span

PLAN = drawn_plan(num_skips=4, memory_bytes=2**30)
PLAN = PLAN.model_copy(update={"why": (*PLAN.why, f"link figures: measured, https://example.org/{'0123456789' * 8}")})
TIMELINE = simulate(PLAN)

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "plan.html"
    PLAN.save_report(path, measured=slowed(PLAN))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def open_page(browser: Any, page_file: Path) -> Iterator[Open]:
    """Opens the report; at the end there must have been no error, and no request but for the file."""
    faults: list[str] = []
    contexts = []

    def open_page(path: Path = page_file, *, width: int = 1440, **how: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **how)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("request", lambda request: None if request.url == path.as_uri() else faults.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def pointed_at(page: Any, span: Span, chart: int = 0, share: float = 0.5) -> str:
    """Move the pointer to a moment of the span in the Gantt chart at its first zoom; what is shown there."""
    svg = page.locator("svg.pt-gantt").nth(chart)
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    end_s, pitch, lane = (float(svg.get_attribute(f"data-{name}")) for name in ("end", "pitch", "lane"))
    scale = box["width"] / WIDTH
    at_s = span.start_s + share * (span.end_s - span.start_s)
    x = box["x"] + scale * (LEFT + INNER * at_s / end_s)
    page.mouse.move(x, box["y"] + scale * (span.rank * pitch + lane / 2))
    return page.locator(".tip").inner_text() if page.locator(".tip").is_visible() else ""


def test_pointing_at_an_action_tells_what_it_is(open_page: Open) -> None:
    page = open_page()
    for span in [span for span in TIMELINE.spans if span.kind in "FB"][::9]:
        said = pointed_at(page, span)
        assert said.startswith(
            f"rank {span.rank}, stage {span.stage}: {KINDS[span.kind][1]}, micro-batch {span.microbatch}\n"
        )
        assert f"{seconds(span.end_s - span.start_s)}, from {seconds(span.start_s)} to " in said


def test_pointing_at_nothing_tells_how_long_it_is_idle(open_page: Open) -> None:
    page = open_page()
    last = next(span for span in TIMELINE.spans if span.rank == 3 and span.kind == "F")
    before = Span(3, "idle", -1, -1, 0.0, last.start_s)
    waits = [span for span in TIMELINE.spans if span.rank == 3 and span.kind == "recv" and span.start_s < last.start_s]
    idle_s = min([last.start_s, *(span.start_s for span in waits)])
    assert pointed_at(page, before, share=0.3) == f"rank 3: idle for {seconds(idle_s)}"


@pytest.mark.slow
def test_the_measured_step_is_pointed_at_on_its_own_clock(open_page: Open) -> None:
    page = open_page()
    span = next(span for span in slowed(PLAN).spans if (span.stage, span.kind, span.microbatch) == (2, "B", 5))
    assert f"{seconds(span.end_s - span.start_s)}, from {seconds(span.start_s)} to " in pointed_at(page, span, chart=1)


@pytest.mark.slow
def test_layers_bars_and_skips_tell_what_they_are(open_page: Open) -> None:
    page = open_page()
    page.locator("svg.pt-graph rect.layer").nth(5).hover()
    name = PLAN.profile.layers[5].id
    assert page.locator(".tip").inner_text().startswith(f"{name}, stage {PLAN.stage_of()[name]}: forward ")
    page.locator("#balance .pt-bar").first.hover()
    assert page.locator(".tip").inner_text().startswith(f"forward {seconds(PLAN.prediction.stages[0].forward_s)}")
    page.mouse.move(2, 2)
    assert not page.locator(".tip").is_visible()


@pytest.mark.slow
def test_keys_walk_from_action_to_action_and_zoom(open_page: Open) -> None:
    page = open_page()
    page.locator("svg.pt-gantt").first.focus()
    tip = page.locator(".tip")
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith("rank 0, stage 0: forward, micro-batch 0")
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith("rank 0, stage 0: forward, micro-batch 1")
    page.keyboard.press("ArrowDown")
    assert tip.inner_text().startswith("rank 1, stage 1: forward, micro-batch 0")
    shown = page.locator("svg.pt-gantt").first.locator(".time text").all_inner_texts()
    page.keyboard.press("+")
    page.keyboard.press("+")
    closer = page.locator("svg.pt-gantt").first.locator(".time text").all_inner_texts()
    assert closer != shown
    page.keyboard.press("ArrowRight")
    assert "micro-batch 1" in tip.inner_text()
    page.keyboard.press("0")
    assert page.locator("svg.pt-gantt").first.locator(".time text").all_inner_texts() == shown


@pytest.mark.slow
def test_pointing_is_right_when_zoomed(open_page: Open) -> None:
    page = open_page()
    svg = page.locator("svg.pt-gantt").first
    page.get_by_role("button", name="Zoom in").first.click()
    box = svg.bounding_box()
    scale, end_s = box["width"] / WIDTH, float(svg.get_attribute("data-end"))
    span = next(span for span in TIMELINE.spans if span.rank == 0 and span.kind in "FB" and span.start_s > 0.4 * end_s)
    middle = (span.start_s + span.end_s) / 2 / end_s
    page.mouse.move(box["x"] + scale * (LEFT + INNER * 2 * (middle - 0.25)), box["y"] + 8 * scale)
    assert f"micro-batch {span.microbatch}\n{seconds(span.end_s - span.start_s)}" in page.locator(".tip").inner_text()


@pytest.mark.parametrize("width", [375, 1440])
def test_no_width_makes_the_page_scroll_sideways(open_page: Open, width: int) -> None:
    page = open_page(width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    clipped = page.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,p,li,dd,.tiles small')].filter(e => e.scrollWidth > e.clientWidth + 1"
        " && getComputedStyle(e).overflow !== 'hidden' && !e.closest('.pt-scroll,.pt-hidden')).map(e => e.textContent)"
    )
    assert clipped == []


def test_a_phone_shows_the_whole_waterfall(open_page: Open) -> None:
    page = open_page(width=375)
    table = page.locator("#losses .pt-scroll")
    assert table.evaluate("e => e.scrollWidth - e.clientWidth") <= 0
    assert page.locator("#losses .pt-bar").first.evaluate("e => e.clientWidth") >= 100


def test_labels_on_a_filled_lane_stand_out_from_it(open_page: Open) -> None:
    label = open_page().locator(".pt-memory text.ink").first
    assert label.evaluate("e => getComputedStyle(e).paintOrder").startswith("stroke")


@pytest.mark.parametrize(("scheme", "paper"), [("light", (255, 255, 255)), ("dark", (20, 24, 29))])
def test_the_page_is_dark_where_the_reader_is(open_page: Open, scheme: str, paper: tuple[int, ...]) -> None:
    page = open_page(color_scheme=scheme)

    def colour(selector: str, name: str) -> tuple[float, ...]:
        text = page.locator(selector).first.evaluate(f"element => getComputedStyle(element).{name}")
        return tuple(float(part) for part in text[text.index("(") + 1 : -1].split(",")[:3])

    assert colour("body", "backgroundColor") == paper
    for selector in ("h1", "header p", "dt", "td", ".pt-note", "nav a"):
        assert contrast(colour(selector, "color"), paper) >= 4.5, selector
    assert contrast(colour("svg text", "fill"), paper) >= 4.5


def contrast(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """Of two colours, as WCAG 2.2 has it: 4.5 or more for text."""

    def luminance(rgb: tuple[float, ...]) -> float:
        parts = [v / 255 / 12.92 if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in rgb]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_the_page_is_whole_with_script_off(open_page: Open) -> None:
    page = open_page(java_script_enabled=False)
    assert page.get_by_role("heading", name="Where the time goes").is_visible()
    assert page.locator("svg.pt-gantt path[data-m]").count() == 2 * sum(s.kind != "send" for s in TIMELINE.spans)
    assert page.locator("button").count() == 0
    page.get_by_text("as a table").click()
    assert page.get_by_role("cell", name=PLAN.profile.layers[7].id).is_visible()


@pytest.mark.slow
def test_paper_has_no_tools_and_is_light(open_page: Open) -> None:
    page = open_page(color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert not page.locator("nav").is_visible()
    assert not page.locator(".tools").first.is_visible()
    assert page.locator("body").evaluate("element => getComputedStyle(element).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf().startswith(b"%PDF")


@pytest.mark.slow
def test_tab_reaches_links_charts_and_details(open_page: Open) -> None:
    page = open_page()
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(
            page.evaluate("document.activeElement.tagName + '.' + (document.activeElement.className.baseVal || '')")
        )
    assert {"A.", "svg.pt-gantt", "SUMMARY.", "BUTTON."} <= seen


@pytest.mark.slow
def test_a_notebooks_view_stands_alone_in_a_page(open_page: Open, tmp_path: Path) -> None:
    (tmp_path / "cell.html").write_text(
        f"<!doctype html><meta charset=utf-8><body>{PLAN._repr_html_()}", encoding="utf-8"
    )
    page = open_page(tmp_path / "cell.html", width=700, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    assert page.locator(".pt").first.evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(20, 24, 29)"
