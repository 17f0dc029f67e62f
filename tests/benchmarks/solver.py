"""Solve published cost graphs under their own objectives, and compare with what their authors' solvers found.

usage: python tests/benchmarks/solver.py --graphs DIR [--names substring] [--captured] [--json FILE]

DIR holds *.json.gz: layers, edges and, by setting, the objective that a reference solver reached, with its split and
its CPU seconds. Every split of ours is measured again by `graph_checks`, from the file alone. Ratios are ours /
reference, of speed-ups reference / ours: below 1 is better. Graphs with branches that no reference has solved are
split for steps of synchronous training as well; --captured: so are U-Nets of ours, captured here (this needs torch).
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import graph_checks as checks
import numpy as np

from partitioner.solver.chain import Chain, cheapest_split, smallest_bottleneck
from partitioner.solver.classical.branching import step_in_any_order
from partitioner.solver.classical.ideals import as_flags
from partitioner.solver.classical.latency import least_latency
from partitioner.solver.classical.loads import Kind, Loads, Placement
from partitioner.solver.classical.maxload import place_in_order
from partitioner.solver.classical.replicated import Boundaries, Slowest, slowest_stage, slowest_stage_of_servers
from partitioner.solver.classical.scattered import place_anywhere
from partitioner.solver.classical.servers import Line, Servers, longest_line
from partitioner.solver.classical.servers import least_step as least_step_over_servers
from partitioner.solver.classical.sharded import Sharding, Ways, slowest_shard
from partitioner.solver.classical.synchronous import Options, least_step
from partitioner.solver.starts import stage_starts

Graph = dict[str, Any]
TOLERANCE = 1e-6
"""Relative; how far the value that the solver states may be from the one measured."""


class Answer(NamedTuple):
    """Ours: the value by the solver, by the check, and what the solver says none can beat."""

    value: float
    checked: float
    lower_bound: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--graphs", type=Path, required=True)
    parser.add_argument("--names", default="", help="only graphs whose name has this in it")
    parser.add_argument("--captured", action="store_true", help="also U-Nets of ours, captured here")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'graph':<36} {'setting':<58} {'ours':>12} {'reference':>12} {'ratio':>8} {'gap':>8} {'s':>7} {'ref s':>8}")
    graphs = (read(path) for path in sorted(args.graphs.glob("*.json.gz")) if args.names in path.name)
    for graph in itertools.chain(graphs, captured() if args.captured else ()):
        for setting, known in [*graph["known"].items(), *branching_settings(graph)]:
            if (row := measure(graph, setting, known)) is not None:
                rows.append(row)
                print(line(row), flush=True)
    summarise(rows)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=1))


def read(path: Path) -> Graph:
    with gzip.open(path, "rt") as file:
        graph: Graph = json.load(file)
    return graph


def captured() -> Iterator[Graph]:
    """U-Nets of 3 to 6 levels as graphs of the same form: estimated, of one sample."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import models
    import torch

    import partitioner as pt

    for levels in (3, 4, 5, 6):
        model, images = models.UNet(8, levels), torch.randn(1, 3, 2 ** (levels + 2), 2 ** (levels + 2))
        profile = pt.estimate(model, (images,), loss_fn=torch.nn.functional.mse_loss, example_target=images)
        sent = {layer.id: 0.0 for layer in profile.layers}
        edges = set()
        for tensor in profile.tensors:
            sent[tensor.producer] += profile.tensor_bytes(tensor, 1)
            edges |= {(tensor.producer, user) for user in tensor.consumers if user != tensor.producer}
        nodes = [
            {
                "id": layer.id,
                "forward_s": layer.cost(1).forward_s,
                "backward_s": layer.cost(1).backward_s,
                "activation_bytes": sent[layer.id],
            }
            for layer in profile.layers
        ]
        yield {
            "name": f"captured U-Net, {levels} levels",
            "family": "captured",
            "nodes": nodes,
            "edges": [[u, v, None] for u, v in sorted(edges)],
            "known": {},
        }


