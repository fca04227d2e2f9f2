"""Checkpoints: atomic, complete, honest about damage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multiring.errors import UsageError
from multiring.models.errors import CheckpointError
from multiring.models.training import checkpoint
from multiring.models.training.checkpoint import Checkpoint


def make(step: int = 7, **changes: Any) -> Checkpoint:
    arrays = {
        "model/stage1.conv.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "model/scalar": np.array(1e-300),
        "optimizer/empty": np.empty((0, 4), dtype=np.float64),
        "rng/torch": np.arange(256, dtype=np.uint8),
    }
    values: dict[str, Any] = {"epoch": 1, "config": {"depth": 8, "lr": 0.1}, "arrays": arrays}
    return Checkpoint(step, **(values | {"progress": {"sum": 0.1 + 0.2}} | changes))


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = make()
    path = checkpoint.save(tmp_path / "new" / "folder", state)
    back = checkpoint.read(path)
    assert (back.step, back.epoch, back.config, back.progress) == (7, 1, state.config, state.progress)
    assert list(back.arrays) == list(state.arrays)
    for name, value in state.arrays.items():
        assert back.arrays[name].dtype == value.dtype
        assert back.arrays[name].shape == value.shape
        assert back.arrays[name].tobytes() == value.tobytes()


def test_the_newest_are_kept_and_nothing_else_remains(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".step-9000000000.npz.1234.tmp").touch()  # as a process that was killed leaves it
    for step in (5, 100, 20, 1_000_000_000):
        checkpoint.save(tmp_path, make(step), keep=2)
    names = sorted(os.listdir(tmp_path))
    kept = ["step-000000100.npz", "step-1000000000.npz"]
    assert names == [".step-9000000000.npz.1234.tmp", "notes.txt", *kept]
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert checkpoint.read(newest).step == 1_000_000_000


def test_a_crash_while_writing_leaves_the_old_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint.save(tmp_path, make())
    before = path.read_bytes()

    def crash(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", crash)
        with pytest.raises(CheckpointError, match=rf"cannot write checkpoint {path}: .*No space left"):
            checkpoint.save(tmp_path, make(epoch=2))
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == before


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "first byte": lambda content: b"\xff" + content[1:],
    "a byte of an array": lambda content: content[:50_000] + bytes([content[50_000] ^ 1]) + content[50_001:],
    "cut": lambda content: content[:-200],
    "text": lambda content: b"rubbish",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_that_names_the_file(tmp_path: Path, damage: str) -> None:
    big = {"model/w": np.random.default_rng(0).standard_normal(10_000)}
    path = checkpoint.save(tmp_path, make(arrays=big))
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    told = rf"(?s){path} is damaged or is no checkpoint.*; delete it to go on"
    with pytest.raises(CheckpointError, match=told):
        checkpoint.read(path)


def test_a_missing_array_and_another_format_are_errors(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, make())
    with np.load(path) as archive:
        members = {name: archive[name] for name in archive.files}
    lacking = {name: value for name, value in members.items() if name != "model/scalar"}
    np.savez(path, **lacking)
    with pytest.raises(CheckpointError, match="model/scalar"):
        checkpoint.read(path)
    document = json.loads(members["checkpoint"].tobytes()) | {"format": 99}
    np.savez(path, **(members | {"checkpoint": np.frombuffer(json.dumps(document).encode(), dtype=np.uint8)}))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.read(path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        checkpoint.read(path)


def test_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="array bad holds Python objects"):
        checkpoint.save(tmp_path, make(arrays={"bad": np.array([object()])}))
    with pytest.raises(UsageError, match="at least one checkpoint"):
        checkpoint.save(tmp_path, make(), keep=0)
    assert os.listdir(tmp_path) == []


def test_locating_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        checkpoint.locate(tmp_path)
    assert checkpoint.latest(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoint.read(tmp_path / "nowhere.npz")
    path = checkpoint.save(tmp_path / "checkpoints", make())
    for place in (tmp_path, tmp_path / "checkpoints", path):
        assert checkpoint.locate(place) == path
