"""The callbacks of transformers' and Lightning's trainers, driven by the real trainers: the examples of docs/ are run."""

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
        assert stored.client_ids == list(range(example.CLIENTS)) and torch.equal(
            stored.received, first
        )
        names = [n for n, _ in example.net().named_parameters()]
        first = torch.cat([stored.state[n].reshape(-1) for n in names])
        assert torch.allclose(first, stored.clients.mean(0), atol=1e-6)
        assert ((stored.clients - stored.received).norm(dim=1) > 1e-3).all()


def test_transformers(example):
    pytest.importorskip("transformers")
    made = example("trainer_clients")
    made.main("run")
    run = fldiag.load("run", model=made.net(), data=made.sentences())
    rounds(run, made)
    assert set(run.metrics[run.metrics["metric"] == "train_loss"]["client"]) == {0, 1, 2}
    table = fldiag.diagnose(run, "spectrum", k=1)
    assert (table["n_examples"] == 96).all() and table["converged"].dropna().all()
    for name in ("forgetting", "drift"):  # the sentences, their masks and labels lie in the run
        assert len(fldiag.diagnose(fldiag.load("run", model=made.net()), name))


def test_lightning(example):
    pytest.importorskip("lightning")
    made = example("lightning_clients")
    made.main("run")
    run = fldiag.load("run", model=made.net())
    rounds(run, made)
    assert set(run.metrics[run.metrics["metric"] == "train_loss"]["client"]) == {0, 1, 2}
    for name in ("forgetting", "drift"):
        assert len(fldiag.diagnose(run, name))


def test_without_clients_every_epoch_is_a_round(example):
    lightning = pytest.importorskip("lightning")
    from fldiag.integrations import lightning as recording

    made = example("lightning_clients")
    net = made.net()
    x, y = made.digits.batch(torch.arange(64)), made.digits.train_y[:64]
    with fldiag.Recorder("run", net, data=(x, y)) as rec:
        lightning.Trainer(
            max_epochs=3,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[recording.callback(rec)],
        ).fit(net, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32))
    assert rec.run.rounds == [0, 1, 2, 3]
    state = rec.run.checkpoint(3).state
    assert all(torch.equal(state[n], v) for n, v in net.state_dict().items())
