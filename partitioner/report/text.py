"""Lay a Page out for a terminal: no number is cut off, the width of the window or 100 columns, colours if asked for."""

from __future__ import annotations

import io
import re
import shutil
import textwrap
from itertools import groupby
from typing import Any, Literal

from rich.box import Box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from partitioner.report.blocks import Bar, Drawing, Facts, Page, Prose, Table
from partitioner.report.pages import page_of
from partitioner.report.palette import ROLES

_NUMBER = re.compile(r"(\d) (?=%|x |[mµ]?s\b|[KMGT]iB\b|B\b)")
_ROLE = re.compile(r"\{([a-z -]+)\}")
LINES = Box("    \n    \n -- \n    \n -- \n -- \n    \n    \n")
GLYPHS = {"work": "█", "waits": "▒", "loss": "█", "gain": "░", "whole": "▓"}
"""Role of a part of a bar -> how it looks where there are no colours."""
BAR = 10
"""Columns of a bar; one in a table's last column takes what is left, up to four times as many."""


def render(thing: Any, width: int | None = None, *, colour: bool = False) -> str:
    """The terminal view of a Plan, Profile, Timeline, CostGraph or of anything with a method `page()`.

    No newline at the end. `width` is that of the terminal, 100 where there is none; a table that needs more takes it
    rather than lose a digit. `colour`: with the escape codes of a terminal.
    """
    page = thing if isinstance(thing, Page) else page_of(thing)
    columns = width or max(60, min(140, shutil.get_terminal_size((100, 24)).columns))
    title, line = page.title, "=" * len(page.title)
    parts = [f"\x1b[1m{title}\x1b[0m\n{line}" if colour else f"{title}\n{line}"]
    parts += [_block(block, columns, colour) for block in page.blocks]
    return "\n\n".join(part for part in parts if part)


def _block(block: Facts | Table | Prose | Drawing, columns: int, colour: bool) -> str:
    match block:
        case Facts():
            longest = max((len(name) for name, _ in block.pairs), default=0)
            return "\n".join(_hanging(f"{name:<{longest}}  ", text, columns) for name, text in block.pairs)
        case Table():
            return _table(block, columns, colour)
        case Prose():
            return "\n".join(_hanging(f"{block.heading}: ", line, columns) for line in block.lines)
        case Drawing():
            return block.draw(columns) if block.draw else ""


def _hanging(head: str, text: str, columns: int) -> str:
    """Folded below its first word; a number stays beside its unit."""
    kept = _NUMBER.sub("\\1\u00a0", text)
    lines = textwrap.wrap(kept, max(30, columns - len(head)), break_long_words=False, break_on_hyphens=False)
    return (head + ("\n" + " " * len(head)).join(lines)).replace("\u00a0", " ")


def _table(table: Table, columns: int, colour: bool) -> str:
    rich = RichTable(box=LINES, pad_edge=False, show_footer=bool(table.total), padding=(0, 1, 0, 0))
    rows = [*table.rows, table.total] if table.total else list(table.rows)
    drawn = [any(isinstance(row[k], Bar) for row in rows) for k in range(len(table.headers))]
    least = []
    for k, header in enumerate(table.headers):
        cells = [header, *(str(row[k]) for row in rows if not isinstance(row[k], Bar))]
        longest = max(map(len, cells))
        least.append(min(longest, 18) if header in table.wide else max(longest, BAR if drawn[k] else 0))
    needed = sum(least) + 2 * len(least)
    spare = 0 if table.wide else max(0, columns - needed)
    bar = [max(length, BAR) + (min(3 * BAR, spare) if k == len(least) - 1 else 0) for k, length in enumerate(least)]
    cells_of = [[_cell(cell, bar[k], colour) for k, cell in enumerate(row)] for row in rows]
    total = cells_of.pop() if table.total else [Text()] * len(least)
    for k, header in enumerate(table.headers):
        wide = header in table.wide
        justify: Literal["left", "right"] = "left" if wide or k == 0 or drawn[k] else "right"
        rich.add_column(Text(header), total[k], justify=justify, no_wrap=not wide, overflow="fold", min_width=least[k])
    for row in cells_of:
        rich.add_row(*row)
    console = Console(
        file=io.StringIO(),
        width=max(columns, needed + (bar[-1] - least[-1])),
        color_system="256" if colour else None,
        force_terminal=colour,
        force_jupyter=False,  # else it would show itself in a notebook beside what is returned
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
    with console.capture() as captured:
        console.print(rich)
    text = textwrap.dedent("\n".join(line.rstrip() for line in captured.get().splitlines())).strip("\n")
    note = _ROLE.sub(lambda found: GLYPHS.get(found[1], "█"), table.note)
    return "\n".join([text, *textwrap.wrap(note, columns, replace_whitespace=False, drop_whitespace=False)])


def _cell(cell: str | Bar, width: int, colour: bool) -> Text:
    """A bar as characters: each column shows what takes most of it."""
    if isinstance(cell, str):
        return Text(cell)
    roles = []
    for column in range(width):
        low, high = column / width, (column + 1) / width
        covers = {part.role: min(high, part.end) - max(low, part.start) for part in cell.parts}
        role = max(covers, key=lambda name: covers[name], default="")
        covered = sum(cover for cover in covers.values() if cover > 0)
        roles.append(role if covered >= 0.5 / width else "")
    text = Text()
    for role, stretch in groupby(roles):
        text.append((GLYPHS.get(role, "█") if role else " ") * len(list(stretch)), _style(role, colour))
    return text


def _style(role: str, colour: bool) -> str:
    return ROLES[role].dark if role and colour else ""
