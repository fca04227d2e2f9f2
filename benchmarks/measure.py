"""How the time of a collective is taken.

All contenders are measured in one run, in turns of a few iterations each, so that what else the machine does
meets all of them alike. Before every iteration every rank writes its input anew (as a backward pass does, so
that the data lies in the caches of the rank that wrote it), and all meet at a barrier that belongs to no
contender. The clock is the host's: an iteration lasts from when the last rank enters the call to when the
last rank leaves it, so that how exactly they start together does not count.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from multiring import Communicator
from multiring.benchmarks.companion import LINE, Barrier, flags_of, map_flags
from multiring.benchmarks.contenders import Call, Contender, Elsewhere
from multiring.benchmarks.emulation.traffic import Sent, Traffic
from multiring.errors import InternalError

__all__ = ["NOISE", "REPEAT", "Meeting", "Pace", "Ratio", "Sample", "Sum", "Task", "durations", "measure"]

NOISE = 0.1  # times that scatter by less than this part of them are as steady as machines are
REPEAT = "noisy, repeat"

Arrays = TypeVar("Arrays")
TaskArrays = TypeVar("TaskArrays", contravariant=True)


@dataclass(frozen=True)
class Pace:
    """How often an operation is measured.

    Attributes:
        seconds: Time that the iterations of one contender may take for one size, as far as `least` allows.
        least: Iterations at least.
        most: Iterations at most.
        turn: Iterations of one contender before the next has its turn; one more comes first, unmeasured.
    """

    seconds: float = 0.5
    least: int = 6
    most: int = 400
    turn: int = 10


@dataclass(frozen=True)
class Sample:
    """Seconds that an operation took: median, and the tenth and ninetieth percentile."""

    median: float
    low: float
    high: float
    iterations: int

    @classmethod
    def of(cls, seconds: npt.NDArray[np.float64]) -> Sample:
        """The sample of single times."""
        low, median, high = np.percentile(seconds, [10, 50, 90])
        return cls(float(median), float(low), float(high), len(seconds))


@dataclass(frozen=True)
class Ratio:
    """The median of ratios within rounds, and where it would lie in 95 of 100 such runs.

    The interval is that of order statistics (of the sign test), which assumes nothing of how times scatter.
    With fewer than six rounds it is from the lowest to the highest.

    Attributes:
        median: The median.
        low: Lower end of the interval.
        high: Upper end of the interval.
        is_noisy: The interval is wider than what the ratio tells, its distance from 1, and than a tenth; or
            the ratio of the medians of both times lies outside.
    """

    median: float
    low: float
    high: float
    is_noisy: bool = False

    @classmethod
    def of(cls, times: Sequence[float], others: Sequence[float]) -> Ratio:
        """How many times as long `times` are as `others`, round by round."""
        ratios = np.sort(np.asarray(times, np.float64) / np.asarray(others, np.float64))
        count = len(ratios)
        below = max(0, int(count / 2 - 1.96 * np.sqrt(count) / 2))
        median, low, high = (float(x) for x in (np.median(ratios), ratios[below], ratios[count - 1 - below]))
        of_medians = float(np.median(times) / np.median(others))
        is_wide = high - low > max(abs(median - 1.0), NOISE)
        is_outside = of_medians < low * (1 - 1e-9) or of_medians > high * (1 + 1e-9)
        return cls(median, low, high, is_wide or is_outside)

    def text(self, digits: int) -> str:
        """For a table."""
        text = f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"
        return f"{text}, {REPEAT}" if self.is_noisy else text


class Meeting(Barrier):
    """The benchmark's own barrier.

    Args:
        comm: The ranks.
        cores: Processors that they have together.
        emulated: Whether their hosts are all this machine, and so share files, but no memory that
            multiring could give.
    """

    failure = InternalError

    def __init__(self, comm: Communicator, cores: int, *, emulated: bool = False) -> None:
        mine, theirs = _file_flags(comm) if emulated else _symmetric_flags(comm)
        super().__init__(mine, theirs, crowded=comm.size > cores)
        self.emulated = emulated

    def time_steps(self, step: Callable[[], object], count: int, *, warm_up: int = 1) -> tuple[int, int]:
        """When this rank began and ended `count` steps, in nanoseconds; `warm_up` more come first."""
        for _ in range(warm_up):
            step()
        self()
        begin = time.perf_counter_ns()
        for _ in range(count):
            step()
        end = time.perf_counter_ns()
        self()
        return begin, end


def _symmetric_flags(comm: Communicator) -> tuple[memoryview, list[memoryview]]:
    mine = comm.symmetric_empty(1, np.int64)
    mine.fill(0)
    comm.barrier()
    return mine.data, [comm.symmetric_peer(mine, r).data for r in range(comm.size) if r != comm.rank]


def _file_flags(comm: Communicator) -> tuple[memoryview, list[memoryview]]:
    path = None
    if comm.rank == 0:
        descriptor, path = tempfile.mkstemp(prefix="multiring-bench-")
        os.truncate(descriptor, comm.size * LINE * np.dtype(np.int64).itemsize)
        os.close(descriptor)
    path = comm.broadcast_object(path)
    flags = map_flags(path)
    comm.barrier()
    if comm.rank == 0:
        os.unlink(path)
    return flags_of(flags, comm.rank, comm.size)


class Task(Protocol[TaskArrays]):
    """What all contenders do: with which input, and with which result."""

    def write(self, arrays: TaskArrays, iteration: int) -> None:
        """Writes this rank's input anew."""

    def wrong(self, arrays: TaskArrays, result: object, iteration: int) -> str:
        """Looks at a few elements of the result; says what is wrong, or nothing.

        Args:
            arrays: The contender's.
            result: What its call has returned.
            iteration: Its number, as at `write`.
        """


