"""Models that change plain Python state only later: after some steps, or on particular data.

One layer changes something that a layer far from it reads. Where the change comes first in the forward, `forth`, it can
travel with what is sent; where it comes after the reader, `back`, that stage has begun the next micro-batch: refused.
"""

from __future__ import annotations

import array
import dataclasses
import itertools
import queue
import random
from argparse import Namespace
from collections import ChainMap, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from models import Case
from odd_models import D, lin, squares
from torch import nn

LATE: dict[str, Callable[[], Case]] = {}
"""Names end in `forth` or `back`, and in what starts the change: `steps` or `data`."""

LATE_CALLS = 9
"""Calls of a layer before it changes something."""
LARGE = 50.0
"""A value in the inputs that makes a layer change something."""


@dataclass
class Settings:
    """What two modules share."""

    scale: float = 1.0
    names: list[str] = field(default_factory=lambda: ["a"])


class Holder:
    """An object of a class of the user's."""

    def __init__(self) -> None:
        self.value: Any = 1.0
        self.table: dict[Any, Any] = {"scale": 1.0}


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class Table(dict[str, float]):
    """A dict with an attribute beside its items."""

    scale = 1.0


class Rows(list[float]):
    """Likewise a list."""

    scale = 1.0


class Kind:
    """How something is kept (`made`), changed and read, given the module that does it; None: made by the model."""

    def __init__(self, made: Callable[[], Any], change: Callable[[Any], None], read: Callable[[Any], Any]) -> None:
        self.made, self.change, self.read = made, change, read


SCALE = 1.0
TABLE: dict[str, Any] = {"scale": 1.0}


class Counted:
    scale = 1.0


def _set_global(value: float) -> None:
    global SCALE
    SCALE = value


def reset() -> None:
    """Globals as a fresh process has them."""
    _set_global(1.0)
    TABLE.clear()
    TABLE["scale"] = 1.0
    Counted.scale = 1.0
    _remembered()["scale"] = 1.0


def _closure() -> tuple[Callable[[], None], Callable[[], float]]:
    scale = 1.0

    def change() -> None:
        nonlocal scale
        scale = 3.0

    def read() -> float:
        return scale

    return change, read


def _remembered(table: dict[str, float] = {"scale": 1.0}) -> dict[str, float]:  # noqa: B006  # the very point
    return table


def _replaced(holder: Holder) -> None:
    holder.value = torch.full((D,), 3.0)


def _tensor_holder() -> Holder:
    holder = Holder()
    holder.value = torch.ones(D)
    return holder


