"""What a view is made of, as plain data: terminal, notebook and web page lay out the same blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Facts:
    """Names with what they are, one a line."""

    pairs: tuple[tuple[str, str], ...]


class Part(NamedTuple):
    """A stretch of a bar, in fractions of its whole length. `role` says what it is for: a key of `palette.ROLES`."""

    role: str
    start: float
    end: float


@dataclass(frozen=True)
class Bar:
    """A cell that is drawn. Parts do not overlap; what they leave free stays empty. `said` tells it in words."""

    parts: tuple[Part, ...]
    said: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells below their headers. Columns named in `wide` hold names and may be folded; the others never are."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str | Bar, ...], ...]
    wide: tuple[str, ...] = ()
    total: tuple[str | Bar, ...] = ()
    """A last row, set apart."""
    note: str = ""
    """One line below."""
    caption: str = ""
    """What the table shows, for those who cannot see where it stands; a terminal leaves it out."""


@dataclass(frozen=True)
class Prose:
    """Sentences, one paragraph each, with a word in front that says what they are."""

    heading: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Drawing:
    """A picture in characters of equal width and as SVG, each made when it is shown; None: not in that medium."""

    draw: Callable[[int], str] | None = None
    """Columns at hand -> lines."""
    svg: Callable[[], str] | None = None


@dataclass(frozen=True)
class Page:
    """A title and what stands below it, in order."""

    title: str
    blocks: tuple[Facts | Table | Prose | Drawing, ...]
