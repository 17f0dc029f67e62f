"""What a loss function reads of the model reaches the last stage, and gradients of it go back."""

from __future__ import annotations

import pytest
import torch
from odd_loss_models import LOSSES
from rank_pool import RankPool

import partitioner as pt
from partitioner.plan import Plan

STEPS, MICROBATCHES = 4, 2

Steps = list[tuple[float, dict[str, torch.Tensor]]]


def on_one_device(name: str) -> Steps:
    case, found = LOSSES[name](), []
    assert case.loss_fn is not None
    for step in range(STEPS):
        case.model.zero_grad()
        total = 0.0
        for part in (case.args[0] + step).chunk(MICROBATCHES):
            loss = case.loss_fn(case.model(part), None) / MICROBATCHES
            loss.backward()
            total += float(loss.detach())
        found.append((total, {n: p.grad.clone() for n, p in case.model.named_parameters() if p.grad is not None}))
    return found


def on_a_rank(plan: Plan, name: str) -> Steps:
    case, found = LOSSES[name](), []
    with pt.materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
        for step in range(STEPS):
            stage.module.zero_grad()
            loss = float(stage.train_step(case.args[0] + step))
            own = {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}
            found.append((loss, own))
    return found


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_loss_may_read_what_the_forward_left(ranks: RankPool, name: str) -> None:
    case = LOSSES[name]()
    plan = pt.partition(
        case.model, case.args, gpus=2, mesh={"pp": 2, "dp": 1}, loss_fn=case.loss_fn, microbatches=MICROBATCHES
    )
    assert plan.num_stages == 2
    stages = ranks.run(2, on_a_rank, plan, name)
    for step, (loss, gradients) in enumerate(on_one_device(name)):
        held = dict[str, torch.Tensor]()
        for found in stages:
            assert found[step][0] == pytest.approx(loss, rel=1e-5)
            held |= found[step][1]
        assert held.keys() == gradients.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(held[key], gradient, rtol=1e-4, atol=1e-7)
