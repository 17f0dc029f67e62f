"""Fit the constants of partitioner/estimator.toml over published measurements: all sources at once.

    python tests/benchmarks/fit_estimator.py --truth DIR [--leave-out] [--write] [--rounds 12] [--most 40]

No constant belongs to a row, model, device or source. Half of the rows (by the digits of their ids) are fitted, the
other half is only reported. A source counts by its rows n as n / (n + 4), single kernels for a quarter of that. The
objective is the mean of |predicted / measured - 1|, each row counted for at most 1, and of a tenth of each source's
bias, plus a weak pull to the starting values, so that a constant that nothing determines stays what physics suggests.
The errors are taken as straight lines in the constants' logarithms, and the linear program solved, again and again;
then each constant is moved alone, as long as that helps.
--leave-out also fits without each source in turn, begun at the constants of the whole fit and with their slopes, and
scores it under the result: the error to expect of runs that nobody has fitted. fit_calibration.py comes after it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

sys.path.insert(0, str(Path(__file__).parent))

from capacity import Predictor, sources, split_of
from published_models import resnet50
from published_runs import Row, device_name, number, rows_of

import partitioner
from partitioner.calibration import distances
from partitioner.rates import Constants, Network, Rates, constants, toml_constants
from partitioner.specs import Link, known_device
from partitioner.steps import Layout, Planner
from partitioner.work import Kernel

START: dict[str, tuple[float, float, float]] = {
    # start, least, most: what is physically possible
    "matmul_fp32": (0.85, 0.5, 1.0),
    "matmul_fp32_matrix": (0.65, 0.4, 1.0),
    "misaligned": (0.5, 0.2, 1.0),
    "misaligned_batched": (0.07, 0.03, 1.0),
    "ragged": (0.85, 0.5, 1.0),
    "fp8_cast": (5.0, 1.0, 16.0),
    "fp8_cast_fused": (1.0, 0.1, 5.0),
    "fp8_rows": (0.74, 0.7, 0.78),
    "matmul_tensor": (0.9, 0.6, 1.0),
    "power": (0.15, 0.01, 0.5),
    "tile_128x128": (0.95, 0.7, 1.0),
    "tile_128x64": (0.8, 0.5, 1.0),
    "tile_64x64": (0.55, 0.3, 1.0),
    "depth_ramp": (64, 1, 512),
    "batched": (0.85, 0.3, 1.0),
    "attention_forward": (0.8, 0.3, 1.0),
    "attention_backward": (0.65, 0.2, 1.0),
    "flash1": (0.6, 0.3, 1.0),
    "convolution": (0.6, 0.1, 1.0),
    "convolution_fp32": (1.0, 0.5, 2.0),
    "convolution_moved": (2.0, 0.01, 4.0),
    "bandwidth": (0.85, 0.5, 1.0),
    "bandwidth_ramp_s": (1e-6, 1e-7, 2e-5),
    "softmax": (0.8, 0.3, 1.5),
    "norm": (0.8, 0.3, 1.5),
    "launch_s": (3e-6, 1e-6, 1e-5),
    "host_forward_s": (4e-5, 3e-6, 1e-4),
    "host_backward_s": (3e-5, 3e-6, 1e-4),
    "host_collective_s": (7e-5, 1e-5, 1e-3),
    "host_microbatch_s": (0.002, 1e-4, 0.02),
    "collective": (1.0, 0.5, 1.2),
    "collective_through_host": (0.8, 0.3, 1.0),
    "collective_base_s": (3e-5, 1e-6, 2e-4),
    "collective_rank_s": (6e-6, 1e-7, 5e-5),
    "network": (0.8, 0.3, 1.0),
    "network_spread": (0.1, 0.005, 0.5),
    "network_base_s": (2e-5, 1e-6, 5e-4),
    "overlap": (0.8, 0.1, 0.9),
    "overlap_gradients": (0.8, 0.1, 0.9),
    "overlap_pieces": (0.5, 0.1, 0.9),
    "straggler": (0.01, 0.0001, 0.05),
    "shared_host": (0.03, 0.0005, 0.1),
    "gradient_copies": (6.0, 2.0, 8.0),
    "replica_base_s": (0.002, 1e-4, 0.02),
    "optimizer": (1.3, 1.0, 6.0),
    "step_base_s": (0.002, 0.0001, 0.05),
}

CENTRE, LOW, HIGH = (np.log([one[k] for one in START.values()]) for k in range(3))
FAR = 1.0
"""Errors count for so much at most."""
BIAS, PULL = 0.1, 0.001
"""Weights of a source's bias, and of the distance from the starting values."""

