"""State of PyTorch that is committed and restored, in jobs that lose no rank."""

from __future__ import annotations

from typing import Any

import torch

import multiring.horovod.torch as hvd
from multiring import Communicator
from multiring.errors import PeerLostError
from multiring.horovod.torch import handles
from multiring.horovod.torch.elastic import state
from tests.adapters.horovod.support import refused, with_hvd
from tests.adapters.horovod.test_horovod_optimizer import sgd, take_step, values
from tests.on_ranks import same_everywhere


@with_hvd()
def test_state_is_restored(comm: Communicator) -> None:
    torch.manual_seed(comm.rank)
    model = torch.nn.Linear(2, 2)
    optimizer = sgd(model, momentum=0.9)
    optimizer_over_ranks = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    found = {"best": 1.0 + comm.rank}
    options = {"scheduler": scheduler, "found": found, "batch": comm.rank}
    state: Any = hvd.elastic.TorchState(model, optimizer_over_ranks, **options)
    assert state.scheduler is scheduler
    assert state.found is found
    calls: list[int] = []
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state: Any, until: int) -> str:
        calls.append(state.batch)
        while state.batch < until:
            state.optimizer.zero_grad()
            state.model(torch.ones(1, 2)).sum().backward()
            if state.batch == 1 and len(calls) == 1:  # between backward and step
                hvd.allreduce(torch.ones(2 + comm.rank))
            state.optimizer.step()
            state.scheduler.step()
            state.batch += 1
            state.commit()
            if state.batch == 2 and len(calls) == 2:
                with torch.no_grad():
                    model.weight.add_(100.0)
                hvd.allreduce(torch.ones(2 + comm.rank))
        return "done"

    assert train(state, 3) == "done"
    assert calls == [0, 1, 2]
    assert resets == [2, 2]
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8
    assert state.found == {"best": 1.0}
    assert float(model.weight.detach().abs().max()) < 50
    assert same_everywhere(comm, values(model))
    assert len(optimizer.state) == 2

    check_updates()

    @hvd.elastic.run
    def lose(state: Any) -> None:
        raise hvd.HorovodInternalError("rank 1 died") from PeerLostError("rank 1 died")

    text = "does not bring up ranks in its place yet"
    refused(hvd.HorovodInternalError, {text: lambda: lose(hvd.elastic.ObjectState(batch=0))})


def check_updates() -> None:
    """After a change of hosts the function goes on; where hosts were only removed (1), it is not given the
    state of rank 0 again."""
    updates = iter([1, 2])
    seen: list[int] = []

    class Counted(hvd.elastic.ObjectState):
        syncs = 0

        def sync(self) -> None:
            self.syncs += 1
            super().sync()

    @hvd.elastic.run
    def go_on(state: Any) -> list[int]:
        seen.append(state.count)
        if kind := next(updates, 0):
            state.count += 1
            state.on_hosts_updated(float(kind), kind)
            state.check_host_updates()
        return seen

    counted = Counted(count=0)
    assert go_on(counted) == [0, 1, 2]
    assert counted.syncs == 2


@with_hvd()
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


@with_hvd()
def test_leaving_between_backward_and_step(comm: Communicator) -> None:
    """The gradients are not reduced, so no step is made; the next one is."""
    for op in (hvd.Average, hvd.Sum):
        layer = torch.nn.Embedding(3, 2, sparse=True)
        for model, inputs in ((torch.nn.Linear(2, 2), torch.ones(1, 2)), (layer, torch.tensor([comm.rank]))):
            hvd.broadcast_parameters(model.state_dict(), 0)
            before = values(model)
            optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), op=op)
            model(inputs).sum().backward()
            hvd.shutdown()
            hvd.init(process_sets="dynamic")
            refused(hvd.HorovodInternalError, {r"hvd.shutdown\(\) was called before": optimizer.step})
            assert values(model) == before
            take_step(optimizer, model(inputs).sum())
            assert values(model) != before
            assert same_everywhere(comm, values(model))


@with_hvd()
def test_loading_between_backward_and_step(comm: Communicator) -> None:
    """Reductions in progress write to memory that no gradient has any more; no handle is left."""
    layer = torch.nn.Embedding(3, 2, sparse=True)
    for model, inputs in ((torch.nn.Linear(2, 2), torch.ones(1, 2)), (layer, torch.tensor([comm.rank]))):
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer: Any = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        saved = optimizer.state_dict()
        model(inputs).sum().backward()
        assert handles._started
        optimizer.load_state_dict(saved)
        assert not handles._started
        assert all(parameter.grad is None for parameter in model.parameters())
        hvd.barrier()
        take_step(optimizer, model(inputs).sum())
        assert same_everywhere(comm, values(model))


@with_hvd()
def test_a_group_of_which_a_gradient_is_refused(comm: Communicator) -> None:
    """The other groups are waited for, and the next step is made."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    hvd.broadcast_parameters(model.state_dict(), 0)
    groups = [list(layer.parameters()) for layer in model]
    optimizer: Any = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), groups=groups)
    operations: Any = hvd.global_process_set.operations()
    submit = operations.submit

    def submit_but_one(request: Any, start: Any) -> Any:
        if request.name.endswith("2of2") and not refusals:
            refusals.append(request.name)
            raise ValueError("it is in flight")
        return submit(request, start)

    refusals: list[str] = []
    operations.submit = submit_but_one
    model(torch.ones(1, 2)).sum().backward()
    refused(ValueError, {"in flight": optimizer.step})
    assert not handles._started
    take_step(optimizer, model(torch.ones(1, 2)).sum())


@with_hvd()
def test_handlers_of_a_program(comm: Communicator) -> None:
    """A registry says how values of a type are saved and synchronised."""

    class Counter:
        def __init__(self) -> None:
            self.count = comm.rank + 1

    class Handler(state.StateHandler):
        def save(self) -> None:
            self._saved = self.value.count

        def restore(self) -> None:
            self.value.count = self._saved

        def sync(self) -> None:
            self.value.count = int(hvd.allreduce(torch.tensor([self.value.count]), op=hvd.Sum).item())
            self.save()

    before = state.get_handler_registry()
    state.set_handler_registry([(Counter, Handler), *before])
    try:
        whole = hvd.elastic.TorchState(counter=Counter(), model=torch.nn.Linear(1, 1))
    finally:
        state.set_handler_registry(before)
    whole.sync()
    assert whole.counter.count == 3
    whole.counter.count = 9
    whole.restore()
    assert whole.counter.count == 3
    whole.counter = Counter()
    assert whole.counter.count == comm.rank + 1
