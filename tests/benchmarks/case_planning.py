"""Cases that end with a plan, a number or a sentence: no rank is started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import torch
from casebook import Case, Finding, Ranks, at_most, refusal, same, says, true
from chains import FREE, chain, cluster

import partitioner as pt
from partitioner.specs import format_bytes, parse_bytes


def summed(output: torch.Tensor, target: Any) -> torch.Tensor:
    """A loss for models that come without one."""
    return output.float().sum()


def by_flops(profile: pt.Profile, flops_per_s: float = 1e12) -> pt.Profile:
    """The measured profile with seconds from its operations: nothing of this machine is left in them."""

    def counted(layer: Any) -> Any:
        costs = [
            cost.model_copy(update={"forward_s": cost.flops / flops_per_s, "backward_s": 2 * cost.flops / flops_per_s})
            for cost in layer.costs
        ]
        return layer.model_copy(update={"costs": tuple(costs)})

    layers = tuple(counted(layer) for layer in profile.layers)
    return profile.model_copy(update={"layers": layers, "optimizer_s": 0.0, "slicing_s": 0.0})


def profiled(case: Case, model: torch.nn.Module | None = None) -> pt.Profile:
    return by_flops(pt.profile(case.model if model is None else model, case.inputs, loss_fn=summed))


def output_head_is_the_slowest_stage(case: Case, ranks: Ranks) -> Iterator[Finding]:
    profile = profiled(case)
    first, last = profile.layers[0].costs[0], profile.layers[-1].costs[0]
    yield same("cost of the head in layers", last.flops / first.flops, float(case.ref["cost_units"][-1]))
    two = cluster(case.request["gpus"])
    batch = 256
    for microbatches in (2, 16, 256):
        mesh: Any = {"pp": 2, "dp": 1}
        plan = pt.solve(profile, two, pt.Training(batch_size=batch, mesh=mesh, microbatches=microbatches))
        cut = [profile.layers.index(profile.layers[len(plan.stages[0].layers)])]
        yield same(f"cut with {microbatches} micro-batches", cut, case.ref["optimal_cuts"])
        at = f"with {microbatches} micro-batches"
        yield at_most(f"speedup {at}", plan.prediction.speedup, case.ref["speedup_cap"] * (1 + 1e-9))
        work = [stage.compute_s for stage in plan.prediction.stages]
        unit = sum(work) / sum(case.ref["cost_units"])
        yield same(f"bottleneck {at}", max(work) / unit, float(case.ref["bottleneck"]))
        yield same(f"balance {at}", sum(work) / (2 * max(work)), case.ref["balance"])
        yield says("the report's cap", str(plan), f"at most {case.ref['speedup_cap']:.2f} times")


def more_devices_than_layers(case: Case, ranks: Ranks) -> Iterator[Finding]:
    gpus, layers = case.request["gpus"], case.ref["splittable_layers"]
    plan = pt.partition(case.model, case.inputs, gpus=gpus, loss_fn=summed)
    legal = [tuple(pair) for pair in case.ref["legal_stage_x_replica"]]
    idle = [line for line in plan.why if f"of {gpus} devices are used" in line]
    yield true("stages x replicas", (plan.num_stages, plan.num_replicas) in legal or (plan.num_ranks < gpus and idle))
    yield true("no empty stage", all(stage.layers for stage in plan.stages))
    told = refusal(lambda: pt.partition(case.model, case.inputs, gpus=gpus, loss_fn=summed, mesh={"pp": gpus}))
    yield says("the refusal of as many stages as devices", told, str(layers), str(gpus))


def devices_of_unequal_speed(case: Case, ranks: Ranks) -> Iterator[Finding]:
    profile = profiled(case)
    one_layer = 3 * profile.layers[0].cost(32).flops / 1e12
    wanted = case.request["devices"]
    for order in (wanted, wanted[::-1]):
        devices = tuple(
            pt.Device(
                name="card", memory_bytes=parse_bytes(entry["memory"]), relative_speed=float(entry["relative_speed"])
            )
            for entry in order
        )
        both = pt.Cluster(devices=devices, nodes=(0, 0), intra=FREE, inter=FREE)
        plan = pt.solve(profile, both, pt.Training(batch_size=32))
        count = {devices[stage.ranks[0]].relative_speed: len(stage.layers) for stage in plan.stages}
        fast, slow = (entry["relative_speed"] for entry in wanted)
        yield same("layers on the fast device", count.get(fast), case.ref["layers_on_fast"])
        yield same("layers on the slow device", count.get(slow), case.ref["layers_on_slow"])
        slowest = max(stage.compute_s for stage in plan.prediction.stages)
        yield same("bottleneck in layers", slowest / one_layer, case.ref["bottleneck"])


def heavy_traffic_within_a_node(case: Case, ranks: Ranks) -> Iterator[Finding]:
    asked = case.request
    nodes = [node for node in range(asked["nodes"]) for _ in range(asked["gpus_per_node"])]
    there = cluster(len(nodes), nodes=nodes, link=pt.Link.of(1e-6, 1e11), inter=pt.Link.of(1e-6, 1e8))
    mesh: Any = {"pp": asked["stages"], "dp": asked["replicas"]}
    samples = len(case.inputs[0]) * asked["replicas"]
    for name, model in (("adapters", case.model), ("full", case.space["full"])):
        plan = pt.solve(profiled(case, model), there, pt.Training(batch_size=samples, mesh=mesh, microbatches=1))
        ways = {
            "pipeline": case.ref["pipeline_across_nodes"],
            "replicas": case.ref[f"{name}_dp_across_nodes"],
        }
        found = bytes_between_nodes(plan)
        yield same(f"{name}: bytes between nodes a step", found, min(ways.values()))
        across = min(ways, key=lambda way: ways[way])
        apart = {
            "pipeline": any(nodes[a] != nodes[b] for a, b in zip(*(s.ranks for s in plan.stages), strict=True)),
            "replicas": any(len({nodes[rank] for rank in stage.ranks}) > 1 for stage in plan.stages),
        }
        yield same(f"{name}: what crosses between nodes", [way for way in apart if apart[way]], [across])
        yield same("node of each rank in the plan", [plan.cluster.nodes[r] for r in range(plan.num_ranks)], nodes)
        yield says("the report", str(plan), "node 0", "node 1")


def bytes_between_nodes(plan: pt.Plan) -> int:
    """Of one step: activations, their gradients, and the gradients of replicas that sit on several nodes."""
    graph = pt.CostGraph.from_profile(plan.profile)
    nodes = plan.cluster.nodes
    cuts = [graph.position[stage.layers[0]] for stage in plan.stages[1:]]
    total = 0.0
    for moved in graph.transfers(cuts, plan.microbatch_samples):
        pairs = zip(plan.stages[moved.source].ranks, plan.stages[moved.target].ranks, strict=True)
        crossing = sum(nodes[a] != nodes[b] for a, b in pairs)
        total += crossing * plan.num_microbatches * (moved.forward_bytes + moved.backward_bytes)
    for stage, predicted in zip(plan.stages, plan.prediction.stages, strict=True):
        if len({nodes[rank] for rank in stage.ranks}) > 1:
            total += predicted.memory.gradients
    return round(total)


def static_bytes_a_parameter(case: Case, ranks: Ranks) -> Iterator[Finding]:
    count = case.ref["params"]

    def planned(dtype: torch.dtype, **more: Any) -> float:
        model = case.model.to(dtype)
        inputs = tuple(tensor.to(dtype) for tensor in case.inputs)
        plan = pt.partition(model, inputs, gpus=1, loss_fn=summed, **more)
        memory = plan.prediction.stages[0].memory
        return (memory.weights + memory.gradients + memory.optimizer) / count

    yield same("fp32", planned(torch.float32), case.ref["fp32"])
    yield same("bf16", planned(torch.bfloat16), case.ref["bf16"])
    master = planned(torch.float16, optimizer=12.0)
    yield same("fp16, with 12 bytes a parameter for fp32 weights and moments", master, case.ref["fp16_with_master"])
    yield same("7B of it in GB", round(6.7e9 * master / 1e9, 1), case.ref["seven_b_mixed_GB"])
    report = pt.capacity(case.model.float(), case.inputs, gpus="1xH100", precision="fp16-mixed", curve=False)
    peak = report.best.peak
    static = (peak.weights + peak.gradients + peak.master + peak.optimizer) / count
    yield same("fp16-mixed", static, case.ref["fp16_with_master"])
    yield same("as the report says it", report.static_bytes_per_parameter, case.ref["fp16_with_master"])


def microbatches_in_flight(case: Case, ranks: Ranks) -> Iterator[Finding]:
    gpus = case.request["gpus"]
    profile = profiled(case)
    blocks = len(case.model)  # type: ignore[arg-type]
    even = {layer.id: int(layer.id.split(".")[0]) * gpus // blocks for layer in profile.layers}
    four, mesh = cluster(gpus), {"pp": gpus, "dp": 1}
    each = 64

    def planned(schedule: str, count: int, pin: Mapping[str, int], limit: int | None = None) -> pt.Plan:
        training: dict[str, Any] = {"mesh": mesh, "schedule": schedule, "pin": pin, "memory_limit_bytes": limit}
        return pt.solve(profile, four, pt.Training(batch_size=count * each, microbatches=count, **training))

    alone = [stage.memory.activations for stage in planned("gpipe", 1, even).prediction.stages]
    for schedule in case.request["schedule"]:
        for count in case.request["microbatches"]:
            right = case.ref[f"{schedule}_m{count}"]
            stages = planned(schedule, count, even).prediction.stages
            name = f"{schedule} with {count} micro-batches"
            yield same(f"{name}: in flight", [stage.in_flight for stage in stages], right)
            held = [stage.memory.activations / one for stage, one in zip(stages, alone, strict=True)]
            yield same(f"{name}: activations in those of one", held, [float(number) for number in right])
    each = 8192  # activations outweigh weights now
    first, *others = (stage.memory.total for stage in planned("1f1b", 8, even).prediction.stages)
    limit = (first + max(others)) // 2
    told = refusal(lambda: planned("1f1b", 8, even, limit))
    yield says("a limit that stage 0 alone breaks, layers pinned", told, "does not fit", "stage 0")
    shifted = planned("1f1b", 8, {}, limit)
    yield at_most("layers left on stage 0, free to move", len(shifted.stages[0].layers), len(even) / gpus - 1)
    yield at_most("its largest stage", max(stage.memory.total for stage in shifted.prediction.stages), limit)


def packed_integer_weights(case: Case, ranks: Ranks) -> Iterator[Finding]:
    plan = pt.partition(
        case.model, case.inputs, gpus=case.request["gpus"], loss_fn=summed, optimizer="adamw", mesh={"pp": 2, "dp": 1}
    )
    memory = [stage.memory for stage in plan.prediction.stages]
    yield same("gradients", sum(items.gradients for items in memory), case.ref["grads"])
    yield same("optimizer state", sum(items.optimizer for items in memory), case.ref["optimizer"])
    stored = sum(items.weights + items.buffers for items in memory)
    yield same("weights and buffers over all devices", stored, case.ref["stored_bytes"])
    yield says("the report", str(plan), format_bytes(memory[0].buffers))

    def held(snippet: str, plan: pt.Plan) -> dict[str, tuple[str, int]]:
        from casebook import run_snippet

        with pt.materialize(plan, run_snippet(snippet)["model"], loss_fn=summed) as stage:
            return {key: (str(value.dtype), value.numel()) for key, value in stage.state_dict().items()}

    parts = ranks.run(plan.num_ranks, held, case.snippet, plan)
    whole = {key: (str(value.dtype), value.numel()) for key, value in case.model.state_dict().items()}
    yield same("buffers of all ranks", dict(sorted((parts[0] | parts[1]).items())), dict(sorted(whole.items())))
    yield true(
        "both buffers of a layer on one device",
        not {k.split(".")[0] for k in parts[0]} & {k.split(".")[0] for k in parts[1]},
    )


def verdict_without_a_device(case: Case, ranks: Ranks) -> Iterator[Finding]:
    before = psutil.Process(os.getpid()).memory_info().rss
    reports = [
        pt.capacity(case.model, case.inputs, gpus=f"{ask['gpus']}x{ask['kind']}", curve=False) for ask in case.request
    ]
    yield same("fits", [report.fits for report in reports], case.ref["fits"])
    refused = reports[1]
    yield true(f"short of {refused.shortfall_bytes}", refused.shortfall_bytes >= case.ref["shortfall_GB"] * 1e9)
    yield same("fewest devices", refused.fewest_devices, case.ref["smallest_h100_count"])
    yield says("verdict", refused.verdict(), "does not fit", "2 such devices")
    yield same("real tensors", sum(not p.is_meta for p in case.model.parameters()), case.ref["real_tensors"])
    yield same("parameters", refused.num_parameters, case.ref["params"])
    grown = psutil.Process(os.getpid()).memory_info().rss - before
    yield at_most("growth of this process, MB", grown / 1e6, 500)


def promised_speedup(case: Case, ranks: Ranks) -> Iterator[Finding]:
    """The right values are GPipe's: all forwards, then all backwards. 1F1B hides more where the first stage is slow."""
    gpus, mesh = case.request["gpus"], {"pp": case.request["gpus"], "dp": 1}

    def planned(profile: pt.Profile, count: int) -> pt.Plan:
        training: Any = {"batch_size": 32, "mesh": mesh, "microbatches": count, "schedule": "gpipe"}
        return pt.solve(profile, cluster(gpus), pt.Training(**training))

    def figures(plan: pt.Plan) -> dict[str, float]:
        return {"speedup": plan.prediction.speedup, "bubble": plan.prediction.bubble_fraction}

    profile = profiled(case)
    for count in case.request["microbatches"]:
        plan, right = planned(profile, count), case.ref[f"m{count}"]
        yield same(f"{count} micro-batches", figures(plan), right, 1e-3)
        report = (f"{right['speedup']:.2f} x one device", f"{100 * right['bubble']:.1f} %")
        yield says(f"the report of {count}", str(plan), *report)
        if count == 1:
            yield says("the advice", str(plan).replace("\n     ", " "), "more micro-batches would shrink it")
    uneven = planned(chain([3.0, 1.0, 1.0, 1.0]), 8)
    yield same("stages 3:1:1:1", figures(uneven), case.ref["uneven_3_1_1_1_m8"], 1e-3)
    timeline = pt.simulate(uneven)
    yield same("and replayed", timeline.bubble_fraction, case.ref["uneven_3_1_1_1_m8"]["bubble"], 1e-3)


