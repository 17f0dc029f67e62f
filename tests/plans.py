"""Plans for the executor's tests: real captures, cuts and meshes by hand, costs that mean nothing."""

from __future__ import annotations

from typing import Any

import torch
from given import given_cluster
from models import Case
from torch import nn

from partitioner.capture import Capture, capture
from partitioner.microbatches import as_call
from partitioner.plan import LostEfficiency, MemoryItems, Plan, Prediction, Stage, StagePrediction
from partitioner.profiles import Layer, LayerCost, Profile, Tensor
from partitioner.specs import Shard, Training


def profile_of(captured: Capture, dtype: str = "float32") -> Profile:
    """A capture as a profile in which every layer costs the same."""
    cost = LayerCost(samples=1, forward_s=1e-3, backward_s=2e-3)
    return Profile(
        model=captured.model,
        layers=tuple(Layer(id=layer.id, class_name=layer.class_name, costs=(cost,)) for layer in captured.layers),
        tensors=tuple(
            Tensor(
                id=tensor.id,
                producer=tensor.producer,
                consumers=tensor.consumers,
                shape=tensor.shape,
                dtype=tensor.dtype,
                bytes_at=(tensor.nbytes,),
                needs_gradient=tensor.needs_gradient,
            )
            for tensor in captured.tensors
        ),
        parameters=captured.parameters,
        buffers=captured.buffers,
        buffer_bytes=captured.buffer_bytes,
        attributes=captured.attributes,
        microbatch_sizes=(1,),
        no_cut=captured.no_cut,
        joinable=captured.joinable,
        glue=captured.glue,
        glue_names=captured.glue_names,
        dynamic=captured.dynamic,
        opened=captured.opened,
        fire_hooks=captured.fire_hooks,
        collecting=captured.collecting,
        device="a desk",
        device_kind="cpu",
        provenance="given",
        dtype=dtype,
        fingerprint=captured.fingerprint,
        call_digest=captured.call_digest,
    )


def plan_of(
    model: nn.Module,
    inputs: Any,
    *,
    pp: int = 2,
    dp: int = 1,
    microbatches: int = 2,
    schedule: str = "1f1b",
    cuts: list[str] | None = None,
    batch_size: int = 8,
    dtype: str = "float32",
    batch_dim: int = 0,
    shard: tuple[Shard, ...] = (),
) -> Plan:
    """The plan that cuts before the layers in `cuts`, or in parts of equal numbers of layers. Rank = stage * dp + k."""
    args, kwargs = as_call(inputs)
    profile = profile_of(capture(model, args, kwargs), dtype)
    ids = [layer.id for layer in profile.layers]
    if cuts is None:
        free = [k for k in range(1, len(ids)) if ids[k] not in profile.no_cut]
        assert len(free) >= pp - 1, f"{len(free)} cuts possible, {pp - 1} needed"
        bounds = [free[(k * len(free)) // pp] for k in range(1, pp)]
    else:
        bounds = [ids.index(name) for name in cuts]
    ends = [*bounds, len(ids)]
    stages = tuple(
        Stage(
            index=k,
            layers=tuple(ids[start:end]),
            ranks=tuple(range(k * dp, (k + 1) * dp)),
            shard=shard[k] if shard else "none",
        )
        for k, (start, end) in enumerate(zip([0, *bounds], ends, strict=True))
    )
    predicted = StagePrediction(
        forward_s=1e-3,
        backward_s=2e-3,
        compute_s=1e-2,
        communication_s=0.0,
        idle_s=0.0,
        send_bytes=0,
        in_flight=1,
        memory=MemoryItems(),
    )
    return Plan(
        profile=profile,
        cluster=given_cluster(len(stages) * dp),
        training=Training(batch_size=batch_size, batch_dim=batch_dim),
        mesh={"pp": len(stages), "dp": dp},
        schedule=schedule,
        num_microbatches=microbatches,
        stages=stages,
        prediction=Prediction(
            step_s=1e-2,
            optimizer_s=1e-3,
            throughput=1.0,
            single_device_s=1e-2,
            speedup=1.0,
            efficiency=1.0,
            bubble_fraction=0.0,
            stages=tuple(predicted for _ in stages),
            lost=LostEfficiency(),
        ),
        lower_bound_s=1e-2,
    )


def plan_for(case: Case, **how: Any) -> Plan:
    """A plan for one of the test models."""
    return plan_of(case.model, case.inputs, **how)


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All ranks' tensors by name; a tensor that several ranks hold must be the same bits on each."""
    whole: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert name not in whole or torch.equal(whole[name], tensor), f"{name} differs between ranks"
            whole[name] = tensor
    return whole
