"""Closed forms of the schedules against the same orders told action by action, and short rounds against all of them."""

from collections import Counter

import numpy as np
import pytest

from partitioner.actions import Action
from partitioner.rounds import rounds_of
from partitioner.schedule import build_schedule, placement

KINDS = [
    ("gpipe", 1),
    ("gpipe", 3),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero-bubble", 1),
    ("zero-bubble", 2),
    ("zero-bubble-h2", 1),
    ("zero-bubble-v", 2),
]
"""Schedule, stages a rank."""


def told(name, rank, p, v, m):
    """One rank's order: so many forwards, then one forward and one backward in turn, each W so many backwards later."""
    rounds = [m] if name == "gpipe" else _sizes(m, p)
    later = (v - 1) * rounds[0]
    ahead = {"gpipe": m * v, "1f1b": p - 1 - rank, "interleaved": later + 2 * (p - 1 - rank)}.get(name)
    ahead = {"zero-bubble": later + p - 1 - rank, "zero-bubble-h2": 2 * (p - 1 - rank)}.get(name, ahead)
    behind = {"zero-bubble": rank, "zero-bubble-h2": 2 * rank}.get(name)
    forwards, backwards, first = [], [], 0
    for size in rounds:
        for turn in range(v):
            forwards += [(turn * p + rank, k) for k in range(first, first + size)]
            backwards += [((v - 1 - turn) * p + rank, k) for k in range(first, first + size)]
        first += size
    order, ready = [Action(stage, "F", k) for stage, k in forwards[:ahead]], 0
    for j, (stage, k) in enumerate(backwards):
        order += [Action(s, "F", i) for s, i in forwards[ahead + j : ahead + j + 1]]
        order.append(Action(stage, "B" if behind is None else "I", k))
        while behind is not None and ready <= j - behind:
            order.append(Action(backwards[ready][0], "W", backwards[ready][1]))
            ready += 1
    return order + [Action(stage, "W", k) for stage, k in backwards[ready:] if behind is not None]


def _sizes(m, p):
    if m < p:
        return [m]
    sizes = [p] * (m // p)
    for extra in range(m % p):
        sizes[extra % len(sizes)] += 1
    return sizes


def told_in_phases(rank, p, m):
    """One rank of zero-bubble-v, in phases that hold from 2 p - 1 micro-batches on; of fewer, those there are."""
    down, up, most = rank, 2 * p - 1 - rank, max(m, 2 * p - 1)
    order, done = [], Counter()

    def run(stage, kinds):
        for kind in kinds:
            order.append(Action(stage, kind, done[stage, kind]))
            done[stage, kind] += 1

    for _ in range(2 * (p - rank) - 1):  # until the first micro-batch has come down and back up to this rank
        run(down, "F")
    for _ in range(rank):
        run(up, "F")
        run(down, "F")
    for _ in range(p - rank):  # until its gradient has come down and back up
        run(up, "FIW")
    while done[up, "F"] < most:
        if done[down, "F"] < most:
            run(down, "F")
        run(down, "IW")
        run(up, "FIW")
    for _ in range(rank):  # what is left is no longer held up by W
        run(down, "I")
        run(up, "I")
    for _ in range(p - rank):
        run(down, "IW")
    while done[up, "W"] < most:
        run(up, "W")
    while done[down, "W"] < most:
        run(down, "W")
    return [action for action in order if action.microbatch < m]


@pytest.mark.parametrize(("name", "v"), KINDS)
def test_the_lists_are_those_told_action_by_action(name, v):
    for p in range(1, 6):
        for m in (*range(1, 3 * p + 4), 29):
            for rank, order in enumerate(build_schedule(name, v * p, m, num_ranks=p)):
                want = told_in_phases(rank, p, m) if name == "zero-bubble-v" else told(name, rank, p, v, m)
                assert list(order) == want, (p, m, rank)


def described(rounds, ranks, far):
    """By round and rank, what it runs there and where that was made that it receives: stages and rounds before."""
    p, num_stages = 1 + max(ranks), len(ranks)
    rows = [[None] * p for _ in range(1 + int(rounds.backward.max()))]
    behind = Counter()
    if rounds.weight is not None:
        for stage, rank in enumerate(ranks):
            behind.update((int(at), rank, stage) for at in rounds.weight[stage])
    for stage, rank in enumerate(ranks):
        for k in range(rounds.forward.shape[1]):
            for kind, levels, others in (
                ("F", rounds.forward, range(0 if far else max(0, stage - 1), stage)),
                ("B", rounds.backward, range(stage + 1, num_stages if far else min(num_stages, stage + 2))),
            ):
                at = int(levels[stage, k])
                assert rows[at][rank] is None
                weights = tuple(behind[at, rank, one] for one in range(num_stages))
                rows[at][rank] = (kind, stage, weights, tuple(at - int(levels[one, k]) for one in others))
    return rows


@pytest.mark.parametrize("far", [True, False])
@pytest.mark.parametrize(("name", "v"), KINDS)
def test_short_rounds_repeated_are_all_the_rounds(name, v, far):
    shortened = 0
    for p in (1, 2, 3, 5):
        for m in (1, 2 * p, 3 * p + 1, 5 * p + 2, 9 * p, 13 * p + 3):
            ranks = placement(name, v * p, p)
            rows = described(rounds := rounds_of(name, ranks, m, short=True, far=far), ranks, far)
            shortened += rounds.forward.shape[1] < m
            for window in reversed(rounds.windows):
                again = rows[window.first : window.first + window.length]
                assert len(again) == window.length
                rows[window.first : window.first] = again * window.times
            assert rows == described(rounds_of(name, ranks, m), ranks, far), (p, m)
    assert shortened >= 8 or (name, v) == ("gpipe", 3)


@pytest.mark.parametrize(("name", "v"), KINDS)
def test_what_an_action_receives_was_made_in_an_earlier_round(name, v):
    for p in (1, 2, 3, 4, 7):
        for m in range(1 if v == 1 else 2 * p - 1, 4 * p + 3):
            rounds = rounds_of(name, placement(name, v * p, p), m)
            assert (np.diff(rounds.forward, axis=0) > 0).all()
            assert (np.diff(rounds.backward, axis=0) < 0).all()
            assert (rounds.forward < rounds.backward).all()
