"""Calls that ranks make of their stages: another one on some rank is named on all of them, at once."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import plan_of
from rank_pool import RankPool, join_group
from torch import nn

from partitioner.executor import materialize
from partitioner.executor.calls import OF_A_REPLICA, OF_ALL, SCALER
from partitioner.executor.stage import LiveStage
from partitioner.plan import Plan

X = torch.arange(32.0).reshape(8, 4) / 32
AT_ONCE_S = 5.0
"""Far below the minute after which a rank gives up."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def calls(stage: LiveStage, folder: Path) -> dict[str, Callable[[], Any]]:
    optimizer, scaler = torch.optim.SGD(stage.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    return {
        "stage.train_step": lambda: stage.train_step(X, X),
        "stage.eval_loss": lambda: stage.eval_loss(X, X),
        "stage.eval_step": lambda: stage.eval_step(X),
        "stage.full_state_dict": stage.full_state_dict,
        "stage.save_checkpoint": lambda: stage.save_checkpoint(folder / "checkpoint"),
        "stage.load_checkpoint": lambda: stage.load_checkpoint(folder / "first"),
        "stage.timeline": stage.timeline,
        "stage.clip_grad_norm_": lambda: stage.clip_grad_norm_(1.0),
        SCALER: lambda: (scaler.step(optimizer), scaler.update()),
        "stage.state_dict": stage.state_dict,
        "stage.close": stage.close,
    }


def errors_of(plan: Plan, folder: Path, made: list[tuple[str, ...]]) -> list[tuple[str, float]]:
    """For each of these, after a step: this rank's call, and one more step; the error's text and after how long."""
    join_group()
    found = []
    for each in made:
        try:
            with warnings.catch_warnings(), materialize(plan, model(), loss_fn=nn.MSELoss()) as stage:
                warnings.simplefilter("ignore")
                stage.train_step(X, X)
                by_name = calls(stage, folder)
                start = time.monotonic()
                by_name[each[stage.rank]]()
                stage.train_step(X, X)
            found.append(("", 0.0))
        except Exception as error:
            found.append((str(error), time.monotonic() - start))
    return found


def train_and_save(plan: Plan, folder: Path) -> None:
    with materialize(plan, model(), loss_fn=nn.MSELoss()) as stage:
        stage.train_step(X, X)
        stage.save_checkpoint(folder / "first")


@pytest.fixture(scope="module")
def folder(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calls")
    ranks.run(2, train_and_save, plan_of(model(), X), path)
    return path


def test_every_pair_of_different_calls_is_named_on_both_ranks_at_once(ranks: RankPool, folder: Path) -> None:
    pairs = [
        (one, other)[:: (-1) ** k] for k, (one, other) in enumerate(itertools.combinations((*OF_ALL, *OF_A_REPLICA), 2))
    ]
    first, second = ranks.run(2, errors_of, plan_of(model(), X), folder, pairs)
    for pair, *both in zip(pairs, first, second, strict=True):
        for text, seconds in both:
            assert f"rank 0 calls {pair[0]}, rank 1 calls {pair[1]}: make both on every rank" in text, (pair, both)
            assert seconds < AT_ONCE_S


def replicas_of(plan: Plan, made: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The same call on all ranks of a replica."""
    return [
        tuple(
            each[stage.ranks.index(rank)]
            for rank in range(plan.num_ranks)
            for stage in plan.stages
            if rank in stage.ranks
        )
        for each in made
    ]


@pytest.mark.parametrize(("pp", "shard"), [(1, "none"), (2, "none"), (1, "zero1"), (2, "zero2")])
def test_replicas_that_make_other_calls_are_named_at_once(ranks: RankPool, folder: Path, pp: int, shard: str) -> None:
    of_all = ("stage.train_step", "stage.full_state_dict", "stage.eval_loss", "stage.timeline")
    divided = ("stage.clip_grad_norm_", "stage.state_dict", "stage.eval_step", "stage.close", SCALER)
    pairs = list(itertools.permutations(of_all, 2))
    if shard != "none":
        pairs = [pair for other in divided for pair in (("stage.train_step", other), (other, "stage.train_step"))]
    plan = plan_of(model(), X, pp=pp, dp=2, shard=(shard,) * pp)
    per_rank = ranks.run(2 * pp, errors_of, plan, folder, replicas_of(plan, pairs))
    for k, pair in enumerate(pairs):
        for rank in range(2 * pp):
            text, seconds = per_rank[rank][k]
            assert f" calls {pair[0]}" in text and f" calls {pair[1]}" in text, (pair, rank, text)
            assert seconds < AT_ONCE_S


def test_ranks_that_leave_early_are_named(ranks: RankPool, folder: Path) -> None:
    for first in (0, 1):
        made = [("stage.close", "stage.train_step")[:: 1 if first == 0 else -1]]
        errors = ranks.run(2, errors_of, plan_of(model(), X), folder, made)
        assert f"stage.train_step on rank {first}, whose stage has been closed" in errors[first][0][0]
        text, seconds = errors[1 - first][0]
        assert text.startswith(f"rank {1 - first} (stage {1 - first}) stopped in ")
        assert f"stage.train_step, because rank {first} had left (by stage.close()" in text
        assert seconds < AT_ONCE_S


def test_what_may_differ_by_replica_does(ranks: RankPool) -> None:
    """One replica may have more batches to evaluate than another."""

    def evaluate(plan: Plan) -> int:
        with materialize(plan, model(), loss_fn=nn.MSELoss()) as stage:
            for _ in range(1 + 3 * stage.dp_rank):
                stage.eval_step(X)
            stage.train_step(X[:4], X[:4])
            return stage.dp_rank

    plan = plan_of(model(), X, pp=2, dp=2)
    assert sorted(ranks.run(4, evaluate, plan)) == [0, 0, 1, 1]
