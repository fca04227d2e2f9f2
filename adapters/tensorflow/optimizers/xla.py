"""Keras on TensorFlow compiles a model with XLA where it can; XLA cannot run the collectives.

`compile(jit_compile="auto")`, the default, asks one function of Keras whether a model can be compiled, which
looks at the layers alone. It is wrapped here so that it looks at the optimizer too: a model with a
distributed one runs as an ordinary `tf.function`, and `jit_compile=True` gets Keras's own warning that it
was not possible. Nothing else changes, also not for other models of the program.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from multiring.lazy import made_once

__all__ = ["keep_xla_off"]


@made_once
def keep_xla_off() -> None:
    """Make Keras compile no model with XLA whose optimizer is ours. Only the first call does something."""
    if keras.backend.backend() != "tensorflow":
        return  # JAX has its own way into compiled code; Torch does not compile
    try:
        from keras.src.trainers import trainer

        asked = trainer.model_supports_jit
    except (ImportError, AttributeError):  # another Keras: `jit_compile=False` has to be given to compile()
        return

    @functools.wraps(asked)
    def model_supports_jit(model: Any) -> bool:
        from multiring.tensorflow.optimizers.keras import DistributedKerasOptimizer

        optimizer = getattr(model, "optimizer", None)
        ours = isinstance(optimizer, DistributedKerasOptimizer)
        if ours or getattr(optimizer, "uses_collectives", False):
            return False
        return bool(asked(model))

    trainer.model_supports_jit = model_supports_jit
