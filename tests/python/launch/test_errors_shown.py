"""How an error that ends ranks is shown: once, without frames of multiring, the message last."""

from __future__ import annotations

import re
import signal

import pytest

from multiring import errors
from multiring.console.traceback_hook import traceback_text
from multiring.error_text import text_of
from tests.support import run_job, run_python, start_job

QUIET = {"MULTIRING_QUIET": "1"}
MISMATCH = """
import numpy as np, multiring
comm = multiring.init()
def step():
    comm.allreduce(np.ones(3 + comm.rank % 2), name="grad/7")
step()
"""


def test_ranks_that_meet_the_same_error_show_it_once_and_its_message_last() -> None:
    lines = run_job(3, MISMATCH, env=QUIET, code=1).stderr.splitlines()
    assert lines[0].startswith("multiring: rank ")
    assert lines[1].startswith("multiring: ranks ")
    assert lines[2] == "[ranks 0-2] Traceback (most recent call last):"
    assert [line.partition("] ")[2] for line in lines if "  File" in line] == [
        line.partition("] ")[2] for line in lines if line.endswith((", in <module>", ", in step"))
    ]
    assert lines[-2] == "[ranks 0-2]   (1 frame of multiring not shown; MULTIRING_TRACEBACK=full shows all)"
    assert lines[-1].startswith("[ranks 0-2] multiring.errors.MismatchError: the ranks of communicator")
    first = "depends on the rank. (raised on rank 0 on "
    assert first in lines[-1], "values are those of the first rank"
    assert lines[-1].count("raised on rank") == 1
    full = run_job(2, MISMATCH, env=QUIET | {"MULTIRING_TRACEBACK": "full"}, code=1).stderr
    assert full.count("collectives.py") == 1
    assert "not shown" not in full


def test_the_error_that_others_came_of_is_the_one_that_is_shown() -> None:
    script = """
import os, sys, multiring
comm = multiring.init()
if comm.rank == 1:
    {}
comm.barrier()
"""
    shown = run_job(3, script.format("raise KeyError('no such key')"), env=QUIET, code=1).stderr
    assert shown.endswith("\n[1] KeyError: 'no such key'\n")
    assert shown.count("Traceback") == 1
    assert "last lines" not in shown
    left_out = (
        "multiring: what ranks 0, 2 raised because of it is left out; MULTIRING_TRACEBACK=full shows all\n"
    )
    assert left_out in shown
    # Of one that could not say anything the others tell.
    killed = run_job(3, script.format("os.kill(os.getpid(), 9)"), env=QUIET, code=137).stderr
    assert "multiring: rank 1 (process" in killed.splitlines()[0]
    assert "PeerLostError" in killed.splitlines()[-1]
    assert killed.count("Traceback") == 1
    # One that has left without an error is told by those that needed it.
    left = run_job(2, script.format("sys.exit(0)"), env=QUIET, code=1).stderr.splitlines()
    assert "multiring: rank 1: had ended with exit code 0" in left
    assert "lost rank 1" in left[-1]
    assert left[-1].startswith("[0] multiring.errors.PeerLostError")


SLOW_EXIT = """
import atexit, time, multiring
{}comm = multiring.init()
atexit.register(time.sleep, 1.5)
if comm.rank == 1:
    undefined
comm.barrier()
"""


@pytest.mark.full
def test_a_rank_that_takes_long_to_exit_shows_its_error_once() -> None:
    shown = run_job(2, SLOW_EXIT.format(""), env=QUIET, code=1).stderr
    assert shown.count("Traceback") == 1
    assert "last lines" not in shown
    assert "what rank 0 raised because of it is left out" in shown
    assert shown.endswith("\n[1] NameError: name 'undefined' is not defined\n")
    # One that cannot tell has its traceback where it was written.
    hook = "import sys; sys.excepthook = lambda *error: sys.__excepthook__(*error)\n"
    shown = run_job(2, SLOW_EXIT.format(hook), env=QUIET, code=1).stderr
    assert shown.count("NameError") == 1 + shown.count("AbortedError: rank 0 ")
    assert "last lines" not in shown


