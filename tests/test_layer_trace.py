"""Profiler traces as TensorBoard's plugin reads them: full names of layers, device times, and the Profile's seconds."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from partitioner.errors import ArgumentError
from partitioner.layer_trace import DIRECTIONS, name_layers, named_layers
from partitioner.profiler import profile
from partitioner.profiles import Profile

pytestmark = pytest.mark.filterwarnings("ignore")  # of the plugin and of TensorBoard, as they are imported


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


EVENTS = [
    event("nn.Module: Linear_0", "python_function", 1, 8, **{"Python id": 1, "Python module id": 0}),
    event("forward h.0.fc (4 samples), run 0", "cpu_op", 0, 10),
    event("aten::linear", "cpu_op", 1, 8, **{"External id": 1}),
    event("cudaLaunchKernel", "cuda_runtime", 2, 1, correlation=7, **{"External id": 1}),
    event("gemm", "kernel", 4, 5, tid=77, correlation=7, device=0, **{"External id": 1}),
    event("backward h.0.fc (4 samples), run 0", "cpu_op", 20, 10),
    event("autograd::mm", "cpu_op", 21, 8, tid=2, **{"External id": 2}),
    event("cudaLaunchKernel", "cuda_runtime", 22, 1, tid=2, correlation=8, **{"External id": 2}),
    event("gemm", "kernel", 23, 6, tid=77, correlation=8, device=0, **{"External id": 2}),
]


def modules_of(content: dict[str, Any]) -> dict[str, Any]:
    """The plugin's own module statistics, by name; microseconds."""
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.run_generator import RunGenerator

    found = RunProfileData.from_json("worker", None, content)
    run = RunGenerator("worker", None, found).generate_run_profile()
    return {stats.name: stats for stats in run.module_stats or ()}


def test_ranges_become_modules_and_classes_do_not() -> None:
    assert modules_of({"schemaVersion": 1, "traceEvents": EVENTS[:3]}).keys() == {"Linear_0"}
    found = modules_of({"schemaVersion": 1, "traceEvents": named_layers(EVENTS)})
    assert found.keys() == {"forward h.0.fc (4 samples)", "backward h.0.fc (4 samples)"}
    assert [stats.host_duration for stats in found.values()] == [10, 10]


def test_of_several_runs_the_median_is_the_layer() -> None:
    """Run 1 has two ranges, 12 in all; of an even number of runs it is the faster one in the middle."""
    runs = [(0, 5), (1, 7), (1, 5), (2, 30), (3, 20)]
    events = [event(f"forward fc (4 samples), run {run}", "cpu_op", 100 * k, dur) for k, (run, dur) in enumerate(runs)]
    (found,) = modules_of({"schemaVersion": 1, "traceEvents": named_layers(events)}).values()
    assert (found.name, found.occurences, found.host_duration) == ("forward fc (4 samples)", 2, 12)


def test_device_time_is_found_on_autograds_own_thread_too() -> None:
    found = modules_of({"schemaVersion": 1, "traceEvents": named_layers(EVENTS)})
    assert found["forward h.0.fc (4 samples)"].device_duration == 5
    assert found["backward h.0.fc (4 samples)"].device_duration == 6


def test_naming_twice_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "one.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": EVENTS}))
    assert name_layers(path) == 2
    once = path.read_text()
    assert name_layers(path) == 2
    assert path.read_text() == once


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot read"):
        name_layers(tmp_path / "none.json")
    for content, says in (("no", "not JSON"), ("[]", "no trace"), ("{}", "no list 'traceEvents'")):
        (tmp_path / "file.json").write_text(content)
        with pytest.raises(ArgumentError, match=says):
            name_layers(tmp_path / "file.json")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def traced(folder: Path) -> tuple[Profile, Path]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Linear(256, 512), Block2())
    inputs, target = torch.randn(256, 256), torch.randn(256, 512)
    found = profile(
        model,
        inputs,
        loss_fn=nn.functional.mse_loss,
        example_target=target,
        microbatch_sizes=[256],
        max_share=1.0,
        num_threads=1,
        whole_step=False,
        trace_dir=folder,
    )
    (file,) = folder.glob("*.pt.trace.json")
    return found, file


