"""Small modules that do what modules rarely do; each is a way in which cutting a forward once went wrong or could.

Every entry of ODD gives a `Case`; run it twice in a row, since some change their own state.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from models import Case
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

D = 8
ODD: dict[str, Callable[[], Case]] = {}


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    ODD[build.__name__] = build
    return build


Make = Callable[[], nn.Module]
Build = Callable[[], Case]


def adding_to(
    table: dict[str, Build], around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> tuple[Callable[[Make], Make], Callable[[Build], Build]]:
    """(odd, case) that put modules, and whole cases, into another table; what builds them runs inside `around()`."""

    def odd(make: Make) -> Make:
        def build() -> Case:
            torch.manual_seed(0)
            with around():
                model = make()
            torch.manual_seed(1)
            return Case(model, (torch.randn(4, D),), loss_fn=squares)

        table[make.__name__] = build
        return make

    def case(build: Build) -> Build:
        def seeded() -> Case:
            torch.manual_seed(0)
            with around():
                return build()

        table[build.__name__] = seeded
        return build

    return odd, case


odd, _ = adding_to(ODD)


def squares(output: Any, target: None) -> torch.Tensor:
    from partitioner.structures import tensors_in

    found = [t for t in tensors_in(output) if t.is_floating_point() or t.is_complex()]
    return torch.stack([t.abs().pow(2).mean() for t in found]).sum()


def lin(a: int = D, b: int = D) -> nn.Linear:
    return nn.Linear(a, b)


class Blocks(nn.Module):
    """Four linear layers to be used by a subclass's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = lin(), lin(), lin(), lin()


def of(forward: Callable[..., Any], init: Callable[[Any], None] | None = None) -> type[Blocks]:
    """A class of `Blocks` with this forward, and more in its __init__."""

    class Made(Blocks):
        def __init__(self) -> None:
            super().__init__()
            if init is not None:
                init(self)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

    Made.__name__ = Made.__qualname__ = forward.__qualname__.split(".")[0].title()
    return Made


# -- containers


@dataclass
class Record:
    x: torch.Tensor
    extra: Any = None
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    depth: int = 0


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


OldPair = namedtuple("OldPair", "left right")


class PlainOutput:
    """Neither a dataclass nor a container."""

    def __init__(self, x: torch.Tensor, note: str) -> None:
        self.x, self.note = x, note


class Wrapped(nn.Module):
    """A linear layer that takes and gives its tensor inside something."""

    def __init__(self, take: Callable[[Any], torch.Tensor], give: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.take, self.give = lin(), take, give

    def forward(self, item: Any) -> Any:
        return self.give(torch.tanh(self.inner(self.take(item))), item)


class Carried(nn.Module):
    def __init__(self, start: Callable[[Any], Any], take: Callable[[Any], Any], give: Callable[..., Any]) -> None:
        super().__init__()
        self.start, self.take = start, take
        self.layers = nn.ModuleList(Wrapped(take, give) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        item = self.start(x)
        for layer in self.layers:
            item = layer(item)
        return self.take(item)


def _carried(name: str, start: Any, take: Any, give: Any) -> None:
    def make() -> nn.Module:
        return Carried(start, take, give)

    make.__name__ = name
    odd(make)


_carried("carries_a_dataclass", lambda x: Record(x), lambda r: r.x, lambda y, r: Record(y, {"old": [r.x]}, r.depth + 1))
_carried("carries_a_slotted_dataclass", lambda x: Slotted(x), lambda r: r.x, lambda y, r: Slotted(y, r.depth + 1))
_carried("carries_a_named_tuple", lambda x: Pair(x, None), lambda p: p.left, lambda y, p: Pair(y, (p.left, 3, None)))
_carried("carries_an_old_named_tuple", lambda x: OldPair(x, 1), lambda p: p.left, lambda y, p: OldPair(y, p.right + 1))
_carried("carries_nested_lists", lambda x: [[x, None], {"k": 1}], lambda i: i[0][0], lambda y, i: [[y, "s"], {"k": y}])
_carried(
    "carries_an_ordered_dict", lambda x: OrderedDict(x=x), lambda d: d["x"], lambda y, d: OrderedDict(old=d["x"], x=y)
)
_carried("carries_a_namespace", lambda x: SimpleNamespace(x=x), lambda s: s.x, lambda y, s: SimpleNamespace(x=y, n=3))
_carried("carries_a_deque", lambda x: deque([x], 3), lambda q: q[-1], lambda y, q: deque([*q, y], 3))
_carried(
    "carries_a_plain_object", lambda x: PlainOutput(x, ""), lambda p: p.x, lambda y, p: PlainOutput(y, p.note + "a")
)
_carried("carries_an_integer_tensor", lambda x: (x, torch.arange(4)), lambda p: p[0], lambda y, p: (y, p[1] + 1))


@odd
def appends_to_a_list_argument() -> nn.Module:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, x: torch.Tensor, history: list, notes: dict) -> torch.Tensor:
            y = torch.tanh(self.inner(x))
            history.append(y)
            notes["count"] = notes.get("count", 0) + 1
            return y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            history, notes = [x], {}
            for layer in self.layers:
                x = layer(x, history, notes) * notes["count"]
            return torch.cat(history, 1).sum(1) * notes["count"] + len(history)

    return Model()


@odd
def changes_the_dict_it_got_and_returns_it() -> nn.Module:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, state: dict) -> dict:
            state["x"] = torch.tanh(self.inner(state["x"]))
            state["depth"] += 1
            return state

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = {"x": x, "depth": 1}
            for layer in self.layers:
                layer(state)
            return state["x"] * state["depth"]

    return Model()


