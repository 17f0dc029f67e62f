"""Measured profiles: counts that are exact, times where only their shape can be tested, and the model left alone."""

from __future__ import annotations

import copy
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, Case, build
from odd_glue_models import GLUE
from side_by_side import quiet
from torch import nn

from partitioner import timing
from partitioner.errors import ArgumentError, UnsupportedModelError
from partitioner.losses import Loss
from partitioner.microbatches import Cutter
from partitioner.profiler import profile
from partitioner.profiles import Profile
from partitioner.slicing import Slice
from partitioner.solver import solve
from partitioner.specs import Cluster, Training
from partitioner.structures import tensors_in


def profiled(case: Case, **how: Any) -> Profile:
    how = {"microbatch_sizes": [2], "whole_step": False} | how
    return profile(case.model, case.inputs, loss_fn=case.loss_fn, example_target=case.target, **how)


class Held:
    """Stands for a tensor in autograd's hands."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def saved_by_a_plain_step(case: Case, samples: int) -> int:
    """Bytes that autograd holds after a forward as a user writes it: storages once; weights and inputs left out."""
    model = copy.deepcopy(case.model)
    part = Cutter().cut(case.args, case.kwargs or {}, case.target, 8 // samples)[0]
    not_counted = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), *tensors_in(part))}
    held: weakref.WeakSet[Held] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Held:
        one = Held(tensor.detach() if tensor.requires_grad else tensor)
        held.add(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
        loss = Loss(model, case.loss_fn, None).of(model(*part.args, **part.kwargs), part.target)
    sizes = {one.tensor.untyped_storage()._cdata: one.tensor.untyped_storage().nbytes() for one in held}
    assert loss.requires_grad
    return sum(size for key, size in sizes.items() if key not in not_counted)


@pytest.mark.parametrize("max_share", [1 / 4, 1 / 24])
@pytest.mark.parametrize("name", CASES)
def test_saved_bytes_of_the_layers_add_up_to_what_the_whole_model_saves(
    name: str, max_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "MAX_REPEATS", 2)  # bytes are counted once, seconds are of no interest
    case = quiet(lambda: build(name))
    found = profiled(case, microbatch_sizes=[1, 4], max_share=max_share)
    for k, samples in enumerate((1, 4)):
        assert sum(layer.costs[k].saved_bytes for layer in found.layers) == saved_by_a_plain_step(case, samples)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_measured_as_they_run(reentrant: bool) -> None:
    """They save no more than their inputs, and their backward runs the forward again."""
    case = quiet(lambda: build("gpt2", length=32))
    plain = profiled(case, max_share=1 / 4)
    name = "activation" if hasattr(case.model, "activation_checkpointing_enable") else "gradient"
    getattr(case.model, f"{name}_checkpointing_enable")({"use_reentrant": reentrant})
    found = profiled(case, max_share=1 / 4)
    blocks = [k for k, layer in enumerate(found.layers) if layer.class_name == "GPT2Block"]
    assert len(blocks) == 4
    for k in blocks:
        assert found.layers[k].costs[0].saved_bytes < plain.layers[k].costs[0].saved_bytes / 5


def test_a_profile_says_what_was_measured_and_how() -> None:
    case = quiet(lambda: build("tied"))
    found = profile(
        case.model,
        case.args,
        loss_fn=case.loss_fn,
        example_target=case.target,
        microbatch_sizes=[4, 2],
        optimizer="sgd",
        num_threads=1,
    )
    assert found.microbatch_sizes == (2, 4)
    assert found.provenance == "measured"
    assert (found.device_kind, found.dtype, found.num_threads) == ("cpu", "float32", 1)
    assert found.torch_version == torch.__version__
    assert len(found.step_s) == len(found.unattributed_s) == 2
    sums = [sum(layer.costs[k].forward_s + layer.costs[k].backward_s for layer in found.layers) for k in (0, 1)]
    assert [found.step_s[k] - sums[k] for k in (0, 1)] == pytest.approx(found.unattributed_s)
    assert all(cost.forward_s > 0 and cost.backward_s >= 0 for layer in found.layers for cost in layer.costs)
    assert sum(layer.costs[1].forward_s for layer in found.layers) < found.step_s[1] * 1.5
    assert found.optimizer_s > 0
    assert sum(layer.parameter_bytes for layer in found.layers) == sum(
        entry.bytes * len(entry.layers) for entry in found.parameters
    )
    assert Profile.model_validate_json(found.model_dump_json()) == found


def test_costs_grow_with_the_samples_where_that_is_exact() -> None:
    found = profiled(quiet(lambda: build("unet")), microbatch_sizes=[1, 3])
    assert found.microbatch_sizes == (1, 4), "8 samples in two parts: what was measured counts, not what was asked for"
    for layer in found.layers:
        assert layer.costs[1].flops == 4 * layer.costs[0].flops
        assert layer.costs[1].saved_bytes >= 3.9 * layer.costs[0].saved_bytes - 100
    for tensor in found.tensors:
        assert tensor.bytes_at[1] == 4 * tensor.bytes_at[0]


def test_equal_layers_are_measured_once_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    time_once = timing._time_once

    def counted(part: Slice, probe: Any, clock: Any) -> None:
        runs.append(probe.layers[0].id)
        time_once(part, probe, clock)

    monkeypatch.setattr(timing, "_time_once", counted)
    counts = []
    for num_layers in (24, 48):
        runs.clear()
        found = profiled(quiet(lambda n=num_layers: build("gpt2", layers=n, width=32, length=4)))
        counts.append(len(runs))
        blocks = [layer for layer in found.layers if layer.class_name == "GPT2Block"]
        assert len(blocks) == num_layers
        assert len({layer.costs[0].forward_s for layer in blocks}) < 4
    assert counts[1] <= 1.3 * counts[0]


def test_the_model_is_left_as_it_was_also_when_profiling_fails() -> None:
    case = quiet(lambda: build("resnet"))
    case.model.train()
    before = copy.deepcopy(case.model.state_dict())
    hooks = [len(module._forward_hooks) for module in case.model.modules()]
    state = torch.get_rng_state()
    profiled(case)
    with pytest.raises(ArgumentError):
        profile(case.model, case.inputs, loss_fn=lambda output, target: output.logits, microbatch_sizes=[1])
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert all(parameter.grad is None for parameter in case.model.parameters())
    assert hooks == [len(module._forward_hooks) for module in case.model.modules()]
    assert torch.equal(torch.get_rng_state(), state)
    assert case.model.training
    assert not any("_call_impl" in vars(module) for module in case.model.modules())


@pytest.mark.parametrize("name", ["gpt2", "unet", "tied"])
def test_a_model_on_meta_is_measured_a_layer_at_a_time(name: str) -> None:
    real = profiled(quiet(lambda: build(name)), max_share=1 / 8)
    with torch.device("meta"):
        case = quiet(lambda: build(name))
    data = quiet(lambda: build(name))
    bare = Case(case.model, data.args, data.kwargs, data.target, data.loss_fn)
    largest = 0
    make = nn.Parameter.__new__

    def counted(cls: type, data: torch.Tensor | None = None, requires_grad: bool = True) -> Any:
        nonlocal largest
        made = make(cls, data, requires_grad)
        alive.add(made)
        largest = max(largest, sum(p.numel() for p in alive if not p.is_meta))
        return made

    alive: weakref.WeakSet[nn.Parameter] = weakref.WeakSet()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Parameter, "__new__", counted)
        found = profiled(bare, device="cpu", max_share=1 / 8, optimizer="none")
    assert {layer.id for layer in found.layers}
    assert found.step_s == ()
    assert all(cost.forward_s > 0 for layer in found.layers for cost in layer.costs)
    assert all(parameter.is_meta for parameter in bare.model.parameters())
    assert found.fingerprint == real.fingerprint
    total = sum(parameter.numel() for parameter in bare.model.parameters())
    assert 0 < largest < total


def test_a_trace_names_every_layer(tmp_path: Path) -> None:
    found = profiled(quiet(lambda: build("tied")), trace_dir=tmp_path, microbatch_sizes=[2])
    (file,) = tmp_path.glob("*.pt.trace.json")
    names = [str(event.get("name")) for event in json.loads(file.read_text())["traceEvents"]]
    measured = {layer.key: layer.id for layer in reversed(found.layers[:-1])} | {"last": found.layers[-1].id}
    for layer in measured.values():
        for way in ("forward", "backward"):
            assert any(name.startswith(f"nn.Module: {way} {layer} (2 samples") for name in names)


def test_a_plan_from_traced_seconds_says_so(tmp_path: Path) -> None:
    cluster = Cluster.parse("2xH100")
    model = quiet(lambda: build("tied"))
    for folder, said in ((tmp_path, 1), (None, 0)):
        found = profiled(model, trace_dir=folder, microbatch_sizes=[2], whole_step=False)
        assert found.traced is (folder is not None)
        assert str(found).count("timed under torch.profiler") == said
        for objective in ("train", "throughput"):
            plan = solve(found, cluster, Training(batch_size=4, objective=objective))
            assert sum("timed under torch.profiler" in why for why in plan.why) == said


def test_sizes_that_the_batch_does_not_have_are_refused() -> None:
    case = quiet(lambda: build("tied"))
    with pytest.raises(ArgumentError, match="batch of 8"):
        profiled(case, microbatch_sizes=[16])
    assert profile(case.model, case.args, loss_fn=case.loss_fn, example_target=case.target).microbatch_sizes == (2, 4)


class Lazy(nn.Module):
    """Builds a table in its first forward, counts its calls, and leaves a layer out now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.table: torch.Tensor | None = None
        self.log: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.sin(torch.arange(8.0))
        self.log.append(1)
        for layer in self.layers:
            if not self.training or torch.rand([]) < 0.8:
                x = x + torch.tanh(layer(x)) * self.table
        return x


