"""The loss of a micro-batch, and its weight in the loss of the whole batch.

A loss that is a mean over something is, for the whole batch, the mean of the micro-batches' losses weighted by how much
of it each holds: samples, or valid labels where some labels are to be ignored. A sum is added up.

    loss = sum over micro-batches and replicas of  weight / total weight * loss of the micro-batch

Where a loss adds up several terms, each a mean over something of its own, that holds of each term.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from partitioner.errors import ArgumentError, LossWarning
from partitioner.microbatches import MicroBatch
from partitioner.restore import kept_by
from partitioner.specs import Counted, LossRule, Weighing
from partitioner.structures import tensors_in
from partitioner.terms import Seen, Terms, taken_apart

IGNORED = -100
"""The label that torch and Hugging Face leave out of the mean, unless told otherwise."""

LossFunction = Callable[[Any, Any], torch.Tensor]
LossWeight = Callable[[Any, Any], Any] | Literal["sum", "samples"]
Weight = float | tuple[float, ...]
"""What a micro-batch counts for, or its share of all; of a loss in terms that of each, and of what has no gradient."""


def refuse_trained(loss_fn: LossFunction | None) -> None:
    """A plan knows the model's parameters, not those of its loss."""
    if isinstance(loss_fn, nn.Module) and any(parameter.requires_grad for parameter in loss_fn.parameters()):
        raise ArgumentError(
            "loss_fn has parameters to train: make it a part of the model, whose forward then takes the targets too "
            "and returns the loss (loss_fn=None), so that they are planned for"
        )


