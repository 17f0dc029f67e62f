"""Watch what a forward keeps on its modules in plain Python: numbers, lists, caches, configurations, generators.

An attribute that one layer changes and another place reads must not be cut apart: a rank that skips the layer would
read what was there before. What tensors hold is followed elsewhere; here names and containers count.
"""

from __future__ import annotations

import gc
import io
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from partitioner.glance import Glance
from partitioner.reaching import GONE, INTERNALS, MAX_ITEMS, Change, Reach, SequencePlace, Watched
from partitioner.structures import PLAIN, is_python_object, is_same, opened, tensors_in

Place = tuple[int, int]
"""(operation, call that it happens in)"""

_STATELESS = (*PLAIN, torch.Tensor, nn.Module, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_UNKNOWN: Any = object()


class Attribute:
    """One attribute of one object, or one container that attributes refer to: where it was read, where changed."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value
        self.content = _content(value)
        self.reads: list[Place] = []
        self.writes: list[Place] = []
        self.owner = id(value)
        """The object that holds it, or the container itself."""
        self.start: Any = _UNKNOWN
        """Of a plain attribute, before its first change."""
        self.is_on_module = False
        self.is_new = False
        """Whether what holds it came to be in this forward: the next one has another."""
        self.returns = False
        """Whether it is plain, and at the end what it was at the start."""
        self.added: int | None = None
        """Of a whole number: what the forward has added to it."""
        self.now: Callable[[], Any] = lambda: None
        self.is_set_first = False
        """Whether the forward sets it before it reads it."""
        self.emptied: Place | None = None
        """Of a container: where it was emptied before anybody can have read what the last forward left in it."""
        self.slots: list[tuple[Place, torch.Tensor, torch.Tensor]] = []
        """Of a container: tensors in it that were replaced by others, and where."""
        self.has_only_slots = True
        """Whether that is all that changed of it."""
        self.is_told = True
        """Whether what layers change of it can be told to later stages."""

    def look(self) -> None:
        """Whether it holds something else than when it was read last: then it was changed from there."""
        now = _content(self.value)
        if len(now) != len(self.content) or not all(map(is_same, now, self.content)):
            self.writes.append(self.reads[-1])
            self.has_only_slots = False
            self.content = now

    def note(self, change: Change, here: Place) -> None:
        """A change of the container, or of one in it, that was found at a call's beginning or end."""
        is_whole = change.place.owner is self.value
        if not self.writes and is_whole and not len(self.value) and len(self.reads) <= 1:
            self.emptied = here
        slots = _replaced(change)
        self.has_only_slots = self.has_only_slots and slots is not None
        self.slots += [(here, *slot) for slot in slots or ()]
        self.writes.append(here)
        self.content = _content(self.value)


class Left(NamedTuple):
    """One change of Python state: when, of which attribute, under which name on all ranks, and what is there now."""

    when: int
    attribute: Attribute | None
    label: str
    now: Callable[[], Any]


class Outside:
    """A place outside of the model that was changed under a key, and where; `is_plain`: not with tensors alone."""

    def __init__(self, kind: str, name: str, key: Any) -> None:
        self.kind, self.name, self.key = kind, name, key
        self.writes: list[Place] = []
        self.is_plain = False


class Attributes:
    """All attributes that a forward reads and changes; `here` tells where it is.

    Watched are the model's modules and the objects of Python classes that their attributes lead to.
    """

    def __init__(
        self, model: nn.Module, here: Callable[[], Place], *, tell_new: bool = False, loss: Any = None
    ) -> None:
        """`tell_new`: whether to tell what comes to be in this forward, for which all objects that exist are noted."""
        self._here = here
        reach = Reach(model, lambda path: 1, loss)
        self.sinks = reach.found
        """What is only written."""
        self._known = {key: place.name for key, place in reach.places.items()}
        """Objects and containers by the names that they have on every rank, whichever way code comes to them."""
        self._before = frozenset(map(id, gc.get_objects())) if tell_new else None
        """Objects that were there before the forward. Of dicts not all are told, so none of them passes for new."""
        self._reach, self._num_known = reach, 0
        self._outside = set(map(id, list(reach.places.values())[reach.num_inside :]))
        """Places outside of the model."""
        self._watched: list[Watched] = []
        self._glance: Glance | None = None
        self.left: list[Left] = []
        """All changes, in their order."""
        self._unread: dict[str, list[tuple[Change, Place]]] = defaultdict(list)
        """Changes of containers behind attributes that nobody has read yet."""
        self._watch_new()
        self.outside: dict[str, Outside] = {}
        """What changed in globals, closures and class variables, by name."""
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._names: dict[tuple[int, str], Attribute] = {}
        self._containers: dict[int, Attribute] = {}
        self._behind: dict[str, Attribute] = {}
        """The same by name."""
        self._objects: list[Any] = []
        self._classes: dict[type, list[tuple[str, Any]]] = {}

    def poll(self) -> None:
        """Look for changes in what nobody can be told of: made here since the last look."""
        if self._glance is not None and self._glance.is_still():
            return
        for watched in list(self._watched):
            if watched.is_touched():
                for change in watched.changes():
                    self._changed(change)
        self._watch_new()
        self._glance = Glance(self._watched)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """All that attributes, containers and the like hold now, with what each is called there."""
        return [
            (place.name_of(key), part)
            for place in self._reach.places.values()
            for key, held in place.items()
            for part in tensors_in(held)
        ]

    def left_since(self, when: int) -> list[Left]:
        """What was changed from then on; of each name the last change."""
        found: dict[str, Left] = {}
        for one in reversed(self.left):
            if one.when < when:
                break
            found.setdefault(one.label, one)
        return list(found.values())[::-1]

    def _watch_new(self) -> None:
        places = list(self._reach.places.values())
        for place in places[self._num_known :]:
            is_told = place.kind in ("module", "buffers")  # of every change
            if place.may_change and not place.is_sink and not is_told:
                self._watched.append(Watched(place))
        self._num_known = len(places)

    def _changed(self, change: Change) -> None:
        place, key, here = change.place, change.key, self._here()
        if id(place) in self._outside:
            name = place.attribute_of(key)
            known = self.outside.setdefault(name, Outside(place.kind, place.name, key))
            known.writes.append(here)
            known.is_plain |= not isinstance(change.now, torch.Tensor) and not _holds_only_tensors(change)
        if change.content or key in place.only_written:
            self._reach.enter(change.now, place, key)
            return
        container = self._containers.get(id(place.owner)) or self._behind.get(place.attribute)
        if container is not None:
            container.note(change, here)
        elif place.kind in ("dict", "sequence"):
            self._unread[place.attribute].append((change, here))
        self._reach.enter(change.now, place, key)
        new = list(self._reach.places.values())[self._num_known :]
        self._outside |= set(map(id, new)) if id(place) in self._outside else set()
        self.left.append(Left(here[0], container, place.name_of(key), lambda: _held(place, key)))

    def all(self) -> list[Attribute]:
        """Those that were read or changed, after a last look."""
        for container in self._containers.values():
            container.look()
        return [*self._names.values(), *self._containers.values()]

    def changed(self) -> list[Attribute]:
        """Those that were changed."""
        return [item for item in self.all() if item.writes]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Learn of every attribute that is read or set, until the block ends.

        Replaces how nn.Module and other classes look up and set attributes, in all threads; for one single forward.
        """
        self._watch_class(nn.Module)
        try:
            yield
        finally:
            for cls, replaced in self._classes.items():
                for name, original in replaced:
                    if original is None:
                        delattr(cls, name)
                    else:
                        setattr(cls, name, original)

    def _watch_class(self, cls: type) -> None:
        get_plainly: Any = cls.__getattribute__
        set_plainly: Any = cls.__setattr__

        def get(item: Any, name: str) -> Any:
            if id(item) in self._paths and name not in INTERNALS:
                state = object.__getattribute__(item, "__dict__")
                if name in state:
                    self._read(item, name, state[name])
                elif name in state.get("_buffers", ()):
                    self._read(item, name, state["_buffers"][name])
            return get_plainly(item, name)

        def put(item: Any, name: str, value: Any) -> None:
            before = object.__getattribute__(item, "__dict__").get(name, _UNKNOWN) if id(item) in self._paths else None
            set_plainly(item, name, value)
            watched = id(item) in self._paths and name not in INTERNALS
            place = self._reach.places.get(id(item))
            if watched and place is not None and name in place.only_written:
                self._reach.enter(value, place, name)
            elif watched and not isinstance(
                value, (nn.Module, nn.Parameter)
            ):  # also the same value: another time it may differ
                attribute = self._named(item, name)
                if not attribute.writes:
                    attribute.start = before
                    attribute.is_set_first = not attribute.reads
                here = self._here()
                attribute.writes.append(here)
                attribute.returns = isinstance(value, PLAIN) and is_same(value, attribute.start)
                is_whole = type(value) is int and type(attribute.start) is int
                attribute.added = value - attribute.start if is_whole else None
                attribute.now = lambda: _attribute_of(item, name)
                attribute.is_told &= place is not None and place.name_of(name) == attribute.name
                self._reach.enter(value, place, name) if place is not None else None
                self._glance = None
                self.left.append(Left(here[0], attribute, attribute.name, lambda: _attribute_of(item, name)))

        self._classes[cls] = [(name, cls.__dict__.get(name)) for name in ("__getattribute__", "__setattr__")]
        cls.__getattribute__ = get  # type: ignore[method-assign, assignment]
        cls.__setattr__ = put  # type: ignore[method-assign, assignment]

    def _read(self, item: Any, name: str, value: Any) -> None:
        place = self._reach.places.get(id(item))
        if place is not None and name in place.only_written:
            return
        here = self._here()
        attribute = self._named(item, name)
        attribute.reads.append(here)
        if isinstance(value, _STATELESS):
            return
        if _is_watchable(value):
            if id(value) not in self._paths:
                self._paths[id(value)] = self._known.get(id(value), attribute.name)
                self._objects.append(value)
                if type(value) not in self._classes:
                    self._watch_class(type(value))
            return
        container = self._containers.get(id(value))
        if container is None:
            name = self._known.get(id(value), attribute.name)
            container = self._containers[id(value)] = self._behind[name] = Attribute(name, value)
            container.is_new = isinstance(value, list) and self._is_new(value)
            container.is_told = id(value) in self._reach.places
            for change, where in self._unread.pop(name, ()):
                container.note(change, where)
        elif container.reads[-1] != here:
            if isinstance(value, (list, dict, set, deque)):
                self.poll()
            container.look()
        container.reads.append(here)
        if _is_iterator(value):
            container.writes.append(here)

    def _is_new(self, item: Any) -> bool:
        return self._before is not None and id(item) not in self._before

    def _named(self, item: Any, name: str) -> Attribute:
        key = (id(item), name)
        if key not in self._names:
            path = self._paths[id(item)]
            self._names[key] = Attribute(f"{path}.{name}" if path else name, None)
            self._names[key].owner = id(item)
            self._names[key].is_on_module = isinstance(item, nn.Module)
            self._names[key].is_new = not isinstance(item, nn.Module) and self._is_new(item)
        return self._names[key]


def _held(place: Any, key: Any) -> Any:
    """What a place holds under a key, or a list as a whole."""
    held = place.held(key)
    return None if held is GONE else held


def _attribute_of(item: Any, name: str) -> Any:
    state = object.__getattribute__(item, "__dict__")
    return state[name] if name in state else state.get("_buffers", {}).get(name)


def _replaced(change: Change) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Tensors that were replaced by others, where nothing else changed; None where something did."""
    before, now = change.before, change.now
    if not isinstance(change.place, SequencePlace):
        before, now = [before], [now]
    if not isinstance(change.place.owner, (list, dict)) or len(before) != len(now):
        return None
    other = [(a, b) for a, b in zip(before, now, strict=True) if not is_same(b, a)]
    are_tensors = all(isinstance(part, torch.Tensor) for pair in other for part in pair)
    return other if are_tensors else None


def _holds_only_tensors(change: Change) -> bool:
    """Tensors are followed one by one, wherever they are kept."""
    parts = [one for one in (change.before, change.now) if isinstance(one, list)]
    return bool(parts) and all(isinstance(part, torch.Tensor) for one in parts for part in one)


def _is_watchable(value: Any) -> bool:
    inside = opened(value)
    return is_python_object(value) and (inside is None or inside.kind == "object")


def _is_iterator(value: Any) -> bool:
    """Whether it moves on by being used, without a trace to compare (an `itertools.cycle`, a running generator)."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not is_python_object(value)


def _content(value: Any, depth: int = 2) -> list[Any]:
    """Items by which one state of a mutable object is told from another; they are compared one by one."""
    if isinstance(value, _STATELESS) or not depth:
        return [value]
    if isinstance(value, torch.Generator):
        return [value.get_state().cpu().numpy().tobytes()]
    if isinstance(value, random.Random):
        return [repr(value.getstate())]
    if isinstance(value, np.random.Generator):
        return [repr(value.bit_generator.state)]
    if isinstance(value, np.random.RandomState):
        name, keys, *rest = value.get_state(legacy=True)
        return [name, np.asarray(keys).tobytes(), *rest]
    if isinstance(value, (set, frozenset)):
        return [value, *sorted(map(id, value))]
    inside = opened(value)
    if inside is None:
        return [value]
    found: list[Any] = [len(inside.parts)]
    for part in inside.parts[-MAX_ITEMS:]:
        found += _content(part, depth - 1)
    return found
