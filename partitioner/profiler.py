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
import statistics
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.arguments import check_timed_optimizer
from partitioner.capture import FATES, Capture, CapturedLayer, CapturedTensor, capture, copied, fate
from partitioner.errors import ArgumentError, NotBuiltError, SetupError, UnsupportedModelError, expect
from partitioner.joining import base_name
from partitioner.layer_trace import DIRECTIONS, named_range, range_name, recorded, trace_folder
from partitioner.losses import Loss, LossFunction
from partitioner.microbatches import Cutter, MicroBatch, as_call, usual_sizes
from partitioner.parts import Payload
from partitioner.profiles import Layer, LayerCost, Profile, Tensor
from partitioner.progress import Progress, shown
from partitioner.recording import storage_of
from partitioner.restore import ModelState, random_states, set_random_states, untouched
from partitioner.slicing import Slice, SliceRun
from partitioner.structures import map_tensors, tensors_in
from partitioner.surveying import alone, inseparable, survey
from partitioner.tracing import unwrap
from partitioner.trial import explained
from partitioner.walking import Meter

MAX_SURVEYS = 12
"""Forwards to look for what every layer receives, where layers are left out at random."""

MIN_REPEATS, MAX_REPEATS = 5, 12
"""Of one layer; in between until the 95 % interval of its median is within 2 %."""


def profile(
    model: nn.Module,
    example_inputs: Any,
    *,
    device: str | torch.device | None = None,
    loss_fn: LossFunction | None = None,
    example_target: Any = None,
    batch_dim: int = 0,
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
    fails = explained(model, [whole, *cut], loss_fn, batch_dim)
    with fails, shown(progress) as tell, _threads(threads), untouched(model, loss.keeps) as start:
        torch.manual_seed(seed)
        captures = _captures(model, parts, max_share, on_meta, loss)
        sizes = tuple(captures)
        probes: dict[int, list[_Probe]] = {}
        for size in sizes:
            tell(f"surveying {size} samples", 0.0)
            probes[size] = _probes(model, captures[size], parts[size], where, loss, on_meta)
        tell("measuring layers", 0.1)
        everywhere = all(p.device == where for p in (*model.parameters(), *model.buffers()))
        with contextlib.nullcontext() if traces is None else recorded(traces, cuda=where.type == "cuda"):
            _measure(model, [p for size in sizes for p in probes[size]], where, everywhere, tell)
        start.restore()  # layers that were run alone have left the model as no forward does
        slicing_s = _slicing_seconds(model, captures[sizes[0]], parts[sizes[0]], where) if everywhere else 0.0
        step_s: tuple[float, ...] = ()
        if whole_step and everywhere:
            tell("checking against whole steps", 0.9)
            step_s = _whole_steps(model, parts, sizes, loss, where)
        optimizer_s = _optimizer_seconds(model, optimizer, where)
    layers = _layers(captures, probes)
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
        return capture(model, *map_tensors((part.args, part.kwargs), _to_meta), **how)
    given = None if loss.function is None else loss.against(part.target)
    return capture(model, part.args, part.kwargs, loss=given, **how)


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


class _Chance(NamedTuple):
    """What decides whether a forward leaves layers out: Python's and NumPy's random states, and `capture.fate`."""

    states: tuple[Any, ...]
    fate: float | None


@dataclass
class _Probe:
    """Layers that no cut may part, mostly one, to be measured at one size, for themselves and for all of their key."""

    layers: tuple[CapturedLayer, ...]
    key: str
    count: int
    samples: int
    part: MicroBatch
    received: dict[int, Payload]
    stage_of: dict[str, int]
    captured: Capture
    loss: Loss | None
    chance: _Chance
    """Of the forward in which `received` was found."""
    state: ModelState | None
    """What the model is to be before each run; None where runs do not change it."""
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    own_saved_bytes: int = 0
    """Saved for backward, without what the layer received and what was made before it."""
    saved_inputs: frozenset[str] = frozenset()
    saved_around: dict[tuple[str, ...], int] = field(default_factory=dict)
    """Saved of what every rank makes itself, such as masks: all names of each, and its bytes."""
    saved_made: frozenset[str] = frozenset()
    """Names of what the layer itself made that are among its own saved bytes."""

    @property
    def name(self) -> str:
        """As traces have it: the layer, or the first and the last of those together, and how many are alike."""
        ids = self.layers[0].id if len(self.layers) == 1 else f"{self.layers[0].id} … {self.layers[-1].id}"
        return f"{ids} ({self.samples} samples{f', one of {self.count} alike' if self.count > 1 else ''})"

    @property
    def is_tight(self) -> bool:
        return all(_interval(times) < 0.02 for times in (self.forward_s, self.backward_s))


def _interval(times: list[float]) -> float:
    """Half of the 95 % interval of the median, relative to it (McGill, Tukey & Larsen 1978)."""
    middle = statistics.median(times)
    if middle < 1e-6:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4)
    return float(1.57 * (third - first) / len(times) ** 0.5 / middle)


