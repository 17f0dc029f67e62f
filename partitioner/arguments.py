"""The plain arguments of `partition`: what is refused by name before a model is built or measured.

A value that is documented and not built in this version is a NotBuiltError, one that cannot be is an ArgumentError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from partitioner.errors import ArgumentError, NotBuiltError
from partitioner.specs import EXECUTED, OPTIMIZER_BYTES, SCHEDULES, Cluster, parse_bytes

_CHOICES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "precision": (("fp32",), ("bf16", "fp16", "bf16-mixed", "fp16-mixed")),
    "recompute": (("auto", "never", "always"), ()),
    "shard": (("auto", "none"), ("zero1", "zero2", "zero3")),
    "gradient_compression": ((None,), ("fp16", "bf16", "powersgd")),
    "objective": (("train", "throughput", "latency"), ()),
    "schedule": (("auto", *EXECUTED), SCHEDULES),
    "check": (("first", "never"), ()),
}
"""Argument -> the values that this version runs, and those that are documented besides."""


def check_arguments(**given: Any) -> None:
    """Refuse what can be told to be wrong from these arguments of `partition` alone, whichever of them are given."""
    for name, (built, planned) in _CHOICES.items():
        value = given.get(name, built[0])
        if value not in built:
            if name == "recompute" and not isinstance(value, bool):
                raise NotBuiltError(f"recompute={value!r}: naming layers is not built in this version; {_use(built)}")
            if value in planned:
                raise NotBuiltError(f"{name}={value!r} is not built in this version; {_use(built)}")
            raise ArgumentError(f"{name}={value!r} is unknown; {_use(built)}")
    _check_optimizer(given.get("optimizer", "adamw"))
    for name in ("batch_size", "microbatches"):
        _check_count(name, given.get(name))
    if given.get("memory_limit") is not None:
        parse_bytes(given["memory_limit"])
    devices = num_devices(given["gpus"]) if "gpus" in given else None
    mesh = given.get("mesh", "auto")
    if not isinstance(mesh, str):
        full_mesh(mesh, devices)
    elif mesh != "auto":
        raise ArgumentError(f"mesh={mesh!r} is unknown; use 'auto' or {{'pp': 2, 'dp': 2}}")


def full_mesh(mesh: Mapping[str, int], devices: int | None) -> dict[Literal["pp", "dp"], int]:
    """The mesh with both axes; an ArgumentError where it needs more devices than there are."""
    unknown = sorted(set(mesh) - {"pp", "dp", "tp"})
    if unknown:
        raise ArgumentError(f"mesh has no axis {unknown[0]!r}: use 'pp' (stages) and 'dp' (replicas)")
    if mesh.get("tp", 1) != 1:
        raise NotBuiltError(f"mesh with tp={mesh['tp']} is not built in this version; use 'pp' and 'dp'")
    full: dict[Literal["pp", "dp"], int] = {"pp": int(mesh.get("pp", 1)), "dp": int(mesh.get("dp", 1))}
    if full["pp"] < 1 or full["dp"] < 1:
        raise ArgumentError(f"mesh {dict(mesh)}: every axis needs 1 or more ranks")
    if devices is not None and full["pp"] * full["dp"] > devices:
        raise ArgumentError(
            f"mesh {full} needs {full['pp'] * full['dp']} devices, there are {devices}: make pp x dp at most {devices}"
        )
    return full


def num_devices(gpus: Any) -> int:
    """How many devices `gpus` names."""
    if isinstance(gpus, bool) or not isinstance(gpus, (int, str, Cluster)):
        raise ArgumentError(f"gpus={gpus!r}: give a number, a name such as '8xH100', or a Cluster")
    if isinstance(gpus, str) and not gpus.strip().isdigit():
        gpus = Cluster.parse(gpus)
    if isinstance(gpus, Cluster):
        return gpus.num_devices
    if int(gpus) < 1:
        raise ArgumentError(f"gpus={gpus} is impossible: give 1 or more")
    return int(gpus)


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, str):
        if optimizer < 0:
            raise ArgumentError(f"optimizer={optimizer} bytes a parameter is impossible: give 0 or more")
    elif optimizer == "adafactor":
        raise NotBuiltError("optimizer='adafactor' is not built in this version; give its state in bytes a parameter")
    elif optimizer not in OPTIMIZER_BYTES:
        raise ArgumentError(f"optimizer={optimizer!r} is unknown; use {_listed(tuple(OPTIMIZER_BYTES))} or bytes")


def _check_count(name: str, value: Any) -> None:
    if value is None or (value == "auto" and name == "microbatches"):
        return
    if value == "auto":
        raise NotBuiltError("batch_size='auto' is not built in this version; give the samples of one optimizer step")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name}={value!r} is impossible: give a number of 1 or more")


def _use(values: tuple[Any, ...]) -> str:
    """
    >>> _use(("auto", "none")), _use((None,))
    ("use one of 'auto', 'none'", 'use None')
    """
    return f"use one of {_listed(values)}" if len(values) > 1 else f"use {values[0]!r}"


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(map(repr, values))
