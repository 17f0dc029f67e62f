"""A pool of rank processes that lives as long as the test session: starting ranks costs seconds, using them none."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle

RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
PRELOADED = [
    "cloudpickle",
    "torch.distributed.checkpoint",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5",
]
"""Imported once, by the process that all ranks are forked from; what is not installed is left out."""
GRACE_S = 3.0
"""How long the other ranks may go on after one has failed, to report what they saw."""


class RanksFailed(Exception):
    """A function run on the pool raised: `errors` maps rank -> exception, the message holds the tracebacks."""

    def __init__(self, errors: dict[int, BaseException], text: str) -> None:
        super().__init__(text)
        self.errors = errors


class RankPool:
    """`run(n, fn, *args)` calls fn(*args) on n processes that find each other as under torchrun.

    RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* are set; fn makes the process group itself, or calls `join_group`; it is
    destroyed after the call. A rank that fails, or does not come back in time, is restarted.
    """

    def __init__(self, size: int = 4, first: Sequence[str] = ()) -> None:
        """`first`: modules to import ahead of PRELOADED."""
        self.size = size
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*first, *PRELOADED])
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def run(self, num_ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Per-rank results of fn(*args); RanksFailed with every failed rank's traceback otherwise."""
        import torch.distributed as dist

        assert num_ranks <= self.size, f"the pool has {self.size} ranks, not {num_ranks}"
        while len(self._workers) < self.size:
            self._workers.append(self._start())
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        job = cloudpickle.dumps((fn, args))
        waiting: dict[Connection, int] = {}
        for rank in range(num_ranks):
            self._workers[rank][1].send((rank, num_ranks, store.port, job))
            waiting[self._workers[rank][1]] = rank
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        texts: dict[int, str] = {}
        end = time.monotonic() + timeout
        while waiting and (left := end - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    succeeded, answer, text = cloudpickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    succeeded, answer, text = False, ChildProcessError("the process died"), "the process died"
                if succeeded:
                    results[rank] = answer
                else:
                    errors[rank], texts[rank] = answer, text
                    end = min(end, time.monotonic() + GRACE_S)
        for rank in waiting.values():
            errors[rank] = TimeoutError(f"rank {rank} did not come back")
            texts[rank] = f"no answer ({timeout:g} s allowed, {GRACE_S:g} s after another rank failed)"
        if errors:
            for rank in errors:
                self._stop(rank)
            for rank in sorted(errors):
                self._workers[rank] = self._start()
            text = "\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(texts.items()))
            raise RanksFailed(dict(sorted(errors.items())), text)
        return [results[rank] for rank in range(num_ranks)]

    def close(self) -> None:
        """End every process."""
        for rank in range(len(self._workers)):
            self._stop(rank)
        self._workers.clear()

    def _start(self) -> tuple[BaseProcess, Connection]:
        before = {name: os.environ.get(name) for name in RANK_ENVIRONMENT}
        os.environ.update(RANK_ENVIRONMENT)  # the fork server is a fresh interpreter, started by the first of these
        try:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, dict(RANK_ENVIRONMENT), list(sys.path)))
            process.start()
            theirs.close()
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        return process, ours

    def _stop(self, rank: int) -> None:
        process, connection = self._workers[rank]
        connection.close()
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join(10)


def join_group(timeout_s: float = 30.0) -> tuple[int, int]:
    """Make the default gloo group of this call's ranks; (rank, number of ranks)."""
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size()


def _serve(connection: Connection, environment: dict[str, str], path: list[str]) -> None:
    """A rank's life: take a job, do it, answer; end when the pool has gone."""
    import torch
    import torch.distributed as dist

    os.environ.update(environment)
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    while True:
        try:
            rank, num_ranks, port, job = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
        torch.manual_seed(0)
        try:
            fn, args = cloudpickle.loads(job)
            answer = _pack((True, fn(*args), ""))
        except BaseException as error:
            text = traceback.format_exc()
            try:
                answer = _pack((False, error, text))
            except Exception:
                answer = _pack((False, RuntimeError(f"{type(error).__name__}: {error}"), text))
        if dist.is_initialized():
            dist.destroy_process_group()
        connection.send_bytes(answer)


def _pack(answer: tuple[bool, Any, str]) -> bytes:
    """Pickled by value, tensors included: torch's own sharing would tie a result to the rank's life."""
    buffer = io.BytesIO()
    cloudpickle.Pickler(buffer).dump(answer)
    return buffer.getvalue()
