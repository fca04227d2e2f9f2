"""The timeline: what is in it, and how it is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import multiring.horovod.torch as hvd
from multiring import Communicator
from multiring.horovod import timeline
from tests.adapters.horovod.support import with_hvd
from tests.on_ranks import on_ranks
from tests.support import run_job

Event = dict[str, Any]


def spans(events: Sequence[Event], tensor: str) -> list[tuple[str, float, float]]:
    """Name, beginning and end of what happened to a tensor, the outer before the inner ones."""
    numbers = [
        event["pid"]
        for event in events
        if event["name"] == "process_name" and event["args"] == {"name": tensor}
    ]
    assert len(numbers) == 1
    found: list[tuple[str, float, float]] = []
    begun: list[tuple[str, float, int]] = []
    for event in events:
        if event["pid"] != numbers[0] or event["ph"] not in "BE":
            continue
        if event["ph"] == "B":
            begun.append((event["name"], event["ts"], len(found)))
            found.append(("", 0.0, 0.0))
        else:
            name, since, place = begun.pop()
            assert name == event["name"]
            found[place] = (name, since, event["ts"])
    assert not begun
    return found


@with_hvd
def test_what_is_in_a_timeline(comm: Communicator) -> None:
    path = Path(hvd.broadcast_object(str(Path("/tmp") / f"timeline-{id(comm)}-{comm.rank}.json")))
    hvd.allreduce(torch.ones(3), name="before")
    hvd.start_timeline(str(path), mark_cycles=True)
    if comm.rank == 0:
        with pytest.raises(ValueError, match="is being written already"):
            hvd.start_timeline("/none")
    hvd.barrier()
    for _ in range(2):
        hvd.allreduce(torch.ones(3), name="twice")
    hvd.broadcast(torch.ones(2, 2), 0, name="other")
    hvd.stop_timeline()
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(3), name="after")
    assert timeline.active is None
    if comm.rank == 0:
        check(json.loads(path.read_text()))
        path.unlink()


def check(events: list[Event]) -> None:
    found = spans(events, "twice")
    assert [name for name, _, _ in found] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE"] * 2
    for (_, submitted, matched), (_, since, ended), (_, queued, begun) in (found[:3], found[3:]):
        assert 0 <= submitted <= matched == since == queued <= begun <= ended
    assert found[2][2] <= found[3][1]
    assert [name for name, _, _ in spans(events, "other")] == ["NEGOTIATE_BROADCAST", "BROADCAST", "QUEUE"]
    (ends,) = [event for event in events if event["name"] == "BROADCAST" and event["ph"] == "E"]
    assert ends["args"] == {"dtype": "float32", "shape": [2, 2]}
    cycles = [event["ts"] for event in events if event["name"] == "CYCLE_START"]
    assert {matched for _, _, matched in (found[0], found[3])} <= set(cycles)
    assert len(cycles) == len(set(cycles)) == 4
    assert "after" not in json.dumps(events)
    assert "before" not in json.dumps(events)


@on_ranks(1)
@with_hvd
def test_what_fails(comm: Communicator) -> None:
    with pytest.raises(OSError, match="/proc/none"):
        hvd.start_timeline("/proc/none")
    assert timeline.active is None
    hvd.shutdown()
    for call in (hvd.stop_timeline, lambda: hvd.start_timeline("x")):
        with pytest.raises(ValueError, match="not been initialized"):
            call()


SCRIPT = """
import torch
import horovod.torch as hvd

hvd.init()
hvd.allreduce(torch.ones(3), name="gradient")
"""


@pytest.mark.full
def test_variables_and_a_program_that_does_not_shut_down(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    env = {"HOROVOD_TIMELINE": str(path)}
    run_job(2, SCRIPT, launcher_args=["--horovod"], env=env, code=0)
    events = json.loads(path.read_text())
    assert [name for name, _, _ in spans(events, "gradient")] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE"]
    assert "CYCLE_START" not in path.read_text()


@pytest.mark.full
def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    for path, words in (("/proc/none", "no timeline is written"), ("/dev/full", "No space left on device")):
        done = run_job(1, SCRIPT, launcher_args=["--horovod"], env={"HOROVOD_TIMELINE": path}, code=0)
        assert done.stderr.count(words) == 1
        assert "Traceback" not in done.stderr
