"""Everything that one run of `multiring regress` has found, and how it is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from multiring.benchmarks.machine import Machine
from multiring.models.regress.checks import CHECKS
from multiring.models.regress.judge import Status, Verdict
from multiring.models.regress.outcome import Outcomes
from multiring.models.regress.plan import Plan

__all__ = ["STYLES", "Report", "show"]

STYLES = {Status.PASS: "green", Status.FAIL: "bold red", Status.ERROR: "bold red", Status.SKIP: "dim"}


@dataclass(frozen=True)
class Report:
    """The results.

    Attributes:
        command: The command line.
        date: When it began, in ISO format with the offset from UTC.
        seconds: How long it took.
        machine: Where, and with what.
        versions: Of the frameworks, by name.
        plan: What was to be done.
        verdicts: All checks.
        outcomes: Of the tasks.
        skipped: Frameworks that were left out, and why.
        regressions: What was better in the baseline, each in a line.
        baseline: What it was compared with, in a line.
        interrupted: Whether Ctrl-C ended it.
    """

    command: str
    date: str
    seconds: float
    machine: Machine
    versions: Mapping[str, str]
    plan: Plan
    verdicts: tuple[Verdict, ...]
    outcomes: Outcomes
    skipped: Mapping[str, str]
    regressions: tuple[str, ...]
    baseline: str
    interrupted: bool

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


def show(report: Report, console: Console) -> None:
    """Print the table, everything that is wrong, and the headline."""
    console.print(_table(report))
    lines = [f"{report.plan.titles.get(name, name)} left out: {why}" for name, why in report.skipped.items()]
    lines += [f"{verdict.status.upper()} {verdict.cell}: {verdict.text}" for verdict in report.bad]
    lines += [f"REGRESSION {text}" for text in report.regressions]
    lines += [report.baseline, f"{report.headline()}, {report.seconds:.0f} s"]
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _table(report: Report) -> Table:
    by_cell = {(v.cell.framework, v.cell.ranks, v.cell.check): v for v in report.verdicts}
    checks = [name for name in CHECKS if any(v.cell.check == name for v in report.verdicts)]
    table = Table("framework", "ranks", *(CHECKS[name].title for name in checks), box=ROUNDED)
    before = None
    for framework, ranks in dict.fromkeys(key[:2] for key in by_cell):
        if before not in (None, framework):
            table.add_section()
        found = [by_cell.get((framework, ranks, name)) for name in checks]
        cells = [Text(_brief(each), STYLES[each.status]) if each else "" for each in found]
        table.add_row(report.plan.titles[framework] if framework != before else "", str(ranks), *cells)
        before = framework
    return table


def _brief(verdict: Verdict) -> str:
    """A verdict in a word or two."""
    if verdict.status is not Status.PASS:
        return "skipped" if verdict.status is Status.SKIP else verdict.status.upper()
    values = {metric.name: metric.value for metric in verdict.metrics}
    if verdict.cell.check == "bits":
        return "equal"
    if "test accuracy" in values:
        return f"{values['test accuracy']:.2%}"
    if "efficiency" in values:
        own = values.get("times its own way")
        return f"{values['efficiency']:.1%}" + (f", {own:.2f} x own way" if own is not None else "")
    worst: dict[str, float] = {}
    for name, value in values.items():
        kind = "f32" if "float32" in name else "f64"
        worst[kind] = max(worst.get(kind, 0.0), value)
    return ", ".join(f"{kind} {value:.0e}" for kind, value in sorted(worst.items()))
