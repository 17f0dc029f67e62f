"""Ranks start, answer, and end together: a failure anywhere ends all of them within seconds and is named once."""

from __future__ import annotations

import inspect
import json
import linecache
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import plan_of
from rank_pool import RankPool, RanksFailed
from torch import nn
from torch.nn import functional as F

from partitioner.errors import ArgumentError, PlanMismatchError, RankError
from partitioner.executor import launch, launcher, materialize
from partitioner.plan import Plan

ALL_END_WITHIN_S = 10.0


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that still run; zombies do not."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


def ended(pids: list[int], within_s: float = ALL_END_WITHIN_S) -> bool:
    end = time.monotonic() + within_s
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pids)


def pids_in(folder: Path, count: int, within_s: float = 60.0) -> list[int]:
    """What `count` ranks wrote about themselves, once they all have."""
    end = time.monotonic() + within_s
    while len(list(folder.glob("pid *"))) < count and time.monotonic() < end:
        time.sleep(0.05)
    return [int(path.read_text()) for path in folder.glob("pid *")]


def write_pid(folder: Path) -> int:
    rank = int(os.environ["RANK"])
    partial = folder / f".pid {rank}"
    partial.write_text(str(os.getpid()))
    partial.rename(folder / f"pid {rank}")
    return rank


class Failing(nn.Module):
    """Calls `what` in its third block, on the micro-batch whose first value is 3."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.bad = _Bad()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        trigger = x[0, 0]
        for k, block in enumerate(self.blocks):
            x = block(x)
            if k == 2:
                x = self.bad(x, trigger)
        return x


class _Bad(nn.Module):
    what: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor, trigger: torch.Tensor) -> torch.Tensor:
        if self.what is not None and float(trigger) == 3.0:
            self.what()
        return x * 1.0


def train(folder: Path, plan: Plan, model: nn.Module, batch: torch.Tensor, timeout: float | None = None) -> list[float]:
    write_pid(folder)
    with materialize(plan, model, loss_fn=F.mse_loss, timeout=timeout) as stage:
        return [float(stage.train_step(batch, batch)) for _ in range(3)]


def job(folder: Path, what: Callable[[], None], cuts: list[str]) -> tuple[Path, Plan, nn.Module, torch.Tensor]:
    """Arguments for `train`: a plan whose rank 1 does `what` in micro-batch 2."""
    model, batch = Failing(), torch.zeros(8, 4)
    plan = plan_of(model, batch, microbatches=4, cuts=cuts)
    batch[4, 0] = 3.0
    model.bad.what = what
    return folder, plan, model, batch


def fail() -> None:
    raise ValueError("the tokens are odd")


def test_results_come_back_by_rank_from_functions_of_a_notebook(capfd: pytest.CaptureFixture[str]) -> None:
    """Closures travel by value; the environment is torchrun's; what ranks print arrives; the hash seed is fixed."""
    scale = torch.tensor(3.0)

    def describe(offset: int) -> dict[str, Any]:
        print("hello from", os.environ["RANK"])
        return {
            "rank": int(os.environ["RANK"]) + offset,
            "world": os.environ["WORLD_SIZE"],
            "hash": hash("layer"),
            "threads": torch.get_num_threads(),
            "value": float(scale) * 2,
        }

    first, second = launch(describe, 2, 10)
    assert (first["rank"], second["rank"], first["world"], first["value"]) == (10, 11, "2", 6.0)
    assert first["hash"] == second["hash"]
    assert first["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)
    assert "hello from 0" in (out := capfd.readouterr().out) and "hello from 1" in out


def test_errors_about_arguments_come_back_as_they_are() -> None:
    def refuse() -> None:
        raise PlanMismatchError("not this plan")

    with pytest.raises(PlanMismatchError, match="not this plan") as failure:
        launch(refuse, 1)
    assert "in refuse" in "".join(failure.value.__notes__)
    with pytest.raises(ArgumentError, match="at least 1, got 0"):
        launch(refuse, 0)
    with pytest.raises(ArgumentError, match="at least 1, got '2'"):
        launch(refuse, "2")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="fn=None is a NoneType: give a function that every rank calls"):
        launch(None, 1)  # type: ignore[arg-type]


