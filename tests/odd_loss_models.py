"""Models whose loss function looks at more than their output: what layers left, what hooks wrote down, weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from models import Case
from odd_late_models import LATE_CALLS
from odd_models import D, lin
from torch import nn

LOSSES: dict[str, Callable[[], Case]] = {}


def built(build: Callable[[], tuple[nn.Module, Any]]) -> Case:
    torch.manual_seed(0)
    model, loss = build()
    torch.manual_seed(1)
    return Case(model, (torch.randn(8, D),), loss_fn=loss)


def case(build: Callable[[], tuple[nn.Module, Any]]) -> None:
    LOSSES[build.__name__] = functools.partial(built, build)


def refused(build: Callable[[], tuple[nn.Module, Any]]) -> None:
    REFUSED[build.__name__] = functools.partial(built, build)


class Leaving(nn.Module):
    """Leaves a loss of its own behind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = lin()
        self.aux: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(x))
        self.aux = x.pow(4).mean()
        return x


REFUSED: dict[str, Callable[[], Case]] = {}
"""Models whose loss begins to do after some steps what cannot be followed by then."""


def chain() -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(4) for part in (lin(), nn.Tanh())))


@case
def loss_adds_what_layers_left() -> tuple[nn.Module, Any]:
    model = nn.Sequential(*(Leaving() for _ in range(4)))
    return model, lambda output, target: output.square().mean() + sum(layer.aux for layer in model)


@case
def loss_adds_what_the_root_gathered() -> tuple[nn.Module, Any]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(lin() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.penalty = 0.0
            for layer in self.layers:
                x = torch.tanh(layer(x))
                self.penalty = self.penalty + x.abs().mean()
            return x

    model = Model()
    return model, lambda output, target: output.square().mean() + model.penalty


@case
def loss_reads_activations_that_hooks_kept() -> tuple[nn.Module, Any]:
    model, seen = chain(), {}
    model[0].register_forward_hook(lambda module, args, output: seen.update(first=output))
    return model, lambda output, target: output.square().mean() + seen["first"].square().mean()


@case
def loss_reads_a_number_that_a_hook_wrote() -> tuple[nn.Module, Any]:
    model, seen = chain(), {"size": 0.0}
    model[0].register_forward_hook(lambda module, args, output: seen.update(size=float(output.detach().abs().mean())))
    return model, lambda output, target: output.square().mean() * (1 + seen["size"])


@case
def loss_reads_a_number_that_changes_late() -> tuple[nn.Module, Any]:
    class Annealing(nn.Linear):
        calls, factor = 0, 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > LATE_CALLS // 2:
                self.factor = 0.5
            return super().forward(x)

    model = nn.Sequential(Annealing(D, D), *chain())
    return model, lambda output, target: output.square().mean() * model[0].factor


@case
def loss_penalises_all_weights() -> tuple[nn.Module, Any]:
    model = chain()
    return model, lambda output, target: output.square().mean() + sum(p.square().sum() for p in model.parameters()) / 99


@case
def loss_module_keeps_a_mean() -> tuple[nn.Module, Any]:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(()))

        def forward(self, output: torch.Tensor, target: Any) -> torch.Tensor:
            loss = output.square().mean()
            self.mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
            return loss / self.mean

    return chain(), Normalised()


# -- what comes too late


class Late:
    """A loss that goes on to something else after some micro-batches."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.calls = model, 0

    def __call__(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        self.calls += 1
        loss = output.square().mean()
        return loss if self.calls <= LATE_CALLS // 2 else self.other(loss)

    def other(self, loss: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@refused
def first_layer_learns_of_the_loss() -> tuple[nn.Module, Any]:
    class Told(nn.Linear):
        last = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.last

    class Telling(Late):
        def other(self, loss: torch.Tensor) -> torch.Tensor:
            self.model[0].last = float(loss.detach())
            return loss

    model = nn.Sequential(Told(D, D), *chain())
    return model, Telling(model)


@case
def loss_notes_itself_on_the_model() -> tuple[nn.Module, Any]:
    """Where nobody reads it."""
    model = chain()
    model.log = {}

    def loss(output: torch.Tensor, target: Any) -> torch.Tensor:
        found = output.square().mean()
        model.log["loss"] = model.latest = float(found.detach())
        return found

    return model, loss
