"""Who this rank is and whom it talks to: the process groups of a plan, made in one order on all ranks.

control    all ranks, gloo: preambles, small agreements, and all data where ranks have no device of their own
replica    the ranks of one replica, gloo; where ranks take turns all are of one
across     the last stage's ranks over all replicas, gloo: weights and losses
owners     the ranks of some stages over all replicas: they hold the same parameters and reduce their gradients
edge       two ranks, NCCL: tensors that go from the one to the other, where every rank has a CUDA device of its own
world      the replicas of this rank's stage: what the model's own code finds as the default group
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from partitioner.errors import PlanMismatchError, SetupError
from partitioner.plan import Plan
from partitioner.specs import counted
from partitioner.wire import Channel, End
from partitioner.world import World


@dataclass
class Mesh:
    """One rank's view of the plan's ranks. World size 1 has no groups at all."""

    plan: Plan
    rank: int
    stage: int
    replica: int
    turn: int
    """Which micro-batches of the stage are this rank's: turn, turn + ranks that take turns, and so on."""
    device: torch.device
    timeout_s: float
    owns_default: bool = False
    """The default process group was made here, and ends with this."""
    has_own_device: bool = False
    """CUDA, and no other rank uses this device: tensors go over NCCL."""
    control: dist.ProcessGroup | None = None
    within_replica: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None
    owners: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    edges: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    """(source rank, target rank) -> group."""
    world: World | None = None

    @property
    def num_stages(self) -> int:
        return self.plan.num_stages

    @property
    def num_replicas(self) -> int:
        return self.plan.num_replicas

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def ranks_in_turn(self, stage: int, replica: int | None = None) -> tuple[int, ...]:
        """The ranks that run a stage, of this replica or another: one, or those that take turns."""
        ranks = self.plan.stages[stage].ranks
        if self.plan.takes_turns:
            return ranks
        return (ranks[self.replica if replica is None else replica],)

    def rank_of(self, stage: int, replica: int | None = None, microbatch: int = 0) -> int:
        """The rank that runs a micro-batch of a stage, of this replica or another."""
        ranks = self.ranks_in_turn(stage, replica)
        return ranks[microbatch % len(ranks)]

    @property
    def num_turns(self) -> int:
        """How many ranks take turns at this one's stage."""
        return len(self.ranks_in_turn(self.stage))

    @property
    def replica_ranks(self) -> list[int]:
        """All ranks of this replica, ascending."""
        return sorted(rank for stage in range(self.num_stages) for rank in self.ranks_in_turn(stage))

    def ranks_of(self, stages: Collection[int]) -> list[int]:
        """The ranks of some stages over all replicas, ascending."""
        return sorted(rank for stage in stages for rank in self.plan.stages[stage].ranks)

    def channel(self, source: int, target: int) -> Channel:
        """How this rank talks to the other one of an edge, which goes from one rank of this replica to another."""
        peer = target if source == self.rank else source
        group = self.edges.get((source, target))
        data = None if group is None else End(group, int(peer > self.rank))
        return Channel(peer, End(self.control, peer), data)

    def make_groups(self, owner_sets: Collection[tuple[int, ...]], edges: Collection[tuple[int, int]]) -> None:
        """Make the groups that depend on the model; the same call on all ranks. `edges` are forward: (from, to)."""
        if self.control is None:
            return
        self.within_replica = self.control
        self.world = self._world()
        if self.num_replicas > 1:
            self.across = self._group(self.ranks_of([self.num_stages - 1]), "gloo")
            replicas = [[self.rank_of(stage, k) for stage in range(self.num_stages)] for k in range(self.num_replicas)]
            self.within_replica = self._one_of(replicas, "gloo") if self.num_stages > 1 else None
        for stages in sorted(owner_sets):
            ranks = self.ranks_of(stages)
            group = self._group(ranks, "nccl" if self.has_own_device else "gloo") if len(ranks) > 1 else None
            if group is not None and self.rank in ranks:
                self.owners[stages] = group
        if self.has_own_device:
            for source, target in sorted({*edges, *((b, a) for a, b in edges)}):
                pairs = [
                    pair
                    for k in range(self.num_replicas)
                    for pair in product(self.ranks_in_turn(source, k), self.ranks_in_turn(target, k))
                ]
                for pair, group in [(pair, self._group(sorted(pair), "nccl")) for pair in pairs]:
                    if self.rank in pair:
                        # Connects: later sends do not wait.
                        dist.all_reduce(torch.zeros(1, device=self.device), group=group)
                        self.edges[pair] = group

    def as_model(self) -> AbstractContextManager[None]:
        """Around the model's own code: its default group is `world`."""
        return nullcontext() if self.world is None else self.world.inside()

    def as_executor(self) -> AbstractContextManager[None]:
        """Around what is done for the model in the midst of its own code."""
        return nullcontext() if self.world is None else self.world.outside()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.plan.num_ranks
        dist.all_gather_object(values, value, group=self.control)
        return values

    def report_failure(self, what: dict[str, Any]) -> None:
        """Leave word of what went wrong here, for the ranks that will lose this one; the first word stays."""
        with contextlib.suppress(Exception):
            self._store().compare_set(self._failure_key(), "", json.dumps(what))

    def first_failure(self, patience_s: float = 1.0) -> dict[str, Any] | None:
        """What the first rank that failed has left word of; None where it could not."""
        with contextlib.suppress(Exception):
            store = self._store()
            if patience_s:
                store.wait([self._failure_key()], timedelta(seconds=patience_s))
            elif not store.check([self._failure_key()]):
                return None
            found: dict[str, Any] = json.loads(store.get(self._failure_key()))
            return found
        return None

    def report_leaving(self) -> None:
        """Leave word that this rank's part has ended as it should, for those that would still wait for it.

        Where the store is not that of a rank, which may have gone before.
        """
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            with contextlib.suppress(Exception):
                self._store().set(self._leaving_key(self.rank), "1")

    def left(self) -> list[int]:
        """The ranks whose part has ended as it should."""
        with contextlib.suppress(Exception):
            return [rank for rank in range(self.plan.num_ranks) if self._store().check([self._leaving_key(rank)])]
        return []

    def close(self) -> None:
        """Take down the groups made here; a rank that still waits for this one learns of it at once."""
        groups = [self.control, self.across, self.within_replica, *self.owners.values(), *self.edges.values()]
        self.control = self.across = self.within_replica = None
        self.owners, self.edges = {}, {}
        if self.world is not None:
            self.world.close()
            groups.append(self.world.inner)
            self.world = None
        if not dist.is_initialized():
            return
        if self.owns_default:
            dist.destroy_process_group()
            return
        for group in {id(group): group for group in groups if group is not None}.values():
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)

    def _world(self) -> World:
        """Where ranks take turns each sees some micro-batches alone, and is alone for the model too."""
        name, ranks = f"{self._name}/model of stage {self.stage}", self.plan.stages[self.stage].ranks
        if self.num_replicas == 1 or self.plan.takes_turns:
            return World(None, 0, 1, name)
        backend = "cpu:gloo,cuda:nccl" if self.has_own_device else "gloo"
        group = self._one_of([list(stage.ranks) for stage in self.plan.stages], backend)
        return World(group, ranks.index(self.rank), len(ranks), name)

    def _one_of(self, sets: list[list[int]], backend: str) -> dist.ProcessGroup:
        """Make one group of each set; this rank's own, or any where it is in none."""
        groups = [self._group(ranks, backend) for ranks in sets]
        return next((group for group, ranks in zip(groups, sets, strict=True) if self.rank in ranks), groups[0])

    def _group(self, ranks: list[int], backend: str) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=self.timeout_s))
        return group

    def _store(self) -> Any:
        return dist.distributed_c10d._get_default_store()

    def _failure_key(self) -> str:
        return f"partitioner/first failure/{self._name}"

    def _leaving_key(self, rank: int) -> str:
        return f"partitioner/left/{self._name}/{rank}"

    _name: str = ""


