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
from partitioner.specs import Counted, LossRule, Weighing
from partitioner.structures import map_tensors
from partitioner.trial import copy_of
from partitioner.uneven import PADDING, Place, Uneven, places

T = TypeVar("T")
TOLERANCE = 1e-5
"""Relative; batches of other sizes are computed in other orders of sums."""
DEVICE_TOLERANCE = 1e-4
"""The same on other devices than a CPU, where they are computed by other kernels, which may round more."""
UNEVEN = 1e-4
"""The same for examples made uneven: what is left out is a large part, and zeros may round more than what was there."""


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
    model: nn.Module,
    batch: MicroBatch,
    inputs: Any,
    cutter: Cutter,
    count: int,
    loss: Loss,
    paddings: Sequence[int] = PADDING,
    least: float = 0.0,
) -> Comparison | None:
    """The loss of the whole batch, `inputs` as the caller gave them, beside that of `count` micro-batches.

    `paddings`: values that may mark what the loss is no mean over. `least`: the least difference that counts.

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
    tolerance = max(least, _tolerance(model))

    def missed(rule: Sequence[Sequence[float]], added: bool) -> float:
        shares = [_missed(one, weight, added, whole, 0.0) for one, weight in zip(found, rule, strict=True)]
        return float(np.max(shares))  # NaN where one is

    def missedby_rule(how: Weighing) -> float:
        rule = _counted(loss, how, splits)
        return math.nan if rule is None else missed(rule, how == "sum")

    made = _made(found[0], weights[0], is_sum)
    if missed(weights, is_sum) <= tolerance:
        return Comparison(whole, made, count, None, True)
    simple: tuple[Weighing, ...] = ("sum", "samples")
    for how in simple:
        if missedby_rule(how) <= tolerance:
            return Comparison(whole, made, count, how, False)
    candidates = _candidates(batch, paddings)
    fitting = [(error, what) for what in candidates if (error := missedby_rule(what)) <= tolerance]
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
    model: nn.Module,
    batch: MicroBatch,
    tried: Uneven,
    inputs: Any,
    cutter: Cutter,
    count: int,
    loss: Loss,
) -> Comparison | None:
    """The same where the example's micro-batches hold other numbers of what the loss may be a mean over.

    None where the loss's own rule tells how its parts add up then too, or it cannot be tried. A rule that is found
    makes up the loss of the example as well.
    """
    for together in (tried.several, tuple(tried.singles.values())):
        found = [_compared(model, one, inputs, cutter, count, loss, tried.paddings) for one in together]
        told = [one for one in found if one is not None]
        missed = next((one for one in told if not one.holds), None)
        if missed is not None and missed.how is not None:
            by = by_rule(missed.how, model, loss)
            of_example = compare(model, batch, inputs, cutter, count, by)
            return missed if of_example is None or of_example.holds else missed._replace(how=None)
        if told:
            return missed
    return None


def uneven_in(model: nn.Module, tried: Uneven, inputs: Any, cutter: Cutter, count: int, loss: Loss) -> list[Place]:
    """The tensors of which other numbers in each micro-batch make the loss another than the loss's rule tells."""
    found = {
        place: _compared(model, one, inputs, cutter, count, loss, tried.paddings)
        for place, one in tried.singles.items()
    }
    return [place for place, one in found.items() if one is not None and not one.holds]


def _compared(
    model: nn.Module,
    batch: MicroBatch,
    inputs: Any,
    cutter: Cutter,
    count: int,
    loss: Loss,
    paddings: Sequence[int],
) -> Comparison | None:
    """The comparison, by samples where labels of two kinds count differently; None where micro-batches have no loss."""
    try:
        found = compare(model, batch, inputs, cutter, count, loss, paddings, UNEVEN)
    except ArgumentError:
        found = compare(model, batch, inputs, cutter, count, by_rule("samples", model, loss), paddings, UNEVEN)
        if found is not None and found.holds:
            found = found._replace(how="samples", holds=False)
    if found is not None and not found.holds and found.how is None and not math.isfinite(found.parts):
        return None
    return found


def by_rule(how: Weighing, model: nn.Module, loss: Loss) -> Loss:
    """The loss with another rule."""
    by = Loss(model, loss.function, None, LossRule(loss=loss.name, how=how))
    by.beside = loss.beside
    return by


def compare_terms(
    model: nn.Module,
    batch: MicroBatch,
    tried: Uneven,
    cutter: Cutter,
    count: int,
    loss: Loss,
    forward: Callable[..., Any] | None = None,
) -> tuple[Weighing, ...]:
    """What each term of a loss that adds up several is: each makes up that of the batch with it. () where it is not so.

    The batch is tried as it is and uneven: two rules that fit one batch are told apart by that. The model is untouched.
    `forward`: what gives the model's output.
    """
    count = min(count, batch.samples)
    if count < 2:
        return ()
    terms = functools.partial(_terms, forward or model)

    def rules(one: MicroBatch) -> list[list[Weighing]] | None:
        return _rules_of_terms(model, one, tried, cutter, count, loss, terms)

    fitting = rules(batch)
    if fitting is None or len(fitting) < 2:
        return ()
    for together in (tried.everything, tried.several, tuple(tried.singles.values())):
        found = [one for one in map(rules, together) if one is not None]
        if found and all(len(one) == len(fitting) and all(one) for one in found):
            both = [
                [how for how in of_term if all(how in one[j] for one in found)] for j, of_term in enumerate(fitting)
            ]
            return tuple(of_term[0] for of_term in both) if all(both) else ()
    return () if tried.several or tried.everything or not all(fitting) else tuple(of_term[0] for of_term in fitting)


