"""Training on ranks gives the numbers of one device: loss, gradients, weights, whatever the mesh and the schedule."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import models
import numpy as np
import pytest
import torch
from models import Case
from plans import joined, plan_for, plan_of
from rank_pool import RankPool, RanksFailed
from torch import nn
from torch.nn import functional as F

import partitioner as pt
from partitioner.actions import Action
from partitioner.errors import ArgumentError, PlanMismatchError
from partitioner.executor import materialize
from partitioner.losses import Loss
from partitioner.microbatches import Cutter, as_call
from partitioner.plan import Plan
from partitioner.specs import Counted, LossRule, Shard

TOLERANCE = 1e-5


def mlp(width: int = 16, depth: int = 4, batch: int = 8) -> Case:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    x, y = torch.randn(batch, width), torch.randint(0, width, (batch,))
    return Case(nn.Sequential(*layers), (x,), target=y, loss_fn=nn.CrossEntropyLoss())


def step_on_ranks(
    plan: Plan,
    model: nn.Module,
    batches: list[tuple[Any, Any]],
    loss_fn: Callable[..., Any] | None = None,
    zero_grad: bool = True,
    learning_rate: float = 0.05,
    max_norm: float | None = None,
    **how: Any,
) -> dict[str, Any]:
    """On a rank: train on each batch (cut over replicas); losses, first step's gradients, final weights."""
    with materialize(plan, model, loss_fn=loss_fn, **how) as stage:
        optimizer = torch.optim.SGD(stage.parameters(), learning_rate)
        losses, norms, gradients = [], [], {}
        for k, (inputs, target) in enumerate(batches):
            args, kwargs = as_call(inputs)
            part = Cutter(plan.training.batch_dim).cut(args, kwargs, target, stage.dp_size)[stage.dp_rank]
            losses.append(stage.train_step(part.kwargs if kwargs else part.args, part.target))
            if max_norm is not None:
                norms.append(float(stage.clip_grad_norm_(max_norm)))
            if k == 0 or not zero_grad:
                gradients = {n: p.grad.clone() for n, p in stage.named_parameters() if p.grad is not None}
            if zero_grad:
                optimizer.step()
                optimizer.zero_grad()
        weights = {n: p.detach().clone() for n, p in stage.named_parameters() if n != "(inert)"}
        assert all(loss.dim() == 0 and not loss.requires_grad for loss in losses)
        return {"losses": [float(v) for v in losses], "norms": norms, "gradients": gradients, "weights": weights}


def step_on_one_device(
    model: nn.Module,
    batches: list[tuple[Any, Any]],
    loss_fn: Callable[..., Any] | None = None,
    zero_grad: bool = True,
    learning_rate: float = 0.05,
    max_norm: float | None = None,
) -> dict[str, Any]:
    """The same on this process, whole batches at once, the way it is always written."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    losses, norms, gradients = [], [], {}
    for k, (inputs, target) in enumerate(batches):
        args, kwargs = as_call(inputs)
        loss = Loss(model, loss_fn, None).of(model(*args, **kwargs), target)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        if k == 0 or not zero_grad:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if zero_grad:
            optimizer.step()
            optimizer.zero_grad()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        allowed = TOLERANCE * max(float(tensor.abs().max()), 1e-4 * largest)
        error = float((got[name] - tensor).abs().max())
        assert error <= allowed, f"{name}: off by {error:.2e}, allowed {allowed:.2e}"


def assert_same(ranks: RankPool, plan: Plan, model: nn.Module, batches: list[Any], loss_fn: Any, **how: Any) -> None:
    expected = step_on_one_device(model, batches, loss_fn, **how)
    got = ranks.run(plan.num_ranks, step_on_ranks, plan, model, batches, loss_fn, *how.values())
    for rank in got:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert_close(joined([rank["gradients"] for rank in got]), expected["gradients"])
    assert_close(joined([rank["weights"] for rank in got]), expected["weights"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (4, 1), (1, 2), (2, 2), (1, 4)])
def test_three_steps_are_those_of_one_device(ranks: RankPool, pp: int, dp: int, schedule: str) -> None:
    case = mlp()
    plan = plan_for(case, pp=pp, dp=dp, microbatches=3, schedule=schedule)
    batches = [(torch.randn(16, 16), torch.randint(0, 16, (16,))) for _ in range(3)]
    assert_same(ranks, plan, case.model, batches, case.loss_fn)


class OnGraph(nn.Module):
    """Features are mixed along the edges of a graph, which is a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("edges", (torch.eye(6).roll(1, 0) + 0.5 * torch.eye(6)).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sparse.mm(self.edges, torch.tanh(self.a(x)).T).T
        return torch.sparse.mm(self.edges, self.b(x).T).T


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (1, 2)])
def test_buffers_may_be_sparse(ranks: RankPool, pp: int, dp: int) -> None:
    batches = [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(2)]
    case = Case(OnGraph(), batches[0][0], target=batches[0][1], loss_fn=nn.MSELoss())
    assert_same(ranks, plan_for(case, pp=pp, dp=dp, microbatches=2), case.model, batches, case.loss_fn)


