"""State from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import multiring
import torch
from multiring.derived import resolve
from multiring.reductions import explain_arguments
from multiring.state.broadcast import StateBuffer, broadcast_state, check_root
from multiring.torch.buffers import (
    byte_view,
    check_writable,
    has_same_bytes,
    overlaps_itself,
    parts_of,
)

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["NamedTensors", "broadcast_optimizer_state", "broadcast_parameters", "plain_name"]

NamedTensors = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@explain_arguments
def broadcast_parameters(
    model_or_named_tensors: NamedTensors, root: int = 0, comm: Communicator | None = None
) -> None:
    """Overwrite tensors of all ranks with those of `root`, in place. Collective.

    Args:
        model_or_named_tensors: A module (all its parameters and buffers), a mapping such as a state dict,
            or pairs of name and tensor; any dtype, shape and strides; in the same order on every rank.
        root: Rank whose values everyone gets.
        comm: Ranks that take part; the world by default.

    Raises:
        UsageError: `root` is not a rank, a tensor is lazy, or one that differs cannot be written to.
        MismatchError: The ranks pass different names, shapes or dtypes.
    """
    comm = resolve(comm)
    tensors = _named_tensors(model_or_named_tensors)
    for name, tensor in tensors.items():
        if torch.nn.parameter.is_lazy(tensor):
            raise multiring.UsageError(
                f"rank {comm.rank}: '{name}' is lazy and has no shape yet; run a batch through the model "
                "first",
                rank=comm.rank,
                tensor=name,
            )
    with torch.no_grad():
        # CPU tensors without gaps are received where they are; others by way of a copy.
        staged = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        buffers = [_buffer(name, tensor) for name, tensor in staged.items()]
        broadcast_state(comm, buffers, root)
        if comm.size == 1:
            return
        for name, tensor in tensors.items():
            if staged[name].data_ptr() != tensor.data_ptr():
                if overlaps_itself(tensor) and has_same_bytes(tensor.cpu(), staged[name]):
                    continue
                check_writable(comm.rank, f"'{name}'", tensor)
                with torch.inference_mode(tensor.is_inference()):
                    tensor.detach().copy_(staged[name])
            elif not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)  # autograd did not see the values change


def _buffer(name: str, tensor: torch.Tensor) -> StateBuffer:
    try:
        return StateBuffer(name, byte_view(tensor), f"{tensor.dtype} {tuple(tensor.shape)}")
    except multiring.UsageError as error:
        raise multiring.UsageError(f"'{name}': {error}") from error
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise multiring.UsageError(
            f"'{name}' is a {type(tensor).__name__}, whose memory is not known here ({error}): give "
            "the other tensors, as pairs of name and tensor"
        ) from error


@explain_arguments
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root: int = 0, comm: Communicator | None = None
) -> None:
    """Give all ranks the optimizer state of `root`: options of the parameter groups, and state per parameter.

    Other ranks need no state of their own: after loading a checkpoint on the root alone, this is all that
    is left to do. Collective.

    Args:
        optimizer: Optimizer of the same parameters, in the same groups, on every rank.
        root: Rank whose state everyone gets.
        comm: Ranks that take part; the world by default.

    Raises:
        UsageError: `root` is not a rank.
        MismatchError: Parameter groups differ over ranks.
    """
    comm = resolve(comm)
    check_root(comm, root)
    if comm.size == 1:
        return
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    shared_sizes = comm.allgather_object(sizes, name="sizes of parameter groups")
    if any(other != sizes for other in shared_sizes):
        raise multiring.MismatchError(
            f"rank {comm.rank}: parameters per group are {shared_sizes} on ranks 0 to {comm.size - 1}; build "
            "the same optimizer on every rank",
            rank=comm.rank,
            operation="broadcast_optimizer_state",
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    position = {id(parameter): number for number, parameter in enumerate(parameters)}
    tensors: dict[str, torch.Tensor] = {}
    skeleton: Any = None
    if comm.rank == root:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        state = {position.get(id(key), key): value for key, value in optimizer.state.items()}
        skeleton = _detach_tensors({"groups": groups, "state": state}, "optimizer", tensors)
    skeleton = comm.broadcast_object(skeleton, root, name="state of the optimizer")
    if comm.rank != root:
        received = _attach_tensors(skeleton, tensors)
        broadcast_parameters(tensors, root, comm)
        for group, options in zip(optimizer.param_groups, received["groups"], strict=True):
            group.update(options)
        optimizer.state.clear()
        for key, value in received["state"].items():
            optimizer.state[parameters[key] if isinstance(key, int) else key] = value
    else:
        broadcast_parameters(tensors, root, comm)


class _Placeholder:
    """Stands for a tensor while the structure around it travels as a pickle."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, str(tensor.device)
        self.stride = tuple(tensor.stride())


def _detach_tensors(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Copy nested containers with placeholders for tensors, which are collected by name."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return _Placeholder(path, value)
    if isinstance(value, Mapping):
        return {key: _detach_tensors(item, f"{path}.{key}", tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_detach_tensors(item, f"{path}.{k}", tensors) for k, item in enumerate(value))
    return value


def _attach_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Inverse of `_detach_tensors`, with new tensors of unset values, which are collected by name."""
    if isinstance(value, _Placeholder):
        tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device)
        tensors[value.name] = tensor
        return tensor
    if isinstance(value, dict):
        return {key: _attach_tensors(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_attach_tensors(item, tensors) for item in value)
    return value


def plain_name(name: str) -> str:
    """The name without what torch.compile puts in front, so that compiled and other ranks agree."""
    return name.replace("_orig_mod.", "")


def _named_tensors(source: NamedTensors) -> dict[str, torch.Tensor]:
    pairs: Iterable[tuple[str, torch.Tensor]]
    if isinstance(source, torch.nn.Module):
        named = [*source.named_parameters(), *source.named_buffers()]
        pairs = [(plain_name(name), tensor) for name, tensor in named]
    else:
        pairs = source.items() if isinstance(source, Mapping) else source
    tensors = ((name, tensor) for name, tensor in pairs if isinstance(tensor, torch.Tensor))
    return dict(part for pair in tensors for part in parts_of(*pair))
