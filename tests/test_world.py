"""A model that calls torch.distributed finds the replicas of its stage there, and nothing of the pipeline."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from plans import joined, plan_of
from rank_pool import RankPool, RanksFailed
from torch import nn
from torch.nn import functional as F

from partitioner.errors import ArgumentError, NotBuiltError
from partitioner.executor import materialize
from partitioner.microbatches import Cutter
from partitioner.plan import Plan
from partitioner.world import as_only_rank, refuse_groups


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def mean_over_world(x: torch.Tensor) -> torch.Tensor:
    """With its gradient."""
    if not dist.is_initialized():
        return x
    total: torch.Tensor = torch.distributed.nn.all_reduce(x)  # type: ignore[no-untyped-call]
    return total / world_size()


@torch.no_grad()
def gathered(x: torch.Tensor) -> torch.Tensor:
    """As MoCo and SimCLR gather their keys."""
    if not dist.is_initialized():
        return x
    parts = [torch.ones(x.shape, dtype=x.dtype) for _ in range(world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


class Centred(nn.Module):
    """Sees all replicas' samples: in the first layer, between layers with and without gradients, and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = InLayer(), nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("centre", torch.zeros(6))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if int(os.environ.get("RANK", "0")) == 0 or dist.get_rank() == 1:
            self.calls += 1
        h = torch.tanh(self.first(x))
        h = torch.tanh(self.second(h - mean_over_world(h.mean(0))))
        keys = gathered(h.detach())
        with torch.no_grad():
            centre = h.mean(0)
            if dist.is_initialized():
                dist.all_reduce(centre, async_op=True).wait()
            self.centre = 0.9 * self.centre + 0.1 * centre / world_size()
        out = self.third(h) * (1 + self.centre) * self.calls
        return out + h * keys.mean(0) / gathered(out.detach()).std()


class InLayer(nn.Linear):
    """As the codebook of a VQ-VAE averages over the world, in the midst of a layer."""

    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * mean_over_world(x.square().mean())


def steps_on_ranks(plan: Plan, model: nn.Module, batches: list[torch.Tensor]) -> dict[str, Any]:
    with materialize(plan, model, loss_fn=F.mse_loss) as stage:
        losses = []
        for x in batches:
            part = Cutter(0).cut((x,), {}, x, stage.dp_size)[stage.dp_rank]
            losses.append(float(stage.train_step(part.args, part.target)))
        assert dist.get_world_size() == plan.num_ranks == int(os.environ["WORLD_SIZE"])
        assert dist.get_rank() == stage.rank == int(os.environ["RANK"])
        gradients = {n: p.grad.clone() for n, p in stage.named_parameters() if p.grad is not None}
        centre = stage.state_dict().get("centre") if stage.stage == plan.num_stages - 1 else None
    return {"losses": losses, "gradients": gradients, "centre": centre}


@pytest.mark.parametrize(
    ("dp", "cuts"), [(2, ["second"]), (2, ["third"]), (1, ["second"]), (1, ["second", "third"]), (2, [])]
)
def test_the_world_is_the_replicas_of_the_stage(ranks: RankPool, dp: int, cuts: list[str]) -> None:
    """As one device that sees a micro-batch of all replicas at once."""
    torch.manual_seed(0)
    model, batches = Centred().double(), [torch.randn(8, 6).double() for _ in range(2)]
    plan = plan_of(model, (batches[0],), pp=len(cuts) + 1, dp=dp, cuts=cuts, microbatches=2, dtype="float64")
    expected = copy.deepcopy(model)
    losses = []
    for x in batches:
        parts = list(x.view(dp, 2, -1, 6).transpose(0, 1).reshape(2, -1, 6))
        found = [F.mse_loss(expected(part), part) / 2 for part in parts]
        for loss in found:
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(sum(found).detach()))  # type: ignore[union-attr]
    got = ranks.run(plan.num_ranks, steps_on_ranks, plan, model, batches)
    for rank in got:
        assert rank["losses"] == pytest.approx(losses, rel=1e-12)
        if rank["centre"] is not None:
            torch.testing.assert_close(rank["centre"], expected.centre)
    gradients = joined([rank["gradients"] for rank in got])
    assert gradients.keys() == dict(expected.named_parameters()).keys()
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("cuts", [["second"], []])
def test_replicas_with_other_numbers_of_micro_batches_are_refused_at_the_first_call(
    ranks: RankPool, cuts: list[str]
) -> None:
    model, x = Centred(), torch.randn(5, 6)
    plan = plan_of(model, (x,), pp=len(cuts) + 1, dp=2, cuts=cuts, microbatches=4)
    with pytest.raises(RanksFailed) as failed:
        ranks.run(plan.num_ranks, steps_on_ranks, plan, model, [x])
    said = [str(error) for error in failed.value.errors.values()]
    assert len(said) == plan.num_ranks
    assert all("all_reduce" in one and "3, 2 micro-batches" in one and "drop_last=True" in one for one in said)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reduced(x: torch.Tensor) -> Any:
    dist.all_reduce(x)
    return x


