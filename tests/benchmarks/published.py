"""Published pipeline runs through the simulator: python tests/benchmarks/published.py --truth DIR [--json FILE] [--fit]

Zero bubble (Qi et al. 2024, https://arxiv.org/abs/2401.10241): DIR/zero_bubble_stage_times.csv has what one stage takes
for F, I, W and a message, DIR/zero_bubble.csv the measured throughput. Each row is simulated under its schedule: 1F1B
and interleaved as they are, automatic orders searched from the stage times in the room that the paper gives them. Times
of another micro-batch size are in proportion. One set of constants serves all rows:

    SLOWDOWN    of a stage in a running pipeline over one measured alone
    overlap     none: in the authors' Megatron-LM fork a rank waits for its messages when it needs them

torchgpipe (https://github.com/kakaobrain/torchgpipe, GPipe): the published balances of DIR/torchgpipe_gpipe.csv, each
child by its operations and bytes (torchgpipe.py beside this file), against the throughput of the same table:

    COMPUTE_SHARE, MEMORY_SHARE     of the device's peaks that convolutions and everything else reach

All were fitted on every other row (part "fit", by schedule and in the table's order); the others only check them. --fit
does so again.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import torchgpipe

from partitioner.actions import Table, chain
from partitioner.clock import Replica, StageCost, Transfer, run_clock
from partitioner.ordering import Room, search_order
from partitioner.schedule import schedule_table
from partitioner.steady import step_times

SLOWDOWN = 1.055
COMPUTE_SHARE, MEMORY_SHARE = 0.7, 0.7


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


class Balanced(NamedTuple):
    """A row of torchgpipe's tables."""

    row_id: str
    model: str
    balance: tuple[int, ...]
    m: int
    samples: float
    """Of a micro-batch."""
    again: float
    """Share of the micro-batches whose forward runs a second time."""
    measured_s: float
    part: str


def read_balanced(truth: Path) -> list[Balanced]:
    found: list[Balanced] = []
    for row in csv.DictReader((truth / "torchgpipe_gpipe.csv").open()):
        if not row["samples_per_s"] or row["model"] not in torchgpipe.MODELS:
            continue
        listed = re.search(r"balance=\[([\d, ]+)\]", row["notes"])
        balance = listed[1].split(",") if listed else [len(torchgpipe.MODELS[row["model"]]())]
        m = int(row["n_microbatches"] or 1)
        again = {"none": 0.0, "checkpoint=always": 1.0}.get(row["recompute"], (m - 1) / m)  # else: all but the last
        samples = float(row["micro_batch"])
        measured_s = m * samples / float(row["samples_per_s"])
        part = "fit" if len(found) % 2 == 0 else "check"
        found.append(
            Balanced(row["row_id"], row["model"], tuple(map(int, balance)), m, samples, again, measured_s, part)
        )
    return found


def balanced_s(row: Balanced, shares: tuple[float, float]) -> float:
    replica = torchgpipe.replica_of(row.model, list(row.balance), row.samples, row.again, *shares)
    return float(step_times("gpipe", replica, row.m).rank_end_s.max())


def fit_shares(rows: list[Balanced]) -> tuple[float, float]:
    def error(shares: tuple[float, float]) -> float:
        return sum(abs(balanced_s(row, shares) / row.measured_s - 1) for row in rows if row.part == "fit")

    grid = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    return min(((compute, memory) for compute in grid for memory in grid), key=error)


def show(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Print rows, then a line a schedule with mean absolute errors in percent, which are returned."""
    print(f"{'row':<8}{'schedule':<11}{'ranks':>5}{'m':>6}{'measured':>12}{'predicted':>12}{'error':>8}  part")
    for row in rows:
        head = f"{row['row_id']:<8}{row['schedule']:<11}{row['ranks']:>5}{row['microbatches']:>6}"
        seconds = f"{row['measured_s']:>10.3f} s{row['predicted_s']:>10.3f} s"
        print(f"{head}{seconds}{row['error_pct']:>+7.1f}%  {row['part']}")
    print(f"\n{'schedule':<11}{'rows':>5}{'mean |error|':>14}{'bias':>8}{'fit':>8}{'check':>8}")
    found = {}
    for name in dict.fromkeys(row["schedule"] for row in rows):
        errors = {part: [r["error_pct"] for r in rows if r["schedule"] == name and part in r["part"]] for part in PARTS}
        found[name] = {
            "rows": len(errors[""]),
            "mean_abs_error_pct": float(np.mean(np.abs(errors[""]))),
            "bias_pct": float(np.mean(errors[""])),
            "fit_pct": float(np.mean(np.abs(errors["fit"]))),
            "check_pct": float(np.mean(np.abs(errors["check"]))),
        }
        rest = list(found[name].values())
        print(f"{name:<11}{rest[0]:>5}{rest[1]:>13.1f}%{rest[2]:>+7.1f}%{rest[3]:>7.1f}%{rest[4]:>7.1f}%")
    return found


PARTS = ("", "fit", "check")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True, help="folder with the three CSV files")
    parser.add_argument("--fit", action="store_true", help="fit the constants again on the part for that")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs, balanced = read_runs(options.truth), read_balanced(options.truth)
    slowdown = fit(runs) if options.fit else SLOWDOWN
    shares = fit_shares(balanced) if options.fit else (COMPUTE_SHARE, MEMORY_SHARE)

    def row(table: str, schedule: str, ranks: int, run: Run | Balanced, found_s: float) -> dict[str, Any]:
        return {
            "table": table,
            "row_id": run.row_id,
            "schedule": schedule,
            "ranks": ranks,
            "microbatches": run.m,
            "measured_s": run.measured_s,
            "predicted_s": found_s,
            "error_pct": 100 * (found_s / run.measured_s - 1),
            "part": run.part,
        }

    rows = [row("zero_bubble", run.schedule, run.p, run, predicted_s(run, slowdown)) for run in runs]
    print(f"zero bubble, slowdown {slowdown:.3f}")
    schedules = show(rows)
    more = [row("torchgpipe", "torchgpipe", len(one.balance), one, balanced_s(one, shares)) for one in balanced]
    print(f"\ntorchgpipe, {shares[0]:.0%} of the peak of convolutions, {shares[1]:.0%} of the memory's")
    schedules |= show(more)
    if options.json:
        constants = {"slowdown": slowdown, "overlap": False, "compute_share": shares[0], "memory_share": shares[1]}
        options.json.write_text(
            json.dumps({"constants": constants, "schedules": schedules, "rows": rows + more}, indent=1)
        )


if __name__ == "__main__":
    main()
