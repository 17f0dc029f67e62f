"""Results for people: what is worth saying about each (`pages`), and its layout for a terminal (`text`)."""

from partitioner.report.pages import Drawing, Facts, Page, Prose, Table
from partitioner.report.text import render

__all__ = ["Drawing", "Facts", "Page", "Prose", "Table", "render"]
