"""`multiring.run`: a function on every rank of a job, its results and errors, and that nothing is left."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiring
from multiring import MultiringError, RankError, UsageError
from multiring.commands.functions import memory
from multiring.commands.functions.outcome import RankTraceback
from tests.docs.blocks import python_of
from tests.support import Job, no_new_descriptors, run_python, wait_until


def joined(scale: float, *, name: str = "") -> dict[str, Any]:
    """What a rank sees, and a sum over the ranks."""
    comm = multiring.init()
    total = comm.allreduce(np.full(3, scale * (comm.rank + 1)))
    print(f"out of {comm.rank} {name}")
    print(f"err of {comm.rank}", file=sys.stderr)
    return {"rank": comm.rank, "size": comm.size, "total": total, "pid": os.getpid(), "argv": sys.argv}


def place(action: Callable[[int], Any] | None = None) -> Any:
    """The rank, or what a function makes of it, in a process that has not joined."""
    rank = int(os.environ["MULTIRING_RANK"])
    return rank if action is None else action(rank)


class OddError(Exception):
    """Cannot be pickled: it cannot be made of its message."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fail(how: str) -> None:
    """Rank 1 fails while rank 0 waits for it."""
    comm = multiring.init()
    if comm.rank == 1:
        match how:
            case "raise":
                raise KeyError("no such key")
            case "odd":
                raise OddError(1, 2)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def test_results_come_by_rank_and_output_by_line() -> None:
    out, err = io.StringIO(), io.StringIO()
    with no_new_descriptors(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        results = multiring.run(joined, (2.0,), {"name": "é"}, np=2)
    assert [result["rank"] for result in results] == [0, 1]
    assert all(result["size"] == 2 and result["total"].tolist() == [6.0] * 3 for result in results)
    assert len({os.getpid(), *(result["pid"] for result in results)}) == 3
    assert results[0]["argv"] == sys.argv
    assert sorted(out.getvalue().splitlines()) == ["[0] out of 0 é", "[1] out of 1 é"]
    started, *rest = sorted(err.getvalue().splitlines(), key=lambda line: "multiring" not in line)
    assert started.startswith("[0] multiring: version ")
    assert sorted(rest) == ["[0] err of 0", "[1] err of 1"]


def test_options(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = multiring.run(
        os.getenv, ("TOLD",), np=2, env={"TOLD": "yes"}, output_dir=tmp_path, tag_output=False, bind="none"
    )
    assert found == ["yes", "yes"]
    multiring.run(joined, (1.0,), np=1, output_dir=str(tmp_path), tag_output=False)
    assert (tmp_path / "rank.0.stdout").read_text() == "out of 0 \n"
    assert capfd.readouterr().out == "out of 0 \n"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"np": 0}, "np=0: give the number of ranks"),
        ({"np": 1, "timeout": 0}, "timeout=0: give seconds"),
        ({"np": 1, "bind": "socket"}, "bind='socket': give 'core', 'none' or None"),
        ({"np": 2, "devices": "0"}, "2 ranks on a host and 1 device "),
        ({"np": 2, "devices": [0, 1]}, r"devices=\[0, 1\]: give text, as 'auto' or '0,1'"),
        ({"np": 1, "env": {"A": 1}}, "env: 'A' is 1; names and values are text"),
        ({"np": 1, "args": (threading.Lock(),)}, "cannot be pickled, TypeError"),
        ({"np": 1, "env": {"MULTIRING_TIMEOUT": "soon"}}, "MULTIRING_TIMEOUT"),
        ({"np": 1, "output_dir": "/proc/none"}, "/proc/none cannot be made"),
        ({"np": 1, "num": 2}, "unexpected keyword argument 'num'"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError if "num" in given else UsageError, match=words):
        multiring.run(place, **given)


def test_an_exception_is_the_cause_and_its_rank_is_blamed(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        no_new_descriptors(),
        pytest.raises(RankError, match=r"^rank 1 \(process \d+ on .*\) raised Key") as got,
    ):
        multiring.run(fail, ("raise",), np=3)
    error = got.value
    assert isinstance(error, RuntimeError)
    assert error.rank == 1
    assert error.host == os.uname().nodename
    assert isinstance(error.__cause__, KeyError)
    assert error.__cause__.args == ("no such key",)
    assert isinstance(error.__cause__.__cause__, RankTraceback)
    text = str(error.__cause__.__cause__)
    assert 'raise KeyError("no such key")' in text
    assert "functions/rank.py" not in text
    assert "Error" not in capfd.readouterr().err, "it is shown once, by who called"


