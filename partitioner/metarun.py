"""Run a model without its memory: parameters on the meta device, operators answered by their shapes, layers chosen.

Nothing is computed and nothing is allocated; the model is as before afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.errors import UnsupportedModelError
from partitioner.microbatches import BatchDim, as_call
from partitioner.restore import untouched
from partitioner.structures import map_tensors
from partitioner.tracing import unwrap


def choose_layers(
    model: nn.Module, example_inputs: Any, *, batch_dim: BatchDim = 0, max_share: float = 1 / 16
) -> tuple[str, ...]:
    """Layers for `record_work`, in the order of their calls: modules with at most `max_share` of the parameters.

    Larger ones are opened to their children. Much faster than a capture, and without its promise that the model can be
    cut there. A module that is called again is a layer again ("norm#1"); modules without parameters only count where
    nothing around them is a layer.
    """
    model = unwrap(model)
    args, kwargs = as_call(example_inputs)
    total = sum(parameter.numel() for parameter in model.parameters()) or 1
    chosen: list[str] = []

    def open_up(path: str, module: nn.Module) -> None:
        children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
        size = sum(parameter.numel() for parameter in module.parameters())
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        is_list = type(module).forward is nn.Module.forward or isinstance(module, nn.Sequential)
        if path and not is_list and (not children or own or size <= max_share * total):
            chosen.append(path)
        for child_path, child in children if not path or path != (chosen or [""])[-1] else ():
            open_up(child_path, child)

    open_up("", model)
    try:
        with untouched(model), on_meta(model), torch.no_grad(), _PlainAttention(), Shapes():
            moved = map_tensors((args, kwargs), lambda tensor: tensor.detach().to("meta"))
            return _order(model, chosen, *moved)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        refuse_without_values(model, error)
    with untouched(model), torch.no_grad():
        return _order(model, chosen, args, kwargs)


def _order(model: nn.Module, paths: list[str], args: Any, kwargs: Any) -> tuple[str, ...]:
    order: list[str] = []
    with layer_calls(model, paths, order.append):
        model(*args, **kwargs)
    return tuple(order)


@contextmanager
def layer_calls(
    model: nn.Module,
    paths: Iterable[str],
    begin: Callable[[str], None],
    end: Callable[[Any], None] | None = None,
) -> Iterator[None]:
    """Tell `begin` the id of each layer whose call begins ("norm", then "norm#1"), and `end` what a call returns."""
    calls: Counter[str] = Counter()

    def begins(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            count, calls[path] = calls[path], calls[path] + 1
            begin(f"{path}#{count}" if count else path)

        return hook

    def ends(_module: nn.Module, _args: Any, output: Any) -> None:
        assert end is not None
        end(output)

    handles: list[Any] = []
    try:
        for path in dict.fromkeys(paths):
            module = model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(begins(path), prepend=True))
            if end is not None:
                handles.append(module.register_forward_hook(ends))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def on_meta(model: nn.Module) -> Iterator[None]:
    """The model's parameters, buffers and tensors kept in attributes on the meta device, shared ones still shared."""
    made: dict[int, torch.Tensor] = {}
    undo: list[tuple[dict[str, Any], str, Any]] = []

    def bare(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            data = tensor.detach().to("meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(data, requires_grad=tensor.requires_grad) if is_parameter else data
        return made[id(tensor)]

    for module in model.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers, module.__dict__]
        for table in tables:
            for name, value in list(table.items()):
                if isinstance(value, torch.Tensor) and not (value.is_meta and value.grad is None):
                    undo.append((table, name, value))
                    table[name] = bare(value)
    try:
        with torch.device("meta"):
            yield
    finally:
        for table, name, value in undo:
            table[name] = value


def refuse_without_values(model: nn.Module, error: Exception) -> None:
    """Nothing where the model is real and can be run instead."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise UnsupportedModelError(
            f"the model cannot be followed without its values ({why}): pass it with real parameters, and it is run once"
        ) from error


class Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers an operator on the meta device from the shapes of a call alike: equal layers are worked out once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pure: dict[Any, bool] = {}
        """Operator -> whether it neither writes into its arguments nor returns views of them."""
        self.seen: dict[Any, tuple[Any, list[Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.outcome(func, args, kwargs or {})

    def outcome(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operator returns."""
        if func not in self.pure:
            self.pure[func] = not any(one.alias_info for one in (*func._schema.arguments, *func._schema.returns))
        key = (func, _look(args), _look(tuple(kwargs.items()))) if self.pure[func] else None
        if key is None or None in key:
            return func(*args, **kwargs)
        if key not in self.seen:
            out = func(*args, **kwargs)
            tensors = out if isinstance(out, (tuple, list)) else (out,)
            if not all(type(t) is torch.Tensor and t.is_meta and t.layout == torch.strided for t in tensors):
                return out
            self.seen[key] = (type(out), [(t.shape, t.stride(), t.dtype) for t in tensors])
            return out
        kind, shapes = self.seen[key]
        made = [torch.empty_strided(*size, dtype=dtype, device="meta") for *size, dtype in shapes]
        return made[0] if kind is torch.Tensor else kind(made)


class _PlainAttention(TorchFunctionMode):
    """Fused attention as a shape alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return args[0].new_empty((*args[0].shape[:-1], args[2].shape[-1]))
        return func(*args, **(kwargs or {}))


def _look(value: Any) -> Any:
    """Something hashable, equal for arguments with equal outcomes on the meta device; None: there is no telling."""
    if isinstance(value, torch.Tensor):
        plain = type(value) in (torch.Tensor, nn.Parameter) and value.is_meta and value.layout == torch.strided
        return (value.shape, value.stride(), value.dtype) if plain else None
    if isinstance(value, (tuple, list)):
        items = tuple(_look(item) for item in value)
        return None if None in items else items
    if value is None:
        return ()
    return (
        (type(value), value) if isinstance(value, (int, float, str, torch.dtype, torch.device, torch.layout)) else None
    )
