"""Which Keras TensorFlow has under `tf.keras`."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["is_tf_keras"]


def is_tf_keras() -> bool:
    """Whether `tf.keras` is tf_keras, as with TF_USE_LEGACY_KERAS=1, and not Keras 3."""
    return str(tf.keras.layers.Layer.__module__).startswith("tf_keras")
