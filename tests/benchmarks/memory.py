"""Score predicted memory against published peaks: python tests/benchmarks/memory.py --truth DIR [--json out.json]

A line a source: rows, mean and median error, bias; the mean of each half of the rows. The figures of the allocator's
slack and of a communicator (hardware.toml) were chosen over the rows that nvidia-smi measured, BLOOM's, and nothing
else was fitted: --fit prints the error of both halves of those over a grid of the two. Then the verdicts: runs that ran
out of memory and were called so, and runs that fitted and were not believed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from published_models import Attention, Block, Dimensions, Model
from published_runs import SOFTWARE, Row, Run, _run, number, rows_of
from torch import nn

from partitioner.errors import PartitionerError
from partitioner.graph import CostGraph
from partitioner.memory import rank_memory
from partitioner.plan import MemoryItems
from partitioner.specs import Device, Recompute, ScheduleName, StateBytes, Training, known_device, state_bytes
from partitioner.steps import planner
from partitioner.study import Study

F = nn.functional

SOURCES = ("bigscience_bloom", "torchtitan", "zero_bubble", "simumax_b200", "internevo_7b_scaling")


class GatedUnit(torch.autograd.Function):
    """SwiGLU as one kernel: it keeps its input alone, and computes the rest again (Megatron-LM, torch.compile)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        a, b = x.chunk(2, -1)
        return torch.cat((gradient * b * a, gradient * F.silu(a)), -1)


class FusedBlock(Block):
    """With the kernels that trainers fuse by hand: RMSNorm and SwiGLU."""

    def __init__(self, d: Dimensions) -> None:
        super().__init__(d)
        if d.kind == "llama":
            self.norm1, self.norm2 = nn.RMSNorm(d.hidden), nn.RMSNorm(d.hidden)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        if self.d.kind == "llama":
            return self.down(GatedUnit.apply(self.up(x)))
        return super().mlp(x)


class FusedAttention(Attention):
    """Rotated in place of its input: nothing is kept for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        d, (batch, length, _) = self.d, x.shape
        if not d.flash:
            return super().forward(x)
        q, k, v = self.qkv(x).split([self.width * n for n in (d.heads, d.kv_heads, d.kv_heads)], -1)
        q, k, v = (t.view(batch, length, -1, self.width).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=d.kind != "bert", enable_gqa=d.kv_heads != d.heads)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class ParallelLoss(torch.autograd.Function):
    """Cross entropy over a vocabulary divided by ranks, a kernel an operation (torch.distributed.tensor.parallel)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        result = shifted - shifted.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(result)
        return -result[:, 0].mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (result,) = ctx.saved_tensors
        chosen = torch.zeros_like(result)
        return chosen - result.exp() * gradient


class Divided(Model):
    """Its loss is taken of divided logits."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        for block in self.blocks:
            y = block(y)
        return ParallelLoss.apply(self.head(self.norm(y)).flatten(0, 1).float())


def model_of(d: Dimensions, parallel_loss: bool) -> nn.Module:
    with torch.device("meta"):
        model = (Divided if parallel_loss else Model)(replace(d, layers=1))
        blocks = []
        for _ in range(d.layers):
            block = FusedBlock(d)
            block.attention = FusedAttention(d)
            blocks.append(block)
        model.blocks = nn.ModuleList(blocks)
        if d.kind == "llama":
            model.norm = nn.RMSNorm(d.hidden)
    return model


@dataclass(frozen=True)
class Case:
    """One row: what it holds by our count, and what was seen."""

    run: Run
    row: Row
    heaviest: MemoryItems
    device: Device
    groups: int

    @property
    def in_use(self) -> int:
        return self.heaviest.total - self.heaviest.overhead - self.heaviest.slack

    @property
    def measured(self) -> float | None:
        return number(self.row, "mem_gb")

    @property
    def fails(self) -> bool:
        return self.row["oom"] == "1"

    def predicted(self, device: Device | None = None) -> float:
        """In the row's own unit: what nvidia-smi shows, what the allocator holds, or what is in use."""
        device, kind = device or self.device, self.row["mem_kind"]
        held = self.in_use * (1 + device.slack)
        if "nvidia-smi" in kind or not kind or "GB per GPU" in kind:
            return (held + device.overhead_bytes + self.groups * device.communicator_bytes) / 2**30
        if self.run.source == "torchtitan":  # its log prints what the allocator has reserved
            return held / 2**30
        return self.in_use / (1e9 if kind.startswith("GB") else 2**30)

    def verdict(self, device: Device | None = None) -> bool:
        """Whether it would run out of memory."""
        device = device or self.device
        needed = self.in_use * (1 + device.slack) + device.overhead_bytes + self.groups * device.communicator_bytes
        return needed > device.memory_bytes


