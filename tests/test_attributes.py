"""What a forward reads and changes on its modules in plain Python, seen without changing what it does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from partitioner.attributes import Attribute, Attributes


class Options:
    def __init__(self) -> None:
        self.rate, self.names = 0.1, ["a"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.count, self.log, self.table, self.seen = 0, [1], {"k": [1]}, {1}
        self.options = Options()
        self.generator, self.dice, self.numbers = torch.Generator(), random.Random(1), np.random.default_rng(1)
        self.turns = itertools.cycle([1, 2])
        self.register_buffer("mean", torch.zeros(2))


def changed(do: Callable[[Model], Any]) -> dict[str, Attribute]:
    model, clock = Model(), iter(range(1000))
    attributes = Attributes(model, lambda: (next(clock), 0))
    with attributes.watched():
        do(model)
    return {attribute.name: attribute for attribute in attributes.changed()}


@pytest.mark.parametrize(
    ("do", "name"),
    [
        (lambda m: setattr(m, "count", m.count + 1), "count"),
        (lambda m: setattr(m, "count", 0), "count"),  # the same value: another time it may differ
        (lambda m: m.log.append(2), "log"),
        (lambda m: m.table.update(x=1), "table"),
        (lambda m: m.table["k"].append(2), "table"),
        (lambda m: m.seen.add(2), "seen"),
        (lambda m: setattr(m.options, "rate", 0.2), "options.rate"),
        (lambda m: m.options.names.append("b"), "options.names"),
        (lambda m: torch.rand(1, generator=m.generator), "generator"),
        (lambda m: m.dice.random(), "dice"),
        (lambda m: m.numbers.random(), "numbers"),
        (lambda m: next(m.turns), "turns"),
        (lambda m: setattr(m, "mean", m.mean + 1), "mean"),
        (lambda m: setattr(m, "new", 1), "new"),
        (lambda m: setattr(m.layer, "note", 1), "layer.note"),
    ],
)
def test_every_kind_of_change_is_seen_under_its_name(do: Callable[[Model], Any], name: str) -> None:
    assert list(changed(do)) == [name]


@pytest.mark.parametrize(
    "do",
    [
        lambda m: (m.count, m.log, m.options.rate, m.layer.weight, m.mean),
        lambda m: m.layer(torch.ones(1, 2)),
        lambda m: setattr(m, "other", nn.Linear(1, 1)),
        lambda m: m.eval(),
    ],
)
def test_reading_and_running_changes_nothing(do: Callable[[Model], Any]) -> None:
    assert changed(do) == {}


def test_places_of_reads_and_changes_are_told_apart() -> None:
    def do(model: Model) -> None:
        assert model.count == 0  # at 0
        model.count = 1  # at 1
        assert model.count == 1  # at 2

    count = changed(do)["count"]
    assert [when for when, _ in count.reads] == [0, 2]
    assert [when for when, _ in count.writes] == [1]


def test_classes_are_as_before_also_when_an_error_passes() -> None:
    model = Model()
    with pytest.raises(KeyError), Attributes(model, lambda: (0, 0)).watched():
        raise KeyError(model.options.rate)
    assert "__getattribute__" not in vars(nn.Module)
    assert "__getattribute__" not in vars(Options)
    assert "__setattr__" not in vars(Options)
    model.count = model.options.rate
