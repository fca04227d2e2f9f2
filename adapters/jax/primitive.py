"""The collectives as a primitive of JAX: how they are traced, compiled, differentiated and batched."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from multiring import _core as native
from multiring.errors import UsageError
from multiring.jax.control_flow import counters_around, ffi_call
from multiring.jax.internals import COLLECTIVE, abstract_token, number_in_program, place_of_program
from multiring.jax.library import DONE, PLATFORMS, START, thread_effect
from multiring.reductions import reduce_op

__all__ = [
    "Bucket",
    "Collective",
    "Shape",
    "block_rows",
    "run",
    "site_in_program",
]

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Arrays that are submitted together.

    Attributes:
        name: What the ranks' submissions are matched by.
        members: The numbers of the arrays.
        labels: Their names in messages.
    """

    name: str
    members: tuple[int, ...]
    labels: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Collective:
    """Everything about a call but the arrays.

    Attributes:
        kind: Name of the collective in the core, "reduce_scatter".
        queue: Number of the queue.
        rank: This rank.
        size: Number of ranks.
        buckets: What is submitted together.
        op: Name of the reduction.
        root: Rank that a broadcast comes from.
        prescale: Factor before a reduction.
        postscale: Factor after it.
        sent: Rows to each rank (alltoall).
        received: Rows from each rank (allgather, alltoall).
        follows: Name of the bucket that begins the step, where that is one of an earlier call; its own first
            otherwise.
        ordered: Whether the call has its place in the one order of all ranks; otherwise, as where the program
            has given a name, names alone are matched.
        site: Where the program makes the call: part of the names, together with the call's number in the
            compiled program; None: names stay as they are.
        owned: What belongs to the thread that runs the program: the name that the program has given, or ""
            for all calls without one.
    """

    kind: str
    queue: int
    rank: int
    size: int
    buckets: tuple[Bucket, ...]
    op: str = "sum"
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    follows: str = ""
    ordered: bool = False
    site: str | None = None
    owned: str = ""

    @property
    def keeps_shape(self) -> bool:
        """Whether results have the shapes of the arguments."""
        return self.kind in ("allreduce", "broadcast")

    def result_shape(self, shape: Shape) -> Shape:
        """Shape of a result, of the shape of the argument."""
        if self.keeps_shape:
            return shape
        if self.kind == "reduce_scatter":
            return (block_rows(shape[0], self.size)[self.rank], *shape[1:])
        return (sum(self.received), *shape[1:])

    def derived(self, suffix: str, **changes: Any) -> Collective:
        """The same buckets under other names, with changes; the gradient of a tangent is just a gradient."""
        buckets = (
            dataclasses.replace(bucket, name=f"{bucket.name.removesuffix(' (tangent)')} ({suffix})")
            for bucket in self.buckets
        )
        return dataclasses.replace(self, buckets=tuple(buckets), follows="", **changes)

    def only(self, kept: Sequence[int]) -> Collective:
        """Without the arrays that are not in `kept`; the others are numbered anew."""
        position = {old: new for new, old in enumerate(kept)}
        buckets = []
        for bucket in self.buckets:
            here = [
                (position[i], label)
                for i, label in zip(bucket.members, bucket.labels, strict=True)
                if i in position
            ]
            if here:
                members, labels = zip(*here, strict=True)
                buckets.append(Bucket(bucket.name, members, labels))
        return dataclasses.replace(self, buckets=tuple(buckets))


def block_rows(rows: int, size: int) -> tuple[int, ...]:
    """Rows of each rank's block where an axis is split as evenly as possible, larger blocks first."""
    return tuple(rows // size + (rank < rows % size) for rank in range(size))


# JAX leaves primitives untyped.
collective_p: Any = Primitive("multiring_collective")
collective_p.multiple_results = True


def run(call: Collective, arrays: Sequence[Any]) -> list[Any]:
    """Bind the primitive: one result for each array."""
    return list(collective_p.bind(*arrays, call=call))


@functools.lru_cache(maxsize=4096)
def _compiled(call: Collective) -> Any:
    def outside_of_jit(*arrays: Any) -> list[Any]:
        return run(call, arrays)

    return jax.jit(outside_of_jit)


def _run_now(*arrays: Any, call: Collective) -> Any:
    """Outside of a compiled function: a compiled function of its own."""
    return _compiled(call)(*arrays)


def _infer(*arrays: Any, call: Collective) -> Any:
    results = [jax.core.ShapedArray(call.result_shape(array.shape), array.dtype) for array in arrays]
    return results, {COLLECTIVE, thread_effect(call.queue, call.owned)}


collective_p.def_impl(_run_now)
collective_p.def_effectful_abstract_eval(_infer)


# Derivatives. All collectives but the reductions by minimum, maximum and product are linear.


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], *, call: Collective) -> Any:
    results = run(call, primals)
    found = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    moving = [i for i, primal in enumerate(primals) if jnp.issubdtype(jnp.result_type(primal), jnp.inexact)]
    if all(isinstance(tangents[i], ad.Zero) for i in moving):
        return results, found
    if call.kind in ("allreduce", "reduce_scatter") and call.op not in ("sum", "average"):
        raise UsageError(
            f"rank {call.rank}: {call.kind} '{call.buckets[0].name}' with op '{call.op}' has no "
            "derivative; use 'sum' or 'average', or jax.lax.stop_gradient"
        )
    # Arrays without a tangent take part with zeros: which ones these are may differ between ranks.
    parts = [ad.instantiate_zeros(tangents[i]) for i in moving]
    for i, tangent in zip(moving, run(call.only(moving).derived("tangent"), parts), strict=True):
        found[i] = tangent
    return results, found


