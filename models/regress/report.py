"""Everything that one run of `multiring regress` has found, and its JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from multiring.benchmarks.gradients.training_speed import TrainingSpeed
from multiring.benchmarks.machine import Machine
from multiring.commands.env import versions
from multiring.commands.frameworks import Framework
from multiring.models.regress.checks import Setup
from multiring.models.regress.judge import Status, Verdict
from multiring.models.regress.outcome import Outcomes, State

__all__ = ["Curves", "Report", "collect_curves", "framework_versions"]

KIND = "multiring regress"

Line = list[tuple[float, float]]


@dataclass(frozen=True)
class Curves:
    """What is drawn.

    Attributes:
        following: Loss of each step of the float32 training that is compared, by framework and ranks.
        digits: Epochs and loss of the training on digits, by framework and ranks.
        speeds: Timed steps, by framework and ranks.
    """

    following: Mapping[tuple[str, int], Line] = field(default_factory=dict)
    digits: Mapping[tuple[str, int], Line] = field(default_factory=dict)
    speeds: Mapping[tuple[str, int], TrainingSpeed] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The results.

    Attributes:
        command: The command line.
        date: When it began, in ISO format with the offset from UTC.
        seconds: How long it took.
        machine: Where, and with what.
        setup: The setting.
        titles: Of the frameworks, by name.
        versions: Of the frameworks, by name.
        oracle: Name of the framework that others are compared with.
        verdicts: All checks.
        skipped: Frameworks that were left out, and why.
        regressions: What was better in the baseline, each in a line.
        baseline: What it was compared with, in a line.
        interrupted: Whether Ctrl-C ended it.
        curves: What is drawn.
    """

    command: str
    date: str
    seconds: float
    machine: Machine
    setup: Setup
    titles: Mapping[str, str]
    versions: Mapping[str, str]
    oracle: str | None
    verdicts: tuple[Verdict, ...]
    skipped: Mapping[str, str]
    regressions: tuple[str, ...]
    baseline: str
    interrupted: bool
    curves: Curves

    @property
    def bad(self) -> list[Verdict]:
        """Checks that something has to be done about."""
        return [verdict for verdict in self.verdicts if verdict.is_bad]

    @property
    def is_good(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.bad or self.regressions or self.interrupted)

    def headline(self) -> str:
        """What has come out, in a line."""
        done = [verdict for verdict in self.verdicts if verdict.status is not Status.SKIP]
        parts = []
        if self.interrupted:
            parts.append(f"interrupted after {len(done)} of {len(self.verdicts)} checks")
        if self.bad:
            parts.append(f"{len(self.bad)} of {len(self.verdicts)} checks failed")
        if self.regressions:
            count = len(self.regressions)
            parts.append(f"{count} regression{'s' if count > 1 else ''} against the baseline")
        return "; ".join(parts) if parts else f"all {len(done)} checks passed"

    def to_json(self) -> str:
        """Everything but the single times, as one JSON object; a figure that is no number is null."""
        fields = {
            "kind": KIND,
            "result": "pass" if self.is_good else "fail",
            "headline": self.headline(),
            "command": self.command,
            "date": self.date,
            "seconds": self.seconds,
            "machine": asdict(self.machine),
            "setup": asdict(self.setup),
            "oracle": self.oracle,
            "frameworks": {
                name: {"title": title, "version": self.versions.get(name)}
                for name, title in self.titles.items()
            },
            "skipped": dict(self.skipped),
            "checks": [_check(verdict) for verdict in self.verdicts],
            "speeds": [
                {"framework": framework, **json.loads(speed.to_json())}
                for (framework, _), speed in self.curves.speeds.items()
            ],
            "regressions": list(self.regressions),
            "baseline": self.baseline,
            "interrupted": self.interrupted,
        }
        return json.dumps(fields, indent=2, allow_nan=False)


def _check(verdict: Verdict) -> dict[str, Any]:
    metrics = [{**asdict(m), "value": m.value if math.isfinite(m.value) else None} for m in verdict.metrics]
    return {
        **asdict(verdict.cell),
        "status": str(verdict.status),
        "text": verdict.text,
        "seconds": verdict.seconds,
        "metrics": metrics,
        "detail": verdict.detail,
    }


def collect_curves(outcomes: Outcomes) -> Curves:
    """Pick what is drawn out of the outcomes."""
    following, digits, speeds = {}, {}, {}
    for (framework, ranks, task), outcome in outcomes.items():
        if outcome.state is not State.DONE:
            continue
        if task == "train-float32":
            losses = outcome.values["losses"]
            following[framework, ranks] = [(step + 1.0, loss) for step, loss in enumerate(losses)]
        elif task == "accuracy":
            digits[framework, ranks] = [(position, loss) for position, loss in outcome.values["curve"]]
        elif task == "speed":
            speeds[framework, ranks] = TrainingSpeed.from_dict(outcome.values)
    return Curves(following, digits, speeds)


def framework_versions(frameworks: Mapping[str, Framework]) -> dict[str, str]:
    """Version of each framework that is installed; nothing is imported."""
    installed = versions()
    first = {
        name: next((installed[each] for each in framework.distributions if each in installed), None)
        for name, framework in frameworks.items()
    }
    return {name: version for name, version in first.items() if version is not None}
