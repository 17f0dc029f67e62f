"""Cut a batch into micro-batches along its batch dimension, and put their outputs together again.

A tensor or NumPy array is cut when its size along the batch dimension is the batch size, which is that of the first
tensor. So is a list with an item for each sample: images of different sizes, the boxes of each, lengths, texts. All
others (position tables, scalars, tuples of numbers such as an image's size) go whole to each micro-batch. What went
whole in the example that a plan was made with does so in every batch, also in one that has as many samples as it has
rows; a list with an item a sample stays one where all images happen to have one size.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from partitioner.errors import ArgumentError, NotBuiltError
from partitioner.structures import Opened, described, map_tensors, opened, tensors_in

BatchDims = Mapping[str | int, int | None] | Mapping[str, int | None]
"""Argument name or position -> its own batch dimension, None: never cut. "target" is the target, "*" all the others."""
BatchDim = int | BatchDims
"""The dimension of samples, of all or of each."""
OTHERS = "*"


def named_dims(model: nn.Module, batch_dim: BatchDim) -> int | dict[str, int | None]:
    """`batch_dim` as a plan keeps it: each argument by its name and by its position, as it may be passed either way.

    >>> named_dims(nn.GRU(2, 2), {"hx": 1}), named_dims(nn.GRU(2, 2), 1)
    ({'hx': 1, '1': 1}, 1)
    """
    if isinstance(batch_dim, int):
        return batch_dim
    dims = {str(key): dim for key, dim in batch_dim.items()}
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return dims
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    known = {one.name for one in parameters} | {OTHERS, "target"}
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        for name in dims:
            if name not in known and not name.isdecimal():
                raise ArgumentError(
                    f"batch_dim={dict(batch_dim)}: {type(model).__name__}.forward has no argument {name!r}; it has "
                    f"{', '.join(one.name for one in parameters)}, and 'target' and '*' (all others) may be named"
                )
    for position, name in enumerate(names):
        if name in dims:
            dims.setdefault(str(position), dims[name])
        elif str(position) in dims:
            dims[name] = dims[str(position)]
    return dims


class MicroBatch(NamedTuple):
    """One slice of the batch, as the model and the loss are called with it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    samples: int


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a batch: a tuple is arguments, a mapping keywords, all else one argument.

    >>> as_call((1, 2)), as_call({"x": 1}), as_call([1, 2])
    (((1, 2), {}), ((), {'x': 1}), (([1, 2],), {}))
    """
    if type(inputs) is tuple:
        return inputs, {}
    if isinstance(inputs, Mapping) and not dataclasses.is_dataclass(inputs):
        return (), dict(inputs)
    return (inputs,), {}


def as_given(part: MicroBatch, inputs: Any) -> Any:
    """A micro-batch's inputs in the form that those of its batch had: arguments, keywords, or the only one.

    >>> as_given(MicroBatch((1,), {}, None, 1), [1, 2]), as_given(MicroBatch((1,), {}, None, 1), ([1, 2],))
    (1, (1,))
    """
    args, kwargs = as_call(inputs)
    return part.kwargs if kwargs else part.args if args is inputs else part.args[0]


class Cutter:
    """Cuts batches of any size. `batch_dim` is the dimension of samples, `special` the arguments that differ from it.

    `whole`: what is never cut, as `goes_whole` told of an example; but for arguments that are named.
    """

    def __init__(self, batch_dim: BatchDim = 0, special: BatchDim | None = None, whole: Collection[str] = ()) -> None:
        dims: dict[str, int | None] = {}
        for told in (batch_dim, {} if special is None else special):
            dims |= {OTHERS: told} if isinstance(told, int) else {str(key): dim for key, dim in told.items()}
        self.batch_dim = dims.pop(OTHERS, 0) or 0
        self._special = dims
        others = (path for path in whole if path.removesuffix(ITEMS).partition(".")[0] not in dims)
        self._whole = frozenset(others)

    def dim_of(self, key: str | int) -> int | None:
        """The dimension of samples in an argument; None where it has none."""
        return self._special.get(str(key), self.batch_dim)

    def batch_size(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Samples of a batch: the size of its first tensor that has the batch dimension, or of a list of samples."""
        arguments = _arguments(args, kwargs)
        lists = [value for _, value in arguments if isinstance(value, (list, tuple)) and value]
        described_by = {len(value) for value in lists if all(isinstance(one, Mapping) for one in value)}
        beside = [value for _, value in arguments if isinstance(value, torch.Tensor) and value.dim()]
        for key, value in arguments:
            dim = self.dim_of(key)
            if dim is None:
                continue
            size = self._size_of(value, dim, str(key), described_by, {len(one) for one in beside})
            if size is not None:
                return size
        raise ArgumentError(
            f"cannot tell the batch size: no tensor of the inputs, {described((*args, *kwargs.values()))}, has a "
            f"dimension {self.batch_dim}; pass tensors, or say batch_dim="
        )

    def doubt(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> str:
        """Where the number of samples was told by a list of tensors and the target has another: what to pass instead.

        >>> Cutter().doubt(([torch.zeros(3, 9, 9)] * 8,), {}, torch.zeros(8))[:93]
        'argument 0 is a list of 8 tensors, which was taken for inputs that have 3 samples along dimen'
        """
        size = self.batch_size(args, kwargs)
        aims = [one for one in tensors_in(target) if one.dim() > self.batch_dim]
        if not aims or any(one.shape[self.batch_dim] == size for one in aims):
            return ""
        for key, value in _arguments(args, kwargs):
            dim = self.dim_of(key)
            if dim is None or self._size_of(value, dim, str(key), (), ()) is None:
                continue
            if not isinstance(value, list) or not all(isinstance(one, torch.Tensor) for one in value):
                return ""
            name, sizes = f"argument {key}" if isinstance(key, int) else key, [one.shape[dim] for one in value]
            if len(value) == size and sizes[0] != size:
                taken = f"{size} samples, as their sizes along dimension {dim} differ ({sizes[0]}, {sizes[1]}): where "
                taken += "they are inputs that hold several samples each, pass a tuple of them"
            else:
                taken = f"inputs that have {size} samples along dimension {dim} (the first is {described(value[0])}): "
                taken += "where each is one sample, pass one tensor (torch.stack)"
            return f"{name} is a list of {len(value)} tensors, which was taken for {taken}"
        return ""

    def _size_of(
        self, value: Any, dim: int, path: str, described_by: Collection[int], beside: Collection[int]
    ) -> int | None:
        """Samples in one argument.

        `described_by`: lengths of lists with a dict for each sample; `beside`: of tensors that are arguments.
        """
        is_whole = path in self._whole
        if isinstance(value, torch.Tensor):
            return int(value.shape[dim]) if value.dim() > dim and not is_whole else None
        if isinstance(value, list) and value and not is_whole and all(isinstance(one, torch.Tensor) for one in value):
            is_told = f"{path}{ITEMS}" in self._whole or len(value) in described_by
            if is_told or (_are_samples(value, dim) and not {len(one) for one in value} & set(beside)):
                return len(value)
        inside = opened(value)
        if inside is not None:
            for name, part in zip(_names(inside), inside.parts, strict=True):
                size = self._size_of(part, dim, f"{path}.{name}", described_by, beside)
                if size is not None:
                    return size
        return None

    def cut(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any, count: int) -> list[MicroBatch]:
        """The batch in `count` parts of as equal size as possible, larger ones first; in fewer if it is smaller.

        >>> [part.samples for part in Cutter().cut((torch.zeros(10, 3),), {}, None, 4)]
        [3, 3, 2, 2]
        """
        if count == 1 and not any(tensor.dim() > self.batch_dim for tensor in tensors_in((args, dict(kwargs)))):
            return [MicroBatch(args, dict(kwargs), target, 1)]
        size = self.batch_size(args, kwargs)
        if size == 0:
            raise ArgumentError("a batch of 0 samples cannot be run: leave it out, or use drop_last=True")
        count = min(count, size)
        if count == 1:
            return [MicroBatch(args, dict(kwargs), target, size)]
        bounds = [k * (size // count) + min(k, size % count) for k in range(count + 1)]
        spans = [(bounds[k], bounds[k + 1] - bounds[k]) for k in range(count)]
        arguments = [self._parts(key, value, size, spans) for key, value in enumerate(args)]
        keywords = {key: self._parts(key, value, size, spans) for key, value in kwargs.items()}
        targets = self._parts("target", target, size, spans)
        if target is not None and all(part is target for part in targets):
            raise ArgumentError(
                f"the inputs, {described((*args, *kwargs.values()))}, hold {size} samples along dimension "
                f"{self.batch_dim} (batch_dim), and the target, {described(target)}, does not: give as many targets, "
                "say along which dimension samples lie, or that of the target alone: "
                f'batch_dim={{"*": {self.batch_dim}, "target": 0}}'
            )
        return [
            MicroBatch(
                tuple(parts[k] for parts in arguments),
                {key: parts[k] for key, parts in keywords.items()},
                targets[k],
                spans[k][1],
            )
            for k in range(count)
        ]

    def _parts(self, key: str | int, value: Any, size: int, spans: list[tuple[int, int]]) -> list[Any]:
        """One argument for each micro-batch; the very same object where nothing in it is cut."""
        dim = self.dim_of(key)
        if dim is None or not _holds_samples(value, dim, size, self._whole, str(key)):
            return [value] * len(spans)
        _refuse_packed(value)
        return [_some(value, dim, size, *span, self._whole, str(key)) for span in spans]

    def changed(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        change: Callable[[torch.Tensor, int | None], torch.Tensor],
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The same call with each tensor replaced by what `change` makes of it and its dimension of samples."""

        def of(key: str | int, value: Any) -> Any:
            dim = self.dim_of(key)
            return map_tensors(value, lambda tensor: change(tensor, dim))

        keywords = {name: of(name, value) for name, value in kwargs.items()}
        return tuple(of(key, value) for key, value in enumerate(args)), keywords, of("target", target)

    def goes_whole(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> tuple[str, ...]:
        """Where in a batch there are tensors and lists that are not cut, though a batch of another size would have them
        cut: "1", "batch.table", "target.0". One row may stand for any number, and is none of them. "0[]" is a list of
        tensors that has one for each sample.

        >>> Cutter().goes_whole((torch.zeros(4, 2), {"table": torch.zeros(3, 2)}), {}, torch.zeros(4))
        ('1.table',)
        """
        size = self.batch_size(args, kwargs)
        return tuple(
            path
            for key, value in (*_arguments(args, kwargs), ("target", target))
            if (dim := self.dim_of(key)) is not None
            for path in _whole_in(value, dim, size, str(key))
        )

    def lists_cut(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> list[str]:
        """Arguments that hold a list without tensors which is cut, as it has as many items as the batch has samples."""
        size = self.batch_size(args, kwargs)
        return [
            f"argument {key}" if isinstance(key, int) else key
            for key, value in (*_arguments(args, kwargs), ("target", target))
            if (dim := self.dim_of(key)) is not None and _holds_list(value, dim, size)
        ]


def usual_sizes(batch: int) -> tuple[int, ...]:
    """Micro-batches whose costs tell a call's from a sample's: an eighth and a half of the batch, of two or more.

    One sample is no batch: BatchNorm cannot train on it.

    >>> usual_sizes(64), usual_sizes(8), usual_sizes(1)
    ((8, 32), (2, 4), (1,))
    """
    small = max(2, batch // 8)
    return tuple(sorted({min(batch, small), min(batch, max(2 * small, batch // 2))}))


ITEMS = "[]"
"""After the path of a list: that its items are samples."""


def _are_samples(tensors: Sequence[torch.Tensor], dim: int) -> bool:
    """Whether tensors in a list cannot be inputs with one batch dimension: each is one sample then.

    Images have 1 or 3 channels first; of other tensors the sizes along `dim` tell.
    """
    if any(tensor.dim() <= dim or tensor.is_nested for tensor in tensors) or len(tensors) < 2:
        return False
    if len({tensor.shape[dim] for tensor in tensors}) > 1:
        return len({tensor.dim() for tensor in tensors}) == 1
    are_images = dim == 0 and all(tensor.dim() == 3 and tensor.shape[0] in (1, 3) for tensor in tensors)
    return are_images and len({tensor.shape[1] for tensor in tensors}) > 1 and len({t.shape[2] for t in tensors}) > 1


def _is_cut(tensor: torch.Tensor | np.ndarray[Any, Any], dim: int, size: int) -> bool:
    if isinstance(tensor, torch.Tensor) and tensor.is_nested:
        return dim == 0 and tensor.size(0) == size  # its other dimensions may have no one size
    return tensor.ndim > dim and tensor.shape[dim] == size


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str | int, Any]]:
    return [*enumerate(args), *kwargs.items()]


def _names(inside: Opened) -> Iterator[str]:
    """What the parts of a container are called."""
    if inside.kind == "dict":
        yield from map(str, (*inside.keys[0], *inside.keys[1]))
    elif inside.kind == "object":
        yield from inside.keys
    else:
        yield from map(str, range(len(inside.parts)))


def _whole_in(value: Any, dim: int, size: int, path: str) -> Iterator[str]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        is_nested = isinstance(value, torch.Tensor) and value.is_nested
        if not is_nested and value.ndim > dim and value.shape[dim] not in (1, size):
            yield path
    elif _is_list_of_samples(value, dim, size):
        if isinstance(value, list) and all(isinstance(item, torch.Tensor) for item in value):
            yield f"{path}{ITEMS}"
    elif (inside := opened(value)) is not None:
        if inside.kind in ("list", "tuple") and len(inside.parts) not in (1, size):
            yield path
        for name, part in zip(_names(inside), inside.parts, strict=True):
            yield from _whole_in(part, dim, size, f"{path}.{name}")


def _holds_samples(value: Any, dim: int, size: int, whole: Collection[str], path: str) -> bool:
    """Whether anything in it is cut."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return path not in whole and _is_cut(value, dim, size)
    if path not in whole and _is_list_of_samples(value, dim, size, f"{path}{ITEMS}" in whole):
        return True
    inside = opened(value)
    return inside is not None and any(
        _holds_samples(part, dim, size, whole, f"{path}.{name}")
        for name, part in zip(_names(inside), inside.parts, strict=True)
    )


def _holds_list(value: Any, dim: int, size: int) -> bool:
    """Whether a list of samples that are no tensors is in it."""
    if _is_list_of_samples(value, dim, size):
        return not tensors_in(value)
    inside = opened(value)
    return inside is not None and any(_holds_list(part, dim, size) for part in inside.parts)


def _some(value: Any, dim: int, size: int, start: int, length: int, whole: Collection[str], path: str) -> Any:
    """Some samples of it. Tensors stay in the batch's own memory, with a version of their own.

    As plain views all would count as changed when a forward writes into one of them (labels.clamp_()), and the backward
    of those before it would fail.
    """
    is_whole = path in whole
    if isinstance(value, torch.Tensor):
        if is_whole or not _is_cut(value, dim, size):
            return value
        try:
            part = value.narrow(dim, start, length)
        except (RuntimeError, NotImplementedError) as error:
            kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            raise NotBuiltError(
                f"a {kind} tensor of {value.dtype} cannot be cut into micro-batches ({str(error).splitlines()[0]}): "
                "pass it dense and convert it inside the model, or plan with microbatches=1"
            ) from error
        return part if part.requires_grad else part.data
    if isinstance(value, np.ndarray):
        if is_whole or not _is_cut(value, dim, size):
            return value
        return value[(slice(None),) * dim + (slice(start, start + length),)]
    if not is_whole and _is_list_of_samples(value, dim, size, f"{path}{ITEMS}" in whole):
        return value[start : start + length]
    inside = opened(value)
    if inside is None:
        return value
    parts = zip(_names(inside), inside.parts, strict=True)
    return inside.built([_some(part, dim, size, start, length, whole, f"{path}.{name}") for name, part in parts])


def _is_list_of_samples(value: Any, dim: int, size: int, is_told: bool = False) -> bool:
    """A list with as many items as samples, none of which is itself a batch; a tuple only of dicts or of tensors.

    `is_told`: the example's was one.
    """
    if not isinstance(value, (list, tuple)) or len(value) != size or hasattr(value, "_fields"):
        return False
    if all(isinstance(item, torch.Tensor) for item in value):
        return is_told or not all(_is_cut(tensor, dim, size) for tensor in value)
    if all(isinstance(item, Mapping) for item in value):
        return True
    return isinstance(value, list) and not any(_holds_samples(item, dim, size, (), "") for item in value)


def _refuse_packed(value: Any) -> None:
    items = [value] if isinstance(value, PackedSequence) else value if isinstance(value, (list, tuple)) else []
    if any(isinstance(item, PackedSequence) for item in items):
        raise NotBuiltError(
            "a PackedSequence cannot be cut into micro-batches: pass padded sequences and their lengths and pack "
            "inside the model, or plan with microbatches=1"
        )


def join(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[Any], batch_dim: int = 0) -> Any:
    """The outputs of all micro-batches as one: what one call on the whole batch would have returned.

    Tensors with a micro-batch's size along the batch dimension are put together; 0-d ones are averaged by `weights`;
    equal values stay one value. What cannot be joined is a list of the parts, 0-d tensors too where a weight is of
    several terms.

    >>> join([{"y": torch.zeros(2, 3)}, {"y": torch.ones(1, 3)}], [2, 1], [2, 1])["y"].shape
    torch.Size([3, 3])
    """
    first: Any = outputs[0]
    if len(outputs) == 1 or first is None:
        return first
    if any(type(output) is not type(first) for output in outputs):
        return list(outputs)

    def joined(parts: Sequence[Any]) -> Any:
        return join(parts, sizes, weights, batch_dim)

    if isinstance(first, torch.Tensor):
        return _join_tensors(outputs, sizes, weights, batch_dim)
    if isinstance(first, dict):
        if any(output.keys() != first.keys() for output in outputs):
            return list(outputs)
        made = copy.copy(first)
        for key in first:
            made[key] = joined([output[key] for output in outputs])
        return made
    if isinstance(first, (list, tuple)):
        if any(len(output) != len(first) for output in outputs):
            return list(outputs)
        items = [joined(parts) for parts in zip(*outputs, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        item: Any = copy.copy(first)
        for key in vars(first):
            object.__setattr__(item, key, joined([getattr(output, key) for output in outputs]))
        return item
    if isinstance(first, (bool, int, float, str)) and all(output == first for output in outputs):
        return first
    return list(outputs)


def _join_tensors(tensors: Sequence[torch.Tensor], sizes: Sequence[int], weights: Sequence[Any], dim: int) -> Any:
    first = tensors[0]
    if all(tensor.dim() > dim and tensor.shape[dim] == size for tensor, size in zip(tensors, sizes, strict=True)):
        rest = [tensor.shape[:dim] + tensor.shape[dim + 1 :] for tensor in tensors]
        if all(shape == rest[0] for shape in rest):
            return torch.cat(list(tensors), dim)
    if first.dim() == 0 and first.is_floating_point() and not any(isinstance(weight, tuple) for weight in weights):
        total = sum(weights) or 1.0
        parts = [tensor * (weight / total) for tensor, weight in zip(tensors, weights, strict=True) if weight]
        return torch.stack(parts).sum(0) if parts else first
    if all(tensor.shape == first.shape and torch.equal(tensor, first) for tensor in tensors):
        return first
    return list(tensors)
