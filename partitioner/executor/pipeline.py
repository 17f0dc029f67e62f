"""One rank's walk over its list of actions: receive, compute, send.

    F   receive activations from each source, run the stage's forward, send to each target: of a stage whose ranks take
        turns, from and to the one whose turn the micro-batch is
    B   receive gradients from each target, run the stage's backward, send to each source

Sends return at once and receives wait, so any list that `check_schedule` accepts runs through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from partitioner.actions import Action
from partitioner.errors import UnsupportedModelError
from partitioner.executor.mesh import Mesh
from partitioner.executor.randomness import Randomness
from partitioner.executor.recorder import Recorder
from partitioner.executor.reduction import Reduction
from partitioner.executor.replicas import Replicas
from partitioner.executor.turns import InTurn, Outputs
from partitioner.losses import Loss, Weight
from partitioner.microbatches import MicroBatch
from partitioner.parts import Payload
from partitioner.reaching import Reach
from partitioner.renewal import Kept
from partitioner.schedule import build_schedule, taking_turns
from partitioner.slicing import Slice, SliceRun, backward_through, gradients_of
from partitioner.structures import map_tensors, share_memory
from partitioner.unannounced import may_write_unannounced
from partitioner.wire import Receiver, Sender, Tag


class WholeModel:
    """The one stage of a plan without cuts: the model as it is."""

    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        places = Reach(model, lambda path: 1).places.values()
        self._kept = Kept(places, (), model.parameters(), may_write_unannounced(model))

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], received: Mapping[int, Payload]) -> SliceRun:
        """The model's output."""
        self._kept.begin()
        output = self._model(*args, **kwargs)
        return SliceRun(output, self._kept.end() if torch.is_grad_enabled() else None)

    def held(self) -> AbstractContextManager[None]:
        """As `Slice.held`."""
        return nullcontext()

    def computing_loss(self) -> AbstractContextManager[None]:
        """As `Slice.computing_loss`."""
        return nullcontext()

    def as_after(self, run: SliceRun) -> AbstractContextManager[None]:
        """As `Slice.as_after`."""
        return self._kept.as_after(run.then)


