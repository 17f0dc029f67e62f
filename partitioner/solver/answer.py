"""From the search to a Plan: the winner predicted whole, the runners-up, and why it is not faster."""

from __future__ import annotations

from partitioner.costs import single_device
from partitioner.errors import InfeasibleError
from partitioner.graph import CostGraph
from partitioner.plan import Alternative, Plan, Stage
from partitioner.profiles import Profile
from partitioner.progress import Progress, shown
from partitioner.simulator import predict
from partitioner.solver.explain import reasons
from partitioner.solver.inference import solve_inference
from partitioner.solver.problem import Found
from partitioner.solver.search import Searched, search, worth_searching
from partitioner.solver.settings import check_request, numbered
from partitioner.solver.shortage import shortage
from partitioner.specs import EXECUTED, Cluster, Training

MOST_RUNNERS_UP = 5


def solve(profile: Profile, cluster: Cluster, training: Training, *, progress: bool | Progress | None = None) -> Plan:
    """The plan with the least simulated step + optimizer time whose every rank fits its memory.

    Searched are all meshes that use as many devices as the layers and the batch allow, every micro-batch count that
    divides a replica's samples, every schedule that is built, and all cuts; what `training` fixes is kept.
    `lower_bound_s` holds for that space, so `gap` says how far from the best the plan can be at most. The same
    arguments give the same plan. With objective "throughput" or "latency" it is a plan for forward passes alone:
    `solve_inference` says what its figures mean.

    Errors: ArgumentError where what is asked for cannot be had at all, InfeasibleError where nothing fits the memory;
    its message names what does not fit, the bytes short, and a change that was tried and fits.
    """
    graph = CostGraph(profile)
    if training.objective != "train":
        return solve_inference(graph, cluster, training)
    check_request(graph, cluster, training)
    with shown(progress) as tell:
        for meshes in worth_searching(graph, cluster, training):
            searched = search(graph, cluster, training, meshes, tell)
            if searched.found:
                return _plan(graph, cluster, training, searched)
        tell("finding what is short", 0.9)
        raise InfeasibleError(shortage(graph, cluster, training))


def _plan(graph: CostGraph, cluster: Cluster, training: Training, searched: Searched) -> Plan:
    best = searched.found[0]
    setting = best.setting
    free = _unpinned(graph, cluster, training)
    recompute = best.recompute
    baseline = single_device(graph, cluster, training)
    prediction = predict(
        graph,
        cluster,
        training,
        mesh=setting.mesh,
        schedule=setting.schedule,
        num_microbatches=setting.num_microbatches,
        cuts=best.cuts,
        devices=setting.devices_by_stage,
        recompute=recompute,
        baseline=baseline,
    )
    rank_of = numbered(setting.devices, cluster)
    stages = tuple(
        Stage(index=k, layers=layers, ranks=tuple(rank_of[device] for device in devices), recompute=again)
        for k, (layers, devices, again) in enumerate(
            zip(graph.stage_ids(best.cuts), setting.devices_by_stage, recompute, strict=True)
        )
    )
    return Plan(
        profile=graph.profile,
        cluster=cluster,
        training=training,
        mesh=setting.mesh,
        schedule=setting.schedule,
        num_microbatches=setting.num_microbatches,
        stages=stages,
        devices=tuple(rank_of),
        prediction=prediction,
        lower_bound_s=min(searched.lower_bound_s, prediction.step_s + prediction.optimizer_s),
        runners_up=_runners_up(graph, searched, free),
        why=reasons(best, prediction, searched, free),
        runnable=setting.schedule in EXECUTED,
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


def _runners_up(graph: CostGraph, searched: Searched, free: Found | None) -> tuple[Alternative, ...]:
    """The best without pins, where there are any; then the best of each other mesh and schedule."""
    seen, chosen = {searched.found[0].setting.kind}, []
    for found in searched.found[1:]:
        if found.setting.kind not in seen:
            seen.add(found.setting.kind)
            chosen.append((found, ""))
    if free is not None:
        chosen.insert(0, (free, "without the pinned layers"))
    return tuple(
        Alternative(
            mesh=found.setting.mesh,
            schedule=found.setting.schedule,
            num_microbatches=found.setting.num_microbatches,
            stage_sizes=tuple(last - first for first, last in graph.bounds(found.cuts)),
            step_s=found.total_s,
            reason=reason,
        )
        for found, reason in chosen[:MOST_RUNNERS_UP]
    )