def order_on_ranks(plan: Plan, model: nn.Module, batch: tuple[Any, Any], loss_fn: Any) -> list[tuple[int, str, int]]:
    """On a rank: train once; what it ran, in order."""
    with materialize(plan, model, loss_fn=loss_fn) as stage:
        stage.train_step(*batch)
        spans = [s for s in stage.timeline().spans if s.rank == stage.rank and s.kind in ("F", "B")]
        return [(s.stage, s.kind, s.microbatch) for s in sorted(spans, key=lambda s: s.start_s)]


def test_a_plans_own_order_is_the_one_that_ranks_walk(ranks: RankPool) -> None:
    """Rank 0 runs ahead as far as it can, rank 1 takes turns."""
    case = mlp()
    plan = plan_for(case, pp=2, microbatches=3, schedule="1f1b")
    own = ("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    plan = Plan.model_validate(plan.model_dump() | {"orders": own})
    batches = [(torch.randn(9, 16), torch.randint(0, 16, (9,))) for _ in range(2)]
    assert_same(ranks, plan, case.model, batches, case.loss_fn)
    ran = ranks.run(2, order_on_ranks, plan, case.model, batches[0], case.loss_fn)
    assert [[str(Action(*one)) for one in rank] for rank in ran] == [order.split() for order in own]


@pytest.mark.parametrize(
    ("name", "pp", "dp"),
    [("gpt2", 4, 1), ("bert", 2, 2), ("bert", 1, 3), ("unet", 3, 1), ("lstm", 3, 1), ("t5", 3, 1), ("tied", 2, 2)],
)
def test_real_models_give_one_devices_numbers(ranks: RankPool, name: str, pp: int, dp: int) -> None:
    """Tied weights, skips over stages, state in tuples, labels of -100 unevenly over micro-batches and replicas."""
    case = models.build(name)
    if name == "bert":
        assert case.kwargs is not None
        case.kwargs["labels"][:3] = -100
        case.kwargs["labels"][3:, 5:] = -100
    plan = plan_for(case, pp=pp, dp=dp, microbatches=2)
    assert_same(ranks, plan, case.model, [(case.inputs, case.target)] * 2, case.loss_fn)


def test_shapes_may_change_from_step_to_step(ranks: RankPool) -> None:
    case = models.build("gpt2")
    plan = plan_for(case, pp=2, microbatches=2)
    ids = [torch.randint(3, 101, shape) for shape in ((8, 12), (8, 7), (3, 20), (8, 12))]
    assert_same(ranks, plan, case.model, [({"input_ids": x, "labels": x}, None) for x in ids], None)


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (2, 2), (1, 2)])
def test_accumulating_over_two_steps_adds_up(ranks: RankPool, pp: int, dp: int) -> None:
    case = models.build("tied")
    plan = plan_for(case, pp=pp, dp=dp, microbatches=2)
    other = torch.randint(0, 31, (8, 6))
    assert_same(ranks, plan, case.model, [(case.inputs, case.target), ((other,), other)], case.loss_fn, zero_grad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_counts_a_shared_parameter_once_and_clips_like_torch(ranks: RankPool, dtype: torch.dtype) -> None:
    case = models.build("tied")
    case.model.to(dtype)
    plan = plan_for(case, pp=2, dp=2, microbatches=2)
    batches = [(case.inputs, case.target)] * 3
    assert_same(ranks, plan, case.model, batches, case.loss_fn, zero_grad=True, learning_rate=0.1, max_norm=0.3)


@pytest.mark.parametrize(
    ("name", "shard", "dp"),
    [
        ("tied", ("zero2", "zero1"), 2),
        ("tied", ("none", "zero2"), 2),
        ("bert", ("zero2", "none"), 2),
        ("tied", ("zero1",), 4),
        ("tied", ("zero2",), 3),
    ],
)
def test_stages_whose_replicas_divide_their_training_give_one_devices_numbers(
    ranks: RankPool, name: str, shard: tuple[Shard, ...], dp: int
) -> None:
    """Each stage its own level, tied parameters over both, clipped, over several steps."""
    case = models.build(name)
    if name == "bert":
        assert case.kwargs is not None
        case.kwargs["labels"][:3] = -100
    plan = plan_for(case, pp=len(shard), dp=dp, microbatches=2, shard=shard)
    batches = [(case.inputs, case.target)] * 3
    assert_same(ranks, plan, case.model, batches, case.loss_fn, zero_grad=True, learning_rate=0.1, max_norm=0.3)
    assert_same(ranks, plan, case.model, batches[:2], case.loss_fn, zero_grad=False)


def kept_on_ranks(plan: Plan, case: Case) -> tuple[list[str], int, dict[str, torch.Tensor]]:
    """On a rank: train; what it keeps up to date, how many have optimizer state there, the stage's weights."""
    with materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
        optimizer = torch.optim.AdamW(stage.parameters(), 0.01)
        part = Cutter().cut(case.args, {}, case.target, stage.dp_size)[stage.dp_rank]
        stage.train_step(part.args, part.target)
        own = dict(stage.module.named_parameters())
        assert all((own[n].grad is None) == (n not in dict(stage.named_parameters())) for n in stage.state_dict())
        optimizer.step()
        names, entries = [name for name, _ in stage.named_parameters()], len(optimizer.state)
        state = {name: value.clone() for name, value in stage.state_dict().items()}
    return names, entries, state


def test_each_parameter_has_its_optimizer_state_on_one_replica_and_its_new_value_on_all(ranks: RankPool) -> None:
    case = mlp()
    plan = plan_for(case, pp=2, dp=2, shard=("zero2", "none"), cuts=["4"])
    first, second, third, fourth = ranks.run(4, kept_on_ranks, plan, case)
    assert not {*first[0]} & {*second[0]} and {*first[0], *second[0]} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert first[1] == second[1] == 2 and third[1] == fourth[1] == 4 and third[0] == fourth[0]
    for one, other in ((first, second), (third, fourth)):
        assert one[2].keys() == other[2].keys() and all(torch.equal(one[2][name], other[2][name]) for name in one[2])
        assert not any(torch.equal(value, case.model.state_dict()[name]) for name, value in one[2].items())


def closed_on_ranks(plan: Plan, case: Case) -> dict[str, torch.Tensor]:
    stage = materialize(plan, case.model, loss_fn=case.loss_fn)
    part = Cutter(0).cut(case.args, {}, case.target, stage.dp_size)[stage.dp_rank]
    stage.train_step(part.args, part.target)
    torch.optim.SGD(stage.parameters(), 0.05).step()
    stage.close()
    stage.close()
    assert all(torch.equal(value, stage.module.state_dict()[name]) for name, value in stage.state_dict().items())
    return {name: parameter.detach().clone() for name, parameter in stage.module.named_parameters()}


@pytest.mark.parametrize("level", ["zero1", "zero2"])
def test_a_stage_that_is_closed_leaves_the_new_values_on_all_replicas(ranks: RankPool, level: Shard) -> None:
    case = mlp()
    plan = plan_for(case, pp=1, dp=2, shard=(level,))
    expected = step_on_one_device(case.model, [(case.inputs, case.target)], case.loss_fn)["weights"]
    for weights in ranks.run(2, closed_on_ranks, plan, case):
        assert_close(weights, expected)


def unfrozen_on_ranks(plan: Plan, case: Case) -> None:
    case.model[2].weight.requires_grad_(False)
    with materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
        part = Cutter(0).cut(case.args, {}, case.target, stage.dp_size)[stage.dp_rank]
        stage.train_step(part.args, part.target)
        case.model[2].weight.requires_grad_(True)
        stage.train_step(part.args, part.target)


@pytest.mark.parametrize("level", ["none", "zero1", "zero2"])
def test_a_parameter_that_is_unfrozen_later_is_refused_where_its_gradient_would_not_be_summed(
    ranks: RankPool, level: Shard
) -> None:
    case = mlp()
    case.model[2].weight.requires_grad_(False)
    plan = plan_for(case, pp=1, dp=2, shard=(level,))
    with pytest.raises(RanksFailed) as failed:
        ranks.run(2, unfrozen_on_ranks, plan, case)
    assert any(isinstance(error, ArgumentError) and "2.weight" in str(error) for error in failed.value.errors.values())


@pytest.mark.parametrize(
    ("size", "pp", "shard"),
    [
        (13, 2, None),
        (5, 2, None),
        (2, 2, None),
        (5, 1, ("zero2",)),
        (3, 2, ("zero2", "none")),
        (5, 2, ("none", "zero2")),
    ],
)
def test_batches_that_do_not_divide_are_weighted_by_samples(
    ranks: RankPool, size: int, pp: int, shard: tuple[Shard, ...] | None
) -> None:
    """Of 5 samples one replica has 3 micro-batches, the other 2."""
    case = mlp()
    plan = plan_for(case, pp=pp, dp=2, microbatches=4, shard=shard)
    assert_same(ranks, plan, case.model, [(torch.randn(size, 16), torch.randint(0, 16, (size,)))], case.loss_fn)


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (2, 2), (1, 2)])
def test_a_micro_batch_without_a_valid_label_counts_for_nothing(ranks: RankPool, pp: int, dp: int) -> None:
    """Micro-batches and whole replicas without any valid label are NaN alone; one device sees the whole batch."""
    case = mlp()
    target = torch.full((8,), -100)
    target[:2] = torch.tensor([3, 5])
    plan = plan_for(case, pp=pp, dp=dp, microbatches=4)
    assert_same(ranks, plan, case.model, [(case.inputs, target)], case.loss_fn)
    last_only = torch.full((8,), -100)
    last_only[7] = 1
    assert_same(ranks, plan, case.model, [(case.inputs, last_only)], case.loss_fn)


