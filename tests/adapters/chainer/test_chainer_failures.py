"""What goes wrong inside a training loop of Chainer, what is refused, and what is left afterwards."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import numpy as np
import pytest

import multiring.chainer  # before Chainer

# isort: split
import chainer
from chainer import functions

from multiring import Communicator
from multiring.errors import AbortedError, MismatchError, UsageError
from tests.adapters.chainer.support import SMALL, Pool, assert_gradients, draw, expected, make_model, squares
from tests.support import run_job, start_job


class _Fail(chainer.Function):  # type: ignore[misc]
    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, inputs: Any, gradients: Any) -> Any:
        raise ArithmeticError("the loss has exploded")


def failing(model: Any, rank: int) -> Any:
    hidden = functions.tanh(model.middle(_Fail()(functions.tanh(model.first(draw(rank))))))
    return functions.mean(model.last(hidden) ** 2)


def fail_everywhere(comm: Communicator) -> None:
    model = make_model()
    optimizer = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD(0.0), comm, **SMALL)
    optimizer.setup(model)
    for step in range(4):
        if step in (1, 2):
            with pytest.raises(ArithmeticError, match="exploded"):
                optimizer.update(failing, model, comm.rank)
            assert all(parameter.creator is None for parameter in model.params())
            continue
        model.cleargrads()
        optimizer.backward(squares(model, comm.rank))
        assert_gradients(model, expected(comm), comm)


def fail_on_one(comm: Communicator) -> None:
    model = make_model()
    group = comm.split(0)
    assert group is not None
    optimizer = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD(0.1), group, **SMALL)
    optimizer.setup(model)
    optimizer.update(squares, model, comm.rank)
    if comm.rank == 1:
        with pytest.raises(ArithmeticError, match="exploded"):
            optimizer.update(failing, model, comm.rank)
    optimizer.update(squares, model, comm.rank)


def test_a_backward_pass_that_fails(ranks: Pool) -> None:
    """On all ranks: the next one starts afresh. On one: it is not mixed with what the others wait for."""
    ranks(2).run(fail_everywhere)
    for error in ranks(2).run_expecting_errors(fail_on_one):
        assert isinstance(error, MismatchError | AbortedError), error
        assert "gradients[" in str(error)


def refuse(comm: Communicator) -> None:
    make = multiring.chainer.create_multi_node_optimizer
    with pytest.raises(UsageError, match="no parameters"):
        make(chainer.optimizers.SGD(), comm).setup(chainer.Link())
    link = chainer.Link()
    with link.init_scope():
        link.count = chainer.Parameter(np.zeros(2, np.int32))
    with pytest.raises(UsageError, match="dtype int32 cannot be reduced"):
        make(chainer.optimizers.SGD(), comm).setup(link)
    with pytest.raises(UsageError, match="op is 'mean'"):
        make(chainer.optimizers.SGD(), comm, op="mean").setup(make_model())
    if comm.size == 1:
        return
    with pytest.raises(UsageError, match="postscale is 0"):
        make(chainer.optimizers.SGD(), comm, postscale=0.0).setup(make_model())
    model = make_model()
    optimizer = make(chainer.optimizers.SGD(), comm).setup(model)
    optimizer.update(squares, model, comm.rank)
    model.first.W.array = model.first.W.array.astype(np.float32)
    model.first.b.array = model.first.b.array.astype(np.float32)
    model.cleargrads()
    model.first.W.grad = np.ones_like(model.first.W.array)
    with pytest.raises(UsageError, match=r"'first/W' has become float32 \(8, 6\), it was float64"):
        optimizer.update()


def test_refused(ranks: Pool) -> None:
    ranks(1).run(refuse)
    ranks(2).run(refuse)


class _Inner(chainer.Function):  # type: ignore[misc]
    """Runs a backward pass of its own inside of the outer one, over a layer that both use."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, inputs: Any, gradients: Any) -> Any:
        with chainer.force_backprop_mode():
            functions.sum(self._layer(inputs[0])).backward()
        return gradients


