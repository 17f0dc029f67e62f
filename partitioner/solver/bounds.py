"""Seconds that no split of a setting can beat, found without looking at splits one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from partitioner.solver.chain import TOLERANCE, Chain, Leaner, Lines, smallest_bottleneck
from partitioner.solver.evaluate import Replayer
from partitioner.solver.layout import AnyLayout
from partitioner.solver.limits import Floats, Limits
from partitioner.solver.settings import Setting
from partitioner.solver.starts import Starts
from partitioner.solver.wires import link_times, sync_share
from partitioner.specs import EXCHANGES, Link, Shard

PRECISION = 1e-6
"""Relative, of bounds that are bisected."""
SMALL = 20_000
"""Layers x stages up to which every bound is worked out; in larger ones some that seldom decide are left out."""


class Lane(NamedTuple):
    """One replica: its stages' speeds, and the least seconds of the wires into each stage, 0 into stage 0."""

    speeds: Floats
    there_s: Floats
    back_s: Floats
    total: float
    """Speed of all its devices together, at most."""
    slowest: float
    """Speed of its slowest device, at least."""
    more_s: float
    """Seconds that its wires take on top, wherever they are."""
    apart_s: float
    """No split in which some stage does not wait for the one before it is done sooner; inf: there is none."""

    @property
    def hops_s(self) -> Floats:
        """[p] there and back, of this and all boundaries before."""
        hops: Floats = np.cumsum(self.there_s + self.back_s)
        return hops


