"""Seconds and host memory of capacity() with its full search: python tests/benchmarks/preflight.py [--json out.json]

A Llama of that many layers and that width is built on the meta device; nothing is computed, no device is touched.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import memory
import torch
from published_models import Dimensions

import partitioner as pt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--ffn", type=int, default=28672)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--gpus", default="8x8xH100")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dims = Dimensions(
        "llama", options.layers, options.hidden, options.heads, 8, options.ffn, 128256, options.length, True
    )
    model = memory.model_of(dims, parallel_loss=False)
    tokens = torch.zeros(1, options.length, dtype=torch.long, device="meta")
    start, cpu = time.perf_counter(), time.process_time()
    report = pt.capacity(
        model,
        {"x": tokens, "labels": tokens},
        gpus=options.gpus,
        batch_size=options.batch,
        precision="bf16-mixed",
        price_per_hour=2.5,
    )
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(report)
    print(
        f"\n{report.num_parameters / 1e9:.1f}B parameters, {report.cluster.num_devices} devices, "
        f"{report.num_considered} layouts: {seconds:.1f} s ({cpu_seconds:.1f} s of CPU), "
        f"{peak / 2**30:.2f} GiB of host memory, CUDA initialised: {torch.cuda.is_initialized()}"
    )
    if options.json:
        row = {
            "parameters": report.num_parameters,
            "devices": report.cluster.num_devices,
            "layouts": report.num_considered,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "peak_bytes": peak,
            "cuda_initialised": torch.cuda.is_initialized(),
        }
        options.json.write_text(json.dumps({"rows": [row]}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
