"""Ranks that take turns at a stage's micro-batches: whose connection is whose, and all outputs for each of the last."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

from partitioner.errors import ArgumentError
from partitioner.executor.mesh import Mesh
from partitioner.wire import Receiver, Sender, Tag

T = TypeVar("T")


class InTurn(Generic[T]):
    """One for each of the ranks that take turns at a stage; a single one where no others do."""

    def __init__(self, each: Iterable[T]) -> None:
        self._each = tuple(each)

    def of(self, microbatch: int) -> T:
        """That of the rank whose turn it is."""
        return self._each[microbatch % len(self._each)]

    def __iter__(self) -> Iterator[T]:
        return iter(self._each)


class Outputs:
    """The other ranks of the last stage: each gets this one's outputs and gives its own.

    That is done once a rank is through with its own micro-batches. It then sends all before it receives any, and sends
    do not wait, so no rank waits for one that waits for it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._turn, self._num_turns = mesh.turn, mesh.num_turns
        ranks = mesh.ranks_in_turn(mesh.stage)
        self._to = [Sender(mesh.channel(mesh.rank, far)) for far in ranks if far != mesh.rank]
        self._from = {
            turn: Receiver(mesh.channel(far, mesh.rank), mesh.device)
            for turn, far in enumerate(ranks)
            if far != mesh.rank
        }

    def exchanged(self, step: int, own: Mapping[int, Any], count: int) -> dict[int, Any]:
        """By micro-batch, the outputs of all `count`; `own` are this rank's.

        An ArgumentError where an output cannot be pickled: it holds something besides tensors and plain data.
        """
        for k, output in own.items():
            header, tensors = _packed(output)
            for sender in self._to:
                sender.send(Tag("E", step, k), header, tensors)
        outputs = dict(own)
        for k in range(count):
            if k % self._num_turns != self._turn:
                outputs[k] = _unpacked(*self._from[k % self._num_turns].receive(Tag("E", step, k)))
        for sender in self._to:
            sender.flush()
        return outputs


class _Pickler(pickle.Pickler):
    """Tensors are left out, and stand beside it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self.tensors)
            self.tensors.append(value.detach())
        return self._places[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor | None]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: Any) -> Any:
        return self._tensors[place]


def _packed(output: Any) -> tuple[bytes, list[torch.Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(output)
    except Exception as error:  # whatever a class raises when it is asked to describe itself
        raise ArgumentError(
            f"the model's output, a {type(output).__name__}, cannot be passed between the ranks of the last stage, "
            f"which take turns ({error}): return tensors and plain containers, or plan with a mesh"
        ) from error
    return file.getvalue(), pickler.tensors


def _unpacked(header: bytes, tensors: list[torch.Tensor | None]) -> Any:
    return _Unpickler(io.BytesIO(header), tensors).load()
