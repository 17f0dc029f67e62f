"""What running a model may change of it, kept and given back."""

from __future__ import annotations

import _random
import contextlib
import copy
import ctypes
import functools
import random
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from partitioner.contents import content_of, fill, has_content, is_generator
from partitioner.structures import is_python_object
from partitioner.usage import names_in

_GENERATOR: Any = random._inst
_NUMPY: Any = np.random.mtrand._rand
"""Where Python and NumPy keep their global generators."""

_MAX_DEPTH = 4
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, FunctionType, type))
_BUILT_IN = frozenset((list, dict, OrderedDict, set, deque))
_DEVICES = ("cpu", "cuda")


def random_states() -> tuple[Any, ...]:
    """States of `random` and of NumPy's global generator, as plain data that compares and pickles."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (name, np.asarray(keys).tobytes(), *rest)


def random_marks() -> tuple[Any, ...]:
    """Something that changes when either generator is drawn from, cheap to make and to compare.

    Both are Mersenne twisters: with every draw their position moves, and where it wraps their first word changes; of
    two normal numbers drawn together the second is kept for the next call. All of that is read where it lies in memory,
    as this is asked around every layer and a state has 624 words.
    """
    words = _words_of_numpy(_NUMPY._bit_generator)
    if words is None or _PYTHON is None or _NUMPY_NORMAL is None:
        return random_states()
    return _PYTHON.tobytes(), _GENERATOR.gauss_next, words.tobytes(), _NUMPY_NORMAL.tobytes()


def _words_of_python() -> memoryview | None:
    """Where CPython keeps the position and first word of `random`'s own generator; None where they are not there."""
    generator = _GENERATOR
    size = object.__basicsize__ + 625 * ctypes.sizeof(ctypes.c_uint32)
    if sys.implementation.name != "cpython" or _random.Random.__basicsize__ < size:
        return None
    found = (ctypes.c_uint32 * 625).from_address(id(generator) + object.__basicsize__)
    words = generator.getstate()[1]
    return _view(found)[:2] if tuple(found) == (words[-1], *words[:-1]) else None


@functools.lru_cache(maxsize=1)
def _words_of_numpy(bits: Any) -> memoryview | None:
    """Where NumPy keeps the first word of its global generator, and its position after all 624 of them; None if it is
    another kind."""
    if not isinstance(bits, np.random.MT19937):
        return None
    return _view((ctypes.c_uint32 * 625).from_address(bits.ctypes.state_address))[::624]


def _view(words: Any) -> memoryview:
    return memoryview(words).cast("B").cast("I")


