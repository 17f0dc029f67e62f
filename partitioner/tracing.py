"""Watch a model's own forward: every call of a tracked module and every torch function between those calls.

Both halves of the work use it: `capture` writes down what happens, `slicing` decides what happens.
Nothing of the model is changed: `nn.Module.__call__` and `autograd.Function.apply` are replaced while a watcher is
active on this thread, and only there; everybody else gets the original.

A moment in a forward has a name that does not depend on how many modules are tracked below it:

    >h.3        inside h.3, before its first tracked child
    h.3         after h.3 returned
    h.3#1       after its second call returned

Tensors are named after the moment and the order in which they were made then: "h.3:0" is the first output of h.3,
"h.3/2" the output of the third torch function after it, "h.3/2:1" that function's second output.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

READS = frozenset(
    "size dim numel stride is_floating_point is_complex is_contiguous element_size storage_offset __len__ ndimension "
    "nelement get_device __hash__ __repr__ __format__ is_signed is_inference is_same_size dim_order has_names is_conj "
    "is_neg is_coalesced sym_size is_shared is_pinned data_ptr untyped_storage storage type_as_string "
    "register_hook register_post_accumulate_grad_hook retain_grad __dir__ __reduce_ex__ __setstate__ "
    "is_tensor is_storage result_type can_cast promote_types get_default_dtype is_grad_enabled __class__ "
    "is_autocast_enabled".split()
)
"""Functions that read what a tensor is like, not what it holds."""

TENSOR_PROPERTIES = frozenset("T mT H mH real imag data grad".split())
"""Properties whose value is a tensor; every other property only reads what the tensor is like."""

HOST_READS = frozenset(
    "item tolist numpy __bool__ __int__ __float__ __index__ __complex__ is_nonzero equal allclose __contains__ "
    "__array__".split()
)
"""Functions that bring a tensor's values to Python, where the model may branch on them."""

