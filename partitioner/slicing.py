"""Run one stage of a model by running the model's own forward, with stand-ins for what other stages compute.

    earlier layers      return stand-ins: shape and dtype only, as the earlier stage logged them
    glue before stage   runs where its inputs are real (masks, positions); on stand-ins it follows the log
    own first layer     the stand-ins that were received become real tensors, in place: every reference resolves
    own layers, glue    run as they are
    next stage's layer  ends the forward; what later stages still need is collected

The log says, for every call and torch function of the earlier stages, what came out. A forward that goes another way
than the log says is an error on the spot, never another number.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import swap_tensors

from partitioner.capture import ROOT, Capture
from partitioner.errors import UnsupportedModelError
from partitioner.profiles import Profile
from partitioner.tracing import (
    HOST_READS,
    RANDOM,
    Watcher,
    map_tensors,
    opaques_in,
    tensors_in,
    unwatched,
    watching,
)


@dataclass
class Payload:
    """What one stage sends another for one micro-batch: `header` is the same as long as shapes and path are."""

    header: bytes
    tensors: list[torch.Tensor]


@dataclass
class SliceRun:
    """One forward of one stage.

    `sends`: by target stage; its tensors still carry their graph.
    `leaves`: by source stage, beside the tensors received; None where no gradient is wanted.
    `output`: the model's own, on the last stage.
    """

    output: Any = None
    sends: dict[int, Payload] = field(default_factory=dict)
    leaves: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)


class _Leaf:
    """A place in a logged structure; not a container, so that structures are walked around it."""

    __slots__ = ()


class _Made(_Leaf):
    """A tensor that came into being there."""

    __slots__ = ("device", "dtype", "requires_grad", "shape", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.stride = tuple(tensor.stride()) if tensor.layout == torch.strided else None
        self.dtype, self.device, self.requires_grad = tensor.dtype, tensor.device.type, tensor.requires_grad


class _Argument(_Leaf):
    """The very object that was the k-th tensor (or the k-th opaque object) of the arguments."""

    __slots__ = ("index", "opaque")

    def __init__(self, index: int, opaque: bool) -> None:
        self.index, self.opaque = index, opaque


class _Withheld(_Leaf):
    """An object of an earlier stage with tensors inside that cannot be sent, such as a key-value cache."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind


class _Absent:
    """Stands where such an object was: may be handed on, may not be looked into."""

    def __init__(self, kind: str) -> None:
        vars(self)["kind"] = kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModelError(
            f"the forward reads .{name} of a {self.kind} that an earlier stage made; only tensors in tuples, lists, "
            f"dicts and dataclasses travel between stages. Pin the layers around it to one stage"
        )


class _Entry(NamedTuple):
    """What one call or torch function did: its name, its result as a structure, the arguments it changed in place."""

    name: str
    result: Any
    writes: tuple[int, ...]


@dataclass
class _Log:
    """What the stages so far did, by the name of the moment."""

    calls: dict[str, _Entry] = field(default_factory=dict)
    functions: dict[str, _Entry] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)


class _StandIn(torch.Tensor):
    """Looks like a tensor of another stage and holds nothing; computing with it is an error that names it."""

    label: str

    @staticmethod
    def __new__(cls, made: _Made, label: str, device: torch.device | None) -> _StandIn:
        stand_in: _StandIn = torch.Tensor._make_wrapper_subclass(
            cls,
            made.shape,
            strides=made.stride,
            dtype=made.dtype,
            device=device or torch.device(made.device),
            requires_grad=made.requires_grad,
        )
        stand_in.label = label
        return stand_in

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        labels = [tensor.label for tensor in tensors_in((args, kwargs)) if isinstance(tensor, _StandIn)]
        raise UnsupportedModelError(
            f"{func} needs the tensor {labels[0]!r}, which an earlier stage makes and did not send: the forward reads "
            f"it where the captured one did not. Pin the layers around it to one stage (pin={{layer: stage}})"
        )


class _Reached(BaseException):
    """The forward has come to the next stage's first layer."""


