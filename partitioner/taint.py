"""Where what is in an object may go, told from the source of the code that comes to it.

Taint analysis without flow, as for information flow in general (Denning and Denning 1977,
https://doi.org/10.1145/359636.359712): a name that ever stands for something of the object always does, and where the
object decides, all that is done there counts as computed from it. What is computed from it may go into it, be printed
or be dropped; all else is a `Leak`, as is code without a source.
"""

from __future__ import annotations

import abc
import ast
import builtins
import dataclasses
import functools
import inspect
import logging
import math
import statistics
import textwrap
import warnings
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn

from partitioner.running import is_foreign, is_installed, names_of
from partitioner.structures import PLAIN, is_python_class
from partitioner.usage import names_in

CONTAINERS: dict[type, frozenset[str]] = {
    kind: frozenset(dir(kind)) for kind in (list, dict, set, deque, defaultdict, Counter, OrderedDict)
}
"""Of these every method works on the container alone."""
_OF_CONTAINERS = frozenset().union(*CONTAINERS.values()) - {"sort"}  # which may call something
_TAKING = frozenset({"append", "appendleft", "add", "extend", "insert", "setdefault", "update", "extendleft"})
_SPREADING = frozenset({"extend", "extendleft", "update"})
"""Of these the ones that take what they are given one by one."""
_TELLING = frozenset({"get", "items", "keys", "values", "copy", "count", "index"})
"""Methods of containers that change nothing."""
_RAISING = frozenset({"pop", "popleft", "popitem", "remove", "index"})
"""What fails where something is not there."""
_GIVING = frozenset({"get", "setdefault", "pop", "popleft", "popitem"})
"""What gives something that is in the container."""
_VIEWING = frozenset({"values", "items", "keys"})
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
_COPYING = frozenset("sorted list dict tuple set frozenset".split())
"""Of these the ones that give a new container with what was in another."""
_FIXED = frozenset("float int bool str len repr isinstance range complex print id".split())
"""Functions of what cannot change."""
_VALUES = (int, float, bool, str, complex, bytes, tuple, frozenset)
_NEW_TENSORS = frozenset("zeros ones full tensor zeros_like ones_like stack cat".split())
"""Functions of torch that make a tensor, and do no more."""
_OF_ARRAYS = frozenset(
    "mean median std var sum max min percentile quantile array asarray sqrt log exp isnan isfinite".split()
)
_MODULES = (math, statistics, logging, warnings)
_OPERATORS = frozenset(
    f"__{prefix}{name}__"
    for prefix in ("", "r", "i")
    for name in "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor".split()
) | frozenset(f"__{name}__" for name in "setitem getitem delitem contains setattr eq ne lt le gt ge".split())
"""Methods that Python calls with something given, which they may change."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

UNKNOWN: Any = object()
_SOMEWHERE = "(by another name)"
_RETURNED = "(returned)"
_DEPTH = 3
"""Of containers in containers that are told apart."""

Where = frozenset[str]
"""What parts of an object are called: by the attribute that they are, or are in; "" is the object itself."""
_NOWHERE: Where = frozenset()
_ITSELF, _ANYWHERE, _GIVEN = frozenset({""}), frozenset({_SOMEWHERE}), frozenset({"(given)"})


class Leak(Exception):
    """Something else may depend on what the object holds."""


class Writes:
    """What is put into an object.

    What is somebody else's must not be changed there: a tensor that is added to in place, a module that has come into a
    list. And what is taken by its key has to be there on each rank, also where another stage's layers have put it in.
    """

    def __init__(self) -> None:
        self.functions: dict[tuple[Any, ...], Where] = {}
        """Methods that were looked at, and where what they return is."""
        self.made: dict[type, bool] = {}
        """Classes of which objects are made, and whether making one does nothing else."""
        self.grows: set[str] = set()
        self.shrinks: set[str] = set()
        self.needs: set[str] = set()
        """Where things are taken that may have to come there first."""
        self.needs_what_is_there: set[str] = set()
        self.is_deep = False
        """Whether things are changed that it holds, not only itself."""
        self._foreign = {(one, False) for one in _GIVEN}
        self._changed: set[tuple[str, bool]] = set()

    def put(self, where: Where, is_tensor: bool) -> None:
        """Something of others is held there."""
        self._foreign.update((one, is_tensor) for one in where)

    def change(self, around: Where, by_method: bool) -> None:
        """What is held there changes, or what is in it; `by_method`: as tensors do not, by a method of a container or
        class."""
        self.is_deep = True
        self._changed.update((one, by_method) for one in around)

    def check(self) -> None:
        """A `Leak` where something of others is changed, or something may not be there."""
        if _meet(self.needs, self.grows) or _meet(self.needs_what_is_there, self.shrinks):
            raise Leak
        for one, is_tensor in self._foreign:
            if _meet({one}, {other for other, by_method in self._changed if not (is_tensor and by_method)}):
                raise Leak


def _meet(some: set[str], others: set[str]) -> bool:
    is_open = any(_SOMEWHERE in one for one in some) or any(_SOMEWHERE in one for one in others)
    return bool(some and others) and (is_open or not some.isdisjoint(others))


class Program:
    """All code that may run: what its methods and classes do is known by their names."""

    def __init__(
        self, modules: Sequence[nn.Module], functions: Iterable[FunctionType], classes: Iterable[type]
    ) -> None:
        self._modules, self._classes = modules, list(classes)
        self._words = frozenset(name for cls in self._classes for name in vars(cls))
        self._computed = frozenset(
            name
            for cls in self._classes
            for name, found in vars(cls).items()
            if isinstance(found, (property, functools.cached_property))
        )
        self.tries = any(
            function.__code__.co_exceptiontable
            and not is_installed(function.__module__ or "")
            and any(isinstance(one, ast.Try) for one in ast.walk(tree_of(function.__code__) or ast.Pass()))
            for function in functions
        )
        """Whether the user's code catches what goes wrong."""

    def is_plain(self, name: str) -> bool:
        """Whether attributes of this name are numbers or texts on all modules that have one."""
        held = [vars(module)[name] for module in self._modules if name in vars(module)]
        return bool(held) and all(isinstance(one, PLAIN) for one in held)

    def is_harmless(self, name: str) -> bool:
        """Whether a method of this name is one of tensors or dicts that changes nothing, and of no class of the
        user's."""
        return name in (_OF_NUMBERS - _OF_MODULES) | _VIEWING and name not in self._words

    def is_computed(self, name: str) -> bool:
        """Whether attributes of this name may be properties."""
        return name in self._computed

    def is_users(self, name: str) -> bool:
        """Whether a class of the user's has a method or variable of this name."""
        return name in self._words

    def confine(
        self,
        value: Any,
        cls: type | None,
        name: str,
        writes: Writes,
        decided: bool = False,
        *,
        by_super: bool = False,
    ) -> Where:
        """A leak unless a method's effects stay in its object; of an unknown class, of all classes that have it.

        `by_super`: called by `super()`, in whichever base. Where what it returns is, "" for its object.
        """
        if cls in CONTAINERS:
            if name not in CONTAINERS[cls] or name == "sort":
                raise Leak
            return frozenset()
        if cls is not None:
            return self._confine(value, cls, name, writes, decided, by_super)
        having = [one for one in self._classes if name in vars(one) and not issubclass(one, nn.Module)]
        if not having and name not in _OF_CONTAINERS and name not in _OF_NUMBERS:
            raise Leak
        found: Where = frozenset()
        for one in having:
            found |= self._confine(UNKNOWN, one, name, writes, decided)
        return found

    def confine_operators(self, value: Any, cls: type, writes: Writes) -> None:
        """A leak where `log[key] = x` or `log << x` do more than keep something."""
        for name in _OPERATORS if is_python_class(cls) and not is_foreign(cls.__module__) else ():
            found = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
            if isinstance(found, FunctionType) and found.__code__.co_filename != "<string>":  # of a dataclass
                self._confine(value, cls, name, writes, True)

    def _confine(
        self, value: Any, cls: type, name: str, writes: Writes, decided: bool, by_super: bool = False
    ) -> Where:
        having = [base for base in cls.__mro__ if name in vars(base) and not is_foreign(base.__module__)]
        foreign = [base for base in cls.__mro__ if name in vars(base) and is_foreign(base.__module__)]
        if any(base not in CONTAINERS and base is not object for base in foreign) or not (having or foreign):
            raise Leak
        found: Where = frozenset()
        for base in having:
            function = getattr(vars(base)[name], "__wrapped__", vars(base)[name])
            if isinstance(function, property):
                function = function.fget
            if not isinstance(function, FunctionType):
                raise Leak
            found |= self.confine_function(function, value, cls, writes, decided=decided)
            if not by_super and "super" not in names_of(function.__code__):
                break  # those of the bases do not run
        return found

    def properties(self, value: Any, cls: type | None, name: str, writes: Writes, decided: bool) -> None:
        """What is read of an object may be computed."""
        for one in [cls] if cls is not None and cls not in CONTAINERS else self._classes:
            for base in one.__mro__:
                found = vars(base).get(name)
                if isinstance(found, property) and not issubclass(one, nn.Module):
                    if not isinstance(found.fget, FunctionType):
                        raise Leak
                    self.confine_function(found.fget, value, one, writes, decided=decided)

    def confine_function(
        self,
        function: FunctionType,
        value: Any,
        cls: type,
        writes: Writes,
        *,
        returning: bool = True,
        decided: bool = False,
    ) -> Where:
        """The same of a function that is called with the object first. See `Flow` for `returning`."""
        key = (function, cls, value is UNKNOWN, returning, decided)
        if key in writes.functions:
            return writes.functions[key]
        writes.functions[key] = _ANYWHERE  # while it is looked at
        tree = tree_of(function.__code__)
        if tree is None or not tree.args.args:
            raise Leak
        first = tree.args.args[0].arg
        flow = Flow(
            self,
            tree,
            space_of(function),
            lambda node: isinstance(node, ast.Name) and node.id == first,
            value,
            cls,
            writes,
            is_method=True,
            returning=returning,
        )
        flow.check(decided)
        writes.functions[key] = flow.returned
        return flow.returned

    def makes(self, cls: type, writes: Writes) -> bool:
        """Whether making an object of this class does that and no more, and its operators keep to it."""
        if cls in CONTAINERS or cls in _VALUES:
            return True
        if cls not in writes.made:
            writes.made[cls] = True  # while it is looked at
            try:
                self._make(cls, writes)
            except Leak:
                writes.made[cls] = False
        return writes.made[cls]

    def _make(self, cls: type, writes: Writes) -> None:
        made = [base for base in cls.__mro__ if "__new__" in vars(base)]
        is_simple = type(cls) in (type, abc.ABCMeta) and is_python_class(cls) and not is_foreign(cls.__module__)
        if not is_simple or issubclass(cls, nn.Module) or any(base not in (*CONTAINERS, object) for base in made):
            raise Leak
        if is_record(cls):
            for one in dataclasses.fields(cls):  # type: ignore[arg-type]  # it is one
                is_fixed = one.default is dataclasses.MISSING or isinstance(one.default, PLAIN)
                factory = None if one.default_factory is dataclasses.MISSING else one.default_factory
                if not is_fixed or not self.only_makes(factory, writes):
                    raise Leak
            if hasattr(cls, "__post_init__"):
                self._confine(UNKNOWN, cls, "__post_init__", writes, True)
        else:
            self._confine(UNKNOWN, cls, "__init__", writes, True)
        self.confine_operators(UNKNOWN, cls, writes)

    def only_makes(self, factory: Any, writes: Writes) -> bool:
        """Whether what a defaultdict calls for a new entry makes something new and does no more."""
        if isinstance(factory, functools.partial):
            given = (*factory.args, *factory.keywords.values())
            return all(isinstance(one, PLAIN) for one in given) and self.only_makes(factory.func, writes)
        if not isinstance(factory, FunctionType):
            return factory is None or (isinstance(factory, type) and self.makes(factory, writes))
        names, stored = names_in(factory.__code__)
        is_bare = not stored and not factory.__defaults__ and not factory.__kwdefaults__
        return is_bare and self.only_make((*names, *factory.__code__.co_freevars), space_of(factory), writes)

    def only_make(self, names: Iterable[str], space: Mapping[str, Any], writes: Writes) -> bool:
        """The same of code that uses these names."""
        found = {name: space.get(name, getattr(builtins, name, None)) for name in names}
        has_torch = any(one is torch for one in found.values())
        return all(
            one is torch
            or (isinstance(one, type) and self.makes(one, writes))
            or (has_torch and one is None and name in _NEW_TENSORS)
            for name, one in found.items()
        )


