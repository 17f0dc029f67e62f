"""One value and one gradient for parameters that live on several ranks: replicas, and stages that share a parameter.

After the last backward each gradient is added up once over all ranks that hold its parameter. Losses are weighted by
their share of the whole batch over all replicas, so a plain sum is right; there is no division. What was accumulated in
earlier steps is the same on all ranks already, and is kept aside meanwhile.

Ranks need not agree on which parameters got a gradient: every bucket carries one more number for each of its
parameters, the count of ranks that have one. Zero: the gradient stays None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from partitioner.executor.mesh import Mesh
from partitioner.wire import peer_lost

BUCKET_BYTES = 25 * 2**20
"""As large as DistributedDataParallel's: large enough for bandwidth, small enough to overlap."""


class Reduction:
    """Keeps parameters equal. `parameters`: set of owner stages -> this rank's parameters of it, the same on each."""

    def __init__(self, mesh: Mesh, parameters: Mapping[tuple[int, ...], Sequence[torch.nn.Parameter]]) -> None:
        self._mesh = mesh
        self._parameters = {stages: list(parameters[stages]) for stages in sorted(parameters) if stages in mesh.owners}
        self._earlier: dict[torch.nn.Parameter, torch.Tensor] = {}

    def copy_values(
        self, buffers: Mapping[tuple[int, ...], Sequence[torch.Tensor]], everywhere: Sequence[torch.Tensor]
    ) -> None:
        """Give every rank the values of the lowest that holds them: parameters, buffers by owners, the rest from 0."""
        with torch.no_grad():
            for stages in sorted(self._mesh.owners):
                held = [*self._parameters.get(stages, ()), *buffers.get(stages, ())]
                for bucket in _buckets(held):
                    self._copy(bucket, self._mesh.ranks_of(stages)[0], self._mesh.owners[stages])
            if self._mesh.control is not None:
                for bucket in _buckets(everywhere):
                    self._copy(bucket, 0, self._mesh.control)

    def begin(self) -> None:
        """Before a step's first backward."""
        self._earlier.clear()
        for parameters in self._parameters.values():
            for parameter in parameters:
                if parameter.grad is not None:
                    self._earlier[parameter] = parameter.grad
                    parameter.grad = None

    def finish(self) -> None:
        """After a step's last backward: every gradient is the sum over all ranks, plus what was there before."""
        started: list[tuple[Any, torch.Tensor, torch.Tensor, list[torch.nn.Parameter], tuple[int, ...]]] = []
        with torch.no_grad():
            for stages, parameters in self._parameters.items():
                for bucket in _buckets([parameter for parameter in parameters if parameter.requires_grad]):
                    flat = _gradients(bucket)
                    staged = flat if self._mesh.has_own_device else flat.cpu()
                    started.append((self._reduce(staged, stages), staged, flat, bucket, stages))
            for work, staged, flat, bucket, stages in started:
                self._wait(work, stages)
                _unpack(bucket, staged if staged is flat else flat.copy_(staged))
        for parameter, earlier in self._earlier.items():
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier.clear()

    def _copy(self, tensors: list[Any], source: int, group: dist.ProcessGroup) -> None:
        flat = torch.cat([_real(tensor).reshape(-1) for tensor in tensors])
        on_device = group is not self._mesh.control and self._mesh.has_own_device
        staged = flat if on_device else flat.cpu()
        dist.broadcast(staged.view(torch.uint8), source, group=group)
        for tensor, part in zip(
            tensors, torch.split(staged, [_real(tensor).numel() for tensor in tensors]), strict=True
        ):
            _real(tensor).copy_(part.view(_real(tensor).shape))

    def _reduce(self, flat: torch.Tensor, stages: tuple[int, ...]) -> Any:
        try:
            return dist.all_reduce(flat, group=self._mesh.owners[stages], async_op=True)
        except RuntimeError as error:
            raise peer_lost(self._other(stages), error) from error

    def _wait(self, work: Any, stages: tuple[int, ...]) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise peer_lost(self._other(stages), error) from error

    def _other(self, stages: tuple[int, ...]) -> int:
        return next(rank for rank in self._mesh.ranks_of(stages) if rank != self._mesh.rank)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _buckets(tensors: Sequence[Any]) -> Iterator[list[Any]]:
    """Runs of tensors of one dtype, up to the bucket size each."""
    by_kind: dict[torch.dtype, list[Any]] = {}
    for tensor in tensors:
        by_kind.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_kind.values():
        bucket: list[Any] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.numel() * tensor.element_size() > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.numel() * tensor.element_size()
        yield bucket


def _gradients(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """The gradients in a row, zeros where there is none, then for each parameter 1 if it has one."""
    first = _real(parameters[0])
    sizes = [_real(parameter).numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes) + len(parameters), dtype=first.dtype, device=first.device)
    for parameter, part in zip(parameters, torch.split(flat[: sum(sizes)], sizes), strict=True):
        if parameter.grad is not None:
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            part.copy_(_real(gradient).reshape(-1))
    flat[sum(sizes) :] = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    return flat


def _unpack(parameters: list[torch.nn.Parameter], flat: torch.Tensor) -> None:
    sizes = [_real(parameter).numel() for parameter in parameters]
    complete = all(parameter.grad is not None for parameter in parameters)
    counts = [1.0] * len(parameters) if complete else flat[sum(sizes) :].tolist()
    for parameter, part, count in zip(parameters, torch.split(flat[: sum(sizes)], sizes), counts, strict=True):
        if not count:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            dense = part.view(parameter.shape)
            parameter.grad = dense.to_sparse(parameter.grad.sparse_dim())
        else:
            _real(parameter.grad).copy_(part.view(_real(parameter).shape))
