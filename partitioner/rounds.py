"""In which round each rank of a named schedule runs what: closed forms, for a few micro-batches or for any number.

Let rounds be common to all ranks, and each rank run at most one F, I or B in a round, with any W behind it. A schedule
is then a rule for turns, rounds that come again and again: with p ranks, in its turn t rank r runs

    1f1b, interleaved    F number t + ahead(r), B number t
    zero-bubble, -h2     F number t + ahead(r), I number t, W number t - behind(r)
    zero-bubble-v        of the stage on the way down F t + 2 p - 1 - r, I t, W t, of that on the way up F t + p,
                         I and W t + p - r

where these numbers exist. The v stages of a rank count their actions together: about p micro-batches of one stage, then
as many of the next. zero-bubble-v has another rule before turn 0. Turn t of rank r begins in round 2 t + c(r), or 4 t +
c(r) where a turn has four actions beside W; with the right c, all that comes from another rank was made in an earlier
round. The order on each rank is that of its rounds, and when everything happens follows from one pass over them, all
ranks at once. With more micro-batches the same rounds come again: `Window`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.specs import ScheduleName

Ints = NDArray[np.int64]

SPLIT_BACKWARD: tuple[ScheduleName, ...] = ("zero-bubble", "zero-bubble-h2", "zero-bubble-v")
"""Those that run a backward in two parts, I and W."""


class Window(NamedTuple):
    """Rounds that come again: those from `first` on, `length` of them, so many times more."""

    first: int
    length: int
    times: int


class Rounds(NamedTuple):
    """Rounds by stage and micro-batch, from 0 on."""

    forward: Ints
    backward: Ints
    """Of B or I."""
    weight: Ints | None
    """Of the action that a W follows; None: backwards are whole."""
    turn: Ints | None
    """In ascending order, the W that follow the same action."""
    ranks: Ints
    """[stages]"""
    windows: tuple[Window, ...]
    """Those left out; none where all micro-batches are there."""

    @property
    def own(self) -> Ints:
        """[ranks, stages of one] in ascending order."""
        return np.argsort(self.ranks, kind="stable").reshape(1 + int(self.ranks.max()), -1)

    @property
    def finished(self) -> Ints:
        """Each stage's place in the order in which the stages of its rank are done."""
        last = self.backward[:, -1] if self.weight is None else self.weight[:, -1]
        return np.lexsort((last if self.turn is None else self.turn[:, -1], last)).argsort()


def rounds_of(name: ScheduleName, ranks: Sequence[int], m: int, *, short: bool = False, far: bool = True) -> Rounds:
    """The rounds of m micro-batches. `ranks`: by stage, as `schedule.placement` says.

    short: only of as many micro-batches as show everything that happens, and what to repeat for the others.
    far: whether stages receive from others than those next to them.
    """
    p = 1 + max(ranks)
    v = len(ranks) // p
    if name == "gpipe":
        forward, backward, windows = _gpipe(p, v, m, short)
        weight = turn = None
    elif name == "zero-bubble-v":
        forward, backward, weight, turn, windows = _vee(p, m, short, far)
    else:
        forward, backward, weight, turn, windows = _woven(name, p, v, m, short)
    base = int(min(forward.min(), backward.min()))
    return Rounds(
        forward - base,
        backward - base,
        None if weight is None else weight - base,
        turn,
        np.array(ranks),
        tuple(one._replace(first=one.first - base) for one in windows),
    )


def _gpipe(p: int, v: int, m: int, short: bool) -> tuple[Ints, Ints, list[Window]]:
    """Each stage of a rank runs all its forwards in a row, and all its backwards.

    With several stages a rank, what comes from the last rank is older the more micro-batches there are: no windows.
    """
    windows = []
    if short and v == 1 and m > p + 1:
        first = p - 1
        windows = [Window(first, 1, m - p - 1), Window(first + 2 * p, 1, m - p - 1)]
        m = p + 1
    a, r, k = np.ogrid[:v, :p, :m]
    long = max(m, p)
    forward = a * long + k + r
    backward = (2 * v - 1 - a) * long + k + 2 * (p - 1) - r
    return forward.reshape(v * p, m), backward.reshape(v * p, m), windows


