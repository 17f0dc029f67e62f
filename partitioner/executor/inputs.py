"""Gradients of the inputs: for adversarial examples, saliency, prompts that are trained."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from partitioner.errors import ArgumentError
from partitioner.executor.mesh import Mesh
from partitioner.structures import tensors_in


class InputGradients:
    """Of inputs that require them, the sum over a replica's stages, on each of its ranks; added to what was there.

    Each stage has but the part that its own layers give. Costs nothing where no input requires a gradient.
    """

    def __init__(self, mesh: Mesh, inputs: Any) -> None:
        """inputs: the same on all ranks of a replica."""
        self._mesh = mesh
        found = {id(tensor): tensor for tensor in tensors_in(inputs) if tensor.requires_grad}
        self._inputs = list(found.values()) if mesh.num_stages > 1 else []
        for tensor in self._inputs:
            if not tensor.is_leaf:
                raise ArgumentError(
                    f"an input of shape {tuple(tensor.shape)} comes from other modules that are to be trained "
                    f"({type(tensor.grad_fn).__name__}): of each stage's backward they would get a part. Make them a "
                    "part of the model, or pass the input detached, with requires_grad_(), and its gradient on to them"
                )
        self._earlier = [tensor.grad for tensor in self._inputs]
        for tensor in self._inputs:
            tensor.grad = None

    def finish(self) -> None:
        """After the step's last backward."""
        with torch.no_grad():
            for tensor, earlier in zip(self._inputs, self._earlier, strict=True):
                own = tensor.grad
                total = (
                    torch.zeros(tensor.shape, dtype=tensor.dtype) if own is None else own.detach().cpu().contiguous()
                )
                count = torch.tensor(float(own is not None))
                real = torch.view_as_real(total) if total.is_complex() else total
                for one in (real, count):
                    dist.all_reduce(one, group=self._mesh.within_replica)
                total = total.to(tensor.device)
                tensor.grad = earlier if not count else total if earlier is None else earlier + total
