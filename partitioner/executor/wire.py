"""Payloads over one directed edge: a preamble of fixed size first, so that no receive is ever of a guessed size.

One message, in order on its edge:

    preamble   8 int64: kind, step, micro-batch, hash and length of the header, number of tensors, 0, 0
    header     layout of the tensors and the sender's own bytes; left out when the receiver has seen this hash
    tensors    one message each, as bytes; None and empty tensors send nothing

gloo ends the process when a message is larger than the buffer posted for it, and nothing can catch that; so a receive
is posted only once its size is known. Both sides keep the same few headers, the least recently used one leaves first.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from partitioner.errors import RankError, UnsupportedModelError

PREAMBLE_LENGTH = 8
NUM_HEADERS_KEPT = 32


class Tag(NamedTuple):
    """What a message is about: "F" activations, "B" gradients, "E" activations of an evaluation."""

    kind: str
    step: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of step {self.step}"


_KINDS = "FBE"


class Channel(NamedTuple):
    """The process groups of an edge: `control` is gloo; `data` is its own device group, None: all goes over gloo."""

    control: dist.ProcessGroup | None
    data: dist.ProcessGroup | None


class PeerLost(RankError):
    """Another rank is gone or silent; the reason lies there, not here."""


class Sender:
    """The near end of an edge. `send` returns at once; buffers are held until their message has left."""

    def __init__(self, channel: Channel, peer: int) -> None:
        self.peer = peer
        self._channel = channel
        self._headers = _Headers()
        self._posted: deque[tuple[Tag, list[tuple[Any, torch.Tensor]]]] = deque()

    def send(self, tag: Tag, header: bytes, tensors: Sequence[torch.Tensor | None]) -> None:
        """Post one message."""
        packed = _pack_header(tensors, header)
        number, is_new = self._headers.note(packed)
        fields = [_KINDS.index(tag.kind), tag.step, tag.microbatch, number, len(packed) * is_new, len(tensors), 0, 0]
        parts = [self._post(torch.tensor(fields, dtype=torch.int64), self._channel.control)]
        if is_new:
            parts.append(self._post(torch.frombuffer(bytearray(packed), dtype=torch.uint8), self._channel.control))
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                parts.append(self._post_tensor(tensor))
        self._posted.append((tag, parts))

    def keep_at_most(self, count: int) -> None:
        """Wait until no more than `count` messages are under way, so that their buffers do not pile up."""
        while len(self._posted) > count:
            self._wait_for_oldest()

    def release(self, tag: Tag) -> None:
        """Let go of the buffers up to this message's, which has arrived: an answer to it has come back."""
        while any(posted == tag for posted, _ in self._posted):
            self._wait_for_oldest()

    def flush(self) -> None:
        """Wait until everything has left."""
        self.keep_at_most(0)

    def _post_tensor(self, tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
        flat = as_bytes(tensor)
        if self._channel.data is None:
            return self._post(flat.cpu(), self._channel.control)
        return self._post(flat, self._channel.data)

    def _post(self, buffer: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[Any, torch.Tensor]:
        try:
            return dist.isend(buffer, self.peer, group=group), buffer
        except RuntimeError as error:
            raise peer_lost(self.peer, error) from error

    def _wait_for_oldest(self) -> None:
        _, parts = self._posted.popleft()
        for work, _ in parts:
            try:
                work.wait()
            except RuntimeError as error:
                raise peer_lost(self.peer, error) from error


class Receiver:
    """The far end of an edge. `expect` may be called ahead of `receive`, to have the preamble under way early."""

    def __init__(self, channel: Channel, peer: int, device: torch.device) -> None:
        self.peer = peer
        self._channel = channel
        self._device = device
        self._headers = _Headers()
        self._awaited: tuple[Any, torch.Tensor] | None = None

    def expect(self) -> None:
        """Say that one more message will come; its preamble is received in the background."""
        if self._awaited is None:
            self._awaited = self._post(torch.zeros(PREAMBLE_LENGTH, dtype=torch.int64), self._channel.control)

    def receive(self, tag: Tag) -> tuple[bytes, list[torch.Tensor | None]]:
        """The next message: the sender's header bytes and its tensors, on this rank's device.

        A RankError when the peer is gone, or has sent something else: then the ranks are not at the same point.
        """
        self.expect()
        assert self._awaited is not None
        preamble = self._take(self._awaited)
        self._awaited = None
        kind, step, microbatch, number, length, num_tensors, _, _ = preamble.tolist()
        came = Tag(_KINDS[kind], step, microbatch)
        if came != tag:
            raise RankError(
                f"rank {self.peer} sent {came} where {tag} was awaited: all ranks must make the same calls "
                "(train_step, eval_step) in the same order",
                rank=self.peer,
            )
        packed = self._headers.known(number)
        if length:
            buffer = self._take(self._post(torch.empty(length, dtype=torch.uint8), self._channel.control))
            packed = buffer.numpy().tobytes()
            self._headers.note(packed)
        layouts, header = _unpack_header(packed)
        assert len(layouts) == num_tensors
        return header, [self._receive_tensor(layout) for layout in layouts]

    def _receive_tensor(self, layout: _Layout | None) -> torch.Tensor | None:
        if layout is None:
            return None
        staged = self._channel.data is None
        device = torch.device("cpu") if staged else self._device
        flat = torch.empty(layout.numel, dtype=layout.dtype, device=device)
        if layout.numel:
            group = self._channel.control if staged else self._channel.data
            self._take(self._post(flat.view(torch.uint8), group))
        return flat.to(self._device).as_strided(layout.shape, layout.strides)

    def _post(self, buffer: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[Any, torch.Tensor]:
        try:
            return dist.irecv(buffer, self.peer, group=group), buffer
        except RuntimeError as error:
            raise peer_lost(self.peer, error) from error

    def _take(self, posted: tuple[Any, torch.Tensor]) -> torch.Tensor:
        work, buffer = posted
        try:
            work.wait()
        except RuntimeError as error:
            raise peer_lost(self.peer, error) from error
        return buffer


def peer_lost(peer: int, error: BaseException) -> PeerLost:
    """A connection's failure in words: the peer is gone, or says nothing."""
    text = re.sub(r"^\[[^]]*\]\s*", "", str(error).strip()).split(". ")[0]
    if "imed out" in text:
        return PeerLost(f"rank {peer} does not answer ({text})", rank=peer)
    return PeerLost(f"the connection to rank {peer} broke: it has ended or left the step ({text})", rank=peer)


class _Headers:
    """The headers that both ends of an edge remember, in step because both see the same messages."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def note(self, packed: bytes) -> tuple[int, bool]:
        """Number of a header, and whether it has to be sent."""
        number = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little", signed=True)
        if number in self._kept:
            self._kept.move_to_end(number)
            return number, False
        self._kept[number] = packed
        if len(self._kept) > NUM_HEADERS_KEPT:
            self._kept.popitem(last=False)
        return number, True

    def known(self, number: int) -> bytes:
        packed = self._kept.get(number, b"")
        if packed:
            self._kept.move_to_end(number)
        return packed


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def _pack_header(tensors: Sequence[torch.Tensor | None], header: bytes) -> bytes:
    layouts = [
        None
        if tensor is None
        else (list(tensor.shape), dense_strides(tensor), str(tensor.dtype).removeprefix("torch."))
        for tensor in tensors
    ]
    layout = json.dumps(layouts, separators=(",", ":")).encode()
    return len(layout).to_bytes(8, "little") + layout + header


def _unpack_header(packed: bytes) -> tuple[list[_Layout | None], bytes]:
    end = 8 + int.from_bytes(packed[:8], "little")
    layouts = [
        None if item is None else _Layout(tuple(item[0]), tuple(item[1]), getattr(torch, item[2]))
        for item in json.loads(packed[8:end])
    ]
    return layouts, packed[end:]


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides under which a tensor travels: its own where it fills its memory, row by row otherwise.

    >>> dense_strides(torch.zeros(2, 3).t()), dense_strides(torch.zeros(2, 6)[:, ::2])
    ((1, 3), (3, 1))
    """
    if tensor.layout != torch.strided:
        raise UnsupportedModelError(
            f"a tensor of layout {tensor.layout} would have to go from one stage to another; only dense tensors can: "
            "keep the layers that share it on one stage (pin=)"
        )
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != size:
            return torch.empty(tensor.shape, device="meta").stride()
        size *= length
    return tensor.stride() if tensor.numel() else torch.empty(tensor.shape, device="meta").stride()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as one row of bytes; copied only where it does not fill its memory."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    strides = dense_strides(plain)
    if plain.stride() != strides:
        plain = torch.empty_strided(plain.shape, strides, dtype=plain.dtype, device=plain.device).copy_(plain)
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
