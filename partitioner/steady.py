"""What a step of a named schedule takes, from its rounds: for all ranks at once, and in steady state not at all.

The rules are the clock's. With rounds known beforehand, a round is a line of numpy over the ranks:

    start[r] = max(end of the round before[r], arrivals of earlier rounds);   end[r] = start[r] + seconds of its action

An action is F, B or I with the W behind it: nobody waits for W. Rounds that come again are the same line with the same
places to look, so only those of a few micro-batches are laid out, and what comes again is run again.

A steady state is one in which nothing but the time differs from a whole number of repetitions before: all that later
rounds look at (when each rank was done, every message on its way, every wire) has moved by the same `d` seconds. Then n
more such repetitions pass in n x d. Where times never settle, all of them are run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from partitioner.clock import Replica, StepTimes, run_clock, waits_of, ways_of, wires_bind
from partitioner.rounds import Rounds, Window, rounds_of
from partitioner.schedule import placement, schedule_table
from partitioner.specs import ScheduleName

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EXACT = 1e-13
"""Relative; rounding of a sum of seconds. States that agree to it are the same."""
AT_ONCE = 128
"""Rounds between two looks at the state, at least; more as they go on."""


def step_times(
    name: ScheduleName,
    replica: Replica,
    num_microbatches: int,
    num_ranks: int | None = None,
    *,
    overhead_s: float = 0.0,
    overlap: bool = True,
) -> StepTimes:
    """Those of the clock on the schedule's lists, to rounding.

    O(rounds until a steady state x transfers a stage), each step over all ranks; where there are too few micro-batches
    for rounds to be known beforehand, by the clock.
    """
    places = placement(name, len(replica.stages), num_ranks)
    far = any(one.target > one.source + 1 for one in replica.transfers)
    rounds = rounds_of(name, places, num_microbatches, short=True, far=far)
    if not _ordered(rounds, replica):
        table = schedule_table(name, len(replica.stages), num_microbatches, 1 + max(places))
        return run_clock(table, replica, overhead_s=overhead_s, overlap=overlap).step
    return _Passes(rounds, replica, num_microbatches, overhead_s, overlap).run()


def forwards_s(replica: Replica, num_microbatches: int) -> float:
    """Seconds of the forward passes alone, one stage a rank, from an empty pipeline. O(transfers).

    Stages and wires are machines that all micro-batches pass in the same order; each takes the same time for every one
    of them, and nothing waits for room. So the last micro-batch is done at

        max over ways to a stage of   sum of seconds on the way + (m - 1) largest seconds on the way

    (a permutation flow shop of equal jobs: Pinedo, "Scheduling", 6.1).

    >>> from partitioner.clock import StageCost, Transfer
    >>> forwards_s(Replica((StageCost(1.0, 0.0), StageCost(2.0, 0.0)), (Transfer(0, 1, 0.5, 0.0),)), 4)
    9.5
    """
    more = num_microbatches - 1
    first, last = [0.0] * len(replica.stages), [0.0] * len(replica.stages)  # when those micro-batches are done
    into: list[list[tuple[int, float]]] = [[] for _ in replica.stages]
    for one in replica.transfers:
        into[one.target].append((one.source, one.forward_s))
    for s, stage in enumerate(replica.stages):
        begins, queued = 0.0, 0.0
        for source, wire_s in into[s]:
            arrives = first[source] + wire_s
            begins = max(begins, arrives)
            queued = max(queued, last[source] + wire_s, arrives + more * wire_s)
        first[s] = begins + stage.forward_s
        last[s] = max(first[s] + more * stage.forward_s, queued + stage.forward_s)
    return max(last)


def _ordered(rounds: Rounds, replica: Replica) -> bool:
    """Whether all that an action receives was made in an earlier round, and every W follows an action that is there."""
    if rounds.weight is not None:
        there = np.zeros((1 + int(rounds.weight.max()), 1 + int(rounds.ranks.max())), np.bool_)
        there[rounds.backward, rounds.ranks[:, None]] = True
        if not there[rounds.weight, rounds.ranks[:, None]].all():
            return False
    source, target = np.array([(one.source, one.target) for one in replica.transfers], int).reshape(-1, 2).T
    later = (rounds.forward[source] < rounds.forward[target]) & (rounds.backward[target] < rounds.backward[source])
    return bool(later.all() and (rounds.forward < rounds.backward).all())


class _State(NamedTuple):
    """What later rounds look at, of the rounds that have been. Times that are not known yet are -inf."""

    free: Floats
    """[ranks] when they are done."""
    arrived: Floats
    """[rounds, places] of the last rounds: when what each action sent has come in, by turn and rank. The last place is
    that of what is always there."""
    made: Floats
    """[rounds, ranks] when they sent it; without rounds where wires are always free."""
    wires: Floats
    """When they are free; the last one is for what goes over none."""

    def later(self, seconds: float, wires: NDArray[np.bool_]) -> _State:
        """The same after more repetitions, which use these wires."""
        return _State(
            self.free + seconds, self.arrived + seconds, self.made + seconds, self.wires + np.where(wires, seconds, 0.0)
        )


class _Passes:
    """The rounds as arrays [rounds, ranks], or [turns of a message, rounds, ranks]: what to add, and where to look."""

    def __init__(self, rounds: Rounds, replica: Replica, m: int, overhead_s: float, overlap: bool) -> None:
        self.rounds, self.m, self.overlap = rounds, m, overlap
        ranks = rounds.ranks
        self.p, self.height = 1 + int(ranks.max()), 1 + int(rounds.backward.max())
        kinds = "FB" if rounds.weight is None else "FIW"
        seconds = [np.array([cost.seconds(kind) for cost in replica.stages]) + overhead_s for kind in kinds]
        self.busy_s: Floats = m * np.sum(seconds, axis=0)
        levels = {"F": rounds.forward, "I": rounds.backward}
        cells = {kind: level * self.p + ranks[:, None] for kind, level in levels.items()}
        shape, count, none = (self.height, self.p), self.height * self.p, 2 * len(ranks)
        codes = np.full(count, none)
        """F by stage, then B or I by stage, then nothing."""
        codes[cells["F"]] = np.arange(len(ranks))[:, None]
        codes[cells["I"]] = np.arange(len(ranks), none)[:, None]
        self.codes = codes.reshape(shape)
        self.took = np.append(np.concatenate(seconds[:2]), 0.0)[codes].reshape(shape)
        self.behind: Floats = np.zeros(shape)
        if rounds.weight is not None:
            after = (rounds.weight * self.p + ranks[:, None]).ravel()
            later_s = np.repeat(seconds[2], rounds.weight.shape[1])
            self.behind = np.asarray(np.bincount(after, later_s, count), np.float64).reshape(shape)
            self.took += self.behind

        ways = ways_of(replica, ranks.tolist())
        self.binds = overlap and wires_bind(ways, {"F": seconds[0].tolist(), "I": seconds[1].tolist()})
        self.waits = any(way.seconds > 0 for way in ways)
        self.num_wires = 1 + max((way.wire for way in ways), default=-1)
        self.num_out = 1 + max((way.out for way in ways), default=0)
        self.num_in = 1 + max((way.into for way in ways), default=0)
        self.always = self.num_out * self.p
        way_out, wire = np.zeros((self.num_out, none + 1)), np.full((self.num_out, none + 1), self.num_wires)
        way_in, place = np.zeros((self.num_in, none + 1)), np.full((self.num_in, none + 1), self.always)
        for way in ways:
            more = len(ranks) * (way.kind == "I")
            way_out[way.out, way.source + more], wire[way.out, way.source + more] = way.seconds, way.wire
            way_in[way.into, way.target + more] = way.seconds
            place[way.into, way.target + more] = way.out * self.p + ranks[way.source]
        received = []
        """Of F and I, by turn: the stages that receive, and how many rounds ago it was made, by micro-batch."""
        for kind, level in levels.items():
            for into in range(self.num_in):
                some = [(way.source, way.target) for way in ways if (way.kind, way.into) == (kind, into)]
                source, target = np.array(some, np.int64).reshape(-1, 2).T
                received.append((kind, into, target, level[target] - level[source]))
        self.back = max(1, *(int(ago.max(initial=1)) for *_, ago in received))
        width = self.always + 1
        places = np.full((self.num_in, count), (self.back - 1) * width + self.always)
        for kind, into, target, ago in received:
            column = place[into, target + len(ranks) * (kind == "I")]
            places[into, cells[kind][target]] = (self.back - ago) * width + column[:, None]
        self.places = places.reshape(self.num_in, *shape)
        """In the last `back` rounds of `_State.arrived`, one after the other."""
        by_round = self.back - self.places.min(axis=(0, 2)) // width
        self.looks_back: Ints = np.maximum.accumulate(by_round[::-1])[::-1]
        """[rounds] how far each and those after it look back at most."""

        def by_cell(turns: NDArray[Any], needed: bool = True) -> NDArray[Any]:
            return turns.take(codes if needed else codes[:0], axis=1).reshape(len(turns), -1, self.p)

        before, at = divmod(self.places if self.binds or not overlap else self.places[:, :0], width)
        self.made_at, self.real = before * self.p + at % self.p, at < self.always
        self.wire, self.way_out = by_cell(wire, self.binds), by_cell(way_out, self.binds)
        self.way_in = by_cell(way_in, self.waits or not overlap)
        late = overlap and self.waits and not self.binds
        self.shift = by_cell(way_out, late)
        """From the end of an action, with the W behind it, until what it sends is there; no rounds where that is 0."""
        if not late and (self.binds or self.num_out > 1 or rounds.weight is not None):
            self.shift = np.zeros((self.num_out, *shape))
        if rounds.weight is not None:
            self.shift -= self.behind
        self.waited = np.zeros(none + 1)
        """Seconds by code."""
        self._took, self._places, self._shift = list(self.took), _rows(self.places), _rows(self.shift)
        self._buffers: _Buffers | None = None

    def run(self) -> StepTimes:
        state = _State(
            np.zeros(self.p),
            np.zeros((self.back, self.always + 1)),
            np.zeros((self.back * self.binds, self.p)),
            np.zeros(self.num_wires + 1),
        )
        walked = at = 0
        for window in self.rounds.windows:
            after = window.first + window.length
            state = self._advance(state, at, after).last
            state, more = self._repeat(state, window)
            walked, at = walked + after - at + more, after
        state = self._advance(state, at, self.height).last
        left_out = sum(window.length * window.times for window in self.rounds.windows)
        return StepTimes(
            rank_end_s=state.free,
            busy_s=self.busy_s,
            waited_s=self.waited[:-1].reshape(2, -1).sum(axis=0),
            finished=self.rounds.finished,
            walked=(walked + self.height - at) / (self.height + left_out),
        )

    def _repeat(self, state: _State, window: Window) -> tuple[_State, int]:
        """After the window's rounds, so many times more; and how many of these rounds were run."""
        first, after, left, walked = window.first, window.first + window.length, window.times, 0
        used = np.isin(np.arange(self.num_wires + 1), self.wire[:, first:after])
        while left:
            times = min(left, max(1, (AT_ONCE << (walked // (8 * AT_ONCE)).bit_length()) // window.length))
            some = self._advance(state, first, after, times)
            state, left, walked = some.last, left - times, walked + times * window.length
            period = some.period(window.length, int(self.looks_back[first]))
            if period is None:
                continue
            repetitions, seconds = period
            skipped = left // repetitions
            state = state.later(skipped * seconds, used)
            left -= skipped * repetitions
            if some.waited is not None:
                again = some.waited[-repetitions * window.length :].reshape(repetitions, window.length, self.p)
                self._add_waits(slice(first, after), skipped * again.sum(axis=0))
        return state, walked

    def _add_waits(self, one: slice, seconds: Floats) -> None:
        """[rounds, ranks] to what is waited for in the actions of these rounds."""
        self.waited += np.bincount(self.codes[one].ravel(), seconds.ravel(), len(self.waited))

    def _advance(self, state: _State, first: int, after: int, times: int = 1) -> _Stretch:
        """The rounds from `first` until `after`, so many times."""
        count, back, p = (after - first) * times, self.back, self.p
        one = slice(first, after)
        shifted = self.binds or self.num_out > 1 or bool(self.shift[:, one].any())
        if self._buffers is None or self._buffers.shifted != shifted or len(self._buffers.views) < count:
            self._buffers = None  # its memory serves again
            self._buffers = _Buffers.of(count, back, p, self.num_out, shifted, self.waits)
        arrived, ends, starts, views, end_rows, start_rows, out = self._buffers.of_rounds(count, back)
        arrived[:back], arrived[:, -1], ends[0] = state.arrived, -np.inf, state.free
        took, places = self._took[one] * times, [turn[one] * times for turn in self._places]
        shift = [turn[one] * times for turn in self._shift] if shifted else []
        wires = state.wires.copy()
        if self.overlap and self.num_in == 1 and not shifted:
            _plain(end_rows, start_rows, views, places[0], took)
        elif self.overlap and self.num_in == self.num_out == 1 and not self.binds:
            _shifted(end_rows, start_rows, views, places[0], took, shift[0], out[0])
        else:
            ways_in, ways_out, over = (
                [turn[one] * times for turn in _rows(turns)] for turns in (self.way_in, self.way_out, self.wire)
            )
            last, arrives = ends[0], np.empty(p)
            for t, (view, end) in enumerate(zip(views, end_rows[1:], strict=True)):
                start = last
                for d, turn in enumerate(places):
                    view.take(turn[t], None, arrives, "clip")
                    start = np.maximum(start, arrives)
                    if not self.overlap:
                        start += ways_in[d][t]
                last = np.add(start, took[t], out=end)
                for d, (come, more) in enumerate(zip(out, shift, strict=True)):
                    np.add(last, more[t], out=come[t])
                    if self.binds:
                        left = np.maximum(come[t], wires.take(over[d][t]))
                        wires[over[d][t]] = np.add(left, ways_out[d][t], out=come[t])
                        wires[-1] = 0.0
        made = state.made
        if self.binds:
            made = np.concatenate([made, (ends[1:].reshape(times, -1, p) - self.behind[one]).reshape(count, p)])
        waited = None
        if self.waits:
            if self.overlap and self.num_in == 1 and not self.binds:
                # A rank waits for its only message until it starts, but not before it was sent.
                waits = np.subtract(starts, ends[:-1], out=starts).reshape(times, -1, p)
                waited = np.minimum(waits, self.way_in[0, one], out=waits).reshape(count, p)
            else:
                waited = self._waited(one, times, ends[:-1], arrived, made)
            self._add_waits(one, waited.reshape(times, -1, p).sum(axis=0) if times > 1 else waited)
        state = _State(ends[-1].copy(), arrived[count:], made[len(made) - len(state.made) :], wires)
        return _Stretch(state, ends, arrived, waited, self.binds)

    def _waited(self, one: slice, times: int, free: Floats, arrived: Floats, made: Floats) -> Floats:
        """[rounds, ranks] how long ranks waited for messages on their way."""
        count, width = len(free), self.always + 1
        rows = np.arange(count)[:, None]
        sent, came = np.empty((2, self.num_in, count, self.p))
        now = free
        for d in range(self.num_in):
            there = arrived.ravel().take(np.tile(self.places[d, one], (times, 1)) + rows * width)
            way = np.tile(self.way_in[d, one], (times, 1))
            if not self.overlap:
                real = np.tile(self.real[d, one], (times, 1))
                begun = np.maximum(now, there)
                now = begun + way
                sent[d], came[d] = np.where(real, begun, -np.inf), np.where(real, now, -np.inf)
            elif self.binds:
                real = np.tile(self.real[d, one], (times, 1))
                at = np.tile(self.made_at[d, one], (times, 1)) + rows * self.p
                sent[d], came[d] = np.where(real, made.ravel().take(at), -np.inf), there
            else:
                sent[d], came[d] = there - way, there
        waits = waits_of(free.ravel(), sent.reshape(self.num_in, -1).T, came.reshape(self.num_in, -1).T)
        total: Floats = np.sum([np.maximum(0.0, until - since) for since, until in waits], axis=0)
        return total.reshape(count, self.p)


def _rows(turns: NDArray[Any]) -> list[list[NDArray[Any]]]:
    return [list(turn) for turn in turns]


class _Buffers(NamedTuple):
    """Where some rounds write to, and the rows of it, which take as long to make as a round. Fewer use a part."""

    shifted: bool
    arrived: Floats
    """[rounds looked back at + rounds, places]"""
    ends: Floats
    """[1 + rounds, ranks]; where messages are there at once, a part of `arrived`."""
    starts: Floats
    """[rounds, ranks]; one row for all rounds where nobody asks for them."""
    views: list[Floats]
    """By round, what it can look back at."""
    end_rows: list[Floats]
    start_rows: list[Floats]
    out: list[list[Floats]]
    """By turn and round, where what is sent comes in."""

    @classmethod
    def of(cls, count: int, back: int, p: int, num_out: int, shifted: bool, waits: bool) -> _Buffers:
        width = num_out * p + 1
        arrived = np.empty((back + count, width))
        ends = np.empty((1 + count, p)) if shifted else arrived[back - 1 :, :p]
        starts = np.empty((count if waits else 1, p))
        views = list(as_strided(arrived, (count, back * width), (8 * width, 8)))
        start_rows = list(starts) if waits else [starts[0]] * count
        out = [list(arrived[back:, d * p : (d + 1) * p]) for d in range(num_out)] if shifted else []
        return cls(shifted, arrived, ends, starts, views, list(ends), start_rows, out)

    def of_rounds(self, count: int, back: int) -> tuple[Any, ...]:
        """All but `shifted`, for so many rounds."""
        return (
            self.arrived[: back + count],
            self.ends[: 1 + count],
            self.starts[:count],
            self.views[:count],
            self.end_rows[: 1 + count],
            self.start_rows[:count],
            [turn[:count] for turn in self.out],
        )


def _plain(
    ends: list[Floats], starts: list[Floats], views: list[Floats], places: list[Ints], took: list[Floats]
) -> None:
    """Rounds where what a rank sends is there when its action ends. Most time is spent here: nothing is allocated."""
    last, maximum, add = ends[0], np.maximum, np.add
    for view, place, seconds, start, end in zip(views, places, took, starts, ends[1:], strict=True):
        view.take(place, None, start, "clip")
        maximum(last, start, out=start)
        add(start, seconds, end)
        last = end


def _shifted(
    ends: list[Floats],
    starts: list[Floats],
    views: list[Floats],
    places: list[Ints],
    took: list[Floats],
    shift: list[Floats],
    out: list[Floats],
) -> None:
    """Rounds where it is there so much later, or earlier, than that."""
    last, maximum, add = ends[0], np.maximum, np.add
    for view, place, seconds, more, start, end, come in zip(
        views, places, took, shift, starts, ends[1:], out, strict=True
    ):
        view.take(place, None, start, "clip")
        maximum(last, start, out=start)
        add(start, seconds, end)
        add(end, more, come)
        last = end


class _Stretch(NamedTuple):
    """Some rounds that were run."""

    last: _State
    ends: Floats
    """[1 + rounds, ranks]"""
    arrived: Floats
    """[rounds looked back at + rounds, places]"""
    waited: Floats | None
    """[rounds, ranks]"""
    binds: bool

    def period(self, length: int, back: int) -> tuple[int, float] | None:
        """The fewest repetitions of `length` rounds, and their seconds, by which the state has moved and nothing else.

        None: it has moved otherwise by up to as many as there are. back: the rounds that later ones look at.
        """
        back = max(back, length) if self.binds else back  # so that the last message of every wire is among them
        most = (len(self.arrived) - back) // length
        moved = self.ends[-1] - self.ends[-1 - length * np.arange(1, 1 + min(most, (len(self.ends) - 1) // length))]
        exact = EXACT * float(self.ends[-1].max())
        for number in (np.flatnonzero(np.ptp(moved, axis=1) <= 2 * exact) + 1).tolist():
            seconds, ago = float(moved[number - 1].mean()), number * length
            now, then = self.arrived[-back:, :-1], self.arrived[-back - ago : -ago, :-1]
            if (np.abs(now - then - seconds) <= 2 * exact).all():
                return number, seconds
        return None