def test_a_batch_without_any_valid_label_has_no_loss_and_no_gradient(ranks: RankPool) -> None:
    case = mlp()
    plan = plan_for(case, pp=2, microbatches=2)
    batch = [(case.inputs, torch.full((8,), -100))]
    for rank in ranks.run(2, step_on_ranks, plan, case.model, batch, case.loss_fn):
        assert np.isnan(rank["losses"][0]) and rank["gradients"] == {}


def told_on_rank(plan: Plan, model: nn.Module, whole: bool, loss_fn: Any) -> list[str]:
    x, y = torch.randn(8, 16), torch.randint(0, 16, (8,))
    with materialize(plan, model, loss_fn=loss_fn) as stage, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = slice(None) if whole else slice(stage.dp_rank, None, stage.dp_size)
        for _ in range(2):
            stage.train_step(x[mine], y[mine])
    return [str(one.message) for one in caught]


def test_a_replica_that_gets_the_whole_batch_says_so_once(ranks: RankPool) -> None:
    case = mlp()
    plan = plan_for(case, pp=1, dp=2, microbatches=2)
    assert ranks.run(2, told_on_rank, plan, case.model, False, case.loss_fn) == [[], []]
    for rank, told in enumerate(ranks.run(2, told_on_rank, plan, case.model, True, case.loss_fn)):
        assert len(told) == 1 and f"replica {rank} of 2 was given 8 samples" in told[0] and "share is 4" in told[0]


