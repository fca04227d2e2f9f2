"""The recipes of the cookbook: two ranks end with what one process has made with the whole batch."""

from __future__ import annotations

import importlib.util
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.docs import recipes
from tests.docs.recipes import INTERRUPTED, PLAIN, recipes_of
from tests.support import REPOSITORY, Job, run_job

PAGES = {
    "torch": "docs/cookbook.md",
    "tensorflow": "docs/cookbook-tensorflow.md",
    "chainer": "docs/cookbook-chainer.md",
    "jax": "docs/cookbook-jax.md",
}
# Where results of two ranks are those of one process up to so much (2e-5 otherwise), or are others.
TOLERANCES = {"How do I use autocast?": 1e-2, "How do I use mixed precision?": 1e-2}
OTHERS = {
    ("docs/cookbook.md", "How do I set seeds?"): "dropout",
    ("docs/cookbook-tensorflow.md", "How do I set seeds?"): "dropout",
    ("docs/cookbook-chainer.md", "How do I share the data?"): "batches of contiguous blocks",
}
LINES = 25


def skip_without(*packages: str) -> None:
    """Skips a test that needs these; to import them here would take seconds."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


def said(text: str) -> list[str]:
    """The lines of standard output, which rank 0 alone writes, without the launcher's marks and times."""
    return [re.sub(r" - \d+m?s - \S+/step", "", line.removeprefix("[0] ")) for line in text.splitlines()]


@pytest.mark.parametrize(
    "framework",
    ["torch", *(pytest.param(name, marks=pytest.mark.full) for name in PAGES if name != "torch")],
)
def test_two_ranks_make_what_one_process_does(framework: str, tmp_path: Path) -> None:
    skip_without(framework)
    page, script = PAGES[framework], Path(recipes.__file__)
    env = {"PYTHONPATH": str(REPOSITORY), "MULTIRING_TIMEOUT": "60", "TF_CPP_MIN_LOG_LEVEL": "2"}
    # One process without a launcher, at the same time.
    with Job([sys.executable, str(script), page, str(tmp_path / "one")], env=env) as reference:
        two = run_job(2, script, page, tmp_path / "two", env=env, timeout=240.0, code=0)
        one = reference.ended(0, timeout=240.0)
    assert said(two.stdout) == said(one.stdout)
    results, expected = (pickle.loads((tmp_path / name).read_bytes()) for name in ("two", "one"))
    for question, found in results.items():
        if (page, question) not in OTHERS:
            compare(found, expected[question], TOLERANCES.get(question, 2e-5), question)
        assert (len(found["steps"]) >= 3) == ("TensorBoard" in question), question
    written = {n: len(list(tmp_path.glob(f"{n}-*/**/events.out.tfevents.*"))) for n in (1, 2)}
    assert written[2] == written[1], "one rank writes for TensorBoard"
    assert (written[2] > 0) == any("TensorBoard" in question for question in results)


def compare(found: Any, expected: Any, tolerance: float, question: str) -> None:
    """Fails unless both have the same numbers up to the tolerance."""
    if isinstance(found, dict):
        assert found.keys() == expected.keys(), question
        found, expected = list(found.values()), list(expected.values())
    if isinstance(found, list):
        for mine, its in zip(found, expected, strict=True):
            compare(mine, its, tolerance, question)
    else:
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=question)


@pytest.mark.parametrize("page", PAGES.values())
def test_each_recipe_is_a_question_with_a_short_program_and_where_to_read_on(page: str) -> None:
    for question, code, text in recipes_of(page):
        assert question.startswith("How do I "), question
        assert question.endswith("?"), question
        assert code.count("\n") < LINES, question
        assert "Do not " in text, question
        assert "](" in text, question


def test_every_recipe_says_what_two_ranks_and_one_process_have_in_common() -> None:
    for page in PAGES.values():
        for question, code, _ in recipes_of(page):
            made = any(f"{name} = " in code or f"{name}, " in code for name in recipes.RESULTS)
            assert made or "assert " in code, f"{page}: {question}"


def test_exceptions_are_recipes() -> None:
    there = {(page, recipe.question) for page in PAGES.values() for recipe in recipes_of(page)}
    edited = {(page, question) for part in (INTERRUPTED, PLAIN) for page in part for question in part[page]}
    assert edited | OTHERS.keys() <= there
    assert TOLERANCES.keys() <= {question for _, question in there}


@pytest.mark.full
def test_the_recipe_for_notebooks_starts_two_ranks(tmp_path: Path) -> None:
    skip_without("torch", "cloudpickle")
    (recipe,) = (each for each in recipes_of(PAGES["torch"]) if "multiring.launch(" in each.code)
    script = tmp_path / "script.py"
    script.write_text(recipe.code + "print(first)")
    subprocess.run([sys.executable, str(script)], check=True, timeout=120)
