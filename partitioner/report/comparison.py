"""Plans side by side: what each is, what it does, and what makes the difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from partitioner.display import Shown
from partitioner.plan import Plan
from partitioner.report.blocks import Page, Prose, Table
from partitioner.report.losses import LOSSES, SMALL
from partitioner.report.plan_parts import mesh_of, stage_limit
from partitioner.report.wording import percent, seconds
from partitioner.specs import format_bytes


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Two plans or more, by name; each is compared with the first."""

    names: tuple[str, ...]
    plans: tuple[Plan, ...]

    def page(self) -> Page:
        """What a terminal or a notebook shows."""
        return Page(
            " against ".join(self.names),
            (
                self._figures(),
                self._losses(),
                Prose("difference", tuple(self.difference(k) for k in range(1, len(self.plans)))),
                *([Prose("note", notes)] if (notes := self._notes()) else ()),
            ),
        )

    def figures(self) -> list[tuple[str, list[str], list[float] | None]]:
        """(name, as shown for each plan, as numbers where a ratio makes sense)."""
        plans = self.plans
        predictions = [plan.prediction for plan in plans]

        def row(name: str, show: Callable[[float], str], values: list[float]) -> tuple[str, list[str], list[float]]:
            return name, [show(value) for value in values], values

        fullest = [
            max(
                (one.memory.total / stage_limit(plan, k) if stage_limit(plan, k) else 0.0, one.memory.total)
                for k, one in enumerate(plan.prediction.stages)
            )
            for plan in plans
        ]
        return [
            ("model", [plan.profile.model for plan in plans], None),
            ("devices", [f"{plan.num_ranks} of {plan.cluster.num_devices}" for plan in plans], None),
            ("mesh", [mesh_of(plan) for plan in plans], None),
            ("schedule", [plan.schedule for plan in plans], None),
            ("stages", [str(plan.num_stages) for plan in plans], None),
            ("micro-batches", [str(plan.num_microbatches) for plan in plans], None),
            ("batch", [str(plan.training.batch_size) for plan in plans], None),
            row("step + optimizer", seconds, [one.step_s + one.optimizer_s for one in predictions]),
            row("throughput", lambda value: f"{value:,.1f} samples/s", [one.throughput for one in predictions]),
            row("speedup", lambda value: f"{value:.2f} x", [one.speedup for one in predictions]),
            row("efficiency", percent, [one.efficiency for one in predictions]),
            row("bubble", percent, [one.bubble_fraction for one in predictions]),
            row("fullest rank", format_bytes, [float(total) for _, total in fullest]),
            ("of its limit", [percent(share) for share, _ in fullest], None),
        ]

    def _figures(self) -> Table:
        rows = []
        for name, shown, values in self.figures():
            cells = [name, *shown]
            for value in (values or [0.0] * len(shown))[1:]:
                cells.append(f"{100 * (value / values[0] - 1):+.1f} %" if values and values[0] else "")
            rows.append(tuple(cells))
        against = [f"{name} to {self.names[0]}" for name in self.names[1:]]
        return Table(("figure", *self.names, *against), tuple(rows), caption="Plans side by side")

    def _losses(self) -> Table:
        """Where each plan's devices spend their time."""
        rows = []
        lost = [plan.prediction.lost for plan in self.plans]
        for field, (name, _) in LOSSES.items():
            parts = [getattr(one, field) for one in lost]
            if any(abs(part) >= SMALL for part in parts):
                rows.append((name, *(percent(part) for part in parts)))
        total = ("left for the model", *(percent(plan.prediction.efficiency) for plan in self.plans))
        return Table(("lost efficiency", *self.names), tuple(rows), total=total, caption="Shares of all devices' time")

    def difference(self, k: int) -> str:
        """How much faster or slower plan k is than the first, and which losses make up the most of it."""
        first, other = self.plans[0].prediction, self.plans[k].prediction
        names = f"{self.names[k]} is"
        ratio = other.throughput / first.throughput - 1
        if abs(ratio) < SMALL:
            return f"{names} as fast as {self.names[0]}"
        seconds_a = [one.step_s + one.optimizer_s for one in (first, other)]
        ours = {name: getattr(first.lost, name) * seconds_a[0] for name in LOSSES}
        theirs = {name: getattr(other.lost, name) * seconds_a[1] for name in LOSSES}
        change = {name: theirs[name] - ours[name] for name in LOSSES}
        how = f"{percent(abs(ratio))} {'faster' if ratio > 0 else 'slower'}"
        told = f"{names} {how} than {self.names[0]} in samples a second"
        same = (
            _devices(self.plans[0]) == _devices(self.plans[k])
            and self.plans[0].num_ranks == self.plans[k].num_ranks
            and self.plans[0].training.batch_size == self.plans[k].training.batch_size
        )
        if not same:
            return told
        largest = sorted(change, key=lambda name: -abs(change[name]))[:2]
        causes = [
            f"{seconds(abs(change[name]))} a step {'more' if change[name] > 0 else 'less'} for {LOSSES[name][0]}"
            for name in largest
            if abs(change[name]) > SMALL * seconds_a[0]
        ]
        return told + (f": {' and '.join(causes)}" if causes else "")

    def _notes(self) -> tuple[str, ...]:
        first, notes = self.plans[0], []
        for name, plan in zip(self.names[1:], self.plans[1:], strict=True):
            if plan.profile.fingerprint != first.profile.fingerprint or plan.profile.model != first.profile.model:
                notes.append(f"{name} is of another model than {self.names[0]}")
            elif plan.profile != first.profile:
                notes.append(f"{name} was planned from other costs of the same model than {self.names[0]}")
            if _devices(plan) != _devices(first):
                notes.append(f"{name} is for other devices than {self.names[0]}")
            elif plan.cluster != first.cluster:
                notes.append(
                    f"{name} was planned with other figures of the same devices and links than {self.names[0]}"
                )
            if plan.training.batch_size != first.training.batch_size:
                notes.append(f"{name} has another batch than {self.names[0]}: compare samples a second, not steps")
        return tuple(notes)


def _devices(plan: Plan) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """What they are called and where they stand; their measured figures differ from one call to the next."""
    return tuple(device.name for device in plan.cluster.devices), tuple(plan.cluster.nodes)
