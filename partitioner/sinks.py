"""State that a forward only writes: meters, histories, logs. Nothing else that a forward computes depends on it.

    self.meter.update(float(x.mean()))               def update(self, value):        of the meter's own class
    self.log["mean"] = float(x.mean())                   self.total += value
    self.log.setdefault(name, []).append(y)              self.mean = self.total / self.count

Told from the source of all code that the forward, hooks and the loss may run (see `running`): what comes to such an
object, by whatever name, must let nothing out of it (see `taint`). In doubt, or without a source, it is none.
"""

from __future__ import annotations

import ast
import contextlib
import contextvars
import functools
import gc
import itertools
import operator
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from partitioner.restore import hooks_of
from partitioner.running import (
    Running,
    backward_hooks_on,
    forward_hooks_on,
    functions_behind,
    is_installed,
    names_of,
)
from partitioner.structures import PLAIN, is_python_class, storage_of
from partitioner.taint import CONTAINERS, UNKNOWN, Flow, Leak, Program, Writes, space_of, tree_of

_ANYTHING = frozenset({"vars", "eval", "exec", "locals", "globals", "__dict__", "attrgetter", "__getattribute__"})
_BY_TEXT = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_BY_ANY_NAME = (operator.attrgetter, operator.methodcaller, contextvars.ContextVar, threading.local)
"""Whose code names nothing of what it reads."""
_READING = {id(one) for one in (getattr, setattr, delattr, vars, eval, exec, globals, locals)}
_ITERATORS = (GeneratorType, enumerate, filter, map, reversed, zip)
_VIEWS = ("iterator", "dict_keys", "dict_values", "dict_items")
"""How classes of what goes through containers, and of views of them, are called at the end."""
_MAX_INSIDE = 10_000


class Holder(NamedTuple):
    """Where something is held: a place's kind and owner, and under which key; kind "hook": it is one, or has one."""

    kind: str
    owner: Any
    key: Any


class Sinks:
    """What is only written: the objects by id, and where they are held, (id of the holder, key)."""

    def __init__(self, objects: Mapping[int, Any], slots: frozenset[tuple[int, Any]]) -> None:
        self.objects, self.slots = objects, slots

    def are(self, others: Sinks) -> bool:
        """Whether the others are the same ones."""
        return self.objects.keys() == others.objects.keys() and self.slots == others.slots


NONE = Sinks({}, frozenset())


def sinks_among(model: nn.Module, held: Sequence[tuple[Holder, Any]], more: Iterable[Any], loss: Any = None) -> Sinks:
    """The sinks among what is held. `more`: further objects and functions that the forward calls."""
    holders: dict[int, list[Holder]] = defaultdict(list)
    candidates: dict[int, Any] = {}
    for holder, value in held:
        if _may_be_sink(value):
            holders[id(value)].append(holder)
            if holder.kind not in ("dict", "sequence"):
                candidates.setdefault(id(value), value)
    for key in [key for key, mine in holders.items() if any(_is_installed_holder(one) for one in mine)]:
        candidates.pop(key, None)
    if not candidates:
        return NONE
    modules = list(loss.modules()) if isinstance(loss, nn.Module) else []
    hooks = [hook for one in model.parameters() for table in hooks_of(one) for hook in table.values()]
    more = [*more, *modules, *hooks, *([loss] if callable(loss) else [])]
    judge = _Judge(model, more, holders)
    if judge.is_open or any(_is_by_any_name(value) for _, value in held):
        return NONE
    found = {key for key, value in candidates.items() if judge.is_sink(value, holders[key])}
    if not found & judge.written:  # most models' way: who else leads to them takes long to find out
        return NONE
    found -= _held_out_of_sight([candidates[key] for key in found])
    inner = {id(value): {id(one.owner) for one in holders[id(value)]} for _, value in held if _may_be_sink(value)}
    while True:  # what a container holds too, which may be read
        around = {
            key
            for key in found
            for one in holders[key]
            if one.kind in ("dict", "sequence") and not _is_covered(id(one.owner), found, inner, set())
        }
        if not around:
            break
        found -= around
    found &= judge.written
    others = ("dict", "sequence", "hook")
    slots = {(id(one.owner), one.key) for key in found for one in holders[key] if one.kind not in others}
    return Sinks({key: candidates[key] for key in found}, frozenset(slots))


