"""What can go wrong, as one tree: each error says what is wrong with its numbers, then what to change."""

from __future__ import annotations

import os
from typing import Any


class PartitionerError(Exception):
    """Any failure that this package reports on purpose; `exit_code` is what the shell command returns."""

    exit_code = 1


class ArgumentError(PartitionerError, ValueError):
    """An argument that cannot be right, or does not fit the others."""

    exit_code = 2


class NotBuiltError(ArgumentError):
    """A documented value that this version does not run yet; refused by name, never ignored."""


class LossWarning(UserWarning):
    """The losses of micro-batches do not make that of their batch, under any weights that could be told."""


class ReplicaWarning(UserWarning):
    """What the forward changes of its model, each replica changes by its own samples."""


class PlanMismatchError(ArgumentError):
    """A plan used with another model, another number of processes or other data than it was made for."""


class InfeasibleError(PartitionerError, ValueError):
    """No plan meets the limits; the message names what does not fit, the bytes short and the nearest way out."""

    exit_code = 3


class UnsupportedModelError(PartitionerError):
    """The model cannot be cut there, or at all, without risking a wrong number."""

    exit_code = 4


class SetupError(PartitionerError):
    """Something is missing or broken on this machine: a package, a device, a process group."""

    exit_code = 5


class RankError(PartitionerError):
    """A rank failed, died or stopped answering.

    Carries where it happened, as far as is known: `rank`, `stage`, `microbatch`, `layer`.
    """

    exit_code = 5

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        layer: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank, self.stage, self.microbatch, self.layer = rank, stage, microbatch, layer


def expect(name: str, value: Any, kind: type | tuple[type, ...], give: str) -> None:
    """Refuse an argument of another kind: an ArgumentError that names it, what it was and what to give.

    >>> expect("microbatches", "x", int, "a number of micro-batches")
    Traceback (most recent call last):
    partitioner.errors.ArgumentError: microbatches='x' is a str: give a number of micro-batches
    """
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        shown = repr(value)
        shown = shown if len(shown) <= 60 and "\n" not in shown else f"{type(value).__name__}(...)"
        raise ArgumentError(f"{name}={shown} is a {type(value).__name__}: give {give}")


def expect_path(name: str, value: Any) -> None:
    expect(name, value, (str, os.PathLike), "the path of a file or folder")
