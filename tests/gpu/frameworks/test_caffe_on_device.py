"""Solvers of Caffe's shape whose blobs lie on a device: gradients are reduced there."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("google.protobuf", reason="the Caffe-style solver reads prototxt files by it")

# isort: split
from multiring import Communicator
from multiring.caffe import SolverCallback
from multiring.errors import UsageError
from tests.adapters.caffe.support import (
    SMALL,
    FakeBlob,
    FakeLayer,
    FakeNet,
    FakeSolver,
    add_callback,
    draw,
    expect,
    make_solver,
)
from tests.gpu import fake_arrays
from tests.on_ranks import on_ranks, same_everywhere
from tests.python.caffe.caffe_nets import SMALL as NET
from tests.python.caffe.caffe_nets import feed


class DeviceBlob(FakeBlob):
    """A gradient on a device of the stand-in, copied to the host and back as builds of Caffe for GPUs do."""

    looked_at = 0

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(np.zeros(shape, np.float32))
        self.shape = shape
        self._there = fake_arrays.array(self._diff)
        self._is_on_host = True

    @property
    def diff(self) -> Any:
        type(self).looked_at += 1
        if not self._is_on_host:
            self._diff[...] = self._there.get()
            self._is_on_host = True
        return self._diff[...]

    @property
    def gpu_diff_ptr(self) -> int:
        if self._is_on_host:
            fake_arrays.busy()
            self._there[...] = fake_arrays.array(self._diff)
            self._is_on_host = False
        return self._there.address


def on_device() -> FakeSolver:
    """`make_solver` with blobs on a device."""
    made: dict[int, DeviceBlob] = {}
    layers = {}
    net = make_solver().net
    for name, layer in zip(net._layer_names, net.layers, strict=True):
        memories = [id(blob._diff) for blob in layer.blobs]
        blobs = [
            made.setdefault(memory, DeviceBlob(blob.data.shape))
            for memory, blob in zip(memories, layer.blobs, strict=True)
        ]
        layers[name] = FakeLayer(layer.type, blobs)
    return FakeSolver(FakeNet(layers))


@pytest.mark.parametrize("stream", ["default", "own"])
@on_ranks(1, 3)
def test_fake_gradients_stay_on_their_device(comm: Communicator, stream: str) -> list[bytes]:
    """The host does not look at them, and what makes them may be under way."""
    with fake_arrays.stream() if stream == "own" else nullcontext():
        solver = on_device()
        if stream == "own":
            solver.net.gpu_stream = fake_arrays.current_stream()  # type: ignore[attr-defined]
        callback = add_callback(solver, comm, on_device=True, **SMALL)
        ready, looks = solver._callbacks[0][1], []

        def looked() -> None:
            before = DeviceBlob.looked_at
            ready()
            looks.append(DeviceBlob.looked_at - before)

        solver._callbacks[0] = (solver._callbacks[0][0], looked)
        for step in range(3):
            passes = [[draw(100 * step + 10 * rank + k) for k in range(2)] for rank in range(comm.size)]
            solver.reduce(passes[comm.rank])
            expect(solver.net, passes)
            solver.update(0.1)
        # The blobs of statistics have no gradient; their values are another memory.
        assert looks == [0, 0, 0]
        callback.close()
        return [blob.diff.tobytes() for blobs in solver.net.params.values() for blob in blobs]


def test_fake_on_device_is_refused(comm: Communicator) -> None:
    with pytest.raises(UsageError, match=r"blob 'conv\[0\]' has no gpu_diff_ptr"):
        SolverCallback(make_solver(), comm, on_device=True)
    with pytest.raises(UsageError, match="overlap=True copies gradients to the host"):
        SolverCallback(on_device(), comm, on_device=True, overlap=True)
    solver = on_device()
    callback = add_callback(solver, comm, on_device=True)
    solver.start()
    solver.net.params["conv"][1].shape = (5,)
    with pytest.raises(UsageError, match=r"'conv\[1\]' has become float32 \(5,\), it was float32 \(4,\)"):
        solver.gradients_ready()
    callback.close()


@on_ranks(2)
def test_torch_trains_as_on_the_host(comm: Communicator, tmp_path: Path) -> None:
    """The Caffe-style solver on a GPU, its gradients reduced there or through the host."""
    from multiring.models.caffe import Solver

    directory = tmp_path / str(comm.rank)
    directory.mkdir()
    (directory / "net.prototxt").write_text(NET)
    path = directory / "solver.prototxt"
    path.write_text(
        'net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 iter_size: 2 max_iter: 9 '
        f'random_seed: 3 snapshot_prefix: "{directory}/shot"'
    )
    found = []
    for device, options in (
        ("cpu", {}),
        ("cuda", {}),
        ("cuda", {"on_device": True}),
        ("cuda", {"overlap": True}),
    ):
        solver = Solver(path, dtype="float64", device=device, shard=(comm.rank, comm.size))
        feed(solver.net, 12 + 4 * comm.rank)
        callback = add_callback(solver, comm, iter_size=2, **options)
        solver.step(5)
        callback.close()
        found.append([one.blob.data.copy() for one in solver.net.learnable])
        assert same_everywhere(comm, [array.tobytes() for array in found[-1]])
    for other in found[1:]:
        for mine, wanted in zip(other, found[0], strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=1e-9)
