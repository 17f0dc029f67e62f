"""Stages with each their own number of ranks against every such split there is, published ones and closed forms."""

from __future__ import annotations

import gzip
import json
import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import chain, cluster, random_chain
from turn_oracle import every_turn_plan_s

from partitioner.errors import InfeasibleError, NotBuiltError
from partitioner.report.explorer import Exploration
from partitioner.residency import residency
from partitioner.simulator import simulate
from partitioner.solver import solve
from partitioner.solver.classical.replicated import Boundaries, slowest_stage
from partitioner.specs import Link, Training

SLOW = Link.of(2e-5, 5e8)
GRAPHS = Path(__file__).parent / "data" / "graphs"


@pytest.mark.parametrize("seed", range(24))
def test_no_cuts_and_ranks_by_stage_are_better(seed: int) -> None:
    rng = random.Random(seed)
    n, devices = rng.randrange(3, 7), rng.randrange(2, 6)
    profile = random_chain(rng, n)
    training = Training(batch_size=rng.choice([1, 3, 4, 5, 7]), objective="throughput")
    there = cluster(devices, link=SLOW, memory_bytes=rng.choice([2**50, 700_000]))
    best = every_turn_plan_s(profile, there, training)
    try:
        plan = solve(profile, there, training)
    except InfeasibleError:
        assert best == math.inf
        return
    assert plan.prediction.step_s <= best * (1 + 1e-9) or len(profile.tensors) != n - 1
    assert plan.prediction.step_s <= best * 1.02
    assert plan.lower_bound_s <= best * (1 + 1e-9)
    if plan.takes_turns:
        assert plan.prediction.step_s >= best * (1 - 1e-9)
    assert plan.prediction.lost.total == pytest.approx(1 - plan.prediction.efficiency)


@pytest.mark.parametrize("seed", range(12))
def test_of_a_chain_it_is_proven(seed: int) -> None:
    rng = random.Random(seed)
    profile = chain([rng.random() for _ in range(6)], tensor_bytes=[rng.randrange(3 * 10**8) for _ in range(6)])
    training = Training(batch_size=rng.choice([5, 7, 12]), objective="throughput")
    there = cluster(rng.randrange(3, 6), link=SLOW)
    plan = solve(profile, there, training)
    assert plan.prediction.step_s <= every_turn_plan_s(profile, there, training) * (1 + 1e-9)
    assert plan.gap < 1e-8


@pytest.mark.parametrize("seed", range(8))
def test_of_unlike_devices_the_bound_holds_for_turns_too(seed: int) -> None:
    rng = random.Random(seed)
    profile = chain(
        [rng.random() * 1e-3 for _ in range(4)],
        tensor_bytes=[rng.randrange(100_000) for _ in range(4)],
        parameter_bytes=[4_000 * rng.randrange(50) for _ in range(4)],
    )
    count = rng.randrange(3, 5)
    there = cluster(
        count,
        link=SLOW,
        inter=Link.of(1e-4, 1e8),
        nodes=[rng.randrange(2) for _ in range(count)],
        speeds=[rng.choice([0.5, 1.0, 2.0]) if seed % 2 else 1.0 for _ in range(count)],
    )
    training = Training(batch_size=rng.choice([3, 5, 6]), objective="throughput")
    plan = solve(profile, there, training)
    best = every_turn_plan_s(profile, there, training, any_order=True)
    assert plan.lower_bound_s <= min(best, plan.prediction.step_s) * (1 + 1e-9)
    if plan.takes_turns:
        assert plan.prediction.step_s >= best * (1 - 1e-9)