class Flow:
    """One function's code: where what is in the object may go."""

    def __init__(
        self,
        program: Program,
        tree: ast.FunctionDef,
        space: Mapping[str, Any],
        is_root: Callable[[ast.expr], bool],
        value: Any,
        cls: type,
        writes: Writes,
        *,
        is_method: bool = False,
        returning: bool = True,
    ) -> None:
        """`is_root`: whether an expression is the object itself, `value` of class `cls`.

        `returning`: in one of its own methods, whether what that returns counts as a part of it; otherwise it must
        return nothing.
        """
        self._program, self._tree, self._space, self._is_root, self._cls = program, tree, space, is_root, cls
        self._value = value
        self._writes, self._is_method, self._returning = writes, is_method, returning
        self._is_callable = any("__call__" in vars(base) for base in cls.__mro__)
        self.returned: Where = frozenset()
        """Where what a method returns is, if it is in the object."""
        self._tainted: set[str] = set()
        self._given = {one.arg for one in ast.walk(tree.args) if isinstance(one, ast.arg)}
        self._local = self._given | _locals_of(tree)
        self._not_new: set[str] = set(self._given)
        """Local names that may stand for something of others."""
        self._fresh: set[str] = set()
        """Those that may stand for a tensor made here."""
        self._made: dict[str, list[ast.expr]] = defaultdict(list)
        """Those that may stand for containers and objects made here, and what makes these."""
        self._parts: dict[str, tuple[Where, Where]] = {}
        """Those that may stand for something in the object: where that is, and what it is in."""
        self._numbers: set[str] = set()
        self._outer = {
            name for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names
        }
        self._loads = Counter(
            one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)
        )
        self._decides = False
        """Whether it was left early where the object decides: then all of it counts as decided."""

    def check(self, decided: bool = False) -> None:
        """A `Leak` where something gets out. `decided`: whether the object decides that the function is called."""
        while True:
            before = self._known_now()
            self._block(self._tree.body, decided or self._decides)
            if before == self._known_now():
                return

    def _known_now(self) -> Any:
        names = (self._tainted, self._not_new, self._fresh)
        return *map(len, names), self._decides, dict(self._parts), sum(map(len, self._made.values())), self.returned

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
            self._store_each(node.target, node.iter, decided)
            if _is_call_of("enumerate", node.iter) and isinstance(node.target, ast.Tuple):
                self._numbers |= {
                    one.id for one in node.target.elts[:1] if isinstance(one, ast.Name) and self._is_set_once(one.id)
                }
            self._block([*node.body, *node.orelse], decided or self._is_tainted(node.iter))
        elif isinstance(node, ast.With):
            for item in node.items:
                self._expression(item.context_expr, decided)
                if self._is_tainted(item.context_expr):
                    raise Leak
                self._not_new |= _stored_in(item)
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
                raise Leak
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._nested(node, decided)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and self._is_tainted(target.value):
                    self._writes.shrinks |= self._where(target.value)
                    self._change(target.value, False)
                elif decided or self._is_tainted(target):
                    raise Leak
        elif not isinstance(node, (ast.Pass, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom)) and (
            decided or self._is_tainted(node)
        ):
            raise Leak
        else:
            self._not_new |= _stored_in(node)

    def _return(self, node: ast.Return, decided: bool) -> None:
        if not self._is_method:
            if decided or (node.value is not None and self._is_tainted(node.value)):
                raise Leak
            return
        is_none = node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)
        if not self._returning and not is_none:
            raise Leak
        if node.value is not None and self._is_tainted(node.value):
            self.returned |= self._where(node.value)
        elif node.value is not None and not self._is_fixed(node.value):
            self.returned |= {_RETURNED}
            self._put(frozenset({_RETURNED}), node.value)
        self._leave(decided)

    def _leave(self, decided: bool) -> None:
        if decided and not self._is_method:
            raise Leak
        self._decides |= decided

    def _nested(self, node: ast.stmt, decided: bool) -> None:
        touches = self._is_tainted(node)
        if (touches and self._is_method) or (decided and touches):
            raise Leak
        if not touches:
            return
        if isinstance(node, ast.FunctionDef):  # as a hook made in the forward: its own arguments are somebody else's
            inner = Flow(self._program, node, self._space, self._is_root, self._value, self._cls, self._writes)
            inner._tainted |= self._tainted - inner._given
            inner._not_new |= self._not_new | self._made.keys() | self._fresh
            inner._local |= self._local
            inner.check()
            if inner._tainted - self._tainted - _locals_of(node):
                raise Leak
            return
        raise Leak

    def _store(self, target: ast.expr, value: ast.expr, decided: bool) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            each = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            is_each = len(each) == len(target.elts) and not any(isinstance(one, ast.Starred) for one in each)
            for k, one in enumerate(target.elts):
                self._store(one, each[k], decided) if is_each else self._store_each(one, value, decided)
        elif isinstance(target, ast.Starred):
            self._store_each(target.value, value, decided)
        elif isinstance(target, ast.Name):
            self._bind(target, decided or self._is_tainted(value))
            self._note(target.id, value)
        elif self._is_root(target):  # another in its place; an object that comes to be has no other
            is_begun = self._tree.name == "__init__"
            if decided or self._is_tainted(value) or (not is_begun and not _is_like(value, self._cls, self._space)):
                raise Leak
            self._writes.shrinks |= set() if is_begun else _ANYWHERE
        else:
            self._set(target, decided or self._is_tainted(value), decided)
            if self._is_tainted(target.value):  # type: ignore[attr-defined]
                self._put(self._where(target), value)

    def _store_each(self, target: ast.expr, value: ast.expr, decided: bool) -> None:
        """What comes of `value` one by one."""
        dirty = decided or self._is_tainted(value)
        passed = value.args if isinstance(value, ast.Call) and self._is_builtin(value) else []
        gives_pairs = any(_is_call_of(name, value) for name in ("enumerate", "zip")) or (
            isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "items"
        )
        for one, depth in _targets(target):
            if isinstance(one, ast.Name):
                self._bind(one, dirty)
                if self._is_tainted(value):
                    where, around = self._each(value)
                    for _ in range(depth - gives_pairs):
                        where = self._inside(where)
                    self._stands_for(one.id, where, around | where)
                if not self._is_tainted(value) or not all(map(self._is_tainted, passed)):
                    self._not_new |= set() if self._is_fixed(value) else {one.id}
            else:
                self._set(one, dirty, decided)
                if self._is_tainted(one.value):  # type: ignore[attr-defined]
                    self._writes.put(self._where(one), False)

    def _bind(self, target: ast.Name, dirty: bool) -> None:
        if self._is_root(target) or (dirty and target.id in self._outer):
            raise Leak
        if dirty:
            self._tainted.add(target.id)

    def _set(self, target: ast.expr, dirty: bool, decided: bool) -> None:
        """An attribute or item of something is set."""
        assert isinstance(target, (ast.Attribute, ast.Subscript))
        if self._is_root(target):
            raise Leak
        if isinstance(target, ast.Subscript):
            self._expression(target.slice, decided)
        if self._is_tainted(target.value):
            self._writes.grows |= self._where(target.value) if isinstance(target, ast.Subscript) else set()
            self._change(target.value, False)
        elif dirty or self._is_tainted(target):
            raise Leak

    def _note(self, name: str, value: ast.expr) -> None:
        """What a local name may stand for."""
        if isinstance(value, (ast.IfExp, ast.BoolOp)):
            for one in value.values if isinstance(value, ast.BoolOp) else (value.body, value.orelse):
                self._note(name, one)
        elif isinstance(value, ast.NamedExpr):
            self._note(name, value.value)
        elif self._is_fixed(value):
            pass
        elif self._is_made(value):
            self._made[name] += [] if any(value is one for one in self._made[name]) else [value]
        elif self._is_fresh(value):
            self._fresh.add(name)
        elif self._is_tainted(value):
            self._stands_for(name, self._where(value), self._around(value))
        else:
            self._not_new.add(name)

    def _stands_for(self, name: str, where: Where, around: Where) -> None:
        before = self._parts.get(name, (_NOWHERE, _NOWHERE))
        self._parts[name] = before[0] | where, before[1] | around

    def _add(self, node: ast.AugAssign, decided: bool) -> None:
        target = node.target
        dirty = decided or self._is_tainted(node.value)
        if isinstance(target, ast.Name):
            if self._is_root(target):
                return  # as log += [value]
            is_new = target.id not in self._not_new and target.id not in self._outer and target.id not in self._parts
            if (dirty or target.id in self._tainted) and not is_new:
                raise Leak
            if dirty:
                self._tainted.add(target.id)
            if not self._is_fixed(node.value):
                self._fresh.add(target.id)
        elif self._is_root(target):
            if self._cls not in CONTAINERS:
                raise Leak
        elif self._is_tainted(target.value):
            self._needs(target)
            self._change(target.value, False)
            self._change(target, False)
            if isinstance(target, ast.Subscript):
                self._expression(target.slice, decided)
            self._put_each(self._where(target), node.value)
        elif dirty or self._is_tainted(target):
            raise Leak

    # -- what is new

    def _is_set_once(self, name: str) -> bool:
        named = (one for one in ast.walk(self._tree) if isinstance(one, ast.Name) and one.id == name)
        return name not in self._given and sum(isinstance(one.ctx, ast.Store) for one in named) == 1

    def _is_fixed(self, node: ast.expr) -> bool:
        """Whether it is a number or text, which nobody can change."""
        if isinstance(node, ast.Name):
            is_known = node.id in (self._not_new | self._fresh | self._outer | self._parts.keys()) or self._made.get(
                node.id
            )
            return node.id in self._numbers or (node.id in self._local and not is_known)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return node.value.id not in self._space and self._program.is_plain(node.attr)
        if isinstance(node, ast.Call):
            is_item = self._is_call_by(node, frozenset({"item", "time", "perf_counter"}))
            return is_item or (isinstance(node.func, ast.Name) and node.func.id in _FIXED and self._is_builtin(node))
        if isinstance(node, (ast.BinOp, ast.UnaryOp)):
            parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
            return all(map(self._is_fixed, parts))
        return isinstance(node, (ast.Constant, ast.JoinedStr))

    def _is_call_by(self, node: ast.Call, names: frozenset[str]) -> bool:
        """Whether it is a method of one of these names, and of no class of the user's."""
        func = node.func
        return isinstance(func, ast.Attribute) and func.attr in names and not self._program.is_users(func.attr)

    def _is_builtin(self, node: ast.Call) -> bool:
        return isinstance(node.func, ast.Name) and node.func.id not in self._space and node.func.id not in self._local

    def _is_fresh(self, node: ast.expr) -> bool:
        """Whether it is a number, or a tensor made here."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self._is_builtin(node) and node.func.id in _PURE - _PASSING
        if isinstance(node, ast.Call):
            is_torchs = isinstance(node.func, ast.Attribute) and self._is_of(torch, node.func, _NEW_TENSORS)
            return is_torchs or self._is_call_by(node, _MAKING)
        return isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare))

    def _is_made(self, node: ast.expr) -> bool:
        """Whether it is a container or an object made here."""
        if isinstance(node, ast.Call):
            is_copied = isinstance(node.func, ast.Name) and node.func.id in _COPYING and self._is_builtin(node)
            cls = self._class_of(node.func)
            return is_copied or (cls is not None and self._program.makes(cls, self._writes))
        return isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict, *_COMPREHENSIONS))

    def _class_of(self, node: ast.expr) -> type | None:
        """The class that an expression names."""
        found: Any = None
        if isinstance(node, ast.Name) and node.id not in self._local:
            found = self._space.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in self._local:
            owner = self._space.get(node.value.id)
            found = vars(owner).get(node.attr) if isinstance(owner, ModuleType) else None
        return found if isinstance(found, type) else None

    def _put(self, where: Where, value: ast.expr) -> None:
        """Something is held there from now on."""
        inside = self._inside(where)
        if isinstance(value, (ast.IfExp, ast.BoolOp)):
            for one in value.values if isinstance(value, ast.BoolOp) else (value.body, value.orelse):
                self._put(where, one)
        elif isinstance(value, ast.NamedExpr):
            self._put(where, value.value)
        elif self._is_fixed(value):
            pass
        elif isinstance(value, ast.Name) and not self._is_root(value):
            self._put_name(where, value.id)
            for one in list(self._made.get(value.id, ())):
                self._put(where, one)
        elif isinstance(value, (ast.List, ast.Tuple, ast.Set)):
            for one in value.elts:
                self._put_each(where, one.value) if isinstance(one, ast.Starred) else self._put(inside, one)
        elif isinstance(value, ast.Dict):
            for key, one in zip(value.keys, value.values, strict=True):
                self._put(inside, one) if key is not None else self._put_each(where, one)
        elif isinstance(value, _COMPREHENSIONS):
            self._put(inside, value.value if isinstance(value, ast.DictComp) else value.elt)
        elif isinstance(value, ast.Call) and self._is_made(value):
            self._put_made(where, value)
        elif self._is_fresh(value):
            pass
        elif not self._is_own(where, value):
            is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
            self._writes.put(where, is_call and value.func.attr in _OF_NUMBERS)  # type: ignore[attr-defined]

    def _put_name(self, where: Where, name: str) -> None:
        if name in self._not_new or name not in self._local or name in self._outer:
            self._writes.put(where, False)
            return
        if name in self._fresh and name not in self._tainted and self._loads[name] > 1:
            self._writes.put(where, False)  # a tensor that goes elsewhere, too
        if name in self._parts and not self._parts[name][0] <= where:
            self._writes.put(where, False)
        if self._made.get(name):  # what is done with it from now on is done with a part of the object
            self._tainted.add(name)
            self._stands_for(name, where, _around(where))

    def _put_made(self, where: Where, value: ast.Call) -> None:
        cls = self._class_of(value.func)
        if cls is None or (cls in CONTAINERS and cls is not defaultdict):
            for one in value.args:
                self._put_each(where, one)
            for each in value.keywords:
                self._put(self._inside(where), each.value) if cls is None or issubclass(cls, dict) else None
        elif cls is defaultdict:
            if value.args and not self._only_makes(value.args[0]):
                raise Leak
            for one in value.args[1:]:
                self._put_each(where, one)
        elif is_record(cls):
            names = [one.name for one in dataclasses.fields(cls) if one.init]
            for name, one in [
                *zip(names, value.args, strict=False),
                *((each.arg, each.value) for each in value.keywords),
            ]:
                self._put(frozenset({name}) if name else _ANYWHERE, one)

    def _only_makes(self, factory: ast.expr) -> bool:
        if isinstance(factory, ast.Constant):
            return factory.value is None
        if isinstance(factory, ast.Lambda) and any(isinstance(one, ast.arg) for one in ast.walk(factory.args)):
            return False
        body = factory.body if isinstance(factory, ast.Lambda) else factory
        names = [one.id for one in ast.walk(body) if isinstance(one, ast.Name)]
        names += [one.attr for one in ast.walk(body) if isinstance(one, ast.Attribute)]
        return self._local.isdisjoint(names) and self._program.only_make(names, self._space, self._writes)

    def _put_each(self, where: Where, value: ast.expr) -> None:
        """What is in `value` is held in what is there."""
        if isinstance(value, (ast.List, ast.Tuple, ast.Set, ast.Dict, *_COMPREHENSIONS)):
            self._put(where, value)
        elif not self._is_fixed(value) and not (
            self._is_tainted(value) and self._each(value)[0] <= self._inside(where)
        ):
            if isinstance(value, ast.Name):
                self._put_name(self._inside(where), value.id)
                for one in list(self._made.get(value.id, ())):
                    self._put_each(where, one)
            elif not self._is_fresh(value):
                self._writes.put(self._inside(where), False)

    def _is_own(self, where: Where, value: ast.expr) -> bool:
        """Whether it comes from the very place that it is put in."""
        if not self._is_tainted(value) or self._is_root(value) or where >= _ANYWHERE:
            return False
        return self._where(value) <= where

    def _change(self, node: ast.expr, by_method: bool) -> None:
        if not self._is_root(node):
            self._writes.change(self._around(node), by_method)

    # -- where something is

    def _where(self, node: ast.expr) -> Where:
        if self._is_root(node):
            return _ITSELF
        if isinstance(node, ast.Attribute):
            return _ANYWHERE if self._program.is_computed(node.attr) else frozenset({node.attr})
        if isinstance(node, ast.Subscript):
            inside = self._where(node.value)
            return inside if isinstance(node.slice, ast.Slice) else self._inside(inside)
        if isinstance(node, ast.Name):
            found = self._parts[node.id][0] if node.id in self._parts else _ANYWHERE
            return found | _GIVEN if node.id in self._not_new else found
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            parts = node.values if isinstance(node, ast.BoolOp) else (node.body, node.orelse)
            return frozenset().union(*(self._where(one) for one in parts if self._is_tainted(one)))
        if isinstance(node, ast.NamedExpr):
            return self._where(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self._given_by(node.func)
        return _ANYWHERE

    def _given_by(self, func: ast.Attribute) -> Where:
        """Where what a method gives is."""
        if not self._is_tainted(func.value) or _is_super(func.value):
            return _ANYWHERE
        base = self._where(func.value)
        found = _NOWHERE
        if self._program.is_users(func.attr):
            returned = self._program.confine(*self._known(func.value), func.attr, self._writes)
            found = returned - _ITSELF | (base if returned >= _ITSELF else _NOWHERE)
        if func.attr in _GIVING:
            return found | self._inside(base)
        return found | (base if func.attr in _VIEWING | {"copy"} or found else _ANYWHERE)

    def _inside(self, where: Where) -> Where:
        """Where what is in containers there is."""
        is_open = self._value is UNKNOWN and where >= _ITSELF
        return _further(where - _ITSELF) | _ANYWHERE if is_open else _further(where)

    def _around(self, node: ast.expr) -> Where:
        """Where it is, and where all is that it is in."""
        found: Where = frozenset()
        while not self._is_root(node):
            found |= _around(self._where(node))
            if isinstance(node, (ast.Attribute, ast.Subscript, ast.NamedExpr)):
                node = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                node = node.func.value
            else:
                _, around = self._parts.get(node.id if isinstance(node, ast.Name) else "", (_NOWHERE, _NOWHERE))
                return found | around
        return found

    def _each(self, node: ast.expr) -> tuple[Where, Where]:
        """Where what comes of it one by one is, and what that is in."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _PASSING:
            parts = [self._each(one) for one in node.args if self._is_tainted(one)]
            if parts and self._is_builtin(node):
                return _NOWHERE.union(*(one for one, _ in parts)), _NOWHERE.union(*(one for _, one in parts))
        where = self._inside(self._where(node))
        return where, self._around(node) | where

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

    def _expression(self, node: ast.expr, decided: bool) -> None:
        """Look at all calls in it, the inner ones first."""
        if isinstance(node, _COMPREHENSIONS):
            for part in node.generators:
                self._expression(part.iter, decided)
                self._store_each(part.target, part.iter, decided)
                decided = decided or any(map(self._is_tainted, (part.iter, *part.ifs)))
        if isinstance(node, ast.Lambda):
            if decided or self._is_tainted(node):
                raise Leak
            return
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)) and (decided or self._is_tainted(node)):
            raise Leak
        if isinstance(node, ast.NamedExpr):
            self._store(node.target, node.value, decided)
        if isinstance(node, ast.IfExp):
            decided = decided or self._is_tainted(node.test)
        if isinstance(node, ast.BoolOp):
            decided = decided or any(map(self._is_tainted, node.values))
        is_factory = isinstance(node, ast.Call) and self._class_of(node.func) is defaultdict
        for child in ast.iter_child_nodes(node):
            for one in (child,) if isinstance(child, ast.expr) else ast.iter_child_nodes(child):
                if isinstance(one, ast.expr) and not (is_factory and isinstance(one, ast.Lambda)):
                    self._expression(one, decided)
        if (
            self._program.tries
            and isinstance(node, ast.BinOp)
            and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod))
            and self._is_tainted(node.right)
            and not _is_call_of("max", node.right)
        ):
            raise Leak  # a division by zero that is caught somewhere
        if isinstance(node, (ast.Attribute, ast.Subscript)) and self._is_tainted(node.value):
            if isinstance(node, ast.Attribute):
                self._program.properties(*self._known(node.value), node.attr, self._writes, decided)
            self._needs(node)
        if isinstance(node, ast.Call):
            self._call(node, decided)

    def _is_other(self, func: ast.expr) -> TypeGuard[ast.Attribute]:
        """Whether what is called has the object's name only: a dict `log` is not what `x.log()` calls."""
        return isinstance(func, ast.Attribute) and self._is_root(func) and not self._is_callable

    def _known(self, node: ast.expr) -> tuple[Any, type | None]:
        return (self._value, self._cls) if self._is_root(node) else (UNKNOWN, None)

    def _needs(self, node: ast.Attribute | ast.Subscript) -> None:
        """Whether what is taken is there, whatever other layers have done or not."""
        held = self._held(node.value)
        if isinstance(node, ast.Attribute):
            is_known = held is UNKNOWN or hasattr(type(held), node.attr) or node.attr in getattr(held, "__dict__", ())
            if not is_known and not self._is_made_sure(node):
                raise Leak
        elif not isinstance(node.slice, ast.Slice) and not hasattr(type(held), "__missing__"):
            if self._is_made_sure(node):
                return
            if self._held(node) is UNKNOWN:
                self._writes.needs |= self._where(node.value)
            else:
                self._writes.needs_what_is_there |= self._where(node.value)

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
            (
                isinstance(one, ast.Compare)
                and isinstance(one.ops[0], (ast.In, ast.NotIn))
                and (ast.dump(one.left), ast.dump(one.comparators[0])) == (wanted, base)
            )
            or _fills(one, base)
            or _catches(one, node)
            or _sets_before(one, node)
            for one in ast.walk(self._tree)
        )

    def _held(self, node: ast.expr) -> Any:
        """What an expression stands for now, if it is told."""
        if self._is_root(node):
            return self._value
        if isinstance(node, ast.Attribute):
            return getattr(self._held(node.value), "__dict__", {}).get(node.attr, UNKNOWN)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            held = self._held(node.value)
            try:
                return held[node.slice.value]
            except (LookupError, TypeError):
                pass
        return UNKNOWN

    def _call(self, node: ast.Call, decided: bool) -> None:
        given = [*node.args, *(one.value for one in node.keywords)]
        dirty = decided or any(map(self._is_tainted, given))
        func = node.func
        cls = self._class_of(func)
        if self._is_root(func) and not self._is_other(func):
            self._program.confine(self._value, self._cls, "__call__", self._writes, dirty)
        elif isinstance(func, ast.Attribute) and _is_super(func.value):
            if self._is_method:
                self._program.confine(self._value, self._cls, func.attr, self._writes, dirty, by_super=True)
            elif dirty:
                raise Leak
        elif isinstance(func, ast.Attribute) and self._is_tainted(func.value):
            self._call_method(func, given, decided)
        elif isinstance(func, ast.Name) and func.id not in self._space and func.id not in self._given:
            if dirty and (func.id not in _PURE or any(one.arg == "file" for one in node.keywords)):
                raise Leak
        elif cls is not None and cls is not defaultdict and self._program.makes(cls, self._writes):
            pass  # what it is made of is in it: whoever gets that gets something of the object
        elif cls is defaultdict and all(map(self._only_makes, node.args[:1])):
            pass
        elif dirty and not self._is_silent(func):
            is_number = isinstance(func, ast.Attribute) and self._program.is_harmless(func.attr)
            if not is_number or any(map(self._is_tainted, given)):
                raise Leak
        if self._is_tainted(func) and not isinstance(func, ast.Attribute):
            raise Leak

    def _call_method(self, func: ast.Attribute, given: list[ast.expr], decided: bool) -> None:
        """Of the object, or of something in it."""
        dirty = decided or any(map(self._is_tainted, given))
        self._program.confine(*self._known(func.value), func.attr, self._writes, dirty)
        if func.attr in _RAISING and not decided and len(given) < 2:
            raise Leak
        where = self._where(func.value)
        self._writes.grows |= where if func.attr in _TAKING else set()
        self._writes.shrinks |= where if func.attr in _RAISING or func.attr == "clear" else set()
        if func.attr not in _OF_NUMBERS | _TELLING:
            self._change(func.value, True)
        if func.attr in _TAKING or func.attr in _GIVING:
            keyed = func.attr in (*_GIVING, "insert")
            for one in given[1:] if keyed else given:
                self._put_each(where, one) if func.attr in _SPREADING else self._put(self._inside(where), one)

    def _is_silent(self, func: ast.expr) -> bool:
        """Whether it is a library's function of numbers, or tells a human being."""
        if not isinstance(func, ast.Attribute) or not isinstance(func.value, ast.Name) or func.value.id in self._given:
            return False
        owner = self._space.get(func.value.id)
        of_arrays = self._is_of(np, func, _OF_ARRAYS) or self._is_of(torch, func, _NEW_TENSORS)
        return of_arrays or isinstance(owner, logging.Logger) or any(owner is one for one in _MODULES)

    def _is_of(self, library: ModuleType, func: ast.Attribute, names: frozenset[str]) -> bool:
        """Whether it is one of these functions of a library."""
        base = func.value
        is_library = isinstance(base, ast.Name) and base.id not in self._local and self._space.get(base.id) is library
        return is_library and func.attr in names


