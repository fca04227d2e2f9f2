"""What the tests of Keras models share."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tf_keras

import multiring.tensorflow as mt
from multiring import Communicator
from tests.on_ranks import same_everywhere

STEPS, BATCH = 4, 12
LIBRARIES: dict[str, Any] = {"keras": keras, "tf_keras": tf_keras}


def data() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    images = draw.standard_normal((STEPS * BATCH, 5)).astype("float32")
    return images, (images @ draw.standard_normal((5, 3))).argmax(1)


def share(comm: Communicator) -> tuple[Any, Any]:
    """This rank's part of each of the `STEPS` batches."""
    parts = [value.reshape(STEPS, BATCH, *value.shape[1:]) for value in data()]
    width = BATCH // comm.size
    mine = slice(width * comm.rank, width * (comm.rank + 1))
    images, labels = (part[:, mine].reshape(STEPS * width, *part.shape[2:]) for part in parts)
    return images, labels


def make_model(library: Any = keras, seed: int = 0, *, normalises: bool = False, lazy: bool = False) -> Any:
    library.utils.set_random_seed(seed)
    layers = library.layers
    first = [] if lazy else [layers.Input((5,))]
    middle = [layers.BatchNormalization()] if normalises else []
    ends = layers.Dense(8, activation="tanh"), layers.Dense(3, dtype="float32")
    return library.Sequential([*first, ends[0], *middle, ends[1]])


def make_distributed(
    comm: Communicator, optimizer: Any = None, library: Any = keras, *, lazy: bool = False, **options: Any
) -> Any:
    """A compiled model with batch normalisation; its weights differ over ranks."""
    model = make_model(library, comm.rank, normalises=True, lazy=lazy)
    inner = optimizer or library.optimizers.SGD(0.1, momentum=0.9)
    model.compile(mt.DistributedOptimizer(inner, comm), loss_of(library), **options)
    return model


def loss_of(library: Any) -> Any:
    return library.losses.SparseCategoricalCrossentropy(from_logits=True)


def train(model: Any, part: tuple[Any, Any], *callbacks: Any, steps: int = STEPS, **options: Any) -> Any:
    batch = len(part[0]) // steps
    return model.fit(*part, batch, shuffle=False, verbose=0, callbacks=list(callbacks), **options)


def assert_close(model: Any, other: Any, **tolerance: float) -> None:
    for found, wanted in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, **({"rtol": 2e-4, "atol": 2e-5} | tolerance))


def assert_same(comm: Communicator, model: Any) -> None:
    """All ranks have the same bits."""
    assert same_everywhere(comm, [np.asarray(value).tobytes() for value in model.get_weights()])
