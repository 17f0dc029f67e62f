"""Let pending backwards find what their forwards left: on one device a backward comes before the next forward.

In a pipeline several forwards come first. What they change of buffers and attributes would be gone when

    a backward needs a tensor that was saved       it has moved to memory of its own at the end of its forward
    a checkpoint runs again, or a hook reads       values are put back for as long as the backward runs
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from partitioner.errors import UnsupportedModelError
from partitioner.glance import Glance
from partitioner.logbook import is_sendable, version
from partitioner.reaching import GONE, Place, SequencePlace, Watched
from partitioner.standins import exchange, unrecorded
from partitioner.structures import is_same

_ONE_OWNER = 2
"""References to a storage that nothing else looks at: its tensor's, and that of who asks."""


class Then:
    """What forwards change of a model, as one of them left it: values of places by key, and of tensors."""

    def __init__(
        self, values: dict[tuple[int, Any], tuple[Place, Any, Any]], tensors: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._values, self._tensors = values, tensors

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside: all is as it was then. What the block adds to numbers is added to what they are now."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            values = [(place, key, then, _held(place, key)) for place, key, then in self._values.values()]
            values = [one for one in values if not is_same(one[2], one[3])]
            tensors = [(tensor, then, tensor.detach().clone()) for tensor, then in self._tensors]
            for place, key, then, _ in values:
                _put(place, key, then)
            for tensor, then, _ in tensors:
                tensor.data.copy_(then)
            marks = [version(tensor) for tensor, _, _ in tensors]
        try:
            yield
        finally:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                for (tensor, then, now), mark in zip(tensors, marks, strict=True):
                    tensor.data.copy_(now if version(tensor) == mark else now + (tensor - then))
                for place, key, then, now in values:
                    after = _held(place, key)
                    counted = all(type(one) in (int, float) for one in (then, now, after))
                    _put(place, key, now + (after - then) if counted else now)


class Kept:
    """All that a model keeps in places, and what of it forwards change."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._watched = [
            Watched(place) for place in places if place.may_change and not isinstance(place, SequencePlace)
        ]
        held = [value for one in self._watched for _, value in one.items if isinstance(value, torch.Tensor)]
        found = {id(tensor): tensor for tensor in held if not isinstance(tensor, nn.Parameter)}
        self._tensors = [tensor for tensor in found.values() if is_sendable(tensor) and not tensor.requires_grad]
        self._versions = list(map(version, self._tensors))
        self._glance = Glance(self._watched)
        self._values: dict[tuple[int, Any], tuple[Place, Any]] = {}
        self._moving: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.latest: Then | None = None

    def end(self) -> Then | None:
        """A forward is over: what it has left; None where forwards change nothing."""
        with torch._C.DisableTorchFunction(), torch.no_grad(), unrecorded():
            if self._glance.is_still():
                return self.latest
            self._renew()
            for one in self._watched:
                if one.is_touched():
                    for change in one.changes():
                        if not change.content and not isinstance(change.now, nn.Module):
                            self._values[id(one.place), change.key] = (one.place, change.key)
            self._glance = Glance(self._watched)
            now = {name: (place, key, _held(place, key)) for name, (place, key) in self._values.items()}
            self.latest = Then(now, list(self._moving.values()))
        return self.latest

    def as_after(self, then: Then | None) -> AbstractContextManager[None]:
        """Inside: what forwards change is as it was after one of them."""
        return nullcontext() if then is None or then is self.latest else then.put_back()

    def _renew(self) -> None:
        """Tensors that the forward has changed in place move to other memory."""
        now = list(map(version, self._tensors))
        for tensor, before, after in zip(self._tensors, self._versions, now, strict=True):
            if before != after and is_sendable(tensor) and not tensor.requires_grad:
                value = tensor.clone()
                become(tensor, value)  # whether or not it could: `value` holds what the tensor does
                self._moving[id(tensor)] = (tensor, value)
        self._versions = list(map(version, self._tensors))


def become(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Let every reference to `tensor` find `value` instead; what graphs hold of it stays. Whether that could be done.

    Not where others look at its memory, or hold it weakly. Its version stays, for those who look for changes.
    """
    if tensor.is_meta or torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > _ONE_OWNER:
        return False
    before = version(tensor)
    try:
        exchange(tensor, value)
    except UnsupportedModelError:
        return False
    torch._C._autograd._unsafe_set_version_counter((tensor,), (before,))
    return True


def _held(place: Place, key: Any) -> Any:
    return dict(place.items()).get(key, GONE)


def _put(place: Place, key: Any, value: Any) -> None:
    if value is not GONE:
        place.put(key, value)
    elif _held(place, key) is not GONE:
        place.drop(key)
