"""A few of the zoo's models that changes once broke, compared with one device as the zoo does it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rank_pool import RankPool

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

import zoo


@pytest.mark.parametrize("name", ["qwen2_vl", "fsmt"])
def test_a_model_gives_one_devices_numbers(name: str) -> None:
    found = zoo.row(name, "hf", 0, 2, 4, "gpipe", 2, [])
    assert found["verdict"] == "same", found
    assert found["cuts"] > 10


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("connections_that_return_how_to_add", 27),
        ("heads_put_into_one_list_by_nested_modules", 7),
        ("left_out_by_a_function_imported_by_name", 11),
        ("left_out_layers_then_a_token", 15),
        ("a_block_for_few_tokens_then_for_many", 7),
    ],
)
def test_an_odd_model_gives_one_devices_numbers_and_has_all_its_cuts(name: str, cuts: int) -> None:
    found = zoo.row(name, "odd", 0, 2, 4, "gpipe", 2, [])
    assert found["verdict"] == "same", found
    assert found["cuts"] == cuts


@pytest.mark.parametrize("name", ["hubert", "olmoe"])
def test_a_model_whose_loss_has_a_rule_gives_one_devices_numbers_on_ranks(ranks: RankPool, name: str) -> None:
    """Sums over the batch, and losses with balancing terms: micro-batches count for what the plan says."""
    found = zoo.row(name, "hf", 2, 2, 4, "1f1b", 0, [ranks])
    assert found["verdict"] == "same", found
