"""Losses that add up terms, each a mean over something of its own: taken apart, and put together for the batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plans import plan_of
from rank_pool import RankPool
from torch import nn
from torch.nn import functional as F

import partitioner as pt
from partitioner.losses import Loss
from partitioner.microbatches import Cutter, MicroBatch, as_call
from partitioner.plan import Plan
from partitioner.specs import Counted, LossRule, Weighing
from partitioner.terms import Seen, taken_apart
from partitioner.uneven import uneven as made_uneven
from partitioner.whole_batch import compare_terms, ignorable_in

SAMPLES, LENGTH, WIDTH, WORDS = 8, 6, 8, 11

# -- taken apart


def written_into(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a += 3 * b
    return a


SCALE = nn.Parameter(torch.tensor(0.3))
ADDED: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "a + b": (lambda a, b: a + 0.5 * b, 2),
    "written into": (written_into, 2),
    "sum of a list": (lambda a, b: sum([a, b, a]), 2),
    "mean of a stack": (lambda a, b: torch.stack([a, b * 2]).mean(), 2),
    "uncertainty": (lambda a, b: torch.exp(-SCALE) * a + SCALE + b, 3),
    "divided": (lambda a, b: (a - 2 * b) / 7, 2),
    "by a number of the batch": (lambda a, b: (a / torch.tensor(3.0) - b).view(1).squeeze(), 2),
    "a product": (lambda a, b: a * b, 1),
    "a ratio": (lambda a, b: a / b, 1),
    "a number over a term": (lambda a, b: 2.0 / a, 1),
    "one of them without a gradient": (lambda a, b: a + b.detach(), 1),
    "one": (lambda a, b: a, 1),
}


@pytest.mark.parametrize("name", ADDED)
def test_a_loss_is_the_sum_of_its_terms_and_so_are_their_gradients(name: str) -> None:
    make, number = ADDED[name]
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 5), torch.randn(6, 4), torch.arange(6) % 5
    with Seen() as seen:
        a = F.cross_entropy(model(x), y)
        b = (model(x).square() * torch.arange(5)).sum() / torch.arange(5).sum()
        loss = make(a, b)
    terms = taken_apart(loss, seen)
    assert len(terms.values) == number
    torch.testing.assert_close(sum(terms.values) + terms.constant, loss)
    weight = torch.autograd.grad(loss, model.weight, retain_graph=True)
    again = torch.autograd.grad(terms.shared([1.0] * number, 1.0), model.weight, retain_graph=True)
    torch.testing.assert_close(weight, again)
    (first,) = torch.autograd.grad(terms.shared([1.0] + [0.0] * (number - 1), 0.0), model.weight, retain_graph=True)
    left_out = terms.shared([float("nan")] + [1.0] * (number - 1), 0.0)
    assert torch.isnan(left_out)
    if number > 1:
        (others,) = torch.autograd.grad(left_out, model.weight, retain_graph=True)
        torch.testing.assert_close(first + others, weight[0])


# -- their rules


class Pretraining(nn.Module):
    """Words predicted where labels say so, and whether sentences follow each other, as BERT is trained; its own loss.

    `early`: and a term that an early layer makes.
    """

    def __init__(self, early: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.to_words, self.to_class = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, 2)
        self.early = early

    def forward(self, tokens: torch.Tensor, labels: Any = None, next_label: Any = None) -> Any:
        x = self.words(tokens)
        aux = []
        for layer in self.layers:
            x = x + layer(x)
            aux.append(x.square().mean())
        words, follows = self.to_words(x), self.to_class(x[:, 0])
        if labels is None:
            return words, follows
        loss = F.cross_entropy(words.flatten(0, 1), labels.flatten())
        if next_label is not None:
            loss = loss + F.cross_entropy(follows, next_label)
        if self.early:
            loss += 0.1 * sum(aux)
        return {"loss": loss, "logits": words}


def pretraining(early: bool = False) -> tuple[Pretraining, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(0, WORDS, (SAMPLES, LENGTH))
    return Pretraining(early), {"tokens": tokens, "labels": tokens.roll(1, 1), "next_label": torch.arange(SAMPLES) % 2}


def uneven(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Micro-batches of two samples with other numbers of valid labels of either kind, one with none of the second."""
    labels, following = batch["labels"].clone(), batch["next_label"].clone()
    labels[0, 1:], labels[3], labels[6, :2] = -100, -100, -100
    following[2:4], following[7] = -100, -100
    return {**batch, "labels": labels, "next_label": following}


