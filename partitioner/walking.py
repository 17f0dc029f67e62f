"""Walk through the model's own forward as one stage: what is said and done at each call and torch function.

before the stage's part   follow the log of the earlier stages, with stand-ins for what they made
the end of the log        put in what was received: the stand-ins become real tensors, in place
the stage's own part      run all, and log it for later stages
the next stage's layer    end the forward; collect what later stages need
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from partitioner.ending import foretold
from partitioner.errors import UnsupportedModelError
from partitioner.logbook import (
    Arguments,
    Decoder,
    Encoder,
    Entry,
    Made,
    encoded,
    is_sendable,
    num_passed,
    num_tensors,
    pickled,
    version,
)
from partitioner.parts import Part, Payload
from partitioner.reaching import Change
from partitioner.recording import ROOT
from partitioner.restore import random_marks, random_states, set_random_states
from partitioner.shared import Naming, Told
from partitioner.standins import StandIn, exchange, unrecorded
from partitioner.structures import PLAIN, storage_of, tensors_in
from partitioner.tracing import (
    HOST_READS,
    AddedHook,
    Watcher,
    applied,
    hook_name,
    in_transform,
    may_draw,
    sets_nothing,
    unwatched,
)

ALSO_CALLED = {
    "lt": "gt",
    "gt": "lt",
    "le": "ge",
    "ge": "le",
    "values": "_nested_get_values",
    "offsets": "_nested_get_offsets",
    "lengths": "_nested_get_lengths",
}
"""What a function may be called in the log that on a stand-in has this name.

Python asks the right side of a comparison first where its class is derived from the left's, as a stand-in's is; nested
tensors have methods of their own.
"""


_ANOTHER_ORDER = (
    "the order of the layers, or how often they are called, is another than in the captured forward (by the data, a "
    "count or random numbers). Pin the layers that are called in turn to one stage (pin={layer: stage}), capture with "
    "inputs that take this way, or use replicas only (mesh={'dp': n})"
)


class Reached(BaseException):
    """The forward has come to the next stage's first layer."""


class _Foreign(BaseException):
    """A transform uses something that this rank does not have."""


class Meter:
    """Told of a stage's own part: when it begins and ends, and of each layer and torch function of it that runs."""

    def begin(self, received: dict[str, torch.Tensor], around: dict[str, torch.Tensor]) -> None:
        """The part begins, with these tensors put in by name, and those that were made here before it."""

    def end(self, made: dict[str, torch.Tensor]) -> None:
        """The part is over; what is alive of it by name, where later stages follow."""

    def start(self) -> None:
        """A layer or function starts."""

    def stop(self) -> None:
        """It has ended."""


