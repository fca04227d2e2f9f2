"""Environments in which a cluster's service starts the processes, and names the hosts of the job."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from multiring.errors import UsageError
from tests.python.rendezvous.detected import detect, numbers


def tf_config(kind: str, index: int, **cluster: list[str]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_chief_and_workers_of_tf_config_are_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cluster = {"chief": ["a:2222"], "worker": ["b:2222", "a:2223"], "ps": ["c:1"]}
    tasks = [("chief", 0), ("worker", 0), ("worker", 1)]
    places = [detect(tf_config(*task, **cluster)) for task in tasks]
    assert [numbers(place) for place in places] == [
        (0, 3, 0, 2, 0, 2),
        (1, 3, 0, 1, 1, 2),
        (2, 3, 1, 2, 0, 2),
    ]
    assert {(place.store_url, place.secret) for place in places} == {("tcp://a:2222", places[0].secret)}
    pools = {"workerpool0": ["a:1"], "workerpool1": ["b:1", "c:1"]}
    assert numbers(detect(tf_config("workerpool1", 1, **pools))) == (2, 3, 0, 1, 2, 3)
    monkeypatch.setenv("HOME", "/nonexistent")  # one process needs no secret
    for kind in ("worker", "workerpool0", "trainer"):
        assert detect(tf_config(kind, 0, **{kind: ["a:1"]})).launcher == "none"
    monkeypatch.setenv("HOME", str(tmp_path))
    for environ in (tf_config("evaluator", 0, **cluster), {"TF_CONFIG": "{}"}):
        assert detect(environ).launcher == "none"
    for environ, text in (
        (tf_config("ps", 0, **cluster), "this process is ps 0"),
        (tf_config("worker", 7, **cluster), "rank 8 of 3"),
        (tf_config("worker", 0, worker=["a", "b"]), "expected a cluster of addresses"),
        ({"TF_CONFIG": '{"cluster": 3, "task": 4}'}, "expected a cluster of addresses"),
    ):
        with pytest.raises(UsageError, match=text):
            detect(environ)


def test_hosts_of_sagemaker_have_a_rank_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    hosts = {"SM_HOSTS": '["algo-2", "algo-1"]', "TRAINING_JOB_NAME": "job-1"}
    first, second = (detect(hosts | {"SM_CURRENT_HOST": f"algo-{k}"}) for k in (1, 2))
    assert [numbers(first), numbers(second)] == [(0, 2, 0, 1, 0, 2), (1, 2, 0, 1, 1, 2)]
    assert re.fullmatch(r"tcp://algo-1:\d{5}", first.store_url)
    assert (first.store_url, first.secret) == (second.store_url, second.secret)
    for alone in ({"SM_HOSTS": '["algo-1"]'}, {"SM_HOSTS": "x"}, {}):
        assert detect(alone | {"SM_CURRENT_HOST": "algo-1"}).launcher == "none"
