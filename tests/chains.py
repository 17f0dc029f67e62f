"""Chains for planning tests: profiles with skips, shared parameters and uneven costs on demand, and clusters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from partitioner.profiles import Layer, LayerCost, Parameter, Profile, Tensor
from partitioner.specs import Cluster, Device, Link

FREE = Link(sizes_bytes=(0, 1), seconds=(0.0, 0.0))
LOTS = 2**50


def chain(
    forward_s: Sequence[float],
    backward_s: Sequence[float] | None = None,
    *,
    saved_bytes: int | Sequence[int] = 0,
    tensor_bytes: int | Sequence[int] = 0,
    parameter_bytes: int | Sequence[int] = 0,
    skips: Sequence[tuple[int, Sequence[int], int, bool]] = (),
    ties: Sequence[tuple[Sequence[int], int]] = (),
    sizes: tuple[int, ...] = (1,),
    fixed_s: float = 0.0,
    **more: Any,
) -> Profile:
    """Layers "0", "1", ... of these seconds and bytes a sample; each hands one tensor to the next.

    skips: (producer, consumers, bytes a sample, needs gradient). ties: (layers, bytes) of a parameter that they share.
    fixed_s: what a forward and a backward each take on top, whatever the micro-batch.
    """
    n = len(forward_s)
    backward_s = forward_s if backward_s is None else backward_s
    saved, handed, own = (_each(value, n) for value in (saved_bytes, tensor_bytes, parameter_bytes))
    layers = tuple(
        Layer(
            id=str(k),
            class_name="Layer",
            costs=tuple(
                LayerCost(
                    samples=size,
                    forward_s=fixed_s + forward_s[k] * size,
                    backward_s=fixed_s + backward_s[k] * size,
                    saved_bytes=saved[k] * size,
                )
                for size in sizes
            ),
        )
        for k in range(n)
    )
    tensors = [
        _tensor(f"t{first}", first, [second], handed[first], True, sizes) for first, second in pairwise(range(n))
    ]
    tensors += [_tensor(f"skip{k}", *skip, sizes) for k, skip in enumerate(skips)]
    parameters = [_parameter(f"{k}.weight", [k], own[k]) for k in range(n) if own[k]]
    parameters += [_parameter(f"tied{k}", users, num_bytes) for k, (users, num_bytes) in enumerate(ties)]
    fields: dict[str, Any] = {
        "model": "Chain",
        "layers": layers,
        "tensors": tuple(tensors),
        "parameters": tuple(parameters),
        "microbatch_sizes": sizes,
        "device": "a desk",
        "device_kind": "cpu",
        "provenance": "given",
    }
    return Profile(**(fields | more))


def cluster(
    num_devices: int,
    *,
    memory_bytes: int = LOTS,
    overhead_bytes: int = 0,
    speeds: Sequence[float] | None = None,
    nodes: Sequence[int] | None = None,
    link: Link = FREE,
    inter: Link | None = None,
) -> Cluster:
    devices = tuple(
        Device(name="Toy", memory_bytes=memory_bytes, overhead_bytes=overhead_bytes, relative_speed=speed)
        for speed in speeds or [1.0] * num_devices
    )
    return Cluster(devices=devices, nodes=tuple(nodes or [0] * num_devices), intra=link, inter=inter or link)


def random_chain(rng: random.Random, n: int) -> Profile:
    """Uneven layers with skips, tied parameters, places that cannot be cut, and neighbours that hand nothing over."""
    skips = [
        (at, sorted({rng.randrange(at + 1, n) for _ in range(2)}), rng.randrange(50_000), rng.random() < 0.5)
        for at in (rng.randrange(n - 1) for _ in range(rng.randrange(3) if n > 1 else 0))
    ]
    ties = [(sorted({rng.randrange(n) for _ in range(2)}), 40_000)] if rng.random() < 0.4 else []
    profile = chain(
        [rng.random() * 1e-3 for _ in range(n)],
        [rng.random() * 1e-3 for _ in range(n)],
        saved_bytes=[rng.randrange(50_000) for _ in range(n)],
        tensor_bytes=[rng.randrange(100_000) for _ in range(n)],
        parameter_bytes=[4_000 * rng.randrange(50) for _ in range(n)],
        skips=skips,
        ties=ties,
        sizes=rng.choice([(1,), (1, 4)]),
        fixed_s=rng.choice([0.0, 1e-4]),
        optimizer_s=1e-4,
        buffer_bytes=1_000,
        no_cut={str(k): "glue in between" for k in range(1, n) if rng.random() < 0.15},
    )
    if rng.random() < 0.2:
        profile = profile.model_copy(update={"tensors": profile.tensors[1:]})
    return profile


def random_branches(rng: random.Random, n: int) -> Profile:
    """The same without what each layer hands to the next: tensors go from some layer to a few later ones."""
    profile = random_chain(rng, n).model_copy(update={"no_cut": {}})
    sizes, tensors = profile.microbatch_sizes, []
    for at in range(n - 1):
        if rng.random() < 0.8:
            to = sorted({min(n - 1, at + rng.choice([1, 2, 2, 3, n])) for _ in range(2)})
            tensors.append(_tensor(f"t{at}", at, to, rng.randrange(100_000), rng.random() < 0.8, sizes))
    return profile.model_copy(update={"tensors": tuple(tensors)})


def _each(value: int | Sequence[int], n: int) -> Sequence[int]:
    return [value] * n if isinstance(value, int) else value


def _tensor(
    name: str, producer: int, consumers: Sequence[int], num_bytes: int, needs_gradient: bool, sizes: tuple[int, ...]
) -> Tensor:
    return Tensor(
        id=name,
        producer=str(producer),
        consumers=tuple(map(str, consumers)),
        shape=(sizes[-1], 1),
        dtype="float32",
        bytes_at=tuple(num_bytes * size for size in sizes),
        needs_gradient=needs_gradient,
    )


def _parameter(name: str, users: Sequence[int], num_bytes: int) -> Parameter:
    return Parameter(
        names=(name,),
        shape=(num_bytes // 4,),
        dtype="float32",
        bytes=num_bytes,
        trainable=True,
        layers=tuple(map(str, users)),
    )
