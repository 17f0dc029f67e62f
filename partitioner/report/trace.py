"""Timelines as a Chrome trace, which https://ui.perfetto.dev opens: a track a rank, arrows for transfers.

Written is the Trace Event Format (Google, "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), in microseconds: complete events ("X")
for what ranks do, flow events ("s", "f") from the action that sends to the one that receives, asynchronous events ("b",
"e") for messages on their way, counters ("C") for bytes held. Predicted and measured steps are two processes.

Perfetto's reader asks for more than the format says (found by loading traces into its trace processor, v55):
    whole nanoseconds   it rounds start and duration apart, and drops a slice that then reaches into the next
    no number 0         of a process or thread; a thread's number is its own in all processes
    few names           asynchronous events have a track for each name, and without a local id one for all processes
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from partitioner.errors import ArgumentError
from partitioner.graph import CostGraph
from partitioner.plan import Plan
from partitioner.profiles import write_whole
from partitioner.report.gantt_svg import KINDS
from partitioner.report.plan_parts import check_measured
from partitioner.residency import residency
from partitioner.simulator import simulate
from partitioner.timeline import Span, Timeline

Event = dict[str, Any]
PROCESSES = {False: "predicted", True: "measured"}
"""Timeline.measured -> name of its process; its number is the order."""


def trace(plan: Plan, *, measured: Timeline | None = None) -> dict[str, Any]:
    """The plan's step as simulated, and a measured one beside it, as a JSON object in the Trace Event Format."""
    check_measured(plan, measured)
    edges = _edges(plan)
    events: list[Event] = []
    numbers = count(1)
    for pid, timeline in enumerate([simulate(plan), *([] if measured is None else [measured])], start=1):
        name = f"{PROCESSES[timeline.measured]} step of {plan.profile.model}, {plan.schedule}"
        events += _tracks(pid, name, timeline.num_ranks)
        events += [_complete(pid, span, timeline) for span in timeline.spans if span.kind in KINDS]
        events += _transfers(pid, timeline, edges, numbers)
        events += _counters(pid, plan, timeline)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"made_by": "partitioner", "version": "1"}}


def save(plan: Plan, path: str | os.PathLike[str], *, measured: Timeline | None = None) -> None:
    """Write `trace`; the file is whole or not there."""
    write_whole(path, json.dumps(trace(plan, measured=measured), separators=(",", ":")))


def read(path: str | os.PathLike[str], *, measured: bool = True) -> Timeline:
    """The measured (or the predicted) step of a file that `save` wrote; anything else is an ArgumentError."""
    shown = os.fspath(path)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot read {shown}: {error.strerror}") from None
    except ValueError:
        raise ArgumentError(f"{shown} is not JSON: give a trace that save_trace wrote") from None
    if not isinstance(content, dict) or content.get("otherData", {}).get("made_by") != "partitioner":
        raise ArgumentError(f"{shown} is not a trace of a step: give a file that save_trace wrote")
    names = {e["pid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"}
    wanted = PROCESSES[measured]
    pid = next((pid for pid, name in names.items() if name.startswith(wanted)), None)
    if pid is None:
        raise ArgumentError(
            f"{shown} holds no {wanted} step: write it with save_trace(path, measured=stage.timeline())"
        )
    ours = [event for event in content["traceEvents"] if event["pid"] == pid]
    num_ranks = sum(event["name"] == "thread_name" for event in ours)
    spans = [_span(event, event["ts"], event["ts"] + event["dur"]) for event in ours if event["ph"] == "X"]
    left = {event["id2"]["local"]: event for event in ours if event["ph"] == "b"}
    spans += [_span(left[e["id2"]["local"]], left[e["id2"]["local"]]["ts"], e["ts"]) for e in ours if e["ph"] == "e"]
    return Timeline(tuple(spans), num_ranks, measured)


def _span(event: Event, start: float, end: float) -> Span:
    args = event["args"]
    return Span(args["rank"], args["kind"], args["stage"], args["microbatch"], start / 1e6, end / 1e6)


def _tracks(pid: int, name: str, num_ranks: int) -> Iterator[Event]:
    def named(what: str, tid: int, **args: Any) -> Event:
        return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}

    yield named("process_name", _thread(pid, 0), name=name)
    yield named("process_sort_index", _thread(pid, 0), sort_index=pid)
    for rank in range(num_ranks):
        yield named("thread_name", _thread(pid, rank), name=f"rank {rank}")
        yield named("thread_sort_index", _thread(pid, rank), sort_index=rank)


