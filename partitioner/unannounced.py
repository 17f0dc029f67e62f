"""Whether a forward may write into tensors so that torch's version counters do not tell: by the names its code uses.

    buffer.data.mul_(0.9)          buffer.numpy()[...] *= 0.9          buffer.data = value

Followed from the modules' forward and hooks, by name alone; see `running`.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from torch import nn

from partitioner.running import Running, is_foreign, names_of

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
    functions = (one for one in Running(model, objects).functions() if not _is_pythons(one))
    return any(not names_of(function.__code__).isdisjoint(_PAST_VERSIONS) for function in functions)


def _is_pythons(function: FunctionType) -> bool:
    """Whether it is of Python's own library, whose `data` are no tensor's; not of a file of the user's called alike."""
    return is_foreign(function.__module__ or "") and function.__code__.co_filename.startswith(_LIBRARY)


_LIBRARY = os.path.join(sysconfig.get_paths()["stdlib"], "")
