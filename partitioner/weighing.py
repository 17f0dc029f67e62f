"""How the losses of a plan's micro-batches make that of the batch: found on the example batch, and kept in the plan.

compare         the loss of the batch beside that of its parts: a rule for all of it
compare_uneven  the same where the parts hold other numbers of valid labels
compare_terms   where no rule is for all of it: a rule for each of the terms that it adds up
"""

from __future__ import annotations

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
from partitioner.whole_batch import compare, compare_terms, compare_uneven


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
        found = uneven = refused = None
        try:
            found = compare(model, batch, inputs, cutter, count, loss) if count > 1 else None
            if found is not None and found.holds and rule is None:
                uneven = compare_uneven(model, batch, inputs, cutter, count, loss)
        except ArgumentError as error:  # the example's labels already count differently
            refused = error
        compared = [one for one in (found, uneven) if one is not None]
        is_untold = refused is not None or any(not one.holds and one.how is None for one in compared)
        terms = _in_terms(plan, model, batch, cutter, count, loss, seed, notes) if is_untold and rule is None else None
        if refused is not None and terms is None:
            raise refused
    if terms is not None:
        rule = terms
    elif found is not None and not found.holds:
        parts = f"its {found.num_parts} micro-batches make {found.parts:.6g}"
        numbers = f"the loss of the batch is {found.whole:.6g}, and {parts}"
        if found.how is not None:
            told = {"sum": "a sum over the batch", "samples": "a mean over samples"}.get(
                str(found.how), f"a mean over {found.how}"
            )
            if rule is None:
                rule = LossRule(loss=loss.name, how=found.how)
                notes.append(f"{numbers} as a mean over samples or labels; it is {told}, and counted as that")
            else:
                warned.append(f"{numbers} under loss_weight; it is {told}, which is found without loss_weight")
        else:
            accepted = rule is not None and rule.how == "samples"
            text = (
                f"{numbers}: it compares samples with each other, is a mean over what is not in the batch, or is of an "
                "argument that has as many rows as the batch has samples but holds something else. Say what a "
                "micro-batch counts for (loss_weight=lambda inputs, target: ...), leave the batch whole "
                "(microbatches=1, mesh={'dp': 1}), or take it as accumulated gradients do (loss_weight='samples')"
            )
            (notes if accepted else warned).append(f"{numbers}, as loss_weight='samples' asks" if accepted else text)
        notes += warned
    elif rule is None:
        if uneven is not None and (uneven.holds or uneven.how is not None):
            how = "samples" if uneven.how is None else uneven.how
            rule = LossRule(loss=loss.name, how=how)
            told = how if isinstance(how, str) else f"valid labels, {how}"
            notes.append(
                f"labels of several kinds may count differently in a micro-batch: the loss is a mean over {told}"
            )
        elif uneven is not None:
            labels = loss.labels(batch)
            stops = ", and train_step refuses the first such batch" if len(labels) > 1 else ""
            text = (
                f"the loss adds up terms that are no means over what is told by the batch, beside valid labels "
                f"({', '.join(labels)}): of a batch whose micro-batches have different numbers of these no weights of "
                f"each are exact (tried: {uneven.whole:.6g} at once, {uneven.parts:.6g} in {uneven.num_parts})"
                f"{stops}. Take the mean over samples as accumulated gradients do (loss_weight='samples'), say "
                "what a micro-batch counts for (loss_weight=lambda inputs, target: ...), return a loss that is a sum "
                "(loss_weight='sum'), or leave the batch whole (microbatches=1, mesh={'dp': 1})"
            )
            warned.append(text)
            notes.append(text)
    warned += at_first if count > 1 else []
    return plan.model_copy(update={"training": plan.training.model_copy(update={"loss_rule": rule})})


def _in_terms(
    plan: Plan,
    model: nn.Module,
    batch: MicroBatch,
    cutter: Cutter,
    count: int,
    loss: Loss,
    seed: int,
    notes: list[str],
) -> LossRule | None:
    """The rule of a loss that adds up terms, each a mean over something of its own, which the plan's stages keep to."""
    terms = compare_terms(model, batch, cutter, count, loss)
    if not terms:
        return None
    rule = LossRule(loss=loss.name, how="terms", terms=terms)
    names = {"sum": "a sum", "samples": "a mean over samples"}
    told = "; ".join(names.get(str(how), f"a mean over {how}") for how in terms)
    if plan.num_stages > 1:
        forward = in_stages(model, plan.profile, plan.stage_of(), loss)
        received = compare_terms(model, batch, cutter, count, loss, forward)
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
