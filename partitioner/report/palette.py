"""Colours by what they stand for, light and dark, told apart with any kind of colour vision.

Neighbours differ in lightness as well as in hue; the tests simulate protanopia, deuteranopia and tritanopia. The hues
are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), darkened on white and lightened on black until they stand
out by 3 : 1 or more (WCAG 2.2, non-text contrast).
"""

from __future__ import annotations

from typing import NamedTuple


class Shade(NamedTuple):
    light: str
    """On white."""
    dark: str
    """On near-black."""


ROLES: dict[str, Shade] = {
    "forward": Shade("#0a5f9e", "#6fb4ee"),
    "forward-odd": Shade("#3a86c0", "#4a93d2"),
    "backward": Shade("#c9780a", "#e08e12"),
    "backward-odd": Shade("#e09a3c", "#f2b04a"),
    "weight": Shade("#3fae7c", "#8fe8bf"),
    "weight-odd": Shade("#6cc79c", "#62cfa0"),
    "waits": Shade("#9a9fa9", "#565f6c"),
    "sync": Shade("#5c0f3d", "#e06a9f"),
    "optimizer": Shade("#6a62e8", "#8e5fe0"),
    "idle": Shade("#eceff3", "#262c34"),
    "whole": Shade("#9a9fa9", "#565f6c"),
    "work": Shade("#0a5f9e", "#6fb4ee"),
    "loss": Shade("#b5460f", "#f0875a"),
    "gain": Shade("#1b7f5c", "#62cfa0"),
    "weights": Shade("#0a5f9e", "#4f9fe0"),
    "buffers": Shade("#dcbb6a", "#d8c58c"),
    "gradients": Shade("#6db3e6", "#c4e2fb"),
    "optimizer state": Shade("#3126a6", "#7a5fd8"),
    "activations": Shade("#c9780a", "#e08e12"),
    "received": Shade("#14593f", "#55e2ab"),
    "workspace": Shade("#a3447f", "#d0608f"),
    "overhead": Shade("#8e979f", "#59626f"),
}
"""What a colour stands for -> its shades."""

STAGES: tuple[Shade, ...] = (
    Shade("#0a5f9e", "#4f9fe0"),
    Shade("#d98b1f", "#f6c160"),
    Shade("#00705a", "#1fa886"),
    Shade("#b86fa0", "#e9a6cd"),
    Shade("#3a3f8f", "#8f95ea"),
    Shade("#2f9fd6", "#a3dcf7"),
)
"""Stages take these in turn: neighbours differ, and each carries its number."""


def stage_shade(stage: int) -> Shade:
    return STAGES[stage % len(STAGES)]


MEMORY_ROLES = {
    "weights": "weights",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "master": "optimizer state",
    "activations": "activations",
    "loss": "activations",
    "received": "received",
    "workspace": "workspace",
    "buckets": "workspace",
    "gathered": "workspace",
    "overhead": "overhead",
    "slack": "overhead",
}
"""Field of MemoryItems -> its role; neighbours of one kind share it."""


def as_css() -> tuple[str, str]:
    """Custom properties of all colours, light and dark: `--pt-forward: #...;`."""
    shades = {name.replace(" ", "-"): shade for name, shade in ROLES.items()}
    shades |= {f"stage-{k}": shade for k, shade in enumerate(STAGES)}
    light = "".join(f"--pt-{name}:{shade.light};" for name, shade in shades.items())
    dark = "".join(f"--pt-{name}:{shade.dark};" for name, shade in shades.items())
    return light, dark
