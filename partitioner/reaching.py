"""Find what a model's code reaches in plain Python: attributes, containers, objects, globals, closures.

What the code of two stages reaches they have in common on one device, and not on two ranks. A place is a container
or an object with items or attributes that may change; which modules reach it is told by a mask, a bit for each stage.

    module's attributes         its own stage, and those of modules that refer to it other than as their parent
    objects, lists, dicts       every stage from whose modules attributes lead there
    globals, closures           every stage in which a function runs that names them

What code only writes into, as hooks do that collect what passes, it reaches and does not read.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import operator
import queue
import sys
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from partitioner.contents import content_of, has_content
from partitioner.logbook import version
from partitioner.running import forward_hooks_on, is_foreign, is_installed
from partitioner.sinks import NONE, Holder, Sinks, sinks_among
from partitioner.structures import PLAIN, is_python_class, is_same, slots, storage_of
from partitioner.usage import WRITES, names_in, reads_of

_MAX_DEPTH = 6
MAX_ITEMS = 1000
"""Of a container, that are looked into."""

_HOLDERS = frozenset(
    {
        argparse.Namespace,
        SimpleNamespace,
        UserDict,
        UserList,
        ChainMap,
        queue.Queue,
        queue.LifoQueue,
        queue.PriorityQueue,
        weakref.WeakKeyDictionary,
        weakref.WeakValueDictionary,
    }
)
"""Classes of Python's own library whose objects hold what is the user's."""

INTERNALS = frozenset(vars(nn.Module())) | {"_call_impl", "_compiled_call_impl"}
"""Attributes of a module that are torch's own."""
_MISSING = object()

GONE: Any = object()
_WHOLE = None
"""Key of a list, deque or set, which changes as a whole."""


class Place:
    """One object whose items or attributes may change. `name` is the same on every rank.

    `attribute`: the module attribute (or global) that it was found behind; `mask`: the stages whose code reaches it;
    `readers`: those of them whose code may read it.
    """

    kind = "attributes"
    may_change = True

    def __init__(self, owner: Any, name: str, attribute: str) -> None:
        self.owner, self.name, self.attribute = owner, name, attribute
        self.mask = self.readers = 0
        self.readers_by_key: dict[Any, int] = {}
        """Of attributes that code reads where it does not read the rest."""
        self.only_written: set[Any] = set()
        """Keys under which there are sinks."""
        self.is_sink = False
        """Whether nothing but sinks leads here."""
        self.twins: dict[Any, list[tuple[Place, Any]]] = {}
        """By key, other places that hold a tensor or array in the same memory, and under which key."""

    def readers_of(self, key: Any) -> int:
        """Stages whose code may read what is held under `key`."""
        return 0 if key in self.only_written else self.readers | self.readers_by_key.get(key, 0)

    @property
    def is_shared(self) -> bool:
        """Whether it is read, and code of more than one stage leads to it."""
        mask = functools.reduce(int.__or__, (one.mask for some in self.twins.values() for one, _ in some), self.mask)
        return bool(self.readers or self.readers_by_key or self.twins) and bool(mask & (mask - 1))

    def readers_of_contents(self, key: Any) -> int:
        """Stages whose code may read what the tensor or array under `key` holds, by whichever name."""
        found = self.readers_of(key)
        held = _memory(self.held(key)) if key in self.twins else None
        for other, name in self.twins.get(key, ()):
            if held is not None and _memory(other.held(name)) == held:
                found |= other.readers_of(name)
        return found

    def widen(self, mask: int) -> None:
        """Let code of these stages read it too."""
        self.mask |= mask
        self.readers |= mask

    def items(self) -> list[tuple[Any, Any]]:
        """(key, value) of all that it holds now."""
        found = vars(self.owner) if hasattr(self.owner, "__dict__") else {}
        names = slots(type(self.owner))  # type: ignore[arg-type]  # mypy does not take classes for hashable
        return [*found.items(), *((key, getattr(self.owner, key)) for key in names if hasattr(self.owner, key))]

    def held(self, key: Any) -> Any:
        """What it holds under `key` now, a list as a whole; `GONE` where there is nothing."""
        return dict(self.items()).get(key, GONE)

    def parts(self) -> Iterable[Any]:
        """Objects that are others, or in another order, where something else is held: quick to go through."""
        if slots(type(self.owner)):  # type: ignore[arg-type]
            return [part for item in self.items() for part in item]
        found: Iterable[Any] = vars(self.owner).values()
        return found

    def views(self) -> list[Any] | None:
        """What always goes through the objects that it holds then, and tells how many; None where there is no such."""
        if slots(type(self.owner)) or not hasattr(self.owner, "__dict__"):  # type: ignore[arg-type]
            return None
        return [vars(self.owner).values()]

    def table(self) -> dict[Any, Any] | None:
        """The dict that the views are of, if they are of one."""
        return None if self.views() is None else vars(self.owner)

    def put(self, key: Any, value: Any) -> None:
        """Let it hold `value` under `key`."""
        object.__setattr__(self.owner, key, value)

    def drop(self, key: Any) -> None:
        """Let it hold nothing under `key`."""
        object.__delattr__(self.owner, key)

    def name_of(self, key: Any) -> str:
        """How an item is called in a message."""
        return f"{self.name}.{key}" if self.name else str(key)

    def attribute_of(self, key: Any) -> str:
        """The module attribute that an item is, or belongs to."""
        return self.name_of(key)


