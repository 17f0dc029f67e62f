"""A rank holds its own parameters, under their own names, wherever they come from, and only those."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from plans import plan_for, plan_of
from rank_pool import RankPool
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn import functional as F

from partitioner.errors import ArgumentError, NotBuiltError, PlanMismatchError
from partitioner.executor import materialize
from partitioner.executor.placeholders import is_placeholder
from partitioner.executor.placement import Placement

CPU = torch.device("cpu")


def test_the_stages_hold_every_parameter_between_them_and_nothing_else() -> None:
    case = models.build("tied")
    plan = plan_for(case, pp=3)
    whole = case.model.state_dict()
    found: dict[str, list[int]] = {}
    for stage in range(3):
        model = copy.deepcopy(case.model)
        identities = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        placement = Placement(plan, stage, model, CPU, None)
        assert placement.model is model
        assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == identities
        for name, value in placement.state_dict().items():
            assert torch.equal(value, whole[name])
            found.setdefault(name, []).append(stage)
        for name, parameter in model.named_parameters():
            assert (name in placement.own) != is_placeholder(parameter.data)
            assert parameter.shape == whole[name].shape and parameter.requires_grad
    assert set(found) == set(whole)
    assert found["embed.weight"] == found["head.weight"] == [0, 2]
    assert all(len(stages) == 1 for name, stages in found.items() if name not in ("embed.weight", "head.weight"))


class WithBuffers(nn.Module):
    """A table that is saved, one that is computed when the model is built, statistics, and a recurrent layer."""

    saved: torch.Tensor
    computed: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("saved", torch.arange(6.0))
        self.register_buffer("computed", 1 / (1 + torch.arange(6.0)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)) * self.computed
        x = self.rnn(x.unsqueeze(1))[0].squeeze(1)
        output: torch.Tensor = self.last(x + self.saved)
        return output


def test_buffers_live_where_they_are_used_and_one_that_no_layer_uses_is_whole_everywhere() -> None:
    model = WithBuffers().train()
    model.register_buffer("class_weights", torch.ones(6))  # for a loss function, perhaps
    model.register_buffer("table", torch.arange(6))
    model.rnn.register_buffer("table", model.table)
    plan = plan_of(model, (torch.randn(4, 6),), pp=3, cuts=["rnn", "last"])
    whole = {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
    expected = [
        {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "computed"},
        {"table", "rnn.table", "saved"},  # added between the layers: the first of them runs it
        set(),
    ]
    for stage, own in enumerate(expected):
        placed = copy.deepcopy(model)
        identities = {name: id(buffer) for name, buffer in placed.named_buffers(remove_duplicate=False)}
        placement = Placement(plan, stage, placed, CPU, None)
        found = dict(placed.named_buffers(remove_duplicate=False))
        assert {name: id(buffer) for name, buffer in found.items()} == identities
        for name, buffer in found.items():
            here = name in own or name == "class_weights"
            assert is_placeholder(buffer) != here and (not here or torch.equal(buffer, whole[name])), (stage, name)
            assert buffer.untyped_storage().nbytes() == buffer.element_size() * (buffer.numel() if here else 1)
        kept = {name for name in placement.state_dict() if name in whole}
        assert kept == (own | ({"class_weights"} if stage == 0 else set())) - {"computed"}


def stored(model: nn.Module, kind: str, folder: Path) -> Any:
    """The model's state in one of the forms that `weights` takes."""
    state = model.state_dict()
    if kind == "state dict":
        return state
    if kind == "torch.save":
        torch.save(state, folder / "weights.pt")
        return folder / "weights.pt"
    if kind == "distributed":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_save(state, checkpoint_id=folder / "checkpoint", no_dist=True)
        return str(folder / "checkpoint")
    safetensors = pytest.importorskip("safetensors.torch")
    untied = {name: value for name, value in state.items() if name != "last.weight"}
    names = sorted(untied)
    if kind == "safetensors":
        safetensors.save_file(untied, folder / "model.safetensors")
        return folder / "model.safetensors"
    safetensors.save_file({name: untied[name] for name in names[::2]}, folder / "model-1.safetensors")
    safetensors.save_file({name: untied[name] for name in names[1::2]}, folder / "model-2.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["state dict", "torch.save", "distributed", "safetensors", "safetensors in parts"])
def test_a_factory_reads_only_its_own_tensors_and_trains_like_the_model(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    def step(given: Any, weights: Any) -> tuple[float, dict[str, torch.Tensor], list[str], dict[str, torch.Tensor]]:
        with materialize(plan, given, loss_fn=F.mse_loss, weights=weights) as stage:
            loss = float(stage.train_step(x, y))
            gradients = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
            real = [n for n, p in stage.module.named_parameters() if not is_placeholder(p.data)]
            return loss, gradients, real, {n: b for n, b in stage.module.named_buffers() if n in stage.state_dict()}

    torch.manual_seed(0)
    model, x, y = WithBuffers(), torch.randn(8, 6), torch.randn(8, 6)
    model.norm.running_mean = torch.ones(6)
    plan = plan_of(model, x, microbatches=2, cuts=["rnn"])
    weights = stored(model, kind, tmp_path)
    expected = ranks.run(2, step, model, None)
    got = ranks.run(2, step, WithBuffers, weights)
    for (loss, gradients, real, buffers), (loss_2, gradients_2, real_2, buffers_2) in zip(expected, got, strict=True):
        assert loss == loss_2 and real == real_2 and gradients.keys() == gradients_2.keys()
        assert all(torch.equal(gradients[name], gradients_2[name]) for name in gradients)
        assert all(torch.equal(buffers[name].nan_to_num(7), buffers_2[name].nan_to_num(7)) for name in buffers)
    assert set(got[0][2]) == {"first.weight", "first.bias", "norm.weight", "norm.bias"}


def test_a_meta_model_keeps_its_tied_parameters_tied_and_its_recurrent_layers_in_one_piece() -> None:
    torch.manual_seed(0)
    real, x = WithBuffers(), torch.randn(8, 6)
    plan = plan_of(real, x, pp=1)
    placement = Placement(plan, 0, WithBuffers, CPU, real.state_dict())
    model = placement.model
    assert isinstance(model, WithBuffers)
    assert model.last.weight is model.first.weight
    assert model.rnn._flat_weights[0] is model.rnn.weight_ih_l0
    torch.testing.assert_close(model(x), real(x))


def test_meta_parameters_without_values_are_named() -> None:
    real, x = WithBuffers(), torch.randn(8, 6)
    plan = plan_of(real, x, cuts=["rnn"])
    with pytest.raises(
        ArgumentError, match=r"4 parameters of stage 0 have no values .*first\.weight, first\.bias, norm"
    ):
        Placement(plan, 0, WithBuffers, CPU, None)
    state = real.state_dict()
    del state["rnn.bias_hh_l0"]
    with pytest.raises(ArgumentError, match=r"lack 1 parameters of stage 1: rnn\.bias_hh_l0"):
        Placement(plan, 1, WithBuffers, CPU, state)
    Placement(plan, 0, WithBuffers, CPU, state)
    with torch.device("meta"):
        meta = WithBuffers()
    with pytest.raises(ArgumentError, match=r"1 buffers have no values .*computed: pass the function"):
        Placement(plan, 0, meta, CPU, state)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    real, x = WithBuffers(), torch.randn(8, 6)
    plan = plan_of(real, x, pp=1)
    state = real.state_dict() | {"norm.weight": torch.ones(7)}
    with pytest.raises(ArgumentError, match=r"norm.weight is \(7,\) in the weights and \(6,\) in the model"):
        Placement(plan, 0, WithBuffers, CPU, state)
    with pytest.raises(ArgumentError, match="no weights at"):
        Placement(plan, 0, WithBuffers, CPU, tmp_path / "nothing.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(ArgumentError, match=r"neither \.safetensors nor"):
        Placement(plan, 0, WithBuffers, CPU, tmp_path / "text.pt")
    with pytest.raises(ArgumentError, match="holds neither"):
        Placement(plan, 0, WithBuffers, CPU, tmp_path)


def test_a_plan_for_another_model_names_both_and_what_differs() -> None:
    plan = plan_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(2, 4))
    with pytest.raises(
        PlanMismatchError, match=r"1\.weight is \(4, 4\) in the plan and \(5, 4\) in the model"
    ) as error:
        materialize(
            plan_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(2, 4), pp=1),
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5)),
        )
    assert plan.profile.fingerprint in str(error.value)


