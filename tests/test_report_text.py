"""What the terminal shows, compared with the numbers of the result itself."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from given import GiB, given_cluster, given_plan, given_profile

from partitioner.display import Shown
from partitioner.graph import CostGraph
from partitioner.plan import LostEfficiency, Plan
from partitioner.report import Bar, Facts, Page, Prose, Table, render
from partitioner.report.gantt import draw
from partitioner.report.losses import LOSSES, waterfall
from partitioner.report.pages import page_of
from partitioner.report.wording import percent, seconds
from partitioner.specs import Cluster, Device, Training
from partitioner.timeline import Span, Timeline

UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "%": 0.01}


def value(text: str) -> float:
    """The number that a cell shows, in seconds, bytes or as a fraction."""
    number, unit = text.split()[:2]
    return float(number.replace(",", "")) * UNITS[unit]


def tables(thing: object) -> list[Table]:
    return [block for block in page_of(thing).blocks if isinstance(block, Table)]


def facts(thing: object) -> dict[str, str]:
    return {name: text for block in page_of(thing).blocks if isinstance(block, Facts) for name, text in block.pairs}


def test_each_stage_shows_its_own_numbers() -> None:
    plan = given_plan()
    (table, *_) = tables(plan)
    for stage, predicted, row in zip(plan.stages, plan.prediction.stages, table.rows, strict=True):
        cells = dict(zip(table.headers, row, strict=True))
        assert cells["stage"] == str(stage.index)
        assert cells["layers"].startswith(stage.layers[0])
        assert cells["layers"].endswith(stage.layers[-1])
        assert cells["ranks"] == ", ".join(map(str, stage.ranks))
        assert value(cells["forward"]) == pytest.approx(predicted.forward_s, rel=5e-3)
        assert value(cells["backward"]) == pytest.approx(predicted.backward_s, rel=5e-3)
        assert value(cells["sends"]) == predicted.send_bytes
        assert value(cells["memory"]) == pytest.approx(predicted.memory.total, rel=5e-3)
        assert value(cells["of limit"]) == pytest.approx(predicted.memory.total / GiB, abs=5e-4)
        assert value(cells["idle"]) == pytest.approx(predicted.idle_s / plan.prediction.step_s, abs=5e-4)


def test_the_shard_level_is_shown_by_stage_where_stages_differ() -> None:
    def shown(*levels: str) -> tuple[list[str], str | None]:
        plan = given_plan()
        stages = [
            stage.model_copy(update={"shard": level, "recompute": level == "zero2"})
            for stage, level in zip(plan.stages, levels, strict=True)
        ]
        plan = plan.model_copy(update={"stages": tuple(stages)})
        return [str(row[0]) for row in tables(plan)[0].rows], facts(plan).get("sharded")

    assert len(given_plan().stages) == 2
    assert shown("none", "none") == (["0", "1"], None)
    assert shown("zero1", "zero1") == (["0", "1"], "zero1")
    assert shown("zero2", "none") == (["0 (recompute, zero2)", "1"], "zero2 on stage 0")
    assert shown("zero2", "zero1")[1] == "zero2 on stage 0; zero1 on stage 1"


def test_memory_is_itemised_and_adds_up() -> None:
    plan = given_plan()
    table = tables(plan)[1]
    assert table.headers[1:-1] == ("weights", "gradients", "optimizer", "activations")
    for predicted, row in zip(plan.prediction.stages, table.rows, strict=True):
        cells = {name: value(cell) for name, cell in zip(table.headers[1:], row[1:], strict=True)}
        assert cells["optimizer"] == predicted.memory.optimizer
        assert sum(cells.values()) - cells["sum"] == cells["sum"] == predicted.memory.total


def test_ranks_on_several_nodes_say_which() -> None:
    one = given_cluster()
    plan = given_plan(cluster=one.model_copy(update={"nodes": (0, 1)}))
    assert [row[2] for row in tables(plan)[0].rows] == ["0 on node 0", "1 on node 1"]


def test_the_prediction_is_shown_as_it_is() -> None:
    plan = given_plan()
    shown, prediction = facts(plan), plan.prediction
    assert shown["mesh"] == "pp 2 x dp 1: 2 of 2 devices"
    assert shown["schedule"].startswith("1f1b, 4 micro-batches")
    assert shown["micro-batch"] == "2 samples of a batch of 8"
    step, optimizer = shown["predicted step"].split(" + optimizer ")
    assert value(step) == pytest.approx(prediction.step_s, rel=5e-3)
    assert value(optimizer) == pytest.approx(prediction.optimizer_s, rel=5e-3)
    assert float(shown["throughput"].split()[0]) == pytest.approx(prediction.throughput, abs=0.05)
    assert float(shown["speedup"].split()[0]) == pytest.approx(prediction.speedup, abs=5e-3)
    assert value(shown["efficiency"]) == pytest.approx(prediction.efficiency, abs=5e-4)
    assert value(shown["bubble"]) == pytest.approx(prediction.bubble_fraction, abs=5e-4)
    assert value(shown["gap"]) == pytest.approx(plan.gap, abs=5e-4)


def test_the_waterfall_goes_from_all_time_to_the_efficiency() -> None:
    plan = given_plan()
    table = waterfall(plan.prediction.lost, plan.prediction.efficiency)
    left = sum(value(share) for _, share, _ in table.rows)
    assert left == pytest.approx(value(table.total[1]), abs=2e-3)
    assert [name for name, _, _ in table.rows] == ["all devices' time", "imbalance", "fill and drain", "communication"]


def test_losses_too_small_to_show_are_added_up() -> None:
    names = ("imbalance", "fill_drain", "communication", "sync")
    table = waterfall(LostEfficiency(**dict.fromkeys(names, 4e-4), optimizer=0.1), 0.8984)
    shown = [row[:2] for row in table.rows]
    assert shown == [("all devices' time", "100.0 %"), ("optimizer", "-10.0 %"), ("others", "-0.2 %")]
    assert [row[:2] for row in waterfall(LostEfficiency(), 1.0).rows] == [("all devices' time", "100.0 %")]


def test_each_bar_of_the_waterfall_ends_where_the_next_begins() -> None:
    prediction = given_plan().prediction
    table = waterfall(prediction.lost, prediction.efficiency)
    (whole, *lost), (left,) = [bar_of(row).parts[0] for row in table.rows], bar_of(table.total).parts
    assert whole[1:] == (0.0, 1.0)
    assert [part.end for part in (*lost, left)] == pytest.approx([1.0, *(part.start for part in lost)], abs=1e-4)
    shares = [getattr(prediction.lost, name) for name in ("imbalance", "fill_drain", "communication")]
    assert [part.end - part.start for part in lost] == pytest.approx(shares)
    assert left.end == pytest.approx(prediction.efficiency, abs=1e-4)


def bar_of(row: tuple[str | Bar, ...]) -> Bar:
    (bar,) = [cell for cell in row if isinstance(cell, Bar)]
    return bar


def test_a_bar_takes_columns_as_its_shares() -> None:
    plan = given_plan()
    text = render(plan)
    for stage, predicted in enumerate(plan.prediction.stages):
        line = next(line for line in text.splitlines() if line.startswith(f"{stage}  "))
        assert line.count("█") == round(10 * predicted.compute_s / plan.prediction.step_s)


def test_colours_are_there_when_asked_for_and_change_no_letter() -> None:
    plain, coloured = render(given_plan(), 100), render(given_plan(), 100, colour=True)
    assert re.sub(r" +$", "", re.sub(r"\x1b\[[0-9;]*m", "", coloured), flags=re.MULTILINE) == plain
    assert coloured != plain


def test_a_number_stays_beside_its_unit() -> None:
    for width in range(40, 80):
        text = render(given_plan(why=("it takes 12.3 ms of 4.5 GiB at 30 % " * 5,)), width)
        assert not re.search(r"\d\n\s+(ms|GiB|%)", text)


def test_a_gain_is_shown_as_one() -> None:
    table = waterfall(LostEfficiency(small_microbatch=-0.02, fill_drain=0.1), 0.92)
    assert ("small micro-batch", "+2.0 %") in [row[:2] for row in table.rows]
    whole, gain = table.rows[0], next(row for row in table.rows if row[0] == "small micro-batch")
    assert bar_of(gain).parts[0].role == "gain"
    assert bar_of(whole).parts[0].end == pytest.approx(1.0)  # fill and drain comes first, so 100 % is the most


def test_the_largest_loss_is_named_with_what_would_help() -> None:
    for name, (label, _) in LOSSES.items():
        prediction = given_plan().prediction.model_copy(update={"lost": LostEfficiency(**{name: 0.3})})
        assert f"the largest loss is {label} (30.0 %)" in flat(render(given_plan(prediction=prediction)))
    assert LOSSES.keys() == LostEfficiency.model_fields.keys()


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_the_limit_is_the_smallest_of_the_ranks_or_the_one_that_was_set() -> None:
    small, large = Device(name="S", memory_bytes=GiB // 2), Device(name="L", memory_bytes=4 * GiB)
    link = given_cluster().intra
    unequal = given_plan(cluster=Cluster(devices=(small, large), nodes=(0, 0), intra=link, inter=link))
    assert [row[7] for row in tables(unequal)[0].rows] == ["11.7 % of 512.0 MiB", "0.4 % of 4.0 GiB"]
    limited = given_plan(training=Training(batch_size=8, memory_limit_bytes=GiB // 4))
    assert [row[7] for row in tables(limited)[0].rows] == ["23.4 %", "7.0 %"]
    assert facts(limited)["memory limit"] == "256.0 MiB a device"


def test_a_proven_plan_says_so_and_others_say_how_far() -> None:
    assert facts(given_plan(lower_bound_s=0.17))["gap"].startswith("none")
    assert "160 ms" in facts(given_plan(lower_bound_s=0.16))["gap"]


def test_a_comparison_with_a_device_that_cannot_hold_the_model_is_labelled() -> None:
    prediction = given_plan().prediction.model_copy(update={"single_device_fits": False})
    assert "unlimited memory" in facts(given_plan(prediction=prediction))["speedup"]


def test_why_provenance_and_what_cannot_run_are_said() -> None:
    text = flat(render(given_plan(runnable=False)))
    assert "why: Stage 0 is the bottleneck" in text
    assert "why: this version cannot run this plan" in text
    assert "costs given on a desk" in text


def test_runners_up_are_shown_with_their_distance() -> None:
    table = next(table for table in tables(given_plan()) if table.headers[0] == "runner-up")
    assert table.rows[0][4:] == ("200 ms", "17.6 % slower")
    assert table.rows[1][4:] == ("does not fit", "short of 0.2 GiB")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_number_is_cut_at_any_width(width: int) -> None:
    plan = given_plan()
    text = render(plan, width)
    for table in tables(plan):
        for row in (*table.rows, table.total):
            for header, cell in zip(table.headers, row, strict=False):
                if header not in table.wide and isinstance(cell, str):
                    assert cell in text


def test_text_fits_the_width_and_has_no_colour_codes() -> None:
    text = render(given_plan(), 120)
    assert max(map(len, text.splitlines())) <= 120
    assert "\x1b" not in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_square_brackets_in_names_are_shown_as_they_are() -> None:
    plan = given_plan(why=("[bold]h[0][/bold] binds",))
    assert "[bold]h[0][/bold] binds" in render(plan)
    profile = given_profile(model="net[red]")
    assert "net[red]" in render(profile)


def test_str_and_repr_are_the_view() -> None:
    plan = given_plan()
    assert str(plan) == render(plan) == repr(plan)


def test_a_profile_shows_what_its_layers_cost() -> None:
    profile = given_profile(3)
    (table,) = tables(profile)
    for layer, row in zip(profile.layers, table.rows, strict=True):
        cells = dict(zip(table.headers, row, strict=True))
        assert cells["layers"] == layer.id
        assert value(cells["forward"]) == pytest.approx(layer.costs[-1].forward_s, rel=5e-3)
        assert value(cells["saved"]) == layer.costs[-1].saved_bytes
    assert value(table.total[3]) == pytest.approx((2 + 4 + 6) * 1e-3, rel=5e-3)


def test_equal_layers_in_a_row_share_a_line() -> None:
    profile = given_profile(6)
    same = profile.layers[0].costs
    layers = tuple(
        layer.model_copy(update={"costs": same}) if k < 4 else layer for k, layer in enumerate(profile.layers)
    )
    rows = tables(given_profile(6, layers=layers))[0].rows
    assert [row[:2] for row in rows] == [("block.0 … block.3", "4"), ("block.4", "1"), ("block.5", "1")]


def test_a_long_profile_leaves_out_its_middle_but_sums_it() -> None:
    (table,) = tables(given_profile(100))
    counts = [int(row[1]) for row in table.rows]
    assert len(counts) == 41
    assert sum(counts) == 100
    assert value(table.total[3]) == pytest.approx(2e-3 * 5050, rel=5e-3)


def test_the_whole_step_is_shown_beside_the_sum_of_its_layers() -> None:
    """Layers of 2 samples take 3 x (2 + 4 + 6 + 8) = 60 ms."""
    shown = facts(given_profile(step_s=(0.025, 0.050), unattributed_s=(-0.005, -0.010)))
    assert shown["whole step"] == "50.0 ms; its layers add up to 60.0 ms (+20.0 %)"


def test_a_cost_graph_shows_its_narrowest_cut() -> None:
    tensors = tuple(
        tensor.model_copy(update={"bytes_at": (10 * k + 10, 20 * k + 20)})
        for k, tensor in enumerate(given_profile().tensors)
    )
    shown = facts(CostGraph(given_profile(tensors=tensors)))
    assert shown["narrowest cut"] == "before block.1: 20 B of 2 samples"
    assert shown["widest cut"] == "60 B"


TWO_RANKS = Timeline(
    (
        Span(0, "F", 0, 0, 0.0, 1.0),
        Span(0, "F", 0, 1, 1.0, 2.0),
        Span(0, "send", 0, 0, 1.0, 1.5),
        Span(1, "recv", 1, 0, 1.0, 1.5),
        Span(1, "F", 1, 0, 1.5, 2.5),
        Span(1, "B", 1, 0, 2.5, 4.5),
        Span(0, "B", 0, 0, 4.5, 6.5),
        Span(0, "sync", 0, -1, 6.5, 7.0),
        Span(0, "optimizer", 0, -1, 7.0, 8.0),
        Span(1, "optimizer", 1, -1, 7.0, 8.0),
    ),
    num_ranks=2,
    measured=False,
)


def test_a_drawing_has_a_column_for_each_half_second() -> None:
    lines = draw(TWO_RANKS, len("rank 0 ||") + 16).splitlines()
    assert lines[0] == "rank 0 |0011.....aaaa=++|"
    assert lines[1] == "rank 1 |..~00aaaa.....++|"


def test_a_drawing_shows_the_busy_share_at_any_width() -> None:
    """Counted over many columns, letters cover as much time as the spans do."""
    for width in (100, 1000, 5000):
        for rank, line in enumerate(draw(TWO_RANKS, width).splitlines()[:2]):
            cells = line.split("|")[1]
            work = sum(cell not in ".~=+" for cell in cells) / len(cells)
            assert work == pytest.approx(TWO_RANKS.busy_s(rank) / 8.0, abs=4 / len(cells))


def test_a_timeline_of_nothing_is_drawn_all_the_same() -> None:
    assert render(Timeline((), num_ranks=1, measured=True)).startswith("Measured timeline of 1 rank")


def test_a_timeline_shows_what_each_rank_did_for_how_long() -> None:
    (table,) = tables(TWO_RANKS)
    assert table.headers == ("rank", "forward", "backward", "waits", "sync", "optimizer", "idle")
    assert table.rows[0] == ("0", "2.00 s", "2.00 s", "0 s", "500 ms", "1.00 s", percent(2.5 / 7))
    assert value(facts(TWO_RANKS)["step"]) == TWO_RANKS.step_s


def test_results_of_higher_modules_say_themselves_what_to_show() -> None:
    @dataclass(frozen=True, repr=False)
    class Verdict(Shown):
        def page(self) -> Page:
            return Page("Same", (Facts((("loss", "1.0"),)), Prose("note", ("all equal",))))

    assert str(Verdict()) == "Same\n====\n\nloss  1.0\n\nnote: all equal"


def test_a_thing_without_a_page_is_an_error_of_ours() -> None:
    with pytest.raises(TypeError, match="int"):
        render(3)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (0.0, "0 s"),
        (1e-9, "0.00 µs"),
        (9.996e-6, "10.0 µs"),
        (0.0009999, "1.00 ms"),
        (0.99949, "999 ms"),
        (0.9996, "1.00 s"),
        (99.96, "100 s"),
        (12345.0, "12,345 s"),
        (-0.5, "-500 ms"),
    ],
)
def test_durations_keep_three_digits_across_units(given: float, shown: str) -> None:
    assert seconds(given) == shown


def test_the_view_of_a_loaded_plan_is_that_of_the_plan() -> None:
    plan = given_plan()
    assert str(Plan.model_validate_json(plan.model_dump_json())) == str(plan)
