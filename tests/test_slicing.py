"""Stages of a model, run one after another with a model of their own each, give what the uncut model gives."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import random
import weakref
from collections import Counter

import pytest
import torch
from models import CASES, Case, build
from odd_everyday_models import EVERYDAY
from odd_models import ODD
from odd_published_models import PUBLISHED
from odd_recorded_models import RECORDED
from odder_models import ODDER
from oddest_models import ODDEST
from side_by_side import difference, even_cuts, possible_cuts, quiet, run_cut, run_whole, seed_all, split, stage_models
from torch import nn

from partitioner.capture import capture
from partitioner.errors import UnsupportedModelError
from partitioner.glance import Glance, _dicts_are_numbered
from partitioner.parts import Payload
from partitioner.reaching import Watched
from partitioner.slicing import Slice, backward_through, chain, gradients_of
from partitioner.tracing import WatchedCall, unwrap


def captured_case(name: str, max_share: float) -> tuple[Case, object]:
    case = quiet(lambda: build(name))
    return case, capture(case.model, case.args, case.kwargs, max_share=max_share)


SUMS = ("gpt2", "bert", "t5", "tied", "lstm")
"""Models with a tensor or parameter used on several stages: its gradient is summed in another order."""


@pytest.mark.parametrize("max_share", [1 / 4, 1 / 60])
@pytest.mark.parametrize("name", CASES)
def test_stages_give_the_loss_and_gradients_of_the_uncut_model(name: str, max_share: float) -> None:
    case, captured = captured_case(name, max_share)
    whole = run_whole(case)
    for num_stages in (2, 3, 4):
        for shift in (0, 1):
            stage_of = split(captured, even_cuts(captured, num_stages, shift))
            cut = run_cut(case, captured, stage_of)
            assert torch.equal(cut.loss, whole.loss)
            worst, where = difference(whole, cut)
            assert worst == 0 or (name in SUMS and worst < 1e-6), (where, worst, stage_of)


@pytest.mark.parametrize("name", ["llama", "t5", "unet", "tied"])
def test_every_single_cut_is_right(name: str) -> None:
    case, captured = captured_case(name, 1 / 100)
    whole = run_whole(case)
    for cut in possible_cuts(captured):
        worst, where = difference(whole, run_cut(case, captured, split(captured, [cut])))
        assert worst < 1e-6, (cut, where)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_made_at_one_shape_runs_at_others(name: str) -> None:
    case, captured = captured_case(name, 1 / 10)
    stage_of = split(captured, even_cuts(captured, 3))
    sizes = {"batch": 3} if name in ("vit", "resnet", "unet") else {"batch": 3, "length": 7}
    other = dataclasses.replace(quiet(lambda: build(name, seed=5, **sizes)), model=case.model)
    models = stage_models(case.model, captured, stage_of)
    for again in (other, case, other):
        worst, where = difference(run_whole(again), run_cut(again, captured, stage_of, models=models))
        assert worst < 1e-6, where


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
def test_a_plan_made_at_a_fine_grain_runs_at_a_coarse_one(name: str) -> None:
    """Only the module that a cut goes through is opened; all others run whole."""
    case, captured = captured_case(name, 1 / 100)
    stage_of = split(captured, even_cuts(captured, 2))
    coarse = Slice(case.model, captured, stage_of, 0)
    assert len(coarse.stage_of) < len(stage_of) / 2
    fine = Slice(case.model, captured, stage_of, 0, join=False)
    assert fine.wanted == coarse.wanted


class Skipping(nn.Module):
    """The first layer's output is used by the second, and in the glue code after the third."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.fourth = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.first(x)
        x = self.third(self.second(skip))
        return self.fourth(torch.cat([x, skip], 1))


def regression(model: nn.Module, width: int = 6, out: int = 2) -> Case:
    torch.manual_seed(1)
    return Case(model, (torch.randn(4, width),), target=torch.randn(4, out), loss_fn=nn.functional.mse_loss)


