"""Clients' Hessians side by side: the numbers of one at a time, whoever converges first, fails or comes last."""

import dataclasses
from itertools import pairwise

import helpers
import numpy as np
import pytest
import torch
from histories import history, moved, one, stored
from problems import double_backward
from torch import nn
from torch.nn.functional import cross_entropy

import fldiag
from fldiag.curvature.lanczos import Search, batched_lanczos, lanczos
from fldiag.curvature.r_operator import ChainOperator
from fldiag.errors import FldiagError
from fldiag.models.layers import LinearLink
from fldiag.models.network import Network
from fldiag.problem import stack
from fldiag.problem.eigenpairs import strict_pairs
from fldiag.problem.problem import Problem

SIZES = (20, 13, 17, 40, 15)
SPECTRUM = {"k": 3, "tol": 1e-6, "max_products": 100, "seed": 4}


def net(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(6, 5, bias=bias),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(5, 4),
        nn.LeakyReLU(0.2),
        nn.Linear(4, 3, bias=bias),
    )


def problems(sizes=SIZES, dtype=torch.float64, loss=cross_entropy, bias=True, **options):
    data, parts = helpers.classification(sizes)
    module = net(bias)
    _, weights = moved(module, len(sizes))
    return [
        Problem(module, loss, (data.train_x[p], data.train_y[p]), w, dtype=dtype, **options)
        for p, w in zip(parts, weights, strict=True)
    ]


def federation(sizes=SIZES, weights=None, ids=None, module=None, **options):
    data, parts = helpers.classification(sizes)
    module = module or net()
    w, others = moved(module, len(sizes))
    ids = list(range(len(sizes))) if ids is None else ids
    chosen = [(weights or others)[i] for i in ids]
    return history(
        module, data, parts, stored(w, chosen, w, ids=ids), **{"dtype": torch.float64, **options}
    )


def ask(made, **options):
    return fldiag.diagnose(made, "matching", **{"k": 3, "tol": 1e-6, "on": "client", **options})


@pytest.fixture
def made(monkeypatch):
    """How many models every stack had."""
    seen = []
    original = stack.side_by_side

    def watched(problems, examples):
        seen.append(len(problems))
        return original(problems, examples)

    monkeypatch.setattr(stack, "side_by_side", watched)
    return seen


def whole(ps):
    return [p.batch(0) for p in ps]


# --- products --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "loss", [cross_entropy, lambda z, y: torch.log(torch.cosh(z - y[:, None])).sum(1).mean()]
)
def test_stacked_products_are_those_of_double_backward(loss, bias):
    ps = problems(loss=loss, bias=bias)
    for p in ps:
        p.probe()
    v = torch.randn(len(ps), ps[0].layout.size, dtype=torch.float64)
    h = stack.side_by_side(ps, whole(ps))
    expected = torch.stack([double_backward(p)(u) for p, u in zip(ps, v, strict=True)])
    assert torch.allclose(h(v), expected, rtol=1e-10, atol=1e-13)
    only = torch.zeros_like(v)
    only[2] = v[2]
    assert torch.allclose(h(only)[2], expected[2], rtol=1e-10, atol=1e-13)
    assert not h(only)[[0, 1, 3, 4]].any()  # models do not see each other


def test_a_model_that_is_not_finite_stays_alone_with_it():
    ps = problems()
    batches = whole(ps)
    ps[1].w[:] = float("nan")
    v = torch.randn(len(ps), ps[0].layout.size, dtype=torch.float64)
    found = stack.side_by_side(ps, batches)(v)
    assert torch.isnan(found[1]).any()
    for i in (0, 2, 3, 4):
        assert torch.allclose(found[i], ps[i].hessian()(v[i]), rtol=1e-10, atol=1e-13)


# --- searches in lockstep --------------------------------------------------------------------------------------


def planted():
    easy = torch.cat([torch.tensor([50.0, 40, 30]), torch.zeros(97)]).double()
    hard = torch.linspace(0, 1, 100).double()
    return torch.stack([hard, easy, 2 * hard, easy + 1, hard.flip(0)])


def searches(count, **options):
    given = {
        "which": "largest",
        "tol": 1e-6,
        "max_products": 90,
        "miss": 0.05,
        "noise": 1e-12,
        "seed": 0,
        "limit": None,
        "strict": True,
        "device": "cpu",
        "progress": None,
    }
    return [Search(100, 3, **{**given, **options}).steps() for _ in range(count)]


