"""Traces of torch.profiler that TensorBoard's profiler plugin opens with layers by their full names and their times.

Recorded are the runs that are timed for the Profile, each with a range around exactly what is timed. The Profile holds
the time of each layer's median run, and the ranges of that run become the module: one run told by two clocks, which are
1 to 3 us a range apart (5 % of a layer of 40 us, 0.5 % of one of 500 us). What the profiler costs is in both:
with torch 2.13 on a CPU, 0.9 us an operator, so that a layer under half a millisecond takes a tenth to a third longer
(`tests/benchmarks/tracing.py`). To record the shapes of operators too would cost 12 us each, and is left out.

The plugin (torch-tb-profiler 0.4.3) lists modules from `nn.Module: Class_0` events, by class, and only where Python
stacks were recorded; and it finds no device time in traces of today's PyTorch, which call the category of CUDA launches
`cuda_runtime` where it looks for `runtime`. So ranges that carry a layer's full name become its module events, those
by class become plain Python functions, and the category gets the name that it had.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from partitioner.errors import ArgumentError
from partitioner.profiles import write_whole

DIRECTIONS = ("forward", "backward")

Event = dict[str, Any]


@contextmanager
def recorded(folder: Path, *, cuda: bool) -> Iterator[None]:
    """A trace of what runs inside, written into the folder under the name that TensorBoard looks for."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    before = set(folder.iterdir())
    handler = torch.profiler.tensorboard_trace_handler(os.fspath(folder))
    with torch.profiler.profile(activities=activities, on_trace_ready=handler):
        yield
    for made in sorted(set(folder.iterdir()) - before):
        if made.name.endswith(".pt.trace.json"):
            name_layers(made)


def trace_folder(path: str | os.PathLike[str]) -> Path:
    """The folder, made where it is missing; an ArgumentError where nothing can be written there."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"trace_dir={os.fspath(path)!r} is no folder to write to: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ArgumentError(f"trace_dir={os.fspath(path)!r} is no folder to write to: permission denied")
    return folder


def range_name(direction: str, layer: str, run: int) -> str:
    """
    >>> range_name("forward", "h.0.fc (4 samples)", 2)
    'forward h.0.fc (4 samples), run 2'
    """
    return f"{direction} {layer}, run {run}"


def named_range(name: str) -> AbstractContextManager[None]:
    """A range that takes a tenth of the time of `torch.profiler.record_function`, which is 6 us, most of it inside."""
    return cast(AbstractContextManager[None], torch._C._profiler._RecordFunctionFast(name))


_RANGE = re.compile(rf"((?:{'|'.join(DIRECTIONS)}) .+), run (\d+)")
_PREFIXES = tuple(f"nn.Module: {direction} " for direction in DIRECTIONS)


def name_layers(path: str | os.PathLike[str]) -> int:
    """Rewrite a trace file in place and return how many ranges were named. A second time changes nothing."""
    file = Path(path)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot read {file}: {error.strerror}") from None
    except ValueError:
        raise ArgumentError(f"{file} is not JSON: give a trace that torch.profiler wrote, not compressed") from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise ArgumentError(f"{file} is no trace of torch.profiler: it has no list 'traceEvents'")
    named = named_layers(content["traceEvents"])
    write_whole(file, json.dumps(content | {"traceEvents": named}))
    return sum(_is_module(event) for event in named)


def named_layers(events: list[Event]) -> list[Event]:
    """The events with a module event for each range of the median run of each layer, in each direction."""
    kept = [_as_expected(event) for event in events if not _is_module(event)]
    threads = _operator_threads(kept)
    return kept + [_module_event(event, k, threads) for k, event in enumerate(_of_median_runs(kept))]


def _of_median_runs(events: list[Event]) -> list[Event]:
    """The ranges of the run of each layer, in each direction, that takes the median, as the Profile has it."""
    runs: dict[str, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if found := _range(event):
            runs[found[1]][int(found[2])].append(event)
    chosen = []
    for of_layer in runs.values():
        taken = {run: sum(event["dur"] for event in ranges) for run, ranges in of_layer.items()}
        middle = statistics.median_low(taken.values())
        chosen += of_layer[min(run for run, its in taken.items() if its == middle)]
    return sorted(chosen, key=lambda event: (event["ts"], event["name"]))


def _range(event: Event) -> re.Match[str] | None:
    return _RANGE.fullmatch(str(event.get("name", ""))) if event.get("ph") == "X" and not _is_module(event) else None


def _is_module(event: Event) -> bool:
    return bool(event.get("args", {}).get("Python module id") is not None and event["name"].startswith(_PREFIXES))


def _as_expected(event: Event) -> Event:
    if event.get("cat") == "cuda_runtime":
        return event | {"cat": "runtime"}
    if event.get("cat") == "cpu_op" and _range(event):
        return event | {"cat": "user_annotation"}  # no operator of the model
    args = event.get("args", {})
    if event.get("cat") == "python_function" and "Python module id" in args:
        return event | {"args": {name: value for name, value in args.items() if name != "Python module id"}}
    return event


def _module_event(event: Event, number: int, threads: dict[Any, list[tuple[float, float]]]) -> Event:
    """On the thread that ran most of the range's operators: a backward on CUDA runs on autograd's own thread."""
    start, end = event["ts"], event["ts"] + event["dur"]
    inside = {
        tid: sum(min(end, last) - max(start, first) for first, last in spans if first < end and last > start)
        for (pid, tid), spans in threads.items()
        if pid == event["pid"]
    }
    busiest = max(inside, key=lambda tid: inside[tid], default=event["tid"])
    tid = event["tid"] if inside.get(event["tid"], 0.0) >= inside.get(busiest, 0.0) else busiest
    found = _range(event)
    assert found is not None
    return {
        "ph": "X",
        "cat": "python_function",
        "name": f"nn.Module: {found[1]}",
        "pid": event["pid"],
        "tid": tid,
        "ts": start,
        "dur": event["dur"],
        "args": {"Python id": 10**9 + number, "Python parent id": None, "Python module id": 0},
    }


def _operator_threads(events: list[Event]) -> dict[Any, list[tuple[float, float]]]:
    """(process, thread) -> times of its outermost operators."""
    found: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    operators = [event for event in events if event.get("cat") == "cpu_op" and event.get("ph") == "X"]
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        spans = found[event["pid"], event["tid"]]
        if not spans or event["ts"] >= spans[-1][1]:
            spans.append((event["ts"], event["ts"] + event["dur"]))
    return found
