"""A net of layers that runs forward and backward one layer at a time, with pycaffe's Python shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from multiring.errors import UsageError
from multiring.models.caffe.blob import Array, Blob
from multiring.models.caffe.device import device_of_net
from multiring.models.caffe.layer import Context, Layer, draw_seed, make_layer
from multiring.models.caffe.layer_passes import run_backward, run_forward
from multiring.models.caffe.layers import basic, loss, norm, python_layer, regular, vision
from multiring.models.caffe.layers.data import DataLayer, MemoryData
from multiring.models.caffe.learnable import Learnable, collect_learnable
from multiring.models.caffe.prototxt import Location, read
from multiring.models.caffe.schema import NetParameter
from multiring.models.caffe.snapshots import read_blobs, write_net
from multiring.models.caffe.splits import backward_plan, entries

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["DTYPES", "Net"]

# Imported for the layers that they register.
_KINDS = (basic, loss, norm, python_layer, regular, vision)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
Callback = Callable[[int], None]


class Net:
    """A net as pycaffe has it.

    Attributes:
        name: Name of the net.
        layers: All layers, bottom to top, Splits included; each has `type` and `blobs`.
        params: The blobs of every layer that has any, by the layer's name, bottom to top.
        blobs: All blobs by name; take `.data` anew after each pass.
        inputs: Names of the blobs that the program fills.
        outputs: Names of the blobs that no layer reads.
        learnable: Learned blobs with their multipliers, shared ones once.
        loss: Sum of the weighted losses of the last forward pass.
    """

    def __init__(
        self,
        network_file: str | Path,
        phase: int,
        weights: str | Path | None = None,
        *,
        level: int = 0,
        stages: Sequence[str] = (),
        dtype: str = "float32",
        seed: int | None = None,
        sync_batch_norm_comm: Communicator | None = None,
        device: str | None = None,
    ) -> None:
        """Build the net of a prototxt.

        Args:
            network_file: Path of the prototxt.
            phase: `TRAIN` or `TEST`.
            weights: Path of a `.caffemodel` to copy blobs from.
            level: Level that `include` and `exclude` rules are compared with.
            stages: Stages that they are compared with.
            dtype: "float32" or "float64".
            seed: Seed of the fillers; drawn by default, see `set_random_seed`.
            sync_batch_norm_comm: Ranks over whose batches BatchNorm layers normalise in training. Each
                then takes a collective in every forward and backward pass.
            device: What Torch is to compute on, "cpu" or "cuda:0"; by default what `set_mode_gpu` or
                `set_mode_cpu` have said, or the CPU.

        Raises:
            PrototxtError: The file is wrong or asks for what is not supported.
        """
        param, location = read(network_file, NetParameter)
        param.state.phase, param.state.level = phase, level
        param.state.stage.extend(stages)
        seed = draw_seed() if seed is None else seed
        generator = torch.Generator().manual_seed(seed)
        context = Context(
            phase, DTYPES[dtype], generator, device_of_net(device), seed, comm=sync_batch_norm_comm
        )
        self._build(param, location, context)
        if weights is not None:
            self.copy_from(weights)

    @classmethod
    def from_param(cls, param: Any, location: Location, context: Context) -> Net:
        """A net of a `NetParameter` whose state is set; `place` is where it stands."""
        net = cls.__new__(cls)
        net._build(param, location, context)
        return net

    def _build(self, param: Any, location: Location, context: Context) -> None:
        context = replace(context, force_backward=bool(param.force_backward))
        self.name, self.phase, self._context = str(param.name), context.phase, context
        self.layers: list[Layer] = []
        self.blobs: OrderedDict[str, Blob] = OrderedDict()
        self.loss = 0.0
        self._stream: int | None = None
        self._weights: dict[str, float] = {}
        self._callbacks: dict[str, list[Callback]] = {
            when: [] for when in ("before_forward", "after_forward", "before_backward", "after_backward")
        }
        unread: dict[str, None] = {}
        with torch.no_grad():
            for entry in entries(param, location):
                self._append(make_layer(entry.param, entry.location, context), unread)
        if not self.layers:
            raise location.error(f"net {self.name!r} has no layers in this phase")
        self.inputs = [top for layer in self.layers if layer.type == "Input" for top in layer.param.top]
        self.outputs = sorted(unread)  # as Caffe has them
        self.params: OrderedDict[str, list[Blob]] = OrderedDict(
            (layer.name, layer.blobs) for layer in self.layers if layer.blobs
        )
        self.learnable: list[Learnable] = collect_learnable(self.layers)
        self._backward_plan = backward_plan(self.layers, self._weights, context.force_backward)

    def _append(self, layer: Layer, unread: dict[str, None]) -> None:
        bottoms = [self.blobs[name].shape for name in layer.param.bottom]
        layer.setup(bottoms)
        if len(layer.param.param) > len(layer.blobs):
            raise layer.error(
                f"{len(layer.param.param)} param are given for {len(layer.blobs)} blobs; take out the others",
                *("param", len(layer.blobs)),
            )
        for number, (top, shape) in enumerate(zip(layer.param.top, layer.infer(bottoms), strict=True)):
            if top in self.blobs and top not in layer.param.bottom:
                raise layer.error(f"blob {top!r} is given by an earlier layer already", "top", number)
            if top not in self.blobs:
                self.blobs[top] = Blob(shape, self._context.dtype, self._context.device)
            weight = layer.param.loss_weight[number] if number < len(layer.param.loss_weight) else 0.0
            self._weights[top] = float(weight)
        for name in layer.param.bottom:
            unread.pop(name, None)
        unread.update(dict.fromkeys(layer.param.top))
        self.layers.append(layer)

    @property
    def gpu_stream(self) -> int | None:
        """The stream of the GPU on which the last backward pass ran; None: layers compute on the CPU."""
        device = self._context.device
        if self._stream is None and device.type == "cuda":
            return torch.cuda.current_stream(device).cuda_stream
        return self._stream

    @property
    def device(self) -> torch.device:
        """What computes."""
        return self._context.device

    @property
    def layer_dict(self) -> OrderedDict[str, Layer]:
        """The layers by name."""
        return OrderedDict((layer.name, layer) for layer in self.layers)

    @property
    def _layer_names(self) -> list[str]:
        return [layer.name for layer in self.layers]

    @property
    def _blob_names(self) -> list[str]:
        return list(self.blobs)

    @property
    def blob_loss_weights(self) -> OrderedDict[str, float]:
        """Weight of each blob in the loss, by name."""
        return OrderedDict((name, self._weights[name]) for name in self.blobs)

    @property
    def top_names(self) -> OrderedDict[str, list[str]]:
        """Names of the blobs that each layer gives."""
        return OrderedDict((layer.name, list(layer.param.top)) for layer in self.layers)

    @property
    def bottom_names(self) -> OrderedDict[str, list[str]]:
        """Names of the blobs that each layer reads."""
        return OrderedDict((layer.name, list(layer.param.bottom)) for layer in self.layers)

    def before_forward(self, callback: Callback) -> None:
        """Have `callback(index)` called before the forward pass of each layer."""
        self._callbacks["before_forward"].append(callback)

    def after_forward(self, callback: Callback) -> None:
        """Have `callback(index)` called after the forward pass of each layer."""
        self._callbacks["after_forward"].append(callback)

    def before_backward(self, callback: Callback) -> None:
        """Have `callback(index)` called before the backward pass of each layer."""
        self._callbacks["before_backward"].append(callback)

    def after_backward(self, callback: Callback) -> None:
        """Have `callback(index)` called after the backward pass of each layer, from the last to the first;
        also of layers that have nothing to do there."""
        self._callbacks["after_backward"].append(callback)

    def forward(
        self,
        blobs: Sequence[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **inputs: Array,
    ) -> dict[str, Array]:
        """Run the layers.

        Args:
            blobs: Names of blobs to return besides the outputs.
            start: Name of the first layer to run.
            end: Name of the last one.
            inputs: Values of all input blobs by name.

        Returns:
            Values of the outputs (or of the tops of `end`) and of `blobs`, by name.
        """
        first = self._find(start) if start is not None else 0
        last = self._find(end) if end is not None else len(self.layers) - 1
        if inputs:
            if set(inputs) != set(self.inputs):
                raise UsageError(f"the inputs of the net are {self.inputs}, not {sorted(inputs)}")
            for name, value in inputs.items():
                self.blobs[name].reshape(*value.shape)
                self.blobs[name].data[...] = value
        self.forward_from_to(first, last)
        names = list(self.layers[last].param.top) if end is not None else self.outputs
        return {name: self.blobs[name].data for name in [*names, *(blobs or ())]}

    def forward_all(self, blobs: Sequence[str] | None = None, **inputs: Array) -> dict[str, Array]:
        """Run the layers batch by batch over any number of samples; the last batch is filled with zeros.

        Args:
            blobs: Names of blobs to return besides the outputs.
            inputs: Samples for all input blobs by name, of equal number.

        Returns:
            Values of the outputs and of `blobs` by name, one entry per sample.

        Raises:
            UsageError: The inputs differ in number, or a blob to return has no entry per sample.
        """
        counts = {name: len(value) for name, value in inputs.items()}
        if len(set(counts.values())) != 1:
            raise UsageError(f"forward_all takes equally many samples for each input, not {counts}")
        (count,) = set(counts.values())
        size = next(iter(self.blobs.values())).num
        found: dict[str, list[Array]] = {name: [] for name in [*self.outputs, *(blobs or ())]}
        for begin in range(0, count, size):
            parts = {name: value[begin : begin + size] for name, value in inputs.items()}
            missing = size - min(count - begin, size)
            padded = {
                k: np.pad(part, [(0, missing)] + [(0, 0)] * (part.ndim - 1)) for k, part in parts.items()
            }
            for name, value in self.forward(blobs, None, None, **padded).items():
                if value.shape[:1] != (size,):
                    raise UsageError(
                        f"blob {name!r} has shape {value.shape}, not one entry for each of {size} samples; "
                        "forward_all cannot put batches of it together"
                    )
                found[name].append(value[: size - missing].copy())
        return {name: np.concatenate(values) for name, values in found.items()}

    def forward_from_to(self, first: int, last: int) -> float:
        """Run the layers `first` to `last`; the sum of their weighted losses."""
        loss = 0.0
        with torch.no_grad():
            for index in range(first, last + 1):
                self._call("before_forward", index)
                loss += run_forward(self.layers[index], self.blobs, self._weights)
                self._call("after_forward", index)
        self.loss = loss
        return loss

    def backward(
        self,
        diffs: Sequence[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **gradients: Array,
    ) -> dict[str, Array]:
        """Run the layers' backward passes, adding to the gradients of the learned blobs.

        Without a loss nothing runs, unless the net says `force_backward: true`.

        Args:
            diffs: Names of blobs whose gradients to return besides those of the inputs.
            start: Name of the layer to start with, the last one by default.
            end: Name of the layer to end with, the first one by default.
            gradients: Gradients of all output blobs by name. They stay until others are given.

        Returns:
            Gradients of the inputs (or of the bottoms of `end`) and of `diffs`, by name.

        Raises:
            UsageError: `gradients` has other names than the outputs, or another batch size.
        """
        first = self._find(start) if start is not None else len(self.layers) - 1
        last = self._find(end) if end is not None else 0
        if gradients and set(gradients) != set(self.outputs):
            raise UsageError(f"the outputs of the net are {self.outputs}, not {sorted(gradients)}")
        for name, value in gradients.items():
            shape = self.blobs[name].shape
            if np.shape(value)[:1] != shape[:1]:
                raise UsageError(f"blob {name!r} has shape {shape}, its gradient {np.shape(value)}")
            self.blobs[name].diff[...] = value
        self.backward_from_to(first, last)
        names = list(self.layers[last].param.bottom) if end is not None else self.inputs
        return {name: self.blobs[name].diff for name in [*names, *(diffs or ())]}

    def backward_from_to(self, first: int, last: int) -> None:
        """Run the backward passes of the layers `first` down to `last`."""
        plan = self._backward_plan
        with torch.no_grad():
            for index in range(first, last - 1, -1):
                self._call("before_backward", index)
                if plan.runs[index]:
                    run_backward(self.layers[index], self.blobs, plan.given, plan.wanted[index])
                self._call("after_backward", index)
        if self._context.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._context.device).cuda_stream

    def frozen_layers(self) -> list[str]:
        """Names of the layers with blobs of which none learns."""
        return [
            layer.name
            for layer in self.layers
            if layer.blobs and not any(layer.learns(k) for k in range(len(layer.blobs)))
        ]

    def clear_param_diffs(self) -> None:
        """Set the gradients of all learned blobs to zeros."""
        for learnable in self.learnable:
            learnable.blob.clear_gradient()

    def reshape(self) -> None:
        """Give all blobs the shapes that follow from those of the inputs."""
        for layer in self.layers:
            shapes = layer.infer([self.blobs[name].shape for name in layer.param.bottom])
            for name, shape in zip(layer.param.top, shapes, strict=True):
                if layer.type != "Input":
                    self.blobs[name].reshape(*shape)

    def set_input_arrays(self, data: Array, labels: Array) -> None:
        """Give the MemoryData layer at the bottom its samples; see `MemoryData.reset`."""
        first = self.layers[0]
        if not isinstance(first, MemoryData):
            raise UsageError(f"the first layer is of type {first.type}; only MemoryData takes arrays")
        first.reset(data, labels)

    def copy_from(self, path: str | Path) -> None:
        """Copy the blobs of a `.caffemodel` into the layers of the same names; other layers stay.

        Raises:
            CheckpointError: The file cannot be read.
            UsageError: A layer's blobs have other shapes; nothing was copied then.
        """
        for blob, array in read_blobs(Path(path), self.params):
            blob.data[...] = array.reshape(blob.shape)

    def save(self, path: str | Path) -> None:
        """Write the layers and their blobs as a `.caffemodel`, atomically."""
        write_net(Path(path), self.name, [(layer.param, layer.blobs) for layer in self.layers])

    def share_with(self, other: Net) -> None:
        """Have the values of the blobs of layers that another net has under the same names."""
        theirs = other.params
        for name, blobs in self.params.items():
            for mine, their in zip(blobs, theirs.get(name, ()), strict=name in theirs):
                mine.share(their, gradient=False)

    def seek(self, batches: int) -> None:
        """Have all data layers go on after so many batches."""
        for layer in self.layers:
            if isinstance(layer, DataLayer):
                layer.seek(batches)

    def _call(self, when: str, index: int) -> None:
        for callback in self._callbacks[when]:
            callback(index)

    def _find(self, name: str) -> int:
        names = self._layer_names
        if name not in names:
            raise UsageError(f"the net has no layer {name!r}")
        return names.index(name)
