"""Predicted against measured step time, and one device's numbers against the ranks', model by model.

    python tests/benchmarks/prediction.py --ranks 2 --json prediction.json

Each model is planned three ways where that is possible (pipeline with GPipe and with 1F1B, replicas), run on its ranks
and beside one device. `repeat_noise` is half the range of the measured steps over their median: no prediction can be
asked to be closer. `slowdown` says what one rank loses to the others on this machine: the same single-device step timed
in one process and in as many at once; predictions are made from layers timed alone and are not corrected by it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models
import torch

import partitioner as pt
from partitioner.losses import Loss
from partitioner.microbatches import as_call

SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"batch": 16, "layers": 6, "width": 256, "length": 96},
    "llama": {"batch": 16, "layers": 6, "width": 256, "length": 96},
    "bert": {"batch": 16, "layers": 6, "width": 256, "length": 96},
    "t5": {"batch": 32, "layers": 4, "width": 256, "length": 128},
    "vit": {"batch": 128, "layers": 6, "width": 256},
    "resnet": {"batch": 128, "width": 64, "size": 32},
    "unet": {"batch": 64, "width": 32, "size": 32},
    "lstm": {"batch": 128, "length": 64, "width": 256},
    "tied": {"batch": 128, "length": 64, "width": 512, "layers": 6},
}
"""Large enough that a step takes tenths of a second on a core: where it takes hundredths, messages between processes,
some milliseconds each here, and not the model decide."""


def slowdown(num_ranks: int) -> float:
    """One process' time for a fixed step among `num_ranks` at once, over its time alone."""
    alone = pt.launch(_fixed_work, 1)[0]
    together = max(pt.launch(_fixed_work, num_ranks))
    return together / alone


def _fixed_work() -> float:
    torch.set_num_threads(1)
    case = models.build("gpt2", batch=4, layers=2, width=256, length=96)
    args, kwargs = as_call(case.inputs)
    loss = Loss(case.model, case.loss_fn, None)
    times = []
    for _ in range(12):
        start = time.perf_counter()
        loss.of(case.model(*args, **kwargs), case.target).backward()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def rows_of(name: str, num_ranks: int, steps: int) -> list[dict[str, Any]]:
    case = models.build(name, **SIZES[name])
    common = {"loss_fn": case.loss_fn, "example_target": case.target}
    profile = pt.profile(case.model, case.inputs, max_share=1 / (8 * num_ranks), num_threads=1, **common)
    rows = []
    layouts = [({"pp": num_ranks, "dp": 1}, s, 4) for s in ("gpipe", "1f1b")] + [
        ({"pp": 1, "dp": num_ranks}, "1f1b", 1)
    ]
    for mesh, schedule, microbatches in layouts:
        plan = pt.partition(
            case.model,
            case.inputs,
            gpus=num_ranks,
            mesh=mesh,
            schedule=schedule,
            microbatches=microbatches,
            profile=profile,
            optimizer="sgd",
            **common,
        )
        found = pt.verify(plan, case.model, case.inputs, steps=steps, **common)
        rows.append(
            {
                "model": name,
                "ranks": num_ranks,
                "mesh": f"pp {mesh['pp']} x dp {mesh['dp']}",
                "schedule": schedule,
                "microbatches": microbatches,
                "predicted_s": found.predicted_step_s,
                "measured_s": found.measured_step_s,
                "error": found.prediction_error,
                "repeat_noise": found.measured_spread_s / found.measured_step_s,
                "single_s": found.single_step_s,
                "predicted_speedup": found.predicted_speedup,
                "measured_speedup": found.measured_speedup,
                "gradient_error": found.gradient_error,
                "same": found.passed,
            }
        )
        print(
            f"{name:8} {rows[-1]['mesh']:14} {schedule:6} {microbatches:3}  {found.predicted_step_s * 1e3:9.1f} ms "
            f"{found.measured_step_s * 1e3:9.1f} ms {found.prediction_error:+8.1%} {rows[-1]['repeat_noise']:7.1%}  "
            f"{found.predicted_speedup:5.2f} {found.measured_speedup:5.2f}  {found.gradient_error:8.1e} "
            f"{'same' if found.passed else 'DIFFERENT'}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--names", nargs="*", default=list(SIZES), choices=list(SIZES), metavar="MODEL")
    parser.add_argument("--json", type=Path, help="written model by model; rows of models not named here are kept")
    options = parser.parse_args()
    ratio = slowdown(options.ranks)
    print(f"{os.cpu_count()} cores; one rank's step among {options.ranks} at once takes {ratio:.2f} x its time alone")
    print("model    mesh           sched.  mb.     predicted     measured    error   noise  speedup: p., m.  gradient")
    rows = _kept(options.json, options.names)
    for name in options.names:
        rows += rows_of(name, options.ranks, options.steps)
        if options.json:
            options.json.write_text(json.dumps({"slowdown": ratio, "rows": rows}, indent=1))
    errors = sorted(abs(row["error"]) for row in rows)
    quarter = statistics.quantiles(errors, n=4) if len(errors) > 1 else errors * 3
    print(
        f"median error {statistics.median(errors):.1%} (quartiles {quarter[0]:.1%} to {quarter[2]:.1%}, largest "
        f"{errors[-1]:.1%}) over {len(rows)} runs; median repeat noise "
        f"{statistics.median(row['repeat_noise'] for row in rows):.1%}"
    )


def _kept(path: Path | None, names: list[str]) -> list[dict[str, Any]]:
    """Rows of other models that an earlier part of the run has written."""
    if path is None or not path.exists():
        return []
    return [row for row in json.loads(path.read_text())["rows"] if row["model"] not in names]


if __name__ == "__main__":
    main()