def complain(seconds: float) -> None:
    """Rank 0 tells of an error and goes on; rank 1 fails."""
    comm = multiring.init()
    if comm.rank == 0:
        try:
            raise OSError("a broken image")
        except OSError:
            traceback.print_exc()
        comm.barrier()
        time.sleep(seconds)
    else:
        comm.barrier()
        raise ValueError("bad")


def test_what_other_ranks_have_written_is_never_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError, match="rank 1 .* raised ValueError: bad"):
        multiring.run(complain, (600,), np=2)
    told = capfd.readouterr().err
    assert told.count("[0] OSError: a broken image\n") == 1
    assert 'raise OSError("a broken image")' in told
    assert "bad" not in told


def test_an_exception_that_cannot_be_unpickled_is_told_as_text() -> None:
    with pytest.raises(RankError, match="raised .*OddError: 1 and 2") as got:
        multiring.run(fail, ("odd",), np=2)
    assert isinstance(got.value.__cause__, RankTraceback)
    assert "raise OddError(1, 2)" in str(got.value.__cause__)


@pytest.mark.parametrize(
    ("function", "argument", "rank", "words"),
    [
        (fail, "kill", 1, "failed with signal SIGKILL after .*\n  killed from outside"),
        (os._exit, 0, 0, "rank 0 ended with exit code 0 before its function had returned"),
        (sys.exit, 3, 0, "failed with exit code 3"),
    ],
)
def test_a_rank_that_ends_without_an_exception(
    function: Callable[[Any], Any], argument: Any, rank: int, words: str
) -> None:
    with pytest.raises(RankError, match=words) as got:
        multiring.run(function, (argument,), np=rank + 1)
    assert got.value.rank == rank
    assert got.value.__cause__ is None


def test_the_end_of_a_program_is_no_failure() -> None:
    assert multiring.run(sys.exit, np=2) == [None, None]


def test_the_time_limit() -> None:
    with (
        no_new_descriptors(),
        pytest.raises(multiring.TimeoutError, match="longer than timeout=0.5; ended") as got,
    ):
        multiring.run(time.sleep, (600,), np=2, timeout=0.5)
    assert got.value.elapsed == 0.5


def test_what_cannot_be_handed_over() -> None:
    with pytest.raises(RankError, match=r"raised .*PicklingError: what the function has returned \(lock\)"):
        multiring.run(threading.Lock, np=1)


def test_functions_without_a_name() -> None:
    pytest.importorskip("cloudpickle")
    factor = 3

    class Local:
        rank = -1

    def local(rank: int) -> Local:
        found = Local()
        found.rank = rank * factor
        return found

    results = multiring.run(place, (local,), np=2)
    assert [result.rank for result in results] == [0, 3]
    assert isinstance(results[0], Local)
    assert multiring.run(lambda: factor, np=1) == [3]


def test_large_results_and_arguments() -> None:
    data = np.arange(20_000_000, dtype=np.uint32)  # 80 MB, larger than any pipe or socket takes
    (result,) = multiring.run(np.negative, (data,), np=1)
    np.testing.assert_array_equal(result, np.negative(data))


def test_two_threads_at_once() -> None:
    def start(number: int) -> Any:
        return multiring.run(joined, (number,), np=2)[0]["total"][0]

    with no_new_descriptors(), ThreadPoolExecutor(2) as threads:
        assert list(threads.map(start, (1, 2))) == [3.0, 6.0]


def test_an_error_of_what_takes_the_output_ends_the_job() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("no space left")

    with contextlib.redirect_stdout(Full()), pytest.raises(OSError, match="no space left"):
        multiring.run(_chatter, np=2)


def _chatter() -> None:
    while True:
        print("text" * 1000)


def test_descriptors_and_signal_masks_of_the_caller_do_not_matter() -> None:
    script = """
import os, signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.close(0)
os.close(1)
sys.stdout = None
import multiring
assert multiring.run(os.getenv, ("MULTIRING_RANK",), np=2) == ["0", "1"]
sys.stderr.write("done")
"""
    assert run_python(script).stderr == "done"


