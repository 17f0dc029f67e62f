"""torch.amp.GradScaler over the ranks of a plan: a step that the gradients of one stage forbid is a step of none.

On one device a scaler looks at all gradients and skips the optimizer's step where any of them is infinite. Here each
rank looks at its own, and those that found nothing would step. So they agree on what was found, in `unscale_` or
`step`, and the factor, which only the last stage's loss asks for, begins as the same on all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

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

    def enter(self) -> None:
        self._active = True
        self._unscale, self._check = GradScaler._unscale_grads_, GradScaler._check_scale_growth_tracker
        agreed, unscale, check = self._agreed, self._unscale, self._check

        def _unscale_grads_(scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return agreed(optimizer, unscale(scaler, optimizer, *args, **kwargs))

        def _check_scale_growth_tracker(scaler: GradScaler, *args: Any) -> Any:
            if self._active and scaler._scale is None:
                scaler._lazy_init_scale_growth_tracker(self._mesh.device)
            return check(scaler, *args)

        self._patched = _unscale_grads_
        GradScaler._unscale_grads_ = _unscale_grads_  # type: ignore[method-assign, assignment]
        GradScaler._check_scale_growth_tracker = _check_scale_growth_tracker  # type: ignore[method-assign, assignment]

    def leave(self) -> None:
        """As before, unless another stage has been entered since: then its functions go on through these."""
        self._active = False
        if GradScaler._unscale_grads_ is self._patched:
            GradScaler._unscale_grads_ = self._unscale  # type: ignore[method-assign]
            GradScaler._check_scale_growth_tracker = self._check  # type: ignore[method-assign]

    def _agreed(
        self, optimizer: torch.optim.Optimizer, found: dict[torch.device, torch.Tensor]
    ) -> dict[torch.device, torch.Tensor]:
        """What any rank found, by device; a rank without a gradient found nothing."""
        held = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        if not self._active or self._ours.isdisjoint(held):
            return found
        found = found or {self._mesh.device: torch.zeros((), dtype=torch.float32, device=self._mesh.device)}
        most = torch.stack([one.detach().cpu().float() for one in found.values()]).max()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._mesh.control)
        for one in found.values():
            one.fill_(most.item())
        return found
