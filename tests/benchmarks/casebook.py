"""What a case is, and what is found out about it: pairs of what this package gives and what is right."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from partitioner.errors import NotBuiltError, PartitionerError

WRITTEN = "Reference values (REF, computed by the snippet on CPU): "


class Ranks(Protocol):
    """Whatever runs a function on several processes that find each other as under torchrun."""

    def run(self, num_ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]: ...


class Finding(NamedTuple):
    """One thing looked at."""

    what: str
    found: Any
    right: Any
    holds: bool


@dataclass
class Case:
    """One line of the file, its snippet run in a namespace of its own."""

    id: str
    source: str
    kind: str
    symptom: str
    snippet: str
    expected: str
    space: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> torch.nn.Module:
        found: torch.nn.Module = self.space["model"]
        return found

    @property
    def inputs(self) -> tuple[Any, ...]:
        return tuple(self.space["inputs"])

    @property
    def request(self) -> Any:
        """What the user asked for, in no tool's words."""
        return self.space["REQUEST"]

    @property
    def ref(self) -> dict[str, Any]:
        """The right values, computed by the snippet just now."""
        return dict(self.space["REF"])


class Row(NamedTuple):
    """A case's verdict: "holds", "fails: why" or "not built: what"."""

    id: str
    kind: str
    verdict: str
    looked_at: list[str]


Answer = Callable[[Case, Ranks], Iterator[Finding]]


def read_cases(path: Path) -> list[Case]:
    """One case a line."""
    return [Case(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def run_snippet(snippet: str) -> dict[str, Any]:
    """The names that a snippet defines."""
    space: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(snippet, "<snippet>", "exec"), space)
    return space


def judge(case: Case, answer: Answer | None, ranks: Ranks) -> Row:
    """Run the case and hold what this package gives against what is right."""
    if answer is None:
        return Row(case.id, case.kind, "not built: nothing here answers this case", [])
    findings: list[Finding] = []
    missing = ""
    try:
        case.space = run_snippet(case.snippet)
        findings.append(_reference_is_as_written(case))
        findings.extend(answer(case, ranks))
    except NotBuiltError as error:
        missing = str(error)
    except PartitionerError as error:
        findings.append(Finding(f"refused with {type(error).__name__}", str(error), "a result", False))
    except Exception as error:
        findings.append(Finding(type(error).__name__, str(error), "no such error", False))
    looked_at = [finding.what for finding in findings]
    wrong = [finding for finding in findings if not finding.holds]
    if wrong:
        verdict = "fails: " + "; ".join(f"{one.what}: {one.found!r}, right is {one.right!r}" for one in wrong)
    elif missing:
        verdict = f"not built: {missing}"
    else:
        verdict = "holds"
    return Row(case.id, case.kind, verdict, looked_at)


def _reference_is_as_written(case: Case) -> Finding:
    """Whether the snippet computes here what it did when the case was written down."""
    written = json.loads(case.expected.partition(WRITTEN)[2])
    return same("the snippet's own values", json.loads(json.dumps(case.ref)), written, 1e-3)


def same(what: str, found: Any, right: Any, tolerance: float = 1e-4) -> Finding:
    """Equal, numbers within a relative tolerance; sequences and dictionaries item by item."""
    return Finding(what, found, right, _agree(found, right, tolerance))


def at_most(what: str, found: float, limit: float) -> Finding:
    return Finding(what, found, f"at most {limit}", found <= limit)


def true(what: str, found: Any) -> Finding:
    """`found` is shown where it is not true."""
    return Finding(what, found, True, bool(found))


def says(what: str, text: str, *words: str) -> Finding:
    """The text holds all the words."""
    missing = [word for word in words if word not in text]
    return Finding(what, text, f"text with {', '.join(words)}", not missing)


def refusal(call: Callable[[], Any]) -> str:
    """What a call was refused with, "" where it was not; an error that is no refusal goes on."""
    try:
        call()
    except NotBuiltError:
        raise
    except PartitionerError as error:
        if not isinstance(error, ValueError):
            raise
        return str(error)
    return ""


def _agree(found: Any, right: Any, tolerance: float) -> bool:
    if isinstance(right, dict):
        return (
            isinstance(found, dict)
            and list(found) == list(right)
            and all(_agree(found[key], right[key], tolerance) for key in right)
        )
    if isinstance(right, (list, tuple)):
        return (
            isinstance(found, (list, tuple))
            and len(found) == len(right)
            and all(_agree(a, b, tolerance) for a, b in zip(found, right, strict=True))
        )
    if isinstance(found, bool) or isinstance(right, bool):
        return found is right
    if isinstance(right, float) and isinstance(found, (int, float)):
        return math.isclose(found, right, rel_tol=tolerance, abs_tol=tolerance * 1e-2)
    return bool(found == right)
