"""State that a forward only writes: meters, histories, logs. Nothing else that a forward computes depends on it.

    self.meter.update(float(x.mean()))               def update(self, value):        of the meter's own class
    self.log["mean"] = float(x.mean())                   self.total += value
    self.log.setdefault(name, []).append(y)              self.mean = self.total / self.count

Told from the source of all code that the forward, hooks and the loss may run (see `running`): taint analysis without
flow, as for information flow in general (Denning and Denning 1977, https://doi.org/10.1145/359636.359712). What is
computed from a sink may go into that sink, be printed or be dropped; where it decides, the same holds for what is done.
In doubt, or without a source, it is none.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import contextvars
import functools
import gc
import inspect
import itertools
import logging
import math
import operator
import statistics
import textwrap
import threading
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import nn

from partitioner.restore import hooks_of
from partitioner.running import Running, functions_behind, is_foreign, is_installed, names_of
from partitioner.structures import PLAIN, is_python_class, storage_of

_CONTAINERS: dict[type, frozenset[str]] = {
    kind: frozenset(dir(kind)) for kind in (list, dict, set, deque, defaultdict, Counter, OrderedDict)
}
"""Of these every method works on the container alone."""
_OF_CONTAINERS = frozenset().union(*_CONTAINERS.values()) - {"sort"}  # which may call something
_TAKING = frozenset({"append", "appendleft", "add", "extend", "insert", "setdefault", "update", "extendleft"})
_TELLING = frozenset({"get", "items", "keys", "values", "copy", "count", "index"})
"""Methods of containers that change nothing."""
_RAISING = frozenset({"pop", "popleft", "popitem", "remove", "index"})
"""What fails where something is not there."""
_OF_NUMBERS = frozenset(
    "item tolist detach clone cpu float double half numpy mean sum std var norm abs min max median numel size dim any "
    "all argmax argmin format join split strip lower upper startswith endswith time perf_counter".split()
)
"""Methods, mostly of tensors, that change nothing and do not depend on anything else."""
_OF_MODULES = frozenset({"cpu", "float", "double", "half"})
"""Of these the ones by which modules change themselves."""
_MAKING = frozenset("item tolist clone mean sum std var norm abs numel size dim time perf_counter".split())
"""Of these the ones that give something new."""
_PURE = frozenset(
    "float int bool str len abs round max min sum sorted list dict tuple set frozenset range enumerate zip repr "
    "isinstance type id divmod pow any all print complex reversed".split()
)
_PASSING = frozenset("max min sorted list dict tuple set frozenset enumerate zip reversed".split())
"""Of these the ones that give what they were given, or contain it."""
_ANYTHING = frozenset({"vars", "eval", "exec", "locals", "globals", "__dict__", "attrgetter", "__getattribute__"})
_BY_TEXT = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_OF_ARRAYS = frozenset(
    "mean median std var sum max min percentile quantile array asarray sqrt log exp isnan isfinite".split()
)
_MODULES = (math, statistics, logging, warnings)
_BY_ANY_NAME = (operator.attrgetter, operator.methodcaller, contextvars.ContextVar, threading.local)
"""Whose code names nothing of what it reads."""
_READING = {id(one) for one in (getattr, setattr, delattr, vars, eval, exec, globals, locals)}
_ITERATORS = (GeneratorType, enumerate, filter, map, reversed, zip)
_VIEWS = ("iterator", "dict_keys", "dict_values", "dict_items")
"""How classes of what goes through containers, and of views of them, are called at the end."""
_OPERATORS = frozenset(
    f"__{prefix}{name}__"
    for prefix in ("", "r", "i")
    for name in "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor".split()
) | frozenset(f"__{name}__" for name in "setitem getitem delitem contains setattr eq ne lt le gt ge".split())
"""Methods that Python calls with something given, which they may change."""


class Holder(NamedTuple):
    """Where something is held: a place's kind and owner, and under which key; kind "hook": it is one, or has one."""

    kind: str
    owner: Any
    key: Any


class Sinks(NamedTuple):
    """What is only written: the objects by id, and where they are held, (id of the holder, key)."""

    objects: frozenset[int]
    slots: frozenset[tuple[int, Any]]


_MAX_INSIDE = 10_000
_UNKNOWN: Any = object()
_SOMEWHERE = "(by another name)"
NONE = Sinks(frozenset(), frozenset())


