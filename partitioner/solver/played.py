"""When the stages of many splits end under gpipe and 1f1b, a row a split: numpy over rows instead of a clock for each.

gpipe needs no clock. Stages and wires are machines that all micro-batches pass in the same order, each takes the same
time for every one of them, and nothing waits for room: the last micro-batch is done at

    max over ways to the stage of   sum of seconds on the way + (m - 1) largest seconds on the way

(a permutation flow shop of equal jobs: Pinedo, "Scheduling", 6.1), forward and then backward. 1f1b is walked in time
slots: in its grid with unit actions every stage does at most one thing a slot and needs only earlier slots; so a slot
is one numpy step over all rows and stages. Once a round (a forward and a backward of every stage) is the round before
it, later by the same time for all stages, so are all rounds to come until the first stage runs out of forwards, and a
step with more micro-batches is longer by so many rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

SAME = 1e-12
"""Relative; rounds of a schedule whose lengths differ by less are alike."""


class Messages(NamedTuple):
    """What goes from one stage to a later one and comes back, by row."""

    source: int
    target: int
    sent: Flags
    there: Floats
    """Bytes of a micro-batch."""
    back: Floats


Wires = list[tuple[Messages, tuple[Floats, Floats]]]
"""Messages with their seconds there and back, by row; -inf where nothing is sent, so that nothing waits for it."""


def gpipe_ends(forward: Floats, backward: Floats, wires: Wires, num_microbatches: int) -> Floats:
    """gpipe: [rows, p]. first: when the first micro-batch is done; ends: when the last one is."""
    rows, p = forward.shape
    more = num_microbatches - 1

    def passed(
        seconds: Floats, free: Floats, order: Sequence[int], into: dict[int, list[tuple[int, Floats]]]
    ) -> Floats:
        first, ends = np.zeros((p, rows)), np.zeros((p, rows))
        for s in order:
            own, begins, queued = seconds[:, s], free[s], np.full(rows, -np.inf)
            for source, wire in into.get(s, ()):
                arrives = first[source] + wire
                begins = np.maximum(begins, arrives)
                queued = np.maximum(queued, ends[source] + wire)
                if more:
                    queued = np.maximum(queued, arrives + more * wire)
            first[s] = begins + own
            ends[s] = np.maximum(first[s] + more * own, queued + own)
        return ends

    there: dict[int, list[tuple[int, Floats]]] = {}
    back: dict[int, list[tuple[int, Floats]]] = {}
    for one, (there_s, back_s) in wires:
        there.setdefault(one.target, []).append((one.source, there_s))
        back.setdefault(one.source, []).append((one.target, back_s))
    forwards = passed(forward, np.zeros((p, rows)), range(p), there)
    return passed(backward, forwards, range(p - 1, -1, -1), back).T


def one_f_one_b_ends(forward: Floats, backward: Floats, wires: Wires, num_microbatches: int) -> Floats:
    """1f1b: [rows, p], from as few micro-batches as it takes to reach rounds that are alike."""
    p, m = forward.shape[1], num_microbatches
    seconds = np.stack((forward.T, backward.T))
    outgoing = _outgoing(p, len(forward), wires)
    span = max((one.target - one.source for one, _ in wires), default=1)
    count = p + span + 12
    while 2 * count < m:
        ends, round_s = _played(p, count, seconds, outgoing, span)
        if round_s is not None:
            extrapolated: Floats = ends + (m - count) * round_s[:, None]
            return extrapolated
        count *= 2
    return _played(p, m, seconds, outgoing, None)[0]


def _outgoing(p: int, rows: int, wires: Wires) -> list[tuple[Ints, Floats]]:
    """Messages that a stage sends after a forward or a backward, first ones, second ones...: (target [2, p], -1 for
    none; seconds on the wire [2, p, rows]). A message that a row lacks never holds it up."""
    outgoing: list[tuple[Ints, Floats]] = []
    for one, both in wires:
        for kind, first, second, wire_s in (
            (0, one.source, one.target, both[0]),
            (1, one.target, one.source, both[1]),
        ):
            free = next((some for some in outgoing if some[0][kind, first] < 0), None)
            if free is None:
                free = np.full((2, p), -1), np.zeros((2, p, rows))
                outgoing.append(free)
            free[0][kind, first] = second
            free[1][kind, first] = wire_s
    return outgoing


@lru_cache(maxsize=64)
def _slots(p: int, m: int) -> tuple[tuple[Ints, Ints, Ints], ...]:
    """(stages, kinds, micro-batches) of each slot of 1f1b; kind 0 is forward, 1 backward."""
    stage, k = np.meshgrid(np.arange(p), np.arange(m), indexing="ij")
    forward = np.where(k < p - stage, stage + k, stage + 2 * k)
    backward = 2 * p - 1 - stage + 2 * k
    slot = np.concatenate((forward.ravel(), backward.ravel()))
    order = np.argsort(slot, kind="stable")
    stages, ks = np.tile(stage.ravel(), 2)[order], np.tile(k.ravel(), 2)[order]
    kinds = np.repeat([0, 1], p * m)[order]
    ends = np.flatnonzero(np.diff(slot[order])) + 1
    return tuple(zip(np.split(stages, ends), np.split(kinds, ends), np.split(ks, ends), strict=True))


def _played(
    p: int, m: int, seconds: Floats, outgoing: list[tuple[Ints, Floats]], span: int | None
) -> tuple[Floats, Floats | None]:
    """[rows, p] when each stage of one replica ends, and [rows] the seconds of a round where rounds have become alike.

        end = max(stage free, arrived) + seconds;   arrives = max(end, wire free) + wire seconds

    seconds: [2, p, rows] of a forward and a backward. span: what a message passes over at most; a message is then used
    within so many slots, and rounds are alike when that many slots of them are. None: not asked.
    """
    rows = seconds.shape[2]
    arrived = np.full((2, p, m, rows), -np.inf)
    free = np.zeros((p, rows))
    wires = [np.full((2, p, rows), -np.inf) for _ in outgoing]
    full = 2 * m - 1  # in slots 2 p to 2 m - 2 every stage does a forward and a backward in turn
    kept: list[Floats] = []
    round_s: Floats | None = None
    for slot, (stages, kinds, ks) in enumerate(_slots(p, m)):
        end = np.maximum(free[stages], arrived[kinds, stages, ks]) + seconds[kinds, stages]
        free[stages] = end
        for (target, wire_s), wire_free in zip(outgoing, wires, strict=True):
            to = target[kinds, stages]
            if (sends := to >= 0).all():
                kind, source, k, ended = kinds, stages, ks, end
            else:
                kind, source, to, k, ended = kinds[sends], stages[sends], to[sends], ks[sends], end[sends]
            arrives = np.maximum(ended, wire_free[kind, source]) + wire_s[kind, source]
            wire_free[kind, source] = arrives
            arrived[kind, to, k] = np.maximum(arrived[kind, to, k], arrives)
        if span is not None and full - span - 4 <= slot < full:
            kept.append(np.concatenate((free, *(wire.reshape(2 * p, rows) for wire in wires))))
            if slot == full - 1:
                with np.errstate(invalid="ignore"):
                    grown = np.stack(kept[2:]) - np.stack(kept[:-2])
                grown[~np.isfinite(grown)] = np.nan  # wires that nothing goes over
                least, most = np.nanmin(grown, axis=(0, 1)), np.nanmax(grown, axis=(0, 1))
                if (most - least <= SAME * free.max(axis=0)).all():
                    round_s = most
                else:
                    return free.T, None
    return free.T, round_s
