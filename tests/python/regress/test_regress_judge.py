"""What `multiring regress` makes of results: every kind of wrong one is found and named."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from multiring.models.regress.checks import CHECKS, SMALL, Setup
from multiring.models.regress.judge import Status, judge, relative_difference
from multiring.models.regress.outcome import Outcome, Outcomes, State
from multiring.models.regress.plan import Cell, Plan
from tests.python.regress.results import TORCH, make_outcomes, plan_for, verdict_of

FULL = plan_for()
WEIGHT = "stem.conv.weight"
GRADIENT = f"gradient/{WEIGHT}"


@pytest.fixture
def outcomes() -> Outcomes:
    return make_outcomes(FULL)


def altered(outcomes: Outcomes, key: tuple[str, int, str], name: str, factor: float) -> None:
    """Multiplies the largest element of an array of a result."""
    outcome = outcomes[key]
    array = outcome.arrays[name].copy()
    array.flat[np.abs(array).argmax()] *= factor
    outcomes[key] = replace(outcome, arrays=outcome.arrays | {name: array})


def test_honest_frameworks_pass_every_check(outcomes: Outcomes) -> None:
    verdicts = judge(FULL, outcomes)
    assert [v.status for v in verdicts] == [Status.PASS] * len(verdicts)
    kinds = [job.undisturbed for job in FULL.jobs]
    assert kinds == sorted(kinds), "times are taken last"
    assert {v.cell for v in verdicts} == {
        Cell(name, ranks, check)
        for name in ("torch", "other")
        for ranks, checks in ((1, ("agreement",)), (2, ("following", "bits", "accuracy", "speed")))
        for check in checks
    }
    assert all(v.text and "nothing" not in v.text for v in verdicts)


def test_a_gradient_that_is_missing_is_found(outcomes: Outcomes) -> None:
    key = ("other", 1, "probe-float64")
    outcomes[key] = replace(outcomes[key], arrays={"scores": outcomes[key].arrays["scores"]})
    verdict = verdict_of(FULL, outcomes, "other", "agreement")
    assert verdict.status is Status.FAIL
    assert "gradients float64: inf (stem.conv.weight)" in verdict.text


@pytest.mark.parametrize(
    ("check", "ranks", "task", "name", "error", "expected"),
    [
        ("agreement", 1, "probe-float32", GRADIENT, 1e-3, f"gradients float32: .*{WEIGHT}.*1e-04"),
        ("agreement", 1, "probe-float64", GRADIENT, 1e-8, "gradients float64: .*limit 1e-09"),
        ("agreement", 1, "train-float64", f"model/{WEIGHT}", 1e-7, "weights training float64"),
        ("agreement", 1, "probe-float32", "scores", np.nan, "scores float32: inf"),
        ("following", 2, "train-float32", "losses", 1e-3, "float32"),
        ("following", 2, "train-uneven", f"model/{WEIGHT}", 1e-8, "uneven"),
    ],
)
def test_a_wrong_result_is_found(
    outcomes: Outcomes, check: str, ranks: int, task: str, name: str, error: float, expected: str
) -> None:
    altered(outcomes, ("other", 1, "probe-float32"), "scores", 1 + 1e-5)
    assert verdict_of(FULL, outcomes, "other", check).status is Status.PASS, "below the limit"
    altered(outcomes, ("other", ranks, task), name, 1 + error)
    verdict = verdict_of(FULL, outcomes, "other", check)
    assert verdict.status is Status.FAIL
    assert re.search(expected, verdict.text)
    assert verdict_of(FULL, outcomes, "torch", check).status is Status.PASS


def test_float32_is_shown_and_not_judged_where_rounding_may_drive_it_apart() -> None:
    plan = plan_for(setup=Setup(depth=20))
    outcomes = make_outcomes(plan)
    altered(outcomes, ("other", 2, "train-float32"), "losses", 1.01)
    verdict = verdict_of(plan, outcomes, "other", "following")
    assert verdict.status is Status.PASS
    shown = {metric.name: metric for metric in verdict.metrics}["losses float32"]
    assert shown.limit is None
    assert shown.value > 1e-3


@pytest.mark.parametrize("task", ["train-float32", "speed"])
def test_other_bits_on_a_rank_are_found_after_every_run(outcomes: Outcomes, task: str) -> None:
    key = ("other", 2, task)
    first, second = outcomes[key].hashes
    outcomes[key] = replace(outcomes[key], hashes=(first, second | {"weights": "other"}))
    verdict = verdict_of(FULL, outcomes, "other", "bits")
    assert verdict.status is Status.FAIL
    assert verdict.text == f"ranks that differ after {task}: rank 1 (weights)"


def test_low_accuracy_is_found(outcomes: Outcomes) -> None:
    key = ("other", 2, "accuracy")
    for accuracy, status in ((0.9699, Status.FAIL), (0.97, Status.PASS), (float("nan"), Status.FAIL)):
        outcomes[key] = replace(outcomes[key], values=outcomes[key].values | {"accuracy": accuracy})
        assert verdict_of(FULL, outcomes, "other", "accuracy").status is status


def test_a_task_that_failed_is_an_error_of_its_checks_alone(outcomes: Outcomes) -> None:
    outcomes["other", 2, "train-float64"] = Outcome(State.HUNG, why="ended by SIGKILL", detail="last words")
    by_check = {check: verdict_of(FULL, outcomes, "other", check) for check in CHECKS}
    expected = (Status.ERROR, "train-float64: ended by SIGKILL", "last words")
    for check in ("following", "bits"):
        verdict = by_check[check]
        assert (verdict.status, verdict.text, verdict.detail) == expected
    for check in ("agreement", "accuracy", "speed"):
        assert by_check[check].status is Status.PASS
    outcomes["torch", 1, "probe-float64"] = Outcome(State.FAILED, why="crashed")
    verdict = verdict_of(FULL, outcomes, "other", "agreement")
    assert (verdict.status, verdict.text) == (Status.ERROR, "the oracle's probe-float64: crashed")
    outcomes["torch", 1, "train-uneven"] = Outcome(State.FAILED, why="crashed")
    assert verdict_of(FULL, outcomes, "torch", "following").text == "train-uneven on 1 rank: crashed"


def test_a_framework_without_float64_is_judged_in_float32(outcomes: Outcomes) -> None:
    for key in list(outcomes):
        if key[0] == "other" and key[2] in ("probe-float64", "train-float64", "train-uneven"):
            outcomes[key] = Outcome(State.UNAVAILABLE, why="float64 is not there: too small")
    for check in ("agreement", "following", "bits"):
        verdict = verdict_of(FULL, outcomes, "other", check)
        assert verdict.status is Status.PASS
        assert verdict.metrics
    assert "float64 is not there" in verdict_of(FULL, outcomes, "other", "following").text


def test_a_framework_that_is_missing_is_an_error_of_all_its_checks() -> None:
    plan = plan_for(missing={"other": "other is not installed: run pip install other"})
    assert all(job.framework is TORCH for job in plan.jobs)
    for verdict in judge(plan, make_outcomes(plan)):
        missing = verdict.cell.framework == "other"
        assert verdict.status is (Status.ERROR if missing else Status.PASS)
        assert ("pip install other" in verdict.text) == missing


def test_relative_differences() -> None:
    one = np.array([1.0, -4.0])
    assert relative_difference(one.astype(np.float32), one) == 0
    assert relative_difference(one + np.array([0.0, 0.4]), one) == pytest.approx(0.1)
    assert relative_difference(np.zeros(2), np.zeros(2)) == relative_difference(np.zeros(0), np.zeros(0)) == 0
    broken = np.array([1.0, np.nan])
    for found, expected in ((one[:1], one), (np.ones(2), np.zeros(2)), (broken, one), (one, broken)):
        assert relative_difference(found, expected) == np.inf


def cells(plan: Plan, check: str) -> list[tuple[str, int]]:
    return [(cell.framework, cell.ranks) for cell in plan.cells if cell.check == check]


def test_the_plan_has_what_was_asked_for_and_one_rank_to_compare_with() -> None:
    plan = plan_for([TORCH], ranks=(2, 3), checks=("following", "bits", "accuracy"))
    assert cells(plan, "following") == cells(plan, "bits") == [("torch", 2), ("torch", 3)]
    assert cells(plan, "accuracy") == [("torch", 2)]  # three ranks have no processors of their own here
    small = plan_for(setup=SMALL, checks=("agreement", "following"))
    assert {task for job in small.jobs for task in job.tasks} == {
        *("probe-float32", "probe-float64", "train-float32", "train-uneven")
    }
    setup = Setup()
    assert all(setup.batch % ranks == 0 for ranks in (1, 2, 3))
    assert all(setup.uneven % ranks for ranks in (2, 3))
    assert setup.global_batches("float32") == [12] * 30
    assert setup.global_batches("uneven") == [11] * 28 + [1, 1]
