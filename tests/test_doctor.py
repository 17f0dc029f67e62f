"""What the doctor says, against what is here, and against a machine where something is missing."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any

import pytest

from partitioner import cli, doctor
from partitioner.report import render


def named(diagnosis: doctor.Diagnosis) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in diagnosis.findings}


def test_versions_are_those_installed() -> None:
    found = named(doctor.check(try_ranks=False))
    for name in doctor.REQUIRED:
        assert found[name].found == importlib.metadata.version(name)
    assert found["python"].found.startswith(".".join(map(str, sys.version_info[:3])))
    assert "two ranks" not in found


def test_two_ranks_add_numbers_here() -> None:
    assert doctor._ranks() == doctor.Finding("two ranks", "added numbers over gloo")


def test_ranks_that_fail_are_told_with_their_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_RANK", "raise OSError('no route to host')")
    finding = doctor._ranks()
    assert (finding.ok, finding.found) == (False, "OSError: no route to host")
    assert "GLOO_SOCKET_IFNAME" in finding.advice


def test_ranks_that_hang_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_RANK", "import time; time.sleep(60)")
    finding = doctor._ranks(timeout_s=0.5)
    assert not finding.ok
    assert "no answer" in finding.found


@pytest.fixture
def without_networkx(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("networkx", "transformers"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.usefixtures("without_networkx")
def test_a_missing_package_is_broken_only_when_it_is_needed() -> None:
    diagnosis = doctor.check(try_ranks=False)
    found = named(diagnosis)
    assert (found["networkx"].ok, found["networkx"].advice) == (False, "pip install networkx")
    assert (found["transformers"].ok, found["transformers"].advice) == (True, "")
    assert not diagnosis.ok
    text = render(diagnosis)
    assert text.startswith("Something is missing")
    assert "advice: networkx: pip install networkx" in text


@pytest.mark.usefixtures("without_networkx")
def test_the_shell_says_5_when_something_is_missing(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--quick", "--json"]) == 5
    findings: list[dict[str, Any]] = json.loads(capfd.readouterr().out)["findings"]
    assert [finding["name"] for finding in findings if not finding["ok"]] == ["networkx"]


def test_a_torch_that_cannot_be_imported_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = named(doctor.check())
    assert not found["import torch"].ok
    assert "two ranks" not in found


def test_devices_are_those_that_torch_sees() -> None:
    import torch

    names = {finding.name for finding in doctor.check(try_ranks=False).findings}
    assert {f"cuda:{k}" for k in range(torch.cuda.device_count())} <= names
    assert ("CUDA devices" in names) == (torch.cuda.device_count() == 0)
