"""Cases of models and numbers: the ranks' losses and gradients are held against one device's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from case_runs import Ask, copies_are_equal, gradients_agree, joined, on_one_device, plan_for, squared, summed, train
from casebook import Case, Finding, Ranks, at_most, run_snippet, same, true

import partitioner as pt


def residual_block_is_not_torn(case: Case, ranks: Ranks) -> Iterator[Finding]:
    def ask(space: dict[str, Any]) -> Ask:
        return Ask(space["inputs"], loss_fn=squared, afterwards=space["inputs"])

    plan = plan_for(case, ask, pp=2, microbatches=1)
    cut = plan.stages[1].layers[0]
    carried, inside = case.ref["cut_between_blocks_bytes"], case.ref["cut_inside_block_bytes"]
    with_residual = {"up": 2 * carried, "down": inside}
    right = with_residual.get(cut.rpartition(".")[2], carried)
    yield same(f"bytes sent at the cut before {cut}", plan.prediction.stages[0].send_bytes, right)
    blocks = [len({layer.split(".")[0] for layer in stage.layers}) for stage in plan.stages]
    yield true(f"blocks of each stage {blocks}", right != carried or blocks in case.ref["legal_block_splits"])
    graph = pt.CostGraph.from_profile(plan.profile)
    for layer in ("1.up", "1.down"):
        if layer in graph.position:
            crossing = round(graph.crossing(graph.position[layer], plan.microbatch_samples))
            yield same(f"bytes charged for a cut before {layer}", crossing, with_residual[layer[2:]])
    seen = train(ranks, case, plan, lambda space: ask(space)._replace(learning_rate=0.0))
    yield same("output", round(seen[1].evaluated.sum().item(), 4), case.ref["output_sum"], 1e-3)
    yield gradients_agree(seen, on_one_device(case, ask))


def arguments_that_are_not_tensors(case: Case, ranks: Ranks) -> Iterator[Finding]:
    def ask(space: dict[str, Any]) -> Ask:
        named = inspect.signature(space["model"].forward).bind(*space["inputs"], **space["kwargs"]).arguments
        afterwards = {"x": space["inputs"][0], "skip_head": True}
        return Ask(dict(named), loss_fn=summed, loss_weight="sum", afterwards=afterwards)

    plan = plan_for(case, ask, pp=2, microbatches=case.request["microbatches"])
    yield same("stages", plan.num_stages, case.request["gpus"])
    seen = train(ranks, case, plan, ask)
    yield same("shape with head", list(seen[1].output.shape), case.ref["shape_with_head"])
    yield same("shape without", list(seen[1].evaluated.shape), case.ref["shape_without"])
    gradients = joined(seen, "gradients")
    total = round(sum(gradient.abs().sum().item() for gradient in gradients.values()), 3)
    yield same("sum of gradients", total, case.ref["grad_sum"])
    yield gradients_agree(seen, on_one_device(case, ask))


def module_called_twice(case: Case, ranks: Ranks) -> Iterator[Finding]:
    def ask(space: dict[str, Any]) -> Ask:
        return Ask(space["inputs"], loss_fn=squared, steps=3)

    pin = {"norm": 0, "norm#1": 1}
    plan = plan_for(case, ask, pp=2, microbatches=case.request["microbatches"], pin=pin)
    calls = [layer.id for layer in plan.profile.layers if layer.id.partition("#")[0] == "norm"]
    yield same("calls of norm in the profile", len(calls), case.ref["calls_of_norm"])
    yield same("parameters", sum(math.prod(p.shape) for p in plan.profile.parameters), case.ref["params"])
    yield same("stages of the two calls", [plan.stage_of()[call] for call in calls], [0, 1])
    seen = train(ranks, case, plan, ask)
    gradient = joined(seen, "gradients")["norm.weight"]
    yield same("gradient of norm", [round(v, 4) for v in gradient[:3].tolist()], case.ref["norm_weight_grad"])
    yield gradients_agree(seen, on_one_device(case, ask))
    yield from copies_are_equal(seen, "norm.weight", 2)


def batch_in_another_dimension(case: Case, ranks: Ranks) -> Iterator[Finding]:
    def ask(space: dict[str, Any]) -> Ask:
        return Ask(space["inputs"], space["target"], space["loss_fn"])

    asked = case.request
    plan = plan_for(case, ask, pp=2, microbatches=asked["microbatches"], batch_dim=asked["batch_dim"])
    yield same("samples of a micro-batch", plan.microbatch_samples, case.inputs[0].shape[1] // asked["microbatches"])
    seen = train(ranks, case, plan, ask)
    yield same("loss", [one.losses[0] for one in seen], [case.ref["loss"]] * 2)
    yield gradients_agree(seen, on_one_device(case, ask))
    right = case.model(*case.inputs).detach()
    yield at_most("difference of the output", float((seen[1].output - right).abs().max()), 1e-5)


def hugging_face_model(case: Case, ranks: Ranks) -> Iterator[Finding]:
    def ask(space: dict[str, Any]) -> Ask:
        return Ask(space["kwargs"])

    plan = plan_for(case, ask, pp=2, microbatches=case.request["microbatches"])
    tied = [parameter.names for parameter in plan.profile.parameters if len(parameter.names) > 1]
    yield same("tied", tied == [("transformer.wte.weight", "lm_head.weight")], case.ref["tied"])
    yield same("parameters", sum(math.prod(p.shape) for p in plan.profile.parameters), case.ref["params"])
    seen = train(ranks, case, plan, ask)
    yield same("loss", [one.losses[0] for one in seen], [case.ref["loss"]] * 2)
    output = seen[1].output
    yield same("the result's loss", float(output.loss), case.ref["loss"])
    yield same("shape of the result's logits", list(output.logits.shape), case.ref["logits"])
    norm = joined(seen, "gradients")["transformer.wte.weight"].norm().item()
    yield same("gradient norm of the tied weight", norm, case.ref["wte_grad_norm"])
    yield gradients_agree(seen, on_one_device(case, ask))


def unequal_valid_tokens(case: Case, ranks: Ranks) -> Iterator[Finding]:
    def ask(space: dict[str, Any]) -> Ask:
        return Ask(space["inputs"], space["target"], space["loss_fn"])

    plan = plan_for(case, ask, pp=2, microbatches=case.request["microbatches"])
    seen = train(ranks, case, plan, ask)
    yield same("loss", [one.losses[0] for one in seen], [case.ref["true_loss"]] * 2, 1e-5)
    yield same("gradient norm", joined(seen, "gradients")["1.weight"].norm().item(), case.ref["grad_norm"])
    yield gradients_agree(seen, on_one_device(case, ask))


def recomputation_repeats_dropout(case: Case, ranks: Ranks) -> Iterator[Finding]:
    def ask(space: dict[str, Any]) -> Ask:
        return Ask(space["inputs"], loss_fn=summed)

    def tracked(snippet: str, plan: pt.Plan) -> tuple[dict[str, torch.Tensor], list[int]]:
        space = run_snippet(snippet)
        torch.manual_seed(7)
        with pt.materialize(plan, space["model"], loss_fn=summed) as stage:
            stage.train_step(space["inputs"])
            grads = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
            counts = [value.item() for key, value in stage.state_dict().items() if key.endswith("tracked")]
            return grads, counts

    plans = [plan_for(case, ask, pp=2, microbatches=1, recompute=how) for how in ("always", "never")]
    again, plain = (ranks.run(2, tracked, case.snippet, plan) for plan in plans)
    for (without, _), (with_it, counts) in zip(plain, again, strict=True):
        agree = all(torch.allclose(without[name], with_it[name], atol=1e-6) for name in without)
        yield same("gradients with recompute", agree, case.ref["rng_kept_matches"])
        yield same("batches tracked", set(counts), {case.ref["tracked_plain"]})


def tied_weights_on_two_stages(case: Case, ranks: Ranks) -> Iterator[Finding]:
    steps = case.request["steps"]

    def ask(space: dict[str, Any]) -> Ask:
        return Ask(space["inputs"], space["target"], space["loss_fn"], steps=steps, learning_rate=0.5)

    pin = {"a": 0, **dict.fromkeys(case.request["cuts"], 1)}
    plan = plan_for(case, ask, pp=2, microbatches=case.request["microbatches"], pin=pin, optimizer="sgd")
    seen = train(ranks, case, plan, ask)
    yield same("loss of the last step", [one.losses[-1] for one in seen], [case.ref["loss_step3"]] * 2, 1e-5)
    yield from copies_are_equal(seen, "emb.weight", 2)
    weight = joined(seen, "weights")["emb.weight"]
    yield same("sum of the tied weight", weight.sum().item(), case.ref["emb_sum_after"], 1e-4)
    yield same("its norm", weight.norm().item(), case.ref["emb_norm_after"], 1e-5)


def replicas_of_a_pipeline(case: Case, ranks: Ranks) -> Iterator[Finding]:
    asked = case.request

    def ask(space: dict[str, Any]) -> Ask:
        return Ask(space["inputs"], space["target"], space["loss_fn"], steps=asked["steps"])

    mesh = {"pp": asked["stages"], "dp": asked["replicas"]}
    plan = plan_for(case, ask, **mesh, microbatches=asked["microbatches"], optimizer="sgd", shard="none")
    seen = train(ranks, case, plan, ask)
    yield same("loss of the last step", [one.losses[-1] for one in seen], [case.ref["loss_step2"]] * 4, 1e-5)
    weights = joined(seen, "weights")
    norms = {name: round(weights[name].norm().item(), 6) for name in case.ref["weights_after"]}
    yield same("weights, the same bits on replicas", norms, case.ref["weights_after"], 1e-5)
    often = case.ref["gradient_reductions_per_step_and_parameter"]
    yield same("reductions of each step", [one.reduced for one in seen], [[often] * asked["steps"]] * 4)


ANSWERS = {
    "PL-14": residual_block_is_not_torn,
    "EX-02": arguments_that_are_not_tensors,
    "EX-05": module_called_twice,
    "EX-08": batch_in_another_dimension,
    "EX-11": hugging_face_model,
    "NU-02": unequal_valid_tokens,
    "NU-05": recomputation_repeats_dropout,
    "NU-08": tied_weights_on_two_stages,
    "NU-11": replicas_of_a_pipeline,
}
