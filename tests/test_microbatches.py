"""Micro-batches hold every sample once, leave tables whole, and their outputs join to what one call would return."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import partitioner as pt
from partitioner.errors import ArgumentError, NotBuiltError
from partitioner.microbatches import Cutter, as_call, join


@dataclass
class Features:
    tokens: torch.Tensor
    table: torch.Tensor
    name: str


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@given(st.integers(1, 40), st.integers(1, 12))
def test_every_sample_is_in_one_micro_batch_in_order(size: int, count: int) -> None:
    parts = Cutter().cut((torch.arange(size),), {"y": torch.arange(size) * 2}, torch.arange(size), count)
    assert torch.equal(torch.cat([part.args[0] for part in parts]), torch.arange(size))
    assert torch.equal(torch.cat([part.kwargs["y"] for part in parts]), torch.arange(size) * 2)
    assert torch.equal(torch.cat([part.target for part in parts]), torch.arange(size))
    sizes = [part.samples for part in parts]
    assert len(parts) == min(size, count) and max(sizes) - min(sizes) <= 1 and min(sizes) > 0


def test_tensors_inside_containers_are_cut_and_the_rest_goes_whole() -> None:
    table = torch.arange(7)
    scale = torch.tensor(2.0)
    batch = {
        "features": Features(torch.arange(12).reshape(6, 2), table, "x"),
        "pair": Pair(torch.zeros(6, 3), scale),
        "list": [torch.ones(6), {"deep": torch.arange(6)}],
        "flag": True,
        "nothing": None,
    }
    args, kwargs = as_call(batch)
    parts = Cutter().cut(args, kwargs, None, 3)
    assert [part.samples for part in parts] == [2, 2, 2]
    for k, part in enumerate(parts):
        assert torch.equal(part.kwargs["features"].tokens, torch.arange(12).reshape(6, 2)[2 * k : 2 * k + 2])
        assert part.kwargs["features"].table is table and part.kwargs["features"].name == "x"
        assert part.kwargs["pair"].left.shape == (2, 3) and part.kwargs["pair"].right is scale
        assert torch.equal(part.kwargs["list"][1]["deep"], torch.arange(6)[2 * k : 2 * k + 2])
        assert part.kwargs["flag"] is True and part.kwargs["nothing"] is None


def test_a_forward_may_write_into_its_own_samples() -> None:
    """All forwards before all backwards, as GPipe orders them; on views of one version the backward would fail."""
    logits = torch.randn(6, 4, dtype=torch.float64)
    labels, scale = torch.tensor([0, 1, 2, 3, 9, 9]), torch.ones(4, dtype=torch.float64, requires_grad=True)
    written = labels.clone()
    parts = Cutter().cut((logits, written), {}, None, 3)
    losses = []
    for part in parts:
        part.args[1].clamp_(0, 3)
        losses.append(torch.nn.functional.cross_entropy(part.args[0] * scale, part.args[1]))
    sum(losses).backward()
    gradient, scale.grad = scale.grad, None
    torch.nn.functional.cross_entropy(logits * scale, labels.clamp(0, 3)).backward()
    assert torch.allclose(gradient / 3, scale.grad, rtol=1e-12)
    assert torch.equal(written, labels.clamp(0, 3)), "the caller sees what the forward wrote, as on one device"


def test_a_gradient_reaches_the_whole_batch() -> None:
    batch = torch.randn(4, 2, requires_grad=True)
    for part in Cutter().cut((batch,), {}, None, 2):
        (part.args[0] * part.args[0]).sum().backward()
    assert torch.equal(batch.grad, 2 * batch.detach())


def test_another_batch_dimension_and_arguments_that_differ() -> None:
    sequence = torch.zeros(5, 4, 3)
    positions = torch.arange(4)
    cutter = Cutter(batch_dim=1, special={"target": 0, "positions": None, 1: 0})
    parts = cutter.cut((sequence, torch.zeros(4, 9)), {"positions": positions}, torch.arange(4), 2)
    assert [tuple(part.args[0].shape) for part in parts] == [(5, 2, 3)] * 2
    assert [tuple(part.args[1].shape) for part in parts] == [(2, 9)] * 2
    assert all(part.kwargs["positions"] is positions for part in parts)
    assert torch.equal(parts[1].target, torch.tensor([2, 3]))


def test_a_target_that_does_not_fit_says_what_to_write() -> None:
    with pytest.raises(
        ArgumentError,
        match=r'4 samples along dimension 1.*int64 \(5,\) of 0 to 4, does not.*batch_dim=\{"\*": 1, "target": 0\}',
    ):
        Cutter(batch_dim=1).cut((torch.zeros(5, 4),), {}, torch.arange(5), 2)


def test_batches_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ArgumentError, match="0 samples"):
        Cutter().cut((torch.zeros(0, 3),), {}, None, 2)
    with pytest.raises(ArgumentError, match="batch size"):
        Cutter().cut((torch.tensor(1.0), "text"), {}, None, 2)
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2)])
    with pytest.raises(NotBuiltError, match="microbatches=1"):
        Cutter().cut((packed,), {}, None, 2)
    assert Cutter().cut((torch.tensor(1.0), "text"), {}, None, 1)[0].samples == 1


@given(st.integers(1, 9), st.integers(1, 4))
def test_outputs_join_to_what_one_call_returns(size: int, count: int) -> None:
    def model(x: torch.Tensor) -> dict[str, Any]:
        return {
            "logits": x * 2,
            "pair": Pair(x + 1, x.double().mean()),
            "items": [x.sum(1), None, 3, "text"],
            "features": Features(x, torch.arange(3), "x"),
        }

    x = torch.arange(2.0 * size).reshape(size, 2)
    parts = Cutter().cut((x,), {}, None, count)
    sizes = [part.samples for part in parts]
    whole, got = model(x), join([model(part.args[0]) for part in parts], sizes, [float(s) for s in sizes])
    assert torch.equal(got["logits"], whole["logits"]) and torch.equal(got["pair"].left, whole["pair"].left)
    assert torch.allclose(got["pair"].right, whole["pair"].right)
    assert torch.equal(got["items"][0], whole["items"][0]) and got["items"][1:] == whole["items"][1:]
    assert torch.equal(got["features"].tokens, x) and got["features"].name == "x"


def test_what_cannot_be_joined_is_a_list_of_parts() -> None:
    assert join([object, {"a": 1}], [1, 1], [1, 1]) == [object, {"a": 1}]
    assert join([1, 2], [1, 1], [1, 1]) == [1, 2]
    assert [tuple(part.shape) for part in join([torch.zeros(2, 3), torch.zeros(2, 4)], [2, 2], [1, 1])] == [
        (2, 3),
        (2, 4),
    ]


def test_a_list_with_an_item_for_each_sample_is_cut_with_them() -> None:
    boxes = [{"boxes": torch.full((k + 1, 4), float(k))} for k in range(4)]
    masks = [torch.full((2, 3), float(k)) for k in range(4)]
    features = [torch.zeros(4, 2), torch.zeros(4, 3), torch.zeros(4, 5), torch.zeros(4, 7)]
    kwargs = {"images": torch.arange(4.0), "boxes": boxes, "masks": masks, "features": features, "sizes": [1, 2]}
    first, second = Cutter().cut((), kwargs, None, 2)
    assert first.kwargs["boxes"] == boxes[:2] and second.kwargs["boxes"] == boxes[2:]
    assert [float(mask.mean()) for mask in second.kwargs["masks"]] == [2.0, 3.0]
    assert [tuple(one.shape) for one in first.kwargs["features"]] == [(2, 2), (2, 3), (2, 5), (2, 7)]
    assert second.kwargs["sizes"] == [1, 2]


def test_what_is_no_tensor_is_cut_where_it_has_an_item_for_each_sample() -> None:
    """As on one device, where a loop over the samples of the batch finds each one's own."""
    scale, table = np.arange(8.0), np.arange(6)
    kwargs = {
        "x": torch.arange(8.0),
        "scale": scale,
        "table": table,
        "lengths": [5, 3, 2, 2, 4, 1, 1, 6],
        "nested": {"texts": [f"text {k}" for k in range(8)], "name": "x", "tokens": [[k] * k for k in range(8)]},
        "size": (8, 8),
        "corners": (0, 1, 2, 3, 4, 5, 6, 7),
    }
    parts = Cutter().cut((), kwargs, list(range(8)), 3)
    assert [part.kwargs["lengths"] for part in parts] == [[5, 3, 2], [2, 4, 1], [1, 6]]
    assert [part.target for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert np.array_equal(np.concatenate([part.kwargs["scale"] for part in parts]), scale)
    assert [text for part in parts for text in part.kwargs["nested"]["texts"]] == kwargs["nested"]["texts"]
    assert parts[2].kwargs["nested"]["tokens"] == [[6] * 6, [7] * 7] and parts[2].kwargs["nested"]["name"] == "x"
    for part in parts:
        assert part.kwargs["table"] is table and part.kwargs["size"] == (8, 8) and len(part.kwargs["corners"]) == 8
    total = sum(float(x) * s for x, s in zip(kwargs["x"], kwargs["lengths"], strict=True))
    mine = sum(float(x) * s for p in parts for x, s in zip(p.kwargs["x"], p.kwargs["lengths"], strict=True))
    assert mine == total
    assert Cutter().lists_cut((), kwargs, list(range(8))) == ["lengths", "nested", "target"]
    whole = Cutter(special={"lengths": None}).cut((), kwargs, None, 2)
    assert whole[1].kwargs["lengths"] is kwargs["lengths"]


@pytest.mark.filterwarnings("ignore")  # both are said to be new
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "nested"])
def test_batches_that_torch_cannot_cut_are_refused_in_words(kind: str) -> None:
    batch = {
        "sparse_coo": lambda: torch.eye(4).to_sparse(),
        "sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(k) for k in (2, 3, 1, 2)], layout=torch.jagged),
    }[kind]()
    with pytest.raises(NotBuiltError, match=f"a {kind} tensor of torch.float32 cannot be cut into micro-batches"):
        Cutter().cut((torch.ones(4, 2), batch), {}, None, 2)
    assert Cutter().cut((torch.ones(4, 2), batch), {}, None, 1)[0].args[1] is batch


