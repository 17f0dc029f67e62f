"""Fit how far a measured run tells of others: python tests/benchmarks/fit_calibration.py --truth DIR [--write]

The distances of partitioner/calibration.py, over runs of large models. Half of the rows (by the digits of their ids) is
fitted: the noise of a run from rows of one place (half the mean square of their differences, of the mean square of
all), the distances by the least mean absolute error (Nelder & Mead 1965) of each run that is told from one other of its
system (source, device, precision), from one other of its system and model, and from all others of its system. A source
counts by its rows n as n / (n + 4). The other half is only reported. --leave-out also fits without each source and
scores it under the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

sys.path.insert(0, str(Path(__file__).parent))

from capacity import Predictor, sources, split_of
from one_run import Errors, System, by_source, mean_of, systems_of

import partitioner
from partitioner.calibration import Distances, distances
from partitioner.rates import constants

FREE = (("tp",), ("pp", "dp"), ("microbatch",), ("num_microbatches",), ("hidden", "length"), ("layers",),
        ("recompute", "gathers"))  # fmt: skip
"""Distances that are fitted together."""
MOST = 0.3
"""Logarithms of measured / predicted count for so much at most in the noise."""


def systems(truth: Path, split: str) -> list[System]:
    predictor = Predictor(constants())
    found = []
    for stem, (runs, _) in sources(truth).items():
        if stem != "neusight_e2e":
            chosen = [run for run in runs if run.scored and split in ("all", split_of(run.row_id))]
            found += systems_of(stem, chosen, [predictor.seconds(run) for run in chosen])
    return found


def noise_of(found: list[System]) -> float:
    """Share of the variance that runs of one place do not share; rows that repeat a measurement are left out."""
    same, every = [], []
    for system in found:
        y = np.clip(system.logs, -MOST, MOST)
        every += list(y**2)
        for k, place in enumerate(system.places):
            same += [(y[k] - y[j]) ** 2 / 2 for j in range(k) if system.places[j] == place and abs(y[k] - y[j]) > 1e-6]
    return float(np.mean(same) / np.mean(every))


def usual_of(found: list[System]) -> float:
    """What 99 of 100 rows stay under."""
    return float(np.quantile(np.abs(np.concatenate([system.logs for system in found])), 0.99))


def made(x: NDArray[np.float64], repeat: float, usual: float) -> Distances:
    scales = {name: float(math.exp(value)) for names, value in zip(FREE, x, strict=True) for name in names}
    return Distances(**scales, repeat=repeat, usual=usual)


def fit(found: list[System]) -> Distances:
    repeat, usual = noise_of(found), usual_of(found)

    def goal(x: NDArray[np.float64]) -> float:
        total = weight = 0.0
        for told in by_source(found, made(x, repeat, usual)).values():
            share = len(told.zero_shot) / (len(told.zero_shot) + 4)
            parts = [mean_of(part) for part in (told.one_run, told.one_run_model, told.all_runs)]
            known = [part for part in parts if not math.isnan(part)]
            if known:
                total, weight = total + share * sum(known) / len(known), weight + share
        return total / weight + 1e-4 * float(np.abs(x - START).sum())

    answer = minimize(goal, START, method="Nelder-Mead", options={"maxfev": 300, "xatol": 0.03, "fatol": 1e-6})
    return made(answer.x, repeat, usual)


START = np.log([1.0, 3.0, 1.5, 6.0, 1.0, 3.0, 4.0])


def show(name: str, found: list[System], fitted: Distances) -> None:
    told = by_source(found, fitted)
    pooled = Errors(*(np.concatenate(column) for column in zip(*told.values(), strict=True)))
    print(f"{name:46}{'rows':>5}" + "".join(f"{text:>10}" for text in HEADERS))
    for source, one in (*told.items(), ("all rows", pooled)):
        cells = "".join(f"{100 * mean_of(part):10.1f}" for part in one)
        print(f"  {source:44}{len(one.zero_shot):5}{cells}")
    means = [100 * np.nanmean([mean_of(one[k]) for one in told.values()]) for k in range(len(HEADERS))]
    print(f"  {'mean of sources':44}{'':5}" + "".join(f"{value:10.1f}" for value in means))


HEADERS = ("zero-shot", "one run", "(raw)", "zero-shot*", "one run*", "(raw)*", "all others")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--write", action="store_true", help="write the distances into the package's estimator.toml")
    parser.add_argument("--leave-out", action="store_true", help="also fit without each source and score it (minutes)")
    parser.add_argument("--no-fit", action="store_true", help="score those of the package")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    half = systems(arguments.truth, "fit")
    fitted = distances() if arguments.no_fit else fit(half)
    for name in ("fit", "check"):
        show(name, half if name == "fit" else systems(arguments.truth, name), fitted)
    print("* of runs whose model was run with another layout too, and told from those")
    if arguments.leave_out:
        every = systems(arguments.truth, "all")
        for source in dict.fromkeys(system.source for system in half):
            others = fit([system for system in half if system.source != source])
            show(f"without {source}", [system for system in every if system.source == source], others)
    for name, value in dataclasses.asdict(fitted).items():
        print(f"  {name} = {value:.4g}")
    print(f"{time.perf_counter() - begun:.0f} s")
    if arguments.write:
        write(fitted)


def write(fitted: Distances) -> None:
    path = Path(partitioner.__file__).parent / "estimator.toml"
    lines = [f"{name} = {value:.4g}" for name, value in dataclasses.asdict(fitted).items()]
    remark = "# How far errors of two runs come apart, in doublings; written by tests/benchmarks/fit_calibration.py."
    table = "\n".join(("[calibration]", remark, *lines, "", ""))
    path.write_text(re.sub(r"\[calibration\]\n[^\[]*", table, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
