"""What each layer that is to be measured receives, and the state of model and chance in which it received that."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from partitioner.capture import FATES, Capture, CapturedLayer, copied, fate
from partitioner.errors import UnsupportedModelError
from partitioner.losses import Compared, Loss
from partitioner.microbatches import MicroBatch
from partitioner.parts import Payload
from partitioner.restore import ModelState, random_states
from partitioner.structures import map_tensors
from partitioner.surveying import alone, inseparable, survey

MAX_SURVEYS = 12
"""Forwards to look for what every layer receives, where layers are left out at random."""


class Chance(NamedTuple):
    """What decides whether a forward leaves layers out: Python's and NumPy's random states, and `capture.fate`."""

    states: tuple[Any, ...]
    fate: float | None


@dataclass
class Probe:
    """Layers that no cut may part, mostly one, to be measured at one size, for themselves and for all of their key."""

    layers: tuple[CapturedLayer, ...]
    key: str
    count: int
    samples: int
    part: MicroBatch
    received: dict[int, Payload]
    stage_of: dict[str, int]
    captured: Capture
    loss: Loss | None
    chance: Chance
    """Of the forward in which `received` was found."""
    give_back: Callable[[], None]
    """Makes the model what it is to be before each run."""
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    own_saved_bytes: int = 0
    """Saved for backward, without what the layer received and what was made before it."""
    saved_inputs: frozenset[str] = frozenset()
    saved_around: dict[tuple[str, ...], int] = field(default_factory=dict)
    """Saved of what every rank makes itself, such as masks: all names of each, and its bytes."""
    saved_made: frozenset[str] = frozenset()
    """Names of what the layer itself made that are among its own saved bytes."""

    @property
    def name(self) -> str:
        """As traces have it: the layer, or the first and the last of those together, and how many are alike."""
        ids = self.layers[0].id if len(self.layers) == 1 else f"{self.layers[0].id} … {self.layers[-1].id}"
        return f"{ids} ({self.samples} samples{f', one of {self.count} alike' if self.count > 1 else ''})"

    @property
    def is_tight(self) -> bool:
        return all(_interval(times) < 0.02 for times in (self.forward_s, self.backward_s))


def _interval(times: list[float]) -> float:
    """Half of the 95 % interval of the median, relative to it (McGill, Tukey & Larsen 1978)."""
    middle = statistics.median(times)
    if middle < 1e-6:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4)
    return float(1.57 * (third - first) / len(times) ** 0.5 / middle)


def make_probes(
    model: nn.Module, captured: Capture, part: MicroBatch, device: torch.device, loss: Loss, on_meta: bool
) -> list[Probe]:
    """One probe for each structural key; the last layers have their own, since the loss comes after them."""
    groups = inseparable(captured)
    keys = keys_of(groups)
    counts = Counter(keys)
    first = {key: groups[k] for k, key in reversed(list(enumerate(keys)))}
    args, kwargs = (part.args, part.kwargs) if not on_meta else map_tensors((part.args, part.kwargs), to_meta)
    wanted = [[layer.id for layer in group] for group in first.values()]
    compared = None if on_meta or loss.function is None else loss.against(part.target)
    payloads, chances, give_back = _surveyed(model, captured, wanted, args, kwargs, compared)
    here = map_tensors(part, lambda tensor: real(tensor, device))
    found = []
    for key, group in first.items():
        payload = payloads[group[0].id]
        tensors = [real(tensor, device) for tensor in payload.tensors]
        received = {} if group is groups[0] else {0: Payload(payload.header, tensors)}
        last = group is groups[-1]
        found.append(
            Probe(
                layers=group,
                key=key,
                count=counts[key],
                samples=part.samples,
                part=here,
                received=received,
                stage_of=alone(captured, group[0].id, group[-1].id),
                captured=captured,
                loss=loss if last else None,
                chance=chances[group[0].id],
                give_back=give_back,
            )
        )
    return found


def keys_of(groups: Sequence[tuple[CapturedLayer, ...]]) -> list[str]:
    keys = [" ".join(layer.key for layer in group) for group in groups]
    return [*keys[:-1], f"{keys[-1]} and loss"]


def _surveyed(
    model: nn.Module,
    captured: Capture,
    groups: Sequence[Sequence[str]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Compared | None,
) -> tuple[dict[str, Payload], dict[str, Chance], Callable[[], None]]:
    """What each of `groups` receives, by its first layer, and how; and what gives back the model and its loss.

    Buffers of torch's own modules, the averages of BatchNorm, stay as they are: no layer's work depends on them.
    Where a first forward builds something to keep, the second is taken; where layers are left out at random, more.
    """
    found: dict[str, Payload] = {}
    chances: dict[str, Chance] = {}
    state: ModelState | None = None
    aside = {
        id(one)
        for module in model.modules()
        if type(module).__module__.startswith("torch.")
        for one in module.buffers()
    }
    values: list[Callable[[], None]] = []

    def give_back() -> None:
        if state is not None:
            state.restore()
        for undo in values:
            undo()

    for attempt in range(MAX_SURVEYS):
        fated = FATES[(attempt + 1) % len(FATES)]  # left to chance last: then a layer runs, and those after it may not
        before = ModelState(model, () if loss is None else loss.loss.keeps)
        chance = Chance(random_states(), fated)
        with fate(model, chance.fate):
            seen = survey(model, captured, groups, *map_tensors((args, kwargs), copied))
        changes = before.has_changed()
        if loss is not None:
            loss(seen.output)
        stays = before.has_changed()
        if changes or stays:
            if attempt == 0 and stays:
                continue
            state = state or before
        elif state is None and not values:
            values += before.undo_values(aside)
        give_back()
        found |= seen.payloads
        chances |= dict.fromkeys(seen.payloads, chance)
        if found.keys() >= {names[0] for names in groups}:
            return found, chances, give_back
    missing = next(names[0] for names in groups if names[0] not in found)
    raise UnsupportedModelError(
        f"layer {missing} ran when the model was captured, and in none of {MAX_SURVEYS} forwards later: the model must "
        f"be measured in a mode in which it runs all of its layers"
    )


def real(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not tensor.is_meta:
        return tensor.to(device)
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


def to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")
