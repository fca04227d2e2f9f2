"""The committed results that a run is compared with.

Correctness is compared exactly: a check that passed has to be there and to pass. Of speeds only ratios are
kept, and they may fall to `MARGIN` of what they were before that counts, since machines differ and are busy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiring.models.errors import DataError
from multiring.models.regress.checks import Setup
from multiring.models.regress.judge import Status, Verdict
from multiring.models.regress.plan import Cell, Plan

__all__ = ["DEFAULT", "MARGIN", "RATIOS", "Baseline", "compare", "slow_cells", "update"]

DEFAULT = Path(__file__).with_name("baseline.json")
KIND = "multiring regress baseline"
RATIOS = ("efficiency", "times its own way")
MARGIN = 0.7


@dataclass(frozen=True)
class Baseline:
    """What was found when all was well.

    Attributes:
        depth: Of the ResNet whose steps were timed.
        passed: The checks that passed.
        ratios: By check of speed, then by name.
    """

    depth: int
    passed: frozenset[Cell]
    ratios: Mapping[Cell, Mapping[str, float]]

    @classmethod
    def read(cls, path: Path) -> Baseline:
        """Read a file that `update` has written.

        Raises:
            DataError: It is not there, or something else.
        """
        try:
            fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if fields["kind"] != KIND:
                raise ValueError(f"it is no {KIND!r}")
            rows = [(Cell(row["framework"], row["ranks"], row["check"]), row) for row in fields["checks"]]
            ratios = {cell: {k: float(v) for k, v in row["ratios"].items()} for cell, row in rows}
            return cls(
                int(fields["speed_depth"]),
                frozenset(cell for cell, _ in rows),
                {cell: found for cell, found in ratios.items() if found},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is no baseline of `multiring regress`: {error!r}") from error

    def to_json(self) -> str:
        """As `read` reads it: a line for each check, so that a change is seen."""
        rows = [
            {
                "framework": cell.framework,
                "ranks": cell.ranks,
                "check": cell.check,
                "ratios": {name: round(value, 3) for name, value in self.ratios.get(cell, {}).items()},
            }
            for cell in sorted(self.passed)
        ]
        lines = ",\n".join("    " + json.dumps(row) for row in rows)
        head = f'{{\n  "kind": {json.dumps(KIND)},\n  "speed_depth": {self.depth},\n'
        return f'{head}  "checks": [\n{lines}\n  ]\n}}\n'


def compare(baseline: Baseline, plan: Plan, verdicts: Iterable[Verdict], cores: int) -> list[str]:
    """What was better in the baseline: a line each, with framework, ranks and metric.

    Checks that this run was not to make are not compared; nor are speeds where ranks share processors, or of
    another network.
    """
    found = []
    for verdict in verdicts:
        cell = verdict.cell
        if cell not in baseline.passed:
            continue
        if verdict.is_bad or (verdict.status is Status.SKIP and verdict.text != "interrupted"):
            found.append(f"{cell}: passed in the baseline, now {verdict.status}: {verdict.text}")
        elif verdict.status is Status.PASS and cell.ranks <= cores:
            found += _slower(baseline, plan.setup, verdict)
    return found


def slow_cells(baseline: Baseline, plan: Plan, verdicts: Iterable[Verdict], cores: int) -> list[Cell]:
    """Checks of speed that have fallen too far, and should be measured again before that is believed."""
    return [
        verdict.cell
        for verdict in verdicts
        if verdict.status is Status.PASS
        and verdict.cell.ranks <= cores
        and verdict.cell in baseline.passed
        and _slower(baseline, plan.setup, verdict)
    ]


def _slower(baseline: Baseline, setup: Setup, verdict: Verdict) -> list[str]:
    before = baseline.ratios.get(verdict.cell)
    if before is None or setup.speed_depth != baseline.depth:
        return []
    now = {metric.name: metric.value for metric in verdict.metrics}
    return [
        f"{verdict.cell}: {name} {now[name]:.3f}, less than {MARGIN:.0%} of the baseline's {value:.3f}"
        for name, value in before.items()
        if name in now and not now[name] >= MARGIN * value
    ]


def update(baseline: Baseline | None, plan: Plan, verdicts: Iterable[Verdict], cores: int) -> Baseline:
    """The baseline with this run's results in place of its own; what this run has not checked stays.

    Raises:
        DataError: A check failed: that is no baseline.
    """
    verdicts = list(verdicts)
    if bad := [str(verdict.cell) for verdict in verdicts if verdict.is_bad]:
        raise DataError(f"no baseline is made of a run with failed checks: {'; '.join(bad)}")
    ours = {verdict.cell for verdict in verdicts}
    passed = {verdict.cell for verdict in verdicts if verdict.status is Status.PASS}
    ratios: dict[Cell, Mapping[str, float]] = {}
    for verdict in verdicts:
        if verdict.cell.check == "speed" and verdict.status is Status.PASS and verdict.cell.ranks <= cores:
            kept = {metric.name: metric.value for metric in verdict.metrics if metric.name in RATIOS}
            ratios[verdict.cell] = kept
    if baseline is not None:
        passed |= baseline.passed - ours
        if baseline.depth == plan.setup.speed_depth:
            ratios = {**{c: r for c, r in baseline.ratios.items() if c not in ours}, **ratios}
    return Baseline(plan.setup.speed_depth, frozenset(passed), ratios)
