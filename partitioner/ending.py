"""Foretell what the rest of a forward will set in plain Python: where a stage ends it early, it does that itself.

A counter that the model moves at the end of its forward would else be moved on the last stage alone. The code of the
functions that are under way is read from where they are: what depends on numbers, flags, settings and small buffers is
worked out, and what depends on other tensors, layers or unknown calls is not foretold. Later stages foretell the same
and see what comes.

    for layer in self.layers:        a stage ends here
        x = layer(x)
    if self.training:                True: known
        self.steps += 1              from 6 to 7
        self.updates.add_(1)         likewise, where that is a buffer
    self.largest = float(x.max())    not foretold
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from partitioner.logbook import is_sendable
from partitioner.structures import PLAIN, is_python_object

Key = tuple[int, Any]
"""The id of what holds something, and the name or key under which."""
Foretold = dict[Key, tuple[Any, Any, Any]]
"""Holder, name and value; of a buffer the holder is the module's table of them, the value a `Content`."""


class Content(NamedTuple):
    """What a buffer will hold: known, unlike other tensors."""

    tensor: torch.Tensor


_UNKNOWN: Any = object()
_MAX_DEPTH = 4
_MAX_ELEMENTS = 1024
"""Of a buffer that is foretold."""
_IN_PLACE = frozenset({"add_", "sub_", "mul_", "div_", "copy_", "fill_", "zero_", "clamp_"})
_COPIES = frozenset({"item", "clone", "detach", "long", "int", "float", "double", "bool"})
"""Methods of tensors that are worked out."""
_OUTERMOST = {("partitioner.slicing", "run"), ("partitioner.recording", "record")}
"""Functions that call the model."""
_FOREIGN = frozenset({"torch", "partitioner", *sys.stdlib_module_names} - {"__main__"})
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (min, max, abs, int, float, bool, round)}


def foretold(strangers: Collection[int] = ()) -> Foretold:
    """What the functions of the user's that are under way will set before the forward is over.

    `strangers`: buffers by id that this rank does not have.
    """
    under_way: list[tuple[FrameType, ast.FunctionDef, _Point]] = []
    frame = inspect.currentframe()
    frame = frame and frame.f_back  # not this one, where the instruction is another each time it is asked
    while frame is not None:
        if (id(frame.f_code) << 32) + frame.f_lasti not in _PASSED_BY:
            point = _POINTS.get((id(frame.f_code), frame.f_lasti)) or _pointed(frame)
            if point.function is not None:
                under_way.append((frame, point.function, point))
            if point.is_outermost:
                break
        frame = frame.f_back
    if not any(
        point.may_set and _may_foretell(frame, point.calls) for frame, _, point in under_way
    ):  # most models' way
        return {}
    rest = _Rest(strangers)
    for frame, function, point in under_way:
        if point.may_set or rest.sets:
            rest.resume(frame, function, point.at)
    return {key: one for key, one in rest.sets.items() if one[2] is not _UNKNOWN}


class _Point(NamedTuple):
    """An instruction of a function that is under way."""

    code: CodeType
    function: ast.FunctionDef | None
    """None for those of libraries, and where the source is not to be had."""
    at: tuple[int, int] | None
    """Line and column."""
    may_set: bool
    """Whether it may set something after that."""
    calls: frozenset[tuple[str, str]] | None
    """What of that may be worked out: names of its variables, and of methods that it calls of what they hold; None
    where it sets something itself."""
    is_outermost: bool


_POINTS: dict[tuple[int, int], _Point] = {}
"""What was asked for before, by the id of the code, which is kept: every forward that ends early asks for the same, and
to hash code is to go through all that is in it."""
_PASSED_BY: set[int] = set()
"""Of these the many that are no function of the user's: to fetch no more than that of each is quicker."""


def _pointed(frame: FrameType) -> _Point:
    code, instruction, module = frame.f_code, frame.f_lasti, frame.f_globals.get("__name__", "")
    function = None if module.partition(".")[0] in _FOREIGN else _function_of(code)
    at = None if function is None else _position(code, instruction)
    may_set = function is not None and _may_set_after(function, at)
    calls = frozenset[tuple[str, str]]() if function is None or at is None else _calls_in(_left_of(function, at))
    found = _Point(code, function, at, may_set, calls, (module, code.co_name) in _OUTERMOST)
    if len(_POINTS) >= _MAX_POINTS:
        _POINTS.clear()
        _PASSED_BY.clear()
    _POINTS[id(code), instruction] = found
    if function is None and not found.is_outermost:
        _PASSED_BY.add((id(code) << 32) + instruction)
    return found


