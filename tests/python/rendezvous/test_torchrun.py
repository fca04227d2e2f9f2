"""Ranks of torchrun on several hosts, with a fake of its store: what goes wrong, and what lies there."""

from __future__ import annotations

import itertools
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from multiring import errors
from multiring.errors import UsageError
from multiring.rendezvous import launch_environment
from multiring.rendezvous.launch_environment import Placement
from multiring.settings import Settings
from multiring.store import Store
from multiring.torchrun import meeting as torchrun
from tests.python.rendezvous.test_launch_environment import TORCHRUN, variables
from tests.support import wait_until

ENVIRON = TORCHRUN | variables("""
    WORLD_SIZE=4 GROUP_WORLD_SIZE=2 MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True
""")
ENVIRON["TORCHELASTIC_RUN_ID"] = "a job/7"
PREFIX = "multiring/a job/7/"
SECRET = "cd" * 16


class FakeTorchStore:
    """torchrun's store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.asked: set[int] = set()  # threads that have looked
        self.gone = False

    def connect(self, host: str, port: int, timeout: float) -> FakeTorchStore:
        assert (host, port) == ("localhost", 29500)
        return self

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise RuntimeError("Connection reset by peer\nand a stack")
        self.asked.add(threading.get_ident())
        return all(key in self.values for key in keys)


Meeting = Future[tuple[Placement, Store, str]]
Join = Callable[..., list[Meeting]]


@pytest.fixture
def torch_store() -> FakeTorchStore:
    return FakeTorchStore()


@pytest.fixture
def join(torch_store: FakeTorchStore) -> Iterator[Join]:
    """Gives `join(ranks, **settings)`, by which these ranks meet, in threads."""
    with ThreadPoolExecutor(8) as pool:
        yield lambda ranks, **settings: [pool.submit(meet, rank, torch_store, **settings) for rank in ranks]


def place(rank: int, more: Mapping[str, str] | None = None) -> Placement:
    local = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)}
    return launch_environment.detect({**ENVIRON, **local, **(more or {})})


def meet(rank: int, torch_store: FakeTorchStore, **settings: Any) -> tuple[Placement, Store, str]:
    return torchrun.meet(place(rank), Settings(**{"timeout": 20.0, **settings}), torch_store.connect)


def assert_together(found: list[Meeting]) -> tuple[str, bytes | None]:
    """Each reads what any has written; the job's name and secret."""
    results = [future.result(30) for future in found]
    (begin,) = {begin for _, _, begin in results}
    for place, store, _ in results:
        store.set(f"{begin}from {place.rank}", b"x")
    for (_, store, _), (place, _, _) in itertools.product(results, results):
        assert store.get(f"{begin}from {place.rank}", 0.0) == b"x"
    (told,) = {(place.job_id, place.secret) for place, _, _ in results}
    return told


def test_the_place_says_where_torchruns_store_is() -> None:
    found = place(2)
    assert found.store_url == "torchrun://localhost:29500/a%20job%2F7"
    assert torchrun.is_meant(found)
    assert place(2, {"MASTER_ADDR": "fd00::1"}).store_url.startswith("torchrun://[fd00::1]:29500/")


def test_torchruns_store_is_left_alone_where_there_is_another_one() -> None:
    for more in ({"MULTIRING_STORE": "tcp://node0:29400"}, {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}):
        assert not torchrun.is_meant(place(1, more | {"LOCAL_RANK": "1", "GROUP_RANK": "0"}))
    with pytest.raises(UsageError, match="set MULTIRING_STORE and MULTIRING_SECRET"):
        place(1, {"TORCHELASTIC_USE_AGENT_STORE": "False"})


def test_ranks_meet_again_and_again(join: Join, torch_store: FakeTorchStore) -> None:
    told = [assert_together(join((3, 1, 2, 0))) for _ in range(3)]
    assert len({job for job, _ in told}) == len({secret for _, secret in told}) == 3
    assert {key[: len(PREFIX)] for key in torch_store.values} == {PREFIX}


def test_a_secret_of_the_users_own_is_not_left_in_torchruns_store(
    join: Join, torch_store: FakeTorchStore
) -> None:
    _, secret = assert_together(join((3, 1, 2, 0), secret=bytes.fromhex(SECRET)))
    assert secret == bytes.fromhex(SECRET)
    assert not [value for value in torch_store.values.values() if SECRET.encode() in value or secret in value]


