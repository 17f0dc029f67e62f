"""What a capture says of a model: layers and their likeness, tensors between them, parameters, and where no cut is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from models import CASES, build
from side_by_side import quiet, run_whole
from torch import nn
from torch.nn import functional as F

from partitioner.capture import Capture, capture, fingerprint
from partitioner.errors import UnsupportedModelError
from partitioner.structures import tensors_in


def linears(n: int, width: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(n)))


def ids(captured: Capture) -> list[str]:
    return [layer.id for layer in captured.layers]


# -- the model is left alone


def everything(model: nn.Module) -> dict[str, Any]:
    """All of a model that a caller can see, as values that compare."""
    state: dict[str, Any] = {"rng": torch.get_rng_state().tolist(), "numpy": np.random.get_state()[1].tolist()}
    state["python"] = random.getstate()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            plain = value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__
            size = list(value) if isinstance(value, (dict, list)) else None
            state[f"{name}.{key}"] = (plain, size, id(value))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state[f"tensor {name}"] = (id(tensor), tensor.tolist(), None if tensor.grad is None else tensor.grad.tolist())
        state[f"version {name}"] = tensor._version if isinstance(tensor, nn.Parameter) else None
    return state


class Restless(nn.Module):
    """Changes all that a forward can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.calls, self.log, self.table = 0, [], {"x": [1]}
        self.stats = type("Stats", (), {"total": 0})()
        self.register_buffer("mean", torch.zeros(4))
        self.cache = None
        self.fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(self.calls)
        self.table["y"] = 2
        self.stats.total += 1
        self.a.register_forward_hook(lambda *args: None)
        x = self.norm(self.a(x)) * random.random() * np.random.rand() + torch.rand_like(x)
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        self.cache = x.detach()
        self.b.extra = nn.Identity()
        if self.fail:
            raise ValueError("on purpose")
        return self.b(x)


@pytest.mark.parametrize("fail", [False, True])
def test_the_model_and_the_random_states_are_as_before(fail: bool) -> None:
    model = Restless()
    model.fail = fail
    model.a.weight.grad = torch.ones(4, 4)
    model.norm.eval()
    x = torch.randn(3, 4)
    before = everything(model)
    call = nn.Module.__call__
    if fail:
        with pytest.raises(ValueError, match="on purpose"):
            capture(model, (x,))
    else:
        assert ids(capture(model, (x,), max_share=0)) == ["a", "norm", "b"]
    assert everything(model) == before
    assert model.stats.total == 0
    assert model.table == {"x": [1]}
    assert nn.Module.__call__ is call
    assert "__getattribute__" not in vars(nn.Module)


def test_inputs_that_the_forward_writes_into_are_as_before() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    x = torch.ones(3)
    capture(Writes(), (x,))
    assert torch.equal(x, torch.ones(3))


def test_parameters_without_a_shape_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"0\.weight.*run the model once"):
        capture(nn.Sequential(nn.LazyLinear(3)), (torch.ones(1, 4),))


# -- on meta


@pytest.mark.parametrize("name", sorted(set(CASES) - {"bert", "llama"}))
def test_a_capture_on_meta_is_the_same_as_with_values(name: str) -> None:
    """All but the keys, since kernels differ: but layers alike there are alike here."""
    case = quiet(lambda: build(name))
    real = capture(case.model, case.args, case.kwargs, max_share=1 / 20)
    with torch.device("meta"):
        bare = quiet(lambda: build(name))
    meta = capture(bare.model, bare.args, bare.kwargs, layers=ids(real))
    # Kernels on meta put some results into memory of their own that real ones share: the numbering differs.
    plain = [[replace(tensor, memory=0) for tensor in found.tensors] for found in (meta, real)]
    assert plain[0] == plain[1]
    for name in ("model", "parameters", "no_cut", "joinable", "glue", "fingerprint", "call_digest"):
        assert getattr(meta, name) == getattr(real, name)
    assert ids(meta) == ids(real)
    alike = [[a.key == b.key for a in found.layers for b in found.layers] for found in (meta, real)]
    assert alike[0] == alike[1]


def test_a_forward_on_meta_that_reads_values_is_refused() -> None:
    with torch.device("meta"):
        case = quiet(lambda: build("llama"))
    with pytest.raises(UnsupportedModelError, match="meta device"):
        capture(case.model, kwargs=case.kwargs)


# -- layers


def test_layers_are_opened_only_where_one_is_too_large_a_share() -> None:
    model = nn.Sequential(linears(2), linears(6), nn.Linear(4, 4))
    x = (torch.ones(2, 4),)
    assert ids(capture(model, x, max_share=1.0)) == ["0", "1", "2"]
    assert ids(capture(model, x, max_share=0.5)) == ["0", *(f"1.{k}" for k in range(6)), "2"]
    assert len(capture(model, x, max_share=0).layers) == 9


def test_a_second_call_has_its_own_id_and_the_same_parameters() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(self.layer(x)))

    captured = capture(Again(), (torch.ones(1, 4),))
    assert ids(captured) == ["layer", "layer#1", "layer#2"]
    assert captured.parameters[0].layers == ("layer", "layer#1", "layer#2")
    assert {layer.parameters for layer in captured.layers} == {("layer.weight", "layer.bias")}