def _transpose(cotangents: Sequence[Any], *arguments: Any, call: Collective) -> Any:
    parts = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    if call.kind == "allreduce":
        return run(call.derived("gradient"), parts)
    if call.kind == "broadcast":
        sums = run(call.derived("gradient", kind="allreduce", op="sum", root=-1), parts)
        return sums if call.rank == call.root else [jnp.zeros_like(total) for total in sums]
    shapes = [argument.aval.shape for argument in arguments]
    if call.kind == "reduce_scatter":
        scale = call.prescale * call.postscale / (call.size if call.op == "average" else 1)
        rows = {block_rows(shape[0], call.size) for shape in shapes}
        (received,) = rows  # the public function takes one array
        gathered = run(call.derived("gradient", kind="allgather", received=received), parts)
        return [part * jnp.asarray(scale, part.dtype) for part in gathered]
    if call.kind == "alltoall":
        return run(call.derived("gradient", sent=call.received, received=call.sent), parts)
    if call.received == block_rows(sum(call.received), call.size):
        return run(call.derived("gradient", kind="reduce_scatter", op="sum", received=()), parts)
    begin = sum(call.received[: call.rank])
    sums = run(call.derived("gradient", kind="allreduce", op="sum", received=()), parts)
    return [total[begin : begin + call.received[call.rank]] for total in sums]


ad.primitive_jvps[collective_p] = lambda primals, tangents, **params: _differentiate(
    primals, tangents, **params
)
ad.primitive_transposes[collective_p] = _transpose


def _batch(arrays: Sequence[Any], axes: Sequence[int | None], *, call: Collective) -> Any:
    """Under vmap a call takes the arrays of the whole batch. Rows stay in front."""
    if call.keeps_shape:
        return run(call, arrays), list(axes)
    moved = [
        array if axis is None else jnp.moveaxis(array, axis, 1)
        for array, axis in zip(arrays, axes, strict=True)
    ]
    return run(call, moved), [None if axis is None else 1 for axis in axes]


batching.primitive_batchers[collective_p] = _batch


# Compilation: all starts, one after the other, then the ends. No end holds up the computation of what a later
# start sends, since every end comes after the last start.


def site_in_program(ctx: Any, queue: int, site: str | None) -> tuple[str, str]:
    """What tells the name of a call from those of others: the same on all ranks that run the same program, of
    whatever shapes, and whatever else they have compiled. And the counters of the branches and loops around
    it, a line each."""
    if site is None:
        return "", ""
    program, number = number_in_program(ctx, queue)
    is_compiled = program != "outside_of_jit"
    parts = [f"#{number} of {program}"] if is_compiled else []
    parts += [f"at {site}"] if site else []
    parts += [f"in the function of {place}"] if is_compiled and (place := place_of_program()) else []
    return f" ({' '.join(parts)})" if parts else "", "\n".join(counters_around(ctx, queue))


def _lower(ctx: Any, *operands: Any, call: Collective) -> Any:
    site, inside = site_in_program(ctx, call.queue, call.site)
    attributes: dict[str, Any] = {
        "queue": np.int64(call.queue),
        "kind": np.int64(native.OpKind.__members__[call.kind.upper()].value),
        "op": np.int64(reduce_op(call.op).value),
        "root": np.int64(call.root),
        "prescale": np.float64(call.prescale),
        "postscale": np.float64(call.postscale),
        "alias": True,
        "ordered": np.int64(call.ordered),
        "inside": inside,
    }
    if call.sent:
        attributes["splits"] = np.array(call.sent, np.int64)
    ticket = jax.core.ShapedArray((2,), np.dtype(np.uint32))
    token = ctx.tokens_in.get(COLLECTIVE)
    pending = []
    for number, bucket in enumerate(call.buckets):
        members = bucket.members
        given = [ctx.avals_in[i] for i in members]
        results_of = [ctx.avals_out[i] for i in members]
        # Where results have other shapes, what is sent is kept beside them until the end.
        made = results_of if call.keeps_shape else [*given, *results_of]
        results = ffi_call(
            ctx,
            START,
            [token, *(operands[i] for i in members)],
            [abstract_token, *given],
            [abstract_token, ticket, *made],
            (1, 2),
            name=bucket.name + site,
            labels="\n".join(label.replace("\n", " ") for label in bucket.labels),
            counter=(call.follows or call.buckets[0].name) + site,
            counts=np.int64(number == 0 and not call.follows),
            **attributes,
        )
        token = results[0]
        pending.append((members, made, results_of, results[1:]))
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({COLLECTIVE: token})))
    found: list[Any] = [None] * len(operands)
    landed = token  # one end after the other: they wait in one of XLA's threads, not in all of them
    for members, made, results_of, values in pending:
        avals = [abstract_token, ticket, *made]
        first = 2 + len(made) - len(results_of), 1
        landed, *values = ffi_call(
            ctx, DONE, [landed, *values], avals, [abstract_token, *results_of], first, alias=True
        )
        for i, value in zip(members, values, strict=True):
            found[i] = value
    return found


def _refuse(ctx: Any, *operands: Any, call: Collective) -> Any:
    raise UsageError(
        f"rank {call.rank}: {call.kind} '{call.buckets[0].name}' was called on "
        f"{ctx.module_context.platforms[0]}; collectives take arrays on the CPU and on CUDA's devices, see "
        "jax.default_device"
    )


for _platform in PLATFORMS:
    mlir.register_lowering(collective_p, _lower, platform=_platform, cacheable=False)
mlir.register_lowering(collective_p, _refuse, cacheable=False)
