"""How a script or a notebook shows the error that ends ranks which it has started by `multiring.launch`."""

from __future__ import annotations

from typing import Any

import pytest

from multiring import errors
from tests.support import run_python

QUIET = {"MULTIRING_QUIET": "1"}


LAUNCH = """
import multiring
def fail():
    comm = multiring.init()
    if comm.rank == 1:
        undefined
    comm.barrier()
multiring.launch(fail)
"""


def test_an_error_of_launch_has_one_cause() -> None:
    pytest.importorskip("cloudpickle")
    shown = run_python(LAUNCH, QUIET).stderr
    assert shown.startswith("Traceback (most recent call last):\n")
    assert shown.count("Traceback") == 2
    assert shown.count("direct cause") == 1
    assert shown.count("NameError: name 'undefined' is not defined") == 2, "of the rank, and in the RankError"
    assert "caller.py" not in shown
    assert shown.splitlines()[-1].startswith("multiring.errors.RankError: rank 1 (process ")


def test_launch_leaves_the_hook_of_its_caller_until_it_fails() -> None:
    pytest.importorskip("cloudpickle")
    retried = """
import os, sys, multiring
multiring.launch(os.getpid, np=1)
assert sys.excepthook is sys.__excepthook__
def fail():
    raise ValueError("bad")
for _ in range(2):
    try:
        multiring.launch(fail, np=1)
    except multiring.RankError as error:
        last = error
raise last
"""
    shown = run_python(retried, QUIET).stderr
    assert shown.count("direct cause") == 1
    assert "caller.py" not in shown


@pytest.mark.parametrize("kind", ["short", "full"])
def test_ctrl_c_shows_where_launch_was_called(kind: str) -> None:
    interrupted = """
import os, multiring
from multiring.commands.functions import caller
def interrupt(*files):
    raise KeyboardInterrupt
caller.run_launcher = interrupt
multiring.launch(os.getpid, np=1)
"""
    shown = run_python(interrupted, {"MULTIRING_TRACEBACK": kind}).stderr
    assert shown.endswith("KeyboardInterrupt\n")
    assert "line 7, in <module>" in shown
    assert ("caller.py" in shown) == (kind == "full")


def test_a_notebook_shows_whole_tracebacks_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "multiring.somewhere"}
    exec("def fail(error):\n    raise error\n", names)
    try:
        names["fail"](errors.RankError("rank 1 failed"))
    except errors.RankError as error:
        failed: Any = error
    assert "not shown" in "\n".join(failed._render_traceback_())
    monkeypatch.setenv("MULTIRING_TRACEBACK", "full")
    assert "in fail" in "\n".join(failed._render_traceback_())
