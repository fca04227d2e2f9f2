"""Arguments of a process group's methods: options, or what stands for them in torch's overloads."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed import ReduceOp

from multiring.errors import UsageError

__all__ = ["Tensors", "by_torch_names", "listed", "only", "only_list", "op_of", "root_of", "seconds_of"]

Tensors = Sequence[torch.Tensor]


# By keyword, torch's versions and overloads call them otherwise.
_NAMES = {
    **dict.fromkeys(["tensor"], "tensors"),
    **dict.fromkeys(["output", "output_tensor", "output_tensors", "output_lists"], "outputs"),
    **dict.fromkeys(["outputTensor", "outputTensors"], "outputs"),
    **dict.fromkeys(["input", "input_tensor", "input_tensors", "input_list"], "inputs"),
    **dict.fromkeys(["inputTensor", "inputTensors"], "inputs"),
    **dict.fromkeys(["root", "op"], "opts"),
    "dstRank": "destination",
    "srcRank": "source",
    "output_split_sizes": "output_sizes",
    "input_split_sizes": "input_sizes",
}


def by_torch_names(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets the method be called with the names that torch has for its arguments."""
    own = inspect.signature(method).parameters
    names = {theirs: ours for theirs, ours in _NAMES.items() if ours in own and theirs not in own}

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if named:
            named = {names.get(name, name): value for name, value in named.items()}
        return method(self, *arguments, **named)

    return call


def listed(given: Tensors | torch.Tensor) -> Tensors:
    """What is given as a list of tensors, or as one."""
    return [given] if isinstance(given, torch.Tensor) else given


def only(given: Tensors | torch.Tensor, what: str) -> torch.Tensor:
    """The one tensor of a list, as functions of process groups take it; or `given` is one.

    Raises:
        UsageError: There is another number of them.
    """
    tensors = listed(given)
    if len(tensors) != 1:
        raise UsageError(f"{what} takes one tensor for each rank, and was given {len(tensors)}")
    return tensors[0]


def only_list(lists: Sequence[Tensors] | Tensors, what: str) -> Tensors:
    """The tensors of a list with one list of them; or they themselves, as an overload takes them.

    Raises:
        UsageError: There is another number of lists.
    """
    if lists and isinstance(lists[0], torch.Tensor):
        return cast("Tensors", lists)
    if len(lists) != 1:
        raise UsageError(f"{what} takes one list of tensors, and was given {len(lists)}")
    return cast("Tensors", lists[0])


def op_of(opts: Any) -> Any:
    """The reduction in options; or `opts` is one itself, or a timeout, or nothing."""
    return ReduceOp.SUM if opts is None or isinstance(opts, timedelta) else getattr(opts, "reduceOp", opts)


def root_of(opts: Any) -> int:
    """The root in options; or `opts` is one itself, or nothing."""
    return int(opts) if isinstance(opts, int) else int(getattr(opts, "rootRank", 0))


def seconds_of(*options: Any) -> float | None:
    """The first timeout that is set: in options, or an option is one itself."""
    for each in options:
        timeout = each if isinstance(each, timedelta) else getattr(each, "timeout", None)
        if isinstance(timeout, timedelta) and timeout > timedelta(0):
            return timeout.total_seconds()
    return None
