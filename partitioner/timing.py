"""Seconds and saved bytes of layers, of whole steps, of slicing and of the optimizer: measured, the median taken."""

from __future__ import annotations

import contextlib
import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.capture import Capture, CapturedLayer, fate
from partitioner.layer_trace import DIRECTIONS, named_range, range_name
from partitioner.losses import Loss
from partitioner.microbatches import MicroBatch
from partitioner.parts import Payload
from partitioner.probes import Probe, real
from partitioner.progress import Progress
from partitioner.restore import ModelState, random_states, set_random_states
from partitioner.slicing import Slice, SliceRun
from partitioner.structures import in_own_containers, storage_of, tensors_in
from partitioner.walking import Meter

MIN_REPEATS, MAX_REPEATS = 5, 12
"""Of one layer; in between until the 95 % interval of its median is within 2 %."""


class Clock:
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
                data = real(parameter.detach(), device)
                data = data * 0.02 if parameter.is_meta and data.is_floating_point() else data
                made[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            undo.append((module._parameters, name, parameter))
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and inside and buffer.device != device:
                undo.append((module._buffers, name, buffer))
                module._buffers[name] = real(buffer, device)
    try:
        yield
    finally:
        for table, name, value in undo:
            table[name] = value


def measure(
    model: nn.Module,
    probes: list[Probe],
    device: torch.device,
    everywhere: bool,
    tell: Progress,
) -> None:
    clock = Clock(device)
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


def _enough(probe: Probe) -> bool:
    done = len(probe.forward_s)
    wanted = min(MAX_REPEATS, 6 * probe.count)
    return done >= wanted or (done >= MIN_REPEATS and probe.is_tight)


def _slice(model: nn.Module, probe: Probe, device: torch.device) -> Slice:
    stage = probe.stage_of[probe.layers[0].id]
    return Slice(model, probe.captured, probe.stage_of, stage, join=False, device=device, guarded=False)


def _finish(probe: Probe, run: SliceRun) -> torch.Tensor | list[torch.Tensor]:
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

    def __init__(self, clock: Clock, name: str = "timed") -> None:
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
def _as_surveyed(model: nn.Module, probe: Probe) -> Iterator[None]:
    """The model and chance are as when the probe's inputs were made."""
    set_random_states(probe.chance.states)
    probe.give_back()
    with fate(model, probe.chance.fate):
        yield


def _time_once(part: Slice, probe: Probe, clock: Clock) -> None:
    names = [range_name(way, probe.name, len(probe.forward_s)) for way in DIRECTIONS]
    forward, backward = (_StopWatch(clock, name) for name in names)
    with _as_surveyed(part.model, probe):
        run = part.run(*_given(probe.part), probe.received, meter=forward)
    with forward if probe.loss is not None else contextlib.nullcontext():  # the loss is the last layer's
        roots = _finish(probe, run)
    gradients = [] if isinstance(roots, torch.Tensor) else [torch.ones_like(tensor) for tensor in roots]
    with backward:
        _backward(roots, gradients)
    probe.forward_s.append(forward.seconds())
    probe.backward_s.append(backward.seconds())


def _count_saved(model: nn.Module, probe: Probe, device: torch.device) -> None:
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
        with _as_surveyed(model, probe), torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            run = part.run(*_given(probe.part), probe.received, meter=names)
            roots = _finish(probe, run)
        saved = {
            storage_of(one.tensor): _storage_bytes(one.tensor) for one in kept
        }  # what no graph needs is gone by now
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):  # functorch's transforms allow none
            raise
        with _as_surveyed(model, probe), _Results() as results:
            run = part.run(*_given(probe.part), probe.received, meter=names)
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


def _given(part: MicroBatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model is called with, which it may extend: the next call finds the micro-batch as it was."""
    given: tuple[tuple[Any, ...], dict[str, Any]] = in_own_containers((part.args, part.kwargs))
    return given


def slicing_seconds(model: nn.Module, captured: Capture, part: MicroBatch, device: torch.device) -> float:
    """What slicing adds to a forward: two stages cut near the middle, the mean of what is not their layers' own."""
    ids = [layer.id for layer in captured.layers]
    allowed = [k for k in range(1, len(ids)) if ids[k] not in captured.no_cut]
    if not allowed:
        return 0.0
    cut = min(allowed, key=lambda k: abs(2 * k - len(ids)))
    parts = [Slice(model, captured, {name: int(k >= cut) for k, name in enumerate(ids)}, stage) for stage in (0, 1)]
    clock = Clock(device)
    times = []
    states = [ModelState(model)] * 2
    for repeat in range(6):
        spent = 0.0
        received: dict[int, Payload] = {}
        chance = random_states()
        for stage, one in enumerate(parts):
            states[stage].restore()  # each stage knows only what itself left behind
            set_random_states(chance)
            watch, given = _StopWatch(clock), _given(part)
            start = time.perf_counter()
            run = one.run(*given, received, meter=watch)
            spent += time.perf_counter() - start
            spent -= watch.seconds() if not clock.cuda else 0.0
            received = {0: run.sends[1]} if run.sends else {}
            if not repeat:
                states[stage] = ModelState(model)  # and is timed as one later forward, each time the same
        if repeat and not clock.cuda:
            times.append(spent / 2)
    return statistics.median(times) if times else 0.0


def whole_steps(
    model: nn.Module, parts: dict[int, MicroBatch], sizes: Sequence[int], loss: Loss, device: torch.device
) -> tuple[float, ...]:
    """Forward and backward of the unsliced model at each size: one to warm up, the median of three."""
    clock = Clock(device)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    before, undo = ModelState(model), list[Callable[[], None]]()
    for repeat in range(4):
        for size in sizes:
            part = parts[size]
            for one in undo:
                one()
            args, kwargs = _given(part)
            start = clock.now()
            _backward(loss.of(model(*args, **kwargs), part.target), [])
            seconds = clock.between(start, clock.now())
            undo = undo or before.undo_values(())
            if repeat:
                times[size].append(seconds)
    return tuple(statistics.median(times[size]) for size in sizes)


def optimizer_seconds(model: nn.Module, optimizer: str, device: torch.device) -> float:
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
    clock = Clock(device)
    times = []
    for repeat in range(5):
        start = clock.now()
        made.step()
        seconds = clock.between(start, clock.now())
        if repeat > 1:
            times.append(seconds)
    return statistics.median(times) * total / sum(parameter.numel() for parameter in sample)
