"""Odd modules once more: what code in the wild does with state, caches, randomness, solvers, queues and containers.

Entries as in `odd_models`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from models import Case
from odd_models import D, adding_to, lin, of, squares
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint_sequential

ODDEST: dict[str, Callable[[], Case]] = {}


odd, case = adding_to(ODDEST)


def images(model: nn.Module, channels: int = 3, size: int = 8) -> Case:
    torch.manual_seed(1)
    return Case(model, (torch.randn(4, channels, size, size),), loss_fn=squares)


# -- detection and vision


@case
def anchors_cached_by_shape() -> Case:
    """A detection head: anchors for each level in a dictionary by shape, logits and boxes in lists."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits, self.boxes = nn.Conv2d(8, 2, 1), nn.Conv2d(8, 4, 1)
            self.cache: dict[Any, torch.Tensor] = {}

        def anchors(self, x: torch.Tensor) -> torch.Tensor:
            key = (*x.shape[-2:], x.device)
            if key not in self.cache:
                y, z = torch.meshgrid(*(torch.arange(float(n)) for n in x.shape[-2:]), indexing="ij")
                self.cache[key] = torch.stack([z, y, z + 1, y + 1]).to(x)
            return self.cache[key]

        def forward(self, levels: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
            boxes = [self.boxes(x) + self.anchors(x) for x in levels]
            return {"logits": [self.logits(x) for x in levels], "boxes": boxes}

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            self.down = nn.ModuleList(nn.Conv2d(8, 8, 3, stride=2, padding=1) for _ in range(3))
            self.lateral = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))
            self.head = Head()

        def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
            x, found = self.stem(x), []
            for down in self.down:
                x = F.relu(down(x))
                found.append(x)
            levels = [lateral(x) for lateral, x in zip(self.lateral, found, strict=True)]
            for k in range(2, 0, -1):
                levels[k - 1] = levels[k - 1] + F.interpolate(levels[k], size=levels[k - 1].shape[-2:])
            return self.head(levels)

    torch.manual_seed(0)
    return images(Detector())


