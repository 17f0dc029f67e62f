"""The package from a shell: results on stdout, progress and errors on stderr, an exit code for each kind of failure.

    partitioner plan pkg.mod:factory --gpus 4 -o plan.json
    partitioner plan --profile profile.json --gpus 8xH100 --batch-size 64
    partitioner profile pkg.mod:factory -o profile.json
    partitioner capacity pkg.mod:factory --gpus 8xH100 --batch 256
    partitioner show plan.json --timeline
    partitioner compare plan.json other.json
    partitioner report plan.json -o plan.html
    partitioner trace plan.json -o trace.json
    partitioner verify plan.json pkg.mod:factory
    partitioner doctor

What `pkg.mod:factory` may be and return is told in `factory.py`, and by --help. Options on the command line win over
what it returns.

Exit codes: 0 done, 1 the ranks gave other numbers than one device, 2 usage, 3 no plan fits, 4 the model is not
supported, 5 something is missing on this machine or a rank failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from partitioner.errors import ArgumentError, InfeasibleError, PartitionerError, SetupError
from partitioner.factory import arguments_from, fault_of_model
from partitioner.options import CAPACITY, PLANNING, parser
from partitioner.profiles import check_writable


class Outcome(NamedTuple):
    """What a command leaves: the result to show, and the exit code."""

    result: Any
    exit_code: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; what it returns is the exit code of the process."""
    options = parser(__doc__ or "").parse_args(argv)
    command = COMMANDS[options.command]
    try:
        if getattr(options, "output", None) is not None:
            check_writable(options.output)  # before the work whose result is to go there
        with _stdout_for_results_only():
            outcome = command(options)
        return _print(_json(outcome.result) if options.json else _text(outcome.result), outcome.exit_code)
    except PartitionerError as error:
        return _fail(error, options, error.exit_code)
    except ModuleNotFoundError as error:
        package = (error.name or "partitioner").partition(".")[0]
        if package == "partitioner":
            raise
        return _fail(SetupError(f"the package {package} is missing: pip install {package}"), options, 5)
    except KeyboardInterrupt:
        return _fail(KeyboardInterrupt("interrupted"), options, 130)
    except Exception as error:
        at = fault_of_model(error)
        if at is None:
            raise  # ours: the traceback is what a report of the fault needs
        told = ArgumentError(f"the model or its loss raised {type(error).__name__}: {error}{at}")
        told.__cause__ = error
        return _fail(told, options, ArgumentError.exit_code)


def _plan(options: argparse.Namespace) -> Outcome:
    plan = _plan_of_model(options) if options.factory else _plan_of_profile(options)
    _save(plan, options.output)
    return Outcome(plan)


def _plan_of_model(options: argparse.Namespace) -> Any:
    given = _given(options, PLANNING)
    from partitioner.arguments import check_arguments

    check_arguments(**given)  # before the model is built, which may take long
    arguments = arguments_from(options.factory) | given
    if "gpus" not in arguments:
        raise ArgumentError("say which devices to plan for: --gpus 4 or --gpus 8xH100")
    from partitioner.api import partition

    unknown = arguments.keys() - inspect.signature(partition).parameters.keys()
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ArgumentError(f"{options.factory} returned {names}: partition() has no such argument")
    return partition(**arguments)


