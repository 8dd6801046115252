"""A federation that transformers' Trainer trains, recorded: the example of docs/ is run."""

import importlib
from pathlib import Path

import torch

import fldiag
from fldiag.params import flatten


def test_transformers(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    example = importlib.import_module("trainer_clients")
    example.main("run")
    run = fldiag.load("run", model=example.net(), data=example.sentences())
    first, second = run.checkpoint(1), run.checkpoint(2)
    names = [n for n, _ in example.net().named_parameters()]
    assert first.client_ids == list(range(example.CLIENTS))
    assert ((first.clients - flatten(example.net())).norm(dim=1) > 1e-3).all()
    after = torch.cat([first.state[n].reshape(-1) for n in names])
    assert torch.allclose(after, first.clients.mean(0), atol=1e-6)
    assert torch.equal(second.received, after)
    table = fldiag.diagnose(run, "spectrum", k=1)
    assert (table["n_examples"] == 96).all() and table["converged"].dropna().all()
    for name in ("forgetting", "drift"):  # the sentences, their masks and labels lie in the run
        assert len(fldiag.diagnose(fldiag.load("run", model=example.net()), name))
