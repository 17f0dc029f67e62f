"""Seconds of a kernel or a collective on a device of the catalog: the larger of arithmetic and memory, plus the launch.

    matmul       waves(m, n) x tile work(k) / (achieved rate / processors)          tiles in whole waves, k with a ramp
    attention    FLOPs / (peak x efficiency)
    convolution  as a matmul's share of the peak, and its tensors moved between layouts
    elementwise  bytes / (bandwidth x efficiency) with a ramp over size
    all-reduce   latency(n) + 2 (n - 1)/n x bytes / (link x efficiency)             ring (Patarasuk & Yuan 2009)

Constants are efficiencies of the catalog's peaks, the same for all devices and models, fitted once over published
measurements (estimator.toml says from which, and how well they fit). The device's own figures are in hardware.toml.
"""

from __future__ import annotations

import functools
import math
import tomllib
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal

from partitioner.errors import ArgumentError
from partitioner.specs import Link, catalog_entry
from partitioner.work import Kernel

Attention = Literal["flash1", "flash2", "flash3"]
"""Dao 2022, Dao 2023; Shah 2024 or cuDNN, written for Hopper and later."""

Casts = Literal["apart", "fused", "rows"]
"""Operands of fp8 matmuls are narrowed in kernels of their own, in the kernels that make them (Transformer Engine), or
in kernels of their own that scale each row (torchao's "rowwise")."""

Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16-mixed", "fp16-mixed", "fp8", "fp4"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16", "bf16-mixed", "fp16-mixed", "fp8", "fp4")

A100_PER_WATT = 312e12 / 400
"""FLOP/s a watt of the device that the constants refer to."""

TILES = ((256, 128), (128, 128), (128, 64), (64, 64))
"""Tiles of the result that a matmul is cut into; the fastest one is taken, as the libraries do."""


@dataclass(frozen=True)
class Constants:
    """Figures of estimator.toml; `error_band`: spread of measured / predicted over the rows of the fit."""

    matmul_fp32: float
    """Share of the fp32 peak that a large matmul reaches."""
    matmul_fp32_matrix: float
    """The same where fp32 runs on matrix units."""
    misaligned: float
    """Rate of a matmul on tensor cores whose rows are no multiple of 16 bytes."""
    misaligned_batched: float
    """The same of a batched matmul, which falls off the tensor cores."""
    ragged: float
    """The same where they are, but no multiple of 128 bytes."""
    fp8_cast: float
    """Bytes moved an operand's element to scale and narrow it for an fp8 matmul, in kernels of its own."""
    fp8_cast_fused: float
    """The same in the kernels that make the operand."""
    fp8_rows: float
    """Rate of an fp8 matmul whose operands have a scale a row, of one with a scale for each operand.

    Llama 3 8B on eight H100: 6,424 and 7,186 tokens a second
    (https://github.com/pytorch/torchtitan/commit/7a04053a742af65bc76826bbcc57b7bede7be62c)."""
    matmul_tensor: float
    """Share of the tensor cores' measured best (or of 0.8 of their peak) that a large matmul reaches."""
    power: float
    """Exponent by which that share falls with the 16-bit peak a watt, of an A100's: clocks drop under load."""
    tile_128x128: float
    tile_128x64: float
    tile_64x64: float
    """Rate of the smaller tiles, of the largest one's."""
    depth_ramp: float
    """A tile costs as if k were this much longer: filling and emptying its pipeline."""
    batched: float
    """Rate of a batched matmul (attention without a fused kernel), of a plain one's."""
    attention_forward: float
    attention_backward: float
    """Share of the tensor peak of fused attention."""
    flash1: float
    """Rate of the first generation of fused attention, of the second's."""
    convolution: float
    """Rate of a convolution on tensor cores, of a large matmul's."""
    convolution_fp32: float
    """The same on plain fp32 units, where libraries save multiplications (Winograd)."""
    convolution_moved: float
    """Times a convolution's tensors are moved beside its own pass over them: brought into the layout of its kernels and
    back, and read by each of the two kernels of a backward."""
    bandwidth: float
    """Share of the memory bandwidth that a large kernel reaches."""
    bandwidth_ramp_s: float
    """What a kernel that moves data takes beside bytes / bandwidth."""
    softmax: float
    norm: float
    """Rate of kernels that reduce rows, of an elementwise kernel's."""
    launch_s: float
    """Least time of a kernel on the device."""
    host_forward_s: float
    host_backward_s: float
    """What the host needs to launch one operator; the device waits where its kernels are shorter."""
    host_collective_s: float
    """The same for a collective, times log2(ranks): the call, its streams, and the wait for the last host's call."""
    host_microbatch_s: float
    """The same for a micro-batch: fetching it, the schedule, the loss brought together."""
    collective: float
    """Share of the link's large-message rate that a collective over many ranks reaches."""
    collective_through_host: float
    """The same where messages go through the host's memory, which a collective writes and reads at once."""
    collective_base_s: float
    collective_rank_s: float
    """Latency of a collective: base + rank x (n - 1)."""
    network: float
    """Share of the network's rate that a collective between nodes reaches."""
    network_spread: float
    """Exponent by which that share falls with the number of nodes, of two: rings over many meet in the switches."""
    network_base_s: float
    overlap: float
    """Share of a gather that disappears behind arithmetic where the framework overlaps the two."""
    overlap_gradients: float
    """The same of a reduction of gradients, behind the backward that makes them."""
    overlap_pieces: float
    """The same of a message within a layer, where it and the matmuls around it are cut into pieces."""
    straggler: float
    """Seconds of waiting for the slower of two replicas whose step is one second."""
    shared_host: float
    """Slowing of k replicas whose inputs the processors of one host prepare, of their step, times log2(k)."""
    gradient_copies: float
    """Times a gradient's bytes are moved to bring it into a bucket, divide it by the replicas and bring it back."""
    replica_base_s: float
    """What a step of more than one replica takes beside that: hooks, buckets, a barrier."""
    optimizer: float
    """Times the optimizer's bytes are moved, of the fewest possible."""
    step_base_s: float
    """What a step takes beside its kernels: data, logging, synchronisation."""
    error_band: float = 0.0
    """Two of three published runs of large models lie within it."""
    convolution_band: float = 0.0
    """The same of steps of which convolutions take most."""

    def waiting_s(self, replicas: int, step_s: float) -> float:
        """For the slowest replica. Delays of a step's pieces are independent, so that they add up as their root."""
        return self.straggler * math.log2(replicas) * math.sqrt(step_s)


