"""Seconds that no split of a setting can beat, found without looking at splits one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from partitioner.schedule import in_flight
from partitioner.solver.chain import TOLERANCE, Chain, covered_by, smallest_bottleneck
from partitioner.solver.evaluate import Replayer, all_reduce_times, link_times
from partitioner.solver.limits import Flags, Floats, Ints, Limits
from partitioner.solver.settings import Setting
from partitioner.specs import Link

PRECISION = 1e-5
"""Relative, of bounds that are bisected."""


class Line(NamedTuple):
    """One replica: its stages' speeds, and the least seconds of the wires into each stage, 0 into stage 0."""

    speeds: Floats
    there_s: Floats
    back_s: Floats

    @property
    def hops_s(self) -> Floats:
        """[p] there and back, of this and all boundaries before."""
        hops: Floats = np.cumsum(self.there_s + self.back_s)
        return hops


@dataclass(frozen=True)
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
    before it (`graph.linked`). Stage 0 ends last, so its sync adds to them: it has the layers before the first possible
    cut. Every stage's own sync follows its own work. The optimizer takes least when all devices finish theirs together.
    """

    replayer: Replayer
    starts: Flags
    limits: Limits | None

    def quick(self) -> float:
        """In O(n), from sums and the largest layer."""
        costs, m, p = self.replayer.costs, self.setting.num_microbatches, self.setting.num_stages
        bound = 0.0
        for speed in self._speeds:
            total, fastest = float(speed.sum()), float(speed.max())
            forward = max(float(costs.forward_s.sum()) / total, float(costs.forward_s.max()) / fastest)
            backward = max(float(costs.backward_s.sum()) / total, float(costs.backward_s.max()) / fastest)
            both = max(float(costs.before_s[-1]) / total, float((costs.forward_s + costs.backward_s).max()) / fastest)
            bound = max(bound, m * both)
            if p > 1 and self._in_line:
                bound = max(bound, float(costs.before_s[-1]) / fastest + (m - 1) * max(forward, backward))
        return bound + self._optimizer_s

    def tight(self, target_s: float = math.inf) -> float:
        """O(p n log n): all of the above, at their minima over splits; no more than `target_s` where they reach it."""
        m, p, schedule = self.setting.num_microbatches, self.setting.num_stages, self.setting.schedule
        before_s, forward_before_s = self.replayer.costs.before_s, self.replayer.costs.forward_before_s
        bound = 0.0
        for line, speeds in zip(self._lines, self._speeds, strict=True):
            slowest = self._bottleneck(before_s, speeds, self.limits)
            if slowest == math.inf:
                return math.inf
            bound = max(bound, m * slowest)
            if self._in_line:
                forward = self._bottleneck(forward_before_s, speeds)
                backward = self._bottleneck(before_s - forward_before_s, speeds)
                again = max(forward, backward, float(line.there_s.max()), float(line.back_s.max()))
                way = float(before_s[-1]) / float(speeds.max()) + float(line.hops_s[-1])
                if schedule == "gpipe":
                    bound = max(bound, way + (m - 1) * max(forward + backward, slowest, again) + self._first_sync_s)
                else:
                    bound = max(bound, way + (m - 1) * again + self._first_sync_s)
                if p > 1:
                    bound = self._placed(bound, line, target_s - self._optimizer_s)
        return bound * (1 - 10 * TOLERANCE) + self._optimizer_s

    def windows(self, total_s: float) -> list[Ints]:
        """By stage: for each end the smallest start from which a stage could still keep within `total_s`.

        Splits within them are not sure to take so little; but they give each stage what its place in the schedule can
        bear, which an equal bottleneck for all does not.
        """
        n, bound = self.replayer.graph.num_layers, total_s - self._optimizer_s
        positions, nearest = np.arange(n), []
        for s in range(self.setting.num_stages):
            every = [self._ends(s, positions, bound, line) for line in self._lines]
            ends = np.maximum.accumulate(np.minimum.reduce(every))
            nearest.append(np.minimum(np.searchsorted(ends, np.arange(n + 1), side="left"), np.arange(n + 1)))
        return nearest

    @property
    def setting(self) -> Setting:
        return self.replayer.setting

    @cached_property
    def _in_line(self) -> bool:
        return bool(self.replayer.graph.linked[self.starts[1:].any(axis=0)].all())

    @cached_property
    def _speeds(self) -> list[Floats]:
        devices = self.replayer.cluster.devices
        return [np.array([devices[rank].relative_speed for rank in ranks]) for ranks in self.replayer.replicas]

    @cached_property
    def _optimizer_s(self) -> float:
        graph = self.replayer.graph
        if not graph.trainable_elements(0, graph.num_layers):
            return 0.0
        return graph.profile.optimizer_s / min(float(speeds.sum()) for speeds in self._speeds)

    def _bottleneck(self, prefix_s: Floats, speeds: Floats, limits: Limits | None = None) -> float:
        hops = np.zeros(self.starts.shape)
        return smallest_bottleneck(Chain(prefix_s, tuple(speeds.tolist()), self.starts, hops, limits))

    @cached_property
    def _lines(self) -> list[Line]:
        """By replica. What is handed from layer to layer at a cut goes over the wire whatever else is cut."""
        costs, cluster = self.replayer.costs, self.replayer.cluster
        times: dict[Link, tuple[Floats, Floats]] = {}
        lines = []
        for ranks, speeds in zip(self.replayer.replicas, self._speeds, strict=True):
            line = Line(speeds, np.zeros(len(ranks)), np.zeros(len(ranks)))
            for s in range(1, len(ranks)):
                link, at = cluster.link(ranks[s - 1], ranks[s]), self.starts[s]
                if list(link.seconds) == sorted(link.seconds):  # more bytes never take less time
                    if link not in times:
                        back_s = link_times(link, costs.next_gradient_bytes)
                        times[link] = link_times(link, costs.next_bytes), back_s
                    line.there_s[s], line.back_s[s] = (float(time[at].min()) for time in times[link])
            lines.append(line)
        return lines

    @cached_property
    def _first_sync_s(self) -> float:
        first = int(np.argmax(self.starts[1])) if self.setting.num_stages > 1 else self.replayer.graph.num_layers
        return float(self._sync_s(np.array([0]), np.array([first]))[0])

    @cached_property
    def _sync_links(self) -> set[Link]:
        return {self.replayer.cluster.slowest_link(ranks) for ranks in self.setting.ranks}

    def _sync_s(self, first: Ints, last: Ints) -> Floats:
        """Seconds that any stage of these layers syncs over replicas at least."""
        if self.setting.num_stages == 1:
            return np.full(first.shape, min(self.replayer.whole_sync_s))
        num_bytes = self.replayer.graph.trainable_bytes(first, last)
        times = [all_reduce_times(link, num_bytes, self.setting.num_replicas) for link in self._sync_links]
        least: Floats = np.minimum.reduce(times)
        return least

    def _placed(self, bound: float, line: Line, target_s: float) -> float:
        """The bounds that depend on a stage's place; `bound` where that is larger, the target where they reach it."""
        if self._possible(bound, line):
            return bound
        if target_s < math.inf and not self._possible(target_s, line):
            return target_s
        low, high = bound, 2 * bound
        while not self._possible(high, line):
            low, high = high, 2 * high
        while high - low > PRECISION * low:
            middle = (low + high) / 2
            if self._possible(middle, line):
                high = middle
            else:
                low = middle
        return low

    def _possible(self, bound: float, line: Line) -> bool:
        """Whether stages that keep the bounds of their places reach the end, by the positions each can start at."""
        n, p, starts = self.replayer.graph.num_layers, self.setting.num_stages, np.array([0])
        bound *= 1 + TOLERANCE
        for s in range(p):
            ends = self._ends(s, starts, bound, line)
            if self.limits is not None:
                ends = np.minimum(ends, self.limits.far(s)[starts])
            covered = covered_by(starts, ends, n)
            if s + 1 == p:
                return bool(covered[n])
            starts = np.flatnonzero(covered & self.starts[s + 1])
            if not len(starts):
                return False
        return False

    def _ends(self, stage: int, starts: Ints, bound: float, line: Line) -> Ints:
        """How far the stage can go from each start, by its own work and sync; the start itself: nowhere."""
        costs, m, speed = self.replayer.costs, self.setting.num_microbatches, float(line.speeds[stage])
        fastest = float(line.speeds[: max(stage, 1)].max())  # of the stages before; nothing is before stage 0
        before_s = costs.before_s[starts]
        room = (bound - self._first_sync_s - before_s / fastest - line.hops_s[stage]) / m
        for forwards, others_s in self._repeats(stage, starts, line):
            left = bound - self._first_sync_s - others_s
            room = np.minimum(room, left / forwards if forwards else np.where(left >= 0, np.inf, -1.0))
        ends: Ints = np.searchsorted(costs.before_s, before_s + room * speed, side="right") - 1
        ends = np.maximum(ends, starts)
        if self.setting.num_replicas == 1:
            return ends
        room = bound - costs.forward_before_s[starts] / fastest
        low, high = starts, ends  # low is possible (nothing to do); the largest possible end is in [low, high]
        while (low < high).any():
            middle = (low + high + 1) // 2
            sync_s = self._sync_s(starts, np.maximum(middle, starts + 1))
            good = (costs.before_s[middle] - before_s) * (m / speed) + sync_s <= room
            low, high = np.where(good, middle, low), np.where(good, high, middle - 1)
        return low

    def _repeats(self, stage: int, starts: Ints, line: Line) -> list[tuple[int, Floats]]:
        """(k, seconds) of bounds `seconds + k C_s` of the stage from each start: `rounds`, or gpipe's `path`."""
        costs, m, p = self.replayer.costs, self.setting.num_microbatches, self.setting.num_stages
        way = np.full(len(starts), float(costs.before_s[-1]) / float(line.speeds.max()) + float(line.hops_s[-1]))
        if self.setting.schedule == "gpipe":
            return [(m - 1, way)]
        held = in_flight("1f1b", stage, p, m)
        left_s = (costs.before_s[-1] - costs.before_s[starts]) / float(line.speeds[stage:].max())
        from_here_s = left_s + (line.hops_s[-1] - line.hops_s[stage])
        most = (m - 1) // held
        return [(m - 1 - j * held, way + j * from_here_s) for j in dict.fromkeys((1, most)) if 1 <= j <= most]
