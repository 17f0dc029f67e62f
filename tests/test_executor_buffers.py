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
