"""The notebooks run from top to bottom, and what is kept beside their scripts was made from them."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"


def load_runner() -> Any:
    spec = importlib.util.spec_from_file_location("notebooks_execute", FOLDER / "execute.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUNNER = load_runner()


@pytest.mark.parametrize("name", RUNNER.NAMES)
def test_the_notebook_that_is_kept_was_made_from_its_script(name: str) -> None:
    import nbformat

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        made = RUNNER.paired(name)
    assert [(cell.cell_type, cell.source) for cell in kept.cells] == [
        (cell.cell_type, cell.source) for cell in made.cells
    ], f"run python notebooks/execute.py {name}"
    assert kept.metadata["jupytext"]["formats"] == "ipynb,py:percent"
    code = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 600_000


@pytest.fixture(scope="module")
def manager() -> Iterator[Any]:
    """One kernel for all notebooks: what takes long is to import torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernel's own packages
        with RUNNER.kernel() as started:
            yield started


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "capacity_70b" else name  # 19 s of processor time alone
        for name in RUNNER.NAMES
    ],
)
def test_a_notebook_runs_from_top_to_bottom(name: str, manager: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        notebook = RUNNER.executed(name, manager)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    shown = [output for cell in code for output in cell.outputs]
    assert shown
    assert not [output for output in shown if output.output_type == "error"]
    for output in shown:
        if "text/html" in output.get("data", {}):
            assert "<script" not in output["data"]["text/html"]
            assert output["data"]["text/plain"]


def test_a_notebook_knows_no_names_of_the_one_before_it(manager: Any) -> None:
    """Each would run in a kernel of its own, too."""
    import nbformat

    leaves = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("left_behind = 1")])
    looks = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("'left_behind' in globals()")])
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for notebook in (leaves, looks):
            patch.setattr(RUNNER, "paired", lambda name, made=notebook: made)
            RUNNER.executed("none", manager)
    (output,) = looks.cells[0].outputs
    assert output["data"]["text/plain"] == "False"
