"""Comparison of the training state over ranks, inside of compiled functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from multiring.gradients.options import check_interval
from multiring.jax.arguments import DTYPES, resolve
from multiring.jax.control_flow import ffi_call
from multiring.jax.internals import COLLECTIVE, abstract_token
from multiring.jax.library import CHECK, PLATFORMS, number_of, thread_effect
from multiring.jax.primitive import site_in_program
from multiring.jax.trees import named, named_leaves
from multiring.state.advice import advice_in_general

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["check_leaves", "check_state"]

_KNOWN = set(DTYPES)


@dataclasses.dataclass(frozen=True)
class StateCheck:
    """Everything about a comparison but the arrays.

    Attributes:
        queue: Number of the queue.
        every: Steps between two comparisons.
        labels: Names of the arrays.
        name: What the ranks' comparisons are matched by.
        counter: Steps are counted for each name and number.
        ordered: See `Collective`.
        site: See `Collective`.
        owned: See `Collective`.
    """

    queue: int
    every: int
    labels: tuple[str, ...]
    name: str
    counter: int = 0
    ordered: bool = False
    site: str | None = None
    owned: str = ""


def check_state(
    tree: Any, *, every: int | None = None, comm: Communicator | None = None, name: str | None = None
) -> None:
    """Raise on all ranks unless they hold the same bits: parameters, optimizer state, running statistics.

    To be called once in each training step, inside or outside of a compiled function, by programs that do not
    use `distribute`, which does it. Checksums are compared in steps 2, 4, 8, ... below `every` and in each
    that is a multiple of it; the other steps cost nothing that can be measured.

    Args:
        tree: What has to be the same on all ranks.
        every: Steps between two comparisons; 0: never; None: as MULTIRING_CHECK_EVERY says (100).
        comm: Ranks that train together; the world by default.
        name: See `allreduce`.

    Raises:
        UsageError: `every` is negative.
        JaxRuntimeError: The ranks differ (`MismatchError` in `raise_errors`); the message names the first
            array that differs, and which ranks have what.
    """
    comm = resolve(comm)
    check_leaves(comm, tree, check_interval(comm.rank, every), **named(name, "state check"))


def check_leaves(comm: Communicator, tree: Any, every: int, **matched: Any) -> None:
    """Compare the arrays of a tree every so many calls. A rank that passes none answers the others."""
    if not every or comm.size == 1:
        return
    labels, arrays = [], []
    for label, leaf in zip(*named_leaves(tree)[:2], strict=True):
        if (array := _as_array(leaf)) is not None:
            labels.append(label)
            arrays.append(array)
    owned = "" if matched.get("ordered") else matched["name"]
    check = StateCheck(number_of(comm, owned), every, tuple(labels), owned=owned, **matched)
    check_p.bind(*arrays, check=check)


def _as_array(leaf: Any) -> Any:
    """What the checksum is taken of; None for what is no array and no number."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)
        if leaf.dtype.kind not in "biufcV":
            return None
    return leaf if leaf.dtype.name in _KNOWN else leaf.astype(np.float32)


check_p: Any = Primitive("multiring_state_check")
check_p.multiple_results = True


@functools.lru_cache(maxsize=256)
def _compiled(check: StateCheck) -> Any:
    def outside_of_jit(*arrays: Any) -> list[Any]:
        return list(check_p.bind(*arrays, check=check))

    return jax.jit(outside_of_jit)


def _without_results(arrays: Sequence[Any], *_: Any, check: StateCheck) -> Any:
    """Derivatives and batches: there is nothing to differentiate, and a batch is compared as a whole."""
    check_p.bind(*arrays, check=check)
    return [], []


def _lower(ctx: Any, *operands: Any, check: StateCheck) -> Any:
    token = ctx.tokens_in.get(COLLECTIVE)
    site, inside = site_in_program(ctx, check.queue, check.site)
    name = check.name + site
    results = ffi_call(
        ctx,
        CHECK,
        [token, *operands],
        [abstract_token, *ctx.avals_in],
        [abstract_token],
        (1 + len(operands), 1),
        name=name,
        counter=f"{check.counter} {name}",
        labels="\n".join(label.replace("\n", " ") for label in check.labels),
        queue=np.int64(check.queue),
        every=np.int64(check.every),
        ordered=np.int64(check.ordered),
        inside=inside,
        what="training state",
        advice=advice_in_general(),
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({COLLECTIVE: results[0]})))
    return []


check_p.def_impl(lambda *arrays, check: _compiled(check)(*arrays))
check_p.def_effectful_abstract_eval(
    lambda *arrays, check: ([], {COLLECTIVE, thread_effect(check.queue, check.owned)})
)
ad.primitive_jvps[check_p] = _without_results
batching.primitive_batchers[check_p] = _without_results
for _platform in PLATFORMS:
    mlir.register_lowering(check_p, _lower, platform=_platform, cacheable=False)
