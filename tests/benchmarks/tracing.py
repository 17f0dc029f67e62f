"""What torch.profiler costs the layers that it watches, and how far TensorBoard's plugin is from the Profile.

    python tests/benchmarks/tracing.py --json tracing.json

Rounds of two Profiles of the same stack of layers, one made with `trace_dir` and one without, in turns. For each layer
and direction, medians over the rounds with their 95 % interval (McGill, Tukey & Larsen 1978):
    traced / bare     the layer under the profiler over the layer without it; and the difference an operator, in us
    plugin / traced   the plugin's seconds over those of the Profile of the same runs; furthest: of all rounds
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from test_layer_trace import modules_of
from torch import nn

from partitioner.profiler import profile
from partitioner.profiles import Profile

WIDTHS = (16, 64, 256, 1024)


class Block(nn.Module):
    """What a transformer's block does besides attention, so that a layer is many operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def measured(model: nn.Module, width: int, samples: int, folder: Path | None) -> Profile:
    return profile(
        model,
        torch.randn(samples, width),
        loss_fn=nn.functional.mse_loss,
        example_target=torch.randn(samples, width),
        microbatch_sizes=[samples],
        max_share=1.0,
        num_threads=1,
        whole_step=False,
        trace_dir=folder,
    )


def ratio(values: list[float]) -> tuple[float, float]:
    """The median, and half of its 95 % interval."""
    first, _, third = statistics.quantiles(values, n=4)
    return statistics.median(values), 1.57 * (third - first) / len(values) ** 0.5


def rows_of(width: int, samples: int, rounds: int) -> list[dict[str, Any]]:
    model = nn.Sequential(Block(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    seen: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    operators: Counter[tuple[str, str]] = Counter()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            bare = measured(model, width, samples, None)
            traced = measured(model, width, samples, Path(folder))
            (file,) = Path(folder).glob("*.pt.trace.json")
            content = json.loads(file.read_text(encoding="utf-8"))
        modules = modules_of(content)
        spans = [e for e in content["traceEvents"] if e.get("ph") == "X"]
        for one, other in zip(bare.layers, traced.layers, strict=True):
            for way in ("forward", "backward"):
                name = f"{way} {one.id} ({samples} samples)"
                took = (getattr(one.costs[-1], f"{way}_s"), getattr(other.costs[-1], f"{way}_s"))
                seen.setdefault((one.id, way), []).append((*took, modules[name].host_duration / 1e6))
                inside = [(e["ts"], e["ts"] + e["dur"]) for e in spans if e["name"] == f"nn.Module: {name}"]
                operators[one.id, way] = sum(
                    e.get("cat") == "cpu_op" and any(first <= e["ts"] < last for first, last in inside) for e in spans
                )
    found = []
    for (layer, way), times in seen.items():
        slower, slower_half = ratio([traced / bare for bare, traced, _ in times])
        plugin, plugin_half = ratio([plugin / traced for _, traced, plugin in times])
        added = statistics.median(traced - bare for bare, traced, _ in times)
        found.append(
            {
                "width": width,
                "layer": layer,
                "direction": way,
                "operators": operators[layer, way],
                "bare_s": statistics.median(bare for bare, _, _ in times),
                "traced_over_bare": slower,
                "traced_over_bare_half_interval": slower_half,
                "added_s_an_operator": added / max(1, operators[layer, way]),
                "plugin_over_traced": plugin,
                "plugin_over_traced_half_interval": plugin_half,
                "plugin_furthest": max((plugin / traced - 1 for _, traced, plugin in times), key=abs),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print("width  layer  direction  operators      bare   traced / bare   an operator   plugin / traced   furthest")
    rows = []
    for width in options.widths:
        for row in rows_of(width, options.samples, options.rounds):
            rows.append(row)
            print(
                f"{width:5}  {row['layer']:>5}  {row['direction']:9}  {row['operators']:9}"
                f"  {row['bare_s'] * 1e6:5.0f} us"
                f"  {row['traced_over_bare']:6.3f} ± {row['traced_over_bare_half_interval']:.3f}"
                f"  {row['added_s_an_operator'] * 1e6:9.1f} us"
                f"   {row['plugin_over_traced']:7.3f} ± {row['plugin_over_traced_half_interval']:.3f}"
                f"  {row['plugin_furthest'] * 100:+8.1f} %",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
