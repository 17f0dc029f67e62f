"""Say how far long work is: a bar on stderr with the time left, once the work has taken two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from partitioner.errors import expect

Progress = Callable[[str, float], None]
"""Told what is being done, and the share of the work that is done, 0 to 1."""

PATIENCE_S = 2.0
"""Shorter work shows nothing."""


@contextmanager
def shown(progress: bool | Progress | None) -> Iterator[Progress]:
    """What to tell while working. A function of the caller's is told all; True shows a bar, None where stderr is a
    terminal, False never. The bar is gone when the work is done.

    >>> with shown(False) as tell:
    ...     tell("measuring", 0.5)
    """
    if callable(progress):
        yield progress
        return
    expect("progress", progress, (bool, type(None)), "True, False, None, or a function of what is done and its share")
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield lambda what, share: None
    else:
        bar = _Bar()
        try:
            yield bar.tell
        finally:
            bar.close()


def portion(tell: Progress, start: float, end: float) -> Progress:
    """For a piece of the work that goes from one share of the whole to another.

    >>> portion(lambda what, share: print(what, share), 0.5, 0.9)("half of the second half", 0.5)
    half of the second half 0.7
    """
    return lambda what, share: tell(what, start + share * (end - start))


def left_s(share: float, took_s: float, since_s: float) -> float | None:
    """Seconds left when `share` was done after `took_s`, `since_s` ago, at the pace so far; None: too early to say.

    >>> left_s(0.25, 10.0, 2.0), left_s(0.01, 1.0, 0.0)
    (28.0, None)
    """
    if share < 0.02 or took_s <= 0:
        return None
    return max(0.0, took_s * (1 - share) / share - since_s)


class _Bar:
    """Told from the first moment, drawn from `PATIENCE_S` on, by a thread: work may be silent for long."""

    def __init__(self) -> None:
        self.began = self.told = time.monotonic()
        self.what, self.share = "", 0.0
        self.lock = threading.Lock()
        self.closed = False
        self.bar: Any = None
        self.task: Any = None
        self.timer = threading.Timer(PATIENCE_S, self._show)
        self.timer.daemon = True
        self.timer.start()

    def tell(self, what: str, share: float) -> None:
        with self.lock:
            self.what, self.share, self.told = what, share, time.monotonic()
            if self.bar is not None:
                self.bar.update(self.task, description=what, completed=share)

    def close(self) -> None:
        self.timer.cancel()
        with self.lock:
            self.closed = True
            if self.bar is not None:
                self.bar.stop()

    def left(self) -> str:
        """The time left in words."""
        now = time.monotonic()
        left = left_s(self.share, self.told - self.began, now - self.told)
        if left is None:
            return f"{now - self.began:.0f} s so far"
        return f"about {left // 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left"

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, ProgressColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bar

        outer = self

        class Left(ProgressColumn):
            def render(self, task: Any) -> Any:
                from rich.text import Text

                return Text(outer.left())

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), Left())
        with self.lock:
            if not self.closed:
                bar = Bar(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4)
                self.task = bar.add_task(self.what, total=1.0)
                bar.update(self.task, completed=self.share)
                bar.start()
                self.bar = bar
