"""Odd modules of kinds that models of public libraries have shown; each is written anew, as small as shows the kind.

Entries as in `odd_models`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import random

import torch
from models import Case
from odd_models import D, adding_to, lin
from torch import nn

PUBLISHED: dict[str, Callable[[], Case]] = {}


odd, case = adding_to(PUBLISHED)


@odd
def left_out_layers_then_a_token() -> nn.Module:
    """After an encoder that leaves layers out at random, the last among them, comes a parameter of the model's own."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(lin(), nn.Tanh()) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = (torch.rand(4) < 0.4).tolist()
            for layer, keep in zip(self.layers, kept, strict=True):
                x = x + layer(x) if keep else x
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder, self.token = Encoder(), Encoder(), nn.Parameter(torch.randn(1, D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.encoder(x)
            return self.decoder(self.token.expand(len(x), -1) * x)

    return Model()


@odd
def experts_moved_to_where_they_run() -> nn.Module:
    """Each expert is sent to the device of its input before it is called, and the others to where they wait."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = lin(), nn.ModuleList(nn.Sequential(lin(), nn.Tanh()) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.gate(x)
            for expert in self.experts:
                expert.to(x.device)
            return torch.stack([expert(x) for expert in self.experts]).sum(0)

    return Model()


@odd
def hooks_keep_views_of_what_layers_give() -> nn.Module:
    """Features for a projection, flattened by the hook that takes them; what it took last time is still there."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.projection = (
                nn.Sequential(lin(), nn.Tanh(), lin(), nn.Tanh(), lin()),
                nn.Sequential(lin(), nn.Tanh(), lin()),
            )
            self.taken: dict[str, torch.Tensor] = {}
            self.net[0].register_forward_hook(partial(self.keep, "low"))
            self.net[2].register_forward_hook(partial(self.keep, "high"))

        def keep(self, name: str, module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            self.taken[name] = out.reshape(len(out), 2, -1).flatten(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) + self.projection(self.taken["high"]) * self.taken["low"]

    return Model()


@odd
def features_a_hook_took_are_read_by_a_wrapper() -> nn.Module:
    """A wrapper empties a dict by device, runs a network of which a hook fills it, and takes them out again.

    Its own code runs on all stages, also where all its layers are on an earlier one than the last.
    """

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(lin(), nn.Tanh(), lin(), nn.Tanh())
            self.hidden: dict[torch.device, torch.Tensor] = {}
            self.net[2].register_forward_hook(self.keep)
            self.projector = nn.Sequential(lin(), nn.Tanh(), lin())

        def keep(self, module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            self.hidden[args[0].device] = out.reshape(len(out), 2, -1).flatten(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.hidden.clear()
            self.net(x)
            taken = self.hidden[x.device]
            self.hidden.clear()
            return self.projector(taken)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.predictor, self.target = Wrapper(), nn.Sequential(lin(), nn.Tanh(), lin()), Wrapper()
            self.target.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            guess = self.predictor(self.online(x))
            with torch.no_grad():
                goal = self.target(x)
            return guess - goal

    return Model()


@odd
def a_layer_fills_a_buffer_once() -> nn.Module:
    """Blocks keep what an inner layer makes in a buffer that was None: later forwards do not call that layer."""

    class Angles(nn.Module):
        def forward(self, length: int) -> torch.Tensor:
            return torch.linspace(0.0, 1.0, length).cos()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.angles, self.end = lin(), Angles(), lin()
            self.register_buffer("table", None, persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.start(x)
            if self.table is None:
                self.register_buffer("table", self.angles(x.shape[-1]), persistent=False)
            return self.end(x * self.table).tanh()

    return nn.Sequential(*(Block() for _ in range(3)))


@odd
def connections_that_return_how_to_add() -> nn.Module:
    """Around each block a small module gives the block's input and a function, which calls layers of that module."""

    class Connection(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after, self.weight = nn.Tanh(), nn.Sigmoid(), nn.Parameter(torch.rand(D))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
            given = self.before(x)

            def add(out: torch.Tensor) -> torch.Tensor:
                return x * self.weight + self.after(out)

            return given, add

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = (nn.Sequential(lin(), nn.Tanh(), lin(), nn.Tanh(), lin()) for _ in range(4))
            self.layers = nn.ModuleList(nn.ModuleList([Connection(), block]) for block in blocks)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for connection, block in self.layers:
                given, add = connection(x)
                x = add(block(given))
            return x

    return Model()


@odd
def heads_put_into_one_list_by_nested_modules() -> nn.Module:
    """Modules that hold one another each put what a head gives into a list that all share with the model."""

    class Level(nn.Module):
        def __init__(self, layer: nn.Module, head: nn.Module, inner: nn.Module, k: int, heads: list) -> None:
            super().__init__()
            self.layer, self.head, self.inner, self.k, self.heads = layer, head, inner, k, heads

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(self.layer(x)).tanh()
            self.heads[self.k] = self.head(x)
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.each = nn.ModuleList(lin() for _ in range(4)), nn.ModuleList(lin() for _ in range(3))
            self.heads = [torch.rand(1)] * 3
            self.net = self.layers[3]
            for k in reversed(range(3)):
                self.net = Level(self.layers[k], self.each[k], self.net, k, self.heads)
            self.out = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.out(self.net(x))
            return out + sum(self.heads)

    return Model()


@odd
def a_layer_keeps_its_generator_and_others_hold_it() -> nn.Module:
    """Blocks note in their forwards what was drawn with; what runs before them goes through all modules of theirs."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.state = nn.Parameter(torch.randn(D, D) / 3), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state = torch.get_rng_state()
            return torch.tanh(x @ self.weight)

    class Redraws(nn.Module):
        def __init__(self, instance: nn.Module) -> None:
            super().__init__()
            self.instance = instance

        def forward(self) -> None:
            for module in self.instance.modules():
                if isinstance(module, nn.Bilinear):
                    module.reset_parameters()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.net, self.end = lin(), nn.Sequential(Block(), Block(), Block()), lin()
            self.updates = Redraws(self.net)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.start(x)
            self.updates()
            return self.end(self.net(x))

    return Model()


@odd
def left_out_by_a_function_imported_by_name() -> nn.Module:
    """Each layer is a list of its parts and is left out by `random()`, as the file has imported it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(D), lin()]) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for norm, layer in self.layers:
                if self.training and random() < 0.5:
                    continue
                x = x + torch.tanh(layer(norm(x)))
            return x

    return Model()


@odd
def a_block_for_few_tokens_then_for_many() -> nn.Module:
    """Of its two calls the second alone is a large share of the work."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.first, self.second = nn.LayerNorm(D), lin(), lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.second(torch.tanh(self.first(self.norm(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.block, self.end = lin(), Block(), lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            region = self.block(self.start(x))
            tokens = self.block(region[:, None] * torch.linspace(0.5, 1.5, 32)[:, None])
            return self.end(region + tokens.mean(1))

    return Model()
