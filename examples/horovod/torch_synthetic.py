"""Images per second of a network on random data, as Horovod's synthetic benchmark tells them.

A script written for Horovod, without a word of multiring but where torchvision is not installed.

multiring run --horovod -np 2 python examples/horovod/torch_synthetic.py --model resnet50 --batch-size 8
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn
from torch.nn import functional


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="one of torchvision, or resnetN without it")
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--image-size", type=int, default=224, help="height and width")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="batches that are not timed")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="batches of each figure")
    parser.add_argument("--num-iters", type=int, default=10, help="number of figures")
    parser.add_argument("--fp16-allreduce", action="store_true", help="reduce gradients in half precision")
    parser.add_argument("--use-adasum", action="store_true", help="combine steps by Adasum")
    return parser.parse_args()


def make_model(name: str) -> nn.Module:
    if find_spec("torchvision") is not None:
        from torchvision import models

        found: nn.Module = getattr(models, name)()
        return found
    from multiring.models.nets.resnet_spec import resnet
    from multiring.models.nets.resnet_torch import TorchResNet

    return TorchResNet(resnet(int(name.removeprefix("resnet")), classes=1000, stem="imagenet"))


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> Any:
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01 * scale),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer


def say(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


def main() -> None:
    args = parse()
    hvd.init()
    torch.set_num_threads(1)
    model = make_model(args.model)
    optimizer = make_optimizer(model, args)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    labels = torch.randint(1000, (args.batch_size,))

    def run(batches: int) -> float:
        """Takes so many steps; their images per second on this rank."""
        begun = time.perf_counter()
        for _ in range(batches):
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        return batches * args.batch_size / (time.perf_counter() - begun)

    say(f"Model: {args.model}")
    say(f"Batch size: {args.batch_size}")
    say(f"Number of CPUs: {hvd.size()}")
    say("Running warmup...")
    run(args.num_warmup_batches)
    say("Running benchmark...")
    rates = []
    for number in range(args.num_iters):
        rates.append(run(args.num_batches_per_iter))
        say(f"Iter #{number}: {rates[-1]:.1f} img/sec per CPU")
    mean, spread = float(np.mean(rates)), float(1.96 * np.std(rates))
    say(f"Img/sec per CPU: {mean:.1f} +-{spread:.1f}")
    say(f"Total img/sec on {hvd.size()} CPU(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")


if __name__ == "__main__":
    main()
