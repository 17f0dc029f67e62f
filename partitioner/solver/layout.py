"""Which device of the cluster sits where in the pipelines, and what follows from that for speed, wires and memory."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partitioner.memory import memory_limit, room_bytes
from partitioner.specs import Cluster, Device, Link, Training

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

MOST_STATES = 500
"""Of how many places of each pace are taken, that bounds go through."""

Devices = tuple[tuple[int, ...], ...]
"""Of the cluster: by place in the pipeline, one a replica."""


class Site:
    """A cluster as arrays by device."""

    def __init__(self, cluster: Cluster, training: Training) -> None:
        self.cluster, self.training = cluster, training
        kinds = {id(device): device for device in cluster.devices}  # equal devices are mostly one object
        self._kinds = list(kinds.values())
        number = {key: k for k, key in enumerate(kinds)}
        self._kind: Ints = np.array([number[id(device)] for device in cluster.devices])
        self.speed: Floats = np.array([device.relative_speed for device in self._kinds])[self._kind]
        self.node: Ints = np.array(cluster.nodes)
        self.limit: Ints = np.array([memory_limit(device, training) for device in self._kinds], np.int64)[self._kind]
        """Bytes of the device, or the limit set."""
        self._rooms: dict[int, Ints] = {}
        rooms = {tuple(self._room(device, axes) for axes in range(3)) for device in self._kinds}
        self.alike = len({device.relative_speed for device in self._kinds}) == len(rooms) == 1
        """Whether all devices have the same figures."""
        alone = len(set(cluster.nodes)) == cluster.num_devices > 1
        self.intra = cluster.inter if alone else cluster.intra
        """Of devices in one node; where each has a node of its own, what there is between them."""
        self.inter = cluster.inter
        self.one_link = self.intra == self.inter or len(set(cluster.nodes)) == 1

    def room(self, num_places: int, num_replicas: int) -> Ints:
        """By device, bytes that a rank of such a mesh can fill: without context, communicators and slack."""
        axes = (num_places > 1) + (num_replicas > 1)
        if axes not in self._rooms:
            self._rooms[axes] = np.array([self._room(device, axes) for device in self._kinds], np.int64)[self._kind]
        return self._rooms[axes]

    def _room(self, device: Device, num_axes: int) -> int:
        return room_bytes(device, memory_limit(device, self.training), *(2,) * num_axes)

    @cached_property
    def joining_costs(self) -> bool:
        """Whether a message between nodes takes at least as long as one within a node, whatever its size."""
        sizes = sorted({*self.intra.sizes_bytes, *self.inter.sizes_bytes})
        sizes.append(2 * sizes[-1])
        return all(self.inter.time(size) >= self.intra.time(size) for size in sizes)

    @cached_property
    def node_sizes(self) -> Ints:
        """Devices of each node, descending."""
        return np.sort(np.unique(self.node, return_counts=True)[1])[::-1]

    @cached_property
    def fastest(self) -> Floats:
        """Speeds, descending."""
        return np.sort(self.speed)[::-1]


class Layout:
    """Devices by place in the pipeline, one a replica; replicas that take the same time are told once, as lines."""

    def __init__(self, site: Site, devices: Devices, number: int = 0) -> None:
        """number: of those that were thought of for a mesh, the simplest first."""
        self.site, self.devices, self.number = site, devices, number
        self._at = np.array(devices)
        speeds, nodes, room = site.speed[self._at], site.node[self._at], site.room(*self._at.shape)
        self._apart = np.zeros(len(devices), np.bool_) if site.one_link else (nodes != nodes[:, :1]).any(axis=1)
        alike = np.zeros((0, len(devices[0])))
        if not site.one_link:  # alike where the same places share nodes
            alike = np.array([np.argmax(nodes == nodes[place], axis=0) for place in range(len(devices))])
        _, kept = np.unique(np.concatenate((speeds, alike)), axis=1, return_index=True)
        kept = np.sort(kept)
        self.speeds: Floats = speeds[:, kept].T
        """[lines, p]"""
        self._nodes: Ints = nodes[:, kept].T
        smallest = np.argmin(room[self._at], axis=1)
        tightest = self._at[np.arange(len(devices)), smallest]
        self.room: Ints = room[tightest]
        """[p] bytes that each place's smallest device has room for."""
        self.limit: Ints = site.limit[tightest]
        """[p] its memory, or the limit set."""

    @property
    def num_lines(self) -> int:
        return len(self.speeds)

    @cached_property
    def line_speeds(self) -> list[float]:
        """Of all devices of a line together."""
        speeds: list[float] = self.speeds.sum(axis=1).tolist()
        return speeds

    @property
    def total_speed(self) -> float:
        """Of the slowest line."""
        return min(self.line_speeds)

    @cached_property
    def slowest(self) -> list[float]:
        """By line, the speed of its slowest device."""
        speeds: list[float] = self.speeds.min(axis=1).tolist()
        return speeds

    def crossings(self, line: int) -> int:
        """Wires that go from node to node somewhere, beside those that `apart` tells."""
        return 0

    @property
    def joins_nodes(self) -> bool:
        """Whether some replica is on several nodes."""
        return not self.site.one_link and bool((self._nodes != self._nodes[:, :1]).any())

    def together(self) -> list[int]:
        """By line, a bit for each two places: whether they are in one node."""
        p = len(self.devices)
        pairs = self._nodes[:, :, None] == self._nodes[:, None, :]
        return [int.from_bytes(np.packbits(row).tobytes(), "big") for row in pairs.reshape(-1, p * p)]

    @property
    def apart_places(self) -> int:
        """A bit for each place: whether its replicas are on several nodes."""
        return int.from_bytes(np.packbits(self._apart).tobytes(), "big")

    @property
    def all_apart(self) -> bool:
        """Whether replicas of every place are on several nodes."""
        return bool(self._apart.all())

    def apart(self, line: int, sources: Ints, targets: Ints) -> Flags:
        """Whether messages between these places of a line go from node to node."""
        if self.site.one_link:
            return np.zeros(len(sources), dtype=np.bool_)
        flags: Flags = self._nodes[line, sources] != self._nodes[line, targets]
        return flags

    def link(self, line: int, *places: int) -> Link:
        """What a message, or a collective, between these places of a line waits for."""
        apart = not self.site.one_link and len(set(self._nodes[line, list(places)].tolist())) > 1
        return self.site.inter if apart else self.site.intra

    @cached_property
    def sync_links(self) -> dict[Link, Ints]:
        """The slowest link between the replicas of a place -> the places."""
        site = self.site
        both = ((site.intra, np.flatnonzero(~self._apart)), (site.inter, np.flatnonzero(self._apart)))
        return {link: places for link, places in both if len(places)}


