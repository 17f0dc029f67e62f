"""torch.distributed as a model's own code sees it: the world is the replicas of its stage, never the stages themselves.

A model written for DistributedDataParallel calls get_world_size, all_reduce or all_gather over the default group and
means the copies of the layer that it is in. The default group of a pipeline holds other stages too, which never come to
that call. While a stage runs the model's code, the default group is therefore another: that of the stage's replicas;
this process alone where there are none. RANK and WORLD_SIZE in os.environ say the same for as long.

    torch.distributed.all_reduce(x)  ->  default group  ->  World.allreduce  ->  the replicas' own group, or nothing

What it does is told to whoever watches the forward, as a function that writes into tensors: a later stage, which walks
through the same code, follows what came of it.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore

from partitioner.errors import ArgumentError, NotBuiltError
from partitioner.structures import tensors_in
from partitioner.tracing import finished_work, tell, watcher_here

IN_PLACE = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
"""Methods of ProcessGroup whose first argument is read and written, and the functions that call them."""

OUT_OF_PLACE = {
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
}
"""Those that write into their first argument what they make of the second; by the names of older and newer torch."""


class World(dist.ProcessGroup):
    """`size` ranks that `inner` connects, to be a process's default group. One rank alone needs no inner group."""

    def __init__(self, inner: dist.ProcessGroup | None, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        real = dist.GroupMember.WORLD
        assert real is not None
        self.inner, self._name, self._real = inner, name, real
        self._count, self._agreed = 0, False
        tables = dist.distributed_c10d._world
        backend, store = tables.pg_map[real]
        tables.pg_map[self] = backend, HashStore() if inner is None else PrefixStore(name, store)
        tables.pg_names[self] = name  # type: ignore[assignment]
        tables.pg_group_ranks[self] = {k: k for k in range(size)}
        tables.pg_backend_config[self] = tables.pg_backend_config[real]
        self._set_group_name(name)  # type: ignore[arg-type]
        torch._C._distributed_c10d._register_process_group(name, self)  # type: ignore[arg-type]
        _let_defaults_follow(real)

    def getBackendName(self) -> str:
        """That of the group of all ranks."""
        return str(dist.distributed_c10d._world.pg_map[self][0])

    def shutdown(self) -> None:
        """Nothing runs here."""

    def begin(self, num_microbatches: int) -> None:
        """A step begins; at its first call replicas see whether they have as many micro-batches."""
        self._count, self._agreed = num_microbatches, False

    def close(self) -> None:
        """Leave torch's tables."""
        tables = dist.distributed_c10d._world
        if tables.pg_names.pop(self, None) is None:
            return
        for table in (tables.pg_map, tables.pg_group_ranks, tables.pg_backend_config):
            table.pop(self, None)
        torch._C._distributed_c10d._unregister_process_group(self._name)  # type: ignore[arg-type]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside: this is the default group, for all threads."""
        real, dist.GroupMember.WORLD = dist.GroupMember.WORLD, self
        earlier = _set_environment({"RANK": str(self.rank()), "WORLD_SIZE": str(self.size())})
        try:
            yield
        finally:
            dist.GroupMember.WORLD = real
            _set_environment(earlier)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Within `inside`: the group of all ranks is the default again."""
        if dist.GroupMember.WORLD is not self:
            yield
            return
        dist.GroupMember.WORLD = self._real
        try:
            yield
        finally:
            dist.GroupMember.WORLD = self

    def barrier(self, *given: Any, **named: Any) -> Any:
        """Of the replicas."""
        return self._run("barrier", "barrier", [], [], given, named)

    def monitored_barrier(self, *given: Any, **named: Any) -> Any:
        """Of the replicas."""
        return self._run("monitored_barrier", "monitored_barrier", [], [], given, named)

    def send(self, *given: Any, **named: Any) -> Any:
        """To another replica."""
        return self._point_to_point("send", given, named)

    def recv(self, *given: Any, **named: Any) -> Any:
        """From another replica."""
        return self._point_to_point("recv", given, named)

    def recv_anysource(self, *given: Any, **named: Any) -> Any:
        """From another replica."""
        return self._point_to_point("recv_anysource", given, named)

    def _start_coalescing(self, device: torch.device) -> None:
        """Calls are done one by one."""

    def _end_coalescing(self, device: torch.device) -> Any:
        return finished_work()

    def _point_to_point(self, method: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.inner is None:
            raise NotBuiltError(
                f"the model calls torch.distributed.{method}, and there is no other rank for it: in a pipeline its "
                "world is the replicas of its stage, of which this plan has one. Send through the layers' outputs"
            )
        self._agree(method)
        return getattr(self.inner, method)(*given, **named)

    def _run(
        self,
        method: str,
        name: str,
        written: list[torch.Tensor],
        read: list[torch.Tensor],
        given: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        def run(written: list[torch.Tensor], read: list[torch.Tensor]) -> None:
            if self.inner is None:
                _alone(name, written, read, [*given, *named.values()])
            else:
                self._agree(name)
                work = getattr(self.inner, method)(*given, **named)
                if work is not None:
                    work.wait()
            if watcher_here() is not None:  # whoever watches sees by its version that a tensor was written into
                torch.autograd.graph.increment_version([one for one in written if not one.is_inference()])

        tell(f"torch.distributed.{name}", run, written, read)
        return finished_work(given[0] if given else [])

    def _agree(self, name: str) -> None:
        """In a step's first call: replicas have as many micro-batches, and do the same."""
        if self._agreed:
            return
        assert self.inner is not None
        mine = torch.tensor([self._count, zlib.crc32(name.encode())])
        found = [torch.zeros_like(mine) for _ in range(self.size())]
        self.inner.allgather([found], [mine]).wait()
        self._agreed = True
        counts = [int(one[0]) for one in found]
        if len(set(counts)) > 1:
            raise ArgumentError(
                f"the model calls torch.distributed.{name}, which all replicas of its stage must call as often, but "
                f"they have {', '.join(map(str, counts))} micro-batches in this step: give every replica a batch of "
                "the same size, as DataLoader(..., drop_last=True) does"
            )
        if len({int(one[1]) for one in found}) > 1:
            raise ArgumentError(
                f"the model calls torch.distributed.{name} on replica {self.rank()}, and another function on others: "
                "the first call of a step must be the same on all replicas"
            )


def _add_methods() -> None:
    def in_place(method: str, name: str) -> Callable[..., Any]:
        def call(self: World, tensors: Any, *given: Any, **named: Any) -> Any:
            return self._run(method, name, list(tensors_in(tensors)), [], (tensors, *given), named)

        return call

    def out_of_place(method: str, name: str) -> Callable[..., Any]:
        def call(self: World, outputs: Any, inputs: Any, *given: Any, **named: Any) -> Any:
            written, read = list(tensors_in(outputs)), list(tensors_in(inputs))
            return self._run(method, name, written, read, (outputs, inputs, *given), named)

        return call

    for names, make in ((IN_PLACE, in_place), (OUT_OF_PLACE, out_of_place)):
        for method, name in names.items():
            if hasattr(dist.ProcessGroup, method):
                setattr(World, method, make(method, name))


_add_methods()


def _alone(name: str, written: list[torch.Tensor], read: list[torch.Tensor], options: list[Any]) -> None:
    """What a collective of one rank does: a sum, mean or selection of one is that one."""
    if any(getattr(one, "reduceOp", None) == dist.ReduceOp.PREMUL_SUM for one in options):
        raise NotBuiltError(f"the model calls torch.distributed.{name} with PREMUL_SUM: multiply before the sum")
    with torch.no_grad():
        for tensor in written if not read else ():
            tensor.view(tensor.shape)  # one that another stage holds says so
        for output, value in zip(written, read, strict=False):
            output.detach().copy_(value.reshape(output.shape))


def _let_defaults_follow(real: dist.ProcessGroup) -> None:
    """torch.distributed.nn binds the default group where it is imported: let it be that of the call."""
    for name in ("torch.distributed.nn.functional", "torch.distributed.nn"):
        for function in vars(sys.modules.get(name, nn)).values():
            defaults = getattr(function, "__defaults__", None)
            if defaults and any(value is real for value in defaults):
                function.__defaults__ = tuple(None if value is real else value for value in defaults)


def _set_environment(values: dict[str, str | None]) -> dict[str, str | None]:
    """What os.environ says, where it says anything; what it said. That of the process, which C code reads, stays."""
    table, encoded = os.environ._data, os.environ.encodekey  # type: ignore[attr-defined]
    earlier: dict[str, str | None] = {}
    for name, value in values.items():
        key = encoded(name)
        if key in table and value is not None:
            earlier[name] = os.environ.decodevalue(table[key])
            table[key] = os.environ.encodevalue(value)
    return earlier


@contextmanager
def as_only_rank() -> Iterator[None]:
    """Inside: the model's code finds itself alone in its world, though other ranks may wait for this one meanwhile."""
    if not dist.is_available() or not dist.is_initialized() or isinstance(dist.GroupMember.WORLD, World):
        yield
        return
    world = World(None, 0, 1, "the model alone")
    try:
        with world.inside():
            yield
    finally:
        world.close()


def refuse_groups(model: nn.Module) -> None:
    """An ArgumentError where a module keeps a process group: its ranks are those of a world without stages."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, dist.ProcessGroup):
                raise ArgumentError(
                    f"{path or 'the model'} keeps a process group in {name!r}, made for ranks that all run the whole "
                    "model; in a pipeline each runs one stage. Leave it None: the default group is then that of the "
                    "stage's replicas"
                )
