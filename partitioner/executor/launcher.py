"""Start the ranks of a plan on this machine, watch them, and end all of them when one fails.

Each rank is a process of its own session, started from a fresh interpreter, so that notebooks and scripts without a
main guard work. It ends with this process, however that goes: its stdin is a pipe that only this process holds open.
The first failure ends all ranks; it is raised with its place.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import marshal
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import ChainMap, deque
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import IO, Any

import cloudpickle
import torch.distributed as dist

from partitioner.errors import ArgumentError, PartitionerError, RankError, expect
from partitioner.plan import Plan

POLL_S = 0.02
GRACE_S = 2.0
"""After one rank has failed, how long the others may still take to say what they saw."""
STOPPED_S = 5.0
"""A rank that a signal has stopped for this long counts as failed."""


def launch(fn: Callable[..., Any], ranks: Plan | int, *args: Any) -> list[Any]:
    """fn(*args) on every rank of a plan, or on so many ranks; their results, by rank.

    The ranks find each other as under torchrun: RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* are set. `fn` may be defined
    in a notebook. What ranks print goes to this process's stdout and stderr.

    An error of this package is raised as it is, any other failure as a RankError with the rank's traceback in its
    notes; all ranks have ended then. Interrupting this process ends them, too.
    """
    expect("fn", fn, Callable, "a function that every rank calls")  # type: ignore[arg-type]
    num_ranks = ranks.num_ranks if isinstance(ranks, Plan) else ranks
    if type(num_ranks) is not int or num_ranks < 1:
        raise ArgumentError(f"launch needs a plan or a number of ranks of at least 1, got {ranks!r}")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="partitioner-") as folder:
        job = Path(folder)
        (job / "call").write_bytes(_pickled((fn, args)))
        processes: list[_Rank] = []
        try:
            for rank in range(num_ranks):
                processes.append(_Rank(rank, num_ranks, store.port, job))
            _watch(processes)
        finally:
            for process in processes:
                process.end()
        return [process.answer()["result"] for process in processes]


def _pickled(call: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(call)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Code goes by value with the name of its file, which cloudpickle drops: ranks read the source of a model."""

    dispatch_table = ChainMap({CodeType: lambda code: _reduced(code)}, cloudpickle.Pickler.dispatch_table)


def _reduced(code: CodeType) -> tuple[Any, ...]:
    name = code.co_filename
    lines = None if Path(name).exists() else linecache.getlines(name)
    return _code_of, (marshal.dumps(code), name, lines)


def _code_of(content: bytes, name: str, lines: list[str] | None) -> CodeType:
    """On a rank, of the same Python. `lines`: of what has no file, as a notebook's cell."""
    if lines:
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    code: CodeType = marshal.loads(content)
    return code


class _Rank:
    """One rank's process, and what is known of its end."""

    def __init__(self, rank: int, num_ranks: int, port: int, job: Path) -> None:
        self.rank = rank
        self._answer = job / f"answer {rank}"
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours, and outlives any rank
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": str(max(1, _num_cores() // num_ranks)),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "partitioner.executor.rank", str(job)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.last_words: deque[str] = deque(maxlen=20)
        self._readers = [
            threading.Thread(target=self._forward, args=(self._process.stdout, sys.stdout), daemon=True),
            threading.Thread(target=self._forward, args=(self._process.stderr, sys.stderr), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self._stopped_since: float | None = None
        self.ended_at: float | None = None

    def has_ended(self) -> bool:
        if self.ended_at is None and self._process.poll() is not None:
            self.ended_at = time.monotonic()
        return self.ended_at is not None

    def is_stopped(self) -> bool:
        """Whether a signal holds the process, for so long that it is no accident."""
        if not _is_stopped(self._process.pid):
            self._stopped_since = None
            return False
        self._stopped_since = self._stopped_since or time.monotonic()
        return time.monotonic() - self._stopped_since > STOPPED_S

    @property
    def has_failed(self) -> bool:
        return self._process.returncode not in (0, None) or (self.has_ended() and not self._answer.exists())

    def answer(self) -> dict[str, Any]:
        """What the rank left: its result, or its error with the time and the traceback."""
        try:
            found: dict[str, Any] = pickle.loads(self._answer.read_bytes())
            return found
        except FileNotFoundError:
            return {}

    def end(self) -> None:
        """End the process and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.wait()
        for reader in self._readers:
            reader.join(1.0)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def how_it_ended(self) -> str:
        """For a rank that left no error: its signal or exit code, and the last lines it wrote."""
        code = self._process.returncode
        if code is not None and code < 0:
            text = f"was ended by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                text += " (where nobody sent it, the machine ran out of memory)"
        elif code is None:
            text = f"has been stopped by a signal for {STOPPED_S:g} s"
        else:
            text = f"exited with code {code}"
        return "\n  ".join([text, *(f"| {line}" for line in self.last_words)])

    def _forward(self, source: IO[bytes], target: Any) -> None:
        for line in source:
            text = line.decode(errors="replace")
            if target is sys.stderr:
                self.last_words.append(text.rstrip())
            with contextlib.suppress(Exception):
                target.write(text)
                target.flush()


def _watch(processes: list[_Rank]) -> None:
    """Return when all ranks are done; raise the first failure, some time after it for others to say more."""
    failed_at: float | None = None
    stopped: _Rank | None = None
    while True:
        running = [process for process in processes if not process.has_ended()]
        stopped = stopped or next((process for process in running if process.is_stopped()), None)
        if failed_at is None and (stopped or any(process.has_failed for process in processes)):
            failed_at = time.monotonic()
        if not running or (failed_at is not None and time.monotonic() - failed_at > (0 if stopped else GRACE_S)):
            break
        time.sleep(POLL_S)
    if failed_at is not None:
        raise _first_error(processes, stopped)


def _first_error(processes: list[_Rank], stopped: _Rank | None) -> BaseException:
    """The failure that began it: a rank stopped or killed, else the earliest error that is not about another rank."""
    if stopped is not None:
        return RankError(f"rank {stopped.rank} {stopped.how_it_ended()}", rank=stopped.rank)
    failed = [process for process in processes if process.has_failed]
    told = {process.rank: process.answer() for process in failed}
    silent = [process for process in failed if "error" not in told[process.rank]]
    if silent:
        first = min(silent, key=lambda process: process.ended_at or 0.0)
        return RankError(f"rank {first.rank} {first.how_it_ended()}", rank=first.rank)

    def order(rank: int) -> tuple[bool, float]:
        error = told[rank]["error"]
        about_another = isinstance(error, RankError) and error.rank not in (None, rank)
        return about_another, told[rank]["time"]

    rank = min(told, key=order)
    error: BaseException = told[rank]["error"]
    if not isinstance(error, PartitionerError):
        wrapped = RankError(f"rank {rank} failed: {type(error).__name__}: {error}", rank=rank)
        wrapped.__cause__ = error
        error = wrapped
    error.add_note(f"On rank {rank}:\n{told[rank]['traceback'].rstrip()}")
    return error


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(") ")[2][:1] == "T"
    except OSError:
        return False
