"""Layers to be placed on devices of several kinds, and what each device then has to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from partitioner.solver.classical.ideals import Ints

Floats = NDArray[np.float64]

CLOSE = 1e-9
"""Relative; loads that differ by less are equal."""


@dataclass(frozen=True)
class Kind:
    """`count` equal devices: what each layer takes on one, what one can hold, and whether it pays for transfers."""

    count: int
    times: Floats
    memory_bytes: float = math.inf
    pays: bool = True


@dataclass(frozen=True)
class Loads:
    """Layers to be placed. A device's load is the time of its layers plus the cost of every net that it shares.

    A net is a tensor: the layers that make and use it. A device pays for it when it has some of its layers but not all
    of them, once, whether it sends or receives (as PipeDream's and the throughput objective of Tarnawski et al. 2020).
    """

    edges: tuple[tuple[int, int], ...]
    """The order that stages keep to."""
    nets: tuple[tuple[int, ...], ...]
    net_costs: Floats
    memory_bytes: Floats
    kinds: tuple[Kind, ...]

    @property
    def num_layers(self) -> int:
        return len(self.memory_bytes)

    def load(self, kind: int, layers: Sequence[int]) -> float:
        """Of one device with these layers."""
        inside, device = set(layers), self.kinds[kind]
        work = math.fsum(float(device.times[v]) for v in inside)
        if device.pays:
            shared = (len(inside.intersection(net)) for net in self.nets)
            work += math.fsum(
                float(cost)
                for cost, net, held in zip(self.net_costs, self.nets, shared, strict=True)
                if 0 < held < len(net)
            )
        return work

    def fits(self, kind: int, layers: Sequence[int]) -> bool:
        return sum(float(self.memory_bytes[v]) for v in layers) <= self.kinds[kind].memory_bytes * (1 + CLOSE)

    def merged(self, labels: Ints) -> Loads:
        """Classes of layers as single layers; nets within one class are gone, equal nets are added up."""
        count = int(labels.max()) + 1
        nets: dict[tuple[int, ...], float] = {}
        for net, cost in zip(self.nets, self.net_costs, strict=True):
            pins = tuple(sorted({int(labels[v]) for v in net}))
            if len(pins) > 1 and cost > 0:
                nets[pins] = nets.get(pins, 0.0) + float(cost)
        edges = {(int(labels[u]), int(labels[v])) for u, v in self.edges}

        def summed(amounts: Floats) -> Floats:
            return np.bincount(labels, amounts, count).astype(np.float64)

        return Loads(
            tuple(sorted((u, v) for u, v in edges if u != v)),
            tuple(nets),
            np.array(list(nets.values()), dtype=np.float64),
            summed(self.memory_bytes),
            tuple(replace(kind, times=summed(kind.times)) for kind in self.kinds),
        )


@dataclass(frozen=True)
class Placement:
    """Which device has which layers, in the order of the pipeline; the largest load; what no placement can beat."""

    devices: tuple[tuple[int, tuple[int, ...]], ...]
    """(kind, layers) of each device that has any."""
    load: float
    lower_bound: float

    @property
    def gap(self) -> float:
        return max(0.0, self.load / self.lower_bound - 1) if self.lower_bound > 0 else 0.0


def exchange(kind: Kind, first: Kind) -> float:
    """The most work, in time of the first kind, that a device of this kind does in a unit of time."""
    if kind is first:
        return 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = first.times / kind.times
    return float(np.max(ratios[first.times > 0], initial=0.0))


def average_bound(loads: Loads) -> float:
    """All devices busy all the time, and no layer faster than on its best device."""
    first = loads.kinds[0]
    rate = sum(kind.count * exchange(kind, first) for kind in loads.kinds if kind.count)
    alone = np.min([kind.times for kind in loads.kinds if kind.count], axis=0)
    return max(float(first.times.sum()) / rate, float(alone.max(initial=0.0)))
