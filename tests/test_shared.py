"""Python state that changes late reaches the stages that read it, or is refused with its name."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Case
from odd_late_models import IN_THE_PROCESS, LATE, LATE_CALLS, LATE_READS, marked, reset
from plans import plan_of
from rank_pool import RankPool, RanksFailed
from side_by_side import difference, possible_cuts, run_cut, run_whole, split, stage_models
from torch import nn

from partitioner.capture import capture
from partitioner.errors import UnsupportedModelError
from partitioner.executor import materialize
from partitioner.executor.placement import Placement
from partitioner.plan import Plan
from partitioner.slicing import Slice, chain

IN_PROCESS = [
    name
    for name in LATE
    if not name.startswith(tuple(IN_THE_PROCESS))
    and (name.endswith("data") or name.startswith(("float_", "dict_key_", "glue_", "parents_buffer_")))
]
"""After some steps it is the same code that sees the change, whatever is changed."""


def ran(name: str, build: Callable[[], Case] | None = None) -> tuple[str, float]:
    """What an error said, and else the worst difference from the uncut model over all steps; cut in the middle."""
    reset()
    build = build or LATE[name]
    captured = capture(build().model, build().args, max_share=0.0)
    places = possible_cuts(captured)
    stage_of = split(captured, [places[len(places) // 2]])
    whole, models = build().model, stage_models(build().model, captured, stage_of, lambda: build().model)
    worst = 0.0
    for step in range(4 if not name.endswith("steps") else LATE_CALLS + 2):
        case = build() if name.endswith("steps") or step != 1 else marked(build())
        expected = run_whole(case, seed=step, model=whole)
        try:
            found = run_cut(case, captured, stage_of, seed=step, models=models)
        except UnsupportedModelError as error:
            return str(error), worst
        worst = max(worst, difference(expected, found)[0])
    return "", worst


@pytest.mark.parametrize("name", [name for name in IN_PROCESS if "_forth_" in name])
def test_a_late_change_reaches_later_stages(name: str) -> None:
    problem, worst = ran(name)
    assert not problem
    assert worst < 1e-6


FORETOLD = ("glue_back_steps",)
"""The model's own code changes these by a count of its own, so that earlier stages can tell."""


@pytest.mark.parametrize("name", FORETOLD)
def test_a_late_change_that_can_be_foretold_comes_to_earlier_stages(name: str) -> None:
    assert ran(name) == ("", pytest.approx(0.0, abs=1e-6))


@pytest.mark.parametrize("name", [name for name in IN_PROCESS if "_back_" in name and name not in FORETOLD])
def test_a_late_change_that_an_earlier_stage_reads_is_refused_before_it_makes_another_number(name: str) -> None:
    problem, worst = ran(name)
    assert "of stage 1 changes" in problem, (problem, worst)
    assert "stage 0 reaches too" in problem
    assert worst < 1e-6


READ_LATE = ("float", "new_attribute", "slot", "dict_key", "list", "set", "tensor_replaced", "tensor_filled", "array")


@pytest.mark.parametrize("kind", READ_LATE)
def test_what_every_forward_changes_reaches_later_stages_that_read_it_late(kind: str) -> None:
    problem, worst = ran(kind, LATE_READS[f"{kind}_forth"])
    assert not problem
    assert worst < 1e-6


@pytest.mark.parametrize("kind", READ_LATE)
def test_what_a_later_stage_changes_in_every_forward_cannot_be_read_on_an_earlier_one(kind: str) -> None:
    problem, worst = ran(kind, LATE_READS[f"{kind}_back"])
    assert ("stage 0 reads" in problem and "a later stage changes" in problem) or "stage 0 reaches too" in problem
    assert worst < 1e-6


def losses_on_a_rank(plan: Plan, name: str) -> list[float]:
    reset()
    case = LATE[name]()
    with materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
        batches = [case.args if step != 1 else marked(case).args for step in range(4)]
        return [float(stage.train_step(batch)) for batch in batches]