def sinks_among(
    model: nn.Module, held: Sequence[tuple[Holder, Any]], more: Iterable[Any], loss: Any = None
) -> tuple[Sinks, dict[int, Any]]:
    """The sinks among what is held, and these by id. `more`: further objects and functions that the forward calls."""
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
        return NONE, {}
    modules = list(loss.modules()) if isinstance(loss, nn.Module) else []
    hooks = [hook for one in model.parameters() for table in hooks_of(one) for hook in table.values()]
    more = [*more, *modules, *hooks, *([loss] if callable(loss) else [])]
    judge = _Judge(model, more, holders)
    if judge.is_open or any(_is_by_any_name(value) for _, value in held):
        return NONE, {}
    found = {key for key, value in candidates.items() if judge.is_sink(value, holders[key])}
    if not found & judge.written:  # most models' way: who else leads to them takes long to find out
        return NONE, {}
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
    return Sinks(frozenset(found), frozenset(slots)), {key: candidates[key] for key in found}


def _is_covered(key: int, found: set[int], inner: dict[int, set[int]], seen: set[int]) -> bool:
    """Whether a container is a sink, or held by what are."""
    if key in found:
        return True
    if key in seen or not inner.get(key):
        return False
    return all(_is_covered(one, found, inner, seen | {key}) for one in inner[key])


def _may_be_sink(value: Any) -> bool:
    cls: Any = type(value)
    if cls in _CONTAINERS:
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


