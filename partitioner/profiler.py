"""Measure every layer of a model where it will run, the way the executor runs it: as a one-layer slice.

capture     one forward at each micro-batch size: layers, tensors between them, which layers are alike
survey      one forward at each size: what each layer to be measured receives
measure     rounds over the layers that differ (forward with the glue behind it, backward), interleaved so that
            drift of the machine meets all alike; the median run, of an even number the faster one in the middle
whole step  the unsliced model beside them; the difference is reported as `unattributed_s`
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from partitioner.arguments import check_timed_optimizer
from partitioner.capture import Capture, capture, written_weights
from partitioner.errors import ArgumentError, NotBuiltError, SetupError, expect
from partitioner.layer_costs import layers_of
from partitioner.layer_trace import recorded, trace_folder
from partitioner.losses import Loss, LossFunction
from partitioner.microbatches import BatchDim, Cutter, MicroBatch, as_call, named_dims, usual_sizes
from partitioner.probes import Probe, make_probes, to_meta
from partitioner.profiles import Profile, Tensor
from partitioner.progress import Progress, shown
from partitioner.restore import all_weights, untouched
from partitioner.structures import map_tensors
from partitioner.timing import measure, optimizer_seconds, slicing_seconds, whole_steps
from partitioner.tracing import unwrap
from partitioner.trial import explained
from partitioner.ways import with_other_ways
from partitioner.world import as_only_rank


@as_only_rank()
def profile(
    model: nn.Module,
    example_inputs: Any,
    *,
    device: str | torch.device | None = None,
    loss_fn: LossFunction | None = None,
    example_target: Any = None,
    batch_dim: BatchDim = 0,
    microbatch_sizes: Sequence[int] | None = None,
    max_share: float = 1 / 16,
    optimizer: str = "adamw",
    num_threads: int | None = None,
    whole_step: bool = True,
    trace_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: bool | Progress | None = None,
) -> Profile:
    """Measured costs of every layer; the model is left as it was.

    `example_inputs`: one batch (tensor, tuple = arguments, dict = keywords). `device`: where to measure, None: where
    the parameters are; a model elsewhere (meta included) is brought there one layer at a time.
    `microbatch_sizes`: samples; None: an eighth and a half of the batch, two or more. `max_share`: see `capture`.
    `num_threads`: CPU threads that one rank will have. `whole_step`: also time the unsliced model.
    `trace_dir`: write a torch.profiler trace of the timed runs themselves, its ranges named by layer. The profiler adds
    a microsecond to every operator, and so to this Profile: where layers take under a millisecond, plan with another.
    `progress`: as for `partition`.
    """
    model = unwrap(model)
    where = _device_of(model, device)
    traces = None if trace_dir is None else trace_folder(trace_dir)
    batch_dim = named_dims(model, batch_dim)
    args, kwargs = as_call(example_inputs)
    cutter = Cutter(batch_dim)
    batch = cutter.batch_size(args, kwargs)
    sizes = _sizes(batch, microbatch_sizes)
    cut = [cutter.cut(args, kwargs, example_target, batch // size)[0] for size in sizes]
    parts = {part.samples: part for part in cut}
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    loss = Loss(model, loss_fn, None) if loss_fn is not None or not on_meta else Loss(model, None, None)
    threads = torch.get_num_threads() if num_threads is None else num_threads
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ArgumentError(f"num_threads={threads!r} is impossible: give 1 or more")
    if not max_share > 0:
        raise ArgumentError(f"max_share={max_share} lets no layer be: give the largest share of the work, above 0 to 1")
    check_timed_optimizer(optimizer)
    whole = MicroBatch(args, kwargs, example_target, batch)
    kept = (loss.keeps, all_weights(model))
    fails = explained(model, [whole, *cut], loss_fn, batch_dim)
    with fails, shown(progress) as tell, _threads(threads), untouched(model, kept) as start:
        torch.manual_seed(seed)
        captures = _captures(model, parts, max_share, on_meta, loss)
        sizes = tuple(captures)
        if not on_meta:
            smallest = cutter.cut(args, kwargs, example_target, batch // sizes[0])
            against = None if loss.function is None else loss.against(smallest[0].target)
            captures = with_other_ways(model, captures, smallest, against)
        start.keep(written_weights(model, captures[sizes[-1]].parameters))
        probes: dict[int, list[Probe]] = {}
        for size in sizes:
            tell(f"surveying {size} samples", 0.0)
            probes[size] = make_probes(model, captures[size], parts[size], where, loss, on_meta)
        tell("measuring layers", 0.1)
        everywhere = all(p.device == where for p in (*model.parameters(), *model.buffers()))
        began = time.perf_counter(), time.thread_time()
        with contextlib.nullcontext() if traces is None else recorded(traces, cuda=where.type == "cuda"):
            measure(model, [p for size in sizes for p in probes[size]], where, everywhere, tell)
        took = time.perf_counter() - began[0], time.thread_time() - began[1]
        start.restore()  # layers that were run alone have left the model as no forward does
        slicing_s = slicing_seconds(model, captures[sizes[0]], parts[sizes[0]], where) if everywhere else 0.0
        start.restore()  # and stages have left values of each other's in it that they never had
        step_s: tuple[float, ...] = ()
        if whole_step and everywhere:
            tell("checking against whole steps", 0.9)
            step_s = whole_steps(model, parts, sizes, loss, where)
        optimizer_s = optimizer_seconds(model, optimizer, where)
    layers = layers_of(captures, probes)
    sums = [sum(layer.costs[k].forward_s + layer.costs[k].backward_s for layer in layers) for k in range(len(sizes))]
    last = captures[sizes[-1]]
    sizes_of = {size: {tensor.id: tensor.nbytes for tensor in captures[size].tensors} for size in sizes}
    dtypes = Counter(parameter.dtype for parameter in model.parameters())
    return Profile(
        **last.structure(),
        layers=layers,
        tensors=tuple(
            Tensor(
                id=tensor.id,
                producer=tensor.producer,
                consumers=tensor.consumers,
                shape=tensor.shape,
                dtype=tensor.dtype,
                bytes_at=tuple(sizes_of[size][tensor.id] for size in sizes),
                needs_gradient=tensor.needs_gradient,
            )
            for tensor in last.tensors
        ),
        microbatch_sizes=sizes,
        optimizer_s=optimizer_s,
        optimizer=optimizer,
        slicing_s=slicing_s,
        step_s=step_s,
        unattributed_s=tuple(whole - parts_s for whole, parts_s in zip(step_s, sums, strict=True)) if step_s else (),
        batch_dim=batch_dim,
        device=_device_name(where),
        device_kind="cuda" if where.type == "cuda" else "cpu",
        dtype=str(dtypes.most_common(1)[0][0]).removeprefix("torch.") if dtypes else "float32",
        num_threads=threads,
        processor_share=min(1.0, took[1] / took[0]) if where.type == "cpu" else None,
        torch_version=torch.__version__,
        provenance="measured",
        traced=traces is not None,
    )


def _sizes(batch: int, wanted: Sequence[int] | None) -> tuple[int, ...]:
    sizes = list(usual_sizes(batch)) if wanted is None else [wanted] if isinstance(wanted, (int, str)) else list(wanted)
    for size in sizes:
        expect("microbatch_sizes", size, int, "numbers of samples, like [2, 8]")
    sizes = sorted(set(sizes))
    if not sizes or sizes[0] < 1 or sizes[-1] > batch:
        raise ArgumentError(f"micro-batches of {sizes} samples cannot be cut from a batch of {batch}: use 1 to {batch}")
    return tuple(sizes)


def _device_of(model: nn.Module, device: str | torch.device | None) -> torch.device:
    if device is None:
        kinds = Counter(parameter.device for parameter in model.parameters() if not parameter.is_meta)
        found = kinds.most_common(1)[0][0] if kinds else torch.device("cpu")
    else:
        try:
            found = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"device={device!r} is unknown to torch: use 'cpu', 'cuda' or 'cuda:1'") from error
    if found.type not in ("cpu", "cuda"):
        raise NotBuiltError(f"device={str(found)!r} is not built in this version; use 'cpu' or 'cuda'")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise SetupError(f"cannot measure on {found}: torch finds no CUDA device here; use device='cpu'")
    return found


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _captures(
    model: nn.Module,
    parts: dict[int, MicroBatch],
    max_share: float,
    on_meta: bool,
    loss: Loss,
) -> dict[int, Capture]:
    """A capture at each size, in the layers of the largest; sizes at which the forward goes another way are dropped."""
    largest = max(parts)
    found = {largest: _capture(model, parts[largest], on_meta, loss, max_share=max_share)}
    layers = [layer.id for layer in found[largest].layers]
    names = {tensor.id for tensor in found[largest].tensors}
    for size in sorted(parts, reverse=True)[1:]:
        other = _capture(model, parts[size], on_meta, loss, layers=layers)
        if [layer.id for layer in other.layers] == layers and names == {tensor.id for tensor in other.tensors}:
            found[size] = other
    return dict(sorted(found.items()))


def _capture(model: nn.Module, part: MicroBatch, on_meta: bool, loss: Loss, **how: Any) -> Capture:
    if on_meta:
        return capture(model, *map_tensors((part.args, part.kwargs), to_meta), **how)
    given = None if loss.function is None else loss.against(part.target)
    return capture(model, part.args, part.kwargs, loss=given, **how)
