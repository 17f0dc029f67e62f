"""What a call did, as plain data: encoded on one rank, built again around the arguments of another."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from partitioner.absent import Absent
from partitioner.errors import UnsupportedModelError
from partitioner.logbook import Arguments, Decoder, Encoder, Made, is_sendable, pickled
from partitioner.structures import tensors_in


@dataclass
class Record:
    x: torch.Tensor
    rest: Any


class Holder:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def carried(result: Any, here: tuple = (), there: tuple | None = None) -> tuple[Any, list[torch.Tensor]]:
    """`result` of a call with the arguments `here`, as a rank with the arguments `there` builds it; tensors made."""
    code = pickle.loads(pickle.dumps(Encoder(Arguments(here, {}), {})(result)))
    made: list[torch.Tensor] = []

    def make(k: int, like: Made) -> torch.Tensor:
        made.append(torch.full(like.shape, float(k), dtype=getattr(torch, like.dtype)))
        return made[-1]

    return Decoder(Arguments(here if there is None else there, {}), {}, make)(code), made


def test_tensors_are_made_anew_each_different_one_once() -> None:
    a, b = torch.ones(2, 3, dtype=torch.float64), torch.ones(4, dtype=torch.int32)
    result, made = carried({"x": a, "again": [a, b], "n": 3, "none": None})
    assert [(tensor.shape, tensor.dtype) for tensor in made] == [(a.shape, a.dtype), (b.shape, b.dtype)]
    assert result["x"] is result["again"][0] is made[0]
    assert result["again"][1] is made[1]
    assert (result["n"], result["none"], list(result)) == (3, None, ["x", "again", "n", "none"])


def test_arguments_that_come_back_are_the_very_arguments() -> None:
    x, cache, notes = torch.ones(2), object(), [1]
    mine, other = (torch.zeros(2), object(), [2]), (x, cache, notes)
    result, made = carried((x, cache, notes, torch.ones(1)), other, mine)
    assert all(found is expected for found, expected in zip(result, mine, strict=False))
    assert len(made) == 1


def test_containers_of_every_class_keep_their_class_here_and_where_it_is_local() -> None:
    @dataclass
    class Local:
        x: torch.Tensor

    a = torch.ones(1)
    for value in (Record(a, (1, "s")), OrderedDict(b=a), Holder(a), Local(a), nn.utils.rnn.pack_sequence([a])):
        result, made = carried(value)
        assert type(result) is type(value)
        found = tensors_in(result) or [result.x]
        assert all(one is other for one, other in zip(found, made, strict=True))


def test_classes_that_cannot_be_told_apart_by_name_are_withheld() -> None:
    def made_anew() -> type:
        @dataclass
        class Twin:
            x: torch.Tensor

        return Twin

    first, second = made_anew(), made_anew()
    result, _ = carried(first(torch.ones(1)))
    assert isinstance(result, Absent)
    assert second is not first


def test_what_cannot_be_sent_may_be_handed_on_but_not_looked_into() -> None:
    class Cache:
        def __init__(self) -> None:
            self.layers = [Holder(torch.ones(1))]

    absent, made = carried(Cache())
    assert made == []
    assert [absent] == [absent]
    for look in (
        lambda: absent.layers,
        lambda: absent[0],
        lambda: len(absent),
        lambda: list(absent),
        lambda: not absent,
    ):
        with pytest.raises(UnsupportedModelError, match="Cache that an earlier stage made"):
            look()
    assert not hasattr(absent, "__array__")


def test_containers_that_a_call_fills_are_filled_on_the_other_rank_too() -> None:
    x, y = torch.ones(1), torch.ones(2)
    history, state = [x], {"depth": 1}
    before = Arguments((history, state, x), {})
    history.append(y)
    state["depth"] = 2
    encoder = Encoder(before, {})
    codes = [(k, encoder.container(content)) for k, content in before.refilled()]
    there_x = torch.zeros(1)
    there = ([there_x], {"depth": 1})
    decoder = Decoder(Arguments((*there, there_x), {}), {}, lambda k, made: torch.zeros(made.shape))
    for index, code in codes:
        decoder.refill(index, code)
    assert there[0][0] is there_x
    assert there[0][1].shape == (2,)
    assert there[1] == {"depth": 2}
    assert not Arguments((history, state), {}).refilled()


def test_changes_in_place_are_seen_in_arguments_but_not_in_parameters() -> None:
    x, weight = torch.ones(2), nn.Parameter(torch.ones(2))
    given = Arguments((x, [weight]), {"y": torch.ones(1)})
    with torch.no_grad():
        x.add_(1)
        weight.add_(1)
    assert given.written() == (0,)
    assert len(given.tensors) == 3


def test_only_plain_dense_tensors_can_be_sent() -> None:
    class Sub(torch.Tensor):
        pass

    dense = torch.ones(2, 2)
    assert is_sendable(dense) and is_sendable(dense.t()) and is_sendable(nn.Parameter(dense))
    assert not is_sendable(dense.as_subclass(Sub))
    assert not is_sendable(dense.to_sparse())
    assert not is_sendable(torch.nested.nested_tensor([dense, dense], layout=torch.jagged))


def test_tensors_and_modules_are_never_pickled_along() -> None:
    assert pickled({"a": (1, "x")}) is not None
    assert pickled([torch.ones(1)]) is None
    assert pickled({"m": nn.Linear(1, 1)}) is None
    assert pickled(lambda: 0) is None
