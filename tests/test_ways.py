"""What further forwards do otherwise than the captured one restricts the plan, and training goes on when it comes."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from models import Case
from odd_glue_models import Stack
from odd_models import D
from rank_pool import RankPool
from torch import nn

import partitioner as pt
from partitioner.plan import Plan
from partitioner.profiles import Profile

STEPS, MICROBATCHES = 3, 4


def mean_square(output: torch.Tensor, _: object) -> torch.Tensor:
    return output.square().mean()


class RunsTwice(Stack):
    """As diffusion models condition on what they predicted, in half of all forwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if random.random() < 0.5:
            with torch.no_grad():
                x = x + self.run(x)
        return self.run(x)


class RunsTwiceLater(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.run(self.run(x) if self.calls > 6 else x)


class InAnOrderOfTheData(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = [0, 1, 2, 3] if float(x[0, 0]) > 0 else [0, 2, 1, 3]
        for k in order:
            x = torch.tanh(self.layers[k](x))
        return x


class InRaggedTensors(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ragged = torch.nested.as_nested_tensor([*self.layers[0](x).split([1, len(x) - 1])])
        ragged = self.layers[1](ragged)
        return self.layers[3](self.layers[2](torch.nested.to_padded_tensor(ragged, 0.0)))


class LogsNorms(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.norms: dict[str, float] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 10 == 0:
            with torch.no_grad():
                self.norms = {name: float(p.norm()) for name, p in self.named_parameters()}
        return self.run(x)


class UpdatesItsTarget(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.layers).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 6 == 0:
            self.target.load_state_dict(self.layers.state_dict())
        y = x
        for layer in self.target:
            y = torch.tanh(layer(y))
        return self.run(x) - y


class MakesATeacher(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.teachers: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 7:
            self.teachers.append(copy.deepcopy(self.layers[0]))
        y = self.run(x)
        for teacher in self.teachers:
            y = y - teacher(x).detach()
        return y


def case_of(kind: type[Stack]) -> Case:
    torch.manual_seed(0)
    model = kind()
    x = torch.randn(8, D)
    x[:, 0] = torch.tensor([1.0, 1, 1, 1, -1, -1, 1, -1])
    return Case(model, (x,), loss_fn=mean_square)


def profiled(kind: type[Stack]) -> Profile:
    case = case_of(kind)
    random.seed(0)  # the captured forward of RunsTwice runs once
    before = copy.deepcopy(case.model.state_dict())
    found = pt.profile(case.model, case.args, loss_fn=case.loss_fn, microbatch_sizes=[2], whole_step=False)
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert case.model.calls == 0
    return found


@pytest.mark.parametrize("kind", [RunsTwiceLater, RunsTwice])
def test_layers_that_are_called_once_more_stay_together(kind: type[Stack]) -> None:
    found = profiled(kind)
    ids = [layer.id for layer in found.layers if "#" not in layer.id]
    assert set(ids[1:]) <= found.no_cut.keys()
    if kind is RunsTwiceLater:
        assert "some forwards call layers.0#1 after layers.3" in found.no_cut["layers.2"]


def test_layers_in_another_order_stay_together_and_others_need_not() -> None:
    assert profiled(InAnOrderOfTheData).no_cut.keys() == {"layers.2"}


def test_weights_that_are_read_now_and_then_are_where_that_is_done() -> None:
    found = profiled(LogsNorms)
    assert not found.no_cut
    assert all("layers.0" in one.layers for one in found.parameters)


def test_weights_that_are_written_now_and_then_stay_with_their_readers() -> None:
    found = profiled(UpdatesItsTarget)
    assert {one.names[0].partition(".")[0] for one in found.parameters if one.written} == {"target"}
    assert {"target.1", "target.2", "target.3"} <= found.no_cut.keys()
    assert "layers.2" not in found.no_cut


def test_a_copy_that_is_made_on_the_way_leaves_no_cut() -> None:
    found = profiled(MakesATeacher)
    assert {layer.id for layer in found.layers[1:]} == found.no_cut.keys()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_ragged_tensors_without_a_shape_are_looked_at() -> None:
    assert "layers.3" not in profiled(InRaggedTensors).no_cut


def on_a_rank(plan: Plan, kind: type[Stack]) -> list[tuple[float, dict[str, torch.Tensor], dict[str, float]]]:
    case, found = case_of(kind), []
    with pt.materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
        for step in range(STEPS):
            stage.module.zero_grad()
            loss = float(stage.train_step(case.args[0] + step))
            gradients = {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}
            found.append((loss, gradients, dict(case.model.norms)))
    return found


def test_logs_of_all_weights_come_in_the_midst_of_training(ranks: RankPool) -> None:
    case = case_of(LogsNorms)
    plan = pt.partition(
        case.model,
        case.args,
        gpus=2,
        mesh={"pp": 2, "dp": 1},
        microbatches=MICROBATCHES,
        loss_fn=case.loss_fn,
    )
    stages = ranks.run(2, on_a_rank, plan, LogsNorms)
    for step in range(STEPS):
        case.model.zero_grad()
        total = 0.0
        for part in (case.args[0] + step).chunk(MICROBATCHES):
            loss = mean_square(case.model(part), None) / MICROBATCHES
            loss.backward()
            total += float(loss.detach())
        for found in stages:
            assert found[step][0] == pytest.approx(total, rel=1e-5)
            assert found[step][2] == pytest.approx(case.model.norms)
            for name, gradient in found[step][1].items():
                torch.testing.assert_close(gradient, case.model.get_parameter(name).grad, rtol=1e-4, atol=1e-7)
    assert case.model.norms