def test_those_that_are_done_leave_and_all_find_what_they_find_alone():
    d, active = planted(), []

    def operator(rows):
        active.append(list(rows))
        return lambda v: d[list(rows)] * v

    found = batched_lanczos(operator, searches(5))
    for pairs, entries in zip(found, d, strict=True):
        alone = lanczos(
            lambda v, entries=entries: entries * v,
            100,
            3,
            tol=1e-6,
            max_products=90,
            noise=1e-12,
            strict=True,
        )
        assert torch.equal(pairs.vectors, alone.vectors) and (pairs.values == alone.values).all()
        assert pairs.products == alone.products and pairs.overlooked == alone.overlooked
    assert found[1].products < found[0].products
    assert active[:2] == [[0, 1, 2, 3, 4], [0, 2, 4]] and all(
        len(b) < len(a) for a, b in pairwise(active)
    )


def test_one_that_fails_says_so_and_the_others_go_on():
    d = planted()
    d[2] = float("nan")
    found = batched_lanczos(lambda rows: lambda v: d[list(rows)] * v, searches(5))
    assert isinstance(found[2], FldiagError) and "not finite" in found[2].what
    assert [round(float(found[i].values[0]), 6) for i in (0, 1, 3, 4)] == [1, 50, 51, 1]


def test_a_product_that_raises_raises():
    def operator(rows):
        def product(v):
            raise KeyboardInterrupt

        return product

    with pytest.raises(KeyboardInterrupt):
        batched_lanczos(operator, searches(2))


# --- eigenpairs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_eigenpairs_of_a_stack_are_those_of_each_alone(made, dtype):
    options = SPECTRUM if dtype == torch.float64 else {**SPECTRUM, "tol": 1e-3}
    found = stack.eigenpairs(problems(dtype=dtype), **options)
    again = stack.eigenpairs(problems(dtype=dtype), **options)
    rtol = 1e-10 if dtype == torch.float64 else 1e-5
    for pairs, same, p in zip(found, again, problems(dtype=dtype), strict=True):
        alone = strict_pairs(p, **options)
        assert (
            pairs.values == pytest.approx(alone.values, rel=rtol)
            and pairs.products == alone.products
        )
        assert torch.allclose(
            (pairs.vectors @ alone.vectors.T).abs(), torch.eye(3).double(), atol=1e3 * rtol
        )
        assert (pairs.converged == alone.converged).all() and torch.equal(
            pairs.vectors, same.vectors
        )
    assert max(made) == len(SIZES)


def test_progress_counts_all_products():
    seen = []
    found = stack.eigenpairs(problems(), **SPECTRUM, progress=lambda *a: seen.append(a))
    assert [done for done, _, _ in seen] == list(range(1, len(seen) + 1)) and len(seen) == sum(
        p.products for p in found
    )
    assert {total for _, total, _ in seen} == {100 * len(SIZES)}


def test_memory_bounds_the_stack(made):
    ps = problems()
    size, graph = ps[0].layout.size, ps[0].probe().graph_bytes * max(SIZES)
    two = 2 * 2 * (graph + 8 * size * 100) + 2  # half of it for the stack
    assert all(stack.eigenpairs(problems(memory=two), **SPECTRUM))
    assert max(made[1:]) == 2  # the first one compares on few examples
    made.clear()
    assert stack.eigenpairs(problems(memory=two // 2), **SPECTRUM) == [None] * len(SIZES)


def test_a_stack_that_disagrees_is_not_used(monkeypatch):
    right = LinearLink.shift
    monkeypatch.setattr(
        LinearLink, "shift", lambda self, g, w: right(self, g, w) * (1 if w.ndim == 2 else 1.001)
    )
    assert stack.eigenpairs(problems(), **SPECTRUM) == [None] * len(SIZES)


def test_what_cannot_be_stacked_goes_alone():
    ps = problems()
    ps[0].w[0] = float("nan")
    ps[3].w[:] = 1e300
    assert [p is None for p in stack.eigenpairs(ps, **SPECTRUM)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert stack.eigenpairs(ps[1:2], **SPECTRUM) == [None]


def test_a_loss_that_cannot_be_taken_apart_goes_alone():
    ps = problems()
    for p in ps[:2]:
        p.__dict__["_facts"] = dataclasses.replace(p.probe(), per_example=None)
    assert [found is None for found in stack.eigenpairs(ps, **SPECTRUM)] == [
        True,
        True,
        False,
        False,
        False,
    ]


# --- the rule --------------------------------------------------------------------------------------------------


def test_groups_follow_shapes_and_not_the_order():
    network = Network(net().eval())
    sizes = {3: 40, 0: 20, 7: 41, 1: 19, 2: 22, 9: 400}
    expected = [[1, 0, 2], [3, 7], [9]]
    for order in (list(sizes), sorted(sizes), sorted(sizes, reverse=True)):
        assert stack.groups(network, {c: sizes[c] for c in order}, "auto") == expected
    assert stack.groups(network, sizes, "off") == [[c] for c in sizes]
    many = stack.groups(network, dict.fromkeys(range(40), 30), "auto")
    assert (
        sorted(c for g in many for c in g) == list(range(40)) and max(map(len, many)) == stack.ROWS
    )
    backwards = stack.groups(network, dict.fromkeys(reversed(range(40)), 30), "auto")
    assert backwards == many
    big = stack.WORK // network.size
    assert stack.groups(network, {0: big, 1: big}, "auto") == [[0, 1]]
    assert stack.groups(network, {0: big + 1, 1: big + 1}, "auto") == [[0], [1]]
    assert stack.groups(network, {0: big + 1, 1: big + 1}, "on") == [[0, 1]]


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)),
    ],
    ids=["convolution", "buffers", "curved"],
)
def test_other_networks_are_not_stacked(module):
    network = Network(module().eval())
    assert stack.groups(network, {0: 5, 1: 5}, "auto") == [[0], [1]]
    with pytest.raises(FldiagError, match="cannot be stacked"):
        stack.groups(network, {0: 5, 1: 5}, "on")


