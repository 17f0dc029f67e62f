"""More odd modules: adapters, quantisation, compilers, caches, hooks, custom operators, implicit and reversible layers.

Entries as in `odd_models`; some need a library of their own, which they import.
"""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from models import Case
from odd_models import D, adding_to, lin, of, squares
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ODDER: dict[str, Callable[[], Case]] = {}


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


odd, case = adding_to(ODDER, _without_warnings)


class Mlp(nn.Module):
    """What adapters are put around."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = lin(), lin()
        self.blocks = nn.ModuleList(nn.Sequential(lin(), nn.GELU(), lin()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


# -- adapters


def _peft(name: str, **settings: Any) -> None:
    def make() -> nn.Module:
        import peft

        config = peft.LoraConfig(r=2, target_modules=r"blocks\.\d\.[02]", init_lora_weights=False, **settings)
        return peft.get_peft_model(Mlp(), config)

    make.__name__ = name
    odd(make)


_peft("peft_lora")
_peft("peft_lora_with_dropout_and_saved_head", lora_dropout=0.2, modules_to_save=["head"])
_peft("peft_dora", use_dora=True)
_peft("peft_rslora_with_bias", use_rslora=True, bias="lora_only")


@odd
def peft_ia3() -> nn.Module:
    import peft

    pattern = {"target_modules": r"blocks\.\d\.[02]", "feedforward_modules": r"blocks\.\d\.2"}
    return peft.get_peft_model(Mlp(), peft.IA3Config(**pattern, init_ia3_weights=False))


@odd
def peft_two_adapters_in_one_batch() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, target_modules=r"blocks\.\d\.[02]", init_lora_weights=False)
    model = peft.get_peft_model(Mlp(), config)
    model.add_adapter("other", config)
    model.base_model.set_adapter(["default", "other"])
    return model


@case
def peft_lora_on_gpt2() -> Case:
    import peft
    from models import build

    found = build("gpt2", batch=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found.model = peft.get_peft_model(found.model, peft.LoraConfig(r=2, target_modules=["c_attn"]))
    return found


@case
def peft_prompt_tuning() -> Case:
    import peft
    from models import build

    found = build("gpt2", batch=4)
    kind = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    found.model = peft.get_peft_model(found.model, kind)
    found.kwargs = {**(found.kwargs or {}), "attention_mask": torch.ones_like(found.kwargs["input_ids"])}
    return found


# -- quantised


@odd
def quantised_frozen_front() -> nn.Module:
    """int8 layers with packed weights, as quantize_dynamic makes them, before layers that are trained."""
    front = torch.ao.quantization.quantize_dynamic(nn.Sequential(lin(), nn.ReLU(), lin()), {nn.Linear})
    return nn.Sequential(*front, lin(), nn.Tanh(), lin())


@odd
def fake_quantised_training() -> nn.Module:
    from torch.ao.quantization import FakeQuantize, default_fake_quant

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.weights, self.outputs = lin(), default_fake_quant(), FakeQuantize()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outputs(F.linear(x, self.weights(self.inner.weight), self.inner.bias))

    return nn.Sequential(Layer(), nn.ReLU(), Layer(), Layer())


@odd
def weights_in_eight_bits_by_hand() -> nn.Module:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.randn(D, D)
            self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
            self.register_buffer("codes", (weight / self.scale).round().to(torch.int8))
            self.bias = nn.Parameter(torch.zeros(D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(F.linear(x, self.codes.to(x.dtype) * self.scale, self.bias))

    return nn.Sequential(*(Layer() for _ in range(4)))


# -- compilers


@odd
def compiled_whole() -> nn.Module:
    return torch.compile(Mlp(), backend="eager")


@odd
def compiled_whole_by_aot() -> nn.Module:
    return torch.compile(Mlp(), backend="aot_eager")


@odd
def compiled_blocks_by_aot() -> nn.Module:
    model = Mlp()
    for k, block in enumerate(model.blocks):
        model.blocks[k] = torch.compile(block, backend="aot_eager")
    return model


@odd
def compiled_function_in_glue() -> nn.Module:
    @torch.compile(backend="eager")
    def scale(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 2

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.d(scale(self.c(scale(self.b(scale(self.a(x)))))))

    return of(forward)()


@odd
def scripted_function_in_glue() -> nn.Module:
    @torch.jit.script
    def scale(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 2

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.d(scale(self.c(scale(self.b(scale(self.a(x)))))))

    return of(forward)()


@odd
def graph_module_whole() -> nn.Module:
    return torch.fx.symbolic_trace(Mlp())


# -- custom operators

LIBRARY = torch.library.Library("partitioner_tests", "DEF")
LIBRARY.define("doubled(Tensor x) -> Tensor")


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


LIBRARY.impl("doubled", _doubled, "CompositeExplicitAutograd")
torch.library.register_autograd(
    "partitioner_tests::doubled", lambda ctx, g: g * 2, setup_context=lambda ctx, inputs, output: None, lib=LIBRARY
)


@odd
def custom_operator_in_glue() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.partitioner_tests.doubled(self.a(x))
        return self.d(torch.ops.partitioner_tests.doubled(self.c(self.b(x))))

    return of(forward)()


@odd
def operators_called_by_overload() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.aten.tanh.default(self.a(x))
        x = torch.ops.aten.add(self.b(x), x)
        return self.d(torch.ops.aten.mul.Tensor(self.c(x), x))

    return of(forward)()


class Reversible(torch.autograd.Function):
    """Keeps outputs only, and makes the inputs again in backward."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, f: nn.Module, g: nn.Module, *w: torch.Tensor) -> Any:
        ctx.f, ctx.g, ctx.num_weights = f, g, len(w)
        with torch.no_grad():
            y = a + f(b)
            z = b + g(y)
        ctx.save_for_backward(y.detach(), z.detach())
        return y, z

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, dz: torch.Tensor) -> Any:
        y, z = ctx.saved_tensors
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            gy = ctx.g(y)
            b = (z - gy).detach().requires_grad_()
            fb = ctx.f(b)
        torch.autograd.backward(gy, dz)
        da = dy + y.grad
        torch.autograd.backward(fb, da)
        return (da, dz + b.grad, None, None, *(None for _ in range(ctx.num_weights)))


