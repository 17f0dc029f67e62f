"""Inference on equal pipelines: a mesh on some devices and a number of micro-batches, and the best of its cuts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from partitioner.clock import Replica
from partitioner.costs import forward_costs
from partitioner.graph import CostGraph
from partitioner.memory import inference_memory, memory_limit, on_device, overhead_bytes, room_bytes
from partitioner.plan import MemoryItems
from partitioner.solver.arrangement import Arranged, arranged
from partitioner.solver.forward_memory import Flags, Floats, ForwardMemory, Ints
from partitioner.solver.halving import CLOSE, PRECISION, halved
from partitioner.solver.layout import AnyLayout, Devices, Layout, Site
from partitioner.solver.settings import divisors, pinned_positions
from partitioner.solver.starts import Starts, stage_starts
from partitioner.solver.windows import Runs
from partitioner.solver.wires import link_times
from partitioner.specs import Cluster, Device, Training
from partitioner.split import Split
from partitioner.steady import forwards_s

NEARLY = 1e-3
"""Relative; how well the sum of stages is minimised where it only proposes cuts, since stages run side by side."""
ROUNDING = 1 + 1e-12

Cuts = tuple[int, ...]


class Shape(NamedTuple):
    """What is chosen before devices and cuts."""

    num_stages: int
    num_replicas: int
    num_microbatches: int
    samples: int
    """Of one micro-batch."""


class Work(NamedTuple):
    """Seconds of one micro-batch's forward at speed 1."""

    all_layers: float
    largest_layer: float
    longest_path: float
    """Through layers that wait for each other."""
    least_path: float
    """Of the longest path through a layer, over all layers."""


