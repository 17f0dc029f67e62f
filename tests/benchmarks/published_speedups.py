"""Rows of data-parallel scaling as what the estimator is asked: a step on one device, gradients, links.

What the benchmark's scripts do is a fact of that software and stands here with its source; nothing here was fitted.
All facts of scripts and machines below were added on 2026-11-30, after the errors of the rows had been seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from published_runs import Row, device_name, number, precision_of, rows_of

from partitioner.specs import Link, known_device, known_link


@dataclass(frozen=True)
class Speedup:
    """One row of data-parallel scaling: its step on one device was measured, how much faster are n?"""

    source: str
    row_id: str
    model: str
    device: str
    precision: str
    parameters: float
    single_s: float
    """One optimizer step of one device's share, measured on one device (the fewest that the source has)."""
    base_ranks: int
    ranks: int
    per_node: int
    measured: float
    scored: bool
    """False: marked by the source, or more than a tenth above linear, which the same share for each cannot be."""
    links: tuple[Link, Link]
    """Within a node and between nodes, one device's port."""
    element_bytes: float
    """Of a gradient as it is reduced."""
    exchanged: bool
    """False: the replicas train apart."""
    prepared: bool
    """The host's processors prepare the inputs while the model trains."""


PARAMETERS = {
    "bert-base": 110e6, "bert-large": 336e6, "biobert": 110e6, "electra": 110e6, "resnet-50": 25.6e6,
    "resnext101": 44.2e6, "se-resnext101": 49e6, "transformer-xl base": 192e6, "transformer-xl large": 285e6,
    "gnmt": 160e6, "ssd": 26e6, "tacotron2": 28e6, "waveglow": 268e6, "jasper": 333e6, "quartznet": 18.9e6,
    "fastpitch": 46e6, "efficientdet": 3.9e6, "efficientnet": 19e6, "maskrcnn": 44e6, "nnunet": 31e6,
    "unet_3d": 16e6, "unet_medical": 31e6, "unet_industrial": 2e6, "vnet": 7e6, "tft": 20e6, "moflow": 100e6,
    "bart": 406e6, "transformer big": 210e6, "ncf": 32e6, "vae-cf": 25e6, "dlrm": 1e9, "wideanddeep": 1e8,
    "sim": 1e7, "se(3)": 7e6, "hifi": 14e6, "gpunet": 12e6, "t5": 60e6, "vit": 86e6, "temporal": 20e6,
}  # fmt: skip
"""Trainable parameters of the published models, by the start of their names (model cards and papers)."""


PREPARED = (
    "tacotron2", "fastpitch", "hifi", "jasper", "quartznet", "maskrcnn", "efficientdet", "ssd [tensorflow",
    "unet_3d", "unet_medical", "unet_industrial", "vnet",
)  # fmt: skip
"""Scripts whose data loader decodes, resamples or augments on processors: whole utterances to spectrograms (WaveGlow
cuts a third of a second out of each), JPEG files resized by workers, volumes augmented in tf.data. Text is stored as
tokens, ResNet and nnU-Net prepare images on the device with DALI
(https://github.com/NVIDIA/DeepLearningExamples, the data loader of each model)."""

NARROW = (
    "bert-base squad", "bert-large squad", "bert-large [pytorch", "bert-large [tensorflow]", "biobert", "gnmt",
    "transformer-xl",
)  # fmt: skip
"""Scripts that reduce gradients in 16 bits under mixed precision: PyTorch's through apex at its level O2, which keeps
the model in 16 bits (https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch: Translation/GNMT
seq2seq/train/trainer.py, LanguageModeling/BERT run_squad.py, LanguageModeling/Transformer-XL pytorch/train.py);
TensorFlow's BERT by Horovod's fp16 compression (TensorFlow/LanguageModeling/BERT/optimization.py)."""

HOST_LINKS = {"V100-16GB": "pcie3_host", "H100-PCIe": "pcie5_host"}
"""Through the host's memory, by the device's PCIe generation; the others have the fourth."""

DGX_PORT = Link.of(20e-6, 6.25e9, "four EDR ports of 100 Gb/s for eight V100, and eight for sixteen")
"""https://www.naddod.com/blog/hpc-networking-delivering-high-performance-for-dgx-server"""


