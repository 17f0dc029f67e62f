"""Break slicing and the executor on purpose, one way at a time, and show that each is noticed.

    python tests/benchmarks/mutations.py --json mutations.json

A break of slicing must be noticed by the self-check, which `partition` runs on every new plan; one of what happens
between ranks by the comparison with one device that `verify` makes. Unbroken, every comparison must pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cloudpickle
import models
import torch
from equality import plans
from odd_models import ODD
from rank_pool import RankPool
from side_by_side import possible_cuts, quiet, split

from partitioner import slicing, verification, walking
from partitioner.capture import Capture, capture
from partitioner.errors import PartitionerError
from partitioner.executor import pipeline, reduction, stage
from partitioner.losses import Loss
from partitioner.microbatches import Cutter
from partitioner.parts import Part, Payload
from partitioner.selfcheck import check_split
from partitioner.shared import SharedState
from partitioner.slicing import Slice, SliceRun
from partitioner.walking import Walk


class Mutation(NamedTuple):
    """`broken` is a context in which the code is wrong; `model` shows it, cut before the layers named in `cuts`."""

    name: str
    model: str
    cuts: tuple[str, ...]
    broken: Callable[[], Any]
    on_ranks: bool = False


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], Any]:
    """A context in which `owner.name` is what `make` makes of it."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


# -- slicing


