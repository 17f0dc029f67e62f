"""Payloads over one directed edge, received into buffers that are posted before the payload is sent.

One payload, in order on its edge:

    preamble   8 int64: kind, step, micro-batch, hash and length of the header, number of tensors, same layout, 0
    tensors    one message each, as bytes; None and empty tensors send nothing
    header     layout of the tensors and the sender's own bytes; left out when the receiver has seen this hash

Both ends know the layout of the last payload, and the receiver posts buffers for the preamble and the tensors of one
more like it: what is sent then goes straight there. Where the layout is another, a single byte goes into each of those
buffers, and tensors follow the header, received once their sizes are known. gloo ends the process when a message is
larger than the buffer posted for it, and nothing can catch that; a shorter one it takes. Over a device's own group,
which does not, nothing but the preamble is posted ahead. Both sides keep the same few headers, the least recently used
one leaves first.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

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


class End(NamedTuple):
    """A process group, and the other end's rank in it; messages of one tag come in their order."""

    group: Any
    peer: int
    tag: int = 0

    def send(self, buffer: torch.Tensor) -> Any:
        return self.group.send([buffer], self.peer, self.tag)

    def receive(self, buffer: torch.Tensor) -> Any:
        return self.group.recv([buffer], self.peer, self.tag)


class Channel(NamedTuple):
    """How an edge talks: `control` is gloo; `data` is its own device group, None: all goes over gloo. `peer`: rank."""

    peer: int
    control: End
    data: End | None = None


class PeerLost(RankError):
    """Another rank is gone or silent; the reason lies there, not here."""


class Sender:
    """The near end of an edge. `send` returns at once; buffers are held until their message has left."""

    def __init__(self, channel: Channel) -> None:
        self.peer = channel.peer
        self._channel = channel
        self._headers = _Headers()
        self._agreed: list[_Layout | None] = []
        self._posted: deque[tuple[Tag, list[tuple[Any, torch.Tensor]]]] = deque()

    def send(self, tag: Tag, header: bytes, tensors: Sequence[torch.Tensor | None]) -> None:
        """Post one payload."""
        layouts = [None if tensor is None else _layout(tensor) for tensor in tensors]
        packed = _pack_header(layouts, header)
        number, is_new = self._headers.note(packed)
        is_same = layouts == self._agreed
        fields = [_KINDS.index(tag.kind), tag.step, tag.microbatch, number, len(packed) * is_new, len(tensors)]
        parts = [self._post(torch.tensor([*fields, int(is_same), 0], dtype=torch.int64), self._channel.control)]
        described = [torch.frombuffer(bytearray(packed), dtype=torch.uint8)] if is_new else []
        data = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
        if is_same:
            parts += [self._post_tensor(tensor) for tensor in data]
        elif self._channel.data is None:
            unused = sum(layout is not None and layout.numel > 0 for layout in self._agreed)
            parts += [self._post(torch.zeros(1, dtype=torch.uint8), self._channel.control) for _ in range(unused)]
        parts += [self._post(buffer, self._channel.control) for buffer in described]
        if not is_same:
            parts += [self._post_tensor(tensor) for tensor in data]
        self._agreed = layouts
        self._posted.append((tag, parts))

    def keep_at_most(self, count: int) -> None:
        """Wait until no more than `count` payloads are under way, so that their buffers do not pile up."""
        while len(self._posted) > count:
            self._wait_for_oldest()

    def release(self, tag: Tag) -> None:
        """Let go of the buffers up to this payload's, which has arrived: an answer to it has come back."""
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

    def _post(self, buffer: torch.Tensor, end: End) -> tuple[Any, torch.Tensor]:
        try:
            return end.send(buffer), buffer
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
    """The far end of an edge. `expect` is called ahead of `receive`, to have the next payload under way early."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self.peer = channel.peer
        self._channel = channel
        self._device = device
        self._headers = _Headers()
        self._agreed: list[_Layout | None] = []
        self._awaited: tuple[_Posted, list[_Posted]] | None = None

    def expect(self) -> None:
        """Say that one more payload will come; it is received in the background, if it is like the last one."""
        if self._awaited is None:
            preamble = self._post(torch.zeros(PREAMBLE_LENGTH, dtype=torch.int64), self._channel.control)
            ahead = self._agreed if self._channel.data is None else []
            self._awaited = preamble, [self._post_tensor(layout) for layout in ahead]

    def receive(self, tag: Tag) -> tuple[bytes, list[torch.Tensor | None]]:
        """The next payload: the sender's header bytes and its tensors, on this rank's device.

        A RankError when the peer is gone, or has sent something else: then the ranks are not at the same point.
        """
        self.expect()
        assert self._awaited is not None
        (awaited, posted), self._awaited = self._awaited, None
        kind, step, microbatch, number, length, num_tensors, is_same, _ = self._take(awaited).tolist()
        came = Tag(_KINDS[kind], step, microbatch)
        if came != tag:
            raise RankError(
                f"rank {self.peer} sent {came} where {tag} was awaited: all ranks must make the same calls "
                "(train_step, eval_step) in the same order",
                rank=self.peer,
            )
        self._take_all(posted)
        packed = self._headers.known(number)
        if length:
            buffer = self._take(self._post(torch.empty(length, dtype=torch.uint8), self._channel.control))
            packed = buffer.numpy().tobytes()
            self._headers.note(packed)
        layouts, header = _unpack_header(packed)
        assert len(layouts) == num_tensors
        if not is_same or self._channel.data is not None:
            posted = [self._post_tensor(layout) for layout in layouts]
            self._take_all(posted)
        self._agreed = layouts
        return header, [
            None if layout is None else one.buffer.to(self._device).as_strided(layout.shape, layout.strides)
            for one, layout in zip(posted, layouts, strict=True)
        ]

    def _post_tensor(self, layout: _Layout | None) -> _Posted:
        """A buffer for a tensor on its way; nothing is on its way of one that is None or empty."""
        if layout is None:
            return _Posted(None, torch.empty(0))
        end = self._channel.data or self._channel.control
        device = torch.device("cpu") if self._channel.data is None else self._device
        flat = torch.empty(layout.numel, dtype=layout.dtype, device=device)
        return self._post(flat.view(torch.uint8), end)._replace(buffer=flat) if layout.numel else _Posted(None, flat)

    def _post(self, buffer: torch.Tensor, end: End) -> _Posted:
        try:
            return _Posted(end.receive(buffer), buffer)
        except RuntimeError as error:
            raise peer_lost(self.peer, error) from error

    def _take(self, posted: _Posted) -> torch.Tensor:
        if posted.work is not None:
            try:
                posted.work.wait()
            except RuntimeError as error:
                raise peer_lost(self.peer, error) from error
        return posted.buffer

    def _take_all(self, posted: Sequence[_Posted]) -> None:
        for one in posted:
            self._take(one)


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


class _Posted(NamedTuple):
    """A receive under way; `work` is None where nothing is."""

    work: Any
    buffer: torch.Tensor


def _layout(tensor: torch.Tensor) -> _Layout:
    return _Layout(tuple(tensor.shape), dense_strides(tensor), tensor.dtype)


def _pack_header(layouts: Sequence[_Layout | None], header: bytes) -> bytes:
    described = [
        None if layout is None else (layout.shape, layout.strides, str(layout.dtype).removeprefix("torch."))
        for layout in layouts
    ]
    layout = json.dumps(described, separators=(",", ":")).encode()
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
