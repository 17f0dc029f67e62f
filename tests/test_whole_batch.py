"""The loss of a batch against those of its micro-batches: rules are found, and where there is none it is said."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Case
from plans import plan_for
from torch import nn
from torch.nn import functional as F

import partitioner as pt
from partitioner.errors import ArgumentError, LossWarning
from partitioner.losses import Loss
from partitioner.microbatches import Cutter, MicroBatch
from partitioner.specs import Counted, LossRule
from partitioner.whole_batch import compare

SAMPLES, WIDTH = 12, 6


def batch_of(target: Any, **more: Any) -> MicroBatch:
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    return MicroBatch((x,), more, target, SAMPLES)


def uneven_mask() -> torch.Tensor:
    return torch.arange(SAMPLES)[:, None] > 2 * torch.arange(WIDTH)


def labels(padding: int) -> torch.Tensor:
    return torch.where(uneven_mask(), torch.arange(1, WIDTH + 1).expand(SAMPLES, WIDTH), padding)


def masked_mean(output: Any, target: Any) -> torch.Tensor:
    wanted, mask = target
    return ((output - wanted) ** 2 * mask).sum() / mask.sum()


def against_each_other(output: Any, target: Any) -> torch.Tensor:
    return F.cross_entropy(output @ target.T, torch.arange(len(output)))


def per_position(output: Any, target: Any, *, ignore_index: int = -100) -> torch.Tensor:
    logits = output[:, :, None] * torch.linspace(-1, 1, 7)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=ignore_index)


def next_position(output: Any, target: Any) -> torch.Tensor:
    return per_position(output[:, :-1], target[:, 1:], ignore_index=0)


LOSSES: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "mean of a mask": (
        masked_mean,
        lambda: (torch.ones(SAMPLES, WIDTH), uneven_mask()),
        Counted(argument="target", tensor=1),
    ),
    "mean of weights": (
        masked_mean,
        lambda: (torch.ones(SAMPLES, WIDTH), uneven_mask() * torch.linspace(0.5, 2, WIDTH)),
        Counted(argument="target", tensor=1),
    ),
    "what is not 0 in measurements": (
        lambda output, target: ((output - target).abs() * (target != 0)).sum() / (target != 0).sum(),
        lambda: torch.where(uneven_mask(), torch.linspace(-2, 2, WIDTH), 0.0),
        Counted(argument="target", other_than=0),
    ),
    "a sum": (lambda output, target: ((output - target) ** 2).sum(), lambda: torch.ones(SAMPLES, WIDTH), "sum"),
    "padding of 0": (
        lambda output, target: per_position(output, target, ignore_index=0),
        lambda: labels(0),
        Counted(argument="target", other_than=0),
    ),
    "padding of 0, shifted": (next_position, lambda: labels(0), Counted(argument="target", other_than=0, shifted=True)),
    "padding of -1": (
        lambda output, target: per_position(output, target, ignore_index=-1),
        lambda: labels(-1),
        Counted(argument="target", other_than=-1),
    ),
    "labels that do not count": (lambda output, target: output.square().mean(), lambda: labels(-100), "samples"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("count", [3, 5])
def test_what_the_loss_is_a_mean_over_is_found(name: str, count: int) -> None:
    loss_fn, target, expected = LOSSES[name]
    torch.manual_seed(3)
    model, batch = nn.Linear(WIDTH, WIDTH), batch_of(target())
    found = compare(model, batch, None, Cutter(), count, Loss(model, loss_fn, None))
    assert found is not None and not found.holds and found.how == expected
    whole = float(loss_fn(model(*batch.args), batch.target).detach())
    assert found.whole == pytest.approx(whole, rel=1e-6)
    assert found.parts != pytest.approx(whole, rel=2e-4)  # NaN where one micro-batch is padding only

    rule = LossRule(loss=Loss(model, loss_fn, None).name, how=expected)
    parts = Cutter().cut(batch.args, {}, batch.target, count)
    loss = Loss(model, loss_fn, None, rule)
    weights = loss.weights(parts, [part.args[0] for part in parts])
    total = 1.0 if loss.is_sum({}) else sum(weights)
    values = [float(loss.of(model(*part.args), part.target).detach()) for part in parts]
    made = sum(value * weight for value, weight in zip(values, weights, strict=True) if weight) / total
    assert made == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [
        (nn.MSELoss(), torch.ones(SAMPLES, WIDTH)),
        (functools.partial(per_position, ignore_index=2), labels(2)),
        (nn.MSELoss(reduction="sum"), torch.ones(SAMPLES, WIDTH)),
    ],
)
def test_losses_that_tell_their_weights_hold(loss_fn: Any, target: Any) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    found = compare(model, batch_of(target), None, Cutter(), 5, Loss(model, loss_fn, None))
    assert found is not None and found.holds and found.parts == pytest.approx(found.whole, rel=1e-5)


def test_of_rules_that_nearly_fit_the_nearest_is_taken() -> None:
    """Classes other than 0 are nearly in the ratio of the mask: 20 of 30 and 41 of 60, the losses of parts alike."""
    mask = torch.zeros(2, 60)
    mask[0, :30], mask[1, :60] = 1, 1
    classes = torch.zeros(2, 60, dtype=torch.long)
    classes[0, :20], classes[1, :41] = 1, 1
    wanted = torch.tensor([1.0, 1.005])

    def loss_fn(output: Any, target: Any) -> torch.Tensor:
        _, counts, values = target
        return (values[:, None] * counts + 0 * output.sum()).sum() / counts.sum()

    batch = MicroBatch((torch.ones(2, WIDTH),), {}, (classes, mask, wanted), 2)
    model = nn.Linear(WIDTH, WIDTH)
    found = compare(model, batch, None, Cutter(), 2, Loss(model, loss_fn, None))
    assert found is not None
    assert found.how == Counted(argument="target", tensor=1)


def test_a_loss_that_compares_samples_has_no_rule() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    found = compare(
        model, batch_of(torch.randn(SAMPLES, WIDTH)), None, Cutter(), 3, Loss(model, against_each_other, None)
    )
    assert found is not None and not found.holds and found.how is None


class Own(nn.Module):
    """A loss of its own, of a mask among its arguments; it counts its forwards, and some of its parts are random."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)
        )
        self.calls = 0

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"loss": (self.body(x) ** 2 * mask).sum() / mask.sum() + self.calls}


