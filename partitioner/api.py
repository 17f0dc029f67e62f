"""The one call that walks the whole way: model and devices in, plan out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from partitioner.arguments import check_arguments, full_mesh, num_devices
from partitioner.capture import fingerprint, written_weights
from partitioner.errors import (
    ArgumentError,
    InfeasibleError,
    LossWarning,
    NotBuiltError,
    PartitionerError,
    PlanMismatchError,
    ReplicaWarning,
    UnsupportedModelError,
    expect,
)
from partitioner.links import between_cuda_devices, loopback
from partitioner.losses import Loss, LossFunction, LossWeight, refuse_trained, sum_of_outputs
from partitioner.microbatches import BatchDim, Cutter, MicroBatch, as_call, named_dims
from partitioner.plan import Plan
from partitioner.profiler import profile as measure
from partitioner.profiles import Profile
from partitioner.progress import Progress, portion, shown
from partitioner.selfcheck import changed_by_forward, check_order, check_split
from partitioner.shared import kept_apart
from partitioner.solver import solve
from partitioner.specs import Cluster, Device, Training, optimizer_state_bytes, parse_bytes
from partitioner.tracing import unwrap
from partitioner.trial import OnlyWholeError, explained
from partitioner.weighing import weighted
from partitioner.whole_batch import batch_norms
from partitioner.world import as_only_rank

WORTH_DIVIDING = 0.05
"""Relative; so much shorter must a step be predicted for replicas to divide what they keep, unasked: predictions are
off by as much (tests/benchmarks/prediction.py), and every rank then has to be there for `stage.state_dict()`."""

QUIET_SHARE = 0.9
"""Of a processor: what the thread that times layers has at least on a machine with nothing else to do."""


def partition(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    gpus: int | str | Cluster,
    loss_fn: LossFunction | None = None,
    example_target: Any = None,
    loss_weight: LossWeight | None = None,
    batch_size: int | Literal["auto"] | None = None,
    batch_dim: BatchDim = 0,
    mesh: Literal["auto"] | Mapping[str, int] = "auto",
    microbatches: int | Literal["auto"] = "auto",
    schedule: str = "auto",
    optimizer: str | float = "adamw",
    precision: str = "fp32",
    recompute: str = "auto",
    shard: str = "auto",
    gradient_compression: str | None = None,
    memory_limit: str | int | None = None,
    objective: str = "train",
    pin: Mapping[str, int | str] | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    check: Literal["first", "never"] = "first",
    trace_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: bool | Progress | None = None,
) -> Plan:
    """The fastest plan found for `model` on these devices, with what it will cost; the model is untouched.

    `example_inputs`: one batch: a tensor, a tuple (arguments) or a dict (keyword arguments). `gpus`: a number of this
    machine's CUDA devices (of CPU ranks, where it has fewer), a name such as "2x8xA100-80GB", or a Cluster.
    `loss_fn(output, target)`: None is the model's own loss. `batch_size`: samples of one optimizer step, all replicas
    together; None: that of `example_inputs`. `batch_dim`: the dimension of samples, or that of each argument where they
    differ, None where it holds none: {"state": 1, "mask": None}; "*" are all others, "target" the target.
    `objective`: "train", or for inference with `eval_step` the most samples a second ("throughput") or the least time
    of one batch ("latency"). `recompute`: never, always, or auto: the stages
    that do not fit otherwise. `shard`: what a stage's replicas divide, none, zero1 (the optimizer's state) or zero2
    (gradients, too), or auto: by stage, where otherwise nothing fits or the step is predicted 5 % longer. `pin`: layer
    id -> stage, or -> a word, for layers that are to share a stage: {"wte": "tied", "lm_head": "tied"}. `profile`: plan
    from it without measuring. `check`: run one micro-batch sliced and unsliced; cuts where the results differ are given
    up, and `why` says so; and compare the loss of the batch with those of its micro-batches: a sum, or a mean over what
    a mask or padding leaves, is found and kept in the plan, and for others there is a `LossWarning`. `loss_weight`: as
    for `materialize`. Under torchrun rank 0 plans and all ranks get its plan. Errors: `ArgumentError`, `NotBuiltError`
    (a value that this version does not run), `InfeasibleError` (memory), `UnsupportedModelError`.
    """
    check_arguments(
        gpus=gpus,
        batch_size=batch_size,
        mesh=mesh,
        microbatches=microbatches,
        schedule=schedule,
        optimizer=optimizer,
        precision=precision,
        recompute=recompute,
        shard=shard,
        gradient_compression=gradient_compression,
        memory_limit=memory_limit,
        objective=objective,
        check=check,
        batch_dim=batch_dim,
        loss_fn=loss_fn,
        pin=pin,
        trace_dir=trace_dir,
        seed=seed,
    )
    refuse_trained(loss_fn)
    expect("profile", profile, (Profile, str, os.PathLike, type(None)), "a Profile, or the path of one")
    if trace_dir is not None and profile is not None:
        raise ArgumentError("trace_dir= is of the measurement, and with profile= nothing is measured: leave one out")
    model = unwrap(model)
    batch_dim = named_dims(model, batch_dim)
    if objective != "train" and loss_fn is None:
        loss_fn = sum_of_outputs

    warned: list[tuple[str, type[Warning]]] = []

    def make() -> Plan:
        notes: list[str] = []
        inputs = example_inputs
        if inputs is None:
            inputs, note = _told_inputs(model)
            notes.append(note)
        args, kwargs = as_call(inputs)
        samples = Cutter(batch_dim).batch_size(args, kwargs)
        if not samples:
            raise ArgumentError(
                f"the inputs hold 0 samples along dimension {Cutter(batch_dim).batch_dim}: pass a batch of 1 or more"
            )
        if lists := Cutter(batch_dim).lists_cut(args, kwargs, example_target):
            notes.append(
                f"{', '.join(lists)}: a list in it has as many items as the batch has samples ({samples}), so it is "
                "cut into micro-batches with them; where that is chance, pass a tuple"
            )
        if doubt := Cutter(batch_dim).doubt(args, kwargs, example_target):
            notes.append(doubt)
        size = samples if batch_size is None else int(batch_size)
        cluster, device = _cluster(gpus, profile is not None, notes)
        training = Training(
            batch_size=size,
            microbatches=microbatches,
            mesh="auto" if isinstance(mesh, str) else full_mesh(mesh, cluster.num_devices),
            schedule=cast(Any, schedule),
            optimizer=optimizer if isinstance(optimizer, str) else f"{optimizer:g} bytes a parameter",
            optimizer_bytes=_optimizer_bytes(optimizer, model),
            recompute=cast(Any, recompute),
            shard=cast(Any, "none" if shard == "auto" and objective != "train" else shard),
            memory_limit_bytes=None if memory_limit is None else parse_bytes(memory_limit),
            objective=cast(Any, objective),
            pin=dict(pin or {}),
            batch_dim=batch_dim,
            whole=Cutter(batch_dim).goes_whole(args, kwargs, example_target),
        )
        with shown(progress) as tell, _beside(doubt):
            if profile is None:
                measuring = partial(
                    measure,
                    model,
                    inputs,
                    device=device,
                    loss_fn=loss_fn,
                    example_target=example_target,
                    batch_dim=batch_dim,
                    max_share=1 / (8 * max(2, cluster.num_devices)),
                    optimizer=optimizer if isinstance(optimizer, str) else "none",
                    num_threads=_threads_of_a_rank(cluster) if device.type == "cpu" else None,
                    trace_dir=trace_dir,
                    seed=seed,
                    progress=portion(tell, 0.0, 0.75),
                )
                try:
                    measured = measuring()
                except (OnlyWholeError, NotBuiltError) as error:
                    if not (size == samples and training.stays_whole):
                        raise
                    measured = measuring(microbatch_sizes=[samples])
                    lines = str(error.__cause__ or error).splitlines() or [""]
                    notes.append(f"measured with the whole batch alone, as a part of it does not run: {lines[0][:200]}")
            else:
                measured = profile if isinstance(profile, Profile) else Profile.load(profile)
                _check_fits(model, measured)
            share = measured.processor_share
            if share is not None and share < QUIET_SHARE:
                notes.append(
                    f"layers were timed with {share:.2f} of a processor, where {QUIET_SHARE} or more is usual: other "
                    "work on this machine (or a layer that waits) makes the predicted times up to "
                    f"{1 / max(share, 0.01):.1f} times too long; profile again when it is idle"
                )
            plan = _solved(measured, cluster, training, progress=portion(tell, 0.75, 0.9))
            if check == "first" and not any(parameter.is_meta for parameter in model.parameters()):
                tell("checking the slices", 0.9)
                whole = MicroBatch(args, kwargs, example_target, samples)
                with explained(model, [whole, *_microbatches(plan, whole)], loss_fn, batch_dim):
                    loss = Loss(model, loss_fn, loss_weight)
                    loss.beside = (written_weights(model, measured.parameters),)
                    plan = _checked(plan, model, whole, loss, seed, notes)
                    if objective == "train":
                        lost: list[str] = []
                        plan = weighted(plan, model, whole, inputs, loss, seed, notes, lost)
                        warned.extend((text, LossWarning) for text in lost)
                        if plan.num_replicas > 1 and (text := _of_each_replica(plan, model, whole, loss, seed)):
                            notes.append(text)
                            warned.append((text, ReplicaWarning))
        if objective == "train" and (text := _normalised(plan, model)):
            notes.append(text)
        if text := _kept_apart(plan, model, loss_fn):
            notes.append(text)
        return plan.model_copy(update={"why": (*plan.why, *notes)})

    _refuse_too_many_ranks(num_devices(gpus))
    plan = _on_first_rank(make)
    for text, kind in warned:
        warnings.warn(text, kind, stacklevel=2)
    return plan


@contextmanager
def _beside(doubt: str) -> Iterator[None]:
    """What a refusal may come from, said with it."""
    try:
        yield
    except ArgumentError as error:
        if doubt:
            error.args = (f"{error}. {doubt}",)
        raise


def _solved(profile: Profile, cluster: Cluster, training: Training, progress: Progress | None = None) -> Plan:
    """The plan; under shard="auto" the best whose replicas keep all, unless none fits or is that much slower.

    Its gap is to the best of all, those that divide among them.
    """
    if training.shard != "auto":
        return solve(profile, cluster, training, progress=progress)
    divided = solve(profile, cluster, training, progress=progress)
    if all(stage.shard == "none" for stage in divided.stages):
        return divided
    try:
        whole = solve(profile, cluster, training.model_copy(update={"shard": "none"}))
    except InfeasibleError:
        return divided
    if whole.num_ranks < divided.num_ranks or _total_s(divided) < _total_s(whole) * (1 - WORTH_DIVIDING):
        return divided
    levels = sorted({stage.shard for stage in divided.stages} - {"none"})
    saved = 1 - _total_s(divided) / _total_s(whole)
    why = (
        f"replicas keep all: dividing what they keep ({' and '.join(levels)}) would make the step {100 * saved:.1f} % "
        f"shorter, and is done unasked from {100 * WORTH_DIVIDING:.0f} % on or where nothing else fits; "
        f"shard={levels[0]!r} asks for it"
    )
    return whole.model_copy(
        update={
            "training": training,
            "lower_bound_s": min(whole.lower_bound_s, divided.lower_bound_s),
            "why": (*whole.why, why) if saved >= 5e-4 else whole.why,
        }
    )


def _total_s(plan: Plan) -> float:
    return plan.prediction.step_s + plan.prediction.optimizer_s


def _microbatches(plan: Plan, batch: MicroBatch) -> list[MicroBatch]:
    """The example in micro-batches as large as the plan's."""
    count = max(1, batch.samples // plan.microbatch_samples)
    cutter = Cutter(plan.training.batch_dim, whole=plan.training.whole)
    return cutter.cut(batch.args, batch.kwargs, batch.target, count)


def _checked(plan: Plan, model: nn.Module, batch: MicroBatch, loss: Loss, seed: int, notes: list[str]) -> Plan:
    """The plan, or the best one without the cuts, or the recomputation, with which the model gives other numbers."""
    part, *more = _microbatches(plan, batch)
    second = more[0] if more else None
    if plan.num_stages > 1 and plan.num_microbatches > 1 and plan.training.objective == "train":
        try:
            check_order(model, part, second or part, loss, seed=seed)
        except UnsupportedModelError as error:
            notes.append(f"no stages: {error}")
            nowhere = dict.fromkeys((layer.id for layer in plan.profile.layers[1:]), "the order of backwards matters")
            try:
                plan = _solved(plan.profile.model_copy(update={"no_cut": nowhere}), plan.cluster, plan.training)
            except PartitionerError:
                raise error from None
    while plan.num_stages > 1 or any(stage.recompute for stage in plan.stages):
        again = [layer for stage in plan.stages if stage.recompute for layer in stage.layers]
        try:
            check_split(model, plan.profile, plan.stage_of(), part, loss, second=second, recompute=again, seed=seed)
            break
        except (UnsupportedModelError, RuntimeError) as error:
            try:
                if (
                    again
                    and check_split(model, plan.profile, plan.stage_of(), part, loss, second=second, seed=seed) >= 0
                ):
                    plan = _without_recomputation(plan, error, notes)
                    continue
            except UnsupportedModelError:
                pass
            if not isinstance(error, UnsupportedModelError):
                raise
            wrong = [stage.layers[0] for stage in plan.stages[1:]]
            notes.append(f"not cut before {', '.join(wrong)}: {error}")
            refused = dict.fromkeys(wrong, "sliced there, the model gives other numbers or fails")
            profile = plan.profile.model_copy(update={"no_cut": {**plan.profile.no_cut, **refused}})
            try:
                plan = _solved(profile, plan.cluster, plan.training)
            except PartitionerError:
                raise error from None
    return plan


def _of_each_replica(plan: Plan, model: nn.Module, batch: MicroBatch, loss: Loss, seed: int) -> str:
    """What replicas do to the model's state that one device would not, if anything."""
    part = _microbatches(plan, batch)[0]
    buffers, counts, generators = changed_by_forward(model, part, loss, seed=seed)
    told = []
    if generators:
        told.append(
            f"the forward draws from {', '.join(generators)}, of the model's own: each of {plan.num_replicas} replicas "
            "draws the same numbers for its own samples, where one device would draw on; after materialize a replica "
            f"can have its own: {generators[0]}.manual_seed(seed + stage.dp_rank)"
        )
    if buffers or counts:
        told.append(_moved_apart(plan, buffers))
    return "; ".join(told)


def _moved_apart(plan: Plan, buffers: list[str]) -> str:
    names = f"{len(buffers)} buffers ({', '.join(buffers[:2])}{', ...' if len(buffers) > 2 else ''})"
    what = (
        names if len(buffers) > 1 else f"the buffer {buffers[0]}" if buffers else "numbers in its modules' attributes"
    )
    taken = " and takes those of the first replica at the start of a step" if buffers else ""
    return (
        f"the forward changes {what}: each of {plan.num_replicas} replicas changes its own by its own samples{taken}, "
        "as DistributedDataParallel has it; one device would change one by all samples. Where the forward does not add "
        "up over its replicas (with torch.distributed.all_reduce), what reads that gives other numbers than on one "
        "device: mesh={'dp': 1} has no replicas"
    )


def _normalised(plan: Plan, model: nn.Module) -> str:
    """What layers that normalise over a batch see of it, if not all; other numbers by design, so no `LossWarning`."""
    norms = batch_norms(model)
    whole, seen = plan.training.batch_size, plan.microbatch_samples
    if all(isinstance(norm, nn.SyncBatchNorm) for norm in norms.values()):
        seen *= plan.num_replicas
    if not norms or seen == whole:
        return ""
    first, *more = norms
    names = f"{first or 'the model'}{f' and {len(more)} more' if more else ''}"
    return (
        f"{names}: batch normalisation over {seen} samples at a time, not over the batch of {whole}, as accumulated "
        "gradients have it: losses, gradients and running averages are those of one device that takes the same "
        "micro-batches, and others than of the whole batch; microbatches=1 and mesh={'dp': 1} leave it whole"
    )


def _kept_apart(plan: Plan, model: nn.Module, loss_fn: LossFunction | None) -> str:
    """Of what the forward only writes, what each stage has for itself."""
    if plan.num_stages < 2:
        return ""
    found = kept_apart(model, [layer.id for layer in plan.profile.layers], plan.stage_of(), loss_fn)
    if not found:
        return ""
    names = f"{', '.join(map(repr, found[:3]))}{', ...' if len(found) > 3 else ''}"
    return (
        f"{names}: written by several stages and read by no code of the forward, as meters and logs are; each rank has "
        "what its own layers wrote, so that after a step they are to be read on all of them"
    )


def _without_recomputation(plan: Plan, error: Exception, notes: list[str]) -> Plan:
    reason = f"its layers cannot run again in their backward ({str(error).splitlines()[0]})"
    if plan.training.recompute == "always":
        raise ArgumentError(f"recompute='always' does not work for this model: {reason}; use recompute='never'")
    notes.append(f"nothing is recomputed: {reason}")
    return _solved(plan.profile, plan.cluster, plan.training.model_copy(update={"recompute": "never"}))


def _refuse_too_many_ranks(devices: int) -> None:
    """A plan never has more ranks than devices: say so before minutes are spent on it."""
    started = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if started > devices:
        raise PlanMismatchError(
            f"{started} processes were started, but the plan would be for {devices} "
            f"{'device' if devices == 1 else 'devices'}: use gpus={started}, or torchrun --nproc-per-node {devices}"
        )


def _on_first_rank(make: Callable[[], Plan]) -> Plan:
    """The plan, made here; under torchrun made on rank 0 and sent to all, an error there raised on all."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        return make()
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            with as_only_rank():
                outcome = [make().model_dump_json()]
        except Exception as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return Plan.model_validate_json(outcome[0])


def _optimizer_bytes(optimizer: str | float, model: nn.Module) -> float:
    """State of a trainable parameter element; of a named optimizer in the parameters' own width."""
    if not isinstance(optimizer, str):
        return float(optimizer)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    elements = sum(parameter.numel() for parameter in trainable)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trainable)
    return optimizer_state_bytes(optimizer, num_bytes / elements if elements else 4)


