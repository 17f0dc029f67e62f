"""Buffers that forwards change, alike on all replicas of a stage: running statistics, codebooks, counters.

Each replica changes its own by the samples that it gets. At the start of a step all take those of the first replica,
as DistributedDataParallel has it by default, so that the replicas train one model. Which buffers change is looked at in
the first steps and now and then; from the first that did on, in every step.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

from partitioner.executor.mesh import Mesh
from partitioner.executor.placement import Placement
from partitioner.executor.reduction import Reduction

FIRST, EVERY = 3, 100
"""Steps at which it is looked whether any buffer changes: the first ones, then every so often."""

MAX_BYTES = 1 << 20
"""Of a buffer whose values are compared at first, as `buffer.data` may be written into without a trace."""


class ReplicaBuffers:
    """The buffers of one stage on one of its replicas."""

    def __init__(self, mesh: Mesh, placement: Placement, reduction: Reduction) -> None:
        self._mesh, self._reduction = mesh, reduction
        self._places: list[tuple[dict[str, Any], str]] = []
        if mesh.num_replicas > 1 and not mesh.plan.takes_turns:
            known: set[int] = set()
            for path, module in placement.model.named_modules():
                for name, buffer in module._buffers.items():
                    if id(buffer) not in known and placement.has_values(f"{path}.{name}" if path else name):
                        known |= set() if buffer is None else {id(buffer)}
                        self._places.append((module._buffers, name))
        self._num_steps = 0
        self._moving = False
        self._silent: set[int] = set()
        """Numbers of those that are written into without a trace."""
        self._marks: list[Any] = []
        self._values: list[torch.Tensor | None] = []
        self._note()

    def begin(self) -> None:
        """A step begins; all replicas of the stage call it."""
        self._num_steps += 1
        if not self._places or not (self._moving or self._num_steps <= FIRST or self._num_steps % EVERY == 0):
            return
        buffers = self._now()
        sizes = torch.tensor([one.numel() if _can_be_sent(one) else -1 for one in buffers])
        agreed = torch.stack([torch.tensor(self._changed(buffers)).long(), sizes, -sizes])
        agreed = agreed.to(self._mesh.device) if self._mesh.has_own_device else agreed
        self._reduction.largest(agreed)
        changed, most, least = agreed.cpu()
        moves = changed.bool() & (most == -least) & (most > 0)  # caches that each replica sizes for itself stay its own
        self._moving |= bool(moves.any())
        self._reduction.from_first_replica([one for one, moved in zip(buffers, moves.tolist(), strict=True) if moved])
        self._note()

    def _now(self) -> list[torch.Tensor | None]:
        return [table.get(name) for table, name in self._places]

    def _changed(self, buffers: list[torch.Tensor | None]) -> list[bool]:
        for k, (one, mark, before) in enumerate(zip(buffers, self._marks, self._values, strict=True)):
            if before is not None and one is not None and _mark(one) == mark and not _alike(one, before):
                self._silent.add(k)
        marks = zip(buffers, self._marks, strict=True)
        return [k in self._silent or _mark(one) != mark for k, (one, mark) in enumerate(marks)]

    def _note(self) -> None:
        buffers = self._now()
        self._marks = [_mark(one) for one in buffers]
        self._values = [None] * len(buffers)
        if self._num_steps < FIRST:
            self._values = [
                one.detach().clone() if _can_be_sent(one) and one.nbytes <= MAX_BYTES else None for one in buffers
            ]


def _can_be_sent(buffer: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return buffer is not None and buffer.layout == torch.strided and not buffer.is_nested and not buffer.is_quantized


def _mark(buffer: torch.Tensor | None) -> Any:
    return None if buffer is None or buffer.is_inference() else (id(buffer), buffer._version)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one, other) or (one != one).any())
