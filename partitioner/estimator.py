"""A Profile with no device: kernels of the real forward and backward, priced by what the named device achieves.

capture      one forward on the meta device: layers and the tensors between them
kernels      forward and backward on the meta device: what each layer launches
rates        seconds of each launch

Every figure is an estimate within its band (`Planner.band_of`), and says so: provenance "estimated".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from partitioner.arguments import check_timed_optimizer
from partitioner.capture import Capture, capture
from partitioner.kernels import record_work
from partitioner.losses import LossFunction
from partitioner.metarun import choose_layers, on_meta
from partitioner.microbatches import BatchDim, Cutter, MicroBatch, as_call, named_dims, usual_sizes
from partitioner.profiles import Layer, LayerCost, Profile, Tensor
from partitioner.progress import Progress, shown
from partitioner.rates import Precision
from partitioner.restore import untouched
from partitioner.specs import OPTIMIZER_BYTES
from partitioner.steps import Layout, Planner, planner
from partitioner.structures import map_tensors
from partitioner.tracing import unwrap
from partitioner.trial import explained
from partitioner.work import LayerWork, ModelWork


def estimate(
    model: nn.Module,
    example_inputs: Any,
    *,
    device: str = "H100",
    precision: Precision = "fp32",
    loss_fn: LossFunction | None = None,
    example_target: Any = None,
    batch_dim: BatchDim = 0,
    microbatch_sizes: Sequence[int] | None = None,
    max_share: float = 1 / 16,
    optimizer: str = "adamw",
    fused: bool = False,
    hardware: str | None = None,
    progress: bool | Progress | None = None,
) -> Profile:
    """Costs of every layer on a device that need not be here. The model may live on meta, and is left as it was.

    `example_inputs`: one batch (tensor, tuple = arguments, dict = keywords). `device`: its name in the catalog or in
    the user's own file (`hardware`). `precision`: what the step is run in; bytes and rates follow. `fused`: elementwise
    chains run as one kernel (torch.compile). `microbatch_sizes`: samples; None: an eighth and a half of the batch, of
    two or more.
    Each layer's spread is the error band of the constants, times its seconds.
    """
    check_timed_optimizer(optimizer)
    model = unwrap(model)
    batch_dim = named_dims(model, batch_dim)
    args, kwargs = as_call(example_inputs)
    cutter = Cutter(batch_dim)
    batch = max(1, cutter.batch_size(args, kwargs))
    sizes = tuple(sorted(set(usual_sizes(batch) if microbatch_sizes is None else microbatch_sizes)))
    part = cutter.cut(args, kwargs, example_target, max(1, batch // sizes[-1]))[0]
    fails = explained(model, [MicroBatch(args, kwargs, example_target, batch), part], loss_fn, batch_dim)
    with fails, shown(progress) as tell:
        tell("following the forward", 0.0)
        captured = _captured(model, part.args, part.kwargs, max_share)
        tell("recording kernels", 0.4)
        work = record_work(
            model,
            example_inputs,
            [layer.id for layer in captured.layers],
            loss_fn=loss_fn,
            example_target=example_target,
            batch_dim=batch_dim,
        )
        prices = planner(work, device, precision=precision, hardware=hardware)
        tell("pricing", 0.9)
        layers = _layers(captured, work, prices, sizes, fused)
    recorded = part.samples
    narrow = prices.precision not in ("fp32", "tf32")
    return Profile(
        **captured.structure(),
        layers=layers,
        tensors=tuple(
            Tensor(
                id=tensor.id,
                producer=tensor.producer,
                consumers=tensor.consumers,
                shape=tensor.shape,
                dtype="bfloat16" if narrow and tensor.dtype == "float32" else tensor.dtype,
                bytes_at=tuple(
                    _bytes_at(tensor.nbytes, tensor.shape, cutter.batch_dim, recorded, size)
                    // (2 if narrow and tensor.dtype == "float32" else 1)
                    for size in sizes
                ),
                needs_gradient=tensor.needs_gradient,
            )
            for tensor in captured.tensors
        ),
        microbatch_sizes=sizes,
        optimizer_s=_optimizer_seconds(work, prices, optimizer),
        optimizer=optimizer,
        batch_dim=batch_dim,
        device=prices.rates.name,
        device_kind="cuda",
        dtype=_dtype(model),
        torch_version=torch.__version__,
        provenance="estimated",
    )


def estimate_work(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: LossFunction | None = None,
    example_target: Any = None,
    batch_dim: BatchDim = 0,
    max_share: float = 1 / 16,
) -> ModelWork:
    """What each layer of a model runs: what `steps.training_step` prices for any device and layout.

    Layers are chosen by their share of the parameters, with no capture: seconds for a model of 70B parameters.
    """
    layers = choose_layers(model, example_inputs, batch_dim=batch_dim, max_share=max_share)
    return record_work(
        model, example_inputs, layers, loss_fn=loss_fn, example_target=example_target, batch_dim=batch_dim
    )


def _captured(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], max_share: float) -> Capture:
    """The capture on the meta device; of the real model where values decide."""
    try:
        with untouched(model), on_meta(model):
            moved = map_tensors((args, kwargs), lambda tensor: tensor.detach().to("meta"))
            return capture(model, *moved, max_share=max_share)
    except (RuntimeError, NotImplementedError, TypeError):
        return capture(model, args, kwargs, max_share=max_share)


def _bytes_at(nbytes: int, shape: tuple[int, ...], batch_dim: int, recorded: int, size: int) -> int:
    """A tensor's bytes at another micro-batch size: in proportion, where it has the samples' dimension."""
    grows = any(extent and extent % recorded == 0 for extent in shape[: batch_dim + 1]) if shape else False
    return nbytes * size // recorded if grows else nbytes


def _layers(
    captured: Capture, work: ModelWork, prices: Planner, sizes: tuple[int, ...], fused: bool
) -> tuple[Layer, ...]:
    costs: dict[tuple[int, int], LayerCost] = {}

    def cost(layer: LayerWork, size: int) -> LayerCost:
        key = (id(layer), size)
        if key not in costs:
            seconds = prices.layer(layer, Layout(microbatch=size, fused=fused))
            forward, backward, band = max(seconds.forward), max(seconds.backward), prices.band_of([seconds])
            narrow = 0.5 if prices.precision not in ("fp32", "tf32") else 0.0
            costs[key] = LayerCost(
                samples=size,
                forward_s=forward,
                backward_s=backward,
                forward_spread_s=band * forward,
                backward_spread_s=band * backward,
                backward_input_s=max(0.0, backward - seconds.weight_s),
                backward_weight_s=min(backward, seconds.weight_s),
                saved_bytes=round(layer.saved_bytes - narrow * layer.saved_float32_bytes),
                flops=sum(kernel.flops for kernel in layer.forward),
            )
        return costs[key]

    return captured.priced(
        {layer.id: [cost(work.at(size)[k], size) for size in sizes] for k, layer in enumerate(captured.layers)}
    )


def _optimizer_seconds(work: ModelWork, prices: Planner, optimizer: str) -> float:
    """One step over the whole model: parameter and gradient read, parameter written, state read and written."""
    state = OPTIMIZER_BYTES.get(optimizer)
    if state is None:
        return 0.0
    return prices.optimizer_seconds(work.parameters, Layout(), 12.0 + 2 * state)


def _dtype(model: nn.Module) -> str:
    dtypes = Counter(parameter.dtype for parameter in model.parameters())
    return str(dtypes.most_common(1)[0][0]).removeprefix("torch.") if dtypes else "float32"
