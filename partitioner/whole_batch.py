"""Whether the losses of micro-batches make the loss of the batch that they were cut from.

A pipeline computes a loss for each micro-batch, as gradient accumulation does, so a loss that is a mean over something
else than samples comes out wrong where no one says over what. Here the model's loss of the whole batch is compared with
what its parts make of it; where that differs, with what they make as a sum, and as means over each tensor of the batch.
A loss that adds up terms may have another of these rules for each. What no weights can make good is a loss that
compares samples with each other.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import nn

from partitioner.errors import ArgumentError
from partitioner.losses import Loss
from partitioner.microbatches import Cutter, MicroBatch, as_given
from partitioner.restore import ModelState, random_states, set_random_states, untouched
from partitioner.specs import Counted, Weighing
from partitioner.structures import map_tensors, tensors_in
from partitioner.trial import copy_of

T = TypeVar("T")
TOLERANCE = 1e-5
"""Relative; batches of other sizes are computed in other orders of sums."""
DEVICE_TOLERANCE = 1e-4
"""The same on other devices than a CPU, where they are computed by other kernels, which may round more."""
PADDING = (0, -100, -1, 255)
"""Values that mark what does not count: token 0, torch's ignored label, and those of older code and of segmentation."""


class Comparison(NamedTuple):
    """The loss of a batch at once, and in parts."""

    whole: float
    parts: float
    num_parts: int
    how: Weighing | None
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
    values = _values(model, [[batch], *splits], loss, _value)
    if values is None:
        return None
    [whole], *found = values
    weights = [
        cast(Sequence[float], loss.weights(parts, [as_given(part, inputs) for part in parts])) for parts in splits
    ]
    is_sum = loss.is_sum(batch.kwargs)
    tolerance = _tolerance(model)

    def missed(rule: Sequence[Sequence[float]], added: bool) -> float:
        shares = [_missed(one, weight, added, whole, 0.0) for one, weight in zip(found, rule, strict=True)]
        return float(np.max(shares))  # NaN where one is

    def missed_by(how: Weighing) -> float:
        rule = _counted(loss, how, splits)
        return math.nan if rule is None else missed(rule, how == "sum")

    made = _made(found[0], weights[0], is_sum)
    if missed(weights, is_sum) <= tolerance:
        return Comparison(whole, made, count, None, True)
    simple: tuple[Weighing, ...] = ("sum", "samples")
    for how in simple:
        if missed_by(how) <= tolerance:
            return Comparison(whole, made, count, how, False)
    fitting = [(error, what) for what in _candidates(batch) if (error := missed_by(what)) <= tolerance]
    fitting.sort(key=lambda one: one[0])  # labels other than 0 may be nearly as many as a mask's
    nearest = _confirmed([what for _, what in fitting], model, batch, cutter, count, loss, whole) if fitting else None
    return Comparison(whole, made, count, nearest, False)


def _counted(loss: Loss, what: Weighing, splits: Sequence[Sequence[MicroBatch]]) -> list[list[float]] | None:
    """How much of it each part of each split holds; None where no mean can be over that."""
    try:
        numbers = [[loss.counted(what, part) for part in parts] for parts in splits]
    except ArgumentError:  # lists of samples: a part has fewer tensors
        return None
    return numbers if all(sum(one) > 0 and min(one) >= 0 for one in numbers) else None


def _confirmed(
    fitting: Sequence[Counted],
    model: nn.Module,
    batch: MicroBatch,
    cutter: Cutter,
    count: int,
    loss: Loss,
    whole: float,
) -> Counted | None:
    """The first that fits a split into three too: of many tensors one may fit two parts by chance."""
    if count == _ONE_MORE or batch.samples < _ONE_MORE:
        return fitting[0]
    parts = cutter.cut(batch.args, batch.kwargs, batch.target, _ONE_MORE)
    values = _values(model, [parts], loss, _value)
    if values is None:
        return None
    for what in fitting:
        rule = _counted(loss, what, [parts])
        if rule is not None and _missed(values[0], rule[0], False, whole, 0.0) <= _tolerance(model):
            return what
    return None


_ONE_MORE = 3
"""Parts of a split beside that of the plan and that in two."""