@odd
def reversible_blocks() -> nn.Module:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.g = nn.Sequential(lin(), nn.Tanh()), nn.Sequential(lin(), nn.Tanh())

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
            return Reversible.apply(a, b, self.f, self.g, *self.parameters())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.pairs, self.last = lin(), nn.ModuleList(Pair() for _ in range(3)), lin(2 * D, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = b = self.first(x)
            for pair in self.pairs:
                a, b = pair(a, b)
            return self.last(torch.cat([a, b], 1))

    return Model()


@odd
def implicit_fixed_point() -> nn.Module:
    """A deep equilibrium: iterated without gradients, then a hook solves for the gradient."""

    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(8):
                    z = torch.tanh(0.2 * self.inner(z) + x)
            z = torch.tanh(0.2 * self.inner(z) + x)
            if z.requires_grad:
                z0 = z.detach().requires_grad_()
                f0 = torch.tanh(0.2 * self.inner(z0) + x.detach())

                def solve(gradient: torch.Tensor) -> torch.Tensor:
                    g = gradient
                    for _ in range(8):
                        g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + gradient
                    return g

                z.register_hook(solve)
            return z

    return nn.Sequential(lin(), Equilibrium(), lin(), Equilibrium(), lin())


# -- checkpoints and saved tensors


@odd
def checkpoints_whose_inputs_are_offloaded() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            for layer in (self.a, self.b, self.c):
                x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=False)
        return self.d(x)

    return of(forward)()


@odd
def saved_tensors_are_halved() -> nn.Module:
    """What is saved for backward is packed by the user's own hooks."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(torch.float64), lambda t: t.to(torch.float32)):
            for layer in (self.a, self.b, self.c):
                x = torch.tanh(layer(x)) * x
        return self.d(x)

    return of(forward)()


# -- hooks


@odd
def features_kept_by_hooks_made_at_the_start() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(*(nn.Sequential(lin(), nn.Tanh()) for _ in range(4))), lin(2 * D, D)
            self.features: dict[str, torch.Tensor] = {}
            for name in ("0", "2"):
                self.body.get_submodule(name).register_forward_hook(functools.partial(self.keep, name))

        def keep(self, name: str, module: nn.Module, args: Any, out: torch.Tensor) -> None:
            self.features[name] = out

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.body(x)
            return self.head(torch.cat([self.features["0"], self.features["2"]], 1))

    return Model()


@odd
def backward_hooks_on_containers() -> nn.Module:
    model = Mlp()
    for block in model.blocks:
        block.register_full_backward_hook(lambda module, gi, go: tuple(None if g is None else g * 2 for g in gi))
    model.blocks[1][0].register_full_backward_pre_hook(lambda module, go: (go[0] + 0.01,))
    return model


@odd
def hooks_for_all_modules_in_forward() -> nn.Module:
    """Hooks are put on, used and removed within each forward."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        norms: list[torch.Tensor] = []
        handles = [
            layer.register_forward_hook(lambda module, args, out: norms.append(out.pow(2).mean()))
            for layer in (self.a, self.b, self.c)
        ]
        x = self.d(self.c(torch.tanh(self.b(torch.tanh(self.a(x))))))
        for handle in handles:
            handle.remove()
        return x.mean() + torch.stack(norms).sum()

    return of(forward)()


