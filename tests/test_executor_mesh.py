"""Which device a rank takes: the plan's, by its number in the node."""

from __future__ import annotations

import pytest
import torch
from given import given_cluster, given_plan

from partitioner.executor.mesh import _device
from partitioner.plan import Plan


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def plan_on(nodes: tuple[int, ...], devices: tuple[int, ...]) -> Plan:
    cluster = given_cluster(len(nodes))
    on_cuda = tuple(device.model_copy(update={"kind": "cuda"}) for device in cluster.devices)
    return given_plan(cluster=cluster.model_copy(update={"devices": on_cuda, "nodes": nodes}), devices=devices)


def taken(plan: Plan, monkeypatch: pytest.MonkeyPatch, **started: int) -> list[str]:
    """The devices of ranks 0 and 1, started with so many ranks a node."""
    found = []
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank % started["per_node"]))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(started["per_node"]))
        found.append(str(_device(plan, rank, None)))
    return found


@pytest.mark.usefixtures("four_devices")
def test_ranks_take_the_devices_that_the_plan_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(plan_on((0, 0, 0, 0), (1, 3)), monkeypatch, per_node=2) == ["cuda:1", "cuda:3"]
    assert taken(plan_on((0, 0, 1, 1), (1, 3)), monkeypatch, per_node=1) == ["cuda:1", "cuda:1"]


@pytest.mark.usefixtures("four_devices")
def test_ranks_started_on_other_nodes_than_planned_take_that_of_their_local_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert taken(plan_on((0, 0, 1, 1), (1, 3)), monkeypatch, per_node=2) == ["cuda:0", "cuda:1"]
    assert taken(plan_on((0, 0, 0, 0), (2, 3)), monkeypatch, per_node=1) == ["cuda:0", "cuda:0"]


@pytest.mark.usefixtures("four_devices")
def test_a_device_asked_for_by_number_is_that_one() -> None:
    assert str(_device(plan_on((0, 0), (0, 1)), 0, "cuda:3")) == "cuda:3"
    assert str(_device(plan_on((0, 0), (0, 1)), 1, "cpu")) == "cpu"
