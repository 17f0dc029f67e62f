"""What stands on a rank for the parameters and buffers of other stages: shape and dtype over one single value, NaN.

All ranks run the same lines of the user's: `stage.module.load_state_dict(weights)`, `stage.module.eval()` where layers
merge their weights then, an average of weights. A write into a placeholder does nothing here: the rank that has
the values makes it. What would carry a placeholder's nothing into something real is refused by name:

    placeholder.copy_(x)    nothing                     own.copy_(placeholder)    ArgumentError
    placeholder.data -= x   nothing                     torch.save(placeholder)   ArgumentError
    placeholder.normal_()   the numbers are drawn, so that those of the next parameter are as on one device
    placeholder.shape       as the parameter's          copy.deepcopy(...)        a placeholder
    print(placeholder)      says what it is             placeholder.tolist()      ArgumentError
    placeholder.norm()      again one that holds nothing: if norm > 5, own.mul_(norm), float(norm) are ArgumentErrors
    own.data = placeholder  torch asks `own` alone, and does it: refused by the next call of the stage

While the model's own code runs, its loss or its backward, whatever kernel is about to read one is refused by name, and
so is a write in the forward: the rank that has the values does not run that layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.errors import ArgumentError, UnsupportedModelError
from partitioner.structures import storage_of, tensors_in
from partitioner.tracing import HOST_READS, RANDOM, forward_here, function_name, is_computing, is_read

_WRITING = frozenset(f"__{name}__" for name in "setitem iadd isub imul itruediv idiv ifloordiv imod ipow".split())
_NOT_WRITING = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_"})
_SAVED = frozenset({"__reduce_ex__", "__reduce__", "__dlpack__"})

_empty: dict[int, tuple[StorageWeakRef, str]] = {}
"""Storages in which placeholders, and what was made of them, hold nothing; whose nothing it is."""


class _Nothing:
    """The behaviour; `label` names the tensor and its stage, `stands_for` is the class that it has with values."""

    label: str
    stands_for: type[torch.Tensor]
    holds_nothing = True

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        if name in _SAVED or (name == "data_ptr" and _is_a_copy(args[0])):
            raise ArgumentError(
                f"{_label(args)} would be saved without its values, which are on the ranks of that stage: save "
                "stage.full_state_dict() on rank 0 (all ranks call it), or call stage.save_checkpoint(folder)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if is_computing():
                return _computed(name, func, args, kwargs)
            if name.startswith("_foreach_"):
                return _each_real(func, args, kwargs) if name.endswith("_") else _each(func, args, kwargs)
            if name == "set data":
                return _set_data(*args)
            if name in _WRITING or (name[-1] == "_" and name[-2] != "_" and name not in _NOT_WRITING):
                target = args[0] if args else next(iter(kwargs.values()))
            else:
                target = kwargs.get("out")
            if isinstance(target, _Nothing):
                return _drawn(target, func, args, kwargs) if name in RANDOM else target
            if isinstance(target, torch.Tensor):
                _refuse(name, (args, kwargs))
            if name == "__repr__" or (name == "__format__" and not args[1]):
                return f"<{tuple(args[0].shape)} {args[0].dtype}: {args[0].label}, which has no values here>"
            if name in HOST_READS:
                _refuse_to_read(name, (args, kwargs))
            result = func(*args, **kwargs)
            if name.startswith(("get grad", "get _", "new_")) or name.endswith("_like"):
                return result
            return _named(result, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _copied(self, memo)


class Placeholder(_Nothing, nn.Parameter):
    """Of a parameter."""

    stands_for = nn.Parameter


class BufferPlaceholder(_Nothing, torch.Tensor):
    """Of a buffer; a view of either, in the model's own code."""

    stands_for = torch.Tensor


