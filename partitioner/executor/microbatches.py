# NOTE TO THE EXECUTOR'S BUILDER: the lead moved this file to partitioner/microbatches.py (the profiler, below the executor,
# needs it too). Import from partitioner.microbatches, keep editing it there, and delete this file.
from partitioner.microbatches import *  # noqa: F403
