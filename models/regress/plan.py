"""Which checks there are for which frameworks and ranks, and which jobs they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from multiring.commands.frameworks import Framework, OwnWay
from multiring.models.regress.checks import Setup

__all__ = ["Cell", "Job", "Plan", "make_plan"]


@dataclass(frozen=True, order=True)
class Cell:
    """One check of one framework on a number of ranks."""

    framework: str
    ranks: int
    check: str

    def __str__(self) -> str:
        return f"{self.framework}, {self.ranks} rank{'s' if self.ranks > 1 else ''}, {self.check}"


@dataclass(frozen=True)
class Job:
    """One start of a framework's ranks.

    Attributes:
        framework: Trains; with its own way if speed is compared with it.
        ranks: How many to start.
        tasks: What they do, one after the other; see `tasks.run_task`.
        undisturbed: Whether nothing else may run meanwhile, for times are taken.
    """

    framework: Framework
    ranks: int
    tasks: tuple[str, ...]
    undisturbed: bool = False

    @property
    def mpi(self) -> bool:
        """Whether MPI's own launcher has to start the ranks."""
        own_way = self.framework.own_way
        return self.undisturbed and own_way is not None and own_way.mpi

    def with_tasks(self, tasks: Sequence[str]) -> Job:
        """The same with other tasks."""
        return replace(self, tasks=tuple(tasks))


@dataclass(frozen=True)
class Plan:
    """Everything that is going to be done.

    Attributes:
        cells: Checks, in the order of the report.
        jobs: In the order in which they start.
        missing: Frameworks that cannot run, and why.
        setup: The setting.
        oracle: Name of the framework that others are compared with; None: none of them can be.
        titles: Of the frameworks, by name.
        no_own_way: Why a framework's own way is not measured where it has one, by the framework's name.
    """

    cells: tuple[Cell, ...]
    jobs: tuple[Job, ...]
    missing: Mapping[str, str]
    setup: Setup
    oracle: str | None
    titles: Mapping[str, str]
    no_own_way: Mapping[str, str] = field(default_factory=dict)


def make_plan(
    frameworks: Sequence[Framework],
    ranks: Sequence[int],
    checks: Sequence[str],
    setup: Setup,
    *,
    cores: int,
    missing: Mapping[str, str],
    reference: Framework | None = None,
    no_mpi: str | None = None,
) -> Plan:
    """Plan the checks.

    Args:
        frameworks: The frameworks to check, those that are missing included.
        ranks: Numbers of ranks. One rank is always run, since several are compared with it.
        checks: Names out of `CHECKS`.
        setup: The setting.
        cores: Processors that there are.
        missing: Names of frameworks that cannot run, with the reason.
        reference: What others are compared with where it is not among `frameworks`.
        no_mpi: Why MPI cannot start ranks; None: it can.
    """
    several = sorted({count for count in ranks if count > 1})
    deciding = _accuracy_ranks(ranks, cores)
    cells: list[Cell] = []
    for framework in frameworks:
        if "agreement" in checks:
            cells.append(Cell(framework.name, 1, "agreement"))
        for count in sorted(set(ranks)):
            cells += [
                Cell(framework.name, count, check)
                for check in checks
                if (check == "accuracy" and count == deciding)
                or (check in ("following", "bits", "speed") and count > 1)
            ]
    able = [framework for framework in frameworks if framework.name not in missing]
    references = able if reference is None or "agreement" not in checks else [reference, *able]
    jobs = [job for each in references if (job := _alone(each, checks, setup, several, deciding)) is not None]
    for count in several:
        jobs += [job for each in able if (job := _together(each, count, checks, setup, deciding)) is not None]
    no_own_way: dict[str, str] = {}
    if "speed" in checks:
        no_own_way = {each.name: why for each in able if (why := _unusable(each.own_way, no_mpi)) is not None}
        timed = [replace(each, own_way=None) if each.name in no_own_way else each for each in able]
        jobs += [Job(each, count, ("speed",), undisturbed=True) for each in timed for count in several]
    return Plan(
        cells=tuple(cells),
        jobs=tuple(jobs),
        missing=missing,
        setup=setup,
        oracle=references[0].name if references else None,
        titles={framework.name: framework.title for framework in (*frameworks, *references)},
        no_own_way=no_own_way,
    )


def _accuracy_ranks(ranks: Sequence[int], cores: int) -> int:
    return max((count for count in ranks if count <= cores), default=min(ranks))


def _alone(
    framework: Framework, checks: Sequence[str], setup: Setup, several: Sequence[int], deciding: int
) -> Job | None:
    tasks: list[str] = []
    if "agreement" in checks:
        tasks += [f"probe-{dtype}" for dtype in setup.probes]
    if "following" in checks and several:
        tasks += [f"train-{training}" for training in setup.trainings]
    elif "agreement" in checks and "float64" in setup.trainings:
        tasks.append("train-float64")
    if "accuracy" in checks and deciding == 1:
        tasks.append("accuracy")
    return Job(framework, 1, tuple(tasks)) if tasks else None


def _together(
    framework: Framework, count: int, checks: Sequence[str], setup: Setup, deciding: int
) -> Job | None:
    tasks: list[str] = []
    if {"following", "bits"} & set(checks):
        tasks += [f"train-{training}" for training in setup.trainings]
    if "accuracy" in checks and deciding == count:
        tasks.append("accuracy")
    return Job(framework, count, tuple(tasks)) if tasks else None


def _unusable(own_way: OwnWay | None, no_mpi: str | None) -> str | None:
    """Why it cannot be measured, if so: the rest of the check is still worth having."""
    if own_way is None:
        return None
    if own_way.missing:
        return f"{own_way.title} not measured: {' and '.join(own_way.missing)} is not installed"
    if own_way.mpi and no_mpi is not None:
        return f"{own_way.title} not measured: {no_mpi}"
    return None
