"""MOON: the contrast of representations, against its definition."""

import torch
from helpers import classification, config, federation, play
from torch import nn
from torch.nn import functional as F

from fldiag.parts import contrast


def far(a, b):
    return float((a - b).abs().max())


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