def measure(graph: Graph, setting: str, known: dict[str, Any]) -> dict[str, Any] | None:
    objective = known["objective_def"]
    if objective not in SOLVERS:
        return None
    values = settings(setting)
    start = time.process_time()
    answer, check = SOLVERS[objective](graph, setting, values, known)
    solve_s = time.process_time() - start
    reference = known["objective"]
    row = {
        "graph": graph["name"],
        "family": graph["family"],
        "setting": setting,
        "objective_def": objective,
        "reference_solver": known["solver"],
        "reference_optimal": known.get("optimal") is True,
        "objective": None,
        "reference": reference,
        "ratio": None,
        "gap": None,
        "solve_s": solve_s,
        "reference_cpu_s": known.get("cpu_s"),
        "verdict": "infeasible" if answer is None else "checked",
    }
    if answer is None:
        if reference is not None:
            row["verdict"] = "MISSED: the reference has a split"
        return row
    value, lower_bound = answer
    checked = check()
    if abs(checked - value) > TOLERANCE * abs(value):
        row["verdict"] = f"WRONG: the solver says {value}"
    speed = objective == "dapple"
    row |= {
        "objective": 1 / checked if speed else checked,
        "gap": max(0.0, value / lower_bound - 1) if lower_bound else 0.0,
    }
    if reference is not None:
        row["ratio"] = (checked * reference if speed else checked / reference) if reference else 1.0
    return row


def line(row: dict[str, Any]) -> str:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        f"{row['graph']:<36} {row['setting'][:58]:<58} {shown(row['objective'], '.6g'):>12} "
        f"{shown(row['reference'], '.6g'):>12} {shown(row['ratio'], '.5f'):>8} {shown(row['gap'], '.2%'):>8} "
        f"{row['solve_s']:>7.3f} {shown(row['reference_cpu_s'], '.3f'):>8}"
        + ("" if row["verdict"] == "checked" else f"  {row['verdict']}")
    )


def summarise(rows: list[dict[str, Any]]) -> None:
    print()
    for name in sorted({row["objective_def"] for row in rows}):
        print(summary(name, [row for row in rows if row["objective_def"] == name]))
    print(summary("all", rows))


def summary(name: str, rows: list[dict[str, Any]]) -> str:
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    bad = sum(row["verdict"] not in ("checked", "infeasible") for row in rows)
    optimal = [row for row in rows if row["reference_optimal"] and row["gap"] is not None]
    long = [row for row in rows if (row["reference_cpu_s"] or 0) > 1]
    ours, theirs = sum(row["solve_s"] for row in long), sum(row["reference_cpu_s"] for row in long)
    return (
        f"{name:<16} {len(rows):>4} settings, {len(ratios)} compared: ratio worst {max(ratios, default=math.nan):.5f}, "
        f"median {float(np.median(ratios)) if ratios else math.nan:.5f}, over 1.0001: "
        f"{sum(ratio > 1.0001 for ratio in ratios)}, failed checks: {bad}; gap 0 on "
        f"{sum(row['gap'] < 1e-6 for row in optimal)} of {len(optimal)} with an optimal reference, on "
        f"{sum((row['gap'] or 0) < 1e-6 for row in rows)} of all; where the reference took over 1 s ({len(long)}): "
        f"{ours:.2f} s against {theirs:.2f} s" + (f", {theirs / ours:.0f} times" if ours and long else "")
    )


def settings(key: str) -> dict[str, str]:
    """ "gpus=4,seps=8,16" -> {"gpus": "4", "seps": "8,16"}; a word without a value is its own key."""
    values: dict[str, str] = {}
    last = ""
    for part in key.split(","):
        name, has, value = part.partition("=")
        if has:
            values[name], last = value, name
        elif last == "seps":
            values[last] += f",{part}"
        else:
            values[part] = ""
    return values


Solved = tuple[tuple[float, float] | None, Callable[[], float]]
"""(value, lower bound) or None where nothing fits; and the value measured again."""


