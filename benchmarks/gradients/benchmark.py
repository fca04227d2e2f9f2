"""`multiring bench gradients`: what it costs to keep gradients in step, in one framework.

Without `--framework` it is Torch's, beside its DistributedDataParallel (`torch_gradients`); with it, what the
adapter adds to the core's own time (`adapter_gradients`). No framework is loaded before it is chosen.
"""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from multiring import Communicator
from multiring.benchmarks.results import Results
from multiring.commands.argument_types import number_of
from multiring.commands.frameworks import FRAMEWORKS
from multiring.errors import UsageError
from multiring.models.frameworks import find_framework, load_trainer

__all__ = ["add_arguments", "run"]

_EPILOG = """\
how it is measured:
  Every rank runs on a processor of its own, its framework with one thread. All kinds of step are measured in
  the same run, in turns; a turn lasts from when the last rank begins to when the last rank is done. Figures
  are medians, with the tenth and ninetieth percentile.

without --framework (Torch, beside hvd.DistributedOptimizer, DistributedDataParallel and, with --fsdp, FSDP2,
over multiring's process group and over Gloo):
  for ResNet-50's gradients (161 arrays, 102 MB of float32):
  step           time of a step: gradients are written, and reduced where the kind does that
  communication  what the step takes longer than without synchronisation
  bandwidth      bytes of the gradients over the communication
  memory         what the rank takes more than without synchronisation, the gradients themselves counted in
                 both; its share of shared memory included (the kernel's proportional set size)
  peak           the same at its highest, in the first 3 steps
  for the training of ResNet-20 (batch 32 a rank, images of 32 x 32):
  images/s       of all ranks together
  efficiency     images/s over that without synchronisation
  for the rest of the training state of ResNet-20 and ResNet-50:
  a step         buffers of rank 0 taken over by all ranks, as after each reduction by default
  a check        parameters and buffers compared over ranks; of each step: that over the steps between two

with --framework F:
  for ResNet-50's gradients, which lie where the framework's backward pass leaves them:
  core           one allreduce of as many bytes on ordinary memory, through multiring without a framework
  adapter        the reduction through multiring.F, from gradients that are written to averages that the
                 optimizer can use
  overhead       adapter over core: the median of the ratios within a round of turns and, in parentheses,
                 where it would lie in 95 of 100 such runs
  for the training of ResNet-20, each rank normalising for itself:
  alone          every rank for itself, at the same time
  limit          the same, but every rank waits for the slowest after each step: no way can be faster
  multiring      all ranks in step
  own way        the framework's own way, if it has one (ChainerMN's is started by mpirun)
  efficiency     time of a step alone over that of the kind; in the last row, of its own way over multiring.
                 As for the overhead: the median, and where it would lie in 95 of 100 such runs
"""


class _ChooseFramework(argparse.Action):
    """Notes the framework, and that MPI has to start the ranks where its own way needs that."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.framework = values
        own_way = FRAMEWORKS[values].own_way
        # None leaves out what cannot be started, and tells why.
        namespace.peers = None if own_way is not None and own_way.mpi and not own_way.missing else []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the benchmark."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--framework",
        choices=list(FRAMEWORKS),
        action=_ChooseFramework,
        help="measure this framework's adapter [Torch beside DistributedDataParallel]",
    )
    parser.add_argument(
        "--steps",
        type=number_of("turns"),
        default=20,
        metavar="N",
        help="turns of each kind of step (default: 20)",
    )
    parser.add_argument(
        "--fsdp", action="store_true", help="measure Torch's FSDP2 over multiring and over Gloo as well"
    )
    parser.set_defaults(
        peers=["gloo"] if importlib.util.find_spec("torch") is not None else [], quick_values={"steps": 3}
    )


def run(comm: Communicator, args: argparse.Namespace) -> Results:
    """Measures; called on all ranks; the same report on all.

    Raises:
        UsageError: The framework is not installed, or its adapter is not measured yet.
    """
    if args.framework is None:
        if importlib.util.find_spec("torch") is None:
            raise UsageError(
                "without --framework this measures Torch, which is not installed: name another one, or run "
                "pip install 'multiring[bench,torch]'"
            )
        from multiring.benchmarks.gradients import torch_gradients

        return torch_gradients.run(comm, args)
    if args.fsdp:
        raise UsageError("--fsdp measures Torch's FSDP2: leave --framework out")
    if args.emulation is not None:
        raise UsageError("--emulate measures Torch beside DistributedDataParallel: leave --framework out")
    framework = find_framework(args.framework)
    module = f"multiring.benchmarks.gradients.frameworks.{framework.name}"
    load_trainer(framework).set_threads(1)
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"the adapter of {framework.title} has no benchmark of its gradients ({module})")
    from multiring.benchmarks.gradients import adapter_gradients

    return adapter_gradients.run(comm, framework, module, args)
