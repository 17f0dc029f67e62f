"""Which call of its stage each rank makes: the same one on all, or an error that names both.

A rank says what it calls in one small message that it does not wait for. The ranks of a replica say it to the one that
has the last stage, whose own call waits for them in any case; the ranks that hold one stage in several replicas say it
to the first of these, before what they do together.

    rank 0, stage 0    stage.clip_grad_norm_ --.
    rank 1, stage 1    stage.train_step -------+--> rank 2, stage 2    stage.train_step: an ArgumentError

Whoever finds two of them stops with that error, and with it all that wait for this rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from partitioner.errors import ArgumentError
from partitioner.executor.mesh import Mesh
from partitioner.wire import End, PeerLost, peer_lost

SCALER = "GradScaler's step or update"
OF_ALL = (
    "stage.train_step",
    "stage.eval_loss",
    "stage.full_state_dict",
    "stage.save_checkpoint",
    "stage.load_checkpoint",
    "stage.timeline",
    SCALER,
)
"""Made by all ranks together."""
OF_A_REPLICA = ("stage.eval_step", "stage.clip_grad_norm_")
"""By those of each replica; by all where a stage's replicas divide the optimizer's state."""
OF_A_STAGE = ("stage.state_dict", "stage.close")
"""By the replicas of a stage that divide the optimizer's state."""
CALLS = (*OF_ALL, *OF_A_REPLICA, *OF_A_STAGE)


class Calls:
    """Says on this rank what it calls, and looks whether others call the same, where that is this rank's part."""

    def __init__(self, mesh: Mesh, divides: bool) -> None:
        """`divides`: whether the replicas of this rank's stage divide the optimizer's state."""
        here = list(mesh.plan.stages[mesh.stage].ranks)
        self._divides, self._is_last = divides, mesh.is_last
        self._in_replica = _Comparison(mesh, mesh.replica_ranks, mesh.rank_of(mesh.num_stages - 1), 1)
        self._of_stage = _Comparison(mesh, [] if mesh.plan.takes_turns else here, here[0], 2)

    def begin(self, call: str) -> None:
        """This rank makes the call; an ArgumentError where it is known that another makes another one."""
        if call not in OF_A_STAGE:
            self._in_replica.tell(call)
        if self._divides or (self._is_last and call in OF_ALL):
            self._of_stage.tell(call)

    def drop(self) -> None:
        """Let go of messages on their way."""
        self._in_replica.drop()
        self._of_stage.drop()


class _Comparison:
    """What some ranks call: all say it to one of them."""

    def __init__(self, mesh: Mesh, ranks: Sequence[int], looking: int, tag: int) -> None:
        self._mesh, self._ranks, self._looking, self._tag = mesh, ranks, looking, tag
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()

    def tell(self, call: str) -> None:
        if len(self._ranks) < 2:
            return
        if self._mesh.rank == self._looking:
            self._compare(call)
            return
        number = torch.tensor([CALLS.index(call)])
        try:
            self._under_way.append((self._end(self._looking).send(number), number))
            if len(self._under_way) > 2 * len(self._ranks):  # far more than ranks can be ahead of each other
                self._under_way.popleft()[0].wait()
        except RuntimeError as error:
            raise peer_lost(self._looking, error) from error

    def drop(self) -> None:
        self._under_way.clear()

    def _compare(self, call: str) -> None:
        made = {self._mesh.rank: call}
        awaited = [(rank, torch.zeros(1, dtype=torch.int64)) for rank in self._ranks if rank != self._looking]
        for rank, work, number in [(rank, self._receive(rank, number), number) for rank, number in awaited]:
            try:
                work.wait()
            except RuntimeError as error:
                lost = peer_lost(rank, error)
                raise PeerLost(f"{lost}, while rank {self._mesh.rank} calls {call}", rank=rank) from error
            made[rank] = CALLS[int(number)]
        if len(set(made.values())) > 1:
            raise ArgumentError(told(made))

    def _receive(self, rank: int, number: torch.Tensor) -> Any:
        try:
            return self._end(rank).receive(number)
        except RuntimeError as error:
            raise peer_lost(rank, error) from error

    def _end(self, peer: int) -> End:
        return End(self._mesh.control, peer, self._tag)


def told(made: dict[int, str]) -> str:
    """Who calls what, by rank.

    >>> told({2: "stage.train_step", 0: "stage.eval_loss", 1: "stage.train_step"})[:71]
    'rank 0 calls stage.eval_loss, ranks 1, 2 call stage.train_step: make bo'
    """
    ranks: dict[str, list[int]] = {}
    for rank, call in sorted(made.items()):
        ranks.setdefault(call, []).append(rank)
    who = [
        f"rank {some[0]} calls {call}" if len(some) == 1 else f"ranks {', '.join(map(str, some))} call {call}"
        for call, some in ranks.items()
    ]
    both = "both" if len(who) == 2 else "all of them"
    return f"{', '.join(who)}: make {both} on every rank, in the same order"
