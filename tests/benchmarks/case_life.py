"""Cases of a model's life under a plan: its names, files, hooks and optimizers, and runs that are interrupted."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from case_runs import Ask, gradients_agree, on_one_device, plan_for, squared, summed, train, training_script
from casebook import Case, Finding, Ranks, at_most, refusal, run_snippet, same, says, true
from torch import nn

import partitioner as pt


def names_stay(case: Case, ranks: Ranks) -> Iterator[Finding]:
    def ask(space: dict[str, Any]) -> Ask:
        return Ask(space["inputs"], loss_fn=squared, learning_rate=0.0, afterwards=space["inputs"])

    def whole(snippet: str, plan: pt.Plan) -> Any:
        with pt.materialize(plan, run_snippet(snippet)["model"], loss_fn=squared) as stage:
            return stage.full_state_dict()

    plan = plan_for(case, ask, pp=case.request["gpus"], microbatches=2)
    seen = train(ranks, case, plan, ask)
    yield same("output", round(seen[2].evaluated.sum().item(), 4), case.ref["output_sum"])
    yield gradients_agree(seen, on_one_device(case, ask))
    state = ranks.run(3, whole, case.snippet, plan)[0]
    yield same("keys in order", list(state), case.ref["keys"])
    fresh = case.space["Net"]()
    yield same(
        "loaded into a fresh model", str(fresh.load_state_dict(state, strict=True)), "<All keys matched successfully>"
    )
    yield same("its output", round(fresh(*case.inputs).sum().item(), 4), case.ref["output_sum"])


def interrupted_runs_leave_nothing(case: Case, ranks: Ranks) -> Iterator[Finding]:
    patience = case.ref["children_after_s"]
    for what, number in (("run", signal.SIGINT), ("run", signal.SIGTERM), ("profile", signal.SIGINT)):
        name = f"{what} ended by {signal.Signals(number).name}"
        code = f"import case_life; case_life.be_interrupted({what!r}, {case.snippet!r})"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        caller = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert caller.stdout is not None
        begun = any("under way" in line for line in iter(caller.stdout.readline, ""))
        yield true(f"{name}: it ran", begun)
        time.sleep(1.0)
        family = psutil.Process(caller.pid).children(recursive=True)
        yield same(f"{name}: processes besides the caller", len(family) > 0, what == "run")
        caller.send_signal(number)
        start = time.monotonic()
        try:
            zero = caller.wait(patience) == 0
        except subprocess.TimeoutExpired:
            caller.kill()
            zero = True
        _, alive = psutil.wait_procs(family, max(0.0, patience - (time.monotonic() - start)))
        yield same(f"{name}: exit code is zero", zero, case.ref["exit_code_is_zero"])
        yield same(f"{name}: processes left", len(alive), case.ref["children"])
        for process in alive:
            process.kill()
        caller.stdout.close()
    yield same("a new run", pt.launch(_rank_of_launched, 2), [0, 1])


def _rank_of_launched() -> int:
    return int(os.environ["RANK"])


def be_interrupted(what: str, snippet: str) -> None:
    """Plan and train the slow model; says when it is at work, and never ends by itself in time."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    space = run_snippet(snippet)
    model, inputs = space["model"], space["inputs"]

    def slow_down(model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "delay"):
                module.delay = 1.0

    def run(snippet: str, plan: pt.Plan) -> None:
        space = run_snippet(snippet)
        slow_down(space["model"])
        with pt.materialize(plan, space["model"], loss_fn=squared) as stage:
            for _ in range(100):
                if stage.rank == 0:
                    print("under way", flush=True)
                stage.train_step(space["inputs"])

    if what == "profile":
        slow_down(model)
        print("under way", flush=True)
    asked = space["REQUEST"]
    mesh = {"pp": 2, "dp": 1}
    plan = pt.partition(
        model, inputs, gpus=asked["gpus"], mesh=mesh, microbatches=asked["microbatches"], loss_fn=squared
    )
    pt.launch(run, plan, snippet, plan)


def every_stage_is_trained(case: Case, ranks: Ranks) -> Iterator[Finding]:
    asked, right = case.request, case.ref["distance_moved"]
    mean_squares = nn.functional.mse_loss

    def trained(snippet: str, plan: pt.Plan, path: str) -> dict[str, float]:
        space = training_script(snippet)
        with pt.materialize(plan, space["model"], loss_fn=mean_squares) as stage:
            optimizer = torch.optim.SGD(stage.parameters(), 0.1)
            for _ in range(asked["steps"]):
                stage.train_step(space["inputs"], space["target"])
                optimizer.step()
                optimizer.zero_grad()
            stage.save_checkpoint(path, optimizer)
            own = dict(stage.named_parameters())
        return {
            name: (parameter - space["start"][name]).norm().item()
            for name, parameter in space["model"].named_parameters()
            if name in own
        }

    def ask(space: dict[str, Any]) -> Ask:
        return Ask(space["inputs"], space["target"], mean_squares)

    plan = plan_for(case, ask, pp=asked["gpus"], microbatches=asked["microbatches"], optimizer="sgd")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "checkpoint")
        parts = ranks.run(asked["gpus"], trained, case.snippet, plan, path)
        loaded = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _PLAIN_LOAD, path],
            input=case.snippet,
            capture_output=True,
            text=True,
            check=True,
        )
    yield same("moved, loaded by plain torch in a new process", json.loads(loaded.stdout), right, 1e-3)
    shown = {name: distance for part in parts for name, distance in part.items()}
    yield same(
        "moved, as the caller's model shows on its ranks", {name: shown.get(name) for name in right}, right, 1e-3
    )


