"""Run a plan on its ranks beside one device: the same numbers, and the predicted times?"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from partitioner.capture import fingerprint
from partitioner.display import Shown
from partitioner.errors import ArgumentError, PlanMismatchError, expect
from partitioner.executor import launch, materialize
from partitioner.losses import Loss, LossFunction, LossWeight
from partitioner.microbatches import Cutter, MicroBatch, as_call, as_given
from partitioner.plan import Plan
from partitioner.progress import Progress, shown
from partitioner.report.blocks import Facts, Page, Prose
from partitioner.restore import untouched
from partitioner.selfcheck import worst_difference
from partitioner.specs import Frozen, Seconds, counted
from partitioner.structures import in_own_containers
from partitioner.tracing import unwrap
from partitioner.trial import explained
from partitioner.whole_batch import batch_norms

TOLERANCE = 1e-5
"""fp32: max|g - ref| <= 1e-5 x max(max|ref|, 1e-4 x the model's largest gradient)."""
WEIGHT_STEPS = 5
"""Weights are compared after at most so many steps. Rounding grows with every step, and where it carries a ReLU's input
over zero a gradient jumps: a T5 whose float64 weights agree within 4e-14 after 8 steps is 1.2e-5 apart in fp32."""


FULL_SHARE = 0.97
"""Ranks that had a processor for less of their forwards and backwards tell of the machine, not of the plan."""


class Verification(Shown, Frozen):
    """A plan's ranks beside one device, over the same steps on the same batch. Errors are relative, see `TOLERANCE`."""

    num_steps: int
    mesh: dict[str, int]
    schedule: str
    num_microbatches: int
    loss: float
    """Of the first step, on the ranks."""
    single_loss: float
    """Of the first step, on one device over the same micro-batches."""
    last_loss: float
    loss_error: float
    gradient_error: float
    """Worst over all parameters, after the first step."""
    worst_gradient: str
    weight_error: float
    """Worst over all parameters, after the first `WEIGHT_STEPS` steps, or all where there are fewer."""
    whole_batch_error: float | None
    """Worst gradient difference from one pass over the whole batch; None where BatchNorm trains, which differs then."""
    tolerance: float
    predicted_step_s: Seconds
    measured_step_s: Seconds
    """Median of the steps after the first."""
    measured_spread_s: Seconds
    """Half of the range of those steps."""
    predicted_bubble: float
    measured_bubble: float
    single_step_s: Seconds
    """One device: the faster of the plan's micro-batches and the whole batch at once."""
    predicted_speedup: float
    measured_speedup: float
    predicted_efficiency: float
    measured_efficiency: float
    processor_share: float | None = None
    """Of the rank that had the least: the part of its forwards and backwards in which it had a processor; median of the
    steps after the first. None where devices compute."""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether loss, gradients and weights are one device's."""
        return max(self.loss_error, self.gradient_error, self.weight_error) <= self.tolerance

    @property
    def prediction_error(self) -> float:
        """Predicted / measured step time - 1."""
        return self.predicted_step_s / self.measured_step_s - 1

    def _processors(self) -> str:
        share = self.processor_share
        assert share is not None
        told = f"a rank had its own for {min(share, 1.0):.1%} of its forwards and backwards"
        if share >= FULL_SHARE:
            return told
        return f"{told}: below {FULL_SHARE:.0%}, other work kept them, and these times judge this machine, not the plan"

    def page(self) -> Page:
        """What a terminal shows."""
        same = "the same numbers as one device" if self.passed else "DIFFERENT NUMBERS from one device"
        numbers = Facts(
            (
                (
                    "loss",
                    f"{self.loss:.6f} on the ranks, {self.single_loss:.6f} on one device; then {self.last_loss:.6f}",
                ),
                ("worst gradient", f"{self.gradient_error:.1e} ({self.worst_gradient}), allowed {self.tolerance:.0e}"),
                ("worst weight", f"{self.weight_error:.1e} after {min(self.num_steps, WEIGHT_STEPS)} steps"),
                (
                    "whole batch",
                    "not comparable: BatchNorm trains on each micro-batch"
                    if self.whole_batch_error is None
                    else f"worst gradient {self.whole_batch_error:.1e} from one pass over the whole batch",
                ),
                (
                    "step",
                    f"predicted {self.predicted_step_s * 1e3:.1f} ms, measured {self.measured_step_s * 1e3:.1f} ms "
                    f"+- {self.measured_spread_s * 1e3:.1f} ms: prediction {self.prediction_error:+.1%}",
                ),
                ("bubble", f"predicted {self.predicted_bubble:.1%}, measured {self.measured_bubble:.1%}"),
                (
                    "speedup",
                    f"predicted {self.predicted_speedup:.2f}, measured {self.measured_speedup:.2f} x one device "
                    f"({self.single_step_s * 1e3:.1f} ms)",
                ),
                ("efficiency", f"predicted {self.predicted_efficiency:.1%}, measured {self.measured_efficiency:.1%}"),
                *((("processors", self._processors()),) if self.processor_share is not None else ()),
            )
        )
        title = (
            f"Verified: {same}"
            f" (pp {self.mesh['pp']} x dp {self.mesh['dp']}, {self.schedule}, "
            f"{counted(self.num_microbatches, 'micro-batch', 'micro-batches')})"
        )
        return Page(title, (numbers, *((Prose("note", self.notes),) if self.notes else ())))


def verify(
    plan: Plan,
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: LossFunction | None = None,
    example_target: Any = None,
    loss_weight: LossWeight | None = None,
    steps: int = 5,
    learning_rate: float = 0.01,
    seed: int = 0,
    progress: bool | Progress | None = None,
) -> Verification:
    """Run `steps` steps of SGD on the plan's ranks and on one device, and compare; the model is left as it was.

    `example_inputs`: one batch of the plan's batch size (a smaller one is repeated to that size). A model that draws
    random numbers is compared in eval mode, which the result says. The ranks are processes of this machine.
    `progress`: as for `partition`.
    """
    expect("plan", plan, Plan, "a Plan: partitioner.load(path) reads one")
    expect("steps", steps, int, "a number of steps")
    if steps < 2:
        raise ArgumentError(f"steps={steps}: verify needs 2 or more, the first one warms up")
    if plan.training.objective != "train":
        raise ArgumentError(
            f"this plan is for inference (objective={plan.training.objective!r}), and verify compares training steps: "
            "plan with objective='train', or compare what stage.eval_step(inputs) returns with the model's output"
        )
    model = unwrap(model)
    if plan.profile.fingerprint and plan.profile.fingerprint != (found := fingerprint(model)):
        raise PlanMismatchError(
            f"the plan was made for another model: fingerprint {plan.profile.fingerprint} ({plan.profile.model}) in "
            f"the plan, {found} ({type(model).__name__}) here; make the plan again for this model"
        )
    args, kwargs = as_call(example_inputs)
    cutter = Cutter(plan.training.batch_dim, whole=plan.training.whole)
    args, kwargs, target = _of_size(args, kwargs, example_target, plan, cutter)
    loss = Loss(model, loss_fn, loss_weight, plan.training.loss_rule)
    notes: list[str] = []
    with shown(progress) as tell, as_it_was(model):
        tell("starting the ranks", 0.0)
        whole = MicroBatch(args, kwargs, target, plan.training.batch_size)
        inputs = as_given(whole, example_inputs)
        with explained(model, [whole], loss_fn, plan.training.batch_dim):
            random = _is_random(model, whole, loss)
        if random:
            model.eval()
            notes.append("the model draws random numbers in training (dropout), so both sides ran in eval mode")
        ranks = launch(on_rank, plan, plan, model, inputs, target, loss_fn, loss_weight, steps, learning_rate, seed)
        tell("running one device", _share_of_ranks(plan, steps))
        single = on_one_device(plan, model, inputs, target, loss, cutter, steps, learning_rate)
    return compared(plan, ranks, single, steps, tuple(notes))


START_S = 8.0
"""What starting rank processes takes, about: they import torch."""


def _share_of_ranks(plan: Plan, steps: int) -> float:
    """The part of the whole time that the ranks' steps take, as predicted; one device runs three steps more."""
    ranks_s = START_S + steps * (plan.prediction.step_s + plan.prediction.optimizer_s)
    return ranks_s / (ranks_s + (steps + 3) * plan.prediction.single_device_s)


def _of_size(
    args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, plan: Plan, cutter: Cutter
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The batch with exactly the plan's number of samples."""
    given, wanted = cutter.batch_size(args, kwargs), plan.training.batch_size
    if given == wanted:
        return args, kwargs, target
    index = torch.arange(wanted) % given

    def resized(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        if dim is None or tensor.dim() <= dim or tensor.shape[dim] != given:
            return tensor
        return tensor.index_select(dim, index.to(tensor.device))

    return cutter.changed(args, kwargs, target, resized)


@contextlib.contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Give back what steps of training change."""
    modes = [(module, module.training) for module in model.modules()]
    weights = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    with untouched(model):
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, before in weights:
                    parameter.copy_(before)
            for module, mode in modes:
                module.training = mode


def _is_random(model: nn.Module, batch: MicroBatch, loss: Loss) -> bool:
    with torch.no_grad():
        values = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            args, kwargs = in_own_containers((batch.args, batch.kwargs))
            values.append(float(loss.of(model(*args, **kwargs), batch.target)))
    return abs(values[0] - values[1]) > 1e-6 * abs(values[0])


def on_rank(
    plan: Plan,
    model: nn.Module,
    inputs: Any,
    target: Any,
    loss_fn: LossFunction | None,
    loss_weight: LossWeight | None,
    steps: int,
    learning_rate: float,
    seed: int,
) -> dict[str, Any]:
    torch.manual_seed(seed)
    with materialize(plan, model, loss_fn=loss_fn, loss_weight=loss_weight) as stage:
        optimizer = torch.optim.SGD(stage.parameters(), learning_rate)
        cutter = Cutter(plan.training.batch_dim, whole=plan.training.whole)
        part = cutter.cut(*as_call(inputs), target, stage.dp_size)[stage.dp_rank]
        inputs = as_given(part, inputs)
        losses, gradients, weights, step_s, bubbles, shares = [], {}, {}, [], [], []
        for step in range(steps):
            losses.append(float(stage.train_step(inputs, part.target)))
            if step == 0:
                gradients = {n: _dense(p.grad) for n, p in stage.named_parameters() if p.grad is not None}
            timeline = stage.timeline()
            step_s.append(timeline.step_s)
            bubbles.append(timeline.bubble_fraction)
            shares.append(stage.processor_share())
            optimizer.step()
            optimizer.zero_grad()
            if step == min(steps, WEIGHT_STEPS) - 1:
                weights = {name: parameter.detach().cpu().clone() for name, parameter in stage.named_parameters()}
    return {
        "losses": losses,
        "gradients": gradients,
        "weights": weights,
        "step_s": step_s,
        "bubbles": bubbles,
        "shares": shares,
    }


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach().cpu().clone()


def on_one_device(
    plan: Plan,
    model: nn.Module,
    inputs: Any,
    target: Any,
    loss: Loss,
    cutter: Cutter,
    steps: int,
    learning_rate: float,
) -> dict[str, Any]:
    """The same steps over the same micro-batches, and one pass over the whole batch."""
    args, kwargs = as_call(inputs)
    shards = [
        cutter.cut(shard.args, shard.kwargs, shard.target, plan.num_microbatches)
        for shard in cutter.cut(args, kwargs, target, plan.num_replicas)
    ]
    whole = [[MicroBatch(args, kwargs, target, plan.training.batch_size)]]
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trainable.values(), learning_rate)
    threads = torch.get_num_threads()
    torch.set_num_threads(plan.profile.num_threads)
    try:
        optimizer.zero_grad()
        whole_s = []
        for _ in range(3):
            optimizer.zero_grad()
            whole_s.append(_timed_step(model, whole, inputs, loss)[1])
        at_once = {name: _dense(p.grad) for name, p in trainable.items() if p.grad is not None}
        losses, gradients, weights, step_s = [], {}, {}, []
        for step in range(steps):
            optimizer.zero_grad()
            value, seconds = _timed_step(model, shards, inputs, loss)
            losses.append(value)
            step_s.append(seconds)
            if step == 0:
                gradients = {name: _dense(p.grad) for name, p in trainable.items() if p.grad is not None}
            optimizer.step()
            if step == min(steps, WEIGHT_STEPS) - 1:
                weights = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    finally:
        torch.set_num_threads(threads)
    return {
        "losses": losses,
        "gradients": gradients,
        "whole": None if batch_norms(model) else at_once,
        "weights": weights,
        "step_s": min(statistics.median(step_s[1:]), statistics.median(whole_s[1:])),
    }


def _timed_step(model: nn.Module, shards: list[list[MicroBatch]], inputs: Any, loss: Loss) -> tuple[float, float]:
    """Loss, and seconds of forward and backward. Gradients are summed within a replica's shard, then over shards.

    So do the ranks; in another order rounding differs, and where few samples meet in a BatchNorm that grows fast.
    """
    parts = [part for shard in shards for part in shard]
    weights = loss.weights(parts, [as_given(part, inputs) for part in parts])
    shares = iter(loss.shares(parts, weights)[1])
    sums: dict[nn.Parameter, torch.Tensor] = {}
    value = seconds = 0.0
    for shard in shards:
        start = time.perf_counter()
        for part in shard:
            args, kwargs = in_own_containers((part.args, part.kwargs))
            with loss.watching():
                scaled = loss.part(model(*args, **kwargs), part.target, next(shares))
            if not scaled.requires_grad:
                continue  # nothing in it counts
            scaled.backward()  # type: ignore[no-untyped-call]
            value += float(scaled.detach())
        seconds += time.perf_counter() - start
        if len(shards) > 1:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    sums[parameter] = sums[parameter] + parameter.grad if parameter in sums else parameter.grad
                    parameter.grad = None
    for parameter, gradient in sums.items():
        parameter.grad = gradient
    return value, seconds


def compared(
    plan: Plan, ranks: list[dict[str, Any]], single: dict[str, Any], steps: int, notes: tuple[str, ...]
) -> Verification:
    gradients, weights = _joined(ranks, "gradients"), _joined(ranks, "weights")
    gradient_error, worst = worst_difference(single["gradients"], gradients)
    weight_error, _ = worst_difference(single["weights"], weights)
    whole_error = None if single["whole"] is None else worst_difference(single["whole"], gradients)[0]
    losses = ranks[0]["losses"]
    loss_error = max(
        abs(a - b) / max(abs(b), 1e-30) for rank in ranks for a, b in zip(rank["losses"], single["losses"], strict=True)
    )
    times = ranks[0]["step_s"][1:]
    measured = statistics.median(times)
    speedup = single["step_s"] / measured
    prediction = plan.prediction
    return Verification(
        num_steps=steps,
        mesh=plan.mesh,
        schedule=plan.schedule,
        num_microbatches=plan.num_microbatches,
        loss=losses[0],
        single_loss=single["losses"][0],
        last_loss=losses[-1],
        loss_error=loss_error,
        gradient_error=gradient_error,
        worst_gradient=worst,
        weight_error=weight_error,
        whole_batch_error=whole_error,
        tolerance=TOLERANCE,
        predicted_step_s=prediction.step_s,
        measured_step_s=measured,
        measured_spread_s=(max(times) - min(times)) / 2,
        predicted_bubble=prediction.bubble_fraction,
        measured_bubble=statistics.median(ranks[0]["bubbles"][1:]),
        single_step_s=single["step_s"],
        predicted_speedup=prediction.speedup,
        measured_speedup=speedup,
        predicted_efficiency=prediction.efficiency,
        measured_efficiency=speedup / plan.num_ranks,
        processor_share=_least_share(ranks),
        notes=notes,
    )


def _least_share(ranks: list[dict[str, Any]]) -> float | None:
    """Of each rank the median of its steps after the first; of these the least."""
    of_ranks = [[share for share in rank.get("shares", [])[1:] if share is not None] for rank in ranks]
    return min((statistics.median(shares) for shares in of_ranks if shares), default=None)


def _joined(ranks: list[dict[str, Any]], what: str) -> dict[str, torch.Tensor]:
    """One table of all ranks'. A tensor that several ranks hold must be the same bits on all of them."""
    found: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, tensor in rank[what].items():
            if name in found and not torch.equal(found[name], tensor):
                found[name] = torch.full_like(tensor, float("nan"))
            found.setdefault(name, tensor)
    return found
