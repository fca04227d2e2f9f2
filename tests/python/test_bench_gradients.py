"""`multiring bench gradients`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from multiring.models.bench.gradient_report import GradientsReport, Memory, StepRow
from multiring.models.bench.gradient_steps import GradientsOnly, gradient_shapes
from multiring.models.bench.measure import Sample
from multiring.models.bench.memory import PeakMemory, proportional_bytes
from multiring.models.bench.results import Machine
from multiring.models.errors import DataError
from tests.support import Job, wait_until


def sample(seconds: float) -> Sample:
    return Sample(seconds, seconds * 0.9, seconds * 1.1, 10)


def memory(held: int, peak: int) -> Memory:
    return Memory(held << 20, peak << 20)


@pytest.fixture
def report() -> GradientsReport:
    names = ["no synchronisation", "multiring", "DDP over Gloo"]
    return GradientsReport(
        command="multiring bench gradients",
        launcher="multiring",
        machine=Machine("a processor", 2, 2**30, "Linux 6", "3.11", {"multiring": "0.1"}),
        ranks=2,
        date="2026-01-01T00:00:00+00:00",
        bytes=102_228_128,
        batch=32,
        gradients=tuple(StepRow(n, sample(s)) for n, s in zip(names, [0.01, 0.02, 0.11], strict=True)),
        training=tuple(StepRow(n, sample(s)) for n, s in zip(names, [0.1, 0.125, 0.2], strict=True)),
        memory={
            n: Memory(h << 20, p << 20)
            for n, h, p in zip(names, [200, 210, 190], [201, 320, 190], strict=True)
        },
    )


def test_what_follows_from_the_times(report: GradientsReport) -> None:
    ours, ddp = report.gradients[1:]
    assert report.communication(ours) == pytest.approx(0.01)
    assert report.communication(ddp) == pytest.approx(0.1)
    assert report.more_memory(ours) == Memory(10 << 20, 120 << 20)
    assert report.efficiency(report.training[1]) == pytest.approx(0.8)
    assert report.images_per_second(report.training[1]) == pytest.approx(512)


def test_json_goes_round(report: GradientsReport) -> None:
    text = report.to_json()
    assert GradientsReport.from_json(text) == report
    assert json.loads(text)["derived"]["efficiency"]["multiring"] == pytest.approx(0.8)
    for broken in ("", "{}", text.replace("bench gradients", "bench something", 1), text[:-20]):
        with pytest.raises(DataError):
            GradientsReport.from_json(broken)


def test_tables(report: GradientsReport) -> None:
    text = report.render("markdown", None)
    assert "| multiring | 20.0 ms [18.0..22.0] | 10.0 ms | 10.22 GB/s | +10.0 MiB | +120.0 MiB |" in text
    assert "| multiring | 125.0 ms [112.5..137.5] | 512 | 0.800 |" in text
    assert "DDP over Gloo" in report.render("rich", None)


def test_picture(report: GradientsReport, tmp_path: Path) -> None:
    report.draw(tmp_path / "plot")
    data = (tmp_path / "plot").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


def test_the_gradients_are_those_of_resnet_50() -> None:
    shapes = gradient_shapes()
    assert len(shapes) == 161
    assert sum(math.prod(shape) for shape in shapes) == 25_557_032
    model = GradientsOnly(shapes[:5])
    torch.autograd.backward(model())
    assert [tuple(weight.grad.shape) for weight in model.weights] == [tuple(shape) for shape in shapes[:5]]
    assert all((weight.grad == 1).all() for weight in model.weights)


def test_memory_is_seen() -> None:
    before = proportional_bytes()
    with PeakMemory() as peak:
        held = bytearray(64 << 20)
        held[::4096] = b"x" * len(held[::4096])
        wait_until(lambda: peak.bytes - before > 60 << 20, "a look at the memory")
        del held
    assert peak.bytes - before > 60 << 20


def test_a_run_measures_prints_and_writes_and_leaves_nothing() -> None:
    def command(root: Path) -> list[str]:
        files = ["--json", str(root / "d" / "r.json"), "--plot", str(root / "d" / "r.png")]
        return [sys.executable, "-m", "multiring", "bench", "gradients", "-np", "2", "--steps", "1", *files]

    with Job(command) as job:
        done = job.finish(timeout=180)
        job.assert_nothing_left()
        assert done.returncode == 0, done.stderr
        assert "ResNet-50's gradients" in done.stdout
        report = GradientsReport.from_json((job.directory / "r.json").read_text())
        assert (job.directory / "r.png").read_bytes().startswith(b"\x89PNG")
    assert [row.name for row in report.gradients] == ["no synchronisation", "multiring", "DDP over Gloo"]
    assert report.ranks == 2
    assert done.stdout == report.render("rich", None) + "\n"
