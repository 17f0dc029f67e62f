"""Search how to spread a training over equal devices: mesh, micro-batch, schedule, shard level and recomputation.

    every mesh tp x pp x dp of the devices
      every micro-batch that divides a replica's batch, smallest first
        shard levels and recomputation, the least first: the first that fits is the fastest of its kind
    the fastest of them once more, with other schedules

Times come from `steps`, memory from `memory`: the same that plans are made with. Stages are cut as equal in time as
whole layers allow; where that does not fit, as equal as memory allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from partitioner.errors import ArgumentError
from partitioner.graph import CostGraph
from partitioner.memory import Spread, interval_memory, memory_limit, rank_memory, room_bytes
from partitioner.plan import MemoryItems
from partitioner.schedule import in_flight, placement
from partitioner.specs import EXECUTED, Device, Precision, Recompute, ScheduleName, Shard, StateBytes, Training
from partitioner.steps import Layout, Planner, StepBreakdown, balanced

SHARDS: tuple[Shard, ...] = ("none", "zero1", "zero2", "zero3")
RECOMPUTES: tuple[Recompute, ...] = ("never", "selective", "always")
MOST_MICROBATCHES = 8
"""Sizes of a micro-batch that are tried for a mesh: where there are more divisors, these are spread over them."""
LEAST_DIVIDED = 0.5
"""Tensor parallelism must divide this share of the parameters; convolutions, for one, are not divided."""
SAME = 0.005
"""Layouts whose times are this close are told apart by how simple they are: estimates are not that sharp."""
REFINED = 8
"""So many of the fastest layouts are tried again with other schedules."""


@dataclass(frozen=True)
class Wish:
    """What the user fixed; None or an axis left out: any."""

    mesh: Mapping[str, int] = field(default_factory=dict)
    num_microbatches: int | None = None
    schedule: ScheduleName | None = None
    recompute: Recompute | None = None
    shard: Shard | None = None
    sequence_parallel: bool = True


@dataclass(frozen=True)
class Demand:
    """What is to be trained: costs, prices and what is kept of each parameter."""

    graph: CostGraph
    prices: Planner
    training: Training
    state: StateBytes
    precision: Precision
    accumulate: Literal["auto", "fp32"]
    device: Device
    per_node: int
    divided: Mapping[str, int]
    """Parameters that tensor parallelism must divide evenly -> that dimension's size."""

    @property
    def fewest_samples(self) -> int:
        """Of a micro-batch: those that the layers took; BatchNorm trains on no single one."""
        return self.graph.profile.microbatch_sizes[0]

    @property
    def limit_bytes(self) -> int:
        return memory_limit(self.device, self.training)


class Candidate(NamedTuple):
    """A layout, cut, with its memory and its time."""

    layout: Layout
    memory: tuple[MemoryItems, ...]
    step: StepBreakdown
    over_bytes: int
    """What the heaviest rank holds beyond the limit; 0 or less: it fits."""


class Found(NamedTuple):
    """The layouts that fit, the fastest first; where none does, those that are short of the least."""

    candidates: list[Candidate]
    fits: bool
    num_considered: int


