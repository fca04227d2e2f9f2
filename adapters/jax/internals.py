"""The one place that touches what JAX does not promise to keep.

Collectives need an *ordered effect*: JAX then threads a token through everything that a program, its loops
and the programs after it submit, so that all ranks submit in the same order. JAX has no public
way to define one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from multiring.errors import UsageError

try:
    from jax._src import core, dispatch, effects
    from jax._src.interpreters.pxla import MeshExecutable
    from jax._src.lax.control_flow.conditionals import _cond_lowering, cond_p
    from jax._src.lax.control_flow.loops import _while_lowering, while_p
    from jax._src.lax.lax import _convert_element_type
except ImportError as _error:  # pragma: no cover - another JAX
    raise UsageError(
        f"multiring.jax does not know JAX {jax.__version__} ({_error}); install a JAX that it was tested "
        "with: pip install 'jax>=0.6,<0.11'"
    ) from _error

__all__ = [
    "COLLECTIVE",
    "CONTROL_FLOW",
    "ThreadEffect",
    "abstract_token",
    "forget_failed_programs",
    "kept_with_program",
    "number_in_program",
    "place_of_program",
    "with_weak_type",
]

abstract_token: Any = core.abstract_token
# What runs a part of a program in some evaluations only, or several times, and how JAX lowers it.
CONTROL_FLOW: dict[str, tuple[Any, Callable[..., Any]]] = {
    "cond": (cond_p, _cond_lowering),
    "while": (while_p, _while_lowering),
}


class _CollectiveEffect(effects.Effect):
    def __str__(self) -> str:
        return "multiring"

    def __repr__(self) -> str:
        """What JAX's error says of a program on several devices."""
        return (
            "collectives of multiring, which works with one device per process: start more processes "
            "instead, or move the arrays to one device with jax.device_put"
        )


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

    __repr__ = __str__


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


_fast_call = MeshExecutable.create_cpp_call


def _create_cpp_call(self: Any, params: Any) -> Any:
    """Programs that were compiled ahead are called without Python from the second time on. JAX 0.10 omits
    the tokens of ordered effects there, and XLA refuses the call."""
    ordered = getattr(self.unsafe_call, "ordered_effects", ())
    return None if any(isinstance(e, _CollectiveEffect) for e in ordered) else _fast_call(self, params)


MeshExecutable.create_cpp_call = _create_cpp_call  # type: ignore[method-assign]


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


def kept_with_program(ctx: Any) -> dict[Any, Any]:
    """What is known of the program that is lowered; it lives as long as the lowering.

    JAX lowers a function that a program calls twice once. Each call is to have a number of its own, so
    functions with collectives are lowered for each call; XLA would copy them to where they are called anyway.
    """
    module = ctx.module_context
    for name in ("cached_primitive_lowerings", "lowering_cache"):
        cache = getattr(module, name, None)
        if type(cache) is dict:
            setattr(module, name, _WithoutCollectives(cache))
    kept: dict[Any, Any] = module.cached_primitive_lowerings
    return kept


def number_in_program(ctx: Any, queue: int, kind: str = "call") -> tuple[str, int]:
    """The program that is lowered, and the number of this call among its collectives on a queue, from 1; or
    that of what else has this `kind`."""
    counts = kept_with_program(ctx)
    name = ctx.module_context.module.operation.attributes["sym_name"].value
    key = "multiring", queue, kind
    counts[key] = counts.get(key, 0) + 1
    return str(name).removeprefix("jit_"), counts[key]


def place_of_program() -> str:
    """Return file and line of the function that is compiled, which two functions of one name differ by; ""
    where JAX does not say. To be called while JAX lowers it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "lower_jaxpr_to_module":
        frame = frame.f_back
    jaxpr = None if frame is None else getattr(frame.f_locals.get("jaxpr"), "jaxpr", None)
    said = str(
        getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None) or ""
    )  # "f at /path/a.py:7"
    _, found, place = said.rpartition(" at ")
    return Path(place).name if found else ""
