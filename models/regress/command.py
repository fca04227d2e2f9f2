"""`multiring regress`: proves that all frameworks train alike, and that nothing has become slower."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType

from rich.console import Console

from multiring import machine
from multiring.benchmarks import launch
from multiring.benchmarks.command import write_whole
from multiring.benchmarks.gradients.training_speed import TrainingSpeed
from multiring.benchmarks.machine import Machine
from multiring.commands.env import versions
from multiring.commands.frameworks import FRAMEWORKS, Framework
from multiring.errors import UsageError
from multiring.models.errors import DataError
from multiring.models.regress import baseline as baselines
from multiring.models.regress.baseline import Baseline
from multiring.models.regress.judge import Verdict, judge
from multiring.models.regress.junit import to_junit
from multiring.models.regress.options import Options, add_arguments, parse
from multiring.models.regress.outcome import Outcome, Outcomes, State
from multiring.models.regress.page import to_html
from multiring.models.regress.plan import Cell, Job, Plan, make_plan
from multiring.models.regress.report import Report, show
from multiring.models.regress.runner import Runner

__all__ = ["add_arguments", "main", "regress"]

INTERRUPTED, TERMINATED = 130, 143
# How often speed is measured before a fall is believed.
ATTEMPTS = 3
# Where the output is no terminal: as wide as the table.
COLUMNS = 160


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends everything as Ctrl-C does."""


