"""Let pending backwards find what their forwards left: on one device a backward comes before the next forward.

In a pipeline several forwards come first. What they change of buffers and attributes would be gone when

    a backward needs a tensor that was saved       that stays behind: the model's own moves to other memory
    a checkpoint runs again, or a hook reads       values are put back for as long as the backward runs

What the backward changes of them then stays changed, in what forwards since have left too.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn

from partitioner.errors import UnsupportedModelError
from partitioner.glance import Glance
from partitioner.logbook import is_sendable, version
from partitioner.reaching import GONE, Place, SequencePlace, Watched
from partitioner.standins import StandIn, exchange, unrecorded
from partitioner.structures import is_same, storage_of

MAX_BYTES = 1 << 16
"""Of a tensor, to know what it held before a forward changes it for the first time: a larger one that begins to change
while backwards are to come, which may need what it held, is refused."""

MAX_RELEASED = 1 << 20
"""Of a tensor that is copied where a graph has saved it, whether or not forwards have been seen to change it."""

LOOKS = 2
"""Forwards after which all that tensors hold is compared with what they held before: `tensor.data` may be written into
without a trace. Where the model's code names such a way, and of tensors that others look at, that is done always."""

MAX_SUMMED = 1 << 23
"""Bytes of a tensor that are all looked at; of a larger one samples after the first forwards."""

NUM_SAMPLES = 1 << 12

_REFERENCES = 4
"""To the latest `Then` while it is looked for, where no forward's backward will ask for it."""

_ONE_OWNER = 2
"""References to a storage that nothing else looks at: its tensor's, and that of who asks."""


class Then:
    """What forwards change of a model, as one of them left it: values of places by key, and of tensors."""

    def __init__(
        self,
        values: dict[tuple[int, Any], tuple[Place, Any, Any]],
        tensors: list[tuple[torch.Tensor, torch.Tensor]],
        all_of_them: WeakSet[Then],
    ) -> None:
        """`all_of_them`: those of all forwards whose backwards are to come; it is added to them."""
        self._values, self._tensors, self._all = values, tensors, all_of_them
        self._versions = [version(tensor) for tensor, _ in tensors]
        self.recomputes = False
        """Whether the backward runs a part of the forward again."""
        all_of_them.add(self)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside: all is as it was then.

        What the block adds to numbers is added to what they are now; what it takes out of lists is taken out of them
        as they are now, and as later forwards left them.
        """
        with torch._C.DisableTorchFunction(), torch.no_grad():
            values = [(place, key, then, place.held(key)) for place, key, then in self._values.values()]
            unchanged = [one for one in values if _is_alike(one[2], one[3])]
            values = [one for one in values if not _is_alike(one[2], one[3])]
            tensors = [(tensor, then, tensor.detach().clone()) for tensor, then in self._tensors]
            versions = [version(tensor) for tensor, _ in self._tensors]
            for place, key, then, _ in values:
                _put(place, key, then)
            for (tensor, then, _), mark in zip(tensors, self._versions, strict=True):
                tensor.data.copy_(then)
                _set_version(tensor, mark)  # as the graph has noted it, where that has saved the tensor itself
            marks = [version(tensor) for tensor, _, _ in tensors]
        try:
            yield
        finally:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                counts = [version(tensor) - mark for (tensor, _, _), mark in zip(tensors, marks, strict=True)]
                left = [
                    now if not count else now + (tensor - then)
                    for (tensor, then, now), count in zip(tensors, counts, strict=True)
                ]
                for (tensor, _, _), value in zip(tensors, left, strict=True):
                    tensor.data.copy_(value)
                for (tensor, _, _), before, count in zip(tensors, versions, counts, strict=True):
                    _set_version(tensor, before + count)
                for place, key, then, now in values:
                    after = place.held(key)
                    if isinstance(place, SequencePlace):
                        _put(place, key, _merged(then, after, now))
                        self._tell_others(place, key, then, after)
                        continue
                    counted = all(type(one) in (int, float) for one in (then, now, after))
                    _put(place, key, now + (after - then) if counted else now)
                for place, key, then, _ in unchanged:
                    if then is not GONE and place.held(key) is GONE:
                        self._drop_in_others(place, key, then)

    def add(self, place: Place, key: Any, value: Any) -> None:
        """Something is changed for the first time by a later forward: after this one it was `value` still."""
        self._values.setdefault((id(place), key), (place, key, value))

    def add_tensor(self, tensor: torch.Tensor, value: torch.Tensor, at: int) -> None:
        """Likewise a tensor, of this version."""
        if all(known is not tensor for known, _ in self._tensors):
            self._tensors.append((tensor, value))
            self._versions.append(at)

    def _drop_in_others(self, place: Place, key: Any, then: Any) -> None:
        """What this one's backward took out of a dict is gone for those after it."""
        for other in self._all:
            known = other._values.get((id(place), key))
            if known is not None and known[2] is then:
                other._values[id(place), key] = (place, key, GONE)

    def _tell_others(self, place: Place, key: Any, then: list[Any], after: list[Any]) -> None:
        """A list was changed by this one's backward: as on one device, those after it find it so."""
        if _is_alike(then, after):
            return
        for other in self._all:
            if other is not self and (id(place), key) in other._values:
                *_, theirs = other._values[id(place), key]
                other._values[id(place), key] = (place, key, _merged(then, after, theirs))


