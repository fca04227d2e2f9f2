"""Where the data layers' samples come from, and what happens to an image on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from multiring.errors import UsageError
from multiring.models.caffe.blob import decimal
from multiring.models.caffe.lmdb_source import Lmdb
from multiring.models.caffe.snapshots import read_mean
from multiring.models.errors import DataError

__all__ = ["Samples", "Transformer", "open_images", "open_source"]

Array = npt.NDArray[Any]
DIGITS = "digits"


class Samples(Protocol):
    """Numbered images with labels."""

    def __len__(self) -> int:
        """Number of samples."""

    def load(self, index: int, epoch: int) -> tuple[Array, float]:
        """Image (channels, height, width) and label of a sample; `epoch` counts how often all were seen."""


class _Arrays:
    def __init__(self, images: Array, labels: Array) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._images)

    def load(self, index: int, epoch: int) -> tuple[Array, float]:
        return self._images[index].astype(np.float32), float(self._labels[index])


class _Digits:
    """scikit-learn's digits; those of the training part are shifted by up to a pixel, anew in each epoch."""

    def __init__(self, split: Literal["train", "test"]) -> None:
        from multiring.models.data.digits import Digits

        self._digits, self._split = Digits(), split

    def __len__(self) -> int:
        return self._digits.count(self._split)

    def load(self, index: int, epoch: int) -> tuple[Array, float]:
        images, labels = self._digits.load(self._split, np.array([index]), seed=0, epoch=epoch)
        return images[0], float(labels[0])


def open_source(source: str, split: Literal["train", "test"]) -> Samples:
    """Samples of a Data layer.

    Args:
        source: A folder that `convert_imageset` has made (LMDB), a `.npz` file with the arrays `images` (n,
            channels, height, width) and `labels` (n,), or "digits" for scikit-learn's digits, normalised,
            1,433 to train with and 364 to test.
        split: Which part of the digits.

    Raises:
        UsageError: The source is of another kind, LevelDB for example, or a package is missing.
        DataError: The file cannot be read or lacks an array.
    """
    if source == DIGITS and not Path(source).exists():
        return _Digits(split)
    path = Path(source)
    if path.is_dir() and (path / "data.mdb").exists():
        return Lmdb(path)
    if path.suffix != ".npz":
        raise UsageError(
            f"{source} is neither a folder with data.mdb nor a .npz file; LevelDB is not read: make an LMDB "
            "(convert_imageset -backend lmdb), export images and labels (numpy.savez(path, images=..., "
            "labels=...)), or use an ImageData layer"
        )
    try:
        with np.load(path) as file:
            images, labels = file["images"], file["labels"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if images.ndim != 4 or labels.shape != images.shape[:1]:
        raise DataError(
            f"{path} holds images of shape {images.shape} and labels of shape {labels.shape}; expected "
            "(n, channels, height, width) and (n,)"
        )
    return _Arrays(images, labels)


class _Images:
    def __init__(
        self, files: list[tuple[Path, float]], size: tuple[int, int], color: bool, shuffle: int | None
    ) -> None:
        self._files, self._size, self._color, self._shuffle = files, size, color, shuffle
        self._order: tuple[int, Array] | None = None

    def __len__(self) -> int:
        return len(self._files)

    def load(self, index: int, epoch: int) -> tuple[Array, float]:
        if self._shuffle is not None:
            if self._order is None or self._order[0] != epoch:
                generator = np.random.default_rng((self._shuffle, epoch))
                self._order = (epoch, generator.permutation(len(self._files)))
            index = int(self._order[1][index])
        path, label = self._files[index]
        return self._read(path), label

    def _read(self, path: Path) -> Array:
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(path) as file:
                image = file.convert("RGB" if self._color else "L")
                if all(self._size):
                    image = image.resize(self._size[::-1], Image.Resampling.BILINEAR)
                pixels = np.asarray(image, dtype=np.float32)
        except (OSError, UnidentifiedImageError) as error:
            raise DataError(f"cannot read image {path}: {error}") from error
        if not self._color:
            return pixels[None]
        return np.ascontiguousarray(pixels[:, :, ::-1].transpose(2, 0, 1))  # blue, green, red, as in Caffe


def open_images(
    source: Path, *, root: str, size: tuple[int, int], color: bool, shuffle: int | None
) -> Samples:
    """Samples of an ImageData layer.

    Args:
        source: Text file with one path and one label per line.
        root: What comes before each path.
        size: Height and width to resize to; not if one of them is 0.
        color: Whether images have three channels (blue, green, red) or one.
        shuffle: Seed of a new order in every epoch; None for the order of the file.

    Raises:
        DataError: The file cannot be read or a line is not understood.
    """
    files: list[tuple[Path, float]] = []
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"cannot read {source}: {error}") from error
    for number, line in enumerate(lines, 1):
        path, _, label = line.strip().rpartition(" ")
        if not line.strip():
            continue
        if not path or not label.lstrip("-").isdecimal():
            raise DataError(f"{source}:{number}: a path and a label are expected, not {line!r}")
        files.append((Path(root + path.strip()), float(label)))
    return _Images(files, size, color, shuffle)


class Transformer:
    """Crops, mirrors, subtracts means and scales, as the message says.

    Args:
        param: A `TransformationParameter`.
        training: Crops and mirrors at random; otherwise the crop is in the middle and nothing is mirrored.
        seed: Seed of what is random, together with the number of the sample.
        error: Makes an error of a text and the path of a field.
    """

    def __init__(self, param: Any, training: bool, seed: int, error: Callable[..., Exception]) -> None:
        self._scale, self._crop = decimal(param.scale), int(param.crop_size)
        self._mirror, self._training, self._seed = bool(param.mirror), training, seed
        self._means = np.array([decimal(value) for value in param.mean_value], np.float32)[:, None, None]
        self._error = error
        if param.mean_file and param.mean_value:
            raise error("mean_file and mean_value exclude each other", "transform_param", "mean_file")
        self._mean = read_mean(Path(param.mean_file)) if param.mean_file else None

    def __call__(self, image: Array, number: int) -> Array:
        """The image that the net gets: float32, shape (channels, height, width)."""
        if len(self._means) not in (0, 1, len(image)):
            raise self._error(
                f"{len(self._means)} mean values do not fit {len(image)} channels",
                *("transform_param", "mean_value"),
            )
        if self._mean is not None:
            if self._mean.shape != image.shape:
                raise self._error(
                    f"the mean has shape {self._mean.shape}, an image {image.shape}",
                    *("transform_param", "mean_file"),
                )
            image = image - self._mean
        generator = np.random.default_rng((self._seed, number)) if self._training else None
        if self._crop:
            image = self._cropped(image, generator)
        if self._mirror and generator is not None and generator.integers(2):
            image = image[:, :, ::-1]
        if len(self._means):
            image = image - self._means
        result: Array = np.ascontiguousarray(image * np.float32(self._scale), dtype=np.float32)
        return result

    def _cropped(self, image: Array, generator: np.random.Generator | None) -> Array:
        room = [extent - self._crop for extent in image.shape[1:]]
        if min(room) < 0:
            raise self._error(
                f"crop_size {self._crop} is larger than an image of {image.shape[1:]} pixels",
                *("transform_param", "crop_size"),
            )
        row, column = (
            extent // 2 if generator is None else int(generator.integers(extent + 1)) for extent in room
        )
        return image[:, row : row + self._crop, column : column + self._crop]
