"""A solver of pycaffe's shape in plain NumPy, for the tests of the adapter: no Caffe needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring import Communicator
from multiring.caffe import SolverCallback

__all__ = [
    "SMALL",
    "FakeBlob",
    "FakeLayer",
    "FakeNet",
    "FakeSolver",
    "add_callback",
    "bits",
    "blob",
    "draw",
    "expect",
    "make_solver",
    "run_and_check",
]

Array = NDArray[Any]
SMALL: dict[str, Any] = {"bucket_bytes": 64, "first_bucket_bytes": 64}


class FakeBlob:
    """Gives a new array at each access, as pycaffe does."""

    def __init__(self, data: Array, diff: Array | None = None) -> None:
        self._data = data
        self._diff = np.zeros_like(data) if diff is None else diff

    @property
    def data(self) -> Array:
        return self._data[...]

    @property
    def diff(self) -> Array:
        return self._diff[...]

    def share(self) -> FakeBlob:
        """Another blob over the same memory, as layers have that share weights."""
        return FakeBlob(self._data, self._diff)


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
    """Calls back in Caffe's order; `update` is the part behind `on_gradients_ready`.

    Attributes:
        momentum: Caffe's: it holds the learning rate.
    """

    def __init__(self, net: FakeNet, rate: float = 0.1, momentum: float = 0.0) -> None:
        self.net = net
        self.iter = 0
        self.rate, self.momentum = rate, momentum
        self._history: dict[int, Array] = {}
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

    def step(self, passes: Iterable[Mapping[str, Sequence[Array]]]) -> None:
        """One iteration whose backward passes have these gradients."""
        self.net.clear_param_diffs()
        self.start()
        for gradients in passes:
            self.net.backward(gradients)
        self.gradients_ready()
        self.apply_update()


def blob(*shape: int, dtype: Any = np.float32, order: Any = "C") -> FakeBlob:
    return FakeBlob(np.zeros(shape, dtype, order=order), np.zeros(shape, dtype, order=order))


def make_solver() -> FakeSolver:
    """A net with a bias, a BatchNorm layer, a shared weight, and a blob without elements."""
    shared = blob(3, 5)
    return FakeSolver(
        FakeNet(
            {
                "data": FakeLayer("Input", []),
                "conv": FakeLayer("Convolution", [blob(4, 2, 3, 3), blob(4)]),
                "norm": FakeLayer("BatchNorm", [blob(4), blob(4), blob(1)]),
                "twin_a": FakeLayer("InnerProduct", [shared]),
                "empty": FakeLayer("InnerProduct", [blob(0, 5)]),
                "twin_b": FakeLayer("InnerProduct", [shared.share()]),
                "loss": FakeLayer("SoftmaxWithLoss", []),
            }
        )
    )


def add_callback(solver: Any, comm: Communicator, **options: Any) -> SolverCallback:
    """Register a callback with the solver."""
    callback = SolverCallback(solver, comm, **options)
    solver.add_callback(*callback)
    return callback


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
    size = len(passes)
    total = {
        name: [sum(one[name][k] for rank in passes for one in rank) / size for k in range(len(blobs))]
        for name, blobs in passes[0][0].items()
    }
    twins = total["twin_a"][0] + total["twin_b"][0]
    np.testing.assert_allclose(net.params["twin_a"][0].diff, twins, rtol=1e-6)
    np.testing.assert_allclose(net.params["twin_b"][0].diff, twins, rtol=1e-6)
    for k in (0, 1):
        np.testing.assert_allclose(net.params["conv"][k].diff, total["conv"][k], rtol=1e-6)


def run_and_check(comm: Communicator, solver: FakeSolver) -> None:
    """An iteration up to the update, whose gradients are averages."""
    mine = [[draw(10 * rank)] for rank in range(comm.size)]
    solver.net.clear_param_diffs()
    solver.start()
    solver.net.backward(mine[comm.rank][0])
    solver.gradients_ready()
    expect(solver.net, mine)


def bits(net: Any) -> list[bytes]:
    """All weights, to compare them exactly."""
    return [one.data.tobytes() for blobs in net.params.values() for one in blobs]
