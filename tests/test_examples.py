"""Every example runs as its first lines say, and its loss falls."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_pool import RankPool

import partitioner
from partitioner.plan import Plan

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SMALL_GPT2 = ["train_gpt2.py", "--steps", "6", "--batch", "8", "--length", "32"]


def test_no_example_is_left_out() -> None:
    tested = {"train_gpt2.py", "train_unet.py", "data_parallel.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_gpt2_is_planned_and_trained_from_one_command() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *SMALL_GPT2]
    done = subprocess.run(command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Plan of GPT2LMHeadModel" in done.stdout
    found = re.search(r"loss (\S+) -> (\S+); step predicted (\S+) ms, measured (\S+) ms", done.stdout)
    assert found is not None, done.stdout
    assert float(found[2]) < float(found[1])
    assert float(found[3]) > 0
    assert float(found[4]) > 0


def run_here(path: str, arguments: list[str]) -> str:
    """What the script prints when it is started with these arguments, as `python path arguments` or on a rank."""
    before, sys.argv = sys.argv, [path, *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before
    return printed.getvalue()


def test_gpt2_runs_as_a_pipeline_on_ranks_that_are_there(ranks: RankPool) -> None:
    """The ranks of the pool find what torchrun sets, which starts its own in test_executor_launcher."""
    name, *arguments = SMALL_GPT2
    arguments += ["--pp", "2", "--microbatches", "4", "--schedule", "1f1b"]
    first, second = ranks.run(2, run_here, str(EXAMPLES / name), arguments, timeout=110)
    assert "pp 2 x dp 1" in first
    assert first.count("Plan of GPT2LMHeadModel") == 1 and "loss" in first
    assert second == "", "only rank 0 prints"


@pytest.mark.parametrize("example", ["train_unet.py", "data_parallel.py"])
def test_the_loss_falls(example: str, ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the pool's ranks instead of those that `launch` starts."""

    def launch(train: Callable[..., Any], plan: Plan, *args: Any) -> list[Any]:
        return ranks.run(plan.num_ranks, train, *args, timeout=110)

    monkeypatch.setattr(partitioner, "launch", launch)
    output = run_here(str(EXAMPLES / example), [])
    found = re.search(r"loss (\S+) -> (\S+)", output)
    assert found is not None, output
    assert float(found[2]) < float(found[1])
