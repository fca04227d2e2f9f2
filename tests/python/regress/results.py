"""Made-up results of `multiring regress`, for tests of what is decided and shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from multiring.benchmarks.machine import Machine
from multiring.commands.frameworks import FRAMEWORKS, Framework
from multiring.models.regress.checks import CHECKS, Setup
from multiring.models.regress.judge import Verdict, judge
from multiring.models.regress.outcome import Outcome, Outcomes, State
from multiring.models.regress.plan import Plan, make_plan
from multiring.models.regress.report import Report

TORCH = FRAMEWORKS["torch"]
OTHER = replace(
    TORCH, name="other", title="Other", module="tests.python.regress.fakes", trainer="Honest", own_way=None
)


def plan_for(
    frameworks: Sequence[Framework] = (TORCH, OTHER),
    ranks: Sequence[int] = (1, 2),
    checks: Sequence[str] = tuple(CHECKS),
    **options: Any,
) -> Plan:
    """A plan for two processors."""
    settings: dict[str, Any] = {"cores": 2, "missing": {}} | options
    return make_plan(frameworks, ranks, checks, settings.pop("setup", Setup()), **settings)


def make_outcomes(plan: Plan) -> Outcomes:
    """What honest frameworks would have given: alike, up to rounding of the arithmetic."""
    outcomes: Outcomes = {}
    for job in plan.jobs:
        for task in job.tasks:
            made = _outcome(task, job.ranks, list(plan.titles).index(job.framework.name))
            outcomes[job.framework.name, job.ranks, task] = made
    return outcomes


def _outcome(task: str, ranks: int, number: int) -> Outcome:
    kind, _, variant = task.partition("-")
    noise = (number + ranks) * (2e-7 if variant == "float32" else 1e-15)
    hashes = tuple({"state": f"{task} {ranks}", "weights": task} for _ in range(ranks))
    if kind == "probe":
        arrays = {"scores": _tensor(0, noise), "gradient/stem.conv.weight": _tensor(1, noise)}
        return Outcome(State.DONE, seconds=1.0, arrays=arrays, hashes=hashes)
    if kind == "train":
        losses = np.linspace(2.4, 1.6, 30) * (1 + noise)
        arrays = {"losses": losses, "model/stem.conv.weight": _tensor(2, noise)}
        values: dict[str, Any] = {"losses": losses.tolist()}
        return Outcome(State.DONE, seconds=2.0, arrays=arrays, values=values, hashes=hashes)
    if kind == "accuracy":
        curve = [[step / 23, 2.3 * float(np.exp(-step / 40))] for step in range(0, 138, 2)]
        values = {"accuracy": 0.989, "images": 364, "curve": curve}
        return Outcome(State.DONE, seconds=9.0, values=values, hashes=hashes)
    alone = 0.10 + 0.05 * number
    seconds = {"alone": [alone] * 5, "multiring": [alone / 0.98] * 5}
    values = {"ranks": ranks, "batch": 32, "steps": 2, "seconds": seconds}
    if number == 0:
        seconds["own way"] = [alone / 0.83] * 5
        values["own_way"] = "DDP over Gloo"
    return Outcome(State.DONE, seconds=20.0, values=values, hashes=hashes)


def _tensor(seed: int, noise: float) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((4, 3)) * (1 + noise)


def verdict_of(plan: Plan, outcomes: Outcomes, framework: str, check: str) -> Verdict:
    """The verdict of a framework's check, on the largest number of ranks that has one."""
    found = [v for v in judge(plan, outcomes) if (v.cell.framework, v.cell.check) == (framework, check)]
    return found[-1]


def make_report(plan: Plan, outcomes: Outcomes, **changes: Any) -> Report:
    """A report of these outcomes."""
    fields: dict[str, Any] = {
        "command": "multiring regress --report here",
        "date": "2026-01-02T03:04:05+00:00",
        "seconds": 123.4,
        "machine": Machine("Some processor", 2, 2**34, "Linux 6.1", "3.11.4", {"numpy": "2.3.5"}),
        "versions": dict.fromkeys(plan.titles, "1.2.3"),
        "plan": plan,
        "verdicts": tuple(judge(plan, outcomes)),
        "outcomes": outcomes,
        "skipped": {},
        "regressions": (),
        "baseline": "compared with the committed baseline",
        "interrupted": False,
    }
    return Report(**(fields | changes))
