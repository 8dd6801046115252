"""Three clients train on the digits with Lightning, and fldiag records it: one file, complete.

With ``pip install 'fldiag[lightning]'``, from this folder:

    python lightning_clients.py
    fldiag forgetting runs/lightning --model lightning_clients:net
"""

import copy
import logging

import lightning
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fldiag
from fldiag import data
from fldiag.integrations import lightning as recording

CLIENTS, ROUNDS = 3, 2
digits = data.load("digits")
parts = np.array_split(torch.argsort(digits.train_y, stable=True).numpy(), CLIENTS)


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], i: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def main(out: str = "runs/lightning") -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model = net()
    rec = fldiag.Recorder(out, model, data="digits", clients=parts)
    for _ in range(ROUNDS):
        received, trained = copy.deepcopy(model), []
        for k, mine in enumerate(parts):
            client = copy.deepcopy(received)
            examples = TensorDataset(digits.batch(torch.from_numpy(mine)), digits.train_y[mine])
            trainer = lightning.Trainer(
                max_epochs=1,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[recording.callback(rec, client=k)],
            )
            trainer.fit(client, DataLoader(examples, batch_size=32, shuffle=True))
            trained.append(client.state_dict())
        model.load_state_dict({n: torch.stack([s[n] for s in trained]).mean(0) for n in trained[0]})
        rec.round(aggregated=model)
    rec.close()


if __name__ == "__main__":
    main()
