"""What a training loop does to the stage's module later: parameters that no plan knows, hooks that share objects."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from partitioner.errors import ArgumentError
from partitioner.structures import are_same_objects


class Afterwards:
    """Looks before each step whether the model is still the one that was placed. `stage_of`: layer id -> stage."""

    def __init__(self, model: nn.Module, own: Mapping[str, nn.Parameter], stage_of: Mapping[str, int]) -> None:
        self._model, self._own = model, own
        self._stage_of = {layer.partition("#")[0]: stage for layer, stage in stage_of.items()}
        self._placed = {id(parameter): parameter for parameter in model.parameters()}
        self._note()
        self._hooks = self._count_hooks()
        self._known_hooks = {id(hook) for _, hook in self._all_hooks()}

    def check(self) -> None:
        """An ArgumentError names parameters that came or went; a warning hooks that share what only one rank has."""
        now = self._contents()
        if len(now) != len(self._seen) or not are_same_objects(now, self._seen):
            self._refuse_others()
            self._note()
        if self._count_hooks() != self._hooks:
            self._warn_of_hooks()

    def end(self) -> None:
        """A step is over: hooks that the forward itself has added are its own affair."""
        self._hooks = self._count_hooks()

    def _note(self) -> None:
        modules = list(self._model.modules())
        self._tables = [table for one in modules for table in (one._modules, one._parameters)]
        self._hook_tables = [table for one in modules for table in (one._forward_hooks, one._forward_pre_hooks)]
        self._seen = self._contents()

    def _contents(self) -> tuple[Any, ...]:
        return tuple(chain.from_iterable(table.values() for table in self._tables))

    def _count_hooks(self) -> int:
        return sum(map(len, self._hook_tables))

    def _refuse_others(self) -> None:
        found = dict(self._model.named_parameters(remove_duplicate=False))
        other = [name for name, one in found.items() if id(one) not in self._placed]
        other += [name for name, one in self._own.items() if found.get(name) is not one and name not in other]
        if other:
            raise ArgumentError(
                f"{len(other)} parameters ({other[0]}) are not those that the stage was made with: a module was added "
                "or replaced, or weights loaded with assign=True. They would be neither trained nor kept alike on the "
                "ranks: change the model before partition() and materialize it again, and load weights with "
                "stage.module.load_state_dict(weights)"
            )

    def _warn_of_hooks(self) -> None:
        """Of an object that new hooks share with hooks of another stage: each rank sees what its own layers write."""
        holders: dict[int, set[int]] = {}
        new: set[int] = set()
        for path, hook in self._all_hooks():
            stages = self._stages_at(path)
            for held in _mutable(hook):
                holders.setdefault(id(held), set()).update(stages)
                if id(hook) not in self._known_hooks:
                    new.add(id(held))
        shared = next((sorted(stages) for held, stages in holders.items() if held in new and len(stages) > 1), None)
        if shared:
            warnings.warn(
                f"hooks that were registered after materialize share an object over stages "
                f"{', '.join(map(str, shared))}: on each rank it holds what the rank's own layers write. A layer that "
                "reads what another stage's layer wrote computes with something else: register such hooks before "
                "partition()",
                stacklevel=4,
            )
        self._known_hooks = {id(hook) for _, hook in self._all_hooks()}
        self._hooks = self._count_hooks()

    def _all_hooks(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._model.named_modules():
            for hook in chain(module._forward_hooks.values(), module._forward_pre_hooks.values()):
                yield path, hook

    def _stages_at(self, path: str) -> set[int]:
        """Of the layer that the module is in, or of the layers in it."""
        around = path
        while around and around not in self._stage_of:
            around = around.rpartition(".")[0]
        if around in self._stage_of:
            return {self._stage_of[around]}
        return {stage for layer, stage in self._stage_of.items() if not path or layer.startswith(f"{path}.")}


_OVER_ALL = ("LBFGS", "SAM", "ASAM", "GSAM", "Prodigy", "DAdapt")
"""How the names of optimizers begin that take a norm or an inner product over all that they are given."""


class NoLocalNorm:
    """While it is entered: torch.nn.utils.clip_grad_norm_ refuses gradients of one stage alone, and so does the step of
    optimizers that are known to combine parameters."""

    def __init__(self, own: Mapping[str, nn.Parameter]) -> None:
        self._own = own
        self._norm: Any = None
        self._hook: Any = None

    def enter(self) -> None:
        """The function that it asks for the norm is another."""
        self._hook = register_optimizer_step_pre_hook(self._refuse_optimizer)
        self._norm = getattr(clip_grad, "_get_total_norm", None)
        if self._norm is not None:
            clip_grad._get_total_norm = self._refuse_or_norm

    def leave(self) -> None:
        """As before, unless another stage has been entered since."""
        if self._hook is not None:
            self._hook.remove()
        if getattr(clip_grad, "_get_total_norm", None) == self._refuse_or_norm:
            clip_grad._get_total_norm = self._norm

    def _refuse_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        kind = next((one.__name__ for one in type(optimizer).__mro__ if one.__name__.startswith(_OVER_ALL)), None)
        if kind is None:
            return
        ours = {id(parameter) for parameter in self._own.values()}
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise ArgumentError(
                f"{kind} takes norms or inner products over all of a model's parameters, and would take others on each "
                "rank, of what it keeps up to date: use an optimizer that treats each parameter by itself, or replicas "
                "only (mesh={'dp': n}, shard='none')"
            )

    def _refuse_or_norm(self, tensors: Any, *how: Any, **named: Any) -> Any:
        ours = {id(parameter.grad) for parameter in self._own.values() if parameter.grad is not None}
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if any(id(tensor) in ours for tensor in tensors):
            raise ArgumentError(
                "torch.nn.utils.clip_grad_norm_ would take the norm over the gradients of this rank alone, another on "
                "each stage: call stage.clip_grad_norm_(max_norm), which takes that of the whole model"
            )
        return self._norm(tensors, *how, **named)


def _mutable(hook: Any) -> Iterable[Any]:
    """What a hook's function holds and may write into."""
    held: list[Any] = []
    while isinstance(hook, functools.partial):
        held += [*hook.args, *hook.keywords.values()]
        hook = hook.func
    held.append(getattr(hook, "__self__", hook if not hasattr(hook, "__code__") else None))
    function = getattr(hook, "__func__", hook)
    held += getattr(function, "__defaults__", None) or ()
    for cell in getattr(function, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:
            continue
    plain = (nn.Module, str, bytes, int, float, bool, tuple, type(None), type, type(_mutable), type(len))
    return [one for one in held if not isinstance(one, plain)]