def test_the_models_own_loss_is_compared_without_a_trace() -> None:
    model, batch = Own(), batch_of(None, mask=uneven_mask())
    before, drawn = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    found = compare(model, batch, None, Cutter(), 4, Loss(model, None, None))
    assert found is not None and found.how == Counted(argument="mask")
    assert model.calls == 0 and model.training and model.body[1].training
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_is_random_even_in_eval_mode_is_not_told_about() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.randn_like(x))

    model, drawn = Noisy(WIDTH, WIDTH), torch.get_rng_state()
    assert (
        compare(model, batch_of(torch.ones(SAMPLES, WIDTH)), None, Cutter(), 3, Loss(model, nn.MSELoss(), None)) is None
    )
    assert torch.equal(drawn, torch.get_rng_state())


@pytest.fixture(scope="module")
def case() -> Case:
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(2))
    return Case(nn.Sequential(*layers), x, None, None)


@pytest.fixture(scope="module")
def profile(case: Case) -> pt.Profile:
    return plan_for(Case(case.model, case.inputs, torch.ones(SAMPLES, WIDTH), nn.MSELoss()), pp=2).profile


def planned(case: Case, profile: pt.Profile, loss_fn: Any, target: Any, **more: Any) -> pt.Plan:
    return pt.partition(
        case.model,
        case.inputs,
        gpus=2,
        mesh={"pp": 2, "dp": 1},
        microbatches=4,
        schedule="gpipe",
        profile=profile,
        loss_fn=loss_fn,
        example_target=target,
        **more,
    )


def test_the_plan_keeps_the_rule_and_says_so(case: Case, profile: pt.Profile) -> None:
    target = (torch.ones(SAMPLES, WIDTH), uneven_mask())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = planned(case, profile, masked_mean, target)
    assert plan.training.loss_rule == LossRule(loss="masked_mean", how=Counted(argument="target", tensor=1))
    whole = float(masked_mean(case.model(case.inputs), target).detach())
    assert any(f"{whole:.6g}" in line and "the sum of target (tensor 1)" in line for line in plan.why)
    assert pt.Plan.model_validate_json(plan.model_dump_json()).training.loss_rule == plan.training.loss_rule
    with pytest.raises(ArgumentError, match=r"masked_mean.*is run with loss_fn=MSELoss"):
        Loss(case.model, nn.MSELoss(), None, plan.training.loss_rule)
    mean = planned(case, profile, nn.MSELoss(), target[0])
    assert mean.training.loss_rule is None and not any("the loss of the batch" in line for line in mean.why)


