"""Rows of published measurements as what the estimator is asked: a model, a device, a layout, and the time measured.

What a framework does (hand-fused kernels, fused attention, overlap, the width of reduced gradients) is a fact of that
software at that date and stands here once a source; nothing here was fitted.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from published_models import Dimensions

from partitioner.specs import Link
from partitioner.steps import Layout

Row = dict[str, str]


@dataclass(frozen=True)
class Software:
    """What a source's training software does with a model."""

    fused: bool = False
    flash: bool = False
    overlap: bool = True
    gradient_bytes: float | None = None
    accumulated_bytes: float | None = None
    """Moved an element to add a micro-batch's gradients to the sum."""
    sequence_parallel: bool = False
    tp_overlap: bool = False
    send_overlap: bool = False
    """Of interleaved schedules."""
    attention: str = "flash2"
    casts: str = "apart"
    dropout: bool = True
    loss_apart: bool = False
    """The loss over a divided vocabulary is a kernel for each operator."""
    default_recompute: str = "none"
    microbatch: int = 0
    """Where rows do not state it and the source's text gives none: 0, the row is left out."""


MEGATRON_2021 = Software(fused=True, overlap=False, gradient_bytes=2, loss_apart=True)
"""The loss: https://github.com/NVIDIA/Megatron-LM/blob/v2.5/megatron/mpu/cross_entropy.py (added 2026-11-30)."""
MEGATRON_FLASH = Software(
    fused=True,
    flash=True,
    gradient_bytes=4,
    sequence_parallel=True,
    dropout=False,
    attention="flash3",
    casts="fused",
)
MEGATRON_BRIDGE = replace(MEGATRON_FLASH, tp_overlap=True, send_overlap=True)
"""https://docs.nvidia.com/nemo/megatron-bridge/latest/training/communication-overlap.html"""
MEGATRON_DEEPSPEED = replace(MEGATRON_2021, accumulated_bytes=6)
"""Autograd adds 16-bit gradients in place: both read, the sum written."""
FP32_SUMS = 18.0
"""DeepSpeed's BF16_Optimizer: a gradient widened to fp32 in a kernel of its own, then added to the fp32 sum
(https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/bf16_optimizer.py, _update_hp_grad)."""
BLOCKING = 320
"""Of BLOOM's tuning, runs on so many devices or more hung unless each launch was waited for, and were made that way
(https://github.com/bigscience-workshop/bigscience/blob/9e64edec2ad1fb9263bf39ba616a84ff64b4d947/train/tr11-176B-ml/chronicles-prequel.md,
"dealing with JZ hanging on the large model")."""
SOFTWARE = {
    "bigscience_bloom": MEGATRON_DEEPSPEED,
    "vtrain_single": MEGATRON_DEEPSPEED,
    "vtrain_multi": MEGATRON_DEEPSPEED,
    "megatron_a100_2020_2021": MEGATRON_2021,
    "zero_bubble": Software(fused=True, overlap=False, gradient_bytes=4, loss_apart=True),
    "papers_kort_megascale_llama3_mtnlg_bmtrain": Software(fused=True, gradient_bytes=4, loss_apart=True),
    "megatron_h100_readme": MEGATRON_FLASH,
    "megatron_bridge": MEGATRON_BRIDGE,
    "nemo_long_seq": MEGATRON_BRIDGE,
    "simumax_b200": MEGATRON_FLASH,
    "mosaic_mpt": Software(flash=True, attention="flash1", casts="fused", dropout=False),
    # gradients are reduced in 32 bits: mixed_precision_reduce = "float32"
    # (https://github.com/pytorch/torchtitan/blob/main/torchtitan/config_manager.py, added 2026-11-30)
    "torchtitan": Software(fused=True, flash=True, sequence_parallel=True, gradient_bytes=4, dropout=False),
    "fms_fsdp": Software(fused=True, flash=True, dropout=False),
    "internevo_7b_scaling": Software(flash=True, attention="flash1", gradient_bytes=2, dropout=False),
    # BERT is timed as a classifier where it is not trained
    # (https://github.com/sitar-lab/NeuSight/blob/d3e84448f3e5ae3fd33cb639b91cb60b90f0d938/neusight/Tracing/trace.py)
    "neusight_e2e": Software(),
}

