"""Problem: forms of data, losses and weights, which diagonals are exact, and products without a second derivative."""

import functools
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerator import DEVICES, there
from cases import OwnLoss, own_loss, padded, tokens
from reference import rows, value
from reference import values as values_of
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fldiag
from fldiag.curvature.lanczos import lanczos
from fldiag.problem.hessian import diagonal, eigenpairs, exact_layers

N = 40
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(N) % 3


def mlp(activation=nn.Tanh, out=3):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, out))


class Counting(Dataset):
    """Counts how often an example is read."""

    reads = 0

    def __len__(self):
        return 10_000

    def __getitem__(self, i):
        self.reads += 1
        return X[i % N], Y[i % N]


FORMS = {
    "arrays": (X.numpy(), Y.numpy()),
    "a data set": TensorDataset(X, Y),
    "a loader": DataLoader(TensorDataset(X, Y), batch_size=7),
    "a shuffled loader": DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True),
    "batches": [(X[:9], Y[:9]), (X[9:], Y[9:])],
}


@pytest.mark.parametrize("form", FORMS)
def test_data_in_any_form_are_the_same(form):
    p = fldiag.Problem(mlp(), F.cross_entropy, FORMS[form])
    assert p.n == N and p.loss() == fldiag.Problem(mlp(), F.cross_entropy, (X, Y)).loss()