def _probes(
    model: nn.Module, captured: Capture, part: MicroBatch, device: torch.device, loss: Loss, on_meta: bool
) -> list[_Probe]:
    """One probe for each structural key; the last layers have their own, since the loss comes after them."""
    groups = inseparable(captured)
    keys = _keys(groups)
    counts = Counter(keys)
    first = {key: groups[k] for k, key in reversed(list(enumerate(keys)))}
    args, kwargs = (part.args, part.kwargs) if not on_meta else map_tensors((part.args, part.kwargs), _to_meta)
    wanted = [[layer.id for layer in group] for group in first.values()]
    payloads, chances, state = _surveyed(model, captured, wanted, args, kwargs)
    here = map_tensors(part, lambda tensor: _real(tensor, device))
    found = []
    for key, group in first.items():
        payload = payloads[group[0].id]
        tensors = [_real(tensor, device) for tensor in payload.tensors]
        received = {} if group is groups[0] else {0: Payload(payload.header, tensors)}
        last = group is groups[-1]
        found.append(
            _Probe(
                layers=group,
                key=key,
                count=counts[key],
                samples=part.samples,
                part=here,
                received=received,
                stage_of=alone(captured, group[0].id, group[-1].id),
                captured=captured,
                loss=loss if last else None,
                chance=chances[group[0].id],
                state=state,
            )
        )
    return found


def _keys(groups: Sequence[tuple[CapturedLayer, ...]]) -> list[str]:
    keys = [" ".join(layer.key for layer in group) for group in groups]
    return [*keys[:-1], f"{keys[-1]} and loss"]


def _surveyed(
    model: nn.Module, captured: Capture, groups: Sequence[Sequence[str]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Payload], dict[str, _Chance], ModelState | None]:
    """What each of `groups` receives, by its first layer, and how; and the state of the model before.

    The state is None where forwards do not change it.
    Where a first forward builds something to keep, the second is taken; where layers are left out at random, more.
    """
    found: dict[str, Payload] = {}
    chances: dict[str, _Chance] = {}
    state: ModelState | None = None
    for attempt in range(MAX_SURVEYS):
        fated = FATES[(attempt + 1) % len(FATES)]  # left to chance last: then a layer runs, and those after it may not
        before, chance = ModelState(model), _Chance(random_states(), fated)
        with fate(chance.fate):
            seen = survey(model, captured, groups, *map_tensors((args, kwargs), copied))
        if before.has_changed():
            if attempt == 0:
                continue
            state = state or before
            state.restore()
        found |= seen.payloads
        chances |= dict.fromkeys(seen.payloads, chance)
        if found.keys() >= {names[0] for names in groups}:
            return found, chances, state
    missing = next(names[0] for names in groups if names[0] not in found)
    raise UnsupportedModelError(
        f"layer {missing} ran when the model was captured, and in none of {MAX_SURVEYS} forwards later: the model must "
        f"be measured in a mode in which it runs all of its layers"
    )


