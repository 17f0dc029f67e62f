"""A tensor of another stage: looks like one, holds nothing."""

from __future__ import annotations

from typing import Any

import torch

from partitioner.errors import UnsupportedModelError
from partitioner.logbook import Made
from partitioner.structures import tensors_in
from partitioner.tracing import forward_here, watcher_here


class StandIn(torch.Tensor):
    """Has the shape, strides, dtype and device that were logged; computing with it is an error that names it."""

    label: str
    holds_nothing = True

    @staticmethod
    def __new__(cls, made: Made, label: str, device: torch.device | None) -> StandIn:
        stand_in: StandIn = torch.Tensor._make_wrapper_subclass(
            cls,
            made.shape,
            strides=made.stride,
            dtype=getattr(torch, made.dtype),
            device=device or torch.device(made.device),
            requires_grad=made.requires_grad,
        )
        stand_in.label = label
        return stand_in

    @classmethod
    def like(cls, tensor: torch.Tensor, label: str, device: torch.device | None) -> StandIn:
        return cls(Made.of(tensor), label, device)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        labels = [tensor.label for tensor in tensors_in((args, kwargs)) if isinstance(tensor, StandIn)]
        who = (
            "the forward reads it where the captured one did not. Pin the layers around it to one stage "
            "(pin={layer: stage})"
        )
        if forward_here() is None:
            who = (
                "the loss, a hook or code after the forward reads it. Plan with this very loss (loss_fn=), or return "
                "the tensor from the forward"
            )
        error = UnsupportedModelError(
            f"{func} needs the tensor {labels[0]!r}, which an earlier stage makes and did not send: {who}"
        )
        watcher = watcher_here()
        if watcher is not None:
            watcher.failed(error)
        raise error


def exchange(first: torch.Tensor, second: torch.Tensor) -> None:
    """Let two tensor objects swap all that they are; every reference to one of them then finds the other's values.

    As torch.utils.swap_tensors, but what C++ still holds (the base of a view) is left behind rather than refused.
    """
    try:
        torch._C._swap_tensor_impl(first, second)
    except RuntimeError as error:  # torch refuses while there are weak references to either
        raise UnsupportedModelError(
            "a tensor of another stage is weakly referenced, by the model or by a torch.profiler that records "
            "shapes or memory: run without that, or pin the layers around it to one stage"
        ) from error
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__


class unrecorded:
    """Inside: torch.profiler sees no operations, so that it keeps no weak references to the tensors made."""

    def __enter__(self) -> None:
        torch._C._autograd._enable_record_function(False)

    def __exit__(self, *error: object) -> None:
        torch._C._autograd._enable_record_function(True)
