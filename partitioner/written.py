"""Parameters that a forward writes into: which ones, and what they held before, to be given back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.structures import storage_of, tensors_in


class WrittenParameters(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside the block, sees which parameters are written into, and copies each just before that."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = dict(model.named_parameters())
        self._data = {name: parameter.data for name, parameter in self._parameters.items()}
        self._names = {storage_of(data): name for name, data in self._data.items()}
        self._copies: dict[str, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            name = self._names.get(storage_of(tensor))
            if name is not None and name not in self._copies:
                self._copies[name] = self._data[name].clone()
        return func(*args, **(kwargs or {}))

    def names(self) -> set[str]:
        """Those that were written into, or given other memory, so far."""
        return {*self._copies, *self._moved()}

    def restore(self) -> None:
        """Give all of them back, in the memory that they had."""
        for name in self._moved():
            self._parameters[name].data = self._data[name]
        for name, copy in self._copies.items():
            self._data[name].copy_(copy)

    def _moved(self) -> Iterator[str]:
        for name, parameter in self._parameters.items():
            if storage_of(parameter) != storage_of(self._data[name]):
                yield name


@contextmanager
def parameters_kept(model: nn.Module) -> Iterator[WrittenParameters]:
    """What the block writes into parameters is given back at its end."""
    written = WrittenParameters(model)
    try:
        with written:
            yield written
    finally:
        written.restore()


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator is about to write into."""
    if not func._schema.is_mutable:
        return []
    given = [*zip(func._schema.arguments, args, strict=False)]
    given += [(one, kwargs[one.name]) for one in func._schema.arguments if one.name in kwargs]
    return [
        tensor
        for argument, value in given
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(value)
    ]