class Loss:
    """`loss_fn(output, target)`, or the model's own; `loss_weight(inputs, target)`, "sum", "samples", or what is told.

    Known without being told: reduction="sum" and ignore_index of torch's losses, their class weights, labels of -100,
    the shift by one of Hugging Face's causal language models, `num_items_in_batch`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        loss_weight: LossWeight | None,
        rule: LossRule | None = None,
    ) -> None:
        """`rule`: the plan's, which holds where `loss_weight` says nothing."""
        if not (loss_weight is None or callable(loss_weight) or loss_weight in ("sum", "samples")):
            raise ArgumentError(
                f"loss_weight={loss_weight!r}: a function of a micro-batch's inputs and target that returns what it "
                "counts for, 'sum' for a loss that adds up, or 'samples'"
            )
        self._model = model
        self._loss_fn = loss_fn
        self.beside: tuple[Any, ...] = ()
        """More that is to be given back after trial runs: weights that forwards write into."""
        self._told = False
        self._loss_weight: LossWeight | Counted | None = loss_weight
        self._terms: LossRule | None = None
        """Where the loss adds up terms."""
        self._hows: tuple[Weighing, ...] = ()
        """Their rules, each once; at last that of what has no gradient."""
        self._seen: Seen | None = None
        self._parameters = _parameter_names(model)
        self.name = name_of(loss_fn)
        if loss_weight is None and rule is not None:
            self._loss_weight = self._told_by(rule)
            if rule.how == "terms":
                self._terms = rule
                self._hows = (*dict.fromkeys((*rule.terms, *rule.received)), "samples")

    def _told_by(self, rule: LossRule) -> LossWeight | Counted | None:
        if rule.loss != self.name:
            here, there = (f"loss_fn={one}" if one else "the model's own loss" for one in (self.name, rule.loss))
            raise ArgumentError(
                f"the plan knows how losses of micro-batches add up for {there}, and is run with {here}: say it for "
                "this one (loss_weight=), or make the plan with it"
            )
        if rule.how == "given":
            raise ArgumentError(
                "the plan was made with a function as loss_weight, and functions are not saved with plans: pass "
                "loss_weight= here too"
            )
        return None if rule.how == "terms" else rule.how

    def rule(self) -> LossRule | None:
        """What a plan is to keep of how losses add up; None where each batch tells."""
        how = self._loss_weight
        if self._terms is not None:
            return self._terms
        if how is None:
            return None
        return LossRule(loss=self.name, how="given" if callable(how) else how)

    @property
    def function(self) -> LossFunction | None:
        """The user's function; None where it is the model's own loss."""
        return self._loss_fn

    @property
    def keeps(self) -> tuple[Any, ...]:
        """What the loss function has to itself and may change, and `beside`."""
        return (*kept_by(self._loss_fn), *self.beside)

    def against(self, target: Any) -> Compared:
        """The loss for this target."""
        return Compared(self, target)

    def of(self, output: Any, target: Any) -> torch.Tensor:
        """The micro-batch's loss, 0-d."""
        if self._loss_fn is None and target is not None:
            raise ArgumentError("there is a target but no loss_fn to compare the output with it: pass loss_fn=")
        if self._loss_fn is not None:
            loss, made_by = self._compared(output, target), "loss_fn returned"
        else:
            loss, made_by = own_loss(output), "the model's own loss is"
        if not isinstance(loss, torch.Tensor):
            raise ArgumentError(f"{made_by} {type(loss).__name__}, not a tensor")
        if loss.numel() != 1:
            raise ArgumentError(f"{made_by} of shape {tuple(loss.shape)}; a loss is one number: average it")
        return loss.reshape(())

    def watching(self) -> AbstractContextManager[None]:
        """Around the forward that makes what `part` is given: with gradients, where the loss is to be taken apart."""
        return self.taking_apart() if self._terms else nullcontext()

    @contextmanager
    def taking_apart(self) -> Iterator[None]:
        """Around the forward that makes what `taken_apart` is given."""
        with torch.enable_grad(), Seen() as self._seen:
            yield

    def taken_apart(self, output: Any, target: Any) -> Terms:
        """The micro-batch's loss in its terms."""
        seen, self._seen = self._seen or Seen(), None
        with torch.enable_grad():
            with seen:
                loss = self.of(output, target)
            return taken_apart(loss, seen)

    def part(self, output: Any, target: Any, share: Weight) -> torch.Tensor:
        """What the micro-batch adds to the loss of the batch, 0-d; 0 without a graph where it counts for nothing."""
        if not isinstance(share, tuple):
            loss = self.of(output, target)
            if not share:
                self._warn_of_left_out(self._loss_weight, loss)
            return loss * share if share else torch.zeros_like(loss.detach())
        assert self._terms is not None
        terms, found = self.taken_apart(output, target), self._terms.terms
        if len(terms.values) == len(self._terms.received):
            found = self._terms.received
        if len(terms.values) != len(found):
            raise ArgumentError(
                f"the loss of this micro-batch adds up {len(terms.values)} terms with gradients, and the plan found "
                f"{len(found)}, each weighted by what it is a mean over: pass batches like the plan's (the same "
                "arguments, labels of every kind), say what a micro-batch counts for (loss_weight=), or leave the "
                "batch whole (microbatches=1)"
            )
        shares = [share[self._hows.index(how)] for how in found]
        for how, value, one in zip(found, terms.values, shares, strict=True):
            if not one:
                self._warn_of_left_out(how, value)
        return terms.shared(shares, share[-1])

    def _warn_of_left_out(self, how: Any, loss: torch.Tensor) -> None:
        """A mean over nothing is 0, or NaN where that is not looked after; anything else should have counted."""
        if self._told or not isinstance(how, Counted):
            return
        value = float(loss.detach())
        if not value or not math.isfinite(value):
            return
        self._told = True
        warnings.warn(
            f"a micro-batch that holds nothing of what the loss is a mean over as the plan found ({how}) has a loss of "
            f"{value:.6g} all the same, which is left out: the loss and its gradients are others than those of the "
            "batch. Give a loss that is a sum over the batch (loss_weight='sum'), say what a micro-batch counts for "
            "(loss_weight=lambda inputs, target: ...), or leave the batch whole (microbatches=1, mesh={'dp': 1})",
            LossWarning,
            stacklevel=2,
        )

    def alone(self, output: Any, target: Any) -> torch.Tensor:
        """The loss of a micro-batch that is the whole batch."""
        if not self._terms:
            return self.of(output, target)
        return self.part(output, target, (1.0,) * len(self._hows))

    def _compared(self, output: Any, target: Any) -> Any:
        assert self._loss_fn is not None
        if target is not None:
            return self._loss_fn(output, target)
        try:
            return self._loss_fn(output, None)
        except (TypeError, AttributeError) as error:
            raise ArgumentError(
                f"loss_fn was called without a target and raised {type(error).__name__}: {error}. Give it one: "
                "example_target= of partition, profile and verify, train_step(inputs, target)"
            ) from error

    def is_sum(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether the whole batch's loss is the sum of the micro-batches' losses."""
        if self._loss_weight is not None:
            return self._loss_weight == "sum"
        if self._terms:
            return False
        if self._loss_fn is None:
            return kwargs.get("num_items_in_batch") is not None
        return bool(self._setting("reduction") == "sum")

    def weights(self, microbatches: Sequence[MicroBatch], inputs: Sequence[Any]) -> Sequence[Weight]:
        """What each micro-batch counts for; `inputs` are the micro-batches in the form the caller's batch had."""
        if self._terms:
            return [tuple(self.counted(how, one) for how in self._hows) for one in microbatches]
        if self.is_sum(microbatches[0].kwargs):
            return [1.0] * len(microbatches)
        if self._loss_weight == "samples":
            return [float(microbatch.samples) for microbatch in microbatches]
        if isinstance(self._loss_weight, Counted):
            return _checked([self.counted(self._loss_weight, microbatch) for microbatch in microbatches])
        if callable(self._loss_weight):
            given = [self._loss_weight(part, m.target) for part, m in zip(inputs, microbatches, strict=True)]
            return _checked([float(weight) for weight in given])
        counts = [self._valid_labels(microbatch) for microbatch in microbatches]
        if not counts[0]:
            return [float(microbatch.samples) for microbatch in microbatches]
        numbers = torch.stack([torch.stack(list(count.values())) for count in counts]).double().cpu()
        first = numbers[:, 0]
        for name, other in zip(counts[0], numbers.T, strict=True):
            if not torch.allclose(first * other.sum(), other * first.sum()):
                raise ArgumentError(
                    f"the micro-batches have {_listed(first)} valid labels in {next(iter(counts[0]))!r} but "
                    f"{_listed(other)} in {name!r}: how much each counts for cannot be told, and where the loss adds "
                    f"up two means no one weight is exact. Say what counts (loss_weight=lambda inputs, target: ...), "
                    f"give a loss that is a sum over the batch (loss_weight='sum'), take the mean over samples as "
                    f"accumulated gradients do (loss_weight='samples'), or do not cut the batch (microbatches=1)"
                )
        return [float(weight) for weight in first]

    def shares(
        self,
        microbatches: Sequence[MicroBatch],
        weights: Sequence[Weight],
        everywhere: Callable[[torch.Tensor], torch.Tensor] = lambda here: here,
    ) -> tuple[bool, list[Weight]]:
        """Whether anything of the batch counts, and each micro-batch's share of the loss of the batch.

        `everywhere`: the sum over replicas of a tensor. Of a term of which nothing counts, shares are NaN.
        """
        if self.is_sum(microbatches[0].kwargs):
            return True, [1.0] * len(weights)
        totals = everywhere(torch.tensor(weights, dtype=torch.float64).sum(0)).tolist()
        if not self._terms:
            return bool(totals), [weight / totals if totals else 0.0 for weight in weights]  # type: ignore[operator]
        return True, [
            tuple(
                1.0 if how == "sum" else one / total if total else float("nan")
                for one, total, how in zip(weight, totals, self._hows, strict=True)  # type: ignore[arg-type]
            )
            for weight in weights
        ]

    def counted(self, what: Weighing, microbatch: MicroBatch) -> float:
        """What a micro-batch counts for by a rule."""
        if not isinstance(what, Counted):
            return 1.0 if what == "sum" else float(microbatch.samples)
        held: Any = microbatch.target
        if what.argument != "target":
            named = dict(zip(self._parameters, microbatch.args, strict=False)) | microbatch.kwargs
            held = microbatch.args[what.argument] if isinstance(what.argument, int) else named.get(what.argument)
        tensors = list(tensors_in(held))
        if what.tensor >= len(tensors):
            raise ArgumentError(
                f"the loss is a mean over {what}, as the plan found, and this batch has {len(tensors)} tensors there: "
                "pass batches like the plan's, or loss_weight="
            )
        entries = tensors[what.tensor].detach()
        entries = entries[..., 1:] if what.shifted else entries
        return float(entries.double().sum() if what.other_than is None else (entries != what.other_than).sum())

    def _valid_labels(self, microbatch: MicroBatch) -> dict[str, torch.Tensor]:
        """Label tensor -> what its labels count for; empty where there are none, and samples count."""
        labels = self.labels(microbatch)
        class_weight = self._setting("weight")
        counts = {}
        for name, label in labels.items():
            if self._loss_fn is None and name == "labels" and is_shifted(self._model):
                label = label[..., 1:]
            valid = label != self.ignored
            if isinstance(class_weight, torch.Tensor):
                counts[name] = class_weight.to(label.device)[label[valid]].double().sum()
            else:
                counts[name] = valid.sum().double()
        return counts

    @property
    def ignored(self) -> int:
        """The label that does not count."""
        told = self._setting("ignore_index")
        return IGNORED if told is None else int(told)

    def labels(self, microbatch: MicroBatch) -> dict[str, torch.Tensor]:
        """Tensors that are taken for labels, by what they are called."""
        found: dict[str, torch.Tensor] = {}
        if self._loss_fn is not None:
            target = microbatch.target
            if isinstance(target, Mapping) and _is_label(target.get("labels")):
                return {"labels": target["labels"]}
            for k, tensor in enumerate(tensors_in(target)):
                if _is_label(tensor):
                    found[f"target {k}"] = tensor
            return found
        arguments = dict(zip(self._parameters, microbatch.args, strict=False)) | microbatch.kwargs
        for name, value in sorted(arguments.items(), key=lambda item: item[0] != "labels"):
            if "label" in name and _is_label(value):
                found[name] = value
        return found

    def _setting(self, name: str) -> Any:
        """A setting of torch's losses, wherever it is kept: an attribute of the module, a keyword of a partial."""
        loss_fn: Any = self._loss_fn
        if isinstance(loss_fn, functools.partial):
            return loss_fn.keywords.get(name)
        if isinstance(loss_fn, nn.Module) and type(loss_fn).__module__ == "torch.nn.modules.loss":
            return getattr(loss_fn, name, None)
        return None


class Compared(NamedTuple):
    """A loss with the target that it compares outputs with."""

    loss: Loss
    target: Any

    def __call__(self, output: Any) -> torch.Tensor:
        return self.loss.of(output, self.target)


def name_of(loss_fn: LossFunction | None) -> str:
    """What a plan calls a loss by: its name in the source, "" for the model's own.

    >>> name_of(nn.MSELoss()), name_of(functools.partial(nn.functional.cross_entropy, ignore_index=0))
    ('MSELoss', 'cross_entropy')
    """
    if loss_fn is None:
        return ""
    if isinstance(loss_fn, functools.partial):
        return name_of(loss_fn.func)
    return str(getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__))


