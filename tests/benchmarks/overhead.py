"""What slicing adds to a forward: GPT-2 of 12 layers in stages against its plain forward, pair by pair.

    python tests/benchmarks/overhead.py --stages 4 --rounds 30 --json overhead.json

sum       all stages' forwards of one micro-batch one after another, against the plain forward
prefix    of each stage, the time until its own part begins: with stand-ins for what is before it

A round times the plain forward and every stage in turns, so that drift of the machine meets all alike, in seconds of
this process on the processor (other programs' turns do not count), or on the clock where there are several threads.
Given are the median over rounds and its 95 % interval (order statistics of the ratios: Conover, Practical Nonparametric
Statistics).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models
import torch
from side_by_side import possible_cuts, split

from partitioner.capture import capture
from partitioner.parts import Payload
from partitioner.slicing import Slice, _sent
from partitioner.walking import Meter


class Begins(Meter):
    """When a stage's own part begins."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.at = clock, 0.0

    def begin(self, received: dict[str, torch.Tensor], around: dict[str, torch.Tensor]) -> None:
        self.at = self.clock()


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the 95 % interval of it that needs no assumption on how the values are spread."""
    ordered, n = sorted(values), len(values)
    reach = 1.96 * math.sqrt(n) / 2
    low, high = max(0, math.floor(n / 2 - reach)), min(n - 1, math.ceil(n / 2 + reach))
    return statistics.median(values), ordered[low], ordered[high]


def blocks_cut(names: list[str], stages: int, layers: int) -> list[str]:
    """Cuts before whole blocks, as even as they go."""
    wanted = [f"transformer.h.{round(layers * k / stages)}" for k in range(1, stages)]
    return [next(name for name in names if name == path or name.startswith(f"{path}.")) for path in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    case = models.build(
        "gpt2", batch=options.batch, layers=options.layers, width=options.width, length=options.length, vocabulary=1000
    )
    kwargs = case.kwargs or {}
    captured = capture(case.model, (), kwargs, max_share=1 / 40)
    cuts = blocks_cut(possible_cuts(captured), options.stages, options.layers)
    stage_of = split(captured, cuts)
    slices = [Slice(case.model, captured, stage_of, stage) for stage in range(options.stages)]
    plain_s: list[float] = []
    stage_s: list[list[float]] = [[] for _ in slices]
    prefix_s: list[list[float]] = [[] for _ in slices]

    def plain() -> float:
        start = clock()
        output = case.model(**kwargs)
        seconds = clock() - start
        del output
        return seconds

    for repeat in range(-3, options.rounds):
        runs = []
        before = plain()
        for stage, part in enumerate(slices):
            received: dict[int, Payload] = {source: _sent(runs[source].sends[stage]) for source in part.sources}
            begins = Begins(clock)
            start = clock()
            runs.append(part.run((), kwargs, received, meter=begins))
            stop = clock()
            if repeat >= 0:
                stage_s[stage].append(stop - start)
                prefix_s[stage].append(begins.at - start)
        del runs
        if repeat >= 0:
            plain_s.append((before + plain()) / 2)
    sums = [sum(times) / whole - 1 for *times, whole in zip(*stage_s, plain_s, strict=True)]
    forward = statistics.median(plain_s)
    print(f"plain forward {forward * 1e3:.1f} ms; cut before {', '.join(cuts)}; {options.rounds} rounds")
    rows = [("sum of stages", *interval(sums))]
    for stage, times in enumerate(prefix_s):
        rows.append(
            (f"prefix of stage {stage}", *interval([t / whole for t, whole in zip(times, plain_s, strict=True)]))
        )
    for name, middle, low, high in rows:
        print(f"{name:18} {middle:+7.2%}   95 % interval of the median {low:+7.2%} to {high:+7.2%}")
    if options.json:
        found = [{"what": name, "median": middle, "low": low, "high": high} for name, middle, low, high in rows]
        options.json.write_text(json.dumps({"plain_s": forward, "cuts": cuts, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
