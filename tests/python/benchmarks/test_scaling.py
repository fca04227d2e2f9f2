"""The scaling curve: its arithmetic, and the simulation where SimGrid is."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from multiring.benchmarks.scaling import simulation
from multiring.benchmarks.scaling.machine import CONTENDERS, MACHINE, OUR_RING, OURS, is_timing_only
from multiring.benchmarks.scaling.report import efficiency, tables, write
from multiring.benchmarks.scaling.results import Results, load, save
from multiring.benchmarks.scaling.training import Profile, buckets, interpolate, parameters, step_seconds
from tests.support import REPOSITORY

PROGRAM = REPOSITORY / "build" / "scaling" / "benchmarks" / "scaling" / "simulated_allreduce"
COPYING = [name for name in CONTENDERS if is_timing_only(name, 1024)]


simulated = pytest.mark.skipif(
    shutil.which("smpirun") is None or not PROGRAM.is_file(),
    reason="SimGrid is not installed (libsimgrid-dev), or the simulation is not built (make scaling)",
)


def test_times_between_sizes_are_interpolated() -> None:
    times = {100: 1.0, 200: 3.0, 1000: 11.0}
    assert interpolate(times, 150) == 2.0
    assert interpolate(times, 1100) == 12.0
    assert interpolate(times, 0) == 0.0


def test_a_step_ends_with_what_ends_last() -> None:
    left = [(1, 0.5), (2, 0.6), (3, 1.0)]
    assert step_seconds(10.0, left, {1: 0.1, 2: 0.1, 3: 0.0}) == 10.0
    assert step_seconds(10.0, left, {1: 4.0, 2: 3.0, 3: 0.5}) == 12.5  # one after the other, from 5.0 on
    assert step_seconds(10.0, left, {1: 0.1, 2: 0.1, 3: 2.0}) == 12.0


def results_with(seconds: float) -> Results:
    ready = [1.0 - index / len(parameters()) for index in range(len(parameters()))]
    times = dict.fromkeys(simulation.SIZES, seconds)
    return Results(MACHINE, Profile(ready, "a test"), {name: {8: times} for name in CONTENDERS})


def test_buckets_hold_all_parameters_of_resnet_50() -> None:
    total = sum(nbytes for nbytes, _ in buckets(results_with(0.0).profile))
    assert 25_557_032 * 4 <= total < 25_557_032 * 4 * 1.01


def test_slower_allreduces_are_less_efficient() -> None:
    assert efficiency(results_with(0.0), OURS, 8, 220.0) == 1.0
    assert efficiency(results_with(0.01), OURS, 8, 220.0) < 1.0
    assert efficiency(results_with(0.01), OURS, 8, 220.0) > efficiency(results_with(0.01), OURS, 8, 660.0)


def test_the_report_replaces_what_was_there(tmp_path: Path) -> None:
    page, file = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text("before\n<!-- simulated: begin -->\nold\n<!-- simulated: end -->\nafter\n")
    save(results_with(0.001), file)
    write(load(file), page, tmp_path / "picture.png")
    once = page.read_text()
    assert re.fullmatch(r"before\n.*\| 8 \| 2.0 \| 2.0 \| 100 \|.*\nafter\n", once, re.DOTALL)
    assert "old" not in once
    write(load(file), page, tmp_path / "picture.png")
    assert page.read_text() == once


def test_the_page_compares_all_at_every_number_of_ranks() -> None:
    written = tables(load(REPOSITORY / "benchmarks" / "scaling" / "results.json"))
    assert "\n| 1024 |" in written
    assert "| - |" not in written


@simulated
@pytest.mark.parametrize("contender", [OURS, "ring"])
def test_simulated_times_are_above_the_limit(contender: str) -> None:
    size = 2_097_152
    found = simulation.simulate(PROGRAM, contender, 16, MACHINE, (size,))
    limit = 2 * 3 / 4 * size / (MACHINE.bytes_per_second * MACHINE.usable)
    assert limit < found[size] < 20 * limit


@simulated
def test_a_ring_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four hosts: six hops, where a pairwise exchange takes two."""
    sizes = (4096, 2_097_152)
    monkeypatch.setenv("MULTIRING_MODE", "4px4p")
    pairwise = simulation.simulate(PROGRAM, OURS, 16, MACHINE, sizes)
    ring = simulation.simulate(PROGRAM, OUR_RING, 16, MACHINE, sizes)
    assert ring[4096] - pairwise[4096] > 4 * 2 * MACHINE.latency
    limit = 2 * 3 / 4 * sizes[1] / (MACHINE.bytes_per_second * MACHINE.usable)
    assert limit < ring[sizes[1]] < 20 * limit


@simulated
def test_the_plan_is_chosen_by_the_costs_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By those of an unknown network of 20 us it would be the pairwise exchange."""
    chosen = simulation.simulate(PROGRAM, OURS, 16, MACHINE, (262_144,))
    monkeypatch.setenv("MULTIRING_MODE", "4px4p")
    assert chosen[262_144] < simulation.simulate(PROGRAM, OURS, 16, MACHINE, (262_144,))[262_144]


@simulated
@pytest.mark.parametrize("contender", COPYING)
def test_messages_without_data_take_as_long(contender: str) -> None:
    sizes = (262_144, 2_097_152)
    carried = simulation.simulate(PROGRAM, contender, 16, MACHINE, sizes, timing_only=False)
    assert simulation.simulate(PROGRAM, contender, 16, MACHINE, sizes, timing_only=True) == carried
