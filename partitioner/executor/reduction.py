"""One value and one gradient for parameters that live on several ranks: replicas, and stages that share a parameter.

After the last backward each gradient is added up once over all ranks that hold its parameter. Losses are weighted by
their share of the whole batch over all replicas, so a plain sum is right; there is no division. What was accumulated in
earlier steps is the same on all ranks already, and is kept aside meanwhile.

Ranks need not agree on which parameters got a gradient: every bucket carries one more number for each of its
parameters, the count of ranks that have one. Zero: the gradient stays None.

Where replicas divide a stage's parameters, a gradient is summed on the replica that keeps its parameter up to date, and
nowhere else; under zero2 bucket after bucket in the backward of each micro-batch, in an order that all replicas keep.
Parameters that stages share are summed after the last backward, whatever the level.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from partitioner.executor.division import Division
from partitioner.executor.mesh import Mesh
from partitioner.wire import peer_lost

BUCKET_BYTES = 25 * 2**20
"""As large as DistributedDataParallel's: large enough for bandwidth, small enough to overlap."""


class Reduction:
    """Keeps parameters equal. `parameters`: set of owner stages -> this rank's parameters of it, the same on each."""

    def __init__(
        self, mesh: Mesh, parameters: Mapping[tuple[int, ...], Sequence[torch.nn.Parameter]], division: Division
    ) -> None:
        self._mesh, self._division, self._own = mesh, division, (mesh.stage,)
        self.stage = mesh.stage
        self._parameters = {stages: list(parameters[stages]) for stages in sorted(parameters) if stages in mesh.owners}
        self._earlier: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._early: _Early | None = None
        if division.level == "zero2" and self._own in self._parameters:
            own = [parameter for parameter in self._parameters[self._own] if parameter.requires_grad]
            self._early = _Early(self, division, own[::-1])

    def copy_values(
        self, buffers: Mapping[tuple[int, ...], Sequence[torch.Tensor]], everywhere: Sequence[torch.Tensor]
    ) -> None:
        """Give every rank the values of the lowest that holds them: parameters, buffers by owners, the rest from 0."""
        with torch.no_grad():
            for stages in sorted(self._mesh.owners):
                held = [*self._parameters.get(stages, ()), *buffers.get(stages, ())]
                for bucket in _buckets(_dense(held)):
                    self._copy(bucket, self._mesh.ranks_of(stages)[0], self._mesh.owners[stages])
            if self._mesh.control is not None:
                for bucket in _buckets(_dense(everywhere)):
                    self._copy(bucket, 0, self._mesh.control)

    def begin(self, num_microbatches: int) -> None:
        """Before a step's first backward: parameters have the values that their keepers gave them."""
        self._earlier.clear()
        self.refresh()
        if self._early is not None:
            self._early.begin(self.most(num_microbatches))
        for parameters in self._parameters.values():
            for parameter in parameters:
                if parameter.grad is not None:
                    self._earlier[parameter] = parameter.grad
                    parameter.grad = None

    def after_backward(self) -> None:
        """After each micro-batch's backward."""
        if self._early is not None:
            self._early.flush()

    def finish(self) -> None:
        """After a step's last backward: every gradient is the sum over all ranks, plus what was there before; None
        where another replica keeps the parameter up to date."""
        started = []
        with torch.no_grad():
            for stages, parameters in self._parameters.items():
                if stages == self._own and self._early is not None:
                    continue
                trained = [parameter for parameter in parameters if parameter.requires_grad]
                kept: dict[int | None, list[torch.nn.Parameter]] = {None: trained}
                if stages == self._own and self._division.divides:
                    kept = dict(self._division.by_keeper(trained).items())
                for keeper, some in kept.items():
                    started += [self.start(bucket, stages, keeper) for bucket in _buckets(some)]
            for one in started:
                self.end(one)
            if self._early is not None:
                self._early.finish()
        for parameter, earlier in self._earlier.items():
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier.clear()

    def refresh(self) -> None:
        """Take the values of parameters that other replicas keep up to date; all replicas of the stage call it."""
        if not self._division.divides:
            return
        started = []
        with torch.no_grad():
            for parameters in self._parameters.values():
                for keeper, some in self._division.by_keeper(parameters).items():
                    source = self._mesh.rank_of(self._mesh.stage, keeper)
                    started += [self._send(bucket, source, self._group_of_replicas) for bucket in _buckets(some)]
            for work, bucket, staged, source in started:
                self._wait(work, self._own)
                if source != self._mesh.rank:
                    _fill(bucket, staged)

    def start(self, bucket: list[torch.nn.Parameter], stages: tuple[int, ...], keeper: int | None) -> _Started:
        """Sum the bucket's gradients, on the replica `keeper` or everywhere."""
        flat = _gradients(bucket)
        staged = flat if self._mesh.has_own_device else flat.cpu()
        return _Started(self._reduce(staged, stages, keeper), staged, flat, bucket, stages, keeper)

    def end(self, one: _Started) -> None:
        """Wait for the sums, and put them in place; elsewhere than with its keeper a gradient is let go."""
        self._wait(one.work, one.stages)
        if one.keeper is None or one.keeper == self._mesh.replica:
            _unpack(one.bucket, one.staged if one.staged is one.flat else one.flat.copy_(one.staged))
        for parameter in one.bucket:
            if not self._division.is_kept(parameter):
                parameter.grad = None

    def as_executor(self) -> AbstractContextManager[None]:
        """As the mesh's: for what is done in the midst of a backward."""
        return self._mesh.as_executor()

    @property
    def _group_of_replicas(self) -> dist.ProcessGroup:
        return self._mesh.owners[self._own]

    def agree(self, parameters: Sequence[torch.nn.Parameter], before: Sequence[torch.Tensor]) -> None:
        """Of parameters that forwards have written into, one value for all replicas of this stage, which all call it.

        Of each element, that of the first replica which changed it, as buffers of a first replica would be copied;
        `before`: what they held when the step began.
        """
        sums = torch.stack([_checksum(parameter) for parameter in parameters])
        everyones = self.everyones(sums)
        differ = torch.stack([(one != everyones[0]).any(-1) for one in everyones]).any(0)
        for parameter, old, differs in zip(parameters, before, differ.tolist(), strict=True):
            if differs:
                values = self.everyones(parameter.detach())
                merged = old.clone()
                for value in reversed(values):
                    value = value.to(old.device)
                    merged = torch.where(value != old, value, merged)
                parameter.detach().copy_(merged)

    def everyones(self, value: torch.Tensor) -> list[torch.Tensor]:
        """What each replica of this stage has."""
        value = value.to(self._mesh.device) if self._mesh.has_own_device else value
        values = [torch.zeros_like(value) for _ in range(self._mesh.num_replicas)]
        dist.all_gather(values, value, group=self._group_of_replicas)
        return [one.cpu() for one in values]

    def most(self, count: int) -> int:
        """The most that a replica of this stage has."""
        value = torch.tensor(count, device=self._mesh.device if self._mesh.has_own_device else "cpu")
        self.largest(value)
        return int(value)

    def largest(self, numbers: torch.Tensor) -> None:
        """Put the largest of all replicas of this stage in each place."""
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group_of_replicas)

    def from_first_replica(self, tensors: Sequence[Any]) -> None:
        """Give all replicas of this stage the values that the first one has."""
        with torch.no_grad():
            for bucket in _buckets(_dense(tensors)):
                self._copy(bucket, self._mesh.rank_of(self._mesh.stage, 0), self._group_of_replicas)

    def _copy(self, tensors: list[Any], source: int, group: dist.ProcessGroup) -> None:
        work, _, staged, _ = self._send(tensors, source, group)
        work.wait()
        _fill(tensors, staged)

    def _send(
        self, tensors: list[Any], source: int, group: dist.ProcessGroup
    ) -> tuple[Any, list[Any], torch.Tensor, int]:
        """Values from the source to all others of the group, under way: work, tensors, where they arrive, source."""
        flat = torch.cat([_real(tensor).reshape(-1) for tensor in tensors])
        on_device = group is not self._mesh.control and self._mesh.has_own_device
        staged = flat if on_device else flat.cpu()
        work = dist.broadcast(staged.view(torch.uint8), source, group=group, async_op=True)
        return work, tensors, staged, source

    def _reduce(self, flat: torch.Tensor, stages: tuple[int, ...], keeper: int | None) -> Any:
        group = self._mesh.owners[stages]
        try:
            if keeper is None:
                return dist.all_reduce(flat, group=group, async_op=True)
            return dist.reduce(flat, self._mesh.rank_of(self._mesh.stage, keeper), group=group, async_op=True)
        except RuntimeError as error:
            raise peer_lost(self._other(stages), error) from error

    def _wait(self, work: Any, stages: tuple[int, ...]) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise peer_lost(self._other(stages), error) from error

    def _other(self, stages: tuple[int, ...]) -> int:
        return next(rank for rank in self._mesh.ranks_of(stages) if rank != self._mesh.rank)