class ModulePlace(Place):
    """What torch itself keeps on a module is left out."""

    kind = "module"

    def items(self) -> list[tuple[Any, Any]]:
        return [(key, value) for key, value in vars(self.owner).items() if key not in INTERNALS]

    def put(self, key: Any, value: Any) -> None:
        vars(self.owner)[key] = value

    def drop(self, key: Any) -> None:
        del vars(self.owner)[key]


class DictPlace(Place):
    kind = "dict"

    def items(self) -> list[tuple[Any, Any]]:
        return list(dict.items(self.owner))

    def parts(self) -> Iterable[Any]:
        return itertools.chain(dict.keys(self.owner), dict.values(self.owner))

    def views(self) -> list[Any] | None:
        return [dict.keys(self.owner), dict.values(self.owner)]

    def table(self) -> dict[Any, Any] | None:
        found: dict[Any, Any] = self.owner
        return found

    def put(self, key: Any, value: Any) -> None:
        self.owner[key] = value

    def drop(self, key: Any) -> None:
        del self.owner[key]

    def name_of(self, key: Any) -> str:
        return f"{self.name}[{key!r}]"

    def attribute_of(self, key: Any) -> str:
        return self.attribute


class BufferPlace(DictPlace):
    """A module's table of buffers."""

    kind = "buffers"

    def name_of(self, key: Any) -> str:
        return f"{self.name}.{key}" if self.name else str(key)

    def attribute_of(self, key: Any) -> str:
        return self.name_of(key)


class SequencePlace(Place):
    """A list, deque or set: changed as a whole, under the key None."""

    kind = "sequence"

    def items(self) -> list[tuple[Any, Any]]:
        return list(enumerate(self.owner))

    def held(self, key: Any) -> Any:
        return list(self.parts())

    def parts(self) -> Iterable[Any]:
        return list(self.owner)

    def views(self) -> list[Any] | None:
        return [self.owner]

    def table(self) -> dict[Any, Any] | None:
        return None

    def put(self, key: Any, value: Any) -> None:
        self.owner.clear()
        self.owner.update(value) if isinstance(self.owner, set) else self.owner.extend(value)

    def name_of(self, key: Any) -> str:
        return self.name

    def attribute_of(self, key: Any) -> str:
        return self.attribute


class ObjectsPlace(SequencePlace):
    """A NumPy array of objects."""

    def items(self) -> list[tuple[Any, Any]]:
        return list(enumerate(self.parts()))

    def parts(self) -> Iterable[Any]:
        found: list[Any] = self.owner.ravel().tolist()
        return found

    def views(self) -> list[Any] | None:
        return None

    def put(self, key: Any, value: Any) -> None:
        flat = np.empty(self.owner.size, dtype=object)
        flat[:] = value
        self.owner[...] = flat.reshape(self.owner.shape)


