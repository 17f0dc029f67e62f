"""Lay a Page out as HTML for a notebook: one self-contained piece, without script, light and dark, nothing fetched."""

from __future__ import annotations

import re
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from partitioner.report.blocks import Bar, Drawing, Facts, Page, Prose, Table
from partitioner.report.gantt_svg import KINDS
from partitioner.report.pages import page_of
from partitioner.report.palette import ROLES, STAGES, as_css
from partitioner.report.svg import colour, swatch

_ROLE = re.compile(r"\{([a-z -]+)\}")
LIGHT = "--pt-bg:#fff;--pt-raised:#f6f8fa;--pt-ink:#1a2027;--pt-soft:#56606b;--pt-line:#d9dee4;--pt-focus:#0a5f9e;"
DARK = "--pt-bg:#14181d;--pt-raised:#1b2027;--pt-ink:#e6eaef;--pt-soft:#a3adb8;--pt-line:#333b45;--pt-focus:#6fb4ee;"


def fragment(thing: Any) -> str:
    """The notebook's view of a Plan, Profile, Timeline, CostGraph or of anything with a method `page()`."""
    page = thing if isinstance(thing, Page) else page_of(thing)
    inside = "\n".join(block_html(block) for block in page.blocks)
    title = f'<h3 class="pt-title">{escape(page.title)}</h3>'
    return f'<div class="pt pt-card"><style>{style()}</style>\n{title}\n{inside}\n</div>'


@cache
def style() -> str:
    """The style sheet: dark where the reader's system or JupyterLab's or VS Code's theme is."""
    light, dark = as_css()
    sheet = files("partitioner.report").joinpath("style.css").read_text(encoding="utf-8")
    sheet = re.sub(r"/\*.*?\*/\s*", "", sheet, flags=re.DOTALL)
    dark = f"color-scheme:dark;--pt-on:#0f1318;{DARK}{dark}"
    light = f"color-scheme:light;--pt-on:#fff;{LIGHT}{light}"
    return (
        f".pt{{{light}}}\n{sheet}@media screen and (prefers-color-scheme:dark){{.pt{{{dark}}}}}\n"
        f"body[data-jp-theme-light='true'] .pt,body.vscode-light .pt{{{light}}}\n"
        f"body[data-jp-theme-light='false'] .pt,body.vscode-dark .pt{{{dark}}}\n{_drawn()}"
    )


def _drawn() -> str:
    """Strokes of the kinds of spans, fills of the stages."""
    kinds = {role for role, _ in KINDS.values()}
    names = sorted({*kinds, *(f"{role}-odd" for role in kinds if f"{role}-odd" in ROLES)})
    strokes = "".join(f".pt .lanes .pt-{name}{{stroke:var(--pt-{name})}}" for name in names)
    return strokes + "".join(f".pt .pt-stage-{k}{{fill:var(--pt-stage-{k})}}" for k in range(len(STAGES)))


def block_html(block: Facts | Table | Prose | Drawing) -> str:
    """One block, at home in any element of class "pt"."""
    match block:
        case Facts():
            return (
                f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(text)}</dd>' for name, text in block.pairs)}</dl>"
            )
        case Table():
            return _table(block)
        case Prose():
            word = f'<span class="pt-word">{escape(block.heading)}</span>'
            return "".join(f"<p>{word}{escape(line)}</p>" for line in block.lines)
        case Drawing():
            return block.svg() if block.svg else ""


def _table(table: Table) -> str:
    rows = [*table.rows, table.total] if table.total else list(table.rows)
    drawn = [any(isinstance(row[k], Bar) for row in rows) for k in range(len(table.headers))]
    kinds = [
        ' class="pt-wide"' if header in table.wide else ' class="pt-drawn"' if drawn[k] else ""
        for k, header in enumerate(table.headers)
    ]
    head = "".join(f'<th scope="col"{look}>{escape(h)}</th>' for look, h in zip(kinds, table.headers, strict=True))
    body = "".join(_row(row, kinds) for row in table.rows)
    foot = f"<tfoot>{_row(table.total, kinds)}</tfoot>" if table.total else ""
    caption = f'<caption class="pt-hidden">{escape(table.caption)}</caption>' if table.caption else ""
    looks = ["pt-fill"] if any(drawn) or table.wide else []
    looks += ["pt-roomy"] if any(drawn) and not table.wide else []
    looks += ["pt-many"] if len(table.rows) > 24 else []
    kind = f' class="{" ".join(looks)}"' if looks else ""
    label = escape(table.caption or table.headers[0])
    note = _ROLE.sub(lambda found: swatch(found[1]), escape(table.note))
    return (
        f'<div class="pt-scroll" role="region" tabindex="0" aria-label="{label}"><table{kind}>{caption}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>{foot}</table></div>"
        + (f'<p class="pt-note">{note}</p>' if note else "")
    )


def _row(row: tuple[str | Bar, ...], kinds: list[str]) -> str:
    first, *rest = zip(row, kinds, strict=True)
    cells = [
        f'<th scope="row"{first[1]}>{_cell(first[0])}</th>',
        *(f"<td{kind}>{_cell(cell)}</td>" for cell, kind in rest),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _cell(cell: str | Bar) -> str:
    return escape(cell) if isinstance(cell, str) else bar(cell)


def bar(given: Bar) -> str:
    """A bar whose parts are read out, and shown when pointed at."""
    parts = "".join(
        f'<i style="left:{100 * part.start:.2f}%;width:{100 * (part.end - part.start):.2f}%;'
        f'background:{colour(part.role)}"></i>'
        for part in given.parts
    )
    said = f' title="{escape(given.said)}"' if given.said else ""
    spoken = f'<span class="pt-hidden">{escape(given.said)}</span>' if given.said else ""
    return f'<span class="pt-bar"{said}><span aria-hidden="true">{parts}</span></span>{spoken}'
