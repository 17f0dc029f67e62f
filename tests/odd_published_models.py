"""Odd modules of kinds that models of public libraries have shown; each is written anew, as small as shows the kind.

Entries as in `odd_models`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
