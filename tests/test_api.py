"""`partition`: the whole way from a model to a plan, what it refuses, and what it leaves as it was."""

from __future__ import annotations

import copy
import itertools
import random
import time
from typing import Any

import models
import numpy as np
import pytest
import torch
from chains import LOTS, chain, cluster
from odd_recorded_models import RECORDED
from torch import nn

import partitioner as pt
from partitioner import api, selfcheck
from partitioner.errors import UnsupportedModelError
from partitioner.specs import Cluster, Device, Link, Training


def stack(layers: int = 6, width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def given_profile(
    seconds: list[float], microbatch: int = 8, parameter_bytes: int = 0, saved_bytes: int = 0
) -> pt.Profile:
    """A chain of layers whose forward costs are given and whose backward takes twice that."""
    from partitioner.profiles import Layer, LayerCost, Profile, Tensor

    names = [str(k) for k in range(len(seconds))]
    return Profile(
        model="Chain",
        layers=tuple(
            Layer(
                id=name,
                class_name="Linear",
                parameter_bytes=parameter_bytes,
                gradient_bytes=parameter_bytes,
                costs=(LayerCost(samples=microbatch, forward_s=s, backward_s=2 * s, saved_bytes=saved_bytes),),
            )
            for name, s in zip(names, seconds, strict=True)
        ),
        tensors=tuple(
            Tensor(id=f"{a}:0", producer=a, consumers=(b,), shape=(microbatch,), dtype="float32", bytes_at=(64,))
            for a, b in itertools.pairwise(names)
        ),
        parameters=(),
        microbatch_sizes=(microbatch,),
        device="CPU",
        device_kind="cpu",
        provenance="given",
    )


def cpu_cluster(count: int) -> Cluster:
    device = Device(name="CPU rank", kind="cpu", memory_bytes=2**30)
    link = Link.of(1e-5, 1e9)
    return Cluster(devices=(device,) * count, nodes=(0,) * count, intra=link, inter=link)


def plan_of(**arguments: object) -> pt.Plan:
    inputs = torch.randn(8, 32)
    common = {"gpus": cpu_cluster(2), "loss_fn": square, "example_target": torch.randn(8, 32)}
    return pt.partition(stack(), inputs, **(common | arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpt2", "resnet", "unet"])
def test_a_plan_places_every_layer_and_the_model_stays_as_it_was(name: str) -> None:
    case = models.build(name)
    model = case.model
    model.train()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    fired: list[int] = []
    handle = next(model.children()).register_forward_hook(lambda *_: fired.append(1))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    modes = {path: module.training for path, module in model.named_modules()}
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    expected = (torch.rand(3), random.random(), np.random.rand())
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)

    plan = pt.partition(
        model,
        case.inputs,
        gpus=cpu_cluster(2),
        loss_fn=case.loss_fn,
        example_target=case.target,
        mesh={"pp": 2},
        microbatches=2,
    )

    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]
    assert [layer for stage in plan.stages for layer in stage.layers] == [layer.id for layer in plan.profile.layers]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(p.grad is None for p in list(model.parameters())[1:])
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert {path: module.training for path, module in model.named_modules()} == modes
    assert len(next(model.children())._forward_hooks) == 1
    handle.remove()
    copy.deepcopy(model)
    covered = {name for p in plan.profile.parameters for name in p.names}
    assert covered == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert plan.prediction.efficiency + plan.prediction.lost.total == pytest.approx(1.0)
    assert plan.lower_bound_s <= plan.prediction.step_s + plan.prediction.optimizer_s + 1e-12


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("precision", "bf16"),
        ("precision", "fp16-mixed"),
        ("recompute", "h.0"),
        ("shard", "zero3"),
        ("gradient_compression", "powersgd"),
        ("schedule", "zero-bubble"),
        ("schedule", "interleaved"),
        ("optimizer", "adafactor"),
        ("batch_size", "auto"),
        ("mesh", {"tp": 2}),
        ("gpus", "8xH100"),
    ],
)
def test_what_is_documented_and_not_built_is_refused_by_name(argument: str, value: object) -> None:
    with pytest.raises(pt.NotBuiltError, match=argument):
        plan_of(**{argument: value})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"precision": "int3"}, "int3.*fp32"),
        ({"schedule": "fastest"}, "fastest.*gpipe"),
        ({"optimizer": "lion"}, "lion.*adamw"),
        ({"optimizer": -1.0}, "-1.*0 or more"),
        ({"gpus": 0}, "gpus=0.*1 or more"),
        ({"gpus": 2.5}, "gpus=2.5"),
        ({"gpus": "8xRTX-9999"}, "RTX-9999"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"check": "always"}, "always.*first"),
        ({"mesh": "2x2"}, "2x2.*auto"),
        ({"mesh": {"pp": 3}}, "3 devices.*2"),
        ({"mesh": {"stages": 2}}, "stages.*pp"),
        ({"gpus": cpu_cluster(8), "mesh": {"pp": 7}}, "7.*6|6.*7"),
        ({"mesh": {"pp": 1, "dp": 2}, "batch_size": 9}, "9.*2"),
        ({"mesh": {"pp": 2}, "microbatches": 3}, "3 .*8"),
        ({"memory_limit": "lots"}, "lots"),
        ({"pin": {"nowhere": 0}}, "nowhere"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused_with_their_numbers(
    arguments: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        plan_of(**arguments)
    assert isinstance(raised.value, pt.PartitionerError)


def test_a_loss_function_without_a_target_is_told_what_to_pass() -> None:
    with pytest.raises(pt.ArgumentError, match=r"without a target.*example_target="):
        plan_of(example_target=None)
    with pytest.raises(pt.ArgumentError, match=r"without a target.*example_target="):
        plan_of(example_target=None, loss_fn=nn.CrossEntropyLoss())


@pytest.mark.parametrize(("model", "words"), [(nn.Linear, "the class Linear"), ("gpt2", "a str")])
def test_what_is_no_module_is_refused(model: object, words: str) -> None:
    for call in (lambda: pt.partition(model, torch.zeros(1), gpus=1), lambda: pt.profile(model, torch.zeros(1))):
        with pytest.raises(pt.ArgumentError, match=words):
            call()


def test_batch_norm_is_measured_where_the_smallest_micro_batch_would_be_one_sample() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))
    profile = pt.profile(model, torch.randn(8, 32), loss_fn=square, example_target=torch.randn(8, 32))
    assert profile.microbatch_sizes == (2, 4)