def _plan_of_profile(options: argparse.Namespace) -> Any:
    if options.profile is None:
        raise ArgumentError("say what to plan: pkg.mod:factory, or --profile profile.json")
    if options.gpus is None or options.batch_size is None:
        raise ArgumentError("a plan from a profile alone needs --gpus, like 8xH100, and --batch-size")
    if options.gpus.isdigit():
        raise ArgumentError(f"--gpus {options.gpus} counts this machine's devices: name them, like {options.gpus}xH100")
    from partitioner.arguments import check_arguments
    from partitioner.profiles import Profile
    from partitioner.solver import solve
    from partitioner.specs import Cluster, Training, optimizer_state_bytes, parse_bytes

    check_arguments(**_given(options, PLANNING))
    for name in _given(options, ("check", "seed")):
        raise ArgumentError(f"--{name} is of the model's own run: name what makes the model, or leave it out")
    fields = _given(options, ("batch_size", "mesh", "microbatches", "schedule", "optimizer", "recompute", "objective"))
    if options.memory_limit is not None:
        fields["memory_limit_bytes"] = parse_bytes(options.memory_limit)
    profile = Profile.load(options.profile)
    if options.batch_dim not in (None, profile.batch_dim):
        raise ArgumentError(
            f"--batch-dim {options.batch_dim}: {options.profile} was measured with samples along dimension "
            f"{profile.batch_dim}; measure it again, or leave the option out"
        )
    element_bytes = profile.trainable_element_bytes
    fields["optimizer_bytes"] = optimizer_state_bytes(fields.get("optimizer", "adamw"), element_bytes)
    training = Training(batch_dim=profile.batch_dim, **fields)
    return solve(profile, Cluster.parse(options.gpus), training)


def _profile(options: argparse.Namespace) -> Outcome:
    arguments = arguments_from(options.factory) | _given(options, ("device", "trace_dir"))
    from partitioner.profiler import profile

    result = _call(profile, options.factory, arguments)
    _save(result, options.output)
    return Outcome(result)


def _capacity(options: argparse.Namespace) -> Outcome:
    given = _given(options, CAPACITY)
    if options.what_if:
        given["what_if"] = {}
        for name, values in options.what_if:
            given["what_if"].setdefault(name, []).extend(values)
    if options.no_curve:
        given["curve"] = False
    arguments = _on_meta(options.factory) | given
    if "gpus" not in arguments:
        raise ArgumentError("say which devices to ask about, like --gpus 8xH100")
    if "example_inputs" not in arguments:
        raise ArgumentError(f"{options.factory} returned no inputs: return (model, inputs), of any number of samples")
    from partitioner.preflight import capacity

    report = _call(capacity, options.factory, arguments)
    _save(report, options.output)
    return Outcome(report, 0 if report.fits else InfeasibleError.exit_code)


def _on_meta(where: str) -> dict[str, Any]:
    """What the factory returns, its tensors made on the meta device; made for real where it cannot do that."""
    import torch

    try:
        with torch.device("meta"):
            return arguments_from(where)
    except PartitionerError:
        raise
    except (NotImplementedError, RuntimeError):
        return arguments_from(where)


def _show(options: argparse.Namespace) -> Outcome:
    from partitioner.forecast import CapacityReport
    from partitioner.plan import Plan
    from partitioner.profiles import Profile, kind_of, read_checked, read_json

    kinds: dict[str | None, type[Plan | Profile | CapacityReport]] = {
        kind.__name__: kind for kind in (Plan, Profile, CapacityReport)
    }
    found = kind_of(read_json(options.file))
    if found not in kinds:
        raise ArgumentError(f"{options.file} holds no plan, profile or capacity report, but {_a(found)}")
    thing = read_checked(kinds[found], options.file)
    if not options.timeline:
        return Outcome(thing)
    if not isinstance(thing, Plan):
        raise ArgumentError(f"{options.file} is a {found}: only a plan has a timeline")
    from partitioner.simulator import simulate

    return Outcome(simulate(thing))


def _a(kind: str | None) -> str:
    return "something else" if kind is None else f"a {kind}"


def _compare(options: argparse.Namespace) -> Outcome:
    from partitioner.plan import load
    from partitioner.report.comparison import Comparison

    if len(options.plans) < 2:
        raise ArgumentError("compare needs two plans or more")
    names = [Path(path).stem for path in options.plans]
    if len(set(names)) < len(names):
        names = list(options.plans)
    return Outcome(Comparison(tuple(names), tuple(map(load, options.plans))))


def _report(options: argparse.Namespace) -> Outcome:
    from partitioner.plan import load
    from partitioner.report.document import document

    plan = load(options.plan)
    return _written(document(plan, measured=_measured(options)), options.output)


