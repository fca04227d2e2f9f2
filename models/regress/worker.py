"""One rank of a job of `multiring regress`: runs tasks and hands over what came out as files.

    python -m multiring.models.regress.worker ORDER.json

For a task T the job's directory gets T.json (state, values, hashes of all ranks) and T.npz (arrays), and, on
a rank that fails, T.rank-K.error. NOW says what is running. Files appear whole or not at all.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import multiring
from multiring import machine
from multiring.benchmarks import launch
from multiring.commands.frameworks import FRAMEWORKS, Framework, OwnWay
from multiring.models.frameworks import load_trainer
from multiring.models.regress.checks import Setup
from multiring.models.regress.tasks import Bench, UnavailableError, run_task
from multiring.rendezvous import launch_environment

__all__ = ["NOW", "STARTING", "Order"]

NOW = "NOW"
STARTING = "start"
DONE, UNAVAILABLE = "done", "unavailable"


@dataclass(frozen=True)
class Order:
    """What a job has to do.

    Attributes:
        framework: Trains; its own way is for the task "speed".
        tasks: See `tasks.run_task`; one after the other.
        setup: The setting.
        directory: Where results go; it exists.
    """

    framework: Framework
    tasks: tuple[str, ...]
    setup: Setup
    directory: str

    def to_json(self) -> str:
        """As the worker reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        """The order that `to_json` has written."""
        fields: dict[str, Any] = json.loads(text)

        def made(kind: Any, values: dict[str, Any]) -> Any:
            return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

        framework = fields["framework"]
        if framework["own_way"] is not None:
            framework["own_way"] = made(OwnWay, framework["own_way"])
        return cls(
            framework=made(Framework, framework),
            tasks=tuple(fields["tasks"]),
            setup=made(Setup, fields["setup"]),
            directory=fields["directory"],
        )


def main(path: str) -> int:
    """Run the order in the file `path` as one rank; returns the exit code."""
    order = Order.from_json(Path(path).read_text(encoding="utf-8"))
    directory = Path(order.directory)
    # Before anything starts threads, which then stay on this processor, too.
    placement = launch_environment.detect()
    before = machine.allowed_cpus()
    if placement.local_size <= len(before):
        launch.pin(placement)
    if placement.rank == 0:
        _write(directory / NOW, STARTING)
    comm = multiring.init()
    task = STARTING
    try:
        cores = launch.count_cores(comm, before)
        load_trainer(order.framework).set_threads(1)
        FRAMEWORKS.setdefault(order.framework.name, order.framework)
        bench = Bench(order.framework, comm, order.setup, cores)
        for task in order.tasks:
            if comm.rank == 0:
                _write(directory / NOW, task)
            _run(task, bench, directory)
    except KeyboardInterrupt:
        comm.abort(f"rank {comm.rank}: interrupted")
        return 130
    except BaseException as error:
        _write(directory / f"{task}.rank-{comm.rank}.error", _describe(error))
        traceback.print_exc()
        sys.stderr.flush()
        # The others may be waiting in a collective that this rank will not join.
        comm.abort(f"rank {comm.rank}: {error}")
        launch.abort_mpi(1)
        return 1
    finally:
        multiring.shutdown()
    return 0


def _describe(error: BaseException) -> str:
    # An error that another rank has caused comes last when they are looked through.
    late = isinstance(error, multiring.AbortedError | multiring.PeerLostError)
    text = f"{type(error).__name__}: {error}"
    return json.dumps({"late": late, "text": text, "trace": traceback.format_exc()})


def _run(task: str, bench: Bench, directory: Path) -> None:
    comm = bench.comm
    began = time.perf_counter()
    try:
        found = run_task(task, bench)
    except UnavailableError as error:
        if comm.rank == 0:
            _write_outcome(directory, task, {"state": UNAVAILABLE, "why": str(error)})
        return
    hashes = comm.allgather_object(found.hashes)
    if comm.rank == 0:
        if found.arrays:
            _write_arrays(directory / f"{task}.npz", found.arrays)
        seconds = time.perf_counter() - began
        outcome = {"state": DONE, "seconds": seconds, "values": found.values, "hashes": hashes}
        _write_outcome(directory, task, outcome)
    comm.barrier()


def _write_outcome(directory: Path, task: str, outcome: Mapping[str, Any]) -> None:
    # The error of not being finite is the judge's to tell: JSON as Python has it can hold such numbers.
    _write(directory / f"{task}.json", json.dumps(outcome))


def _write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    beside = path.with_name(f".{path.name}")
    with beside.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    beside.replace(path)


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
