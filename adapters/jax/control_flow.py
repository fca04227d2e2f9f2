"""Branches and loops around collectives: all ranks have to enter them in the same steps.

`lax.cond` around a collective may skip it in this step on one rank and in the next one on another. Each
makes as many calls then, and the k-th of one rank would meet the k-th of another, which is of another step.
So a native handler counts how often each branch or loop that contains collectives is reached, and the calls
in it carry that number: where ranks differ in it, they get a mismatch. Calls with a name of the program's
own are matched by that alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import jax
from jax.interpreters import mlir
from multiring.jax.internals import (
    COLLECTIVE,
    CONTROL_FLOW,
    ThreadEffect,
    abstract_token,
    kept_with_program,
    number_in_program,
)
from multiring.jax.library import ENTER, PLATFORMS

__all__ = ["counters_around", "ffi_call"]

_AROUND = "multiring", "control flow"


def ffi_call(
    ctx: Any,
    target: str,
    operands: Sequence[Any],
    avals_in: Any,
    avals_out: Any,
    first: tuple[int, int],
    **attributes: Any,
) -> list[Any]:
    """One call; arrays from operand `first[0]` on share memory with the results from `first[1]` on."""
    count = len(operands) - first[0]
    rule = jax.ffi.build_ffi_lowering_function(
        target,
        has_side_effect=True,
        operand_output_aliases={first[0] + i: first[1] + i for i in range(count)}
        if attributes.pop("alias", False)
        else {},
    )
    call = rule(ctx.replace(avals_in=avals_in, avals_out=avals_out), *operands, **attributes)
    return list(call.results)


def counters_around(ctx: Any, queue: int) -> list[str]:
    """The counters of the branches and loops around a call that is lowered, the outermost first.

    What is reached at most once each time that a branch around it is taken needs no counter of its own.
    """
    found, repeated = [], True
    for kind, counters in kept_with_program(ctx).get(_AROUND, []):
        if repeated:
            found.append(counters[queue])
        repeated = kind == "while"
    return found


def _queues_inside(params: dict[str, Any]) -> list[int]:
    """The queues to which a branch or loop submits calls that have no name."""
    parts = params["branches"] if "branches" in params else (params["cond_jaxpr"], params["body_jaxpr"])
    keys = {effect.key for part in parts for effect in part.effects if isinstance(effect, ThreadEffect)}
    return sorted(queue for queue, name in keys if not name)


def _counted(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """How a branch or loop is lowered: it is counted first if it contains collectives."""

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        counters = {}
        tokens = ctx.tokens_in
        for queue in _queues_inside(params):
            program, number = number_in_program(ctx, queue, kind)
            counters[queue] = f"{kind} #{number} of {program}"
            attributes = {"queue": np.int64(queue), "counter": counters[queue]}
            types = [abstract_token], [abstract_token]
            (token,) = ffi_call(ctx, ENTER, [tokens.get(COLLECTIVE)], *types, (1, 1), **attributes)
            tokens = tokens.update_tokens(mlir.TokenSet({COLLECTIVE: token}))
        if not counters:
            return original(ctx, *operands, **params)
        around = kept_with_program(ctx).setdefault(_AROUND, [])
        around.append((kind, counters))
        inner = ctx.replace(tokens_in=tokens)
        try:
            results = original(inner, *operands, **params)
        finally:
            around.pop()
        ctx.set_tokens_out(inner.tokens_out)
        return results

    return lower


for _kind, (_primitive, _rule) in CONTROL_FLOW.items():
    for _platform in PLATFORMS:
        mlir.register_lowering(_primitive, _counted(_kind, _rule), platform=_platform)