def _real(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not tensor.is_meta:
        return tensor.to(device)
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


class _Clock:
    """Seconds between moments of a device: events where there is a stream, the CPU's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        if not self.cuda:
            return float(second - first)
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3


@contextlib.contextmanager
def _resident(
    model: nn.Module, layers: Sequence[CapturedLayer], device: torch.device, everywhere: bool
) -> Iterator[None]:
    """The layers' parameters and buffers on `device`, for the time of their measurement."""
    if everywhere:
        yield
        return
    wanted = {name for layer in layers for name in layer.parameters}
    made: dict[int, nn.Parameter] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    undo: list[tuple[dict[str, Any], str, Any]] = []
    within = {module for layer in layers for module in model.get_submodule(layer.module).modules()}
    for module in model.modules():
        inside = module in within
        for name, parameter in module._parameters.items():
            if parameter is None or (names[id(parameter)] not in wanted):
                continue
            if id(parameter) not in made:
                data = _real(parameter.detach(), device)
                data = data * 0.02 if parameter.is_meta and data.is_floating_point() else data
                made[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            undo.append((module._parameters, name, parameter))
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and inside and buffer.device != device:
                undo.append((module._buffers, name, buffer))
                module._buffers[name] = _real(buffer, device)
    try:
        yield
    finally:
        for table, name, value in undo:
            table[name] = value


def _measure(
    model: nn.Module,
    probes: list[_Probe],
    device: torch.device,
    everywhere: bool,
    tell: Progress,
) -> None:
    clock = _Clock(device)
    if not everywhere:
        for k, probe in enumerate(probes):
            with _resident(model, probe.layers, device, everywhere):
                _count_saved(model, probe, device)
                part = _slice(model, probe, device)
                while not _enough(probe):
                    _time_once(part, probe, clock)
            tell("measuring layers", 0.1 + 0.8 * (k + 1) / len(probes))
        return
    parts = {id(probe): _slice(model, probe, device) for probe in probes}
    for probe in probes:
        _count_saved(model, probe, device)
    for repeat in range(MAX_REPEATS):
        left = [probe for probe in probes if not _enough(probe)]
        if not left:
            break
        for probe in left:
            _time_once(parts[id(probe)], probe, clock)
        tell("measuring layers", 0.1 + 0.8 * (repeat + 1) / MAX_REPEATS)


def _enough(probe: _Probe) -> bool:
    done = len(probe.forward_s)
    wanted = min(MAX_REPEATS, 6 * probe.count)
    return done >= wanted or (done >= MIN_REPEATS and probe.is_tight)


def _slice(model: nn.Module, probe: _Probe, device: torch.device) -> Slice:
    stage = probe.stage_of[probe.layers[0].id]
    return Slice(model, probe.captured, probe.stage_of, stage, join=False, device=device, guarded=False)


def _finish(probe: _Probe, run: SliceRun) -> torch.Tensor | list[torch.Tensor]:
    """What the backward starts from: the loss, or the tensors sent on."""
    if probe.loss is not None:
        return probe.loss.of(run.output, probe.part.target)
    return [tensor for payload in run.sends.values() for tensor in payload.tensors if tensor.requires_grad]


def _backward(roots: torch.Tensor | list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    if isinstance(roots, torch.Tensor):
        if roots.requires_grad:
            roots.backward()  # type: ignore[no-untyped-call]
    elif roots:
        torch.autograd.backward(roots, gradients)


class _StopWatch(Meter):
    """Adds up the layers and functions of a stage's own part; what watching them costs is left out."""

    def __init__(self, clock: _Clock, name: str = "timed") -> None:
        self.clock, self.name = clock, name
        self.marks: list[Any] = []

    def start(self) -> None:
        self.range = named_range(self.name)
        self.range.__enter__()
        self.marks.append(self.clock.now())

    def stop(self) -> None:
        self.marks.append(self.clock.now())
        self.range.__exit__(None, None, None)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def seconds(self) -> float:
        return sum(map(self.clock.between, self.marks[::2], self.marks[1::2]))


class _Named(Meter):
    """Keeps what was put in, what every rank makes itself, and what the layer made, by name."""

    def __init__(self) -> None:
        self.received: dict[str, torch.Tensor] = {}
        self.around: dict[str, torch.Tensor] = {}
        self.made: dict[str, torch.Tensor] = {}

    def begin(self, received: dict[str, torch.Tensor], around: dict[str, torch.Tensor]) -> None:
        self.received, self.around = received, around

    def end(self, made: dict[str, torch.Tensor]) -> None:
        self.made = made


@contextlib.contextmanager
def _as_surveyed(probe: _Probe) -> Iterator[None]:
    """The model and chance are as when the probe's inputs were made."""
    set_random_states(probe.chance.states)
    if probe.state is not None:
        probe.state.restore()
    with fate(probe.chance.fate):
        yield


def _time_once(part: Slice, probe: _Probe, clock: _Clock) -> None:
    names = [range_name(way, probe.name, len(probe.forward_s)) for way in DIRECTIONS]
    forward, backward = (_StopWatch(clock, name) for name in names)
    with _as_surveyed(probe):
        run = part.run(probe.part.args, probe.part.kwargs, probe.received, meter=forward)
    with forward if probe.loss is not None else contextlib.nullcontext():  # the loss is the last layer's
        roots = _finish(probe, run)
    gradients = [] if isinstance(roots, torch.Tensor) else [torch.ones_like(tensor) for tensor in roots]
    with backward:
        _backward(roots, gradients)
    probe.forward_s.append(forward.seconds())
    probe.backward_s.append(backward.seconds())


def _count_saved(model: nn.Module, probe: _Probe, device: torch.device) -> None:
    """Warm up once, and count what autograd keeps: each storage once, parameters and buffers left out."""
    ours = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    kept: weakref.WeakSet[_Saved] = weakref.WeakSet()
    names = _Named()

    def pack(tensor: torch.Tensor) -> _Saved:
        with torch._C.DisableTorchFunction():
            saved = _Saved(tensor.detach() if tensor.requires_grad else tensor)
        kept.add(saved)
        return saved

    part = _slice(model, probe, device)
    try:
        with _as_surveyed(probe), torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            run = part.run(probe.part.args, probe.part.kwargs, probe.received, meter=names)
            roots = _finish(probe, run)
        saved = {
            storage_of(one.tensor): _storage_bytes(one.tensor) for one in kept
        }  # what no graph needs is gone by now
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):  # functorch's transforms allow none
            raise
        with _as_surveyed(probe), _Results() as results:
            run = part.run(probe.part.args, probe.part.kwargs, probe.received, meter=names)
            roots = _finish(probe, run)
        saved = results.nbytes
    saved = {key: size for key, size in saved.items() if key not in ours}
    given = {storage_of(tensor) for tensor in tensors_in(probe.part)}
    received = {storage_of(tensor): name for name, tensor in names.received.items()}
    around: dict[int, tuple[str, ...]] = defaultdict(tuple)
    for name, tensor in names.around.items():
        around[storage_of(tensor)] += (name,)
    elsewhere = given | received.keys() | around.keys()
    probe.own_saved_bytes = sum(size for key, size in saved.items() if key not in elsewhere)
    probe.saved_inputs = frozenset(name for key, name in received.items() if key in saved)
    probe.saved_around = {mine: saved[key] for key, mine in around.items() if key in saved and key not in given}
    probe.saved_made = frozenset(name for name, tensor in names.made.items() if storage_of(tensor) in saved)
    _backward(roots, [] if isinstance(roots, torch.Tensor) else [torch.ones_like(tensor) for tensor in roots])


class _Results(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all storages that operations make: what autograd keeps at the most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self.nbytes[storage_of(tensor)] = _storage_bytes(tensor)
        return result


class _Saved:
    """A tensor that autograd holds; it is gone when its graph is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else 0


def _slicing_seconds(model: nn.Module, captured: Capture, part: MicroBatch, device: torch.device) -> float:
    """What slicing adds to a forward: two stages cut near the middle, the mean of what is not their layers' own."""
    ids = [layer.id for layer in captured.layers]
    allowed = [k for k in range(1, len(ids)) if ids[k] not in captured.no_cut]
    if not allowed:
        return 0.0
    cut = min(allowed, key=lambda k: abs(2 * k - len(ids)))
    parts = [Slice(model, captured, {name: int(k >= cut) for k, name in enumerate(ids)}, stage) for stage in (0, 1)]
    clock = _Clock(device)
    times = []
    states = [ModelState(model)] * 2
    for repeat in range(6):
        spent = 0.0
        received: dict[int, Payload] = {}
        chance = random_states()
        for stage, one in enumerate(parts):
            states[stage].restore()  # each stage knows only what itself left behind
            set_random_states(chance)
            watch = _StopWatch(clock)
            start = time.perf_counter()
            run = one.run(part.args, part.kwargs, received, meter=watch)
            spent += time.perf_counter() - start
            spent -= watch.seconds() if not clock.cuda else 0.0
            received = {0: run.sends[1]} if run.sends else {}
            states[stage] = ModelState(model)
        if repeat and not clock.cuda:
            times.append(spent / 2)
    return statistics.median(times) if times else 0.0


def _whole_steps(
    model: nn.Module, parts: dict[int, MicroBatch], sizes: Sequence[int], loss: Loss, device: torch.device
) -> tuple[float, ...]:
    """Forward and backward of the unsliced model at each size: one to warm up, the median of three."""
    clock = _Clock(device)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(4):
        for size in sizes:
            part = parts[size]
            start = clock.now()
            _backward(loss.of(model(*part.args, **part.kwargs), part.target), [])
            seconds = clock.between(start, clock.now())
            if repeat:
                times[size].append(seconds)
    return tuple(statistics.median(times[size]) for size in sizes)


def _optimizer_seconds(model: nn.Module, optimizer: str, device: torch.device) -> float:
    """One optimizer step, measured on a sample of the parameters and scaled by their number."""
    kinds: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, 1e-6),
        "sgd-momentum": lambda p: torch.optim.SGD(p, 1e-6, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, 1e-6),
        "adamw": lambda p: torch.optim.AdamW(p, 1e-6),
    }
    if optimizer not in kinds:
        return 0.0
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = sum(parameter.numel() for parameter in trainable)
    sample: list[nn.Parameter] = []
    for parameter in trainable:
        if sum(p.numel() for p in sample) > 8_000_000:
            break
        sample.append(nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)))
    if not sample:
        return 0.0
    for parameter in sample:
        parameter.grad = torch.zeros_like(parameter)
    made = kinds[optimizer](sample)
    clock = _Clock(device)
    times = []
    for repeat in range(5):
        start = clock.now()
        made.step()
        seconds = clock.between(start, clock.now())
        if repeat > 1:
            times.append(seconds)
    return statistics.median(times) * total / sum(parameter.numel() for parameter in sample)


