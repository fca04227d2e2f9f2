"""Decides what the results mean: pure functions from outcomes to verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from multiring.benchmarks.gradients.training_speed import OWN, TOGETHER, TrainingSpeed
from multiring.models.regress.checks import ACCURACY, LIMITS
from multiring.models.regress.outcome import Outcome, Outcomes, State
from multiring.models.regress.plan import Cell, Plan

__all__ = ["Metric", "Status", "Verdict", "judge", "relative_difference"]

Array = npt.NDArray[Any]
GRADIENT = "gradient/"


class Status(StrEnum):
    """What a check has come to."""

    PASS = "pass"
    FAIL = "fail"  # measured, and wrong
    ERROR = "error"  # could not be measured: a crash, a hang, a framework that should be there
    SKIP = "skip"  # there is nothing to check


@dataclass(frozen=True)
class Metric:
    """One figure of a check.

    Attributes:
        name: What it is of: "gradients float32".
        value: The figure.
        limit: Largest value that passes; None: not judged.
        least: Smallest value that passes; None: not judged.
        where: What had this value: the tensor or step of the largest difference.
    """

    name: str
    value: float
    limit: float | None = None
    least: float | None = None
    where: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it passes; a figure that is no number does not."""
        above = self.least is None or self.value >= self.least
        return above and (self.limit is None or self.value <= self.limit)


@dataclass(frozen=True)
class Verdict:
    """What a check has come to, and by which figures.

    Attributes:
        cell: The check.
        status: What it has come to.
        text: The same in a line.
        metrics: The figures.
        detail: More about an error.
        seconds: What its tasks took; a task that two checks share counts for both.
    """

    cell: Cell
    status: Status
    text: str
    metrics: tuple[Metric, ...] = ()
    detail: str = ""
    seconds: float = 0.0

    @property
    def is_bad(self) -> bool:
        """Whether something has to be done about it."""
        return self.status in (Status.FAIL, Status.ERROR)


def relative_difference(found: Array, expected: Array) -> float:
    """Largest difference of any element over the largest absolute value of `expected`.

    One number for a tensor, which does not depend on how small single elements are. Infinite where shapes
    differ or anything is not finite, or where all of `expected` is 0 and `found` is not.
    """
    if found.shape != expected.shape:
        return float("inf")
    if not found.size:
        return 0.0
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    if not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return float("inf")
    difference, largest = float(np.abs(found - expected).max()), float(np.abs(expected).max())
    if difference == 0:
        return 0.0
    return difference / largest if largest > 0 else float("inf")


def judge(plan: Plan, outcomes: Outcomes) -> list[Verdict]:
    """Judge every cell of the plan by what has become of its tasks."""
    return [_Case(plan, outcomes, cell).verdict() for cell in plan.cells]


class _NotThereError(Exception):
    """A task that a check needs has no result."""

    def __init__(self, status: Status, text: str, detail: str = "") -> None:
        super().__init__(text)
        self.status, self.text, self.detail = status, text, detail


