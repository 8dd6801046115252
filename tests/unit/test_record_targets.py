"""Loops with other targets than one label of several: what has no accuracy shows its loss, and says so."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fldiag
from fldiag import losses
from fldiag.data import Dataset
from fldiag.errors import FldiagError
from fldiag.runs.history import History

N = 40
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(1))
PIXELS = torch.randn(N, 1, 4, 4, generator=torch.Generator().manual_seed(2))
TOKENS = torch.randint(0, 7, (N, 6), generator=torch.Generator().manual_seed(3))
MASK = TOKENS.roll(-1, 1).masked_fill(torch.arange(6) == 5, losses.IGNORED)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def tokens_loss(z, y):
    """Every example counts alike, as its positions do in it."""
    rows = F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    return (rows.sum(1) / (y != losses.IGNORED).sum(1)).mean()


CASES = {
    "binary": (nn.Linear(5, 1), X, (X.sum(1) > 0).long(), True),
    "binary column": (nn.Linear(5, 1), X, (X.sum(1, keepdim=True) > 0).float(), True),
    "regression": (nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)), X, X.sum(1), False),
    "segmentation": (nn.Conv2d(1, 3, 1), PIXELS, (PIXELS[:, 0] > 0).long() * 2, False),
    "tokens": (Words(), TOKENS, MASK, False),
}
LOSSES = {
    "binary": lambda z, y: F.binary_cross_entropy_with_logits(z[:, 0], y.float()),
    "binary column": F.binary_cross_entropy_with_logits,
    "regression": lambda z, y: 0.5 * (z[:, 0] - y).square().mean(),
    "segmentation": F.cross_entropy,
    "tokens": tokens_loss,
}


@pytest.fixture(scope="module", params=list(CASES))
def recorded(request, tmp_path_factory):
    """A run of the loop, as it is loaded, its last global model, and whether there is an accuracy."""
    torch.manual_seed(0)
    net, x, y, has_accuracy = CASES[request.param]
    path = tmp_path_factory.mktemp("targets") / "run"

    def moved():
        model = copy.deepcopy(net)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
        return model

    parts = [range(N // 2), range(N // 2, N)]
    with fldiag.Recorder(path, net, data=(x, y), clients=parts) as rec:
        rec.round(received=net, clients={0: moved(), 1: moved()}, aggregated=(last := moved()))
    run = fldiag.load(path, model=net)
    with torch.no_grad():
        loss = float(LOSSES[request.param](last(x), y))
    return run, loss, has_accuracy, request.param


@pytest.mark.filterwarnings("ignore:.*no better than a guess")
def test_the_loss_is_that_of_the_loop(recorded):
    run, loss, has_accuracy, _ = recorded
    rows = run.metrics.query("metric == 'loss' and moment == 'aggregated'")
    assert rows["value"].tolist() == pytest.approx([loss], rel=1e-5)
    assert ("accuracy" in set(run.metrics["metric"])) == has_accuracy
    if not has_accuracy:
        words = " ".join(run.origin["notes"])
        assert "no accuracy is measured" in words or "half the squared error" in words
    table = fldiag.diagnose(run, "forgetting", min_count=1)
    again = table.query("metric == 'loss' and moment == 'aggregated' and slice == 'train'")["value"]
    assert again.tolist() == pytest.approx([loss], rel=1e-5)
    assert ("accuracy" in set(table["metric"])) == has_accuracy


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["matching", "drift", "flatness", "fairness", "doctor"])
def test_every_diagnostic_of_runs_answers(recorded, name):
    run, loss, has_accuracy, _ = recorded
    if name == "fairness" and not has_accuracy:
        with pytest.raises(FldiagError, match="no client has an accuracy"):
            fldiag.diagnose(run, name)
        return
    table = fldiag.diagnose(run, name)
    assert len(table) and (name == "doctor" or fldiag.draw(table) is not None)
    judged = table.query("metric == 'loss' and moment == 'aggregated' and scope == 'global'")
    for value in judged.query("slice == 'train'")["value"]:
        assert value == pytest.approx(loss, rel=1e-4)


def test_a_data_set_of_fldiag_is_kept_with_what_is_done_to_its_pixels(tmp_path):
    pixels = torch.randint(0, 256, (N, 1, 4, 4), dtype=torch.uint8)
    y = torch.arange(N) % 3
    data = Dataset("mine", pixels, y, pixels[:6], y[:6], classes=3, mean=(0.1307,), std=(1 / 3,))
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    with fldiag.Recorder(
        tmp_path / "run", net, data=data, clients=[range(20), range(20, N)]
    ) as rec:
        rec.round(received=net, clients={0: net, 1: net}, aggregated=net)
    history = History.of(fldiag.load(tmp_path / "run"), model=net)
    assert history.dataset.fingerprint() == data.fingerprint()


def test_several_labels_of_an_example_are_no_labels_of_positions(tmp_path):
    y = torch.randint(0, 2, (N, 3))
    rec = fldiag.Recorder(tmp_path / "run", nn.Linear(5, 3), data=(X, y))
    rec.round(aggregated=nn.Linear(5, 3))
    run = fldiag.load(rec.close().path, model=nn.Linear(5, 3), data=(X, y))
    with pytest.raises(FldiagError, match="one label for each of its positions"):
        fldiag.diagnose(run, "forgetting")