def _is_covered(key: int, found: set[int], inner: dict[int, set[int]], seen: set[int]) -> bool:
    """Whether a container is a sink, or held by what are."""
    if key in found:
        return True
    if key in seen or not inner.get(key):
        return False
    return all(_is_covered(one, found, inner, seen | {key}) for one in inner[key])


def _may_be_sink(value: Any) -> bool:
    cls: Any = type(value)
    if cls in CONTAINERS:
        return True
    return is_python_class(cls) and not _is_code(value) and not is_installed(cls.__module__)


def _is_code(value: Any) -> bool:
    return isinstance(value, (FunctionType, MethodType, functools.partial, nn.Module, ModuleType, type))


def _is_installed_holder(holder: Holder) -> bool:
    owner = holder.owner
    where = owner.__module__ if isinstance(owner, type) else type(owner).__module__
    return holder.kind in ("module", "attributes") and is_installed(where)


def _is_by_any_name(value: Any) -> bool:
    """Whether it reads of objects what its code does not name."""
    while isinstance(value, functools.partial):
        value = value.func
    return isinstance(value, _BY_ANY_NAME) or id(value) in _READING


def _held_out_of_sight(values: Sequence[Any]) -> set[int]:
    """Ids of those to which an iterator, a generator or a view leads, or a weak reference."""
    known = {id(value) for value in values}
    found = {id(value) for value in values if weakref.getweakrefcount(value)}
    for one in gc.get_referrers(*values) if values else ():
        kind = type(one)
        if isinstance(one, _ITERATORS) or kind.__name__.endswith(_VIEWS) or kind.__module__ == itertools.__name__:
            found |= known & set(map(id, gc.get_referents(one)))
    return found