def mean_over_a_mask(output: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    wanted, mask = target
    return (F.cross_entropy(output, wanted, reduction="none") * mask).sum() / mask.sum()


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (1, 2)])
def test_a_mean_over_a_mask_is_that_of_the_whole_batch(ranks: RankPool, pp: int, dp: int) -> None:
    case = mlp()
    plan = plan_for(case, pp=pp, dp=dp, microbatches=4 // dp)
    rule = LossRule(loss="mean_over_a_mask", how=Counted(argument="target", tensor=1))
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"loss_rule": rule})})
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])  # the last micro-batch has none: NaN alone
    target = (torch.arange(8), mask)
    whole = copy.deepcopy(case.model)
    expected = mean_over_a_mask(whole(*as_call(case.inputs)[0]), target)
    expected.backward()
    found = ranks.run(pp * dp, step_on_ranks, plan, case.model, [(case.inputs, target)], mean_over_a_mask)
    assert found[0]["losses"][0] == pytest.approx(float(expected.detach()), rel=1e-6)
    gradients = joined([rank["gradients"] for rank in found])
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


class Routed(nn.Module):
    """Each batch goes through one of two experts; a third is never used, and the first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.frozen.weight.copy_(torch.eye(8))
        self.frozen.bias.zero_()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x)
        x = self.experts[0](x) if bool(x[0, 0] > 0) else self.experts[1](x)
        output: torch.Tensor = self.last(x)
        return output


@pytest.mark.parametrize(("pp", "dp"), [(2, 2), (1, 2), (3, 1)])
def test_parameters_without_a_gradient_on_some_ranks(ranks: RankPool, pp: int, dp: int) -> None:
    torch.manual_seed(0)
    model = Routed()
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    x[0, 0], x[4, 0] = 1.0, 1.0  # all micro-batches go to expert 0
    x[2, 0], x[6, 0] = 1.0, 1.0
    cuts = {1: [], 2: ["last"], 3: ["experts.0", "last"]}[pp]
    plan = plan_of(model, (x,), pp=pp, dp=dp, microbatches=2, cuts=cuts)
    assert_same(ranks, plan, model, [(x, y)], F.mse_loss)


class Router(nn.Module):
    """Sends a micro-batch through the expert that its first number chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.experts[int(x[0, 0])](x)
        return output


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(("pp", "dp"), [(2, 2), (1, 2), (2, 1)])
def test_micro_batches_and_replicas_that_use_different_parameters(
    ranks: RankPool, pp: int, dp: int, steps: int
) -> None:
    """Also where the last micro-batch, in whose backward replicas are reduced, leaves out what an earlier one used."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(Router(), nn.Linear(8, 8)), torch.randn(8, 8), torch.randn(8, 8)
    x[0, 0], x[2, 0], x[4, 0], x[6, 0] = 0.0, 1.0, 0.0, 0.0  # the four micro-batches' experts
    plan = plan_of(model, (x,), pp=pp, dp=dp, microbatches=4 // dp, cuts=["1"][: pp - 1])
    got = ranks.run(plan.num_ranks, step_on_ranks, plan, model, [(x, y)] * steps, F.mse_loss, False)
    for k in range(0, 8, 2):
        loss = F.mse_loss(model(x[k : k + 2]), y[k : k + 2]) * steps / 4
        loss.backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(expected) == 6
    assert_close(joined([rank["gradients"] for rank in got]), expected)


def test_a_stage_without_trainable_parameters_feeds_the_same_optimizer_line(ranks: RankPool) -> None:
    def names() -> list[str]:
        with materialize(plan, model, loss_fn=F.mse_loss) as stage:
            optimizer = torch.optim.AdamW(stage.parameters())
            stage.train_step((x,), x)
            optimizer.step()
            return [name for name, _ in stage.named_parameters()]

    torch.manual_seed(0)
    model, x = Routed(), torch.randn(4, 8)
    x[:, 0] = 1.0
    plan = plan_of(model, (x,), cuts=["experts.0"])
    first, second = ranks.run(2, names)
    assert first[-1] == "(inert)" and {"frozen.weight", "frozen.bias"} <= set(first)
    assert "(inert)" not in second and "last.weight" in second


def test_outputs_are_those_of_one_call(ranks: RankPool) -> None:
    def outputs() -> tuple[Any, Any, Any]:
        with materialize(plan, model) as stage:
            stage.train_step(case.inputs)
            trained = stage.last_output
            evaluated = stage.eval_step(case.inputs)
            logits = stage.eval_step({"input_ids": case.inputs["input_ids"]})
            return trained, evaluated, logits

    case = models.build("gpt2")
    model = case.model
    plan = plan_for(case, pp=2, dp=2, microbatches=2)
    got = ranks.run(4, outputs)
    assert [answer[1] is None for answer in got] == [True, True, False, False]
    with torch.no_grad():
        expected = model(**case.inputs)
    for trained, evaluated, logits in got[2:]:
        torch.testing.assert_close(trained.logits, expected.logits)
        torch.testing.assert_close(evaluated.logits, expected.logits)
        torch.testing.assert_close(evaluated.loss, expected.loss)
        torch.testing.assert_close(logits.logits, expected.logits)
        assert logits.loss is None and not trained.logits.requires_grad


def test_a_plan_for_inference_evaluates_and_refuses_to_train(ranks: RankPool) -> None:
    def outputs() -> tuple[Any, str]:
        with materialize(plan, model, loss_fn=case.loss_fn) as stage:
            found = stage.eval_step(case.inputs)
            with pytest.raises(ArgumentError) as refused:
                stage.train_step(case.inputs, case.target)
            return found, str(refused.value)

    case = mlp()
    model = case.model
    plan = plan_for(case, pp=2, microbatches=2)
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"objective": "latency"})})
    (first, said), (last, _) = ranks.run(2, outputs)
    with torch.no_grad():
        torch.testing.assert_close(last, model(*case.inputs))
    assert first is None and "use eval_step" in said


def test_world_size_one_needs_no_other_process() -> None:
    case = mlp()
    plan = plan_for(case, pp=1, microbatches=4)
    expected = step_on_one_device(case.model, [(case.inputs, case.target)] * 2, case.loss_fn)
    got = step_on_ranks(plan, copy.deepcopy(case.model), [(case.inputs, case.target)] * 2, case.loss_fn)
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert_close(got["weights"], expected["weights"])
    assert not torch.distributed.is_initialized()


def test_a_process_group_of_the_caller_is_used_and_left_alone(ranks: RankPool) -> None:
    def twice() -> list[float]:
        torch.distributed.init_process_group("gloo")
        losses = []
        for _ in range(2):
            with materialize(plan, copy.deepcopy(case.model), loss_fn=case.loss_fn) as stage:
                losses.append(float(stage.train_step(case.inputs, case.target)))
        total = torch.ones(())
        torch.distributed.all_reduce(total)
        return [*losses, float(total)]

    case = mlp()
    plan = plan_for(case, pp=2)
    first, second = ranks.run(2, twice)
    assert first == second and first[0] == first[1] and first[2] == 2.0


def test_double_precision_stays_double(ranks: RankPool) -> None:
    case = mlp()
    model, x = case.model.double(), case.args[0].double()
    plan = plan_of(model, (x,), microbatches=2, dtype="float64")
    expected = step_on_one_device(model, [(x, case.target)], case.loss_fn)
    got = ranks.run(2, step_on_ranks, plan, model, [(x, case.target)], case.loss_fn)
    assert all(rank["losses"] == pytest.approx(expected["losses"], rel=1e-13) for rank in got)
    for name, gradient in joined([rank["gradients"] for rank in got]).items():
        torch.testing.assert_close(gradient, expected["gradients"][name], rtol=1e-12, atol=1e-14)


def test_samples_along_another_dimension(ranks: RankPool) -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.GRU(4, 4)
            self.second = nn.GRU(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.second(self.first(x)[0])[0]
            return output

    torch.manual_seed(0)
    model, x, y = Sequence(), torch.randn(5, 8, 4), torch.randn(5, 8, 4)
    plan = plan_of(model, (x,), microbatches=4, batch_dim=1)
    assert_same(ranks, plan, model, [(x, y)], F.mse_loss)


class Keeping(nn.Module):
    """Given the state that a batch before has left, whose samples lie along dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.GRU(4, 4, num_layers=2, batch_first=True)
        self.middle = nn.Linear(4, 4)
        self.second = nn.GRU(4, 4, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        y, state = self.first(x, state)
        output: torch.Tensor = self.second(self.middle(y), state)[0]
        return output


class Translating(nn.Module):
    """Sequences before samples; a mask as large as a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return x


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize(
    ("make", "inputs", "target", "dims"),
    [
        (Keeping, lambda: (torch.randn(8, 5, 4), torch.randn(2, 8, 4)), lambda: torch.randn(8, 5, 4), {"state": 1}),
        (
            Translating,
            lambda: (torch.randn(8, 8, 8), torch.triu(torch.full((8, 8), float("-inf")), 1)),
            lambda: torch.randn(8, 8, 8),
            {"*": 1, "mask": None},
        ),
    ],
)
def test_samples_that_lie_elsewhere_in_some_arguments_are_said_once(
    ranks: RankPool, make: Any, inputs: Any, target: Any, dims: Any, pp: int, dp: int
) -> None:
    torch.manual_seed(0)
    model, x, y = make(), inputs(), target()
    common: dict[str, Any] = {"loss_fn": F.mse_loss, "example_target": y, "mesh": {"pp": pp, "dp": dp}}
    plan = pt.partition(model, x, gpus=2, microbatches=2, batch_dim=dims, **common)
    assert plan.num_stages == pp
    assert_same(ranks, pt.Plan.model_validate_json(plan.model_dump_json()), model, [(x, y)], F.mse_loss)


def test_an_argument_whose_samples_lie_elsewhere_is_named() -> None:
    model, x, y = Keeping(), (torch.randn(8, 5, 4), torch.randn(2, 8, 4)), torch.randn(8, 5, 4)
    common: dict[str, Any] = {"gpus": 2, "loss_fn": F.mse_loss, "example_target": y}
    with pytest.raises(ArgumentError, match=r"batch_dim=\{'state': 1\}"):
        pt.partition(model, x, **common)
    with pytest.raises(ArgumentError, match=r"has no argument 'hx'; it has x, state"):
        pt.partition(model, x, batch_dim={"hx": 1}, **common)
    with pytest.raises(ArgumentError, match=r"True of 'state' is no dimension"):
        pt.partition(model, x, batch_dim={"state": True}, **common)


class Dropping(nn.Module):
    """Dropout in each block, and a choice of activation by Python's and numpy's coins."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            scale = 2.0 if random.random() < 0.5 else 1.0
            shift = 1.0 if np.random.rand() < 0.5 else 0.0
            x = x + F.dropout(block(x) * scale + shift, 0.5)
        return x


def test_randomness_is_repeatable_for_a_seed_and_other_than_the_callers(ranks: RankPool) -> None:
    def losses(seed: int) -> list[float]:
        torch.manual_seed(seed)
        random.seed(1), np.random.seed(1)
        with materialize(plan, model, loss_fn=F.mse_loss) as stage:
            found = [float(stage.train_step((x,), x)) for _ in range(6)]
        torch.manual_seed(seed)
        state = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
        random.seed(1), np.random.seed(1)
        assert torch.equal(state[0], torch.get_rng_state())
        assert state[1:] == (random.getstate(), str(np.random.get_state()))
        return found

    model, x = Dropping(), torch.randn(8, 8)
    plan = plan_of(model, (x,), microbatches=2)
    first, again, other = ranks.run(2, losses, 5), ranks.run(2, losses, 5), ranks.run(2, losses, 6)
    assert first == again != other and first[0] == first[1]
    assert len(set(first[0])) == 6


def test_dropout_masks_differ_between_stages_replicas_micro_batches_and_steps(ranks: RankPool) -> None:
    def masks() -> list[list[int]]:
        seen: list[list[int]] = []

        def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            seen.append((output != 0).int().flatten().tolist())

        for block in model:
            if isinstance(block, nn.Dropout):
                block.register_forward_hook(note)
        with materialize(plan, model, loss_fn=F.mse_loss) as stage:
            for _ in range(2):
                stage.train_step((torch.ones(4, 64),), torch.ones(4, 64))
        return seen

    model = nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Identity(), nn.Dropout(0.5), nn.Linear(64, 64))
    plan = plan_of(model, (torch.ones(4, 64),), dp=2, microbatches=2, cuts=["2"])
    found = [mask for rank in ranks.run(4, masks) for mask in rank]
    assert len(found) == 4 * 4 and len({tuple(mask) for mask in found}) == len(found)


