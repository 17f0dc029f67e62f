# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reading a profile
#
# A profile says what each layer costs: seconds forward and backward, bytes of parameters and of activations kept for
# the backward, and the tensors that flow from layer to layer. It is plain data: measure it where the devices are, plan
# from it anywhere.

# %%
import torch
from torch import nn

import partitioner as pt

torch.manual_seed(0)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


class SmallNet(nn.Module):
    """Convolutions with a skip from the stem to the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.early = nn.ModuleList(Residual(32) for _ in range(3))
        self.down = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.late = nn.ModuleList(Residual(64) for _ in range(3))
        self.skip = nn.Conv2d(32, 64, 1, stride=2)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        first = x = self.stem(x)
        for block in self.early:
            x = block(x)
        x = self.down(x)
        for block in self.late:
            x = block(x)
        x = x + self.skip(first)
        return self.head(x.mean((2, 3)))


model = SmallNet()
inputs, target = torch.randn(32, 3, 24, 24), torch.randint(10, (32,))

# %%
profile = pt.profile(model, inputs, loss_fn=nn.functional.cross_entropy, example_target=target, num_threads=1)
profile

# %% [markdown]
# Three things to look for:
#
# - **whole step** beside the sum of its layers: what is not any layer's own, or cannot be told apart.
# - **spread**: half of the range in which the middle half of the repeats lie. A large one means a noisy machine.
# - **saved** against **makes**: what a layer keeps for its backward stays on its rank, what it makes may cross a cut.
#
# The times of a layer are known at several sizes of micro-batch, so a fixed cost a call and a cost a sample are told
# apart:

# %%
layer = max(profile.layers, key=lambda layer: layer.costs[-1].forward_s)
print(layer.id)
for samples in (1, 2, *profile.microbatch_sizes):
    cost = layer.cost(samples)
    print(f"{samples:2} samples: forward {cost.forward_s * 1e3:6.2f} ms, saves {cost.saved_bytes / 2**20:5.2f} MiB")

# %% [markdown]
# ## From costs to cuts
#
# The cost graph of the profile knows what crosses each cut. The skip makes cuts before it more expensive: its tensor
# crosses them all.

# %%
graph = pt.CostGraph(profile)
samples = profile.microbatch_sizes[-1]
for cut in graph.allowed_cuts:
    print(f"before {graph.ids[cut]:14} {graph.crossing(cut, samples) / 2**20:6.2f} MiB")

# %% [markdown]
# From the profile alone, plans for machines that are elsewhere:

# %%
cluster = pt.Cluster.parse("2xA100-80GB")
plan = pt.solve(profile, cluster, pt.Training(batch_size=32, mesh={"pp": 2, "dp": 1}))
plan.plot_graph()

# %% [markdown]
# `plan.why` says when costs were measured on other devices than the plan is for: their times are then not those of the
# plan's devices.

# %%
print(*plan.why, sep="\n")
assert any("measured on CPU" in reason for reason in plan.why)
