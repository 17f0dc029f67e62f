"""Odd modules as people publish them: losses kept on layers, caches on the model, schedules in buffers, decoders.

Entries as in `odd_models`.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from models import Case
from odd_models import D, adding_to, lin, of, squares
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

EVERYDAY: dict[str, Callable[[], Case]] = {}


odd, case = adding_to(EVERYDAY)


# -- what layers leave behind for the model to collect


@odd
def bayesian_layers_keep_their_divergence() -> nn.Module:
    """Each layer keeps its KL term as an attribute; the model sums over whatever module has one."""

    class Bayesian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.spread = nn.Parameter(torch.randn(D, D) / 4), nn.Parameter(torch.full((D, D), -3.0))
            self.kl: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sigma = F.softplus(self.spread)
            weight = self.mean + sigma * torch.randn_like(sigma)
            self.kl = (sigma.square() + self.mean.square() - 2 * sigma.log() - 1).sum() / 2
            return torch.tanh(x @ weight)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Bayesian() for _ in range(4)))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.layers(x)
            return x, sum(m.kl for m in self.modules() if getattr(m, "kl", None) is not None) / 1000

    return Model()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = lin(D, 3 * D), lin()
        self.weights: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        self.weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(D), -1)
        return x + self.out(self.weights @ v)


def sequences(model: nn.Module, length: int = 5) -> Case:
    torch.manual_seed(1)
    return Case(model, (torch.randn(4, length, D),), loss_fn=squares)


@case
def attention_maps_left_on_modules() -> Case:
    """Rollout over the attention that each block has kept."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Attention() for _ in range(4)), lin()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            for block in self.blocks:
                x = block(x)
            rollout = torch.eye(x.shape[1])
            for block in self.blocks:
                rollout = (block.weights + torch.eye(x.shape[1])) @ rollout
            return self.head(x), rollout

    return sequences(Model())


class Experts(nn.Module):
    """Two experts a token is routed between; `note` is told of the balancing loss."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.gate, self.experts, self.note = lin(D, 2), nn.ModuleList(lin() for _ in range(2)), note

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(self.gate(x), -1)
        self.note(scores.mean(0).square().sum())
        chosen = F.one_hot(scores.argmax(-1), 2).to(x.dtype)
        return x + sum(chosen[:, k : k + 1] * scores[:, k : k + 1] * one(x) for k, one in enumerate(self.experts))


@odd
def balancing_losses_in_a_list_on_the_root() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[torch.Tensor] = []
            self.layers = nn.ModuleList(Experts(self.losses.append) for _ in range(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.losses.clear()
            for layer in self.layers:
                x = layer(x)
            return x, torch.stack(self.losses).sum()

    return Model()


@odd
def balancing_losses_in_a_list_made_anew() -> nn.Module:
    """Layers hold the model (in a tuple, so that it is no child) and append to the list that it made."""

    class Layer(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.owner = (model,)
            self.inner = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.inner(x))
            self.owner[0].losses.append(x.abs().mean())
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(self) for _ in range(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.losses = []
            for layer in self.layers:
                x = layer(x)
            return x, sum(self.losses)

    return Model()


@odd
def balancing_losses_in_a_global_collection() -> nn.Module:
    """A class that collects for everybody, as tutorials have it: cleared at the start, summed at the end."""

    class Collected:
        losses: dict[str, torch.Tensor] = {}

    class Layer(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.inner = name, lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.inner(x))
            Collected.losses[self.name] = x.abs().mean()
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(f"layer{k}") for k in range(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            Collected.losses.clear()
            for layer in self.layers:
                x = layer(x)
            return x, sum(Collected.losses.values())

    return Model()


@odd
def commitment_losses_and_codes_on_quantisers() -> nn.Module:
    """Each quantiser keeps a loss, its codes and a plain number; decoders read them when all are done."""

    class Quantiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.book = nn.Embedding(5, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.codes = torch.cdist(x, self.book.weight).argmin(1)
            found = self.book(self.codes)
            self.info = {"loss": F.mse_loss(found, x.detach()) + 0.25 * F.mse_loss(x, found.detach()), "size": len(x)}
            return x + (found - x).detach()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoders = nn.ModuleList(lin() for _ in range(3))
            self.quantisers = nn.ModuleList(Quantiser() for _ in range(3))
            self.decoder = lin()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            total: Any = 0
            for encoder, quantiser in zip(self.encoders, self.quantisers, strict=True):
                x = quantiser(torch.tanh(encoder(x)))
                total = total + x
            loss = sum(q.info["loss"] / q.info["size"] for q in self.quantisers)
            used = torch.stack([F.one_hot(q.codes, 5).float().mean(0) for q in self.quantisers])
            return {"out": self.decoder(total), "loss": loss, "used": used}

    return Model()


@odd
def metrics_logged_as_in_lightning() -> nn.Module:
    """A module with log(), a trainer that is None, metrics in a dict of floats and of tensors, a step counter."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trainer, self.metrics, self.global_step = None, defaultdict(list), 0

        def log(self, name: str, value: torch.Tensor, on_epoch: bool = True) -> None:
            if self.trainer is None:
                self.metrics[name].append(value.detach() if on_epoch else value.item())

    class Model(Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Sequential(lin(), nn.Tanh(), lin(D, 3)), nn.Sequential(lin(3, D), nn.Tanh())

        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            code = self.encoder(x)
            self.log("code", code.square().mean())
            out = self.decoder(code)
            loss = F.mse_loss(out, x)
            self.log("loss", loss, on_epoch=False)
            self.global_step += 1
            return loss + 1e-2 * code.abs().mean() / self.global_step

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.training_step(x)

    return Model()


# -- hooks


@odd
def features_only_by_hooks_per_device() -> nn.Module:
    """Hooks put outputs into a table by device, from which they are taken out at the end."""

    class Features:
        def __init__(self, modules: dict[str, nn.Module]) -> None:
            self.outputs: dict[torch.device, dict[str, torch.Tensor]] = defaultdict(OrderedDict)
            for name, module in modules.items():
                module.register_forward_hook(lambda m, args, out, name=name: self.collect(name, out))

        def collect(self, name: str, out: torch.Tensor) -> None:
            self.outputs[out.device][name] = out

        def get(self, device: torch.device) -> dict[str, torch.Tensor]:
            found = self.outputs[device]
            self.outputs[device] = OrderedDict()
            return found

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(nn.Sequential(lin(), nn.Tanh()) for _ in range(4)))
            self.features = Features({str(k): self.body[k] for k in (0, 2, 3)})

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            self.body(x)
            return list(self.features.get(x.device).values())

    return Model()


