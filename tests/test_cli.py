"""The shell command: results on stdout, the rest on stderr, one exit code for each kind of failure, no tracebacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drawn_plans import drawn_plan
from given import given_plan, given_profile

from partitioner import __version__, cli, errors
from partitioner.forecast import CapacityReport
from partitioner.options import CAPACITY, PLANNING, TRAINING, parser
from partitioner.plan import Plan, load
from partitioner.profiles import Profile
from partitioner.report import render
from partitioner.simulator import simulate
from partitioner.timeline import Timeline


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each test works in an empty folder; what it imported from there is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Any:
    """The command in this process: exit code, stdout, stderr."""

    def run(*argv: str) -> Ran:
        capfd.readouterr()
        try:
            code = cli.main(argv)
        except SystemExit as stop:  # argparse's own way out
            code = int(stop.code or 0)
        return Ran(code, *capfd.readouterr())

    return run


@pytest.fixture
def plan_file(folder: Path) -> str:
    given_plan().save(folder / "plan.json")
    return "plan.json"


def test_show_prints_the_view_of_a_plan(run: Any, plan_file: str) -> None:
    ran = run("show", plan_file)
    assert (ran.code, ran.out, ran.err) == (0, render(given_plan()) + "\n", "")


def test_show_json_prints_what_was_saved(run: Any, plan_file: str) -> None:
    ran = run("show", plan_file, "--json")
    assert ran.code == 0
    assert Plan.model_validate_json(ran.out) == given_plan()


def test_show_takes_a_profile_too(run: Any, folder: Path) -> None:
    given_profile().save(folder / "profile.json")
    assert run("show", "profile.json").out == render(given_profile()) + "\n"
    assert Profile.model_validate_json(run("show", "profile.json", "--json").out) == given_profile()


def test_colours_are_for_terminals_that_have_them(run: Any, plan_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert run("show", plan_file).out == render(given_plan(), colour=True) + "\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert run("show", plan_file).out == render(given_plan()) + "\n"


def test_compare_puts_plans_side_by_side(run: Any, folder: Path, plan_file: str) -> None:
    drawn_plan().save(folder / "other.json")
    ran = run("compare", plan_file, "other.json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("plan against other\n")
    assert "other is of another model than plan" in " ".join(ran.out.split())
    figures = json.loads(run("compare", plan_file, "other.json", "--json").out)
    assert [plan["schedule"] for plan in figures["plans"]] == ["1f1b", "1f1b"]
    ran = run("compare", plan_file)
    assert (ran.code, ran.out) == (2, "")
    assert "two plans or more" in ran.err


def test_report_and_trace_write_what_python_writes(run: Any, folder: Path, plan_file: str) -> None:
    plan = given_plan()
    plan.save_report("expected.html")
    plan.save_trace("expected.json")
    for command, name in (("report", "plan.html"), ("trace", "trace.json")):
        ran = run(command, plan_file, "-o", name)
        size = (folder / name).stat().st_size
        assert (ran.code, ran.out, ran.err) == (0, f"{name}: {size:,} bytes\n", "")
    assert (folder / "plan.html").read_bytes() == (folder / "expected.html").read_bytes()
    assert json.loads((folder / "trace.json").read_text()) == json.loads((folder / "expected.json").read_text())
    assert json.loads(run("report", plan_file, "-o", "plan.html", "--json").out)["path"] == "plan.html"


def test_a_report_shows_a_measured_step_that_was_given(run: Any, folder: Path, plan_file: str) -> None:
    plan = given_plan()
    predicted = simulate(plan)
    plan.save_trace("step.json", measured=Timeline(predicted.spans, predicted.num_ranks, measured=True))
    assert run("report", plan_file, "-o", "plan.html", "--measured", "step.json").code == 0
    assert "the prediction is +0.0 % off" in (folder / "plan.html").read_text()
    ran = run("report", plan_file, "-o", "plan.html", "--measured", plan_file)
    assert ran.code == 2
    assert "not a trace" in ran.err
    ran = run("report", plan_file, "-o", "no/such/folder/plan.html")
    assert ran.code == 2
    assert "cannot write no/such/folder/plan.html" in ran.err


def test_show_timeline_draws_every_rank(run: Any, plan_file: str) -> None:
    ran = run("show", plan_file, "--timeline")
    assert ran.code == 0
    assert "rank 0 |" in ran.out
    assert "rank 1 |" in ran.out
    spans = json.loads(run("show", plan_file, "--timeline", "--json").out)["spans"]
    forwards = [span for span in spans if span["kind"] == "F"]
    assert len(forwards) == 2 * given_plan().num_microbatches


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no file thing.json"),
        ("not json", "not JSON"),
        ("", "thing.json is empty"),
        ("[1]", "no plan, profile or capacity report"),
        ('{"stages": 3, "profile": 3, "version": 2}', "not a Plan: "),
        ('{"layers": 3, "tensors": 3, "version": 1}', "not a Profile: "),
        ('{"layers": 3, "tensors": 3, "version": 7}', "a Profile of format 7, this partitioner reads format 1"),
        ('{"traceEvents": []}', "but a trace"),
    ],
)
def test_a_file_that_cannot_be_shown_is_a_usage_error(run: Any, folder: Path, content: str | None, said: str) -> None:
    if content is not None:
        (folder / "thing.json").write_text(content)
    ran = run("show", "thing.json")
    assert ran.code == 2
    assert said in ran.err
    assert ran.out == ""
    assert "Traceback" not in ran.err


def test_python_m_partitioner_is_the_same_command() -> None:
    command = [sys.executable, "-m", "partitioner", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == f"partitioner {__version__}\n"


def test_a_capacity_report_is_shown_too(run: Any, folder: Path) -> None:
    (folder / "job.py").write_text(
        "import torch\nfrom torch import nn\ndef make(): return nn.Linear(8, 8), torch.zeros(16, 8)\n"
    )
    made = run("capacity", "job.py:make", "--gpus", "2xH100", "--no-curve", "-o", "report.json")
    assert (made.code, run("show", "report.json").out) == (0, made.out)


@pytest.mark.parametrize("command", ["plan", "profile", "capacity"])
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("none/x.json", "there is no folder none: make it first"),
        ("here", "it is a folder: name a file in it"),
        ("here/file/x.json", "here/file is no folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_the_work(
    run: Any, folder: Path, command: str, path: str, why: str
) -> None:
    (folder / "here").mkdir()
    (folder / "here" / "file").touch()
    ran = run(command, "nowhere:make", "--gpus" if command != "profile" else "--device", "cpu", "-o", path)
    assert (ran.code, ran.err) == (2, f"error: cannot write {path}: {why}\n")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--check", "first"), "--check is of the model's own run"),
        (("--seed", "1"), "--seed is of the model's own run"),
        (("--batch-dim", "1"), "--batch-dim 1: profile.json was measured with samples along dimension 0"),
        (("--precision", "bf16"), "precision='bf16' is not built in this version; use 'fp32'"),
        (("--recompute", "h.0"), "naming layers is not built"),
    ],
)
def test_options_that_a_profile_alone_cannot_follow_are_refused(
    run: Any, folder: Path, options: tuple[str, ...], says: str
) -> None:
    given_profile().save(folder / "profile.json")
    ran = run("plan", "--profile", "profile.json", "--gpus", "2xH100", "--batch-size", "8", *options)
    assert ran.code == 2
    assert says in ran.err


def test_a_plan_from_a_profile_alone_follows_objective_and_recompute(run: Any, folder: Path) -> None:
    given_profile().save(folder / "profile.json")
    common = ("plan", "--profile", "profile.json", "--gpus", "2xH100", "--batch-size", "8", "--json")
    for option, value in (("objective", "throughput"), ("recompute", "always")):
        plan = Plan.model_validate_json(run(*common, f"--{option}", value).out)
        assert getattr(plan.training, option) == value


def test_plan_and_capacity_take_the_same_options_of_a_training() -> None:
    for command, names in (("plan", PLANNING), ("capacity", CAPACITY)):
        made = vars(parser("").parse_args([command, "a:b"]))
        assert set(names) <= made.keys()
        assert set(TRAINING) <= set(names)


def test_a_profile_has_no_timeline(run: Any, folder: Path) -> None:
    given_profile().save(folder / "profile.json")
    ran = run("show", "profile.json", "--timeline")
    assert (ran.code, ran.out) == (2, "")
    assert "only a plan" in ran.err


EXIT_CODES = {
    errors.ArgumentError: 2,
    errors.NotBuiltError: 2,
    errors.PlanMismatchError: 2,
    errors.InfeasibleError: 3,
    errors.UnsupportedModelError: 4,
    errors.SetupError: 5,
    errors.RankError: 5,
}


@pytest.mark.parametrize("kind", EXIT_CODES, ids=lambda kind: kind.__name__)
def test_each_error_has_its_exit_code_and_is_one_line(
    run: Any, monkeypatch: pytest.MonkeyPatch, kind: type[errors.PartitionerError]
) -> None:
    def fail(_: object) -> cli.Outcome:
        raise kind("24 layers, 2 devices")

    monkeypatch.setitem(cli.COMMANDS, "show", fail)
    ran = run("show", "x")
    assert (ran.code, ran.out, ran.err) == (EXIT_CODES[kind], "", "error: 24 layers, 2 devices\n")
    ran = run("show", "x", "--json")
    expected = {"kind": kind.__name__, "message": "24 layers, 2 devices", "exit_code": EXIT_CODES[kind]}
    assert json.loads(ran.out) == {"error": expected}
    assert ran.code == EXIT_CODES[kind]


def test_every_error_of_the_package_has_an_exit_code() -> None:
    def below(kind: type) -> set[type]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    tree = below(errors.PartitionerError) - {errors.PartitionerError}
    assert {kind for kind in tree if kind.__module__ == errors.__name__} == set(EXIT_CODES)
    assert all(kind.exit_code in (2, 3, 4, 5) for kind in tree)


def test_an_interrupt_is_130(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> cli.Outcome:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "show", interrupted)
    ran = run("show", "x")
    assert (ran.code, ran.out, ran.err) == (130, "", "interrupted\n")


def test_a_missing_package_is_a_setup_error_and_ours_is_a_bug(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> cli.Outcome:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy.optimize")

    monkeypatch.setitem(cli.COMMANDS, "show", missing)
    ran = run("show", "x")
    assert (ran.code, ran.err) == (5, "error: the package scipy is missing: pip install scipy\n")

    def bug(_: object) -> cli.Outcome:
        raise ModuleNotFoundError("No module named 'partitioner.gone'", name="partitioner.gone")

    monkeypatch.setitem(cli.COMMANDS, "show", bug)
    with pytest.raises(ModuleNotFoundError, match="gone"):
        run("show", "x")


def test_what_a_model_prints_is_no_result(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def chatty(_: object) -> cli.Outcome:
        print("from Python")
        os.write(1, b"from C\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        return cli.Outcome(given_plan())

    monkeypatch.setitem(cli.COMMANDS, "show", chatty)
    ran = run("show", "x", "--json")
    assert Plan.model_validate_json(ran.out) == given_plan()
    for source in ("Python", "C", "a child"):
        assert f"from {source}" in ran.err


def test_debug_adds_the_traceback(run: Any) -> None:
    ran = run("show", "gone.json", "--debug")
    assert ran.code == 2
    assert "Traceback" in ran.err
    assert ran.err.endswith("error: there is no file gone.json\n")


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("fly",),
        ("plan", "a:b", "--batch-size", "0"),
        ("plan", "a:b", "--batch-size", "many"),
        ("plan", "a:b", "--mesh", "pp"),
        ("show",),
        ("verify", "plan.json"),
    ],
)
def test_what_is_no_command_is_a_usage_error(run: Any, argv: tuple[str, ...]) -> None:
    ran = run(*argv)
    assert (ran.code, ran.out) == (2, "")
    assert "usage: partitioner" in ran.err


def test_help_explains_the_factory_and_the_exit_codes(run: Any) -> None:
    ran = run("--help")
    assert ran.code == 0
    assert "(model, inputs, loss_fn, target)" in ran.out
    assert "3 no plan fits" in ran.out
    for command in ("plan", "profile", "show", "verify", "doctor"):
        assert run(command, "--help").code == 0


@pytest.mark.parametrize(
    ("where", "source", "said"),
    [
        ("nowhere:make", None, "no module 'nowhere'"),
        ("job", "", "write it like pkg.mod:factory"),
        ("job:", "", "write it like pkg.mod:factory"),
        ("job:make", "", "job has no 'make'"),
        ("job:make", "make = 3", "is a int: name a function"),
        ("job:make", "def make(:", "job raised SyntaxError"),
        ("job:make", "import sys; sys.exit(3)", "job raised SystemExit: 3"),
        ("job:make", "def make():\n    return 1 / 0", "job:make raised ZeroDivisionError: division by zero"),
        ("job:make", "def make(): return {'inputs': 1}", "without 'model'"),
        ("job:make", "def make(): return ()", "returned ()"),
        ("job:make", "def make(): return 3", "returned (int)"),
        ("job:make", "def make(): return (print, 1, 2, 3, 4)", "return model, (model, inputs)"),
        ("gone.py:make", None, "there is no file gone.py"),
    ],
)
def test_a_factory_that_makes_no_model_is_a_usage_error(
    run: Any, folder: Path, where: str, source: str | None, said: str
) -> None:
    if source is not None:
        (folder / "job.py").write_text(source)
    ran = run("profile", where)
    assert ran.code == 2
    assert said in ran.err
    assert ran.out == ""
    assert "Traceback" not in ran.err


def test_a_factory_that_raises_is_told_where(run: Any, folder: Path) -> None:
    (folder / "job.py").write_text("def make():\n    x = {}\n    return x['key']\n")
    ran = run("profile", "job:make")
    assert f"{folder}/job.py, line 3" in ran.err


def test_a_factory_without_inputs_cannot_be_profiled(run: Any, folder: Path) -> None:
    (folder / "job.py").write_text("def make(): return print")
    ran = run("profile", "job:make")
    assert ran.code == 2
    assert "job:make returned no example_inputs: profile needs it" in ran.err


MODELS = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

def job(model, width=4, loss=mse_loss):
    return model, torch.randn(8, width), loss, torch.randn(8, 4)

class Boom(nn.Module):
    def forward(self, x):
        raise ValueError("my own fault")

def other_width(): return job(nn.Linear(4, 4), width=5)
def raises(): return job(nn.Sequential(nn.Linear(4, 4), Boom()))
def bad_loss(): return job(nn.Linear(4, 4), loss=lambda output, target: output.missing)
def no_loss(): return job(nn.Linear(4, 4))[:2]
def no_number(): return job(nn.Linear(4, 4), loss=lambda output, target: output)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("other_width", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("raises", "ValueError: my own fault ({folder}/job.py, line 11)"),
        ("bad_loss", "AttributeError: 'Tensor' object has no attribute 'missing' ({folder}/job.py, line 15)"),
        ("no_loss", "pass loss_fn="),
        ("no_number", "a loss is one number"),
    ],
)
def test_a_fault_of_the_model_is_a_usage_error_and_no_traceback(run: Any, folder: Path, name: str, said: str) -> None:
    (folder / "job.py").write_text(MODELS)
    ran = run("plan", f"job:{name}", "--gpus", "2")
    assert (ran.code, ran.out) == (2, "")
    assert said.format(folder=folder) in ran.err
    assert "Traceback" not in ran.err


WORKS = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(8, 64), nn.functional.mse_loss, torch.randn(8, 64)
"""


