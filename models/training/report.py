"""What a training leaves behind to look at: `metrics.jsonl`, a TensorBoard log and the curve as a picture."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from multiring.models.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EventLog", "MetricsFile", "plot_curve", "read_metrics"]

Record = Mapping[str, Any]

# Label and colour of the lines.
TRAINING = ("training", "#1f4e9c")
TEST = ("test", "#d1600a")
LINEAR_BELOW = 0.1


class MetricsFile:
    """One JSON object per line and event, appended as the training goes; floats keep all their bits.

    Args:
        path: The file.
        resume_step: Keep the records up to this step, as a training that goes on from there makes the
            later ones anew; None starts an empty file.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        self.path = path
        if resume_step is not None and path.exists():
            # Replaced as a whole, so that a crash right here does not lose the records.
            kept = [record for record in read_metrics(path) if record["step"] <= resume_step]
            rewritten = path.with_suffix(".tmp")
            rewritten.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
            rewritten.replace(path)
        self._file = path.open("w" if resume_step is None else "a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append a record, which holds `kind` and `step`, and hand it to the system at once."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read all records of a `metrics.jsonl`.

    A last line that a crash left incomplete is ignored.

    Raises:
        DataError: Another line is no JSON; names file and line.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise DataError(f"{path}, line {number} is damaged: {error}") from error
    return records


class EventLog:
    """TensorBoard scalars, written as the records of TensorBoard's own event format.

    The protocol buffers come from the tensorboard package; no framework takes part.

    Args:
        directory: Where the event file goes; made if it does not exist.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file: IO[bytes] = (directory / name).open("wb")
        self._writer = RecordWriter(self._file)
        self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars of one step by tag ("loss/train")."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._put(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._file.flush()


def plot_curve(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw loss and error over the epochs into a PNG.

    Args:
        records: Records of a `metrics.jsonl`.
        path: The picture.
        title: Headline.
    """
    # The picture needs no display, and the caller's own figures are left alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    loss, error = figure.subplots(1, 2)
    steps = [record for record in records if record["kind"] == "step"]
    epochs = [record for record in records if record["kind"] == "epoch"]
    tests = [record for record in epochs if "test_loss" in record]
    if steps:
        position = [record["position"] for record in steps]
        values = [record["loss"] for record in steps]
        alone = "." if len(steps) == 1 else ""  # a line needs two points to be seen
        loss.plot(position, values, color="#b8c4d6", linewidth=1, marker=alone, label="training, steps")
    _line(loss, epochs, [record["train_loss"] for record in epochs], TRAINING)
    _line(loss, tests, [record["test_loss"] for record in tests], TEST)
    loss.set_yscale("log")
    _dress(loss, "loss", "cross-entropy per image (log scale)")
    _line(error, epochs, [_percent_wrong(record["train_accuracy"]) for record in epochs], TRAINING)
    _line(error, tests, [_percent_wrong(record["test_accuracy"]) for record in tests], TEST)
    # In the title, where no line passes.
    reached = f"; test accuracy {100 * tests[-1]['test_accuracy']:.2f} %" if tests else ""
    error.set_yscale("symlog", linthresh=LINEAR_BELOW)  # a logarithmic axis has no zero
    error.set_ylim(bottom=-LINEAR_BELOW / 10)  # so that a line at 0 is seen whole
    _dress(error, f"error{reached}", f"wrong answers in % (log scale from {LINEAR_BELOW:g} on)")
    figure.savefig(path, dpi=120)


def _percent_wrong(accuracy: float) -> float:
    return 100.0 * (1.0 - accuracy)


def _line(axes: Axes, records: list[dict[str, Any]], values: list[float], style: tuple[str, str]) -> None:
    if records:
        label, color = style
        position = [record["position"] for record in records]
        axes.plot(position, values, color=color, linewidth=2, marker="o", markersize=3.5, label=label)


def _dress(axes: Axes, title: str, unit: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(title)
    axes.set_xlabel("epochs")
    axes.set_ylabel(unit)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, which="major", alpha=0.4)
    axes.grid(visible=True, which="minor", alpha=0.12)
    axes.set_xlim(left=0)
    if axes.lines:
        axes.legend()
