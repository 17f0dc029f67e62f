"""Forwards after the captured one, to see in time where some take another way.

Layers are called in another order or once more, weights are read or written only now and then. What is seen restricts
the plan instead of ending a training: no cut where a later call would have to go back to an earlier stage, and weights
on all stages whose code reads them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.capture import FATES, Capture, copied, fate
from partitioner.losses import Compared
from partitioner.microbatches import MicroBatch
from partitioner.profiles import Parameter
from partitioner.recording import ROOT
from partitioner.restore import untouched
from partitioner.structures import map_tensors, storage_of, tensors_in
from partitioner.tracing import Watcher, unwatched, watching
from partitioner.written import parameters_kept

MOST = 16
"""Forwards that are looked at: what comes every tenth time is seen."""
LEAST, LONGEST_S = 3, 1.0
"""So many at least; no further ones after so many seconds of the processor."""


@dataclass
class Way:
    """What one forward did, in layers of a capture."""

    calls: list[str] = field(default_factory=list)
    """Of modules that are layers, by id."""
    uses: set[tuple[str, str]] = field(default_factory=set)
    """Parameters, and the layer that had begun last."""
    written: set[str] = field(default_factory=set)
    has_others: bool = False
    """Whether it used parameters that are not the model's."""


def with_other_ways(
    model: nn.Module, captures: Mapping[int, Capture], parts: Sequence[MicroBatch], loss: Compared | None
) -> dict[int, Capture]:
    """The captures, restricted by what further forwards of these micro-batches do. The model is as before."""
    some = next(iter(captures.values()))
    if len(some.layers) == 1 and not some.layers[0].parameters:
        return dict(captures)
    found = list(_ways(model, some, parts, loss))
    return {size: _restricted(captured, found) for size, captured in captures.items()}


def _ways(model: nn.Module, captured: Capture, parts: Sequence[MicroBatch], loss: Compared | None) -> Iterator[Way]:
    began = time.process_time()
    with untouched(model, () if loss is None else loss.loss.keeps), parameters_kept(model) as kept:
        for k in range(MOST):
            if k >= LEAST and time.process_time() - began > LONGEST_S:
                return
            part = parts[k % len(parts)]
            args, kwargs = map_tensors((part.args, part.kwargs), copied)
            before = kept.names()
            look = _Look(model, captured)
            try:
                with fate(model, FATES[k % len(FATES)]), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
                    with watching(look), _Uses(look, model):
                        output = model(*args, **kwargs)
                    if loss is not None:
                        loss(output)
            except Exception:  # a further forward is not asked for: some models have no more to give
                return
            look.way.written = kept.names() - before if k else set()
            yield look.way


class _Look(Watcher):
    def __init__(self, model: nn.Module, captured: Capture) -> None:
        modules = dict(model.named_modules())
        paths = dict.fromkeys(layer.module for layer in captured.layers if layer.id != ROOT)
        super().__init__({modules[path]: path for path in paths})
        self.way = Way()

    def on_call(
        self, path: str, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.way.calls.append(self.enter(path))
        with unwatched():
            return run(*args, **kwargs)

    def on_function(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def on_transform(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(*args, **kwargs)

    def on_hidden_call(self, module: nn.Module) -> None:
        pass

    def on_hidden_apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pass

    def on_checkpoint(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(*args, **kwargs)

    def on_region(self, what: str) -> None:
        pass


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which parameters operators are given, also through `.data` and the like."""

    def __init__(self, look: _Look, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.look = look
        self.names = {_place(parameter): name for name, parameter in model.named_parameters()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        way = self.look.way
        for tensor in tensors_in((args, kwargs or {})):
            name = self.names.get(_place(tensor))
            if name is not None:
                way.uses.add((name, way.calls[-1] if way.calls else ""))
            elif isinstance(tensor, nn.Parameter):
                way.has_others = True
        return func(*args, **(kwargs or {}))


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The same for tensors that are the same values in memory."""
    if tensor.is_nested:  # a strided one has no shape, and what is raised while it is made ends the process
        return (storage_of(tensor),)
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    return storage_of(tensor), tuple(tensor.shape), strides


def _restricted(captured: Capture, ways: Sequence[Way]) -> Capture:
    ids = [layer.id for layer in captured.layers]
    place = {layer_id: k for k, layer_id in enumerate(ids)}
    last_of = {layer.module: k for k, layer in enumerate(captured.layers)}
    no_cut = dict(captured.no_cut)
    zones = {one.names[0]: {place[layer] for layer in one.layers} for one in captured.parameters}
    written = {one.names[0] for one in captured.parameters if one.written}

    def forbid(first: int, last: int, reason: str) -> None:
        for k in range(first + 1, last + 1):
            no_cut.setdefault(ids[k], reason)

    def zone(call: str) -> int:
        return place.get(call, last_of.get(call.partition("#")[0], 0))

    if any(way.has_others for way in ways[1:]) and not ways[0].has_others:
        forbid(0, len(ids) - 1, "some forwards use weights that the model had not before, as of a copy that they make")
    for way in ways:
        furthest = 0
        for call in way.calls:
            here = zone(call)
            if here < furthest:
                reason = f"some forwards call {call} after {ids[furthest]}, which the captured one did not"
                forbid(here, furthest, reason)
            furthest = max(furthest, here)
        reached = 0
        starts = {"": 0}
        for call in way.calls:
            reached = max(reached, zone(call))
            starts[call] = reached
        for name, call in way.uses:
            zones.setdefault(name, set()).add(starts[call])
        for name in way.written - written:
            reason = f"some forwards change the parameter {name!r}, which is used on both sides"
            mine = zones.get(name) or {0}
            forbid(min(mine), max(mine), reason)
    late = {name for way in ways for name in way.written}
    return dataclasses.replace(
        captured,
        no_cut={layer_id: no_cut[layer_id] for layer_id in ids if layer_id in no_cut},
        parameters=tuple(_with(one, zones[one.names[0]], late, ids) for one in captured.parameters),
    )


def _with(one: Parameter, zones: set[int], late: set[str], ids: Sequence[str]) -> Parameter:
    written = one.written or ("every" if one.names[0] in late else "")
    return one.model_copy(update={"layers": tuple(ids[k] for k in sorted(zones)), "written": written})
