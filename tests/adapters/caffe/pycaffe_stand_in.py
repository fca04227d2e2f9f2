"""The Caffe-style solver with what is different in BVLC's pycaffe, to run scripts that are meant for that.

- `solver.net` and `solver.test_nets[k]` are a new object at each access.
- `set_input_arrays` takes float32 arrays in C order. Caffe keeps their addresses only; they live as long as
  the object whose method it was. Where that has gone, the layer has no data here; Caffe reads freed memory.
- Test nets have weights of their own until `share_with`.
- Paths are str. Names that pycaffe lacks are missing.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np

from multiring.models import caffe

_NET = {
    *("blobs", "params", "layers", "layer_dict", "inputs", "outputs", "top_names", "bottom_names"),
    *("blob_loss_weights", "_layer_names", "_blob_names", "forward", "backward", "forward_all", "reshape"),
    *("clear_param_diffs", "before_forward", "after_forward", "before_backward", "after_backward"),
}
_SOLVER = {"iter", "lr", "step", "solve", "add_callback", "apply_update", "snapshot", "restore"}
_PARAM = ("base_lr", "max_iter", "display", "layer_wise_reduce")


class Net:
    """What `solver.net` gives."""

    def __init__(self, net: caffe.Net) -> None:
        self._net = net

    def __getattr__(self, name: str) -> Any:
        if name not in _NET:
            raise AttributeError(f"'Net' object has no attribute {name!r}")
        return getattr(self._net, name)

    def set_input_arrays(self, data: Any, labels: Any) -> None:
        if labels.ndim == 1:
            labels = np.ascontiguousarray(labels[:, None, None, None])
        for name, array in (("data", data), ("labels", labels)):
            if not (array.flags.c_contiguous and array.ndim == 4 and array.dtype == np.float32):
                raise RuntimeError(f"{name} array must be C contiguous, 4-d and float32")
        layer: Any = self._net.layers[0]
        self._net.set_input_arrays(data, labels)
        weakref.finalize(self, _free, layer, layer._arrays)

    def share_with(self, other: Net) -> None:
        self._net.share_with(other._net)


def _free(layer: Any, arrays: object) -> None:
    if layer._arrays is arrays:
        layer._arrays = None


class SGDSolver:
    """What `caffe.SGDSolver` is."""

    def __init__(self, path: str) -> None:
        if type(path) is not str:
            raise TypeError(f"Boost.Python.ArgumentError: str is expected, not {type(path).__name__}")
        self._solver = caffe.SGDSolver(path)
        for net in self._solver.test_nets:
            for blobs in net.params.values():
                for blob in blobs:
                    blob.tensor = blob.tensor.clone()

    def __getattr__(self, name: str) -> Any:
        if name not in _SOLVER:
            raise AttributeError(f"'SGDSolver' object has no attribute {name!r}")
        return getattr(self._solver, name)

    @property
    def net(self) -> Net:
        return Net(self._solver.net)

    @property
    def test_nets(self) -> list[Net]:
        return [Net(net) for net in self._solver.test_nets]

    @property
    def param(self) -> SimpleNamespace:
        return SimpleNamespace(**{name: getattr(self._solver.param, name) for name in _PARAM})