class Kept:
    """All that a model keeps in places, and what of it forwards change."""

    def __init__(
        self,
        places: Iterable[Place],
        passing: Sequence[dict[str, Any]] = (),
        parameters: Iterable[torch.Tensor] = (),
        unannounced: bool = False,
    ) -> None:
        """`passing`: see `Glance`. `parameters`: what looks at their memory stays there, as training changes it.

        `unannounced`: whether the model's code may write into tensors past their versions, or set the data of frozen
        parameters.
        """
        self._passing, self._unannounced = passing, unannounced
        parameters = list(parameters)
        self._watched = [Watched(place) for place in places if place.may_change]
        held = [value for one in self._watched for _, value in one.items if isinstance(value, torch.Tensor)]
        found = {id(tensor): tensor for tensor in held if not isinstance(tensor, nn.Parameter)}
        trained = {storage_of(parameter) for parameter in parameters if parameter.layout == torch.strided}
        self._tensors = [
            tensor
            for tensor in found.values()
            if is_sendable(tensor) and not tensor.requires_grad and storage_of(tensor) not in trained
        ]
        frozen = [one for one in parameters if unannounced and not one.requires_grad and type(one) is nn.Parameter]
        self._tensors += frozen
        self._frozen = set(map(id, frozen))
        here = [one for one in parameters if unannounced and one.requires_grad and not one.is_meta]
        self._trained = [one for one in here if one.layout == torch.strided]
        self._addresses: list[tuple[int, int]] = []
        self._small = [one for one in self._tensors if one.nbytes < MAX_RELEASED and not one.is_meta]
        self._small = [one for one in self._small if id(one) not in self._frozen]
        self._silent: list[torch.Tensor] = []
        """Those that forwards change without a trace."""
        self.late: list[torch.Tensor] = []
        """Those that the last forward has changed without a trace, as none before it did."""
        self._looks_left = LOOKS
        placed = [one for one in self._tensors if not one.is_meta]
        self._looked_at = [one for one in placed if one.untyped_storage().nbytes() >= one.nbytes]  # no placeholders
        self._pinned = self._frozen | {id(one) for one in self._looked_at if _is_seen(one)}
        """Those at whose memory others look, be it a view or a NumPy array that somebody keeps, and those that graphs
        hold as they are: they have to stay."""
        self._is_marked = False
        """Whether the marks are of this very moment."""
        self._mark()
        self._count_holders()
        self._versions = list(map(version, self._tensors))
        self._glance = Glance(self._watched, self._passing)
        self._values: dict[tuple[int, Any], tuple[Place, Any]] = {}
        self._moving: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._contents = {id(one): one.clone() for one in self._tensors if one.nbytes <= MAX_BYTES}
        """Of small tensors that no forward has changed yet."""
        self._all: WeakSet[Then] = WeakSet()
        self.latest = Then({}, [], self._all)

    def begin(self) -> None:
        """A forward begins: what the training loop has written since the last one is no change of it."""
        if not self._looked_at and not self._trained:
            return
        with torch._C.DisableTorchFunction(), torch.no_grad(), unrecorded():
            marks = [(mark.version, mark.address) for mark in self._marks]
            is_looked_into = self._looks_left or self._unannounced or self._pinned
            is_same = marks == [(version(tensor), tensor.data_ptr()) for tensor in self._looked_at]
            if not is_same or (is_looked_into and not self._is_marked):
                self._mark()
            self._addresses = [(one.data_ptr(), version(one)) for one in self._trained]

    def end(self, recomputes: bool = False) -> Then:
        """A forward is over: what it has left; the same as the one before where forwards change nothing.

        `recomputes`: whether its backward runs a part of it again. UnsupportedModelError where a tensor begins to
        change of which earlier forwards, whose backwards are to come, may need what it held, and that is not known.
        """
        self.late = []
        if not (self._looked_at or self._small or self._silent or self._trained) and self._glance.is_still():
            self.latest.recomputes |= recomputes
            return self.latest  # nothing to mark, nor to release
        with torch._C.DisableTorchFunction(), torch.no_grad(), unrecorded():
            self._refuse_set_parameters()
            is_late = self._looks_left < LOOKS
            self._look()
            if not self._silent and self._glance.is_still():
                self._release()
                self._mark()
                self.latest.recomputes |= recomputes
                return self.latest
            self._renew(is_late)
            for one in self._watched:
                if one.is_touched():
                    for change in one.changes():
                        if not change.content and not isinstance(change.now, nn.Module):
                            if (id(one.place), change.key) not in self._values:
                                for pending in self._all:
                                    pending.add(one.place, change.key, change.before)
                            self._values[id(one.place), change.key] = (one.place, change.key)
            self._glance = Glance(self._watched, self._passing)
            now = {name: (place, key, place.held(key)) for name, (place, key) in self._values.items()}
            self.latest = Then(now, list(self._moving.values()), self._all)
            self._count_holders()
            self._release()
            self._mark()
            self.latest.recomputes = recomputes
        return self.latest

    def passing_over(self) -> AbstractContextManager[None]:
        """See `Glance.passing_over`."""
        return self._glance.passing_over()

    def as_after(self, then: Then | None) -> AbstractContextManager[None]:
        """Inside: what forwards change is as it was after one of them."""
        self._is_marked = False
        return nullcontext() if then is None or then is self.latest else then.put_back()

    def _look(self) -> None:
        """Whether tensors have changed without a trace; and what is large and changes is released as small ones are."""
        all_of_it, self._looks_left = self._looks_left > 0, max(0, self._looks_left - 1)
        left = []
        for tensor, before in zip(self._looked_at, self._marks, strict=True):
            now = self._mark_of(tensor, all_of_it)
            is_large = tensor.nbytes >= MAX_RELEASED
            if now == before:
                if is_large or self._looks_left or self._is_looked_into(tensor):
                    left.append(tensor)
                continue
            if is_large and id(tensor) not in self._frozen:
                self._small.append(tensor)
            if now.version == before.version:
                self._silent.append(tensor)
        self._looked_at = left

    def _mark(self) -> None:
        self._marks = [self._mark_of(tensor, self._looks_left > 0) for tensor in self._looked_at]
        self._is_marked = True

    def _mark_of(self, tensor: torch.Tensor, all_of_it: bool) -> _Mark:
        if id(tensor) in self._frozen:
            return _Mark(version(tensor), tensor.data_ptr(), 0)
        checksum = _checksum(tensor, all_of_it) if all_of_it or self._is_looked_into(tensor) else 0
        return _Mark(version(tensor), tensor.data_ptr(), checksum)

    def _is_looked_into(self, tensor: torch.Tensor) -> bool:
        return self._unannounced or id(tensor) in self._pinned

    def _release(self) -> None:
        """Small tensors that graphs have saved, or views of them, move away: whatever writes into them next, those
        graphs will not see it."""
        for tensor in self._small:
            storage = tensor.untyped_storage()._cdata
            is_seen = torch._C._storage_Use_Count(storage) > _ONE_OWNER
            has_graph = tensor._use_count() > 1  # type: ignore[attr-defined]
            if (has_graph or is_seen) and self._holders[storage] < 2 and self._may_move(tensor):
                become(tensor, tensor.clone(), views_too=True)
                self._holders[tensor.untyped_storage()._cdata] = 1

    def _count_holders(self) -> None:
        """How many tensors that the model keeps lie in the memory of each small one."""
        held = (tensor for one in self._watched for _, tensor in one.tensors if tensor.layout == torch.strided)
        objects = {id(tensor): tensor for tensor in held if not isinstance(tensor, StandIn)}
        arrays = [getattr(array, "base", None) for one in self._watched for _, array, _ in one.arrays]
        self._holders = Counter(map(storage_of, objects.values()))
        self._holders.update(storage_of(base) for base in arrays if isinstance(base, torch.Tensor))

    def _renew(self, is_late: bool) -> None:
        """Tensors that the forward has changed in place move to other memory."""
        now = list(map(version, self._tensors))
        silent = set(map(id, self._silent))
        for tensor, before, after in zip(self._tensors, self._versions, now, strict=True):
            if (before != after or id(tensor) in silent) and is_sendable(tensor) and not tensor.requires_grad:
                if id(tensor) not in self._moving:
                    self._note_first_change(tensor, before, id(tensor) in silent)
                    self.late += [tensor] if is_late and id(tensor) in silent else []
                value = tensor.detach().clone()
                if self._may_move(tensor):
                    become(tensor, value)  # whether or not it could: `value` holds what the tensor does
                self._moving[id(tensor)] = (tensor, value)
        self._versions = list(map(version, self._tensors))

    def _refuse_set_parameters(self) -> None:
        """A forward may set what is trained where no other's backward is to come."""
        for parameter, before in zip(self._trained, self._addresses, strict=bool(self._addresses)):
            if (parameter.data_ptr(), version(parameter)) != before and self._pending():
                raise UnsupportedModelError(
                    f"the forward sets the parameter {self._name_of(parameter)!r}, which is trained, while the "
                    "backwards of earlier micro-batches are to come that need what it held. Do it after the step, "
                    "outside of the forward, or use one micro-batch (microbatches=1)"
                )

    def _note_first_change(self, tensor: torch.Tensor, version_before: int, is_silent: bool) -> None:
        """Until now forwards have not changed it: those whose backwards are to come have left it as it was."""
        pending = self._pending()
        was = self._contents.pop(id(tensor), None)
        if was is not None:
            for then in pending:
                then.add_tensor(tensor, was, version_before)
            return
        if pending and (is_silent or id(tensor) in self._pinned or any(then.recomputes for then in pending)):
            how = "past torch's version counter, by .data or NumPy," if is_silent else "in place"
            raise UnsupportedModelError(
                f"the forward begins to change {self._name_of(tensor)!r}, of {tensor.nbytes} bytes, {how} while the "
                f"backwards of {len(pending)} earlier micro-batches are to come that may need what it held; of tensors "
                f"above {MAX_BYTES} bytes that is kept only where they change from the first forward on. Change it in "
                "every forward, put another tensor in its place (self.buffer = new), or use one micro-batch "
                "(microbatches=1)"
            )

    def _pending(self) -> list[Then]:
        """What forwards have left whose backwards are to come."""
        return [then for then in self._all if then is not self.latest or sys.getrefcount(then) > _REFERENCES]

    def _may_move(self, tensor: torch.Tensor) -> bool:
        """Whether nobody but graphs looks at its memory: a NumPy array that was ever made of that may be kept still."""
        if not tensor.is_meta and not tensor.untyped_storage().resizable():
            self._pinned.add(id(tensor))
        return id(tensor) not in self._pinned

    def _name_of(self, tensor: torch.Tensor) -> str:
        for one in self._watched:
            module = one.place.owner if isinstance(one.place.owner, nn.Module) else nn.Module()
            for key, held in (*one.items, *module._parameters.items()):
                if held is tensor:
                    return one.place.name_of(key)
        return "(a tensor)"