class Counter:
    """Keeps what was followed: rows of one model share it."""

    def __init__(self) -> None:
        self.graphs: dict[tuple[Dimensions, bool], CostGraph] = {}

    def graph(self, d: Dimensions, parallel_loss: bool) -> CostGraph:
        # torch's own loss holds what the communicators' size was chosen with; Megatron's in place holds 1 % less
        local = replace(d, length=d.length // d.context_parallel, context_parallel=1, loss_apart=False)
        key = (local, parallel_loss)
        if key not in self.graphs:
            x = torch.zeros(2, local.length, dtype=torch.long, device="meta")
            study = Study(model_of(local, parallel_loss), {"x": x, "labels": x}, max_share=0.99)
            prices = planner(study.work(), "A100-80GB")
            self.graphs[key] = study.graph(torch.bfloat16, prices)
        return self.graphs[key]

    def case(self, run: Run, row: Row) -> Case:
        layout = run.layout
        graph = self.graph(run.dims, parallel_loss=run.source == "torchtitan" and layout.tp > 1)
        first_block = next(k for k, name in enumerate(graph.ids) if name.startswith("blocks."))
        layout = replace(
            layout,
            cuts=tuple(cut + first_block - 1 for cut in layout.cuts or ()),
            schedule=schedule_of(row),
            recompute=recompute_of(row),
        )
        device = known_device(run.device)[0]
        memory = rank_memory(
            graph,
            Training(batch_size=1, optimizer_bytes=0),
            device,
            layout,
            state=state_of(run, row),
            products=0.5 if run.source == "torchtitan" else 1.0,  # its default keeps every second one
        )
        groups = (layout.tp > 1) + (layout.pp > 1) + (layout.dp > 1)
        return Case(run, row, max(memory, key=lambda items: items.total), device, groups)


def recompute_of(row: Row) -> Recompute:
    text = row["recompute"]
    return "never" if not text or text.startswith("none") else "selective" if text.startswith("selective") else "always"


def schedule_of(row: Row) -> ScheduleName:
    names: dict[str, ScheduleName] = {"zb-1p": "zero-bubble", "zb-2p": "zero-bubble-h2", "zb-v": "zero-bubble-v"}
    text = row["schedule"].lower()
    interleaved = text in ("1f1b-i", "interleaved 1f1b") or (number(row, "vpp") or 1) > 1
    return names.get(text, "interleaved" if interleaved else "1f1b")


def state_of(run: Run, row: Row) -> StateBytes:
    """Adam in mixed precision; gradients are added up in 32 bits where the row says so, or its software always does."""
    wide = "fp32 grad" in row["precision"] or (run.source == "simumax_b200" and row["precision"] == "bf16")
    state = state_bytes("adamw", "bf16-mixed", accumulate="fp32" if wide else "auto")
    if "DeepSpeed" in row["framework"] and wide:  # keeps the 16-bit gradients of the micro-batch beside the sum
        state = state._replace(gradients=state.gradients + 2)
    return state


def cases(truth: Path, only: Iterable[str] = ()) -> Iterator[Case]:
    counter = Counter()
    for source in only or SOURCES:
        path = truth / f"{source}.csv"
        for row in rows_of(path) if path.exists() else ():
            if not number(row, "mem_gb") and row["oom"] != "1":
                continue
            asked = {**row, "iter_time_s": row["iter_time_s"] or "1", "oom": ""}
            run = _run(source, asked, SOFTWARE[source])
            if run is None:
                continue
            try:
                yield counter.case(run, row)
            except PartitionerError as error:
                print(f"{row['row_id']} is left out: {error}", file=sys.stderr)


def first_half(row_id: str) -> bool:
    digits = "".join(filter(str.isdigit, row_id))
    return int(digits or 0) % 2 == 0


def errors(found: list[Case], device_of: Any = None) -> list[float]:
    result = []
    for one in found:
        if one.measured:
            device = device_of(one.device) if device_of else None
            result.append(one.predicted(device) / one.measured - 1)
    return result


def scores(found: list[Case]) -> dict[str, float]:
    """By source, in percent; `fit` and `check` are the two halves."""

    def mean(values: list[float]) -> float:
        return round(100 * statistics.fmean(map(abs, values)), 2) if values else math.nan

    every = errors(found)
    return {
        "memory_rows": len(every),
        "memory_mape_pct": mean(every),
        "memory_median_pct": round(100 * statistics.median(map(abs, every)), 2) if every else math.nan,
        "memory_bias_pct": round(100 * statistics.fmean(every), 2) if every else math.nan,
        "memory_fit_pct": mean(errors([one for one in found if first_half(one.run.row_id)])),
        "memory_check_pct": mean(errors([one for one in found if not first_half(one.run.row_id)])),
    }


def verdicts(found: list[Case]) -> dict[str, int]:
    failed = [one for one in found if one.fails]
    fitted = [one for one in found if one.measured]
    return {
        "oom_rows": len(failed),
        "oom_called": sum(one.verdict() for one in failed),
        "fitting_rows": len(fitted),
        "false_alarms": sum(one.verdict() for one in fitted),
    }


def memory_scores(truth: Path, only: Iterable[str] = ()) -> tuple[dict[str, dict[str, float]], list[Case]]:
    """Scores by source, and all cases."""
    found = list(cases(truth, only))
    names = list(dict.fromkeys(one.run.source for one in found))
    return {name: scores([one for one in found if one.run.source == name]) for name in names}, found


def show(by_source: dict[str, dict[str, float]], told: dict[str, int]) -> None:
    print(f"{'memory':24}{'rows':>5}{'mean':>9}{'median':>9}{'bias':>9}{'fit':>9}{'check':>9}")
    for name, one in by_source.items():
        cells = [one[f"memory_{key}_pct"] for key in ("mape", "median", "bias", "fit", "check")]
        print(f"{name:24}{one['memory_rows']:>5}" + "".join(f"{value:>7.1f} %" for value in cells))
    print(
        f"out of memory: {told['oom_called']} of {told['oom_rows']} called, "
        f"{told['false_alarms']} false alarms over {told['fitting_rows']} runs that fitted"
    )


def _check_halves(found: list[Case]) -> list[list[float]]:
    """Errors of the check half, by source."""
    names = dict.fromkeys(one.run.source for one in found)
    check = [one for one in found if not first_half(one.run.row_id)]
    return [errors([one for one in check if one.run.source == name]) for name in names]


def fit(found: list[Case]) -> None:
    """Error of both halves over a grid of the two fitted figures."""
    seen = [one for one in found if "nvidia-smi" in one.row["mem_kind"]]
    halves = [[one for one in seen if first_half(one.run.row_id) is half] for half in (True, False)]
    print("communicator  slack     fit   check")
    for gibibytes in (1.0, 1.5, 2.0, 2.5):
        for slack in (0.05, 0.08, 0.1, 0.12, 0.15):

            def changed(device: Device, gibibytes: float = gibibytes, slack: float = slack) -> Device:
                return device.model_copy(update={"communicator_bytes": int(gibibytes * 2**30), "slack": slack})

            first, second = (100 * statistics.fmean(map(abs, errors(half, changed))) for half in halves)
            print(f"{gibibytes:8.1f} GiB  {slack:5.2f}  {first:5.2f} %  {second:5.2f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True, help="folder of the CSV files")
    parser.add_argument("--sources", nargs="*", default=(), help="file stems; all that state memory if left out")
    parser.add_argument("--json", type=Path, help="write the scores there")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--fit", action="store_true", help="print the grid of the fitted figures")
    options = parser.parse_args()
    start = time.perf_counter()
    by_source, found = memory_scores(options.truth, options.sources)
    if options.rows:
        for one in found:
            run, items = one.run, one.heaviest
            what = f"tp{run.layout.tp} pp{run.layout.pp} dp{run.layout.dp} x {run.layout.microbatch:g}"
            seen = f"{one.measured:.2f}" if one.measured else "out of memory"
            told = f"{one.predicted():.2f}" + (" (would fail)" if one.verdict() else "")
            used = [name for name in type(items).model_fields if getattr(items, name)]
            parts = " ".join(f"{name} {getattr(items, name) / 2**30:.1f}" for name in used)
            print(f"{run.row_id} {what:22} seen {seen:14} told {told:20} {parts}")
    show(by_source, told := verdicts(found))
    thirds = [statistics.quantiles(map(abs, half), n=3)[1] for half in _check_halves(found) if len(half) > 2]
    print(f"band: two of three rows of the check half within {statistics.fmean(thirds):.3f}, mean over sources")
    print(f"{time.perf_counter() - start:.0f} s")
    if options.fit:
        fit(found)
    if options.json:
        options.json.write_text(json.dumps({"sources": by_source, "verdicts": told}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
