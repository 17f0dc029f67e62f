"""A model trained whole and in stages, with several micro-batches under way: all forwards, then all backwards.

Stages lie in one process, each with its own model taken over as on its rank; messages are copied as over a wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from models import Case
from plans import plan_of
from side_by_side import seed_all, seed_python
from torch import nn

from partitioner.capture import copied
from partitioner.executor.placement import Placement
from partitioner.slicing import Slice, SliceRun, _sent, backward_through, gradients_of
from partitioner.structures import map_tensors

NUM_MICROBATCHES = 4


def worst_in_flight(build: Callable[[], Case], cuts: Sequence[str], num_steps: int = 3) -> float:
    """The largest difference of a loss, gradient or own buffer from one device's, in float64, relative to the largest.

    Plain gradient descent goes on from step to step. Errors of a stage pass.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _worst(build, cuts, num_steps)
    finally:
        torch.set_default_dtype(before)


def _worst(build: Callable[[], Case], cuts: Sequence[str], num_steps: int) -> float:
    case = build()
    whole = case.model
    plan = plan_of(build().model, case.args, cuts=list(cuts))
    stages = range(plan.num_stages)
    places = [Placement(plan, k, build().model, torch.device("cpu"), None) for k in stages]
    slices = [Slice(one.model, plan.profile, plan.stage_of(), one.stage, loss=case.loss_fn) for one in places]
    worst = 0.0
    for step in range(num_steps):
        batch = case.args[0] + 0.1 * step
        parts = batch.chunk(NUM_MICROBATCHES)
        for one in (whole, *(place.model for place in places)):
            one.zero_grad()
        expected = 0.0
        for k, part in enumerate(parts):
            seed_all(100 * step + k)
            loss = case.loss_fn(whole(part.clone()), None) / NUM_MICROBATCHES
            loss.backward()
            expected += float(loss.detach())
        found, pending = 0.0, []
        for k, part in enumerate(parts):
            seed_all(100 * step + k)
            runs = _forwards(slices, part, 100 * step + k)
            with slices[-1].computing_loss():
                loss = case.loss_fn(runs[-1].output, None) / NUM_MICROBATCHES
            found += float(loss.detach())
            pending.append((runs, loss))
        for stage in reversed(stages):
            for runs, loss in pending:
                with slices[stage].as_after(runs[stage]):
                    if stage == stages[-1]:
                        loss.backward()
                    else:
                        run = runs[stage]
                        backward_through(run, {target: gradients_of(runs[target], stage) for target in run.sends})
        worst = max(worst, abs(found - expected) / abs(expected), *_apart(whole, places))
        with torch.no_grad():
            for parameter in (*whole.parameters(), *(one for place in places for one in place.own.values())):
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
    return worst


def _forwards(slices: Sequence[Slice], part: torch.Tensor, seed: int) -> list[SliceRun]:
    runs: list[SliceRun] = []
    for one in slices:
        received = {source: _sent(runs[source].sends[one.stage]) for source in one.sources}
        seed_python(seed)
        runs.append(one.run(map_tensors((part,), copied), {}, received))
    return runs


def _apart(whole: nn.Module, places: Sequence[Placement]) -> list[float]:
    """Of each gradient and buffer, relative to the largest; gradients of tied parameters are added up in place."""
    owners: dict[str, list[nn.Parameter]] = {}
    for place in places:
        for name, parameter in place.own.items():
            owners.setdefault(name, []).append(parameter)
    found = []
    for name, parameter in whole.named_parameters():
        gradients = [one.grad for one in owners[name] if one.grad is not None]
        assert (parameter.grad is None) == (not gradients), name
        if parameter.grad is None:
            continue
        total = torch.stack(gradients).sum(0)
        for one in owners[name]:
            one.grad = total.clone()
        found.append((total, parameter.grad))
    for name, buffer in whole.named_buffers():
        place = next(one for one in reversed(places) if one.holds(name))
        found.append((dict(place.model.named_buffers())[name], buffer))
    return [float((one - other).abs().max()) / max(float(other.abs().max()), 1e-6) for one, other in found]
