"""Layers that bring data: Input and MemoryData from the program, Data and ImageData from files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from multiring.errors import UsageError
from multiring.models.caffe.blob import Shape
from multiring.models.caffe.layer import ForwardLayer, Tensors, register
from multiring.models.caffe.schema import TRAIN
from multiring.models.caffe.sources import Samples, Transformer, open_images, open_source

__all__ = ["DataLayer", "MemoryData"]

Array = npt.NDArray[Any]
_MANY = 1 << 20


class _Source(ForwardLayer):
    """A layer without bottoms."""

    bottoms = (0, 0)


@register("Input")
class Input(_Source):
    """Blobs that the program fills: `net.blobs["data"].data[...] = images`."""

    tops = (1, _MANY)

    def infer(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shapes = [tuple(shape.dim) for shape in self.param.input_param.shape]
        if len(shapes) == 1:
            shapes *= len(self.param.top)
        if len(shapes) != len(self.param.top):
            raise self.error(
                f"{len(self.param.top)} tops need one shape or {len(self.param.top)}, not {len(shapes)}",
                "input_param",
            )
        return shapes

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        return []  # the net leaves the blobs as the program filled them, without a call


@register("MemoryData")
class MemoryData(_Source):
    """Batches from arrays that `net.set_input_arrays(data, labels)` gave, over and over again."""

    tops = (2, 2)

    def setup(self, bottoms: Sequence[Shape]) -> None:
        param = self.param.memory_data_param
        self.shape = (param.batch_size, param.channels, param.height, param.width)
        if 0 in self.shape:
            raise self.error(
                "batch_size, channels, height and width have to be at least 1", "memory_data_param"
            )
        self._arrays: tuple[torch.Tensor, torch.Tensor] | None = None
        self._position = 0

    def infer(self, bottoms: Sequence[Shape]) -> list[Shape]:
        return [self.shape, (self.shape[0], 1, 1, 1)]

    def reset(self, data: Array, labels: Array) -> None:
        """Take other arrays.

        Args:
            data: Shape (n, channels, height, width), n a multiple of the batch size. Kept, not copied, if
                its dtype is that of the net.
            labels: n labels.

        Raises:
            UsageError: The shapes are others.
        """
        images = torch.from_numpy(np.ascontiguousarray(data)).to(self.context.dtype)
        targets = torch.from_numpy(np.ascontiguousarray(labels)).reshape(-1, 1, 1, 1).to(self.context.dtype)
        if tuple(images.shape[1:]) != self.shape[1:] or len(images) % self.shape[0] or not len(images):
            raise UsageError(
                f"layer {self.name!r}: data has shape {tuple(images.shape)}; it takes (n, "
                f"{', '.join(map(str, self.shape[1:]))}) where n is a multiple of {self.shape[0]}"
            )
        if len(targets) != len(images):
            raise UsageError(f"layer {self.name!r}: {len(images)} images have {len(targets)} labels")
        self._arrays, self._position = (images, targets), 0

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        if self._arrays is None:
            raise UsageError(f"layer {self.name!r} has no data; call net.set_input_arrays(data, labels)")
        part = slice(self._position, self._position + self.shape[0])
        self._position = part.stop % len(self._arrays[0])
        return [array[part].to(self.context.device, copy=True) for array in self._arrays]


class DataLayer(_Source):
    """Batches of numbered samples, over and over again.

    In training rank r of n takes the samples r, r + n, r + 2n, ... as Caffe's solvers do; in testing every
    rank takes all. What is random about a sample depends on the seed and its number alone.
    """

    tops = (1, 2)
    samples: Samples
    batch_size: int
    field: str

    def setup(self, bottoms: Sequence[Shape]) -> None:
        param = getattr(self.param, self.field)
        if not param.source or not param.batch_size:
            raise self.error("source and batch_size are missing", self.field)
        self.batch_size = param.batch_size
        try:
            self.samples = self.open(param)
        except UsageError as error:
            raise self.error(str(error), self.field, "source") from error
        if not len(self.samples):
            raise self.error(f"{param.source} holds no samples", self.field, "source")
        training = self.context.phase == TRAIN
        self._rank, self._size = self.context.shard if training else (0, 1)
        self._transformer = Transformer(self.param.transform_param, training, self.context.seed, self.error)
        self._batches = 0

    @abstractmethod
    def open(self, param: Any) -> Samples:
        """The samples that the layer's parameter names."""

    def infer(self, bottoms: Sequence[Shape]) -> list[Shape]:
        image, _ = self._load(0)
        return [(self.batch_size, *image.shape), (self.batch_size,)][: len(self.param.top)]

    def seek(self, batches: int) -> None:
        """Go on after so many batches, as a training does that was resumed."""
        self._batches = batches

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        first = self._batches * self.batch_size
        self._batches += 1
        numbers = [(first + k) * self._size + self._rank for k in range(self.batch_size)]
        images, labels = zip(*map(self._load, numbers), strict=True)
        tops = [torch.from_numpy(np.stack(images)), torch.tensor(labels)]
        return [top.to(self.context.device, self.context.dtype) for top in tops[: len(self.param.top)]]

    def _load(self, number: int) -> tuple[Array, float]:
        epoch, index = divmod(number, len(self.samples))
        image, label = self.samples.load(index, epoch)
        return self._transformer(image, number), label


@register("Data")
class Data(DataLayer):
    """Samples of a `.npz` file, or of the digits that come with scikit-learn; see `open_source`."""

    field = "data_param"

    def open(self, param: Any) -> Samples:
        return open_source(param.source, "train" if self.context.phase == TRAIN else "test")


@register("ImageData")
class ImageData(DataLayer):
    """Images that a text file lists, one path and label per line."""

    field = "image_data_param"

    def open(self, param: Any) -> Samples:
        return open_images(
            Path(param.source),
            root=param.root_folder,
            size=(param.new_height, param.new_width),
            color=param.is_color,
            shuffle=self.context.seed if param.shuffle else None,
        )
