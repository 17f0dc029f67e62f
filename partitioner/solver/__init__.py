"""The fastest plan that fits: mesh, schedule, micro-batches and cuts of a profile's layers on a cluster."""

from __future__ import annotations

from partitioner.solver.answer import solve as solve

__all__ = ["solve"]
