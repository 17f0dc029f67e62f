"""Run a forward once and write down everything that deciding about cuts needs: calls, tensors, writes, state.

Every module call is watched at every depth, so that the choice of layers can come afterwards (see `capture`). Time is a
count of operations, the clock; a place is (clock, innermost call).
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from partitioner.attributes import Attribute, Attributes, Left, Outside, Place
from partitioner.ending import Content, Foretold, Key, foretold
from partitioner.errors import UnsupportedModelError
from partitioner.logbook import (
    Arguments,
    Encoder,
    is_sendable,
    is_unsure_in,
    left_name,
    num_passed,
    sizes,
    version,
    withheld_in,
)
from partitioner.losses import Compared, LossFunction
from partitioner.restore import modes, random_states
from partitioner.sinks import NONE, Sinks
from partitioner.structures import is_same, map_tensors, storage_of, tensors_in
from partitioner.tracing import HOST_READS, RETURNED, Watcher, hook_name, in_transform, may_draw, sets_nothing, watching
from partitioner.written import parameters_kept, written_by

ROOT = "(whole model)"
"""Layer id of a model that cannot be opened at all."""

FUNCTIONS = ("function", "method", "partial")


@dataclass
class Node:
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
    whole: str = ""
    """Why it must not be opened; empty where it may."""
    hooks: set[str] = field(default_factory=set)
    """Its forward hooks by name."""
    given: set[int] = field(default_factory=set)
    """Objects and containers among its arguments, by their ids: what it changes of them is told to later stages."""
    passes: int = 0
    """How many of the tensors that it returned it had been given."""
    collected: list[int] = field(default_factory=list)
    """Tensors that its hooks kept."""
    is_unsure: bool = False
    """Whether it returned an object that later ranks may not be able to build: where they can, they run its code."""
    returns_function: bool = False
    """Whether it returned a function, which may call layers when it is called."""


@dataclass
class Info:
    """One tensor, or one value of a tensor that is changed in place."""

    names: list[tuple[int, str]]
    made: int
    node: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    needs_gradient: bool
    sendable: bool
    parents: tuple[int, ...] | None
    """What it was made from, so that every rank can make it where it has those; None: from parameters or at random."""
    pure: bool
    """Made from inputs and constants alone."""
    storage: int
    memory: int
    """Number of the memory that it shares with others."""
    memory_nbytes: int
    uses: list[Place] = field(default_factory=list)
    foreign: str = ""
    """Buffer or attribute that lives outside of the forward."""
    kept_as: str = ""
    """What a tensor in an attribute is called on every rank."""
    handed_out: list[tuple[int, int, str]] = field(default_factory=list)
    """(call, operation, name) where a call returned it that was not given it: to later ranks it is another tensor."""
    writes: list[int] = field(default_factory=list)
    """Operations that changed it in place."""
    left_by: set[int] = field(default_factory=set)
    """Calls that have made it and left it in Python state."""
    is_silent: bool = False
    """Whether torch's version counter does not tell of one of them."""


@dataclass(frozen=True)
class Write:
    """One in-place change: every tensor alive that shares the storage."""

    when: int
    aliases: tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """A stretch of the forward that no cut may go through."""

    start: int
    stop: int
    reason: str


@dataclass
class Region:
    """One run of a checkpoint."""

    entered: int
    first_function: int = 0
    left: int = 0


