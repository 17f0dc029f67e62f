"""The weighted sum of the micro-batches' losses is the loss of the whole batch, for the losses that people use."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import partitioner as pt
from partitioner.errors import ArgumentError, LossWarning
from partitioner.losses import Loss, is_shifted, own_loss
from partitioner.microbatches import Cutter
from partitioner.specs import Counted, LossRule


def in_parts(loss: Loss, model: Callable[..., Any], args: Any, kwargs: Any, target: Any, count: int) -> torch.Tensor:
    parts = Cutter().cut(args, kwargs, target, count)
    weights = loss.weights(parts, [part.args or part.kwargs for part in parts])
    total = 1.0 if loss.is_sum(parts[0].kwargs) else sum(weights)
    values = [
        loss.of(model(*part.args, **part.kwargs), part.target) * (weight / total)
        for part, weight in zip(parts, weights, strict=True)
        if weight
    ]
    return torch.stack(values).sum() if values else torch.tensor(float("nan"))


CLASSES = 5
LOSSES: dict[str, Any] = {
    "mean over samples": nn.CrossEntropyLoss(),
    "function": F.cross_entropy,
    "ignore_index": nn.CrossEntropyLoss(ignore_index=2),
    "partial ignore_index": functools.partial(F.cross_entropy, ignore_index=1),
    "class weights": nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 2.0, 0.5, 3.0])),
    "class weights, ignore": nn.CrossEntropyLoss(weight=torch.arange(1.0, 6.0), ignore_index=3),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "partial sum": functools.partial(F.cross_entropy, reduction="sum"),
    "lambda": lambda output, target: F.cross_entropy(output, target),
}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15, deadline=None)
@given(size=st.integers(2, 9), count=st.integers(1, 4), seed=st.integers(0, 99), masked=st.booleans())
def test_parts_add_up_to_the_whole(name: str, size: int, count: int, seed: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, CLASSES, 3, generator=generator)
    target = torch.randint(0, CLASSES, (size, 3), generator=generator)
    if masked and not isinstance(LOSSES[name], functools.partial) and "ignore" not in name:
        target[torch.rand(size, 3, generator=generator) < 0.6] = -100
    whole = LOSSES[name](x, target)
    got = in_parts(Loss(nn.Identity(), LOSSES[name], None), nn.Identity(), (x,), {}, target, count)
    torch.testing.assert_close(got, whole, equal_nan=True)


def test_regression_weighs_uneven_micro_batches_by_samples() -> None:
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    got = in_parts(Loss(nn.Identity(), nn.MSELoss(), None), nn.Identity(), (x,), {}, y, 2)
    torch.testing.assert_close(got, F.mse_loss(x, y))


def test_the_users_own_weight_wins() -> None:
    def masked_mean(output: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        values, mask = target
        return ((output - values) ** 2 * mask).sum() / mask.sum()

    x, y, mask = torch.randn(7), torch.randn(7), torch.tensor([1.0, 0, 1, 1, 0, 0, 1])
    loss = Loss(nn.Identity(), masked_mean, lambda inputs, target: target[1].sum())
    got = in_parts(loss, nn.Identity(), (x,), {}, (y, mask), 3)
    torch.testing.assert_close(got, masked_mean(x, (y, mask)))


def test_weights_that_make_no_sense_are_refused() -> None:
    parts = Cutter().cut((torch.zeros(4),), {}, torch.zeros(4), 2)
    with pytest.raises(ArgumentError, match="not negative"):
        Loss(nn.Identity(), nn.MSELoss(), lambda inputs, target: -1).weights(parts, [0, 0])
    two = {"labels": torch.tensor([1, -100, 2, 3]), "next_label": torch.arange(4)}
    model = nn.Identity()
    model.forward = lambda labels=None, next_label=None: None  # type: ignore[assignment, misc]
    with pytest.raises(
        ArgumentError, match=r"1, 2 valid labels in 'labels' but 2, 2 in 'next_label'.*loss_weight='samples'"
    ):
        Loss(model, None, None).weights(Cutter().cut((), two, None, 2), [0, 0])


def test_a_loss_is_found_where_models_put_it() -> None:
    zero = torch.zeros(())

    class Output:
        loss = zero

    assert own_loss(zero) is zero and own_loss({"loss": zero}) is zero and own_loss(Output()) is zero
    assert own_loss((zero, torch.zeros(3))) is zero
    with pytest.raises(ArgumentError, match=r"Tensor of shape \(3,\), which holds no loss.*example_target="):
        own_loss(torch.zeros(3))
    with pytest.raises(ArgumentError, match=r"shape \(4,\); a loss is one number"):
        Loss(nn.Identity(), nn.MSELoss(reduction="none"), None).of(torch.zeros(4), torch.zeros(4))


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration"]
)
def test_hugging_face_models_weigh_as_their_own_loss_does(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "GPT2LMHeadModel":
        config = transformers.GPT2Config(vocab_size=17, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    elif name == "T5ForConditionalGeneration":
        config = transformers.T5Config(
            vocab_size=17, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
    elif name == "LlamaForCausalLM":
        config = transformers.LlamaConfig(**small, intermediate_size=8, num_key_value_heads=2)
    else:
        config = transformers.BertConfig(**small, intermediate_size=8)
    model = getattr(transformers, name)(config).eval()
    assert is_shifted(model) == (name in ("LlamaForCausalLM", "GPT2LMHeadModel"))
    ids = torch.randint(1, 17, (5, 6))
    labels = ids.clone()
    labels[torch.rand(5, 6) < 0.5] = -100
    labels[:2, 0], labels[2:, 0] = 3, -100  # the first label does not count for a causal model
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        whole = model(input_ids=ids, labels=labels).loss
        got = in_parts(Loss(model, None, None), model, (), {"input_ids": ids, "labels": labels}, None, 3)
        torch.testing.assert_close(got, whole)
        num = (labels[..., 1:] != -100).sum()
        if name == "LlamaForCausalLM":
            kwargs = {"input_ids": ids, "labels": labels, "num_items_in_batch": num}
            torch.testing.assert_close(in_parts(Loss(model, None, None), model, (), kwargs, None, 3), whole)


def detection_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Over all entries, divided by how many hold an object: a mean over these where there are some."""
    objects = labels != 0
    return F.softplus(torch.where(objects, -output, output)).sum() / objects.sum().clamp(min=1)


