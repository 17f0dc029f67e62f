"""Stand-ins look like tensors, hold nothing, and become real in place."""

from __future__ import annotations

import pytest
import torch

from partitioner.errors import UnsupportedModelError
from partitioner.logbook import Made
from partitioner.standins import StandIn, exchange


def stand_in(tensor: torch.Tensor) -> StandIn:
    return StandIn.like(tensor, "h.3:0", None)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3, requires_grad=True),
        torch.zeros(3, 2).t(),
        torch.zeros((), dtype=torch.int32),
        torch.zeros(0, 4, dtype=torch.bfloat16),
        torch.zeros(1, 3).expand(5, 3),
        torch.zeros(2, dtype=torch.cfloat),
    ],
)
def test_a_stand_in_is_like_its_tensor(tensor: torch.Tensor) -> None:
    found = stand_in(tensor)
    assert isinstance(found, torch.Tensor)
    assert Made.of(found) == Made.of(tensor)
    assert found.dim() == tensor.dim()
    assert found.device == tensor.device


def test_computing_with_one_is_an_error_that_names_it() -> None:
    found = stand_in(torch.zeros(1))
    for compute in (
        lambda: found + 1,
        lambda: found.item(),
        lambda: torch.cat([torch.ones(2), found]),
        lambda: bool(found),
    ):
        with pytest.raises(UnsupportedModelError, match=r"h\.3:0"):
            compute()


def test_after_an_exchange_every_reference_finds_the_other_values() -> None:
    found, value = stand_in(torch.zeros(2, 2)), torch.ones(2, 2, requires_grad=True) * 3
    kept = {"x": [found]}
    exchange(found, value)
    assert type(kept["x"][0]) is torch.Tensor
    assert torch.equal(kept["x"][0], torch.full((2, 2), 3.0))
    assert kept["x"][0].grad_fn is not None
    assert isinstance(value, StandIn)
    assert value.label == "h.3:0"
    assert not hasattr(found, "label")


def test_the_base_of_a_view_can_be_exchanged() -> None:
    base = torch.zeros(4)
    view = base[:2]
    exchange(base, torch.ones(4))
    assert torch.equal(base, torch.ones(4))
    assert torch.equal(view, torch.zeros(2)), "left behind: whoever exchanges knows the views"