class NamePlace(Place):
    """One name of a Python module or class. What a library names is taken for fixed where no code seen sets it."""

    kind = "name"

    def __init__(self, owner: Any, name: str, key: str) -> None:
        super().__init__(owner, f"{name}.{key}", f"{name}.{key}")
        self.key = key
        self.may_change = not is_installed(getattr(owner, "__module__", None) or getattr(owner, "__name__", ""))

    def items(self) -> list[tuple[Any, Any]]:
        space = vars(self.owner)
        return [(self.key, space[self.key])] if self.key in space else []

    def parts(self) -> Iterable[Any]:
        return [vars(self.owner).get(self.key, _MISSING)]

    def views(self) -> list[Any] | None:
        return None

    def put(self, key: Any, value: Any) -> None:
        setattr(self.owner, key, value)

    def drop(self, key: Any) -> None:
        delattr(self.owner, key)

    def name_of(self, key: Any) -> str:
        return self.name

    def attribute_of(self, key: Any) -> str:
        return self.name


class CellPlace(Place):
    """A variable of a function around the one that uses it, fixed where no code seen sets it."""

    kind = "cell"
    may_change = False

    def items(self) -> list[tuple[Any, Any]]:
        value = _content(self.owner)
        return [] if value is _MISSING else [("", value)]

    def parts(self) -> Iterable[Any]:
        return [value for _, value in self.items()]

    def views(self) -> list[Any] | None:
        return None

    def put(self, key: Any, value: Any) -> None:
        self.owner.cell_contents = value

    def name_of(self, key: Any) -> str:
        return self.name

    def attribute_of(self, key: Any) -> str:
        return self.name


class Change(NamedTuple):
    """What a place holds under `key` now and held before; `content`: the same tensor or array, that holds else."""

    place: Place
    key: Any
    before: Any
    now: Any
    content: bool = False


