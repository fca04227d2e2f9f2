"""Digits, image folders and synthetic images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from multiring.errors import UsageError
from multiring.models.data import Digits, ImageFolder, Synthetic, open_dataset
from multiring.models.data.image_folder import DEVIATION, MEAN
from multiring.models.data.loader import training_batches
from multiring.models.data.sharding import epoch_order
from multiring.models.errors import DataError
from tests.python.models.images import write_images


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    write_images(root, "temple flower", 6, 3, "jpg", width=160)
    for path in root.glob("*/*/0.jpg"):
        path.rename(path.with_suffix(".JPEG"))
    return root


def test_digits_split_is_fixed_stratified_and_whole() -> None:
    data = Digits(8)
    raw = load_digits()
    assert (data.count("train"), data.count("test")) == (1433, 364)
    assert data.count("train") + data.count("test") == len(raw.target)
    _, train = data.load("train", np.arange(1433), seed=0, epoch=0)
    _, test = data.load("test", np.arange(364), seed=0, epoch=0)
    totals, held_out = np.bincount(raw.target), np.bincount(test)
    assert np.array_equal(np.bincount(train) + held_out, totals)
    assert np.all(np.abs(held_out / totals - 0.2) < 0.005)


def test_digits_are_normalised_real_images() -> None:
    images, labels = Digits(16).load("test", np.arange(364), seed=0, epoch=0)
    assert images.shape == (364, 1, 16, 16)
    assert (images.dtype, labels.dtype) == (np.float32, np.int64)
    # The parts come from the same writers; their means agree within a hundredth or so.
    assert abs(images.mean()) < 0.02
    assert abs(images.std() - 1) < 0.02
    raw = load_digits()
    first = np.flatnonzero(raw.target == labels[0])[0]
    correlation = np.corrcoef(images[0, 0, ::2, ::2].ravel(), raw.images[first].ravel())[0, 1]
    assert correlation == pytest.approx(1.0, abs=1e-6)


def test_digits_are_shifted_by_seed_epoch_and_number_only() -> None:
    data = Digits(8)
    together, _ = data.load("train", np.arange(50), seed=1, epoch=2)
    apart = [data.load("train", np.array([number]), seed=1, epoch=2)[0][0] for number in range(50)]
    assert np.array_equal(together, np.stack(apart))
    later, _ = data.load("train", np.arange(50), seed=1, epoch=3)
    changed = np.any(together != later, axis=(1, 2, 3))
    # Nine equally likely shifts: about one in nine stays.
    assert 0.7 < changed.mean() < 1.0
    plain = Digits(8)._images["train"][:50, 1:-1, 1:-1]
    shifts = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)]
    for image, original in zip(together[:, 0], plain, strict=True):
        shifted = (np.roll(original, shift, axis=(0, 1)) for shift in shifts)
        assert any(np.array_equal(image[1:-1, 1:-1], other[1:-1, 1:-1]) for other in shifted)


def test_synthetic_images_are_fixed_and_sizes_checked() -> None:
    first, again = Synthetic(4, 10), Synthetic(4, 10)
    indices = np.array([0, 64, 5])
    images, labels = first.load("train", indices, seed=0, epoch=0)
    assert images.shape == (3, 3, 4, 4)
    assert np.array_equal(images[0], images[1])
    assert labels[0] == labels[1]
    assert np.array_equal(images, again.load("train", indices, seed=9, epoch=9)[0])
    with pytest.raises(UsageError, match="at least 1"):
        Synthetic(0, 10)
    for size in (0, 7, 12):
        with pytest.raises(UsageError, match="not a multiple"):
            Digits(size)


def test_image_folder_reads_a_tree(tree: Path) -> None:
    data = open_dataset(str(tree), image_size=32, workers=3)
    assert isinstance(data, ImageFolder)
    assert data.class_names == ["flower", "temple"]
    assert (data.count("train"), data.count("test")) == (12, 6)
    images, labels = data.load("test", np.array([0, 5]), seed=0, epoch=0)
    assert images.shape == (2, 3, 32, 32)
    assert images.dtype == np.float32
    assert labels.tolist() == [0, 1]
    assert data.path("test", 5).parent.name == "temple"
    assert str(tree) in data.description
    nothing, none = data.load("train", np.empty(0, dtype=np.int64), seed=0, epoch=0)
    assert nothing.shape == (0, 3, 32, 32)
    assert len(none) == 0


def test_evaluation_crops_the_centre_of_the_resized_image(tree: Path) -> None:
    data = ImageFolder(tree, 56)
    images, _ = data.load("test", np.array([0]), seed=0, epoch=0)
    with Image.open(data.path("test", 0)) as opened:
        whole = opened.convert("RGB").resize((round(160 * 64 / 120), 64), Image.Resampling.BILINEAR)
    pixels = np.asarray(whole, dtype=np.float32)[4:60, 14:70].transpose(2, 0, 1) / np.float32(255)
    assert np.array_equal(images[0], (pixels - MEAN) / DEVIATION)


def test_training_crops_depend_on_seed_epoch_and_number_only(tree: Path) -> None:
    data, threaded = ImageFolder(tree, 24), ImageFolder(tree, 24, workers=4)
    images, _ = data.load("train", np.arange(12), seed=1, epoch=0)
    assert np.array_equal(images, threaded.load("train", np.arange(12), seed=1, epoch=0)[0])
    assert np.array_equal(images[7], data.load("train", np.array([7]), seed=1, epoch=0)[0][0])
    assert not np.array_equal(images, data.load("train", np.arange(12), seed=1, epoch=1)[0])
    assert not np.array_equal(images, data.load("train", np.arange(12), seed=2, epoch=0)[0])


def test_image_folder_batches_are_loaded_ahead_in_order(tree: Path) -> None:
    data = ImageFolder(tree, 16, workers=2)
    batches = list(training_batches(data, seed=0, epoch=0, global_batch=5, rank=0, size=1))
    assert [len(batch.labels) for batch in batches] == [5, 5, 2]
    images, labels = data.load("train", epoch_order(12, 0, 0), seed=0, epoch=0)
    assert np.array_equal(np.concatenate([batch.images for batch in batches]), images)
    assert np.array_equal(np.concatenate([batch.labels for batch in batches]), labels)


@pytest.mark.parametrize("damage", ["text", "half"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, damage: str) -> None:
    bad = write_images(tmp_path, "only", 2, 1) / "train" / "only" / "1.png"
    bad.write_bytes(b"not an image" if damage == "text" else bad.read_bytes()[:300])
    data = ImageFolder(tmp_path, 8)
    with pytest.raises(DataError, match=f"cannot read image {bad}"):
        data.load("train", np.arange(2), seed=0, epoch=0)
    with pytest.raises(DataError, match=f"cannot read image {bad}"):
        list(training_batches(data, seed=0, epoch=0, global_batch=1, rank=0, size=1))


def test_an_unsuitable_folder_is_an_error_that_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no folder .*train"):
        open_dataset(str(tmp_path / "nowhere"), image_size=8)
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="holds no class folders"):
        ImageFolder(tmp_path)
    (tmp_path / "train" / "a").mkdir()
    (tmp_path / "train" / "a" / "readme.txt").touch()
    with pytest.raises(DataError, match="holds no images"):
        ImageFolder(tmp_path)
    Image.new("L", (3, 3)).save(tmp_path / "train" / "a" / "grey.png")
    (tmp_path / "val" / "b").mkdir(parents=True)
    with pytest.raises(DataError, match=r"val/b is a class that the training images do not have"):
        ImageFolder(tmp_path)
    with pytest.raises(UsageError, match="workers -1"):
        ImageFolder(tmp_path, workers=-1)


def test_extreme_shapes_and_modes_are_read(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for shape in ((200, 2), (2, 200), (1, 1)):
            for mode in ("L", "RGBA", "P"):
                Image.new(mode, shape).save(tmp_path / split / "a" / f"{shape}-{mode}.png")
    data = ImageFolder(tmp_path, 8)
    for epoch in range(5):
        images, _ = data.load("train", np.arange(9), seed=0, epoch=epoch)
        assert images.shape == (9, 3, 8, 8)
    assert data.load("test", np.arange(9), seed=0, epoch=0)[0].shape == (9, 3, 8, 8)
