"""Stores: what all of them promise, and what each kind adds."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from multiring import errors
from multiring.errors import PeerLostError, UsageError
from multiring.rendezvous.offered_store import Party, meet
from multiring.store import MAX_VALUE_BYTES, FileStore, Store, TcpStore, TcpStoreServer, open_store
from multiring.store.file import job_directory_prefix
from tests.support import held_port, no_new_descriptors

SECRET = b"a secret of the job"

Opener = Callable[[], Store]


@pytest.fixture(params=["file", "tcp"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "a store"
    with no_new_descriptors(), FileStore(path), TcpStoreServer("127.0.0.1", 0, SECRET) as server:
        yield {"file": path.as_uri(), "tcp": f"tcp://127.0.0.1:{server.port}"}[request.param]


@pytest.fixture
def opener(url: str) -> Iterator[Opener]:
    """Opens the same store as often as it is called, as several ranks do."""
    with ExitStack() as opened:
        yield lambda: opened.enter_context(open_store(url, SECRET))


def test_any_text_is_a_key_and_any_bytes_are_a_value(opener: Opener) -> None:
    store = opener()
    keys = ["a/b/../c", ".", "..", "/", "with space", "naïve ☃", "%2F", "\0\n", "x" * 4096, "part-1"]
    for key in keys:
        store.set(key, key.encode())
    assert [store.get(key, 0.0) for key in keys] == [key.encode() for key in keys]
    for value in (b"", b"\0" * 3, bytes(range(256)) * 5000):
        store.set("key", value)
        assert store.get("key", 0.0) == value


def test_a_key_that_nobody_sets_is_a_timeout_that_says_so(opener: Opener) -> None:
    store = opener()
    began = time.monotonic()
    with pytest.raises(errors.TimeoutError, match="missing-key") as caught:
        store.get("missing-key", 0.2)
    assert time.monotonic() - began >= 0.2
    assert str(store) in str(caught.value)
    assert "MULTIRING_TIMEOUT" in str(caught.value)
    assert isinstance(caught.value, TimeoutError)


def test_keys_and_values_have_limits(opener: Opener) -> None:
    store = opener()
    for key, value in (("", b""), ("k" * 5000, b""), ("key", bytes(MAX_VALUE_BYTES + 1))):
        with pytest.raises(UsageError):
            store.set(key, value)
    with pytest.raises(UsageError):
        store.get("", 0.0)


def test_a_reader_never_sees_half_a_value(opener: Opener) -> None:
    writer, reader = opener(), opener()
    values = [bytes([letter]) * 200_000 for letter in b"ab"]
    writer.set("key", values[0])
    done = threading.Event()

    def write() -> None:
        for turn in range(60):
            writer.set("key", values[turn % 2])
        done.set()

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        while not done.is_set():
            assert reader.get("key", 5.0) in values
        writing.result()


def test_ctrl_c_ends_a_wait_and_the_store_goes_on_working(opener: Opener) -> None:
    calls = iter(range(3))

    def interrupt() -> None:
        if next(calls, None) is None:
            signal.raise_signal(signal.SIGINT)

    store = opener()
    with pytest.raises(KeyboardInterrupt):
        store.get("never", 60.0, interrupt)
    store.set("key", b"value")
    assert store.get("key", 5.0) == b"value"


# --- files


def test_what_is_no_directory_for_its_owner_only_is_refused(tmp_path: Path) -> None:
    with FileStore(tmp_path / "new" / "store"):
        assert (tmp_path / "new" / "store").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch(0o600)
    (tmp_path / "own").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    for mode in (0o770, 0o701):
        (tmp_path / f"{mode:o}").mkdir()
        (tmp_path / f"{mode:o}").chmod(mode)
    refused = {"770": "chmod 700", "701": "chmod 700", "file": "not a directory", "link": "not a directory"}
    for name, words in {**refused, "file/store": "MULTIRING_STORE"}.items():
        with pytest.raises(UsageError, match=words):
            FileStore(tmp_path / name)
    if os.geteuid() == 0:  # only root can give a directory to another user
        os.chown(tmp_path / "own", 12345, -1)
        with pytest.raises(UsageError, match="belongs to user 12345"):
            FileStore(tmp_path / "own")


def test_the_last_one_to_leave_removes_the_directory(tmp_path: Path) -> None:
    first, second = FileStore(tmp_path / "store"), FileStore(tmp_path / "store")
    first.set("key", b"value")
    first.close()
    assert second.get("key", 0.0) == b"value"
    third = FileStore(tmp_path / "store")
    second.remove()
    assert third.get("key", 0.0) == b"value"
    third.remove()
    third.close()
    assert not (tmp_path / "store").exists()


def test_coming_and_leaving_at_the_same_time_is_safe(tmp_path: Path) -> None:
    def come_and_go(who: int) -> None:
        for turn in range(50):
            with FileStore(tmp_path / "store") as store:
                store.set(f"{who}-{turn}", b"x")
                assert store.get(f"{who}-{turn}", 0.0) == b"x"

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(come_and_go, range(4)))
    assert not (tmp_path / "store").exists()


def test_a_directory_of_the_user_survives_with_what_is_in_it(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "key-folder").mkdir(0o700, parents=True)
    own.chmod(0o700)
    foreign = ("thesis.tex", "key-rsa", "part-1", "0-1.sock", "key-folder/multiring-key-x", "multiring-key")
    for name in foreign:
        (own / name).write_text("precious")
    for _ in range(2):
        with FileStore(own) as first, FileStore(own) as second:
            first.set("key", b"value")
            second.set("k" * 4000, b"value")
            with socket.socket(socket.AF_UNIX) as left:  # as a rank that was killed leaves it
                left.bind(str(own / f"3-{os.getpid()}.sock"))
        assert sorted(p.relative_to(own).as_posix() for p in own.rglob("*") if p.is_file()) == sorted(foreign)
        assert len(list(own.iterdir())) == len(foreign), "and what was the store's is gone"


def test_keys_of_ranks_that_were_killed_mislead_nobody(tmp_path: Path) -> None:
    if (pid := os.fork()) == 0:
        FileStore(tmp_path / "store").set("key", b"old")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (tmp_path / "store").exists()
    with FileStore(tmp_path / "store") as store, FileStore(tmp_path / "store") as other:
        with pytest.raises(errors.TimeoutError):
            store.get("key", 0.0)
        store.set("key", b"new")
        with FileStore(tmp_path / "store") as late:
            assert late.get("key", 0.0) == other.get("key", 0.0) == b"new"
    assert not (tmp_path / "store").exists()


def test_a_directory_that_vanishes_ends_those_who_wait(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as store, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.get, "key", 60.0)
        shutil.rmtree(tmp_path / "store")
        with pytest.raises(PeerLostError, match="was removed"):
            waiting.result()
        with pytest.raises(PeerLostError, match="was removed"):
            store.set("key", b"")


def test_directories_of_dead_jobs_are_removed_and_no_others(tmp_path: Path) -> None:
    prefix = job_directory_prefix()
    used = FileStore(tmp_path / (prefix + "used"))
    for name in (prefix + "dead", prefix + "young", "multiring-other"):
        (tmp_path / name).mkdir(0o700)
        (tmp_path / name / "multiring-key-x").touch()
    earlier = time.time() - 3600
    for name in (prefix + "dead", prefix + "used", "multiring-other"):
        os.utime(tmp_path / name, (earlier, earlier))
    with FileStore(tmp_path / (prefix + "new")):
        found = sorted(path.name for path in tmp_path.iterdir())
    used.close()
    assert found == sorted(["multiring-other", prefix + "new", prefix + "used", prefix + "young"])


# --- where ranks meet under a launcher that serves no store


def reopening(url: str) -> Callable[[float], Store]:
    return lambda timeout: open_store(url, SECRET, timeout)


def test_ranks_of_one_program_do_not_meet_those_of_the_one_before(url: str) -> None:
    """Though these have left everything behind in the store, and rank 0 comes last. Others may follow."""
    used = set()
    with ThreadPoolExecutor(3) as threads, ExitStack() as stores:
        for job in ("a", "a", "b"):
            arguments = 3, "x/", 60.0, reopening(url)
            others = [threads.submit(meet, rank, *arguments, party=Party(f"job '{job}'")) for rank in (1, 2)]
            assert not wait(others, timeout=0.3).done, "there is no rank 0 of theirs yet"
            found = [meet(0, *arguments, party=Party(f"job '{job}'")), *(other.result() for other in others)]
            for store, _ in found:
                stores.enter_context(store)
            (prefix,) = {prefix for _, prefix in found}
            assert prefix.startswith("x/")
            used.add(prefix)
            found[0][0].set(prefix + "key", b"value")
    assert len(used) == 3


def test_a_rank_that_came_to_the_store_of_the_program_before_goes_to_its_own() -> None:
    with held_port() as port, ThreadPoolExecutor(1) as threads, ExitStack() as stores:
        old = stores.enter_context(TcpStoreServer("127.0.0.1", port, SECRET))
        come = threading.Event()

        def reopen(timeout: float) -> Store:
            opened = TcpStore("127.0.0.1", old.port, SECRET, timeout)
            come.set()
            return opened

        other = threads.submit(meet, 1, 2, "", 60.0, reopen)
        assert come.wait(30)
        old.close()  # as its rank 0 ends
        stores.enter_context(TcpStoreServer("127.0.0.1", old.port, SECRET))
        store, prefix = meet(0, 2, "", 60.0, reopen)
        stores.enter_context(store)
        assert stores.enter_context(other.result()[0]) is not store
        assert other.result()[1] == prefix


def test_who_does_not_come_is_told(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(meet, 2, 4, "", 1.0, reopening(url))
        with pytest.raises(errors.TimeoutError, match=r"rank 0 of 4 has waited .* for ranks 1, (2, )?3:"):
            meet(0, 4, "", 1.0, reopening(url), warn_after=0.1)
        (warning,) = caplog.messages
        assert re.search(
            r"rank 0 of 4 has waited .* in multiring.init\(\) .* for ranks 1, (2, )?3: ", warning
        )
        with pytest.raises(errors.TimeoutError, match=r"rank 2 of 4 has waited .* for rank 0"):
            other.result()


def test_two_jobs_at_one_store_are_told(url: str) -> None:
    """The second comes while the first waits for a rank. All of both are told, also who comes last."""

    def come(job: str, rank: int) -> Any:
        return threads.submit(meet, rank, 2, "", 60.0, reopening(url), party=Party(f"job '{job}'"))

    with ThreadPoolExecutor(4) as threads, open_store(url, SECRET) as store:
        ranks = [come("a", 0)]
        store.get("meeting", 30.0)
        ranks += [come("b", 1), come("b", 0)]
        told = pytest.raises(UsageError, match=r"job '[ab]' has met job '[ab]' at .*MULTIRING_STORE")
        for rank in ranks:
            with told:
                rank.result(30)
        with told:  # had it come before b, a would have met
            come("a", 1).result(30)


# --- URLs


def test_a_url_that_is_not_understood_is_a_usage_error() -> None:
    for url in ("", "/tmp/x", "file://host/x", "tcp://host", "tcp://:1", "tcp://host:99999999", "http://h:1"):
        with pytest.raises(UsageError, match="is not understood"):
            open_store(url, SECRET)


def test_a_tcp_store_needs_the_secret_of_its_job() -> None:
    with pytest.raises(UsageError, match="MULTIRING_SECRET"):
        open_store("tcp://127.0.0.1:1", None)
    with pytest.raises(UsageError, match="secret"):
        TcpStoreServer("127.0.0.1")
    with (
        TcpStoreServer("127.0.0.1", 0, SECRET) as server,
        pytest.raises(UsageError, match="MULTIRING_SECRET differs"),
    ):
        TcpStore("127.0.0.1", server.port, b"another secret")