class _Leak(Exception):
    """Something else may depend on what it holds."""


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
        hooks = [hook for module in model.modules() for table in _hooks_of(module) for hook in table.values()]
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
        self._by_text: set[str] = set()
        self._starts: set[str] = set()
        for function in self._functions:
            if not is_installed(function.__module__ or ""):
                self._note_texts(function)
        self.tries = any(
            function.__code__.co_exceptiontable
            and not is_installed(function.__module__ or "")
            and any(isinstance(one, ast.Try) for one in ast.walk(_tree_of(function.__code__) or ast.Pass()))
            for function in self._functions
        )
        """Whether the user's code catches what goes wrong."""

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
        self.is_open |= not names.isdisjoint(_ANYTHING)
        for value in _outside_of(function):
            self.is_open |= _is_by_any_name(value)
            for name in names if isinstance(value, type) and value.__module__ != "builtins" else ():
                found = vars(value).get(name)
                if isinstance(found, FunctionType):  # called as a function, of whatever object
                    self._owners.pop(found, None)
        if names.isdisjoint(_BY_TEXT) or self.is_open:
            return
        tree = _tree_of(function.__code__)
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

    def is_sink(self, value: Any, holders: Sequence[Holder]) -> bool:
        """Whether all code that comes to it, through any of its holders, lets nothing out."""
        if id(value) in self._fixed:
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
            writes = _Writes()
            self.written |= {id(value)} if id(value) in self._bound else set()
            for method in self._bound.get(id(value), ()):
                self._confine_function(functions_behind(method)[0], value, cls, writes, returning=False)
            for function in self._functions:
                variables = self._variables(function, value)
                names = names_of(function.__code__)
                if variables or not names.isdisjoint(keys):
                    self._check(function, value, keys, variables, writes)
            self._confine_operators(value, writes)
            writes.check()
            if writes.is_deep and self._holds_others(value):
                return False
        except _Leak:
            return False
        return True

    def is_plain(self, name: str) -> bool:
        """Whether attributes of this name are numbers or texts on all modules that have one."""
        held = [vars(module)[name] for module in self._modules if name in vars(module)]
        return bool(held) and all(isinstance(one, PLAIN) for one in held)

    def _confine_operators(self, value: Any, writes: _Writes) -> None:
        """A leak where `log[key] = x` or `log << x` do more than keep something, of it or of what it holds."""
        inner = (
            vars(value).values() if hasattr(value, "__dict__") else value.values() if isinstance(value, dict) else ()
        )
        for one in (value, *inner):
            cls: Any = type(one)
            for name in _OPERATORS if is_python_class(cls) and not is_foreign(cls.__module__) else ():
                found = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
                if isinstance(found, FunctionType) and found.__code__.co_filename != "<string>":  # of a dataclass
                    self._confine(value if one is value else _UNKNOWN, cls, name, writes)

    def is_of_tensors(self, name: str) -> bool:
        """Whether a method of this name is one of tensors that changes nothing, and of no class of the user's."""
        return name in _OF_NUMBERS - _OF_MODULES and not any(name in vars(cls) for cls in self._classes)

    def _holds_others(self, value: Any) -> bool:
        """Whether something that may change is in it which others hold as well."""
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
        self, function: FunctionType, value: Any, keys: dict[str, list[type]], variables: set[str], writes: _Writes
    ) -> None:
        tree = _tree_of(function.__code__)
        if tree is None:
            raise _Leak
        first = tree.args.args[0].arg if tree.args.args else None
        owners = self._owners.get(function)
        space = function.__globals__
        if first is not None and _is_bound_again(first, tree):
            owners = None
        for one in ast.walk(tree):
            if isinstance(one, ast.ImportFrom) and any(name.name == "*" or name.name in keys for name in one.names):
                raise _Leak

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
        _Flow(self, tree, space, is_root, value, type(value), writes).check()

    def confine(self, value: Any, cls: type | None, name: str, writes: _Writes) -> None:
        """A leak unless a method's effects stay in its object; of an unknown class, of all classes that have it."""
        if cls in _CONTAINERS:
            if name not in _CONTAINERS[cls] or name == "sort":
                raise _Leak
        elif cls is not None:
            self._confine(value, cls, name, writes)
        else:
            having = [one for one in self._classes if name in vars(one) and not issubclass(one, nn.Module)]
            if not having and name not in _OF_CONTAINERS and name not in _OF_NUMBERS:
                raise _Leak
            for one in having:
                self._confine(_UNKNOWN, one, name, writes)

    def _confine(self, value: Any, cls: type, name: str, writes: _Writes) -> None:
        having = [base for base in cls.__mro__ if name in vars(base) and not is_foreign(base.__module__)]
        foreign = [base for base in cls.__mro__ if name in vars(base) and is_foreign(base.__module__)]
        if any(base not in _CONTAINERS and base is not object for base in foreign) or not (having or foreign):
            raise _Leak
        for base in having:
            function = getattr(vars(base)[name], "__wrapped__", vars(base)[name])
            if isinstance(function, property):
                function = function.fget
            if not isinstance(function, FunctionType):
                raise _Leak
            self._confine_function(function, value, cls, writes)

    def properties(self, value: Any, cls: type | None, name: str, writes: _Writes) -> None:
        """What is read of an object may be computed."""
        for one in [cls] if cls is not None and cls not in _CONTAINERS else self._classes:
            for base in one.__mro__:
                found = vars(base).get(name)
                if isinstance(found, property) and not issubclass(one, nn.Module):
                    if not isinstance(found.fget, FunctionType):
                        raise _Leak
                    self._confine_function(found.fget, value, one, writes)

    def _confine_function(
        self, function: FunctionType, value: Any, cls: type, writes: _Writes, returning: bool = True
    ) -> None:
        known = writes.functions
        if (function, returning) in known:
            return
        known.add((function, returning))
        tree = _tree_of(function.__code__)
        if tree is None or not tree.args.args:
            raise _Leak
        first = tree.args.args[0].arg
        _Flow(
            self,
            tree,
            function.__globals__,
            lambda node: isinstance(node, ast.Name) and node.id == first,
            value,
            cls,
            writes,
            is_method=True,
            returning=returning,
        ).check()


class _Writes:
    """What is put into a sink.

    What is somebody else's must not be changed there: a tensor that is added to in place, a module that has come into a
    list. And what is taken by its key has to be there on each rank, also where another stage's layers have put it in.
    """

    def __init__(self) -> None:
        self.functions: set[tuple[Any, bool]] = set()
        self.grows = self.shrinks = self.needs_what_is_there = self.needs_more = False
        self.is_deep = False
        """Whether things are changed that it holds, not only itself."""
        self._foreign: set[tuple[str, bool]] = set()
        self._changed: set[tuple[str, bool]] = set()

    def put(self, where: str, is_tensor: bool) -> None:
        """Something of others is held there."""
        self._foreign.add((where, is_tensor))

    def change(self, where: str, by_method: bool) -> None:
        """What is held there changes; `by_method`: as tensors do not, by a method of a container or class."""
        self.is_deep = True
        self._changed.add((where, by_method))

    def check(self) -> None:
        is_missing = (self.needs_more and self.grows) or (self.needs_what_is_there and self.shrinks)
        if is_missing or any(
            (one == other or _SOMEWHERE in one or _SOMEWHERE in other) and not (is_tensor and by_method)
            for one, is_tensor in self._foreign
            for other, by_method in self._changed
        ):
            raise _Leak