def _is_seen(tensor: torch.Tensor) -> bool:
    """Whether something else looks at a tensor's memory, before there are graphs."""
    if not tensor.untyped_storage().resizable():
        return True
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > _ONE_OWNER


class _Mark(NamedTuple):
    """What tells that a tensor has changed."""

    version: int
    address: int
    checksum: int


def _checksum(tensor: torch.Tensor, all_of_it: bool) -> int:
    """Of a tensor's values: of all, or of the sum of all and of samples, or of a very large one of samples alone."""
    values = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    flat = values.as_strided(values.shape, (1,)).view(torch.uint8)  # of one element any stride is contiguous
    if flat.numel() <= MAX_BYTES or all_of_it:
        checksum = 0
        for part in torch.split(flat, MAX_RELEASED):
            checksum = zlib.crc32(part.cpu().numpy().data, checksum)
        return checksum
    whole = flat[: flat.numel() // 8 * 8]
    words = (whole if not whole.data_ptr() % 8 and not whole.storage_offset() % 8 else whole.clone()).view(torch.int64)
    checksum = int(words.sum()) if flat.numel() <= MAX_SUMMED else 0
    samples = words[:: max(1, len(words) // NUM_SAMPLES)].contiguous()
    return hash((checksum, zlib.crc32(samples.cpu().numpy().data)))


def _set_version(tensor: torch.Tensor, number: int) -> None:
    if not tensor.is_inference() and version(tensor) != number:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (number,))


def become(tensor: torch.Tensor, value: torch.Tensor, *, views_too: bool = False) -> bool:
    """Let every reference to `tensor` find `value` instead; what graphs hold of it stays. Whether that could be done.

    Not where others hold it weakly, or look at its memory, unless `views_too`: then they are graphs. Its version stays,
    for those who look for changes.
    """
    is_seen = not tensor.is_meta and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > _ONE_OWNER
    if tensor.is_meta or (is_seen and not views_too):
        return False
    before = version(tensor)
    vars(value).update(vars(tensor))
    try:
        exchange(tensor, value)
    except UnsupportedModelError:
        return False
    torch._C._autograd._unsafe_set_version_counter((tensor,), (before,))
    return True


def _is_alike(one: Any, other: Any) -> bool:
    """Whether they are the same, or lists of the same."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return is_same(one, other)


def _merged(then: list[Any], after: list[Any], now: list[Any]) -> list[Any]:
    """`now`, changed as `then` was to become `after`.

    >>> _merged([1, 2], [1], [1, 2, 3]), _merged([1, 2], [1, 2, 9], [2, 3])
    ([1, 3], [2, 3, 9])
    """
    if _is_alike(then, after):
        return now
    if _is_alike(now[: len(then)], then):
        return after + now[len(then) :]
    before, left = Counter(map(id, then)), Counter(map(id, after))
    gone, come = before - left, left - before
    kept = []
    for one in now:
        if gone[id(one)] > 0:
            gone[id(one)] -= 1
        else:
            kept.append(one)
    return kept + [one for one in after if come[id(one)] > 0]


def _put(place: Place, key: Any, value: Any) -> None:
    if value is not GONE:
        place.put(key, value)
    elif place.held(key) is not GONE:
        place.drop(key)
