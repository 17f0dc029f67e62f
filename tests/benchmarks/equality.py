"""Loss, gradients, and weights after five optimizer steps: ranks against one device, over the whole matrix.

    python tests/benchmarks/equality.py --json equality.json

Models x layouts (2 and 4 ranks: pipelines, replicas, both) x schedules x 1 to 8 micro-batches, fp32. Always against the
same micro-batches on one device, and against one pass over the whole batch where no BatchNorm trains. Errors are
max|g - ref| / max(max|ref|, 1e-4 x the model's largest gradient); a row is `same` at 1e-5 or less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cloudpickle
import models
from rank_pool import RankPool

import partitioner as pt
from partitioner.losses import Loss
from partitioner.microbatches import Cutter, as_call
from partitioner.specs import Cluster, Device, Link
from partitioner.verification import as_it_was, compared, on_one_device, on_rank

LAYOUTS = ({"pp": 2, "dp": 1}, {"pp": 1, "dp": 2}, {"pp": 4, "dp": 1}, {"pp": 2, "dp": 2}, {"pp": 1, "dp": 4})
STEPS = 5


def plans(case: models.Case, layouts: tuple[dict[str, int], ...], counts: list[int]) -> Iterator[pt.Plan]:
    """Every layout, schedule and number of micro-batches that divides the batch, from one profile."""
    common = {"loss_fn": case.loss_fn, "example_target": case.target}
    profile = pt.profile(case.model, case.inputs, max_share=1 / 32, num_threads=1, whole_step=False, **common)
    args, kwargs = as_call(case.inputs)
    batch = Cutter().batch_size(args, kwargs)
    device = Device(name="CPU rank", kind="cpu", memory_bytes=2**33)
    link = Link.of(1e-4, 1e9)
    for mesh in layouts:
        num_ranks = mesh["pp"] * mesh["dp"]
        cluster = Cluster(devices=(device,) * num_ranks, nodes=(0,) * num_ranks, intra=link, inter=link)
        for schedule in ("gpipe", "1f1b") if mesh["pp"] > 1 else ("1f1b",):
            for count in counts:
                if batch % (mesh["dp"] * count) == 0:
                    training = pt.Training(batch_size=batch, mesh=mesh, schedule=schedule, microbatches=count)
                    yield pt.solve(profile, cluster, training)


def row(pool: RankPool, name: str, case: models.Case, plan: pt.Plan) -> dict[str, Any]:
    args, kwargs = as_call(case.inputs)
    ranks = pool.run(
        plan.num_ranks, on_rank, plan, case.model, args, kwargs, case.target, case.loss_fn, None, STEPS, 0.01, 0
    )
    with as_it_was(case.model):
        loss = Loss(case.model, case.loss_fn, None)
        single = on_one_device(plan, case.model, args, kwargs, case.target, loss, Cutter(), STEPS, 0.01)
    found = compared(plan, ranks, single, STEPS, ())
    whole = found.whole_batch_error
    return {
        "model": name,
        "pp": plan.mesh["pp"],
        "dp": plan.mesh["dp"],
        "schedule": plan.schedule,
        "microbatches": plan.num_microbatches,
        "loss_error": found.loss_error,
        "gradient_error": found.gradient_error,
        "worst": found.worst_gradient,
        "weight_error": found.weight_error,
        "whole_batch_error": whole,
        "same": found.passed and (whole is None or whole <= found.tolerance),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(models.CASES), choices=list(models.CASES))
    parser.add_argument("--microbatches", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cloudpickle.register_pickle_by_value(models)
    rows = []
    print("model    pp dp  schedule  mb.      loss  gradient   weights  whole batch")
    with contextlib.closing(RankPool(4)) as pool:
        for name in options.models:
            case = models.build(name)
            for plan in plans(case, LAYOUTS, options.microbatches):
                found = row(pool, name, case, plan)
                rows.append(found)
                whole = "-" if found["whole_batch_error"] is None else f"{found['whole_batch_error']:.1e}"
                print(
                    f"{name:8} {found['pp']:2} {found['dp']:2}  {found['schedule']:8} {found['microbatches']:3}  "
                    f"{found['loss_error']:9.1e} {found['gradient_error']:9.1e} {found['weight_error']:9.1e} "
                    f"{whole:>12}  {'same' if found['same'] else 'DIFFERENT at ' + found['worst']}",
                    flush=True,
                )
    same = sum(found["same"] for found in rows)
    worst = max(found["gradient_error"] for found in rows)
    print(f"{same} of {len(rows)} the same as one device; worst gradient {worst:.1e}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))
    sys.exit(same != len(rows))


if __name__ == "__main__":
    main()