def test_ranks_of_a_replica_that_get_other_batches_are_named(ranks: RankPool) -> None:
    def step() -> None:
        import os

        with materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
            batch = torch.ones(8, 16) if os.environ["RANK"] == "2" else torch.zeros(8, 16)
            stage.train_step((batch,), case.target)

    case = mlp()
    plan = plan_for(case, pp=4)
    with pytest.raises(RanksFailed) as failure:
        ranks.run(4, step)
    assert len(failure.value.errors) == 4
    for error in failure.value.errors.values():
        assert isinstance(error, ArgumentError) and "rank 2 got another batch than rank 0" in str(error)


@pytest.mark.parametrize(("pp", "dp"), [(1, 2), (2, 1)])
def test_a_model_whose_modules_come_in_another_order_is_refused_on_all_ranks(ranks: RankPool, pp: int, dp: int) -> None:
    """As where it is built from a set, under another PYTHONHASHSEED: gradients would be added to others' silently."""

    class Branches(nn.Module):
        def __init__(self, names: list[str]) -> None:
            super().__init__()
            self.branches = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
            self.last = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.last(sum(self.branches[name](x) for name in sorted(self.branches)))
            return output

    def step() -> None:
        import os

        names = ["a", "b"] if os.environ["RANK"] == "0" else ["b", "a"]
        with materialize(plan, Branches(names), loss_fn=F.mse_loss) as stage:
            stage.train_step((torch.ones(4, 4),), torch.ones(4, 4))

    plan = plan_of(Branches(["a", "b"]), (torch.ones(4, 4),), pp=pp, dp=dp, cuts=["last"][: pp - 1])
    with pytest.raises(RanksFailed) as failure:
        ranks.run(2, step)
    assert len(failure.value.errors) == 2
    for error in failure.value.errors.values():
        assert isinstance(error, PlanMismatchError) and "PYTHONHASHSEED=0 torchrun" in str(error)


