"""What all entries share: how a factory is entered, what it needs installed, and batches."""

from __future__ import annotations

import importlib.util
import logging
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from models import Case
from side_by_side import seed_all
from torch import nn
from torch.nn import functional as F

BATCH, CLASSES, VOCABULARY = 8, 5, 99
LIBRARIES: dict[str, Callable[[], Case]] = {}
PACKAGES: dict[str, str] = {}
"""The package, by the name it is imported under, that an entry is of."""


def library(package: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Enter a factory under its own name; it draws the same weights and data every time."""

    def enter(build: Callable[[], Case]) -> Callable[[], Case]:
        return entered(package, build.__name__, build)

    return enter


def entered(package: str, name: str, build: Callable[[], Case]) -> Callable[[], Case]:
    def seeded() -> Case:
        logging.disable(logging.WARNING)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with_operators_of_torchvision()
            drawn = random.getstate(), np.random.get_state()
            seed_all(0)
            try:
                case = build()
            finally:
                random.setstate(drawn[0])
                np.random.set_state(drawn[1])
        case.model.train()
        return case

    assert name not in LIBRARIES, name
    LIBRARIES[name], PACKAGES[name] = seeded, package
    return seeded


def missing(name: str) -> str | None:
    """The package that this entry needs, where it is not installed."""
    package = PACKAGES[name]
    return None if importlib.util.find_spec(package) else package


def with_operators_of_torchvision() -> None:
    """torchvision built for CUDA has no operators beside a torch for CPU: then non-maximum suppression is this one."""
    try:
        import torchvision
    except ImportError:
        return
    except RuntimeError:
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        operators.impl("nms", _suppressed, "CPU")
        KEPT.append(operators)
        import torchvision

        torchvision.extension._has_ops = lambda: True


KEPT: list[Any] = []
"""Operators are defined for as long as their library lives."""


def _suppressed(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Boxes by falling score, without those that overlap a better one."""
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    left, kept = scores.argsort(descending=True), []
    while len(left):
        first, rest = left[0], left[1:]
        kept.append(first)
        size = torch.minimum(boxes[first, 2:], boxes[rest, 2:]) - torch.maximum(boxes[first, :2], boxes[rest, :2])
        both = size.clamp(min=0).prod(1)
        left = rest[both / (area[first] + area[rest] - both) <= threshold]
    return torch.stack(kept) if kept else scores.new_zeros(0, dtype=torch.long)


# -- batches and losses


def images(size: int = 32, channels: int = 3, batch: int = BATCH) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


def tokens(length: int = 16, batch: int = BATCH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def classes(count: int = CLASSES, batch: int = BATCH) -> torch.Tensor:
    return torch.randint(0, count, (batch,))


def squares(output: Any, target: None = None) -> torch.Tensor:
    """Over every tensor of the output, whatever it is made of."""
    from partitioner.structures import tensors_in

    found = [t for t in tensors_in(output) if (t.is_floating_point() or t.is_complex()) and t.requires_grad]
    return torch.stack([t.abs().float().pow(2).mean() for t in found]).sum()


def classified(model: nn.Module, *args: Any, count: int = CLASSES) -> Case:
    return Case(model, args, target=classes(count, len(args[0])), loss_fn=F.cross_entropy)


def squared(model: nn.Module, *args: Any, **kwargs: Any) -> Case:
    return Case(model, args, kwargs or None, loss_fn=squares)


def own_loss(model: nn.Module, *args: Any, **kwargs: Any) -> Case:
    """The model itself returns its loss."""
    return Case(model, args, kwargs or None)


def next_token(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def language(model: nn.Module, length: int = 16) -> Case:
    ids = tokens(length)
    return Case(model, (ids,), target=ids.roll(-1, 1), loss_fn=next_token)


def each(package: str, prefix: str, table: dict[str, Callable[[], Case]] | Sequence[str], build: Any = None) -> None:
    """Enter a table of factories, or `build(name)` for a list of names."""
    for name in table:
        make = table[name] if isinstance(table, dict) else (lambda name=name: build(name))
        entered(package, f"{prefix}_{name}", make)


def named(model: nn.Module, **kwargs: Any) -> Case:
    return Case(model, kwargs=kwargs, loss_fn=squares)
