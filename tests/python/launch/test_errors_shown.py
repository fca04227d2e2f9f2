"""How an error that ends ranks is shown: once, without frames of multiring, the message last."""

from __future__ import annotations

import pytest

from multiring.commands.launcher.console import tracebacks
from multiring.commands.launcher.console.tracebacks import Tracebacks, fold, tagged_lines
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
    assert lines[-1].endswith("depends on the rank."), "not on which rank it was raised"
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
    # Of one that could not say anything the others tell.
    killed = run_job(3, script.format("os.kill(os.getpid(), 9)"), env=QUIET, code=137).stderr
    assert "multiring: rank 1 (process" in killed.splitlines()[0]
    assert "PeerLostError" in killed.splitlines()[-1]


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


TEXT = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\nValueError: bad\n  worse'


def test_equal_errors_are_folded_and_the_culprits_comes_last() -> None:
    mine = "{}: {} (raised on rank {} on host7, in barrier)"
    folded = fold({0: TEXT, 1: mine.format("A", "b", 1), 2: TEXT, 3: TEXT, 4: mine.format("A", "b", 4)}, 2)
    assert folded == [([1, 4], "A: b"), ([0, 2, 3], TEXT)]
    assert fold({1: mine.format("A", "b", 1)}) == [([1], mine.format("A", "b", 1))]
    lines = tagged_lines(folded, coloured=True)
    assert lines[1] == "[ranks 0, 2-3] Traceback (most recent call last):"
    assert lines[-2:] == [
        "[ranks 0, 2-3] \x1b[1;31mValueError: bad\x1b[0m",
        "[ranks 0, 2-3] \x1b[1;31m  worse\x1b[0m",
    ]
    many = tagged_lines(fold({rank: f"E: {rank}" for rank in range(9)}, 3), coloured=False)
    assert many[0] == "multiring: 5 more ranks raised other errors; --output-dir keeps all of them"
    assert many[-1] == "[3] E: 3"


def test_what_is_held_and_when_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Tracebacks()
    assert not held.take(0, b"some line\n")
    lines = [f"[rank0]: {line}\n".encode() for line in TEXT.splitlines()]
    assert all(held.take(0, line) for line in lines)
    assert held.texts() == {0: TEXT}
    assert list(held.give_back()) == []
    monkeypatch.setattr(tracebacks, "_MAX_BYTES", 1)
    assert held.take(0, b"more\n")
    assert list(held.give_back()) == [(0, [*lines, b"more\n"])]
    assert held.is_written(0)
    assert not held.take(0, b"it goes on\n")
    assert not held.is_written(0)