def _further(where: Where) -> Where:
    """Where what is in containers there is."""
    return frozenset(one + "[]" if one.count("[]") < _DEPTH and _SOMEWHERE not in one else _SOMEWHERE for one in where)


def _around(where: Where) -> Where:
    """There, and in what containers that is."""
    return frozenset(one.removesuffix("[]" * k) for one in where for k in range(_DEPTH + 1)) - _ITSELF


def is_record(cls: type) -> bool:
    """Whether a dataclass has the constructor that it was given as one."""
    own = next((vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)), None)
    return dataclasses.is_dataclass(cls) and isinstance(own, FunctionType) and own.__code__.co_filename == "<string>"


def space_of(function: FunctionType) -> Mapping[str, Any]:
    """What a function's free names stand for."""
    around = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            around[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    return ChainMap(around, function.__globals__) if around else function.__globals__


def _targets(node: ast.expr, depth: int = 0) -> Iterator[tuple[ast.expr, int]]:
    """Names, attributes and items that are set, and in how many tuples each is."""
    if isinstance(node, (ast.Tuple, ast.List)):
        for one in node.elts:
            yield from _targets(one, depth + 1)
    elif isinstance(node, ast.Starred):
        yield from _targets(node.value, depth)
    else:
        yield node, depth


def _stored_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def _locals_of(node: ast.FunctionDef) -> set[str]:
    outer = {name for one in ast.walk(node) if isinstance(one, (ast.Global, ast.Nonlocal)) for name in one.names}
    return _stored_in(node) - outer


def _calls(node: ast.AST, base: str, method: str, first: str | None = None) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != method:
        return False
    return ast.dump(node.func.value) == base and first in (None, ast.dump(node.args[0]))


def _fills(node: ast.AST, base: str) -> bool:
    """Whether it is `while len(base) <= k: base.append(...)`."""
    if not isinstance(node, ast.While) or not any(_calls(one, base, "append") for one in ast.walk(node)):
        return False
    asked = (one for one in ast.walk(node.test) if _is_call_of("len", one))
    return any(isinstance(one, ast.Call) and ast.dump(one.args[0]) == base for one in asked)


def _catches(node: ast.AST, wanted: ast.expr) -> bool:
    """Whether it is a `try` for what is wanted, and what to do where that is not there."""
    if not isinstance(node, ast.Try) or not any(one is wanted for part in node.body for one in ast.walk(part)):
        return False
    return any(isinstance(one.type, ast.Name) and one.type.id in ("KeyError", "IndexError") for one in node.handlers)


def _sets_before(node: ast.AST, wanted: ast.Attribute | ast.Subscript) -> bool:
    """Whether it is a block in which what is wanted is set before."""
    target = ast.dump(wanted).replace("ctx=Load()", "ctx=Store()")
    for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
        is_set = False
        for one in block if isinstance(block, list) else ():
            if is_set and any(each is wanted for each in ast.walk(one)):
                return True
            targets = one.targets if isinstance(one, ast.Assign) else []
            is_set |= any(ast.dump(each).replace("ctx=Load()", "ctx=Store()") == target for each in targets)
    return False


def _text_of(node: ast.Attribute | ast.Subscript) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ast.dump(node.slice)


def _is_call_of(name: str, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _is_super(node: ast.expr) -> bool:
    return _is_call_of("super", node)


def _is_like(node: ast.expr, cls: type, space: Mapping[str, Any]) -> bool:
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


@functools.cache
def tree_of(code: CodeType) -> ast.FunctionDef | None:
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
