"""What a user's own lines do to the parameters of other stages: nothing, or an error that names them; never a NaN."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from plans import plan_of
from torch import nn

from partitioner.errors import ArgumentError, UnsupportedModelError
from partitioner.executor.afterwards import Afterwards, NoLocalNorm
from partitioner.executor.placeholders import is_placeholder
from partitioner.executor.placement import Placement
from partitioner.tracing import computing


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
    if stage == 0:
        assert torch.equal(placement.model[0].bias, model_of(2)[0].bias)
    else:
        assert is_placeholder(placement.model[0].bias)
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


NUMBERS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "a number": lambda own, other: float(other.norm()),
    "an item": lambda own, other: other.norm().item(),
    "a list": lambda own, other: other.tolist(),
    "an array": lambda own, other: other.detach().numpy(),
    "numpy's own reading": lambda own, other: np.mean([other.detach().norm()]),
    "a format": lambda own, other: f"{other.norm():.3f}",
    "a comparison": lambda own, other: torch.equal(own, other),
    "not a number": lambda own, other: bool(torch.isnan(other).any()),
    "a tensor made of numbers": lambda own, other: torch.tensor([own.detach().norm(), other.detach().norm()]),
    "a tensor made of one": lambda own, other: torch.tensor(other.detach().norm()).item(),
    "the end of a slice": lambda own, other: own[: other.argmax()],
    "all weights as one vector": lambda own, other: nn.utils.parameters_to_vector([own, other]).norm().item(),
    "norms of a list": lambda own, other: [norm.item() for norm in torch._foreach_norm([own, other])],
    "the bytes of a copy": lambda own, other: safetensors_of(other.contiguous()),
}


def safetensors_of(tensor: torch.Tensor) -> bytes:
    return pytest.importorskip("safetensors.torch").save({"weight": tensor})  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", NUMBERS)
@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
def test_no_number_comes_out_of_what_has_no_values(how: str) -> None:
    own, _, other = placed().model
    with pytest.raises(ArgumentError, match=r"2.weight of stage 1.* stage.full_state_dict"):
        NUMBERS[how](own.weight, other.weight)


def test_what_tensors_are_like_and_numbers_of_this_stage_are_read() -> None:
    model = placed().model
    own, _, other = model
    assert "(4, 4) torch.float32: 2.weight of stage 1" in f"{other.weight} {model.state_dict()} {other.weight.data}"
    here, there = torch._foreach_norm([own.weight, other.weight])
    assert here.item() == own.weight.norm().item() and there.dtype == torch.float32
    like = torch.zeros_like(other.weight), other.weight.new_ones(4), torch.empty_like(other.bias).fill_(1.0)
    assert [one.sum().item() for one in like] == [0.0, 4.0, 4.0]
    assert sum(one.numel() for one in model.parameters()) == sum(one.numel() for one in model_of().parameters())
    assert other.weight in set(model.parameters()) and other.weight.grad is None


READS: dict[str, Callable[[nn.Module, nn.Module], object]] = {
    "a kernel": lambda own, other: own(torch.randn(2, 4)) @ other.weight,
    "a list of tensors": lambda own, other: torch.stack([own.bias, other.bias]),
    "a view": lambda own, other: own.bias + other.weight.detach().t()[0],
    "weights of a recurrent layer": lambda own, other: torch.lstm_cell(
        torch.randn(1, 4), (torch.zeros(1, 1), torch.zeros(1, 1)), other.weight, torch.randn(4, 1)
    ),
    "a copy": lambda own, other: other.bias.clone(),
    "a number": lambda own, other: other.bias[0].item(),
    "a list of numbers": lambda own, other: other.bias.tolist(),
    "whole numbers, of which none is NaN": lambda own, other: own.bias * other.count,
    "a class of the user's own": lambda own, other: own.bias * other.gain,
    "another dtype": lambda own, other: other.bias.double(),
    "a custom Function": lambda own, other: Doubled.apply(other.bias),
    "a write": lambda own, other: other.scale.copy_(own.scale),
    "a write by .data": lambda own, other: setattr(other.scale, "data", own.scale),
}


class Gain(nn.Parameter):
    """A class of the user's own."""


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("how", READS)
def test_what_the_models_own_code_reads_of_another_stage_is_refused_by_name(how: str) -> None:
    model = model_of()
    for layer in (model[0], model[2]):
        layer.register_buffer("count", torch.tensor(3))
        layer.gain = Gain(torch.ones(4))
    plan = plan_of(copy.deepcopy(model), (torch.randn(4, 4),), cuts=["2"])
    own, _, other = Placement(plan, 0, model, torch.device("cpu"), None).model
    assert type(other.gain) is not Gain and isinstance(other.gain, Gain)
    with computing(), torch.no_grad(), pytest.raises(UnsupportedModelError, match=r"2\.\w+ of stage 1: that has no"):
        READS[how](own, other)
    with computing():  # what a tensor is like is the same everywhere
        like = torch.zeros_like(other.weight), other.weight.new_ones(4), own.bias.type_as(other.weight)
        assert [one.dtype for one in like] == [other.weight.dtype] * 3 and other.weight.t().shape == (4, 4)
        assert other.weight.device == own.bias.expand_as(other.weight).device


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


