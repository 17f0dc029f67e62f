"""Every model of the zoo partitioned, run in stages and compared with one device: the same, refused, or different.

    python tests/benchmarks/zoo.py --family all --json zoo.json                   stages one after another, one process
    python tests/benchmarks/zoo.py --family hf --names mixtral t5 --ranks 2       real ranks over gloo
    python tests/benchmarks/zoo.py --family odd --ranks 3 --schedule 1f1b

`same`: the loss, every gradient, every buffer and the weights after each of two optimizer steps are within 1e-5 of
max(max|reference|, 1e-4 x the model's largest), over the same micro-batches; and the loss and gradients at further cuts
(`--more-cuts`) and at three and four stages. `refused`: an error that says why, or a plan without a cut.

Each model runs in a process of its own with a time limit; on real ranks one process and its ranks go from model to
model until one fails. In one process every stage has its own copy of the model, in which parameters of other stages are
NaN, and payloads are copied as over a wire; random numbers go on from stage to stage as in the whole forward, so that
dropout stays on. On real ranks, each of which builds the model itself, models that draw random numbers run in eval
mode, or are left out where that is no help.
A new model is a small function in tests/hf_models, tests/library_models or one of the tests/odd*_models.py.
The family `libraries` is of other packages on PyPI (the extra `zoo`); models of those not installed are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

PRELOADED = ["torch", "torch._dynamo", "scipy.optimize", "transformers.modeling_utils", "partitioner.executor.stage"]
"""Imported once, by the process that all models' processes are forked from."""
TOLERANCE = 1e-5
ROUNDING, DOUBLE_TOLERANCE = 1e-2, 1e-9
"""Up to here a difference may be rounding: then float64 decides, in which it must be this small."""
KINDS = ("loss_error", "grad_error", "buffer_error", "weight_error")
TINY = 1e-30


def family(name: str) -> dict[str, Callable[[], Any]]:
    if name == "hf":
        from hf_models import HF

        return dict(HF)
    if name == "libraries":
        from library_models import LIBRARIES

        return dict(LIBRARIES)
    from odd_everyday_models import EVERYDAY
    from odd_glue_models import GLUE
    from odd_models import ODD
    from odd_published_models import PUBLISHED
    from odd_recorded_models import RECORDED
    from odder_models import ODDER
    from oddest_models import ODDEST

    return {**ODD, **ODDER, **ODDEST, **EVERYDAY, **GLUE, **PUBLISHED, **RECORDED}


# -- one model


