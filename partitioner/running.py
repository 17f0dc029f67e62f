"""Code that a model's forward may lead to, by the names that code uses.

What is called like a method of one of the model's classes, or like a function that the code names, is taken for that.
What `getattr` or `exec` make of a text is not seen, nor what is written in another language.
"""

from __future__ import annotations

import enum
import functools
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from torch import nn

from partitioner.usage import names_in

_OWN = frozenset({"torch", "numpy", "builtins", "partitioner"})
_FOREIGN = frozenset({*_OWN, "scipy", *sys.stdlib_module_names} - {"__main__"})
_OF_FUNCTIONS = ("backward", "setup_context", "jvp", "vmap")
"""Methods that torch calls of an autograd Function."""
_AROUND_FUNCTIONS = (functools.partial, functools.partialmethod, functools.cached_property)
_TEXTS = frozenset({"__repr__", "__str__", "__format__", "__new__", "__class_getitem__", "__init_subclass__"})
"""Methods that Python calls by itself, of which no number comes."""


class Running:
    """Functions that a forward may run, and the classes whose methods they may be; torch's and NumPy's left out.

    `objects`: what else methods are called of, and functions. `implicit`: whether methods count that Python calls by
    itself, as `len(x)` does. `classes` grows as functions are drawn.
    """

    def __init__(self, model: nn.Module, objects: Iterable[Any] = (), *, implicit: bool = False) -> None:
        self._implicit = implicit
        self._methods: dict[str, list[Any]] = {}
        self._names: set[str] = {"forward", "__call__", *(_OF_FUNCTIONS if implicit else ())}
        self.classes: dict[type, None] = {}
        self._waiting: list[Any] = []
        modules = list(model.modules())
        for one in (*modules, *objects):
            if callable(one) and isinstance(one, (FunctionType, MethodType, functools.partial)):
                self._waiting.append(one)
            else:
                self._enter(type(one))
        for module in modules:
            self._waiting += forward_hooks_on(module) + (backward_hooks_on(module) if implicit else [])
            self._waiting += [one for one in vars(module).values() if isinstance(one, (FunctionType, MethodType))]

    def functions(self) -> Iterator[FunctionType]:
        """Each once."""
        seen: set[Any] = set()
        while self._waiting:
            found = self._waiting.pop()
            for function in functions_behind(found):
                if function in seen or is_own(function.__module__ or ""):
                    continue
                seen.add(function)
                yield function
                self._lead_on(function)

    def _lead_on(self, function: FunctionType) -> None:
        names = names_of(function.__code__)
        space = function.__globals__
        for name in names - self._names:
            self._waiting += self._methods.get(name, ())
        self._names |= names
        for name in names:
            found = space.get(name)
            if isinstance(found, ModuleType) and not is_own(found.__name__):
                for each in names:
                    self._named(vars(found).get(each), function_only=True)
            else:
                self._named(found)
        for cell in function.__closure__ or ():
            if _is_set(cell):
                self._named(cell.cell_contents)

    def _named(self, found: Any, function_only: bool = False) -> None:
        if isinstance(found, type):
            self._enter(found)
            if self._implicit and issubclass(found, nn.Module):
                self._waiting += [vars(base)["__init__"] for base in found.__mro__ if "__init__" in vars(base)]
        elif isinstance(found, FunctionType) or (callable(found) and not function_only):
            self._waiting.append(found)

    def _enter(self, cls: type) -> None:
        for base in cls.__mro__:
            if base in self.classes or is_own(base.__module__):
                continue
            self.classes[base] = None
            if issubclass(base, enum.Enum):
                self._waiting += [one.value for one in base if callable(one.value)]
            for name, found in vars(base).items():
                if self._implicit and name == "__init__" and issubclass(base, nn.Module):
                    continue  # where code names no such class, it is made already
                self._methods.setdefault(name, []).append(found)
                if name in self._names or (self._implicit and name.startswith("__") and name not in _TEXTS):
                    self._waiting.append(found)


def forward_hooks_on(module: nn.Module) -> list[Any]:
    """What runs around its forward."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def backward_hooks_on(module: nn.Module) -> list[Any]:
    """What runs around its backward."""
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def functions_behind(found: Any) -> list[FunctionType]:
    """The Python functions behind something that is called, or read by its name on an object."""
    while isinstance(found, (*_AROUND_FUNCTIONS, MethodType, staticmethod, classmethod)):
        found = found.func if isinstance(found, _AROUND_FUNCTIONS) else found.__func__
    if isinstance(found, property):
        return [one for part in (found.fget, found.fset) if part is not None for one in functions_behind(part)]
    found = found.dispatcher if isinstance(found, functools.singledispatchmethod) else found
    both = [found, getattr(found, "__wrapped__", None)]
    if isinstance(kinds := getattr(found, "registry", None), MappingProxyType):  # of functools.singledispatch
        both += kinds.values()
    if not isinstance(both[0], (FunctionType, type)):
        both[0] = next((vars(base)["__call__"] for base in type(found).__mro__ if "__call__" in vars(base)), None)
    return [one for one in both if isinstance(one, FunctionType)]


@functools.cache
def names_of(code: CodeType) -> frozenset[str]:
    """Global and attribute names that code and functions inside of it use."""
    return frozenset(names_in(code)[0])


def is_own(module: str) -> bool:
    """Whether code is torch's, NumPy's or ours, which keeps nothing of the user's."""
    return module.partition(".")[0] in _OWN


def is_foreign(module: str) -> bool:
    """Whether code is torch's, NumPy's or Python's own, whose state is theirs to keep."""
    return module.partition(".")[0] in _FOREIGN


@functools.lru_cache(maxsize=4096)
def is_installed(module: str) -> bool:
    """Whether code is a library's, of which only what a forward leads to is looked at."""
    if is_foreign(module):
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return any(file.startswith(sysconfig.get_paths()[name]) for name in ("purelib", "platlib"))


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
