"""Pure parts of the launcher: shares of processors, thread counts, blame."""

from __future__ import annotations

import signal
import socket
import sys

import pytest

from multiring.commands.launcher import binding, foreign_variables, rank_starter
from multiring.commands.launcher.report import RankEnd, blame, exit_code, failure_report
from multiring.errors import UsageError


def test_torchs_rank_0_is_told_where_to_serve_its_store() -> None:
    for host, address in (("", "10.0.0.9"), ("ann@node3", "node3"), ("fd00::1", "fd00::1")):
        found = foreign_variables.torch_meeting(host, "10.0.0.9")
        assert found["MASTER_ADDR"] == address
        assert 16384 <= int(found["MASTER_PORT"]) < 32768


def test_a_port_that_is_taken_is_not_given_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        candidates = [taken.getsockname()[1], *range(20000, 20100)]
        monkeypatch.setattr(foreign_variables.random, "sample", lambda *_: candidates)
        assert int(foreign_variables.torch_meeting("", "127.0.0.1")["MASTER_PORT"]) in candidates[1:]


def test_this_python_has_multiring() -> None:
    """Nobody is asked."""
    assert rank_starter._has_multiring(sys.executable, {"PATH": "/nowhere"})


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_shares_are_equal_contiguous_and_apart(ranks: int) -> None:
    cpus = [8, 9, 1, 2, 30, 31, 32, 5]
    found = binding.shares(cpus, ranks, None)
    assert found is not None
    assert len(found) == ranks
    assert {len(share) for share in found} == {len(cpus) // ranks}
    each = len(cpus) // ranks
    assert [sorted(share) for share in found] == [
        sorted(cpus[r * each : (r + 1) * each]) for r in range(ranks)
    ]


def test_more_ranks_than_processors_are_not_bound() -> None:
    assert binding.shares([0, 1], 3, None) is None
    assert binding.shares([0, 1], 1, "none") is None
    with pytest.raises(UsageError, match="--bind none"):
        binding.shares([0, 1], 3, "core")


def test_thread_counts_share_the_cores_unless_the_user_has_set_them() -> None:
    found = binding.thread_environment(8, 3, {})
    assert set(found) == set(binding.THREAD_VARIABLES)
    assert set(found.values()) == {"2"}
    assert binding.thread_environment(8, 2, {"OMP_NUM_THREADS": "3"}) == {}
    assert "MKL_NUM_THREADS" not in binding.thread_environment(8, 2, {"MKL_NUM_THREADS": "3"})


LOST = (
    "Traceback (most recent call last):",
    '  File "x.py", line 1',
    "multiring.errors.PeerLostError: rank 1",
)
ABORTED = ("AbortedError: broken since rank 1 ...", "some farewell of an exit handler")
OWN = ("ValueError: bad", "During handling ...", "KeyError: 3")


def end(rank: int, code: int | None, stderr: tuple[str, ...] = (), *, by_launcher: bool = False) -> RankEnd:
    return RankEnd(rank, 1000 + rank, code, by_launcher, stderr)


def test_the_first_that_failed_is_blamed_or_the_one_that_a_signal_ended() -> None:
    assert blame([end(2, 1), end(0, 1)]).rank == 2
    assert blame([end(2, 1), end(0, -9)]).rank == 0


@pytest.mark.parametrize(
    ("stderr", "secondary"),
    [
        (("jax.errors.JaxRuntimeError: UNAVAILABLE: multiring.PeerLostError: rank 0 lost rank 1",), True),
        (
            ("errors_impl.UnavailableError: {{function_node x}} multiring: PeerLostError: rank 0", "[Op:A]"),
            True,
        ),
        (("multiring.errors.PeerLostError: rank 0 lost rank 1", "ValueError: something else"), False),
        (
            (
                "multiring.errors.PeerLostError: rank 0 lost rank 1",
                "The above exception was the direct cause of the following exception:",
                "RuntimeError: training failed in step 3",
            ),
            True,
        ),
        (
            (
                "KeyError: 'x'",
                "During handling of the above exception, another exception occurred:",
                "ValueError: bad image",
            ),
            False,
        ),
    ],
)
def test_what_another_rank_is_the_cause_of(stderr: tuple[str, ...], secondary: bool) -> None:
    assert end(0, 1, stderr).is_secondary == secondary


def test_a_rank_that_only_lost_its_peer_is_not_blamed() -> None:
    assert blame([end(0, 1, LOST), end(1, 3, OWN)]).rank == 1
    assert blame([end(0, 1, ABORTED), end(1, 3)]).rank == 1
    assert blame([end(0, -6, LOST), end(1, 3)]).rank == 1
    assert blame([end(0, 1, ("train: rank 0: AbortedError: rank 1: KeyError: 3",)), end(1, 3)]).rank == 1
    assert blame([end(0, 1, ("AbortedError: seen", "RuntimeError: own")), end(1, 3)]).rank == 0
    assert blame([end(0, 1, LOST)]).rank == 0


def test_exit_codes_are_those_of_a_shell() -> None:
    assert [exit_code(code) for code in (0, 3, -9)] == [0, 3, 137]


def report(culprit: RankEnd, *others: RankEnd, oom_kills: int = 0) -> str:
    lines = failure_report(culprit, [culprit, *others], host="box", seconds=1.25, oom_kills=oom_kills)
    return "\n".join(lines)


def test_the_report_says_who_how_and_shows_the_last_words() -> None:
    text = report(
        end(1, 3, OWN),
        end(0, 1, LOST),
        end(2, 0),
        end(3, -15, by_launcher=True),
        end(4, None, by_launcher=True),
    )
    assert "rank 1 (process 1001 on box) failed with exit code 3 after 1.2 s" in text
    assert "  | KeyError: 3" in text
    assert "rank 0: failed as well (exit code 1)" in text
    assert "rank 2: had ended with exit code 0" in text
    assert "rank 3: ended by the launcher (signal SIGTERM)" in text
    assert "rank 4: cannot be ended" in text


def test_signals_come_with_a_hint() -> None:
    for number, hint in ((signal.SIGKILL, "out-of-memory"), (signal.SIGBUS, "mapping")):
        text = report(end(0, -number))
        assert f"signal {number.name}" in text
        assert hint in text
    assert "struck in this container" in report(end(0, -9), oom_kills=1)
    assert "signal 40" in report(end(0, -40)), "it has no name"


def test_exit_codes_above_128_name_the_signal_that_they_stand_for() -> None:
    text = report(end(0, 137))
    assert "exit code 137 (128 + 9: SIGKILL ended what the rank had started)" in text
    assert "out-of-memory" in text
    for code in (128, 255, 127):
        assert f"failed with exit code {code} after" in report(end(0, code))
