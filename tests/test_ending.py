from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from partitioner import ending
from partitioner.ending import Foretold, foretold


class Counter:
    def __init__(self) -> None:
        self.steps = 5

    def note(self) -> None:
        self.steps = self.steps + 1


KNOWN = Counter()


@pytest.fixture(autouse=True)
def _nobody_but_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of pytest's are under way too, and not looked at."""
    monkeypatch.setattr(ending, "_OUTERMOST", {(__name__, "_outermost")})
    for name in ("_POINTS", "_PASSED_BY"):
        monkeypatch.setattr(ending, name, type(getattr(ending, name))())


def _told_of(forward: Callable[[list[Foretold], list[Any]], None], held: list[Any]) -> Any:
    """What is foretold at the start of a function that `steps` of the object in a list will be.

    Nobody here is given the object itself: who is might change it, so that nothing would be known.
    """
    told = _outermost(forward, held)
    return [value for holder, name, value in told.values() if name == "steps" and holder is held[0]]


def _outermost(forward: Callable[[list[Foretold], list[Any]], None], held: list[Any]) -> Foretold:
    told: list[Foretold] = []
    forward(told, held)
    return told[0]


def _sets_it(told: list[Foretold], held: list[Any]) -> None:
    (holder,) = held
    told.append(foretold())
    holder.steps = 8


def _calls_its_method(told: list[Foretold], held: list[Any]) -> None:
    (holder,) = held
    told.append(foretold())
    holder.note()


def _calls_the_method_of_what_a_module_holds(told: list[Foretold], held: list[Any]) -> None:
    told.append(foretold())
    KNOWN.note()


def _calls_it_under_a_condition(told: list[Foretold], held: list[Any]) -> None:
    (holder,) = held
    told.append(foretold())
    if holder.steps == 5:
        holder.note()


def _calls_it_by_another_name(told: list[Foretold], held: list[Any]) -> None:
    (holder,) = held
    told.append(foretold())
    other = holder
    other.note()


def _calls_that_of_something_unknown(told: list[Foretold], held: list[Any]) -> None:
    (holder,) = held
    other = told.append(foretold()) or holder  # type: ignore[func-returns-value]
    other.note()


def _calls_it_in_a_loop(told: list[Foretold], held: list[Any]) -> None:
    (holder,) = held
    told.append(foretold())
    for _ in told:
        holder.note()


def _empties_a_dict(told: list[Foretold], held: list[Any]) -> None:
    (holder,) = held
    told.append(foretold())
    holder.pop("steps")


@pytest.mark.parametrize(
    ("forward", "held", "steps"),
    [
        (_sets_it, [Counter()], [8]),
        (_calls_its_method, [Counter()], [6]),
        (_calls_the_method_of_what_a_module_holds, [KNOWN], [6]),
        (_calls_it_under_a_condition, [Counter()], [6]),
        (_calls_it_by_another_name, [Counter()], [6]),
        (_calls_that_of_something_unknown, [Counter()], []),
        (_calls_it_in_a_loop, [Counter()], []),
        (_empties_a_dict, [{"steps": 5}], []),
    ],
)
def test_what_the_rest_sets_itself_or_by_methods_of_its_variables_is_foretold(
    forward: Callable[..., None], held: list[Any], steps: list[int]
) -> None:
    assert _told_of(forward, held) == steps


def test_a_method_is_foretold_or_not_by_what_the_variable_holds_at_each_call() -> None:
    class Silent:
        steps = 5
        note = dict  # called, and no function of the class

    silent, counting = [Silent()], [Counter()]
    assert [_told_of(_calls_its_method, held) for held in (silent, counting, silent)] == [[], [6], []]