class _Flow:
    """One function's code: where what is in the sink may go."""

    def __init__(
        self,
        judge: _Judge,
        tree: ast.FunctionDef,
        space: dict[str, Any],
        is_root: Any,
        value: Any,
        cls: type,
        writes: _Writes,
        *,
        is_method: bool = False,
        returning: bool = True,
    ) -> None:
        """`is_root`: whether an expression is the sink itself, `value` of class `cls`.

        `returning`: in one of its own methods, whether what that returns counts as a part of it; otherwise it must
        return nothing.
        """
        self._judge, self._tree, self._space, self._is_root, self._cls = judge, tree, space, is_root, cls
        self._value = value
        self._writes, self._is_method, self._returning = writes, is_method, returning
        self._is_callable = any("__call__" in vars(base) for base in cls.__mro__)
        self._tainted: set[str] = set()
        self._given = {one.arg for one in ast.walk(tree.args) if isinstance(one, ast.arg)}
        self._not_new: set[str] = set(self._given)
        """Local names that may stand for something of others."""
        self._numbers: set[str] = set()
        self._outer = {
            name for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names
        }
        self._decides = False
        """Whether it was left early where the sink decides: then all of it counts as decided."""

    def check(self) -> None:
        """A `_Leak` where something gets out."""
        while True:
            before = len(self._tainted), len(self._not_new), self._decides
            self._block(self._tree.body, self._decides)
            if before == (len(self._tainted), len(self._not_new), self._decides):
                return

    # -- statements

    def _block(self, body: Sequence[ast.stmt], decided: bool) -> None:
        for one in body:
            self._statement(one, decided)

    def _statement(self, node: ast.stmt, decided: bool) -> None:
        if isinstance(node, ast.Expr):
            self._expression(node.value, decided)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if node.value is not None:
                self._expression(node.value, decided)
                for target in targets:
                    self._store(target, node.value, decided)
        elif isinstance(node, ast.AugAssign):
            self._expression(node.value, decided)
            self._add(node, decided)
        elif isinstance(node, (ast.If, ast.While)):
            self._expression(node.test, decided)
            inside = decided or self._is_tainted(node.test)
            self._block([*node.body, *node.orelse], inside)
        elif isinstance(node, ast.For):
            self._expression(node.iter, decided)
            self._store(node.target, node.iter, decided)
            if _is_call_of("enumerate", node.iter) and isinstance(node.target, ast.Tuple):
                self._numbers |= {
                    one.id for one in node.target.elts[:1] if isinstance(one, ast.Name) and self._is_set_once(one.id)
                }
            self._block([*node.body, *node.orelse], decided or self._is_tainted(node.iter))
        elif isinstance(node, ast.With):
            for item in node.items:
                self._expression(item.context_expr, decided)
                if self._is_tainted(item.context_expr):
                    raise _Leak
            self._block(node.body, decided)
        elif isinstance(node, ast.Try):
            parts = [*node.body, *(one for each in node.handlers for one in each.body), *node.orelse, *node.finalbody]
            inside = decided or any(self._is_tainted(part) for part in node.body)
            self._block(parts, inside)
        elif isinstance(node, ast.Return):
            if node.value is not None:
                self._expression(node.value, decided)
            self._return(node, decided)
        elif isinstance(node, (ast.Break, ast.Continue)):
            self._leave(decided)
        elif isinstance(node, (ast.Raise, ast.Assert)):
            if decided or self._is_tainted(node):
                raise _Leak
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._nested(node, decided)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and self._is_tainted(target.value):
                    self._writes.shrinks = True
                    self._change(target.value, False)
                elif decided or self._is_tainted(target):
                    raise _Leak
        elif not isinstance(node, (ast.Pass, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom)) and (
            decided or self._is_tainted(node)
        ):
            raise _Leak

    def _return(self, node: ast.Return, decided: bool) -> None:
        if not self._is_method:
            if decided or (node.value is not None and self._is_tainted(node.value)):
                raise _Leak
            return
        is_none = node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)
        if not self._returning and not is_none:
            raise _Leak
        self._leave(decided)

    def _leave(self, decided: bool) -> None:
        if decided and not self._is_method:
            raise _Leak
        self._decides |= decided

    def _nested(self, node: ast.stmt, decided: bool) -> None:
        touches = self._is_tainted(node)
        if (touches and self._is_method) or (decided and touches):
            raise _Leak
        if not touches:
            return
        if isinstance(node, ast.FunctionDef):  # as a hook made in the forward: its own arguments are somebody else's
            inner = _Flow(self._judge, node, self._space, self._is_root, self._value, self._cls, self._writes)
            inner._tainted |= self._tainted - inner._given
            inner._not_new |= self._not_new
            inner.check()
            if inner._tainted - self._tainted - _locals_of(node):
                raise _Leak
            return
        raise _Leak

    def _store(self, target: ast.expr, value: ast.expr, decided: bool) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for one in target.elts:
                self._store(one, value, decided)
            return
        if isinstance(target, ast.Starred):
            self._store(target.value, value, decided)
            return
        dirty = decided or self._is_tainted(value)
        if isinstance(target, ast.Name):
            if self._is_root(target):
                raise _Leak
            if dirty and target.id in self._outer:
                raise _Leak
            if dirty:
                self._tainted.add(target.id)
            if not self._is_new(value):
                self._not_new.add(target.id)
        elif self._is_root(target):  # another in its place; an object that comes to be has no other
            if dirty or (self._tree.name != "__init__" and not _is_like(value, self._cls, self._space)):
                raise _Leak
            self._writes.shrinks |= self._tree.name != "__init__"
        else:
            assert isinstance(target, (ast.Attribute, ast.Subscript))
            if isinstance(target, ast.Subscript):
                self._expression(target.slice, decided)
            if self._is_tainted(target.value):
                self._writes.grows |= isinstance(target, ast.Subscript)
                self._change(target.value, False)
                self._put(self._where(target), value)
            elif dirty or self._is_tainted(target):
                raise _Leak

    def _add(self, node: ast.AugAssign, decided: bool) -> None:
        target = node.target
        dirty = decided or self._is_tainted(node.value)
        if isinstance(target, ast.Name):
            if self._is_root(target):
                return  # as log += [value]
            if (dirty or target.id in self._tainted) and (target.id in self._not_new or target.id in self._outer):
                raise _Leak
            if dirty:
                self._tainted.add(target.id)
        elif self._is_root(target):
            if self._cls not in _CONTAINERS:
                raise _Leak
        elif self._is_tainted(target.value):
            self._needs(target)
            self._change(target.value, False)
            self._writes.change(self._where(target), False)
        elif dirty or self._is_tainted(target):
            raise _Leak

    # -- expressions

    def _is_tainted(self, node: ast.AST) -> bool:
        if isinstance(node, ast.expr) and self._is_root(node):
            return True
        if isinstance(node, ast.Name):
            return node.id in self._tainted
        if isinstance(node, ast.Call) and self._is_other(node.func):
            return any(map(self._is_tainted, (node.func.value, *node.args, *node.keywords)))
        if isinstance(node, ast.Compare) and all(isinstance(one, (ast.Is, ast.IsNot)) for one in node.ops):
            sides = [node.left, *node.comparators]
            return any(self._is_tainted(one) for one in sides if not self._is_root(one))
        return any(self._is_tainted(one) for one in ast.iter_child_nodes(node))

    def _is_set_once(self, name: str) -> bool:
        named = (one for one in ast.walk(self._tree) if isinstance(one, ast.Name) and one.id == name)
        return name not in self._given and sum(isinstance(one.ctx, ast.Store) for one in named) == 1

    def _is_new(self, node: ast.expr) -> bool:
        """Whether it is a number, or a tensor or container made here."""
        if isinstance(node, ast.IfExp):
            return self._is_new(node.body) and self._is_new(node.orelse)
        if isinstance(node, ast.Name):
            return node.id in self._numbers or (
                node.id not in self._not_new and node.id not in self._outer and not self._is_global(node.id)
            )
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                return node.func.id in _PURE - _PASSING
            return isinstance(node.func, ast.Attribute) and node.func.attr in _MAKING
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return node.value.id not in self._space and self._judge.is_plain(node.attr)
        kinds = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.JoinedStr)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return all(map(self._is_new, node.elts))
        return isinstance(node, kinds) or (isinstance(node, ast.Dict) and not node.keys)

    def _is_global(self, name: str) -> bool:
        return name in self._space or not hasattr(builtins, name)

    def _expression(self, node: ast.expr, decided: bool) -> None:
        """Look at all calls in it, the inner ones first."""
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            for part in node.generators:
                self._expression(part.iter, decided)
                self._store(part.target, part.iter, decided)
                decided = decided or any(map(self._is_tainted, (part.iter, *part.ifs)))
        if isinstance(node, ast.Lambda):
            if decided or self._is_tainted(node):
                raise _Leak
            return
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)) and (decided or self._is_tainted(node)):
            raise _Leak
        if isinstance(node, ast.NamedExpr):
            self._store(node.target, node.value, decided)
        if isinstance(node, ast.IfExp):
            decided = decided or self._is_tainted(node.test)
        if isinstance(node, ast.BoolOp):
            decided = decided or any(map(self._is_tainted, node.values))
        for child in ast.iter_child_nodes(node):
            for one in (child,) if isinstance(child, ast.expr) else ast.iter_child_nodes(child):
                if isinstance(one, ast.expr):
                    self._expression(one, decided)
        if (
            self._judge.tries
            and isinstance(node, ast.BinOp)
            and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod))
            and self._is_tainted(node.right)
            and not _is_call_of("max", node.right)
        ):
            raise _Leak  # a division by zero that is caught somewhere
        if isinstance(node, (ast.Attribute, ast.Subscript)) and self._is_tainted(node.value):
            if isinstance(node, ast.Attribute):
                self._judge.properties(*self._known(node.value), node.attr, self._writes)
            self._needs(node)
        if isinstance(node, ast.Call):
            self._call(node, decided)

    def _put(self, where: str, value: ast.expr) -> None:
        if not self._is_new(value):
            is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
            self._writes.put(where, is_call and value.func.attr in _OF_NUMBERS)  # type: ignore[attr-defined]

    def _change(self, node: ast.expr, by_method: bool) -> None:
        if not self._is_root(node):
            self._writes.change(self._where(node), by_method)

    def _where(self, node: ast.expr) -> str:
        """What a part of the sink is called: by the attribute that it is, or is in."""
        if isinstance(node, ast.Attribute):
            return node.attr
        if isinstance(node, ast.Subscript) and not isinstance(node.value, ast.Subscript):
            return f"{self._where(node.value)}[]"
        if isinstance(node, ast.Subscript):
            return self._where(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return f"{self._where(node.func.value)}[]"
        return "" if self._is_root(node) else _SOMEWHERE

    def _is_other(self, func: ast.expr) -> TypeGuard[ast.Attribute]:
        """Whether what is called has the sink's name only: a dict `log` is not what `x.log()` calls."""
        return isinstance(func, ast.Attribute) and self._is_root(func) and not self._is_callable

    def _known(self, node: ast.expr) -> tuple[Any, type | None]:
        return (self._value, self._cls) if self._is_root(node) else (_UNKNOWN, None)

    def _needs(self, node: ast.Attribute | ast.Subscript) -> None:
        """Whether what is taken is there, whatever other layers have done or not."""
        held = self._held(node.value)
        if isinstance(node, ast.Attribute):
            is_known = held is _UNKNOWN or hasattr(type(held), node.attr) or node.attr in getattr(held, "__dict__", ())
            if not is_known and not self._is_made_sure(node):
                raise _Leak
        elif not isinstance(node.slice, ast.Slice) and not hasattr(type(held), "__missing__"):
            if self._is_made_sure(node):
                return
            if self._held(node) is _UNKNOWN:
                self._writes.needs_more = True
            else:
                self._writes.needs_what_is_there = True

    def _is_made_sure(self, node: ast.Attribute | ast.Subscript) -> bool:
        """Whether the function itself sees to it, or asks."""
        base, wanted = ast.dump(node.value), _text_of(node)
        plain = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)
        always = [one for one in self._tree.body if isinstance(one, plain)]
        for one in (each for statement in always for each in ast.walk(statement)):
            for target in one.targets if isinstance(one, ast.Assign) else []:
                if isinstance(target, type(node)) and ast.dump(target.value) == base and _text_of(target) == wanted:
                    return True
            if _calls(one, base, "append") or _calls(one, base, "setdefault", wanted):
                return True
        return any(
            isinstance(one, ast.Compare)
            and isinstance(one.ops[0], (ast.In, ast.NotIn))
            and (ast.dump(one.left), ast.dump(one.comparators[0])) == (wanted, base)
            for one in ast.walk(self._tree)
        )

    def _held(self, node: ast.expr) -> Any:
        """What an expression stands for now, if it is told."""
        if self._is_root(node):
            return self._value
        if isinstance(node, ast.Attribute):
            return getattr(self._held(node.value), "__dict__", {}).get(node.attr, _UNKNOWN)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            held = self._held(node.value)
            try:
                return held[node.slice.value]
            except (LookupError, TypeError):
                pass
        return _UNKNOWN

    def _call(self, node: ast.Call, decided: bool) -> None:
        given = [*node.args, *(one.value for one in node.keywords)]
        dirty = decided or any(map(self._is_tainted, given))
        func = node.func
        if self._is_root(func) and not self._is_other(func):
            self._judge.confine(self._value, self._cls, "__call__", self._writes)
        elif isinstance(func, ast.Attribute) and _is_super(func.value):
            if self._is_method:
                self._judge.confine(self._value, self._cls, func.attr, self._writes)
            elif dirty:
                raise _Leak
        elif isinstance(func, ast.Attribute) and self._is_tainted(func.value):
            self._judge.confine(*self._known(func.value), func.attr, self._writes)
            if func.attr in _RAISING and not decided and len(given) < 2:
                raise _Leak
            self._writes.grows |= func.attr in _TAKING
            self._writes.shrinks |= func.attr in _RAISING or func.attr == "clear"
            if func.attr not in _OF_NUMBERS | _TELLING:
                self._change(func.value, True)
            for one in given if func.attr in _TAKING else []:
                self._put(f"{self._where(func.value)}[]", one)
        elif isinstance(func, ast.Name) and func.id not in self._space and func.id not in self._given:
            if dirty and (func.id not in _PURE or any(one.arg == "file" for one in node.keywords)):
                raise _Leak
        elif dirty and not self._is_silent(func):
            is_number = isinstance(func, ast.Attribute) and self._judge.is_of_tensors(func.attr)
            if not is_number or any(map(self._is_tainted, given)):
                raise _Leak
        if self._is_tainted(func) and not isinstance(func, ast.Attribute):
            raise _Leak

    def _is_silent(self, func: ast.expr) -> bool:
        """Whether it is a library's function of numbers, or tells a human being."""
        if not isinstance(func, ast.Attribute) or not isinstance(func.value, ast.Name) or func.value.id in self._given:
            return False
        owner = self._space.get(func.value.id)
        of_arrays = owner is np and func.attr in _OF_ARRAYS
        return of_arrays or isinstance(owner, logging.Logger) or any(owner is one for one in _MODULES)


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