@dataclass
class _Case:
    plan: Plan
    outcomes: Outcomes
    cell: Cell
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def verdict(self) -> Verdict:
        if self.cell.framework in self.plan.missing:
            why = self.plan.missing[self.cell.framework]
            return Verdict(self.cell, Status.ERROR, why)
        judges = {
            "agreement": self._agreement,
            "following": self._following,
            "bits": self._bits,
            "accuracy": self._accuracy,
            "speed": self._speed,
        }
        try:
            metrics = tuple(judges[self.cell.check]())
        except _NotThereError as missing:
            return Verdict(
                self.cell, missing.status, missing.text, detail=missing.detail, seconds=self.seconds
            )
        bad = [metric for metric in metrics if not metric.is_good]
        status = Status.FAIL if bad else Status.PASS if metrics else Status.SKIP
        text = "; ".join([*(_complaint(metric) for metric in bad), *self.notes]) or _summary(metrics)
        return Verdict(self.cell, status, text, metrics, seconds=self.seconds)

    def _agreement(self) -> Iterator[Metric]:
        oracle = self.plan.oracle
        assert oracle is not None
        expected = self._need(oracle, 1, "probe-float64", whose="the oracle's ")
        if expected.state is State.UNAVAILABLE:
            self.notes.append(f"{self.plan.titles[oracle]} has no float64 to compare with")
            return
        for dtype in self.plan.setup.probes:
            if self.cell.framework == oracle and dtype == "float64":
                continue
            found = self._mine(f"probe-{dtype}")
            if found is None:
                continue
            limit = LIMITS[dtype]
            yield _worst(f"scores {dtype}", _pick(found, "scores"), _pick(expected, "scores"), limit)
            yield _worst(f"gradients {dtype}", _pick(found, GRADIENT), _pick(expected, GRADIENT), limit)
        if self.cell.framework != oracle and "float64" in self.plan.setup.trainings:
            theirs = self._need(oracle, 1, "train-float64", whose="the oracle's ")
            ours = self._mine("train-float64")
            if ours is not None:
                yield from _trainings("training float64", ours, theirs, LIMITS["float64"])

    def _following(self) -> Iterator[Metric]:
        for training in self.plan.setup.trainings:
            found = self._mine(f"train-{training}")
            one = self._mine(f"train-{training}", ranks=1)
            if found is None or one is None:
                continue
            limit: float | None = LIMITS.get(training, LIMITS["float64"])
            if training == "float32" and not self.plan.setup.judges_float32:
                limit = None
            yield from _trainings(training, found, one, limit)

    def _bits(self) -> Iterator[Metric]:
        cell = self.cell
        for (framework, ranks, task), outcome in sorted(self.outcomes.items()):
            if (framework, ranks) != (cell.framework, cell.ranks) or outcome.state is not State.DONE:
                continue
            others = [
                f"rank {rank} ({', '.join(name for name in hashes if hashes[name] != first[name])})"
                for first in outcome.hashes[:1]
                for rank, hashes in enumerate(outcome.hashes)
                if hashes != first
            ]
            yield Metric(f"ranks that differ after {task}", len(others), limit=0, where=", ".join(others))
        for job in self.plan.jobs:
            if (job.framework.name, job.ranks) != (cell.framework, cell.ranks):
                continue
            for task in job.tasks:
                if task.startswith("train-"):  # where it has failed there is nothing to compare after it
                    self._need(cell.framework, cell.ranks, task)

    def _accuracy(self) -> Iterator[Metric]:
        outcome = self._need(self.cell.framework, self.cell.ranks, "accuracy")
        images = outcome.values["images"]
        where = f"of {images} test images"
        yield Metric("test accuracy", outcome.values["accuracy"], least=ACCURACY, where=where)

    def _speed(self) -> Iterator[Metric]:
        outcome = self._need(self.cell.framework, self.cell.ranks, "speed")
        speed = TrainingSpeed(**outcome.values)
        yield Metric("efficiency", speed.efficiency.median)
        yield Metric("images/s", speed.images_per_second(TOGETHER))
        if speed.over_own_way is not None:
            assert speed.own_efficiency is not None
            yield Metric("times its own way", speed.over_own_way.median, where=speed.own_way or "")
            yield Metric("own way's efficiency", speed.own_efficiency.median)
            yield Metric("own way's images/s", speed.images_per_second(OWN))
            return
        missing = self.plan.no_own_way.get(self.cell.framework)
        if speed.own_way_missing is not None:
            missing = f"{speed.own_way} not measured: {speed.own_way_missing}"
        if missing is not None:
            self.notes.append(f"efficiency {speed.efficiency.text(3)}; {missing}")

    def _mine(self, task: str, ranks: int | None = None) -> Outcome | None:
        """The outcome of a task that is done; None where the framework cannot do it, which is noted."""
        outcome = self._need(self.cell.framework, self.cell.ranks if ranks is None else ranks, task)
        if outcome.state is State.UNAVAILABLE:
            if outcome.why not in self.notes:
                self.notes.append(outcome.why)
            return None
        return outcome

    def _need(self, framework: str, ranks: int, task: str, whose: str = "") -> Outcome:
        outcome = self.outcomes.get((framework, ranks, task))
        if outcome is None:
            raise _NotThereError(Status.SKIP, "not run")
        if outcome.state in (State.DONE, State.UNAVAILABLE):
            self.seconds += outcome.seconds
            return outcome
        if outcome.state is State.INTERRUPTED:
            raise _NotThereError(Status.SKIP, "interrupted")
        on = "" if ranks == self.cell.ranks else f" on {ranks} rank{'s' if ranks > 1 else ''}"
        text = f"{whose}{task}{on}: {outcome.why}"
        raise _NotThereError(Status.ERROR, text, outcome.detail)


def _pick(outcome: Outcome, prefix: str) -> dict[str, Array]:
    return {name: value for name, value in outcome.arrays.items() if name.startswith(prefix)}


def _worst(
    name: str, found: Mapping[str, Array], expected: Mapping[str, Array], limit: float | None
) -> Metric:
    """The largest difference of any tensor. A tensor that only one side has differs infinitely."""
    inf = float("inf")
    differences = {
        key: relative_difference(found[key], expected[key]) if key in found and key in expected else inf
        for key in [*expected, *(key for key in found if key not in expected)]
    }
    if not differences:
        return Metric(name, inf, limit, where="nothing was handed over")
    where = max(differences, key=differences.__getitem__)
    return Metric(name, differences[where], limit, where=where.removeprefix(GRADIENT).removeprefix("model/"))


def _trainings(name: str, found: Outcome, expected: Outcome, limit: float | None) -> Iterator[Metric]:
    ours, theirs = found.arrays["losses"], expected.arrays["losses"]
    where = ""
    if ours.shape == theirs.shape and ours.size:
        where = f"step {int(np.abs(ours - theirs).argmax()) + 1}"
    yield Metric(f"losses {name}", relative_difference(ours, theirs), limit, where=where)
    yield _worst(f"weights {name}", _pick(found, "model/"), _pick(expected, "model/"), limit)


def _complaint(metric: Metric) -> str:
    where = f" ({metric.where})" if metric.where else ""
    if metric.limit == 0:
        return f"{metric.name}: {metric.where}"
    if metric.least is not None:
        return f"{metric.name} {metric.value:.2%}{where}, at least {metric.least:.0%} is wanted"
    return f"{metric.name}: {metric.value:.1e}{where}, limit {metric.limit:.0e}"


def _summary(metrics: tuple[Metric, ...]) -> str:
    """The figures of a check that is well, in a line."""
    if not metrics:
        return "nothing to check"
    if metrics[0].limit == 0:
        return f"equal after {len(metrics)} runs"
    if metrics[0].least is not None:
        return f"{metrics[0].value:.2%}"
    by_name = {metric.name: metric.value for metric in metrics}
    if "efficiency" in by_name:
        own = by_name.get("times its own way")
        return f"efficiency {by_name['efficiency']:.3f}" + (f", {own:.2f} x own way" if own else "")
    groups: dict[str, float] = {}
    for metric in metrics:
        kind = metric.name.split()[-1]
        groups[kind] = max(groups.get(kind, 0.0), metric.value)
    return ", ".join(f"{kind} {value:.0e}" for kind, value in groups.items())
