"""From the search to a Plan: the winner predicted whole, the runners-up, and why it is not faster."""

from __future__ import annotations

import math
from dataclasses import replace

from partitioner.actions import Orders
from partitioner.errors import InfeasibleError, expect
from partitioner.graph import CostGraph
from partitioner.own_order import faster_order
from partitioner.plan import Alternative, Plan, Prediction, Stage
from partitioner.profiles import Profile
from partitioner.progress import Progress, shown
from partitioner.simulator import predict
from partitioner.solver.explain import reasons
from partitioner.solver.inference import solve_inference
from partitioner.solver.problem import CLOSE, Found
from partitioner.solver.search import Searched, search, worth_searching
from partitioner.solver.settings import check_request, divisors, kept_together, mesh_levels, numbered
from partitioner.solver.shortage import shortage
from partitioner.solver.writing import once_a_step
from partitioner.specs import EXECUTED, EXECUTED_SHARDS, Cluster, Training

MOST_RUNNERS_UP = 5
FASTER = 1e-3
"""Relative; by how much a plan on fewer devices must be faster to be named."""
FEWER = 16
"""Devices, up to which all smaller numbers of them are tried beside a plan; of more, halves, quarters and so on."""


def solve(profile: Profile, cluster: Cluster, training: Training, *, progress: bool | Progress | None = None) -> Plan:
    """The plan with the least simulated step + optimizer time whose every rank fits its memory.

    Searched are all meshes that use as many devices as the layers and the batch allow, every micro-batch count that
    divides a replica's samples, every schedule that is built, all cuts, and what each stage recomputes and its replicas
    divide; what `training` fixes is kept.
    `lower_bound_s` holds for that space on any devices of the cluster, as many as the plan uses, so `gap` says how far
    from the best of these the plan can be at most; where fewer devices would be faster, `why` says so. The same
    arguments give the same plan. With objective "throughput" or "latency" it is a plan for forward passes alone:
    `solve_inference` says what its figures mean.

    Errors: ArgumentError where what is asked for cannot be had at all, InfeasibleError where nothing fits the memory;
    its message names what does not fit, the bytes short, and a change that was tried and fits.
    """
    expect("profile", profile, Profile, "a Profile: partitioner.profile(...), or Profile.load(path)")
    expect("cluster", cluster, Cluster, "a Cluster: Cluster.parse('8xH100')")
    expect("training", training, Training, "a Training: Training(batch_size=64)")
    training, notes = once_a_step(profile, training)
    graph = CostGraph(kept_together(profile, training))
    if training.objective != "train":
        request = training if training.shard != "auto" else training.model_copy(update={"shard": "none"})
        return solve_inference(graph, cluster, request).model_copy(update={"profile": profile})
    check_request(graph, cluster, training)
    with shown(progress) as tell:
        for meshes in worth_searching(graph, cluster, training):
            searched = search(graph, cluster, training, meshes, tell)
            if searched.found:
                plan = _plan(profile, graph, cluster, training, searched)
                return plan.model_copy(update={"why": (*plan.why, *notes)})
        tell("finding what is short", 0.9)
        raise InfeasibleError(shortage(graph, cluster, training))


