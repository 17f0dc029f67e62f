"""Whether all ranks of a replica were given the same batch, told from a short digest."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from partitioner.errors import ArgumentError
from partitioner.executor.mesh import Mesh
from partitioner.structures import tensors_in

MAX_ELEMENTS = 2**16
"""Of a larger tensor, this many elements evenly spread are looked at."""


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
    numbers = [torch.zeros((), dtype=torch.int64) for _ in range(mesh.num_stages)]
    dist.all_gather(numbers, torch.tensor(number), group=mesh.within_replica)
    ranks = sorted(mesh.rank_of(stage) for stage in range(mesh.num_stages))
    found = {rank: int(value) for rank, value in zip(ranks, numbers, strict=True)}
    first = mesh.rank_of(0)
    others = [rank for rank in ranks if found[rank] != found[first]]
    if others:
        raise ArgumentError(
            f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))} got another batch than rank "
            f"{first}: all ranks of a replica must pass the same samples to a step. Use sampler=stage.sampler(dataset) "
            "in the DataLoader, and the same seed for random augmentation"
        )
