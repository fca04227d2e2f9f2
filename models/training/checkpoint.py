"""Checkpoints: one file each, written atomically, without pickle, readable from every framework.

A checkpoint is a NumPy `.npz` archive. It holds the arrays of the trainer by name (`model/...`,
`optimizer/...`, `rng/...`) and, as `checkpoint`, the bytes of one JSON document with the position in the
training and the configuration. `numpy.load` opens it; the archive's check sums tell a damaged file.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from multiring.errors import UsageError
from multiring.models.errors import CheckpointError

__all__ = ["Checkpoint", "discard_after", "latest", "locate", "read", "save"]

Array = npt.NDArray[Any]

FORMAT = 1
DOCUMENT = "checkpoint"
PATTERN = re.compile(r"step-(\d{9,})\.npz")


@dataclass(frozen=True)
class Checkpoint:
    """A state from which a training continues bit for bit.

    Attributes:
        step: Steps that are done.
        epoch: Epoch that the next step belongs to, from 0.
        config: What has to be equal for the continuation to be the same training; JSON values.
        arrays: Model, optimizer and random number state by name.
        progress: Sums of the epoch in progress and the like; JSON values.
    """

    step: int
    epoch: int
    config: Mapping[str, Any]
    arrays: Mapping[str, Array]
    progress: Mapping[str, Any] = field(default_factory=dict)


def save(directory: str | os.PathLike[str], checkpoint: Checkpoint, *, keep: int = 3) -> Path:
    """Write `step-<step>.npz` so that a crash at any moment leaves the old files or the new one, never half.

    Args:
        directory: Where checkpoints are; made if it does not exist.
        checkpoint: What to write.
        keep: How many of the newest files to leave, at least 1; older ones are deleted once the new one is
            safe.

    Returns:
        Path of the file.

    Raises:
        UsageError: `keep` is below 1, or an array holds Python objects.
        CheckpointError: The file cannot be written.
    """
    if keep < 1:
        raise UsageError(f"at least one checkpoint has to be kept, not {keep}")
    folder = Path(directory)
    path = folder / f"step-{checkpoint.step:09d}.npz"
    temporary = folder / f".{path.name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                _write(file, checkpoint)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_directory(folder)
        for old in _listed(folder)[:-keep]:
            old.unlink()
    except OSError as error:
        raise CheckpointError(f"cannot write checkpoint {path}: {error}") from error
    return path


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint and check that it is whole.

    Raises:
        CheckpointError: The file is missing, damaged or of another format; says which and what to do.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays: dict[str, Array] = {name: archive[name] for name in archive.files}
        document = json.loads(arrays.pop(DOCUMENT).tobytes())
        if document["format"] != FORMAT:
            raise CheckpointError(
                f"checkpoint {path} has format {document['format']}, this version reads {FORMAT}"
            )
        if missing := sorted(set(document["names"]) - arrays.keys()):
            raise KeyError(missing[0])
        return Checkpoint(
            document["step"], document["epoch"], document["config"], arrays, progress=document["progress"]
        )
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    # What NumPy, zipfile and json raise for damaged bytes; a plain array file has no `files`.
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        AttributeError,
        TypeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise CheckpointError(
            f"checkpoint {path} is damaged or is no checkpoint ({type(error).__name__}: {error}); delete "
            "it to go on "
            "from an older one"
        ) from error


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The checkpoint of the highest step in a directory, or None where there is none."""
    folder = Path(directory)
    files = _listed(folder) if folder.is_dir() else []
    return files[-1] if files else None


def locate(path: str | os.PathLike[str]) -> Path:
    """Find the checkpoint that a user means by a path.

    Args:
        path: A checkpoint, a directory of checkpoints, or the output directory of a training.

    Raises:
        CheckpointError: There is none.
    """
    given = Path(path)
    if given.is_file():
        return given
    found = latest(given) or latest(given / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"there is no checkpoint at {given}; give a file step-*.npz or a directory of them"
        )
    return found


def discard_after(directory: str | os.PathLike[str], step: int) -> None:
    """Delete checkpoints of later steps: a training that goes on from `step` makes them anew."""
    folder = Path(directory)
    for path in _listed(folder) if folder.is_dir() else []:
        if _step(path) > step:
            path.unlink()


def _write(file: IO[bytes], checkpoint: Checkpoint) -> None:
    for name, value in checkpoint.arrays.items():
        if value.dtype.hasobject:
            raise UsageError(f"array {name} holds Python objects; a checkpoint holds numbers only")
    document = {
        "format": FORMAT,
        "step": checkpoint.step,
        "epoch": checkpoint.epoch,
        "config": dict(checkpoint.config),
        "progress": dict(checkpoint.progress),
        "names": list(checkpoint.arrays),
    }
    encoded = np.frombuffer(json.dumps(document).encode(), dtype=np.uint8)
    members: dict[str, Any] = {DOCUMENT: encoded, **checkpoint.arrays}
    np.savez(file, **members)


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _step(path: Path) -> int:
    match = PATTERN.fullmatch(path.name)
    return int(match[1]) if match else -1


def _listed(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if _step(path) >= 0), key=_step)