def _woven(
    name: ScheduleName, p: int, v: int, m: int, short: bool
) -> tuple[Ints, Ints, Ints | None, Ints | None, list[Window]]:
    sizes = [(1, m)] if v == 1 else _sizes(m, p)
    r = np.arange(p)
    later = (v - 1) * sizes[0][0]
    ahead, behind, slope = {
        "1f1b": (p - 1 - r, None, 1),
        "interleaved": (later + 2 * (p - 1 - r), None, 2),
        "zero-bubble": (later + p - 1 - r, r, 1),
        "zero-bubble-h2": (2 * (p - 1 - r), 2 * r, 1),
    }[name]
    c = slope * (p - 1 - r)
    windows: list[Window] = []
    if short:
        # All ranks are within the equal turns of a section from the latest begin of these until the earliest end.
        begin = int(np.max(c if behind is None else 2 * behind + c))
        end = int(np.min(c - 2 * ahead)) - 2
        kept, number = [], 0
        for size, count in sizes:
            length = 2 * v * size
            keep = min(count, -(-(length + begin - end) // length))
            if keep < count:
                windows.append(Window(2 * number + begin, length, count - keep))
            kept.append((size, keep))
            number += v * size * keep
        sizes = kept
    each = np.repeat([size for size, _ in sizes], [count for _, count in sizes])
    m = int(each.sum())
    first = np.repeat(np.cumsum(each) - each, each)
    numbers = v * first + np.arange(v)[:, None, None] * np.repeat(each, each) + np.arange(m) - first  # [v, 1, m]
    forward = 2 * (numbers - ahead[:, None]) + c[:, None]
    back = numbers[::-1]
    backward = 2 * back + c[:, None] + 1
    shape = (v * p, m)
    if behind is None:
        return forward.reshape(shape), backward.reshape(shape), None, None, windows
    after = np.minimum(back + behind[:, None], v * m - 1)
    weight = 2 * after + c[:, None] + 1
    turn = np.broadcast_to(back, weight.shape)
    return forward.reshape(shape), backward.reshape(shape), weight.reshape(shape), turn.reshape(shape), windows


def _vee(p: int, m: int, short: bool, far: bool) -> tuple[Ints, Ints, Ints, Ints, list[Window]]:
    """Where there are fewer than 2 p - 1 micro-batches, the order is that of as many without those that are missing.

    From turn -p on, until the gradient of the first micro-batch has come back to a rank, it runs F on the way up and F
    on the way down in turn, then F, I and W on the way up alone. Before, it runs F on the way down in every round.
    """
    windows = []
    turn = (p - 1) * far  # what comes from stages farther away than the next was made in a turn as well from then on
    fewer = 2 * p + 1 + turn
    if short and m > fewer:
        windows, m = [Window(p - 1 + 4 * turn, 4, m - fewer)], fewer
    most = max(m, 2 * p - 1)
    r, n = np.arange(p)[:, None], np.arange(m)
    c = p - 1 - r
    down = np.where(n < 2 * p - r - 1, 4 * (n - 3 * p + 2 * r + 1) + 3 + c, 4 * (n - 2 * p + r + 1) + c)
    down = np.where(n < 2 * (p - r) - 1, n + r - 5 * p + 2, down)
    up = 4 * (n - p) + 2 + c
    back_down, back_up = 4 * n + 1 + c, 4 * (n - p + r) + 3 + c
    last = 4 * (most - 1) + 1 + c
    left = n >= most - r  # W that are run when all else is done: on the way up first
    weight_down = np.where(left, last, back_down + 4 * r * (n >= most - p))
    weight_up = np.where(left, last, back_up)
    turn_down, turn_up = n + 2 * most * left, n + most * left

    def both(first: Ints, second: Ints) -> Ints:
        return np.concatenate([first, second[::-1]])

    return (
        both(down, up),
        both(back_down, back_up),
        both(weight_down, weight_up),
        both(np.broadcast_to(turn_down, down.shape), np.broadcast_to(turn_up, up.shape)),
        windows,
    )


def _sizes(m: int, p: int) -> list[tuple[int, int]]:
    """m micro-batches in rounds of p, or a few more where p does not divide m: (micro-batches, rounds of so many).

    >>> _sizes(8, 4), _sizes(11, 4), _sizes(3, 4)
    ([(4, 2)], [(6, 1), (5, 1)], [(3, 1)])
    """
    count = max(1, m // p)
    size, longer = divmod(m, count)
    return [(size + more, rounds) for more, rounds in ((1, longer), (0, count - longer)) if rounds]