def test_a_skip_goes_straight_from_where_it_is_made_to_where_it_is_used() -> None:
    case = regression(Skipping())
    captured = capture(case.model, case.args, layers=["first", "second", "third", "fourth"])
    stage_of = {"first": 0, "second": 1, "third": 2, "fourth": 3}
    parts = [Slice(case.model, captured, stage_of, stage) for stage in range(4)]
    assert [part.targets for part in parts] == [(1, 2), (2,), (3,), ()]
    assert [part.sources for part in parts] == [(), (0,), (0, 1), (2,)]
    runs, _ = chain(parts, case.args, {})
    assert [tuple(t.shape for t in runs[0].sends[target].tensors) for target in (1, 2)] == [((4, 6),), ((4, 6),)]
    assert [tuple(t.shape for t in runs[stage].sends[stage + 1].tensors) for stage in (1, 2)] == [((4, 6),), ((4, 12),)]
    worst, where = difference(run_whole(case), run_cut(case, captured, stage_of))
    assert worst == 0, where


def test_a_tensor_sent_to_two_stages_gets_the_sum_of_both_gradients() -> None:
    case = regression(Skipping())
    captured = capture(case.model, case.args, layers=["first", "second", "third", "fourth"])
    stage_of = {"first": 0, "second": 1, "third": 2, "fourth": 2}
    runs, _ = chain([Slice(case.model, captured, stage_of, stage) for stage in range(3)], case.args, {})
    ones = [torch.ones(4, 6)]
    runs[0].sends[1].tensors[0].retain_grad()
    backward_through(runs[0], {1: ones, 2: ones})
    assert torch.equal(runs[0].sends[1].tensors[0].grad, torch.full((4, 6), 2.0))
    assert gradients_of(runs[1], 0) == [None], "its own backward did not run yet"


