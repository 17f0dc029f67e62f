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
# # Quickstart
#
# Give `partition` a model, one batch and the devices you have. It measures the layers, chooses stages, schedule and
# micro-batches, and predicts the step. This notebook runs on the CPU of any machine; there, a "device" is a process.

# %%
import torch
from torch import nn

import partitioner as pt

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, width: int = 192, depth: int = 6, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Classifier()
inputs, target = torch.randn(512, 64), torch.randint(10, (512,))

# %% [markdown]
# ## Plan
#
# A pipeline of two stages is asked for here; with `mesh="auto"`, the default, replicas would be considered too.

# %%
plan = pt.partition(
    model,
    inputs,
    gpus=2,
    loss_fn=nn.functional.cross_entropy,
    example_target=target,
    mesh={"pp": 2},
    microbatches=4,
)
plan

# %% [markdown]
# ## Look
#
# Where the devices' time goes, from all of it down to what does the model's work:

# %%
plan.plot_efficiency()

# %% [markdown]
# The schedule, action by action. Numbers are micro-batches:

# %%
plan.plot_timeline()

# %% [markdown]
# `plan.save_report("plan.html")` writes all of it as one page for colleagues, `plan.save_trace("trace.json")` as a
# trace for https://ui.perfetto.dev, and `plan.save("plan.json")` as the plan itself.
#
# ## Check
#
# `verify` trains some steps on the plan's ranks and on one device, and compares loss, gradients, weights and times.

# %%
verification = pt.verify(plan, model, inputs, loss_fn=nn.functional.cross_entropy, example_target=target, steps=3)
verification

# %%
assert verification.passed

# %% [markdown]
# ## Train
#
# The same line on every rank, in a script that `torchrun --nproc-per-node 2 train.py` starts:
#
# ```python
# plan = pt.load("plan.json")
# with pt.materialize(plan, model, loss_fn=loss_fn) as stage:
#     optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-4)
#     for inputs, target in loader:
#         loss = stage.train_step(inputs, target)
#         optimizer.step()
#         optimizer.zero_grad()
# ```
