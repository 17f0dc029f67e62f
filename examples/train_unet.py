"""A U-Net whose skips go straight from the stage that makes them to the stage that uses them, trained to denoise.

python examples/train_unet.py
"""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F

import partitioner as pt

BATCH, SIZE = 8, 32


class UNet(nn.Module):
    """Nothing in here knows of stages, ranks or skips that cross them."""

    def __init__(self, width: int = 16, levels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**k for k in range(levels + 1)]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(self.block(a, b, stride=2) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(self.block(a + b, a) for a, b in reversed(list(itertools.pairwise(widths))))
        self.last = nn.Conv2d(width, 3, 1)

    @staticmethod
    def block(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(8, outputs), nn.SiLU())

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.first(image)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1))
        return self.last(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy waves, and the waves."""
    generator = torch.Generator().manual_seed(step)
    phase = torch.rand(BATCH, 3, 1, 1, generator=generator) * 6.3
    grid = torch.linspace(0, 6.3, SIZE)
    clean = torch.sin(grid[None, None, :, None] + phase) * torch.cos(grid[None, None, None, :] + phase)
    return clean + 0.3 * torch.randn(clean.shape, generator=generator), clean


def train(plan: pt.Plan, steps: int) -> list[float]:
    torch.manual_seed(0)
    losses = []
    with pt.materialize(plan, UNet(), loss_fn=F.mse_loss) as stage:
        optimizer = torch.optim.AdamW(stage.parameters(), lr=2e-3)
        for step in range(steps):
            noisy, clean = batch(step)
            losses.append(float(stage.train_step(noisy, clean)))
            optimizer.step()
            optimizer.zero_grad()
    return losses


def main() -> None:
    torch.manual_seed(0)
    noisy, clean = batch(0)
    plan = pt.partition(
        UNet(), noisy, gpus=2, loss_fn=F.mse_loss, example_target=clean, mesh={"pp": 2, "dp": 1}, microbatches=4
    )
    print(plan, flush=True)
    losses = pt.launch(train, plan, plan, 20)[0]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
