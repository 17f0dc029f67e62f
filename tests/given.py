"""Profiles and plans written by hand, small enough to check every number in your head."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from partitioner.plan import (
    Alternative,
    LostEfficiency,
    MemoryItems,
    Plan,
    Prediction,
    Stage,
    StagePrediction,
)
from partitioner.profiles import Layer, LayerCost, Parameter, Profile, Tensor
from partitioner.specs import Cluster, Device, Link, Training

GiB, MiB = 2**30, 2**20


def given_profile(num_layers: int = 4, sizes: tuple[int, ...] = (1, 2), **changes: Any) -> Profile:
    """A chain "block.0", "block.1", ... Layer k takes (k + 1) ms forward a sample and twice that backward."""
    names = [f"block.{k}" for k in range(num_layers)]
    layers = tuple(
        Layer(
            id=name,
            class_name="Block",
            parameter_bytes=4 * MiB,
            gradient_bytes=4 * MiB,
            costs=tuple(
                LayerCost(
                    samples=size,
                    forward_s=size * (k + 1) * 1e-3,
                    backward_s=2 * size * (k + 1) * 1e-3,
                    saved_bytes=size * MiB,
                )
                for size in sizes
            ),
        )
        for k, name in enumerate(names)
    )
    tensors = tuple(
        Tensor(
            id=f"{source}:0",
            producer=source,
            consumers=(target,),
            shape=(sizes[-1], 256),
            dtype="float32",
            bytes_at=tuple(1024 * size for size in sizes),
            needs_gradient=True,
        )
        for source, target in pairwise(names)
    )
    parameters = tuple(
        Parameter(
            names=(f"{name}.weight",),
            shape=(1024, 1024),
            dtype="float32",
            bytes=4 * MiB,
            trainable=True,
            layers=(name,),
        )
        for name in names
    )
    fields: dict[str, Any] = {
        "model": "Chain",
        "layers": layers,
        "tensors": tensors,
        "parameters": parameters,
        "microbatch_sizes": sizes,
        "optimizer_s": 0.003,
        "device": "a desk",
        "device_kind": "cpu",
        "provenance": "given",
        "fingerprint": "f" * 8,
    }
    return Profile(**(fields | changes))


def given_cluster(num_devices: int = 2, memory_bytes: int = GiB) -> Cluster:
    device = Device(name="Toy", kind="cpu", memory_bytes=memory_bytes)
    return Cluster.of(device, num_devices, within=Link.of(1e-5, 1e9))


def given_plan(**changes: Any) -> Plan:
    """Two stages of the four layers on two devices: [0, 1, 2] and [3], four micro-batches of two samples."""
    profile = given_profile()
    stages = (
        Stage(index=0, layers=("block.0", "block.1", "block.2"), ranks=(0,)),
        Stage(index=1, layers=("block.3",), ranks=(1,)),
    )
    predicted = (
        StagePrediction(
            forward_s=0.012,
            backward_s=0.024,
            compute_s=0.144,
            communication_s=0.001,
            idle_s=0.023,
            send_bytes=2048,
            in_flight=2,
            memory=MemoryItems(weights=12 * MiB, gradients=12 * MiB, optimizer=24 * MiB, activations=12 * MiB),
        ),
        StagePrediction(
            forward_s=0.008,
            backward_s=0.016,
            compute_s=0.096,
            communication_s=0.002,
            idle_s=0.070,
            send_bytes=0,
            in_flight=1,
            memory=MemoryItems(weights=4 * MiB, gradients=4 * MiB, optimizer=8 * MiB, activations=2 * MiB),
        ),
    )
    prediction = Prediction(
        step_s=0.168,
        optimizer_s=0.002,
        throughput=8 / 0.170,
        single_device_s=0.243,
        speedup=0.243 / 0.170,
        efficiency=0.243 / 0.170 / 2,
        bubble_fraction=0.093 / 0.336,
        stages=predicted,
        lost=LostEfficiency(imbalance=0.1412, fill_drain=0.125, communication=0.0191),
    )
    fields: dict[str, Any] = {
        "profile": profile,
        "cluster": given_cluster(),
        "training": Training(batch_size=8),
        "mesh": {"pp": 2, "dp": 1},
        "schedule": "1f1b",
        "num_microbatches": 4,
        "stages": stages,
        "prediction": prediction,
        "lower_bound_s": 0.16,
        "runners_up": (
            Alternative(mesh={"pp": 1, "dp": 2}, schedule="1f1b", num_microbatches=4, stage_sizes=(4,), step_s=0.2),
            Alternative(
                mesh={"pp": 2, "dp": 1},
                schedule="gpipe",
                num_microbatches=8,
                stage_sizes=(2, 2),
                step_s=None,
                reason="short of 0.2 GiB",
            ),
        ),
        "why": ("Stage 0 is the bottleneck: block.2 cannot be split.",),
    }
    return Plan(**(fields | changes))
