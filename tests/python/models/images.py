"""Image folders for the tests of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def write_images(root: Path, classes: str, train: int, val: int, kind: str = "png", width: int = 24) -> Path:
    """Random images, so many of each class ("cat dog"): `root/train/cat/0.png`."""
    generator = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for name in classes.split():
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 255, (width * 3 // 4, width, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.{kind}")
    return root
