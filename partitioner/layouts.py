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
from partitioner.specs import (
    EXECUTED,
    Device,
    Precision,
    Recompute,
    ScheduleName,
    Shard,
    StateBytes,
    Training,
)
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
    microbatch: int | None = None
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


class Choice(NamedTuple):
    """A layout before its cuts."""

    tp: int
    pp: int
    dp: int
    microbatch: int
    num_microbatches: int
    schedule: ScheduleName = "1f1b"
    stages_per_rank: int = 1
    recompute: Recompute = "never"
    shard: Shard = "none"
    sequence_parallel: bool = True

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_per_rank


class Candidate(NamedTuple):
    """A layout with its cuts, its memory and its time."""

    choice: Choice
    cuts: tuple[int, ...]
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
        if wish.microbatch is not None:
            return [(size, each // size) for size in sizes if size == wish.microbatch]
        if len(sizes) > MOST_MICROBATCHES:
            small = [size for size in sizes if size <= 64]
            step = max(1, math.ceil(len(small) / MOST_MICROBATCHES))
            sizes = small[::step]
        return [(size, each // size) for size in sizes]

    # -- one layout

    def spread(self, choice: Choice) -> Spread:
        return Spread(
            tp=choice.tp,
            sequence_parallel=choice.sequence_parallel and choice.tp > 1,
            dp=choice.dp,
            shard=choice.shard,
            recompute=choice.recompute,
            state=self.demand.state,
        )

    def layout(self, choice: Choice, cuts: tuple[int, ...]) -> Layout:
        return Layout(
            tp=choice.tp,
            pp=choice.pp,
            dp=choice.dp,
            microbatch=choice.microbatch,
            num_microbatches=choice.num_microbatches,
            schedule=choice.schedule,
            stages_per_rank=choice.stages_per_rank,
            recompute=choice.recompute,
            shard=choice.shard,
            sequence_parallel=choice.sequence_parallel and choice.tp > 1,
            cuts=cuts,
            gradient_bytes=self.demand.state.gradients,
            per_node=self.demand.per_node,
        )

    def equal_cuts(self, choice: Choice) -> tuple[int, ...]:
        """Stages as equal in time as whole layers allow, at cuts that are possible."""
        key = (choice.tp, choice.microbatch, choice.num_stages)
        if key not in self.cuts:
            work = self.demand.prices.work.at(choice.microbatch)
            layout = Layout(tp=choice.tp, microbatch=choice.microbatch, sequence_parallel=choice.tp > 1)
            seconds = [self.demand.prices.layer(layer, layout).total_s for layer in work]
            allowed = self.demand.graph.allowed_cuts
            edges = (0, *allowed, len(seconds))
            parts = [sum(seconds[i:j]) for i, j in pairwise(edges)]
            self.cuts[key] = tuple(edges[k] for k in balanced(parts, choice.num_stages))
        return self.cuts[key]

    def memory(self, choice: Choice, cuts: tuple[int, ...]) -> tuple[MemoryItems, ...]:
        self.num_considered += 1
        demand = self.demand
        return rank_memory(
            demand.graph,
            demand.training,
            demand.device,
            cuts=cuts,
            schedule=choice.schedule,
            num_ranks=choice.pp,
            num_microbatches=choice.num_microbatches,
            samples=choice.microbatch,
            spread=self.spread(choice),
        )

    def over(self, memory: tuple[MemoryItems, ...]) -> int:
        return max(items.total for items in memory) - self.demand.limit_bytes

    def candidate(self, choice: Choice, cuts: tuple[int, ...], memory: tuple[MemoryItems, ...]) -> Candidate:
        step = self.demand.prices.step(self.layout(choice, cuts), optimizer_moved_bytes=self.moved_bytes)
        return Candidate(choice, cuts, memory, step, self.over(memory))

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
        nearest: list[tuple[int, Choice, tuple[int, ...]]] = []
        for tp, pp, dp in self.meshes(num_devices):
            each = self.demand.training.batch_size // dp
            for samples, count in self.microbatches(each):
                start = Choice(tp, pp, dp, samples, count, sequence_parallel=self.wish.sequence_parallel)
                if self.wish.schedule is not None:
                    starts = list(self.with_schedule(start, self.wish.schedule))
                else:
                    starts = [start]
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
        if not fitting:
            fitting = self.shifted(nearest)
        if not fitting:
            short = [
                self.candidate(choice, cuts, self.memory(choice, cuts))
                for _, choice, cuts in sorted(nearest, key=lambda item: item[0])[:enough]
            ]
            return Found(short, False, self.num_considered - before)
        fitting = _ranked(fitting)
        if self.wish.schedule is None:
            fitting = _ranked([*fitting, *(other for one in fitting[:REFINED] for other in self.rescheduled(one))])
        return Found(_various(fitting, enough), True, self.num_considered - before)

    def least(self, start: Choice) -> tuple[list[Candidate], list[tuple[int, Choice, tuple[int, ...]]]]:
        """For each shard level the least recomputation that fits, priced; else what comes nearest to fitting."""
        cuts = self.equal_cuts(start)
        shards: Sequence[Shard] = SHARDS if start.dp > 1 else SHARDS[:1]
        if self.wish.shard is not None:
            shards = (self.wish.shard,)
        recomputes = RECOMPUTES if self.wish.recompute is None else (self.wish.recompute,)
        least = start._replace(shard=shards[-1], recompute=recomputes[-1])
        if (over := self.over(self.memory(least, cuts))) > 0:
            return [], [(over, least, cuts)]
        found = []
        for shard in shards:
            for recompute in recomputes:
                choice = start._replace(shard=shard, recompute=recompute)
                memory = self.memory(choice, cuts)
                if self.over(memory) <= 0:
                    found.append(self.candidate(choice, cuts, memory))
                    break
        return found, []

    def with_schedule(self, choice: Choice, schedule: ScheduleName) -> Iterator[Choice]:
        """The same under another schedule, with each number of stages a rank that it may have."""
        most = len(self.demand.graph.allowed_cuts) + 1
        if choice.pp == 1:
            yield choice._replace(schedule="1f1b" if schedule not in EXECUTED else schedule)
            return
        counts = {"interleaved": (2, 4), "zero-bubble-v": (2,)}.get(schedule, (1,))
        for each in counts:
            even = schedule != "interleaved" or choice.num_microbatches % choice.pp == 0
            if choice.pp * each <= most and even:
                yield choice._replace(schedule=schedule, stages_per_rank=each)

    def rescheduled(self, one: Candidate) -> Iterator[Candidate]:
        for schedule in ("interleaved", "zero-bubble") if one.choice.pp > 1 else ():
            for choice in self.with_schedule(one.choice, schedule):
                cuts = self.equal_cuts(choice)
                memory = self.memory(choice, cuts)
                if self.over(memory) <= 0:
                    yield self.candidate(choice, cuts, memory)

    def shifted(self, nearest: list[tuple[int, Choice, tuple[int, ...]]]) -> list[Candidate]:
        """Layouts whose stages do not fit when equal in time, cut so that they do: layers move to stages with room."""
        found = []
        for _, choice, _ in sorted(nearest, key=lambda item: item[0])[:3]:
            if choice.pp > 1 and choice.stages_per_rank == 1 and (cuts := self.roomy_cuts(choice)) is not None:
                memory = self.memory(choice, cuts)
                if self.over(memory) <= 0:
                    found.append(self.candidate(choice, cuts, memory))
        return found

    def roomy_cuts(self, choice: Choice) -> tuple[int, ...] | None:
        """Of the cuts that fit, those with the least slowest stage: bisected, each try filled from the first stage."""
        demand = self.demand
        n, p = demand.graph.num_layers, choice.pp
        allowed = np.array([*demand.graph.allowed_cuts, n])
        layout = Layout(tp=choice.tp, microbatch=choice.microbatch, sequence_parallel=choice.tp > 1)
        work = demand.prices.work.at(choice.microbatch)
        before = np.concatenate([[0.0], np.cumsum([demand.prices.layer(one, layout).total_s for one in work])])
        room = room_bytes(demand.device, demand.limit_bytes, choice.tp, p, choice.dp)
        held = [in_flight(choice.schedule, s, p, min(choice.num_microbatches, 4 * p)) for s in range(p)]
        if choice.schedule == "gpipe":
            held = [choice.num_microbatches] * p

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
                samples=choice.microbatch,
                held=held[stage],
                replicated=choice.dp > 1,
                spread=self.spread(choice),
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

    def largest_microbatch(self, choice: Choice) -> int | None:
        """Samples that fit at once on this mesh with the most sharding and recomputation the user allows."""
        shard = self.wish.shard or ("zero3" if choice.dp > 1 else "none")
        widest = choice._replace(shard=shard, recompute=self.wish.recompute or "always")

        def fits(samples: int) -> bool:
            one = widest._replace(microbatch=samples)
            return self.over(self.memory(one, self.equal_cuts(choice))) <= 0

        if not fits(1):
            return None
        low, high = 1, 2
        while high < 2**20 and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

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


def held_by_stage(choice: Choice) -> tuple[int, ...]:
    """Micro-batches that each stage has in flight at its peak."""
    p = choice.num_stages
    count = choice.num_microbatches if choice.schedule == "gpipe" else min(choice.num_microbatches, 4 * p)
    return tuple(in_flight(choice.schedule, stage, p, count, num_ranks=choice.pp) for stage in range(p))


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
        asked = wish.num_microbatches if wish.num_microbatches is not None else wish.microbatch
        fewest = demand.fewest_samples
        if fewest > 1:
            raise ArgumentError(
                f"a layer refuses to train on one sample (BatchNorm does), and the batch of {batch} leaves less than "
                f"{fewest} of a micro-batch on every mesh of {num_devices} devices: use a larger batch"
            )
        if asked is None:
            raise ArgumentError(
                f"no mesh of {num_devices} devices divides the batch of {batch} and the model's {most} layers that can "
                f"be cut apart: use a batch that is a multiple of {num_devices}"
            )
        name = "micro-batches" if wish.num_microbatches is not None else "samples a micro-batch"
        raise ArgumentError(f"{asked} {name} do not divide the batch of {batch} on any mesh of {num_devices} devices")


def _ranked(candidates: list[Candidate]) -> list[Candidate]:
    """By time; those as fast as the fastest, the simplest first."""
    by_time = sorted(candidates, key=lambda one: (one.step.step_s, _complexity(one)))
    limit = by_time[0].step.step_s * (1 + SAME)
    same = [one for one in by_time if one.step.step_s <= limit]
    return [*sorted(same, key=lambda one: (_complexity(one), one.step.step_s)), *by_time[len(same) :]]


def _complexity(one: Candidate) -> int:
    """How much of it goes beyond plain replicas and stages."""
    choice = one.choice
    return (
        4 * (choice.tp > 1)
        + 4 * (choice.schedule not in EXECUTED)
        + 2 * (choice.recompute != "never")
        + SHARDS.index(choice.shard)
        + (choice.pp > 1)
    )


def _various(candidates: list[Candidate], enough: int) -> list[Candidate]:
    """The first ones, at most two of each mesh."""
    seen: dict[tuple[int, int, int], int] = {}
    chosen = []
    for one in candidates:
        mesh = one.choice[:3]
        seen[mesh] = seen.get(mesh, 0) + 1
        if seen[mesh] <= 2:
            chosen.append(one)
        if len(chosen) == enough:
            break
    return chosen


def _divisors(number: int) -> list[int]:
    small = [k for k in range(1, math.isqrt(number) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})
