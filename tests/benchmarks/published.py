"""Published pipeline runs through the simulator: python tests/benchmarks/published.py --truth DIR [--json FILE] [--fit]

Zero bubble (Qi et al. 2024, https://arxiv.org/abs/2401.10241): DIR/zero_bubble_stage_times.csv has what one stage takes
for F, I, W and a message, DIR/zero_bubble.csv the measured throughput. Each row is simulated under its schedule: 1F1B
and interleaved as they are, automatic orders searched from the stage times in the room that the paper gives them. Times
of another micro-batch size are in proportion. One set of constants serves all rows:

    SLOWDOWN    of a stage in a running pipeline over one measured alone
    overlap     none: in the authors' Megatron-LM fork a rank waits for its messages when it needs them

SLOWDOWN was fitted on every other row of each schedule (part "fit"); the others only check it. --fit does so again.

"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partitioner.actions import Table, chain
from partitioner.clock import Replica, StageCost, Transfer, run_clock
from partitioner.ordering import Room, search_order
from partitioner.schedule import schedule_table

SLOWDOWN = 1.055


class Run(NamedTuple):
    """A measured row with the stage times that go with it, all in seconds."""

    row_id: str
    schedule: str
    p: int
    m: int
    stages_per_rank: int
    forward_s: float
    input_s: float
    weight_s: float
    transfer_s: float
    until_weight: float
    """Share of a micro-batch's activations that W needs."""
    measured_s: float
    barrier: bool
    part: str


def read_runs(truth: Path) -> list[Run]:
    times = list(csv.DictReader((truth / "zero_bubble_stage_times.csv").open()))
    runs, seen = [], defaultdict(int)
    for row in csv.DictReader((truth / "zero_bubble.csv").open()):
        model, m, size = row["model"].split()[1], int(row["n_microbatches"]), int(row["micro_batch"])
        known = min((t for t in times if t["model"] == model), key=lambda t: abs(int(t["m"]) - m))
        scale = size / int(known["micro_batch"]) / 1e3
        name = row["schedule"].split()[0]
        runs.append(
            Run(
                row["row_id"],
                name,
                int(row["pp"]),
                m,
                int(row["vpp"] or 1),
                *(scale * float(known[key]) for key in ("tF_ms", "tB_ms", "tW_ms", "tcomm_ms")),
                until_weight=_until_weight(int(row["heads"]), int(row["seq_len"]), int(row["hidden"])),
                measured_s=float(row["iter_time_s_derived"]),
                barrier="all-reduce" in row["schedule"],
                part="fit" if seen[name] % 2 == 0 else "check",
            )
        )
        seen[name] += 1
    return runs


def _until_weight(heads: int, length: int, hidden: int) -> float:
    """A transformer layer keeps s b h (34 + 5 a s / h) bytes for its backward (Korthikanti et al. 2022,
    https://arxiv.org/abs/2205.05198); of these the inputs of its products, 32 s b h, are what W needs (Qi et al. 2024).
    """
    return 32 / (34 + 5 * heads * length / hidden)


def replica_of(run: Run, slowdown: float) -> Replica:
    """Equal stages; the authors balance them, with one layer fewer on the first and the last."""
    each = slowdown / run.stages_per_rank
    cost = StageCost(
        each * run.forward_s,
        each * (run.input_s + run.weight_s),
        backward_input_s=each * run.input_s,
        backward_weight_s=each * run.weight_s,
    )
    num_stages = run.p * run.stages_per_rank
    edges = chain(num_stages)
    return Replica((cost,) * num_stages, tuple(Transfer(*edge, run.transfer_s, run.transfer_s) for edge in edges))


@cache
def table_of(run: Run) -> Table:
    if run.schedule in ("ZB-1p", "ZB-2p"):
        count = run.p * (1 if run.schedule == "ZB-1p" else 2)
        room = Room.microbatches(count, range(run.p), until_weight=run.until_weight)
        return Table.of(search_order(replica_of(run, 1.0), range(run.p), run.m, room, barrier=False).orders)
    name = "1f1b" if run.stages_per_rank == 1 else "interleaved"
    return schedule_table(name, run.p * run.stages_per_rank, run.m, run.p)


def predicted_s(run: Run, slowdown: float) -> float:
    """A step; without a barrier behind it, ranks go on to the next one when they are done."""
    clock = run_clock(table_of(run), replica_of(run, slowdown), overlap=False)
    return float(clock.rank_end_s.max()) if run.barrier else clock.period_s


def fit(runs: list[Run]) -> float:
    """The slowdown with the least mean absolute error over the part to fit."""

    def error(slowdown: float) -> float:
        return sum(abs(predicted_s(run, slowdown) / run.measured_s - 1) for run in runs if run.part == "fit")

    return float(min(np.arange(1.0, 1.121, 0.005), key=error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True, help="folder with the two CSV files")
    parser.add_argument("--fit", action="store_true", help="fit the slowdown again on the part for that")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = read_runs(options.truth)
    slowdown = fit(runs) if options.fit else SLOWDOWN
    rows: list[dict[str, Any]] = []
    print(f"{'row':<8}{'schedule':<9}{'p':>3}{'m':>5}{'v':>3}{'measured':>11}{'predicted':>11}{'error':>8}  part")
    for run in runs:
        found = predicted_s(run, slowdown)
        error = 100 * (found / run.measured_s - 1)
        print(
            f"{run.row_id:<8}{run.schedule:<9}{run.p:>3}{run.m:>5}{run.stages_per_rank:>3}{run.measured_s:>9.3f} s"
            f"{found:>9.3f} s{error:>+7.1f}%  {run.part}"
        )
        rows.append(
            {
                "table": "zero_bubble",
                "row_id": run.row_id,
                "schedule": run.schedule,
                "ranks": run.p,
                "microbatches": run.m,
                "measured_s": run.measured_s,
                "predicted_s": found,
                "error_pct": error,
                "part": run.part,
            }
        )
    schedules = {}
    print(f"\nslowdown {slowdown:.3f}\n{'schedule':<9}{'rows':>5}{'mean |error|':>14}{'bias':>8}{'fit':>8}{'check':>8}")
    for name in dict.fromkeys(run.schedule for run in runs):
        own = [row for row in rows if row["schedule"] == name]

        def mean(part: str = "", *, signed: bool = False, own: list[dict[str, Any]] = own) -> float:
            errors = [row["error_pct"] for row in own if part in row["part"]]
            return float(np.mean(errors if signed else np.abs(errors)))

        schedules[name] = {
            "rows": len(own),
            "mean_abs_error_pct": mean(),
            "bias_pct": mean(signed=True),
            "fit_pct": mean("fit"),
            "check_pct": mean("check"),
        }
        values = list(schedules[name].values())
        print(f"{name:<9}{values[0]:>5}{values[1]:>13.1f}%{values[2]:>+7.1f}%{values[3]:>7.1f}%{values[4]:>7.1f}%")
    if options.json:
        result = {"constants": {"slowdown": slowdown, "overlap": False}, "schedules": schedules, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