def test_models_that_keep_state_and_drop_layers_can_be_measured() -> None:
    model = Lazy()
    found = profile(model, torch.randn(4, 8), loss_fn=lambda y, t: y.pow(2).mean(), microbatch_sizes=[2])
    assert {layer.id for layer in found.layers} == {f"layers.{k}" for k in range(4)}
    assert found.dynamic
    assert model.table is None
    assert model.log == []


def test_a_meta_model_that_reads_values_is_refused_with_the_reason() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return y if y.sum().item() > 0 else -y

    with torch.device("meta"):
        model = Reads()
    with pytest.raises(UnsupportedModelError, match="meta device"):
        profile(model, torch.randn(4, 4), loss_fn=lambda y, t: y.mean(), device="cpu")


def test_a_loss_that_takes_out_what_layers_left_is_profiled_as_a_step_runs_it() -> None:
    """Else what a forward left would stay for the next loss, with a graph that a backward has used already."""
    bag: list[torch.Tensor] = []

    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.bag = nn.Linear(8, 8), bag

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.inner(x))
            self.bag.append(y.var())
            return y

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = (output - target).square().mean()
        while bag:
            loss = loss + 0.1 * bag.pop()
        return loss

    model = nn.Sequential(Leaves(), Leaves(), Leaves())
    found = profile(model, torch.randn(8, 8), loss_fn=loss_fn, example_target=torch.zeros(8, 8))
    assert found.layers and bag == []