@odd
def hooks_that_always_run() -> nn.Module:
    model = Mlp()
    model.blocks[0].register_forward_hook(lambda m, args, kwargs, out: out * 1.5, with_kwargs=True, always_call=True)
    model.blocks[2].register_forward_pre_hook(lambda m, args: (args[0] - 0.1,), prepend=True)
    return model


@odd
def pruned_weights() -> nn.Module:
    import torch.nn.utils.prune as prune

    model = Mlp()
    for block in model.blocks:
        prune.l1_unstructured(block[0], "weight", 0.5)
        prune.random_structured(block[2], "weight", 2, dim=0)
    return model


@odd
def weight_norm_of_old() -> nn.Module:
    model = Mlp()
    for block in model.blocks:
        nn.utils.weight_norm(block[0])
    return model


# -- caches and state outside


@functools.lru_cache(maxsize=8)
def _table(width: int) -> torch.Tensor:
    return torch.sin(torch.arange(width).float())


@odd
def table_in_a_function_cache() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x) * _table(D)
        return self.d(self.c(self.b(x)) + _table(D)) * _table(D)

    return of(forward)()


_TABLES: dict[tuple[int, torch.device], torch.Tensor] = {}


@odd
def table_in_a_global_dict() -> nn.Module:
    def table(x: torch.Tensor) -> torch.Tensor:
        key = (x.shape[1], x.device)
        if key not in _TABLES:
            _TABLES[key] = torch.linspace(0, 1, x.shape[1], device=x.device) * 2
        return _TABLES[key]

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = x * table(x)
        x = self.b(x)
        return self.d(self.c(x + table(x)))

    return of(forward)()


@odd
def momentum_codebook() -> nn.Module:
    """Vector quantisation whose codes are buffers, moved by what is assigned to them."""

    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(6, D))
            self.register_buffer("counts", torch.ones(6))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            nearest = torch.cdist(x, self.codes).argmin(1)
            found = self.codes[nearest]
            if self.training:
                hot = F.one_hot(nearest, 6).float()
                with torch.no_grad():
                    self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                    self.codes.mul_(0.9).add_(hot.T @ x / self.counts[:, None].clamp_min(1), alpha=0.1)
            return x + (found - x).detach(), (found.detach() - x).pow(2).mean()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.quantize, self.decode = Mlp(), Quantizer(), Mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z, commitment = self.quantize(self.encode(x))
            return (self.decode(z) - x).pow(2).mean() + commitment

    return Model()


@odd
def momentum_teacher() -> nn.Module:
    """A copy of the encoder that follows it, changed in the forward: it, and what it copies, are on one stage."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher, self.predict = Mlp(), Mlp(), lin()
            self.teacher.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    mine.mul_(0.9).add_(theirs, alpha=0.1)
                target = self.teacher(x)
            return F.mse_loss(self.predict(self.student(x)), target)

    return Model()


@odd
def a_teacher_in_every_block() -> nn.Module:
    """Each block keeps a slow copy of its own layer, loaded through its state dict."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.slow = lin(), lin().requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            fast, slow = self.layer.state_dict(), self.slow.state_dict()
            self.slow.load_state_dict({name: 0.9 * slow[name] + 0.1 * fast[name] for name in fast})
            return torch.tanh(self.layer(x)) + 0.1 * self.slow(x)

    return nn.Sequential(*(Block() for _ in range(4)))


@odd
def weights_are_replaced_through_data() -> nn.Module:
    class Normed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data = F.normalize(self.weight.data, dim=1)
            return torch.tanh(super().forward(x))

    return nn.Sequential(*(Normed(D, D) for _ in range(4)))


