"""Checkpoints under the model's own names: written whole or not at all, read under any other plan.

A checkpoint is a folder of torch.distributed.checkpoint. Its entries:

    model.<key>                       the model's state dict
    optimizer.<parameter>.<entry>     the optimizer's state of that parameter, such as exp_avg
    settings.<parameter>.<setting>    the settings of the parameter's group, such as lr
    training.<entry>                  what the stage itself goes on from
"""

from __future__ import annotations

import os
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from partitioner.errors import ArgumentError, SetupError
from partitioner.executor.mesh import Mesh
from partitioner.executor.placement import Placement


def save(
    path: str | os.PathLike[str],
    mesh: Mesh,
    placement: Placement,
    optimizer: torch.optim.Optimizer | None,
    training: Mapping[str, Any],
) -> str:
    """Write the checkpoint beside its place and rename it once every rank is done; every rank must call it.

    "" or, on every rank alike, what went wrong: then nothing has changed.
    """
    final = Path(path)
    _refuse_other_folder(final)
    beside = mesh.gather(final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}"))[0]
    state: dict[str, Any] = {"model": placement.state_dict(), "training": dict(training)}
    if optimizer is not None:
        state |= _optimizer_entries(placement, optimizer)
    problem = ""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _quiet():
            dcp_save(state, checkpoint_id=beside, process_group=mesh.control)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        problem = f"rank {rank}: {type(cause).__name__}: {cause}"
    except OSError as error:
        problem = f"rank {mesh.rank}: {error}"
    problems = list(filter(None, mesh.gather(problem)))
    if mesh.rank == 0:
        if problems:
            shutil.rmtree(beside, ignore_errors=True)
        else:
            _put_in_place(beside, final)
    mesh.gather(None)
    return problems[0] if problems else ""


def load(
    path: str | os.PathLike[str], mesh: Mesh, placement: Placement, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Read this rank's part into the model and the optimizer; returns what `save` was given as `training`.

    The checkpoint may have been written under another plan, or on one device. An ArgumentError names what it lacks.
    """
    if not (Path(path) / ".metadata").exists():
        raise ArgumentError(f"there is no checkpoint at {os.fspath(path)}")
    reader = FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {f"model.{key}": value for key, value in placement.state_dict().items()}
    for key, value in wanted.items():
        if key not in entries:
            raise ArgumentError(f"the checkpoint {os.fspath(path)} has no {key}: it is of another model")
        size = tuple(getattr(entries[key], "size", ()))
        if isinstance(value, torch.Tensor) and size != tuple(value.shape):
            raise ArgumentError(f"{key} is {size} in the checkpoint and {tuple(value.shape)} in the model")
    if optimizer is not None and not any(key.startswith("settings.") for key in entries):
        raise ArgumentError(f"the checkpoint {os.fspath(path)} was saved without an optimizer: load it without one")
    for key, entry in entries.items():
        kind, _, rest = key.partition(".")
        if kind == "training" or (
            optimizer is not None and kind in ("optimizer", "settings") and _own(placement, rest)
        ):
            wanted[key] = None
            if isinstance(entry, TensorStorageMetadata):
                wanted[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    try:
        with _quiet(), torch.no_grad():
            dcp_load(wanted, storage_reader=reader, process_group=mesh.control)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise SetupError(f"cannot read the checkpoint {os.fspath(path)} on rank {rank}: {cause}") from cause
    extra = {
        key.removeprefix("model."): value
        for key, value in wanted.items()
        if key.startswith("model.") and not isinstance(value, torch.Tensor)
    }
    if extra:
        placement.model.load_state_dict(extra, strict=False)
    if optimizer is not None:
        _fill_optimizer(placement, optimizer, wanted)
    return {key.partition(".")[2]: value for key, value in wanted.items() if key.startswith("training.")}


def _optimizer_entries(placement: Placement, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in placement.own.items()}
    states: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is not None:
                settings[name] = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                if optimizer.state.get(parameter):
                    states[name] = dict(optimizer.state[parameter])
    return {"optimizer": states, "settings": settings}


def _fill_optimizer(placement: Placement, optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]) -> None:
    names = {id(parameter): name for name, parameter in placement.own.items()}
    found: dict[str, dict[str, dict[str, Any]]] = {"optimizer": {}, "settings": {}}
    for key, value in loaded.items():
        kind, _, rest = key.partition(".")
        if kind in found and (own := _own(placement, rest)):
            found[kind].setdefault(own, {})[rest[len(own) + 1 :]] = value
    state = optimizer.state_dict()
    for group, entry in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], entry["params"], strict=True):
            name = names.get(id(parameter), "")
            if name in found["optimizer"]:
                state["state"][number] = found["optimizer"][name]
            entry.update(found["settings"].get(name, {}))
    optimizer.load_state_dict(state)


def _own(placement: Placement, key: str) -> str:
    """The parameter of this stage that "h.0.weight.exp_avg" is about; "" where it is another's."""
    name = key.rpartition(".")[0]
    while name and name not in placement.own:
        name = name.rpartition(".")[0]
    return name


def _refuse_other_folder(path: Path) -> None:
    """A checkpoint replaces a checkpoint, and never a folder that holds anything else."""
    if path.exists():
        strange = [item.name for item in path.iterdir() if item.name != ".metadata" and item.suffix != ".distcp"]
        if strange:
            raise ArgumentError(
                f"{path} holds other files ({strange[0]}), which a checkpoint would replace: name another"
            )


def _put_in_place(beside: Path, final: Path) -> None:
    if not final.exists():
        beside.rename(final)
        return
    old = beside.with_name(f"{beside.name}.old")
    final.rename(old)
    beside.rename(final)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """One process needs no process group, and torch warns of its absence."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