INTERRUPTED = """
import os, pathlib, sys, time, multiring
comm = multiring.init()
try:  # begins before the test is told, and may send its signal
    (pathlib.Path(os.environ["TEST_DIRECTORY"]) / f"ready-{comm.rank}").touch()
    if comm.rank == 0:
        time.sleep(600)
    comm.barrier()
except KeyboardInterrupt as interrupt:
    print("saved by", comm.rank, file=sys.stderr)
    if sys.argv[1:] and comm.rank == 0:  # which nothing but Ctrl-C wakes
        names = {}
        write = "def write(cause): raise ValueError('the disk is full') from cause"
        exec(compile(write, "/site-packages/checkpoints.py", "exec"), names)
        names["write"](interrupt)
    raise
"""


@pytest.mark.parametrize(("kind", "words"), [("short", ()), ("short", ("fail",)), ("full", ())])
def test_after_ctrl_c_one_line_suffices(kind: str, words: tuple[str, ...]) -> None:
    with start_job(2, INTERRUPTED, *words, env=QUIET | {"MULTIRING_TRACEBACK": kind}) as job:
        for rank in range(2):
            job.wait_for_file(f"ready-{rank}")
        job.process.send_signal(signal.SIGINT)
        shown = job.ended(130).stderr.splitlines()
    assert re.fullmatch(r"multiring: SIGINT received after .* s; all ranks have ended", shown[-1])
    if kind == "full":
        assert "[0] KeyboardInterrupt" in shown, "that of rank 1, or its loss of rank 0, comes as well"
        assert sum("Traceback" in line for line in shown) >= 2
        return
    of_rank_0 = [line for line in shown[:-1] if line != "[1] saved by 1"]  # which may have lost rank 0
    if words:
        assert of_rank_0[-1] == "[0] ValueError: the disk is full"
    else:
        assert set(of_rank_0) == {"[0] saved by 0"}


@pytest.mark.parametrize("kind", ["short", "full"])
def test_ctrl_c_while_an_error_is_shown_does_not_spoil_it(kind: str) -> None:
    script = """
import os, signal, multiring
class Shown(Exception):
    def __str__(self):
        os.kill(os.getpid(), signal.SIGINT)
        return "whole"
multiring.init()
raise Shown
"""
    ended = run_python(script, QUIET | {"MULTIRING_TRACEBACK": kind})
    assert ended.returncode == 1
    assert ended.stderr.endswith("Shown: whole\n")
    assert ended.stderr.count("Traceback") == 1
    assert "sys.excepthook" not in ended.stderr


def test_an_error_that_repeats_its_cause_is_shown_alone() -> None:
    """As the backend of torch.distributed raises torch's own kind of error from one of multiring."""
    try:
        try:
            raise errors.PeerLostError("rank 0 on a, lost rank 1")
        except errors.PeerLostError as lost:
            raise errors.PeerLostError(f"{lost} [process group '0', rank 0]") from lost
    except errors.PeerLostError as error:
        shown = traceback_text(error, error.__traceback__)
        full = traceback_text(error, error.__traceback__, full=True)
    assert shown.count("Traceback") == 1
    assert full.count("Traceback") == 2


class UnknownError(Exception):
    """As TensorFlow has one."""

    __module__ = "tensorflow.python.framework.errors_impl"


def test_an_error_that_came_through_a_framework_is_shown_as_it_was() -> None:
    lost = errors.PeerLostError("rank 0 on a, lost rank 1")
    text = f"Graph execution error:\n\nDetected at node x\n{text_of(lost)}\n\t [[{{{{node x}}}}]]"
    for is_known in (False, True):
        try:
            try:
                raise UnknownError(text)
            except UnknownError as error:
                if is_known:
                    raise lost from error
                raise
        except Exception as error:
            shown = traceback_text(error, error.__traceback__)
        assert shown.count("Traceback") == 1
        assert shown.endswith("\nmultiring.errors.PeerLostError: rank 0 on a, lost rank 1\n")
        assert "Detected" not in shown


