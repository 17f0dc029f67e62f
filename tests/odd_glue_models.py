"""Odd modules whose own code around the layers keeps state, sets what layers read, or returns objects of its own.

Entries as in `odd_models`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cached_property

import numpy as np
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


# -- what is counted at the end of a forward and read at its start


@odd
def counts_at_the_end() -> nn.Module:
    class Model(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.run(x * (1 + 0.1 * self.calls))
            self.calls += 1
            return x

    return Model()


@odd
def counts_in_a_method_that_is_called_at_the_end() -> nn.Module:
    """Only in training, from two numbers that are kept, and another one every third time."""

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.schedule = {"rate": 1.0, "warm": 4}

        def finish(self, x: torch.Tensor, step: int = 1) -> None:
            if self.training:
                self.calls += step
                if self.calls % 3 == 0:
                    self.schedule["rate"] = max(0.25, self.schedule["rate"] / 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rate = self.schedule["rate"] if self.calls < self.schedule["warm"] else -1.0
            with torch.autocast("cpu", enabled=False):
                for layer in self.layers:
                    x = torch.tanh(layer(x)) + 0.1 * rate
                self.finish(x)
            return x.square()

    return Model()


@odd
def counts_in_the_middle_of_an_inner_model() -> nn.Module:
    """From a number worked out before, which is nowhere but in a variable; both models count."""

    class Inner(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            following, x = self.calls + 1, x * (1 + 0.1 * self.calls)
            x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
            self.calls = following
            return torch.tanh(self.layers[3](torch.tanh(self.layers[2](x)))) / self.calls

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head, self.seen = Inner(), nn.Sequential(lin(), nn.Tanh(), lin()), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.head(self.inner(x / (1 + self.seen)))
            self.seen = min(self.seen + 1, 3)
            return x

    return Model()


# -- random numbers of the model's own


@odd
def generators_of_its_own() -> nn.Module:
    """One of each kind, drawn from before the first layer."""

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.old, self.new, self.plain = np.random.RandomState(3), np.random.default_rng(5), random.Random(7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run(x * (self.old.rand() + self.new.random() + self.plain.random()))

    return Model()


# -- what is counted in buffers


class Counted(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))


@odd
def counts_in_a_buffer_at_the_end() -> nn.Module:
    class Model(Counted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.run(x * (1 + 0.1 * self.step))
            if self.training:
                self.step += 1
            return x

    return Model()


@odd
def counts_in_buffers_by_methods_at_the_end() -> nn.Module:
    """One every third time, another by an item, one that is put in anew; their values are saved for the backward."""

    class Model(Counted):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rate", torch.ones(2))
            self.register_buffer("power", torch.ones(()))

        def count(self) -> None:
            self.step.add_(1)
            if self.step % 3 == 0 and int(self.step) < 9:
                self.rate.mul_(0.5).add_(0.1)
            self.rate[1] = self.rate[1] + 0.25
            self.power = self.power * 0.9

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.run(x * self.rate[0] + self.rate[1] / (1 + self.step)) * self.power
            x = x * self.rate.sum()
            self.count()
            return x * self.power

    return Model()


@odd
def counts_in_a_buffer_of_an_inner_model() -> nn.Module:
    """Between its layers, and read at its beginning and its end."""

    class Inner(Counted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x / (1 + self.step)))))
            self.step.add_(1)
            return torch.tanh(self.layers[3](torch.tanh(self.layers[2](x)))) / self.step

    return nn.Sequential(lin(), nn.Tanh(), Inner(), lin(), nn.Tanh(), lin())


@odd
def counts_in_a_buffer_from_the_fourth_forward_on() -> nn.Module:
    class Model(Counted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            x = self.run(x * (1 + 0.1 * self.step))
            if self.calls > 3:
                self.step += 1
            return x

    return Model()


# -- what is set on layers, or only now and then


@odd
def flags_of_layers_are_buffers() -> nn.Module:
    """As in training for fewer bits: what layers observe is used from the fourth forward on, fixed from the sixth."""

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.zeros(()))
            self.register_buffer("observes", torch.ones(1, dtype=torch.uint8))
            self.register_buffer("rounds", torch.zeros(1, dtype=torch.uint8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.observes[0] == 1:
                self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
            if self.rounds[0] == 1:
                x = x + (torch.round(x / self.largest * 15) / 15 * self.largest - x).detach()
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(part for _ in range(3) for part in (lin(), Rounded(), nn.Tanh())))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            for module in self.net:
                if isinstance(module, Rounded) and self.calls == 4:
                    module.rounds[0] = 1
                if isinstance(module, Rounded) and self.calls == 6:
                    module.observes.fill_(0)
            return self.net(x)

    return Model()


@odd
def experts_are_balanced_every_third_forward() -> nn.Module:
    """By a bias that is added before the experts and changed after them."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts, self.calls = lin(D, 3), nn.ModuleList(lin() for _ in range(3)), 0
            self.register_buffer("bias", torch.zeros(3))

        def balance(self, chosen: torch.Tensor) -> None:
            load = torch.bincount(chosen, minlength=3).float()
            self.bias += 0.5 * torch.sign(load.mean() - load)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = torch.sigmoid(self.gate(x))
            chosen, y = (scores + self.bias).argmax(-1), torch.zeros_like(x)
            for k, expert in enumerate(self.experts):
                y = y + expert(x) * (chosen == k).float()[:, None] * scores[:, k, None]
            self.calls += 1
            if self.calls % 3 == 0:
                with torch.no_grad():
                    self.balance(chosen)
            return x + y

    return nn.Sequential(lin(), Experts(), Experts(), lin())


