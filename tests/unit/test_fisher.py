"""Fisher matrices against dense ones that are made of the gradients of single examples."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, nll_loss

from fldiag.diagnostics.spectrum import spectrum
from fldiag.errors import FldiagError
from fldiag.problem.fisher import fisher_operator, sample_labels
from fldiag.problem.problem import Problem
from fldiag.seeding import torch_rng

CLASSES = 3


def problem(loss=cross_entropy, targets=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    x = torch.randn(12, 4)
    y = torch.arange(12) % CLASSES if targets is None else targets
    return Problem(model, loss, (x, y), dtype=torch.float64, **options)


def gradients(q, labels):
    """The gradient of -log p(label) of each example [n, P]."""
    x, _ = q.read(0, q.n)

    def loss(w, i, label):
        return cross_entropy(q.call(w, x[i : i + 1]), label[None])

    return torch.stack([torch.func.grad(loss)(q.w, i, labels[i]) for i in range(q.n)])


def expected_matrix(q, matrix, draws, seed):
    """The mean of the outer products, from the gradients of single examples."""
    x, y = q.read(0, q.n)
    p = q.call(q.w, x).softmax(1).detach()
    if matrix == "fisher":
        weighted = [
            (p[:, c].sqrt()[:, None] * gradients(q, torch.full((q.n,), c))) for c in range(CLASSES)
        ]
        return sum(g.T @ g for g in weighted) / q.n
    if matrix == "fisher-empirical":
        g = gradients(q, y)
        return g.T @ g / q.n
    return torch.stack(of_draws(q, draws, seed)).mean(0)


def of_draws(q, draws, seed):
    x, _ = q.read(0, q.n)
    generator = torch_rng(seed, "labels of a Fisher")
    chances = torch.rand(q.n, draws, dtype=torch.float64, generator=generator)
    labels = sample_labels(q.call(q.w, x).detach(), chances)
    return [g.T @ g / q.n for g in (gradients(q, labels[:, d]) for d in range(draws))]


def dense(operator):
    return torch.stack([operator(e) for e in torch.eye(operator.size, dtype=torch.float64)])


@pytest.mark.parametrize(("memory", "decay"), [(2**31, 0.0), (1, 0.7)])
@pytest.mark.parametrize("matrix", ["fisher", "fisher-mc", "fisher-empirical"])
def test_the_operator_is_the_matrix_of_per_example_gradients(matrix, memory, decay):
    q = problem(memory=memory, weight_decay=decay)
    operator = fisher_operator(q, matrix, draws=4, seed=3)
    expected = expected_matrix(q, matrix, 4, 3)
    atol = 1e-12 * float(expected.norm())
    assert torch.allclose(dense(operator), expected, atol=atol)
    v = torch.linspace(-1, 1, q.layout.size, dtype=torch.float64)
    assert torch.allclose(operator(v), expected @ v, atol=atol * float(v.norm()))
    if memory == 1:
        return
    block = q.dense("2", matrix=matrix, draws=4, seed=3)
    assert torch.allclose(block, expected[25:, 25:], atol=atol)


def test_the_exact_fisher_is_the_gauss_newton_matrix():
    q = problem()
    expected = expected_matrix(q, "fisher", 1, 0)
    assert torch.allclose(q.dense(matrix="ggn"), expected, atol=1e-12 * float(expected.norm()))
    rows = spectrum(q, k=2, tol=1e-9, matrix="fisher").query("metric == 'eigenvalue'")
    ggn = spectrum(q, k=2, tol=1e-9, matrix="ggn").query("metric == 'eigenvalue'")
    assert rows.value.tolist() == ggn.value.tolist()
    assert set(rows.estimator) == {"lanczos-ggn"} and set(rows.matrix) == {"fisher"}


@pytest.mark.parametrize("params", [None, "2.*"])
@pytest.mark.parametrize("matrix", ["fisher-mc", "fisher-empirical"])
def test_eigenvalues_and_their_error_over_draws(matrix, params):
    q = problem()
    options = {"k": 2, "tol": 1e-10, "matrix": matrix, "draws": 6, "seed": 1}
    table = spectrum(q, params=params, **options)
    rows = table.query("metric == 'eigenvalue'")
    block = slice(0, None) if params is None else slice(25, None)
    values, vectors = torch.linalg.eigh(expected_matrix(q, matrix, 6, 1)[block, block])
    assert rows.value.tolist() == pytest.approx(values.flip(0)[:2].tolist(), rel=1e-8)
    if matrix == "fisher-empirical":
        assert rows.stderr.isna().all()
        return
    for row, v in zip(rows.itertuples(), vectors.T.flip(0), strict=False):
        quotients = torch.stack([v @ m[block, block] @ v for m in of_draws(q, 6, 1)])
        assert row.stderr == pytest.approx(float(quotients.std()) / 6**0.5, rel=1e-4)


def test_many_sampled_labels_come_near_the_exact_matrix():
    q, draws = problem(), 3000
    exact = expected_matrix(q, "fisher", 1, 0)
    sampled = dense(fisher_operator(q, "fisher-mc", draws=draws, seed=0))
    # a sum of squares of q.n * draws gradients of about this size
    squares = (gradients(q, torch.zeros(q.n, dtype=torch.int64)).norm(dim=1) ** 2).max()
    assert float((sampled - exact).norm()) < 5 * float(squares) / (q.n * draws) ** 0.5


def test_weight_decay_is_not_part_of_a_fisher():
    q = problem(weight_decay=0.5)
    expected = expected_matrix(q, "fisher", 1, 0)
    assert torch.allclose(
        q.dense(matrix="ggn") - expected,
        0.5 * torch.eye(q.layout.size, dtype=torch.float64),
        atol=1e-10,
    )
    assert torch.allclose(
        dense(fisher_operator(q, "fisher", draws=1, seed=0)), expected, atol=1e-10
    )


@pytest.mark.parametrize(
    ("loss", "targets", "options", "words"),
    [
        (mse_loss, torch.zeros(12, CLASSES), {}, "is not the cross entropy"),
        (lambda z, y: nll_loss(z.log_softmax(1), y), None, {}, "is not the cross entropy"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), None, {}, "label smoothing is not"),
        (nn.CrossEntropyLoss(weight=torch.ones(CLASSES)), None, {}, "class weights"),
        (cross_entropy, torch.full((12, CLASSES), 1 / 3), {}, "labels that are class numbers"),
        (nn.CrossEntropyLoss(reduction="sum"), None, {"reduction": "sum"}, "takes the mean loss"),
        (cross_entropy, torch.tensor([-100, 0, 1, 2] * 3), {}, "use matrix = 'fisher'"),
        (cross_entropy, None, {"differences": True}, "by differences of gradients"),
    ],
)
def test_a_loss_that_is_no_likelihood_is_refused(loss, targets, options, words):
    with pytest.raises(FldiagError) as caught:
        spectrum(problem(loss, targets, **options), k=1, matrix="fisher-mc")
    assert words in str(caught.value)


def test_ignored_labels_have_an_exact_fisher():
    q = problem(targets=torch.tensor([-100, 0, 1, 2] * 3))
    x, y = q.read(0, q.n)
    counted = Problem(q.module, cross_entropy, (x[y >= 0], y[y >= 0]), dtype=torch.float64)
    expected = expected_matrix(counted, "fisher", 1, 0)
    operator = fisher_operator(q, "fisher", draws=1, seed=0)
    assert torch.allclose(dense(operator), expected, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"matrix": "gnn"}, "is not known"), ({"matrix": "fisher-mc", "draws": 0}, "no number")],
)
def test_a_dense_matrix_of_another_name_is_refused(options, words):
    with pytest.raises(FldiagError, match=words):
        problem().dense(**options)
