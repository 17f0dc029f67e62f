"""Layers that run again in their backward give the same numbers, leave no trace, and hold less memory meanwhile."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import random
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import models
import numpy as np
import pytest
import torch
from odd_models import ODD
from plans import joined, plan_for, plan_of, profile_of
from rank_pool import RankPool
from side_by_side import seed_all, split
from test_executor_stage import assert_close, step_on_one_device, step_on_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import partitioner as pt
from partitioner.capture import capture
from partitioner.errors import UnsupportedModelError
from partitioner.executor import materialize
from partitioner.graph import CostGraph
from partitioner.losses import Loss
from partitioner.memory import Spread, interval_memory
from partitioner.microbatches import MicroBatch
from partitioner.plan import Plan
from partitioner.recompute import Recomputed
from partitioner.selfcheck import check_split
from partitioner.slicing import Slice, chain
from partitioner.specs import Training
from partitioner.tracing import unwrap


def recomputing(plan: Plan, *stages: int) -> Plan:
    """The plan with these stages, or all, run again in their backward."""
    changed = [stage.model_copy(update={"recompute": not stages or stage.index in stages}) for stage in plan.stages]
    return plan.model_copy(update={"stages": tuple(changed)})


def layers_of(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    return [layer.id for layer in capture(model, args, kwargs, max_share=0).layers]


def results(model: nn.Module, run: Callable[[], torch.Tensor], seed: int = 0) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss; every gradient, buffer and plain attribute afterwards."""
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    model.zero_grad()
    loss = run()
    loss.backward()  # type: ignore[no-untyped-call]
    after: dict[str, Any] = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    after |= dict(model.named_buffers())
    for path, module in model.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, (int, list, str))}
        after |= {f"{path}: {key}": copy.copy(value) for key, value in plain.items()}
    after["numpy"], after["random"] = np.random.rand(), random.random()
    return loss.detach(), after


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-7, msg=name)
        else:
            assert got[name] == value, name


class Stateful(nn.Module):
    """Dropout, statistics, a counter, a list, Python's and NumPy's coins, and a scale that depends on the counter."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.calls, self.history = nn.Linear(8, 8), nn.BatchNorm1d(8), 0, [0]
        self.register_buffer("seen", torch.zeros(()))
        self.scale = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.seen.add_(1)
        x = self.norm(self.linear(x)) * (self.seen + len(self.history))
        x = F.dropout(x, 0.3) if random.random() < 0.5 else x + float(np.random.rand())
        return torch.tanh(self.scale(x)) * self.calls


@pytest.mark.parametrize("rounds", [1, 3])
def test_layers_with_state_and_chance_are_as_if_they_ran_once(rounds: int) -> None:
    """All forwards first, as a pipeline has several micro-batches in flight: each backward sees its own forward's."""
    torch.manual_seed(1)
    plain = nn.Sequential(Stateful(), nn.ReLU(inplace=True), Stateful())
    again = copy.deepcopy(plain)
    batches = torch.randn(rounds, 6, 8)

    def run(model: nn.Module) -> torch.Tensor:
        return torch.stack([model(x).square().sum() for x in batches]).sum()

    expected = results(plain, lambda: run(plain))
    with Recomputed(again, ["0", "1", "2"]):
        got = results(again, lambda: run(again))
    torch.testing.assert_close(got[0], expected[0])
    assert_equal(got[1], expected[1])
    assert all("forward" not in vars(module) for module in again.modules())


def test_an_attribute_that_is_set_from_outside_is_the_one_of_its_own_forward() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.mask = nn.Linear(4, 4), torch.zeros(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.inner(x) * self.mask)

    model = nn.Sequential(Masked())

    def run() -> torch.Tensor:
        total = torch.zeros(())
        for k in range(3):
            model[0].mask = torch.full((4,), float(k))
            total = total + model(x).sum()
        return total

    x = torch.randn(2, 4)
    expected = results(model, run)
    with Recomputed(model, ["0"]):
        got = results(model, run)
    assert_equal(got[1], expected[1])
    assert float(model[0].mask[0]) == 2.0


