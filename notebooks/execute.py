"""Run the notebooks and keep what they show beside their scripts: python notebooks/execute.py [NAME ...]

The scripts (*.py in jupytext's percent format) are what is edited; the *.ipynb are made from them here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in HERE.glob("*.py") if path.name != Path(__file__).name))


def paired(name: str) -> Any:
    """The notebook that the script of this name makes, without outputs."""
    import jupytext

    return jupytext.read(HERE / f"{name}.py")


@contextmanager
def kernel() -> Iterator[Any]:
    """A running kernel for several notebooks, which then import torch once; each of them starts with no names."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(HERE))
    try:
        yield manager
    finally:
        manager.shutdown_kernel(now=True)


def executed(name: str, manager: Any, *, timeout_s: int = 120) -> Any:
    """The notebook with its outputs; a cell that fails is an nbclient.exceptions.CellExecutionError."""
    import nbformat
    from nbclient import NotebookClient

    notebook = paired(name)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    client = NotebookClient(notebook, km=manager, timeout=timeout_s, record_timing=False)
    try:
        client.execute()
    finally:
        client.kc.stop_channels()
    del notebook.cells[0]
    for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
        cell.execution_count = number
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = number
    for cell in notebook.cells:
        cell.pop("id", None)
        outputs = cell.get("outputs", ())
        cell["outputs"] = [one for one in outputs if one.get("name") != "stderr"] if cell.cell_type == "code" else []
        if cell.cell_type != "code":
            del cell["outputs"]
    notebook.metadata.pop("widgets", None)  # sliders of a kernel that is gone
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.nbformat_minor = 4  # the last one without random ids of cells
    return notebook


def main() -> None:
    import nbformat

    with kernel() as manager:
        for name in sys.argv[1:] or NAMES:
            start = time.perf_counter()
            notebook = executed(name, manager)
            nbformat.write(notebook, HERE / f"{name}.ipynb")
            size = (HERE / f"{name}.ipynb").stat().st_size
            print(f"{name}: {time.perf_counter() - start:.1f} s, {size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
