"""The solver: Caffe's training loop, with pycaffe's Python shape."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from multiring.errors import UsageError
from multiring.models.caffe.blob import Array, decimal
from multiring.models.caffe.device import CPU, chosen_device, device_of_net, find_device, is_set
from multiring.models.caffe.layer import Context, draw_seed, process_shard
from multiring.models.caffe.net import DTYPES, Net
from multiring.models.caffe.nets import test_nets, train_net
from multiring.models.caffe.prototxt import Location, read
from multiring.models.caffe.schema import SolverParameter
from multiring.models.caffe.snapshots import State, read_state, write_state
from multiring.models.caffe.updates import RULES, Policy, Rule, clip, decay
from multiring.models.errors import CheckpointError

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["Action", "Solver"]

Action = Literal["none", "snapshot", "stop"]
LOG = logging.getLogger("multiring.caffe")
_GPU, _HDF5 = 1, 0


class Solver:
    """A solver as pycaffe has it; the type of its update rule is that of the prototxt.

    An iteration is: clear the gradients, test, `on_start`, `iter_size` times forward and backward,
    `on_gradients_ready`, update, `iter` + 1, snapshot. Messages go to the logger "multiring.caffe".

    Attributes:
        param: The `SolverParameter`.
        net: The net that is trained.
        test_nets: The nets that test, which share its blobs.
        iter: Updates done.
        is_root: Whether this rank logs and writes snapshots.
        action: Asked after each iteration whether to go on, to take a snapshot, or to stop.
    """

    type: str | None = None  # None for that of the prototxt

    def __init__(
        self,
        solver_file: str | Path,
        *,
        dtype: str = "float32",
        shard: tuple[int, int] | None = None,
        seed: int | None = None,
        sync_batch_norm_comm: Communicator | None = None,
        device: str | None = None,
    ) -> None:
        """Build the solver and its nets.

        Args:
            solver_file: Path of the prototxt. Nets that it names are looked for from the working directory,
                then beside it.
            dtype: "float32" or "float64".
            shard: This rank and the number of ranks: data layers in training give rank r of n the samples
                r, r + n, ...; only rank 0 logs and writes snapshots. By default what `set_solver_rank` and
                `set_solver_count` have said, or one rank.
            seed: Used where the prototxt has no `random_seed`; drawn by default, see `set_random_seed`. Give
                all ranks the same: it decides the order of shuffled data, of which each takes its part.
            sync_batch_norm_comm: See `Net`.
            device: What Torch is to compute on, "cpu" or "cuda:0"; by default what `set_mode_gpu` or
                `set_mode_cpu` have said, else what the prototxt says by solver_mode and device_id.

        Raises:
            PrototxtError: A file is wrong or asks for what is not supported; names file and line.
        """
        self.param, location = read(solver_file, SolverParameter)
        shard = process_shard() if shard is None else shard
        self.is_root = shard[0] == 0
        self._location = location
        self._check(location)
        self._policy = Policy(self.param, location)
        if self.param.random_seed >= 0:
            seed = self.param.random_seed
        elif seed is None:
            seed = draw_seed()
        context = Context(
            0,
            DTYPES[dtype],
            torch.Generator().manual_seed(seed),
            seed=seed,
            shard=shard,
            comm=sync_batch_norm_comm,
            device=self._device(location) if device is None else device_of_net(device),
        )
        self.net: Net = train_net(self.param, location, context)
        self.test_nets: list[Net] = test_nets(self.param, location, context)
        for net in self.test_nets:
            net.share_with(self.net)
        self.iter = 0
        self.action: Callable[[], Action] = lambda: "none"
        self.rule: Rule = self.make_rule()
        self._callbacks: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self._stopped = False
        self._smoothing: deque[float] = deque(maxlen=self.param.average_loss)
        self._displayed = (0, time.perf_counter())
        for path in self.param.weights:
            self.net.copy_from(path)

    def add_callback(self, on_start: Callable[[], None], on_gradients_ready: Callable[[], None]) -> None:
        """Have `on_start` called before the first forward pass of every iteration and `on_gradients_ready`
        between the last backward pass and the update."""
        self._callbacks.append((on_start, on_gradients_ready))

    def step(self, iterations: int) -> None:
        """Train for so many iterations, or until `action` says to stop."""
        end = self.iter + iterations
        self._smoothing.clear()
        self._displayed = (self.iter, time.perf_counter())
        while self.iter < end:
            self.net.clear_param_diffs()
            interval = self.param.test_interval
            if interval and self.iter % interval == 0 and (self.iter or self.param.test_initialization):
                self.test_all()
            for on_start, _ in self._callbacks:
                on_start()
            self._display(self._accumulate())
            for _, on_gradients_ready in self._callbacks:
                on_gradients_ready()
            self.apply_update()
            action = self.action()
            if (self.param.snapshot and self.iter % self.param.snapshot == 0) or action == "snapshot":
                self.snapshot()
            if action == "stop":
                self._stopped = True
                break

    def solve(self, resume_file: str | Path | None = None) -> None:
        """Train up to `max_iter`, as the command `caffe train` does.

        Args:
            resume_file: A `.solverstate` to continue from.
        """
        self._log(f"Solving {self.net.name}")
        self._log(f"Learning Rate Policy: {self.param.lr_policy}")
        self._stopped = False
        if resume_file is not None:
            self._log(f"Restoring previous solver status from {resume_file}")
            self.restore(resume_file)
        self.step(self.param.max_iter - self.iter)
        interval = self.param.snapshot
        if self.param.snapshot_after_train and (not interval or self.iter % interval != 0):
            self.snapshot()
        if self._stopped:
            self._log("Optimization stopped early.")
            return
        if self.param.display and self.iter % self.param.display == 0:
            self._smoothing.append(self.net.forward_from_to(0, len(self.net.layers) - 1))
            self._log(f"Iteration {self.iter}, loss = {self._smoothed():g}")
        if self.param.test_interval and self.iter % self.param.test_interval == 0:
            self.test_all()
        self._log("Optimization Done.")

    @property
    def history(self) -> list[Array]:
        """The arrays of the update rule, writable, in the order in which snapshots have them. pycaffe has no
        such thing."""
        return [blob.data for blob in self.rule.history]

    @property
    def lr(self) -> float:
        """Learning rate of the next update, as pycaffe has it; reading it takes no step of the policy."""
        return self.learning_rate()

    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return self._policy.rate(self.iter)

    def apply_update(self) -> None:
        """Change the weights by their gradients, which become the steps; counts the iteration."""
        rate = self.learning_rate()
        if self._policy.advance(self.iter):
            self._log(f"MultiStep Status: Iteration {self.iter}, step = {self._policy.current_step}")
        if self.param.display and self.iter % self.param.display == 0:
            self._log(f"Iteration {self.iter}, lr = {rate:g}")
        with torch.no_grad():
            gradients = [learnable.blob.gradient for learnable in self.net.learnable]
            if done := clip(gradients, decimal(self.param.clip_gradients)):
                self._log(f"Gradient clipping: {done}")
            for number, learnable in enumerate(self.net.learnable):
                if learnable.lr_mult == 0:
                    continue
                gradient = learnable.blob.gradient
                if self.param.iter_size > 1:
                    gradient.mul_(1.0 / self.param.iter_size)
                factor = decimal(self.param.weight_decay) * learnable.decay_mult
                decay(learnable.blob.tensor, gradient, factor, self.param.regularization_type)
                self.rule.step(number, gradient, rate * learnable.lr_mult, self.iter)
                learnable.blob.tensor.sub_(gradient)  # which a rule of the program's may have looked at
        self.iter += 1

    def test_all(self) -> list[dict[str, Array]]:
        """Run every test net; its outputs, averaged over `test_iter` batches, by name."""
        return [self._test(number) for number in range(len(self.test_nets))]

    def snapshot(self) -> Path | None:
        """Write `<snapshot_prefix>_iter_<iter>.caffemodel` and `.solverstate`; the latter's path.

        Only the root does; others return None. Each file is complete or not there.
        """
        if not self.is_root:
            return None
        base = f"{self.param.snapshot_prefix}_iter_{self.iter}"
        self._log(f"Snapshotting to binary proto file {base}.caffemodel")
        self.net.save(f"{base}.caffemodel")
        self._log(f"Snapshotting solver state to binary proto file {base}.solverstate")
        path = Path(f"{base}.solverstate")
        write_state(path, State(self.iter, self._policy.current_step, f"{base}.caffemodel", self.history))
        return path

    def restore(self, path: str | Path) -> None:
        """Go on from a `.solverstate` and the `.caffemodel` that it names.

        Raises:
            CheckpointError: A file cannot be read, or is of another solver.
        """
        path = Path(path)
        if path.suffix == ".h5":
            raise CheckpointError(f"{path}: HDF5 snapshots are not read; take binary ones")
        state = read_state(path)
        shapes = [blob.shape for blob in self.rule.history]
        if [array.shape for array in state.history] != shapes:
            raise CheckpointError(
                f"{path} holds {len(state.history)} arrays of history; this solver has {len(shapes)} of the "
                "shapes of its net: give the prototxt that it was trained with"
            )
        if state.learned_net:
            model = Path(state.learned_net)
            self.net.copy_from(model if model.exists() else path.with_name(model.name))
        for mine, found in zip(self.rule.history, state.history, strict=True):
            mine.data[...] = found
        self.iter, self._policy.current_step = state.iteration, state.current_step
        self.net.seek(self.iter * self.param.iter_size)

    def _check(self, location: Location) -> None:
        param = self.param
        if param.iter_size < 1 or param.average_loss < 1:
            raise location.error(
                "iter_size and average_loss have to be at least 1",
                "iter_size" if param.iter_size < 1 else "average_loss",
            )
        if param.regularization_type not in ("L1", "L2"):
            raise location.error(
                f"regularization_type {param.regularization_type!r} is unknown; choose L1 or L2",
                "regularization_type",
            )
        if param.snapshot_format == _HDF5:
            raise location.error("snapshot_format: HDF5 is not supported", "snapshot_format")
        if param.snapshot_diff:
            raise location.error("snapshot_diff is not supported", "snapshot_diff")
        if not param.snapshot_prefix:
            param.snapshot_prefix = os.path.splitext(location.file)[0]  # as newer Caffes do
        elif os.path.isdir(param.snapshot_prefix):
            param.snapshot_prefix = os.path.join(param.snapshot_prefix, Path(location.file).stem)
        directory = Path(param.snapshot_prefix).parent
        if (param.snapshot or param.snapshot_after_train) and not os.access(directory, os.W_OK):
            raise location.error(f"cannot write snapshots to {directory}: does it exist?", "snapshot_prefix")

    def _device(self, location: Location) -> torch.device:
        """What is to compute. Prototxt files of others say GPU as a rule, and are of use without one."""
        param = self.param
        if (chosen := chosen_device()) is not None:
            return chosen
        if not param.HasField("solver_mode") or param.solver_mode != _GPU:
            return CPU
        if not torch.cuda.is_available():
            self._log(f"{location.file}: solver_mode: GPU, but Torch sees none; computing on the CPU")
            return CPU
        try:
            return find_device(param.device_id if param.HasField("device_id") and not is_set() else None)
        except UsageError as error:
            raise location.error(str(error), "device_id") from error

    def make_rule(self) -> Rule:
        """The update rule; a subclass may bring one of its own."""
        kind = self.type or str(self.param.type)
        if kind not in RULES:
            raise self._location.error(
                f"solver type {kind!r} is not supported; choose one of {', '.join(RULES)}", "type"
            )
        if kind in ("AdaGrad", "RMSProp") and self.param.momentum:
            raise self._location.error(f"momentum cannot be used with {kind}", "momentum")
        if kind == "RMSProp" and not 0 <= self.param.rms_decay < 1:
            raise self._location.error("rms_decay has to be at least 0 and less than 1", "rms_decay")
        if kind == "Nesterov" and not self.param.momentum:
            self._log("Nesterov without momentum is plain gradient descent")
        return RULES[kind](self.param, self.net.learnable)

    def _accumulate(self) -> float:
        """Forward and backward `iter_size` times; the mean loss."""
        last = len(self.net.layers) - 1
        loss = 0.0
        for _ in range(self.param.iter_size):
            loss += self.net.forward_from_to(0, last)
            self.net.backward_from_to(last, 0)
        return loss / float(self.param.iter_size)

    def _smoothed(self) -> float:
        return sum(self._smoothing) / len(self._smoothing) if self._smoothing else math.nan

    def _display(self, loss: float) -> None:
        self._smoothing.append(loss)
        if not self.param.display or self.iter % self.param.display:
            return
        now, (iteration, then) = time.perf_counter(), self._displayed
        elapsed, self._displayed = now - then, (self.iter, now)
        speed = (self.iter - iteration) / elapsed if elapsed else 0.0
        self._log(
            f"Iteration {self.iter} ({speed:g} iter/s, {elapsed:g}s/{self.param.display} iters), "
            f"loss = {self._smoothed():g}"
        )
        outputs = {name: self.net.blobs[name].data for name in self.net.outputs}
        self._log_outputs("Train", self.net, outputs)

    def _test(self, number: int) -> dict[str, Array]:
        net, count = self.test_nets[number], self.param.test_iter[number]
        self._log(f"Iteration {self.iter}, Testing net (#{number})")
        net.seek(0)
        sums: dict[str, Array] = {}
        loss = 0.0
        for _ in range(count):
            loss += net.forward_from_to(0, len(net.layers) - 1)
            for name in net.outputs:
                value = net.blobs[name].data
                sums[name] = sums[name] + value if name in sums else value.copy()
        means = {name: value / count for name, value in sums.items()}
        if self.param.test_compute_loss:
            self._log(f"Test loss: {loss / count:g}")
        self._log_outputs("Test", net, means)
        return means

    def _log_outputs(self, which: str, net: Net, outputs: dict[str, Array]) -> None:
        number = 0
        for name, values in outputs.items():
            weight = net.blob_loss_weights[name]
            for value in values.reshape(-1):
                part = f" (* {weight:g} = {weight * value:g} loss)" if weight else ""
                self._log(f"    {which} net output #{number}: {name} = {value:g}{part}")
                number += 1

    def _log(self, text: str) -> None:
        if self.is_root:
            LOG.info(text, stacklevel=2)
