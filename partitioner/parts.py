"""What a rank knows of its stage before any data comes: its layers, its routes, and whose parameters are elsewhere."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from partitioner.capture import Capture
from partitioner.errors import UnsupportedModelError
from partitioner.gradient_hooks import hooked, hooks_on, refusal
from partitioner.joining import base_name, joined, single, with_uncalled
from partitioner.logbook import Entry
from partitioner.profiles import Profile
from partitioner.recording import ROOT
from partitioner.shared import SharedState, Told
from partitioner.tracing import WatchedCall, held, unwatched, unwrap, watcher_here


@dataclass
class Payload:
    """What one stage sends another for one micro-batch: `header` is the same as long as shapes and path are."""

    header: bytes
    tensors: list[torch.Tensor]
    is_given_away: bool = False
    """Whether the forward that receives it may write into the tensors' memory, as nobody else looks at it."""


class Flags(NamedTuple):
    """What a stage tells the next one besides its log; see `Walk`."""

    strayed: bool
    next_call: str | None
    inputs_written: bool
    told: Told = ()


class Part:
    """What a rank knows of its stage: `sources` and `targets` are the stages it receives from and sends to."""

    def __init__(
        self,
        model: nn.Module,
        profile: Profile | Capture,
        stage_of: Mapping[str, int],
        stage: int,
        *,
        join: bool = True,
        device: torch.device | None = None,
        guarded: bool = True,
        loss: Any = None,
    ) -> None:
        """`guarded`: whether Python state that stages share is looked after; not where one stage is run alone.

        `loss`: the user's loss function, which runs after the last stage and may read what layers leave.
        """
        self.model, self.stage, self.device = unwrap(model), stage, device
        self.num_stages = max(stage_of.values()) + 1
        self.stage_of, tracked = (joined if join else single)(profile, with_uncalled(profile, stage_of))
        self.last_layer = [layer.id for layer in profile.layers if stage_of.get(layer.id) == stage][-1]
        modules = dict(self.model.named_modules())
        missing = [path for path in tracked if path not in modules]
        if missing:
            raise UnsupportedModelError(f"the model has no module {missing[0]!r}, which the plan places")
        self.tracked = {modules[path]: path for path in tracked}
        self.calls = list(map(WatchedCall, self.tracked))
        self.fire_hooks, self.collecting = frozenset(profile.fire_hooks), frozenset(profile.collecting)
        self.passing = profile.passing
        self.glue, self.glue_names = profile.glue, profile.glue_names
        self.captured = frozenset(layer.id for layer in profile.layers)
        inner = {sub for path in self._layer_paths() for sub in modules[path].modules() if sub is not modules[path]}
        repeated = {modules[name.partition("#")[0]] for name in self.stage_of if "#" in name}
        self.counted = (inner | repeated) & self.tracked.keys()
        """Watched modules that may also be called inside of layers, be it by themselves."""
        self.strangers: dict[int, str] = {}
        """Parameters and buffers of other stages."""
        self.later_buffers: set[int] = set()
        """Buffers of later stages alone."""
        ours = dict(self.model.named_parameters(remove_duplicate=False))
        for kept, tensors in (
            (profile.parameters, ours),
            (profile.buffers, dict(self.model.named_buffers(remove_duplicate=False))),
        ):
            for one in kept:
                owners = {stage_of[layer] for layer in one.layers} or {0}
                if stage not in owners and one.names[0] in tensors:
                    self.strangers[id(tensors[one.names[0]])] = one.names[0]
                    if kept is profile.buffers and stage < min(owners):
                        self.later_buffers.add(id(tensors[one.names[0]]))
        self._tied = [
            (one.names[0], ours[one.names[0]], sorted({stage_of[layer] for layer in one.layers}))
            for one in profile.parameters
            if one.trainable and stage in (used := {stage_of[layer] for layer in one.layers}) and len(used) > 1
        ]
        self._hooks: list[tuple[int, ...]] = [()] * len(self._tied)
        self.refuse_hooks()
        self.used_elsewhere = {
            base_name(tensor.id)
            for tensor in profile.tensors
            if stage_of[tensor.producer] < stage and any(stage_of[layer] != stage for layer in tensor.consumers)
        }
        """Tensors of earlier stages whose gradient is not made by this stage alone."""
        self.routes: dict[int, list[str]] = {}
        sources = {stage - 1} if stage else set()
        for tensor in profile.tensors:
            made = stage_of[tensor.producer]
            used = {stage_of[layer] for layer in tensor.consumers}
            if profile.dynamic:  # a stage in between may come to run what a later one ran
                used |= set(range(made + 1, max(used) + 1))
            if made == stage:
                for target in sorted(used - {stage}):
                    route = self.routes.setdefault(target, [])
                    if base_name(tensor.id) not in route:
                        route.append(base_name(tensor.id))
            elif made < stage and stage in used:
                sources.add(made)
        if stage + 1 < self.num_stages:
            self.routes.setdefault(stage + 1, [])
        self.sources = tuple(sorted(sources))
        self.targets = tuple(sorted(self.routes))
        self.wanted = frozenset(name for route in self.routes.values() for name in route)
        self.buffers = {id(buffer) for buffer in self.model.buffers()}
        self.own: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        self.own.update(self.model.named_buffers())
        self.own_names = {id(tensor): name for name, tensor in self.own.items()}
        self.buffer_places = [
            (module._buffers, name, buffer)
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.shared: SharedState | None = None
        leaves_tensors = any(tensor.id[0] == "=" for tensor in profile.tensors)
        if self.num_stages > 1 and (guarded or leaves_tensors):
            ids = [layer.id for layer in profile.layers]
            known = profile.attributes, profile.buffers
            self.shared = SharedState(
                self.model,
                ids,
                *known,
                stage_of,
                stage,
                device,
                guarded=guarded,
                loss=loss,
                passing=[vars(call.module) for call in self.calls],
                again=tracked - {name.partition("#")[0] for name in self.stage_of},
            )
        self._headers: dict[int, tuple[bytes, Any]] = {}

    def refuse_hooks(self) -> None:
        """An UnsupportedModelError where hooks see a part of the gradient of a parameter that other stages have too."""
        now = [hooks_on(parameter) for _, parameter, _ in self._tied]
        if now == self._hooks:
            return
        self._hooks = now
        with nullcontext() if watcher_here() is None else unwatched():  # a trial is none of its calls
            found = hooked(self.model, [(name, parameter) for name, parameter, _ in self._tied])
        for name, hook in found.items():
            stages = next(stages for other, _, stages in self._tied if other == name)
            raise UnsupportedModelError(
                f"{refusal(name, hook, f'on stages {stages}')}. Pin the layers that use it to one stage (pin={{layer: "
                f"stage}}), change the gradient after train_step and before the optimizer's, or use replicas only "
                f"(mesh={{'dp': n}})"
            )

    def look_again(self) -> None:
        """Forward hooks have come or gone, on all ranks alike."""
        if self.shared is not None:
            self.shared.look_again()

    def held(self) -> AbstractContextManager[None]:
        """For several forwards: inside, what each of them would put in its place and take away again stays there."""
        return held(self.calls, self.placing)

    def placing(self) -> AbstractContextManager[None]:
        """The block puts the watched calls on their modules, or takes them away: that is no change of state."""
        return nullcontext() if self.shared is None else self.shared.passing_over()

    def opened_header(self, source: int, header: bytes) -> Any:
        """What a header says; the last one of each source is remembered."""
        known = self._headers.get(source)
        if known is None or known[0] != header:
            names, entries, flags = pickle.loads(header)
            log = None if entries is None else [Entry(*entry) for entry in entries]
            known = self._headers[source] = (header, (names, log, Flags(*flags)))
        return known[1]

    def _layer_paths(self) -> set[str]:
        return {name.partition("#")[0] for name in self.stage_of if name != ROOT}
