"""FedSOL: the perturbation, the gradient taken there, and what is left when it is switched off."""

import torch
from helpers import classification, config, federation, final, images, play

from fldiag import losses
from fldiag.local import Local
from fldiag.models.network import Network
from fldiag.params import Layout


def test_the_strength_of_a_scalar_parameter_is_one_under_every_rule():
    """Such as the temperature of an attention: its layer and its first axis have a single entry."""
    module = torch.nn.Linear(3, 2)
    module.gain = torch.nn.ParameterDict({"t": torch.nn.Parameter(torch.tensor(1.0))})
    layout = Layout.of(module)
    d = torch.randn(2, layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for rule in ("layer", "tensor", "dim0"):
        strength = losses.strengths(d, layout, rule)
        assert strength.shape == d.shape
        torch.testing.assert_close(
            strength[:, layout.slices()["gain.t"]], torch.ones(2, 1).double()
        )


def test_the_head_mode_runs_the_body_once_a_step(monkeypatch):
    """The claimed cost: one forward of the body a step, and the received model's outputs once a round."""
    calls, features = [], Network.features

    def counted(self, x):
        calls.append(self._train)
        return features(self, x)

    monkeypatch.setattr(Network, "features", counted)
    made = federation(config("fedsol", total=1, model="small_cnn", model_options={}), images((16,)))
    calls.clear()
    play(made)
    assert calls.count(True) == 4  # 2 epochs of 2 minibatches
    assert calls.count(False) == 1


def test_cached_and_repeated_outputs_of_the_received_model_agree(monkeypatch):
    data = classification((20, 13, 7))
    ends = [final(config(m, stack="on"), data) for m in ("fedsol", "fedntd")]
    monkeypatch.setattr(Local, "received_logits", None)
    again = [final(config(m, stack="on"), data) for m in ("fedsol", "fedntd")]
    torch.testing.assert_close(ends, again, rtol=0, atol=1e-12)
