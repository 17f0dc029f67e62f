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
# # Capacity planning for a 70B model
#
# Before renting anything: does the training fit, how fast is it, on how many devices, and what would change that? The
# model is built on the meta device, so 70 billion parameters cost no memory here, and everything below is estimated:
# each report says within which band its times are to be taken.

# %%
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import partitioner as pt

# Llama 3 70B: "The Llama 3 Herd of Models", table 3, https://arxiv.org/abs/2407.21783
config = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e9:.1f} billion parameters")

# %% [markdown]
# ## Does it fit 64 devices?
#
# Batches of 64 sequences of 4,096 tokens, weights in 16 bits with the optimizer's copy in 32.

# %%
tokens = torch.zeros(64, 4096, dtype=torch.long)
batch = {"input_ids": tokens, "labels": tokens}
report = pt.capacity(model, batch, gpus="8x8xH100", precision="bf16-mixed", price_per_hour=3.0)
report

# %%
assert report.fits
print(f"{report.best.step_s:.1f} s a step, {report.fewest_devices} devices are the fewest that hold it")

# %% [markdown]
# `report.save("capacity.json")` keeps it; `partitioner capacity job:make --gpus 8x8xH100` says the same from a shell.
#
# ## One node?
#
# Eight devices hold 16 bytes a parameter of 70 billion only if they are large enough. A training that does not fit is a
# report as well, which says what it lacks:

# %%
small = pt.capacity(model, batch, gpus="8xH100", precision="bf16-mixed", curve=False)
print(str(small).split("\n\n")[1])
assert not small.fits
