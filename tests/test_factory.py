"""What a factory may be and return, and whose fault an exception is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from partitioner.errors import ArgumentError, InfeasibleError
from partitioner.factory import arguments_from, fault_of_model

JOB = """
def net(): ...
class Box:
    @staticmethod
    def make(): return net, 1
def alone(): return net
def whole(): return net, (1, 2), max, 3
def named(): return {'model': net, 'batch_dim': 1}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("job:alone", {}),
        ("job:Box.make", {"example_inputs": 1}),
        ("job.py:whole", {"example_inputs": (1, 2), "loss_fn": max, "example_target": 3}),
        ("job:named", {"batch_dim": 1}),
    ],
)
def test_what_it_returns_is_named_as_partition_names_it(folder: Path, where: str, expected: dict[str, Any]) -> None:
    (folder / "job.py").write_text(JOB)
    made = arguments_from(where)
    assert made.pop("model") is sys.modules["job"].net
    assert made == expected


def test_a_module_in_a_package_below_the_current_folder_is_found(folder: Path) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").touch()
    (folder / "pkg" / "job.py").write_text(JOB)
    assert arguments_from("pkg.job:whole")["example_target"] == 3
    assert arguments_from("pkg/job.py:whole")["example_target"] == 3


def test_a_model_may_be_named_itself(folder: Path) -> None:
    (folder / "job.py").write_text("from torch import nn\nmodel = nn.Linear(2, 3)")
    (model,) = arguments_from("job:model").values()
    assert isinstance(model, nn.Linear)


def test_a_file_that_hides_a_loaded_module_is_refused(folder: Path) -> None:
    (folder / "json.py").write_text(JOB)
    with pytest.raises(ArgumentError, match=r"json\.py has the name of the module 'json'"):
        arguments_from("json.py:whole")


def test_our_own_errors_pass_as_they_are(folder: Path) -> None:
    (folder / "job.py").write_text(
        "from partitioner.errors import InfeasibleError\ndef make(): raise InfeasibleError('too large')"
    )
    with pytest.raises(InfeasibleError, match="too large"):
        arguments_from("job:make")


def raised(function: Any) -> Exception:
    with pytest.raises(Exception) as caught:
        function()
    return caught.value


def test_a_fault_below_a_torch_module_is_the_models_even_without_a_line_of_its_own() -> None:
    error = raised(lambda: nn.Linear(2, 2)(torch.zeros(3, 3)))
    error.__traceback__ = error.__traceback__.tb_next.tb_next if error.__traceback__ else None  # leave this file out
    assert fault_of_model(error) == ""


def test_a_fault_in_a_file_of_the_user_is_told_with_its_line(folder: Path) -> None:
    (folder / "job.py").write_text("\n\ndef fail(): raise ValueError('mine')\n")
    sys.path.insert(0, str(folder))
    import job  # type: ignore[import-not-found]

    assert fault_of_model(raised(job.fail)) == f" ({folder}/job.py, line 3)"


def test_a_fault_whose_last_frame_is_ours_is_ours() -> None:
    from partitioner.specs import Link

    assert fault_of_model(raised(lambda: Link.of(0.0, 0.0))) is None
