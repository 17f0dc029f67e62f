"""Lists of actions, one a rank: what each action waits for, a proof that the lists can run, and their picture.

An action needs what flows into it: a forward needs the forward of the stages it receives from; a backward needs its own
forward and the backward of the stages it sent to. These edges between stages are a chain unless the caller says
otherwise; a model with skips or branches has others. Where a stage runs is read off the lists: a rank may run several
stages, in any arrangement.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from partitioner.errors import ArgumentError

KINDS = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One stage's work on one micro-batch.

        F   forward
        B   backward, whole: gradients of the inputs and of the weights
        I   the part of it that the stage before waits for: gradients of the inputs
        W   the rest, at any later time: gradients of the weights

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
        found = re.fullmatch(r"([0-9]+)([FBIW])([0-9]+)", text, re.ASCII)
        if found is None:
            raise ArgumentError(
                f"cannot read the action {text!r}: write stage, F, B, I or W, and micro-batch, as in '2F0'"
            )
        return cls(int(found[1]), found[2], int(found[3]))


Orders = Sequence[Sequence[Action]]
"""What each rank runs, in order."""
Edges = Collection[tuple[int, int]]
"""(source, target): stages between which every micro-batch's tensors go forward and their gradients come back."""


class Table(NamedTuple):
    """Lists of actions as arrays [ranks, longest list], for lists of many thousands; unused places are stage -1."""

    stages: NDArray[np.int64]
    kinds: NDArray[np.int64]
    """Positions in `KINDS`."""
    microbatches: NDArray[np.int64]

    @classmethod
    def of(cls, orders: Orders) -> Table:
        shape = (len(orders), max(map(len, orders), default=0))
        table = cls(np.full(shape, -1), np.zeros(shape, np.int64), np.zeros(shape, np.int64))
        number = {kind: at for at, kind in enumerate(KINDS)}
        for rank, order in enumerate(orders):
            if order:
                stages, kinds, ks = zip(*order, strict=True)
                for row, values in zip(table, (stages, [number[kind] for kind in kinds], ks), strict=True):
                    row[rank, : len(order)] = values
        return table

    def in_order(self) -> bool:
        """Whether each stage runs F, then B or I, then W of each micro-batch that it runs.

        >>> [Table.of([[Action.parse(word) for word in text.split()]]).in_order() for text in ("0F0 0B0", "0B0 0F0")]
        [True, False]
        """
        used = self.stages >= 0
        at = np.full((1 + int(self.stages.max(initial=0)), len(KINDS), 1 + int(self.microbatches.max(initial=0))), -1)
        places = np.broadcast_to(np.arange(used.shape[1]), used.shape)
        at[self.stages[used], self.kinds[used], self.microbatches[used]] = places[used]
        forward, whole, inputs, weights = np.moveaxis(at, 1, 0)
        late = ((whole >= 0) & (whole < forward)) | ((inputs >= 0) & (inputs < forward))
        return not (late | ((weights >= 0) & (weights < inputs))).any()

    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """
        >>> orders = ((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0),))
        >>> Table.of(orders).orders() == orders
        True
        """
        rows = []
        for stages, kinds, ks in zip(*self, strict=True):
            count = int((stages >= 0).sum())
            names = [KINDS[kind] for kind in kinds[:count].tolist()]
            rows.append(tuple(map(Action, stages[:count].tolist(), names, ks[:count].tolist())))
        return tuple(rows)


def chain(num_stages: int) -> tuple[tuple[int, int], ...]:
    """The edges of a model without skips: each stage feeds the next.

    >>> chain(3)
    ((0, 1), (1, 2))
    """
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


def placement_of(orders: Orders) -> dict[int, int]:
    """Stage -> the rank whose list it is on.

    >>> placement_of([[Action(0, "F", 0), Action(3, "F", 0)], [Action(1, "F", 0), Action(2, "F", 0)]])
    {0: 0, 3: 0, 1: 1, 2: 1}
    """
    return {action.stage: rank for rank, order in enumerate(orders) for action in order}


def most_held(orders: Orders) -> dict[int, int]:
    """Stage -> micro-batches whose activations it holds at most: from their F until their B, or W where it is split.

    >>> most_held([[Action.parse(word) for word in "0F0 0F1 0I0 0I1 0W0 0F2 0W1 0B2".split()]])
    {0: 2}
    """
    held: dict[int, int] = {}
    most: dict[int, int] = {}
    for order in orders:
        for stage, kind, _ in order:
            if kind == "F":
                held[stage] = held.get(stage, 0) + 1
                most[stage] = max(most.get(stage, 0), held[stage])
            elif kind != "I":
                held[stage] -= 1
    return most


def walk(orders: Orders, edges: Edges | None = None) -> Iterator[tuple[int, Action]]:
    """Every (rank, action) after all that it needs, each rank in its own order; O(actions x edges a stage).

    `edges` None is a chain. Sends do not block. It ends early where every rank left waits for another: what has not
    been yielded by then can never run.
    """
    needs = _Needs(orders, edges)
    position = [0] * len(orders)
    done: set[Event] = set()
    waiting: dict[Event, list[int]] = {}
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
            for event in _events(action):
                done.add(event)
                if event in waiting:
                    awake.extend(waiting.pop(event))