class _Started(NamedTuple):
    """A sum under way."""

    work: Any
    staged: torch.Tensor
    flat: torch.Tensor
    bucket: list[torch.nn.Parameter]
    stages: tuple[int, ...]
    keeper: int | None


class _Early:
    """Sums gradients in every backward: a bucket when those of all its parameters are complete, and of all before it.

    What is not complete when the backward ends got no gradient, here: it is summed then, for others may have one.
    Replicas may have different numbers of micro-batches; those with fewer take part in the others' sums at the end. A
    gradient that a backward adds to after its bucket was summed, as nested ones may, waits for the next micro-batch.
    """

    def __init__(self, reduction: Reduction, division: Division, parameters: list[torch.nn.Parameter]) -> None:
        """parameters: in the order in which their gradients are complete, more or less; the same on all replicas."""
        self._reduction, self._stages = reduction, (reduction.stage,)
        place, by_keeper = {parameter: k for k, parameter in enumerate(parameters)}, division.by_keeper(parameters)
        limit = BUCKET_BYTES // max(1, len(by_keeper))  # one of each replica is filled at a time
        buckets = [(keeper, bucket) for keeper, some in by_keeper.items() for bucket in _buckets(some, limit)]
        self._buckets = sorted(buckets, key=lambda one: max(place[parameter] for parameter in one[1]))
        self._number = {parameter: k for k, (_, bucket) in enumerate(buckets) for parameter in bucket}
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._left = self._next = 0
        self._missing: list[int] = []
        for parameter in self._number:
            parameter.register_post_accumulate_grad_hook(self._complete)

    def begin(self, num_microbatches: int) -> None:
        """num_microbatches: the most that a replica has."""
        self._left = num_microbatches
        self._sums.clear()
        self._start_over()

    def flush(self) -> None:
        """The backward of a micro-batch has ended."""
        self._sum_up_to(len(self._buckets))
        self._left -= 1
        self._start_over()

    def finish(self) -> None:
        """Gradients are the sums over micro-batches and replicas."""
        while self._left > 0:
            self.flush()
        if self._reduction.most(any(parameter.grad is not None for parameter in self._number)):
            self.flush()
        for parameter, total in self._sums.items():
            parameter.grad = total
        self._sums.clear()

    def _complete(self, parameter: torch.nn.Parameter) -> None:
        """A hook of torch's."""
        if self._left <= 0:
            return  # a backward of the user's own
        with self._reduction.as_executor():
            self._note(parameter)

    def _note(self, parameter: torch.nn.Parameter) -> None:
        self._missing[self._number[parameter]] -= 1
        end = self._next
        while end < len(self._buckets) and self._missing[end] <= 0:
            end += 1
        self._sum_up_to(end)

    def _sum_up_to(self, end: int) -> None:
        with torch.no_grad():
            for keeper, bucket in self._buckets[self._next : end]:
                self._reduction.end(self._reduction.start(bucket, self._stages, keeper))
                for parameter in bucket:
                    if parameter.grad is not None:
                        before = self._sums.get(parameter)
                        self._sums[parameter] = parameter.grad if before is None else before + parameter.grad
                        parameter.grad = None
        self._next = max(self._next, end)

    def _start_over(self) -> None:
        self._next = 0
        self._missing = [len(bucket) for _, bucket in self._buckets]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _checksum(parameter: torch.Tensor) -> torch.Tensor:
    """Two numbers that are the same for the same bits, and hardly for others."""
    bits = parameter.detach().contiguous().view(-1).view(torch.uint8)
    width = next(kind for size, kind in _INTEGERS if bits.numel() % size == 0)
    numbers = bits.view(width).to(torch.int64)
    return torch.stack([numbers.sum(), (numbers * torch.arange(1, numbers.numel() + 1, device=numbers.device)).sum()])


_INTEGERS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def _dense(tensors: Sequence[Any]) -> list[Any]:
    """The tensors, and in place of sparse ones their indices and values."""
    parts = ([one._indices(), one._values()] if one.layout == torch.sparse_coo else [one] for one in tensors)
    return [part for of_one in parts for part in of_one]


def _buckets(tensors: Sequence[Any], limit: int = BUCKET_BYTES) -> Iterator[list[Any]]:
    """Runs of tensors of one dtype, up to so many bytes each."""
    by_kind: dict[torch.dtype, list[Any]] = {}
    for tensor in tensors:
        by_kind.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_kind.values():
        bucket: list[Any] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.numel() * tensor.element_size() > limit:
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


def _fill(tensors: list[Any], flat: torch.Tensor) -> None:
    sizes = [_real(tensor).numel() for tensor in tensors]
    for tensor, part in zip(tensors, torch.split(flat, sizes), strict=True):
        _real(tensor).copy_(part.view(_real(tensor).shape))


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
