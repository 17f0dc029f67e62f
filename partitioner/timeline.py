"""What every rank did and when, on one clock: predicted by the simulator or measured by the executor, alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from partitioner.display import Shown

COMPUTE = ("F", "B", "I", "W")
COMMUNICATION = ("recv", "sync")


class Span(NamedTuple):
    """Something that took time. Kinds, and what they say about the rank:

        F, B        it computes the stage's forward or backward of the micro-batch
        I, W        it computes a part of that backward: gradients of the inputs, gradients of the weights
        recv        it waits for tensors of the micro-batch that are on their way (before they were sent, it is idle)
        sync        it reduces the stage's gradients over replicas, or with other owners of a shared parameter
        optimizer   it updates the stage's parameters; after the step, not in it
        send        tensors of the micro-batch travel, from when they leave until they arrive; the rank does not wait

    All but send exclude one another on a rank. `microbatch` is -1 for sync and optimizer.
    """

    rank: int
    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, repr=False)
class Timeline(Shown):
    """One step of all ranks. Each rank's time is compute, communication or idle, and they add up to the step.

    >>> half = Timeline((Span(0, "F", 0, 0, 0.0, 1.0), Span(1, "F", 1, 0, 1.0, 2.0)), num_ranks=2, measured=False)
    >>> half.step_s, half.bubble_fraction, half.idle_s(0)
    (2.0, 0.5, 1.0)
    """

    spans: tuple[Span, ...]
    """In no particular order."""
    num_ranks: int
    measured: bool
    """False: simulated."""

    @cached_property
    def start_s(self) -> float:
        """When the first rank begins, on the clock of the spans."""
        return min((span.start_s for span in self.spans), default=0.0)

    @cached_property
    def step_s(self) -> float:
        """From the first action to the end of the last, gradient sync included, optimizer not."""
        return max((span.end_s for span in self.spans if span.kind != "optimizer"), default=0.0) - self.start_s

    @cached_property
    def optimizer_s(self) -> float:
        """What the slowest rank's optimizer takes."""
        return max(self._seconds("optimizer"), default=0.0)

    def busy_s(self, rank: int, stage: int | None = None) -> float:
        """Seconds that the rank computes, over the step; `stage`: for that stage alone."""
        return self._busy_s[rank] if stage is None else self._of_stage(COMPUTE).get((rank, stage), 0.0)

    def communication_s(self, rank: int, stage: int | None = None) -> float:
        """Seconds that the rank waits for transfers and gradient sync, not hidden behind compute."""
        return self._communication_s[rank] if stage is None else self._of_stage(COMMUNICATION).get((rank, stage), 0.0)

    def idle_s(self, rank: int) -> float:
        """Seconds of the step in which the rank has nothing to do."""
        return max(0.0, self.step_s - self.busy_s(rank) - self.communication_s(rank))

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks / (ranks x step)."""
        if not self.step_s:
            return 0.0
        return sum(map(self.idle_s, range(self.num_ranks))) / (self.num_ranks * self.step_s)

    @cached_property
    def _by_stage(self) -> dict[tuple[str, ...], dict[tuple[int, int], float]]:
        totals: dict[tuple[str, ...], dict[tuple[int, int], float]] = {COMPUTE: {}, COMMUNICATION: {}}
        for kinds, seconds in totals.items():
            for span in self.spans:
                if span.kind in kinds:
                    key = (span.rank, span.stage)
                    seconds[key] = seconds.get(key, 0.0) + span.end_s - span.start_s
        return totals

    def _of_stage(self, kinds: tuple[str, ...]) -> dict[tuple[int, int], float]:
        return self._by_stage[kinds]

    @cached_property
    def _busy_s(self) -> list[float]:
        return self._seconds(*COMPUTE)

    @cached_property
    def _communication_s(self) -> list[float]:
        return self._seconds(*COMMUNICATION)

    def _seconds(self, *kinds: str) -> list[float]:
        seconds = [0.0] * self.num_ranks
        for span in self.spans:
            if span.kind in kinds:
                seconds[span.rank] += span.end_s - span.start_s
        return seconds