def test_what_is_no_batch_in_the_example_is_none_in_a_batch_of_its_size() -> None:
    table, one = torch.randn(10, 4), torch.randn(1, 4)

    def batch(size: int) -> tuple[tuple[object, ...], dict[str, object], dict[str, object]]:
        state = (torch.zeros(3, size, 4), torch.zeros(3, size, 4))
        inputs = {"x": torch.arange(size), "tables": [table, one], "names": list("abcdefghij"), "state": state}
        return (inputs,), {"prototypes": table, "pairs": torch.zeros(10, size)}, {"y": torch.arange(size), "w": table}

    whole = Cutter().goes_whole(*batch(16))
    assert whole == (
        "0.tables",
        "0.tables.0",
        "0.names",
        "0.state",
        "0.state.0",
        "0.state.1",
        "prototypes",
        "pairs",
        "target.w",
    )
    for size in (10, 2, 3):
        for part in Cutter(whole=whole).cut(*batch(size), 2):
            inputs = part.args[0]
            assert len(inputs["x"]) == len(part.target["y"]) == part.samples and len(inputs["state"]) == 2
            assert inputs["tables"][0] is table and inputs["names"] == list("abcdefghij") and part.target["w"] is table
            assert part.kwargs["prototypes"] is table and part.kwargs["pairs"].shape == (10, size)
            assert all(one.shape == (3, size, 4) for one in inputs["state"])
    assert Cutter(special={"prototypes": 0}, whole=whole).cut(*batch(10), 2)[0].kwargs["prototypes"].shape == (5, 4)
    assert Cutter(whole=whole).batch_size((), {"prototypes": table, "x": torch.zeros(4)}) == 4


