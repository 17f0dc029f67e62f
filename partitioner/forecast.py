"""What `capacity()` answers: does it fit, what fills the heaviest rank, how fast, at what price, what would change it.

All of it is estimated. Times lie within `band` of the truth for two of three published runs, nearer where runs of this
training were measured and given; memory is what one rank's
allocator would hold at its peak, context and communicators included.
"""

from __future__ import annotations

import os
from typing import Annotated, Final, Literal, Self

from pydantic import Field

from partitioner.display import Shown
from partitioner.plan import MemoryItems
from partitioner.profiles import read_checked, write_whole
from partitioner.report.blocks import Bar, Drawing, Facts, Page, Prose, Table
from partitioner.report.plan_parts import memory_bar
from partitioner.report.wording import count, mesh, numbers, percent, seconds
from partitioner.specs import (
    Bytes,
    Cluster,
    Frozen,
    Precision,
    Recompute,
    ScheduleName,
    Seconds,
    Shard,
    format_bytes,
)

FORMAT_VERSION: Final = 1
MEMORY_BAND: Final = 0.11
"""Peaks of two of three published runs lie within it, mean over sources: `tests/benchmarks/memory.py` prints it."""


class StepParts(Frozen):
    """Where a step's seconds go; they add up to `step_s` of the layout."""

    compute_s: Seconds = 0.0
    recompute_s: Seconds = 0.0
    tensor_parallel_s: Seconds = 0.0
    """All-reduces within tensor-parallel groups."""
    gather_s: Seconds = 0.0
    """Gathering sharded weights."""
    transfer_s: Seconds = 0.0
    """Between stages."""
    bubble_s: Seconds = 0.0
    """Fill and drain, and waiting for the slowest stage."""
    sync_s: Seconds = 0.0
    """Gradients over replicas, as far as nothing hides them."""
    optimizer_s: Seconds = 0.0
    other_s: Seconds = 0.0


