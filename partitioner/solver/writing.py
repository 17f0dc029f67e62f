"""What a forward that writes into parameters asks of a plan: one forward a step, as on one device."""

from __future__ import annotations

from partitioner.errors import ArgumentError
from partitioner.profiles import Profile
from partitioner.specs import Training

AT_FIRST = "the first forward sets the parameter"
"""How that begins which is said of parameters that are set from data, once."""


def once_a_step(profile: Profile, training: Training) -> tuple[Training, tuple[str, ...]]:
    """The training with one micro-batch where every forward writes into parameters, and what to say of that.

    A copy that follows the weights (teacher, momentum encoder, averages) would move once for every micro-batch. An
    ArgumentError where more are asked for.
    """
    every, first = ([one.names[0] for one in profile.parameters if one.written == kind] for kind in ("every", "first"))
    notes = []
    replicas = "replicas do it each for itself, and where they come to different values, those of the first are taken"
    if every and training.objective == "train":
        changed = f"the forward changes the parameter{'s' if len(every) > 1 else ''} {_listed(every)}"
        if training.microbatches not in ("auto", 1):
            raise ArgumentError(
                f"{changed}, so with microbatches={training.microbatches} that would happen {training.microbatches} "
                "times a step, and once on one device: use microbatches=1, with which replicas (dp) run, or change "
                "them after the step, outside of the forward"
            )
        training = training.model_copy(update={"microbatches": 1})
        notes.append(f"{changed}: microbatches=1, so that it happens once a step as on one device; {replicas}")
    if first:
        notes.append(
            f"{AT_FIRST}{'s' if len(first) > 1 else ''} {_listed(first)} from what it is "
            f"given: from its first micro-batch, not the whole batch; {replicas}. A batch run through the model before "
            "materialize sets them as you want"
        )
    return training, tuple(notes)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
