"""The launcher's report on a job that failed: which rank is blamed, and what is told of it."""

from __future__ import annotations

import signal

import pytest

from multiring.commands.launcher.report import RankEnd, blame, failure_report

LOST = "multiring.errors.PeerLostError: rank 1"
OWN = ("ValueError: bad", "During handling ...", "KeyError: 3")
DURING = "During handling of the above exception, another exception occurred:"
CAUSE = "The above exception was the direct cause of the following exception:"


JAX_ABORT = (
    "F1129 client.h:80] Terminating process because the JAX distributed service detected fatal errors.",
    "while calling /xla.coordination.CoordinationService/PollForError:",
)


def end(rank: int, code: int | None, *stderr: str, by_launcher: bool = False) -> RankEnd:
    return RankEnd(rank, 1000 + rank, code, by_launcher, stderr)


@pytest.mark.parametrize(
    ("stderr", "secondary"),
    [
        (["Traceback (most recent call last):", '  File "x.py", line 1', LOST], True),
        (["AbortedError: broken since rank 1 ...", "some farewell of an exit handler"], True),
        (["train: rank 0: AbortedError: rank 1: KeyError: 3"], True),
        (["jax.errors.JaxRuntimeError: UNAVAILABLE: multiring.PeerLostError: rank 0 lost rank 1"], True),
        (["errors_impl.UnavailableError: {{x}} multiring: PeerLostError: rank 0", "[Op:A]"], True),
        ([LOST, CAUSE, "RuntimeError: training failed in step 3"], True),
        ([*JAX_ABORT, "*** Check failure stack trace: ***", "Fatal Python error: Aborted"], True),
        ([LOST, "ValueError: something else"], False),
        (["KeyError: 'x'", DURING, "ValueError: bad image"], False),
        ([], False),
    ],
)
def test_what_another_rank_is_the_cause_of(stderr: list[str], secondary: bool) -> None:
    assert end(0, 1, *stderr).is_secondary == secondary


def test_the_first_that_failed_by_itself_or_by_a_signal_is_blamed() -> None:
    """In the order in which the launcher has heard of them: test_launch_engines.py."""
    assert blame([end(2, 1), end(0, 1)]).rank == 2
    assert blame([end(2, 1), end(0, -9)]).rank == 0
    assert blame([end(0, 1, LOST), end(1, 3, *OWN)]).rank == 1
    assert blame([end(0, -6, LOST), end(1, 3)]).rank == 1
    assert blame([end(1, -6, JAX_ABORT[1]), end(0, 1, *OWN)]).rank == 0
    assert blame([end(0, 1, LOST)]).rank == 0


def report(culprit: RankEnd, *others: RankEnd, oom_kills: int = 0) -> str:
    lines = failure_report(culprit, [culprit, *others], host="box", seconds=1.25, oom_kills=oom_kills)
    return "\n".join(lines)


def test_last_lines_begin_at_the_last_traceback() -> None:
    lines = ["a framework is loaded", "Traceback (most recent call last):", "KeyError: 1", "and a farewell"]
    assert report(end(0, 3, *lines)).splitlines()[2:] == [f"  | {line}" for line in lines[1:]]


def test_the_report_says_who_how_and_shows_the_last_words() -> None:
    others = end(0, 1, LOST), end(2, 0), end(3, -15, by_launcher=True), end(4, None, by_launcher=True)
    text = report(end(1, 3, *OWN), *others)
    assert "rank 1 (process 1001 on box) failed with exit code 3 after 1.2 s" in text
    assert "  | KeyError: 3" in text
    assert "rank 0: failed as well (exit code 1)" in text
    assert "rank 2: had ended with exit code 0" in text
    assert "rank 3: ended by the launcher (signal SIGTERM)" in text
    assert "rank 4: cannot be ended" in text


@pytest.mark.parametrize(
    ("code", "how", "hint"),
    [
        (-signal.SIGKILL, "signal SIGKILL", "out-of-memory"),
        (-signal.SIGBUS, "signal SIGBUS", "mapping"),
        (137, "exit code 137 (128 + 9: SIGKILL ended what the rank had started)", "out-of-memory"),
        (-40, "signal 40", ""),  # it has no name
        (128, "exit code 128", ""),
        (255, "exit code 255", ""),
    ],
)
def test_a_signal_comes_with_a_hint(code: int, how: str, hint: str) -> None:
    text = report(end(0, code))
    assert f"failed with {how} after" in text
    assert hint in text
    if code == -signal.SIGKILL:
        assert "struck in this container" in report(end(0, code), oom_kills=1)
