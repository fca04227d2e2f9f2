"""What a job on several hosts finds out about its allreduces at its start."""

from __future__ import annotations

import os

import numpy as np
import pytest

import multiring
from multiring import Communicator, UsageError
from multiring.tuning import startup
from multiring.tuning.measure import Measured
from multiring.tuning.table import AUTO, OFF, ROUNDS, Algorithm, SizeClass
from tests.nursery import Nursery
from tests.support import run_job

KIB = 1024
TREE = Algorithm("2tx2t")
SIZES = (1 * KIB, 8 * KIB, 32 * KIB, 128 * KIB)


def straight(sizes: tuple[int, ...] = SIZES, **lines: tuple[float, float]) -> list[Measured]:
    """Measurements on lines: microseconds and microseconds per KiB by the algorithms' names."""
    algorithms = {"rounds": Algorithm(ROUNDS), "auto": Algorithm(AUTO), "tree": TREE}
    return [
        Measured(nbytes, algorithms[name], 1e-6 * (latency + slope * nbytes / KIB))
        for nbytes in sizes
        for name, (latency, slope) in lines.items()
    ]


def test_lines_tell_where_one_way_ends_and_the_next_begins() -> None:
    # The plan is 20 % quicker than rounds from 35 KiB on: as usual.
    found = startup.classes_by_model(straight(rounds=(100, 9), auto=(300, 1), tree=(500, 9)), 4)
    assert found == (), "nothing is clearly quicker"
    found = startup.classes_by_model(straight(rounds=(100, 1), auto=(300, 0.5), tree=(500, 9)), 4)
    assert found == (SizeClass(128 * KIB, Algorithm(ROUNDS)), SizeClass(256 * KIB, Algorithm(AUTO)))
    found = startup.classes_by_model(straight(rounds=(100, 20), auto=(90, 2), tree=(20, 4)), 4)
    assert found == (SizeClass(16 * KIB, TREE), SizeClass(256 * KIB, Algorithm(AUTO)))


def test_what_was_not_measured_goes_as_usual() -> None:
    found = startup.classes_by_model(straight((KIB,), rounds=(100, 1), auto=(100, 1), tree=(10, 1)), 4)
    assert found == (
        SizeClass(KIB, TREE),
        SizeClass(16 * KIB, Algorithm(ROUNDS)),
        SizeClass(32 * KIB, Algorithm(AUTO)),
    )


def test_a_way_that_was_given_up_is_none_for_larger_sizes() -> None:
    # Measured at 1 KiB alone, where it is by far the quickest.
    measured = [*straight(rounds=(1000, 50), auto=(100, 15)), Measured(KIB, TREE, 31e-6)]
    found = startup.classes_by_model(measured, 4)
    assert found == (SizeClass(KIB, TREE), SizeClass(256 * KIB, Algorithm(AUTO)))


def test_a_line_does_not_overrule_what_was_measured_beside_it() -> None:
    measured = straight((KIB, 8 * KIB), rounds=(100, 1), auto=(500, 1), tree=(500, 1))
    # Far quicker at 1 KiB, as slow as rounds at 8 KiB: there the line between them is below both.
    measured += [Measured(KIB, Algorithm("2px2d"), 1e-6), Measured(8 * KIB, Algorithm("2px2d"), 108e-6)]
    found = startup.classes_by_model(measured, 4)
    assert found[0].algorithm == Algorithm("2px2d")
    assert all(each.algorithm == Algorithm(ROUNDS) for each in found if 4 * KIB <= each.up_to <= 16 * KIB), (
        found
    )


def start(rank: int, tuning: str) -> tuple[str, str, list[bytes]]:
    os.environ["MULTIRING_TUNING"] = tuning
    # What would be measured here is chance.
    startup._MOST_BARRIER_SECONDS = 1e9
    startup._SECONDS = 1e9
    startup.classes_by_model = lambda measured, size: (  # type: ignore[assignment]
        SizeClass(4 * KIB, Algorithm("2tx2d")),
        SizeClass(8 * KIB, Algorithm(AUTO)),
    )
    comm = multiring.init()
    arrays = [np.random.default_rng(comm.rank).standard_normal(count) for count in (3, 700, 90_000)]
    queue = comm.named_queue("q")
    results = [queue.allreduce(each, name=str(each.size)).tobytes() for each in arrays]
    assert [comm.allreduce(each).tobytes() for each in arrays] == results
    duplicate = comm.split(0)
    return comm._core.tuning, duplicate._core.tuning, results


def test_ranks_follow_it_from_the_start_with_the_same_bits(nursery: Nursery) -> None:
    outcomes = nursery.run(4, start, "", init=False, hosts=2)
    usual = nursery.run(4, start, OFF, init=False, hosts=2)
    for followed, without in zip(outcomes, usual, strict=True):
        assert followed.value is not None, followed.trace
        assert without.value is not None, without.trace
        assert followed.value[:2] == ("2x2:4096=2tx2d,8192=auto",) * 2
        assert without.value == ("", "", followed.value[2])


def start_apart(rank: int) -> None:
    os.environ["MULTIRING_TUNING"] = OFF if rank == 1 else ""
    multiring.init()


def test_ranks_that_do_not_all_measure(nursery: Nursery) -> None:
    for outcome in nursery.run(3, start_apart, init=False, hosts=3):
        outcome.check_raised(UsageError, "MULTIRING_TUNING (what the file says)=", "rank 1")


def start_really(comm: Communicator) -> str:
    assert comm.allreduce(np.ones(50_000))[0] == comm.size
    return str(comm._core.tuning)


@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (3, 2)])
def test_all_ranks_find_the_same(nursery: Nursery, size: int, hosts: int) -> None:
    outcomes = nursery.run(size, start_really, hosts=hosts)
    assert all(outcome.error is None for outcome in outcomes), outcomes
    assert len({outcome.value for outcome in outcomes}) == 1


TELLING = """
import multiring
from multiring.tuning import startup
from tests.support import pretend_places
pretend_places([0, 1, 0])
startup._MOST_BARRIER_SECONDS = 1e9
multiring.init()
"""


def test_rank_0_tells_what_it_has_found() -> None:
    result = run_job(3, TELLING, env={"MULTIRING_LOG_LEVEL": "info"}, code=0)
    assert result.stderr.count("allreduces use what was measured in ") == 1, result.stderr
    assert run_job(3, TELLING).stderr == ""
