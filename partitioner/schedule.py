"""Who runs what in which order: a schedule is one list of actions a rank, made here, checked here, printed as a grid.

An action needs what flows into it: a forward needs the forward of the stages it receives from, a backward needs its own
forward and the backward of the stages it sent to. These edges between stages are a chain unless the caller says
otherwise; a model with skips or branches has others. Where a stage runs is read off the lists; a rank may run several.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from partitioner.errors import ArgumentError
from partitioner.specs import ScheduleName


class Action(NamedTuple):
    """One stage's work on one micro-batch: F is forward, B is backward.

    >>> str(Action(2, "F", 0)), Action.parse("12B7")
    ('2F0', Action(stage=12, kind='B', microbatch=7))
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that `str` wrote; anything else is an ArgumentError."""
        found = re.fullmatch(r"([0-9]+)([FB])([0-9]+)", text, re.ASCII)
        if found is None:
            raise ArgumentError(f"cannot read the action {text!r}: write stage, F or B, micro-batch, as in '2F0'")
        return cls(int(found[1]), found[2], int(found[3]))


Orders = Sequence[Sequence[Action]]
"""What each rank runs, in order."""
Edges = Collection[tuple[int, int]]
"""(source, target): stages between which every micro-batch's tensors go forward and their gradients come back."""


