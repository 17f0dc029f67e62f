"""Timeline: what each rank's time went into, computed by hand."""

import pytest

from partitioner.timeline import Span, Timeline

STEP = Timeline(
    (
        Span(0, "F", 0, 0, 10.0, 12.0),
        Span(0, "send", 0, 0, 12.0, 13.0),
        Span(1, "recv", 1, 0, 12.0, 13.0),
        Span(1, "F", 1, 0, 13.0, 14.0),
        Span(1, "B", 1, 0, 14.0, 16.0),
        Span(0, "recv", 0, 0, 16.0, 16.5),
        Span(0, "B", 0, 0, 16.5, 19.5),
        Span(0, "sync", 0, -1, 19.5, 20.0),
        Span(0, "optimizer", 0, -1, 20.0, 20.25),
        Span(1, "optimizer", 1, -1, 20.0, 20.75),
    ),
    num_ranks=2,
    measured=True,
)


def test_the_clock_need_not_start_at_zero_and_the_optimizer_is_apart():
    assert STEP.start_s == 10.0
    assert STEP.step_s == 10.0
    assert STEP.optimizer_s == 0.75


def test_compute_communication_and_idle_add_up_to_the_step():
    assert [STEP.busy_s(rank) for rank in range(2)] == [5.0, 3.0]
    assert [STEP.communication_s(rank) for rank in range(2)] == [1.0, 1.0]
    assert [STEP.idle_s(rank) for rank in range(2)] == [4.0, 6.0]
    assert STEP.bubble_fraction == pytest.approx(10.0 / 20.0)


def test_a_timeline_without_spans_took_no_time():
    empty = Timeline((), num_ranks=1, measured=False)
    assert (empty.step_s, empty.optimizer_s, empty.bubble_fraction) == (0.0, 0.0, 0.0)