def test_values_that_stages_kept_of_each_other_do_not_reach_the_timed_steps() -> None:
    class Bank(nn.Module):
        """Adds the mean of what the middle was in six earlier forwards: more than slices are timed with."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
            self.bank: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(self.bank) >= 6:
                x = x + torch.stack(self.bank[-6:]).mean(0)
            hidden = torch.tanh(self.b(torch.tanh(self.a(x))))
            self.bank.append(hidden.detach().mean(0))
            return self.c(hidden)

    model = Bank()
    found = profile(model, torch.randn(8, 8), loss_fn=nn.MSELoss(), example_target=torch.zeros(8, 8))
    assert found.step_s and model.bank == []


def test_a_batch_that_the_model_extends_is_as_it_was_after_profiling() -> None:
    case = GLUE["layers_extend_the_batch_they_are_given"]()
    (batch,) = case.args
    before = dict(batch)
    profiled(case, microbatch_sizes=[8], whole_step=True)
    assert batch.keys() == before.keys()
    assert all(batch[key] is value for key, value in before.items())


class Queue(nn.Module):
    """Keeps the last 16 samples in a ring, as MoCo does: it must divide by the samples of all forwards so far."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.register_buffer("kept", torch.randn(16, 8))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        scores = x @ self.kept.clone().T
        with torch.no_grad():
            at = int(self.at)
            self.kept[at : at + len(x)] = x
            self.at[0] = (at + len(x)) % 16
        return scores


def test_each_timed_run_starts_from_the_buffers_of_the_first() -> None:
    """Runs of 2 and of 8 samples in turn would come to the ring's end in the middle of a batch."""
    model = Queue()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = profile(model, torch.randn(8, 8), loss_fn=nn.MSELoss(), example_target=torch.randn(8, 16))
    assert len(found.microbatch_sizes) > 1 and all(layer.costs for layer in found.layers)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
