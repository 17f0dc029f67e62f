"""A model run whole, and run as stages that each have a copy of the model of their own, as ranks have."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from models import Case
from torch import nn

from partitioner.capture import Capture
from partitioner.losses import Loss
from partitioner.profiles import Profile
from partitioner.slicing import Slice, SliceRun, chain
from partitioner.structures import in_own_containers


@dataclass
class Result:
    """One step: the loss, the gradients by first name, and the model or the stages' models it was run on."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    models: Sequence[nn.Module]
    runs: Sequence[SliceRun] = ()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def run_whole(case: Case, seed: int = 0, model: nn.Module | None = None) -> Result:
    """The step as a user writes it, on a copy of the model."""
    model = copy.deepcopy(case.model) if model is None else model
    model.zero_grad()
    seed_all(seed)
    args, kwargs = in_own_containers((case.args, case.kwargs or {}))
    loss = Loss(model, case.loss_fn, None).of(model(*args, **kwargs), case.target)
    loss.backward()
    return Result(loss.detach(), {name: p.grad for name, p in model.named_parameters()}, [model])


def run_cut(
    case: Case,
    captured: Capture | Profile,
    stage_of: Mapping[str, int],
    seed: int = 0,
    models: Sequence[nn.Module] | None = None,
) -> Result:
    """The same step in stages; parameters that a stage does not own are NaN there. Gradients are summed over owners."""
    models = stage_models(case.model, captured, stage_of) if models is None else models
    for model in models:
        model.zero_grad()
    seed_all(seed)
    parts = [Slice(model, captured, stage_of, stage) for stage, model in enumerate(models)]
    runs, backward = chain(parts, case.args, case.kwargs or {}, before_each=lambda: seed_python(seed))
    loss = Loss(models[-1], case.loss_fn, None).of(runs[-1].output, case.target)
    backward(loss)
    gradients: dict[str, torch.Tensor | None] = {}
    for entry in captured.parameters:
        name, owners = entry.names[0], {stage_of[layer] for layer in entry.layers} or {0}
        found = [(stage, dict(model.named_parameters())[name].grad) for stage, model in enumerate(models)]
        strangers = [stage for stage, gradient in found if gradient is not None and stage not in owners]
        assert not strangers, f"stage {strangers} has a gradient of {name}, which only stages {owners} use"
        parts_of = [gradient for _, gradient in found if gradient is not None]
        gradients[name] = torch.stack([_dense(one) for one in parts_of]).sum(0) if parts_of else None
    return Result(loss.detach(), gradients, models, runs)


def seed_python(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)


def stage_models(
    model: nn.Module,
    captured: Capture | Profile,
    stage_of: Mapping[str, int],
    make: Callable[[], nn.Module] | None = None,
) -> list[nn.Module]:
    """One copy of the model for each stage, with NaN wherever a parameter or buffer lives on other stages only.

    `make` builds the model anew where a deep copy is not the same (hooks on parameters, scripted modules).
    """
    made = []
    for stage in range(max(stage_of.values()) + 1):
        mine = copy.deepcopy(model) if make is None else make()
        parameters = dict(mine.named_parameters(remove_duplicate=False))
        for entry in captured.parameters:
            if stage not in ({stage_of[layer] for layer in entry.layers} or {0}):
                parameter = parameters[entry.names[0]]
                value = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
                parameter.data = torch.full((), value, dtype=parameter.dtype).expand(parameter.shape)
        buffers = dict(mine.named_buffers(remove_duplicate=False))
        for buffer in captured.buffers:
            if stage not in {stage_of[layer] for layer in buffer.layers}:
                tensor = buffers[buffer.names[0]]
                value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 77
                tensor.data = torch.full((), value, dtype=tensor.dtype).expand(tensor.shape)
        made.append(mine)
    return made


def difference(whole: Result, cut: Result) -> tuple[float, str]:
    """The worst |g - ref| / max(max|ref|, 1e-4 x the largest gradient), over the loss and every gradient, and where."""
    dense = {name: _dense(g) for name, g in whole.gradients.items() if g is not None}
    largest = max((float(g.abs().max()) for g in dense.values() if g.numel()), default=0.0)
    worst = float((cut.loss - whole.loss).abs() / whole.loss.abs().clamp_min(1e-12))
    where = "the loss"
    for name in whole.gradients:
        reference, other = whole.gradients[name], cut.gradients[name]
        if reference is None and other is None:
            continue
        a = torch.zeros(()) if reference is None else _dense(reference)
        b = torch.zeros(()) if other is None else _dense(other)
        scale = max(float(a.abs().max()), 1e-4 * largest, 1e-30) if a.numel() else 1.0
        error = float((a - b).abs().max()) / scale if a.numel() else 0.0
        if not error <= worst:
            worst, where = error, name
    return worst, where


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def possible_cuts(captured: Capture | Profile) -> list[str]:
    """Ids of the layers just before which a cut is possible."""
    return [layer.id for layer in captured.layers[1:] if layer.id not in captured.no_cut]


def split(captured: Capture | Profile, cuts: Sequence[str]) -> dict[str, int]:
    """Layer id -> stage, a new stage beginning at each of `cuts`."""
    stage, stage_of = 0, {}
    for layer in captured.layers:
        stage += layer.id in cuts
        stage_of[layer.id] = stage
    return stage_of


def even_cuts(captured: Capture | Profile, num_stages: int, shift: int = 0) -> list[str]:
    """Cuts for stages of about equally many layers, moved later by `shift` places."""
    places = possible_cuts(captured)
    step = len(places) / num_stages
    return sorted({places[min(len(places) - 1, int(step * k) + shift)] for k in range(1, num_stages)}, key=places.index)


def quiet(build: Callable[[], Case]) -> Case:
    """The case, without what its libraries say while building."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build()