def test_a_layer_that_writes_into_its_inputs_keeps_what_it_saves() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
            parts.append(torch.tanh(self.inner(parts[0])))
            return parts[-1]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.adds, self.act, self.last = nn.Linear(4, 4), Adds(), nn.ReLU(inplace=True), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [self.first(x)]
            x = self.adds(parts)
            assert len(parts) == 2
            y = self.act(x * 1)
            result: torch.Tensor = self.last(y) + sum(parts)
            return result

    model, x = Model(), torch.randn(2, 4)
    expected = results(model, lambda: model(x).sum())
    with Recomputed(model, ["first", "adds", "act", "last"]):
        got = results(model, lambda: model(x).sum())
    assert_equal(got[1], expected[1])


def test_state_that_begins_to_change_later_is_refused_and_not_changed_twice() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.late, self.calls = nn.Linear(4, 4), False, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.late:
                self.calls += 1
            return torch.sin(self.inner(x)) * (1 + self.calls)

    model, x = nn.Sequential(Late()), torch.randn(2, 4)
    with Recomputed(model, ["0"]):
        model(x).sum().backward()
        model[0].late = True
        with pytest.raises(UnsupportedModelError, match=r"layer 0 changes its buffers or attributes.*never"):
            model(x).sum().backward()


def test_what_looks_at_a_layer_finds_it_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fired: list[int] = []
    model[0].register_forward_hook(lambda *_: fired.append(1))
    model[0].register_full_backward_hook(lambda *_: fired.append(2))
    with Recomputed(model, ["0", "1"]):
        assert list(inspect.signature(model[0].forward).parameters) == ["input"]
        copied = copy.deepcopy(model)
        copied(torch.randn(2, 4).requires_grad_()).sum().backward()
        assert fired == [1, 2] and copied[0].weight.grad is not None and model[0].weight.grad is None
        with torch.no_grad():
            model(torch.randn(2, 4))
    assert fired == [1, 2, 1]


def odd_models_that_recompute() -> list[str]:
    alone = {"weights_are_cached_across_layers", "selective_checkpoint"}  # torch's checkpoints refuse them, too
    return [name for name in ODD if name not in alone]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", odd_models_that_recompute())
def test_odd_models_give_the_same_numbers(name: str) -> None:
    case = ODD[name]()
    model = unwrap(case.model)
    seed_all(0)
    captured = capture(model, case.args, case.kwargs, max_share=0.0)
    part = MicroBatch(case.args, case.kwargs or {}, case.target, 4)
    layers = [layer.id for layer in captured.layers]
    check_split(model, captured, split(captured, []), part, Loss(model, case.loss_fn, None), recompute=layers)


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages made inside that are alive, and the most at once; those of `model` are left out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.known:
                    self.known.add(key)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.forget, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def forget(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.now -= nbytes


def test_the_peak_is_the_inputs_of_all_layers_and_what_one_layer_saves() -> None:
    """Each block saves eight widths of its input; plain, all of them are alive when the backward begins."""
    num_blocks, batch, width = 8, 512, 64
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(num_blocks)]
    )
    x, unit = torch.randn(batch, width), batch * width * 4
    gradients = sum(parameter.numel() * 4 for parameter in model.parameters()) / unit

    def peak() -> float:
        model.zero_grad()
        with LiveBytes(model) as live:
            model(x).sum().backward()
        return live.peak / unit

    plain = peak()
    with Recomputed(model, map(str, range(num_blocks))):
        model(x)  # what the layers are like is looked at once
        less = peak()
    assert plain >= 8 * num_blocks
    assert less <= num_blocks + 8 + 8 + gradients, "all inputs; what one block saves; its gradients; the parameters'"


