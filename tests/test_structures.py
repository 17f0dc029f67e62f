"""Tensors in nested values: every container is found, taken apart and put together as it was."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from partitioner.structures import is_same, map_tensors, opened, opened_record, tensors_in


@dataclass
class Plain:
    x: Any
    rest: list = field(default_factory=list)

    def __post_init__(self) -> None:
        self.made_afterwards = True


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    n: int = 1


class Pair(NamedTuple):
    left: Any
    right: Any


Old = namedtuple("Old", "a b")


class Keeps(dict):
    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("rebuilding must not run user code")


class Record:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


a, b = torch.zeros(2), torch.ones(3)
packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.zeros(2)])


@pytest.mark.parametrize(
    "value",
    [
        (a, [b, None]),
        {"k": a, 3: (b, "s")},
        OrderedDict(z=a, y=b),
        Plain(a, [b]),
        Slotted(a),
        Pair(a, {"deep": [b]}),
        Old(a, b),
        deque([a, b], maxlen=4),
        SimpleNamespace(x=a, y=[b]),
        slice(a, None, 2),
        Keeps(x=a),
        torch.max(torch.ones(2, 2), dim=0),
        packed,
        defaultdict(list, x=[a]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_container_is_rebuilt_around_new_tensors(value: Any) -> None:
    new = map_tensors(value, lambda tensor: tensor + 1)
    assert type(new) is type(value)
    assert len(tensors_in(value)) == len(tensors_in(new)) > 0
    assert all(torch.equal(x + 1, y) for x, y in zip(tensors_in(value), tensors_in(new), strict=True))
    assert opened(new).keys == opened(value).keys
    assert new is not value


def test_hugging_face_outputs_keep_items_and_attributes_alike() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    new = map_tensors(BaseModelOutput(last_hidden_state=a, hidden_states=(a, b)), lambda tensor: tensor + 1)
    assert new.last_hidden_state is new["last_hidden_state"] or torch.equal(new[0], new.last_hidden_state)
    assert list(new) == ["last_hidden_state", "hidden_states"]
    assert len(new.to_tuple()) == 2


def test_what_is_no_container_stays_or_goes_through_opaque() -> None:
    marker, layer = object(), nn.Linear(1, 1)
    assert map_tensors([marker, layer, "s"], lambda t: t)[:2] == [marker, layer]
    assert map_tensors([marker, layer, "s"], lambda t: t, lambda item: "opaque") == ["opaque", layer, "s"]
    assert tensors_in([layer, marker]) == []
    assert opened(torch.Size([2])) is None


def test_plain_objects_are_records_only_where_they_hold_tensors() -> None:
    assert opened_record(Record(a)).parts == [a]
    assert opened_record(Record([{"x": a}])).keys == ("x",)
    assert opened_record(Record("none")) is None
    assert opened_record(nn.Linear(1, 1)) is None
    assert opened_record(a) is None


def test_same_means_the_same_object_or_equal_plain_values_of_one_type() -> None:
    assert is_same(a, a)
    assert is_same((1, 2)[0], 1)
    assert not is_same(1, True)
    assert not is_same(1, 1.0)
    assert not is_same([1], [1])
    assert not is_same(float("nan"), float("nan"))