def test_the_fingerprint_is_of_names_shapes_and_dtypes() -> None:
    model = linears(2)
    assert fingerprint(model) == fingerprint(linears(2)) == capture(model, (torch.ones(1, 4),)).fingerprint
    assert len({fingerprint(m) for m in (model, linears(3), linears(2, 5), linears(2).double())}) == 4


def test_a_layer_left_out_at_random_is_looked_for() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                if torch.rand([]) < 0.7:
                    x = layer(x)
            return x

    with torch.random.fork_rng():
        for seed in range(5):
            torch.manual_seed(seed)
            captured = capture(Drops(), (torch.ones(1, 4),), max_share=0)
            assert captured.dynamic
            if len(captured.layers) == 4:
                return
    raise AssertionError("never found")


@pytest.mark.parametrize("draw", [lambda n: torch.rand(n), lambda n: np.random.rand(n)])
def test_layers_left_out_by_numbers_drawn_together_are_all_found(draw: Callable[[int], Any]) -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = (draw(8) < 0.2).tolist()
            if not any(kept):
                raise RuntimeError("none is left")
            for layer, keep in zip(self.layers, kept, strict=True):
                x = layer(x) if keep else x
            return x

    with torch.random.fork_rng():
        torch.manual_seed(0)
        np.random.seed(1)
        captured = capture(Drops(), (torch.ones(1, 4),), max_share=0)
    assert captured.dynamic
    assert ids(captured) == [f"layers.{k}" for k in range(8)]


SEEN: list[float] = []


def test_a_global_list_that_layers_fill_and_a_later_one_may_read_stays_on_one_stage() -> None:
    """What an earlier stage tells of the list would take the place of what a later one has appended itself."""

    class Appends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            SEEN.append(float(x.detach().mean()))
            return torch.tanh(self.inner(x))

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.inner = 0, nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(x) * (1 + 0.01 * len(SEEN) if self.calls > 100 else 1)

    SEEN.clear()
    captured = capture(nn.Sequential(Appends(), Appends(), Reads(), nn.Linear(4, 4)), (torch.ones(1, 4),), max_share=0)
    free = [layer.id for layer in captured.layers if layer.id not in captured.no_cut]
    assert free[-1] == "3"
    assert not {"1", "1.inner", "2", "2.inner"} & set(free)


# -- structural keys


def keys(model: nn.Module, x: torch.Tensor, **how: Any) -> list[str]:
    return [layer.key for layer in capture(model, (x,), max_share=how.pop("max_share", 0), **how).layers]


def test_equal_blocks_have_equal_keys() -> None:
    assert len(set(keys(linears(4), torch.ones(2, 4, requires_grad=True)))) == 1


def test_strides_sizes_and_frozen_weights_tell_layers_apart() -> None:
    convolutions = nn.Sequential(*(nn.Conv2d(3, 3, 3, stride=s, padding=1) for s in (1, 1, 2)))
    first, second, third = keys(convolutions, torch.ones(1, 3, 8, 8, requires_grad=True))
    assert first == second != third
    frozen = linears(3)
    frozen[1].requires_grad_(False)
    assert len(set(keys(frozen, torch.ones(1, 4, requires_grad=True))[:2])) == 2
    dropout = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.2), nn.Dropout(0.2).eval(), nn.Dropout(0.2))
    one, two, three, four = keys(dropout, torch.ones(1, 4, requires_grad=True))
    assert len({one, two, three}) == 3
    assert two == four


def test_layers_whose_work_depends_on_values_are_never_merged() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + x[x[:, 0] > 0].sum()

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * (2 if x.sum().item() > 0 else 1)

    for kind in (Picks, Reads):
        found = keys(nn.Sequential(*(kind() for _ in range(4))), torch.ones(3, 4), max_share=1.0)
        assert len(set(found)) == len(found) == 4


def test_all_blocks_of_a_language_model_but_the_ends_are_alike() -> None:
    case = quiet(lambda: build("gpt2", layers=6))
    captured = capture(case.model, kwargs=case.kwargs, max_share=1 / 4)
    counts = Counter(layer.key for layer in captured.layers if layer.class_name == "GPT2Block")
    assert max(counts.values()) >= 5


# -- tensors and parameters


def test_tensors_tell_who_makes_and_who_uses_them_with_their_bytes() -> None:
    case = quiet(lambda: build("unet"))
    captured = capture(case.model, case.args, max_share=1 / 4)
    place = {name: k for k, name in enumerate(ids(captured))}
    for tensor in captured.tensors:
        assert all(place[tensor.producer] < place[one] for one in tensor.consumers)
        assert tensor.nbytes == torch.Size(tensor.shape).numel() * 4
        assert tensor.needs_gradient
    skips = [t for t in captured.tensors if place[t.consumers[-1]] - place[t.producer] > 3]
    assert len(skips) >= 2, "the outer levels are concatenated across the depth"


