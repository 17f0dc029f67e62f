"""The shortest period that can be had, by halving."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

CLOSE = 1e-9
"""Relative; by how much a plan must be better to be another one."""
PRECISION = 1e-10
"""Relative, of the period."""

Split = TypeVar("Split")


def halved(
    low_s: float, high_s: float, look: Callable[[float], tuple[float, Split] | None]
) -> tuple[float, Split | None]:
    """(a period that cannot be had, the best split found below `high_s`). look: (its period, a split) within one."""
    found: Split | None = None
    middle_s = high_s * (1 - CLOSE)
    while low_s < middle_s:
        if (one := look(middle_s)) is not None:
            high_s, found = min(middle_s, one[0]), one[1]
        elif found is None and middle_s >= high_s * (1 - CLOSE):
            return high_s, None
        else:
            low_s = middle_s
        if high_s - low_s <= PRECISION * high_s:
            break
        middle_s = (low_s + high_s) / 2
    return low_s, found
