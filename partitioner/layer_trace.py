"""Make a torch.profiler trace open in TensorBoard's profiler plugin with layers by their full names.

The plugin (torch-tb-profiler 0.4.3) lists modules from `nn.Module: Class_0` events, by class, and only where Python
stacks were recorded; and it finds no device time in traces of today's PyTorch, which call the category of CUDA launches
`cuda_runtime` where it looks for `runtime`. So ranges that carry a layer's full name become its module events, those
by class become plain Python functions, and the category gets the name that it had.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from partitioner.errors import ArgumentError
from partitioner.profiles import write_whole

DIRECTIONS = ("forward ", "backward ")
"""How the profiler's ranges begin; the layer's full id follows."""

Event = dict[str, Any]


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
    """The events with a module event for each range of a layer."""
    kept = [_as_expected(event) for event in events if not _is_module(event)]
    threads = _operator_threads(kept)
    ranges = [event for event in kept if _is_layer(event)]
    return kept + [_module_event(event, k, threads) for k, event in enumerate(ranges)]


def _is_layer(event: Event) -> bool:
    return event.get("cat") == "user_annotation" and str(event.get("name", "")).startswith(DIRECTIONS)


def _is_module(event: Event) -> bool:
    return bool(event.get("args", {}).get("Python module id") is not None and event["name"].startswith(_PREFIXES))


_PREFIXES = tuple(f"nn.Module: {direction}" for direction in DIRECTIONS)


def _as_expected(event: Event) -> Event:
    if event.get("cat") == "cuda_runtime":
        return event | {"cat": "runtime"}
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
    return {
        "ph": "X",
        "cat": "python_function",
        "name": f"nn.Module: {event['name']}",
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
