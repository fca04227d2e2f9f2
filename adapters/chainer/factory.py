"""How a program gets a multi-node optimizer."""

from __future__ import annotations

from typing import Unpack

import chainer
from multiring.chainer.double_buffering import DoubleBufferingOptimizer
from multiring.chainer.groups import Group
from multiring.chainer.optimizer import MultiNodeOptimizer
from multiring.gradients.options import ReducerKeywords, ReducerOptions
from multiring.reductions import explain_arguments
from multiring.types import BufferMode

__all__ = ["create_multi_node_optimizer"]


@explain_arguments
def create_multi_node_optimizer(
    actual_optimizer: chainer.Optimizer,
    communicator: Group = None,
    double_buffering: bool = False,
    zero_fill: bool = True,
    *,
    overlap: bool = True,
    buffers: BufferMode = "broadcast",
    **options: Unpack[ReducerKeywords],
) -> MultiNodeOptimizer:
    """Wrap an optimizer: its updates use gradients averaged over ranks. Takes the place of ChainerMN's.

    Collective if the optimizer is set up already; otherwise `setup` is.

    Args:
        actual_optimizer: Any Chainer optimizer, built alike on every rank.
        communicator: One of `create_communicator`, or a `multiring.Communicator`; the world by default.
        double_buffering: Update with the gradients of the step before, which travel while this one computes.
        zero_fill: Give parameters without a gradient on any rank one of zeros before an update. (Chainer's
            gradient methods do so themselves; it makes a difference to other optimizers.)
        overlap: Let `update(lossfun, ...)` reduce gradients while its backward pass runs.
        buffers: What happens after each reduction to persistent arrays, such as the running statistics of
            batch normalisation: "broadcast": those of the first rank that has data; "average"; "local":
            nothing, ranks evaluate differently.
        options: How to reduce: fields of `multiring.ReducerOptions`, or `average`. `check_every` compares
            parameters, hyperparameters and buffers.

    Returns:
        The wrapper: everything that it does not define is the wrapped optimizer's own.

    Raises:
        UsageError: `communicator` is of another kind, or a dtype cannot be reduced.
        MismatchError: The ranks have different parameters or options.
    """
    reduction = ReducerOptions.of(options)
    kind = DoubleBufferingOptimizer if double_buffering else MultiNodeOptimizer
    return kind(
        actual_optimizer, communicator, reduction, zero_fill=zero_fill, overlap=overlap, buffers=buffers
    )
