"""The answer: which layers run where, under which schedule, how fast, in how much memory, and how good that is."""

from __future__ import annotations

import math
import os
from itertools import accumulate
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from partitioner.actions import Action, check_schedule, placement_of
from partitioner.display import ShownPlan
from partitioner.errors import ArgumentError
from partitioner.graph import CostGraph
from partitioner.profiles import Profile, read_checked, write_whole
from partitioner.rounds import SPLIT_BACKWARD
from partitioner.schedule import build_schedule, placement, taking_turns
from partitioner.specs import Bytes, Cluster, Device, Frozen, Saving, ScheduleName, Seconds, Shard, Training
from partitioner.split import Split

FORMAT_VERSION: Final = 3
"""1: without `devices`; rank i sat on device i. 2: every stage on as many ranks as there are replicas."""


class MemoryItems(Frozen):
    """Bytes of one rank at its peak, by what they are for."""

    weights: Bytes = 0
    buffers: Bytes = 0
    gradients: Bytes = 0
    optimizer: Bytes = 0
    master: Bytes = 0
    """The optimizer's own 32-bit copy of weights that are in 16 bits."""
    activations: Bytes = 0
    """Kept for backward, all micro-batches in flight together."""
    loss: Bytes = 0
    """Kept by the last layer of an estimated model, in flight together: what makes its output, and the loss."""
    received: Bytes = 0
    """Tensors received from other stages, in flight together."""
    workspace: Bytes = 0
    """Outputs sent and kept for their backward, in flight together; gradients on their way; the most that a layer at
    work, or the optimizer's step, needs beside what is kept."""
    buckets: Bytes = 0
    """Gradients in communication buckets."""
    gathered: Bytes = 0
    """Weights of sharded layers, whole while they are used, and their gradients until these are scattered."""
    overhead: Bytes = 0
    """Context and communicators of the device."""
    slack: Bytes = 0
    """What the allocator holds beyond what is in use."""

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in type(self).model_fields)


class Stage(Frozen):
    """Consecutive layers that run as one pipeline step, on one rank of each replica, or on ranks that take turns."""

    index: int
    layers: Annotated[tuple[str, ...], Field(min_length=1)]
    ranks: tuple[int, ...]
    """One a replica, in replica order. Stages of one pipeline rank name the same ones. Where they take turns, those of
    the one pipeline: micro-batch k runs on ranks[k % len(ranks)]."""
    recompute: bool = False
    shard: Shard = "none"


class StagePrediction(Frozen):
    """One stage's share of a step, on its slowest replica; compute + communication + idle = the step.

    Where a rank has several stages, those of them all add up to the step, its idle time in equal parts, and `memory` is
    what a stage holds when its rank holds the most.
    """

    forward_s: Seconds
    """One micro-batch."""
    backward_s: Seconds
    compute_s: Seconds
    """The whole step."""
    communication_s: Seconds
    """Time that the rank waits on transfers and gradient sync, not hidden behind compute."""
    idle_s: Seconds
    send_bytes: Bytes
    """What this stage sends forward, one micro-batch."""
    in_flight: int
    memory: MemoryItems


class LostEfficiency(Frozen):
    """Where 1 - efficiency went, as fractions of all devices' time; the parts add up to it."""

    imbalance: float = 0.0
    fill_drain: float = 0.0
    communication: float = 0.0
    slicing: float = 0.0
    """Running a part of a model costs this beyond its layers, on every stage and micro-batch."""
    recompute: float = 0.0
    sync: float = 0.0
    small_microbatch: float = 0.0
    optimizer: float = 0.0
    unexplained: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, name) for name in type(self).model_fields))


class Prediction(Frozen):
    """The simulated step. throughput = batch / (step_s + optimizer_s), on both sides of every ratio."""

    step_s: Seconds
    """One train_step, data-parallel sync included."""
    optimizer_s: Seconds
    throughput: float
    single_device_s: Seconds
    """step + optimizer on one of these devices at its best micro-batch."""
    single_device_fits: bool = True
    """False: the model does not fit one device, and the comparison is with one of unlimited memory."""
    speedup: float
    efficiency: float
    bubble_fraction: float
    stages: tuple[StagePrediction, ...]
    lost: LostEfficiency


class Alternative(Frozen):
    """A plan that was simulated and not chosen."""

    mesh: dict[str, int]
    """As of a plan; where ranks take turns, `devices` says how many each stage has."""
    schedule: ScheduleName
    num_microbatches: int
    stage_sizes: tuple[int, ...]
    step_s: Seconds | None
    """step + optimizer; None: it does not fit."""
    devices: tuple[tuple[int, ...], ...] = ()
    """By stage, of the cluster, one a replica; () where a file of version 1 does not say."""
    recompute: tuple[bool, ...] = ()
    """By stage; () as above."""
    shard: tuple[Shard, ...] = ()
    """By stage; () where the file of an earlier version does not say: as the training names."""
    reason: str = ""


