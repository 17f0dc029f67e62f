"""A model's state and the random states, given back whatever was done to them."""

from __future__ import annotations

import copy
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from partitioner.restore import ModelState, random_marks, random_states, set_random_states, untouched


class Options:
    def __init__(self) -> None:
        self.kind, self.nested = None, {"deep": [1]}


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.items, self.table, self.seen, self.queue = [1], {"a": [1]}, {1}, deque([1], maxlen=2)
        self.options, self.pair = Options(), ([1], 2)
        self.bank = [torch.zeros(2)]
        self.generator, self.dice = torch.Generator().manual_seed(1), random.Random(1)
        self.numbers = np.random.default_rng(1)
        self.register_buffer("wide", torch.arange(2).expand(3, 2))


class Frozen(OrderedDict):  # type: ignore[type-arg]
    """A configuration that none may change by its own methods, as diffusers has."""

    def _refuse(self, *args: object, **kwargs: object) -> None:
        raise TypeError("a frozen configuration")

    update = setdefault = clear = pop = _refuse  # type: ignore[assignment]

    def __setitem__(self, key: str, value: object) -> None:
        if self.ready:
            self._refuse()
        super().__setitem__(key, value)

    ready = False


class Journal(list):  # type: ignore[type-arg]
    """A list whose own methods do more than they say."""

    def extend(self, more: object) -> None:
        raise TypeError("one at a time")


def test_containers_with_methods_of_their_own_are_given_back() -> None:
    model = nn.Linear(2, 2)
    model.frozen, model.journal = Frozen(a=1, b=[2]), Journal([1])
    model.frozen.ready = True
    with untouched(model):
        assert model.frozen["a"] == 1
    with untouched(model):
        OrderedDict.__setitem__(model.frozen, "a", 5)
        OrderedDict.move_to_end(model.frozen, "a")
        model.frozen["b"].append(3)
        model.journal.append(2)
    assert list(model.frozen.items()) == [("a", 1), ("b", [2])]
    assert model.journal == [1]
    assert type(model.frozen) is Frozen and type(model.journal) is Journal


def disturb(model: Keeps) -> None:
    model.items.append(2)
    model.table["a"].append(2)
    model.table["b"] = 1
    model.seen.add(2)
    model.queue.append(3)
    model.options.kind = "set"
    model.options.nested["deep"].append(2)
    model.pair[0].append(2)
    model.bank[0].add_(1)
    model.bank.append(torch.ones(1))
    torch.rand(1, generator=model.generator)
    model.dice.random()
    model.numbers.random()
    model.norm(torch.randn(4, 2))
    model.norm.running_mean = torch.ones(2)
    model.layer.register_forward_hook(lambda *args: None)
    model.layer.new = 1
    model.eval()
    random.random()
    np.random.rand()
    torch.rand(1)


def look(model: Keeps) -> list[object]:
    return [
        *(
            model.items,
            model.table,
            model.seen,
            list(model.queue),
            model.options.kind,
            model.options.nested,
            model.pair,
        ),
        *([tensor.tolist() for tensor in model.bank], model.generator.get_state().tolist(), model.dice.getstate()),
        *(model.numbers.bit_generator.state, model.norm.running_mean.tolist(), len(model.layer._forward_hooks)),
        *(int(model.norm.num_batches_tracked), hasattr(model.layer, "new"), model.training, model.layer.training),
        *(random_states(), torch.get_rng_state().tolist()),
    ]


def test_untouched_gives_back_everything_even_when_an_error_passes() -> None:
    model = Keeps()
    model.layer.weight.grad = gradient = torch.ones(2, 2)
    before, buffer = copy.deepcopy(look(model)), model.norm.running_mean

    def fail() -> None:
        with untouched(model):
            assert model.layer.weight.grad is None
            disturb(model)
            assert look(model) != before
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert look(model) == before
    assert model.norm.running_mean is buffer
    assert model.layer.weight.grad is gradient


def test_a_state_can_be_given_back_between_a_forward_and_its_backward() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = ModelState(model)
    loss = model(torch.randn(4, 2)).sum()
    state.restore()
    loss.backward()
    assert float(model[1].running_mean.abs().sum()) == 0


def test_random_states_are_plain_data_that_go_round() -> None:
    states = random_states()
    drawn = (random.random(), np.random.rand())
    assert random_states() != states
    set_random_states(states)
    assert random_states() == states
    assert (random.random(), np.random.rand()) == drawn


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: random.gauss(0, 1), lambda: random.shuffle([1, 2, 3]), np.random.rand, np.random.randn],
)
def test_marks_change_with_every_draw(draw: Callable[[], object]) -> None:
    np.random.seed(0)
    for _ in range(700):
        before = random_marks()
        assert random_marks() == before
        draw()
        assert random_marks() != before
    assert len(random_marks()) == 4


def test_what_a_closure_counts_and_where_an_iterator_is_are_given_back() -> None:
    count = 0

    def following() -> int:
        nonlocal count
        count += 1
        return count

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates = itertools.cycle([1, 2, 3])

        def forward(self) -> tuple[int, int]:
            return following(), next(self.rates)

    model = Model()
    assert model() == (1, 1)
    with untouched(model) as state:
        assert [model(), model(), model()] == [(2, 2), (3, 3), (4, 1)]
        state.restore()
        assert model() == (2, 2)
    assert [model(), model()] == [(2, 2), (3, 3)]


def test_hooks_that_a_forward_puts_on_parameters_are_taken_off() -> None:
    model, seen = nn.Linear(2, 2), list[str]()
    model.weight.register_hook(lambda g: seen.append("kept"))
    with untouched(model):
        model.weight.register_hook(lambda g: seen.append("more"))
        model.bias.register_hook(lambda g: seen.append("bias"))
        model.bias.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    model(torch.ones(1, 2)).sum().backward()
    assert seen == ["kept"]
