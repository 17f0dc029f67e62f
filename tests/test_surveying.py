"""Every layer alone, on what it receives in a forward of the whole model."""

from __future__ import annotations

import torch
from models import build
from side_by_side import quiet
from torch import nn

from partitioner.capture import capture, fate
from partitioner.slicing import Slice
from partitioner.surveying import alone, survey


def test_a_survey_gives_each_layer_what_it_would_receive() -> None:
    case = quiet(lambda: build("unet"))
    captured = capture(case.model, case.args, max_share=1 / 100)
    ids = [layer.id for layer in captured.layers]
    seen = survey(case.model, captured, [[name] for name in ids], case.args, {})
    assert torch.equal(seen.output, case.model(*case.args))
    for name in ids[1:-1]:
        stage_of = alone(captured, name)
        assert [stage_of[one] for one in ids].count(1) == 1
        part = Slice(case.model, captured, stage_of, 1, join=False)
        run = part.run(case.args, {}, {0: seen.payloads[name]})
        following = ids[ids.index(name) + 1]
        made = {tensor.id for tensor in captured.tensors if tensor.producer == name}
        if any(following in tensor.consumers and tensor.id in made for tensor in captured.tensors):
            assert run.sends[2].tensors


def test_layers_that_are_to_run_together_receive_what_any_of_them_needs() -> None:
    case = quiet(lambda: build("unet"))
    captured = capture(case.model, case.args, max_share=1 / 100)
    ids = [layer.id for layer in captured.layers]
    skip = next(tensor for tensor in captured.tensors if len(tensor.consumers) > 1)
    first, last = ids.index(skip.producer) + 2, ids.index(skip.consumers[-1])
    assert ids[first] not in skip.consumers
    seen = survey(case.model, captured, [ids[first : last + 1]], case.args, {})
    part = Slice(case.model, captured, alone(captured, ids[first], ids[last]), 1, join=False)
    assert part.run(case.args, {}, {0: seen.payloads[ids[first]]}).sends[2].tensors


class Grey(nn.Module):
    """As an augmentation that now and then does something."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1, keepdim=True).expand_as(x) if torch.rand(1) < 0.2 else x


def test_a_layer_receives_what_it_handed_on_unread_when_captured() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Grey(), nn.Linear(4, 4)), torch.randn(2, 4)
    with fate(model, 0.9):
        captured = capture(model, (x,), max_share=0.0)
    assert captured.passing == {"1": 1}
    with fate(model, 0.1):
        seen = survey(model, captured, [["1"]], (x,), {})
        part = Slice(model, captured, alone(captured, "1"), 1, join=False)
        (sent,) = part.run((x,), {}, {0: seen.payloads["1"]}).sends[2].tensors
    assert torch.equal(sent, model[0](x).mean(1, keepdim=True).expand(2, 4))
