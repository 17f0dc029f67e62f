"""Get a model and its inputs from the user's own code, by name; a fault there is told in one line, with its place.

`pkg.mod:factory` names a function without arguments (or a model) in a module that Python finds from the current
directory; "file.py:factory" works as well. It returns one of

    model
    (model, inputs)
    (model, inputs, loss_fn)
    (model, inputs, loss_fn, target)
    {"model": model, "example_inputs": inputs, ...}        any arguments of partition() by name

where `inputs` are partition's `example_inputs`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partitioner.errors import ArgumentError, PartitionerError


def arguments_from(where: str) -> dict[str, Any]:
    """What the factory returns, as arguments of partition() by name."""
    made = _made(where)
    if isinstance(made, dict):
        if "model" not in made:
            raise ArgumentError(f"{where} returned a dictionary without 'model': it has {', '.join(map(str, made))}")
        return dict(made)
    names = ("model", "example_inputs", "loss_fn", "example_target")
    values = made if isinstance(made, tuple) else (made,)
    if not values or len(values) > len(names) or not callable(values[0]):
        kinds = ", ".join(type(value).__name__ for value in values)
        raise ArgumentError(
            f"{where} returned ({kinds}): return model, (model, inputs), (model, inputs, loss_fn), "
            "(model, inputs, loss_fn, target) or a dictionary of partition() arguments"
        )
    return dict(zip(names, values, strict=False))


def fault_of_model(error: Exception) -> str | None:
    """Where the user's code, or a torch module that it called, raised; None where our own code did."""
    from partitioner.trial import line_of

    frames = traceback.extract_tb(error.__traceback__)
    ours, torch_nn = str(Path(__file__).parent), os.path.join("torch", "nn", "")
    if frames[-1].filename.startswith(ours):
        return None
    if at := line_of(error):
        return at
    return "" if any(torch_nn in frame.filename for frame in frames) else None


def _made(where: str) -> Any:
    """The named function's result; a model that is named itself is that result."""
    module_name, _, attribute = where.rpartition(":")
    if not module_name or not attribute:
        raise ArgumentError(f"cannot read {where!r}: write it like pkg.mod:factory or file.py:factory")
    module = _module(module_name)
    try:
        thing = module
        for part in attribute.split("."):
            thing = getattr(thing, part)
    except AttributeError:
        raise ArgumentError(f"{module_name} has no {attribute!r}") from None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.nn.Module):
        return thing
    if not callable(thing):
        raise ArgumentError(f"{where} is a {type(thing).__name__}: name a function that returns the model")
    with _own_faults(where):
        return thing()


def _module(name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not name.endswith(".py"):
        with _own_faults(name):
            return importlib.import_module(name)
    path = Path(name).resolve()
    if not path.is_file():
        raise ArgumentError(f"there is no file {name}")
    sys.path.insert(0, str(path.parent))
    with _own_faults(name):
        module = importlib.import_module(path.stem)
    if Path(module.__file__ or "").resolve() != path:
        raise ArgumentError(
            f"{name} has the name of the module {path.stem!r}, which is loaded already: rename the file"
        )
    return module


@contextlib.contextmanager
def _own_faults(where: str) -> Iterator[None]:
    """An exception of the user's own code becomes one line: what was raised, and in which line of which file."""
    try:
        yield
    except PartitionerError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and (where + ".").startswith(error.name + "."):
            raise ArgumentError(f"there is no module {error.name!r} in {os.getcwd()} or in this environment") from error
        frames = traceback.extract_tb(error.__traceback__)
        here = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
        at = f" ({here[-1].filename}, line {here[-1].lineno})" if here else ""
        raise ArgumentError(f"{where} raised {type(error).__name__}: {error}{at}") from error
