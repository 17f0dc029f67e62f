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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.actions import KINDS, Table, check_schedule
from partitioner.errors import ArgumentError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EXACT = 1e-13
"""Relative; rounding of a sum of seconds. Steady states that agree to it are the same."""
MOST_PERIODS = 128
"""Of the lists, up to which one period of a steady state is looked for."""


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
    times: Ints
    """How many actions this one stands for: 1, or more where periods of a steady state were jumped over."""
    sent_s: Floats
    """[actions, messages received]: when each was sent; -inf where there are fewer."""
    arrived_s: Floats
    """Likewise when it had come in."""
    messages: tuple[Message, ...]
    """Without those that were jumped over."""
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
        order = np.argsort(self.sent_s, axis=1, kind="stable") if self.sent_s.shape[1] > 1 else None
        waits, now = [], self.free_s
        for d in range(self.sent_s.shape[1]):
            at = np.full(len(now), d) if order is None else order[:, d]
            rows = np.arange(len(now))
            since = np.maximum(now, self.sent_s[rows, at])
            now = np.maximum(since, self.arrived_s[rows, at])
            waits.append((since, now))
        return waits

    def waited_s(self, num_stages: int) -> Floats:
        """[stages] seconds for which a stage's rank waits for what the stage receives."""
        seconds = np.zeros(num_stages)
        for since, until in self.waits:
            np.add.at(seconds, self.stages, np.where(until > since, until - since, 0.0) * self.times)
        return seconds


class Message(NamedTuple):
    """All messages of one edge between stages, one way. `left_s` and `arrived_s` are by micro-batch."""

    source: int
    target: int
    kind: str
    seconds: float
    left_s: Floats
    arrived_s: Floats


