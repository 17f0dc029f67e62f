"""`verify`: one device's numbers on the ranks, and a difference that is told."""

from __future__ import annotations

import cloudpickle
import models
import pytest
import torch

import partitioner as pt
from partitioner.losses import Loss
from partitioner.microbatches import Cutter
from partitioner.selfcheck import worst_difference
from partitioner.verification import as_it_was, compared, on_one_device


def test_the_worst_difference_is_relative_to_the_largest_entry() -> None:
    expected = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([100.0]), "zero": torch.zeros(2)}
    found = {"a": torch.tensor([1.0, -2.002]), "b": torch.tensor([100.0]), "zero": torch.zeros(2)}
    error, whose = worst_difference(expected, found)
    assert whose == "a"
    assert error == pytest.approx(0.001, rel=1e-3)
    # A gradient that is truly zero is measured against 1e-4 of the largest one.
    found = {**expected, "zero": torch.tensor([1e-3, 0.0])}
    assert worst_difference(expected, found) == (pytest.approx(0.1), "zero")


@pytest.mark.parametrize("broken", ["missing", "extra", "not a number"])
def test_what_is_missing_or_not_a_number_is_an_infinite_difference(broken: str) -> None:
    expected = {"a": torch.ones(2)}
    found = {
        "missing": {},
        "extra": {"a": torch.ones(2), "b": torch.ones(1)},
        "not a number": {"a": torch.tensor([1.0, float("nan")])},
    }[broken]
    error, whose = worst_difference(expected, found)
    assert error == float("inf")
    assert whose == ("b" if broken == "extra" else "a")


@pytest.fixture(scope="module")
def tied() -> tuple[pt.Plan, models.Case, pt.Verification]:
    """One real run: a tied embedding at both ends, so on both ranks."""
    cloudpickle.register_pickle_by_value(models)
    case = models.build("tied")
    common = {"loss_fn": case.loss_fn, "example_target": case.target}
    plan = pt.partition(case.model, case.inputs, gpus=2, mesh={"pp": 2}, microbatches=4, **common)
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    result = pt.verify(plan, case.model, case.inputs, steps=3, **common)
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    return plan, case, result


def test_the_ranks_give_one_devices_numbers(tied: tuple[pt.Plan, models.Case, pt.Verification]) -> None:
    plan, _, result = tied
    assert result.passed
    assert max(result.loss_error, result.gradient_error, result.weight_error) <= 1e-5
    assert result.whole_batch_error is not None
    assert result.whole_batch_error <= 1e-5
    assert result.last_loss < result.loss
    assert result.predicted_step_s == plan.prediction.step_s
    assert result.measured_efficiency == pytest.approx(result.measured_speedup / 2)
    assert 0 < result.measured_bubble < 1


def test_the_page_shows_the_numbers(tied: tuple[pt.Plan, models.Case, pt.Verification]) -> None:
    _, _, result = tied
    text = str(result)
    assert "the same numbers as one device" in text
    assert f"{result.loss:.6f}" in text
    assert f"measured {result.measured_step_s * 1e3:.1f} ms" in text
    assert pt.Verification.model_validate_json(result.model_dump_json()) == result


def test_a_wrong_gradient_on_one_rank_does_not_pass(tied: tuple[pt.Plan, models.Case, pt.Verification]) -> None:
    plan, _, _ = tied

    def side(gradient: float) -> dict[str, object]:
        return {
            "losses": [2.0, 1.0],
            "gradients": {"w": torch.tensor([1.0, gradient])},
            "weights": {"w": torch.ones(2)},
            "whole": None,
            "step_s": [0.1, 0.1],
            "bubbles": [0.2, 0.2],
        }

    single = {**side(0.5), "step_s": 0.2}
    assert compared(plan, [side(0.5), side(0.5)], single, 2, ()).passed
    wrong = compared(plan, [side(0.5001), side(0.5001)], single, 2, ())
    assert not wrong.passed
    assert wrong.worst_gradient == "w"
    # Two ranks that hold the same parameter and disagree are wrong, whichever is right.
    assert not compared(plan, [side(0.5), side(0.5001)], single, 2, ()).passed


