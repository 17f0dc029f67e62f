"""Kernels recorded on the meta device: FLOPs against the closed form, splits, saved bytes against the profiler."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from partitioner.errors import UnsupportedModelError
from partitioner.estimator import estimate, estimate_work
from partitioner.kernels import record_work
from partitioner.metarun import choose_layers
from partitioner.profiler import profile


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Tiny(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        for block in self.blocks:
            y = block(y)
        return nn.functional.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())


def tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    x = torch.zeros(batch, length, dtype=torch.long)
    return {"x": x, "labels": x}


@pytest.fixture(scope="module")
def model() -> Tiny:
    return Tiny(2, 64, 4, 10_000)


LAYERS = ("embed", "blocks.0", "blocks.1", "head")


def test_matmul_flops_are_those_of_the_closed_form(model: Tiny) -> None:
    work = record_work(model, tokens(2, 16), LAYERS)
    block = work.at(2)[1]
    tokens_, hidden = 2 * 16, 64
    assert sum(k.flops for k in block.forward if k.kind == "matmul") == 24 * tokens_ * hidden**2
    assert sum(k.flops for k in block.backward if k.kind == "matmul") == 48 * tokens_ * hidden**2
    weights = [k for k in block.backward if k.weight]
    assert sum(k.flops for k in weights) == 24 * tokens_ * hidden**2
    assert [k.flops for k in block.forward if k.kind == "attention"] == [4 * 2 * 16 * 16 * hidden / 2]


def test_a_larger_micro_batch_lies_on_the_line_through_the_recorded_ones(model: Tiny) -> None:
    line = record_work(model, tokens(8, 16), LAYERS, sizes=(1, 2)).at(8)
    exact = record_work(model, tokens(8, 16), LAYERS, sizes=(8,)).at(8)
    for a, b in zip(line, exact, strict=True):
        assert [k._replace(float32_share=0) for k in a.forward] == [k._replace(float32_share=0) for k in b.forward]
        assert [k._replace(float32_share=0) for k in a.backward] == [k._replace(float32_share=0) for k in b.backward]
        assert a.saved_bytes == b.saved_bytes and a.output_bytes == b.output_bytes


def test_tensor_parallelism_splits_attention_and_mlp_and_reduces_twice_each_way(model: Tiny) -> None:
    work = record_work(model, tokens(2, 16), LAYERS, sizes=(2,))
    block = work.layers_at[0][1]
    residual = 2 * 16 * 64 * 4
    assert [k.split for k in block.forward if k.kind == "matmul"] == ["n", "k", "n", "k"]
    assert block.forward_reduces == (residual, residual)
    assert block.backward_reduces == (residual, residual)
    whole = 2 * (2 * 64) + 2 * 64  # norms, and biases after an all-reduce
    assert block.parameters - block.sharded_parameters == whole
    assert work.layers_at[0][0].sharded_parameters == work.layers_at[0][0].parameters
    assert all(k.split for layer in work.layers_at[0] for k in layer.backward if k.kind == "matmul")


def test_saved_bytes_are_those_that_the_profiler_counts(model: Tiny) -> None:
    inputs = tokens(4, 16)
    measured = profile(model, inputs, microbatch_sizes=(2,), whole_step=False, max_share=0.4)
    estimated = estimate(model, inputs, device="A100-80GB", microbatch_sizes=(2,), max_share=0.4)
    assert [layer.id for layer in measured.layers] == [layer.id for layer in estimated.layers]
    ours = sum(layer.costs[0].saved_bytes for layer in estimated.layers)
    theirs = sum(layer.costs[0].saved_bytes for layer in measured.layers)
    assert ours == pytest.approx(theirs, rel=0.03)
    assert estimated.provenance == "estimated" and estimated.fingerprint == measured.fingerprint


def test_the_model_stays_as_it_was(model: Tiny) -> None:
    before = {name: (id(p), p.device.type) for name, p in model.named_parameters()}
    estimate_work(model, tokens(2, 16))
    assert before == {name: (id(p), p.device.type) for name, p in model.named_parameters()}
    assert all(p.grad is None for p in model.parameters())


def test_equal_layers_are_one_object(model: Tiny) -> None:
    layers = record_work(model, tokens(2, 16), LAYERS, sizes=(2,)).layers_at[0]
    assert layers[1] is layers[2]


def test_layers_are_chosen_by_their_share_of_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 100))
    assert choose_layers(model, torch.zeros(2, 8), max_share=0.2) == ("0", "1.0", "1.1", "2")


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x.sum() > -1e9 else self.a(self.a(x))


def test_a_model_that_decides_by_values_is_run_for_real_or_refused_on_meta() -> None:
    assert choose_layers(Decides(), torch.zeros(2, 4)) == ("a",)
    work = record_work(Decides(), torch.zeros(2, 4), ("a",), sizes=(2,))
    assert sum(k.flops for k in work.layers_at[0][0].forward if k.kind == "matmul") == 2 * 2 * 4 * 4
    with torch.device("meta"):
        model = Decides()
    with pytest.raises(UnsupportedModelError, match="cannot be followed without its values"):
        record_work(model, torch.zeros(2, 4), ("a",))