def nested(comm: Communicator) -> None:
    """The layer's gradient comes twice: refused; after the pass there is one, which Chainer has chosen."""
    model = make_model()
    group = comm.split(0)
    make = multiring.chainer.create_multi_node_optimizer
    optimizer = make(chainer.optimizers.SGD(0.0), group, **SMALL).setup(model)

    def loss(model: Any, rank: int) -> Any:
        x = functions.tanh(model.first(draw(rank)))
        return functions.mean(model.last(model.middle(_Inner(model.last)(x))) ** 2)

    with pytest.raises(UsageError, match=r"'last/W' received a second gradient .*overlap=False"):
        optimizer.update(loss, model, comm.rank)
    optimizer.overlap = False
    model.cleargrads()
    optimizer.backward(loss(model, comm.rank))
    assert_gradients(model, expected(comm, loss), comm)


def test_a_backward_pass_inside_of_another(ranks: Pool) -> None:
    ranks(2).run(nested)


def differ(comm: Communicator, what: str) -> None:
    model, options = make_model(), {}
    if comm.rank == 1:
        if what == "shape":
            model = make_model(inputs=5)
        elif what == "options":
            options["bucket_bytes"] = 1 << 20
        else:
            del model.spare
    optimizer = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD(), comm, **options)
    optimizer.setup(model)


@pytest.mark.parametrize(
    ("what", "text"),
    [("shape", r"'first/W'.*\(8, 6\).*\(8, 5\)"), ("options", "bucket_bytes"), ("missing", "'spare/W'")],
)
def test_models_that_differ(ranks: Pool, what: str, text: str) -> None:
    for error in ranks(2).run_expecting_errors(differ, what):
        assert isinstance(error, MismatchError)
        assert re.search(text, str(error)), error


def drop_everything(comm: Communicator) -> None:
    model = make_model()
    optimizer: Any = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD(), comm, **SMALL)
    optimizer.setup(model)
    for _ in range(2):
        optimizer.update(squares, model, comm.rank)
    dropped = [weakref.ref(model), weakref.ref(optimizer._slots.reducer._memory)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in dropped] == [None, None]


def test_a_dropped_optimizer_releases_its_buckets(ranks: Pool) -> None:
    ranks(2).run(drop_everything)


LAST_STEP = """
import sys, time
import numpy as np
import multiring.chainer
import chainer
from chainer import functions, links

def train():
    comm = multiring.chainer.create_communicator()
    model = chainer.Sequential(*[links.Linear(64, 64) for _ in range(8)])
    optimizer = multiring.chainer.create_multi_node_optimizer(
        chainer.optimizers.SGD(), comm, double_buffering=True, bucket_bytes=16384, first_bucket_bytes=4096
    )
    optimizer.setup(model)
    for step in range(4):
        if step == 3 and comm.rank == 1:
            comm.plain.recv(0)
            time.sleep(0.5)  # rank 0 is at its end by then; were it not, there would be less to see
        optimizer.update(lambda: functions.sum(model(np.ones((8, 64), np.float32))))
    if comm.rank == 0:
        comm.plain.send(np.zeros(1), 1)
    return optimizer

multiring.init()
{ending}
"""


@pytest.mark.parametrize(
    "ending",
    ["train()", "train(); multiring.shutdown()", "kept = train()", "kept = train(); multiring.shutdown()"],
)
def test_gradients_of_the_last_step_are_let_arrive(ending: str) -> None:
    """With double buffering nobody waits for them, but others may still be sending theirs."""
    finished = run_job(2, LAST_STEP.format(ending=ending))
    assert finished.returncode == 0, finished.stderr