@odd
def the_first_batch_sets_scales() -> nn.Module:
    """As ActNorm of flows does."""

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = lin()
            self.shift, self.scale = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.ones(D))
            self.register_buffer("is_set", torch.tensor(False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.is_set:
                with torch.no_grad():
                    self.shift.copy_(-x.mean(0))
                    self.scale.copy_(1 / (x.std(0) + 1e-2))
                    self.is_set.fill_(True)
            return torch.tanh(self.layer((x + self.shift) * self.scale))

    return nn.Sequential(*(Normalised() for _ in range(4)))


@case
def embedding_with_a_largest_norm() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(20, D, max_norm=1.0), Mlp()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.body(self.embed(ids).mean(1))

    torch.manual_seed(0)
    return Case(Model(), (torch.randint(0, 20, (4, 3)),), loss_fn=squares)


@odd
def reseeds_itself() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            noise = torch.randn(D)
        x = F.dropout(self.b(x) + noise, 0.3)
        return self.d(F.dropout(self.c(x), 0.3))

    return of(forward)()


# -- recurrent


@odd
def cells_in_a_loop() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList([nn.LSTMCell(2, D), nn.GRUCell(D, D)])
            self.head = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state, last = (x * 0, x * 0), x * 0
            for step in x.view(len(x), -1, 2).unbind(1):
                state = self.cells[0](step, state)
                last = self.cells[1](state[0], last)
            return self.head(last)

    return Model()


@case
def translates_with_teacher_forcing() -> Case:
    """A decoder called for each word, given the right word or its own by chance; attention over the encoder."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.encoder = nn.Embedding(12, D), nn.GRU(D, D, bidirectional=True, batch_first=True)
            self.bridge, self.cell, self.out = lin(2 * D, D), nn.GRUCell(3 * D, D), lin(D, 12)

        def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            memory, last = self.encoder(self.embed(ids))
            state = torch.tanh(self.bridge(torch.cat([last[0], last[1]], 1)))
            word, logits = torch.zeros_like(target[:, 0]), []
            for step in range(target.shape[1]):
                score = torch.bmm(memory[..., :D], state[:, :, None]).softmax(1)
                context = (score * memory).sum(1)
                state = self.cell(torch.cat([self.embed(word), context], 1), state)
                logits.append(self.out(state))
                word = target[:, step] if random.random() < 0.5 else logits[-1].argmax(1)
            return F.cross_entropy(torch.stack(logits, 1).flatten(0, 1), target.flatten())

    torch.manual_seed(0)
    return Case(Model(), (torch.randint(0, 12, (4, 5)), torch.randint(0, 12, (4, 4))), loss_fn=squares)


@odd
def bidirectional_lstm_layers() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.LSTM(2, D, 2, batch_first=True, bidirectional=True, dropout=0.2)
            self.two, self.head = nn.LSTM(2 * D, D, batch_first=True, proj_size=4), lin(4, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, (h, c) = self.one(x.view(len(x), 4, 2))
            z, _ = self.two(y, (h[:1, :, :4].contiguous(), c[:1].contiguous()))
            return self.head(z[:, -1])

    return Model()


# -- values and structures


class Batch(UserDict):
    """A mapping that is no dict, as tokenizers return."""


@odd
def carries_a_user_dict() -> nn.Module:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, batch: Batch) -> Batch:
            return Batch(x=torch.tanh(self.inner(batch["x"])), depth=batch["depth"] + 1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch = Batch(x=x, depth=0)
            for layer in self.layers:
                batch = layer(batch)
            return batch["x"] * batch["depth"]

    return Model()


@odd
def carries_a_defaultdict_of_lists() -> nn.Module:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, found: defaultdict) -> defaultdict:
            y = torch.tanh(self.inner(found["x"][-1]))
            found["x"].append(y)
            found["means"].append(y.mean())
            return found

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = defaultdict(list, x=[x])
            for layer in self.layers:
                found = layer(found)
            return found["x"][-1] + torch.stack(found["means"]).sum() + found["x"][1]

    return Model()


@dataclass
class Inputs:
    x: torch.Tensor
    scale: float = 1.0


@case
def inputs_in_a_dataclass() -> Case:
    def forward(self: Any, inputs: Inputs) -> torch.Tensor:
        return self.d(self.c(self.b(self.a(inputs.x)) * inputs.scale)) + inputs.x

    torch.manual_seed(0)
    return Case(of(forward)(), (Inputs(torch.randn(4, D), 0.5),), loss_fn=squares)


@odd
def results_that_the_loss_leaves_out() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Mlp(), Mlp()

        def forward(self, x: torch.Tensor) -> Any:
            y = self.one(x)
            z = self.two(y.detach())
            with torch.no_grad():
                extra = self.two(y) * 3
            return {"y": y, "z": z, "ids": extra.argmax(1)}

    return Model()


@odd
def dense_connections() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(lin((k + 1) * D, D), nn.ReLU()) for k in range(4))
            self.head = lin(5 * D, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            features = [x]
            for layer in self.layers:
                features.append(
                    checkpoint(lambda *f, layer=layer: layer(torch.cat(f, 1)), *features, use_reentrant=False)
                )
            return self.head(torch.cat(features, 1))

    return Model()


@odd
def asks_its_weights_for_their_type() -> nn.Module:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        @property
        def dtype(self) -> torch.dtype:
            return next(self.parameters()).dtype

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(x.to(self.dtype)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(Layer() for _ in range(3)), lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                assert layer.inner.weight.device == x.device and layer.inner.weight.shape == (D, D)
                x = layer(x).to(next(self.head.parameters()))
            return self.head(x) * self.head.weight.requires_grad

    return Model()


class Delegating(nn.Module):
    """Looks like the module that it wraps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.wrapped = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)


@odd
def wrappers_that_delegate() -> nn.Module:
    model = Mlp()
    for k, block in enumerate(model.blocks):
        model.blocks[k] = Delegating(block)
    return Delegating(model)


@odd
def forwards_replaced_on_the_object() -> nn.Module:
    """As offloading libraries do: `module.forward` is another function."""
    model = Mlp()
    for block in model.blocks:
        original = block[0].forward

        @functools.wraps(original)
        def forward(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            return original(*args, **kwargs) * 1.5

        block[0].forward = forward
    return model


@case
def lazy_layers_after_a_first_batch() -> Case:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(D), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(D), nn.Tanh(), lin())
        model(torch.randn(4, D))
    return Case(model, (torch.randn(4, D),), loss_fn=squares, trains_batch_norm=True)


@odd
def averaged_model_wrapper() -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(Mlp())


@odd
def attention_masks_by_vmap() -> nn.Module:
    """Masks made by a nested vmap over positions, as attention libraries build them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.ModuleList(nn.MultiheadAttention(2, 1, batch_first=True) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.view(len(x), 4, 2)
            place = torch.arange(4)
            allowed = torch.vmap(torch.vmap(lambda q, k: (k > q) | (q - k > 2), (None, 0)), (0, None))(place, place)
            for layer in self.attention:
                x = x + layer(x, x, x, attn_mask=allowed)[0]
            return x

    return Model()


@odd
def per_sample_gradients_inside() -> nn.Module:
    """Gradients of a small network for each sample, by torch.func, fed to the layers after it."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        weights = dict(self.b.named_parameters())

        def energy(weights: Any, row: torch.Tensor) -> torch.Tensor:
            return torch.tanh(torch.func.functional_call(self.b, weights, (row[None],))).sum()

        forces = torch.func.vmap(torch.func.grad(energy, 1), (None, 0))(weights, x)
        return self.d(self.c(forces))

    return of(forward)()


@odd
def jacobian_inside() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x))
        jacobian = torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(row).cumsum(0)))(x)
        return self.d(self.c(jacobian.diagonal(dim1=1, dim2=2)))

    return of(forward)()


@odd
def pulls_back_by_hand() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        y, pull = torch.func.vjp(torch.tanh, self.b(x))
        (g,) = pull(torch.ones_like(y))
        return self.d(self.c(y) * g)

    return of(forward)()


@odd
def forward_mode_by_hand() -> nn.Module:
    import torch.autograd.forward_ad as forward_ad

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x))
        with forward_ad.dual_level():
            dual = torch.tanh(forward_ad.make_dual(x, torch.ones_like(x)))
            y, tangent = forward_ad.unpack_dual(dual)
        return self.d(self.c(y) + tangent)

    return of(forward)()


@odd
def numbers_out_of_numpy_steer() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        order = np.random.permutation(D)
        x = self.b(x[:, order.tolist()])
        keep = torch.from_numpy((np.random.rand(D) > 0.2).astype(np.float32))
        return self.d(self.c(x * keep)) * float(np.random.normal())

    return of(forward)()
