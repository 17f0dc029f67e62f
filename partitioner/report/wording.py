"""Figures and names in words: durations, shares, counts, runs of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from partitioner.specs import counted

count = counted


def seconds(value: float) -> str:
    """A duration for people, three digits.

    >>> seconds(0.01234), seconds(4.5e-5), seconds(83), seconds(0)
    ('12.3 ms', '45.0 µs', '83.0 s', '0 s')
    """
    if value == 0:
        return "0 s"
    unit, scale = next((u, s) for u, s in (("s", 1.0), ("ms", 1e-3), ("µs", 0.0)) if abs(value) >= 0.9995 * s)
    amount = value / (scale or 1e-6)
    digits = 2 if abs(amount) < 9.995 else 1 if abs(amount) < 99.95 else 0
    return f"{amount:,.{digits}f} {unit}"


def percent(fraction: float) -> str:
    """
    >>> percent(0.1234), percent(1), percent(-0.00001)
    ('12.3 %', '100.0 %', '0.0 %')
    """
    text = f"{100 * fraction:.1f}"
    return ("0.0" if text == "-0.0" else text) + " %"


def numbers(values: Iterable[int]) -> str:
    """Ascending runs are written as ranges.

    >>> numbers([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def run(names: Sequence[str]) -> str:
    """Consecutive layers by their first and last.

    >>> run(["h.0", "h.1", "h.2"])
    'h.0 … h.2'
    """
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def mesh(axes: Mapping[str, int]) -> str:
    """
    >>> mesh({"pp": 4, "dp": 2})
    'pp 4 x dp 2'
    """
    return " x ".join(f"{axis} {size}" for axis, size in axes.items())
