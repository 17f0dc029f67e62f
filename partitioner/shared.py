"""Keep plain Python state that several stages reach the same for all of them, or refuse a change that cannot be.

On one device a layer that sets an attribute is seen by all code after it, in this forward and the next. On ranks:

    a layer sets what a later stage reaches        the change travels in the log, and is made there at that call
    code between layers sets it                    later stages run that code too
    anything sets what an earlier stage reaches    an error: that stage may have begun the next micro-batch already

Looked at are the places that `reaching` finds for more than one stage, and attributes that the captured forward read on
more than one. A change that capture saw has no cut between it and those who read it then. Others may read it some day:

    on a later stage      it is sent there as all changes are; what cannot be, is `Absent` there
    on an earlier one     while that runs it is `Absent` there, unless it is set there first
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from partitioner.absent import Absent
from partitioner.contents import content_of, fill
from partitioner.ending import Content, Foretold
from partitioner.errors import UnsupportedModelError
from partitioner.glance import Glance
from partitioner.logbook import Arguments, Decoder, Encoder, Made, is_sendable, left_name, pickled, withheld_in
from partitioner.profiles import Attribute, Buffer
from partitioner.reaching import GONE, BufferPlace, Change, Place, Reach, Watched
from partitioner.renewal import Kept, Then, become
from partitioner.structures import is_same, tensors_in
from partitioner.tracing import applied
from partitioner.unannounced import may_write_unannounced

Naming = Callable[[torch.Tensor, str, bool], str | None]
"""(tensor, what one left there is called, whether the captured forward left one) -> what it is sent as, "+" if new."""


Told = tuple[tuple[str, str, Any, Any], ...]
"""Kind and name of places, a name or key in each, and what a stage that ends early lets it hold."""


def _unnamed(tensor: torch.Tensor, new: str, is_captured: bool) -> str | None:
    return None


class SharedState:
    """What the stage `stage` of `model` has in common with others, in plain Python."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str],
        attributes: Sequence[Attribute],
        buffers: Sequence[Buffer],
        stage_of: Mapping[str, int],
        stage: int,
        device: torch.device | None,
        *,
        guarded: bool = True,
        loss: Any = None,
        passing: Sequence[dict[str, Any]] = (),
        again: Collection[str] = (),
    ) -> None:
        """`guarded`: whether changes are looked for, or only made as earlier stages tell of them.

        `passing`: see `Glance`; `again`: see `Masks`.
        """
        self._passing = passing
        self._guarded = guarded
        self._stage, self._device, self._model = stage, device, model
        self._reach = Reach(model, Masks(layers, stage_of, again).of, loss)
        self._readers = {
            one.name: _bits(*range(stage_of[one.first], stage_of[one.last] + 1))
            for one in attributes
            if one.first and one.last
        }
        self._writers = {one.name: set(one.writers) for one in attributes}
        self._inside = {one.name: set(one.inside) for one in attributes}
        self._ours: set[str] = set()
        """Attributes that this stage changes in every forward, as captured."""
        self._by_layers: set[str] = set()
        """Of these the ones that its layers change, not the code between them."""
        self.move_to(stage, [layer for layer, where in stage_of.items() if where == stage])
        self._returning = {
            one.name: max((stage_of[layer] for layer in one.writers), default=0) for one in attributes if one.returns
        }
        """What is at the end of a forward as it was at the start, or so much more; the last stage that changes it."""
        self._adds = {one.name: one.adds for one in attributes if one.returns and one.adds != (0, 0)}
        self._foretold = {one.name for one in attributes if one.foretold}
        """Attributes that code behind cuts changes, which earlier stages foretell."""
        self._expected: dict[tuple[int, Any], tuple[Place, Any, Any]] = {}
        """What the stage before has foretold for the end of this forward: by holder and key."""
        self._start: list[tuple[Place, Any, Any]] = []
        self._set_later = {
            one.name
            for one in attributes
            if not one.returns
            and any(stage_of[layer] > stage for layer in one.writers)
            and (one.set_first or not self._readers.get(one.name, 0) >> stage & 1)
        }
        """Attributes that later stages change in every forward, and that it does not read here, or sets first."""
        self._hidden: list[tuple[Place, Any, Any, Absent]] = []
        """What is `Absent` while a forward runs, and what was there."""
        self._buffers = {
            name: _bits(*(stage_of[layer] for layer in one.layers)) for one in buffers for name in one.names
        }
        self._modules = dict(model.named_modules())
        self._widen()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._own, self._own_names = tensors, {id(tensor): name for name, tensor in tensors.items()}
        self._objects = [place.owner for place in self._reach.places.values()]
        """The same on every rank, and in the same order; what is sent refers to them by number."""
        self.is_moving = bool(self._ours)
        """Whether something has ever changed in this stage's own part: then code between layers is told from layers."""
        self._watched: list[Watched] = []
        self._by_label: dict[tuple[str, str], Place] = {}
        self._num_known = 0
        self._glance: Glance | None = None
        self._watch_new()
        self.kept = self._kept()

    def _widen(self) -> None:
        """Let those who read attributes in the captured forward be readers here."""
        for name, mask in self._readers.items():
            module = self._modules.get(name.rpartition(".")[0])
            if module is not None:
                self._reach.places[id(module)].widen(mask)
        for place in self._reach.places.values():
            place.widen(self._readers.get(place.attribute, 0))

    def kept_apart(self) -> tuple[list[str], frozenset[str]]:
        """What several stages only write, and the attributes and variables under which such things are held."""
        return _kept_apart(self._reach), self._reach.sink_keys

    def look_again(self) -> None:
        """Hooks have come to the model since, the same on every rank: what they lead to is shared like all else."""
        num_before = len(self._reach.places)
        if self._reach.look_at_hooks():
            self._by_label, self._objects, num_before = {}, [], 0
            self._widen()
        places = list(self._reach.places.values())
        self._objects += [place.owner for place in places[num_before:]]
        self._watched, self._num_known, self._glance = [], 0, None
        self._watch_new()
        self.kept = self._kept()
        self.mark()

    def begin(self) -> None:
        """A forward begins: what is to be at its end as it is now is noted."""
        self._start = []
        self.kept.begin()
        if self._guarded and self._set_later:
            self._hide()
        if not self._returning or not self._guarded:
            return
        for place in self._reach.places.values():
            if place.kind in ("module", "attributes"):
                found = [one for one in place.items() if place.name_of(one[0]) in self._returning]
                self._start += [(place, key, value) for key, value in found]

    def _hide(self) -> None:
        """Let nobody read what a later stage has changed and not told of."""
        for place, key in self._places_of(self._set_later):
            if not place.readers_of(key) >> self._stage & 1:
                continue
            name = place.name_of(key)
            why = (
                f"stage {self._stage} reads {name!r}, which a later stage changes in every forward and an earlier one "
                f"does not learn of; the captured forward did not read it there. Pin the layers that use it to one "
                f"stage (pin={{layer: stage}}), capture with inputs that take this way, or use replicas only "
                f"(mesh={{'dp': n}})"
            )
            held = place.held(key)
            absent = Absent(type(held).__name__, why)
            self._hidden.append((place, key, held, absent))
            place.put(key, absent)
        if self._hidden:
            self.mark()

    def show(self) -> None:
        """The forward is over, in whatever way: what nobody has set is as it was before."""
        for place, key, held, absent in self._hidden:
            if place.held(key) is absent:
                place.drop(key) if held is GONE else place.put(key, held)
        if self._hidden:
            self._hidden = []
            self.mark()

    def _places_of(self, names: Collection[str]) -> list[tuple[Place, Any]]:
        """Where these attributes are held, and containers of these names."""
        held = [place for place in self._reach.places.values() if place.kind in ("dict", "sequence")]
        containers = {id(place.owner) for place in held if place.name in names}
        containers |= {id(place.owner) for place in held if f"{place.name}.__dict__" in names}
        found = []
        for place in self._reach.places.values():
            if place.kind not in ("module", "attributes", "dict"):
                continue
            keys = [key for key, value in place.items() if place.name_of(key) in names or id(value) in containers]
            if place.kind != "dict":
                start = f"{place.name}." if place.name else ""
                new = (name.removeprefix(start) for name in names if name.startswith(start))
                keys += [key for key in new if key.isidentifier() and not hasattr(place.owner, key)]
            found += [(place, key) for key in keys]
        return found

    def labelled(self, told: Foretold, before: Told) -> Told:
        """What was foretold, under names that are the same on every rank; the content of buffers as bytes.

        `before`: what the stage before has told; of buffers that this one does not have, that is passed on.
        """
        found = [(self._reach.places.get(id(owner)), key, value) for owner, key, value in told.values()]
        passed = tuple(one for one in before if self._is_elsewhere(*one[:3]))
        return passed + tuple(
            (one.kind, one.name, key, _bytes_of(value.tensor) if isinstance(value, Content) else value)
            for one, key, value in found
            if one is not None
        )

    def _is_elsewhere(self, kind: str, name: str, key: Any) -> bool:
        """Whether it is a buffer that other stages alone have."""
        mask = self._buffers.get(f"{name}.{key}" if name else key, 0) if kind == BufferPlace.kind else 0
        return bool(mask) and not mask >> self._stage & 1

    def expect(self, told: Told) -> None:
        """The stage's own part begins, and this is what the stage before has foretold and goes on with."""
        self._expected = {(id(place.owner), key): (place, key, value) for place, key, value in self._told(told)}
        self.is_moving = self.is_moving or bool(self._expected)

    def _told(self, told: Told) -> list[tuple[Place, Any, Any]]:
        if not self._guarded:
            return []
        found = [(self._by_label.get((kind, name)), key, value) for kind, name, key, value in told]
        return [(place, key, value) for place, key, value in found if place is not None]

    def end(self, *, early: bool, rest: Told = (), recomputes: bool = False) -> Then | None:
        """Give back what the rest of the forward would have; where there is no rest, it must have happened.

        `rest`: what was foretold of that; `recomputes`: see `Kept.end`. What the stage's own copy of the model is like
        then, for the backward. UnsupportedModelError where something is not given back, and earlier stages go on with
        another value.
        """
        told, (expected, self._expected) = self._told(rest), (self._expected, {})
        known = {(id(place.owner), key) for place, key, _ in told} | (set() if early else expected.keys())
        for place, key, before in self._start:
            if (id(place.owner), key) in known:
                continue
            now, name = place.held(key), place.name_of(key)
            last, adds = self._returning[name], self._adds.get(name, (0, 0))[0 if self._model.training else 1]
            after = before + adds if adds and type(before) is int else before
            if is_same(now, after) or self._stage > last:
                continue
            change = Change(place, key, before, now)
            if early and self._stage < last:
                place.put(key, after)
                continue
            readers = self._readers.get(place.name_of(key), place.readers_of(key))
            if readers & ((1 << self._stage) - 1):
                raise UnsupportedModelError(self._refusal(change, "the forward", 0))
        if told or expected:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                for place, key, value in told:
                    self._let_hold(place, key, value)
                for place, key, value in expected.values():
                    change = Change(place, key, value, place.held(key), isinstance(place, BufferPlace))
                    earlier = self._readers_of(change) & ((1 << self._stage) - 1)
                    if earlier and not self._holds(place, key, value):
                        reader = (earlier & -earlier).bit_length() - 1
                        raise UnsupportedModelError(self._refusal(change, "the forward", reader))
        if not torch.is_grad_enabled():
            return None
        then = self.kept.end(recomputes)
        for tensor in self.kept.late if self._guarded else ():
            self._refuse_unannounced(tensor)
        return then

    def _holds(self, place: Place, key: Any, value: Any) -> bool:
        """Whether a place holds what was foretold."""
        now = place.held(key)
        if not isinstance(place, BufferPlace) or self._is_elsewhere(place.kind, place.name, key):
            return isinstance(place, BufferPlace) or is_same(now, value)
        return isinstance(now, torch.Tensor) and _bytes_of(now) == value

    def _let_hold(self, place: Place, key: Any, value: Any) -> None:
        now = place.held(key)
        if not isinstance(place, BufferPlace):
            place.put(key, value)
        elif isinstance(now, torch.Tensor) and not self._holds(place, key, value):
            _write(now, _tensor_of(value, now.dtype).reshape(now.shape).to(now.device))

    def is_still(self) -> bool:
        """Whether nothing has changed since the last look: quick to tell."""
        return not self._guarded or (self._glance is not None and self._glance.is_still())

    @contextmanager
    def passing_over(self) -> Iterator[None]:
        """See `Glance.passing_over`."""
        with nullcontext() if self._glance is None else self._glance.passing_over(), self.kept.passing_over():
            yield

    def mark(self) -> None:
        """What changed until now is as it should be."""
        if self.is_still():
            return
        with torch._C.DisableTorchFunction():
            for watched in self._watched:
                if watched.is_touched():
                    self._follow(watched.changes())
            self._glance = Glance(self._watched, self._passing)

    def move_to(self, stage: int, layers: Sequence[str]) -> None:
        """Look from now on as that stage does, of which these are the layers."""
        self._stage = stage
        self._ours, self._by_layers = (
            {name for name, writers in changed.items() if not writers.isdisjoint(layers)}
            for changed in (self._writers, self._inside)
        )

    def holds(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of these is kept in a place that several stages reach."""
        kept = {id(tensor) for watched in self._watched for _, tensor in watched.tensors}
        return any(id(tensor) in kept for tensor in tensors)

    def changes(self, who: str, *, by_layer: bool = False, refusing: bool = True) -> list[Change]:
        """What has changed since the last look, by `who`, as far as later stages reach it.

        `by_layer`: later ranks do not run that code. UnsupportedModelError where an earlier stage reaches it, unless
        not `refusing`.
        """
        found: list[Change] = []
        if self.is_still():
            return found
        with torch._C.DisableTorchFunction():
            for watched in self._watched:
                if watched.is_touched():
                    found += watched.changes()
            self._follow(found)
            self._glance = Glance(self._watched, self._passing)
        sent = []
        self.is_moving = self.is_moving or bool(found)
        for change in found:
            earlier = self._readers_of(change) & ((1 << self._stage) - 1)
            name = self._captured_name(change.place, change.key)
            is_captured = name in self._ours and (name not in self._foretold or name in self._returning)
            if refusing and earlier and not is_captured and (id(change.place.owner), change.key) not in self._expected:
                raise UnsupportedModelError(self._refusal(change, who, (earlier & -earlier).bit_length() - 1))
            if (self._readers_of(change) | self._all_readers_of(change)) >> (self._stage + 1):
                sent.append(change)
        return sent

    def encoded(self, changes: Sequence[Change], who: str, name: Naming = _unnamed) -> tuple[Any, ...]:
        """Changes as plain data, for the log. `name`: what a tensor is sent as, or None where its values are told."""
        return tuple(self._encoded(change, who, name) for change in changes)

    def apply(self, codes: Sequence[Any], stand_in: Callable[[str, Made], torch.Tensor] | None = None) -> set[int]:
        """Make the changes that an earlier stage's log tells of; the ids of tensors that were given other contents.

        `stand_in`: gives the tensor that is sent under a name.
        """
        filled: set[int] = set()
        for kind, name, key, content, code, tensors in codes:
            place = self._by_label.get((kind, name))
            if place is None:
                raise UnsupportedModelError(
                    f"an earlier stage changed {name!r}, and stage {self._stage} has nothing of that name: what "
                    f"modules keep differs between ranks"
                )
            if code is None:
                place.drop(key)
                continue

            whose = place.name_of(key)

            def make(k: int, made: Made, tensors: Any = tensors, whose: str = whose) -> torch.Tensor:
                if isinstance(tensors[k], str):
                    assert stand_in is not None
                    return stand_in(tensors[k], made)
                told = (
                    _tensor_of(tensors[k], getattr(torch, made.dtype))
                    .reshape(made.shape)
                    .to(self._device or made.device)
                )
                return applied(_OneWay, told.requires_grad_(), whose) if made.requires_grad else told

            held: Any = place.held(key)
            if not content and held is not GONE and pickled(self._code_of(held)) == pickled((code, tensors)):
                continue  # code before the layer has made the same change here
            value = Decoder(self._given(), self._own, make)(code)
            if content:
                filled.add(id(held))
                with torch.no_grad():
                    if not isinstance(held, torch.Tensor):
                        fill(held, value)
                    else:
                        _write(held, value)
            else:
                place.put(key, value)
        self.mark()
        return filled

    @contextmanager
    def computing_loss(self) -> Iterator[None]:
        """The block is the loss function, which earlier stages do not run: UnsupportedModelError where it changes what
        they read."""
        self.mark()
        yield
        self.changes("the loss function")

    # -- inside

    def _kept(self) -> Kept:
        places = self._reach.places.values()
        objects = [place.owner for place in places if place.kind == "attributes"]
        unannounced = may_write_unannounced(self._model, objects)
        return Kept(places, self._passing, self._model.parameters(), unannounced)

    def _given(self) -> Arguments:
        given = Arguments((), {})
        given.objects = [*self._objects]
        return given

    def _code_of(self, value: Any) -> Any:
        encoder = Encoder(self._given(), self._own_names)
        code = encoder(value)
        return code, tuple(_bytes_of(tensor) for tensor in encoder.tensors if is_sendable(tensor))

    def _encoded(self, change: Change, who: str, name: Naming) -> tuple[Any, ...]:
        place, key = change.place, change.key
        label = (place.kind, place.name, key, change.content)
        if change.now is GONE:
            return (*label, None, ())
        encoder = Encoder(self._given(), {} if change.content else self._own_names)
        is_array = change.content and not isinstance(change.now, torch.Tensor)
        code = encoder(content_of(change.now) if is_array else change.now)
        problem = withheld_in(code)
        captured = self._captured_name(place, key)
        is_captured = captured in self._by_layers
        names = [
            None if change.content else name(tensor, left_name(place.name_of(key), k), is_captured)
            for k, tensor in enumerate(encoder.tensors)
        ]
        for tensor, sent_as in zip(encoder.tensors, names, strict=True):
            if sent_as is not None:
                continue
            if tensor.requires_grad:
                problem = "tensor with a gradient"
            elif not is_sendable(tensor):
                problem = "tensor of a special kind"
        is_read = self._readers_of(change) >> (self._stage + 1) or captured not in self._ours
        if problem and is_read:
            raise UnsupportedModelError(
                f"{who} of stage {self._stage} puts a {problem} into {place.name_of(key)!r}, which later stages reach "
                f"and which cannot be sent to them so; the captured forward did not. Pin the layers that use it to one "
                f"stage (pin={{layer: stage}})"
            )
        told = zip(names, encoder.tensors, strict=True)
        return (*label, code, tuple(_bytes_of(tensor) if sent is None else sent for sent, tensor in told))

    def _captured_name(self, place: Place, key: Any) -> str:
        """The attribute that it is, or that holds the container that it is in: what capture knows an entry by."""
        name = place.attribute_of(key)
        is_inside = name not in self._writers and place.name != place.attribute and place.attribute in self._writers
        return place.attribute if is_inside else name

    def _readers_of(self, change: Change) -> int:
        """Stages that reach what has changed; where the captured forward changed that too, those that read it then."""
        name = self._captured_name(change.place, change.key)
        if isinstance(change.place, BufferPlace) and name in self._buffers:
            return self._buffers[name]
        if change.content and change.place.twins:
            return self._readers.get(name, 0) | change.place.readers_of_contents(change.key)
        return self._readers.get(name, change.place.readers_of(change.key))

    def _all_readers_of(self, change: Change) -> int:
        """Stages that reach it, whether or not they read it in the captured forward."""
        place, key = change.place, change.key
        return place.readers_of_contents(key) if change.content else place.readers_of(key)

    def _follow(self, changes: Sequence[Change]) -> None:
        """Look from now on at what came into places too."""
        for place, key, _, now, content in changes:
            if not content:
                self._reach.enter(now, place, key)
        if changes:
            self._watch_new()

    def _refuse_unannounced(self, tensor: torch.Tensor) -> None:
        """A tensor has begun to change past its version: nobody was told of that, so nobody else may have it."""
        for place in self._reach.places.values():
            for key, held in place.items():
                change = Change(place, key, held, held, True)
                others = self._readers_of(change) & ~(1 << self._stage) if held is tensor else 0
                if others:
                    raise UnsupportedModelError(
                        f"the forward of stage {self._stage} begins to change {place.name_of(key)!r} past torch's "
                        f"version counter, by .data or NumPy, and stage {(others & -others).bit_length() - 1} reaches "
                        f"it too: it would not learn of that. Write into the tensor itself, under torch.no_grad(), pin "
                        f"the layers that use it to one stage (pin={{layer: stage}}), or use replicas only "
                        f"(mesh={{'dp': n}})"
                    )

    def _watch_new(self) -> None:
        places = list(self._reach.places.values())
        for place in places[self._num_known :]:
            self._by_label.setdefault((place.kind, place.name), place)
            if place.may_change and place.is_shared:
                self._watched.append(Watched(place))
        self._num_known = len(places)

    def _refusal(self, change: Change, who: str, reader: int) -> str:
        name = change.place.name_of(change.key)
        how = "" if change.content else f" from {_short(change.before)} to {_short(change.now)}"
        return (
            f"{who} of stage {self._stage} changes {name!r}{how}, which stage {reader} reaches too and would not learn "
            f"of before its next micro-batch; the captured forward did not change it there. Pin the layers that use it "
            f"to one stage (pin={{layer: stage}}), change it in every forward so that capture sees it, or use replicas "
            f"only (mesh={{'dp': n}})"
        )


def kept_apart(model: nn.Module, layers: Sequence[str], stage_of: Mapping[str, int], loss: Any) -> list[str]:
    """What several stages only write (see `sinks`): each rank has what its own layers wrote."""
    return _kept_apart(Reach(model, Masks(layers, stage_of).of, loss))


def _kept_apart(reach: Reach) -> list[str]:
    places = [place for place in reach.places.values() if id(place.owner) in reach.sinks]
    names = [place.name for place in places if place.mask & (place.mask - 1)]
    return list(dict.fromkeys(name for name in names if not any(name.startswith(f"{other}.") for other in names)))


class Masks:
    """Stages in which the code of modules may run, as bits."""

    def __init__(self, layers: Sequence[str], stage_of: Mapping[str, int], again: Collection[str] = ()) -> None:
        """`again`: modules whose own code runs on all stages after their first too, between calls that do not."""
        self._all = (1 << (max(stage_of.values()) + 1)) - 1
        self._layers: dict[str, int] = {}
        self._around: dict[str, int] = {"": self._all}
        before = 0
        for name in layers:
            path, stage = name.partition("#")[0], stage_of[name]
            self._layers[path] = self._layers.get(path, 0) | 1 << stage
            for k, letter in enumerate(path):
                if letter == ".":  # the code of a module around it may begin on the stage of the layer before
                    self._around[path[:k]] = self._around.get(path[:k], 1 << before) | 1 << stage
            before = stage
        for path in self._around.keys() & set(again):
            lowest = self._around[path] & -self._around[path]
            self._around[path] |= self._all & -lowest

    def of(self, path: str) -> int:
        """Those of the module at `path`; all where it was not called."""
        found = self._layers.get(path, 0) | self._around.get(path, 0)
        above = path
        while not found and above:
            above = above.rpartition(".")[0]
            found = self._layers.get(above, 0)
        return found or self._all


class _OneWay(torch.autograd.Function):
    """A tensor of an earlier stage that nobody read there and then: its values may be looked at, and no more."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise UnsupportedModelError(
            f"a gradient reaches what a layer of an earlier stage left in {ctx.name!r}, and cannot go back there: the "
            "captured forward and its loss did not read it. Capture with inputs and flags that take this way, pin the "
            "layers that use it to one stage (pin={layer: stage}), or detach it where it is read"
        )


def _bits(*stages: int) -> int:
    found = 0
    for stage in stages:
        found |= 1 << stage
    return found


def _bytes_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _tensor_of(content: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)


def _write(held: torch.Tensor, value: torch.Tensor) -> None:
    """Let a tensor that the model keeps hold these values; graphs that saved it keep the old ones."""
    if become(held, value.clone()):
        torch.autograd.graph.increment_version(held)
    else:
        held.copy_(value)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor) or tensors_in(value):
        return f"a {type(value).__name__}" if not isinstance(value, torch.Tensor) else "a tensor"
    text = repr(value) if value is not GONE else "nothing"
    return text if len(text) <= 60 else f"{text[:57]}..."
