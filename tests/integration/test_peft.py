"""Models with adapters of peft, recorded by one's own loop: rounds hold what is trained, and the diagnostic reads peft's layers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fldiag
from fldiag.models.lora import adapters

peft = pytest.importorskip("peft")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


def model():
    torch.manual_seed(0)
    return peft.get_peft_model(
        Net(), peft.LoraConfig(r=2, lora_alpha=6, target_modules=["fc1"], modules_to_save=["fc2"])
    )


def trained(net, x, y):
    net = copy.deepcopy(net)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def test_the_adapters_of_peft_are_recorded_and_diagnosed(tmp_path):
    x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3
    parts, net = [range(30), range(30, 40)], model()
    ends = [trained(net, x[list(p)], y[list(p)]) for p in parts]
    mean = {
        n: 0.75 * ends[0].state_dict()[n] + 0.25 * ends[1].state_dict()[n] for n in net.state_dict()
    }
    with fldiag.Recorder(tmp_path / "run", net, data=(x, y), clients=parts, trainable=True) as rec:
        rec.round(received=net, clients=dict(enumerate(ends)), aggregated=mean)
    run = fldiag.load(tmp_path / "run", model=model())
    (layer,) = adapters(net)
    assert run.checkpoint().clients.shape == (
        2,
        sum(p.numel() for p in net.parameters() if p.requires_grad),
    )
    table = fldiag.diagnose(run, "lora")
    products = [
        end.get_submodule(layer).get_delta_weight("default").detach().double() for end in ends
    ]
    exact = 0.75 * products[0] + 0.25 * products[1]
    net.load_state_dict(mean)
    lost = torch.linalg.norm(
        exact - net.get_submodule(layer).get_delta_weight("default").detach()
    ) / torch.linalg.norm(exact)
    found = table[table["metric"] == "aggregation_error"]["value"].item()
    assert found == pytest.approx(float(lost), rel=1e-4) and found > 1e-3