@functools.cache
def constants() -> Constants:
    """The fitted constants."""
    table = tomllib.loads(files("partitioner").joinpath("estimator.toml").read_text(encoding="utf-8"))
    bands = {name: table["fit"][name] for name in ("error_band", "convolution_band")}
    return Constants(**table["constants"], **bands)


@dataclass(frozen=True)
class Rates:
    """A device's peaks, and what kernels achieve of them."""

    name: str
    peaks: tuple[tuple[str, float], ...]
    """Precision -> FLOP/s of dense matmuls."""
    best_matmul: float
    """Share of the 16-bit peak that the best matmul reached where somebody measured it."""
    best_fp32: float
    """Share of the fp32 peak that large matmuls reached where somebody measured it; 0 where nobody did."""
    best_bandwidth: float
    """Of the memory bandwidth, likewise."""
    matrix_fp32: bool
    older_kernels: float
    """Share of the tensor peak for attention kernels of the generation before."""
    peak_per_watt: float
    """16-bit FLOP/s a watt."""
    bandwidth: float
    processors: int
    constants: Constants

    @classmethod
    def of(cls, device: str, *, hardware: str | None = None, fitted: Constants | None = None) -> Rates:
        """Rates of a device by its name in hardware.toml or in the user's own file (`hardware`).

        A device that is not listed, or is listed without rates, is an ArgumentError.
        """
        name, entry = catalog_entry(device, hardware)
        if "bandwidth" not in entry:
            raise ArgumentError(f"{name} has no rates in the catalog: add peak, bandwidth and processors to its entry")
        peaks = {key: float(one["value"]) for key, one in entry["peak"].items()}
        best = entry.get("best_matmul")
        wide = peaks.get("bf16", peaks.get("fp16", peaks["fp32"]))
        share = float(best["value"]) / wide if best else 0.8
        return cls(
            name=name,
            peaks=tuple(peaks.items()),
            best_matmul=share,
            best_fp32=_share(entry, "best_fp32", peaks["fp32"]),
            best_bandwidth=_share(entry, "best_bandwidth", float(entry["bandwidth"]["value"])),
            matrix_fp32=bool(entry.get("matrix_fp32", False)),
            older_kernels=float(entry.get("older_kernels", {"value": 1.0})["value"]),
            peak_per_watt=wide / float(entry["power_w"]["value"]) if "power_w" in entry else A100_PER_WATT,
            bandwidth=float(entry["bandwidth"]["value"]),
            processors=int(entry["processors"]["value"]),
            constants=fitted or constants(),
        )

    @property
    def moved_per_s(self) -> float:
        """Bytes a second of a large elementwise kernel."""
        return self.bandwidth * (self.best_bandwidth or self.constants.bandwidth)

    def with_constants(self, fitted: Constants) -> Rates:
        return replace(self, constants=fitted)

    def peak(self, precision: str) -> float:
        """FLOP/s of dense matmuls; a precision that the device lacks runs at the next wider one's rate."""
        peaks = dict(self.peaks)
        order = {
            "fp4": ("fp4", "fp8", "bf16", "fp16"),
            "fp8": ("fp8", "bf16", "fp16"),
            "bf16": ("bf16", "fp16"),
            "fp16": ("fp16",),
            "tf32": ("tf32",),
        }
        for name in (*order.get(precision, ()), "fp32"):
            if name in peaks:
                return peaks[name]
        raise ArgumentError(f"{self.name} has no fp32 rate in the catalog")

    # -- kernels

    def kernel_seconds(
        self, kernel: Kernel, precision: Precision = "fp32", *, tp: int = 1, sequence_parallel: bool = False,
        fused: bool = False, attention: Attention = "flash2", casts: Casts = "apart",
    ) -> float:  # fmt: skip
        """Seconds of one kernel on one of `tp` ranks.

        `fused`: elementwise chains run as one kernel, as a compiler or hand-written kernels make them.
        `attention`: which generation of fused attention runs. `casts`: where operands of fp8
        matmuls are narrowed.
        """
        c = self.constants
        narrow = 0.5 if precision not in ("fp32", "tf32") else 1.0
        width = 1 - kernel.float32_share * (1 - narrow)
        if kernel.kind in ("matmul", "attention"):
            return self._arithmetic(kernel, precision, tp, width, attention, casts)
        share = 1 / tp if kernel.sharded or sequence_parallel else 1.0
        if fused and not kernel.fused_launches:
            return 0.0
        moved = (kernel.fused_bytes if fused else kernel.moved_bytes) * width * share
        rate = self.moved_per_s
        if kernel.kind == "softmax":
            rate *= c.softmax
        elif kernel.kind == "norm":
            rate *= c.norm
        seconds = moved / rate + c.bandwidth_ramp_s
        if kernel.kind == "convolution":
            name = precision if precision != "fp32" else "tf32"  # torch's default for convolutions
            plain = name == "tf32" and "tf32" not in dict(self.peaks)
            rate = self._achieved(name) * (c.convolution_fp32 if plain else c.convolution)
            seconds = max(seconds, kernel.flops * share / rate) + c.convolution_moved * moved / self.moved_per_s
        return c.launch_s + seconds

    def _achieved(self, precision: str) -> float:
        """FLOP/s of a large matmul."""
        c = self.constants
        base = precision.removesuffix("-mixed")
        if base == "fp32" or (base == "tf32" and "tf32" not in dict(self.peaks)):
            default = c.matmul_fp32_matrix if self.matrix_fp32 else c.matmul_fp32
            return self.peak("fp32") * (self.best_fp32 or default)
        # a narrower multiplier takes less power than its higher rate costs: width squared, times the rate
        narrower = {"fp8": 0.5, "fp4": 0.25}.get(base, 1.0)
        clock = min(1.0, float((self.peak_per_watt * narrower / A100_PER_WATT) ** -c.power))
        return self.peak(base) * self.best_matmul * c.matmul_tensor * clock

    def _arithmetic(
        self, kernel: Kernel, precision: Precision, tp: int, width: float, attention: Attention, casts: Casts
    ) -> float:
        c = self.constants
        batch, m, n, k = kernel.shape
        extra = 0.0
        if precision in ("fp8", "fp4") and not kernel.linear:
            precision = "bf16"
        if tp > 1 and kernel.split:
            batch, m, n, k = (
                (batch / tp, m, n, k) if kernel.split == "batch"
                else (batch, m / tp, n, k) if kernel.split == "m"
                else (batch, m, n / tp, k) if kernel.split == "n"
                else (batch, m, n, k / tp)
            )  # fmt: skip
        divided = tp if kernel.split else 1
        moved = kernel.moved_bytes * width / divided
        memory_s = moved / self.moved_per_s + c.bandwidth_ramp_s
        if kernel.kind == "attention":
            share = (
                c.attention_backward if kernel.flops > 2.2 * 2 * batch * divided * m * n * k else c.attention_forward
            )
            rate = self._achieved(precision) * (1.0 if attention == "flash3" else self.older_kernels)
            rate *= c.flash1 if attention == "flash1" else 1.0
            return c.launch_s + max(memory_s, kernel.flops / divided / (rate * share))
        if precision in ("fp8", "fp4"):
            cast = c.fp8_cast_fused if casts == "fused" else c.fp8_cast
            extra = cast * batch * (m * k + k * n) / self.moved_per_s
        rate = self._achieved(precision) * (c.batched if batch > 1 else 1.0)
        if precision in ("fp8", "fp4") and casts == "rows":
            rate *= c.fp8_rows
        if precision != "fp32":
            rows = [length for length in (n, k) if length == int(length)]  # what tp does not divide is padded
            if any(length % 8 for length in rows):
                rate *= c.misaligned_batched if batch > 1 else c.misaligned
            elif any(length % 64 for length in rows):
                rate *= c.ragged
        return c.launch_s + max(memory_s, matmul_seconds(batch, m, n, k, rate, self.processors, c)) + extra

    # -- collectives

    def host_seconds(self, num_kernels: float, backward: bool) -> float:
        return num_kernels * (self.constants.host_backward_s if backward else self.constants.host_forward_s)


