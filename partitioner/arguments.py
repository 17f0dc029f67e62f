"""The plain arguments of `partition`: what is refused by name before a model is built or measured.

A value that is documented and not built in this version is a NotBuiltError, one that cannot be is an ArgumentError.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from partitioner.errors import ArgumentError, NotBuiltError, expect
from partitioner.specs import EXECUTED, EXECUTED_SHARDS, OPTIMIZER_BYTES, SCHEDULES, Cluster, parse_bytes

_CHOICES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "precision": (("fp32",), ("bf16", "fp16", "bf16-mixed", "fp16-mixed")),
    "recompute": (("auto", "never", "always"), ()),
    "shard": (("auto", *EXECUTED_SHARDS), ("zero3",)),
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
    _check_kinds(given)
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


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "batch_dim": (
        (int, Mapping),
        "the dimension of the inputs that counts samples, from 0 on, or that of each argument that differs, None where "
        "it holds none: {'mask': None, 'state': 1}",
    ),
    "loss_fn": ((Callable, type(None)), "a function of output and target"),  # type: ignore[dict-item]
    "pin": ((Mapping, type(None)), "the stage of some layers: {'layer id': 0}"),
    "trace_dir": ((str, os.PathLike, type(None)), "the path of a folder"),
    "seed": ((int,), "a whole number"),
}
"""Argument -> what it may be, and what to give."""


def _check_dims(batch_dim: int | Mapping[Any, Any]) -> None:
    dims = dict(batch_dim) if isinstance(batch_dim, Mapping) else {"*": batch_dim}
    give = _KINDS["batch_dim"][1]
    for name, dim in dims.items():
        if isinstance(dim, bool) or not isinstance(dim, int | None) or (dim is None and name == "*"):
            raise ArgumentError(f"batch_dim={batch_dim!r}: {dim!r} of {name!r} is no dimension: give {give}")
        if dim is not None and dim < 0:
            raise ArgumentError(f"batch_dim={batch_dim} counts from the end: give {give}")


def _check_kinds(given: Mapping[str, Any]) -> None:
    for name, (kinds, give) in _KINDS.items():
        if name in given:
            expect(name, given[name], kinds, give)
    _check_dims(given.get("batch_dim", 0))
    for layer, stage in (given.get("pin") or {}).items():
        named = isinstance(stage, str) and stage != ""
        if not named and (isinstance(stage, bool) or not isinstance(stage, int) or stage < 0):
            raise ArgumentError(
                f"pin={{{layer!r}: {stage!r}}} is no stage: give its number, from 0 on, or a word that layers of one "
                "stage share"
            )


def full_mesh(mesh: Mapping[str, int], devices: int | None) -> dict[Literal["pp", "dp"], int]:
    """The mesh with both axes; an ArgumentError where it needs more devices than there are."""
    expect("mesh", mesh, Mapping, "'auto' or {'pp': 2, 'dp': 2}")
    for axis, size in mesh.items():
        expect(f"mesh[{axis!r}]", size, int, "its number of ranks")
    unknown = sorted(set(mesh) - {"pp", "dp", "tp"}, key=str)
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
        expect("optimizer", optimizer, (int, float), "its name, or bytes of state a parameter element")
        if optimizer < 0:
            raise ArgumentError(f"optimizer={optimizer} bytes a parameter is impossible: give 0 or more")
    elif optimizer == "adafactor":
        raise NotBuiltError("optimizer='adafactor' is not built in this version; give its state in bytes a parameter")
    elif optimizer not in OPTIMIZER_BYTES:
        raise ArgumentError(f"optimizer={optimizer!r} is unknown; use {_listed(tuple(OPTIMIZER_BYTES))} or bytes")


def check_timed_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer whose step a profile cannot hold: one that is not known by name."""
    known = (*OPTIMIZER_BYTES, "none")
    if optimizer not in (*known, "adafactor"):
        raise ArgumentError(f"optimizer={optimizer!r} is unknown; use {_listed(known)}")


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