KERNELS = ("op ", "all-reduce", "ResNet")
"""Parts that are no published step, which count for less."""

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Part = tuple[str, Callable[[Predictor], float], float]
"""Source, prediction, measurement."""


def kernel_parts(path: Path, most: int, wanted: Callable[[str], bool]) -> list[Part]:
    """Single fp32 kernels."""
    names = {
        "NVIDIA A100 80GB PCIe": "A100-PCIe-80GB", "NVIDIA A100-PCIE-40GB": "A100-PCIe-40GB", "NVIDIA L4": "L4",
        "Tesla T4": "T4", "Tesla P100-PCIE-16GB": "P100", "Tesla V100-PCIE-32GB": "V100-PCIe", "Tesla P4": "P4",
        "NVIDIA H100 80GB HBM3": "H100",
    }  # fmt: skip
    kinds = {"ln": "norm", "softmax": "softmax", "elem": "elementwise"}
    parts: dict[str, list[Part]] = defaultdict(list)
    for row in rows_of(path):
        if row["gpu"] not in names or not wanted(row["row_id"]):
            continue
        device, seconds = names[row["gpu"]], float(row["latency_ms"]) / 1e3
        if row["op"] in ("linear", "bmm"):
            b, m, n, k = (float(row[name]) for name in "BMNK")
            moved = 4 * b * (m * k + k * n + m * n)
            kernel = Kernel("matmul", row["op"], 2 * b * m * n * k, moved, 1.0, (b, m, n, k))
        else:
            size = 4 * float(row["B"]) * float(row["H"])
            tensors = 3 if row["op_name"] in ("add", "mul", "div", "pow") else 2
            kernel = Kernel(kinds[row["op"]], row["op_name"], 0.0, tensors * size, 1.0)  # type: ignore[arg-type]
        parts[f"op {row['op']}"].append((f"op {row['op']}", _kernel(kernel, device), seconds))
    return [part for group in parts.values() for part in _thinned(group, most)]


def image_parts(path: Path, most: int, wanted: Callable[[str], bool]) -> list[Part]:
    """Steps of ResNet-50 on one device: what determines convolutions."""
    parts: list[Part] = []
    for row in rows_of(path):
        batch, rate = number(row, "micro_batch"), number(row, "samples_per_s")
        image = row["model"] == "ResNet-50" and row["n_gpus"] == "1"
        if not image or not batch or not rate or not wanted(row["row_id"]):
            continue
        precision = "fp16-mixed" if "16" in row["precision"] else "tf32"
        _, intra, inter = known_device(device_name(row))

        def predict(
            predictor: Predictor, row: Row = row, batch: float = batch, precision: str = precision,
            links: tuple[Link, Link] = (intra, inter),
        ) -> float:  # fmt: skip
            rates = Rates.of(device_name(row), fitted=predictor.fitted)
            prices = Planner(resnet50(), rates, *links, precision=precision)  # type: ignore[arg-type]
            return prices.step(Layout(microbatch=batch)).step_s

        parts.append(("ResNet-50", predict, batch / rate))
    return _thinned(parts, most)


def _kernel(kernel: Kernel, device: str) -> Callable[[Predictor], float]:
    rates = Rates.of(device)
    return lambda predictor: rates.with_constants(predictor.fitted).kernel_seconds(kernel)


def collective_parts(path: Path, most: int, wanted: Callable[[str], bool]) -> list[Part]:
    """All-reduces within a node with a switch: of 8 V100 that are wired in rings only the whole node is one."""
    parts: list[Part] = []
    for place, row in enumerate(rows_of(path)):
        ranks = int(row["n_gpus"])
        if row["gpu"].startswith("V100") or not wanted(str(place)):
            continue
        _, intra, inter = known_device("A100-80GB" if row["gpu"] == "A100" else "B200")
        num_bytes, seconds = float(row["bytes"]), float(row["time_us_out_of_place"]) / 1e6
        parts.append(
            (
                "all-reduce",
                lambda predictor, b=num_bytes, n=ranks, i=intra, e=inter: Network(i, e, predictor.fitted).all_reduce_s(
                    b, n, n
                ),
                seconds,
            )
        )
    return _thinned(parts, most)


