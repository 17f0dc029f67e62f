# NOTE TO THE EXECUTOR'S BUILDER: the lead moved this file to partitioner/losses.py (the profiler, below the executor,
# needs it too). Import from partitioner.losses, keep editing it there, and delete this file.
from partitioner.losses import *  # noqa: F403
