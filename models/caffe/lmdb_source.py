"""Samples of a folder that Caffe's `convert_imageset` has made: an LMDB with one Datum for each image."""

from __future__ import annotations

import io
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from multiring.errors import UsageError
from multiring.models.caffe.schema import message
from multiring.models.errors import DataError

__all__ = ["Lmdb"]

Array = npt.NDArray[Any]


class _Database:
    """An LMDB that is open. A process may open each one once, so that several nets share it."""

    def __init__(self, path: Path) -> None:
        try:
            import lmdb
        except ImportError as error:
            raise UsageError(f"{path} is an LMDB, which the package lmdb reads: pip install lmdb") from error
        try:
            # Without a lock, for ranks may have no right to write to the folder.
            self.environment = lmdb.open(str(path), readonly=True, lock=False, create=False)
        except lmdb.Error as error:
            raise DataError(f"cannot read the LMDB {path}: {error}") from error


_databases: weakref.WeakValueDictionary[Path, _Database] = weakref.WeakValueDictionary()


def _opened(path: Path) -> _Database:
    path = path.resolve()
    database = _databases.get(path)
    if database is None:
        database = _databases[path] = _Database(path)
    return database


class Lmdb:
    """The images and labels of an LMDB, in the order of its keys.

    Args:
        path: The folder.

    Raises:
        UsageError: The package lmdb is not installed.
        DataError: The folder cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._datum = path, message("Datum")
        self._database = _opened(path)
        self._count = int(self._database.environment.stat()["entries"])
        self._cursor = self._database.environment.begin().cursor()
        self._at = -1  # number of the entry at the cursor; -1: none

    def __len__(self) -> int:
        return self._count

    def load(self, index: int, epoch: int) -> tuple[Array, float]:
        """As `Samples`. Entries are reached one after the other, so ascending numbers are fast."""
        if not 0 <= self._at <= index:
            self._cursor.first()
            self._at = 0
        while self._at < index:
            self._cursor.next()
            self._at += 1
        datum = self._datum()
        try:
            datum.ParseFromString(self._cursor.value())
            return self._image_of(datum), float(datum.label)
        except Exception as error:
            key = bytes(self._cursor.key()).decode(errors="replace")
            raise DataError(f"cannot read entry {index} ({key}) of the LMDB {self._path}: {error}") from error

    def _image_of(self, datum: Any) -> Array:
        """The pixels: float32, shape (channels, height, width), colours as blue, green, red."""
        if datum.encoded:
            from PIL import Image

            with Image.open(io.BytesIO(datum.data)) as file:
                is_grey = file.mode in ("1", "L", "I;16")
                pixels = np.asarray(file.convert("L" if is_grey else "RGB"), np.float32)
            return pixels[None] if is_grey else np.ascontiguousarray(pixels[:, :, ::-1].transpose(2, 0, 1))
        values = np.frombuffer(datum.data, np.uint8) if datum.data else np.array(datum.float_data)
        return values.astype(np.float32).reshape(datum.channels, datum.height, datum.width)
