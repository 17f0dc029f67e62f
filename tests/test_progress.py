"""Progress: nothing for short work or where nobody looks, a bar with the time left for long work."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
from given import given_cluster, given_profile

from partitioner import progress
from partitioner.errors import ArgumentError
from partitioner.progress import left_s, portion, shown
from partitioner.solver import solve
from partitioner.specs import Training


def test_the_time_left_is_that_of_the_pace_so_far() -> None:
    for took in (1.0, 7.0, 100.0):
        for share in (0.1, 0.5, 0.9):
            assert left_s(share, took, 0.0) == pytest.approx(took / share - took)
            assert left_s(share, took, 1e9) == 0.0


def test_short_work_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(True) as tell:
        tell("measuring", 0.5)
    assert capsys.readouterr() == ("", "")


def test_long_work_shows_a_bar_on_stderr_with_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.05)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich draws bars on terminals alone
    with shown(True) as tell:
        tell("measuring [layers]", 0.25)
        time.sleep(0.7)
        tell("solving", 0.5)
        time.sleep(0.4)
    out, err = capsys.readouterr()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", err)
    assert out == ""
    assert "measuring [layers]" in text
    assert "25%" in text and "50%" in text
    assert re.search(r"about [01] s left", text)


@pytest.mark.parametrize("choice", [3, 0, "yes", ()])
def test_what_is_neither_a_choice_nor_a_function_is_refused(choice: Any) -> None:
    with pytest.raises(ArgumentError, match=r"progress=.* give True, False, None, or a function"), shown(choice):
        pass


def test_nothing_is_shown_where_stderr_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    for choice in (None, False):
        with shown(choice) as tell:
            tell("measuring", 0.5)
            time.sleep(0.05)
    assert capsys.readouterr() == ("", "")


def test_a_bar_ends_with_its_work_even_where_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.01)

    def fails() -> None:
        with shown(True) as tell:
            tell("measuring", 0.5)
            time.sleep(0.05)
            raise KeyError

    before = threading.active_count()
    with pytest.raises(KeyError):
        fails()
    time.sleep(0.05)
    assert threading.active_count() <= before


def test_a_function_of_the_callers_is_told_all() -> None:
    told: list[tuple[str, float]] = []
    with shown(lambda what, share: told.append((what, share))) as tell:
        portion(tell, 0.5, 1.0)("second half", 0.5)
    assert told == [("second half", 0.75)]


def test_solving_tells_how_many_settings_are_left() -> None:
    told: list[float] = []
    plan = solve(
        given_profile(8), given_cluster(4), Training(batch_size=8), progress=lambda what, share: told.append(share)
    )
    assert plan.num_ranks <= 4
    assert told and min(told) == 0.0 and max(told) < 1.0
