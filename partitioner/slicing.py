"""Run one stage of a model by running the model's own forward, with stand-ins for what other stages compute.

    earlier layers      return stand-ins: shape and dtype only, as the earlier stage logged them
    glue before stage   runs where its inputs are real (masks, positions); on stand-ins it follows the log
    end of the log      the stand-ins that were received become real tensors, in place: every reference resolves
    own layers, glue    run as they are
    next stage's layer  ends the forward; what later stages still need is collected

The log (see `logbook`) says, for every call and torch function of the earlier stages, what came out. A forward that
goes another way than the log says is an error on the spot, never another number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from partitioner.capture import copied
from partitioner.errors import UnsupportedModelError
from partitioner.parts import Part, Payload
from partitioner.renewal import Then
from partitioner.restore import modes, set_modes
from partitioner.structures import map_tensors
from partitioner.tracing import computing, watching
from partitioner.walking import Meter, Reached, Walk, strided_like


@dataclass
class SliceRun:
    """One forward of one stage.

    `sends`: by target stage; its tensors still carry their graph.
    `leaves`: by source stage, beside the tensors received; None where no gradient is wanted.
    `output`: the model's own, on the last stage.
    """

    output: Any = None
    then: Then | None = None
    """What the forward has left of what forwards change."""
    inputs_written: bool = False
    """On the last stage: whether an earlier one has written into the model's inputs."""
    sends: dict[int, Payload] = field(default_factory=dict)
    leaves: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)


class Slice(Part):
    """Stage `stage` of `model`, cut as `stage_of` says (layer id -> stage).

    `sources` and `targets` are the stages it receives from and sends to, every micro-batch. Parameters of other
    stages are never read.
    """

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        received: Mapping[int, Payload] | None = None,
        *,
        meter: Meter | None = None,
    ) -> SliceRun:
        """Forward of one micro-batch, under the caller's grad mode and random state.

        `received`: what each of `sources` sent. `meter` is told of the stage's own part.
        """
        walk = Walk(self, received or {}, meter)
        if self.stage:
            mine = copied if walk.inputs_written else _alias
            args = tuple([map_tensors(value, mine) for value in args])
            kwargs = {name: map_tensors(value, mine) for name, value in kwargs.items()}
        walk.note_inputs((args, kwargs))
        output: Any = None
        ended_early = False
        before = modes()
        try:
            with watching(walk):
                walk.start()
                try:
                    output = self.model(*args, **kwargs)
                    walk.begin()
                    walk.follow_call("")
                    walk.keep_survivors()
                    ended_early = True
                except Reached:  # before the model could switch back what it had switched
                    with torch._C.DisableTorchFunction():
                        if modes() != before:
                            set_modes(before)
                walk.drop_hooks()
                if walk.failure is not None:
                    raise walk.failure
                self.refuse_hooks()
                walk.refuse_partial_gradients()
                walk.changes(f"the code after {walk.moment}" if walk.moment else "the code")
                then = self._left_by(walk)
            if meter is not None:
                meter.end(walk.survivors)
            if self.stage + 1 == self.num_stages:
                walk.refuse_stand_ins(output)
                return SliceRun(output, then, walk.inputs_written, leaves=walk.leaves)
            return SliceRun(None, then, sends=walk.collect(ended_early), leaves=walk.leaves)
        finally:
            walk.put_back()
            if self.shared is not None:
                self.shared.show()

    def _left_by(self, walk: Walk) -> Then | None:
        if self.shared is None:
            return None
        try:
            return self.shared.end(early=walk.ended, rest=walk.rest, recomputes=walk.recomputes)
        except UnsupportedModelError as error:
            raise walk.failed(error) from None

    @contextmanager
    def as_after(self, run: SliceRun) -> Iterator[None]:
        """For the backward of `run`: inside, the model is as that forward left it, though others have run since."""
        with computing(), nullcontext() if self.shared is None else self.shared.kept.as_after(run.then):
            yield

    @contextmanager
    def computing_loss(self) -> Iterator[None]:
        """On the last stage: the block is the loss function; see `SharedState.computing_loss`."""
        with computing(), nullcontext() if self.shared is None else self.shared.computing_loss():
            yield


def chain(
    slices: Sequence[Slice],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    before_each: Callable[[], None] = lambda: None,
    before_backward: Callable[[int], None] = lambda stage: None,
) -> tuple[list[SliceRun], Callable[[torch.Tensor], None]]:
    """All stages one after another in this process, and the backward through them for a loss of the last output.

    Each stage gets a copy of the inputs, and contiguous copies of what is sent to it, as over a wire. `before_each` is
    called before every forward, `before_backward(stage)` before every backward.
    """
    runs: list[SliceRun] = []
    for part in slices:
        received = {source: _sent(runs[source].sends[part.stage]) for source in part.sources}
        mine_args, mine_kwargs = map_tensors((args, dict(kwargs)), copied)
        before_each()
        runs.append(part.run(mine_args, mine_kwargs, received))

    def backward(loss: torch.Tensor) -> None:
        before_backward(len(runs) - 1)
        if loss.requires_grad:  # not where nothing at all is trained
            loss.backward()  # type: ignore[no-untyped-call]
        for stage in range(len(runs) - 2, -1, -1):
            before_backward(stage)
            backward_through(runs[stage], {t: gradients_of(runs[t], stage) for t in runs[stage].sends})

    return runs, backward


def _sent(payload: Payload) -> Payload:
    copies = [torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t.detach()) for t in payload.tensors]
    return Payload(payload.header, copies, is_given_away=True)


def gradients_of(run: SliceRun, source: int) -> list[torch.Tensor | None]:
    """After a backward of `run`: the gradients that its source stage is waiting for, beside the tensors it sent."""
    return [None if leaf is None else leaf.grad for leaf in run.leaves[source]]


def backward_through(run: SliceRun, gradients: Mapping[int, Sequence[torch.Tensor | None]]) -> None:
    """Backward of a stage that is not the last, from the gradients that came back, by target stage."""
    tensors: dict[int, torch.Tensor] = {}
    sums: dict[int, torch.Tensor] = {}
    for target, payload in run.sends.items():
        for tensor, gradient in zip(payload.tensors, gradients[target], strict=True):
            if gradient is None or not tensor.requires_grad:
                continue
            key, gradient = id(tensor), strided_like(gradient, tensor)
            tensors[key] = tensor
            sums[key] = sums[key] + gradient if key in sums else gradient
    if tensors:
        torch.autograd.backward(list(tensors.values()), list(sums.values()))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another object of the same values, so that the user's own tensor never becomes a stand-in."""
    return tensor if tensor.requires_grad else tensor.detach()