def test_what_batch_norm_normalises_over_is_told_where_it_is_not_the_batch() -> None:
    def told(norm: nn.Module, pp: int, microbatches: int) -> list[str]:
        model = nn.Sequential(nn.Linear(32, 32), norm, nn.Linear(32, 32), nn.BatchNorm1d(32).eval())
        mesh = {"pp": pp, "dp": 2 // pp}
        given = {"loss_fn": square, "example_target": torch.randn(8, 32), "mesh": mesh, "microbatches": microbatches}
        plan = pt.partition(model, torch.randn(8, 32), gpus=cpu_cluster(2), **given)  # type: ignore[arg-type]
        return [why.split(",")[0] for why in plan.why if "batch normalisation" in why]

    assert told(nn.BatchNorm1d(32), 2, 2) == ["1: batch normalisation over 4 samples at a time"]
    assert told(nn.BatchNorm1d(32), 1, 1) == ["1: batch normalisation over 4 samples at a time"]
    assert told(nn.BatchNorm1d(32), 2, 1) == told(nn.BatchNorm1d(32).eval(), 2, 2) == told(nn.LayerNorm(32), 2, 2) == []


def test_a_plan_names_what_each_rank_records_for_itself() -> None:
    case = RECORDED["meters_are_updated_always"]()

    def told(pp: int) -> list[str]:
        plan = pt.partition(
            case.model,
            case.args,
            gpus=cpu_cluster(2),
            mesh={"pp": pp, "dp": 2 // pp},
            microbatches=1,
            loss_fn=case.loss_fn,
        )
        return [why.split(":")[0] for why in plan.why if "written by several stages" in why]

    assert (told(2), told(1)) == (["'0.meters', '0.spread'"], [])


def test_a_model_that_cannot_be_cut_is_planned_as_replicas() -> None:
    class OnePiece(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.first) @ self.second

    given = {"loss_fn": square, "example_target": torch.randn(8, 8)}
    plan = pt.partition(OnePiece(), torch.randn(8, 8), gpus=cpu_cluster(2), **given)  # type: ignore[arg-type]
    assert plan.mesh == {"pp": 1, "dp": 2}
    with pytest.raises(pt.ArgumentError, match=r"pp=2 stages need 2 layers .* the model has 1"):
        pt.partition(OnePiece(), torch.randn(8, 8), gpus=cpu_cluster(2), mesh={"pp": 2}, **given)  # type: ignore[arg-type]


def test_a_limit_that_no_split_meets_names_what_is_short() -> None:
    with pytest.raises(pt.InfeasibleError, match=r"KiB|MiB|bytes| B"):
        plan_of(memory_limit="1KiB")


def test_inputs_are_told_for_language_models_and_plain_stacks() -> None:
    plan = pt.partition(stack(), gpus=cpu_cluster(2), loss_fn=lambda output, target: output.square().mean())
    assert plan.training.batch_size == 32
    assert any("32 x 32" in line for line in plan.why)
    case = models.build("gpt2")
    plan = pt.partition(case.model, gpus=cpu_cluster(2))
    assert any("8 x 32 tokens" in line for line in plan.why)


def test_inputs_that_are_told_leave_the_random_numbers_of_the_user_alone() -> None:
    model, state = stack(), torch.get_rng_state()
    pt.partition(model, gpus=cpu_cluster(2), loss_fn=lambda output, target: output.square().mean())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures there")
def test_devices_that_are_not_here_are_planned_for_as_the_error_says() -> None:
    model, inputs, target = stack(), torch.randn(8, 32), torch.randn(8, 32)
    given = {"loss_fn": square, "example_target": target}
    with pytest.raises(pt.NotBuiltError, match=r"pt\.estimate\(model, inputs, device='H100'\)"):
        pt.partition(model, inputs, gpus="2xH100", **given)
    profile = pt.estimate(model, inputs, device="H100", **given)
    assert pt.partition(model, inputs, gpus="2xH100", profile=profile, **given).profile.provenance == "estimated"


def test_a_batch_without_samples_is_refused_in_words() -> None:
    with pytest.raises(pt.ArgumentError, match="0 samples along dimension 0"):
        pt.partition(stack(), torch.randn(0, 32), gpus=cpu_cluster(2), loss_fn=square, example_target=0.0)


def test_inputs_that_cannot_be_told_are_asked_for() -> None:
    with pytest.raises(pt.ArgumentError, match=r"UNet.*example_inputs"):
        pt.partition(models.UNet(), gpus=cpu_cluster(2))


def test_a_profile_of_another_model_is_refused_with_both_fingerprints() -> None:
    plan = plan_of()
    with pytest.raises(pt.PlanMismatchError, match=plan.profile.fingerprint):
        pt.partition(stack(7), torch.randn(8, 32), gpus=cpu_cluster(2), profile=plan.profile, loss_fn=square)


def test_a_saved_profile_plans_without_measuring_again(tmp_path: object) -> None:
    plan = plan_of(mesh={"pp": 2}, microbatches=4)
    path = f"{tmp_path}/profile.json"
    plan.profile.save(path)
    again = plan_of(mesh={"pp": 2}, microbatches=4, profile=path)
    assert again.stages == plan.stages
    assert again.prediction == plan.prediction


def test_a_cut_that_fails_the_check_is_given_up_and_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, inputs, target = (
        nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))),
        torch.randn(8, 16),
        torch.randn(8, 16),
    )
    profile = pt.profile(model, inputs, loss_fn=square, example_target=target, max_share=1.0)
    # Costs that make the cut between layers 1 and 2 the best of all.
    layers = tuple(
        layer.model_copy(
            update={
                "costs": tuple(
                    cost.model_copy(update={"forward_s": 3.0 if layer.id in "12" else 0.1, "backward_s": 1.0})
                    for cost in layer.costs
                )
            }
        )
        for layer in profile.layers
    )
    profile = profile.model_copy(update={"layers": layers})
    common = {"gpus": cpu_cluster(2), "loss_fn": square, "example_target": target, "mesh": {"pp": 2}}
    unchecked = pt.partition(model, inputs, profile=profile, check="never", microbatches=4, **common)
    assert unchecked.stages[1].layers[0] == "2"

    def check_split(model: nn.Module, profile: pt.Profile, stage_of: dict[str, int], *more: Any, **how: Any) -> float:
        if stage_of["1"] != stage_of["2"]:
            raise UnsupportedModelError("the loss is another one")
        return selfcheck.check_split(model, profile, stage_of, *more, **how)

    monkeypatch.setattr(api, "check_split", check_split)
    plan = pt.partition(model, inputs, profile=profile, microbatches=4, **common)
    assert plan.stages[1].layers[0] != "2"
    assert "not cut before 2: the loss is another one" in plan.why


