"""torch.amp.GradScaler over the ranks of a plan: a step that the gradients of one stage forbid is a step of none.

On one device a scaler looks at all gradients and skips the optimizer's step where any of them is infinite. Here each
rank looks at its own, and those that found nothing would step. So they agree on what was found, in `unscale_` or
`step`, and the factor, which only the last stage's loss asks for, begins as the same on all. Ranks may have different
numbers of optimizers: those that are through wait in `update` for the others.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

from partitioner.errors import RankError
from partitioner.executor.mesh import Mesh


class AgreedScaling:
    """While entered, scalers of optimizers that hold these parameters agree with those of the other ranks.

    Those of other stages are among them: where each part of a model has an optimizer, as on one device, every rank has
    all of them, and may hold no value of one.
    """

    def __init__(self, mesh: Mesh, parameters: Iterable[nn.Parameter]) -> None:
        self._mesh = mesh
        self._ours = set(map(id, parameters))
        self._active = False
        self._agreeing: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        """Scalers of these parameters that have not been updated since."""

    def enter(self) -> None:
        self._active = True
        self._unscale, self._check = GradScaler._unscale_grads_, GradScaler._check_scale_growth_tracker
        self._update = GradScaler.update
        agreed, unscale, check, plain = self._agreed, self._unscale, self._check, self._update

        def _unscale_grads_(scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return agreed(scaler, optimizer, unscale(scaler, optimizer, *args, **kwargs))

        def _check_scale_growth_tracker(scaler: GradScaler, *args: Any) -> Any:
            if self._active and scaler._scale is None:
                scaler._lazy_init_scale_growth_tracker(self._mesh.device)
            return check(scaler, *args)

        def update(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
            if self._active and scaler in self._agreeing:
                self._agreeing.discard(scaler)
                self._wait_for_others(scaler)
            return plain(scaler, *args, **kwargs)

        self._patched = _unscale_grads_
        GradScaler.update = functools.update_wrapper(update, plain)  # type: ignore[method-assign, assignment]
        GradScaler._unscale_grads_ = _unscale_grads_  # type: ignore[method-assign, assignment]
        GradScaler._check_scale_growth_tracker = _check_scale_growth_tracker  # type: ignore[method-assign, assignment]

    def leave(self) -> None:
        """As before, unless another stage has been entered since: then its functions go on through these."""
        self._active = False
        if GradScaler._unscale_grads_ is self._patched:
            GradScaler._unscale_grads_ = self._unscale  # type: ignore[method-assign]
            GradScaler._check_scale_growth_tracker = self._check  # type: ignore[method-assign]
            GradScaler.update = self._update  # type: ignore[method-assign]

    def _agreed(
        self, scaler: GradScaler, optimizer: torch.optim.Optimizer, found: dict[torch.device, torch.Tensor]
    ) -> dict[torch.device, torch.Tensor]:
        """What any rank found, by device; a rank without a gradient found nothing."""
        held = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        if not self._active or self._ours.isdisjoint(held):
            return found
        found = found or {self._mesh.device: torch.zeros((), dtype=torch.float32, device=self._mesh.device)}
        here = max(float(one) for one in found.values())
        self._agreeing.add(scaler)
        most, _ = self._most(here, is_through=False)
        for one in found.values():
            one.fill_(most)
        return found

    def _wait_for_others(self, scaler: GradScaler) -> None:
        """Until no rank has a further optimizer; what these find lowers the factor here too."""
        most, is_going_on = self._most(0.0, is_through=True)
        while is_going_on:
            if most:
                for state in scaler._per_optimizer_states.values():
                    for one in state["found_inf_per_device"].values():
                        one.fill_(most)
            most, is_going_on = self._most(0.0, is_through=True)

    def _most(self, found: float, is_through: bool) -> tuple[float, bool]:
        """What any rank found, and whether any has another optimizer."""
        here = torch.tensor([found, 0.0 if is_through else 1.0])
        try:
            dist.all_reduce(here, dist.ReduceOp.MAX, group=self._mesh.control)
        except RuntimeError as error:
            raise RankError(
                f"rank {self._mesh.rank} waited in GradScaler's {'update' if is_through else 'step'} for the other "
                "ranks to call the same: each optimizer's unscale_ or step, and update, belong on all ranks alike, "
                f"also where a rank has nothing to do or skips a step by its own loss ({error})",
                rank=self._mesh.rank,
            ) from error
        return float(here[0]), bool(here[1])