class Bounds:
    """Lower bounds of step + optimizer over all splits of one setting that leave room. p stages, m micro-batches:

        F_s, B_s  seconds of a micro-batch on stage s, C_s = F_s + B_s, and of the wires into it
        S         sum of all C and of all wires: one micro-batch's way there and back;  S_s  the part from stage s on

        busy      m max C                       a stage does its own work, one action at a time
        path      S + (m - 1) max(F, B, wire)   some stage's m forwards (or backwards), with one micro-batch's way
                                                before and after them; gpipe: S + (m - 1) max(max F + max B, max C)
        place     S - S_s + m C_s               the first forward's way to stage s, its work, the last backward's way
        rounds    S + j S_s + (m - 1 - j h) C_s     1f1b only, for 1 <= j <= (m - 1) / h, h micro-batches in flight

    `rounds`: on stage s, backward k comes before forward k + h. From forward k until backward k is over takes S_s, and
    the stage does at most h forwards and h backwards then. Put j + 1 such rounds one after the other, from forward 0,
    h, 2 h, ..., and from the last forward; what they leave out, m - 1 - j h of each kind, comes on top.

    `place` and `rounds` hold for every s, and the largest counts. All but `busy` need every stage to wait for the one
    before it. Where two stages meet that do not, they are small (`graph.unlinked`), and the p - 2 others have the rest
    of the work: what that takes bounds such splits, and the lower of the two bounds all. Stage 0 ends last, so its sync
    adds to them: it has the layers before the first possible cut. Every stage's own sync follows its own work. The
    optimizer takes least when all devices finish theirs together. What a stage does to save memory adds to its own
    work, and is left out of the others' in all of them. Whatever its replicas divide, from its last backward on they
    exchange at least as much as an all-reduce of its gradients does.

    Under a schedule with several stages a rank, or a backward in two parts, only a rank's work and one micro-batch's
    forward way count.
    """

    def __init__(
        self, replayer: Replayer, starts: Starts, limits: Limits | None, leaner: tuple[Leaner, ...] = ()
    ) -> None:
        self.replayer, self.starts, self.limits, self.leaner = replayer, starts, limits, leaner

    def quick(self) -> float:
        """In O(n), from sums and the largest layer."""
        costs, m, p = self.replayer.costs, self.setting.num_microbatches, self.setting.num_stages
        bound, exchanged_s, exchange_s = 0.0, self._exchanged_s, self._exchange_s
        for lane in self._lanes:
            speed = lane.speeds
            total, fastest = lane.total, float(speed.max())
            forward = max(float(costs.forward_s.sum()) / total, float(costs.forward_s.max()) / fastest)
            backward = max(float(costs.backward_s.sum()) / total, float(costs.backward_s.max()) / fastest)
            both = max(float(costs.before_s[-1]) / total, float((costs.forward_s + costs.backward_s).max()) / fastest)
            bound = max(bound, m * both, (m * float(costs.before_s[-1]) + lane.slowest * exchanged_s) / total)
            if p > 1:
                if self._simple:
                    way = float(costs.before_s[-1]) / fastest + float(lane.hops_s[-1]) + lane.more_s + exchange_s
                    bound = max(bound, min(lane.apart_s, way + (m - 1) * max(forward, backward)))
                elif lane.apart_s == math.inf:
                    bound = max(bound, float(costs.forward_before_s[-1]) / fastest + float(np.sum(lane.there_s)))
        return bound + self._optimizer_s

    def tight(self, target_s: float = math.inf) -> float:
        """All of the above, at their minima over splits; no more than `target_s` where they reach it. A few dozen walks
        of O(p log n), one where the target decides."""
        if not self._simple:
            return self.quick()
        m, p, schedule = self.setting.num_microbatches, self.setting.num_stages, self.setting.schedule
        if target_s < math.inf and p > 1:
            inner_s = target_s - self._optimizer_s
            if any(not self._possible(inner_s, lane) for lane in self._lanes):
                return target_s
        before_s, forward_before_s = self.replayer.costs.before_s, self.replayer.costs.forward_before_s
        bound, thorough = self.quick() - self._optimizer_s, len(before_s) * p <= SMALL
        for lane in self._lanes:
            slowest = smallest_bottleneck(self.chain(lane), precision=0.0 if thorough else PRECISION)
            if slowest == math.inf:
                return math.inf
            bound = max(bound, m * slowest)
            if bound < lane.apart_s:
                forward = self._bottleneck(forward_before_s, lane) if thorough else 0.0
                backward = self._bottleneck(before_s - forward_before_s, lane) if thorough else 0.0
                again = max(forward, backward, float(lane.there_s.max()), float(lane.back_s.max()))
                way = float(before_s[-1]) / float(lane.speeds.max()) + float(lane.hops_s[-1]) + lane.more_s
                if schedule == "gpipe":
                    again = max(forward + backward, slowest, again)
                bound = max(bound, min(lane.apart_s, way + (m - 1) * again + self._first_sync_s))
                if p > 1:
                    bound = max(bound, min(lane.apart_s, self._placed(bound, lane)))
        return bound * (1 - 10 * TOLERANCE) + self._optimizer_s

    def windows(self, total_s: float) -> Lines:
        """What each stage must keep to for the step not to take longer than `total_s`, by its place in the schedule.

        Splits within them are not sure to take so little; but they give each stage what its place in the schedule can
        bear, which an equal bottleneck for all does not.
        """
        every = [self._lines_within(total_s - self._optimizer_s, lane) for lane in self._lanes]
        return [tuple(line for lines in of_stage for line in lines) for of_stage in zip(*every, strict=True)]

    @property
    def setting(self) -> Setting:
        return self.replayer.setting

    @cached_property
    def _simple(self) -> bool:
        """Whether the bounds of whole backwards, one stage a rank, hold."""
        return self.setting.schedule in ("gpipe", "1f1b") and self.setting.stages_per_rank == 1

    @cached_property
    def _apart_work_s(self) -> float:
        """The most that two stages in a row can have to do if the second does not wait for the first; 0: all do."""
        first, last = (positions[self.starts.possible] for positions in self.replayer.graph.unlinked)
        before_s = self.replayer.costs.before_s
        return float((before_s[last] - before_s[first]).max(initial=0.0))

    def _apart_s(self, speeds: Floats, total: float) -> float:
        if not self._apart_work_s:
            return math.inf
        if not self._simple:
            return 0.0
        others = min(total, float(np.sort(speeds)[2:].sum()))
        left = float(self.replayer.costs.before_s[-1]) * (1 - TOLERANCE) - self._apart_work_s
        if left <= 0:
            return 0.0
        return self.setting.num_microbatches * left / others if others else math.inf

    @cached_property
    def _optimizer_s(self) -> float:
        graph = self.replayer.graph
        if not graph.trainable_elements(0, graph.num_layers):
            return 0.0
        return self.replayer.optimizer_s / self.replayer.layout.total_speed

    def chain(self, lane: Lane) -> Chain:
        """The stages' own work, within memory, without wires."""
        nothing = np.zeros(self.starts.num_layers + 1)
        speeds, p = tuple(lane.speeds.tolist()), self.setting.num_stages
        return Chain(self.replayer.costs.before_s, speeds, self.starts, [nothing] * p, self.limits, self.leaner)

    def _bottleneck(self, prefix_s: Floats, lane: Lane) -> float:
        hops = [prefix_s] * self.setting.num_stages  # not looked at
        return smallest_bottleneck(Chain(prefix_s, tuple(lane.speeds.tolist()), self.starts, hops))

    @cached_property
    def _lanes(self) -> list[Lane]:
        """By replica. What is handed from layer to layer at a cut goes over the wire whatever else is cut."""
        costs, layout, p = self.replayer.costs, self.replayer.layout, self.setting.num_stages
        at = self.starts.possible
        least: dict[bool, tuple[float, float]] = {}
        for apart, link in ((False, layout.site.intra), (True, layout.site.inter)):
            least[apart] = 0.0, 0.0
            if len(at) and list(link.seconds) == sorted(link.seconds):  # more bytes never take less time
                there_s, back_s = (
                    link_times(link, costs.next_bytes[at]),
                    link_times(link, costs.next_gradient_bytes[at]),
                )
                least[apart] = float(there_s.min()), float(back_s.min())
        if isinstance(layout, AnyLayout):
            least[False] = min(least[False][0], least[True][0]), min(least[False][1], least[True][1])
        more_s = max(0.0, sum(least[True]) - sum(least[False]))
        lanes, places = [], self.replayer.places
        for number, speeds in enumerate(self.replayer.speeds):
            crosses = layout.apart(number, places[:-1], places[1:])
            there_s, back_s = (
                np.concatenate(([0.0], np.where(crosses, least[True][k], least[False][k]))) for k in (0, 1)
            )
            total, slowest = layout.line_speeds[number], layout.slowest[number]
            more, apart_s = layout.crossings(number) * more_s, self._apart_s(speeds, total)
            lanes.append(Lane(speeds, there_s[:p], back_s[:p], total, slowest, more, apart_s))
        return lanes

    @cached_property
    def _first_sync_s(self) -> float:
        if self.setting.num_stages == 1:
            return min(map(min, self.replayer.whole_sync_s.values()))
        first = self.starts.low[1]
        graph = self.replayer.graph
        num_bytes, replicas = float(graph.trainable_bytes(0, first)), self.setting.num_replicas
        return min(link.all_reduce_time(num_bytes, replicas) for link in self.replayer.layout.sync_links)

    @cached_property
    def _exchanged_s(self) -> float:
        """Seconds that all stages of a replica together exchange with others in a step, at least."""
        if self.setting.num_replicas == 1:
            return 0.0
        found, m = [], self.setting.num_microbatches
        for level in self.replayer.levels:
            if self.setting.num_stages == 1:
                step_s = min(self.replayer.whole_sync_s[level])
            else:
                step_s = self._least_s(0, round(2 * sync_share(level)))
            found.append(step_s + m * self._each_s(level))
        return min(found)

    def _least_s(self, num_weights: int, num_gradients: int) -> float:
        """Seconds that all stages of a replica together need at least to gather or scatter all so often."""
        graph, replicas = self.replayer.graph, self.setting.num_replicas
        total = num_weights * float(graph.weight_bytes(0, graph.num_layers))
        total += num_gradients * float(graph.trainable_bytes(0, graph.num_layers))
        return min((replicas - 1) / replicas * total * least_rate(link) for link in self.replayer.layout.sync_links)

    @cached_property
    def _exchange_s(self) -> float:
        """The same of one micro-batch, where none of it is told as sync."""
        return min(map(self._each_s, self.replayer.levels))

    def _each_s(self, level: Shard) -> float:
        if level == "none":
            return 0.0
        return self._least_s(EXCHANGES[level].microbatch_gathers, EXCHANGES[level].microbatch_scatters)

    def _placed(self, bound: float, lane: Lane) -> float:
        """The bounds that depend on a stage's place; `bound` where that is larger."""
        if self._possible(bound, lane):
            return bound
        low, high = bound, bound * (1 + 1e-3)
        while not self._possible(high, lane):
            low, high = high, high + 4 * (high - low)
        while high - low > PRECISION * low:
            middle = (low + high) / 2
            if self._possible(middle, lane):
                high = middle
            else:
                low = middle
        return low

    def _possible(self, bound: float, lane: Lane) -> bool:
        """Whether stages that keep the bounds of their places reach the end."""
        bound *= 1 + TOLERANCE
        chain, layout, synced = self._chains[id(lane)], self.replayer.layout, self._synced(bound, lane)
        if isinstance(layout, AnyLayout) and len(kinds := layout.kinds_of_pace) > 1:
            each = [np.full(self.setting.num_stages, pace) for pace, _ in kinds]
            lines = [self._lines_within(bound, lane, own) for own in each]
            return chain.some_order_reaches([(n, some) for (_, n), some in zip(kinds, lines, strict=True)], synced)
        return chain.furthest(self._lines_within(bound, lane), synced) is not None

    @cached_property
    def _chains(self) -> dict[int, Chain]:
        return {id(lane): self.chain(lane) for lane in self._lanes}

    def _lines_within(self, bound: float, lane: Lane, own: Floats | None = None) -> Lines:
        """By stage, (a, b): what it does must be done a + b x into the work of all layers when it starts at x.

        own: speeds at which each stage does its own work, where these are not those of the lane.
        """
        m, p, speeds = self.setting.num_microbatches, self.setting.num_stages, lane.speeds
        own = speeds if own is None else own
        ones = np.ones(p)
        found = [(bound * own / m, ones)]
        if p > 1 and bound < lane.apart_s:
            left = bound - self._first_sync_s
            before = np.concatenate((speeds[:1], np.maximum.accumulate(speeds)[:-1]))  # the fastest of those before
            before = np.maximum(before, own / m)  # a later start must not end earlier
            found.append((own * (left - lane.hops_s) / m, 1 - own / (m * before)))
            total = float(self.replayer.costs.before_s[-1])
            way = self._through_s(bound / m, lane) + float(lane.hops_s[-1]) + lane.more_s
            if self.setting.schedule == "gpipe":
                if m > 1:
                    found.append((own * (left - way) / (m - 1), ones))
            elif m > 1:
                held = np.minimum(p - np.arange(p), m)
                after = np.maximum.accumulate(speeds[::-1])[::-1]  # the fastest from here on
                rest = total / after + lane.hops_s[-1] - lane.hops_s
                most = (m - 1) // held
                most -= most * held == m - 1  # at least one backward is left over
                for j in (np.minimum(1, most), most):
                    times = np.maximum(m - 1 - j * held, 1)
                    a = np.where(j > 0, own * (left - way - j * rest) / times, math.inf)
                    b = np.where(j > 0, 1 + own * j / (after * times), 0.0)
                    found.append((a, b))
        stacked = np.array([np.column_stack(pair) for pair in found]).transpose(1, 0, 2)
        lines: Lines = stacked.tolist()
        return lines

    def _through_s(self, longest: float, lane: Lane) -> float:
        """Seconds of all layers one after the other, at least, where no stage takes more than `longest` for its own."""
        total, layout = float(self.replayer.costs.before_s[-1]), self.replayer.layout
        if not isinstance(layout, AnyLayout):
            return total / float(lane.speeds.max())
        seconds, left = 0.0, total  # the fastest devices do as much as they may
        for speed, pace in zip(layout.site.fastest.tolist(), layout.paces.tolist(), strict=False):
            work = min(left, longest * pace)
            seconds, left = seconds + work / speed, left - work
        return seconds

    def _synced(self, bound: float, lane: Lane) -> Callable[[int, int, int], int] | None:
        """How far a stage can go if it is to sync its gradients after its work and be done in time."""
        if self.setting.num_replicas == 1:
            return None
        costs, m, graph = self.replayer.costs, self.setting.num_microbatches, self.replayer.graph
        (before, forward), speeds = costs.lists, lane.speeds.tolist()
        fastest = np.maximum.accumulate(lane.speeds).tolist()
        links, replicas = list(self.replayer.layout.sync_links), self.setting.num_replicas
        num_bytes, trainable = graph.trainable_bytes.prefix_list, graph.trainable_bytes

        def synced(stage: int, start: int, end: int) -> int:
            room = bound - forward[start] / fastest[stage]

            def late(last: int) -> bool:
                own: float = (
                    num_bytes[last] - num_bytes[start] if num_bytes is not None else float(trainable(start, last))
                )
                sync_s = min(link.all_reduce_time(own, replicas) for link in links)
                return bool((before[last] - before[start]) * m / speeds[stage] + sync_s > room)

            if end == start or not late(end):
                return end
            low, high = start, end  # not late, late
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if late(middle) else (middle, high)
            return low

        return synced


def least_rate(link: Link) -> float:
    """The least seconds a byte, at any size."""
    points = [(size, seconds) for size, seconds in zip(link.sizes_bytes, link.seconds, strict=True) if size]
    (size, seconds), (larger, longer) = list(zip(link.sizes_bytes, link.seconds, strict=True))[-2:]
    beyond = max(0.0, (longer - seconds) / (larger - size))
    return min([beyond, *(seconds / size for size, seconds in points)])