@odd
def structseq_between_layers() -> nn.Module:
    class Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x).topk(4, dim=1)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        best = self.top(self.a(x))
        y = self.b(best.values.repeat(1, 2))
        return y.gather(1, best.indices) + self.c(y)[:, :4]

    return of(forward, lambda self: setattr(self, "top", Top()))()


@odd
def star_args_and_kwargs() -> nn.Module:
    class Any_(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            y = self.inner(sum(args)) * kwargs["scale"]
            return (y, *args[:2]), {"scale": kwargs["scale"] / 2}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({name: Any_() for name in ("one", "two", "three")})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            args, kwargs = (x,), {"scale": 1.0}
            for layer in self.layers.values():
                args, kwargs = layer(*args, **kwargs)
            return torch.cat(args, 1)

    return Model()


# -- memory


@odd
def in_place_on_a_received_tensor() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x += 1
        y = self.b(x.clone())
        y.mul_(2).add_(x)
        z = self.c(y.clone())
        z[:, 0] = 0
        return self.d(z) + y

    return of(forward)()


@odd
def in_place_layers() -> nn.Module:
    return nn.Sequential(
        lin(), nn.ReLU(inplace=True), lin(), nn.ELU(inplace=True), lin(), nn.Hardtanh(inplace=True), lin()
    )


@odd
def in_place_seen_through_another_name() -> nn.Module:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x.add_(1)
            return self.inner(x.detach().clone())

    class Model(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.adds = Adds()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = self.a(x).detach()
            y = self.b(x)
            z = self.adds(state)
            return self.c(y) + self.d(z) + state

    return Model()


@odd
def views_cross_the_cut() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        left, right = x.view(4, 2, 4).unbind(1)
        wide = x[:, :1].expand(4, D)
        turned = x.t()
        y = self.b(x)
        z = self.c(torch.cat([left, right], 1) + wide) + (turned @ y)[:4]
        return self.d(z) + turned[:4].repeat(1, 2) + wide.as_strided((4, 8), (8, 0))

    return of(forward)()


@odd
def strides_matter_after_the_cut() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).t()
        y = self.b(x.t())
        if x.is_contiguous():
            y = y * 3
        return self.c(y) + x.as_strided((4, 8), (8, 1)) * 2

    return of(forward)()


@odd
def view_changed_in_place_after_a_layer() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(4, 3 * D)
        head = out[:, :D]
        head.copy_(self.a(x))
        y = self.b(head.clone())
        out[:, D : 2 * D] = y
        z = self.c(y)
        out[:, 2 * D :] = z
        return self.d(z).sum() + out

    return of(forward)()


@odd
def data_is_set() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        kept = torch.zeros(4, D)
        y = self.b(x)
        kept.data = y.detach() * 2
        z = self.c(y)
        y.data.mul_(3)
        return self.d(z) + kept + y

    return of(forward)()


@odd
def writes_into_its_input() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x.clone())
        x.mul_(0.5)
        z = self.b(y + x)
        x.add_(z.detach())
        return self.d(self.c(z)) + x

    return of(forward)()


@odd
def rows_are_filled_one_by_one() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(4, D)
        for k, layer in enumerate((self.a, self.b, self.c, self.d)):
            out[k] = layer(x[k])
        return out

    return of(forward)()


@odd
def channels_last_images() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.view(4, 1, 2, 4).expand(4, 4, 2, 4).contiguous(memory_format=torch.channels_last)
            for layer in self.layers:
                x = layer(x)
            assert x.is_contiguous(memory_format=torch.channels_last)
            return x.as_strided((4, 32), (32, 1))

    return Model()


# -- autograd