def test_a_plan_keeps_what_is_no_batch() -> None:
    class Nearest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, prototypes: torch.Tensor) -> torch.Tensor:
            return self.last(torch.softmax(self.first(x) @ prototypes.T, -1) @ prototypes)

    inputs = (torch.randn(8, 4), torch.randn(5, 4))
    plan = pt.partition(
        Nearest(), inputs, gpus=2, mesh={"pp": 2}, microbatches=2, loss_fn=nn.MSELoss(), example_target=inputs[0]
    )
    assert pt.Plan.model_validate_json(plan.model_dump_json()).training.whole == ("1",)


def test_a_list_of_tensors_of_different_sizes_has_one_for_each_sample() -> None:
    texts = [torch.zeros(3 + k % 5, 4) for k in range(8)]
    images = [torch.zeros(3, 6 + k % 3, 5 + k % 4) for k in range(8)]
    boxes = [{"boxes": torch.zeros(k, 4)} for k in range(8)]
    equal = [torch.zeros(3, 6, 5) for _ in range(8)]
    for args in ((texts,), (images,), ({"images": images},), (equal, boxes)):
        cutter = Cutter()
        assert cutter.batch_size(args, {}) == 8
        parts = cutter.cut(args, {}, None, 3)
        assert [part.samples for part in parts] == [3, 3, 2]
        assert all(
            len(part.args[0].get("images") if isinstance(part.args[0], dict) else part.args[0]) == part.samples
            for part in parts
        )


