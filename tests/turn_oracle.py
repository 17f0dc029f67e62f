"""What stages do whose ranks take turns, from the rules alone: loads counted one by one, and a clock that ticks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from partitioner.graph import CostGraph
from partitioner.memory import inference_memory
from partitioner.profiles import Profile
from partitioner.specs import Cluster, Training


def counted_s(
    stage_s: Sequence[float], messages: dict[tuple[int, int], float], ranks: Sequence[int], num_microbatches: int
) -> float:
    """What the busiest rank, or the busiest end of a wire, has of one batch."""
    loads: dict[tuple[object, ...], float] = {}
    for k in range(num_microbatches):
        for stage, seconds in enumerate(stage_s):
            at = "rank", stage, k % ranks[stage]
            loads[at] = loads.get(at, 0.0) + seconds
        for (source, target), seconds in messages.items():
            for at in (
                ("out", source, k % ranks[source], target),
                ("in", target, k % ranks[target], source),
            ):
                loads[at] = loads.get(at, 0.0) + seconds
    return max(loads.values())


def ticking(
    stage_ticks: Sequence[int],
    messages: dict[tuple[int, int], int],
    ranks: Sequence[int],
    num_microbatches: int,
    num_batches: int,
) -> list[int]:
    """Ticks after which each batch has left the last stage; batches wait at the first one from the start.

    Every rank and every end of a wire has a list of what it does next, and does it as soon as it can.
    """
    work = [(b, k) for b in range(num_batches) for k in range(num_microbatches)]
    todo: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for one in work:
        for stage, count in enumerate(ranks):
            todo.setdefault(("rank", stage, one[1] % count), []).append(one)
        for source, target in messages:
            todo.setdefault(("out", source, one[1] % ranks[source], target), []).append(one)
            todo.setdefault(("in", target, one[1] % ranks[target], source), []).append(one)
    free = dict.fromkeys(todo, 0)
    at = dict.fromkeys(todo, 0)
    made: dict[tuple[int, tuple[int, int]], int] = {}
    came: dict[tuple[int, int, tuple[int, int]], int] = {}
    left = len(work)
    now = 0
    while left:
        for key, list_ in todo.items():
            if at[key] == len(list_) or free[key] > now:
                continue
            one = list_[at[key]]
            if key[0] == "rank":
                stage = key[1]
                assert isinstance(stage, int)
                needs = [source for source, target in messages if target == stage]
                if all(came.get((source, stage, one), now + 1) <= now for source in needs):
                    free[key] = made[stage, one] = now + stage_ticks[stage]
                    at[key] += 1
                    left -= stage == len(ranks) - 1
            elif key[0] == "out":
                _, source, _, target = key
                assert isinstance(source, int) and isinstance(target, int)
                far = ("in", target, one[1] % ranks[target], source)
                ready = made.get((source, one), now + 1) <= now and free[far] <= now
                if ready and todo[far][at[far]] == one:
                    free[key] = free[far] = came[source, target, one] = now + messages[source, target]
                    at[key] += 1
                    at[far] += 1
        now += 1
    last = len(ranks) - 1
    return [max(made[last, (b, k)] for k in range(num_microbatches)) for b in range(num_batches)]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to give that many ranks, or fewer, to so many stages, one each at least."""
    if not parts:
        yield ()
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield first, *rest


def every_turn_plan_s(profile: Profile, cluster: Cluster, training: Training, *, any_order: bool = False) -> float:
    """The least period over all cuts, ranks by stage and micro-batch counts that fit; `any_order`: of devices, too."""
    graph, best, batch = CostGraph(profile), float("inf"), training.batch_size
    counts = [m for m in range(1, batch + 1) if batch % m == 0 and training.microbatches in ("auto", m)]
    orders = list(itertools.permutations(range(cluster.num_devices))) if any_order else [range(cluster.num_devices)]
    for m, stages in itertools.product(counts, range(1, cluster.num_devices + 1)):
        seconds = graph.at(batch // m).forward_s
        for cuts in itertools.combinations(graph.allowed_cuts, stages - 1):
            moved = graph.transfers(cuts, batch // m)
            sizes = [sum(inference_memory(graph, *ends, samples=batch // m).values()) for ends in graph.bounds(cuts)]
            for ranks, order in itertools.product(compositions(cluster.num_devices, stages), orders):
                ends = list(itertools.accumulate(ranks, initial=0))
                placed = [order[i:j] for i, j in itertools.pairwise(ends)]
                limits = [min(cluster.devices[one].memory_bytes for one in row) for row in placed]
                if any(size > limit for size, limit in zip(sizes, limits, strict=True)):
                    continue
                stage_s = [
                    (float(seconds[i:j].sum()) + graph.slicing_s(stages))
                    / min(cluster.devices[one].relative_speed for one in row)
                    for (i, j), row in zip(graph.bounds(cuts), placed, strict=True)
                ]
                messages = {
                    (one.source, one.target): max(
                        cluster.link(a, b).time(one.forward_bytes)
                        for a, b in itertools.product(placed[one.source], placed[one.target])
                    )
                    for one in moved
                }
                best = min(best, counted_s(stage_s, messages, ranks, m))
    return best