class Doubled(torch.autograd.Function):
    """Its gradient is deliberately not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * 7 + x * 0.1, None


@odd
def custom_function_in_glue() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = Doubled.apply(self.a(x), 0.5)
        x = Doubled.apply(self.b(x), 0.5)
        return Doubled.apply(self.d(self.c(x)), 2.0)

    return of(forward)()


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


@odd
def custom_function_that_draws_on_the_input() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        noisy = Noisy.apply(x)
        y = self.b(self.a(x))
        return self.d(self.c(y + noisy)) * noisy

    return of(forward)()


def _checkpointed(reentrant: bool, span: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = lin()
                self.layers = nn.ModuleList(nn.Sequential(lin(), nn.Tanh(), nn.Dropout(0.2), lin()) for _ in range(4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.first(x)
                for k in range(0, 4, span):

                    def run(x: torch.Tensor, k: int = k) -> torch.Tensor:
                        for layer in self.layers[k : k + span]:
                            x = x + layer(x)
                        return x

                    x = checkpoint(run, x, use_reentrant=reentrant)
                return x

        return Model()

    make.__name__ = f"checkpoint_{'reentrant' if reentrant else 'hooked'}_over_{span}"
    return make


for _reentrant in (True, False):
    for _span in (1, 2, 4):
        odd(_checkpointed(_reentrant, _span))


@odd
def checkpoint_of_modules_directly() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.a, x.requires_grad_(), use_reentrant=True)
        x = checkpoint(self.b, x, use_reentrant=False)
        x = checkpoint(self.c, x, use_reentrant=True)
        return self.d(x)

    return of(forward)()


@odd
def checkpoint_sequential_inside() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.body, self.last = lin(), nn.Sequential(*(lin() for _ in range(6))), lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint_sequential(self.body, 3, self.first(x), use_reentrant=False))

    return Model()


@odd
def autograd_grad_in_forward() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).detach().requires_grad_()
        energy = self.c(torch.tanh(self.b(x))).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.d(force) + energy

    return of(forward)()


@odd
def gradient_with_respect_to_the_input() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True, allow_unused=True)
        return self.d(y) + (0 if g is None else g)

    return of(forward)()


@odd
def backward_inside_forward() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).detach().requires_grad_()
        with torch.enable_grad():
            torch.tanh(self.b(x)).sum().backward()
        return self.d(self.c(x + x.grad))

    return of(forward)()


@odd
def no_grad_parts() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fixed = self.b(self.a(x))
            fixed = fixed + 1
        y = self.c(fixed)
        return self.d(y) + fixed.detach()

    return of(forward)()


@odd
def detached_teacher() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.b(torch.relu(self.a(x)))
        return F.mse_loss(self.d(torch.relu(self.c(x))), target)

    return of(forward)()


@odd
def tensor_hooks_change_the_gradient() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if x.requires_grad:
            x.register_hook(lambda g: g * 3)
        y = self.b(x)
        if y.requires_grad:
            y.register_hook(lambda g: g.clamp(-0.01, 0.01))
            y.retain_grad()
        return self.d(self.c(y) + x)

    return of(forward)()


@odd
def straight_through_estimator() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        hard = (x > 0).float()
        x = self.b(x + (hard - x).detach())
        return self.d(self.c(x) * hard)

    return of(forward)()


@odd
def gradient_reversal_and_scaling() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        y = self.b(x * -0.1 + x.detach() * 1.1)
        return torch.cat([self.c(y), self.d(x)], 1)

    return of(forward)()


# -- decisions and host values


@odd
def branches_on_values() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = self.b(x) if x.mean() > 0 else self.c(x)
        scale = x.abs().max().item()
        x = x * (1 if scale > 1 else 2)
        n = int((x > 0).sum()) % 3
        for _ in range(n):
            x = torch.tanh(x)
        return self.d(x) + float(x.sum()) + math.sqrt(abs(x.sum()))

    return of(forward)()


@odd
def numpy_round_trip() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        order = np.argsort(x.detach().numpy().sum(1)).copy()
        x = self.b(x[torch.from_numpy(order)])
        scale = torch.tensor(np.asarray(x.detach()).std(), dtype=torch.float32)
        return self.d(self.c(x)) * scale + torch.as_tensor(x.detach().numpy() * 2)

    return of(forward)()


@odd
def boolean_indexing_in_glue() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        keep = x[:, 0] > x[:, 0].median()
        y = self.b(x[keep])
        x = x.masked_scatter(keep[:, None].expand_as(x), y)
        z = self.c(x)
        z[~keep] = 0.5
        where = keep.nonzero().flatten()
        return self.d(z).index_add(0, where, y)

    return of(forward)()


@odd
def experts_by_boolean_masks() -> nn.Module:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = lin(D, 3), nn.ModuleList(lin() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, chosen = self.gate(x).softmax(1).max(1)
            out = torch.zeros_like(x)
            for k, expert in enumerate(self.experts):
                mine = (chosen == k).nonzero().flatten()
                if len(mine):
                    out.index_add_(0, mine, expert(x[mine]) * weights[mine, None])
            return x + out

    return nn.Sequential(lin(), Experts(), Experts(), lin())


@odd
def early_exit() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(lin() for _ in range(4))
            self.head = lin(D, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
                if random.random() < 0.25:
                    break
            return self.head(x)

    return Model()


@odd
def stochastic_depth() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(lin(), nn.Tanh()) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                if torch.rand([]) < 0.7:
                    x = x + layer(x)
            return x

    return Model()


@odd
def random_decisions_inside_layers() -> nn.Module:
    """Python's and NumPy's random numbers drawn inside layers and again between them."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * random.uniform(0.5, 1.5) + float(np.random.rand())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x) + random.random() * np.random.rand()
            return x

    return Model()


@odd
def dropout_everywhere() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.3, True)
        keep = torch.rand(x.shape[0], 1) > 0.2
        x = self.b(F.dropout(torch.relu(self.a(x)), 0.3, True)) * keep
        x = F.feature_alpha_dropout(self.c(x), 0.2, True) + torch.randn_like(x) * torch.empty(4, 1).uniform_()
        return self.d(F.gumbel_softmax(x, dim=1)) * keep

    return of(forward)()