class Plan(ShownPlan, Frozen):
    """What `partition` returns: everything needed to run it, re-simulate it, draw it and compare it, in one file."""

    version: Literal[3] = FORMAT_VERSION
    """Files of versions 1 and 2 are read, too."""
    profile: Profile
    cluster: Cluster
    training: Training
    mesh: dict[str, int]
    """pp: ranks of one pipeline; dp: replicas of it. Of one whose stages' ranks take turns, pp counts stages."""
    schedule: ScheduleName
    num_microbatches: Annotated[int, Field(ge=1)]
    """A replica."""
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    devices: tuple[int, ...] = ()
    """By rank, the device of the cluster that it sits on. Left out: rank i on device i."""
    prediction: Prediction
    lower_bound_s: Seconds
    """No plan of this search space, which has the schedule's own order of actions, has a smaller step_s + optimizer_s.
    Where `orders` were searched, others may be faster: of them no bound is known, and this is at most the plan's own.
    """
    runners_up: tuple[Alternative, ...] = ()
    why: tuple[str, ...] = ()
    """What binds, and what was assumed, one sentence each."""
    runnable: bool = True
    """False: the executor cannot run it; `why` says the reason."""
    orders: tuple[str, ...] | None = None
    """What each rank of a pipeline runs, in order, as in "0F0 0I0 0W0": an order found for this plan's own stage times.
    None: the schedule's own."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, fields: Any) -> Any:
        """Devices where they are left out, as in files of version 1, which end as those of this one."""
        if not isinstance(fields, dict):
            return fields
        if not fields.get("devices"):
            sizes = fields["mesh"].values() if isinstance(fields.get("mesh"), dict) else ()
            if sizes and all(type(size) is int and 0 < size < 2**24 for size in sizes):
                fields = fields | {"devices": tuple(range(math.prod(sizes)))}
        return fields | {"version": FORMAT_VERSION} if fields.get("version") in (1, 2) else fields

    @model_validator(mode="after")
    def _check(self) -> Self:
        ids = tuple(layer.id for layer in self.profile.layers)
        placed = tuple(name for stage in self.stages for name in stage.layers)
        if placed != ids:
            lost = sorted(set(ids) - set(placed))
            raise ValueError(
                f"the stages hold {len(placed)} layers, the profile has {len(ids)}"
                + (f"; not placed: {', '.join(lost[:5])}" if lost else "; the order differs")
            )
        by_place = list(dict.fromkeys(stage.ranks for stage in self.stages))
        ranks = sorted(rank for some in by_place for rank in some)
        if ranks != list(range(len(ranks))) or len(ranks) > self.cluster.num_devices:
            raise ValueError(f"ranks {ranks} are not 0 to {len(ranks) - 1} of {self.cluster.num_devices} devices")
        if self.mesh.get("pp") != len(by_place) or (self.takes_turns and self.mesh.get("dp") != 1):
            raise ValueError(f"mesh {self.mesh} does not match {len(self.stages)} stages of the ranks listed")
        if self.takes_turns:
            self._check_turns(len(by_place))
        there = range(self.cluster.num_devices)
        if len(self.devices) != len(ranks) or len({*self.devices} & {*there}) != len(ranks):
            raise ValueError(
                f"devices {list(self.devices)} are not one of 0 to {there[-1]} for each of the ranks 0 to "
                f"{len(ranks) - 1}, each another"
            )
        places = placement(self.schedule, len(self.stages), len(by_place))
        if self.placement != places:
            raise ValueError(
                f"{self.schedule} runs its stages on the pipeline's ranks {places}, the plan has {self.placement}"
            )
        if self.orders is not None:
            self._check_orders()
        return self

    def _check_turns(self, num_places: int) -> None:
        if (self.training.objective, self.schedule) != ("throughput", "gpipe"):
            raise ValueError(
                f"ranks of a stage that take turns are for objective 'throughput' under gpipe, the plan has "
                f"{self.training.objective!r} under {self.schedule}"
            )
        if num_places != len(self.stages) or self.orders is not None:
            raise ValueError("ranks of a stage that take turns have one stage each, and no orders of their own")

    def _check_orders(self) -> None:
        """The lists given are of these stages and micro-batches, can run, and keep what the schedule promises."""
        orders, places = self.actions(), self.placement
        found = placement_of(orders)
        if len(orders) != self.mesh["pp"] or found != dict(enumerate(places)):
            raise ValueError(f"the orders run stages on ranks {found}, the plan has them on {dict(enumerate(places))}")
        if (count := 1 + max(action.microbatch for order in orders for action in order)) != self.num_microbatches:
            raise ValueError(f"the orders run {count} micro-batches, the plan has {self.num_microbatches}")
        backward = ("I", "W") if self.schedule in SPLIT_BACKWARD else ("B",)
        if other := {action.kind for order in orders for action in order} - {"F", *backward}:
            raise ValueError(
                f"{self.schedule} runs F and {' and '.join(backward)}, the orders {', '.join(sorted(other))}"
            )
        last: dict[tuple[int, str], int] = {}
        for order in orders:
            for stage, kind, k in order:
                if last.get((stage, kind), -1) > k:
                    raise ValueError(f"the orders run {stage}{kind}{k} after {stage}{kind}{last[stage, kind]}")
                last[stage, kind] = k
        transfers = CostGraph.from_profile(self.profile).transfers(self.split.cuts, self.microbatch_samples)
        check_schedule(orders, [(one.source, one.target) for one in transfers])

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """What each rank of a pipeline runs in a training step, in order: the schedule's lists, or the plan's own.

        Of ranks that take turns, which train nothing: their forwards, stage by stage.
        """
        if self.takes_turns:
            return taking_turns([len(stage.ranks) for stage in self.stages], self.num_microbatches)
        if self.orders is None:
            return build_schedule(self.schedule, self.num_stages, self.num_microbatches, num_ranks=self.mesh["pp"])
        return tuple(tuple(map(Action.parse, order.split())) for order in self.orders)

    @property
    def split(self) -> Split:
        """Where its layers, micro-batches and actions go, as a value; its devices are those of the plan's cluster."""
        return Split(
            cuts=tuple(accumulate(len(stage.layers) for stage in self.stages[:-1])),
            devices=self.stage_devices,
            num_microbatches=self.num_microbatches,
            schedule=self.schedule,
            savings=tuple(Saving(stage.recompute, stage.shard) for stage in self.stages),
            orders=None if self.orders is None else self.actions(),
        )

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_replicas(self) -> int:
        return self.mesh["dp"]

    @property
    def takes_turns(self) -> bool:
        """Whether stages have other numbers of ranks than there are replicas: each takes every so many-th micro-batch
        of one pipeline. For inference alone."""
        return any(len(stage.ranks) != self.mesh.get("dp") for stage in self.stages)

    @property
    def stages_per_rank(self) -> int:
        return self.num_stages // self.mesh["pp"]

    @property
    def placement(self) -> tuple[int, ...]:
        """By stage, which rank of its pipeline runs it, 0 to pp - 1."""
        by_place = list(dict.fromkeys(stage.ranks for stage in self.stages))
        return tuple(by_place.index(stage.ranks) for stage in self.stages)

    @property
    def num_ranks(self) -> int:
        """Devices used; it can be fewer than the cluster has, and `why` says so then."""
        return len(self.devices)

    @property
    def stage_devices(self) -> tuple[tuple[int, ...], ...]:
        """By stage, the devices of the cluster that run it, one a replica."""
        return tuple(tuple(self.devices[rank] for rank in stage.ranks) for stage in self.stages)

    def device_of(self, rank: int) -> Device:
        """What the rank runs on."""
        return self.cluster.devices[self.devices[rank]]

    def node_of(self, rank: int) -> int:
        """The node that the rank is in."""
        return self.cluster.nodes[self.devices[rank]]

    def index_in_node(self, rank: int) -> int:
        """The rank's device among those of its node, 0 for the first: the number of a CUDA device there."""
        return self.cluster.nodes[: self.devices[rank]].count(self.node_of(rank))

    @property
    def microbatch_samples(self) -> int:
        """Samples of one micro-batch of one replica."""
        return self.training.batch_size // (self.num_replicas * self.num_microbatches)

    @property
    def gap(self) -> float | None:
        """(step + optimizer) / lower bound - 1: 0 is proven optimal. None: `orders` were searched, and nothing is known
        of the best."""
        if self.orders is not None:
            return None
        total = self.prediction.step_s + self.prediction.optimizer_s
        return max(0.0, total / self.lower_bound_s - 1) if self.lower_bound_s else 0.0

    def stage_of(self) -> dict[str, int]:
        """Layer id -> stage."""
        return {name: stage.index for stage in self.stages for name in stage.layers}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON; the file is whole or not there."""
        write_whole(path, self.model_dump_json(indent=1))

    def to_split_spec(self) -> dict[str, str]:
        """Cut points as torch.distributed.pipelining's `pipeline(..., split_spec=)` names them: module -> "beginning".

        A cut before a further call of a module ("norm#1") has no such name and is an ArgumentError.
        """
        first = [stage.layers[0] for stage in self.stages[1:]]
        repeated = [name for name in first if "#" in name]
        if repeated:
            raise ArgumentError(f"the cut before {repeated[0]} is a repeated call; a split spec cannot name it")
        return dict.fromkeys(first, "beginning")


def load(path: str | os.PathLike[str]) -> Plan:
    """The plan that `Plan.save` wrote."""
    return read_checked(Plan, path)
