"""Why a model fails on its inputs: told by layer, with what it got, and with torch's own error as the cause."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import partitioner as pt
from partitioner.errors import ArgumentError, UnsupportedModelError
from partitioner.microbatches import MicroBatch
from partitioner.trial import explained


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


ASKED = {"loss_fn": nn.functional.mse_loss, "example_target": torch.zeros(16, 4)}


@pytest.mark.parametrize(
    ("inputs", "more", "says"),
    [
        (torch.zeros(16, 7), {}, r"layer 0, Linear\(in_features=8.*was given float32 \(16, 7\).*change example_inputs"),
        (torch.zeros(16, 8, dtype=torch.long), {}, r"layer 0, .* was given int64 \(16, 8\) of 0 to 0"),
        ({"x": torch.zeros(16, 8)}, {}, r"Sequential.forward\(input\) cannot be called with \(x=float32 \(16, 8\)\)"),
        ((torch.zeros(16, 8), 3), {}, "too many positional arguments. example_inputs is a tensor"),
        (
            torch.zeros(16, 8),
            {"example_target": torch.zeros(16, 5), "loss_fn": lambda output, target: (output - target).mean()},
            r"loss_fn raised .*the model gave float32 \(16, 4\), the target is float32 \(16, 5\): change example_t",
        ),
        (
            torch.zeros(16, 8),
            {"batch_dim": 1, "example_target": torch.zeros(16, 8), "loss_fn": lambda output, _: output.sum()},
            r"given float32 \(16, [124]\).*batch_dim=1 counts 8 samples, of which this one has [124]",
        ),
    ],
)
@pytest.mark.parametrize("call", ["partition", "profile"])
def test_wrong_inputs_are_told_by_layer(call: str, inputs: Any, more: dict[str, Any], says: str) -> None:
    how = {"gpus": 2} if call == "partition" else {}
    with pytest.raises(ArgumentError, match=says) as caught:
        getattr(pt, call)(chain(), inputs, **how, **(ASKED | more))
    assert isinstance(caught.value.__cause__, (RuntimeError, TypeError))


class OneGraph(nn.Module):
    """Every row of its input is a node of one graph, whose edges are a buffer."""

    def __init__(self, num_nodes: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("edges", torch.eye(num_nodes).to_sparse())

    def forward(self, nodes: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            nodes = torch.relu(torch.sparse.mm(self.edges, layer(nodes)))
        return nodes


def test_a_batch_that_only_runs_whole_is_planned_whole_where_that_is_asked() -> None:
    model, nodes = OneGraph(), torch.randn(32, 8)
    given: Any = {"gpus": 2, "loss_fn": nn.functional.mse_loss, "example_target": torch.zeros(32, 8)}
    with pytest.raises(ArgumentError, match=r"leave it whole: microbatches=1 with mesh=\{'pp': \.\.\., 'dp': 1\}"):
        pt.partition(model, nodes, **given)
    plan = pt.partition(model, nodes, microbatches=1, mesh={"pp": 2, "dp": 1}, **given)
    assert (plan.num_stages, plan.num_microbatches, plan.profile.microbatch_sizes) == (2, 1, (32,))
    assert any("whole batch alone" in why and "size 32, got" in why for why in plan.why)


class Bags(nn.Module):
    """Indices of all samples in one row, and where each sample's begin: no part of the batch but the first one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(100, 8, mode="sum")
        self.top = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.top(dense + self.bags(indices, offsets))
        return scores


class SequenceFirst(nn.Module):
    """Attention over (time, sample, feature), whose mask of what is padding is (sample, time)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x, key_padding_mask=padding)[0])


def test_the_dimensions_advised_can_be_given_as_they_are_written() -> None:
    inputs = (torch.randn(5, 8, 8), torch.zeros(8, 5, dtype=torch.bool))
    more = {"gpus": 2, "example_target": torch.randn(5, 8, 4), "loss_fn": nn.functional.mse_loss}
    advised = {"*": 1, "padding": 0}
    with pytest.raises(ArgumentError, match=re.escape(f"(batch_dim={advised})")):
        pt.partition(SequenceFirst(), inputs, **(ASKED | more | {"batch_dim": 1}))
    pt.partition(SequenceFirst(), inputs, **(ASKED | more | {"batch_dim": advised}))


def test_a_part_that_does_not_run_where_the_first_one_does_is_told_too() -> None:
    inputs = torch.randn(8, 8), torch.arange(24), torch.arange(0, 24, 3)
    given: Any = {"gpus": 2, "loss_fn": nn.functional.mse_loss, "example_target": torch.zeros(8, 1)}
    with pytest.raises(ArgumentError, match=r"(?s)offsets\[0\] has to be 0.*leave it whole: microbatches=1"):
        pt.partition(Bags(), inputs, microbatches=4, mesh={"pp": 2, "dp": 1}, **given)
    with pytest.raises(ArgumentError, match=r"(?s)offsets\[0\] has to be 0.*leave it whole: microbatches=1"):
        pt.partition(Bags(), inputs, microbatches=2, mesh={"pp": 1, "dp": 2}, **given)
    assert pt.partition(Bags(), inputs, microbatches=1, mesh={"pp": 2, "dp": 1}, **given).num_stages == 2


def test_estimates_and_capacity_tell_it_too() -> None:
    with torch.device("meta"):
        model = chain()
    for call, how in ((pt.estimate, {"device": "H100", **ASKED}), (pt.capacity, {"gpus": "8xH100"})):
        with pytest.raises(ArgumentError, match=r"layer 0, Linear.*was given float32 \(16, 7\) on meta"):
            call(model, torch.zeros(16, 7), **how)


def test_an_index_past_a_table_is_told_with_the_values() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1))
    with pytest.raises(
        ArgumentError, match=r"Embedding\(10, 4\), was given int64 \(8,\) of 3 to 12 and raised IndexError"
    ):
        pt.profile(model, torch.tensor([3, 12] * 4), loss_fn=lambda output, _: output.sum())


class Glue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.missing  # type: ignore[attr-defined, no-any-return]


def test_a_fault_of_the_models_own_code_is_told_with_its_line() -> None:
    with pytest.raises(ArgumentError, match=r"the model's forward raised AttributeError: .*test_trial.py, line \d+\)"):
        pt.profile(Glue(), torch.zeros(4, 4))


def around(error: Exception, model: nn.Module, x: torch.Tensor) -> None:
    with explained(model, [MicroBatch((x,), {}, None, len(x))], lambda output, _: output.sum(), 0):
        raise error


def test_an_error_is_left_alone_where_the_plain_model_runs() -> None:
    for error in (RuntimeError("ours"), ArgumentError("told already"), UnsupportedModelError("cannot be cut")):
        with pytest.raises(type(error)) as caught:
            around(error, chain(), torch.zeros(4, 8))
        assert caught.value is error


def test_the_model_is_as_it_was() -> None:
    """Its random states, buffers and hooks too."""
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(9, 4))
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    with pytest.raises(ArgumentError, match="layer 2"):
        around(RuntimeError("first"), model, torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_needs_values_is_no_fault_of_the_inputs() -> None:
    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item()

    with pytest.raises(UnsupportedModelError, match="reads values with item"):
        pt.capacity(nn.Sequential(Looks(), nn.Linear(8, 8)), torch.zeros(4, 8), gpus="8xH100")
