"""TensorBoard scalars of a training run beside what its plan predicted: step, throughput, speedup, efficiency, bubble.

Predicted and measured are two runs below one folder with the same tags, so that TensorBoard draws them into one chart.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

from partitioner.errors import ArgumentError, SetupError, expect_path
from partitioner.plan import Plan
from partitioner.timeline import Timeline


class Scalars:
    """Writes to `folder/predicted` and `folder/measured`; a context manager, closed at its end.

        with plan.scalars("runs/gpt2") as scalars:          # on one rank
            for step, batch in enumerate(loader):
                ...
                timeline = stage.timeline()                 # on every rank
                scalars.add(step, timeline)

    Measured speedup and efficiency are against the plan's own figure for one device, which was predicted.
    """

    def __init__(self, plan: Plan, folder: str | os.PathLike[str]) -> None:
        try:
            from tensorboard.summary import Writer
        except ModuleNotFoundError as error:
            raise SetupError("scalars need tensorboard: pip install 'torch-partitioner[tensorboard]'") from error
        self.plan = plan
        expect_path("folder", folder)
        try:
            self._writers = {name: Writer(str(Path(folder) / name)) for name in ("predicted", "measured")}
        except OSError as error:
            raise ArgumentError(f"cannot write scalars to {os.fspath(folder)}: {error.strerror}") from error

    def add(self, step: int, timeline: Timeline) -> None:
        """One measured step, and the prediction beside it."""
        prediction = self.plan.prediction
        self._write("predicted", step, prediction.step_s, prediction.optimizer_s, prediction.bubble_fraction)
        self._write("measured", step, timeline.step_s, timeline.optimizer_s, timeline.bubble_fraction)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def __enter__(self) -> Scalars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, name: str, step: int, step_s: float, optimizer_s: float, bubble: float) -> None:
        total_s = step_s + optimizer_s
        values: dict[str, Any] = {"step_s": step_s, "optimizer_s": optimizer_s, "bubble": bubble}
        if total_s > 0:
            speedup = self.plan.prediction.single_device_s / total_s
            values |= {
                "throughput": self.plan.training.batch_size / total_s,
                "speedup": speedup,
                "efficiency": speedup / self.plan.num_ranks,
            }
        for tag, value in values.items():
            self._writers[name].add_scalar(f"partitioner/{tag}", value, step)