@pytest.mark.parametrize("name", [name for name in LATE if name.startswith(tuple(IN_THE_PROCESS)) and "data" in name])
def test_what_is_kept_outside_of_the_model_is_looked_after_on_ranks(ranks: RankPool, name: str) -> None:
    reset()
    case = LATE[name]()
    plan = plan_of(case.model, case.args, microbatches=1, batch_size=4)
    if "_back_" in name:
        with pytest.raises(RanksFailed, match=r"of stage 1 changes .* stage 0 reaches too"):
            ranks.run(2, losses_on_a_rank, plan, name)
        return
    expected = [float(run_whole(case if k != 1 else marked(case), model=case.model).loss) for k in range(4)]
    reset()
    for found in ranks.run(2, losses_on_a_rank, plan, name):
        assert found == pytest.approx(expected, rel=1e-6)


class Collector:
    """What people write to look at activations."""

    def __init__(self) -> None:
        self.on, self.calls = True, 0
        self.outputs: dict[int, list[torch.Tensor]] = defaultdict(list)

    def keep(self, module: nn.Module, args: object, output: torch.Tensor) -> None:
        self.calls += 1
        if self.on:
            self.outputs[id(module)].append(output.detach())


def logging_hooks(log: list[float], seen: dict[str, torch.Tensor], collector: Collector) -> list[Any]:
    """Hooks that write into what all layers have in common, and read none of it."""
    count = 0

    def norm(module: nn.Module, args: object, output: torch.Tensor) -> None:
        nonlocal count
        count += 1
        log.append(float(output.detach().norm()))

    def last(module: nn.Module, args: object, output: torch.Tensor) -> None:
        seen[type(module).__name__] = output

    def by_default(module: nn.Module, args: object, output: torch.Tensor, into: list[float] = log) -> None:
        into.append(0.0)

    def own(module: nn.Module, args: object, output: torch.Tensor) -> None:
        own.shapes.append(output.shape)  # type: ignore[attr-defined]

    own.shapes = []  # type: ignore[attr-defined]
    return [norm, last, by_default, own, collector.keep, functools.partial(_filed, seen)]


def _filed(seen: dict[str, torch.Tensor], module: nn.Module, args: object, output: torch.Tensor) -> None:
    seen[f"{id(module)}"] = output


class ScaledByLength(nn.Module):
    """Reads what hooks append to."""

    def __init__(self, log: list[float]) -> None:
        super().__init__()
        self.log = log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + len(self.log))


def hooked(scaled: bool = False) -> tuple[Case, list[float]]:
    torch.manual_seed(0)
    log: list[float] = []
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model = nn.Sequential(ScaledByLength(log) if scaled else nn.Identity(), *layers)
    collector, seen = Collector(), dict[str, torch.Tensor]()
    for layer in layers:
        for hook in logging_hooks(log, seen, collector):
            layer.register_forward_hook(hook)
    return Case(model, (torch.randn(4, 8),), loss_fn=lambda output, target: output.square().mean()), log


def test_hooks_may_write_into_what_nothing_reads() -> None:
    case, log = hooked()
    captured = capture(case.model, case.args, max_share=0.0)
    assert len(possible_cuts(captured)) == 4
    stage_of = split(captured, possible_cuts(captured)[1:3])
    models = [hooked()[0].model for _ in range(3)]  # hooks of their own, as ranks have
    log.clear()
    for step in range(3):
        assert difference(run_whole(case, model=case.model), run_cut(case, captured, stage_of, step, models))[0] < 1e-6
    assert len(log) == 3 * 2 * 4


def test_what_a_layer_reads_hooks_of_later_stages_may_not_write() -> None:
    case, _ = hooked(scaled=True)
    captured = capture(case.model, case.args, max_share=0.0)
    assert not possible_cuts(captured)
    assert all("'0.log' is changed in the forward and read on both sides" in why for why in captured.no_cut.values())


