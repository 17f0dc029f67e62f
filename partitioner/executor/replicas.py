"""Pure replicas: DistributedDataParallel around the whole model and its loss.

DDP averages gradients over replicas; each loss is scaled up by their number, so that the weighted sum comes out. The
loss is inside, so that DDP finds unused parameters from what is really differentiated, and so that a micro-batch that
counts for nothing can still take part: its loss touches every parameter with an empty sum. Forward and backward of a
micro-batch follow each other: DDP would take any backward after the last forward for the one to reduce in.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from partitioner.executor.mesh import Mesh
from partitioner.losses import Loss, Weight
from partitioner.microbatches import MicroBatch


class Replicas:
    """Runs forward and backward of micro-batches; the backward of the last one reduces the gradients."""

    def __init__(self, mesh: Mesh, model: nn.Module, loss: Loss) -> None:
        self._scale = float(mesh.num_replicas)
        self._inner = _WithLoss(model, loss, mesh.device)
        group = next(iter(mesh.owners.values()))
        settings: dict[str, Any] = {"process_group": group, "find_unused_parameters": True}
        newer = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        settings["forward_sync_buffers" if newer else "broadcast_buffers"] = False
        sparse = [name for name, buffer in self._inner.named_buffers() if buffer.layout != torch.strided]
        ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(self._inner, sparse)  # it cannot send them
        self._outer = DistributedDataParallel(self._inner, **settings)

    def forward(self, microbatch: MicroBatch, share: Weight, is_last: bool) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """What to differentiate, the micro-batch's part of the loss, and the model's output."""
        with self.syncing(is_last):
            root = self._outer(microbatch, share, self._scale)
        part = root.detach() / self._scale
        output, self._inner.output = self._inner.output, None
        return root, part, output

    def syncing(self, is_last: bool) -> AbstractContextManager[None]:
        """Gradients are reduced in the backward of the last micro-batch only."""
        return nullcontext() if is_last else self._outer.no_sync()


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss: Loss, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.never_used = nn.Parameter(
            torch.zeros((), device=device)
        )  # DDP warns where it looks for one and finds none
        self._loss = loss
        self.output: Any = None

    def forward(self, microbatch: MicroBatch, share: Weight, scale: float) -> torch.Tensor:
        self.output = self.model(*microbatch.args, **microbatch.kwargs)
        part = self._loss.part(self.output, microbatch.target, share) * scale
        if any(share) if isinstance(share, tuple) else share:
            return part
        touched = [p.reshape(-1)[:0].sum().abs().float() for p in self.model.parameters() if p.requires_grad]
        return torch.stack(touched).sum()
