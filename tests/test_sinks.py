"""State that a forward only writes, told from state that something reads: by the source of what may run."""

from __future__ import annotations

import contextvars
import copy
import functools
import io
import operator
import sys
import threading
import types
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from odd_recorded_models import RECORDED, AverageMeter, History, Running
from torch import nn

from partitioner.reaching import Reach


class Holding(nn.Module):
    """A layer with a meter that it shares with the others."""

    def __init__(self, meter: Any) -> None:
        super().__init__()
        self.lin, self.meter = nn.Linear(4, 4), meter


class Layer(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        self.meter.update(float(x.mean()))
        return x


def sinks_of(layer: Callable[[Any], nn.Module], kept: Any, loss: Any = None) -> list[str]:
    """Classes of what is only written in a chain of such layers."""
    found = Reach(nn.Sequential(*(layer(kept) for _ in range(3))), lambda path: 1, loss).sinks
    return sorted(type(one).__name__ for one in found.values())


@pytest.mark.parametrize("name", RECORDED)
def test_records_are_found(name: str) -> None:
    case = RECORDED[name]()
    assert Reach(case.model, lambda path: 1, case.loss_fn).sinks


def test_what_a_meter_reads_for_itself_is_not_read() -> None:
    assert sinks_of(Layer, AverageMeter()) == ["AverageMeter"]


def test_nobody_reads_a_sink_and_all_read_the_others() -> None:
    for meter, is_read in ((AverageMeter(), False), (Steering(), True)):
        reach = Reach(nn.Sequential(*(Layer(meter) for _ in range(3))), lambda path: 1 << int(path[:1] or 0))
        assert bool(reach.places[id(meter)].readers_of("sum")) == is_read


class Steering(AverageMeter):
    """Tells something else what it holds."""

    limit = 1.0

    def update(self, val: float, n: int = 1) -> None:
        super().update(val, n)
        Steering.limit = self.avg


class Mutating(AverageMeter):
    def update(self, val: Any, n: int = 1) -> None:
        val *= self.count


class Raising(AverageMeter):
    def update(self, val: float, n: int = 1) -> None:
        self.count += 1
        if self.count > 100:
            raise StopIteration


class Drawing(AverageMeter):
    def update(self, val: float, n: int = 1) -> None:
        self.count += 1
        if self.count % 2:
            torch.rand(1)


class AddingToWhatCame(AverageMeter):
    """The first tensor that came is the caller's own, and grows in place."""

    def update(self, val: Any, n: int = 1) -> None:
        if self.count:
            self.sum += val
        else:
            self.sum = val
        self.count += 1


class Asking(AverageMeter):
    def update(self, val: Any, n: int = 1) -> None:
        val.resize(self.count)


class Reaching(AverageMeter):
    """Has a module of the model, and sets something there."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(1, 1)

    def update(self, val: float, n: int = 1) -> None:
        self.count += 1
        self.module.scale = self.count  # type: ignore[assignment]


class ReachingWhatCame(AverageMeter):
    """Sets something on what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[Any] = []

    def update(self, val: Any, n: int = 1) -> None:
        self.known.append(val)
        for one in self.known:
            one.scale = len(self.known)


class WritingIntoWhatCame(AverageMeter):
    def update(self, val: Any, n: int = 1) -> None:
        self.val = val
        self.val[0] = 1.0


class Leaving(AverageMeter):
    """Whether the call is counted elsewhere depends on what it holds."""

    others = 0

    def update(self, val: float, n: int = 1) -> None:
        if self.count > 3:
            return
        self.count += 1
        Leaving.others += 1


class Fetching(AverageMeter):
    """An attribute is computed, and that tells others."""

    @property
    def mean(self) -> float:
        Steering.limit = self.sum
        return self.sum

    def update(self, val: float, n: int = 1) -> None:
        self.avg = self.mean


@pytest.mark.parametrize(
    "kind",
    [
        Steering,
        Mutating,
        Raising,
        Drawing,
        AddingToWhatCame,
        Reaching,
        ReachingWhatCame,
        WritingIntoWhatCame,
        Asking,
        Leaving,
        Fetching,
    ],
)
def test_a_meter_whose_update_does_more_is_no_sink(kind: Callable[[], AverageMeter]) -> None:
    assert sinks_of(Layer, kind()) == []


class Scaled(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.meter.avg


class Deciding(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.meter.count > 5:
            x = x.relu()
        return x


class ByAlias(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        meter = self.meter
        factor = 1 + meter.avg
        return super().forward(x) * factor


class ByText(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * getattr(self, "meter").avg  # noqa: B009  # the very point


class ByAnyText(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        name = "met" + "er"
        return super().forward(x) * getattr(self, name).avg


class ByAllAttributes(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * sum(one.avg for one in vars(self).values() if isinstance(one, AverageMeter))


class Passing(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(super().forward(x), self.meter)


class Copying(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * copy.copy(self.meter).avg


class InAComprehension(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + sum([one + 1 for one in (1.0, self.meter.avg)])


class ByAHook(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        x.register_hook(lambda gradient: gradient * self.meter.avg)
        return x


class ByAFunctionInside(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def factor() -> float:
            return 1 + self.meter.avg

        return super().forward(x) * factor()


class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.layer.meter.avg, None


class ByABackward(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaling.apply(super().forward(x), self)  # type: ignore[no-any-return, no-untyped-call]


class ByAProperty(Layer):
    @property
    def factor(self) -> float:
        return 1 + self.meter.avg

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


class ByALength(Layer):
    """Python calls a method that no code names."""

    def __len__(self) -> int:
        return int(self.meter.count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * len(self)


class Handing(Layer):
    """What it holds is kept where others may read it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.meter.avg
        return super().forward(x)


class InATuple(Layer):
    def __init__(self, meter: Any) -> None:
        super().__init__(meter)
        self.pair = (meter, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.pair[0].avg


class InAList(Layer):
    def __init__(self, meter: Any) -> None:
        super().__init__(meter)
        self.all = [meter]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.all[0].avg


class Bound(Layer):
    """A method of it is called under another name."""

    def __init__(self, meter: Any) -> None:
        super().__init__(meter)
        self.mean = meter.mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.mean()


class Told(AverageMeter):
    def mean(self) -> float:
        return self.avg


class Trying(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        try:
            self.meter.log[3]
        except AttributeError:
            x = x.relu()
        return x


def scaled(x: torch.Tensor, meter: AverageMeter) -> torch.Tensor:
    return x * meter.avg


STATE = types.ModuleType("state")
"""A module of the user's in which a meter is kept."""
AVERAGE_OF = operator.attrgetter("meter.avg")
KEPT: contextvars.ContextVar[Any] = contextvars.ContextVar("kept")
HERE = threading.local()


class ByAModulesName(Layer):
    def __init__(self, meter: Any) -> None:
        super().__init__(meter)
        STATE.METER = meter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * STATE.METER.avg


class ByAnImport(Layer):
    def __init__(self, meter: Any) -> None:
        super().__init__(meter)
        STATE.meter, sys.modules["state"] = meter, STATE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from state import meter

        return super().forward(x) * meter.avg


class ByAGetter(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * AVERAGE_OF(self)


class ByAPropertyOfAGetter(Layer):
    average = property(operator.attrgetter("meter.avg"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.average


class ByACachedProperty(Layer):
    @functools.cached_property
    def average(self) -> Any:
        return self.meter.avg

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.average


class ByAPartialMethod(Layer):
    def _scaled(self, x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by * self.meter.avg

    scaled = functools.partialmethod(_scaled, by=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(super().forward(x))


@functools.singledispatch
def scaled_by(x: Any, layer: Layer) -> Any:
    return x


@scaled_by.register
def _(x: torch.Tensor, layer: Layer) -> Any:
    return x * layer.meter.avg


class ByDispatch(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_by(super().forward(x), self)


class ByAWeakReference(Layer):
    def __init__(self, meter: Any) -> None:
        super().__init__(meter)
        self.other = weakref.ref(meter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.other().avg


class ByContext(Layer):
    def __init__(self, meter: Any) -> None:
        super().__init__(meter)
        KEPT.set(meter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * KEPT.get().avg


class ByThread(Layer):
    def __init__(self, meter: Any) -> None:
        super().__init__(meter)
        HERE.kept = meter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * HERE.kept.avg


class Elsewhere(nn.Module):
    meter: Any

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.meter.avg


class ByAnotherClass(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Elsewhere.scaled(super().forward(x), self)  # type: ignore[arg-type]  # the very point


class BoundToAnother(Layer):
    def __init__(self, meter: Any) -> None:
        super().__init__(meter)
        self.scaled = types.MethodType(Elsewhere.scaled, self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(super().forward(x))


class ByAnotherSelf(nn.Module):
    def __init__(self, meter: Any) -> None:
        super().__init__()
        self.layer = Layer(meter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, self = self.layer(x), self.layer
        return x * self.meter.avg


class Printing(Layer):
    """To something that counts what it is told."""

    def __init__(self, meter: Any) -> None:
        super().__init__(meter)
        self.out = io.StringIO()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(self.meter.avg, file=self.out)
        return super().forward(x) * self.out.tell()


class Gain:
    def __init__(self) -> None:
        self.value = 1.0

    def double(self) -> None:
        self.value *= 2


class Doubling(Layer):
    """Something of the user's by a method that tensors have too."""

    def __init__(self, meter: Any) -> None:
        super().__init__(meter)
        self.gain = Gain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.meter.count > 5:
            self.gain.double()
        return super().forward(x) * self.gain.value


class Dividing(Layer):
    """Where a division by zero is caught around a call that does not look like it."""

    def note(self) -> None:
        self.meter.update(1 / (self.meter.count - 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            self.note()
        except ZeroDivisionError:
            x = 2 * x
        return self.lin(x)


READERS: list[Callable[[Any], nn.Module]] = [
    ByAModulesName,
    ByAnImport,
    ByAGetter,
    ByAPropertyOfAGetter,
    ByACachedProperty,
    ByAPartialMethod,
    ByDispatch,
    ByAWeakReference,
    ByContext,
    ByThread,
    ByAnotherClass,
    BoundToAnother,
    ByAnotherSelf,
    Printing,
    Doubling,
    Dividing,
    Scaled,
    Deciding,
    ByAlias,
    ByText,
    ByAnyText,
    ByAllAttributes,
    Passing,
    Copying,
    InAComprehension,
    ByAHook,
    ByAFunctionInside,
    ByABackward,
    ByAProperty,
    ByALength,
    Handing,
    InATuple,
    InAList,
    Bound,
    Trying,
]


@pytest.mark.parametrize("layer", READERS)
def test_what_a_layer_reads_is_no_sink(layer: Callable[[Any], nn.Module]) -> None:
    assert sinks_of(layer, Told()) == []


def test_what_hooks_and_the_loss_read_is_no_sink() -> None:
    meter = AverageMeter()
    assert sinks_of(Layer, meter) == ["AverageMeter"]
    assert sinks_of(Layer, meter, lambda output, target: output.sum() * meter.avg) == []

    def hooked(kept: Any) -> nn.Module:
        layer = Layer(kept)
        layer.lin.weight.register_hook(lambda gradient: gradient * kept.avg)
        return layer

    assert sinks_of(hooked, meter) == []


def test_a_hook_that_comes_later_may_read_what_was_only_written() -> None:
    meter = AverageMeter()
    model = nn.Sequential(*(Layer(meter) for _ in range(3)))
    reach = Reach(model, lambda path: 1 << int(path[:1] or 0))
    assert not reach.places[id(meter)].readers_of("avg")
    model[2].register_forward_hook(lambda module, args, output: output * meter.avg)
    assert reach.look_at_hooks()
    assert reach.places[id(meter)].readers_of("avg")


class Listed(Holding):
    """Its records are a dict of lists, or of meters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        self.meter.setdefault("mean", []).append(x.detach())
        self.meter["last"] = x.mean().item()
        return x.exp().log()


class ListedAndRead(Listed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x if len(self.meter) < 3 else x.relu()


class History2(History):
    """Returns what its lists have, which is read only where a caller uses that; its counts nobody gets."""

    def add(self, name: str, value: float) -> int:  # type: ignore[override]
        super().add(name, value)
        return len(self.values)


class Adding(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        self.meter.add("mean", x.mean())
        return x


class AddingAndUsing(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        count = self.meter.add("mean", x.mean())
        return x / count


class Pushing(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        self.meter.push(x.std().item())
        return x


@pytest.mark.parametrize(
    ("layer", "kept", "found"),
    [
        (Listed, {}, ["dict"]),
        (ListedAndRead, {}, []),
        (Adding, History(), ["History", "defaultdict", "dict"]),
        (Adding, History2(), ["History2", "defaultdict"]),
        (AddingAndUsing, History2(), ["defaultdict"]),
        (Pushing, Running(), ["Running"]),
    ],
)
def test_containers_and_what_methods_give_back(layer: Any, kept: Any, found: list[str]) -> None:
    assert sinks_of(layer, kept) == found


def test_code_without_a_source_reads_what_it_names() -> None:
    space: dict[str, Any] = {"Layer": Layer}
    exec(
        "class Made(Layer):\n    def forward(self, x):\n        self.meter.update(1.0)\n        return self.lin(x)",
        space,
    )
    assert sinks_of(space["Made"], AverageMeter()) == []


class Counting(Holding):
    """Needs what the first layer has put in, which another rank's copy does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            self.meter["calls"] = 0
        self.meter["calls"] += 1
        return self.lin(x)

    first = False


class CountingApart(Holding):
    def begin(self) -> None:
        self.meter["calls"] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            self.begin()
        self.meter["calls"] += 1
        return self.lin(x)

    first = False


class Taking(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.meter.pop()
        self.meter.append(float(x.mean()))
        return self.lin(x)


class Forgetting(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter.append(float(x.mean()))
        if len(self.meter) > 9:
            self.meter.pop(0)
        self.meter[-1] += 1
        return self.lin(x)


class Beginning(AverageMeter):
    """What `update` needs is there only after `begin`."""

    def begin(self) -> None:
        self.latest = 0.0

    def update(self, val: float, n: int = 1) -> None:
        self.latest += val


@pytest.mark.parametrize(
    ("layer", "kept", "found"),
    [
        (CountingApart, {}, []),
        (CountingApart, {"calls": 0}, ["dict"]),
        (Counting, {}, []),
        (Taking, [1.0], []),
        (Forgetting, [], ["list"]),
        (Layer, Beginning(), []),
    ],
)
def test_what_is_taken_is_there_on_every_rank(layer: Any, kept: Any, found: list[str]) -> None:
    assert sinks_of(layer, kept) == found


class Kept:
    """A logger as people put it on hooks: by name, and counted."""

    def __init__(self) -> None:
        self.store: dict[str, Any] = {}
        self.steps: dict[str, int] = defaultdict(int)

    def hook(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.store[name] = output.detach()
            self.steps[name] += 1
            if float(output.detach().max()) > 0.9:
                self.store.setdefault("large", []).append(name)

        return keep


def test_a_logger_that_comes_on_hooks_is_a_sink() -> None:
    model, logger = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), Kept()
    reach = Reach(model, lambda path: 1 << int(path[:1] or 0))
    for name, layer in model.named_children():
        layer.register_forward_hook(logger.hook(name))
    reach.look_at_hooks()
    assert id(logger) in reach.sinks
    assert not any(reach.places[id(logger)].readers_of(name) for name in ("store", "steps"))


def test_what_others_hold_too_is_changed_for_them() -> None:
    """The list that a recorder writes into is on the layers as well, which read it."""
    shared: list[float] = []

    class Recorder:
        def __init__(self) -> None:
            self.values = shared

        def push(self, value: float) -> None:
            self.values.append(value)

    class Reader(Holding):
        def __init__(self, meter: Any) -> None:
            super().__init__(meter)
            self.seen = shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.lin(x)
            self.meter.push(float(x.mean()))
            return x * len(self.seen)

    assert sinks_of(Reader, Recorder()) == []


def test_what_no_code_is_seen_to_write_is_no_sink() -> None:
    class Silent(Holding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x)

    assert sinks_of(Silent, AverageMeter()) == []


class Streaming(AverageMeter):
    """Operators that change what they are given."""

    def __lshift__(self, x: torch.Tensor) -> None:
        self.count += 1
        x.mul_(1 + self.count)

    def __setitem__(self, key: str, x: torch.Tensor) -> None:
        self << x


class ByShift(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter << (y := self.lin(x))
        return y


class ByItem(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter["x"] = y = self.lin(x)
        return y


@pytest.mark.parametrize("layer", [ByShift, ByItem])
def test_operators_of_a_meters_class_may_change_what_they_are_given(layer: Any) -> None:
    assert sinks_of(layer, Streaming()) == []


def test_what_an_iterator_made_before_leads_to_is_read() -> None:
    class Log(Holding):
        def __init__(self, make: Any, log: Any) -> None:
            super().__init__(log)
            self.log, self.earlier = log, make(log)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.lin(x)
            self.log[len(self.log)] = float(x.mean())
            return x * next(iter(self.earlier))

    made: Any = (dict.values, dict.items, iter, lambda log: map(abs, log), lambda log: (one for one in log))
    for make in made:
        assert sinks_of(functools.partial(Log, make), {0: 1.0}) == []


def test_a_meter_that_a_module_keeps_may_be_a_sink() -> None:
    class Told(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            STATE.TOLD.update(float(x.mean()))
            return x

    STATE.TOLD = AverageMeter()
    assert [type(one) for one in Reach(nn.Sequential(Told(4, 4)), lambda path: 1).sinks.values()] == [AverageMeter]
