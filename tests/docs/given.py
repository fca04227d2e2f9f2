"""What the code blocks of the pages take as given: the model, the data and the names of the page's own text.

`GIVEN[framework]` lists, in the order in which they run in one program, a page, the number of the block on
that page and the lines that come before it.
"""

from __future__ import annotations

from typing import NamedTuple


class Block(NamedTuple):
    """A Python block of a page, and what it takes as given."""

    page: str
    number: int
    given: str = ""


TORCH = """
from contextlib import nullcontext
import torch

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))

def loader(rank, ranks):
    draw = torch.Generator().manual_seed(1)
    images, labels = torch.randn(24, 4, generator=draw), torch.arange(24) % 3
    return [(images[k::4][rank::ranks], labels[k::4][rank::ranks]) for k in range(4)]

loss = torch.nn.functional.cross_entropy
"""

TORCH_ACCUMULATION = """
model = Net()
hooks = multiring.torch.register_gradient_hooks(model)
data = loader(comm.rank, comm.size)
parts = [torch.randn(4, 4) for _ in range(3)]
loss = lambda part: model(part).square().mean()
"""

TENSORFLOW_LOOP = """
import tensorflow as tf

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
variables = model.trainable_variables
optimizer = keras.optimizers.SGD(0.1)
loss = lambda scores, y: tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores))
"""

CHAINER_UNEVEN = "batches = [chainer.dataset.concat_examples(train)] * (1 + comm.rank)"

CHAINER_NORM = "model = chainer.Sequential(chainer.links.Linear(4, 3), chainer.links.BatchNormalization(3))"

CAFFE = """
import os

from tests.support import REPOSITORY

os.chdir(REPOSITORY)
"""

PYCAFFE = """
import tempfile
from pathlib import Path
from types import SimpleNamespace

from tests.adapters.caffe import pycaffe_stand_in
from tests.python.caffe import caffe_nets

os.chdir(tempfile.mkdtemp())
caffe_nets.make_solver(Path())
nothing = lambda value: None
caffe = SimpleNamespace(
    SGDSolver=pycaffe_stand_in.SGDSolver,
    set_solver_count=nothing,
    set_solver_rank=nothing,
    set_multiprocess=nothing,
)
path = Path("solver.prototxt")
"""

JAX = """
import jax, jax.numpy as jnp, optax

params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
loss = lambda params, batch: ((batch @ params["w"] + params["b"]) ** 2).mean()
"""

JAX_UNEVEN = """
optimizer = multiring.jax.distribute(optax.adam(1e-3))
state = optimizer.init(params)

@jax.jit
def step(params, state, batch):
    updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params, active=True)
    return optax.apply_updates(params, updates), state

batches = [jnp.ones((4, 4))] * (1 + comm.rank)
"""

JAX_STATISTICS = """
from types import SimpleNamespace

x = jnp.ones((4, 3))
normalise = lambda variables, x, mutable: (x, {"batch_stats": {"mean": x.mean(axis=0)}})
state = SimpleNamespace(apply_fn=normalise, batch_stats={})
"""

JAX_ERRORS = """
optimizer = multiring.jax.distribute(optax.adam(1e-3), name="errors")
state = optimizer.init(params)
step = jax.jit(lambda params, state, batch: optimizer.update(jax.grad(loss)(params, batch), state, params))
"""

HOROVOD = """
import sys

from tests.support import REPOSITORY

sys.path.append(str(REPOSITORY / "integrations/horovod/shim"))  # as `multiring run --horovod` does
"""

PYTENSOR = """
import numpy as np, pytensor, pytensor.tensor as pt

def shared(*shape):
    return pytensor.shared(np.ones(shape), "x".join(map(str, shape)) or "scalar")

x, y = pt.matrix("x"), pt.matrix("y")
w1, b1, w2, b2 = shared(4, 5), shared(5), shared(5, 3), shared(3)
cost = ((pt.dot(pt.tanh(pt.dot(x, w1) + b1), w2) + b2 - y) ** 2).mean()
params = [w1, b1, w2, b2]
adam = sgd = lambda params, grads: [(p, p - 0.01 * g) for p, g in zip(params, grads)]
"""

PYTENSOR_UNEVEN = "velocities, loader = [], [(np.ones((2, 4)), np.ones((2, 3)))] * (1 + comm.rank)"


def _blocks(page: str, *given: str) -> list[Block]:
    """The first blocks of a page, and what each takes as given."""
    return [Block(page, number, text) for number, text in enumerate(given)]


_CRITERION = "criterion, (x, y) = torch.nn.functional.cross_entropy, data[0]"
_LOADER, _NET = "loader = data[: 1 + comm.rank]", "model = Net()"
_SUMS = "grads, sums = pytensor.grad(cost, params), [shared(*p.get_value().shape) for p in params]"

GIVEN: dict[str, list[Block]] = {
    "torch": [
        *_blocks("docs/torch.md", ""),
        *_blocks("docs/reference/torch.md", TORCH + TORCH_ACCUMULATION, _CRITERION, _LOADER, _NET, _NET),
        *_blocks("docs/compression.md", "x, model = torch.ones(3), Net()", _NET),
    ],
    "tensorflow": [
        *_blocks("docs/tensorflow.md", "", TENSORFLOW_LOOP),
    ],
    "chainer": [
        *_blocks("docs/chainer.md", ""),
        *_blocks("docs/reference/chainer.md", CHAINER_UNEVEN, CHAINER_NORM),
    ],
    "caffe": [*_blocks("docs/caffe.md", CAFFE), *_blocks("docs/reference/caffe.md", PYCAFFE)],
    "jax": [
        *_blocks("docs/jax.md", ""),
        *_blocks("docs/reference/jax.md", JAX + JAX_UNEVEN, JAX_STATISTICS, JAX_ERRORS),
    ],
    "horovod": _blocks("docs/horovod.md", HOROVOD),
    "pytensor": [
        *_blocks("docs/pytensor.md", ""),
        *_blocks("docs/reference/pytensor.md", PYTENSOR, "", _SUMS, PYTENSOR_UNEVEN, "", ""),
    ],
}
