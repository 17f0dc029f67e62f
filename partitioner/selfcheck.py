"""Run one micro-batch sliced and unsliced, and refuse a split whose loss or gradients are not the model's own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from partitioner.capture import copied
from partitioner.contents import content_of
from partitioner.errors import PartitionerError, UnsupportedModelError
from partitioner.losses import Loss
from partitioner.microbatches import MicroBatch
from partitioner.profiles import Profile
from partitioner.reaching import Reach
from partitioner.recompute import Recomputed
from partitioner.renewal import Kept
from partitioner.restore import ModelState, generators_of, untouched
from partitioner.slicing import Slice, chain
from partitioner.structures import map_tensors
from partitioner.trial import line_of

TOLERANCE = 1e-4
"""Of the largest gradient of a parameter; one device differs from itself by less (fp32, other order of sums)."""
OWN_REPEATS = 4
"""Of the uncut model, to see by how much it differs from itself, before a split is blamed for a difference."""
MAX_OWN = 1e-2
"""A model that differs from itself by more hides any error: it keeps state that cannot be put back to compare."""


def check_split(
    model: nn.Module,
    profile: Profile,
    stage_of: Mapping[str, int],
    part: MicroBatch,
    loss: Loss,
    *,
    second: MicroBatch | None = None,
    recompute: Collection[str] = (),
    seed: int = 0,
) -> float:
    """The worst relative difference of loss, gradients and buffers, sliced against unsliced; the model is untouched.

    Two rounds, the second (of `second`, or of `part` again) from the state in which the first left the model. Each
    stage keeps a state of its own, as on its own rank: what another stage leaves on a module does not reach it.
    `recompute`: layers that the sliced model runs again in their backward. Stages one after another draw random numbers
    in the order of the whole forward, so dropout may stay on. Difference is relative to the gradient's largest entry,
    or to 1e-4 of the model's largest where that is larger (some true gradients are 0). UnsupportedModelError where it
    is more than `TOLERANCE` and more than the model differs from itself, where that is more than `MAX_OWN`, or where
    the sliced model fails.
    """
    rounds = (part, second or part)
    stages = range(max(stage_of.values()) + 1)
    spoken_for: dict[int, list[str]] = {stage: [] for stage in stages}
    for buffer in profile.buffers:
        spoken_for[max(stage_of[layer] for layer in buffer.layers)].append(buffer.names[0])
    with untouched(model, loss.keeps) as start, torch.enable_grad():

        def whole() -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
            start.restore()
            names = [name for mine in spoken_for.values() for name in mine]
            return [
                (_results(model, seed + k, _plain, one, loss), _buffers(model, names)) for k, one in enumerate(rounds)
            ]

        expected = whole()
        start.restore()
        worst, where = 0.0, "none"
        with Recomputed(model, recompute):
            slices = [Slice(model, profile, stage_of, stage, loss=loss.function) for stage in stages]
            elsewhere = _elsewhere(model, profile, stage_of)
            states = [ModelState(model, loss.keeps)] * len(slices)
            for k, one in enumerate(rounds):
                held: dict[str, torch.Tensor] = {}
                given = one, loss, elsewhere, slices, states, spoken_for, held, seed + k
                try:
                    found = _results(model, seed + k, _sliced, *given)
                except (PartitionerError, torch.OutOfMemoryError):
                    raise
                except Exception as failure:  # whatever the model's code raises; uncut it has just run
                    raise UnsupportedModelError(_failure(profile, stage_of, failure)) from failure
                for error, whose in map(worst_difference, expected[k], (found, held)):
                    if not error <= worst:
                        worst, where = error, whose
        if not worst <= TOLERANCE:
            own = 0.0
            finite = all(bool(t.isfinite().all()) for one in expected for results in one for t in results.values())
            for _ in range(OWN_REPEATS):
                for first, again in zip(expected, whole(), strict=True):
                    own = max(own, *(error for error, _ in map(worst_difference, first, again)))
                if own > MAX_OWN and finite:
                    raise UnsupportedModelError(_never_the_same(profile, stage_of, own))
                if worst <= 2 * own:
                    break
            else:
                raise UnsupportedModelError(_refusal(profile, stage_of, worst, where))
    return worst


def in_stages(model: nn.Module, profile: Profile, stage_of: Mapping[str, int], loss: Loss) -> Callable[..., Any]:
    """The model's forward, run by its stages one after another in this process: what it returns."""
    slices = [Slice(model, profile, stage_of, stage, loss=loss.function) for stage in range(max(stage_of.values()) + 1)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        return chain(slices, args, kwargs)[0][-1].output

    return forward


def check_order(model: nn.Module, first: MicroBatch, second: MicroBatch, loss: Loss, *, seed: int = 0) -> None:
    """Whether a micro-batch's forward may come before the backward of the one before it; the model is untouched.

    UnsupportedModelError where a backward changes a buffer or attribute, and with both forwards before both backwards
    the second loss or the gradients are others.
    """
    rounds = (first, second)

    def seeded(k: int) -> None:
        torch.manual_seed(seed + k)
        _seed_python(seed + k)

    def forward(k: int) -> torch.Tensor:
        seeded(k)
        args, kwargs = map_tensors((rounds[k].args, rounds[k].kwargs), copied)
        return loss.of(model(*args, **kwargs), rounds[k].target)

    def in_turn() -> torch.Tensor:
        values = [forward(0)]
        after = ModelState(model)
        backward(values[0])
        if not after.differs():
            raise _NothingChanged
        values.append(forward(1))
        backward(values[1])
        return torch.stack([value.detach() for value in values])

    def forwards_first() -> torch.Tensor:
        kept = Kept(Reach(model, lambda path: 1).places.values(), parameters=model.parameters())
        values, then = [], []
        for k in range(2):
            kept.begin()
            values.append(forward(k))
            then.append(kept.end())
        for value, one in zip(values, then, strict=True):
            with kept.as_after(one):
                backward(value)
        return torch.stack([value.detach() for value in values])

    def backward(value: torch.Tensor) -> None:
        if value.requires_grad:
            value.backward()  # type: ignore[no-untyped-call]

    with untouched(model, loss.keeps) as start, torch.enable_grad():
        try:
            expected = _results(model, seed, lambda _: in_turn())
        except _NothingChanged:
            return
        start.restore()
        found = _results(model, seed, lambda _: forwards_first())
        worst, where = worst_difference(expected, found)
        if worst > TOLERANCE:
            start.restore()
            own, _ = worst_difference(expected, _results(model, seed, lambda _: in_turn()))
            if worst > 2 * own:
                raise UnsupportedModelError(
                    f"its backward changes a buffer or attribute that the next forward reads: with two micro-batches "
                    f"under way at once, as in a pipeline, {where} differs by {worst:.1e} of its size. Use replicas "
                    f"only (mesh={{'dp': n}}), or one micro-batch (microbatches=1)"
                )


class Changed(NamedTuple):
    """What a forward changes."""

    buffers: list[str]
    has_numbers: bool
    """Whether numbers in attributes of modules."""
    generators: list[str]
    """Generators of random numbers that are the model's own: in its attributes, or beside its forward in a file."""


def changed_by_forward(model: nn.Module, part: MicroBatch, loss: Loss, *, seed: int = 0) -> Changed:
    """What a forward changes; the model is untouched.

    Of a second forward, as a first one may set up things once. What torch's own normalisations average is not told: a
    forward in training does not read it.
    """

    def forward() -> None:
        args, kwargs = map_tensors((part.args, part.kwargs), copied)
        model(*args, **kwargs)

    with untouched(model, loss.keeps), torch.enable_grad():
        torch.manual_seed(seed)
        _seed_python(seed)
        forward()
        averages = {
            id(buffer)
            for module in model.modules()
            if isinstance(module, nn.modules.batchnorm._NormBase)
            for buffer in module.buffers()
        }
        before = {
            name: (buffer, buffer.detach().clone())
            for name, buffer in model.named_buffers()
            if id(buffer) not in averages and not buffer.is_meta
        }
        tables = [(vars(module), dict(vars(module))) for module in model.modules()]
        generators = {name: (one, content_of(one)) for name, one in generators_of(model).items()}
        forward()
        after = dict(model.named_buffers())
        changed = [
            name
            for name, (buffer, value) in before.items()
            if after.get(name) is not buffer or buffer.shape != value.shape or not torch.equal(buffer, value)
        ]
        numbers = (bool, int, float)
        counts = any(
            type(value) in numbers and table.get(key) != value for table, then in tables for key, value in then.items()
        )
        drawn = [name for name, (one, state) in generators.items() if content_of(one) != state]
        return Changed(changed, counts, drawn)


class _NothingChanged(Exception):
    """A backward has left the model as it was."""


def _sliced(
    model: nn.Module,
    part: MicroBatch,
    loss: Loss,
    elsewhere: Mapping[nn.Parameter, str],
    slices: Sequence[Slice],
    states: list[ModelState],
    spoken_for: Mapping[int, Sequence[str]],
    held: dict[str, torch.Tensor],
    seed: int,
) -> torch.Tensor:
    """One step in stages; `states` are the model's as each stage knows it, before and then after.

    `held` gets the buffers as the stages have them that speak for them.
    """
    here: int | None = None

    def change(stage: int | None) -> None:
        nonlocal here
        if here is not None:
            states[here] = ModelState(model, loss.keeps)
            held.update(_buffers(model, spoken_for[here]))
        here = stage
        if here is not None:
            states[here].restore()

    def begin() -> None:
        change(0 if here is None else here + 1)
        _seed_python(seed)

    with loss.watching():
        runs, backward = chain(slices, part.args, part.kwargs, before_each=begin, before_backward=change)
        value = loss.alone(runs[-1].output, part.target)
    _refuse_weights_in_loss(value, elsewhere)
    backward(value)
    change(None)
    return value.detach()


def _elsewhere(model: nn.Module, profile: Profile, stage_of: Mapping[str, int]) -> dict[nn.Parameter, str]:
    """The names of parameters that the last stage does not have."""
    parameters, last = dict(model.named_parameters(remove_duplicate=False)), max(stage_of.values())
    owned = ((entry.names[0], {stage_of[layer] for layer in entry.layers} or {0}) for entry in profile.parameters)
    return {parameters[name]: name for name, stages in owned if last not in stages}


def _refuse_weights_in_loss(value: torch.Tensor, elsewhere: Mapping[nn.Parameter, str]) -> None:
    """The last stage's graph ends at what it received: a parameter of another stage in it was read by the loss."""
    seen: set[Any] = set()
    waiting = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = elsewhere.get(getattr(node, "variable", None))  # type: ignore[arg-type]
        if name is not None:
            raise UnsupportedModelError(
                f"the loss uses the parameter {name!r}, which lives on an earlier stage and holds no values where the "
                f"loss is computed. Give a penalty on weights to the optimizer (weight_decay), use the parameter in "
                f"the forward and return what the loss needs of it, or use replicas only (mesh={{'dp': n}})"
            )
        waiting += [following for following, _ in node.next_functions]


def _cuts(profile: Profile, stage_of: Mapping[str, int]) -> str:
    ids = [layer.id for layer in profile.layers]
    return ", ".join(name for before, name in itertools.pairwise(ids) if stage_of[name] != stage_of[before])


def _never_the_same(profile: Profile, stage_of: Mapping[str, int], own: float) -> str:
    return (
        f"cut before {_cuts(profile, stage_of)}, the model cannot be checked: uncut and from the same state and random "
        f"numbers it differs from itself by {own:.1e} (allowed {MAX_OWN:.0e}), so it keeps a state outside of its "
        f"modules (an iterator, a closure, a global) or draws unseeded random numbers, which ranks may not agree on. "
        f"Keep that in attributes or buffers of modules, use replicas only (mesh={{'dp': n}}), or leave out the check "
        f"(check='never')"
    )


def _refusal(profile: Profile, stage_of: Mapping[str, int], worst: float, where: str) -> str:
    return (
        f"cut before {_cuts(profile, stage_of)}, {where} differs by {worst:.1e} of its size from the uncut model's "
        f"(allowed {TOLERANCE:.0e}): the model keeps or changes something that slicing does not see. Pin the layers "
        f"around the cut to one stage (pin={{layer id: stage}}), or use replicas only (mesh={{'dp': n}})"
    )


def _failure(profile: Profile, stage_of: Mapping[str, int], error: Exception) -> str:
    raised = f"{type(error).__name__}: {str(error).strip() or 'without a message'}{line_of(error)}"
    return (
        f"cut before {_cuts(profile, stage_of)}, the model's own code raised {raised}, and uncut it runs: it looks "
        f"into something that another stage has or changes. Pin the layers around the cut to one stage "
        f"(pin={{layer id: stage}}), or use replicas only (mesh={{'dp': n}})"
    )


def _seed_python(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _plain(model: nn.Module, part: MicroBatch, loss: Loss) -> torch.Tensor:
    args, kwargs = map_tensors((part.args, part.kwargs), copied)
    with loss.watching():
        value = loss.alone(model(*args, **kwargs), part.target)
    if value.requires_grad:  # not where nothing at all is trained
        value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def _buffers(model: nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor]:
    buffers = dict(model.named_buffers(remove_duplicate=False))
    found = {f"the buffer {name}": buffers[name].detach() for name in names if name in buffers}
    return {
        name: tensor.clone() if tensor.is_complex() else tensor.to(torch.float64, copy=True)
        for name, tensor in found.items()
    }


def _results(model: nn.Module, seed: int, run: Callable[..., torch.Tensor], *given: Any) -> dict[str, torch.Tensor]:
    """The loss and every gradient of `run(model, *given)` from the random state of a seed."""
    torch.manual_seed(seed)
    _seed_python(seed)
    for parameter in model.parameters():
        parameter.grad = None
    results = {"the loss": run(model, *given)}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            results[f"the gradient of {name}"] = gradient.to_dense() if gradient.is_sparse else gradient
    return results


def worst_difference(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """The largest max|found - expected| / max(max|expected|, 1e-4 x largest of all), and whose it is.

    Infinite where one side has a tensor that the other lacks, unless it is all zeros; where a value is not a number.
    """
    sizes = {name: float(value.abs().max()) if value.numel() else 0.0 for name, value in expected.items()}
    largest = max(sizes.values(), default=0.0)
    worst, whose = 0.0, "none"
    for name in {**expected, **found}:
        reference, other = expected.get(name), found.get(name)
        if reference is None or other is None:
            present = reference if reference is not None else other
            error = float("inf") if present is not None and bool(present.any()) else 0.0
        elif not reference.numel():
            error = 0.0
        else:
            error = float((other - reference).abs().max()) / (max(sizes[name], 1e-4 * largest) or 1.0)
        if not error <= worst:
            worst, whose = (error if error == error else float("inf")), name
    return worst, whose
