"""Ranks of torchrun on several hosts, with a fake of its store: what goes wrong, and what lies there."""

from __future__ import annotations

import json
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
from multiring.rendezvous.offered_store import offer_store
from multiring.settings import Settings
from multiring.store import Store, TcpStore
from multiring.torchrun import meeting as torchrun
from tests.python.rendezvous.test_launch_environment import TORCHRUN, variables
from tests.support import wait_until

ENVIRON = TORCHRUN | variables("""
    WORLD_SIZE=4 GROUP_WORLD_SIZE=2 MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True
""")
ENVIRON["TORCHELASTIC_RUN_ID"] = "a job/7"
KEY = "multiring//a job/7"
SECRET = "cd" * 16


class FakeTorchStore:
    """torchrun's store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gone = False

    def connect(self, host: str, port: int, timeout: float) -> FakeTorchStore:
        assert (host, port) == ("localhost", 29500)
        return self

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise RuntimeError("Connection reset by peer\nand a stack")
        return all(key in self.values for key in keys)


Meeting = Future[tuple[Placement, Store]]
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


def meet(rank: int, torch_store: FakeTorchStore, **settings: Any) -> tuple[Placement, Store]:
    return torchrun.meet(place(rank), Settings(**{"timeout": 20.0, **settings}), torch_store.connect)


def assert_together(found: list[Meeting]) -> tuple[str, bytes | None]:
    """Each reads what any has written; the job's name and secret."""
    results = [future.result(30) for future in found]
    for _, store in results:
        with store:
            store.set(f"from {id(store)}", b"x")
    (told,) = {(place.job_id, place.secret) for place, _ in results}
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
    assert len({job for job, _ in told}) == 3
    assert list(torch_store.values) == [KEY]


def test_a_secret_of_the_users_own_is_not_left_in_torchruns_store(
    join: Join, torch_store: FakeTorchStore
) -> None:
    _, secret = assert_together(join((3, 1, 2, 0), secret=bytes.fromhex(SECRET)))
    assert secret == bytes.fromhex(SECRET)
    assert b"secret" not in torch_store.values[KEY]
    assert SECRET.encode() not in torch_store.values[KEY]


def test_a_rank_without_the_users_secret_is_told_so(torch_store: FakeTorchStore) -> None:
    torch_store.set(KEY, json.dumps({"job": "x", "addresses": [["localhost", 1]]}))
    with pytest.raises(UsageError, match="rank 0 has a MULTIRING_SECRET and this rank has none"):
        meet(1, torch_store)


# What a rank 0 that still serves its store may have offered before a restart elsewhere.
STALE: dict[str, dict[str, Any]] = {
    "gone": {"addresses": [("127.0.0.1", 1)]},
    "of others now": {"secret": "ab" * 32},
    "already called": {},
    "never called": {},
}


@pytest.mark.parametrize("what", STALE)
def test_what_lies_there_from_before_a_restart_is_passed_over(
    join: Join, torch_store: FakeTorchStore, what: str
) -> None:
    offer = {**offer_store([]), **STALE[what]}
    torch_store.set(KEY, json.dumps(offer))
    if what == "already called":
        with store_of(offer) as store:
            store.set(f"{offer['job']}/confirmed", json.dumps(["0" * 16] * 3).encode())
    looked = threading.Event()
    check = torch_store.check
    torch_store.check = lambda keys: looked.set() or check(keys)  # type: ignore[method-assign]
    others = join((1, 2, 3))
    assert looked.wait(10)
    told, _ = assert_together([*others, *join((0,))])
    assert offer["job"] not in told


def store_of(offer: Mapping[str, Any]) -> TcpStore:
    return TcpStore(*offer["addresses"][-1], bytes.fromhex(offer["secret"]))


def test_a_rank_that_was_restarted_signs_in_anew(join: Join, torch_store: FakeTorchStore) -> None:
    """While rank 0 waits for others: what its predecessor has left is not read out."""
    first = join((0,))
    wait_until(lambda: KEY in torch_store.values, "the offer")
    offer = json.loads(torch_store.values[KEY])
    with store_of(offer) as store:
        store.set(f"{offer['job']}/ranks/1", b"of the one before")
        again = join((1,))
        wait_until(lambda: store.get(f"{offer['job']}/ranks/1", 1.0) != b"of the one before", "rank 1")
    assert_together([*first, *again, *join((2, 3))])


def test_missing_ranks_are_named(torch_store: FakeTorchStore, caplog: pytest.LogCaptureFixture) -> None:
    write = torch_store.set

    def offered(key: str, value: str) -> None:
        write(key, value)
        offer = json.loads(value)
        with store_of(offer) as store:
            store.set(f"{offer['job']}/ranks/2", b"here")

    torch_store.set = offered  # type: ignore[method-assign]
    words = r"rank 0 of 4 waits for ranks 1, 3, .* by torchrun's store at localhost:29500 within 2 s"
    with pytest.raises(errors.TimeoutError, match=words) as caught:
        meet(0, torch_store, timeout=2.0, stall_warning=0.1)
    (warning,) = caplog.messages
    assert re.search(
        r"rank 0 of 4 has waited .* in multiring.init\(\) at port .* for ranks 1, 3: "
        r"still importing, not started",
        warning,
    )
    assert "MULTIRING_STORE and MULTIRING_SECRET" in str(caught.value)


def test_a_rank_0_that_says_nothing_is_named(torch_store: FakeTorchStore) -> None:
    words = r"rank 1 of 4 has found no store of rank 0 .*29500 within 0\.1 s: it has not said where"
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
    with pytest.raises(UsageError, match="where the ranks meet: Connection reset by peer. See"):
        meet(1, torch_store)


def test_a_python_without_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(UsageError, match=r"rank 1 of 4.*no torch.*set MULTIRING_STORE and MULTIRING_SECRET"):
        torchrun.meet(place(1), Settings())


def test_a_real_store_that_is_not_there_is_told() -> None:
    pytest.importorskip("torch.distributed", reason="torchrun comes with torch, an optional dependency")
    with pytest.raises(UsageError, match=re.escape("rank 1 cannot reach torchrun's store at localhost:1,")):
        torchrun.meet(place(1, {"MASTER_PORT": "1"}), Settings(timeout=0.5))
