"""What forwards write into tensors past torch's version counters: one device's numbers, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from in_flight import worst_in_flight
from models import Case, build
from odd_glue_models import Stack, rows
from odd_models import D, lin, squares
from torch import nn
from torch.utils.checkpoint import checkpoint

from partitioner.capture import capture
from partitioner.errors import UnsupportedModelError
from partitioner.restore import untouched
from partitioner.unannounced import may_write_unannounced


class Scaled(nn.Module):
    """Multiplies by rows of a buffer, which each forward from the `begins`th on makes smaller before."""

    def __init__(self, begins: int, is_large: bool = False, again: bool = False) -> None:
        super().__init__()
        self.lin, self.begins, self.again, self.calls = lin(), begins, again, 0
        self.register_buffer("scale", torch.ones(40000 if is_large else 4, D))
        self.prepare()

    def prepare(self) -> None:
        """What looks at the buffer is kept."""

    def write(self) -> None:
        raise NotImplementedError

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * self.scale[:4].sum(0) * self.scale[2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.lin(x)
        if self.calls >= self.begins:
            self.write()
        return checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)


class ArrayInAClosure(Scaled):
    def prepare(self) -> None:
        array = self.scale.numpy()

        def write() -> None:
            array[...] *= 0.9

        self.write = write  # type: ignore[method-assign]


class ArrayOfAnAttribute(Scaled):
    def prepare(self) -> None:
        self.array = self.scale.numpy()

    def write(self) -> None:
        self.array *= 0.9


class ArrayOfTheMoment(Scaled):
    def write(self) -> None:
        self.scale.numpy()[...] *= 0.9


class ArrayMadeLate(Scaled):
    def prepare(self) -> None:
        self.shrink: Callable[[], object] | None = None

    def write(self) -> None:
        if self.shrink is None:
            array = self.scale.numpy()
            self.shrink = lambda: array.__imul__(0.9)
        self.shrink()


class DataOfAView(Scaled):
    def prepare(self) -> None:
        self.row = self.scale[2]

    def write(self) -> None:
        self.row.data.mul_(0.9)


class DataOfAViewInAList(Scaled):
    def prepare(self) -> None:
        self.rows = [self.scale[2]]

    def write(self) -> None:
        self.rows[0].data.mul_(0.9)


class View(Scaled):
    def prepare(self) -> None:
        self.row = self.scale[2]

    def write(self) -> None:
        with torch.no_grad():
            self.row.mul_(0.9)


class DataOfARow(Scaled):
    def write(self) -> None:
        self.scale.data[2] *= 0.9


class DataSet(Scaled):
    def write(self) -> None:
        self.scale.data = self.scale.data * 0.9


WAYS = (
    ArrayInAClosure,
    ArrayOfAnAttribute,
    ArrayOfTheMoment,
    ArrayMadeLate,
    DataOfAView,
    DataOfAViewInAList,
    View,
    DataOfARow,
    DataSet,
)
LATE = 7
"""A call in the second step of four micro-batches, after the first looks."""


def built(way: type[Scaled], *how: object) -> Callable[[], Case]:
    def build() -> Case:
        torch.manual_seed(0)
        return rows(nn.Sequential(way(*how), nn.Tanh(), lin(), way(*how), nn.Tanh()), squares)

    return build


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("begins", "is_large", "again"), [(0, True, True), (LATE, False, True)])
def test_pending_backwards_find_what_their_forward_left(
    way: type[Scaled], begins: int, is_large: bool, again: bool
) -> None:
    assert worst_in_flight(built(way, begins, is_large, again), ["2"], 2) < 1e-9


@pytest.mark.parametrize("way", WAYS)
def test_a_large_tensor_that_begins_to_change_while_backwards_need_it_is_refused_at_once(way: type[Scaled]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"begins to change '\d.\w+', of \d+ bytes, .* the backwards of"):
        worst_in_flight(built(way, LATE, True), ["2"], 2)


@pytest.mark.parametrize("way", WAYS)
def test_views_and_arrays_of_the_users_own_model_stay_what_they_are(way: type[Scaled]) -> None:
    case, other = built(way, 0)(), built(way, 0)()
    with untouched(case.model):
        capture(case.model, case.args)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(case.model(*case.args), other.model(*case.args))


def test_only_code_that_a_forward_leads_to_counts() -> None:
    class Init(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = lin()
            self.lin.weight.data.mul_(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.step(x)

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x)

    class Step(Init):
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return through(x)

    assert not may_write_unannounced(Init()) and may_write_unannounced(Step())
    model = Init()
    model.lin.register_forward_hook(lambda module, args, output: output.data.mul_(2))
    assert may_write_unannounced(model)


def through(x: torch.Tensor) -> torch.Tensor:
    return x.data


class Normed(nn.Module):
    """A weight divided by its largest singular value, of which estimates are kept in frozen parameters."""

    def __init__(self, begins: int) -> None:
        super().__init__()
        self.lin, self.u, self.begins, self.calls = lin(), nn.Parameter(torch.ones(D), requires_grad=False), begins, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.lin(x)
        if self.calls >= self.begins:
            v = nn.functional.normalize(self.lin.weight.data.t() @ self.u.data, dim=0)
            self.u.data = nn.functional.normalize(self.lin.weight.data @ v, dim=0)
        return torch.tanh(x) / self.u.dot(self.lin.weight.mv(self.lin.weight.t().mv(self.u)))


@pytest.mark.parametrize("begins", [0, LATE])
def test_frozen_parameters_whose_data_is_set_in_the_forward(begins: int) -> None:
    def build() -> Case:
        torch.manual_seed(0)
        return rows(nn.Sequential(Normed(begins), nn.Tanh(), lin(), Normed(begins)), squares)

    case = build()
    before = case.model[0].u.data
    capture(case.model, case.args)
    assert case.model[0].u.data_ptr() == before.data_ptr() and torch.equal(case.model[0].u, torch.ones(D))
    assert worst_in_flight(build, ["2"]) < 1e-9


class Set(nn.Module):
    def __init__(self, begins: int) -> None:
        super().__init__()
        self.lin, self.begins, self.calls = lin(), begins, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls >= self.begins:
            self.lin.weight.data = self.lin.weight.data.clamp(-0.1, 0.1)
        return self.lin(x)


def test_trained_parameters_whose_data_is_set_while_backwards_need_it_are_refused() -> None:
    def build() -> Case:
        torch.manual_seed(0)
        return rows(nn.Sequential(Set(LATE), nn.Tanh(), lin(), nn.Tanh()), squares)

    with pytest.raises(
        UnsupportedModelError, match=r"sets the parameter '0.lin.weight', which is trained, while the b"
    ):
        worst_in_flight(build, ["2"])


class ReadsGradient(Stack):
    """Asks for the gradient of its first weight, to log it or to compute with it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.log = factor, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gradient = self.layers[0].weight.grad
        size = 0.0 if gradient is None else float(gradient.norm())
        self.log = size
        return self.run(x) * (1 + self.factor * size)


