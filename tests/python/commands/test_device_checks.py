"""What `multiring doctor` says of devices together; tests/gpu/test_fake_devices.py has the whole command."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from multiring import _core
from multiring.commands import device_libraries
from multiring.commands.device_libraries import DeviceLibrary, LookError
from multiring.commands.doctor import device_checks
from multiring.commands.doctor.finding import Finding, Status
from tests.support import process_exists, wait_until

DRIVER = DeviceLibrary("CUDA driver", "/lib/x", "of the system", "12.8", devices=4, pairs_without_access=())
NCCL = DeviceLibrary("NCCL", "/lib/y", "of a wheel", "2.27.3")
NO_NCCL = DeviceLibrary("NCCL", why="none")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The trials, which do not run."""
    trials: list[list[str]] = []
    monkeypatch.setattr(device_checks, "ask", lambda module, what, seconds: trials.append(module))
    return trials


def look(
    driver: DeviceLibrary, root: Path, nccl: DeviceLibrary = NO_NCCL, **environ: str
) -> dict[str, Finding]:
    return device_checks.look(driver, nccl, environ, root)


def test_pairs_without_access_are_named(asked: list[list[str]], tmp_path: Path) -> None:
    found = look(replace(DRIVER, pairs_without_access=((0, 1), (2, 3))), tmp_path)
    assert found["peer access"].detail == "none between devices 0 and 1, 2 and 3 (of 4 devices)"
    assert found["peer access"].status is Status.WARNING
    assert asked[-1][-1] == "2", "the first that reaches device 0"
    every = tuple((first, second) for first in range(8) for second in range(first + 1, 8))
    found = look(replace(DRIVER, devices=8, pairs_without_access=every), tmp_path)
    assert found["peer access"].detail.endswith("0 and 7, 1 and 2, and 20 pairs more (of 8 devices)")
    assert asked[-1][-1] == "0"


def test_one_device_has_nobody_to_reach(asked: list[list[str]], tmp_path: Path) -> None:
    one = replace(DRIVER, devices=1)
    assert list(look(one, tmp_path, NCCL)) == ["device IPC"]
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    assert list(look(one, tmp_path)) == ["device IPC"], "the container has one"
    hidden = look(one, tmp_path, CUDA_VISIBLE_DEVICES="1")["peer access"]
    assert hidden.detail == "not known: CUDA_VISIBLE_DEVICES=1 shows one of 2 devices"
    assert "without CUDA_VISIBLE_DEVICES" in hidden.fix
    assert "peer access" not in look(replace(DRIVER, pairs_without_access=None), tmp_path), (
        "the driver cannot tell"
    )
    assert [trial[-1] for trial in asked] == ["0"] * 4


@pytest.mark.parametrize(
    ("why", "fix"),
    [
        ("cuIpcOpenMemHandle on device 0 failed", "--ipc=host --pid=host"),
        ("cuMemAlloc of 2097152 bytes on device 0 failed", "when no job uses the device"),
    ],
)
def test_memory_that_is_not_shared_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str, fix: str
) -> None:
    def refuse(*_: object) -> str:
        raise LookError(why)

    monkeypatch.setattr(device_checks, "ask", refuse)
    found = look(DRIVER, tmp_path)["device IPC"]
    assert (found.status, found.detail) == (Status.WARNING, why)
    assert fix in found.fix


@pytest.mark.parametrize(
    ("blocks", "status"), [(1 << 14, Status.WARNING), (1 << 18, Status.OK), (None, Status.WARNING)]
)
def test_shared_memory_of_nccl(
    asked: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    blocks: int | None,
    status: Status,
) -> None:
    """Docker's 64 MiB; 1 GiB; none."""
    if blocks is not None:
        numbers = (4096, 4096, blocks, *[0] * 7)
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(numbers))
    found = look(DRIVER, tmp_path, NCCL)["NCCL shared memory"]
    assert found.status is status
    assert found.detail.startswith("/dev/shm")
    assert bool(found.fix) == (status is Status.WARNING)
    assert "NCCL shared memory" not in look(DRIVER, tmp_path), "which is not there"
    assert asked


@pytest.mark.parametrize(("read", "code"), [(b"multiring" * 7, 0), (bytes(63), 1)], ids=["same", "other"])
def test_other_bytes_are_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], read: bytes, code: int
) -> None:
    monkeypatch.setattr(_core, "import_device_memory", lambda handle, device: 0)
    monkeypatch.setattr(_core, "copy_from_device", lambda *_: np.frombuffer(read, np.uint8))
    assert device_checks.main(["import", "1", "00" * 64]) == code
    assert ("reads something else" in capsys.readouterr().err) == bool(code)


def test_a_trial_that_does_not_end_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    """The second process of a trial waits as long as it likes."""
    started = tmp_path / "started"
    module = tmp_path / "waits.py"
    module.write_text(
        "import subprocess, sys\n"
        f"child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        f"open({str(started)!r}, 'w').write(str(child.pid))\n"
        "child.wait()\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(LookError, match="it did not answer within 2 s"):
            device_libraries.ask(["waits"], "it", 2)
    wait_until(lambda: not process_exists(int(started.read_text())), "the end of the second process")