def _thread(pid: int, rank: int) -> int:
    """A number that no other thread or process has: that of rank 7 is 1007 in the first process, 2007 in the next."""
    return 1000 * pid + rank if rank < 1000 else 10**6 * pid + rank


def _moment(timeline: Timeline, time_s: float) -> int:
    """Nanoseconds since the step began."""
    return round((time_s - timeline.start_s) * 1e9)


def _complete(pid: int, span: Span, timeline: Timeline) -> Event:
    which = f" {span.microbatch}" if span.microbatch >= 0 else ""
    start, end = _moment(timeline, span.start_s), _moment(timeline, span.end_s)
    return {
        "name": f"{KINDS[span.kind][1]}{which}",
        "cat": span.kind,
        "ph": "X",
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "pid": pid,
        "tid": _thread(pid, span.rank),
        "args": _args(span),
    }


def _counters(pid: int, plan: Plan, timeline: Timeline) -> Iterator[Event]:
    """Bytes that each rank holds, at every moment at which that changes."""
    for one in residency(plan, timeline):
        total = one.total_bytes
        last = np.append(one.times_s[1:] > one.times_s[:-1], True)  # of several changes at a moment, the last one holds
        for time_s, held in zip(one.times_s[last].tolist(), total[last].tolist(), strict=True):
            at = max(0, _moment(timeline, time_s)) / 1e3
            name = f"memory of rank {one.rank}"
            yield {
                "name": name,
                "ph": "C",
                "pid": pid,
                "tid": _thread(pid, one.rank),
                "ts": at,
                "args": {"bytes": held},
            }


def _args(span: Span) -> dict[str, Any]:
    return {"rank": span.rank, "kind": span.kind, "stage": span.stage, "microbatch": span.microbatch}


def _transfers(
    pid: int, timeline: Timeline, edges: Mapping[tuple[int, str], Sequence[tuple[int, str]]], numbers: Iterator[int]
) -> Iterator[Event]:
    """Arrows from each action to those that wait for what it makes, and the messages on their way."""
    replica_of = _replicas(timeline)
    actions = {
        (replica_of[span.rank], span.stage, span.kind, span.microbatch): span
        for span in timeline.spans
        if span.kind in "FBI"
    }
    for (replica, stage, kind, k), sender in actions.items():
        for target, other in edges.get((stage, kind), ()):
            receiver = actions.get((replica, target, other, k)) or actions.get((replica, target, "I", k))
            if receiver is None or receiver.rank == sender.rank:
                continue
            common = {"name": "transfer", "cat": "transfer", "id": next(numbers), "pid": pid}
            for phase, span, share in (("s", sender, 0.999), ("f", receiver, 0.001)):
                at = _moment(timeline, _inside(span, share)) / 1e3
                bound = {"bp": "e"} if phase == "f" else {}
                yield {**common, **bound, "ph": phase, "tid": _thread(pid, span.rank), "ts": at}
    for span in timeline.spans:
        if span.kind == "send":
            common = {
                "name": f"messages of rank {span.rank}",
                "cat": "message",
                "id2": {"local": next(numbers)},
                "pid": pid,
                "tid": _thread(pid, span.rank),
            }
            yield {**common, "ph": "b", "ts": _moment(timeline, span.start_s) / 1e3, "args": _args(span)}
            yield {**common, "ph": "e", "ts": _moment(timeline, span.end_s) / 1e3}


def _inside(span: Span, share: float) -> float:
    """A moment of the span: an arrow is bound to what its track does then."""
    return span.start_s + share * (span.end_s - span.start_s)


def _replicas(timeline: Timeline) -> dict[int, int]:
    """Rank -> its replica: the k-th rank, in order, that runs a stage is of replica k."""
    of_stage: dict[int, set[int]] = defaultdict(set)
    for span in timeline.spans:
        if span.kind == "F":
            of_stage[span.stage].add(span.rank)
    found = dict.fromkeys(range(timeline.num_ranks), 0)
    for ranks in of_stage.values():
        found.update((rank, k) for k, rank in enumerate(sorted(ranks)))
    return found


def _edges(plan: Plan) -> dict[tuple[int, str], list[tuple[int, str]]]:
    """(stage, kind of action) -> those of other stages that wait for what it makes, in the same micro-batch."""
    found: dict[tuple[int, str], list[tuple[int, str]]] = defaultdict(list)
    for source, target, *_ in CostGraph(plan.profile).transfers(plan.split.cuts, plan.microbatch_samples):
        found[source, "F"].append((target, "F"))
        for kind in "BI":
            found[target, kind].append((source, "B"))
    return found