@odd
def generator_of_its_own() -> nn.Module:
    def init(self: Any) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x) * torch.rand(D, generator=self.generator)
        x = self.b(x) * torch.rand(D, generator=self.generator)
        return self.d(self.c(x)) + torch.rand(D, generator=self.generator)

    return of(forward, init)()


@odd
def loops_with_data_dependent_length() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x, steps = self.a(x), 0
        while x.norm() > 0.6 and steps < 5:
            x, steps = self.b(x) * 0.7, steps + 1
        return self.d(self.c(x)) * steps

    return of(forward)()


# -- state


@odd
def batch_norm_chain() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (lin(), nn.BatchNorm1d(D), nn.ReLU())))


@odd
def running_counter_in_buffers() -> nn.Module:
    def init(self: Any) -> None:
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(D))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x = self.a(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        y = self.b(x - self.mean)
        return self.d(self.c(y)) / self.steps

    return of(forward, init)()


@odd
def buffer_replaced_by_assignment() -> nn.Module:
    def init(self: Any) -> None:
        self.register_buffer("mean", torch.zeros(D))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x - self.mean)
        y = self.b(x)
        self.mean = 0.5 * self.mean + y.detach().mean(0)
        return self.d(self.c(y))

    return of(forward, init)()


@odd
def buffer_written_late_read_early() -> nn.Module:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()
            self.register_buffer("usage", torch.zeros(D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            self.usage = self.usage * 0.5 + y.detach().mean(0)
            return y

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x) + self.writes.usage)
        return self.d(self.c(self.writes(x)))

    return of(forward, lambda self: setattr(self, "writes", Writes()))()


class Whisperer(nn.Module):
    """Says a number to the model around it, past everything that is told when attributes are set."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.model = lin(), [model]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        vars(self.model[0])["said"] = float(x.detach().abs().sum())
        return x


@odd
def attribute_set_past_setattr() -> nn.Module:
    def init(self: Any) -> None:
        self.said, self.b = 1.0, Whisperer(self)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.c(torch.tanh(self.b(self.a(x))))
        return self.d(x * self.said)

    return of(forward, init)()


@odd
def python_counter_in_glue() -> nn.Module:
    def init(self: Any) -> None:
        self.calls = 0

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x)) * (1 + self.calls)
        x = self.c(x)
        self.calls += 1
        return self.d(x) * self.calls

    return of(forward, init)()


class Counting(nn.Module):
    """Notes in Python what its layers saw."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = lin()
        self.level, self.seen = 1.0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.level = float(y.detach().abs().mean())
        self.seen.append(len(self.seen))
        return y


@odd
def python_number_left_in_a_layer() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.counting(self.a(x))
        x = self.c(self.b(x))
        return self.d(x) * self.counting.level

    return of(forward, lambda self: setattr(self, "counting", Counting()))()


@odd
def python_list_grows_in_a_layer() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x)) * (1 + len(self.counting.seen))
        x = self.counting(x)
        return self.d(self.c(x)) * len(self.counting.seen)

    return of(forward, lambda self: setattr(self, "counting", Counting()))()


@odd
def tensor_left_in_an_attribute() -> nn.Module:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = lin(), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = torch.tanh(self.inner(x))
            return self.last * 2

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.leaves(self.a(x))
        x = self.c(self.b(x))
        return self.d(x) + self.leaves.last

    return of(forward, lambda self: setattr(self, "leaves", Leaves()))()


@odd
def recurrent_state_in_an_attribute() -> nn.Module:
    def init(self: Any) -> None:
        self.state = None

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        old = torch.zeros(4, D) if self.state is None else self.state
        x = self.b(self.a(x) + old)
        y = self.c(x)
        self.state = y.detach()
        return self.d(y)

    return of(forward, init)()


@odd
def memory_bank_in_a_list() -> nn.Module:
    def init(self: Any) -> None:
        self.bank = [torch.zeros(4, D)]

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x))
        x = self.c(x + torch.stack(self.bank).mean(0))
        self.bank.append(x.detach())
        return self.d(x)

    return of(forward, init)()


@odd
def lazily_built_table() -> nn.Module:
    def init(self: Any) -> None:
        self.table = None

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.sin(torch.arange(D).float())
        x = self.b(self.a(x) + self.table)
        return self.d(self.c(x) * self.table)

    return of(forward, init)()