def kept(graph: Graph) -> list[dict[str, Any]]:
    """Layers that the reference keeps, in the file's order."""
    dropped = set(graph.get("dropped") or ())
    return [node for node in graph["nodes"] if node["id"] not in dropped]


def seconds_of(node: dict[str, Any]) -> float:
    return float(node["forward_s"] or 0.0) + float(node["backward_s"] or 0.0)


def solve_minmax(graph: Graph, setting: str, values: dict[str, str], known: dict[str, Any]) -> Solved:
    """Consecutive layers of the file's order, no transfers."""
    seconds = [seconds_of(node) for node in checks.in_line(graph)]
    n, k = len(seconds), int(values["k"])
    starts = stage_starts(n, k, tuple(range(1, n)))
    if starts is None:
        return None, lambda: math.nan
    chain = Chain(np.concatenate(([0.0], np.cumsum(seconds))), (1.0,) * k, starts, np.zeros((k, n + 1)))
    bound = smallest_bottleneck(chain)
    split = cheapest_split(chain, bound)
    assert split is not None
    return (split.bottleneck_s, bound), lambda: checks.minmax(graph, split.cuts, k)


def solve_alpa(graph: Graph, setting: str, values: dict[str, str], known: dict[str, Any]) -> Solved:
    """Consecutive layers on 1, 2, 4 or 8 devices; sum of the stages and the slowest once more for each micro-batch."""
    nodes, devices, batches, rate = checks.in_line(graph), int(values["dev"]), int(values["B"]), float(values["bw"])
    memory = math.inf if values["M"] == "None" else float(values["M"])
    n = len(nodes)

    def between(figures: list[float]) -> Any:
        before = np.concatenate(([0.0], np.cumsum(figures)))
        return before[None, :] - before[:, None]

    seconds, weights = (
        between(list(map(seconds_of, nodes))),
        between([float(node["parameter_bytes"]) for node in nodes]),
    )
    kept_bytes = between(list(map(checks.stored, nodes)))
    enters = np.array([0.0, *(2 * float(node["activation_bytes"]) / rate for node in nodes[:-1]), 0.0])[:, None]
    counts = tuple(k for k in (1, 2, 4, 8) if k <= devices)
    costs = np.stack([seconds / k + 2 * (k - 1) / k * weights / (rate * batches) + enters for k in counts])
    costs[:, np.tril(np.ones((n + 1, n + 1), dtype=bool))] = math.inf
    step = least_step(Options(counts, costs, 8 * weights, kept_bytes), devices, batches - 1, memory)
    if step is None:
        return None, lambda: math.nan
    return (step.value, step.lower_bound), lambda: checks.alpa(graph, values, step.stages)


def boundaries(graph: Graph) -> Boundaries:
    """The down-sets that PipeDream's file lists, each with the bytes that its antichain sends."""
    nodes = kept(graph)
    position = {node["id"]: k for k, node in enumerate(nodes)}
    ancestors = checks.ancestors(graph)
    number = {name: sum(1 << position[one] for one in some) for name, some in ancestors.items()}
    bytes_of = {node["id"]: float(node["activation_bytes"]) for node in nodes}
    ideals, crossing = [0], [0.0]
    for state in graph["states"]:
        ideal = 0
        for name in state:
            ideal |= number[name]
        ideals.append(ideal)
        crossing.append(sum(bytes_of[name] for name in state))
    order = sorted(range(len(ideals)), key=lambda k: (ideals[k].bit_count(), k))
    return Boundaries(
        as_flags([ideals[k] for k in order], len(nodes)),
        np.array([seconds_of(node) for node in nodes]),
        np.array([float(node["parameter_bytes"]) for node in nodes]),
        np.array([float(node["activation_bytes"]) for node in nodes]),
        np.array([crossing[k] for k in order]),
    )


