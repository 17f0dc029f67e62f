"""From what was measured of a few layers to the costs of all: those alike, those that no cut may part, shared bytes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from partitioner.capture import Capture, CapturedLayer, CapturedTensor
from partitioner.joining import base_name
from partitioner.probes import Probe, keys_of
from partitioner.profiles import Layer, LayerCost
from partitioner.surveying import inseparable


def layers_of(captures: dict[int, Capture], probes: dict[int, list[Probe]]) -> tuple[Layer, ...]:
    """Every layer with the costs of its key at each size."""
    costs: dict[str, list[LayerCost]] = {}
    for size, captured in captures.items():
        by_key = {probe.key: probe for probe in probes[size]}
        groups = inseparable(captured)
        counted: set[int | str] = set()  # memory of tensors between layers; names of what every rank makes
        routes = _routes(captured, groups)
        for group, key in zip(groups, keys_of(groups), strict=True):
            probe = by_key[key]
            mine, measured = routes[group[0].id], routes[probe.layers[0].id]
            saved = probe.own_saved_bytes
            counted |= probe.saved_made
            for tensor, like in zip(mine.made, measured.made, strict=False):
                if base_name(like.id) in probe.saved_made:
                    counted.add(tensor.memory)
            for tensor, like in zip(mine.used, measured.used, strict=False):
                if base_name(like.id) in probe.saved_inputs and tensor.memory not in counted:
                    counted.add(tensor.memory)
                    saved += tensor.memory_nbytes
            for names, nbytes in probe.saved_around.items():
                saved += 0 if counted.intersection(names) else nbytes
                counted.update(names)
            forward_s, backward_s = statistics.median_low(probe.forward_s), statistics.median_low(probe.backward_s)
            for layer, share in zip(group, _shares(group), strict=True):
                cost = LayerCost(
                    samples=size,
                    forward_s=forward_s * share,
                    backward_s=backward_s * share,
                    forward_spread_s=_half_quartiles(probe.forward_s) * share,
                    backward_spread_s=_half_quartiles(probe.backward_s) * share,
                    saved_bytes=saved if layer is group[-1] else 0,
                    flops=layer.flops,
                )
                costs.setdefault(layer.id, []).append(cost)
    return next(reversed(captures.values())).priced(costs)


def _shares(group: Sequence[CapturedLayer]) -> list[float]:
    """What part of the time measured for all is each layer's: by their FLOPs, equal parts where they have none."""
    total = sum(layer.flops for layer in group)
    return [layer.flops / total if total else 1 / len(group) for layer in group]


@dataclass
class _Routes:
    """The tensors that layers make for others, and those that they use, each in a fixed order."""

    made: list[CapturedTensor] = field(default_factory=list)
    used: list[CapturedTensor] = field(default_factory=list)


def _routes(captured: Capture, groups: Sequence[Sequence[CapturedLayer]]) -> dict[str, _Routes]:
    """By the first layer of each group."""
    first = {layer.id: group[0].id for group in groups for layer in group}
    routes = {group[0].id: _Routes() for group in groups}
    for tensor in captured.tensors:
        routes[first[tensor.producer]].made.append(tensor)
        for user in dict.fromkeys(first[layer] for layer in tensor.consumers):
            if user != first[tensor.producer]:
                routes[user].used.append(tensor)
    return routes


def _half_quartiles(times: list[float]) -> float:
    first, _, third = statistics.quantiles(times, n=4)
    return float(third - first) / 2
