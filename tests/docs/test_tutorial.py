"""The tutorial: its scripts run in the order of the page and print what it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import code_of, python_of
from tests.support import REPOSITORY, run_job

PAGE = "docs/tutorial.md"
TEXT = (REPOSITORY / PAGE).read_text()
SCRIPTS = ("alone.py", "train.py", "resume.py")

pytestmark = pytest.mark.full


def results(output: str) -> list[str]:
    """The lines with weights, without the launcher's marks."""
    return re.findall(r"^(?:\[\d\] )?(steps? .*: weights \[\[.*\]\])$", output, re.MULTILINE)


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    for name, text in zip(SCRIPTS, python_of(PAGE), strict=True):
        assert f"`{name}`" in TEXT
        (tmp_path / name).write_text(text)
    return tmp_path


def weights(lines: list[str]) -> list[float]:
    (text,) = {line.partition("weights [[")[2].removesuffix("]]") for line in lines}  # the same on all ranks
    return [float(word) for word in text.split()]


def test_two_ranks_have_the_weights_of_one_process(scripts: Path) -> None:
    done = subprocess.run(
        [sys.executable, "alone.py"], capture_output=True, text=True, timeout=120, check=True
    )
    alone = weights(results(done.stdout))
    shown = weights([line for line in results(TEXT) if line.startswith("step 19: ")])
    assert len(shown) == 8
    assert alone == pytest.approx(shown, abs=2e-4)
    two = results(run_job(2, scripts / "train.py", timeout=120.0, code=0).stdout)
    assert len(two) == 2
    assert weights(two) == pytest.approx(alone, abs=2e-4)


def test_the_change_of_the_page_is_an_error_that_the_page_shows(scripts: Path) -> None:
    ((before, after),) = [text.splitlines() for language, text in code_of(PAGE) if language == "diff"]
    script = scripts / "train.py"
    changed = script.read_text().replace(before[1:], after[1:])
    assert changed != script.read_text()
    script.write_text(changed)
    done = run_job(2, script, timeout=120.0, code=1)
    message = "the ranks do not agree about the state to broadcast: entry 0 is 'weight'"
    assert message in done.stderr
    assert message in TEXT


def test_a_killed_job_goes_on_from_its_checkpoint(scripts: Path) -> None:
    first = run_job(2, scripts / "resume.py", timeout=120.0)
    assert first.returncode != 0
    for words in ("failed with signal SIGKILL", "its process has died (killed, crashed or out of memory)"):
        assert words in first.stderr
        assert words in TEXT
    second = results(run_job(2, scripts / "resume.py", timeout=120.0, code=0).stdout)
    assert [line.partition(":")[0] for line in second] == ["steps 10 to 19"] * 2
    assert weights(second) == pytest.approx(weights(results(TEXT)), abs=2e-4)
