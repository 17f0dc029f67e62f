"""The named schedules: for each rank of a pipeline, the order of its actions.

For equal stages, with F, I and W the seconds of a forward and of the two parts of a backward on all stages of a rank
together; p ranks, v stages on each, m micro-batches:

    name             paper                                  bubble, seconds              a rank holds, x 1/v at most
    gpipe            Huang et al. 2019                      (p - 1) (F + I + W)          v m
    1f1b             Narayanan et al. 2021, PipeDream-Flush (p - 1) (F + I + W)          p - rank
    interleaved      Narayanan et al. 2021, Megatron-LM     (p - 1) (F + I + W) / v      p (v + 1) - 2 rank - 1
    zero-bubble      Qi et al. 2024, ZB-H1                  (p - 1) (F + I - W)          p
    zero-bubble-h2   Qi et al. 2024, ZB-H2                  (p - 1) (F + I - 2 W)        2 p - 1
    zero-bubble-v    Qi et al. 2024, ZB-V                   0 where F = I = W            2 p, v = 2

The last two bubbles are those of steps that follow one another without a barrier: each rank is as long at work as the
others, but the last one starts (p - 1) F after the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from partitioner.actions import KINDS, Action, Table, most_held
from partitioner.errors import ArgumentError
from partitioner.specs import SCHEDULES, ScheduleName

Ints = NDArray[np.int64]

SPLIT_BACKWARD: tuple[ScheduleName, ...] = ("zero-bubble", "zero-bubble-h2", "zero-bubble-v")
"""Those that run a backward in two parts, I and W."""


def build_schedule(
    name: ScheduleName, num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
) -> tuple[tuple[Action, ...], ...]:
    """The order of actions on each rank of one replica. `placement` says which rank runs which stages.

    "gpipe": all forwards, then all backwards; every stage holds all m micro-batches. The backwards go in the order of
    the forwards: each schedule then adds up gradients in the order in which one device would, to the last bit, and
    every edge carries its messages in one order. Time and memory are those of the reversed order.

    >>> from partitioner.actions import grid
    >>> print(grid(build_schedule("gpipe", 3, 3)))
    t         0    1    2    3    4    5    6    7    8    9
    rank 0  0F0  0F1  0F2    .    .    .    .  0B0  0B1  0B2
    rank 1    .  1F0  1F1  1F2    .    .  1B0  1B1  1B2
    rank 2    .    .  2F0  2F1  2F2  2B0  2B1  2B2

    "1f1b": stage s runs p - s - 1 forwards to warm up, then one forward and one backward in turn, then the backwards
    left. As long as gpipe when stages are equal, but holds p - s at most.

    >>> print(grid(build_schedule("1f1b", 3, 3)))
    t         0    1    2    3    4    5    6    7    8    9
    rank 0  0F0  0F1  0F2    .    .  0B0    .  0B1    .  0B2
    rank 1    .  1F0  1F1    .  1B0  1F2  1B1    .  1B2
    rank 2    .    .  2F0  2B0  2F1  2B1  2F2  2B2

    "interleaved": 1f1b with several stages a rank, each 1/v as long, so that pipelines fill and drain v times faster.
    A rank runs a round of about p micro-batches through each of its stages in turn. The rounds are equal, or differ by
    one micro-batch; p divides m where the bubble is to be the least.

    >>> print(grid(build_schedule("interleaved", 4, 2, num_ranks=2)))
    t         0    1    2    3    4    5    6    7    8    9
    rank 0  0F0  0F1  2F0  2F1    .  2B0    .  2B1  0B0  0B1
    rank 1    .  1F0  1F1  3F0  3B0  3F1  3B1  1B0  1B1

    "zero-bubble": a backward in two parts; what the stage before does not wait for fills the gaps. Held until its W, a
    stage has p micro-batches. Several stages a rank are interleaved.

    >>> print(grid(build_schedule("zero-bubble", 3, 4)))
    t         0    1    2    3    4    5    6    7    8    9   10   11   12   13
    rank 0  0F0  0F1  0F2    .    .  0I0  0W0  0F3  0I1  0W1  0I2  0W2  0I3  0W3
    rank 1    .  1F0  1F1    .  1I0  1F2  1I1  1W0  1F3  1I2  1W1  1I3  1W2  1W3
    rank 2    .    .  2F0  2I0  2F1  2I1  2F2  2I2  2W0  2F3  2I3  2W1  2W2  2W3

    "zero-bubble-h2": the same with about twice the micro-batches in flight, and no gap between the first and the last
    action of a rank.

    >>> print(grid(build_schedule("zero-bubble-h2", 2, 4)))
    t         0    1    2    3    4    5    6    7    8    9   10   11   12
    rank 0  0F0  0F1  0F2  0I0  0W0  0F3  0I1  0W1  0I2  0W2  0I3  0W3
    rank 1    .  1F0  1I0  1F1  1I1  1F2  1I2  1W0  1F3  1I3  1W1  1W2  1W3

    "zero-bubble-v": two stages a rank, the second half of them on the ranks in reverse: the last stage is beside the
    first, and backwards begin where forwards did. Held until its W, a rank has 2 p, as many layers as 1f1b.

    >>> print(grid(build_schedule("zero-bubble-v", 4, 3)))
    t         0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15   16   17   18
    rank 0  0F0  0F1  0F2  3F0  3I0  3W0  3F1  3I1  3W1  0I0  0W0  3F2  3I2  3W2  0I1  0W1  0I2  0W2
    rank 1    .  1F0  2F0  1F1  2F1  2I0  2W0  1F2  1I0  1W0  2F2  2I1  2W1  1I1  2I2  1I2  1W1  2W2  1W2

    num_ranks: None is one stage a rank; two under zero-bubble-v. Fewer micro-batches than stages leave ranks idle, but
    every schedule runs them. Unknown names, and counts below 1 or that do not fit the schedule, are an ArgumentError.
    """
    return schedule_table(name, num_stages, num_microbatches, num_ranks).orders()


@lru_cache(maxsize=64)
def schedule_table(name: ScheduleName, num_stages: int, num_microbatches: int, num_ranks: int | None = None) -> Table:
    """`build_schedule` as arrays, read-only."""
    places = placement(name, num_stages, num_ranks)
    if num_microbatches < 1:
        raise ArgumentError(f"a schedule needs at least one micro-batch, got {num_microbatches}")
    p, m = 1 + max(places), num_microbatches
    if name == "zero-bubble-v":
        table = Table.of([_v_order(rank, p, m) for rank in range(p)])
    else:
        each, rank = num_stages // p, np.arange(p)
        rounds = [m] if name == "gpipe" else _rounds(m, p)
        later = (each - 1) * rounds[0]
        ahead, behind = {
            "gpipe": (np.full(p, m * each), None),
            "1f1b": (p - 1 - rank, None),
            "interleaved": (later + 2 * (p - 1 - rank), None),
            "zero-bubble": (later + p - 1 - rank, rank),
            "zero-bubble-h2": (2 * (p - 1 - rank), 2 * rank),
        }[name]
        table = _woven(
            _in_rounds(rank, range(each), rounds), _in_rounds(rank, range(each)[::-1], rounds), ahead, behind
        )
    for array in table:
        array.setflags(write=False)
    return table


def forward_only(
    num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
) -> tuple[tuple[Action, ...], ...]:
    """Inference: micro-batches flow through the stages, nothing comes back. One micro-batch: plain model parallelism.

    >>> from partitioner.actions import grid
    >>> print(grid(forward_only(3, 2)))
    t         0    1    2    3
    rank 0  0F0  0F1
    rank 1    .  1F0  1F1
    rank 2    .    .  2F0  2F1
    """
    orders = build_schedule("gpipe", num_stages, num_microbatches, num_ranks=num_ranks)
    return tuple(tuple(action for action in order if action.kind == "F") for order in orders)


def placement(name: ScheduleName, num_stages: int, num_ranks: int | None = None) -> tuple[int, ...]:
    """The rank that runs each stage; None: one stage a rank, two under zero-bubble-v.

    >>> placement("interleaved", 6, 3), placement("zero-bubble-v", 6)
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    if name not in SCHEDULES:
        raise ArgumentError(f"there is no schedule {name!r}: choose {', '.join(map(repr, SCHEDULES))}")
    if num_ranks is None:
        num_ranks = num_stages // 2 if name == "zero-bubble-v" else num_stages
    if num_stages < 1 or num_ranks < 1 or num_stages % num_ranks:
        raise ArgumentError(
            f"a schedule needs at least one stage and as many stages on each rank, got {num_stages} stages on "
            f"{num_ranks} ranks"
        )
    each = num_stages // num_ranks
    if name in ("1f1b", "zero-bubble-h2") and each > 1:
        raise ArgumentError(f"{name} runs one stage a rank, got {num_stages} on {num_ranks} ranks: use 'interleaved'")
    if name == "interleaved" and each == 1:
        raise ArgumentError(f"interleaved needs 2 or more stages a rank, got {num_stages} on {num_ranks}: use '1f1b'")
    if name == "zero-bubble-v":
        if each != 2:
            raise ArgumentError(f"zero-bubble-v needs 2 stages a rank, got {num_stages} on {num_ranks} ranks")
        return (*range(num_ranks), *reversed(range(num_ranks)))
    return tuple(stage % num_ranks for stage in range(num_stages))