class Watched:
    """A place as it was when it was last looked at."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.look()

    def look(self) -> None:
        self.items = self.place.items()
        self.parts = list(self.place.parts())
        self.tensors = [(key, value) for key, value in self.items if isinstance(value, torch.Tensor)]
        self.versions = [version(tensor) for _, tensor in self.tensors]
        self.arrays = [(key, value, content_of(value)) for key, value in self.items if has_content(value)]

    def is_touched(self) -> bool:
        now = self.place.parts()
        if not isinstance(now, list):
            now = list(now)
        if len(now) != len(self.parts) or not all(map(operator.is_, now, self.parts)):
            return True
        if self.tensors and [version(tensor) for _, tensor in self.tensors] != self.versions:
            return True
        return any(content_of(value) != before for _, value, before in self.arrays)

    def changes(self) -> list[Change]:
        """What is other than it was; it is looked at anew."""
        place, old, tensors = self.place, self.items, list(zip(self.tensors, self.versions, strict=True))
        arrays = self.arrays
        self.look()
        now = {} if isinstance(place, SequencePlace) else dict(self.items)
        found = [
            Change(place, key, tensor, tensor, True)
            for (key, tensor), before in tensors
            if version(tensor) != before and now.get(key) is tensor
        ]
        found += [
            Change(place, key, value, value, True) for key, value, before in arrays if content_of(value) != before
        ]
        if isinstance(place, SequencePlace):
            was_list, list_now = [value for _, value in old], [value for _, value in self.items]
            same = len(was_list) == len(list_now) and all(map(is_same, list_now, was_list))
            touched = any(version(tensor) != before for (_, tensor), before in tensors)
            return [] if same and not touched else [Change(place, _WHOLE, was_list, list_now)]
        was = dict(old)
        found += [
            Change(place, key, was.get(key, GONE), value)
            for key, value in now.items()
            if key not in was or not is_same(value, was[key])
        ]
        return [*found, *(Change(place, key, value, GONE) for key, value in was.items() if key not in now)]


class Reach:
    """All places that a model's code reaches, by the id of what they are, in the same order on every rank.

    `mask_of(path)`: the stages in which the code of the module at `path` may run, a bit each. `loss`: code that runs on
    the last of them, after the model. `sinks`: what another one has found of the same model: they are not looked for.
    """

    def __init__(
        self, model: nn.Module, mask_of: Callable[[str], int], loss: Any = None, *, sinks: Sinks | None = None
    ) -> None:
        self.places: dict[Any, Place] = {}
        self._masks: dict[tuple[int, str], int] = {}
        self._kept: list[Any] = []
        self._reading = True
        """Whether what is followed is read there, not only written into."""
        self._deep = False
        """Whether modules are followed into the modules in them."""
        self.found, self._in_sink = sinks or NONE, False
        """What is only written."""
        paths: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            paths.setdefault(id(module), []).append(path)
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._model, self._loss_fn, self._last = model, loss, 1 << mask_of("").bit_length() - 1
        modules = list(model.named_modules())
        masks = [functools.reduce(int.__or__, map(mask_of, paths[id(module)])) for _, module in modules]
        self._modules = [(mask, path, module) for mask, (path, module) in zip(masks, modules, strict=True)]
        self._follow_all()
        if sinks is None:
            self._find_sinks()

    def _follow_all(self) -> None:
        self.places.clear()
        self._masks.clear()
        self._deep = False
        for _, path, module in self._modules:
            self.places[id(module)] = ModulePlace(module, path, "")
            if module._buffers:
                self.places[id(module._buffers)] = BufferPlace(module._buffers, path, "")
        for mask, _, module in self._modules:
            self._module(module, mask, 0)
        self.num_inside = len(self.places)
        """The first places are the model's own; those after them are outside of it, where its code leads."""
        for mask, path, module in self._modules:
            self._hooks_of(module, mask, path)
            self._class(type(module), mask, 0, ("forward", "__call__"))
        if self._loss_fn is not None:
            self._loss(self._loss_fn, self._last)
        self._pair()

    def _find_sinks(self) -> bool:
        """Whether they are others than they were: then all is followed anew."""
        held: list[tuple[Holder, Any]] = []
        more: list[Any] = []
        for place in self.places.values():
            for key, value in place.items()[:MAX_ITEMS]:
                held.append((Holder(place.kind, place.owner, key), value))
                if isinstance(value, (FunctionType, MethodType, functools.partial, tuple)):
                    more.append(value)
            if place.kind == "attributes":
                more.append(place.owner)
        for _, _, module in self._modules:
            for hook in forward_hooks_on(module):
                owner = hook.__self__ if isinstance(hook, MethodType) else hook
                held.append((Holder("hook", module, None), owner))
        before, self.found = self.found, sinks_among(self._model, held, more, self._loss_fn)
        if self.found.are(before):
            return False
        self._follow_all()
        return True

    @property
    def sinks(self) -> Mapping[int, Any]:
        """Objects that are only written, by id."""
        return self.found.objects

    @property
    def sink_keys(self) -> frozenset[str]:
        """Names of attributes and variables that hold what is only written."""
        return frozenset(key for _, key in self.found.slots if isinstance(key, str))

    def look_at_hooks(self) -> bool:
        """Follow hooks that have come since; what only they lead to comes after all other places.

        Whether they read what was only written before: then all places are others.
        """
        for mask, path, module in self._modules:
            self._hooks_of(module, mask, path)
        self._pair()
        return self._find_sinks()

    def _pair(self) -> None:
        """Let places know which others hold tensors and arrays in the same memory: in place they change together."""
        holders: dict[int, list[tuple[Place, Any]]] = {}
        for place in self.places.values():
            if not isinstance(place, SequencePlace):
                for key, value in place.items():
                    if (memory := _memory(value)) is not None:
                        holders.setdefault(memory, []).append((place, key))
        for held in holders.values():
            for place, key in held if len(held) > 1 else ():
                place.twins[key] = [one for one in held if one[0] is not place]

    def enter(self, value: Any, place: Place, key: Any) -> None:
        """Follow what has come into a place under `key`."""
        name, attribute = place.name_of(key), place.attribute_of(key)
        with self._inside(place, key):
            if place.readers:
                self._value(value, name, attribute, place.readers, 0)
            with self._written():
                self._value(value, name, attribute, place.mask, 0)

    @contextmanager
    def _inside(self, place: Place, key: Any = None) -> Iterator[None]:
        """In the block, what is held under a key of a place is followed."""
        before = self._in_sink, self._reading
        if place.is_sink or (id(place.owner), key) in self.found.slots:
            self._in_sink, self._reading = True, False
            place.only_written |= set() if place.is_sink else {key}
        try:
            yield
        finally:
            self._in_sink, self._reading = before

    @contextmanager
    def _written(self, only: bool = True) -> Iterator[None]:
        """What is followed in the block is only written into; `only=False`: it is read."""
        before, self._reading = self._reading, not only
        try:
            yield
        finally:
            self._reading = before

    def _reach(self, place: Place, mask: int) -> bool:
        """Whether these stages reach a place, or read it, for the first time."""
        before = place.mask, place.readers, place.is_sink
        place.is_sink = self._in_sink and (place.is_sink or not place.mask)
        place.mask |= mask
        if self._reading:
            place.readers |= mask
        return before != (place.mask, place.readers, place.is_sink)

    # -- values

    def _module(self, module: nn.Module, mask: int, depth: int) -> None:
        place = self.places[id(module)]
        if not self._reach(place, mask):
            return
        if id(module._buffers) in self.places:
            self._reach(self.places[id(module._buffers)], mask)
        for key, value in place.items():
            with self._inside(place, key):
                self._value(value, place.name_of(key), place.attribute_of(key), mask, depth)

    def _value(self, value: Any, name: str, attribute: str, mask: int, depth: int) -> None:
        if isinstance(value, (*PLAIN, torch.Tensor)) or depth > _MAX_DEPTH:
            return
        cls: Any = type(value)
        if id(value) in self.found.objects and not self._in_sink:
            before, self._in_sink, self._reading = self._reading, True, False
            self._value(value, name, attribute, mask, depth)
            self._in_sink, self._reading = False, before
        elif (
            not self._reading
            and not self._in_sink
            and is_python_class(cls)
            and any(hasattr(cls, one) for one in WRITES)
        ):
            with self._written(only=False):  # a method of the user's own may tell what it holds
                self._value(value, name, attribute, mask, depth)
        elif isinstance(value, nn.Module):
            for module in value.modules() if self._deep else [value]:
                if self._reading and id(module) in self._paths:
                    self._module(module, mask, depth + 1)
        elif isinstance(value, tuple):
            for k, part in enumerate(value[:MAX_ITEMS]):
                self._value(part, f"{name}[{k}]", attribute, mask, depth + 1)
        elif isinstance(value, dict):
            self._enter(value, DictPlace, name, attribute, mask, depth)
            self._own_attributes(value, name, attribute, mask, depth)
        elif isinstance(value, np.ndarray) and value.dtype == object:
            self._enter(value, ObjectsPlace, name, attribute, mask, depth)
        elif isinstance(value, (list, deque, set)):
            self._enter(value, SequencePlace, name, attribute, mask, depth)
            self._own_attributes(value, name, attribute, mask, depth)
        elif isinstance(value, (FunctionType, MethodType, functools.partial)):
            self._callable(value, name, mask, depth + 1)
        elif isinstance(value, (BuiltinMethodType, MethodWrapperType)) and not isinstance(value.__self__, ModuleType):
            with self._written() if value.__name__ in (*WRITES, "__setitem__") else nullcontext():  # as log.append
                self._value(value.__self__, name, attribute, mask, depth + 1)
        elif type(value) in _HOLDERS:
            self._enter(value, Place, name, attribute, mask, depth)
        elif is_python_class(type(value)) and not is_foreign(type(value).__module__):  # type: ignore[arg-type]
            self._enter(value, Place, name, attribute, mask, depth)
            if self._reading and not is_installed(type(value).__module__):
                self._class(type(value), mask, depth + 1)

    def _own_attributes(self, value: Any, name: str, attribute: str, mask: int, depth: int) -> None:
        """Those that a container of the user's class has beside its items."""
        cls: Any = type(value)
        held = getattr(value, "__dict__", None)
        if held is not value and isinstance(held, dict) and is_python_class(cls) and not is_foreign(cls.__module__):
            self._enter(held, DictPlace, f"{name}.__dict__", attribute, mask, depth)

    @contextmanager
    def _as_read(self, reads: frozenset[str] | None, value: Any, mask: int, depth: int) -> Iterator[None]:
        """In the block follow a value of which code reads these attributes alone; None: it reads the thing itself."""
        held = dict(Place(value, "", "").items()) if reads else {}
        if reads is None or isinstance(value, nn.Module) or not reads <= held.keys():
            yield
            return
        with self._written():
            yield
        place = self.places.get(id(value))
        if reads and place is not None and not place.is_sink:
            for key in sorted(reads):
                place.readers_by_key[key] = place.readers_by_key.get(key, 0) | mask
                self._value(held[key], place.name_of(key), place.attribute_of(key), mask, depth + 1)

    def _enter(self, value: Any, kind: type[Place], name: str, attribute: str, mask: int, depth: int) -> None:
        place = self.places.get(id(value))
        if place is None:
            place = self.places[id(value)] = kind(value, name, attribute)
        if not self._reach(place, mask):
            return
        for key, part in place.items()[:MAX_ITEMS]:
            inner = f"{name}[{key}]" if kind is SequencePlace else place.name_of(key)
            with self._inside(place, key):
                self._value(part, inner, place.attribute_of(key), mask, depth + 1)

    # -- code

    def _loss(self, loss: Any, mask: int) -> None:
        self._deep = True
        modules = list(loss.modules()) if isinstance(loss, nn.Module) else []
        for module in modules:
            self._class(type(module), mask, 0, ("forward", "__call__"))
            for key, value in vars(module).items():
                if key not in INTERNALS:
                    self._value(value, f"loss.{key}", f"loss.{key}", mask, 0)
        if not modules:
            self._value(loss, "loss", "loss", mask, 0)

    def _hooks_of(self, module: nn.Module, mask: int, path: str) -> None:
        for hook in forward_hooks_on(module):
            self._hook(hook, f"{path}.hook", mask)

    def _class(self, cls: type, mask: int, depth: int, start: tuple[str, ...] | None = None) -> None:
        """The variables of a class, and its methods: all, or for installed ones those that `start` leads to by name."""
        if is_foreign(cls.__module__) or depth > _MAX_DEPTH:
            return
        bases = [base for base in cls.__mro__ if not is_foreign(base.__module__)]
        installed = is_installed(cls.__module__) and start is not None
        wanted = list(start or ()) if installed else [name for base in bases for name in vars(base)]
        known = set(wanted)
        while wanted:
            name = wanted.pop()
            for base in bases:
                found = vars(base).get(name)
                if found is None or not self._seen(base, name, mask):
                    continue
                functions = [*_functions_of(found)]
                for function in functions:
                    self._callable(function, f"{base.__qualname__}.{name}", mask, depth + 1)
                    if installed:
                        more = [one for one in names_in(function.__code__)[0] if one not in known]
                        known.update(more)
                        wanted += more
                if not functions and not name.startswith("__") and not isinstance(found, type):
                    self._name(base, f"{base.__module__}.{base.__qualname__}", name, False, mask, depth)

    def _seen(self, owner: Any, name: str, mask: int) -> bool:
        """Whether these stages have come here for the first time."""
        before = self._masks.get((id(owner), name), 0)
        self._masks[id(owner), name] = before | mask
        return before | mask != before

    def _name(self, owner: Any, where: str, key: str, is_set: bool, mask: int, depth: int) -> None:
        """A name of a Python module or class that code of these stages reads or sets."""
        place = self.places.setdefault((id(owner), key), NamePlace(owner, where, key))
        place.may_change = place.may_change or is_set
        if not self._reach(place, mask):
            return
        for _, value in place.items():
            with self._inside(place, key):
                self._value(value, place.name, place.name, mask, depth + 1)

    def _hook(self, hook: Any, name: str, mask: int) -> None:
        """What a hook's code leads to; attributes of the hook itself only where code names it."""
        own_call = next((vars(base)["__call__"] for base in type(hook).__mro__ if "__call__" in vars(base)), None)
        if isinstance(hook, FunctionType):
            if not is_foreign(hook.__module__ or ""):
                self._function(hook, mask, 0)
        elif isinstance(own_call, FunctionType):
            self._callable(MethodType(own_call, hook), name, mask, 0)
        else:
            self._value(hook, name, name, mask, 0)

    def _callable(self, value: Any, name: str, mask: int, depth: int) -> None:
        """Code that something leads to, and what is bound to it: of what is only written into, that alone."""
        if depth > _MAX_DEPTH:
            return
        if isinstance(value, functools.partial):
            self._value(value.func, name, name, mask, depth + 1)
            code = getattr(value.func, "__code__", None)
            names = (*(code.co_varnames if code else ())[: len(value.args)], *value.keywords)
            for argument, part in itertools.zip_longest(names, (*value.args, *value.keywords.values())):
                with self._as_read(reads_of(code, argument) if code and argument else None, part, mask, depth):
                    self._value(part, name, name, mask, depth + 1)
            return
        if isinstance(value, MethodType):
            code = getattr(value.__func__, "__code__", None)
            reads = reads_of(code, code.co_varnames[0]) if code and code.co_varnames else None
            with self._as_read(reads, value.__self__, mask, depth):
                self._value(value.__self__, name, name, mask, depth + 1)
            value = value.__func__
        if isinstance(value, FunctionType) and not is_foreign(value.__module__ or ""):
            where = f"{value.__module__}.{value.__qualname__}"
            for key, held in vars(value).items():
                if key != "__wrapped__":
                    self._value(held, f"{where}.{key}", f"{where}.{key}", mask, depth + 1)
            if self._reading:
                self._function(value, mask, depth)

    def _function(self, function: FunctionType, mask: int, depth: int) -> None:
        if not self._seen(function, "", mask):
            return
        self._kept.append(function)
        code, where = function.__code__, f"{function.__module__}.{function.__qualname__}"
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            is_set = name in names_in(code)[1]
            with self._as_read(reads_of(code, name), _content(cell), mask, depth):
                self._cell(cell, f"{where}.{name}", is_set, mask, depth)
        defaults, by_keyword = function.__defaults__ or (), function.__kwdefaults__ or {}
        names = (*code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], *by_keyword)
        for k, (name, default) in enumerate(zip(names, (*defaults, *by_keyword.values()), strict=True)):
            with self._as_read(reads_of(code, name), default, mask, depth):
                self._value(default, f"{where} default {k}", f"{where} default {k}", mask, depth + 1)
        loaded, stored = names_in(code)
        space = function.__globals__
        module = sys.modules.get(space.get("__name__", ""))
        if module is None or vars(module) is not space:
            module = _Space(space)  # type: ignore[assignment]
        for name in loaded:
            value = space.get(name, _MISSING)
            if value is _MISSING and name not in stored:
                continue
            if isinstance(value, ModuleType):
                self._attributes_of_module(value, loaded, mask, depth)
            elif isinstance(value, type):
                if not is_installed(value.__module__):
                    self._class(value, mask, depth + 1)
            else:
                with self._as_read(reads_of(code, name), value, mask, depth):
                    self._global(module, space.get("__name__", ""), name, name in stored, mask, depth)

    def _global(self, module: Any, where: str, name: str, is_set: bool, mask: int, depth: int) -> None:
        value = vars(module).get(name, _MISSING)
        if isinstance(value, (FunctionType, functools.partial, MethodType)) or hasattr(value, "__wrapped__"):
            self._callable(getattr(value, "__wrapped__", value), name, mask, depth + 1)
            if is_set:
                self._name(module, where, name, True, mask, depth)
        elif not name.startswith("__"):
            self._name(module, where, name, is_set, mask, depth)

    def _attributes_of_module(self, module: ModuleType, names: tuple[str, ...], mask: int, depth: int) -> None:
        """What is read of another Python module of the user's, as in `settings.RATE`."""
        if is_installed(module.__name__):
            return
        for name in names:
            value = vars(module).get(name, _MISSING)
            if isinstance(value, FunctionType):
                self._callable(value, name, mask, depth + 1)
            elif value is not _MISSING and not isinstance(value, (type, ModuleType)):
                self._name(module, module.__name__, name, False, mask, depth)

    def _cell(self, cell: CellType, name: str, is_set: bool, mask: int, depth: int) -> None:
        if isinstance(_content(cell), type):  # __class__, for super()
            return
        self._enter(cell, CellPlace, name, name, mask, depth)
        place = self.places[id(cell)]
        place.may_change = place.may_change or is_set


class _Space:
    """The globals of functions whose module is gone, or was never imported."""

    def __init__(self, space: dict[str, Any]) -> None:
        self.__dict__ = space


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet set
        return _MISSING


def _memory(value: Any) -> int | None:
    """Where a tensor's or array's values lie; None for others and for parameters, which are followed by themselves."""
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        with torch._C.DisableTorchFunction():
            return storage_of(value) if value.layout == torch.strided else id(value)
    return id(value) if has_content(value) else None


def _functions_of(found: Any) -> Iterator[FunctionType]:
    """The functions behind an entry of a class."""
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    for one in (found.fget, found.fset) if isinstance(found, property) else (getattr(found, "func", found),):
        if isinstance(one, FunctionType):
            yield one
