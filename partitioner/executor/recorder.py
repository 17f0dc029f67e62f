"""Write down when a rank did what, and put the ranks' notes together on one clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from partitioner.executor.mesh import Mesh
from partitioner.timeline import Span, Timeline


class Message(NamedTuple):
    """One end of a message: when it was posted, or from when to when it was waited for."""

    source: int
    target: int
    microbatch: int
    start_s: float
    end_s: float


@dataclass
class _Notes:
    """Times are seconds on the host, or events on a CUDA stream until `_on_host` turns them into seconds."""

    spans: list[Span] = field(default_factory=list)
    posted: list[Message] = field(default_factory=list)
    awaited: list[Message] = field(default_factory=list)

    def moved(self, move: Callable[[Any], float]) -> _Notes:
        """The same notes on another clock."""

        def on_clock(item: Any) -> Any:
            return item._replace(start_s=move(item.start_s), end_s=move(item.end_s))

        return _Notes(*([on_clock(item) for item in items] for items in (self.spans, self.posted, self.awaited)))


class Recorder:
    """Notes of one rank about its last step, the optimizer's update after it included."""

    def __init__(
        self, mesh: Mesh, parameters: list[torch.nn.Parameter], owner_sets: Collection[tuple[int, ...]]
    ) -> None:
        self._mesh = mesh
        self._partners = {
            stage: {rank for stages in owner_sets if stage in stages for rank in mesh.ranks_of(stages)}
            for stage in range(mesh.num_stages)
        }
        self._notes = _Notes()
        self._computed_s = self._processor_s = 0.0
        self._ours = {id(parameter) for parameter in parameters}
        self._update_began: Any = None
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    def begin(self) -> None:
        """A new step: forget the last one."""
        self._notes = _Notes()
        self._computed_s = self._processor_s = 0.0

    @contextmanager
    def span(self, kind: str, microbatch: int = -1) -> Iterator[None]:
        """What happens inside takes this rank's time."""
        start, before = self._now(), time.thread_time()
        yield
        span = Span(self._mesh.rank, kind, self._mesh.stage, microbatch, start, self._now())
        self._notes.spans.append(span)
        if kind in "FBIW" and self._mesh.device.type != "cuda":
            self._computed_s += span.end_s - span.start_s
            self._processor_s += time.thread_time() - before

    def processor_share(self) -> float | None:
        """The part of this rank's forwards and backwards in which its thread had a processor; None on a device."""
        return self._processor_s / self._computed_s if self._computed_s else None

    @contextmanager
    def receiving(self, source: int, microbatch: int) -> Iterator[None]:
        """Inside, the rank waits for a message of that stage."""
        start = self._now()
        yield
        self._notes.awaited.append(Message(source, self._mesh.stage, microbatch, start, self._now()))

    def sends(self, target: int, microbatch: int) -> None:
        """A message to that stage leaves now."""
        now = self._now()
        self._notes.posted.append(Message(self._mesh.stage, target, microbatch, now, now))

    def timeline(self) -> Timeline:
        """The last step of all ranks, in seconds since its first action; every rank calls it and gets the same."""
        ahead = self._clock_offset()
        everyone = self._mesh.gather((self._mesh.replica, self._on_host().moved(lambda moment: moment - ahead)))
        start = min((span.start_s for _, notes in everyone for span in notes.spans), default=0.0)
        everyone = [(replica, notes.moved(lambda moment: moment - start)) for replica, notes in everyone]
        posted = {(replica, *message[:3]): message.start_s for replica, notes in everyone for message in notes.posted}
        reducing = {span.rank: span.start_s for _, notes in everyone for span in notes.spans if span.kind == "sync"}
        spans: list[Span] = []
        for replica, notes in everyone:
            spans += [self._without_waiting(span, reducing) for span in notes.spans]
            for message in notes.awaited:
                left = posted.get((replica, *message[:3]))
                if left is not None:
                    spans += self._travel(replica, message, left)
        return Timeline(tuple(sorted(spans, key=lambda span: span.start_s)), self._mesh.plan.num_ranks, measured=True)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _without_waiting(self, span: Span, reducing: Mapping[int, float]) -> Span:
        """A sync begins when the last rank that takes part has come; until then the others are idle."""
        if span.kind != "sync":
            return span
        came = (reducing[rank] for rank in self._partners[span.stage] if rank in reducing)
        begun = max(came, default=span.start_s)  # a stage without parameters has no partners
        return span._replace(start_s=min(max(span.start_s, begun), span.end_s))

    def _travel(self, replica: int, message: Message, left: float) -> list[Span]:
        """A message on its way, and the part of it that the receiver stood waiting."""
        at = replica, message.microbatch
        ranks = [self._mesh.rank_of(stage, *at) for stage in (message.source, message.target)]
        arrived = max(message.end_s, left)
        waited = min(max(left, message.start_s), arrived)
        return [
            Span(ranks[0], "send", message.source, message.microbatch, left, arrived),
            Span(ranks[1], "recv", message.target, message.microbatch, waited, arrived),
        ]

    def _now(self) -> Any:
        """This moment; on CUDA that of the stream, so that nothing waits for the clock."""
        if self._mesh.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _on_host(self) -> _Notes:
        """The notes in seconds of the host's clock."""
        if self._mesh.device.type != "cuda":
            return self._notes
        last = self._now()
        last.synchronize()
        now = time.perf_counter()

        return self._notes.moved(lambda mark: now - mark.elapsed_time(last) / 1000)

    def _clock_offset(self) -> float:
        """Seconds that this rank's clock is ahead of an arbitrary common one: 0 where all ranks share a machine.

        Elsewhere all ranks leave a barrier at about the same moment; the median of several.
        """
        if len(set(self._mesh.gather(_machine()))) == 1:
            return 0.0
        moments = []
        for _ in range(9):
            dist.barrier(group=self._mesh.control)
            moments.append(time.perf_counter())
        first = self._mesh.gather(moments)[0]
        return float(statistics.median(here - there for here, there in zip(moments, first, strict=True)))

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._update_began = self._now()

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(parameter) in self._ours for group in optimizer.param_groups for parameter in group["params"][:1]):
            mesh = self._mesh
            self._notes.spans.append(Span(mesh.rank, "optimizer", mesh.stage, -1, self._update_began, self._now()))


def _machine() -> str:
    """What tells machines with different clocks apart."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read()
    except OSError:
        import socket

        return socket.gethostname()
