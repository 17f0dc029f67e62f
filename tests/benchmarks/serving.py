"""Batches a second of plans with equal replicas and of one whose ranks take turns, predicted and measured.

    python tests/benchmarks/serving.py --ranks 3 --json serving.json

The model has one heavy layer among light ones, and does not fit one device. Its layers wait instead of computing, each
for its time a sample: ranks then do not share this machine's processors, and what is measured is how plans lay work out
over ranks, with the messages, Python and waits of a real run. Each plan serves the same batches, one after another; a
period is the time from one batch's output to the next, the median over all but the first few.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import partitioner as pt

WEIGHT_BYTES = 8 * 2**20
LIGHT_S, HEAVY_S = 0.004, 0.032
"""A sample."""


class Waiting(nn.Module):
    """Takes a time for each sample, and holds weights."""

    def __init__(self, sample_s: float, num_bytes: int) -> None:
        super().__init__()
        self.sample_s = sample_s
        self.weight = nn.Parameter(torch.zeros(num_bytes // 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.sample_s * len(x))
        return x + self.weight[0]


def model() -> nn.Module:
    light = [Waiting(LIGHT_S, WEIGHT_BYTES // 2) for _ in range(2)]
    return nn.Sequential(*light, Waiting(HEAVY_S, WEIGHT_BYTES)).eval()


def serve(plan: pt.Plan, batch: torch.Tensor, count: int) -> list[float]:
    """On a rank: when each batch's output was there."""
    with pt.materialize(plan, model()) as stage:
        ends = []
        for _ in range(count):
            stage.eval_step(batch)
            ends.append(time.time())
    return ends


def row(name: str, plan: pt.Plan, batch: torch.Tensor, count: int) -> dict[str, Any]:
    found = pt.launch(serve, plan, plan, batch, count)
    ends = [max(found[rank][k] for rank in plan.stages[-1].ranks) for k in range(count)]
    periods = [after - before for before, after in pairwise(ends[2:])]
    measured_s = statistics.median(periods)
    ranks = " + ".join(str(len(stage.ranks)) for stage in plan.stages)
    print(
        f"{name:10} {ranks:12} {plan.num_microbatches:3} {1e3 * plan.prediction.step_s:9.1f} ms "
        f"{1e3 * measured_s:9.1f} ms {measured_s / plan.prediction.step_s - 1:+8.1%}",
        flush=True,
    )
    return {
        "plan": name,
        "ranks": [len(stage.ranks) for stage in plan.stages],
        "microbatches": plan.num_microbatches,
        "predicted_s": plan.prediction.step_s,
        "measured_s": measured_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--count", type=int, default=14, help="batches served under each plan")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    batch = torch.zeros(options.batch, 8)
    common: dict[str, Any] = {"gpus": options.ranks, "objective": "throughput", "progress": False}
    profile = pt.profile(model(), batch, loss_fn=nn.MSELoss(), example_target=batch)
    limit = overhead_bytes(options.ranks) + int(1.5 * WEIGHT_BYTES)
    print("plan       ranks        mb.    predicted     measured    error")
    rows = []
    for name, mesh in (("equal", {"pp": 2}), ("equal", {"pp": 3}), ("in turns", "auto")):
        plan = pt.partition(model(), batch, profile=profile, memory_limit=limit, mesh=mesh, **common)
        rows.append(row(name, plan, batch, options.count))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


def overhead_bytes(ranks: int) -> int:
    """Bytes that a rank of this machine holds before anything is computed."""
    layer, x = nn.Linear(2, 2), torch.zeros(ranks, 2)
    device = pt.partition(layer, x, gpus=ranks, objective="throughput", progress=False).cluster.devices[0]
    return device.overhead_bytes + device.communicator_bytes


if __name__ == "__main__":
    main()
