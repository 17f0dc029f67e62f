"""Small models for tests and benchmarks: Hugging Face classes from their configs, random weights, and plain ones.

Each factory gives (model, args, kwargs, target, loss_fn); loss_fn None means the model's own loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Case:
    """One model with a batch for it. `trains_batch_norm`: its result depends on how the batch is cut."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    target: Any = None
    loss_fn: Callable[..., torch.Tensor] | None = None
    trains_batch_norm: bool = False
    batch_dim: int = 0

    @property
    def inputs(self) -> Any:
        """As `partition` takes them: a tuple of arguments, or a dict of keyword arguments."""
        return self.kwargs if self.kwargs is not None else self.args


def _tokens(batch: int, length: int, vocabulary: int = 101) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def gpt2(batch: int = 8, layers: int = 4, width: int = 64, length: int = 12, vocabulary: int = 101) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=max(2, width // 64),
        vocab_size=vocabulary,
        n_positions=max(32, length),
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    ids = _tokens(batch, length, vocabulary)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what its class name means; transformers warns where it is not said
    return Case(model, kwargs={"input_ids": ids, "labels": ids})


def llama(batch: int = 8, layers: int = 4, width: int = 64, length: int = 12) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=101,
        max_position_embeddings=max(64, length),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    ids = _tokens(batch, length)
    mask = torch.ones_like(ids)
    return Case(LlamaForCausalLM(config), kwargs={"input_ids": ids, "attention_mask": mask, "labels": ids})


def bert(batch: int = 8, layers: int = 4, width: int = 64, length: int = 12) -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=4,
        vocab_size=101,
        max_position_embeddings=max(64, length),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids = _tokens(batch, length)
    labels = ids.clone()
    labels[:, ::3] = -100
    mask = torch.ones_like(ids)
    mask[0, length - 3 :] = 0
    return Case(BertForMaskedLM(config), kwargs={"input_ids": ids, "attention_mask": mask, "labels": labels})


def t5(batch: int = 8, layers: int = 2, width: int = 64, length: int = 12) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=layers,
        num_decoder_layers=layers,
        d_model=width,
        d_kv=16,
        d_ff=2 * width,
        num_heads=4,
        vocab_size=101,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    ids = _tokens(batch, length)
    return Case(T5ForConditionalGeneration(config), kwargs={"input_ids": ids, "labels": _tokens(batch, 7)})


def vit(batch: int = 8, layers: int = 4, width: int = 64) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 5, (batch,))
    return Case(ViTForImageClassification(config), kwargs={"pixel_values": images, "labels": labels})


def resnet(batch: int = 8, width: int = 16, size: int = 64) -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=width,
        hidden_sizes=[width, 2 * width, 4 * width],
        depths=[2, 2, 2],
        layer_type="basic",
        num_labels=5,
    )
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 5, (batch,))
    return Case(
        ResNetForImageClassification(config), kwargs={"pixel_values": images, "labels": labels}, trains_batch_norm=True
    )


class UNet(nn.Module):
    """Down, bottom, up; every level is concatenated across the whole depth."""

    def __init__(self, width: int = 8, levels: int = 3) -> None:
        super().__init__()
        sizes = [width * 2**k for k in range(levels + 1)]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.GroupNorm(4, b), nn.SiLU())
            for a, b in itertools.pairwise(sizes)
        )
        self.bottom = nn.Sequential(nn.Conv2d(sizes[-1], sizes[-1], 3, padding=1), nn.SiLU())
        self.up = nn.ModuleList(
            nn.Sequential(nn.Conv2d(b + a, a, 3, padding=1), nn.GroupNorm(4, a), nn.SiLU())
            for a, b in reversed(list(itertools.pairwise(sizes)))
        )
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        x = self.bottom(x)
        for up in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = up(torch.cat([x, skips.pop()], dim=1))
        return self.last(x)


def unet(batch: int = 8, width: int = 8, size: int = 16) -> Case:
    images = torch.randn(batch, 3, size, size)
    return Case(UNet(width), (images,), target=torch.randn(batch, 3, size, size), loss_fn=F.mse_loss)


class StatefulLSTM(nn.Module):
    """Three LSTMs that hand their state on, the way an encoder hands it to a decoder."""

    def __init__(self, vocabulary: int = 31, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.middle = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(
        self, ids: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        x = self.embed(ids)
        x, state = self.encoder(x, state)
        y, state = self.middle(x, state)
        y, state = self.decoder(x + y, state)
        return self.head(y), state


def lstm(batch: int = 8, length: int = 9, width: int = 32) -> Case:
    ids, target = torch.randint(0, 31, (batch, length)), torch.randint(0, 31, (batch, length))

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output[0].flatten(0, 1), target.flatten())

    return Case(StatefulLSTM(width=width), (ids,), target=target, loss_fn=loss_fn)


class TiedLanguageModel(nn.Module):
    """Embedding and output head are one parameter, used at both ends."""

    def __init__(self, vocabulary: int = 31, width: int = 24, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)  # so that logits start near 1, whatever the width
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def tied(batch: int = 8, length: int = 6, width: int = 24, layers: int = 4) -> Case:
    ids, target = torch.randint(0, 31, (batch, length)), torch.randint(0, 31, (batch, length))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    return Case(TiedLanguageModel(width=width, layers=layers), (ids,), target=target, loss_fn=loss_fn)


CASES: dict[str, Callable[..., Case]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "resnet": resnet,
    "unet": unet,
    "lstm": lstm,
    "tied": tied,
}


def build(name: str, seed: int = 0, **sizes: int) -> Case:
    """The named case, the same weights and data every time for a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CASES[name](**sizes)
