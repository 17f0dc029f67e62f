"""capacity(measured=...): runs that were had move times and narrow bands; what cannot have been run is told."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from partitioner.calibration import distances
from partitioner.cli import main
from partitioner.errors import ArgumentError
from partitioner.forecast import CapacityReport
from partitioner.preflight import capacity
from partitioner.rates import constants

FIXED = {"mesh": {"tp": 1, "pp": 1, "dp": 4}, "microbatches": 2, "recompute": "never", "shard": "none"}
RUN = {"mesh": {"dp": 4}, "microbatches": 2}
MOVED = 1 - distances().repeat


def make() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(512, 512), nn.GELU())])
    return model, torch.zeros(8, 512)


def asked(**given) -> CapacityReport:
    model, inputs = make()
    return capacity(model, inputs, **{"gpus": "4xH100", "batch_size": 64, "curve": False} | given)


@pytest.fixture(scope="module")
def plain() -> CapacityReport:
    return asked(**FIXED)


@pytest.mark.parametrize("times", [1.2, 0.9])
def test_its_own_layout_moves_most_of_the_way(plain, times):
    found = asked(**FIXED, measured={**RUN, "step_s": times * plain.best.step_s})
    factor = times**MOVED
    assert found.best.factor == pytest.approx(factor)
    assert found.best.step_s == pytest.approx(factor * plain.best.step_s)
    assert found.best.band == pytest.approx(constants().error_band * math.sqrt(1 - MOVED**2))
    assert found.band == plain.band == plain.best.band == constants().error_band
    (run,) = found.measured
    assert (run.measured_s, run.predicted_s) == pytest.approx((times * plain.best.step_s, plain.best.step_s))
    assert run.then_s == pytest.approx(found.best.step_s)
    assert sum(found.best.parts.model_dump().values()) == pytest.approx(found.best.step_s)


def test_samples_a_second_are_a_step_of_the_batch(plain):
    step_s = 1.1 * plain.best.step_s
    by_time = asked(**FIXED, measured=[{**RUN, "step_s": step_s}])
    by_rate = asked(**FIXED, measured=[{**RUN, "samples_per_s": 64 / step_s}])
    assert by_rate.best.step_s == pytest.approx(by_time.best.step_s)


def test_two_runs_move_it_further_than_one(plain):
    run = {**RUN, "step_s": 1.2 * plain.best.step_s}
    once, twice = asked(**FIXED, measured=[run]), asked(**FIXED, measured=[run, run])
    assert math.log(twice.best.factor) == pytest.approx(math.log(1.2) * MOVED / (MOVED + (1 - MOVED) / 2))
    assert plain.best.step_s < once.best.step_s < twice.best.step_s < run["step_s"]
    assert twice.best.band < once.best.band < plain.best.band


def test_other_layouts_move_less_and_other_devices_not_at_all(plain):
    run = {**RUN, "step_s": 1.2 * plain.best.step_s}
    found = asked(**FIXED, measured=run, what_if={"mesh": [{"tp": 4, "pp": 1, "dp": 1}], "gpus": ["4xA100-80GB"]})
    other, elsewhere = (one.layout for one in found.variations)
    assert 1 < other.factor < found.best.factor and found.best.band < other.band < found.band
    assert elsewhere.factor == 1 and elsewhere.band == found.band
    assert any("without the measured runs" in line for line in found.why)


def test_a_run_beyond_all_published_errors_moves_all_and_is_questioned(plain):
    found = asked(**FIXED, measured={**RUN, "step_s": 3 * plain.best.step_s})
    usual = distances().usual
    assert math.log(found.best.factor) == pytest.approx(math.log(3) - usual + MOVED * usual)
    assert any("Was it this training?" in line for line in found.why)


def test_the_report_shows_both_numbers_and_is_loaded_again(plain, tmp_path):
    found = asked(**FIXED, measured={**RUN, "step_s": 1.2 * plain.best.step_s})
    text = str(found)
    assert "without the 1 measured run" in text and "+20.0 %" in text and "off by" in text
    found.save(tmp_path / "report.json")
    assert CapacityReport.load(tmp_path / "report.json") == found


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"mesh": {"dp": 4}}, r"measured\[0\] gives no time: give step_s or samples_per_s"),
        ({"mesh": {"dp": 4}, "step_s": 1, "samples_per_s": 1}, r"gives step_s and samples_per_s"),
        ({"step_s": 1.0}, r"measured\[0\] has no mesh"),
        ({"mesh": {"dp": 4}, "step_s": -1.0}, r"step_s=-1.0 is impossible"),
        ({"mesh": {"dp": 4}, "step_s": "1 s"}, r"is a str: give a number"),
        ({"mesh": {"dp": 4}, "step_s": 1.0, "microbatches": 0}, r"microbatches=0 is impossible"),
        ({"mesh": {"xp": 4}, "step_s": 1.0}, r"measured\[0\]: mesh has no axis 'xp'"),
        ({"mesh": {"dp": 3}, "step_s": 1.0}, r"64 does not divide by 3 replicas"),
        ({"mesh": {"dp": 4}, "microbatches": 5, "step_s": 1.0}, r"16 samples do not divide into 5 micro-batches"),
        ({"mesh": {"dp": 4}, "step_s": 1.0, "gpus": "4xA100-80GB"}, r"ran on A100-80GB, asked for is H100"),
        ({"mesh": {"dp": 4}, "step_s": 1.0, "precision": "bf16"}, r"ran in bf16, asked for is fp32"),
        ({"mesh": {"dp": 4}, "step_s": 1.0, "recompute": "often"}, r"recompute 'often' is not known"),
        ({"mesh": {"dp": 4}, "step_s": 1000.0}, r"a step of 1000 s is .* times the .* are predicted"),
        ({"mesh": {"dp": 4}, "step_s": 1.0, "colour": 1}, r"measured\[0\] has no 'colour'"),
        ("dp=4", r"measured\[0\]|measured='dp=4'"),
        ([3], r"measured\[0\]=3 is a int"),
    ],
)
def test_what_cannot_have_been_run_is_told(run, message):
    with pytest.raises(ArgumentError, match=message):
        asked(measured=run)


def test_the_command_line_takes_runs(plain, capsys):
    run = f"dp=4,microbatches=2,step_s={1.2 * plain.best.step_s}"
    arguments = [
        "capacity",
        "tests.test_measured:make",
        "--gpus",
        "4xH100",
        "--batch-size",
        "64",
        "--no-curve",
        "--json",
    ]
    fixed = ["--mesh", "tp=1,pp=1,dp=4", "--microbatches", "2", "--recompute", "never", "--shard", "none"]
    assert main([*arguments, *fixed, "--measured", run]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["best"]["factor"] == pytest.approx(1.2**MOVED)
    assert told["measured"][0]["measured_s"] == pytest.approx(1.2 * plain.best.step_s)
