"""State and objects from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from multiring.horovod.objects import broadcast_object
from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.torch.checks import settle
from multiring.horovod.torch.handles import synchronize
from multiring.horovod.torch.moves import broadcast_async_

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrites tensors of all ranks with those of `root_rank`, in place.

    Args:
        params: A state dict, or `model.named_parameters()`. What is None or no tensor is left alone.
        root_rank: Rank of the job whose values everyone gets.
        process_set: Ranks that take part.

    Raises:
        ValueError: `params` is something else.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        pairs = [pair if isinstance(pair, tuple) else (None, pair) for pair in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")  # noqa: TRY004
    base = "" if all(name for name, _ in pairs) else process_set.operations().auto_name()
    copies = []
    handles = []
    for k, (name, tensor) in enumerate(pairs):  # the position counts what is no tensor on this rank, too
        if not isinstance(tensor, torch.Tensor):
            continue
        if not tensor.is_contiguous():
            settle([tensor], process_set)
        whole = tensor.detach().contiguous()
        if whole.data_ptr() != tensor.data_ptr():
            copies.append((tensor, whole))
        title = f"broadcast.{name}" if name else f"{base}.{k}"
        handles.append(broadcast_async_(whole, root_rank, title, process_set))
    for handle in handles:
        synchronize(handle)
    settle([tensor for tensor, _ in copies], process_set, is_written=True)
    with torch.no_grad():
        for tensor, whole in copies:
            tensor.copy_(whole)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Gives all ranks the optimizer state of `root_rank`, with the options of its parameter groups.

    Nothing is stepped: where the optimizer of `root_rank` has no state yet, those of all ranks have none.

    Raises:
        ValueError: It is an LBFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")  # noqa: TRY004
    # Where a checkpoint is loaded on the root alone, the others have no tensors to receive into: the state
    # travels as an object, which needs none.
    state = broadcast_object(_on_host(optimizer.state_dict()), root_rank, "optimizer_state")
    for given, own in zip(state["param_groups"], optimizer.param_groups, strict=False):
        # What is loaded of the state goes to the device of its parameter.
        given.update({key: _where(own.get(key), value) for key, value in given.items()})
    optimizer.load_state_dict(state)


def _on_host(state: Any) -> Any:
    """A state without tensors of a device, which may have another number on another rank."""
    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: _on_host(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(_on_host(value) for value in state)
    return [_on_host(value) for value in state] if isinstance(state, list) else state


def _where(own: Any, option: Any) -> Any:
    """An option of a parameter group, its tensors on the devices of those of this rank's own."""
    if isinstance(option, torch.Tensor) and isinstance(own, torch.Tensor):
        return option.to(own.device)
    if isinstance(option, tuple) and isinstance(own, tuple) and len(own) == len(option):
        return tuple(_where(mine, each) for mine, each in zip(own, option, strict=True))
    return option
