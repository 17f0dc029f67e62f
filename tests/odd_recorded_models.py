"""Odd modules that keep records as they go: meters, histories and logs that nobody reads in the forward.

Entries as in `odd_models`. What is recorded only now and then is not seen while a model is captured.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from models import Case
from odd_models import adding_to, lin
from torch import nn

RECORDED: dict[str, Callable[[], Case]] = {}


odd, case = adding_to(RECORDED)


class AverageMeter:
    """As in PyTorch's own example of training on ImageNet: the last value, the sum, the mean."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.reset()

    def reset(self) -> None:
        self.val = self.avg = self.sum = 0.0
        self.count = 0

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self) -> str:
        return f"{self.name} {self.val:.3f} ({self.avg:.3f})"


class Running:
    """Mean and variance of all that came (Welford)."""

    def __init__(self) -> None:
        self.n, self.mean, self.m2 = 0, 0.0, 0.0

    def push(self, x: float) -> None:
        self.n += 1
        delta = x - self.mean
        self.mean += delta / self.n
        self.m2 += delta * (x - self.mean)

    @property
    def std(self) -> float:
        return math.sqrt(self.m2 / max(1, self.n - 1))


class History:
    """Lists by name, and how often each was written."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.counts: dict[str, int] = defaultdict(int)

    def add(self, name: str, value: float) -> None:
        if name not in self.values:
            self.values[name] = []
        self.values[name].append(float(value))
        self.counts[name] += 1
        if len(self.values[name]) > 10:
            self.values[name].pop(0)


class Recording(nn.Module):
    """Calls `record` in every third of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = lin(), 0

    def record(self, x: torch.Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.tanh(self.layer(x))
        if self.calls % 3 == 0:
            self.record(x.detach())
        return x


@odd
def meters_are_updated_now_and_then() -> nn.Module:
    class Layer(Recording):
        def __init__(self, meter: AverageMeter) -> None:
            super().__init__()
            self.meter = meter

        def record(self, x: torch.Tensor) -> None:
            self.meter.update(x.abs().mean().item(), len(x))

    meter = AverageMeter("mean")
    return nn.Sequential(*(Layer(meter) for _ in range(5)))


@odd
def meters_are_updated_always() -> nn.Module:
    """Two of them, one by name in a dict."""

    class Layer(nn.Module):
        def __init__(self, meters: dict[str, AverageMeter], spread: Running) -> None:
            super().__init__()
            self.layer, self.meters, self.spread = lin(), meters, spread

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.layer(x))
            self.meters["mean"].update(float(x.detach().mean()))
            self.spread.push(x.detach().std().item())
            return x

    meters, spread = {"mean": AverageMeter(), "other": AverageMeter()}, Running()
    return nn.Sequential(*(Layer(meters, spread) for _ in range(5)))


@odd
def histories_are_kept_where_values_are_large() -> nn.Module:
    class Layer(nn.Module):
        def __init__(self, history: History, number: int) -> None:
            super().__init__()
            self.layer, self.history, self.number = lin(), history, number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.layer(x))
            largest = x.detach().max()
            if self.training and float(largest) > 0.6:
                self.history.add(f"saturated/{self.number}", largest)
            return x

    history = History()
    return nn.Sequential(*(Layer(history, k) for k in range(5)))