class Made(BufferPlaceholder):
    """What a user's line made of them. Torch's own reads are refused too: torch.tensor([norm]), own[:argmax]."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C._DisableTorchDispatch():
            if func is torch.ops.aten._local_scalar_dense.default or func.namespace == "c10d":
                _refuse_to_read(func.__name__.partition(".")[0], (args, kwargs))
            result = func(*args, **(kwargs or {}))
            return result if func._schema.is_mutable else _named(result, args, kwargs)


@functools.cache
def _kind(cls: Any) -> Any:
    """The class of a placeholder for a tensor of this one; itself where that has a behaviour of its own."""
    known = {nn.Parameter: Placeholder, torch.Tensor: BufferPlaceholder}.get(cls)
    if known is not None or issubclass(cls, _Nothing):
        return known or cls
    base = nn.Parameter if issubclass(cls, nn.Parameter) else torch.Tensor
    own = ("__torch_function__", "__torch_dispatch__")
    if any(name in vars(one) for one in cls.__mro__[: cls.__mro__.index(base)] for name in own):
        return cls
    return type(cls.__name__, (_Nothing, cls), {"stands_for": cls, "__module__": cls.__module__})


def make_placeholder(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor's shape over one single value: NaN, or the least there is."""
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        value: float = float("nan")
    else:
        value = 0 if dtype == torch.bool else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=device).expand(tensor.shape)


def stands_in(tensor: torch.Tensor, name: str, stage: int) -> None:
    """Let a tensor with a placeholder's data behave as one, unless its class has a behaviour of its own."""
    tensor.__class__ = _kind(type(tensor))
    if isinstance(tensor, _Nothing):
        tensor.label = f"{name} of stage {stage}"
        _note_empty(tensor, tensor.label)


def stands_in_no_more(tensor: torch.Tensor) -> None:
    """It gets values."""
    if issubclass(type(tensor), _Nothing):
        tensor.__class__ = type(tensor).stands_for  # type: ignore[attr-defined]
        vars(tensor).pop("label", None)