def _normal_of_numpy() -> memoryview | None:
    """Where NumPy's global generator says whether it keeps a normal number: found in one like it, by the number."""
    like = np.random.RandomState(0)
    size = type(like).__basicsize__
    like.standard_normal()
    kept = like.get_state(legacy=False)["gauss"]
    numbers = (ctypes.c_double * (size // 8)).from_address(id(like))
    places = [k for k in range(object.__basicsize__ // 8 + 1, size // 8) if numbers[k] == kept]
    if sys.implementation.name != "cpython" or len(places) != 1:
        return None
    offset = 8 * (places[0] - 1)
    flag = ctypes.c_int.from_address(id(like) + offset)
    seen = [flag.value]
    for _ in range(3):
        like.standard_normal()
        seen.append(flag.value)
    if seen != [1, 0, 1, 0]:
        return None
    return _view((ctypes.c_uint32 * 1).from_address(id(_NUMPY) + offset))


_PYTHON, _NUMPY_NORMAL = _words_of_python(), _normal_of_numpy()


def set_random_states(states: tuple[Any, ...]) -> None:
    """Put both generators into the states that `random_states` gave."""
    python, (name, keys, *rest) = states
    random.setstate(python)
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))


def modes() -> tuple[Any, ...]:
    """Whether gradients are on, autocast on CPU and CUDA, and the default dtype."""
    return (
        torch.is_grad_enabled(),
        *map(torch.is_autocast_enabled, _DEVICES),
        *map(torch.get_autocast_dtype, _DEVICES),
        torch.get_default_dtype(),
    )


def set_modes(wanted: tuple[Any, ...]) -> None:
    """Switch to what `modes` gave."""
    gradients, *others, default = wanted
    torch.set_grad_enabled(gradients)
    for kind, enabled, dtype in zip(_DEVICES, others[: len(_DEVICES)], others[len(_DEVICES) :], strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_default_dtype(default)


class Weights(tuple[nn.Parameter, ...]):
    """Parameters that are to be given back as well."""


KEPT_BYTES = 1 << 28
"""Up to so many bytes of parameters are all kept: that a forward writes into some may show late."""


def all_weights(model: nn.Module) -> Weights:
    """Those of the model, none where they are too large to be copied for safety's sake."""
    found = [parameter for parameter in model.parameters() if not parameter.is_meta]
    size = sum(parameter.numel() * parameter.element_size() for parameter in found)
    return Weights(found if size <= KEPT_BYTES else ())


class ModelState:
    """A model's buffers and module attributes as they are now. Of parameters only those that are passed as `Weights`.

    Attributes are followed into lists, dicts, sets, deques and objects of Python classes (a configuration), and those
    given back with their contents; so are tensors and random generators found on the way.
    """

    def __init__(self, model: nn.Module, others: Any = ()) -> None:
        """`others`: more that is to be kept, in tuples."""
        self._undo: list[Callable[[], None]] = []
        self._values: list[tuple[Any, Callable[[], Any], Any]] = []
        """Tensors and the like, what tells their content, and what that was."""
        self._containers: list[tuple[Any, Any]] = []
        self._empty: list[Any] = []
        """Containers that hold nothing, as most tables of hooks do."""
        self._known = {id(parameter) for parameter in model.parameters()}
        self._kept: list[Any] = []
        for module in model.modules():
            self._keep(vars(module), 0)
        for buffer in model.buffers():
            self._keep(buffer, 0)
        self._keep(others, 0)
        self.keep_variables(_functions_of(model))

    def keep_variables(self, functions: Iterable[Any]) -> None:
        """What these functions set around them, `nonlocal` and `global` names, and generators that they draw from."""
        variables, generators = _variables_of(functions)
        self._undo += [_variable_undo(variable) for variable in variables]
        self._keep(tuple(generators.values()), 0)

    def keep(self, others: Any) -> None:
        """From here on, keep these too."""
        self._keep(others, 0)

    def restore(self) -> None:
        """Give it all back, in place. Graphs that hold a buffer stay valid."""
        for undo in self._undo:
            undo()
        for container in self._empty:
            if container:
                container.clear()

    def undo_values(self, but: Container[int]) -> list[Callable[[], None]]:
        """What gives back the tensors, arrays and generators that have changed, but for those with these ids."""
        return [
            _tensor_undo(item, before) if isinstance(item, torch.Tensor) else functools.partial(fill, item, before)
            for item, now, before in self._values
            if id(item) not in but and not _equal(now(), before)
        ]

    def has_changed(self) -> bool:
        """Whether an attribute or container holds other objects than it did; what tensors hold does not count."""
        return any(self._empty) or any(_differ(container, before) for container, before in self._containers)

    def differs(self) -> bool:
        """Whether anything has changed, what tensors hold and the states of generators included."""
        return self.has_changed() or any(not _equal(now(), before) for _, now, before in self._values)

    def _keep(self, item: Any, depth: int) -> None:
        kind = type(item)
        if kind in _PLAIN or id(item) in self._known:
            return
        if kind in _BUILT_IN and not item:
            self._note(item)
            self._empty.append(item)
            return
        if isinstance(item, Weights):
            for parameter in item:
                if not parameter.is_meta and parameter.layout == torch.strided:
                    self._undo.append(_weight_undo(parameter, parameter.detach().clone()))
            return
        if depth > _MAX_DEPTH or isinstance(item, nn.Parameter):
            return
        if isinstance(item, torch.Tensor):
            self._note(item)
            if (
                not getattr(item, "holds_nothing", False)
                and not item.is_meta
                and item.layout == torch.strided
                and not item.is_nested
            ):
                before = item.detach().clone()
                self._values.append((item, item.detach, before))
                self._undo.append(_tensor_undo(item, before))
        elif isinstance(item, (list, dict, set, deque)):
            self._note(item)
            content = _content(item)
            self._containers.append((item, content))
            self._undo.append(_container_undo(item, content))
            if kind not in _BUILT_IN and hasattr(item, "__dict__"):
                self._keep(vars(item), depth + 1)
            for part in item.values() if isinstance(item, dict) else item:
                self._keep(part, depth + 1)
        elif isinstance(item, tuple):
            for part in item:
                self._keep(part, depth + 1)
        elif has_content(item):
            self._note(item)
            before = content_of(item)
            self._values.append((item, lambda: content_of(item), before))
            self._undo.append(lambda: fill(item, before))
        elif is_python_object(item):
            self._note(item)
            self._keep(vars(item), depth)

    def _note(self, item: Any) -> None:
        self._known.add(id(item))
        self._kept.append(item)


def kept_by(function: Any) -> tuple[Any, ...]:
    """What a function or module has to itself: its variables from outside, or all that the modules in it keep."""
    found: list[Any] = []
    left, known = [function], set[int]()
    while left:
        item = left.pop()
        if id(item) in known or item is None:
            continue
        known.add(id(item))
        if isinstance(item, nn.Module):
            found += [vars(module) for module in item.modules()]
        elif isinstance(item, functools.partial):
            left += [item.func, *item.args, *item.keywords.values()]
        elif isinstance(item, MethodType):
            left += [item.__self__, item.__func__]
        elif isinstance(item, FunctionType):
            cells = [cell.cell_contents for cell in item.__closure__ or () if cell != _EMPTY]
            named = [item.__globals__.get(name) for name in item.__code__.co_names]
            left += [*cells, *(item.__defaults__ or ()), *named] if not _is_library(item) else []
        elif not isinstance(item, (ModuleType, type)):
            found.append(item)
    return tuple(found)


_EMPTY = CellType()


_LIBRARIES = frozenset({"torch", "numpy", "scipy", "partitioner", "transformers", "builtins"})


def _is_library(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in _LIBRARIES


def _equal(now: Any, before: Any) -> bool:
    if isinstance(now, torch.Tensor):
        return now.shape == before.shape and torch.equal(now, before)
    return bool(now == before)


def _tensor_undo(tensor: torch.Tensor, before: torch.Tensor) -> Callable[[], None]:
    def undo() -> None:
        if not torch.equal(tensor, before):
            tensor.data.copy_(before)

    return undo


def _weight_undo(parameter: nn.Parameter, before: torch.Tensor) -> Callable[[], None]:
    memory = parameter.data

    def undo() -> None:
        if parameter.data_ptr() != memory.data_ptr():
            parameter.data = memory
        if not torch.equal(memory, before):
            memory.copy_(before)

    return undo


def _content(container: Any) -> Any:
    """What it holds, in a container of the built-in kind."""
    if isinstance(container, dict):
        return dict((OrderedDict if isinstance(container, OrderedDict) else dict).items(container))
    return set(container) if isinstance(container, set) else list(container)


def _differ(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return True
    if isinstance(container, dict):
        return any(dict.get(container, key, _EMPTY) is not value for key, value in before.items())
    if isinstance(container, set):
        return bool(container != before)
    return any(one is not other for one, other in zip(container, before, strict=True))


def _container_undo(container: Any, before: Any) -> Callable[[], None]:
    iterators = {}
    if isinstance(container, dict):
        iterators = {key: found for key, one in before.items() if (found := _copied_iterator(one)) is not None}

    def undo() -> None:
        before.update({key: _copied_iterator(one) for key, one in iterators.items()}) if iterators else None
        if _differ(container, before) or not all(map(is_, container, before)):
            _refill(container, before)

    return undo


def _refill(container: Any, before: Any) -> None:
    """Put back what it held, by the built-in classes' own methods: those of a subclass may refuse or count."""
    if isinstance(container, dict):
        base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        base.clear(container)
        for key, value in before.items():
            base.__setitem__(container, key, value)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), before)
    elif isinstance(container, deque):
        deque.clear(container)
        deque.extend(container, before)
    else:
        set.clear(container)
        set.update(container, before)


def _copied_iterator(value: Any) -> Any:
    """Another iterator of `itertools` that goes on from where this one is; None for all else."""
    if type(value).__module__ != "itertools":
        return None
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")  # Python says that it will not copy them for ever
        return copy.deepcopy(value)
    return None


def _functions_of(model: nn.Module) -> list[Any]:
    """The code of the model's own classes."""
    return [
        function
        for cls in dict.fromkeys(type(module) for module in model.modules())
        for base in cls.__mro__
        if base.__module__.partition(".")[0] not in _LIBRARIES
        for function in vars(base).values()
    ]


def generators_of(model: nn.Module) -> dict[str, Any]:
    """Random generators that are the model's own, by name: in its attributes, and those that its code has around it."""
    own = {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if is_generator(value)
    }
    return _variables_of(_functions_of(model))[1] | own


def _variables_of(
    functions: Iterable[Any],
) -> tuple[list[CellType | tuple[dict[str, Any], str]], dict[str, Any]]:
    """Variables of functions around and of Python modules that these set, or what they call does.

    And the random generators among what they have around them, by name.
    """
    left = list(functions)
    found: list[CellType | tuple[dict[str, Any], str]] = []
    generators: dict[str, Any] = {}
    known = set[int]()
    while left:
        item = left.pop()
        if isinstance(item, functools.partial | MethodType):
            left += [item.func, *item.args] if isinstance(item, functools.partial) else [item.__func__]
        if not isinstance(item, FunctionType) or id(item) in known or _is_library(item):
            continue
        known.add(id(item))
        names, stored = names_in(item.__code__)
        cells = dict(zip(item.__code__.co_freevars, item.__closure__ or (), strict=True))
        found += [cell for name, cell in cells.items() if name in stored and cell != _EMPTY]
        found += [(item.__globals__, name) for name in stored if name not in cells and name in item.__globals__]
        around = {name: cell.cell_contents for name, cell in cells.items() if cell != _EMPTY}
        beside = {name: item.__globals__[name] for name in names if name in item.__globals__}
        generators |= {name: value for name, value in (around | beside).items() if is_generator(value)}
        left += [*around.values(), *beside.values()]
    return found, generators


def _variable_undo(variable: CellType | tuple[dict[str, Any], str]) -> Callable[[], None]:
    if isinstance(variable, CellType):
        content = variable.cell_contents
        return lambda: setattr(variable, "cell_contents", content)
    space, name = variable
    held = space[name]
    return lambda: space.__setitem__(name, held)


@contextlib.contextmanager
def untouched(model: nn.Module, others: Any = ()) -> Iterator[ModelState]:
    """Give back all that forwards and backwards may change: state, gradients, their hooks, random states; `others` too.

    Gradients start as None inside. Yields the state, for whoever wants it given back in between.
    """
    state = ModelState(model, others)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    hooks = [(parameter, [dict(table) for table in hooks_of(parameter)]) for parameter, _ in gradients]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = sorted({tensor.device.index or 0 for tensor in model.parameters() if tensor.is_cuda})
    states = random_states()
    with torch.random.fork_rng(devices=devices):
        try:
            yield state
        finally:
            set_random_states(states)
            state.restore()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for parameter, before in hooks:
                for k, table in enumerate(hooks_of(parameter)):
                    table.clear()
                    table.update(before[k] if before else {})


def hooks_of(parameter: torch.Tensor) -> list[dict[int, Any]]:
    """Tables of the hooks on its gradient, those on the accumulated one last; empty where there never was one."""
    tables = [parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)]
    return [{} if table is None else table for table in tables] if tables != [None, None] else []
