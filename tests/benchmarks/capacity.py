"""Score predictions against published measurements: python tests/benchmarks/capacity.py --truth DIR --json out.json

A line a source: rows, mean and median absolute error, bias, Kendall tau over all rows and within a choice of layouts,
two errors with calibration, seconds taken. --rows FILE writes every row.

calib.   one factor a source, its median measured / predicted: what the best factor would leave
one run  told from one measured run of the same system (source, device, precision) and model, as
         capacity(measured=...) does; the mean over every such run as that one, not the luckiest. Of rows whose
         model was run in one way only there is none
(raw)    the same with that run's measured / predicted as the factor: it brings the run's own error along

Below the sources: large models, all rows together and the mean of sources; zero-shot* over the rows of "one run".
--split check leaves out the rows that constants and distances were fitted to.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import memory
import one_run
from published_models import work_of
from published_runs import Run, rows_of, runs_of
from published_speedups import Speedup, speedups_of

from partitioner.calibration import distances
from partitioner.rates import Constants, Network, Rates, constants
from partitioner.specs import known_device
from partitioner.steps import Planner, StepBreakdown, data_parallel_speedup


class Predictor:
    """Keeps planners: rows of one model on one device share what has been priced."""

    def __init__(self, fitted: Constants) -> None:
        self.fitted = fitted
        self.planners: dict[object, Planner] = {}

    def step(self, run: Run) -> StepBreakdown:
        key = (run.dims, run.device, run.precision, run.port, run.layout.per_node)
        if key not in self.planners:
            _, intra, inter = known_device(run.device)
            rates = Rates.of(run.device, fitted=self.fitted)
            per_node = run.layout.per_node or 8
            self.planners[key] = Planner(
                work_of(run.dims),
                rates,
                intra,
                run.port or inter,
                per_node,
                run.precision,  # type: ignore[arg-type]
            )
        return self.planners[key].step(run.layout)

    def seconds(self, run: Run) -> float:
        step = self.step(run)
        return step.step_s if run.whole_step else step.step_s - step.optimizer_s - step.base_s

    def speedup(self, one: Speedup) -> float:
        if not one.exchanged:
            return one.ranks / one.base_ranks
        network = Network(*one.links, self.fitted)
        gradient_bytes = one.parameters * one.element_bytes
        moved_per_s = Rates.of(one.device, fitted=self.fitted).moved_per_s

        def over(ranks: int) -> float:
            return data_parallel_speedup(
                one.single_s, gradient_bytes, ranks, one.per_node, network, moved_per_s, prepared=one.prepared
            )

        return over(one.ranks) / over(one.base_ranks)


def kendall(pairs: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """Pairs in the same order less pairs in the other, and their number; ties in the measurement are left out."""
    agree = total = 0
    for k, (p, m) in enumerate(pairs):
        for q, n in pairs[k + 1 :]:
            if m != n:
                total += 1
                agree += 1 if (p - q) * (m - n) > 0 else -1 if (p - q) * (m - n) < 0 else 0
    return agree, total


def scores(pairs: Sequence[tuple[float, float, object]]) -> dict[str, float]:
    """Of (predicted, measured, group): errors in percent of the measured; tau over pairs within a group."""
    errors = [100 * (p / m - 1) for p, m, _ in pairs]
    groups: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for p, m, group in pairs:
        groups[group].append((p, m))
    counted = [kendall(group) for group in groups.values()]
    agree, total = sum(a for a, _ in counted), sum(t for _, t in counted)
    overall = kendall([(p, m) for p, m, _ in pairs])
    return {
        "rows": len(pairs),
        "mape_pct": statistics.fmean(map(abs, errors)),
        "median_pct": statistics.median(map(abs, errors)),
        "bias_pct": statistics.fmean(errors),
        "kendall_tau": overall[0] / overall[1] if overall[1] else math.nan,
        "kendall_tau_within": agree / total if total else math.nan,
    }


def calibrated(pairs: Sequence[tuple[float, float, object]]) -> float:
    """Mean error where one factor is known for the source, as from a measured run: its median one."""
    if len(pairs) < 2:
        return math.nan
    logs = [math.log(p / m) for p, m, _ in pairs]
    middle = statistics.median(logs)
    return 100 * statistics.fmean(abs(math.exp(one - middle) - 1) for one in logs)


def group_of(run: Run) -> object:
    """Runs of which one would pick the fastest: the same work on the same devices."""
    row = run.facts
    return (run.dims.layers, run.dims.hidden, run.dims.length, run.device, row["n_gpus"], row["global_batch"])


def split_of(row_id: str) -> str:
    """fit or check: by the digits of the row's id, so that it never changes."""
    digits = int("".join(c for c in row_id if c.isdigit()) or 0)
    return "fit" if (digits * 2654435761 >> 7) % 2 == 0 else "check"


