"""Choose the layers of a recorded forward, and tell what flows between them, who uses which parameter, where no cut is.

The layers are whole modules, opened to their children only where one alone would be too large a share of the work.
What a tensor is called does not depend on that choice (see `tracing`), so a plan made at a fine grain runs at a coarse
one.

    layer k   = the k-th chosen call and the glue code after it, up to the next chosen call
    cut k     = just before the call of layer k
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from partitioner.attributes import Attribute as Changed
from partitioner.ending import sets_of_its_own
from partitioner.errors import UnsupportedModelError
from partitioner.gradient_hooks import hooked, refusal
from partitioner.losses import Compared
from partitioner.profiles import Attribute, Buffer, Layer, LayerCost, Parameter
from partitioner.reaching import Reach
from partitioner.recording import Info, Node, Recording, record, tensor_nbytes, warm_up
from partitioner.restore import Weights, untouched
from partitioner.shared import Masks
from partitioner.structures import map_tensors, storage_of, tensors_in
from partitioner.tracing import unwrap
from partitioner.written import parameters_kept

MAX_CLOSED = 0.5
"""Share of the work above which a module is opened though it keeps state from forward to forward."""

FATES = (None, 1 - 2**-24, 0.0)
"""What single random numbers come out as in one attempt after another: a layer is left out by drawing low or high."""

MAX_DRAWN = 64
"""Numbers drawn together that may be one for each layer of a list: in later attempts, these come out alike too."""

MAX_ATTEMPTS = 10
"""Forwards to record until one is found in which no layer was left out at random."""

MAX_TOLD = 1 << 16
"""Bytes of a buffer that travel in the log where one stage changes it and a later one reads it."""

FLOPS_PER_BYTE = 10.0
"""How many operations cost as much as moving a byte: only ranks calls by size when layers are chosen."""


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
    memory: int
    """The same number for all that share memory, of which `memory_nbytes` is the size."""
    memory_nbytes: int


@dataclass(frozen=True)
class Capture:
    """What one forward of a model did, in layers."""

    model: str
    layers: tuple[CapturedLayer, ...]
    tensors: tuple[CapturedTensor, ...]
    parameters: tuple[Parameter, ...]
    no_cut: dict[str, str]
    opened: tuple[str, ...]
    """Modules that call layers which are not below them."""
    joinable: tuple[str, ...]
    """Modules around layers that may run whole where no cut goes through; see `profiles.Profile.joinable`."""
    glue: dict[str, int]
    """Moments between layers, and how many torch functions ran then."""
    glue_names: dict[str, int]
    """Moments between layers, and checksums of the functions' names; empty where values decide nothing."""
    dynamic: bool
    """Whether values decide, between layers, which way the forward takes."""
    fire_hooks: tuple[str, ...]
    """Modules with forward hooks that later ranks fire too; see `profiles.Profile.fire_hooks`."""
    collecting: tuple[str, ...]
    """Those hooks, by the names of their functions."""
    passing: dict[str, int]
    """Layers that return tensors that they were given, and how many; see `profiles.Profile.passing`."""
    buffers: tuple[Buffer, ...]
    buffer_bytes: int
    """Of all other buffers."""
    attributes: tuple[Attribute, ...]
    """Python state that layers share; see `profiles.Profile.attributes`."""
    fingerprint: str
    call_digest: str

    def structure(self) -> dict[str, Any]:
        """The fields of a `profiles.Profile` that are the same whatever device the costs are for."""
        return {name: getattr(self, name) for name in STRUCTURE}

    def priced(self, costs: Mapping[str, Sequence[LayerCost]]) -> tuple[Layer, ...]:
        """The layers with what each costs, by id."""
        bytes_of = {parameter.names[0]: parameter for parameter in self.parameters}
        return tuple(
            Layer(
                id=layer.id,
                class_name=layer.class_name,
                parameter_bytes=sum(bytes_of[name].bytes for name in layer.parameters),
                gradient_bytes=sum(bytes_of[name].bytes for name in layer.parameters if bytes_of[name].trainable),
                buffer_bytes=sum(buffer.bytes for buffer in self.buffers if layer.id in buffer.layers),
                key=layer.key,
                costs=tuple(costs[layer.id]),
            )
            for layer in self.layers
        )


STRUCTURE = (
    "model",
    "parameters",
    "no_cut",
    "opened",
    "joinable",
    "glue",
    "glue_names",
    "dynamic",
    "fire_hooks",
    "collecting",
    "passing",
    "buffers",
    "buffer_bytes",
    "attributes",
    "fingerprint",
    "call_digest",
)


def fingerprint(model: nn.Module) -> str:
    """Hash over the names, shapes and dtypes of parameters and buffers, tied names included."""
    state = hashlib.sha256()
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in sorted(kind(remove_duplicate=False)):
            state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return state.hexdigest()[:16]


