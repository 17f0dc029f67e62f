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

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from partitioner.actions import KINDS, Action, Table, most_held
from partitioner.errors import ArgumentError
from partitioner.rounds import Rounds, rounds_of
from partitioner.specs import SCHEDULES, ScheduleName


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
    table = _listed(rounds_of(name, places, num_microbatches))
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


def taking_turns(num_ranks: Sequence[int], num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Inference where each stage has its own number of ranks: micro-batch k of a stage runs on its rank k % ranks.

    Ranks are listed stage by stage. A rank whose turn does not come has nothing to do.

    >>> from partitioner.actions import grid
    >>> print(grid(taking_turns([1, 2], 3)))
    t         0    1    2    3
    rank 0  0F0  0F1  0F2
    rank 1    .  1F0    .  1F2
    rank 2    .    .  1F1
    """
    return tuple(
        tuple(Action(stage, "F", k) for k in range(turn, num_microbatches, count))
        for stage, count in enumerate(num_ranks)
        for turn in range(count)
    )


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


def _listed(rounds: Rounds) -> Table:
    """Each rank's actions in the order of their rounds."""
    own, m = rounds.own, rounds.forward.shape[1]
    if rounds.weight is None or rounds.turn is None:
        kinds, keys = "FB", [rounds.forward, rounds.backward]
    else:
        kinds, most = "FIW", 2 + int(rounds.turn.max())
        keys = [most * rounds.forward, most * rounds.backward, most * rounds.weight + rounds.turn + 1]
    order = np.argsort(np.concatenate([key[own].reshape(len(own), -1) for key in keys], axis=1), kind="stable")
    kind, within = np.divmod(order, own.shape[1] * m)
    turn, ks = np.divmod(within, m)
    return Table(np.take_along_axis(own, turn, axis=1), np.array([KINDS.index(one) for one in kinds])[kind], ks)
