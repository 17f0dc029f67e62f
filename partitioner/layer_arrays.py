"""What layers cost at one size of micro-batches, as arrays by layer position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from partitioner.intervals import Floats, IntervalMax, IntervalSum


@dataclass(frozen=True)
class Holding:
    """What the layers keep of a micro-batch until its backward, and what they need beside it while they run."""

    kept_before: Floats
    """[num_layers + 1] bytes kept of the layers before each position."""
    reach: IntervalMax
    """Of each layer: bytes kept of the layers before it, plus the most that it needs itself, kept bytes included."""

    def working(self, first: ArrayLike, last: ArrayLike) -> Any:
        """The most that the layers [first, last) need at one moment of one micro-batch, beyond what they all keep."""
        return np.maximum(self.reach(first, last) - self.kept_before[np.asarray(last)], 0.0)


@dataclass(frozen=True)
class LayerArrays:
    """The graph at one micro-batch size: an array a figure, by layer position."""

    samples: float
    forward_s: Floats
    backward_s: Floats
    saved_bytes: Floats
    backward_input_s: Floats | None
    """The two parts of a backward, where the profile has them of every layer."""
    backward_weight_s: Floats | None
    before_s: Floats
    """[num_layers + 1] seconds of the layers before each position, forward and backward."""
    forward_before_s: Floats
    saved_before: Floats
    """Likewise the bytes that they save."""
    crossing_bytes: Floats
    """By cut, 0 to num_layers: bytes alive there that later layers use. Nothing crosses the first and the last."""
    crossing_gradient_bytes: Floats
    """The part of it whose gradient goes back."""
    next_bytes: Floats
    """By cut: what the layer before it makes and the layer after it alone uses."""
    next_gradient_bytes: Floats
    received: IntervalSum
    """Bytes that the layers [first, last) take from layers before them."""
    received_gradient: IntervalSum
    """The part of it whose gradient goes back."""
    _sent: IntervalSum
    _sent_gradient: IntervalSum

    @cached_property
    def lists(self) -> tuple[list[float], list[float]]:
        """`before_s` and `forward_before_s` for one look at a time."""
        return self.before_s.tolist(), self.forward_before_s.tolist()

    @cached_property
    def most_saved(self) -> IntervalMax:
        """Of the layers [first, last), the most that one of them saves."""
        return IntervalMax(self.saved_bytes)

    def sent(self, first: ArrayLike, last: ArrayLike) -> Any:
        """Bytes of tensors that the layers [first, last) make and later ones use, each once."""
        end = len(self.forward_s)
        return self._sent(end - np.asarray(last), end - np.asarray(first))

    def sent_gradient(self, first: ArrayLike, last: ArrayLike) -> Any:
        """The part of it that gets a gradient back."""
        end = len(self.forward_s)
        return self._sent_gradient(end - np.asarray(last), end - np.asarray(first))


def table(rows: Sequence[Sequence[float]], width: int) -> Floats:
    """[width, rows]"""
    return np.array(rows, float).reshape(len(rows), width).T


def interpolated(sizes: Sequence[int], values: Floats, samples: float) -> Floats:
    """`values` [sizes, layers] at `samples`: the rule of `Layer.cost`, for all layers at once."""
    rows: list[Floats] = list(values)
    if samples in sizes:
        return rows[sizes.index(int(samples))]
    if len(sizes) == 1:
        return rows[0] * (samples / sizes[0])
    k = min(max(1, int(np.searchsorted(sizes, samples))), len(sizes) - 1)
    (x0, x1), (y0, y1) = sizes[k - 1 : k + 1], rows[k - 1 : k + 1]
    line = y0 + (y1 - y0) * ((samples - x0) / (x1 - x0))
    floor: Floats = np.maximum(0.5 * y0 * min(1.0, samples / x0), 0.0)
    return np.maximum(line, floor)