@odd
def forward_hooks_collect() -> nn.Module:
    """The way router logits and attentions are collected: hooks on modules deep inside."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.inner = lin(D, 3), lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.gate(x).softmax(1)[:, :1]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Router() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: list[torch.Tensor] = []
            handles = [
                layer.gate.register_forward_hook(lambda module, args, out: found.append(out)) for layer in self.layers
            ]
            for layer in self.layers:
                x = layer(x)
            for handle in handles:
                handle.remove()
            return x.mean() + torch.stack(found).logsumexp(-1).mean()

    return Model()


@odd
def hooks_that_change_what_passes() -> nn.Module:
    model = nn.Sequential(lin(), lin(), lin(), lin())
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[2].register_full_backward_hook(lambda module, gi, go: tuple(g * 3 for g in gi))
    model[3].register_full_backward_pre_hook(lambda module, go: tuple(g * 2 for g in go))
    model[2].weight.register_hook(lambda g: g * 5)
    return model


@odd
def hook_on_the_model_itself() -> nn.Module:
    model = nn.Sequential(lin(), lin(), lin())
    model.register_forward_hook(lambda module, args, out: torch.tanh(out))
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return model


# -- parameters


@odd
def weights_used_outside_a_call() -> nn.Module:
    def init(self: Any) -> None:
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x) * self.scale
        x = F.linear(self.b(x), self.d.weight.t() * 0.5)
        x = self.c(x) * self.scale.exp()
        return F.linear(x, self.a.weight + self.d.weight, self.d.bias)

    return of(forward, init)()


@odd
def tied_in_three_ways() -> nn.Module:
    class Reads(nn.Module):
        def __init__(self, other: nn.Linear) -> None:
            super().__init__()
            self.others = [other]
            self.bias = nn.Parameter(torch.zeros(D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.others[0].weight + self.bias

    class Model(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.c.weight = self.a.weight
            self.e = self.b
            self.reads = Reads(self.a)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.d(self.reads(self.e(self.c(self.b(self.a(x))))))

    return Model()


@odd
def one_layer_many_times() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer, self.outer = nn.LayerNorm(D), nn.Sequential(lin(), nn.Tanh()), lin()
            self.deep = nn.Sequential(lin(), self.norm, lin())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = self.norm(self.layer(x))
                x = x + self.deep(x)
            return self.norm(self.outer(x))

    return Model()


@odd
def frozen_parts_and_lora() -> nn.Module:
    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down, self.up = lin(), nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)
            self.base.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    model = nn.Sequential(lin(), Lora(), lin(), Lora(), lin())
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return model


@odd
def frozen_to_the_cut() -> nn.Module:
    model = nn.Sequential(lin(), lin(), lin(), lin())
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    return model


@odd
def parametrized_weights() -> nn.Module:
    model = nn.Sequential(lin(), lin(), lin(), lin(), lin())
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[1])
    nn.utils.parametrizations.orthogonal(model[2])
    with_hooks = torch.nn.utils.spectral_norm(model[3])
    assert with_hooks is model[3]
    return model


@odd
def weights_made_by_another_network() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight = self.b(self.a(x)).T @ x
        x = F.linear(self.c(x), weight)
        return self.d(F.linear(x, weight.t()))

    return of(forward)()


@odd
def functional_call_inside() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        fast = {name: p * 0.9 for name, p in self.b.named_parameters()}
        x = torch.func.functional_call(self.b, fast, (x,))
        return self.d(self.c(x))

    return of(forward)()


@odd
def parameters_in_parameter_lists() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(D, D) / 4) for _ in range(4))
            self.named = nn.ParameterDict({"g": nn.Parameter(torch.ones(D))})
            self.acts = nn.ModuleList(nn.Tanh() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight, act in zip(self.weights, self.acts, strict=True):
                x = act(x @ weight) * self.named["g"]
            return x

    return Model()


@odd
def unused_parameters() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.a(x))

    return of(forward)()


# -- around torch


@case
def packed_sequences() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.one, self.two = nn.Embedding(20, D), nn.LSTM(D, D), nn.GRU(D, D)
            self.head = lin()

        def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
            packed, (h, _) = self.one(packed)
            packed, _ = self.two(packed, h)
            x, sizes = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
            return self.head(x) * sizes[:, None, None]

    torch.manual_seed(0)
    ids = torch.randint(0, 20, (4, 6))
    return Case(Model(), (ids, torch.tensor([6, 2, 5, 3])), loss_fn=squares)


@case
def embedding_bags_and_sparse_gradients() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(30, D, mode="sum", sparse=True)
            self.embed = nn.Embedding(30, D, sparse=True)
            self.mlp, self.head = nn.Sequential(lin(), nn.ReLU(), lin()), lin()

        def forward(self, ids: torch.Tensor, offsets: torch.Tensor, single: torch.Tensor) -> torch.Tensor:
            return self.head(self.mlp(self.bag(ids, offsets)) + self.embed(single))

    torch.manual_seed(0)
    inputs = (torch.randint(0, 30, (12,)), torch.tensor([0, 3, 5, 9]), torch.randint(0, 30, (4,)))
    return Case(Model(), inputs, loss_fn=squares)


@odd
def complex_numbers() -> nn.Module:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D // 2 + 1, dtype=torch.cfloat))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(x) * self.weight

    class Model(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Spectral(), Spectral()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spectrum = self.one(self.a(x))
            y = torch.fft.irfft(spectrum.conj(), n=D)
            z = self.two(self.b(y)) * spectrum.conj()
            return self.d(self.c(torch.view_as_real(z).flatten(1)[:, :D])) + z.abs().sum() + spectrum.imag.sum()

    return Model()


@odd
def autocast_inside() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.a(x)
            y = self.b(x) + self.a.weight.sum()
            with torch.autocast("cpu", enabled=False):
                y = self.c(y.float())
            y = self.d(y)
        return y.float() + x

    return of(forward)()


@odd
def half_precision_parts() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).double()
        x = self.b.double()(x).float() if False else self.b(x.float())
        return self.d(self.c(x).to(torch.bfloat16).float())

    return of(forward)()


@odd
def scripted_block() -> nn.Module:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(D, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(x)) + x.mean()

    return nn.Sequential(lin(), torch.jit.script(Inner()), lin(), torch.jit.trace(lin(), torch.randn(4, D)), lin())


@odd
def compiled_block() -> nn.Module:
    return nn.Sequential(lin(), torch.compile(nn.Sequential(lin(), nn.Tanh()), backend="eager"), lin(), lin())


@odd
def data_parallel_inside() -> nn.Module:
    return nn.Sequential(lin(), nn.DataParallel(lin()), lin(), lin())


@odd
def data_parallel_outside() -> nn.Module:
    return nn.DataParallel(nn.Sequential(lin(), lin(), lin()))


@odd
def vmap_around_a_child() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.func.vmap(self.b)(self.a(x))
        return self.d(self.c(x))

    return of(forward)()


@odd
def vmap_in_glue() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.func.vmap(lambda row: row.cumsum(0))(x)
        x = self.b(self.a(x) * mask)
        x = torch.func.vmap(lambda row: row * row.sum())(x)
        return self.d(self.c(x))

    return of(forward)()


@odd
def grad_transform_around_children() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        force = torch.func.grad(lambda y: self.c(torch.tanh(self.b(y))).sum())(x)
        return self.d(force)

    return of(forward)()


@odd
def jvp_in_glue() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        y, tangent = torch.func.jvp(torch.tanh, (x,), (torch.ones_like(x),))
        return self.d(self.c(self.b(y) + tangent))

    return of(forward)()


class Labelled(torch.Tensor):
    """A subclass with a behaviour of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if getattr(func, "__name__", "") == "tanh" and isinstance(result, torch.Tensor):
            return result * 2
        return result