def _locals_of(node: ast.FunctionDef) -> set[str]:
    outer = {name for one in ast.walk(node) if isinstance(one, (ast.Global, ast.Nonlocal)) for name in one.names}
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return found - outer


def _calls(node: ast.AST, base: str, method: str, first: str | None = None) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != method:
        return False
    return ast.dump(node.func.value) == base and first in (None, ast.dump(node.args[0]))


def _text_of(node: ast.Attribute | ast.Subscript) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ast.dump(node.slice)


def _is_call_of(name: str, node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _is_super(node: ast.expr) -> bool:
    return _is_call_of("super", node)


def _is_like(node: ast.expr, cls: type, space: dict[str, Any]) -> bool:
    """Whether it makes another of that class, empty or of constants."""
    if cls is dict and isinstance(node, ast.Dict):
        return not node.keys
    if cls is list and isinstance(node, ast.List):
        return not node.elts
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        made = space.get(node.func.id, getattr(builtins, node.func.id, None))
        given = [*node.args, *(one.value for one in node.keywords)]
        return made is cls and all(isinstance(one, (ast.Constant, ast.Name)) for one in given)
    return False


def _hooks_of(module: nn.Module) -> Iterator[dict[int, Any]]:
    yield from (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


@functools.cache
def _tree_of(code: CodeType) -> ast.FunctionDef | None:
    """A function's source as a tree; None where there is none, or it is another than what runs."""
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    tree = parsed.body[0] if parsed.body else None
    if not isinstance(tree, ast.FunctionDef) or tree.name != code.co_name:
        return None
    try:
        compiled = [one for one in compile(parsed, "", "exec").co_consts if isinstance(one, CodeType)]
    except SyntaxError:  # a variable from outside that it sets
        return None
    same = any(one.co_name == code.co_name and _words(one) == _words(code) for one in compiled)
    return tree if same else None


def _words(code: CodeType) -> set[str]:
    found = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars} - {"__class__"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _words(constant)
    return found