def sources(truth: Path, only: Iterable[str] = ()) -> dict[str, tuple[list[Run], list[Speedup]]]:
    wanted = set(only)
    found = {}
    for path in sorted(truth.glob("*.csv")):
        if wanted and path.stem not in wanted:
            continue
        header = rows_of(path)[0] if path.stat().st_size else {}
        if "dp_scaling" in path.stem:
            found[path.stem] = ([], list(speedups_of(path)))
        elif "iter_time_s" in header:
            found[path.stem] = (list(runs_of(path)), [])
    return {stem: pair for stem, pair in found.items() if pair[0] or pair[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--truth", type=Path, required=True, help="directory of the CSV files")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=Path, help="write every row: predicted, measured, parts")
    parser.add_argument("--source", action="append", default=[], help="only these files (stem)")
    parser.add_argument("--no-memory", action="store_true", help="leave out the rows that state memory (two minutes)")
    parser.add_argument("--split", choices=("all", "fit", "check"), default="all")
    arguments = parser.parse_args()
    predictor = Predictor(constants())
    result: dict[str, dict[str, float]] = {}
    details = []
    names = ("rows", "mape %", "median", "bias", "tau", "within", "calib.", "one run", "(raw)", "s")
    print(f"{'source':44}" + "".join(f"{name:>8}" for name in names))
    large: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for stem, (runs, speedups) in sources(arguments.truth, arguments.source).items():
        begun = time.perf_counter()
        pairs: list[tuple[float, float, object]] = []
        scored: list[Run] = []
        left_out = 0
        for run in runs:
            if arguments.split != "all" and split_of(run.row_id) != arguments.split:
                continue
            seconds = predictor.seconds(run)
            parts = predictor.step(run)
            if run.scored:
                pairs.append((seconds, run.measured_s, group_of(run)))
                scored.append(run)
            else:
                left_out += 1
            details.append(
                {
                    "source": stem, "row": run.row_id, "model": run.facts["model"], "device": run.device,
                    "predicted_s": seconds, "measured_s": run.measured_s, "ratio": seconds / run.measured_s,
                    "scored": run.scored, "tp": run.layout.tp, "pp": run.layout.pp, "dp": run.layout.dp,
                    "mb": run.layout.microbatch, "m": run.layout.num_microbatches, "length": run.dims.length,
                    "schedule": run.layout.schedule, "recompute": run.layout.recompute,
                    **{name: getattr(parts, name) for name in (
                        "compute_s", "recompute_s", "tp_s", "gather_s", "send_s", "bubble_s", "dp_s", "optimizer_s")},
                }
            )  # fmt: skip
        for one in speedups:
            if arguments.split != "all" and split_of(one.row_id) != arguments.split:
                continue
            value = predictor.speedup(one)
            if one.scored:
                pairs.append((value, one.measured, (one.model, one.device, one.precision)))
            else:
                left_out += 1
            details.append(
                {"source": stem, "row": one.row_id, "model": one.model, "device": one.device, "predicted_s": value,
                 "measured_s": one.measured, "ratio": value / one.measured, "scored": one.scored, "dp": one.ranks,
                 "compute_s": one.single_s}
            )  # fmt: skip
        if not pairs:
            continue
        told = (
            one_run.by_source(one_run.systems_of(stem, scored, [p for p, _, _ in pairs]), distances()).get(stem)
            if scored
            else None
        )
        line = scores(pairs) | {
            "not_scored": left_out,
            "calibrated_mape_pct": calibrated(pairs),
            "one_run_mape_pct": 100 * one_run.mean_of(told.one_run_model) if told else math.nan,
            "one_run_raw_mape_pct": 100 * one_run.mean_of(told.one_run_model_raw) if told else math.nan,
        }
        if runs and stem != "neusight_e2e":
            large["zero-shot"][stem] = [100 * abs(p / m - 1) for p, m, _ in pairs]
            large["calib."][stem] = [line["calibrated_mape_pct"]] * len(pairs)
            assert told is not None
            for name, errors in (
                ("zero-shot*", told.zero_shot_model),
                ("one run of the model", told.one_run_model),
                ("one run of the model, raw", told.one_run_model_raw),
                ("one run of any model", told.one_run),
                ("all other runs", told.all_runs),
            ):
                large[name][stem] = [100 * float(error) for error in errors if not math.isnan(error)]
        line["seconds"] = time.perf_counter() - begun
        result[stem] = line
        print(
            f"{stem:44}{line['rows']:8}{line['mape_pct']:8.1f}{line['median_pct']:8.1f}{line['bias_pct']:8.1f}"
            f"{line['kendall_tau']:8.2f}{line['kendall_tau_within']:8.2f}{line['calibrated_mape_pct']:8.1f}"
            f"{line['one_run_mape_pct']:8.1f}{line['one_run_raw_mape_pct']:8.1f}{line['seconds']:8.1f}",
            flush=True,
        )
    together = {
        name: {
            "pooled_pct": statistics.fmean(error for group in groups.values() for error in group),
            "sources_pct": statistics.fmean(statistics.fmean(group) for group in groups.values() if group),
        }
        for name, groups in large.items()
    }
    for name, means in together.items():
        print(f"large models, {name}: {means['pooled_pct']:.1f} % of all rows, {means['sources_pct']:.1f} % of sources")
    verdicts: dict[str, int] = {}
    if not arguments.no_memory and arguments.split == "all":
        only = [stem for stem in memory.SOURCES if not arguments.source or stem in arguments.source]
        by_source, cases = memory.memory_scores(arguments.truth, only) if only else ({}, [])
        memory.show(by_source, verdicts := memory.verdicts(cases))
        for stem, line in by_source.items():
            result[stem] = result.get(stem, {}) | line
    if arguments.rows:
        names = list(dict.fromkeys(name for detail in details for name in detail))
        with arguments.rows.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(details)
    if arguments.json:
        told = {"split": arguments.split, "sources": result, "large": together, "memory_verdicts": verdicts}
        arguments.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
