"""How a program gets a multi-node optimizer."""

from __future__ import annotations

from typing import Literal

import chainer
from multiring.chainer.double_buffering import DoubleBufferingOptimizer
from multiring.chainer.groups import Group
from multiring.chainer.optimizer import MultiNodeOptimizer
from multiring.gradients.bucketing import BUCKET_BYTES, FIRST_BUCKET_BYTES
from multiring.gradients.compression import TopK
from multiring.gradients.source import ReducerOptions
from multiring.reductions import explain_arguments
from multiring.types import BufferMode, CommDtypeName

__all__ = ["create_multi_node_optimizer"]


@explain_arguments
def create_multi_node_optimizer(
    actual_optimizer: chainer.Optimizer,
    communicator: Group = None,
    double_buffering: bool = False,
    zero_fill: bool = True,
    *,
    op: Literal["average", "sum"] = "average",
    prescale: float = 1.0,
    postscale: float = 1.0,
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    overlap: bool = True,
    comm_dtype: CommDtypeName | None = None,
    compression: TopK | None = None,
    buffers: BufferMode = "broadcast",
    check_every: int | None = None,
) -> MultiNodeOptimizer:
    """Wrap an optimizer: its updates use gradients averaged over ranks. Takes the place of ChainerMN's.

    Collective if the optimizer is set up already; otherwise `setup` is.

    Args:
        actual_optimizer: Any Chainer optimizer, built alike on every rank.
        communicator: One of `create_communicator`, or a `multiring.Communicator`; the world by default.
        double_buffering: Update with the gradients of the step before, which travel while this one computes.
        zero_fill: Give parameters without a gradient on any rank one of zeros before an update. (Chainer's
            gradient methods do so themselves; it makes a difference to other optimizers.)
        op: "average" or "sum" of the gradients.
        prescale: Factor applied before the reduction.
        postscale: Factor applied after it.
        bucket_bytes: Limit of a bucket, in bytes.
        first_bucket_bytes: Limit of the first bucket of each dtype, in bytes; small, to start early.
        overlap: Let `update(lossfun, ...)` reduce gradients while its backward pass runs.
        comm_dtype: The dtype in which gradients of float32 cross from host to host: "bfloat16" and
            "float16" round them, "float32" does not (docs/compression.md). MULTIRING_COMM_DTYPE if None.
        compression: `multiring.TopK(ratio)` sends only the largest entries of each bucket and keeps the
            others for the next step (docs/tuning.md). Of gradients of float32 and float64.
        buffers: What happens after each reduction to persistent arrays, such as the running statistics of
            batch normalisation: "broadcast": those of the first rank that has data; "average"; "local":
            nothing, ranks evaluate differently.
        check_every: Compare parameters, hyperparameters and buffers over ranks every so many reductions; 0:
            never; None: as MULTIRING_CHECK_EVERY says (100).

    Returns:
        The wrapper: everything that it does not define is the wrapped optimizer's own.

    Raises:
        UsageError: `communicator` is of another kind, or a dtype cannot be reduced.
        MismatchError: The ranks have different parameters or options.
    """
    options = ReducerOptions(
        *(op, bucket_bytes, first_bucket_bytes, prescale, postscale),
        comm_dtype=comm_dtype,
        compression=compression,
        check_every=check_every,
    )
    kind = DoubleBufferingOptimizer if double_buffering else MultiNodeOptimizer
    return kind(
        actual_optimizer, communicator, options, zero_fill=zero_fill, overlap=overlap, buffers=buffers
    )