def in_flight(
    name: ScheduleName, stage: int, num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
) -> int:
    """Micro-batches whose activations a stage holds at its peak, from their forward until the end of their backward.

    gpipe m, 1f1b min(p - stage, m), zero-bubble with one stage a rank min(p, m) and zero-bubble-h2 min(2 p - 1, m);
    else counted on the lists. The stages of one rank need not have their peaks at the same time.

    >>> [in_flight("1f1b", stage, 4, 8) for stage in range(4)]
    [4, 3, 2, 1]
    """
    if num_ranks in (None, num_stages):
        if name == "gpipe":
            return num_microbatches
        if name == "1f1b":
            return min(num_stages - stage, num_microbatches)
    return _most_held(name, num_stages, num_microbatches, num_ranks)[stage]


@lru_cache(maxsize=256)
def _most_held(name: ScheduleName, num_stages: int, num_microbatches: int, num_ranks: int | None) -> dict[int, int]:
    return most_held(build_schedule(name, num_stages, num_microbatches, num_ranks=num_ranks))


Work = tuple[Ints, Ints]
"""Stages and micro-batches, [ranks, n] and [n], in order."""


def _woven(forwards: Work, backwards: Work, ahead: Ints, behind: Ints | None) -> Table:
    """By rank: `ahead` forwards, then a forward and a backward in turn, then the backwards left.

    behind: a backward is I and W, and each W stands right after the I of `behind` backwards later. None: it is whole.
    Each action is put where it belongs by the number of those before it:

        F_i     i, and for i >= ahead: twice i - ahead plus ahead, and the W so far
        I_j     the forwards, I and W so far: ahead + min(j + 1, n - ahead) + j + max(0, j - behind)
        W_j     after I_(j + behind); those that are left at the end follow one another
    """
    ranks, n = forwards[0].shape
    ahead = np.minimum(ahead, n)[:, None]
    lag = np.full((ranks, 1), n) if behind is None else np.minimum(behind, n)[:, None]
    j = np.arange(n)
    turn = np.maximum(0, j - ahead)
    at_forward = np.minimum(j, ahead) + 2 * turn + np.maximum(0, turn - lag)
    at_input = ahead + np.minimum(j + 1, n - ahead) + j + np.maximum(0, j - lag)
    kinds = "FB" if behind is None else "FIW"
    places = [at_forward, at_input]
    if behind is not None:
        after = np.take_along_axis(at_input, np.minimum(j + lag, n - 1), axis=1) + 1
        places.append(np.where(j + lag < n, after, 2 * n + j))
    table = Table(*(np.empty((ranks, len(kinds) * n), np.int64) for _ in range(3)))
    for kind, at in zip(kinds, places, strict=True):
        stages, ks = forwards if kind == "F" else backwards
        np.put_along_axis(table.stages, at, stages, axis=1)
        np.put_along_axis(table.kinds, at, np.int64(KINDS.index(kind)), axis=1)
        np.put_along_axis(table.microbatches, at, np.broadcast_to(ks, at.shape), axis=1)
    return table