def compare_uneven(
    model: nn.Module, batch: MicroBatch, inputs: Any, cutter: Cutter, count: int, loss: Loss
) -> Comparison | None:
    """The same for a batch whose first micro-batch has fewer valid labels, where a loss adds up terms.

    None where the loss's own rule tells how its parts add up then too, or it cannot be tried.
    """
    count = min(count, batch.samples)
    if count < 2 or loss.rule() is not None:
        return None
    labels, ignorable = loss.labels(batch), _ignorable(model, batch, cutter, count, loss)
    if not any(label.dim() > 1 for label in ignorable):
        return None
    if len(labels) < 2:
        first = cutter.cut(batch.args, batch.kwargs, batch.target, count)[0]
        numbers = _values(model, [[first]], loss, functools.partial(_terms, model))
        if numbers is None or len(numbers[0][0]) <= 2:
            return None

    def left_out(kind: int, k: int) -> float:
        return 0.5 if k == 0 else 0.0

    uneven = _thinned(batch, ignorable, loss.ignored, cutter, count, left_out, least_dim=2)
    try:
        parts = cutter.cut(uneven.args, uneven.kwargs, uneven.target, count)
        loss.weights(parts, [as_given(part, inputs) for part in parts])
    except ArgumentError:
        loss, beside = Loss(model, loss.function, "samples"), loss.beside
        loss.beside = beside
        return compare(model, uneven, inputs, cutter, count, loss)
    found = compare(model, uneven, inputs, cutter, count, loss) if len(labels) < 2 else None
    return None if found is None or found.holds else found


def compare_terms(
    model: nn.Module,
    batch: MicroBatch,
    cutter: Cutter,
    count: int,
    loss: Loss,
    forward: Callable[..., Any] | None = None,
) -> tuple[Weighing, ...]:
    """What each term of a loss that adds up several is: each makes up that of the batch with it. () where it is not so.

    The batch is tried as it is and with labels of each kind left out in other numbers in each micro-batch: two rules
    that fit one batch are told apart by that. The model is untouched. `forward`: what gives the model's output.
    """
    count = min(count, batch.samples)
    if count < 2:
        return ()
    ignorable = _ignorable(model, batch, cutter, count, loss)
    num_kinds = len(ignorable)

    def left_out(kind: int, k: int) -> float:
        return (kind + k) % (num_kinds + 1) / (num_kinds + 2)

    def thinned(least_dim: int) -> MicroBatch:
        return _thinned(batch, ignorable, loss.ignored, cutter, count, left_out, least_dim)

    uneven = [thinned(1), thinned(2)] if ignorable else []
    terms = functools.partial(_terms, forward or model)
    fitting = _rules_of_terms(model, batch, cutter, count, loss, terms)
    if fitting is None or len(fitting) < 2:
        return ()
    tried = (_rules_of_terms(model, one, cutter, count, loss, terms) for one in uneven)
    more = next((found for found in tried if found is not None and all(found)), None if uneven else fitting)
    if more is None or len(more) != len(fitting):
        return ()
    both = [[how for how in of_term if how in also] for of_term, also in zip(fitting, more, strict=True)]
    return tuple(of_term[0] for of_term in both) if all(both) else ()


def _rules_of_terms(
    model: nn.Module, batch: MicroBatch, cutter: Cutter, count: int, loss: Loss, terms: Callable[..., list[float]]
) -> list[list[Weighing]] | None:
    """For each term the rules that fit, the likeliest first; None where the terms cannot be told."""
    sizes = sorted({count, 2, min(_ONE_MORE, batch.samples)}, reverse=True)
    splits = [cutter.cut(batch.args, batch.kwargs, batch.target, number) for number in sizes]
    values = _values(model, [[batch], *splits], loss, terms)
    if values is None or len({len(part) for parts in values for part in parts}) != 1:
        return None
    [[*whole, rest]], *found = values
    tolerance = _tolerance(model)
    size = max(map(abs, whole), default=0.0)
    if abs(rest) > tolerance * size and not all(
        _missed([one[-1] for one in of_parts], [float(part.samples) for part in parts], False, rest, 0.0) <= tolerance
        for of_parts, parts in zip(found, splits, strict=True)
    ):
        return None
    counted = [how for how in _candidates(batch) if _counts_labels(how, batch, loss)]
    others = [how for how in _candidates(batch) if how not in counted]
    likeliest: list[Weighing] = [*counted, "samples", "sum", *others]
    weights = [(how, rule) for how in likeliest if (rule := _counted(loss, how, splits)) is not None]
    return [
        [
            how
            for how, of_splits in weights
            if all(
                _missed([one[j] for one in of_split], of_parts, how == "sum", whole[j], size / 1e3) <= tolerance
                for of_split, of_parts in zip(found, of_splits, strict=True)
            )
        ]
        for j in range(len(whole))
    ]