@case
def anchors_of_a_module_between_stages() -> Case:
    """The cache is on a module that backbone and head share."""

    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grids: dict[tuple[int, ...], torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            size = tuple(x.shape[-2:])
            if size not in self.grids:
                self.grids[size] = torch.linspace(0, 1, size[0] * size[1]).view(1, 1, *size)
            return x + self.grids[size]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grid = Grid()
            self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k, conv in enumerate(self.convs):
                x = torch.tanh(self.grid(conv(x)))
                if k == 1:
                    x = F.avg_pool2d(x, 2)
            return x

    torch.manual_seed(0)
    return images(Model())


@case
def deformable_sampling() -> Case:
    class Deformable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offsets, self.values = nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            theta = torch.eye(2, 3).expand(len(x), 2, 3)
            grid = F.affine_grid(theta, list(x.shape), align_corners=False)
            grid = grid + 0.1 * torch.tanh(self.offsets(x)).permute(0, 2, 3, 1)
            return F.grid_sample(self.values(x), grid, align_corners=False, padding_mode="border")

    torch.manual_seed(0)
    return images(nn.Sequential(nn.Conv2d(3, 4, 1), *(Deformable() for _ in range(3))))


@case
def windows_shifted_with_masks() -> Case:
    """Shifted windows: rolls, partitions, a mask made for the size and kept."""

    class Block(nn.Module):
        def __init__(self, shift: int) -> None:
            super().__init__()
            self.shift, self.attention = shift, nn.MultiheadAttention(D, 2, batch_first=True)
            self.norm, self.mask = nn.LayerNorm(D), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, h, w, c = x.shape
            y = self.norm(x).roll((-self.shift, -self.shift), (1, 2))
            y = y.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
            if self.shift and self.mask is None:
                self.mask = torch.zeros(16, 16).masked_fill(torch.arange(16)[:, None] < torch.arange(16) - 8, -9.0)
            y = self.attention(y, y, y, attn_mask=self.mask, need_weights=False)[0]
            y = y.view(b, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
            return x + y.roll((self.shift, self.shift), (1, 2))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, D, 1)
            self.blocks = nn.ModuleList(Block(2 * (k % 2)) for k in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.patch(x).permute(0, 2, 3, 1)
            for block in self.blocks:
                x = block(x)
            return x.mean((1, 2))

    torch.manual_seed(0)
    return images(Model())


@case
def group_statistics_by_hand() -> Case:
    class Norm(nn.Module):
        """Batch statistics over halves of the batch, running ones in plain tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("seen", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            halves = x.view(2, -1, *x.shape[1:])
            mean, var = halves.mean((1, 3, 4), keepdim=True), halves.var((1, 3, 4), keepdim=True)
            if self.training:
                with torch.no_grad():
                    self.seen += 1
                    self.mean.lerp_(mean.mean((0, 1)).flatten(), 1.0 / float(self.seen))
            return ((halves - mean) / (var + 1e-5).sqrt()).view_as(x) * self.gain.view(-1, 1, 1)

    layers = [m for k in range(3) for m in (nn.Conv2d(3 if k == 0 else 4, 4, 3, padding=1), Norm(), nn.SiLU())]
    torch.manual_seed(0)
    return images(nn.Sequential(*layers))


# -- teachers, banks, codebooks


@odd
def teacher_that_follows_in_forward() -> nn.Module:
    """A moving average of the student, updated in each forward and asked for a target."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(lin(), nn.Tanh(), lin())
            teacher = copy.deepcopy(self.student)
            for k, parameter in enumerate(teacher.parameters()):
                self.register_buffer(f"t{k}", parameter.detach().clone())
            self.head = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for k, parameter in enumerate(self.student.parameters()):
                    getattr(self, f"t{k}").lerp_(parameter, 0.1)
                target = F.linear(torch.tanh(F.linear(x, self.t0, self.t1)), self.t2, self.t3)
            y = self.student(x)
            return self.head(y) + (y - target)

    return Model()


@odd
def queue_of_keys() -> nn.Module:
    """Momentum contrast: a queue in a buffer with a pointer, filled after it was read."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Sequential(lin(), nn.ReLU(), lin())
            self.key = nn.Sequential(lin(), nn.ReLU(), lin())
            self.register_buffer("queue", F.normalize(torch.randn(D, 16), dim=0))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def enqueue(self, keys: torch.Tensor) -> None:
            start = int(self.pointer)
            self.queue[:, start : start + len(keys)] = keys.T
            self.pointer[0] = (start + len(keys)) % 16

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = F.normalize(self.query(x), dim=1)
            with torch.no_grad():
                k = F.normalize(self.key(x + 0.1), dim=1)
            positive = (q * k).sum(1, keepdim=True)
            logits = torch.cat([positive, q @ self.queue.clone().detach()], 1) / 0.2
            self.enqueue(k)
            return logits.log_softmax(1)[:, 0]

    return Model()


class Codebook(nn.Module):
    """Vector quantisation, straight through, with its moving averages in buffers."""

    def __init__(self, num_codes: int = 5) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(num_codes, D))
        self.register_buffer("counts", torch.ones(num_codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chosen = torch.cdist(x, self.codes).argmin(1)
        one_hot = F.one_hot(chosen, len(self.codes)).type_as(x)
        if self.training:
            self.counts.data.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
            self.sums.data.mul_(0.9).add_(one_hot.T @ x.detach(), alpha=0.1)
            self.codes.data.copy_(self.sums / self.counts[:, None].clamp_min(1e-3))
        quantised = one_hot @ self.codes.clone()
        return x + (quantised - x).detach(), F.mse_loss(quantised.detach(), x), chosen


@odd
def codebook_straight_through() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.book, self.decoder = nn.Sequential(lin(), nn.Tanh(), lin()), Codebook(), lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            quantised, commitment, _ = self.book(self.encoder(x))
            return self.decoder(quantised).mean(1) + commitment

    return Model()


@odd
def residual_codebooks() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = lin()
            self.books = nn.ModuleList(Codebook() for _ in range(3))
            self.decoder = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, total, losses = self.encoder(x), torch.zeros(()), []
            residual = x
            for book in self.books:
                quantised, loss, _ = book(residual)
                residual = residual - quantised.detach()
                total = total + quantised
                losses.append(loss)
            return self.decoder(total).mean(1) + torch.stack(losses).sum()

    return Model()


@odd
def gradient_reversal_with_a_schedule() -> nn.Module:
    """The strength grows with the number of forwards, which a buffer counts."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
            ctx.strength = strength
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return -ctx.strength * gradient, None

    class Domain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(lin(), nn.ReLU(), lin(D, 2))
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps.add_(1)
            return self.inner(Reverse.apply(x, 2 / (1 + math.exp(-int(self.steps) / 10)) - 1))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.label, self.domain = nn.Sequential(lin(), nn.Tanh(), lin()), lin(D, 3), Domain()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            x = self.features(x)
            return {"label": self.label(x), "domain": self.domain(x)}

    return Model()


@odd
def memory_read_by_attention() -> nn.Module:
    """A memory that later layers write and earlier ones read a forward later."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = lin(), lin(), lin(), lin()
            self.register_buffer("memory", torch.zeros(4, D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            x = x + (x @ self.memory.clone().T).softmax(1) @ self.memory.clone()
            x = self.c(torch.tanh(self.b(x)))
            self.memory = torch.cat([x.detach()[:1], self.memory[:-1]])
            return self.d(x)

    return Model()


# -- experts, routing


@odd
def experts_by_top_k_and_index_add() -> nn.Module:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(D, 4, bias=False)
            self.experts = nn.ModuleList(nn.Sequential(lin(), nn.GELU(), lin()) for _ in range(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.gate(x)
            weights, chosen = logits.softmax(1).topk(2, 1)
            weights = weights / weights.sum(1, keepdim=True)
            out = torch.zeros_like(x)
            for k, expert in enumerate(self.experts):
                rows, slots = torch.where(chosen == k)
                if len(rows):
                    out = out.index_add(0, rows, expert(x[rows]) * weights[rows, slots, None])
            load = F.one_hot(chosen, 4).float().mean((0, 1))
            return out, (load * logits.softmax(1).mean(0)).sum()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.moe1, self.moe2, self.last = lin(), Experts(), Experts(), lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            y, first = self.moe1(x)
            z, second = self.moe2(x + y)
            return self.last(z).mean(1) + 0.1 * (first + second)

    return Model()


@odd
def experts_with_capacity_in_fused_weights() -> nn.Module:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Parameter(torch.randn(D, 3))
            self.weights = nn.Parameter(torch.randn(3, D, D) * 0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = (x @ self.router).argmax(1)
            order = chosen.argsort(stable=True)
            counts = torch.bincount(chosen, minlength=3).tolist()
            parts = [p @ w for p, w in zip(x[order].split(counts), self.weights, strict=True)]
            return x + torch.cat(parts)[order.argsort()]

    return nn.Sequential(lin(), Experts(), nn.LayerNorm(D), Experts(), lin())


@odd
def auxiliary_losses_on_a_shared_state() -> nn.Module:
    """Layers add to a dataclass that the model makes anew in each forward and keeps."""

    @dataclass
    class Trace:
        losses: list[torch.Tensor] = field(default_factory=list)
        depth: int = 0

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, x: torch.Tensor, trace: Trace) -> torch.Tensor:
            x = torch.tanh(self.inner(x))
            trace.losses.append(x.square().mean())
            trace.depth += 1
            return x / trace.depth

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))
            self.trace: Trace | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.trace = Trace()
            for layer in self.layers:
                x = layer(x, self.trace)
            return x.mean() + sum(self.trace.losses) / self.trace.depth

    return Model()


# -- recurrence


@odd
def state_carried_from_step_to_step() -> nn.Module:
    """Truncated backpropagation: every recurrent layer keeps its last state, detached."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.state = nn.GRUCell(D, D), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = self.cell(x, self.state)
            self.state = state.detach()
            return state

    return nn.Sequential(lin(), Stateful(), lin(), Stateful(), lin())


@odd
def state_of_all_layers_in_one_list() -> nn.Module:
    """The model holds all layers' states in one list, read by the layer before each is replaced."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList(nn.GRUCell(D, D) for _ in range(4))
            self.states: list[torch.Tensor | None] = [None] * 4

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k, cell in enumerate(self.cells):
                x = cell(x, self.states[k])
                self.states[k] = x.detach()
            return x

    return Model()


@case
def sequences_of_all_kinds() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, D, padding_idx=0)
            self.gru, self.lstm = nn.GRU(D, 4, 2, bidirectional=True), nn.LSTM(D, D, batch_first=True)
            self.out = lin()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            lengths = (ids != 0).sum(1)
            x = self.table(ids)
            packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            y, last = self.gru(packed)
            padded, sizes = rnn.pad_packed_sequence(y, batch_first=True, padding_value=0.5)
            again = rnn.pack_sequence([row[:n] for row, n in zip(padded, sizes, strict=True)], enforce_sorted=False)
            z, (h, c) = self.lstm(again)
            rows = rnn.unpack_sequence(z)
            y = rnn.pad_sequence(rows, batch_first=True)
            return self.out(y.sum(1) + h[0] + c[0] + last.mean(0).repeat(1, 2))

    torch.manual_seed(0)
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0], [8, 9, 10, 0, 0], [1, 0, 0, 0, 0]])
    return Case(Model(), (ids,), loss_fn=squares)


@odd
def decoder_that_samples_its_own_inputs() -> nn.Module:
    """Scheduled sampling: a coin from torch decides on each step what the next one gets."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out, self.embed = nn.GRUCell(D, D), nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, y, outputs = torch.zeros_like(x), x, []
            for _ in range(3):
                h = self.cell(self.embed(y), h)
                logits = self.out(h)
                outputs.append(logits)
                y = x if torch.rand(()) < 0.5 else F.one_hot(logits.argmax(1), D).float()
            return torch.stack(outputs, 1)

    return Model()


# -- distributions, spectra, solvers


@odd
def latent_variables_reparameterised() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.mean, self.scale = nn.Sequential(lin(), nn.Tanh()), lin(), lin()
            self.decoder = nn.Sequential(lin(), nn.Tanh(), lin())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.encoder(x)
            posterior = torch.distributions.Normal(self.mean(h), F.softplus(self.scale(h)) + 0.1)
            prior = torch.distributions.Normal(torch.zeros(D), torch.ones(D))
            z = posterior.rsample()
            likelihood = torch.distributions.Independent(torch.distributions.Normal(self.decoder(z), 1.0), 1)
            return torch.distributions.kl_divergence(posterior, prior).sum(1) - likelihood.log_prob(x)

    return Model()


@odd
def relaxed_categories() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        logits = self.b(torch.tanh(self.a(x)))
        soft = torch.distributions.RelaxedOneHotCategorical(torch.tensor(0.7), logits=logits).rsample()
        hard = F.gumbel_softmax(logits, hard=True)
        return self.d(self.c(soft) + hard)

    return of(forward)()


@odd
def spectral_blocks() -> nn.Module:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(D // 2 + 1, dtype=torch.cfloat) * 0.5)
            self.inner = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spectrum = torch.fft.rfft(x, norm="ortho") * self.filter
            return x + F.gelu(self.inner(torch.fft.irfft(spectrum, n=D, norm="ortho")))

    return nn.Sequential(lin(), *(Spectral() for _ in range(3)), lin())


@odd
def spectrum_between_layers() -> nn.Module:
    """Real and imaginary parts, angles and magnitudes cross between layers."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        z = torch.fft.fft(self.a(x))
        magnitude, phase = z.abs(), z.angle()
        y = self.b(magnitude)
        w = torch.polar(F.softplus(self.c(y)), phase)
        return self.d(torch.fft.ifft(w).real)

    return of(forward)()


@odd
def spectrally_normalised() -> nn.Module:
    layers = [parametrizations.spectral_norm(lin()), nn.LeakyReLU(0.2), nn.utils.spectral_norm(lin()), nn.ReLU()]
    return nn.Sequential(*layers, parametrizations.spectral_norm(lin()), parametrizations.orthogonal(lin()), lin())


@odd
def solver_with_adaptive_steps() -> nn.Module:
    """Heun and Euler disagree: the step is halved until they do not."""

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.num_calls = nn.Sequential(lin(), nn.Tanh(), lin()), 0

        def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.num_calls += 1
            return self.inner(y + t)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.field, self.drop = lin(), Field(), lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, t, h = self.lift(x), torch.zeros(()), torch.tensor(0.5)
            for _ in range(20):
                if t >= 1:
                    break
                first = self.field(t, y)
                second = self.field(t + h, y + h * first)
                if (second - first).abs().max() * h > 0.6 and h > 0.1:
                    h = h / 2
                    continue
                y, t = y + h / 2 * (first + second), t + h
            return self.drop(y)

    return Model()


@odd
def depth_chosen_by_each_sample() -> nn.Module:
    """Halting: samples leave when they have had enough; the rest goes on, in fewer rows."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(lin(), nn.Tanh()) for _ in range(4))
            self.halt, self.out = lin(D, 1), lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            done, rows = torch.zeros_like(x), torch.arange(len(x))
            for layer in self.layers:
                x = layer(x)
                stops = torch.sigmoid(self.halt(x)).squeeze(1) > 0.5
                done = done.index_copy(0, rows[stops], x[stops])
                rows, x = rows[~stops], x[~stops]
                if not len(rows):
                    break
            return self.out(done.index_copy(0, rows, x))

    return Model()


# -- mixing, several losses


@odd
def mixup_inside() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        share = torch.distributions.Beta(0.4, 0.4).sample()
        x = share * x + (1 - share) * x[torch.randperm(len(x))]
        return self.d(torch.tanh(self.c(self.b(x))))

    return of(forward)()


@odd
def deep_supervision() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(lin(), nn.Tanh()) for _ in range(4))
            self.heads = nn.ModuleDict({f"aux{k}": lin(D, 2) for k in range(4)})

        def forward(self, x: torch.Tensor) -> OrderedDict[str, torch.Tensor]:
            found: OrderedDict[str, torch.Tensor] = OrderedDict()
            for k, block in enumerate(self.blocks):
                x = block(x)
                found[f"aux{k}"] = self.heads[f"aux{k}"](x if k % 2 else x.detach())
            found["main"] = x
            return found

    return Model()


@odd
def two_players() -> nn.Module:
    """A generator and a critic that sees it twice, once cut off."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(lin(), nn.ReLU(), lin(), nn.Tanh())
            self.critic = nn.Sequential(lin(), nn.LeakyReLU(0.2), lin(D, 1))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            made = self.generator(x)
            for parameter in self.critic.parameters():
                parameter.requires_grad_(False)
            fooled = F.softplus(-self.critic(made))
            for parameter in self.critic.parameters():
                parameter.requires_grad_(True)
            seen = F.softplus(self.critic(made.detach())) + F.softplus(-self.critic(x))
            return fooled, seen

    return Model()


@odd
def contrastive_across_the_batch() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Sequential(lin(), nn.Tanh(), lin()), nn.Sequential(lin(), nn.Tanh(), lin())
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = F.normalize(self.left(x), dim=1), F.normalize(self.right(x.roll(1, 1)), dim=1)
            logits = self.scale.exp().clamp(max=20) * a @ b.T
            labels = torch.arange(len(x))
            return F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)

    return Model()


# -- functional forms


@odd
def sequential_in_checkpoints() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = lin()
            self.body = nn.Sequential(*(nn.Sequential(lin(), nn.Tanh(), nn.Dropout(0.2)) for _ in range(6)))
            self.last = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint_sequential(self.body, 3, self.first(x), use_reentrant=False))

    return Model()


@odd
def ensemble_by_vmap() -> nn.Module:
    """Stacked weights of five members, run at once over the features."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = lin(), lin()
            members = [lin() for _ in range(5)]
            parameters, _ = torch.func.stack_module_state(members)
            self.stacked = nn.ParameterDict({name: nn.Parameter(p.detach()) for name, p in parameters.items()})
            self.base = [copy.deepcopy(members[0]).to("meta")]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def one(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
                return torch.func.functional_call(self.base[0], parameters, (x,))

            out = torch.func.vmap(one, in_dims=(0, None))(dict(self.stacked), self.first(x))
            return self.last(out.mean(0))

    return Model()


@odd
def directional_derivatives_of_a_layer() -> nn.Module:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(lin(), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            value, slope = torch.func.jvp(self.inner, (x,), (torch.ones_like(x),))
            return value + 0.1 * slope

    return nn.Sequential(lin(), Layer(), Layer(), lin())


@odd
def hyper_network_with_functional_call() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.context, self.hyper = nn.Sequential(lin(), nn.Tanh()), lin(D, D * D + D)
            self.target, self.last = lin(), lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.hyper(self.context(x).mean(0))
            weights = {"weight": self.target.weight + 0.1 * made[: D * D].view(D, D), "bias": made[D * D :]}
            return self.last(torch.tanh(torch.func.functional_call(self.target, weights, (x,))))

    return Model()


@odd
def inner_loop_of_gradient_steps() -> nn.Module:
    """Learning to learn: a layer's weights take two steps inside of the forward, and those are differentiated."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = dict(self.inner.named_parameters())
            for _ in range(2):
                loss = torch.func.functional_call(self.inner, weights, (x,)).square().mean()
                gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                weights = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), gradients, strict=True)}
            return torch.func.functional_call(self.inner, weights, (x,))

    return nn.Sequential(lin(), Adapted(), nn.Tanh(), Adapted(), lin())


@odd
def shared_through_parameter_lists() -> nn.Module:
    class Layer(nn.Module):
        def __init__(self, weights: nn.ParameterList, k: int) -> None:
            super().__init__()
            self.weights, self.k = weights, k

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.weights[self.k % len(self.weights)])

    weights = nn.ParameterList(nn.Parameter(torch.randn(D, D) * 0.4) for _ in range(2))
    return nn.Sequential(lin(), *(Layer(weights, k) for k in range(4)), lin())


@odd
def scripted_submodules_in_a_list() -> nn.Module:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool(x.sum() > 0):
                return x * torch.sigmoid(self.inner(x))
            return x + self.inner(x)

    return nn.Sequential(lin(), torch.jit.script(Gate()), torch.jit.script(Gate()), lin())


@odd
def lazily_initialised() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(D), nn.Tanh(), nn.LazyLinear(D), nn.LazyBatchNorm1d(), nn.LazyLinear(D))
    model(torch.zeros(2, D))
    return model


@odd
def built_at_the_first_forward() -> nn.Module:
    """Layers that come to be when they are first needed; here that was before."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = lin(), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.rest is None:
                self.rest = nn.Sequential(nn.Tanh(), nn.Linear(x.shape[1], D), nn.Tanh(), lin())
            return self.rest(self.first(x))

    model = Model()
    model(torch.zeros(1, D))
    return model


# -- attention


@odd
def attention_with_blocks_of_masks() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out, self.slopes = lin(D, 3 * D), lin(), nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.view(1, len(x), 2, D // 2).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            far = (torch.arange(len(x)) - torch.arange(len(x))[:, None]).abs()
            bias = torch.where(mask, 0.0, float("-inf")) - self.slopes[:, None, None] * far
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            return x + self.out(y.transpose(1, 2).reshape(len(x), D))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last = nn.ModuleList(Block() for _ in range(3)), lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            documents = torch.tensor([0, 0, 1, 1])
            mask = documents[:, None] == documents
            for k, block in enumerate(self.blocks):
                x = block(x, mask if k else mask.tril())
            return self.last(x)

    return Model()


@odd
def cache_of_keys_and_values() -> nn.Module:
    """A cache object goes through all layers, is kept on the model, and cleared at the next forward."""

    class Cache:
        def __init__(self) -> None:
            self.keys: dict[int, torch.Tensor] = {}

        def update(self, k: int, keys: torch.Tensor) -> torch.Tensor:
            self.keys[k] = torch.cat([self.keys[k], keys]) if k in self.keys else keys
            return self.keys[k]

    class Layer(nn.Module):
        def __init__(self, k: int) -> None:
            super().__init__()
            self.k, self.inner = k, lin()

        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            return x + cache.update(self.k, self.inner(x)).mean(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.cache = nn.ModuleList(Layer(k) for k in range(4)), Cache()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache.keys.clear()
            for layer in self.layers:
                x = layer(x, self.cache)
            return x + sum(self.cache.keys.values())

    return Model()


# -- Python


@dataclass(frozen=True)
class Config:
    scale: float = 1.0
    depth: int = 0


@odd
def configuration_that_layers_change() -> nn.Module:
    """A dataclass that is replaced on the way: each layer gets the next one's settings."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()

        def forward(self, x: torch.Tensor, config: Config) -> tuple[torch.Tensor, Config]:
            return torch.tanh(self.inner(x)) * config.scale, replace(
                config, scale=config.scale * 0.9, depth=config.depth + 1
            )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.config = nn.ModuleList(Layer() for _ in range(4)), Config()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            config = self.config
            for layer in self.layers:
                x, config = layer(x, config)
            assert config.depth == 4
            return x

    return Model()


@odd
def generator_hands_out_layers() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(lin() for _ in range(4))

        def steps(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            for layer in self.layers:
                x = torch.tanh(layer(x))
                sent = yield x
                x = x if sent is None else x + sent

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            steps = self.steps(x)
            total = next(steps)
            with contextlib.suppress(StopIteration):
                while True:
                    total = total + steps.send(total * 0.1)
            return total

    return Model()


@odd
def context_manager_sets_a_mode() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = lin(), lin(), lin(), lin()
            self.depth = 0

        @contextlib.contextmanager
        def deeper(self) -> Iterator[int]:
            self.depth += 1
            try:
                yield self.depth
            finally:
                self.depth -= 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.deeper() as one:
                x = self.a(x) / one
                with self.deeper() as two:
                    x = torch.tanh(self.c(self.b(x))) / two
                return self.d(x) / self.depth

    return Model()


@odd
def decorated_and_partial_layers() -> nn.Module:
    def scaled(by: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                return function(self, *args, **kwargs) * by

            return call

        return wrap

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lin()
            self.act = functools.partial(F.leaky_relu, negative_slope=0.3)

        @scaled(1.5)
        def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
            return self.act(self.inner(x)) + shift

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))
            self.calls = [functools.partial(layer, shift=0.1 * k) for k, layer in enumerate(self.layers)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functools.reduce(lambda value, call: call(value), self.calls, x)

    return Model()


@odd
def tree_of_modules_by_recursion() -> nn.Module:
    class Tree(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.inner = lin()
            self.left = Tree(depth - 1) if depth else None
            self.right = Tree(depth - 1) if depth else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.inner(x))
            if self.left is None or self.right is None:
                return x
            return self.left(x) * torch.sigmoid(self.right(x))

    return nn.Sequential(Tree(2), lin())


@odd
def linear_algebra_between_layers() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        gram = x.T @ x + torch.arange(1.0, D + 1).diag()
        factor = torch.linalg.cholesky(gram)
        y = torch.linalg.solve_triangular(factor, self.b(x).T, upper=False).T
        values = torch.linalg.eigvalsh(gram)
        return self.d(torch.tanh(self.c(y)) + values.log() + torch.logdet(gram))

    return of(forward)()


@odd
def graph_convolutions_over_edges() -> nn.Module:
    """Messages along edges given as indices, reduced where they arrive."""

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.update = lin(2 * D, D), nn.GRUCell(D, D)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            source, target = edges
            messages = F.relu(self.message(torch.cat([x[source], x[target]], 1)))
            gathered = torch.zeros_like(x).scatter_reduce(
                0, target[:, None].expand_as(messages), messages, "amax", include_self=False
            )
            return self.update(gathered, x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.readout = nn.ModuleList(Convolution() for _ in range(3)), lin()
            self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]]), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, self.edges)
            return self.readout(x.sum(0))

    return Model()


@odd
def loss_scale_from_a_moving_average() -> nn.Module:
    """The last layer's running loss scales the first layer's input in the next forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(lin(), nn.Tanh()) for _ in range(4)))
            self.average = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers(x / self.average)
            self.average = 0.9 * self.average + 0.1 * float(x.detach().square().mean())
            return x

    return Model()


# -- modes of torch


@odd
def autocast_from_one_layers_hook_to_anothers() -> nn.Module:
    entered: list[Any] = []

    def enter(module: nn.Module, args: Any) -> None:
        entered.append(torch.autocast("cpu", dtype=torch.bfloat16))
        entered[-1].__enter__()

    def leave(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        entered.pop().__exit__(None, None, None)
        return out.float()

    model = nn.Sequential(lin(), nn.Tanh(), lin(), nn.Tanh(), lin(), lin())
    model[2].register_forward_pre_hook(enter)
    model[4].register_forward_hook(leave)
    return model


@odd
def gradients_switched_by_function() -> nn.Module:
    """Off and on again, not within a block: where a rank ends in between, nobody switches them on."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        torch.set_grad_enabled(False)
        y = self.c(self.b(x))
        torch.set_grad_enabled(True)
        return self.d(x + y)

    return of(forward)()


@odd
def nested_tensors_in_glue() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        ragged = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4]))
        x = self.b((ragged * 2).values())
        parts = torch.nested.as_nested_tensor([x[:3], x[3:]], layout=torch.jagged)
        return self.d(torch.cat(list(torch.tanh(self.c(parts)).unbind())))

    return of(forward)()


@odd
def strided_nested_tensors_in_glue() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        ragged = torch.nested.as_nested_tensor([*self.a(x).split([1, 3])])
        x = torch.nested.to_padded_tensor(self.b(ragged), 0.0)
        return self.d(torch.tanh(self.c(x)))

    return of(forward)()
