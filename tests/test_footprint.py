"""What layers hold, told without a device: against published counts, against autograd, and against a real run."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partitioner.errors import UnsupportedModelError
from partitioner.footprint import ALIGNMENT, Footprint, bare_copy, bare_inputs, footprint

HIDDEN, HEADS, LENGTH, BATCH = 64, 4, 32, 2


class Block(nn.Module):
    """A transformer block with plain attention and dropout, as Megatron-LM's of 2021."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.ln1, self.ln2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, s, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        weights = F.dropout(F.softmax(q @ k.transpose(-1, -2), -1), self.dropout, True)
        x = x + F.dropout(self.out((weights @ v).transpose(1, 2).reshape(b, s, h)), self.dropout, True)
        return x + F.dropout(self.down(F.gelu(self.up(self.ln2(x)))), self.dropout, True)


class Model(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.table = nn.Embedding(100, HIDDEN)
        self.h = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Linear(HIDDEN, 100, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.h:
            x = block(x)
        return self.head(x)


TOKENS = torch.zeros(BATCH, LENGTH, dtype=torch.long)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float().flatten(0, 1), torch.zeros(output.numel() // 100, device="meta").long())


def told(model: nn.Module, layers: list[str], dtype: torch.dtype = torch.bfloat16, tokens=TOKENS) -> Footprint:
    bare = bare_copy(model, dtype)
    return footprint(bare, {name: name for name in layers}, (bare_inputs(tokens, dtype),), {}, loss_of)


LAYERS = ["table", "h.0", "h.1", "h.2", "head"]


def test_a_block_saves_what_the_published_count_says_and_tensor_parallelism_divides_its_share():
    # Korthikanti et al. 2022, equations 1 and 2: s b h (34 + 5 a s / h) bytes, of which 10 s b h stay whole
    found = told(Model(), LAYERS).layers["h.1"]
    each = LENGTH * BATCH * HIDDEN
    exact = each * (34 + 5 * HEADS * LENGTH / HIDDEN)
    statistics = 2 * 2 * ALIGNMENT  # mean and deviation of both norms, each rounded up; not in that count
    assert exact <= found.saved_bytes <= exact + statistics
    assert found.saved_divided_bytes == exact - 10 * each


def test_the_whole_holds_what_autograd_saves():
    model = Model(dropout=0.0)
    kept: dict[int, int] = {}
    ours = {p.untyped_storage().data_ptr() for p in model.parameters()} | {TOKENS.untyped_storage().data_ptr()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(TOKENS)
        target = torch.zeros(output.numel() // 100, dtype=torch.long)
        ours.add(target.untyped_storage().data_ptr())
        loss = F.cross_entropy(output.float().flatten(0, 1), target)
    found = told(model, LAYERS, torch.float32)
    del loss
    pieces = len(kept) * ALIGNMENT  # each is rounded up
    total = sum(layer.saved_bytes for layer in found.layers.values())
    assert sum(kept.values()) <= total <= sum(kept.values()) + pieces + LENGTH * BATCH * 8


def test_weights_are_divided_by_columns_then_by_rows():
    divided = told(Model(), LAYERS).divided
    inside = {name.removeprefix("h.0."): dim for name, dim in divided.items() if name.startswith("h.0.")}
    assert inside == {"qkv.weight": 0, "qkv.bias": 0, "out.weight": 1, "up.weight": 0, "up.bias": 0, "down.weight": 1}
    assert divided["table.weight"] == 0


def test_peaks_cover_what_is_saved_and_the_head_works_with_logits_and_their_gradients():
    layers = told(Model(), LAYERS).layers
    for layer in layers.values():
        assert layer.forward_peak_bytes >= layer.saved_bytes
        assert layer.forward_peak_divided_bytes <= layer.forward_peak_bytes
    logits = 4 * LENGTH * BATCH * 100
    assert 3 * logits <= layers["head"].backward_peak_bytes < 4 * logits + 2 * 2 * 100 * HIDDEN


def test_the_model_is_untouched_and_needs_no_memory():
    model = Model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    bare = bare_copy(model, torch.bfloat16)
    assert all(parameter.is_meta for parameter in bare.parameters()) and bare.head.weight is bare.table.weight
    footprint(bare, {name: name for name in LAYERS}, (bare_inputs(TOKENS),), {}, loss_of)
    assert bare.head.weight is bare.table.weight and bare.head.weight.grad is None
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_checkpointed_layers_hold_their_inputs_and_work_with_all_of_it_again():
    class Checkpointed(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.table(tokens)
            for block in self.h:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    plain, other = told(Model(), LAYERS).layers["h.1"], told(Checkpointed(), LAYERS).layers["h.1"]
    assert other.saved_bytes == 2 * LENGTH * BATCH * HIDDEN
    assert other.backward_peak_bytes >= plain.saved_bytes


def test_values_that_decide_are_refused_with_the_way_out():
    class Deciding(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if bool(x.sum() > 0) else x

    bare = bare_copy(Deciding(4, 4))
    with pytest.raises(UnsupportedModelError, match=r"without values.*profile\(\)"):
        footprint(bare, {"": ""}, (torch.empty(2, 4, device="meta"),), {}, lambda output: None)
