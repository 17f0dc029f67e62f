"""A loss that adds up terms: what each of them is, and their sum with a share for each.

    loss = c1 * t1 + c2 * t2 + ... + constant        the c are numbers that no gradient flows into

The terms are found in the loss's graph, down from it through what adds, subtracts and scales single numbers. Their
values are not in the graph: `Seen` keeps, while it is entered, the single numbers that functions were given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode

Place = tuple[Node, int]
"""Where a number comes from: the graph's node, and which of its outputs."""

ADDING = frozenset({"AddBackward0", "SubBackward0"})
SCALING = frozenset({"MulBackward0", "DivBackward0"})
"""Linear where all factors but one are numbers without a gradient."""
KEEPING = frozenset(
    {"NegBackward0", "CloneBackward0", "AliasBackward0", "ToCopyBackward0", "ViewBackward0", "UnsafeViewBackward0"}
    | {"ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0"}
    | {"SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1"}
)
"""Linear in the single numbers that they are given."""
PACKING = frozenset({"StackBackward0", "CatBackward0"})
"""What puts single numbers together, to be summed."""


class Seen(TorchFunctionMode):
    """While entered: the single numbers with a gradient that torch's functions were given, by where they come from."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[Place, torch.Tensor] = {}
        """Copies with a graph: a number may be written into later (`loss += other`)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for one in args:
            if type(one) is torch.Tensor:
                self._keep(one)
            elif type(one) is list or type(one) is tuple:
                for inner in one:
                    if type(inner) is torch.Tensor:
                        self._keep(inner)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _keep(self, one: torch.Tensor) -> None:
        if one.dim() < 2 and one.requires_grad and one.numel() == 1 and one.grad_fn and torch.is_grad_enabled():
            place = one.grad_fn, one.output_nr
            if place not in self.numbers:
                self.numbers[place] = one.clone().reshape(())


@dataclass(frozen=True)
class Terms:
    """A loss taken apart."""

    values: tuple[torch.Tensor, ...]
    """The terms with their factors, 0-d, each with its graph, in the order of the graph."""
    constant: torch.Tensor
    """What is left of the loss: what has no gradient. NaN where a term is."""

    def shared(self, shares: Sequence[float], rest: float) -> torch.Tensor:
        """The sum of the terms times their shares, and of the constant times `rest`.

        A term with a share of 0 is left out, as a mean over nothing is NaN; a share of NaN makes the sum NaN, and
        leaves the term out of its gradient.
        """
        total = torch.nan_to_num(self.constant, nan=0.0, posinf=0.0, neginf=0.0) * rest
        for value, share in zip(self.values, shares, strict=True):
            if math.isnan(share):
                total = total + share
            elif share:
                total = total + value * share
        return total


def taken_apart(loss: torch.Tensor, seen: Seen) -> Terms:
    """The terms of a loss, 0-d, that was made while `seen` was entered; itself where it adds up nothing."""
    places = None if loss.grad_fn is None else _added(loss.grad_fn, loss.output_nr, seen.numbers)
    if not places:
        zero = torch.zeros_like(loss.detach())
        return Terms((loss,), zero) if loss.requires_grad else Terms((), loss)
    edges = [_variable(node) if _is_leaf(node) else GradientEdge(node, number) for node, number in places]
    factors = torch.autograd.grad(loss, edges, retain_graph=True)  # type: ignore[arg-type]
    numbers = [_variable(place[0]).reshape(()) if _is_leaf(place[0]) else seen.numbers[place] for place in places]
    values = tuple(
        number.to(loss.dtype) * factor.detach().reshape(()).to(loss.dtype)
        for number, factor in zip(numbers, factors, strict=True)
    )
    return Terms(values, loss.detach() - sum(value.detach() for value in values))


def _added(node: Node, number: int, known: dict[Place, torch.Tensor]) -> list[Place] | None:
    """What is added up to a number, at last itself; None where that is a number that was not seen."""
    mine = [(node, number)] if (node, number) in known or _is_leaf(node) else None
    name = node.name()
    following = [(one, k) for one, k in node.next_functions if one is not None]
    is_linear = name in ADDING or name in KEEPING or name in PACKING or (name in SCALING and len(following) == 1)
    if not following or not is_linear or (name == "DivBackward0" and node.next_functions[0][0] is None):
        return mine
    parts: dict[Place, None] = {}
    for one, k in following:
        is_packed = one.name() in PACKING and name in KEEPING
        if not (is_packed or _is_single(one, k)):
            return mine
        inner = _added(one, k, known)
        if inner is None:
            return mine
        parts.update(dict.fromkeys(inner))
    return list(parts)


def _is_single(node: Node, number: int) -> bool:
    if _is_leaf(node):
        return _variable(node).numel() == 1
    shape: Sequence[int] = node._input_metadata[number].shape
    return math.prod(shape) == 1


def _is_leaf(node: Node) -> bool:
    return hasattr(node, "variable")


def _variable(node: Node) -> torch.Tensor:
    found: torch.Tensor = node.variable  # type: ignore[attr-defined]
    return found
