"""What a function's code does with the names it uses, told from its bytecode: reads, sets, or only writes into."""

from __future__ import annotations

import dis
import functools
from collections.abc import Sequence
from types import CodeType
from typing import Final

_STORES = frozenset({dis.opmap["STORE_GLOBAL"], dis.opmap["STORE_DEREF"], dis.opmap["DELETE_GLOBAL"]})
_LOADS: Final = frozenset(
    {"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME"}
)
_SIMPLE: Final = _LOADS | {"LOAD_CONST", "LOAD_SMALL_INT", "PUSH_NULL"}
_MUTE: Final = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "RESUME", "NOT_TAKEN"})
_FORMATS: Final = frozenset({"FORMAT_VALUE", "FORMAT_SIMPLE", "CONVERT_VALUE"})
WRITES: Final = frozenset({"append", "appendleft", "extend", "extendleft", "insert", "add", "update"})
"""Methods of containers that change them and tell nothing of what they hold."""
_ANYTHING: Final = frozenset({"eval", "exec", "globals", "locals", "vars"})


@functools.cache
def names_in(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Global and attribute names that code and functions inside of it use; globals and outer names that they set."""
    loaded, stored = dict.fromkeys(code.co_names), set()
    if not _STORES.isdisjoint(code.co_code[::2]):
        stored = {one.argval for one in dis.get_instructions(code) if one.opcode in _STORES}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner, inner_stored = names_in(constant)
            loaded |= dict.fromkeys(inner)
            stored |= inner_stored
    return tuple(loaded), frozenset(stored)


@functools.cache
def reads_of(code: CodeType, name: str) -> frozenset[str] | None:
    """Attributes that code, and functions inside of it, read of what `name` stands for; None: they read the thing.

    Nothing is read where a container or an attribute is only written into, as those do who collect what passes:

    >>> source = "def hook(module, args, output): seen[module] = output; log.append(output); box.of[1].add(box.key)"
    >>> code = next(one for one in compile(source, "", "exec").co_consts if isinstance(one, CodeType))
    >>> [sorted(reads_of(code, name)) for name in ("seen", "log", "box")], reads_of(code, "output")
    ([[], [], ['key']], None)
    """
    if not _ANYTHING.isdisjoint(code.co_names):
        return None
    read: set[str] = set()
    instructions = [one for one in dis.get_instructions(code) if one.opname not in _MUTE]
    for k, one in enumerate(instructions):
        if one.argval == name and one.opname in _LOADS:
            is_written, attribute = _followed(instructions[k + 1 :], name)
            if not is_written:
                if attribute is None:
                    return None
                read.add(attribute)
        elif isinstance(one.argval, tuple) and name in one.argval and "LOAD" in one.opname:
            return None
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and name in (*constant.co_freevars, *constant.co_names):
            inner = reads_of(constant, name)
            if inner is None:
                return None
            read |= inner
    return frozenset(read)


def _followed(rest: Sequence[dis.Instruction], name: str) -> tuple[bool, str | None]:
    """Whether what was just loaded is written into, by whatever path; the first attribute on that path.

    `depth` counts what lies on the stack from the loaded thing up; keys are above it.
    """
    depth, attribute = 1, None
    for k, one in enumerate(rest):
        if _is_added_to(rest[k:], depth, None if attribute else name):
            return True, attribute
        if depth == 1 and one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if one.argval in WRITES:
                return True, attribute
            attribute = attribute or str(one.argval)
        elif (depth == 1 and one.opname == "STORE_ATTR") or (depth == 2 and one.opname == "STORE_SUBSCR"):
            return True, attribute
        else:
            depth = _above(one, depth)
            if not depth:
                break
    return False, attribute


def _above(one: dis.Instruction, depth: int) -> int:
    """The depth after an instruction that works on what lies above the first thing alone, or takes its item; else 0."""
    name, arg = one.opname, one.arg or 0
    after = 0
    if name in _SIMPLE or (name in ("PRECALL", "CALL") and depth > 1):
        after = depth + dis.stack_effect(one.opcode, one.arg)
        after = after if after > 1 else 0  # else the thing itself was called or passed
    elif name == "BINARY_SUBSCR" and depth > 1:
        after = depth - 1
    elif name in ("BUILD_STRING", "BUILD_TUPLE", "BUILD_LIST") and depth > arg:
        after = depth - arg + 1
    elif depth > 1 and (name == "LOAD_ATTR" or (name in _FORMATS and not arg & 4)):
        after = depth
    return after


def _is_added_to(rest: Sequence[dis.Instruction], depth: int, name: str | None) -> bool:
    """Whether this is `thing.attribute += value`, `thing[key] += value` or `name += value`: nothing is told of it."""
    names = [(one.opname, one.argval) for one in rest]
    if depth == 1 and names[0] == ("COPY", 1) and names[1][0] == "LOAD_ATTR":
        return _ends(rest[2:], ["SWAP", "STORE_ATTR"], names[1][1])
    if depth == 2 and names[:3] == [("COPY", 2), ("COPY", 2), ("BINARY_SUBSCR", None)]:
        return _ends(rest[3:], ["SWAP", "SWAP", "STORE_SUBSCR"])
    return (
        depth == 1 and name is not None and any(_ends(rest, [store], name) for store in ("STORE_DEREF", "STORE_GLOBAL"))
    )


def _ends(rest: Sequence[dis.Instruction], closing: list[str], name: str | None = None) -> bool:
    """Whether a value is made, added, and put back by these instructions, the last of them under `name`."""
    depth = 1
    for k, one in enumerate(rest):
        if one.opname == "BINARY_OP":
            put = rest[k + 1 : k + 1 + len(closing)]
            told = [each.opname for each in put] == closing and name in (None, put[-1].argval)
            return depth == 2 and told
        depth = _above(one, depth)
        if not depth:
            break
    return False