def test_the_block_of_docs_launching(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    (text,) = python_of("docs/launching.md")
    told = f"{[[2.0] * 3] * 2}"
    assert told in text
    (tmp_path / "script.py").write_text(text)
    assert Job([sys.executable, str(tmp_path / "script.py")]).run(code=0).stdout == f"{told}\n"


WITHOUT_CLOUDPICKLE = """
import sys
sys.modules["cloudpickle"] = None
import os
import multiring

def main_function(): pass

class Main: pass

for given in ({"fn": main_function}, {"fn": print, "args": (Main(),)}, {"fn": lambda: 1}):
    try:
        multiring.run(**given, np=1)
    except multiring.UsageError as error:
        print(str(error).count("pip install cloudpickle"), end=" ")
print(multiring.run(os.getenv, ("MULTIRING_RANK",), np=2))
"""


def test_without_cloudpickle() -> None:
    result = run_python(WITHOUT_CLOUDPICKLE)
    assert result.stdout == "1 1 1 ['0', '1']\n", result.stderr


def test_modules_are_found_as_by_the_caller(tmp_path: Path) -> None:
    """Wherever the caller has found them, and not in the directory it works in."""
    (tmp_path / "found.py").write_text("def own(): return __file__")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "signal.py").write_text("raise SystemError('not this one')")
    script = tmp_path / "work" / ".." / "main.py"
    script.write_text(f"""
import sys
sys.path.insert(1, {str(tmp_path)!r})
import found, multiring
print(multiring.run(found.own, np=1) == [found.__file__])
""")
    job = Job([sys.executable, str(script)], cwd=tmp_path / "work")
    assert job.run(code=0).stdout == "True\n"


def test_forks_of_other_threads_do_not_hold_what_is_handed_over() -> None:
    with no_new_descriptors(), memory.anonymous_files(2) as files:
        if (pid := os.fork()) == 0:
            os._exit(sum(os.path.exists(f"/proc/self/fd/{number}") for number in files))
        assert os.waitpid(pid, 0)[1] == 0


CALLER = """
import os, pathlib, time
import multiring

def tell(name, text=""):
    path = pathlib.Path(os.environ["TEST_DIRECTORY"]) / name
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)

def rank():
    comm = multiring.init()
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    tell(f"ready-{comm.rank}")
    time.sleep(600)
"""
INTERRUPTED = """
try:
    multiring.run(rank, np=2)
except KeyboardInterrupt:
    left = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")[:-1]]
    print("interrupted", [name for name in left if "memfd" in name or "socket" in name], flush=True)
"""
FORKED = """
# Another thread makes a process that outlives this one.
import threading
def fork():
    while not (pathlib.Path(os.environ["TEST_DIRECTORY"]) / "ready-1").exists():
        time.sleep(0.01)
    if (child := os.fork()) == 0:
        time.sleep(600)
        os._exit(0)
    tell("forked", str(child))
threading.Thread(target=fork).start()
multiring.run(rank, np=2)
"""


def caller(script: str) -> Job:
    """A script that runs a job of two ranks, each with a process in another session."""
    pytest.importorskip("cloudpickle")

    def command(root: Path) -> list[str]:
        (root / "script.py").write_text(CALLER + script)
        return [sys.executable, str(root / "script.py")]

    return Job(command)


def test_ctrl_c_ends_the_ranks_and_is_raised() -> None:
    with caller(INTERRUPTED) as job:
        job.wait_for_file("ready-0")
        job.wait_for_file("ready-1")
        job.process.send_signal(signal.SIGINT)
        result = job.finish()
        assert not job.processes()
        job.assert_nothing_left()
    assert result.stdout == "interrupted []\n"


def test_ranks_end_with_the_caller_whatever_it_has_forked() -> None:
    with caller(FORKED) as job:
        child = int(job.wait_for_file("forked"))
        job.process.kill()
        job.process.wait()
        wait_until(lambda: job.processes() == [child], "the end of the ranks")
        os.kill(child, signal.SIGKILL)
        job.assert_nothing_left()


def test_a_launcher_that_is_killed_is_an_error() -> None:
    def kill_parent() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    pytest.importorskip("cloudpickle")
    with pytest.raises(MultiringError, match=r"the launcher \(process \d+\) ended with signal SIGKILL"):
        multiring.run(kill_parent, np=1)
