"""Containers of meters that grow in the forward: what may be kept apart, and what gets out of them."""

from __future__ import annotations

import collections
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from odd_recorded_models import AverageMeter
from torch import nn

from partitioner.reaching import Reach


class Meter:
    def __init__(self, window: int = 20) -> None:
        self.sum, self.n = 0.0, 0
        self.last: deque[float] = deque(maxlen=window)

    def update(self, value: float, n: int = 1) -> None:
        self.sum += value * n
        self.n += n
        self.last.append(value)

    def mean(self) -> float:
        return self.sum / max(1, self.n)


@dataclass
class Record:
    total: float = 0.0
    values: list[float] = field(default_factory=list)

    def update(self, value: float) -> None:
        self.total += value
        self.values.append(value)


class Empty:
    def __init__(self) -> None:
        self.m: Any = {}


class Log(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        self.m.setdefault(name, Meter()).update(float(x))


class Asked(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        if name not in self.m:
            self.m[name] = AverageMeter(name)
        self.m[name].update(float(x))


class ByFactory(Log):
    def __init__(self) -> None:
        self.m = defaultdict(lambda: Meter(5))

    def log(self, name: str, x: torch.Tensor) -> None:
        self.m[name].update(float(x))


class Nested(Log):
    def __init__(self) -> None:
        self.m = defaultdict(lambda: defaultdict(list))

    def log(self, name: str, x: torch.Tensor) -> None:
        self.m[name]["values"].append(float(x))


class ByName(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        meter = self.m.get(name)
        if meter is None:
            meter = Meter()
            self.m[name] = meter
        meter.update(float(x))


class Caught(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        try:
            self.m[name].update(float(x))
        except KeyError:
            self.m[name] = Meter()
            self.m[name].update(float(x))


class Ordered(Log):
    def __init__(self) -> None:
        self.m, self.rows, self.count = OrderedDict(), [], Counter()  # type: ignore[var-annotated]

    def log(self, name: str, x: torch.Tensor) -> None:
        self.count[name] += 1
        self.rows.append({"name": name, "value": float(x), "count": self.count[name]})
        if len(self.rows) > 5:
            self.rows = self.rows[-5:]
        if name not in self.m:
            self.m[name] = collections.deque(maxlen=10)
        self.m[name].append(x)


class Records(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        self.m.setdefault(name, Record()).update(float(x))


class Filled(Log):
    def __init__(self) -> None:
        self.m = []

    def log(self, name: str, x: torch.Tensor) -> None:
        k = int(name)
        while len(self.m) <= k:
            self.m.append(Meter())
        self.m[k].update(float(x))


class Giving(Log):
    def of(self, name: str) -> Any:
        if name not in self.m:
            self.m[name] = Meter()
        return self.m[name]

    def log(self, name: str, x: torch.Tensor) -> None:
        self.of(name).update(float(x))


class Windowed(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        for meter in self.m.values():
            meter.update(0.0)
        if name in self.m and self.m[name].n > 100:
            self.m[name] = Meter()
        self.m.setdefault(name, Meter()).update(float(x))


class Sums(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        if name not in self.m:
            self.m[name] = torch.zeros(())
        self.m[name] = self.m[name] + x.detach()
        entry = self.m.setdefault("all", {"n": 0, "sum": 0.0})
        entry["n"] += 1
        entry["sum"] += float(x)


class OfItsOwn(dict[str, Any]):
    def log(self, name: str, x: torch.Tensor) -> None:
        self.setdefault(name, Meter()).update(float(x))


KEPT = [
    Log, Asked, ByFactory, Nested, ByName, Caught, Ordered, Records, Filled, Giving, Windowed, Sums, OfItsOwn,
]  # fmt: skip

SHARED: list[Any] = []


class Registered(Meter):
    def __init__(self) -> None:
        super().__init__()
        SHARED.append(self)


class Counted(Meter):
    made = 0

    def __init__(self) -> None:
        super().__init__()
        Counted.made += 1


class CountedAsNew(Meter):
    def __new__(cls) -> CountedAsNew:
        Counted.made += 1
        return super().__new__(cls)


class Drawing(Meter):
    def __init__(self) -> None:
        super().__init__()
        torch.rand(1)


class Sharing:
    def __init__(self) -> None:
        self.values = SHARED

    def update(self, value: float) -> None:
        self.values.append(value)


class Keeping:
    def __init__(self, x: Any) -> None:
        self.x, self.n = x, 0

    def update(self, value: float) -> None:
        self.n += 1
        self.x.scale = self.n


class Telling:
    def __init__(self, value: float) -> None:
        Counted.made = value  # type: ignore[assignment]


class MakesRegistered(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        self.m.setdefault(name, Registered()).update(float(x))


class MakesCounted(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        if name not in self.m:
            self.m[name] = Counted()
        self.m[name].update(float(x))


class MakesAnew(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        if name not in self.m:
            self.m[name] = CountedAsNew()
        self.m[name].update(float(x))


class MakesByFactory(Log):
    def __init__(self) -> None:
        self.m = defaultdict(Counted)

    def log(self, name: str, x: torch.Tensor) -> None:
        self.m[name].update(float(x))


class GivesByFactory(MakesByFactory):
    def __init__(self) -> None:
        self.m = defaultdict(lambda: Sharing() or SHARED)


class GivesByDefault(MakesByFactory):
    def __init__(self) -> None:
        self.m = defaultdict(lambda kept=SHARED: kept)


class Draws(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        if name not in self.m:
            self.m[name] = Drawing()
        self.m[name].update(float(x))


class Shares(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        self.m.setdefault(name, Sharing()).update(float(x))


class SharesADefault(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        self.m.get(name, SHARED).append(float(x))


class Keeps(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        self.m.setdefault(name, Keeping(x)).update(1.0)


class KeepsElsewhere(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        meter = Meter()
        self.m[name] = meter
        SHARED.append(meter)
        self.m[name].update(float(x))


class OfTheFirst(Log):
    """Another stage's dict does not have it."""

    def log(self, name: str, x: torch.Tensor) -> None:
        if name == "0":
            self.m["first"] = Meter()
        self.m["first"].update(float(x))


class Tells(Log):
    def log(self, name: str, x: torch.Tensor) -> None:
        super().log(name, x)
        Telling(self.m[name].n)


class TellsItself(Log):
    limit = 0

    def tell(self, value: int) -> None:
        TellsItself.limit = value

    def log(self, name: str, x: torch.Tensor) -> None:
        self.m.setdefault(name, Meter()).update(float(x))
        self.tell(self.m[name].n)


class Decides(TellsItself):
    def mark(self) -> None:
        TellsItself.limit = 2

    def log(self, name: str, x: torch.Tensor) -> None:
        self.m.setdefault(name, Meter()).update(float(x))
        if self.m[name].n > 5:
            self.mark()


class ChangesWhatCame(Log):
    def of(self, name: str) -> Any:
        return self.m[name]

    def log(self, name: str, x: torch.Tensor) -> None:
        self.m[name] = x
        self.of(name)[0] = 1.0


class ChangesWhatCameInACopy(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        row = [x]
        self.m[name] = list(row)
        self.m[name][0].scale = len(self.m)


class ChangesWhatCameInItems(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        self.m.update({name: x})
        for _, one in self.m.items():
            one.scale = len(self.m)


class ChangesWhatCameBeside(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        for _, one in zip(self.m.values(), [x], strict=False):
            one.scale = len(self.m)  # type: ignore[attr-defined]
        self.m.setdefault(name, Meter()).update(float(x))


class ChangesByAProperty(Empty):
    @property
    def all(self) -> Any:
        return self.m

    def log(self, name: str, x: torch.Tensor) -> None:
        self.m[name] = x
        self.all[name].scale = len(self.m)


class ChangesByAnotherName(Empty):
    def __init__(self) -> None:
        super().__init__()
        self.all = self.m

    def log(self, name: str, x: torch.Tensor) -> None:
        self.m[name] = x
        for one in self.all.values():
            one.scale = len(self.m)


class ChangesASum(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        y = 0
        y += x  # type: ignore[assignment]
        self.m[name] = y
        self.m[name] += len(self.m)
        SHARED.append(y)


class ChangesAContext(Empty):
    def log(self, name: str, x: torch.Tensor) -> None:
        with Entering(x) as y:
            self.m[name] = y
        self.m[name].scale = len(self.m)


class Entering:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __enter__(self) -> Any:
        return self.x

    def __exit__(self, *error: object) -> None:
        pass


LEAKING = [
    ChangesByAProperty, ChangesByAnotherName, ChangesASum, ChangesAContext,
    MakesRegistered, MakesCounted, MakesAnew, MakesByFactory, GivesByFactory, GivesByDefault, Draws, Shares,
    SharesADefault, Keeps, KeepsElsewhere, OfTheFirst, Tells, TellsItself, Decides, ChangesWhatCame,
    ChangesWhatCameInACopy, ChangesWhatCameInItems, ChangesWhatCameBeside,
]  # fmt: skip


class Layer(nn.Module):
    def __init__(self, log: Any, name: str) -> None:
        super().__init__()
        self.lin, self.log, self.name = nn.Linear(4, 4), log, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.lin(x))
        self.log.log(self.name, y.detach().norm())
        return self.read(y)

    def read(self, y: torch.Tensor) -> torch.Tensor:
        return y


def sinks_of(log: Any, layer: type[Layer] = Layer) -> list[Any]:
    model = nn.Sequential(*(layer(log, str(k)) for k in range(3)))
    return list(Reach(model, lambda path: 1).sinks.values())


@pytest.mark.parametrize("kind", KEPT)
def test_what_a_container_gets_in_the_forward_is_a_part_of_it(kind: Any) -> None:
    log = kind()
    assert any(one is log for one in sinks_of(log))


@pytest.mark.parametrize("kind", LEAKING)
def test_what_gets_out_of_it_or_is_changed_for_others_is_none(kind: Any) -> None:
    log = kind()
    assert not any(one is log or one is log.m for one in sinks_of(log))


class ReadsAll(Layer):
    def read(self, y: torch.Tensor) -> torch.Tensor:
        return y * sum(one.sum for one in self.log.m.values())


class ReadsOne(Layer):
    def read(self, y: torch.Tensor) -> torch.Tensor:
        meter = self.log.m.get(self.name)
        return y if meter is None else y * meter.mean()


class Asks(Layer):
    def read(self, y: torch.Tensor) -> torch.Tensor:
        return y.relu() if "2" in self.log.m else y


class MakesOfIt(Layer):
    def read(self, y: torch.Tensor) -> torch.Tensor:
        other = Record(self.log.m[self.name].n)
        return y * other.total


class KeepsOfIt(Layer):
    def read(self, y: torch.Tensor) -> torch.Tensor:
        self.mine = self.log.m.setdefault(self.name, Meter())
        return y


class PutsAndReads(Layer):
    def read(self, y: torch.Tensor) -> torch.Tensor:
        meter = Meter()
        self.log.m["mine"] = meter
        return y * meter.n


class ChangesItsOwn(Layer):
    """What it returns is changed by what the log holds."""

    def read(self, y: torch.Tensor) -> torch.Tensor:
        z = y * 1.0
        self.log.m[self.name] = z
        self.log.m[self.name] += len(self.log.m)
        return z


class ReadsByFactory(Layer):
    def read(self, y: torch.Tensor) -> torch.Tensor:
        made = defaultdict(lambda: self.log.m["0"].n)
        return y * made[0]


@pytest.mark.parametrize(
    "layer", [ReadsAll, ReadsOne, Asks, MakesOfIt, KeepsOfIt, PutsAndReads, ChangesItsOwn, ReadsByFactory]
)
def test_what_a_layer_reads_of_it_is_read(layer: type[Layer]) -> None:
    assert sinks_of(Log(), layer) == []
