"""One look at many places sees every change that the long look at each of them sees."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from partitioner.glance import Glance, _dicts_are_numbered
from partitioner.reaching import Reach, Watched


class Kept:
    def __init__(self) -> None:
        self.number = 1.5
        self.inside = {"a": 1}


class Slotted:
    __slots__ = ("one", "two")

    def __init__(self) -> None:
        self.one, self.two = 1, "2"


class Model(nn.Module):
    """Has its state in everything that is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = 1
        self.table: dict[Any, Any] = {"a": 1, "b": 2}
        self.empty: dict[Any, Any] = {}
        self.ordered = OrderedDict(a=1, b=2)
        self.default: defaultdict[str, list[int]] = defaultdict(list, a=[1])
        self.items = [1, 2, 3]
        self.queue = deque([1, 2], maxlen=3)
        self.several = {1, 2, 3}
        self.kept, self.slotted, self.space = Kept(), Slotted(), SimpleNamespace(x=1)
        self.values = np.zeros(3)
        self.tensor = torch.zeros(3)
        self.register_buffer("buffer", torch.zeros(3))
        self.layer = nn.Linear(2, 2)


def _swap_tables(model: Model) -> None:
    model.kept.__dict__ = dict(vars(model.kept))


CHANGES: dict[str, Callable[[Model], Any]] = {
    "attribute": lambda model: setattr(model, "plain", object()),
    "new attribute": lambda model: setattr(model, "other", object()),
    "attribute gone": lambda model: delattr(model, "plain"),
    "in the table of attributes": lambda model: vars(model).update(plain=object()),
    "item": lambda model: model.table.update(a=object()),
    "new item": lambda model: model.table.setdefault(object(), 1),
    "item gone": lambda model: model.table.popitem(),
    "no items": lambda model: model.table.clear(),
    "first item": lambda model: model.empty.update(a=1),
    "item of an ordered dict": lambda model: model.ordered.update(a=object()),
    "item by default": lambda model: model.default[str(random.random())],
    "list": lambda model: model.items.append(object()),
    "list in another order": lambda model: model.items.reverse(),
    "deque": lambda model: model.queue.append(object()),
    "set": lambda model: model.several.add(object()),
    "attribute of an object": lambda model: setattr(model.kept, "number", object()),
    "dict of an object": lambda model: model.kept.inside.update(a=object()),
    "another table of attributes": _swap_tables,
    "slot": lambda model: setattr(model.slotted, "one", object()),
    "namespace": lambda model: setattr(model.space, "x", object()),
    "array": lambda model: model.values.__iadd__(1),
    "tensor": lambda model: model.tensor.add_(1),
    "buffer": lambda model: model.buffer.add_(1),
    "another buffer": lambda model: setattr(model, "buffer", torch.ones(3)),
}


def seen(model: Model) -> list[Watched]:
    return [Watched(place) for place in Reach(model, lambda path: 3).places.values()]


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_and_stays_seen(change: str, numbered: bool) -> None:
    if numbered and not _dicts_are_numbered():
        pytest.skip("dicts have no numbers here")
    model = Model()
    places = seen(model)
    glance = Glance(places, numbered=numbered)
    assert glance.is_still()
    assert glance.is_still()
    CHANGES[change](model)
    assert not glance.is_still()
    assert not glance.is_still()


@pytest.mark.parametrize("numbered", [True, False])
def test_what_is_put_back_is_still_and_later_changes_are_seen(numbered: bool) -> None:
    if numbered and not _dicts_are_numbered():
        pytest.skip("dicts have no numbers here")
    model = Model()
    glance = Glance(seen(model), numbered=numbered)
    for _ in range(3):
        before = model.kept.number
        model.kept.number = 7.25
        assert not glance.is_still()
        model.kept.number = before
        assert glance.is_still()
    model.kept.number = 8.5
    assert not glance.is_still()


@pytest.mark.parametrize("seed", range(20))
def test_both_ways_to_look_say_the_same_of_changes_at_random(seed: int) -> None:
    if not _dicts_are_numbered():
        pytest.skip("dicts have no numbers here")
    draw = random.Random(seed)
    model = Model()
    places = seen(model)
    numbered, plain = Glance(places, numbered=True), Glance(places, numbered=False)
    items = [1, "two", None, 3.0]
    model.table.update(a=items[0])
    model.kept.number = items[0]
    for _ in range(60):
        draw.choice(
            [
                lambda: model.table.update(a=draw.choice(items)),
                lambda: setattr(model.kept, "number", draw.choice(items)),
                lambda: setattr(model, "plain", 1),
                lambda: model.table.update(b=2),
                lambda: None,
            ]
        )()
        assert numbered.is_still() == plain.is_still()


def test_what_is_passed_over_is_no_change_and_all_else_is() -> None:
    if not _dicts_are_numbered():
        pytest.skip("dicts have no numbers here")
    model = Model()
    ours, other = vars(model.layer), vars(model)

    def glance() -> Glance:
        return Glance(seen(model), [ours])

    look = glance()
    with look.passing_over():
        ours["_call_impl"] = print
    assert look.is_still()
    with look.passing_over():
        del ours["_call_impl"]
        other["plain"] = object()  # of another module
    assert not look.is_still()

    look = glance()
    model.layer.rate = 2  # type: ignore[assignment]  # ahead of the block
    with look.passing_over():
        ours["_call_impl"] = print
    assert not look.is_still()

    look = glance()
    with look.passing_over():
        del ours["_call_impl"]
    model.layer.rate = object()  # type: ignore[assignment]  # after it
    assert not look.is_still()
