"""Gradients that were reduced already are not reduced again.

In a graph their origin is looked up. Eager tensors have none: there it is remembered whose gradients have
been reduced, and values tell the rest, since reduced gradients are the same bits on all ranks.
"""

from __future__ import annotations

import re
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from multiring.errors import UsageError

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["refuse_reduced", "remember_reduced"]

# What leaves a gradient one: clipping, scaling, adding decay, casts.
_ELEMENTWISE = (
    {"Identity", "IdentityN", "Mul", "MulNoNan", "RealDiv", "DivNoNan", "Maximum"}
    | {"Minimum", "ClipByValue", "Cast", "Neg", "Reshape", "Select", "SelectV2"}
    | {"StopGradient", "CheckNumerics", "AddV2", "Add", "AddN", "Sub"}
)
_CALLS = frozenset(["PartitionedCall", "StatefulPartitionedCall"])
_BUCKET = re.compile(r".* \d+(\[\d+\]|: .* values)")  # names that GradientReduction gives
# Variables by identity whose gradients were reduced by a tape since the last step, or in a function.
_reduced: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_in_functions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def remember_reduced(variables: Sequence[Any]) -> None:
    """A tape has reduced the gradients of these variables."""
    known = _reduced if tf.executing_eagerly() else _in_functions
    for variable in map(_held, variables):
        known[id(variable)] = variable


def refuse_reduced(gradients: Sequence[Any], variables: Sequence[Any], comm: Communicator) -> None:
    """Raise unless these gradients have yet to be reduced.

    Collective in eager mode, if a tape has reduced those of the same variables.

    Raises:
        UsageError: They come from a tape that reduces, or from a `GradientReduction`.
    """
    found = [_values(gradient) for gradient in gradients if gradient is not None]
    if not tf.executing_eagerly():
        if any(_has_origin(value) for value in found):
            raise _error(comm)
        return
    held = {id(variable) for variable in map(_held, variables)}
    suspected = not (held.isdisjoint(_reduced.keys()) and held.isdisjoint(_in_functions.keys()))
    for key in held:
        _reduced.pop(key, None)
    if suspected and comm.size > 1:
        bits = [zlib.crc32(value.numpy().tobytes()) for value in found]
        if all(others == bits for others in comm.allgather_object(bits)) and any(
            value.numpy().any() for value in found
        ):
            raise _error(comm)


def _error(comm: Communicator) -> UsageError:
    return UsageError(
        f"rank {comm.rank}: the gradients that DistributedOptimizer was given have been reduced over "
        "ranks before, by DistributedGradientTape or GradientReduction; wrap the tape or the optimizer, "
        "not both"
    )


def _held(variable: Any) -> Any:
    """TensorFlow's variable inside one of Keras."""
    return getattr(variable, "_value", None) if hasattr(variable, "_value") else variable


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)


def _has_origin(tensor: Any) -> bool:
    """Whether a gradient in a graph comes from a reduction, by way of operations on its elements alone."""
    seen: set[int] = set()
    open_ends = [tensor]
    while open_ends:
        value = open_ends.pop()
        if id(value) in seen or not tf.is_symbolic_tensor(value):
            continue
        seen.add(id(value))
        kind = value.op.type
        if kind == "MultiringAllreduce" and _BUCKET.fullmatch(value.op.get_attr("tensor_name").decode()):
            return True
        open_ends += _sources(value, kind)
    return False


def _sources(value: Any, kind: str) -> Iterator[Any]:
    if kind == "IdentityN":
        yield value.op.inputs[value.value_index]
    elif kind in _ELEMENTWISE:
        # What a gradient is scaled with, such as its global norm, has another shape.
        size = value.shape.num_elements()
        yield from (one for one in value.op.inputs if one.shape.num_elements() == size)
    elif kind in _CALLS:
        function = value.graph._get_function(value.op.get_attr("f").name)
        if function is not None:
            yield function.graph.outputs[value.value_index]