def test_a_dict_is_inputs_and_targets():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(x)

    def loss(z, batch):
        return F.cross_entropy(z, batch["label"])

    p = fldiag.Problem(Named(), loss, {"x": X, "label": Y})
    expected = fldiag.Problem(mlp(), F.cross_entropy, (X, Y)).loss()[0]
    assert p.loss()[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("data", [(X, Y, Y), (X, Y[1:]), (X[:0], Y[:0]), X, [], (X, "labels")])
def test_other_data_are_refused(data):
    with pytest.raises(fldiag.FldiagError):
        fldiag.Problem(mlp(), F.cross_entropy, data)


def test_a_data_set_is_read_by_index():
    """The probe looks at a few examples; nothing is drawn whole before it is needed, nor kept beyond the memory."""
    data = Counting()
    p = fldiag.Problem(mlp(), F.cross_entropy, data, memory=500_000)
    p.probe()
    assert data.reads < 200
    p.loss(), p.loss()
    assert data.reads > 2 * len(data)
    expected = fldiag.Problem(mlp(), F.cross_entropy, (X, Y)).loss()[0]
    assert p.loss()[0] == pytest.approx(expected, rel=1e-6)


ONE_HOT, BITS = F.one_hot(Y, 3).float(), F.one_hot(Y, 3)
LOSSES = {
    "negative log-likelihood": (lambda z, y: F.nll_loss(z.log_softmax(1), y), Y),
    "one-hot labels": (F.cross_entropy, ONE_HOT),
    "soft labels": (nn.CrossEntropyLoss(label_smoothing=0.1), 0.9 * ONE_HOT + 0.1 / 3),
    "options by partial": (functools.partial(F.cross_entropy, label_smoothing=0.1), Y),
    "integer bits": (F.binary_cross_entropy_with_logits, BITS),
    "squares": (F.mse_loss, X[:, :3]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_their_means_over_the_slice(name):
    """In two batches, too; where they are classifications, with the share of right answers."""
    loss, y = LOSSES[name]
    net = mlp()
    z = net(X).detach()
    true = float(loss(z, y.float() if name == "integer bits" else y))
    for memory in (2**31, 40_000):
        scores = fldiag.Problem(net, loss, (X, y), memory=memory).scores()
        assert scores.loss == pytest.approx(true, rel=1e-6)
        assert float(scores.each.mean()) == pytest.approx(true, rel=1e-6)
    if name == "squares":
        assert scores.right is None
    else:
        right = ((z > 0) == y).float() if name == "integer bits" else z.argmax(1) == Y
        assert float(scores.right.double().mean()) == pytest.approx(float(right.float().mean()))


def test_the_examples_losses_hold_the_weight_decay():
    p = fldiag.Problem(mlp(), F.cross_entropy, (X, Y), weight_decay=0.3)
    bare = fldiag.Problem(mlp(), F.cross_entropy, (X, Y))
    term = 0.15 * float(p.w.double().square().sum())
    assert p.loss()[0] == pytest.approx(bare.loss()[0] + term, rel=1e-6)
    assert float(p.scores().each.mean()) == pytest.approx(p.loss()[0], rel=1e-6)


def test_numbers_are_not_taken_for_classes():
    """Counts are integers, too, but of more values than there are outputs."""

    def loss(z, y):
        return (F.softplus(z[:, 0]) - y * z[:, 1]).mean() + z.square().mean()

    assert fldiag.Problem(mlp(out=2), loss, (X, Y)).scores().right is None


def test_one_hot_labels_of_a_file_mean_cross_entropy(tmp_path):
    torch.save(mlp().state_dict(), tmp_path / "w.pt")
    told = []
    target = fldiag.load(tmp_path / "w.pt", model=mlp(), data=(X, ONE_HOT))
    table = fldiag.diagnose(target, "spectrum", k=1, tell=told.append)
    loss = float(table[table["metric"] == "loss"]["value"].iloc[0])
    assert loss == pytest.approx(float(F.cross_entropy(mlp()(X), Y)), rel=1e-6)
    assert "accuracy" in set(table["metric"]) and "cross entropy" in " ".join(told)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.norm(self.b(torch.tanh(self.a(x))))


def wrapped(state):
    return {f"module.{n.replace('a.', 'a._orig_mod.')}": t for n, t in state.items()}


NAMES = {
    "all": lambda state: state,
    "the first name of a tied tensor": lambda state: {
        n: state[n] for n in state if n != "b.weight"
    },
    "the second name of a tied tensor": lambda state: {
        n: state[n] for n in state if n != "a.weight"
    },
    "without buffers": lambda state: {
        n: t for n, t in state.items() if n.startswith(("a", "b", "norm.w", "norm.b"))
    },
    "wrapped": wrapped,
}


@pytest.mark.parametrize("names", NAMES)
def test_weights_by_any_names_of_the_modules_own(names):
    torch.manual_seed(3)
    net, other = Tied(), Tied()
    p = fldiag.Problem(net, F.cross_entropy, (X, Y), params=NAMES[names](other.state_dict()))
    assert p.loss()[0] == fldiag.Problem(other, F.cross_entropy, (X, Y)).loss()[0]
    assert p.at(net.state_dict()).loss() == fldiag.Problem(net, F.cross_entropy, (X, Y)).loss()


def test_a_vector_of_another_length_is_refused():
    p = fldiag.Problem(mlp(), F.cross_entropy, (X, Y))
    for call in (p.loss, p.at, p.gradient):
        with pytest.raises(fldiag.FldiagError, match="for a model of 43 parameters"):
            call(torch.ones(42))


PIECEWISE = {
    "relu": nn.ReLU,
    "leaky relu": nn.LeakyReLU,
    "hardtanh": nn.Hardtanh,
    "steep softplus": lambda: nn.Softplus(beta=500),
    "hardswish": nn.Hardswish,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PIECEWISE)
def test_diagonals_are_exact_where_outputs_are_piecewise_linear_in_the_layer(name, dtype):
    net = mlp(PIECEWISE[name]).to(dtype)
    p = fldiag.Problem(net, F.cross_entropy, (X.to(dtype), Y), dtype=dtype)
    all_layers = name in ("relu", "leaky relu", "hardtanh")
    assert set(exact_layers(p)) == ({"0", "2"} if all_layers else {"2"})
    result, true = diagonal(p, max_products=20), p.dense().diagonal()
    assert result.is_exact() == all_layers
    start = 0
    for tensor, (values, *_) in result.tensors.items():
        part = true[start : (start := start + len(values))]
        if result.part([tensor]).is_exact():
            torch.testing.assert_close(values, part, rtol=1e-4, atol=1e-6)


def test_standard_errors_of_estimated_entries_are_those_of_their_errors():
    """On average over seeds; of two probes, so that it matters by what the scatter is divided."""
    p = fldiag.Problem(mlp().double(), F.cross_entropy, (X.double(), Y), dtype=torch.float64)
    true, squares, stated = p.dense().diagonal()[:25], 0.0, 0.0
    for seed in range(40):
        result = diagonal(p, max_products=4, seed=seed)
        squares += (result.vectors()[0][:25] - true).square().sum()
        stated += result.vectors()[1][:25].square().sum()
    assert 0.7 < squares / stated < 1.4


def test_a_weight_that_is_used_beside_its_layer_has_its_own_diagonal():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x) + F.linear(x.flip(1), self.layer.weight)

    torch.manual_seed(2)
    p = fldiag.Problem(Twice().double(), F.cross_entropy, (X.double(), Y), dtype=torch.float64)
    torch.testing.assert_close(diagonal(p).vectors()[0], p.dense().diagonal())


def test_a_scatter_is_that_of_ten_random_vectors_or_more():
    p = fldiag.Problem(mlp().double(), F.cross_entropy, (X.double(), Y), dtype=torch.float64)
    result = diagonal(p, max_products=24, rtol=0.99)
    assert [len(s) for s in result.samples] == [10, 10]


def test_a_layer_without_a_rule_leaves_the_others_exact():
    torch.manual_seed(0)
    grouped = nn.Conv2d(2, 4, 3, groups=2)
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), grouped, nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)
    )
    x = torch.randn(N, 1, 5, 5, generator=torch.Generator().manual_seed(1))
    assert set(exact_layers(fldiag.Problem(net, F.cross_entropy, (x, Y)))) == {"0", "5"}


