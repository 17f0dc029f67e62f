"""What the stages so far did, as plain data that travels ahead of them: one entry for each call and torch function.

An entry tells a later stage what came out without its values: which tensors were made, with which shapes; which were
the very arguments; which arguments were changed in place; which containers were filled. From it the later stage builds
the same Python values around stand-ins.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from partitioner.absent import Absent
from partitioner.errors import UnsupportedModelError
from partitioner.structures import (
    PLAIN,
    Opened,
    is_container,
    is_python_class,
    is_same,
    opened,
    opened_object,
    opened_record,
)


class Entry(NamedTuple):
    """One call, torch function or host read, as it was logged. All but `moment` and `name` may be empty."""

    moment: str
    name: str
    result: Any = None
    """Encoded; for a host read the value itself."""
    writes: tuple[int, ...] = ()
    """Tensors of the arguments that were changed in place."""
    refills: tuple[tuple[int, Any], ...] = ()
    """Containers of the arguments that were filled anew, with what they then held."""
    num_given: int = 0
    """Tensors of the arguments."""
    random_states: tuple[Any, ...] | None = None
    """States of `random` and of NumPy afterwards, where it drew from them."""
    generator: bytes | None = None
    """State of the torch generator that it was given, afterwards."""
    counts: tuple[tuple[str, int], ...] = ()
    """Calls inside, of modules that are also called outside."""
    error: bytes | None = None
    """The exception that left it."""
    state: tuple[Any, ...] = ()
    """What it changed of Python state that later stages reach; see `shared`."""
    contents: tuple[Any, ...] = ()
    """What a function wrote into tensors that the model keeps, likewise."""

    def single_tensor(self) -> Made | None:
        """What the result is like where one new tensor is all that came of it."""
        if self.writes or self.refills or self.result is None or self.result[0] != _MADE:
            return None
        return Made(*self.result[1:])


class Made(NamedTuple):
    """What a tensor is like, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: str
    device: str
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Made:
        return cls(*_look(tensor))


def _look(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...] | None, str, str, bool]:
    """What `Made` says of a tensor."""
    if tensor.is_nested:
        shape, stride = sizes(tensor), None
    else:
        shape, stride = tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else None
    device = "cpu" if tensor.is_cpu else "cuda" if tensor.is_cuda else tensor.device.type  # the last takes longest
    return shape, stride, dtype_name(tensor.dtype), device, tensor.requires_grad


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in torch: "float32"."""
    return str(dtype).removeprefix("torch.")


_STATELESS = (*PLAIN, nn.Module)
_NOTHING, _ONE_TENSOR, _SEEN_THROUGH, _FILLED, _PYTHON, _OPAQUE = range(6)


@functools.lru_cache(maxsize=4096)
def _kind(cls: Any) -> int:
    """What an argument of this class is to `Arguments`."""
    if issubclass(cls, torch.Tensor):
        return _ONE_TENSOR
    if issubclass(cls, _STATELESS):
        return _NOTHING
    if issubclass(cls, (tuple, slice)):
        return _SEEN_THROUGH
    if is_container(cls):
        return _FILLED
    return _PYTHON if is_python_class(cls) else _OPAQUE


class Arguments:
    """The tensors, containers and opaque objects that a call was given, as they were before it.

    Of an object of a Python class, what its attributes hold directly belongs to it, and the items of containers there.
    Made for every call of a forward, so that each step is the cheapest one that tells the same.
    """

    __slots__ = ("_contents", "_versions", "items", "objects", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        self.items: list[Any] = []
        """What containers inside of objects held, in their order."""
        self._contents: list[Opened | None] = []
        for item in args:
            self._note(item)
        if kwargs:
            for item in kwargs.values():
                self._note(item)
        try:
            self._versions = [tensor._version for tensor in self.tensors]
        except RuntimeError:
            self._versions = [version(tensor) for tensor in self.tensors]

    def _note(self, item: Any) -> None:
        kind: int = _kind(type(item))  # type: ignore[arg-type]  # mypy does not take classes for hashable
        if kind == _NOTHING:
            return
        if kind == _ONE_TENSOR:
            self.tensors.append(item)
            return
        if kind == _PYTHON and hasattr(item, "__dict__"):
            self._note_object(item)
            return
        inside = opened(item)
        if kind != _SEEN_THROUGH:
            self.objects.append(item)
            self._contents.append(inside)
        if inside is not None:
            for part in inside.parts:
                self._note(part)

    def _note_object(self, item: Any) -> None:
        inside = opened_object(item)
        self.objects.append(item)
        self._contents.append(inside)
        for part in inside.parts:
            if isinstance(part, torch.Tensor):
                self.tensors.append(part)
            elif isinstance(part, (list, dict, deque)):
                content = opened(part)
                assert content is not None
                self.objects.append(part)
                self._contents.append(content)
                self.items += content.parts

    def written(self) -> tuple[int, ...]:
        """Places of the tensors that have been changed in place since."""
        try:
            now = [tensor._version for tensor in self.tensors]
        except RuntimeError:
            now = [version(tensor) for tensor in self.tensors]
        if now == self._versions:
            return ()
        return tuple(
            k
            for k, tensor in enumerate(self.tensors)
            if now[k] != self._versions[k] and not isinstance(tensor, nn.Parameter)
        )

    def refilled(self) -> list[tuple[int, Opened]]:
        """Places of containers and objects that hold something else since, and what; of objects, what is new."""
        found = []
        for k, before in enumerate(self._contents):
            if before is None or before.is_still(self.objects[k]):
                continue
            now = opened(self.objects[k]) or opened_object(self.objects[k])
            if now.kind == "object":
                now = _news(now, before)
                if now.keys:
                    found.append((k, now))
            elif now.keys != before.keys or not _are_same(now.parts, before.parts):
                found.append((k, now))
        return found


def num_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many tensors `Arguments` would find."""
    return sum(map(_num_tensors, args)) + (sum(map(_num_tensors, kwargs.values())) if kwargs else 0)


