"""Results for people: what is worth saying about each (`pages`), for a terminal (`text`) and as HTML (`html`)."""

from partitioner.report.blocks import Bar, Drawing, Facts, Page, Part, Prose, Table
from partitioner.report.text import render

__all__ = ["Bar", "Drawing", "Facts", "Page", "Part", "Prose", "Table", "render"]