def masked_mean(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    objects = labels != 0
    return (output.square() * objects).sum() / objects.sum().clamp(min=1)


@pytest.mark.parametrize("in_terms", [False, True])
def test_a_loss_where_nothing_counts_is_told_of_once_and_a_mean_over_nothing_is_not(in_terms: bool) -> None:
    how = Counted(argument="target", other_than=0.0)
    labels = torch.zeros(4, 3)
    for function in (detection_loss, masked_mean):
        rule = LossRule(loss="", how="terms", terms=(how,)) if in_terms else LossRule(loss="", how=how)
        loss = Loss(
            nn.Linear(2, 3),
            function,
            None,
            rule.model_copy(update={"loss": Loss(nn.Linear(2, 3), function, None).name}),
        )
        share = (0.0, 0.5) if in_terms else 0.0
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                with loss.watching():
                    output = torch.ones(4, 3, requires_grad=True) * 1
                assert float(loss.part(output, labels, share)) == 0
        told = [str(one.message) for one in seen if one.category is LossWarning]
        assert len(told) == (function is detection_loss)
        assert all("entries of target other than 0) has a loss of 15.75" in text for text in told)


def test_a_loss_with_parameters_of_its_own_is_refused_before_anything_is_measured() -> None:
    model, loss = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 1))
    with pytest.raises(ArgumentError, match="loss_fn has parameters to train: make it a part of the model"):
        pt.partition(model, torch.zeros(4, 4), gpus=2, loss_fn=loss, example_target=torch.zeros(4))