def after(placement: Placement, num_replicas: int = 1) -> Afterwards:
    return Afterwards(placement.model, placement.own, num_replicas, lambda: None)


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


def test_hooks_that_come_or_go_are_looked_at_once() -> None:
    placement, looks = placed(), list[int]()
    watch, model = Afterwards(placement.model, placement.own, 1, lambda: looks.append(1)), placement.model
    watch.check()
    handle = model[0].register_forward_hook(lambda module, args, output: output * 2)
    watch.check(), watch.check()
    assert len(looks) == 1
    handle.remove()
    model[0].register_forward_hook(lambda module, args, output: output * 3)
    watch.check(), watch.check()
    assert len(looks) == 2


def test_hooks_after_accumulation_are_refused_where_they_would_see_another_gradient() -> None:
    placement = placed()
    weight = placement.model[0].weight

    def step(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad)  # type: ignore[arg-type]
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(ArgumentError, match=r"'0.weight' .* this replica alone, one of 2"):
        after(placement, 2).begin()
    watch = after(placement)
    watch.begin()
    weight.sum().backward()
    watch.end(1)
    with pytest.raises(UnsupportedModelError, match=r"changed the parameter '0.weight' in the backward .* several"):
        watch.end(2)
    weight.grad = torch.ones(4, 4)
    with pytest.raises(ArgumentError, match=r"'0.weight' .* call optimizer.zero_grad"):
        watch.begin()


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


def test_weights_drawn_anew_from_one_seed_are_those_of_one_device() -> None:
    model, plain = placed(1).model, model_of()
    for one in (model, plain):
        torch.manual_seed(7)
        for layer in (one[0], one[2]):
            layer.reset_parameters()
            nn.init.trunc_normal_(layer.a, std=0.2)
            nn.init.orthogonal_(layer.b)
            layer.scale.uniform_()
    assert is_placeholder(model[0].weight) and is_placeholder(model[0].a)
    for name in ("weight", "bias", "a", "b", "scale"):
        assert torch.equal(getattr(model[2], name), getattr(plain[2], name)), name


@pytest.mark.parametrize(
    "give",
    [
        lambda own, other: setattr(own, "data", own.data * 0.9 + other.data * 0.1),
        lambda own, other: setattr(own, "data", other.data),
        lambda own, other: setattr(own, "data", other),
        lambda own, other: setattr(own, "data", copy.deepcopy(other)),
        lambda own, other: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([other, own]), [other, own]),
    ],
)
@pytest.mark.parametrize("name", ["weight", "scale"])
def test_values_replaced_by_a_placeholders_nothing_are_named_before_they_are_used(
    give: Callable[[Any, Any], object], name: str
) -> None:
    placement = placed(1)
    other, own = getattr(placement.model[0], name), getattr(placement.model[2], name)
    placement.refuse_emptied()
    give(own, other)
    with pytest.raises(ArgumentError, match=rf"2.{name} of this rank .* what 0.{name} of stage 0 holds"):
        placement.refuse_emptied()


def test_values_replaced_by_others_are_no_nothing() -> None:
    placement = placed(1)
    other, own = placement.model[0].weight, placement.model[2].weight
    for value in (own.data * 2, own.data.view_as(other), own.data.to(other.dtype), torch.zeros_like(other)):
        own.data = value
        placement.model[0].weight.data = value
        assert copy.deepcopy(placement.model) is not None
        placement.refuse_emptied()
    assert is_placeholder(other)
