"""What a split of a published cost graph costs, from the file and the split alone: no solver code in here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

Graph = dict[str, Any]


def ancestors(graph: Graph) -> dict[str, set[str]]:
    """Each layer that is kept with all before it, itself included."""
    dropped = set(graph.get("dropped") or ())
    before: dict[str, set[str]] = {node["id"]: set() for node in graph["nodes"] if node["id"] not in dropped}
    for tail, head, _ in graph["edges"]:
        if tail in before and head in before:
            before[head].add(tail)
    found: dict[str, set[str]] = {}

    def walk(name: str) -> None:
        stack = [name]
        while stack:
            top = stack[-1]
            missing = [one for one in before[top] if one not in found]
            if missing:
                stack += missing
            else:
                stack.pop()
                found[top] = {top}.union(*(found[one] for one in before[top]))

    for name in before:
        walk(name)
    return found


def in_line(graph: Graph) -> list[dict[str, Any]]:
    """The kept layers in an order that the edges allow, the file's own wherever it is one."""
    above = ancestors(graph)
    nodes = [node for node in graph["nodes"] if node["id"] in above]
    if all(not above[node["id"]] & {later["id"] for later in nodes[k + 1 :]} for k, node in enumerate(nodes)):
        return nodes
    return sorted(nodes, key=lambda node: len(above[node["id"]]))


def stored(node: dict[str, Any]) -> float:
    """Bytes that a layer keeps for its backward pass; the output's where the file does not tell more."""
    return float(node.get("stored_activation_bytes", node["activation_bytes"]))


def _in_order(graph: Graph, parts: Sequence[Sequence[Any]]) -> None:
    """Every kept layer once, and no edge from a later part to an earlier one."""
    dropped = set(graph.get("dropped") or ())
    place = {name: k for k, part in enumerate(parts) for name in part}
    assert sum(map(len, parts)) == len(place) == len(graph["nodes"]) - len(dropped), "layers lost or placed twice"
    for tail, head, _ in graph["edges"]:
        if tail not in dropped and head not in dropped:
            assert place[tail] <= place[head], f"{tail} comes after {head}"


def _seconds(node: dict[str, Any]) -> float:
    return float(node["forward_s"] or 0.0) + float(node["backward_s"] or 0.0)


def minmax(graph: Graph, cuts: Sequence[int], num_stages: int) -> float:
    nodes = in_line(graph)
    edges = [0, *cuts, len(nodes)]
    assert len(edges) == num_stages + 1 and all(a < b for a, b in pairwise(edges)), "an empty stage"
    return max(sum(_seconds(node) for node in nodes[a:b]) for a, b in pairwise(edges))


def even(graph: Graph, parts: Sequence[Sequence[str]], num_stages: int) -> float:
    _in_order(graph, parts)
    assert len(parts) <= num_stages
    by_name = {node["id"]: node for node in graph["nodes"]}
    return max(sum(_seconds(by_name[name]) for name in part) for part in parts)


def alpa(graph: Graph, values: dict[str, str], stages: Sequence[tuple[int, int, int]]) -> float:
    nodes, rate, batches = in_line(graph), float(values["bw"]), int(values["B"])
    assert sum(count for *_, count in stages) == int(values["dev"]) and {d for *_, d in stages} <= {1, 2, 4, 8}
    assert stages[0][0] == 0 and stages[-1][1] == len(nodes) and all(a[1] == b[0] for a, b in pairwise(stages))
    costs = []
    for k, (first, last, count) in enumerate(stages):
        inside = nodes[first:last]
        assert inside, "an empty stage"
        weights = sum(node["parameter_bytes"] for node in inside)
        cost = sum(map(_seconds, inside)) / count + 2 * (count - 1) / count * weights / (rate * batches)
        costs.append(cost + (2 * nodes[first - 1]["activation_bytes"] / rate if first else 0.0))
        if values["M"] != "None":
            flying = sum(map(stored, inside))
            assert 8 * weights + flying * (len(stages) - k) <= float(values["M"]) * count * (1 + 1e-12), "memory"
    return sum(costs) + (batches - 1) * max(costs)


def _sent(graph: Graph) -> dict[frozenset[str], float]:
    """Bytes that PipeDream counts at the end of each down-set that it lists: of the layers of its antichain."""
    above = ancestors(graph)
    size = {node["id"]: float(node["activation_bytes"]) for node in graph["nodes"]}
    sent: dict[frozenset[str], float] = {}
    for state in graph["states"]:
        ideal = frozenset().union(*(above[name] for name in state))
        total = sum(size[name] for name in state)
        sent[ideal] = min(total, sent.get(ideal, math.inf))
    return sent


