"""What stands on a rank for the parameters and buffers of other stages: shape and dtype over one single value, NaN.

All ranks run the same lines of the user's: `stage.module.load_state_dict(weights)`, `stage.module.eval()` where layers
merge their weights then, an average of weights. A write into a placeholder does nothing here: the rank that has
the values makes it. What would carry a placeholder's nothing into something real is refused by name:

    placeholder.copy_(x)    nothing                     own.copy_(placeholder)    ArgumentError
    placeholder.data -= x   nothing                     torch.save(placeholder)   ArgumentError
    placeholder.shape       as the parameter's          copy.deepcopy(...)        a placeholder
    placeholder.norm()      again one that holds nothing: if norm > 5, own.mul_(norm) are ArgumentErrors
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from partitioner.errors import ArgumentError
from partitioner.structures import tensors_in
from partitioner.tracing import function_name

_WRITING = frozenset(f"__{name}__" for name in "setitem iadd isub imul itruediv idiv ifloordiv imod ipow".split())
_NOT_WRITING = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_"})


class _Nothing:
    """The behaviour; `label` names the tensor and its stage."""

    label: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        if name in ("__reduce_ex__", "__reduce__"):
            raise ArgumentError(
                f"{_label(args)} would be saved without its values, which are on the ranks of that stage: save "
                "stage.full_state_dict() on rank 0 (all ranks call it), or call stage.save_checkpoint(folder)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if name.startswith("_foreach_") and name.endswith("_"):
                return _each_real(func, args, kwargs)
            if name == "set data":
                return _set_data(*args)
            if name in _WRITING or (name[-1] == "_" and name[-2] != "_" and name not in _NOT_WRITING):
                target = args[0] if args else next(iter(kwargs.values()))
            else:
                target = kwargs.get("out")
            if isinstance(target, _Nothing):
                return target
            if isinstance(target, torch.Tensor):
                _refuse(name, (args, kwargs))
            if name == "__bool__":
                raise ArgumentError(
                    f"what a rank does would be decided by {_label(args)}, which has no values here: do it within the "
                    "stage, for the names in stage.named_parameters()"
                )
            result = func(*args, **kwargs)
            if name.startswith(("get grad", "get _", "new_")) or name.endswith("_like") or name == "isnan":
                return result
            return _named(result, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _copied(self, memo)


class Placeholder(_Nothing, nn.Parameter):
    """Of a parameter."""


class BufferPlaceholder(_Nothing, torch.Tensor):
    """Of a buffer; what is made of either."""


def make_placeholder(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor's shape over one single value: NaN, or the least there is."""
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        value: float = float("nan")
    else:
        value = 0 if dtype == torch.bool else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=device).expand(tensor.shape)


def stands_in(tensor: torch.Tensor, name: str, stage: int) -> None:
    """Let a tensor with a placeholder's data behave as one, unless its class has a behaviour of its own."""
    if type(tensor) in (nn.Parameter, torch.Tensor):
        tensor.__class__ = Placeholder if isinstance(tensor, nn.Parameter) else BufferPlaceholder
    if isinstance(tensor, _Nothing):
        tensor.label = f"{name} of stage {stage}"


def stands_in_no_more(tensor: torch.Tensor) -> None:
    """It gets values."""
    if issubclass(type(tensor), _Nothing):
        tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
        vars(tensor).pop("label", None)


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether it holds nothing, here."""
    if isinstance(tensor, _Nothing):
        return True
    if tensor.is_meta or not tensor.numel() or (tensor.numel() > 1 and set(tensor.stride()) != {0}):
        return False
    return bool(tensor.detach()[(0,) * tensor.dim()].isnan())


def _label(values: Any) -> str:
    return next(one.label for one in tensors_in(values) if isinstance(one, _Nothing))


def _refuse(name: str, values: Any) -> None:
    raise ArgumentError(
        f"{name} would write into a tensor of this rank what {_label(values)} holds, which has no values here: do it "
        "within the stage, for the names in stage.named_parameters(), or on the model before materialize"
    )


def _copied(tensor: Any, memo: dict[int, Any]) -> Any:
    if id(tensor) not in memo:
        data = make_placeholder(tensor, tensor.device)
        made = nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
        made.__class__ = type(tensor)
        made.label = tensor.label  # type: ignore[attr-defined]
        memo[id(tensor)] = made
    return memo[id(tensor)]


def _set_data(target: torch.Tensor, value: torch.Tensor) -> None:
    """A placeholder becomes one of the value's kind: another dtype or device, as by module.half()."""
    if isinstance(target, _Nothing):
        torch.Tensor.data.__set__(target, make_placeholder(value, value.device))  # type: ignore[attr-defined]
    else:
        _refuse("setting .data", value)


def _each_real(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function in place over lists: done for those that are here."""
    kept = [k for k, one in enumerate(args[0]) if not isinstance(one, _Nothing)]
    count = len(args[0])

    def some(value: Any) -> Any:
        return [value[k] for k in kept] if isinstance(value, (list, tuple)) and len(value) == count else value

    args, kwargs = [some(one) for one in args], {name: some(one) for name, one in kwargs.items()}
    if any(isinstance(one, _Nothing) for one in tensors_in((args, kwargs))):
        _refuse(function_name(func), (args, kwargs))
    return func(*args, **kwargs) if kept else None


def _named(result: Any, args: Any, kwargs: Any) -> Any:
    """What is made of a placeholder is one: a view, a norm, a comparison."""
    if isinstance(result, (list, tuple)):
        return type(result)([_named(part, args, kwargs) for part in result])
    if not isinstance(result, torch.Tensor) or isinstance(result, _Nothing):
        return result
    if result.is_meta or result.layout != torch.strided:
        return result
    found = result.as_subclass(BufferPlaceholder)
    found.label = _label((args, kwargs))
    return found
