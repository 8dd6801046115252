"""Losses along directions: every fast way is the problem's own loss."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fldiag.problem.problem import Problem
from fldiag.surface.evaluator import Evaluator

PLACES = [(0.7, -0.4), (0.2, -0.4), (0.0, 1.0), (-1.0, 0.0), (1e-3, 2e-3)]


def nets():
    torch.manual_seed(0)
    return {
        "conv": nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 5, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(5, 3),
        ),
        "pool first": nn.Sequential(
            nn.AvgPool2d(1),
            nn.Conv2d(2, 4, 2, bias=False),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(100, 3),
        ),
        "mlp": nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.ReLU(), nn.Linear(8, 3)),
        "relu first": nn.Sequential(
            nn.ReLU(), nn.Flatten(), nn.Linear(72, 8), nn.GELU(), nn.Linear(8, 3, bias=False)
        ),
        "linear": nn.Sequential(nn.Flatten(), nn.Linear(72, 3)),
        "batch-norm": nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        ),
    }


def problem(net="conv", n=20, loss=F.cross_entropy, **options):
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(n, 2, 6, 6, generator=g), torch.arange(n) % 3
    return Problem(nets()[net] if isinstance(net, str) else net, loss, (x, y), **options)


def directions(p, count=2, scale=0.3):
    g = torch.Generator().manual_seed(2)
    return [
        scale * torch.randn(p.layout.size, generator=g, dtype=torch.float64) for _ in range(count)
    ]


@pytest.mark.parametrize("net", nets())
@pytest.mark.parametrize("memory", [2**31, 1, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.slow
def test_losses_are_those_of_the_problem(net, memory, dtype):
    p = problem(net, dtype=dtype, memory=memory)
    found = directions(p)
    evaluate = Evaluator(p, found)
    assert (evaluate.chain is not None) == (net != "batch-norm")
    tight = 1e-5 if dtype == torch.float32 else 1e-12
    for c in PLACES:
        value, stderr = p.loss(p.w.double() + c[0] * found[0] + c[1] * found[1])
        assert evaluate(*c) == (
            pytest.approx(value, rel=tight),
            pytest.approx(stderr, rel=10 * tight),
        )
        assert float(evaluate.losses(*c).mean()) == pytest.approx(value, rel=tight)
    assert evaluate(0.0, 0.0) == p.loss()


def test_answers_do_not_depend_on_the_order_of_questions():
    a, b = (Evaluator(problem(), directions(problem())) for _ in range(2))
    assert [a(*c) for c in PLACES] == [b(*c) for c in reversed(PLACES)][::-1]


@pytest.mark.parametrize("count", [1, 3])
def test_one_direction_or_three(count):
    p = problem(dtype=torch.float64)
    found = directions(p, count)
    c = [0.5, -0.3, 0.2][:count]
    assert Evaluator(p, found)(*c)[0] == pytest.approx(
        p.loss(p.w + sum(a * d for a, d in zip(c, found, strict=True)))[0], rel=1e-12
    )


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e8])
def test_a_fast_way_that_disagrees_is_not_used_whatever_the_unit_of_the_loss(monkeypatch, scale):
    from fldiag.surface import evaluator

    right = evaluator._layer
    p = problem(loss=lambda z, y: scale * F.cross_entropy(z, y))
    assert Evaluator(p, directions(p)).chain is not None
    found = directions(p)
    monkeypatch.setattr(
        evaluator,
        "_layer",
        lambda name, m, views, x: right(name, m, views, x) * (1.01 if name == "3" else 1),
    )
    evaluate = Evaluator(p, found)
    assert evaluate.chain is None and evaluate(0.5, 0.5) == p.loss(
        p.w.double() + 0.5 * found[0] + 0.5 * found[1]
    )


def test_the_data_are_never_written_to():
    p = problem("relu first", memory=1)
    x = p.read(0, 20)[0].clone()
    Evaluator(p, directions(p))(0.5, 0.5)
    assert (
        torch.equal(torch.cat([p.batch(i)[0] for i in range(len(p.bounds))]), x)
        and float(x.min()) < 0
    )


def test_losses_without_examples_of_their_own():
    def spread(z, y):  # the mean over examples of a number that vmap cannot take apart
        return torch.stack(
            [F.cross_entropy(a[None], b[None]) for a, b in zip(z.tolist() and z, y, strict=True)]
        ).mean()

    p = problem(loss=spread, dtype=torch.float64)
    evaluate, found = Evaluator(p, directions(p)), directions(p)
    assert p.probe().per_example is None and evaluate.losses(0.5, 0.1) is None
    assert evaluate(0.5, 0.1) == (
        pytest.approx(p.loss(p.w + 0.5 * found[0] + 0.1 * found[1])[0], rel=1e-12),
        None,
    )


def test_buffers_move_with_the_coefficients():
    p = problem("batch-norm", dtype=torch.float64)
    (d,) = directions(p, 1)

    def shifted(t):
        return {n: b + t if b.is_floating_point() else b for n, b in p.buffers.items()}

    evaluate = Evaluator(p, [d], buffers=shifted)
    x, y = p.read(0, p.n)
    net = copy.deepcopy(p.module)
    net.load_state_dict({**p.layout.views(p.w + 0.5 * d), **shifted(0.5)})
    with torch.no_grad():
        assert evaluate(0.5)[0] == pytest.approx(float(F.cross_entropy(net(x), y)), rel=1e-12)
    assert evaluate(0.5)[0] != pytest.approx(p.loss(p.w + 0.5 * d)[0], rel=1e-3)