EVEN: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "a mask": (masked_mean, (torch.ones(SAMPLES, WIDTH), torch.ones(SAMPLES, WIDTH) > 0), LOSSES["mean of a mask"]),
    "a mask of samples": (
        lambda output, target: ((output - target[0]).square().mean(1) * target[1]).sum() / target[1].sum(),
        (torch.ones(SAMPLES, WIDTH), torch.ones(SAMPLES)),
        (None, lambda: (torch.ones(SAMPLES, WIDTH), uneven_mask()[:, 3].float()), Counted(argument="target", tensor=1)),
    ),
    "measurements": (
        LOSSES["what is not 0 in measurements"][0],
        torch.linspace(1, 2, WIDTH).expand(SAMPLES, WIDTH),
        LOSSES["what is not 0 in measurements"],
    ),
    "words": (LOSSES["padding of 0"][0], torch.arange(1, WIDTH + 1).repeat(SAMPLES, 1), LOSSES["padding of 0"]),
    "words, by hand": (
        lambda output, target: (output.square() * (target != 0)).sum() / (target != 0).sum(),
        torch.arange(1, WIDTH + 1).repeat(SAMPLES, 1),
        LOSSES["padding of 0"],
    ),
    "words, another padding": (
        lambda output, target: per_position(output, target, ignore_index=5),
        torch.arange(WIDTH).repeat(SAMPLES, 1) % 4,
        (None, lambda: labels(5), Counted(argument="target", other_than=5)),
    ),
    "lengths": (
        lambda output, target: (output.sum(1) * target).sum() / target.sum(),
        torch.full((SAMPLES,), 9),
        (None, lambda: torch.arange(1, SAMPLES + 1), Counted(argument="target")),
    ),
    "nothing": (nn.MSELoss(), torch.ones(SAMPLES, WIDTH), (None, lambda: torch.randn(SAMPLES, WIDTH), None)),
}


