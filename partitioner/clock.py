"""When everything happens: the lists of a schedule against the seconds of its actions and messages.

- A rank runs its actions one after another. Each takes its stage's time plus `overhead_s`.
- A send does not block the sender. The message leaves when the action that made it has ended and the wire is free: from
  one rank to another there is one wire a direction, with one message on it at a time, in the order of sending.
  Different pairs of ranks do not slow each other.
- An action starts when its rank is free and all that it receives has arrived. `overlap=True`: receives are posted
  ahead, so a message travels while the receiver computes. `overlap=False`: a receive is posted when its action is
  next, so nothing travels before; the receiver waits for its messages one after another, in the order of their source.

        start = max(rank free, arrivals);   leaves = max(end, wire free);   arrives = leaves + seconds

The lists are walked in rounds: in each, every rank whose next action has all its messages runs it, all ranks in one
step of numpy. A round is a column of the schedule's grid, so there are about as many as one rank has actions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.actions import KINDS, Table, check_schedule
from partitioner.errors import ArgumentError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StageCost:
    """Seconds of one stage: a forward and a backward of one micro-batch, then once a step its sync and optimizer."""

    forward_s: float
    backward_s: float
    sync_s: float = 0.0
    """Gradients reduced after the last backward: over replicas, and over the owners of shared parameters."""
    optimizer_s: float = 0.0
    backward_input_s: float | None = None
    """Of a backward in two parts, the one that the stage before waits for; None: half of `backward_s`."""
    backward_weight_s: float | None = None
    """The other one; None: what is left of `backward_s`. Two parts may take longer than the whole."""

    def seconds(self, kind: str) -> float:
        """Of an action of that kind.

        >>> [StageCost(1.0, 3.0, backward_input_s=2.0).seconds(kind) for kind in "FBIW"]
        [1.0, 3.0, 2.0, 1.0]
        """
        if kind in "FB":
            return self.forward_s if kind == "F" else self.backward_s
        input_s = self.backward_s / 2 if self.backward_input_s is None else self.backward_input_s
        weight_s = max(0.0, self.backward_s - input_s) if self.backward_weight_s is None else self.backward_weight_s
        return input_s if kind == "I" else weight_s


@dataclass(frozen=True)
class Transfer:
    """Seconds of one micro-batch's message from one stage to a later one, and of its gradient's way back."""

    source: int
    target: int
    forward_s: float
    backward_s: float


class Replica(NamedTuple):
    """What one copy of the pipeline costs on its devices."""

    stages: tuple[StageCost, ...]
    transfers: tuple[Transfer, ...]


class Way(NamedTuple):
    """One way of a transfer: the stage that sends, the one that receives, what they run, and where it goes."""

    source: int
    target: int
    kind: str
    """F, or I for what comes back, of whole backwards too."""
    seconds: float
    wire: int
    out: int
    """The messages that an action sends are numbered from 0 on, and likewise those that it receives."""
    into: int


def ways_of(replica: Replica, rank_of: Sequence[int]) -> list[Way]:
    """Both ways of all transfers. From one rank to another there is one wire."""
    wires: dict[tuple[int, int], int] = {}
    sent: dict[tuple[int, str], int] = {}
    received: dict[tuple[int, str], int] = {}
    ways = []
    for one in replica.transfers:
        for source, target, kind, seconds in (
            (one.source, one.target, "F", one.forward_s),
            (one.target, one.source, "I", one.backward_s),
        ):
            wire = wires.setdefault((rank_of[source], rank_of[target]), len(wires))
            out, into = sent.get((source, kind), 0), received.get((target, kind), 0)
            ways.append(Way(source, target, kind, seconds, wire, out, into))
            sent[source, kind], received[target, kind] = out + 1, into + 1
    return ways


def wires_bind(ways: Sequence[Way], least_s: Mapping[str, Sequence[float]]) -> bool:
    """Whether a message can find its wire taken.

    Not where none takes longer than any action that sends over the same wire (`least_s` of F or I, by stage), and no
    action sends two over one: it has then arrived before the next is made.
    """
    longest: dict[int, float] = {}
    least: dict[int, float] = {}
    senders: set[tuple[int, int, str]] = set()
    twice: set[int] = set()
    for source, _, kind, seconds, wire, _, _ in ways:
        longest[wire] = max(seconds, longest.get(wire, 0.0))
        least[wire] = min(least_s[kind][source], least.get(wire, math.inf))
        if (wire, source, kind) in senders:
            twice.add(wire)
        senders.add((wire, source, kind))
    return any(most > 0 and (wire in twice or most > least[wire]) for wire, most in longest.items())


@dataclass(frozen=True)
class StepTimes:
    """What a step of one replica comes to, without its moments."""

    rank_end_s: Floats
    """[ranks] the end of each rank's last action."""
    busy_s: Floats
    """[stages] the seconds of all its actions."""
    waited_s: Floats
    """[stages] seconds for which a stage's rank waits for what the stage receives."""
    finished: Ints
    """[stages] a number each; of two stages of one rank, the smaller one is done first."""
    walked: float
    """Share of the step that was gone through; the rest is a steady state that was seen before."""