def test_planning_from_given_costs_finds_the_heavy_head() -> None:
    profile = given_profile([1, 1, 1, 1, 1, 1, 8])
    plan = pt.solve(profile, cpu_cluster(2), pt.Training(batch_size=64, mesh={"pp": 2, "dp": 1}))
    assert [len(stage.layers) for stage in plan.stages] == [6, 1]
    assert plan.prediction.speedup <= 1.75 + 1e-9


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_plans_for_inference_need_no_loss(objective: str) -> None:
    plan = pt.partition(stack(), torch.randn(8, 32), gpus=cpu_cluster(2), objective=objective, mesh={"pp": 2, "dp": 1})
    assert plan.training.objective == objective and plan.runnable
    assert plan.num_stages == 2 and plan.prediction.optimizer_s == 0.0
    assert all(stage.backward_s == 0.0 for stage in plan.prediction.stages)


@pytest.mark.parametrize(
    ("optimizer_s", "memory_bytes", "levels"),
    [(1e-3, LOTS, {"none"}), (0.5, LOTS, {"zero1"}), (1e-3, 3_800_000, {"zero1"})],
)
def test_replicas_divide_unasked_only_where_it_pays(optimizer_s: float, memory_bytes: int, levels: set[str]) -> None:
    """A batch takes 4 s on four devices. An optimizer's millisecond is not worth a divided state, half a second is, and
    so is memory: 4 N of weights, gradients and state do not fit."""
    uncut = {str(k): "it cannot be cut" for k in range(1, 8)}
    profile = chain([1 / 8] * 8, parameter_bytes=125_000, no_cut=uncut)
    profile = profile.model_copy(update={"optimizer_s": optimizer_s})
    there = cluster(4, memory_bytes=memory_bytes)
    training = Training(batch_size=4, shard="auto")
    plan = api._solved(profile, there, training)
    assert {stage.shard for stage in plan.stages} == levels and plan.num_replicas == 4
    assert plan.training == training
    exact = pt.solve(profile, there, training)
    assert api._total_s(exact) <= api._total_s(plan) <= api._total_s(exact) / (1 - api.WORTH_DIVIDING)
    assert plan.gap is not None and plan.lower_bound_s <= api._total_s(exact)


