"""How our results show themselves: the one declared reach upward, resolved when something is shown."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from partitioner.plan import Plan
    from partitioner.report.comparison import Comparison
    from partitioner.report.explorer import Explorer
    from partitioner.report.scalars import Scalars
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

    def plot_balance(self, *, ax: Axes | None = None) -> Figure:
        """Forward and backward of one micro-batch on each stage, against the mean."""
        return _figure("plot_balance", self, ax=ax)

    def plot_timeline(self, *, measured: Timeline | None = None, ax: Axes | None = None) -> Figure:
        """The step of every rank as predicted, and a measured one (`stage.timeline()`) below on the same scale."""
        return _figure("plot_timeline", self, measured=measured, ax=ax)

    def plot_memory(self, *, over_time: bool = False, ax: Axes | None = None) -> Figure:
        """Memory of a rank of each stage at its peak by item, against its limit; or of each rank over the step."""
        return _figure("plot_memory", self, over_time=over_time, ax=ax)

    def plot_efficiency(self, *, ax: Axes | None = None) -> Figure:
        """The waterfall: from all devices' time down to what does the model's work."""
        return _figure("plot_efficiency", self, ax=ax)

    def plot_graph(self, *, ax: Axes | None = None) -> Figure:
        """Every layer in its order, as high as the time it takes, coloured by stage."""
        return _figure("plot_graph", self, ax=ax)

    def explore(self) -> Explorer:
        """The notebook's explorer: move cuts, micro-batches and schedule by hand, and see what that costs."""
        found: Explorer = _view("explorer").Explorer(self)
        return found

    def scalars(self, folder: str | os.PathLike[str]) -> Scalars:
        """TensorBoard scalars of a run beside this prediction; `add(step, stage.timeline())` after each step."""
        found: Scalars = _view("scalars").Scalars(self, folder)
        return found

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


def _figure(name: str, plan: ShownPlan, **how: Any) -> Figure:
    made: Figure = getattr(_view("figures"), name)(plan, **how)
    return made


def _view(name: str) -> Any:
    return importlib.import_module(f"partitioner.report.{name}")
