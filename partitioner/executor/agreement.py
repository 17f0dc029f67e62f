"""Whether all ranks have the same model in the same order, and those of a replica the same batch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from partitioner.errors import ArgumentError, PlanMismatchError
from partitioner.executor.mesh import Mesh
from partitioner.structures import tensors_in

MAX_ELEMENTS = 2**16
"""Of a larger tensor, this many elements evenly spread are looked at."""

DRIFT = 1e-3
"""Relative; by so much may copies of a parameter differ, on devices that round in other ways."""


def refuse_other_order(model: nn.Module, mesh: Mesh) -> None:
    """A PlanMismatchError on all ranks where modules or parameters are in another order on some than on rank 0.

    Gradients are reduced in that order. A model built from a set has the order of its hashes.
    """
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))]
    number = int.from_bytes(hashlib.blake2b("\n".join(names).encode(), digest_size=8).digest(), "little")
    numbers = mesh.gather(number)
    others = [rank for rank, other in enumerate(numbers) if other != numbers[0]]
    if others:
        seed = os.environ.get("PYTHONHASHSEED", "random")
        raise PlanMismatchError(
            f"the model's modules come in another order on rank {', '.join(map(str, others))} than on rank 0, perhaps "
            f"because it is built from a set (PYTHONHASHSEED is {seed} on rank {mesh.rank}): start all ranks with the "
            "same one, PYTHONHASHSEED=0 torchrun ..., as partitioner.launch does, or build the model in a fixed order"
        )


def digest(batch: Any) -> int:
    """A number that changes with the tensors of a batch: shapes, dtypes and (a sample of) their values."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors_in(batch):
        state.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.layout == torch.strided and tensor.numel():
            flat = tensor.detach().reshape(-1)
            sample = flat[:: 1 + (flat.numel() - 1) // MAX_ELEMENTS].contiguous().cpu()
            state.update(sample.resolve_conj().resolve_neg().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(state.digest(), "little", signed=True)


def refuse_differing(number: int, mesh: Mesh) -> None:
    """An ArgumentError on all ranks of the replica, naming those whose digest is not the first stage's."""
    ranks = mesh.replica_ranks
    numbers = [torch.zeros((), dtype=torch.int64) for _ in ranks]
    dist.all_gather(numbers, torch.tensor(number), group=mesh.within_replica)
    found = {rank: int(value) for rank, value in zip(ranks, numbers, strict=True)}
    first = mesh.rank_of(0)
    others = [rank for rank in ranks if found[rank] != found[first]]
    if others:
        raise ArgumentError(
            f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))} got another batch than rank "
            f"{first}: all ranks of a replica must pass the same samples to a step. Use sampler=stage.sampler(dataset) "
            "in the DataLoader, and the same seed for random augmentation"
        )


def refuse_drift(shared: Mapping[tuple[int, ...], Mapping[str, nn.Parameter]], mesh: Mesh) -> None:
    """An ArgumentError where the copies of a parameter on several ranks have become different.

    `shared`: by owner stages, parameters by name; the same on all ranks that hold them, which all call it.
    """
    for stages in sorted(set(shared) & set(mesh.owners)):
        named = shared[stages]
        here = torch.stack([_sketch(parameter) for parameter in named.values()])
        here = here.to(mesh.device) if mesh.has_own_device else here
        ranks = mesh.ranks_of(stages)
        everyones = [torch.empty_like(here) for _ in ranks]
        dist.all_gather(everyones, here, group=mesh.owners[stages])
        values = torch.stack(everyones).cpu()
        apart = (values - values[0]).abs().amax((0, 2)) > DRIFT * values[..., 1].abs().amax(0)
        if bool(apart.any()):
            names = [name for name, differs in zip(named, apart.tolist(), strict=True) if differs]
            raise ArgumentError(
                f"ranks {', '.join(map(str, ranks))} hold {len(names)} parameters ({names[0]}) together, and their "
                "values have become different: what a training loop does to parameters besides the optimizer, with "
                "random numbers or by rank, it must do alike to all copies. Do it before materialize, or draw from a "
                "torch.Generator seeded by the parameter's name and the step"
            )


def _sketch(parameter: torch.Tensor) -> torch.Tensor:
    """Two numbers that are near each other for values that are: a projection, and the norm; float64, on the CPU."""
    flat = parameter.detach().reshape(-1)
    sample = flat[:: 1 + (flat.numel() - 1) // MAX_ELEMENTS] if flat.numel() else flat
    sample = (torch.view_as_real(sample).reshape(-1) if sample.is_complex() else sample).cpu().double()
    return torch.stack([(sample * torch.arange(len(sample)).double().cos()).sum(), sample.norm()])