# --- matching --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["client", "both", "global"])
@pytest.mark.slow
def test_matching_is_the_same_table_with_and_without(made, data):
    alone = ask(federation(), on=data, stack="off")
    assert not made
    together = ask(federation(), on=data)
    assert max(made) >= 3
    columns = [c for c in alone if c not in ("value", "residual")]
    assert alone[columns].equals(together[columns])
    angles = alone.metric.str.contains("angle")
    assert np.allclose(
        alone.value[~angles], together.value[~angles], rtol=1e-10, atol=1e-13, equal_nan=True
    )
    assert np.allclose(
        alone.value[angles], together.value[angles], atol=1e-5
    )  # the arc cosine at 1 loses half the digits
    assert together.equals(ask(federation(), on=data))


def test_the_order_of_the_clients_does_not_matter():
    a, b = ask(federation()), ask(federation(ids=[3, 0, 4, 2, 1]))
    for client in range(len(SIZES)):
        rows = [
            f[(f.client == client) & (f.metric == "eigenvalue") & (f.moment == "trained")]
            for f in (a, b)
        ]
        assert rows[0].value.tolist() == rows[1].value.tolist() and len(rows[0]) == 3
        assert rows[0].residual.tolist() == rows[1].residual.tolist()
    assert b[(b.metric == "trace") & (b.moment == "trained")].client.tolist() == [3, 0, 4, 2, 1]


@pytest.mark.parametrize("stacking", ["on", "off"])
def test_a_client_whose_product_fails_is_named(monkeypatch, stacking):
    _, weights = moved(net(), len(SIZES))
    weights[2][0] = 0.123456789
    product = ChainOperator.__call__

    def broken(self, v):
        found = product(self, v)
        if self.products < 2:  # that with which forms are compared
            return found
        return found * torch.where(self._w[..., :1] == weights[2][0], float("nan"), 1.0)

    monkeypatch.setattr(ChainOperator, "__call__", broken)
    frame = ask(federation(weights=weights), stack=stacking)
    notes = frame[frame.metric == "missing"]
    assert (
        notes.client.tolist() == [2]
        and "client 2 is left out: a Hessian-vector product is not finite" in notes.note.iloc[0]
    )
    assert sorted(
        set(frame[(frame.metric == "eigenvalue") & (frame.moment == "trained")].client)
    ) == [0, 1, 3, 4]
    assert frame[(frame.metric == "trace") & (frame.moment == "trained")].client.tolist() == [
        0,
        1,
        3,
        4,
    ]


def test_broken_and_empty_clients_are_named_in_order():
    _, weights = moved(net(), len(SIZES))
    weights[3][:] = float("nan")
    frame = ask(federation(sizes=(20, 0, 17, 40, 15), weights=weights, ids=[3, 0, 1, 2, 4]))
    assert frame[frame.metric == "missing"].client.tolist() == [3, 1]
    assert one(frame, "eigenvalue", client=4, index=1, moment="trained").converged


def test_an_interrupt_leaves_everything_as_it_was():
    made, state = federation(), torch.get_rng_state()
    expected = ask(federation())

    def stop(done, total, text):
        if "on client data, " in text and "trace" not in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(made, progress=stop)
    assert torch.equal(state, torch.get_rng_state()) and ask(made).equals(expected)


def test_stack_on_where_it_cannot_be():
    torch.manual_seed(0)
    with pytest.raises(FldiagError, match="cannot be stacked"):
        ask(
            federation(module=nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))),
            stack="on",
            max_products=4,
            deflate=0,
        )
