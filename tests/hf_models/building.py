"""What all architectures share: sizes, inputs, and how a factory is entered."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from models import Case

BATCH, LENGTH, VOCABULARY, WIDTH = 8, 12, 99, 32
HF: dict[str, Callable[[], Case]] = {}

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What most text models call their sizes."""

VISION: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
}


def hf(build: Callable[[], Case]) -> Callable[[], Case]:
    """Enter a factory under its name; it draws the same weights and data every time."""
    return entered(build.__name__, build)


def entered(name: str, build: Callable[[], Case]) -> Callable[[], Case]:
    def seeded() -> Case:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            case = build()
        case.model.train()
        return case

    assert name not in HF, name
    HF[name] = seeded
    return seeded


def config(kind: str, **settings: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **settings)


def tokens(batch: int = BATCH, length: int = LENGTH, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def language(model: Any, **more: Any) -> Case:
    """A model that predicts tokens, with a padded sample and labels that are left out."""
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, LENGTH - 3 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return Case(model, kwargs={"input_ids": ids, "attention_mask": mask, "labels": labels} | more)


def images(batch: int = BATCH, size: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


def classes(count: int = 5, batch: int = BATCH) -> torch.Tensor:
    return torch.randint(0, count, (batch,))
