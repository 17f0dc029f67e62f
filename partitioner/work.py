"""What a model's layers run, kernel by kernel: FLOPs, bytes and shapes, with no device and no clock.

Recorded by `kernels` from the model's own forward and backward on tensors without memory, at one or two micro-batch
sizes; every figure is a straight line between them. Priced by `rates`, put together to a training step by `steps`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

KernelKind = Literal[
    "matmul", "attention", "convolution", "norm", "softmax", "elementwise", "reduction", "embedding", "copy"
]


class Kernel(NamedTuple):
    """One launch. Sizes are whole, before any tensor parallelism; `split` and `sharded` say what that divides."""

    kind: KernelKind
    name: str
    """The torch operator, e.g. "mm", "_softmax"."""
    flops: float
    moved_bytes: float
    """Read and written, each tensor once."""
    float32_share: float
    """Share of `moved_bytes` that is 32-bit floats: what a precision of 16 bits halves."""
    shape: tuple[float, float, float, float] = (0, 0, 0, 0)
    """Of a matmul: batch, m, n, k."""
    split: Literal["", "batch", "m", "n", "k"] = ""
    """The dimension of `shape` that tensor parallelism divides."""
    sharded: bool = False
    """Works on tensors that tensor parallelism divides; the others are whole on each rank (sequence parallelism
    divides them too)."""
    weight: bool = False
    """In the backward: makes the gradient of a parameter (W of a split backward), not of an input (I)."""
    linear: bool = False
    """A matmul with a parameter, forward or backward: what fp8 narrows."""
    fused_bytes: float = 0.0
    """Bytes moved where chains of elementwise operators run as one kernel: those that leave or enter the chain."""
    fused_launches: int = 1
    """0 where a chain has swallowed it."""


@dataclass(frozen=True)
class LayerWork:
    """One layer at one micro-batch size. Bytes are in the recorded dtypes; `*_float32_bytes` is the part in fp32."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    saved_bytes: float = 0
    """What autograd keeps from forward to backward, storages once, parameters left out."""
    saved_float32_bytes: float = 0
    saved_sharded_bytes: float = 0
    """The part of `saved_bytes` that tensor parallelism divides."""
    output_bytes: float = 0
    """What the layer hands on."""
    output_float32_bytes: float = 0
    parameters: float = 0
    """Elements; shared parameters count in the first layer that uses them."""
    sharded_parameters: float = 0
    """The part that tensor parallelism divides (weights of split matmuls, their biases, vocabulary tables)."""
    forward_reduces: tuple[float, ...] = ()
    """Messages of the all-reduces that tensor parallelism needs in the forward, bytes in the recorded dtype."""
    backward_reduces: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelWork:
    """A model's layers in execution order, at ascending micro-batch sizes. `loss` is in the last layer."""

    layer_ids: tuple[str, ...]
    sizes: tuple[int, ...]
    layers_at: tuple[tuple[LayerWork, ...], ...]
    """Beside `sizes`; equal layers are one object."""
    dtype_bytes: int = 4
    """Width of a parameter element as recorded."""
    model: str = ""
    _cache: dict[float, tuple[LayerWork, ...]] = field(default_factory=dict, repr=False, compare=False)

    def at(self, samples: float) -> tuple[LayerWork, ...]:
        """The layers at a micro-batch of `samples`: exact at the recorded sizes, straight lines elsewhere."""
        if samples not in self._cache:
            self._cache[samples] = self._at(samples)
        return self._cache[samples]

    def _at(self, samples: float) -> tuple[LayerWork, ...]:
        if samples in self.sizes:
            return self.layers_at[self.sizes.index(int(samples))]
        low, high = self.layers_at[0], self.layers_at[-1]
        x0, x1 = float(self.sizes[0]), float(self.sizes[-1])
        made: dict[tuple[int, int], LayerWork] = {}
        result = []
        for a, b in zip(low, high, strict=True):
            key = (id(a), id(b))
            if key not in made:
                made[key] = _between(a, b, x0, x1, samples)
            result.append(made[key])
        return tuple(result)

    @functools.cached_property
    def parameters(self) -> float:
        return sum(layer.parameters for layer in self.layers_at[0])


def _between(a: LayerWork, b: LayerWork, x0: float, x1: float, x: float) -> LayerWork:
    def line(y0: float, y1: float) -> float:
        return y1 * x / x1 if x0 == x1 else max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))

    def kernels(first: tuple[Kernel, ...], second: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        if len(first) != len(second) or x0 == x1:
            return tuple(_scaled(kernel, x / x1) for kernel in second)
        return tuple(
            q._replace(
                flops=line(p.flops, q.flops),
                moved_bytes=line(p.moved_bytes, q.moved_bytes),
                fused_bytes=line(p.fused_bytes, q.fused_bytes),
                shape=(
                    line(p.shape[0], q.shape[0]),
                    line(p.shape[1], q.shape[1]),
                    line(p.shape[2], q.shape[2]),
                    line(p.shape[3], q.shape[3]),
                ),
            )
            for p, q in zip(first, second, strict=True)
        )

    def messages(first: tuple[float, ...], second: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(line(u, v) for u, v in zip(first, second, strict=True)) if len(first) == len(second) else second

    return LayerWork(
        forward=kernels(a.forward, b.forward),
        backward=kernels(a.backward, b.backward),
        saved_bytes=line(a.saved_bytes, b.saved_bytes),
        saved_float32_bytes=line(a.saved_float32_bytes, b.saved_float32_bytes),
        saved_sharded_bytes=line(a.saved_sharded_bytes, b.saved_sharded_bytes),
        output_bytes=line(a.output_bytes, b.output_bytes),
        output_float32_bytes=line(a.output_float32_bytes, b.output_float32_bytes),
        parameters=b.parameters,
        sharded_parameters=b.sharded_parameters,
        forward_reduces=messages(a.forward_reduces, b.forward_reduces),
        backward_reduces=messages(a.backward_reduces, b.backward_reduces),
    )


def _scaled(kernel: Kernel, factor: float) -> Kernel:
    """A kernel whose samples were multiplied, where only one size was recorded: its longest side grows."""
    batch, m, n, k = kernel.shape
    if kernel.linear and kernel.weight:
        shape = (batch, m, n, k * factor)
    elif kernel.linear:
        shape = (batch, m * factor, n, k)
    else:
        shape = (batch * factor, m, n, k)
    return kernel._replace(
        flops=kernel.flops * factor,
        moved_bytes=kernel.moved_bytes * factor,
        fused_bytes=kernel.fused_bytes * factor,
        shape=shape,
    )
