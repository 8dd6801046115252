"""A training that ends far above where it began has failed, whatever its status says."""

import pytest
from helpers import config

from fldiag.training import train


@pytest.mark.parametrize("lr, failed", [(0.1, False), (1e20, True)])
def test_of_real_runs(lr, failed, tmp_path):
    why = train.failure(train.train(config(lr=lr), out=tmp_path))
    assert (why is not None) == failed and (not failed or "no longer finite" in why)


@pytest.mark.parametrize(
    "loss, accuracy, failed",
    [
        (0.9, 0.8, False),
        (3.0, 0.8, False),
        (3.0, 0.34, True),
        (1.1, 0.33, False),
        (348.0, 0.6, True),
    ],
)
def test_by_loss_and_accuracy(loss, accuracy, failed, tmp_path, monkeypatch):
    """Three classes: guessing has ln 3 = 1.10."""
    run = train.train(config(), out=tmp_path)
    frame = run.metrics
    for name, value in (("loss", loss), ("accuracy", accuracy)):
        frame.loc[(frame["metric"] == name) & (frame["slice"] == "test"), "value"] = value
    monkeypatch.setattr(type(run), "metrics", property(lambda self: frame))
    why = train.failure(run)
    assert (why is not None) == failed
    if why:
        assert f"{loss:.4g}" in why and "1.10" in why