def test_an_error_of_the_program_beside_one_of_a_framework_is_shown() -> None:
    lost = errors.PeerLostError("rank 0 on a, lost rank 1")
    text = f"Detected at node x\n{text_of(lost)}\n"

    def shown_of(*raised: BaseException) -> str:
        first, second = raised
        try:
            try:
                raise first
            finally:
                raise second
        except BaseException as error:
            return traceback_text(error, error.__traceback__)

    for first in (ValueError("no data"), errors.UsageError("no data")):
        before = shown_of(first, UnknownError(text))
        assert "Error: no data\n\nDuring handling" in before
        assert before.endswith("\nmultiring.errors.PeerLostError: rank 0 on a, lost rank 1\n")
    assert shown_of(errors.PeerLostError(str(lost)), UnknownError(text)).count("Traceback") == 1
    for error in (OSError(f"not written after {text}"), errors.UsageError("no place")):
        shown = shown_of(UnknownError(text), error)
        assert "PeerLostError: rank 0 on a, lost rank 1\n\nDuring handling" in shown
        assert str(error) in shown.split("During handling")[1]


def test_errors_that_are_causes_of_each_other_are_shown_once() -> None:
    lost = errors.PeerLostError("rank 0 on a, lost rank 1")
    framework, wrong = UnknownError(f"Detected at node x\n{text_of(lost)}\n"), errors.UsageError("no data")
    try:
        raise framework from wrong
    except UnknownError:
        try:
            raise wrong from framework
        except errors.UsageError as error:
            shown = traceback_text(error, error.__traceback__)
    assert shown.count("Traceback") <= 3
    assert shown.endswith("UsageError: no data\n")
    assert shown.count("PeerLostError: rank 0 on a, lost rank 1") == 1


@pytest.mark.full
def test_errors_of_torch_distributed_are_shown_once() -> None:
    """Its hook begins each line with the rank."""
    pytest.importorskip("torch")
    script = """
import sys, torch
from torch import distributed as dist
dist.init_process_group("multiring")
if sys.argv[1] == "mismatch":
    dist.all_reduce(torch.ones(3 + dist.get_rank()))
elif dist.get_rank() == 1:
    {}["no such key"]
dist.barrier()
"""
    env = QUIET | {"MULTIRING_TRACEBACK": "short"}
    shown = run_job(2, script, "mismatch", env=env, code=1).stderr
    assert shown.count("Traceback") == 1
    assert "MismatchError: " in shown.splitlines()[-1]
    shown = run_job(2, script, "key", env=env, code=1).stderr
    assert shown.endswith("\n[1] KeyError: 'no such key'\n")
    assert shown.count("Traceback") == 1


def test_a_script_that_does_not_compile_is_told_once() -> None:
    lines = run_job(2, "import sys\ndef f(:\n", code=1).stderr.splitlines()
    assert lines[-1] == "[ranks 0-1] SyntaxError: invalid syntax"
    assert sum("line 2" in line for line in lines) == 1


def test_a_traceback_of_a_rank_that_goes_on_is_shown_while_it_does() -> None:
    script = """
import os, pathlib, sys, time, traceback
if os.environ["MULTIRING_RANK"] == "1":
    try:
        {}["key"]
    except KeyError:
        traceback.print_exc()
    while not (pathlib.Path(os.environ["TEST_DIRECTORY"]) / "go").exists():
        time.sleep(0.005)
    print("and this", file=sys.stderr)
"""
    with start_job(2, script) as job:
        assert job.process.stderr is not None
        lines = [job.process.stderr.readline()]
        while "KeyError" not in lines[-1]:
            lines.append(job.process.stderr.readline())
        (job.directory / "go").touch()
        assert "[1] and this\n" in job.ended(0).stderr
    assert lines[0] == "[1] Traceback (most recent call last):\n"


