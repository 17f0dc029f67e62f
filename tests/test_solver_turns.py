"""Stages with each their own number of ranks against every such split there is, published ones and closed forms."""

from __future__ import annotations

import gzip
import json
import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chains import chain, cluster, random_chain
from turn_oracle import every_turn_plan_s

from partitioner.errors import InfeasibleError, NotBuiltError
from partitioner.report.explorer import Exploration
from partitioner.residency import residency
from partitioner.simulator import simulate
from partitioner.solver import solve
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


def vgg16() -> tuple[dict[str, Any], list[float], list[int], list[int]]:
    """PipeDream's published profile: its references; seconds, forward and backward, parameter bytes, and bytes there
    and back, of what lies between its 40 possible cuts."""
    graph: dict[str, Any] = json.loads(gzip.decompress((GRAPHS / "pipedream_vgg16.json.gz").read_bytes()))
    nodes = {node["id"]: node for node in graph["nodes"]}
    tails: dict[str, list[str]] = {}
    for tail, head, _ in graph["edges"]:
        tails.setdefault(head, []).append(tail)
    seconds, parameters, out = [], [], []
    seen = set(graph["dropped"])
    for state in graph["states"]:
        new, left = [], list(state)
        while left:
            if (one := left.pop()) not in seen:
                seen.add(one)
                new.append(nodes[one])
                left += tails.get(one, [])
        seconds.append(sum(node["forward_s"] + node["backward_s"] for node in new))
        parameters.append(int(sum(node["parameter_bytes"] for node in new)))
        out.append(int(2 * sum(nodes[one]["activation_bytes"] for one in state)))
    return graph["known"], seconds, parameters, out


@pytest.mark.parametrize("gpus", [2, 4, 8, 16])
def test_pipedream_s_published_optimum_without_replicas_is_reached(gpus: int) -> None:
    """Its objective is then that of a pipeline's throughput: the slowest stage or transfer."""
    known, seconds, _, out = vgg16()
    training = Training(batch_size=1, objective="throughput", mesh={"pp": gpus})
    plan = solve(chain(seconds, tensor_bytes=out), cluster(gpus, link=Link.of(0.0, 1e9)), training)
    published = known[f"gpus={gpus},bw=1e+09,replication=off"]["objective"]
    assert plan.prediction.step_s == pytest.approx(published, rel=1e-9) and plan.gap < 1e-9


def recurrence(
    seconds: list[float], sizes: list[int], hops: list[float], room: int, devices: int, microbatches: int
) -> float:
    """The least period by the recurrence itself, with every stage that memory has room for."""
    n = len(seconds)
    best = [[math.inf] * (devices + 1) for _ in range(n + 1)]
    best[0][0] = 0.0
    for i, j in ((a, b) for b in range(1, n + 1) for a in range(b) if sum(sizes[a:b]) <= room):
        each = max(sum(seconds[i:j]), hops[i - 1] if i else 0.0, hops[j - 1] if j < n else 0.0)
        for r in range(1, devices + 1):
            period = -(-microbatches // r) * each
            for d in range(r, devices + 1):
                best[j][d] = min(best[j][d], max(best[i][d - r], period))
    return min(best[n])


@pytest.mark.parametrize(("gpus", "microbatches"), [(4, 12), (8, 24), (16, 45), (16, 720_720)])
@pytest.mark.parametrize("rate", [1e9, 1e10])
def test_of_pipedream_s_vgg16_in_stages_it_is_the_recurrence_s_optimum(
    gpus: int, microbatches: int, rate: float
) -> None:
    """Where a device has room for little more than the largest layer, so that stages are needed: as in the 15-1
    configuration that was published for this model, most ranks go to the convolutions."""
    _, seconds, parameters, out = vgg16()
    out, rate = [size // 10**6 for size in out], rate / 10**6  # so that memory is for weights
    room = max(parameters) + 2**20
    there = cluster(gpus, memory_bytes=room, link=Link.of(0.0, rate))
    training = Training(batch_size=microbatches, microbatches=microbatches, objective="throughput")
    plan = solve(chain(seconds, parameter_bytes=parameters, tensor_bytes=out), there, training)
    best = recurrence(seconds, parameters, [size / rate for size in out], room, gpus, microbatches)
    assert plan.prediction.step_s == pytest.approx(best, rel=1e-9) and plan.gap < 1e-8
    ranks = [len(stage.ranks) for stage in plan.stages]
    assert plan.takes_turns and max(ranks) >= gpus / 2 and ranks[-1] == 1


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
    with pytest.raises(NotBuiltError, match=r"for inference .* cannot be explored"):
        Exploration(plan)
    with pytest.raises(NotBuiltError, match=r"for inference .* cannot be explored"):
        Exploration(mesh)
    assert simulate(plan, microbatches=5).step_s > 0
