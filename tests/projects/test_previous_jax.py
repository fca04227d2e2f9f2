"""The tests of JAX's own collectives, with the release of JAX before the one that all other tests use."""

from __future__ import annotations

import sys

from tests.projects.support import ENVIRONMENT, needs_projects
from tests.support import REPOSITORY, Job

pytestmark = needs_projects

PREVIOUS = ENVIRONMENT / "previous-jax"


def test_programs_that_shard() -> None:
    environment = {"PYTHONPATH": str(PREVIOUS)}
    found = "import jax, jaxlib; print(jax.__file__, jaxlib.__file__)"
    told = Job([sys.executable, "-c", found], environment).run(60.0, 0).stdout
    assert told.count(str(PREVIOUS)) == 2
    options = ["-q", "-p", "no:cacheprovider", "-m", "full or not full"]
    tests = str(REPOSITORY / "tests" / "adapters" / "jax_collectives")
    done = Job([sys.executable, "-m", "pytest", *options, tests], environment, cwd=REPOSITORY).run(600.0, 0)
    assert " passed" in done.stdout