def main(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code: 0 if every check passed; 1 if one did not, or something became worse than in the baseline;
        130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        UsageError: An option is wrong, or the baseline cannot be read.
    """
    options = parse(args)
    with _terminable():
        return regress(options, FRAMEWORKS)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class _Run:
    """A run: what is planned, and what has come of it so far."""

    options: Options
    plan: Plan
    cpus: list[int]
    baseline: Baseline | None
    outcomes: Outcomes = field(default_factory=dict)
    tasks: int = 0
    ended: int = 0
    interrupted: int = 0

    def verdicts(self) -> list[Verdict]:
        return judge(self.plan, self.outcomes)

    def perform(self, jobs: tuple[Job, ...]) -> None:
        self.tasks += sum(len(job.tasks) for job in jobs)
        Runner(jobs, self.plan.setup, self.cpus, self.options.time_limit, self._note).run()

    def _note(self, job: Job, task: str, outcome: Outcome) -> None:
        """A line for every task, since frameworks take their time."""
        self.outcomes[job.framework.name, job.ranks, task] = outcome
        self.ended += 1
        if outcome.state is not State.INTERRUPTED:
            how = f"done in {outcome.seconds:.0f} s" if outcome.state is State.DONE else outcome.why
            progress = f"[{self.ended}/{self.tasks}]"
            print(f"{progress} {Cell(job.framework.name, job.ranks, task)}: {how}", flush=True)


def regress(options: Options, frameworks: Mapping[str, Framework]) -> int:
    """Check `frameworks`, report and compare; see `main`.

    Args:
        options: What to check and where to report.
        frameworks: All that there are, by name.
    """
    began, date = time.monotonic(), datetime.now().astimezone().isoformat(timespec="seconds")
    _prepare(options)
    cpus = _cpus()
    plan, skipped = _plan(options, frameworks, len(cpus))
    found = _read_baseline(options)
    run = _Run(options, plan, cpus, found)
    try:
        run.perform(plan.jobs)
        _measure_again(run)
    except KeyboardInterrupt as signalled:
        run.interrupted = TERMINATED if isinstance(signalled, _Terminated) else INTERRUPTED
    report = _report(run, skipped, frameworks, date, time.monotonic() - began)
    show(report, Console(width=None if sys.stdout.isatty() else COLUMNS))
    _write(report, options)
    if run.interrupted:
        return run.interrupted
    if options.write_baseline and options.baseline is not None:
        made = baselines.update(found, plan, report.verdicts, len(cpus))
        options.baseline.parent.mkdir(parents=True, exist_ok=True)
        _write_text(options.baseline, made.to_json())
        print(f"{options.baseline} written")
        return 0
    return 0 if report.is_good else 1


def _read_baseline(options: Options) -> Baseline | None:
    path = options.baseline
    may_lack = options.write_baseline or path == baselines.DEFAULT
    if path is None or (may_lack and not path.exists()):
        return None
    try:
        return Baseline.read(path)
    except DataError as error:
        raise UsageError(f"--baseline: {error}") from error


def _cpus() -> list[int]:
    """The processors that jobs get: no more than a quota lets run at once."""
    return machine.allowed_cpus()[: machine.core_allowance()]


def _prepare(options: Options) -> None:
    if options.report is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError("--report draws with matplotlib: run pip install 'multiring[train]'")
        try:
            options.report.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--report {options.report}: {error.strerror}") from error
        if not os.access(options.report, os.W_OK | os.X_OK):
            raise UsageError(f"--report {options.report} cannot be written to")


def _plan(options: Options, frameworks: Mapping[str, Framework], cores: int) -> tuple[Plan, dict[str, str]]:
    """The plan, and the frameworks that are left out with the reason."""
    lacking = {name: why for name, each in frameworks.items() if (why := _why_missing(each)) is not None}
    names = list(frameworks) if options.frameworks in (None, ("all",)) else list(options.frameworks or ())
    if unknown := [name for name in names if name not in frameworks]:
        raise UsageError(f"unknown framework {unknown[0]!r}; choose among {', '.join(frameworks)}, or all")
    skipped: dict[str, str] = {}
    if options.frameworks is None:
        skipped = lacking
        names = [name for name in names if name not in lacking]
        if not names:
            raise UsageError("no framework is installed: run pip install 'multiring[torch]'")
    oracle = next((name for name in frameworks if name not in lacking), None)
    no_mpi = None
    if "speed" in options.checks and any((own := frameworks[name].own_way) and own.mpi for name in names):
        no_mpi = _why_no_mpi()
    plan = make_plan(
        [frameworks[name] for name in names],
        options.ranks,
        options.checks,
        options.setup,
        cores=cores,
        missing={name: lacking[name] for name in names if name in lacking},
        reference=frameworks[oracle] if oracle is not None and oracle not in names else None,
        no_mpi=no_mpi,
    )
    return plan, skipped


def _why_missing(framework: Framework) -> str | None:
    if why := framework.why_missing:
        return why
    if importlib.util.find_spec(framework.module) is None:
        return f"this installation has no trainer for it ({framework.module})"
    return None


def _why_no_mpi() -> str | None:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    try:
        launch.find_mpirun()
    except UsageError as error:
        return str(error)
    return None


def _measure_again(run: _Run) -> None:
    """Where speed has fallen it may have been a busy moment: the best of several runs counts."""
    for _ in range(ATTEMPTS - 1):
        if run.baseline is None:
            return
        slow = baselines.slow_cells(run.baseline, run.plan, run.verdicts(), len(run.cpus))
        if not slow:
            return
        before = {(c.framework, c.ranks, "speed"): run.outcomes[c.framework, c.ranks, "speed"] for c in slow}
        jobs = tuple(
            job
            for job in run.plan.jobs
            if job.undisturbed and (job.framework.name, job.ranks, "speed") in before
        )
        run.perform(jobs)
        for key, outcome in before.items():
            run.outcomes[key] = _better(outcome, run.outcomes[key])


def _better(first: Outcome, second: Outcome) -> Outcome:
    """The one with the higher efficiency."""
    done = [outcome for outcome in (first, second) if outcome.state is State.DONE]
    return max(done, key=lambda outcome: TrainingSpeed(**outcome.values).efficiency.median)


def _report(
    run: _Run, skipped: dict[str, str], frameworks: Mapping[str, Framework], date: str, seconds: float
) -> Report:
    verdicts = run.verdicts()
    regressions: list[str] = []
    against = "not compared with a baseline"
    path = run.options.baseline
    if run.baseline is not None and path is not None and not run.options.write_baseline:
        regressions = baselines.compare(run.baseline, run.plan, verdicts, len(run.cpus))
        against = f"compared with {_shown(path)}"
    return Report(
        command=run.options.shown_as,
        date=date,
        seconds=seconds,
        machine=Machine.here(len(run.cpus), mpi=False),
        versions=_versions(frameworks),
        plan=run.plan,
        verdicts=tuple(verdicts),
        outcomes=run.outcomes,
        skipped=skipped,
        regressions=tuple(regressions),
        baseline=against,
        interrupted=bool(run.interrupted),
    )


def _versions(frameworks: Mapping[str, Framework]) -> dict[str, str]:
    """Version of each framework that is installed; nothing is imported."""
    installed = versions()
    return {
        name: installed[found[0]]
        for name, framework in frameworks.items()
        if (found := [each for each in framework.distributions if each in installed])
    }


def _shown(path: Path) -> str:
    return "the committed baseline" if path == baselines.DEFAULT else f"the baseline {path}"


def _write(report: Report, options: Options) -> None:
    directory = options.report
    if directory is None:
        return
    _write_text(directory / "junit.xml", to_junit(report))
    _write_text(directory / "index.html", to_html(report))
    print(f"{directory / 'index.html'} shows it; junit.xml is beside it", flush=True)


def _write_text(path: Path, text: str) -> None:
    # What programs print may hold what UTF-8 does not.
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8", errors="replace"))
