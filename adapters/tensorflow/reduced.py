"""Gradients that were reduced already are not reduced again.

The reduction marks its results with the variable that they are gradients of. In a graph the mark is found
behind operations, too: what is computed from reduced gradients and constants alone is the same on all ranks.
Where anything else takes part, the program may well mean it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from multiring.errors import UsageError

__all__ = ["mark_reduced", "refuse_reduced"]

_MARK = "_multiring_reduced"
_CONSTANTS = frozenset(["Const", "VariableShape"])
_CALLS = frozenset(["PartitionedCall", "StatefulPartitionedCall"])


def mark_reduced(gradients: Sequence[Any], variables: Sequence[weakref.ref[Any]]) -> None:
    """These are the reduced gradients of these variables; a gradient may be None."""
    for gradient, variable in zip(gradients, variables, strict=True):
        for tensor in _tensors(gradient):
            setattr(tensor, _MARK, variable)


def refuse_reduced(gradients: Sequence[Any], variables: Sequence[Any], rank: int) -> None:
    """Raise if one of these gradients of these variables was reduced before.

    Raises:
        UsageError: It comes from a tape that reduces, or from a `GradientReduction`.
    """
    for gradient, variable in zip(gradients, variables, strict=False):
        if any(_is_reduced(tensor, held(variable)) for tensor in _tensors(gradient)[:1]):
            raise UsageError(
                f"rank {rank}: the gradients that DistributedOptimizer was given have been reduced over "
                "ranks before, by DistributedGradientTape or GradientReduction; wrap the tape or the "
                "optimizer, not both"
            )


def held(variable: Any) -> Any:
    """TensorFlow's variable inside one of Keras."""
    return getattr(variable, "_value", None) if hasattr(variable, "_value") else variable


def _tensors(gradient: Any) -> list[Any]:
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [] if gradient is None else [tf.convert_to_tensor(gradient)]


def _is_reduced(tensor: Any, variable: Any) -> bool:
    """Whether a tensor is the reduced gradient of a variable, or is made of that and of what is the same on
    all ranks: other reduced gradients, and constants."""
    is_own = False
    seen: set[int] = set()
    found = [tensor]
    for value in found:  # the nearest first: a gradient of this rank ends at a variable or an argument soon
        mark = getattr(value, _MARK, None)
        if mark is not None:
            is_own = is_own or mark() is variable
        elif not tf.is_symbolic_tensor(value):
            return False
        elif id(value) not in seen and value.op.type not in _CONSTANTS:
            seen.add(id(value))
            sources = _sources(value)
            if not sources:
                return False
            found += sources
    return is_own


def _sources(value: Any) -> list[Any]:
    """What a tensor in a graph is a function of; none if that cannot be said."""
    op = value.op
    if op.type in _CALLS:
        function = value.graph._get_function(op.get_attr("f").name)
        return [] if function is None else [function.graph.outputs[value.value_index]]
    return [] if op.op_def.is_stateful else list(op.inputs)
