"""Tensors inside nested Python values: found, replaced, and the values put together again.

A container is a tuple, list, dict, deque, slice, SimpleNamespace or dataclass, or of a subclass (named tuples, packed
sequences, torch's result types, Hugging Face's outputs). Anything else is opaque: caches, configurations.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from operator import is_
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributions import Distribution

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout, type)
_LEAVES = frozenset(PLAIN)


class Opened(NamedTuple):
    """A container taken apart; `keys` is what is needed besides its parts to build it again."""

    kind: str
    cls: Any
    keys: tuple[Any, ...]
    parts: list[Any]

    def is_still(self, item: Any) -> bool:
        """Whether `item`, which was taken apart, holds the very same objects still; False may also mean: not known."""
        parts = self.parts
        if self.kind in ("list", "deque"):
            return len(item) == len(parts) and all(map(is_, item, parts))
        if self.kind == "dict":
            keys, attributes, factory = self.keys
            if attributes or getattr(item, "default_factory", None) is not factory:
                return False
            return _holds_still(item, keys, parts)
        return self.kind == "object" and not slots(self.cls) and _holds_still(item.__dict__, self.keys, parts)

    def built(self, parts: list[Any]) -> Any:
        """A container like the one taken apart, of these parts. No constructor of the user's runs."""
        made: Any
        kind, cls, keys, _ = self
        if kind == "tuple":
            if cls is tuple:
                return tuple(parts)
            return cls(parts) if cls.__module__ == "torch.return_types" else tuple.__new__(cls, parts)
        if kind == "list":
            if cls is list:
                return parts
            made = cls.__new__(cls)
        elif kind == "slice":
            return slice(*parts)
        elif kind == "deque":
            made = deque(maxlen=keys[0])
        elif kind == "dict":
            made = defaultdict(keys[2]) if cls is defaultdict else cls.__new__(cls)
        else:
            made = cls.__new__(cls)
        self.refill(made, parts)
        return made

    def refill(self, made: Any, parts: list[Any]) -> None:
        """Put these parts into `made`, in place of all that it holds."""
        kind, _, keys, _ = self
        if kind == "list":
            list.__setitem__(made, slice(None), parts)
        elif kind == "deque":
            made.clear()
            made.extend(parts)
        elif kind == "dict":
            base: Any = OrderedDict if isinstance(made, OrderedDict) else dict
            base.clear(made)
            for key, part in zip(keys[0], parts, strict=False):
                base.__setitem__(made, key, part)
            if keys[1]:
                vars(made).update(zip(keys[1], parts[len(keys[0]) :], strict=True))
        else:
            for key, part in zip(keys, parts, strict=True):
                object.__setattr__(made, key, part)


def _holds_still(now: dict[Any, Any], keys: tuple[Any, ...], parts: list[Any]) -> bool:
    return len(now) == len(parts) and all(map(is_, now, keys)) and all(map(is_, dict.values(now), parts))


def opened(item: Any) -> Opened | None:
    """`item` taken apart if it is a container.

    >>> opened({"a": 1}).parts, opened(3)
    ([1], None)
    """
    cls = type(item)
    if cls in _LEAVES or isinstance(item, (torch.Tensor, nn.Module, torch.Size, type)):
        return None
    if isinstance(item, tuple):
        return Opened("tuple", cls, (), [*tuple.__iter__(item)])  # its parts, whatever its class makes of iter and len
    if isinstance(item, list):
        return Opened("list", cls, (), [*list.__iter__(item)])
    if isinstance(item, dict):
        attributes = tuple(vars(item)) if hasattr(item, "__dict__") else ()
        names = (tuple(item), attributes, getattr(item, "default_factory", None))
        return Opened("dict", cls, names, [*dict.values(item), *(vars(item)[name] for name in attributes)])
    if isinstance(item, deque):
        return Opened("deque", cls, (item.maxlen,), list(item))
    if isinstance(item, slice):
        return Opened("slice", cls, (), [item.start, item.stop, item.step])
    if isinstance(item, SimpleNamespace) or dataclasses.is_dataclass(item):
        return opened_object(item)
    return None


def opened_record(item: Any) -> Opened | None:
    """`item` taken apart if it is an object of some Python class that holds tensors directly in its attributes.

    Of torch's own classes only distributions are, which are no more than their attributes.
    """
    if not hasattr(item, "__dict__") or isinstance(item, (torch.Tensor, nn.Module, type)) or callable(item):
        return None
    bases = type(item).__mro__[:-1]
    is_distribution = isinstance(item, Distribution)
    theirs = bases[0].__module__.partition(".")[0] in ("torch", "numpy", "builtins") and not is_distribution
    if theirs or any("__new__" in vars(c) for c in bases):
        return None
    held = list(vars(item).values())
    if tensors_in(held) or any(isinstance(part, Distribution) for part in held if is_distribution):
        return opened_object(item)
    return None


