"""How a step is split: stages, devices that run them, micro-batches, order of actions, and what each stage saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from partitioner.actions import Orders
from partitioner.errors import ArgumentError
from partitioner.schedule import placement
from partitioner.specs import Cluster, Saving, ScheduleName, Shard, Training, counted


@dataclass(frozen=True)
class Split:
    """Everything that is chosen for a model on a cluster; what it costs and holds follows from it and the `Training`.

    >>> two = Split(cuts=(3,), devices=((0, 1), (2, 3)), num_microbatches=4)
    >>> two.num_stages, two.num_places, two.num_replicas, two.samples(Training(batch_size=16))
    (2, 2, 2, 2.0)
    """

    cuts: tuple[int, ...]
    """Positions of layers: where stages after the first begin."""
    devices: tuple[tuple[int, ...], ...]
    """Of the cluster, by stage: one a replica, or those that take turns. Stages of one rank name the same ones."""
    num_microbatches: int
    """A replica."""
    schedule: ScheduleName = "1f1b"
    savings: tuple[Saving, ...] = ()
    """By stage; left out, none saves anything."""
    orders: Orders | None = None
    """What each rank of a pipeline runs, in order; None is the schedule's own."""

    def __post_init__(self) -> None:
        assert len(self.devices) == len(self.cuts) + 1, "a row of devices for each stage"
        assert len(self.savings) in (0, len(self.devices)), "one saving for each stage"

    @classmethod
    def placed(
        cls,
        cluster: Cluster,
        cuts: Sequence[int],
        mesh: Mapping[str, int],
        num_microbatches: int,
        schedule: ScheduleName = "1f1b",
        savings: Sequence[Saving] = (),
    ) -> Split:
        """On the devices of `place`, with the stages where the schedule has them. mesh: {"pp": ranks of a pipeline,
        "dp": replicas}; each rank has the same number of the stages that the cuts make, else an ArgumentError."""
        num_stages, num_places = len(cuts) + 1, mesh["pp"]
        if num_stages % num_places:
            raise ArgumentError(f"the cuts {tuple(cuts)} make {num_stages} stages, but the mesh has pp={num_places}")
        by_place = place(cluster, num_places, mesh["dp"])
        devices = tuple(by_place[at] for at in placement(schedule, num_stages, num_places))
        return cls(tuple(cuts), devices, num_microbatches, schedule, tuple(savings))

    @property
    def num_stages(self) -> int:
        return len(self.devices)

    @property
    def num_replicas(self) -> int:
        return len(self.devices[0])

    @cached_property
    def num_places(self) -> int:
        """Ranks of a pipeline."""
        return len(set(self.devices))

    @property
    def num_ranks(self) -> int:
        return self.num_places * self.num_replicas

    @property
    def places(self) -> tuple[int, ...]:
        """By stage, which rank of its pipeline runs it."""
        return placement(self.schedule, self.num_stages, self.num_places)

    @cached_property
    def saving(self) -> tuple[Saving, ...]:
        """By stage."""
        return self.savings or (Saving(),) * self.num_stages

    @property
    def recompute(self) -> tuple[bool, ...]:
        """By stage."""
        return tuple(one.recompute for one in self.saving)

    @property
    def shard(self) -> tuple[Shard, ...]:
        """By stage."""
        return tuple(one.shard for one in self.saving)

    def samples(self, training: Training) -> float:
        """Of one micro-batch: batch / (replicas x micro-batches), a fraction where that does not divide."""
        return training.batch_size / (self.num_replicas * self.num_microbatches)


def place(cluster: Cluster, num_stages: int, num_replicas: int) -> tuple[tuple[int, ...], ...]:
    """Devices of each stage, one a replica: the stages of a replica sit side by side, within a node where they can."""
    num_ranks = num_stages * num_replicas
    if num_ranks > cluster.num_devices:
        raise ArgumentError(
            f"{counted(num_stages, 'stage')} x {counted(num_replicas, 'replica')} need {num_ranks} devices, the "
            f"cluster has {cluster.num_devices}: use a smaller mesh"
        )
    by_node = sorted(range(num_ranks), key=lambda rank: cluster.nodes[rank])
    return tuple(tuple(by_node[stage::num_stages]) for stage in range(num_stages))