def solve_pipedream(graph: Graph, setting: str, values: dict[str, str], known: dict[str, Any]) -> Solved:
    chain = boundaries(graph)
    found = slowest_stage(
        chain,
        int(values["gpus"]),
        float(values["bw"]),
        replicate=values.get("replication") != "off",
        pay_transfers=values.get("comm") != "off",
        memory_bytes=float(values.get("mem", math.inf)),
    )
    return _slowest(graph, chain, found, lambda stages: checks.pipedream(graph, values, stages))


def solve_pipedream_servers(graph: Graph, setting: str, values: dict[str, str], known: dict[str, Any]) -> Solved:
    chain = boundaries(graph)
    devices, servers = (int(x) for x in values["gpus"].split("x"))
    within, between = (float(x) for x in values["bw"].split("x"))
    found = slowest_stage_of_servers(chain, servers, devices, within, between)
    return _slowest(graph, chain, found, lambda stages: checks.pipedream_servers(graph, values, stages))


def _slowest(graph: Graph, chain: Boundaries, found: Slowest | None, check: Callable[[Any], float]) -> Solved:
    if found is None:
        return None, lambda: math.nan
    names = [node["id"] for node in kept(graph)]

    def told(stages: Any) -> list[dict[str, Any]]:
        return [
            {
                "nodes": [names[k] for k in chain.layers(stage.first, stage.last)],
                "replicas": stage.replicas,
                "inner": told(stage.inner),
            }
            for stage in stages
        ]

    return (found.seconds, found.seconds), lambda: check(told(found.stages))


def solve_dapple(graph: Graph, setting: str, values: dict[str, str], known: dict[str, Any]) -> Solved:
    """A step over servers; as time, since the reference tells a speed-up: seconds over those of one device.

    The reference's own figures count a transfer that is the longest of a micro-batch twice in some settings and once in
    others: ours are counted as in the setting that they are compared with.
    """
    trips = checks.dapple_trips(graph, values, known)
    chain = boundaries(graph)
    line_ = longest_line(chain.held, chain.crossing_bytes)
    scale = int(values["gbs"]) / int(values["pbs"])
    ends = [0, *map(int, values["seps"].split(","))]
    n = len(line_) - 1
    line = Line(
        chain.before_s[line_] * scale,
        chain.parameters_before[line_],
        np.minimum(np.arange(n + 1) + 1, n),
        np.append(chain.crossing_bytes[line_][:-1] * scale, 0.0),
        trips,
    )
    servers = Servers(tuple(b - a for a, b in pairwise(ends)), checks.NVLINK, checks.ETHERNET, checks.NCCL)
    found = least_step_over_servers(line, servers, int(values["gbs"]), int(values["mmbs"]))
    if found is None:
        return None, lambda: math.nan
    total = float(line.before_s[-1])
    names = [node["id"] for node in kept(graph)]
    stages = [
        {
            "nodes": [names[v] for v in chain.layers(line_[stage.first], line_[stage.last])],
            "reduced": [names[v] for v in chain.layers(line_[stage.first], line_[line.reduced_to[stage.last]])],
            "devices": stage.devices,
        }
        for stage in found.stages
    ]
    return (found.seconds / total, found.lower_bound / total), lambda: checks.dapple(
        graph, values, stages, found.copies, trips
    )


BRANCHING = [f"stages={stages},microbatches={m}" for stages in (2, 3, 4, 8, 16) for m in (1, 2, 8, 32)]
BYTES_PER_S = 12.5e9


def branching_settings(graph: Graph) -> list[tuple[str, dict[str, Any]]]:
    """A step of synchronous training, of files of layers with branches that no reference has solved."""
    tails = [tail for tail, _, _ in graph["edges"]]
    if (
        graph["family"] not in ("pipedream", "dapple", "captured")
        or len(set(tails)) == len(tails)
        or graph.get("states")
    ):
        return []
    return [(setting, {"objective_def": "train", "objective": None, "solver": ""}) for setting in BRANCHING]


