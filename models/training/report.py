"""What a training leaves behind to look at: `metrics.jsonl` and a TensorBoard log."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from multiring.models.errors import DataError

__all__ = ["EventLog", "MetricsFile", "read_metrics"]

Record = Mapping[str, Any]


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
