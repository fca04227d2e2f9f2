"""Models with a distributed optimizer are saved with the plain one, and loaded where multiring is not."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tf_keras

import multiring.tensorflow as mt
from multiring import Communicator
from multiring.tensorflow import callbacks
from tests.adapters.tensorflow.test_tensorflow_keras import loss_of, make_model, share, weights_of

# Loads the models that it is told of, and ends with the process that started it.
LOAD_WITHOUT_MULTIRING = """
import sys
import keras, tf_keras

for line in sys.stdin:
    library, path = line.split()
    model = {"keras": keras, "tf_keras": tf_keras}[library].models.load_model(path)
    assert not [name for name in sys.modules if name.partition(".")[0] == "multiring"]
    optimizer = model.optimizer
    print(type(optimizer).__name__, type(optimizer).__module__, int(optimizer.iterations.numpy()), flush=True)
"""


@functools.cache
def process_without_multiring() -> subprocess.Popen[str]:
    """Imports the libraries once for all tests."""
    command = [sys.executable, "-c", LOAD_WITHOUT_MULTIRING]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def load_without_multiring(name: str, path: Path) -> list[str]:
    process = process_without_multiring()
    assert process.stdin is not None
    assert process.stdout is not None
    print(name, path, file=process.stdin, flush=True)
    return process.stdout.readline().split()


@pytest.mark.parametrize(
    ("name", "suffix", "kind", "options"),
    [
        ("keras", ".keras", "Adam", {"backward_passes_per_step": 2}),
        ("keras", ".keras", "LossScaleOptimizer", {}),
        ("keras", ".h5", "Adam", {}),
        ("tf_keras", ".h5", "Adam", {}),
    ],
)
def test_a_saved_model_loads_without_multiring(
    comm: Communicator, name: str, suffix: str, kind: str, options: dict[str, Any]
) -> None:
    """What is saved is the plain optimizer; wrapped again, it goes on where the other one was."""
    library: Any = {"keras": keras, "tf_keras": tf_keras}[name]
    model, plain = make_model(library), library.optimizers.Adam(0.01)
    if kind == "LossScaleOptimizer":
        plain = library.optimizers.LossScaleOptimizer(plain, initial_scale=4.0)
    model.compile(mt.DistributedOptimizer(plain, comm, **options), loss_of(library))
    assert isinstance(model.optimizer, type(plain))
    model.fit(*share(comm), 6, verbose=0, shuffle=False)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"model{suffix}"
        model.save(path)
        loaded = library.models.load_model(path)
        if comm.rank == 0:
            kind_found, module, steps = load_without_multiring(name, path)
            assert (kind_found, module.partition(".")[0]) == (kind, name)
            assert int(steps) == int(model.optimizer.iterations.numpy()) > 0
    assert type(loaded.optimizer) is type(plain)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    if (name, suffix) == ("keras", ".h5"):
        return  # Keras 3 builds the optimizers of such files for no variables
    loaded.optimizer = mt.DistributedOptimizer(loaded.optimizer, comm, **options)
    held = loaded.optimizer.inner_optimizer.variables, model.optimizer.inner_optimizer.variables
    for found, wanted in zip(*held, strict=True):
        np.testing.assert_array_equal(found.numpy(), wanted.numpy())
    for one in (model, loaded):
        one.fit(*share(comm), 6, verbose=0, shuffle=False)
    for found, wanted in zip(weights_of(loaded), weights_of(model), strict=True):
        np.testing.assert_array_equal(found, wanted)


class StepsItself(keras.Model):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        return x

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": keras.ops.mean(batch[0])}


def test_a_plain_optimizer_under_fit_is_told(comm: Communicator) -> None:
    start = callbacks.BroadcastInitialState(comm=comm)

    def warnings_of(model: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model.fit(*share(comm), 6, epochs=1, verbose=0, callbacks=[start])
        return [str(one.message) for one in found if "gradients are not reduced" in str(one.message)]

    model, other = make_model(), StepsItself()
    for one in (model, other):
        one.compile(keras.optimizers.Adam(), loss_of(keras))
    assert warnings_of(other) == []
    (told,) = warnings_of(model)
    assert "the optimizer is a plain Adam" in told
    model.optimizer = mt.DistributedOptimizer(model.optimizer, comm)
    assert warnings_of(model) == []
