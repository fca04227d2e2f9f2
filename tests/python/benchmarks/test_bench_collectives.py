"""`multiring bench allreduce` and `collectives`: what is right, what has to cross, and what follows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from multiring import Communicator, InternalError
from multiring.benchmarks.collectives import allreduce, cases
from multiring.benchmarks.collectives.kinds import COLLECTIVES, ROOT, Blocks, Buffers
from multiring.benchmarks.collectives.libraries import MultiringCollectives, OneCollective
from multiring.benchmarks.collectives.results import Report, Row
from multiring.benchmarks.contenders import Call, FloatArray
from multiring.benchmarks.emulation import traffic
from multiring.benchmarks.emulation.start import Emulation
from multiring.benchmarks.machine import Machine
from multiring.benchmarks.measure import Meeting, Pace, Sample, measure
from tests.python.benchmarks.test_bench import measured
from tests.rank_pool import RankPool

NAMES = ["broadcast", "allgather", "reduce_scatter", "alltoall", "scatter", "gather"]
COUNT = 5  # elements of a block
MIB = 2**20


def written(name: str, ranks: int, iteration: int) -> list[Buffers]:
    """Arrays of all ranks, with their input."""
    everyone = []
    for rank in range(ranks):
        buffers = Buffers.of(COLLECTIVES[name], rank, ranks, COUNT)
        Blocks(COLLECTIVES[name], rank, ranks).write(buffers, iteration)
        everyone.append(buffers)
    return everyone


def result_of(name: str, everyone: list[Buffers], rank: int) -> FloatArray | None:
    """What a rank has to get, as the collective's definition has it."""
    own = slice(rank * COUNT, (rank + 1) * COUNT)
    inputs = [buffers.x for buffers in everyone]
    if name in ("allgather", "gather"):
        return np.concatenate(inputs) if name == "allgather" or rank == ROOT else None
    if name == "alltoall":
        return np.concatenate([x[own] for x in inputs])
    if name == "reduce_scatter":
        return np.sum([x[own] for x in inputs], axis=0, dtype=np.float32)
    return inputs[ROOT].copy() if name == "broadcast" else inputs[ROOT][own].copy()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_right_result_passes_and_others_do_not(name: str, ranks: int) -> None:
    """A library returns its result, or fills the array that it is given."""
    everyone = written(name, ranks, 31)
    before = written(name, ranks, 30)
    for rank in {0, ranks - 1}:
        blocks, buffers = Blocks(COLLECTIVES[name], rank, ranks), everyone[rank]
        right = result_of(name, everyone, rank)
        assert blocks.wrong(buffers, right, 31) == ""
        if right is None:
            continue
        assert right.size == buffers.out.size
        for place in (0, COUNT // 2, -1):
            spoilt = right.copy()
            spoilt[place] += 1
            assert f"of {name} is " in blocks.wrong(buffers, spoilt, 31)
        assert f"block 0 of {name} is " in blocks.wrong(buffers, result_of(name, before, rank), 31)
        assert f"{name} gives {right.size + 1} elements" in blocks.wrong(buffers, np.append(right, 0), 31)
        if right.size > COUNT:
            assert "block 0 of " in blocks.wrong(buffers, np.roll(right, COUNT), 31)
        if rank != ROOT or name != "broadcast":
            assert blocks.wrong(buffers, None, 31) != ""
        buffers.out[:] = right
        assert blocks.wrong(buffers, None, 31) == ""


class Forgetful(MultiringCollectives):
    """Gives the result of its first calls again and again."""

    name = "Forgetful"

    def allgather(self, x: FloatArray, out: FloatArray) -> Call:
        call, kept = super().allgather(x, out), out.copy()

        def first_ones() -> FloatArray:
            if not kept[0]:
                call()
                kept[:] = out
            return kept

        return first_ones


def measure_allgather(comm: Communicator, forgetful: bool) -> list[int]:
    library = (Forgetful if forgetful else MultiringCollectives)(comm)
    collective = COLLECTIVES["allgather"]
    contenders = [OneCollective(comm, library, collective)]
    task, pace = Blocks(collective, comm.rank, comm.size), Pace(seconds=0.001)
    found = measure(comm, contenders, task, COUNT, pace, Meeting(comm, 1))
    return [sample.iterations for sample, _ in found]


def test_a_wrong_result_is_an_error_on_every_rank(ranks: Callable[[int], RankPool]) -> None:
    (first, second) = ranks(2).run(measure_allgather, False)
    assert first == second
    assert first[0] >= Pace.least
    for rank, error in enumerate(ranks(2).run_expecting_errors(measure_allgather, True)):
        assert isinstance(error, InternalError)
        told = f"Forgetful on rank {rank}: block 0 of allgather is 1.0, 1.0, 1.0 where 2 is right"
        assert told in str(error)


def test_the_limit_is_what_the_busiest_link_has_to_carry() -> None:
    limits = {"broadcast": (1, 3), "allgather": (3 / 4, 3), "reduce_scatter": (3 / 4, 3)}
    limits |= {"alltoall": (2 * 3 / 4, 6), "scatter": (3 / 4, 3 / 4), "gather": (3 / 4, 3 / 4)}
    for name, (busiest, together) in limits.items():
        crossing = COLLECTIVES[name].crossing_of(Emulation.parse("4x2", "1gbit"), MIB)
        assert crossing == cases.Crossing(busiest * MIB, together * MIB), name


def test_a_run_measures_all_collectives_beside_a_peer() -> None:
    # With three ranks the array is not of equal blocks, and becomes a little larger.
    words = ["-np", "3", "--sizes", "4,4KiB", "--peers", "mpi", "--seconds", "0.01", "--plot", "DIR/r.png"]
    done, files = measured(*words, "--format", "markdown", benchmark="collectives")
    rows = json.loads(files["r.json"])["rows"]
    cells = [(row["collective"], row["bytes"], row["contender"]) for row in rows]
    assert cells == list(itertools.product(NAMES, (4, 4096), ("multiring", "Open MPI")))
    assert all(0 < row["sample"]["low"] <= row["sample"]["median"] <= row["sample"]["high"] for row in rows)
    assert "scatter 4 KiB: multiring " in done.stderr
    assert "| scatter |" in done.stdout


MACHINE = Machine("A Processor", 4, 16 * 2**30, "Linux 6.1", "3.11.7", {"multiring": "0.1.0"})
# Median microseconds of every contender on 4 B and on 1 MiB.
MEDIANS = {
    "multiring symmetric": (2.0, 50.0),
    "multiring": (1.0, 100.0),
    "limit": (0.5, 40.0),
    "Gloo": (100.0, 1000.0),
    "Gnu MPI": (1.5, 400.0),
}
SIZES = (4, 2**20)


def made_up(ranks: int = 4, contenders: tuple[str, ...] = tuple(MEDIANS)) -> Report:
    rows = []
    for k, size in enumerate(SIZES):
        for name in contenders:
            seconds = 1e-6 * MEDIANS[name][k]
            rows.append(Row(name, size, Sample(seconds, 0.9 * seconds, 2 * seconds, 7)))
    when = "2026-01-02T03:04:05+00:00"
    return Report(
        command="multiring bench allreduce -np 4",
        launcher="openmpi",
        machine=MACHINE,
        ranks=ranks,
        date=when,
        rows=tuple(rows),
    )


def test_what_follows_from_the_times() -> None:
    report = made_up()
    mine = report.row("multiring symmetric", 2**20)
    assert mine.algorithm_bandwidth == pytest.approx(2**20 / 50e-6)
    assert report.bus_bandwidth(mine) == pytest.approx(2**20 / 50e-6 * 1.5)
    assert made_up(ranks=1).bus_bandwidth(mine) == 0
    # A ratio above one: multiring is faster.
    assert report.ratio(mine, "Gloo") == pytest.approx(20)
    assert report.ratio(report.row("Gnu MPI", 4), "Gloo") is None
    assert report.ratio(mine, "nobody") is None
    # The limit counts from 64 KiB on, and for multiring only.
    assert report.of_limit(mine) == pytest.approx(0.8)
    assert report.of_limit(report.row("multiring", 4)) is None
    assert report.of_limit(report.row("Gloo", 2**20)) is None
    without = made_up(contenders=("multiring", "Gloo"))
    assert without.of_limit(without.row("multiring", 2**20)) is None


def test_how_busy_links_were_is_what_they_sent_over_what_they_could() -> None:
    sent = {"eth0": [1.25e6, 2.5e6], "eth1": [3.75e6, 3.75e6], "lo": [5e6, 0.0]}
    row, small = Row("multiring", 2**20, Sample(0.125, 0.1, 0.2, 7), sent), made_up().rows[0]
    report = replace(made_up(), rows=(row, small), hosts="2x1 --rate 400mbit,240mbit", left_out="No MPI")
    assert report.busy(row) == {"eth0": [0.2, 0.4], "eth1": [1.0, 1.0]}
    assert "| 20 %, 100 % |" in report.render("markdown", None)
    assert all("No MPI" in report.render(style, 40) for style in ("rich", "markdown", "compact"))


def test_sent_bytes_are_read_for_each_interface() -> None:
    text = """Inter-|   Receive                       |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:    1200      11    0    0    0     0          0         0     1200      11    0    0    0     0       0          0
  eth0:9999999999999  5    0    0    0     0          0         0      345       5    0    0    0     0       0          0
"""  # noqa: E501  (as the kernel has it)
    assert traffic.sent_bytes(text) == {"lo": 1200, "eth0": 345}
    assert "lo" in traffic.sent_bytes()


def test_what_did_not_cross_the_links_is_not_believed() -> None:
    crossing = allreduce._crossing(Emulation.parse("2x2", "1gbit"), 400)
    assert crossing is not None

    def check(**sent: list[float]) -> None:
        cases.check_crossed(Row("Somebody", 400, Sample(1.0, 1.0, 1.0, 1), sent), crossing)

    check(eth0=[400.0, 430.0], lo=[0.0, 0.0])
    check(eth0=[200.0, 220.0], eth1=[200.0, 210.0], lo=[0.0, 0.0])
    told = "Somebody sent 550 B over the links .* of 400 B, where 800 B have to cross"
    with pytest.raises(InternalError, match=told):
        check(eth0=[400.0, 150.0], lo=[900.0, 900.0])