def test_a_rank_without_the_users_secret_is_told_so(join: Join) -> None:
    with_secret = join((0, 2, 3), secret=bytes.fromhex(SECRET))
    (without,) = join((1,))
    with pytest.raises(UsageError, match="rank 0 has a MULTIRING_SECRET and this rank has none"):
        without.result(30)
    assert_together(with_secret)


def test_what_lies_there_from_before_a_restart_is_passed_over(
    join: Join, torch_store: FakeTorchStore
) -> None:
    """Ranks that have met, and ranks whose rank 0 has called them and died."""
    stale = {assert_together(join((3, 1, 2, 0)))[0]}
    for _ in range(2):
        torch_store.asked.clear()
        others = join((1, 2, 3))
        wait_until(lambda: len(torch_store.asked) == 3, "the others")
        job, _ = assert_together([*others, *join((0,))])
        assert job not in stale
        stale.add(job)
        torch_store.set(f"{PREFIX}meeting", b"called-and-died ")


def test_a_rank_that_was_restarted_signs_in_anew(join: Join, torch_store: FakeTorchStore) -> None:
    """While rank 0 waits for others: what its predecessor has left is not read out."""
    first = join((0,))
    wait_until(lambda: f"{PREFIX}meeting" in torch_store.values, "the call")
    entry = f"{PREFIX}{torch_store.values[f'{PREFIX}meeting'].decode().strip()}/ranks/1"
    torch_store.set(entry, b"of the one before")
    again = join((1,))
    wait_until(lambda: torch_store.values[entry] != b"of the one before", "rank 1")
    assert_together([*first, *again, *join((2, 3))])


def test_missing_ranks_are_named(torch_store: FakeTorchStore, caplog: pytest.LogCaptureFixture) -> None:
    write = torch_store.set

    def called(key: str, value: bytes) -> None:
        write(key, value)
        write(f"{PREFIX}{value.decode().strip()}/ranks/2", b"here")

    torch_store.set = called  # type: ignore[method-assign]
    at = "at the store of torchrun at localhost:29500"
    with pytest.raises(
        errors.TimeoutError, match=rf"rank 0 of 4 has waited {at} for ranks 1, 3: they have not"
    ):
        meet(0, torch_store, timeout=2.0, stall_warning=0.1)
    (warning,) = caplog.messages
    assert re.search(rf"rank 0 of 4 has waited .* in multiring.init\(\) {at} for ranks 1, 3: still", warning)


def test_a_rank_0_that_says_nothing_is_named(torch_store: FakeTorchStore) -> None:
    words = r"rank 1 of 4 .*localhost:29500 for rank 0, which has not called multiring.init\(\)"
    with pytest.raises(errors.TimeoutError, match=words) as caught:
        meet(1, torch_store, timeout=0.1)
    assert (caught.value.rank, caught.value.peer) == (1, 0)


def test_a_store_that_cannot_be_reached_is_told(torch_store: FakeTorchStore) -> None:
    def connect(host: str, port: int, timeout: float) -> FakeTorchStore:
        raise RuntimeError("the client socket has timed out\nand a stack")

    words = "rank 3 cannot reach torchrun's store at localhost:29500, .*: the client socket has timed out. S"
    with pytest.raises(UsageError, match=words):
        torchrun.meet(place(3), Settings(), connect)
    torch_store.gone = True
    gone = "the store of torchrun at localhost:29500 is gone, or cannot be reached: Connection reset by peer"
    with pytest.raises(errors.PeerLostError, match=gone):
        meet(0, torch_store)
    with pytest.raises(
        errors.PeerLostError, match="torchrun at localhost:29500 is gone: look at the output of"
    ):
        meet(1, torch_store)


def test_a_python_without_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(UsageError, match=r"rank 1 of 4.*no torch.*set MULTIRING_STORE and MULTIRING_SECRET"):
        torchrun.meet(place(1), Settings())


def test_a_real_store_that_is_not_there_is_told() -> None:
    pytest.importorskip("torch.distributed", reason="torchrun comes with torch, an optional dependency")
    with pytest.raises(UsageError, match=re.escape("rank 1 cannot reach torchrun's store at localhost:1,")):
        torchrun.meet(place(1, {"MASTER_PORT": "1"}), Settings(timeout=0.5))