def into(call: Callable[..., Any], *shape: int) -> Callable[[torch.Tensor], Any]:
    def run(x: torch.Tensor) -> torch.Tensor:
        output = torch.zeros(*shape)
        call(output, x)
        return output

    return run


def into_list(call: Callable[..., Any], is_input: bool = False) -> Callable[[torch.Tensor], Any]:
    def run(x: torch.Tensor) -> torch.Tensor:
        output = torch.zeros(2, 3)
        call(output, [x]) if is_input else call([output], x)
        return output

    return run


def objects(x: torch.Tensor) -> Any:
    found = [None]
    dist.all_gather_object(found, {"x": x})
    return found[0]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "call",
    [
        reduced,
        lambda x: dist.broadcast(x, 0),
        lambda x: dist.reduce(x, 0),
        lambda x: dist.barrier(),
        into_list(dist.all_gather),
        into_list(lambda out, x: dist.gather(x, out, 0)),
        into_list(lambda out, given: dist.scatter(out, given, 0), is_input=True),
        into_list(dist.reduce_scatter, is_input=True),
        into_list(lambda out, x: dist.all_to_all(out, [x])),
        into(dist.all_gather_into_tensor, 2, 3),
        into(dist.reduce_scatter_tensor, 2, 3),
        into(dist.all_to_all_single, 2, 3),
        objects,
        lambda x: torch.distributed.nn.all_gather(x.requires_grad_())[0].detach(),  # type: ignore[no-untyped-call]
        lambda x: str((dist.get_rank(), dist.get_world_size(), dist.get_backend(), dist.get_process_group_ranks(None))),
        lambda x: dist.new_group([0]).size(),
    ],
)
def test_one_rank_alone_gets_what_a_group_of_one_gives(one_rank: None, call: Callable[..., Any]) -> None:
    x = torch.arange(6.0).view(2, 3)
    expected = call(x.clone())
    with as_only_rank():
        found = call(x.clone())
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    elif isinstance(expected, dict):
        torch.testing.assert_close(found["x"], expected["x"])
    else:
        assert found == expected
    assert dist.get_world_size() == 1


def test_planning_on_one_rank_does_not_wait_for_the_others(ranks: RankPool) -> None:
    def alone() -> int:
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            with as_only_rank():
                reduced(torch.ones(2))
                assert dist.get_world_size() == 1 and os.environ["WORLD_SIZE"] == "1"
                with pytest.raises(NotBuiltError, match=r"torch.distributed.send, and there is no other rank"):
                    dist.isend(torch.ones(2), 0)
        dist.barrier()  # or a rank that is done takes its connections away from one that is still joining
        return dist.get_world_size()

    assert ranks.run(2, alone) == [2, 2]


def test_a_process_group_that_a_module_keeps_is_refused_by_name(one_rank: None) -> None:
    refuse_groups(nn.Sequential(nn.SyncBatchNorm(4)))
    with pytest.raises(ArgumentError, match="1 keeps a process group in 'process_group'"):
        refuse_groups(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4, process_group=dist.group.WORLD)))


def test_a_mean_in_which_a_factor_hides_is_refused(one_rank: None) -> None:
    with as_only_rank(), pytest.raises(ArgumentError, match="PREMUL_SUM"):
        dist.all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(2.0))  # type: ignore[attr-defined]
