"""The cases made from public bug reports: each holds, or says by name what is not built."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_pool import RankPool

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

import casebook
import cases
from casebook import Case, Finding, Ranks, judge, read_cases, same

CASES = {case.id: case for case in read_cases(Path(__file__).parent / "data" / "cases.jsonl")}
NOT_BUILT: dict[str, str] = {}
MARKS = {
    "RO-02": [pytest.mark.slow],
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in CASES])
def test_case(name: str, ranks: RankPool) -> None:
    row = judge(CASES[name], cases.ANSWERS.get(name), ranks)
    if name in NOT_BUILT:
        assert row.verdict.startswith("not built: ") and NOT_BUILT[name] in row.verdict
    else:
        assert row.verdict == "holds"
    assert row.looked_at, "nothing was compared"


def test_every_case_has_an_answer() -> None:
    assert cases.ANSWERS.keys() == CASES.keys()


def made_up(**changes: str) -> Case:
    fields = {
        "id": "X",
        "source": "nowhere",
        "kind": "planning",
        "symptom": "none",
        "snippet": "REF = {'speedup': 1.5}",
        "expected": casebook.WRITTEN + json.dumps({"speedup": 1.5}),
    }
    return Case(**(fields | changes))


@pytest.mark.parametrize(("found", "verdict"), [(1.50001, "holds"), (1.6, "fails: speedup: 1.6, right is 1.5")])
def test_a_verdict_is_the_comparison(found: float, verdict: str, ranks: RankPool) -> None:
    def answer(case: Case, ranks: Ranks) -> Iterator[Finding]:
        yield same("speedup", found, case.ref["speedup"])

    assert judge(made_up(), answer, ranks).verdict == verdict


def test_errors_and_missing_parts_are_verdicts(ranks: RankPool) -> None:
    from partitioner.errors import InfeasibleError, NotBuiltError

    def refused(case: Case, ranks: Ranks) -> Iterator[Finding]:
        yield same("one", 1, 1)
        raise InfeasibleError("too large")

    def missing(case: Case, ranks: Ranks) -> Iterator[Finding]:
        yield same("one", 1, 1)
        raise NotBuiltError("shard='zero1' is not built")

    def wrong_and_missing(case: Case, ranks: Ranks) -> Iterator[Finding]:
        yield same("one", 2, 1)
        raise NotBuiltError("shard='zero1' is not built")

    assert judge(made_up(), refused, ranks).verdict.startswith("fails: refused with InfeasibleError: 'too large'")
    assert judge(made_up(), missing, ranks).verdict == "not built: shard='zero1' is not built"
    assert judge(made_up(), wrong_and_missing, ranks).verdict == "fails: one: 2, right is 1"
    assert judge(made_up(), None, ranks).verdict.startswith("not built")
    other = made_up(expected=casebook.WRITTEN + json.dumps({"speedup": 2.0}))
    assert judge(other, missing, ranks).verdict.startswith("fails: the snippet's own values")


@pytest.mark.parametrize(
    ("found", "right", "agree"),
    [
        ({"a": [1, 2.0]}, {"a": [1, 2.00001]}, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        ([1.0], [1.0, 1.0], False),
        (None, 1.0, False),
        (float("nan"), 1.0, False),
        (True, 1.0, False),
        (0.0, 0.0, True),
    ],
)
def test_what_agrees(found: object, right: object, agree: bool) -> None:
    assert same("it", found, right).holds is agree
