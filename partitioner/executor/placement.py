"""Which rank holds which parameter: a model is taken over in place, and keeps on each rank only what its stage uses.

A parameter lives on every stage that uses it; one that the captured forward did not use (another branch may) belongs to
the layer before it in the model. On all other stages a placeholder with its shape and dtype stands in
its place, a single NaN seen everywhere, so that a wrong read cannot go unnoticed. So it is with buffers. Those that no
layer was seen to use are whole on every rank; the stage whose layers are nearest speaks for them in checkpoints.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from partitioner.capture import fingerprint
from partitioner.errors import ArgumentError, PlanMismatchError
from partitioner.executor.mesh import Mesh
from partitioner.executor.placeholders import (
    is_placeholder,
    make_placeholder,
    refuse_emptied,
    stands_in,
    stands_in_no_more,
)
from partitioner.executor.weights import Weights
from partitioner.plan import Plan
from partitioner.recording import ROOT
from partitioner.tracing import unwrap
from partitioner.wire import as_bytes

ModelOrFactory = nn.Module | Callable[[], nn.Module]
WeightsLike = Mapping[str, torch.Tensor] | str | os.PathLike[str]


class Placement:
    """A model taken over for one stage. `model` is the user's own object, or what the factory built.

    `owners`: first name of each parameter -> the stages it lives on. `own`: what lives here, in the model's order.
    """

    def __init__(
        self, plan: Plan, stage: int, model: ModelOrFactory, device: torch.device, weights: WeightsLike | None
    ) -> None:
        self._factory = None if isinstance(model, nn.Module) else model
        self.model = unwrap(model if isinstance(model, nn.Module) else _built(model))
        self.stage, self._device = stage, device
        self._check_fingerprint(plan)
        if self._factory is None:
            _refuse_optimizers(self.model)
        stage_of = plan.stage_of()
        self.names: dict[str, tuple[str, ...]] = {entry.names[0]: entry.names for entry in plan.profile.parameters}
        near = _stages_below(stage_of)
        self.owners: dict[str, tuple[int, ...]] = {
            entry.names[0]: tuple(sorted({stage_of[layer] for layer in entry.layers} or {0}))
            for entry in plan.profile.parameters
        }
        self.buffer_owners: dict[str, tuple[int, ...]] = {
            name: tuple(sorted({stage_of[layer] for layer in entry.layers}))
            for entry in plan.profile.buffers
            for name in entry.names
        }
        self._first = {name: first for first, names in self.names.items() for name in names}
        self._near = near
        if weights is None:
            self._refuse_placeholders()
        with torch._C.DisableTorchFunctionSubclass():
            self._take_over(None if weights is None else Weights(weights))
        parameters = dict(self.model.named_parameters())
        self.own: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in parameters.items() if stage in self.owners[self._first[name]]
        }

    def owner_sets(self) -> set[tuple[int, ...]]:
        """Every set of stages that has parameters or buffers in common, single stages included."""
        return {*self.owners.values(), *self.buffer_owners.values()}

    def buffers_of(self, stages: tuple[int, ...] | None) -> list[torch.Tensor]:
        """The buffers that these stages have in common, each once; None: those that are on every rank."""
        named = self.model.named_buffers()
        return [buffer for name, buffer in named if self.buffer_owners.get(name) == stages]

    def owner_set_of(self, name: str) -> tuple[int, ...]:
        return self.owners[self._first[name]]

    def stage_of_key(self, key: str) -> int:
        """The stage that speaks for an entry of the state dict: the first owner, or else the nearest layer's."""
        owners = self._owners_of_key(key)
        if owners:
            return owners[0]
        return min(_nearest(self._near, key))

    def holds(self, key: str) -> bool:
        """Whether an entry of the state dict is this stage's own."""
        return self.stage in (self._owners_of_key(key) or (self.stage_of_key(key),))

    def refuse_emptied(self) -> None:
        """Stop where a line of the user's put what holds nothing here in the place of this stage's own values."""
        refuse_emptied(chain(self.own.items(), self.model.named_buffers()))

    def has_values(self, name: str) -> bool:
        """Whether a buffer is no placeholder here."""
        return self.stage in self.buffer_owners.get(name, (self.stage,))

    def _owners_of_key(self, key: str) -> tuple[int, ...]:
        """() where every rank has it."""
        return self.owners[self._first[key]] if key in self._first else self.buffer_owners.get(key, ())

    def state_dict(self) -> dict[str, Any]:
        """This stage's own part of the model's state dict, under the model's own keys."""
        return {key: value for key, value in self.model.state_dict().items() if self.holds(key)}

    def _check_fingerprint(self, plan: Plan) -> None:
        expected, found = plan.profile.fingerprint, fingerprint(self.model)
        planned = {name: entry.shape for entry in plan.profile.parameters for name in entry.names}
        here = {name: tuple(p.shape) for name, p in self.model.named_parameters(remove_duplicate=False)}
        if (not expected or expected == found) and planned == here:
            return
        differing = [name for name in {**planned, **here} if planned.get(name) != here.get(name)]
        first = "its buffers or dtypes differ"
        if differing:
            name = differing[0]
            first = f"{name} is {planned.get(name, 'missing')} in the plan and {here.get(name, 'missing')} in the model"
        raise PlanMismatchError(
            f"the plan was made for another model: fingerprint {expected} in the plan, {found} here; {first}. "
            "Make the plan again for this model"
        )

    def _refuse_placeholders(self) -> None:
        lost = [
            first
            for first, owners in self.owners.items()
            if self.stage in owners and is_placeholder(self.model.get_parameter(first))
        ]
        if lost:
            raise ArgumentError(
                f"{len(lost)} parameters of stage {self.stage} are placeholders of an earlier materialize, "
                f"{_listed(lost)}: build the model again, or pass weights="
            )

    def _take_over(self, weights: Weights | None) -> None:
        meta = [
            names[0]
            for first, names in self.names.items()
            if self.stage in self.owners[first] and self.model.get_parameter(first).is_meta
        ]
        if meta and weights is None:
            raise ArgumentError(
                f"{len(meta)} parameters of stage {self.stage} have no values (they are on the meta device), "
                f"{_listed(meta)}: pass weights=, a state dict or a file to read them from"
            )
        missing = [
            names[0]
            for first, names in self.names.items()
            if self.stage in self.owners[first] and weights is not None and weights.find(names) is None
        ]
        if missing:
            raise ArgumentError(f"the weights lack {len(missing)} parameters of stage {self.stage}: {_listed(missing)}")
        places = _places(self.model)
        with torch.no_grad():
            for first, names in self.names.items():
                parameter = self.model.get_parameter(first)
                own = self.stage in self.owners[first]
                value = weights.read(names, parameter) if own and weights is not None else None
                if own and value is None:
                    value = parameter.data
                data = make_placeholder(parameter, self._device) if value is None else value.to(self._device)
                stands_in_no_more(parameter)
                if not parameter.is_meta:
                    parameter.data = data
                    parameter.grad = parameter.grad if own else None
                    if not own:
                        stands_in(parameter, first, self.owners[first][0])
                    continue
                made = nn.Parameter(data, requires_grad=parameter.requires_grad)
                vars(made).update(vars(parameter))
                made.__class__ = type(parameter)
                if not own:
                    stands_in(made, first, self.owners[first][0])
                for module, name in places[id(parameter)]:
                    setattr(module, name, made)
            self._take_over_buffers(weights)

    def _take_over_buffers(self, weights: Weights | None) -> None:
        """Own buffers: read where weights have them; computed as its factory does for the rest of a meta model's."""
        known: dict[int, torch.Tensor] = {}
        lost = []
        for name, buffer in list(self.model.named_buffers(remove_duplicate=False)):
            module = self.model.get_submodule(name.rpartition(".")[0])
            if self.stage not in self.buffer_owners.get(name, (self.stage,)):
                placeholder = make_placeholder(buffer, self._device)
                if buffer.is_meta:
                    module._buffers[name.rpartition(".")[2]] = known.setdefault(id(buffer), placeholder)
                    stands_in(known[id(buffer)], name, self.buffer_owners[name][0])
                elif id(buffer) not in known:
                    known[id(buffer)] = buffer
                    buffer.data = placeholder
                    stands_in(buffer, name, self.buffer_owners[name][0])
                continue
            value = known.get(id(buffer))
            if value is None and weights is not None:
                value = weights.read((name,), buffer)
            if value is None and not buffer.is_meta:
                value = buffer
            if value is None:
                lost.append(name)
                continue
            known[id(buffer)] = module._buffers[name.rpartition(".")[2]] = value.to(self._device)
        if not lost:
            return
        if self._factory is None:
            raise ArgumentError(
                f"{len(lost)} buffers have no values (they are on the meta device) and the weights lack them, "
                f"{_listed(lost)}: pass the function that builds the model, so that they can be computed"
            )
        values = dict(_built_without_parameters(self._factory).named_buffers(remove_duplicate=False))
        for name in lost:
            self.model.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = values[name].to(
                self._device
            )


