"""How long the simulator takes: python tests/benchmarks/simulation.py [--ranks 64] [--microbatches 512] [--json FILE]

Each row is one schedule with one set of stage times: the replay with all its spans, the clock of every action, and
what the step comes to from the schedule's rounds. All start from the names alone, nothing kept from earlier calls;
processor time, the best of five. `seen` is the share of the rounds that were run, 100 % where times did not settle;
`apart` the relative difference of the two steps.

    equal     all stages alike, transfers hidden
    uneven    times differ by up to 10 %, transfers hidden
    exposed   all stages alike, transfers that are waited for
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from partitioner.actions import Table, chain
from partitioner.clock import Replica, StageCost, Transfer, run_clock
from partitioner.schedule import schedule_table
from partitioner.simulator import replay
from partitioner.specs import SCHEDULES, ScheduleName
from partitioner.steady import step_times

PER_RANK = {"interleaved": 2, "zero-bubble-v": 2}
REPEATS = 5


def replica_of(kind: str, num_stages: int) -> Replica:
    rng = random.Random(1)
    stages = []
    for _ in range(num_stages):
        scale = 1 + 0.1 * rng.random() * (kind == "uneven")
        stages.append(StageCost(scale, 2 * scale, backward_input_s=scale, backward_weight_s=scale))
    seconds = 0.05 if kind == "exposed" else 0.0
    return Replica(tuple(stages), tuple(Transfer(*edge, seconds, seconds) for edge in chain(num_stages)))


def best(call: Callable[[], Any]) -> tuple[float, Any]:
    found = []
    for _ in range(REPEATS):
        schedule_table.cache_clear()
        begun = time.process_time()
        result = call()
        found.append(time.process_time() - begun)
    return min(found), result


def row_of(name: ScheduleName, kind: str, ranks: int, microbatches: int) -> dict[str, Any]:
    num_stages = PER_RANK.get(name, 1) * ranks
    replica = replica_of(kind, num_stages)

    def table() -> Table:
        return schedule_table(name, num_stages, microbatches, ranks)

    replay_s, _ = best(lambda: replay(table(), replica.stages, replica.transfers))
    exact_s, whole = best(lambda: run_clock(table(), replica))
    short_s, short = best(lambda: step_times(name, replica, microbatches, ranks))
    step_s = float(whole.rank_end_s.max())
    return {
        "schedule": name,
        "times": kind,
        "ranks": ranks,
        "microbatches": microbatches,
        "actions": len(whole.stages),
        "replay_s": replay_s,
        "exact_s": exact_s,
        "extrapolated_s": short_s,
        "seen": short.walked,
        "apart": abs(float(short.rank_end_s.max()) / step_s - 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(
        f"{'schedule':<16}{'times':<9}{'actions':>8}{'replay':>11}{'exact':>11}{'extrapolated':>14}{'seen':>7}  apart"
    )
    for name in SCHEDULES:
        for kind in ("equal", "uneven", "exposed"):
            row = row_of(name, kind, options.ranks, options.microbatches)
            rows.append(row)
            print(
                f"{name:<16}{kind:<9}{row['actions']:>8}{1e3 * row['replay_s']:>8.0f} ms{1e3 * row['exact_s']:>8.1f} ms"
                f"{1e3 * row['extrapolated_s']:>11.1f} ms{100 * row['seen']:>5.0f} %  {row['apart']:.0e}"
            )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
