"""Stand where a value would be that this stage does not know: may be handed on, may not be looked into."""

from __future__ import annotations

from typing import Any

from partitioner.errors import UnsupportedModelError
from partitioner.structures import tensors_in
from partitioner.tracing import call_elsewhere, forward_here

_LOOKED_INTO = (
    "getitem setitem delitem iter next reversed len length_hint bool contains int float complex index round trunc "
    "floor ceil neg pos abs invert lt le eq ne gt ge add sub mul matmul truediv floordiv mod divmod pow lshift rshift "
    "and xor or radd rsub rmul rmatmul rtruediv rfloordiv rmod rdivmod rpow rlshift rrshift rand rxor ror iadd isub "
    "imul imatmul itruediv ifloordiv imod ipow ilshift irshift iand ixor ior enter exit"
).split()
"""Methods, without their underscores, that tell what a value is."""


class Absent:
    """Where an object of an earlier stage was that cannot be sent, or `why` it is not known; `kind` is its class."""

    def __init__(self, kind: str, why: str = "") -> None:
        vars(self)["kind"], vars(self)["why"] = kind, why

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        error = UnsupportedModelError(
            vars(self)["why"]
            or f"the forward looks into a {vars(self)['kind']} that an earlier stage made; only tensors in tuples, "
            f"lists, dicts, dataclasses and plain objects travel between stages. Pin the layers around it to one stage"
        )
        watcher = forward_here()
        raise error if watcher is None else watcher.failed(error)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_elsewhere(self._refuse, args, kwargs) if vars(self)["kind"] == "function" else self._refuse()

    def __repr__(self) -> str:
        return f"Absent({vars(self)['kind']})"

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for item in (*args, *(kwargs or {}).values()):
            for part in item if isinstance(item, (tuple, list)) else (item,):
                if isinstance(part, cls):
                    part._refuse()
        raise UnsupportedModelError(
            f"{func} is given something of another stage, beside {len(tensors_in(args))} tensors"
        )


for _name in _LOOKED_INTO:
    setattr(Absent, f"__{_name}__", Absent._refuse)
