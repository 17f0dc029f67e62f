"""How our results show themselves: the one declared reach upward, resolved when something is shown."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partitioner.plan import Plan
    from partitioner.report.comparison import Comparison
    from partitioner.timeline import Timeline


class Shown:
    """Mixin: `str(x)` is the terminal view of `report.text`; the notebook gets the same as HTML.

    Import order forbids data to know its views, so the view is looked up when it is asked for.
    """

    def __str__(self) -> str:
        return str(_view("text").render(self))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return str(_view("html").fragment(self))


class ShownPlan(Shown):
    """What a plan can show beyond its text; each view loads what it draws with when it is called."""

    def save_report(self, path: str | os.PathLike[str], *, measured: Timeline | None = None) -> None:
        """Write the plan as one self-contained web page; `measured`: a step as it ran, from `stage.timeline()`."""
        _view("document").save(self, path, measured=measured)

    def save_trace(self, path: str | os.PathLike[str], *, measured: Timeline | None = None) -> None:
        """Write the predicted step, and a measured one beside it, as a Chrome trace: ui.perfetto.dev opens it."""
        _view("trace").save(self, path, measured=measured)

    def compare(self, other: Plan) -> Comparison:
        """This plan beside another one, and what makes the difference."""
        found: Comparison = _view("comparison").Comparison(("this", "other"), (self, other))
        return found


def _view(name: str) -> Any:
    return importlib.import_module(f"partitioner.report.{name}")
