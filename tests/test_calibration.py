"""Calibration against closed forms: shrunken means, conditional Gaussians, what lies beyond all published errors."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioner.calibration import Calibration, Distances, Evidence, Place, distances

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

import one_run

EVEN = Distances(*[2.0] * 10, repeat=0.25, usual=0.5)
HERE = Place(tp=2, dp=4, microbatch=2)


def told(*runs: tuple[Place, float], fitted: Distances = EVEN) -> Calibration:
    return Calibration([Evidence(place, log_ratio) for place, log_ratio in runs], fitted)


def test_without_runs_nothing_moves() -> None:
    assert told().at(HERE) == (1.0, 1.0)


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_runs_of_one_layout_are_shrunk_as_a_random_effect(count: int) -> None:
    """t / (t + s / n) of their mean: t between layouts, s within (Laird & Ware 1982, equation 3.3 of one effect)."""
    logs = [0.1 + 0.01 * k for k in range(count)]
    between, within = 1 - EVEN.repeat, EVEN.repeat
    share = between / (between + within / count)
    found = told(*((HERE, log) for log in logs)).at(HERE)
    assert found.factor == pytest.approx(math.exp(share * sum(logs) / count))
    assert found.band_share == pytest.approx(math.sqrt(1 - between * share))


def test_another_layout_moves_by_less() -> None:
    """tp and dp twice as large: two halves of a distance, at right angles."""
    found = told((HERE, 0.2)).at(HERE._replace(tp=4, dp=8))
    share = 0.75 * math.exp(-math.hypot(0.5, 0.5))
    assert found.factor == pytest.approx(math.exp(share * 0.2))
    assert found.band_share == pytest.approx(math.sqrt(1 - share**2))


def test_a_layout_unlike_all_runs_stays() -> None:
    assert told((HERE, 0.2)).at(HERE._replace(tp=2**40)) == pytest.approx((1.0, 1.0), abs=1e-6)


def test_told_as_the_conditional_of_a_joint_gaussian() -> None:
    """By the precision matrix of all four together, of which the answer's row is -P_ab / P_aa."""
    places = [HERE, HERE._replace(pp=2), HERE._replace(microbatch=8), HERE._replace(dp=1, num_microbatches=4)]
    logs = np.array([0.1, -0.05, 0.2])
    apart = [
        [sum((math.log2(a / b) / 2) ** 2 for a, b in zip(p, q, strict=True)) ** 0.5 for q in places] for p in places
    ]
    precision = np.linalg.inv(0.75 * np.exp(-np.array(apart)) + 0.25 * np.eye(4))
    found = told(*zip(places[1:], logs, strict=True)).at(places[0])
    assert math.log(found.factor) == pytest.approx(-precision[0, 1:] @ logs / precision[0, 0])
    assert found.band_share**2 == pytest.approx(1 / precision[0, 0])


def test_what_no_published_run_shows_is_common_to_all_layouts() -> None:
    """A run at twice its time and half more than the farthest: the surplus moves even layouts unlike it."""
    surplus = 0.4
    calibration = told((HERE, EVEN.usual + surplus))
    assert calibration.common == pytest.approx(surplus)
    assert math.log(calibration.at(HERE._replace(tp=2**40)).factor) == pytest.approx(surplus, abs=1e-6)
    assert math.log(calibration.at(HERE).factor) == pytest.approx(surplus + 0.75 * EVEN.usual)
    assert told((HERE, -EVEN.usual - surplus)).common == pytest.approx(-surplus)


def test_published_runs_are_scored_as_capacity_moves_them() -> None:
    """Each told from each other one, and from all others; some are further off than is usual."""
    places = [HERE, HERE._replace(tp=8), HERE._replace(dp=16), HERE._replace(microbatch=8)]
    logs = np.array([1.1, -0.1, 0.2, 0.9])
    found = one_run.errors(one_run.System("here", places, logs, ["a", "a", "b", "a"]), EVEN)

    def missed(which: int, others: list[int]) -> float:
        factor = told(*((places[k], logs[k]) for k in others)).at(places[which]).factor
        return abs(factor / math.exp(logs[which]) - 1)

    for k, model in enumerate(([1, 3], [0, 3], [], [0, 1])):
        others = [j for j in range(4) if j != k]
        assert found.one_run[k] == pytest.approx(np.mean([missed(k, [j]) for j in others]))
        assert found.all_runs[k] == pytest.approx(missed(k, others))
        if model:
            assert found.one_run_model[k] == pytest.approx(np.mean([missed(k, [j]) for j in model]))


places = st.tuples(
    st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 16]), st.sampled_from([1, 4])
).map(lambda sizes: Place(*sizes))
runs = st.lists(st.tuples(places, st.floats(-0.3, 0.3)), max_size=6)


@given(runs, st.tuples(places, st.floats(-0.3, 0.3)), places)
def test_a_run_more_never_widens_a_band(known: list, another: tuple, place: Place) -> None:
    fitted = distances()
    before, after = told(*known, fitted=fitted).at(place), told(*known, another, fitted=fitted).at(place)
    assert 0 < after.band_share <= before.band_share + 1e-9 <= 1 + 1e-9
