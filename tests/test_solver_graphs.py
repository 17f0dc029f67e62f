"""Published cost graphs: what the authors' solvers found, ours is no worse, and its own check agrees."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

import graph_checks as checks
import models
import solver

import partitioner as pt
from partitioner.graph import CostGraph
from partitioner.solver.classical.branching import loads_of, step_in_any_order
from partitioner.specs import Link

SETTINGS = {
    "aceso_gpt_1_3B_layers": ["minmax,k=8,solver=exact", "alpa,dev=4,B=8,bw=12.5e9,M=17179869184"],
    "pipedream_vgg16": [
        "gpus=16,bw=1e+09,replication=on",
        "gpus=8,bw=1e+09,replication=on,mem=1.6e+10",
        "gpus=4,bw=1e+09,replication=off",
        "gpus=4x4,bw=1e+10x1.25e+09,replication=on",
    ],
    "piper_bert32a100": [
        "devices=16,mem=8.58993e+09,mbs=480,bw=2.68435e+10",
        "devices=8,mem=8.58993e+09,mbs=480,bw=2.68435e+10,noar",
        "devices=4,mem=8.58993e+09,mbs=480,bw=2.68435e+10",
    ],
    "dapple_vgg-19-pbs-32": [
        "topology=8x1,seps=1,2,3,4,5,6,7,8,pbs=32,gbs=2048,mmbs=32",
        "topology=1x4,seps=4,pbs=32,gbs=2048,mmbs=32",
    ],
    "dnnp_throughput_layer-bert24_training": ["contiguous,k=6", "contiguous,k=6,mem=7e+08"],
    "dnnp_throughput_operator-bert_l-3_inference": ["contiguous,k=8", "milp_noncontiguous,k=3"],
    "dnnp_latency_layer-bert24_inference": ["greedy,k=5"],
}


def graph(name: str) -> dict[str, Any]:
    with gzip.open(Path(__file__).parent / "data" / "graphs" / f"{name}.json.gz", "rt") as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded


@pytest.mark.parametrize(("name", "setting"), [(name, one) for name, some in SETTINGS.items() for one in some])
def test_ours_is_no_worse_than_the_reference(name: str, setting: str) -> None:
    loaded = graph(name)
    row = solver.measure(loaded, setting, loaded["known"][setting])
    assert row is not None and row["verdict"] in ("checked", "infeasible")
    if row["reference"] is None:
        assert row["verdict"] == "infeasible"
    else:
        assert row["ratio"] <= 1.0001
        assert not row["reference_optimal"] or row["gap"] < 1e-9


def test_a_split_that_loses_a_layer_or_breaks_a_limit_does_not_pass_the_checks() -> None:
    loaded = graph("dnnp_throughput_layer-bert24_training")
    values = {"k": "6", "mem": "7e8"}
    ids = [node["id"] for node in loaded["nodes"]]
    with pytest.raises(AssertionError, match="lost"):
        checks.loads(loaded, values, [("accelerator", ids[1:])], in_order=True)
    with pytest.raises(AssertionError, match="memory"):
        checks.loads(loaded, values, [("accelerator", ids)], in_order=True)
    assert checks.loads(loaded, {"k": "6"}, [("accelerator", ids)], in_order=True) == pytest.approx(217.813)


def test_a_captured_u_net_is_split_within_two_percent_of_what_any_order_allows() -> None:
    case = models.unet()
    profile = pt.estimate(case.model, case.inputs, loss_fn=case.loss_fn, example_target=case.target, max_share=1 / 64)
    graph = CostGraph(profile)
    found = step_in_any_order(loads_of(graph, 1, Link.of(2e-6, 3e11), 4), microbatches=8)
    assert len(found.stages) == 4 and found.gap < 0.02
    assert sorted(v for stage in found.stages for v in stage) == list(range(graph.num_layers))