def test_a_forward_that_computes_with_gradients_is_refused_and_one_that_looks_at_them_is_not() -> None:
    case = rows(ReadsGradient(0.0), squares)
    capture(case.model, case.args)
    case = rows(ReadsGradient(0.1), squares)
    with pytest.raises(UnsupportedModelError, match=r"reads the gradient of the parameter 'layers.0.weight'"):
        capture(case.model, case.args)
    assert case.model.layers[0].weight.grad is None


class Halved(nn.Module):
    """Two of these have one table, which the one that `writes` halves late, through a view of it."""

    def __init__(self, table: torch.Tensor, writes: bool, how: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.lin, self.writes, self.how, self.calls = lin(), writes, how, 0
        self.register_buffer("table", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.writes and self.calls >= LATE:
            self.how(self.table)
        return torch.tanh(self.lin(x)) * self.table


@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("how", [lambda table: table.data.mul_(0.5), lambda table: table.numpy().__imul__(0.5)])
def test_what_stages_share_may_not_begin_to_change_past_its_version(
    writer: int, how: Callable[[torch.Tensor], object]
) -> None:
    def build() -> Case:
        torch.manual_seed(0)
        table = torch.ones(D)
        layers = [Halved(table, k == writer, how) for k in range(2)]
        return rows(nn.Sequential(layers[0], lin(), lin(), layers[1]), squares)

    with pytest.raises(
        UnsupportedModelError, match=rf"stage {writer} begins to change .* and stage {1 - writer} reaches"
    ):
        worst_in_flight(build, ["2"])


def test_a_kept_view_of_a_buffer_is_the_buffers_on_every_stage() -> None:
    class Row(nn.Module):
        def __init__(self, row: torch.Tensor) -> None:
            super().__init__()
            self.row = row

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.row

    first = nn.Sequential(lin())
    first.register_buffer("table", torch.ones(3, D))
    model = nn.Sequential(first, lin(), Row(first.table[1]))
    captured = capture(model, (torch.randn(2, D),), max_share=0.0)
    assert [one.layers[-1] for one in captured.buffers] == ["2"]


def test_pythons_own_library_is_not_taken_for_code_that_writes_into_tensors() -> None:
    """`re`, to which settings of Hugging Face's models lead, has attributes that are called `data`."""
    model = build("gpt2", layers=1).model
    assert not may_write_unannounced(model, [model.config, model.generation_config])