class Block2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc(torch.relu(x))


def names_of(found: Profile) -> set[str]:
    return {f"{way} {layer.id} (256 samples)" for way in DIRECTIONS for layer in found.layers}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, Path]:
    return traced(tmp_path_factory.mktemp("logs") / "run")


def compare(found: Profile, seconds: dict[str, float]) -> None:
    """The plugin's time of each layer is within 5 % of the Profile's: one run, told by two clocks."""
    assert seconds.keys() == names_of(found)
    for layer in found.layers:
        for way in DIRECTIONS:
            ours_s = getattr(layer.costs[-1], f"{way}_s")
            assert seconds[f"{way} {layer.id} (256 samples)"] == pytest.approx(ours_s, rel=0.05), (way, layer.id)


def test_the_plugins_seconds_are_the_profiles(run: tuple[Profile, Path]) -> None:
    found, file = run
    modules = modules_of(json.loads(file.read_text(encoding="utf-8")))
    compare(found, {name: stats.host_duration / 1e6 for name, stats in modules.items()})


def test_layers_that_are_alike_are_named_once_with_their_number(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    profile(
        model,
        torch.randn(8, 16),
        loss_fn=nn.functional.mse_loss,
        example_target=torch.randn(8, 16),
        microbatch_sizes=[8],
        max_share=1.0,
        whole_step=False,
        trace_dir=tmp_path,
    )
    (file,) = tmp_path.glob("*.pt.trace.json")
    modules = modules_of(json.loads(file.read_text(encoding="utf-8")))
    assert {name for name in modules if name.startswith("forward")} == {
        "forward 0 (8 samples)",  # its input needs no gradient
        "forward 1 (8 samples, one of 2 alike)",
        "forward 3 (8 samples)",  # the loss comes after it
    }


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(ArgumentError, match=r"trace_dir=.* is no folder to write to"):
            profile(nn.Linear(2, 2), "no inputs", trace_dir=path)


@contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """TensorBoard on a free port of this machine; its address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1", "--port", "0"]
    with (folder / "tensorboard.log").open("w+") as log:
        server = subprocess.Popen(command, stderr=log, stdout=log)
        try:
            for _ in range(300):
                found = re.search(r"http://127\.0\.0\.1:\d+", (folder / "tensorboard.log").read_text())
                if found is not None:
                    break
                assert server.poll() is None, (folder / "tensorboard.log").read_text()
                time.sleep(0.1)
            assert found is not None, "TensorBoard did not start within 30 s"
            yield found[0]
        finally:
            server.terminate()
            server.wait(10)


def fetched(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=10) as answer:
        content = answer.read()
    return json.loads(gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content)


@pytest.mark.slow
def test_tensorboard_lists_the_run_and_its_layers(run: tuple[Profile, Path]) -> None:
    """Started as a user would start it, and asked over HTTP for what its pages show."""
    found, file = run
    with tensorboard(file.parent.parent) as address:
        plugin = f"{address}/data/plugin/pytorch_profiler"
        for _ in range(100):
            answer = fetched(f"{plugin}/runs")
            if answer["runs"] and not answer["loading"]:
                break
            time.sleep(0.2)
        assert answer["runs"] == ["run"]
        assert "Module" in fetched(f"{plugin}/views?run=run")
        (worker,) = fetched(f"{plugin}/workers?run=run&view=Module")
        (span,) = fetched(f"{plugin}/spans?run=run&worker={worker}")
        table = fetched(f"{plugin}/module?run=run&worker={worker}&span={span}")
    compare(found, {row["name"]: row["host_duration"] / 1e6 for row in table["data"]})
