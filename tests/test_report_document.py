"""The report page: parsed, and its figures compared with the plan's. A browser opens it in test_report_browser.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from drawn_plans import drawn_plan, drawn_profile
from given import given_cluster, given_plan
from parsed_html import Parsed
from test_report_svg import drawn_spans

from partitioner.graph import CostGraph
from partitioner.plan import Alternative, MemoryItems, Plan
from partitioner.report.document import document, why_slower
from partitioner.report.wording import percent, seconds
from partitioner.simulator import predict, simulate
from partitioner.solver import solve
from partitioner.specs import Training, format_bytes
from partitioner.split import Split
from partitioner.timeline import Timeline


def slowed(plan: Plan, factor: float = 1.1) -> Timeline:
    """A measured step, made from the predicted one."""
    spans = (s._replace(start_s=factor * s.start_s, end_s=factor * s.end_s) for s in simulate(plan).spans)
    return Timeline(tuple(spans), plan.num_ranks, measured=True)


def section(text: str, name: str) -> str:
    found = re.search(rf'<section id="{name}".*?</section>', text, re.DOTALL)
    assert found is not None
    return found[0]


def test_the_page_shows_the_prediction() -> None:
    plan = drawn_plan()
    parsed, prediction = Parsed(document(plan)), plan.prediction
    assert parsed.facts["Step"].startswith(seconds(prediction.step_s))
    assert parsed.facts["Throughput"].startswith(f"{prediction.throughput:,.1f}")
    assert parsed.facts["Speedup"].startswith(f"{prediction.speedup:.2f} ×")
    assert parsed.facts["Efficiency"].startswith(percent(prediction.efficiency))
    assert parsed.facts["Bubble"].startswith(percent(prediction.bubble_fraction))
    assert parsed.facts["Gap"].startswith(percent(plan.gap))


def test_balance_and_memory_are_those_of_the_stages() -> None:
    plan = drawn_plan()
    text = document(plan)
    (balance,) = Parsed(section(text, "balance")).tables
    memory = Parsed(section(text, "memory")).tables[0]
    for k, (stage, predicted) in enumerate(zip(plan.stages, plan.prediction.stages, strict=True)):
        assert balance[k + 1][0] == str(stage.index)
        assert balance[k + 1][4] == seconds(predicted.forward_s + predicted.backward_s)
        assert seconds(predicted.forward_s) in balance[k + 1][3]
        assert memory[k + 1][:3] == [str(k), str(predicted.in_flight), format_bytes(predicted.memory.total)]


def test_memory_bars_are_the_items_in_their_order() -> None:
    plan = drawn_plan(memory_bytes=2**30)
    text = section(document(plan), "memory")
    bars = re.findall(r'<span class="pt-bar".*?</span></span>', text)
    for bar, predicted in zip(bars, plan.prediction.stages, strict=True):
        widths = [float(width) for width in re.findall(r"width:([\d.]+)%", bar)]
        items = [getattr(predicted.memory, name) for name in MemoryItems.model_fields]
        assert widths == pytest.approx([100 * item / 2**30 for item in items if item], abs=0.01)


def test_predicted_and_measured_step_are_drawn_on_one_scale() -> None:
    plan = drawn_plan()
    measured = slowed(plan)
    schedule = section(document(plan, measured=measured), "schedule")
    first, second = re.findall(r'(<svg class="pt-gantt".*?</svg>)</div>', schedule, re.DOTALL)
    lengths = [max(s.end_s for s in drawn_spans(svg) if s.kind not in ("optimizer",)) for svg in (first, second)]
    assert lengths == pytest.approx([plan.prediction.step_s, measured.step_s], rel=1e-4)
    assert f"the prediction is {100 * (1 / 1.1 - 1):+.1f} % off" in schedule


def test_every_layer_is_listed_with_its_stage() -> None:
    plan = drawn_plan()
    (table,) = Parsed(section(document(plan), "layers")).tables
    assert [(row[1], row[3]) for row in table[1:]] == [(name, str(stage)) for name, stage in plan.stage_of().items()]


def test_layers_of_inference_are_as_high_as_their_forwards() -> None:
    profile = drawn_profile(12)
    training = Training(batch_size=8, objective="throughput", mesh={"pp": 2, "dp": 1})
    plan = solve(profile, given_cluster(2), training)
    layers = section(document(plan), "layers")
    assert "Each layer's forward of" in layers and "backward" not in layers.partition("<details>")[0]
    heights = [float(found) for found in re.findall(r'class="layer[^>]* height="([\d.]+)"', layers)]
    times = [layer.cost(plan.microbatch_samples).forward_s for layer in profile.layers]
    assert [one / max(heights) for one in heights] == pytest.approx([one / max(times) for one in times], abs=0.01)
    assert "forward, " in plan.plot_graph().axes[0].get_ylabel()


def test_a_runner_up_says_what_it_loses_to() -> None:
    plan = drawn_plan(num_microbatches=16)
    split = Split.placed(plan.cluster, [10, 20, 30], plan.mesh, 2, "gpipe")
    few = predict(CostGraph(plan.profile), plan.cluster, plan.training, split)
    other = Alternative(
        mesh=plan.mesh,
        schedule="gpipe",
        num_microbatches=2,
        stage_sizes=(10, 10, 10, 10),
        step_s=few.step_s + few.optimizer_s,
    )
    more_s = few.lost.fill_drain * (few.step_s + few.optimizer_s) - plan.prediction.lost.fill_drain * (
        plan.prediction.step_s + plan.prediction.optimizer_s
    )
    assert why_slower(plan, other).endswith(f"slower: {seconds(more_s)} a step more to fill and drain")
    shown = document(plan.model_copy(update={"runners_up": (other,)}))
    assert "a step more to fill and drain" in section(shown, "runners-up")
    moved = other.model_copy(update={"step_s": 2 * (other.step_s or 0)})
    assert why_slower(plan, moved).endswith("slower")


def test_assumptions_and_provenance_are_said() -> None:
    plan = given_plan(runnable=False)
    parsed = Parsed(section(document(plan), "provenance"))
    text = section(document(plan), "provenance")
    assert "Stage 0 is the bottleneck: block.2 cannot be split." in text
    assert "This version cannot run this plan." in text
    assert parsed.facts["layer costs"] == "given on a desk, float32"
    assert parsed.facts["batch size"] == "8"


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = document(drawn_plan())
    parsed = Parsed(text)
    for tag, given in parsed.tags:
        assert not {"src", "srcset", "action"} & given.keys()
        assert (given.get("href") or "#").startswith("#") or (tag, given["href"]) == ("link", "data:,")
    assert set(re.findall(r"https?://[^\s\"']*", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "default-src 'none'" in text


def test_the_page_is_whole_without_its_script() -> None:
    """Each figure is in the HTML itself, and the script adds no more than what it finds there."""
    plan = drawn_plan()
    text = re.sub(r"<script>.*?</script>", "", document(plan), flags=re.DOTALL)
    assert len(drawn_spans(section(text, "schedule"))) == sum(s.kind != "send" for s in simulate(plan).spans)


def test_headings_labels_and_links_lead_a_screen_reader() -> None:
    text = document(drawn_plan())
    parsed = Parsed(text)
    tags = [tag for tag, _ in parsed.tags]
    assert tags.count("h1") == tags.count("main") == tags.count("nav") == 1
    ids = {given["id"] for _, given in parsed.tags if "id" in given}
    assert {given["href"][1:] for tag, given in parsed.tags if tag == "a" and given["href"]} <= ids
    for tag, given in parsed.tags:
        if tag == "svg" and given.get("class") != "window":
            assert given["role"] == "img"
            assert given["aria-label"]
        if tag == "section":
            assert given["aria-labelledby"] in ids
    assert text.count("<table") == text.count("<caption")


def test_a_page_of_64_stages_and_512_microbatches_stays_below_five_megabytes() -> None:
    assert len(document(drawn_plan(256, 64, 512)).encode()) < 5_000_000


def test_the_page_is_written_whole(tmp_path: Path) -> None:
    plan = drawn_plan()
    plan.save_report(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == document(plan)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]


def test_the_first_cards_say_what_takes_most_of_the_efficiency() -> None:
    plan = drawn_plan()
    lost = plan.prediction.lost
    assert max(lost.model_dump().values()) == lost.fill_drain
    text = " ".join(document(plan).split())
    assert f"of 4 devices; {100 * lost.fill_drain:.1f} % goes to fill and drain" in text.replace("\u00a0", " ")
