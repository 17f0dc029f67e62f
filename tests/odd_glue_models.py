"""Odd modules whose own code around the layers keeps state, sets what layers read, or returns objects of its own.

Entries as in `odd_models`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from models import Case
from odd_models import D, adding_to, lin
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal

GLUE: dict[str, Callable[[], Case]] = {}


odd, case = adding_to(GLUE)


class Stack(nn.Module):
    """Layers, and how often they were run."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(lin() for _ in range(num_layers))
        self.calls = 0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def rows(model: nn.Module, loss_fn: Callable[..., torch.Tensor]) -> Case:
    torch.manual_seed(1)
    return Case(model, (torch.randn(8, D),), loss_fn=loss_fn)


# -- objects that are returned


@case
def a_distribution_is_returned() -> Case:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.actor, self.critic = nn.Sequential(lin(), nn.Tanh(), lin(), nn.Tanh()), lin(), lin(D, 1)

        def forward(self, x: torch.Tensor) -> tuple[Distribution, torch.Tensor]:
            hidden = self.body(x)
            return Categorical(logits=self.actor(hidden)), self.critic(hidden)

    return rows(Policy(), lambda output, _: output[1].square().mean() - output[0].entropy().mean())


@case
def distributions_are_made_in_layers() -> Case:
    """One is an `Independent` around another."""

    class Gaussian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.spread = lin(), nn.Parameter(torch.zeros(D))

        def forward(self, x: torch.Tensor) -> Distribution:
            return Independent(Normal(torch.tanh(self.mean(x)), self.spread.exp()), 1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prior, self.encoder, self.decoder = Gaussian(), Gaussian(), nn.Sequential(lin(), nn.Tanh(), lin())

        def forward(self, x: torch.Tensor) -> tuple[Distribution, Distribution, torch.Tensor]:
            prior, found = self.prior(x), self.encoder(x)
            return prior, found, self.decoder(found.base_dist.loc)

    return rows(
        Model(),
        lambda output, _: output[2].square().mean() - (output[0].log_prob(output[1].mean) + output[1].entropy()).mean(),
    )


@case
def an_object_with_tensors_is_returned() -> Case:
    """Latent diffusion's posterior: the loss asks it for its divergence."""

    class Posterior:
        def __init__(self, moments: torch.Tensor) -> None:
            self.mean, spread = moments.chunk(2, 1)
            self.spread = spread.clamp(-5, 5)

        @cached_property
        def std(self) -> torch.Tensor:
            return (0.5 * self.spread).exp()

        def divergence(self) -> torch.Tensor:
            return 0.5 * (self.mean.square() + self.spread.exp() - 1 - self.spread).sum(1)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.moments = lin(), lin(D, 2 * D)

        def forward(self, x: torch.Tensor) -> Posterior:
            return Posterior(self.moments(torch.tanh(self.first(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Encoder(), nn.Sequential(lin(), nn.Tanh(), lin())

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Posterior]:
            found = self.encoder(x)
            return self.decoder(found.mean + found.std / 2), found

    return rows(Model(), lambda output, _: output[0].square().mean() + 0.1 * output[1].divergence().mean())


# -- what the model's own code sets on layers, by a schedule


@odd
def probability_of_dropout_is_scheduled() -> nn.Module:
    """From the third forward on: until then the layers hand on the very tensor they were given."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(part for _ in range(4) for part in (lin(), nn.Dropout(0.0), nn.Tanh())))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            for module in self.net.modules():
                if isinstance(module, nn.Dropout):
                    module.p = min(0.5, 0.1 * max(0, self.calls - 2))
            return self.net(x)

    return Model()


@odd
def layers_are_unfrozen() -> nn.Module:
    class Model(Stack):
        def __init__(self) -> None:
            super().__init__(5)
            self.layers[:2].requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 5:
                for parameter in self.layers[:2].parameters():
                    parameter.requires_grad_(True)
            return self.run(x)

    return Model()
