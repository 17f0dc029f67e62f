"""torch.amp.GradScaler over the ranks of a plan: a step that the gradients of one stage forbid is a step of none.

On one device a scaler looks at all gradients of an optimizer and skips its step where any of them is infinite. Here
each rank looks at its own, and those that found nothing would step. So they agree on what was found, in `unscale_` or
`step`, and the factor, which only the last stage's loss asks for, begins as the same on all. Ranks may have different
numbers of optimizers, or none: those that are through wait in `update` for the others. The k-th of one rank is taken
for the k-th of each other: where each part of a model has an optimizer, that is so if it is given all of the part's
parameters on every rank, those without values too; optimizers of what is here alone are skipped together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

from partitioner.executor.calls import SCALER
from partitioner.executor.mesh import Mesh
from partitioner.executor.replaced import Replaced


class AgreedScaling:
    """While entered, scalers of optimizers that hold these parameters agree with those of the other ranks.

    Those of other stages are among them: where each part of a model has an optimizer, as on one device, every rank has
    all of them, and may hold no value of one.
    """

    def __init__(
        self, mesh: Mesh, parameters: Iterable[nn.Parameter], called: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        """`called`: around what all ranks do together, `Failures.called`."""
        self._mesh, self._called = mesh, called
        self._ours = set(map(id, parameters))
        self._agreeing: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        """Scalers of these parameters that have not been updated since."""
        self._replaced = (
            Replaced(GradScaler, "_unscale_grads_", self._unscaling),
            Replaced(GradScaler, "_check_scale_growth_tracker", self._checking),
            Replaced(GradScaler, "update", self._updating),
        )

    def enter(self) -> None:
        for one in self._replaced:
            one.enter()

    def leave(self) -> None:
        for one in self._replaced:
            one.leave()

    def _unscaling(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def _unscale_grads_(scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._agreed(scaler, optimizer, plain(scaler, optimizer, *args, **kwargs))

        return _unscale_grads_

    def _checking(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def _check_scale_growth_tracker(scaler: GradScaler, *args: Any) -> Any:
            if scaler._scale is None:
                scaler._lazy_init_scale_growth_tracker(self._mesh.device)
            return plain(scaler, *args)

        return _check_scale_growth_tracker

    def _updating(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def update(scaler: GradScaler, new_scale: Any = None) -> Any:
            nothing_scaled = scaler.is_enabled() and new_scale is None and not scaler._per_optimizer_states
            if scaler in self._agreeing or nothing_scaled:
                self._agreeing.discard(scaler)
                self._wait_for_others(scaler)
            return plain(scaler, new_scale)

        return update

    def _agreed(
        self, scaler: GradScaler, optimizer: torch.optim.Optimizer, found: dict[torch.device, torch.Tensor]
    ) -> dict[torch.device, torch.Tensor]:
        """What any rank found, by device; a rank without a gradient found nothing."""
        held = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        if self._ours.isdisjoint(held):
            return found
        found = found or {self._mesh.device: torch.zeros((), dtype=torch.float32, device=self._mesh.device)}
        here = max(float(one) for one in found.values())
        self._agreeing.add(scaler)
        most, _ = self._most(here, is_through=False)
        for one in found.values():
            one.fill_(most)
        return found

    def _wait_for_others(self, scaler: GradScaler) -> None:
        """Until no rank has a further optimizer; what these find moves the factor here too."""
        worst, is_going_on = self._most(0.0, is_through=True)
        if is_going_on and not scaler._per_optimizer_states:  # this rank had none to scale
            nothing = torch.zeros((), dtype=torch.float32, device=self._mesh.device)
            scaler._per_optimizer_states[0]["found_inf_per_device"] = {self._mesh.device: nothing}
        while is_going_on:
            most, is_going_on = self._most(0.0, is_through=True)
            worst = max(worst, most)
        for state in scaler._per_optimizer_states.values() if worst else ():
            for one in state["found_inf_per_device"].values():
                one.fill_(worst)

    def _most(self, found: float, is_through: bool) -> tuple[float, bool]:
        """What any rank found, and whether any has another optimizer."""
        with self._called(SCALER):
            here = torch.tensor([found, 0.0 if is_through else 1.0])
            dist.all_reduce(here, dist.ReduceOp.MAX, group=self._mesh.control)
            return float(here[0]), bool(here[1])
