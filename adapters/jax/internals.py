"""The one place that touches what JAX does not promise to keep.

Collectives need an *ordered effect*: JAX then threads a token through everything that a program, its loops
and the programs after it submit, so that all ranks submit in the same order. JAX has no public
way to define one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from multiring.errors import UsageError

try:
    from jax._src import core, dispatch, effects
    from jax._src.lax.lax import _convert_element_type
except ImportError as _error:  # pragma: no cover - another JAX
    raise UsageError(
        f"multiring.jax does not know JAX {jax.__version__} ({_error}); install a JAX that it was tested "
        "with: pip install 'jax>=0.6,<0.11'"
    ) from _error

__all__ = [
    "COLLECTIVE",
    "ThreadEffect",
    "abstract_token",
    "forget_failed_programs",
    "number_in_program",
    "with_weak_type",
]

abstract_token: Any = core.abstract_token


class _CollectiveEffect(effects.Effect):
    def __str__(self) -> str:
        return "multiring"


class ThreadEffect(effects.Effect):
    """Tells which thread runs a compiled program, which JAX says nowhere else.

    JAX looks up the tokens of a program's ordered effects in a dictionary, in the thread that runs the
    program and each time it does. So the hash is asked for there, and `check` may raise.

    Args:
        key: What effects are equal by.
        check: Called in the threads that trace or run a program with this effect.
    """

    def __init__(self, key: tuple[int, str], check: Callable[[], None]) -> None:
        self.key = key
        self.check = check

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ThreadEffect) and other.key == self.key

    def __hash__(self) -> int:
        self.check()
        return hash(self.key)

    def __str__(self) -> str:
        return f"multiring{list(self.key)}"


COLLECTIVE = _CollectiveEffect()
for _allowed in (
    effects.ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _allowed.add_type(_CollectiveEffect)
    _allowed.add_type(ThreadEffect)


def forget_failed_programs() -> None:
    """Forget the tokens of the last program of this thread, which carry its error on to the next one."""
    tokens = dispatch.runtime_tokens.current_tokens
    ours = (_CollectiveEffect, ThreadEffect)
    others = [(effect, token) for effect, token in tokens.items() if not isinstance(effect, ours)]
    tokens.clear()
    tokens.update(others)
    dispatch.runtime_tokens.output_runtime_tokens.clear()


def with_weak_type(array: Any, weak_type: bool) -> jax.Array:
    """The same array, of a type that gives way to others (as Python's numbers do) or of one that does not."""
    made: jax.Array = _convert_element_type(array, array.dtype, weak_type=weak_type)
    return made


class _WithoutCollectives(dict[Any, Any]):
    """What has been lowered for a program, to be used again; functions with collectives are not kept."""

    def __setitem__(self, key: Any, value: Any) -> None:
        found = [getattr(key, "effects", ()), getattr(value, "effects", ())]
        found += [part for part in key if isinstance(part, tuple)] if isinstance(key, tuple) else []
        if not any(COLLECTIVE in part for part in found):
            super().__setitem__(key, value)


def number_in_program(ctx: Any, queue: int) -> tuple[str, int]:
    """The program that is lowered, and the number of this call among its collectives on a queue, from 1.

    JAX lowers a function that a program calls twice once. Each call is to have a number of its own, so
    functions with collectives are lowered for each call; XLA would copy them to where they are called anyway.
    """
    module = ctx.module_context
    for name in ("cached_primitive_lowerings", "lowering_cache"):
        cache = getattr(module, name, None)
        if type(cache) is dict:
            setattr(module, name, _WithoutCollectives(cache))
    name = module.module.operation.attributes["sym_name"].value
    counts = module.cached_primitive_lowerings
    key = "multiring", queue
    counts[key] = counts.get(key, 0) + 1
    return str(name).removeprefix("jit_"), counts[key]
