"""What this machine has and what works on it, tried rather than assumed; for what does not, what to do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from partitioner.display import Shown
from partitioner.report import Page, Prose, Table
from partitioner.specs import format_bytes

REQUIRED = ("cloudpickle", "networkx", "numpy", "pydantic", "rich", "scipy", "torch")
OPTIONAL = ("safetensors", "transformers", "matplotlib", "ipywidgets", "tensorboard", "torch-tb-profiler")


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what was found, and where that is not enough, what to do."""

    name: str
    found: str
    ok: bool = True
    advice: str = ""


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """All findings; `ok` where nothing that this package needs is missing or broken."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)

    def page(self) -> Page:
        rows = tuple((f.name, "ok" if f.ok else "BROKEN", f.found) for f in self.findings)
        advice = tuple(f"{f.name}: {f.advice}" for f in self.findings if f.advice)
        title = "This machine can plan and train" if self.ok else "Something is missing"
        table = Table(("", "", "found"), rows, wide=("found",))
        return Page(title, (table, Prose("advice", advice)) if advice else (table,))


def check(*, try_ranks: bool = True) -> Diagnosis:
    """Look at Python, packages, cores, memory and devices, and let two processes add numbers over gloo.

    `try_ranks=False` leaves the two processes out: they take some seconds.
    """
    findings = [
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *map(_package, REQUIRED),
        *(_package(name, needed=False) for name in OPTIONAL),
        _cores(),
        _memory(),
    ]
    if next(finding for finding in findings if finding.name == "torch").ok:
        devices = _devices()
        findings += devices
        if try_ranks and all(finding.ok for finding in devices):
            findings.append(_ranks())
    return Diagnosis(tuple(findings))


def _package(name: str, needed: bool = True) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed", ok=not needed, advice=f"pip install {name}" if needed else "")


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ]
    return Finding("cores", ", ".join([f"{usable} usable of {os.cpu_count()}", *limits]))


def _memory() -> Finding:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return Finding("memory", "unknown on this system")
    return Finding("memory", format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))


def _devices() -> list[Finding]:
    try:
        import torch
        import torch.distributed
    except Exception as error:
        advice = "install a build of torch for this machine: https://pytorch.org/get-started/locally/"
        return [Finding("import torch", f"{type(error).__name__}: {error}", ok=False, advice=advice)]
    if not torch.distributed.is_available():
        advice = "install a build of torch with torch.distributed"
        return [Finding("torch.distributed", "not in this build", ok=False, advice=advice)]
    gloo = torch.distributed.is_gloo_available()
    advice = "" if gloo else "ranks on CPU need a build of torch with gloo"
    findings = [Finding("gloo", "available" if gloo else "not in this build", ok=gloo, advice=advice)]
    if not torch.cuda.is_available():
        return [*findings, Finding("CUDA devices", "none: ranks run on the CPU")]
    for k in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(k)
        findings.append(Finding(f"cuda:{k}", f"{properties.name}, {format_bytes(properties.total_memory)}"))
    return [*findings, Finding("nccl", "available" if torch.distributed.is_nccl_available() else "not in this build")]


_RANK = """
import sys, datetime, torch, torch.distributed as dist
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=30))
x = torch.tensor([rank + 1.0])
dist.all_reduce(x)
dist.destroy_process_group()
sys.exit(0 if x.item() == 3.0 else 3)
"""


def _ranks(timeout_s: float = 60) -> Finding:
    """Two processes add 1 and 2."""
    advice = "set GLOO_SOCKET_IFNAME to a network interface that works (lo on one machine)"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _RANK]
        path = str(Path(folder) / "store")
        ranks = [
            subprocess.Popen([*command, str(rank), path], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=timeout_s)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            return Finding("two ranks", f"no answer within {timeout_s:.0f} s", ok=False, advice=advice)
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    if any(rank.returncode for rank in ranks):
        last = next((text.strip().splitlines()[-1] for text in said if text.strip()), "they gave no reason")
        return Finding("two ranks", last, ok=False, advice=advice)
    return Finding("two ranks", "added numbers over gloo")