def opened_object(item: Any) -> Opened:
    """Any object taken apart into its attributes."""
    found: dict[str, Any] = dict(item.__dict__) if hasattr(item, "__dict__") else {}
    for name in slots(type(item)):  # type: ignore[arg-type]  # mypy does not take classes for hashable
        if hasattr(item, name):
            found[name] = object.__getattribute__(item, name)
    return Opened("object", type(item), tuple(found), list(found.values()))


@functools.lru_cache(maxsize=4096)
def slots(cls: type) -> tuple[str, ...]:
    """Names that objects of the class keep in slots."""
    names: list[str] = []
    for base in cls.__mro__:
        found = base.__dict__.get("__slots__", ())
        names += [found] if isinstance(found, str) else found
    return tuple(name for name in names if not name.startswith("__"))


def is_same(now: Any, before: Any) -> bool:
    """Whether two values are the same object, or plain and equal in type and value."""
    if now is before:
        return True
    return isinstance(now, PLAIN) and type(now) is type(before) and bool(now == before)


def are_same_objects(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether two tuples of one length hold the very same objects.

    CPython keeps their addresses in a row, and to compare long rows takes a fraction of going through the objects.
    """
    if len(now) < _LONG or not _TUPLES_ARE_ROWS:
        return all(map(is_, now, before))
    return _row(now) == _row(before)


def _row(items: tuple[Any, ...]) -> bytes:
    return ctypes.string_at(id(items) + tuple.__basicsize__, len(items) * tuple.__itemsize__)


def _tuples_are_rows() -> bool:
    if sys.implementation.name != "cpython" or tuple.__itemsize__ != ctypes.sizeof(ctypes.c_void_p):
        return False
    some = (1, "a", None)
    return _row(some) == b"".join(id(item).to_bytes(tuple.__itemsize__, sys.byteorder) for item in some)


_TUPLES_ARE_ROWS, _LONG = _tuples_are_rows(), 100


def is_python_object(value: Any) -> bool:
    """Whether a value is an object of a class written in Python that keeps its state in attributes."""
    return is_python_class(type(value)) and hasattr(value, "__dict__")  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def is_container(cls: Any) -> bool:
    """Whether `opened` takes objects of this class apart."""
    if issubclass(cls, (*PLAIN, torch.Tensor, nn.Module)):
        return False
    return issubclass(cls, (tuple, list, dict, deque, slice, SimpleNamespace)) or dataclasses.is_dataclass(cls)


@functools.lru_cache(maxsize=4096)
def is_python_class(cls: type) -> bool:
    """Whether a class is written in Python, by somebody who keeps state in its objects."""
    if not cls.__flags__ & _HEAP_TYPE or issubclass(cls, (torch.Tensor, nn.Module, type)):
        return False
    return cls.__module__.partition(".")[0] not in ("torch", "numpy", "builtins", "random", "enum", "re", "functools")


_HEAP_TYPE = 1 << 9
"""Flag of classes written in Python."""


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any], opaque: Callable[[Any], Any] | None = None) -> Any:
    """`value` with every tensor replaced, through any nesting of containers.

    Containers are copied, never changed; what is none of these goes through `opaque`, or stays as it is.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    inside = opened(value)
    if inside is not None:
        return inside.built([map_tensors(part, change, opaque) for part in inside.parts])
    return value if opaque is None or isinstance(value, (*PLAIN, nn.Module)) else opaque(value)


def in_own_containers(value: Any) -> Any:
    """The same tensors in containers of their own: a model that is given them may extend or empty those."""
    return map_tensors(value, lambda tensor: tensor)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in `value`, in the order `map_tensors` meets them."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(item: Any, found: list[torch.Tensor]) -> None:
    cls = type(item)
    if cls in _LEAVES:
        return
    if isinstance(item, torch.Tensor):
        found.append(item)
    elif cls is tuple or cls is list:
        for part in item:
            _collect(part, found)
    elif cls is dict:
        for part in item.values():
            _collect(part, found)
    else:
        inside = opened(item)
        if inside is not None:
            for part in inside.parts:
                _collect(part, found)


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors have in common when they share memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and other layouts without one storage
        return id(tensor)


def described(value: Any) -> str:
    """
    >>> described(torch.zeros(2, 3)), described(torch.tensor([3, 9])), described({"ids": None})
    ('float32 (2, 3)', 'int64 (2,) of 3 to 9', '{ids: None}')
    """
    if isinstance(value, torch.Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        if not value.is_floating_point() and not value.is_complex() and value.numel() and not value.is_meta:
            text += f" of {value.min().item()} to {value.max().item()}"
        return text if value.device.type == "cpu" else f"{text} on {value.device}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {described(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)) and tensors_in(value):
        return "(" + ", ".join(map(described, value)) + ")"
    if value is None or isinstance(value, (bool, int, float)):
        return str(value)
    return f"a {type(value).__name__}"


def share_memory(one: Any, other: Any) -> bool:
    """Whether a tensor in one structure lies where a tensor in the other does."""
    here, there = (
        {t.untyped_storage().data_ptr() for t in tensors_in(value) if t.layout == torch.strided and t.numel()}
        for value in (one, other)
    )
    return bool((here & there) - {0})