def test_the_program_keeps_a_hook_of_its_own_and_chains_are_shown_whole() -> None:
    own = "import sys, multiring\nsys.excepthook = print\nmultiring.init()\nassert sys.excepthook is print\n"
    assert run_python(own, QUIET).returncode == 0
    chain = """
import multiring
comm = multiring.init()
try:
    comm.split(-1)
except multiring.UsageError as error:
    raise RuntimeError("no groups") from error
"""
    told = run_python(chain, QUIET).stderr
    assert told.count("(1 frame of multiring not shown") == 1
    assert "multiring.errors.UsageError: color is -1" in told
    assert "communicator.py" not in told
    assert told.endswith("RuntimeError: no groups\n")


@pytest.mark.parametrize(("typo", "meant"), [("comm.allreduc", "allreduce"), ("com.allreduce", "comm")])
def test_a_misspelt_name_is_told_with_the_one_meant(typo: str, meant: str) -> None:
    told = run_python(f"import multiring\ncomm = multiring.init()\n{typo}\n", QUIET).stderr.splitlines()
    assert told[-1].partition(". ")[2] == f"Did you mean: '{meant}'?"


def test_frames_of_multiring_are_left_out_of_its_own_errors_alone() -> None:
    defect = "import multiring, threading\nmultiring.init().allgather_object([threading.Lock()])\n"
    told = run_python(defect, QUIET).stderr
    assert "collectives.py" in told or "multiring/" in told
    assert "not shown" not in told
    assert told.splitlines()[-1].startswith("TypeError: cannot pickle")
    group = """
import multiring
comm = multiring.init()
try:
    comm.split(-1)
except multiring.UsageError as error:
    raise ExceptionGroup("all", [error, ValueError("bad")])
"""
    told = run_python(group, QUIET).stderr
    assert told.count("(1 frame of multiring not shown") == 2, "of the cause, and in the group"
    assert "communicator.py" not in told
    noted = "import multiring\nmultiring.init()\ntry:\n    prin\nexcept NameError as error:\n"
    told = run_python(f"{noted}    error.add_note('a note')\n    raise\n", QUIET).stderr
    assert told.endswith("NameError: name 'prin' is not defined. Did you mean: 'print'?\na note\n")


def test_what_ranks_that_end_well_have_written_is_shown_as_it_came() -> None:
    script = """
import os, sys, traceback
try:
    {}[os.environ["MULTIRING_RANK"]]
except KeyError:
    traceback.print_exc()
if sys.argv[1:]:
    print("skipped by", os.environ["MULTIRING_RANK"], file=sys.stderr)
"""
    for words in ((), ("say",)):
        told = run_job(6, script, *words, code=0).stderr.splitlines()
        for rank in range(6):
            lines = [line.partition("] ")[2] for line in told if line.startswith(f"[{rank}]")]
            assert lines[0] == "Traceback (most recent call last):"
            assert f"KeyError: '{rank}'" in lines
            assert lines[-1] == (f"skipped by {rank}" if words else f"KeyError: '{rank}'")


def test_a_handled_error_is_not_blamed_for_another_end() -> None:
    script = """
import os, sys, traceback
try:
    {}["key"]
except KeyError:
    traceback.print_exc()
os.kill(os.getpid(), 9)
"""
    told = run_job(2, script, "--", launcher_args=["--no-tag-output"], code=137).stderr
    assert "last lines of rank" in told
    assert "multiring:   | KeyError: 'key'" in told
    assert "\nKeyError: 'key'\n" in told, "no tags"


def test_a_reader_that_is_slow_gets_all_lines() -> None:
    """Also where another process has made stderr one that does not block."""
    script = """
import os, threading, time
from multiring.commands.launcher.job import write
reading, writing = os.pipe()
os.set_blocking(writing, False)
os.dup2(writing, 2)
lines = [str(number) * 100 for number in range(5000)]
thread = threading.Thread(target=write, args=(lines,))
thread.start()
received = b""
while received.count(b"\\n") < len(lines):
    received += os.read(reading, 9999)
assert received.decode().split() == lines
print("all")
"""
    assert run_python(script).stdout == "all\n"
