"""TensorBoard scalars, read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn_plans import drawn_plan
from test_report_document import slowed

pytestmark = pytest.mark.filterwarnings("ignore")  # TensorBoard's own, as it is imported


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    tags = found.Tags()
    if tags["scalars"]:
        return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in tags["scalars"]}
    return {
        tag: [(one.step, float(one.tensor_proto.float_val[0])) for one in found.Tensors(tag)] for tag in tags["tensors"]
    }


def test_predicted_and_measured_are_two_runs_of_the_same_tags(tmp_path: Path) -> None:
    plan = drawn_plan(num_replicas=2)
    steps = {step: slowed(plan, 1 + step / 10) for step in range(3)}
    with plan.scalars(tmp_path) as scalars:
        for step, timeline in steps.items():
            scalars.add(step, timeline)
    predicted, measured = read(tmp_path / "predicted"), read(tmp_path / "measured")
    assert predicted.keys() == measured.keys()
    for name in ("step_s", "throughput", "speedup", "efficiency"):
        expected = getattr(plan.prediction, name)
        assert predicted[f"partitioner/{name}"] == [(step, pytest.approx(expected, rel=1e-6)) for step in steps]
    assert predicted["partitioner/bubble"][0][1] == pytest.approx(plan.prediction.bubble_fraction)
    for step, timeline in steps.items():
        total_s = timeline.step_s + timeline.optimizer_s
        assert measured["partitioner/step_s"][step] == (step, pytest.approx(timeline.step_s))
        assert measured["partitioner/throughput"][step][1] == pytest.approx(plan.training.batch_size / total_s)
        speedup = plan.prediction.single_device_s / total_s
        assert measured["partitioner/efficiency"][step][1] == pytest.approx(speedup / plan.num_ranks)
        assert measured["partitioner/bubble"][step][1] == pytest.approx(timeline.bubble_fraction, rel=1e-5)
