"""Trainings with the extensions of `chainermn` on our communicator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiring.chainer  # before Chainer

# isort: split
import chainer
import chainermn
from chainer import functions, training
from chainer.training import extensions

from multiring import Communicator
from tests.adapters.chainer.support import bits_of, draw, make_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


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
    mn: Any, out: str, epochs: int, *, theirs: bool = False
) -> tuple[training.Trainer, _Classifier, Any]:
    """As ChainerMN's examples make it, with one line changed."""
    data = [(draw(k, 1)[0], np.int32(k % 3)) for k in range(24)]
    model = _Classifier()
    create = (
        chainermn.create_multi_node_optimizer if theirs else multiring.chainer.create_multi_node_optimizer
    )
    optimizer = create(chainer.optimizers.MomentumSGD(0.05), mn)
    optimizer.setup(model)
    train = chainermn.scatter_dataset(data if mn.rank == 0 else None, mn, shuffle=True, seed=0)
    iterator = chainer.iterators.SerialIterator(train, 4, shuffle=False)
    updater = training.StandardUpdater(iterator, optimizer)
    trainer = training.Trainer(updater, (epochs, "epoch"), out=out)
    return trainer, model, optimizer


@pytest.mark.parametrize("theirs", [False, True], ids=["ours", "chainermn's own optimizer"])
def test_a_training_as_chainermn_has_it(comm: Communicator, tmp_path: Path, theirs: bool) -> dict[str, bytes]:
    mn = multiring.chainer.create_communicator(comm)
    trainer, model, optimizer = make_trainer(mn, str(tmp_path), 2, theirs=theirs)
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
    assert (
        mn.allreduce_obj([(log["mean loss"], log["validation/main/loss"])])
        == [(log["mean loss"], log["validation/main/loss"])] * mn.size
    )
    found = bits_of(model)
    assert mn.allreduce_obj([found]) == [found] * mn.size
    return found


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