_MAX_POINTS = 4096


@functools.lru_cache(maxsize=256)
def _functions_in(file: str) -> dict[int, list[ast.FunctionDef]]:
    """The functions of a file by their first lines."""
    found: dict[int, list[ast.FunctionDef]] = {}
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found.setdefault(first, []).append(node)
    return found


@functools.lru_cache(maxsize=4096)
def _function_of(code: CodeType) -> ast.FunctionDef | None:
    found = _functions_in(code.co_filename).get(code.co_firstlineno, [])
    matching = [node for node in found if node.name == code.co_name]
    return matching[0] if len(matching) == 1 else None


def _calls_in(steps: Sequence[Step]) -> frozenset[tuple[str, str]] | None:
    """See `_Point.calls`. What is forgotten is left out: nothing that it sets is known, nor any variable."""
    found, lost, assigned = set[tuple[str, str]](), set[str](), set[str]()
    for do, step in steps:
        if do is _Rest.lost or do is _Rest.returns:  # nothing after that is known
            break
        worked_out = list(_worked_out_of(step)) if do is _Rest.statement else []
        for one in worked_out:
            if isinstance(one, (ast.Attribute, ast.Subscript)) and not isinstance(one.ctx, ast.Load):
                return None
            if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute):
                holder = one.func.value
                if not isinstance(holder, ast.Name) or holder.id in assigned:
                    return None
                if holder.id not in lost:
                    found.add((holder.id, one.func.attr))
        assigned |= _variables_set(worked_out)
        lost |= _variables_set(ast.walk(step)) - assigned
    return frozenset(found)


def _worked_out_of(one: ast.AST) -> Iterator[ast.AST]:
    """The parts of a statement that `_Rest.statement` does not forget."""
    if isinstance(one, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)):
        yield from ast.walk(one)
    elif isinstance(one, (ast.If, ast.With, ast.Try)):
        if isinstance(one, ast.If):
            yield from ast.walk(one.test)
        for name in ("body", "orelse", "finalbody"):
            for each in getattr(one, name, ()):
                yield from _worked_out_of(each)


