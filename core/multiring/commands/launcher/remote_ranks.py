"""Ranks on another host: the process of ssh here, and its talk with remote_host.py there."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from multiring.commands.launcher.console.output import READ_BYTES
from multiring.commands.launcher.frames import END, FRAME, GREETING, STREAMS
from multiring.commands.launcher.process import PIPE_BYTES, RankProcess
from multiring.errors import UsageError

__all__ = ["SSH", "RemoteHost", "RemoteRank", "current_directory"]

# No terminal, which would echo what is said; a host that is gone is noticed within 15 seconds.
SSH = (
    "ssh -T -x -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 "
    "-o ClearAllForwardings=yes"
)
_MODULE = "multiring.commands.launcher.remote_host"


class RemoteHost:
    """Starts the ranks of another host by one ssh, in the directory of the same name.

    What they are to do goes there on ssh's standard input, which nobody else can read, and so do signals.
    When that ends, because ssh or we do, the ranks are ended there.

    Args:
        ssh: The command that runs a command on a host, with its options.
        host: The host.
        python: The Python there that has multiring.
        order: What all ranks do: "program", "module", "bind" and "devices", as `rank_starter.JobOptions` has
            them, and "environ", which is added to the environment there.
        rank_variables: For each rank what else its environment has.
        selector: Calls the data of what is ready.
        wake: Called when a rank has ended.

    Attributes:
        ranks: The ranks by their numbers.
        wake: As given.

    Raises:
        OSError: ssh cannot be started.
        UsageError: There is more to say than a pipe holds.
    """

    def __init__(
        self,
        *,
        ssh: Sequence[str],
        host: str,
        python: str,
        order: Mapping[str, Any],
        rank_variables: Mapping[int, Mapping[str, str]],
        selector: selectors.BaseSelector,
        wake: Callable[[], None],
    ) -> None:
        ranks = [{"rank": rank, "environ": dict(environ)} for rank, environ in rank_variables.items()]
        order_line = json.dumps({**order, "directory": current_directory(), "ranks": ranks}) + "\n"
        if len(order_line) > PIPE_BYTES // 2:
            raise UsageError(
                f"arguments and --env variables take {len(order_line)} bytes, too many for ranks on other "
                "hosts: put them into a file"
            )
        command = [*ssh, host, f"exec {shlex.quote(python or sys.executable)} -P -m {_MODULE}"]
        first = next(iter(rank_variables))
        self._ssh = RankProcess(
            first, command, os.environ, cpus=None, stdin=False, piped=True, first_input=order_line
        )
        self._selector = selector
        self.wake = wake
        self._frames = bytearray()
        self._is_greeted = False
        self._codes: dict[int, int] = {}
        self._pipes = {
            (rank, kind): _Pipe(self._on_empty) for rank in rank_variables for kind in range(len(STREAMS))
        }
        self._first = first
        outputs = self._ssh.outputs()
        self._stdout: int | None = outputs["stdout"]
        self._stderr = outputs["stderr"]
        self._selector.register(self._stderr, selectors.EVENT_READ, self._hear_ssh)
        self._resume()
        self.ranks = {rank: RemoteRank(self, rank, self._ssh.pid) for rank in rank_variables}

    def take_outputs(self, rank: int) -> dict[str, int]:
        """The reading ends of the pipes with a rank's output, for the caller to close."""
        return {name: self._pipes[rank, kind].reading for kind, name in enumerate(STREAMS)}

    def code_of(self, rank: int) -> int | None:
        """How a rank has ended, minus the signal for one; None: it runs. If ssh has ended, so have all.

        An ssh that ends well without a word about the rank has run something else (a forced command, a shell
        that exits): 255, as for whatever else goes wrong with ssh.
        """
        if rank not in self._codes and self._stdout is None:
            self._ssh.look()
            return 255 if self._ssh.code == 0 else self._ssh.code
        return self._codes.get(rank)

    def say(self, line: str) -> None:
        """Tells it to the other host, which cannot be waited for."""
        with contextlib.suppress(OSError, ValueError):
            self._ssh.tell(line + "\n")

    def end_ssh(self) -> None:
        """Kills ssh, because the other host does not listen."""
        self._ssh.signal_group(signal.SIGKILL)

    def pause(self, number: int) -> None:
        """Stops ssh, or lets it go on."""
        self._ssh.signal_group(number)

    def release(self) -> None:
        """Collects ssh, and closes what is open."""
        self._ssh.look()
        self._ssh.release()
        for descriptor in (self._stdout, self._stderr):
            if descriptor is not None and descriptor >= 0:
                self._close(descriptor)
        self._stdout, self._stderr = None, -1
        for pipe in self._pipes.values():
            pipe.abandon(self._selector)

    def is_taken_up(self, rank: int) -> bool:
        """Whether all that has come of a rank's output is in its pipes, where it outlives the rank."""
        return not any(self._pipes[rank, kind].pending for kind in range(len(STREAMS)))

    def _on_empty(self) -> None:
        self._resume()
        self.wake()  # a rank may count as ended now

    def _resume(self) -> None:
        """Reads frames, unless what came is not taken up yet."""
        if self._stdout is None:
            return
        wanted = not any(pipe.pending for pipe in self._pipes.values())
        watched = self._stdout in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(self._stdout, selectors.EVENT_READ, self._hear)
        elif watched and not wanted:
            self._selector.unregister(self._stdout)

    def _close(self, descriptor: int) -> None:
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)
        os.close(descriptor)

    def _hear_ssh(self) -> None:
        """What ssh itself says, and Python before it is ours, is taken for words of the first rank."""
        if data := os.read(self._stderr, READ_BYTES):
            self._put(self._first, 1, data)
        else:
            self._close(self._stderr)
            self._stderr = -1

    def _hear(self) -> None:
        assert self._stdout is not None
        if data := os.read(self._stdout, READ_BYTES):
            self._frames += data
            self._take_frames()
            self._resume()
            return
        self._close(self._stdout)
        self._stdout = None
        for pipe in self._pipes.values():
            pipe.finish(self._selector)
        self.wake()

    def _take_frames(self) -> None:
        if not self._is_greeted:
            begin = self._frames.find(GREETING)
            if begin < 0:
                return
            self._is_greeted = True
            self._put(self._first, 0, bytes(self._frames[:begin]))
            del self._frames[: begin + len(GREETING)]
        while len(self._frames) >= FRAME.size:
            kind, rank, length = FRAME.unpack_from(self._frames)
            if len(self._frames) < FRAME.size + length:
                return
            data = bytes(self._frames[FRAME.size : FRAME.size + length])
            del self._frames[: FRAME.size + length]
            if kind != END:
                self._put(rank, kind, data)
                continue
            self._codes[rank] = int(data)
            for stream in range(len(STREAMS)):
                self._pipes[rank, stream].finish(self._selector)
            self.wake()

    def _put(self, rank: int, kind: int, data: bytes) -> None:
        self._pipes[rank, kind].put(data, self._selector)