@odd
def hooks_that_compute_and_keep() -> nn.Module:
    """Sparsity penalties: what the hooks keep they have computed themselves."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(nn.Sequential(lin(), nn.ReLU()) for _ in range(4)))
            self.penalties: list[torch.Tensor] = []
            for block in self.body:
                block.register_forward_hook(self.keep)

        def keep(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
            self.penalties.append(out.abs().mean())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.penalties = []
            return self.body(x).square().mean() + 0.1 * torch.stack(self.penalties).sum()

    return Model()


@odd
def gradients_seen_by_tensor_hooks() -> nn.Module:
    """As for saliency maps: a hook keeps the activation and puts a hook on it that keeps the gradient."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(*(nn.Sequential(lin(), nn.Tanh()) for _ in range(3))), lin()
            self.seen: dict[str, torch.Tensor] = {}
            self.body[1].register_forward_hook(self.keep)

        def keep(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
            self.seen["activation"] = out.detach()
            if out.requires_grad:
                out.register_hook(lambda gradient: self.seen.update(gradient=gradient))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

    return Model()


@odd
def gradients_scaled_before_layers_backward() -> nn.Module:
    """full_backward_pre_hook on leaves and containers, and a pre-hook that changes keyword arguments."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            return torch.tanh(self.inner(x)) * scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Scaled() for _ in range(4))
            self.layers[1].register_full_backward_pre_hook(lambda module, go: (go[0] * 0.5,))
            self.layers[2].inner.register_full_backward_pre_hook(lambda module, go: (go[0] * 2.0,))
            for layer in self.layers:
                layer.register_forward_pre_hook(
                    lambda module, args, kwargs: (args, kwargs | {"scale": 1.5}), with_kwargs=True
                )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, scale=1.0)
            return x

    return Model()


# -- state that goes from step to step


@odd
def temperature_in_a_buffer() -> nn.Module:
    """A counter that the forward begins with, by which the last layers anneal; and which they save for backward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(lin() for _ in range(4))
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.steps += 1
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return torch.softmax(x * (1 + self.steps), -1)

    return Model()


@odd
def running_scale_saved_for_backward() -> nn.Module:
    """A buffer is multiplied with what has a gradient, and moved on in place at the next micro-batch."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()
            self.register_buffer("scale", torch.ones(D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            with torch.no_grad():
                self.scale.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
            return torch.tanh(x) * self.scale

    return nn.Sequential(*(Normed() for _ in range(4)))


@odd
def running_scale_of_a_tensor_that_is_no_buffer() -> nn.Module:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = lin(), torch.ones(D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            with torch.no_grad():
                self.scale.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
            return torch.tanh(x) * self.scale

    return nn.Sequential(*(Normed() for _ in range(4)))


@odd
def recurrent_wrapper_with_reset() -> nn.Module:
    """State between calls, detached, started anew where the number of samples changes."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.state = nn.LSTMCell(D, D), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.state is None or self.state[0].shape[0] != x.shape[0]:
                self.state = (x.new_zeros(len(x), D), x.new_zeros(len(x), D))
            h, c = self.cell(x, tuple(part.detach() for part in self.state))
            self.state = (h, c)
            return h

    return nn.Sequential(*(Stateful() for _ in range(3)), lin())


@odd
def keys_and_values_kept_by_each_layer() -> nn.Module:
    """Transformer-XL: each layer's memory of the last segment, in a list on the model, cut to a length."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv = lin(), lin(D, 2 * D)

        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            k, v = self.kv(torch.cat([memory, x])).chunk(2, -1)
            return x + torch.softmax(self.q(x) @ k.t(), -1) @ v

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))
            self.memory: list[torch.Tensor] | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.memory is None:
                self.memory = [x.new_zeros(2, D) for _ in self.layers]
            for k, layer in enumerate(self.layers):
                given = x.detach()
                x = layer(x, self.memory[k])
                self.memory[k] = torch.cat([self.memory[k], given])[-2:]
            return x

    return Model()


@odd
def rotary_table_grows() -> nn.Module:
    """A table in buffers that are registered anew whenever more positions are asked for."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()
            self.register_buffer("frequencies", 1.0 / 10.0 ** (torch.arange(0, D, 2) / D), persistent=False)
            self.seen = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > self.seen:
                self.seen = len(x)
                angles = torch.outer(torch.arange(self.seen).float(), self.frequencies).repeat(1, 2)
                self.register_buffer("cosines", angles.cos(), persistent=False)
                self.register_buffer("sines", angles.sin(), persistent=False)
            half = torch.cat([-x[:, D // 2 :], x[:, : D // 2]], -1)
            return self.inner(x * self.cosines[: len(x)] + half * self.sines[: len(x)])

    return nn.Sequential(*(Rotary() for _ in range(4)))


@odd
def distils_from_itself_in_eval_mode() -> nn.Module:
    """The body runs twice: once in eval mode without gradients as the teacher, once as the student."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(nn.Sequential(lin(), nn.BatchNorm1d(D), nn.ReLU()) for _ in range(3)))
            self.head = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            was = self.body.training
            self.body.eval()
            with torch.no_grad():
                teacher = self.head(self.body(x))
            self.body.train(was)
            student = self.head(self.body(x + 0.1))
            return F.mse_loss(student, teacher) + student.mean()

    return Model()


@odd
def average_of_the_weights_inside() -> nn.Module:
    """A shadow of the weights in buffers, moved in the forward and used for a consistency loss."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(lin(), nn.Tanh(), lin(), nn.Tanh(), lin())
            for name, parameter in self.student.named_parameters():
                self.register_buffer(name.replace(".", "_"), parameter.detach().clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for name, parameter in self.student.named_parameters():
                    self.get_buffer(name.replace(".", "_")).lerp_(parameter, 0.1)
                shadow = {name: self.get_buffer(name.replace(".", "_")) for name, _ in self.student.named_parameters()}
                target = functional_call(self.student, shadow, (x,))
            out = self.student(x)
            return out.mean() + F.mse_loss(out, target)

    return Model()


@odd
def drop_block_on_a_schedule() -> nn.Module:
    """Regions are dropped with a probability that layers raise with every forward."""

    class DropBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.rates = 0, torch.linspace(0.0, 0.3, 5).tolist()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rate = self.rates[min(self.calls, 4)]
            self.calls += 1
            if not self.training or rate == 0.0:
                return x
            mask = (torch.rand(len(x), 1, 4, 4) < rate / 9).float()
            mask = 1 - F.max_pool2d(F.interpolate(mask, size=x.shape[-2:]), 3, 1, 1)
            return x * mask * mask.numel() / mask.sum().clamp(min=1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(4))
            self.drops = nn.ModuleList(DropBlock() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.view(len(x), 1, 2, 4).repeat(1, 2, 4, 2)
            for conv, drop in zip(self.convs, self.drops, strict=True):
                x = drop(F.relu(conv(x)))
            return x

    return Model()


# -- depth, halting, routing


@odd
def mixture_of_depths() -> nn.Module:
    """Each block takes the tokens of the highest scores; the others pass by."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.body = lin(D, 1), nn.Sequential(lin(), nn.GELU(), lin())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.score(x).squeeze(-1)
            best, index = scores.topk(2)
            return x.index_add(0, index, torch.sigmoid(best)[:, None] * self.body(x[index]))

    return nn.Sequential(*(Block() for _ in range(4)))


@odd
def adaptive_computation_time() -> nn.Module:
    """One cell is called until every sample has had enough, then layers follow."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.cell, self.halt, self.out = lin(), nn.GRUCell(D, D), lin(D, 1), lin()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = torch.tanh(self.first(x))
            state, total, found, ponder = x, x.new_zeros(len(x), 1), torch.zeros_like(x), 0
            for _ in range(6):
                state = self.cell(x, state)
                p = torch.sigmoid(self.halt(state) + 0.5)
                last = (total + p > 0.99).float()
                share = last * (1 - total) + (1 - last) * p
                share = share * (total < 0.99).float()
                found, total, ponder = found + share * state, total + share, ponder + 1
                if bool((total > 0.989).all()):
                    break
            return self.out(found), (1 - total).mean() + ponder

    return Model()


@odd
def routing_by_agreement() -> nn.Module:
    class Capsules(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 4, 4, 2) / 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            votes = torch.einsum("bid,jdei->bjie", x.view(len(x), 2, 4), self.weight.permute(0, 1, 2, 3))
            logits = torch.zeros(len(x), 2, 2)
            for k in range(3):
                share = torch.softmax(logits, 1)[..., None]
                s = (share * (votes if k == 2 else votes.detach())).sum(2)
                v = s * s.norm(dim=-1, keepdim=True) / (1 + s.square().sum(-1, keepdim=True))
                if k < 2:
                    logits = logits + (votes.detach() * v[:, :, None]).sum(-1)
            return v.flatten(1)

    return nn.Sequential(lin(), Capsules(), lin(), Capsules(), lin())


@odd
def pointer_network() -> nn.Module:
    """A decoder points at its inputs one by one, those taken are masked out."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.cell = nn.LSTM(2, D, batch_first=True), nn.LSTMCell(2, D)
            self.w1, self.w2, self.v = lin(), lin(), lin(D, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            points = x.view(len(x), 4, 2)
            memory, (h, c) = self.encoder(points)
            h, c = h[0], c[0]
            keys, given = self.w1(memory), points.mean(1)
            taken = torch.zeros(len(x), 4, dtype=torch.bool)
            loss: Any = 0
            for _ in range(3):
                h, c = self.cell(given, (h, c))
                scores = self.v(torch.tanh(keys + self.w2(h)[:, None])).squeeze(-1).masked_fill(taken, -1e4)
                choice = scores.argmax(-1)
                loss = loss + F.cross_entropy(scores, choice)
                taken = taken.clone()
                taken[torch.arange(len(x)), choice] = True
                given = points[torch.arange(len(x)), choice]
            return loss

    return Model()


@odd
def beams_in_a_list() -> nn.Module:
    """Beam search inside the forward: hypotheses are Python lists of tokens, scores stay differentiable."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.table, self.cell, self.out = lin(), nn.Embedding(5, D), nn.GRUCell(D, D), lin(D, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            memory = torch.tanh(self.encoder(x))
            total: Any = 0
            for row in memory:
                beams = [([0], torch.zeros(()), row[None])]
                for _ in range(3):
                    more = []
                    for tokens, score, state in beams:
                        state = self.cell(self.table(torch.tensor([tokens[-1]])), state)
                        best, ids = torch.log_softmax(self.out(state)[0], -1).topk(2)
                        more += [([*tokens, i], score + s, state) for s, i in zip(best, ids.tolist(), strict=True)]
                    beams = sorted(more, key=lambda beam: -float(beam[1]))[:2]
                total = total - beams[0][1]
            return total / len(x)

    return Model()


@odd
def layers_routed_by_their_own_index() -> nn.Module:
    """YOLO: each layer names where its inputs come from; outputs that somebody needs later are saved."""

    class Concat(nn.Module):
        def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(xs, 1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rows = [(-1, lin()), (-1, nn.SiLU()), (-1, lin()), ([-1, 0], Concat()), (-1, lin(2 * D, D)), (-1, lin())]
            rows += [([-1, 2, 4], Concat()), (-1, lin(3 * D, D))]
            for k, (source, layer) in enumerate(rows):
                layer.i, layer.f = k, source
            self.model = nn.Sequential(*(layer for _, layer in rows))
            self.save = sorted({k for source, _ in rows if isinstance(source, list) for k in source if k != -1})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: list[torch.Tensor | None] = []
            for m in self.model:
                if m.f != -1:
                    x = y[m.f] if isinstance(m.f, int) else [x if j == -1 else y[j] for j in m.f]
                x = m(x)
                y.append(x if m.i in self.save else None)
            return x

    return Model()


@case
def skips_in_a_dictionary_by_size() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList(nn.Conv2d(2 * k, 2 * k + 2, 3, padding=1) for k in range(1, 4))
            self.up = nn.ModuleDict({str(2**k): nn.Conv2d(4 * k, 2 * k, 3, padding=1) for k in (3, 2, 1)})
            self.join = nn.ModuleDict({str(2**k): nn.Conv2d(2 * k + 2, 2 * k, 1) for k in (3, 2, 1)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            skips: dict[int, torch.Tensor] = {}
            for k, conv in enumerate(self.down):
                skips[2 ** (k + 1)] = x
                x = F.max_pool2d(F.relu(conv(x)), 2)
            for size in sorted(skips, reverse=True):
                x = self.join[str(size)](F.interpolate(x, scale_factor=2))
                x = self.up[str(size)](torch.cat([x, skips.pop(size)], 1))
            return x

    torch.manual_seed(1)
    return Case(Model(), (torch.randn(4, 2, 8, 8),), loss_fn=squares)


# -- solvers


@odd
def equilibrium_with_a_hook_for_its_gradient() -> nn.Module:
    """A fixed point is found without gradients; a hook on it solves the backward's own fixed point."""

    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.u = lin(), lin()
            with torch.no_grad():
                self.w.weight.mul_(0.3)

        def f(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.w(z) + self.u(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(12):
                    z = self.f(z, x)
            z = self.f(z, x)
            z0 = z.detach().requires_grad_()
            f0 = self.f(z0, x.detach())

            def solve(gradient: torch.Tensor) -> torch.Tensor:
                g = gradient
                for _ in range(12):
                    g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + gradient
                return g

            if z.requires_grad:
                z.register_hook(solve)
            return z

    return nn.Sequential(lin(), Equilibrium(), lin(), Equilibrium(), lin())


@odd
def differential_equation_that_counts_its_calls() -> nn.Module:
    """Runge-Kutta steps through a network that counts how often it was asked; the model adds that to its loss."""

    class Rate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.calls = lin(D + 1, D), lin(), 0

        def forward(self, t: float, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.b(torch.tanh(self.a(torch.cat([x, x.new_full((len(x), 1), t)], 1))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.rates, self.leave = lin(), nn.ModuleList(Rate() for _ in range(2)), lin()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
            x = self.enter(x)
            for rate in self.rates:
                rate.calls = 0
                for k in range(2):
                    t, h = k / 2, 0.5
                    k1 = rate(t, x)
                    k2 = rate(t + h / 2, x + h / 2 * k1)
                    k3 = rate(t + h / 2, x + h / 2 * k2)
                    x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + rate(t + h, x + h * k3))
            return self.leave(x), 1e-3 * torch.tensor(float(sum(rate.calls for rate in self.rates)))

    return Model()


@odd
def noise_is_predicted_at_random_times() -> nn.Module:
    """A diffusion model's training step: schedules in buffers, sinusoidal times, a residual network, mean squares."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner, self.time = nn.LayerNorm(D), lin(), lin()

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            scale = self.time(t)
            return x + self.inner(F.silu(self.norm(x) * (1 + scale)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kept = torch.cumprod(1 - torch.linspace(1e-4, 0.2, 10), 0)
            self.register_buffer("signal", kept.sqrt())
            self.register_buffer("noise", (1 - kept).sqrt())
            self.time, self.blocks, self.out = lin(), nn.ModuleList(Block() for _ in range(3)), lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            t = torch.randint(0, 10, (len(x),))
            noise = torch.randn_like(x)
            noisy = self.signal[t][:, None] * x + self.noise[t][:, None] * noise
            angles = t[:, None] * torch.exp(-torch.arange(D // 2))
            emb = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], 1)))
            for block in self.blocks:
                noisy = block(noisy, emb)
            return F.mse_loss(self.out(noisy), noise)

    return Model()


@case
def masked_autoencoder() -> Case:
    """Patches are shuffled and most of them dropped; the decoder puts tokens back in their place."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.token = lin(), nn.Parameter(torch.randn(1, 1, D))
            self.position = nn.Parameter(torch.randn(1, 6, D), requires_grad=False)
            layer = {"d_model": D, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
            self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(2))
            self.decoder = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(2))
            self.out = lin()

        def forward(self, patches: torch.Tensor) -> torch.Tensor:
            x = self.embed(patches) + self.position
            shuffle = torch.rand(x.shape[:2]).argsort(1)
            restore, keep = shuffle.argsort(1), shuffle[:, :2]
            mask = torch.ones(x.shape[:2])
            mask[:, :2] = 0
            mask = mask.gather(1, restore)
            x = x.gather(1, keep[..., None].expand(-1, -1, D))
            for layer in self.encoder:
                x = layer(x)
            x = torch.cat([x, self.token.expand(len(x), 4, -1)], 1)
            x = x.gather(1, restore[..., None].expand(-1, -1, D)) + self.position
            for layer in self.decoder:
                x = layer(x)
            return ((self.out(x) - patches).square().mean(-1) * mask).sum() / mask.sum()

    return sequences(Model(), 6)


# -- weights


@odd
def weights_merged_when_not_training() -> nn.Module:
    """LoRA that adds its product to the weight in eval mode and takes it off again in training; here: training."""

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.merged = lin(), False
            self.base.requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.randn(2, D) / 3), nn.Parameter(torch.randn(D, 2) / 3)

        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            if mode == self.merged:
                self.base.weight.data += (-1 if mode else 1) * (self.up @ self.down)
                self.merged = not mode
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.base(x)
            return torch.tanh(out if self.merged else out + x @ self.down.t() @ self.up.t())

    return nn.Sequential(*(Lora() for _ in range(4)))


@case
def standardised_convolutions() -> Case:
    class Conv(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            w = w / (w.std((1, 2, 3), keepdim=True) + 1e-5)
            return F.conv2d(x, w, self.bias, self.stride, self.padding)

    blocks = [nn.Sequential(Conv(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()) for _ in range(4)]
    torch.manual_seed(1)
    return Case(nn.Sequential(*blocks), (torch.randn(4, 4, 6, 6),), loss_fn=squares)


@odd
def decoder_is_the_encoder_transposed() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList([lin(D, 6), lin(6, 4), lin(4, 3)])
            self.biases = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in (4, 6, D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.encoder:
                x = torch.tanh(layer(x))
            for layer, bias in zip(reversed(self.encoder), self.biases, strict=True):
                x = F.linear(torch.tanh(x), layer.weight.t(), bias)
            return x

    return Model()


@odd
def penalty_on_all_weights_in_the_forward() -> nn.Module:
    """Orthogonality of every matrix, summed at the end over the modules that have one."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(lin(), nn.Tanh(), lin(), nn.Tanh(), lin())

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.body(x)
            weights = [m.weight for m in self.modules() if isinstance(m, nn.Linear)]
            return x, sum((w @ w.t() - torch.eye(len(w))).square().mean() for w in weights)

    return Model()


@odd
def ensemble_of_stacked_members() -> nn.Module:
    """vmap over stacked weights inside, between layers that all members share."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = lin(), lin()
            weights, _ = stack_module_state([nn.Sequential(lin(), nn.Tanh(), lin()) for _ in range(3)])
            self.stacked = nn.ParameterDict(
                {name.replace(".", "_"): nn.Parameter(w.detach()) for name, w in weights.items()}
            )
            self.names = list(weights)
            self.member = (nn.Sequential(lin(), nn.Tanh(), lin()).to("meta"),)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            weights = {name: self.stacked[name.replace(".", "_")] for name in self.names}
            out = vmap(lambda w, y: functional_call(self.member[0], w, (y,)), in_dims=(0, None))(weights, x)
            return self.head(out.mean(0)) + out.var(0)

    return Model()


@odd
def losses_weighted_by_learnt_uncertainty() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(lin(), nn.Tanh(), lin())
            self.heads = nn.ModuleDict({"depth": lin(D, 1), "normals": lin(D, 3), "classes": lin(D, 5)})
            self.log_variances = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in self.heads})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.trunk(x))
            total: Any = 0
            for name, head in self.heads.items():
                total = total + head(x).square().mean() * torch.exp(-self.log_variances[name])
                total = total + self.log_variances[name]
            return total

    return Model()


# -- Python


@odd
def function_mode_of_its_own() -> nn.Module:
    """A TorchFunctionMode in the forward that replaces one function by another, and counts."""

    class Softer(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.tanh:
                self.count += 1
                return F.softsign(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with Softer() as mode:
            x = torch.tanh(self.b(torch.tanh(self.a(x))))
            x = torch.tanh(self.c(x))
        return self.d(x) * mode.count

    return of(forward)()


@odd
def attributes_by_magic() -> nn.Module:
    """Layers are found through __getattr__, state is kept past nn.Module's own __setattr__, properties compute."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            object.__setattr__(self, "options", {"scale": 2.0})
            self.layers = nn.ModuleDict({"enter": lin(), "middle": lin(), "leave": lin()})

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name.startswith("layer_"):
                    return self.layers[name[6:]]
                if name in self.__dict__.get("options", {}):
                    return self.__dict__["options"][name]
                raise

        @property
        def middle_norm(self) -> torch.Tensor:
            return self.layer_middle.weight.norm()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.layer_enter(x)) * self.scale
            x = torch.tanh(self.layer_middle(x)) / self.middle_norm
            return self.layer_leave(x)

    return Model()


@odd
def nested_checkpoints_with_state() -> nn.Module:
    """A checkpoint within a checkpointed block, whose inside has dropout and a counter of its calls."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.calls = lin(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return F.dropout(torch.tanh(self.a(x)), 0.2, self.training)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Inner(), Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + checkpoint(self.two, self.one(x), use_reentrant=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    return Model()


class Annealed(nn.Module):
    """Reads how far training is from the table of its owner."""

    def __init__(self, schedule: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.schedule = lin(), schedule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x) / (1 + self.schedule["steps"]))


@odd
def schedule_read_in_checkpoints() -> nn.Module:
    """What a forward counts up is read again when checkpoints run again, after other forwards."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.schedule: dict[str, Any] = {"steps": 0}
            self.blocks = nn.ModuleList(Annealed(self.schedule) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.schedule["steps"] += 1
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    return Model()


@odd
def buffer_read_in_checkpoints() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
            self.layers = nn.ModuleList(lin() for _ in range(4))

        def step(self, k: int, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.layers[k](x) / (1 + self.steps))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            for k in range(4):
                x = checkpoint(self.step, k, x, use_reentrant=False)
            return x

    return Model()


@odd
def lists_of_results_by_a_generator() -> nn.Module:
    """A generator yields each layer's result; the model zips it with weights that it learns (ELMo's mix)."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(lin(), nn.Tanh()) for _ in range(4))
            self.mix, self.gamma = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(()))

        def results(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            for layer in self.layers:
                x = layer(x)
                yield x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shares = torch.softmax(self.mix, 0)
            return self.gamma * sum(share * y for share, y in zip(shares, self.results(x), strict=True))

    return Model()
