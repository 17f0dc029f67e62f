"""Every example runs as its first lines say, and its loss falls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SMALL_GPT2 = ["train_gpt2.py", "--steps", "6", "--batch", "8", "--length", "32"]


def run(command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_example_is_left_out() -> None:
    tested = {"train_gpt2.py", "train_unet.py", "data_parallel.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_gpt2_is_planned_and_trained_from_one_command() -> None:
    output = run([sys.executable, *SMALL_GPT2])
    assert "Plan of GPT2LMHeadModel" in output
    found = re.search(r"loss (\S+) -> (\S+); step predicted (\S+) ms, measured (\S+) ms", output)
    assert found is not None, output
    assert float(found[2]) < float(found[1])
    assert float(found[3]) > 0
    assert float(found[4]) > 0


def test_gpt2_runs_as_a_pipeline_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = run([*torchrun, *SMALL_GPT2, "--pp", "2", "--microbatches", "4", "--schedule", "1f1b"])
    assert "pp 2 x dp 1" in output
    assert "Plan of" in output
    assert output.count("Plan of GPT2LMHeadModel") == 1, "only rank 0 prints the plan"


@pytest.mark.parametrize("example", ["train_unet.py", "data_parallel.py"])
def test_the_loss_falls(example: str) -> None:
    output = run([sys.executable, example])
    found = re.search(r"loss (\S+) -> (\S+)", output)
    assert found is not None, output
    assert float(found[2]) < float(found[1])
