"""The tables of algorithms in the documentation are what is printed: a change of the cost model or of an
algorithm shows there (python ci/update_tables.py)."""

from __future__ import annotations

import json
from typing import Any

from ci.update_tables import LETTERS, PAGE, blocks, printed, shown, with_letters
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
    assert chosen("1K") == ["direct", "rounds"]
    assert chosen("2K") == ["direct", "staged"]
    assert rows("2K")["direct"]["needs"] == "arrays in symmetric memory"
    assert rows("1M")["rounds"]["excluded"] == "more than staging memory holds"
    assert chosen("8000", "--oversubscribed") == ["rounds"]
    assert chosen("8K", "--oversubscribed") == ["direct", "rounds"]
    assert chosen("32K", "--oversubscribed") == ["direct", "staged"]
    alone = printed("--hosts", "1x2", "--bytes", "1M", "--mode", "staged")
    assert [line.split()[0] for line in alone.splitlines()[3:]] == ["mode", "staged"]
    for told, *words in (
        ("no choice of algorithms on one host", "1x2", "--collective", "broadcast"),
        ("a rank alone needs no algorithm", "1x1"),
        ("--oversubscribed is for one host", "2x2", "--oversubscribed"),
        ("staged are no algorithm of allreduce", "2x2", "--mode", "staged"),
    ):
        assert told in refused("plan", "--explain", "--hosts", *words)


def test_rounds_alone() -> None:
    cluster = ("--hosts", "3x2", "--bytes", "100K")
    row = next(line for line in printed(*cluster).splitlines() if line.startswith("rounds "))
    *_, alone = printed(*cluster, "--mode", "rounds").splitlines()
    assert alone.split() == row.split()
