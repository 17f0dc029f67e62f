"""Plan GPT-2 over two ranks, train it there on real text, and put the predicted step beside the measured one.

    python examples/train_gpt2.py                                   plans, then starts the ranks itself
    torchrun --nproc-per-node 2 examples/train_gpt2.py              the same under torchrun
    python examples/train_gpt2.py --pp 2 --microbatches 4           a pipeline of two stages instead of what is fastest

The text is the reference manual that ships with Python, read as bytes, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import partitioner as pt


def make_model(layers: int = 6, width: int = 256, length: int = 128) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=length,
        n_layer=layers,
        n_embd=width,
        n_head=width // 64,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what its class name means; transformers warns where it is not said
    return model


def text_batches(num_batches: int, batch: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Random windows of the manual, one token a byte."""
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(num_batches):
        starts = torch.randint(0, len(text) - length, (batch,), generator=generator)
        ids = torch.stack([text[start : start + length] for start in starts])
        batches.append({"input_ids": ids, "labels": ids})
    return batches


def train(plan: pt.Plan, steps: int, length: int) -> list[float]:
    """What every rank runs. Returns the measured seconds of each step."""
    losses, seconds = [], []
    with pt.materialize(plan, make_model(length=length)) as stage:
        optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
        share = plan.training.batch_size // stage.dp_size
        for step, whole in enumerate(text_batches(steps, plan.training.batch_size, length)):
            mine = {name: t[stage.dp_rank * share : (stage.dp_rank + 1) * share] for name, t in whole.items()}
            loss = stage.train_step(mine)
            stage.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            seconds.append(stage.timeline().step_s)
            if stage.rank == 0 and (step % 5 == 0 or step == steps - 1):
                print(f"step {step:3}  loss {losses[-1]:.3f}  {seconds[-1] * 1e3:6.1f} ms", flush=True)
        if stage.rank == 0:
            measured = statistics.median(seconds[1:])
            print(
                f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; step predicted {plan.prediction.step_s * 1e3:.1f} ms, "
                f"measured {measured * 1e3:.1f} ms (median of {steps - 1}): "
                f"{plan.prediction.step_s / measured - 1:+.1%}"
            )
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--pp", type=int, help="pipeline stages; the rest of the ranks are replicas")
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--schedule", default="auto", choices=["auto", "gpipe", "1f1b"])
    options = parser.parse_args()

    plan = pt.partition(
        make_model(length=options.length),
        text_batches(1, options.batch, options.length)[0],
        gpus=options.gpus,
        mesh={"pp": options.pp, "dp": options.gpus // options.pp} if options.pp else "auto",
        microbatches=options.microbatches or "auto",
        schedule=options.schedule,
    )
    under_torchrun = "RANK" in os.environ
    if not under_torchrun or os.environ["RANK"] == "0":
        print(plan, flush=True)
    if under_torchrun:
        losses = train(plan, options.steps, options.length)
    else:
        losses = pt.launch(train, plan, plan, options.steps, options.length)[0]
    if not losses[-1] < losses[0]:
        sys.exit(f"the loss did not fall: {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