DEVICES = {
    "A100-SXM": {"80": "A100-80GB", "40": "A100-40GB", "": "A100-80GB"},
    "A800-SXM": {"80": "A100-80GB"},
    "A100-PCIe": {"80": "A100-PCIe-80GB", "40": "A100-PCIe-40GB"},
    "H100-SXM": {"": "H100"},
    "H100-SXM (96GB HBM2e 2.4TB/s, 500W)": {"": "H100-96GB"},
    "H200-SXM": {"": "H200"},
    "V100-SXM2": {"16": "V100-16GB", "": "V100-32GB"},
    "V100-SXM3 (DGX-2)": {"": "V100-32GB"},
    "V100-SXM": {"16": "V100-16GB", "": "V100-32GB"},
    "V100": {"": "V100-32GB"},
    "V100-PCIe": {"": "V100-PCIe"},
    "P100-PCIe": {"": "P100"},
    "B200-SXM": {"": "B200"},
    "B300-SXM": {"": "B300"},
    "MI250 (1 GCD)": {"": "MI250"},
    "Quadro RTX 8000": {"": "RTX8000"},
    "RTX A6000": {"": "A6000"},
    "RTX 6000 Ada": {"": "RTX6000Ada"},
    "RTX 3090": {"": "RTX3090"},
    "RTX 4090": {"": "RTX4090"},
    "H100 80GB SXM5": {"": "H100"},
    "H100 80GB PCIe Gen5": {"": "H100-PCIe"},
    "A100 80GB SXM4": {"": "A100-80GB"},
    "A100 80GB PCIe": {"": "A100-PCIe-80GB"},
    "A100 40GB PCIe": {"": "A100-PCIe-40GB"},
    "V100 16GB": {"": "V100-16GB"},
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One row that states what is needed."""

    source: str
    row_id: str
    dims: Dimensions
    device: str
    precision: str
    layout: Layout
    measured_s: float
    port: Link | None = None
    """Between nodes, of one device; None: the catalog's."""
    whole_step: bool = True
    """False: forward, or forward and backward, without the optimizer."""
    scored: bool = True
    """False: the source's own remark excludes it."""
    facts: Row = field(default_factory=dict, compare=False, hash=False, repr=False)


def rows_of(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def number(row: Row, name: str) -> float | None:
    try:
        return float(row[name])
    except (KeyError, ValueError):
        return None


def device_name(row: Row) -> str:
    sizes = DEVICES.get(row["gpu"], {})
    return sizes.get(row["gpu_mem_gb"], sizes.get("", row["gpu"]))


def precision_of(row: Row) -> str:
    text = row["precision"].lower()
    if "fp4" in text:
        return "fp4"
    if "fp8" in text:
        return "fp8"
    if text.startswith("fp32"):
        return "fp32"
    if "tf32" in text:
        return "tf32"
    pure = "pure" in text
    return ("bf16" if "bf16" in text else "fp16") + ("" if pure else "-mixed")


def port_of(row: Row) -> Link | None:
    """The network port of one device, from the row's words: "4x Omni-Path 100 Gb/s per node", "8x HDR IB 200 Gb/s"."""
    text = row.get("inter_link", "")
    rate = re.search(r"(\d+(?:\.\d+)?)\s*Gb/s", text)
    if rate is None:
        return None
    count = re.search(r"(\d+)x ", text)
    gigabytes = float(rate[1]) / 8 * (int(count[1]) if count else 1)
    if "per GPU)" in text or "per node" in text or count:
        per_node = number(row, "gpus_per_node") or 8
        gigabytes /= per_node
    return Link.of(2e-5, gigabytes * 1e9, text)


def measured_seconds(row: Row) -> float | None:
    return number(row, "iter_time_s") or number(row, "iter_time_s_derived")


def recompute_of(row: Row, software: Software) -> tuple[str, float]:
    text = row["recompute"] or software.default_recompute
    if text.startswith("none"):
        return "never", 1.0
    if text == "selective per-op" or (text == "selective" and "FSDP" in row["sharding"]):
        # every second matmul again (torchtitan), or every second or third block (fms): no row states which
        return "always", 0.5 if "torchtitan" in row["framework"].lower() or "FSDP2" in row["sharding"] else 1 / 3
    if text.startswith("selective"):
        return "selective", 1.0
    return "always", 1.0


def shard_of(row: Row) -> str:
    text = row["sharding"].lower()
    if "zero-1" in text or "zero1" in text or "distributed optimizer" in text:
        return "zero1"
    if "zero-2" in text or "zero2" in text or "grad_op" in text:
        return "zero2"
    return "zero3" if any(word in text for word in ("zero-3", "zero3", "fsdp", "bmtrain")) else "none"


def schedule_of(row: Row) -> str:
    text = row["schedule"].lower()
    if text.startswith("zb"):
        return "zero-bubble-h2" if "2p" in text else "zero-bubble"
    if "interleaved" in text or text == "1f1b-i" or (number(row, "vpp") or 1) > 1:
        return "interleaved"
    return "gpipe" if text.startswith(("gpipe", "pipeline")) else "1f1b"


def even_cuts(layers: int, stages: int, ends_lighter: bool) -> tuple[int, ...]:
    """Blocks dealt evenly, the embedding to the first stage, norm and head to the last (Megatron's way).

    Where they do not divide, the ends hold one block fewer, or the first stages one more.
    """
    if stages == 1:
        return ()
    if layers % stages and (layers + 2) % stages == 0 and ends_lighter:
        counts = [(layers + 2) // stages] * stages
        counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
    else:
        counts = [layers // stages + (k < layers % stages) for k in range(stages)]
    places, total = [], 1
    for count in counts[:-1]:
        total += count
        places.append(total)
    return tuple(places)


def runs_of(path: Path) -> Iterator[Run]:
    """The rows of a file that can be asked for; others are left out without a word: their file says what they lack."""
    source = path.stem
    software = SOFTWARE.get(source)
    if software is None:
        return
    for row in rows_of(path):
        run = _run(source, row, software)
        if run is not None:
            yield run


def _run(source: str, row: Row, software: Software) -> Run | None:
    measured = measured_seconds(row)
    needed = [number(row, name) for name in ("layers", "hidden", "heads", "seq_len", "n_gpus")]
    if not measured or any(value is None for value in needed) or "moe" in row["arch"] or row["oom"] == "1":
        return None
    layers, hidden, heads, length, count = (int(value) for value in needed if value is not None)
    tp, pp, dp, cp = (int(number(row, name) or 1) for name in ("tp", "pp", "dp", "cp"))
    if tp * pp * dp * cp != count and source != "neusight_e2e":
        return None
    vpp = int(number(row, "vpp") or 1) if pp > 1 else 1
    microbatch, per_step = number(row, "micro_batch"), number(row, "n_microbatches")
    batch = number(row, "global_batch")
    if microbatch is None and batch and pp == 1 and source == "torchtitan":
        microbatch, per_step = batch / dp, 1.0
    if microbatch is None:
        return None
    if per_step is None:
        if not batch:
            return None
        per_step = max(1.0, batch / dp / microbatch)
    recompute, share = recompute_of(row, software)
    kind = "llama" if "llama" in row["arch"] else "bert" if row["arch"] == "bert" else "gpt"
    vocab = int(number(row, "vocab") or 50304)
    vocab += -vocab % (128 * tp) if source != "neusight_e2e" else 0  # padded, as trainers do
    training = "[inf]" not in row["model"]
    dims = Dimensions(
        kind=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(number(row, "kv_heads") or heads),
        ffn=int(number(row, "ffn") or 4 * hidden),
        vocab=vocab,
        length=length,
        flash=software.flash,
        training=training,
        dropout=software.dropout,
        head=source != "neusight_e2e" or kind != "bert" or training,
        context_parallel=cp,
        loss_apart=software.loss_apart,
        fused_softmax=software.fused and microbatch * heads / tp % 4 == 0,
    )
    precision = precision_of(row)
    wide_sums = "fp32 grad accumulation" in row["precision"]
    whole = source != "neusight_e2e"
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp * cp,
        microbatch=microbatch,
        num_microbatches=round(per_step),
        schedule=schedule_of(row),
        stages_per_rank=vpp if schedule_of(row) == "interleaved" else 1,
        recompute=recompute,
        recompute_share=share,
        shard=shard_of(row),
        sequence_parallel=software.sequence_parallel and tp > 1,
        cuts=even_cuts(layers, pp * (vpp if schedule_of(row) == "interleaved" else 1), True),
        overlap=software.overlap,
        tp_overlap=software.tp_overlap or "asynctp" in row["notes"].lower().replace(" ", ""),
        send_overlap=software.send_overlap and vpp > 1,
        fused=software.fused,
        attention=software.attention,
        casts="rows" if "rowwise" in row["precision"] else software.casts,
        gradient_bytes=4.0 if wide_sums else software.gradient_bytes,
        accumulated_bytes=FP32_SUMS if wide_sums else software.accumulated_bytes,
        barrier="2p" not in row["schedule"] or "all-reduce" in row["schedule"],
        blocking=source == "bigscience_bloom" and count >= BLOCKING,
        per_node=72 if "NVL72" in row["intra_link"] else int(number(row, "gpus_per_node") or 8),
    )
    if layout.num_stages > layers + 3:
        return None
    remark = row["notes"].upper()
    return Run(
        source=source,
        row_id=row["row_id"],
        dims=dims,
        device=device_name(row),
        precision=precision,
        layout=layout,
        measured_s=measured,
        port=port_of(row),
        whole_step=whole,
        scored="SUPERLINEAR" not in remark and "OUTLIER" not in remark and "INCONSISTENT" not in remark,
        facts=row,
    )


__all__ = ["Run", "replace", "runs_of"]
