"""What slicing adds to a forward: GPT-2 of 12 layers in stages against its plain forward, pair by pair.

    python tests/benchmarks/overhead.py --stages 4 --rounds 40 --json overhead.json

sum       all stages' forwards of one micro-batch one after another, against the plain forward
prefix    of each stage, the time until its own part begins: with stand-ins for what is before it

The plain forward and all stages run in turns: plain, stages, plain, stages, ..., plain. A round is all stages against
the mean of the plain forwards just before and just after, so that drift of the machine meets both alike. Times are
seconds of this process on the processor (turns of other programs do not count, what they do to caches does), or on the
clock where there are several threads. Memory that was freed stays with the process where its allocator is glibc's: else
the kernel clears up to 100 MiB of pages again for whichever forward comes after one that gave much back, by chance.
What is added is Python, a time for each stage and call that does not grow with the work: some 3 to 4 ms a stage here,
so half of the width or of the batch doubles its share. Tensors pass between stages outside of the times. Given are the
median over rounds and its 95 % interval (order statistics of the ratios: Conover, Practical Nonparametric Statistics).
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
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


def keep_memory() -> None:
    """Let glibc give no freed memory back to the system, nor take large blocks from it one by one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MMAP_THRESHOLD, 2**30)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""malloc.h"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
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
        if repeat == 0:
            plain_s.append(plain())
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
        after = plain()
        if repeat >= 0:
            plain_s.append(after)
    around_s = [(before + after) / 2 for before, after in itertools.pairwise(plain_s)]
    sums = [sum(times) / whole - 1 for *times, whole in zip(*stage_s, around_s, strict=True)]
    forward = statistics.median(plain_s)
    print(f"plain forward {forward * 1e3:.1f} ms; cut before {', '.join(cuts)}; {options.rounds} rounds")
    rows = [("sum of stages", *interval(sums))]
    for stage, times in enumerate(prefix_s):
        rows.append(
            (f"prefix of stage {stage}", *interval([t / whole for t, whole in zip(times, around_s, strict=True)]))
        )
    for name, middle, low, high in rows:
        print(f"{name:18} {middle:+7.2%}   95 % interval of the median {low:+7.2%} to {high:+7.2%}")
    if options.json:
        found = [{"what": name, "median": middle, "low": low, "high": high} for name, middle, low, high in rows]
        options.json.write_text(json.dumps({"plain_s": forward, "cuts": cuts, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