WORDS_RULE = Counted(argument="labels", other_than=-100)
CLASS_RULE = Counted(argument="next_label", other_than=-100)


def terms_of(model: nn.Module, batch: MicroBatch, loss: Loss) -> tuple[Weighing, ...]:
    tried = made_uneven(model, batch, Cutter(), 4, ignorable_in(model, batch, Cutter(), 4, loss))
    return compare_terms(model, batch, tried, Cutter(), 4, loss)


@pytest.mark.parametrize("as_it_is", [True, False])
def test_each_term_is_a_mean_over_the_labels_that_it_is_of(as_it_is: bool) -> None:
    """Also where the example has as many valid labels of both kinds in each micro-batch."""
    model, batch = pretraining(early=True)
    example = MicroBatch((), batch if as_it_is else uneven(batch), None, SAMPLES)
    assert terms_of(model, example, Loss(model, None, None)) == (
        WORDS_RULE,
        CLASS_RULE,
        "samples",
        "samples",
        "samples",
    )


def masked_beside_a_mean(output: Any, target: Any) -> torch.Tensor:
    wanted, mask = target
    loss: torch.Tensor = ((output - wanted) ** 2 * mask).sum() / mask.sum() + 0.1 * output.square().mean()
    size: torch.Tensor = output.abs().sum()
    return loss + 1e-3 * size


def against_each_other(output: Any, target: Any) -> torch.Tensor:
    wanted, _ = target
    return F.mse_loss(output, wanted) + F.cross_entropy(output @ wanted.T, torch.arange(len(output)))


def test_a_mean_over_a_mask_beside_one_over_samples_and_a_sum() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(SAMPLES, WIDTH)
    mask = (torch.arange(SAMPLES)[:, None] > torch.arange(WIDTH)).float()
    batch = MicroBatch((x,), {}, (torch.randn(SAMPLES, WIDTH), mask), SAMPLES)
    loss = Loss(model, masked_beside_a_mean, None)
    assert terms_of(model, batch, loss) == (Counted(argument="target", tensor=1), "samples", "sum")
    assert terms_of(model, batch, Loss(model, against_each_other, None)) == ()


