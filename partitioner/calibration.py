"""What measured runs say of predictions: how far, and how surely, to move the time of a layout that was not run.

A measured run is evidence, not the truth: it brings the noise of its own system, and what a prediction missed of its
layout need not be missed of another. So the logarithms of measured / predicted are taken for a Gaussian process over
layouts, with mean 0 and

    covariance of two layouts   exp(-distance)       in units of the variance between layouts
    of two runs of one layout   1 - repeat           the rest is noise of the run itself

and a layout's own is told from those of the runs by simple kriging (Krige 1951; Rasmussen & Williams 2006, chapter 2,
https://gaussianprocess.org/gpml/). With c the covariances of layout and runs, C those of the runs, y their logarithms:

    factor = exp(c C^-1 y)        band = band * sqrt(1 - c C^-1 c)

One run moves its own layout by 1 - repeat of what was found, as empirical Bayes shrinks a mean (James & Stein 1961),
others by less the farther they are; more runs move them further. Far from all runs nothing changes.

What lies beyond the error of 99 of 100 published runs is no layout's matter (other code, other clocks, slow inputs): by
so much all layouts are moved alike, and only the rest is told as above.
"""

from __future__ import annotations

import functools
import math
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

import numpy as np


class Place(NamedTuple):
    """Where a run stands among runs of its device and precision; distances are over the logarithms to base 2."""

    tp: float = 1
    pp: float = 1
    dp: float = 1
    microbatch: float = 1
    num_microbatches: float = 1
    length: float = 1
    recompute: float = 1
    """2 with all layers computed again."""
    gathers: float = 1
    """2 where weights are gathered for each micro-batch."""
    hidden: float = 1
    layers: float = 1
    """Of the model: the same for all runs of one."""


class Evidence(NamedTuple):
    """A run that was measured: where it stands, and the logarithm of measured / predicted."""

    place: Place
    log_ratio: float


class Correction(NamedTuple):
    """What evidence makes of a prediction."""

    factor: float
    """Times are multiplied by it."""
    band_share: float
    """What is left of the error band."""


@dataclass(frozen=True)
class Distances:
    """Doublings of each number that make two layouts as unlike as to share 1/e of their error, and the noise."""

    tp: float
    pp: float
    dp: float
    microbatch: float
    num_microbatches: float
    length: float
    recompute: float
    gathers: float
    hidden: float
    layers: float
    repeat: float
    """Share of the variance that two runs of one layout do not have in common."""
    usual: float
    """The logarithm of measured / predicted is nearer to 0 in 99 of 100 published runs."""

    def covariance(self, first: list[Place], second: list[Place]) -> np.ndarray:
        """exp(-distance), less the noise of a run."""
        scales = np.array([getattr(self, name) for name in Place._fields])
        a, b = (np.log2(np.array(places, dtype=float).reshape(-1, len(scales))) / scales for places in (first, second))
        distance = np.sqrt(((a[:, None] - b[None]) ** 2).sum(-1))
        found: np.ndarray = (1 - self.repeat) * np.exp(-distance)
        return found


@functools.cache
def distances() -> Distances:
    """The fitted ones."""
    table = tomllib.loads(files("partitioner").joinpath("estimator.toml").read_text(encoding="utf-8"))
    return Distances(**table["calibration"])


class Calibration:
    """What runs say of any place. Without runs it changes nothing.

    >>> half = Distances(*[1.0] * 10, repeat=0.5, usual=0.3)
    >>> told = Calibration([Evidence(Place(), math.log(1.21))], half)
    >>> round(told.at(Place()).factor, 6), round(told.at(Place()).band_share, 6)
    (1.1, 0.866025)
    """

    def __init__(self, runs: list[Evidence], fitted: Distances | None = None) -> None:
        self.runs, self.fitted = tuple(runs), fitted or distances()
        self.places = [run.place for run in self.runs]
        noise = self.fitted.repeat * np.eye(len(self.runs))
        self.inverse = np.linalg.pinv(self.fitted.covariance(self.places, self.places) + noise)
        logs = np.array([run.log_ratio for run in self.runs])
        middle = float(np.median(logs)) if len(logs) else 0.0
        self.common = middle - min(max(middle, -self.fitted.usual), self.fitted.usual)
        """Of all layouts alike."""
        self.weights = self.inverse @ (logs - self.common)

    def at(self, place: Place) -> Correction:
        """How a prediction at `place` changes."""
        if not self.runs:
            return Correction(1.0, 1.0)
        c = self.fitted.covariance([place], self.places)[0]
        return Correction(math.exp(self.common + c @ self.weights), math.sqrt(max(0.0, 1 - c @ self.inverse @ c)))