class _Vector(Protocol):
    """An array of float32, on the host or on a device."""

    @property
    def size(self) -> int:
        """Its elements."""

    def fill(self, value: float, /) -> None:
        """Writes it to all of them."""

    def __getitem__(self, index: int, /) -> Any:
        """One of them."""


class Sum:
    """Every rank's array becomes the sum of all ranks'.

    Args:
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def write(self, arrays: _Vector, iteration: int) -> None:
        """As `Task`."""
        arrays.fill(float(iteration % 64 + self._rank))

    def wrong(self, arrays: _Vector, result: object, iteration: int) -> str:
        """As `Task`."""
        x, size = arrays, self._size
        expected = size * (iteration % 64) + size * (size - 1) // 2
        if not x.size or x[0] == x[x.size // 2] == x[-1] == expected:
            return ""
        return f"the sum of {x.size} elements is {x[0]}, {x[x.size // 2]}, {x[-1]} where {expected} is right"


class _Race(Generic[Arrays]):
    """One size: every contender's arrays and call, and the times so far."""

    def __init__(
        self,
        comm: Communicator,
        meeting: Meeting,
        contenders: Sequence[Contender[Arrays] | Elsewhere],
        task: Task[Arrays],
        count: int,
    ) -> None:
        self.comm = comm
        self.meeting = meeting
        self.task = task
        self.contenders = contenders
        self.prepared = [contender.prepare(count) for contender in contenders]
        self.times: list[list[tuple[int, int]]] = [[] for _ in contenders]
        self.traffic = [Traffic() for _ in contenders]
        self.iteration = 0

    def iterate(self, index: int, count: int) -> list[tuple[int, int]]:
        """Iterations of a contender; when this rank entered and left each, in nanoseconds."""
        contender, prepared = self.contenders[index], self.prepared[index]
        if isinstance(contender, Elsewhere):
            self.iteration += count
            return contender.iterate(self.iteration - count + 1, count)
        assert prepared is not None
        return [self.iterate_here(index, *prepared) for _ in range(count)]

    def iterate_here(self, index: int, arrays: Arrays, call: Call) -> tuple[int, int]:
        """One iteration in this process."""
        self.iteration += 1
        self.task.write(arrays, self.iteration)
        self.meeting()
        begin = time.perf_counter_ns()
        result = call()
        end = time.perf_counter_ns()
        contender = self.contenders[index]
        if not contender.exact:  # nothing has kept the peers from being at work on this rank's array still
            self.meeting()
        elif wrong := self.task.wrong(arrays, result, self.iteration):
            raise InternalError(f"{contender.name} on rank {self.comm.rank}: {wrong}")
        return begin, end

    def iterations(self, index: int, pace: Pace) -> int:
        """Iterations that fit into the time; the same on all ranks."""
        _, (begin, end) = self.iterate(index, 2)
        seconds = self.comm.allreduce(np.array([(end - begin) / 1e9]), op="max")[0]
        return int(np.clip(pace.seconds / max(seconds, 1e-7), pace.least, pace.most))

    def turn(self, index: int, iterations: int) -> None:
        """Some iterations of a contender, after one that warms up what the others have cooled down."""
        if not self.meeting.emulated:
            self.times[index] += self.iterate(index, iterations + 1)[1:]
            return
        # Nobody sends before all are here: before the first call and after the last there is a meeting.
        self.traffic[index].begin()
        self.times[index] += self.iterate(index, iterations + 1)[1:]
        self.meeting()
        self.traffic[index].end(iterations + 1)


def measure(
    comm: Communicator,
    contenders: Sequence[Contender[Arrays] | Elsewhere],
    task: Task[Arrays],
    count: int,
    pace: Pace,
    meeting: Meeting,
) -> list[tuple[Sample, Sent]]:
    """Measures all contenders on `count` elements, as `Contender.prepare`; the same result on all ranks.
    Collective.

    What they sent is known of emulated hosts only.
    """
    race = _Race(comm, meeting, contenders, task, count)
    left = [race.iterations(index, pace) for index in range(len(contenders))]
    while any(left):
        for index in range(len(contenders)):
            now = min(left[index], pace.turn)
            if now > 0:
                race.turn(index, now)
                left[index] -= now
    samples = [Sample.of(durations(comm, times)) for times in race.times]
    sent = [traffic.gather(comm) if meeting.emulated else {} for traffic in race.traffic]
    return list(zip(samples, sent, strict=True))


def durations(comm: Communicator, times: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Seconds from when the last rank began to when the last rank had ended. Collective.

    Args:
        comm: The ranks.
        times: When this rank began and ended, in nanoseconds; of shape (..., 2).
    """
    begin, end = (
        comm.allreduce(np.ascontiguousarray(part), op="max")
        for part in np.moveaxis(np.asarray(times, np.int64), -1, 0)
    )
    return np.asarray(end - begin, np.float64) / 1e9