def test_an_optimizer_made_too_early_is_refused_with_what_to_write() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = plan_of(model, torch.zeros(2, 4), pp=1)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ArgumentError, match=r"torch\.optim\.Adam\(stage\.parameters\(\)"):
        materialize(plan, model)
    del optimizer


def test_a_schedule_that_is_only_predicted_is_refused() -> None:
    plan = plan_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(2, 4), schedule="zero-bubble")
    with pytest.raises(NotBuiltError, match="zero-bubble with 1 stages a rank is predicted but not run"):
        materialize(plan, nn.Linear(4, 4))


def test_a_model_taken_over_already_is_refused_where_it_has_lost_its_values() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.PReLU())
    state = copy.deepcopy(model.state_dict())
    plan = plan_of(model, torch.zeros(2, 4), cuts=["1"])
    Placement(plan, 0, model, CPU, None)
    Placement(plan, 0, model, CPU, None)
    with pytest.raises(ArgumentError, match=r"3 parameters of stage 1 are placeholders.*1\.weight, 1\.bias, 2\.weight"):
        Placement(plan, 1, model, CPU, None)
    assert torch.equal(Placement(plan, 1, model, CPU, state).own["1.weight"], state["1.weight"])


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ArgumentError, match="make it a part of the model"):
        materialize(plan_of(model, torch.zeros(2, 4), pp=1), model, loss_fn=nn.Bilinear(4, 4, 1))


def test_replicas_start_from_the_same_values(ranks: RankPool) -> None:
    def start(pp: int) -> dict[str, torch.Tensor]:
        import os

        torch.manual_seed(int(os.environ["RANK"]))
        case = models.TiedLanguageModel()
        case.register_buffer("noise", torch.randn(3))
        with materialize(plans[pp], case, loss_fn=F.cross_entropy) as stage:
            return {name: value.clone() for name, value in stage.state_dict().items()} | {
                "noise": stage.module.get_buffer("noise").clone()
            }

    model, x = models.TiedLanguageModel(), torch.zeros(8, 6, dtype=torch.long)
    model.register_buffer("noise", torch.randn(3))
    plans = {pp: plan_of(model, x, pp=pp, dp=4 // pp) for pp in (1, 2)}
    for pp in (1, 2):
        found: dict[str, torch.Tensor] = {}
        for state in ranks.run(4, start, pp):
            for name, value in state.items():
                assert torch.equal(found.setdefault(name, value), value), name