def solve_train(graph: Graph, setting: str, values: dict[str, str], known: dict[str, Any]) -> Solved:
    """Stages in any order that the edges allow; every tensor goes over each boundary that it is alive at, and back."""
    nodes, microbatches = kept(graph), int(values["microbatches"])
    position = {node["id"]: k for k, node in enumerate(nodes)}
    nets: dict[int, set[int]] = {}
    for tail, head, _ in graph["edges"]:
        if tail in position and head in position:
            nets.setdefault(position[tail], {position[tail]}).add(position[head])
    loads = Loads(
        tuple((u, v) for u, net in nets.items() for v in net - {u}),
        tuple(tuple(sorted(net)) for net in nets.values()),
        np.array([2 * float(nodes[u]["activation_bytes"]) / BYTES_PER_S for u in nets]),
        np.zeros(len(nodes)),
        (Kind(int(values["stages"]), np.array([seconds_of(node) for node in nodes])),),
    )
    found = step_in_any_order(loads, microbatches)
    parts = [[nodes[v]["id"] for v in stage] for stage in found.stages]
    return (found.seconds, found.lower_bound), lambda: checks.train(graph, values, parts, BYTES_PER_S)


def solve_even(graph: Graph, setting: str, values: dict[str, str], known: dict[str, Any]) -> Solved:
    """Stages in an order that the edges allow, work alone counted."""
    nodes, k = kept(graph), int(values["k"])
    position = {node["id"]: i for i, node in enumerate(nodes)}
    edges = tuple((position[u], position[v]) for u, v, _ in graph["edges"] if u in position and v in position)
    times = np.array([seconds_of(node) for node in nodes])
    loads = Loads(edges, (), np.zeros(0), np.zeros(len(nodes)), (Kind(k, times),))
    found = place_in_order(loads)
    assert found is not None
    parts = [[nodes[v]["id"] for v in layers] for _, layers in found.devices]
    return (found.load, found.lower_bound), lambda: checks.even(graph, parts, k)


def loads_of(graph: Graph, values: dict[str, str]) -> tuple[Loads, list[list[int]]]:
    """The max-load problem of a file, and its colour classes.

    A backward layer whose class has no forward layer keeps the order of its edges, mirrored.
    """
    nodes = graph["nodes"]
    position = {node["id"]: k for k, node in enumerate(nodes)}
    classes: dict[Any, list[int]] = {}
    for k, node in enumerate(nodes):
        color = node["color_class"]
        classes.setdefault(("alone", k) if color is None else color, []).append(k)
    backward = [bool(node["is_backward"]) for node in nodes]
    orphan = [False] * len(nodes)
    for members in classes.values():
        if all(backward[v] for v in members):
            for v in members:
                orphan[v] = True
    edges, nets = [], {}
    for tail, head, _ in graph["edges"]:
        u, v = position[tail], position[head]
        nets.setdefault(u, {u}).add(v)
        if not backward[u] and not backward[v]:
            edges.append((u, v))
        elif backward[u] and backward[v] and (orphan[u] or orphan[v]):
            edges.append((v, u))
    memory = float(values.get("mem", graph["memory_limit_bytes"]))
    return Loads(
        tuple(edges),
        tuple(tuple(sorted(net)) for net in nets.values()),
        np.array([float(nodes[u]["comm_cost"]) for u in nets]),
        np.array([float(node["memory_bytes"]) for node in nodes]),
        (
            Kind(int(values["k"]), np.array([float(node["accelerator_time"]) for node in nodes]), memory),
            Kind(int(graph["cpus"]), np.array([float(node["cpu_time"]) for node in nodes]), pays=False),
        ),
    ), list(classes.values())


def solve_loads(graph: Graph, setting: str, values: dict[str, str], known: dict[str, Any]) -> Solved:
    loads, groups = loads_of(graph, values)
    return _placed(graph, values, place_in_order(loads, groups), in_order=True)


def solve_loads_anywhere(graph: Graph, setting: str, values: dict[str, str], known: dict[str, Any]) -> Solved:
    loads, groups = loads_of(graph, values)
    return _placed(graph, values, place_anywhere(loads, groups), in_order=False)


