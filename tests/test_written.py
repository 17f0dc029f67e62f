"""Forwards that write into parameters: one a step, with the numbers of one device, or of a copy for each replica."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from models import Case
from odd_models import D
from odder_models import ODDER
from rank_pool import RankPool
from torch import nn

import partitioner as pt
from partitioner.capture import capture
from partitioner.errors import ArgumentError, LossWarning
from partitioner.plan import Plan
from partitioner.restore import Weights, untouched

STEPS, RATE = 3, 0.05

Steps = list[tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]]

WRITTEN = {
    "momentum_teacher": "every",
    "a_teacher_in_every_block": "every",
    "weights_are_replaced_through_data": "every",
    "embedding_with_a_largest_norm": "every",
    "the_first_batch_sets_scales": "first",
}


def mean_square(output: torch.Tensor, _: object) -> torch.Tensor:
    return output.square().mean()


def written_case(name: str) -> Case:
    """With a batch of 8, and a loss that is the mean over samples."""
    case = ODDER[name]()
    torch.manual_seed(1)
    x = torch.randint(0, 20, (8, 3)) if name == "embedding_with_a_largest_norm" else torch.randn(8, D)
    return Case(case.model, (x,), loss_fn=None if name == "momentum_teacher" else mean_square)


def plan_of(name: str, pp: int, dp: int) -> Plan:
    case = written_case(name)
    with torch.random.fork_rng():
        return pt.partition(
            case.model, case.args, gpus=2, mesh={"pp": pp, "dp": dp}, shard="none", loss_fn=case.loss_fn
        )


def loss_of(case: Case, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(x)
    return output if case.loss_fn is None else case.loss_fn(output, None)


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad
                parameter.grad = None


def on_one_device(name: str, plan: Plan) -> Steps:
    """A copy of the model for each replica; what forwards make of weights is merged, first replica first."""
    case, found = written_case(name), []
    copies = [copy.deepcopy(case.model) for _ in range(plan.num_replicas)]
    for step in range(STEPS):
        before = {name: p.detach().clone() for name, p in copies[0].named_parameters()}
        total = 0.0
        for model, shard in zip(copies, (case.args[0].roll(step, 0)).chunk(plan.num_replicas), strict=True):
            for part in shard.chunk(plan.num_microbatches):
                loss = loss_of(case, model, part) / (plan.num_replicas * plan.num_microbatches)
                loss.backward()
                total += float(loss.detach())
        gradients = {}
        with torch.no_grad():
            for name, *same in zip(before, *(model.parameters() for model in copies), strict=True):
                grads = [p.grad for p in same if p.grad is not None]
                if grads:
                    gradients[name] = torch.stack(grads).sum(0)
                merged = before[name].clone()
                for p in reversed(same):
                    merged = torch.where(p != before[name], p, merged)
                for p in same:
                    p.copy_(merged)
                    p.grad = gradients[name].clone() if name in gradients else None
        for model in copies:
            descend(model)
        found.append((total, gradients, {n: p.detach().clone() for n, p in copies[0].named_parameters()}))
    return found


def on_a_rank(plan: Plan, name: str) -> Steps:
    case, found = written_case(name), []
    with pt.materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
        for step in range(STEPS):
            mine = case.args[0].roll(step, 0).chunk(stage.dp_size)[stage.dp_rank]
            loss = float(stage.train_step(mine))
            own = {name: p for name, p in stage.named_parameters() if name != "(inert)"}
            gradients = {name: p.grad.clone() for name, p in own.items() if p.grad is not None}
            with torch.no_grad():
                for parameter in own.values():
                    if parameter.grad is not None:
                        parameter -= RATE * parameter.grad
                        parameter.grad = None
            found.append((loss, gradients, {name: p.detach().clone() for name, p in own.items()}))
    return found


@pytest.mark.parametrize(("pp", "dp"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", list(WRITTEN))
def test_weights_that_the_forward_changes_are_as_on_one_device(ranks: RankPool, name: str, pp: int, dp: int) -> None:
    plan = plan_of(name, pp, dp)
    if WRITTEN[name] == "every":
        assert plan.num_microbatches == 1
    stages = ranks.run(2, on_a_rank, plan, name)
    for step, (loss, gradients, weights) in enumerate(on_one_device(name, plan)):
        for found in stages:
            assert found[step][0] == pytest.approx(loss, rel=1e-5)
            for held, expected in ((found[step][1], gradients), (found[step][2], weights)):
                for key, value in held.items():
                    torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-7)
        assert {key for found in stages for key in found[step][2]} == weights.keys()


@pytest.mark.parametrize("name", list(WRITTEN))
def test_planning_gives_them_back(name: str) -> None:
    case = written_case(name)
    before = {key: (p, p.data_ptr(), p.detach().clone()) for key, p in case.model.named_parameters()}
    captured = capture(case.model, case.args)
    for key, (parameter, memory, value) in before.items():
        assert case.model.get_parameter(key) is parameter
        assert parameter.data_ptr() == memory
        assert torch.equal(parameter, value)
    written = {one.written for one in captured.parameters}
    assert written - {""} == {WRITTEN[name]}


def test_more_micro_batches_are_refused_with_the_way_out() -> None:
    case = written_case("momentum_teacher")
    with pytest.raises(ArgumentError, match=r"changes the parameters teacher.*4 times a step.*microbatches=1"):
        pt.partition(case.model, case.args, gpus=2, microbatches=4)


def test_the_plan_says_so() -> None:
    assert any("changes the parameters teacher" in why for why in plan_of("momentum_teacher", 1, 2).why)


def test_what_a_first_batch_sets_is_warned_of_and_nothing_else_is() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = plan_of("the_first_batch_sets_scales", 1, 2)
    told = [str(one.message) for one in caught if issubclass(one.category, LossWarning)]
    assert len(told) == 1
    assert told[0].startswith("the first forward sets the parameters 0.shift")
    assert told[0] in plan.why


def test_weights_given_other_memory_get_their_own_back() -> None:
    layer = nn.Linear(3, 3)
    memory, value = layer.weight.data_ptr(), layer.weight.detach().clone()

    def change(how: Callable[[], object]) -> None:
        with untouched(layer, Weights([layer.weight])), torch.no_grad():
            how()
        assert layer.weight.data_ptr() == memory
        assert torch.equal(layer.weight, value)

    change(lambda: layer.weight.mul_(2))
    change(lambda: setattr(layer.weight, "data", torch.zeros(3, 3)))
