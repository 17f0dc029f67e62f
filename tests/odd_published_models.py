"""Odd modules of kinds that models of public libraries have shown; each is written anew, as small as shows the kind.

Entries as in `odd_models`.
"""

from __future__ import annotations

from collections.abc import Callable

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
