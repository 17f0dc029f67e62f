"""What goes into an edge comes out of it: every dtype and layout, any order of shapes, and a lost peer said plainly."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool, RanksFailed, join_group

from partitioner.errors import RankError, UnsupportedModelError
from partitioner.wire import NUM_HEADERS_KEPT, Channel, End, Receiver, Sender, Tag, dense_strides


def channel(peer: int) -> Channel:
    return Channel(peer, End(dist.group.WORLD, peer))


def samples() -> list[list[torch.Tensor | None]]:
    torch.manual_seed(0)
    kinds = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
    base = torch.randn(4, 6)
    return [
        [torch.randn(2, 3, 5).to(kind) for kind in kinds],
        [torch.tensor(3.5), torch.tensor(True), torch.empty(0, 4), None, torch.zeros((), dtype=torch.complex128)],
        [base.t(), base[:, ::2], base[1:3], base.expand(3, 4, 6), base.unsqueeze(1)],
        [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(3, dtype=torch.complex64).conj()],
        [],
        [torch.randn(2, 2, requires_grad=True), torch.randn(300_000)],
    ]


def exchange(rounds: int) -> list[tuple[bytes, list[torch.Tensor | None]]]:
    rank, _ = join_group()
    got = []
    sender, receiver = Sender(channel(1)), Receiver(channel(0), torch.device("cpu"))
    for step in range(rounds):
        for k, tensors in enumerate(samples()):
            tag = Tag("F", step, k)
            if rank == 0:
                sender.send(tag, f"about {k}".encode(), tensors)
            else:
                got.append(receiver.receive(tag))
    sender.flush()
    return got


def test_every_dtype_and_layout_arrives_unchanged(ranks: RankPool) -> None:
    got = ranks.run(2, exchange, 2)[1]
    sent = [tensors for _ in range(2) for tensors in samples()]
    assert [header for header, _ in got] == [f"about {k}".encode() for _ in range(2) for k in range(len(samples()))]
    for mine, theirs in zip(sent, (tensors for _, tensors in got), strict=True):
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            if a is None or b is None:
                assert a is b
                continue
            assert (a.dtype, a.shape) == (b.dtype, b.shape) and not b.requires_grad
            assert torch.equal(a, b)
            assert b.stride() == dense_strides(a)
    assert got[3][1][0].is_contiguous(memory_format=torch.channels_last)


def test_receives_posted_ahead_take_what_comes_whatever_its_layout(ranks: RankPool) -> None:
    """The same layout again, another one, the same with another header, fewer, more and larger tensors, none."""

    def many(sizes: list[list[int]], seed: int) -> int:
        rank, _ = join_group()
        sender, receiver = Sender(channel(1)), Receiver(channel(0), torch.device("cpu"))
        generator = torch.Generator().manual_seed(seed)
        order = torch.randint(0, len(sizes), (300,), generator=generator).tolist()
        ahead = torch.randint(0, 2, (300,), generator=generator).tolist()
        for k, (which, early) in enumerate(zip(order, ahead, strict=True)):
            header = f"{k % 3} {k // 40}".encode()
            if rank == 0:
                sender.send(Tag("F", 0, k), header, [torch.full((size,), k) for size in sizes[which]])
                sender.keep_at_most(8)
                continue
            got_header, got = receiver.receive(Tag("F", 0, k))
            assert got_header == header
            assert [tensor.tolist() for tensor in got if tensor is not None] == [[k] * size for size in sizes[which]]
            if early and k < 299:
                receiver.expect()
        sender.flush()
        return len(order)

    sizes = [[3, 5], [3, 5], [5, 3], [], [0], [3, 0, 5], [1], [20_000, 3, 3, 3], [8, 9, 1, 0, 2, 70_000]]
    assert ranks.run(2, many, sizes, 7) == [300, 300]


def test_the_headers_kept_on_both_sides_stay_in_step_when_there_are_too_many(ranks: RankPool) -> None:
    def many(order: list[int]) -> list[int]:
        rank, _ = join_group()
        sender, receiver = Sender(channel(1)), Receiver(channel(0), torch.device("cpu"))
        got = []
        for k, length in enumerate(order):
            if rank == 0:
                sender.send(Tag("B", 0, k), b"", [torch.arange(length)])
            else:
                tensor = receiver.receive(Tag("B", 0, k))[1][0]
                assert tensor is not None and torch.equal(tensor, torch.arange(length))
                got.append(len(tensor))
        sender.flush()
        return got

    generator = torch.Generator().manual_seed(1)
    order = torch.randint(0, 2 * NUM_HEADERS_KEPT, (400,), generator=generator).tolist()
    assert ranks.run(2, many, order)[1] == order


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=0, max_size=4), st.randoms(use_true_random=False))
def test_dense_strides_keep_permutations_and_only_those(shape: list[int], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tensor = torch.zeros(shape).permute(order)
    assert dense_strides(tensor) == tensor.stride()
    wider = torch.zeros([*shape, 2])[..., 0]
    if wider.numel() > 1:
        assert dense_strides(wider) == torch.zeros(shape).stride()


def test_sparse_tensors_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="sparse_coo"):
        dense_strides(torch.eye(2).to_sparse())


def test_another_message_than_the_awaited_one_names_both(ranks: RankPool) -> None:
    def mixed() -> None:
        rank, _ = join_group()
        if rank == 0:
            sender = Sender(channel(1))
            sender.send(Tag("E", 5, 0), b"", [])
            sender.flush()
        else:
            Receiver(channel(0), torch.device("cpu")).receive(Tag("F", 4, 2))

    with pytest.raises(RanksFailed, match="E0 of step 5 where F2 of step 4"):
        ranks.run(2, mixed)


def test_a_peer_that_is_killed_is_a_rank_error_at_once(ranks: RankPool) -> None:
    def lose() -> None:
        rank, _ = join_group()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        Receiver(channel(1), torch.device("cpu")).receive(Tag("B", 0, 0))

    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        ranks.run(2, lose)
    assert time.monotonic() - start < 5
    error = failure.value.errors[0]
    assert isinstance(error, RankError) and error.rank == 1
    assert str(error).startswith("the connection to rank 1 broke") and "third_party" not in str(error)


def test_a_peer_that_says_nothing_is_a_rank_error_after_the_timeout(ranks: RankPool) -> None:
    def wait_in_vain() -> None:
        rank, _ = join_group(timeout_s=1.0)
        if rank == 0:
            Receiver(channel(1), torch.device("cpu")).receive(Tag("B", 0, 0))
        else:
            time.sleep(2)

    with pytest.raises(RanksFailed) as failure:
        ranks.run(2, wait_in_vain)
    error = failure.value.errors[0]
    assert isinstance(error, RankError) and error.rank == 1 and "does not answer" in str(error)
