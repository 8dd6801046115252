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
    run = fldiag.load("run", model=example.net())
    first, second = run.checkpoint(1), run.checkpoint(2)
    assert ((first.clients - flatten(example.net())).norm(dim=1) > 1e-3).all()
    assert torch.allclose(second.received, first.clients.mean(0), atol=1e-6)
    assert len(fldiag.diagnose(run, "drift"))  # sentences, masks and labels lie in the run