def run_clock(
    table: Table, replica: Replica, *, overhead_s: float = 0.0, overlap: bool = True, jump: bool = False
) -> Clock:
    """The times of every action and message. O(rounds x transfers a stage), each step over all ranks.

    jump: long schedules reach a steady state, in which everything happens again `g` micro-batches later, all by the
    same `d` seconds. When the whole state (what each rank does next, when it is free, every message on its way) has
    been seen to move so over a period, and the lists go on as they did for n more periods, then n x d passes: the walk
    goes on behind them. The result is that of the whole walk, to rounding; where no such state is found, it is the
    whole walk.

    That each stage runs F, then B or I, then W of a micro-batch is taken for granted, and for `jump` that it runs
    micro-batches in ascending order. A schedule that cannot run, or that has other stages than `replica`, is an
    ArgumentError.
    """
    walk = _Walk(table, replica, overhead_s, overlap)
    while walk.step():
        if jump and walk.rounds >= walk.look_at:
            walk.try_jump()
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
        self.rounds, self.since, self.look_at, self.stuck = 0, 0, 2 * self.num_ranks + 4, False
        self.base: int | None = None
        self.log: dict[str, NDArray[Any]] = {}
        self._grow(self.codes.shape[1] + 2 * self.num_ranks)

    def _lay_channels(self, rank_of: Sequence[int]) -> None:
        out: list[list[int]] = [[] for _ in range(self.past + 1)]
        into: list[list[int]] = [[] for _ in range(self.past + 1)]
        wires: dict[tuple[int, int], int] = {}
        on_wire, way_s, free_again = [], [], True
        self.ways: list[tuple[int, int, str, float]] = []
        for one in self.replica.transfers:
            for way in ((one.source, one.target, "F", one.forward_s), (one.target, one.source, "I", one.backward_s)):
                for kind in "F" if way[2] == "F" else "BI":
                    code = 4 * way[0] + KINDS.index(kind)
                    out[code].append(len(self.ways))
                    into[4 * way[1] + KINDS.index(kind)].append(len(self.ways))
                    free_again &= way[3] <= self.seconds[code]
                pair = rank_of[way[0]], rank_of[way[1]]
                on_wire.append(wires.setdefault(pair, len(wires)))
                way_s.append(way[3])
                self.ways.append(way)
        count = len(self.ways)
        self.num_cells = count * self.m
        # A wire of one channel, whose messages take no longer than the action that makes them, is always free.
        always_free = not any(way_s) or (free_again and len(wires) == count)
        self.wires_bind = self.overlap and not always_free
        self.into, self.out = _by_turn(into, count), _by_turn(out, count + 2)
        self.into[0][self.past] = count + 1
        self.way_s, self.wire = np.array([*way_s, 0.0, 0.0, 0.0]), np.array([*on_wire, *[len(wires)] * 3])
        self.first_cell = np.arange(count + 3) * self.m
        self.none, self.nowhere, self.dump = self.num_cells, self.num_cells + 2 * self.m, len(wires)
        self.wire_free = np.zeros(len(wires) + 1)
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
            ("wires", (len(self.wire_free) * self.wires_bind,), np.float64),
            ("times", (), np.int64),
        ):
            rows: NDArray[Any] = np.empty((rounds, *shape), kind)
            self.log[name] = np.concatenate([self.log[name], rows]) if name in self.log else rows
        self.log["times"][self.rounds :] = 1

    def step(self) -> bool:
        """One round; False: no rank can go on."""
        if self.rounds == len(self.log["times"]):
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
                sent = log["sent"][t, d] = self.sent.take(cell)
                begun = np.maximum(start, sent)
                start = begun + self.way_s.take(channel)
                real = cell < self.none
                log["arrived"][t, d] = np.where(real, start, -np.inf)
                self.left[cell[real]], self.arrived[cell[real]] = begun[real], start[real]
        go = start < np.inf
        everyone = bool(go.all())
        if not everyone and not go.any():
            self.stuck = bool((code < self.past).any())
            return False
        log["pos"][t], log["free"][t], log["start"][t] = self.pos, self.free, start
        if self.wires_bind:
            log["wires"][t] = self.wire_free
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

    def try_jump(self) -> None:
        """Jump where the last two periods were alike: of 1, 2, ... times the actions after which the lists repeat."""
        t, log = self.rounds - 1, self.log
        self.look_at = self.rounds + max(4, self.num_ranks // 8, (self.rounds - self.since) // 8)
        if self.base is None:
            self.base = self._repeat()
        q = self.base * np.arange(1, min(MOST_PERIODS, (t - self.since) // max(1, 2 * self.base)) + 1)
        if not len(q) or not self.base:
            return
        exact = EXACT * float(self.free.max())
        rank = int(np.argmax(log["start"][t] < np.inf))
        with np.errstate(invalid="ignore"):  # inf: ranks that wait
            moved, earlier = log["start"][t] - log["start"][t - q], log["start"][t - q] - log["start"][t - 2 * q]
            spread = np.where(np.isnan(moved), 0.0, np.abs(moved - moved[:, rank, None]))
            alike = (np.maximum(spread, np.where(np.isnan(earlier), 0.0, np.abs(moved - earlier))) <= exact).all(axis=1)
        if alike.any():
            self._jump(int(q[np.argmax(alike)]), exact)

    def _repeat(self) -> int:
        """After how many actions the list of rank 0 goes on alike, some micro-batches further, in its middle; 0: never.

        Alike for so long that turns of one stage, of about as many micro-batches as there are ranks, are not enough.
        """
        codes, ks = self.codes[0, :-1], self.ks[0, :-1]
        middle = len(codes) // 2
        for length in (np.flatnonzero(codes[middle + 1 :] == codes[middle]) + 1).tolist():
            stretch = max(2 * length, 4 * self.num_ranks)
            one, other = slice(middle, middle + stretch), slice(middle + length, middle + length + stretch)
            if other.stop > len(codes):
                return 0
            steps = ks[other] - ks[one]
            if steps[0] > 0 and (steps == steps[0]).all() and np.array_equal(codes[one], codes[other]):
                return int(length)
        return 0

    def _jump(self, q: int, exact: float) -> bool:
        """Verify the period of q rounds, and jump as often as the lists allow."""
        t, log = self.rounds, self.log
        now, then = slice(t - q, t), slice(t - 2 * q, t - q)
        here, there = self.row + log["pos"][now], self.row + log["pos"][then]
        went = log["start"][now] < np.inf
        lengths = self.pos - log["pos"][t - q]
        if not (np.array_equal(self.codes.take(here), self.codes.take(there)) and lengths.all()):
            return False
        steps = (self.ks.take(here) - self.ks.take(there))[went]
        g = int(steps[0])
        if g < 1 or (steps != g).any() or not np.array_equal(went, log["start"][then] < np.inf):
            return False
        moved = log["start"][now][went] - log["start"][then][went]
        delta = float(moved[0])
        if (np.abs(moved - delta) > exact).any() or not self._pending_moved(g, delta, exact):
            return False
        if self.wires_bind:
            wires = np.abs(self.wire_free - log["wires"][t - q] - delta)
            if ((wires > exact) & (self.wire_free > self.free.min()))[: self.dump].any():
                return False
        n = self._periods_ahead(lengths, g)
        if n < 1:
            return False
        shift = n * g
        self.pos, self.free, self.wire_free = self.pos + n * lengths, self.free + n * delta, self.wire_free + n * delta
        for array in {id(one): one for one in (self.sent, self.left, self.arrived)}.values():
            rows = array[: self.num_cells].reshape(-1, self.m)
            rows[:, shift:] = rows[:, : self.m - shift] + n * delta
        log["times"][now] += n
        self.since, self.look_at = self.rounds, self.rounds + 4
        return True

    def _pending_moved(self, g: int, delta: float, exact: float) -> bool:
        """Whether every message that is on its way, or waits, came `delta` after that of g micro-batches before."""
        ran = np.bincount(self.codes[np.arange(self.codes.shape[1]) < self.pos[:, None]], minlength=self.past + 4)
        backward = ran[KINDS.index("B") :: 4] + ran[KINDS.index("I") :: 4]
        count = {"F": ran[KINDS.index("F") :: 4].tolist(), "I": backward.tolist()}
        made = [count[kind][source] for source, _, kind, _ in self.ways]
        used = [count[kind][target] for _, target, kind, _ in self.ways]
        some = [at for at, (first, last) in enumerate(zip(used, made, strict=True)) if first < last]
        if not some:
            return True
        first, last = min(used[at] for at in some), max(made[at] for at in some)
        if first < g:
            return False
        k = np.arange(first, last)
        waiting = (k >= np.array(used)[some, None]) & (k < np.array(made)[some, None])
        for array in (self.sent, self.arrived) if self.overlap else (self.sent,):
            rows = array[: self.num_cells].reshape(-1, self.m)
            late = rows[some, first:last][waiting] - rows[some, first - g : last - g][waiting]
            if (np.abs(late - delta) > exact).any():
                return False
        return True

    def _periods_ahead(self, lengths: Ints, g: int) -> int:
        """How many more periods every rank's list goes on as in the last one, g micro-batches further each time."""
        most = self.m
        for rank, length in enumerate(lengths.tolist()):
            first = int(self.pos[rank]) - length
            codes, ks = self.codes[rank, first:], self.ks[rank, first:]
            same = (codes[length:] == codes[:-length]) & (ks[length:] == ks[:-length] + g)
            run = len(same) if same.all() else int(np.argmin(same))
            most = min(most, run // length)
        return most

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
            messages.append(Message(*way, came - way[3] if self.left is self.arrived else went, came))
        return Clock(
            ranks=np.broadcast_to(np.arange(self.num_ranks), ran.shape)[ran],
            stages=codes // 4,
            kinds=codes % 4,
            microbatches=self.ks.take(at),
            free_s=self.log["free"][:t][ran],
            start_s=start,
            end_s=start + self.seconds.take(codes),
            times=np.broadcast_to(self.log["times"][:t, None], ran.shape)[ran],
            sent_s=sent,
            arrived_s=arrived,
            messages=tuple(messages),
            rank_end_s=self.free,
        )


def _by_turn(lists: Sequence[Sequence[int]], none: int) -> list[Ints]:
    """The first of each list, the second of each list, ...; `none` where there are fewer."""
    longest = max(1, *map(len, lists))
    return [np.array([some[turn] if turn < len(some) else none for some in lists]) for turn in range(longest)]
