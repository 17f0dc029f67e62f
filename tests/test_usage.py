"""What code only writes into is told from what it reads."""

from __future__ import annotations

from typing import Any

import pytest

from partitioner.usage import reads_of

WRITTEN = {
    "append": "x.append(y)",
    "key": "x[y] = z",
    "key of a call": "x[id(y)] = z",
    "key of an attribute": "x[y.name] = z",
    "key in a text": "x[f'{y}.{z}'] = z",
    "item of an item": "x[y][z] = y",
    "list in a dict": "x[y].append((y, z))",
    "attribute": "x.last = y",
    "list of an attribute": "x.a.b.append(y)",
    "in a function inside": "(lambda: x.append(y))()",
    "count": "x.count += 1",
    "count by key": "x[y] += z",
    "count by key of an attribute": "x.of[y] += len(z)",
    "not named": "y.x = z",
}
READ = {
    "length": "y = len(x)",
    "item": "y = x[0]",
    "item by method": "y = x.get(z)",
    "default of an item": "x.setdefault(y, z)",
    "the thing": "y = x",
    "returned": "return x",
    "passed on": "f(x)",
    "called": "x(y)",
    "as a key": "y[x] = z",
    "as a value": "y[z] = x",
    "as an attribute of another": "y.z = x",
    "truth": "if x: y = 0",
    "added to itself": "x[y] += x[z]",
    "added elsewhere": "y.count += x",
    "moved on": "y = x.count + 1",
    "loop": "for y in x: pass",
    "last one": "y = x.pop()",
    "in a function inside": "y = lambda: x[0]",
    "key chosen on the way": "x[y if z else 0] = y",
    "by a name in text": "y = eval('x')",
    "item of an item": "y = x[y][z]",
}
PARTLY = {"if x.on: x.seen[y] = z": {"on"}, "x.add(x.scale)": {"scale"}, "x.go(y)": {"go"}}


def reads(body: str, around: str) -> frozenset[str] | None:
    """By a function of this body; x, y and z are globals, or `around` it."""
    space: dict[str, Any] = {}
    exec(f"def outer({around}):\n    def f():\n        {body}\n    return f", space)
    return reads_of(space["outer"](*around.split(",") if around else ()).__code__, "x")


@pytest.mark.parametrize("around", ["", "x,y,z"], ids=["globals", "closure"])
def test_writing_is_no_reading(around: str) -> None:
    around_read = around.replace(",y", "")
    assert {name: reads(body, around) for name, body in WRITTEN.items()} == dict.fromkeys(WRITTEN, frozenset())
    assert [name for name, body in READ.items() if reads(body, around_read) == frozenset()] == []
    assert {body: reads(body, around) for body in PARTLY} == PARTLY
