"""MOON: the contrast of representations, against its definition."""

import itertools
import math
import types

import pytest
import torch
from helpers import classification, close, config, federation, final, play
from torch import nn
from torch.nn import functional as F

from fldiag.errors import FldiagError
from fldiag.parts import contrast
from fldiag.parts.contrast import ModelContrast

DATA = classification((20, 13, 7))


def far(a, b):
    return float((a - b).abs().max())


def term(monkeypatch, z, zg, zp, tau=0.5, mu=1.0):
    """The part's loss [k] for given representations [k, B, d]."""
    frozen = iter((zg, zp))
    monkeypatch.setattr(contrast, "frozen", lambda step, w, buffers: next(frozen))
    local = types.SimpleNamespace(w_g=torch.zeros(1), received_buffers={}, buffers={}, state={})
    step = types.SimpleNamespace(
        k=len(z), local=local, state=lambda name: None, mean=lambda v: v.mean(1)
    )
    return ModelContrast(mu, tau).loss(step, types.SimpleNamespace(features=z))


def z(seed):
    return torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("tau", "mu"), [(0.5, 1.0), (1.0, 0.1)])
def test_the_loss_is_its_definition(monkeypatch, tau, mu):
    a, g, p = z(0), z(1), z(2)
    ours = term(monkeypatch, a, g, p, tau, mu)
    for k in range(2):
        total = 0.0
        for i in range(5):
            to_g, to_p = (
                math.exp(float(a[k, i] @ v[k, i] / (a[k, i].norm() * v[k, i].norm())) / tau)
                for v in (g, p)
            )
            total -= math.log(to_g / (to_g + to_p)) / 5
        assert abs(float(ours[k]) - mu * total) <= 1e-12


def test_T_MOON_2_before_a_client_has_a_model_of_its_own_the_contrast_is_ln_2_with_no_gradient(
    monkeypatch,
):
    seen, inner = [], ModelContrast.loss

    def look(self, step, out):
        value = inner(self, step, out)
        (g,) = torch.autograd.grad(value.sum(), out.features, retain_graph=True)
        seen.append((value.detach(), g))
        return value

    monkeypatch.setattr(ModelContrast, "loss", look)
    made = federation(config("moon", {"mu": 1.0}, per_round=1), DATA)
    play(made)
    assert all(abs(float(v) - math.log(2)) <= 1e-12 for v, _ in seen)
    for _, g in seen:
        close(g, torch.zeros_like(g), terms=g.shape[-1], size=1)
    plain = final(config(per_round=1), DATA, 1)
    assert far(made.w, plain) <= 1e-12
    seen.clear()
    play(made, 4)
    assert any(g.abs().max() > 1e-4 for _, g in seen)


def test_T_MOON_3_the_loss_falls_with_the_likeness_to_the_received_model(monkeypatch):
    a, p = z(0), z(2)
    other = z(1)
    losses = [term(monkeypatch, a, (1 - s) * other + s * a, p).sum() for s in (0.0, 0.3, 0.6, 1.0)]
    assert all(x > y for x, y in itertools.pairwise(losses))
    away = [term(monkeypatch, a, other, (1 - s) * p + s * a).sum() for s in (0.0, 0.3, 0.6, 1.0)]
    assert all(x < y for x, y in itertools.pairwise(away))


def normed():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
        )


class Body(nn.Module):
    """``normed`` as a module that shows its features."""

    def __init__(self):
        super().__init__()
        self.body, self.fc = normed()[:-1], normed()[-1]

    def features(self, x):
        return self.body(x)

    def forward(self, x):
        return self.fc(self.features(x))


def test_frozen_models_have_their_own_batch_norm_statistics(monkeypatch):
    """Those they were received or uploaded with, not those that local training has moved meanwhile."""
    data = classification((16, 16))
    made = federation(
        config("moon", {"mu": 1.0}, total=2, epochs=2, batch_size=8, lr=0.3), data, module=Body()
    )
    [(_, trained)] = play(made)
    received, global_w = {n: b.clone() for n, b in made.buffers.items()}, made.w.clone()
    left = {
        k: ({n: b[k].clone() for n, b in trained.buffers.items()}, trained.rows[k].clone())
        for k in range(2)
    }
    seen, inner = [], contrast.frozen

    def look(step, w, buffers):
        value = inner(step, w, buffers)
        seen.append((step.local.ids[0], step.x[0].clone(), value[0]))
        return value

    monkeypatch.setattr(contrast, "frozen", look)
    play(made)
    layout = made.setup.network.layout
    module = made.setup.module.eval()
    assert len(seen) == 2 * 2 * 2 * 2  # clients, epochs, minibatches, frozen models
    for which, (k, x, value) in enumerate(seen):
        buffers, w = (received, global_w) if which % 2 == 0 else left[k]
        state = {**{n: v[0] for n, v in layout.views(w[None]).items()}, **buffers}
        expected = torch.func.functional_call(module, state, (x,))
        assert far(F.linear(value, state["fc.weight"], state["fc.bias"]), expected) <= 1e-12
    assert made.clients[0].keys() == {"w_prev", *(f"prev.{n}" for n in received)}


def test_a_model_that_hides_its_features_is_refused():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.b(self.a(x).relu())

    class More(Hidden):
        """Its output is not head(features(x)), which only a forward shows."""

        def features(self, x):
            return self.a(x)

    for seed in range(10):  # with each of these weights, not by chance
        torch.manual_seed(seed)
        for module in (Hidden(), More()):
            with pytest.raises(FldiagError, match="MOON contrasts the features before the head"):
                federation(config("moon", {"mu": 1.0}), DATA, module=module)
