"""The results as JUnit XML, which CI systems show."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from multiring.models.regress.judge import Status, Verdict
from multiring.models.regress.report import Report

__all__ = ["to_junit"]

SUITE = "multiring.regress"
# XML 1.0 has no place for other control characters, which programs print to colour their output.
FORBIDDEN = re.compile(r"[^\t\n\r\u0020-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")


def to_junit(report: Report) -> str:
    """One test case for each framework, number of ranks and check, and one for each regression."""
    cases = [_case(verdict) for verdict in report.verdicts]
    cases += [_regression(text) for text in report.regressions]
    counts = {
        "tests": len(cases),
        "failures": sum(case.find("failure") is not None for case in cases),
        "errors": sum(case.find("error") is not None for case in cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
    }
    attributes = {name: str(count) for name, count in counts.items()}
    attributes["time"] = f"{report.seconds:.3f}"
    root = ElementTree.Element("testsuites", {"name": SUITE, **attributes})
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        {"name": SUITE, **attributes, "timestamp": report.date, "hostname": _clean(report.machine.processor)},
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in {"command": report.command, "baseline": report.baseline}.items():
        ElementTree.SubElement(properties, "property", {"name": name, "value": _clean(value)})
    suite.extend(cases)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(verdict: Verdict) -> ElementTree.Element:
    cell = verdict.cell
    plural = "s" if cell.ranks > 1 else ""
    case = ElementTree.Element(
        "testcase",
        {
            "classname": f"{SUITE}.{cell.framework}",
            "name": f"{cell.check} on {cell.ranks} rank{plural}",
            "time": f"{verdict.seconds:.3f}",
        },
    )
    kinds = {Status.FAIL: "failure", Status.ERROR: "error", Status.SKIP: "skipped"}
    if verdict.status in kinds:
        element = ElementTree.SubElement(
            case, kinds[verdict.status], {"message": _clean(verdict.text), "type": str(verdict.status)}
        )
        if verdict.detail and verdict.is_bad:
            element.text = _clean(verdict.detail)
    if verdict.metrics:
        lines = [f"{m.name}: {m.value:.6g}{f' ({m.where})' if m.where else ''}" for m in verdict.metrics]
        ElementTree.SubElement(case, "system-out").text = _clean("\n".join(lines))
    return case


def _regression(text: str) -> ElementTree.Element:
    name, _, _ = text.partition(":")
    case = ElementTree.Element(
        "testcase", {"classname": f"{SUITE}.baseline", "name": _clean(name), "time": "0"}
    )
    ElementTree.SubElement(case, "failure", {"message": _clean(text), "type": "regression"})
    return case


def _clean(text: str) -> str:
    return FORBIDDEN.sub("?", text)
