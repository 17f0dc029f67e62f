"""What planning costs, in the model's own training steps, and how the layer timing grows with equal layers.

    python tests/benchmarks/profiling.py --json profiling.json

`partition / step`: the whole of `partition` on a 24-layer GPT over one of its training steps (forward, backward and
AdamW on the same batch and threads), whole-step checks and the slicing check included. `48 / 24`: seconds of the layer
timing alone, captured on meta, for twice as many equal layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models
import torch

import partitioner as pt


def step_seconds(case: models.Case, repeats: int = 3) -> float:
    optimizer = torch.optim.AdamW(case.model.parameters())
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        case.model(**case.inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def layer_timing_seconds(layers: int, **sizes: int) -> float:
    """The measuring of layers alone: from its first report to the next phase."""
    case = models.build("gpt2", layers=layers, **sizes)
    marks: list[tuple[str, float]] = []
    pt.profile(
        case.model.to("meta"),
        case.inputs,
        device="cpu",
        num_threads=1,
        progress=lambda what, share: marks.append((what, time.perf_counter())),
    )
    start = next(moment for what, moment in marks if what == "measuring layers")
    stop = next(moment for what, moment in reversed(marks) if what == "measuring layers")
    return stop - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"width": options.width, "length": options.length, "batch": options.batch, "vocabulary": 1000}
    case = models.build("gpt2", layers=24, **sizes)
    rows: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        before = step_seconds(case)
        start = time.perf_counter()
        pt.partition(case.model, case.inputs, gpus=2)
        planning = time.perf_counter() - start
        step = statistics.mean([before, step_seconds(case)])
        few, many = layer_timing_seconds(24, **sizes), layer_timing_seconds(48, **sizes)
        rows.append({"partition_s": planning, "step_s": step, "layers_24_s": few, "layers_48_s": many})
        print(
            f"partition {planning:.2f} s, step {step:.2f} s: {planning / step:.1f} steps;  "
            f"layer timing {few:.2f} s for 24 layers, {many:.2f} s for 48: {many / few:.2f}",
            flush=True,
        )
    steps = statistics.median(row["partition_s"] / row["step_s"] for row in rows)
    growth = statistics.median(row["layers_48_s"] / row["layers_24_s"] for row in rows)
    print(f"median of {len(rows)}: partition takes {steps:.1f} training steps; 48 / 24 layers {growth:.2f}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