def build_schedule(name: ScheduleName, num_stages: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The order of actions on each rank of one replica; rank r runs stage r.

    "gpipe" (Huang et al. 2019): all forwards, then all backwards; every stage holds all m micro-batches. The backwards
    go in the order of the forwards: each schedule then adds up gradients in the order in which one device would, to the
    last bit, and every edge carries its messages in one order. Time and memory are those of the reversed order.

    >>> print(grid(build_schedule("gpipe", 3, 3)))
    t         0    1    2    3    4    5    6    7    8    9
    rank 0  0F0  0F1  0F2    .    .    .    .  0B0  0B1  0B2
    rank 1    .  1F0  1F1  1F2    .    .  1B0  1B1  1B2
    rank 2    .    .  2F0  2F1  2F2  2B0  2B1  2B2

    "1f1b" (PipeDream-Flush, Narayanan et al. 2021): stage s of p runs p - s - 1 forwards to warm up, then one forward
    and one backward in turn, then the backwards left. As long as gpipe when stages are equal, but holds p - s at most.

    >>> print(grid(build_schedule("1f1b", 3, 3)))
    t         0    1    2    3    4    5    6    7    8    9
    rank 0  0F0  0F1  0F2    .    .  0B0    .  0B1    .  0B2
    rank 1    .  1F0  1F1    .  1B0  1F2  1B1    .  1B2
    rank 2    .    .  2F0  2B0  2F1  2B1  2F2  2B2

    Counts below 1 and unknown names are an ArgumentError.
    """
    _check_counts(num_stages, num_microbatches)
    orders = []
    for stage in range(num_stages):
        forwards = [Action(stage, "F", k) for k in range(num_microbatches)]
        backwards = [Action(stage, "B", k) for k in range(num_microbatches)]
        ahead = in_flight(name, stage, num_stages, num_microbatches)
        steady = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in reversed(pair)]
        orders.append((*forwards[:ahead], *steady, *backwards[num_microbatches - ahead :]))
    return tuple(orders)


def forward_only(num_stages: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Inference: micro-batches flow through the stages, nothing comes back. One micro-batch: plain model parallelism.

    >>> print(grid(forward_only(3, 2)))
    t         0    1    2    3
    rank 0  0F0  0F1
    rank 1    .  1F0  1F1
    rank 2    .    .  2F0  2F1
    """
    _check_counts(num_stages, num_microbatches)
    return tuple(tuple(Action(stage, "F", k) for k in range(num_microbatches)) for stage in range(num_stages))


def in_flight(name: ScheduleName, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Micro-batches whose activations a stage holds at its peak: m under gpipe, min(p - stage, m) under 1f1b.

    >>> [in_flight("1f1b", stage, 4, 8) for stage in range(4)]
    [4, 3, 2, 1]
    """
    if name == "gpipe":
        return num_microbatches
    if name == "1f1b":
        return min(num_stages - stage, num_microbatches)
    raise ArgumentError(f"there is no schedule {name!r}: choose 'gpipe' or '1f1b'")


def chain(num_stages: int) -> tuple[tuple[int, int], ...]:
    """The edges of a model without skips: each stage feeds the next.

    >>> chain(3)
    ((0, 1), (1, 2))
    """
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


def walk(orders: Orders, edges: Edges | None = None) -> Iterator[tuple[int, Action]]:
    """Every (rank, action) after all that it needs, each rank in its own order; O(actions x edges a stage).

    `edges` None is a chain. Sends do not block. It ends early where every rank left waits for another: what has not
    been yielded by then can never run.
    """
    needs = _Needs(orders, edges)
    position = [0] * len(orders)
    done: set[tuple[int, str, int]] = set()
    waiting: dict[tuple[int, str, int], list[int]] = {}
    awake = list(reversed(range(len(orders))))
    while awake:
        rank = awake.pop()
        order = orders[rank]
        for at in range(position[rank], len(order)):
            action = order[at]
            missing = needs.first_missing(action, done)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                position[rank] = at
                break
            yield rank, action
            done.add(action)
            if action in waiting:
                awake.extend(waiting.pop(action))


class _Needs:
    """What an action waits for, in the same micro-batch: a backward's own forward, and the messages it receives."""

    def __init__(self, orders: Orders, edges: Edges | None) -> None:
        num_stages = 1 + max((action.stage for order in orders for action in order), default=-1)
        self.table: dict[tuple[int, str], list[tuple[int, str]]] = {}
        for stage in range(num_stages):
            self.table[stage, "F"], self.table[stage, "B"] = [], [(stage, "F")]
        for source, target in sorted(chain(num_stages) if edges is None else edges):
            if not 0 <= source < target < num_stages:
                raise ArgumentError(f"the edge {source} -> {target} does not go forward within {num_stages} stages")
            self.table[target, "F"].append((source, "F"))
            self.table[source, "B"].append((target, "B"))

    def first_missing(self, action: Action, done: Collection[tuple[int, str, int]]) -> tuple[int, str, int] | None:
        stage, kind, k = action
        for other, other_kind in self.table[stage, kind]:
            if (other, other_kind, k) not in done:
                return other, other_kind, k
        return None

    def of(self, action: Action) -> list[Action]:
        return [Action(stage, kind, action.microbatch) for stage, kind in self.table[action.stage, action.kind]]

    def received(self, action: Action) -> list[Action]:
        return [need for need in self.of(action) if need.stage != action.stage]

    def receivers(self, action: Action) -> list[Action]:
        """The actions that wait for this one's message."""
        other = "B" if action.kind == "F" else "F"  # what it sends forward comes back from there, and the reverse
        stages = [stage for stage, kind in self.table[action.stage, other] if kind == other]
        return [Action(stage, action.kind, action.microbatch) for stage in stages]


def check_schedule(orders: Orders, edges: Edges | None = None) -> None:
    """Prove that these lists can run and lose nothing; otherwise an ArgumentError, with the fault marked on the grid.

    - every stage, 0 to p - 1, is on one rank, and runs every micro-batch once: forward, and backward if any stage does;
    - no rank waits in a circle, given that sends do not block;
    - on each directed edge between two ranks, messages are received in the order in which they are sent.
    """
    _check_complete(orders)
    needs = _Needs(orders, edges)
    done = {action for _, action in walk(orders, edges)}
    stuck = [(rank, action) for rank, order in enumerate(orders) for action in order if action not in done]
    heads = dict(reversed(stuck))
    if heads:
        waits = [
            f"rank {rank} waits at {action} for {next(need for need in needs.of(action) if need not in done)}"
            for rank, action in sorted(heads.items())
        ]
        _fail("no rank can go on: " + ", ".join(waits[:8]), orders, edges, heads.values())
    _check_pairing(orders, edges, needs)


def _check_complete(orders: Orders) -> None:
    rank_of: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, order in enumerate(orders):
        for action in order:
            if action in seen:
                _fail(f"{action} is there twice", orders, None, [action])
            seen.add(action)
            if rank_of.setdefault(action.stage, rank) != rank:
                _fail(f"stage {action.stage} is on ranks {rank_of[action.stage]} and {rank}", orders, None, [action])
    if not seen:
        raise ArgumentError("the schedule is empty: it needs at least one action")
    num_microbatches = 1 + max(action.microbatch for action in seen)
    kinds = "FB" if any(action.kind == "B" for action in seen) else "F"
    for stage in range(1 + max(rank_of)):
        for kind in kinds:
            for microbatch in range(num_microbatches):
                lost = Action(stage, kind, microbatch)
                if lost not in seen:
                    _fail(f"{lost} is missing", orders, None, [a for a in seen if a[::2] == lost[::2]])


def _check_pairing(orders: Orders, edges: Edges | None, needs: _Needs) -> None:
    """Compare, on each directed edge between ranks, the messages as sent with the messages as awaited."""
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    sent: dict[tuple[int, int], list[tuple[Action, Action]]] = {}
    awaited: dict[tuple[int, int], list[tuple[Action, Action]]] = {}
    for rank, order in enumerate(orders):
        for action in order:
            for source in needs.received(action):
                awaited.setdefault((rank_of[source.stage], rank), []).append((source, action))
            for target in needs.receivers(action):
                sent.setdefault((rank, rank_of[target.stage]), []).append((action, target))
    for (first, second), messages in sent.items():
        for k, (message, expected) in enumerate(zip(messages, awaited[first, second], strict=True)):
            if message != expected and first != second:
                _fail(
                    f"message {k} from rank {first} to rank {second} is {message[0]} for {message[1]}, "
                    f"but rank {second} then waits for {expected[0]}",
                    orders,
                    edges,
                    [message[0], expected[1]],
                )


def grid(
    orders: Orders, edges: Edges | None = None, *, marked: Collection[Action] = (), max_columns: int | None = None
) -> str:
    """The schedule as a picture: a row a rank, a column a time slot when every action takes one slot.

    `marked` actions stand in brackets. Actions that can never run follow at the end of their rank's row. With
    `max_columns`, only that many slots, and half as many ranks, around the first mark.
    """
    rows = _slots(orders, edges)
    num_slots = max((1 + max(row) for row in rows if row), default=0)
    columns, ranks = range(num_slots), range(len(rows))
    if max_columns is not None:
        place = next(((r, t) for r, row in enumerate(rows) for t, a in row.items() if a in marked), (0, 0))
        columns = _window(num_slots, place[1], max_columns)
        ranks = _window(len(rows), place[0], max_columns // 2)
    cells = {
        (rank, slot): f"[{action}]" if action in marked else str(action)
        for rank in ranks
        for slot, action in rows[rank].items()
        if slot in columns
    }
    width = max(map(len, [*cells.values(), str(num_slots)])) + 2
    label = len(f"rank {len(rows) - 1}")
    lines = ["t".ljust(label) + "".join(str(slot).rjust(width) for slot in columns)]
    for rank in ranks:
        last = max((slot for slot in rows[rank] if slot in columns), default=-1)
        line = "".join(cells.get((rank, slot), ".").rjust(width) for slot in columns if slot <= last)
        lines.append(f"rank {rank}".ljust(label) + line)
    return "\n".join(lines)


def _slots(orders: Orders, edges: Edges | None) -> list[dict[int, Action]]:
    rows: list[dict[int, Action]] = [{} for _ in orders]
    needs = _Needs(orders, edges)
    end: dict[Action, int] = {}
    free = [0] * len(orders)
    for rank, action in walk(orders, edges):
        slot = max([free[rank], *(end[need] for need in needs.of(action))])
        rows[rank][slot] = action
        end[action] = free[rank] = slot + 1
    stuck = max(free, default=0)
    for row, order in zip(rows, orders, strict=True):
        row.update(enumerate(order[len(row) :], start=stuck))
    return rows


def _window(length: int, center: int, size: int) -> range:
    first = max(0, min(center - size // 2, length - size))
    return range(first, min(length, first + size))


def _fail(what: str, orders: Orders, edges: Edges | None, marked: Iterable[Action]) -> NoReturn:
    picture = grid(orders, edges, marked=set(marked), max_columns=20)
    raise ArgumentError(f"this schedule cannot be run: {what}\n{picture}")


def _check_counts(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ArgumentError(
            f"a schedule needs at least one stage and one micro-batch, got {num_stages} and {num_microbatches}"
        )
