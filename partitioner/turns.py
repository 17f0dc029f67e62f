"""One pipeline whose stages have each their own number of ranks, which take turns: when what happens, and how often.

Rank j of the r ranks of a stage runs micro-batches j, j + r, j + 2 r, ... of every batch. It works on one at a time.
What it sends to the ranks of another stage leaves over one wire, what it receives from them comes over one, each with
one message on it at a time; a message takes both ends for all of its time. Nothing else makes a rank wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from partitioner.clock import Replica
from partitioner.timeline import Span, Timeline


def most_turns(num_microbatches: int, num_ranks: int) -> int:
    """Micro-batches of a batch that the busiest of a stage's ranks runs, or a wire end carries: ceil(m / r).

    >>> [most_turns(8, ranks) for ranks in (1, 2, 3, 8, 9)]
    [8, 4, 3, 1, 1]
    """
    return -(-num_microbatches // num_ranks)


def period_s(replica: Replica, num_ranks: Sequence[int], num_microbatches: int) -> float:
    """Seconds between batches that follow each other without end. `num_ranks`: by stage.

        max over stages of ceil(m / r) t;   over messages from a stage of r ranks to one of q of ceil(m / min(r, q)) x

    A rank's next batch waits for its last one, so no rank is faster than its own turns. Of the messages between two
    stages, each waits for the one before it of its sender, r before it, and of its receiver, q before it: no row of
    waits through a batch is longer than ceil(m / min(r, q)), and one is as long.
    """
    own = [
        most_turns(num_microbatches, count) * stage.forward_s
        for stage, count in zip(replica.stages, num_ranks, strict=True)
    ]
    wires = [
        most_turns(num_microbatches, min(num_ranks[one.source], num_ranks[one.target])) * one.forward_s
        for one in replica.transfers
    ]
    return max(own + wires)


def turn_timeline(replica: Replica, ranks: Sequence[Sequence[int]], num_microbatches: int) -> Timeline:
    """One batch through an empty pipeline. `ranks`: by stage, the numbers that the spans carry, in their turn.

    >>> from partitioner.clock import StageCost
    >>> from partitioner.clock import Transfer
    >>> pipeline = Replica((StageCost(1.0, 0.0), StageCost(2.0, 0.0)), (Transfer(0, 1, 0.0, 0.0),))
    >>> turn_timeline(pipeline, [[0], [1, 2]], 4).step_s, period_s(pipeline, [1, 2], 4)
    (6.0, 4.0)
    """
    rank_free = {rank: 0.0 for row in ranks for rank in row}
    out_free: dict[tuple[int, int], float] = {}
    in_free: dict[tuple[int, int], float] = {}
    spans: list[Span] = []
    for k in range(num_microbatches):
        ready: dict[int, list[tuple[float, float]]] = {}
        for stage, cost in enumerate(replica.stages):
            rank = ranks[stage][k % len(ranks[stage])]
            now = rank_free[rank]
            for left_s, arrived_s in sorted(ready.get(stage, ()), key=lambda message: message[1]):
                if arrived_s > max(now, left_s):
                    spans.append(Span(rank, "recv", stage, k, max(now, left_s), arrived_s))
                now = max(now, arrived_s)
            end_s = rank_free[rank] = now + cost.forward_s
            spans.append(Span(rank, "F", stage, k, now, end_s))
            for one in replica.transfers:
                if one.source == stage:
                    far = ranks[one.target][k % len(ranks[one.target])]
                    leaves, comes = (rank, one.target), (far, stage)
                    left_s = max(end_s, out_free.get(leaves, 0.0), in_free.get(comes, 0.0))
                    out_free[leaves] = in_free[comes] = arrived_s = left_s + one.forward_s
                    ready.setdefault(one.target, []).append((left_s, arrived_s))
                    if one.forward_s > 0:
                        spans.append(Span(rank, "send", stage, k, left_s, arrived_s))
    return Timeline(tuple(spans), num_ranks=sum(map(len, ranks)), measured=False)
