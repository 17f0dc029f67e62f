"""Watch a model's own forward: every call of a tracked module and every torch function between those calls.

Both halves of the work use it: `recording` writes down what happens, `slicing` decides what happens.
While a watcher is active the call of every tracked module is replaced on the module object itself, and
`autograd.Function.apply` on its class; they act differently only on the watcher's thread. Changing nn.Module's own
`__call__` would be simpler, but lets Python forget what it knows of hundreds of subclasses, at every micro-batch.

A moment in a forward has a name that does not depend on how many modules are tracked below it:

    >h.3        inside h.3, before its first tracked child
    h.3         after h.3 returned
    h.3#1       after its second call returned

Tensors are named after the moment and the order in which they were made then: "h.3:0" is the first output of h.3,
"h.3/2" the output of the third torch function after it, "h.3/2:1" that function's second output.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils.checkpoint as checkpointing
from torch import nn
from torch._functorch import apis as functorch_apis
from torch._functorch import eager_transforms
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from partitioner.errors import ArgumentError

READS = frozenset(
    "size dim numel stride is_floating_point is_complex is_contiguous element_size storage_offset __len__ ndimension "
    "nelement get_device __hash__ is_signed is_inference is_same_size dim_order has_names is_conj "
    "is_neg is_coalesced sym_size is_shared is_pinned data_ptr untyped_storage storage type_as_string "
    "register_hook register_post_accumulate_grad_hook retain_grad __dir__ __reduce_ex__ __setstate__ "
    "is_tensor is_storage result_type can_cast promote_types get_default_dtype is_grad_enabled __class__ "
    "is_autocast_enabled _set_grad_enabled set_grad_enabled _record_function_enter_new".split()
)
"""Functions that read what a tensor is like, not what it holds, or set how torch works from here on."""

TENSOR_PROPERTIES = frozenset("T mT H mH real imag data grad".split())
"""Properties whose value is a tensor; every other property only reads what the tensor is like."""

_ON_GRADIENTS = frozenset({"register_hook", "retain_grad"})

HOST_READS = frozenset(
    "item tolist numpy __bool__ __int__ __float__ __index__ __complex__ is_nonzero equal allclose __contains__ "
    "__array__ __format__ __repr__".split()
)
"""Functions that bring a tensor's values to Python, where the model may branch on them."""

RANDOM = frozenset(
    "rand randn rand_like randn_like bernoulli bernoulli_ normal normal_ uniform uniform_ multinomial randint "
    "randint_like randperm dropout dropout_ dropout1d dropout2d dropout3d feature_dropout feature_dropout_ "
    "alpha_dropout alpha_dropout_ feature_alpha_dropout feature_alpha_dropout_ exponential exponential_ "
    "gumbel_softmax rrelu rrelu_ native_dropout _fused_dropout random random_ log_normal log_normal_ cauchy cauchy_ "
    "geometric geometric_ poisson binomial _standard_gamma _sample_dirichlet fractional_max_pool2d "
    "fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices trunc_normal_ "
    "scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu "
    "kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_ orthogonal_ sparse_".split()
)
"""Functions that may draw random numbers; on other ranks their results are received, never drawn again."""


@functools.lru_cache(maxsize=2048)
def _name_and_kind(func: Callable[..., Any]) -> tuple[str, bool]:
    name = function_name(func)
    return name, is_read(name)


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
    return name in READS or (name.startswith("set ") and name != "set data") or name.startswith("_record_function")


_MOVES = frozenset({"to", "_has_compatible_shallow_copy_type", "set data"})
"""What `module.to(device)` does with the gradients that there are, as with the parameters: that is no computation."""


def sets_nothing(given: list[torch.Tensor]) -> bool:
    """Whether `tensor.data = value` is no change: `module.to(device)` writes so, where everything is there already."""
    return len(given) > 1 and given[0] is given[1]


def may_draw(name: str, func: Callable[..., Any]) -> bool:
    """Whether a second run may give something else: random functions, and those that torch knows nothing about."""
    return name in RANDOM or name.startswith("apply ") or isinstance(func, _CUSTOM)


_CUSTOM = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