def test_products_without_a_second_derivative_are_differences():
    """Their eigenvalue is that of differences of the gradient in double precision, and its row says so."""
    net = mlp(nn.Hardsigmoid).double()
    p = fldiag.Problem(net, F.cross_entropy, (X.double(), Y), dtype=torch.float64)
    table = fldiag.diagnose(p, "spectrum", k=1, tol=1e-5, trace=True)
    row = table[table["metric"] == "eigenvalue"].iloc[0]
    columns = [
        (p.gradient(p.w + 1e-6 * e) - p.gradient(p.w - 1e-6 * e)) / 2e-6
        for e in torch.eye(len(p.w)).double()
    ]
    h = torch.stack(columns)
    assert float(row["value"]) == pytest.approx(float(torch.linalg.eigvalsh(h)[-1]), rel=1e-4)
    assert "differences" in row["estimator"] and "differences" in " ".join(p.remarks)
    for layer, block in ((None, h), ("2", h[25:, 25:])):
        assert value(table, "trace", layer=layer) == pytest.approx(float(block.trace()), rel=1e-4)
    assert rows(table, "trace")["estimator"].str.contains("differences").all()


class Extra(nn.Module):
    """A layer with a bare parameter, and another one of which nothing depends; it may be called nevertheless."""

    def __init__(self, bare=False, called=False):
        super().__init__()
        self.net, self.extra, self.called = mlp(nn.ReLU), nn.Linear(4, 60), called
        self.bare = nn.Parameter(torch.ones(4, 60)) if bare else None

    def forward(self, x):
        if self.called:
            self.extra(x)
        return self.net(x) if self.bare is None else (x @ self.bare)[:, :3]


def weighted_sum(z, y):
    return (z * F.one_hot(y, 3)).sum(1).mean()


