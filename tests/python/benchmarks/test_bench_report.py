"""What follows from the times of `multiring bench allreduce`: ratios, files, tables and the picture."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from multiring.benchmarks.collectives import allreduce, cases, table
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


def test_bandwidths_are_those_of_the_definitions() -> None:
    report = made_up()
    mine = row(report, "multiring symmetric", 2**20)
    assert mine.algorithm_bandwidth == pytest.approx(2**20 / 50e-6)
    assert report.bus_bandwidth(mine) == pytest.approx(2**20 / 50e-6 * 1.5)
    assert made_up(ranks=2).bus_bandwidth(mine) == pytest.approx(mine.algorithm_bandwidth)
    assert made_up(ranks=1).bus_bandwidth(mine) == 0


def test_a_ratio_above_one_means_that_multiring_is_faster() -> None:
    report = made_up()
    assert report.peers == ["Gloo", "Gnu MPI"]
    assert report.ratio(row(report, "multiring symmetric", 4), "Gnu MPI") == pytest.approx(0.75)
    assert report.ratio(row(report, "multiring", 4), "Gnu MPI") == pytest.approx(1.5)
    assert report.ratio(row(report, "multiring symmetric", 2**20), "Gloo") == pytest.approx(20)
    for name in ("limit", "Gloo", "Gnu MPI"):
        assert report.ratio(row(report, name, 4), "Gloo") is None
    assert report.ratio(row(report, "multiring", 4), "nobody") is None


def test_the_limit_counts_from_64_kib_on_and_for_multiring_only() -> None:
    report = made_up()
    assert report.of_limit(row(report, "multiring symmetric", 2**20)) == pytest.approx(0.8)
    assert report.of_limit(row(report, "multiring", 2**20)) == pytest.approx(0.4)
    assert report.of_limit(row(report, "multiring", 4)) is None
    assert report.of_limit(row(report, "Gloo", 2**20)) is None
    assert report.of_limit(row(report, "limit", 2**20)) is None
    without = made_up(contenders=("multiring", "Gloo"))
    assert without.of_limit(row(without, "multiring", 2**20)) is None


def test_json_keeps_everything_and_adds_what_follows() -> None:
    report = made_up()
    text = report.to_json()
    assert Report.from_json(text) == report
    first = json.loads(text)["rows"][0]
    assert first["contender"] == "multiring symmetric"
    assert first["derived"]["ratios"] == {"Gloo": 50.0, "Gnu MPI": 0.75}
    assert first["derived"]["of_limit"] is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "another"}', '{"kind": "multiring bench allreduce"}']
)
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(DataError, match="no results of `multiring bench allreduce`"):
        Report.from_json(text)


def test_the_machine_is_described() -> None:
    here = Machine.here(2, mpi=False)
    assert here.cores == 2
    assert here.processor
    assert here.memory is not None
    assert {"multiring", "numpy"} <= here.versions.keys()


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


@pytest.mark.parametrize(
    ("size", "text"),
    [(4, "4 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**20, "1 MiB"), (2**28, "256 MiB"), (2**31, "2 GiB")],
)
def test_sizes_have_the_unit_that_suits_them(size: int, text: str) -> None:
    assert table.size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.51e-6, "0.510"),
        (1.234e-6, "1.23"),
        (99.96e-6, "100.0"),
        (0.123456, "123456"),
        (1e-12, "0.00000100"),
    ],
)
def test_times_have_three_digits_that_count(seconds: float, text: str) -> None:
    assert table.time_text(seconds) == text


def markdown_rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_markdown_has_a_line_for_each_size_and_contender() -> None:
    report = made_up()
    header, rule, *rows = markdown_rows(report.render("markdown", None))
    assert header == [
        *("size", "library", "latency us [10 %..90 %]", "algorithm GB/s", "bus GB/s"),
        *("x Gloo", "x Gnu MPI", "of limit"),
    ]
    assert rule == ["--:", ":--", *["--:"] * 6]
    assert len(rows) == 10
    assert rows[5] == [
        *("1 MiB", "multiring symmetric", "50.0 [45.0..100]", "21.0", "31.5", "20.0", "8.00", "80 %"),
    ]
    assert rows[0][5:] == ["50.0", "0.750", ""]
    assert rows[8][5:] == ["", "", ""]
    last = report.render("markdown", None).splitlines()[-1]
    assert "`multiring bench allreduce -np 4`" in last
    assert "4 ranks on A Processor, 4 processors, 16 GiB" in last


def test_the_compact_table_has_a_line_for_each_size() -> None:
    header, _, *rows = markdown_rows(made_up().render("compact", None))
    assert header == [
        *("size", "multiring symmetric us", "GB/s", "of limit", "multiring us", "GB/s"),
        *("Gloo us", "GB/s", "Gnu MPI us", "GB/s", "best x Gloo", "best x Gnu MPI"),
    ]
    assert [cells[0] for cells in rows] == ["4 B", "1 MiB"]
    assert rows[1][1:6] == ["50.0", "21.0", "80 %", "100", "10.5"]
    assert rows[0][-2:] == ["100", "1.50"]  # those of the faster one of the two
    assert rows[1][-2:] == ["20.0", "8.00"]


def test_without_peers_there_are_no_columns_for_them() -> None:
    report = made_up(contenders=("multiring symmetric", "multiring", "limit"))
    for style in ("rich", "markdown", "compact"):
        text = report.render(style, None)
        assert "Gloo" not in text
        assert "x " not in text.splitlines()[0]


def test_what_was_left_out_is_told_under_the_table() -> None:
    report = replace(made_up(), left_out="Some MPI was left out")
    assert report.render("rich", None).splitlines()[-1] == "Some MPI was left out"
    for style in ("markdown", "compact"):
        assert report.render(style, None).endswith(". Some MPI was left out.")
    assert Report.from_json(report.to_json()) == report


def test_the_table_in_a_file_is_plain_and_whole() -> None:
    text = made_up().render("rich", None)
    assert "\x1b" not in text
    assert "…" not in text
    for cell in ("multiring symmetric", "x Gnu MPI", "50.0 [45.0..100]", "80 %"):
        assert cell in text
    lines = [line for line in text.splitlines() if line[0] in "╭│├╰"]
    assert len({len(line) for line in lines}) == 1
    assert len([line for line in lines if line[0] == "├"]) == 2  # under the header, and between the sizes


def test_a_terminal_gets_colours_and_nothing_is_cut_where_it_is_narrow() -> None:
    text = made_up().render("rich", 40)
    assert "\x1b[" in text
    assert "…" not in text
    assert "multiring symmetric" in text


@pytest.mark.parametrize("contenders", [tuple(MEDIANS), ("multiring",), ("limit", *"abcde")])
def test_the_picture_is_a_png(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contenders: tuple[str, ...]
) -> None:
    for name in contenders:
        monkeypatch.setitem(MEDIANS, name, MEDIANS.get(name, (3.0, 300.0)))
    path = tmp_path / "picture.tmp"
    made_up(contenders=contenders).draw(path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.size == (1560, 672)
        colours = image.convert("RGB").getcolors(1 << 20)
    assert colours is not None
    assert len(colours) > 50


# ---- Options.