class Flagged(nn.Module):
    """Keywords, None, booleans and a dictionary go from layer to layer; a flag leaves the head out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 2)
        self.small_head = nn.Linear(6, 2)

    def forward(
        self, x: torch.Tensor, *, mask: torch.Tensor | None = None, scale: float = 1.0, skip_head: bool = False
    ) -> torch.Tensor:
        state = {"x": self.embed(x), "mask": mask, "depth": 0}
        for block in self.blocks:
            state = block(state, scale=scale)
        assert state["depth"] == 3
        return self.small_head(state["x"]) if skip_head else self.head(state["x"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, state: dict, scale: float) -> dict:
        x = torch.tanh(self.inner(state["x"])) * scale
        if state["mask"] is not None:
            x = x * state["mask"]
        return {"x": x, "mask": state["mask"], "depth": state["depth"] + 1}


def test_keywords_none_and_flags_go_through_and_may_change_from_call_to_call() -> None:
    case = regression(Flagged())
    case.kwargs = {"mask": torch.tensor([1.0, 0, 1, 1, 0, 1]), "scale": 0.5}
    captured = capture(case.model, case.args, case.kwargs, max_share=0.01)
    whole = run_whole(case)
    for cut in possible_cuts(captured):
        worst, where = difference(whole, run_cut(case, captured, split(captured, [cut])))
        assert worst == 0, (cut, where)
    stage_of = split(captured, ["blocks.1", "head"])
    for change in ({"mask": None}, {"scale": 2.0}, {"skip_head": True}, {"mask": None, "skip_head": True}):
        again = dataclasses.replace(case, kwargs=case.kwargs | change)
        worst, where = difference(run_whole(again), run_cut(again, captured, stage_of))
        assert worst == 0, (change, where)


def test_the_model_is_not_patched_afterwards_even_when_an_error_passes() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("in the user's own code")

    call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    captured = capture(model, (torch.ones(1, 2),), layers=["0", "1", "2"])
    broken = copy.deepcopy(model)
    broken[1].forward = Failing().forward
    parts = [Slice(broken, captured, {"0": 0, "1": 1, "2": 2}, stage) for stage in range(3)]
    with pytest.raises(KeyError, match="own code"):
        chain(parts, (torch.ones(1, 2),), {})
    assert nn.Module.__call__ is call
    assert torch.autograd.Function.__dict__["apply"] is apply or callable(torch.autograd.Function.apply)
    assert torch.equal(broken[0](torch.ones(1, 2)), model[0](torch.ones(1, 2)))


class SetOrder(nn.Module):
    """Calls its layers in an order that the process chooses, as iterating over a set of strings does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.order = ["a", "b", "c"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def test_a_forward_that_goes_another_way_on_one_rank_is_an_error_or_changes_nothing() -> None:
    case = Case(SetOrder(), (torch.randn(2, 3),), target=torch.randn(2, 3), loss_fn=nn.functional.mse_loss)
    captured = capture(case.model, case.args, layers=["a", "b", "c"])
    stage_of = {"a": 0, "b": 1, "c": 2}
    whole = run_whole(case)
    num_refused = 0
    for order in ("bac", "acb", "cba", "bc", "ac", "ab", "abb"):
        for stage in range(3):
            models = stage_models(case.model, captured, stage_of)
            models[stage].order = list(order)
            try:
                cut = run_cut(case, captured, stage_of, models=models)
            except UnsupportedModelError:
                num_refused += 1
            else:  # what that rank does differently comes after its own part
                assert difference(whole, cut)[0] == 0, (order, stage)
    assert num_refused > 14


def test_the_users_own_tensors_never_become_stand_ins() -> None:
    class WritesInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            x.mul_(2)
            return self.b(y + x)

    model = WritesInput()
    captured = capture(model, (torch.ones(2, 3),), layers=["a", "b"])
    x = torch.ones(2, 3)
    parts = [Slice(model, captured, {"a": 0, "b": 1}, stage) for stage in range(2)]
    runs, _ = chain(parts[:1], (x.clone(),), {})
    parts[1].run((x,), {}, {0: runs[0].sends[1]})
    assert type(x) is torch.Tensor


def test_inference_needs_no_gradients_and_makes_none() -> None:
    case, captured = captured_case("gpt2", 1 / 10)
    stage_of = split(captured, even_cuts(captured, 3))
    parts = [Slice(case.model, captured, stage_of, stage) for stage in range(3)]
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            whole = case.model(**case.kwargs)
            runs, _ = chain(parts, (), case.kwargs)
        assert torch.equal(runs[-1].output.logits, whole.logits)
        assert not any(tensor.requires_grad for run in runs for p in run.sends.values() for tensor in p.tensors)
        assert all(leaf is None for run in runs for leaves in run.leaves.values() for leaf in leaves)


def test_python_random_numbers_agree_with_the_uncut_model() -> None:
    class Dropping(nn.Module):
        """Stochastic depth by Python's random module, dropout by torch's."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)) for _ in range(6))
            self.head = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                if random.random() < 0.7:
                    x = x + block(x)
            return self.head(x)

    case = regression(Dropping())
    state = random.getstate()
    random.seed(3)
    captured = capture(case.model, case.args, max_share=0.01)
    random.setstate(state)
    compared = 0
    for seed in range(6):
        for cut in possible_cuts(captured):
            try:
                cut_result = run_cut(case, captured, split(captured, [cut]), seed=seed)
            except UnsupportedModelError:
                continue
            compared += 1
            worst, where = difference(run_whole(case, seed=seed), cut_result)
            assert worst == 0, (seed, cut, where)
    assert compared


NOWHERE = {
    "generator_of_its_own": "generator",
    "tensor_subclass_crosses": "special kind",
    "branches_in_threads": "threads",
}
"""Odd models that cannot be cut at all, and a word of the reason."""


ALSO = (
    "backward_hooks_on_containers",
    "compiled_function_in_glue",
    "custom_operator_in_glue",
    "implicit_fixed_point",
    "checkpoints_whose_inputs_are_offloaded",
    "per_sample_gradients_inside",
    "pulls_back_by_hand",
    "results_that_the_loss_leaves_out",
    "scripted_function_in_glue",
    "table_in_a_function_cache",
)
"""Of the odder models, those in which something once went wrong; benchmarks/zoo.py runs all."""
AND = (
    "two_players",
    "sequences_of_all_kinds",
    "configuration_that_layers_change",
    "decoder_that_samples_its_own_inputs",
)
"""Likewise of the oddest."""
DAILY = (
    "balancing_losses_in_a_list_made_anew",
    "bayesian_layers_keep_their_divergence",
    "distils_from_itself_in_eval_mode",
    "function_mode_of_its_own",
    "keys_and_values_kept_by_each_layer",
    "nested_checkpoints_with_state",
    "recurrent_wrapper_with_reset",
    "temperature_in_a_buffer",
)
"""Likewise of those that people publish."""
ODDS = {
    **ODD,
    **{name: ODDER[name] for name in ALSO},
    **{name: ODDEST[name] for name in (*AND, "cache_of_keys_and_values", "state_of_all_layers_in_one_list")},
    **{name: EVERYDAY[name] for name in DAILY},
    **PUBLISHED,
    **RECORDED,
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ODDS)
def test_odd_models_are_cut_where_that_is_right_and_nowhere_else(name: str) -> None:
    """Three steps in a row, since many of them keep something from one to the next."""
    case = ODDS[name]()
    case.model = unwrap(case.model)
    seed_all(0)
    captured = capture(case.model, case.args, case.kwargs, max_share=0.0)
    cuts = possible_cuts(captured)
    if name in NOWHERE:
        assert not cuts
        assert all(NOWHERE[name] in reason for reason in captured.no_cut.values())
        return
    assert cuts or name == "root_is_one_layer"
    singles = [[cut] for cut in cuts[:: 1 + len(cuts) // 6]]
    for chosen in [*singles, *([[cuts[0], cuts[len(cuts) // 2], cuts[-1]]] if len(cuts) > 2 else [])]:
        stage_of = split(captured, chosen)
        whole, models = copy.deepcopy(case.model), stage_models(case.model, captured, stage_of)
        for step in range(3):
            fresh = [dataclasses.replace(case, args=copy.deepcopy(case.args)) for _ in range(2)]
            expected = run_whole(fresh[0], seed=step, model=whole)
            worst, where = difference(expected, run_cut(fresh[1], captured, stage_of, seed=step, models=models))
            assert worst < 1e-5, (chosen, step, where)


class HooksItself(nn.Module):
    """One hook for the time of each forward, and one for good, at the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.is_hooked, self.num_calls = False, 0

    def count(self, *given: object) -> None:
        self.num_calls += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_hooked:
            self.is_hooked = True
            self.a.register_forward_hook(self.count)
        doubled = self.a.register_forward_hook(lambda module, args, out: out * 2)
        x = self.c(self.b(self.a(x)))
        doubled.remove()
        return x


def test_a_hook_for_the_time_of_the_forward_goes_also_where_that_ends_early() -> None:
    case = regression(HooksItself())
    captured = capture(case.model, case.args, layers=["a", "b", "c"])
    stage_of = {"a": 0, "b": 0, "c": 1}
    whole, models = copy.deepcopy(case.model), stage_models(case.model, captured, stage_of)
    for _ in range(3):
        worst, where = difference(run_whole(case, model=whole), run_cut(case, captured, stage_of, models=models))
        assert worst < 1e-6, where
    assert [len(model.a._forward_hooks) for model in (whole, *models)] == [1, 1, 1]
    assert [model.num_calls for model in (whole, models[0])] == [3, 3]


@pytest.mark.parametrize("how", [{"with_stack": True}, {"record_shapes": True, "profile_memory": True}])
def test_stages_run_under_torchs_own_profiler(how: dict) -> None:
    """It reads gradients at module calls, and holds weak references to tensors that are to be exchanged."""
    case, captured = captured_case("gpt2", 1 / 10)
    stage_of = split(captured, even_cuts(captured, 3))
    whole = run_whole(case)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **how):
        cut = run_cut(case, captured, stage_of)
    worst, where = difference(whole, cut)
    assert worst < 1e-6, where


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_what_a_forward_made_goes_with_it_and_waits_for_no_garbage_collection(name: str) -> None:
    """A cycle through what watches a forward kept all cut tensors, their graphs with them, until Python collected."""
    case, captured = captured_case(name, 1 / 10)
    stage_of = split(captured, even_cuts(captured, 3))
    slices = [Slice(case.model, captured, stage_of, stage) for stage in range(3)]
    gc.collect()
    gc.disable()
    try:
        runs, backward = chain(slices, case.args, case.kwargs or {})
        kept = [weakref.ref(t) for run in runs for payload in run.sends.values() for t in payload.tensors]
        kept += [
            weakref.ref(leaf) for run in runs for leaves in run.leaves.values() for leaf in leaves if leaf is not None
        ]
        del runs, backward
        assert kept and not [reference for reference in kept if reference() is not None]
    finally:
        gc.enable()


