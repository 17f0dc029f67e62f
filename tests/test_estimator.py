"""Estimates beside published runs, and what an estimated profile is good for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import partitioner as pt
from partitioner.errors import ArgumentError
from partitioner.estimator import estimate, estimate_work
from partitioner.rates import constants, slope
from partitioner.steps import Layout, planner

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "benchmarks"))

from capacity import Predictor, kendall, scores  # noqa: E402
from published_runs import port_of, runs_of  # noqa: E402

RUNS = [run for path in sorted((HERE / "data/published").glob("*.csv")) for run in runs_of(path)]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.row_id)
def test_published_steps_are_met_within_a_quarter(run) -> None:  # type: ignore[no-untyped-def]
    assert Predictor(constants()).seconds(run) == pytest.approx(run.measured_s, rel=0.25)


def small(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))


def test_a_plan_is_solved_from_an_estimate_without_the_device() -> None:
    profile = estimate(small("meta"), torch.zeros(64, 64, device="meta"), device="H100")
    assert profile.provenance == "estimated" and profile.device == "H100"
    training = pt.Training(batch_size=64, mesh={"pp": 2, "dp": 1}, schedule="1f1b")
    plan = pt.solve(profile, pt.Cluster.parse("2xH100"), training)
    assert len(plan.stages) == 2


def test_an_estimate_is_saved_and_read_like_any_profile(tmp_path: Path) -> None:
    profile = estimate(small(), torch.zeros(8, 64), device="L4")
    profile.save(tmp_path / "profile.json")
    assert pt.Profile.load(tmp_path / "profile.json") == profile


@pytest.mark.parametrize("batch", [2, 3, 16])
def test_layers_that_refuse_one_sample_are_estimated_from_more(batch: int) -> None:
    model = nn.Sequential(nn.Linear(64, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 8))
    profile = estimate(model, torch.zeros(batch, 64), device="T4")
    assert min(profile.microbatch_sizes) >= 2
    wider = estimate(model, torch.zeros(batch, 64), device="T4", microbatch_sizes=(1 << 12, 1 << 16))
    moved = [cost.forward_s for cost in wider.layers[1].costs]
    assert moved[1] == pytest.approx(16 * moved[0], rel=0.2)  # by the sample, once they outweigh the call


def test_every_layer_carries_the_error_band() -> None:
    profile = estimate(small(), torch.zeros(8, 64), device="A100-80GB")
    for layer in profile.layers:
        for cost in layer.costs:
            assert cost.forward_spread_s == pytest.approx(constants().error_band * cost.forward_s)


def test_a_narrower_precision_halves_saved_bytes_and_is_not_slower() -> None:
    model, inputs = small(), torch.zeros(4096, 64)
    wide, narrow = (estimate(model, inputs, device="H100", precision=p) for p in ("fp32", "bf16-mixed"))
    assert sum(layer.costs[-1].saved_bytes for layer in wide.layers) == pytest.approx(
        2 * sum(layer.costs[-1].saved_bytes for layer in narrow.layers), rel=0.01
    )
    for a, b in zip(wide.layers, narrow.layers, strict=True):
        assert b.costs[-1].forward_s <= a.costs[-1].forward_s
    assert all(
        a.bytes_at == tuple(2 * n for n in b.bytes_at) for a, b in zip(wide.tensors, narrow.tensors, strict=True)
    )


def test_an_unknown_device_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ArgumentError, match=r"the device 'H1000' is not known. Known: P4, .*H100"):
        estimate(small(), torch.zeros(8, 64), device="H1000")


def test_an_unknown_optimizer_is_refused_with_those_that_are_known() -> None:
    for optimizer in ("lion", 8):
        with pytest.raises(ArgumentError, match=f"optimizer={optimizer!r} is unknown; use 'sgd', .*'none'"):
            estimate(small(), torch.zeros(8, 64), optimizer=optimizer)  # type: ignore[arg-type]
    assert estimate(small(), torch.zeros(8, 64), optimizer="none").optimizer_s == 0


def test_work_of_layers_adds_up_to_the_model_whatever_the_layers() -> None:
    model, inputs = small(), torch.zeros(8, 64)
    fine, coarse = (estimate_work(model, inputs, max_share=share) for share in (0.01, 2.0))
    for one in (fine, coarse):
        assert one.parameters == sum(p.numel() for p in model.parameters())
    flops = [planner(one, "H100").step(Layout(microbatch=8)).flops for one in (fine, coarse)]
    assert flops[0] == flops[1]


def test_scores_are_those_of_the_definitions() -> None:
    assert kendall([(1, 1), (2, 2), (3, 3)]) == (3, 3)
    assert kendall([(1, 3), (2, 2), (3, 1), (4, 1)]) == (-5, 5)
    line = scores([(110, 100, 0), (90, 100, 0), (200, 100, 1)])
    assert line["mape_pct"] == pytest.approx(40) and line["bias_pct"] == pytest.approx(100 / 3)
    assert line["median_pct"] == pytest.approx(10) and line["rows"] == 3


@pytest.mark.parametrize(
    ("words", "gigabytes"),
    [
        ("4x Omni-Path 100 Gb/s per node", 6.25),
        ("8x HDR IB 200 Gb/s per node (1 per GPU)", 25.0),
        ("NDR IB 400 Gb/s per GPU", 50.0),
        ("800 Gb/s per node", 12.5),
    ],
)
def test_the_port_of_a_device_is_read_from_the_rows_words(words: str, gigabytes: float) -> None:
    port = port_of({"inter_link": words, "gpus_per_node": "8"})
    assert port is not None and slope(port) == pytest.approx(gigabytes * 1e9)


def test_an_estimate_has_the_buffers_of_a_measured_profile() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3))
    common = {"loss_fn": nn.functional.mse_loss, "example_target": torch.zeros(8, 4, 4, 4)}
    inputs = torch.zeros(8, 3, 8, 8)
    measured, estimated = pt.profile(model, inputs, **common), estimate(model, inputs, device="H100", **common)
    held = sum(buffer.bytes for buffer in estimated.buffers) + estimated.buffer_bytes
    assert held == sum(buffer.nbytes for buffer in model.buffers())
    assert (estimated.buffers, estimated.buffer_bytes) == (measured.buffers, measured.buffer_bytes)
