"""What training loops do around a step, on ranks: as on one device, or refused by name."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from models import Case
from plans import plan_for
from rank_pool import RankPool, RanksFailed
from torch import nn

from partitioner.errors import ArgumentError
from partitioner.executor import materialize
from partitioner.executor.agreement import digest
from partitioner.executor.replaced import Replaced
from partitioner.executor.stage import LiveStage
from partitioner.plan import Plan


class Skipping(nn.Module):
    """Uses its input in the first layer and in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, last = self.layers
        output: torch.Tensor = last(torch.tanh(second(torch.tanh(first(x)))) + x)
        return output


def case(model: nn.Module | None = None) -> Case:
    torch.manual_seed(0)
    model = Skipping() if model is None else model
    return Case(model, (torch.randn(8, 4),), target=torch.randn(8, 4), loss_fn=nn.MSELoss())


def on_ranks(plan: Plan, case: Case, habit: Callable[[LiveStage, Case], object]) -> object:
    with materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
        return habit(stage, case)


def refusals(ranks: RankPool, plan: Plan, case: Case, habit: Callable[[LiveStage, Case], object]) -> str:
    with pytest.raises(RanksFailed) as failed:
        ranks.run(plan.num_ranks, on_ranks, plan, case, habit)
    return " ".join(str(error) for error in failed.value.errors.values() if isinstance(error, ArgumentError))


def gradients_of_inputs(stage: LiveStage, case: Case) -> list[torch.Tensor]:
    x, target = case.args[0].clone().requires_grad_(), case.target.clone().requires_grad_()
    x.grad = torch.ones_like(x)
    stage.train_step((x,), target)
    assert x.grad is not None and target.grad is not None
    return [x.grad, target.grad]


def test_every_rank_gets_the_gradients_of_inputs(ranks: RankPool) -> None:
    made = case()
    plan = plan_for(made, pp=2, dp=1, cuts=["layers.1"])
    results = ranks.run(2, on_ranks, plan, made, gradients_of_inputs)
    x, target = made.args[0].clone().requires_grad_(), made.target.clone().requires_grad_()
    nn.MSELoss()(made.model(x), target).backward()
    for found in results:
        torch.testing.assert_close(found, [x.grad + 1, target.grad], rtol=1e-5, atol=1e-7)


def test_inputs_made_by_modules_outside_are_refused(ranks: RankPool) -> None:
    made = case()

    def prompt(stage: LiveStage, case: Case) -> None:
        stage.train_step((nn.Linear(4, 4)(case.args[0]),), case.target)

    assert "comes from other modules" in refusals(ranks, plan_for(made, pp=2, dp=1, cuts=["layers.1"]), made, prompt)


def lbfgs(stage: LiveStage, case: Case) -> float:
    optimizer = torch.optim.LBFGS(stage.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return stage.train_step(case.args, case.target)

    return float(optimizer.step(closure))


@pytest.mark.parametrize(("pp", "dp", "shard"), [(2, 1, "none"), (1, 2, "zero1")])
def test_optimizers_that_combine_parameters_are_refused_where_ranks_have_some(
    ranks: RankPool, pp: int, dp: int, shard: str
) -> None:
    made = case()
    plan = plan_for(made, pp=pp, dp=dp, shard=(shard,) * pp, cuts=["layers.1"] if pp == 2 else [])
    assert "LBFGS takes norms" in refusals(ranks, plan, made, lbfgs)


def test_they_run_on_replicas(ranks: RankPool) -> None:
    made = case()
    one, other = ranks.run(2, on_ranks, plan_for(made, pp=1, dp=2), made, lbfgs)
    assert one == other


def tied() -> Case:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return case(model)


def noise_by_rank(stage: LiveStage, case: Case) -> None:
    torch.manual_seed(stage.rank)
    for _ in range(2):
        stage.train_step(case.args, case.target)
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter += 0.01 * torch.randn_like(parameter)


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (1, 2)])
def test_copies_that_become_different_are_refused(ranks: RankPool, pp: int, dp: int) -> None:
    made = tied()
    plan = plan_for(made, pp=pp, dp=dp, cuts=["2"] if pp == 2 else [])
    assert "0.weight) together, and their values have become different" in refusals(ranks, plan, made, noise_by_rank)


def norms_by_hook(stage: LiveStage, case: Case) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, parameter in stage.module.named_parameters():

        def note(gradient: torch.Tensor, name: str = name) -> None:
            if gradient.norm() > 0:
                counts[name] = counts.get(name, 0) + 1

        parameter.register_hook(note)
    for _ in range(2):
        stage.train_step(case.args, case.target)
    return counts


