"""Plain data parallel: the same two lines as any plan, on a model for which replicas are the fastest.

python examples/data_parallel.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import partitioner as pt


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)
    )


def make_dataset() -> TensorDataset:
    """Points of four noisy clusters."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 64, generator=generator)
    labels = torch.randint(0, 4, (4096,), generator=generator)
    return TensorDataset(centres[labels] + torch.randn(4096, 64, generator=generator), labels)


def train(plan: pt.Plan, epochs: int) -> list[float]:
    dataset = make_dataset()
    losses = []
    with pt.materialize(plan, make_model(), loss_fn=F.cross_entropy) as stage:
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
        # Each replica reads its own share of the samples: the sampler of the stage sees to it.
        loader = DataLoader(dataset, plan.training.batch_size // stage.dp_size, sampler=stage.sampler(dataset))
        for _ in range(epochs):
            for points, labels in loader:
                losses.append(float(stage.train_step(points, labels)))
                optimizer.step()
                optimizer.zero_grad()
    return losses


def main() -> None:
    points, labels = next(iter(DataLoader(make_dataset(), 512)))
    plan = pt.partition(
        make_model(), points, gpus=2, loss_fn=F.cross_entropy, example_target=labels, mesh={"pp": 1, "dp": 2}
    )
    print(plan, flush=True)
    losses = pt.launch(train, plan, plan, 4)[0]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} over {len(losses)} steps")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