@odd
def tensor_subclass_crosses() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).as_subclass(Labelled)
        y = self.b(x)
        z = self.c(torch.tanh(y))
        return self.d(z).as_subclass(torch.Tensor)

    return of(forward)()


@odd
def sparse_tensor_crosses() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        adjacency = torch.relu(self.a(x).T @ x).detach().to_sparse()
        y = self.b(x)
        y = torch.sparse.mm(adjacency, y.t()).t()
        return self.d(self.c(y))

    return of(forward)()


@odd
def sparse_constant() -> nn.Module:
    def init(self: Any) -> None:
        self.adjacency = torch.eye(D).to_sparse()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.sparse.mm(self.adjacency, self.a(x).t()).t()
        z = torch.sparse.mm(self.adjacency, self.c(self.b(y)).t()).t()
        return self.d(z)

    return of(forward, init)()


@odd
def forward_called_directly() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.b.forward(self.a(x))
        return self.d.forward(self.c(x))

    return of(forward)()


@odd
def module_made_in_forward() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        norm = nn.LayerNorm(D, elementwise_affine=False)
        return self.d(norm(self.c(norm(self.b(norm(self.a(x)))))))

    return of(forward)()


@odd
def layers_from_a_set() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return sum(getattr(self, name)(x) for name in sorted({"a", "b", "c", "d"}))

    return of(forward)()


@odd
def parallel_branches_and_none_outputs() -> nn.Module:
    class Maybe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, x: torch.Tensor, want: bool) -> tuple[torch.Tensor, torch.Tensor | None, int]:
            y = self.inner(x)
            return y, (y.mean(0) if want else None), 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Maybe() for _ in range(4))

        def forward(self, x: torch.Tensor) -> dict:
            kept = []
            for k, layer in enumerate(self.layers):
                x, extra, number = layer(x, k % 2 == 0)
                kept.append(extra)
                assert number == 3
            return {"loss": None, "y": x, "kept": kept, "none": None}

    return Model()


@odd
def generator_function_in_forward() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        def steps(x: torch.Tensor) -> Any:
            for layer in (self.a, self.b, self.c):
                x = layer(x)
                yield x

        return self.d(torch.stack(list(steps(x))).sum(0))

    return of(forward)()


@odd
def exceptions_steer_the_forward() -> nn.Module:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if y.shape[0] > 2:
                raise ValueError("too many")
            return y

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        try:
            y = self.raises(x)
        except ValueError:
            y = x * 2
        return self.d(self.c(self.b(y)))

    return of(forward, lambda self: setattr(self, "raises", Raises()))()


@odd
def swallows_every_exception() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        for layer in (self.b, self.c, self.d):
            try:
                x = layer(x)
            except Exception:
                x = x * 0
        return x

    return of(forward)()


@odd
def multihead_attention() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
            self.head = lin()

        def forward(self, x: torch.Tensor) -> Any:
            x = x.unsqueeze(0)
            x = self.encoder(x, mask=torch.triu(torch.full((4, 4), -math.inf), 1))
            y, weights = self.attention(x, x, x)
            return self.head(y), weights

    return Model()


@odd
def deep_nesting() -> nn.Module:
    model: nn.Module = nn.Sequential(lin(), nn.Tanh())
    for _ in range(5):
        model = nn.Sequential(model, nn.Sequential(lin(), nn.Tanh()))
    return model


@odd
def root_is_one_layer() -> nn.Module:
    return lin()


@odd
def gradient_penalty_on_a_feature() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        y = self.c(torch.tanh(self.b(h)))
        (g,) = torch.autograd.grad(y.sum(), h, create_graph=True)
        return self.d(y).mean() + g.pow(2).sum()

    return of(forward)()


