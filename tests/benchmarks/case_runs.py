"""Training runs of a case: each rank runs the snippet itself, as a training script would, and takes its stage of it."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from casebook import Case, Finding, Ranks, run_snippet, same, true

import partitioner as pt


class Ask(NamedTuple):
    """A training run in this package's words."""

    inputs: Any
    target: Any = None
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    loss_weight: Any = None
    steps: int = 1
    learning_rate: float = 0.1
    afterwards: Any = None
    """Inputs of an `eval_step` after the last step."""


class Trained(NamedTuple):
    """What one rank saw."""

    stage: int
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    """After the first step."""
    weights: dict[str, torch.Tensor]
    output: Any
    """Of the first step, on the last stage."""
    evaluated: Any
    reduced: list[float]
    """How often each step reduced its gradients over replicas: elements sent through all-reduce / own elements."""


Asking = Callable[[dict[str, Any]], Ask]


def plan_for(case: Case, ask: Asking, *, pp: int, dp: int = 1, **more: Any) -> pt.Plan:
    one = ask(case.space)
    common: dict[str, Any] = {"loss_fn": one.loss_fn, "loss_weight": one.loss_weight, "example_target": one.target}
    return pt.partition(case.model, one.inputs, gpus=pp * dp, mesh={"pp": pp, "dp": dp}, **common, **more)


def train(ranks: Ranks, case: Case, plan: pt.Plan, ask: Asking) -> list[Trained]:
    return [Trained(*seen) for seen in ranks.run(plan.num_ranks, _train_here, case.snippet, plan, ask)]


def _train_here(snippet: str, plan: pt.Plan, ask: Asking) -> tuple[Any, ...]:
    space = training_script(snippet)
    one = ask(space)
    losses, gradients, output, reduced = [], {}, None, []
    with pt.materialize(plan, space["model"], loss_fn=one.loss_fn, loss_weight=one.loss_weight) as stage:
        optimizer = torch.optim.SGD(stage.parameters(), one.learning_rate)
        own = sum(parameter.numel() for name, parameter in stage.named_parameters() if parameter.requires_grad)
        inputs, target = (_shard(value, stage.dp_rank, stage.dp_size) for value in (one.inputs, one.target))
        for step in range(one.steps):
            optimizer.zero_grad()
            with _counted_all_reduce() as elements:
                losses.append(float(stage.train_step(inputs, target)))
            reduced.append(sum(elements) // own if own else 0)
            if step == 0:
                grads = [(name, parameter.grad) for name, parameter in stage.named_parameters()]
                gradients = {name: gradient.clone() for name, gradient in grads if gradient is not None}
                output = stage.last_output
            optimizer.step()
        evaluated = None if one.afterwards is None else stage.eval_step(one.afterwards)
        weights = {name: parameter.detach().clone() for name, parameter in stage.named_parameters()}
        return stage.stage, losses, gradients, weights, output, evaluated, reduced


def training_script(snippet: str) -> dict[str, Any]:
    """What the snippet defines, without the optimizer with which it computed its own right values."""
    space = run_snippet(snippet)
    space.pop("opt", None)
    return space


def _shard(value: Any, index: int, count: int) -> Any:
    if count == 1 or value is None:
        return value
    if isinstance(value, tuple):
        return tuple(_shard(item, index, count) for item in value)
    return value.chunk(count)[index]


class _counted_all_reduce(list[int]):
    """Number of elements of every floating-point all-reduce begun inside."""

    def __enter__(self) -> list[int]:
        import torch.distributed as dist

        self._plain = dist.all_reduce

        @functools.wraps(self._plain)
        def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_floating_point():
                self.append(tensor.numel())
            return self._plain(tensor, *args, **kwargs)

        dist.all_reduce = counting
        return self

    def __exit__(self, *_: object) -> None:
        import torch.distributed as dist

        dist.all_reduce = self._plain


def on_one_device(case: Case, ask: Asking) -> dict[str, torch.Tensor]:
    """Gradients of the whole batch through the whole model, plain torch."""
    one = ask(case.space)
    model = copy.deepcopy(case.model)
    model.zero_grad()
    output = model(**one.inputs) if isinstance(one.inputs, dict) else model(*one.inputs)
    loss = output.loss if one.loss_fn is None else one.loss_fn(output, one.target)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def joined(seen: list[Trained], what: str) -> dict[str, torch.Tensor]:
    """One table of all ranks'; a tensor that several ranks hold is NaN unless they hold the same bits."""
    table: dict[str, torch.Tensor] = {}
    for one in seen:
        for name, tensor in getattr(one, what).items():
            if name in table and not torch.equal(table[name], tensor):
                table[name] = torch.full_like(tensor, math.nan)
            table.setdefault(name, tensor)
    table.pop("(inert)", None)
    return table


def gradients_agree(seen: list[Trained], right: dict[str, torch.Tensor]) -> Finding:
    """max|g - right| <= 1e-5 x max(max|right|, 1e-4 x the model's largest gradient), for every parameter."""
    found = joined(seen, "gradients")
    largest = max(float(gradient.abs().max()) for gradient in right.values())
    wrong = {
        name: float((found.get(name, torch.tensor(math.nan)) - gradient).abs().max())
        for name, gradient in right.items()
        if not float((found.get(name, torch.tensor(math.nan)) - gradient).abs().max())
        <= 1e-5 * max(float(gradient.abs().max()), 1e-4 * largest)
    }
    return same("gradients that are not one device's, the first of them", dict(list(wrong.items())[:3]), {})


def copies_are_equal(seen: list[Trained], name: str, owners: int) -> Iterator[Finding]:
    held = [one.weights[name] for one in seen if name in one.weights]
    yield same(f"ranks that hold {name}", len(held), owners)
    yield true(f"copies of {name} are the same bits", all(torch.equal(one, held[0]) for one in held))


def squared(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output.pow(2).mean()


def summed(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output.sum()