RANDOM = frozenset(
    "rand randn rand_like randn_like bernoulli bernoulli_ normal normal_ uniform_ multinomial randint randint_like "
    "randperm dropout dropout_ dropout1d dropout2d dropout3d feature_dropout feature_dropout_ alpha_dropout "
    "alpha_dropout_ feature_alpha_dropout exponential_ gumbel_softmax rrelu rrelu_ native_dropout random_ log_normal_ "
    "cauchy_ geometric_ poisson binomial fractional_max_pool2d fractional_max_pool3d trunc_normal_ "
    "scaled_dot_product_attention".split()
)
"""Functions that may draw random numbers; on other ranks their results are received, never drawn again."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout)


def function_name(func: Callable[..., Any]) -> str:
    """The name to log a torch function under; properties read as "get NAME" and "set NAME"."""
    name = getattr(func, "__name__", None) or str(func)
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(getattr(func, "__self__", None), "__name__", "?")
        return f"{name.strip('_')} {owner}"
    return name


def is_read(name: str) -> bool:
    """Whether a function only reads or sets what a tensor is like."""
    if name.startswith("get "):
        return name[4:] not in TENSOR_PROPERTIES
    return name in READS or (name.startswith("set ") and name != "set data")


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any], opaque: Callable[[Any], Any] | None = None) -> Any:
    """`value` with every tensor replaced, through any nesting of tuple, list, dict, dataclass and named tuple.

    Containers are copied, never changed; what is none of these goes through `opaque`, or stays as it is.
    """

    def walk(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return change(item)
        if isinstance(item, PLAIN) or isinstance(item, (nn.Module, type)):
            return item
        if isinstance(item, tuple):
            parts = [walk(part) for part in item]
            if isinstance(item, nn.utils.rnn.PackedSequence):
                return tuple.__new__(type(item), parts)
            if hasattr(item, "_fields"):
                return type(item)(*parts)
            return tuple(parts) if type(item) is tuple else type(item)(parts)
        if type(item) is list:
            return [walk(part) for part in item]
        if isinstance(item, dict):
            made = copy.copy(item)
            for key, part in item.items():
                new = walk(part)
                if new is not part:
                    made[key] = new
            return made
        if dataclasses.is_dataclass(item):
            made = copy.copy(item)
            for key, part in vars(item).items():
                new = walk(part)
                if new is not part:
                    object.__setattr__(made, key, new)
            return made
        return opaque(item) if opaque is not None else item

    return walk(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in `value`, in the order `map_tensors` meets them."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def opaques_in(value: Any) -> list[Any]:
    """Every object in `value` that is neither a tensor, a container nor a plain value: caches, configurations."""
    found: list[Any] = []

    def note(item: Any) -> Any:
        found.append(item)
        return item

    map_tensors(value, lambda tensor: tensor, note)
    return found


class Watcher(ABC):
    """Told of every tracked call and every torch function outside of untracked depths."""

    def __init__(self, tracked: Mapping[int, str]) -> None:
        self.tracked = tracked
        self.moment = ""
        self.num_functions = 0
        self.num_calls: Counter[str] = Counter()

    def enter(self, path: str) -> str:
        """Count a call of the module at `path`; its id."""
        k = self.num_calls[path]
        self.num_calls[path] += 1
        return f"{path}#{k}" if k else path

    def at(self, moment: str) -> None:
        self.moment, self.num_functions = moment, 0

    def next_name(self) -> str:
        """The name of the torch function that runs now."""
        name = f"{self.moment}/{self.num_functions}"
        self.num_functions += 1
        return name

    @abstractmethod
    def on_call(self, path: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A tracked module is called; `run(*args, **kwargs)` is the original call, hooks included."""

    @abstractmethod
    def on_function(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function is called that is not just a read; `func(*args, **kwargs)` runs it."""

    @abstractmethod
    def on_checkpoint(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A reentrant checkpoint of torch: `args` are the function, the RNG flag and the function's own arguments."""

    @abstractmethod
    def on_read(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function that only reads or sets what a tensor is like."""


class _Current(threading.local):
    watcher: Watcher | None = None


_current = _Current()
_module_call = nn.Module.__call__
_function_apply = torch.autograd.Function.__dict__["apply"].__func__


class _Functions(TorchFunctionMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function_name(func)
        if name == "__iter__":
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args, kwargs))
        handle = self.watcher.on_read if is_read(name) else self.watcher.on_function
        return handle(name, func, args, kwargs or {})


def _watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    watcher = _current.watcher
    path = None if watcher is None else watcher.tracked.get(id(module))
    if watcher is None or path is None:
        return _module_call(module, *args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        return _module_call(module, *args, **kwargs)

    return watcher.on_call(path, run, args, kwargs)


def _watched_apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    watcher = _current.watcher

    def run(*args: Any, **kwargs: Any) -> Any:
        return _function_apply(function, *args, **kwargs)

    if watcher is None:
        return run(*args, **kwargs)
    if function.__name__ == "CheckpointFunction":
        return watcher.on_checkpoint(run, args, kwargs)
    # A custom Function bypasses the function mode, so it is announced here; what it runs inside is its own affair.
    with _pop_mode_temporarily():
        return watcher.on_function(f"apply {function.__qualname__}", run, args, kwargs)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of what happens on this thread, until the block ends in whatever way."""
    if _current.watcher is not None:
        raise RuntimeError("a forward is watched already on this thread")
    nn.Module.__call__ = _watched_call  # type: ignore[method-assign]
    torch.autograd.Function.apply = classmethod(_watched_apply)  # type: ignore[method-assign, assignment]
    _current.watcher = watcher
    try:
        with _Functions(watcher):
            yield
    finally:
        _current.watcher = None
        nn.Module.__call__ = _module_call  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(_function_apply)  # type: ignore[method-assign, assignment]


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside: neither calls nor functions are told, as in the depths of a layer."""
    watcher = _current.watcher
    _current.watcher = None
    try:
        with _pop_mode_temporarily():
            yield
    finally:
        _current.watcher = watcher


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel or torch.compile wrappers."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model