FORKED = """
import os, sys
import numpy as np
import multiring.chainer
import chainer
from chainer import functions, links

multiring.init()
comm = multiring.chainer.create_communicator()
# One layer in the middle of the bucket has no gradient, so they arrive in another order than was expected.
np.random.seed(0)
model = chainer.Sequential(*[links.Linear(*extents) for extents in ((8, 8), (24, 24), (8, 16), (16, 4))])
optimizer = multiring.chainer.create_multi_node_optimizer(
    chainer.optimizers.SGD(0.01), comm, double_buffering=True
)
optimizer.setup(model)
for step in range(6):
    x = np.random.default_rng(10 * step + comm.rank).standard_normal((4, 8)).astype(np.float32)
    optimizer.update(lambda: functions.sum(model[3](model[2](model[0](x))) ** 2))
    if step == 1:  # what is on its way is the first round of its buckets
        optimizer._sent.reducer.await_sent(60.0)
        if {forks} and os.fork() == 0:
            {ending}
            os._exit(0)
        if {forks}:
            os.wait()
print(comm.rank, [float(each.array.sum()) for each in model.params()])
"""


@pytest.mark.parametrize("ending", ["del optimizer", "optimizer.close()"])
def test_a_forked_child_leaves_the_gradients_of_its_parent_alone(ending: str) -> None:
    """Though they have arrived when it is forked."""
    alone = run_job(2, FORKED.format(forks=False, ending="pass"))
    guarded = f"try: {ending}\n            except Exception: pass"
    forked = run_job(2, FORKED.format(forks=True, ending=guarded))
    assert alone.returncode == forked.returncode == 0, forked.stderr
    assert sorted(alone.stdout.splitlines()) == sorted(forked.stdout.splitlines())


LOOP = """
import os, signal, time
import multiring.chainer
import chainer, numpy as np
from chainer import functions, links

multiring.init()
comm = multiring.chainer.create_communicator()
model = chainer.Sequential(*[links.Linear(64, 64) for _ in range(4)])
optimizer = multiring.chainer.create_multi_node_optimizer(
    chainer.optimizers.SGD(), comm, bucket_bytes=1 << 14, first_bucket_bytes=1 << 12
)
optimizer.setup(model)
steps = 0

class Trouble(chainer.Function):
    def forward(self, inputs):
        return inputs

    def backward(self, inputs, gradients):
        if comm.rank == 1 and steps == 3:
            comm.plain.send(np.zeros(1), 0)  # rank 0 measures from here
            {trouble}
        return gradients

def loss():
    x = Trouble()(model[1](model[0](np.ones((8, 64), np.float32))))
    return functions.sum(model[3](model[2](x)))

start = None
try:
    while True:
        if comm.rank == 0 and steps == 3:
            comm.plain.recv(1)
            start = time.monotonic()
        optimizer.update(loss)
        steps += 1
except multiring.MultiringError as error:
    seconds = time.monotonic() - start if comm.rank == 0 else 0.0
    path = os.path.join(os.environ["TEST_DIRECTORY"], "seen" + str(comm.rank))
    with open(path + ".new", "w") as file:
        file.write(f"{{type(error).__name__}} {{seconds:.3f}} {{error}}")
    os.rename(path + ".new", path)
    raise
"""


def test_a_killed_rank_is_reported_within_two_seconds() -> None:
    with start_job(2, LOOP.format(trouble="os.kill(os.getpid(), signal.SIGKILL)")) as job:
        name, seconds, text = job.wait_for_file("seen0", timeout=60.0).split(" ", 2)
        assert name == "PeerLostError", text
        assert float(seconds) < 2.0
        assert "rank 1" in text
        assert "gradients[" in text
        job.finish()
        job.assert_nothing_left()


def test_a_mismatch_in_a_training_loop_is_reported_on_every_rank() -> None:
    """One rank sends something else on the communicator of the gradients."""
    trouble = "optimizer._slots.reducer.comm.allreduce(np.zeros(3), name='something else')"
    with start_job(2, LOOP.format(trouble=trouble)) as job:
        for rank in range(2):
            name, _, text = job.wait_for_file(f"seen{rank}", timeout=60.0).split(" ", 2)
            assert name in ("MismatchError", "AbortedError"), text
            assert "something else" in text
            assert "gradients[" in text
        job.finish()
        job.assert_nothing_left()