@odd
def rates_come_from_an_iterator() -> nn.Module:
    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.rates = itertools.cycle([1.0, 0.5, 2.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run(x * next(self.rates))

    return Model()


@odd
def sparse_graph_with_weights() -> nn.Module:
    """Each layer makes its matrix before its first module, and uses it after."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.weights = lin(), nn.Parameter(torch.rand(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.arange(len(x))
            places = torch.stack([rows.repeat(3), torch.cat([(rows + k) % len(x) for k in range(3)])])
            values, size = self.weights.repeat_interleave(len(x)), (len(x), len(x))
            matrix = torch.sparse_coo_tensor(places, values, size, check_invariants=True)
            return torch.tanh(torch.sparse.mm(matrix, self.inner(x)))

    return nn.Sequential(*(Layer() for _ in range(4)))


@odd
def mean_of_six_earlier_forwards() -> nn.Module:
    """Read by the first layer once there are as many: the model's values after it was profiled, too."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = lin(), lin(), lin(), lin()
            self.bank: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(self.bank) >= 6:
                x = x + torch.stack(self.bank[-6:]).mean(0)
            hidden = torch.tanh(self.b(torch.tanh(self.a(x))))
            self.bank.append(hidden.detach().mean(0))
            return self.d(torch.tanh(self.c(hidden)))

    return Model()


@case
def layers_extend_the_batch_they_are_given() -> Case:
    """Each adds its features to the dict, and takes out those that nobody needs any more."""

    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer, self.number = lin(), number

        def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            batch[f"features{self.number + 1}"] = torch.tanh(self.layer(batch[f"features{self.number}"]))
            batch.pop(f"features{self.number - 1}", None)
            return batch

    torch.manual_seed(1)
    batch = {"features0": torch.randn(8, D), "name": "a", "ids": [str(k) for k in range(8)]}
    model = nn.Sequential(*(Block(k) for k in range(5)))
    return Case(model, (batch,), loss_fn=lambda output, _: output["features5"].square().mean())


@case
def images_of_different_sizes_in_a_list() -> Case:
    """As detectors take them, with a dict of boxes for each; the loss is the model's own."""

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, D, 3, padding=1), nn.Tanh(), nn.Conv2d(D, D, 3, padding=1), nn.Tanh()
            )
            self.head = nn.Sequential(lin(), nn.Tanh(), lin(D, 4))

        def forward(
            self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]
        ) -> tuple[torch.Tensor, list[torch.Tensor]]:
            height, width = (max(image.shape[k] for image in images) for k in (1, 2))
            padded = [nn.functional.pad(one, (0, width - one.shape[2], 0, height - one.shape[1])) for one in images]
            found = list(self.head(self.body(torch.stack(padded)).mean((2, 3))))
            pairs = zip(found, targets, strict=True)
            losses = [(one - target["boxes"]).square().mean() for one, target in pairs]
            return torch.stack(losses).mean(), found

    torch.manual_seed(1)
    images = [torch.randn(3, 6 + k % 3, 5 + k % 4) for k in range(8)]
    return Case(Detector(), (images, [{"boxes": torch.randn(3, 4)} for _ in images]))
