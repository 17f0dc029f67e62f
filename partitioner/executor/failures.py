"""One error for one failure: where it happened first, said on every rank that was stopped by it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from partitioner.actions import Action
from partitioner.errors import ArgumentError, PartitionerError, RankError
from partitioner.executor.calls import Calls
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
        self._calls: Calls | None = None
        self._call = ""
        self._failed = ""
        self._has_left = False

    def watch(self, model: nn.Module, walk: _Walk, calls: Calls) -> None:
        """From now on errors are placed in this model's layers, this walk's actions and these calls."""
        self._names = {id(module): name for name, module in model.named_modules()}
        self._walk, self._calls = walk, calls

    @property
    def failed(self) -> bool:
        """Whether this rank's part in the mesh has ended with an error."""
        return bool(self._failed)

    def leave(self) -> None:
        """This rank's part ends, by an error or as it should."""
        if not self._failed and not self._has_left:
            self._mesh.report_leaving()
        self._has_left = True
        if self._calls is not None:
            self._calls.drop()

    @contextmanager
    def called(self, call: str) -> Iterator[None]:
        """Around a call that other ranks make too: they are told of it, and errors are caught."""
        if self._has_left and not self._failed and self._mesh.plan.num_ranks > 1:
            raise ArgumentError(
                f"{call} on rank {self._mesh.rank}, whose stage has been closed (by stage.close() or at the end of its "
                "with block): call it before that, or materialize the model again"
            )
        with self.caught():
            self._call = call
            if self._calls is not None:
                self._calls.begin(call)
            yield
            self._call = ""

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
        place_text = self._place(error)
        told = self._told(error, place_text)
        self._failed = str(told)
        if isinstance(told, PartitionerError) and not isinstance(told, RankError):
            self._failed = f"{told} ({place_text})"
        elif not isinstance(told, PartitionerError):
            self._failed = f"{place_text} was ended by {type(told).__name__}{f' ({told})' if str(told) else ''}"
        if self._mesh.control is None:
            self._failed = ""
            return told
        place = {key: getattr(told, key, None) for key in ("rank", "stage", "microbatch", "layer")}
        if place["rank"] is None:
            place["rank"] = self._mesh.rank
        self._mesh.report_failure(place | {"message": self._failed})
        if self._walk is not None:
            self._walk.drop()
        if self._calls is not None:
            self._calls.drop()
        _forget_locals(error)
        self._mesh.close()
        return told

    def _place(self, error: BaseException) -> str:
        now, layer = self._now(), self._layer_of(error)
        text = f"rank {self._mesh.rank}, stage {self._mesh.stage}"
        text += f", micro-batch {now.microbatch} ({now})" if now else ""
        return text + (f", layer {layer}" if layer else "")

    def _told(self, error: BaseException, place_text: str) -> BaseException:
        mesh, now = self._mesh, self._now()
        lost = _as_peer_lost(error, mesh)
        if lost is not None:
            return self._told_by_others(lost)
        if isinstance(error, PartitionerError) or not isinstance(error, Exception):
            error.add_note(f"on {place_text}")
            return error
        return RankError(
            f"{place_text} failed: {type(error).__name__}: {error}",
            rank=mesh.rank,
            stage=mesh.stage,
            microbatch=now.microbatch if now else None,
            layer=self._layer_of(error),
        )

    def _told_by_others(self, lost: PeerLost) -> RankError:
        """Why another rank is gone: what it or a third one has left word of, or that it has left."""
        mesh, now = self._mesh, self._now()
        doing = " in " + " of ".join(filter(None, (str(now) if now else "", self._call)))
        where = f"rank {mesh.rank} (stage {mesh.stage}) stopped" + (doing if now or self._call else "")
        left = [rank for rank in mesh.left() if rank != mesh.rank]
        first = mesh.first_failure(patience_s=0.0 if left else 1.0)  # word is left before connections end
        if first is not None:
            place = {key: first.get(key) for key in ("stage", "microbatch", "layer")}
            return RankError(f"{where}, because {first['message']}", rank=first["rank"], **place)
        if left:
            return RankError(
                f"{where}, because {'rank' if len(left) == 1 else 'ranks'} {', '.join(map(str, left))} had left (by "
                "stage.close() or at the end of the with block): make the same calls on every rank, and decide when to "
                "end by what is the same on all, such as the loss that train_step and eval_loss give",
                rank=left[0],
            )
        return RankError(f"{where}: {lost}", rank=lost.rank)

    def _now(self) -> Action | None:
        return self._walk.now if self._walk is not None else None

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


_HOLDING = ("partitioner.executor", "partitioner.wire", "torch.distributed")


def _forget_locals(error: BaseException) -> None:
    """Empty the executor's and torch's own frames in the traceback: what they refer to would keep connections open."""
    found: BaseException | None = error
    while found is not None:
        trace = found.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("__name__", "").startswith(_HOLDING):
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