def _num_tensors(item: Any) -> int:
    kind: int = _kind(type(item))  # type: ignore[arg-type]  # mypy does not take classes for hashable
    if kind == _ONE_TENSOR:
        return 1
    if kind == _PYTHON and hasattr(item, "__dict__"):
        return sum(isinstance(part, torch.Tensor) for part in opened_object(item).parts)
    inside = None if kind in (_NOTHING, _OPAQUE) else opened(item)
    return 0 if inside is None else sum(map(_num_tensors, inside.parts))


def _are_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_same, now, before))


def _news(now: Opened, before: Opened) -> Opened:
    """Of an object taken apart, the attributes that are not what they were."""
    old = dict(zip(before.keys, before.parts, strict=True))
    new = {
        name: part
        for name, part in zip(now.keys, now.parts, strict=True)
        if name not in old or not is_same(part, old[name])
    }
    return now._replace(keys=tuple(new), parts=list(new.values()))


# The encoding: nested tuples of plain values, the first item says what.
_PLAIN, _MADE, _AGAIN, _TENSOR, _OWN, _OBJECT, _ITEM, _CONTAINER, _PICKLED, _WITHHELD = range(10)


class Encoder:
    """Turns results into plain data. `tensors` are the different tensors met so far; their order names them.

    `own`: the model's parameters and buffers by id; every rank has them, so only their names are told.
    """

    def __init__(self, given: Arguments, own: Mapping[int, str]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._own = own
        self._places: dict[int, int] = {}
        for k, tensor in enumerate(given.tensors):
            self._places.setdefault(id(tensor), k)
        self._objects = {id(item): k for k, item in enumerate(given.objects)} if given.objects else {}
        self._items = {id(item): k for k, item in enumerate(given.items)} if given.items else {}
        self._met: dict[int, int] = {}

    def __call__(self, item: Any) -> Any:
        cls = type(item)
        if cls is not torch.Tensor and isinstance(item, PLAIN):
            return (_PLAIN, item)
        if id(item) in self._own:
            return (_OWN, self._own[id(item)])
        if id(item) in self._items:
            return (_ITEM, self._items[id(item)])
        if isinstance(item, torch.Tensor):
            return self._tensor(item)
        if id(item) in self._objects:
            return (_OBJECT, self._objects[id(item)])
        inside = opened(item) or opened_record(item)
        if inside is not None and _is_findable(inside.cls):
            return self.container(inside)
        pickled_item = None if inside is not None else pickled(item)
        return (_WITHHELD, type(item).__name__) if pickled_item is None else (_PICKLED, pickled_item)

    def container(self, inside: Opened) -> Any:
        keys: Any = inside.keys
        if any(not isinstance(key, PLAIN) for key in keys):
            keys = pickled(keys)
            if keys is None:
                return (_WITHHELD, inside.cls.__name__)
        cls = inside.cls
        name = None if cls in (tuple, list, dict) else (cls.__module__, cls.__qualname__)
        return (_CONTAINER, inside.kind, name, keys, tuple(map(self, inside.parts)))

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if id(tensor) in self._met:
            return (_AGAIN, self._met[id(tensor)])
        self._met[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        if id(tensor) in self._places:
            return (_TENSOR, self._places[id(tensor)])
        return (_MADE, *_look(tensor))


def encoded(result: Any, given: Arguments, own: Mapping[int, str]) -> tuple[Any, list[torch.Tensor]]:
    """What an `Encoder` makes of a result, and the different tensors in it; quick where it is one new tensor."""
    if type(result) is torch.Tensor and id(result) not in own:
        known = id(result)
        if known not in map(id, given.tensors) and known not in map(id, given.items):
            return (_MADE, *_look(result)), [result]
    encoder = Encoder(given, own)
    return encoder(result), encoder.tensors


def num_passed(tensors: Sequence[torch.Tensor], given: Arguments) -> int:
    """How many of these tensors are arguments."""
    known = set(map(id, given.tensors))
    return sum(id(tensor) in known for tensor in tensors)


def withheld_in(code: Any) -> str:
    """What kind of object an encoded value holds that cannot be sent; empty where there is none."""
    if code[0] == _WITHHELD:
        return str(code[1])
    return next(filter(None, map(withheld_in, code[4])), "") if code[0] == _CONTAINER else ""


def is_unsure_in(code: Any) -> bool:
    """Whether an encoded value may be of a kind that cannot be built elsewhere: opaque, or of a class in a function."""
    if code[0] != _CONTAINER:
        return bool(code[0] == _WITHHELD)
    return (code[2] is not None and "<locals>" in code[2][1]) or any(map(is_unsure_in, code[4]))


def left_name(label: str, k: int) -> str:
    """What the k-th tensor is called that layers have left in Python state, at the place of that name."""
    return f"={label}:{k}".replace("@", "(at)")


class Decoder:
    """Builds what an `Encoder` met, around the arguments that are here; `make` makes the k-th different tensor."""

    def __init__(
        self, given: Arguments, own: Mapping[str, torch.Tensor], make: Callable[[int, Made], torch.Tensor]
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self._given, self._own, self._make = given, own, make

    def __call__(self, code: Any) -> Any:
        kind = code[0]
        if kind == _PLAIN:
            return code[1]
        if kind == _CONTAINER:
            return self.container(code).built(list(map(self, code[4])))
        if kind == _MADE:
            self.tensors.append(self._make(len(self.tensors), Made(*code[1:])))
            return self.tensors[-1]
        if kind == _AGAIN:
            return self.tensors[code[1]]
        if kind == _TENSOR:
            self.tensors.append(self._given.tensors[code[1]])
            return self.tensors[-1]
        if kind == _OWN:
            return self._own[code[1]]
        if kind == _OBJECT:
            return self._given.objects[code[1]]
        if kind == _ITEM:
            return self._given.items[code[1]]
        return pickle.loads(code[1]) if kind == _PICKLED else Absent(code[1])

    def container(self, code: Any) -> Opened:
        _, kind, name, keys, _ = code
        if isinstance(keys, bytes):
            keys = pickle.loads(keys)
        cls = {"tuple": tuple, "list": list, "dict": dict}[kind] if name is None else _class_named(*name)
        if cls is None:
            raise UnsupportedModelError(f"this rank knows no class, or several, of the name {'.'.join(name)}")
        return Opened(kind, cls, keys, [])

    def refill(self, index: int, code: Any) -> None:
        """Let a container of the arguments hold what it held after the logged call."""
        if code[0] == _WITHHELD:
            raise UnsupportedModelError(f"what a layer put into a {code[1]} cannot be described to later stages")
        self.container(code).refill(self._given.objects[index], list(map(self, code[4])))


def sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's shape; of nested ones what there is of it, and 1 for sizes that differ from part to part."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    if tensor.layout == torch.strided:
        return (tensor.size(0),)
    return tuple(size if isinstance(size, int) else 1 for size in tensor.shape)


def is_sendable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's shape, dtype and bytes say all about it."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; inference tensors and some others do not say."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def _is_findable(cls: type) -> bool:
    """Whether another rank, running the same code, finds this class by its name."""
    if _class_named(cls.__module__, cls.__qualname__) is not cls:
        _class_named.cache_clear()  # it may be newer than what was found before
    return _class_named(cls.__module__, cls.__qualname__) is cls


@functools.lru_cache(maxsize=1024)
def _class_named(module: str, qualname: str) -> type | None:
    """The class of that name; one made inside a function or a notebook is looked for among all that exist."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type):
        return found
    known: set[type] = {object}
    left: list[type] = [object]
    while left:
        children: set[type] = set(type.__subclasses__(left.pop())) - known
        known |= children
        left += children
    matching = [cls for cls in known if (cls.__module__, cls.__qualname__) == (module, qualname)]
    return matching[0] if len(matching) == 1 else None


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, nn.Module)):
            raise pickle.PicklingError("tensors and modules do not travel in the header")
        return NotImplemented


def pickled(value: Any) -> bytes | None:
    """`value` as bytes; None where it cannot be, or holds a tensor or a module."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(value)
    except Exception:  # whatever a class raises when it is asked to describe itself
        return None
    return buffer.getvalue()