@pytest.mark.parametrize("name", EVEN)
def test_what_the_loss_is_a_mean_over_is_found_though_the_example_has_as_much_in_each_part(
    name: str, case: Case, profile: pt.Profile
) -> None:
    """A later batch has not, and its parts make up its loss."""
    loss_fn, target, (_, later, expected) = EVEN[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule = planned(case, profile, loss_fn, target).training.loss_rule
    assert (None if rule is None else rule.how) == expected
    batch, loss = batch_of(later()), Loss(case.model, loss_fn, None, rule)
    parts = Cutter().cut(batch.args, {}, batch.target, 4)
    weights = torch.tensor(loss.weights(parts, [part.args[0] for part in parts]))
    values = torch.stack([loss.of(case.model(*part.args), part.target).detach() for part in parts])
    whole = loss_fn(case.model(*batch.args), batch.target).detach()
    assert weights.unique().numel() > 1 or expected is None
    torch.testing.assert_close((values.nan_to_num() * weights).sum() / weights.sum(), whole)


def test_what_no_tensor_of_the_batch_tells_is_warned_of(case: Case, profile: pt.Profile) -> None:
    """A mean over what a function makes of the mask, as much of it in each micro-batch of the example."""
    target = torch.ones(SAMPLES, WIDTH), torch.ones(SAMPLES, WIDTH)

    def by_squares(output: Any, target: Any) -> torch.Tensor:
        counts = target[1].mean(1, keepdim=True).square()
        return ((output - target[0]).square() * counts).sum() / counts.sum()

    with pytest.warns(LossWarning, match=r"other numbers of what counts in target \(tensor 1\) it is none"):
        planned(case, profile, by_squares, target)


def test_boxes_of_which_each_picture_of_the_example_has_as_many_are_warned_of(case: Case, profile: pt.Profile) -> None:
    """A loss of detection is a mean over all boxes of the batch, which no tensor of it tells."""
    target = [{"labels": torch.arange(4) % 3, "boxes": torch.rand(4, WIDTH), "size": torch.ones(2)}] * SAMPLES

    def matched(output: Any, target: Any) -> torch.Tensor:
        near = [(one["boxes"] - row).abs().sum() for row, one in zip(output, target, strict=True)]
        return torch.stack(near).sum() / sum(len(one["labels"]) for one in target)

    def per_picture(output: Any, target: Any) -> torch.Tensor:
        near = [(one["boxes"] - row).abs().mean() for row, one in zip(output, target, strict=True)]
        return torch.stack(near).mean()

    with pytest.warns(LossWarning, match=r"other numbers of what counts in the lists of target it is none"):
        planned(case, profile, matched, target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule = planned(case, profile, per_picture, target).training.loss_rule
    assert rule is not None and rule.how == "samples"  # not over the classes that are in the target


def test_a_loss_without_a_rule_warns_unless_that_is_accepted(case: Case, profile: pt.Profile) -> None:
    target = torch.randn(SAMPLES, WIDTH)
    with pytest.warns(LossWarning, match=r"and its 4 micro-batches make .*loss_weight='samples'") as warned:
        planned(case, profile, against_each_other, target)
    assert warned[0].filename == __file__ or "test_whole_batch" in warned[0].filename
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = planned(case, profile, against_each_other, target, loss_weight="samples")
    assert plan.training.loss_rule == LossRule(loss="against_each_other", how="samples")
    with pytest.warns(LossWarning, match="under loss_weight; it is a mean over samples"):
        planned(case, profile, nn.MSELoss(), target, loss_weight=lambda inputs, target: float(target.abs().sum()))


def test_a_function_that_weighs_is_asked_for_again(case: Case, profile: pt.Profile) -> None:
    target = (torch.ones(SAMPLES, WIDTH), uneven_mask())
    plan = planned(case, profile, masked_mean, target, loss_weight=lambda inputs, target: target[1].sum())
    assert plan.training.loss_rule is not None and plan.training.loss_rule.how == "given"
    with pytest.raises(ArgumentError, match="pass loss_weight= here too"):
        Loss(case.model, masked_mean, None, plan.training.loss_rule)
    with pytest.raises(ArgumentError, match="'mean'"):
        planned(case, profile, nn.MSELoss(), target[0], loss_weight="mean")


def two_kinds(output: Any, target: Any) -> torch.Tensor:
    words, classes = target
    return per_position(output, words) + F.cross_entropy(output, classes)


def not_taken_apart(output: Any, target: Any) -> torch.Tensor:
    return two_kinds(output, target).log().exp()


def words_alone(output: Any, target: Any) -> torch.Tensor:
    return per_position(output, target[0])


def test_labels_of_two_kinds_are_told_of_before_training_where_they_count_differently(
    case: Case, profile: pt.Profile
) -> None:
    """The example has as many valid ones of both in each micro-batch; a later batch has not."""
    target = torch.arange(SAMPLES * WIDTH).reshape(SAMPLES, WIDTH) % 7, torch.arange(SAMPLES) % WIDTH
    with pytest.warns(LossWarning, match=r"what counts in target it is.*refuses.*loss_weight='samples'"):
        planned(case, profile, not_taken_apart, target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert planned(case, profile, two_kinds, target, loss_weight="samples").training.loss_rule is not None
        plan = planned(case, profile, two_kinds, target)
        assert plan.training.loss_rule is not None and plan.training.loss_rule.how == "terms"
        plan = planned(case, profile, words_alone, target)
    rule = plan.training.loss_rule
    assert rule is not None and rule.how == Counted(argument="target", other_than=-100)
    target[0][:2, 1:] = -100
    whole = float(words_alone(case.model(case.inputs), target).detach())
    loss = Loss(case.model, words_alone, None, rule)
    parts = Cutter().cut((case.inputs,), {}, target, 4)
    values = [float(loss.of(case.model(*part.args), part.target).detach()) for part in parts]
    weights = loss.weights(parts, [part.args for part in parts])
    assert sum(value * weight for value, weight in zip(values, weights, strict=True)) == pytest.approx(
        whole * sum(weights), rel=1e-6
    )


def regression_beside_words(output: Any, target: Any) -> torch.Tensor:
    return per_position(output, target) + output.square().mean()


def test_a_term_beside_one_over_valid_labels_is_found_though_the_example_has_no_padding(
    case: Case, profile: pt.Profile
) -> None:
    target = torch.arange(SAMPLES * WIDTH).reshape(SAMPLES, WIDTH) % 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule = planned(case, profile, regression_beside_words, target).training.loss_rule
    assert rule is not None and rule.terms == (Counted(argument="target", other_than=-100), "samples")


def recognition(output: Any, target: Any) -> torch.Tensor:
    """Connectionist temporal classification: -100 would be a letter like any other."""
    texts, lengths = target
    steps = output[None].expand(9, -1, -1).log_softmax(2)
    return F.ctc_loss(steps, texts, torch.full_like(lengths, 9), lengths)


def test_labels_that_a_loss_does_not_ignore_are_never_ignored_on_trial(
    case: Case, profile: pt.Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is an exact mean over samples, and given other labels than its own it would read beside its tables."""
    target = torch.arange(SAMPLES * 3).reshape(SAMPLES, 3) % 5 + 1, torch.arange(SAMPLES) % 3 + 1

    def watched(output: Any, target: Any) -> torch.Tensor:
        print(int(target[0].min()))  # what it appended to a list would be taken back after the trial
        return recognition(output, target)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert planned(case, profile, watched, target).training.loss_rule is None
    assert min(map(int, capsys.readouterr().out.split())) == 0


def as_given() -> nn.Module:
    """A model whose output is its input."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.eye_(model.weight)
    return model


def test_a_tensor_that_fits_two_parts_by_chance_is_no_rule() -> None:
    """Its sums over the halves are what a root of a mean would need, over thirds they are not."""
    x = torch.linspace(1, 3, SAMPLES)[:, None].expand(SAMPLES, WIDTH)

    def root(output: Any, target: Any) -> torch.Tensor:
        return output.square().mean().sqrt()

    whole, first, second = (float(root(part, None)) for part in (x, x[: SAMPLES // 2], x[SAMPLES // 2 :]))
    share = (whole - second) / (first - second)
    weights = torch.tensor([share, 1 - share], dtype=torch.float64).repeat_interleave(SAMPLES // 2)
    batch = MicroBatch((x,), {}, weights, SAMPLES)
    found = compare(as_given(), batch, x, Cutter(), 2, Loss(nn.Identity(), root, None))
    assert found is not None and found.num_parts == 2 and not found.holds and found.how is None


def test_a_difference_of_some_hundred_thousandths_is_told() -> None:
    """Masks that nearly have as many entries in each part: of a later batch they will not."""
    x = torch.linspace(1, 3, SAMPLES)[:, None].expand(SAMPLES, WIDTH)
    mask = torch.ones(SAMPLES, 4000)
    mask[0, :3] = 0
    batch = MicroBatch((x,), {}, (torch.zeros(SAMPLES, 4000), mask), SAMPLES)

    def masked(output: Any, target: Any) -> torch.Tensor:
        return masked_mean(output.sum(1, keepdim=True), target)

    found = compare(as_given(), batch, x, Cutter(), 4, Loss(nn.Identity(), masked, None))
    assert found is not None and not found.holds and abs(found.parts / found.whole - 1) < 1e-4
    assert found.how == Counted(argument="target", tensor=1)


def test_targets_that_are_lists_of_samples_are_compared(case: Case) -> None:
    """Parts have fewer tensors than the batch: none of those that they lack is what the loss is a mean over."""
    target = [{"boxes": torch.rand(k % 5 + 1, WIDTH), "classes": torch.arange(k % 5 + 1)} for k in range(SAMPLES)]

    def matched(output: Any, target: Any) -> torch.Tensor:
        boxes = sum(len(one["boxes"]) for one in target)
        near = [(one["boxes"] - row).abs().sum() for row, one in zip(output, target, strict=True)]
        return torch.stack(near).sum() / boxes

    batch = batch_of(target)
    found = compare(case.model, batch, batch.args[0], Cutter(), 4, Loss(case.model, matched, "samples"))
    assert found is not None and not found.holds and found.how is None


def test_a_weight_that_fails_is_told_and_not_replaced(case: Case, profile: pt.Profile) -> None:
    """Though the loss adds up terms that could be weighted one by one."""
    target = torch.arange(SAMPLES * WIDTH).reshape(SAMPLES, WIDTH) % 7, torch.arange(SAMPLES) % WIDTH
    with pytest.raises(ArgumentError, match="-1"):
        planned(case, profile, two_kinds, target, loss_weight=lambda inputs, target: -1.0)