def _plan(profile: Profile, graph: CostGraph, cluster: Cluster, training: Training, searched: Searched) -> Plan:
    best = searched.found[0]
    setting = best.setting
    free = _unpinned(CostGraph(profile), cluster, training)
    fewer = _with_fewer_devices(graph, cluster, training, best)
    split = best.split
    orders = faster_order(graph, cluster, training, split)
    prediction = predict(graph, cluster, training, replace(split, orders=orders))
    rank_of = numbered(setting.devices, cluster)
    stages = tuple(
        Stage(index=k, layers=layers, ranks=tuple(rank_of[device] for device in devices), recompute=again, shard=level)
        for k, (layers, devices, again, level) in enumerate(
            zip(graph.stage_ids(split.cuts), split.devices, split.recompute, split.shard, strict=True)
        )
    )
    return Plan(
        profile=profile,
        cluster=cluster,
        training=training,
        mesh=setting.mesh,
        schedule=setting.schedule,
        num_microbatches=setting.num_microbatches,
        stages=stages,
        devices=tuple(rank_of),
        prediction=prediction,
        lower_bound_s=min(searched.lower_bound_s, prediction.step_s + prediction.optimizer_s),
        runners_up=_runners_up(searched, free, fewer),
        why=(*_order_found(best, prediction, orders), *reasons(best, prediction, searched, free, fewer)),
        runnable=setting.schedule in EXECUTED and {*split.shard} <= {*EXECUTED_SHARDS},
        orders=None if orders is None else tuple(" ".join(map(str, order)) for order in orders),
    )


def _order_found(best: Found, prediction: Prediction, orders: Orders | None) -> tuple[str, ...]:
    if orders is None:
        return ()
    less = 1 - (prediction.step_s + prediction.optimizer_s) / best.total_s
    schedule = best.setting.schedule
    return (
        f"the order of actions was searched for these stages' own times: {100 * less:.2g} % less than {schedule}'s",
    )


def _unpinned(graph: CostGraph, cluster: Cluster, training: Training) -> Found | None:
    """What the best would be if nothing were pinned; None: nothing is, or nothing else fits."""
    if not training.pin:
        return None
    training = training.model_copy(update={"pin": {}})
    for meshes in worth_searching(graph, cluster, training):
        if found := search(graph, cluster, training, meshes).found:
            return found[0]
    return None


def _with_fewer_devices(graph: CostGraph, cluster: Cluster, training: Training, best: Found) -> Found | None:
    """The best on fewer devices, where it is faster; None: none is."""
    if training.mesh != "auto" and len(training.mesh) > 1:
        return None  # the mesh says how many
    used = best.setting.num_places * best.setting.num_replicas
    counts = range(1, used) if used <= FEWER else [used >> k for k in range(1, used.bit_length())]
    least_s = math.inf  # what one device of speed 1 needs for the batch at least
    for count in divisors(training.batch_size):
        costs = graph.at(training.batch_size // count)
        least_s = min(least_s, count * float(costs.before_s[-1]))
    speeds = sorted((device.relative_speed for device in cluster.devices), reverse=True)
    meshes = [
        mesh
        for level in mesh_levels(graph, cluster, training)
        for mesh in level
        if mesh[0] * mesh[1] in counts and least_s / sum(speeds[: mesh[0] * mesh[1]]) < best.total_s * (1 - CLOSE)
    ]
    found = search(graph, cluster, training, meshes, below_s=best.total_s * (1 - FASTER)).found if meshes else ()
    return found[0] if found else None


def _runners_up(searched: Searched, free: Found | None, fewer: Found | None) -> tuple[Alternative, ...]:
    """The best without pins, where there are any, and what is faster on fewer devices; then the best of each other mesh
    and schedule."""
    seen, chosen = {searched.found[0].setting.kind}, []
    for found in searched.found[1:]:
        if found.setting.kind not in seen:
            seen.add(found.setting.kind)
            chosen.append((found, ""))
    if free is not None:
        chosen.insert(0, (free, "without the pinned layers"))
    if fewer is not None:
        count = fewer.setting.num_places * fewer.setting.num_replicas
        chosen.insert(0, (fewer, f"on {count} device{'s' if count > 1 else ''} alone"))
    return tuple(
        Alternative(
            mesh=found.setting.mesh,
            schedule=found.setting.schedule,
            num_microbatches=found.setting.num_microbatches,
            stage_sizes=tuple(last - first for first, last in found.problem.graph.bounds(found.cuts)),
            step_s=found.total_s,
            devices=found.setting.devices_by_stage,
            recompute=found.recompute,
            shard=found.shard,
            reason=reason,
        )
        for found, reason in chosen[:MOST_RUNNERS_UP]
    )
