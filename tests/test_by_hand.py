"""Norms of gradients taken by hand around a step: told from the code, warned of where a rank has a part of them."""

from __future__ import annotations

import gc
import math
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Case
from plans import plan_for
from rank_pool import RankPool
from torch import nn

from partitioner.executor import materialize
from partitioner.executor.by_hand import codes_around, reads_records, takes_gradients


def step() -> list[str]:
    """What stands for a training step: the names of the functions found."""
    return [code.co_name for code in codes_around(sys._getframe(1)) if takes_gradients(code)]


def in_the_loop(model: nn.Module) -> list[str]:
    found = step()
    total = 0.0
    for parameter in model.parameters():
        if parameter.grad is not None:
            total += float(parameter.grad.detach().norm(2)) ** 2
    return found if total >= 0 else []


def in_a_comprehension(model: nn.Module) -> list[str]:
    found = step()
    torch.norm(
        torch.stack([torch.norm(p.grad, 2) for p in model.parameters() if p.grad is not None] or [torch.ones(1)])
    )
    return found


def norm_of_gradients(model: nn.Module) -> float:
    return math.sqrt(sum(float(p.grad.norm()) ** 2 for p in model.parameters() if p.grad is not None))


def in_a_function(model: nn.Module) -> list[str]:
    found = step()
    norm_of_gradients(model)
    return found


def of_squares(model: nn.Module) -> list[str]:
    found = step()
    math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None))
    return found


def of_the_largest(model: nn.Module) -> list[str]:
    found = step()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.abs().max()
    return found


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def fit(self) -> list[str]:
        found = step()
        self.is_finite()
        return found

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(p.grad).all()) for p in self.model.parameters() if p.grad is not None)


def in_a_method(model: nn.Module) -> list[str]:
    return Trainer(model).fit()


def in_an_inner_function(model: nn.Module) -> list[str]:
    def inner() -> float:
        return sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)

    def once() -> list[str]:
        found = step()
        inner()
        return found

    return once()


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (in_the_loop, "in_the_loop"),
        (in_a_comprehension, "in_a_comprehension"),
        (in_a_function, "norm_of_gradients"),
        (of_squares, "of_squares"),
        (of_the_largest, "of_the_largest"),
        (in_a_method, "is_finite"),
        (in_an_inner_function, "inner"),
    ],
)
def test_norms_by_hand_are_found(loop: Callable[[nn.Module], list[str]], name: str) -> None:
    assert loop(nn.Linear(2, 2)) == [name]


def agrees(model: nn.Module) -> list[str]:
    found = step()
    if dist.is_initialized():
        dist.all_reduce(torch.stack([p.grad.norm() ** 2 for p in model.parameters() if p.grad is not None]).sum())
    return found


def clears(model: nn.Module) -> list[str]:
    found = step()
    for parameter in model.parameters():
        parameter.grad = None
    torch.ones(2).norm()
    return found


def keeps_to_each(model: nn.Module) -> list[str]:
    found = step()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.clamp_(-1, 1)
    return found


class Normalised(nn.Module):
    """Whose layer is called `norm`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x)


def has_such_a_layer(model: nn.Module) -> list[str]:
    found = step()
    Normalised()(torch.ones(1, 2)).sum().backward()
    return found


@pytest.mark.parametrize("loop", [agrees, clears, keeps_to_each, has_such_a_layer])
def test_what_is_right_on_each_rank_is_none(loop: Callable[[nn.Module], list[str]]) -> None:
    assert loop(nn.Linear(2, 2)) == []


def test_nothing_of_the_caller_is_kept() -> None:
    def loop() -> weakref.ref[torch.Tensor]:
        batch = torch.ones(2)
        step()
        kept = weakref.ref(batch)
        del batch
        gc.collect()
        assert kept() is None
        return kept

    loop()


def trained(plan: Any, case: Case) -> list[str]:
    with warnings.catch_warnings(record=True) as told, materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
        warnings.simplefilter("always")
        for _ in range(2):
            stage.train_step(case.args, case.target)
            norm_of_gradients(stage.module)
    return [str(one.message) for one in told if "by hand" in str(one.message)]


@pytest.mark.parametrize(("pp", "dp", "expected"), [(2, 1, 1), (1, 2, 0)])
def test_a_step_warns_once_where_ranks_have_parts(ranks: RankPool, pp: int, dp: int, expected: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made = Case(model, (torch.randn(8, 4),), target=torch.randn(8, 4), loss_fn=nn.MSELoss())
    plan = plan_for(made, pp=pp, dp=dp, cuts=["1"] if pp == 2 else [])
    for told in ranks.run(2, trained, plan, made):
        assert [text.split()[0] for text in told] == ["norm_of_gradients"] * expected


class Recording(nn.Linear):
    """A layer that writes into a list of all."""

    def __init__(self, seen: list[float]) -> None:
        super().__init__(4, 4)
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.seen.append(float(x.detach().mean()))
        return x


class Recorded(nn.Sequential):
    def average(self) -> float:
        return sum(self[0].seen) / len(self[0].seen)  # type: ignore[arg-type]

    def forget(self) -> None:
        self[0].seen.clear()  # type: ignore[operator]


def told_of_records(plan: Any, case: Case) -> list[str]:
    with warnings.catch_warnings(record=True) as told, materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
        warnings.simplefilter("always")
        model: Any = stage.module
        for _ in range(2):
            stage.train_step(case.args, case.target)
            model.average()
            model.forget()
    return [str(one.message) for one in told if one.category is UserWarning]


def told_of_forgetting(plan: Any, case: Case) -> list[str]:
    with warnings.catch_warnings(record=True) as told, materialize(plan, case.model, loss_fn=case.loss_fn) as stage:
        warnings.simplefilter("always")
        model: Any = stage.module
        stage.train_step(case.args, case.target)
        model.forget()
    return [str(one.message) for one in told if one.category is UserWarning]


def test_a_step_warns_where_the_loop_reads_what_ranks_have_parts_of(ranks: RankPool) -> None:
    torch.manual_seed(0)
    seen: list[float] = []
    model = Recorded(*(Recording(seen) for _ in range(3)))
    made = Case(model, (torch.randn(8, 4),), target=torch.randn(8, 4), loss_fn=nn.MSELoss())
    plan = plan_for(made, pp=2, dp=1, cuts=["1"])
    for told in ranks.run(2, told_of_records, plan, made):
        assert [text.split()[0] for text in told] == ["average"] and "'0.seen'" in told[0]
    assert ranks.run(2, told_of_forgetting, plan, made) == [[], []]


def test_records_that_a_loop_reads() -> None:
    def loop(model: Any) -> list[str]:
        found = [code for code in codes_around(sys._getframe()) if reads_records(code, {"seen"})]
        return [code.co_name for code in found] + ([str(model.seen)] if model is None else [])

    assert loop(Recorded()) == ["loop"]


def test_records_that_a_loop_only_sets_or_empties() -> None:
    def setting(model: Any) -> list[str]:
        found = [code for code in codes_around(sys._getframe()) if reads_records(code, {"seen"})]
        model.seen = []
        model.forget()
        return [code.co_name for code in found]

    assert setting(Recorded(Recording([]))) == []