def _counts_labels(how: Counted, batch: MicroBatch, loss: Loss) -> bool:
    """Whether it counts labels of a batch that torch's losses do not ignore."""
    held: Any = batch.target if how.argument == "target" else batch.kwargs.get(str(how.argument))
    if isinstance(how.argument, int):
        held = batch.args[how.argument]
    tensor = list(tensors_in(held))[how.tensor]
    return how.other_than == loss.ignored and any(tensor is label for label in loss.labels(batch).values())


def _ignorable(model: nn.Module, batch: MicroBatch, cutter: Cutter, count: int, loss: Loss) -> list[torch.Tensor]:
    """Labels of the batch of which the loss leaves out those that are to be ignored.

    Some of them are in the batch; or one of torch's own losses, which says what it ignores, is given them, all or
    without the first of each sequence. To other functions that value may be an index like any other.
    """
    labels = loss.labels(batch)
    first = cutter.cut(batch.args, batch.kwargs, batch.target, count)[0]
    given: list[torch.Tensor] = []

    def value_of(model: nn.Module, loss: Loss, args: Any, kwargs: Any, target: Any) -> float:
        with torch.enable_grad():
            value = loss.of(model(*args, **kwargs), target)
        given.extend(_targets(value, loss.ignored))
        return float(value.detach())

    def valid(label: torch.Tensor) -> torch.Tensor:
        return label[label != loss.ignored].sort().values

    of_first = loss.labels(first)
    known = {name for name, label in labels.items() if bool((label == loss.ignored).any())}
    if len(known) < len(labels) and _values(model, [[first]], loss, value_of) is not None:
        for name in of_first.keys() - known:
            label = of_first[name]
            ways = [valid(label), valid(label[..., 1:])] if label.dim() else []
            if any(torch.equal(valid(target).to(way), way) for target in given for way in ways if way.numel()):
                known.add(name)
    return [label for name, label in labels.items() if name in known]


