"""What running a model may change of it, kept and given back."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn


class ModelState:
    """A model's buffers and module attributes as they are now. Parameters are not covered.

    Attributes that are lists, dicts, sets or deques are given back with their contents, deeper objects as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._attributes = [(module, dict(vars(module))) for module in model.modules()]
        self._contents = [
            (value, value.copy())
            for _, attributes in self._attributes
            for value in attributes.values()
            if isinstance(value, (list, dict, set, deque))
        ]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not buffer.is_meta]

    def restore(self) -> None:
        """Give it all back, in place. Graphs that hold a buffer stay valid."""
        for module, attributes in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
        for container, content in self._contents:
            _refill(container, content)
        for buffer, before in self._buffers:
            buffer.data.copy_(before)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.extend(content) if isinstance(container, (list, deque)) else container.update(content)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[ModelState]:
    """Give back everything that forwards and backwards may change: state, gradients, random states.

    Gradients start as None inside. Yields the state, for whoever wants it given back in between.
    """
    state = ModelState(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = sorted({tensor.device.index or 0 for tensor in model.parameters() if tensor.is_cuda})
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield state
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            state.restore()
            for parameter, gradient in gradients:
                parameter.grad = gradient
