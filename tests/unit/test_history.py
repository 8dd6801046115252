"""Reading the rounds of a run: buffers, notes, batches that must not mix, aggregation weights."""

import shutil

import helpers
import numpy as np
import pytest
import torch
from histories import always, history, identity, linear, one, separable, stored
from torch import nn

import fldiag
from fldiag.diagnostics.forgetting import forgetting
from fldiag.errors import FldiagError
from fldiag.models.network import Network
from fldiag.params import flatten
from fldiag.runs import pool
from fldiag.runs.history import History
from fldiag.runs.pool import stack_size
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
    return History(run, data=helpers.tiny_images(), dtype=torch.float64, **options)


def test_received_statistics_that_are_lost_are_not_guessed(normalised, tmp_path):
    """A round whose file is gone is an error; one that was never stored, or was pruned, is not guessed."""
    run = Run.open(shutil.copytree(normalised.path, tmp_path / "run"))
    (run.path / "rounds" / "0002.safetensors").unlink()
    with pytest.raises(FldiagError, match=r"0002.* not there"):
        forgetting(opened(run), min_count=1)
    run = Run.open(shutil.copytree(normalised.path, tmp_path / "pruned"))
    run.prune([1, 3])
    frame = forgetting(opened(run), min_count=1)
    assert set(frame[frame["round"] == 3].moment.dropna()) == {"aggregated"}


def test_numbers_of_a_client_do_not_depend_on_the_other_clients():
    """Batch-norm on batch statistics: batches never hold examples of two slices."""
    data, parts = helpers.classification((20, 13, 17))
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.ReLU(), nn.Linear(5, 3)
    )
    w = flatten(net)
    found = []
    for some in (parts, parts[:1]):
        frame = forgetting(history(net, data, some, stored(w, [1.3 * w])))
        found.append(
            [
                one(frame, "loss", client=0, moment="trained", slice=s).value
                for s in ("test", "client:0/train")
            ]
        )
    assert found[0] == found[1]
    names = [n for n, _ in net.named_parameters()]
    weights = dict(zip(names, [1.3 * p for p in net.parameters()], strict=True))
    batch = torch.func.functional_call(net, weights, (data.train_x[parts[0]],))
    assert found[0][1] == pytest.approx(
        nn.functional.cross_entropy(batch, data.train_y[parts[0]]).item(), rel=1e-5
    )


def test_aggregation_weights_follow_the_config():
    made = history(
        linear(),
        separable(),
        [np.arange(0, 30), np.arange(30, 120), np.arange(0, 1)],
        stored(identity(), [always(0)]),
    )
    assert made.weights([0, 1]) == pytest.approx([0.25, 0.75]) and made.weights(
        [0, 1, 2]
    ).sum() == pytest.approx(1)
    made.training = {"aggregate": "uniform"}
    assert made.weights([0, 1]) == pytest.approx([0.5, 0.5])
    made.training = {"aggregate": "batches", "batch_size": 20}
    assert made.weights([0, 1]) == pytest.approx([0.2, 0.8]) and made.weights([2]) == pytest.approx(
        [1]
    )


def test_weights_that_are_not_finite_have_no_loss():
    """Minus infinity at the bias of one class leaves the others' losses finite."""
    w = always(1)
    w[-1] = -torch.inf
    scores = history(linear(), separable(), [np.arange(120)], stored(w, [w])).evaluate([(w, {})])
    assert not scores.valid[0] and np.isnan(scores.loss).all()


def test_stacking_is_a_rule():
    small = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    large = nn.Sequential(nn.Linear(4, 2000), nn.ReLU(), nn.Linear(2000, 1000), nn.Linear(1000, 4))
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    sizes = [stack_size(Network(net), (4,), 20)[0] for net in (small, large, other)]
    assert sizes == [16, 1, 1]


@pytest.mark.parametrize("below", [0, 10**6])
def test_models_in_threads_score_as_one_after_another(below, monkeypatch):
    monkeypatch.setattr(pool, "STACK_BELOW", below)
    data, parts = helpers.images((70, 40, 31))
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4)
    )
    rows = (
        0.5
        * torch.randn(7, flatten(net).numel(), generator=torch.Generator().manual_seed(1)).double()
    )
    made = history(net, data, parts, stored(rows[0], rows[1:]), dtype=torch.float64)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(made.evaluate([(w, {}) for w in rows]))
            assert torch.get_num_threads() == threads
        with pytest.raises(RuntimeError):
            made.evaluate([(w[:-1], {}) for w in rows])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert (
        np.allclose(found[0].loss, found[1].loss, rtol=1e-12, atol=0)
        and (found[0].right == found[1].right).all()
    )
    assert len(np.unique(found[0].loss[:, 0])) == 7 and made.evaluate([]).loss.shape == (
        0,
        made.pool.n,
    )