def _targets(loss: torch.Tensor, ignored: int) -> list[torch.Tensor]:
    """The targets of torch's losses over classes in a loss's graph, where they leave out this value."""
    found, seen, left = [], set[Any](), [loss.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [following for following, _ in node.next_functions]
        if node.name() in _LOSSES_OVER_CLASSES and (node._saved_ignore_index - ignored) % 2**64 == 0:  # unsigned
            found.append(node._saved_target)
    return found


_LOSSES_OVER_CLASSES = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
"""Nodes of autograd, of which cross-entropy is made too."""


def _thinned(
    batch: MicroBatch,
    labels: Sequence[torch.Tensor],
    ignored: int,
    cutter: Cutter,
    count: int,
    left_out: Callable[[int, int], float],
    least_dim: int,
) -> MicroBatch:
    """The batch with a part `left_out(kind, k)` of each kind of `labels` ignored in micro-batch k, from their ends.

    Labels with fewer than `least_dim` dimensions stay: of those with one, whole samples would be left out.
    """
    spans = [part.samples for part in cutter.cut(batch.args, batch.kwargs, batch.target, count)]

    def thinned(tensor: torch.Tensor) -> torch.Tensor:
        kinds = [kind for kind, label in enumerate(labels) if label is tensor]
        if tensor.dim() < least_dim or not kinds or tensor.shape[cutter.batch_dim] != batch.samples:
            return tensor
        fewer, start = tensor.clone(), 0
        for k, samples in enumerate(spans):
            mine = fewer.narrow(cutter.batch_dim, start, samples)
            number = math.ceil(left_out(kinds[0], k) * mine.shape[-1])
            mine[..., mine.shape[-1] - number :] = ignored
            start += samples
        return fewer

    args, kwargs, target = map_tensors((batch.args, batch.kwargs, batch.target), thinned)
    return MicroBatch(args, kwargs, target, batch.samples)


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The layers, by name, that normalise over the samples of one call: over a micro-batch, where the batch is cut."""
    kind = nn.modules.batchnorm._BatchNorm
    return {name: module for name, module in model.named_modules() if isinstance(module, kind) and module.training}


def _made(losses: Sequence[float], weights: Sequence[float], added: bool) -> float:
    counting = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight]
    total = 1.0 if added else sum(weight for _, weight in counting)
    return sum(loss * weight for loss, weight in counting) / total if counting else float("nan")


def _missed(losses: Sequence[float], weights: Sequence[float], added: bool, whole: float, least: float) -> float:
    """How far the parts are from the whole, as a share of the largest of them; of `least` at least."""
    return abs(_made(losses, weights, added) - whole) / (max(abs(whole), *map(abs, losses), least) or 1.0)


def _candidates(batch: MicroBatch) -> Iterator[Counted]:
    """What a mean over the batch may be over: masks and weights as they are, labels that are not padding."""
    arguments: list[tuple[int | str, Any]] = [("target", batch.target), *batch.kwargs.items(), *enumerate(batch.args)]
    for argument, value in arguments:
        for k, tensor in enumerate(tensors_in(value)):
            if tensor.dim() == 0 or tensor.is_complex() or tensor.is_sparse or not tensor.numel():
                continue
            if tensor.is_floating_point() or tensor.dtype == torch.bool:
                yield Counted(argument=argument, tensor=k)
                if tensor.is_floating_point():
                    yield Counted(argument=argument, tensor=k, other_than=0)
                continue
            for padding, shifted in itertools.product(PADDING, (False, True) if tensor.dim() > 1 else (False,)):
                yield Counted(argument=argument, tensor=k, other_than=padding, shifted=shifted)
            yield Counted(argument=argument, tensor=k)


def _values(
    model: nn.Module, splits: Sequence[Sequence[MicroBatch]], loss: Loss, value_of: Callable[..., T]
) -> list[list[T]] | None:
    """The losses of all parts of each split, each part from the same state; None where random numbers are drawn."""
    with untouched(model, loss.keeps) as start:
        if not batch_norms(model) and (values := _drawing_nothing(model, splits, loss, start, value_of)) is not None:
            return values
        if not any(module.training for module in model.modules()):
            return None
        model.eval()
        return _drawing_nothing(model, splits, loss, ModelState(model, loss.keeps), value_of)


def _drawing_nothing(
    model: nn.Module,
    splits: Sequence[Sequence[MicroBatch]],
    loss: Loss,
    start: ModelState,
    value_of: Callable[..., T],
) -> list[list[T]] | None:
    before = torch.get_rng_state(), random_states()
    values = []
    for parts in splits:
        of_split = []
        for part in parts:
            start.restore()
            args, kwargs, target = map_tensors((part.args, part.kwargs, part.target), copy_of)
            try:
                value = value_of(model, loss, args, kwargs, target)
            except Exception:  # some have no loss in eval mode, some run out of memory: nothing can be told
                return None
            of_split.append(value)
            if not torch.equal(torch.get_rng_state(), before[0]) or random_states() != before[1]:
                torch.set_rng_state(before[0])
                set_random_states(before[1])
                return None
        values.append(of_split)
    return values if np.isfinite(np.asarray(values[0], dtype=np.float64)).all() else None


def _value(model: nn.Module, loss: Loss, args: Any, kwargs: Any, target: Any) -> float:
    try:
        with torch.no_grad():
            return float(loss.of(model(*args, **kwargs), target))
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        with torch.enable_grad():  # gradients inside a forward, a penalty on them
            return float(loss.of(model(*args, **kwargs), target).detach())


def _terms(
    forward: Callable[..., Any], model: nn.Module, loss: Loss, args: Any, kwargs: Any, target: Any
) -> list[float]:
    """The terms of a loss, at last what of it has no gradient."""
    with loss.taking_apart():
        terms = loss.taken_apart(forward(*args, **kwargs), target)
    return [float(value.detach()) for value in (*terms.values, terms.constant)]


def _tolerance(model: nn.Module) -> float:
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    least = TOLERANCE if all(parameter.is_cpu for parameter in parameters) else DEVICE_TOLERANCE
    return max([least, *(16 * torch.finfo(parameter.dtype).eps for parameter in parameters)])
