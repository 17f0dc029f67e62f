"""Run a model's forward once and write down its layers, the tensors between them, and who uses which parameter.

Every module call is watched at every depth; afterwards the layers are chosen from the tree of calls: whole modules,
opened to their children only where one alone would be too large a share of the work. What a tensor is called does not
depend on that choice (see `tracing`), so a plan made at a fine grain runs at a coarse one.

    layer k   = the k-th chosen call and the glue code after it, up to the next chosen call
    cut k     = just before the call of layer k
"""

from __future__ import annotations

import hashlib
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from partitioner.errors import UnsupportedModelError
from partitioner.profiles import Parameter
from partitioner.restore import untouched
from partitioner.tracing import (
    HOST_READS,
    RANDOM,
    Watcher,
    map_tensors,
    tensors_in,
    unwrap,
    watching,
)

ROOT = "(whole model)"
"""Layer id of a model that cannot be opened at all."""

FLOPS_PER_BYTE = 10.0
"""How many operations cost as much as moving a byte: only ranks calls by size when layers are chosen."""

_VALUE_DEPENDENT = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal")


@dataclass(frozen=True)
class CapturedLayer:
    """One chosen call. `key` is equal for layers that do the same work on the same shapes."""

    id: str
    module: str
    class_name: str
    key: str
    flops: float
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class CapturedTensor:
    """A tensor made in one layer and used in later ones; "x@op" is x after `op` changed it in place."""

    id: str
    producer: str
    consumers: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    needs_gradient: bool


@dataclass(frozen=True)
class Capture:
    """What one forward of a model did, in layers."""

    model: str
    layers: tuple[CapturedLayer, ...]
    tensors: tuple[CapturedTensor, ...]
    parameters: tuple[Parameter, ...]
    no_cut: dict[str, str]
    keep_open: tuple[str, ...]
    """Modules whose layers are never joined again to run whole; see `profiles.Profile.keep_open`."""
    buffer_bytes: int
    fingerprint: str
    call_digest: str


def fingerprint(model: nn.Module) -> str:
    """Hash over the names, shapes and dtypes of parameters and buffers, tied names included."""
    state = hashlib.sha256()
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in sorted(kind(remove_duplicate=False)):
            state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return state.hexdigest()[:16]


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    max_share: float = 1 / 16,
    layers: Sequence[str] | None = None,
) -> Capture:
    """Run `model(*args, **kwargs)` once, gradients on, and describe it; the model is as before.

    `max_share`: a module with more than this share of the work is opened to its children where that is possible.
    `layers`: the layers of an earlier capture, taken again whatever their share.
    Works on meta tensors too, for a model none of whose decisions depend on values.
    An UnsupportedModelError says why a forward could not be followed.
    """
    model = unwrap(model)
    recorder = _Recorder(model)
    recorder.note_inputs((args, dict(kwargs or {})))
    with untouched(model), torch.enable_grad(), watching(recorder):
        with _Kernels(recorder):
            output = model(*args, **dict(kwargs or {}))
        recorder.note_output(output)
        del output
    return _Chooser(recorder, max_share, layers).result()


@dataclass
class _Node:
    """One module call: its place in the tree and in the order of operations."""

    id: str
    path: str
    class_name: str
    parent: int | None
    start: int
    first_kernel: int
    stop: int = 0
    last_kernel: int = 0
    children: list[int] = field(default_factory=list)
    whole: bool = False
    """Must not be opened, and why it is so is in `reason`."""
    reason: str = ""
    region: int = 0
    """Number of the checkpoint region around it, 0 for none."""
    outputs: set[int] = field(default_factory=set)


@dataclass
class _Info:
    """One tensor, or one value of a tensor that is changed in place."""

    names: list[tuple[int, str]]
    made: int
    node: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    needs_gradient: bool
    parents: tuple[int, ...] | None
    """What it was made from, so that every rank can make it where it has those; None: from parameters or at random."""
    storage: int
    uses: list[tuple[int, int]] = field(default_factory=list)
    """(operation, call it happens in)"""
    foreign: str = ""
    """Buffer or attribute that lives outside of the forward."""
    written: bool = False


