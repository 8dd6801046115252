"""Models with adapters of peft, recorded by one's own loop: rounds hold what is trained, and the diagnostic reads peft's layers."""

import peft
import pytest
import torch
from torch import nn

import fldiag
from fldiag.models.lora import adapters


def model(seed=0):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    how = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["0"], modules_to_save=["2"])
    net = peft.get_peft_model(net, how)
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in (p for p in net.parameters() if p.requires_grad and seed):
            p.add_(torch.randn(p.shape))
    return net


def test_the_adapters_of_peft_are_recorded_and_diagnosed(tmp_path):
    ends = [model(1), model(2)]
    states = [end.state_dict() for end in ends]
    mean = {n: 0.75 * v + 0.25 * states[1][n] for n, v in states[0].items()}
    examples, parts = (torch.randn(40, 6), torch.arange(40) % 3), [range(30), range(30, 40)]
    with fldiag.Recorder(
        tmp_path / "run", model(), data=examples, clients=parts, trainable=True
    ) as rec:
        rec.round(received=model(), clients=dict(enumerate(ends)), aggregated=mean)
    run = fldiag.load(tmp_path / "run", model=model())
    trained = sum(p.numel() for p in model().parameters() if p.requires_grad)
    assert run.checkpoint().clients.shape == (2, trained)
    (layer,) = adapters(model())
    net = model()
    net.load_state_dict(mean)
    a, b, c = (m.get_submodule(layer).get_delta_weight("default").double() for m in (*ends, net))
    exact = 0.75 * a + 0.25 * b
    table = fldiag.diagnose(run, "lora")
    found = table[table["metric"] == "aggregation_error"]["value"].item()
    assert found == pytest.approx(float((exact - c).norm() / exact.norm()), rel=1e-4)
    assert found > 1e-3