def full_state_dict(mesh: Mesh, placement: Placement) -> dict[str, Any] | None:
    """The whole model's state dict on rank 0, on the CPU, in the model's own order; None on other ranks.

    Tensors come one at a time from the first replica; every rank must call it.
    """
    state = placement.model.state_dict()
    sources = {key: mesh.rank_of(placement.stage_of_key(key), 0) for key in state}
    others = mesh.gather(
        {key: _in_one(state[key]) for key in state if _goes_in_one(state[key], sources[key] == mesh.rank)}
    )
    whole: dict[str, Any] = {}
    for key, value in state.items():
        source = sources[key]
        if key in others[source]:
            whole[key] = others[source][key]
        elif mesh.rank == source == 0:
            whole[key] = value.detach().cpu().clone()
        elif mesh.rank == source and value.numel():
            dist.send(as_bytes(value.contiguous()).cpu(), 0, group=mesh.control)
        elif mesh.rank == 0:
            flat = torch.empty(value.numel(), dtype=value.dtype)
            if value.numel():
                dist.recv(flat.view(torch.uint8), source, group=mesh.control)
            whole[key] = flat.view(value.shape)
    return whole if mesh.rank == 0 else None


def _goes_in_one(value: Any, is_source: bool) -> bool:
    """What is no tensor, or a sparse one on the rank that speaks for it."""
    return not isinstance(value, torch.Tensor) or (is_source and value.layout != torch.strided)