Event = tuple[int, str, int]
"""(stage, kind, micro-batch) of a forward, or of a part of a backward: B is I and W at once."""


def _events(action: Action) -> tuple[Event, ...]:
    stage, kind, k = action
    return ((stage, "I", k), (stage, "W", k)) if kind == "B" else (action,)


class _Needs:
    """What an action waits for, in the same micro-batch: its own stage's part before, and the messages it receives."""

    def __init__(self, orders: Orders, edges: Edges | None) -> None:
        num_stages = 1 + max((action.stage for order in orders for action in order), default=-1)
        self._orders = orders
        self._made_by: dict[Event, Action] = {}
        self.table: dict[tuple[int, str], list[tuple[int, str]]] = {}
        for stage in range(num_stages):
            self.table[stage, "F"], self.table[stage, "I"] = [], [(stage, "F")]
            self.table[stage, "B"], self.table[stage, "W"] = self.table[stage, "I"], [(stage, "I")]
        for source, target in sorted(chain(num_stages) if edges is None else edges):
            if not 0 <= source < target < num_stages:
                raise ArgumentError(f"the edge {source} -> {target} does not go forward within {num_stages} stages")
            self.table[target, "F"].append((source, "F"))
            self.table[source, "I"].append((target, "I"))

    def first_missing(self, action: Action, done: Collection[Event]) -> Event | None:
        stage, kind, k = action
        for other, other_kind in self.table[stage, kind]:
            if (other, other_kind, k) not in done:
                return other, other_kind, k
        return None

    def of(self, action: Action) -> list[Action]:
        """The actions of the lists that it waits for."""
        if not self._made_by:
            self._made_by = {event: one for order in self._orders for one in order for event in _events(one)}
        events = [(stage, kind, action.microbatch) for stage, kind in self.table[action.stage, action.kind]]
        return [self._made_by.get(event, Action(*event)) for event in events]

    def received(self, action: Action) -> list[Action]:
        return [need for need in self.of(action) if need.stage != action.stage]


def check_schedule(orders: Orders, edges: Edges | None = None, *, turns: bool = False) -> None:
    """Prove that these lists can run and lose nothing; otherwise an ArgumentError, with the fault marked on the grid.

    - every stage, 0 to p - 1, is on one rank, and runs every micro-batch once: forward and, if any stage does,
      backward, whole (B) or in two parts (I and W);
    - no rank waits in a circle, given that sends do not block;
    - on each edge between stages, one way and the other, messages are received in the order in which they are sent.

    turns: a stage may be on several ranks, each of which runs some of its micro-batches; messages keep their order
    from each rank to each other.
    """
    _check_complete(orders, turns)
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


def _check_complete(orders: Orders, turns: bool) -> None:
    rank_of: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, order in enumerate(orders):
        for action in order:
            if action.kind not in KINDS:
                _fail(f"{action} is of no kind of {', '.join(KINDS)}", [], None, [])
            if action in seen:
                _fail(f"{action} is there twice", orders, None, [action])
            seen.add(action)
            if rank_of.setdefault(action.stage, rank) != rank and not turns:
                _fail(f"stage {action.stage} is on ranks {rank_of[action.stage]} and {rank}", orders, None, [action])
    if not seen:
        raise ArgumentError("the schedule is empty: it needs at least one action")
    num_microbatches = 1 + max(action.microbatch for action in seen)
    trains = any(action.kind != "F" for action in seen)
    for stage in range(1 + max(rank_of)):
        for k in range(num_microbatches):
            there = {kind for kind in KINDS if Action(stage, kind, k) in seen}
            if "B" in there and there & {"I", "W"}:
                second = Action(stage, min(there & {"I", "W"}), k)
                _fail(f"{second} is part of {stage}B{k}, which is there as well", orders, None, [second])
            backward = ("I", "W") if there & {"I", "W"} else ("B",)
            for kind in ("F", *backward) if trains else ("F",):
                if kind not in there:
                    beside = [one for one in seen if (one.stage, one.microbatch) == (stage, k)]
                    _fail(f"{Action(stage, kind, k)} is missing", orders, None, beside)


def _check_pairing(orders: Orders, edges: Edges | None, needs: _Needs) -> None:
    """Compare, on each edge between ranks and each way, the messages as sent with the messages as awaited."""
    place = {action: (rank, at) for rank, order in enumerate(orders) for at, action in enumerate(order)}
    awaited: dict[tuple[int, int, int, int, bool], list[tuple[Action, Action]]] = {}
    for rank, order in enumerate(orders):
        for action in order:
            for source in needs.received(action):
                key = (place[source][0], rank, source.stage, action.stage, action.kind == "F")
                awaited.setdefault(key, []).append((source, action))
    for messages in awaited.values():
        sent = sorted(messages, key=lambda message: place[message[0]])
        for k, (message, expected) in enumerate(zip(sent, messages, strict=True)):
            if message != expected:
                first, second = place[message[0]][0], place[expected[1]][0]
                _fail(
                    f"message {k} from stage {message[0].stage} (rank {first}) to stage {message[1].stage} (rank "
                    f"{second}) is {message[0]} for {message[1]}, but rank {second} then waits for {expected[0]}",
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