def _without_last_route(init: Callable[..., None]) -> Callable[..., None]:
    def broken(self: Part, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for target in self.routes:
            if target > self.stage + 1:
                self.routes[target] = self.routes[target][:-1]

    return broken


def _first_gradient_lost(gradients_of: Callable[..., Any]) -> Callable[..., Any]:
    def broken(run: SliceRun, source: int) -> Any:
        return [None, *gradients_of(run, source)[1:]]

    return broken


def _gradients_not_summed(backward_through: Callable[..., None]) -> Callable[..., None]:
    def broken(run: SliceRun, gradients: Any) -> None:
        last = max(gradients)
        kept = {t: values if t == last else [None] * len(values) for t, values in gradients.items()}
        backward_through(run, kept)

    return broken


def _stale(sent: Callable[[Payload], Payload]) -> Callable[[Payload], Payload]:
    first: list[Payload] = []

    def broken(payload: Payload) -> Payload:
        first.append(sent(payload))
        return Payload(payload.header, [tensor.clone() for tensor in first[0].tensors])

    return broken


def _swapped(sent: Callable[[Payload], Payload]) -> Callable[[Payload], Payload]:
    def broken(payload: Payload) -> Payload:
        found = sent(payload)
        return Payload(found.header, found.tensors[::-1])

    return broken


def _next_stages_layer(init: Callable[..., None]) -> Callable[..., None]:
    def broken(self: Part, model: Any, profile: Capture, stage_of: Any, stage: int, **kwargs: Any) -> None:
        ids = [layer.id for layer in profile.layers]
        late = {name: stage_of[ids[max(0, k - 1)]] for k, name in enumerate(ids)}
        init(self, model, profile, late if stage == 0 else stage_of, stage, **kwargs)

    return broken


def _twice(fire_hooks: Callable[..., None]) -> Callable[..., None]:
    def broken(*args: Any) -> None:
        fire_hooks(*args)
        fire_hooks(*args)

    return broken


def _buffers_put_back(run: Callable[..., SliceRun]) -> Callable[..., SliceRun]:
    def broken(self: Slice, *args: Any, **kwargs: Any) -> SliceRun:
        before = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        found = run(self, *args, **kwargs)
        for buffer, value in before:
            buffer.data.copy_(value)
        return found

    return broken


def _chance_is_not_logged(may_draw: Callable[..., bool]) -> Callable[..., bool]:
    return lambda name, func: False


def _python_states_stay(set_states: Callable[..., None]) -> Callable[..., None]:
    return lambda states: None


def _host_values_are_turned(follow: Callable[..., Any]) -> Callable[..., Any]:
    def broken(self: Walk, moment: str, name: str) -> Any:
        entry = follow(self, moment, name)
        return entry._replace(result=not entry.result) if isinstance(entry.result, bool) else entry

    return broken


def _gradients_off(begin: Callable[[Walk], None]) -> Callable[[Walk], None]:
    def broken(self: Walk) -> None:
        self.has_gradients = False
        begin(self)

    return broken


def _changes_stay_here(apply: Callable[..., None]) -> Callable[..., None]:
    return lambda self, codes, stand_in=None: set()


# -- between ranks


def _own_gradient_only(finish: Callable[..., None]) -> Callable[..., None]:
    def broken(self: Any) -> None:
        mine = {p: p.grad.clone() for ps in self._parameters.values() for p in ps if p.grad is not None}
        finish(self)
        for parameter, gradient in mine.items():
            parameter.grad = gradient

    return broken


def _equal_shares(shares: Callable[..., Any]) -> Callable[..., Any]:
    def broken(self: Any, microbatches: Any, weights: Any) -> Any:
        total, _ = shares(self, microbatches, weights)
        return total, [1 / len(weights)] * len(weights)

    return broken


def _previous_payload(receive: Callable[..., Any]) -> Callable[..., Any]:
    kept: dict[int, Any] = {}

    def broken(self: Any, tag: Any) -> Any:
        header, tensors = receive(self, tag)
        before = kept.get(id(self), tensors)
        kept[id(self)] = [None if tensor is None else tensor.clone() for tensor in tensors]
        return header, before

    return broken


def _last_microbatch_forgotten(backward: Callable[..., None]) -> Callable[..., None]:
    def broken(self: Any, step: int, k: int, count: int) -> None:
        if k + 1 == count and k in self._roots:
            self._roots[k] = self._roots[k] * 0
        backward(self, step, k, count)

    return broken


MUTATIONS = (
    Mutation("a skip is not sent", "unet", ("down.2", "up.1"), replaced(Part, "__init__", _without_last_route)),
    Mutation(
        "a received tensor's gradient is dropped",
        "gpt2",
        ("*",),
        replaced(slicing, "gradients_of", _first_gradient_lost),
    ),
    Mutation(
        "two stages' gradients of a tensor are not summed",
        "unet",
        ("down.2", "up.1"),
        replaced(slicing, "backward_through", _gradients_not_summed),
    ),
    Mutation("a stale payload is used again", "gpt2", ("*",), replaced(slicing, "_sent", _stale)),
    Mutation("tensors of a payload are swapped", "bidirectional", ("*",), replaced(slicing, "_sent", _swapped)),
    Mutation("one rank cuts a layer later", "gpt2", ("*",), replaced(Part, "__init__", _next_stages_layer)),
    Mutation("a hook runs twice", "odd:forward_hooks_collect", ("*",), replaced(Walk, "fire_hooks", _twice)),
    Mutation("buffer updates are lost", "resnet", ("*",), replaced(Slice, "run", _buffers_put_back)),
    Mutation(
        "random numbers are drawn again",
        "odd:dropout_everywhere",
        ("*",),
        replaced(walking, "may_draw", _chance_is_not_logged),
    ),
    Mutation(
        "Python's random state is not handed on",
        "odd:random_decisions_inside_layers",
        ("*",),
        replaced(walking, "set_random_states", _python_states_stay),
    ),
    Mutation(
        "a branch's value is turned",
        "odd:branches_on_values",
        ("*",),
        replaced(Walk, "follow", _host_values_are_turned),
    ),
    Mutation("received tensors take no gradients", "gpt2", ("*",), replaced(Walk, "begin", _gradients_off)),
    Mutation(
        "an attribute that an earlier stage changed is stale",
        "odd:attribute_set_past_setattr",
        ("c",),
        replaced(SharedState, "apply", _changes_stay_here),
    ),
    Mutation(
        "a tied gradient is not summed", "tied", (), replaced(reduction.Reduction, "finish", _own_gradient_only), True
    ),
    Mutation("micro-batches count alike", "bert", (), replaced(stage.LiveStage, "_shares", _equal_shares), True),
    Mutation(
        "a stale payload comes over the wire",
        "gpt2",
        (),
        replaced(pipeline.Receiver, "receive", _previous_payload),
        True,
    ),
    Mutation(
        "the last micro-batch counts for nothing",
        "lstm",
        (),
        replaced(pipeline.Pipeline, "_backward", _last_microbatch_forgotten),
        True,
    ),
)


def case_of(name: str) -> models.Case:
    name = {"bidirectional": "lstm"}.get(name, name)
    case = ODD[name[4:]]() if name.startswith("odd:") else quiet(lambda: models.build(name))
    if name == "bert" and case.kwargs:  # so that micro-batches have different numbers of labels
        case.kwargs["labels"][:3, 2:] = -100
    return case


def self_check(mutation: Mutation, *, broken: bool) -> str:
    """What the self-check says; empty where it is content."""
    case = case_of(mutation.model)
    captured = capture(case.model, case.args, case.kwargs, max_share=1 / 32)
    places = possible_cuts(captured)
    cuts = (
        [places[len(places) // 2]] if mutation.cuts == ("*",) else [_first_within(places, cut) for cut in mutation.cuts]
    )
    count = 2 if Cutter().batch_size(case.args, case.kwargs or {}) > 4 else 1
    parts = Cutter().cut(case.args, case.kwargs or {}, case.target, count)
    with mutation.broken() if broken else contextlib.nullcontext():
        try:
            check_split(
                case.model,
                captured,
                split(captured, cuts),
                parts[0],
                Loss(case.model, case.loss_fn, None),
                second=parts[-1],
            )
        except PartitionerError as error:
            said = f"{type(error).__name__}: {error}"
            if "<locals>.broken()" in said:  # called with other arguments than it takes
                raise AssertionError(f"what was to break it is broken itself: {said}") from error
            return said
    return ""


def _first_within(places: list[str], path: str) -> str:
    return next(name for name in places if name == path or name.startswith(f"{path}."))


def broken_rank(mutation: Mutation | None, *given: Any) -> Any:
    with mutation.broken() if mutation else contextlib.nullcontext():
        return verification.on_rank(*given)


def on_ranks(pool: RankPool, mutation: Mutation, *, broken: bool) -> str:
    """What a comparison of two ranks with one device says; empty where it is content.

    An error on a rank is none of that: it would hide that nothing was broken but the mutation.
    """
    case = case_of(mutation.model)
    plan = next(plan for plan in plans(case, ({"pp": 2, "dp": 1},), [4]) if plan.schedule == "gpipe")
    given = (plan, case.model, case.inputs, case.target, case.loss_fn, None, 2, 0.01, 0)
    ranks = pool.run(2, broken_rank, mutation if broken else None, *given)
    with verification.as_it_was(case.model):
        loss = Loss(case.model, case.loss_fn, None)
        single = verification.on_one_device(plan, case.model, case.inputs, case.target, loss, Cutter(), 2, 0.01)
    found = verification.compared(plan, ranks, single, 2, ())
    return (
        ""
        if found.passed
        else f"gradient {found.gradient_error:.1e} off ({found.worst_gradient}), loss {found.loss_error:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="*", help="parts of the names of mutations")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for module in (models, sys.modules["__main__"]):
        cloudpickle.register_pickle_by_value(module)
    rows = []
    with contextlib.closing(RankPool(2)) as pool:
        for mutation in MUTATIONS:
            if options.names and not any(part in mutation.name for part in options.names):
                continue

            def check(broken: bool, mutation: Mutation = mutation) -> str:
                return (
                    on_ranks(pool, mutation, broken=broken)
                    if mutation.on_ranks
                    else self_check(mutation, broken=broken)
                )

            sound, noticed = check(False), check(True)
            by = "ranks beside one device" if mutation.on_ranks else "self-check"
            rows.append(
                {"mutation": mutation.name, "model": mutation.model, "by": by, "noticed": noticed, "sound": sound}
            )
            verdict = f"NOT SOUND UNBROKEN: {sound}" if sound else noticed or "NOT NOTICED"
            print(f"{mutation.name:50} {by:24} {' '.join(verdict.split())[:150]}", flush=True)
            if options.json:
                options.json.write_text(json.dumps({"rows": rows}, indent=1))
    caught = sum(bool(row["noticed"]) and not row["sound"] for row in rows)
    print(f"{caught} of {len(rows)} noticed")
    sys.exit(caught != len(rows))


if __name__ == "__main__":
    main()
