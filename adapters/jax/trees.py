"""Reduction of pytrees: their arrays travel in buckets, each as it lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import jax
from multiring.gradients.bucketing import ParameterSpec, first_and_more
from multiring.gradients.options import ReducerOptions, SizeKeywords
from multiring.jax.arguments import as_arrays, call_site, check_op, resolve
from multiring.jax.library import number_of
from multiring.jax.primitive import Bucket, Collective, run
from multiring.reductions import explain_arguments
from multiring.state.broadcast import check_root
from multiring.state.buffer_sync import check_mode
from multiring.types import BufferMode, ReduceOpName

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["Reduction", "grouped_allreduce", "named", "named_leaves", "reduce_arrays", "sync_buffers"]

FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Reduction(ReducerOptions):
    """How trees are reduced: by any `op`; names begin with `name`.

    Attributes:
        check_every: Steps between two comparisons of the state; 0: never.
        ordered: See `Collective`.
        site: See `Collective`.
    """

    check_every: int = 0
    ordered: bool = False
    site: str | None = None


def named(name: str | None, otherwise: str) -> dict[str, Any]:
    """How a call is matched: by its name, or by its place in the program if it has none."""
    if name is not None:
        return {"name": name}
    return {"name": otherwise, "ordered": True, "site": call_site()}


def named_leaves(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Names ("layer.weight") and values of the leaves, and the structure."""
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "array" for path, _ in found]
    return names, [leaf for _, leaf in found], structure


@explain_arguments
def grouped_allreduce(
    tree: Any,
    op: ReduceOpName = "sum",
    *,
    comm: Communicator | None = None,
    name: str | None = None,
    **options: Unpack[SizeKeywords],
) -> Any:
    """Reduce all arrays of a pytree over all ranks.

    They travel in buckets of one dtype; a bucket is on its way as soon as its arrays have been computed.

    Args:
        tree: Arrays of the same shapes and dtypes, in the same structure, on all ranks. None is no leaf.
        op: As in `allreduce`.
        comm: Ranks that take part; the world by default.
        name: First word of the buckets' names, by which the ranks' calls are matched; see `allreduce`.
        options: `bucket_bytes`, `prescale` and `postscale`, as in
            `multiring.ReducerOptions`.

    Returns:
        A tree of the same structure.

    Raises:
        UsageError: An array cannot travel, or there is no such reduction.
        JaxRuntimeError: The communication failed; see `allreduce`.
    """
    comm = resolve(comm)
    check_op(comm, op)
    reduction = Reduction.of(options, op=op, **named(name, "grouped_allreduce"))
    names, leaves, structure = named_leaves(tree)
    return structure.unflatten(reduce_arrays(comm, as_arrays(comm, leaves, names), names, reduction))


def sync_buffers(
    tree: Any,
    mode: BufferMode = "broadcast",
    *,
    root: int = 0,
    comm: Communicator | None = None,
    name: str | None = None,
) -> Any:
    """Make the buffers of a model the same on all ranks; inside or outside of a compiled function.

    For what a model holds beside its parameters and updates with this rank's batch alone, such as Flax's
    `batch_stats`. To be called at the end of each training step: evaluation and checkpoints are then the same
    on every rank. Has no derivative. The statistics of `sync_batch_norm` are the same anyway.

    Args:
        tree: Arrays of the same structure, shapes and dtypes on all ranks.
        mode: "broadcast": those of `root`, as PyTorch's DistributedDataParallel does it; "average": averages
            of floating-point arrays over the ranks, others of `root`; "local": nothing.
        root: Rank whose arrays all ranks take over.
        comm: Ranks that train together; the world by default.
        name: See `allreduce`.

    Returns:
        A tree of the same structure.
    """
    comm = resolve(comm)
    check_mode(comm.rank, mode)
    check_root(comm, root)
    if mode == "local" or comm.size == 1:
        return tree
    options = Reduction(op="average", **named(name, "buffers"))
    names, leaves, structure = named_leaves(tree)
    arrays = [jax.lax.stop_gradient(array) for array in as_arrays(comm, leaves, names)]
    averaged = [i for i, array in enumerate(arrays) if mode == "average" and array.dtype.name in FLOATS]
    copied = [i for i in range(len(arrays)) if i not in set(averaged)]
    for members, source in ((averaged, None), (copied, root)):
        part = [arrays[i] for i in members], [names[i] for i in members]
        for i, array in zip(members, reduce_arrays(comm, *part, options, root=source), strict=True):
            arrays[i] = array
    return structure.unflatten(arrays)


def reduce_arrays(
    comm: Communicator,
    arrays: Sequence[jax.Array],
    names: Sequence[str],
    options: Reduction,
    follows: str = "",
    root: int | None = None,
) -> list[jax.Array]:
    """Reduce arrays in buckets. With one rank and no scale they come back as they are.

    `follows` is the name of the bucket that has begun the step, if it is none of these. With a `root` they
    are broadcast from there instead.
    """
    if not arrays or (comm.size == 1 and options.scale == 1.0):
        return list(arrays)
    owned = "" if options.ordered else options.name
    call = Collective(
        "allreduce" if root is None else "broadcast",
        number_of(comm, owned),
        comm.rank,
        comm.size,
        tuple(_buckets(arrays, names, options, comm.size)),
        op=options.op,
        root=-1 if root is None else root,
        prescale=options.prescale,
        postscale=options.postscale,
        follows=follows,
        ordered=options.ordered,
        site=options.site,
        owned=owned,
    )
    return run(call, arrays)


def _buckets(
    arrays: Sequence[jax.Array], names: Sequence[str], options: Reduction, size: int
) -> list[Bucket]:
    """Floating arrays in buckets of limited size, last one first, since the backward pass computes it first;
    behind them the others, one bucket for each dtype."""
    floats = [i for i, array in enumerate(arrays) if array.dtype.name in FLOATS]
    specs = [ParameterSpec(names[i], arrays[i].shape, arrays[i].dtype.name) for i in floats]
    plan = options.plan(specs, range(len(specs) - 1, -1, -1), size)
    groups = [[floats[slot.index] for slot in bucket.slots] for bucket in plan.buckets]
    others = sorted({array.dtype.name for array in arrays} - set(FLOATS))
    groups += [[i for i, array in enumerate(arrays) if array.dtype.name == dtype] for dtype in others]
    buckets: list[Bucket] = []
    for members in filter(None, groups):
        labels = tuple(names[i] for i in members)
        buckets.append(Bucket(bucket_name(options, len(buckets), labels), tuple(members), labels))
    return buckets


def bucket_name(options: Reduction, number: int, labels: Sequence[str]) -> str:
    """The name of a bucket of these arrays."""
    return f"{options.name}[{number}]: {first_and_more(labels)}"
