"""Reading the rounds of a run: buffers, notes, batches that must not mix, aggregation weights."""

import shutil

import helpers
import numpy as np
import pytest
import torch
from histories import always, history, identity, linear, one, separable, stored
from reference import value
from torch import nn

import fldiag
from fldiag.device import threads
from fldiag.diagnostics.forgetting import forgetting
from fldiag.errors import FldiagError
from fldiag.params import flatten
from fldiag.runs.history import History
from fldiag.runs.run import Run


@pytest.fixture(scope="module")
def normalised(tmp_path_factory):
    """A FedAvg run of a residual network, whose batch-norm keeps running statistics."""
    config = helpers.config(
        model="small_resnet",
        model_options={},
        data="helpers:tiny_images",
        rounds=3,
        epochs=1,
        checkpoint={"clients": "sampled"},
    )
    return fldiag.train(config, out=tmp_path_factory.mktemp("bn") / "run")


def opened(run, **options):
    run.data = helpers.tiny_images()
    return History(run, dtype=torch.float64, **options)


def test_received_statistics_that_are_lost_are_not_guessed(normalised, tmp_path):
    """A round whose file is gone is an error; one that was never stored, or was pruned, is not guessed. With all there, those of
    a round alone are those of the round before."""
    every, alone = (forgetting(opened(normalised, rounds=r), min_count=1) for r in (None, [3]))
    where = {"moment": "received", "scope": "global", "slice": "test", "round": 3}
    assert value(alone, "loss", **where) == value(every, "loss", **where)
    before = where | {"moment": "aggregated", "round": 2}
    assert value(alone, "loss", **where) == pytest.approx(value(every, "loss", **before))
    run = Run.open(shutil.copytree(normalised.path, tmp_path / "run"))
    (run.path / "rounds" / "0002.safetensors").unlink()
    with pytest.raises(FldiagError, match=r"0002.* not there"):
        forgetting(opened(run), min_count=1)
    run = Run.open(shutil.copytree(normalised.path, tmp_path / "pruned"))
    run.remove(run.unneeded([1, 3]))
    frame = forgetting(opened(run), min_count=1)
    assert set(frame[frame["round"] == 3].moment.dropna()) == {"aggregated"}


def test_numbers_of_a_client_do_not_depend_on_the_other_clients():
    """Batch-norm on batch statistics: batches never hold examples of two slices."""
    data, parts = helpers.classification((20, 13, 17))
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.ReLU(), nn.Linear(5, 3)
    )
    w, losses = flatten(net), []
    for some in (parts, parts[:1]):
        frame = forgetting(history(net, data, some, stored(w, [1.3 * w])))
        where = {"client": 0, "moment": "trained"}
        losses += [one(frame, "loss", slice=s, **where).value for s in ("test", "client:0/train")]
    assert losses[:2] == losses[2:]
    weights = {n: 1.3 * p for n, p in net.named_parameters()}
    batch = torch.func.functional_call(net, weights, (data.train_x[parts[0]],))
    loss = nn.functional.cross_entropy(batch, data.train_y[parts[0]])
    assert losses[1] == pytest.approx(loss.item(), rel=1e-5)


def test_aggregation_weights_follow_the_config():
    parts = [np.arange(0, 30), np.arange(30, 120), np.arange(0, 1)]
    made = history(linear(), separable(), parts, stored(identity(), [always(0)]))
    batches = {"aggregate": "batches", "batch_size": 20}
    for training, ids, expected in (
        ({}, [0, 1], [0.25, 0.75]),
        ({}, [0, 1, 2], [30 / 121, 90 / 121, 1 / 121]),
        ({"aggregate": "uniform"}, [0, 1], [0.5, 0.5]),
        (batches, [0, 1], [0.2, 0.8]),
        (batches, [2], [1]),
    ):
        made.training = training
        assert made.weights(ids) == pytest.approx(expected)


def test_weights_that_are_not_finite_have_no_loss():
    """Minus infinity at the bias of one class leaves the others' losses finite."""
    w = always(1)
    w[-1] = -torch.inf
    scores = history(linear(), separable(), [np.arange(120)], stored(w, [w])).evaluate([(w, {})])
    assert not scores.valid[0] and np.isnan(scores.loss).all()


def test_models_in_threads_score_as_one_after_another():
    data, parts = helpers.images((70, 40, 31))
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4)
    )
    generator = torch.Generator().manual_seed(1)
    rows = 0.5 * torch.randn(7, flatten(net).numel(), generator=generator).double()
    made = history(net, data, parts, stored(rows[0], rows[1:]), dtype=torch.float64)
    models, scores = [(w, {}) for w in rows], []
    for count in (1, 3):
        with threads(count):
            scores.append(made.evaluate(models))
            with pytest.raises(RuntimeError):
                made.evaluate([(w[:-1], {}) for w in rows])
            assert torch.get_num_threads() == count
    a, b = scores
    assert np.allclose(a.loss, b.loss, rtol=1e-12, atol=0) and (a.right == b.right).all()
    assert len(np.unique(a.loss[:, 0])) == 7
    assert made.evaluate([]).loss.shape == (0, made.pool.n)
