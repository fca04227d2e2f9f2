"""Tensors that a program hands to collectives."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from multiring.arrays import without_mask

__all__ = ["to_tensor"]


def to_tensor(value: Any) -> Any:
    """The value as a tensor of TensorFlow. Raise UsageError if it is a masked array of NumPy."""
    return tf.convert_to_tensor(without_mask(value))