class Slice:
    """Stage `stage` of `model`, cut as `stage_of` says (layer id -> stage).

    `sources` and `targets` are the stages it receives from and sends to, every micro-batch. Parameters of other
    stages are never read.
    """

    def __init__(
        self,
        model: nn.Module,
        profile: Profile | Capture,
        stage_of: Mapping[str, int],
        stage: int,
        *,
        join: bool = True,
        device: torch.device | None = None,
    ) -> None:
        self.model, self.stage, self.device = model, stage, device
        self.num_stages = max(stage_of.values()) + 1
        self.stage_of, tracked = (_joined if join else _single)(profile, stage_of)
        names = {name: module for name, module in model.named_modules()}
        missing = [path for path in tracked if path not in names]
        if missing:
            raise UnsupportedModelError(f"the model has no module {missing[0]!r}, which the plan places")
        self.tracked = {id(names[path]): path for path in tracked}
        self.routes: dict[int, list[str]] = {}
        sources = {stage - 1} if stage else set()
        for tensor in profile.tensors:
            made = stage_of[tensor.producer]
            used = {stage_of[layer] for layer in tensor.consumers}
            if made == stage:
                for target in sorted(used - {stage}):
                    route = self.routes.setdefault(target, [])
                    if _base(tensor.id) not in route:
                        route.append(_base(tensor.id))
            elif made < stage and stage in used:
                sources.add(made)
        if stage + 1 < self.num_stages:
            self.routes.setdefault(stage + 1, [])
        self.sources = tuple(sorted(sources))
        self.targets = tuple(sorted(self.routes))
        self.wanted = frozenset(name for route in self.routes.values() for name in route)
        self.buffers = {id(buffer) for buffer in model.buffers()}

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        received: Mapping[int, Payload] | None = None,
        *,
        on_begin: Callable[[dict[str, torch.Tensor]], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> SliceRun:
        """Forward of one micro-batch, under the caller's grad mode and random state.

        `received`: what each of `sources` sent. `on_begin` is called when the stage's own part starts, with the
        tensors that were put in by name; `on_end` when its last layer and the glue behind it have run.
        """
        walk = _Walk(self, received or {}, on_begin)
        if self.stage:
            args, kwargs = map_tensors((args, dict(kwargs)), _alias)
        with torch._C.DisableTorchFunction():
            for k, tensor in enumerate(tensors_in((args, kwargs))):
                walk.named.setdefault(f"input:{k}", tensor)
        try:
            with watching(walk):
                output = self.model(*args, **kwargs)
                walk.begin()
        except _Reached:
            output = None
        if on_end is not None:
            on_end()
        if self.stage + 1 == self.num_stages:
            return SliceRun(output=output, leaves=walk.leaves)
        return SliceRun(sends=walk.collect(), leaves=walk.leaves)


class _Walk(Watcher):
    """One forward: what to do at each call and function depends on whether the stage's own part has begun."""

    def __init__(
        self, part: Slice, received: Mapping[int, Payload], on_begin: Callable[[dict[str, torch.Tensor]], None] | None
    ) -> None:
        super().__init__(part.tracked)
        self.part, self.received, self.on_begin = part, received, on_begin
        self.local = part.stage == 0
        self.last = part.stage + 1 == part.num_stages
        self.named: dict[str, torch.Tensor] = {}
        self.leaves: dict[int, list[torch.Tensor | None]] = {}
        self.log = _Log()
        self.names: dict[int, tuple[tuple[str | None, bool], ...]] = {}
        for source, payload in received.items():
            self.names[source], log = pickle.loads(payload.header)
            if log is not None:
                self.log = log
        if self.local and on_begin is not None:
            on_begin({})

    # -- what happens

    def on_read(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def on_function(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        moment = self.next_name()
        if not self.local:
            return self.before(moment, name, func, args, kwargs)
        if self.last:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        versions = [_version(tensor) for tensor in given]
        result = func(*args, **kwargs)
        if name in HOST_READS:
            self.log.host[moment] = result
        else:
            self.log.functions[moment] = _entry(name, result, given, versions, ())
            self.name(moment, result)
        return result

    def before(
        self, moment: str, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Glue ahead of the stage's own part: run it on real tensors, follow the log on stand-ins."""
        given = tensors_in((args, kwargs))
        entry = self.log.functions.get(moment)
        if entry is not None and entry.name != name:
            raise self.other_way(f"calls {name}", f"called {entry.name}")
        if name not in RANDOM and not any(self.foreign(tensor) for tensor in given):
            result = func(*args, **kwargs)
            if name not in HOST_READS:
                self.name(moment, result, keep=True)
            return result
        if name in HOST_READS:
            if moment not in self.log.host:
                raise self.other_way(f"reads values with {name}", "did not")
            return self.log.host[moment]
        if entry is None:
            raise self.other_way(f"calls {name}", "called nothing more")
        return self.replay(moment, moment, entry, args, kwargs)

    def foreign(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values are another stage's affair: stand-ins, parameters, buffers."""
        return isinstance(tensor, (_StandIn, nn.Parameter)) or tensor.requires_grad or id(tensor) in self.part.buffers

    def on_checkpoint(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        moment = self.next_name()
        result = run(*args, **kwargs) if self.local else args[0](*args[2:])
        self.name(moment, result, keep=not self.local)
        return result

    def on_call(self, path: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call_id = self.enter(path) if path else ROOT
        if path in self.part.stage_of or call_id in self.part.stage_of:
            return self.layer(call_id, run, args, kwargs)
        self.at(f">{call_id}")
        result = run(*args, **kwargs)
        self.at(call_id)
        with torch._C.DisableTorchFunction():
            self.name_outputs(call_id, result)
        return result

    def layer(self, call_id: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage = self.part.stage_of.get(call_id, self.part.stage)
        if not self.local:
            entry = self.log.calls.get(call_id)
            if entry is not None:
                with torch._C.DisableTorchFunction():
                    result = self.replay(f"{call_id}:0", call_id, entry, args, kwargs)
                self.at(call_id)
                return result
            if stage < self.part.stage:
                raise self.other_way(f"calls {call_id}", "did not")
            self.begin()
        if stage > self.part.stage:
            raise _Reached
        if stage < self.part.stage:
            raise self.other_way(f"calls {call_id} after a layer of stage {self.part.stage}", "placed it before")
        with unwatched():
            if self.last:
                result = run(*args, **kwargs)
            else:
                given, opaque = tensors_in((args, kwargs)), opaques_in((args, kwargs))
                versions = [_version(tensor) for tensor in given]
                result = run(*args, **kwargs)
                self.log.calls[call_id] = _entry(call_id, result, given, versions, opaque)
                self.name_outputs(call_id, result)
        self.at(call_id)
        return result

    def other_way(self, here: str, there: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"stage {self.part.stage} {here} after {self.moment or 'the start'}, where the earlier stage {there}: "
            f"the forward takes another way on this rank. Start all ranks with the same PYTHONHASHSEED, and let the "
            f"forward depend only on its inputs and torch's random numbers"
        )

    # -- names

    def name(self, moment: str, result: Any, keep: bool = False) -> None:
        for k, tensor in enumerate(tensors_in(result)):
            name = moment if k == 0 else f"{moment}:{k}"
            if keep or name in self.part.wanted:
                self.named[name] = tensor

    def name_outputs(self, call_id: str, result: Any) -> None:
        for k, tensor in enumerate(tensors_in(result)):
            if not self.local or f"{call_id}:{k}" in self.part.wanted:
                self.named[f"{call_id}:{k}"] = tensor

    # -- stand-ins

    def replay(self, first: str, moment: str, entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result as it was logged, with stand-ins for its tensors; `first` is what its first tensor is called."""
        given = tensors_in((args, kwargs))
        opaque: list[Any] | None = None
        for index in entry.writes:
            target = given[index]
            if isinstance(target, _StandIn):
                continue
            if target._base is not None:
                raise UnsupportedModelError(
                    f"at {moment} an earlier stage writes through a view of a tensor that this stage made itself; "
                    f"pin the layers around {moment} to one stage"
                )
            swap_tensors(target, _StandIn(_Made(target), moment, self.part.device))
        count = 0

        def restore(leaf: Any) -> Any:
            nonlocal count, opaque
            if isinstance(leaf, _Argument) and leaf.opaque:
                opaque = opaques_in((args, kwargs)) if opaque is None else opaque
                return opaque[leaf.index]
            if isinstance(leaf, _Withheld):
                return _Absent(leaf.kind)
            if not isinstance(leaf, (_Argument, _Made)):
                return leaf
            name = first if count == 0 else f"{moment}:{count}"
            count += 1
            tensor = given[leaf.index] if isinstance(leaf, _Argument) else _StandIn(leaf, name, self.part.device)
            self.named[name] = tensor
            return tensor

        return map_tensors(entry.result, lambda tensor: tensor, restore)

    def begin(self) -> None:
        """The stage's own part starts: put in what was received, wherever the stand-ins have got to."""
        if self.local:
            return
        self.local = True
        with torch._C.DisableTorchFunction():
            filled: dict[str, torch.Tensor] = {}
            for source, names in self.names.items():
                tensors = iter(self.received[source].tensors)
                leaves: list[torch.Tensor | None] = []
                for name, requires_grad in names:
                    if name is None:
                        continue
                    value, leaf = next(tensors).detach(), None  # another object: the payload's own stays what it is
                    if requires_grad and torch.is_grad_enabled():
                        leaf = value.requires_grad_()
                        value = leaf.clone()
                    leaves.append(leaf)
                    target = self.named.get(name)
                    if target is not None and not any(target is other for other in filled.values()):
                        filled[name] = target
                        swap_tensors(target, value)
                self.leaves[source] = leaves
            self.named = {name: tensor for name, tensor in self.named.items() if name in self.part.wanted}
        if self.on_begin is not None:
            self.on_begin(filled)

    def collect(self) -> dict[int, Payload]:
        """What each later stage needs from this one; the next one gets the log too."""
        sends = {}
        for target, route in self.part.routes.items():
            names: list[tuple[str | None, bool]] = []
            tensors = []
            for name in route:
                tensor = self.named.get(name)
                if tensor is None or isinstance(tensor, _StandIn):
                    names.append((None, False))
                else:
                    names.append((name, tensor.requires_grad))
                    tensors.append(tensor)
            log = self.log if target == self.part.stage + 1 else None
            header = _pickled((tuple(names), log))
            if header is None:
                raise UnsupportedModelError(
                    f"what stage {self.part.stage} did cannot be described to the next one: a value that the model "
                    f"read from a tensor, or a layer's result, cannot be pickled"
                )
            sends[target] = Payload(header, tensors)
        return sends


@dataclass
class Survey:
    """What one forward of the whole model shows of some cuts: the payload that would cross each, by layer id."""

    payloads: dict[str, Payload]
    output: Any


def survey(
    model: nn.Module, captured: Capture, layers: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Survey:
    """Run the whole forward once, without gradients, and keep what each of `layers` would receive.

    For a `Slice` of one such layer, cut out with `alone`. Tensors are copies.
    """
    part = Slice(model, captured, {layer.id: 0 for layer in captured.layers}, 0, join=False)
    needs = {name: [t.id for t in captured.tensors if name in t.consumers] for name in layers}
    part.wanted = frozenset(_base(name) for route in needs.values() for name in route)
    walk = _Surveyor(part, needs, {tensor.id: tensor.needs_gradient for tensor in captured.tensors})
    with torch.no_grad(), watching(walk):
        output = model(*args, **kwargs)
    return Survey(walk.payloads, output)


def alone(captured: Capture, layer: str) -> dict[str, int]:
    """The split that makes one layer a stage of its own: stage 1, or stage 0 for the first layer."""
    ids = [one.id for one in captured.layers]
    place = ids.index(layer)
    first = 0 if place == 0 else 1
    return {name: (0 if k < place else first if k == place else first + 1) for k, name in enumerate(ids)}


class _Surveyor(_Walk):
    def __init__(self, part: Slice, needs: dict[str, list[str]], needs_gradient: dict[str, bool]) -> None:
        super().__init__(part, {}, None)
        self.last = False
        self.needs, self.needs_gradient = needs, needs_gradient
        self.payloads: dict[str, Payload] = {}

    def layer(self, call_id: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call_id in self.needs:
            with torch._C.DisableTorchFunction():
                names = {_base(name): self.needs_gradient[name] for name in self.needs[call_id]}
                tensors = [self.named[name].detach().clone() for name in names]
            header = _pickled((tuple(names.items()), self.log))
            if header is not None:
                self.payloads[call_id] = Payload(header, tensors)
        return super().layer(call_id, run, args, kwargs)


def chain(
    slices: Sequence[Slice],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    before_each: Callable[[], None] = lambda: None,
) -> tuple[list[SliceRun], Callable[[torch.Tensor], None]]:
    """All stages one after another in this process, and the backward through them for a loss of the last output."""
    runs: list[SliceRun] = []
    for part in slices:
        received = {source: _sent(runs[source].sends[part.stage]) for source in part.sources}
        before_each()
        runs.append(part.run(args, kwargs, received))

    def backward(loss: torch.Tensor) -> None:
        if loss.requires_grad:  # not where nothing at all is trained
            loss.backward()  # type: ignore[no-untyped-call]
        for stage in range(len(runs) - 2, -1, -1):
            backward_through(runs[stage], {t: gradients_of(runs[t], stage) for t in runs[stage].sends})

    return runs, backward


def _sent(payload: Payload) -> Payload:
    return Payload(payload.header, [tensor.detach().clone() for tensor in payload.tensors])


def gradients_of(run: SliceRun, source: int) -> list[torch.Tensor | None]:
    """After a backward of `run`: the gradients that its source stage is waiting for, beside the tensors it sent."""
    return [None if leaf is None else leaf.grad for leaf in run.leaves[source]]


def backward_through(run: SliceRun, gradients: Mapping[int, Sequence[torch.Tensor | None]]) -> None:
    """Backward of a stage that is not the last, from the gradients that came back, by target stage."""
    tensors: dict[int, torch.Tensor] = {}
    sums: dict[int, torch.Tensor] = {}
    for target, payload in run.sends.items():
        for tensor, gradient in zip(payload.tensors, gradients[target], strict=True):
            if gradient is None or not tensor.requires_grad:
                continue
            key = id(tensor)
            tensors[key] = tensor
            sums[key] = sums[key] + gradient if key in sums else gradient
    if tensors:
        torch.autograd.backward(list(tensors.values()), list(sums.values()))


def _joined(profile: Profile | Capture, stage_of: Mapping[str, int]) -> tuple[dict[str, int], set[str]]:
    """Layers joined to whole modules where no cut goes through; and every module that has to be watched.

    A module is taken whole if all its layers are on one stage, none of them begins a later stage (then glue inside
    the module runs on the stage before), none is called twice, and no tensor of its inside is used on another stage.
    """
    ids = [layer.id for layer in profile.layers]
    first = {next(name for name in ids if stage_of[name] == stage) for stage in set(stage_of.values())} - {ids[0]}
    below: dict[str, list[str]] = {}
    for name in ids:
        parts = name.split("#")[0].split(".")
        for k in range(1, len(parts)):
            below.setdefault(".".join(parts[:k]), []).append(name)
    repeated = {name.split("#")[0] for name in ids if "#" in name}
    leaking = [
        tensor.id
        for tensor in profile.tensors
        if any(stage_of[layer] != stage_of[tensor.producer] for layer in tensor.consumers)
    ]

    def whole(path: str, names: list[str]) -> bool:
        if len({stage_of[name] for name in names}) > 1 or any(name in first for name in names):
            return False
        if path in profile.keep_open or any(name.split("#")[0] in repeated for name in names):
            return False
        return not any(name.startswith((f"{path}.", f">{path}/", f">{path}.")) for name in leaking)

    joined: dict[str, int] = {}
    for path in sorted(below, key=lambda path: path.count(".")):
        if not any(path.startswith(f"{other}.") for other in joined) and whole(path, below[path]):
            joined[path] = stage_of[below[path][0]]
    alone = {name: stage_of[name] for name in ids if not any(name.startswith(f"{path}.") for path in joined)}
    return _single(profile, joined | alone)


def _single(profile: Profile | Capture, stage_of: Mapping[str, int]) -> tuple[dict[str, int], set[str]]:
    """Layers as they are, and every module that has to be watched: theirs and all around them."""
    tracked = {""}
    for name in stage_of:
        if name != ROOT:
            parts = name.split("#")[0].split(".")
            tracked |= {".".join(parts[:k]) for k in range(1, len(parts) + 1)}
    return dict(stage_of), tracked


def _entry(name: str, result: Any, given: list[torch.Tensor], versions: list[int], opaque: Sequence[Any]) -> _Entry:
    places = {id(tensor): k for k, tensor in reversed(list(enumerate(given)))}
    kept = {id(item): k for k, item in enumerate(opaque)}

    def look(tensor: torch.Tensor) -> _Leaf:
        return _Argument(places[id(tensor)], False) if id(tensor) in places else _Made(tensor)

    def keep(item: Any) -> Any:
        if id(item) in kept:
            return _Argument(kept[id(item)], True)
        return item if _pickled(item) is not None else _Withheld(type(item).__name__)

    writes = tuple(
        k for k, tensor in enumerate(given) if _version(tensor) != versions[k] and not isinstance(tensor, nn.Parameter)
    )
    return _Entry(name, map_tensors(result, look, keep), writes)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another object of the same values, so that the user's own tensor never becomes a stand-in."""
    return tensor if tensor.requires_grad else tensor.detach()


def _base(name: str) -> str:
    """The tensor's own name, without the moment of its last change in place."""
    return name.split("@")[0]


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors keep no version
        return 0


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raise pickle.PicklingError("tensors do not travel in the header")
        return NotImplemented


def _pickled(value: Any) -> bytes | None:
    """`value` as bytes; None where it cannot be, or holds a tensor."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
        return None
    return buffer.getvalue()
