"""Modules and modes of autograd that cannot be trained with gradient hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from multiring.errors import UsageError

__all__ = ["aborted_in_use", "check_autograd", "check_module", "check_one_device", "frozen_meanwhile"]

# By where they are defined, so that a program that has not imported them need not.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"),
)


def check_module(module: torch.nn.Module, rank: int) -> None:
    """Raise UsageError for parts that reduce gradients themselves, or change weights in forward()."""
    for name, part in module.named_modules():
        where = f"module '{name}'" if name else "the model"
        for home, kind in _WRAPPERS:
            wrapper = getattr(sys.modules.get(home), kind, None)
            if wrapper is not None and isinstance(part, wrapper):
                raise UsageError(
                    f"rank {rank}: {where} is a {kind}, which reduces gradients itself: they would be "
                    "reduced twice; register hooks on the model without it, or leave out multiring's hooks"
                )
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.max_norm is not None:
            raise UsageError(
                f"rank {rank}: {where} is an {type(part).__name__} with max_norm={part.max_norm:g}, which "
                "changes the rows that forward() looks up, different ones on each rank: ranks would drift "
                "apart; leave max_norm out and limit all rows after each step of the optimizer, as by "
                "torch.renorm(weight, 2, 0, max_norm)"
            )


def check_one_device(devices: Iterable[tuple[str, torch.device]], rank: int) -> None:
    """Raise UsageError unless all parameters are on one device; the CPU counts as one.

    Autograd calls the hooks of each CUDA device in a thread of its own, and those of the CPU in the thread of
    backward(): the threads would reduce at the same time, in an order that differs between ranks.

    Args:
        devices: Of the parameters that require a gradient: name and device.
        rank: This rank.
    """
    first: tuple[str, torch.device] | None = None
    for name, device in devices:
        first = first or (name, device)
        if device != first[1]:
            raise UsageError(
                f"rank {rank}: parameter '{name}' is on {device}, and parameter '{first[0]}' on {first[1]}; "
                "gradients of one model are reduced on one device only: move the model to one of them with "
                "model.to() before registering it",
                rank=rank,
                tensor=name,
            )


def check_autograd(rank: int) -> None:
    """Raise UsageError in a backward pass that does not end where hooks see it end."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")  # not imported by us: it takes a second
    if compiled is not None and compiled.in_compiled_autograd_region:
        raise UsageError(
            f"rank {rank}: gradients are not reduced in a backward pass that compiled autograd has "
            "rewritten; leave out torch._dynamo.config.compiled_autograd (torch.compile of the model works "
            "without it)"
        )


def frozen_meanwhile(rank: int, name: str) -> UsageError:
    """What to raise where a parameter that requires no gradient has got one."""
    return UsageError(
        f"rank {rank}: parameter '{name}' has got a gradient, but does not require one: it was frozen "
        "between the forward and the backward pass; freeze it before forward",
        rank=rank,
        tensor=name,
    )


def aborted_in_use(rank: int, name: str) -> UsageError:
    """What to raise where the program has kept a gradient of a pass that was aborted."""
    return UsageError(
        f"rank {rank}: a backward pass ended with an exception while the gradient of '{name}' was on its "
        "way, which may have overwritten what the program has done to it since; call "
        "zero_grad(set_to_none=True) after such an exception",
        rank=rank,
        tensor=name,
    )