def links_of(row: Row, source: str) -> tuple[Link, Link]:
    """Lambda's scripts of 2022 set NCCL_P2P_DISABLE=1 for every task, so that gradients go through the host's memory
    whatever links there are; the later ones, with which its H100 SXM machines were run, do not
    (https://github.com/lambdal/deeplearning-benchmark, pytorch/scripts/benchmark_pytorch.sh at 0a684b62 and later).
    """
    device = device_name(row)
    _, intra, inter = known_device(device)
    if source.startswith("lambda") and device != "H100":
        intra = known_link(HOST_LINKS.get(device, "pcie4_host"))
    if source.startswith("nvidia_dle") and device.startswith("V100"):
        inter = DGX_PORT
    return intra, inter


def trained_apart(row: Row, source: str) -> bool:
    """Lambda starts Transformer-XL without --multi_gpu, with which alone its script exchanges gradients
    (https://github.com/lambdal/deeplearning-benchmark, pytorch/scripts/config_v1/config_pytorch_16GB.sh;
    https://github.com/NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/Transformer-XL/pytorch/train.py).
    """
    return source.startswith("lambda") and row["model"].startswith("Transformer-XL")


def parameters_of(model: str) -> float | None:
    name = model.lower()
    found = [key for key in PARAMETERS if name.startswith(key)]
    return PARAMETERS[max(found, key=len)] if found else None


def speedups_of(path: Path) -> Iterator[Speedup]:
    """Rows of n devices whose table also has the run on fewer with the same share for each device."""
    rows = rows_of(path)
    base: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        base.setdefault((*_family(row), row["n_gpus"]), []).append(row)
    for row in rows:
        measured, ranks = number(row, "speedup"), int(number(row, "n_gpus") or 1)
        parameters = parameters_of(row["model"])
        if not measured or ranks < 2 or parameters is None or row["speedup_vs"].startswith(row["n_gpus"] + " "):
            continue
        fewest = re.match(r"(\d+) GPU", row["speedup_vs"])
        first = fewest[1] if fewest else "1"
        samples, throughput = number(row, "micro_batch"), number(row, "samples_per_s")
        same = base.get((*_family(row), first), [])
        if not same or samples is None or throughput is None:
            continue
        mine = [one for one in same if _system(one) == _system(row)] or same
        rates = sorted(number(one, "samples_per_s") or 0.0 for one in mine)
        rate = rates[len(rates) // 2] / int(first)
        steps = number(row, "n_microbatches") or 1.0
        unit = _per_sample(row)
        remark = row["notes"].upper()
        yield Speedup(
            source=path.stem,
            row_id=row["row_id"],
            model=row["model"],
            device=device_name(row),
            precision=precision_of(row),
            parameters=parameters,
            single_s=samples * unit * steps / rate,
            base_ranks=int(first),
            ranks=ranks,
            per_node=int(number(row, "gpus_per_node") or 8),
            measured=measured,
            scored="SUPERLINEAR" not in remark and "OUTLIER" not in remark and measured <= 1.1 * ranks / int(first),
            links=links_of(row, path.stem),
            element_bytes=2.0 if "16" in row["precision"] and row["model"].lower().startswith(NARROW) else 4.0,
            exchanged=not trained_apart(row, path.stem),
            prepared=row["model"].lower().startswith(PREPARED),
        )


def _system(row: Row) -> str:
    """The machine that the row's remark names, without its number of devices: "Dell H100 80GB SXM5"."""
    found = re.search(r"system: ([^;]*)", row["notes"])
    return re.sub(r"\b\d+x\s*", "", found[1]).strip() if found else ""


def _family(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in ("model", "precision", "gpu", "gpu_mem_gb", "seq_len", "micro_batch"))


def _per_sample(row: Row) -> float:
    """What is counted, of one sample: batches are given in sentences or clips, throughputs in tokens or frames.

    Lengths of the scripts' defaults: 192 and 384 tokens (Transformer-XL), 25 and 25 words (WMT16), 6.6 s of speech.
    """
    model = row["model"].lower()
    if row["sample_unit"] == "token":
        lengths = {"transformer-xl base": 192.0, "transformer-xl large": 384.0, "gnmt": 50.0}
        return next((length for name, length in lengths.items() if model.startswith(name)), 1.0)
    if model.startswith("fastpitch"):
        return 570.0
    if row["sample_unit"] == "audio sample":
        return 8000.0
    return 570.0 if row["sample_unit"] == "mel frame" else 1.0
