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

from partitioner.running import functions_behind, is_installed, is_own, names_of

_TAKEN = frozenset({"norm", "vector_norm", "isfinite", "isnan", "isinf", "dot"})
"""What becomes another value where some gradients are left out."""
_AGREED = frozenset({"all_reduce", "all_gather", "all_gather_object", "gather", "reduce"})
"""Who calls these knows that the others have the rest."""
_LOADS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME"})
_EMPTYING = frozenset({"reset", "clear"})
_OF_THE_FORWARD = frozenset({"forward", "__call__", "__init__"})
_INLINE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>"})


def warn_of_gradients_by_hand() -> None:
    """A warning for each function of the caller's own code that seems to take a norm over gradients."""
    for code in gradients_by_hand(sys._getframe(1)):
        warnings.warn_explicit(
            f"{code.co_name} seems to take norms of gradients, or to look whether all are finite, by hand: here they "
            "are those of this rank's stage, and what is decided by them would differ between stages. "
            "stage.clip_grad_norm_(max_norm) clips by the norm over the whole model's gradients and gives it; with "
            "max_norm=math.inf it only gives it, and it is finite where all gradients are",
            UserWarning,
            code.co_filename,
            code.co_firstlineno,
        )


def warn_of_records_read(names: Sequence[str], keys: Collection[str]) -> None:
    """A warning for each function of the caller's own code that seems to read what only the forward's layers write.

    `names`: of these things; `keys`: attributes and variables that hold them.
    """
    for code in records_read(sys._getframe(1), keys) if names else ():
        warnings.warn_explicit(
            f"{code.co_name} seems to read {', '.join(map(repr, names[:3]))}{', ...' if len(names) > 3 else ''}, which "
            "layers of several stages write: on each rank it is what the layers of its own stage wrote. What is set or "
            "decided by it would differ between stages: put the parts of all ranks together first "
            "(torch.distributed.all_gather_object)",
            UserWarning,
            code.co_filename,
            code.co_firstlineno,
        )


def records_read(frame: FrameType | None, keys: Collection[str]) -> list[CodeType]:
    """Of the user's functions as in `gradients_by_hand`, the ones that take something by these names."""
    return [code for code in _codes_around(frame) if code.co_name not in _OF_THE_FORWARD and _reads(code, keys)]


def _reads(code: CodeType, keys: Collection[str]) -> bool:
    codes = list(_inline(code))
    names = {name for one in codes for name in one.co_names}
    if names.isdisjoint(keys) or names & _AGREED:
        return False
    for one in codes:
        steps = list(dis.get_instructions(one))
        for step, following in pairwise(steps):
            is_emptied = following.argval in _EMPTYING
            if step.argval in keys and step.opname in _LOADS and not is_emptied:
                return True
    return False


def gradients_by_hand(frame: FrameType | None) -> list[CodeType]:
    """Of the user's functions that are under way, and those that they lead to, the ones that seem to do so."""
    return [code for code in _codes_around(frame) if _takes_gradients(code)]


def _codes_around(frame: FrameType | None) -> Iterator[CodeType]:
    """Each once; what is called like a method of an object at hand is taken for it."""
    waiting: list[tuple[CodeType, dict[str, Any]]] = []
    methods: dict[str, list[FunctionType]] = {}
    known: set[type] = set()
    while frame is not None:
        if not _is_libraries(frame.f_globals.get("__name__", "")):
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
                if not _is_libraries(found.__name__):
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
        if base in known or _is_libraries(base.__module__):
            continue
        known.add(base)
        for name, found in vars(base).items():
            if isinstance(found, (FunctionType, staticmethod, classmethod)):
                methods.setdefault(name, []).extend(functions_behind(found))


def _own(functions: Iterable[FunctionType]) -> list[tuple[CodeType, dict[str, Any]]]:
    return [(one.__code__, one.__globals__) for one in functions if not _is_libraries(one.__module__ or "")]


def _is_libraries(module: str) -> bool:
    return is_own(module) or is_installed(module)


def _takes_gradients(code: CodeType) -> bool:
    codes = list(_inline(code))
    names = {name for one in codes for name in one.co_names}
    if names.isdisjoint(_TAKEN) or "grad" not in names or names & _AGREED:
        return False
    return any(
        step.argval == "grad" and step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD"))
        for one in codes
        for step in dis.get_instructions(one)
    )


def _inline(code: CodeType) -> Iterator[CodeType]:
    """The code, and that of comprehensions and lambdas in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType) and one.co_name in _INLINE:
            yield from _inline(one)
