"""Search the order of a pipeline whose backwards are in two parts, from its stages' own times and a memory limit.

The textbook zero-bubble orders suppose that F, I and W take equally long on equal stages. Here each rank of a simulated
pipeline decides, whenever it is free, what to run of that for which all has arrived:

    I   first: the stage before waits for it
    W   next, where more of them are due than the stage may put off
    F   next, while the rank has room, and the stage is not further ahead of its backwards than it may be
    W   else: it lets go of memory, and nobody waits for it

How far ahead, how many W are put off, whether any may be at the end, and for how long a rank that has only W to run
rather waits for a message: these are tried in a few values each, and the clock decides. So are the textbook orders that
fit; what is found is never worse than they are. The pattern is that of Qi et al. 2024, Zero Bubble Pipeline Parallelism
(https://arxiv.org/abs/2401.10241), whose automatic orders come from a heuristic of this kind.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

from partitioner.actions import Action, Orders, Table, check_schedule
from partitioner.clock import Replica, run_clock
from partitioner.errors import ArgumentError


class Ordered(NamedTuple):
    """The best order found."""

    orders: Orders
    step_s: float
    """From the first action to the last."""
    period_s: float
    """From step to step where ranks do not wait for each other between them: the longest that one is at work."""


class Room(NamedTuple):
    """What ranks can hold, in any unit."""

    limits: tuple[float, ...]
    """By rank."""
    held: tuple[float, ...]
    """By stage: what one micro-batch takes from its F on."""
    until_weight: float = 1.0
    """The share of it that is held from I until W; the rest goes with I."""

    @classmethod
    def microbatches(cls, count: float, places: Sequence[int], *, until_weight: float = 1.0) -> Room:
        """Each rank has room for so many micro-batches of one stage."""
        return cls((float(count),) * (1 + max(places)), (1.0,) * len(places), until_weight)

    def most(self, order: Sequence[Action]) -> float:
        """The most that a rank holds at once.

        >>> Room((3.0,), (1.0,), 0.5).most([Action.parse(word) for word in "0F0 0F1 0I0 0F2 0I1 0W0".split()])
        2.5
        """
        change = {"F": 1.0, "B": -1.0, "I": self.until_weight - 1.0, "W": -self.until_weight}
        now = most = 0.0
        for stage, kind, _ in order:
            now += change[kind] * self.held[stage]
            most = max(most, now)
        return most


def search_order(
    replica: Replica,
    places: Sequence[int],
    num_microbatches: int,
    room: Room,
    *,
    textbook: Iterable[Orders] = (),
    barrier: bool = True,
    overhead_s: float = 0.0,
    overlap: bool = True,
) -> Ordered:
    """The fastest order found of F, I and W on each rank; any arrangement of stages on ranks.

    places: the rank of each stage. textbook: orders to compare with; those that hold too much are left out. barrier:
    the step counts; without one, ranks go on to the next step as soon as they are done, and the period counts.
    O(tries x actions x log ranks).

    ArgumentError where a rank cannot hold one micro-batch of each of its stages.
    """
    for rank, limit in enumerate(room.limits):
        least = sum(room.held[stage] for stage, at in enumerate(places) if at == rank)
        if least > limit:
            raise ArgumentError(
                f"rank {rank} has room for {limit:g}, but one micro-batch of each of its stages takes {least:g}: use "
                "smaller micro-batches"
            )
    edges = [(one.source, one.target) for one in replica.transfers]
    tried: list[Ordered] = []

    def run(orders: Orders) -> None:
        clock = run_clock(Table.of(orders), replica, overhead_s=overhead_s, overlap=overlap)
        tried.append(Ordered(orders, float(clock.rank_end_s.max()), clock.period_s))

    for orders in textbook:
        if all(room.most(order) <= limit * (1 + ROUNDING) for order, limit in zip(orders, room.limits, strict=True)):
            check_schedule(orders, edges)
            run(orders)
    for policy in POLICIES:
        found = _Greedy(replica, places, num_microbatches, room, overhead_s, policy).run()
        if found is not None:
            run(found)
    if not tried:
        raise ArgumentError("no order of this pipeline was found in the room there is: allow more, or use fewer stages")
    return min(tried, key=lambda one: (one.step_s, one.period_s) if barrier else (one.period_s, one.step_s))


class _Policy(NamedTuple):
    ahead: float
    """F before I on stage 0, as a share of what its rank can hold; less on later stages, 1 on the last."""
    lag: float
    """W put off on the last stage, likewise; less on earlier stages, 0 on the first."""
    tail: float
    """For so many of the last micro-batches, as a share of what a rank can hold, W is put off as room allows."""
    patience: float
    """Share of a W for which a rank rather waits for a message."""


POLICIES = [
    *(_Policy(1.0, *rest) for rest in product((0.0, 0.25, 0.5, 1.0), (0.0, 1.0), (0.0, 0.5, 1.0))),
    *(_Policy(ahead, 1.0, 1.0, patience) for ahead, patience in product((0.7, 9.0), (0.0, 0.5, 1.0))),
]
ROUNDING = 1e-9


class _Greedy:
    """One pass over time. Events are (time, rank): the rank is free, or something has arrived there."""

    def __init__(
        self,
        replica: Replica,
        places: Sequence[int],
        num_microbatches: int,
        room: Room,
        overhead_s: float,
        policy: _Policy,
    ) -> None:
        self.places, self.m, self.room, self.patience = places, num_microbatches, room, policy.patience
        num_stages, num_ranks = len(places), len(room.limits)
        self.seconds = {
            (stage, kind): cost.seconds(kind) + overhead_s
            for stage, cost in enumerate(replica.stages)
            for kind in "FIW"
        }
        self.own = [[stage for stage in range(num_stages) if places[stage] == rank] for rank in range(num_ranks)]
        counts = [
            room.limits[at] / room.held[stage] if room.held[stage] else math.inf for stage, at in enumerate(places)
        ]
        counts = [min(count, num_microbatches) for count in counts]
        back = [(num_stages - 1 - stage) / max(1, num_stages - 1) for stage in range(num_stages)]
        self.ahead = [1 + policy.ahead * (count - 1) * far for count, far in zip(counts, back, strict=True)]
        self.lag = [policy.lag * count * (1 - far) for count, far in zip(counts, back, strict=True)]
        self.tail = num_microbatches - policy.tail * max(counts)
        self.to: dict[tuple[int, str], list[tuple[int, float]]] = {}
        self.needs: dict[tuple[int, str], int] = {}
        for one in replica.transfers:
            self.to.setdefault((one.source, "F"), []).append((one.target, one.forward_s))
            self.to.setdefault((one.target, "I"), []).append((one.source, one.backward_s))
            for key in ((one.target, "F"), (one.source, "I")):
                self.needs[key] = self.needs.get(key, 0) + 1
        self.arrived: dict[tuple[int, str, int], tuple[int, float]] = {}
        """(messages that are there or on their way, when the last of them comes)."""
        self.done = {(stage, kind): 0 for stage in range(num_stages) for kind in "FIW"}
        self.held = [0.0] * num_ranks
        self.free = [0.0] * num_ranks
        self.wire: dict[tuple[int, int], float] = {}
        self.orders: list[list[Action]] = [[] for _ in range(num_ranks)]

    def run(self) -> Orders | None:
        """None: it came to a dead end, where every rank waits for room."""
        change = {"F": 1.0, "I": self.room.until_weight - 1.0, "W": -self.room.until_weight}
        events = [(0.0, rank) for rank in range(len(self.free))]
        while events:
            now, rank = heapq.heappop(events)
            if now < self.free[rank]:
                continue  # at work; it asks again when it is done
            chosen = self._choose(rank, now)
            if chosen is None:
                continue
            stage, kind = chosen
            k = self.done[chosen]
            self.done[chosen] = k + 1
            self.orders[rank].append(Action(stage, kind, k))
            self.held[rank] += change[kind] * self.room.held[stage]
            end = self.free[rank] = now + self.seconds[chosen]
            heapq.heappush(events, (end, rank))
            for target, seconds in self.to.get(chosen, ()):
                other = self.places[target]
                at = self.wire[rank, other] = max(end, self.wire.get((rank, other), 0.0)) + seconds
                count, last = self.arrived.get((target, kind, k), (0, 0.0))
                self.arrived[target, kind, k] = (count + 1, max(last, at))
                heapq.heappush(events, (at, other))
        return self.orders if all(count == self.m for count in self.done.values()) else None

    def _choose(self, rank: int, now: float) -> tuple[int, str] | None:
        own, done = self.own[rank], self.done
        comes = {stage: self._ready(stage, "I") for stage in own}
        inputs = [stage for stage in own if comes[stage] <= now]
        if inputs:
            return max(inputs, key=lambda stage: (-done[stage, "I"], stage)), "I"
        pending = {stage: done[stage, "I"] - done[stage, "W"] for stage in own if done[stage, "W"] < done[stage, "I"]}
        due = [stage for stage, count in pending.items() if count > self.lag[stage] and done[stage, "I"] < self.tail]
        if due:
            return max(due), "W"
        soonest = min(comes.values())
        for stage in reversed(own):
            at = self._ready(stage, "F")
            if at < math.inf and self._may_start(rank, stage):
                if at <= now:
                    return stage, "F"
                soonest = min(soonest, at)
        if pending:
            stage = max(pending, key=lambda one: (-done[one, "W"], one))
            if not self.patience or soonest >= now + self.patience * self.seconds[stage, "W"]:
                return stage, "W"
        return None

    def _may_start(self, rank: int, stage: int) -> bool:
        """Whether there is room for one more micro-batch, here and where it comes by again."""
        k = self.done[stage, "F"]
        if k + 1 - self.done[stage, "I"] > self.ahead[stage] + ROUNDING:
            return False
        again = sum(self.room.held[one] for one in self.own[rank] if one > stage and self.done[one, "F"] <= k)
        limit = self.room.limits[rank] * (1 + ROUNDING)
        return self.held[rank] + self.room.held[stage] + again <= limit

    def _ready(self, stage: int, kind: str) -> float:
        """When the next one of the stage can start; inf: what it needs is not on its way."""
        k = self.done[stage, kind]
        if k >= self.m or (kind == "I" and self.done[stage, "F"] <= k):
            return math.inf
        count, last = self.arrived.get((stage, kind, k), (0, 0.0))
        return last if count == self.needs.get((stage, kind), 0) else math.inf