def sizes_and_names(case: Case, ranks: Ranks) -> Iterator[Finding]:
    for size in case.request["memory"]:
        if (right := case.ref["bytes"].get(str(size))) is not None:
            yield same(f"{size!r}", parse_bytes(size), right)
    for size in case.ref["must_be_rejected"]:
        yield true(f"{size!r} is refused", refusal(lambda size=size: parse_bytes(size)))
    gigabit = refusal(lambda: parse_bytes("1Gib"))
    yield true("1Gib", gigabit or parse_bytes("1Gib") == case.ref["gigabit"])
    bare = refusal(lambda: parse_bytes("80"))
    documented = "plain number of bytes" in (parse_bytes.__doc__ or "")
    yield true("a bare 80 is refused, or bytes as documented", bare or (parse_bytes("80") == 80 and documented))
    yield same("80GB shown", format_bytes(parse_bytes("80GB")), f"{case.ref['shown_80GB_in_GiB']:.1f} GiB")
    told = refusal(lambda: pt.partition(case.model, case.inputs, gpus=f"2x{case.request['kind']}", loss_fn=summed))
    yield says("an unknown device", told, case.request["kind"], "H100", "A100-80GB", "RTX4090")


ANSWERS = {
    "PL-02": output_head_is_the_slowest_stage,
    "PL-05": more_devices_than_layers,
    "PL-08": devices_of_unequal_speed,
    "PL-11": heavy_traffic_within_a_node,
    "CA-02": static_bytes_a_parameter,
    "CA-05": microbatches_in_flight,
    "CA-08": packed_integer_weights,
    "CA-11": verdict_without_a_device,
    "UX-05": promised_speedup,
    "UX-08": sizes_and_names,
}
