"""`multiring bench collectives`: what is right and what has to cross, options, tables, and real runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from multiring import Communicator, InternalError
from multiring.benchmarks.collectives import cases
from multiring.benchmarks.collectives.kinds import COLLECTIVES, ROOT, Blocks, Buffers
from multiring.benchmarks.collectives.libraries import MultiringCollectives, OneCollective
from multiring.benchmarks.collectives.report import CollectiveRow, CollectivesReport
from multiring.benchmarks.collectives.results import Report
from multiring.benchmarks.contenders import Call, FloatArray
from multiring.benchmarks.emulation.hosts import why_not
from multiring.benchmarks.emulation.start import Emulation
from multiring.benchmarks.measure import Meeting, Pace, Sample, measure
from multiring.models.errors import DataError
from tests.python.benchmarks.test_bench import measured, parse
from tests.python.benchmarks.test_bench_report import MACHINE
from tests.rank_pool import RankPool, RanksFailed
from tests.support import refused

NAMES = ["broadcast", "allgather", "reduce_scatter", "alltoall", "scatter", "gather"]
COUNT = 5  # elements of a block
MIB = 2**20


def run_bench(*words: str) -> tuple[str, str, CollectivesReport]:
    """Runs it to its end: what it prints, what it tells meanwhile, and what it writes."""
    done, files = measured(*words, "--format", "markdown", benchmark="collectives")
    return done.stdout, done.stderr, CollectivesReport.from_json(files["r.json"].decode())


# ---- What is right.


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


@pytest.mark.parametrize("name", NAMES)
def test_a_library_may_fill_the_array_that_it_is_given(name: str) -> None:
    everyone = written(name, 2, 1)
    right = [result_of(name, everyone, rank) for rank in range(2)]
    for rank, buffers in enumerate(everyone):
        blocks, result = Blocks(COLLECTIVES[name], rank, 2), right[rank]
        if result is None:
            continue
        if rank != ROOT or name != "broadcast":
            assert blocks.wrong(buffers, None, 1) != ""
        buffers.out[:] = result
        assert blocks.wrong(buffers, None, 1) == ""


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
    with pytest.raises(RanksFailed) as caught:
        ranks(2).run(measure_allgather, True)
    assert sorted(caught.value.errors) == [0, 1]
    for rank, error in caught.value.errors.items():
        assert isinstance(error, InternalError)
        assert f"Forgetful on rank {rank}: block 0 of allgather is 1.0, 1.0, 1.0 where 2 is right" in str(
            error
        )


# ---- What has to cross.


@pytest.mark.parametrize(
    ("name", "busiest", "together"),
    [
        ("broadcast", 1, 3),
        ("allgather", 3 / 4, 3),
        ("reduce_scatter", 3 / 4, 3),
        ("alltoall", 2 * 3 / 4, 6),
        ("scatter", 3 / 4, 3 / 4),
        ("gather", 3 / 4, 3 / 4),
    ],
)
def test_the_limit_is_what_the_busiest_link_has_to_carry(name: str, busiest: float, together: float) -> None:
    crossing = COLLECTIVES[name].crossing_of(Emulation.parse("4x2", "1gbit"), MIB)
    assert crossing == cases.Crossing(busiest * MIB, together * MIB)


# ---- What is shown.


def made_up() -> CollectivesReport:
    rows = [
        CollectiveRow(name, size, Sample(time, time, time, 7), collective=collective)
        for collective, factor in (("alltoall", 1), ("broadcast", 4))
        for size in (4096, MIB)
        for name, time in (("multiring", 1e-6 * factor), ("Gloo", 2e-3), ("limit", 0.5e-6))
    ]
    when = "2026-01-02T03:04:05+00:00"
    return CollectivesReport(
        "multiring bench collectives", "multiring", MACHINE, 4, when, tuple(rows), "2x2 --rate 1gbit"
    )


def test_each_collective_is_shown(tmp_path: Path) -> None:
    report = made_up()
    for style in ("rich", "markdown", "compact"):
        text = report.render(style, None)
        assert all(told in text for told in ("alltoall", "broadcast", "50 %", "2000"))
        rows = tuple(row for row in report.rows if row.contender != "limit")
        assert "limit" not in replace(report, rows=rows, hosts="").render(style, None)
    with pytest.raises(DataError, match="no results of `multiring bench allreduce`"):
        Report.from_json(report.to_json())
    report.draw(tmp_path / "picture")


# ---- Options.


def test_options_are_understood() -> None:
    options = parse(benchmark="collectives")
    assert options.collectives == NAMES == list(COLLECTIVES)
    assert options.sizes == [4 * 2**10, 256 * 2**10, 4 * MIB, 16 * MIB]
    assert (options.ranks, options.peers, options.seconds) == (None, None, 0.5)
    words = ["--collectives", "gather, alltoall,gather", "--sizes=4,1K", "--peers", "none"]
    options = parse(*words, benchmark="collectives")
    assert options.collectives == ["gather", "alltoall"]
    assert (options.sizes, options.peers) == ([4, 1024], [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--collectives", "allreduce"],
            "there is no collective 'allreduce' here: known are broadcast, allg",
        ),
        (["--mpich", "x"], "unrecognized arguments: --mpich"),
    ],
)
def test_wrong_options_are_told(words: list[str], message: str) -> None:
    assert message in refused("bench", "collectives", *words)


# ---- Real runs.


def test_a_run_measures_all_collectives_beside_a_peer() -> None:
    # With three ranks the array is not of equal blocks, and becomes a little larger.
    words = ["-np", "3", "--sizes", "4,4KiB", "--peers", "mpi", "--seconds", "0.01"]
    stdout, stderr, report = run_bench(*words)
    assert stdout == report.render("markdown", None) + "\n"
    assert report.what == ", ".join(NAMES)
    assert (report.ranks, report.sizes, report.contenders) == (3, [4, 4096], ["multiring", "Open MPI"])
    assert len(report.rows) == len(NAMES) * 2 * 2
    assert all(0 < row.sample.low <= row.sample.median <= row.sample.high for row in report.rows)
    assert "scatter 4 KiB: multiring " in stderr


def test_emulated_hosts_show_the_limit_and_how_busy_links_were() -> None:
    if reason := why_not():
        pytest.skip(reason)
    words = ["--emulate", "2x2", "--rate", "400mbit", "--sizes", "64KiB", "--seconds", "0.01"]
    _, _, report = run_bench(*words, "--peers", "gloo")
    assert report.hosts == "2x2 --rate 400mbit"
    assert report.contenders == ["multiring", "Gloo", "limit"]
    seconds = {"broadcast": 1, "alltoall": 1} | dict.fromkeys(NAMES[1:3] + NAMES[4:], 0.5)
    for name, part in zip(NAMES, report.parts(), strict=True):
        mine, _, limit = part.rows
        assert limit.sample.median == pytest.approx(seconds[name] * 64 * 1024 / 50e6)
        assert sum(mine.sent["eth0"]) >= seconds[name] * 64 * 1024
        assert part.of_limit(mine) == limit.sample.median / mine.sample.median
