"""`multiring plan`, and the plans of the native module."""

from __future__ import annotations

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
    assert [step["phase"] for step in found["steps"]] == ["reduce-scatter"] * 2 + ["all-gather"] * 2
    groups = [group["ranks"] for group in found["steps"][1]["groups"]]
    assert groups == [list(range(local, 32, 4)) for local in range(4)]
    assert {link["sent"] for link in found["links"]} == {100 * MIB * 2 * 7 // 8}
    assert {rank["sent"] for rank in found["ranks"]} == {25 * MIB * 2 * 7 // 8}
    assert found["limit_seconds"] == pytest.approx(100 * MIB * 1.75 / 1.25e9)
    assert 0.9 < found["share_of_limit"] <= 1.0
    assert found["seconds"] == pytest.approx(found["limit_seconds"] / found["share_of_limit"])


def test_hosts_are_drawn_and_joined_by_marks(capsys: pytest.CaptureFixture[str]) -> None:
    shown = text_of(capsys, "--ranks-per-host", "1", "--hosts", "4", "--mode", "1x2x2d", "--bytes", "1M")
    assert "host 0   0\n         |\nhost 1   1\n         :\nhost 2   2\n         |\nhost 3   3\n" in shown
    shown = text_of(capsys, "--ranks-per-host", "16", "--hosts", "64", "--mode", "16px64p")
    assert "host 63" in shown
    assert "host 40" not in shown, "many hosts are cut in the middle"
    assert "\nstaged " in text_of(capsys, "--ranks-per-host", "3", "--hosts", "1"), "no plan: its line"
    shown = text_of(capsys, "--hosts", "1+3", "--bytes", "100M")
    assert "host 0   0   0   0\n         |   |   |\nhost 1   1   2   3\n" in shown, "the owners of shares"
    found = plan_of(capsys, "--layout", "2+1+2", "--bytes", "4M")
    assert found["hosts"] == [[0, 1], [2], [3, 4]]
    assert not found["aligned"]
    assert plan_of(capsys, "--hosts", "2+3", "--bytes", "0", "--mode", "3x2")["steps"] == []
    assert [len(host) for host in plan_of(capsys, "--hosts", "2x4")["hosts"]] == [4, 4]


WRONG = {
    "--ranks-per-host 4 --hosts 12 --mode 4x8x2": "for 64 ranks, but there are 48",
    "--hosts 1+3 --ranks-per-host 2": "leave --ranks-per-host out",
    "--rate 1gbit,2gbit --interfaces 3": "the speeds of 2 interfaces",
    "--hosts 1000000 --ranks-per-host 8": "at most 4096 ranks here, not 8000000",
    "--hosts 16 --links 10gbit:20us,1gbit:1ms": "2 links, but mode 1px16p has 1",
    "--bytes 99999999T": "up to 32 TiB",
    "--hosts 4 --host-links ring --mode 1x4d": "does not run: host 0 has no link to host 2",
    "--rate 10": "argument --rate: ",
    "--hosts 1++2": "argument --hosts/--layout: ",
    "--dtype complex256": "argument --dtype: ",
    "--links 1gbit:": "argument --links: ",
}


def test_what_does_not_fit_is_told_with_the_numbers() -> None:
    for words, told in WRONG.items():
        assert told in refused("plan", *words.split())


def test_units_are_read_and_written() -> None:
    sizes = {"4096": 4096, "64K": 1 << 16, "64KiB": 1 << 16, "100m": 100 * MIB, "1GiB": 1 << 30}
    assert {text: units.size(text) for text in sizes} == sizes
    assert [units.rate(text) for text in ("10gbit", "500 mbit", "2.5Gbit/s")] == [1.25e9, 62.5e6, 312.5e6]
    assert units.seconds("20us") == pytest.approx(20e-6)
    for text in ("20us", "1.5ms", "2s", "3ns"):
        assert units.seconds(units.seconds_text(units.seconds(text))) == pytest.approx(units.seconds(text))
    for text in ("10gbit", "500mbit", "1kbit", "2tbit", "7bit"):
        assert units.rate(units.rate_text(units.rate(text))) == pytest.approx(units.rate(text))
    assert (units.size_text(0), units.size_text(1 << 30), units.seconds_text(0.0)) == ("0 B", "1 GiB", "0 s")


def test_options_change_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ("--hosts", "2", "--ranks-per-host", "4", "--bytes", "16M", "--mode", "4px2p")
    assert plan_of(capsys, *cluster)["parts_across_hosts"] == 1
    other = plan_of(capsys, *cluster, "--placement", "round-robin", "--rate", "500mbit,125mbit")
    assert (other["parts_across_hosts"], len(other["channels"])) == (4, 2)
    assert plan_of(capsys, *cluster, "--order", "any")["order"] == "any"
    shown = text_of(capsys, *cluster, "--dtype", "bfloat16", "--interfaces", "3")
    assert "partial sums of bfloat16 travel as float32" in shown


def test_the_native_module_names_what_it_does_not_know() -> None:
    request = native.PlanRequest()
    request.dtype, request.count = "complex256", 1 << 10
    cluster = native.Cluster([1, 1], [native.Interface(1e9, 1e-5)])
    with pytest.raises(UsageError, match="there is no dtype 'complex256'"):
        native.Plan(cluster, request)
    request.dtype = "bfloat16"
    with pytest.raises(UsageError, match="the plan has 2 steps"):
        native.Plan(cluster, request).traffic(2)
