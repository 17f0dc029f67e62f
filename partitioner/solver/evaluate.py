"""Replay many splits of one setting at once: the simulator's clock with a row a split, to rank what it then decides."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partitioner.graph import CostGraph
from partitioner.simulator import replica_sync_s
from partitioner.solver.settings import Setting
from partitioner.specs import Cluster, Link

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Replayer:
    """Step + optimizer seconds of splits under one setting, many in one pass; the same figures as `predict`'s.

    Splits are rows of cuts, [rows, p - 1]. Time slots replace the simulator's walk: in the grid of a schedule with unit
    actions every stage does at most one thing a slot and needs only earlier slots, so a slot is one numpy step over
    all rows and stages: O(m + p) steps.
    """

    def __init__(self, graph: CostGraph, cluster: Cluster, setting: Setting) -> None:
        self.graph, self.cluster, self.setting = graph, cluster, setting
        self.costs = graph.at(setting.samples)
        by_replica = list(zip(*setting.ranks, strict=True))
        alike: dict[Any, tuple[int, ...]] = {}
        for ranks in by_replica:
            speeds = tuple(cluster.devices[rank].relative_speed for rank in ranks)
            nodes = [cluster.nodes[rank] for rank in ranks]
            together = tuple(nodes.index(node) for node in nodes)  # alike where the same stages share nodes
            alike.setdefault((speeds, together), ranks)
        self.replicas = tuple(alike.values())
        """Ranks by stage, one for all replicas that take the same time."""

    @cached_property
    def _slots(self) -> list[tuple[Ints, Ints, Ints]]:
        """(stages, kinds, micro-batches) of each slot; kind 0 is forward, 1 backward."""
        p, m = self.setting.num_stages, self.setting.num_microbatches
        stage, k = np.meshgrid(np.arange(p), np.arange(m), indexing="ij")
        if self.setting.schedule == "gpipe":
            forward, backward = stage + k, m + 2 * p - 2 - stage + k
        else:
            forward = np.where(k < p - stage, stage + k, stage + 2 * k)
            backward = 2 * p - 1 - stage + 2 * k
        slot = np.concatenate((forward.ravel(), backward.ravel()))
        order = np.argsort(slot, kind="stable")
        stages, ks = np.tile(stage.ravel(), 2)[order], np.tile(k.ravel(), 2)[order]
        kinds = np.repeat([0, 1], p * m)[order]
        ends = np.flatnonzero(np.diff(slot[order])) + 1
        return list(zip(np.split(stages, ends), np.split(kinds, ends), np.split(ks, ends), strict=True))

    def total_s(self, cuts: NDArray[np.int64]) -> Floats:
        """[rows] step + optimizer seconds of each split."""
        p, m = self.setting.num_stages, self.setting.num_microbatches
        rows = max(1, 8_000_000 // (2 * p * m * len(self.replicas)))
        if len(cuts) > rows:
            return np.concatenate([self.total_s(cuts[k : k + rows]) for k in range(0, len(cuts), rows)])
        edges = np.column_stack((np.zeros(len(cuts), int), cuts, np.full(len(cuts), self.graph.num_layers)))
        first, last = edges[:, :-1], edges[:, 1:]
        elements = float(self.graph.trainable_elements(0, self.graph.num_layers))
        part = self.graph.trainable_elements(first, last) / elements if elements else np.zeros(first.shape)
        ends, optimizer_s = [], np.zeros(len(cuts))
        for ranks in self.replicas:
            speed = np.array([self.cluster.devices[rank].relative_speed for rank in ranks])
            total = (self.costs.before_s[last] - self.costs.before_s[first]) / speed
            forward = (self.costs.forward_before_s[last] - self.costs.forward_before_s[first]) / speed
            slicing = self.graph.slicing_s(p) / speed[:, None]
            seconds = np.stack((forward.T + slicing, (total - forward).T))
            ends.append(self._clock(seconds, self._outgoing(edges, ranks)))
            optimizer_s = np.maximum(optimizer_s, (part / speed).max(axis=1) * self.graph.profile.optimizer_s)
        step_s: Floats = (np.max(ends, axis=0) + self._sync_s(edges)).max(axis=1)
        return step_s + optimizer_s

    def _clock(self, seconds: Floats, outgoing: list[tuple[Ints, Floats]]) -> Floats:
        """[rows, p] when each stage of one replica ends.

            end = max(stage free, arrived) + seconds;   arrives = max(end, wire free) + wire seconds

        seconds: [2, p, rows] of a forward and a backward. outgoing: messages that a stage sends after a forward or a
        backward, first ones, second ones...: (target [2, p], -1 for none; seconds on the wire [2, p, rows]).
        """
        _, p, rows = seconds.shape
        arrived = np.full((2, p, self.setting.num_microbatches, rows), -np.inf)
        free = np.zeros((p, rows))
        wires = [np.zeros((2, p, rows)) for _ in outgoing]
        for stages, kinds, ks in self._slots:
            end = np.maximum(free[stages], arrived[kinds, stages, ks]) + seconds[kinds, stages]
            free[stages] = end
            for (target, wire_s), wire_free in zip(outgoing, wires, strict=True):
                to = target[kinds, stages]
                sends = to >= 0
                kind, source, to, k = kinds[sends], stages[sends], to[sends], ks[sends]
                arrives = np.maximum(end[sends], wire_free[kind, source]) + wire_s[kind, source]
                wire_free[kind, source] = arrives
                arrived[kind, to, k] = np.maximum(arrived[kind, to, k], arrives)
        return free.T

    def _outgoing(self, edges: Ints, ranks: tuple[int, ...]) -> list[tuple[Ints, Floats]]:
        """What `_clock` takes, from the tensors that each split sends; a message that a row lacks never holds it up."""
        p, rows = self.setting.num_stages, len(edges)
        outgoing: list[tuple[Ints, Floats]] = []
        for (source, target), (sent, there, back) in self._moved(edges).items():
            link = self.cluster.link(ranks[source], ranks[target])
            for kind, first, second, num_bytes in ((0, source, target, there), (1, target, source, back)):
                free = next((one for one in outgoing if one[0][kind, first] < 0), None)
                if free is None:
                    free = np.full((2, p), -1), np.zeros((2, p, rows))
                    outgoing.append(free)
                free[0][kind, first] = second
                free[1][kind, first] = np.where(sent, link_times(link, num_bytes), -np.inf)
        return outgoing

    def _moved(self, edges: Ints) -> dict[tuple[int, int], tuple[NDArray[np.bool_], Floats, Floats]]:
        """(source, target) -> [rows] whether anything moves, its bytes for one micro-batch, its gradient's bytes."""
        p, rows = self.setting.num_stages, len(edges)
        moved: dict[tuple[int, int], tuple[NDArray[np.bool_], Floats, Floats]] = {}

        def pair(source: int, target: int) -> tuple[NDArray[np.bool_], Floats, Floats]:
            return moved.setdefault((source, target), (np.zeros(rows, bool), np.zeros(rows), np.zeros(rows)))

        for target in range(1, p):
            cut = edges[:, target]
            if self.graph.handed_on[cut].any():
                sent, there, back = pair(target - 1, target)
                sent |= self.graph.handed_on[cut]
                there += self.costs.next_bytes[cut]
                back += self.costs.next_gradient_bytes[cut]
        for tensor, producer, consumers in self.graph.far_tensors:
            num_bytes = self.graph.profile.tensor_bytes(tensor, self.setting.samples)
            source = _stage_at(edges, producer)
            targets = np.stack([_stage_at(edges, place) for place in consumers])
            for a, b in sorted({(int(a), int(b)) for row in targets for a, b in zip(source, row, strict=True)}):
                if a < b:
                    here = (source == a) & (targets == b).any(axis=0)
                    sent, there, back = pair(a, b)
                    sent |= here
                    there += num_bytes * here
                    back += num_bytes * here * tensor.needs_gradient
        return dict(sorted(moved.items()))

    @cached_property
    def whole_sync_s(self) -> list[float]:
        """By replica: what is left of the gradient sync after the backward of a whole model."""
        link = self.cluster.slowest_link(self.setting.ranks[0])
        speeds = [self.cluster.devices[ranks[0]].relative_speed for ranks in self.replicas]
        samples, count = self.setting.samples, self.setting.num_replicas
        return [replica_sync_s(self.graph, link, samples, count, speed) for speed in speeds]

    def _sync_s(self, edges: Ints) -> Floats:
        """[rows, p] seconds of each stage's gradient sync, over replicas and over the owners of shared parameters."""
        setting, cluster = self.setting, self.cluster
        if setting.num_stages == 1:
            return np.full((len(edges), 1), max(self.whole_sync_s))
        first, last = edges[:, :-1], edges[:, 1:]
        num_bytes = self.graph.trainable_bytes(first, last)
        seconds = np.zeros(first.shape)
        for stage, ranks in enumerate(setting.ranks):
            seconds[:, stage] = all_reduce_times(cluster.slowest_link(ranks), num_bytes[:, stage], len(ranks))
        shared = np.zeros((len(self.replicas), *first.shape))
        for parameter in self.graph.shared_parameters:
            at = np.stack([_stage_at(edges, self.graph.position[name]) for name in parameter.layers], axis=1).tolist()
            owners_of = [tuple(sorted(set(row))) for row in at]
            for owners in sorted({owners for owners in owners_of if len(owners) > 1}):
                rows = np.array([one == owners for one in owners_of])
                for r, ranks in enumerate(self.replicas):
                    link = cluster.slowest_link(tuple(ranks[owner] for owner in owners))
                    shared[r][np.ix_(rows, owners)] += link.all_reduce_time(parameter.bytes, len(owners))
        total: Floats = seconds + shared.max(axis=0)
        return total


def _stage_at(edges: Ints, position: int) -> Ints:
    """[rows] the stage that holds a layer."""
    stage: Ints = (edges[:, 1:-1] <= position).sum(axis=1)
    return stage


def link_times(link: Link, num_bytes: Floats) -> Floats:
    """`Link.time`, elementwise."""
    sizes, seconds = np.array(link.sizes_bytes, float), np.array(link.seconds)
    k = np.clip(np.searchsorted(sizes, num_bytes), 1, len(sizes) - 1)
    slope = (seconds[k] - seconds[k - 1]) / (sizes[k] - sizes[k - 1])
    times: Floats = np.maximum(0.0, seconds[k - 1] + slope * (num_bytes - sizes[k - 1]))
    return times


def all_reduce_times(link: Link, num_bytes: Floats, num_ranks: int) -> Floats:
    """`Link.all_reduce_time`, elementwise."""
    if num_ranks < 2:
        return np.zeros(num_bytes.shape)
    return np.where(num_bytes > 0, 2 * (num_ranks - 1) * link_times(link, num_bytes / num_ranks), 0.0)
