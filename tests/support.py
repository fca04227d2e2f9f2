"""Starting jobs in tests, and seeing that nothing is left of them."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from multiring import cli

_MARK = "TEST_JOB_MARK"
REPOSITORY = Path(__file__).resolve().parent.parent


def wait_until(condition: Callable[[], Any], what: str, timeout: float = 30.0) -> Any:
    """Returns what `condition` returns as soon as that is true; fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        assert time.monotonic() < deadline, f"timed out after {timeout:g} s: {what}"
        time.sleep(0.005)
    return result


class Stopwatch:
    """Wall-clock time less what this process has waited for a processor that others had: what a bound in
    seconds is for."""

    def __init__(self) -> None:
        self._began, self._waited = time.monotonic(), _waited_for_a_processor()

    def held_up(self) -> float:
        """Seconds for which the thread that had to wait longest was ready to run and did not."""
        waited = _waited_for_a_processor().items()
        return max((seconds - self._waited.get(thread, 0.0) for thread, seconds in waited), default=0.0)

    def seconds(self) -> float:
        """Seconds since this was made, without those."""
        return time.monotonic() - self._began - self.held_up()


def _waited_for_a_processor() -> dict[str, float]:
    """Seconds, by thread of this process."""
    found = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found[path.parent.name] = int(path.read_text().split()[1]) * 1e-9
    return found


def state_of(pid: int) -> str:
    """The state of a process, as in /proc; "X" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def process_exists(pid: int) -> bool:
    """Whether a process lives (a zombie does not)."""
    return state_of(pid) not in "ZX"


def open_descriptors(pid: int | None = None) -> dict[int, str]:
    """The open descriptors of a process (default: this one) and what they are."""
    directory = Path(f"/proc/{pid or os.getpid()}/fd")
    found = {}
    for entry in directory.iterdir():
        with contextlib.suppress(OSError):  # the one that reads the directory is gone already
            found[int(entry.name)] = os.readlink(entry)
    return found


def executable(path: Path, script: str) -> Path:
    """Writes a program in the words of sh."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def parsed(add_arguments: Callable[[argparse.ArgumentParser], None], *words: str) -> argparse.Namespace:
    """The options of a command, as its own parser understands them."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def pretend_places(places: Sequence[int]) -> None:
    """Let this rank of a job on one host take every rank to be on the host of that number."""
    rank = int(os.environ["MULTIRING_RANK"])
    host = places[rank]
    if len(set(places)) > 1:
        os.environ["MULTIRING_HOST"] = f"host{host}"
    os.environ |= {
        "MULTIRING_LOCAL_RANK": str(places[:rank].count(host)),
        "MULTIRING_LOCAL_SIZE": str(places.count(host)),
        "MULTIRING_CROSS_RANK": str(host),
        "MULTIRING_CROSS_SIZE": str(len(set(places))),
    }


class Job:
    """A command that a test has started, with a temporary directory of its own and a mark on its processes.

    `command` may be a function that makes it of a directory, in which `directory` is `d`; `env` are variables
    besides those of this process, and `popen` is for `subprocess.Popen`. `directory` is for the test's own
    files; scripts find it in the variable TEST_DIRECTORY. `process` is the launcher.
    """

    def __init__(
        self,
        command: Sequence[str] | Callable[[Path], Sequence[str]],
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> None:
        # Not pytest's tmp_path: its long names leave no room for Unix sockets.
        self._root = Path(tempfile.mkdtemp(prefix="mrt-", dir="/tmp"))
        self.directory = self._root / "d"
        self._tmp = self._root / "t"
        self.directory.mkdir()
        self._tmp.mkdir()
        self._mark = uuid.uuid4().hex
        own = {"TMPDIR": str(self._tmp), _MARK: self._mark, "TEST_DIRECTORY": str(self.directory)}
        environ = {**os.environ, **own, **(env or {})}
        self.command = list(command(self._root) if callable(command) else command)
        pipe = subprocess.PIPE
        options: dict[str, Any] = {"stdout": pipe, "stderr": pipe, "stdin": subprocess.DEVNULL} | popen
        self.process: subprocess.Popen[str] = subprocess.Popen(
            self.command, env=environ, text=True, errors="surrogateescape", **options
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def processes(self) -> list[int]:
        """All living processes of the job, the launcher and its helpers included."""
        wanted = f"{_MARK}={self._mark}".encode()
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                if wanted in environ and process_exists(int(name)):
                    found.append(int(name))
        return found

    def wait_for_file(self, name: str, timeout: float = 30.0) -> str:
        """Waits until a rank has written `directory/name` (to be written under another name and renamed)."""
        path = self.directory / name

        def there() -> bool:
            if not path.exists() and self.process.poll() is not None:
                raise AssertionError(f"the job ended: {self.process.communicate()}")
            return path.exists()

        wait_until(there, f"the file {name}", timeout)
        return path.read_text()

    def finish(self, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Waits for the launcher; its code and output. After `timeout` seconds fails and ends the job."""
        try:
            stdout, stderr = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            stacks = self._stacks()
            self._kill()
            stdout, stderr = self.process.communicate()
            raise AssertionError(
                f"{' '.join(self.command)} did not end in {timeout:g} s\n{stacks}\n"
                f"--- stdout\n{stdout}\n--- stderr\n{stderr}"
            ) from None
        return subprocess.CompletedProcess(self.command, self.process.returncode, stdout, stderr)

    def run(self, timeout: float = 60.0, code: int | None = None) -> subprocess.CompletedProcess[str]:
        """Waits for the launcher, and checks its exit code and that nothing is left; instead of `with`."""
        with self:
            return self.ended(code, timeout)

    def ended(self, code: int | None, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """The same within `with`."""
        result = self.finish(timeout)
        self.assert_nothing_left()
        if code is not None:
            assert result.returncode == code, f"{result.stdout}\n{result.stderr}"
        return result

    def assert_nothing_left(self, timeout: float = 10.0) -> None:
        """Fails unless all processes of the job end and all its temporary files vanish."""
        wait_until(lambda: not self.processes(), f"the end of the processes of {self.command}", timeout)
        left = [path for path in self._tmp.rglob("*") if "multiring" in str(path.relative_to(self._tmp))]
        assert not left, f"files left in the temporary directory: {left}"

    def destroy(self) -> None:
        """Ends whatever is left and removes the directories."""
        self._kill()
        if self.process.stdin is not None and self.process.stdin.closed:
            self.process.stdin = None  # or communicate() would try to flush it
        self.process.communicate()
        shutil.rmtree(self._root, ignore_errors=True)

    def _kill(self) -> None:
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)

    def _stacks(self) -> str:
        lines = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                place = Path(f"/proc/{pid}/wchan").read_text()
                lines.append(f"process {pid} in {place}: {' '.join(words)[:200]}")
        return "\n".join(lines)