@pytest.mark.parametrize("lengths", [(12, 7, 20), (7, 7, 3)])
def test_micro_batches_and_steps_of_other_shapes_and_fewer_samples_than_micro_batches(
    ranks: RankPool, lengths: tuple[int, ...]
) -> None:
    """Layouts that the ranks have agreed on no longer hold: sizes 3, 2 and 2, then 1 and 1, other lengths, and back."""
    case = models.build("gpt2")
    plan = plan_for(case, pp=2, dp=2, microbatches=3, schedule="gpipe")
    sizes = (14, 4, 14)
    ids = [torch.randint(3, 101, (size, length)) for size, length in zip(sizes, lengths, strict=True)]
    assert_same(ranks, plan, case.model, [({"input_ids": x, "labels": x}, None) for x in ids], None)


def test_the_sampler_gives_each_replica_its_own_share(ranks: RankPool) -> None:
    def samples() -> list[int]:
        with materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
            return list(stage.sampler(list(range(20))))  # type: ignore[arg-type]

    case = mlp()
    plan = plan_for(case, pp=2, dp=2)
    first, second, third, fourth = ranks.run(4, samples)
    assert first == third and second == fourth and sorted(first + second) == list(range(20))


def test_a_wrong_number_of_processes_fails_before_anything_is_sent(ranks: RankPool) -> None:
    def start() -> None:
        try:
            materialize(plan, case.model, loss_fn=case.loss_fn)
        finally:
            assert not torch.distributed.is_initialized()

    case = mlp()
    plan = plan_for(case, pp=2, dp=2)
    with pytest.raises(RanksFailed) as failure:
        ranks.run(3, start)
    for error in failure.value.errors.values():
        assert isinstance(error, PlanMismatchError)
        assert "4 ranks (2 stages x 2 replicas), but 3 processes" in str(error)
    with pytest.raises(PlanMismatchError, match=r"2 ranks .* but 1 process was started.*nproc-per-node 2"):
        materialize(plan_for(case, pp=2), case.model)


