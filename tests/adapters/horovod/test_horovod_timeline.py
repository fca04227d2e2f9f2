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
from tests.adapters.horovod.support import refused, with_hvd
from tests.support import run_job

Event = dict[str, Any]


def spans(events: Sequence[Event], tensor: str) -> list[tuple[str, float, float]]:
    """Name, beginning and end of what happened to a tensor, the outer before the inner ones."""
    (number,) = [event["pid"] for event in events if event.get("args") == {"name": tensor}]
    found: list[tuple[str, float, float]] = []
    begun: list[tuple[str, float, int]] = []
    for event in (event for event in events if event["pid"] == number):
        if event["ph"] == "B":
            begun.append((event["name"], event["ts"], len(found)))
            found.append(("", 0.0, 0.0))
        elif event["ph"] == "E":
            name, since, place = begun.pop()
            assert name == event["name"]
            found[place] = (name, since, event["ts"])
    assert not begun
    return found


@with_hvd()
def test_what_is_in_a_timeline(comm: Communicator) -> None:
    path = Path(hvd.broadcast_object(str(Path("/tmp") / f"timeline-{id(comm)}-{comm.rank}.json")))
    hvd.allreduce(torch.ones(3), name="before")
    if comm.rank == 0:
        refused(OSError, {"/proc/none": lambda: hvd.start_timeline("/proc/none")})
        assert timeline.active is None
    hvd.start_timeline(str(path), mark_cycles=True)
    hvd.start_timeline(str(path), mark_cycles=True)  # again: it goes on
    hvd.barrier()
    for _ in range(2):
        hvd.allreduce(torch.ones(3), name="twice")
    if comm.rank == 0:  # one that cannot be written: it goes on
        refused(OSError, {"/proc/none": lambda: hvd.start_timeline("/proc/none")})
    hvd.broadcast(torch.ones(2, 2), 0, name="other")
    hvd.start_timeline(f"{path}.2")  # another one: the first ends
    hvd.start_timeline(f"{path}.3")
    hvd.allreduce(torch.ones(3), name="third")
    hvd.stop_timeline()
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(3), name="after")
    assert timeline.active is None
    hvd.shutdown()
    for call in (hvd.stop_timeline, lambda: hvd.start_timeline("x")):
        refused(ValueError, {"not been initialized": call})
    if comm.rank == 0:
        check(json.loads(path.read_text()))
        path.unlink()
        assert json.loads(Path(f"{path}.2").read_text()) == []
        third = json.loads(Path(f"{path}.3").read_text())
        kinds = ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE"]
        assert [name for name, _, _ in spans(third, "allreduce.third")] == kinds
        Path(f"{path}.3").unlink()
        Path(f"{path}.2").unlink()


def check(events: list[Event]) -> None:
    found = spans(events, "allreduce.twice")
    assert [name for name, _, _ in found] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE"] * 2
    for (_, submitted, matched), (_, since, ended), (_, queued, begun) in (found[:3], found[3:]):
        assert 0 <= submitted <= matched == since == queued <= begun <= ended
    assert found[2][2] <= found[3][1]
    assert [name for name, _, _ in spans(events, "broadcast.other")] == [
        "NEGOTIATE_BROADCAST",
        "BROADCAST",
        "QUEUE",
    ]
    (ends,) = [event for event in events if event["name"] == "BROADCAST" and event["ph"] == "E"]
    assert ends["args"] == {"dtype": "float32", "shape": [2, 2]}
    cycles = [event["ts"] for event in events if event["name"] == "CYCLE_START"]
    assert {matched for _, _, matched in (found[0], found[3])} <= set(cycles)
    assert len(cycles) == len(set(cycles)) == 4
    assert "after" not in json.dumps(events)
    assert "before" not in json.dumps(events)


SCRIPT = """
import torch
import horovod.torch as hvd

hvd.init()
hvd.allreduce(torch.ones(3), name="gradient")
"""


@pytest.mark.full
def test_a_program_that_does_not_shut_down(tmp_path: Path) -> None:
    """With a timeline that the environment asks for, which can be written or not."""

    def errors(size: int, path: object) -> str:
        env = {"HOROVOD_TIMELINE": str(path)}
        return run_job(size, SCRIPT, launcher_args=["--horovod"], env=env, code=0).stderr

    path = tmp_path / "trace.json"
    errors(2, path)
    events = json.loads(path.read_text())
    assert [name for name, _, _ in spans(events, "allreduce.gradient")] == [
        "NEGOTIATE_ALLREDUCE",
        "ALLREDUCE",
        "QUEUE",
    ]
    assert "CYCLE_START" not in path.read_text()
    for bad, words in (("/proc/none", "no timeline is written"), ("/dev/full", "No space left on device")):
        found = errors(1, bad)
        assert found.count(words) == 1
        assert "Traceback" not in found