def _replicated(
    graph: Graph, stages: Sequence[dict[str, Any]], rate: float, work: Sequence[float], before: set[str], share: int = 1
) -> float:
    """The slowest stage or transfer of stages in order, on one level of links; `before`: layers of earlier servers."""
    by_name = {node["id"]: node for node in graph["nodes"]}
    sent, done, worst = _sent(graph), set(before), 0.0
    for k, stage in enumerate(stages):
        r = stage["replicas"]
        assert stage["nodes"] and not done & set(stage["nodes"])
        done |= set(stage["nodes"])
        parameters = sum(by_name[name]["parameter_bytes"] for name in stage["nodes"])
        reduced = 4 * (r - 1) * parameters / (rate * r) / (share if k == 0 else 1)
        worst = max(worst, (work[k] + reduced) / r)
        if k + 1 < len(stages):
            out = sent[frozenset(done)]
            worst = max(worst, 2 * out / (rate * stages[k + 1]["replicas"]), 2 * out / (rate * r) if k else 0.0)
    return worst


def pipedream(graph: Graph, values: dict[str, str], stages: Sequence[dict[str, Any]]) -> float:
    _in_order(graph, [stage["nodes"] for stage in stages])
    gpus, used = int(values["gpus"]), 0
    by_name = {node["id"]: node for node in graph["nodes"]}
    for stage in stages:
        used += stage["replicas"]
        if "mem" in values:
            held = sum(by_name[name]["activation_bytes"] + by_name[name]["parameter_bytes"] for name in stage["nodes"])
            assert math.ceil((gpus - used) / stage["replicas"]) * held <= float(values["mem"]), "memory"
        assert values.get("replication") != "off" or stage["replicas"] == 1
    assert used == gpus
    work = [sum(_seconds(by_name[name]) for name in stage["nodes"]) for stage in stages]
    rate = math.inf if values.get("comm") == "off" else float(values["bw"])
    if rate == math.inf:  # transfers are free, reductions are not
        rate = float(values["bw"])
        seconds = []
        for stage, seconds_ in zip(stages, work, strict=True):
            r, parameters = stage["replicas"], sum(by_name[name]["parameter_bytes"] for name in stage["nodes"])
            seconds.append((seconds_ + 4 * (r - 1) * parameters / (rate * r)) / r)
        return max(seconds)
    return _replicated(graph, stages, rate, work, set())


def pipedream_servers(graph: Graph, values: dict[str, str], stages: Sequence[dict[str, Any]]) -> float:
    """Stages over servers, each with the stages inside a server as "inner"."""
    devices, servers = (int(x) for x in values["gpus"].split("x"))
    within, between = (float(x) for x in values["bw"].split("x"))
    _in_order(graph, [one["nodes"] for stage in stages for one in stage["inner"]])
    assert sum(stage["replicas"] for stage in stages) == servers
    by_name = {node["id"]: node for node in graph["nodes"]}
    work, done = [], set()
    for stage in stages:
        inner = stage["inner"]
        assert sum(one["replicas"] for one in inner) == devices
        assert sorted(name for one in inner for name in one["nodes"]) == sorted(stage["nodes"])
        seconds = [sum(_seconds(by_name[name]) for name in one["nodes"]) for one in inner]
        work.append(_replicated(graph, inner, within, seconds, done))
        done |= set(stage["nodes"])
    return _replicated(graph, stages, between, work, set(), share=devices)


def loads(graph: Graph, values: dict[str, str], parts: Sequence[tuple[str, Sequence[Any]]], in_order: bool) -> float:
    """The largest load of accelerators (their layers, and each tensor that they send or receive) and CPUs (layers)."""
    by_id = {node["id"]: node for node in graph["nodes"]}
    place = {name: k for k, (_, part) in enumerate(parts) for name in part}
    assert sum(len(part) for _, part in parts) == len(place) == len(by_id), "layers lost or placed twice"
    kinds = [kind for kind, _ in parts]
    assert kinds.count("accelerator") <= int(values["k"]) and kinds.count("cpu") <= graph["cpus"]
    colors: dict[Any, int] = {}
    for name, node in by_id.items():
        if node["color_class"] is not None:
            assert colors.setdefault(node["color_class"], place[name]) == place[name], "a colour class was split"
    key = {"accelerator": "accelerator_time", "cpu": "cpu_time"}
    total = [sum(by_id[name][key[kind]] for name in part) for kind, part in parts]
    moved: set[tuple[int, Any]] = set()
    for tail, head, _ in graph["edges"]:
        if place[tail] != place[head]:
            moved |= {(place[tail], tail), (place[head], tail)}
    for device, tail in moved:
        if kinds[device] == "accelerator":
            total[device] += by_id[tail]["comm_cost"]
    limit = float(values.get("mem", graph["memory_limit_bytes"]))
    for kind, part in parts:
        assert kind == "cpu" or sum(by_id[name]["memory_bytes"] for name in part) <= limit * (1 + 1e-9), "memory"
    if in_order:
        for tail, head, _ in graph["edges"]:
            if not by_id[tail]["is_backward"] and not by_id[head]["is_backward"]:
                assert place[tail] <= place[head], f"{tail} comes after {head}"
    return max(total)


