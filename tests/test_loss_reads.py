"""What a loss function reads of the model reaches the last stage, and gradients of it go back."""

from __future__ import annotations

import pytest
import torch
from models import Case
from odd_loss_models import LOSSES, REFUSED
from rank_pool import RankPool, RanksFailed

import partitioner as pt
from partitioner.errors import UnsupportedModelError
from partitioner.plan import Plan
from partitioner.shared import _OneWay

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
    case, found = (LOSSES | REFUSED)[name](), []
    with pt.materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
        for step in range(STEPS):
            stage.module.zero_grad()
            loss = float(stage.train_step(case.args[0] + step))
            own = {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}
            found.append((loss, own))
    return found


def planned(case: Case) -> Plan:
    plan = pt.partition(
        case.model, case.args, gpus=2, mesh={"pp": 2, "dp": 1}, loss_fn=case.loss_fn, microbatches=MICROBATCHES
    )
    assert plan.num_stages == 2
    return plan


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_loss_may_read_what_the_forward_left(ranks: RankPool, name: str) -> None:
    stages = ranks.run(2, on_a_rank, planned(LOSSES[name]()), name)
    for step, (loss, gradients) in enumerate(on_one_device(name)):
        held = dict[str, torch.Tensor]()
        for found in stages:
            assert found[step][0] == pytest.approx(loss, rel=1e-5)
            held |= found[step][1]
        assert held.keys() == gradients.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(held[key], gradient, rtol=1e-4, atol=1e-7)


def test_what_a_loss_begins_late_to_tell_the_first_layer_is_refused(ranks: RankPool) -> None:
    name = "first_layer_learns_of_the_loss"
    with pytest.raises(RanksFailed, match=r"the loss function of stage 1 changes '0.last'"):
        ranks.run(2, on_a_rank, planned(REFUSED[name]()), name)


def test_values_that_came_along_take_no_gradient() -> None:
    told = _OneWay.apply(torch.ones(2).requires_grad_(), "first.aux")
    assert told.tolist() == [1.0, 1.0]
    with pytest.raises(UnsupportedModelError, match=r"a gradient reaches what a layer .* left in 'first.aux'"):
        told.sum().backward()