def _share(entry: dict[str, Any], name: str, peak: float) -> float:
    return float(entry[name]["value"]) / peak if name in entry else 0.0


@functools.lru_cache(maxsize=100_000)
def matmul_seconds(batch: float, m: float, n: float, k: float, rate: float, processors: int, c: Constants) -> float:
    """Whole waves of tiles, at the best tile and the best split of k.

    waves = ceil(batch ceil(m / tm) ceil(n / tn) s / processors);  tile = 2 tm tn (k / s + ramp)
    """
    best = math.inf
    speeds = (1.0, c.tile_128x128, c.tile_128x64, c.tile_64x64)
    for (tm, tn), speed in zip(TILES, speeds, strict=True):
        for a, b in ((tm, tn), (tn, tm)):
            tiles = batch * math.ceil(m / a) * math.ceil(n / b)
            for parts in (1, 2, 4, 8) if tiles < processors and k > 1024 else (1,):
                waves = math.ceil(tiles * parts / processors)
                work = 2.0 * a * b * (k / parts + c.depth_ramp)
                best = min(best, waves * work * processors / (rate * speed))
    return best


@dataclass(frozen=True)
class Network:
    """The links that a group's collective goes over."""

    intra: Link
    inter: Link
    constants: Constants

    def all_reduce_s(self, num_bytes: float, ranks: int, per_node: int) -> float:
        """An all-reduce over `ranks`, of which `per_node` sit in one node."""
        return self._ring(num_bytes, ranks, per_node, 2)

    def all_gather_s(self, num_bytes: float, ranks: int, per_node: int) -> float:
        """An all-gather that ends with `num_bytes` on each rank, or a reduce-scatter that begins with them."""
        return self._ring(num_bytes, ranks, per_node, 1)

    def _ring(self, num_bytes: float, ranks: int, per_node: int, rounds: int) -> float:
        if ranks < 2 or num_bytes <= 0:
            return 0.0
        c = self.constants
        within = min(ranks, max(1, per_node))
        rate = slope(self.intra) * (c.collective_through_host if self.intra.through_host else c.collective)
        latency = c.collective_base_s + c.collective_rank_s * (within - 1)
        if ranks > within:
            # each rank of a node has its own port; together they carry one ring
            nodes = math.ceil(ranks / within)
            across = slope(self.inter) * within * c.network * (nodes / 2) ** -c.network_spread
            rate = min(rate, across) if within > 1 else across
            latency += c.network_base_s * math.log2(nodes + 1)
        return rounds / 2 * latency + rounds * (ranks - 1) / ranks * num_bytes / rate

    def shown_s(self, seconds: float, share: float, behind_s: float) -> float:
        """What is left of a collective of which that share can disappear behind arithmetic.

        Nothing disappears where it goes through the host's memory: the copies hold the processors of the device.
        """
        if self.intra.through_host:
            return seconds
        return max(seconds - share * behind_s, (1 - share) * seconds)

    def send_s(self, num_bytes: float, same_node: bool) -> float:
        """One message from a rank to another."""
        return (self.intra if same_node else self.inter).time(num_bytes)


def slope(link: Link) -> float:
    """Bytes a second of large messages."""
    sizes, seconds = link.sizes_bytes, link.seconds
    return (sizes[-1] - sizes[-2]) / (seconds[-1] - seconds[-2])


def error_text(band: float) -> str:
    """How an estimate's band is written.

    >>> error_text(0.12)
    '± 12 %'
    """
    return f"± {100 * band:.0f} %"


def toml_constants(c: Constants) -> dict[str, Any]:
    """The constants as they stand in estimator.toml, without the bands."""
    return {name: value for name, value in vars(c).items() if not name.endswith("_band")}
