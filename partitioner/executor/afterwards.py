"""What a training loop does to the stage's module later: parameters that no plan knows, hooks of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from partitioner.errors import ArgumentError, UnsupportedModelError
from partitioner.executor import reduction
from partitioner.executor.replaced import Replaced
from partitioner.structures import are_same_objects


class Afterwards:
    """Looks before each step whether the model is still the one that was placed."""

    def __init__(
        self, model: nn.Module, own: Mapping[str, nn.Parameter], num_replicas: int, look_again: Callable[[], None]
    ) -> None:
        """`look_again` is called where forward hooks have come or gone."""
        self._model, self._own, self._look_again = model, own, look_again
        self._num_replicas = num_replicas
        self._placed = {id(parameter): parameter for parameter in model.parameters()}
        self._versions: dict[str, int] = {}
        self._note()
        self._hooks = self._forward_hooks()

    def check(self) -> None:
        """An ArgumentError names parameters that came or went."""
        now = self._contents()
        if len(now) != len(self._seen) or not are_same_objects(now, self._seen):
            self._refuse_others()
            self._note()
        hooks = self._forward_hooks()
        if len(hooks) != len(self._hooks) or not are_same_objects(hooks, self._hooks):
            self._look_again()
            self._hooks = hooks

    def begin(self) -> None:
        """A training step begins: an ArgumentError names hooks on gradients that would see others than one device's."""
        self._refuse_hooks()

    def end(self, num_microbatches: int = 1) -> None:
        """A step is over: hooks that the forward itself has added are its own affair."""
        self._hooks = self._forward_hooks()
        if self._versions and num_microbatches > 1:
            self._refuse_changed()

    def _note(self) -> None:
        modules = list(self._model.modules())
        self._tables = [table for one in modules for table in (one._modules, one._parameters)]
        self._hook_tables = [table for one in modules for table in (one._forward_hooks, one._forward_pre_hooks)]
        self._seen = self._contents()

    def _contents(self) -> tuple[Any, ...]:
        return tuple(chain.from_iterable(table.values() for table in self._tables))

    def _forward_hooks(self) -> tuple[Any, ...]:
        return tuple(chain.from_iterable(table.values() for table in self._hook_tables))

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

    def _refuse_hooks(self) -> None:
        """Those that run when the gradient of a parameter has been accumulated: elsewhere that is another gradient."""
        self._versions = {}
        for name, parameter in self._own.items():
            hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
            if all(getattr(hook, "__module__", "") == reduction.__name__ for hook in hooks):
                continue
            if self._num_replicas > 1:
                raise ArgumentError(
                    f"a hook runs after the gradient of {name!r} has been accumulated, which is that of this replica "
                    f"alone, one of {self._num_replicas}: do it after train_step, or give the gradient of "
                    "each micro-batch a hook with register_hook"
                )
            if parameter.grad is not None and parameter.grad.any():
                raise ArgumentError(
                    f"a hook runs after the gradient of {name!r} has been accumulated, and that of the last step is "
                    "still there, which is added only when this step is over: call optimizer.zero_grad() before, or do "
                    "it after train_step"
                )
            self._versions[name] = parameter._version

    def _refuse_changed(self) -> None:
        for name, before in self._versions.items():
            if self._own[name]._version != before:
                raise UnsupportedModelError(
                    f"a hook has changed the parameter {name!r} in the backward of a step of several micro-batches: "
                    "some of them had run their forward with the value before, others not. Step the optimizer after "
                    "train_step, or use one micro-batch (microbatches=1)"
                )


_OVER_ALL = ("LBFGS", "SAM", "ASAM", "GSAM", "Prodigy", "DAdapt")
"""How the names of optimizers begin that take a norm or an inner product over all that they are given."""


class NoLocalNorm:
    """While it is entered: torch.nn.utils.clip_grad_norm_ and get_total_norm refuse gradients of one stage alone, and
    so does the step of optimizers that are known to combine parameters."""

    def __init__(self, own: Mapping[str, nn.Parameter]) -> None:
        self._own = own
        self._hook: Any = None
        owners = (clip_grad, "_get_total_norm"), (nn.utils, "get_total_norm")
        self._replaced = [Replaced(owner, name, self._refusing) for owner, name in owners]

    def enter(self) -> None:
        """The functions that are asked for a norm are others."""
        self._hook = register_optimizer_step_pre_hook(self._refuse_optimizer)
        for one in self._replaced:
            one.enter()

    def leave(self) -> None:
        """As before."""
        if self._hook is not None:
            self._hook.remove()
        for one in self._replaced:
            one.leave()

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

    def _refusing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def total_norm(tensors: Any, *how: Any, **named: Any) -> Any:
            ours = {id(parameter.grad) for parameter in self._own.values() if parameter.grad is not None}
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            if any(id(tensor) in ours for tensor in tensors):
                raise ArgumentError(
                    "torch.nn.utils would take the norm over the gradients of this rank alone, another on each stage: "
                    "call stage.clip_grad_norm_(max_norm), which takes that of the whole model; with max_norm=inf it "
                    "clips none"
                )
            return plain(tensors, *how, **named)

        return total_norm