@dataclass
class Recording:
    """One forward: `order` is the sequence of calls; kernels are (description, FLOPs, bytes moved)."""

    model: nn.Module
    loss: LossFunction | None = None
    """What is made of the output, where that is the user's."""
    nodes: list[Node] = field(default_factory=list)
    infos: list[Info] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    kernels: list[tuple[str, float, float]] = field(default_factory=list)
    parameter_uses: dict[str, list[Place]] = field(default_factory=lambda: defaultdict(list))
    parameter_writes: dict[str, list[Place]] = field(default_factory=lambda: defaultdict(list))
    attributes: list[Attribute] = field(default_factory=list)
    """That the forward changed."""
    held: list[Attribute] = field(default_factory=list)
    """All that it read or changed."""
    adds: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By name, of whole numbers to which every forward adds the same: how much, in training and in evaluation."""
    slots: dict[int, list[tuple[Place, int]]] = field(default_factory=dict)
    """By the id of an attribute: tensors kept in it from before the forward that were replaced, and where."""
    sinks: Sinks = NONE
    """What code of the model only writes."""
    outside: dict[str, Outside] = field(default_factory=dict)
    """What it changed outside of the model, in globals and the like."""
    order: list[str] = field(default_factory=list)
    collecting: set[str] = field(default_factory=set)
    """Hooks that kept tensors for later."""
    decisions: list[int] = field(default_factory=list)
    """Calls in which values that not every rank has were brought to Python, or Python's random numbers were drawn."""
    sizes_depend: bool = False
    """Whether what some tensors hold decides how large others are."""
    moments: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Moment -> how many torch functions ran then, the call that they ran in, and a checksum of their names."""
    clock: int = 0
    written_at_first: set[str] = field(default_factory=set)
    """Buffers that the forward before this one wrote into."""
    gradients_read: list[str] = field(default_factory=list)
    """Parameters whose gradients the forward asks for."""
    hooked: list[tuple[int, int]] = field(default_factory=list)
    """Tensors on whose gradients hooks were put, or whose gradients were kept, and when."""
    foretold: dict[Key, set[int]] = field(default_factory=dict)
    """By holder and name, the calls at whose beginning it could be told what the rest of the forward makes of it."""


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    tell_new: bool = False,
    loss: Compared | None = None,
) -> Recording:
    """Run `model(*args, **kwargs)`, gradients on. What it changes is the caller's to give back.

    `tell_new`: see `Attributes`. `loss`: what is made of the output; what it reads besides, the last layer's stage has.
    """
    recorder = _Recorder(model)
    recorder.recording.loss = None if loss is None else loss.loss.function
    recorder.note_inputs((args, dict(kwargs)))
    attributes = Attributes(model, lambda: recorder.place, tell_new=tell_new, loss=recorder.recording.loss)
    recorder.recording.sinks = attributes.sinks
    held = attributes.tensors()
    recorder.kept = {id(tensor): tensor for _, tensor in held if tensor.grad_fn is not None}
    recorder.kept_as = {id(tensor): name for name, tensor in held[::-1]}
    recorder.poll, recorder.left_since = attributes.poll, attributes.left_since
    stance = torch.compiler.set_stance("force_eager")
    states = random_states()
    with stance, torch.enable_grad(), watching(recorder), attributes.watched():
        with _Kernels(recorder):
            output = model(*args, **dict(kwargs))
        recorder.note_output(output)
        if loss is not None:
            recorder.note_loss(loss, output)
        recorder.note_end()
        recorder.note_foretold()
        del output
    if random_states() != states:
        recorder.recording.decisions.append(-1)
        with torch._C.DisableTorchFunction():
            attributes.poll()
    recorder.recording.held, recorder.recording.outside = attributes.all(), attributes.outside
    recorder.recording.attributes = [item for item in recorder.recording.held if item.writes]
    for item in recorder.recording.attributes:
        found = [(here, recorder.find(old)) for here, old, _ in item.slots]
        recorder.recording.slots[id(item)] = [(here, number) for here, number in found if number is not None]
        item.slots = []
    return recorder.recording


def warm_up(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Compared | None = None) -> None:
    """Run it once unseen, since what a first forward leaves in caches outside of the model cannot be given back."""
    with torch.enable_grad(), parameters_kept(model):
        output = model(*args, **dict(kwargs))
        if loss is not None:
            loss(output)


class _Recorder(Watcher):
    def __init__(self, model: nn.Module) -> None:
        super().__init__({module: name for name, module in model.named_modules()})
        self.recording = Recording(model)
        self.stack: list[int] = []
        self.live: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.sharing: dict[int, dict[int, weakref.ref[torch.Tensor]]] = defaultdict(dict)
        """Storage -> the living tensors over it, by number."""
        self.parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self.parameter_storages = {storage_of(parameter): name for name, parameter in model.named_parameters()}
        self.buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        self.own = self.parameters | self.buffers
        self.held = [*model.parameters(), *model.buffers()]
        """So that no other tensor is given the id of one that the forward replaces."""
        self.kept: dict[int, torch.Tensor] = {}
        """Tensors with a graph of an earlier forward that the model keeps, by their ids."""
        self.kept_as: dict[int, str] = {}
        """Names of what the model keeps in attributes, likewise."""
        self.told: dict[int, Foretold] = {}
        """By call, what could be foretold at its beginning."""
        self.num_memories = 0
        self.regions: list[Region] = []
        """Checkpoints around."""
        self.returned: dict[int, int] = {}
        """Functions that transforms returned, by their ids: when."""
        self.poll: Callable[[], None] = lambda: None
        self.left_since: Callable[[int], list[Left]] = lambda when: []
        self.switched: list[tuple[int, tuple[Any, ...]]] = []
        """Calls that left modes of torch other than they were: when they began, and the modes before."""
        self.on_threads: set[str] = set()
        """Modules that were called on other threads."""
        self.inside: list[int | None] = []
        """What the running transform has used: tensors by number, None for parameters and chance."""

    @property
    def place(self) -> Place:
        return (self.recording.clock, self.stack[-1] if self.stack else -1)

    # -- tensors

    def find(self, tensor: torch.Tensor) -> int | None:
        entry = self.live.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def add(self, tensor: torch.Tensor, name: str, parents: tuple[int, ...] | None, foreign: str = "") -> int:
        number, (clock, node) = len(self.recording.infos), self.place
        self.recording.infos.append(
            Info(
                names=[(clock, name)],
                made=clock,
                node=node,
                shape=sizes(tensor),
                dtype=tensor.dtype,
                nbytes=tensor_nbytes(tensor),
                needs_gradient=tensor.requires_grad,
                sendable=is_sendable(tensor),
                parents=parents,
                pure=parents is not None and all(self.recording.infos[parent].pure for parent in parents),
                storage=storage_of(tensor),
                memory=self.memory_of(tensor),
                memory_nbytes=_memory_nbytes(tensor),
                foreign=foreign,
                kept_as=self.kept_as.get(id(tensor), "") if foreign == "attribute" else "",
            )
        )
        key, storage = id(tensor), self.recording.infos[number].storage

        def forget(reference: weakref.ref[torch.Tensor]) -> None:
            self.sharing[storage].pop(number, None)
            if key in self.live and self.live[key][0] is reference:
                del self.live[key]

        earlier = self.find(tensor)
        if earlier is not None:
            self.sharing[self.recording.infos[earlier].storage].pop(earlier, None)
        self.live[key] = (weakref.ref(tensor, forget), number)
        self.sharing[storage][number] = self.live[key][0]
        return number

    def aliases(self, storage: int) -> list[tuple[int, torch.Tensor]]:
        """The living tensors over a storage, with their numbers."""
        found = [(number, reference()) for number, reference in list(self.sharing[storage].items())]
        return [(number, tensor) for number, tensor in found if tensor is not None]

    def memory_of(self, tensor: torch.Tensor) -> int:
        """A number for the tensor's storage; torch gives the address of one that is gone to the next."""
        known = self.aliases(storage_of(tensor))
        if known:
            return self.recording.infos[known[0][0]].memory
        self.num_memories += 1
        return self.num_memories

    def use(self, tensor: torch.Tensor) -> int | None:
        """Note that the running operation reads `tensor`; its number, None for a parameter."""
        name = self.parameters.get(id(tensor))
        if name is not None:
            uses = self.recording.parameter_uses[name]
            if not uses or uses[-1] != self.place:
                uses.append(self.place)
            return None
        number = self.find(tensor)
        if number is None:
            number = self.add_unannounced(tensor)
        self.recording.infos[number].uses.append(self.place)
        return number

    def add_unannounced(self, tensor: torch.Tensor) -> int:
        """A tensor that no function was seen to make: it was there before, or came past torch's functions."""
        inner = _inside_transform(tensor)
        if inner is not None:
            outer = self.use(inner)
            return self.add(tensor, "transformed", None if outer is None else (outer,))
        if id(tensor) in self.buffers:
            return self.add(tensor, "buffer", None, self.buffers[id(tensor)])
        base = [number for number, _ in self.aliases(storage_of(tensor))]
        if base and self.recording.infos[base[0]].foreign:
            return self.add(tensor, "constant", self.recording.infos[base[0]].parents, "attribute")
        if id(tensor) in self.kept:
            return self.add(tensor, "constant", None, "attribute")
        if tensor.grad_fn is not None or (base and not self.recording.infos[base[0]].pure):
            reason = (
                "a tensor is made before it in a way that torch does not announce (as_subclass, dlpack, extensions)"
            )
            if self.on_threads:
                names = ", ".join(sorted(self.on_threads))
                reason = f"the model calls layers ({names}) on threads of its own, where they cannot be followed"
            self.recording.spans.append(Span(self.recording.clock, sys.maxsize, reason))
            return self.add(tensor, f"{self.moment}/unannounced", None)
        return self.add(tensor, "constant", None if tensor.requires_grad else (), "attribute")

    def note_inputs(self, inputs: Any) -> None:
        for k, tensor in enumerate(tensors_in(inputs)):
            if self.find(tensor) is None and id(tensor) not in self.parameters:
                self.add(tensor, f"input:{k}", ())

    def note_output(self, output: Any) -> None:
        """What is returned is used; of what other objects in it hold (a cache of keys and values) the loss tells."""
        with torch._C.DisableTorchFunction():
            for tensor in tensors_in(output):
                self.use(tensor)

    def note_loss(self, loss: Compared, output: Any) -> None:
        """Run the loss, which the last stage alone does: what it reads is seen, what it decides is its own affair."""
        decisions = len(self.recording.decisions)
        self.at("(loss)")
        loss(output)
        del self.recording.decisions[decisions:]
        self.recording.moments.pop("(loss)", None)
        with torch._C.DisableTorchFunction():
            self.poll()

    def note_foretold(self) -> None:
        """Compare what was foretold at each call with what came."""
        found: dict[Key, set[int]] = defaultdict(set)
        with torch._C.DisableTorchFunction():
            for number, told in self.told.items():
                for key, (holder, name, value) in told.items():
                    table = holder if type(holder) is dict else vars(holder)
                    if name in table and _is_as_foretold(table[name], value):
                        found[key].add(number)
        self.recording.foretold = dict(found)

    def note_end(self) -> None:
        for start, _ in self.switched:
            reason = "a layer switches a mode of torch (gradients, autocast) and nothing after it switches back"
            self.recording.spans.append(Span(start, sys.maxsize, reason))

    # -- what happens

    def on_transform(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One function, that every rank runs itself where all it uses inside comes from the inputs."""
        self.recording.clock += 1
        moment = self.next_name()
        names = self.named_functions(name)
        self.recording.moments[self.moment] = (self.num_functions, self.stack[-1] if self.stack else -1, names)
        self.inside = []
        self.use_inside(args, kwargs)
        self.in_custom = True
        try:
            with self.functions:
                result = run(*args, **kwargs)
        finally:
            self.in_custom = False
        if RETURNED in name:
            self.inside.append(None)
            reason = "a function that a transform returned is called on the other side"
            self.recording.spans.append(Span(self.returned.get(id(run), 0), self.recording.clock, reason))
        self.returned |= {id(part): self.recording.clock for part in result} if type(result) is tuple else {}
        alone = None in self.inside
        parents = None if alone else tuple(dict.fromkeys(n for n in self.inside if n is not None))
        encoder = Encoder(Arguments(args, kwargs), self.own)
        encoder(result)
        for k, tensor in enumerate(encoder.tensors):
            if self.find(tensor) is None:
                mine = None if tensor.requires_grad else parents
                self.add(tensor, moment if k == 0 else f"{moment}:{k}", mine)
        return result

    def on_hook(self, tensor: torch.Tensor) -> None:
        number = self.find(tensor)
        if number is not None:
            self.recording.hooked.append((number, self.recording.clock))

    def on_gradient_read(self, parameter: nn.Parameter) -> None:
        name = self.parameters.get(id(parameter))
        if name is not None and parameter.requires_grad:
            self.recording.gradients_read.append(name)

    def use_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what is used of things made outside; what a transform makes for itself is not known."""
        for tensor in tensors_in((args, kwargs)):
            inner: torch.Tensor | None = tensor
            while inner is not None:
                known = id(inner) in self.own or self.find(inner) is not None
                if known:
                    self.inside.append(None if inner.requires_grad else self.use(inner))
                    self.inside += [self.use(inner)] if inner.requires_grad else []
                inner = _inside_transform(inner)

    def on_hidden_apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.use_inside(args, kwargs)
        self.inside.append(None)

    def on_function(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.in_custom:
            self.use_inside(args, kwargs)
            if may_draw(name, func):
                self.inside.append(None)
            return func(*args, **kwargs)
        self.recording.clock += 1
        for region in self.regions:
            region.first_function = region.first_function or self.recording.clock
        moment = self.next_name()
        names = self.named_functions(name)
        self.recording.moments[self.moment] = (self.num_functions, self.stack[-1] if self.stack else -1, names)
        given = tensors_in((args, kwargs))
        numbers = [self.use(tensor) for tensor in given]
        drawn = may_draw(name, func)
        alone = drawn or None in numbers or any(tensor.requires_grad for tensor in given)
        parents = None if alone else tuple(number for number in numbers if number is not None)
        if in_transform() and not all(n is not None and self.recording.infos[n].pure for n in numbers):
            self.note_transform()
        if name in ("grad", "backward"):
            self.note_gradient(name, args, kwargs)
        before = [version(tensor) for tensor in given]
        if name in HOST_READS and any(tensor.is_meta for tensor in given):
            raise UnsupportedModelError(
                f"the forward reads values with {name} after {self.moment}, and on the meta device there are none: "
                f"take a model with weights, or inputs with which it reads none"
            )
        result = func(*args, **kwargs)
        if name in HOST_READS:
            if not all(n is not None and self.recording.infos[n].pure for n in numbers):
                self.recording.decisions.append(self.place[1])
            self.recording.kernels.append((f"host read {len(self.recording.kernels)} of {moment}", 0.0, 0.0))
            return result
        for k, (tensor, old) in enumerate(zip(given, before, strict=True)):
            moved = k == 0 and name == "set data" and not sets_nothing(given)
            if id(tensor) not in self.parameters:
                if moved or old != version(tensor):
                    self.written(tensor, moment, parents)
            elif moved:
                self.parameter_storages[storage_of(tensor)] = self.parameters[id(tensor)]
                self.note_parameter_written(self.parameters[id(tensor)])
        encoder = Encoder(Arguments(args, kwargs), self.own)
        encoder(result)
        for k, tensor in enumerate(encoder.tensors):
            if self.find(tensor) is None:
                self.add(tensor, moment if k == 0 else f"{moment}:{k}", parents)
        return result

    def note_modes(self) -> tuple[Any, ...]:
        """Those of torch now; calls after which they were others belong with all until they are as before again."""
        now = modes()
        for start, before in [one for one in self.switched if one[1] == now]:
            self.switched.remove((start, before))
            reason = "a layer switches a mode of torch (gradients, autocast) that holds beyond it"
            self.recording.spans.append(Span(start, self.recording.clock, reason))
        return now

    def note_transform(self) -> None:
        """Under way over tensors that not every rank has, outside of one call: later ranks must skip the module."""
        if len(self.stack) > 1:
            self.recording.nodes[self.stack[-1]].whole = "a transform or forward-mode derivative is inside"
        else:
            self.recording.spans.append(
                Span(self.recording.clock - 1, sys.maxsize, "a transform or forward-mode derivative runs before it")
            )

    def note_gradient(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A gradient taken inside the forward: from where its variables were made to here is one piece."""
        if name == "grad":
            variables = tensors_in(args[1:2] or kwargs.get("inputs"))
        else:
            variables = _graph_leaves(tensors_in(args[:1] or kwargs.get("tensors")))
        starts = []
        for tensor in variables:
            number = self.find(tensor)
            uses = self.recording.parameter_uses.get(self.parameters.get(id(tensor), ""), [(0, -1)])
            starts.append(self.recording.infos[number].made if number is not None else uses[0][0])
        reason = "a gradient is taken inside the forward, through the layers on both sides"
        self.recording.spans.append(Span(min(starts, default=0), self.recording.clock, reason))

    def on_other_thread(self, path: str) -> None:
        self.on_threads.add(path)

    def on_hidden_call(self, module: nn.Module) -> None:
        """What a custom Function calls inside is no layer: the module around it is."""
        if in_transform():
            for tensor in (*module.parameters(), *module.buffers()):
                self.use(tensor)
                self.inside.append(None)
        elif len(self.stack) > 1:
            self.recording.nodes[self.stack[-1]].whole = "an autograd Function calls its layers"

    def on_checkpoint(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A reentrant checkpoint: its inside is watched, but no cut may go through it."""
        if self.in_custom:
            return run(*args, **kwargs)

        def run_region(*args: Any, **kwargs: Any) -> Any:
            self.enter_region()
            try:
                return run(*args, **kwargs)
            finally:
                self.leave_region()

        return self.on_function("apply CheckpointFunction", run_region, args, kwargs)

    def on_region(self, what: str) -> None:
        if what == "entered":
            self.enter_region()
        elif what == "left":
            self.leave_region()

    def enter_region(self) -> None:
        self.recording.clock += 1
        self.regions.append(Region(self.recording.clock))

    def leave_region(self) -> None:
        region = self.regions.pop()
        region.left = self.recording.clock
        self.recording.regions.append(region)

    def written(self, tensor: torch.Tensor, moment: str, parents: tuple[int, ...] | None) -> None:
        """`tensor` was changed in place: it, and everything alive that looks at the same storage, has a new value."""
        infos, known = self.recording.infos, self.find(tensor)
        same = self.aliases(storage_of(tensor))
        if known is not None and all(number != known for number, _ in same):  # its data was replaced
            same.append((known, tensor))
        self.recording.writes.append(Write(self.recording.clock, tuple(number for number, _ in same)))
        for number, alive in same:
            old = infos[number]
            old.writes.append(self.recording.clock)
            if not old.foreign:
                both = None if parents is None else (*parents, number)
                self.add(alive, f"{old.names[-1][1].split('@')[0]}@{moment}", both)

    def note_parameter_written(self, name: str) -> None:
        for places in (self.recording.parameter_uses[name], self.recording.parameter_writes[name]):
            places.append(self.place)

    def note_statistics(self, tensor: torch.Tensor) -> None:
        number = self.find(tensor)
        if number is not None:
            self.recording.infos[number].writes.append(self.recording.clock)
            self.recording.infos[number].is_silent = True

    def on_call(
        self, path: str, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        recording, given = self.recording, Arguments(args, kwargs)
        for tensor in given.tensors:
            if id(tensor) not in self.parameters and self.find(tensor) is None:
                self.add_unannounced(tensor)
        with torch._C.DisableTorchFunction():
            self.poll()
            before = self.note_modes()
        recording.clock += 1
        call_id = self.enter(path) if path else ROOT
        recording.order.append(call_id)
        node = Node(
            id=call_id,
            path=path,
            class_name=type(module).__name__,
            parent=self.stack[-1] if self.stack else None,
            start=recording.clock,
            first_kernel=len(recording.kernels),
            given=set(map(id, given.objects)),
        )
        number = len(recording.nodes)
        recording.nodes.append(node)
        if node.parent is not None:
            recording.nodes[node.parent].children.append(number)
            if in_transform():
                self.note_transform()
        compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        if compiled or isinstance(module, torch.jit.ScriptModule):
            node.whole = "it is compiled"
        elif module._backward_hooks or module._backward_pre_hooks:
            node.whole = "a backward hook is on it"
        with torch._C.DisableTorchFunction():
            self.told[number] = foretold()
        self.stack.append(number)
        self.at(f">{call_id}")
        recording.kernels.append((f"call {type(module).__name__} {module.training}", 0.0, 0.0))
        try:
            with self.hooks_watched(module, node):
                result = run(*args, **kwargs)
        finally:
            with torch._C.DisableTorchFunction():
                self.poll()
                if self.note_modes() != before:
                    self.switched.append((node.start, before))
            self.stack.pop()
            recording.clock += 1
            node.stop, node.last_kernel = recording.clock, len(recording.kernels)
            self.at(call_id)
        with torch._C.DisableTorchFunction():
            encoder = Encoder(given, self.own)
            code = encoder(result)
            node.is_unsure, node.returns_function = is_unsure_in(code), withheld_in(code) in FUNCTIONS
            for _, content in given.refilled():
                encoder.container(content)
            arguments = set(map(id, given.tensors))
            node.passes = num_passed(encoder.tensors, given)
            for k, tensor in enumerate(encoder.tensors):
                name, known = (recording.clock, f"{call_id}:{k}"), self.find(tensor)
                if known is None:
                    known = self.add(tensor, name[1], None)
                elif id(tensor) not in arguments and recording.infos[known].made < node.start:
                    recording.infos[known].uses.append((recording.clock, number))
                    recording.infos[known].handed_out.append((number, *name))
                recording.infos[known].names.append(name)
            for left in self.left_since(node.start):
                self.name_left(left, number)
        return result

    def name_left(self, left: Left, number: int) -> None:
        """Give names to tensors that a call has made and left in Python state, where its result does not hold them."""
        node, infos = self.recording.nodes[number], self.recording.infos
        encoder = Encoder(Arguments((), {}), self.own)
        code = encoder(left.now())
        if left.attribute is not None and withheld_in(code):
            left.attribute.is_told = False
        for k, tensor in enumerate(encoder.tensors):
            found = self.find(tensor)
            if found is None or infos[found].made < node.start:
                continue
            if not any(name.startswith(f"{node.id}:") for _, name in infos[found].names):
                infos[found].left_by.add(number)
                infos[found].names.append((self.recording.clock, left_name(left.label, k)))

    @contextmanager
    def hooks_watched(self, module: nn.Module, node: Node) -> Iterator[None]:
        """Note the tensors that forward hooks of the module keep for later: more refer to them after the hook."""
        if not module._forward_hooks:
            yield
            return

        def watched(hook: Callable[..., Any]) -> Callable[..., Any]:
            key = hook_name(hook)
            node.hooks.add(key)

            def call(module: nn.Module, *given: Any) -> Any:
                tensors = tensors_in(given)
                before = [sys.getrefcount(tensor) for tensor in tensors]
                result = hook(module, *given)
                after = [sys.getrefcount(tensor) for tensor in tensors]
                for k, tensor in enumerate(tensors):
                    number = self.find(tensor)
                    if after[k] > before[k] and number is not None and result is not tensor:
                        node.collected.append(number)
                        self.recording.collecting.add(key)
                return result

            return call

        hooks = dict(module._forward_hooks)
        module._forward_hooks.update({key: watched(hook) for key, hook in hooks.items()})
        try:
            yield
        finally:
            for key, hook in hooks.items():
                if key in module._forward_hooks:
                    module._forward_hooks[key] = hook


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Below the torch functions: what each call really computes, for structural keys, FLOPs and hidden uses."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        for tensor in written_by(func, args, kwargs):
            name = recorder.parameter_storages.get(storage_of(tensor))
            if name is not None:
                recorder.note_parameter_written(name)
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        for tensor in given:
            if id(tensor) in recorder.parameters or id(tensor) in recorder.live:
                recorder.use(tensor)
        for tensor in _statistics_of(func, args):
            recorder.note_statistics(tensor)
        packet = func._overloadpacket
        count = flop_registry.get(packet)
        flops = float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0
        moved = sum(map(tensor_nbytes, (*given, *tensors_in(result))))
        depends = _depends_on_values(func, given)
        kernels = recorder.recording.kernels
        mark = f" at {len(kernels)}" if depends else ""
        recorder.recording.sizes_depend |= depends
        kernels.append((f"{func} {map_tensors((args, kwargs), _look)}{mark}", flops, float(moved)))
        return result


def _statistics_of(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Running means and variances that a kernel changes, though torch's version counters do not say so."""
    if "batch_norm" not in func._opname or "backward" in func._opname or len(args) < 6 or args[5] is not True:
        return []
    return [one for one in args[3:5] if isinstance(one, torch.Tensor)]


def _depends_on_values(func: Any, given: list[torch.Tensor]) -> bool:
    """Whether what a kernel returns, or the size of it, depends on what its tensors hold."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func._overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given)
    return True


def _is_as_foretold(now: Any, value: Any) -> bool:
    if not isinstance(value, Content):
        return is_same(now, value)
    return isinstance(now, torch.Tensor) and now.dtype == value.tensor.dtype and torch.equal(now, value.tensor)


def _look(tensor: torch.Tensor) -> str:
    strides = tuple(tensor.stride()) if tensor.layout == torch.strided and not tensor.is_nested else tensor.layout
    return f"{tensor.dtype}{sizes(tensor)}{strides}{'g' if tensor.requires_grad else ''}"


def tensor_nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _memory_nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the whole memory that a tensor looks at; of itself where it has none to look at."""
    try:
        return tensor.untyped_storage().nbytes() if is_sendable(tensor) else tensor_nbytes(tensor)
    except (RuntimeError, NotImplementedError):  # inside a functorch transform
        return tensor_nbytes(tensor)


def _inside_transform(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a functorch transform has wrapped."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return torch._C._functorch.get_unwrapped(tensor)
    return None


def _graph_leaves(roots: list[torch.Tensor]) -> list[torch.Tensor]:
    """The variables at the far end of an autograd graph."""
    left = [tensor.grad_fn for tensor in roots if tensor.grad_fn is not None]
    known, leaves = set(left), [tensor for tensor in roots if tensor.grad_fn is None]
    while left:
        node = left.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                left.append(following)
    return leaves
