"""Measured links agree with a stopwatch around the very same messages."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, join_group

from partitioner.errors import SetupError
from partitioner.links import SIZES_BYTES, RankLinks, between_ranks, loopback
from partitioner.wire import Sender


def measure(size: int) -> tuple[RankLinks, float, float]:
    """The links, and by hand: one-way time of a message with its note, and an all-reduce."""
    rank, _ = join_group()
    links = between_ranks(repeats=5)
    note, message = torch.zeros(64, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    trips, sums = [], []
    for _ in range(7):
        dist.barrier()
        start = time.perf_counter()
        if rank < 2:
            for part in (note, message):
                dist.send(part, 1) if rank == 0 else dist.recv(part, 0)
            for part in (note, message):
                dist.recv(part, 1) if rank == 0 else dist.send(part, 0)
        trips.append((time.perf_counter() - start) / 2)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(torch.zeros(size // 4))
        sums.append(time.perf_counter() - start)
    return links, statistics.median(trips), statistics.median(sums)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_links_between_ranks_are_what_a_stopwatch_says(ranks: RankPool, num_ranks: int) -> None:
    size = SIZES_BYTES[-1]
    answers = ranks.run(num_ranks, measure, size)
    links, one_way, reduced = answers[0]
    assert all(answer[0] == links for answer in answers)
    assert links.num_ranks == num_ranks and links.between is None and links.within is not None
    assert one_way / 4 < links.within.time(size) < one_way * 4
    assert reduced / 4 < links.all_reduce.time(size) < reduced * 4
    for link in (links.within, links.all_reduce):
        assert link.sizes_bytes == SIZES_BYTES and list(link.seconds) == sorted(link.seconds)
        assert 1e-6 < link.seconds[0] < link.seconds[-1] < 5


def test_one_process_alone_has_no_links() -> None:
    with pytest.raises(SetupError, match="two or more ranks"):
        between_ranks()


def test_a_loopback_is_a_link_of_this_machine() -> None:
    link = loopback(repeats=3)
    assert link.sizes_bytes == SIZES_BYTES and 1e-6 < link.seconds[0] <= link.seconds[-1] < 5


def test_neither_end_of_the_loopback_goes_before_the_other_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that ends resets the connection, on which the other may still wait for what has arrived long ago."""
    gone: list[int] = []
    gone_at_flush: list[int] = []

    class Watched(dist.ProcessGroupGloo):
        def __del__(self) -> None:
            gone.append(1)

    def slow_flush(sender: Sender) -> None:
        time.sleep(0.05)
        gone_at_flush.append(len(gone))
        flush(sender)

    flush = Sender.flush
    monkeypatch.setattr(dist, "ProcessGroupGloo", Watched)
    monkeypatch.setattr(Sender, "flush", slow_flush)
    loopback(repeats=2)
    assert len(gone) == 2
    assert gone_at_flush and not any(gone_at_flush)