class _Judge:
    """Tells sinks from the code of one model."""

    def __init__(self, model: nn.Module, more: Sequence[Any], holders: Mapping[int, Sequence[Holder]]) -> None:
        self._holders, self._modules = holders, list(model.modules())
        self.written: set[int] = set()
        """What code was seen to come to: only of that can be told what is done with it."""
        self._memory = {storage_of(one) for one in (*model.parameters(), *model.buffers())}
        running = Running(model, more, implicit=True)
        self._functions = list(running.functions())
        self._classes = list(running.classes)
        self._owners: dict[Any, set[type]] = defaultdict(set)
        for cls in self._classes:
            for found in vars(cls).values():
                for function in (found.fget, found.fset) if isinstance(found, property) else (found,):
                    if isinstance(inner := getattr(function, "__wrapped__", function), FunctionType):
                        self._owners[inner].add(cls)
        self._bound: dict[int, list[MethodType]] = defaultdict(list)
        self._fixed: set[int] = set()
        """Objects that calls are bound to in ways that are not looked into."""
        for one in more:
            self._note_bound(one)
        hooks = [hook for one in model.modules() for hook in (*forward_hooks_on(one), *backward_hooks_on(one))]
        for hook in hooks:
            self._note_bound(hook)
            call = next((vars(base)["__call__"] for base in type(hook).__mro__ if "__call__" in vars(base)), None)
            if isinstance(call, FunctionType):
                self._bound[id(hook)].append(MethodType(call, hook))
        for function in self._functions:
            self._fixed.update(map(id, (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())))
        for module in self._modules:
            for one in vars(module).values():
                self._note_bound(one)
        self.is_open = any(
            _is_by_any_name(part)
            for cls in self._classes
            for one in vars(cls).values()
            for part in ((one.fget, one.fset) if isinstance(one, property) else (one,))
        )
        """Whether code goes through attributes whose names are not told."""
        self._by_self: set[type] = set()
        """Classes whose methods go through all attributes of their objects."""
        self._by_text: set[str] = set()
        self._starts: set[str] = set()
        for function in self._functions:
            if not is_installed(function.__module__ or ""):
                self._note_texts(function)
        self._program = Program(self._modules, self._functions, self._classes)

    def _note_bound(self, one: Any) -> None:
        if isinstance(one, MethodType):
            self._bound[id(one.__self__)].append(one)
            if not isinstance(one.__self__, tuple(self._owners.get(one.__func__, ()))):  # of another class than its own
                self._owners.pop(one.__func__, None)
        elif isinstance(one, functools.partial):
            self._fixed.update(map(id, (*one.args, *one.keywords.values())))
            self._note_bound(one.func)
        elif isinstance(one, tuple):
            self._fixed.update(map(id, one))
            for part in one:
                self._note_bound(part)

    def _note_texts(self, function: FunctionType) -> None:
        names = names_of(function.__code__)
        self.is_open |= not names.isdisjoint(_ANYTHING) and not self._is_by_self(function)
        for value in _outside_of(function):
            self.is_open |= _is_by_any_name(value)
            for name in names if isinstance(value, type) and value.__module__ != "builtins" else ():
                found = vars(value).get(name)
                if isinstance(found, FunctionType):  # called as a function, of whatever object
                    self._owners.pop(found, None)
        if names.isdisjoint(_BY_TEXT) or self.is_open:
            return
        tree = tree_of(function.__code__)
        if tree is None:
            self.is_open = True
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in _BY_TEXT:
                self.is_open |= not any(isinstance(one, ast.Call) and one.func is node for one in ast.walk(tree))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_TEXT:
                text: Any = node.args[1] if len(node.args) > 1 else None
                if isinstance(text, ast.JoinedStr) and text.values and isinstance(text.values[0], ast.Constant):
                    self._starts.add(str(text.values[0].value))
                elif isinstance(text, ast.Constant):
                    self._by_text.add(str(text.value))
                else:
                    self.is_open = True

    def _is_by_self(self, function: FunctionType) -> bool:
        """Whether it goes through attributes by any name in one way alone: `self.__dict__`, in its class's method."""
        tree, owners = tree_of(function.__code__), self._owners.get(function)
        names = names_of(function.__code__) & _ANYTHING
        if names != {"__dict__"} or tree is None or not tree.args.args or not owners:
            return False
        first = tree.args.args[0].arg
        uses = [one for one in ast.walk(tree) if isinstance(one, ast.Attribute) and one.attr == "__dict__"]
        if _is_bound_again(first, tree) or not all(
            isinstance(one.value, ast.Name) and one.value.id == first for one in uses
        ):
            return False
        self._by_self |= owners
        return True

    def is_sink(self, value: Any, holders: Sequence[Holder]) -> bool:
        """Whether all code that comes to it, through any of its holders, lets nothing out."""
        if id(value) in self._fixed:
            return False
        if any(isinstance(one.owner, tuple(self._by_self)) for one in holders if one.kind in ("module", "attributes")):
            return False
        keys: dict[str, list[type]] = defaultdict(list)
        for one in holders:
            if one.kind in ("module", "attributes"):
                keys[one.key].append(type(one.owner))
            elif one.kind == "name":
                keys[one.key].append(one.owner if isinstance(one.owner, type) else type(one.owner))
            elif one.kind not in ("cell", "dict", "sequence", "hook"):
                return False
        if any(key in self._by_text or key.startswith(tuple(self._starts) or ("\0",)) for key in keys):
            return False
        cls: Any = type(value)
        try:
            writes = Writes()
            self.written |= {id(value)} if id(value) in self._bound else set()
            for method in self._bound.get(id(value), ()):
                self._program.confine_function(functions_behind(method)[0], value, cls, writes, returning=False)
            for function in self._functions:
                variables = self._variables(function, value)
                names = names_of(function.__code__)
                if variables or not names.isdisjoint(keys):
                    self._check(function, value, keys, variables, writes)
            self._confine_inside(value, writes)
            writes.check()
            if writes.is_deep and self._holds_others(value):
                return False
        except Leak:
            return False
        return True

    def _confine_inside(self, value: Any, writes: Writes) -> None:
        """A leak where operators of it or of what it holds, or new entries of dicts, do more than keep something."""
        inner = (
            vars(value).values() if hasattr(value, "__dict__") else value.values() if isinstance(value, dict) else ()
        )
        for one in (value, *inner):
            self._program.confine_operators(value if one is value else UNKNOWN, type(one), writes)
            if isinstance(one, defaultdict) and not self._program.only_makes(one.default_factory, writes):
                raise Leak

    def _holds_others(self, value: Any) -> bool:
        """Whether something that may change is in it which others hold as well, or it by two names."""
        inside: dict[int, Any] = {}
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, nn.Module) or (isinstance(one, torch.Tensor) and storage_of(one) in self._memory):
                return True
            if isinstance(one, (*PLAIN, torch.Tensor)) or _is_code(one) or id(one) in inside:
                continue
            inside[id(one)] = one
            if len(inside) > _MAX_INSIDE:
                return True
            if isinstance(one, dict):
                waiting += one.values()
            elif isinstance(one, (list, tuple, set, deque)):
                waiting += one
            waiting += vars(one).values() if hasattr(one, "__dict__") else []
        for key in inside:
            names = {holder.key for holder in self._holders.get(key, ()) if holder.kind in ("attributes", "module")}
            if key != id(value) and len(names) > 1:  # what is done to it by one name is done to it by the other
                return True
        others = (holder for key in inside if key != id(value) for holder in self._holders.get(key, ()))
        return any(id(holder.owner) not in inside for holder in others)

    def _variables(self, function: FunctionType, value: Any) -> set[str]:
        """Names of outer variables and globals that stand for it."""
        code, space = function.__code__, function.__globals__
        found = {name for name in names_of(code) if space.get(name) is value}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            try:
                if cell.cell_contents is value:
                    found.add(name)
            except ValueError:
                pass
        return found

    def _check(
        self, function: FunctionType, value: Any, keys: dict[str, list[type]], variables: set[str], writes: Writes
    ) -> None:
        tree = tree_of(function.__code__)
        if tree is None:
            raise Leak
        first = tree.args.args[0].arg if tree.args.args else None
        owners = self._owners.get(function)
        space = function.__globals__
        if first is not None and _is_bound_again(first, tree):
            owners = None
        for one in ast.walk(tree):
            if isinstance(one, ast.ImportFrom) and any(name.name == "*" or name.name in keys for name in one.names):
                raise Leak

        def is_root(node: ast.expr) -> bool:
            if isinstance(node, ast.Name):
                return node.id in variables
            if not isinstance(node, ast.Attribute) or node.attr not in keys:
                return False
            base = node.value
            if isinstance(base, ast.Name) and isinstance(space.get(base.id), ModuleType):
                return vars(space[base.id]).get(node.attr) is value
            if isinstance(base, ast.Name) and base.id == first and owners:
                return any(issubclass(holder, owner) for holder in keys[node.attr] for owner in owners)
            return True

        if tree.name != "__init__" and any(is_root(one) for one in ast.walk(tree) if isinstance(one, ast.expr)):
            self.written.add(id(value))
        Flow(self._program, tree, space_of(function), is_root, value, type(value), writes).check()


def _outside_of(function: FunctionType) -> Iterator[Any]:
    """What stands behind its global names and the variables around it."""
    for name in names_of(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not set yet
            yield cell.cell_contents


def _is_bound_again(name: str, tree: ast.FunctionDef) -> bool:
    """Whether a function's first argument is set in it, or stands for something else in a function inside."""
    nodes = list(ast.walk(tree))
    is_set = any(isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Store) for one in nodes)
    return is_set or sum(isinstance(one, ast.arg) and one.arg == name for one in nodes) > 1
