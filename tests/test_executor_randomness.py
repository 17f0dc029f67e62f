"""What a model draws on ranks: the same numbers can be drawn on one device, and then all else is the same too."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from plans import plan_of
from rank_pool import RankPool
from torch import nn

from partitioner.executor import materialize
from partitioner.executor.randomness import Randomness
from partitioner.plan import Plan

SEED, MICROBATCHES = 7, 2


class Noisy(nn.Module):
    """Draws in a layer, so in one stage alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(x) * (1 + random.random() + np.random.rand())
        return output


class Forced(nn.Module):
    """At each step its last output or the true one is the next input, by chance; with dropout in the last layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.noisy = nn.Linear(4, 4), Noisy()
        self.cell, self.out = nn.GRUCell(4, 4), nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        state = self.noisy(torch.tanh(self.encoder(x)))
        if np.random.rand() < 0.5:
            state = state * 1.5
        given, outputs = truth[:, 0], []
        for step in range(truth.shape[1]):
            state = self.cell(given, state)
            outputs.append(self.out(state))
            given = truth[:, step] if random.random() < 0.5 else outputs[-1]
        return torch.stack(outputs, 1)


def model() -> Forced:
    torch.manual_seed(0)
    return Forced().double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(*size, 4, generator=numbers).double() for size in ((8,), (8, 5))) for _ in range(4)]  # type: ignore[misc]


def on_ranks(plan: Plan) -> list[float]:
    with materialize(plan, model(), loss_fn=nn.MSELoss(), seed=SEED) as stage:
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        losses = []
        for x, truth in batches():
            x, truth = (one.chunk(stage.dp_size)[stage.dp_rank] for one in (x, truth))
            losses.append(float(stage.train_step((x, truth), truth)))
            optimizer.step(), optimizer.zero_grad()
        return losses


def on_one_device(num_replicas: int) -> list[float]:
    """The draws of each micro-batch of each replica, those of torch as on the last stage, which alone asks for any."""
    plain, last = model(), 1
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = []
    for call, (x, truth) in enumerate(batches(), start=1):
        total = 0.0
        for replica in range(num_replicas):
            drawn = Randomness(SEED, last, replica, torch.device("cpu"))
            own = [one.chunk(num_replicas)[replica].chunk(MICROBATCHES) for one in (x, truth)]
            for k, (some, aims) in enumerate(zip(*own, strict=True)):
                with drawn.of("F", call, k):
                    loss = nn.functional.mse_loss(plain(some, aims), aims) / (MICROBATCHES * num_replicas)
                loss.backward()
                total += loss.item()
        losses.append(total)
        optimizer.step(), optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("dp", [1, 2])
def test_one_device_that_draws_the_same_has_the_same_losses(ranks: RankPool, dp: int) -> None:
    random.seed(0)
    x, truth = batches()[0]
    plan = plan_of(model(), (x, truth), pp=2, dp=dp, microbatches=MICROBATCHES, cuts=["cell"], dtype="float64")
    per_rank = ranks.run(2 * dp, on_ranks, plan)
    assert per_rank == [pytest.approx(on_one_device(dp), rel=1e-12)] * (2 * dp)
    assert per_rank[0] != pytest.approx(on_one_device(3 - dp), rel=1e-3)  # other draws are other losses