def test_a_model_is_profiled_planned_and_shown(run: Any, folder: Path) -> None:
    (folder / "job.py").write_text(WORKS)
    ran = run("profile", "job:make", "--device", "cpu", "-o", "profile.json", "--json")
    assert (ran.code, ran.err) == (0, "written to profile.json\n")
    profile = Profile.model_validate_json(ran.out)
    assert profile == Profile.load("profile.json")
    assert (profile.provenance, profile.device_kind) == ("measured", "cpu")
    ran = run("plan", "job:make", "--gpus", "2", "--profile", "profile.json", "--mesh", "pp=2", "-o", "plan.json")
    assert ran.code == 0
    plan = load("plan.json")
    assert ran.out == render(plan) + "\n"
    assert plan.profile == profile
    assert (plan.mesh, plan.training.batch_size) == ({"pp": 2, "dp": 1}, 8)
    shown = Plan.model_validate_json(run("show", "plan.json", "--json").out)
    assert shown == plan


def test_verify_runs_the_ranks_and_compares_with_one_device(run: Any, folder: Path) -> None:
    (folder / "job.py").write_text(WORKS)
    assert run("plan", "job:make", "--gpus", "2", "--mesh", "pp=2", "-o", "plan.json").code == 0
    ran = run("verify", "plan.json", "job:make", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["mesh"] == {"pp": 2, "dp": 1}
    assert max(found["loss_error"], found["gradient_error"]) <= found["tolerance"]


def test_other_numbers_than_one_device_are_1(run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Different:
        passed = False

        def model_dump_json(self, indent: int) -> str:
            return "{}"

    (folder / "job.py").write_text(WORKS)
    given_plan().save(folder / "plan.json")
    monkeypatch.setattr("partitioner.verification.verify", lambda plan, model, example_inputs: Different())
    assert run("verify", "plan.json", "job:make", "--json").code == 1


def test_a_fault_of_ours_keeps_its_traceback(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partitioner.report.text.page_of", None)
    given_plan().save("plan.json")
    with pytest.raises(TypeError):
        run("show", "plan.json")


def test_a_plan_needs_devices_and_something_to_plan(run: Any, folder: Path) -> None:
    (folder / "job.py").write_text("def make(): return print")
    assert "--gpus" in run("plan", "job:make").err
    assert "--profile" in run("plan", "--gpus", "4").err
    given_profile().save(folder / "p.json")
    assert "--batch-size" in run("plan", "--profile", "p.json", "--gpus", "8xH100").err


def test_a_dictionary_with_unknown_arguments_is_refused(run: Any, folder: Path) -> None:
    (folder / "job.py").write_text("def make(): return {'model': print, 'gpus': 2, 'batchsize': 3}")
    ran = run("plan", "job:make")
    assert ran.code == 2
    assert "batchsize: partition() has no such argument" in ran.err


def test_a_profile_alone_is_planned_without_torch(folder: Path) -> None:
    given_profile(8).save(folder / "p.json")
    script = (
        "import sys; from partitioner.cli import main; "
        "code = main(['plan', '--profile', 'p.json', '--gpus', '2xH100', '--batch-size', '8', '-o', 'plan.json']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "written to plan.json\n")
    plan = Plan.model_validate_json((folder / "plan.json").read_text())
    assert plan.training.batch_size == 8
    assert done.stdout == render(plan) + "\n"


def test_a_plan_that_cannot_fit_is_3(run: Any, folder: Path) -> None:
    given_profile(8).save(folder / "p.json")
    ran = run("plan", "--profile", "p.json", "--gpus", "2xT4", "--batch-size", "8", "--memory-limit", "1MiB")
    assert (ran.code, ran.out) == (3, "")
    assert "MiB" in ran.err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--gpus", "2xZ9", "not known"),
        ("--gpus", "2", "like 2xH100"),
        ("--memory-limit", "1Gb", "bits"),
        ("--schedule", "zigzag", "schedule='zigzag' is unknown"),
        ("--precision", "bf16", "precision='bf16' is not built"),
        ("--shard", "zero3", "shard='zero3' is not built"),
        ("--gradient-compression", "powersgd", "gradient_compression='powersgd' is not built"),
        ("--objective", "speed", "objective='speed' is unknown"),
        ("--check", "always", "check='always' is unknown"),
        ("--optimizer", "lion", "sgd-momentum"),
        ("--mesh", "xx=2", "no axis 'xx'"),
        ("--mesh", "pp=4", "needs 4 devices, there are 2"),
    ],
)
def test_a_value_that_cannot_be_is_a_usage_error(run: Any, folder: Path, option: str, value: str, said: str) -> None:
    given_profile().save(folder / "p.json")
    ran = run("plan", "--profile", "p.json", "--gpus", "2xT4", "--batch-size", "8", option, value)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--precision=bf16", "precision='bf16'"),
        ("--mesh=pp=4", "needs 4 devices"),
        ("--memory-limit=1Gb", "bits"),
        ("--optimizer=lion", "lion"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_before_the_model_is_built(
    run: Any, folder: Path, option: str, said: str
) -> None:
    (folder / "slow.py").write_text("def make():\n    raise SystemExit('the model was built')\n")
    ran = run("plan", "slow:make", "--gpus", "2", option)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err and "the model was built" not in ran.err


def test_an_output_that_cannot_be_written_is_named(run: Any, folder: Path) -> None:
    given_profile().save(folder / "p.json")
    ran = run("plan", "--profile", "p.json", "--gpus", "2xT4", "--batch-size", "8", "-o", "no/such/plan.json")
    assert ran.code == 2
    assert "cannot write no/such/plan.json" in ran.err


WIDE = """
import torch
from torch import nn

def make():
    layers = [nn.Linear(8192, 8192, bias=False) for _ in range(24)]
    return nn.Sequential(*layers), torch.zeros(1, 8192)
"""


@pytest.mark.parametrize(("gpus", "code", "said"), [("2xA100-80GB", 0, "verdict: fits"), ("1xT4", 3, "does not fit")])
def test_capacity_says_whether_it_fits_and_exits_so(run: Any, folder: Path, gpus: str, code: int, said: str) -> None:
    (folder / "wide.py").write_text(WIDE, encoding="utf-8")
    ran = run("capacity", "wide:make", "--gpus", gpus, "--batch", "4", "--no-curve", "--most-devices", "1")
    assert ran.code == code and said in ran.out
    assert f"Capacity of {gpus[0]} x" in ran.out


def test_capacity_as_json_with_changes_is_a_report(run: Any, folder: Path) -> None:
    (folder / "wide.py").write_text(WIDE, encoding="utf-8")
    ran = run(
        *("capacity", "wide:make", "--gpus", "2xH100", "--batch", "4", "--mesh", "pp=2,tp=1,dp=1", "--json"),
        *("--what-if", "precision=bf16-mixed", "--what-if", "batch_size=8,16", "-o", "report.json"),
    )
    report = CapacityReport.model_validate_json(ran.out)
    assert ran.code == 0 and report == CapacityReport.load("report.json")
    assert [one.change for one in report.variations] == ["precision=bf16-mixed", "batch_size=8", "batch_size=16"]
    assert report.best.mesh == {"tp": 1, "pp": 2, "dp": 1}


def test_doctor_tells_what_is_here(run: Any) -> None:
    import torch

    ran = run("doctor", "--quick", "--json")
    found = {finding["name"]: finding for finding in json.loads(ran.out)["findings"]}
    assert ran.code == 0
    assert found["torch"]["found"] == torch.__version__
    assert all(finding["ok"] for finding in found.values())


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_reader_that_goes_away_is_no_error(plan_file: str, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    command = f"{sys.executable} -m partitioner.cli show {plan_file} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Plan of Chain")


def test_a_terminal_without_unicode_gets_what_it_can_show(folder: Path) -> None:
    given_plan(why=("naïve → split",)).save(folder / "plan.json")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "partitioner.cli", "show", "plan.json"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0
    assert "na?ve ? split" in done.stdout
