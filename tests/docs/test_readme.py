"""The first screen of the README: its script runs, and its bars and figures are those of the records."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from multiring.benchmarks import overview
from tests.docs.blocks import code_of
from tests.support import REPOSITORY, run_job

README = (REPOSITORY / "README.md").read_text()
EXAMPLE = REPOSITORY / "examples/first.py"
RESULT = "test accuracy "


def difference() -> list[str]:
    (text,) = [text for language, text in code_of("README.md") if language == "diff"]
    return text.splitlines()


def results(output: str) -> list[str]:
    return [line.partition(RESULT)[2] for line in output.splitlines() if RESULT in line]


def test_the_script_is_what_the_change_makes() -> None:
    changed = [line[1:] for line in difference() if not line.startswith("-")]
    assert changed == EXAMPLE.read_text().splitlines()


def test_the_script_trains_on_two_ranks_what_it_trains_without(tmp_path: Path) -> None:
    before = tmp_path / "before.py"
    before.write_text("\n".join(line[1:] for line in difference() if not line.startswith("+")) + "\n")
    assert "multiring" not in before.read_text()
    done = subprocess.run([sys.executable, before], capture_output=True, text=True, timeout=120, check=True)
    (alone,) = results(done.stdout)
    first, second = results(run_job(2, EXAMPLE, timeout=120.0, code=0).stdout)
    assert first == second
    assert float(first) == pytest.approx(float(alone), abs=0.02)
    shown = results(README.partition("$ time multiring run -np 2 python examples/first.py")[2])
    assert [float(value) for value in shown] == pytest.approx([float(first)] * 2, abs=0.02)


def test_the_line_of_each_framework_is_that_of_its_page() -> None:
    rows = re.findall(r"^\| \[[^|]*\]\((docs/\w+\.md)\) \| `([^`]+)` \|", README, re.MULTILINE)
    assert len(rows) == 7
    for page, line in rows:
        assert line in (REPOSITORY / page).read_text(), page


def test_the_picture_shows_the_records() -> None:
    with Image.open(overview.PICTURE) as picture:
        drawn = picture.info["Charts"]
    assert drawn == overview.text_of(overview.charts()), "run python -m multiring.benchmarks.overview"
    assert overview.read_record(overview.GRADIENTS).notes["date"] in README
    assert overview.read_record(overview.ALLREDUCE).notes["date"] in README


def test_a_picture_is_written(tmp_path: Path) -> None:
    overview.draw(tmp_path / "overview.png")
    assert (tmp_path / "overview.png").stat().st_size > 10_000


@pytest.mark.parametrize("size", ["4 B", "1 MiB", "64 MiB"])
def test_figures_of_the_table_are_those_of_the_record(size: str) -> None:
    (row,) = [row for row in overview.read_record(overview.ALLREDUCE).rows if row["size"] == size]
    (line,) = [line for line in README.splitlines() if line.startswith(f"| allreduce of {size}")]
    for column in ("ordinary_us", "symmetric_us", "open_mpi_us", "gloo_us"):
        time = float(row[column])
        forms = [f"{time:.{digits}f} us" for digits in range(3)]
        forms += [f"{time / 1000:.{digits}f} ms" for digits in range(3)]
        assert any(form in line for form in forms), (column, row[column])
