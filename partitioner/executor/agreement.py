"""Whether all ranks have the same model in the same order, and those of a replica the same batch.

model, order        at the start
whole batches       in the first steps, and now and then
in every step       a few elements of the inputs, and what the loop told a scheduler: they go along with the loss
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook

from partitioner.errors import ArgumentError, PlanMismatchError
from partitioner.executor.mesh import Mesh
from partitioner.executor.replaced import Replaced
from partitioner.structures import tensors_in

MAX_ELEMENTS = 2**16
"""Of a larger tensor, this many elements evenly spread are looked at."""

FEW_ELEMENTS = 16
"""Of each tensor, in every step."""

_TAKEN_AS = {
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), torch.int8),
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
"""By which dtype of that size elements are taken where torch does not take them by their own."""

DRIFT = 1e-3
"""Relative; by so much may copies of a parameter differ, on devices that round in other ways."""


def refuse_other_order(model: nn.Module, mesh: Mesh) -> None:
    """A PlanMismatchError on all ranks where modules or parameters are in another order on some than on rank 0.

    Gradients are reduced in that order. A model built from a set has the order of its hashes.
    """
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))]
    number = int.from_bytes(hashlib.blake2b("\n".join(names).encode(), digest_size=8).digest(), "little")
    numbers = mesh.gather(number)
    others = [rank for rank, other in enumerate(numbers) if other != numbers[0]]
    if others:
        seed = os.environ.get("PYTHONHASHSEED", "random")
        raise PlanMismatchError(
            f"the model's modules come in another order on rank {', '.join(map(str, others))} than on rank 0, perhaps "
            f"because it is built from a set (PYTHONHASHSEED is {seed} on rank {mesh.rank}): start all ranks with the "
            "same one, PYTHONHASHSEED=0 torchrun ..., as partitioner.launch does, or build the model in a fixed order"
        )


def digest(batch: Any) -> int:
    """A number that changes with the tensors of a batch: shapes, dtypes and (a sample of) their values."""
    return number_of(samples(batch, MAX_ELEMENTS))


def samples(batch: Any, max_elements: int) -> list[tuple[str, torch.Tensor]]:
    """What each tensor of a batch is like, and so many of its elements, evenly spread, on its own device."""
    found = []
    for tensor in tensors_in(batch):
        sample = torch.empty(0)
        if tensor.layout == torch.strided and tensor.numel() and not tensor.is_nested and not tensor.is_quantized:
            every = 1 + (tensor.numel() - 1) // max_elements
            values = tensor.detach()
            if tensor.dtype in _TAKEN_AS:
                values = values.view(_TAKEN_AS[tensor.dtype])
            sample = values.take(torch.arange(0, tensor.numel(), every, device=tensor.device))
        found.append((f"{tuple(tensor.shape)} {tensor.dtype}", sample))
    return found


def number_of(found: list[tuple[str, torch.Tensor]]) -> int:
    """64 bits of what `samples` gave."""
    state = hashlib.blake2b(digest_size=8)
    for like, sample in found:
        state.update(like.encode())
        state.update(sample.cpu().resolve_conj().resolve_neg().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(state.digest(), "little", signed=True)


def refuse_differing(number: int, mesh: Mesh) -> None:
    """An ArgumentError on all ranks of the replica, naming those whose digest is not the first stage's."""
    ranks = mesh.replica_ranks
    numbers = [torch.zeros((), dtype=torch.int64) for _ in ranks]
    dist.all_gather(numbers, torch.tensor(number), group=mesh.within_replica)
    found = {rank: int(value) for rank, value in zip(ranks, numbers, strict=True)}
    first = mesh.rank_of(0)
    others = [rank for rank in ranks if found[rank] != found[first]]
    if others:
        _refuse_batch(others, first)


def _refuse_batch(others: Sequence[int], first: int) -> NoReturn:
    raise ArgumentError(
        f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))} got another batch than rank "
        f"{first}: all ranks of a replica must pass the same samples to a step. Use sampler=stage.sampler(dataset) "
        "in the DataLoader, and the same seed for random augmentation"
    )


