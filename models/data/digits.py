"""scikit-learn's handwritten digits: 1,797 real images that come with the package."""

from __future__ import annotations

import numpy as np

from multiring.errors import UsageError
from multiring.models.data.base import Images, Labels, Split
from multiring.models.data.sharding import Indices, sample_generator
from multiring.models.errors import DataError

__all__ = ["Digits"]

NATIVE_SIZE = 8
BRIGHTEST = 16.0
# Within each class every fifth image is a test image, so the split needs no random numbers.
TEST_PERIOD = 5
SHIFT = 1


class Digits:
    """The digits, 1,433 for training and 364 for testing, each class in the same proportion.

    Images are normalised with the mean and deviation of the training part. Training images are shifted by up
    to one pixel in each direction.

    Args:
        image_size: 8, or a multiple of it: each pixel becomes a square.

    Raises:
        UsageError: `image_size` is not a positive multiple of 8.
        DataError: scikit-learn is not installed.
    """

    description = "digits (scikit-learn)"
    classes = 10
    channels = 1
    slow = False

    def __init__(self, image_size: int = NATIVE_SIZE) -> None:
        if image_size < NATIVE_SIZE or image_size % NATIVE_SIZE:
            raise UsageError(
                f"digits are {NATIVE_SIZE} pixels wide; image size {image_size} is not a multiple of it"
            )
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise DataError("the digits come with scikit-learn; pip install 'multiring[train]'") from error
        self.image_size = image_size
        raw = load_digits()
        pixels = np.asarray(raw.images, dtype=np.float32) / np.float32(BRIGHTEST)
        labels = np.asarray(raw.target, dtype=np.int64)
        held_out = _test_mask(labels)
        mean, deviation = pixels[~held_out].mean(), pixels[~held_out].std()
        scale = image_size // NATIVE_SIZE
        images = np.kron((pixels - mean) / deviation, np.ones((1, scale, scale), dtype=np.float32))
        # A margin of background on every side lets a shift be a slice.
        margin = ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT))
        framed = np.pad(images.astype(np.float32), margin, constant_values=np.float32(-mean / deviation))
        self._images: dict[Split, Images] = {"train": framed[~held_out], "test": framed[held_out]}
        self._labels: dict[Split, Labels] = {"train": labels[~held_out], "test": labels[held_out]}

    def count(self, split: Split) -> int:
        """Number of samples of a part."""
        return len(self._labels[split])

    def load(self, split: Split, indices: Indices, *, seed: int, epoch: int) -> tuple[Images, Labels]:
        """Load samples by number; see `Dataset.load`."""
        framed, size = self._images[split], self.image_size
        images = np.empty((len(indices), self.channels, size, size), dtype=np.float32)
        for position, index in enumerate(indices.tolist()):
            row = column = SHIFT
            if split == "train":
                row, column = sample_generator(seed, epoch, index).integers(0, 2 * SHIFT + 1, size=2).tolist()
            images[position, 0] = framed[index, row : row + size, column : column + size]
        return images, self._labels[split][indices]


def _test_mask(labels: Labels) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    mask = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        mask[np.flatnonzero(labels == label)[::TEST_PERIOD]] = True
    return mask
