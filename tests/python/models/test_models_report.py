"""Metrics file, TensorBoard log, curve and progress."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pty
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from multiring.errors import UsageError
from multiring.models.errors import DataError
from multiring.models.training import outputs
from multiring.models.training.curve import plot_curve
from multiring.models.training.outputs import DirectoryOutputs
from multiring.models.training.progress import BarProgress, LineProgress, SilentProgress, open_progress
from multiring.models.training.report import EventLog, MetricsFile, read_metrics

FIRST = {"kind": "epoch", "step": 10, "position": 1.0, "train_loss": 1.5, "train_accuracy": 0.5}
SECOND = {"kind": "epoch", "step": 20, "position": 2.0, "train_loss": 0.5, "train_accuracy": 1.0}
RECORDS = [
    {"kind": "step", "step": 5, "position": 0.5, "loss": 2.0},
    FIRST,
    {**SECOND, "test_loss": 0.6, "test_accuracy": 0.9, "images_per_second": 80.0},
]


def test_metrics_of_lost_steps_are_dropped_on_a_return(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    kept = [{"step": step, "loss": step * math.pi} for step in range(1, 6)]
    for record in kept:
        first.write(record)
    assert read_metrics(path) == kept  # at once, for those who follow a training, and every bit
    first.close()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    again = MetricsFile(path, resume_step=3)
    again.write({"step": 4, "new": True})
    again.close()
    assert read_metrics(path) == [*kept[:3], {"step": 4, "new": True}]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
    MetricsFile(path).close()
    assert read_metrics(path) == []
    MetricsFile(tmp_path / "moved.jsonl", resume_step=3).close()


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(DataError, match=rf"{path}, line 2 is damaged"):
        read_metrics(path)


def test_tensorboard_reads_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without this TensorBoard imports TensorFlow where it is installed, which takes seconds.
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("notf"))
    log = EventLog(tmp_path / "tensorboard")
    for step in (10, 20):
        log.scalars(step, {"loss/train": 1 / step, "accuracy/test": 0.5})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["accuracy/test", "loss/train"]
    read = [(event.step, event.value) for event in events.Scalars("loss/train")]
    assert read == [(10, pytest.approx(0.1)), (20, pytest.approx(0.05))]


def test_what_the_curve_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    for count in (0, 1, 3):
        plot_curve(
            RECORDS[:count], tmp_path / "curve.png", "a title", one_rank_speed=50.0, unsynchronised_speed=90.0
        )
    loss, accuracy, throughput = drawn[-1].axes
    assert [list(line.get_ydata()) for line in loss.lines] == [[2.0], [1.5, 0.5], [0.6]]
    assert [list(line.get_ydata()) for line in accuracy.lines] == [[50.0, 100.0], [90.0]]
    assert [list(line.get_ydata()) for line in throughput.lines] == [[80.0], [90.0, 90.0], [50.0, 50.0]]


def test_plain_lines_are_rare_but_epochs_always_show(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    with LineProgress(100, 8, stream) as shown:
        for step in range(1, 101):
            now += 0.25
            shown.advance(step, "loss 1")
        shown.line("epoch 1")
    lines = stream.getvalue().splitlines()
    left = {20: 20, 40: 15, 60: 10, 80: 5, 100: 0}
    assert lines == [
        *(f"step {at}/100  loss 1  32 images/s for each rank  0:00:{left[at]:02} left" for at in left),
        "epoch 1",
    ]


def test_a_pipe_gets_lines_and_a_terminal_a_bar() -> None:
    assert isinstance(open_progress(10, 0, 8, None), LineProgress)
    assert isinstance(open_progress(10, 0, 8, "/nowhere/at/all"), LineProgress)
    assert isinstance(open_progress(10, 0, 8, os.devnull), LineProgress)
    master, slave = pty.openpty()
    shown = open_progress(10, 2, 8, os.ttyname(slave))
    assert isinstance(shown, BarProgress)
    with shown:
        shown.advance(4, "loss 2.5")
        shown.advance(5, "loss 1.25")
        shown.line("epoch 1 [not markup]")
    os.set_blocking(master, False)
    written = ""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(master, 1 << 16):
            written += part.decode()
    for told in ("epoch 1 [not markup]", "5/10", "loss 1.25", "images/s for each rank"):
        assert told in written
    os.close(master)
    os.close(slave)


def test_missing_packages_are_told_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "find_spec", lambda name: None)
    told = r"needs matplotlib and tensorboard; run pip install 'multiring\[train\]'"
    with pytest.raises(UsageError, match=told):
        DirectoryOutputs(tmp_path, SilentProgress(), resume_step=None, report=True)
    DirectoryOutputs(tmp_path, SilentProgress(), resume_step=None, report=False).close()