@odd
def complex_views_and_negative_bits() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(self.a(x).view(4, 4, 2)).conj()
        imaginary = z.imag
        y = self.b(x) + self.c(x)
        return self.d(y + torch.view_as_real(z.resolve_conj()).flatten(1)) + imaginary.repeat(1, 2)

    return of(forward)()


@odd
def printing_and_formatting() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        notes = [f"{x} {x.mean():.3f} {x!r}", str(x)]
        x = self.b(x)
        notes.append("%s" % x)  # noqa: UP031
        return self.d(self.c(x)) + 0 * len(notes)

    return of(forward)()


@odd
def layers_called_with_the_same_tensor_twice() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        same = x.view_as(x)
        y = nn.functional.bilinear(x, same, self.weight)
        return self.d(self.c(self.b(y) + x) + same)

    return of(forward, lambda self: setattr(self, "weight", nn.Parameter(torch.randn(D, D, D) / 8)))()


@odd
def identity_layers_hand_tensors_through() -> nn.Module:
    def init(self: Any) -> None:
        self.skip = nn.Identity()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.skip(self.a(x))
        z = self.skip(self.b(y))
        return self.d(self.c(self.skip(z)) + self.skip(y))

    return of(forward, init)()


@odd
def mutates_a_list_of_tensors_in_glue() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        items = [x, self.a(x)]
        items[0] = self.b(items[1])
        items += [self.c(items[0])]
        items.reverse()
        first, *rest = items
        return self.d(first) + sum(rest)

    return of(forward)()


# -- the second helping


@odd
def layers_in_a_plain_list() -> nn.Module:
    """Forgotten by .parameters(), as in many first models; they run all the same."""

    def init(self: Any) -> None:
        self.hidden = [lin(), lin()]

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.hidden[1](self.c(self.hidden[0](self.b(self.a(x))))))

    return of(forward, init)()


@odd
def trained_tensors_that_are_no_parameters() -> nn.Module:
    def init(self: Any) -> None:
        self.scale = torch.ones(D, requires_grad=True)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.c(self.b(self.a(x)) * self.scale)) * self.scale

    return of(forward, init)()


@odd
def parameters_that_share_memory() -> nn.Module:
    model = nn.Sequential(lin(), lin(), lin(), lin())
    model[2].weight = nn.Parameter(model[1].weight.data)
    return model


@odd
def buffers_that_look_at_parameters() -> nn.Module:
    def init(self: Any) -> None:
        self.register_buffer("view", self.b.weight.data[0])

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.c(self.b(self.a(x)) + self.view))

    return of(forward, init)()


@odd
def calls_itself() -> nn.Module:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = lin()

        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            if depth == 0:
                return torch.tanh(self.cell(x))
            return self.cell(self(x, depth - 1) + self(x * 0.5, depth - 1))

    class Model(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.tree = Tree()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.tree(self.a(x), 2)
            return self.d(self.tree(self.b(x), 1) + self.c(x))

    return Model()


@odd
def module_compiled_in_place() -> nn.Module:
    model = nn.Sequential(lin(), nn.Sequential(lin(), nn.Tanh()), lin(), lin())
    model[1].compile(backend="eager")
    return model


@odd
def traced_by_fx() -> nn.Module:
    inner = torch.fx.symbolic_trace(nn.Sequential(lin(), nn.Tanh(), lin()))
    return nn.Sequential(lin(), inner, lin())


@odd
def call_is_overridden() -> nn.Module:
    class Calls(nn.Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) + 1

    class Past(nn.Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward(x) * 2

    return nn.Sequential(lin(), Calls(D, D), Past(D, D), lin())


@odd
def checkpoints_in_checkpoints() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(lin(), nn.Dropout(0.3), nn.Tanh()) for _ in range(6))

        def pair(self, k: int, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.layers[k], x, use_reentrant=False)
            return checkpoint(self.layers[k + 1], x, use_reentrant=False) + x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k in (0, 2, 4):
                x = checkpoint(self.pair, k, x, use_reentrant=False)
            return x

    return Model()


@odd
def selective_checkpoint() -> nn.Module:
    from functools import partial

    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        for layer in (self.a, self.b, self.c):
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=False, context_fn=keep)
        return self.d(x)

    return of(forward)()


@odd
def offloads_what_is_saved() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            x = torch.tanh(self.b(torch.tanh(self.a(x))))
            x = torch.tanh(self.c(x))
        return self.d(x)

    return of(forward)()


