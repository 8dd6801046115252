"""Hessian-vector products against dense Hessians by torch.func, and their book-keeping."""

import pytest
import torch
import torch.nn.functional as F
from helpers import close
from problems import data, double_backward, mlp
from torch import nn
from torch.autograd.function import once_differentiable

from fldiag.curvature.hvp import GaussNewton, Hessian
from fldiag.curvature.operator import PIECE, add
from fldiag.diagnostics.spectrum import spectrum
from fldiag.diagnostics.trace import trace
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem


def batch_norm_net():
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    )
    net[1].running_mean.copy_(torch.tensor([0.3, -0.2]))
    net[1].running_var.copy_(torch.tensor([0.5, 2.0]))
    return net


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        tokens = x.flatten(1).reshape(len(x), 4, 4)
        return self.out(self.mix(tokens, tokens, tokens, need_weights=False)[0].mean(1))


class Residual(nn.Module):
    """Sums, ReLU and batch-norm that uses its running statistics."""

    def __init__(self):
        super().__init__()
        self.a, self.na = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.b, self.nb, self.out = (
            nn.Conv2d(2, 2, 3, padding=1),
            nn.BatchNorm2d(2),
            nn.Linear(2, 3),
        )
        for norm in (self.na, self.nb):
            (
                nn.init.normal_(norm.running_mean),
                nn.init.uniform_(norm.running_var, 0.5, 2),
                nn.init.normal_(norm.weight),
            )

    def forward(self, x):
        out = F.relu(self.na(self.a(x)))
        return self.out(F.relu(out + self.nb(self.b(out))).mean((2, 3)))


NETS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.GELU(), nn.Linear(4, 3)),
    "conv": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
    ),
    "group norm": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    ),
    "batch norm": batch_norm_net,
    "attention": Attention,
    "residual": Residual,
}


def problem(name="mlp", n=11, **options):
    torch.manual_seed(3)
    net = NETS[name]()
    x, y = torch.randn(n, 1, 4, 4), torch.arange(n) % 3
    return Problem(net, F.cross_entropy, (x, y), dtype=torch.float64, **options)


def dense(p):
    """The Hessian of the mean loss over all examples at once, by forward over reverse."""
    x, y = p.read(0, p.n)

    def loss(w):
        return p.user_loss(p.call(w, x), y)

    return torch.func.jacrev(torch.func.jacrev(loss))(p.w)


