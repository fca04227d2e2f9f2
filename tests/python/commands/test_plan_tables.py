"""The tables of algorithms in the documentation are what is printed: a change of the cost model or of an
algorithm shows there (python ci/update_tables.py)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ci.update_tables import LETTERS, PAGE, blocks, printed, shown, with_letters
from multiring import cli
from tests.support import refused


def test_the_documentation_shows_what_is_printed() -> None:
    found = blocks(PAGE.read_text() + "\n")
    assert len(found) == 23
    for command, block in found:
        assert block == shown(command)


def test_the_documentation_has_the_letters_of_all_algorithms() -> None:
    for page in LETTERS:
        assert page.read_text() == with_letters(page)


def test_rounds_cross_the_slowest_link() -> None:
    def rounds(*arguments: str) -> dict[str, Any]:
        rows = json.loads(printed("--hosts", "4x2", "--bytes", "64K", "--json", *arguments))["algorithms"]
        return next(row for row in rows if row["name"] == "rounds")

    slow = rounds("--rate", "1gbit", "--latency", "500us")
    assert rounds("--links", "1gbit:500us")["seconds"] == slow["seconds"]
    assert slow["seconds"] > 500e-6 + 2 * 3 * (64 << 10) / 125e6, "of two ranks, to three hosts"


def test_json_has_the_same_rows() -> None:
    found = json.loads(printed("--hosts", "4", "--bytes", "64K", "--json"))["algorithms"]
    assert [row["name"] for row in found if row.get("is_chosen")] == ["1px4p"]
    seconds = [row["seconds"] for row in found if "seconds" in row]
    assert seconds == sorted(seconds)
    assert found[-1]["name"] == "1px4r"
    assert "--order any" in found[-1]["excluded"]


def test_one_host_has_algorithms_of_its_own() -> None:
    """Small arrays in rounds; from some size on slices, where they lie if that memory is shared."""

    def rows(nbytes: str, *arguments: str) -> dict[str, dict[str, Any]]:
        found = json.loads(printed("--hosts", "1x2", "--bytes", nbytes, "--json", *arguments))["algorithms"]
        return {row["name"]: row for row in found}

    def chosen(nbytes: str, *arguments: str) -> list[str]:
        found = rows(nbytes, *arguments).items()
        return sorted(name for name, row in found if row.get("is_chosen"))

    assert chosen("256") == ["rounds"]
    assert chosen("750") == ["direct", "rounds"]
    assert chosen("2K") == ["direct", "staged"]
    assert rows("2K")["direct"]["needs"] == "arrays in symmetric memory"
    assert rows("256")["direct"]["excluded"] == "so few bytes are not looked for in symmetric memory"
    assert rows("2K", "--order", "any")["nccl"]["excluded"].startswith("for arrays on GPUs")
    assert "nccl" in rows("2K", "--order", "any", "--collective", "reduce_scatter")
    assert "nccl" not in rows("2K")
    assert "MULTIRING_PEER_MEMORY=1" in rows("2K")["peers"]["excluded"]
    assert "peers" not in rows("2K", "--order", "any")
    assert chosen("16K", "--oversubscribed") == ["rounds"]
    assert chosen("32K", "--oversubscribed") == ["direct", "rounds"]
    assert chosen("128K", "--oversubscribed") == ["direct", "staged"]
    alone = printed("--hosts", "1x2", "--bytes", "1M", "--mode", "staged")
    assert [line.split()[0] for line in alone.splitlines()[3:]] == ["mode", "staged"]
    for told, *words in (
        ("no choice of algorithms on one host", "1x2", "--collective", "broadcast"),
        ("of a rank alone needs no algorithm; describe several (--hosts 1x2)", "1x1"),
        ("--oversubscribed is for one host", "2x2", "--oversubscribed"),
        ("staged is for ranks of one host; across hosts take a mode such as 2x3", "3x2", "--mode", "staged"),
        ("allgather has no messages here", "2x2", "--collective", "allgather", "--mode", "messages"),
        ("allreduce has no allreduce:2x2 here", "2x2", "--mode", "allreduce:2x2"),
        ("mode 4d is for several hosts; within one there are direct", "1x4", "--mode", "4d"),
        ("--segment is for several hosts", "1x4", "--segment", "64K"),
        ("--host-links is for several hosts", "1x4", "--host-links", "ring"),
        ("--placement is for several hosts", "1x4", "--placement", "round-robin"),
        ("rounds is none: name one by --mode", "4x4", "--bytes", "4K", "--segment", "1K"),
        ("2 links, but rounds crosses hosts in one", "2x2", "--bytes", "1K", "--links", "1gbit,2gbit"),
        ("--segment is for plans, and messages is none", "2x2", "--collective", "gather", "--segment", "1K"),
    ):
        assert told in refused("plan", "--explain", "--hosts", *words)
    words = ["--hosts", "2x2", "--collective", "reduce_scatter", "--mode"]
    for mode in ("allreduce:2x2", "allreduce:2px2"):
        assert "allreduce:2px2p " in printed(*words, mode)


def test_one_host_says_what_either_kind_of_array_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --explain, too, as gradients lie in symmetric memory, and what is given to an allreduce does
    not."""
    assert cli.main(["plan", "--hosts", "1x4", "--bytes", "1M"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[4:]]
    assert [(line[0], " ".join(line[3:])) for line in lines] == [
        ("direct", "chosen for arrays in symmetric memory"),
        ("staged", "chosen"),
    ]
    assert cli.main(["plan", "--hosts", "1x4", "--bytes", "1M", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["mode"], found["bytes"], found["collective"]) == ("staged", 1 << 20, "allreduce")
    assert [row["name"] for row in found["algorithms"]] == ["direct", "staged"]


ON_DEVICES = {
    ("all", "2x4", ""): ("nccl", "among all ranks: not predicted"),
    ("all", "2+1", "--collective alltoall"): ("nccl", "among all ranks: not predicted"),
    ("hierarchical", "2x4", ""): (
        "hierarchical",
        "by NCCL within hosts and pinned memory across them: not predicted",
    ),
    ("hierarchical", "2+1", ""): ("pinned", "needs hosts with as many ranks each, at least two"),
    ("hierarchical", "2x4", "--collective broadcast"): ("pinned", "hierarchical is for allreduces"),
    ("host", "2x4", ""): ("pinned", "MULTIRING_NCCL=host is for groups on one host"),
    ("off", "2x4", ""): ("pinned", "copied to the host and back: MULTIRING_NCCL=off"),
    ("all", "2x4", "--order canonical"): ("pinned", "for any order only (--order any)"),
    ("all", "2x4", "--mode 4x2"): ("pinned", "in a job with a mode"),
    ("all", "2x4", "--mode rounds"): ("pinned", "in a job with a mode"),
    ("all", "2x4", "--bytes 1K"): ("pinned", "not asked for so few bytes"),
    ("all", "4", "--host-links ring"): ("pinned", "a link from each host to each"),
    ("all", "2x4", "--collective scatter"): ("pinned", "not asked for a scatter"),
}


@pytest.mark.parametrize(("nccl", "hosts", "options"), ON_DEVICES, ids=lambda part: part or "-")
def test_arrays_on_devices_of_several_hosts(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    nccl: str,
    hosts: str,
    options: str,
) -> None:
    """By NCCL, by it within hosts, or by pinned memory, without a time: in a table, below a plan, as JSON."""
    name, told = ON_DEVICES[nccl, hosts, options]
    words = ["plan", "--hosts", hosts, "--bytes", "16M", "--order", "any", *options.split()]

    def shown(*more: str) -> str:
        assert cli.main([*words, *more]) == 0
        return capsys.readouterr().out

    assert "GPUs" not in shown("--explain"), "nobody has asked"
    monkeypatch.setenv("MULTIRING_NCCL", nccl)
    for text in (shown(), shown("--explain")):
        (line,) = (line for line in text.splitlines() if "GPUs" in line)
        assert line.split()[0] == name
        assert line.endswith(told)
    *_, row = json.loads(shown("--json"))["algorithms"]
    assert list(row) == ["name", "excluded"], "no time"
    assert row["name"] == name
    assert row["excluded"].endswith(told)
    monkeypatch.setenv("MULTIRING_NCCL", "off")
    *_, row = json.loads(shown("--json", "--nccl", nccl))["algorithms"]
    assert row["name"] == name, "the option goes first"
    monkeypatch.setenv("MULTIRING_TIMEOUT", "of no interest here")
    monkeypatch.setenv("MULTIRING_COMM_DTYPE", "bfloat16")
    *_, row = json.loads(shown("--json", "--nccl", nccl))["algorithms"]
    is_rounded = name == "nccl" and "--collective" not in options
    assert row["name"] == ("pinned" if is_rounded else name)


def test_one_host_has_no_row_of_nccl_where_it_is_off() -> None:
    words = ("--hosts", "1x2", "--order", "any", "--nccl")
    assert "by NCCL" in printed(*words, "host")
    assert "NCCL" not in printed(*words, "off")
    assert "with MULTIRING_PEER_MEMORY=1" in printed(*words, "off"), "which has any order, too"


def test_rounds_of_one_host_pass_in_segments() -> None:
    *_, line = printed("--hosts", "1x4", "--bytes", "1M", "--mode", "rounds").splitlines()
    assert line.split()[0] == "rounds"
    assert float(line.split()[1]) > 1.0, "ms"


def test_a_reduce_scatter_of_one_host_has_a_table() -> None:
    def chosen(*arguments: str) -> list[str]:
        found = json.loads(printed("--collective", "reduce_scatter", "--json", "--hosts", "1x2", *arguments))
        return sorted(row["name"] for row in found["algorithms"] if row.get("is_chosen"))

    assert chosen("--bytes", "4K") == ["staged"]
    assert chosen("--bytes", "8K") == ["direct", "staged"]
    assert chosen("--bytes", "32K", "--oversubscribed") == ["staged"]
    assert chosen("--bytes", "64K", "--oversubscribed") == ["direct", "staged"]


@pytest.mark.parametrize("nbytes", ["1K", "1M"])
def test_json_says_what_is_described_whether_there_is_a_plan(
    capsys: pytest.CaptureFixture[str], nbytes: str
) -> None:
    """Rounds at 1 KiB, a plan at 1 MiB."""
    assert cli.main(["plan", "--hosts", "4x2", "--bytes", nbytes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["algorithms"]
    assert (found["mode"], found["seconds"]) == (row["name"], row["seconds"])
    assert (found["dtype"], found["bytes"]) == ("float32", 4 * found["count"])
    assert ("steps" in found) == (nbytes == "1M")
    assert found["order"] == "canonical"


def test_rounds_alone() -> None:
    cluster = ("--hosts", "3x2", "--bytes", "100K")
    row = next(line for line in printed(*cluster).splitlines() if line.startswith("rounds "))
    *_, alone = printed(*cluster, "--mode", "rounds").splitlines()
    assert alone.split() == row.split()