class Alike:
    """What the ranks of a replica compare in each step, along with the loss; while it is entered, what the loop gives
    to ReduceLROnPlateau too, which lowers the learning rate of each rank by what that rank tells it, and the steps and
    the learning rate of the optimizer, where each rank has a single one with a single rate."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._ours = {id(parameter) for parameter in parameters}
        self._samples: list[tuple[str, torch.Tensor]] = []
        self._calls, self._sum = 0, 0.0
        self._replaced = Replaced(ReduceLROnPlateau, "step", self._noting)
        self._hook: Any = None
        self._optimizers = weakref.WeakSet[torch.optim.Optimizer]()
        self._steps, self._first_rate, self._rate = 0, math.nan, math.nan
        self._has_warned = False

    def enter(self) -> None:
        """Looked at where the class finds its method, for schedulers that there are and will be."""
        self._replaced.enter()
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def leave(self) -> None:
        """As before."""
        self._replaced.leave()
        self._hook.remove()

    def begin(self, inputs: Any) -> None:
        """A step begins. The elements are fetched at its end: nothing waits for a device here."""
        self._samples = samples(inputs, FEW_ELEMENTS)

    def numbers(self) -> list[float]:
        """Of this rank, in this step."""
        is_single = len(self._optimizers) == 1
        of_optimizer = [self._steps, self._first_rate, self._rate] if is_single else [math.nan] * 3
        return [float(number_of(self._samples) % 2**48), float(self._calls), self._sum, *of_optimizer]

    def refuse(self, everyones: torch.Tensor, ranks: Sequence[int]) -> None:
        """An ArgumentError on all ranks where they differ. `everyones`: a row for each of these ranks.

        A warning where an optimizer steps otherwise: there may be one for each part of the model.
        """
        batches, calls, sums, steps, first_rates, rates = everyones.unbind(1)
        others = [rank for rank, differs in zip(ranks, (batches != batches[0]).tolist(), strict=True) if differs]
        if others:
            _refuse_batch(others, ranks[0])
        apart = (calls != calls[0]) | ~torch.isclose(sums, sums[0], rtol=1e-4, atol=0.0, equal_nan=True)
        if bool(apart.any()):
            told = ", ".join(
                f"{total:.6g} in {int(count)} calls on rank {rank}"
                for rank, count, total in zip(ranks, calls.tolist(), sums.tolist(), strict=True)
            )
            raise ArgumentError(
                f"ReduceLROnPlateau.step was told other values on some ranks than on others (sums: {told}), so their "
                "learning rates would become different: tell it on every rank the same, such as the loss that "
                "train_step or eval_loss gives to all of them"
            )

        if not self._has_warned:
            self._warn("differ in their number of steps", steps, ranks)
        if not self._has_warned and bool((first_rates == first_rates[0]).all()):
            self._warn(f"began with the learning rate {first_rates[0]:g} and differ in it now", rates, ranks)

    def _warn(self, what: str, numbers: torch.Tensor, ranks: Sequence[int]) -> None:
        if bool(numbers.isnan().any() | torch.isclose(numbers, numbers[0], rtol=1e-6, atol=0.0).all()):
            return
        self._has_warned = True
        each = ", ".join(f"{one:.6g} on rank {rank}" for rank, one in zip(ranks, numbers.tolist(), strict=True))
        warnings.warn(
            f"the optimizers of a replica's ranks {what} ({each}). Where they stand for one "
            "optimizer of the whole model, something that differs between ranks was decided by, such as what layers "
            "recorded: decide by what is the same on all, such as the loss that train_step and eval_loss give, or put "
            "the parts of all ranks together first (torch.distributed.all_gather_object)",
            UserWarning,
            stacklevel=5,
        )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not any(id(parameter) in self._ours for group in optimizer.param_groups for parameter in group["params"]):
            return
        self._optimizers.add(optimizer)
        self._steps += 1
        rates = [group.get("lr") for group in optimizer.param_groups]
        is_one = all(isinstance(rate, (int, float)) and rate == rates[0] for rate in rates)
        self._rate = float(rates[0] or 0.0) if is_one else math.nan
        self._first_rate = self._rate if self._steps == 1 else self._first_rate

    def _noting(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def step(scheduler: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            self._note(scheduler.optimizer, metrics)
            return plain(scheduler, metrics, *args, **kwargs)

        return step

    def _note(self, optimizer: torch.optim.Optimizer, metrics: Any) -> None:
        if any(id(parameter) in self._ours for group in optimizer.param_groups for parameter in group["params"]):
            self._calls += 1
            self._sum += float(metrics)


def refuse_drift(shared: Mapping[tuple[int, ...], Mapping[str, nn.Parameter]], mesh: Mesh) -> None:
    """An ArgumentError where the copies of a parameter on several ranks have become different.

    `shared`: by owner stages, parameters by name; the same on all ranks that hold them, which all call it.
    """
    for stages in sorted(set(shared) & set(mesh.owners)):
        named = shared[stages]
        here = torch.stack([_sketch(parameter) for parameter in named.values()])
        here = here.to(mesh.device) if mesh.has_own_device else here
        ranks = mesh.ranks_of(stages)
        everyones = [torch.empty_like(here) for _ in ranks]
        dist.all_gather(everyones, here, group=mesh.owners[stages])
        values = torch.stack(everyones).cpu()
        apart = (values - values[0]).abs().amax((0, 2)) > DRIFT * values[..., 1].abs().amax(0)
        if bool(apart.any()):
            names = [name for name, differs in zip(named, apart.tolist(), strict=True) if differs]
            raise ArgumentError(
                f"ranks {', '.join(map(str, ranks))} hold {len(names)} parameters ({names[0]}) together, and their "
                "values have become different: what a training loop does to parameters besides the optimizer, with "
                "random numbers or by rank, it must do alike to all copies. Do it before materialize, or draw from a "
                "torch.Generator seeded by the parameter's name and the step"
            )


def _sketch(parameter: torch.Tensor) -> torch.Tensor:
    """Two numbers that are near each other for values that are: a projection, and the norm; float64, on the CPU."""
    flat = parameter.detach().reshape(-1)
    sample = flat[:: 1 + (flat.numel() - 1) // MAX_ELEMENTS] if flat.numel() else flat
    sample = (torch.view_as_real(sample).reshape(-1) if sample.is_complex() else sample).cpu().double()
    return torch.stack([(sample * torch.arange(len(sample)).double().cos()).sum(), sample.norm()])
