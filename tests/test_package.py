"""The package as a whole: its public names, what importing it loads, how long that takes."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import re
import statistics
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import partitioner
from partitioner import doctor

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = {contract["id"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}
PLANNING = CONTRACTS["no-torch"]["source_modules"]
MODULES = [module.name for module in pkgutil.walk_packages(partitioner.__path__, "partitioner.")]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", partitioner.__all__)
def test_every_public_name_is_there(name: str) -> None:
    value = getattr(partitioner, name)
    assert value is not None
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__name__ == name
        assert inspect.getdoc(value), f"{name} has no docstring"


def test_public_names_are_listed_once_and_typed_as_they_are_found() -> None:
    assert len(set(partitioner.__all__)) == len(partitioner.__all__)
    source = Path(partitioner.__file__).read_text(encoding="utf-8")
    typed = dict(re.findall(r"^    from partitioner\.(\w+) import \w+ as (\w+)$", source, re.M))
    for name in partitioner.__all__:
        if name == "__version__":
            continue
        value = getattr(partitioner, name)
        assert value.__module__.split(".")[1] == partitioner._HOME[name], f"{name} is not from where it is listed"
        assert re.search(rf"^    from partitioner\.{partitioner._HOME[name]} import {name} as {name}$", source, re.M)
    assert typed


def test_no_public_name_hides_a_module() -> None:
    """`partitioner.profile` must stay the function whichever modules are imported."""
    modules = {name.split(".")[1] for name in MODULES}
    assert not modules & set(partitioner.__all__)


def test_no_function_shares_its_name_with_a_module() -> None:
    for parent in MODULES:
        module = importlib.import_module(parent)
        below = {name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == parent}
        for name in below & vars(module).keys():
            assert inspect.ismodule(vars(module)[name]), f"{parent}.{name} is a module and something else"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'partitioner' has no attribute 'partitoin'"):
        partitioner.partitoin  # noqa: B018


def test_dir_lists_what_can_be_had() -> None:
    assert set(partitioner.__all__) <= set(dir(partitioner))


def test_importing_loads_nothing_but_the_standard_library() -> None:
    loaded = json.loads(
        run(
            "import sys, json; before = set(sys.modules); import partitioner\n"
            "print(json.dumps([*set(sys.modules) - before]))"
        )
    )
    foreign = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"partitioner"}
    assert not foreign
    assert [name for name in loaded if name.startswith("partitioner")] == ["partitioner"]


def test_planning_runs_without_torch() -> None:
    """All of it imports, with everything below it, where torch cannot be imported at all."""
    run(
        "import sys, pkgutil, importlib\n"
        "sys.modules['torch'] = None\n"
        f"for name in {PLANNING!r}:\n"
        "    module = importlib.import_module(name)\n"
        "    for below in pkgutil.walk_packages(getattr(module, '__path__', []), name + '.'):\n"
        "        importlib.import_module(below.name)\n"
    )


def test_importing_takes_less_than_50_ms() -> None:
    """Median over interleaved pairs of interpreter runs, with and without the import."""

    def took_s(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    took_s("import partitioner")  # compile once
    more = [took_s("import partitioner") - took_s("pass") for _ in range(9)]
    assert statistics.median(more) < 0.050


def test_every_module_says_its_one_idea_in_its_first_line() -> None:
    for name in MODULES:
        text = (importlib.import_module(name).__doc__ or "").strip()
        first = text.splitlines()[0] if text else ""
        assert first.endswith((".", "?")), f"{name}: {first!r}"


def test_the_import_order_names_every_planning_module() -> None:
    listed = re.findall(r"\w+", " ".join(CONTRACTS["layers"]["layers"]))
    assert {name.split(".")[1] for name in PLANNING} <= set(listed)
    assert len(listed) == len(set(listed))


def test_what_is_needed_is_what_is_declared() -> None:
    """What the code imports, what the doctor looks for and what pip installs are the same packages."""
    declared = {re.split(r"[<>=\[ ]", line)[0] for line in PROJECT["project"]["dependencies"]}
    assert declared == set(doctor.REQUIRED)
    imported = set()
    for path in Path(partitioner.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add((node.module or "").partition(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - {"partitioner"}
    assert declared <= foreign
    assert foreign - declared <= set(doctor.OPTIONAL)


def test_only_lower_bounds_are_asked_for() -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    for line in [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)]:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+>=[0-9.]+", line), line


def test_the_version_is_one_number() -> None:
    assert importlib.metadata.version("torch-partitioner") == partitioner.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in changelog or f"## [{partitioner.__version__}]" in changelog


def test_the_command_is_installed() -> None:
    done = subprocess.run([Path(sys.executable).parent / "partitioner", "--version"], capture_output=True, text=True)
    assert done.stdout == f"partitioner {partitioner.__version__}\n"