def written_weights(model: nn.Module, parameters: Sequence[Parameter]) -> Weights:
    """Those into which forwards write."""
    return Weights(model.get_parameter(one.names[0]) for one in parameters if one.written)


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    max_share: float = 1 / 16,
    layers: Sequence[str] | None = None,
    loss: Compared | None = None,
) -> Capture:
    """Run `model(*args, **kwargs)` once, gradients on, and describe it; the model is as before.

    `max_share`: a module with more than this share of the work is opened to its children where that is possible.
    `layers`: the layers of an earlier capture, taken again whatever their share. `loss`: what the last stage makes of
    the output, so that it has what this reads of the model.
    Works on meta tensors too, for a model none of whose decisions depend on values.
    An UnsupportedModelError says why a forward could not be followed.
    """
    model = unwrap(model)
    lazy = [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise UnsupportedModelError(f"the parameter {lazy[0]!r} has no shape yet: run the model once on a batch first")
    first, steady = _recordings(model, args, dict(kwargs or {}), set(layers or ()), loss)
    if steady.gradients_read:
        others = () if loss is None else loss.loss.keeps
        _refuse_gradients(model, args, dict(kwargs or {}), others, steady.gradients_read)
    chooser = _Chooser(steady, max_share, layers)
    captured = chooser.result()
    if first is not steady:
        other = _Chooser(first, max_share, [layer.id for layer in captured.layers], chooser).result()
        joinable = tuple(path for path in captured.joinable if path in other.joinable)
        captured = dataclasses.replace(
            captured,
            no_cut=other.no_cut | captured.no_cut,
            joinable=joinable,
            buffers=_used_by_either(captured, other),
            attributes=_read_in_either(captured, other),
            parameters=_written_in_either(captured, other),
        )
    return captured


def _written_in_either(captured: Capture, other: Capture) -> tuple[Parameter, ...]:
    """With what the first forward alone writes into, and does no more."""
    order = {layer.id: k for k, layer in enumerate(captured.layers)}
    first = {parameter.names: parameter for parameter in other.parameters if parameter.written}
    return tuple(
        parameter.model_copy(
            update={
                "written": parameter.written or "first",
                "layers": tuple(sorted({*parameter.layers, *first[parameter.names].layers}, key=order.__getitem__)),
            }
        )
        if parameter.names in first
        else parameter
        for parameter in captured.parameters
    )


def _used_by_either(captured: Capture, other: Capture) -> tuple[Buffer, ...]:
    order = {layer.id: k for k, layer in enumerate(captured.layers)}
    more = {buffer.names: buffer.layers for buffer in other.buffers}
    return tuple(
        buffer.model_copy(
            update={"layers": tuple(sorted({*buffer.layers, *more.get(buffer.names, ())}, key=order.__getitem__))}
        )
        for buffer in captured.buffers
    )


def _read_in_either(captured: Capture, other: Capture) -> tuple[Attribute, ...]:
    order = {layer.id: k for k, layer in enumerate(captured.layers)}
    found = {one.name: one for one in captured.attributes}
    for one in other.attributes:
        same = found.get(one.name, one)
        read = sorted({*(name for name in (one.first, one.last, same.first, same.last) if name)}, key=order.__getitem__)
        found[one.name] = Attribute(
            name=one.name,
            first=read[0] if read else None,
            last=read[-1] if read else None,
            writers=tuple(sorted({*one.writers, *same.writers}, key=order.__getitem__)),
            inside=tuple(sorted({*one.inside, *same.inside}, key=order.__getitem__)),
            returns=one.returns and same.returns,
            set_first=one.set_first and same.set_first,
            adds=one.adds,
            foretold=one.foretold or same.foretold,
        )
    return tuple(found.values())


def _recordings(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layers: set[str],
    loss: Compared | None,
) -> tuple[Recording, Recording]:
    """The first forward, and the second where the first changed what the modules keep (else the first again).

    Repeated, with other random numbers, where a forward leaves out layers that it might have called.
    """
    best: tuple[Recording, Recording] | None = None
    others = () if loss is None else loss.loss.keeps
    deciding: set[nn.Module] = set()
    if not any(tensor.is_meta for tensor in (*model.parameters(), *tensors_in((args, kwargs)))):
        with untouched(model, others):
            mine, by_name = map_tensors((args, kwargs), copied)
            warm_up(model, mine, by_name, loss)
    for attempt in range(MAX_ATTEMPTS):
        quiet = deciding if attempt == MAX_ATTEMPTS - 1 else set()
        most = 1 if attempt < len(FATES) else MAX_DRAWN
        try:
            with (
                untouched(model, others) as state,
                parameters_kept(model) as kept,
                fate(model, FATES[attempt % len(FATES)], most),
            ):
                _skip_random_numbers(0 if best is None else len(best[1].order))
                for module in quiet:
                    module.training = False
                first = steady = record(model, *map_tensors((args, kwargs), copied), loss=loss)
                if first.attributes or first.parameter_writes or state.has_changed():
                    tell_new = not all(item.is_on_module for item in first.attributes)
                    if tell_new:
                        state.restore()
                        kept.restore()
                        for module in quiet:
                            module.training = False
                        first = record(model, *map_tensors((args, kwargs), copied), tell_new=True, loss=loss)
                    steady = record(model, *map_tensors((args, kwargs), copied), tell_new=tell_new, loss=loss)
        except Exception:
            if best is None:
                raise
            continue  # a further forward is not asked for: some models bear no other numbers
        if first is not steady:
            steady.written_at_first = {info.foreign for info in first.infos if info.foreign and info.writes}
            with untouched(model, others), parameters_kept(model):
                _tell_counters(model, first, steady, *map_tensors((args, kwargs), copied))
        if best is None or len(steady.order) > len(best[1].order):
            best = (first, steady)
        called = set(best[1].order)
        deciding = _deciding(model, called)
        if called.issuperset(layers) if layers else not deciding:
            break
    assert best is not None
    return best


def _refuse_gradients(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], others: Any, names: Sequence[str]
) -> None:
    """An UnsupportedModelError where the output is another when these parameters have gradients already."""
    outputs: list[list[torch.Tensor]] = []
    for value in (None, 1.0, -1e3):
        with untouched(model, others), parameters_kept(model), torch.no_grad():
            torch.manual_seed(0)
            for name in names:
                parameter = model.get_parameter(name)
                parameter.grad = None if value is None else torch.full_like(parameter, value)
            outputs.append(tensors_in(model(*map_tensors(args, copied), **map_tensors(kwargs, copied))))
    if any(len(found) != len(outputs[0]) or not all(map(_is_equal, found, outputs[0])) for found in outputs[1:]):
        raise UnsupportedModelError(
            f"the forward reads the gradient of the parameter {names[0]!r}, and computes other numbers where there is "
            f"one: whether there is depends on how many micro-batches and ranks there are. Read gradients after the "
            f"step, and keep in a buffer or attribute what the forward needs of them"
        )


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.layout != torch.strided or one.is_nested:
        return one.shape == other.shape
    return bool(torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True))


