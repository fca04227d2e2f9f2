"""How a program gets gradient hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.gradients.bucketing import BUCKET_BYTES, FIRST_BUCKET_BYTES
from multiring.gradients.compression import TopK
from multiring.gradients.source import ReducerOptions
from multiring.reductions import explain_arguments
from multiring.torch.hooks import GradientHooks
from multiring.torch.sparse import sparse_parameters as find_sparse_parameters
from multiring.torch.state import NamedTensors, plain_name
from multiring.types import BufferMode, CommDtypeName

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["named_parameters", "register_gradient_hooks"]


@explain_arguments
def register_gradient_hooks(
    model: torch.nn.Module,
    comm: Communicator | None = None,
    *,
    average: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    prescale: float = 1.0,
    postscale: float = 1.0,
    sparse_parameters: Iterable[str] = (),
    comm_dtype: CommDtypeName | None = None,
    compression: TopK | None = None,
    buffers: BufferMode = "broadcast",
    check_every: int | None = None,
) -> GradientHooks:
    """Reduce the gradients of a model over ranks in every backward call from now on. Collective.

    When `loss.backward()` returns, `parameter.grad` is the gradient averaged over ranks, with the same bits
    on all: it is averaged where autograd has put it. Where the program keeps gradients for the next backward
    call to add to, they become views of buckets, which that call overwrites: clone them to keep them. A rank
    that has no gradient for a parameter counts as zeros; where no rank has one, `parameter.grad` is left
    alone.

    Args:
        model: The model; its parameters have to be on the CPU and alike on all ranks. It may be compiled.
        comm: Ranks that train together; the world by default.
        average: Divide by the number of ranks; otherwise gradients are added.
        bucket_bytes: Limit of a bucket, in bytes.
        first_bucket_bytes: Limit of the first bucket of each dtype, in bytes; small, to start early.
        prescale: Factor applied before the reduction.
        postscale: Factor applied after it.
        sparse_parameters: Names of parameters whose gradients are sparse; `torch.nn.Embedding(sparse=True)`
            is known already. Sparse gradients of other parameters become dense.
        comm_dtype: The dtype in which gradients of float32 cross from host to host: "bfloat16" and
            "float16" round them, "float32" does not (docs/compression.md). MULTIRING_COMM_DTYPE if None.
        compression: `multiring.TopK(ratio)` sends only the largest entries of each bucket and keeps the
            others for the next step (docs/tuning.md). Of gradients of float32 and float64.
        buffers: What happens to the buffers of the model, such as running statistics, after each reduction:
            "broadcast": all ranks take over those of the first rank that has data; "average": floating-point
            ones are averaged; "local": nothing.
        check_every: Compare parameters and buffers over ranks every so many reductions; 0: never; None: as
            MULTIRING_CHECK_EVERY says (100).

    Returns:
        A handle with `remove()`, `no_sync()`, `synchronize()` and `join()`; the hooks live on if it is
        dropped.

    Raises:
        UsageError: No parameters, a device or dtype that cannot be reduced, or parameters with hooks already.
        MismatchError: The ranks have different parameters or options; the message names the first difference.
    """
    comm = resolve(comm)
    op: Literal["average", "sum"] = "average" if average else "sum"
    options = ReducerOptions(
        *(op, bucket_bytes, first_bucket_bytes, prescale, postscale),
        comm_dtype=comm_dtype,
        compression=compression,
        check_every=check_every,
    )
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    marked, given = find_sparse_parameters(model), set(sparse_parameters)
    if unknown := given - set(parameters):
        raise UsageError(
            f"rank {comm.rank}: sparse_parameters names {sorted(unknown)}, which the model does not have"
        )
    sparse = {name for name, parameter in parameters.items() if id(parameter) in marked} | given
    return GradientHooks(parameters, comm, options, sparse=sparse, module=model, buffers=buffers)


def named_parameters(
    source: NamedTensors | None, optimizer: torch.optim.Optimizer, rank: int
) -> dict[str, torch.Tensor]:
    """The parameters of an optimizer with their names in a model, in the order of the model.

    Raises:
        UsageError: The model lacks some of them.
    """
    wanted = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if source is None:
        return {
            f"group{g}.parameter{k}": parameter
            for g, group in enumerate(optimizer.param_groups)
            for k, parameter in enumerate(group["params"])
        }
    if isinstance(source, torch.nn.Module):
        source = source.named_parameters()
    pairs = source.items() if isinstance(source, Mapping) else source
    identities = {id(parameter) for parameter in wanted}
    named = {plain_name(name): parameter for name, parameter in pairs if id(parameter) in identities}
    found = {id(parameter) for parameter in named.values()}
    missing = [tuple(parameter.shape) for parameter in wanted if id(parameter) not in found]
    if missing:
        raise UsageError(
            f"rank {rank}: {len(missing)} of the optimizer's {len(wanted)} parameters are not among the "
            f"named ones, the first of shape {missing[0]}; pass the model or all of its named_parameters()"
        )
    return named
