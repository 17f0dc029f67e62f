"""A few of the zoo's Hugging Face models that changes once broke, compared with one device as the zoo does it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

import zoo


@pytest.mark.parametrize("name", ["qwen2_vl", "fsmt"])
def test_a_model_gives_one_devices_numbers(name: str) -> None:
    found = zoo.row(name, "hf", 0, 2, 4, "gpipe", 2, [])
    assert found["verdict"] == "same", found
    assert found["cuts"] > 10