def test_a_list_that_had_one_for_each_sample_has_so_where_all_are_of_one_size() -> None:
    images = [torch.zeros(3, 6 + k % 3, 5 + k % 4) for k in range(8)]
    whole = Cutter().goes_whole((images,), {}, None)
    assert whole == ("0[]",)
    equal = [torch.full((3, 6, 5), float(k)) for k in range(4)]
    parts = Cutter(whole=whole).cut((equal,), {}, None, 2)
    assert [[float(one[0, 0, 0]) for one in part.args[0]] for part in parts] == [[0, 1], [2, 3]]
    assert parts[0].args[0][0].shape == (3, 6, 5)


def test_a_list_of_inputs_is_cut_as_they_are() -> None:
    inputs = [torch.zeros(8, 4), torch.zeros(8, 5)]
    table = [torch.zeros(8, 4), torch.zeros(9, 4)]
    assert Cutter().batch_size((inputs,), {}) == 8
    assert Cutter().batch_size((table, torch.zeros(8)), {}) == 8
    assert [len(part.args[0][0]) for part in Cutter().cut((inputs,), {}, None, 2)] == [4, 4]


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_that_goes_whole_may_hold_batches(kind: type) -> None:
    """Features of several scales, as the first and only argument: the list is not one of samples, what it holds is."""
    scales = kind([torch.arange(8.0 * n).reshape(8, n) for n in (4, 2, 1)])
    whole = Cutter().goes_whole((scales,), {}, None)
    assert whole == ("0",)
    later = kind([one[:3] for one in scales])  # as many samples as scales
    for batch, size in ((scales, 8), (later, 3), (kind([None, *scales]), 8)):
        cutter = Cutter(whole=whole)
        assert cutter.batch_size((batch,), {}) == size
        parts = cutter.cut((batch,), {}, None, 2)
        assert [len(part.args[0]) for part in parts] == [len(batch)] * 2
        assert torch.equal(torch.cat([part.args[0][-1] for part in parts]), batch[-1])


@pytest.mark.parametrize(
    ("inputs", "rows", "says"),
    [
        ([torch.zeros(3, 9, 9)] * 8, 8, "3 samples along dimension 0 .the first is float32 .3, 9, 9..: where each is"),
        ([torch.zeros(8, 3), torch.zeros(24, 3)], 32, r"2 samples, as their sizes along dimension 0 differ \(8, 24\)"),
        ([torch.zeros(8, 3), torch.zeros(8, 5)], 8, ""),
        ([torch.zeros(3, 9, 8), torch.zeros(3, 8, 9)], 2, ""),
        (torch.zeros(3, 9), 8, ""),
    ],
)
def test_samples_that_a_list_told_otherwise_than_the_target_are_doubted(inputs: Any, rows: int, says: str) -> None:
    found = Cutter().doubt((inputs,), {}, torch.zeros(rows, 3))
    assert bool(found) == bool(says) and re.search(says, found)