class Search:
    """Layouts of one demand on any number of its devices; what was priced once is kept."""

    def __init__(self, demand: Demand, wish: Wish) -> None:
        self.demand, self.wish = demand, wish
        self.cuts: dict[tuple[int, float, int], tuple[int, ...]] = {}
        self.num_considered = 0

    # -- which layouts there are

    def meshes(self, num_devices: int) -> Iterator[tuple[int, int, int]]:
        """(tp, pp, dp) of all the devices."""
        fixed, batch = self.wish.mesh, self.demand.training.batch_size
        most = len(self.demand.graph.allowed_cuts) + 1
        for tp in _divisors(num_devices):
            if fixed.get("tp", tp) != tp or (self.fault_of_tp(tp) is not None):
                continue
            for pp in _divisors(num_devices // tp):
                dp = num_devices // tp // pp
                if pp <= most and batch % dp == 0 and fixed.get("pp", pp) == pp and fixed.get("dp", dp) == dp:
                    yield tp, pp, dp

    def fault_of_tp(self, tp: int) -> str | None:
        """Why the layers cannot be divided over so many ranks; None: they can."""
        if tp == 1:
            return None
        if self.divided_share < LEAST_DIVIDED:
            return (
                f"tp={tp} would divide {100 * self.divided_share:.0f} % of the parameters and repeat the rest of the "
                "model on each rank: use pp and dp"
            )
        if tp > self.demand.per_node and "tp" not in self.wish.mesh:
            return f"tp={tp} is more than the {self.demand.per_node} devices of a node"
        for name, size in self.demand.divided.items():
            if size % tp:
                return f"tp={tp} does not divide the {size} of {name}: use a divisor of {size}"
        return None

    @property
    def divided_share(self) -> float:
        graph = self.demand.graph
        whole = float(graph.weight_bytes(0, graph.num_layers))
        return float(graph.divided_bytes(0, graph.num_layers)) / whole if whole else 0.0

    def microbatches(self, each: int) -> list[tuple[int, int]]:
        """(samples of a micro-batch, number of them) of a replica's `each` samples, smallest first."""
        wish = self.wish
        sizes = [size for size in _divisors(each) if size >= self.demand.fewest_samples]
        if wish.num_microbatches is not None:
            return [(size, each // size) for size in sizes if each // size == wish.num_microbatches]
        if len(sizes) > MOST_MICROBATCHES:
            small = [size for size in sizes if size <= 64]
            step = max(1, math.ceil(len(small) / MOST_MICROBATCHES))
            sizes = small[::step]
        return [(size, each // size) for size in sizes]

    # -- one layout

    def start(self, tp: int, pp: int, dp: int, samples: int, count: int) -> Layout:
        """The plainest layout of a mesh, cut into stages of equal time."""
        return self.cut(
            Layout(
                tp=tp,
                pp=pp,
                dp=dp,
                microbatch=samples,
                num_microbatches=count,
                sequence_parallel=self.wish.sequence_parallel and tp > 1,
                gradient_bytes=self.demand.state.gradients,
                per_node=self.demand.per_node,
            )
        )

    def cut(self, layout: Layout) -> Layout:
        """With stages as equal in time as whole layers allow, at cuts that are possible."""
        key = (layout.tp, layout.microbatch, layout.num_stages)
        if key not in self.cuts:
            edges = (0, *self.demand.graph.allowed_cuts, self.demand.graph.num_layers)
            seconds = self.layer_seconds(layout)
            parts = [sum(seconds[i:j]) for i, j in pairwise(edges)]
            self.cuts[key] = tuple(edges[k] for k in balanced(parts, layout.num_stages))
        return replace(layout, cuts=self.cuts[key])

    def layer_seconds(self, layout: Layout) -> list[float]:
        """What each layer takes of one micro-batch."""
        plain = Layout(tp=layout.tp, microbatch=layout.microbatch, sequence_parallel=layout.tp > 1)
        prices = self.demand.prices
        return [prices.layer(work, plain).total_s for work in prices.work.at(layout.microbatch)]

    def memory(self, layout: Layout) -> tuple[MemoryItems, ...]:
        self.num_considered += 1
        demand = self.demand
        return rank_memory(demand.graph, demand.training, demand.device, layout, state=demand.state)

    def over(self, memory: tuple[MemoryItems, ...]) -> int:
        return max(items.total for items in memory) - self.demand.limit_bytes

    def candidate(self, layout: Layout, memory: tuple[MemoryItems, ...]) -> Candidate:
        step = self.demand.prices.step(layout, optimizer_moved_bytes=self.moved_bytes)
        return Candidate(layout, memory, step, self.over(memory))

    def fitting(self, layout: Layout) -> Candidate | None:
        """Priced; None where it does not fit."""
        memory = self.memory(layout)
        return self.candidate(layout, memory) if self.over(memory) <= 0 else None

    @property
    def moved_bytes(self) -> float:
        """What an optimizer step reads and writes of a parameter element: state twice, weights and gradients once."""
        state = self.demand.state
        return 2 * (state.master + state.moments) + 2 * state.weights + state.gradients

    # -- the search

    def run(self, num_devices: int, *, enough: int = 5, only_fit: bool = False) -> Found:
        """The best `enough` layouts of all meshes of `num_devices`; `only_fit`: the first that fits will do."""
        before = self.num_considered
        fitting: list[Candidate] = []
        nearest: list[tuple[int, Layout]] = []
        for tp, pp, dp in self.meshes(num_devices):
            each = self.demand.training.batch_size // dp
            for samples, count in self.microbatches(each):
                start = self.start(tp, pp, dp, samples, count)
                starts = [start]
                if self.wish.schedule is not None:
                    starts = list(self.with_schedule(start, self.wish.schedule))
                fit_here = False
                for one in starts:
                    found, missed = self.least(one)
                    fitting += found
                    nearest += missed
                    fit_here = fit_here or bool(found)
                    if only_fit and found:
                        return Found(found, True, self.num_considered - before)
                if starts and not fit_here:
                    break  # larger micro-batches need more
        nearest.sort(key=lambda item: item[0])
        if not fitting:
            fitting = self.shifted(nearest)
        if not fitting:
            short = [self.candidate(layout, self.memory(layout)) for _, layout in nearest[:enough]]
            return Found(short, False, self.num_considered - before)
        fitting = _ranked(fitting)
        if self.wish.schedule is None:
            fitting = _ranked([*fitting, *(other for one in fitting[:REFINED] for other in self.rescheduled(one))])
        return Found(_various(fitting, enough), True, self.num_considered - before)

    def least(self, start: Layout) -> tuple[list[Candidate], list[tuple[int, Layout]]]:
        """For each shard level the least recomputation that fits, priced; else what comes nearest to fitting."""
        shards: Sequence[Shard] = SHARDS if start.dp > 1 else SHARDS[:1]
        if self.wish.shard is not None:
            shards = (self.wish.shard,)
        recomputes = RECOMPUTES if self.wish.recompute is None else (self.wish.recompute,)
        least = replace(start, shard=shards[-1], recompute=recomputes[-1])
        if (over := self.over(self.memory(least))) > 0:
            return [], [(over, least)]
        found = []
        for shard in shards:
            for recompute in recomputes:
                one = self.fitting(replace(start, shard=shard, recompute=recompute))
                if one is not None:
                    found.append(one)
                    break
        return found, []

    def with_schedule(self, layout: Layout, schedule: ScheduleName) -> Iterator[Layout]:
        """The same under another schedule, with each number of stages a rank that it may have."""
        most = len(self.demand.graph.allowed_cuts) + 1
        if layout.pp == 1:
            yield replace(layout, schedule="1f1b" if schedule not in EXECUTED else schedule)
            return
        counts = {"interleaved": (2, 4), "zero-bubble-v": (2,)}.get(schedule, (1,))
        for each in counts:
            even = schedule != "interleaved" or layout.num_microbatches % layout.pp == 0
            if layout.pp * each <= most and even:
                yield self.cut(replace(layout, schedule=schedule, stages_per_rank=each))

    def rescheduled(self, one: Candidate) -> Iterator[Candidate]:
        for schedule in ("interleaved", "zero-bubble") if one.layout.pp > 1 else ():
            for layout in self.with_schedule(one.layout, schedule):
                if (other := self.fitting(layout)) is not None:
                    yield other

    def shifted(self, nearest: list[tuple[int, Layout]]) -> list[Candidate]:
        """Layouts whose stages do not fit when equal in time, cut so that they do: layers move to stages with room."""
        found = []
        for _, layout in nearest[:3]:
            if layout.pp > 1 and layout.stages_per_rank == 1 and (cuts := self.roomy_cuts(layout)) is not None:
                one = self.fitting(replace(layout, cuts=cuts))
                found += [one] if one is not None else []
        return found

    def roomy_cuts(self, layout: Layout) -> tuple[int, ...] | None:
        """Of the cuts that fit, those with the least slowest stage: bisected, each try filled from the first stage."""
        demand, p = self.demand, layout.pp
        n = demand.graph.num_layers
        allowed = np.array([*demand.graph.allowed_cuts, n])
        before = np.concatenate([[0.0], np.cumsum(self.layer_seconds(layout))])
        room = room_bytes(demand.device, demand.limit_bytes, layout.tp, p, layout.dp)
        held = held_by_stage(layout)
        spread = Spread.of(layout, demand.state)

        def reach(stage: int, first: int, most_s: float) -> int | None:
            ends = allowed[allowed > first]
            ends = ends[: len(ends) - (p - 1 - stage)]
            if not len(ends):
                return None
            items = interval_memory(
                demand.graph,
                demand.training,
                first,
                ends,
                samples=layout.microbatch,
                held=held[stage],
                replicated=layout.dp > 1,
                spread=spread,
            )
            size = sum(np.asarray(value) for value in items.values())
            good = ends[(size + len(items) <= room) & (before[ends] - before[first] <= most_s * (1 + 1e-9))]
            return int(good[-1]) if len(good) else None

        def filled(most_s: float) -> tuple[int, ...] | None:
            cuts, first = [], 0
            for stage in range(p):
                end = reach(stage, first, most_s)
                if end is None:
                    return None
                cuts.append(end)
                first = end
            return tuple(cuts[:-1]) if first == n else None

        best = filled(math.inf)
        low, high = 0.0, float(before[-1])
        for _ in range(12 if best is not None else 0):
            middle = (low + high) / 2
            cuts = filled(middle)
            low, high, best = (low, middle, cuts) if cuts is not None else (middle, high, best)
        return best

    # -- beside the search

    def alone_s(self) -> float:
        """Seconds a sample on one of these devices of unlimited memory, at its best micro-batch."""
        batch = self.demand.training.batch_size
        best = math.inf
        for samples, count in Search(self.demand, Wish()).microbatches(batch) or [(batch, 1)]:
            layout = Layout(microbatch=samples, num_microbatches=count, per_node=self.demand.per_node)
            step = self.demand.prices.step(layout, optimizer_moved_bytes=self.moved_bytes)
            best = min(best, step.step_s / batch)
        return best

    def largest_microbatch(self, layout: Layout) -> int | None:
        """Samples that fit at once on this mesh with the most sharding and recomputation the user allows."""
        widest = self.smallest(self.cut(layout))

        def fits(samples: int) -> bool:
            return self.over(self.memory(replace(widest, microbatch=samples))) <= 0

        if not fits(1):
            return None
        low, high = 1, 2
        while high < 2**20 and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def smallest(self, layout: Layout) -> Layout:
        """With the most sharding and recomputation that the user allows."""
        shard = self.wish.shard or ("zero3" if layout.dp > 1 else "none")
        return replace(layout, shard=shard, recompute=self.wish.recompute or "always")

    def fewest_devices(self, most: int) -> int | None:
        """The smallest number of these devices on which some layout fits."""
        counts = [n for n in range(1, most + 1) if n <= self.demand.per_node or n % self.demand.per_node == 0]
        search = Search(self.demand, replace(self.wish, mesh={}, num_microbatches=None))
        search.cuts = self.cuts
        least = self.least_bytes()
        room = self.demand.limit_bytes - self.demand.device.overhead_bytes
        for count in counts:
            if count * room >= least and search.run(count, only_fit=True).fits:
                return count
        return None

    def least_bytes(self) -> float:
        """What all devices together hold at least: every parameter's state, once."""
        state, graph, n = self.demand.state, self.demand.graph, self.demand.graph.num_layers
        elements = float(graph.trainable_elements(0, n))
        kept = (state.gradients + state.master + state.moments) * elements + float(graph.weight_bytes(0, n))
        return kept * (1 + self.demand.device.slack)


def held_by_stage(layout: Layout) -> tuple[int, ...]:
    """Micro-batches that each stage has in flight at its peak."""
    p = layout.num_stages
    count = layout.num_microbatches if layout.schedule == "gpipe" else min(layout.num_microbatches, 4 * p)
    return tuple(in_flight(layout.schedule, stage, p, count, num_ranks=layout.pp) for stage in range(p))


def check_wish(wish: Wish, demand: Demand, num_devices: int) -> None:
    """ArgumentError, with both numbers, where what was asked for cannot be had."""
    unknown = sorted(set(wish.mesh) - {"tp", "pp", "dp"})
    if unknown:
        raise ArgumentError(f"mesh has no axis {unknown[0]!r}: use 'tp', 'pp' and 'dp'")
    for axis, size in wish.mesh.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(f"mesh {dict(wish.mesh)}: {axis}={size!r} is impossible, it is 1 or more")
    used = math.prod(wish.mesh.values())
    full = len(wish.mesh) == 3
    if num_devices % used or (full and used != num_devices):
        raise ArgumentError(
            f"the mesh {dict(wish.mesh)} needs {'' if full else 'a multiple of '}{used} devices, there are "
            f"{num_devices}: make tp x pp x dp {num_devices}"
        )
    most, pp = len(demand.graph.allowed_cuts) + 1, wish.mesh.get("pp", 1)
    if pp > most:
        raise ArgumentError(f"pp={pp} needs {pp} layers that can be cut apart, the model has {most}: use pp={most}")
    search = Search(demand, wish)
    if "tp" in wish.mesh and (fault := search.fault_of_tp(wish.mesh["tp"])) is not None:
        raise ArgumentError(fault)
    batch = demand.training.batch_size
    if "dp" in wish.mesh and batch % wish.mesh["dp"]:
        raise ArgumentError(
            f"batch_size {batch} does not divide by {wish.mesh['dp']} replicas: use a batch of "
            f"{batch // wish.mesh['dp'] * wish.mesh['dp'] or wish.mesh['dp']}, or another dp"
        )
    if wish.schedule is not None and wish.schedule not in EXECUTED and wish.mesh.get("pp", 2) > 1:
        placement(wish.schedule, 2 if wish.schedule in ("interleaved", "zero-bubble-v") else 1, 1)
    if not any(search.microbatches(batch // dp) for _, _, dp in search.meshes(num_devices)):
        fewest = demand.fewest_samples
        if fewest > 1:
            raise ArgumentError(
                f"a layer refuses to train on one sample (BatchNorm does), and the batch of {batch} leaves less than "
                f"{fewest} of a micro-batch on every mesh of {num_devices} devices: use a larger batch"
            )
        if wish.num_microbatches is None:
            raise ArgumentError(
                f"no mesh of {num_devices} devices divides the batch of {batch} and the model's {most} layers that can "
                f"be cut apart: use a batch that is a multiple of {num_devices}"
            )
        raise ArgumentError(
            f"{wish.num_microbatches} micro-batches do not divide the batch of {batch} on any mesh of {num_devices} "
            "devices"
        )


def _ranked(candidates: list[Candidate]) -> list[Candidate]:
    """By time; those as fast as the fastest, the simplest first."""
    by_time = sorted(candidates, key=lambda one: (one.step.step_s, _complexity(one)))
    limit = by_time[0].step.step_s * (1 + SAME)
    same = [one for one in by_time if one.step.step_s <= limit]
    return [*sorted(same, key=lambda one: (_complexity(one), one.step.step_s)), *by_time[len(same) :]]


def _complexity(one: Candidate) -> int:
    """How much of it goes beyond plain replicas and stages."""
    layout = one.layout
    return (
        4 * (layout.tp > 1)
        + 4 * (layout.schedule not in EXECUTED)
        + 2 * (layout.recompute != "never")
        + SHARDS.index(layout.shard)
        + (layout.pp > 1)
    )


def _various(candidates: list[Candidate], enough: int) -> list[Candidate]:
    """The first ones, at most two of each mesh."""
    seen: dict[tuple[int, int, int], int] = {}
    chosen = []
    for one in candidates:
        mesh = (one.layout.tp, one.layout.pp, one.layout.dp)
        seen[mesh] = seen.get(mesh, 0) + 1
        if seen[mesh] <= 2:
            chosen.append(one)
        if len(chosen) == enough:
            break
    return chosen


def _divisors(number: int) -> list[int]:
    small = [k for k in range(1, math.isqrt(number) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})
