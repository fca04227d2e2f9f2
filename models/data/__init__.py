"""The images that a network is trained on, behind one small interface.

A data set is addressed by sample number, and what a sample looks like depends on `(seed, epoch, number)`
alone: not on the rank that loads it, nor on how many ranks or threads there are.
"""

from __future__ import annotations

from multiring.models.data.base import Dataset, Images, Labels, Split
from multiring.models.data.digits import Digits
from multiring.models.data.image_folder import ImageFolder
from multiring.models.data.synthetic import Synthetic

__all__ = ["Dataset", "Digits", "ImageFolder", "Images", "Labels", "Split", "Synthetic", "open_dataset"]


def open_dataset(data: str, *, image_size: int, classes: int = 10, workers: int = 0) -> Dataset:
    """Open a data set by the name that the command line takes.

    Args:
        data: "digits", "synthetic", or the path of an image folder.
        image_size: Height and width of the images in pixels.
        classes: Number of classes of synthetic data; the others know theirs.
        workers: Threads that decode the files of an image folder; 0 decodes in the calling thread.

    Raises:
        DataError: The path does not exist or holds no images.
        UsageError: `image_size` does not suit the data.
    """
    if data == "digits":
        return Digits(image_size)
    if data == "synthetic":
        return Synthetic(image_size, classes)
    return ImageFolder(data, image_size, workers=workers)
