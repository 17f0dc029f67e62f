"""Why a model fails on the inputs that were given, told by its plain forward: the layer, what it got, what to change.

Nothing runs here until something failed. Then the model is called as its owner would call it, with the batch and with
a micro-batch, and the first fault of that is told as an `ArgumentError` with torch's own error as its cause. Where the
plain model runs, the fault is not the caller's, and the error stays as it was.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partitioner.errors import ArgumentError, PartitionerError, UnsupportedModelError
from partitioner.losses import Loss, LossFunction
from partitioner.microbatches import BatchDim, Cutter, MicroBatch
from partitioner.restore import untouched
from partitioner.structures import described, map_tensors, tensors_in
from partitioner.written import parameters_kept


class OnlyWholeError(ArgumentError):
    """The plain model runs the whole batch, and fails on a micro-batch of it."""


INPUTS = "example_inputs is a tensor (the only argument), a tuple (arguments in order) or a dict (keywords)"


@contextlib.contextmanager
def explained(
    model: nn.Module, batches: Sequence[MicroBatch], loss_fn: LossFunction | None, batch_dim: BatchDim
) -> Iterator[None]:
    """Around work that runs `model` on `batches`, the whole batch first, then its micro-batches."""
    try:
        yield
    except Exception as error:
        unfollowed = isinstance(error, UnsupportedModelError) and isinstance(error.__cause__, (RuntimeError, TypeError))
        if isinstance(error, PartitionerError) and not unfollowed:
            raise
        with untouched(model), parameters_kept(model):
            told = _fault(model, batches, loss_fn, batch_dim)
        if told is None:
            raise
        raise told from error


def _fault(
    model: nn.Module, batches: Sequence[MicroBatch], loss_fn: LossFunction | None, batch_dim: BatchDim
) -> ArgumentError | None:
    whole = batches[0].samples
    for batch in batches:
        args, kwargs, target = map_tensors((batch.args, batch.kwargs, batch.target), copy_of)
        if any(parameter.is_meta for parameter in model.parameters()):
            args, kwargs, target = map_tensors((args, kwargs, target), lambda tensor: tensor.to("meta"))
        cut = ""
        if batch.samples < whole:
            said: Mapping[Any, int | None] = {}
            if batch_dim:
                said = batch_dim if isinstance(batch_dim, Mapping) else {"*": batch_dim}
            elsewhere = {**said, **(_elsewhere(model, batches[0], batch_dim) or {"mask": None})}
            cut = (
                f"; the whole batch runs, micro-batches do not: batch_dim={batch_dim} counts {whole} samples, of which "
                f"this one has {batch.samples}. Say along which dimension the samples of an argument lie, or that it "
                f"holds none (batch_dim={elsewhere}), or, where the "
                "batch is no number of samples side by side (one graph, a state between batches), leave it whole: "
                "microbatches=1 with mesh={'pp': ..., 'dp': 1}"
            )
        output, told = _forward(model, args, kwargs, cut)
        if told is not None or output is None:
            return told
        try:
            Loss(model, loss_fn, None).of(output, target)
        except PartitionerError:
            return None
        except Exception as error:
            return _with_cause(
                f"loss_fn raised {_shown_error(error)}; the model gave {described(output)}, the target is "
                f"{described(target)}{cut or ': change example_target or loss_fn'}",
                error,
                OnlyWholeError if cut else ArgumentError,
            )
    return None


def _elsewhere(model: nn.Module, whole: MicroBatch, batch_dim: BatchDim) -> dict[str, int]:
    """Arguments that have as many entries as there are samples along another dimension than was said."""
    cutter = Cutter(batch_dim)
    names = list(inspect.signature(model.forward).parameters)
    arguments: list[tuple[int | str, Any]] = [*enumerate(whole.args), *whole.kwargs.items(), ("target", whole.target)]
    found = {}
    for key, value in arguments:
        dim = cutter.dim_of(key)
        for tensor in tensors_in(value):
            is_cut = dim is None or (tensor.dim() > dim and tensor.shape[dim] == whole.samples)
            if not is_cut and whole.samples in tensor.shape:
                name = names[key] if isinstance(key, int) and key < len(names) else str(key)
                found[name] = tensor.shape.index(whole.samples)
    return found


def _forward(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cut: str
) -> tuple[Any, ArgumentError | None]:
    """What the model returns, or why it does not."""
    given = ", ".join([*map(described, args), *(f"{name}={described(value)}" for name, value in kwargs.items())])
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(inspect.signature(model.forward).parameters)
        return None, _with_cause(
            f"{type(model).__name__}.forward({takes}) cannot be called with ({given}): {error}. {INPUTS}", error
        )
    except ValueError:
        pass  # a forward without a signature
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    running: list[tuple[nn.Module, Any]] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append((module, (*args, *kwargs.values())))

    def leave(*_: Any) -> None:
        running.pop()

    hooks = [
        hook
        for module in set(model.modules())
        for hook in (
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        )
    ]
    try:
        return model(*args, **kwargs), None
    except PartitionerError:
        raise
    except Exception as error:
        if isinstance(error, NotImplementedError) or "meta" in str(error).lower() or "item()" in str(error):
            return None, None  # it needs values, and on meta there are none: no fault of the inputs
        kind = OnlyWholeError if cut else ArgumentError
        module, got = running[-1] if running else (model, (*args, *kwargs.values()))
        raised = f"raised {_shown_error(error)}"
        called = f"{type(model).__name__} was called with ({given}){cut or ': change example_inputs, or the model'}"
        if module is model:
            return None, _with_cause(f"the model's forward {raised}; {called}", error, kind)
        layer = f"layer {names[id(module)]}, {_shown_layer(module)}"
        values = ", ".join(described(value) for value in got)
        return None, _with_cause(f"{layer}, was given {values} and {raised}; {called}", error, kind)
    finally:
        for hook in hooks:
            hook.remove()


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same values that a run may write into; one that needs gradients gets none of the run's."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _with_cause(text: str, error: Exception, kind: type[ArgumentError] = ArgumentError) -> ArgumentError:
    told = kind(text)
    told.__cause__ = error
    return told


def _shown_layer(module: nn.Module) -> str:
    """As torch prints it, where that is one short line."""
    printed = repr(module)
    return printed if "\n" not in printed and len(printed) <= 100 else type(module).__name__


def _shown_error(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'without a message'}{line_of(error)}"


def line_of(error: BaseException) -> str:
    """ " (file, line n)" of the user's own code that the error came through last; "" where it came through none."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(NOT_THEIRS)]
    return f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""


NOT_THEIRS = (
    str(Path(__file__).parent) + os.sep,
    *{path for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))},
    "<",
)
"""Where files begin that are ours, Python's or installed."""
