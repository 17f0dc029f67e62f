"""Plans for inference: replicas and cuts for the most samples a second, or for the least time of one batch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from partitioner.clock import Replica
from partitioner.costs import forward_costs
from partitioner.errors import ArgumentError, InfeasibleError
from partitioner.graph import CostGraph
from partitioner.memory import inference_memory, memory_limit, on_device, overhead_bytes, room_bytes
from partitioner.plan import Alternative, LostEfficiency, MemoryItems, Plan, Prediction, Stage, StagePrediction
from partitioner.simulator import forward_clock
from partitioner.solver.arrangement import arranged
from partitioner.solver.evaluate import link_times
from partitioner.solver.explain import about_costs
from partitioner.solver.layout import AnyLayout, Devices, Layout, Site
from partitioner.solver.settings import check_request, divisors, numbered, pinned_positions
from partitioner.solver.shortage import more_memory, told, with_devices
from partitioner.solver.starts import stage_starts
from partitioner.solver.windows import window_minimum
from partitioner.specs import Cluster, Device, Training

CLOSE = 1e-9
PRECISION = 1e-10
"""Relative, of the slowest stage."""
MOST_RUNNERS_UP = 5
FEW_STAGES = 16
"""Numbers of stages up to which each is looked at when nothing fits."""
SHORT = 1e-4
"""Relative, of the bytes that are short."""
MOST_GROWTH = 8
"""Up to so many times the devices are tried when nothing fits."""
MOST_PAIRED = 3_000
"""Layers, up to which every pair of positions is looked at where memory binds."""
ITEMS = ("weights", "buffers", "received", "workspace")
GROWING = ("weights", "buffers")


def solve_inference(graph: CostGraph, cluster: Cluster, training: Training) -> Plan:
    """The plan whose forward passes are the fastest, by `training.objective`, and fit.

    "throughput": batches follow each other; `step_s` is the time between two, micro-batches times the slowest stage or
    transfer. "latency": one batch through an empty pipeline; `step_s` is what it takes. Over all meshes, micro-batch
    counts and cuts; transfers go on beside the work of stages. `lower_bound_s` holds for all of them.
    """
    check_request(graph, cluster, training)
    if training.schedule not in ("auto", "gpipe"):
        raise ArgumentError(
            f"schedule={training.schedule!r} orders backward passes, and objective={training.objective!r} has none: "
            "use 'auto'"
        )
    if training.shard != "none":
        raise ArgumentError(
            f"shard={training.shard!r} divides what replicas keep for training, and objective={training.objective!r} "
            "trains nothing: use 'none'"
        )
    waiting = [(case.bound_s, k, case) for k, case in enumerate(_cases(graph, cluster, training))]
    heapq.heapify(waiting)
    found: list[Found] = []
    unfit: list[Case] = []
    lower = best = math.inf
    while waiting and waiting[0][0] < best * (1 - CLOSE):
        bound_s, _, case = heapq.heappop(waiting)
        if isinstance(case.layout, AnyLayout):
            lower = min(lower, bound_s)
            continue
        if case.is_beaten(best):
            continue
        one = case.solve()
        if one is None:
            unfit.append(case)
            continue
        found.append(one)
        lower, best = min(lower, one.lower_bound_s), min(best, one.seconds)
    if not found:
        raise InfeasibleError(_shortage(graph, cluster, training))
    found.sort(key=Found.rank)
    bound_s = min([lower, best, *(bound for bound, _, _ in waiting)])
    return _plan(graph, found, bound_s, unfit)


class Found(NamedTuple):
    case: Case
    cuts: tuple[int, ...]
    seconds: float
    lower_bound_s: float

    def rank(self) -> tuple[float, int, int, int, tuple[int, ...]]:
        """Order of preference."""
        case = self.case
        seconds = float(f"{self.seconds:.9e}")
        return seconds, case.num_stages, case.num_microbatches, case.layout.number, self.cuts


def _cases(graph: CostGraph, cluster: Cluster, training: Training) -> Iterator[Case]:
    fixed = {} if training.mesh == "auto" else dict(training.mesh)
    most, site = len(graph.allowed_cuts) + 1, Site(cluster, training)
    for pp in range(1, min(most, cluster.num_devices) + 1):
        for dp in range(1, cluster.num_devices // pp + 1):
            if training.batch_size % dp or fixed.get("pp", pp) != pp or fixed.get("dp", dp) != dp:
                continue
            each = training.batch_size // dp
            counts = divisors(each) if training.microbatches == "auto" else [training.microbatches]
            found = arranged(site, pp, dp)
            for count in counts:
                if each % count == 0:
                    for layout in (*found.layouts, *found.others):
                        yield Case(graph, cluster, training, pp, dp, count, layout)


@dataclass(frozen=True, eq=False)
class Case:
    """A mesh on some devices and a number of micro-batches, with all that is to be cut."""

    graph: CostGraph
    cluster: Cluster
    training: Training
    num_stages: int
    num_replicas: int
    num_microbatches: int
    layout: Layout
    extra_bytes: int = 0
    """That each device is taken to have more."""

    @property
    def samples(self) -> int:
        return self.training.batch_size // (self.num_replicas * self.num_microbatches)

    @property
    def devices(self) -> Devices:
        """By stage, one a replica."""
        return self.layout.devices

    @cached_property
    def speeds(self) -> list[float]:
        """Of each stage's slowest device."""
        speeds: list[float] = self.layout.speeds.min(axis=0).tolist()
        return speeds

    @cached_property
    def rooms(self) -> list[tuple[int, Device]]:
        """By stage, bytes that its smallest device has room for, and that device."""
        found = []
        for devices in self.devices:
            some = [self.cluster.devices[device] for device in devices]
            rooms = [room_bytes(one, memory_limit(one, self.training), self.num_stages) for one in some]
            found.append((min(rooms), some[rooms.index(min(rooms))]))
        return found

    @cached_property
    def room(self) -> list[int]:
        """Bytes that each stage's smallest device has room for."""
        return [room + self.extra_bytes for room, _ in self.rooms]

    @property
    def bound_s(self) -> float:
        """What no cuts can beat: the work spread evenly, and no layer divided."""
        forward_s = self.graph.at(self.samples).forward_s
        total, largest = float(forward_s.sum()), float(forward_s.max())
        m, fastest = self.num_microbatches, max(self.speeds)
        slicing_s = self.graph.slicing_s(self.num_stages) / fastest
        together = self.layout.total_speed if isinstance(self.layout, AnyLayout) else sum(self.speeds)
        slowest = max(total / together, largest / fastest) + slicing_s
        if not self._in_line:
            return m * slowest
        return self.value(total / fastest + self.num_stages * slicing_s, slowest, m)

    @cached_property
    def _in_line(self) -> bool:
        """Whether every layer before a cut hands something on: else stages can run beside each other."""
        return self.num_stages == 1 or bool(self.graph.linked[list(self.graph.allowed_cuts)].all())

    def value(self, through: float, slowest: float, m: int) -> float:
        return m * slowest if self.training.objective == "throughput" else through + (m - 1) * slowest

    def is_beaten(self, seconds: float) -> bool:
        """Whether no cuts are faster; of throughput, where one look tells."""
        if seconds == math.inf or self.training.objective != "throughput":
            return False
        cap = seconds / self.num_microbatches * (1 - CLOSE)
        return self._cheapest(cap, self._hops(self.graph.at(self.samples).next_bytes)) is None

    def solve(self) -> Found | None:
        """The best cuts: the least sum of stages and transfers under a cap on the slowest, over the cap."""
        graph = self.graph
        costs = graph.at(self.samples)
        handed, crossing = self._hops(costs.next_bytes), self._hops(costs.crossing_bytes)
        widest = self.fits()
        if widest is None:
            return None
        best, seconds = widest, self.seconds(widest)
        bounds = []
        for hops in (handed, crossing) if not np.array_equal(handed, crossing) else (crossing,):
            found, bound = self._halve(hops, best, seconds)
            bounds.append(bound)
            if (value := self.seconds(found)) < seconds:
                best, seconds = found, value
        return Found(self, best, seconds, min(bounds[0] if self._in_line else self.bound_s, seconds))

    def _halve(self, hops: np.ndarray, best: tuple[int, ...], seconds: float) -> tuple[tuple[int, ...], float]:
        """(cuts, bound) with these transfers alone: ranges of the slowest stage are halved until none can win."""
        m = self.num_microbatches
        first = self._cheapest(math.inf, hops)
        assert first is not None
        through, slowest = self._measured(first, hops)
        value = self.value(through, slowest, m)
        low = (self.bound_s / m) if self.training.objective == "throughput" else 0.0
        best, bound = first, math.inf
        ranges = [(self.value(through, low, m), low, slowest, through)]
        while ranges:
            least, low, high, through = heapq.heappop(ranges)
            if least >= value * (1 - PRECISION) or high - low <= PRECISION * high:
                bound = min(bound, least)
                continue
            middle = (low + high) / 2
            cuts = self._cheapest(middle, hops)
            if cuts is None:
                heapq.heappush(ranges, (self.value(through, middle, m), middle, high, through))
                continue
            here, slowest = self._measured(cuts, hops)
            if self.value(here, slowest, m) < value:
                best, value = cuts, self.value(here, slowest, m)
            heapq.heappush(ranges, (self.value(here, low, m), low, slowest, here))
            heapq.heappush(ranges, (self.value(through, middle, m), middle, high, through))
        return best, min(bound, value)

    def fits(self) -> tuple[int, ...] | None:
        """Cuts of which every stage fits; None: there are none."""
        return self._cheapest(math.inf, self._hops(self.graph.at(self.samples).crossing_bytes))

    def seconds(self, cuts: tuple[int, ...]) -> float:
        """The objective of these cuts: by the clock, or the slowest stage or transfer."""
        replicas = self.replicas(cuts)
        if self.training.objective == "latency":
            return max(float(forward_clock(one, self.num_microbatches).rank_end_s.max()) for one in set(replicas))
        return self.num_microbatches * max(_slowest(one) for one in replicas)

    def replicas(self, cuts: tuple[int, ...]) -> list[Replica]:
        return forward_costs(
            self.graph, self.cluster, self.training, self.num_microbatches, cuts=cuts, devices=self.devices
        )

    def memory(self, cuts: tuple[int, ...]) -> list[MemoryItems]:
        items = []
        for (first, last), (_, device) in zip(self.graph.bounds(cuts), self.rooms, strict=True):
            told = inference_memory(self.graph, first, last, samples=self.samples)
            items.append(on_device(told, device, overhead_bytes(device, self.num_stages)))
        return items

    def _hops(self, num_bytes: np.ndarray) -> np.ndarray:
        """[p, n + 1] seconds of what enters each stage, by where it begins."""
        hops = np.zeros((self.num_stages, len(num_bytes)))
        for s in range(1, self.num_stages):
            links = {self.cluster.link(a, b) for a, b in zip(self.devices[s - 1], self.devices[s], strict=True)}
            hops[s] = np.max([link_times(link, num_bytes) for link in links], axis=0)
        return hops

    def _measured(self, cuts: tuple[int, ...], hops: np.ndarray) -> tuple[float, float]:
        """(all stages and transfers one after the other, the slowest of them)."""
        before = self.graph.at(self.samples).forward_before_s
        edges = [0, *cuts, self.graph.num_layers]
        slicing_s = self.graph.slicing_s(self.num_stages)
        stages = [
            (float(before[edges[s + 1]] - before[edges[s]]) + slicing_s) / speed for s, speed in enumerate(self.speeds)
        ]
        moved = [float(hops[s, cut]) for s, cut in enumerate(cuts, start=1)]
        return sum(stages) + sum(moved), max(stages + moved)

    @cached_property
    def _starts(self) -> np.ndarray | None:
        """[p, n + 1] where each stage may begin."""
        graph = self.graph
        starts = stage_starts(
            graph.num_layers, self.num_stages, graph.allowed_cuts, pinned_positions(graph, self.training)
        )
        if starts is None:
            return None
        flags = np.zeros((self.num_stages, graph.num_layers + 1), dtype=np.bool_)
        for s in range(self.num_stages):
            flags[s, starts.positions(s)] = True
        return flags

    def _held(self, first: np.ndarray, last: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
        """Bytes of the layers [first, last); 0 where there are none."""
        inside = first < last
        told = inference_memory(self.graph, np.where(inside, first, 0), np.where(inside, last, 1), samples=self.samples)
        return np.where(inside, sum(np.ceil(told[name]) for name in names), 0.0)

    @cached_property
    def _near(self) -> list[np.ndarray]:
        """By stage, [n + 1] the smallest start that leaves room for each end, by what only grows with a stage."""
        known: dict[int, np.ndarray] = {}
        ends = np.arange(self.graph.num_layers + 1)
        for room in set(self.room):
            low, high = np.zeros_like(ends), ends.copy()
            while (open_ := low < high).any():
                middle = (low + high) // 2
                good = self._held(middle, np.where(open_, ends, 0), GROWING) <= room
                low, high = np.where(open_ & ~good, middle + 1, low), np.where(open_ & good, middle, high)
            known[room] = low
        return [known[room] for room in self.room]

    @cached_property
    def _pairs(self) -> list[np.ndarray]:
        """By stage, [n + 1, n + 1] whether the layers from one position to another fit."""
        at = np.arange(self.graph.num_layers + 1)
        held = self._held(*np.meshgrid(at, at, indexing="ij"), ITEMS)
        known = {room: held <= room for room in set(self.room)}
        return [known[room] for room in self.room]

    def _cheapest(self, cap: float, hops: np.ndarray) -> tuple[int, ...] | None:
        """Cuts with the least sum of stages and transfers, none over the cap; None: there are none that fit."""
        cuts = self._shortest(cap, hops, exactly=False)
        if cuts is None:
            return None
        edges = np.array([0, *cuts, self.graph.num_layers])
        if (self._held(edges[:-1], edges[1:], ITEMS) <= self.room).all():
            return cuts
        return self._shortest(cap, hops, exactly=True) if self.graph.num_layers <= MOST_PAIRED else None

    def _shortest(self, cap: float, hops: np.ndarray, exactly: bool) -> tuple[int, ...] | None:
        """`_cheapest` by windows of what has room; exactly: with every pair of positions looked at."""
        n, p, starts = self.graph.num_layers, self.num_stages, self._starts
        if starts is None:
            return None
        before, slicing_s = self.graph.at(self.samples).forward_before_s, self.graph.slicing_s(p)
        best = np.where(np.arange(n + 1) == 0, 0.0, math.inf)
        history = []
        for s, speed in enumerate(self.speeds):
            allowed = starts[s] & (hops[s] <= cap * (1 + 1e-12))
            base = np.where(allowed, best + hops[s], math.inf) - before / speed
            least = before - (cap * speed - slicing_s) * (1 + 1e-12) if cap < math.inf else np.full(n + 1, -math.inf)
            lows = np.maximum(np.searchsorted(before, least, side="left"), self._near[s])
            history.append((base, lows))
            if exactly:
                inside = self._pairs[s] & (np.arange(n + 1)[:, None] >= lows) & np.tri(n + 1, k=-1, dtype=np.bool_).T
                least = np.where(inside, base[:, None], math.inf).min(axis=0)
            else:
                least = window_minimum(base, lows, np.arange(len(base)))
            best = least + (before + slicing_s) / speed
        if not best[n] < math.inf:
            return None
        cuts, at = [], n
        for s in range(p - 1, -1, -1):
            base, lows = history[s]
            window = base[lows[at] : at]
            if exactly:
                window = np.where(self._pairs[s][lows[at] : at, at], window, math.inf)
            at = int(lows[at] + np.argmin(window))
            cuts.append(at)
        return tuple(reversed(cuts[:-1]))


def _slowest(replica: Replica) -> float:
    """Seconds of the slowest stage, or of all that goes over one wire: a wire is between two stages."""
    return max([one.forward_s for one in replica.stages] + [one.forward_s for one in replica.transfers])


def _baseline(graph: CostGraph, cluster: Cluster, training: Training) -> tuple[float, bool]:
    """(seconds of a batch on one device at its best micro-batch, whether it fits there)."""
    found = []
    for device in set(cluster.devices):
        for count in divisors(training.batch_size):
            samples = training.batch_size // count
            told = inference_memory(graph, 0, graph.num_layers, samples=samples)
            held = on_device(told, device, overhead_bytes(device)).total
            seconds = count * float(graph.at(samples).forward_s.sum()) / device.relative_speed
            found.append((held > memory_limit(device, training), seconds))
    unfit, seconds = min(found)
    return seconds, not unfit


def _plan(graph: CostGraph, found: list[Found], bound_s: float, unfit: list[Case]) -> Plan:
    best = found[0]
    case, cuts = best.case, best.cuts
    prediction = _predict(best)
    rank_of = numbered(case.devices, case.cluster)
    others: dict[tuple[int, int], Found] = {}
    for one in found[1:]:
        kind = one.case.num_stages, one.case.num_replicas
        if kind != (case.num_stages, case.num_replicas):
            others.setdefault(kind, one)
    return Plan(
        profile=graph.profile,
        cluster=case.cluster,
        training=case.training,
        mesh={"pp": case.num_stages, "dp": case.num_replicas},
        schedule="gpipe",
        num_microbatches=case.num_microbatches,
        stages=tuple(
            Stage(index=k, layers=layers, ranks=tuple(rank_of[device] for device in case.devices[k]))
            for k, layers in enumerate(graph.stage_ids(cuts))
        ),
        devices=tuple(rank_of),
        prediction=prediction,
        lower_bound_s=min(bound_s, prediction.step_s),
        runners_up=tuple(
            Alternative(
                mesh={"pp": one.case.num_stages, "dp": one.case.num_replicas},
                schedule="gpipe",
                num_microbatches=one.case.num_microbatches,
                stage_sizes=tuple(last - first for first, last in graph.bounds(one.cuts)),
                step_s=one.seconds,
                devices=one.case.devices,
                recompute=(False,) * one.case.num_stages,
            )
            for one in list(others.values())[:MOST_RUNNERS_UP]
        ),
        why=_reasons(best, prediction, unfit),
    )


def _predict(found: Found) -> Prediction:
    """All figures; lost efficiency as in training, without what only training has."""
    case, cuts, step_s = found.case, found.cuts, found.seconds
    graph, training, m = case.graph, case.training, case.num_microbatches
    replicas = case.replicas(cuts)
    work = np.array([[m * stage.forward_s for stage in one.stages] for one in replicas])
    if step_s <= 0:
        raise ArgumentError("every layer of this profile takes 0 s: measure it, or give costs, before planning with it")
    alone_s, fits = _baseline(graph, case.cluster, training)
    slowest = work.argmax(axis=0)
    moved = graph.transfers(cuts, case.samples)
    memory = case.memory(cuts)
    stages = tuple(
        StagePrediction(
            forward_s=replicas[r].stages[s].forward_s,
            backward_s=0.0,
            compute_s=float(work[r, s]),
            communication_s=0.0,
            idle_s=max(0.0, step_s - float(work[r, s])),
            send_bytes=math.ceil(sum(one.forward_bytes for one in moved if one.source == s)),
            in_flight=1,
            memory=memory[s],
        )
        for s, r in enumerate(slowest.tolist())
    )
    slicing_s = m * graph.slicing_s(case.num_stages) / min(case.speeds)
    largest_s = float(work.max())
    without_transfers_s = largest_s
    if training.objective == "latency":
        free = [Replica(one.stages, tuple(replace(t, forward_s=0.0) for t in one.transfers)) for one in replicas]
        without_transfers_s = max(float(forward_clock(one, m).rank_end_s.max()) for one in set(free))
    num_ranks = case.num_stages * case.num_replicas
    even_s = m * float(graph.at(case.samples).forward_s.sum()) / case.num_stages
    lost_s = {
        "communication": step_s - without_transfers_s,
        "fill_drain": without_transfers_s - largest_s,
        "slicing": slicing_s,
        "imbalance": largest_s - slicing_s - even_s,
        "small_microbatch": even_s - alone_s / num_ranks,
    }
    speedup = alone_s / step_s
    return Prediction(
        step_s=step_s,
        optimizer_s=0.0,
        throughput=training.batch_size / step_s,
        single_device_s=alone_s,
        single_device_fits=fits,
        speedup=speedup,
        efficiency=speedup / num_ranks,
        bubble_fraction=max(0.0, 1 - float(work.sum()) / (num_ranks * step_s)),
        stages=stages,
        lost=LostEfficiency(**{name: seconds / step_s for name, seconds in lost_s.items()}),
    )


def _reasons(found: Found, prediction: Prediction, unfit: list[Case]) -> tuple[str, ...]:
    case, graph = found.case, found.case.graph
    said = []
    if case.training.objective == "throughput":
        said.append("step_s is the time between batches that follow each other, not that of one batch")
    if case.num_stages > 1:
        work = [stage.forward_s for stage in prediction.stages]
        slowest = int(np.argmax(work))
        first, last = graph.bounds(found.cuts)[slowest]
        said.append(f"stage {slowest} ({graph.ids[first]} to {graph.ids[last - 1]}) is the slowest")
        if any(one.num_stages == 1 for one in unfit):
            said.append("the whole model does not fit the memory of one device, so it is cut into stages")
    used, there = case.num_stages * case.num_replicas, case.cluster.num_devices
    if used < there:
        said.append(f"{used} of {there} devices are used: more would not make it faster")
    return (*said, *about_costs(graph.profile))


def _shortage(graph: CostGraph, cluster: Cluster, training: Training) -> str:
    """The message of an InfeasibleError: what comes closest, what it lacks, and changes that were tried and fit."""
    cases = _roomiest(graph, cluster, training)
    closest = [(*found, case) for case in cases if (found := _closest(case)) is not None]
    lacking, cuts, case = min(closest, key=lambda one: one[0])
    memory = case.memory(cuts)
    limits = [memory_limit(device, training) for _, device in case.rooms]
    stage = max(range(case.num_stages), key=lambda k: memory[k].total - limits[k])
    device = case.rooms[stage][1]
    mesh = f"pp={case.num_stages}, dp={case.num_replicas}, {case.num_microbatches} micro-batch"
    mesh += "es" if case.num_microbatches > 1 else ""
    ways = []
    for name, value in (("microbatches", training.microbatches), ("mesh", training.mesh)):
        if value != "auto" and _fits(graph, cluster, training.model_copy(update={name: "auto"})):
            ways.append(f"{name}='auto'")
    if (more := _more_devices(graph, cluster, training)) is not None:
        ways.append(f"{more} such devices")
    ways.append(more_memory(cluster, training, limits[stage] + lacking))
    where = (stage, *graph.bounds(cuts)[stage])
    return told(graph, cluster, training, device, where, memory[stage], 1, mesh, ways)


def _roomiest(graph: CostGraph, cluster: Cluster, training: Training) -> list[Case]:
    """Of each number of stages (of many, powers of two and the most), the case with the smallest micro-batches."""
    smallest: dict[int, Case] = {}
    for case in _cases(graph, cluster, training):
        known = smallest.get(case.num_stages)
        if not isinstance(case.layout, AnyLayout) and (known is None or case.samples < known.samples):
            smallest[case.num_stages] = case
    most = max(smallest)
    return [case for p, case in smallest.items() if p <= FEW_STAGES or p == most or not p & (p - 1)]


def _fits(graph: CostGraph, cluster: Cluster, training: Training) -> bool:
    return any(case.fits() is not None for case in _roomiest(graph, cluster, training))


def _closest(case: Case) -> tuple[float, tuple[int, ...]] | None:
    """(bytes that its devices lack, cuts) of the split that lacks the least, to `SHORT`; None: pins allow no split."""

    def lacking(cuts: tuple[int, ...]) -> float:
        return float(max(memory.total - limit for memory, limit in zip(case.memory(cuts), limits, strict=True)))

    limits = [memory_limit(device, case.training) for _, device in case.rooms]
    crossing = float(case.graph.at(case.samples).crossing_bytes.max())
    whole = inference_memory(case.graph, 0, case.graph.num_layers, samples=case.samples)
    low, high = 0.0, sum(map(float, whole.values())) + 2 * crossing + 8 - min(0, *case.room)
    best = replace(case, extra_bytes=math.ceil(high)).fits()
    if best is None:  # with room for everything on every stage
        return None
    while high - low > SHORT * max(1.0, high + float(min(case.room))):
        middle = (low + high) / 2
        cuts = replace(case, extra_bytes=math.ceil(middle)).fits()
        if cuts is None:
            low = middle
        else:
            high, best = middle, cuts
    return max(1.0, lacking(best)), best


def _more_devices(graph: CostGraph, cluster: Cluster, training: Training) -> int | None:
    """The fewest devices, more ones like the last, that are enough; None: more do not help."""

    def enough(count: int) -> bool:
        return _fits(graph, with_devices(cluster, count), training)

    low = high = cluster.num_devices
    most = min(MOST_GROWTH * cluster.num_devices, len(graph.allowed_cuts) + 1)
    while high < most:
        low, high = high, min(2 * high, most)
        if enough(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if enough(middle) else (middle, high)
            return high
    return None
