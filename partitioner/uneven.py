"""An example batch made uneven: micro-batches with other numbers of what a mean in the loss may be over.

A mean over a mask, over what is not padding, over the sum of weights passes for a mean over samples where each
micro-batch of the example has as much of it. A mean over samples stays one whatever the samples hold, so the example
is tried again with a part of every tensor left out: labels that a loss of torch's ignores are ignored, all else is 0.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partitioner.microbatches import Cutter, MicroBatch
from partitioner.structures import map_tensors, opened, tensors_in

Place = tuple[int | str, int]
"""An argument of the model, or "target", and which of its tensors."""
LISTS = -1
"""In place of a tensor: what the argument's list has for each sample."""


def places(batch: MicroBatch) -> dict[Place, torch.Tensor]:
    """The tensors of a batch by where they are, those of the target first."""
    arguments: list[tuple[int | str, Any]] = [("target", batch.target), *batch.kwargs.items(), *enumerate(batch.args)]
    return {(argument, k): tensor for argument, value in arguments for k, tensor in enumerate(tensors_in(value))}


def named(place: Place) -> str:
    """How a message names it."""
    argument, k = place
    name = f"argument {argument}" if isinstance(argument, int) else argument
    return f"the lists of {name}" if k == LISTS else f"{name} (tensor {k})" if k else name


@dataclass(frozen=True)
class Uneven:
    """An example with other parts of its tensors left out in each micro-batch."""

    ignorable: Mapping[Place, int]
    """Labels of which the loss leaves out those of a value, and that value."""
    paddings: tuple[int, ...]
    """Values that may mark what does not count."""
    everything: tuple[MicroBatch, ...]
    """All tensors at once, where `several` leaves some as they are."""
    several: tuple[MicroBatch, ...]
    """All but labels of which a sample has one: without it a micro-batch may have no loss. () without tensors."""
    singles: Mapping[Place, MicroBatch]
    """One of those tensors at a time, where the model cannot be run with all."""


def uneven(model: nn.Module, batch: MicroBatch, cutter: Cutter, count: int, ignorable: Mapping[Place, int]) -> Uneven:
    """The batch made uneven for a cut in `count` micro-batches."""
    tensors = places(batch)
    cut = cutter.cut(batch.args, batch.kwargs, batch.target, count)
    pieces, lists = _pieces(tensors, [places(part) for part in cut])
    kinds = {id(tensors[place]): place for place in pieces}
    order = {key: kind for kind, key in enumerate(kinds)}
    also_index = {id(tensor) for place, tensor in tensors.items() if place not in ignorable}
    padding = _padding(model)

    def changed(which: Collection[Place], shares: Sequence[Sequence[float]]) -> MicroBatch:
        def change(tensor: torch.Tensor) -> torch.Tensor:
            place = kinds.get(id(tensor))
            if place is None or place not in which:
                return tensor
            dim, sizes = pieces[place]
            ignored = None if id(tensor) in also_index else ignorable.get(place)
            parts = zip(torch.split(tensor.detach(), sizes, dim), shares[order[id(tensor)]], strict=True)
            fewer = [
                _emptied(part, dim, share, padding) if ignored is None else _without(part, share, ignored)
                for part, share in parts
            ]
            return torch.cat(fewer, dim).requires_grad_(tensor.requires_grad)

        def of(argument: int | str, value: Any) -> Any:
            if (argument, LISTS) in which:
                return _halved(value, batch.samples, cut[0].samples)
            return map_tensors(value, change)

        args = tuple(of(k, value) for k, value in enumerate(batch.args))
        kwargs = {name: of(name, value) for name, value in batch.kwargs.items()}
        return MicroBatch(args, kwargs, of("target", batch.target), batch.samples)

    number = len(kinds)
    shares = [[(kind + k) % (number + 1) / (number + 2) for k in range(len(cut))] for kind in range(number)]
    first = [[0.5, *[0.0] * (len(cut) - 1)]] * number
    everything = [*kinds.values(), *((argument, LISTS) for argument in lists)]
    several = [place for place in everything if place not in ignorable or tensors[place].dim() > 1]
    return Uneven(
        ignorable,
        tuple(dict.fromkeys((*PADDING, padding, *ignorable.values()))),
        (changed(everything, shares),) if several != everything else (),
        (changed(several, shares),) if several else (),
        {place: changed([place], first) for place in several},
    )


