"""The options of each shell command: their names, what they take, and the help that is printed."""

from __future__ import annotations

import argparse
from typing import Any

import partitioner
from partitioner import factory


def _number(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more, nor auto")
    return int(text)


def _mesh(text: str) -> dict[str, int] | str:
    if text == "auto":
        return text
    pairs = [part.split("=") for part in text.split(",")]
    if not all(len(pair) == 2 and pair[1].isdigit() for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh: write it like pp=2,dp=2")
    return {axis.strip(): int(size) for axis, size in pairs}


def _change(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise argparse.ArgumentTypeError(f"{text!r} is not a change: write it like batch_size=128,512")
    if name == "mesh":
        return name, [_mesh(values)]
    return name, [int(value) if value.isdigit() else value for value in values.split(",")]


def _run(text: str) -> dict[str, Any]:
    """A run that was measured: pp=2,dp=4,batch_size=64,microbatches=2,step_s=0.82."""
    found: dict[str, Any] = {"mesh": {}}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise argparse.ArgumentTypeError(f"{text!r} is not a run: write it like dp=8,batch_size=64,step_s=0.82")
        if name in ("tp", "pp", "dp"):
            found["mesh"][name] = int(value) if value.isdigit() else value
        elif name in ("step_s", "samples_per_s"):
            try:
                found[name] = float(value)
            except ValueError:
                raise argparse.ArgumentTypeError(f"{name}={value!r} is not a number") from None
        else:
            found[name] = int(value) if value.isdigit() else value
    return found


FACTORY: dict[str, Any] = {"metavar": "pkg.mod:factory", "help": "what makes the model and its inputs"}

TRAINING: dict[str, dict[str, Any]] = {
    "gpus": {"metavar": "N|NxNAME"},
    "batch_size": {"type": _number, "metavar": "N", "help": "samples of an optimizer step, all replicas"},
    "batch_dim": {"type": int, "metavar": "N", "help": "dimension of the inputs that counts samples"},
    "mesh": {"type": _mesh, "metavar": "pp=2,dp=2"},
    "microbatches": {"type": _number, "metavar": "N|auto", "help": "micro-batches of a replica's batch"},
    "schedule": {},
    "optimizer": {},
    "precision": {},
    "recompute": {},
    "shard": {},
    "memory_limit": {"metavar": "SIZE", "help": "of a device: 70GiB"},
}
"""Options of both `plan` and `capacity`, named as arguments of partition() and capacity()."""

PLANNING = (*TRAINING, "profile", "gradient_compression", "objective", "check", "seed")
"""Arguments of partition() that are options of `plan`, under the same names."""

CAPACITY = (
    *TRAINING,
    "accumulate",
    "measured",
    "longest_sequence",
    "sequence_dim",
    "price_per_hour",
    "most_devices",
    "hardware",
)
"""Arguments of capacity() that are options of `capacity`, under the same names."""


def parser(about: str) -> argparse.ArgumentParser:
    """For all commands; what it parses says which one in `command`. `about`: a summary, an empty line, details."""
    summary, _, details = about.partition("\n\n")
    details += "\n" + (factory.__doc__ or "").partition("\n\n")[2]
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser("partitioner", description=summary, epilog=details, formatter_class=raw)
    made.add_argument("--version", action="version", version=f"partitioner {partitioner.__version__}")
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.add_argument("--json", action="store_true", help="print JSON instead of text, also for an error")
        sub.add_argument("--debug", action="store_true", help="print the traceback of an error")
        return sub

    plan = add("plan", "choose mesh, stages, schedule and micro-batches, and predict the step")
    plan.add_argument("factory", nargs="?", **FACTORY)
    plan.add_argument("-o", "--output", metavar="FILE", help="save the plan there")
    plan.add_argument("--profile", metavar="FILE", help="plan with these costs, without measuring again")
    _training(
        plan,
        gpus="4, 8xH100 or 2x8xA100-80GB",
        mesh="pipeline stages and replicas, or auto",
        schedule="gpipe, 1f1b or auto",
        optimizer="for memory: sgd, sgd-momentum, adam or adamw",
        precision="fp32",
        recompute="never, auto or always",
        shard="over replicas: none, zero1 (the optimizer's state), zero2 (gradients, too) or auto",
    )
    plan.add_argument("--gradient-compression", help="none in this version")
    plan.add_argument("--objective", help="train, throughput or latency (the last two of inference)")
    plan.add_argument("--check", help="first or never: run the sliced model once against the whole one")
    plan.add_argument("--seed", type=int, metavar="N")

    profile = add("profile", "measure what each layer costs")
    profile.add_argument("factory", **FACTORY)
    profile.add_argument("--device", help="where to measure: cpu, cuda, cuda:1")
    profile.add_argument("--trace-dir", metavar="FOLDER", help="write a trace for TensorBoard there, layers by name")
    profile.add_argument("-o", "--output", metavar="FILE", help="save the profile there")

    capacity = add("capacity", "say whether a training fits devices that are not here, and how fast it is")
    capacity.add_argument("factory", **FACTORY)
    capacity.add_argument("-o", "--output", metavar="FILE", help="save the report there")
    _training(
        capacity,
        gpus="8xH100 or 2x8xA100-80GB",
        mesh="stages, replicas and tp, the devices that divide each layer; or auto",
        schedule="gpipe, 1f1b, interleaved, zero-bubble or auto",
        optimizer="sgd, sgd-momentum, adam, adamw or adafactor",
        precision="fp32, bf16, fp16, bf16-mixed, fp16-mixed, or auto: the model's own",
        recompute="never, selective, always or auto",
        shard="over replicas: none, zero1, zero2, zero3 or auto",
    )
    capacity.add_argument("--accumulate", help="fp32: gradients are added up in 32 bits")
    capacity.add_argument(
        "--what-if", type=_change, action="append", metavar="NAME=A,B", help="change one thing: batch_size=128,512"
    )
    capacity.add_argument(
        "--measured",
        type=_run,
        action="append",
        metavar="RUN",
        help="a step of this training that was measured on such devices: dp=8,batch_size=64,microbatches=2,step_s=0.82",
    )
    capacity.add_argument("--no-curve", action="store_true", help="leave out smaller numbers of devices")
    capacity.add_argument("--longest-sequence", action="store_true", default=None, help="search it too")
    capacity.add_argument("--sequence-dim", type=int, metavar="N", help="dimension of the inputs that is their length")
    capacity.add_argument("--price-per-hour", type=float, metavar="PRICE", help="of one device")
    capacity.add_argument("--most-devices", type=int, metavar="N", help="where the search for the fewest ends")
    capacity.add_argument("--hardware", metavar="FILE", help="TOML file of your own devices")

    show = add("show", "print a saved plan, profile or capacity report")
    show.add_argument("file", metavar="FILE")
    show.add_argument("--timeline", action="store_true", help="what each rank of the plan does when, simulated")

    compare = add("compare", "put saved plans side by side")
    compare.add_argument("plans", nargs="+", metavar="PLAN", help="saved plans; each is compared with the first")

    report = add("report", "write a plan as one self-contained web page")
    trace = add("trace", "write a plan's step as a Chrome trace, for ui.perfetto.dev")
    for made_from, example in ((report, "plan.html"), (trace, "trace.json")):
        made_from.add_argument("plan", metavar="PLAN", help="a saved plan")
        made_from.add_argument("-o", "--output", required=True, metavar="FILE", help=f"where to write it: {example}")
        made_from.add_argument(
            "--measured",
            metavar="FILE",
            help="a measured step to show beside it, from plan.save_trace(..., measured=...)",
        )

    verify = add("verify", "run a plan's ranks beside one device and compare numbers and times")
    verify.add_argument("plan", metavar="PLAN", help="a saved plan")
    verify.add_argument("factory", **FACTORY)

    doctor = add("doctor", "say what is installed and what works")
    doctor.add_argument("--quick", action="store_true", help="start no processes")
    return made


def _training(sub: argparse.ArgumentParser, **helps: str) -> None:
    """The options of TRAINING, with the helps that differ between commands."""
    for name, settings in TRAINING.items():
        flags = [f"--{name.replace('_', '-')}", *(["--batch"] if name == "batch_size" else [])]
        told: dict[str, Any] = {"help": helps[name]} if name in helps else {}
        sub.add_argument(*flags, dest=name, **told, **settings)
