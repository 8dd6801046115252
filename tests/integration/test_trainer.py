"""A federation that transformers' Trainer trains, recorded: the example of docs/ is run."""

import runpy
from pathlib import Path

import torch

import fldiag
from fldiag.params import flatten


def test_transformers():
    example = runpy.run_path(Path(__file__).parents[2] / "docs/trainer_clients.py")
    example["main"]("run")
    net = example["net"]()
    run = fldiag.load("run", model=net)
    first, second = run.checkpoint(1), run.checkpoint(2)
    assert ((first.clients - flatten(net)).norm(dim=1) > 1e-3).all()
    assert torch.allclose(second.received, first.clients.mean(0), atol=1e-6)
    assert len(fldiag.diagnose(run, "drift"))  # sentences, masks and labels lie in the run