@pytest.mark.parametrize(
    ("name", "pp", "dp"), [("gpt2", 2, 1), ("lstm", 3, 1), ("unet", 2, 1), ("tied", 2, 2), ("bert", 1, 2)]
)
def test_ranks_that_recompute_give_one_devices_numbers(ranks: RankPool, name: str, pp: int, dp: int) -> None:
    case = models.build(name)
    plan = recomputing(plan_for(case, pp=pp, dp=dp, microbatches=2))
    batches = [(case.inputs, case.target)] * 2
    expected = step_on_one_device(case.model, batches, case.loss_fn)
    got = ranks.run(plan.num_ranks, step_on_ranks, plan, case.model, batches, case.loss_fn)
    assert got[0]["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert_close(joined([rank["gradients"] for rank in got]), expected["gradients"])
    assert_close(joined([rank["weights"] for rank in got]), expected["weights"])


@pytest.mark.parametrize("dp", [1, 2])
def test_masks_and_statistics_on_ranks_are_the_same_with_and_without(ranks: RankPool, dp: int) -> None:
    def trained(plan: Plan) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        torch.manual_seed(3)
        with materialize(plan, copy.deepcopy(model), loss_fn=F.mse_loss) as stage:
            losses = [float(stage.train_step((x,), x)) for _ in range(2)]
            gradients = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
            return losses, gradients, stage.state_dict()

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Tanh()) for _ in range(4)]
    model, x = nn.Sequential(*blocks), torch.randn(16, 8)
    plan = plan_of(model, (x,), dp=dp, microbatches=3)
    plain = ranks.run(plan.num_ranks, trained, plan)
    for some in ((), (1,)):
        for without, again in zip(plain, ranks.run(plan.num_ranks, trained, recomputing(plan, *some)), strict=True):
            assert again[0] == without[0]
            for before, after in zip(without[1:], again[1:], strict=True):
                assert before.keys() == after.keys()
                assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_plan_that_recomputes_is_checked_and_one_that_cannot_is_refused_with_the_reason() -> None:
    torch.manual_seed(0)
    case = models.build("tied")
    plan = pt.partition(
        case.model,
        case.inputs,
        gpus=2,
        mesh={"pp": 2},
        recompute="always",
        loss_fn=case.loss_fn,
        example_target=case.target,
    )
    assert all(stage.recompute for stage in plan.stages)
    cached = ODD["weights_are_cached_across_layers"]()
    with pytest.raises(pt.ArgumentError, match=r"recompute='always'.*recompute='never'"):
        pt.partition(
            cached.model, cached.inputs, gpus=2, mesh={"dp": 2}, recompute="always", loss_fn=lambda out, _: out.sum()
        )


def held_storages() -> dict[int, int]:
    """Bytes by address of all floating-point tensors there are."""
    gc.collect()
    held = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.is_floating_point():
            with contextlib.suppress(RuntimeError):  # a wrapper that other tests have left has no memory of its own
                held[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return held


@pytest.mark.parametrize("shared", [False, True])
def test_a_stage_that_recomputes_holds_what_memory_says(shared: bool) -> None:
    """What it received is counted as that, and with each layer that takes it in, and held once: one block too much,
    which is there while it arrives, and another where two layers take the same in.
    """

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [60, 61, 62, 63, 62, 65, 66]
            self.layers = nn.ModuleList(nn.Linear(first, last) for first, last in pairwise(widths))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k, layer in enumerate(self.layers):
                if k == 2:
                    kept = x
                x = layer(x)
                if shared and k == 3:
                    x = x + kept
            return x

    model, x = Blocks(), torch.randn(32, 60)
    profile = profile_of(capture(model, (x,), max_share=0))
    ids = [layer.id for layer in profile.layers]
    first, last = ids.index("layers.2"), ids.index("layers.5")
    stage_of = {name: (k >= first) + (k >= last) for k, name in enumerate(ids)}
    parts = [Slice(model, profile, stage_of, stage) for stage in range(2)]
    with Recomputed(model, ids[first:last]):
        before = held_storages()
        runs, _ = chain(parts, (x,), {})
        runs[0] = None  # type: ignore[call-overload]
        held = sum(size for key, size in held_storages().items() if key not in before)
    items = interval_memory(
        CostGraph(profile),
        Training(batch_size=1),
        first,
        last,
        samples=1,
        held=[0, 1],
        replicated=False,
        spread=Spread(recompute="always"),
    )
    predicted = sum(float(items[name][1] - items[name][0]) for name in ("activations", "received", "workspace"))
    assert predicted - held == (1 + shared) * 32 * 62 * 4
