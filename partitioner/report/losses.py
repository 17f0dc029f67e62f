"""Where the devices' time goes that is not the model's work: as a table with bars, and in a sentence."""

from __future__ import annotations

from partitioner.plan import LostEfficiency
from partitioner.report.blocks import Bar, Part, Table
from partitioner.report.wording import count, percent

LOSSES = {
    "imbalance": ("imbalance", "the stages take unequal times; finer layers to cut between would help"),
    "fill_drain": (
        "fill and drain",
        "the pipeline fills and empties once a step; more micro-batches would shrink it, as far as smaller ones run "
        "as well",
    ),
    "communication": ("communication", "ranks wait for tensors; a faster link or fewer stages would help"),
    "slicing": (
        "running a part",
        "a stage takes longer than its layers do: the way to the first one, and its log; larger micro-batches help",
    ),
    "recompute": ("recompute", "forward runs a second time to save memory; more memory would avoid it"),
    "sync": ("data-parallel sync", "replicas wait for each other's gradients; a larger batch would spread it"),
    "small_microbatch": (
        "small micro-batch",
        "small micro-batches use a device worse; fewer, larger ones shrink it, and lengthen fill and drain",
    ),
    "optimizer": ("optimizer", "the optimizer step is outside the pipeline; a larger batch would spread it"),
    "unexplained": ("unexplained", "measured but not modelled"),
}
"""Field of LostEfficiency -> its name in prose, and what it means with what would shrink it."""

SMALL = 5e-4
"""Shares below it are added up as others."""


def losses(lost: LostEfficiency) -> list[tuple[str, float]]:
    """(name, share of all devices' time) of each part worth showing; negative where something was won."""
    parts = {LOSSES[name][0]: getattr(lost, name) for name in type(lost).model_fields}
    shown = {name: part for name, part in parts.items() if abs(part) >= SMALL}
    shown["others"] = lost.total - sum(shown.values())
    return [(name, part) for name, part in shown.items() if abs(part) >= SMALL]


def waterfall(lost: LostEfficiency, efficiency: float) -> Table:
    """All devices' time, from 100 % down to what does the model's work, each step where the one before it ended."""
    parts = losses(lost)
    levels = [1.0]
    for _, part in parts:
        levels.append(levels[-1] - part)
    scale = 1 / max(levels)
    rows: list[tuple[str | Bar, ...]] = [("all devices' time", "100.0 %", Bar((Part("whole", 0.0, scale),)))]
    for (name, part), before, after in zip(parts, levels, levels[1:], strict=False):
        low, high = sorted((scale * max(0.0, before), scale * max(0.0, after)))
        rows.append((name, f"{-100 * part:+.1f} %", Bar((Part("loss" if part > 0 else "gain", low, high),))))
    return Table(
        ("efficiency", "share", "of all devices' time"),
        tuple(rows),
        total=("left for the model", percent(efficiency), Bar((Part("work", 0.0, scale * max(0.0, efficiency)),))),
        caption="Where the devices' time goes, from all of it down to what does the model's work",
    )


def largest_loss(lost: LostEfficiency) -> tuple[str, float]:
    """The field that takes the most, and its share of all devices' time."""
    name = max(type(lost).model_fields, key=lambda field: getattr(lost, field))
    return name, float(getattr(lost, name))


def verdict(lost: LostEfficiency, efficiency: float, num_ranks: int) -> str:
    """The waterfall in a sentence: what is left, the largest loss, and what would win it back."""
    name, largest = largest_loss(lost)
    done = f"{percent(efficiency)} of the time of {count(num_ranks, 'device')} does the model's work"
    if largest < SMALL:
        return f"{done}; nothing else takes more than 0.05 %."
    return f"{done}; the largest loss is {LOSSES[name][0]} ({percent(largest)}): {LOSSES[name][1]}."