class LayoutForecast(Frozen):
    """One way to spread the training over the devices, with what it takes."""

    mesh: dict[str, int]
    """tp: ranks that divide every layer; pp: ranks of one pipeline; dp: replicas."""
    schedule: ScheduleName
    stages_per_rank: Annotated[int, Field(ge=1)] = 1
    microbatch_samples: Annotated[int, Field(ge=1)]
    num_microbatches: Annotated[int, Field(ge=1)]
    """Of one replica in one step."""
    recompute: Recompute = "never"
    shard: Shard = "none"
    sequence_parallel: bool = False
    cuts: tuple[int, ...] = ()
    """First layer of each stage but the first."""
    in_flight: tuple[int, ...]
    """Micro-batches that each stage holds at its peak."""
    memory: Annotated[tuple[MemoryItems, ...], Field(min_length=1)]
    """By rank of one pipeline."""
    limit_bytes: Bytes
    step_s: Seconds
    """One optimizer step, the optimizer included."""
    factor: float = 1.0
    """By which measured runs have moved its seconds."""
    band: float = 0.0
    """`step_s` is within x (1 ± band) for two of three published runs."""
    parts: StepParts
    throughput: float
    """Samples a second, all devices together."""
    speedup: float
    """Over one of these devices, of unlimited memory, at its best micro-batch."""
    efficiency: float
    """Speedup / devices."""
    runnable: bool = True
    why_not: tuple[str, ...] = ()
    """What of it this version's executor does not run."""
    note: str = ""
    """How it compares with the best one, in a sentence."""

    @property
    def num_devices(self) -> int:
        size = 1
        for extent in self.mesh.values():
            size *= extent
        return size

    @property
    def heaviest(self) -> int:
        """The rank of the pipeline that holds the most."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @property
    def peak(self) -> MemoryItems:
        """What the heaviest rank holds."""
        return self.memory[self.heaviest]

    @property
    def margin_bytes(self) -> int:
        """What the heaviest rank leaves free; negative: what it is short of."""
        return self.limit_bytes - self.peak.total

    @property
    def fits(self) -> bool:
        return self.margin_bytes >= 0


class CurvePoint(Frozen):
    """The best layout on a number of devices, at the same batch."""

    num_devices: Annotated[int, Field(ge=1)]
    fits: bool
    layout: LayoutForecast
    """Where nothing fits, the one that is short of the least."""
    price_per_step: float | None = None
    price_per_million_samples: float | None = None


class Variation(Frozen):
    """The best layout with one thing changed."""

    change: str
    """Like "precision=bf16-mixed"."""
    fits: bool
    layout: LayoutForecast | None = None
    refused: str = ""
    """Why it cannot be had at all."""


class MeasuredStep(Frozen):
    """A run that was had, beside what was predicted of it."""

    mesh: dict[str, int]
    batch_size: Annotated[int, Field(ge=1)]
    num_microbatches: Annotated[int, Field(ge=1)]
    measured_s: Seconds
    predicted_s: Seconds
    """Without any measured run."""
    then_s: Seconds
    """With all of them: between the two, since a run has noise of its own."""


class CapacityReport(Shown, Frozen):
    """What `capacity()` returns: plain data, saved and loaded as JSON."""

    version: Literal[1] = FORMAT_VERSION
    model: str
    num_parameters: int
    num_trainable: int
    stored_bytes: Bytes
    """Parameters and buffers as the model has them."""
    layers: tuple[str, ...]
    cluster: Cluster
    batch_size: Annotated[int, Field(ge=1)]
    precision: Precision
    optimizer: str
    static_bytes_per_parameter: float
    """Weights, gradients and optimizer state of one trainable parameter, nothing sharded."""
    fits: bool
    best: LayoutForecast
    """The fastest that fits; where none does, the one that is short of the least."""
    others: tuple[LayoutForecast, ...] = ()
    """The next ones, by time; where none fits, by what they are short of."""
    num_considered: int = 0
    fewest_devices: int | None = None
    """None: not on `most_devices` either."""
    most_devices: int = 0
    """So many were tried for `fewest_devices`."""
    largest_microbatch: int | None = None
    """Samples at once on the best mesh."""
    longest_sequence: int | None = None
    curve: tuple[CurvePoint, ...] = ()
    variations: tuple[Variation, ...] = ()
    price_per_hour: float | None = None
    """Of one device."""
    band: float
    """Times are within x (1 ± band) for two of three published runs, without measured ones; a layout has its own."""
    measured: tuple[MeasuredStep, ...] = ()
    """Runs that were given; times of layouts are moved by them."""
    provenance: Literal["estimated"] = "estimated"
    why: tuple[str, ...] = ()

    @property
    def shortfall_bytes(self) -> int:
        """What the heaviest rank is short of; 0 where it fits."""
        return max(0, -self.best.margin_bytes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON; the file is whole or not there."""
        write_whole(path, self.model_dump_json(indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote."""
        return read_checked(cls, path)

    def page(self) -> Page:
        """Verdict, memory of the heaviest rank, layouts, curve and variations, in this order."""
        names = sorted({device.name for device in self.cluster.devices})
        blocks: list[Facts | Table | Prose | Drawing] = [
            Prose("verdict", (self.verdict(),)),
            Facts(self._facts()),
            *((self._runs(),) if self.measured else ()),
            self._memory(),
            self._layouts(),
        ]
        if self.curve:
            blocks.append(self._curve())
        if self.variations:
            blocks.append(self._variations())
        if self.why:
            blocks.append(Prose("why", self.why))
        return Page(f"Capacity of {self.cluster.num_devices} x {', '.join(names)} for {self.model}", tuple(blocks))

    def verdict(self) -> str:
        """Whether it fits, with both numbers, and if not, what to change."""
        best = self.best
        both = f"{format_bytes(best.peak.total)} of {format_bytes(best.limit_bytes)}"
        where = f"rank {best.heaviest} of the pipeline" if len(best.memory) > 1 else "each device"
        within = f"± {100 * MEMORY_BAND:.0f} % of such estimates ({format_bytes(round(MEMORY_BAND * best.peak.total))})"
        close = abs(best.margin_bytes) < MEMORY_BAND * best.peak.total
        if self.fits:
            surely = f", less than the {within}: run a step of it before you rely on it" if close else ""
            return f"fits: {where} needs {both}, {format_bytes(best.margin_bytes)} to spare{surely}"
        fewest = (
            f"it needs {count(self.fewest_devices, 'such device')} at least"
            if self.fewest_devices
            else f"it does not fit {count(self.most_devices, 'such device')} either"
        )
        return (
            f"does not fit: at the least, {where} needs {both}, {format_bytes(self.shortfall_bytes)} too many "
            f"({_largest(best.peak)}); {fewest}" + (f"; it is short of less than the {within}" if close else "")
        )

    def _facts(self) -> tuple[tuple[str, str], ...]:
        best = self.best
        facts = [
            (
                "parameters",
                f"{self.num_parameters:,} ({format_bytes(self.stored_bytes)} with buffers), "
                f"{self.num_trainable:,} trained: {self.static_bytes_per_parameter:g} bytes each with gradients and "
                f"{self.optimizer}, before anything is shared",
            ),
            ("layout", _layout(best)),
            ("step", f"{seconds(best.step_s)} ± {percent(best.band)}, {_parts(best)}"),
            *((("unmeasured", self._without_runs()),) if self.measured else ()),
            ("throughput", f"{best.throughput:,.1f} samples/s at a batch of {self.batch_size:,}"),
            ("speedup", f"{best.speedup:.2f} x one device of unlimited memory"),
            ("efficiency", f"{percent(best.efficiency)} of {count(best.num_devices, 'device')}"),
            ("runs", "with this version" if best.runnable else f"not with this version: {'; '.join(best.why_not)}"),
        ]
        if self.fewest_devices:
            facts.append(("fewest devices", str(self.fewest_devices)))
        if self.largest_microbatch:
            facts.append(("largest micro-batch", count(self.largest_microbatch, "sample")))
        if self.longest_sequence:
            facts.append(("longest sequence", f"{self.longest_sequence:,}"))
        return tuple(facts)

    def _without_runs(self) -> str:
        """What was predicted of the best layout before it was moved."""
        best = self.best
        runs = count(len(self.measured), "measured run")
        before = f"{seconds(best.step_s / best.factor)} ± {percent(self.band)}"
        return f"{before} without the {runs}: this layout was moved by {100 * (best.factor - 1):+.1f} %"

    def _runs(self) -> Table:
        rows = tuple(
            (
                mesh(one.mesh),
                f"{count(one.batch_size, 'sample')} in {count(one.num_microbatches, 'micro-batch', 'micro-batches')}",
                seconds(one.measured_s),
                seconds(one.predicted_s),
                f"{100 * (one.measured_s / one.predicted_s - 1):+.1f} %",
                seconds(one.then_s),
            )
            for one in self.measured
        )
        return Table(
            ("measured run", "batch", "measured", "predicted", "off by", "predicted then"),
            rows,
            wide=("measured run",),
            note="a run has noise of its own, so that a prediction moves most of the way only; layouts unlike it less",
            caption="Runs that were measured",
        )

    def _memory(self) -> Table:
        best = self.best
        names = [name for name in MemoryItems.model_fields if any(getattr(items, name) for items in best.memory)]
        rows: list[tuple[str | Bar, ...]] = []
        for total, ranks in _alike(best.memory):
            first = best.memory[ranks[0]]
            rows.append(
                (
                    numbers(ranks),
                    *(format_bytes(getattr(first, name)) for name in names),
                    format_bytes(total),
                    memory_bar(first, best.limit_bytes),
                )
            )
        return Table(
            ("rank", *names, "together", "of the limit"),
            tuple(rows),
            wide=("rank",),
            caption="Memory of the pipeline's ranks, by what it is for",
        )

    def _layouts(self) -> Table:
        rows: list[tuple[str | Bar, ...]] = []
        for k, one in enumerate((self.best, *self.others)):
            rows.append(
                (
                    "best" if k == 0 else str(k + 1),
                    _layout(one),
                    seconds(one.step_s),
                    percent(one.efficiency),
                    format_bytes(one.peak.total),
                    one.note,
                )
            )
        return Table(
            ("", "layout", "step", "efficiency", "memory", "why"),
            tuple(rows),
            wide=("layout", "why"),
            note=f"of {count(self.num_considered, 'layout')} that were priced",
            caption="Layouts by time",
        )

    def _curve(self) -> Table:
        headers = ["devices", "layout", "step", "samples/s", "efficiency", "memory"]
        priced = self.price_per_hour is not None
        if priced:
            headers += ["price a step", "price of 1M samples"]
        rows = []
        for point in self.curve:
            one = point.layout
            memory = format_bytes(one.peak.total) + ("" if point.fits else ": does not fit")
            row = [
                str(point.num_devices),
                _layout(one),
                seconds(one.step_s) if point.fits else "-",
                f"{one.throughput:,.1f}" if point.fits else "-",
                percent(one.efficiency) if point.fits else "-",
                memory,
            ]
            if priced:
                row += [
                    "-" if point.price_per_step is None else f"{point.price_per_step:,.4g}",
                    "-" if point.price_per_million_samples is None else f"{point.price_per_million_samples:,.4g}",
                ]
            rows.append(tuple(row))
        note = f"times ± {percent(self.band)}"
        return Table(
            tuple(headers), tuple(rows), wide=("layout", "memory"), note=note, caption="The best on fewer devices"
        )

    def _variations(self) -> Table:
        rows = []
        for one in self.variations:
            found = one.layout
            if found is None:
                rows.append((one.change, one.refused, "-", "-", "-", "-"))
                continue
            fit = "fits" if one.fits else f"{format_bytes(-found.margin_bytes)} too many"
            step = seconds(found.step_s) if one.fits else "-"
            change = percent(found.throughput / self.best.throughput - 1) if one.fits and self.best.throughput else "-"
            rows.append((one.change, _layout(found), step, change, format_bytes(found.peak.total), fit))
        return Table(
            ("what if", "layout", "step", "throughput", "memory", "verdict"),
            tuple(rows),
            wide=("what if", "layout"),
            caption="What changes if one thing does",
        )


def _layout(one: LayoutForecast) -> str:
    text = f"{mesh(one.mesh)}, {one.num_microbatches} x {count(one.microbatch_samples, 'sample')}"
    if one.mesh.get("pp", 1) > 1:
        text += f", {one.schedule}" + (f" with {one.stages_per_rank} stages a rank" if one.stages_per_rank > 1 else "")
    if one.shard != "none":
        text += f", {one.shard}"
    if one.recompute != "never":
        text += f", {'selective' if one.recompute == 'selective' else 'full'} recompute"
    return text


def _parts(one: LayoutForecast) -> str:
    named = {
        "compute": one.parts.compute_s,
        "recompute": one.parts.recompute_s,
        "tensor parallelism": one.parts.tensor_parallel_s,
        "gathering weights": one.parts.gather_s,
        "transfers": one.parts.transfer_s,
        "bubble": one.parts.bubble_s,
        "gradient sync": one.parts.sync_s,
        "optimizer": one.parts.optimizer_s,
        "other": one.parts.other_s,
    }
    shares = [f"{name} {percent(value / one.step_s)}" for name, value in named.items() if value > 0.0005 * one.step_s]
    return ", ".join(shares)


def _largest(items: MemoryItems) -> str:
    sizes = sorted(((getattr(items, name), name) for name in MemoryItems.model_fields), reverse=True)
    return ", ".join(f"{name} {format_bytes(size)}" for size, name in sizes[:3] if size)


def _alike(memory: tuple[MemoryItems, ...]) -> list[tuple[int, list[int]]]:
    """(total, ranks) of ranks that hold the same."""
    groups: dict[MemoryItems, list[int]] = {}
    for rank, items in enumerate(memory):
        groups.setdefault(items, []).append(rank)
    return [(items.total, ranks) for items, ranks in groups.items()]