class Pipeline:
    """Runs steps on this rank. `now` is the action under way, for whoever has to say where something failed."""

    def __init__(
        self,
        mesh: Mesh,
        part: Slice | WholeModel,
        loss: Loss,
        randomness: Randomness,
        recorder: Recorder,
        reduction: Reduction,
        replicas: Replicas | None = None,
    ) -> None:
        self._mesh, self._part, self._loss = mesh, part, loss
        self._randomness, self._recorder, self._replicas = randomness, recorder, replicas
        self._reduction = reduction
        self.now: Action | None = None
        here, device, ranks = mesh.rank, mesh.device, mesh.ranks_in_turn
        self._from = {s: InTurn(Receiver(mesh.channel(far, here), device) for far in ranks(s)) for s in part.sources}
        self._to = {t: InTurn(Sender(mesh.channel(here, far)) for far in ranks(t)) for t in part.targets}
        self._back_from = {t: Receiver(mesh.channel(mesh.rank_of(t), here), device) for t in part.targets}
        self._back_to = {s: Sender(mesh.channel(here, mesh.rank_of(s))) for s in part.sources}
        self._beside = Outputs(mesh) if mesh.is_last and mesh.num_turns > 1 else None
        self._runs: dict[int, SliceRun] = {}
        self._roots: dict[int, torch.Tensor] = {}

    def train(
        self, step: int, microbatches: Sequence[MicroBatch], shares: Sequence[Weight], outputs: list[Any] | None
    ) -> torch.Tensor | None:
        """Forward and backward of all micro-batches; their gradients are added to the parameters'.

        `shares`: what each micro-batch's loss counts for. The last stage puts its outputs, without their graphs, into
        `outputs` and returns its part of the loss; other stages return None.
        """
        mesh, count = self._mesh, len(microbatches)
        if mesh.world is not None:
            mesh.world.begin(count)
        for receiver in (*(some.of(0) for some in self._from.values()), *self._back_from.values()):
            receiver.expect()
        total: torch.Tensor | None = None
        if mesh.num_stages == 1:
            orders = build_schedule("1f1b", 1, count)  # nothing to fill: hold one micro-batch
        elif count == mesh.plan.num_microbatches:
            orders = mesh.plan.actions()
        else:
            orders = build_schedule(mesh.plan.schedule, mesh.num_stages, count)
        with self._part.held():
            for action in orders[mesh.stage]:
                self.now, k = action, action.microbatch
                if action.kind == "B":
                    self._backward(step, k, count)
                elif mesh.is_last:
                    part, output = self._forward_with_loss("F", step, k, count, microbatches[k], shares[k])
                    total = part if total is None else total + part
                    if outputs is not None:
                        outputs.append(map_tensors(output, torch.Tensor.detach, lambda _: None))
                else:
                    self._forward("F", step, k, count, microbatches[k])
        self.now = None
        for sender in (*(sender for some in self._to.values() for sender in some), *self._back_to.values()):
            sender.flush()
        return total

    def evaluate(self, step: int, microbatches: Sequence[MicroBatch]) -> list[Any]:
        """Forward of all micro-batches that are this rank's; the last stage's outputs, of all of them."""
        mesh, count, outputs = self._mesh, len(microbatches), dict[int, Any]()
        counts = [len(mesh.ranks_in_turn(stage)) for stage in range(mesh.num_stages)]
        with self._without_backward(count) as is_over:
            for action in taking_turns(counts, count)[sum(counts[: mesh.stage]) + mesh.turn]:
                self.now, k = action, action.microbatch
                outputs[k] = self._forward("E", step, k, count, microbatches[k]).output
                is_over(k)
        if self._beside is not None:
            outputs = self._beside.exchanged(step, outputs, count)
        return [outputs[k] for k in sorted(outputs)]

    def loss_of(self, step: int, microbatches: Sequence[MicroBatch], shares: Sequence[Weight]) -> torch.Tensor | None:
        """Forward of all micro-batches, without a backward: the last stage's part of the loss; None on other stages."""
        mesh, count = self._mesh, len(microbatches)
        total: torch.Tensor | None = None
        with self._without_backward(count) as is_over, self._loss.watching():
            for k in range(count):
                self.now = Action(mesh.stage, "F", k)
                if mesh.is_last:
                    part, _ = self._forward_with_loss("E", step, k, count, microbatches[k], shares[k])
                    total = part if total is None else total + part
                    del self._roots[k]
                else:
                    self._forward("E", step, k, count, microbatches[k])
                is_over(k)
        return total

    @contextmanager
    def _without_backward(self, count: int) -> Iterator[Callable[[int], None]]:
        """Around forwards of which nothing is kept: what is to be called when one is over."""
        mesh, senders = self._mesh, [sender for some in self._to.values() for sender in some]
        if mesh.world is not None:
            mesh.world.begin(count)
        if mesh.turn < count:
            for some in self._from.values():
                some.of(mesh.turn).expect()

        def is_over(k: int) -> None:
            del self._runs[k]
            for sender in senders:
                sender.keep_at_most(mesh.num_stages)

        with self._part.held():
            yield is_over
        self.now = None
        for sender in senders:
            sender.flush()

    def drop(self) -> None:
        """Let go of every connection and half-done message; gloo closes a connection when nothing refers to it."""
        self._from, self._to, self._back_from, self._back_to = {}, {}, {}, {}
        self._runs, self._roots, self._replicas, self._beside = {}, {}, None, None

    def _forward(self, kind: str, step: int, k: int, count: int, microbatch: MicroBatch) -> SliceRun:
        received = self._receive_activations(Tag(kind, step, k), count)
        args, kwargs = self._on_device((microbatch.args, microbatch.kwargs))
        with self._recorder.span("F", k), self._randomness.of(kind, step, k), self._mesh.as_model():
            run = self._part.run(args, kwargs, received)
        self._runs[k] = run
        for target, payload in run.sends.items():
            self._recorder.sends(target, k)
            self._to[target].of(k).send(Tag(kind, step, k), payload.header, payload.tensors)
        return run

    def _forward_with_loss(
        self, kind: str, step: int, k: int, count: int, microbatch: MicroBatch, share: Weight
    ) -> tuple[torch.Tensor, Any]:
        """The last stage's forward: its part of the loss, and the model's output."""
        received = self._receive_activations(Tag(kind, step, k), count)
        args, kwargs, target = self._on_device((microbatch.args, microbatch.kwargs, microbatch.target))
        with (
            self._recorder.span("F", k),
            self._randomness.of(kind, step, k),
            self._mesh.as_model(),
            self._loss.watching(),
        ):
            if self._replicas is not None and kind == "F":
                here = MicroBatch(args, kwargs, target, microbatch.samples)
                self._roots[k], part, output = self._replicas.forward(here, share, k == count - 1)
                self._runs[k] = SliceRun()
                return part, output
            run = self._part.run(args, kwargs, received)
            if run.inputs_written and share_memory(target, (microbatch.args, microbatch.kwargs)):
                raise UnsupportedModelError(
                    "the forward writes into its inputs on an earlier stage, and the target lies in their memory: here "
                    "it would be as it was before. Give the loss a copy, target=x.clone()"
                )
            with self._part.computing_loss():
                root = self._loss.part(run.output, target, share)
            output, run.output = run.output, None
        self._runs[k], self._roots[k] = run, root
        return root.detach(), output

    def _backward(self, step: int, k: int, count: int) -> None:
        gradients = {}
        for target, receiver in self._back_from.items():
            with self._recorder.receiving(target, k):
                _, gradients[target] = receiver.receive(Tag("B", step, k))
            if k + 1 < count:
                receiver.expect()
            self._to[target].of(k).release(Tag("F", step, k))
        run = self._runs.pop(k)
        with self._recorder.span("B", k), self._mesh.as_model():
            if self._replicas is not None:
                with self._replicas.syncing(k == count - 1):
                    self._roots.pop(k).backward()  # type: ignore[no-untyped-call]
            elif self._mesh.is_last:
                root = self._roots.pop(k)
                if root.requires_grad:
                    with self._part.as_after(run):
                        root.backward()  # type: ignore[no-untyped-call]
            else:
                with self._part.as_after(run):
                    backward_through(run, gradients)
            with self._mesh.as_executor():
                self._reduction.after_backward()
        for source, sender in self._back_to.items():
            self._recorder.sends(source, k)
            sender.send(Tag("B", step, k), b"", [_dense(gradient) for gradient in gradients_of(run, source)])
            sender.keep_at_most(self._mesh.num_stages)

    def _receive_activations(self, tag: Tag, count: int) -> dict[int, Payload]:
        received = {}
        later = tag.microbatch + self._mesh.num_turns  # this rank's next one
        for source, some in self._from.items():
            with self._recorder.receiving(source, tag.microbatch):
                header, tensors = some.of(tag.microbatch).receive(tag)
            if later < count:
                some.of(later).expect()
            kept = [tensor for tensor in tensors if tensor is not None]
            received[source] = Payload(header, kept, is_given_away=True)
        return received

    def _on_device(self, value: Any) -> Any:
        return map_tensors(value, lambda tensor: tensor.to(self._mesh.device, non_blocking=True))


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient if gradient is None or gradient.layout == torch.strided else gradient.to_dense()