def own_loss(output: Any) -> Any:
    """The loss that a model returned: `.loss`, ["loss"], a 0-d tensor, or a 0-d tensor first in a tuple."""
    if isinstance(output, torch.Tensor) and output.dim() == 0:
        return output
    if isinstance(output, Mapping) and output.get("loss") is not None:
        return output["loss"]
    if isinstance(getattr(output, "loss", None), torch.Tensor):
        return output.loss
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], torch.Tensor) and output[0].dim() == 0:
        return output[0]
    shape = f" of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else ""
    raise ArgumentError(
        f"the model returned a {type(output).__name__}{shape}, which holds no loss: pass loss_fn= and a target "
        "(example_target= where a plan or a profile is made), or inputs with which the model "
        "returns its own loss (labels=)"
    )


def sum_of_outputs(output: Any, target: Any) -> torch.Tensor:
    """A stand-in for the loss where none is asked for: models are measured and compared for inference with it."""
    del target
    numbers = [tensor.sum().float() for tensor in tensors_in(output) if tensor.is_floating_point()]
    if not numbers:
        raise ArgumentError("the model's output has no tensor of floating-point numbers: pass loss_fn=")
    return torch.stack(numbers).sum()


def is_shifted(model: nn.Module) -> bool:
    """Whether the model's own loss compares position k with label k + 1, as Hugging Face's causal models do."""
    if not hasattr(type(model), "loss_function"):
        return False
    kind = getattr(model, "loss_type", None)
    if kind == "ForConditionalGeneration":
        return not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return kind in ("ForCausalLM", None)


def _is_label(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dim() > 0
        and not value.is_floating_point()
        and not value.is_complex()
        and value.dtype != torch.bool
    )


def _checked(weights: list[float]) -> list[float]:
    if any(not 0 <= weight < float("inf") for weight in weights):
        raise ArgumentError(f"loss_weight returned {weights}: weights are finite and not negative")
    return weights


def _listed(numbers: torch.Tensor) -> str:
    return ", ".join(f"{number:g}" for number in numbers.tolist())


def _parameter_names(model: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return []