def _cluster(gpus: int | str | Cluster, has_profile: bool, notes: list[str]) -> tuple[Cluster, torch.device]:
    """The devices to plan for, and where to measure."""
    if isinstance(gpus, str) and gpus.strip().isdigit():
        gpus = int(gpus)
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if isinstance(gpus, int):
        if here >= gpus:
            return _this_cuda(gpus), torch.device("cuda", 0)
        notes.append(
            f"this machine has {here} CUDA devices, so the plan is for {gpus} CPU ranks; name the devices "
            f"(gpus='{gpus}xH100', profile=...) to plan for others"
        )
        return _this_cpu(gpus), torch.device("cpu")
    cluster = Cluster.parse(gpus) if isinstance(gpus, str) else gpus
    kinds = {device.kind for device in cluster.devices}
    if kinds == {"cpu"}:
        return cluster, torch.device("cpu")
    if here:
        name = torch.cuda.get_device_name(0)
        notes.append(f"layers are measured on this machine's {name}")
        return cluster, torch.device("cuda", 0)
    if not has_profile:
        raise NotBuiltError(
            f"gpus={gpus if isinstance(gpus, str) else cluster.devices[0].name!r}: this machine has no CUDA device to "
            f"measure on; pass profile=, from pt.estimate(model, inputs, device={cluster.devices[0].name!r}) or from "
            f"`partitioner profile` on such a device, or use a number for CPU ranks"
        )
    return cluster, torch.device("cpu")