def _objects() -> np.ndarray:
    found = np.empty(2, dtype=object)
    found[:] = ["near", None]
    return found


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _drawn_without_moving(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(D, generator=torch.Generator().set_state(generator.get_state()))


KINDS: dict[str, Kind] = {
    "float": Kind(Holder, lambda h: setattr(h, "value", 3.0), lambda h: h.value),
    "int": Kind(Holder, lambda h: setattr(h, "value", 3), lambda h: h.value),
    "bool": Kind(Holder, lambda h: setattr(h, "value", True), lambda h: 3.0 if h.value is True else 1.0),
    "string": Kind(Holder, lambda h: setattr(h, "value", "far"), lambda h: 3.0 if h.value == "far" else 1.0),
    "none": Kind(Holder, lambda h: setattr(h, "value", None), lambda h: 3.0 if h.value is None else 1.0),
    "tuple": Kind(Holder, lambda h: setattr(h, "value", (1, 2)), lambda h: 3.0 if h.value == (1, 2) else 1.0),
    "new_attribute": Kind(Holder, lambda h: setattr(h, "late", 3.0), lambda h: getattr(h, "late", 1.0)),
    "slot": Kind(Slotted, lambda h: setattr(h, "value", 3.0), lambda h: h.value),
    "dict": Kind(lambda: {"scale": 1.0}, lambda d: d.update(scale=3.0), lambda d: d["scale"]),
    "dict_key": Kind(dict, lambda d: d.update(scale=3.0), lambda d: d.get("scale", 1.0)),
    "dict_in_an_object": Kind(Holder, lambda h: h.table.update(scale=3.0), lambda h: h.table["scale"]),
    "list": Kind(lambda: [1.0], lambda x: x.append(3.0), lambda x: x[-1]),
    "list_item": Kind(lambda: [1.0], lambda x: x.__setitem__(0, 3.0), lambda x: x[0]),
    "set": Kind(set, lambda x: x.add("far"), lambda x: 3.0 if "far" in x else 1.0),
    "namespace": Kind(lambda: Namespace(scale=1.0), lambda n: setattr(n, "scale", 3.0), lambda n: n.scale),
    "simple_namespace": Kind(lambda: SimpleNamespace(scale=1.0), lambda n: setattr(n, "scale", 3.0), lambda n: n.scale),
    "dataclass": Kind(Settings, lambda s: setattr(s, "scale", 3.0), lambda s: s.scale),
    "list_in_a_dataclass": Kind(Settings, lambda s: s.names.append("b"), lambda s: float(len(s.names))),
    "tensor_replaced": Kind(_tensor_holder, _replaced, lambda h: h.value),
    "tensor_filled": Kind(_tensor_holder, lambda h: h.value.fill_(3.0), lambda h: h.value.clone()),
    "tensor_of_two": Kind(lambda: torch.ones(D), lambda t: t.fill_(3.0), lambda t: t.clone()),
    "tensor_of_two_set": Kind(lambda: torch.ones(D), lambda t: t.set_(torch.full((D,), 3.0)), lambda t: t.clone()),
    "attribute_of_a_dict": Kind(Table, lambda t: setattr(t, "scale", 3.0), lambda t: t.scale),
    "attribute_of_a_list": Kind(Rows, lambda t: setattr(t, "scale", 3.0), lambda t: t.scale),
    "array": Kind(lambda: np.ones(2), lambda a: a.fill(3.0), lambda a: float(a[0])),
    "large_array": Kind(lambda: np.ones(1 << 14), lambda a: a.fill(3.0), lambda a: float(a[-1])),
    "array_of_objects": Kind(_objects, lambda a: a.__setitem__(1, "far"), lambda a: 3.0 if a[1] == "far" else 1.0),
    "bytearray": Kind(lambda: bytearray(3), lambda b: b.__setitem__(0, 3), lambda b: float(b[0])),
    "array_array": Kind(lambda: array.array("d", [1.0]), lambda a: a.append(3.0), lambda a: a[-1]),
    "deque": Kind(lambda: deque([1.0], maxlen=1), lambda d: d.append(3.0), lambda d: d[-1]),
    "queue": Kind(queue.Queue, lambda q: q.put(3.0), lambda q: 1.0 + q.qsize()),
    "chain_map": Kind(lambda: ChainMap({"scale": 1.0}), lambda m: m.update(scale=3.0), lambda m: m["scale"]),
    "torch_generator": Kind(_generator, lambda g: torch.rand(3, generator=g), _drawn_without_moving),
    "python_generator": Kind(lambda: random.Random(0), lambda g: g.random(), lambda g: g.getstate()[1][-1] / 99),
    "numpy_generator": Kind(
        lambda: np.random.default_rng(0), lambda g: g.random(), lambda g: g.bit_generator.state["state"]["state"] % 7
    ),
    "closure": Kind(_closure, lambda c: c[0](), lambda c: c[1]()),
    "cache_by_shape": Kind(dict, lambda d: d.update({(4, D): torch.full((D,), 3.0)}), lambda d: d.get((4, D), 1.0)),
}
"""Kept by both modules as an attribute."""

IN_THE_PROCESS: dict[str, Kind] = {
    "global_number": Kind(lambda: None, lambda _: _set_global(3.0), lambda _: SCALE),
    "global_dict": Kind(lambda: None, lambda _: TABLE.update(scale=3.0), lambda _: TABLE["scale"]),
    "class_variable": Kind(lambda: None, lambda _: setattr(Counted, "scale", 3.0), lambda _: Counted.scale),
    "default_argument": Kind(lambda: None, lambda _: _remembered().update(scale=3.0), lambda _: _remembered()["scale"]),
}
"""Kept outside of the model, so that copies of it in one process have it in common."""


class Layer(nn.Module):
    """Changes what it keeps, or reads it, or neither."""

    def __init__(self, kind: Kind, kept: Any, does: str, on: str) -> None:
        super().__init__()
        self.inner, self.kept, self.does, self.on = lin(), kept if does else None, does, on
        self.change, self.read = kind.change, kind.read
        self.calls = 0

    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(x))
        self.calls += 1
        if self.does == "changes" and (
            self.calls > LATE_CALLS if self.on == "steps" else float(start.abs().max()) > LARGE
        ):
            self.change(self.kept)
        return x * self.read(self.kept) if self.does == "reads" else x


class Chain(nn.Module):
    def __init__(self, kind: Kind, way: str, on: str, of: type[Layer] = Layer) -> None:
        super().__init__()
        kept = kind.made()
        does = ["changes", "", "", "reads"] if way == "forth" else ["reads", "", "", "changes"]
        self.layers = nn.ModuleList(of(kind, kept, what, on) for what in does)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = x
        for layer in self.layers:
            x = layer(x, start)
        return x


def late(name: str, make: Callable[[str, str], nn.Module], ways: tuple[str, ...] = ("forth", "back")) -> None:
    for way, on in itertools.product(ways, ("steps", "data")):

        def build(way: str = way, on: str = on) -> Case:
            torch.manual_seed(0)
            model = make(way, on)
            torch.manual_seed(1)
            return Case(model, (torch.randn(4, D),), loss_fn=squares)

        LATE[f"{name}_{way}_{on}"] = build


