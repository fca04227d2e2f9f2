"""The parameters of a link by name, and the specifications of them that ranks compare."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import numpy as np

import chainer
from multiring.chainer.arrays import on_device
from multiring.errors import UsageError
from multiring.gradients.bucketing import ParameterSpec

__all__ = ["fill_with_zeros", "identities", "named_parameters", "specifications"]


def named_parameters(link: chainer.Link) -> dict[str, chainer.Parameter]:
    """Return the parameters of a link by path ("block/conv/W"), each once, in ChainerMN's order."""
    found: dict[int, tuple[str, chainer.Parameter]] = {}
    for path, parameter in sorted(link.namedparams(), key=itemgetter(0)):
        found.setdefault(id(parameter), (path.lstrip("/"), parameter))
    return dict(found.values())


def identities(parameters: Mapping[str, chainer.Parameter]) -> list[tuple[str, int, bool]]:
    """Return the name and identity of each parameter, and whether it is initialised: a model in which these
    are the same has the same parameters."""
    return [(name, id(p), p.is_initialized) for name, p in parameters.items()]


def fill_with_zeros(parameters: Mapping[str, chainer.Parameter]) -> None:
    """Give every initialised parameter without a gradient one of zeros."""
    for parameter in parameters.values():
        if parameter.is_initialized and parameter.grad is None:
            parameter.grad = parameter.xp.zeros_like(parameter.array)


def specifications(
    rank: int, parameters: Mapping[str, chainer.Parameter], dtype: np.dtype[Any] | None = None
) -> list[ParameterSpec]:
    """Return the specifications that ranks compare, one for each initialised parameter.

    Args:
        rank: For messages.
        parameters: By name.
        dtype: That of the gradients on their way; None: the one that they have.

    Raises:
        UsageError: An array is of ChainerX.
    """
    return [_specification(rank, name, p, dtype) for name, p in parameters.items() if p.is_initialized]


def _specification(
    rank: int, name: str, parameter: chainer.Parameter, dtype: np.dtype[Any] | None
) -> ParameterSpec:
    array = parameter.array
    if not isinstance(array, np.ndarray) and not on_device(array):
        raise UsageError(
            f"rank {rank}: parameter '{name}' is an array of {type(array).__module__}; gradients of NumPy "
            "and CuPy arrays are reduced: move the model with to_cpu() or to_gpu()"
        )
    return ParameterSpec(name, tuple(array.shape), (array.dtype if dtype is None else dtype).name)
