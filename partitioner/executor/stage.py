"""The stage that a rank trains: what a training loop needs, the same on one device and on many."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, DistributedSampler

from partitioner.actions import check_schedule
from partitioner.errors import ArgumentError, NotBuiltError, SetupError, UnsupportedModelError, expect
from partitioner.executor.afterwards import Afterwards, NoLocalNorm
from partitioner.executor.agreement import Alike, digest, refuse_differing, refuse_drift, refuse_other_order
from partitioner.executor.buffers import ReplicaBuffers
from partitioner.executor.by_hand import warn_of_parts
from partitioner.executor.calls import Calls
from partitioner.executor.division import Division
from partitioner.executor.failures import Failures
from partitioner.executor.inputs import InputGradients
from partitioner.executor.mesh import Mesh, join_mesh
from partitioner.executor.pipeline import Pipeline, WholeModel
from partitioner.executor.placement import ModelOrFactory, Placement, WeightsLike, full_state_dict
from partitioner.executor.randomness import Randomness
from partitioner.executor.recorder import Recorder
from partitioner.executor.reduction import Reduction
from partitioner.executor.replicas import Replicas
from partitioner.executor.scaling import AgreedScaling
from partitioner.losses import Loss, LossFunction, LossWeight, Weight, refuse_trained
from partitioner.microbatches import BatchDim, Cutter, MicroBatch, as_call, as_given, join, named_dims
from partitioner.plan import Plan
from partitioner.recompute import Recomputed
from partitioner.slicing import Slice
from partitioner.specs import EXECUTED
from partitioner.structures import tensors_in
from partitioner.timeline import Timeline
from partitioner.world import refuse_groups

COMPARE_FIRST, COMPARE_EVERY = 2, 100
"""Steps at which the ranks of a replica compare their batches: the first ones, then every so often. So do all that hold
copies of a parameter with these: in the second step, and then as often."""


def materialize(
    plan: Plan,
    model: ModelOrFactory,
    *,
    loss_fn: LossFunction | None = None,
    loss_weight: LossWeight | None = None,
    weights: WeightsLike | None = None,
    batch_dim: BatchDim | None = None,
    device: str | torch.device | None = None,
    timeout: float | None = None,
    seed: int | None = None,
    keep_output: bool = True,
) -> LiveStage:
    """This rank's stage of the plan, ready to train; the same call on every rank. Use it in a `with` block.

    `model`: a module is taken over in place: parameters of other stages become placeholders, names stay. A function
    that builds one is called on the meta device, and each rank reads only its own tensors from `weights`: a state
    dict, a .safetensors file or a folder of them, a file of torch.save, or a checkpoint of `save_checkpoint`.
    `loss_fn(output, target)`: None takes the model's own loss. `loss_weight(inputs, target)`: what a micro-batch
    counts for in a mean over something else than samples or valid labels; "sum" where the loss is a sum; "samples".
    None: as the plan found, or as the labels of each batch tell.
    `batch_dim`: where samples lie, where that is elsewhere than the plan says: a dimension, or those of the arguments
    that differ from the plan's: {"positions": None, "target": 0}.
    `timeout`: seconds without progress after which a rank gives up; None is max(60, 10 x the predicted step).
    `seed`: of dropout and the like; None takes torch's on rank 0, as torch.manual_seed set it.
    `keep_output`: False frees the last stage's outputs at once, and there is no `last_output`.

    PlanMismatchError: another number of processes, or another model than the plan's. ArgumentError: parameters on the
    meta device without weights; an optimizer made too early.
    """
    expect("plan", plan, Plan, "a Plan: partitioner.load(path) reads one")
    if not plan.runnable:
        raise NotBuiltError("this plan cannot be run by this version: " + " ".join(plan.why))
    if plan.schedule not in EXECUTED or plan.stages_per_rank > 1:
        raise NotBuiltError(
            f"{plan.schedule} with {plan.stages_per_rank} stages a rank is predicted but not run by this version: "
            f"plan with schedule={' or '.join(map(repr, EXECUTED))}"
        )
    refuse_trained(loss_fn)
    seconds = max(60.0, 10 * plan.prediction.step_s) if timeout is None else timeout
    mesh = join_mesh(plan, device, seconds)
    failures = Failures(mesh)
    with failures.caught():
        placement = Placement(plan, mesh.stage, model, mesh.device, weights)
        loss = Loss(placement.model, loss_fn, loss_weight, plan.training.loss_rule)
        special = None if batch_dim is None else named_dims(placement.model, batch_dim)
        cutter = Cutter(plan.training.batch_dim, special, plan.training.whole)
        return LiveStage(plan, mesh, failures, placement, loss, cutter, seed, weights is None, keep_output)


class LiveStage:
    """One rank's part of a model under a plan. Make it with `materialize`."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        failures: Failures,
        placement: Placement,
        loss: Loss,
        cutter: Cutter,
        seed: int | None,
        copy_values: bool,
        keep_output: bool,
    ) -> None:
        self.plan = plan
        self._own_loss = Loss(placement.model, None, None)
        self._mesh, self._placement, self._loss, self._cutter = mesh, placement, loss, cutter
        self._failures = failures
        refuse_other_order(placement.model, mesh)
        if plan.num_stages > 1:
            refuse_groups(placement.model)
        self._seed = int(mesh.gather(torch.initial_seed() if seed is None else seed)[0])
        self._inert = nn.Parameter(torch.zeros((), device=mesh.device))
        here = plan.stages[mesh.stage]
        self._recomputed = Recomputed(placement.model, here.layers if here.recompute else ())
        self._recomputed.enter()
        part: Slice | WholeModel = WholeModel(placement.model)
        if plan.num_stages > 1:
            part = Slice(
                placement.model, plan.profile, plan.stage_of(), mesh.stage, device=mesh.device, loss=loss.function
            )
        edges = {(stage, target) for stage, targets in mesh.gather((mesh.stage, part.targets)) for target in targets}
        check_schedule(plan.actions(), edges, turns=plan.takes_turns)
        self._division = Division(here.shard, placement.own, mesh.num_replicas, mesh.replica)
        divided = {(stage.index,) for stage in plan.stages if stage.shard != "none"}
        replicated: set[tuple[int, ...]] = set()
        if mesh.num_replicas > 1 and any(module._buffers for module in placement.model.modules()):
            replicated = {(stage.index,) for stage in plan.stages}
        mesh.make_groups({*placement.owner_sets(), *divided, *replicated}, edges)
        self._shared: dict[tuple[int, ...], dict[str, nn.Parameter]] = {}
        for name, parameter in placement.own.items():
            self._shared.setdefault(placement.owner_set_of(name), {})[name] = parameter
        shared = {stages: list(named.values()) for stages, named in self._shared.items()}
        self._reduction = Reduction(mesh, shared, self._division)
        if copy_values:
            buffers = {stages: placement.buffers_of(stages) for stages in placement.owner_sets()}
            self._reduction.copy_values(buffers, placement.buffers_of(None))
        written = {one.names[0] for one in plan.profile.parameters if one.written and mesh.num_replicas > 1}
        self._written = [one for name, one in placement.own.items() if name in written]
        self._buffers = ReplicaBuffers(mesh, placement, self._reduction)
        self._recorder = Recorder(mesh, list(self.parameters()), placement.owner_sets())
        replicas = None
        if plan.num_stages == 1 and plan.num_replicas > 1 and self._trains() and not self._division.divides:
            replicas = Replicas(mesh, placement.model, loss)
        self._reduces = replicas is None
        self._trained: frozenset[str] | None = None
        if replicas is not None or self._division.divides:
            self._trained = frozenset(name for name, one in placement.own.items() if one.requires_grad)
        randomness = Randomness(self._seed, mesh.stage, mesh.replica, mesh.device)
        self._pipeline = Pipeline(mesh, part, loss, randomness, self._recorder, self._reduction, replicas)
        failures.watch(placement.model, self._pipeline, Calls(mesh, self._division.divides))
        look_again = part.look_again if isinstance(part, Slice) else lambda: None
        self._state = part.shared if isinstance(part, Slice) else None
        self._afterwards = Afterwards(placement.model, placement.own, plan.num_replicas, look_again)
        self._alike = Alike(self.parameters())
        self._watches: list[NoLocalNorm | AgreedScaling | Alike] = [self._alike]
        if plan.num_stages > 1 or any(stage.shard != "none" for stage in plan.stages):
            self._watches += [
                NoLocalNorm(placement.own),
                AgreedScaling(mesh, (*placement.own.values(), *placement.model.parameters()), failures.called),
            ]
        for watch in self._watches:
            watch.enter()
        self._keep_output = keep_output
        self._outputs: tuple[list[Any], list[int], Sequence[Weight]] | None = None
        self._num_calls = 0
        self._num_steps = 0
        self._closed = False

    # -- the model

    @property
    def module(self) -> nn.Module:
        """The whole model; parameters of other stages are placeholders.

        Where the stage's replicas divide the optimizer's state, those that another one keeps are as the last step found
        them, until `state_dict` or a step fetches them.
        """
        return self._placement.model

    @property
    def stage(self) -> int:
        """Which stage of the plan this rank runs."""
        return self._mesh.stage

    @property
    def rank(self) -> int:
        return self._mesh.rank

    @property
    def dp_rank(self) -> int:
        """Which replica this rank is part of; ranks of one replica take the same batches."""
        return self._mesh.replica

    @property
    def dp_size(self) -> int:
        return self._mesh.num_replicas

    @property
    def device(self) -> torch.device:
        return self._mesh.device

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This stage's parameters under the model's names, and an inert one where none of them is trained.

        Where the plan has the stage's replicas divide the optimizer's state (`Stage.shard`), those that this replica
        keeps up to date.
        """
        own = {name: one for name, one in self._placement.own.items() if self._division.is_kept(one)}
        yield from own.items()
        if not any(parameter.requires_grad for parameter in own.values()):
            yield "(inert)", self._inert

    def parameters(self) -> Iterator[nn.Parameter]:
        """What to give to an optimizer; the same line works on every rank, also where a stage trains nothing."""
        for _, parameter in self.named_parameters():
            yield parameter

    def state_dict(self) -> dict[str, Any]:
        """This stage's part of the model's state dict, under the model's own keys.

        Where the stage's replicas divide the optimizer's state, all of them must call it.
        """
        self._refresh("stage.state_dict")
        return self._placement.state_dict()

    def full_state_dict(self) -> dict[str, Any] | None:
        """The whole model's state dict on rank 0, on the CPU; None elsewhere. Every rank must call it."""
        with self._failures.caught():
            self._placement.refuse_emptied()
        with self._failures.called("stage.full_state_dict"):
            self._reduction.refresh()
            return full_state_dict(self._mesh, self._placement)

    def save_checkpoint(self, path: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write model and optimizer as a folder, whole or not at all. Every rank must call it.

        It loads under any other plan, with `load_checkpoint`, and into the plain model with torch's
        `dcp.load({"model": model.state_dict()}, checkpoint_id=path)`. A SetupError says why it could not be written,
        on every rank; training can go on.
        """
        from partitioner.executor import checkpoint  # torch's checkpoints take a second to import

        with self._failures.caught():
            self._placement.refuse_emptied()
        with self._failures.called("stage.save_checkpoint"):
            self._reduction.refresh()
            training = {"num_steps": self._num_steps, "num_calls": self._num_calls, "seed": self._seed}
            problem = checkpoint.save(path, self._mesh, self._placement, optimizer, training)
        if problem:
            raise SetupError(f"cannot write the checkpoint {os.fspath(path)}, what was there is as before: {problem}")

    def load_checkpoint(self, path: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Read what `save_checkpoint` wrote, under this or any other plan. Every rank must call it."""
        from partitioner.executor import checkpoint

        with self._failures.called("stage.load_checkpoint"):
            training = checkpoint.load(path, self._mesh, self._placement, optimizer)
            self._num_steps, self._num_calls = int(training["num_steps"]), int(training["num_calls"])

    # -- training

    def train_step(self, inputs: Any, target: Any = None) -> torch.Tensor:
        """Forward and backward of one batch of this replica; the loss of the whole batch over all replicas.

        `inputs`: a tensor, a tuple of arguments or a dict of keyword arguments. All ranks of a replica pass the same.
        The loss is 0-d, detached and the same on every rank. Gradients are added to those already there, those of
        inputs that require them too.
        """
        self._refuse_inference()
        with self._failures.caught():  # what every rank finds for itself comes first
            self._refuse_unfrozen()
            self._placement.refuse_emptied()
            self._afterwards.check()
            self._afterwards.begin()
        with self._failures.called("stage.train_step"):
            if self._num_steps == 0 and (self._mesh.num_stages > 1 or self._division.divides):
                warn_of_parts(*((), ()) if self._state is None else self._state.kept_apart())
            self._recorder.begin()
            microbatches, weights = self._prepared(inputs, target, self._loss)
            counts, shares = self._shares(microbatches, weights)
            outputs: list[Any] = []
            inputs_of = InputGradients(self._mesh, (inputs, target))
            self._buffers.begin()
            if self._reduces:
                with self._recorder.span("sync") if self._division.divides else nullcontext():
                    self._reduction.begin(len(microbatches))
            if self._num_steps % COMPARE_EVERY == 1:
                refuse_drift(self._shared, self._mesh)
            before = [parameter.detach().clone() for parameter in self._written]
            part = self._pipeline.train(self._num_calls, microbatches, shares, outputs if self._keep_output else None)
            if self._written:
                self._reduction.agree(self._written, before)
            if self._reduces:
                with self._recorder.span("sync"):  # before the loss: replicas with fewer micro-batches owe others sums
                    self._reduction.finish()
            inputs_of.finish()
            loss = self._agreed_loss(part if counts else None)
            self._outputs = (outputs, [microbatch.samples for microbatch in microbatches], weights)
            self._num_steps += 1
            self._afterwards.end(len(microbatches) if self.plan.num_stages > 1 else 1)
            return loss

    def eval_step(self, inputs: Any) -> Any:
        """The model's output for a batch, without gradients: on the last stage's rank of each replica, None elsewhere.

        Nothing is switched to evaluation: `stage.module.eval()` does that. Where the ranks of a stage take turns
        (`plan.takes_turns`), all ranks pass the same batch, and each rank of the last stage gets the whole output. Each
        sees some micro-batches alone, so a forward that changes a buffer, as that of BatchNorm in training mode does,
        is an ArgumentError there; what it leaves in plain Python for the next forward is not looked after.
        """
        with self._failures.caught():
            self._placement.refuse_emptied()
            self._afterwards.check()
        with self._failures.called("stage.eval_step"), torch.no_grad():
            if self.plan.training.objective != "train":
                self._recorder.begin()
            self._reduction.refresh()
            microbatches, weights = self._prepared(inputs, None, self._own_loss)
            before = self._buffer_versions()
            with self._of_evaluation():
                outputs = self._pipeline.evaluate(self._num_calls, microbatches)
            self._afterwards.end()
            if changed := [name for name, version in self._buffer_versions().items() if before.get(name) != version]:
                raise ArgumentError(
                    f"the forward changed {len(changed)} buffers ({changed[0]}), which the ranks that take turns at "
                    f"stage {self.stage} would each have in another state: call stage.module.eval() first, or plan "
                    "with a mesh"
                )
            sizes = [microbatch.samples for microbatch in microbatches]
            return join(outputs, sizes, weights, self._cutter.batch_dim) if self._mesh.is_last else None

    def eval_loss(self, inputs: Any, target: Any = None) -> torch.Tensor:
        """The loss of a batch without gradients: of the whole batch over all replicas, 0-d, the same on every rank.

        What stops a training, keeps its best weights or lowers its learning rate is decided by it on all ranks alike.
        """
        self._refuse_inference()
        with self._failures.caught():
            self._placement.refuse_emptied()
            self._afterwards.check()
        with self._failures.called("stage.eval_loss"), torch.no_grad():
            self._reduction.refresh()
            microbatches, weights = self._prepared(inputs, target, self._loss)
            counts, shares = self._shares(microbatches, weights)
            with self._of_evaluation():
                part = self._pipeline.loss_of(self._num_calls, microbatches, shares)
            self._afterwards.end()
            return self._agreed_loss(part if counts else None)

    @property
    def last_output(self) -> Any:
        """The model's output in the last `train_step`, detached, on the last stage's ranks; None elsewhere.

        Only tensors in containers are kept, not objects such as key-value caches.
        """
        if self._outputs is None or not self._outputs[0]:
            return None
        return join(*self._outputs, self._cutter.batch_dim)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that the norm of the whole model's is `max_norm` at most; the norm before.

        A parameter that several stages share counts once. Every rank must call it.
        """
        self._refuse_inference()
        with self._failures.called("stage.clip_grad_norm_"):
            counted, own = [], []
            for name, parameter in self._placement.own.items():
                if parameter.grad is not None:
                    own.append(parameter.grad)
                    if self._placement.owner_set_of(name)[0] == self._mesh.stage:
                        counted.append(parameter.grad)
            norms = [_norm(_values(gradient), norm_type) for gradient in counted]
            local = _norm(torch.stack(norms), norm_type) if norms else torch.zeros((), dtype=torch.float64)
            if self._division.divides:
                local = _norm(torch.stack(self._reduction.everyones(local)), norm_type)
            if self._mesh.num_stages > 1:
                parts = [torch.zeros((), dtype=torch.float64) for _ in range(self._mesh.num_stages)]
                dist.all_gather(parts, local, group=self._mesh.within_replica)
                local = _norm(torch.stack(parts), norm_type)
            dtype = torch.float64 if self.plan.profile.dtype == "float64" else torch.float32
            local = local.to(self._mesh.device, dtype)
            factor = torch.clamp(max_norm / (local + 1e-6), max=1.0)
            for gradient in own:
                gradient.mul_(factor)
            return local

    def sampler(self, dataset: Dataset[Any], *, shuffle: bool = True, drop_last: bool = False) -> Any:
        """A sampler for a DataLoader: this replica's samples, in the same order on all of its ranks.

        Call its `set_epoch(epoch)` before each epoch for another order.
        """
        return DistributedSampler(
            dataset, self.dp_size, self.dp_rank, shuffle=shuffle, seed=self._seed % 2**32, drop_last=drop_last
        )

    def timeline(self) -> Timeline:
        """What every rank did in the last step, on one clock. Every rank must call it."""
        with self._failures.called("stage.timeline"):
            return self._recorder.timeline()

    def processor_share(self) -> float | None:
        """The part of this rank's forwards and backwards of the last step in which its thread had a processor.

        Below 0.97 something else kept this machine's processors, and the step's time is not the plan's. None on CUDA.
        """
        return self._recorder.processor_share()

    # -- life

    def close(self) -> None:
        """Leave the process groups made here. The model stays as it is: this stage's part of it.

        Where the stage's replicas divide the optimizer's state, all of them must call it; while an error is on its way
        out, parameters that another replica keeps up to date keep the values of the last step's start.
        """
        if self._closed:
            return
        try:
            if sys.exception() is None and not self._failures.failed:
                self._refresh("stage.close")
        finally:
            self._leave()

    def _refresh(self, call: str) -> None:
        """Take the values that other replicas keep up to date. A stage that was closed has them, unless it failed."""
        if self._division.divides and (not self._closed or self._failures.failed):
            with self._failures.called(call):
                self._reduction.refresh()

    def _leave(self) -> None:
        self._closed = True
        self._failures.leave()
        for watch in reversed(self._watches):
            watch.leave()
        self._recorder.close()
        self._recomputed.leave()
        self._pipeline.drop()
        self._mesh.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._failures.note(error)
            self._leave()
        else:
            self.close()

    # -- inside

    @contextmanager
    def _of_evaluation(self) -> Iterator[None]:
        """A refusal in evaluation says that plans are made in training."""
        try:
            yield
        except UnsupportedModelError as error:
            if not self.module.training:
                error.args = (
                    f"{error}. The plan was made from forwards in training; in evaluation a module that runs other "
                    "code than there must be whole on one stage, or do in both the same calls of its layers",
                )
            raise

    def _buffer_versions(self) -> dict[str, tuple[int, int]]:
        """What tells whether a buffer is as it was, where ranks take turns; else nothing."""
        if self._mesh.num_turns == 1:
            return {}
        return {
            name: (id(buffer), buffer._version)
            for name, buffer in self.module.named_buffers()
            if self._placement.holds(name)
        }

    def _refuse_inference(self) -> None:
        if self.plan.training.objective != "train":
            raise ArgumentError(
                f"this plan is for inference (objective={self.plan.training.objective!r}), with no memory for a "
                "backward: use eval_step, or plan with objective='train'"
            )

    def _refuse_unfrozen(self) -> None:
        """Who sums which gradients was settled in the beginning: no one would those of a parameter unfrozen since."""
        if self._trained is None:
            return
        late = [name for name, one in self._placement.own.items() if one.requires_grad and name not in self._trained]
        if late:
            raise ArgumentError(
                f"{len(late)} parameters ({late[0]}) are to be trained that were not when the stage was made, and "
                "replicas would not add up their gradients: save_checkpoint, leave the stage, and materialize the "
                "unfrozen model; or unfreeze them first, and give the optimizer their parameters later"
            )

    def _trains(self) -> bool:
        return any(parameter.requires_grad for parameter in self._placement.own.values())

    def _prepared(self, inputs: Any, target: Any, loss: Loss) -> tuple[list[MicroBatch], Sequence[Weight]]:
        """The batch in micro-batches and what each counts for; now and then compared with the replica's other ranks."""
        self._num_calls += 1
        args, kwargs = as_call(inputs)
        mesh = self._mesh
        if len(mesh.replica_ranks) > 1 and (self._num_calls <= COMPARE_FIRST or self._num_calls % COMPARE_EVERY == 0):
            refuse_differing(digest((args, kwargs, target)), mesh)
        if mesh.num_stages > 1:
            self._alike.begin((args, kwargs))
        if self._num_calls == 1:
            self._tell_of_whole_batch(args, kwargs)
        microbatches = self._cutter.cut(args, kwargs, target, self.plan.num_microbatches)
        return microbatches, loss.weights(microbatches, [as_given(part, inputs) for part in microbatches])

    def _tell_of_whole_batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Where replicas get the plan's whole batch, each trains on all of it, and nothing else would say so."""
        planned, replicas = self.plan.training.batch_size, self._mesh.num_replicas
        if replicas == 1 or self.plan.training.objective != "train" or planned % replicas:
            return
        if any(tensor.dim() > self._cutter.batch_dim for tensor in tensors_in((args, dict(kwargs)))):
            given = self._cutter.batch_size(args, kwargs)
            if given == planned:
                warnings.warn(
                    f"replica {self._mesh.replica} of {replicas} was given {given} samples, the plan's whole batch, of "
                    f"which its share is {planned // replicas}: a loader gets it by DistributedSampler(data, "
                    "num_replicas=stage.dp_size, rank=stage.dp_rank). The same samples on all replicas are worked on "
                    f"{replicas} times over; other ones on each make a batch of {given * replicas}",
                    UserWarning,
                    stacklevel=4,
                )

    def _shares(self, microbatches: Sequence[MicroBatch], weights: Sequence[Weight]) -> tuple[bool, Sequence[Weight]]:
        """Whether anything counts, and what each micro-batch's loss counts for in that of all replicas."""

        def everywhere(here: torch.Tensor) -> torch.Tensor:
            if self._mesh.num_replicas > 1 and self._mesh.is_last:
                dist.all_reduce(here, group=self._mesh.across)
            return here

        return self._loss.shares(microbatches, weights, everywhere)

    def _agreed_loss(self, part: torch.Tensor | None) -> torch.Tensor:
        """The loss on every rank. A batch in which nothing counts has none: NaN, as a mean over nothing is."""
        mesh = self._mesh
        value = torch.tensor(float("nan") if part is None else float(part), dtype=torch.float64)
        if mesh.is_last and mesh.num_replicas > 1:
            dist.all_reduce(value, group=mesh.across)
        if mesh.num_stages > 1:
            here = torch.tensor([float(value), *self._alike.numbers()], dtype=torch.float64)
            parts = [torch.empty_like(here) for _ in mesh.replica_ranks]
            dist.all_gather(parts, here, group=mesh.within_replica)
            everyones = torch.stack(parts)
            self._alike.refuse(everyones[:, 1:], mesh.replica_ranks)
            value = everyones[mesh.replica_ranks.index(mesh.rank_of(mesh.num_stages - 1)), 0]
        dtype = torch.float64 if self.plan.profile.dtype == "float64" else torch.float32
        return value.to(mesh.device, dtype)


def _norm(values: torch.Tensor, norm_type: float) -> torch.Tensor:
    """On the CPU, in float64; summed in float32 at least."""
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(values, norm_type, dtype=dtype)
    return norm.cpu().double()


def _values(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.coalesce().values() if tensor.is_sparse else tensor
    return torch.view_as_real(plain) if plain.is_complex() else plain