def run_multiring(
    *words: str, timeout: float = 120.0, code: int | None = None, **popen: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a command of multiring: `run_multiring("plan", "--json")`; see `Job`."""
    return Job([sys.executable, "-m", "multiring", *words], **popen).run(timeout, code)


def refused(*words: str) -> str:
    """What a command of multiring that ends with code 2 says; it runs in this process."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = cli.main(list(words))
        except SystemExit as error:
            code = int(error.code or 0)
    assert code == 2, said.getvalue()
    return said.getvalue()


def run_python(code: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs code in a Python of its own, which no launcher has started."""
    return Job([sys.executable, "-c", code], env).run(timeout=240.0)  # a framework may take a minute to load


def last_words(code: str, env: Mapping[str, str] | None = None) -> str:
    """The last line of the error with which this code ends."""
    ended = run_python(code, env)
    assert ended.returncode == 1, ended.stderr
    return ended.stderr.strip().splitlines()[-1]


def start_job(
    n: int, script: str | Path, *args: object, launcher_args: Sequence[str] = (), **options: Any
) -> Job:
    """Starts n ranks under `multiring run` with `launcher_args`, and returns at once; to be used in `with`.
    `script` is a path, or, if it holds a line break, the text of a Python script; the rest as for `Job`."""

    def command(root: Path) -> list[str]:
        path = script
        if isinstance(script, str) and "\n" in script:
            path = root / "script.py"
            path.write_text(script)
        launcher = [sys.executable, "-m", "multiring", "run", "-np", str(n), *launcher_args]
        return [*launcher, str(path), *map(str, args)]

    return Job(command, **options)


def run_job(
    n: int, script: str | Path, *args: object, timeout: float = 60.0, code: int | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a job, as `start_job` takes it, to its end, and checks its exit code and that nothing is left."""
    return start_job(n, script, *args, **options).run(timeout, code)


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port of this host on which nobody listens, and which nobody else gets meanwhile: only who asks for
    it by its number, and for SO_REUSEADDR, can listen there."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextlib.contextmanager
def no_new_descriptors() -> Iterator[None]:
    """Fails if the block leaves descriptors of this process open."""
    before = open_descriptors()
    yield
    left = {number: what for number, what in open_descriptors().items() if number not in before}
    assert not left, f"descriptors left open: {left}"


def threads() -> list[str]:
    """The threads of this process."""
    return os.listdir("/proc/self/task")


def assert_idle(those: Iterable[str]) -> None:
    """Fails if these threads of this process take more than a little of a processor's time."""
    assert those
    began, before = time.monotonic(), sum(map(_ran, those))
    time.sleep(0.3)
    assert sum(map(_ran, those)) - before < 0.05 * (time.monotonic() - began)


def _ran(thread: str) -> float:
    """Seconds for which it had a processor."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) * 1e-9
