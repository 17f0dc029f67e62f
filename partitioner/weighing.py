"""How the losses of a plan's micro-batches make that of the batch: found on the example batch, and kept in the plan.

compare         the loss of the batch beside that of its parts: a rule for all of it
compare_uneven  the same where the parts hold other numbers of what counts: labels, a mask's, weights
compare_terms   where no rule is for all of it: a rule for each of the terms that it adds up
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from partitioner.capture import copied
from partitioner.errors import ArgumentError, UnsupportedModelError
from partitioner.losses import Loss
from partitioner.microbatches import Cutter, MicroBatch
from partitioner.plan import Plan
from partitioner.restore import untouched
from partitioner.selfcheck import check_split, in_stages
from partitioner.solver.writing import AT_FIRST
from partitioner.specs import LossRule
from partitioner.structures import map_tensors
from partitioner.uneven import PADDING, Uneven, named, uneven
from partitioner.whole_batch import by_rule, compare, compare_terms, compare_uneven, ignorable_in, uneven_in


def weighted(
    plan: Plan,
    model: nn.Module,
    batch: MicroBatch,
    inputs: Any,
    loss: Loss,
    seed: int,
    notes: list[str],
    warned: list[str],
) -> Plan:
    """The plan with the rule by which its micro-batches' losses make that of the batch; warned where none does."""
    rule = loss.rule()
    count = plan.num_microbatches * plan.num_replicas
    at_first = [why for why in plan.why if why.startswith(AT_FIRST)]
    cutter = Cutter(plan.training.batch_dim, whole=plan.training.whole)
    with untouched(model, loss.keeps):
        if count > 1 and at_first:
            with torch.no_grad():
                model(*map_tensors(batch.args, copied), **map_tensors(batch.kwargs, copied))
        found = made = refused = tried = terms = None
        if count > 1 and rule is None:
            tried = uneven(model, batch, cutter, count, ignorable_in(model, batch, cutter, count, loss))
        try:
            paddings = PADDING if tried is None else tried.paddings
            found = compare(model, batch, inputs, cutter, count, loss, paddings) if count > 1 else None
            if found is not None and tried is not None and (found.holds or found.how is not None):
                by = loss if found.how is None else by_rule(found.how, model, loss)
                made = compare_uneven(model, batch, tried, inputs, cutter, count, by)
        except ArgumentError as error:  # the example's labels already count differently
            refused = error
        if found is None and refused is None and count > 1:
            _run_each(model, batch, cutter, count)
        is_untold = refused is not None or any(not one.holds and one.how is None for one in (found, made) if one)
        if is_untold and tried is not None:
            terms = _in_terms(plan, model, batch, tried, cutter, count, loss, seed, notes)
        if refused is not None and terms is None:
            raise refused
        moved = uneven_in(model, tried, inputs, cutter, count, loss) if made and tried and made.how is None else []
    how = made.how if made is not None and made.how is not None else found.how if found is not None else None
    told = {"sum": "a sum over the batch", "samples": "a mean over samples"}.get(str(how), f"a mean over {how}")
    if found is not None and not found.holds:
        parts = f"its {found.num_parts} micro-batches make {found.parts:.6g}"
        numbers = f"the loss of the batch is {found.whole:.6g}, and {parts}"
    if terms is not None:
        rule = terms
    elif found is not None and not found.holds and how is None:
        accepted = rule is not None and rule.how == "samples"
        text = (
            f"{numbers}: it compares samples with each other, is a mean over what is not in the batch, or is of an "
            "argument that has as many rows as the batch has samples but holds something else. Say what a "
            "micro-batch counts for (loss_weight=lambda inputs, target: ...), leave the batch whole "
            "(microbatches=1, mesh={'dp': 1}), or take it as accumulated gradients do (loss_weight='samples')"
        )
        (notes if accepted else warned).append(f"{numbers}, as loss_weight='samples' asks" if accepted else text)
    elif found is not None and not found.holds and rule is not None:
        warned.append(f"{numbers} under loss_weight; it is {told}, which is found without loss_weight")
    elif found is not None and how is not None:
        rule = LossRule(loss=loss.name, how=how)
        passed = (
            "the example's micro-batches hold as much of everything; where they do not, the loss"
            if found.holds
            else f"{numbers} as a mean over samples or labels; it"
        )
        notes.append(f"{passed} is {told}, and counted as that")
    if terms is None and made is not None and made.how is None:
        stops = ", and train_step refuses the first such batch" if len(loss.labels(batch)) > 1 else ""
        what = ", ".join(map(named, moved)) or "its tensors"
        warned.append(
            f"the loss is {told if how is not None else 'a mean over samples or labels'} in the example, whose "
            f"micro-batches hold as much of everything; with other numbers of what counts in {what} it is "
            f"none of what the batch tells (tried: {made.whole:.6g} at once, {made.parts:.6g} in {made.num_parts}), so "
            f"of such a batch no weights of its micro-batches are exact{stops}. Say what a micro-batch counts for "
            "(loss_weight=lambda inputs, target: ...), return a loss that is a sum (loss_weight='sum'), leave the "
            "batch whole (microbatches=1, mesh={'dp': 1}), or take the mean over samples as accumulated gradients do "
            "(loss_weight='samples')"
        )
    notes += warned
    warned += at_first if count > 1 else []
    return plan.model_copy(update={"training": plan.training.model_copy(update={"loss_rule": rule})})


def _run_each(model: nn.Module, batch: MicroBatch, cutter: Cutter, count: int) -> None:
    """Run each micro-batch alone, where no losses were compared: the first one may run where the others do not."""
    for part in cutter.cut(batch.args, batch.kwargs, batch.target, count):
        args, kwargs = map_tensors((part.args, part.kwargs), copied)
        with contextlib.suppress(torch.OutOfMemoryError), torch.enable_grad():
            model(*args, **kwargs)


def _in_terms(
    plan: Plan,
    model: nn.Module,
    batch: MicroBatch,
    tried: Uneven,
    cutter: Cutter,
    count: int,
    loss: Loss,
    seed: int,
    notes: list[str],
) -> LossRule | None:
    """The rule of a loss that adds up terms, each a mean over something of its own, which the plan's stages keep to."""
    terms = compare_terms(model, batch, tried, cutter, count, loss)
    if not terms:
        return None
    rule = LossRule(loss=loss.name, how="terms", terms=terms)
    names = {"sum": "a sum", "samples": "a mean over samples"}
    told = "; ".join(names.get(str(how), f"a mean over {how}") for how in terms)
    if plan.num_stages > 1:
        forward = in_stages(model, plan.profile, plan.stage_of(), loss)
        received = compare_terms(model, batch, tried, cutter, count, loss, forward)
        if received != terms:
            rule = rule.model_copy(update={"received": received})
        by_terms = Loss(model, loss.function, None, rule)
        by_terms.beside = loss.beside
        part = cutter.cut(batch.args, batch.kwargs, batch.target, count)[0]
        try:
            check_split(model, plan.profile, plan.stage_of(), part, by_terms, seed=seed)
        except (ArgumentError, UnsupportedModelError) as error:
            notes.append(f"the loss adds up {len(terms)} terms ({told}), which the last stage does not have: {error}")
            return None
    notes.append(
        f"the loss adds up {len(terms)} terms, and each micro-batch's is weighted term by term, to make that of the "
        f"batch: {told}"
    )
    return rule
