"""Checkpoints go on under any other plan as if nothing had happened, and are whole or not there."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from plans import plan_for
from rank_pool import RankPool, RanksFailed
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from partitioner.errors import ArgumentError, SetupError
from partitioner.executor import materialize
from partitioner.microbatches import Cutter
from partitioner.plan import Plan


def train(
    plan: Plan, case: models.Case, steps: int, load: Path | None, save: Path | None, whole: bool = False
) -> dict[str, Any]:
    """On a rank: load, train on the same batch with AdamW, whose rate falls from step to step, save."""
    with materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
        if load is not None:
            stage.load_checkpoint(load, optimizer)
        part = Cutter().cut(case.args, {}, case.target, stage.dp_size)[stage.dp_rank]
        for _ in range(steps):
            stage.train_step(part.args, part.target)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.5
        if save is not None:
            stage.save_checkpoint(save, optimizer)
        state = stage.full_state_dict() if whole else copy.deepcopy(stage.state_dict())
        return {"state": state, "lr": optimizer.param_groups[0]["lr"]}


def test_a_checkpoint_goes_on_under_any_plan(ranks: RankPool, tmp_path: Path) -> None:
    case = models.build("tied")
    plans = [plan_for(case, pp=pp, dp=dp, microbatches=2) for pp, dp in ((2, 2), (3, 1), (1, 1), (1, 2))]
    plans.insert(1, plan_for(case, pp=2, dp=2, microbatches=2, shard=("zero2", "zero1")))
    straight = train(plans[3], copy.deepcopy(case), 10, None, None)
    previous = None
    for k, plan in enumerate(plans):
        path = tmp_path / f"step {k}"
        if plan.num_ranks == 1:
            got = [train(plan, copy.deepcopy(case), 2, previous, path)]
        else:
            got = ranks.run(plan.num_ranks, train, plan, case, 2, previous, path)
        previous = path
    assert sorted(os.listdir(tmp_path)) == [f"step {k}" for k in range(5)]
    for rank in got:
        assert rank["lr"] == pytest.approx(straight["lr"]) == pytest.approx(0.01 * 0.5**10)
        for name, value in rank["state"].items():
            torch.testing.assert_close(value, straight["state"][name], rtol=1e-5, atol=1e-6)


def test_the_plain_model_and_other_weights_read_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    case = models.build("tied")
    plan = plan_for(case, pp=2, microbatches=2)
    path = tmp_path / "checkpoint"
    whole, nothing = ranks.run(2, train, plan, case, 2, None, path, True)
    assert nothing["state"] is None and list(whole["state"]) == list(case.model.state_dict())
    plain = models.TiedLanguageModel()
    with pytest.warns(UserWarning, match="single process"):
        dcp_load({"model": plain.state_dict()}, checkpoint_id=path)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, whole["state"][name])
        assert not torch.equal(value, case.model.state_dict()[name])

    def from_factory() -> dict[str, torch.Tensor]:
        with materialize(plan, models.TiedLanguageModel, loss_fn=case.loss_fn, weights=path) as stage:
            return {name: value.clone() for name, value in stage.state_dict().items()}

    for state in ranks.run(2, from_factory):
        assert state and all(torch.equal(value, whole["state"][name]) for name, value in state.items())


def test_the_whole_state_dict_has_buffers_from_where_they_are_kept_up_to_date(ranks: RankPool) -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
            self.register_buffer("table", torch.arange(3))
            self.wide = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.b(torch.tanh(self.a(x))) + self.wide.sum()
            return y

        def get_extra_state(self) -> str:
            return "kept"

        def set_extra_state(self, state: str) -> None:
            assert state == "kept"

    model, x = Norms(), torch.randn(8, 4)
    case = models.Case(model, (x,), target=torch.randn(8, 4), loss_fn=nn.MSELoss())
    plan = plan_for(case, pp=2, microbatches=1, cuts=["b"])
    one = train(plan_for(case, pp=1, microbatches=1), copy.deepcopy(case), 2, None, None)
    whole = ranks.run(2, train, plan, case, 2, None, None, True)[0]["state"]
    assert list(whole) == list(model.state_dict()) and whole["_extra_state"] == "kept"
    for name, value in whole.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, one["state"][name], rtol=1e-5, atol=1e-6)
    assert int(whole["b.num_batches_tracked"]) == 2


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(ranks: RankPool, tmp_path: Path) -> None:
    class Unsaveable:
        def __reduce__(self) -> Any:
            raise TypeError("cannot be saved")

    def save(fail: bool) -> None:
        with materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
            optimizer = torch.optim.SGD(stage.parameters(), 0.1)
            if fail and stage.stage == 1:
                optimizer.param_groups[0]["odd"] = Unsaveable()
            try:
                stage.save_checkpoint(tmp_path / "checkpoint", optimizer)
            finally:
                stage.train_step(case.inputs, case.target)

    case = models.build("tied")
    plan = plan_for(case, pp=2)
    ranks.run(2, save, False)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(RanksFailed) as failure:
        ranks.run(2, save, True)
    for error in failure.value.errors.values():
        assert isinstance(error, SetupError) and "cannot write the checkpoint" in str(error)
        assert "rank 1: TypeError: cannot be saved" in str(error)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_what_is_no_checkpoint_of_this_model_is_refused(tmp_path: Path) -> None:
    case = models.build("tied")
    plan = plan_for(case, pp=1)
    with materialize(plan, copy.deepcopy(case.model), loss_fn=case.loss_fn) as stage:
        with pytest.raises(ArgumentError, match="no checkpoint at"):
            stage.load_checkpoint(tmp_path / "nothing")
        stage.save_checkpoint(tmp_path / "checkpoint")
        with pytest.raises(ArgumentError, match="without an optimizer"):
            stage.load_checkpoint(tmp_path / "checkpoint", torch.optim.SGD(stage.parameters(), 0.1))
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "diary.txt").write_text("kept")
        with pytest.raises(ArgumentError, match=r"holds other files \(diary\.txt\)"):
            stage.save_checkpoint(tmp_path / "notes")
    assert (tmp_path / "notes" / "diary.txt").read_text() == "kept"
    other = models.build("unet")
    other_plan = plan_for(other, pp=1)
    with (
        materialize(other_plan, other.model, loss_fn=other.loss_fn) as stage,
        pytest.raises(ArgumentError, match=r"has no model\.first\.weight: it is of another model"),
    ):
        stage.load_checkpoint(tmp_path / "checkpoint")