def test_a_plan_that_divides_nothing_says_how_much_shorter_another_would_be() -> None:
    profile = chain([1e-2] * 8, parameter_bytes=400_000, optimizer_s=0.012)
    training = Training(batch_size=8, shard="auto", mesh={"pp": 2, "dp": 2})
    plan, exact = api._solved(profile, cluster(4), training), pt.solve(profile, cluster(4), training)
    assert {stage.shard for stage in plan.stages} == {"none"} and {stage.shard for stage in exact.stages} == {"zero1"}
    assert plan.gap == pytest.approx(api._total_s(plan) / api._total_s(exact) - 1) and plan.gap > 1e-3
    assert any(reason.startswith("replicas keep all: dividing what they keep (zero1)") for reason in plan.why)


class EachByItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, scales: list[float]) -> torch.Tensor:
        hidden = self.first(x)
        return self.second(torch.stack([row * scale for row, scale in zip(hidden, scales, strict=True)]))


def test_a_list_with_an_item_for_each_sample_is_cut_and_named() -> None:
    inputs = torch.randn(8, 4), [float(k) for k in range(8)]
    plan = pt.partition(
        EachByItsOwn(), inputs, gpus=2, mesh={"pp": 2}, microbatches=4, loss_fn=lambda out, _: out.square().mean()
    )
    assert any(reason.startswith("argument 1: a list in it has as many items") for reason in plan.why)


@pytest.mark.parametrize(("speed", "told"), [(0.45, True), (0.97, False)])
def test_layers_that_were_timed_beside_other_work_are_told_of(
    speed: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        """The thread's time is told of the same moment as the last time of all, whatever comes between the two."""

        def perf_counter(self) -> float:
            self.last = time.perf_counter()
            return self.last

        def thread_time(self) -> float:
            return self.last * speed

    monkeypatch.setattr("partitioner.profiler.time", Clock())
    plan = pt.partition(
        stack(), torch.randn(8, 32), gpus=2, loss_fn=square, example_target=torch.randn(8, 32), check="never"
    )
    assert plan.profile.processor_share == pytest.approx(speed, abs=1e-3)
    lines = [line for line in plan.why if "of a processor" in line]
    assert lines == [] or (told and "0.45 of a processor" in lines[0] and "2.2 times" in lines[0])
    assert bool(lines) == told
