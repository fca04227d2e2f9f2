"""What `multiring regress` writes, JUnit XML and HTML, and what its baseline does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from multiring.models.errors import DataError
from multiring.models.regress import baseline as baselines
from multiring.models.regress.baseline import Baseline
from multiring.models.regress.checks import Setup
from multiring.models.regress.judge import Status, judge
from multiring.models.regress.junit import to_junit
from multiring.models.regress.outcome import Outcome, Outcomes, State
from multiring.models.regress.page import to_html
from multiring.models.regress.plan import Cell
from tests.python.regress.results import TORCH, make_outcomes, make_report, plan_for

PLAN = plan_for()


@pytest.fixture
def outcomes() -> Outcomes:
    return make_outcomes(PLAN)


@pytest.fixture
def spoilt(outcomes: Outcomes) -> Outcomes:
    """One check fails, one has no result, one is without a figure that is a number."""
    key = ("other", 2, "accuracy")
    outcomes[key] = replace(outcomes[key], values=outcomes[key].values | {"accuracy": 0.5})
    colours = "\x1b[31mred & <dead>\x00 \ud800"
    outcomes["other", 2, "speed"] = Outcome(State.FAILED, why="ended by SIGKILL", detail=colours)
    scores = {"scores": outcomes["other", 1, "probe-float32"].arrays["scores"] * float("nan")}
    outcomes["other", 1, "probe-float32"] = Outcome(State.DONE, arrays=scores)
    return outcomes


def base(outcomes: Outcomes) -> Baseline:
    return baselines.update(None, PLAN, judge(PLAN, outcomes), 2)


def test_junit_has_a_case_for_every_check(spoilt: Outcomes) -> None:
    report = make_report(PLAN, spoilt, regressions=("torch, 2 ranks, speed: efficiency 0.5, less & less",))
    (suite,) = ElementTree.fromstring(to_junit(report).encode())
    cases = {(case.get("classname"), case.get("name")): case for case in suite.findall("testcase")}
    assert suite.get("tests") == str(len(cases)) == str(len(PLAN.cells) + 1)
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("3", "1", "0")
    killed = cases["multiring.regress.other", "speed on 2 ranks"].find("error")
    assert killed.get("message") == "speed: ended by SIGKILL"
    assert killed.text == "?[31mred & <dead>? ?"
    assert cases["multiring.regress.other", "accuracy on 2 ranks"].find("failure") is not None
    assert cases["multiring.regress.torch", "agreement on 1 rank"].find("failure") is None
    assert cases["multiring.regress.baseline", "torch, 2 ranks, speed"].find("failure") is not None


def test_the_page_needs_nothing_else_and_escapes_what_programs_print(spoilt: Outcomes) -> None:
    fell = "torch, 2 ranks, speed: efficiency fell"
    page = to_html(make_report(PLAN, spoilt, regressions=(fell,), skipped={"jax": "jax is not installed"}))
    assert not re.search(r"""(src|href|data)=["'](?!#|data:)""", page)
    for told in (
        "3 of 10 checks failed; 1 regression",
        f"REGRESSION {fell}",
        "ERROR other, 2 ranks, speed: speed: ended by SIGKILL",
        "FAIL other, 2 ranks, accuracy: test accuracy 50.00%",
        "jax left out: jax is not installed",
        "red &amp; &lt;dead&gt;",
        "<svg",
    ):
        assert told in page


def test_a_run_does_not_regress_against_itself(outcomes: Outcomes, tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(base(outcomes).to_json())
    read_back = Baseline.read(path)
    assert read_back.passed == set(PLAN.cells)
    assert read_back.ratios[Cell("torch", 2, "speed")] == pytest.approx(
        {"efficiency": 0.98, "times its own way": 1.181}, abs=1e-3
    )
    assert baselines.compare(read_back, PLAN, judge(PLAN, outcomes), 2) == []


def test_a_check_that_no_longer_passes_is_a_regression(outcomes: Outcomes, spoilt: Outcomes) -> None:
    found = baselines.compare(base(make_outcomes(PLAN)), PLAN, judge(PLAN, spoilt), 2)
    names = ["other, 1 rank, agreement", "other, 2 ranks, accuracy", "other, 2 ranks, speed"]
    assert [line.partition(":")[0] for line in found] == names
    assert "passed in the baseline, now error: speed: ended by SIGKILL" in found[2]


def test_a_check_that_was_not_made_is_a_regression_unless_it_was_not_asked_for(outcomes: Outcomes) -> None:
    before = base(outcomes)
    some = {key: value for key, value in outcomes.items() if key != ("torch", 2, "speed")}
    (found,) = baselines.compare(before, PLAN, judge(PLAN, some), 2)
    assert found == "torch, 2 ranks, speed: passed in the baseline, now skip: not run"
    smaller = plan_for([TORCH], ranks=(1,), checks=("agreement",))
    assert baselines.compare(before, smaller, judge(smaller, outcomes), 2) == []
    outcomes["torch", 2, "speed"] = Outcome(State.INTERRUPTED, why="interrupted")
    verdicts = judge(PLAN, outcomes)
    assert {v.status for v in verdicts} == {Status.PASS, Status.SKIP}
    assert baselines.compare(before, PLAN, verdicts, 2) == []


def slowed(outcomes: Outcomes, factor: float) -> Outcomes:
    key = ("torch", 2, "speed")
    seconds = outcomes[key].values["seconds"]
    slower = seconds | {"multiring": [value / factor for value in seconds["multiring"]]}
    return outcomes | {key: replace(outcomes[key], values=outcomes[key].values | {"seconds": slower})}


def test_a_ratio_that_has_fallen_far_is_a_regression_with_its_name(outcomes: Outcomes) -> None:
    before = base(outcomes)
    alright, slow = judge(PLAN, slowed(outcomes, 0.75)), judge(PLAN, slowed(outcomes, 0.65))
    assert baselines.compare(before, PLAN, alright, 2) == []
    found = baselines.compare(before, PLAN, slow, 2)
    assert [line.rpartition(",")[0] for line in found] == [
        "torch, 2 ranks, speed: efficiency 0.637",
        "torch, 2 ranks, speed: times its own way 0.767",
    ]
    assert baselines.slow_cells(before, PLAN, slow, 2) == [Cell("torch", 2, "speed")]
    # Ranks that share processors, and another network, say nothing about the baseline's speeds.
    assert baselines.compare(before, PLAN, slow, 1) == []
    deeper = replace(PLAN, setup=Setup(speed_depth=8))
    assert baselines.compare(before, deeper, slow, 2) == []


def test_a_new_baseline_keeps_what_this_run_has_not_checked(outcomes: Outcomes) -> None:
    before = base(outcomes)
    plan = plan_for([TORCH], ranks=(1, 2), checks=("speed",))
    made = baselines.update(before, plan, judge(plan, slowed(outcomes, 0.5)), 2)
    assert made.passed == before.passed
    assert made.ratios[Cell("torch", 2, "speed")]["efficiency"] == pytest.approx(0.49)
    assert made.ratios[Cell("other", 2, "speed")] == before.ratios[Cell("other", 2, "speed")]


def test_what_is_no_baseline(tmp_path: Path, spoilt: Outcomes) -> None:
    with pytest.raises(DataError, match="failed checks: other, 1 rank, agreement; other, 2 ranks, accuracy"):
        base(spoilt)
    path = tmp_path / "b.json"
    for text in ("", "[]", '{"kind": "other"}'):
        path.write_text(text)
        with pytest.raises(DataError, match=r"b.json is no baseline of `multiring regress`"):
            Baseline.read(path)
