"""Functions of torch's that are another's for as long as a stage lives, and torch's own again when all have ended."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Replaced:
    """One function, of a module or a class: `around(plain)` takes its place, where `plain` is what it was before.

    Stages may end in any order: one that is not the last to have come leaves its function in place, going on as
    `plain` does, until those that came later have ended too.
    """

    def __init__(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._has_left = False

    def enter(self) -> None:
        """Nothing where torch, in this version, has no function of that name."""
        plain = getattr(self._owner, self._name, None)
        if plain is None:
            return
        replaced = self._around(plain)

        def ours(*args: Any, **kwargs: Any) -> Any:
            return (plain if self._has_left else replaced)(*args, **kwargs)

        functools.update_wrapper(ours, plain)
        ours.replaced = self  # type: ignore[attr-defined]
        self._plain = plain
        setattr(self._owner, self._name, ours)

    def leave(self) -> None:
        self._has_left = True
        found = getattr(self._owner, self._name, None)
        while (one := getattr(found, "replaced", None)) is not None and one._has_left:
            found = one._plain
            setattr(self._owner, self._name, found)