def test_a_stage_without_parameters_has_a_timeline_too(ranks: RankPool) -> None:
    def timeline() -> Any:
        with materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
            stage.train_step(case.inputs, case.target)
            return stage.timeline()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    case = Case(model, (torch.randn(16, 16),), target=torch.randn(16, 16), loss_fn=nn.functional.mse_loss)
    plan = plan_for(case, pp=3, microbatches=2)
    assert plan.stages[1].layers == ("1",)
    got = ranks.run(3, timeline)[0]
    assert {span.rank for span in got.spans if span.kind in ("F", "B")} == {0, 1, 2}


def test_the_timeline_shows_every_action_of_every_rank_in_order(ranks: RankPool) -> None:
    def timeline() -> Any:
        with materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
            optimizer = torch.optim.SGD(stage.parameters(), 0.1)
            for _ in range(2):
                stage.train_step(case.inputs, case.target)
                optimizer.step()
            return stage.timeline()

    case = mlp()
    plan = plan_for(case, pp=2, dp=2, microbatches=3)
    got = ranks.run(4, timeline)
    assert all(timeline == got[0] for timeline in got) and got[0].measured and got[0].num_ranks == 4
    for rank in range(4):
        spans = sorted((s for s in got[0].spans if s.rank == rank and s.kind != "send"), key=lambda s: s.start_s)
        order = [f"{s.kind}{s.microbatch}" for s in spans if s.kind in ("F", "B")]
        expected = ["F0", "F1", "B0", "F2", "B1", "B2"] if rank < 2 else ["F0", "B0", "F1", "B1", "F2", "B2"]
        assert order == expected and {s.stage for s in spans} == {rank // 2}
        assert [s.kind for s in spans if s.microbatch < 0] == ["sync", "optimizer"]
        sync = next(s for s in spans if s.kind == "sync")
        others = [s for s in got[0].spans if s.kind == "B" and s.rank in (rank, rank ^ 1)]
        assert all(sync.start_s >= s.end_s for s in others)
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
    times = {(s.rank, s.kind, s.microbatch): s for s in got[0].spans}
    for k in range(3):
        assert times[0, "F", k].end_s <= times[2, "F", k].start_s
        assert times[2, "B", k].end_s <= times[0, "B", k].start_s
        assert times[0, "send", k].end_s <= times[2, "F", k].start_s
    assert min(s.start_s for s in got[0].spans) == 0.0


class Clamping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp_(-0.5, 0.5)


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_target_in_the_memory_of_inputs_that_are_written_is_refused(ranks: RankPool, is_copy: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Clamping(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    x = torch.randn(8, 6)
    case = Case(model, (x,), target=x.clone(), loss_fn=nn.functional.mse_loss)
    plan = plan_for(case, pp=2, microbatches=2)
    batch = ((x,), x.clone() if is_copy else x)
    if is_copy:
        ranks.run(2, step_on_ranks, plan, model, [batch], case.loss_fn)
        return
    with pytest.raises(RanksFailed, match="the target lies in their memory"):
        ranks.run(2, step_on_ranks, plan, model, [batch], case.loss_fn)