@dataclass(frozen=True)
class _Write:
    """One in-place change: every tensor alive that shares the storage."""

    when: int
    aliases: tuple[int, ...]


class _Recorder(Watcher):
    def __init__(self, model: nn.Module) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        super().__init__(names)
        self.model = model
        self.clock = 0
        self.nodes: list[_Node] = []
        self.stack: list[int] = []
        self.infos: list[_Info] = []
        self.live: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.writes: list[_Write] = []
        self.kernels: list[tuple[str, float, float]] = []
        self.parameters: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            self.parameters[id(parameter)] = name
        self.buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        self.parameter_uses: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.order: list[str] = []
        self.region = 0
        self.num_regions = 0

    # -- tensors

    def find(self, tensor: torch.Tensor) -> int | None:
        entry = self.live.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def add(self, tensor: torch.Tensor, name: str, parents: tuple[int, ...] | None, foreign: str = "") -> int:
        number = len(self.infos)
        self.infos.append(
            _Info(
                names=[(self.clock, name)],
                made=self.clock,
                node=self.stack[-1] if self.stack else -1,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                nbytes=tensor.numel() * tensor.element_size(),
                needs_gradient=tensor.requires_grad,
                parents=parents,
                storage=_storage(tensor),
                foreign=foreign,
            )
        )
        key = id(tensor)

        def forget(reference: weakref.ref[torch.Tensor]) -> None:
            if key in self.live and self.live[key][0] is reference:
                del self.live[key]

        self.live[key] = (weakref.ref(tensor, forget), number)
        return number

    def use(self, tensor: torch.Tensor) -> int | None:
        """Note that the running operation reads `tensor`; its number, None for a parameter."""
        name = self.parameters.get(id(tensor))
        here = (self.clock, self.stack[-1] if self.stack else -1)
        if name is not None:
            if not self.parameter_uses[name] or self.parameter_uses[name][-1] != here:
                self.parameter_uses[name].append(here)
            return None
        number = self.find(tensor)
        if number is None:
            buffer = self.buffers.get(id(tensor))
            name = f"buffer {buffer}" if buffer else "constant"
            number = self.add(tensor, name, None if buffer else (), buffer or "attribute")
        self.infos[number].uses.append(here)
        return number

    def note_inputs(self, inputs: Any) -> None:
        for k, tensor in enumerate(tensors_in(inputs)):
            if self.find(tensor) is None and id(tensor) not in self.parameters:
                self.add(tensor, f"input:{k}", ())

    def note_output(self, output: Any) -> None:
        with torch._C.DisableTorchFunction():
            for tensor in tensors_in(output):
                self.use(tensor)

    # -- what happens

    def on_read(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def on_function(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.clock += 1
        moment = self.next_name()
        given = tensors_in((args, kwargs))
        numbers = [self.use(tensor) for tensor in given]
        repeatable = name not in RANDOM and None not in numbers
        parents = tuple(number for number in numbers if number is not None) if repeatable else None
        before = [_version(tensor) for tensor in given]
        result = func(*args, **kwargs)
        if name in HOST_READS:
            self.kernels.append((f"host read {len(self.kernels)} of {moment}", 0.0, 0.0))
            return result
        for tensor, version in zip(given, before, strict=True):
            if version != _version(tensor) and id(tensor) not in self.parameters:
                self.written(tensor, moment, parents)
        for k, tensor in enumerate(tensors_in(result)):
            if id(tensor) not in self.parameters and self.find(tensor) is None:
                self.add(tensor, moment if k == 0 else f"{moment}:{k}", parents)
        return result

    def on_checkpoint(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A reentrant checkpoint: its inside is watched, but no cut may go through it."""
        outer = self.region
        self.num_regions += 1
        self.region = self.num_regions
        try:
            return self.on_function("apply CheckpointFunction", run, args, kwargs)
        finally:
            self.region = outer

    def written(self, tensor: torch.Tensor, moment: str, parents: tuple[int, ...] | None) -> None:
        """`tensor` was changed in place: it, and everything alive that looks at the same storage, has a new value."""
        storage = _storage(tensor)
        aliases = [(n, ref()) for ref, n in list(self.live.values()) if self.infos[n].storage == storage]
        self.writes.append(_Write(self.clock, tuple(n for n, alive in aliases if alive is not None)))
        for n, alive in aliases:
            old = self.infos[n]
            old.written = True
            if alive is not None and not old.foreign:
                both = None if parents is None else (*parents, n)
                self.add(alive, f"{old.names[-1][1].split('@')[0]}@{moment}", both)

    def on_call(self, path: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.clock += 1
        call_id = self.enter(path) if path else ROOT
        self.order.append(call_id)
        module = self.model.get_submodule(path)
        node = _Node(
            id=call_id,
            path=path,
            class_name=type(module).__name__,
            parent=self.stack[-1] if self.stack else None,
            start=self.clock,
            first_kernel=len(self.kernels),
            region=self.region,
        )
        number = len(self.nodes)
        self.nodes.append(node)
        if node.parent is not None:
            self.nodes[node.parent].children.append(number)
            if torch._C._functorch.peek_interpreter_stack() is not None:
                self.nodes[node.parent].whole = True
                self.nodes[node.parent].reason = "it runs its children inside a functorch transform"
        if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
            node.whole, node.reason = True, "it is compiled"
        self.stack.append(number)
        self.at(f">{call_id}")
        self.kernels.append((f"call {type(module).__name__} {module.training}", 0.0, 0.0))
        try:
            result = run(*args, **kwargs)
        finally:
            self.stack.pop()
        self.clock += 1
        node.stop, node.last_kernel = self.clock, len(self.kernels)
        self.at(call_id)
        with torch._C.DisableTorchFunction():
            for k, tensor in enumerate(tensors_in(result)):
                if id(tensor) in self.parameters:
                    continue
                known = self.find(tensor)
                if known is None:
                    known = self.add(tensor, f"{call_id}:{k}", None)
                self.infos[known].names.append((self.clock, f"{call_id}:{k}"))
                node.outputs.add(known)
        return result


class _Kernels(TorchDispatchMode):
    """Below the torch functions: what each call really computes, for structural keys, FLOPs and hidden uses."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        recorder = self.recorder
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) in recorder.parameters or id(tensor) in recorder.live:
                recorder.use(tensor)
        packet = func._overloadpacket
        count = flop_registry.get(packet)
        flops = float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0
        moved = sum(t.numel() * t.element_size() for t in tensors_in((args, kwargs, result)))
        depends = any(word in str(packet) for word in _VALUE_DEPENDENT)
        mark = f" at {len(recorder.kernels)}" if depends else ""
        recorder.kernels.append((f"{func} {map_tensors((args, kwargs), _look)}{mark}", flops, float(moved)))
        return result


def _look(tensor: torch.Tensor) -> str:
    strides = tuple(tensor.stride()) if tensor.layout == torch.strided else tensor.layout
    return f"{tensor.dtype}{tuple(tensor.shape)}{strides}{'g' if tensor.requires_grad else ''}"


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors keep no version
        return 0


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and other layouts without one storage
        return id(tensor)


class _Chooser:
    """Picks the layers out of the tree of calls, then tells everything recorded in terms of them."""

    def __init__(self, recorder: _Recorder, max_share: float, layers: Sequence[str] | None) -> None:
        self.recorder = recorder
        self.nodes = recorder.nodes
        if not self.nodes:
            raise UnsupportedModelError("the model's forward was never called: is it an nn.Module with a forward?")
        self.total = self.work(self.nodes[0]) or 1.0
        if layers is None:
            self.chosen = self.choose(0, max_share)
        else:
            wanted = set(layers)
            self.chosen = [number for number, node in enumerate(self.nodes) if node.id in wanted]
        self.place = {number: k for k, number in enumerate(self.chosen)}
        self.starts = [self.nodes[number].start for number in self.chosen]
        self.shared: list[bool] = []
        """Beside the tensors recorded: every rank makes it itself, from the inputs, outside of all layers."""
        for info in recorder.infos:
            outside = self.layer_around(info.node) is None
            from_inputs = info.parents is not None and all(self.shared[parent] for parent in info.parents)
            self.shared.append(outside and from_inputs)

    def work(self, node: _Node) -> float:
        kernels = self.recorder.kernels[node.first_kernel : node.last_kernel]
        return sum(flops / FLOPS_PER_BYTE + moved for _, flops, moved in kernels)

    def choose(self, number: int, max_share: float) -> list[int]:
        node = self.nodes[number]
        root = node.parent is None
        too_large = root or self.work(node) > max_share * self.total
        if not node.children or node.whole or not too_large:
            return [number]
        return [chosen for child in node.children for chosen in self.choose(child, max_share)]

    def zone(self, when: int) -> int:
        """The layer an operation belongs to: the last one that has started."""
        return max(0, bisect_right(self.starts, when) - 1)

    def layer_around(self, number: int) -> int | None:
        """The chosen call that call `number` is inside of, or is."""
        current: int | None = number if number >= 0 else None
        while current is not None:
            if current in self.place:
                return current
            current = self.nodes[current].parent
        return None

    def result(self) -> Capture:
        recorder = self.recorder
        ids = [self.nodes[number].id for number in self.chosen]
        no_cut: dict[int, str] = {}
        tensors = self.tensors(ids, no_cut)
        self.forbid_shared_storage(no_cut)
        self.forbid_state(no_cut)
        self.forbid_regions(no_cut)
        parameters = self.parameters(ids)
        used = defaultdict(list)
        for parameter in parameters:
            for layer in parameter.layers:
                used[layer].append(parameter.names[0])
        keys = self.keys()
        layers = tuple(
            CapturedLayer(
                id=layer_id,
                module=self.nodes[number].path,
                class_name=self.nodes[number].class_name,
                key=keys[k][0],
                flops=keys[k][1],
                parameters=tuple(used[layer_id]),
            )
            for k, (number, layer_id) in enumerate(zip(self.chosen, ids, strict=True))
        )
        return Capture(
            model=type(recorder.model).__name__,
            layers=layers,
            tensors=tensors,
            parameters=parameters,
            no_cut={ids[k]: reason for k, reason in sorted(no_cut.items()) if 0 < k < len(ids)},
            keep_open=self.keep_open(),
            buffer_bytes=sum(b.numel() * b.element_size() for b in recorder.model.buffers()),
            fingerprint=fingerprint(recorder.model),
            call_digest=hashlib.sha256("\n".join(recorder.order).encode()).hexdigest()[:16],
        )

    def tensors(self, ids: list[str], no_cut: dict[int, str]) -> tuple[CapturedTensor, ...]:
        found = []
        for info, shared in zip(self.recorder.infos, self.shared, strict=True):
            if shared or info.foreign:
                continue
            made = self.zone(info.made)
            layer = self.layer_around(info.node)
            consumers = sorted({self.zone(when) for when, _ in info.uses if self.zone(when) > made})
            if not consumers:
                continue
            if layer is not None and not self.is_output(layer, info):
                for k in range(made + 1, consumers[-1] + 1):
                    no_cut.setdefault(k, f"{ids[made]} leaves a tensor behind that {ids[consumers[-1]]} reads")
                continue
            end = self.starts[made + 1] if made + 1 < len(self.starts) else self.recorder.clock + 1
            name = [name for when, name in info.names if when < end][-1]
            found.append(
                CapturedTensor(
                    id=name,
                    producer=ids[made],
                    consumers=tuple(ids[k] for k in consumers),
                    shape=info.shape,
                    dtype=str(info.dtype).removeprefix("torch."),
                    nbytes=info.nbytes,
                    needs_gradient=info.needs_gradient,
                )
            )
        return tuple(found)

    def keep_open(self) -> tuple[str, ...]:
        found = set()
        for info, shared in zip(self.recorder.infos, self.shared, strict=True):
            last = max((when for when, _ in info.uses), default=0)
            current: int | None = info.node if shared and info.node >= 0 else None
            while current is not None and last > self.nodes[current].stop:
                found.add(self.nodes[current].path)
                current = self.nodes[current].parent
        return tuple(sorted(found))

    def is_output(self, layer: int, info: _Info) -> bool:
        prefix = f"{self.nodes[layer].id}:"
        return any(name.startswith(prefix) for _, name in info.names) or any("@" in name for _, name in info.names)

    def forbid_shared_storage(self, no_cut: dict[int, str]) -> None:
        """A view of a storage that is changed later: sent on its own it would miss the change."""
        for write in self.recorder.writes:
            last = self.zone(write.when)
            infos = [self.recorder.infos[n] for n in write.aliases if not self.shared[n]]
            live = [info for info in infos if not info.foreign]
            if len(live) < 2:
                continue
            first = max(self.zone(info.made) for info in live)
            for k in range(first + 1, last + 1):
                no_cut.setdefault(k, "tensors that share memory cross here and one is changed in place later")

    def forbid_state(self, no_cut: dict[int, str]) -> None:
        """State kept outside of the forward and changed by it must stay with everything that reads it."""
        for info in self.recorder.infos:
            if info.foreign and info.written and info.uses:
                zones = [self.zone(when) for when, _ in info.uses]
                for k in range(min(zones) + 1, max(zones) + 1):
                    no_cut.setdefault(k, f"the state {info.foreign!r} is changed in the forward and used on both sides")

    def forbid_regions(self, no_cut: dict[int, str]) -> None:
        for k in range(1, len(self.chosen)):
            before, here = self.nodes[self.chosen[k - 1]], self.nodes[self.chosen[k]]
            if here.region and here.region == before.region:
                no_cut.setdefault(k, "one checkpoint runs the layers on both sides")

    def parameters(self, ids: list[str]) -> tuple[Parameter, ...]:
        model, uses = self.recorder.model, self.recorder.parameter_uses
        names: dict[int, list[str]] = defaultdict(list)
        tensors: dict[int, nn.Parameter] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
            tensors[id(parameter)] = parameter
        owners: dict[int, set[int]] = defaultdict(set)
        for number in tensors:
            owners[number] |= {self.zone(when) for when, _ in uses.get(names[number][0], ())}
        for k, chosen in enumerate(self.chosen):
            for parameter in model.get_submodule(self.nodes[chosen].path).parameters():
                owners[id(parameter)].add(k)
        return tuple(
            Parameter(
                names=tuple(names[number]),
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                bytes=parameter.numel() * parameter.element_size(),
                trainable=parameter.requires_grad,
                layers=tuple(ids[k] for k in sorted(owners[number])),
            )
            for number, parameter in tensors.items()
        )

    def keys(self) -> list[tuple[str, float]]:
        kernels = self.recorder.kernels
        found = []
        for k, number in enumerate(self.chosen):
            node = self.nodes[number]
            end = self.nodes[self.chosen[k + 1]].first_kernel if k + 1 < len(self.chosen) else len(kernels)
            start = 0 if k == 0 else node.first_kernel
            mine = kernels[start:end]
            text = "\n".join(name for name, _, _ in mine)
            requires = [p.requires_grad for p in self.recorder.model.get_submodule(node.path).parameters()]
            state = f"{node.class_name} {requires} {torch.is_autocast_enabled('cpu')}"
            digest = hashlib.sha256(f"{state}\n{text}".encode()).hexdigest()[:16]
            found.append((digest, sum(flops for _, flops, _ in mine)))
        return found