def test_hooks_that_log_gradients_may_be_put_on_tied_weights_later(ranks: RankPool) -> None:
    made = tied()
    made.model[0].register_buffer("seen", torch.ones(3))
    made.model[0].register_forward_hook(lambda layer, given, output: output * layer.seen.mean())
    plan = plan_for(made, pp=2, dp=1, cuts=["2"])
    one, other = ranks.run(2, on_ranks, plan, made, norms_by_hook)
    assert one.keys() == {"0.weight", "0.bias"} and other.keys() == {"0.weight", "2.bias"}


def pruned(stage: LiveStage, case: Case) -> None:
    sizes = torch.cat([parameter.abs().flatten() for parameter in stage.module.parameters()])
    least = sizes.kthvalue(4).values
    with torch.no_grad():
        for parameter in stage.module.parameters():
            parameter.mul_(parameter.abs() > least)


def decided(stage: LiveStage, case: Case) -> None:
    if max(parameter.norm() for parameter in stage.module.parameters()) > 5:
        raise AssertionError


def measured(stage: LiveStage, case: Case) -> float:
    state = {name: torch.zeros_like(parameter) for name, parameter in stage.module.named_parameters()}
    assert not any(bool(value.any()) for value in state.values())
    return sum(float(parameter.norm()) for parameter in stage.module.parameters())


def test_what_is_made_of_other_stages_weights_decides_nothing_here(ranks: RankPool) -> None:
    made = case()
    plan = plan_for(made, pp=2, dp=1, cuts=["layers.1"])
    assert "which has no values here" in refusals(ranks, plan, made, decided)
    assert "has no values here" in refusals(ranks, plan, made, pruned)
    assert "stage.full_state_dict" in refusals(ranks, plan, made, measured)


def scaled(stage: LiveStage, case: Case) -> tuple[list[float], list[bool]]:
    """The factors after each of three steps, in the second of which the last layer's gradient overflows; what moved."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    factors, moved = [], []
    for step in range(3):
        stage.train_step(case.args, case.target)
        for name, parameter in stage.named_parameters():
            if step == 1 and name == "layers.2.bias":
                parameter.grad[0] = float("inf")  # type: ignore[index]
        before = [parameter.detach().clone() for parameter in stage.parameters()]
        scaler.step(optimizer), scaler.update(), optimizer.zero_grad()
        factors.append(scaler.get_scale())
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, stage.parameters(), strict=True)))
    return factors, moved


def test_gradients_that_overflow_on_one_stage_are_stepped_over_on_all(ranks: RankPool) -> None:
    made = case()
    plan = plan_for(made, pp=2, dp=1, cuts=["layers.1"])
    assert ranks.run(2, on_ranks, plan, made, scaled) == [([4.0, 2.0, 2.0], [True, False, True])] * 2


def stepped(scaler: torch.amp.GradScaler, optimizers: list[torch.optim.SGD]) -> float:
    """The factor after a step of all optimizers."""
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return scaler.get_scale()


def scaled_by_parts(stage: LiveStage, case: Case) -> list[float]:
    """As above, with an optimizer for each half of the model, of which a rank holds nothing of one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    parts = [stage.module.layers[:1], stage.module.layers[1:]]  # type: ignore[index]  # a list of layers
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    factors = []
    for step in range(2):
        stage.train_step(case.args, case.target)
        for name, parameter in stage.named_parameters():
            if step == 1 and name == "layers.2.bias":
                parameter.grad[0] = float("inf")  # type: ignore[index]
        factors.append(stepped(scaler, optimizers))
    return factors


def test_a_rank_may_hold_nothing_of_an_optimizer_that_is_scaled(ranks: RankPool) -> None:
    made = case()
    plan = plan_for(made, pp=2, dp=1, cuts=["layers.1"])
    assert ranks.run(2, on_ranks, plan, made, scaled_by_parts) == [[4.0, 2.0]] * 2


