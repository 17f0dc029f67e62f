"""One training step under a layout: kernels priced a stage, pipelined, reduced over replicas, optimised. No torch.

    micro-batch on a stage   max(kernels, host) + all-reduces of tensor parallelism + gathers of sharded parameters
    pipeline                 m micro-batches at the slowest stage + fill and drain
                             1f1b, gpipe: sum - slowest;  interleaved: (sum - slowest) / v;  zero-bubble: less 2 or 3 W
    replicas                 all-reduce of gradients, less what hides behind the last backward
    optimizer                bytes of its state at the memory's rate

    layout = Layout(tp=8, pp=4, dp=2, microbatch=1, num_microbatches=64, recompute="always")
    step = training_step(work, "H100", layout, precision="bf16-mixed")
    step.step_s, step.compute_s, step.tp_s, step.bubble_s, step.dp_s, step.optimizer_s, step.band

`work` is a ModelWork (kernels.record_work or estimator.estimate_work); a step costs about a millisecond once its
layers have been priced, so a search may call it thousands of times.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from partitioner.calibration import Calibration, Place
from partitioner.errors import ArgumentError
from partitioner.rates import PRECISIONS, Attention, Casts, Constants, Network, Precision, Rates
from partitioner.specs import EXCHANGES, SCHEDULES, Cluster, Link, Recompute, ScheduleName, Shard, known_device
from partitioner.work import Kernel, LayerWork, ModelWork

LATER = {"zero-bubble": 2, "zero-bubble-h2": 3, "zero-bubble-v": 3}
"""How many W of a micro-batch fill each place of the bubble (Qi et al. 2023, https://arxiv.org/abs/2401.10241).

Without a barrier and with room for 2 p micro-batches only the first rank's wait for its last B is left, which it fills
with the W of all micro-batches but one: (p - 1) (F + I) - (m - 1) W, the closed form of that paper's ZB-2p.
"""


@dataclass(frozen=True)
class Layout:
    """How a step is spread: ranks are numbered tp first, then dp, then pp (neighbours in tp share a node)."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    microbatch: float = 1
    """Samples of a micro-batch."""
    num_microbatches: int = 1
    """Of one replica in one step."""
    schedule: ScheduleName = "1f1b"
    stages_per_rank: int = 1
    """More than 1 only with the interleaved schedule."""
    recompute: Recompute = "never"
    """always: each layer's forward again in its backward; selective: attention's and elementwise parts only."""
    recompute_share: float = 1.0
    """Share of the layers that are recomputed."""
    shard: Shard = "none"
    sequence_parallel: bool = False
    """What tensor parallelism leaves whole is divided along the sequence (https://arxiv.org/abs/2205.05198)."""
    cuts: tuple[int, ...] | None = None
    """First layer of each stage but the first; None: as equal in time as whole layers allow."""
    overlap: bool = True
    """Gradients are reduced while the last micro-batch's backward runs, sharded parameters gathered ahead."""
    tp_overlap: bool = False
    """Messages of tensor parallelism travel in pieces, beside pieces of the matmuls that make or read them."""
    send_overlap: bool = False
    """Activations travel between stages while the next micro-batch runs."""
    fused: bool = False
    """Elementwise chains run as one kernel (torch.compile, or hand-written kernels)."""
    attention: Attention = "flash2"
    """Which fused attention runs where the model has one; torch's own is the second generation's."""
    casts: Casts = "apart"
    """Where operands of fp8 matmuls are narrowed."""
    gradient_bytes: float | None = None
    """Width of a gradient element as it is reduced; None: 4 in fp32 and tf32, else 2."""
    accumulated_bytes: float | None = None
    """Moved an element to add a micro-batch's gradients to the sum; None: the sum read and written, and the new
    gradient read, unless `fused` (the matmul itself adds)."""
    barrier: bool = True
    """Ranks wait for each other at the end of a step. Only "zero-bubble-h2" gains by going on."""
    blocking: bool = False
    """The host waits for each kernel before it launches the next one (CUDA_LAUNCH_BLOCKING=1), and so meets the other
    hosts of its tensor-parallel group at every collective."""
    per_node: int | None = None
    """Devices of a node; None: the cluster's, or 8."""

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_per_rank

    def check(self, num_layers: int) -> None:
        """An ArgumentError with the numbers, where the layout is impossible."""
        for name in ("tp", "pp", "dp", "num_microbatches", "stages_per_rank"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name}={getattr(self, name)} is impossible: it is 1 or more")
        for name, known in (("schedule", SCHEDULES), ("recompute", get_args(Recompute)), ("shard", get_args(Shard))):
            if getattr(self, name) not in known:
                raise ArgumentError(f"{name} {getattr(self, name)!r} is not known: use {', '.join(known)}")
        if self.microbatch <= 0:
            raise ArgumentError(f"a micro-batch of {self.microbatch} samples is impossible: give one or more")
        if self.num_stages > num_layers:
            raise ArgumentError(
                f"{num_layers} layers cannot fill {self.num_stages} stages: use fewer pp or stages a rank"
            )
        if self.cuts is not None and len(self.cuts) != self.num_stages - 1:
            raise ArgumentError(f"{len(self.cuts)} cuts make {len(self.cuts) + 1} stages, not {self.num_stages}")
        if self.stages_per_rank > 1 and self.schedule not in ("interleaved", "zero-bubble-v"):
            raise ArgumentError(
                f"{self.stages_per_rank} stages a rank need schedule='interleaved', not {self.schedule!r}"
            )


@dataclass(frozen=True)
class StageTime:
    """One micro-batch on one stage, seconds."""

    layers: tuple[int, int]
    """First layer, and the one after the last."""
    forward_s: float
    backward_s: float
    """Without recomputation."""
    recompute_s: float
    tp_s: float
    """All-reduces of tensor parallelism, forward, backward and recomputation."""
    gather_s: float
    """What gathering sharded parameters and scattering their gradients adds."""
    send_s: float
    """Sending activations and gradients on, both ways."""
    weight_s: float
    """The part of `backward_s` that makes gradients of parameters."""

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.recompute_s + self.tp_s + self.gather_s + self.send_s


@dataclass(frozen=True)
class StepBreakdown:
    """One step, seconds; the parts add up to `step_s`."""

    step_s: float
    compute_s: float
    """Forward and backward of the slowest stage, all its micro-batches."""
    recompute_s: float
    tp_s: float
    gather_s: float
    send_s: float
    bubble_s: float
    dp_s: float
    """Reducing gradients, as far as it is not hidden."""
    optimizer_s: float
    base_s: float
    stages: tuple[StageTime, ...]
    flops: float
    """Of forward and backward without recomputation, whole step, all devices."""
    band: float
    """The step is within step_s x (1 ± band) on two of three published runs."""
    factor: float = 1.0
    """By which runs that were measured have moved all of these seconds."""
    provenance: Literal["estimated"] = "estimated"


@dataclass
class Planner:
    """Prices layouts of one model on one kind of device; keeps the layers it has priced."""

    work: ModelWork
    rates: Rates
    intra: Link
    inter: Link
    per_node: int = 8
    precision: Precision = "fp32"
    length: float = 1
    """Of a sample: what tells runs of `calibration` apart that had another."""
    calibration: Calibration = field(default_factory=lambda: Calibration([]))
    """Runs that were measured: they move all seconds of a step, and narrow its band."""
    _priced: dict[tuple[object, ...], LayerSeconds] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ArgumentError(f"precision {self.precision!r} is not known: use {', '.join(PRECISIONS)}")
        self.network = Network(self.intra, self.inter, self.rates.constants)

    def layer(self, work: LayerWork, layout: Layout) -> LayerSeconds:
        key = (
            id(work),
            layout.tp,
            layout.sequence_parallel,
            layout.fused,
            layout.attention,
            layout.casts,
            layout.blocking,
        )
        if key not in self._priced:
            self._priced[key] = self._price(work, layout)
        return self._priced[key]

    def _price(self, work: LayerWork, layout: Layout) -> LayerSeconds:
        def seconds_of(kernels: Iterable[Kernel]) -> float:
            return sum(
                self.rates.kernel_seconds(
                    kernel,
                    self.precision,
                    tp=layout.tp,
                    sequence_parallel=layout.sequence_parallel,
                    fused=layout.fused,
                    attention=layout.attention,
                    casts=layout.casts,
                )
                for kernel in kernels
            )

        def sums(backward: bool, weight: bool = False, again: bool = False) -> tuple[float, float]:
            kernels = work.backward if backward else work.forward
            if weight:
                kernels = tuple(kernel for kernel in kernels if kernel.weight)
            if again:
                kernels = tuple(k for k in kernels if k.kind != "convolution" and not k.linear)
            seconds = seconds_of(kernels)
            launches = sum(kernel.fused_launches if layout.fused else 1 for kernel in kernels)
            return seconds, self.rates.host_seconds(launches, backward)

        def with_collectives(pair: tuple[float, float], count: int) -> tuple[float, float]:
            """A host that waits for each kernel meets the slowest rank's at every collective: none runs ahead."""
            c = self.rates.constants
            each_s = c.host_collective_s * math.log2(layout.tp)
            if layout.blocking and count:
                each_s += c.waiting_s(layout.tp, sum(pair) / count)
            return pair[0], pair[1] + count * each_s

        narrow = self._narrow(work)
        reduce = [
            sum(self.network.all_reduce_s(size * narrow, layout.tp, self.per_node) for size in sizes)
            for sizes in (work.forward_reduces, work.backward_reduces)
        ]
        flops = sum(kernel.flops for kernel in (*work.forward, *work.backward))
        forward = with_collectives(sums(False), len(work.forward_reduces))
        backward = with_collectives(sums(True), len(work.backward_reduces))
        again = sums(False, again=True)
        convolution_s = seconds_of(k for k in (*work.forward, *work.backward) if k.kind == "convolution")
        weight_s = sums(True, weight=True)[0]
        return LayerSeconds(forward, backward, weight_s, again, reduce[0], reduce[1], flops, convolution_s)

    def _narrow(self, work: LayerWork) -> float:
        """Width of an activation on the wire, of its recorded width."""
        wide = self.precision in ("fp32", "tf32")
        share = work.output_float32_bytes / work.output_bytes if work.output_bytes else 1.0
        return 1.0 if wide else 1 - share / 2

    def step(self, layout: Layout, *, optimizer_moved_bytes: float | None = None) -> StepBreakdown:
        """Seconds of one step. `optimizer_moved_bytes`: read and written a parameter element by the optimizer; None:
        Adam's.
        """
        layout.check(len(self.work.layer_ids))
        layers = self.work.at(layout.microbatch)
        priced = [self.layer(work, layout) for work in layers]
        bounds = self._bounds(layout, priced)
        stages = [self._stage(layers, priced, *span, layout) for span in bounds]
        m, p, v = layout.num_microbatches, layout.pp, layout.stages_per_rank
        ranks = [stages[r::p] for r in range(p)]
        totals = [sum(stage.total_s for stage in own) for own in ranks]
        slowest = max(range(p), key=totals.__getitem__)
        bubble = (sum(totals) - totals[slowest]) / v
        if layout.schedule in LATER:
            mean_s = sum(stage.weight_s for own in ranks for stage in own) / p
            filled = min(LATER[layout.schedule] * (p - 1), m)
            if layout.schedule == "zero-bubble-h2" and not layout.barrier:
                filled = p + m - 2
            bubble = max(0.0, bubble - filled * mean_s / v)
        own = ranks[slowest]

        def part(name: str) -> float:
            return m * sum(float(getattr(stage, name)) for stage in own)

        parameters = [self._rank_parameters(layers, bounds[r::p], layout) for r in range(p)]
        dp_s = max(self._reduce(count, own_stages, layout) for count, own_stages in zip(parameters, ranks, strict=True))
        if layout.dp > 1 and max(parameters) > 0:
            dp_s += self.rates.constants.waiting_s(layout.dp, m * totals[slowest]) + self.rates.constants.replica_base_s
        optimizer_s = self.optimizer_seconds(max(parameters), layout, optimizer_moved_bytes)
        c = self.rates.constants
        compute_s, recompute_s = part("forward_s") + part("backward_s"), part("recompute_s")
        tp_s, gather_s, send_s = part("tp_s"), part("gather_s"), part("send_s")
        whole = compute_s + recompute_s + tp_s + gather_s + send_s + bubble + dp_s + optimizer_s + c.step_base_s
        factor, band_share = self.calibration.at(place_of(layout, self.length))
        return StepBreakdown(
            step_s=whole * factor,
            compute_s=compute_s * factor,
            recompute_s=recompute_s * factor,
            tp_s=tp_s * factor,
            gather_s=gather_s * factor,
            send_s=send_s * factor,
            bubble_s=bubble * factor,
            dp_s=dp_s * factor,
            optimizer_s=optimizer_s * factor,
            base_s=c.step_base_s * factor,
            stages=tuple(stages),
            flops=sum(one.flops for one in priced) * m * layout.dp,
            band=self.band_of(priced) * band_share,
            factor=factor,
        )

    def band(self, layout: Layout) -> float:
        """Error band of a step with nothing measured."""
        return self.band_of([self.layer(work, layout) for work in self.work.at(layout.microbatch)])

    def band_of(self, priced: Sequence[LayerSeconds]) -> float:
        """Error band of these layers: wider by the share of convolutions, which are told less well."""
        c, device_s = self.rates.constants, sum(one.forward[0] + one.backward[0] for one in priced)
        share = sum(one.convolution_s for one in priced) / device_s if device_s else 0.0
        return c.error_band + share * max(0.0, c.convolution_band - c.error_band)

    def _bounds(self, layout: Layout, priced: Sequence[LayerSeconds]) -> list[tuple[int, int]]:
        count = len(priced)
        cuts = layout.cuts if layout.cuts is not None else balanced([one.total_s for one in priced], layout.num_stages)
        return list(zip((0, *cuts), (*cuts, count), strict=True))

    def _stage(
        self, layers: Sequence[LayerWork], priced: Sequence[LayerSeconds], start: int, stop: int, layout: Layout
    ) -> StageTime:
        own = priced[start:stop]
        forward_reduce, backward_reduce = (
            sum(one.forward_reduce_s for one in own),
            sum(one.backward_reduce_s for one in own),
        )
        if layout.tp_overlap:
            shown = 1 - self.rates.constants.overlap_pieces
            forward_reduce, backward_reduce = shown * forward_reduce, shown * backward_reduce
        together = _sum if layout.blocking else _longer
        forward = together(own, "forward", forward_reduce - self.rates.constants.host_microbatch_s)
        backward = together(own, "backward", backward_reduce)
        again = 0.0
        tp_s = forward_reduce + backward_reduce
        if layout.recompute == "always":
            again = forward
            tp_s += forward_reduce * layout.recompute_share
        elif layout.recompute == "selective":
            again = together(own, "again", 0.0)
        again *= layout.recompute_share
        send = 0.0
        if layout.num_stages > 1 and not layout.send_overlap:
            same = layout.tp * layout.dp * 2 <= self.per_node
            for place in (start, stop):
                if 0 < place < len(layers):
                    before = layers[place - 1]
                    size = before.output_bytes * self._narrow(before) / layout.tp
                    send += self.network.send_s(size, same)
        gather = self._gather(layers[start:stop], forward + backward + again, layout)
        weight = sum(one.weight_s for one in own)
        if layout.num_microbatches > 1 and layout.shard != "zero3":
            backward += self._accumulate(layers[start:stop], layout)
        return StageTime((start, stop), forward, backward, again, tp_s, gather, send, weight)

    def _accumulate(self, layers: Sequence[LayerWork], layout: Layout) -> float:
        """Adding a micro-batch's gradients to the sum: the sum read and written, the new ones read."""
        width = self._gradient_bytes(layout)
        elements = sum(rank_parameters(work, layout.tp) for work in layers)
        moved = 2 * width + (0.0 if layout.fused else self._weight_bytes())
        if layout.accumulated_bytes is not None:
            moved = layout.accumulated_bytes
        return elements * moved / self.rates.moved_per_s

    def _weight_bytes(self) -> float:
        return 4.0 if self.precision in ("fp32", "tf32") else 2.0

    def _gradient_bytes(self, layout: Layout) -> float:
        return layout.gradient_bytes or self._weight_bytes()

    def _group(self, layout: Layout) -> int:
        """Ranks of a replica group that sit in one node."""
        return max(1, min(layout.dp, self.per_node // layout.tp))

    def _gather(self, layers: Sequence[LayerWork], compute_s: float, layout: Layout) -> float:
        """Each micro-batch: weights gathered (zero3), gradients scattered (zero2 and zero3)."""
        exchange = EXCHANGES.get(layout.shard)
        if exchange is None or layout.dp == 1:
            return 0.0

        def around(times: int, width: float) -> float:
            sizes = [rank_parameters(work, layout.tp) * width for work in layers if times and work.parameters]
            return sum(times * self.network.all_gather_s(size, layout.dp, self._group(layout)) for size in sizes)

        seconds = around(exchange.microbatch_gathers, self._weight_bytes())
        seconds += around(exchange.microbatch_scatters, self._gradient_bytes(layout))
        return self.network.shown_s(seconds, self.rates.constants.overlap, compute_s) if layout.overlap else seconds

    def _rank_parameters(self, layers: Sequence[LayerWork], spans: Sequence[tuple[int, int]], layout: Layout) -> float:
        return sum(rank_parameters(work, layout.tp) for start, stop in spans for work in layers[start:stop])

    def _reduce(self, parameters: float, stages: Sequence[StageTime], layout: Layout) -> float:
        """Once a step: gradients summed, or a part of them to each rank and the weights gathered."""
        if layout.dp == 1:
            return 0.0
        group, exchange = self._group(layout), EXCHANGES.get(layout.shard)
        gradients = parameters * self._gradient_bytes(layout)
        if exchange is None:
            seconds = self.network.all_reduce_s(gradients, layout.dp, group)
        else:
            weights = parameters * self._weight_bytes()
            seconds = exchange.step_scatters * self.network.all_gather_s(gradients, layout.dp, group)
            seconds += exchange.step_gathers * self.network.all_gather_s(weights, layout.dp, group)
        if not layout.overlap:
            return seconds
        backward_s = sum(stage.backward_s for stage in stages)
        return self.network.shown_s(seconds, self.rates.constants.overlap_gradients, backward_s)

    def optimizer_seconds(self, parameters: float, layout: Layout, moved_bytes: float | None = None) -> float:
        """One optimizer step over `parameters` elements; `moved_bytes` of each, None: Adam's."""
        if layout.shard != "none":
            parameters /= layout.dp
        least = 28.0 if self.precision in ("fp32", "tf32", "bf16", "fp16") else 30.0
        moved = least if moved_bytes is None else moved_bytes
        return parameters * moved * self.rates.constants.optimizer / self.rates.moved_per_s


@dataclass(frozen=True)
class LayerSeconds:
    """A layer's kernels and the host's share, each (device, host) seconds of one micro-batch."""

    forward: tuple[float, float]
    backward: tuple[float, float]
    weight_s: float
    again: tuple[float, float]
    """What selective recomputation repeats."""
    forward_reduce_s: float
    backward_reduce_s: float
    flops: float
    convolution_s: float = 0.0
    """Of the device's seconds, those of convolutions."""

    @property
    def total_s(self) -> float:
        forward = max(self.forward[0] + self.forward_reduce_s, self.forward[1])
        return forward + max(self.backward[0] + self.backward_reduce_s, self.backward[1])


def place_of(layout: Layout, length: float = 1) -> Place:
    """Where a layout stands among others of one model, for calibration."""
    exchange = EXCHANGES.get(layout.shard)
    return Place(
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        microbatch=layout.microbatch,
        num_microbatches=layout.num_microbatches,
        length=length,
        recompute=2.0 if layout.recompute == "always" else 1.0,
        gathers=2.0 if exchange is not None and exchange.microbatch_gathers else 1.0,
    )


def training_step(
    work: ModelWork,
    cluster: Cluster | str,
    layout: Layout,
    *,
    precision: Precision = "fp32",
    hardware: str | None = None,
    fitted: Constants | None = None,
) -> StepBreakdown:
    """One step of `work` under `layout` on a cluster, or on as many devices of that name as the layout needs.

    For many layouts of one model make one `planner` and call its `step`.
    """
    return planner(work, cluster, precision=precision, hardware=hardware, fitted=fitted).step(layout)


def planner(
    work: ModelWork,
    cluster: Cluster | str,
    *,
    precision: Precision = "fp32",
    per_node: int | None = None,
    hardware: str | None = None,
    fitted: Constants | None = None,
) -> Planner:
    """A Planner for a cluster of equal devices, or for a device by its name with the catalog's links."""
    if isinstance(cluster, str):
        device, intra, inter = known_device(cluster, hardware)
        per_node = per_node or 8
    else:
        device, intra, inter = cluster.devices[0], cluster.intra, cluster.inter
        per_node = per_node or max(cluster.nodes.count(node) for node in set(cluster.nodes))
    rates = Rates.of(device.name, hardware=hardware, fitted=fitted)
    return Planner(work, rates, intra, inter, per_node, precision)


def data_parallel_speedup(
    single_s: float,
    gradient_bytes: float,
    ranks: int,
    per_node: int,
    network: Network,
    moved_per_s: float,
    *,
    prepared: bool = False,
    backward_share: float = 2 / 3,
) -> float:
    """How much faster `ranks` replicas are than one, each with its own share of samples as large as the one's.

    `single_s`: a step of one replica that had the host to itself, measured. Gradients are reduced while the backward
    runs, which is `backward_share` of the step, and are copied into buckets and back by a device that moves so many
    bytes a second (`Rates.moved_per_s`). `prepared`: the host's processors prepare the inputs of its replicas (decode,
    resample, augment) while these train.
    """
    if ranks == 1:
        return 1.0
    c = network.constants
    reduce_s = network.all_reduce_s(gradient_bytes, ranks, min(ranks, per_node))
    shown_s = network.shown_s(reduce_s, c.overlap_gradients, backward_share * single_s)
    shared_s = c.shared_host * math.log2(min(ranks, per_node)) * single_s if prepared else 0.0
    copies_s = c.gradient_copies * gradient_bytes / moved_per_s
    together_s = single_s + c.waiting_s(ranks, single_s) + shared_s + shown_s + copies_s + c.replica_base_s
    return ranks * single_s / together_s


def rank_parameters(work: LayerWork, tp: int) -> float:
    """Parameter elements of a layer on one of `tp` ranks."""
    return work.parameters - work.sharded_parameters * (1 - 1 / tp)


def balanced(seconds: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Cuts into `num_stages` contiguous parts whose largest sum is the least.

    >>> balanced([1, 1, 1, 3], 2)
    (3,)
    """
    low, high = max(seconds), sum(seconds)
    for _ in range(60):
        limit = (low + high) / 2
        if _parts(seconds, limit, num_stages) is None:
            low = limit
        else:
            high = limit
    cuts = _parts(seconds, high, num_stages)
    return cuts if cuts is not None else tuple(range(1, num_stages))


def _parts(seconds: Sequence[float], limit: float, num_stages: int) -> tuple[int, ...] | None:
    """Greedy: each stage as long as the limit allows, but leaving a layer for each later stage."""
    cuts: list[int] = []
    total = 0.0
    for k, one in enumerate(seconds):
        left = len(seconds) - k
        full = total + one > limit * (1 + 1e-12)
        if k and (full or left <= num_stages - 1 - len(cuts)):
            if len(cuts) == num_stages - 1:
                return None
            cuts.append(k)
            total = 0.0
        total += one
        if total > limit * (1 + 1e-9):
            return None
    return tuple(cuts)


def _longer(layers: Sequence[LayerSeconds], part: str, reduce_s: float) -> float:
    """Device or host, whichever takes longer over all layers, less the reductions, which are counted apart.

    Kernels queue up while the host is ahead; where it is behind, the device waits.
    """
    device = sum(getattr(layer, part)[0] for layer in layers)
    host = sum(getattr(layer, part)[1] for layer in layers)
    return float(max(device, host - reduce_s))


def _sum(layers: Sequence[LayerSeconds], part: str, reduce_s: float) -> float:
    """Device and host one after the other."""
    return float(sum(sum(getattr(layer, part)) for layer in layers)) + max(0.0, -reduce_s)


def replaced(layout: Layout, **changes: object) -> Layout:
    """The same layout with some values changed."""
    return dataclasses.replace(layout, **changes)  # type: ignore[arg-type]