@pytest.mark.parametrize("called", [True, False])
def test_what_the_outputs_do_not_depend_on_has_no_curvature(called):
    """Exact where its layer is called, else by probes; and so is all that is linear in weights."""
    options = {"k": 1, "trace": True, "per_layer": True}
    expected, frame, linear = (
        fldiag.diagnose(fldiag.Problem(net, loss, (X, Y)), "spectrum", **options)
        for net, loss in (
            (mlp(nn.ReLU), F.cross_entropy),
            (Extra(called=called), F.cross_entropy),
            (Extra(bare=True, called=called), weighted_sum),
        )
    )
    assert value(frame, "trace", layer=None) == pytest.approx(
        value(expected, "trace", layer=None), rel=1e-6
    )
    for metric in ("trace", "eigenvalue"):
        assert value(frame, metric, layer="extra") == 0
        assert set(values_of(linear, metric)) == {0}


def test_a_coarser_forward_is_said_and_counts_as_noise():
    class Coarse(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.net(x).float()

    p = fldiag.Problem(Coarse(), F.cross_entropy, (X, Y))
    p.probe()
    assert p.noise > 1e-3 and "bfloat16" in " ".join(p.remarks)


def test_little_memory_restarts_the_search_and_changes_nothing():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 60), nn.Tanh(), nn.Linear(60, 3)).double()
    data = X.double(), Y
    wide = fldiag.Problem(net, F.cross_entropy, data, dtype=torch.float64)
    narrow = fldiag.Problem(
        net, F.cross_entropy, data, dtype=torch.float64, memory=4 * 8 * 483 * 12
    )
    values = [eigenpairs(p, 3, tol=1e-8, max_products=400).values for p in (wide, narrow)]
    np.testing.assert_allclose(*values, rtol=1e-7)


def test_workers_get_the_same_problem():
    p = fldiag.Problem(mlp(), F.cross_entropy, (X, Y))
    before = p.loss()
    assert pickle.loads(pickle.dumps(p)).loss() == before


QUESTIONS = [
    ("spectrum", {"k": 2, "trace": True, "density": True, "per_layer": True, "max_products": 30}),
    ("landscape", {"k": 2}),
    ("landscape", {"directions": "random"}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "options"), QUESTIONS)
def test_an_accelerator_gives_the_same_numbers(name, options, device, monkeypatch):
    def numbers(device):
        data = X.double(), Y
        p = fldiag.Problem(
            mlp().double(), F.cross_entropy, data, device=device, dtype=torch.float64
        )
        return fldiag.diagnose(p, name, **options)["value"].to_numpy(float)

    expected = numbers("cpu")
    with there(device, monkeypatch):
        np.testing.assert_allclose(numbers(device), expected, rtol=1e-6, atol=1e-9)


def test_memory_decides_the_size_of_batches():
    """An example of the net takes 784 bytes in the graph: 16 kB, a quarter of the memory, hold 20 examples."""
    net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    data = torch.zeros(200, 64), torch.arange(200) % 10
    small, large = (fldiag.Problem(net, F.cross_entropy, data, memory=m) for m in (2**16, 2**31))
    assert small.bytes_of_example == large.bytes_of_example == 784
    assert len(small.bounds) == 10 and len(large.bounds) == 1


def test_residuals_hold_the_rounding_of_products():
    """Where the basis is the whole space nothing else is left: a tenth of noise * ||H||, or of what the basis saw of it."""
    values = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    pairs = lanczos(lambda v: values * v, 3, 2, noise=1e-3)
    assert ((pairs.residuals > 1e-4) & (pairs.residuals <= 3e-4)).all()


def test_exact_diagonals_of_losses_that_are_not_convex_in_the_outputs():
    def loss(z, y):
        return (z.sin() - F.one_hot(y, 3)).square().sum(1).mean()

    p = fldiag.Problem(
        mlp(nn.ReLU).double(), loss, (3 * X.double(), Y), dtype=torch.float64, memory=2**20
    )
    result = diagonal(p)
    assert result.is_exact() and float(p.dense().diagonal().min()) < 0
    torch.testing.assert_close(result.vectors()[0], p.dense().diagonal())


