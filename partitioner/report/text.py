"""Lay a Page out for a terminal: no colours, no cut-off numbers, the width of the window or 100 columns."""

from __future__ import annotations

import io
import re
import shutil
import textwrap
from typing import Any, Literal

from rich.box import Box
from rich.console import Console
from rich.table import Table as RichTable

from partitioner.report.pages import Drawing, Facts, Page, Prose, Table, page_of

_NUMBER = re.compile(r"(\d) (?=%|x |[mµ]?s\b|[KMGT]iB\b|B\b)")
LINES = Box("    \n    \n -- \n    \n -- \n -- \n    \n    \n")


def render(thing: Any, width: int | None = None) -> str:
    """The terminal view of a Plan, Profile, Timeline, CostGraph or of anything with a method `page()`.

    No newline at the end. `width` is that of the terminal, 100 where there is none; a table that needs more takes it
    rather than lose a digit.
    """
    page = thing if isinstance(thing, Page) else page_of(thing)
    columns = width or max(60, min(140, shutil.get_terminal_size((100, 24)).columns))
    parts = [page.title + "\n" + "=" * len(page.title)]
    parts += [_block(block, columns) for block in page.blocks]
    return "\n\n".join(part for part in parts if part)


def _block(block: Facts | Table | Prose | Drawing, columns: int) -> str:
    match block:
        case Facts():
            longest = max((len(name) for name, _ in block.pairs), default=0)
            return "\n".join(_hanging(f"{name:<{longest}}  ", text, columns) for name, text in block.pairs)
        case Table():
            return _table(block, columns)
        case Prose():
            return "\n".join(_hanging(f"{block.heading}: ", line, columns) for line in block.lines)
        case Drawing():
            return block.draw(columns)


def _hanging(head: str, text: str, columns: int) -> str:
    """Folded below its first word; a number stays beside its unit."""
    kept = _NUMBER.sub("\\1\u00a0", text)
    lines = textwrap.wrap(kept, max(30, columns - len(head)), break_long_words=False, break_on_hyphens=False)
    return (head + ("\n" + " " * len(head)).join(lines)).replace("\u00a0", " ")


def _table(table: Table, columns: int) -> str:
    rich = RichTable(box=LINES, pad_edge=False, show_footer=bool(table.total), padding=(0, 1, 0, 0))
    needed = 0
    for k, header in enumerate(table.headers):
        wide = header in table.wide
        total = table.total[k] if table.total else ""
        longest = max(len(cell) for cell in (header, total, *(row[k] for row in table.rows)))
        least = min(longest, 20) if wide else longest
        justify: Literal["left", "right"] = "left" if wide or k == 0 else "right"
        rich.add_column(header, total, justify=justify, no_wrap=not wide, overflow="fold", min_width=least)
        needed += least + 2
    for row in table.rows:
        rich.add_row(*row)
    console = Console(
        file=io.StringIO(),
        width=max(columns, needed),
        color_system=None,
        force_terminal=False,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
    with console.capture() as captured:
        console.print(rich)
    return textwrap.dedent("\n".join(line.rstrip() for line in captured.get().splitlines())).strip("\n")
