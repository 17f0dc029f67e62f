"""Time the views: python tests/benchmarks/report.py [--stages 64] [--microbatches 512] [--layers 200] [--json FILE]

The report page of a plan of so many stages and micro-batches: seconds to write, bytes, seconds until headless Chromium
has loaded and painted it, and until the first pointing at its schedule is answered. The explorer of a model of so many
layers: median and longest milliseconds of a move. Plans are drawn at random (tests/drawn_plans.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser import chromium
from drawn_plans import drawn_plan

from partitioner.report.document import document


def page_row(stages: int, microbatches: int, layers: int) -> dict[str, Any]:
    plan = drawn_plan(max(layers, stages), stages, microbatches, num_skips=20)
    start = time.perf_counter()
    text = document(plan)
    row: dict[str, Any] = {"stages": stages, "microbatches": microbatches, "layers": len(plan.profile.layers)}
    row |= {"write_s": time.perf_counter() - start, "bytes": len(text.encode())}
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        path = Path(folder) / "plan.html"
        path.write_text(text, encoding="utf-8")
        opened, pointed = [], []
        for _ in range(5):
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            start = time.perf_counter()
            page.goto(path.as_uri())
            page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            opened.append(time.perf_counter() - start)
            svg = page.locator("svg.pt-gantt").first
            svg.scroll_into_view_if_needed()
            box = svg.bounding_box()
            start = time.perf_counter()
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 10)
            page.locator(".tip").wait_for(state="visible")
            pointed.append(time.perf_counter() - start)
            page.close()
    return row | {"open_s": statistics.median(opened), "open_max_s": max(opened), "point_s": statistics.median(pointed)}


def explorer_row(stages: int, microbatches: int, layers: int) -> dict[str, Any]:
    explorer = drawn_plan(layers, stages, microbatches).explore()
    moves = []
    for cut in range(stages - 1):
        explorer.cut.value = cut
        for _, at in explorer.position.options[::5]:
            start = time.perf_counter()
            explorer.position.value = at
            moves.append(1e3 * (time.perf_counter() - start))
    for name in ("schedule", "microbatches"):
        widget = getattr(explorer, name)
        for value in widget.options:
            start = time.perf_counter()
            widget.value = value
            moves.append(1e3 * (time.perf_counter() - start))
    row = {"stages": stages, "microbatches": microbatches, "layers": layers, "moves": len(moves)}
    return row | {"median_ms": statistics.median(moves), "longest_ms": max(moves)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    pages = [page_row(4, 8, 40), page_row(options.stages, options.microbatches, options.layers)]
    explored = [
        explorer_row(4, 8, options.layers),
        explorer_row(8, 32, options.layers),
        explorer_row(16, 32, options.layers),
    ]
    for rows in (pages, explored):
        print("  ".join(f"{name:>12}" for name in rows[0]))
        for row in rows:
            print(
                "  ".join(f"{value:>12.3f}" if isinstance(value, float) else f"{value:>12}" for value in row.values())
            )
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": pages, "explorer": explored}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
