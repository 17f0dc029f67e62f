"""Move a plan's cuts, micro-batches and schedule by hand and see at once what it costs, beside the plan itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from partitioner.costs import Baseline, single_device
from partitioner.errors import ArgumentError, NotBuiltError, SetupError
from partitioner.graph import CostGraph
from partitioner.plan import Plan
from partitioner.report import plan_parts
from partitioner.report.blocks import Drawing, Page, Table
from partitioner.report.gantt_svg import gantt_svg
from partitioner.report.html import fragment
from partitioner.report.losses import waterfall
from partitioner.report.wording import percent, seconds
from partitioner.schedule import placement
from partitioner.simulator import predict, simulate
from partitioner.specs import SCHEDULES, ScheduleName, format_bytes

MOST_DRAWN = 1_200
"""Actions up to which the schedule is drawn: more cost more than a twentieth of a second."""


class Exploration:
    """Other splits of a plan's model on the plan's own ranks, each predicted when it is asked for."""

    def __init__(self, plan: Plan) -> None:
        if plan.training.objective != "train":
            raise NotBuiltError(
                f"a plan for inference (objective={plan.training.objective!r}) cannot be explored in this version, "
                "which predicts training steps: plan other splits with pin= and compare them, plan.compare(other)"
            )
        self.plan = plan
        self.graph = CostGraph(plan.profile)
        self.cuts = tuple(self.graph.position[stage.layers[0]] for stage in plan.stages[1:])
        """Those of the plan: positions of the first layer of each stage but the first."""
        self.allowed_cuts = self.graph.allowed_cuts

    @cached_property
    def schedules(self) -> tuple[ScheduleName, ...]:
        """Those that put this many stages on the same ranks as the plan does."""

        def places(name: ScheduleName) -> tuple[int, ...] | None:
            try:
                return placement(name, self.plan.num_stages, self.plan.mesh["pp"])
            except ArgumentError:
                return None

        return tuple(name for name in SCHEDULES if places(name) == self.plan.placement)

    @cached_property
    def microbatches(self) -> tuple[int, ...]:
        """Counts that divide a replica's batch."""
        samples = self.plan.training.batch_size // self.plan.num_replicas
        return tuple(count for count in range(1, samples + 1) if samples % count == 0)

    @cached_property
    def _baseline(self) -> Baseline:
        return single_device(self.graph, self.plan.cluster, self.plan.training)

    def at(self, cuts: Sequence[int], num_microbatches: int, schedule: ScheduleName) -> Plan:
        """The plan with another split, predicted; runners-up and reasons are left out, they are the plan's own."""
        plan = self.plan
        if len(cuts) != len(self.cuts):
            raise ArgumentError(f"{len(cuts)} cuts make {len(cuts) + 1} stages, the plan has {plan.num_stages}")
        self.graph.check_cuts(cuts)
        split = replace(plan.split, cuts=tuple(cuts), num_microbatches=num_microbatches, schedule=schedule, orders=None)
        prediction = predict(self.graph, plan.cluster, plan.training, split, baseline=self._baseline)
        stages = tuple(
            stage.model_copy(update={"layers": layers})
            for stage, layers in zip(plan.stages, self.graph.stage_ids(cuts), strict=True)
        )
        changes = {
            "schedule": schedule,
            "num_microbatches": num_microbatches,
            "stages": stages,
            "prediction": prediction,
        }
        return plan.model_copy(update=changes | {"runners_up": (), "why": ()})


def page_html(plan: Plan, beside: Plan) -> str:
    """What the explorer shows of a split, with the plan it started from beside it."""
    lost = waterfall(plan.prediction.lost, plan.prediction.efficiency)
    small = 2 * plan.num_stages * plan.num_replicas * plan.num_microbatches <= MOST_DRAWN
    drawn = (Drawing(svg=lambda: gantt_svg(simulate(plan))),) if small else ()
    title = "Step time, bubbles, balance and memory of this split"
    return fragment(Page(title, (_figures(plan, beside), *drawn, plan_parts.balance(plan), lost)))


def _figures(plan: Plan, beside: Plan) -> Table:
    def of(one: Plan) -> list[float]:
        prediction = one.prediction
        work = [stage.forward_s + stage.backward_s for stage in prediction.stages]
        fullest = max(stage.memory.total for stage in prediction.stages)
        over = max(work) / (sum(work) / len(work)) - 1 if sum(work) else 0.0
        return [
            prediction.step_s + prediction.optimizer_s,
            prediction.throughput,
            prediction.bubble_fraction,
            over,
            fullest,
        ]

    names = ("step + optimizer", "samples a second", "bubble", "slowest stage over the mean", "fullest rank")
    shows: tuple[Any, ...] = (seconds, lambda value: f"{value:,.1f}", percent, percent, format_bytes)
    rows: list[tuple[str, ...]] = []
    for name, show, now, then in zip(names, shows, of(plan), of(beside), strict=True):
        change = (
            f"{100 * (now / then - 1):+.1f} %" if then and show is not percent else f"{100 * (now - then):+.1f} points"
        )
        rows.append((name, show(now), show(then), change))
    short = [
        k for k, stage in enumerate(plan.prediction.stages) if stage.memory.total > plan_parts.stage_limit(plan, k)
    ]
    rows.append(("memory", f"stage {short[0]} does not fit" if short else "fits", "", ""))
    return Table(("", "this split", "the plan", "change"), tuple(rows), caption="This split beside the plan")


