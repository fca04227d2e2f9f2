"""What follows from the times of `multiring bench allreduce`: ratios, files, tables and the picture."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from multiring.benchmarks.collectives import allreduce, cases
from multiring.benchmarks.collectives.results import Report, Row
from multiring.benchmarks.emulation import traffic
from multiring.benchmarks.emulation.start import Emulation
from multiring.benchmarks.machine import Machine
from multiring.benchmarks.measure import Sample
from multiring.errors import InternalError
from multiring.models.errors import DataError

MACHINE = Machine(
    "A Processor", 4, 16 * 2**30, "Linux 6.1", "3.11.7", {"multiring": "0.1.0", "Gnu MPI": "1.2"}
)
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
    rows = [
        Row(
            name, size, Sample(1e-6 * MEDIANS[name][k], 0.9e-6 * MEDIANS[name][k], 2e-6 * MEDIANS[name][k], 7)
        )
        for k, size in enumerate(SIZES)
        for name in contenders
    ]
    when = "2026-01-02T03:04:05+00:00"
    return Report("multiring bench allreduce -np 4", "openmpi", MACHINE, ranks, when, tuple(rows))


def row(report: Report, contender: str, size: int) -> Row:
    found = report.row(contender, size)
    assert found is not None
    return found


def test_what_follows_from_the_times() -> None:
    report = made_up()
    mine = row(report, "multiring symmetric", 2**20)
    assert mine.algorithm_bandwidth == pytest.approx(2**20 / 50e-6)
    assert report.bus_bandwidth(mine) == pytest.approx(2**20 / 50e-6 * 1.5)
    assert made_up(ranks=1).bus_bandwidth(mine) == 0
    # A ratio above one: multiring is faster.
    assert report.ratio(mine, "Gloo") == pytest.approx(20)
    assert report.ratio(row(report, "Gnu MPI", 4), "Gloo") is None
    assert report.ratio(mine, "nobody") is None
    # The limit counts from 64 KiB on, and for multiring only.
    assert report.of_limit(mine) == pytest.approx(0.8)
    assert report.of_limit(row(report, "multiring", 4)) is None
    assert report.of_limit(row(report, "Gloo", 2**20)) is None
    without = made_up(contenders=("multiring", "Gloo"))
    assert without.of_limit(row(without, "multiring", 2**20)) is None


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "another"}', '{"kind": "multiring bench allreduce"}'])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(DataError, match="no results of `multiring bench allreduce`"):
        Report.from_json(text)


def test_how_busy_links_were_is_what_they_sent_over_what_they_could() -> None:
    sent = {"eth0": [1.25e6, 2.5e6], "eth1": [3.75e6, 3.75e6], "lo": [5e6, 0.0]}
    row = Row("multiring", 2**20, Sample(0.125, 0.1, 0.2, 7), sent)
    report = replace(made_up(), rows=(row, Row("limit", 2**20, Sample(0.1, 0.1, 0.1, 0))))
    report = replace(report, hosts="2x1 --rate 400mbit,240mbit")
    assert report.busy(row) == {"eth0": [0.2, 0.4], "eth1": [1.0, 1.0]}
    assert Report.from_json(report.to_json()) == report
    header, _, first, limit = markdown_rows(report.render("markdown", None))
    assert (header[-1], first[-1], limit[-1]) == ("links busy", "20 %, 100 %", "")


def test_sent_bytes_are_read_for_each_interface() -> None:
    text = """Inter-|   Receive                       |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:    1200      11    0    0    0     0          0         0     1200      11    0    0    0     0       0          0
  eth0:9999999999999  5    0    0    0     0          0         0      345       5    0    0    0     0       0          0
"""  # noqa: E501  (as the kernel has it)
    assert traffic.sent_bytes(text) == {"lo": 1200, "eth0": 345}
    assert "lo" in traffic.sent_bytes()


@pytest.mark.parametrize(
    ("sent", "right"),
    [
        ({"eth0": [400.0, 430.0], "lo": [0.0, 0.0]}, True),
        ({"eth0": [200.0, 220.0], "eth1": [200.0, 210.0], "lo": [0.0, 0.0]}, True),
        ({"eth0": [400.0, 150.0], "lo": [900.0, 900.0]}, False),
    ],
)
def test_what_did_not_cross_the_links_is_not_believed(sent: traffic.Sent, right: bool) -> None:
    crossing = allreduce._crossing(Emulation.parse("2x2", "1gbit"), 400)
    assert crossing is not None
    measured = cases.Measured("allreduce", "Somebody", 400, Sample(1.0, 1.0, 1.0, 1), sent)
    with (
        contextlib.nullcontext()
        if right
        else pytest.raises(
            InternalError, match="Somebody sent 550 B over the links .* of 400 B, where 800 B have to cross"
        )
    ):
        cases.check_crossed(measured, crossing)


# ---- Tables and the picture.


@pytest.mark.parametrize("style", ["rich", "markdown", "compact"])
def test_tables_show_every_contender_and_what_was_left_out(style: str) -> None:
    report = replace(made_up(), left_out="Some MPI was left out")
    for width in (None, 40):  # a file; a narrow terminal
        text = report.render(style, width)
        for told in ("multiring symmetric", "Gloo", "Gnu MPI", "Some MPI was left out", "20.0", "80 %"):
            assert told in text
        assert ("\x1b" in text) == (style == "rich" and width is not None)
    assert "Gloo" not in made_up(contenders=("multiring", "limit")).render(style, None)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    for contenders in (tuple(MEDIANS), ("multiring",)):
        made_up(contenders=contenders).draw(tmp_path / "picture.tmp")


def markdown_rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# ---- Options.
