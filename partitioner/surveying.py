"""Find what each layer of a model receives, in one forward of the whole model, so that it can be run alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partitioner.capture import Capture, CapturedLayer, CapturedTensor
from partitioner.joining import base_name
from partitioner.logbook import pickled
from partitioner.parts import Payload
from partitioner.reaching import Change
from partitioner.shared import SharedState
from partitioner.slicing import Slice
from partitioner.tracing import watching
from partitioner.walking import Walk


@dataclass
class Survey:
    """What one forward of the whole model shows of some cuts: the payload that would cross each, by layer id."""

    payloads: dict[str, Payload]
    output: Any


def survey(
    model: nn.Module,
    captured: Capture,
    groups: Sequence[Sequence[str]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Survey:
    """Run the whole forward once, as for training, and keep what each of `groups` would receive, by its first layer.

    A group is consecutive layers that are to be a `Slice`, cut out with `alone`. Tensors are copies.
    """
    part = Slice(model, captured, {layer.id: 0 for layer in captured.layers}, 0, join=False)
    place = {layer.id: k for k, layer in enumerate(captured.layers)}

    def reads(names: Sequence[str], tensor: CapturedTensor) -> bool:
        """Or may read: what it handed on as it was in the captured forward is read by others after it."""
        start, hands_on = place[names[0]], not captured.passing.keys().isdisjoint(names)
        crosses = place[tensor.producer] < start <= place[tensor.consumers[-1]]
        return not set(names).isdisjoint(tensor.consumers) or (hands_on and crosses)

    needs = {
        names[0]: [t.id for t in captured.tensors if t.producer not in names and reads(names, t)] for names in groups
    }
    if any(
        tensor.id[0] == "=" for tensor in captured.tensors
    ):  # each layer is told of what those before it leave behind
        ids = [layer.id for layer in captured.layers]
        known = captured.attributes, captured.buffers
        part.shared = SharedState(model, ids, *known, {name: k for k, name in enumerate(ids)}, 0, None)
    part.wanted = frozenset(base_name(name) for route in needs.values() for name in route)
    walk = _Surveyor(part, captured.layers, needs, {tensor.id: tensor.needs_gradient for tensor in captured.tensors})
    walk.note_inputs((args, dict(kwargs)))
    with torch.enable_grad(), watching(walk):
        output = model(*args, **kwargs)
    return Survey(walk.payloads, output)


def inseparable(captured: Capture) -> list[tuple[CapturedLayer, ...]]:
    """The layers in order, those together that no cut may part."""
    groups: list[list[CapturedLayer]] = []
    for layer in captured.layers:
        if groups and layer.id in captured.no_cut:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return [tuple(group) for group in groups]


def alone(captured: Capture, first: str, last: str | None = None) -> dict[str, int]:
    """The split that makes a layer, or those from `first` to `last`, a stage: stage 1, or 0 at the start."""
    ids = [one.id for one in captured.layers]
    start, stop = ids.index(first), ids.index(last or first)
    stage = 0 if start == 0 else 1
    return {name: (0 if k < start else stage if k <= stop else stage + 1) for k, name in enumerate(ids)}


class _Surveyor(Walk):
    def __init__(
        self,
        part: Slice,
        layers: Sequence[CapturedLayer],
        needs: dict[str, list[str]],
        needs_gradient: dict[str, bool],
    ) -> None:
        super().__init__(part, {}, None)
        self.last = False
        self.needs, self.needs_gradient = needs, needs_gradient
        self.payloads: dict[str, Payload] = {}
        self.places = {layer.id: k for k, layer in enumerate(layers)}
        self.place = 0

    def changes(self, who: str, *, by_layer: bool = False) -> list[Change]:
        """Nothing is refused: here all layers are on one device."""
        return [] if self.part.shared is None else self.part.shared.changes(who, by_layer=by_layer, refusing=False)

    def layer(
        self, call_id: str, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before, self.place = self.place, self.places.get(call_id, self.place)
        if self.place < before:  # another order than when it was captured: other tensors may be read from here on
            self.strayed = True
        if call_id in self.needs:
            with torch._C.DisableTorchFunction():
                names = {base_name(name): self.needs_gradient[name] for name in self.needs[call_id]}
                complete = all(name in self.named for name in names)  # not where a layer was left out at random
                self.compare_names()
                if self.strayed:
                    self.keep_survivors()
                    self.named |= self.survivors
                    names |= {
                        name: tensor.requires_grad for name, tensor in self.survivors.items() if name not in names
                    }
                log = [tuple(entry) for entry in self.own]
                header = pickled((tuple(names.items()), log, (False, call_id, self.inputs_were_written())))
                if complete and header is not None:
                    tensors = [self.named[name].detach().clone() for name in names]
                    self.payloads[call_id] = Payload(header, tensors)
        if self.part.shared is not None and call_id in self.places:
            self.changes("the code before it")
            self.part.shared.move_to(self.places[call_id], [call_id])
        return super().layer(call_id, module, run, args, kwargs)
