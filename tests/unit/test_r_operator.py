"""The forms of curvature products: each against dense matrices, against each other, and refused when wrong."""

import pytest
import torch
from problems import double_backward
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from fldiag.curvature.r_operator import ChainOperator
from fldiag.errors import FldiagError
from fldiag.models.layers import LinearLink, network_links
from fldiag.problem import operators
from fldiag.problem.problem import Problem


def normed():
    norm = nn.BatchNorm2d(4)
    (
        norm.running_mean.copy_(torch.linspace(-0.3, 0.4, 4)),
        norm.running_var.copy_(torch.linspace(0.5, 2, 4)),
    )
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, 4)), norm.bias.copy_(torch.linspace(0.1, -0.2, 4))
    return norm


CHAINS = {
    "affine": lambda: nn.Linear(16, 3),
    "mlp": lambda: nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.ReLU(),
        nn.Linear(5, 4, bias=False),
        nn.LeakyReLU(0.2),
        nn.Linear(4, 3),
    ),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(3, 4, 2, bias=False), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(4, 3),
    ),
    "strides": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=2, dilation=2),
        normed(),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding="same", groups=2),
        nn.Dropout(0.5),
        nn.AvgPool2d(2, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ),
    "overlapping": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 2),
        nn.MaxPool2d(2, 1),
        nn.ReLU(),
        nn.Conv2d(4, 2, 1),
        nn.Identity(),
        nn.Flatten(),
        nn.Linear(8, 3),
    ),
}


def problem(name, loss=cross_entropy, n=9, **options):
    torch.manual_seed(2)
    net = CHAINS[name]()
    x = torch.randn(n, 16) if name == "affine" else torch.randn(n, 1, 4, 4)
    y = torch.randn(n, 3) if loss is not cross_entropy else torch.arange(n) % 3
    options.setdefault("dtype", torch.float64)
    return Problem(net, loss, (x, y), **options)


def dense(p):
    """Hessian and Gauss-Newton matrix of the mean loss."""
    x, y = p.read(0, p.n)
    j = torch.func.jacrev(lambda w: p.call(w, x).reshape(-1))(p.w)
    z = p.call(p.w, x)
    h = torch.func.hessian(lambda z: p.user_loss(z.reshape(len(y), -1), y))(z.reshape(-1))
    return torch.func.jacrev(torch.func.jacrev(lambda w: p.user_loss(p.call(w, x), y)))(
        p.w
    ), j.T @ h @ j


def log_cosh(z, y):
    return torch.log(torch.cosh(z - y)).sum(1).mean()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [cross_entropy, mse_loss, log_cosh])
@pytest.mark.parametrize("name", CHAINS)
def test_products_by_hand_are_those_of_the_dense_matrices(name, loss):
    p = problem(name, loss)
    p.__dict__["bounds"] = [(0, 4), (4, 8), (8, 9)]  # a shorter last batch
    for matrix, expected in zip(("hessian", "ggn"), dense(p), strict=True):
        for h, form in (
            (p.hessian(matrix=matrix), "r-operator"),
            (double_backward(p, matrix=matrix), "double backward"),
        ):
            assert h.form == form
            found = torch.stack([h(e) for e in torch.eye(p.layout.size, dtype=torch.float64)])
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_single_precision_agrees_to_its_rounding():
    p = problem("cnn", dtype=torch.float32)
    v = torch.randn_like(p.w)
    a, b = p.hessian()(v), double_backward(p)(v)
    assert (
        p.hessian().form == "r-operator"
        and (a - b).norm() <= 1e-5 * b.norm()
        and a.dtype == torch.float64
    )


def test_products_elsewhere_than_at_the_weights():
    p = problem("cnn")
    w, v = p.w + 0.1, torch.randn_like(p.w)
    assert torch.allclose(p.hessian(w)(v), double_backward(p, w)(v), rtol=1e-9, atol=1e-12)


def test_a_moved_layer_alone():
    p = problem("cnn")
    h, expected = p.hessian(), dense(p)[0]
    for where in p.layout.slices().values():
        v = torch.zeros_like(p.w)
        v[where] = 1.0
        assert torch.allclose(h(v), expected @ v, rtol=1e-9, atol=1e-12)


# -- the choice


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(x)


def hooked():
    net = nn.Sequential(nn.Linear(16, 3))
    net[0].register_forward_hook(lambda m, i, o: o.sin())
    return net


