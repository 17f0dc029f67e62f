"""Tensors that go from layer to later layers, as arrays over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partitioner.intervals import Floats, Ints
from partitioner.layer_arrays import interpolated


@dataclass(frozen=True)
class FarFlows:
    """Tensors by number k, and their uses by later layers."""

    sizes: tuple[int, ...]
    bytes_at: Floats
    """[sizes, k]"""
    producer: Ints
    """[k] position."""
    gradient: NDArray[np.bool_]
    """[k] whether one comes back."""
    tensor: Ints
    """[uses] k."""
    consumer: Ints
    """[uses] position."""

    def bytes(self, samples: float) -> Floats:
        """[k] of a micro-batch of `samples`."""
        return interpolated(self.sizes, self.bytes_at, samples)


@dataclass(frozen=True)
class Flows:
    """Tensors that later layers use, by number k; amounts are given by k."""

    bytes_at: Floats
    """[sizes, k]"""
    producer: Ints
    last: Ints
    """Position of the last layer that uses it."""
    near: NDArray[np.bool_]
    """Whether that is the one after the producer."""
    gradient: NDArray[np.bool_]
    received: Ints
    """[uses, 3] of (k, at, previous): `Use`s of layers that take it in."""
    num_layers: int

    def crossing(self, amount: Floats) -> Floats:
        """[n + 1] by cut, what is alive there."""
        size = self.num_layers + 2
        change = np.bincount(self.producer + 1, amount, size) - np.bincount(self.last + 1, amount, size)
        alive: Floats = np.cumsum(change)[: self.num_layers + 1]
        return alive

    def following(self, amount: Floats) -> Floats:
        """[n + 1] by cut, what only the layer after it uses of what the layer before it makes."""
        return np.bincount(self.producer[self.near] + 1, amount[self.near], self.num_layers + 1).astype(float)

    def received_uses(self, amount: Floats) -> Floats:
        k, at, previous = self.received.T
        return np.column_stack((at, previous, amount[k]))

    def sent_uses(self, amount: Floats) -> Floats:
        """Positions counted from the end: a tensor counts for the layers that end after it is made."""
        end = self.num_layers - 1
        return np.column_stack((end - self.producer, end - self.last, amount))
