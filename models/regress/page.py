"""The results as one HTML file that needs no other: the verdict, pictures, and the table of all checks."""

from __future__ import annotations

from html import escape

from multiring.models.regress import charts
from multiring.models.regress.checks import CHECKS
from multiring.models.regress.judge import Status, Verdict
from multiring.models.regress.live import brief
from multiring.models.regress.report import Report

__all__ = ["to_html"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; max-width: 1180px; margin: 2rem auto;
  padding: 0 1rem; background: #fff }
h1 { font-size: 1.3rem; margin: 0 0 .4rem } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem }
.verdict { padding: .8rem 1.1rem; border-radius: .5rem; color: #fff; font-size: 1.25rem; font-weight: 600 }
.good { background: #15803d } .ill { background: #b91c1c }
ul.problems { margin: .8rem 0; padding-left: 1.2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .38rem .6rem; border-bottom: 1px solid #dde3ea; vertical-align: top }
th { font-weight: 600; border-bottom: 2px solid #9aa7b6 }
td.pass { background: #e7f6ec } td.fail, td.error { background: #fde3e1; font-weight: 600 }
td.skip, td.wait { color: #7b8794 } td.none { background: #f6f8fa }
small, .note { color: #5b6673; font-weight: 400 }
figure { margin: .5rem 0 } svg { max-width: 100%; height: auto }
details { margin: .4rem 0 } summary { cursor: pointer }
pre { overflow: auto; background: #f6f8fa; padding: .7rem }
"""


def to_html(report: Report) -> str:
    """The page."""
    parts = [_head(report), _problems(report), _matrix(report), _pictures(report), _details(report)]
    title = f"multiring regress: {report.headline()}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _head(report: Report) -> str:
    machine = report.machine
    kind = "good" if report.is_good else "ill"
    versions = ", ".join(f"{report.titles[n]} {v}" for n, v in report.versions.items() if n in report.titles)
    lines = [
        f"{report.date}, {report.seconds:.0f} s: {report.command}",
        f"{machine.processor}, {machine.cores} processors; Python {machine.python}; {versions}",
        report.baseline,
    ]
    return (
        "<h1>Do all frameworks train alike?</h1>"
        f'<div class="verdict {kind}">{escape(_sentence(report.headline()))}</div>'
        f'<p class="note">{"<br>".join(escape(line) for line in lines)}</p>'
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _problems(report: Report) -> str:
    items = [f"<b>{escape(str(v.cell))}</b>: {escape(v.text)}" for v in report.bad]
    items += [f"<b>regression</b>: {escape(text)}" for text in report.regressions]
    items += [
        f"{escape(report.titles.get(name, name))} left out: {escape(why)}"
        for name, why in report.skipped.items()
    ]
    return f'<ul class="problems">{"".join(f"<li>{item}</li>" for item in items)}</ul>' if items else ""


def _matrix(report: Report) -> str:
    checks = [name for name in CHECKS if any(v.cell.check == name for v in report.verdicts)]
    head = "".join(f"<th>{escape(CHECKS[name].title)}</th>" for name in checks)
    by_cell = {(v.cell.framework, v.cell.ranks, v.cell.check): v for v in report.verdicts}
    rows = []
    for framework, ranks in dict.fromkeys((v.cell.framework, v.cell.ranks) for v in report.verdicts):
        cells = "".join(_cell(by_cell.get((framework, ranks, name))) for name in checks)
        rows.append(f"<tr><td>{escape(report.titles[framework])}</td><td>{ranks}</td>{cells}</tr>")
    return f"<table><tr><th>framework</th><th>ranks</th>{head}</tr>{''.join(rows)}</table>"


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return '<td class="none"></td>'
    mark = {Status.PASS: "✓ ", Status.FAIL: "✗ ", Status.ERROR: "✗ "}.get(verdict.status, "")
    return f'<td class="{verdict.status}" title="{escape(verdict.text)}">{mark}{escape(brief(verdict))}</td>'


def _pictures(report: Report) -> str:
    parts = []
    curves = charts.draw_curves(report.curves, report.titles)
    if curves is not None:
        parts.append(
            "<h2>Loss curves</h2><p class='note'>Laid over each other, the first ones wide and pale: where "
            f"frameworks and ranks train alike, one line is seen.</p><figure>{curves}</figure>"
        )
    speeds = charts.draw_speeds(report.curves.speeds, report.titles)
    if speeds is not None:
        parts.append(
            f"<h2>Speed</h2><p class='note'>ResNet-{report.setup.speed_depth}; every rank alone, in step, "
            "and in the framework's own way take turns within one run.</p>"
            f"<figure>{speeds}</figure>"
        )
    return "".join(parts)


def _details(report: Report) -> str:
    rows = []
    for verdict in report.verdicts:
        figures = "<br>".join(
            escape(f"{m.name}: {m.value:.4g}")
            + (f" <small>{escape(m.where)}</small>" if m.where else "")
            + (f" <small>limit {m.limit:g}</small>" if m.limit else "")
            for m in verdict.metrics
        )
        detail = f"<details><summary>output</summary><pre>{escape(verdict.detail)}</pre></details>"
        rows.append(
            f'<tr><td>{escape(str(verdict.cell))}</td><td class="{verdict.status}">{verdict.status}</td>'
            f"<td>{escape(verdict.text)}{detail if verdict.detail else ''}</td><td>{figures}</td></tr>"
        )
    about = "".join(
        f"<dt><b>{escape(check.title)}</b> ({check.name})</dt><dd>{escape(check.explanation)}</dd>"
        for check in CHECKS.values()
    )
    oracle = report.titles.get(report.oracle or "", "none")
    return (
        "<h2>All checks</h2><table><tr><th>check</th><th>result</th><th></th><th>figures</th></tr>"
        f"{''.join(rows)}</table><h2>What is checked</h2><dl>{about}</dl>"
        "<p class='note'>Differences are relative: the largest of any element over the largest "
        f"absolute value of the tensor they are compared with. Oracle: {escape(oracle)} in float64.</p>"
    )
