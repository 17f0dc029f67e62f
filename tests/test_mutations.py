"""Code that was broken on purpose is noticed: a few of the ways in benchmarks/mutations.py, which runs them all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

from mutations import MUTATIONS, on_ranks, self_check
from rank_pool import RankPool

QUICK = (
    "a skip is not sent",
    "a stale payload is used again",
    "buffer updates are lost",
    "random numbers are drawn again",
)


@pytest.mark.parametrize("mutation", [one for one in MUTATIONS if one.name in QUICK], ids=lambda one: one.name)
def test_the_self_check_notices_broken_slicing_and_passes_it_whole(mutation: object) -> None:
    assert not self_check(mutation, broken=False)
    assert self_check(mutation, broken=True)


@pytest.mark.parametrize("mutation", [one for one in MUTATIONS if one.on_ranks], ids=lambda one: one.name)
def test_the_comparison_on_ranks_notices_broken_steps(ranks: RankPool, mutation: object) -> None:
    assert on_ranks(ranks, mutation, broken=True).startswith("gradient")


def test_the_comparison_on_ranks_passes_what_is_whole(ranks: RankPool) -> None:
    mutation = next(one for one in MUTATIONS if one.on_ranks)
    assert not on_ranks(ranks, mutation, broken=False)