@odd
def hook_before_a_container_changes_its_input() -> nn.Module:
    model = nn.Sequential(nn.Sequential(lin(), lin()), nn.Sequential(lin(), lin()), lin())
    model[1].register_forward_pre_hook(lambda module, args: (torch.tanh(args[0]) * 2,))
    model[1].register_forward_hook(lambda module, args, out: out + args[0])
    model[0].register_forward_pre_hook(lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    return model


@odd
def empty_and_zero_dimensional_tensors() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        nothing, scale = x[:0], x.mean()
        y = self.c(self.b(x))
        return torch.cat([self.d(y) * scale, nothing, self.d(nothing)])

    return of(forward)()


@odd
def inputs_come_out_again() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> Any:
        y = self.d(self.c(self.b(self.a(x))))
        return {"y": y, "x": x, "same": [y, y], "none": None, "n": 3}

    return of(forward)()


@odd
def context_variable_carries_a_tensor() -> nn.Module:
    from contextvars import ContextVar

    shared: ContextVar[Any] = ContextVar("shared", default=None)

    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shared.set(torch.tanh(self.inner(x)))
            return x

    class Gets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + shared.get()

    return nn.Sequential(lin(), Sets(), lin(), Gets(), lin())


@odd
def weights_are_cached_across_layers() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.between = nn.utils.parametrizations.orthogonal(lin()), nn.ModuleList([lin(), lin()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with nn.utils.parametrize.cached():
                for between in self.between:
                    x = between(self.layer(x))
                return self.layer(x)

    return Model()


class Adds(nn.Module):
    """Adds up in the state that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = lin()

    def forward(self, state: Any) -> None:
        state.total += self.inner(state.x).detach()
        state.steps += 1


class Adding(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layers, self.head, self.make = nn.ModuleList(Adds() for _ in range(3)), lin(), make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.make(x)
        for layer in self.layers:
            layer(state)
        return self.head(state.total) * state.steps


class State:
    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.total, self.steps = x, torch.zeros(4, D), 0


@odd
def mutates_tensors_of_a_record() -> nn.Module:
    return Adding(lambda x: SimpleNamespace(x=x, total=torch.zeros(4, D), steps=0))


@odd
def mutates_tensors_of_a_plain_object() -> nn.Module:
    return Adding(State)


class Cache:
    def __init__(self) -> None:
        self.length, self.items = 0, {}


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = lin()

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        y = torch.tanh(self.inner(x))
        cache.items[len(cache.items)] = y
        cache.length += x.shape[0]
        return y


@odd
def object_filled_by_layers_is_read_by_glue() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Fills() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cache = Cache()
            for layer in self.layers:
                x = layer(x, cache) * cache.length
            return x + cache.length + sum(cache.items.values())

    return Model()


SCRATCH: list[torch.Tensor] = []


@odd
def state_in_a_global_list() -> nn.Module:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            SCRATCH.clear()
            SCRATCH.append(x * 2)
            return x

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.writes(self.a(x)))
        return self.d(self.c(x)) + SCRATCH[-1]

    return of(forward, lambda self: setattr(self, "writes", Writes()))()


@odd
def branches_in_threads() -> nn.Module:
    from concurrent.futures import ThreadPoolExecutor

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        with ThreadPoolExecutor(2) as pool:
            left, right = pool.map(lambda layer: layer(x), (self.b, self.c))
        return self.d(left + right)

    return of(forward)()


@odd
def double_and_integers_mix() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        index = x.argmax(1)
        counts = torch.bincount(index, minlength=D).to(torch.int8)
        wide = x.double().cumsum(0)
        y = self.b(x) + F.one_hot(index, D) * counts
        return self.d(self.c(y)).double() + wide + counts

    return of(forward)()


@odd
def segments_and_scatter() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        source, target = torch.tensor([0, 1, 2, 3, 0]), torch.tensor([1, 2, 3, 0, 2])
        for layer in (self.b, self.c):
            x = x + torch.zeros_like(x).index_add_(0, target, layer(x[source]))
        return self.d(torch.zeros(2, D).scatter_reduce(0, (target[:4] % 2)[:, None].expand(4, D), x, "mean"))

    return of(forward)()


def _glue_before_a_layer_in_a_checkpoint(reentrant: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            for layer in (self.b, self.c):
                x = checkpoint(lambda y, layer=layer: layer(torch.tanh(y)) * 2, x, use_reentrant=reentrant)
            return self.d(x)

        return of(forward)()

    make.__name__ = f"glue_before_a_layer_in_a_{'reentrant' if reentrant else 'hooked'}_checkpoint"
    return make


odd(_glue_before_a_layer_in_a_checkpoint(True))
odd(_glue_before_a_layer_in_a_checkpoint(False))


class Gives(nn.Module):
    """Hands out something of its own besides its result."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner, self.what = lin(), what
        self.register_buffer("table", torch.linspace(0, 1, D))
        self.constant = torch.ones(D) * 0.5

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = self.inner.weight if self.what == "weight" else getattr(self, self.what)
        return self.inner(x), own


def _gives(what: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            x, own = self.gives(self.a(x))
            x = self.c(self.b(x) * (own if own.dim() == 1 else own.sum(0)))
            return self.d(x) + (own * 2 if own.dim() == 1 else (own @ own)[:4])

        return of(forward, lambda self: setattr(self, "gives", Gives(what)))()

    make.__name__ = f"layer_hands_out_its_{what}"
    return make


for _what in ("table", "constant", "weight"):
    odd(_gives(_what))


@odd
def layer_returns_a_tensor_of_another() -> nn.Module:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.kept = lin(), None

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x), self.kept

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        self.returns.kept = x
        y, same = self.returns(self.b(x))
        return self.d(self.c(y) + same) + x

    return of(forward, lambda self: setattr(self, "returns", Returns()))()