def _in_rounds(rank: Ints, turns: range, rounds: Sequence[int]) -> Work:
    """Each round of micro-batches through a rank's stages, the turns-th of each rank, in turn."""
    if len(turns) == 1:
        turn, ks = np.zeros(sum(rounds), np.int64), np.arange(sum(rounds))
    else:
        firsts = np.cumsum([0, *rounds])
        some = [np.arange(first, first + size) for first, size in zip(firsts, rounds, strict=False)]
        turn = np.concatenate([np.repeat(turns, len(ks)) for ks in some])
        ks = np.concatenate([np.tile(ks, len(turns)) for ks in some])
    return turn * len(rank) + rank[:, None], ks


def _v_order(rank: int, p: int, m: int) -> tuple[Action, ...]:
    """One rank of zero-bubble-v, in phases that hold from 2 p - 1 micro-batches on; of fewer, those there are."""
    down, up, most = rank, 2 * p - 1 - rank, max(m, 2 * p - 1)
    order: list[Action] = []
    done: Counter[tuple[int, str]] = Counter()

    def run(stage: int, kinds: str) -> None:
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
    return tuple(action for action in order if action.microbatch < m)


def _rounds(m: int, p: int) -> list[int]:
    """m micro-batches in rounds of p, or a few more where p does not divide m; longer ones first.

    >>> _rounds(8, 4), _rounds(11, 4), _rounds(3, 4)
    ([4, 4], [6, 5], [3])
    """
    count = max(1, m // p)
    return [m // count + (k < m % count) for k in range(count)]