@pytest.mark.parametrize("name", NETS)
def test_products_are_those_of_the_dense_hessian(name):
    p = problem(name)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        h = dense(p)
    operator = p.hessian()
    for seed in range(3):
        v = torch.randn(
            p.layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        assert torch.allclose(operator(v), h @ v, rtol=1e-9, atol=1e-11)
        assert torch.allclose(p.hvp(v), h @ v, rtol=1e-9, atol=1e-11)
    assert operator.products == 3


def test_products_elsewhere_than_at_the_weights():
    p = problem()
    w = p.w + 0.3
    v, step = torch.randn_like(p.w), 1e-5
    difference = (p.gradient(w + step * v) - p.gradient(w - step * v)) / (2 * step)
    assert torch.allclose(p.hvp(v, w), difference, atol=1e-7)


@pytest.mark.parametrize("name", ["conv", "group norm"])
def test_batches_of_any_size_weigh_every_example_alike(name):
    whole, pieces = problem(name), problem(name, memory=1)
    assert len(whole.bounds) == 1 and len(pieces.bounds) == pieces.n
    four = problem(name)
    four.__dict__["bounds"] = [(0, 4), (4, 8), (8, 11)]  # a shorter last batch
    v = torch.randn_like(whole.w)
    expected = whole.hessian()(v)
    for other in (pieces, four):
        assert torch.allclose(other.hessian()(v), expected, rtol=1e-10, atol=1e-12)
        assert torch.allclose(other.gradient(), whole.gradient(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NETS)
def test_tensors_one_by_one_give_the_products_of_the_whole_vector(name):
    p = problem(name)
    x, y = p.batch(0)
    v = torch.randn_like(p.w)
    for matrix, whole in (
        ("hessian", Hessian([lambda w: p.criterion(p.call(w, x), y)], [1.0], p.w)),
        ("ggn", GaussNewton([lambda w: (p.call(w, x), lambda z: p.criterion(z, y))], [1.0], p.w)),
    ):
        found, expected = double_backward(p, matrix=matrix)(v), whole(v)
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-13) and expected.norm() > 0


def test_tensors_without_curvature_have_zeros_in_their_place():
    """The first tensor is not used, the second enters linearly, both beside others that do curve."""

    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused, self.slope, self.curve = (
                nn.Parameter(torch.randn(2).double()) for _ in range(3)
            )

        def forward(self, x):
            return (x * self.slope).sum(1) + (x * self.curve**3).sum(1)

    p = Problem(
        Partly(),
        lambda z, y: (z - y).mean(),
        (torch.randn(5, 2).double(), torch.zeros(5).double()),
        dtype=torch.float64,
    )
    v, mean = torch.randn(6).double(), p.batch(0)[0].mean(0)
    expected = torch.cat([torch.zeros(4).double(), 6 * p.w[4:] * mean * v[4:]])
    assert torch.allclose(double_backward(p)(v), expected, rtol=1e-12)


@pytest.mark.parametrize(
    "size", [(1,), (PIECE - 1,), (PIECE,), (2 * PIECE + 3,), (3, PIECE // 2 + 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_in_pieces_are_the_sum(size, dtype):
    """Of vectors, and of stacks of them."""
    part, total = torch.randn(size, dtype=dtype), torch.randn(size, dtype=torch.float64)
    expected = total + 0.3 * part.double()
    add(total, part, 0.3)
    close(total, expected, terms=2)


def test_a_vector_may_have_any_precision_and_is_left_alone():
    """Vectors in another precision share memory from product to product, which must not show."""
    p = problem("conv")
    h, v = p.hessian(), torch.randn(p.layout.size, dtype=torch.float32)
    kept, other = v.clone(), torch.randn_like(v)
    first = h(v)
    before = first.clone()
    h(other)
    assert torch.equal(first, before) and torch.equal(v, kept) and torch.equal(h(v), h(v.double()))


def test_kept_rebuilt_and_released_graphs_give_the_same_bits():
    p = problem("conv")
    calls = []

    def piece(w):
        calls.append(1)
        return p.criterion(p.call(w, p.read(0, 11)[0]), p.read(0, 11)[1])

    v = torch.randn_like(p.w)
    kept, rebuilt = (
        Hessian([piece, piece], [0.5, 0.5], p.w, keep=1),
        Hessian([piece, piece], [0.5, 0.5], p.w),
    )
    results = [kept(v), kept(v)]
    assert len(calls) == 3  # the first batch once, the second one twice
    results += [rebuilt(v), rebuilt(v)]
    assert len(calls) == 7
    kept.release()
    results.append(kept(v))
    assert len(calls) == 9
    assert all(torch.equal(r, results[0]) for r in results)


def test_memory_decides_how_many_graphs_are_kept():
    p = problem("conv")
    p.__dict__["bounds"] = [(0, 4), (4, 8), (8, 11)]
    graph, vectors = 4 * p.probe().graph_bytes + 2 * p.w.nbytes, 4 * 8 * len(p.w)
    assert graph > vectors
    for many, kept in ((1, []), (2, [0, 1]), (3, [0, 1, 2])):  # one of three is not worth its room
        p.memory = 2 * (many * graph + vectors)
        h = double_backward(p)
        h(torch.randn_like(p.w))
        assert sorted(h._prepared) == kept
    h = double_backward(p, keep=False)
    h(torch.randn_like(p.w))
    assert not h._prepared


@pytest.mark.parametrize("products", [double_backward, Problem.hessian])
def test_a_problem_made_in_inference_mode_has_products(products):
    net, given = mlp(), data(20)
    v = torch.randn(sum(p.numel() for p in net.parameters()))
    with torch.inference_mode():
        p = Problem(net, F.cross_entropy, given)
    assert torch.equal(products(p)(v), products(Problem(net, F.cross_entropy, given))(v))


def test_sums_over_batches_are_double_precision():
    w = torch.ones(3)
    terms = [
        lambda w: 0.5e8 * w.square().sum(),
        lambda w: 0.5 * w.square().sum(),
        lambda w: -0.5e8 * w.square().sum(),
    ]
    product = Hessian(terms, [1.0, 1.0, 1.0], w)(torch.ones(3))
    assert product.dtype == torch.float64 and product.tolist() == [1.0, 1.0, 1.0]


def test_linear_and_constant_losses_have_no_curvature():
    zero = torch.zeros(3, dtype=torch.float64)
    for loss in (lambda w: w.sum(), lambda w: (w * 0).sum() + 1, lambda w: torch.ones(())):
        assert torch.equal(Hessian([loss], [1.0], torch.ones(3))(torch.ones(3)), zero)


def test_works_under_no_grad():
    p = problem()
    with torch.no_grad():
        inside = p.hvp(torch.ones_like(p.w))
    assert torch.equal(inside, p.hvp(torch.ones_like(p.w)))


def test_a_model_that_spoils_its_own_derivative_gets_one_clear_error():
    class Spoils(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(16, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            a = self.a(x.flatten(1))
            b = self.b(a)
            return self.c(b + a.relu_())  # b still needs what a was

    p = Problem(Spoils(), F.cross_entropy, (torch.randn(5, 1, 4, 4), torch.arange(5) % 3))
    for evaluate in (spectrum, trace, Problem.gradient, lambda p: spectrum(p, matrix="ggn")):
        with pytest.raises(
            FldiagError,
            match=r"cannot be differentiated: one of .* modified by an inplace.*inplace=False",
        ):
            evaluate(p)


def test_wrong_size_and_missing_second_derivatives_are_explained():
    p = problem()
    with pytest.raises(FldiagError, match=r"shape \[5\]"):
        p.hvp(torch.ones(5))

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            ctx.save_for_backward(w)
            return w * w

        @staticmethod
        @once_differentiable
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

    for loss in (
        lambda w: Square.apply(w).square().sum(),
        lambda w: (Square.apply(w) + w**3).square().sum(),
    ):
        with pytest.raises(FldiagError, match="differentiated twice"):
            Hessian([loss], [1.0], torch.ones(3))(torch.ones(3))
