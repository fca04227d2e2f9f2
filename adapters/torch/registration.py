"""How a program gets gradient hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Unpack

import torch
from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.gradients.options import ReducerKeywords, ReducerOptions
from multiring.reductions import explain_arguments
from multiring.torch.hooks import GradientHooks
from multiring.torch.sparse import sparse_parameters as find_sparse_parameters
from multiring.torch.state_broadcast import NamedTensors, plain_name
from multiring.types import BufferMode

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["named_parameters", "register_gradient_hooks"]


@explain_arguments
def register_gradient_hooks(
    model: torch.nn.Module,
    comm: Communicator | None = None,
    *,
    sparse_parameters: Iterable[str] = (),
    buffers: BufferMode = "broadcast",
    **options: Unpack[ReducerKeywords],
) -> GradientHooks:
    """Reduce the gradients of a model over ranks in every backward call from now on. Collective.

    When `loss.backward()` returns, `parameter.grad` is the gradient averaged over ranks, with the same bits
    on all: it is averaged where autograd has put it, and no later call writes to it, but for autograd, which
    adds to what is there. A rank that has no gradient for a parameter counts as zeros; where no rank has one,
    `parameter.grad` is left alone.

    Args:
        model: The model; its parameters have to be alike on all ranks, and on one device: the CPU or a CUDA
            device. It may be compiled.
        comm: Ranks that train together; the world by default.
        sparse_parameters: Names of parameters whose gradients are sparse; `torch.nn.Embedding(sparse=True)`
            is known already. Sparse gradients of other parameters become dense.
        buffers: What happens to the buffers of the model, such as running statistics, after each reduction:
            "broadcast": all ranks take over those of the first rank that has data; "average": floating-point
            ones are averaged; "local": nothing.
        options: How to reduce: fields of `multiring.ReducerOptions`, or `average`. `check_every` compares
            parameters and buffers.

    Returns:
        A handle with `remove()`, `no_sync()`, `synchronize()` and `join()`; the hooks live on if it is
        dropped.

    Raises:
        UsageError: No parameters, several devices, a device or dtype that cannot be reduced, or parameters
            with hooks already.
        MismatchError: The ranks have different parameters or options; the message names the first difference.
    """
    comm = resolve(comm)
    reduction = ReducerOptions.of(options)
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    marked, given = find_sparse_parameters(model), set(sparse_parameters)
    if unknown := given - set(parameters):
        raise UsageError(
            f"rank {comm.rank}: sparse_parameters names {sorted(unknown)}, which the model does not have"
        )
    sparse = {name for name, parameter in parameters.items() if id(parameter) in marked} | given
    return GradientHooks(parameters, comm, reduction, sparse=sparse, module=model, buffers=buffers)


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