def test_a_rank_that_raises_is_named_with_stage_micro_batch_and_layer(tmp_path: Path) -> None:
    arguments = job(tmp_path, fail, ["blocks.2", "blocks.3"])
    with pytest.raises(RankError, match="the tokens are odd") as failure:
        launch(train, arguments[1], *arguments)
    error = failure.value
    assert (error.rank, error.stage, error.microbatch, error.layer) == (1, 1, 2, "bad")
    assert "rank 1, stage 1, micro-batch 2 (1F2), layer bad failed: ValueError" in str(error)
    assert "in fail" in "".join(error.__notes__)
    assert ended(pids_in(tmp_path, 3), 0.0)


def test_a_rank_that_is_killed_ends_all_and_is_named(tmp_path: Path) -> None:
    arguments = job(tmp_path, lambda: os.kill(os.getpid(), signal.SIGKILL), ["blocks.2"])
    with pytest.raises(RankError, match="rank 1 was ended by SIGKILL") as failure:
        launch(train, arguments[1], *arguments)
    assert failure.value.rank == 1
    assert ended(pids_in(tmp_path, 2), 0.0)


def test_a_rank_that_is_stopped_by_a_signal_ends_all_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher.STOPPED_S + 1 < ALL_END_WITHIN_S
    monkeypatch.setattr(launcher, "STOPPED_S", 1.0)

    def stop() -> None:
        (tmp_path / "stopped").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGSTOP)

    arguments = job(tmp_path, stop, ["blocks.2"])
    with pytest.raises(RankError, match="rank 1 has been stopped by a signal"):
        launch(train, arguments[1], *arguments)
    assert time.time() - float((tmp_path / "stopped").read_text()) < ALL_END_WITHIN_S
    assert ended(pids_in(tmp_path, 2), 0.0)


def test_a_rank_whose_error_is_caught_stops_the_others_at_once(ranks: RankPool, tmp_path: Path) -> None:
    """The failing process lives on, as a notebook's would: the others do not wait until it ends."""

    def survive(*arguments: Any) -> tuple[float, str]:
        try:
            train(*arguments)
        except RankError as error:
            told = time.monotonic()
            if error.__cause__ is not None and isinstance(error.__cause__, ValueError):
                time.sleep(4.0)  # the error is still alive, and with it whatever its frames refer to
                told = time.monotonic()
            return told, f"{error.rank} {error.stage} {error.microbatch} {error.layer} {error}"
        raise AssertionError("there was no error")

    answers = ranks.run(3, survive, *job(tmp_path, fail, ["blocks.2", "blocks.3"]))
    assert all(told.startswith("1 1 2 bad ") and "the tokens are odd" in told for _, told in answers)
    assert max(answers[0][0], answers[2][0]) < answers[1][0] - 1.0


def test_an_error_outside_of_a_step_stops_the_others_at_once(ranks: RankPool) -> None:
    def leave() -> str:
        with materialize(plan, model, loss_fn=F.mse_loss) as stage:
            if stage.rank == 1:
                raise KeyError("no such file")
            try:
                stage.train_step(batch, batch)
            except RankError as error:
                return str(error)
        return ""

    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(8, 4)
    plan = plan_of(model, batch)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        ranks.run(2, leave)
    assert time.monotonic() - start < ALL_END_WITHIN_S
    assert list(failure.value.errors) == [1] and isinstance(failure.value.errors[1], KeyError)


def test_a_rank_that_cannot_take_its_part_is_named_on_the_others(ranks: RankPool) -> None:
    def start() -> None:
        weights = model.state_dict()
        del weights["1.bias"]
        materialize(plan, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), weights=weights)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = plan_of(model, torch.zeros(8, 4))
    with pytest.raises(RanksFailed) as failure:
        ranks.run(2, start)
    first, second = failure.value.errors.values()
    assert isinstance(second, ArgumentError) and "lack 1 parameters of stage 1: 1.bias" in str(second)
    assert isinstance(first, RankError) and first.rank == 1 and "lack 1 parameters of stage 1: 1.bias" in str(first)


def test_a_silent_rank_is_given_up_after_the_timeout(ranks: RankPool, tmp_path: Path) -> None:
    def wait(*arguments: Any) -> str:
        try:
            train(*arguments)
        except RankError as error:
            return f"{error.rank} {error}"
        raise AssertionError("there was no error")

    arguments = job(tmp_path, lambda: time.sleep(4.0), ["blocks.2"])
    told, _ = ranks.run(2, wait, *arguments, 1.5)
    assert told.startswith("1 rank 0 (stage 0) stopped in 0B") and "rank 1 does not answer" in told


