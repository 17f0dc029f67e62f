"""The pool itself: what it returns, that it reports a failed rank, and that it cannot hang."""

from __future__ import annotations

import os
import time

import pytest
from rank_pool import RankPool, RanksFailed, join_group


def total_of_ranks(scale: int) -> int:
    import torch
    import torch.distributed as dist

    rank, _ = join_group()
    value = torch.tensor(scale * rank)
    dist.all_reduce(value)
    return int(value)


def test_every_rank_returns_its_own_result(ranks: RankPool) -> None:
    assert ranks.run(4, total_of_ranks, 10) == [60, 60, 60, 60]
    assert ranks.run(2, lambda: os.environ["RANK"]) == ["0", "1"]


def test_a_rank_that_raises_is_named_and_the_pool_lives_on(ranks: RankPool) -> None:
    def fail_on_rank_1() -> None:
        rank, _ = join_group()
        if rank == 1:
            raise KeyError("no such thing")
        import torch.distributed as dist

        dist.barrier()

    with pytest.raises(RanksFailed, match="no such thing") as failure:
        ranks.run(2, fail_on_rank_1)
    assert isinstance(failure.value.errors[1], KeyError)
    assert ranks.run(2, total_of_ranks, 1) == [1, 1]


def test_a_rank_that_hangs_is_killed_in_time(ranks: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="no answer") as failure:
        ranks.run(2, lambda: time.sleep(60) if os.environ["RANK"] == "1" else None, timeout=1.0)
    assert time.monotonic() - start < 5 and list(failure.value.errors) == [1]