class AnyLayout(Layout):
    """What no layout of some devices of the site can be better than, for bounds.

    The slowest devices of the places of d replicas are at best every d-th of the devices by speed, in some order
    (`paces`): they bound what a stage itself does. All else, and all room, is that of the best device.
    """

    def __init__(self, site: Site, num_places: int, num_replicas: int, crossings: int, sync_apart: bool) -> None:
        """crossings: so many wires of some replica go from node to node. sync_apart: replicas of every place are on
        several nodes."""
        self.site, self.devices, self.number = site, (), 0
        used, fastest = num_places * num_replicas, site.fastest
        self.paces: Floats = fastest[num_replicas - 1 : used : num_replicas]
        speed = float(self.paces[0]) if num_places == 1 else float(fastest[0])
        lines = 2 if crossings else 1  # the one that crosses need not be the slowest
        self.speeds = np.full((lines, num_places), speed)
        self._totals = [float(self.paces.sum()), float(fastest[:num_places].sum())]
        self._crossings = crossings
        self._apart = np.full(num_places, sync_apart)
        roomiest = int(np.argmax(room := site.room(num_places, num_replicas)))
        self.room = np.full(num_places, room[roomiest])
        self.limit = np.full(num_places, site.limit[roomiest])

    @cached_property
    def kinds_of_pace(self) -> list[tuple[float, int]]:
        """(pace, how many have it), descending; where there are many, some are raised to the next."""
        paces, counts = np.unique(self.paces, return_counts=True)
        kinds = list(zip(paces[::-1].tolist(), counts[::-1].tolist(), strict=True))
        while len(kinds) > 1 and math.prod(count + 1 for _, count in kinds) > MOST_STATES:
            k = min(range(1, len(kinds)), key=lambda one: kinds[one - 1][0] / kinds[one][0])
            kinds[k - 1 : k + 1] = [(kinds[k - 1][0], kinds[k - 1][1] + kinds[k][1])]
        return kinds

    @cached_property
    def line_speeds(self) -> list[float]:
        return self._totals[: self.num_lines]

    @property
    def total_speed(self) -> float:
        return self._totals[0]

    @cached_property
    def slowest(self) -> list[float]:
        return [float(self.site.fastest[-1])] * self.num_lines

    def crossings(self, line: int) -> int:
        return self._crossings if line else 0

    def apart(self, line: int, sources: Ints, targets: Ints) -> Flags:
        return np.zeros(len(sources), dtype=np.bool_)

    @cached_property
    def sync_links(self) -> dict[Link, Ints]:
        """Those that a place's replicas can have between them."""
        every = np.arange(len(self._apart))
        return {self.site.inter: every} if self._apart.any() else {self.site.intra: every, self.site.inter: every}
