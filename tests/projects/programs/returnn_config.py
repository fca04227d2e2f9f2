"""RETURNN: a small network on its generated data; `torch_distributed` has its default back end, which is
"cpu:gloo,cuda:nccl"."""

import os

import torch

backend = "torch"
task = "train"
device = "cpu"
torch_distributed = {"backend": os.environ["RETURNN_BACKEND"]} if os.environ.get("RETURNN_BACKEND") else {}
extern_data = {"data": {"dim": 9}, "classes": {"dim": 2, "sparse": True}}
train = {"class": "Task12AXDataset", "num_seqs": 40, "fixed_random_seed": 1}
dev = {"class": "Task12AXDataset", "num_seqs": 10, "fixed_random_seed": 2}
batch_size, max_seqs = 600, 4
optimizer = {"class": "adam"}
learning_rate = 0.01
num_epochs = 2
log_verbosity = 4
model = os.environ["RETURNN_OUT"] + "/model"
learning_rate_file = os.environ["RETURNN_OUT"] + "/scores"


class Model(torch.nn.Module):
    """A recurrent network of one layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.LSTM(9, 16, batch_first=True)
        self.out = torch.nn.Linear(16, 2)

    def forward(self, data):
        return self.out(self.layer(data)[0])


def get_model(*, epoch, step, **_):
    torch.manual_seed(7)
    return Model()


def train_step(*, model, extern_data, **_):
    import returnn.frontend as rf

    data, classes = extern_data["data"], extern_data["classes"]
    logits = model(data.raw_tensor)
    lengths = data.dims[1].dyn_size
    mask = torch.arange(logits.shape[1])[None] < lengths[:, None]
    loss = torch.nn.functional.cross_entropy(logits[mask], classes.raw_tensor.long()[mask])
    rf.get_run_ctx().mark_as_loss(loss, "ce")