def scaled_by_shape(stage: LiveStage, case: Case) -> list[float]:
    """An optimizer for matrices and one for biases, of which one stage has none to train."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    own = [p for p in stage.parameters() if p.requires_grad]
    kinds = [[p for p in own if p.dim() == 2], [p for p in own if p.dim() == 1]]
    optimizers = [torch.optim.SGD(some, lr=0.1) for some in kinds if some]
    assert len(optimizers) == (1 if stage.stage else 2)
    factors = []
    for step in range(3):
        stage.train_step(case.args, case.target)
        for optimizer in optimizers:
            if step == 1 and optimizer is optimizers[-1] and stage.stage == 0:
                optimizer.param_groups[0]["params"][0].grad[0] = float("inf")
        factors.append(stepped(scaler, optimizers))
    return factors


def test_ranks_may_have_other_numbers_of_optimizers_that_are_scaled(ranks: RankPool) -> None:
    made = case()
    for layer in made.model.layers[1:]:
        layer.bias.requires_grad_(False)
    plan = plan_for(made, pp=2, dp=1, cuts=["layers.1"])
    assert ranks.run(2, on_ranks, plan, made, scaled_by_shape) == [[4.0, 2.0, 2.0]] * 2


def test_inputs_of_any_dtype_are_compared() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64, torch.bfloat16):
        x = torch.arange(1, 7).reshape(2, 3).to(torch.float32).to(dtype).t()
        other = (torch.arange(1, 7).reshape(2, 3) + 1).to(torch.float32).to(dtype).t()
        assert digest(x) == digest(x.contiguous()) != digest(other)


def plateau_by_output(stage: LiveStage, case: Case) -> None:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(stage.parameters(), lr=0.1), patience=0)
    for _ in range(2):
        stage.train_step(case.args, case.target)
        output = stage.eval_step(case.args)
        scheduler.step(0.0 if output is None else float(nn.functional.mse_loss(output, case.target)))


def plateau_by_loss(stage: LiveStage, case: Case) -> list[float]:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(stage.parameters(), lr=0.1), patience=0)
    losses = []
    for _ in range(3):
        stage.train_step(case.args, case.target)
        losses.append(float(stage.eval_loss(case.args, case.target)))
        scheduler.step(losses[-1])
    return [*losses, *scheduler.get_last_lr()]


def test_a_scheduler_is_told_the_same_on_all_ranks_or_the_next_step_is_refused(ranks: RankPool) -> None:
    made = case()
    plan = plan_for(made, pp=2, dp=1, cuts=["layers.1"])
    assert "(sums: 0 in 1 calls on rank 0, 1.5" in refusals(ranks, plan, made, plateau_by_output)
    loss = nn.functional.mse_loss(made.model(*made.args), made.target).item()
    one, other = ranks.run(2, on_ranks, plan, made, plateau_by_loss)
    assert one == other and one == pytest.approx([loss] * 3 + [0.001], rel=1e-5)
    replicas = ranks.run(2, on_ranks, plan_for(made, pp=1, dp=2), made, plateau_by_loss)
    assert replicas == [pytest.approx(one, rel=1e-5)] * 2


def told_in_four_steps(stage: LiveStage, case: Case, each: Callable[[torch.optim.Optimizer, int], object]) -> list[str]:
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(4):
            stage.train_step(case.args, case.target)
            each(optimizer, step)
    return [str(one.message) for one in told]


def rate_by_rank(stage: LiveStage, case: Case) -> list[str]:
    def each(optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 - 0.01 * stage.rank * (step > 0)
        optimizer.step(), optimizer.zero_grad()

    return told_in_four_steps(stage, case, each)


def steps_by_rank(stage: LiveStage, case: Case) -> list[str]:
    def each(optimizer: torch.optim.Optimizer, step: int) -> None:
        if step != 1 or stage.rank == 0:
            optimizer.step(), optimizer.zero_grad()

    return told_in_four_steps(stage, case, each)


def rates_by_layer(stage: LiveStage, case: Case) -> list[str]:
    """Rates that begin as others, an optimizer for each layer, and one rank that steps none: as on one device."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for optimizers in (
            [torch.optim.SGD(stage.parameters(), lr=0.1 * (1 + stage.rank))],
            [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in stage.module.layers],  # type: ignore[union-attr]
        ):
            for step in range(3):
                stage.train_step(case.args, case.target)
                for k, optimizer in enumerate(optimizers):
                    optimizer.param_groups[0]["lr"] *= 0.9**k
                    if step % 2 == k % 2 or len(optimizers) == 1:
                        optimizer.step(), optimizer.zero_grad()
    return [str(one.message) for one in told]


