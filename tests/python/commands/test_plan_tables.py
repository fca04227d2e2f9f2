"""The tables of algorithms in the documentation are what is printed: a change of the cost model or of an
algorithm shows there (python ci/update_tables.py)."""

from __future__ import annotations

import json
from typing import Any

from ci.update_tables import LETTERS, PAGE, blocks, printed, shown, with_letters
from tests.support import refused


def test_the_documentation_shows_what_is_printed() -> None:
    found = blocks(PAGE.read_text() + "\n")
    assert len(found) == 20
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


def test_one_host_has_nothing_to_choose() -> None:
    assert "algorithms across hosts need several hosts" in refused("plan", "--hosts", "1x4", "--explain")


def test_rounds_alone() -> None:
    cluster = ("--hosts", "3x2", "--bytes", "100K")
    row = next(line for line in printed(*cluster).splitlines() if line.startswith("rounds "))
    *_, alone = printed(*cluster, "--mode", "rounds").splitlines()
    assert alone.split() == row.split()