def test_partition_finds_the_terms_and_says_so() -> None:
    model, batch = pretraining()
    for example in (batch, uneven(batch)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan = pt.partition(model, example, gpus=2, mesh={"pp": 2}, microbatches=4)
        assert plan.training.loss_rule == LossRule(loss="", how="terms", terms=(WORDS_RULE, CLASS_RULE))
        assert any("adds up 2 terms" in line for line in plan.why)
        assert Plan.model_validate_json(plan.model_dump_json()).training.loss_rule == plan.training.loss_rule


# -- on ranks


def trained(plan: Plan, model: nn.Module, batch: dict[str, torch.Tensor], loss_fn: Any = None) -> dict[str, Any]:
    with pt.materialize(plan, model, loss_fn=loss_fn) as stage:
        inputs, target = (batch, None) if loss_fn is None else (batch["tokens"], (batch["labels"], batch["next_label"]))
        args, kwargs = as_call(inputs)
        mine = Cutter().cut(args, kwargs, target, stage.dp_size)[stage.dp_rank]
        given = mine.kwargs or mine.args
        with torch.no_grad():
            before = float(stage.eval_loss(given, mine.target))
        loss = float(stage.train_step(given, mine.target))
        output = stage.last_output
        gradients = {name: one.grad.clone() for name, one in stage.named_parameters() if one.grad is not None}
        return {"before": before, "loss": loss, "gradients": gradients, "output": output}


def both_kinds(output: Any, target: Any) -> torch.Tensor:
    words, follows = output
    loss: torch.Tensor = F.cross_entropy(words.flatten(0, 1), target[0].flatten())
    return loss + 0.5 * F.cross_entropy(follows, target[1])


@pytest.mark.parametrize("loss_fn", [None, both_kinds])
@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (1, 2), (2, 2), (1, 1)])
def test_loss_and_gradients_are_those_of_the_whole_batch(ranks: RankPool, pp: int, dp: int, loss_fn: Any) -> None:
    model, batch = pretraining()
    example = batch if loss_fn is None else {"tokens": batch["tokens"]}
    plan = plan_of(model, example, pp=pp, dp=dp, microbatches=4 // dp, cuts=["layers.1.0"][: pp - 1])
    terms: tuple[Any, ...] = (WORDS_RULE, CLASS_RULE)
    if loss_fn is not None:
        terms = tuple(Counted(argument="target", tensor=k, other_than=-100) for k in range(2))
    rule = LossRule(loss="both_kinds" if loss_fn else "", how="terms", terms=terms)
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"loss_rule": rule})})
    whole, given = copy.deepcopy(model), uneven(batch)
    if loss_fn is None:
        expected = whole(**given)["loss"]
    else:
        expected = both_kinds(whole(given["tokens"]), (given["labels"], given["next_label"]))
    expected.backward()
    found = ranks.run(pp * dp, trained, plan, model, given, loss_fn)
    for rank in found:
        assert rank["loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
        assert rank["before"] == pytest.approx(float(expected.detach()), rel=1e-6)
    gradients = {name: one for rank in found for name, one in rank["gradients"].items()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)
    if loss_fn is None and dp == 1:  # no average of losses over parts is that of the batch
        assert len(found[-1]["output"]["loss"]) == 4 and found[-1]["output"]["logits"].shape[0] == SAMPLES


def test_a_batch_without_one_of_the_terms_is_refused(ranks: RankPool) -> None:
    model, batch = pretraining()
    plan = plan_of(model, batch, pp=1, dp=1, microbatches=4)
    rule = LossRule(loss="", how="terms", terms=(WORDS_RULE, "samples"))
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"loss_rule": rule})})
    del batch["next_label"]
    with pytest.raises(Exception, match="adds up 1 terms with gradients, and the plan found 2"):
        ranks.run(1, trained, plan, model, batch)


class AddedOnTheWay(Pretraining):
    """Its layers' terms are one number by the time that a later stage has it."""

    def forward(self, tokens: torch.Tensor, labels: Any = None, next_label: Any = None) -> Any:
        x, aux = self.words(tokens), torch.zeros(())
        for layer in self.layers:
            x = x + layer(x)
            aux = aux + 0.1 * x.square().mean()
        words, follows = self.to_words(x), self.to_class(x[:, 0])
        loss = F.cross_entropy(words.flatten(0, 1), labels.flatten())
        return {"loss": loss + F.cross_entropy(follows, next_label) + aux}


def test_terms_that_an_earlier_stage_adds_up_are_one_there(ranks: RankPool) -> None:
    torch.manual_seed(0)
    model, (_, batch) = AddedOnTheWay(), pretraining()
    plan = pt.partition(model, batch, gpus=2, pin={"to_words": 1, "layers.1.0": 0}, mesh={"pp": 2}, microbatches=4)
    means = ("samples", "samples", "samples")
    rule = plan.training.loss_rule
    assert rule is not None and rule.terms == (WORDS_RULE, CLASS_RULE, *means)
    assert rule.received[:2] == rule.terms[:2] and 1 <= len(rule.received[2:]) < 3
    whole, given = copy.deepcopy(model), uneven(batch)
    expected = whole(**given)["loss"]
    expected.backward()
    found = ranks.run(2, trained, plan, model, given)
    assert found[0]["loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
    gradients = {name: one for rank in found for name, one in rank["gradients"].items()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)