class _Pipe:
    """A pipe to ourselves, so that output of ranks elsewhere comes as that of ranks here does."""

    def __init__(self, on_empty: Callable[[], None]) -> None:
        self.reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writing, False)
        self._writing: int | None = writing
        self._on_empty = on_empty
        self._is_finished = False
        self.pending = bytearray()

    def put(self, data: bytes, selector: selectors.BaseSelector) -> None:
        if self._writing is not None:
            self.pending += data
            self._flush(selector)

    def finish(self, selector: selectors.BaseSelector) -> None:
        """Ends it behind what is pending."""
        self._is_finished = True
        self._flush(selector)

    def abandon(self, selector: selectors.BaseSelector) -> None:
        """Ends it now."""
        self.pending.clear()
        self.finish(selector)

    def _flush(self, selector: selectors.BaseSelector) -> None:
        if self._writing is None:
            return
        try:
            while self.pending:
                del self.pending[: os.write(self._writing, self.pending)]
        except BlockingIOError:
            if self._writing not in selector.get_map():
                selector.register(self._writing, selectors.EVENT_WRITE, partial(self._flush_later, selector))
            return
        except OSError:  # nobody reads it any more
            self.pending.clear()
        if self._writing in selector.get_map():
            selector.unregister(self._writing)
        if self._is_finished:
            os.close(self._writing)
            self._writing = None

    def _flush_later(self, selector: selectors.BaseSelector) -> None:
        self._flush(selector)
        self._on_empty()


class RemoteRank(RankProcess):
    """One of the ranks of another host; its process here is that of ssh."""

    def __init__(self, host: RemoteHost, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.code = None
        self._host = host
        self._is_killed = False

    def outputs(self) -> dict[str, int]:
        """The reading ends of its pipes "stdout" and "stderr"; the caller closes them."""
        return self._host.take_outputs(self.rank)

    def look(self) -> bool:
        """Whether it has ended since the last look."""
        if self.code is not None:
            return False
        # As a rank here has not ended before it has written its last words.
        if self._is_killed or self._host.is_taken_up(self.rank):
            self.code = self._host.code_of(self.rank)
        return self.code is not None

    def signal(self, number: int) -> None:
        """Sends a signal to the process there alone."""
        self._say("process", number)

    def signal_group(self, number: int) -> None:
        """Sends a signal to the process there and to what it has started in its group."""
        self._say("group", number)

    def release(self) -> None:
        """Collects ssh, if it has ended."""
        self._host.release()

    def _say(self, whom: str, number: int) -> None:
        if number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGCONT):
            self._host.pause(number)  # ssh alone: a job on several hosts does not stop at once
        elif self.is_running:
            self._host.say(f"{whom} {number} {self.rank}")
            if number == signal.SIGKILL:
                # ssh ends when the ranks have; one that does not listen is ended the next time.
                if self._is_killed:
                    self._host.end_ssh()
                self._is_killed = True
                self._host.wake()


def current_directory() -> str:
    """The current directory by the name that the user gave it, which other hosts may know it by, too."""
    named = os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(named) and os.path.samefile(named, "."):
            return named
    return str(Path.cwd())
