"""What a training loop takes by hand of which a rank has a part: norms of gradients, and what layers have written.

    total = sum(p.grad.norm() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5
    if not all(torch.isfinite(p.grad).all() for p in model.parameters()): continue
    model.temperature = 1 + model.meter.mean

Nothing of a gradient tells what will be made of it, so this is told from the names that the code around a step uses.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from partitioner.running import functions_behind, is_installed, names_of

_TAKEN = frozenset({"norm", "vector_norm", "isfinite", "isnan", "isinf", "dot"})
"""What becomes another value where some gradients are left out."""
_REDUCED = frozenset({"sum", "mean", "max", "amax"})
_SQUARED = frozenset({"pow", "square", "abs"})
"""What a norm is put together from, besides the operator `**`."""
_AGREED = frozenset({"all_reduce", "all_gather", "all_gather_object", "gather", "reduce"})
"""Who calls these knows that the others have the rest."""
_LOADS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME"})
_EMPTYING = frozenset({"reset", "clear"})
_OF_THE_FORWARD = frozenset({"forward", "__call__", "__init__"})
_INLINE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>"})


def warn_of_parts(names: Sequence[str], keys: Collection[str]) -> None:
    """A warning for each function of the caller's own code that seems to take norms of gradients, or to read records.

    `names`: of what several stages only write, for themselves; `keys`: attributes and variables that hold such things.
    """
    records = f"{', '.join(map(repr, names[:3]))}{', ...' if len(names) > 3 else ''}"
    for code in codes_around(sys._getframe(1)):
        if takes_gradients(code):
            _warn(
                code,
                "take norms of gradients, or to look whether all are finite, by hand: here they are those of this "
                "rank's stage, and what is decided by them would differ between stages. "
                "stage.clip_grad_norm_(max_norm) clips by the norm over the whole model's gradients and gives it; with "
                "max_norm=math.inf it only gives it, and it is finite where all gradients are",
            )
        if names and reads_records(code, keys):
            _warn(
                code,
                f"read {records}, which layers of several stages write: on each rank it is what the layers of its own "
                "stage wrote. What is set or decided by it would differ between stages: put the parts of all ranks "
                "together first (torch.distributed.all_gather_object)",
            )


def _warn(code: CodeType, what: str) -> None:
    text = f"{code.co_name} seems to {what}"
    warnings.warn_explicit(text, UserWarning, code.co_filename, code.co_firstlineno)


def codes_around(frame: FrameType | None) -> Iterator[CodeType]:
    """Code of the user's functions that are under way, and of those that they lead to: each once.

    What is called like a method of an object at hand is taken for it.
    """
    waiting: list[tuple[CodeType, dict[str, Any]]] = []
    methods: dict[str, list[FunctionType]] = {}
    known: set[type] = set()
    while frame is not None:
        if not is_installed(frame.f_globals.get("__name__", "")):
            waiting.append((frame.f_code, frame.f_globals))
            variables = _variables(frame)
            for value in (*variables, *frame.f_globals.values()):
                _enter(value if isinstance(value, type) else type(value), methods, known)
            for value in variables:
                if isinstance(value, (FunctionType, MethodType, functools.partial)):
                    waiting += _own(functions_behind(value))
            del variables
        frame = frame.f_back
    seen: set[CodeType] = set()
    while waiting:
        code, space = waiting.pop()
        if code in seen:
            continue
        seen.add(code)
        yield code
        names = names_of(code)
        for name in names:
            found = space.get(name)
            if isinstance(found, ModuleType):
                if not is_installed(found.__name__):
                    for each in names:
                        inside = vars(found).get(each)
                        waiting += _own([inside] if isinstance(inside, FunctionType) else ())
            elif isinstance(found, FunctionType):
                waiting += _own(functions_behind(found))
            waiting += _own(methods.get(name, ()))


def _variables(frame: FrameType) -> list[Any]:
    """The local ones. Before 3.13 Python keeps with the frame what was asked for, though it is deleted since."""
    found = frame.f_locals
    values = list(found.values())
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        found.clear()
    return values


def _enter(cls: type, methods: dict[str, list[FunctionType]], known: set[type]) -> None:
    for base in cls.__mro__:
        if base in known or is_installed(base.__module__):
            continue
        known.add(base)
        for name, found in vars(base).items():
            if isinstance(found, (FunctionType, staticmethod, classmethod)):
                methods.setdefault(name, []).extend(functions_behind(found))


def _own(functions: Iterable[FunctionType]) -> list[tuple[CodeType, dict[str, Any]]]:
    return [(one.__code__, one.__globals__) for one in functions if not is_installed(one.__module__ or "")]


def takes_gradients(code: CodeType) -> bool:
    """Whether a function seems to take a norm over gradients, or to look whether they are finite."""
    names = _named_in(code)
    if "grad" not in names or names & _AGREED or names.isdisjoint(_TAKEN | _REDUCED):
        return False
    steps = [step for one in _inline(code) for step in dis.get_instructions(one)]
    if not any(step.argval == "grad" and step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")) for step in steps):
        return False
    squares = bool(names & _SQUARED) or any(step.opname == "BINARY_OP" and "**" in step.argrepr for step in steps)
    return bool(names & _TAKEN) or squares


def reads_records(code: CodeType, keys: Collection[str]) -> bool:
    """Whether a function of the loop seems to take something by these names, other than to empty it."""
    names = _named_in(code)
    if code.co_name in _OF_THE_FORWARD or names.isdisjoint(keys) or names & _AGREED:
        return False
    return any(
        step.argval in keys and step.opname in _LOADS and following.argval not in _EMPTYING
        for one in _inline(code)
        for step, following in pairwise(dis.get_instructions(one))
    )


def _named_in(code: CodeType) -> set[str]:
    return {name for one in _inline(code) for name in one.co_names}


def _inline(code: CodeType) -> Iterator[CodeType]:
    """The code, and that of comprehensions and lambdas in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType) and one.co_name in _INLINE:
            yield from _inline(one)