def refuse_emptied(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Stop where `own.data = placeholder`, or what was made of one, left a tensor of this rank without its values."""
    gone = [storage for storage, (kept, _) in _empty.items() if kept.expired()]  # type: ignore[no-untyped-call]
    for storage in gone:
        del _empty[storage]
    if not _empty:
        return
    for name, tensor in tensors:
        found = None if isinstance(tensor, _Nothing) else _empty.get(storage_of(tensor))
        if found is not None:
            raise ArgumentError(
                f"{name} of this rank was given, by .data = ..., what {found[1]} holds, which has no values here: do "
                "it within the stage, for the names in stage.named_parameters(), with all layers that use either "
                "pinned to one stage (pin={layer: stage}), or use replicas only (mesh={'dp': n})"
            )


def _note_empty(tensor: torch.Tensor, label: str) -> None:
    if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel():
        storage = tensor.untyped_storage()
        _empty.setdefault(storage._cdata, (StorageWeakRef(storage), label))  # type: ignore[no-untyped-call]


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether it holds nothing, here."""
    if isinstance(tensor, _Nothing):
        return True
    if tensor.is_meta or not tensor.numel() or (tensor.numel() > 1 and set(tensor.stride()) != {0}):
        return False
    return bool(tensor.detach()[(0,) * tensor.dim()].isnan())


def _label(values: Any) -> str:
    return next(one.label for one in tensors_in(values) if isinstance(one, _Nothing))


def _refuse(name: str, values: Any) -> None:
    raise ArgumentError(
        f"{name} would write into a tensor of this rank what {_label(values)} holds, which has no values here: do it "
        "within the stage, for the names in stage.named_parameters(), or on the model before materialize"
    )


def _computed(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function that the model's own code calls: it may ask what a placeholder is like, or take a view of it."""
    if is_read(name) or name == "get grad":
        return func(*args, **kwargs)
    labels = {storage_of(one): one.label for one in tensors_in((args, kwargs)) if isinstance(one, _Nothing)}
    if name in HOST_READS or name == "set data":
        _refuse_here(f"{name}, which {'writes into' if name == 'set data' else 'reads'}", _label((args, kwargs)))
    with _Kernels(labels):
        result = func(*args, **kwargs)
    is_view = isinstance(result, torch.Tensor) and storage_of(result) in labels
    return _named(result, args, kwargs, BufferPlaceholder) if is_view else result


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses those that read or write what lies in one of these storages."""

    def __init__(self, labels: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._labels = labels

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        schema, kwargs = func._schema, kwargs or {}
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        if not is_view and not schema.name.endswith("_like") and not schema.name.startswith("aten::new_"):
            label = next(filter(None, (self._labels.get(storage_of(one)) for one in tensors_in((args, kwargs)))), None)
            if label is not None:
                is_written = schema.is_mutable and storage_of(args[0]) in self._labels
                _refuse_here(f"{func}, which {'writes into' if is_written else 'reads'}", label)
        return func(*args, **kwargs)


def _refuse_here(what: str, label: str) -> None:
    watcher = forward_here()
    who = "the loss or the backward" if watcher is None else f"the forward, after {watcher.moment or 'its start'},"
    error = UnsupportedModelError(
        f"{who} runs {what} {label}: that has no values on this rank, as the captured forward did not use it there. "
        "Pin the layers that use it to one stage (pin={layer: stage}), capture with inputs and flags that take this "
        "way, or use replicas only (mesh={'dp': n})"
    )
    raise error if watcher is None else watcher.failed(error)


def _refuse_to_read(name: str, values: Any) -> None:
    raise ArgumentError(
        f"{name} would read, or let this rank decide by, {_label(values)}, which has no values here: do it within the "
        "stage, for the names in stage.named_parameters(), or with stage.full_state_dict() on rank 0 (all ranks call "
        "it); stage.clip_grad_norm_ gives the norm of all gradients"
    )


def _is_a_copy(tensor: torch.Tensor) -> bool:
    """Whether whoever asks for its memory would find one NaN after another, as a file's writer does."""
    return tensor.numel() > 1 and tensor.is_contiguous()


def _copied(tensor: Any, memo: dict[int, Any]) -> Any:
    if id(tensor) not in memo:
        data = make_placeholder(tensor, tensor.device)
        made = nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
        made.__class__ = type(tensor)
        vars(made).update(vars(tensor))
        _note_empty(made, tensor.label)
        memo[id(tensor)] = made
    return memo[id(tensor)]


def _set_data(target: torch.Tensor, value: torch.Tensor) -> None:
    """A placeholder becomes one of the value's kind: another dtype or device, as by module.half()."""
    if isinstance(target, _Nothing):
        torch.Tensor.data.__set__(target, make_placeholder(value, value.device))  # type: ignore[attr-defined]
    else:
        _refuse("setting .data", value)


def _drawn(target: Any, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a random function would fill it with."""
    found = torch.empty(target.shape, dtype=target.dtype, device=target.device)

    def real(value: Any) -> Any:
        return found if value is target else value

    return func(*map(real, args), **{name: real(value) for name, value in kwargs.items()})


def _each_real(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function in place over lists: done for those that are here."""
    kept = [k for k, one in enumerate(args[0]) if not isinstance(one, _Nothing)]
    count = len(args[0])

    def some(value: Any) -> Any:
        return [value[k] for k in kept] if isinstance(value, (list, tuple)) and len(value) == count else value

    args, kwargs = [some(one) for one in args], {name: some(one) for name, one in kwargs.items()}
    if any(isinstance(one, _Nothing) for one in tensors_in((args, kwargs))):
        _refuse(function_name(func), (args, kwargs))
    return func(*args, **kwargs) if kept else None


def _each(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function over lists: of those that are here, what it is; of the others, nothing."""
    results = func(*args, **kwargs)
    lists = [one for one in (*args, *kwargs.values()) if isinstance(one, (list, tuple)) and len(one) == len(results)]
    others = [one for one in (*args, *kwargs.values()) if not any(one is other for other in lists)]
    given = [(others, *of_each) for of_each in zip(*lists, strict=True)]
    is_empty = [any(isinstance(one, _Nothing) for one in tensors_in(some)) for some in given]
    return [
        _named(one, some, {}) if nothing else one for one, some, nothing in zip(results, given, is_empty, strict=True)
    ]


def _named(result: Any, args: Any, kwargs: Any, kind: type[BufferPlaceholder] = Made) -> Any:
    """What is made of a placeholder is one: a view, a norm, a comparison."""
    if isinstance(result, (list, tuple)):
        return type(result)([_named(part, args, kwargs, kind) for part in result])
    if not isinstance(result, torch.Tensor) or isinstance(result, _Nothing):
        return result
    if result.is_meta or result.layout != torch.strided:
        return result
    found = result.as_subclass(kind)
    found.label = _label((args, kwargs))
    real = (storage_of(one) for one in tensors_in((args, kwargs)) if not isinstance(one, _Nothing))
    if storage_of(result) not in real:  # own.view_as(placeholder) is a view of what is here
        _note_empty(result, found.label)
    return found