def _variables_set(parts: Iterable[ast.AST]) -> set[str]:
    return {one.id for one in parts if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def _may_foretell(frame: FrameType, calls: frozenset[tuple[str, str]] | None) -> bool:
    """Whether one of these methods may be gone into, as the variables are now."""
    if not calls:
        return calls is None
    names, known = frame.f_locals, frame.f_globals
    holders = ((type(names.get(name, known.get(name))), method) for name, method in calls)
    return any(isinstance(_in_class(cls, method), FunctionType) for cls, method in holders)


def _may_set_after(function: ast.FunctionDef, at: tuple[int, int] | None) -> bool:
    """Whether it may do so behind this place, or anywhere in a loop that is under way."""
    if at is None:
        return True
    loops = [one for one in ast.walk(function) if isinstance(one, (ast.For, ast.While))]
    again = min((_start(one) for one in loops if _start(one) <= at <= _end(one)), default=at)
    return any(_end(one) >= again for one in _setting(function))


@functools.lru_cache(maxsize=4096)
def _setting(function: ast.FunctionDef) -> tuple[ast.stmt | ast.expr, ...]:
    """The parts of a function that set attributes or items, or call something for what it does."""
    return tuple(
        one
        for one in ast.walk(function)
        if (isinstance(one, ast.Expr) and not isinstance(one.value, ast.Constant))
        or (isinstance(one, (ast.Attribute, ast.Subscript)) and isinstance(one.ctx, (ast.Store, ast.Del)))
    )


def _position(code: CodeType, instruction: int) -> tuple[int, int] | None:
    line, _, column, _ = next(itertools.islice(code.co_positions(), instruction // 2, None))
    return None if line is None or column is None else (line, column)


def sets_of_its_own(cls: type, method: str = "forward", depth: int = 0) -> frozenset[str]:
    """Attributes of `self` that a method sets or changes in place somewhere, itself or by others that it calls."""
    function = inspect.getattr_static(cls, method, None)
    node = _function_of(function.__code__) if isinstance(function, FunctionType) else None
    if node is None or depth > _MAX_DEPTH or not node.args.args:
        return frozenset()
    own, found = node.args.args[0].arg, set[str]()
    changed = [each for each in _effects(node).stores if isinstance(each, (ast.Attribute, ast.Subscript))]
    for one in changed:
        base: ast.AST = one
        while isinstance(base, ast.Subscript):
            base = base.value
        if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name) and base.value.id == own:
            found.add(base.attr)
    for each in ast.walk(node):
        called = each.func if isinstance(each, ast.Call) else None
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == own:
            found |= sets_of_its_own(cls, called.attr, depth + 1)
    return frozenset(found)


class _Effects(NamedTuple):
    """What a part of a function may do, wherever in it."""

    leaves: bool
    """Return or raise."""
    defined: tuple[str, ...]
    """Functions and classes."""
    handed_over: tuple[ast.expr, ...]
    """What its calls are given by name."""
    stores: tuple[ast.AST, ...]
    """What is set, or called a method of that works in place."""


@functools.lru_cache(maxsize=4096)
def _effects(part: ast.AST) -> _Effects:
    """Looked up, as every forward that ends early asks for the same: to walk the tree takes milliseconds."""
    found = tuple(ast.walk(part))
    return _Effects(
        any(isinstance(one, (ast.Return, ast.Raise)) for one in found),
        tuple(one.name for one in found if isinstance(one, (ast.FunctionDef, ast.ClassDef))),
        tuple(each for one in found if isinstance(one, ast.Call) for each in _handed_over(one)),
        tuple(one for one in found if isinstance(getattr(one, "ctx", None), ast.Store))
        + tuple(each for one in found if isinstance(one, ast.Attribute) for each in _changed_by(one)),
    )


def _handed_over(call: ast.Call) -> list[ast.expr]:
    given = (*call.args, *(word.value for word in call.keywords))
    return [each for each in given if isinstance(each, (ast.Name, ast.Attribute))]


def _changed_by(method: ast.Attribute) -> list[ast.expr]:
    """What methods that work in place, one after another, change."""
    if not method.attr.endswith("_") or method.attr.startswith("_"):
        return []
    one = method.value
    while isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr.endswith("_"):
        one = one.func.value
    return [one]


class _Returned(Exception):
    """The function is over."""


class _Rest:
    """Works through the statements that are left."""

    def __init__(self, strangers: Collection[int] = ()) -> None:
        self.strangers = strangers
        self.sets: Foretold = {}
        self.names: dict[str, Any] = {}
        self.globals: dict[str, Any] = {}
        self.depth = 0
        self.is_certain = True
        """Whether these statements will be come to."""

    def resume(self, frame: FrameType, function: ast.FunctionDef, at: tuple[int, int] | None) -> None:
        self.names, self.globals = dict(frame.f_locals), frame.f_globals
        self.is_certain = at is not None and not frame.f_code.co_flags & _GENERATORS
        with suppress(_Returned):
            for do, one in _left_of(function, at or (frame.f_lineno, 0)):
                do(self, one)

    def lost(self, one: ast.AST) -> None:
        """Where the function is cannot be told: its statements may or may not have run."""
        self.is_certain = False

    def returns(self, one: ast.AST) -> None:
        raise _Returned

    def run(self, block: Sequence[ast.stmt]) -> None:
        for one in block:
            self.statement(one)

    def statement(self, one: ast.AST) -> None:
        if isinstance(one, ast.Assign):
            value = self.value(one.value)
            for target in one.targets:
                self.set(target, value)
        elif isinstance(one, ast.AnnAssign):
            if one.value is not None:
                self.set(one.target, self.value(one.value))
        elif isinstance(one, ast.AugAssign):
            before, more = self.value(one.target), self.value(one.value)
            value = self.operation(type(one.op), before, more)
            self.set(one.target, _stored(before, value) if isinstance(before, Content) else value)
        elif isinstance(one, ast.Expr):
            self.value(one.value)
        elif isinstance(one, ast.If):
            test = _truth(self.value(one.test))
            if test is _UNKNOWN:
                self.forget(one)
            else:
                self.run(one.body if test else one.orelse)
        elif isinstance(one, ast.With):
            self.forget_names([item.optional_vars for item in one.items if item.optional_vars is not None])
            self.run(one.body)
        elif isinstance(one, ast.Try):
            self.run([*one.body, *one.orelse, *one.finalbody])
        elif isinstance(one, ast.Return):
            if one.value is not None:
                self.value(one.value)
            raise _Returned
        elif isinstance(one, ast.Raise):
            self.is_certain = False
        elif not isinstance(one, (ast.Pass, ast.Assert, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)):
            self.forget(one)

    def forget(self, part: ast.AST) -> None:
        """Nothing that this part sets is known any more, nor, where it may return, anything after it."""
        effects = _effects(part)
        self.is_certain = self.is_certain and not effects.leaves
        for name in effects.defined:
            self.names[name] = _UNKNOWN
        if self.sets:
            for each in effects.handed_over:
                self.hand_over(each)
        self.forget_names(effects.stores)

    def hand_over(self, each: ast.expr) -> None:
        """What a call that is not gone into is given, it may change: layers that are yet to come, above all."""
        holder = self.value(each)
        if isinstance(holder, Content):
            self.set(each, _UNKNOWN)
            return
        ids = {id(holder), id(holder._buffers) if isinstance(holder, nn.Module) else 0}
        for key in [key for key in self.sets if key[0] in ids]:
            self.sets[key] = (*self.sets[key][:2], _UNKNOWN)

    def forget_names(self, targets: Sequence[ast.AST]) -> None:
        for target in targets:
            if isinstance(target, (ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Starred)):
                self.set(target, _UNKNOWN)

    def set(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value if self.is_certain else _UNKNOWN
        elif isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self.set(part, _UNKNOWN)
        elif isinstance(target, ast.Starred):
            self.set(target.value, _UNKNOWN)
        elif isinstance(target, (ast.Attribute, ast.Subscript)):
            holder = self.value(target.value)
            if isinstance(holder, Content):
                of_it = isinstance(target, ast.Subscript) and isinstance(target.value, ast.Attribute)
                key = self.value(target.slice) if isinstance(target, ast.Subscript) else _UNKNOWN
                self.set(target.value, _with_item(holder, key, value) if of_it else _UNKNOWN)
                return
            if isinstance(target, ast.Attribute) and isinstance(holder, nn.Module) and target.attr in holder._buffers:
                known = isinstance(value, Content) and self.is_certain
                table: Any = holder._buffers
                self.sets[id(table), target.attr] = (table, target.attr, value if known else _UNKNOWN)
                return
            key = target.attr if isinstance(target, ast.Attribute) else self.value(target.slice)
            is_plain = _sets_plainly(holder, key) if isinstance(target, ast.Attribute) else type(holder) is dict
            if is_plain and isinstance(key, (str, int)):
                known = isinstance(value, PLAIN) and self.is_certain
                self.sets[id(holder), key] = (holder, key, value if known else _UNKNOWN)

    # -- values: plain ones, and things that hold such

    def value(self, one: ast.expr) -> Any:
        if isinstance(one, ast.Constant):
            return one.value
        if isinstance(one, ast.Name):
            return self.names.get(one.id, self.globals.get(one.id, _UNKNOWN))
        if isinstance(one, ast.Attribute):
            holder = self.value(one.value)
            return self.held(holder, one.attr) if _has_attributes(holder) else _UNKNOWN
        if isinstance(one, ast.Subscript):
            holder, key = self.value(one.value), self.value(one.slice)
            if isinstance(holder, Content):
                return _worked_out(operator.getitem, holder, key)
            is_plain = type(holder) is dict and isinstance(key, (str, int))
            return self.held(holder, key) if is_plain else _UNKNOWN
        if isinstance(one, ast.UnaryOp):
            return self.operation(type(one.op), self.value(one.operand))
        if isinstance(one, ast.BinOp):
            return self.operation(type(one.op), self.value(one.left), self.value(one.right))
        if isinstance(one, ast.Compare):
            values = [self.value(each) for each in (one.left, *one.comparators)]
            for op, left, right in zip(one.ops, values, values[1:], strict=False):
                found = self.operation(type(op), left, right)
                if len(values) == 2 or found is _UNKNOWN or not _truth(found):
                    return found
            return True
        if isinstance(one, ast.BoolOp):
            found = _UNKNOWN
            for each in one.values:
                found = self.value(each)
                if _truth(found) is _UNKNOWN:
                    return _UNKNOWN
                if _truth(found) != isinstance(one.op, ast.And):
                    return found
            return found
        if isinstance(one, ast.IfExp):
            test = _truth(self.value(one.test))
            return _UNKNOWN if test is _UNKNOWN else self.value(one.body if test else one.orelse)
        if isinstance(one, ast.Call):
            return self.call(one)
        self.forget(one)
        return _UNKNOWN

    def operation(self, op: type, *values: Any) -> Any:
        return _worked_out(_OPERATORS.get(op), *values)

    def held(self, holder: Any, key: Any) -> Any:
        if (id(holder), key) in self.sets:
            return self.sets[id(holder), key][2]
        table = holder if type(holder) is dict else vars(holder)
        if key in table:
            return table[key]
        if isinstance(holder, nn.Module) and key in holder._modules:
            return holder._modules[key]
        if isinstance(holder, nn.Module) and key in holder._buffers:
            return self.content(holder, key)
        found = _in_class(type(holder), str(key))
        return found if isinstance(found, PLAIN) else _UNKNOWN

    def content(self, holder: nn.Module, key: str) -> Any:
        """What a buffer holds by then."""
        known: Any = self.sets.get((id(holder._buffers), key))
        if known is not None:
            return known[2]
        buffer = holder._buffers[key]
        if buffer is None or id(buffer) in self.strangers or not is_sendable(buffer):
            return _UNKNOWN
        is_large = buffer.is_meta or buffer.numel() > _MAX_ELEMENTS
        if is_large or buffer.requires_grad:
            return _UNKNOWN
        with _disable_current_modes():
            return Content(buffer.detach())

    def call(self, one: ast.Call) -> Any:
        """Plain functions of Python are worked out; a method of the model's own is gone into; all others are not."""
        values = [self.value(each) for each in one.args]
        by_name = {each.arg: self.value(each.value) for each in one.keywords}
        func = one.func
        known = all(isinstance(value, (*PLAIN, Content)) for value in values) and not by_name
        if isinstance(func, ast.Name) and func.id not in self.names and func.id not in self.globals:
            run = _FUNCTIONS.get(func.id)
            return self.applied(run, values) if run is not None and known else _UNKNOWN
        if isinstance(func, ast.Attribute):
            holder = self.value(func.value)
            if holder is math and known:
                return self.applied(getattr(math, func.attr, None), values)
            if isinstance(holder, Content):
                found = self.of_buffer(func, holder, values) if known else _UNKNOWN
                if found is _UNKNOWN:
                    self.forget_names(_changed_by(func))
                return found
            if _has_attributes(holder) and func.attr not in vars(holder):
                method = _in_class(type(holder), func.attr)
                if isinstance(method, FunctionType):
                    return self.method(method, [holder, *values], by_name)
        for each in _handed_over(one) if self.sets else ():
            self.hand_over(each)
        return _UNKNOWN

    def of_buffer(self, func: ast.Attribute, content: Content, values: list[Any]) -> Any:
        """What a method of a buffer returns; one that works in place sets it."""
        method = getattr(torch.Tensor, func.attr, None)
        if func.attr in _IN_PLACE:
            changed = _worked_out(method, _copy(content), *values)
            for target in _changed_by(func):
                self.set(target, changed)
            return changed
        return _worked_out(method, content) if func.attr in _COPIES and not values else _UNKNOWN

    def applied(self, run: Callable[..., Any] | None, values: Sequence[Any]) -> Any:
        found = _worked_out(run, *values)
        return found if isinstance(found, PLAIN) else _UNKNOWN

    def method(self, function: FunctionType, values: list[Any], by_name: dict[str | None, Any]) -> Any:
        node = _function_of(function.__code__)
        if node is None or self.depth >= _MAX_DEPTH or function.__code__.co_flags & _GENERATORS:
            return _UNKNOWN
        if node.decorator_list or not _setting(node):
            return _UNKNOWN
        kept = self.names, self.globals, self.is_certain
        given = dict.fromkeys([each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)], _UNKNOWN)
        names, defaults = [each.arg for each in node.args.args], function.__defaults__ or ()
        given |= dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | (function.__kwdefaults__ or {})
        given |= dict(zip(names, values, strict=False))
        given |= {name: value for name, value in by_name.items() if name is not None}
        self.names, self.globals = given, function.__globals__
        self.depth += 1
        with suppress(_Returned):
            self.run(node.body)
        self.depth -= 1
        self.names, self.globals, self.is_certain = kept
        return _UNKNOWN


def _worked_out(run: Callable[..., Any] | None, *values: Any) -> Any:
    """What this makes of plain values and of what buffers hold; unknown where it is given something else."""
    if run is None or not all(isinstance(value, (*PLAIN, Content)) for value in values):
        return _UNKNOWN
    try:
        if not any(isinstance(value, Content) for value in values):
            found = run(*values)
        else:
            with _disable_current_modes(), torch.no_grad():
                found = run(*(value.tensor if isinstance(value, Content) else value for value in values))
    except Exception:  # then the forward fails there too
        return _UNKNOWN
    if isinstance(found, torch.Tensor):
        return Content(found)
    return found if isinstance(found, PLAIN) else _UNKNOWN


def _copy(content: Content) -> Content:
    with _disable_current_modes():
        return Content(content.tensor.clone())


def _truth(value: Any) -> Any:
    """Whether a condition holds, or that this is not known."""
    return _worked_out(bool, value)


def _stored(before: Content, value: Any) -> Any:
    """A value as it is when it was stored in place of another."""
    return _worked_out(torch.Tensor.copy_, _copy(before), value) if isinstance(value, Content) else _UNKNOWN


def _with_item(content: Content, key: Any, value: Any) -> Any:
    """With another item under a key."""
    changed = _copy(content)
    return _UNKNOWN if _worked_out(operator.setitem, changed, key, value) is _UNKNOWN else changed


Step = tuple[Callable[[_Rest, ast.AST], None], ast.AST]
"""What is done with a statement: it is run, or forgotten, or ends the function."""


@functools.lru_cache(maxsize=4096)
def _left_of(function: ast.FunctionDef, at: tuple[int, int]) -> tuple[Step, ...]:
    """The steps that go on after the statement that is under way there."""
    return tuple(_rest_of(function.body, at))


def _rest_of(block: Sequence[ast.stmt], at: tuple[int, int]) -> Iterator[Step]:
    for k, one in enumerate(block):
        if _start(one) <= at <= _end(one):
            yield from _finish(one, at)
            yield from ((_Rest.statement, each) for each in block[k + 1 :])
            return
    yield _Rest.lost, ast.Pass()
    yield from ((_Rest.forget, each) for each in block)


def _finish(one: ast.stmt, at: tuple[int, int]) -> Iterator[Step]:
    """What is left of a statement: of a loop unknown, and what its end has set by the time it is over."""
    blocks = [getattr(one, name, []) for name in ("body", "orelse", "finalbody")]
    blocks += [handler.body for handler in getattr(one, "handlers", [])]
    inside = next((b for b in blocks if b and _start(b[0]) <= at <= _end(b[-1])), None)
    if isinstance(one, (ast.With, ast.If, ast.Try)) and inside is not None:
        yield from _rest_of(inside, at)
        if isinstance(one, ast.Try):  # its last block runs also where the forward ends early
            yield from ((_Rest.forget, each) for each in one.finalbody)
    elif isinstance(one, ast.Return):
        yield _Rest.returns, one
    else:
        yield _Rest.forget, one


def _has_attributes(holder: Any) -> bool:
    return isinstance(holder, nn.Module) or (holder is not _UNKNOWN and is_python_object(holder))


def _in_class(cls: type, name: str) -> Any:
    """What a class or one that it is derived from has under a name, as it is: no code runs to get it."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return _UNKNOWN


def _sets_plainly(holder: Any, name: str) -> bool:
    """Whether to set this attribute does no more than that."""
    cls: Any = type(holder)
    if not _has_attributes(holder) or hasattr(_in_class(cls, name), "__set__"):
        return False
    if isinstance(holder, nn.Module):
        elsewhere = name in holder._buffers or name in holder._parameters or name in holder._modules
        return not elsewhere and cls.__setattr__ is nn.Module.__setattr__
    return cls.__setattr__ is object.__setattr__


def _start(one: ast.stmt | ast.expr) -> tuple[int, int]:
    return one.lineno, one.col_offset


def _end(one: ast.stmt | ast.expr) -> tuple[int, int]:
    return one.end_lineno or 0, one.end_col_offset or 0