def join_mesh(plan: Plan, device: str | torch.device | None, timeout_s: float) -> Mesh:
    """Find the other ranks of the plan.

    PlanMismatchError before anything is sent where the number of processes is not the plan's; SetupError where the
    kind of device that the plan was made for is not here.
    """
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world != plan.num_ranks:
        raise PlanMismatchError(
            f"the plan is for {plan.num_ranks} ranks ({_shape(plan)}), but {world} "
            f"{'process was' if world == 1 else 'processes were'} started. Start it with torchrun --nproc-per-node "
            f"{plan.num_ranks} train.py, or call partitioner.launch(train, plan)"
        )
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"]) if world > 1 else 0
    stage = next(stage for stage in plan.stages if rank in stage.ranks)
    at = stage.ranks.index(rank)
    replica, turn = (0, at) if plan.takes_turns else (at, 0)
    mesh = Mesh(plan, rank, stage.index, replica, turn, _device(plan, rank, device), timeout_s)
    if world == 1:
        return mesh
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if mesh.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        mesh.owns_default = True
    mesh.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    mesh._name = str(mesh.control.group_name)
    places = mesh.gather((socket.gethostname(), str(mesh.device)))
    mesh.has_own_device = mesh.device.type == "cuda" and len(set(places)) == len(places)
    return mesh


def _shape(plan: Plan) -> str:
    if plan.takes_turns:
        return f"{' + '.join(str(len(stage.ranks)) for stage in plan.stages)} of its stages"
    return f"{counted(plan.num_stages, 'stage')} x {counted(plan.num_replicas, 'replica')}"


def _device(plan: Plan, rank: int, device: str | torch.device | None) -> torch.device:
    """The device asked for, by default the plan's: of a node with as many ranks as in the plan, the CUDA device of the
    number that it has among the node's; elsewhere (ranks are started on other nodes) that of the local rank."""
    wanted = torch.device(plan.device_of(rank).kind if device is None else device)
    if wanted.type != "cuda":
        return wanted
    count = torch.cuda.device_count()
    if not count:
        raise SetupError(
            f"the plan is for {plan.device_of(rank).name}, but torch finds no CUDA device here; "
            'to run it on CPU ranks all the same, pass device="cpu"'
        )
    if ":" in str(wanted):
        index = wanted.index
    else:
        node = [plan.node_of(other) for other in range(plan.num_ranks)]
        planned = node.count(node[rank]) == int(os.environ.get("LOCAL_WORLD_SIZE", plan.num_ranks))
        index = (plan.index_in_node(rank) if planned else int(os.environ.get("LOCAL_RANK", "0"))) % count
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