def ways(node: dict[str, Any], degree: str, values: dict[str, str]) -> list[dict[str, Any]]:
    """A layer's ways to run on that many tensor parallel ranks; "noar" leaves out recomputation."""
    some: list[dict[str, Any]] = node["tmpcs"].get(degree, [])
    return [one for one in some if "noar" not in values or one["id"] == "vanilla"]


def piper(graph: Graph, values: dict[str, str], stages: Sequence[dict[str, Any]]) -> float:
    _in_order(graph, [stage["nodes"] for stage in stages])
    by_id = {node["id"]: node for node in graph["nodes"]}
    place = {name: k for k, stage in enumerate(stages) for name in stage["nodes"]}
    rate, samples = float(values["bw"]), int(values["mbs"])
    assert sum(stage["data"] * stage["tensor"] for stage in stages) <= int(values["devices"])
    assert sum(stage["data"] for stage in stages) <= samples
    worst, following = 0.0, sum(stage["data"] for stage in stages)
    for k, stage in enumerate(stages):
        data, tensor = stage["data"], stage["tensor"]
        assert samples % data == 0 and ("nodp" not in values or data == 1) and ("notp" not in values or tensor == 1)
        flying = math.ceil(following / data)
        following -= data
        chosen = {name: ways(by_id[name], str(tensor), values)[way] for name, way in stage["ways"].items()}
        assert set(chosen) == set(stage["nodes"])
        held = sum(way["memoryUsageA"] * flying + way["memoryUsageB"] for way in chosen.values())
        assert held <= float(values["mem"]) * (1 + 1e-9), "memory"
        moved = 0.0
        for tail, head, cost in graph["edges"]:
            if place[head] == k != place[tail]:
                moved += 2 * (cost + chosen[head]["syncTimeFw"][str(tail)])
            if place[tail] == k != place[head]:
                moved += 2 * (cost + chosen[tail]["syncTimeBw"][str(head)])
        reduced = sum(4 * (data - 1) * way["parameterSize"] / data / samples for way in chosen.values())
        worst = max(
            worst, sum(way["timePerSample"] for way in chosen.values()) / data + (moved / data + reduced) / rate
        )
    return worst


NVLINK, ETHERNET, NCCL = 25e9, 1e9, 3e9
"""Bytes a second that DAPPLE's planner takes within a server, between two, and for groups over several."""


def dapple_trips(graph: Graph, values: dict[str, str], known: dict[str, Any]) -> int:
    """How often the reference counted a transfer that is the longest: what gives its objective for its own stages.

    Its stages are (first, last, replicas, devices) by the file's list of down-sets, the last one's end not counted.
    """
    above = ancestors(graph)
    held = [frozenset().union(*(above[name] for name in state)) for state in graph["states"]]
    ends = [0, *map(int, values["seps"].split(","))]
    stages, count = [], len(held)
    for k, (first, last, _, group) in enumerate(known["stages"]):
        before = held[first - 1] if first else frozenset()
        until = held[last - 1] if k + 1 < len(known["stages"]) else held[count - 1]
        devices = tuple(sum(a <= device < b for device in group) for a, b in pairwise(ends))
        stages.append({"nodes": until - before, "reduced": held[last] - before, "devices": devices})
    off = []
    for trips in (2, 1):
        try:
            value = 1 / dapple(graph, values, stages, known["rp"], trips)
        except AssertionError:  # its list has down-sets that do not hold one another
            continue
        off.append((abs(value - known["objective"]), -trips))
    return -min(off)[1] if off else 2


