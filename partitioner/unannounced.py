"""Whether a forward may write into tensors so that torch's version counters do not tell: by the names its code uses.

    buffer.data.mul_(0.9)          buffer.numpy()[...] *= 0.9          buffer.data = value

Followed from the modules' forward and hooks, by name alone; see `running`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from partitioner.running import Running, names_of

_PAST_VERSIONS = frozenset(
    {
        "data",
        "numpy",
        "from_numpy",
        "asarray",
        "as_tensor",
        "__array__",
        "frombuffer",
        "set_",
        "swap_tensors",
        "from_dlpack",
        "to_dlpack",
        "__dlpack__",
        "untyped_storage",
        "storage",
        "data_ptr",
        "_unsafe_set_version_counter",
        "_unsafe_preserve_version_counter",
    }
)


def may_write_unannounced(model: nn.Module, objects: Iterable[Any] = ()) -> bool:
    """Whether code that the model's forward leads to names one of the ways. `objects`: others that it uses."""
    functions = Running(model, objects).functions()
    return any(not names_of(function.__code__).isdisjoint(_PAST_VERSIONS) for function in functions)
