"""Seconds that no split of a setting can beat, found without looking at splits one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partitioner.graph import CostGraph
from partitioner.solver.chain import TOLERANCE, Chain, covered_by, smallest_bottleneck
from partitioner.solver.evaluate import Replayer, all_reduce_times, link_times
from partitioner.solver.limits import Flags, Floats, Limits
from partitioner.specs import Link

PRECISION = 1e-5
"""Relative, of bounds that are bisected."""


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of step + optimizer over all splits of one setting that leave room. p stages, m micro-batches:

        F_s, B_s  seconds of a micro-batch on stage s, C_s = F_s + B_s;   S  sum of C and of all hops

        busy        m max C                    a stage does its own work, one action at a time
        path        S + (m - 1) max(F, B)      some stage's m forwards (or backwards), with one micro-batch's way
                                               before and after them; gpipe: S + (m - 1) (max F + max B)
        place       max over s of  C_0 + ... + C_{s-1} + m C_s
                                               the first forward's way to stage s, its work, the last backward's way

    `path` and `place` need every stage to wait for the one before it (`graph.linked`); elsewhere only `busy` holds.
    Stage 0 ends last, so its sync adds to them: it has the layers before the first possible cut. Every stage's own sync
    follows its own work. The optimizer's share is smallest when all devices finish theirs together.
    """

    replayer: Replayer
    starts: Flags
    limits: Limits | None

    @property
    def graph(self) -> CostGraph:
        return self.replayer.graph

    def quick(self) -> float:
        """In O(1), from sums and the largest layer."""
        costs, m, p = self.replayer.costs, self.replayer.setting.num_microbatches, self.replayer.setting.num_stages
        bound = 0.0
        for speed in self._speeds():
            total, fastest = float(speed.sum()), float(speed.max())
            forward = max(float(costs.forward_s.sum()) / total, float(costs.forward_s.max()) / fastest)
            backward = max(float(costs.backward_s.sum()) / total, float(costs.backward_s.max()) / fastest)
            both = max(float(costs.before_s[-1]) / total, float((costs.forward_s + costs.backward_s).max()) / fastest)
            bound = max(bound, m * both)
            if p > 1 and self._in_line:
                bound = max(bound, float(costs.before_s[-1]) / fastest + (m - 1) * max(forward, backward))
        return bound + self._optimizer_s()

    def tight(self, target_s: float = math.inf) -> float:
        """O(p n log n): all of the above, at their minima over splits; no more than `target_s` where they reach it."""
        m, p = self.replayer.setting.num_microbatches, self.replayer.setting.num_stages
        costs, schedule = self.replayer.costs, self.replayer.setting.schedule
        bound = 0.0
        for ranks, speeds in zip(self.replayer.replicas, self._speeds(), strict=True):
            slowest = self._bottleneck(costs.before_s, speeds, self.limits)
            if slowest == math.inf:
                return math.inf
            bound = max(bound, m * slowest)
            if self._in_line:
                forward = self._bottleneck(costs.forward_before_s, speeds)
                backward = self._bottleneck(costs.before_s - costs.forward_before_s, speeds)
                repeated = max(forward + backward, slowest) if schedule == "gpipe" else max(forward, backward)
                way = float(costs.before_s[-1]) / float(speeds.max()) + self._hops_s(ranks)
                first_sync = self._first_sync_s()
                bound = max(bound, way + (m - 1) * repeated + first_sync)
                if p > 1:
                    bound = self._placed(bound, speeds, first_sync, target_s - self._optimizer_s())
        return bound * (1 - 10 * TOLERANCE) + self._optimizer_s()

    @cached_property
    def _in_line(self) -> bool:
        return bool(self.graph.linked[self.starts[1:].any(axis=0)].all())

    def _speeds(self) -> list[Floats]:
        devices = self.replayer.cluster.devices
        return [np.array([devices[rank].relative_speed for rank in ranks]) for ranks in self.replayer.replicas]

    def _optimizer_s(self) -> float:
        if not self.graph.trainable_elements(0, self.graph.num_layers):
            return 0.0
        return self.graph.profile.optimizer_s / min(float(speeds.sum()) for speeds in self._speeds())

    def _bottleneck(self, prefix_s: Floats, speeds: Floats, limits: Limits | None = None) -> float:
        hops = np.zeros(self.starts.shape)
        return smallest_bottleneck(Chain(prefix_s, tuple(speeds.tolist()), self.starts, hops, limits))

    def _hops_s(self, ranks: tuple[int, ...]) -> float:
        """The cheapest cut at each boundary: what is handed from layer to layer there goes whatever else is cut."""
        costs, cluster = self.replayer.costs, self.replayer.cluster
        total = 0.0
        for s in range(1, len(ranks)):
            link = cluster.link(ranks[s - 1], ranks[s])
            at = self.starts[s]
            if list(link.seconds) == sorted(link.seconds):  # more bytes never take less time
                there, back = link_times(link, costs.next_bytes[at]), link_times(link, costs.next_gradient_bytes[at])
                total += float((there + back).min())
        return total

    def _first_sync_s(self) -> float:
        setting, n = self.replayer.setting, self.graph.num_layers
        first = int(np.argmax(self.starts[1])) if setting.num_stages > 1 else n
        return float(self._sync_s(np.array([0]), np.array([first]))[0])

    @cached_property
    def _sync_links(self) -> set[Link]:
        return {self.replayer.cluster.slowest_link(ranks) for ranks in self.replayer.setting.ranks}

    def _sync_s(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> Floats:
        """Seconds that any stage of these layers syncs over replicas at least."""
        num_bytes = self.graph.trainable_bytes(first, last)
        times = [all_reduce_times(link, num_bytes, self.replayer.setting.num_replicas) for link in self._sync_links]
        least: Floats = np.minimum.reduce(times)
        return least

    def _placed(self, bound: float, speeds: Floats, first_sync: float, target_s: float) -> float:
        """The `place` bound, or `bound` where that is larger, or the target where it lies above."""
        if self._possible(bound, speeds, first_sync):
            return bound
        if target_s < math.inf and not self._possible(target_s, speeds, first_sync):
            return target_s
        low, high = bound, 2 * bound
        while not self._possible(high, speeds, first_sync):
            low, high = high, 2 * high
        while high - low > PRECISION * low:
            middle = (low + high) / 2
            if self._possible(middle, speeds, first_sync):
                high = middle
            else:
                low = middle
        return low

    def _possible(self, bound: float, speeds: Floats, first_sync: float) -> bool:
        """Whether stages that keep the `place` bound reach the end, by the set of positions each can start at."""
        n, starts = self.graph.num_layers, np.array([0])
        reach: dict[tuple[float, float], NDArray[np.int64]] = {}
        for s, speed in enumerate(speeds.tolist()):
            fastest = float(speeds[: max(s, 1)].max())  # of the stages before; nothing is before stage 0
            if (speed, fastest) not in reach:
                reach[speed, fastest] = self._ends(bound * (1 + TOLERANCE), speed, fastest, first_sync)
            ends = reach[speed, fastest][starts]
            if self.limits is not None:
                ends = np.minimum(ends, self.limits.far(s)[starts])
            covered = covered_by(starts, ends, n)
            if s + 1 == len(speeds):
                return bool(covered[n])
            starts = np.flatnonzero(covered & self.starts[s + 1])
            if not len(starts):
                return False
        return False

    def _ends(self, bound: float, speed: float, fastest: float, first_sync: float) -> NDArray[np.int64]:
        """[n] how far a stage from each position can go; the position itself: nowhere."""
        costs, m, n = self.replayer.costs, self.replayer.setting.num_microbatches, self.graph.num_layers
        starts = np.arange(n)
        before_s, work_s = costs.before_s[:-1], costs.before_s
        room = (bound - first_sync - before_s / fastest) * (speed / m)
        ends = np.maximum(np.searchsorted(work_s, before_s + room, side="right") - 1, starts)
        if self.replayer.setting.num_replicas == 1:
            return ends
        left = bound - costs.forward_before_s[:-1] / fastest
        low, high = starts, ends  # low is possible (nothing to do); the largest possible end is in [low, high]
        while (low < high).any():
            middle = (low + high + 1) // 2
            sync_s = self._sync_s(starts, np.maximum(middle, starts + 1))
            good = (work_s[middle] - before_s) * (m / speed) + sync_s <= left
            low, high = np.where(good, middle, low), np.where(good, high, middle - 1)
        return low