def _layers(captures: dict[int, Capture], probes: dict[int, list[_Probe]]) -> tuple[Layer, ...]:
    """Every layer with the costs of its key at each size."""
    costs: dict[str, list[LayerCost]] = {}
    for size, captured in captures.items():
        by_key = {probe.key: probe for probe in probes[size]}
        groups = inseparable(captured)
        counted: set[int | str] = set()  # memory of tensors between layers; names of what every rank makes
        routes = _routes(captured, groups)
        for group, key in zip(groups, _keys(groups), strict=True):
            probe = by_key[key]
            mine, measured = routes[group[0].id], routes[probe.layers[0].id]
            saved = probe.own_saved_bytes
            counted |= probe.saved_made
            for tensor, like in zip(mine.made, measured.made, strict=False):
                if base_name(like.id) in probe.saved_made:
                    counted.add(tensor.memory)
            for tensor, like in zip(mine.used, measured.used, strict=False):
                if base_name(like.id) in probe.saved_inputs and tensor.memory not in counted:
                    counted.add(tensor.memory)
                    saved += tensor.memory_nbytes
            for names, nbytes in probe.saved_around.items():
                saved += 0 if counted.intersection(names) else nbytes
                counted.update(names)
            forward_s, backward_s = statistics.median_low(probe.forward_s), statistics.median_low(probe.backward_s)
            for layer, share in zip(group, _shares(group), strict=True):
                cost = LayerCost(
                    samples=size,
                    forward_s=forward_s * share,
                    backward_s=backward_s * share,
                    forward_spread_s=_half_quartiles(probe.forward_s) * share,
                    backward_spread_s=_half_quartiles(probe.backward_s) * share,
                    saved_bytes=saved if layer is group[-1] else 0,
                    flops=layer.flops,
                )
                costs.setdefault(layer.id, []).append(cost)
    last = next(reversed(captures.values()))
    bytes_of = {parameter.names[0]: parameter for parameter in last.parameters}
    return tuple(
        Layer(
            id=layer.id,
            class_name=layer.class_name,
            parameter_bytes=sum(bytes_of[name].bytes for name in layer.parameters),
            gradient_bytes=sum(bytes_of[name].bytes for name in layer.parameters if bytes_of[name].trainable),
            buffer_bytes=sum(buffer.bytes for buffer in last.buffers if layer.id in buffer.layers),
            key=layer.key,
            costs=tuple(costs[layer.id]),
        )
        for layer in last.layers
    )


def _shares(group: Sequence[CapturedLayer]) -> list[float]:
    """What part of the time measured for all is each layer's: by their FLOPs, equal parts where they have none."""
    total = sum(layer.flops for layer in group)
    return [layer.flops / total if total else 1 / len(group) for layer in group]


@dataclass
class _Routes:
    """The tensors that layers make for others, and those that they use, each in a fixed order."""

    made: list[CapturedTensor] = field(default_factory=list)
    used: list[CapturedTensor] = field(default_factory=list)


def _routes(captured: Capture, groups: Sequence[Sequence[CapturedLayer]]) -> dict[str, _Routes]:
    """By the first layer of each group."""
    first = {layer.id: group[0].id for group in groups for layer in group}
    routes = {group[0].id: _Routes() for group in groups}
    for tensor in captured.tensors:
        routes[first[tensor.producer]].made.append(tensor)
        for user in dict.fromkeys(first[layer] for layer in tensor.consumers):
            if user != first[tensor.producer]:
                routes[user].used.append(tensor)
    return routes


def _half_quartiles(times: list[float]) -> float:
    first, _, third = statistics.quantiles(times, n=4)
    return float(third - first) / 2
