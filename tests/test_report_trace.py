"""Chrome traces: valid in the Trace Event Format, and in sum what the Timeline says."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_plans import drawn_plan
from perfetto import ask
from test_report_document import slowed

from partitioner.errors import ArgumentError
from partitioner.plan import Plan
from partitioner.report.trace import read, trace
from partitioner.residency import residency
from partitioner.simulator import simulate

PLANS = {
    "1f1b": drawn_plan(num_skips=4),
    "replicas": drawn_plan(num_replicas=2),
    "interleaved": drawn_plan(schedule="interleaved", stages_a_rank=2),
    "zero-bubble": drawn_plan(schedule="zero-bubble"),
}

PHASES = {"X": {"dur"}, "M": {"args"}, "s": {"id", "cat"}, "f": {"id", "cat"}, "b": {"id2", "cat"}, "e": {"id2", "cat"}}
PHASES |= {"C": {"args"}}
"""Phase of an event -> the fields that it must have beside name, ph, pid, tid and ts (Trace Event Format, Google)."""


def check(content: dict[str, Any]) -> None:
    """What the Trace Event Format asks for, as far as these phases go."""
    json.loads(json.dumps(content, allow_nan=False))
    assert isinstance(content["traceEvents"], list)
    assert content["displayTimeUnit"] in ("ms", "ns")
    pairs: dict[tuple[str, Any], list[dict[str, Any]]] = defaultdict(list)
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in content["traceEvents"]:
        assert PHASES[event["ph"]] <= event.keys(), event
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["pid"] > 0 and event["tid"] > 0  # Perfetto reads 0 as the idle thread
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] in "sfbe":
            pairs[event["cat"], event["id"] if "id" in event else event["id2"]["local"]].append(event)
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
    for track in slices.values():  # slices of a track may be nested, never overlap in part; ours are side by side
        track.sort()
        assert all(_nanoseconds(first[1]) <= _nanoseconds(second[0]) for first, second in pairwise(track))
    for both in pairs.values():
        first, second = both
        assert (first["ph"], second["ph"]) in (("s", "f"), ("b", "e"))
        assert first["ts"] <= second["ts"]
        assert first["name"] == second["name"]
        if first["ph"] == "s":  # each end of an arrow lies in a slice, to which it is bound
            for end in both:
                track = slices[end["pid"], end["tid"]]
                assert any(start <= end["ts"] <= stop for start, stop in track)


def _nanoseconds(microseconds: float) -> int:
    """The same whole number, told apart from others by what floating point cannot hold of microseconds."""
    found = round(microseconds * 1e3)
    assert microseconds * 1e3 == pytest.approx(found, rel=1e-12)
    return found


@pytest.mark.parametrize("name", PLANS)
def test_a_trace_is_valid_and_its_sums_are_the_timelines(name: str) -> None:
    plan = PLANS[name]
    measured = slowed(plan)
    content = trace(plan, measured=measured)
    check(content)
    for pid, timeline in enumerate((simulate(plan), measured), start=1):
        sums: dict[tuple[int, str], float] = defaultdict(float)
        for event in content["traceEvents"]:
            if event["ph"] == "X" and event["pid"] == pid:
                sums[event["args"]["rank"], event["cat"]] += event["dur"] / 1e6
        for rank in range(timeline.num_ranks):
            busy = sum(sums[rank, kind] for kind in "FBIW")
            assert busy == pytest.approx(timeline.busy_s(rank), abs=1e-9 * len(timeline.spans))
            waits = sums[rank, "recv"] + sums[rank, "sync"]
            assert waits == pytest.approx(timeline.communication_s(rank), abs=1e-9 * len(timeline.spans))


def test_perfetto_understands_all_of_it(tmp_path: Path) -> None:
    """Loaded into its own trace processor: no error, nothing lost, and in sum, to the nanosecond, the Timeline."""
    plans = {tmp_path / f"{name}.json": plan for name, plan in PLANS.items()}
    for path, plan in plans.items():
        plan.save_trace(path, measured=slowed(plan))
    thread = "join thread using (utid) join process using (upid)"
    queries = (
        "select name, value from stats where severity != 'info' and value > 0",
        f"""select process.name as step, thread.name as track, category as kind, count(*) as num, sum(dur) as ns
            from slice join thread_track on track_id = thread_track.id {thread} group by 1, 2, 3""",
        """select process.name as step, sending.name as sender, receiving.name as receiver, count(*) as num
            from flow join slice as sent on slice_out = sent.id join slice as got on slice_in = got.id
            join thread_track as a on sent.track_id = a.id join thread as sending on a.utid = sending.utid
            join thread_track as b on got.track_id = b.id join thread as receiving on b.utid = receiving.utid
            join process on sending.upid = process.upid group by 1, 2, 3""",
        """select process.name as step, t.name as track, count(*) as num, sum(dur) as ns
            from slice join process_track as t on track_id = t.id join process using (upid) group by 1, 2""",
        """select process.name as step, t.name as track, max(value) as most
            from counter join process_counter_track as t on track_id = t.id join process using (upid) group by 1, 2""",
    )
    for path, (errors, slices, arrows, messages, counters) in ask(dict.fromkeys(plans, queries)).items():
        plan = plans[path]
        assert errors == []
        for timeline in (simulate(plan), slowed(plan)):
            step = f"{'measured' if timeline.measured else 'predicted'} step of Drawn, {plan.schedule}"
            expected: dict[tuple[str, str], list[float]] = defaultdict(list)
            sent: dict[str, list[float]] = defaultdict(list)
            for span in timeline.spans:
                if span.kind == "send":
                    sent[f"messages of rank {span.rank}"].append(span.end_s - span.start_s)
                else:
                    expected[f"rank {span.rank}", span.kind].append(span.end_s - span.start_s)
            seen = {(row["track"], row["kind"]): row for row in slices if row["step"] == step}
            seen_sent = {row["track"]: row for row in messages if row["step"] == step}
            assert seen.keys() == expected.keys() and seen_sent.keys() == sent.keys()
            for row, seconds in [(seen[key], expected[key]) for key in seen] + [
                (seen_sent[key], sent[key]) for key in sent
            ]:
                assert row["num"] == len(seconds)
                assert row["ns"] == pytest.approx(1e9 * sum(seconds), abs=len(seconds))
            told = [event for event in trace(plan)["traceEvents"] if event["ph"] == "s"]
            assert sum(row["num"] for row in arrows if row["step"] == step) == len(told)
            assert all(row["sender"] != row["receiver"] for row in arrows)
            most = {f"memory of rank {one.rank} bytes": max(one.total_bytes) for one in residency(plan, timeline)}
            assert {row["track"]: row["most"] for row in counters if row["step"] == step} == most


@pytest.mark.parametrize("name", PLANS)
def test_each_rank_has_a_track_of_its_name(name: str) -> None:
    plan = PLANS[name]
    events = trace(plan, measured=slowed(plan))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ran = {(e["pid"], e["tid"]): f"rank {e['args']['rank']}" for e in events if e["ph"] == "X"}
    assert names == ran
    assert len({tid for _, tid in names}) == 2 * plan.num_ranks  # Perfetto tells threads of two processes by it alone


def test_arrows_go_from_each_stage_to_the_next_and_back() -> None:
    """Without skips a micro-batch crosses each of the three cuts twice."""
    plan = drawn_plan()
    events = trace(plan)["traceEvents"]
    ends: dict[int, list[int]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]].append(event["tid"] - 1000)
    there = [tuple(pair) for pair in ends.values()]
    m = plan.num_microbatches
    assert sorted(there) == sorted([(r, r + 1) for r in range(3)] * m + [(r + 1, r) for r in range(3)] * m)


def test_arrows_of_a_replica_stay_within_it() -> None:
    events = trace(PLANS["replicas"])["traceEvents"]
    starts = {event["id"]: event["tid"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["tid"] for event in events if event["ph"] == "f"}
    assert {(tid - 1000) // 4 for tid in ends.values()} == {0, 1}
    assert all((starts[k] - 1000) // 4 == (tid - 1000) // 4 for k, tid in ends.items())


def test_a_measured_step_comes_back_from_its_file(tmp_path: Path) -> None:
    plan = PLANS["1f1b"]
    measured = slowed(plan)
    plan.save_trace(tmp_path / "step.json", measured=measured)
    found = read(tmp_path / "step.json")
    assert (found.num_ranks, found.measured) == (measured.num_ranks, True)
    for mine, given in zip(sorted(found.spans), sorted(measured.spans), strict=True):
        assert mine[:4] == given[:4]
        assert mine[4:] == pytest.approx(given[4:], abs=1e-9)
    assert read(tmp_path / "step.json", measured=False).step_s == pytest.approx(plan.prediction.step_s, abs=1e-9)


def test_files_that_are_no_measured_step_are_refused(tmp_path: Path) -> None:
    def refused(content: str, says: str) -> None:
        (tmp_path / "step.json").write_text(content)
        with pytest.raises(ArgumentError, match=says):
            read(tmp_path / "step.json")

    with pytest.raises(ArgumentError, match="cannot read"):
        read(tmp_path / "none.json")
    refused("no", "not JSON")
    refused("{}", "not a trace")
    refused("[]", "not a trace")
    refused(json.dumps(trace(PLANS["1f1b"])), "holds no measured step")


def test_a_plan_that_was_saved_gives_the_same_trace(tmp_path: Path) -> None:
    plan = PLANS["1f1b"]
    assert trace(Plan.model_validate_json(plan.model_dump_json())) == trace(plan)


@pytest.mark.parametrize("name", PLANS)
def test_counters_follow_the_bytes_of_each_rank(name: str) -> None:
    plan = PLANS[name]
    counted: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in trace(plan)["traceEvents"]:
        if event["ph"] == "C":
            rank = event["tid"] - 1000
            assert event["name"] == f"memory of rank {rank}"
            counted[rank].append((event["ts"], event["args"]["bytes"]))
    for one in residency(plan, simulate(plan)):
        moments = [at for at, _ in counted[one.rank]]
        assert moments == sorted(set(moments))
        assert counted[one.rank][-1][1] == one.total_bytes[-1]
        for at, held in counted[one.rank][:: len(moments) // 7]:
            k = int(np.searchsorted(one.times_s, at / 1e6 + 1e-9, side="right")) - 1
            assert held == one.total_bytes[max(0, k)]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (drawn_plan(num_ranks=2), "ran on 2 ranks, the plan has 4"),
        (drawn_plan(num_microbatches=16), "ran micro-batch 8, the plan has 8"),
        (drawn_plan(num_ranks=2, num_replicas=2), "ran stage"),
    ],
)
def test_a_step_of_another_plan_is_refused_by_every_view(other: Plan, says: str, tmp_path: Path) -> None:
    plan, measured = drawn_plan(), slowed(other)
    for show in (
        lambda: trace(plan, measured=measured),
        lambda: plan.save_report(tmp_path / "plan.html", measured=measured),
        lambda: plan.plot_timeline(measured=measured),
    ):
        with pytest.raises(ArgumentError, match=says):
            show()
