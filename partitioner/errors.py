"""What can go wrong, as one tree: each error says what is wrong with its numbers, then what to change."""


class PartitionerError(Exception):
    """Any failure that this package reports on purpose; `exit_code` is what the shell command returns."""

    exit_code = 1


class ArgumentError(PartitionerError, ValueError):
    """An argument that cannot be right, or does not fit the others."""

    exit_code = 2


class NotBuiltError(ArgumentError):
    """A documented value that this version does not run yet; refused by name, never ignored."""


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