@odd
def a_log_is_begun_and_ended_in_glue() -> nn.Module:
    """A dict on the model, made anew by each forward: entries at the start, from layers, now and then at the end."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(lin() for _ in range(5))
            self.calls, self.log, self.losses = 0, {}, []  # type: ignore[var-annotated]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.log = {}
            self.log["input"] = float(x.mean())
            for k, layer in enumerate(self.layers):
                x = torch.tanh(layer(x))
                self.log.setdefault("means", []).append((k, x.detach().mean().item()))
            self.calls += 1
            if self.calls % 5 == 0:
                self.log["step"] = self.calls
                self.losses.append(float(x.detach().square().mean()))
            return x.exp().log()

    return Model()


@odd
def hooks_write_into_one_recorder() -> nn.Module:
    """Bound methods and objects with `__call__` as hooks, and a closure that keeps the largest value."""

    class Recorder:
        def __init__(self) -> None:
            self.seen: dict[str, list[torch.Tensor]] = defaultdict(list)
            self.calls = 0

        def hook(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.calls += 1
            if self.calls % 4 == 0:
                self.seen[type(module).__name__].append(output.detach().mean(0))

    class Largest:
        def __init__(self) -> None:
            self.value = 0.0

        def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.value = max(self.value, output.detach().max().item())

    recorder, largest, stats = Recorder(), Largest(), AverageMeter()
    layers = [lin() for _ in range(5)]

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if float(output.detach().mean()) > 0:
            stats.update(float(output.detach().mean()))

    for layer in layers:
        layer.register_forward_hook(recorder.hook)
        layer.register_forward_hook(largest)
        layer.register_forward_hook(hook)
    return nn.Sequential(*(one for layer in layers for one in (layer, nn.Tanh())))


@odd
def meters_in_a_dict_that_grows() -> nn.Module:
    """Each layer's meter comes to be with its first value, some only after some steps; rows beside them."""

    class Log:
        def __init__(self) -> None:
            self.rows: list[tuple[str, float]] = []
            self.meters: dict[str, AverageMeter] = {}

        def log(self, name: str, value: float) -> None:
            self.rows.append((name, value))
            self.meters.setdefault(name, AverageMeter(name)).update(value)

    class Layer(Recording):
        def __init__(self, log: Log, number: int) -> None:
            super().__init__()
            self.log, self.number = log, number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            self.log.log(f"mean/{self.number}", x.detach().mean().item())
            return x

        def record(self, x: torch.Tensor) -> None:
            self.log.log(f"largest/{self.number}", x.max().item())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log = Log()
            self.first, self.layers = lin(), nn.ModuleList(Layer(self.log, k) for k in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return x

    return Model()


@odd
def windows_of_values_by_name() -> nn.Module:
    """As loggers of training loops have them: smoothed values by name, medians of which are there to be printed."""

    class Smoothed:
        def __init__(self, size: int = 20) -> None:
            self.window: deque[float] = deque(maxlen=size)
            self.total, self.count = 0.0, 0

        def update(self, value: float, n: int = 1) -> None:
            self.window.append(value)
            self.count += n
            self.total += value * n

        @property
        def median(self) -> float:
            return torch.tensor(list(self.window)).median().item()

    class Logger:
        def __init__(self) -> None:
            self.values: dict[str, Smoothed] = defaultdict(Smoothed)
            self.latest: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

        def update(self, **values: Any) -> None:
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    value = value.item()
                self.values[name].update(value)

        def __getattr__(self, name: str) -> Any:
            if name in self.__dict__.get("values", ()):
                return self.values[name]
            raise AttributeError(name)

        def __str__(self) -> str:
            return " ".join(f"{name} {value.median}" for name, value in self.values.items())

    class Layer(nn.Module):
        def __init__(self, logger: Logger, number: int) -> None:
            super().__init__()
            self.layer, self.logger, self.number = lin(), logger, number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.layer(x))
            self.logger.update(mean=x.detach().mean(), largest=x.max().item())
            self.logger.latest["norm"][f"layer {self.number}"].append(x.detach().norm().item())
            return x

    logger = Logger()
    return nn.Sequential(*(Layer(logger, k) for k in range(5)))


@odd
def records_in_a_list_that_grows() -> nn.Module:
    """One object for each layer, in a list on the model that has none at first."""

    @dataclass
    class Record:
        largest: float = 0.0
        values: list[float] = field(default_factory=list)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(lin() for _ in range(5))
            self.records: list[Record] = []

        def note(self, k: int, value: float) -> None:
            while len(self.records) <= k:
                self.records.append(Record())
            self.records[k].largest = max(self.records[k].largest, value)
            self.records[k].values.append(value)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k, layer in enumerate(self.layers):
                x = torch.tanh(layer(x))
                self.note(k, x.max().item())
            return x

    return Model()
