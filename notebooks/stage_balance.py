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
# # Exploring stage balance
#
# A pipeline is as fast as its slowest stage, and it idles while it fills and drains. This notebook cuts one model by
# hand, compares that with the best split, and runs both under several schedules. Nothing is measured here: planning
# needs a profile, not the model, so it takes milliseconds. The profile is written by hand to look like a vision model:
# early layers are slow and keep much, late layers hold the parameters.

# %%
import partitioner as pt
from partitioner.profiles import Layer, LayerCost, Parameter, Profile, Tensor
from partitioner.report.comparison import Comparison

MiB = 2**20
names = ["stem", *(f"stage{s}.block{b}" for s, depth in enumerate((3, 4, 12, 3), 1) for b in range(depth)), "head"]
forward_ms = [6.0, *[5.0] * 3, *[4.0] * 4, *[2.6] * 12, *[1.8] * 3, 0.7]
saved_mib = [48, *[40] * 3, *[24] * 4, *[12] * 12, *[6] * 3, 1]
weight_mib = [0.1, *[0.8] * 3, *[2.5] * 4, *[4.4] * 12, *[17.0] * 3, 8.0]

profile = Profile(
    model="VisionNet",
    layers=tuple(
        Layer(
            id=name,
            class_name="Block",
            parameter_bytes=int(weight * MiB),
            gradient_bytes=int(weight * MiB),
            costs=tuple(
                LayerCost(
                    samples=n,
                    forward_s=1e-3 * (0.15 + n * ms / 8),
                    backward_s=2.1e-3 * (0.1 + n * ms / 8),
                    saved_bytes=int(n * saved * MiB / 8),
                )
                for n in (1, 8)
            ),
        )
        for name, ms, saved, weight in zip(names, forward_ms, saved_mib, weight_mib, strict=True)
    ),
    tensors=tuple(
        Tensor(
            id=f"{first} out",
            producer=first,
            consumers=(second,),
            shape=(8, 256),
            dtype="float32",
            bytes_at=(int(saved * MiB / 24), int(saved * MiB / 3)),
            needs_gradient=True,
        )
        for first, second, saved in zip(names, names[1:], saved_mib, strict=False)
    ),
    parameters=tuple(
        Parameter(
            names=(f"{name}.weight",),
            shape=(int(weight * MiB / 4),),
            dtype="float32",
            bytes=4 * int(weight * MiB / 4),
            trainable=True,
            layers=(name,),
        )
        for name, weight in zip(names, weight_mib, strict=True)
    ),
    microbatch_sizes=(1, 8),
    optimizer_s=2e-3,
    device="a desk",
    device_kind="cuda",
    provenance="given",
)
pt.CostGraph(profile)

# %% [markdown]
# ## By hand, and the optimum
#
# Four stages of equal numbers of layers is what one writes first. The solver may put its cuts anywhere.

# %%
cluster = pt.Cluster.parse("4xA100-80GB")
training = pt.Training(batch_size=64, mesh={"pp": 4, "dp": 1}, microbatches=16, schedule="1f1b")
by_hand = {name: min(3, k // 6) for k, name in enumerate(names)}
hand_made = pt.solve(profile, cluster, training.model_copy(update={"pin": by_hand}))
optimum = pt.solve(profile, cluster, training)
optimum.compare(hand_made)

# %% [markdown]
# The slowest stage of the hand-made split holds up all others:

# %%
hand_made.plot_balance()

# %%
optimum.plot_balance()

# %% [markdown]
# Coloured by stage, every layer as high as the time it takes:

# %%
optimum.plot_graph()

# %% [markdown]
# ## Move a cut yourself
#
# Choose a cut, move it, change the micro-batches or the schedule; step time, bubble, balance and memory follow, beside
# the optimum. (The sliders need a running notebook; below they are moved by code.)

# %%
explorer = optimum.explore()
explorer

# %%
explorer.cut.value = 0
layer, at = explorer.position.options[-1]
explorer.position.value = at
print(f"with the first cut before {layer}: {explorer.current.prediction.step_s * 1e3:.1f} ms")
assert explorer.current.prediction.step_s >= optimum.prediction.step_s
explorer.reset.click()

# %% [markdown]
# ## GPipe, 1F1B, zero-bubble
#
# GPipe and 1F1B have the same bubble for equal stages; 1F1B holds fewer micro-batches at a time. Zero-bubble schedules
# split the backward in two and fill the gaps with the part that nobody waits for.

# %%
schedules = ("gpipe", "1f1b", "zero-bubble", "zero-bubble-h2")
plans = [pt.solve(profile, cluster, training.model_copy(update={"schedule": name})) for name in schedules]
Comparison(schedules, tuple(plans))

# %%
plans[0].plot_timeline()

# %%
plans[1].plot_timeline()

# %%
plans[2].plot_timeline()

# %%
by_name = dict(zip(schedules, plans, strict=True))
held = {name: max(stage.memory.activations for stage in plan.prediction.stages) for name, plan in by_name.items()}
assert held["1f1b"] < held["gpipe"]
assert by_name["zero-bubble"].prediction.bubble_fraction < by_name["1f1b"].prediction.bubble_fraction
