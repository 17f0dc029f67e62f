"""Plans whose ranks take turns run on ranks: the outputs are those of one device, whole on each of the last ones."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from plans import plan_of
from rank_pool import RankPool, RanksFailed
from torch import nn

import partitioner as pt
from partitioner.errors import ArgumentError, PartitionerError
from partitioner.executor import materialize
from partitioner.plan import Plan
from partitioner.simulator import simulate


def in_turns(plan: Plan, ranks: list[int]) -> Plan:
    """The plan's cuts, with so many ranks for each stage."""
    ends = [sum(ranks[:k]) for k in range(len(ranks) + 1)]
    stages = [
        stage.model_copy(update={"ranks": tuple(range(*bounds))})
        for stage, bounds in zip(plan.stages, pairwise(ends), strict=True)
    ]
    fields = plan.model_dump() | {
        "stages": [stage.model_dump() for stage in stages],
        "mesh": {"pp": len(stages), "dp": 1},
        "schedule": "gpipe",
        "devices": tuple(range(ends[-1])),
        "cluster": plan.cluster.model_dump()
        | {"devices": [plan.cluster.devices[0].model_dump()] * ends[-1], "nodes": [0] * ends[-1]},
        "training": plan.training.model_dump() | {"objective": "throughput"},
    }
    return Plan.model_validate(fields)


def evaluate_on_ranks(plan: Plan, model: nn.Module, batches: list[Any]) -> dict[str, Any]:
    """On a rank: the outputs for each batch, and what the ranks did for the last."""
    with materialize(plan, model) as stage:
        stage.module.eval()
        assert (stage.dp_rank, stage.dp_size) == (0, 1)
        outputs = [stage.eval_step(batch) for batch in batches]
        spans = stage.timeline().spans
        whole = stage.full_state_dict()
    return {"outputs": outputs, "ran": {span[:4] for span in spans if span.kind == "F"}, "state": whole}


class Told(nn.Module):
    """Branches, a skip over stages, and an output of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        a = self.first(x).tanh()
        b = self.second(a)
        y = self.third(torch.cat([a, b], 1))
        return {"y": y, "parts": (y.argmax(1), None, "said"), "mean": y.mean()}


def told_batch(samples: int) -> torch.Tensor:
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(samples))


@pytest.mark.parametrize(
    ("cuts", "counts", "microbatches"),
    [(["second"], [1, 2], 4), (["second"], [2, 1], 3), (["second", "third"], [1, 1, 1], 2), ([], [3], 5)],
)
def test_outputs_are_those_of_one_device(
    ranks: RankPool, cuts: list[str], counts: list[int], microbatches: int
) -> None:
    torch.manual_seed(3)
    model = Told().eval()
    plan = plan_of(model, told_batch(10), cuts=cuts, pp=len(counts), microbatches=microbatches, batch_size=10)
    plan = in_turns(plan, counts) if counts != [1, 1, 1] else plan
    batches = [told_batch(samples) for samples in (10, 10, 7, 2, 1, 10)]  # whole, uneven, fewer than ranks, whole again
    found = ranks.run(plan.num_ranks, evaluate_on_ranks, plan, model, batches)
    last = plan.stages[-1].ranks
    for rank, told in enumerate(found):
        for batch, output in zip(batches, told["outputs"], strict=True):
            if rank not in last:
                assert output is None
                continue
            expected = model(batch)
            torch.testing.assert_close(output["y"], expected["y"])
            torch.testing.assert_close(output["mean"], expected["mean"])
            assert torch.equal(output["parts"][0], expected["parts"][0]) and output["parts"][1:] == (None, "said")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in found[0]["state"].items())
    ran = set().union(*(told["ran"] for told in found))
    assert ran == {span[:4] for span in simulate(plan).spans if span.kind == "F"}
    assert len(ran) == plan.num_stages * microbatches


class Unsendable(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return {"y": y, "how": lambda: y}


def test_what_would_train_or_cannot_be_passed_on_is_refused(ranks: RankPool) -> None:
    x = torch.randn(8, 4)
    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    unsendable = Unsendable(nn.Linear(4, 4), nn.Linear(4, 4))
    for model, cut, train, said in (
        (normed, "2", True, "this plan is for inference"),
        (normed, "2", False, "call stage.module.eval\\(\\) first"),
        (unsendable, "1", False, "cannot be passed between the ranks of the last stage"),
    ):
        plan = in_turns(plan_of(model, x, cuts=[cut], microbatches=4), [1, 2])

        def on_ranks(plan: Plan = plan, model: nn.Module = model, train: bool = train, x: torch.Tensor = x) -> None:
            with materialize(plan, model, loss_fn=nn.MSELoss()) as stage:
                stage.train_step(x, x) if train else stage.eval_step(x)

        with pytest.raises(RanksFailed) as failed:
            ranks.run(3, on_ranks)
        assert any(re.search(said, str(error)) for error in failed.value.errors.values()), failed.value


def test_another_number_of_processes_and_another_batch_are_refused(ranks: RankPool) -> None:
    torch.manual_seed(3)
    model = Told().eval()
    plan = in_turns(plan_of(model, told_batch(8), cuts=["second"], microbatches=4), [1, 2])
    with pytest.raises(PartitionerError, match=r"3 ranks \(1 \+ 2 of its stages\), but 1 process was started"):
        materialize(plan, model)

    def differing() -> None:
        with materialize(plan, model) as stage:
            stage.eval_step(told_batch(8) + (stage.rank == 2))

    with pytest.raises(RanksFailed) as failed:
        ranks.run(3, differing)
    assert any("rank 2 got another batch than rank 0" in str(error) for error in failed.value.errors.values())


def test_a_partitioned_model_serves_on_three_ranks(ranks: RankPool, tmp_path: Any) -> None:
    """From `partition` to the outputs: a batch that three replicas cannot share is taken in turns."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU()))).eval()
    x = torch.randn(8, 32)
    plan = pt.partition(model, x, gpus=3, objective="throughput", microbatches=8, progress=False)
    assert plan.takes_turns and plan.num_ranks == 3
    plan.save(tmp_path / "plan.json")
    plan = pt.load(tmp_path / "plan.json")
    found = ranks.run(3, evaluate_on_ranks, plan, model, [x, x[:5]])
    whole = [told["outputs"] for rank, told in enumerate(found) if rank in plan.stages[-1].ranks]
    assert whole
    for outputs in whole:
        torch.testing.assert_close(outputs[0], model(x))
        torch.testing.assert_close(outputs[1], model(x[:5]))


def test_plans_with_turns_that_cannot_be_are_refused() -> None:
    model = Told()
    plan = in_turns(plan_of(model, told_batch(8), cuts=["second"], microbatches=4), [1, 2])
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    fields = plan.model_dump()
    for change, said in (
        ({"mesh": {"pp": 2, "dp": 2}}, "does not match 2 stages"),
        ({"schedule": "1f1b"}, "under gpipe"),
        ({"training": fields["training"] | {"objective": "train"}}, "for objective 'throughput'"),
        ({"orders": ["0F0", "1F0", ""]}, "no orders of their own"),
    ):
        with pytest.raises(ValueError, match=said):
            Plan.model_validate(fields | change)
    with pytest.raises(ArgumentError, match="forwards alone, which 1f1b does not order"):
        simulate(plan, schedule="1f1b")