class Walk(Watcher):
    """One forward: what to do at each call and function depends on whether the stage's own part has begun."""

    def __init__(self, part: Part, received: Mapping[int, Payload], meter: Meter | None) -> None:
        super().__init__(part.tracked, part.counted, part.calls)
        self.part, self.received, self.meter = part, received, meter
        self.has_gradients = torch.is_grad_enabled()
        """As the caller has it: where the stage's own part begins, the model may have switched gradients off."""
        self.local = part.stage == 0
        self.last = part.stage + 1 == part.num_stages
        self.named: dict[str, torch.Tensor] = {}
        """Before the stage's own part: all tensors by name; then those that later stages want."""
        self.alive: dict[str, weakref.ref[torch.Tensor]] = {}
        """All tensors that the stage's own part made or received."""
        self.leaves: dict[int, list[torch.Tensor | None]] = {}
        self.partial: list[tuple[str, weakref.ref[torch.Tensor], int]] = []
        """What was received, and is used on other stages too: its gradient here is a part of it. With how many hooks
        it came, which code ahead of the stage's own part has put on the stand-in: they do nothing."""
        self.log: list[Entry] = []
        self.own: list[Entry] = []
        self.position = 0
        self.next_call: str | None = None
        """The call that the stage before stopped at; "" where its forward came to its end."""
        self.stopped_at: str | None = ""
        self.inputs_written = False
        """Whether a stage so far has changed the model's inputs in place."""
        self.inputs: list[tuple[torch.Tensor, int]] = []
        self.names: dict[int, tuple[tuple[str, bool], ...]] = {}
        self.survivors: dict[str, torch.Tensor] = {}
        self.swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.held_handles: list[AddedHook] = []
        """Handles of forward hooks that somebody held when the stage's part was over."""
        self.ended = False
        self.rest: Told = ()
        """What the part of the forward that is left out would set."""
        self.told: Told = ()
        """What the stage before would have set by then, and goes on with."""
        self.trying = False
        """Whether a transform ahead of the stage's own part is being run, to see whether all it uses is here."""
        self.strayed = False
        """The forward goes another way than the captured one did: what later stages need is not known."""
        self.random_marks: tuple[Any, ...] | None = None
        self.drawn = False
        """Whether a layer drew from Python's or NumPy's random numbers; from then on their states are logged."""
        for source, payload in received.items():
            self.names[source], log, flags = part.opened_header(source, payload.header)
            self.strayed |= flags.strayed
            if log is not None:
                self.log, self.next_call, self.inputs_written = log, flags.next_call, flags.inputs_written
                self.told = flags.told

    def placing(self) -> AbstractContextManager[None]:
        return self.part.placing()

    def start(self) -> None:
        """The forward begins; that of the first stage with its own part."""
        if self.part.shared is not None:
            self.part.shared.begin()
            if self.local:
                self.part.shared.mark()
        if self.local and self.meter is not None:
            self.meter.begin({}, {})

    def note_inputs(self, inputs: Any) -> None:
        with torch._C.DisableTorchFunction():
            for k, tensor in enumerate(tensors_in(inputs)):
                self.named.setdefault(f"input:{k}", tensor)
                self.inputs.append((tensor, version(tensor)))

    def inputs_were_written(self) -> bool:
        return any(version(tensor) != before for tensor, before in self.inputs)

    def follow_call(self, call_id: str) -> None:
        """The first call of the stage's own part must be the one that the stage before stopped at."""
        expected, self.next_call = self.next_call, None
        if expected is not None and expected != call_id:
            raise self.other_way(*(f"calls {name}" if name else "returns" for name in (call_id, expected)))

    def is_over(self) -> bool:
        """Whether the module that holds the stage's last layer has returned: it may have left that layer out, and the
        one that the next stage begins with."""
        last, left = self.part.last_layer, self.moment
        return bool(left) and "#" not in last and (last == left or last.startswith(f"{left}."))

    def stop(self, call_id: str | None) -> None:
        """The stage's part is over: what is alive now, and may be needed, must outlive the model's own references.

        `call_id`: what the next stage begins with; None where that is no call.
        """
        self.ended, self.stopped_at = True, call_id
        if self.part.shared is not None:
            with torch._C.DisableTorchFunction():
                self.rest = self.part.shared.labelled(foretold(self.part.strangers), self.told)
        self.compare_names()
        self.held_handles = [hook for hook in self.hooks_added if hook.handle() is not None]
        self.keep_survivors()
        raise Reached

    def drop_hooks(self) -> None:
        """Forward hooks whose handles went with the frames of the forward: it would have removed them at its end."""
        for hook in self.held_handles:
            if hook.handle() is None:
                hook.remove()

    def at(self, moment: str) -> None:
        if self.checksum:
            self.compare_names()
        self.moment, self.num_functions, self.checksum = moment, 0, 0

    def compare_names(self) -> None:
        """Other functions than the captured ones: what they make may have to be sent where that was not."""
        if self.checksum and self.checksum != self.part.glue_names.get(self.moment):
            self.strayed = True

    def keep_survivors(self) -> None:
        self.survivors = {name: tensor for name in self.alive if (tensor := self.alive[name]()) is not None}

    def metered(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.meter is None:
            return run(*args, **kwargs)
        self.meter.start()
        try:
            return run(*args, **kwargs)
        finally:
            self.meter.stop()

    # -- what happens

    def on_function(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.ended:
            raise Reached
        if self.in_custom:
            if self.trying and (may_draw(name, func) or any(map(self.is_foreign, tensors_in((args, kwargs))))):
                raise _Foreign
            self.refuse_strangers(tensors_in((args, kwargs)))
            return func(*args, **kwargs)
        moment = self.next_name()
        if not self.local:
            if self.position < len(self.log):
                return self.before(moment, name, func, args, kwargs)
            self.begin()
        if self.last:
            if name != "requires_grad_":
                self.refuse_strangers(tensors_in((args, kwargs)))
            return self.metered(func, args, kwargs)
        if self.num_functions > self.part.glue.get(self.moment, 0):
            self.strayed = True
        if self.part.glue_names:
            self.named_functions(name)
        given = Arguments(args, kwargs)
        if _sets_plainly(name, args, kwargs) and id(args[0]) in self.part.later_buffers:
            result = None if name == "__setitem__" else args[0]  # the stages that have it do so when they come by here
            self.own.append(Entry(moment, name, encoded(result, given, self.part.own_names)[0], (0,), (), 1))
            return result
        if name != "requires_grad_":  # which stages own it does not matter
            if self.is_over() and any(id(tensor) in self.part.strangers for tensor in given.tensors):
                self.strayed = True
                self.stop(None)
            self.refuse_strangers(given.tensors)
        try:
            result = self.metered(func, args, kwargs)
        except Exception as error:
            self.own.append(Entry(moment, name, error=pickled(error)))
            raise
        if name in HOST_READS:
            self.own.append(Entry(moment, name, result))
            return result
        code, tensors = encoded(result, given, self.part.own_names)
        written = _written(name, given)
        entry = Entry(moment, name, code, written, (), len(given.tensors))
        shared = self.part.shared
        if written and shared is not None and shared.holds(given.tensors[k] for k in written):
            found = [one for one in self.changes(f"the code after {self.moment}", by_layer=True) if one.content]
            entry = entry._replace(contents=shared.encoded(found, f"the code after {self.moment}"))
        if kwargs and isinstance(kwargs.get("generator"), torch.Generator):
            entry = entry._replace(generator=kwargs["generator"].get_state().numpy().tobytes())
        self.own.append(entry)
        self.name(moment, tensors, moment)
        return result

    def on_transform(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As one function; ahead of the stage's own part it runs if it uses only what every rank makes itself."""

        def run_hidden(*args: Any, **kwargs: Any) -> Any:
            self.in_custom = True
            try:
                with self.functions:
                    return run(*args, **kwargs)
            finally:
                self.in_custom = False

        if self.ended or self.local or self.position == len(self.log):
            return self.on_function(name, run_hidden, args, kwargs)
        moment = self.next_name()
        entry = self.follow(moment, name)
        self.trying = True
        try:
            if any(map(self.is_foreign, tensors_in((args, kwargs)))):
                raise _Foreign
            result = run_hidden(*args, **kwargs)
        except _Foreign:
            return self.replay(moment, entry, args, kwargs)
        finally:
            self.trying = False
        for k, tensor in enumerate(tensors_in(result)):
            self.named[moment if k == 0 else f"{moment}:{k}"] = tensor
        return result

    def before(
        self, moment: str, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Glue ahead of the stage's own part: run it on real tensors, follow the log on stand-ins."""
        entry = self.follow(moment, name)
        if name in HOST_READS:
            return entry.result
        if name == "requires_grad_" and isinstance(args[0], nn.Parameter):
            return func(*args, **kwargs)
        sets = entry.writes and not entry.contents and _sets_plainly(name, args, kwargs)
        if sets and id(args[0]) in self.part.buffers:
            here = id(args[0]) not in self.part.strangers
            return func(*args, **kwargs) if here else self.replay(moment, entry, args, kwargs)
        if may_draw(name, func) or any(map(self.is_foreign, tensors_in((args, kwargs)))):
            if kwargs and isinstance(kwargs.get("generator"), torch.Generator) and entry.generator is not None:
                kwargs["generator"].set_state(torch.frombuffer(bytearray(entry.generator), dtype=torch.uint8))
            return self.replay(moment, entry, args, kwargs)
        result = func(*args, **kwargs)
        for k, tensor in enumerate(tensors_in(result)):
            self.named[moment if k == 0 else f"{moment}:{k}"] = tensor
        return result

    def follow(self, moment: str, name: str) -> Entry:
        """The next entry of the log, which must be of the same moment and name."""
        entry = self.log[self.position]
        if entry.moment != moment or entry.name not in (name, ALSO_CALLED.get(name)):
            raise self.other_way(f"runs {name} ({moment})", f"ran {entry.name} ({entry.moment})")
        self.position += 1
        if entry.error is not None:
            error = pickle.loads(entry.error)
            raise error
        return entry

    def is_foreign(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values are another stage's affair: stand-ins, parameters, buffers."""
        return isinstance(tensor, (StandIn, nn.Parameter)) or tensor.requires_grad or id(tensor) in self.part.buffers

    def on_hidden_call(self, module: nn.Module) -> None:
        if self.trying:
            raise _Foreign
        if in_transform():
            self.refuse_strangers([*module.parameters(), *module.buffers()])

    def on_hidden_apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.trying:
            raise _Foreign

    def on_checkpoint(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.ended:
            raise Reached
        if self.in_custom:
            return run(*args, **kwargs)
        moment = self.next_name()
        if not self.local and self.position == len(self.log):
            self.begin()
        if self.local and self.part.glue_names:
            self.named_functions("apply CheckpointFunction")
        result = run(*args, **kwargs) if self.local else args[0](*args[2:])
        with torch._C.DisableTorchFunction():
            self.name(moment, tensors_in(result), moment)
        return result

    def on_region(self, what: str) -> None:
        if what == "begins" and not self.local and self.position == len(self.log):
            self.begin()

    def saves(self, args: tuple[Any, ...]) -> bool:
        return not any(isinstance(arg, StandIn) for arg in args)

    def on_call(
        self, path: str, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.ended:
            raise Reached
        call_id, stage_of = self.enter(path) if path else ROOT, self.part.stage_of
        if path in stage_of or call_id in stage_of:
            return self.layer(call_id, module, run, args, kwargs)
        self.at(f">{call_id}")
        given = None
        if not (self.last and self.local):  # nobody asks for names of what the last stage's own part makes
            with torch._C.DisableTorchFunction():
                given = Arguments(args, kwargs)
        try:
            result = run(*args, **kwargs)
        finally:
            self.at(call_id)
        if given is None or (self.last and self.local):
            return result
        with torch._C.DisableTorchFunction():
            encoder = Encoder(given, self.part.own_names)
            encoder(result)
            for _, content in given.refilled():
                encoder.container(content)
            self.name(f"{call_id}:0", encoder.tensors, call_id)
        return result

    def layer(
        self, call_id: str, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.local:
            if self.position < len(self.log):
                self.at(call_id)
                with torch._C.DisableTorchFunction():
                    result = self.replay(f"{call_id}:0", self.follow(call_id, call_id), args, kwargs)
                    if self.tracked[module] in self.part.fire_hooks:
                        self.fire_hooks(module, args, kwargs, result)
                return result
            self.begin()
        self.follow_call(call_id)
        part = self.part
        stage = part.stage_of.get(call_id)
        if stage is None:  # called more often than when it was captured: wherever its parameters are
            self.refuse_strangers([*module.parameters(), *module.buffers()], call_id)
        elif stage > part.stage:
            self.stop(call_id)
        elif stage < part.stage:
            raise self.failed(
                UnsupportedModelError(
                    f"stage {part.stage} calls {call_id} after a layer of its own, and it lives on stage {stage}: "
                    f"{_ANOTHER_ORDER}"
                )
            )
        if part.shared is not None and part.shared.is_moving:
            self.changes(f"the code before {call_id}")
        try:
            with unwatched():
                if not self.last:
                    return self.logged(call_id, run, args, kwargs)
                result = self.metered(run, args, kwargs)
            self.changes(f"layer {call_id} (or the code before it)", by_layer=True)
            return result
        finally:
            self.at(call_id)

    def changes(self, who: str, *, by_layer: bool = False) -> list[Change]:
        """What `who` has changed of Python state that later stages reach; see `SharedState.changes`."""
        shared = self.part.shared
        if shared is None or shared.is_still():
            return []
        try:
            return shared.changes(who, by_layer=by_layer)
        except UnsupportedModelError as error:
            raise self.failed(error) from None

    def logged(self, call_id: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call_id not in self.part.captured and call_id not in self.part.stage_of:
            self.strayed = True
        given = Arguments(args, kwargs)
        counts = dict(self.num_calls) if self.counted else None
        marks = self.random_marks or random_marks()
        try:
            result = self.metered(run, args, kwargs)
        except Exception as error:
            self.own.append(Entry(call_id, call_id, error=pickled(error)))
            raise
        self.random_marks = random_marks()
        self.drawn = self.drawn or marks != self.random_marks
        filled: tuple[tuple[int, Any], ...] = ()
        refills = given.refilled()
        if refills:
            encoder = Encoder(given, self.part.own_names)
            code, tensors = encoder(result), encoder.tensors
            filled = tuple((k, encoder.container(content)) for k, content in refills)
        else:
            code, tensors = encoded(result, given, self.part.own_names)
        passed = self.part.passing.get(call_id)
        if passed and num_passed(tensors, given) < passed:
            self.strayed = True
        called: tuple[tuple[str, int], ...] = ()
        if counts:
            called = tuple((path, n - counts.get(path, 0)) for path, n in self.num_calls.items())
        states = random_states() if self.drawn else None
        self.name(f"{call_id}:0", tensors, call_id)
        written, state = given.written(), self.changes_encoded(call_id)
        self.own.append(
            Entry(call_id, call_id, code, written, filled, len(given.tensors), states, counts=called, state=state)
        )
        return result

    def changes_encoded(self, call_id: str) -> tuple[Any, ...]:
        changes = self.changes(f"layer {call_id} (or the code before it)", by_layer=True)
        if not changes or self.part.shared is None:
            return ()
        try:
            return self.part.shared.encoded(changes, f"layer {call_id}", self.names_of_left())
        except UnsupportedModelError as error:
            raise self.failed(error) from None

    def names_of_left(self) -> Naming:
        """Names for tensors that a layer has left in Python state, as when it was captured."""
        known = {id(tensor): name for name in self.alive if (tensor := self.alive[name]()) is not None}

        def name(tensor: torch.Tensor, new: str, is_captured: bool) -> str | None:
            if isinstance(tensor, StandIn):
                return tensor.label
            found = known.get(id(tensor))
            if not is_captured:
                return found if found in self.part.wanted else None
            if found is None:
                known[id(tensor)] = new
                self.name(new, [tensor], new)
                return f"+{new}"
            return found

        return name

    def fire_hooks(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Let hooks that keep tensors for later keep these; the module itself ran on an earlier stage.

        One that keeps a view, or what it works out, fails on stand-ins: that came from there as what a layer leaves.
        """
        failed_before = self.failure
        with unwatched():
            for number, hook in list(module._forward_hooks.items()):
                if self.part.collecting and hook_name(hook) not in self.part.collecting:
                    continue
                given = (args, kwargs, result) if number in module._forward_hooks_with_kwargs else (args, result)
                try:
                    hook(module, *given)
                except UnsupportedModelError:
                    self.failure = failed_before

    def other_way(self, here: str, there: str) -> UnsupportedModelError:
        return self.failed(
            UnsupportedModelError(
                f"stage {self.part.stage} {here} after {self.moment or 'the start'}, where the earlier stage {there}: "
                f"the forward takes another way on this rank. Let it depend only on its inputs, torch's random numbers "
                f"and what its modules keep, not on what a tensor's graph is like (grad_fn, is_leaf) or where it runs; "
                f"where it goes through a set of strings, start all ranks with the same PYTHONHASHSEED"
            )
        )

    def refuse_strangers(self, tensors: list[Any], again: str = "") -> None:
        """No tensor of another stage may be used here; `again`: the call, where the captured forward had none such."""
        for tensor in tensors:
            name = self.part.strangers.get(id(tensor))
            if name is not None:
                here = f"stage {self.part.stage} uses {name!r} after {self.moment or 'the start'}"
                why = (
                    f"{here}, where the captured forward did not, so that it lives on another stage: capture with "
                    f"inputs and flags that take this way, or pin the layers around it to one stage (pin={{layer: "
                    f"stage}}). What only now and then reads or copies weights (norms for a log, a copy as teacher) "
                    f"belongs outside of the forward, after the step"
                )
                if again:
                    why = f"{here}, as it calls {again}, which the captured forward did not: {_ANOTHER_ORDER}"
                raise self.failed(UnsupportedModelError(why))

    def refuse_stand_ins(self, output: Any) -> None:
        """Everything that the model returns must have arrived; what objects hold besides is missed when it is used."""
        for tensor in tensors_in(output):
            if isinstance(tensor, StandIn):
                raise UnsupportedModelError(
                    f"the output holds the tensor {tensor.label!r}, which an earlier stage made and did not send, as "
                    f"the captured forward did not return it: capture with the inputs and flags of this call"
                )

    # -- names

    def name(self, first: str, tensors: Sequence[torch.Tensor], prefix: str) -> None:
        """Tensors of one result; the first is called `first`, the k-th "prefix:k"."""
        for k, tensor in enumerate(tensors):
            name = first if k == 0 else f"{prefix}:{k}"
            if not self.local:
                self.named[name] = tensor
            elif not self.last:
                if name in self.part.wanted:
                    self.named[name] = tensor
                self.alive[name] = weakref.ref(tensor)

    # -- stand-ins

    def replay(self, first: str, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result as it was logged, with stand-ins for its tensors; `first` is what its first tensor is called."""
        moment, made = entry.moment, entry.single_tensor()
        if made is not None and entry.num_given == num_tensors(args, kwargs):
            result = self.named[first] = StandIn(made, first, self.part.device)
            self.follow_state(entry)
            return result
        given = Arguments(args, kwargs)
        if entry.num_given != len(given.tensors):
            raise self.other_way(f"gives {len(given.tensors)} tensors to {moment}", f"gave {entry.num_given}")
        kept = self.follow_contents(entry)
        for index in entry.writes:
            if id(given.tensors[index]) not in kept:
                self.stand_in_for(given.tensors[index], moment)

        def make(k: int, made: Any) -> torch.Tensor:
            return StandIn(made, first if k == 0 else f"{moment}:{k}", self.part.device)

        decoder = Decoder(given, self.part.own, make)
        result = decoder(entry.result)
        for index, content in entry.refills:
            decoder.refill(index, content)
        for k, tensor in enumerate(decoder.tensors):
            self.named[first if k == 0 else f"{moment}:{k}"] = tensor
        self.follow_state(entry)
        return result

    def follow_contents(self, entry: Entry) -> set[int]:
        """Put into tensors that the model keeps what a logged function wrote into them; the ids of these tensors."""
        if not entry.contents or self.part.shared is None:
            return set()
        return self.part.shared.apply(entry.contents)

    def follow_state(self, entry: Entry) -> None:
        """Besides its result: what a logged call or function did to random numbers, counts and Python state."""
        if entry.random_states is not None:
            set_random_states(entry.random_states)
        for path, count in entry.counts:
            self.num_calls[path] += count
        if entry.state and self.part.shared is not None:
            self.part.shared.apply(entry.state, self.left_behind)

    def left_behind(self, name: str, made: Made) -> torch.Tensor:
        """The tensor of that name, which an earlier stage's layer has left in Python state."""
        if name[0] == "+" or name not in self.named:
            name = name.removeprefix("+")
            self.named[name] = StandIn(made, name, self.part.device)
        return self.named[name]

    def stand_in_for(self, target: torch.Tensor, moment: str) -> None:
        """An earlier stage wrote into a tensor: from here on its values, and those of its views, are not here."""
        if isinstance(target, (StandIn, nn.Parameter)) or id(target) in self.part.buffers:
            return
        storage = storage_of(target)
        aliases = [other for other in self.named.values() if not isinstance(other, StandIn)]
        for alias in [target, *(other for other in aliases if other is not target and storage_of(other) == storage)]:
            if not isinstance(alias, StandIn):
                old = StandIn.like(alias, moment, self.part.device)
                exchange(alias, old)
                self.swapped.append((alias, old))

    def begin(self) -> None:
        """The stage's own part starts: put in what was received, wherever the stand-ins have got to."""
        if self.local:
            return
        if self.position < len(self.log):
            entry = self.log[self.position]
            raise self.other_way("ends", f"ran {entry.name} ({entry.moment})")
        self.local = True
        switched_off = self.has_gradients and not torch.is_grad_enabled()
        with torch._C.DisableTorchFunction(), unrecorded(), as_called() if switched_off else nullcontext():
            around = {}
            if self.meter is not None:
                around = {name: tensor for name, tensor in self.named.items() if not isinstance(tensor, StandIn)}
            filled: dict[str, torch.Tensor] = {}
            taken: set[int] = set()
            for source, names in self.names.items():
                tensors = iter(self.received[source].tensors)
                leaves: list[torch.Tensor | None] = []
                for name, requires_grad in names:
                    value, leaf = next(tensors).detach(), None  # another object: the payload's own stays what it is
                    target = self.named.get(name)
                    if target is not None:
                        value = strided_like(value, target)
                    if requires_grad and self.has_gradients:
                        leaf = value.requires_grad_()
                        value = applied(_Received, leaf) if self.received[source].is_given_away else leaf.clone()
                    leaves.append(leaf)
                    if target is not None and id(target) not in taken:
                        taken.add(id(target))
                        filled[name] = target
                        exchange(target, value)
                        if leaf is not None and name in self.part.used_elsewhere:
                            self.partial.append((name, weakref.ref(target), len(target._backward_hooks or ())))
                self.leaves[source] = leaves
            self.named = {name: tensor for name, tensor in self.named.items() if name in self.part.wanted}
            if not self.last:
                self.alive = {name: weakref.ref(tensor) for name, tensor in filled.items()}
        if self.part.shared is not None:
            self.part.shared.mark()
            self.part.shared.expect(self.told)
        if self.meter is not None:
            self.meter.begin(filled, around)

    def refuse_partial_gradients(self) -> None:
        """No hook may be on the gradient of what other stages use too: it would see the part of this one."""
        for name, reference, before in self.partial:
            tensor = reference()
            if tensor is not None and (len(tensor._backward_hooks or ()) > before or tensor.retains_grad):
                raise self.failed(
                    UnsupportedModelError(
                        f"stage {self.part.stage} puts a hook on the gradient of {name!r}, or keeps it: an earlier "
                        f"stage made that tensor and other stages use it too, so that it is a part of the gradient "
                        f"here; the captured forward did not. Do so where it is made, or pin the layers that use it to "
                        f"one stage (pin={{layer: stage}})"
                    )
                )

    def put_back(self) -> None:
        """Tensors that outlive the forward, and are another stage's affair, become what they were again."""
        for target, old in reversed(self.swapped):
            if isinstance(target, StandIn):
                exchange(target, old)
        if self.part.stage:
            for table, name, buffer in self.part.buffer_places:
                if isinstance(table.get(name), StandIn):
                    table[name] = buffer

    def collect(self, ended_early: bool = False) -> dict[int, Payload]:
        """What each later stage needs from this one; the next one gets the log too.

        Where the forward took another way than the captured one, or is over already, all that is alive goes along:
        something there takes the place of what was captured.
        """
        here = {name: tensor for name in self.part.wanted if (tensor := self.real(name)) is not None}
        self.strayed |= ended_early or len(here) < len(self.part.wanted)
        self.inputs_written |= self.inputs_were_written()
        sends = {}
        for target, route in self.part.routes.items():
            found = {name: here[name] for name in route if name in here}
            if self.strayed:
                known = {id(tensor) for tensor in found.values()}
                for name, tensor in self.survivors.items():
                    if is_sendable(tensor) and id(tensor) not in known:
                        known.add(id(tensor))
                        found[name] = tensor
            log = [tuple(entry) for entry in (*self.log, *self.own)] if target == self.part.stage + 1 else None
            names = tuple((name, tensor.requires_grad) for name, tensor in found.items())
            header = pickled((names, log, (self.strayed, self.stopped_at, self.inputs_written, self.rest)))
            if header is None:
                raise UnsupportedModelError(
                    f"what stage {self.part.stage} did cannot be described to the next one: a value that the model "
                    f"read from a tensor, or a layer's result, cannot be pickled"
                )
            sends[target] = Payload(header, [_resolved(tensor) for tensor in found.values()])
        return sends

    def real(self, name: str) -> torch.Tensor | None:
        """The tensor of that name, if it is here and has values."""
        tensor = self.named.get(name, self.survivors.get(name))
        return None if isinstance(tensor, StandIn) else tensor


@contextmanager
def as_called() -> Iterator[None]:
    """Inside: there are gradients, as when the forward was called."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


class _Received(torch.autograd.Function):
    """What stands in the forward for a leaf: the same memory, but a result, so that it may be written into."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _sets_plainly(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function sets a tensor to plain values, or so its items, as flags of layers are set."""
    plain = (*PLAIN, slice, type(Ellipsis))
    return name in _SETTERS and not kwargs and all(isinstance(one, plain) for one in args[1:])


_SETTERS = frozenset({"__setitem__", "fill_", "zero_", "add_", "sub_", "mul_", "__iadd__", "__isub__", "__imul__"})


def _written(name: str, given: Arguments) -> tuple[int, ...]:
    if name == "set data":
        return () if sets_nothing(given.tensors) else (0,)
    return given.written()


def strided_like(value: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """The values with the strides that they had where they were made: functions look at those, and sum along them."""
    if value.stride() == original.stride() or not _is_dense(original):
        return value
    made = torch.empty_strided(value.shape, original.stride(), dtype=value.dtype, device=value.device)
    return made.copy_(value)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the strides are those of a contiguous tensor whose dimensions were reordered."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory holds its values: no conjugation or sign waiting to be applied."""
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg() if tensor.is_neg() else tensor
