"""torch_geometric: nodes of all samples in one graph, as it is made in the model, since edges have no samples."""

from __future__ import annotations

from importlib import import_module

import torch
from models import Case
from torch import nn

from library_models.building import (
    BATCH,
    each,
    library,
    squared,
)


class OnRing(nn.Module):
    """Nodes of every sample on one ring of all samples' nodes, as a batch of small graphs is one graph."""

    def __init__(self, net: nn.Module, channels: int = 8) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(channels, 1)

    def forward(self, nodes: torch.Tensor) -> torch.Tensor:
        batch, count, _ = nodes.shape
        start = torch.arange(count)
        ring = torch.stack([start, (start + 1) % count])
        edges = torch.cat([ring + k * count for k in range(batch)], 1)
        return self.head(self.net(nodes.flatten(0, 1), torch.cat([edges, edges.flip(0)], 1)))


def _graph(name: str) -> Case:
    nets = import_module("torch_geometric.nn")
    net = getattr(nets, name)(
        8,
        16,
        3,
        8,
        dropout=0.1,
        norm=None if name == "GraphUNet" else "batch_norm",
        **(
            {"jk": "cat"}
            if name != "PNA"
            else {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.tensor([0, 0, 9])}
        ),
    )
    return squared(OnRing(net), torch.randn(BATCH, 6, 8))


each("torch_geometric", "geometric", ["GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN", "PNA"], _graph)


@library("torch_geometric")
def geometric_unet() -> Case:
    from torch_geometric.nn import GraphUNet

    return squared(OnRing(GraphUNet(8, 16, 8, depth=2, pool_ratios=0.5)), torch.randn(BATCH, 6, 8))


@library("torch_geometric")
def geometric_sequential() -> Case:
    from torch_geometric.nn import GATv2Conv, GCN2Conv, GraphNorm, Sequential, TransformerConv

    net = Sequential(
        "x, edges",
        [
            (GATv2Conv(8, 4, heads=2), "x, edges -> h"),
            nn.ReLU(),
            (GraphNorm(8), "h -> h"),
            (TransformerConv(8, 8), "h, edges -> h"),
            (GCN2Conv(8, 0.1), "h, x, edges -> h"),
        ],
    )
    return squared(OnRing(net), torch.randn(BATCH, 6, 8))


@library("torch_geometric")
def geometric_gru_gated() -> Case:
    from torch_geometric.nn import GatedGraphConv

    return squared(OnRing(GatedGraphConv(8, 3)), torch.randn(BATCH, 6, 8))


@library("torch_geometric")
def geometric_schnet() -> Case:
    from torch_geometric.nn import SchNet

    class Fed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = SchNet(16, 16, 2, 8, interaction_graph=_all_pairs)

        def forward(self, z: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            return self.net(z.flatten(), position.flatten(0, 1), torch.arange(len(z)).repeat_interleave(z.shape[1]))

    return squared(Fed(), torch.randint(1, 9, (BATCH, 5)), torch.randn(BATCH, 5, 3))


def _all_pairs(position: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = ((batch[:, None] == batch) & ~torch.eye(len(batch), dtype=torch.bool)).nonzero().T
    return pairs, (position[pairs[0]] - position[pairs[1]]).norm(dim=-1)