def _this_cuda(count: int) -> Cluster:
    devices = []
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        devices.append(Device(name=found.name, kind="cuda", memory_bytes=found.total_memory, overhead_bytes=2**30))
    link = between_cuda_devices()
    return Cluster(devices=tuple(devices), nodes=(0,) * count, intra=link, inter=link)


def _this_cpu(count: int) -> Cluster:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count
    device = Device(name="CPU rank", kind="cpu", memory_bytes=memory, overhead_bytes=min(memory, 400 * 2**20))
    link = loopback()
    return Cluster(devices=(device,) * count, nodes=(0,) * count, intra=link, inter=link)


def _threads_of_a_rank(cluster: Cluster) -> int:
    ranks_here = max(cluster.nodes.count(node) for node in set(cluster.nodes))
    return max(1, (os.cpu_count() or 1) // ranks_here)


def _check_fits(model: nn.Module, profile: Profile) -> None:
    found = fingerprint(model)
    if profile.fingerprint and profile.fingerprint != found:
        raise PlanMismatchError(
            f"the profile is of another model: its fingerprint is {profile.fingerprint} ({profile.model}), this "
            f"{type(model).__name__} has {found}; measure again, or pass the model it was made from"
        )


def _told_inputs(model: nn.Module) -> tuple[Any, str]:
    """Inputs where they can be told safely, and the assumption in words."""
    config = getattr(model, "config", None)
    generates = getattr(model, "can_generate", None)
    if config is not None and hasattr(config, "vocab_size") and callable(generates) and generates():
        positions = getattr(config, "max_position_embeddings", None) or 1024
        length = min(1024, int(positions))
        tokens = torch.zeros(8, length, dtype=torch.long) + torch.arange(length) % int(config.vocab_size)
        return {"input_ids": tokens, "labels": tokens.clone()}, f"no inputs were given: assumed 8 x {length} tokens"
    example = getattr(model, "example_input_array", None)
    if example is not None:
        return example, "no inputs were given: took the model's example_input_array"
    if isinstance(model, nn.Sequential) and len(model):
        first = model[0]
        if isinstance(first, nn.Linear):
            numbers = torch.randn(32, first.in_features, generator=torch.Generator().manual_seed(0))
            return numbers, f"no inputs were given: assumed 32 x {first.in_features} numbers"
        if isinstance(first, nn.Embedding):
            tokens = torch.arange(32 * 128).reshape(32, 128) % first.num_embeddings
            return tokens, "no inputs were given: assumed 32 x 128 tokens"
    raise ArgumentError(
        f"the inputs of {type(model).__name__} cannot be told: pass one batch, "
        f"partition(model, example_inputs, gpus=...), a tensor, a tuple of arguments or a dict of keyword arguments"
    )