def _in_one(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _built(factory: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = factory()
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"the factory returned a {type(model).__name__}, not an nn.Module")
    return model


def _built_without_parameters(factory: Callable[[], nn.Module]) -> nn.Module:
    """The model with real buffers, its parameters given up as soon as each is made."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            made = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            vars(made).update(vars(parameter))
            made.__class__ = type(parameter)
            parameter = made
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        return unwrap(factory())
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each parameter hangs in the model; tied ones hang in several places."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places[id(parameter)].append((module, name))
    return places


def _stages_below(stage_of: Mapping[str, int]) -> dict[str, set[int]]:
    """Module path -> the stages of the layers at and below it."""
    stages: dict[str, set[int]] = defaultdict(set)
    for layer, stage in stage_of.items():
        path = "" if layer == ROOT else layer.partition("#")[0]
        while path:
            stages[path].add(stage)
            path = path.rpartition(".")[0]
        stages[""].add(stage)
    return dict(stages)


def _nearest(stages: Mapping[str, set[int]], key: str) -> set[int]:
    """The stages around a parameter or buffer: those of the innermost module that has layers at or below it."""
    path = key.rpartition(".")[0]
    while path and path not in stages:
        path = path.rpartition(".")[0]
    return stages[path]


def _refuse_optimizers(model: nn.Module) -> None:
    """An optimizer made before holds all parameters, also those that leave this rank."""
    ours = {id(parameter) for parameter in model.parameters()}
    for found in _optimizers():
        if any(id(parameter) in ours for group in found.param_groups for parameter in group["params"]):
            name = type(found).__name__
            raise ArgumentError(
                f"an optimizer ({name}) was made from this model's parameters before materialize, which moves most of "
                f"them to other ranks. Make it afterwards: torch.optim.{name}(stage.parameters(), ...)"
            )


def _optimizers() -> Iterator[torch.optim.Optimizer]:
    for item in gc.get_objects():
        if issubclass(type(item), torch.optim.Optimizer) and hasattr(item, "param_groups"):
            yield item


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