PADDING = (0, -100, -1, 255)
"""Token 0, torch's ignored label, and those of older code and of segmentation."""


def _padding(model: nn.Module) -> int:
    """What the model's embeddings take for padding; 0 where they say nothing."""
    told = (getattr(module, "padding_idx", None) for module in model.modules())
    return next((value for value in told if type(value) is int and value >= 0), 0)


def _pieces(
    tensors: Mapping[Place, torch.Tensor], parts: Sequence[Mapping[Place, torch.Tensor]]
) -> tuple[dict[Place, tuple[int, list[int]]], set[int | str]]:
    """The dimension along which each tensor is cut, and its sizes there; arguments with lists of a tensor a sample."""
    numbers, *of_parts = (Counter(argument for argument, _ in one) for one in (tensors, *parts))
    lists = {argument for argument, number in numbers.items() if any(one[argument] != number for one in of_parts)}
    found = {}
    for place, tensor in tensors.items():
        if place[0] in lists or type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            continue
        shapes = [part[place].shape for part in parts]
        dims = [dim for dim, size in enumerate(tensor.shape) if any(shape[dim] != size for shape in shapes)]
        if len(dims) == 1 and sum(shape[dims[0]] for shape in shapes) == tensor.shape[dims[0]]:
            found[place] = (dims[0], [shape[dims[0]] for shape in shapes])
    return found, lists


def _halved(value: Any, samples: int, number: int) -> Any:
    """The same with half of what the first `number` samples have in lists of an item a sample: boxes, their classes."""

    def half(sample: Any) -> Any:
        lengths = Counter(len(tensor) for tensor in tensors_in(sample) if tensor.dim() and len(tensor) > 1)
        length = lengths.most_common(1)[0][0] if lengths else 0
        is_of = functools.partial(_has_length, length)
        return map_tensors(sample, lambda tensor: tensor[: (length + 1) // 2] if is_of(tensor) else tensor)

    inside = opened(value)
    if inside is None:
        return value
    if inside.kind in ("list", "tuple") and len(inside.parts) == samples:
        return inside.built([half(part) if k < number else part for k, part in enumerate(inside.parts)])
    return inside.built([_halved(part, samples, number) for part in inside.parts])


def _has_length(length: int, tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and len(tensor) == length


def _without(labels: torch.Tensor, share: float, ignored: int) -> torch.Tensor:
    """Labels of which a share, at the end of their last dimension, are ignored."""
    fewer, last = labels.clone(), labels.dim() - 1
    number = math.ceil(share * labels.shape[last])
    fewer.narrow(last, labels.shape[last] - number, number).fill_(ignored)
    return fewer


def _emptied(tensor: torch.Tensor, dim: int, share: float, padding: int) -> torch.Tensor:
    """Samples with a share of each set to nothing, at the end of the first dimension that they have.

    Zeros, and padding in one half of those of whole numbers; False, of what is all False True. Single numbers: of
    some samples, a whole number becomes half of what it is, a length that is none of nothing; of a single sample a
    part of it is taken.
    """
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    inner = [d for d, size in enumerate(tensor.shape) if d != dim and size > 1]
    along = inner[0] if inner else dim
    size = tensor.shape[along]
    number = math.ceil(share * size)
    if not is_whole or inner:
        number = min(number, size - 1)
    made = tensor.clone()
    if not tensor.numel() or (is_whole and not tensor.is_cpu and not _holds_nothing(tensor)):
        return made
    some = made.narrow(along, size - number, number)
    if is_whole and not inner:
        some.copy_((some + 1) // 2)
    elif tensor.dtype == torch.bool:
        some.fill_(not bool(tensor.any()))
    elif is_whole:
        some.zero_()
        some.narrow(along, 0, number // 2).fill_(padding)
    elif number:
        some.zero_()
    else:
        made *= 1 - share
    return made


def _holds_nothing(tensor: torch.Tensor) -> bool:
    """Whether 0 is surely a value that it may have: an index beside a table ends the process on a device."""
    return bool((tensor <= 0).any()) or bool((tensor <= 1).all())
