"""TensorFlow's own way: tf.distribute.MultiWorkerMirroredStrategy, its collectives over gRPC."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from multiring import Communicator
from multiring.errors import UsageError
from multiring.models.data.loader import Batch
from multiring.models.nets.resnet_spec import ResNetSpec
from multiring.models.nets.resnet_tensorflow import TensorFlowResNet, load_weights
from multiring.models.nets.weights import initial_weights
from multiring.models.trainers.recipe import Recipe

__all__ = ["TensorFlowMwmsTrainer", "make_trainer"]

Tensor = Any


class TensorFlowMwmsTrainer:
    """The training of `TensorFlowTrainer`, its gradients added up by MultiWorkerMirroredStrategy.

    One replica per rank. Weights start alike and every rank updates its own, so the strategy has to carry
    nothing but gradients, in packs of 25 MiB. Batch normalisation is over each rank's part.

    Args:
        spec: The network.
        recipe: Optimizer settings; the learning rate comes with each step.
        comm: The ranks; they become the workers of a cluster on free ports of the loopback interface.
        seed: Seed of the weights, the same on every rank.
        dtype: "float32" or "float64".

    Raises:
        UsageError: TensorFlow has computed in this process before: it joins a cluster only at the very start.
    """

    def __init__(
        self, spec: ResNetSpec, recipe: Recipe, comm: Communicator, *, seed: int, dtype: str = "float32"
    ) -> None:
        self._size, self._recipe = comm.size, recipe
        self._dtype = {"float32": tf.float32, "float64": tf.float64}[dtype]
        self._strategy = _join(comm)
        self.plain = TensorFlowResNet(spec, self._dtype)
        """The network."""
        load_weights(self.plain, initial_weights(spec, seed, dtype=dtype))
        parameters = self.plain.parameters.values()
        self._momentum = [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in parameters]
        self._decays = [parameter.decays for parameter in spec.parameters()]
        self._step = tf.function(self._train, autograph=False, reduce_retracing=True, jit_compile=False)

    def step(self, batch: Batch, lr: float) -> float:
        """Train on one global batch; returns the sum of the losses of this rank's part."""
        images, labels = tf.constant(batch.images, self._dtype), tf.constant(batch.labels)
        scale = tf.constant(1.0 / batch.global_count, self._dtype)
        return float(self._step(images, labels, scale, tf.constant(lr, self._dtype)))

    def close(self) -> None:
        """Nothing to do: the cluster ends with the processes."""

    def _train(self, images: Tensor, labels: Tensor, scale: Tensor, lr: Tensor) -> Tensor:
        return self._strategy.run(self._replica, (images, labels, scale, lr))

    def _replica(self, images: Tensor, labels: Tensor, scale: Tensor, lr: Tensor) -> Tensor:
        parameters = list(self.plain.parameters.values())
        with tf.GradientTape() as tape:
            scores = self.plain(images, training=True)
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))
            scaled = loss * scale
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=25 << 20)
        context = tf.distribute.get_replica_context()
        self._update(context.all_reduce("sum", tape.gradient(scaled, parameters), options), lr)
        return loss

    def _update(self, gradients: Sequence[Tensor], lr: Tensor) -> None:
        for variable, momentum, gradient, decays in zip(
            self.plain.parameters.values(), self._momentum, gradients, self._decays, strict=True
        ):
            if decays and self._recipe.weight_decay:
                gradient = gradient + self._recipe.weight_decay * variable
            momentum.assign(self._recipe.momentum * momentum + gradient)
            step = gradient + self._recipe.momentum * momentum if self._recipe.nesterov else momentum
            variable.assign_sub(lr * step)


def make_trainer(
    spec: ResNetSpec, recipe: Recipe, comm: Communicator, *, seed: int, dtype: str = "float32"
) -> TensorFlowMwmsTrainer:
    """This rank's trainer; see `TensorFlowMwmsTrainer`. Collective."""
    return TensorFlowMwmsTrainer(spec, recipe, comm, seed=seed, dtype=dtype)


def _join(comm: Communicator) -> Any:
    """The strategy of a cluster of all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    workers = comm.allgather_object(address)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": workers}), task_type="worker", task_id=comm.rank, rpc_layer="grpc"
    )
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    except RuntimeError as error:
        raise UsageError(
            f"rank {comm.rank}: TensorFlow cannot join a cluster any more ({error}); make this trainer "
            f"first, in a "
            "process of its own"
        ) from error
