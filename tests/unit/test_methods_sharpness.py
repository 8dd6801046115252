"""FedSAM and FedASAM, and what holds for every perturbation: the gradient taken there, the weights kept."""

import pytest
import torch
from helpers import classification, config, federation, play
from torch import nn

UNEQUAL = (20, 13, 7)
FULL = {"part": "full", "strength": "fixed"}


def far(a, b):
    return float((a - b).abs().max())


def normed(seed=5):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
        )


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedsam", {}),
        ("fedasam", {}),
        ("fedsol", FULL),
        ("fedsol", {"part": "body"}),
        ("fedsol", {"part": "head"}),
    ],
)
def test_running_statistics_see_a_minibatch_once_a_step_and_unperturbed(method, options):
    data = classification((16, 16))
    chosen = {"total": 2, "epochs": 1, "batch_size": 16, "lr": 0.5}
    plain, other = (
        federation(config(m, o, **chosen), data, module=normed())
        for m, o in (("fedavg", {}), (method, options))
    )
    play(plain)
    play(other)
    for name, buffer in plain.buffers.items():
        torch.testing.assert_close(other.buffers[name], buffer, rtol=1e-12, atol=0)
    assert int(other.buffers["2.num_batches_tracked"]) == 1