def solve_latency(graph: Graph, setting: str, values: dict[str, str], known: dict[str, Any]) -> Solved:
    loads, groups = loads_of(graph, values)
    found = least_latency(loads, groups)
    if found is None:
        return None, lambda: math.nan
    ids = [node["id"] for node in graph["nodes"]]
    parts = [(("accelerator", "cpu")[kind], [ids[v] for v in layers]) for kind, layers in found.devices]
    return (found.load, found.lower_bound), lambda: checks.latency(graph, values, parts)


def _placed(graph: Graph, values: dict[str, str], found: Placement | None, in_order: bool) -> Solved:
    if found is None:
        return None, lambda: math.nan
    ids = [node["id"] for node in graph["nodes"]]
    parts = [(("accelerator", "cpu")[kind], [ids[v] for v in layers]) for kind, layers in found.devices]
    return (found.load, found.lower_bound), lambda: checks.loads(graph, values, parts, in_order)


def sharding(graph: Graph, values: dict[str, str]) -> Sharding:
    """Piper's problem: `tmpcs` by tensor parallel degree, a way to run each."""
    nodes = graph["nodes"]
    position = {node["id"]: k for k, node in enumerate(nodes)}
    edges = tuple((position[u], position[v]) for u, v, _ in graph["edges"])
    ways = {}
    for degree in sorted({degree for node in nodes for degree in node["tmpcs"]}, key=int):
        if "notp" in values and degree != "1":
            continue
        options = [checks.ways(node, degree, values) for node in nodes]
        width = max(map(len, options))

        def table(key: str, options: Any = options, width: int = width) -> Any:
            return np.array([[*(one[key] for one in some), *[math.inf] * (width - len(some))] for some in options])

        def moved(end: int, key: str, options: Any = options) -> Any:
            amounts = []
            for tail, head, cost in graph["edges"]:
                at, other = ((head, tail), (tail, head))[end]
                sync = {one[key][str(other)] for one in options[position[at]]}
                assert len(sync) <= 1, f"{graph['name']}: {key} of {at} differs between ways to run"
                amounts.append(2 * (cost + max(sync, default=0.0)))
            return np.array(amounts)

        ways[int(degree)] = Ways(
            table("timePerSample"),
            table("parameterSize"),
            table("memoryUsageA"),
            table("memoryUsageB"),
            moved(0, "syncTimeFw"),
            moved(1, "syncTimeBw"),
        )
    return Sharding(
        len(nodes),
        edges,
        ways,
        float(values["bw"]),
        int(values["mbs"]),
        int(values["devices"]),
        float(values["mem"]),
        data_parallel="nodp" not in values,
    )


def solve_piper(graph: Graph, setting: str, values: dict[str, str], known: dict[str, Any]) -> Solved:
    found = slowest_shard(sharding(graph, values))
    if found is None:
        return None, lambda: math.nan
    ids = [node["id"] for node in graph["nodes"]]
    stages = [
        {
            "nodes": [ids[v] for v in stage.layers],
            "ways": dict(zip((ids[v] for v in stage.layers), stage.ways, strict=True)),
            "data": stage.data,
            "tensor": stage.tensor,
        }
        for stage in found.stages
    ]
    return (found.seconds, found.lower_bound), lambda: checks.piper(graph, values, stages)


SOLVERS: dict[str, Callable[[Graph, str, dict[str, str], dict[str, Any]], Solved]] = {
    "minmax": solve_minmax,
    "alpa": solve_alpa,
    "pipedream": solve_pipedream,
    "pipedream_hier": solve_pipedream_servers,
    "dapple": solve_dapple,
    "train": solve_train,
    "pippy": solve_even,
    "piper": solve_piper,
    "dnnp_contig": solve_loads,
    "dnnp_dp_linear": solve_loads,
    "dnnp_latency": solve_latency,
    "dnnp_noncontig": solve_loads_anywhere,
}

if __name__ == "__main__":
    main()