@dataclass(frozen=True)
class Clock:
    """One step of one replica. Arrays are by action that was walked, in the order of the walk."""

    ranks: Ints
    stages: Ints
    kinds: Ints
    """Positions in `KINDS`."""
    microbatches: Ints
    free_s: Floats
    """When the rank was done with what came before."""
    start_s: Floats
    end_s: Floats
    sent_s: Floats
    """[actions, messages received]: when each was sent, or where nothing overlaps left; -inf where there are fewer."""
    arrived_s: Floats
    """Likewise when it had come in."""
    messages: tuple[Message, ...]
    rank_end_s: Floats
    """[ranks] the end of each rank's last action."""

    @property
    def period_s(self) -> float:
        """From step to step where ranks go on to the next without waiting for each other: the longest that one is at
        work, from its first action to the end of its last.
        """
        first = np.full(len(self.rank_end_s), np.inf)
        np.minimum.at(first, self.ranks, self.start_s)
        return float((self.rank_end_s - first).max())

    @cached_property
    def waits(self) -> list[tuple[Floats, Floats]]:
        """(from, until) by message received: the rank waits for it while it is on its way; no wait where until <= from.

        Before a message was sent, its receiver is idle. Of several messages, the rank waits in the order of sending.
        """
        return waits_of(self.free_s, self.sent_s, self.arrived_s)

    @property
    def step(self) -> StepTimes:
        num_stages = 1 + int(self.stages.max())
        busy_s, waited_s, last = np.zeros(num_stages), np.zeros(num_stages), np.zeros(num_stages, np.int64)
        np.add.at(busy_s, self.stages, self.end_s - self.start_s)
        for since, until in self.waits:
            np.add.at(waited_s, self.stages, np.maximum(0.0, until - since))
        np.maximum.at(last, self.stages, np.arange(len(self.stages)))
        return StepTimes(self.rank_end_s, busy_s, waited_s, last, 1.0)


def waits_of(free_s: Floats, sent_s: Floats, arrived_s: Floats) -> list[tuple[Floats, Floats]]:
    """`Clock.waits` of actions whose rank was free then, with messages [actions, those received]."""
    order = np.argsort(sent_s, axis=1, kind="stable") if sent_s.shape[1] > 1 else None
    waits, now, rows = [], free_s, np.arange(len(free_s))
    for d in range(sent_s.shape[1]):
        at = d if order is None else order[:, d]
        sent, arrived = (sent_s[:, d], arrived_s[:, d]) if order is None else (sent_s[rows, at], arrived_s[rows, at])
        since = np.maximum(now, sent)
        now = np.maximum(since, arrived)
        waits.append((since, now))
    return waits


class Message(NamedTuple):
    """All messages of one edge between stages, one way. `left_s` and `arrived_s` are by micro-batch."""

    source: int
    target: int
    kind: str
    seconds: float
    left_s: Floats
    arrived_s: Floats


