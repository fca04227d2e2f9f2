"""Ray Train: data-parallel training of PyTorch by `TorchTrainer`, as its documentation has it."""

import json
import sys

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model


def train(settings: dict[str, str]) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 4, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    torch.manual_seed(1)
    model = prepare_model(torch.nn.Linear(4, 1))
    data = torch.utils.data.TensorDataset(inputs, targets)
    loader = prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        for batch, wanted in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), wanted)
            loss.backward()
            optimizer.step()
        ray.train.report({"epoch": epoch, "loss": loss.item()})
    rank = ray.train.get_context().get_world_rank()
    made_by = type(torch.distributed.group.WORLD).__module__
    weights = [parameter.detach().flatten().tolist() for parameter in model.parameters()]
    with open(f"{settings['out']}/rank{rank}.json", "w") as file:
        json.dump({"backend": torch.distributed.get_backend(), "made by": made_by, "weights": weights}, file)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    trainer = TorchTrainer(
        train, train_loop_config={"out": sys.argv[1]}, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=sys.argv[1], name="run"),
    )  # fmt: skip
    print("ended", trainer.fit().error)
