"""One error for one failure: where it happened first, said on every rank that was stopped by it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from partitioner.actions import Action
from partitioner.errors import PartitionerError, RankError
from partitioner.executor.mesh import Mesh
from partitioner.wire import PeerLost, peer_lost


class _Walk(Protocol):
    now: Action | None

    def drop(self) -> None: ...


class Failures:
    """Turns what goes wrong in a step into a RankError that names rank, stage, micro-batch and layer.

    The rank where it began leaves word of it and takes its connections down; the others, whose connections break,
    read that word and repeat it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._names: dict[int, str] = {}
        self._walk: _Walk | None = None
        self._failed = ""

    def watch(self, model: nn.Module, walk: _Walk) -> None:
        """From now on errors are placed in this model's layers and this walk's actions."""
        self._names = {id(module): name for name, module in model.named_modules()}
        self._walk = walk

    @property
    def failed(self) -> bool:
        """Whether this rank's part in the mesh has ended with an error."""
        return bool(self._failed)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Errors inside are raised with their place, and end this rank's part in the mesh."""
        if self._failed:
            raise RankError(f"this stage has ended, because {self._failed}", rank=self._mesh.rank)
        try:
            yield
        except BaseException as error:
            told = self.note(error)
            if told is error:
                raise
            raise told from error

    def note(self, error: BaseException) -> BaseException:
        """The error to raise for `error`; the other ranks are told."""
        if self._failed:
            return error
        told = self._told(error, self._walk.now if self._walk is not None else None)
        self._failed = str(told) or type(told).__name__
        if self._mesh.control is None:
            self._failed = ""
            return told
        place = {key: getattr(told, key, None) for key in ("rank", "stage", "microbatch", "layer")}
        if place["rank"] is None:
            place["rank"] = self._mesh.rank
        self._mesh.report_failure(place | {"message": self._failed})
        if self._walk is not None:
            self._walk.drop()
        _forget_locals(error)
        self._mesh.close()
        return told

    def _told(self, error: BaseException, now: Action | None) -> BaseException:
        mesh = self._mesh
        lost = _as_peer_lost(error, mesh)
        if lost is not None:
            first = mesh.first_failure()
            where = f"rank {mesh.rank} (stage {mesh.stage}) stopped" + (f" in {now}" if now else "")
            if first is None:
                return RankError(f"{where}: {lost}", rank=lost.rank)
            place = {key: first.get(key) for key in ("stage", "microbatch", "layer")}
            return RankError(f"{where}, because {first['message']}", rank=first["rank"], **place)
        layer = self._layer_of(error)
        place_text = f"rank {mesh.rank}, stage {mesh.stage}"
        place_text += f", micro-batch {now.microbatch} ({now})" if now else ""
        place_text += f", layer {layer}" if layer else ""
        if isinstance(error, PartitionerError):
            error.add_note(f"on {place_text}")
            return error
        if not isinstance(error, Exception):
            return error
        return RankError(
            f"{place_text} failed: {type(error).__name__}: {error}",
            rank=mesh.rank,
            stage=mesh.stage,
            microbatch=now.microbatch if now else None,
            layer=layer,
        )

    def _layer_of(self, error: BaseException) -> str | None:
        """The innermost module of the model that was running when the error was raised."""
        found = None
        trace = error.__traceback__
        while trace is not None:
            running: Any = trace.tb_frame.f_locals.get("self")
            if isinstance(running, nn.Module):
                found = self._names.get(id(running), found) or found
            trace = trace.tb_next
        return found


def _forget_locals(error: BaseException) -> None:
    """Empty the executor's own frames in the traceback: what they refer to would keep connections open."""
    found: BaseException | None = error
    while found is not None:
        trace = found.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("__name__", "").startswith(("partitioner.executor", "partitioner.wire")):
                with contextlib.suppress(RuntimeError):  # it still runs
                    trace.tb_frame.clear()
                    _ = trace.tb_frame.f_locals  # brings the frame's own copy of them up to date, where it has one
            trace = trace.tb_next
        found = found.__cause__ or found.__context__


def _as_peer_lost(error: BaseException, mesh: Mesh) -> PeerLost | None:
    """`error` where its reason lies with another rank: a broken or silent connection."""
    if isinstance(error, PeerLost):
        return error
    text = str(error)
    signs = (
        "onnection closed by peer",
        "onnection reset by peer",
        "imed out waiting",
        "roken pipe",
        "Connection refused",
    )
    is_torch = type(error) is RuntimeError or type(error).__module__.startswith("torch._C")
    if not is_torch or mesh.control is None or not any(sign in text for sign in signs):
        return None
    return peer_lost(next(rank for rank in range(mesh.plan.num_ranks) if rank != mesh.rank), error)
