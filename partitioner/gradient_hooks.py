"""Hooks on the gradient of a parameter that several stages use: each stage has a part of it, and they are added later.

    linear        h(a) + h(b) = h(a + b): a factor, a mask of rows; on the parts it comes to the same
    all others    a clamp, a norm, a sign, a counter in a closure of what came: on one device they see the sum

What a hook does is tried out, with gradients as small and as large as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from partitioner.restore import ModelState, hooks_of, kept_by, random_states, set_random_states

_SCALES = (1e-6, 1.0, 1e6)
"""Of the gradients that a hook is tried with; in half precision there is less room."""
_HALF_SCALES = (1e-2, 1.0, 1e2)
_TOLERANCE = 1e-3


def hooks_on(parameter: torch.Tensor) -> tuple[int, ...]:
    """What tells that other hooks are on its gradient than before; () where there are none."""
    return tuple(id(hook) for table in hooks_of(parameter) for hook in table.values())


def hooked(model: nn.Module, shared: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """By name, those of the parameters that have hooks which must see the whole gradient, and which hook that is.

    What the hooks change of the model, and of what they keep themselves, is given back.
    """
    some = [(name, parameter) for name, parameter in shared if parameter.requires_grad and hooks_on(parameter)]
    if not some:
        return {}
    tables = {name: [list(table.values()) for table in hooks_of(parameter)] for name, parameter in some}
    theirs = tuple(kept_by(hook) for hooks, _ in tables.values() for hook in hooks)
    found, state, states = {}, ModelState(model, theirs), random_states()
    state.keep_variables(hook for hooks, _ in tables.values() for hook in hooks)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, parameter in some:
            hooks, later = tables[name]
            other = later or [hook for hook in hooks if not is_linear(hook, parameter)]
            if other:
                found[name] = getattr(other[0], "__qualname__", type(other[0]).__name__)
    state.restore()
    set_random_states(states)
    return found


def is_linear(hook: Callable[[torch.Tensor], Any], parameter: torch.Tensor) -> bool:
    """Whether a hook makes of a sum of gradients the sum of what it makes of each."""
    if parameter.is_meta or not parameter.is_floating_point():
        return False
    generator = torch.Generator(parameter.device).manual_seed(0)

    def made(gradient: torch.Tensor) -> torch.Tensor:
        given = gradient.clone()
        result = hook(given)
        return given if result is None else result

    def drawn(scale: float) -> torch.Tensor:
        return torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype) * scale

    tolerance = max(_TOLERANCE, 8 * torch.finfo(parameter.dtype).eps)
    try:
        for scale in _HALF_SCALES if parameter.dtype == torch.float16 else _SCALES:
            one, other = drawn(scale), drawn(scale)
            parts, whole = [made(one), made(other)], made(one + other)
            size = max(float(result.abs().max()) for result in (*parts, whole))
            if not float((whole - sum(parts)).abs().max()) <= tolerance * size:
                return False
    except Exception:  # whatever a hook raises that is given another gradient than those of training
        return False
    return True


def refusal(name: str, hook: str, stages: str) -> str:
    """Why no cut may be between the users of a parameter."""
    return (
        f"the hook {hook!r} on the gradient of {name!r} is not linear, or runs after accumulation, and the parameter "
        f"is used {stages}, each of which has a part of that gradient only"
    )