class Forwards:
    """What forward passes of a graph on a cluster can be, and what no plan for them can beat."""

    def __init__(self, graph: CostGraph, cluster: Cluster, training: Training) -> None:
        self.graph, self.cluster, self.training, self.site = graph, cluster, training, Site(cluster, training)
        self._work: dict[int, Work] = {}
        self._memory: dict[int, ForwardMemory] = {}
        self._starts: dict[int, Starts | None] = {}
        self._arranged: dict[tuple[int, int], Arranged] = {}

    def shapes(self) -> Iterator[Shape]:
        """Meshes of any of the devices, and counts of micro-batches that divide a replica's samples."""
        training, num_devices = self.training, self.cluster.num_devices
        fixed = {} if training.mesh == "auto" else dict(training.mesh)
        for dp in divisors(training.batch_size):
            if dp > num_devices or fixed.get("dp", dp) != dp:
                continue
            each = training.batch_size // dp
            counts = divisors(each) if training.microbatches == "auto" else [training.microbatches]
            for pp in range(1, min(len(self.graph.allowed_cuts) + 1, num_devices // dp) + 1):
                if fixed.get("pp", pp) == pp:
                    yield from (Shape(pp, dp, count, each // count) for count in counts if each % count == 0)

    def cases(self, shape: Shape) -> list[Case]:
        """Of every layout; one of an `AnyLayout` has a bound and nothing else."""
        mesh = shape.num_stages, shape.num_replicas
        if mesh not in self._arranged:
            self._arranged[mesh] = arranged(self.site, *mesh)
        found = self._arranged[mesh]
        return [Case(self, shape, layout) for layout in (*found.layouts, *found.others)]

    def bound_s(self, shape: Shape) -> float:
        """What no devices and cuts can beat: those that are `AnyLayout`'s."""
        pp, dp = shape.num_stages, shape.num_replicas
        paces = self.site.fastest[dp - 1 : pp * dp : dp]
        return self.least_s(shape, float(paces.sum()), float(self.site.fastest[0]))

    def least_s(self, shape: Shape, together: float, fastest: float) -> float:
        """What no cuts can beat: the work spread evenly over so much speed, no layer divided, and layers that wait for
        each other one after the other.

        Of micro-batches one after another the slowest stage has m, and one goes through it on some path of layers.
        """
        work, m = self.work(shape.samples), shape.num_microbatches
        slicing_s = self.graph.slicing_s(shape.num_stages) / fastest
        slowest = self.slowest_s(shape, together, fastest)
        if self.training.objective == "throughput":
            return m * slowest
        if shape.num_stages == 1 or self.in_line:
            return work.all_layers / fastest + shape.num_stages * slicing_s + (m - 1) * slowest
        through = max(work.least_path / fastest + slicing_s, slowest)
        return max(work.longest_path / fastest + slicing_s, through + (m - 1) * slowest)

    def slowest_s(self, shape: Shape, together: float, fastest: float) -> float:
        """What the slowest stage takes of a micro-batch at least."""
        work, slicing_s = self.work(shape.samples), self.graph.slicing_s(shape.num_stages) / fastest
        return max(work.all_layers / together, work.largest_layer / fastest) + slicing_s

    def value(self, through: float, slowest: float, m: int) -> float:
        """The objective where stages run one after the other: sum and largest of their times and their messages'."""
        return m * slowest if self.training.objective == "throughput" else through + (m - 1) * slowest

    @cached_property
    def in_line(self) -> bool:
        """Whether every layer before a cut hands something on: else stages can run beside each other."""
        return bool(self.graph.linked[list(self.graph.allowed_cuts)].all())

    def work(self, samples: int) -> Work:
        if samples not in self._work:
            forward_s = self.graph.at(samples).forward_s
            through = self.graph.paths(forward_s) if self.training.objective == "latency" else forward_s
            self._work[samples] = Work(
                float(forward_s.sum()), float(forward_s.max()), float(through.max()), float(through.min())
            )
        return self._work[samples]

    def memory(self, samples: int) -> ForwardMemory:
        if samples not in self._memory:
            self._memory[samples] = ForwardMemory(self.graph, samples)
        return self._memory[samples]

    def starts(self, num_stages: int) -> Starts | None:
        if num_stages not in self._starts:
            graph = self.graph
            pins = pinned_positions(graph, self.training)
            self._starts[num_stages] = stage_starts(graph.num_layers, num_stages, graph.allowed_cuts, pins)
        return self._starts[num_stages]


@dataclass(frozen=True, eq=False)
class Case:
    """A mesh on some devices and a number of micro-batches, with all that is to be cut."""

    among: Forwards
    shape: Shape
    layout: Layout
    extra_bytes: int = 0
    """That each device is taken to have more."""

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
        training, known = self.among.training, dict[int, tuple[int, Device]]()
        for one in self.among.cluster.devices:
            if id(one) not in known:
                known[id(one)] = room_bytes(one, memory_limit(one, training), self.shape.num_stages), one
        of = [known[id(one)] for one in self.among.cluster.devices]
        return [min((of[device] for device in row), key=lambda one: one[0]) for row in self.devices]

    @cached_property
    def room(self) -> list[int]:
        """Bytes that each stage's smallest device has room for."""
        return [room + self.extra_bytes for room, _ in self.rooms]

    @cached_property
    def bound_s(self) -> float:
        """What no cuts can beat."""
        together = self.layout.total_speed if isinstance(self.layout, AnyLayout) else sum(self.speeds)
        return self.among.least_s(self.shape, together, max(self.speeds))

    def solve(self, below_s: float) -> tuple[Found | None, float]:
        """(the best cuts, None where none are found that are below; what none can beat, at most `below_s`)."""
        if self.among.starts(self.shape.num_stages) is None or self._memory.hopeless(self.room):
            return None, below_s
        solve = self._most_served if self.among.training.objective == "throughput" else self._soonest
        proposed, bound_s = solve(below_s)
        found = [Found(self, cuts, self.seconds(cuts)) for cuts in dict.fromkeys(proposed)]
        best = min((one for one in found if one.seconds < below_s * (1 - CLOSE)), key=Found.rank, default=None)
        return best, min(bound_s, below_s if best is None else best.seconds)

    def _most_served(self, below_s: float) -> tuple[list[Cuts], float]:
        """The smallest largest of stages and messages, with the least of what a cut can cost, and with the most."""
        m = self.shape.num_microbatches
        handed, crossing = self._hops
        least_s, split = halved(self.bound_s / m, below_s / m, lambda cap: self._within(cap, handed))
        proposed = [] if split is None or not self._fit(split) else [split]
        if not (handed is crossing and proposed):
            _, split = halved(least_s, below_s / m, lambda cap: self._within(cap, crossing, surely=True))
            proposed += [] if split is None else [split]
        slowest = [self._measured(cuts, crossing)[1] for cuts in proposed]
        shortest = [self._cheapest(cap, crossing) for cap in slowest]  # of those as good, the least to send
        return proposed + [cuts for cuts in shortest if cuts is not None], m * least_s

    def _soonest(self, below_s: float) -> tuple[list[Cuts], float]:
        """The least sum of stages and messages under a cap on the slowest, over the cap."""
        handed, crossing = self._hops
        if self.shape.num_stages > 1 and not self.among.in_line:  # sums only propose
            ways = (crossing,) if handed is crossing else (handed, crossing)
            found = [self._halve(hops, math.inf, NEARLY, surely=True)[0] for hops in ways]
            return [cuts for cuts in found if cuts is not None], min(self.bound_s, below_s)
        cuts, bound_s = self._halve(handed, below_s, PRECISION)
        proposed = [] if cuts is None or not self._fit(cuts) else [cuts]
        if bound_s < below_s * (1 - CLOSE) and not (handed is crossing and proposed):
            cuts, _ = self._halve(crossing, below_s, PRECISION, surely=True)
            proposed += [] if cuts is None else [cuts]
        return proposed, bound_s

    def _halve(
        self, hops: list[Floats], below_s: float, precision: float, *, surely: bool = False
    ) -> tuple[Cuts | None, float]:
        """(cuts, what none can beat, at most `below_s`) with these messages alone: ranges of the slowest stage are
        halved until none can win."""
        m, objective = self.shape.num_microbatches, self.among.value
        best = self._cheapest(math.inf, hops, surely)
        if best is None:
            return None, below_s
        through, slowest = self._measured(best, hops)
        value, bound_s, low = objective(through, slowest, m), below_s, self._least_slowest_s
        ranges = [(objective(through, low, m), low, slowest, through)]
        while ranges:
            least, low, high, through = heapq.heappop(ranges)
            if least >= min(value, below_s) * (1 - precision) or high - low <= precision * high:
                bound_s = min(bound_s, least)
                continue
            middle = (low + high) / 2
            if (cuts := self._cheapest(middle, hops, surely)) is not None:
                here, slowest = self._measured(cuts, hops)
                if (other := objective(here, slowest, m)) < value:
                    best, value = cuts, other
                heapq.heappush(ranges, (objective(here, low, m), low, slowest, here))
            heapq.heappush(ranges, (objective(through, middle, m), middle, high, through))
        return best, min(bound_s, value)

    def fits(self) -> Cuts | None:
        """Cuts of which every stage fits; None: there are none."""
        if self.among.starts(self.shape.num_stages) is None or self._memory.hopeless(self.room):
            return None
        found = self._within(math.inf, self._hops[1], surely=True)
        return None if found is None else found[1]

    def seconds(self, cuts: Cuts) -> float:
        """The objective of these cuts: by the clock, or the slowest stage or transfer."""
        replicas, m = set(self.replicas(cuts)), self.shape.num_microbatches
        if self.among.training.objective == "latency":
            return max(forwards_s(one, m) for one in replicas)
        return m * max(_slowest(one) for one in replicas)

    def split(self, cuts: Cuts) -> Split:
        return Split(cuts, self.devices, self.shape.num_microbatches, "gpipe")

    def replicas(self, cuts: Cuts) -> list[Replica]:
        return forward_costs(self.among.graph, self.among.cluster, self.among.training, self.split(cuts))

    def memory(self, cuts: Cuts) -> list[MemoryItems]:
        items, graph = [], self.among.graph
        for (first, last), (_, device) in zip(graph.bounds(cuts), self.rooms, strict=True):
            told = inference_memory(graph, first, last, samples=self.shape.samples)
            items.append(on_device(told, device, overhead_bytes(device, self.shape.num_stages)))
        return items

    @property
    def _memory(self) -> ForwardMemory:
        return self.among.memory(self.shape.samples)

    @property
    def _least_slowest_s(self) -> float:
        return self.among.slowest_s(self.shape, sum(self.speeds), max(self.speeds))

    @cached_property
    def _hops(self) -> tuple[list[Floats], list[Floats]]:
        """By stage, [n + 1] seconds of what enters it, by where it begins: of what the layer before it hands to the one
        after it alone, and of everything alive there. One list where that is the same."""
        costs, site, p = self.among.graph.at(self.shape.samples), self.layout.site, self.shape.num_stages
        places = np.arange(p)
        apart = np.array([self.layout.apart(line, places[:-1], places[1:]) for line in range(self.layout.num_lines)])
        both = []
        for num_bytes in (costs.next_bytes, costs.crossing_bytes):
            within, between = link_times(site.intra, num_bytes), link_times(site.inter, num_bytes)
            ways = {(False,): within, (True,): between, (False, True): np.maximum(within, between)}
            both.append([np.zeros(len(num_bytes))] + [ways[tuple(sorted(set(some)))] for some in apart.T.tolist()])
        same = np.array_equal(costs.next_bytes, costs.crossing_bytes)
        return both[0], both[0] if same else both[1]

    def _measured(self, cuts: Cuts, hops: list[Floats]) -> tuple[float, float]:
        """(all stages and transfers one after the other, the slowest of them)."""
        graph = self.among.graph
        work_s = np.diff(graph.at(self.shape.samples).forward_before_s[[0, *cuts, graph.num_layers]])
        stages = (work_s + graph.slicing_s(self.shape.num_stages)) / np.array(self.speeds)
        moved = [float(hops[s][cut]) for s, cut in enumerate(cuts, start=1)]
        return float(stages.sum()) + sum(moved), max([float(stages.max()), *moved])

    def _fit(self, cuts: Cuts) -> bool:
        edges = np.array([0, *cuts, self.among.graph.num_layers])
        return bool((self._memory.held(edges[:-1], edges[1:]) <= self.room).all())

    def _within(self, cap: float, hops: list[Floats], surely: bool = False) -> tuple[float, Cuts] | None:
        """(the slowest, cuts) with no stage or message over the cap; None: there are none that fit."""
        cuts = self._fitting(self._reached, cap, hops, surely)
        return None if cuts is None else (self._measured(cuts, hops)[1], cuts)

    def _cheapest(self, cap: float, hops: list[Floats], surely: bool = False) -> Cuts | None:
        """Cuts with the least sum of stages and messages, none over the cap; None: there are none that fit."""
        return self._fitting(self._shortest, cap, hops, surely)

    def _fitting(self, look: Look, cap: float, hops: list[Floats], surely: bool) -> Cuts | None:
        """What is found by what only grows with a stage; where that does not fit, by all that a stage holds. Not
        `surely`: where too much would have to be looked at for that, cuts that may not fit, and no others do better."""
        since = {speed: self._since(cap, speed) for speed in set(self.speeds)}
        kinds = set(self._kinds)
        of_kind = {kind: Runs.of(np.maximum(self._memory.near(kind[1]), since[kind[0]])) for kind in kinds}
        cuts = look(cap, hops, of_kind)
        if cuts is None or self._fit(cuts):
            return cuts
        complete = True
        for kind in kinds:
            runs, all_ = self._runs(kind, since[kind[0]])
            of_kind[kind], complete = runs.since(since[kind[0]]), complete and all_
        return look(cap, hops, of_kind) if complete or surely else cuts

    def _since(self, cap: float, speed: float) -> Ints:
        """By end, the first start of a stage that takes no longer than the cap."""
        graph = self.among.graph
        before = graph.at(self.shape.samples).forward_before_s
        if cap == math.inf:
            return np.zeros(len(before), dtype=np.int64)
        most = (cap * speed - graph.slicing_s(self.shape.num_stages)) * ROUNDING
        return np.searchsorted(before, before - most, side="left")

    def _runs(self, kind: Kind, since: Ints) -> tuple[Runs, bool]:
        """`ForwardMemory.runs`, from the first starts asked for yet."""
        known = self._known_runs.get(kind)
        if known is None or (since < known[0]).any():
            known = since, *self._memory.runs(kind[1], since)
            self._known_runs[kind] = known
        return known[1:]

    @cached_property
    def _known_runs(self) -> dict[Kind, tuple[Ints, Runs, bool]]:
        return {}

    @cached_property
    def _kinds(self) -> list[Kind]:
        """By stage."""
        return list(zip(self.speeds, self.room, strict=True))

    @cached_property
    def _cuttable(self) -> Flags:
        """By position, whether a stage may begin there."""
        flags: Flags = np.zeros(self.among.graph.num_layers + 1, dtype=np.bool_)
        flags[[0, *self.among.graph.allowed_cuts]] = True
        return flags

    def _begins(self, s: int, first: int, last: int, cap: float, hops: list[Floats]) -> Flags:
        """Of the positions [first, last), where stage s may begin."""
        starts = self.among.starts(self.shape.num_stages)
        assert starts is not None, "asked before"
        flags: Flags = self._cuttable[first:last] & (hops[s][first:last] <= cap * ROUNDING)
        flags[: max(0, starts.low[s] - first)] = False
        flags[max(0, starts.high[s] + 1 - first) :] = False
        return flags

    def _reached(self, cap: float, hops: list[Floats], runs: dict[Kind, Runs]) -> Cuts | None:
        """Any cuts: where each stage can begin, one after the other, O(n p), and from the end back the latest.

        Looked at are only positions that are not too early for the stages still to come, and not too far.
        """
        p, n = self.shape.num_stages, self.among.graph.num_layers
        least = [n] * (p + 1)  # before it, a boundary is too early
        for s in range(p - 1, -1, -1):
            if (low := int(runs[self._kinds[s]].lows[least[s + 1]])) > n:
                return None
            least[s] = low
        if least[0] > 0:
            return None
        first, reached = 0, np.ones(1, dtype=np.bool_)
        history: list[tuple[int, Flags]] = []
        for s, kind in enumerate(self._kinds):
            last = first + len(reached)
            begins = reached & self._begins(s, first, last, cap, hops)
            history.append((first, begins))
            furthest = int(np.searchsorted(runs[kind].lows, last - 1, side="right"))
            since = max(least[s + 1], first + 1)
            if since >= furthest:
                return None
            reached = runs[kind].reached(begins, first, since, furthest)
            first = since
        if not reached[n - first]:
            return None
        cuts, at = [], n
        for kind, (first, begins) in zip(reversed(self._kinds), reversed(history), strict=True):
            places = runs[kind].places(at)
            places = places[(places >= first) & (places < first + len(begins))]
            at = int(places[begins[places - first]][-1])
            cuts.append(at)
        return tuple(reversed(cuts[:-1]))

    def _shortest(self, cap: float, hops: list[Floats], runs: dict[Kind, Runs]) -> Cuts | None:
        """Those of the least sum, O(p n log n):

        best[s][j] = min over starts i of  best[s - 1][i] + message into i + seconds of [i, j)
        """
        graph = self.among.graph
        n, slicing_s = graph.num_layers, graph.slicing_s(self.shape.num_stages)
        before = graph.at(self.shape.samples).forward_before_s
        best = np.where(np.arange(n + 1) == 0, 0.0, math.inf)
        history: list[tuple[Kind, Floats]] = []
        for s, kind in enumerate(self._kinds):
            begins = self._begins(s, 0, n + 1, cap, hops)
            base = np.where(begins, best + hops[s] - before / kind[0], math.inf)
            history.append((kind, base))
            best = runs[kind].least(base) + (before + slicing_s) / kind[0]
        if not best[n] < math.inf:
            return None
        cuts, at = [], n
        for kind, base in reversed(history):
            places = runs[kind].places(at)
            at = int(places[np.argmin(base[places])])
            cuts.append(at)
        return tuple(reversed(cuts[:-1]))


Kind = tuple[float, int]
"""Of a stage: its speed, its room."""
Look = Callable[[float, list[Floats], dict[Kind, Runs]], Cuts | None]


def _slowest(replica: Replica) -> float:
    """Seconds of the slowest stage, or of all that goes over one wire: a wire is between two stages."""
    return max([one.forward_s for one in replica.stages] + [one.forward_s for one in replica.transfers])


class Found(NamedTuple):
    case: Case
    cuts: Cuts
    seconds: float

    @property
    def kind(self) -> tuple[int, int]:
        """Stages and replicas: what makes a different plan."""
        return self.case.shape[:2]

    def rank(self) -> tuple[float, int, int, int, Cuts]:
        """Order of preference."""
        shape = self.case.shape
        seconds = float(f"{self.seconds:.9e}")
        return seconds, shape.num_stages, shape.num_microbatches, self.case.layout.number, self.cuts
