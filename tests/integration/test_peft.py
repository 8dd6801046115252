"""Models with adapters of peft, recorded by one's own loop: rounds hold what is trained, and the diagnostic reads peft's layers."""

import peft
import pytest
import torch
from torch import nn

import fldiag
from fldiag.models.lora import adapters


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    how = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["0"], modules_to_save=["2"])
    return peft.get_peft_model(net, how)


def test_the_adapters_of_peft_are_recorded_and_diagnosed():
    start, *nets = (model() for _ in range(4))
    for p in (p for net in nets[:2] for p in net.parameters() if p.requires_grad):
        nn.init.normal_(p)
    states = [net.state_dict() for net in nets]
    nets[2].load_state_dict({n: 0.75 * v + 0.25 * states[1][n] for n, v in states[0].items()})
    examples, parts = (torch.randn(40, 6), torch.arange(40) % 3), [range(30), range(30, 40)]
    with fldiag.Recorder("run", model(), examples, parts, trainable=True) as rec:
        rec.round(received=start, clients=dict(enumerate(nets[:2])), aggregated=nets[2])
    run = fldiag.load("run", model=model())
    assert run.checkpoint().clients.shape == (2, 2 * (6 + 5) + 5 * 3 + 3)
    (layer,) = adapters(start)
    a, b, c = (net.get_submodule(layer).get_delta_weight("default").double() for net in nets)
    exact = 0.75 * a + 0.25 * b
    table = fldiag.diagnose(run, "lora").set_index("metric")
    error = float((exact - c).norm() / exact.norm())
    assert table["value"]["aggregation_error"] == pytest.approx(error, rel=1e-4) and error > 1e-3
