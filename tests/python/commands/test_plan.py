"""`multiring plan`, and the plans of the native module."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from multiring import _core as native
from multiring import cli, units
from multiring.errors import UsageError
from tests.support import REPOSITORY, refused

MIB = 1 << 20


def plan_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What `multiring plan --json` prints."""
    assert cli.main(["plan", "--json", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_the_documentation_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = (REPOSITORY / "docs" / "plans.md").read_text().splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("    multiring plan "))
    (end,) = (number for number, line in enumerate(lines) if line.startswith("    |  reduce-scatter"))
    shown = text_of(capsys, *lines[start].split()[2:])
    assert [line[4:] for line in lines[start + 2 : end + 1]] == shown.splitlines()


def test_json_holds_every_group_and_link(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_of(capsys, "--ranks-per-host", "4", "--hosts", "8", "--bytes", "100M", "--mode", "4px8p")
    assert found["hosts"] == [list(range(4 * host, 4 * host + 4)) for host in range(8)]
    assert (found["bytes"], found["count"], found["mode"]) == (100 * MIB, 25 * MIB, "4px8p")
    assert [step["phase"] for step in found["steps"]] == [
        "reduce-scatter",
        "reduce-scatter",
        "all-gather",
        "all-gather",
    ]
    assert [group["ranks"] for group in found["steps"][1]["groups"]] == [
        list(range(local, 32, 4)) for local in range(4)
    ]
    assert {link["sent"] for link in found["links"]} == {100 * MIB * 2 * 7 // 8}
    assert {rank["sent"] for rank in found["ranks"]} == {25 * MIB * 2 * 7 // 8}
    assert found["limit_seconds"] == pytest.approx(100 * MIB * 1.75 / 1.25e9)
    assert 0.9 < found["share_of_limit"] <= 1.0
    assert found["seconds"] == pytest.approx(found["limit_seconds"] / found["share_of_limit"])


def test_text_says_what_the_plan_does_and_takes(capsys: pytest.CaptureFixture[str]) -> None:
    shown = text_of(capsys, "--ranks-per-host", "2", "--hosts", "3", "--bytes", "100M", "--rate", "1gbit")
    for words in (
        "3 hosts of 2 ranks, interfaces: 1 Gbit/s, 20 us",
        "allreduce of 100 MiB (26,214,400 x float32), mode 2px3p",
        "a host's sum travels as it is",
        "across hosts 1  reduce-scatter  pairwise exchange",
        "interface 0 (1 Gbit/s) of a host sends up to 133.3 MiB",
        "bytes over bandwidth",
    ):
        assert words in shown
    assert shown.endswith(
        "host 0   0   1\n"
        "         |   |\n"
        "host 1   2   3\n"
        "         |   |\n"
        "host 2   4   5\n"
        "\n"
        "|  reduce-scatter by pairwise exchange among 3 hosts, 2 at once, and all-gather back\n"
    )


@pytest.mark.parametrize(
    ("layout", "ranks"), [("2x4", [4, 4]), ("1x4", [4]), ("3", [1, 1, 1]), ("2+1", [2, 1])]
)
def test_hosts_and_the_ranks_of_each(
    capsys: pytest.CaptureFixture[str], layout: str, ranks: list[int]
) -> None:
    assert [len(host) for host in plan_of(capsys, "--hosts", layout)["hosts"]] == ranks


def test_hosts_that_differ_are_drawn_with_the_owners_of_each_share(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = text_of(capsys, "--hosts", "1+3", "--bytes", "100M")
    assert "host 0   0   0   0\n         |   |   |\nhost 1   1   2   3\n" in shown
    assert "up to 2 sums of parts" in shown
    found = plan_of(capsys, "--layout", "2+1+2", "--bytes", "4K")
    assert found["hosts"] == [[0, 1], [2], [3, 4]]
    assert not found["aligned"]


def test_more_dimensions_are_joined_by_other_marks(capsys: pytest.CaptureFixture[str]) -> None:
    shown = text_of(capsys, "--ranks-per-host", "1", "--hosts", "4", "--mode", "1x2x2d", "--bytes", "1M")
    assert "host 0   0\n         |\nhost 1   1\n         :\nhost 2   2\n         |\nhost 3   3\n" in shown
    assert ":  allreduce by recursive doubling among 2 hosts, 2 at once" in shown


def test_pictures_of_many_hosts_are_cut_in_the_middle(capsys: pytest.CaptureFixture[str]) -> None:
    shown = text_of(capsys, "--ranks-per-host", "16", "--hosts", "64", "--mode", "16px64p")
    assert "\n...\n" in shown.replace(" ", "")
    assert "host 63" in shown
    assert "host 40" not in shown
    assert max(map(len, shown.splitlines())) <= 110


def test_one_host_is_a_line_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    shown = text_of(capsys, "--ranks-per-host", "3", "--hosts", "1", "--bytes", "1M")
    assert shown.endswith("host 0  0  1  2\n")
    assert "order      canonical\n" in shown


def test_stripes_follow_the_speeds_of_interfaces(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--hosts", "4", "--ranks-per-host", "2", "--rate", "500mbit,125mbit", "--bytes", "64M")
    links = plan_of(capsys, *arguments)["links"]
    for fast, slow in zip(links[::2], links[1::2], strict=True):
        assert slow["sent"] / (slow["sent"] + fast["sent"]) == pytest.approx(0.2, abs=1e-4)
    assert "20 %  125 Mbit/s" in text_of(capsys, *arguments)
    assert len(plan_of(capsys, "--hosts", "2", "--interfaces", "3", "--bytes", "64M")["channels"]) == 3


def test_round_robin_costs_bytes_unless_any_order_will_do(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--hosts", "2", "--ranks-per-host", "4", "--placement", "round-robin", "--bytes", "16M")
    canonical = plan_of(capsys, *arguments, "--mode", "4px2p")
    assert canonical["parts_across_hosts"] == 4
    assert canonical["links"][0]["sent"] == 8 * MIB * (4 + 1)
    free = plan_of(capsys, *arguments, "--mode", "4px2p", "--no-reproducible")
    assert free["links"][0]["sent"] == 8 * MIB * (1 + 1)
    assert not free["reproducible"]


def test_half_precision_is_summed_in_float32_on_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--hosts", "2", "--ranks-per-host", "2", "--mode", "2px2p", "--bytes", "64M")
    shown = text_of(capsys, *arguments, "--dtype", "bfloat16")
    assert "partial sums of bfloat16 travel as float32" in shown
    assert "of a host sends up to 96 MiB" in shown, "a half in four bytes each, and a half in two"
    assert "travel as float32" not in text_of(capsys, *arguments)
    alone = text_of(capsys, "--hosts", "4", "--mode", "1px4p", "--dtype", "bfloat16", "--bytes", "64M")
    assert "of a host sends up to 96 MiB" in alone
    assert "travel as float32" not in alone, "contributions of one rank need not be widened"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks-per-host", "4", "--hosts", "12", "--mode", "4x8x2"), "for 64 ranks, but there are 48"),
        (("--ranks-per-host", "4", "--hosts", "2", "--mode", "8"), "the first dimension must be 4"),
        (("--hosts", "4", "--mode", "1x4r"), "a ring of 4 ranks adds in the order of the ring"),
        (("--hosts", "1+3", "--mode", "2x2"), "as many ranks on every host"),
        (("--hosts", "4", "--mode", "4q"), "written like 4x8x2"),
        (("--hosts", "1+3", "--ranks-per-host", "2"), "leave --ranks-per-host out"),
        (("--rate", "1gbit,2gbit", "--interfaces", "3"), "the speeds of 2 interfaces"),
        (("--hosts", "1000000", "--ranks-per-host", "8"), "at most 16384 ranks here, not 8000000"),
        (("--hosts", "16", "--links", "10gbit:20us,1gbit:1ms"), "2 links, but mode 1px16p has 1"),
        (("--bytes", "99999999T"), "up to 32 TiB"),
        (("--segment", "99999999T"), "up to 32 TiB"),
    ],
)
def test_what_does_not_fit_is_told_with_the_numbers(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused("plan", *arguments)


@pytest.mark.parametrize(
    "arguments",
    [("--rate", "10"), ("--rate", "0gbit"), ("--bytes", "-1"), ("--latency", "20"), ("--hosts", "0"),
     ("--hosts", "1++2"), ("--dtype", "complex64"), ("--links", "1gbit:")],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(arguments: tuple[str, ...]) -> None:
    assert arguments[0] in refused("plan", *arguments)


@pytest.mark.parametrize("nbytes", ["0", "1", "3"])
def test_next_to_nothing_to_reduce(capsys: pytest.CaptureFixture[str], nbytes: str) -> None:
    found = plan_of(capsys, "--hosts", "2+3", "--bytes", nbytes)
    assert found["count"] == (0 if nbytes == "0" else 1)
    assert bool(found["steps"]) == (nbytes != "0")
    text_of(capsys, "--hosts", "2+3", "--bytes", nbytes)


def test_units_are_read_and_written() -> None:
    assert [units.size(text) for text in ("4096", "64K", "64KiB", "100m", "1GiB")] == [
        4096, 1 << 16, 1 << 16, 100 * MIB, 1 << 30
    ]  # fmt: skip
    assert [units.rate(text) for text in ("10gbit", "500 mbit", "2.5Gbit/s")] == [1.25e9, 62.5e6, 312.5e6]
    assert units.seconds("20us") == pytest.approx(20e-6)
    for text in ("20us", "1.5ms", "2s", "3ns"):
        assert units.seconds(units.seconds_text(units.seconds(text))) == pytest.approx(units.seconds(text))
    for text in ("10gbit", "500mbit", "1kbit", "2tbit", "7bit"):
        assert units.rate(units.rate_text(units.rate(text))) == pytest.approx(units.rate(text))
    assert (units.size_text(0), units.size_text(1 << 30), units.seconds_text(0.0)) == ("0 B", "1 GiB", "0 s")
    with pytest.raises(argparse.ArgumentTypeError, match="is not a rate"):
        units.rate("10gbps")


def test_links_are_fitted_to_measurements() -> None:
    link = native.fit_link([(size, 30e-6 + size / 1e9) for size in (64, 4096, 1 << 20, 1 << 24)])
    assert link.latency == pytest.approx(30e-6)
    assert link.bytes_per_second == pytest.approx(1e9)
    with pytest.raises(UsageError, match="at least two sizes"):
        native.fit_link([(64, 1e-6)])


def test_the_native_module_names_what_it_does_not_know() -> None:
    request = native.PlanRequest()
    request.dtype = "complex64"
    cluster = native.Cluster([1, 1], [native.Interface(1e9, 1e-5)])
    with pytest.raises(UsageError, match="there is no dtype 'complex64'"):
        native.Plan(cluster, request)
    request.dtype, request.count = "bfloat16", 1 << 10
    plan = native.Plan(cluster, request)
    assert (plan.element_bytes, plan.partial_bytes, plan.segments) == (2, 4, 1)
    with pytest.raises(UsageError, match="the plan has 2 steps"):
        plan.traffic(2)


def test_a_faster_link_of_a_dimension_raises_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_of(capsys, "--hosts", "4", "--links", "100gbit:5us", "--bytes", "100M")
    assert found["limit_seconds"] == pytest.approx(100 * MIB * 1.5 / 12.5e9)
    assert found["share_of_limit"] < 1.0