_PLAIN_LOAD = """
import json, sys, torch
from torch.distributed import checkpoint
space = {}
exec(sys.stdin.read(), space)
state = {"model": space["model"].state_dict()}
checkpoint.load(state, checkpoint_id=sys.argv[1])
print(json.dumps({key: (value - space["start"][key]).norm().item() for key, value in state["model"].items()}))
"""


def model_without_memory(case: Case, ranks: Ranks) -> Iterator[Finding]:
    plan = pt.partition(
        case.model, case.inputs, gpus=case.request["gpus"], mesh={"pp": 2, "dp": 1}, microbatches=1, loss_fn=summed
    )
    metas = sum(parameter.is_meta for parameter in case.model.parameters())
    yield same("parameters on meta after planning", metas, case.ref["meta_params"])

    def loaded(snippet: str, plan: pt.Plan, with_weights: bool) -> tuple[Any, ...]:
        space = run_snippet(snippet)
        weights = space["weights"] if with_weights else None
        with pt.materialize(plan, space["model"], loss_fn=summed, weights=weights) as stage:
            output = stage.eval_step((space["x"],))
            tensors = [*stage.module.parameters(), *stage.module.buffers()]
            here = {layer.split(".")[0] for layer in plan.stages[stage.stage].layers}
            buffers = [(name, b) for name, b in stage.module.named_buffers() if name.endswith("count")]
            counts = [b.item() for name, b in buffers if name.split(".")[0] in here]
            storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in stage.module.parameters()}
            own = sum(p.numel() * p.element_size() for _, p in stage.named_parameters() if p.requires_grad)
            return output, sum(tensor.is_meta for tensor in tensors), counts, own, sum(storages.values())

    seen = ranks.run(2, loaded, case.snippet, plan, True)
    yield same("output", round(seen[1][0].sum().item(), 4), case.ref["output_sum"])
    yield same("counts, where their layers are", [c for one in seen for c in one[2]], [3.0] * case.ref["real_buffers"])
    for rank, (_, left, _, own, held) in enumerate(seen):
        yield same(f"rank {rank}: meta tensors left", left, 0)
        share = case.ref["bytes_per_stage"]
        blocks = len({name.split(".")[0] for name in plan.stages[rank].layers})
        yield same(f"rank {rank}: bytes of its {blocks} blocks", own, share * blocks // 2)
        yield at_most(f"rank {rank}: bytes held for parameters", held, own + 4 * case.ref["meta_params"])

    def bare(snippet: str, plan: pt.Plan) -> str:
        return refusal(lambda: loaded(snippet, plan, False))

    for told in ranks.run(2, bare, case.snippet, plan):
        yield says("without weights", told, ".l.weight", "meta", "weights=")


def optimizer_made_before(case: Case, ranks: Ranks) -> Iterator[Finding]:
    def ask(space: dict[str, Any]) -> Ask:
        return Ask(space["inputs"], space["target"], nn.functional.mse_loss)

    plan = plan_for(case, ask, pp=2, microbatches=case.request["microbatches"], optimizer="sgd")
    copied = copy.deepcopy(case.model)
    yield true("a copy after planning runs", torch.equal(copied(*case.inputs), case.model(*case.inputs)))

    def too_early(snippet: str, plan: pt.Plan) -> str:
        space = run_snippet(snippet)
        return refusal(lambda: pt.materialize(plan, space["model"], loss_fn=nn.functional.mse_loss).close())

    def later(snippet: str, plan: pt.Plan) -> tuple[int, list[int], dict[str, torch.Tensor]]:
        space = training_script(snippet)
        with pt.materialize(plan, space["model"], loss_fn=nn.functional.mse_loss) as stage:
            rates = {name: 0.0 if name.startswith("0.") else 0.1 for name, _ in stage.named_parameters()}
            groups = [{"params": [p], "lr": rates[name]} for name, p in stage.named_parameters()]
            optimizer = torch.optim.SGD(groups)
            stage.train_step(space["inputs"], space["target"])
            optimizer.step()
            return stage.stage, list(space["hits"]), {n: p.detach().clone() for n, p in stage.named_parameters()}

    for told in ranks.run(2, too_early, case.snippet, plan):
        yield says("an optimizer made before", told, "stage.parameters()", "SGD")
    seen = ranks.run(2, later, case.snippet, plan)
    here = plan.stage_of()["1"]
    for stage, hits, weights in seen:
        if stage == here:
            yield same("calls of the hook where its layer runs", len(hits), case.ref["hook_calls"])
            yield same("rows that it saw", sum(hits), case.ref["hook_rows"])
        else:
            yield same("calls of the hook elsewhere", len(hits), 0)
        if "0.weight" in weights:
            moves = not torch.equal(weights["0.weight"], case.model[0].weight)  # type: ignore[index]
            yield same("layer 0 moves", moves, case.ref["layer0_moves"])
        if "2.weight" in weights:
            after = [round(value, 5) for value in weights["2.weight"].flatten().tolist()]
            yield same("layer 2 afterwards", after, case.ref["layer2_after"])


ANSWERS = {
    "UX-02": names_stay,
    "RO-02": interrupted_runs_leave_nothing,
    "RO-05": every_stage_is_trained,
    "RO-08": model_without_memory,
    "RO-11": optimizer_made_before,
}