def _trace(options: argparse.Namespace) -> Outcome:
    from partitioner.plan import load
    from partitioner.report.trace import trace

    plan = load(options.plan)
    return _written(json.dumps(trace(plan, measured=_measured(options))), options.output)


def _measured(options: argparse.Namespace) -> Any:
    """The measured step that was given, if one was."""
    from partitioner.report.trace import read

    return None if options.measured is None else read(options.measured)


class Written(NamedTuple):
    """A file that a command made."""

    path: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.path}: {self.num_bytes:,} bytes"


def _written(text: str, path: str) -> Outcome:
    from partitioner.profiles import write_whole

    write_whole(Path(path), text)
    return Outcome(Written(path, len(text.encode())))


def _verify(options: argparse.Namespace) -> Outcome:
    from partitioner.plan import load
    from partitioner.verification import verify

    plan = load(options.plan)
    arguments = arguments_from(options.factory)
    verification = _call(verify, options.factory, {"plan": plan, **arguments})
    return Outcome(verification, 0 if verification.passed else 1)


def _doctor(options: argparse.Namespace) -> Outcome:
    from partitioner.doctor import check

    diagnosis = check(try_ranks=not options.quick)
    return Outcome(diagnosis, 0 if diagnosis.ok else SetupError.exit_code)


COMMANDS: dict[str, Callable[[argparse.Namespace], Outcome]] = {
    "plan": _plan,
    "profile": _profile,
    "capacity": _capacity,
    "show": _show,
    "compare": _compare,
    "report": _report,
    "trace": _trace,
    "verify": _verify,
    "doctor": _doctor,
}


def _given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The options that were given, by name."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _call(function: Callable[..., Any], where: str, arguments: dict[str, Any]) -> Any:
    """Call it with those of partition()'s arguments that it takes too."""
    known = inspect.signature(function).parameters
    missing = [name for name, known_as in known.items() if known_as.default is known_as.empty and name not in arguments]
    if missing:
        raise ArgumentError(f"{where} returned no {', '.join(missing)}: {function.__name__} needs it")
    return function(**{name: value for name, value in arguments.items() if name in known})


def _save(thing: Any, path: str | None) -> None:
    if path is None:
        return
    thing.save(path)
    print(f"written to {path}", file=sys.stderr)


def _text(result: Any) -> str:
    """What a terminal shows; in colours where it has them, unless NO_COLOR (https://no-color.org) is set."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    if not colour or isinstance(result, Written):
        return str(result)
    from partitioner.report import render

    return render(result, colour=True)


def _json(result: Any) -> str:
    if hasattr(result, "model_dump_json"):
        return str(result.model_dump_json(indent=1))
    return json.dumps(_plain(result), indent=1)


def _plain(thing: Any) -> Any:
    if dataclasses.is_dataclass(thing):
        return {field.name: _plain(getattr(thing, field.name)) for field in dataclasses.fields(thing)}
    if hasattr(thing, "model_dump"):
        return thing.model_dump(mode="json")
    if isinstance(thing, tuple) and hasattr(thing, "_asdict"):
        return {name: _plain(value) for name, value in thing._asdict().items()}
    if isinstance(thing, dict):
        return {str(name): _plain(value) for name, value in thing.items()}
    return [_plain(value) for value in thing] if isinstance(thing, (list, tuple)) else thing


def _print(text: str, exit_code: int) -> int:
    """Print a result; a reader that went away, as `head` does, is no error."""
    encoding = sys.stdout.encoding or "ascii"
    try:
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_code


def _fail(error: BaseException, options: argparse.Namespace, exit_code: int) -> int:
    if options.debug:
        traceback.print_exception(error)
    print(f"error: {error}" if exit_code != 130 else "interrupted", file=sys.stderr)
    if options.json:
        described = {"kind": type(error).__name__, "message": str(error), "exit_code": exit_code}
        _print(json.dumps({"error": described}, indent=1), exit_code)
    return exit_code


@contextlib.contextmanager
def _stdout_for_results_only() -> Iterator[None]:
    """While a command works, whatever prints (a model, a library, a child process) prints to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":
    sys.exit(main())
