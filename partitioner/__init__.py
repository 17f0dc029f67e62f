"""Automatic partitioning of PyTorch models over several devices: profile, plan, predict, run, verify.

Importing this package loads nothing but the standard library; each name is fetched when it is first used (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "partition": "api",
    "profile": "profiler",
    "estimate": "estimator",
    "solve": "solver",
    "simulate": "simulator",
    "load": "plan",
    "Plan": "plan",
    "Profile": "profiles",
    "Cluster": "specs",
    "Device": "specs",
    "Link": "specs",
    "Training": "specs",
    "Timeline": "timeline",
    "CostGraph": "graph",
    "materialize": "executor",
    "launch": "executor",
    "verify": "verification",
    "capacity": "preflight",
    "Verification": "verification",
    "CapacityReport": "forecast",
    "PartitionerError": "errors",
    "ArgumentError": "errors",
    "NotBuiltError": "errors",
    "PlanMismatchError": "errors",
    "InfeasibleError": "errors",
    "UnsupportedModelError": "errors",
    "SetupError": "errors",
    "RankError": "errors",
    "LossWarning": "errors",
    "ReplicaWarning": "errors",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'partitioner' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"partitioner.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


if TYPE_CHECKING:
    from partitioner.api import partition as partition
    from partitioner.errors import ArgumentError as ArgumentError
    from partitioner.errors import InfeasibleError as InfeasibleError
    from partitioner.errors import LossWarning as LossWarning
    from partitioner.errors import NotBuiltError as NotBuiltError
    from partitioner.errors import PartitionerError as PartitionerError
    from partitioner.errors import PlanMismatchError as PlanMismatchError
    from partitioner.errors import RankError as RankError
    from partitioner.errors import ReplicaWarning as ReplicaWarning
    from partitioner.errors import SetupError as SetupError
    from partitioner.errors import UnsupportedModelError as UnsupportedModelError
    from partitioner.estimator import estimate as estimate
    from partitioner.executor import launch as launch
    from partitioner.executor import materialize as materialize
    from partitioner.forecast import CapacityReport as CapacityReport
    from partitioner.graph import CostGraph as CostGraph
    from partitioner.plan import Plan as Plan
    from partitioner.plan import load as load
    from partitioner.preflight import capacity as capacity
    from partitioner.profiler import profile as profile
    from partitioner.profiles import Profile as Profile
    from partitioner.simulator import simulate as simulate
    from partitioner.solver import solve as solve
    from partitioner.specs import Cluster as Cluster
    from partitioner.specs import Device as Device
    from partitioner.specs import Link as Link
    from partitioner.specs import Training as Training
    from partitioner.timeline import Timeline as Timeline
    from partitioner.verification import Verification as Verification
    from partitioner.verification import verify as verify