def shared():
    layer = nn.Linear(16, 16)
    return nn.Sequential(layer, nn.ReLU(), layer)


def tied():
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    net[2].weight = net[0].weight
    return net


@pytest.mark.parametrize(
    "make",
    [
        Own,
        hooked,
        shared,
        tied,
        lambda: nn.Sequential(nn.Linear(16, 3), nn.Tanh()),
        lambda: nn.Sequential(nn.Linear(16, 3), nn.BatchNorm1d(3, track_running_stats=False)),
        lambda: nn.Sequential(nn.Linear(16, 3), nn.Softplus()),
    ],
)
def test_anything_else_takes_double_backward(make):
    p = Problem(
        make(), cross_entropy, (torch.randn(6, 16), torch.arange(6) % 3), dtype=torch.float64
    )
    assert p.hessian().form == "double backward"


def test_a_form_that_disagrees_is_not_used(monkeypatch):
    assert problem("mlp").hessian().form == "r-operator"
    monkeypatch.setattr(LinearLink, "back", lambda self, g, weight, a: 1.001 * (g @ weight))
    p = problem("mlp")
    assert (
        p.hessian().form == "double backward" and p.hessian(matrix="ggn").form == "double backward"
    )
    monkeypatch.undo()
    monkeypatch.setitem(operators.AGREEMENT, torch.float64, -1.0)
    assert problem("cnn").hessian().form == "double backward"  # the tolerance is looked at


def test_layers_on_inputs_they_have_no_rule_for_fall_back():
    tokens = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    p = Problem(
        tokens, cross_entropy, (torch.randn(6, 4, 4), torch.arange(6) % 3), dtype=torch.float64
    )
    assert p.hessian().form == "double backward"


def test_unknown_matrices_and_outputs_without_one_are_refused():
    p = problem("mlp")
    with pytest.raises(FldiagError, match="'hessian' or 'ggn'"):
        p.hessian(matrix="fisher")

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 3)

        def forward(self, x):
            return {"logits": self.fc(x)}

    two = Problem(
        Two(), lambda z, y: cross_entropy(z["logits"], y), (torch.randn(6, 16), torch.arange(6) % 3)
    )
    with pytest.raises(FldiagError, match="returns a dict"):
        two.hessian(matrix="ggn")(two.w)


# -- memory


def test_memory_decides_how_many_batches_stay_prepared():
    p = problem("cnn")
    p.probe()
    read, size = [], p.layout.size

    def batch(a, b):
        def take():
            read.append((a, b))
            return p.read(a, b)

        return take

    def operator(room):
        return ChainOperator(
            network_links(p.module, p.buffers),
            p.criterion,
            [batch(0, 4), batch(4, 8), batch(8, 9)],
            [4 / 9, 4 / 9, 1 / 9],
            p.w,
            p.layout,
            room=room,
        )

    one = operator(0)._prepare(0)
    floor = (
        4 * 8 * (16 + 3 * 4 + 4 + 4)
    )  # inputs of the three affine layers and the last slope, of four examples
    assert floor <= one.nbytes <= 6 * floor
    v, results = torch.randn(size, dtype=torch.float64), []
    for room, expected in ((0, 6), (int(2.1 * one.nbytes), 4), (10**9, 3)):
        read.clear()
        h = operator(room)
        results += [h(v), h(v)]
        assert len(read) == expected and h.products == 2
        h.release()
        read.clear()
        results.append(h(v))
        assert len(read) == 3
    assert all(torch.equal(r, results[0]) for r in results)
    assert problem("cnn", memory=1).hessian()._room == 0 and p.hessian(keep=False)._room == 0


def test_no_growth_over_many_products():
    p = problem("cnn")
    h, v = p.hessian(), torch.randn_like(p.w)
    h(v)
    nbytes = h._bytes
    for _ in range(20):
        h(v)
    assert h._bytes == nbytes == sum(prepared.nbytes for prepared in h._prepared.values())


def test_global_state_and_gradient_mode():
    p = problem("cnn")
    state = torch.get_rng_state()
    with torch.no_grad():
        a = p.hessian()(torch.ones_like(p.w))
        assert not torch.is_grad_enabled()
    assert torch.equal(a, p.hessian()(torch.ones_like(p.w))) and torch.equal(
        state, torch.get_rng_state()
    )
