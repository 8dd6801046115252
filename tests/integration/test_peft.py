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
    adapted = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["0"], modules_to_save=["2"])
    return peft.get_peft_model(net, adapted)


def test_the_adapters_of_peft_are_recorded_and_diagnosed():
    start, one, two = model(), model(), model()
    for net in (one, two):
        for p in net.parameters():
            if p.requires_grad:
                nn.init.normal_(p)
    mean = {n: v.lerp(two.state_dict()[n], 0.25) for n, v in one.state_dict().items()}
    examples, parts = (torch.randn(40, 6), torch.arange(40) % 3), [range(30), range(30, 40)]
    with fldiag.Recorder("run", model(), examples, parts, trainable=True) as rec:
        rec.round(received=start, clients={0: one, 1: two}, aggregated=mean)
    run = fldiag.load("run", model=model())
    assert run.checkpoint().clients.shape == (2, 40)  # two adapters of 6 + 5, and 5 * 3 + 3
    (layer,) = adapters(start)
    start.load_state_dict(mean)
    a, b, c = (n.get_submodule(layer).get_delta_weight("default") for n in (one, two, start))
    exact = a.lerp(b, 0.25)
    error = float((exact - c).norm() / exact.norm())
    table = fldiag.diagnose(run, "lora").set_index("metric")
    assert table["value"]["aggregation_error"] == pytest.approx(error, rel=1e-4) and error > 1e-3
