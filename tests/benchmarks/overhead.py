"""What slicing adds to a forward: GPT-2 of 12 layers in stages against its plain forward, pair by pair.

    python tests/benchmarks/overhead.py --batches 1 2 4 --stages 4 --rounds 40 --json overhead.json

sum       all stages' forwards of one micro-batch one after another, against the plain forward
fixed     the same in milliseconds: what is added is Python, a time for each stage that does not grow with the work
prefix    of each stage, the time until its own part begins: with stand-ins for what is before it
step      what each stage puts into its place once a step, for all of its micro-batches: in milliseconds, not in the sum

The plain forward and all stages run in turns: plain, stages, plain, stages, ..., plain. A round is all stages against
the mean of the plain forwards just before and just after, so that drift of the machine meets both alike. Each stage has
modules of its own, as on a rank; their parameters are the same tensors. Tensors pass between stages outside of the
times. Given are the median over rounds and its 95 % interval (order statistics: Conover, Practical Nonparametric
Statistics), on the clock and in seconds of this process on the processor: turns of other programs do not count there,
what they do to caches does. Memory that was freed stays with the process where its allocator is glibc's: else the
kernel clears up to 100 MiB of pages again for whichever forward comes after one that gave much back, by chance.

With `--width 48 --length 4 --rounds 300` nearly all is Python, so that `fixed` is known to 0.1 ms on busy machines too:
that is of warm caches, and about half of what it is where the layers are large and empty them.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models
import torch
from side_by_side import possible_cuts, split
from torch import nn

from partitioner.capture import capture
from partitioner.parts import Payload
from partitioner.slicing import Slice, _sent
from partitioner.walking import Meter


class Moment(NamedTuple):
    """Seconds on the clock, and of this process on the processor."""

    wall_s: float
    processor_s: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), time.process_time())

    def since(self, start: Moment) -> Moment:
        return Moment(self.wall_s - start.wall_s, self.processor_s - start.processor_s)


class Begins(Meter):
    """When a stage's own part begins."""

    def begin(self, received: dict[str, torch.Tensor], around: dict[str, torch.Tensor]) -> None:
        self.at = Moment.now()


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


def with_own_modules(model: nn.Module) -> nn.Module:
    """A copy of the model that has the very same parameters and buffers."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


class Rounds(NamedTuple):
    """Times of all rounds; of plain forwards there is one more."""

    plain: list[Moment]
    stages: list[list[Moment]]
    prefixes: list[list[Moment]]
    steps: list[Moment]

    @classmethod
    def of(cls, model: nn.Module, slices: Sequence[Slice], kwargs: dict[str, Any], rounds: int) -> Rounds:
        found = cls([], [[] for _ in slices], [[] for _ in slices], [])

        def plain() -> Moment:
            start = Moment.now()
            output = model(**kwargs)
            spent = Moment.now().since(start)
            del output
            return spent

        with ExitStack() as held:
            for part in slices:
                for _ in range(3):
                    start = Moment.now()
                    with part.held():
                        pass
                    found.steps.append(Moment.now().since(start))
                held.enter_context(part.held())
            for repeat in range(-3, rounds):
                runs: list[Any] = []
                if repeat == 0:
                    found.plain.append(plain())
                for stage, part in enumerate(slices):
                    received: dict[int, Payload] = {source: _sent(runs[source].sends[stage]) for source in part.sources}
                    begins = Begins()
                    start = Moment.now()
                    runs.append(part.run((), kwargs, received, meter=begins))
                    stop = Moment.now()
                    if repeat >= 0:
                        found.stages[stage].append(stop.since(start))
                        found.prefixes[stage].append(begins.at.since(start))
                del runs
                after = plain()
                if repeat >= 0:
                    found.plain.append(after)
        return found

    def rows(self, clock: int) -> list[Row]:
        """Of one of the two clocks."""
        around = [(before[clock] + after[clock]) / 2 for before, after in itertools.pairwise(self.plain)]
        sums = [sum(moment[clock] for moment in one) for one in zip(*self.stages, strict=True)]
        found = [
            Row("sum of stages", "ratio", *interval([s / p - 1 for s, p in zip(sums, around, strict=True)])),
            Row("fixed", "ms", *interval([1e3 * (s - p) for s, p in zip(sums, around, strict=True)])),
        ]
        for stage, times in enumerate(self.prefixes):
            shares = [moment[clock] / p for moment, p in zip(times, around, strict=True)]
            found.append(Row(f"prefix of stage {stage}", "ratio", *interval(shares)))
        return [*found, Row("a stage's step", "ms", *interval([1e3 * moment[clock] for moment in self.steps]))]


class Row(NamedTuple):
    what: str
    unit: str
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.unit == "ms":
            return f"{self.median:+6.2f} [{self.low:+6.2f}, {self.high:+6.2f}] ms"
        return f"{self.median:+7.2%} [{self.low:+7.2%}, {self.high:+7.2%}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4], help="samples of a micro-batch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    sizes = []
    for batch in options.batches:
        case = models.build(
            "gpt2", batch=batch, layers=options.layers, width=options.width, length=options.length, vocabulary=1000
        )
        kwargs = case.kwargs or {}
        captured = capture(case.model, (), kwargs, max_share=1 / 40)
        cuts = blocks_cut(possible_cuts(captured), options.stages, options.layers)
        stage_of = split(captured, cuts)
        slices = [Slice(with_own_modules(case.model), captured, stage_of, stage) for stage in range(options.stages)]
        rounds = Rounds.of(case.model, slices, kwargs, options.rounds)
        plain = [statistics.median(moment[clock] for moment in rounds.plain) for clock in (0, 1)]
        print(
            f"\nplain forward {plain[0] * 1e3:.1f} ms, {plain[1] * 1e3:.1f} ms on the processor; "
            f"cut before {', '.join(cuts)}; {options.rounds} rounds"
        )
        print(f"{'':18} {'on the clock':40} on the processor")
        rows = [rounds.rows(clock) for clock in (0, 1)]
        for wall, processor in zip(*rows, strict=True):
            print(f"{wall.what:18} {wall!s:40} {processor}")
        sizes.append(
            {
                "batch": batch,
                "plain_s": plain[0],
                "plain_processor_s": plain[1],
                "cuts": cuts,
                "rows": [row._asdict() for row in rows[0]],
                "processor_rows": [row._asdict() for row in rows[1]],
            }
        )
    if options.json:
        options.json.write_text(json.dumps({"sizes": sizes}, indent=1))


if __name__ == "__main__":
    main()
