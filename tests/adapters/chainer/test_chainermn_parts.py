"""`chainermn`: functions, links, datasets, iterators and extensions, in uses that show a wrong result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiring.chainer  # before Chainer

# isort: split
import chainer
import chainermn
from chainer import functions, links, training
from chainer.training import extensions

from multiring import Communicator
from tests.adapters.chainer.support import bits_of, draw, make_model
from tests.on_ranks import on_ranks, same_everywhere

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@on_ranks(3)
def test_differentiable_functions(comm: Communicator) -> None:
    """Forward values and gradients against what the definition says."""
    mn = multiring.chainer.create_communicator(comm)
    size, rank = mn.size, mn.rank
    dtype = np.float16
    x = chainer.Variable(np.full((2, 3), rank + 1, dtype))
    gathered = chainermn.functions.allgather(mn, x)
    weighted = sum((k + 1) * (rank + 1) * y for k, y in enumerate(gathered))
    functions.sum(weighted).backward()
    np.testing.assert_array_equal([float(y.array[0, 0]) for y in gathered], np.arange(size) + 1)
    np.testing.assert_array_equal(x.grad, (rank + 1) * sum(range(1, size + 1)))

    xs = [chainer.Variable(np.full(2, 10 * rank + k, dtype)) for k in range(size)]
    ys = chainermn.functions.alltoall(mn, xs)
    functions.sum(sum((k + 1) * y for k, y in enumerate(ys))).backward()
    np.testing.assert_array_equal([float(y.array[0]) for y in ys], 10 * np.arange(size) + rank)
    for x in xs:
        np.testing.assert_array_equal(x.grad, rank + 1)

    x = chainer.Variable(np.full(2, 5, dtype))
    y = chainermn.functions.bcast(mn, x, root=1)
    functions.sum(y * (rank + 1)).backward()
    if rank == 1:
        np.testing.assert_array_equal(x.grad, sum(range(1, size + 1)))

    x = chainer.Variable(np.full(2, rank, dtype))
    ys = chainermn.functions.gather(mn, x, root=0)
    if rank == 0:
        functions.sum(sum((k + 2) * y for k, y in enumerate(ys))).backward()
    else:
        ys.grad = np.zeros_like(ys.array)
        ys.backward()
    np.testing.assert_array_equal(x.grad, rank + 2)

    xs = [chainer.Variable(np.full(2, k, dtype)) for k in range(size)]
    y = chainermn.functions.scatter(mn, xs if rank == 0 else None, root=0)
    np.testing.assert_array_equal(y.array, rank)
    functions.sum(y * (rank + 3)).backward()
    if rank == 0:
        np.testing.assert_array_equal([float(x.grad[0]) for x in xs], np.arange(size) + 3)


def test_a_network_over_two_ranks(comm: Communicator) -> None:
    """Trains as the same network on one."""
    mn = multiring.chainer.create_communicator(comm)
    halves = [chainer.Sequential(links.Linear(*extents), functions.tanh) for extents in ((6, 5), (5, 2))]
    for number, half in enumerate(halves):
        weight = half[0].W.array
        weight[...] = np.random.default_rng(number).standard_normal(weight.shape)
    whole = chainer.Sequential(*[half.copy("copy") for half in halves])
    model = chainermn.MultiNodeChainList(comm=mn)
    model.add_link(halves[mn.rank], rank_in=None if mn.rank == 0 else 0, rank_out=1 if mn.rank == 0 else None)
    optimizers = [chainer.optimizers.SGD(0.1).setup(one) for one in (model, whole)]
    for step in range(3):
        x = draw(step).astype(np.float32)
        for network, optimizer in zip((model, whole), optimizers, strict=True):
            network.cleargrads()
            y = network(x)
            loss = y if network is model and mn.rank == 0 else functions.sum(y**2)
            loss.backward()
            optimizer.update()
    np.testing.assert_allclose(halves[mn.rank][0].W.array, whole[mn.rank][0].W.array, rtol=1e-6)


def test_multi_node_batch_normalization(comm: Communicator) -> None:
    mn = multiring.chainer.create_communicator(comm)
    whole = np.random.default_rng(0).standard_normal((4 * mn.size, 3, 2, 2)).astype(np.float32) + 2
    mine = whole[4 * mn.rank : 4 * mn.rank + 4]
    converted = chainermn.links.create_mnbn_model(chainer.Sequential(links.BatchNormalization(3)), mn)
    assert isinstance(converted[0], chainermn.links.MultiNodeBatchNormalization)
    layers = [converted, chainermn.links.MultiNodeBatchNormalization(3, mn)]
    single = links.BatchNormalization(3)
    wanted_input = chainer.Variable(whole)
    functions.sum(single(wanted_input) ** 3).backward()
    for layer in layers:
        layer.cleargrads()
        x = chainer.Variable(mine)
        functions.sum(layer(x) ** 3).backward()
        np.testing.assert_allclose(
            x.grad, wanted_input.grad[4 * mn.rank : 4 * mn.rank + 4], rtol=1e-3, atol=1e-4
        )
    np.testing.assert_allclose(converted[0].avg_mean, single.avg_mean, rtol=1e-5)


@on_ranks(3)
def test_datasets(comm: Communicator) -> None:
    mn = multiring.chainer.create_communicator(comm)
    root = mn.size - 1
    data = list(range(10)) if mn.rank == root else None
    part = chainermn.scatter_dataset(data, mn, root=root, shuffle=True, seed=3, force_equal_length=False)
    assert sorted(mn.allreduce_obj([part[k] for k in range(len(part))])) == list(range(10))
    assert len(chainermn.scatter_dataset(list(range(10)) if mn.rank == 0 else None, mn)) == -(-10 // mn.size)
    begin, end = chainermn.scatter_index(10, mn, force_equal_length=False)
    assert sum(e - b for b, e in [mn.bcast_obj((begin, end), root=r) for r in range(mn.size)]) == 10
    assert len(chainermn.datasets.create_empty_dataset(part)) == len(part)


def test_iterators(comm: Communicator) -> None:
    mn = multiring.chainer.create_communicator(comm)
    pairs = [(np.full(2, k, np.float32), np.int32(k)) for k in range(7)]
    source = chainer.iterators.SerialIterator(pairs, 3, repeat=False, shuffle=False)
    shared = chainermn.iterators.create_multi_node_iterator(source, mn)
    labels = [[int(label) for _, label in batch] for batch in shared]
    assert labels == [[0, 1, 2], [3, 4, 5], [6]]
    plain = chainer.iterators.SerialIterator(np.arange(6, dtype=np.float32), 4)
    shared = chainermn.iterators.create_multi_node_iterator(plain, mn, rank_master=1)
    batches = [next(shared) for _ in range(3)]
    assert same_everywhere(comm, batches)
    synchronised = chainermn.iterators.create_synchronized_iterator(
        chainer.iterators.SerialIterator(np.arange(20), 5), mn
    )
    batches = [[int(k) for k in next(synchronised)] for _ in range(8)]
    assert same_everywhere(comm, batches)
    assert batches[0] != [0, 1, 2, 3, 4]


class _Classifier(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.network = make_model()

    def forward(self, x: Any, t: Any) -> Any:
        y = self.network(x)
        loss = functions.softmax_cross_entropy(y, t)
        # ChainerMN's aggregator takes arrays only, unless ChainerX is built.
        chainer.report({"loss": loss.array, "accuracy": functions.accuracy(y, t)}, self)
        return loss


def make_trainer(
    mn: Any, out: str, epochs: int, create: Any = multiring.chainer.create_multi_node_optimizer
) -> tuple[training.Trainer, _Classifier, Any]:
    """As ChainerMN's examples make it, with one line changed."""
    data = [(draw(k, 1)[0], np.int32(k % 3)) for k in range(24)]
    model = _Classifier()
    optimizer = create(chainer.optimizers.MomentumSGD(0.05), mn)
    optimizer.setup(model)
    train = chainermn.scatter_dataset(data if mn.rank == 0 else None, mn, shuffle=True, seed=0)
    iterator = chainer.iterators.SerialIterator(train, 4, shuffle=False)
    updater = training.StandardUpdater(iterator, optimizer)
    trainer = training.Trainer(updater, (epochs, "epoch"), out=out)
    return trainer, model, optimizer


