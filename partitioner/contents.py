"""What objects hold that change in place without a trace: arrays, bytes, generators of random numbers.

Each is told by its content, as plain data that compares, travels, and fills another of its kind.
"""

from __future__ import annotations

import array
import pickle
import random
from typing import Any

import numpy as np
import torch

MAX_BYTES = 1 << 20
"""Of arrays that are looked at: this is done after every layer."""


def has_content(value: Any) -> bool:
    """Whether a value is of such a kind, and small enough.

    >>> has_content(bytearray(3)), has_content(np.zeros(3)), has_content([3])
    (True, True, False)
    """
    if isinstance(value, np.ndarray):
        return value.dtype != object and value.nbytes <= MAX_BYTES
    if isinstance(value, (bytearray, array.array)):
        return memoryview(value).nbytes <= MAX_BYTES
    return is_generator(value)


def is_generator(value: Any) -> bool:
    """Whether random numbers are drawn from it."""
    return isinstance(value, _GENERATORS)


def content_of(value: Any) -> Any:
    """What it holds now.

    >>> content_of(bytearray(b"ab"))
    b'ab'
    """
    if isinstance(value, (np.ndarray, array.array)):
        return value.tobytes()
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, torch.Generator):
        return value.get_state().cpu().numpy().tobytes()
    if isinstance(value, random.Random):
        return pickle.dumps(value.getstate())
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    return pickle.dumps(value.get_state(legacy=False))


def fill(value: Any, content: Any) -> None:
    """Let it hold what another of its kind held.

    >>> some = np.zeros(2, dtype=np.int64)
    >>> fill(some, content_of(np.array([3, 4])))
    >>> some.tolist()
    [3, 4]
    """
    if isinstance(value, np.ndarray):
        value[...] = np.frombuffer(content, dtype=value.dtype).reshape(value.shape)
    elif isinstance(value, array.array):
        value[:] = array.array(value.typecode, content)
    elif isinstance(value, bytearray):
        value[:] = content
    elif isinstance(value, torch.Generator):
        value.set_state(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    elif isinstance(value, random.Random):
        value.setstate(pickle.loads(content))
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = pickle.loads(content)
    else:
        value.set_state(pickle.loads(content))


_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
