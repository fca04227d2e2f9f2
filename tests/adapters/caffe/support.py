"""A solver of pycaffe's shape in plain NumPy, for the tests of the adapter: no Caffe needed."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring import Communicator
from multiring.caffe import SolverCallback

Array = NDArray[Any]
SMALL: dict[str, Any] = {"bucket_bytes": 64}


class FakeBlob:
    """Gives a new array at each access, as pycaffe does."""

    def __init__(self, data: Array) -> None:
        self._data = data
        self._diff = np.zeros_like(data)

    @property
    def data(self) -> Array:
        return self._data[...]

    @property
    def diff(self) -> Array:
        return self._diff[...]


class FakeLayer:
    def __init__(self, kind: str, blobs: Sequence[FakeBlob]) -> None:
        self.type = kind
        self.blobs = list(blobs)


class FakeNet:
    """Layers by name, bottom to top. `backward` adds gradients layer by layer, from top to bottom."""

    def __init__(self, layers: Mapping[str, FakeLayer]) -> None:
        self._layer_names = list(layers)
        self.layers = list(layers.values())
        self._callbacks: list[Callable[[int], None]] = []

    @property
    def params(self) -> OrderedDict[str, list[FakeBlob]]:
        pairs = zip(self._layer_names, self.layers, strict=True)
        return OrderedDict((name, layer.blobs) for name, layer in pairs if layer.blobs)

    def after_backward(self, callback: Callable[[int], None]) -> None:
        self._callbacks.append(callback)

    def clear_param_diffs(self) -> None:
        for blobs in self.params.values():
            for blob in blobs:
                blob.diff[...] = 0

    def backward(self, gradients: Mapping[str, Sequence[Array]], skip: Iterable[str] = ()) -> None:
        """Run the layers' backward passes; those in `skip` do not run."""
        for index in range(len(self.layers) - 1, -1, -1):
            name = self._layer_names[index]
            if name in skip:
                continue
            for blob, gradient in zip(self.layers[index].blobs, gradients.get(name, ()), strict=False):
                blob.diff[...] += gradient
            for callback in self._callbacks:
                callback(index)


class FakeSolver:
    """Calls back in Caffe's order; `update` is the part behind `on_gradients_ready`."""

    def __init__(self, net: FakeNet, rate: float = 0.1, momentum: float = 0.0) -> None:
        self.net = net
        self.iter = 0
        self.rate, self.momentum = rate, momentum
        self._history: dict[int, Array] = {}  # Caffe's holds the learning rate
        self.test_nets: list[FakeNet] = []
        self._callbacks: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def add_callback(self, on_start: Callable[[], None], on_gradients_ready: Callable[[], None]) -> None:
        self._callbacks.append((on_start, on_gradients_ready))

    def start(self) -> None:
        for on_start, _ in self._callbacks:
            on_start()

    def gradients_ready(self) -> None:
        for _, on_gradients_ready in self._callbacks:
            on_gradients_ready()

    def update(self, rate: float) -> None:
        done: set[int] = set()
        for blobs in self.net.params.values():
            for blob in blobs:
                key = blob.data.__array_interface__["data"][0]
                if key in done and blob.data.size:
                    continue  # shared
                done.add(key)
                step = self.momentum * self._history.get(key, np.zeros_like(blob.diff)) + rate * blob.diff
                self._history[key] = step
                blob.data[...] -= step
        self.iter += 1

    def apply_update(self) -> None:
        self.update(self.rate)

    def reduce(self, passes: Iterable[Mapping[str, Sequence[Array]]]) -> None:
        """An iteration up to the update, whose backward passes have these gradients."""
        self.net.clear_param_diffs()
        self.start()
        for gradients in passes:
            self.net.backward(gradients)
        self.gradients_ready()

    def step(self, passes: Iterable[Mapping[str, Sequence[Array]]]) -> None:
        self.reduce(passes)
        self.apply_update()


def blob(*shape: int, dtype: Any = np.float32, order: Any = "C") -> FakeBlob:
    return FakeBlob(np.zeros(shape, dtype, order=order))


def make_solver() -> FakeSolver:
    """A net with a bias, a BatchNorm layer, a shared weight, and a blob without elements."""
    shared = blob(3, 5)
    layers = {
        "data": FakeLayer("Input", []),
        "conv": FakeLayer("Convolution", [blob(4, 2, 3, 3), blob(4)]),
        "norm": FakeLayer("BatchNorm", [blob(4), blob(4), blob(1)]),
        "twin_a": FakeLayer("InnerProduct", [shared]),
        "empty": FakeLayer("InnerProduct", [blob(0, 5)]),
        "twin_b": FakeLayer("InnerProduct", [copy.copy(shared)]),
        "loss": FakeLayer("SoftmaxWithLoss", []),
    }
    return FakeSolver(FakeNet(layers))


def add_callback(solver: Any, comm: Communicator, **options: Any) -> SolverCallback:
    """Register a callback with the solver."""
    callback = SolverCallback(solver, comm, **options)
    solver.add_callback(*callback)
    return callback


def make_pair(comm: Communicator, **options: Any) -> tuple[FakeSolver, SolverCallback]:
    """A solver and its callback."""
    solver = make_solver()
    return solver, add_callback(solver, comm, **options)


def draw(seed: int) -> dict[str, list[Array]]:
    """Gradients of every layer in one backward pass; small integers, so that sums are exact."""
    generator = np.random.default_rng(seed)

    def values(*shape: int) -> Array:
        return generator.integers(-8, 8, shape).astype(np.float32)

    return {
        "conv": [values(4, 2, 3, 3), values(4)],
        "twin_a": [values(3, 5)],
        "empty": [values(0, 5)],
        "twin_b": [values(3, 5)],
    }


def expect(net: FakeNet, passes: list[list[dict[str, list[Array]]]]) -> None:
    """The diffs are the averages over ranks of the sums over passes; shared weights are counted once."""

    def total(name: str, number: int = 0) -> Array:
        return sum(one[name][number] for rank in passes for one in rank) / len(passes)

    for twin in ("twin_a", "twin_b"):
        wanted = total("twin_a") + total("twin_b")
        np.testing.assert_allclose(net.params[twin][0].diff, wanted, rtol=1e-6)
    for k in (0, 1):
        np.testing.assert_allclose(net.params["conv"][k].diff, total("conv", k), rtol=1e-6)


def reduce_and_check(comm: Communicator, solver: FakeSolver, seed: int = 0) -> None:
    """An iteration up to the update, whose gradients are averages."""
    mine = [[draw(seed + rank)] for rank in range(comm.size)]
    solver.reduce(mine[comm.rank])
    expect(solver.net, mine)


def bits(net: Any) -> list[bytes]:
    """All weights, to compare them exactly."""
    return [one.data.tobytes() for blobs in net.params.values() for one in blobs]
