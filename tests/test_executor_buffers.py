"""Buffers that forwards change are the same on all replicas when a step begins: the first one's."""

from __future__ import annotations

import pytest
import torch
from models import Case
from plans import plan_for
from rank_pool import RankPool
from torch import nn

from partitioner.executor import materialize
from partitioner.plan import Plan


class Moving(nn.Module):
    """Means of what it sees: written in place, assigned, written without a trace; and a cache of its own size."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("written", "assigned", "silent"):
            self.register_buffer(name, torch.ones(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("cache", None)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().abs().mean(0)
        self.written.mul_(0.5).add_(mean)
        self.assigned = 0.5 * self.assigned + mean
        self.silent.data.copy_(mean)
        self.count += 1 + len(x)
        self.cache = x.detach().clone()
        return x / (self.written + self.assigned + self.silent)


def case() -> Case:
    model = nn.Sequential(nn.Linear(4, 4), Moving(), nn.Linear(4, 4), nn.BatchNorm1d(4), Moving(), nn.Linear(4, 4))
    return Case(model, (torch.randn(8, 4),), target=torch.randn(8, 4), loss_fn=nn.MSELoss())


def on_ranks(plan: Plan, case: Case, steps: int) -> list[dict[str, torch.Tensor]]:
    """The buffers before the first step, and as each forward but the first found them."""
    with materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
        found: list[dict[str, torch.Tensor]] = []
        first_layer = stage.module[0 if stage.stage == 0 else 3]
        held = {name: buffer for name, buffer in stage.module.named_buffers() if stage._placement.has_values(name)}

        def note(*_: object) -> None:
            now = dict(stage.module.named_buffers())
            found.append({name: now[name].clone() for name in held})

        note()
        for step in range(steps):
            samples = 4 + 2 * step + 2 * stage.dp_rank  # replicas see other samples, and other numbers of them
            handle = first_layer.register_forward_pre_hook(note)
            torch.manual_seed(10 * step + stage.dp_rank)
            before = len(found)
            stage.train_step((torch.randn(samples, 4),), torch.randn(samples, 4))
            del found[before + 1 :]
            handle.remove()
        return found


@pytest.mark.parametrize("pp", [1, 2])
def test_replicas_begin_each_step_with_the_same_buffers(ranks: RankPool, pp: int) -> None:
    made = case()
    plan = plan_for(made, pp=pp, dp=2, cuts=["3"] if pp == 2 else [])
    results = ranks.run(2 * pp, on_ranks, plan, made, 4)
    for stage in plan.stages:
        one, other = (results[rank] for rank in stage.ranks)
        assert len(one) == len(other) == 5
        for step, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            for name, value in mine.items():
                if not name.endswith("cache"):
                    assert torch.equal(value, theirs[name]), (step, name)
        moved = [name for name in one[0] if name != "cache" and not torch.equal(one[1][name], one[-1][name])]
        assert any(name.endswith("silent") for name in moved) and any(name.endswith("assigned") for name in moved)


class Convolution(nn.Module):
    """Of a graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("edges", torch.rand(4, 4).relu().sub(0.5).relu().to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nodes = self.linear(x).transpose(0, 1)
        return torch.sparse.mm(self.edges, nodes.flatten(1)).view_as(nodes).transpose(0, 1)


class Convolutions(nn.Module):
    """A sparse buffer in each of two layers, and one of the model itself, which no layer uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Convolution(3), Convolution(3)
        self.register_buffer("edges", torch.rand(4, 4).sub(0.5).relu().to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)).transpose(0, 1)
        hidden = torch.sparse.mm(self.edges, hidden.flatten(1)).view_as(hidden).transpose(0, 1)
        return self.second(hidden)


def sparse_on_ranks(plan: Plan, case: Case) -> tuple[float, dict[str, torch.Tensor] | None]:
    with materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
        parts = [one.chunk(stage.dp_size)[stage.dp_rank] for one in (*case.inputs, case.target)]
        loss = float(stage.train_step(parts[0], parts[1]))
        whole = stage.full_state_dict()
    return loss, whole and {name: one.to_dense() for name, one in whole.items() if name.endswith("edges")}


@pytest.mark.parametrize("pp", [1, 2])
def test_the_whole_state_has_sparse_buffers(ranks: RankPool, pp: int) -> None:
    torch.manual_seed(0)
    case = Case(Convolutions(), (torch.randn(8, 4, 3),), target=torch.randn(8, 4, 3), loss_fn=nn.MSELoss())
    plan = plan_for(case, pp=pp, dp=2 // pp)
    (loss, whole), (other, nothing) = ranks.run(2, sparse_on_ranks, plan, case)
    expected = nn.functional.mse_loss(case.model(*case.inputs), case.target).item()
    assert nothing is None and whole is not None
    if pp == 1:
        assert loss == other == pytest.approx(expected)
    for name, buffer in case.model.named_buffers():
        torch.testing.assert_close(whole[name], buffer.to_dense())
