"""Modules run whole wherever no cut goes through them and nothing of their inside is needed elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models import build
from side_by_side import possible_cuts, quiet, split
from torch import nn

from partitioner.capture import capture
from partitioner.joining import base_name, joined, single, with_uncalled
from partitioner.parts import Part


def test_only_what_a_cut_goes_through_is_opened() -> None:
    case = quiet(lambda: build("gpt2", layers=4))
    captured = capture(case.model, kwargs=case.kwargs, max_share=1 / 100)
    inside = next(name for name in possible_cuts(captured) if name.endswith("h.2.mlp.c_proj"))
    stages, watched = joined(captured, split(captured, [inside]))
    assert {"transformer.h.0", "transformer.h.1", "transformer.h.3"} <= stages.keys()
    assert {"transformer.h.2.attn", "transformer.h.2.mlp.c_fc", inside} <= stages.keys()
    assert not any(name.startswith(("transformer.h.0.", "transformer.h.3.")) for name in stages)
    assert {"", "transformer", "transformer.h", "transformer.h.2", "transformer.h.2.mlp"} <= watched


def test_every_layer_is_on_the_stage_that_it_was_given() -> None:
    case = quiet(lambda: build("t5"))
    captured = capture(case.model, kwargs=case.kwargs, max_share=1 / 100)
    for cut in possible_cuts(captured)[::7]:
        stage_of = split(captured, [cut])
        stages, _ = joined(captured, stage_of)
        for name, stage in stage_of.items():
            path = name.partition("#")[0]
            around = [whole for whole in stages if name == whole or path.startswith(f"{whole}.")]
            assert around, name
            assert {stages[whole] for whole in around} == {stage}


@pytest.mark.parametrize("glue", [False, True])
def test_a_module_that_a_stage_begins_with_is_opened_only_if_functions_run_before_its_first_layer(glue: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(self.a(x * 2 if glue else x))

    captured = capture(nn.Sequential(Block(), Block(), Block()), (torch.randn(2, 4),), max_share=0.0)
    stages, watched = joined(captured, split(captured, ["1.a"]))
    assert ("1" in stages, "1.a" in stages) == (not glue, glue)
    assert ("1.a" in watched) == glue
    stages, _ = joined(captured, split(captured, ["1.b"]))
    assert {"0", "1.a", "1.b", "2"} == set(stages)


def test_a_module_with_a_tensor_that_leaks_is_left_open() -> None:
    class Leaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.kept: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            self.kept[:] = [x * 2]
            return self.b(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaks, self.c = Leaks(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.leaks(x)) + self.leaks.kept[0]

    captured = capture(Model(), (torch.ones(1, 4),), max_share=0)
    stages, _ = joined(captured, {"leaks.a": 0, "leaks.b": 0, "c": 1})
    assert stages == {"leaks.a": 0, "leaks.b": 0, "c": 1}


def test_modules_that_were_not_called_belong_to_where_their_parameters_are() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "spare": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model.forward = lambda x: model["b"](model["a"](x))
    captured = capture(model, (torch.ones(1, 2),), max_share=0)
    assert with_uncalled(captured, {"a": 0, "b": 1}) == {"a": 0, "b": 1, "spare": 0}
    assert Part(model, captured, {"a": 0, "b": 1}, 1).stage_of["spare"] == 0


def test_entries_of_a_dict_belong_where_their_like_in_the_same_block_is() -> None:
    class Block(nn.Module):
        def __init__(self, task: str) -> None:
            super().__init__()
            self.task, self.adapters = task, nn.ModuleDict({name: nn.Linear(2, 2) for name in "xyz"})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.adapters[self.task](x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleDict({"a": Block("z"), "b": Block("x")})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks["b"](self.blocks["a"](x))

    captured = capture(Model(), (torch.ones(1, 2),), max_share=0)
    lives = {parameter.names[0]: parameter.layers for parameter in captured.parameters}
    for key in "xyz":
        assert lives[f"blocks.a.adapters.{key}.weight"] == ("blocks.a.adapters.z",)
        assert lives[f"blocks.b.adapters.{key}.weight"] == ("blocks.b.adapters.x",)


def test_single_watches_all_that_is_around() -> None:
    profile = SimpleNamespace(opened=("e.f",))
    assert single(profile, {"a.b.c": 0, "a.b.c#1": 1, "d": 1})[1] == {"", "a", "a.b", "a.b.c", "d", "e", "e.f"}


def test_a_module_that_calls_layers_handed_to_it_is_watched_and_placed_nowhere() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor, *layers: nn.Module) -> torch.Tensor:
            for layer in layers:
                x = layer(x) * self.scale
            return x

    model = nn.ModuleDict({"calls": Calls(), "a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model.forward = lambda x: model["calls"](x, model["a"], model["b"])
    captured = capture(model, (torch.ones(1, 2),), max_share=0)
    assert captured.opened == ("calls",)
    stages, tracked = single(captured, with_uncalled(captured, {"a": 0, "b": 1}))
    assert stages == {"a": 0, "b": 1} and "calls" in tracked


@pytest.mark.parametrize("name", ["h.0:0", "h.0/3:1"])
def test_the_base_name_is_without_changes_in_place(name: str) -> None:
    assert base_name(name) == base_name(f"{name}@h.3/2") == name
