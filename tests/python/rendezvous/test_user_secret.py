"""The file with a user's secret, on file systems with and without hard links."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from multiring.errors import UsageError
from multiring.rendezvous import user_secret


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the secret is, in an empty home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(user_secret, "_PATIENCE", 0.1)
    return tmp_path / ".config/multiring/secret"


@pytest.fixture(params=["links", errno.EOPNOTSUPP], ids=["links", "no links"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with hard links, and some without."""
    if request.param != "links":
        no_links(monkeypatch, request.param)


def no_links(monkeypatch: pytest.MonkeyPatch, number: int = errno.EPERM) -> None:
    def link(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.link", link)


@pytest.mark.usefixtures("file_system")
def test_it_is_one_for_all_processes_of_a_user_and_for_their_eyes_only(path: Path) -> None:
    first = user_secret.job_secret("a")
    assert len(first) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["secret"]
    assert user_secret.job_secret("a") == first
    assert user_secret.job_secret("b") != first
    path.chmod(0o644)
    with pytest.raises(UsageError, match="others may read .*; set MULTIRING_SECRET"):
        user_secret.job_secret("a")


@pytest.mark.usefixtures("file_system")
def test_those_who_make_it_at_once_agree(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            assert len({*pool.map(user_secret.job_secret, ["a"] * 8)}) == 1
            assert [file.name for file in path.parent.iterdir()] == ["secret"]
            path.unlink()


def test_one_that_is_being_written_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_links(monkeypatch)
    path.parent.mkdir(parents=True)
    path.touch(0o600)
    states = iter(["ab" * 10 + "a", "ab" * 32])
    monkeypatch.setattr(user_secret.time, "sleep", lambda _: path.write_text(next(states)))
    secret = user_secret.job_secret("a")
    assert path.read_text() == "ab" * 32
    assert user_secret.job_secret("a") == secret


def test_one_that_stays_incomplete_is_told(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.touch(0o600)
    for text in ("", "ab"):
        path.write_text(text)
        with pytest.raises(UsageError, match="is incomplete: remove it; set MULTIRING_SECRET"):
            user_secret.job_secret("a")
    assert path.read_text() == "ab", "it may be of somebody who is slow"


def test_a_full_file_system_leaves_no_half_of_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_links(monkeypatch)
    write = os.write

    def half_of_it(descriptor: int, data: bytes) -> int:
        named = os.readlink(f"/proc/self/fd/{descriptor}")
        return write(descriptor, data[:10] if named == str(path) else data)

    monkeypatch.setattr("os.write", half_of_it)
    with pytest.raises(UsageError, match=r"no space left .*; set MULTIRING_SECRET"):
        user_secret.job_secret("a")
    assert list(path.parent.iterdir()) == []


def test_no_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/1/nowhere")
    with pytest.raises(UsageError, match="cannot be kept"):
        user_secret.job_secret("a")
