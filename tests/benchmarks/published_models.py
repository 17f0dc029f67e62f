"""Models of published runs, rebuilt from their stated dimensions on the meta device.

Only one block is built and recorded: the others are equal to it, which is what the recorder would find.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partitioner.kernels import record_work
from partitioner.work import LayerWork, ModelWork

F = nn.functional


@dataclass(frozen=True)
class Dimensions:
    """What a row states of its model."""

    kind: str
    """gpt, llama, bert."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    length: int
    flash: bool
    """Fused attention; else matmul, softmax, matmul."""
    training: bool = True
    dropout: bool = True
    head: bool = True
    """Logits over the vocabulary."""
    fused_softmax: bool = True
    """Scale, mask and softmax in one kernel. Megatron's own needs a multiple of 4 of heads x samples on a rank
    (https://github.com/NVIDIA/Megatron-LM/blob/v2.5/megatron/model/fused_softmax.py, is_kernel_available)."""
    loss_apart: bool = False
    """The loss is a kernel for each operator, as over a vocabulary that tensor parallelism divides."""
    context_parallel: int = 1
    """Ranks over which the sequence is divided: each holds its part of the queries, and sees all keys."""


class Attention(nn.Module):
    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        self.d, self.width = d, d.hidden // d.heads
        bias = d.kind != "llama"
        self.qkv = nn.Linear(d.hidden, self.width * (d.heads + 2 * d.kv_heads), bias=bias)
        self.out = nn.Linear(self.width * d.heads, d.hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        d, (batch, length, _) = self.d, x.shape
        q, k, v = self.qkv(x).split([self.width * n for n in (d.heads, d.kv_heads, d.kv_heads)], -1)
        q, k, v = (t.view(batch, length, -1, self.width).transpose(1, 2) for t in (q, k, v))
        if d.kind == "llama":
            q, k = rotated(q), rotated(k)
        if d.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=d.kind != "bert")
        else:
            if d.kv_heads != d.heads:
                k, v = (t.repeat_interleave(d.heads // d.kv_heads, 1) for t in (k, v))
            scores = torch.matmul(q, k.transpose(-1, -2)) * self.width**-0.5
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device)
            p = torch.softmax(torch.where(mask, scores, -1e4), -1)
            if d.training and d.dropout:
                p = F.dropout(p, 0.1)
            y = torch.matmul(p, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


def rotated(x: torch.Tensor) -> torch.Tensor:
    turn = torch.empty(x.shape[-2], x.shape[-1], device=x.device, dtype=x.dtype)
    half = x.shape[-1] // 2
    return x * turn + torch.cat((-x[..., half:], x[..., :half]), -1) * turn


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        norm = RMSNorm if d.kind == "llama" else nn.LayerNorm
        self.d = d
        self.norm1, self.norm2, self.attention = norm(d.hidden), norm(d.hidden), Attention(d)
        gated = d.kind == "llama"
        self.up = nn.Linear(d.hidden, d.ffn * (2 if gated else 1), bias=not gated)
        self.down = nn.Linear(d.ffn, d.hidden, bias=not gated)

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.1) if self.d.training and self.d.dropout and self.d.kind != "llama" else x

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        if self.d.kind == "llama":
            a, b = self.up(x).chunk(2, -1)
            return self.down(F.silu(a) * b)
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.d.kind == "bert":
            x = self.norm1(x + self.dropped(self.attention(x)))
            return self.norm2(x + self.dropped(self.mlp(x)))
        x = x + self.dropped(self.attention(self.norm1(x)))
        return x + self.dropped(self.mlp(self.norm2(x)))


class Model(nn.Module):
    def __init__(self, d: Dimensions) -> None:
        super().__init__()
        self.d = d
        self.embed = nn.Embedding(d.vocab, d.hidden)
        self.positions = nn.Embedding(d.length, d.hidden) if d.kind != "llama" else None
        self.blocks = nn.ModuleList([Block(d)])
        self.norm = RMSNorm(d.hidden) if d.kind == "llama" else nn.LayerNorm(d.hidden)
        self.head = nn.Linear(d.hidden, d.vocab if d.head else 1, bias=False)
        if d.head and d.kind != "llama":
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        if self.positions is not None:
            y = y + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            y = block(y)
        logits = self.head(self.norm(y) if self.d.head else y[:, 0])
        if not self.d.training:
            return logits
        if self.d.loss_apart:
            return LossApart.apply(logits.flatten(0, 1), labels.flatten()).mean()
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class LossApart(torch.autograd.Function):
    """Cross-entropy over a divided vocabulary: widened, less the largest, exponentials, their sum, shares; in place."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wide = logits.to(torch.float32, copy=True)
        shifted = wide.sub_(wide.max(-1)[0].unsqueeze(-1))
        chosen = shifted.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        total = shifted.exp_().sum(-1)
        ctx.save_for_backward(shifted.div_(total.unsqueeze(-1)))
        ctx.dtype = logits.dtype
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (shares,) = ctx.saved_tensors
        return shares.mul_(grad.unsqueeze(-1)).to(ctx.dtype, copy=True), None


@functools.cache
def work_of(d: Dimensions) -> ModelWork:
    """Kernels of the whole model: its one block, as often as it has layers."""
    local = dataclasses.replace(d, length=d.length // d.context_parallel)
    with torch.device("meta"):
        model = Model(local)
        x = torch.zeros(2, local.length, dtype=torch.long)
    if not d.training:
        model.eval()
    names = ("embed", "blocks.0", "norm", "head")
    work = record_work(model, {"x": x, "labels": x}, names, training=d.training)
    layers_at = tuple(
        (
            layers[0],
            *[_seeing_all(_softmax_apart(layers[1], d, size), d.context_parallel)] * d.layers,
            *layers[2:-1],
            _wide_loss(layers[-1]) if d.loss_apart else layers[-1],
        )
        for size, layers in zip(work.sizes, work.layers_at, strict=True)
    )
    ids = ("embed", *[f"blocks.{k}" for k in range(d.layers)], "norm", "head")
    return dataclasses.replace(work, layer_ids=ids, layers_at=layers_at, _cache={})


def _softmax_apart(layer: LayerWork, d: Dimensions, samples: int) -> LayerWork:
    """Kernels over the attention's scores launched one by one, where no fused one takes their number."""
    if d.fused_softmax or d.flash:
        return layer
    return _apart(layer, 8 * samples * d.heads * d.length**2)


def _wide_loss(layer: LayerWork) -> LayerWork:
    """A loss in 32 bits, a kernel for each operator; the copies read or write 16 bits."""

    def wide(kernels: tuple) -> tuple:  # type: ignore[type-arg]
        sizes = [k.moved_bytes * (0.75 if k.kind == "copy" else 1.0) for k in kernels]
        return tuple(
            k if k.kind == "matmul" else k._replace(float32_share=0.0, moved_bytes=size, fused_bytes=size)
            for k, size in zip(kernels, sizes, strict=True)
        )

    apart = _apart(layer, 0)
    return dataclasses.replace(apart, forward=wide(apart.forward), backward=wide(apart.backward))


def _apart(layer: LayerWork, least_bytes: float) -> LayerWork:
    """No kernel over tensors that move so much is joined with others."""

    def apart(kernels: tuple) -> tuple:  # type: ignore[type-arg]
        return tuple(
            k._replace(fused_bytes=k.moved_bytes, fused_launches=1)
            if k.kind in ("elementwise", "softmax", "reduction", "copy") and k.moved_bytes >= least_bytes
            else k
            for k in kernels
        )

    return dataclasses.replace(layer, forward=apart(layer.forward), backward=apart(layer.backward))


def _seeing_all(layer: LayerWork, ranks: int) -> LayerWork:
    """Attention over the whole sequence's keys, of which a rank holds only its part."""
    if ranks == 1:
        return layer

    def wider(kernels: tuple) -> tuple:  # type: ignore[type-arg]
        return tuple(k._replace(flops=k.flops * ranks) if k.kind == "attention" else k for k in kernels)

    return dataclasses.replace(layer, forward=wider(layer.forward), backward=wider(layer.backward))


@functools.cache
def resnet50() -> ModelWork:
    """ResNet-50 on images of 224 x 224 (He et al. 2015)."""
    from transformers import ResNetConfig, ResNetForImageClassification

    from partitioner.estimator import estimate_work

    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetConfig(depths=[3, 4, 6, 3], num_labels=1000))
        inputs = {"pixel_values": torch.zeros(4, 3, 224, 224), "labels": torch.zeros(4, dtype=torch.long)}
    return estimate_work(model, inputs)