class Deep(nn.Module):
    """Blocks that change nothing, with modules inside that nobody calls for other stages."""

    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def deep_stages(num_stages: int = 3) -> tuple[Deep, list[Slice], torch.Tensor]:
    """A model, its stages on copies of it, and inputs."""
    model, x = Deep(), torch.randn(2, 4)
    captured = capture(model, (x,), max_share=1 / 6)
    cuts = [f"blocks.{2 * k}" for k in range(1, num_stages)]
    stage_of = split(captured, cuts)
    return model, [Slice(copy.deepcopy(model), captured, stage_of, stage) for stage in range(num_stages)], x


def test_a_forward_that_changes_nothing_looks_at_no_place_again(monkeypatch: pytest.MonkeyPatch) -> None:
    if not _dicts_are_numbered():
        pytest.skip("dicts have no numbers here")
    _, slices, x = deep_stages()
    counts: Counter[str] = Counter()

    def counted(cls: type, name: str) -> None:
        original = getattr(cls, name)

        def call(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(cls, name, call)

    counted(Glance, "is_still")
    counted(Watched, "is_touched")
    counted(WatchedCall, "enter")
    chain(slices, (x,), {})
    counts.clear()
    with contextlib.ExitStack() as held:
        for part in slices:
            held.enter_context(part.held())
        assert counts.pop("enter") == sum(len(part.calls) for part in slices)
        for _ in range(2):
            chain(slices, (x,), {})
    # a look after each of six layers; where a stage's own part begins, where it ends, and at what it has left
    assert counts == {"is_still": 2 * (6 + 3 * 3)}


def test_held_stages_give_the_same_and_leave_nothing_also_when_an_error_passes() -> None:
    model, slices, x = deep_stages()
    whole = model(x)
    before = [dict(vars(module)) for part in slices for module in part.model.modules()]
    with contextlib.ExitStack() as held:
        for part in slices:
            held.enter_context(part.held())
        for _ in range(2):
            runs, backward = chain(slices, (x,), {})
            assert torch.equal(runs[-1].output, whole)
            backward(runs[-1].output)
        assert torch.equal(slices[0].model(x), whole)  # between forwards the model is its own
    with pytest.raises(ZeroDivisionError), slices[0].held():
        raise ZeroDivisionError
    assert [dict(vars(module)) for part in slices for module in part.model.modules()] == before
    assert torch.autograd.Function.apply.__name__ == "apply"


class AddsThree(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(3)


class WritesFirst(nn.Module):
    """Its second layer writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), AddsThree(), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x))).sum()


def test_what_is_given_away_is_written_into_and_other_payloads_stay_as_they_are() -> None:
    model, x = WritesFirst(), torch.randn(2, 4)
    captured = capture(model, (x,), max_share=1 / 3)
    stage_of = split(captured, ["b"])
    model(x).backward()
    for given_away in (False, True):
        slices = [Slice(copy.deepcopy(model), captured, stage_of, stage) for stage in range(2)]
        run = slices[0].run((x,), {})
        sent = Payload(run.sends[1].header, [run.sends[1].tensors[0].detach().clone()], given_away)
        before = sent.tensors[0].clone()
        last = slices[1].run((x,), {}, {0: sent})
        assert torch.equal(sent.tensors[0], before) is not given_away
        for part in slices:
            part.model.zero_grad()
        last.output.backward()
        backward_through(run, {1: gradients_of(last, 0)})
        for name, parameter in model.named_parameters():
            stage = 0 if name.startswith("a") else 1
            assert torch.equal(slices[stage].model.get_parameter(name).grad, parameter.grad), (given_away, name)


class ByTask(nn.Module):
    """Adapters in dicts, of one task in each batch: those of others belong to where these would be used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        shifts = {f"{task}_{k}": nn.Parameter(torch.randn(6)) for k in range(4) for task in ("old", "new", "both")}
        self.shifts = nn.ParameterDict(shifts)
        self.scales = nn.ModuleDict({task: nn.ModuleList(nn.Linear(6, 6) for _ in range(4)) for task in ("old", "new")})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x) + self.shifts[f"{task}_{k}"])
            x = x + self.scales[task][k](x)
        return x


def test_adapters_of_another_task_are_where_those_of_this_one_are() -> None:
    torch.manual_seed(0)
    case = Case(ByTask(), (torch.randn(4, 6), "old"), loss_fn=lambda output, _: output.square().mean())
    captured = capture(case.model, case.args, case.kwargs, max_share=0.0)
    cuts = possible_cuts(captured)
    assert len(cuts) == 7
    for task in ("old", "new"):
        other = dataclasses.replace(case, args=(case.args[0], task))
        for cut in cuts:
            worst, where = difference(run_whole(other), run_cut(other, captured, split(captured, [cut])))
            assert worst == 0.0, (task, cut, where)
