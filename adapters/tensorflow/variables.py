"""Variables of TensorFlow and of Keras, told by what they can do: Keras may run on another backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from multiring.gradients.model_check import ADVICE

__all__ = ["NAMES_ADVICE", "buffers_of", "describe_variables", "named_variables", "to_numpy"]

Variables = Any
NAMES_ADVICE = (
    f"{ADVICE}; Keras numbers the layers without a name by how many the process has made: where a rank "
    "has made another model before, name the layers, or call keras.utils.clear_session() first"
)


def named_variables(source: Variables) -> dict[str, Any]:
    """Variables by unique names.

    Args:
        source: A model or anything else with `weights` or `variables`, a mapping, or a sequence of variables.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, Iterable):
        source = getattr(source, "weights", None) or source.variables
    found = list(source() if callable(source) else source)
    names = unique_names([_name(variable) for variable in found])
    return dict(zip(names, found, strict=True))


def unique_names(names: Sequence[str]) -> list[str]:
    """The names; those that have occurred before with a number."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return result


def describe_variables(variables: Sequence[Any]) -> list[tuple[str, tuple[int, ...], str]]:
    """Unique name, shape and dtype of each variable."""
    names = unique_names([_name(variable) for variable in variables])
    return [
        (name, tuple(int(extent) for extent in variable.shape), _dtype(variable))
        for name, variable in zip(names, variables, strict=True)
    ]


def buffers_of(model: Any) -> dict[str, Any]:
    """What the layers of a model hold beside what is trained, such as moving statistics, by unique names.

    Without the weights of frozen layers, the states of metrics and the seeds of random layers.
    """
    if isinstance(model, Iterable | Mapping):
        return named_variables(model)
    if not hasattr(model, "_flatten_layers"):
        trained = {id(variable) for variable in model.trainable_variables}
        return named_variables([variable for variable in model.variables if id(variable) not in trained])
    weights = {id(variable) for variable in model.non_trainable_weights}
    found = {}
    for layer in model._flatten_layers():
        own = getattr(layer, "_non_trainable_variables", None)  # of Keras 3; the other is of tf_keras
        for variable in layer._non_trainable_weights if own is None else own:
            if id(variable) in weights:
                found[id(variable)] = variable
    return named_variables(list(found.values()))


def to_numpy(variable: Any) -> np.ndarray[Any, Any]:
    """A C-ordered copy of a variable's value."""
    value = variable.numpy() if hasattr(variable, "numpy") else variable
    return np.array(value, order="C")


def _name(variable: Any) -> str:
    path = getattr(variable, "path", None)  # Keras's own; its `name` is not unique
    return str(path or getattr(variable, "name", "variable")).removesuffix(":0")


def _dtype(variable: Any) -> str:
    return str(getattr(variable.dtype, "name", variable.dtype)).removeprefix("torch.")
