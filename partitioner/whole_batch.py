"""Whether the losses of micro-batches make the loss of the batch that they were cut from.

A pipeline computes a loss for each micro-batch, as gradient accumulation does, so a loss that is a mean over something
else than samples comes out wrong where no one says over what. Here the model's loss of the whole batch is compared with
what its parts make of it; where that differs, with what they make as a sum, and as means over each tensor of the batch.
What no weights can make good is a loss that compares samples with each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from partitioner.errors import ArgumentError
from partitioner.losses import Loss
from partitioner.microbatches import Cutter, MicroBatch, as_given
from partitioner.restore import ModelState, random_states, set_random_states, untouched
from partitioner.specs import Counted
from partitioner.structures import map_tensors, tensors_in
from partitioner.trial import copy_of

TOLERANCE = 1e-4
"""Relative; batches of other sizes are computed by other kernels, in other orders of sums."""
PADDING = (0, -100, -1, 255)
"""Values that mark what does not count: token 0, torch's ignored label, and those of older code and of segmentation."""


class Comparison(NamedTuple):
    """The loss of a batch at once, and in parts."""

    whole: float
    parts: float
    num_parts: int
    how: Literal["sum", "samples"] | Counted | None
    """With which rule the parts do make the whole: None where with that of the loss."""
    holds: bool
    """Whether they make it with the loss's own rule."""


def compare(
    model: nn.Module, batch: MicroBatch, inputs: Any, cutter: Cutter, count: int, loss: Loss
) -> Comparison | None:
    """The loss of the whole batch, `inputs` as the caller gave them, beside that of `count` micro-batches.

    The model is untouched. Each forward starts from the same state, in training mode unless that draws random numbers
    or normalises over the batch, which gives other numbers by design. None where it cannot be told: the batch has one
    sample, the model draws random numbers in eval mode too or has no loss there, the whole batch does not fit.
    """
    count = min(count, batch.samples)
    if count < 2:
        return None
    splits = [cutter.cut(batch.args, batch.kwargs, batch.target, number) for number in sorted({count, 2}, reverse=True)]
    values = _values(model, [[batch], *splits], loss)
    if values is None:
        return None
    [whole], *found = values
    weights = [loss.weights(parts, [as_given(part, inputs) for part in parts]) for parts in splits]
    own = "sum" if loss.is_sum(batch.kwargs) else None
    tolerance = _tolerance(model)

    def missed(rule: Sequence[Sequence[float]], added: bool) -> float:
        shares = [
            abs(_made(one, weight, added) - whole) / (max(abs(whole), max(map(abs, one))) or 1.0)
            for one, weight in zip(found, rule, strict=True)
        ]
        return float(np.max(shares))  # NaN where one is

    def close(rule: Sequence[Sequence[float]], added: bool) -> bool:
        return missed(rule, added) <= tolerance

    made = _made(found[0], weights[0], own == "sum")
    if close(weights, own == "sum"):
        return Comparison(whole, made, count, None, True)
    if close([[1.0] * len(parts) for parts in splits], True):
        return Comparison(whole, made, count, "sum", False)
    if close([[float(part.samples) for part in parts] for parts in splits], False):
        return Comparison(whole, made, count, "samples", False)
    nearest, least = None, tolerance  # labels other than 0 may be nearly as many as a mask's
    for what in _candidates(batch):
        rule = [[loss.counted(what, part) for part in parts] for parts in splits]
        if all(sum(one) > 0 and min(one) >= 0 for one in rule):
            error = missed(rule, False)
            if error < least or (nearest is None and error <= least):
                nearest, least = what, error
    return Comparison(whole, made, count, nearest, False)


