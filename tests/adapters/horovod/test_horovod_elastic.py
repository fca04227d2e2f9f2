"""State of the torch face that is committed and restored, and its sampler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import multiring.horovod.torch as hvd
from multiring import Communicator
from multiring.errors import PeerLostError
from tests.adapters.horovod.support import with_hvd
from tests.on_ranks import same_everywhere


@with_hvd
def test_state_is_restored(comm: Communicator) -> None:
    torch.manual_seed(comm.rank)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = hvd.elastic.TorchState(model, optimizer, batch=comm.rank)
    calls: list[int] = []
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state: Any, until: int) -> str:
        calls.append(state.batch)
        while state.batch < until:
            state.optimizer.zero_grad()
            state.model(torch.ones(1, 2)).sum().backward()
            state.optimizer.step()
            state.batch += 1
            state.commit()
            if state.batch == 2 and len(calls) == 1:
                with torch.no_grad():
                    model.weight.add_(100.0)
                hvd.allreduce(torch.ones(2 + comm.rank))
        return "done"

    assert train(state, 3) == "done"
    assert calls == [0, 2]
    assert resets == [2]
    assert float(model.weight.detach().abs().max()) < 50
    assert same_everywhere(comm, model.weight.tolist())
    assert len(optimizer.state) == 2


@with_hvd
def test_lost_ranks_are_told_of(comm: Communicator) -> None:
    @hvd.elastic.run
    def train(state: Any) -> None:
        raise hvd.HorovodInternalError("rank 1 died") from PeerLostError("rank 1 died")

    with pytest.raises(hvd.HorovodInternalError, match="does not bring up ranks in its place yet"):
        train(hvd.elastic.ObjectState(batch=0))


@with_hvd
def test_the_sampler_goes_on_where_it_was(comm: Communicator) -> None:
    sampler = hvd.elastic.ElasticSampler(range(21), shuffle=True, seed=3)
    state = hvd.elastic.TorchState(sampler=sampler, batch=0)
    own = list(sampler)
    assert len(own) == len(sampler) == 11
    everything = sorted(k for part in hvd.allgather_object(own) for k in part)
    assert set(everything) == set(range(21))
    for number in range(2):
        sampler.record_batch(number, 3)
    assert sampler.processed_num == 6
    state.commit()
    state.sync()
    assert sampler.processed_num == 12
    rest = {k for part in hvd.allgather_object(list(sampler)) for k in part}
    assert rest == set(range(21)) - sampler.state_dict()["processed_indices"]
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.processed_num, len(sampler)) == (1, 0, 11)
