"""How far one measured run tells of others: runs by system, and their errors with what `calibration` makes of a run.

Over every choice of the run that is given, not the luckiest one. `model`: told from runs of the same model alone, which
is what `capacity(measured=...)` is given.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from published_runs import Run

from partitioner.calibration import Distances, Place
from partitioner.steps import place_of


class System(NamedTuple):
    """Runs of one source, device and precision."""

    source: str
    places: list[Place]
    logs: NDArray[np.float64]
    """Of measured / predicted."""
    models: list[object]


def where(run: Run) -> Place:
    """A published run's place, its model's width and depth included."""
    return place_of(run.layout, run.dims.length)._replace(hidden=run.dims.hidden, layers=run.dims.layers)


def systems_of(source: str, runs: Sequence[Run], predicted_s: Sequence[float]) -> list[System]:
    """By device and precision."""
    groups: dict[object, list[int]] = defaultdict(list)
    for k, run in enumerate(runs):
        groups[run.device, run.precision].append(k)
    return [
        System(
            source,
            [where(runs[k]) for k in group],
            np.array([math.log(runs[k].measured_s / predicted_s[k]) for k in group]),
            [runs[k].dims for k in group],
        )
        for group in groups.values()
    ]


class Errors(NamedTuple):
    """Mean absolute errors of runs, as shares: a line a run, NaN where there is nothing to tell it from."""

    zero_shot: NDArray[np.float64]
    one_run: NDArray[np.float64]
    one_run_raw: NDArray[np.float64]
    """With the factor of that run as it is."""
    zero_shot_model: NDArray[np.float64]
    """Of runs whose model has another."""
    one_run_model: NDArray[np.float64]
    one_run_model_raw: NDArray[np.float64]
    all_runs: NDArray[np.float64]
    """Told from all others."""


def errors(system: System, fitted: Distances) -> Errors:
    """Over every choice of the run that tells of the others."""
    y, n = system.logs, len(system.logs)
    shared = fitted.covariance(system.places, system.places)
    other = ~np.eye(n, dtype=bool)

    def common(middle: NDArray[np.float64]) -> NDArray[np.float64]:
        return middle - np.clip(middle, -fitted.usual, fitted.usual)

    model = np.array([[a == b for a in system.models] for b in system.models]) & other
    own = common(y)
    told = np.abs(np.exp(own[:, None] + shared * (y - own)[:, None] - y[None]) - 1)  # the run that is given is the row
    raw = np.abs(np.exp(y[:, None] - y[None]) - 1)
    zero = np.abs(np.exp(-y) - 1)
    inverse = np.linalg.pinv(shared + fitted.repeat * np.eye(n))
    theirs = common(np.array([np.median(np.delete(y, k)) if n > 1 else 0.0 for k in range(n)]))
    rest = np.abs(np.exp((theirs * inverse.sum(1) - inverse @ y) / np.diag(inverse)) - 1)

    def mean(values: NDArray[np.float64], which: NDArray[np.bool_]) -> NDArray[np.float64]:
        counts = which.sum(0)
        return np.where(counts > 0, (values * which).sum(0) / np.maximum(counts, 1), np.nan)

    alone = np.full(n, np.nan) if n < 2 else rest
    return Errors(
        zero, mean(told, other), mean(raw, other), np.where(model.any(0), zero, np.nan), mean(told, model),
        mean(raw, model), alone,
    )  # fmt: skip


def by_source(found: list[System], fitted: Distances) -> dict[str, Errors]:
    groups: dict[str, list[Errors]] = defaultdict(list)
    for system in found:
        groups[system.source].append(errors(system, fitted))
    return {
        source: Errors(*(np.concatenate(column) for column in zip(*group, strict=True)))
        for source, group in groups.items()
    }


def mean_of(values: NDArray[np.float64]) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan
