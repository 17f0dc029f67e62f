"""How our results show themselves: the one declared reach upward, resolved when something is shown."""

from __future__ import annotations

import importlib


class Shown:
    """Mixin: `str(x)` is the terminal view of `report.text`; the notebook gets the same as HTML.

    Import order forbids data to know its views, so the view is looked up when it is asked for.
    """

    def __str__(self) -> str:
        render = importlib.import_module("partitioner.report.text").render
        return str(render(self))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return str(importlib.import_module("partitioner.report.html").fragment(self))
