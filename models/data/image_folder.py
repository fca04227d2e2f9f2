"""Image folders in the shape of ImageNet: `root/{train,val}/<class>/<image>.jpg`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from multiring.errors import UsageError
from multiring.models.data.base import Images, Labels, Split
from multiring.models.data.sharding import Indices, sample_generator
from multiring.models.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageFolder"]

SUFFIXES = (".jpg", ".jpeg", ".png")
FOLDERS: dict[Split, str] = {"train": "train", "test": "val"}

# Mean and deviation of ImageNet's training images, of values in [0, 1]; the usual constants.
MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32).reshape(3, 1, 1)
DEVIATION = np.array([0.229, 0.224, 0.225], dtype=np.float32).reshape(3, 1, 1)

# Training crops: share of the area, aspect ratio, and tries before the centre is taken.
AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)
TRIES = 10
# Evaluation resizes the shorter side to 256 for crops of 224, and in proportion for other sizes.
EVALUATION_RATIO = 256 / 224

Box = tuple[int, int, int, int]


class ImageFolder:
    """Images in one folder per class.

    Classes are the folders of `train`, in the order of their names; `val` may lack some but must not add any.
    Training images are cropped at random in position, size and aspect ratio and flipped with probability
    one half; test images are resized and cropped at the centre.

    Args:
        root: Folder that holds `train` and `val`.
        image_size: Height and width of the result in pixels.
        workers: Threads that decode files; 0 decodes in the calling thread.

    Raises:
        DataError: A folder is missing or holds no images, or `val` has a class that `train` lacks.
        UsageError: A number is out of range.
    """

    channels = 3
    slow = True

    def __init__(self, root: str | os.PathLike[str], image_size: int = 224, *, workers: int = 0) -> None:
        if image_size < 1 or workers < 0:
            raise UsageError(f"image size {image_size} must be at least 1 and workers {workers} at least 0")
        self.root = Path(root)
        self.image_size = image_size
        self.class_names = _class_names(self.root / FOLDERS["train"])
        self.classes = len(self.class_names)
        self._files: dict[Split, list[Path]] = {}
        self._labels: dict[Split, Labels] = {}
        for split, folder in FOLDERS.items():
            self._files[split], self._labels[split] = _scan(self.root / folder, self.class_names)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="decode") if workers else None

    @property
    def description(self) -> str:
        """What it is, for the summary."""
        return f"image folder {self.root}"

    def count(self, split: Split) -> int:
        """Number of samples of a part."""
        return len(self._files[split])

    def path(self, split: Split, index: int) -> Path:
        """File of one sample."""
        return self._files[split][index]

    def load(self, split: Split, indices: Indices, *, seed: int, epoch: int) -> tuple[Images, Labels]:
        """Load samples by number; see `Dataset.load`."""

        def one(index: int) -> Images:
            generator = sample_generator(seed, epoch, index) if split == "train" else None
            return _read(self._files[split][index], self.image_size, generator)

        mapper: Callable[..., object] = self._pool.map if self._pool else map
        images = list(mapper(one, indices.tolist()))  # type: ignore[call-overload]
        if not images:
            shape = (0, self.channels, self.image_size, self.image_size)
            return np.empty(shape, dtype=np.float32), self._labels[split][indices]
        return np.stack(images), self._labels[split][indices]


def _class_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; an image folder holds train/<class>/ and val/<class>/")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if not names:
        raise DataError(f"{folder} holds no class folders; an image folder holds train/<class>/<image>.jpg")
    return names


def _scan(folder: Path, class_names: list[str]) -> tuple[list[Path], Labels]:
    if unknown := sorted(set(_class_names(folder)) - set(class_names)):
        raise DataError(f"{folder / unknown[0]} is a class that the training images do not have")
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(class_names):
        if not (folder / name).is_dir():
            continue
        found = sorted(path for path in (folder / name).iterdir() if path.suffix.lower() in SUFFIXES)
        files += found
        labels += [label] * len(found)
    if not files:
        raise DataError(
            f"{folder} holds no images; it needs files named {', '.join(SUFFIXES)} in class folders"
        )
    return files, np.array(labels, dtype=np.int64)


def _read(path: Path, size: int, generator: np.random.Generator | None) -> Images:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("image folders are read with Pillow; pip install 'multiring[train]'") from error
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    # Pillow has no one exception for damaged files; these are what its decoders raise.
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot read image {path}: {error}; replace or remove it") from error
    if generator is None:
        return _normalise(_centre(image, size))
    crop = _random_crop(image.width, image.height, generator)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=crop)
    if generator.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return _normalise(image)


def _random_crop(width: int, height: int, generator: np.random.Generator) -> Box:
    for _ in range(TRIES):
        area = width * height * generator.uniform(*AREA)
        aspect = math.exp(generator.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < across <= width and 0 < down <= height:
            left = int(generator.integers(0, width - across + 1))
            top = int(generator.integers(0, height - down + 1))
            return left, top, left + across, top + down
    across = max(1, min(width, round(height * ASPECT[1])))
    down = max(1, min(height, round(width / ASPECT[0])))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def _centre(image: Image, size: int) -> Image:
    from PIL.Image import Resampling

    shorter = round(size * EVALUATION_RATIO)
    scale = shorter / min(image.width, image.height)
    width, height = max(size, round(image.width * scale)), max(size, round(image.height * scale))
    image = image.resize((width, height), Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def _normalise(image: Image) -> Images:
    pixels: npt.NDArray[np.float32] = np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / np.float32(255)
    return np.ascontiguousarray((pixels - MEAN) / DEVIATION)
