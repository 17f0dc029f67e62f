"""Run a plan with torch.distributed: `materialize` gives each rank its stage, `launch` starts the ranks."""

from partitioner.executor.launcher import launch
from partitioner.executor.stage import LiveStage, materialize

__all__ = ["LiveStage", "launch", "materialize"]
