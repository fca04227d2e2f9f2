"""Where a training writes: the output directory of rank 0, and what the user sees meanwhile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from multiring.errors import UsageError
from multiring.models.training import checkpoint
from multiring.models.training.curve import plot_curve
from multiring.models.training.progress import Progress
from multiring.models.training.report import EventLog, MetricsFile, read_metrics

__all__ = ["DirectoryOutputs", "NoOutputs", "Outputs", "prepare_directory", "refuse_earlier_results"]

METRICS = "metrics.jsonl"
CONFIG = "config.json"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
CURVE = "curve.png"
SUMMARY = "summary.json"


class Outputs(Protocol):
    """Takes records of steps (`kind` "step") and epochs (`kind` "epoch")."""

    def record(self, step: int, position: float, record: Mapping[str, Any]) -> None:
        """Keep a record; `position` is the training's progress in epochs."""


class NoOutputs:
    """Keeps nothing: every rank but the first."""

    def record(self, step: int, position: float, record: Mapping[str, Any]) -> None:
        """Nothing."""


class DirectoryOutputs:
    """Writes `metrics.jsonl` and the TensorBoard log, and shows the progress.

    Args:
        directory: The output directory; exists.
        progress: What the user sees.
        resume_step: Step that the training goes on from; None starts afresh.
        report: Whether to write a TensorBoard log and the curve.

    Raises:
        UsageError: What the report is made with is not installed.
    """

    def __init__(self, directory: Path, progress: Progress, *, resume_step: int | None, report: bool) -> None:
        lacking = [name for name in ("matplotlib", "tensorboard") if report and find_spec(name) is None]
        if lacking:
            # Said before the training, not after it.
            raise UsageError(
                f"the report needs {' and '.join(lacking)}; run pip install "
                "'multiring[train]', or give --no-report"
            )
        self._directory = directory
        self._progress = progress
        self._metrics = MetricsFile(directory / METRICS, resume_step)
        self._events = EventLog(directory / TENSORBOARD) if report else None

    def record(self, step: int, position: float, record: Mapping[str, Any]) -> None:
        """Keep a record; see `Outputs.record`."""
        self._metrics.write({"kind": record["kind"], "step": step, "position": position, **record})
        if record["kind"] == "step":
            scalars = {"loss/step": record["loss"], "learning rate": record["lr"]}
            self._progress.advance(step, f"loss {record['loss']:.4f}")
        else:
            names = {"train_loss": "loss/train", "test_loss": "loss/test"}
            names |= {"train_accuracy": "accuracy/train", "test_accuracy": "accuracy/test"}
            names |= {"images_per_second": "images per second"}
            scalars = {tag: record[name] for name, tag in names.items() if name in record}
            self._progress.advance(step, "")
            self._progress.line(_epoch_line(step, record))
        if self._events is not None:
            self._events.scalars(step, scalars)

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        if self._events is not None:
            self._events.close()

    def draw(
        self, title: str, one_rank_speed: float | None = None, unsynchronised_speed: float | None = None
    ) -> Path:
        """Draw the curve of all records, earlier ones of a resumed training included; returns its path."""
        path = self._directory / CURVE
        plot_curve(read_metrics(self._directory / METRICS), path, title, one_rank_speed, unsynchronised_speed)
        return path


def _epoch_line(step: int, record: Mapping[str, Any]) -> str:
    line = f"epoch {record['epoch'] + 1:3d}  step {step:6d}  loss {record['train_loss']:.4f}"
    line += f"  accuracy {100 * record['train_accuracy']:6.2f} %"
    if "test_loss" in record:
        line += f"  test loss {record['test_loss']:.4f}  test accuracy {100 * record['test_accuracy']:6.2f} %"
    return f"{line}  {record['images_per_second']:.0f} images/s"


def prepare_directory(
    directory: Path, *, resume_step: int | None, resumes: bool, overwrite: bool, config: Mapping[str, Any]
) -> None:
    """Make the output directory and record the configuration in it; called by rank 0.

    Args:
        directory: The output directory.
        resume_step: Step that the training goes on from; later checkpoints are discarded. None starts
            afresh.
        resumes: Whether going on was asked for.
        overwrite: Whether results of an earlier training may be replaced.
        config: JSON values.

    Raises:
        UsageError: It holds results, and neither resuming nor overwriting was asked for, or it has no
            checkpoint to resume from. It cannot be written to.
    """
    if resume_step is not None:
        checkpoint.discard_after(directory / CHECKPOINTS, resume_step)
    else:
        if not overwrite:
            refuse_earlier_results(directory, resumes=resumes)
        for name in (TENSORBOARD, CHECKPOINTS):
            shutil.rmtree(directory / name, ignore_errors=True)
        for name in (METRICS, CURVE, SUMMARY):
            (directory / name).unlink(missing_ok=True)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write to {directory} ({error}); give another --output-dir") from None


def refuse_earlier_results(directory: Path, *, resumes: bool = False) -> None:
    """Raises UsageError if `directory` holds the results of an earlier training, and says what to do;
    `resumes`: going on was asked for, and there was no checkpoint."""
    if not (directory / METRICS).exists():
        return
    if resumes:
        raise UsageError(
            f"{directory} has no checkpoint to go on from: that training was stopped before its first one "
            "(--checkpoint-every); give --overwrite to start again"
        )
    raise UsageError(
        f"{directory} holds the results of an earlier training; give --resume to go on, --overwrite to "
        "replace them, or another --output-dir"
    )
