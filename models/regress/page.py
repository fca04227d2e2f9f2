"""The results as one HTML file that needs no other: what is printed, a picture, and every figure."""

from __future__ import annotations

import io
from html import escape

from rich.console import Console
from rich.text import Text

from multiring.models.regress.charts import draw
from multiring.models.regress.report import STYLES, Report, show

__all__ = ["to_html"]

_COLUMNS = 180


def to_html(report: Report) -> str:
    """The page."""
    title = f"multiring regress: {report.headline()}"
    picture = draw(report.outcomes, report.plan.titles)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        "<style>body { margin: 2rem } svg { max-width: 100%; height: auto }</style></head><body>\n"
        f"<h1>{escape(title)}</h1>\n{_results(report)}\n{picture or ''}\n"
        f"<h2>All figures</h2>\n{_figures(report)}\n</body></html>\n"
    )


def _results(report: Report) -> str:
    console = _recorder()
    machine = report.machine
    titles = report.plan.titles
    versions = "".join(f", {titles[n]} {v}" for n, v in report.versions.items() if n in titles)
    for line in (
        f"{report.date}: {report.command}",
        f"{machine.processor}, {machine.cores} processors; Python {machine.python}{versions}",
    ):
        console.print(Text(line), soft_wrap=True)
    show(report, console)
    return _html(console)


def _figures(report: Report) -> str:
    """Every check with its figures and, where a job has failed, the end of its output."""
    console = _recorder()
    for verdict in report.verdicts:
        console.print(Text(f"{verdict.cell}: {verdict.status}: {verdict.text}", STYLES[verdict.status]))
        for metric in verdict.metrics:
            where = f" ({metric.where})" if metric.where else ""
            limit = f", limit {metric.limit:g}" if metric.limit else ""
            console.print(Text(f"    {metric.name}: {metric.value:.4g}{where}{limit}"))
        if verdict.detail:
            console.print(Text.from_ansi(verdict.detail), soft_wrap=True)
    return _html(console)


def _recorder() -> Console:
    return Console(record=True, file=io.StringIO(), width=_COLUMNS)


def _html(console: Console) -> str:
    return console.export_html(code_format="<pre>{code}</pre>", inline_styles=True)
