"""Plans side by side: the figures are theirs, and the difference is the one between them."""

from __future__ import annotations

from drawn_plans import drawn_plan, drawn_profile
from parsed_html import Parsed

from partitioner.report import Prose, Table
from partitioner.report.comparison import Comparison
from partitioner.report.wording import percent, seconds

FEW, MANY = drawn_plan(num_microbatches=8), drawn_plan(num_microbatches=8, schedule="zero-bubble")


def rows_of(comparison: Comparison, k: int = 0) -> dict[str, tuple[object, ...]]:
    table = [block for block in comparison.page().blocks if isinstance(block, Table)][k]
    return {str(row[0]): row[1:] for row in (*table.rows, table.total) if row}


def test_figures_are_those_of_the_plans_and_ratios_those_between_them() -> None:
    shown = rows_of(Comparison(("few", "many"), (FEW, MANY)))
    totals = [plan.prediction.step_s + plan.prediction.optimizer_s for plan in (FEW, MANY)]
    assert shown["step + optimizer"] == (*map(seconds, totals), f"{100 * (totals[1] / totals[0] - 1):+.1f} %")
    assert shown["schedule"] == ("1f1b", "zero-bubble", "")
    assert shown["bubble"][:2] == tuple(percent(plan.prediction.bubble_fraction) for plan in (FEW, MANY))


def test_losses_stand_side_by_side_and_end_at_the_efficiency() -> None:
    shown = rows_of(Comparison(("few", "many"), (FEW, MANY)), 1)
    assert shown["fill and drain"] == tuple(percent(plan.prediction.lost.fill_drain) for plan in (FEW, MANY))
    assert shown["left for the model"] == tuple(percent(plan.prediction.efficiency) for plan in (FEW, MANY))


def test_the_difference_is_said_with_its_largest_cause() -> None:
    said = Comparison(("few", "many"), (FEW, MANY)).difference(1)
    ratio = MANY.prediction.throughput / FEW.prediction.throughput - 1
    assert ratio > 0
    assert said.startswith(f"many is {percent(ratio)} faster than few")
    assert "a step less for fill and drain" in said
    assert Comparison(("a", "b"), (FEW, FEW)).difference(1) == "b is as fast as a"


def test_what_makes_plans_hard_to_compare_is_noted() -> None:
    other = drawn_plan(80, num_microbatches=16)
    notes = [block.lines for block in Comparison(("a", "b"), (FEW, other)).page().blocks if isinstance(block, Prose)][1]
    assert any("other costs of the same model" in note for note in notes)
    assert any("another batch" in note for note in notes)
    named = other.model_copy(update={"profile": drawn_profile(80).model_copy(update={"model": "Other"})})
    assert "another model" in str(Comparison(("a", "b"), (FEW, named)))


def test_more_than_two_are_each_compared_with_the_first() -> None:
    comparison = Comparison(("a", "b", "c"), (FEW, MANY, FEW))
    table = comparison.page().blocks[0]
    assert isinstance(table, Table)
    assert table.headers == ("figure", "a", "b", "c", "b to a", "c to a")
    Parsed(comparison._repr_html_())
    assert FEW.compare(MANY).names == ("this", "other")


def test_the_same_devices_with_other_links_are_still_compared() -> None:
    """Links of one machine are measured anew by every call: the difference is explained, and the links are noted."""
    slower = MANY.cluster.intra.model_copy(update={"seconds": tuple(2 * s for s in MANY.cluster.intra.seconds)})
    again = MANY.model_copy(update={"cluster": MANY.cluster.model_copy(update={"intra": slower})})
    comparison = Comparison(("few", "many"), (FEW, again))
    assert comparison.difference(1) == Comparison(("few", "many"), (FEW, MANY)).difference(1)
    assert "other figures of the same devices and links" in str(comparison).replace("\n      ", " ")
    assert "for other devices" not in str(comparison)