def test_ignored_classes_have_no_part_in_the_accuracy():
    net, loss = mlp(), functools.partial(F.cross_entropy, ignore_index=1)
    right = fldiag.Problem(net, loss, (X, Y)).scores().right
    expected = (net(X).argmax(1) == Y)[Y != 1].double().mean()
    assert float(right.mean()) == pytest.approx(float(expected))


@pytest.mark.parametrize("ends", [(0, 12), (12, 23), (0, 23)])
def test_a_models_own_loss_where_no_label_counts(ends):
    """Batches without a label count for nothing, the sample's halves as well; a slice without one is refused."""
    labels = padded()
    labels[slice(*ends)] = -100
    torch.manual_seed(3)
    net = OwnLoss()
    p = fldiag.Problem(net, own_loss, {"ids": tokens(), "labels": labels}, memory=40_000)
    if ends == (0, 23):
        with pytest.raises(fldiag.FldiagError, match=r"the loss.*not finite"):
            p.loss()
    else:
        true = float(net(tokens(), labels)["loss"])
        assert len(p.bounds) > 2 and p.loss()[0] == pytest.approx(true, rel=1e-6)
        assert p.gradient().isfinite().all() and p.remarks


def after_the_first(out, batch):
    """As language models shift their labels."""
    return F.cross_entropy(out["logits"][:, :-1].movedim(-1, 1), batch["labels"][:, 1:])


@pytest.mark.parametrize("lengths", [(2, 2, 2, 3, 3, 3), (3, 3, 3, 2, 2, 2), (1, 2, 3, 1, 2, 3)])
@pytest.mark.parametrize("loss", [own_loss, after_the_first])
def test_what_a_loss_counts_is_seen_whatever_the_lengths(loss, lengths):
    labels = tokens()[:6]
    labels[torch.arange(3) >= torch.tensor(lengths)[:, None]] = -100
    batch = {"ids": tokens()[:6], "labels": labels}
    torch.manual_seed(3)
    net = OwnLoss()
    p = fldiag.Problem(net, loss, batch, memory=40_000)
    p.__dict__["bounds"] = [(i, i + 1) for i in range(6)]
    assert p.loss()[0] == pytest.approx(loss(net(**batch), batch).item(), rel=1e-6)


BODY = "F.cross_entropy(FACTOR * z, y)"
SOURCES = {
    "a function": f"def loss(z, y): return {BODY}",
    "a lambda within": f"def loss(z, y): return (lambda: {BODY})()",
    "a function behind another": f"def outer(f): return lambda z, y: f(z, y)\nloss = outer(lambda z, y: {BODY})",
    "a partial function": f"loss = functools.partial(lambda z, y, w: {BODY}, w=1)",
    "torch's loss": "loss = nn.CrossEntropyLoss(label_smoothing=FACTOR / 10)",
    "an object": f"class Called:\n  def __call__(self, z, y): return {BODY}\nloss = Called()",
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_the_digest_is_that_of_what_a_loss_computes(source):
    """Wherever the change is, and not of where in a file it is written."""

    def digest(factor, lead=""):
        names = {"F": F, "functools": functools, "nn": nn}
        exec(compile(lead + source.replace("FACTOR", factor), "a" + lead, "exec"), names)
        return fldiag.Problem(mlp(), names["loss"], (X, Y)).digest()

    assert digest("1.0") == digest("1.0", "\n\n") != digest("2.0")


def test_the_digest_is_that_of_what_a_model_computes():
    """Also where neither its code nor its text says it."""

    class Scaled(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.net, self.factor = mlp(), factor

        def forward(self, x):
            return self.factor * self.net(x)

    one, same, other = (
        fldiag.Problem(Scaled(factor), F.cross_entropy, (X, Y)).digest() for factor in (1, 1, 2)
    )
    assert one == same != other