def test_ranks_that_had_no_processor_of_their_own_are_told(tied: tuple[pt.Plan, models.Case, pt.Verification]) -> None:
    """Of each rank the median after the first step, of these the least; below 0.97 the times are of the machine."""
    plan, _, result = tied
    assert result.processor_share is not None
    assert 0 < result.processor_share < 1.05
    side = {
        "losses": [1.0] * 4,
        "gradients": {},
        "weights": {},
        "whole": None,
        "step_s": [0.1] * 4,
        "bubbles": [0.2] * 4,
    }
    single = {**side, "step_s": 0.2}
    ranks = [{**side, "shares": [0.1, 0.99, 0.98, 0.97]}, {**side, "shares": [0.1, 0.6, 0.8, 0.9]}]
    busy = compared(plan, ranks, single, 4, ())
    assert busy.processor_share == 0.8
    text = " ".join(str(busy).split())
    assert "its own for 80.0% of its forwards and backwards: below 97%" in text
    assert "these times judge this machine, not the plan" in text
    quiet = compared(plan, ranks[:1], single, 4, ())
    assert "98.0% of its forwards and backwards" in str(quiet)
    assert "judge this machine" not in str(quiet)
    assert "processors" not in str(compared(plan, [{**side, "shares": [None] * 4}], single, 4, ()))


def test_dropout_is_compared_in_eval_mode_and_said() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8))
    inputs, target = torch.randn(8, 8), torch.randn(8, 8)
    common = {"loss_fn": torch.nn.functional.mse_loss, "example_target": target}
    plan = pt.partition(model, inputs, gpus=2, mesh={"pp": 2}, microbatches=2, **common)
    result = pt.verify(plan, model, inputs, steps=2, **common)
    assert result.passed
    assert any("eval mode" in note for note in result.notes)
    assert model.training


def test_a_plan_of_another_model_is_refused_before_any_rank_starts(
    tied: tuple[pt.Plan, models.Case, pt.Verification],
) -> None:
    plan, _, _ = tied
    other = torch.nn.Linear(3, 3)
    with pytest.raises(pt.PlanMismatchError, match=plan.profile.fingerprint):
        pt.verify(plan, other, torch.randn(8, 3))


def test_a_plan_for_inference_is_refused(tied: tuple[pt.Plan, models.Case, pt.Verification]) -> None:
    plan, case, _ = tied
    training = plan.training.model_copy(update={"objective": "throughput", "schedule": "auto"})
    served = pt.solve(plan.profile, plan.cluster, training)
    with pytest.raises(pt.ArgumentError, match=r"plan is for inference .* compares training steps"):
        pt.verify(served, case.model, case.inputs)


def test_weights_are_those_of_the_fifth_step_however_many_are_timed(
    tied: tuple[pt.Plan, models.Case, pt.Verification],
) -> None:
    plan, case, _ = tied
    loss = Loss(case.model, case.loss_fn, None)

    def weights(steps: int) -> dict[str, torch.Tensor]:
        with as_it_was(case.model):
            return on_one_device(plan, case.model, case.inputs, case.target, loss, Cutter(), steps, 0.01)["weights"]

    after = {steps: weights(steps) for steps in (4, 5, 7)}
    assert worst_difference(after[5], after[7])[0] < 1e-6 < worst_difference(after[4], after[5])[0]


@pytest.mark.parametrize("as_tuple", [False, True])
def test_loss_weight_gets_inputs_in_the_form_of_the_batch(
    tied: tuple[pt.Plan, models.Case, pt.Verification], as_tuple: bool
) -> None:
    plan, case, _ = tied
    [tensor] = case.args
    seen = set()

    def weight(inputs: object, target: object) -> float:
        seen.add(type(inputs))
        return 1.0

    with as_it_was(case.model):
        inputs = (tensor,) if as_tuple else tensor
        loss = Loss(case.model, case.loss_fn, weight)
        on_one_device(plan, case.model, inputs, case.target, loss, Cutter(), 2, 0.01)
    assert seen == {tuple if as_tuple else torch.Tensor}