class Explorer:
    """The notebook's explorer: one slider moves the cut that is chosen, others the micro-batches and the schedule.

    Its widgets can be set from code as well: `cut`, `position`, `microbatches`, `schedule`. `current` is what is shown.
    """

    def __init__(self, plan: Plan) -> None:
        try:
            import ipywidgets as widgets
        except ModuleNotFoundError as error:
            raise SetupError("the explorer needs ipywidgets: pip install 'torch-partitioner[notebook]'") from error
        self.exploration = Exploration(plan)
        self.cuts = list(self.exploration.cuts)
        wide = {"style": {"description_width": "110px"}, "layout": widgets.Layout(width="560px")}
        choices = [(f"{k} | {k + 1}", k) for k in range(len(self.cuts))]
        self.cut = widgets.Dropdown(options=choices, description="cut of stages", disabled=not choices, **wide)
        self.position = widgets.SelectionSlider(options=[("", 0)], description="before layer", **wide)
        self.microbatches = widgets.SelectionSlider(
            options=self.exploration.microbatches, value=plan.num_microbatches, description="micro-batches", **wide
        )
        self.schedule = widgets.Dropdown(
            options=self.exploration.schedules, value=plan.schedule, description="schedule", **wide
        )
        self.reset = widgets.Button(description="Back to the plan", layout=widgets.Layout(width="160px"))
        self.even = widgets.Button(description="Equal numbers of layers", layout=widgets.Layout(width="200px"))
        self.view = widgets.HTML()
        self._moving = False
        self._offer_positions()
        self.cut.observe(lambda _: self._offer_positions(), "value")
        self.position.observe(self._moved, "value")
        self.microbatches.observe(lambda _: self._show(), "value")
        self.schedule.observe(lambda _: self._show(), "value")
        self.reset.on_click(lambda _: self._back())
        self.even.on_click(lambda _: self._to(even_cuts(self.exploration.graph, plan.num_stages)))
        buttons = widgets.HBox([self.reset, self.even])
        controls = [self.cut, self.position, self.microbatches, self.schedule, buttons]
        self.widget = widgets.VBox([*controls, self.view])
        self._show()

    def _repr_mimebundle_(self, **how: Any) -> Any:
        return self.widget._repr_mimebundle_(**how)

    def _offer_positions(self) -> None:
        """The layers between the neighbouring cuts, where a cut is possible."""
        if not self.cuts:
            return
        k = self.cut.value
        edges = (0, *self.cuts, self.exploration.graph.num_layers)
        low, high = edges[k], edges[k + 2]
        offered = [(self.exploration.graph.ids[at], at) for at in self.exploration.allowed_cuts if low < at < high]
        self._moving = True
        self.position.options = offered
        self.position.value = self.cuts[k]
        self._moving = False

    def _moved(self, _: Any) -> None:
        if self._moving:
            return
        self.cuts[self.cut.value] = self.position.value
        self._show()

    def _back(self) -> None:
        plan = self.exploration.plan
        self.microbatches.value, self.schedule.value = plan.num_microbatches, plan.schedule
        self._to(self.exploration.cuts)

    def _to(self, cuts: Sequence[int]) -> None:
        self.cuts = list(cuts)
        self._offer_positions()
        self._show()

    def _show(self) -> None:
        self.current = self.exploration.at(self.cuts, self.microbatches.value, self.schedule.value)
        self.view.value = page_html(self.current, self.exploration.plan)


def even_cuts(graph: CostGraph, num_stages: int) -> tuple[int, ...]:
    """Cuts that leave each stage about as many layers: what one would write by hand.

    Cuts that are not possible move to the next that is; ArgumentError where there are too few.
    """
    cuts: list[int] = []
    for k in range(1, num_stages):
        wanted = max(round(k * graph.num_layers / num_stages), cuts[-1] + 1 if cuts else 1)
        cut = next((at for at in graph.allowed_cuts if at >= wanted), None)
        if cut is None:
            raise ArgumentError(f"{graph.num_layers} layers have no {num_stages - 1} cuts that are possible")
        cuts.append(cut)
    assert all(first < second for first, second in pairwise(cuts))
    return tuple(cuts)
