"""Which rank sits where in the pipelines, and what follows from that for speed, wires and memory."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partitioner.memory import memory_limit
from partitioner.specs import Cluster, Link, Training

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

Ranks = tuple[tuple[int, ...], ...]
"""By place in the pipeline, one a replica."""


class Site:
    """A cluster as arrays by rank."""

    def __init__(self, cluster: Cluster, training: Training) -> None:
        self.cluster, self.training = cluster, training
        kinds = {id(device): device for device in cluster.devices}  # equal devices are mostly one object
        figures = {
            key: (device.relative_speed, memory_limit(device, training) - device.overhead_bytes, device.overhead_bytes)
            for key, device in kinds.items()
        }
        table = np.array([figures[id(device)] for device in cluster.devices], dtype=float)
        self.speed: Floats = table[:, 0]
        self.room: Ints = table[:, 1].astype(np.int64)
        """Bytes of the device or the limit set, less its overhead."""
        self.overhead: Ints = table[:, 2].astype(np.int64)
        self.node: Ints = np.array(cluster.nodes)
        self.alike = len(set(figures.values())) == 1
        """Whether all devices have the same figures."""
        self.one_link = cluster.intra == cluster.inter or len(set(cluster.nodes)) == 1


class Layout:
    """Ranks by place in the pipeline, one a replica; replicas that take the same time are told once, as lines."""

    def __init__(self, site: Site, ranks: Ranks, number: int = 0) -> None:
        """number: of those that were thought of for a mesh, the simplest first."""
        self.site, self.ranks, self.number = site, ranks, number
        self._at = np.array(ranks)
        speeds, nodes = site.speed[self._at], site.node[self._at]
        self._apart = np.zeros(len(ranks), np.bool_) if site.one_link else (nodes != nodes[:, :1]).any(axis=1)
        alike = np.zeros((0, len(ranks[0])))
        if not site.one_link:  # alike where the same places share nodes
            alike = np.array([np.argmax(nodes == nodes[place], axis=0) for place in range(len(ranks))])
        _, kept = np.unique(np.concatenate((speeds, alike)), axis=1, return_index=True)
        kept = np.sort(kept)
        self.speeds: Floats = speeds[:, kept].T
        """[lines, p]"""
        self._nodes: Ints = nodes[:, kept].T
        smallest = np.argmin(site.room[self._at], axis=1)
        tightest = self._at[np.arange(len(ranks)), smallest]
        self.room: Ints = site.room[tightest]
        """[p] bytes of each place's smallest device, less its overhead."""
        self.overhead: Ints = site.overhead[tightest]

    @property
    def num_lines(self) -> int:
        return len(self.speeds)

    @cached_property
    def total_speed(self) -> float:
        """Of the slowest line."""
        return float(self.speeds.sum(axis=1).min())

    def apart(self, line: int, sources: Ints, targets: Ints) -> Flags:
        """Whether messages between these places of a line go from node to node."""
        if self.site.one_link:
            return np.zeros(len(sources), dtype=np.bool_)
        flags: Flags = self._nodes[line, sources] != self._nodes[line, targets]
        return flags

    def link(self, line: int, *places: int) -> Link:
        """What a message, or a collective, between these places of a line waits for."""
        apart = not self.site.one_link and len(set(self._nodes[line, list(places)].tolist())) > 1
        return self.site.cluster.inter if apart else self.site.cluster.intra

    @cached_property
    def sync_links(self) -> dict[Link, Ints]:
        """The slowest link between the replicas of a place -> the places."""
        cluster = self.site.cluster
        both = ((cluster.intra, np.flatnonzero(~self._apart)), (cluster.inter, np.flatnonzero(self._apart)))
        return {link: places for link, places in both if len(places)}
