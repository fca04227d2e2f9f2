"""`multiring.launch` in a notebook: docs/notebooks.md, an error, and a kernel that is interrupted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import multiring
from tests.docs.blocks import python_of

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("cloudpickle")

# Interrupts the kernel, as its client does, once a rank is there; ranks say who they are.
INTERRUPT = """
import os, pathlib, signal, threading, time
there = pathlib.Path("there")
there.mkdir()
def wait():
    multiring.init()
    (there / str(os.getpid())).touch()
    time.sleep(600)
def interrupt():
    while len(list(there.iterdir())) < 2:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
multiring.launch(wait)
"""
LEFT = "print([each.name for each in there.iterdir() if os.path.exists(f'/proc/{each.name}')])"
FAIL = """
def fail():
    if multiring.init().rank == 1:
        raise ValueError("bad image")
    multiring.world().barrier()
multiring.launch(fail)
"""


def texts(cell: Any, name: str) -> str:
    """What a cell has written to "stdout" or "stderr"."""
    return "".join(output.text for output in cell.outputs if output.get("name") == name)


def error_of(cell: Any) -> Any:
    (found,) = (output for output in cell.outputs if output.output_type == "error")
    return found


def test_the_page_on_notebooks_runs_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    define, launch = python_of("docs/notebooks.md")
    codes = [define, launch, "results", FAIL, INTERRUPT, LEFT]
    cells = [nbformat.v4.new_code_cell(code) for code in codes]
    book = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=120, allow_errors=True, resources=resources).execute()
    _, launched, results, failed, interrupted, left = book.cells
    assert sorted(texts(launched, "stdout").splitlines()) == ["[0] rank 0 is done", "[1] rank 1 is done"]
    assert texts(launched, "stderr").startswith("[0] multiring: version ")
    assert eval(results.outputs[0].data["text/plain"]) == [pytest.approx(1.5, abs=0.01)] * 2
    assert error_of(failed).ename == "RankError"
    assert "rank 1 " in error_of(failed).evalue
    assert "in fail" in "\n".join(error_of(failed).traceback)
    assert "bad image" not in texts(failed, "stderr"), "the error of the cell shows it"
    assert error_of(interrupted).ename == "KeyboardInterrupt"
    assert texts(left, "stdout") == "[]\n"


def test_two_ranks_unless_more_are_asked_for() -> None:
    env = {"TOLD": "yes"}
    assert multiring.launch(os.getenv, ("TOLD",), env=env) == ["yes", "yes"]
    assert multiring.launch(os.getenv, ("TOLD",), 1, env=env, timeout=60) == ["yes"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'num'"):
        multiring.launch(os.getenv, ("TOLD",), num=3)  # type: ignore[call-arg]
