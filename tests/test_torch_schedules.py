"""The orders that torch.distributed.pipelining generates: accepted by the checker, and as long as ours of that name.

Its generators are private; they are called without the stages and process groups that its schedules are made with.
"""

import random
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules

from partitioner.actions import KINDS, Action, chain, check_schedule
from partitioner.clock import StageCost, Transfer
from partitioner.errors import ArgumentError
from partitioner.schedule import build_schedule
from partitioner.simulator import replay


def generated(name, p, each, m):
    """Torch's order of the schedule with these ranks, stages a rank and micro-batches."""
    rounds = max(1, m // p)
    fields = {
        "pp_group_size": p,
        "n_local_stages": each,
        "microbatches_per_round": m // rounds,
        "_n_microbatches": m,
        "_num_stages": p,
        "num_stages": each * p,
        "_stages": [None] * each,
    }
    if name == "1f1b":
        orders = schedules.Schedule1F1B._get_pipeline_order(SimpleNamespace(**fields))
    else:
        cls = {
            "gpipe": "ScheduleLoopedBFS",
            "interleaved": "ScheduleInterleaved1F1B",
            "zero-bubble": "ScheduleInterleavedZeroBubble",
            "zero-bubble-v": "ScheduleZBVZeroBubble",
        }[name]
        one = getattr(schedules, cls)._calculate_single_rank_operations
        orders = {rank: one(SimpleNamespace(**fields), rank) for rank in range(p)}
    compute = [[a for a in orders[rank] if a is not None and a.computation_type.value in KINDS] for rank in range(p)]
    return [[Action(a.stage_index, a.computation_type.value, a.microbatch_index) for a in order] for order in compute]


CASES = [
    *(("1f1b", p, 1, m) for p in (2, 4) for m in (4, 8, 13)),
    *(("gpipe", p, each, m) for p in (1, 2, 4) for each in (1, 3) for m in (2, 5)),
    *(("interleaved", p, each, m) for p in (2, 4) for each in (2, 3) for m in (3, 4, 8, 10)),
    *(("zero-bubble", p, each, m) for p in (2, 4) for each in (1, 2) for m in (3, 4, 8, 10)),
    *(("zero-bubble-v", p, 2, m) for p in (1, 2, 4) for m in (1, 3, 7, 12)),
]


@pytest.mark.parametrize(
    ("name", "p", "each", "m"), [case for case in CASES if case[3] % max(1, case[3] // case[1]) == 0]
)
def test_the_orders_of_torch_run_and_take_as_long_as_ours(name, p, each, m):
    theirs, ours = generated(name, p, each, m), build_schedule(name, each * p, m, num_ranks=p)
    if name == "1f1b" and theirs[-1][0].microbatch == 1:
        # torch 2.13 writes the forwards of the last rank down as 1 to m, and runs 0 to m - 1.
        with pytest.raises(ArgumentError, match=f"0F{m} is missing"):
            check_schedule(theirs)
        theirs[-1] = [a._replace(microbatch=a.microbatch - (a.kind == "F")) for a in theirs[-1]]
    check_schedule(theirs)
    rng = random.Random(f"{name} {p} {each} {m}")
    for _ in range(3):
        stages = [StageCost(rng.random(), 2 * rng.random()) for _ in range(each * p)]
        transfers = [Transfer(*edge, 0.1 * rng.random(), 0.1 * rng.random()) for edge in chain(each * p)]
        for overlap in (True, False):
            steps = [replay(orders, stages, transfers, overlap=overlap).step_s for orders in (theirs, ours)]
            assert steps[0] == pytest.approx(steps[1])