class AddedHook(NamedTuple):
    """A forward hook that was put on a module, and whether its handle is still there to remove it."""

    handle: weakref.ref[RemovableHandle]
    number: int
    tables: tuple[weakref.ref[Any], ...]

    def remove(self) -> None:
        for table in self.tables:
            hooks = table()
            if hooks is not None:
                hooks.pop(self.number, None)


def hook_name(hook: Any) -> str:
    """What a hook is called on every rank: by the function behind it and the line that begins it, or its class."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    code = getattr(named, "__code__", None)
    return f"{named.__module__}.{named.__qualname__}" + (f":{code.co_firstlineno}" if code else "")


Failure = TypeVar("Failure", bound=Exception)


class Watcher(ABC):
    """Told of every call of a tracked module (with its path) and every torch function outside of untracked depths.

    `counted`: those whose calls are counted in these depths too, since they are also called outside.
    """

    def __init__(
        self,
        tracked: Mapping[nn.Module, str],
        counted: Set[nn.Module] = frozenset(),
        calls: Sequence[WatchedCall] | None = None,
    ) -> None:
        """`calls`: one for each of `tracked`, where they were made before."""
        self.tracked = tracked
        self.counted = counted
        self.calls = list(map(WatchedCall, tracked)) if calls is None else calls
        self.moment = ""
        self.num_functions = 0
        self.checksum = 0
        """Of the functions' names at this moment."""
        self.num_calls: Counter[str] = Counter()
        self.in_custom = False
        """Inside of a custom autograd Function or a functorch transform: that is one function, whatever it calls."""
        self.gradients: dict[int, torch.Tensor] = {}
        """By id, those that the forward has read of parameters; each rank has other ones."""
        self.recomputes = False
        """Whether a checkpoint has been entered: the backward runs that code again."""
        self.hooks_added: list[AddedHook] = []
        """Forward hooks that the forward has put on modules."""
        self.failure: Exception | None = None
        """The first error that was reported, which the model's own code may have swallowed."""

    @property
    def functions(self) -> TorchFunctionMode:
        """Tells of torch functions, while it is entered.

        Made anew each time, as a cycle would keep all cut tensors and their graphs until Python next collects cycles.
        """
        return _Functions(self)

    def placing(self) -> AbstractContextManager[None]:
        """The block puts the watched calls on their modules, or takes them away."""
        return nullcontext()

    def enter(self, path: str) -> str:
        """Count a call of the module at `path`; its id."""
        k = self.num_calls.get(path, 0)
        self.num_calls[path] = k + 1
        return f"{path}#{k}" if k else path

    def at(self, moment: str) -> None:
        self.moment, self.num_functions, self.checksum = moment, 0, 0

    def next_name(self) -> str:
        """The name of the torch function that runs now."""
        name = f"{self.moment}/{self.num_functions}"
        self.num_functions += 1
        return name

    def named_functions(self, name: str) -> int:
        """The checksum with the name of the function that runs now."""
        self.checksum = zlib.crc32(name.encode(), self.checksum)
        return self.checksum

    def failed(self, error: Failure) -> Failure:
        """Remember an error before it is raised."""
        self.failure = self.failure or error
        return error

    @abstractmethod
    def on_call(
        self, path: str, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A tracked module is called; `run(*args, **kwargs)` is the original call, hooks included."""

    @abstractmethod
    def on_function(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function is called that is not just a read; `func(*args, **kwargs)` runs it."""

    @abstractmethod
    def on_transform(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A functorch transform is called (vmap, grad, jvp, ...); `run(*args, **kwargs)` runs it.

        With `in_custom` set, modules it calls are told as hidden; within `functions` its torch functions are told too.
        """

    def on_hook(self, tensor: torch.Tensor) -> None:  # noqa: B027
        """A hook is put on a tensor's gradient, or it is to be kept."""

    def on_gradient_read(self, parameter: nn.Parameter) -> None:  # noqa: B027
        """The gradient of a parameter is asked for."""

    def on_other_thread(self, path: str) -> None:  # noqa: B027  (most need not know)
        """A tracked module is called on a thread that the model has started, where nothing more is told."""

    @abstractmethod
    def on_hidden_call(self, module: nn.Module) -> None:
        """A module is called inside of one function, so that nothing more will be told of it."""

    @abstractmethod
    def on_hidden_apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A custom Function is called inside of one function."""

    @abstractmethod
    def on_checkpoint(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A reentrant checkpoint of torch: `args` are the function, the RNG flag and the function's own arguments."""

    @abstractmethod
    def on_region(self, what: str) -> None:
        """A checkpoint without reentrance "begins" (it is about to save its inputs), is "entered", is "left"."""

    def saves(self, args: tuple[Any, ...]) -> bool:
        """Whether a checkpoint without reentrance has to save these inputs, since it may run again."""
        return True


class _Here:
    """Who watches a thread."""

    __slots__ = ("counting", "held", "stance", "started", "untold", "watcher")

    def __init__(self) -> None:
        self.watcher: Watcher | None = None
        self.started: Watcher | None = None
        """That of the forward under way, also where its code is not told of."""
        self.counting: Watcher | None = None
        self.held: tuple[Sequence[WatchedCall], ...] = ()
        """Calls that stand in their places whether or not somebody watches."""
        self.stance: Any = None
        """That of torch.compile outside of the watching; None where there is nothing compiled."""
        self.untold = 0
        """How many blocks are under way in which functions are not told, though the watcher's mode is still entered:
        the model has entered one of its own after it, which must stay."""


class _Current(threading.local):
    def __init__(self) -> None:
        self.here = _Here()


_current = _Current()
_apply: Any = torch.autograd.Function.__dict__["apply"]
"""A classmethod, in Python or (newer torch) in C."""
_script_call: Any = torch.jit.ScriptFunction.__call__
_handle_init = RemovableHandle.__init__
_frame_init = checkpointing._CheckpointFrame.__init__
_frame_save_inputs: Any = getattr(checkpointing._CheckpointFrame, "save_inputs", None)


class _Functions(TorchFunctionMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __enter__(self) -> Any:
        self.untold, _current.here.untold = _current.here.untold, 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _current.here.untold = self.untold

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, reads = _name_and_kind(func)
        if reads or _current.here.untold:
            if name in _ON_GRADIENTS:
                self.watcher.on_hook(args[0])
            return func(*args, **kwargs) if kwargs else func(*args)
        if name == "__iter__":
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args, kwargs))
        if name == "get grad" and isinstance(args[0], nn.Parameter):
            gradient = func(*args)
            if not torch._C._autograd._profiler_enabled():  # it does that at every module call, with stacks
                self.watcher.on_gradient_read(args[0])
            if gradient is not None:
                self.watcher.gradients[id(gradient)] = gradient
            return gradient
        if self.watcher.gradients and name in _MOVES and id(args[0]) in self.watcher.gradients:
            return func(*args, **kwargs) if kwargs else func(*args)
        if kwargs and kwargs.get("async_op"):  # a function of torch.distributed: done at once, it leaves only tensors
            self.watcher.on_function(name, func, args, {**kwargs, "async_op": False})
            return finished_work()
        return self.watcher.on_function(name, func, args, kwargs or {})


class WatchedCall:
    """Stands on a module, while it is watched, in place of the method that its `__call__` ends in."""

    __slots__ = ("kept", "module", "name", "num_watchers", "run")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.num_watchers = 0
        self.kept: Any = None
        self.name = "_call_impl"
        self.run: Callable[..., Any] = module._call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        here = _current.here
        watcher = here.watcher
        if watcher is None:
            counting = here.counting
            if counting is not None and self.module in counting.counted:
                counting.enter(counting.tracked[self.module])
            elif here.started is None:
                for other in list(_patch.watchers):
                    if self.module in other.tracked:
                        other.on_other_thread(other.tracked[self.module])
            return self.run(*args, **kwargs)
        if watcher.in_custom:
            watcher.on_hidden_call(self.module)
            return self.run(*args, **kwargs)
        path = watcher.tracked.get(self.module)
        if path is None:
            return self.run(*args, **kwargs)
        return watcher.on_call(path, self.module, self.run, args, kwargs)

    def enter(self) -> WatchedCall:
        """Take the place, or share it with whoever stands there; the one that stands there now."""
        attributes = self.module.__dict__
        compiled = self.module._compiled_call_impl
        if compiled is not None or "_call_impl" in attributes:
            for name in ("_call_impl", "_compiled_call_impl"):
                found = attributes.get(name)
                if isinstance(found, WatchedCall) and found.module is self.module:
                    found.num_watchers += 1
                    return found
        self.name = "_call_impl" if compiled is None else "_compiled_call_impl"
        self.kept = attributes.get(self.name)
        self.run = getattr(self.module, self.name)
        self.num_watchers = 1
        attributes[self.name] = self
        return self

    def leave(self) -> None:
        self.num_watchers -= 1
        if self.num_watchers:
            return
        attributes = self.module.__dict__
        if self.kept is None:
            del attributes[self.name]
        else:
            attributes[self.name] = self.kept


def _watched_apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    watcher = _current.here.watcher

    def run(*args: Any, **kwargs: Any) -> Any:
        return _apply.__get__(None, function)(*args, **kwargs)

    if function.__name__ == "CheckpointFunction":
        _note_recomputation()
    if watcher is not None and watcher.in_custom:
        watcher.on_hidden_apply(args, kwargs)
    if watcher is None or watcher.in_custom or not _is_told():
        return run(*args, **kwargs)
    if function.__name__ == "CheckpointFunction":
        return watcher.on_checkpoint(run, args, kwargs)

    def run_hidden(*args: Any, **kwargs: Any) -> Any:
        watcher.in_custom = True
        try:
            return run(*args, **kwargs)
        finally:
            watcher.in_custom = False

    # A custom Function bypasses the function mode, so it is announced here; what it runs inside is its own affair.
    with _untold():
        return watcher.on_function(f"apply {function.__qualname__}", run_hidden, args, kwargs)


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, of which nobody is told; `function` sets its context up in its forward."""
    if torch._C._are_functorch_transforms_active():
        return _apply.__get__(None, function)(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def _watched_script(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A function compiled by TorchScript bypasses the function mode too."""
    watcher = _current.here.watcher

    def run(*args: Any, **kwargs: Any) -> Any:
        return _script_call(function, *args, **kwargs)

    if watcher is not None and watcher.in_custom:
        watcher.on_hidden_apply(args, kwargs)
    if watcher is None or watcher.in_custom or not _is_told():
        return run(*args, **kwargs)
    with _untold():
        return watcher.on_function(f"apply {function.name}", run, args, kwargs)


def _watched_transform(name: str, transform: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        watcher = _current.here.watcher
        if watcher is None or watcher.in_custom or in_transform():
            return transform(*args, **kwargs)
        with _untold():
            result = watcher.on_transform(f"apply {name}", transform, args, kwargs)
        if type(result) is tuple:
            return tuple(_Returned(part) if isinstance(part, FunctionType) else part for part in result)
        return result

    return call


class _Returned:
    """A function that a transform returned: called, it is a transform too."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _watched_transform(RETURNED, self.function)(*args, **kwargs)


RETURNED = "returned function"


def call_elsewhere(refuse: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call of a function that an earlier stage made and kept: what came of it is in the log, or `refuse` runs."""
    return _watched_transform(RETURNED, refuse)(*args, **kwargs)


_TRANSFORMS: list[tuple[Any, str, Callable[..., Any]]] = [
    (owner, name, getattr(owner, name))
    for owner, name in (
        (functorch_apis, "vmap_impl"),
        (eager_transforms, "grad_impl"),
        (eager_transforms, "grad_and_value_impl"),
        (eager_transforms, "_vjp_with_argnums"),
        (eager_transforms, "_jvp_with_argnums"),
    )
    if hasattr(owner, name)
]
"""What torch.func's transforms end in, when what they have made is called."""

_WATCHED_TRANSFORMS = [
    (owner, name, _watched_transform(name.strip("_"), transform)) for owner, name, transform in _TRANSFORMS
]


def in_transform() -> bool:
    """Whether a functorch transform, or forward-mode differentiation, is under way."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return torch.autograd.forward_ad._current_level >= 0


def _note_recomputation() -> None:
    started = _current.here.started
    if started is not None:
        started.recomputes = True


def _tell_region(what: str) -> None:
    watcher = _current.here.watcher
    if watcher is not None:
        watcher.on_region(what)


def _watched_handle_init(handle: RemovableHandle, hooks_dict: Any, *, extra_dict: Any = None) -> None:
    _handle_init(handle, hooks_dict, extra_dict=extra_dict)
    started = _current.here.started
    if started is not None and extra_dict is not None:  # only forward hooks have tables besides
        tables = (handle.hooks_dict_ref, *handle.extra_dict_ref)
        started.hooks_added.append(AddedHook(weakref.ref(handle), handle.id, tables))


def _watched_frame_init(frame: Any, *args: Any, **kwargs: Any) -> None:
    _note_recomputation()
    _tell_region("begins")
    _frame_init(frame, *args, **kwargs)


def _watched_save_inputs(frame: Any, *args: Any) -> None:
    """Somebody's hooks for saved tensors may run now: what they do is no part of the forward."""
    watcher = _current.here.watcher
    if watcher is None:
        _frame_save_inputs(frame, *args)
    elif watcher.saves(args):
        with unwatched():
            _frame_save_inputs(frame, *args)


def _watched_hook_enter(hook: Any) -> None:
    _tell_region("entered")
    saved_tensors_hooks.__enter__(hook)


def _watched_hook_exit(hook: Any, *error: object) -> None:
    _tell_region("left")
    saved_tensors_hooks.__exit__(hook, *error)


class _Patch:
    """What is replaced for all of torch, for as long as any thread watches."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.watchers: list[Watcher] = []
        self.num_users = 0

    def enter(self) -> None:
        self.num_users += 1
        if self.num_users > 1:
            return
        torch.autograd.Function.apply = classmethod(_watched_apply)  # type: ignore[method-assign, assignment]
        torch.jit.ScriptFunction.__call__ = _watched_script  # type: ignore[method-assign, assignment]
        for owner, name, watched in _WATCHED_TRANSFORMS:
            setattr(owner, name, watched)
        RemovableHandle.__init__ = _watched_handle_init  # type: ignore[method-assign, assignment]
        checkpointing._CheckpointFrame.__init__ = _watched_frame_init  # type: ignore[method-assign, assignment]
        if _frame_save_inputs is not None:
            checkpointing._CheckpointFrame.save_inputs = _watched_save_inputs  # type: ignore[method-assign]
        checkpointing._checkpoint_hook.__enter__ = _watched_hook_enter  # type: ignore[method-assign]
        checkpointing._checkpoint_hook.__exit__ = _watched_hook_exit  # type: ignore[method-assign]

    def leave(self) -> None:
        self.num_users -= 1
        if not self.num_users:
            torch.autograd.Function.apply = _apply  # type: ignore[method-assign]
            torch.jit.ScriptFunction.__call__ = _script_call  # type: ignore[method-assign]
            for owner, name, transform in _TRANSFORMS:
                setattr(owner, name, transform)
            RemovableHandle.__init__ = _handle_init  # type: ignore[method-assign]
            checkpointing._CheckpointFrame.__init__ = _frame_init  # type: ignore[method-assign]
            if _frame_save_inputs is not None:
                checkpointing._CheckpointFrame.save_inputs = _frame_save_inputs  # type: ignore[method-assign]
            del checkpointing._checkpoint_hook.__enter__, checkpointing._checkpoint_hook.__exit__


_patch = _Patch()


@contextmanager
def held(
    calls: Sequence[WatchedCall], placing: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[None]:
    """Inside: what watching these calls on this thread replaces stays in its place, from one watcher to the next.

    In between it does as if it were not there. `placing`: the context in which the calls are put on their modules, and
    are taken away.
    """
    here, before = _current.here, _current.here.held
    with _patch.lock, placing():
        _patch.enter()
        entered = [call.enter() for call in calls]
    here.held = (*before, calls)
    try:
        yield
    finally:
        here.held = before
        with _patch.lock, placing():
            _patch.leave()
            for one in entered:
                one.leave()


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of what happens on this thread, until the block ends in whatever way."""
    here = _current.here
    if here.watcher is not None:
        raise RuntimeError("a forward is watched already on this thread")
    with nullcontext() if any(calls is watcher.calls for calls in here.held) else held(watcher.calls, watcher.placing):
        _patch.watchers.append(watcher)
        here.watcher = here.started = watcher
        dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # None where nothing is compiled
        try:
            if dynamo is not None:  # what torch.compile has wrapped runs as it was written, so that it is seen
                here.stance = dynamo._set_stance(dynamo.DynamoStance("force_eager"))
            with watcher.functions:
                yield
        finally:
            if here.stance is not None:
                dynamo._set_stance(here.stance)
                here.stance = None
            here.watcher = here.started = None
            _patch.watchers.remove(watcher)


class unwatched:
    """Inside: neither calls nor functions are told, as in the depths of a layer; only counted, where that is asked."""

    __slots__ = ("_counting", "_dynamo", "_eager", "_here", "_mode", "_watcher")

    def __enter__(self) -> None:
        here = self._here = _current.here
        watcher = self._watcher = here.watcher
        self._counting = here.counting
        here.watcher = None
        here.counting = watcher if watcher is not None and watcher.counted else None
        self._mode = _leave_mode()
        self._dynamo: Any = None
        if here.stance is not None:  # as its _set_stance does, without the checks: this is done for every layer
            self._dynamo = sys.modules["torch._dynamo.eval_frame"]
            self._eager = self._dynamo._stance
            self._dynamo._stance = here.stance

    def __exit__(self, *error: object) -> None:
        if self._dynamo is not None:
            self._dynamo._stance = self._eager
        _enter_mode(self._mode)
        self._here.watcher, self._here.counting = self._watcher, self._counting


def _leave_mode() -> TorchFunctionMode | None:
    """Let functions be told no more: the watcher's mode, or None where one of the model's own lies over it."""
    mode: TorchFunctionMode = torch._C._pop_torch_function_stack()
    if type(mode) is _Functions:
        return mode
    torch._C._push_on_torch_function_stack(mode)
    _current.here.untold += 1
    return None


def _is_told() -> bool:
    """Whether the watcher is told of functions; inside of one it is not, though other modes may be."""
    modes = range(torch._C._len_torch_function_stack())
    return any(type(torch._C._get_function_stack_at(k)) is _Functions for k in modes)


def _enter_mode(mode: TorchFunctionMode | None) -> None:
    """What `_leave_mode` did, undone."""
    if mode is None:
        _current.here.untold -= 1
    else:
        torch._C._push_on_torch_function_stack(mode)


@contextmanager
def _untold() -> Iterator[None]:
    """Inside: torch functions are not told."""
    mode = _leave_mode()
    try:
        yield
    finally:
        _enter_mode(mode)


def tell(name: str, run: Callable[..., None], *given: Any) -> None:
    """Run a function that torch's modes may not see, as one that the watcher is told of."""
    watcher = _current.here.watcher
    if watcher is None or watcher.in_custom or not _is_told():
        run(*given)
        return
    with _untold():
        watcher.on_function(name, run, given, {})


def watcher_here() -> Watcher | None:
    """The watcher of this thread, where the code that runs now is told to it."""
    return _current.here.watcher


def forward_here() -> Watcher | None:
    """The watcher of the forward under way on this thread, also in the depths of a layer."""
    return _current.here.started


_computing: list[int] = []
"""Threads on which a loss or a backward runs."""


@contextmanager
def computing() -> Iterator[None]:
    """The block is code of the model that no watcher is told of: its loss, its backward."""
    thread = threading.get_ident()
    _computing.append(thread)
    try:
        yield
    finally:
        _computing.remove(thread)


def is_computing() -> bool:
    """Whether the model's own code runs on this thread: its forward, its loss or its backward."""
    if _current.here.started is not None:
        return True
    if not _computing:
        return False
    # autograd's own threads are none that Python has started
    return threading.get_ident() in _computing or isinstance(threading.current_thread(), threading._DummyThread)


def finished_work(result: Any = None) -> Any:
    """What a function of torch.distributed returns that has ended."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]


def unwrap(model: Any) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel or torch.compile wrappers.

    An ArgumentError where it is no module.
    """
    if not isinstance(model, nn.Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        hint = "make one: model = " + model.__name__ + "(...)" if isinstance(model, type) else "pass an nn.Module"
        raise ArgumentError(f"the model is {found}, not a module: {hint}")
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            found_module: nn.Module = model
            return found_module
