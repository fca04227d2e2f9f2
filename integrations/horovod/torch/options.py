"""How gradients are reduced, from the arguments of `DistributedOptimizer`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from multiring.horovod.process_sets import ProcessSet
from multiring.horovod.torch.compression import Compressor

__all__ = ["NOT_PICKLED", "OptimizerOptions", "load_shared"]

Parameter = torch.Tensor

NOT_PICKLED = (
    "a DistributedOptimizer cannot be pickled or copied, because it has hooks at the model's parameters: "
    "save optimizer.state_dict(), make the optimizer anew, wrap it, and load the state"
)


@dataclass(frozen=True)
class OptimizerOptions:
    """What a distributed optimizer needs to know.

    Attributes:
        named: Pairs of name and parameter.
        groups: Parameters that are reduced together; those that are in none are reduced alone.
        compression: What gradients are made of on their way.
        passes: Backward calls for each reduction.
        op: Average, Sum or Adasum.
        predivide: What an average divides by before the reduction.
        sparse_as_dense: Whether sparse gradients are reduced as dense ones.
        process_set: Ranks that reduce.
    """

    named: Sequence[tuple[str, Parameter]]
    groups: Sequence[Sequence[Parameter]]
    compression: type[Compressor]
    passes: int
    op: int
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]] | None,
        groups: Any,
        **options: Any,
    ) -> OptimizerOptions:
        """Options whose names and groups fit the optimizer.

        Raises:
            ValueError: They do not.
        """
        named = _named(optimizer, named_parameters)
        required = [p for _, p in named if p.requires_grad]
        return cls(named, _groups(groups, required), **options)


def load_shared(
    optimizer: torch.optim.Optimizer, load: Callable[[Any], object], state_dict: dict[str, Any]
) -> None:
    """Loads into the parameter groups and state that the wrapped optimizer has as well."""
    groups, state = optimizer.param_groups, optimizer.state
    load(state_dict)
    groups[:] = optimizer.param_groups
    loaded = dict(optimizer.state)
    state.clear()
    state.update(loaded)
    optimizer.param_groups, optimizer.state = groups, state


def _named(
    optimizer: torch.optim.Optimizer, given: Iterable[tuple[str, Parameter]] | None
) -> list[tuple[str, Parameter]]:
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if given is None:
        return [(f"allreduce.noname.{k}", parameter) for k, parameter in enumerate(own)]
    named = list(given)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    twice = sorted(name for name, count in Counter(name for name, _ in named).items() if count > 1)
    if twice:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: " + ", ".join(twice)
        )
    known = {id(parameter) for _, parameter in named}
    unnamed = [str(id(parameter)) for parameter in own if id(parameter) not in known]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object "
            "ids: " + ", ".join(unnamed)
        )
    return named


def _groups(given: Any, parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    if given is None:
        return []
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        count = min(given, len(parameters))
        size, extra = divmod(len(parameters), count) if count else (0, 0)
        # Backward comes from the last layer to the first; the parts are of neighbours.
        ends = [size * k + min(k, extra) for k in range(count + 1)]
        return [list(parameters[i:j]) for i, j in itertools.pairwise(ends)]
    if not isinstance(given, list):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")  # noqa: TRY004
    seen: set[int] = set()
    required = {id(parameter) for parameter in parameters}
    for group in given:
        if not isinstance(group, list | tuple) or not all(isinstance(p, torch.Tensor) for p in group):
            raise ValueError("groups must consist of torch.Tensor.")
        for parameter in group:
            if id(parameter) in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(id(parameter))
    # Of one dtype each: mixed ones are reduced by parts anyway, and what needs no gradient is not reduced.
    return [[p for p in group if id(p) in required] for group in given]
