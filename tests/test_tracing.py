"""What a watcher is told, that nobody else notices, and what the moments and functions are called."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from partitioner.tracing import RANDOM, Watcher, function_name, is_read, may_draw, unwatched, unwrap, watching


class Listening(Watcher):
    """Writes down all that it is told, and lets everything run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__({module: name for name, module in model.named_modules()})
        self.heard: list[str] = []

    def on_call(self, path: str, module: nn.Module, run: Callable, args: tuple, kwargs: dict) -> Any:
        call_id = self.enter(path)
        self.at(f">{call_id}")
        self.heard.append(f"call {call_id}")
        result = run(*args, **kwargs)
        self.at(call_id)
        return result

    def on_transform(self, name: str, run: Any, args: Any, kwargs: Any) -> Any:
        self.heard.append(name)
        return run(*args, **kwargs)

    def on_hidden_apply(self, args: Any, kwargs: Any) -> None:
        self.heard.append("hidden apply")

    def on_hidden_call(self, module: nn.Module) -> None:
        self.heard.append(f"hidden {type(module).__name__}")

    def on_function(self, name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
        self.heard.append(f"{self.next_name()} {name}")
        return func(*args, **kwargs)

    def on_checkpoint(self, run: Callable, args: tuple, kwargs: dict) -> Any:
        self.heard.append("checkpoint")
        return run(*args, **kwargs)

    def on_region(self, what: str) -> None:
        self.heard.append(f"region {what}")


def heard(model: nn.Module, *args: Any) -> list[str]:
    watcher = Listening(model)
    with watching(watcher):
        model(*args)
    return watcher.heard


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x + 1) * 2
        assert x.shape == (2,) and x.dtype == torch.float32 and x.is_contiguous() and len(x) == 2
        return self.layer(x).sum().item()


def test_moments_name_calls_and_functions_in_their_order() -> None:
    assert heard(Twice(), torch.ones(2)) == [
        "call ",
        ">/0 add",
        "call layer",
        "layer/0 mul",
        "call layer#1",
        "layer#1/0 sum",
        "layer#1/1 item",
    ]


def test_everything_is_as_before_afterwards_also_when_an_error_passes() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("mine")

    apply = torch.autograd.Function.apply
    with pytest.raises(ValueError, match="mine"), watching(Listening(Failing())):
        Failing()(torch.ones(1))
    model = Failing()
    with pytest.raises(ValueError, match="mine"), watching(Listening(model)):
        model(torch.ones(1))
    assert "_call_impl" not in vars(model)
    assert torch.autograd.Function.apply == apply
    assert torch.overrides._get_current_function_mode() is None
    with watching(Listening(model)):  # and it can be done again
        torch.ones(1) + 1


def test_what_is_unwatched_is_not_told() -> None:
    model = Twice()
    watcher = Listening(model)
    with watching(watcher):
        with unwatched():
            model(torch.ones(2))
        torch.zeros(1)
    assert watcher.heard == ["/0 zeros"]


def test_other_threads_are_left_alone_and_may_watch_at_the_same_time() -> None:
    first, second, x = Twice(), Twice(), torch.ones(2)
    found: dict[str, list[str]] = {}
    inside, done = threading.Event(), threading.Event()

    def elsewhere() -> None:
        inside.wait(5)
        second(x)
        found["second"] = heard(second, x)
        done.set()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    watcher = Listening(first)
    with watching(watcher):
        inside.set()
        assert done.wait(5)
        first(x)  # the other thread's end must not have ended this watch
    thread.join()
    assert len(watcher.heard) == len(found["second"]) == 7


def test_a_custom_function_is_one_function_and_hides_what_it_calls() -> None:
    class Calls(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
            return Inner.apply(layer(x + 1))

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
            return g, None

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Calls.apply(x, self.layer) + 1

    name = Calls.__qualname__
    assert heard(Model(), torch.ones(2)) == ["call ", f">/0 apply {name}", "hidden Identity", "hidden apply", ">/1 add"]


def test_checkpoints_of_both_kinds_are_told_and_their_inside_too() -> None:
    class Model(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.layer, self.reentrant = nn.Identity(), reentrant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.layer, x, use_reentrant=self.reentrant)

    x = torch.ones(2, requires_grad=True)
    told = [[line for line in heard(Model(reentrant), x) if "/" not in line] for reentrant in (True, False)]
    assert told[0] == ["call ", "checkpoint", "call layer"]
    assert told[1] == ["call ", "region begins", "region entered", "call layer", "region left"]


def test_properties_and_iteration_are_told_apart_from_reads() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not x.requires_grad and x.device.type == "cpu" and x.ndim == 2
            first, _ = x
            assert x.T is not x.data
            x.requires_grad = False
            x.data = x * 1
            return f"{first.sum()}"

    assert [line.split(" ", 1)[1] for line in heard(Model(), torch.ones(2, 2))[1:]] == [
        "unbind",
        "get T",
        "get data",
        "mul",
        "set data",
        "sum",
        "__format__",
    ]


def test_functions_that_torch_tags_as_random_are_known_to_draw() -> None:
    """Those an eager program can call; kernels below them are never seen by a function mode."""
    missing = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        overloads = packet.overloads() if hasattr(packet, "overloads") else []
        if any(torch.Tag.nondeterministic_seeded in getattr(packet, one).tags for one in overloads):
            is_called = hasattr(torch, name) or hasattr(torch.Tensor, name) or hasattr(nn.functional, name)
            if is_called and not name.startswith("_") and name not in RANDOM:
                missing.add(name)
    assert missing <= {"rrelu_with_noise", "rrelu_with_noise_", "miopen_rnn"}, "drawn by rrelu; only on ROCm"
    assert may_draw("dropout", nn.functional.dropout)
    assert may_draw("apply Mine", lambda: None)
    assert may_draw("aten.add", torch.ops.aten.add.Tensor)
    assert not may_draw("add", torch.add)


def test_names_of_properties() -> None:
    assert function_name(torch.Tensor.T.__get__) == "get T"
    assert not is_read("get T")
    assert is_read("get shape")
    assert not is_read("set data")
    assert is_read("set requires_grad")


def test_wrappers_are_taken_off() -> None:
    inner = nn.Linear(2, 2)
    assert unwrap(nn.DataParallel(torch.compile(inner, backend="eager"))) is inner
