"""pytorch-ignite's tests of what it does on several processes, unchanged, from its source distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from tests.projects.support import AS_GLOO, ENVIRONMENT, HOROVOD, NO_HOROVOD, needs_projects, python, record
from tests.support import Job

pytestmark = needs_projects

RANKS = 2


def _outcomes(report: Path, environment: Mapping[str, str], *options: str) -> Counter[tuple[str, str]]:
    """Run tests; return how often each one ended how."""
    (source,) = ENVIRONMENT.glob("pytorch_ignite-*/")
    command = python("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *options)
    Job(command, {"CUDA_VISIBLE_DEVICES": "", **environment}, cwd=source).run(900.0)
    found: Counter[tuple[str, str]] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        ends = {child.tag for child in case} & {"failure", "error", "skipped"}
        found[f"{case.get('classname')}.{case.get('name')}", next(iter(ends), "passed")] += 1
    return found


def _passed(found: Counter[tuple[str, str]]) -> Counter[str]:
    return Counter({name: count for (name, end), count in found.items() if end == "passed"})


def test_what_passes_over_gloo_passes_over_multiring(tmp_path: Path) -> None:
    interpreter = python()[0]
    each_rank = ["--dist=each", f"--tx={RANKS}*popen//python={interpreter}", "-m", "distributed"]
    parts = ["tests/ignite/distributed", "-k", "gloo or native"]
    size = {"WORLD_SIZE": str(RANKS)}
    gloo = _passed(_outcomes(tmp_path / "gloo.xml", size, *each_rank, *parts))
    ours = _passed(_outcomes(tmp_path / "ours.xml", {**size, **AS_GLOO}, *each_rank, *parts))
    assert gloo.total() > 40
    assert ours >= gloo, sorted((gloo - ours).elements())
    what = "its own tests of several processes"
    record("pytorch-ignite", "`MULTIRING_AS_GLOO=1`", what, f"{ours.total()} pass", f"{gloo.total()} pass")


def test_its_tests_of_horovod_pass(tmp_path: Path) -> None:
    files = [
        "tests/ignite/distributed/comp_models/test_horovod.py",
        "tests/ignite/distributed/utils/test_horovod.py",
    ]
    found = _outcomes(tmp_path / "horovod.xml", HOROVOD, *files)
    assert not [case for case, end in found if end in ("failure", "error")]
    count = _passed(found).total()
    assert count > 10
    record("pytorch-ignite", "the package `horovod`", "its own tests of Horovod", f"{count} pass", NO_HOROVOD)
