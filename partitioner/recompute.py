"""Run layers again in their backward instead of keeping what they save for it.

Around the forward of each layer is one of torch's checkpoints (without reentrance), which keeps the layer's inputs and
the state of torch's random numbers. Besides, the second run sees the layer as the first one did, and leaves no trace:

    buffers, attributes    those of the first run are put in, then those of now put back: statistics move once
    random, numpy          likewise, where a layer draws from them
    hooks of the layer     are outside, and fire once

What a layer is like is seen in a first run without gradients. One that writes into its inputs cannot be run again from
them and keeps what it saves, as in-place activations do: their output is the next layer's input. So does a scripted
layer, and one inside a functorch transform.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from partitioner.errors import UnsupportedModelError
from partitioner.restore import ModelState, random_marks, random_states, set_random_states
from partitioner.structures import map_tensors, tensors_in

_STANDARD = frozenset(vars(nn.Module()))
"""Tables that every module has; the forward of none changes them."""


class Recomputed:
    """Layers of `model` run again in their backward, from `enter` to `leave`, or in a block.

    `layers`: ids as in a profile; one that is no module's path is the whole model.
    """

    def __init__(self, model: nn.Module, layers: Iterable[str]) -> None:
        paths = dict.fromkeys(layer.partition("#")[0] for layer in layers)
        modules = dict(model.named_modules(remove_duplicate=False))
        found = {modules.get(path, model): path for path in paths}
        scripted = torch.jit.ScriptModule
        self._forwards = [_Forward(one, path) for one, path in found.items() if not isinstance(one, scripted)]

    def enter(self) -> None:
        for forward in self._forwards:
            forward.put_in()

    def leave(self) -> None:
        for forward in self._forwards:
            forward.take_out()

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


class _Nature(NamedTuple):
    """What a layer was seen to do."""

    writes_inputs: bool
    keeps_state: bool
    """Changes buffers, attributes or what they hold."""
    draws: bool
    """From Python's or NumPy's random numbers."""


class _Forward:
    """Stands on a module in place of its forward."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module, self.path = module, path
        self.name = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
        self.kept = vars(module).get(self.name)
        self.run: Callable[..., Any] = getattr(module, self.name)
        self.nature: _Nature | None = None
        modules = [one for one in module.modules() if not isinstance(one, torch.jit.ScriptModule)]
        self.tables = [table for one in modules for table in (vars(one), one._buffers, one._parameters)]
        functools.update_wrapper(self, self.run, updated=())  # its signature is looked at

    def put_in(self) -> None:
        vars(self.module)[self.name] = self

    def take_out(self) -> None:
        if self.kept is None:
            vars(self.module).pop(self.name, None)
        else:
            vars(self.module)[self.name] = self.kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        if not torch.is_grad_enabled() or not self._has_backward(tensors) or _in_transform():
            return self.run(*args, **kwargs)
        self.nature = self.nature or self._look(args, kwargs)
        if self.nature.writes_inputs:
            return self.run(*args, **kwargs)
        return checkpoint(_Run(self, self.nature, args, kwargs), *tensors, use_reentrant=False)

    def _has_backward(self, tensors: Collection[torch.Tensor]) -> bool:
        return any(tensor.requires_grad for tensor in (*tensors, *self.module.parameters()))

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Nature:
        """Run once on copies, without gradients, and give back everything."""
        state, objects = ModelState(self.module), ModelState(nn.Module(), (args, kwargs))
        copies = map_tensors((args, kwargs), lambda tensor: tensor.detach().clone())
        given = tensors_in(copies)
        before = [(id(tensor), _version(tensor)) for tensor in given]
        marks, states = random_marks(), random_states()
        devices = {tensor.device for tensor in (*given, *self.module.parameters()) if tensor.is_cuda}
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
                self.run(*copies[0], **copies[1])
            return _Nature(
                writes_inputs=before != [(id(t), _version(t)) for t in tensors_in(copies)] or objects.differs(),
                keeps_state=state.differs(),
                draws=random_marks() != marks,
            )
        finally:
            set_random_states(states)
            objects.restore()
            state.restore()


class _Run:
    """One forward of a layer: what it was given and what the layer was like then. Called again, it is the same."""

    def __init__(self, forward: _Forward, nature: _Nature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forward, self.args, self.kwargs = forward, args, kwargs
        self.state = ModelState(forward.module) if nature.keeps_state else None
        self.tables = None if nature.keeps_state else [dict(table) for table in forward.tables]
        self.random = random_states() if nature.draws else None
        self.again = False

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self.again:
            return self._run_again(tensors)
        self.again = True
        return self.forward.run(*self.args, **self.kwargs)

    def _run_again(self, tensors: Iterable[torch.Tensor]) -> Any:
        given = iter(tensors)
        args, kwargs = map_tensors((self.args, self.kwargs), lambda _: next(given))
        states, marks = random_states(), random_marks()
        if self.random is not None:
            set_random_states(self.random)
        try:
            if self.state is not None:
                return self._with_state(self.state, args, kwargs)
            return self._with_attributes(args, kwargs)
        finally:  # also where torch stops the run, as soon as it has all it needs
            if self.random is None and random_marks() != marks:
                self._refuse("draws from Python's or NumPy's random numbers")
            set_random_states(states)

    def _with_state(self, state: ModelState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        now = ModelState(self.forward.module)
        state.restore()
        try:
            return self.forward.run(*args, **kwargs)
        finally:
            now.restore()

    def _with_attributes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tables, then = self.forward.tables, self.tables
        assert then is not None
        now = [dict(table) for table in tables]
        for table, values in zip(tables, then, strict=True):
            _fill(table, values)
        marks = _marks(tables)
        try:
            return self.forward.run(*args, **kwargs)
        finally:
            if _marks(tables) != marks:
                self._refuse("changes its buffers or attributes")
            for table, values in zip(tables, now, strict=True):
                _fill(table, values)

    def _refuse(self, what: str) -> None:
        raise UnsupportedModelError(
            f"the layer {self.forward.path or 'of the whole model'} {what} in its forward, which it did not when it "
            "ran first, so that it cannot be run again in its backward: plan with recompute='never'"
        )


def _in_transform() -> bool:
    """Whether a functorch transform is under way: torch's checkpoints do not work inside of one."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _fill(table: dict[str, Any], values: dict[str, Any]) -> None:
    if len(table) != len(values) or any(table.get(key) is not value for key, value in values.items()):
        table.clear()
        table.update(values)


def _marks(tables: Iterable[dict[str, Any]]) -> list[tuple[int, int]]:
    """Something that is another when an attribute or buffer is: replaced, written into, longer or shorter."""
    return [
        (id(value), _version(value) if isinstance(value, torch.Tensor) else _length(value))
        for table in tables
        for key, value in table.items()
        if key not in _STANDARD
    ]


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, dict, set)) else 0


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors do not say
        return 0