def step_parts(truth: Path, most: int, wanted: Callable[[str], bool]) -> list[Part]:
    parts: list[Part] = []
    for stem, (runs, speedups) in sources(truth).items():
        group: list[Part] = [
            (stem, lambda predictor, run=run: predictor.seconds(run), run.measured_s)
            for run in runs
            if run.scored and wanted(run.row_id)
        ]
        group += [
            (stem, lambda predictor, one=one: predictor.speedup(one), one.measured)
            for one in speedups
            if one.scored and wanted(one.row_id)
        ]
        parts += _thinned(group, most)
    return parts


def _thinned(parts: list[Part], most: int) -> list[Part]:
    if len(parts) <= most:
        return parts
    return [parts[k * len(parts) // most] for k in range(most)]


def errors(parts: list[Part], fitted: Constants) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for (source, _, _), error in zip(parts, misses(parts, fitted), strict=True):
        found[source].append(float(error))
    return found


def misses(parts: list[Part], fitted: Constants) -> Vector:
    """predicted / measured - 1 of each part."""
    predictor = Predictor(fitted)
    return np.array([predict(predictor) / measured - 1 for _, predict, measured in parts])


class Goal:
    """What is made small, and its minimum where every error is a straight line in the constants' logarithms."""

    def __init__(self, parts: list[Part]) -> None:
        self.sources = [source for source, _, _ in parts]
        places = list(enumerate(self.sources))
        self.groups = {source: [k for k, other in places if other == source] for source in self.sources}
        shares = {source: _share(source, len(group)) for source, group in self.groups.items()}
        total = sum(shares.values())
        self.shares = {source: share / total for source, share in shares.items()}
        self.weights = np.array([self.shares[source] / len(self.groups[source]) for source in self.sources])

    def value(self, residuals: Vector, x: Vector) -> float:
        biases = sum(self.shares[source] * abs(residuals[group].mean()) for source, group in self.groups.items())
        fit = float(self.weights @ np.minimum(np.abs(residuals), FAR))
        return fit + BIAS * biases + PULL * float(np.abs(x - CENTRE).sum())

    def step(self, residuals: Vector, slopes: Matrix, x: Vector, limits: tuple[Vector, Vector]) -> Vector:
        """The best x + d with residuals + slopes d for errors: a linear program, |z| as the least t above z and -z."""
        near = np.abs(residuals) < FAR
        rows = [slopes[near]]
        offsets, prices = [residuals[near]], [self.weights[near]]
        for source, group in self.groups.items():
            rows.append(slopes[group].mean(0, keepdims=True))
            offsets.append(np.array([residuals[group].mean()]))
            prices.append(np.array([BIAS * self.shares[source]]))
        rows.append(np.eye(len(x)))
        offsets.append(x - CENTRE)
        prices.append(np.full(len(x), PULL))
        a, z, price = sparse.csr_matrix(np.vstack(rows)), np.concatenate(offsets), np.concatenate(prices)
        t = sparse.identity(len(z))
        answer = linprog(
            np.concatenate((np.zeros(len(x)), price)),
            A_ub=sparse.bmat([[a, -t], [-a, -t]]),
            b_ub=np.concatenate((-z, z)),
            bounds=[*zip(limits[0] - x, limits[1] - x, strict=True), *[(0, None)] * len(z)],
            method="highs",
        )
        found: Vector = answer.x[: len(x)]
        return found


def _share(source: str, rows: int) -> float:
    """What a source counts: rows share an error of their source, about half as large as each one's own."""
    return rows / (rows + 4) * (0.25 if source.startswith(KERNELS) else 1.0)


def slopes_at(parts: list[Part], x: Vector, residuals: Vector, free: Sequence[int]) -> Matrix:
    """Change of each error with each constant's logarithm."""
    slopes = np.zeros((len(parts), len(x)))
    for k in free:
        moved = x.copy()
        moved[k] += 0.03 if x[k] + 0.03 <= HIGH[k] else -0.03
        slopes[:, k] = (misses(parts, _constants(moved)) - residuals) / (moved[k] - x[k])
    return slopes


def search(
    parts: list[Part], begin: Constants, rounds: int, only: Sequence[str] = (), slopes: Matrix | None = None
) -> Constants:
    """Steps of linear programs within a trust region. `slopes`: of `begin`, kept for all steps; None: new ones each."""
    goal, kept = Goal(parts), slopes is not None
    free = [k for k, name in enumerate(START) if not only or name in only]
    fixed = np.array([k not in free for k in range(len(START))])
    x = _logarithms(begin)
    residuals = misses(parts, _constants(x))
    value, trust = goal.value(residuals, x), 0.3
    for turn in range(rounds):
        if slopes is None:
            slopes = slopes_at(parts, x, residuals, free)
        low = np.where(fixed, x, np.maximum(LOW, x - trust))
        high = np.where(fixed, x, np.minimum(HIGH, x + trust))
        candidate = x + goal.step(residuals, slopes, x, (low, high))
        then = misses(parts, _constants(candidate))
        other = goal.value(then, candidate)
        if other < value - 1e-5:
            x, residuals, value, trust = candidate, then, other, min(0.5, trust * 1.5)
            slopes = slopes if kept else None
        else:
            trust /= 3
        if not kept:
            print(f"round {turn + 1}: {value:.4f}, within {trust:.3f}", flush=True)
        if trust < 0.01:
            break
    return _constants(x)


def polish(parts: list[Part], begin: Constants, sweeps: int, only: Sequence[str] = ()) -> Constants:
    """One constant at a time, by steps that grow where they help (Hooke & Jeeves 1961): over kinks where slopes lie."""
    goal, x = Goal(parts), _logarithms(begin)
    value = goal.value(misses(parts, begin), x)
    steps = np.full(len(x), 0.2)
    for sweep in range(sweeps):
        for k, name in enumerate(START):
            if only and name not in only:
                continue
            for step in (steps[k], -steps[k]):
                moved = x.copy()
                moved[k] = np.clip(x[k] + step, LOW[k], HIGH[k])
                then = goal.value(misses(parts, _constants(moved)), moved) if moved[k] != x[k] else value
                if then < value - 1e-6:
                    x, value, steps[k] = moved, then, 2 * step
                    break
            else:
                steps[k] /= 2
        print(f"sweep {sweep + 1}: {value:.4f}", flush=True)
    return _constants(x)


def left_out(truth: Path, fit_parts: list[Part], fitted: Constants) -> dict[str, float]:
    """Mean absolute error of each source, percent, under constants that were fitted without it."""
    x = _logarithms(fitted)
    slopes = slopes_at(fit_parts, x, misses(fit_parts, fitted), range(len(START)))
    every = all_parts(truth, 10**9, "fit") + all_parts(truth, 10**9, "check")
    found = {}
    for source in dict.fromkeys(name for name, _, _ in fit_parts if not name.startswith(KERNELS)):
        kept = [k for k, (name, _, _) in enumerate(fit_parts) if name != source]
        others = search([fit_parts[k] for k in kept], fitted, 6, slopes=slopes[kept])
        found |= table(errors([part for part in every if part[0] == source], others))
        print(f"without {source:44}{found[source]:8.1f}", flush=True)
    return found


def _logarithms(fitted: Constants) -> Vector:
    return np.clip(np.log([getattr(fitted, name) for name in START]), LOW, HIGH)


def _constants(x: Vector) -> Constants:
    return Constants(**dict(zip(START, map(float, np.exp(x)), strict=True)))


def table(found: dict[str, list[float]]) -> dict[str, float]:
    """Mean absolute error of each source, percent."""
    return {source: 100 * statistics.fmean(map(abs, group)) for source, group in found.items()}


def all_parts(truth: Path, most: int, split: str) -> list[Part]:
    def wanted(row_id: str) -> bool:
        return split_of(row_id) == split

    parts = step_parts(truth, most, wanted)
    parts += image_parts(truth / "lambda_dp_scaling.csv", most, wanted)
    parts += kernel_parts(truth / "neusight_ops_fp32.csv", 2 * most, wanted)
    return parts + collective_parts(truth / "vtrain_allreduce_lut.csv", most, wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--write", action="store_true", help="write the constants into the package's estimator.toml")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sweeps", type=int, default=4, help="over the constants one by one, after the rounds")
    parser.add_argument("--most", type=int, default=40, help="rows of a source that are fitted")
    parser.add_argument("--only", nargs="*", default=[], help="constants to move, the others as they are")
    parser.add_argument("--leave-out", action="store_true", help="also fit without each source and score it (minutes)")
    parser.add_argument("--afresh", action="store_true", help="begin at the starting values, not at the last fit")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    fit_parts = all_parts(arguments.truth, arguments.most, "fit")
    begin = dataclasses.replace(constants(), error_band=0.0, convolution_band=0.0)
    if arguments.afresh:
        begin = Constants(**{name: start for name, (start, _, _) in START.items()})
    fitted = search(fit_parts, begin, arguments.rounds, arguments.only)
    fitted = polish(fit_parts, fitted, arguments.sweeps, arguments.only)
    without = left_out(arguments.truth, fit_parts, fitted) if arguments.leave_out else {}
    found = errors(all_parts(arguments.truth, 10**9, "fit"), fitted)
    left = errors(all_parts(arguments.truth, 10**9, "check"), fitted)
    ours, others = table(found), table(left)
    print(f"{'source':44}{'fit %':>8}{'check %':>9}{'left out %':>12}")
    for source in ours:
        one = without.get(source, math.nan)
        print(f"{source:44}{ours[source]:8.1f}{others.get(source, math.nan):9.1f}{one:12.1f}")
    steps = {source: group for source, group in left.items() if not source.startswith(KERNELS)}
    band = statistics.fmean(statistics.quantiles(map(abs, group), n=3)[1] for group in steps.values() if len(group) > 2)
    print(
        f"band: two of three check rows lie within {band:.3f}, mean over sources; {sum(map(len, steps.values()))} rows"
    )
    images = [error for half in (found, left) for error in half["ResNet-50"]]
    wide = statistics.quantiles(map(abs, images), n=3)[1]
    print(f"band of convolutions: two of three of {len(images)} steps of ResNet-50 lie within {wide:.3f}")
    for name in START:
        print(f"  {name} = {getattr(fitted, name):.6g}")
    print(f"{time.perf_counter() - begun:.0f} s")
    if arguments.write:
        write(fitted, ours, others, without, (band, wide))


def write(
    fitted: Constants,
    ours: dict[str, float],
    others: dict[str, float],
    without: dict[str, float],
    bands: tuple[float, float],
) -> None:
    path = Path(partitioner.__file__).parent / "estimator.toml"
    lines = [
        "# What kernels and collectives achieve of a device's peaks: the same for all devices, models and sources.",
        "# Written by tests/benchmarks/fit_estimator.py from published measurements. fit, check: halves of the rows.",
        "",
        "[constants]",
        *[f"{name} = {value:.4g}" for name, value in toml_constants(fitted).items()],
        "",
        "[calibration]",
        "# How far errors of two runs come apart, in doublings; written by tests/benchmarks/fit_calibration.py.",
        *[f"{name} = {value:.4g}" for name, value in dataclasses.asdict(distances()).items()],
        "",
        "[fit]",
        "# Two of three check rows lie within this, mean over sources.",
        f"error_band = {bands[0]:.3f}",
        "# Two of three steps of ResNet-50 on one device lie within this.",
        f"convolution_band = {bands[1]:.3f}",
        f'date = "{date.today().isoformat()}"',
        "",
        "# Mean absolute error in percent of the rows that were fitted, of those that were not, and of all under",
        "# constants fitted without their source.",
        *[
            f'source."{source}" = {{ fit_pct = {ours[source]:.1f}, check_pct = {others[source]:.1f}'
            + (f", left_out_pct = {without[source]:.1f} }}" if source in without else " }")
            for source in ours
            if source in others
        ],
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