def compare_uneven(
    model: nn.Module, batch: MicroBatch, inputs: Any, cutter: Cutter, count: int, loss: Loss
) -> Comparison | None:
    """The same for a batch whose first micro-batch has fewer valid labels, where labels of several kinds count.

    None where the loss's own rule tells how its parts add up then too, or it cannot be tried.
    """
    count = min(count, batch.samples)
    labels = loss.labels(batch)
    if count < 2 or len(labels) < 2 or loss.rule() is not None:
        return None
    samples = cutter.cut(batch.args, batch.kwargs, batch.target, count)[0].samples

    def thinned(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2 or not any(tensor is label for label in labels.values()):
            return tensor
        fewer = tensor.clone()
        fewer.narrow(cutter.batch_dim, 0, samples)[..., tensor.shape[-1] // 2 :] = loss.ignored
        return fewer

    args, kwargs, target = map_tensors((batch.args, batch.kwargs, batch.target), thinned)
    try:
        parts = cutter.cut(args, kwargs, target, count)
        loss.weights(parts, [as_given(part, inputs) for part in parts])
    except ArgumentError:
        by_samples = Loss(model, loss.function, "samples")
        by_samples.beside = loss.beside
        return compare(model, MicroBatch(args, kwargs, target, batch.samples), inputs, cutter, count, by_samples)
    return None


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The layers, by name, that normalise over the samples of one call: over a micro-batch, where the batch is cut."""
    kind = nn.modules.batchnorm._BatchNorm
    return {name: module for name, module in model.named_modules() if isinstance(module, kind) and module.training}


def _made(losses: Sequence[float], weights: Sequence[float], added: bool) -> float:
    counting = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight]
    total = 1.0 if added else sum(weight for _, weight in counting)
    return sum(loss * weight for loss, weight in counting) / total if counting else float("nan")


def _candidates(batch: MicroBatch) -> Iterator[Counted]:
    """What a mean over the batch may be over: masks and weights as they are, labels that are not padding."""
    arguments: list[tuple[int | str, Any]] = [("target", batch.target), *batch.kwargs.items(), *enumerate(batch.args)]
    for argument, value in arguments:
        for k, tensor in enumerate(tensors_in(value)):
            if tensor.dim() == 0 or tensor.is_complex() or tensor.is_sparse or not tensor.numel():
                continue
            if tensor.is_floating_point() or tensor.dtype == torch.bool:
                yield Counted(argument=argument, tensor=k)
                continue
            for padding, shifted in itertools.product(PADDING, (False, True) if tensor.dim() > 1 else (False,)):
                yield Counted(argument=argument, tensor=k, other_than=padding, shifted=shifted)
            yield Counted(argument=argument, tensor=k)


def _values(model: nn.Module, splits: Sequence[Sequence[MicroBatch]], loss: Loss) -> list[list[float]] | None:
    """The losses of all parts of each split, each part from the same state; None where random numbers are drawn."""
    with untouched(model, loss.keeps) as start:
        if not batch_norms(model) and (values := _drawing_nothing(model, splits, loss, start)) is not None:
            return values
        if not any(module.training for module in model.modules()):
            return None
        model.eval()
        return _drawing_nothing(model, splits, loss, ModelState(model, loss.keeps))


def _drawing_nothing(
    model: nn.Module, splits: Sequence[Sequence[MicroBatch]], loss: Loss, start: ModelState
) -> list[list[float]] | None:
    before = torch.get_rng_state(), random_states()
    values = []
    for parts in splits:
        of_split = []
        for part in parts:
            start.restore()
            args, kwargs, target = map_tensors((part.args, part.kwargs, part.target), copy_of)
            try:
                value = _value(model, loss, args, kwargs, target)
            except Exception:  # some have no loss in eval mode, some run out of memory: nothing can be told
                return None
            of_split.append(value)
            if not torch.equal(torch.get_rng_state(), before[0]) or random_states() != before[1]:
                torch.set_rng_state(before[0])
                set_random_states(before[1])
                return None
        values.append(of_split)
    return values if np.isfinite(values[0]).all() else None


def _value(model: nn.Module, loss: Loss, args: Any, kwargs: Any, target: Any) -> float:
    try:
        with torch.no_grad():
            return float(loss.of(model(*args, **kwargs), target))
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        with torch.enable_grad():  # gradients inside a forward, a penalty on them
            return float(loss.of(model(*args, **kwargs), target).detach())


def _tolerance(model: nn.Module) -> float:
    kinds = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    return max([TOLERANCE, *(16 * torch.finfo(kind).eps for kind in kinds)])