def _rules_of_terms(
    model: nn.Module,
    batch: MicroBatch,
    tried: Uneven,
    cutter: Cutter,
    count: int,
    loss: Loss,
    terms: Callable[..., list[float]],
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
    candidates = list(_candidates(batch, tried.paddings))
    counted = [how for how in candidates if tried.ignorable.get((how.argument, how.tensor), how) == how.other_than]
    others = [how for how in candidates if how not in counted]
    likeliest: list[Weighing] = [*counted, "samples", "sum", *others]
    weights = {how: rule for how in likeliest if (rule := _counted(loss, how, splits)) is not None}

    def fits(j: int, how: Weighing) -> bool:
        return all(
            _missed([one[j] for one in of_split], of_parts, how == "sum", whole[j], size / 1e3) <= tolerance
            for of_split, of_parts in zip(found, weights[how], strict=True)
        )

    rules = []
    for j, value in enumerate(whole):
        is_constant = all(abs(part[j] - value) <= tolerance * size for parts in found for part in parts)
        order = sorted(weights, key=lambda how: how != "samples") if is_constant else list(weights)
        rules.append([how for how in order if fits(j, how)])
    return rules


def ignorable_in(model: nn.Module, batch: MicroBatch, cutter: Cutter, count: int, loss: Loss) -> dict[Place, int]:
    """Labels of the batch of which the loss leaves out those that are to be ignored, and the value that says so.

    Some of them are in the batch; or one of torch's own losses, which says what it ignores, is given them, all or
    without the first of each sequence. To other functions that value may be an index like any other, which would be
    read beside its table: on a device only labels are taken for such.
    """
    labels, tensors = {id(label) for label in loss.labels(batch).values()}, places(batch)
    first = cutter.cut(batch.args, batch.kwargs, batch.target, min(count, batch.samples))[0]
    of_first = places(first)
    found = {
        place: loss.ignored
        for place, tensor in tensors.items()
        if id(tensor) in labels and bool((tensor == loss.ignored).any())
    }
    given: list[tuple[torch.Tensor, int]] = []

    def value_of(model: nn.Module, loss: Loss, args: Any, kwargs: Any, target: Any) -> float:
        with torch.enable_grad():
            value = loss.of(model(*args, **kwargs), target)
        given.extend(_targets(value))
        return float(value.detach())

    if _values(model, [[first]], loss, value_of) is None:
        return found
    for target, ignored in given:
        mine = [place for place, tensor in of_first.items() if _is_given(tensor, target, ignored)]
        of_labels = [place for place in mine if id(tensors[place]) in labels]
        others = [place for place in mine if (place[0] == "target") == (loss.function is not None)]
        for place in of_labels or [place for place in others if tensors[place].is_cpu]:
            found.setdefault(place, ignored)
    return found


def _is_given(labels: torch.Tensor, target: torch.Tensor, ignored: int) -> bool:
    """Whether these labels, or all but the first of each sequence, are what a loss was given as its target."""
    if labels.dim() == 0 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return False

    def valid(label: torch.Tensor) -> torch.Tensor:
        return label[label != ignored].sort().values

    theirs = valid(target)
    ways = (labels, labels[..., 1:])
    return bool(theirs.numel()) and any(torch.equal(theirs.to(mine), mine) for mine in map(valid, ways))


def _targets(loss: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """The targets of torch's losses over classes in a loss's graph, and the value that they leave out."""
    found, seen, left = [], set[Any](), [loss.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [following for following, _ in node.next_functions]
        if node.name() in _LOSSES_OVER_CLASSES:
            ignored = int(node._saved_ignore_index)  # unsigned
            found.append((node._saved_target, ignored - 2**64 if ignored >= 2**63 else ignored))
    return found


_LOSSES_OVER_CLASSES = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
"""Nodes of autograd, of which cross-entropy is made too."""


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


def _candidates(batch: MicroBatch, paddings: Sequence[int]) -> Iterator[Counted]:
    """What a mean over the batch may be over: masks and weights as they are, labels that are not padding."""
    for (argument, k), tensor in places(batch).items():
        if tensor.dim() == 0 or tensor.is_complex() or tensor.is_sparse or not tensor.numel():
            continue
        if tensor.is_floating_point() or tensor.dtype == torch.bool:
            yield Counted(argument=argument, tensor=k)
            if tensor.is_floating_point():
                yield Counted(argument=argument, tensor=k, other_than=0)
            continue
        for padding, shifted in itertools.product(paddings, (False, True) if tensor.dim() > 1 else (False,)):
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