def test_optimizers_that_began_alike_and_step_otherwise_are_told_of(ranks: RankPool) -> None:
    made = case()
    plan = plan_for(made, pp=2, dp=1, cuts=["layers.1"])
    for found in ranks.run(2, on_ranks, plan, made, rate_by_rank):
        assert len(found) == 1
        assert "began with the learning rate 0.1 and differ in it now (0.1 on rank 0, 0.09 on rank 1)." in found[0]
    for found in ranks.run(2, on_ranks, plan, made, steps_by_rank):
        assert len(found) == 1 and "differ in their number of steps (2 on rank 0, 1 on rank 1)." in found[0]
    assert ranks.run(2, on_ranks, plan, made, rates_by_layer) == [[], []]


def other_input_later(stage: LiveStage, case: Case) -> int:
    for step in range(4):
        x = case.args[0] + (stage.rank if step == 3 else 0)
        stage.train_step((x.t().contiguous().t(),), case.target)
    return step


def test_another_input_on_some_rank_is_seen_in_every_step(ranks: RankPool) -> None:
    made = case()
    plan = plan_for(made, pp=2, dp=1, cuts=["layers.1"])
    assert "rank 1 got another batch than rank 0" in refusals(ranks, plan, made, other_input_later)


def total_norm(stage: LiveStage, case: Case) -> None:
    stage.train_step(case.args, case.target)
    nn.utils.get_total_norm([one.grad for one in stage.module.parameters() if one.grad is not None])


def test_a_total_norm_over_one_stage_is_refused(ranks: RankPool) -> None:
    made = case()
    plan = plan_for(made, pp=2, dp=1, cuts=["layers.1"])
    assert "stage.clip_grad_norm_" in refusals(ranks, plan, made, total_norm)


def scaled_on_one_rank(stage: LiveStage, case: Case) -> None:
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(stage.parameters(), lr=0.1)
    for _ in range(2):
        stage.train_step(case.args, case.target)
        if stage.rank == 0:
            scaler.step(optimizer), scaler.update()


def test_a_scaler_that_steps_on_some_ranks_only_is_named(ranks: RankPool) -> None:
    made = case()
    with pytest.raises(RanksFailed) as failed:
        ranks.run(2, on_ranks, plan_for(made, pp=2, dp=1, cuts=["layers.1"]), made, scaled_on_one_rank)
    for error in failed.value.errors.values():
        assert "rank 0 calls GradScaler's step or update, rank 1 calls stage.train_step" in str(error)


def scaled_head(stage: LiveStage, case: Case) -> list[float]:
    """The factors after three steps of an optimizer for the last layer alone, which one rank does not have."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    head = [parameter for name, parameter in stage.named_parameters() if name.startswith("layers.2")]
    optimizers = [torch.optim.SGD(head, lr=0.1)] if head else []
    factors = []
    for step in range(3):
        stage.train_step(case.args, case.target)
        if head and step == 1:
            head[0].grad[0] = float("inf")  # type: ignore[index]
        factors.append(stepped(scaler, optimizers))
    return factors


def test_a_rank_without_an_optimizer_to_scale_has_the_factor_of_the_others(ranks: RankPool) -> None:
    made = case()
    plan = plan_for(made, pp=2, dp=1, cuts=["layers.1"])
    assert ranks.run(2, on_ranks, plan, made, scaled_head) == [[4.0, 2.0, 2.0]] * 2


def no_optimizer_at_all(stage: LiveStage, case: Case) -> str:
    stage.train_step(case.args, case.target)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        torch.amp.GradScaler("cpu").update()
    return "as torch"


def test_a_scaler_that_scaled_nothing_on_any_rank_is_told_so_by_torch(ranks: RankPool) -> None:
    made = case()
    plan = plan_for(made, pp=2, dp=1, cuts=["layers.1"])
    assert ranks.run(2, on_ranks, plan, made, no_optimizer_at_all) == ["as torch"] * 2


class Owner:
    @staticmethod
    def count() -> list[str]:
        return []


def test_functions_of_torch_are_its_own_again_when_all_stages_have_ended_in_any_order() -> None:
    plain = Owner.count
    for order in itertools.permutations("abc"):
        replaced = {
            name: Replaced(Owner, "count", lambda plain, name=name: lambda: [*plain(), name])  # type: ignore[misc]
            for name in "abc"
        }
        for one in replaced.values():
            one.enter()
        left = set("abc")
        for name in order:
            assert Owner.count() == sorted(left)
            replaced[name].leave()
            left.remove(name)
        assert Owner.count is plain
    nothing = Replaced(Owner, "missing", lambda plain: plain)
    nothing.enter(), nothing.leave()
    assert not hasattr(Owner, "missing")
