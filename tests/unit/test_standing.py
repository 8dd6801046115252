"""Loss and accuracy beside each other, how inputs were normalised, and the warning where a guess does as well."""

import contextlib
import json
import math

import numpy as np
import pytest
import torch
from federations import blobs, network, record
from torch import nn
from torch.nn import functional as F

import fldiag
from fldiag import registry
from fldiag.diagnosis.answer import answer
from fldiag.problem.problem import Problem
from fldiag.results.standing import doubts, guess_accuracy, sentences, standing
from fldiag.results.table import table

N, CLASSES = 300, 3
SMALL = {"points": 3, "k": 2, "draws": 4, "probes": 1, "steps": 3}


def examples(seed=0):
    """Classes around corners far from the origin, so that inputs on another scale are all told alike."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(N) % CLASSES
    return 3 * F.one_hot(y, CLASSES).float() + 0.5 * torch.randn(N, CLASSES, generator=g), y


def sound():
    net = nn.Linear(CLASSES, CLASSES)
    with torch.no_grad():
        net.weight.copy_(2 * torch.eye(CLASSES))
        net.bias.zero_()
    return net


def measured(name, subject):
    entry = registry.diagnostic.get(name)
    return fldiag.diagnose(
        subject,
        name,
        tell=lambda text: None,
        **{k: v for k, v in SMALL.items() if k in entry.options.model_fields},
    )


def subjects(net, x, y):
    return {
        "problem": Problem(net, F.cross_entropy, (x, y), name="a"),
        "checkpoints": [Problem(net, F.cross_entropy, (x, y), name=n) for n in "ab"],
    }


OF_WEIGHTS = [
    n
    for n in registry.diagnostic.names()
    if registry.diagnostic.get(n).on in ("problem", "checkpoints")
]


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_every_result_about_weights_has_the_accuracy_beside_the_loss(name):
    (x, y), net = examples(), sound()
    frame = measured(name, subjects(net, x, y)[registry.diagnostic.get(name).on])
    expected = float((net(x).argmax(1) == y).float().mean()), float(F.cross_entropy(net(x), y))
    rows = standing(frame)
    assert rows
    for row in rows:
        assert (row["accuracy"], row["loss"]) == pytest.approx(expected) and row[
            "inputs"
        ] == "as passed (float32)"
        assert row["loss_guess"] == pytest.approx(math.log(CLASSES)) and row[
            "accuracy_guess"
        ] == pytest.approx(1 / CLASSES)
    assert doubts(frame) == [] and "accuracy" in sentences(frame)[0]
    assert sentences(frame.astype({"n_examples": float})) == sentences(frame)


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_a_regression_has_a_loss_alone(name):
    x, _ = examples()
    net = nn.Linear(CLASSES, 1)
    on = registry.diagnostic.get(name).on
    problems = [Problem(net, F.mse_loss, (x, x[:, :1] * 1.5), name=n) for n in "ab"]
    frame = measured(name, problems if on == "checkpoints" else problems[0])
    assert (
        standing(frame)
        and all("accuracy" not in row for row in standing(frame))
        and doubts(frame) == []
    )


class Logits(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return {"logits": self.net(x)}


class Own(Logits):
    """Returns its loss beside the outputs, as models of transformers do."""

    def forward(self, x, labels=None):
        out = super().forward(x)
        return out if labels is None else {"loss": F.cross_entropy(out["logits"], labels), **out}


def sequences(x, y):
    """Two places a text, the second of which is ignored in every other one."""
    labels = torch.stack([y, y], 1)
    labels[::2, 1] = -100
    return torch.stack([x, x.flip(0)], 1), labels


BINARY = nn.Linear(CLASSES, 1)
CASES = {
    "cross entropy": lambda x, y: (sound(), F.cross_entropy, (x, y), math.log(3)),
    "own function": lambda x, y: (sound(), lambda z, y: F.cross_entropy(z, y), (x, y), math.log(3)),
    "smoothed": lambda x, y: (
        sound(),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        (x, y),
        math.log(3),
    ),
    "weighted": lambda x, y: (
        sound(),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
        (x, y),
        math.log(3),
    ),
    "logarithms": lambda x, y: (
        nn.Sequential(sound(), nn.LogSoftmax(1)),
        F.nll_loss,
        (x, y),
        math.log(3),
    ),
    "probabilities": lambda x, y: (
        nn.Sequential(sound(), nn.Softmax(1)),
        lambda z, y: F.nll_loss(z.log(), y),
        (x, y),
        math.log(3),
    ),
    "hinge": lambda x, y: (sound(), F.multi_margin_loss, (x, y), 2 / 3),
    "a dict": lambda x, y: (
        sound(),
        lambda z, batch: F.cross_entropy(z, batch["label"]),
        {"input": x, "label": y},
        math.log(3),
    ),
    "logits in a dict": lambda x, y: (
        Logits(sound()),
        lambda z, y: F.cross_entropy(z["logits"], y),
        (x, y),
        None,
    ),
    "logits and labels in dicts": lambda x, y: (
        Logits(sound()),
        lambda z, batch: F.multi_margin_loss(z["logits"], batch["labels"]),
        {"x": x, "labels": y},
        None,
    ),
    "own loss": lambda x, y: (
        Own(sound()),
        lambda z, batch: z["loss"],
        {"x": x, "labels": y},
        None,
    ),
    "one logit": lambda x, y: (
        BINARY,
        nn.BCEWithLogitsLoss(),
        (x, (y == 0).float()[:, None]),
        math.log(2),
    ),
    "one logit, own function": lambda x, y: (
        BINARY,
        lambda z, y: F.binary_cross_entropy_with_logits(z[:, 0], y.float()),
        (x, (y == 0).long()),
        math.log(2),
    ),
    "one probability": lambda x, y: (
        nn.Sequential(BINARY, nn.Sigmoid()),
        F.binary_cross_entropy,
        (x, (y == 0).float()[:, None]),
        math.log(2),
    ),
}


def test_targets_of_sequences_count_one_by_one():
    x, y = sequences(*examples())
    x, y = (
        torch.cat([x, x], 1),
        torch.cat([y, y], 1),
    )  # four places: as many as classes would be unclear
    scores = Problem(sound(), nn.CrossEntropyLoss(), (x, y)).scores()
    right, counted = sound()(x).argmax(-1) == y, y != -100
    assert scores.accuracy == pytest.approx(float(right[counted].float().mean()))
    assert scores.guess_loss == pytest.approx(math.log(CLASSES), rel=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
        lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    ],
    ids=["flat", "turned"],
)
def test_targets_of_sequences_count_with_a_loss_of_ones_own(loss):
    x, y = examples()
    x, y = torch.stack([x, x.flip(0)] * 2, 1), torch.stack([y, y.flip(0)] * 2, 1)
    scores = Problem(sound(), loss, (x, y)).scores()
    assert scores.accuracy == pytest.approx(float((sound()(x).argmax(-1) == y).float().mean()))
    assert scores.guess_loss == pytest.approx(math.log(CLASSES), rel=1e-5)
    (text,) = doubts(
        fldiag.diagnose(Problem(untrained(), loss, (30 * x, y)), "spectrum", tell=lambda text: None)
    )
    assert "loss" in text


def test_a_loss_far_above_a_guess_is_said_where_all_labels_are_alike():
    x, y = examples()
    x, y = x[y == 0], y[y == 0]
    (text,) = doubts(
        fldiag.diagnose(
            Problem(sound(), F.cross_entropy, (-30 * x, y)), "spectrum", tell=lambda text: None
        )
    )
    assert "loss" in text
    assert (
        doubts(
            fldiag.diagnose(
                Problem(sound(), F.cross_entropy, (x, y)), "spectrum", tell=lambda text: None
            )
        )
        == []
    )


@pytest.mark.parametrize(
    "net, loss, y",
    [
        (sound(), F.mse_loss, torch.rand(N, CLASSES)),
        (sound(), F.mse_loss, (torch.arange(N * CLASSES) % 2).reshape(N, CLASSES).float()),
        (BINARY, lambda z, y: F.poisson_nll_loss(z[:, 0], y.float()), torch.arange(N) % 7),
        (BINARY, lambda z, y: F.mse_loss(z[:, 0], y), (torch.arange(N) % 2).float()),
    ],
    ids=["rows", "rows of 0 and 1", "counts", "numbers 0 and 1"],
)
def test_numbers_are_no_classes(net, loss, y):
    scores = Problem(net, loss, (examples()[0], y)).scores()
    assert scores.accuracy is None and scores.guess_loss is None


def untrained():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(CLASSES, 20), nn.ReLU(), nn.Linear(20, CLASSES))


@pytest.mark.parametrize(
    "net, x, y, words",
    [
        (sound(), -examples()[0], examples()[1], "accuracy"),
        (sound(), examples()[0], examples()[1].roll(1), "loss"),
        (
            sound(),
            examples()[0],
            examples()[1][torch.randperm(N, generator=torch.Generator().manual_seed(1))],
            "loss",
        ),
        (
            untrained(),
            torch.randn(N, CLASSES, generator=torch.Generator().manual_seed(2)),
            examples()[1],
            "accuracy",
        ),
    ],
    ids=["inverted inputs", "labels moved", "labels permuted", "untrained"],
)
def test_no_better_than_a_guess_is_said_with_the_remedy(net, x, y, words, tmp_path, capsys):
    problem = Problem(net, F.cross_entropy, (x, y), name="mine")
    with pytest.warns(UserWarning, match="no better than a guess on data") as caught:
        frame = fldiag.diagnose(problem, "spectrum", k=1)
    (text,) = [str(w.message) for w in caught if "guess" in str(w.message)]
    assert (
        all(
            word in text
            for word in (words, "mine", "as passed", "before you pass them", "untrained")
        )
        and "--slice" not in text
    )
    assert doubts(frame) == [text]
    (stored,) = doubts(frame.assign(inputs="pixels / 255"))  # of a file, where options choose
    assert all(
        word in stored
        for word in ("pixels / 255", "--normalise", "normalise=", "--slice", "slice=")
    )
    told = []
    (made,) = answer(
        "spectrum", [problem], {"k": 1}, out=tmp_path, bar=lambda title: _bar(), tell=told.append
    )
    assert text in [getattr(item, "text", "") for item in made.summary()]
    assert json.loads(made.files[0].read_text())["warnings"] == [text]


def _bar():
    return contextlib.nullcontext(lambda done, total, text: None)


def row(metric, value, guess, n=1000, stderr=0.01, **more):
    return {
        "run": "r",
        "slice": "train",
        "metric": metric,
        "value": value,
        "guess": guess,
        "stderr": stderr,
        "n_examples": n,
        "inputs": "pixels / 255",
        "scope": "global",
        "moment": "aggregated",
        **more,
    }


@pytest.mark.parametrize(
    "rows, said",
    [
        ([row("loss", 0.3, 2.3), row("accuracy", 0.9, 0.1)], False),
        ([row("loss", 3.14, 2.3), row("accuracy", 0.2, 0.1)], True),
        (
            [row("loss", 2.29, 2.3), row("accuracy", 0.2, 0.1)],
            True,
        ),  # below by less than two standard errors
        ([row("loss", 2.2, 2.3), row("accuracy", 0.11, 0.1)], True),
        ([row("loss", 0.3, 0.69), row("accuracy", 0.95, 0.8)], False),
        (
            [row("loss", 1.0, 1.1, n=2), row("accuracy", 0.5, 0.5, n=2)],
            False,
        ),  # two examples tell nothing
        ([row("loss", 1.2, 1.1, n=3, stderr=0.8), row("accuracy", 0.67, 0.67, n=3)], False),
        ([row("loss", 9.0, 1.1, n=1, stderr=None), row("accuracy", 0.0, 1.0, n=1)], False),
        ([row("loss", 9.0, 1.1, n=50, stderr=0.8), row("accuracy", 0.98, 0.98, n=50)], True),
        (
            [
                row("loss", 4.0, 2.3, scope="client", client=1),
                row("accuracy", 0.4, 0.1, scope="client", client=1),
            ],
            False,
        ),
        (
            [
                row("loss", 4.0, 2.3, scope="client", client=1),
                row("accuracy", 0.1, 0.1, scope="client", client=1),
            ],
            True,
        ),
        (
            [
                row("loss", 4.0, 2.3, scope="client", client=1),
                row("accuracy", 0.1, 0.1, scope="client", client=1),
                row("loss", 0.3, 2.3),
                row("accuracy", 0.9, 0.1),
            ],
            False,
        ),  # the global model speaks for the run
        (
            [
                row("loss", 2.4, 2.3, round=1),
                row("accuracy", 0.1, 0.1, round=1),
                row("loss", 0.4, 2.3, round=9),
                row("accuracy", 0.9, 0.1, round=9),
            ],
            False,
        ),
        ([row("loss", 7.0, None)], False),
    ],
)
def test_what_is_worth_a_word(rows, said):
    assert len(doubts(table(rows))) == said


def test_many_models_are_one_warning():
    rows = [
        row(m, v, g, run=f"model {i}")
        for i in range(9)
        for m, v, g in (("loss", 3.0, 2.3), ("accuracy", 0.1, 0.1))
    ]
    (text,) = doubts(table(rows))
    assert "model 0" in text and "model 8" not in text and "and 6 more" in text


def test_the_majority_is_a_guess_unless_the_loss_knows_more():
    assert (
        guess_accuracy([0.9, 0.1], "test") == 0.9
        and guess_accuracy([0.9, 0.1], "test", loss=0.1) == 0.5
    )
    assert (
        guess_accuracy([0.9, 0.1], "client:3/test") == 0.5
        and guess_accuracy([1.0, 0.0, 0.0], "client:3/train") == 1 / 3
    )


def test_a_sound_model_of_rare_cases_is_not_doubted():
    g = torch.Generator().manual_seed(0)
    y = (torch.arange(2000) % 50 == 0).long()
    x = torch.randn(2000, 1, generator=g) + 3 * y[:, None]
    net = nn.Linear(1, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.0], [3.0]]))
        net.bias.copy_(torch.tensor([0.0, -math.log(49) - 4.5]))
    scores = Problem(net, F.cross_entropy, (x, y)).scores()
    frame = fldiag.diagnose(
        Problem(net, F.cross_entropy, (x, y)), "spectrum", tell=lambda text: None
    )
    assert scores.accuracy > 0.97 and doubts(frame) == []
    decayed = Problem(net, F.cross_entropy, (x, y), weight_decay=0.1)
    assert doubts(fldiag.diagnose(decayed, "spectrum", tell=lambda text: None)) == []
    constant = nn.Linear(1, 2)
    with torch.no_grad():
        constant.weight.zero_()
        constant.bias.copy_(torch.tensor([math.log(49), 0.0]))
    (text,) = doubts(
        fldiag.diagnose(
            Problem(constant, F.cross_entropy, (x, y)), "spectrum", tell=lambda text: None
        )
    )
    assert "accuracy 98.0% (a guess gives 98.0%)" in text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return record(tmp_path_factory.mktemp("standing") / "run", rounds=3)


OF_RUNS = [
    n
    for n in registry.diagnostic.names()
    if registry.diagnostic.get(n).on in ("run", "clients") and n not in ("doctor", "lora")
]


@pytest.mark.parametrize("name", OF_RUNS)
def test_a_run_shows_the_global_model_of_the_last_round(name, run):
    options = {
        k: v
        for k, v in {"k": 1, "path": 0}.items()
        if k in registry.diagnostic.get(name).options.model_fields
    }
    dataset, _ = blobs()
    frame = fldiag.diagnose(
        run, name, model=network(), data=dataset, tell=lambda text: None, **options
    )
    rows = standing(frame)
    assert len(rows) == 1 and rows[0]["scope"] == "global" and rows[0]["round"] == 3
    assert (
        0 < rows[0]["accuracy"] <= 1
        and rows[0]["loss"] > 0
        and rows[0]["inputs"] == "as they are (float32)"
    )
    wrong = dataset.__class__(
        "blobs",
        30 * dataset.train_x.flip(1),
        dataset.train_y,
        30 * dataset.test_x.flip(1),
        dataset.test_y,
        4,
    )
    (text,) = doubts(
        fldiag.diagnose(run, name, model=network(), data=wrong, tell=lambda text: None, **options)
    )
    assert text.count("no better than a guess") == 1 and "client" not in text.partition(". Either")[
        0
    ].replace("clients/", "")


def test_the_inputs_are_said_of_every_kind_of_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    arrays = {"train_labels": np.arange(30) % 3, "test_labels": np.arange(30) % 3}
    pixels = rng.integers(0, 256, (30, 4, 4, 3), dtype=np.uint8)
    np.savez("pixels.npz", train_images=pixels, test_images=pixels, **arrays)
    floats = rng.normal(size=(30, 5)).astype(np.float32)
    np.savez("floats.npz", train_images=floats, test_images=floats, **arrays)
    (tmp_path / "own_data.py").write_text(
        "import torch\nfrom fldiag.data import Dataset\nx, y = torch.rand(30, 5), torch.arange(30) % 3\n"
        "def arrays(): return x, y, x, y\ndef pair(): return x.double(), y\n"
        "def dataset(): return Dataset('d', x, y, x, y, 3, mean=(0.5,) * 5, std=(2.0,) * 5)\n"
    )
    (tmp_path / "texts.csv").write_text(
        "text,label,split\n"
        + "".join(
            f"{'good' if i % 2 else 'bad'} film {i},{i % 2},{'test' if i > 20 else 'train'}\n"
            for i in range(30)
        )
    )
    cases = [
        ("npz:pixels.npz", {}, "pixels / 255"),
        ("npz:pixels.npz", {"normalise": "none"}, "as they are (float32)"),
        (
            "npz:pixels.npz",
            {"normalise": ((0.5, 0.4, 0.3), (0.25, 0.2, 0.1))},
            "pixels / 255, then minus mean 0.5, 0.4, 0.3 and over deviation 0.25, 0.2, 0.1",
        ),
        (
            "npz:pixels.npz",
            {"normalise": "0.5/0.25"},
            "pixels / 255, then minus mean 0.5, 0.5, 0.5 and over deviation 0.25, 0.25, 0.25",
        ),
        ("npz:floats.npz", {}, "as they are (float32)"),
        ("own_data:arrays", {}, "as they are (float32)"),
        ("own_data:pair", {}, "as passed (float64)"),
        ("digits", {}, "as they are (float32), then minus mean 0.3053 and over deviation 0.376"),
        ((torch.rand(30, 5), torch.arange(30) % 3), {}, "as passed (float32)"),
    ]
    for data, more, words in cases:
        shape = 64 if data == "digits" else 48 if data == "npz:pixels.npz" else 5
        net = nn.Sequential(nn.Flatten(), nn.Linear(shape, 10 if data == "digits" else 3))
        torch.save(net.state_dict(), "w.pt")
        options = (
            {"samples": 30, **more} if isinstance(data, str) and data != "own_data:pair" else more
        )
        (made,) = answer(
            "spectrum",
            [fldiag.load("w.pt")],
            {"model": net, "data": data, **options},
            out=tmp_path / "out",
            bar=lambda title: _bar(),
            tell=lambda text: None,
        )
        about = json.loads(next(f for f in made.files if f.suffix == ".json").read_text())
        assert [c["inputs"] for c in about["checkpoints"].values()] == [words]
        assert words in next(f for f in made.files if f.suffix == ".csv").read_text()
        assert any(words in getattr(item, "text", "") for item in made.summary())
