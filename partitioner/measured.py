"""Runs of a training that were measured: what `capacity(measured=...)` is given, checked, and set against predictions.

    {"mesh": {"dp": 8}, "batch_size": 64, "microbatches": 2, "step_s": 0.82}

What they say of other layouts is told in `calibration`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from partitioner.calibration import Evidence
from partitioner.errors import ArgumentError, PartitionerError, expect
from partitioner.layouts import Demand, Search, Wish, check_wish
from partitioner.request import Request
from partitioner.specs import known_device
from partitioner.steps import Layout, place_of
from partitioner.study import Study

FARTHEST = 10.0
"""Measured and predicted times that are this far apart are of two different things."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run as it was told; what is None is as it is asked for."""

    mesh: Mapping[str, int]
    """Axes that are left out are 1."""
    step_s: float | None = None
    """One optimizer step, the optimizer included."""
    samples_per_s: float | None = None
    """Of all devices together: instead of `step_s`."""
    batch_size: int | None = None
    microbatches: int = 1
    """Of one replica in one step."""
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    recompute: str = "never"
    shard: str = "none"
    sequence_length: int | None = None
    gpus: str | None = None
    """The device's name, or "8xH100"."""
    precision: str | None = None


class Compared(NamedTuple):
    """A measured run beside its prediction."""

    layout: Layout
    batch_size: int
    sequence_length: int | None
    measured_s: float
    predicted_s: float
    evidence: Evidence


def measured_runs(given: Any) -> tuple[MeasuredRun, ...]:
    """Of one table of values, or of a list of them; an ArgumentError says what one of them lacks."""
    runs = [given] if isinstance(given, (Mapping, MeasuredRun)) else given
    if isinstance(runs, str) or not isinstance(runs, Sequence):
        raise ArgumentError(f"measured={given!r}: give runs, like [{{'mesh': {{'dp': 8}}, 'step_s': 0.82}}]")
    return tuple(_told(f"measured[{k}]", run) for k, run in enumerate(runs))


def _told(name: str, run: Any) -> MeasuredRun:
    if isinstance(run, MeasuredRun):
        return run
    expect(name, run, Mapping, "what was run, like {'mesh': {'dp': 8}, 'batch_size': 64, 'step_s': 0.82}")
    known = MeasuredRun.__dataclass_fields__
    unknown = sorted(set(run) - set(known))
    if unknown:
        raise ArgumentError(f"{name} has no {unknown[0]!r}: use {', '.join(known)}")
    if "mesh" not in run:
        raise ArgumentError(f"{name} has no mesh: say how it was spread, like 'mesh': {{'dp': 8}}")
    expect(f"{name}['mesh']", run["mesh"], Mapping, "its axes, like {'dp': 8}")
    told = MeasuredRun(**run)
    times = [key for key in ("step_s", "samples_per_s") if run.get(key) is not None]
    if len(times) != 1:
        raise ArgumentError(f"{name} gives {' and '.join(times) or 'no time'}: give step_s or samples_per_s")
    value = run[times[0]]
    expect(f"{name}[{times[0]!r}]", value, (int, float), "a number above 0")
    if not (value > 0 and math.isfinite(value)):
        raise ArgumentError(f"{name}: {times[0]}={value} is impossible: give a number above 0")
    for key in ("batch_size", "microbatches", "stages_per_rank", "sequence_length"):
        size = getattr(told, key)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ArgumentError(f"{name}: {key}={size!r} is impossible: give a number of 1 or more")
    return told


def compared(runs: Sequence[MeasuredRun], asked: Request, study: Study) -> tuple[Compared, ...]:
    """Each run beside what was predicted of it; an ArgumentError where it can't have been run like that."""
    found = []
    for k, run in enumerate(runs):
        try:
            found.append(_compared(run, asked, study))
        except PartitionerError as error:
            raise ArgumentError(f"measured[{k}]: {error}") from error
    return tuple(found)


def _compared(run: MeasuredRun, asked: Request, study: Study) -> Compared:
    _check_system(run, asked)
    batch = asked.batch_size if run.batch_size is None else run.batch_size
    mesh = {"tp": 1, "pp": 1, "dp": 1} | dict(run.mesh)
    length = run.sequence_length
    if length is not None:
        study.expect_length()
    plain = replace(
        asked, batch_size=batch, sequence_length=length or asked.sequence_length, wish=Wish(mesh=mesh), evidence=()
    )
    demand = plain.demand(study)
    check_wish(plain.wish, demand, math.prod(mesh.values()))
    layout = _layout(run, mesh, batch, demand, asked)
    layout.check(demand.graph.num_layers)
    search = Search(demand, plain.wish)
    layout = search.cut(layout)
    predicted_s = demand.prices.step(layout, optimizer_moved_bytes=search.moved_bytes).step_s
    measured_s = run.step_s if run.step_s is not None else batch / (run.samples_per_s or math.inf)
    ratio = measured_s / predicted_s
    if not 1 / FARTHEST < ratio < FARTHEST:
        raise ArgumentError(
            f"a step of {measured_s:.4g} s is {ratio:.3g} times the {predicted_s:.4g} s that are predicted: that is no "
            "error of a prediction; times are in seconds, of a whole batch over all devices"
        )
    evidence = Evidence(place_of(layout, demand.prices.length), math.log(ratio))
    return Compared(layout, batch, plain.sequence_length, measured_s, predicted_s, evidence)


def _check_system(run: MeasuredRun, asked: Request) -> None:
    """What was found on one device or in one precision is not carried to another."""
    device = asked.cluster.devices[0].name
    if run.gpus is not None:
        name = run.gpus.rpartition("x")[2] if run.gpus[:1].isdigit() else run.gpus
        other = known_device(name, asked.hardware)[0].name
        if other != device:
            raise ArgumentError(
                f"it ran on {other}, asked for is {device}: what a prediction missed of one device says nothing of "
                f"another. Leave the run out, or ask for gpus='{asked.cluster.num_devices}x{other}'"
            )
    if run.precision is not None and run.precision != asked.precision:
        raise ArgumentError(
            f"it ran in {run.precision}, asked for is {asked.precision}: leave the run out, or ask for "
            f"precision={run.precision!r}"
        )


def _layout(run: MeasuredRun, mesh: Mapping[str, int], batch: int, demand: Demand, asked: Request) -> Layout:
    each = batch // mesh["dp"]
    if each % run.microbatches:
        raise ArgumentError(
            f"a replica's {each} samples do not divide into {run.microbatches} micro-batches: use batch_size and "
            "microbatches of the run"
        )
    return Layout(
        tp=mesh["tp"],
        pp=mesh["pp"],
        dp=mesh["dp"],
        microbatch=each // run.microbatches,
        num_microbatches=run.microbatches,
        schedule=run.schedule,  # type: ignore[arg-type]
        stages_per_rank=run.stages_per_rank,
        recompute=run.recompute,  # type: ignore[arg-type]
        shard=run.shard,  # type: ignore[arg-type]
        sequence_parallel=asked.wish.sequence_parallel and mesh["tp"] > 1,
        gradient_bytes=demand.state.gradients,
        per_node=demand.per_node,
    )
