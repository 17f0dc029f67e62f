"""One forward written down: calls, tensors with their uses and writes, and what stands in the way of cuts."""

from __future__ import annotations

import torch
from odd_models import ODD
from torch import nn

from partitioner.recording import ROOT, Recording, record


def recorded(model: nn.Module, *args: torch.Tensor) -> Recording:
    return record(model, args, {})


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        y = self.a(x)
        y.mul_(2)
        return self.b(y) * mask


def test_calls_form_a_tree_in_order() -> None:
    found = recorded(Small(), torch.ones(1, 2))
    assert found.order == [ROOT, "a", "b"]
    assert [node.parent for node in found.nodes] == [None, 0, 0]
    assert found.nodes[0].children == [1, 2]
    starts = [node.start for node in found.nodes]
    assert starts == sorted(starts)
    assert all(node.start < node.stop <= found.nodes[0].stop for node in found.nodes)


def test_tensors_know_what_they_are_made_from_and_where_they_are_used() -> None:
    found = recorded(Small(), torch.ones(1, 2))
    mask = next(info for info in found.infos if info.dtype == torch.bool)
    assert mask.pure
    assert [found.nodes[node].id for _, node in mask.uses if node >= 0][-1] == ROOT
    output = next(info for info in found.infos if ("a:0" in [name for _, name in info.names]))
    assert output.writes
    assert not output.pure
    changed = next(info for info in found.infos if any("@" in name for _, name in info.names))
    assert changed.memory == output.memory
    assert len(found.writes) == 1
    assert set(found.parameter_uses) == {"a.weight", "a.bias", "b.weight", "b.bias"}


def test_a_gradient_inside_spans_from_its_variable_to_where_it_is_taken() -> None:
    found = record(ODD["gradient_penalty_on_a_feature"]().model, (torch.randn(4, 8),), {})
    (span,) = found.spans
    first = next(node for node in found.nodes if node.id == "a")
    last = next(node for node in found.nodes if node.id == "c")
    assert first.start <= span.start <= first.stop
    assert span.stop > last.stop


def test_kernels_count_what_every_call_computes() -> None:
    found = recorded(Small(), torch.ones(3, 2))
    flops = {
        node.id: sum(count for _, count, _ in found.kernels[node.first_kernel : node.last_kernel])
        for node in found.nodes
    }
    assert flops == {ROOT: 2 * 24, "a": 24, "b": 24}


def test_hooks_that_keep_tensors_are_told_from_those_that_look() -> None:
    kept: list[torch.Tensor] = []
    model = Small()
    model.a.register_forward_hook(lambda module, args, out: kept.append(out))
    model.b.register_forward_hook(lambda module, args, out: None if out.sum() > 1e9 else out + 1)
    found = recorded(model, torch.ones(1, 2))
    assert [node.id for node in found.nodes if node.hooks & found.collecting] == ["a"]


def test_values_that_decide_are_noted_unless_every_rank_has_them() -> None:
    class Decides(nn.Module):
        def __init__(self, early: bool) -> None:
            super().__init__()
            self.a, self.early = nn.Linear(2, 2), early

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return y if (x if self.early else y).sum() > 0 else -y

    assert recorded(Decides(True), torch.ones(1, 2)).decisions == []
    assert recorded(Decides(False), torch.ones(1, 2)).decisions == [0]