def _tell_counters(
    model: nn.Module, first: Recording, steady: Recording, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """What every forward adds to whole numbers, in training and in evaluation; the latter is run for that."""
    before = {item.name: item for item in first.attributes if item.added is not None}
    found = {
        item.name: item for item in steady.attributes if item.name in before and item.added == before[item.name].added
    }
    replaced = tuple(f"{item.name}." for item in steady.attributes)  # with an object made anew its numbers begin anew
    found = {name: item for name, item in found.items() if item.added and not name.startswith(replaced)}
    if not found:
        return
    was_training = model.training
    start = {name: item.now() for name, item in found.items()}
    model.train(not was_training)
    try:
        with torch.no_grad():
            model(*args, **kwargs)
        others = {name: item.now() - start[name] for name, item in found.items()}
    except Exception:  # whatever a model raises that runs in one mode only
        others = dict.fromkeys(found, 0)
    for name, item in found.items():
        both = (item.added or 0, others[name])
        first.adds[name] = steady.adds[name] = both if was_training else both[::-1]


def _deciding(model: nn.Module, called: set[str]) -> set[nn.Module]:
    """Modules that left out a layer with weights which stands in a list with one of its kind that was called.

    Of lists in a list, in which nothing calls them themselves: those of which all was left out.
    """
    found = set()
    modules = dict(model.named_modules())
    reached = {name[:k] for name in called for k, letter in enumerate(name) if letter == "."} | called

    def kind(module: nn.Module) -> Any:
        return type(module), tuple(map(kind, module.children())) if isinstance(module, _LISTS) else ()

    for path, module in modules.items():
        if isinstance(module, (*_LISTS, nn.Sequential)):
            prefix = f"{path}." if path else ""
            kinds, left_out = set(), []
            for name, child in module.named_children():
                if prefix + name in (reached if isinstance(child, _LISTS) else called):
                    kinds.add(kind(child))
                elif any(True for _ in child.parameters()):
                    left_out.append(child)
            if any(kind(child) in kinds for child in left_out):
                found |= {modules[path.rpartition(".")[0]], module}
    return found


_LISTS = (nn.ModuleList, nn.ModuleDict)


def _skip_random_numbers(count: int) -> None:
    """Go on in the random numbers, so that a forward that leaves layers out at random leaves out others."""
    torch.rand(count)
    for _ in range(count):
        random.random()
        np.random.rand()


@contextlib.contextmanager
def fate(model: nn.Module, value: float | None, most: int = 1) -> Iterator[None]:
    """Inside: up to `most` numbers drawn together from [0, 1) by torch.rand, `random` or NumPy are this, unless None.

    Also where the files of the model's classes have imported these functions by name.
    """
    if value is None:
        yield
        return

    def fated(draw: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            drawn = draw(*args, **kwargs)
            if isinstance(drawn, float):
                return value
            if type(drawn) is torch.Tensor and drawn.numel() <= most:  # no stand-in for what is logged
                with torch._C.DisableTorchFunction():
                    drawn.detach().fill_(value)
            elif isinstance(drawn, np.ndarray) and drawn.size <= most:
                drawn.fill(value)
            return drawn

        return call

    places: list[tuple[Any, str]] = [(torch, "rand"), (random, "random"), (np.random, "rand"), (np.random, "random")]
    draws = {id(getattr(owner, name)) for owner, name in places}
    files = {cls.__module__ for kind in {type(module) for module in model.modules()} for cls in kind.__mro__}
    for file in (sys.modules[name] for name in files - {"torch"} if name in sys.modules):
        places += [(file, name) for name, held in vars(file).items() if id(held) in draws]
    kept = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, draw in kept:
        setattr(owner, name, fated(draw))
    try:
        yield
    finally:
        for owner, name, draw in kept:
            setattr(owner, name, draw)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same values that a forward may write into; one that needs gradients stays itself."""
    return tensor if tensor.requires_grad else tensor.detach().clone()


class _Chooser:
    """Picks the layers out of the tree of calls, then tells everything recorded in terms of them."""

    def __init__(
        self,
        recording: Recording,
        max_share: float,
        layers: Sequence[str] | None,
        following: _Chooser | None = None,
    ) -> None:
        """`following`: that of the forwards after this one, if they do something else."""
        self.recording = recording
        self.nodes = recording.nodes
        self.named = dict(recording.model.named_buffers())
        self.following = following
        self.told: set[str] = set()
        """Tensors that layers leave in Python state and that are sent."""
        self.moving = {number for slots in recording.slots.values() for _, number in slots}
        """Tensors kept from the forward before that this one replaces."""
        if not self.nodes:
            raise UnsupportedModelError("the model's forward was never called: is it an nn.Module with a forward?")
        self.total = self.work(self.nodes[0]) or 1.0
        if layers is not None:
            wanted = set(layers)
            self.take([number for number, node in enumerate(self.nodes) if node.id in wanted])
            return
        opened: set[int] = set()
        self.closed: set[int] = set()
        """Calls that are not opened, whatever their share."""
        while True:
            self.take(self.choose(0, max_share, opened))
            uneven = self.opened_at_another_call()
            bare = {number for number in uneven if not self.nodes[number].children}
            more = (self.around_collected() | self.returning_functions() | uneven - bare) - opened
            less = (self.around_state() | self.around_special()) - self.closed - opened
            less |= self.calls_of({self.nodes[number].path for number in bare}) - self.closed
            if not more and not less:
                return
            opened |= more
            self.closed |= less

    def take(self, chosen: list[int]) -> None:
        self.chosen = chosen
        self.place = {number: k for k, number in enumerate(chosen)}
        self.starts = [self.nodes[number].start for number in chosen]
        self.shared: list[bool] = []
        """Beside the tensors recorded: every rank makes it itself, from the inputs, outside of all layers."""
        for info in self.recording.infos:
            outside = self.layer_around(info.node) is None
            from_inputs = info.parents is not None and all(self.shared[parent] for parent in info.parents)
            self.shared.append(outside and from_inputs and len(self.shared) not in self.moving)

    def work(self, node: Node) -> float:
        kernels = self.recording.kernels[node.first_kernel : node.last_kernel]
        return sum(flops / FLOPS_PER_BYTE + moved for _, flops, moved in kernels)

    def choose(self, number: int, max_share: float, opened: set[int]) -> list[int]:
        node = self.nodes[number]
        too_large = node.parent is None or number in opened or self.work(node) > max_share * self.total
        if not node.children or node.whole or not too_large or number in self.closed:
            return [number]
        return [chosen for child in node.children for chosen in self.choose(child, max_share, opened)]

    def around_collected(self) -> set[int]:
        """Calls to open, so that a module inside whose hooks collect tensors is a layer of its own.

        All modules with such a hook: where one of them keeps nothing this time, its turn may still be counted.
        """
        found: set[int] = set()
        for number, node in enumerate(self.nodes):
            layer = self.layer_around(number)
            if layer is None or layer == number or not node.hooks & self.recording.collecting:
                continue
            current = node.parent
            while current is not None and self.layer_around(current) is not None:
                found.add(current)
                current = self.nodes[current].parent
        return {number for number in found if not self.nodes[number].whole}

    def opened_at_another_call(self) -> set[int]:
        """First calls chosen as layers, whose names stand for the module, where another of its calls is opened."""
        opened = self.around()
        return {n for n in self.chosen if self.nodes[n].id == self.nodes[n].path and self.nodes[n].path in opened}

    def calls_of(self, paths: set[str]) -> set[int]:
        return {number for number, node in enumerate(self.nodes) if node.path in paths}

    def returning_functions(self) -> set[int]:
        """Chosen calls to open, since they return a function: every rank makes its own by running their code."""
        return {n for n in self.chosen if self.nodes[n].returns_function and not self.nodes[n].whole}

    def around_state(self) -> set[int]:
        """Calls to keep whole, since they begin with reading what this forward or the last one changes after their
        first layer: cut open, that would be on the stage before."""
        found: set[int] = set()
        for uses, last in self.kept_state():
            for when, number in uses:
                is_small = number >= 0 and self.work(self.nodes[number]) <= MAX_CLOSED * self.total
                if self.zone(when) < last and number in self.heads(when, number) and is_small:
                    found |= self.calls_of({self.nodes[number].path})
        return found

    def around_special(self) -> set[int]:
        """Calls to keep whole, since they make something that cannot be sent before their first layer and use it after:
        cut before them there is none yet."""
        found: set[int] = set()
        for info in self.recording.infos:
            if not info.sendable and not info.foreign and self.work(self.nodes[info.node]) <= MAX_CLOSED * self.total:
                after = any(self.zone(when) > self.zone(info.made) for when, _ in info.uses)
                if after and info.node in self.heads(info.made, info.node):
                    found |= self.calls_of({self.nodes[info.node].path})
        return found

    def heads(self, when: int, number: int) -> list[int]:
        """Opened calls, but for the model's own, that had begun and not come to their first layer: from `number` up."""
        if number < 0 or self.layer_around(number) is not None:
            return []
        start = self.starts[self.zone(when)]
        around = [number, *self.ancestors(number)]
        return [one for one in around if self.nodes[one].start > start and self.nodes[one].parent is not None]

    def kept_state(self) -> Iterator[tuple[list[tuple[int, int]], int]]:
        """Of each thing that is kept from forward to forward and changed: where it is used, and the last change.

        Of parameters that are changed the last use, since all of them must be on one stage.
        """
        infos = self.recording.infos
        for name, writes in self.recording.parameter_writes.items():
            places = [*writes, *self.recording.parameter_uses[name]]
            yield places, max(self.zone(when) for when, _ in places)
        for info in infos:
            if info.foreign and info.writes:
                yield info.uses, max(map(self.zone, info.writes))
        for item in self.recording.attributes:
            if not self.returns(item) and not self.starts_anew(item):
                yield item.reads, max(self.zone(when) for when, _ in item.writes)
            for (when, _), number in self.recording.slots[id(item)]:
                yield infos[number].uses, self.zone(when)

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
        recording = self.recording
        ids = [self.nodes[number].id for number in self.chosen]
        no_cut: dict[int, str] = {}
        keep_open = self.kept_open_for_tensors()
        tensors = self.tensors(ids, no_cut)
        self.forbid_shared_storage(no_cut)
        self.forbid_state(no_cut)
        self.forbid_written_weights(no_cut)
        self.forbid_unseen(no_cut)
        self.forbid_shared_weights(no_cut)
        self.forbid_hooked(no_cut)
        keep_open |= self.forbid_attributes(no_cut)
        self.forbid_outside(no_cut, ids)
        for span in recording.spans:
            self.forbid(no_cut, self.zone(span.start), self.zone(span.stop), span.reason)
        self.forbid_regions(no_cut)
        self.forbid_uncalled(no_cut)
        collecting = [n for n, node in enumerate(self.nodes) if node.hooks & recording.collecting]
        fire_hooks = {self.nodes[number].path for number in collecting}
        keep_open |= {self.nodes[one].path for number in collecting for one in self.ancestors(number)}
        keep_open |= {node.path for node in self.nodes if node.is_unsure}
        parameters, buffers = self.parameters(ids), self.buffers(ids)
        used = defaultdict(list)
        for parameter in parameters:
            for layer in parameter.layers:
                used[layer].append(parameter.names[0])
        dynamic = any(self.layer_around(node) is None for node in recording.decisions)
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
            model=type(recording.model).__name__,
            layers=layers,
            tensors=tensors,
            parameters=parameters,
            no_cut={ids[k]: reason for k, reason in sorted(no_cut.items()) if 0 < k < len(ids)},
            opened=self.opened(),
            joinable=self.joinable(keep_open),
            glue={
                moment: count
                for moment, (count, node, _) in recording.moments.items()
                if self.layer_around(node) is None
            },
            glue_names={
                moment: names
                for moment, (_, node, names) in recording.moments.items()
                if dynamic and self.layer_around(node) is None
            },
            dynamic=dynamic,
            fire_hooks=tuple(sorted(fire_hooks)),
            collecting=tuple(sorted(recording.collecting)),
            passing={
                self.nodes[number].id: self.nodes[number].passes for number in self.chosen if self.nodes[number].passes
            },
            buffers=buffers,
            buffer_bytes=sum(map(tensor_nbytes, recording.model.buffers())) - sum(buffer.bytes for buffer in buffers),
            attributes=self.attributes(ids),
            fingerprint=fingerprint(recording.model),
            call_digest=hashlib.sha256("\n".join(recording.order).encode()).hexdigest()[:16],
        )

    # -- tensors

    def tensors(self, ids: list[str], no_cut: dict[int, str]) -> tuple[CapturedTensor, ...]:
        found = []
        for info, shared in zip(self.recording.infos, self.shared, strict=True):
            for number, when, name in info.handed_out:
                if self.layer_around(number) == number:
                    found += self.crossing(info, self.zone(when), name, ids, no_cut)
            if shared or info.foreign:
                continue
            made = self.zone(info.made)
            layer = self.layer_around(info.node)
            if layer is not None and not self.is_output(layer, info):
                last = max((self.zone(when) for when, _ in info.uses), default=made)
                self.forbid(no_cut, made, last, f"{ids[made]} leaves a tensor behind that {ids[last]} reads")
                continue
            end = self.starts[made + 1] if made + 1 < len(self.starts) else self.recording.clock + 1
            by_layers = {self.nodes[n].stop for n in info.left_by if self.layer_around(n) is not None}
            name = [name for when, name in info.names if when < end and (name[0] != "=" or when in by_layers)][-1]
            sent = self.crossing(info, made, name, ids, no_cut)
            if sent and name[0] == "=":
                if name in self.told:
                    reason = f"{ids[made]} leaves a tensor behind where it left another before, and both are read later"
                    self.forbid(no_cut, made, ids.index(sent[0].consumers[-1]), reason)
                    continue
                self.told.add(name)
                if self.following is not None and name not in self.following.told:
                    reason = (
                        f"{ids[made]} leaves a tensor behind that {sent[0].consumers[-1]} reads, in some forwards only"
                    )
                    self.forbid(no_cut, made, ids.index(sent[0].consumers[-1]), reason)
            found += sent
        return tuple(found)

    def crossing(
        self, info: Info, made: int, name: str, ids: list[str], no_cut: dict[int, str]
    ) -> list[CapturedTensor]:
        """The tensor as it is sent from layer `made` under this name, if later layers use it and it can be sent."""
        consumers = sorted({self.zone(when) for when, _ in info.uses if self.zone(when) > made})
        if consumers and not info.sendable:
            self.forbid(no_cut, made, consumers[-1], "a tensor of a special kind crosses here (subclass or sparse)")
        if not consumers or not info.sendable:
            return []
        return [
            CapturedTensor(
                id=name,
                producer=ids[made],
                consumers=tuple(ids[k] for k in consumers),
                shape=info.shape,
                dtype=str(info.dtype).removeprefix("torch."),
                nbytes=info.nbytes,
                needs_gradient=info.needs_gradient,
                memory=info.memory,
                memory_nbytes=info.memory_nbytes,
            )
        ]

    def is_output(self, layer: int, info: Info) -> bool:
        """Whether it is a result of the layer, or left in Python state that is told to later stages."""
        prefix = f"{self.nodes[layer].id}:"
        return layer in info.left_by or any(name.startswith(prefix) or "@" in name for _, name in info.names)

    def ancestors(self, number: int) -> list[int]:
        found = []
        current = self.nodes[number].parent
        while current is not None:
            found.append(current)
            current = self.nodes[current].parent
        return found

    def kept_open_for_tensors(self) -> set[str]:
        """Modules that return a tensor of elsewhere, or in whose glue one is made from inputs that is read later."""
        found = set()
        for info, shared in zip(self.recording.infos, self.shared, strict=True):
            found |= {self.nodes[number].path for number, _, _ in info.handed_out if number not in self.place}
            last = max((when for when, _ in info.uses), default=0)
            current: int | None = info.node if shared and info.node >= 0 else None
            while current is not None and last > self.nodes[current].stop:
                found.add(self.nodes[current].path)
                current = self.nodes[current].parent
        return found

    def around(self) -> set[str]:
        return {self.nodes[one].path for number in self.chosen for one in self.ancestors(number)}

    def opened(self) -> tuple[str, ...]:
        above = {""}
        for number in self.chosen:
            path = self.nodes[number].path
            above |= {path[:k] for k, letter in enumerate(path) if letter == "."}
        return tuple(sorted(self.around() - above))

    def joinable(self, keep_open: set[str]) -> tuple[str, ...]:
        around = self.around()
        calls = Counter(node.path for node in self.nodes)
        return tuple(sorted(path for path in around - keep_open if path and calls[path] == 1))

    # -- where no cut may be

    def forbid(self, no_cut: dict[int, str], first: int, last: int, reason: str) -> None:
        """No cut between layer `first` and layer `last`."""
        for k in range(first + 1, min(last, len(self.chosen) - 1) + 1):
            no_cut.setdefault(k, reason)

    def forbid_shared_storage(self, no_cut: dict[int, str]) -> None:
        """A view of a storage that is changed later: sent on its own it would miss the change."""
        for write in self.recording.writes:
            infos = [self.recording.infos[n] for n in write.aliases if not self.shared[n]]
            live = [info for info in infos if not info.foreign]
            if len(live) > 1:
                first = max(self.zone(info.made) for info in live)
                reason = "tensors that share memory cross here and one is changed in place later"
                self.forbid(no_cut, first, self.zone(write.when), reason)

    def forbid_state(self, no_cut: dict[int, str]) -> None:
        """State kept outside of the forward and changed by it must stay with everything that uses it before.

        And with what reads it later, but for a buffer that is small enough to tell later stages of in the log.
        """
        for info in self.recording.infos:
            if info.foreign and info.writes and info.uses:
                zones = [self.zone(when) for when, _ in info.uses]
                can_be_sent = info.foreign in self.named and info.sendable and info.nbytes <= MAX_TOLD
                last = max(map(self.zone, info.writes))
                if info.is_silent or info.needs_gradient or not can_be_sent:
                    last = max(last, *zones)
                reason = f"the state {info.foreign!r} is changed in the forward and used on both sides"
                for k in range(min(zones) + 1, last + 1):
                    if info.foreign not in self.named or not self.holds_as_foretold(info.foreign, k):
                        self.forbid(no_cut, k - 1, k, reason)

    def forbid_written_weights(self, no_cut: dict[int, str]) -> None:
        """A parameter that the forward writes into must be on one stage: copies on others would not follow."""
        for name, writes in self.recording.parameter_writes.items():
            zones = [self.zone(when) for when, _ in (*writes, *self.recording.parameter_uses[name])]
            around = self.recording.model.get_submodule(name.rpartition(".")[0])
            zones += [k for k, number in enumerate(self.chosen) if around in self.modules_of(number)]
            reason = f"the parameter {name!r} is changed in the forward and used on both sides"
            self.forbid(no_cut, min(zones), max(zones), reason)

    def modules_of(self, number: int) -> set[nn.Module]:
        return set(self.recording.model.get_submodule(self.nodes[number].path).modules())

    def forbid_unseen(self, no_cut: dict[int, str]) -> None:
        """A buffer that the code of a module around layers changes, though not this time, stays with that code.

        But for those that the first forward set: that was the time.
        """
        at_first = self.recording.written_at_first
        for number, node in enumerate(self.nodes):
            module = self.recording.model.get_submodule(node.path)
            if node.parent is None or not module._buffers or self.layer_around(number) is not None:
                continue
            for name in sorted(sets_of_its_own(type(module)) & module._buffers.keys()):
                infos = [info for info in self.recording.infos if info.foreign == f"{node.path}.{name}"]
                used = [when for info in infos for when, _ in info.uses if node.start <= when <= node.stop]
                if used and not any(info.writes for info in infos) and f"{node.path}.{name}" not in at_first:
                    reason = f"the state '{node.path}.{name}' is changed in some forwards and used on both sides"
                    self.forbid(no_cut, self.zone(min(used)), self.zone(node.stop), reason)

    def forbid_shared_weights(self, no_cut: dict[int, str]) -> None:
        """Parameters, or a parameter and a buffer, that are different objects over the same memory."""
        model = self.recording.model
        zones: dict[int, set[int]] = defaultdict(set)
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                names[storage_of(parameter)].append(name)
                zones[storage_of(parameter)] |= {self.zone(when) for when, _ in self.recording.parameter_uses[name]}
        for info in self.recording.infos:
            if info.foreign and info.storage in names and info.uses:
                names[info.storage].append(info.foreign)
                zones[info.storage] |= {self.zone(when) for when, _ in info.uses}
        for storage, found in names.items():
            if len(found) > 1 and zones[storage]:
                reason = f"{found[0]!r} and {found[1]!r} share memory without being one parameter"
                self.forbid(no_cut, min(zones[storage]), max(zones[storage]), reason)

    def forbid_hooked(self, no_cut: dict[int, str]) -> None:
        """Where a hook has to see the whole gradient of a parameter, or of a tensor, its users are one stage."""
        recording = self.recording
        zones = {name: {self.zone(when) for when, _ in uses} for name, uses in recording.parameter_uses.items()}
        shared = [one for one in recording.model.named_parameters() if len(zones.get(one[0], ())) > 1]
        for name, hook in hooked(recording.model, shared).items():
            self.forbid(no_cut, min(zones[name]), max(zones[name]), refusal(name, hook, "on both sides"))
        for number, when in recording.hooked:
            info, here = recording.infos[number], self.zone(when)
            if {self.zone(use) for use, _ in info.uses} - {here}:
                reason = (
                    f"a hook is put on the gradient of the tensor {info.names[0][1]!r}, which is used on both sides"
                )
                self.forbid(no_cut, self.zone(info.made), here, reason)

    def forbid_attributes(self, no_cut: dict[int, str]) -> set[str]:
        """A module attribute must stay with whoever reads a change of it; the modules to keep open for those who can.

        A change in glue code happens on its own rank and on all later ones; one inside a layer only where that runs.
        """
        keep_open = set()
        after = {} if self.following is None else {one.name: one for one in self.following.recording.attributes}
        for item in self.recording.attributes:
            fresh = self.returns(item) or self.starts_anew(after.get(item.name, item))
            for (when, _), number in self.recording.slots[id(item)] if fresh else ():
                zones = [self.zone(when), *(self.zone(use) for use, _ in self.recording.infos[number].uses)]
                reason = f"what {item.name!r} holds is replaced in the forward and used on both sides"
                self.forbid(no_cut, min(zones), max(zones), reason)
            for when, node in (*item.reads, *item.writes):
                keep_open |= {self.nodes[one].path for one in self.heads(when, node)}
            for when, node in item.writes:
                here, layer = self.zone(when), self.layer_around(node)
                inside = layer is not None and item.owner not in self.nodes[layer].given and not item.is_told
                for read, _ in item.reads:
                    there = self.zone(read)
                    if (there < here and not fresh) or (inside and there > here):
                        reason = f"the attribute {item.name!r} is changed in the forward and read on both sides"
                        may_end = not inside and layer is None
                        for k in range(min(here, there) + 1, max(here, there) + 1):
                            if not (may_end and self.is_foretold(item, k)):
                                self.forbid(no_cut, k - 1, k, reason)
                    elif there > here and node >= 0:
                        around = [node, *self.ancestors(node)] if layer is None else self.ancestors(layer)
                        keep_open |= {self.nodes[one].path for one in around if self.nodes[one].stop < read}
        return keep_open

    def is_foretold(self, item: Changed, k: int) -> bool:
        """Whether a stage that ends before layer k can tell what the rest of the forward makes of an attribute."""
        name = item.name.rpartition(".")[2]
        if self.chosen[k] in self.recording.foretold.get((item.owner, name), ()):
            return True
        return item.name in self.named and self.holds_as_foretold(item.name, k)

    def holds_as_foretold(self, buffer: str, k: int) -> bool:
        """The same of what a buffer holds."""
        path, _, name = buffer.rpartition(".")
        table = self.recording.model.get_submodule(path)._buffers
        return k < len(self.chosen) and self.chosen[k] in self.recording.foretold.get((id(table), name), ())

    def attributes(self, ids: list[str]) -> tuple[Attribute, ...]:
        """What was read or changed of Python state, but for that of modules which a layer has for itself."""
        reads: dict[str, set[int]] = defaultdict(set)
        writes: dict[str, set[int]] = defaultdict(set)
        inside: dict[str, set[int]] = defaultdict(set)
        returns: dict[str, bool] = {}
        set_first: dict[str, bool] = {}
        foretold: set[str] = set()
        for item in self.recording.held:
            if any(self.is_foretold(item, k) for k in range(1, len(self.chosen))):
                foretold.add(item.name)
            if item.writes:
                returns[item.name] = self.returns(item) and returns.get(item.name, True)
            set_first[item.name] = item.is_set_first and set_first.get(item.name, True)
            reads[item.name] |= {self.zone(when) for when, _ in item.reads}
            writes[item.name] |= {zone for when, node in item.writes for zone in self.zones_of(when, node)}
            inside[item.name] |= {self.zone(when) for when, node in item.writes if self.layer_around(node) is not None}
        for info in self.recording.infos:
            if info.kept_as and info.writes:
                reads[info.kept_as] |= {self.zone(when) for when, _ in info.uses}
                writes[info.kept_as] |= set(map(self.zone, info.writes))
        own = {self.nodes[number].path: k for k, number in enumerate(self.chosen)}
        found = []
        for name, zones in reads.items():
            zones = zones | writes[name]
            parts = name.split(".")
            above = (".".join(parts[:k]) for k in range(1, len(parts)))
            kept_inside = len(zones) == 1 and not writes[name] and any(own.get(path) in zones for path in above)
            if zones and not kept_inside:
                writers = tuple(ids[k] for k in sorted(writes[name]))
                one = Attribute(name=name, first=ids[min(zones)], last=ids[max(zones)], writers=writers)
                layers = tuple(ids[k] for k in sorted(inside[name]))
                more = {
                    "adds": self.recording.adds.get(name, (0, 0)),
                    "returns": returns.get(name, False),
                    "set_first": set_first.get(name, False),
                    "inside": layers,
                    "foretold": name in foretold,
                }
                found.append(one.model_copy(update=more))
        for name, outside in self.recording.outside.items():
            zones = {self.zone(when) for when, _ in outside.writes}
            own_zones = {self.zone(when) for when, node in outside.writes if self.layer_around(node) is not None}
            writers, by_layers = (tuple(ids[k] for k in sorted(ks)) for ks in (zones, own_zones))
            found.append(Attribute(name=name, writers=writers, inside=by_layers))
        return tuple(found)

    def zones_of(self, when: int, node: int) -> set[int]:
        """Layers with which code runs: where a checkpoint has begun and come to no layer yet, also the next one."""
        zone = self.zone(when)
        begun = any(region.entered <= when <= region.left for region in self.recording.regions)
        return {zone, min(zone + 1, len(self.chosen) - 1)} if begun and self.heads(when, node) else {zone}

    def returns(self, item: Changed) -> bool:
        """Whether code between layers alone changes it, and its value at the end is known at the start."""
        is_known = item.returns or item.name in self.recording.adds
        return is_known and all(self.layer_around(node) is None for _, node in item.writes)

    def starts_anew(self, item: Changed) -> bool:
        """Whether a forward reads nothing of what the one before changed of it, or tensors that are seen one by one."""
        emptied = item.emptied is not None and self.layer_around(item.emptied[1]) is None
        return (
            item.is_new
            or emptied
            or item.is_set_first
            or (item.has_only_slots and bool(item.content) and not item.is_on_module)
        )

    def forbid_outside(self, no_cut: dict[int, str], ids: list[str]) -> None:
        """A global or the like must stay with all code that leads to it: when that reads it is not seen."""
        changed = defaultdict(list)
        for name, one in self.recording.outside.items():
            if one.is_plain:
                changed[one.kind, one.name].append((name, one))
        if not changed:
            return
        masks = Masks(ids, {name: k for k, name in enumerate(ids)})
        reach = Reach(self.recording.model, masks.of, self.recording.loss, sinks=self.recording.sinks)
        for place in reach.places.values():
            for name, outside in changed.get((place.kind, place.name), ()):
                zones = [k for k in range(len(ids)) if place.readers_of(outside.key) >> k & 1]
                written = [self.zone(when) for when, _ in outside.writes]
                before = min(zones, default=len(ids)) < max(written)  # else the change is told to those who come after
                if before or (zones and place.kind == "sequence"):  # or is added to what those have written themselves
                    zones += written
                    reason = f"{name!r}, outside of the model, is changed in the forward and may be read on both sides"
                    self.forbid(no_cut, min(zones), max(zones), reason)

    def forbid_uncalled(self, no_cut: dict[int, str]) -> None:
        """Where values decide how many layers of a list are called: those left out may yet be called between the last
        one that was, and the next one or the end of the module that holds the list; that must be one stage."""
        if not self.recording.decisions and not self.recording.sizes_depend:
            return
        calls: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for k, letter in enumerate(f"{node.path}."):
                if letter == ".":
                    calls[node.path[:k]].append(node)
        for path, module in self.recording.model.named_modules():
            if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
                continue
            owner = path
            while owner and not any(node.path == owner for node in calls[owner]):
                owner = owner.rpartition(".")[0]
            called = [node for node in self.nodes if node.path == owner]
            last: Node | None = None
            left_out = ""
            for name, child in module.named_children():
                inside = f"{path}.{name}" if path else name
                if calls[inside]:
                    if left_out and last is not None:
                        self.forbid_around(no_cut, last, calls[inside][0].start - 1, left_out)
                    last, left_out = calls[inside][-1], ""
                elif any(True for _ in child.parameters()):
                    left_out = left_out or inside
            if left_out and last is not None and called:
                self.forbid_around(no_cut, last, max(node.stop for node in called), left_out)

    def forbid_around(self, no_cut: dict[int, str], last: Node, until: int, left_out: str) -> None:
        reason = f"{left_out} was not called this time, and may be called on either side"
        self.forbid(no_cut, self.zone(last.stop), self.zone(until), reason)

    def forbid_regions(self, no_cut: dict[int, str]) -> None:
        """No cut inside a checkpoint; one just before it is possible, unless code runs in it before its first layer."""
        for region in self.recording.regions:
            first = min((start for start in self.starts if region.entered < start < region.left), default=region.left)
            if region.first_function:
                first = min(first, region.first_function)
            reason = "one checkpoint runs the code on both sides"
            self.forbid(no_cut, self.zone(first), self.zone(region.left), reason)

    # -- parameters and keys

    def parameters(self, ids: list[str]) -> tuple[Parameter, ...]:
        model, uses = self.recording.model, self.recording.parameter_uses
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
        self.own_unused(owners)
        return tuple(
            Parameter(
                names=tuple(names[number]),
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                bytes=parameter.numel() * parameter.element_size(),
                trainable=parameter.requires_grad,
                layers=tuple(ids[k] for k in sorted(owners[number])),
                written="every" if names[number][0] in self.recording.parameter_writes else "",
            )
            for number, parameter in tensors.items()
        )

    def buffers(self, ids: list[str]) -> tuple[Buffer, ...]:
        """Those that layers use: by themselves, by code between them, or as a part of their modules.

        What no layer was seen to use may be read by a loss function; special kinds of tensors cannot be replaced.
        """
        model = self.recording.model
        names: dict[int, list[str]] = defaultdict(list)
        tensors: dict[int, torch.Tensor] = {}
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if type(buffer) is torch.Tensor and buffer.layout == torch.strided:
                names[id(buffer)].append(name)
                tensors[id(buffer)] = buffer
        number_of = {name: number for number, mine in names.items() for name in mine}
        owners: dict[int, set[int]] = defaultdict(set)
        by_layers: set[int] = set()
        """And those that a forward writes into."""
        at = {storage_of(buffer): number for number, buffer in tensors.items() if not buffer.is_meta}
        for info in self.recording.infos:
            number = number_of.get(info.foreign, at.get(info.storage) if info.foreign == "attribute" else None)
            if number is None:  # neither a buffer nor a view of one that is kept
                continue
            owners[number] |= {self.zone(when) for when, _ in info.uses}
            written = info.writes or info.foreign in self.recording.written_at_first
            if written or any(self.layer_around(node) is not None for _, node in info.uses):
                by_layers.add(number)
        for number, mine in owners.items():  # a number that code between layers reads, such code may come to change
            if mine and number not in by_layers and tensors[number].numel() == 1:
                mine |= set(range(min(mine), len(self.chosen)))
        for k, chosen in enumerate(self.chosen):
            for buffer in model.get_submodule(self.nodes[chosen].path).buffers():
                owners[id(buffer)].add(k)
        return tuple(
            Buffer(
                names=tuple(names[number]),
                bytes=tensor_nbytes(buffer),
                layers=tuple(ids[k] for k in sorted(owners[number])),
            )
            for number, buffer in tensors.items()
            if owners[number]
        )

    def own_unused(self, owners: dict[int, set[int]]) -> None:
        """A parameter that was not used belongs to the layers of those in whose place it may be used.

        Those are entries of the same dict under other keys (`adapters["b"][0]` where `adapters["a"][0]` was used), or
        the others of a ParameterDict or ParameterList. Without such, to the layer after which its module stands.
        """
        model = self.recording.model
        modules = dict(model.named_modules())
        used = {
            name: owners[id(one)] for name, one in model.named_parameters(remove_duplicate=False) if owners[id(one)]
        }
        last_call = {self.nodes[number].path: k for k, number in enumerate(self.chosen)}
        before = 0
        for path, module in modules.items():
            before = last_call.get(path, before)
            for key, parameter in module._parameters.items():
                if parameter is not None and not owners[id(parameter)]:
                    alike = _used_like(f"{path}.{key}" if path else key, modules, used)
                    owners[id(parameter)] |= alike or {before}

    def keys(self) -> list[tuple[str, float]]:
        kernels = self.recording.kernels
        found = []
        for k, number in enumerate(self.chosen):
            node = self.nodes[number]
            end = self.nodes[self.chosen[k + 1]].first_kernel if k + 1 < len(self.chosen) else len(kernels)
            mine = kernels[node.first_kernel : end]
            if k == 0:
                mine = [kernel for kernel in kernels[: node.first_kernel] if not kernel[0].startswith("call ")] + mine
            text = "\n".join(name for name, _, _ in mine)
            requires = [p.requires_grad for p in self.recording.model.get_submodule(node.path).parameters()]
            state = f"{node.class_name} {requires} {torch.is_autocast_enabled('cpu')}"
            digest = hashlib.sha256(f"{state}\n{text}".encode()).hexdigest()[:16]
            found.append((digest, sum(flops for _, flops, _ in mine)))
        return found


def _used_like(name: str, modules: Mapping[str, nn.Module], used: Mapping[str, set[int]]) -> set[int]:
    """Layers that use what stands under other keys of the innermost dict or list that a parameter is in.

    Of a dict's entries the nearest before it, else the nearest after it: a dict may also hold what runs one by one.
    """
    parts = name.split(".")
    for k in reversed(range(len(parts))):
        around = modules[".".join(parts[:k])]
        if isinstance(around, nn.ModuleDict):
            keys = list(around)
            at = keys.index(parts[k])
            for key in (*reversed(keys[:at]), *keys[at + 1 :]):
                if found := used.get(".".join([*parts[:k], key, *parts[k + 1 :]])):
                    return found
        elif isinstance(around, (nn.ParameterDict, nn.ParameterList)):
            others = (used.get(".".join([*parts[:k], key]), ()) for key in around._parameters if key != parts[k])
            if found := set().union(*others):
                return found
    return set()
