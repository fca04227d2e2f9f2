"""`multiring doctor`: checks that this machine can run a job and says what to mend."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from multiring.diagnostics.checks import CHECKS, Finding, Status

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `multiring doctor`: none."""


def main(args: argparse.Namespace) -> int:
    """Runs every check; returns 1 if one has failed, so that a job cannot run here, and 0 otherwise."""
    width = max(map(len, CHECKS))
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        finding = _run(check)
        findings.append(finding)
        print(f"{finding.status.value:<7}  {name:<{width}}  {finding.detail}", flush=True)
        if finding.mend:
            print(f"{'':<7}  {'':<{width}}  -> {finding.mend}", flush=True)
    failed = sum(finding.status is Status.FAILED for finding in findings)
    warned = sum(finding.status is Status.WARNING for finding in findings)
    if failed:
        print(f"\nThis machine cannot run a job: {failed} of {len(findings)} checks failed.")
        return 1
    print("\nThis machine can run a job" + (f", with {warned} warnings." if warned else "."))
    return 0


def _run(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # a check that fails in a way nobody thought of is a finding too
        return Finding(Status.FAILED, f"{type(error).__name__}: {error}", "report this")