@pytest.mark.parametrize(("devices", "ranks", "turns"), [(3, [1, 2], 6), (5, [1, 4], 3), (6, [1, 4], 3)])
def test_one_heavy_layer_among_light_ones_gets_the_ranks(devices: int, ranks: list[int], turns: int) -> None:
    """12 samples of 1 s, then 4 s each: layers that do not fit one device together.

    Every pipeline of a mesh has one rank for the heavy layer: with half as many pipelines as devices, 12 x 4 s through
    them. In turns all ranks but one are the heavy layer's.
    """
    profile = chain([0.5, 0.5, 4.0], parameter_bytes=[500, 500, 1000])
    there, training = cluster(devices, memory_bytes=1500), Training(batch_size=12, objective="throughput")
    plan = solve(profile, there, training)
    assert plan.takes_turns and [len(stage.ranks) for stage in plan.stages] == ranks
    assert plan.num_microbatches % ranks[1] == 0 and plan.mesh == {"pp": 2, "dp": 1}
    assert plan.prediction.step_s == pytest.approx(max(12 * 1.0, turns * 4.0))
    equal = [
        solve(profile, there, training.model_copy(update={"mesh": {"pp": pp}})).prediction.step_s
        for pp in (2, 3)
        if pp <= devices
    ]
    assert min(equal) == pytest.approx(4.0 * 12 / (devices // 2))
    assert min(equal) > plan.prediction.step_s * 1.3
    assert plan.gap < 1e-9


def test_a_batch_that_no_number_of_replicas_divides_is_taken_in_turns() -> None:
    plan = solve(chain([1.0, 1.0]), cluster(3), Training(batch_size=7, objective="throughput"))
    assert [len(stage.ranks) for stage in plan.stages] == [3] and plan.num_microbatches == 7
    assert plan.prediction.step_s == 3 * 2.0  # ceil(7 / 3) turns
    assert plan.mesh == {"pp": 1, "dp": 1} and plan.num_ranks == 3


def test_equal_replicas_are_kept_where_turns_are_no_faster_and_where_a_mesh_or_a_pin_asks() -> None:
    training = Training(batch_size=4, objective="throughput")
    assert not solve(chain([1.0] * 4), cluster(4), training).takes_turns
    profile = chain([1.0, 4.0], parameter_bytes=1000)
    there = cluster(3, memory_bytes=1500)
    assert solve(profile, there, training).takes_turns
    for fixed in ({"mesh": {"pp": 2}}, {"pin": {"1": 1}}, {"objective": "latency"}):
        assert not solve(profile, there, training.model_copy(update=fixed)).takes_turns


def test_more_devices_never_make_it_slower() -> None:
    profile = random_chain(random.Random(11), 8)
    steps = [
        solve(profile, cluster(count, link=SLOW), Training(batch_size=30, objective="throughput")).prediction.step_s
        for count in range(1, 10)
    ]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(steps))


def published() -> dict[str, Any]:
    graph: dict[str, Any] = json.loads(gzip.decompress((GRAPHS / "pipedream_vgg16.json.gz").read_bytes()))
    return graph


@pytest.mark.parametrize("gpus", [4, 8, 16])
@pytest.mark.parametrize("rate", [1e8, 1e9, 1e10])
def test_pipedream_s_own_splits_of_vgg16_are_no_better(gpus: int, rate: float) -> None:
    """Its published objective without the reduction of gradients, which inference has not: each stage's share of its
    seconds, and what crosses its ends over its own ranks. The reference's stages under it, and its recurrence."""
    graph = published()
    # The profile's nodes are listed in no order; ids number them along the chain, one of them with two branches.
    nodes = sorted(graph["nodes"], key=lambda node: int(node["id"].removeprefix("node")))
    seconds = np.array([node["forward_s"] + node["backward_s"] for node in nodes])
    out = np.array([2.0 * node["activation_bytes"] for node in nodes])
    n, m = len(nodes), math.lcm(*range(1, gpus + 1))
    profile = chain(seconds.tolist(), tensor_bytes=out.astype(int).tolist())
    there = cluster(gpus, link=Link.of(0.0, rate))
    plan = solve(profile, there, Training(batch_size=m, microbatches=m, objective="throughput"))
    ours = plan.prediction.step_s / m

    def share(first: int, last: int, ranks: int) -> float:
        ends = [out[k - 1] / rate for k in (first, last) if 0 < k < n]
        return max([float(seconds[first:last].sum()), *ends]) / ranks

    places = {node["id"]: k for k, node in enumerate(nodes)}
    for name in (f"gpus={gpus},bw={rate:g},replication=on", f"gpus={gpus},bw={rate:g},replication=off"):
        if name in graph["known"]:
            stages = [
                (sorted(places[one] for one in s["nodes"]), s["replicas"]) for s in graph["known"][name]["stages"]
            ]
            theirs = max(share(own[0], own[-1] + 1, ranks) for own, ranks in stages)
            assert ours <= theirs * 1.0001
    boundaries = Boundaries(
        np.tri(n + 1, n, k=-1, dtype=np.bool_),
        seconds,
        np.zeros(n),
        np.zeros(n),
        np.concatenate(([0.0], out[:-1], [0.0])),
    )
    recurrence = slowest_stage(boundaries, gpus, rate, trips=1.0)
    assert recurrence is not None and recurrence.seconds <= ours * (
        1 + 1e-9
    )  # it does not count the first stage's sends
    counted = max(share(*stage[:3]) for stage in recurrence.stages)
    assert ours <= counted * (1 + 1e-9)


def test_every_view_shows_ranks_that_take_turns(tmp_path: Path) -> None:
    profile = chain([0.5, 0.5, 4.0], parameter_bytes=[500, 500, 1000], tensor_bytes=4)
    there, training = cluster(3, memory_bytes=1700, link=SLOW), Training(batch_size=12, objective="throughput")
    plan = solve(profile, there, training)
    text = str(plan)
    assert "pp 2 x dp 1, 1 + 2 ranks in turn: 3 of 3 devices" in text and "take turns at the micro-batches" in text
    timeline = simulate(plan)
    assert timeline.num_ranks == 3 and {(s.stage, s.rank) for s in timeline.spans} == {(0, 0), (1, 1), (1, 2)}
    assert timeline.step_s >= plan.prediction.step_s
    for rank, held in enumerate(residency(plan, timeline)):
        assert held.peak.total == plan.prediction.stages[min(rank, 1)].memory.total
    plan.save_report(tmp_path / "plan.html")
    assert "1 + 2 ranks in turn" in (tmp_path / "plan.html").read_text()
    plan.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any("rank 2" in str(event.get("args")) for event in events if event["ph"] == "M")
    mesh = solve(profile, there, training.model_copy(update={"mesh": {"pp": 2}}))
    assert "1 + 2 ranks in turn" in str(plan.compare(mesh))
    with pytest.raises(NotBuiltError, match="take turns cannot be explored"):
        Exploration(plan)
    assert simulate(plan, microbatches=5).step_s > 0
