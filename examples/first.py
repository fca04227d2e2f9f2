import torch
from sklearn.datasets import load_digits

import multiring.torch

comm = multiring.init()
digits = load_digits()
images, labels = torch.tensor(digits.images / 16).float().flatten(1), torch.tensor(digits.target)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
multiring.torch.broadcast_parameters(model)
multiring.torch.register_gradient_hooks(model)  # gradients are averaged while backward runs
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(20):
    for batch in torch.randperm(1500).split(60):
        batch = batch[comm.rank :: comm.size]  # this rank's share
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
right = model(images[1500:]).argmax(1) == labels[1500:]
print(f"test accuracy {right.float().mean():.4f}")
