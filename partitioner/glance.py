"""See at one look that nothing has changed in many places: this is done after every layer, so it must cost nothing.

Of every dict CPython before 3.13 keeps a number that is another after each change (PEP 509): while that is the same,
not one of the objects in it has to be looked at, which would fetch each from memory. Where it is another, and in other
Pythons always, it is seen by the objects whether the dict holds the very same ones still. Likewise it is read where an
object says which dict its attributes are in, without asking its class.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from partitioner.logbook import version
from partitioner.reaching import Watched
from partitioner.structures import are_same_objects

_OFFSET = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)
"""Of a dict's number, behind how many items it has."""


def _number_at(table: dict[Any, Any]) -> int:
    """Where the number of a dict lies."""
    return id(table) + _OFFSET


def _dict_at(owner: Any) -> int | None:
    """Where CPython keeps the address of the dict of an object's attributes; None where that is not there."""
    cls = type(owner)
    offset = _MANAGED_OFFSET if cls.__flags__ & _MANAGED_DICT else max(0, cls.__dictoffset__)
    if not offset:
        return None
    found = ctypes.c_uint64.from_address(id(owner) + offset)
    return id(owner) + offset if found.value == id(vars(owner)) else None


_MANAGED_DICT, _MANAGED_OFFSET = 1 << 4, -3 * ctypes.sizeof(ctypes.c_void_p)
"""Flag of classes whose objects have that address three words ahead of them."""


class _Some:
    """An object whose attributes are changed in all ways that there are."""


def _dicts_are_numbered() -> bool:
    """Whether the number is where it is looked for, and another one after any change."""
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 13):
        return False  # 3.13 leaves the number as it was where an attribute is set
    changed: Any = _Some()
    changed.a = 1
    table = vars(changed)
    number = ctypes.c_uint64.from_address(_number_at(table))
    seen = [number.value]
    for _ in range(20):  # often enough for the interpreter to take its shorter ways
        changed.a = object()
        seen.append(number.value)
        for change in (
            lambda: table.__setitem__("a", object()),
            lambda: table.update(c=object()),
            lambda: delattr(changed, "c"),
            lambda: table.setdefault("d", object()),
            lambda: table.pop("d"),
        ):
            change()
            seen.append(number.value)
    return len(set(seen)) == len(seen)


_NUMBERED = _dicts_are_numbered()


class _Words:
    """Words of memory that lie anywhere, read without an object for each: looking at those would cost as much again."""

    def __init__(self, addresses: Sequence[int]) -> None:
        first, last = min(addresses, default=0), max(addresses, default=0)
        self._places = np.array([(address - first) // _WORD for address in addresses], dtype=np.intp)
        span = (ctypes.c_uint64 * ((last - first) // _WORD + 1)).from_address(first) if addresses else bytes(_WORD)
        self._memory = np.frombuffer(memoryview(span), dtype=np.uint64)
        """All from the first to the last of them; only where they lie is it ever looked at."""

    def now(self) -> bytes:
        return self._memory[self._places].tobytes()


_WORD = ctypes.sizeof(ctypes.c_uint64)


class Glance:
    """Several places as they are now."""

    def __init__(
        self, places: Sequence[Watched], passing: Sequence[dict[str, Any]] = (), *, numbered: bool = _NUMBERED
    ) -> None:
        """`passing`: dicts that `passing_over` is about. `numbered`: whether to go by the numbers of dicts."""
        self._others = [one for one in places if one.arrays or one.place.views() is None]
        seen = [one for one in places if not one.arrays and one.place.views() is not None]
        owners = [one.place.owner for one in seen if hasattr(one.place.owner, "__dict__")]
        found = [_dict_at(owner) if numbered else None for owner in owners]
        self._owners = [owner for owner, at in zip(owners, found, strict=True) if at is None]
        self._tables = tuple(map(vars, self._owners))
        addresses = [at for at in found if at is not None]
        dicts = [one.place.table() if numbered else None for one in seen]
        self._dicts = [one for one, table in zip(seen, dicts, strict=True) if table is not None]
        self._kept = [owners, list(map(vars, owners)), dicts]
        """So that nothing else comes to lie where it is read."""
        self._num_addresses = len(addresses)
        self._words = _Words([*addresses, *(_number_at(table) for table in dicts if table is not None)])
        """Of each owner the address of its dict, then the number of each dict."""
        self._known = self._words.now()
        at = {id(table): k for k, table in enumerate((table for table in dicts if table is not None), len(addresses))}
        self._passing = np.array([at[id(table)] for table in passing if id(table) in at], dtype=np.intp)
        rest = [one for one, table in zip(seen, dicts, strict=True) if table is None]
        self._views = [view for one in rest for view in one.place.views() or ()]
        """Of containers, with the objects that they go through."""
        self._lengths = list(map(len, self._views))
        self._filled = [view for view in self._views if len(view)]
        self._parts = tuple(itertools.chain.from_iterable(self._filled))
        self._tensors = [tensor for one in seen for _, tensor in one.tensors]
        self._versions = [number for one in seen for number in one.versions]

    def is_still(self) -> bool:
        """Whether all hold the very same objects, and tensors and arrays in them the same values."""
        if self._owners and not are_same_objects(tuple(map(vars, self._owners)), self._tables):
            return False
        if self._views and list(map(len, self._views)) != self._lengths:
            return False
        if self._parts and not are_same_objects(tuple(itertools.chain.from_iterable(self._filled)), self._parts):
            return False
        now = self._words.now()
        if now != self._known:
            is_another = np.frombuffer(now, np.uint64) != np.frombuffer(self._known, np.uint64)
            if is_another[: self._num_addresses].any():
                return False
            if not _are_untouched(itertools.compress(self._dicts, is_another[self._num_addresses :])):
                return False
            self._known = now
        if not self._tensors and not self._others:
            return True
        with torch._C.DisableTorchFunction():
            versions = list(map(version, self._tensors))
        return versions == self._versions and _are_untouched(self._others)

    @contextmanager
    def passing_over(self) -> Iterator[None]:
        """What the block does to those of the dicts that have not changed until then is no change.

        The block must not run code of the model.
        """
        before = np.frombuffer(self._words.now(), np.uint64)
        yield
        known, now = np.frombuffer(self._known, np.uint64).copy(), np.frombuffer(self._words.now(), np.uint64)
        unchanged = self._passing[known[self._passing] == before[self._passing]]
        known[unchanged] = now[unchanged]
        self._known = known.tobytes()


def _are_untouched(places: Iterable[Watched]) -> bool:
    with torch._C.DisableTorchFunction():
        return not any(one.is_touched() for one in places)
