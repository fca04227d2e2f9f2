"""`multiring bench allreduce --device cuda`: that it runs through, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.gpu import stand_in
from tests.gpu.devices import why_not
from tests.support import refused, run_multiring

_SIZES = [4, 64 * 1024]
_OPTIONS = ("bench", "allreduce", "--device", "cuda", "--sizes", "4,64KiB", "--seconds", "0.01")
_IN_PLACE_OF_CUPY = Path(__file__).with_name("in_place_of_cupy")


def _check(path: Path, peers: set[str]) -> None:
    report = json.loads(path.read_text())
    parts = {"copy to host", "on the host", "copy to device"}
    assert {row["contender"] for row in report["rows"]} == {"multiring", "limit", *parts, *peers}
    for size in _SIZES:
        rows = {row["contender"]: row for row in report["rows"] if row["bytes"] == size}
        slowest = max(rows[part]["sample"]["median"] for part in parts)
        assert rows["limit"]["sample"]["median"] == slowest
        assert set(rows["multiring"]["derived"]["ratios"]) == peers
    assert rows["multiring"]["derived"]["of_limit"] == slowest / rows["multiring"]["sample"]["median"]


def test_runs_through_fake(tmp_path: Path) -> None:
    """On the stand-ins for the driver, CuPy and its NCCL; times mean nothing there."""
    environment = stand_in.environment()
    path = os.pathsep.join([str(_IN_PLACE_OF_CUPY), environment["PYTHONPATH"]])
    record, plot = tmp_path / "record.json", tmp_path / "plot.png"
    words = ("-np", "2", "--json", str(record), "--plot", str(plot), "--format", "compact")
    done = run_multiring(*_OPTIONS, *words, env={**environment, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    _check(record, {"NCCL"})
    assert "Gloo was left out: it takes PyTorch's tensors" in done.stdout
    assert "| size | multiring us | GB/s | of limit | NCCL us | GB/s | best x NCCL |" in done.stdout
    assert plot.stat().st_size > 0


def test_runs_through_torch(tmp_path: Path) -> None:
    """Ranks share a GPU, which NCCL refuses, unless there are two."""
    record = tmp_path / "record.json"
    done = run_multiring(*_OPTIONS, "-np", "2", "--json", str(record), "--format", "compact")
    assert done.returncode == 0, done.stderr
    _check(record, {"Gloo"} if "NCCL was left out" in done.stdout else {"Gloo", "NCCL"})


def test_runs_through_cupy(tmp_path: Path) -> None:
    if why_not("torch") is None:
        pytest.skip("PyTorch sees a device, and is taken")
    record = tmp_path / "record.json"
    done = run_multiring(*_OPTIONS, "-np", "1", "--json", str(record), "--format", "compact")
    assert done.returncode == 0, done.stderr


def test_refused_without_a_device_fake() -> None:
    """What stands in the way is told before any rank starts."""
    if why_not("torch") is None or importlib.util.find_spec("cupy") is not None:
        pytest.skip("there may be a device")
    text = refused(*_OPTIONS)
    assert "--device cuda: no device to measure: PyTorch" in text
    assert "CuPy is not installed; `multiring doctor` looks for the driver" in text


def test_options_about_the_host_are_refused_fake() -> None:
    for words, text in (
        (["--modes", "1x2c"], "--modes is of arrays on the host: leave it or --device out"),
        (["--peers", "mpi"], "leave mpi out of --peers"),
        (["--emulate", "2x1"], "--device and --emulate do not go together"),
    ):
        assert text in refused(*_OPTIONS, *words)
