"""How long the full search takes, and how much memory, against layers and devices: chains and graphs with branches.

usage: python tests/benchmarks/scale.py [--layers N ...] [--devices N ...] [--shard auto] [--objective throughput]
                                   [--json FILE] [--plot FILE]

Searched are every mesh that uses all devices, every micro-batch count that divides a replica's samples (8 and more: the
batch is 128 samples a device), 1f1b and gpipe, recomputation where a stage needs it, and all cuts, under one limit of
memory that makes stages necessary; with --shard auto, also what each stage's replicas divide. Seconds are those of the
processor, of which the search uses one, so that other work on the machine does not count. Layers cost, send and hold
uneven amounts, at random; "branching" models have blocks of branches that meet again, and skips from their first half
to their second; "repeated" ones are transformers of equal layers. Peak memory is that of a process of its own, less
what it takes before it solves.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from partitioner.profiles import Layer, LayerCost, Parameter, Profile, Tensor
from partitioner.solver import solve
from partitioner.specs import Cluster, Device, Link, Training

SAMPLES_A_DEVICE = 128
SIZES = (1, 4)
FIXED_S = 1e-5


class Row(NamedTuple):
    """One full search."""

    layers: int
    devices: int
    kind: str
    solve_s: float
    peak_bytes: int
    mesh: dict[str, int]
    schedule: str
    microbatches: int
    gap: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="*", default=[100, 300, 1_000, 3_000, 10_000])
    parser.add_argument("--devices", type=int, nargs="*", default=[4, 16, 64, 256, 1_024, 4_096])
    parser.add_argument("--kinds", nargs="*", default=["chain", "branching"])
    parser.add_argument("--repeated", action="store_true", help="also 126 equal layers over 16,384 devices")
    parser.add_argument("--shard", default="none", metavar="auto|none")
    parser.add_argument("--objective", default="train", help="train; throughput or latency, of forward passes alone")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    sizes = [(n, devices, kind) for kind in options.kinds for n in options.layers for devices in options.devices]
    if options.repeated:
        sizes.append((126, 16_384, "repeated"))
    print(f"{'kind':10} {'layers':>7} {'devices':>7} {'seconds':>8} {'peak MiB':>9}  plan")
    rows: list[Row] = []
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for size in sizes:
            row = pool.apply(measured, (*size, options.shard, options.objective))
            rows.append(row)
            print(
                f"{row.kind:10} {row.layers:7} {row.devices:7} {row.solve_s:8.3f} {row.peak_bytes / 2**20:9.1f}  "
                f"pp {row.mesh['pp']} x dp {row.mesh['dp']}, {row.schedule}, {row.microbatches} micro-batches, "
                f"gap {100 * row.gap:.2f} %",
                flush=True,
            )
    for kind in options.kinds:
        for line in growth([row for row in rows if row.kind == kind]):
            print(f"{kind}: {line}")
    if options.json:
        options.json.write_text(json.dumps({"rows": [row._asdict() for row in rows]}, indent=1))
    if options.plot:
        draw(rows, options.plot)


def measured(num_layers: int, num_devices: int, kind: str, shard: Any, objective: Any = "train") -> Row:
    profile = repeated(num_layers) if kind == "repeated" else uneven(num_layers, branching=kind == "branching")
    there, batch_size = cluster(profile, num_devices), SAMPLES_A_DEVICE * num_devices
    training = Training(batch_size=batch_size, recompute="auto", shard=shard, objective=objective)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    plan = solve(profile, there, training)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return Row(
        num_layers,
        num_devices,
        kind,
        seconds,
        peak * 1024,
        plan.mesh,
        plan.schedule,
        plan.num_microbatches,
        plan.gap or 0.0,
    )


def cluster(profile: Profile, num_devices: int) -> Cluster:
    """Nodes of 8 devices, of which each holds a quarter of the model's state, or what 8 layers need if that is more."""
    state = 16 * sum(parameter.bytes // 4 for parameter in profile.parameters)
    kept = sum(layer.costs[0].saved_bytes for layer in profile.layers)
    share = max(4 / min(16, num_devices), 8 / len(profile.layers))
    device = Device(name="device", memory_bytes=int(share * (state + 8 * kept)))
    per_node = min(8, num_devices)
    within, between = Link.of(1e-5, 1e11), Link.of(2e-5, 1.2e10)
    return Cluster.of(device, per_node, num_devices // per_node, within=within, between=between)


def uneven(num_layers: int, *, branching: bool, seed: int = 0) -> Profile:
    """Layers of random cost; with branches, blocks of six layers: one splits, four make two branches, one joins."""
    rng = random.Random(seed)
    layers, tensors, parameters = [], [], []
    for k in range(num_layers):
        layers.append(layer(k, rng.uniform(0.2e-3, 1e-3), rng.uniform(0.4e-3, 2e-3), rng.randrange(50_000, 150_000)))
        parameters.append(parameter(k, 4_000 * rng.randrange(20, 100)))
        users = [k + 1]
        if branching and k % 6 == 0:
            users.append(k + 3)
        elif branching and k % 6 == 2:
            users = [k + 3]
        if branching and k % 60 == 0 and num_layers - 1 - k > k:
            users.append(num_layers - 1 - k)
        if users := sorted({user for user in users if k < user < num_layers}):
            tensors.append(tensor(k, users, rng.randrange(10_000, 50_000)))
    return profile(layers, tensors, parameters)


def repeated(num_layers: int) -> Profile:
    """A transformer: all layers are alike."""
    layers = [layer(k, 1e-3, 2e-3, 100_000) for k in range(num_layers)]
    tensors = [tensor(k, [k + 1], 20_000) for k in range(num_layers - 1)]
    return profile(layers, tensors, [parameter(k, 400_000) for k in range(num_layers)])


def layer(k: int, forward_s: float, backward_s: float, saved_bytes: int) -> Layer:
    costs = tuple(
        LayerCost(
            samples=size,
            forward_s=FIXED_S + size * forward_s,
            backward_s=FIXED_S + size * backward_s,
            saved_bytes=size * saved_bytes,
        )
        for size in SIZES
    )
    return Layer(id=str(k), class_name="Layer", costs=costs)


def tensor(k: int, users: Sequence[int], num_bytes: int) -> Tensor:
    return Tensor(
        id=f"t{k}",
        producer=str(k),
        consumers=tuple(map(str, users)),
        shape=(1, num_bytes // 4),
        dtype="float32",
        bytes_at=tuple(size * num_bytes for size in SIZES),
        needs_gradient=True,
    )


def parameter(k: int, num_bytes: int) -> Parameter:
    return Parameter(
        names=(f"{k}.weight",),
        shape=(num_bytes // 4,),
        dtype="float32",
        bytes=num_bytes,
        trainable=True,
        layers=(str(k),),
    )


def profile(layers: list[Layer], tensors: list[Tensor], parameters: list[Parameter]) -> Profile:
    fields: dict[str, Any] = {"device": "none", "device_kind": "cpu", "provenance": "given"}
    return Profile(
        model="Made up",
        layers=tuple(layers),
        tensors=tuple(tensors),
        parameters=tuple(parameters),
        microbatch_sizes=SIZES,
        optimizer_s=1e-3,
        **fields,
    )


def growth(rows: list[Row]) -> list[str]:
    """The exponent of the seconds in the number of layers, for each number of devices: a straight line through logs."""
    lines = []
    for devices in sorted({row.devices for row in rows}):
        points = [(math.log(row.layers), math.log(row.solve_s)) for row in rows if row.devices == devices]
        if len(points) > 1:
            lines.append(f"seconds ~ layers^{slope(points):.2f} on {devices} devices")
    points = [(math.log(row.layers), math.log(row.solve_s)) for row in rows]
    if len({x for x, _ in points}) > 1:
        lines.append(f"seconds ~ layers^{slope(points):.2f} over all")
    return lines


def slope(points: list[tuple[float, float]]) -> float:
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = sorted({row.kind for row in rows})
    figure, axes = plt.subplots(1, len(kinds), figsize=(6 * len(kinds), 4.5), squeeze=False, sharey=True)
    for ax, kind in zip(axes[0], kinds, strict=True):
        some = [row for row in rows if row.kind == kind]
        for devices in sorted({row.devices for row in some}):
            line = sorted((row.layers, row.solve_s) for row in some if row.devices == devices)
            ax.loglog(*zip(*line, strict=True), marker="o", label=f"{devices} devices")
        ax.set_title(kind)
        ax.set_xlabel("layers")
        ax.grid(True, which="both", alpha=0.3)
        ax.legend()
    axes[0][0].set_ylabel("seconds of the full search")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