@pytest.mark.full
@pytest.mark.parametrize("whose", ["multiring.chainer", "chainermn"])
def test_a_training_as_chainermn_has_it(comm: Communicator, tmp_path: Path, whose: str) -> dict[str, bytes]:
    mn = multiring.chainer.create_communicator(comm)
    create = sys.modules[whose].create_multi_node_optimizer
    trainer, model, optimizer = make_trainer(mn, str(tmp_path), 2, create)
    test = [(draw(100 + k + mn.rank, 1)[0], np.int32(k % 3)) for k in range(6)]
    evaluator = extensions.Evaluator(chainer.iterators.SerialIterator(test, 3, repeat=False), model)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, mn))
    trainer.extend(chainermn.extensions.ObservationAggregator(mn, "main/loss", "mean loss"))
    trainer.extend(chainermn.extensions.AllreducePersistent(model, mn))
    trainer.extend(extensions.ExponentialShift("lr", 0.5), trigger=(1, "epoch"))
    trainer.extend(extensions.LogReport(["mean loss", "validation/main/loss"], trigger=(1, "epoch")))
    trainer.run()
    assert optimizer.lr == pytest.approx(0.05 / 4)
    log = trainer.get_extension("LogReport").log[-1]
    assert same_everywhere(comm, (log["mean loss"], log["validation/main/loss"]))
    return bits_of(model)


@pytest.mark.full
def test_the_checkpointer(comm: Communicator, tmp_path: Path) -> None:
    mn = multiring.chainer.create_communicator(comm)
    whole, wanted, _ = make_trainer(mn, f"{tmp_path}/whole", 2)
    whole.run()
    trainer, _, _ = make_trainer(mn, f"{tmp_path}/c", 1)
    keeper = chainermn.create_multi_node_checkpointer(name="job", comm=mn, path=f"{tmp_path}/kept")
    for _ in range(2):
        trainer.updater.update()
    keeper.save(trainer.updater, trainer.updater.iteration)
    trainer, model, optimizer = make_trainer(mn, f"{tmp_path}/c", 2)
    keeper = chainermn.create_multi_node_checkpointer(name="job", comm=mn, path=f"{tmp_path}/kept")
    keeper.maybe_load(trainer.updater, optimizer)
    assert trainer.updater.iteration == 2
    assert optimizer.needs_broadcast is False
    trainer.run()
    assert bits_of(model) == bits_of(wanted)
    comm.barrier()