class CountsAtItsEnd(nn.Module):
    """Reads at its start how often it ran, and counts at its end; in evaluation by another number, or only then."""

    def __init__(self, in_training: int, in_evaluation: int, every: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.steps, self.calls, self.adds, self.every = 0, 0, (in_evaluation, in_training), every

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        x = x * (1 + self.steps)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.calls % self.every == 0:
            self.steps += self.adds[self.training]
        return x


def counted(every: int, modes: list[bool]) -> float:
    """The worst difference over forwards in these modes, each stage with its own copy of the model."""

    def build() -> Case:
        torch.manual_seed(0)
        model = CountsAtItsEnd(2, 1, every)
        return Case(model, (torch.randn(4, 8) / 9,), loss_fn=lambda output, target: output.square().mean())

    captured = capture(build().model, build().args, max_share=0.0)
    stage_of = split(captured, possible_cuts(captured)[1:3])
    whole, models = build().model, stage_models(build().model, captured, stage_of, lambda: build().model)
    worst = 0.0
    for step, mode in enumerate(modes):
        for model in (whole, *models):
            model.train(mode)
        expected = run_whole(build(), seed=step, model=whole)
        worst = max(worst, difference(expected, run_cut(build(), captured, stage_of, step, models))[0])
    assert [model.steps for model in models] == [whole.steps] * len(models)
    return worst


def test_what_every_forward_adds_at_its_end_is_known_to_stages_that_do_not_come_there() -> None:
    assert counted(1, [True, True, False, True, False]) < 1e-6


def test_a_number_that_comes_out_otherwise_is_refused() -> None:
    captured = capture(CountsAtItsEnd(2, 1, 3), (torch.randn(4, 8),), max_share=0.0)
    assert all(one.adds == (0, 0) for one in captured.attributes if one.name == "steps")
    with pytest.raises(UnsupportedModelError, match=r"changes 'steps' from 0 to 2, which stage 0 reaches too"):
        counted(3, [True] * 4)


@pytest.mark.parametrize(("writer", "reader"), [(0, 4), (4, 0)])
def test_what_hooks_share_that_come_after_the_plan_is_looked_after_too(writer: int, reader: int) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    plan, x = plan_of(build(), (torch.randn(4, 3),), cuts=["2"]), torch.randn(2, 3)
    whole = build()
    models = [Placement(plan, stage, build(), torch.device("cpu"), None).model for stage in (0, 1)]
    parts = [Slice(model, plan.profile, plan.stage_of(), stage) for stage, model in enumerate(models)]
    chain(parts, (x,), {})
    for model in (whole, *models):
        box: dict[str, torch.Tensor] = {}
        keep = functools.partial(box.__setitem__, "size")
        model[writer].register_forward_hook(lambda module, args, output, keep=keep: keep(output.detach().abs().mean()))
        model[reader].register_forward_hook(lambda module, args, output, box=box: output * (1 + box.get("size", 0.0)))
    for part in parts:
        part.look_again()
    if writer > reader:
        with pytest.raises(UnsupportedModelError, match=r"stage 1 changes .*'size'.*, which stage 0 reaches too"):
            chain(parts, (x,), {})
        return
    for _ in range(2):
        torch.testing.assert_close(chain(parts, (x,), {})[0][-1].output, whole(x))


class Total:
    def __init__(self) -> None:
        self.sum = 0.0

    def update(self, value: float) -> None:
        self.sum += value


class Totals:
    def __init__(self) -> None:
        self.by_name: dict[str, Total] = {}


class Totalling(nn.Module):
    """Each layer has an entry of a dict, which comes to be in its first forward; the last one reads them all."""

    class Layer(nn.Module):
        def __init__(self, totals: Totals, name: str) -> None:
            super().__init__()
            self.layer, self.totals, self.name = nn.Linear(4, 4), totals, name

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.layer(x))
            self.totals.by_name.setdefault(self.name, Total()).update(float(x.detach().mean()))
            return x

    class Last(nn.Module):
        def __init__(self, totals: Totals) -> None:
            super().__init__()
            self.layer, self.totals = nn.Linear(4, 4), totals

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * (1 + sum(one.sum for one in self.totals.by_name.values()))

    def __init__(self) -> None:
        super().__init__()
        self.totals = totals = Totals()
        self.before = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.layers = nn.ModuleList(self.Layer(totals, name) for name in "abc")
        self.last = self.Last(totals)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return torch.as_tensor(self.last(x))


def test_what_entries_of_a_growing_dict_hold_is_known_by_the_dict() -> None:
    """All of it is on the last stage; the earlier one, which could reach it, does not read it."""
    torch.manual_seed(0)
    case = Case(Totalling(), (torch.randn(8, 4),), loss_fn=lambda output, target: output.square().mean())
    captured = capture(case.model, case.args, max_share=0.0)
    stage_of = split(captured, ["layers.0.layer"])
    models = stage_models(case.model, captured, stage_of)
    parts = [Slice(model, captured, stage_of, stage) for stage, model in enumerate(models)]
    with torch.no_grad():
        for _ in range(3):
            runs, _ = chain(parts, case.args, {})
            torch.testing.assert_close(runs[-1].output, case.model(*case.args))
