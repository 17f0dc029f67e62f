"""A split that is right passes; one that is not is refused, and either way the model is as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, build
from side_by_side import even_cuts, quiet, split
from torch import nn
from torch.nn import functional as F

import partitioner as pt
from partitioner.capture import Capture, capture
from partitioner.errors import UnsupportedModelError
from partitioner.losses import Loss
from partitioner.microbatches import Cutter, MicroBatch
from partitioner.selfcheck import changed_by_forward, check_order, check_split
from partitioner.shared import SharedState


@pytest.mark.parametrize("name", CASES)
def test_every_model_passes_and_is_left_as_it_was(name: str) -> None:
    case = quiet(lambda: build(name))
    captured = capture(case.model, case.args, case.kwargs, max_share=1 / 10)
    first, second = Cutter().cut(case.args, case.kwargs or {}, case.target, 2)
    before = copy.deepcopy(case.model.state_dict())
    state = torch.get_rng_state()
    loss = Loss(case.model, case.loss_fn, None)
    worst = check_split(case.model, captured, split(captured, even_cuts(captured, 3)), first, loss, second=second)
    assert worst < 1e-5
    assert all(torch.equal(value, before[key]) for key, value in case.model.state_dict().items())
    assert all(parameter.grad is None for parameter in case.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def square(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output.pow(2).mean()


def checked(model: nn.Module, cut: str, loss_fn: Callable[..., torch.Tensor] = square) -> float:
    x = torch.linspace(-1, 1, 12).view(3, 4)
    captured = capture(model, (x,), max_share=0)
    part = MicroBatch((x,), {}, None, 3)
    return check_split(model, captured, split(captured, [cut]), part, Loss(model, loss_fn, None))


class Secret(nn.Module):
    """Layers that talk to each other past everything that is watched: through the module's own dictionary."""

    def __init__(self, writes: str, reads: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.said = [1.0]
        self.layers[int(writes[-1])].register_forward_hook(self.say)
        self.layers[int(reads[-1])].register_forward_pre_hook(self.hear)

    def say(self, module: nn.Module, args: object, out: torch.Tensor) -> None:
        vars(self)["said"] = [float(out.detach().abs().sum())]

    def hear(self, module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (args[0] * self.said[0],)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_an_earlier_stage_leaves_on_a_module_reaches_a_later_one_only_where_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Secret("layers.1", "layers.2")
    assert checked(model, "layers.1") < 1e-6
    assert checked(model, "layers.2") < 1e-6
    monkeypatch.setattr(SharedState, "apply", lambda self, codes, stand_in: None)
    with pytest.raises(UnsupportedModelError, match=r"cut before layers\.2.*differs by"):
        checked(model, "layers.2")


def test_the_second_round_shows_what_the_first_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number said late in one step is heard early in the next."""
    model = Secret("layers.3", "layers.0")
    with pytest.raises(UnsupportedModelError, match=r"layer layers\.3 .* changes 'said' from \[1\.0\] to"):
        checked(model, "layers.2")
    monkeypatch.setattr(SharedState, "changes", lambda self, who, **how: [])
    with pytest.raises(UnsupportedModelError, match="differs"):
        checked(model, "layers.2")


def test_a_model_that_differs_from_itself_is_not_blamed_on_the_split() -> None:
    noise = iter(torch.rand(100, generator=torch.Generator().manual_seed(0)).tolist())

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)) * (1 + 1e-3 * next(noise))

    checked(Noisy(), "b")


def test_a_model_that_never_repeats_itself_cannot_pass() -> None:
    """Its numbers come from a running generator, which cannot be given back."""
    numbers = (1 + count % 3 for count in range(1000))

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)) * next(numbers)

    with pytest.raises(UnsupportedModelError, match=r"cut before b, the model cannot be checked.*differs from itself"):
        checked(Counting(), "b")


def test_a_loss_that_reads_weights_of_earlier_stages_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def penalised(output: torch.Tensor, target: Any, weights: nn.Module = model) -> torch.Tensor:
        return square(output, target) + sum(weight.pow(2).sum() for weight in weights.parameters())

    with pytest.raises(UnsupportedModelError, match=r"the loss uses the parameter '0\.(weight|bias)'"):
        checked(model, "1", penalised)
    assert checked(model, "1", lambda output, target: penalised(output, target, model[1])) == 0


def test_what_the_models_own_code_raises_in_stages_is_a_refusal() -> None:
    """Of a cut, for which another may be found: not an error of the model."""

    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.b(self.a(x))
            if type(x) is not torch.Tensor:
                raise TypeError(f"wants plain tensors, not {type(x).__name__}")
            return self.c(x)

    assert checked(Strict(), "b") < 1e-6
    with pytest.raises(UnsupportedModelError, match=r"cut before c, .* raised TypeError: wants plain .*test_selfcheck"):
        checked(Strict(), "c")


def test_dropout_and_frozen_models_are_checked_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))
    assert checked(model, "2") == 0
    assert checked(model.requires_grad_(False), "2") == 0
    assert checked(model, "2", lambda output, target: F.softplus(output).sum()) == 0


def test_a_wrong_capture_is_found_out() -> None:
    """A tensor that is missing from the routes is an error, not another number."""
    case = quiet(lambda: build("unet"))
    captured = capture(case.model, case.args, max_share=1 / 4)
    fewer = Capture(**(vars(captured) | {"tensors": captured.tensors[1:]}))
    part = MicroBatch(case.args, {}, case.target, 8)
    cut = captured.tensors[0].consumers[-1]
    with pytest.raises(UnsupportedModelError, match="did not send"):
        check_split(case.model, fewer, split(fewer, [cut]), part, Loss(case.model, case.loss_fn, None))


class Scaled(torch.autograd.Function):
    """Divides by a scale that its backward takes from the gradients, as delayed scaling of 8-bit numbers does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.layer = layer
        return x / layer.scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.layer.learn(gradient)
        return gradient, None


class Delayed(nn.Module):
    """A layer whose backward moves its scale; `reads`: whether the next forward sees that."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.linear, self.reads, self.last = nn.Linear(4, 4), reads, None
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("largest", torch.zeros(()))

    def learn(self, gradient: torch.Tensor) -> None:
        self.last = gradient
        self.largest.copy_(gradient.abs().max())
        if self.reads:
            self.scale.copy_(1 + gradient.abs().max())

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.linear(Scaled.apply(x, self)))


def rounds() -> tuple[MicroBatch, MicroBatch]:
    generator = torch.Generator().manual_seed(3)
    first, second = (MicroBatch((torch.randn(3, 4, generator=generator),), {}, None, 3) for _ in range(2))
    return first, second


def test_a_forward_that_reads_what_the_backward_before_it_changed_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Delayed(reads=True))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedModelError, match="backward changes a buffer or attribute that the next forward"):
        check_order(model, *rounds(), Loss(model, square, None))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), Delayed(reads=False)),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()),
    ],
)
def test_a_backward_that_keeps_something_for_others_is_not(model: nn.Module) -> None:
    check_order(model, *rounds(), Loss(model, square, None))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_stages_are_made_of_a_model_whose_backwards_matter_to_its_forwards() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Delayed(reads=True), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    with pytest.raises(UnsupportedModelError, match="backward changes"):
        pt.partition(model, (x,), gpus=2, mesh={"pp": 2}, microbatches=2, loss_fn=square)
    plan = pt.partition(model, (x,), gpus=2, mesh={"pp": 2}, microbatches=1, loss_fn=square)
    assert plan.num_stages == 2


class Moving(nn.Module):
    """Keeps a mean of what it sees, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


def test_what_a_forward_changes_is_named_and_given_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Moving())
    part, _ = rounds()
    assert changed_by_forward(model, part, Loss(model, square, None)) == (["2.mean"], True, [])
    assert model[2].calls == 0 and not model[2].mean.any() and not model[1].running_mean.any()
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert changed_by_forward(plain, part, Loss(plain, square, None)) == ([], False, [])


RANDOM = torch.Generator().manual_seed(5)


class Noisy(nn.Module):
    """Noise from a generator of its own, or from one of its file."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(3) if own else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape[1], generator=self.noise or RANDOM)


@pytest.mark.parametrize(("own", "name"), [(True, r"1\.noise"), (False, "RANDOM")])
def test_replicas_that_draw_the_same_numbers_from_a_generator_of_the_models_own_are_told_of(
    own: bool, name: str
) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Noisy(own), nn.Linear(4, 4)), torch.randn(8, 4)
    before = RANDOM.get_state()
    with pytest.warns(pt.ReplicaWarning, match=rf"draws from {name}.*manual_seed\(seed \+ stage\.dp_rank\)"):
        pt.partition(model, (x,), gpus=2, mesh={"dp": 2}, microbatches=2, loss_fn=square)
    assert torch.equal(before, RANDOM.get_state())


def test_replicas_that_each_move_their_own_are_told_of() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Moving(), nn.Linear(4, 4)), torch.randn(8, 4)
    with pytest.warns(pt.ReplicaWarning, match=r"the buffer 1\.mean: each of 2 replicas"):
        plan = pt.partition(model, (x,), gpus=2, mesh={"dp": 2}, microbatches=2, loss_fn=square)
    assert any("1.mean" in line for line in plan.why)