def dapple(graph: Graph, values: dict[str, str], stages: Sequence[dict[str, Any]], copies: int, trips: int) -> float:
    """The step over the batch's time on one device. `reduced`: layers whose gradients the reference counts for a stage,
    which are its own and the next down-set's; `devices` of a stage by server.
    """
    _in_order(graph, [stage["nodes"] for stage in stages])
    by_name = {node["id"]: node for node in graph["nodes"]}
    sent, scale = _sent(graph), int(values["gbs"]) / int(values["pbs"])
    ends = [0, *map(int, values["seps"].split(","))]
    free = sorted(b - a for a, b in pairwise(ends))
    microbatches = int(values["gbs"]) // copies // int(values["mmbs"])
    assert sum(sum(stage["devices"]) for stage in stages) <= sum(free)
    assert all(sum(stage["devices"]) % copies == 0 for stage in stages)
    work = [sum(_seconds(by_name[name]) for name in stage["nodes"]) * scale for stage in stages]
    longest = max(seconds / sum(stage["devices"]) for seconds, stage in zip(work, stages, strict=True))
    through, done = sum(work) / copies / microbatches, set()
    for stage, following in pairwise(stages):
        done |= set(stage["nodes"])
        out, source, target = sent[frozenset(done)] * scale, stage["devices"], following["devices"]
        if sum(count > 0 for count in target) > 1:
            a_byte = 1 / NCCL
        else:
            outside = sum(source) - next(s for s, t in zip(source, target, strict=True) if t)
            a_byte = outside / sum(source) / ETHERNET if outside else 1 / NVLINK
        longest = max(longest, trips * out * a_byte)
        through += out / copies / microbatches * a_byte
    block, late = longest / microbatches, 0.0
    for k, stage in enumerate(stages):
        n = sum(stage["devices"])
        size = sum(by_name[name]["parameter_bytes"] for name in stage["reduced"])
        assert set(stage["nodes"]) <= set(stage["reduced"])
        rate = NCCL if sum(count > 0 for count in stage["devices"]) > 1 else NVLINK * max(1, n // 2)
        late = max(late, 2 * (n - 1) / n * size / rate - k * block)
    return (block * (microbatches - 1) + through + late) / sum(work)


def latency(graph: Graph, values: dict[str, str], parts: Sequence[tuple[str, Sequence[Any]]]) -> float:
    """When one request is done: an accelerator's piece runs as a whole, layers on CPUs as soon as they can."""
    by_id = {node["id"]: node for node in graph["nodes"]}
    place = {name: k for k, (_, part) in enumerate(parts) for name in part}
    assert sum(len(part) for _, part in parts) == len(place) == len(by_id), "layers lost or placed twice"
    kinds = [kind for kind, _ in parts]
    assert kinds.count("accelerator") <= int(values["k"]) and kinds.count("cpu") <= 1
    colors: dict[Any, int] = {}
    for name, node in by_id.items():
        if node["color_class"] is not None:
            assert colors.setdefault(node["color_class"], place[name]) == place[name], "a colour class was split"
    for kind, part in parts:
        held = sum(by_id[name]["memory_bytes"] for name in part)
        assert kind == "cpu" or held <= graph["memory_limit_bytes"] * (1 + 1e-9), "memory"
    block = {name: ("piece", place[name]) if kinds[place[name]] == "accelerator" else ("layer", name) for name in by_id}
    takes: dict[tuple[str, Any], set[Any]] = {one: set() for one in block.values()}
    hands: dict[tuple[str, Any], set[Any]] = {one: set() for one in block.values()}
    for tail, head, _ in graph["edges"]:
        if block[tail] != block[head]:
            hands[block[tail]].add(tail)
            takes[block[head]].add(tail)
    finish: dict[tuple[str, Any], float] = {}
    waiting = list(takes)
    while waiting:
        ready = [one for one in waiting if all(block[tail] in finish for tail in takes[one])]
        assert ready, "pieces wait for each other"
        for one in ready:
            start = max((finish[block[tail]] for tail in takes[one]), default=0.0)
            if one[0] == "layer":
                finish[one] = start + by_id[one[1]]["cpu_time"]
            else:
                moved = sum(by_id[tail]["comm_cost"] for tail in takes[one] | hands[one])
                finish[one] = start + moved + sum(by_id[name]["accelerator_time"] for name in parts[one[1]][1])
        waiting = [one for one in waiting if one not in finish]
    return max(finish.values())


def train(graph: Graph, values: dict[str, str], parts: Sequence[Sequence[str]], rate: float) -> float:
    """One micro-batch through all stages and over all boundaries, and the slowest once more for each other one."""
    _in_order(graph, parts)
    assert len(parts) <= int(values["stages"]) and all(parts)
    by_name = {node["id"]: node for node in graph["nodes"]}
    place = {name: k for k, part in enumerate(parts) for name in part}
    last: dict[str, int] = {}
    for tail, head, _ in graph["edges"]:
        if tail in place and head in place:
            last[tail] = max(last.get(tail, 0), place[head])
    work = [sum(_seconds(by_name[name]) for name in part) for part in parts]
    moved = [
        2 * sum(by_name[name]["activation_bytes"] for name, end in last.items() if place[name] < k <= end) / rate
        for k in range(1, len(parts))
    ]
    return sum(work) + sum(moved) + (int(values["microbatches"]) - 1) * max(work + moved)
