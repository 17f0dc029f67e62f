"""What a user's own lines do to the parameters of other stages: nothing, or an error that names them; never a NaN."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from plans import plan_of
from torch import nn

from partitioner.errors import ArgumentError
from partitioner.executor.afterwards import Afterwards, NoLocalNorm
from partitioner.executor.placeholders import is_placeholder
from partitioner.executor.placement import Placement


class Merging(nn.Linear):
    """Adds an update of low rank to its weight when it is evaluated, as LoRA does."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))
        self.register_buffer("scale", torch.full((3,), 2.0))

    def train(self, mode: bool = True) -> Merging:
        if mode != self.training:
            sign = 1.0 if self.training else -1.0
            self.weight.data += sign * self.b.data @ self.a.data
            with torch.no_grad():
                self.bias += sign
        super().train(mode)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale[0]


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Merging(), nn.Tanh(), Merging())


def placed(stage: int = 0, model: nn.Module | None = None) -> Placement:
    plan = plan_of(model_of(), (torch.randn(4, 4),), cuts=["2"])
    return Placement(plan, stage, model or model_of(), torch.device("cpu"), None)


@pytest.mark.parametrize("stage", [0, 1])
def test_loading_plain_weights_takes_a_ranks_own_and_names_what_is_really_missing(stage: int) -> None:
    placement, weights = placed(stage), model_of(1).state_dict()
    placement.model.load_state_dict(weights)
    here, there = ("0.", "2.") if stage == 0 else ("2.", "0.")
    for name, value in placement.model.state_dict().items():
        if name.startswith(here):
            assert torch.equal(value, weights[name])
        else:
            assert name.startswith(there) and is_placeholder(value) and value.shape == weights[name].shape
    placement.model[0].load_state_dict(model_of(2)[0].state_dict())
    assert torch.equal(placement.model[0].bias, model_of(2)[0].bias) == (stage == 0)
    del weights["2.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"2.bias"'):
        placement.model.load_state_dict(weights)
    with pytest.raises(RuntimeError, match=r"size mismatch for 2\.bias"):
        placement.model.load_state_dict(weights | {"2.bias": torch.zeros(5)})


def test_weights_that_are_merged_in_evaluation_come_back_in_training() -> None:
    placement, plain = placed(), model_of()
    before = plain[0].weight.clone()
    placement.model.eval(), plain.eval()
    assert torch.equal(placement.model[0].weight, plain[0].weight) and not torch.equal(plain[0].weight, before)
    assert is_placeholder(placement.model[2].weight) and not is_placeholder(placement.model[0].weight)
    placement.model.train()
    torch.testing.assert_close(placement.model[0].weight, before)


def test_what_would_carry_nothing_into_values_is_refused_by_name() -> None:
    model = placed().model
    with pytest.raises(ArgumentError, match=r"copy_ would write .* what 2.weight of stage 1 holds"):
        model[0].weight.data.copy_(model[2].weight.detach())
    with pytest.raises(ArgumentError, match=r"what 2.bias of stage 1 holds"), torch.no_grad():
        model[0].bias += model[2].bias[:]
    for saved in (model, model.state_dict(), model[2].weight):
        with pytest.raises(ArgumentError, match=r"2\.\w+ of stage 1 would be saved .* stage.full_state_dict"):
            torch.save(saved, io.BytesIO())


def test_an_average_of_weights_and_a_copy_have_placeholders_too() -> None:
    model, plain = placed().model, model_of()
    kept, expected = (
        torch.optim.swa_utils.AveragedModel(one, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        for one in (model, plain)
    )
    for step in range(3):
        for one in (model, plain):
            with torch.no_grad():
                one[0].weight.add_(step)
                nn.init.zeros_(one[2].weight)
                torch._foreach_add_(list(one.parameters()), 1.0)
        kept.update_parameters(model), expected.update_parameters(plain)
    assert torch.equal(kept.module[0].weight, expected.module[0].weight)
    assert is_placeholder(kept.module[2].weight) and is_placeholder(copy.deepcopy(model)[2].scale)
    model.double()
    assert model[2].weight.dtype == torch.float64 and is_placeholder(model[2].weight)
    assert model[2].weight.untyped_storage().nbytes() == 8


def test_a_model_placed_again_holds_values_again() -> None:
    model = placed().model
    plan = plan_of(model_of(), (torch.randn(4, 4),), cuts=["2"])
    with pytest.raises(ArgumentError, match=r"placeholders of an earlier materialize"):
        Placement(plan, 1, model, torch.device("cpu"), None)
    again = Placement(plan, 1, model, torch.device("cpu"), model_of(3).state_dict())
    assert torch.equal(again.model[2].weight, model_of(3)[2].weight) and is_placeholder(again.model[0].weight)
    assert type(again.model[2].weight) is nn.Parameter


def after(placement: Placement) -> Afterwards:
    plan = plan_of(model_of(), (torch.randn(4, 4),), cuts=["2"])
    return Afterwards(placement.model, placement.own, plan.stage_of())


def test_parameters_that_come_or_go_are_refused_and_other_changes_are_not() -> None:
    placement = placed()
    watch, model = after(placement), placement.model
    model[1] = nn.GELU()
    watch.check()
    model[2] = Merging()
    with pytest.raises(ArgumentError, match=r"4 parameters \(2.weight\) are not those that the stage was made with"):
        watch.check()
    placement = placed()
    watch = after(placement)
    placement.model.load_state_dict(model_of(1).state_dict(), assign=True)
    with pytest.raises(ArgumentError, match="loaded with assign=True"):
        watch.check()
    placement = placed()
    watch = after(placement)
    del placement.model[0].b
    with pytest.raises(ArgumentError, match=r"1 parameters \(0.b\)"):
        watch.check()


def test_hooks_of_two_stages_that_share_an_object_are_warned_of_once() -> None:
    placement = placed()
    watch, model = after(placement), placement.model
    seen: dict[str, torch.Tensor] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model[0].register_forward_hook(lambda module, args, output: seen.update(first=output))
        model[1].register_forward_hook(lambda module, args, output: seen.update(second=output))
        watch.check()
        model[2].register_forward_hook(lambda module, args, output: output * 2)
        watch.check()
    model[2].register_forward_hook(lambda module, args, output: output + seen["first"])
    with pytest.warns(UserWarning, match="share an object over stages 0, 1"):
        watch.check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.check()


def test_a_norm_over_one_stages_gradients_is_refused_and_others_are_not() -> None:
    placement, other = placed(), nn.Linear(2, 2)
    for parameter in (*placement.own.values(), *other.parameters()):
        parameter.grad = torch.ones_like(parameter)
    watch = NoLocalNorm(placement.own)
    watch.enter()
    try:
        assert float(nn.utils.clip_grad_norm_(other.parameters(), 1.0)) == pytest.approx(6**0.5)
        for parameters in (placement.own.values(), placement.model.parameters()):
            with pytest.raises(ArgumentError, match=r"call stage.clip_grad_norm_\(max_norm\)"):
                nn.utils.clip_grad_norm_(parameters, 1.0)
    finally:
        watch.leave()
    assert float(nn.utils.clip_grad_norm_(placement.own.values(), 1.0)) > 1