def row(
    name: str, of: str, ranks: int, stages: int, microbatches: int, schedule: str, more_cuts: int, pool: list[Any]
) -> dict[str, Any]:
    """Partition, run and compare one model; what it was compared with is one device."""
    import torch

    import partitioner as pt
    from partitioner.errors import LossWarning, PartitionerError
    from partitioner.microbatches import Cutter
    from partitioner.tracing import unwrap

    torch.set_num_threads(1)
    found: dict[str, Any] = {"model": name, "family": of, "cuts": None}
    if of == "libraries":
        from library_models import missing

        if package := missing(name):
            return found | {"verdict": f"skipped: {package} is not installed"}
    build, microbatches = widened(family(of)[name], of, microbatches)
    case = build()
    try:
        common: dict[str, Any] = {"loss_fn": case.loss_fn, "example_target": case.target}
        batch = Cutter(case.batch_dim).batch_size(case.args, case.kwargs or {})
        sizes = [batch // microbatches]
        start_s = time.process_time()
        profile = pt.profile(
            case.model,
            case.inputs,
            **common,
            batch_dim=case.batch_dim,
            microbatch_sizes=sizes,
            max_share=1 / 16,
            num_threads=1,
            whole_step=False,
        )
        if any(one.written == "every" for one in profile.parameters):
            microbatches = 1  # with more, weights that the forward changes would be refused
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            plan = pt.partition(
                case.model,
                case.inputs,
                gpus=stages,
                mesh={"pp": stages, "dp": 1},
                microbatches=microbatches,
                schedule=schedule,
                profile=profile,
                batch_dim=case.batch_dim,
                **common,
            )
        if warned := [str(one.message) for one in told if issubclass(one.category, LossWarning)]:
            found["warned"] = warned
        found["plan_s"] = round(time.process_time() - start_s, 1)
    except PartitionerError as error:
        return found | {
            "verdict": f"refused: {error}",
            "cuts": num_cuts(case, microbatches),
            "trace": traceback.format_exc(),
        }
    cuts = [layer.id for layer in profile.layers[1:] if layer.id not in profile.no_cut]
    found |= {"layers": len(profile.layers), "cuts": len(cuts), "cut": [s.layers[0] for s in plan.stages[1:]]}
    given_up = [note for note in plan.why if note.startswith("not cut before")]
    if given_up:
        found["given_up"] = given_up
    if ranks:
        found |= on_ranks(name, of, microbatches, False, plan, pool)
        if found["verdict"] == "different":  # other orders of sums grow from step to step: float64 decides
            try:
                with default_dtype(double=True):
                    again = on_ranks(name, of, microbatches, True, in_float64(plan, doubled(build)), pool)
            except RuntimeError as error:  # not every model runs in it
                return found | {"float64_error": None, "why_not_float64": str(error)}
            # The loss comes back as the model computes it, in float32 by some whatever their weights are.
            worst = max(again.get(kind, float("inf")) for kind in KINDS if kind != "loss_error")
            close = worst <= DOUBLE_TOLERANCE and again.get("loss_error", float("inf")) <= TOLERANCE
            found |= {"float64_error": worst, "verdict": "same" if close else "different"}
        return found
    case.model = unwrap(case.model)
    try:
        found |= in_turn(build, case, plan)
        if found["verdict"] == "different" and max(found[kind] for kind in KINDS) < ROUNDING:
            try:
                found |= in_double(build, plan, found)
            except RuntimeError as error:  # not every model runs in it
                found |= {"float64_error": None, "why_not_float64": str(error)}
        if found["verdict"] == "same" and more_cuts:
            there = elsewhere(build, plan, cuts, more_cuts)
            if there.get("grad_error", 1.0) < ROUNDING:
                try:
                    with default_dtype(double=True):
                        there = elsewhere(doubled(build), plan, cuts, more_cuts, DOUBLE_TOLERANCE)
                except RuntimeError as error:
                    there |= {"float64_error": None, "why_not_float64": str(error)}
                    if there["verdict"] == "different":
                        there["rounding"] = rounding(build, plan)
                        there["verdict"] = "same" if there["grad_error"] <= there["rounding"] else "different"
            found |= there
    except PartitionerError as error:
        found |= {"verdict": f"refused: {error}", "trace": traceback.format_exc()}
    return found


def widened(build: Callable[[], Any], of: str, microbatches: int) -> tuple[Callable[[], Any], int]:
    """Odd models with as many batches of four as there are micro-batches, since many of them take four only."""
    import torch

    from partitioner.structures import map_tensors, tensors_in

    if of != "odd":
        return build, microbatches
    if any(t.dim() == 0 or t.shape[0] != 4 for t in tensors_in(build().args)):
        return build, 1

    def others(tensor: torch.Tensor) -> torch.Tensor:
        more = [tensor.flip(0) * (0.5 + k) for k in range(microbatches - 1)]
        return torch.cat([tensor, *(part.to(tensor.dtype) if tensor.is_floating_point() else tensor for part in more)])

    def built() -> Any:
        case = build()
        case.args = map_tensors(case.args, lambda tensor: others(tensor.detach()))
        return case

    return built, microbatches


def first_part(case: Any, microbatches: int) -> Any:
    """The case with its first micro-batch only."""
    from partitioner.microbatches import Cutter

    part = Cutter(case.batch_dim).cut(case.args, case.kwargs or {}, case.target, microbatches)[0]
    return dataclasses.replace(case, args=part.args, kwargs=part.kwargs, target=part.target)


def num_cuts(case: Any, microbatches: int) -> int | None:
    from partitioner.capture import capture
    from partitioner.errors import PartitionerError

    part = first_part(case, microbatches)
    try:
        captured = capture(case.model, part.args, part.kwargs, max_share=0.0)
    except PartitionerError:
        return None
    return sum(layer.id not in captured.no_cut for layer in captured.layers[1:])


class Side:
    """Models trained side by side on the same micro-batches: one, or one for each stage."""

    def __init__(self, case: Any, plan: Any, models: Sequence[Any], stages: Sequence[Any] = ()) -> None:
        from partitioner.losses import Loss
        from partitioner.microbatches import Cutter

        self.case, self.plan, self.models, self.stages = case, plan, models, stages
        self.loss = Loss(models[-1], case.loss_fn, None, plan.training.loss_rule)
        self.cutter = Cutter(plan.training.batch_dim)
        self.cut_bytes = 0

    def step(self, args: Any, kwargs: Any, target: Any, seed: int) -> float:
        """One training step without the optimizer: gradients on the models, and the loss."""
        import torch
        from side_by_side import seed_all

        for model in self.models:
            model.zero_grad()
        parts = self.cutter.cut(args, kwargs, target, self.plan.num_microbatches)
        given = [part.kwargs if not part.args else part.args for part in parts]
        weights = self.loss.weights(parts, given)
        _, shares = self.loss.shares(parts, weights)
        value = 0.0
        for k, (part, share) in enumerate(zip(parts, shares, strict=True)):
            seed_all(1000 * seed + k)
            with torch.enable_grad(), self.loss.watching():
                if self.stages:
                    output, backward = self._stage_by_stage(part, 1000 * seed + k)
                else:
                    output, backward = self.models[0](*part.args, **part.kwargs), torch.Tensor.backward
                loss = self.loss.part(output, part.target, share)
            if loss.requires_grad:
                backward(loss)
            value += float(loss.detach())
        return value

    def _stage_by_stage(self, part: Any, seed: int) -> tuple[Any, Callable[[Any], None]]:
        from side_by_side import seed_python

        from partitioner.slicing import chain

        runs, backward = chain(self.stages, part.args, part.kwargs, before_each=lambda: seed_python(seed))
        sent = [t for run in runs for payload in run.sends.values() for t in payload.tensors]
        self.cut_bytes = sum(t.numel() * t.element_size() for t in sent)
        return runs[-1].output, backward


def in_turn(build: Callable[[], Any], case: Any, plan: Any, steps: int = 2) -> dict[str, Any]:
    """The plan's stages one after another against one model: two steps, the second from the weights of the first."""
    import torch

    from partitioner.executor.placement import Placement
    from partitioner.slicing import Slice
    from partitioner.tracing import unwrap

    device = torch.device("cpu")
    whole = Side(case, plan, [unwrap(build().model)])
    placements = [Placement(plan, stage, build().model, device, None) for stage in range(plan.num_stages)]
    slices = [Slice(p.model, plan.profile, plan.stage_of(), p.stage) for p in placements]
    cut = Side(case, plan, [p.model for p in placements], slices)
    worst = dict.fromkeys(KINDS, 0.0)
    where = ""
    for step in range(steps):
        fresh = [build() for _ in range(2)]
        a = whole.step(fresh[0].args, fresh[0].kwargs or {}, fresh[0].target, step)
        b = cut.step(fresh[1].args, fresh[1].kwargs or {}, fresh[1].target, step)
        sum_shared(placements)
        errors = {"loss_error": (abs(a - b) / max(abs(a), TINY), "the loss")}
        reference = dict(whole.models[0].named_parameters())
        errors["grad_error"] = apart(
            gradients([whole.models[0]], [reference]), gradients(cut.models, [p.own for p in placements])
        )
        errors["buffer_error"] = apart(dict(whole.models[0].named_buffers()), spoken_for(placements))
        scale = 0.1 / max(1.0, norm(reference.values()))
        descend(reference.values(), scale)
        for placement in placements:
            descend(placement.own.values(), scale)
        held = {name: p for placement in placements for name, p in placement.own.items()}
        errors["weight_error"] = apart(reference, held)
        for kind, (error, name) in errors.items():
            if not error <= worst[kind]:
                worst[kind] = error
                where = where if max(worst.values()) > error else f"{kind} of {name} in step {step}"
    same = all(error <= TOLERANCE for error in worst.values())
    found: dict[str, Any] = {**worst, "worst": where, "cut_bytes": cut.cut_bytes}
    return found | {"verdict": "same" if same else "different"} | overhead(whole, cut)


def in_double(build: Callable[[], Any], plan: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The verdict of the same comparison in float64, where rounding is a billion times smaller."""
    build = doubled(build)
    with default_dtype(double=True):
        again = in_turn(build, build(), in_float64(plan, build))
    worst = max(again[kind] for kind in KINDS)
    return {"float64_error": worst, "verdict": "same" if worst <= DOUBLE_TOLERANCE else "different"}


def in_float64(plan: Any, build: Callable[[], Any]) -> Any:
    """The plan, for the model in float64."""
    from partitioner.capture import fingerprint
    from partitioner.tracing import unwrap

    profile = plan.profile.model_copy(update={"fingerprint": fingerprint(unwrap(build().model)), "dtype": "float64"})
    return plan.model_copy(update={"profile": profile})


@contextlib.contextmanager
def default_dtype(double: bool) -> Iterator[None]:
    """The type of tensors that a model or its loss makes as it runs without saying of what type, or by `float()`."""
    import torch

    before, as_float = torch.get_default_dtype(), torch.Tensor.float
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    torch.Tensor.float = torch.Tensor.double if double else as_float  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.Tensor.float = as_float  # type: ignore[method-assign]


def doubled(build: Callable[[], Any]) -> Callable[[], Any]:
    """The case in float64."""
    import torch

    from partitioner.structures import map_tensors

    def wider(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.dtype == torch.float32 else tensor

    def built() -> Any:
        with default_dtype(double=False):  # the same weights, however it runs
            case = build()
        case.model.double()
        for module in case.model.modules():  # what modules keep beside parameters and buffers, and what they go by
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor):
                    vars(module)[name] = wider(value)
                elif value is torch.float32:
                    vars(module)[name] = torch.float64
        case.args, case.kwargs, case.target = map_tensors((case.args, case.kwargs, case.target), wider)
        return case

    return built


def sum_shared(placements: Sequence[Any]) -> None:
    """What stages that share a parameter do over the wire: all get the sum of their gradients."""
    for name in placements[0].model.state_dict(keep_vars=True):
        owners = [p.own[name] for p in placements if name in p.own]
        parts = [parameter.grad for parameter in owners if parameter.grad is not None]
        if len(owners) > 1 and parts:
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            for parameter in owners:
                parameter.grad = total.clone()


def gradients(models: Sequence[Any], held: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: p.grad for own in held for name, p in own.items() if p.grad is not None}


def spoken_for(placements: Sequence[Any]) -> dict[str, Any]:
    """Every buffer as the stage has it that writes it into checkpoints."""
    return {
        name: buffer
        for placement in placements
        for name, buffer in placement.model.named_buffers()
        if placement.stage_of_key(name) == placement.stage
    }


def norm(parameters: Any) -> float:
    return sum(float(dense(p.grad).abs().square().sum()) for p in parameters if p.grad is not None) ** 0.5


def descend(parameters: Any, scale: float) -> None:
    """A step of gradient descent, so small that no model runs away."""
    import torch

    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad, alpha=scale)


def dense(tensor: Any) -> Any:
    import torch

    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    return tensor if tensor.is_complex() else tensor.double()


def apart(expected: dict[str, Any], found: dict[str, Any]) -> tuple[float, str]:
    """The worst difference and whose; NaN in the same places is no difference."""
    import torch

    expected = {name: dense(tensor) for name, tensor in expected.items()}
    found = {name: dense(tensor) for name, tensor in found.items()}
    sizes = {name: float(t.nan_to_num().abs().max()) if t.numel() else 0.0 for name, t in expected.items()}
    largest = max(sizes.values(), default=0.0)
    worst, whose = 0.0, ""
    for name in {**expected, **found}:
        a, b = expected.get(name), found.get(name)
        if a is None or b is None:
            error = float("inf") if bool((a if a is not None else b).any()) else 0.0
        elif a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
            error = float("inf")
        else:
            gap = (a.nan_to_num() - b.nan_to_num()).abs()
            error = float(gap.max()) / (max(sizes[name], 1e-4 * largest) or 1.0) if gap.numel() else 0.0
        if not error <= worst:
            worst, whose = error, name
    return worst, whose


def overhead(whole: Side, cut: Side, rounds: int = 5) -> dict[str, Any]:
    """Seconds of the plain forward of a micro-batch and of all stages' forwards beside it; the medians' ratio - 1."""
    import torch
    from side_by_side import seed_python

    from partitioner.slicing import chain
    from partitioner.structures import in_own_containers

    case = cut.case
    part = cut.cutter.cut(case.args, case.kwargs or {}, case.target, cut.plan.num_microbatches)[0]
    plain_s, sliced_s = [], []
    for k in range(rounds):
        for stages, times in ((False, plain_s), (True, sliced_s)):
            torch.manual_seed(k)
            seed_python(k)
            start = time.perf_counter()
            if stages:
                chain(cut.stages, part.args, part.kwargs, before_each=lambda k=k: seed_python(k))
            else:
                args, kwargs = in_own_containers((part.args, part.kwargs))
                whole.models[0](*args, **kwargs)
            times.append(time.perf_counter() - start)
    plain, sliced = statistics.median(plain_s), statistics.median(sliced_s)
    return {"plain_s": plain, "overhead": sliced / plain - 1}


def elsewhere(
    build: Callable[[], Any], plan: Any, cuts: list[str], count: int, tolerance: float = TOLERANCE
) -> dict[str, Any]:
    """Loss and gradients at other cuts, `count` of them spread over the model, and at three and four stages."""
    from side_by_side import difference, even_cuts, run_cut, run_whole, split, stage_models

    from partitioner.errors import PartitionerError
    from partitioner.tracing import unwrap

    def fresh() -> Any:
        case = first_part(build(), plan.num_microbatches)
        case.model = unwrap(case.model)
        return case

    step = max(1, len(cuts) // count)
    chosen = [[cut] for cut in cuts[step // 2 :: step]]
    chosen += [even_cuts(plan.profile, stages) for stages in (3, 4) if len(cuts) >= stages]
    found: dict[str, Any] = {"more_cuts": len(chosen)}
    reference = fresh()
    whole = run_whole(reference, model=reference.model)
    for these in chosen:
        try:
            case = fresh()
            stage_of = split(plan.profile, these)
            models = stage_models(case.model, plan.profile, stage_of, lambda: fresh().model)
            error, where = difference(whole, run_cut(fresh(), plan.profile, stage_of, models=models))
        except PartitionerError as refusal:
            return found | {"verdict": f"refused: cut before {', '.join(these)}: {refusal}"}
        if not error <= tolerance:
            return found | {
                "verdict": "different",
                "grad_error": error,
                "worst": f"{where}, cut before {', '.join(these)}",
            }
    return found


def rounding(build: Callable[[], Any], plan: Any) -> float:
    """How far gradients of one device move where every weight does by about half a unit of its last place."""
    import torch
    from side_by_side import difference, run_whole

    from partitioner.tracing import unwrap

    case, moved = (first_part(build(), plan.num_microbatches) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in unwrap(moved.model).parameters():
            if parameter.dtype == torch.float32:
                parameter.mul_(1 + 2**-24 * torch.randn(parameter.shape, generator=generator))
    return difference(run_whole(case, model=unwrap(case.model)), run_whole(moved, model=unwrap(moved.model)))[0]


# -- real ranks


def draws(build: Callable[[], Any], plan: Any, evaluate: bool) -> bool:
    """Whether a forward of two steps draws random numbers: of torch's the state tells, as a loss may hardly depend on
    them; of others the loss. Models may keep state, so that each is a new one."""
    import torch
    from side_by_side import seed_all

    from partitioner.losses import Loss
    from partitioner.microbatches import Cutter
    from partitioner.structures import in_own_containers
    from partitioner.tracing import unwrap

    values = []
    for seed in range(3):
        case = build()
        model = unwrap(case.model)
        if evaluate:
            model.eval()
        cutter = Cutter(plan.training.batch_dim)
        parts = cutter.cut(case.args, case.kwargs or {}, case.target, plan.num_microbatches)
        seed_all(seed)
        before = torch.get_rng_state()
        loss = Loss(model, case.loss_fn, None)
        of_seed = []
        for part in [*parts, *parts]:
            with torch.enable_grad():
                args, kwargs = in_own_containers((part.args, part.kwargs))
                output = model(*args, **kwargs)
            of_seed.append(float(loss.of(output, part.target).detach()))
        if not torch.equal(before, torch.get_rng_state()):
            return True
        values.append(of_seed)
    return any(max(same) - min(same) > 1e-6 * abs(same[0]) for same in zip(*values, strict=True))


def on_ranks(name: str, of: str, microbatches: int, double: bool, plan: Any, pool: list[Any]) -> dict[str, Any]:
    """Two steps on ranks that find each other over gloo, against one device; `pool` keeps them for the next model."""
    import zoo  # by this name the ranks find it too
    from rank_pool import RankPool

    from partitioner.errors import PartitionerError
    from partitioner.tracing import unwrap

    build = built(name, of, microbatches, double)
    found: dict[str, Any] = {}
    evaluate = draws(build, plan, evaluate=False)
    if evaluate:
        found["eval"] = True
        if draws(build, plan, evaluate=True):
            return {"verdict": "skipped: it draws random numbers in eval mode too, and ranks draw others"}
    if not pool:
        pool.append(RankPool(plan.num_ranks, ["library_models.preloaded"] * (of == "libraries")))
    try:
        ranks = pool[0].run(plan.num_ranks, zoo.steps_on_rank, plan, name, of, microbatches, double, evaluate)
    except Exception as error:
        first = next(iter(getattr(error, "errors", {0: error}).values()))
        kind = "refused" if isinstance(first, PartitionerError) else "failed"
        return found | {"verdict": f"{kind}: {type(first).__name__}: {first}"}
    whole = Side(build(), plan, [unwrap(build().model)])
    if evaluate:
        whole.models[0].eval()
    worst = dict.fromkeys(KINDS, 0.0)
    where = ""
    reference = dict(whole.models[0].named_parameters())
    for step, parts in enumerate(zip(*ranks, strict=True)):
        fresh = build()
        value = whole.step(fresh.args, fresh.kwargs or {}, fresh.target, step)
        losses = [abs(part["loss"] - value) / max(abs(value), TINY) for part in parts]
        joined = {kind: {n: t for part in parts for n, t in part[kind].items()} for kind in RANK_KINDS}
        errors = {"loss_error": (max(losses), "the loss")}
        errors["grad_error"] = apart(gradients(whole.models, [reference]), joined["gradients"])
        errors["buffer_error"] = apart(dict(whole.models[0].named_buffers()), joined["buffers"])
        descend(reference.values(), 0.1 / max(1.0, norm(reference.values())))
        errors["weight_error"] = apart(reference, joined["weights"])
        for kind, (error, whose) in errors.items():
            if not error <= worst[kind]:
                worst[kind] = error
                where = where if max(worst.values()) > error else f"{kind} of {whose} in step {step}"
    same = all(error <= TOLERANCE for error in worst.values())
    return found | worst | {"worst": where, "verdict": "same" if same else "different"}


RANK_KINDS = ("gradients", "buffers", "weights")


def built(name: str, of: str, microbatches: int, double: bool) -> Callable[[], Any]:
    """What makes the model and its batch."""
    build = widened(family(of)[name], of, microbatches)[0]
    return doubled(build) if double else build


def steps_on_rank(
    plan: Any, name: str, of: str, microbatches: int, double: bool, evaluate: bool, steps: int = 2
) -> list[Any]:
    """What this rank has after each step: the loss; its part of gradients, buffers and weights."""
    import torch

    import partitioner as pt
    from partitioner.tracing import unwrap

    build = built(name, of, microbatches, double)
    torch.set_num_threads(1)
    case, found = build(), []
    if evaluate:
        unwrap(case.model).eval()
    with default_dtype(double), pt.materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
        for _ in range(steps):
            fresh = build()
            loss = float(stage.train_step(fresh.inputs, fresh.target))
            own = {n: p for n, p in stage.named_parameters() if n != "(inert)"}
            kept = {"gradients": gradients([stage.module], [own]), "buffers": spoken_for([stage._placement])}
            kept = {kind: {n: t.detach().clone() for n, t in part.items()} for kind, part in kept.items()}
            size = float(stage.clip_grad_norm_(float("inf")))
            descend(own.values(), 0.1 / max(1.0, size))
            stage.module.zero_grad()
            weights = {n: t.detach().clone() for n, t in own.items()}
            found.append({"loss": loss, **kept, "weights": weights})
    return found


# -- all models, each in its process


def _serve(connection: Any, path: list[str]) -> None:
    """A process's life: rows of the models that it is asked for. Ranks are started once, for all of them."""
    sys.path[:] = path
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    pool: list[Any] = []
    with contextlib.suppress(EOFError, OSError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            name, of, options = connection.recv()
            try:
                answer = row(name, of, pool=pool, **options)
            except BaseException as error:
                answer = {"model": name, "family": of, "cuts": None}
                answer |= {"verdict": f"failed: {type(error).__name__}: {error}", "trace": traceback.format_exc()}
            connection.send(answer)
    for ranks in pool:
        ranks.close()
    os._exit(0)


class Worker:
    """A process that gives rows; another takes its place where it crashes or does not answer in time."""

    def __init__(self, context: Any) -> None:
        self._context, self._process, self._connection = context, None, None

    def row(self, name: str, of: str, limit_s: float, options: dict[str, Any]) -> dict[str, Any]:
        start = time.monotonic()
        if self._process is None:
            self._connection, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_serve, args=(theirs, list(sys.path)))
            self._process.start()
            theirs.close()
        answer: dict[str, Any] = {"model": name, "family": of, "cuts": None}
        try:
            self._connection.send((name, of, options))
            if self._connection.poll(limit_s):
                answer = self._connection.recv()
            else:
                answer["verdict"] = f"failed: no answer within {limit_s:g} s"
                self.stop()
        except (EOFError, OSError):
            self._process.join(5)
            answer["verdict"] = f"failed: the process died (exit code {self._process.exitcode})"
            self.stop()
        return answer | {"seconds": round(time.monotonic() - start, 1)}

    def stop(self) -> None:
        if self._process is not None:
            self._connection.close()  # it ends its ranks, unless it hangs
            self._process.join(3)
            self._process.kill()
            self._process.join(10)
        self._process = self._connection = None


def shown(found: dict[str, Any]) -> str:
    numbers = "".join(
        f"{found[key]:9.1e}" if found.get(key) is not None else "        -" for key in ("loss_error", "grad_error")
    )
    size = f"{found['cut_bytes']:9}" if "cut_bytes" in found else "        -"
    extra = f"{found['overhead']:+8.0%}" if "overhead" in found else "       -"
    more = f"  [{found['worst']}]" if found["verdict"] == "different" else ""
    more += f"  {len(found['given_up'])} cuts given up" if "given_up" in found else ""
    cuts = "-" if found["cuts"] is None else found["cuts"]
    start = f"{found['model']:38} {cuts:>4} {size} {numbers} {extra} {found['seconds']:6.1f}"
    return f"{start}  {found['verdict'][:150]}{more}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=["hf", "odd", "libraries", "all"], default="all")
    parser.add_argument("--names", nargs="*")
    parser.add_argument("--ranks", type=int, default=0, help="real ranks; 0: stages one after another in one process")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="gpipe", help="that of real ranks")
    parser.add_argument("--more-cuts", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = {
        "ranks": given.ranks,
        "stages": given.ranks or given.stages,
        "microbatches": given.microbatches,
        "schedule": given.schedule,
        "more_cuts": given.more_cuts,
    }
    os.environ.update(OMP_NUM_THREADS="1", PYTHONHASHSEED="0", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    context = multiprocessing.get_context("forkserver")
    libraries = given.family in ("libraries", "all")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])  # of what preloads
    context.set_forkserver_preload(["library_models.preloaded"] * libraries + PRELOADED)
    rows: list[dict[str, Any]] = []
    worker = Worker(context)
    print(f"{'model':38} cuts cut bytes      loss gradient overhead seconds  verdict")
    for of in ("hf", "odd", "libraries") if given.family == "all" else (given.family,):
        for name in family(of):
            if given.names and name not in given.names:
                continue
            rows.append(worker.row(name, of, given.limit_s, options))
            if not given.ranks:
                worker.stop()
            print(shown(rows[-1]), flush=True)
            if given.json:
                given.json.write_text(json.dumps({"rows": rows}, indent=1))
    worker.stop()
    kinds = Counter((found["family"], found["verdict"].partition(":")[0]) for found in rows)
    for of in sorted({found["family"] for found in rows}):
        total = sum(found["family"] == of for found in rows)
        counts = ", ".join(f"{count} {kind}" for (one, kind), count in sorted(kinds.items()) if one == of)
        print(f"{of}: {total} models: {counts}; {kinds[of, 'same'] / total:.1%} the same")
    sys.exit(any(found["verdict"].startswith(("different", "failed")) for found in rows))


if __name__ == "__main__":
    main()