PARENT = """
    import os, subprocess, time
    import partitioner as pt

    def sleep():
        child = subprocess.Popen(["sleep", "60"])
        for rank, pid in enumerate((child.pid, os.getpid())):
            open({folder!r} + f"/.{{rank}}", "w").write(str(pid))
            os.rename({folder!r} + f"/.{{rank}}", {folder!r} + f"/pid {{rank}}")
        time.sleep(60)

    pt.launch(sleep, 1)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_its_parent(tmp_path: Path, how: signal.Signals) -> None:
    """However the parent ends: its ranks end, and what they have started."""
    text = textwrap.dedent(PARENT).format(folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", text], start_new_session=True, stderr=subprocess.PIPE)
    try:
        pids = pids_in(tmp_path, 2)
        assert len(pids) == 2
        os.kill(process.pid, how)
        process.wait(ALL_END_WITHIN_S)
        assert ended(pids)
    finally:
        process.kill()
        _, text_of_error = process.communicate()
    assert how != signal.SIGINT or b"KeyboardInterrupt" in text_of_error


SCRIPT = """
    import json, os, sys
    import torch, partitioner as pt
    from torch import nn

    plan, folder = pt.load(sys.argv[1]), sys.argv[2]
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    with pt.materialize(plan, model, loss_fn=nn.functional.mse_loss) as stage:
        loss = stage.train_step(torch.ones(8, 4), torch.ones(8, 4))
        open(f"{folder}/{os.environ['RANK']}", "w").write(json.dumps(float(loss)))
        if stage.rank == 1:
            raise ValueError("a bad day")
        stage.train_step(torch.ones(8, 4), torch.ones(8, 4))
"""


def test_under_torchrun_the_script_trains_and_a_failure_ends_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    plan = plan_of(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), torch.zeros(8, 4))
    plan.save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", *(str(tmp_path / name) for name in ("train.py", "plan.json", ""))]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=90
    )
    losses = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert losses[0] == losses[1] > 0
    assert done.returncode != 0 and "ValueError: a bad day" in done.stderr


def test_a_wrong_number_of_torchrun_processes_ends_all_of_them_with_both_numbers(tmp_path: Path) -> None:
    """Each process says it before it looks for the others, so nothing waits and nothing is left behind.

    torchrun ends the others as soon as one has failed, so none goes on before all three have planned.
    """
    plan = plan_of(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), torch.zeros(8, 4))
    plan.save(tmp_path / "plan.json")
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "import torch\n"
        "import partitioner as pt\n"
        "try:\n"
        "    pt.partition(torch.nn.Linear(2, 2), torch.zeros(4, 2), gpus=2)\n"
        "except pt.PlanMismatchError as error:\n"
        "    print(f'planned: {error}', flush=True)\n"
        "said = pathlib.Path(sys.argv[1]).parent\n"
        "(said / f'{os.environ[\"RANK\"]}.said').touch()\n"
        "end = time.monotonic() + 60\n"
        "while len(list(said.glob('*.said'))) < 3 and time.monotonic() < end:\n"
        "    time.sleep(0.05)\n"
        "pt.materialize(pt.load(sys.argv[1]), torch.nn.Linear(2, 2))\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    ran = subprocess.run(
        [*torchrun, str(script), str(tmp_path / "plan.json")], capture_output=True, text=True, timeout=90
    )
    assert ran.returncode != 0
    assert ran.stdout.count("planned: 3 processes were started, but the plan would be for 2 devices") == 3
    assert "the plan is for 2 ranks (2 stages x 1 replica), but 3 processes were started" in ran.stderr


def test_code_that_ranks_get_by_value_has_its_source() -> None:
    """A function of a notebook, whose cells are no files."""
    name, text = "<a cell>", "def fn():\n    return 3\n"
    space: dict[str, Any] = {"__name__": "__main__"}
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), space)
    sent = launcher._pickled(space["fn"])
    del linecache.cache[name]
    found = pickle.loads(sent)
    assert (found(), inspect.getsource(found.__code__)) == (3, text)
    del linecache.cache[name]
