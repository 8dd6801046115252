"""Batch-norm statistics under methods that perturb, freeze models, or keep a model of each client."""

import pytest
import torch
from helpers import Recorded, classification, config, federation, normed, play, seeded
from torch.nn import functional as F

from fldiag.parts import contrast

FULL = {"part": "full", "strength": "fixed"}


def test_frozen_models_have_their_own_batch_norm_statistics(monkeypatch):
    """Those they were received or uploaded with, not those that local training has moved meanwhile."""
    data = classification((16, 16))
    made = federation(
        config("moon", {"mu": 1.0}, total=2, epochs=2, batch_size=8, lr=0.3), data, module=normed()
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
        logits = F.linear(value, state["fc.weight"], state["fc.bias"])
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    assert made.clients[0].keys() == {"w_prev", *(f"prev.{n}" for n in received)}


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
    assert int(other.buffers["norm.num_batches_tracked"]) == 1


def test_local_only_keeps_batch_norm_statistics_with_the_client():
    module = normed()
    data = dataset, parts = classification((20, 13, 7))
    made = federation(config("local_only", batch_size=5), data, module=module)
    initial = {n: b.clone() for n, b in made.buffers.items()}
    play(made, 2)
    schedule = seeded(0, 3, 3, 2, 5)
    for i in range(3):
        one = federation(
            config("fedavg", total=1, batch_size=5),
            (dataset, [parts[i]]),
            module=module,
            schedule=Recorded(
                [[0]] * 2, [{0: schedule.batches(t, i, len(parts[i]))} for t in range(2)]
            ),
        )
        play(one, 2)
        assert torch.equal(made.clients[i]["own"], one.w)
        for name, b in one.buffers.items():
            assert torch.equal(made.clients[i][f"own/{name}"], b)
    assert all(torch.equal(made.buffers[n], b) for n, b in initial.items())
    assert not torch.equal(
        made.clients[0]["own/norm.running_mean"], made.clients[1]["own/norm.running_mean"]
    )
