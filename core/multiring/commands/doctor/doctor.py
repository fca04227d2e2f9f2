"""`multiring doctor`: checks that this machine, or hosts together, can run a job and says what to fix."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from multiring.commands.doctor import hosts_doctor
from multiring.commands.doctor.checks import CHECKS, Finding, Status, run_checks
from multiring.commands.launcher.options import add_host_arguments, chosen_hosts

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `multiring doctor`: those of `multiring run` that say which hosts there are."""
    add_host_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Runs every check; returns 1 if one has failed, so that a job cannot run here, and 0 otherwise."""
    hosts = chosen_hosts(args)
    if hosts is not None:
        width = max(len(name) for name in ("launcher", *(host.name or "localhost" for host in hosts)))
        found = []
        for about, finding in hosts_doctor.look_at(args, hosts):
            _show(about, finding, width)
            found.append(finding)
        return _judge(found, "These hosts")
    width = max(map(len, CHECKS))
    findings: list[Finding] = []
    for name, finding in run_checks():
        findings.append(finding)
        _show(name, finding, width)
    return _judge(findings, "This machine")


def _show(about: str, finding: Finding, width: int) -> None:
    print(f"{finding.status.value:<7}  {about:<{width}}  {finding.detail}", flush=True)
    if finding.fix:
        print(f"{'':<7}  {'':<{width}}  -> {finding.fix}", flush=True)


def _judge(findings: Sequence[Finding], who: str) -> int:
    failed = sum(finding.status is Status.FAILED for finding in findings)
    warned = sum(finding.status is Status.WARNING for finding in findings)
    if failed:
        print(f"\n{who} cannot run a job: {failed} of {len(findings)} checks failed.")
        return 1
    print(f"\n{who} can run a job" + (f", with {warned} warning{'s' * (warned > 1)}." if warned else "."))
    return 0