def test_what_every_rank_makes_from_the_inputs_crosses_no_cut() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = (x > 0).float().cumsum(1)
            noise, scaled = torch.rand(3, 4), self.scale * 2
            return self.b(self.a(x) * mask) * mask * noise * scaled

    captured = capture(Masks(), (torch.ones(3, 4),), max_share=0)
    crossing = {tensor.id for tensor in captured.tensors if tensor.consumers == ("b",)}
    assert crossing == {"a/0", ">(whole model)/3", ">(whole model)/4"}, "the product, the noise, the scaled parameter"


def test_tied_and_reused_parameters_name_all_their_layers() -> None:
    case = quiet(lambda: build("tied"))
    captured = capture(case.model, case.args, max_share=1 / 4)
    shared = next(entry for entry in captured.parameters if len(entry.names) == 2)
    assert shared.names == ("embed.weight", "head.weight")
    assert shared.layers == ("embed", "head")
    assert sum(entry.bytes for entry in captured.parameters) == sum(p.numel() * 4 for p in case.model.parameters())


def test_parameters_used_outside_of_any_call_belong_to_where_they_are_used() -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.c(self.b(x) * self.scale), self.a.weight)

    uses = {entry.names[0]: entry.layers for entry in capture(Outside(), (torch.ones(1, 4),), max_share=0).parameters}
    assert uses["scale"] == ("b",)
    assert uses["a.weight"] == ("c",)
    assert uses["a.bias"] == ("b",), "never used: where its module stands among the others"


def test_flops_and_work_are_counted() -> None:
    captured = capture(linears(3, 8), (torch.ones(5, 8),), max_share=0)
    assert [layer.flops for layer in captured.layers] == [2 * 5 * 8 * 8] * 3


# -- where no cut is


def no_cut(model: nn.Module, *args: Any) -> dict[str, str]:
    return capture(model, args or (torch.ones(3, 4),), max_share=0).no_cut


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_every_reason_is_given_where_it_holds_and_only_there() -> None:
    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
            self.count = 0

    class Gradient(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            (g,) = torch.autograd.grad(self.c(self.b(h)).sum(), h, create_graph=True)
            return self.d(g)

    class Transform(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.b(self.a(x))
            with forward_ad.dual_level():
                y, tangent = forward_ad.unpack_dual(self.c(forward_ad.make_dual(x, torch.ones_like(x))))
            return self.d(y + tangent)

    class Counts(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.b(self.a(x) * (self.count + 1))
            self.count = float(x.detach().mean())  # of a tensor: no earlier stage can tell
            return self.d(self.c(x))

    class Aliases(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            view, y = x.view(-1), self.c(self.b(x.clone()))
            view.mul_(2)
            return self.d(y) + x

    class Mapped(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.d(torch.func.vmap(self.c)(self.b(self.a(x))))

    assert not no_cut(Mapped())
    assert set(no_cut(Gradient())) == {"b", "c"}
    assert set(no_cut(Transform())) == {"c", "d"}
    assert set(no_cut(Counts())) == {"b"}
    assert set(no_cut(Aliases())) == {"b", "c"}
    for kind, word in ((Gradient, "gradient"), (Transform, "forward-mode"), (Counts, "'count'"), (Aliases, "memory")):
        assert all(word in reason for reason in no_cut(kind()).values())


def test_configurations_that_are_filled_in_late_forbid_nothing() -> None:
    """Hugging Face sets config.problem_type where its loss is computed."""
    case = quiet(lambda: build("vit"))
    assert case.model.config.problem_type is None
    captured = capture(case.model, kwargs=case.kwargs)
    assert captured.no_cut == {}
    assert case.model.config.problem_type is None


def test_hooks_that_collect_make_their_modules_layers() -> None:
    from odd_models import ODD

    case = ODD["forward_hooks_collect"]()
    captured = capture(case.model, case.args, max_share=1.0)
    assert captured.fire_hooks == tuple(f"layers.{k}.gate" for k in range(4))
    assert [name for name in ids(captured) if name.endswith("gate")] == list(captured.fire_hooks)
    assert captured.no_cut == {}


def test_a_capture_runs_what_a_step_runs() -> None:
    """The sum of the layers' FLOPs is what torch's own counter finds for the whole forward."""
    from torch.utils.flop_counter import FlopCounterMode

    for name in ("gpt2", "unet", "t5"):
        case = quiet(lambda name=name: build(name))
        counter = FlopCounterMode(display=False)
        with counter:
            case.model(*case.args, **(case.kwargs or {}))
        captured = capture(case.model, case.args, case.kwargs, max_share=1 / 20)
        assert sum(layer.flops for layer in captured.layers) == counter.get_total_flops()


def test_calls_come_in_order_and_the_digest_is_of_it() -> None:
    case = quiet(lambda: build("t5"))
    captured = capture(case.model, kwargs=case.kwargs, max_share=1 / 100)
    again = capture(case.model, kwargs=case.kwargs, max_share=1 / 4)
    assert captured.call_digest == again.call_digest
    blocks = [int(name.split(".")[2]) for name in ids(captured) if name.startswith("decoder.block")]
    assert all(x <= y for x, y in pairwise(blocks))
    assert run_whole(case).loss.isfinite()
    assert tensors_in(captured) == []
