"""Small functions by the name of the module that they have in Horovod."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

__all__: list[str] = []

_has_eager = True
_make_subgraph = tf.function


def _executing_eagerly() -> bool:
    return bool(tf.executing_eagerly())


def _cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function once for each choice of arguments, in graphs and outside of them."""
    found: dict[Any, Any] = {}

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        key = args, _executing_eagerly()
        if key not in found:
            found[key] = function(*args)
        return found[key]

    return wrapper