def run_clock(table: Table, replica: Replica, *, overhead_s: float = 0.0, overlap: bool = True) -> Clock:
    """The times of every action and message. O(rounds x transfers a stage), each step over all ranks.

    That each stage runs F, then B or I, then W of a micro-batch is taken for granted. A schedule that cannot run, or
    that has other stages than `replica`, is an ArgumentError.
    """
    walk = _Walk(table, replica, overhead_s, overlap)
    while walk.step():
        pass
    if walk.stuck:
        check_schedule(table.orders(), [(one.source, one.target) for one in replica.transfers])
        raise ArgumentError("this schedule cannot be run: some action waits for a message that is sent in no round")
    return walk.clock()


class _Walk:
    """The state of the walk. A code is 4 x stage + kind; a channel is one way of a transfer.

    Messages have cells, channel x m + micro-batch. Behind them are three channels more: no message (-inf), one that
    never comes (what stands behind a rank's last action waits for it), and one that is written to be forgotten.
    """

    def __init__(self, table: Table, replica: Replica, overhead_s: float, overlap: bool) -> None:
        there = 1 + int(table.stages.max(initial=-1))
        if not there or there != len(replica.stages):
            raise ArgumentError(f"the schedule has {there} stages, but costs are given for {len(replica.stages)}")
        self.replica, self.overlap = replica, overlap
        self.num_ranks, self.m = len(table.stages), 1 + int(table.microbatches.max())
        self.past = 4 * there
        """The code behind the last action."""
        self.codes = np.full((self.num_ranks, table.stages.shape[1] + 1), self.past)
        self.ks = np.zeros_like(self.codes)
        self.codes[:, :-1] = np.where(table.stages >= 0, 4 * table.stages + table.kinds, self.past)
        self.ks[:, :-1] = table.microbatches
        self.row = np.arange(self.num_ranks) * self.codes.shape[1]
        self.seconds = np.array([cost.seconds(kind) + overhead_s for cost in replica.stages for kind in KINDS] + [0.0])
        rank_of = np.zeros(there + 1, np.int64)
        rank_of[table.stages] = np.arange(self.num_ranks)[:, None]
        self._lay_channels(rank_of.tolist())
        self.pos, self.free = np.zeros(self.num_ranks, np.int64), np.zeros(self.num_ranks)
        self.rounds, self.stuck = 0, False
        self.log: dict[str, NDArray[Any]] = {}
        self._grow(self.codes.shape[1] + 2 * self.num_ranks)

    def _lay_channels(self, rank_of: Sequence[int]) -> None:
        out: list[list[int]] = [[] for _ in range(self.past + 1)]
        into: list[list[int]] = [[] for _ in range(self.past + 1)]
        self.ways = ways_of(self.replica, rank_of)
        for at, way in enumerate(self.ways):
            for kind in "F" if way.kind == "F" else "BI":
                out[4 * way.source + KINDS.index(kind)].append(at)
                into[4 * way.target + KINDS.index(kind)].append(at)
        count = len(self.ways)
        self.num_cells = count * self.m
        ran = np.full(self.past + 1, np.inf)
        ran[self.codes] = self.seconds[self.codes]
        least = {"F": ran[0::4].tolist(), "I": np.minimum(ran[1 : self.past : 4], ran[2 : self.past : 4]).tolist()}
        self.wires_bind = self.overlap and wires_bind(self.ways, least)
        self.into, self.out = _by_turn(into, count), _by_turn(out, count + 2)
        self.into[0][self.past] = count + 1
        num_wires = 1 + max((way.wire for way in self.ways), default=-1)
        self.way_s = np.array([*(way.seconds for way in self.ways), 0.0, 0.0, 0.0])
        self.wire = np.array([*(way.wire for way in self.ways), *[num_wires] * 3])
        self.first_cell = np.arange(count + 3) * self.m
        self.none, self.nowhere, self.dump = self.num_cells, self.num_cells + 2 * self.m, num_wires
        self.wire_free = np.zeros(num_wires + 1)
        self.arrived = np.full(self.num_cells + 3 * self.m, np.inf)
        self.arrived[self.none : self.none + self.m] = -np.inf
        self.sent, self.left = self.arrived, self.arrived
        if self.wires_bind or not self.overlap:
            self.sent, self.left = self.arrived.copy(), self.arrived.copy()

    def _grow(self, rounds: int) -> None:
        for name, shape, kind in (
            ("pos", (self.num_ranks,), np.int64),
            ("free", (self.num_ranks,), np.float64),
            ("start", (self.num_ranks,), np.float64),
            ("arrived", (len(self.into), self.num_ranks), np.float64),
            ("sent", (len(self.into) * (self.sent is not self.arrived), self.num_ranks), np.float64),
        ):
            rows: NDArray[Any] = np.empty((rounds, *shape), kind)
            self.log[name] = np.concatenate([self.log[name], rows]) if name in self.log else rows

    def step(self) -> bool:
        """One round; False: no rank can go on."""
        if self.rounds == len(self.log["start"]):
            self._grow(self.rounds)
        t, log, at = self.rounds, self.log, self.row + self.pos
        code, k = self.codes.take(at), self.ks.take(at)
        start = self.free
        for d, turn in enumerate(self.into):
            channel = turn.take(code)
            cell = self.first_cell.take(channel) + k
            if self.overlap:
                came = log["arrived"][t, d] = self.arrived.take(cell)
                start = np.maximum(start, came)
                if self.wires_bind:
                    log["sent"][t, d] = self.sent.take(cell)
            else:
                begun = np.maximum(start, self.sent.take(cell))
                start = begun + self.way_s.take(channel)
                real = cell < self.none
                log["sent"][t, d] = np.where(real, begun, -np.inf)
                log["arrived"][t, d] = np.where(real, start, -np.inf)
                self.left[cell[real]], self.arrived[cell[real]] = begun[real], start[real]
        go = start < np.inf
        everyone = bool(go.all())
        if not everyone and not go.any():
            self.stuck = bool((code < self.past).any())
            return False
        log["pos"][t], log["free"][t], log["start"][t] = self.pos, self.free, start
        end = start + self.seconds.take(code)
        if not everyone:
            end = np.where(go, end, self.free)
        for turn in self.out:
            channel = turn.take(code)
            cell = self.first_cell.take(channel) + k
            if not everyone:
                cell[~go] = self.nowhere
            if not self.overlap:
                self.sent[cell] = end
            elif not self.wires_bind:
                self.arrived[cell] = end + self.way_s.take(channel)
            else:
                wire = np.where(go, self.wire.take(channel), self.dump)
                left = np.maximum(end, self.wire_free.take(wire))
                arrives = left + self.way_s.take(channel)
                self.sent[cell], self.left[cell], self.arrived[cell], self.wire_free[wire] = end, left, arrives, arrives
        self.free, self.pos = end, self.pos + go
        self.rounds += 1
        return True

    def clock(self) -> Clock:
        t = self.rounds
        ran = self.log["start"][:t] < np.inf
        at = (self.row + self.log["pos"][:t])[ran]
        codes, start = self.codes.take(at), self.log["start"][:t][ran]
        arrived = np.moveaxis(self.log["arrived"][:t], 1, 2)[ran]
        if self.sent is self.arrived:
            sent = arrived - np.stack([self.way_s[turn[codes]] for turn in self.into], axis=1)
        else:
            sent = np.moveaxis(self.log["sent"][:t], 1, 2)[ran]
        arrivals = self.arrived[: self.num_cells].reshape(-1, self.m)
        left = self.left[: self.num_cells].reshape(-1, self.m)
        messages = []
        for way, came, went in zip(self.ways, arrivals, left, strict=True):
            messages.append(Message(*way[:4], came - way.seconds if self.left is self.arrived else went, came))
        return Clock(
            ranks=np.broadcast_to(np.arange(self.num_ranks), ran.shape)[ran],
            stages=codes // 4,
            kinds=codes % 4,
            microbatches=self.ks.take(at),
            free_s=self.log["free"][:t][ran],
            start_s=start,
            end_s=start + self.seconds.take(codes),
            sent_s=sent,
            arrived_s=arrived,
            messages=tuple(messages),
            rank_end_s=self.free,
        )


def _by_turn(lists: Sequence[Sequence[int]], none: int) -> list[Ints]:
    """The first of each list, the second of each list, ...; `none` where there are fewer."""
    longest = max(1, *map(len, lists))
    return [np.array([some[turn] if turn < len(some) else none for some in lists]) for turn in range(longest)]