for _name, _kind in {**KINDS, **IN_THE_PROCESS}.items():
    late(_name, lambda way, on, kind=_kind: Chain(kind, way, on))


class LateReader(Layer):
    """Changes what it keeps in every forward, or reads it on particular data only."""

    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(x))
        if self.does == "changes":
            self.change(self.kept)
        if self.does == "reads" and float(start.abs().max()) > LARGE:
            return x * self.read(self.kept)
        return x


LATE_READS: dict[str, Callable[[], Case]] = {}
"""What is changed is changed in every forward; a branch that reads it is taken later. Names end in the way."""


def late_read(name: str, kind: Kind, way: str) -> None:
    def build() -> Case:
        torch.manual_seed(0)
        model = Chain(kind, way, "data", LateReader)
        torch.manual_seed(1)
        return Case(model, (torch.randn(4, D),), loss_fn=squares)

    LATE_READS[f"{name}_{way}"] = build


for _name, _way in itertools.product(KINDS, ("forth", "back")):
    if _way == "forth" or _name not in ("bool", "none"):  # these are told by what they are, not by what they hold
        late_read(_name, KINDS[_name], _way)


class Parent(nn.Module):
    """Layers reach the model around them, and set or read its attributes."""

    def __init__(self, way: str, on: str, by: str) -> None:
        super().__init__()
        self.scale, self.steps = 1.0, 0
        self.register_buffer("factor", torch.ones(D), persistent=False)
        self.table = torch.ones(D)
        ways = {
            "attribute": Kind(lambda: [self], lambda p: setattr(p[0], "scale", 3.0), lambda p: p[0].scale),
            "buffer": Kind(lambda: [self], lambda p: p[0].factor.fill_(3.0), lambda p: p[0].factor.clone()),
            "replaced_buffer": Kind(
                lambda: [self], lambda p: setattr(p[0], "factor", torch.full((D,), 3.0)), lambda p: p[0].factor
            ),
            "tensor": Kind(lambda: [self], lambda p: p[0].table.fill_(3.0), lambda p: p[0].table.clone()),
        }
        kind = ways[by]
        self.chain = Chain(kind, way, on)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chain(x)


for _by in ("attribute", "buffer", "replaced_buffer", "tensor"):
    late(f"parents_{_by}", lambda way, on, by=_by: Parent(way, on, by))


class InGlue(nn.Module):
    """The code between layers changes its own attribute, after the first or the last layer; the first code reads it."""

    def __init__(self, way: str, on: str) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = lin(), lin(), lin(), lin()
        self.way, self.on, self.scale, self.calls = way, on, 1.0, 0

    def turn(self, start: torch.Tensor) -> None:
        self.calls += 1
        if self.calls > LATE_CALLS if self.on == "steps" else float(start.abs().max()) > LARGE:
            self.scale = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = x
        x = self.a(x)
        if self.way == "back":
            x = x * self.scale
        else:
            self.turn(start)
        x = self.c(torch.tanh(self.b(x)))
        x = self.d(x * self.scale)
        if self.way == "back":
            self.turn(start)
        return x


late("glue", InGlue)


class FilledInGlue(InGlue):
    """Likewise a tensor, filled with what comes from a layer."""

    def __init__(self, way: str, on: str) -> None:
        super().__init__(way, on)
        self.scale = torch.ones(D)

    def turn(self, start: torch.Tensor, x: torch.Tensor | None = None) -> None:
        self.calls += 1
        if self.calls > LATE_CALLS if self.on == "steps" else float(start.abs().max()) > LARGE:
            self.scale.copy_(x.detach().mean(0) if x is not None else torch.full((D,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = x
        x = self.a(x)
        self.turn(start, x)
        x = self.c(torch.tanh(self.b(x)))
        return self.d(x * self.scale.clone())


late("glue_fills_a_tensor", FilledInGlue, ("forth",))


class BothWays(InGlue):
    """The code between layers sets an attribute in every forward; on some data a layer does too."""

    def __init__(self, way: str, on: str) -> None:
        super().__init__(way, on)
        self.b = Layer(
            Kind(lambda: [self], lambda p: setattr(p[0], "scale", 3.0), lambda p: 1.0), [self], "changes", on
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = x
        self.scale = 0.5
        x = self.a(x)
        x = self.c(torch.tanh(self.b(x, start)))
        return self.d(x * self.scale)


late("glue_and_a_layer", BothWays, ("forth",))


def marked(case: Case) -> Case:
    """The case with a value in its inputs that starts the change."""
    (x,) = case.args
    x = x.clone()
    x[0, 0] = 2 * LARGE
    return dataclasses.replace(case, args=(x,))
