"""Whether a forward may write into tensors so that torch's version counters do not tell: by the names its code uses.

    buffer.data.mul_(0.9)          buffer.numpy()[...] *= 0.9          buffer.data = value

Followed from the modules' forward and hooks, by name alone: what is called like a method of one of the model's classes,
or like a function that the code names, is taken for that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from partitioner.usage import names_in

_PAST_VERSIONS = frozenset(
    {
        "data",
        "numpy",
        "from_numpy",
        "asarray",
        "as_tensor",
        "__array__",
        "frombuffer",
        "set_",
        "swap_tensors",
        "from_dlpack",
        "to_dlpack",
        "__dlpack__",
        "untyped_storage",
        "storage",
        "data_ptr",
        "_unsafe_set_version_counter",
        "_unsafe_preserve_version_counter",
    }
)
_OWN = ("torch", "numpy", "builtins", "partitioner")


def may_write_unannounced(model: nn.Module, objects: Iterable[Any] = ()) -> bool:
    """Whether code that the model's forward leads to names one of the ways. `objects`: others whose methods it calls.

    What `getattr` or `exec` make of a text is not seen, nor what is written in another language.
    """
    modules = list(model.modules())
    classes = {base for one in (*modules, *objects) for base in type(one).__mro__ if not _is_own(base.__module__)}
    methods: dict[str, list[Any]] = {}
    for base in classes:
        for name, found in vars(base).items():
            methods.setdefault(name, []).append(found)
    waiting: list[Any] = [*methods.get("forward", ()), *methods.get("__call__", ())]
    for module in modules:
        waiting += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        waiting += [one for one in vars(module).values() if isinstance(one, (FunctionType, MethodType))]
    seen: set[Any] = set()
    while waiting:
        for function in _functions(waiting.pop()):
            if function in seen or _is_own(function.__module__ or ""):
                continue
            seen.add(function)
            names = _names(function.__code__)
            if not names.isdisjoint(_PAST_VERSIONS):
                return True
            space = function.__globals__
            for name in names:
                waiting += methods.get(name, ())
                found = space.get(name)
                if isinstance(found, ModuleType) and not _is_own(found.__name__):
                    waiting += [one for each in names if isinstance(one := vars(found).get(each), FunctionType)]
                elif isinstance(found, type) and not _is_own(found.__module__):
                    waiting += [one for key, one in vars(found).items() if key in names or key == "__call__"]
                elif callable(found):
                    waiting.append(found)
            waiting += [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
    return False


def _functions(found: Any) -> list[FunctionType]:
    """The Python functions behind something that is called."""
    while isinstance(found, (functools.partial, MethodType, staticmethod, classmethod)):
        found = found.func if isinstance(found, functools.partial) else found.__func__
    if isinstance(found, property):
        return [one for one in (found.fget, found.fset) if isinstance(one, FunctionType)]
    found = getattr(found, "__wrapped__", found)
    if not isinstance(found, (FunctionType, type)):
        found = next((vars(base)["__call__"] for base in type(found).__mro__ if "__call__" in vars(base)), None)
    return [found] if isinstance(found, FunctionType) else []


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    return frozenset(names_in(code)[0])


def _is_own(module: str) -> bool:
    """Whether code is torch's, which does nothing of the kind, or NumPy's."""
    return module.partition(".")[0] in _OWN


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
