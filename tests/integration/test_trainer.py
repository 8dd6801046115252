"""A federation that transformers' Trainer trains, recorded: the example of docs/ is run."""

import importlib
from pathlib import Path

import pytest
import torch

import fldiag
from fldiag.params import flatten

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module


def rounds(run, example):
    """What is stored is a federation: clients start from the global model before, and end elsewhere."""
    first = flatten(example.net())
    for t in (1, 2):
        stored = run.checkpoint(t)
        assert stored.client_ids == list(range(example.CLIENTS))
        if t > 1:  # before the first round, what the loop does not say is not known
            assert torch.equal(stored.received, first)
        names = [n for n, _ in example.net().named_parameters()]
        assert ((stored.clients - first).norm(dim=1) > 1e-3).all()
        first = torch.cat([stored.state[n].reshape(-1) for n in names])
        assert torch.allclose(first, stored.clients.mean(0), atol=1e-6)


def test_transformers(example):
    pytest.importorskip("transformers")
    made = example("trainer_clients")
    made.main("run")
    run = fldiag.load("run", model=made.net(), data=made.sentences())
    rounds(run, made)
    table = fldiag.diagnose(run, "spectrum", k=1)
    assert (table["n_examples"] == 96).all() and table["converged"].dropna().all()
    for name in ("forgetting", "drift"):  # the sentences, their masks and labels lie in the run
        assert len(fldiag.diagnose(fldiag.load("run", model=made.net()), name))
